"""Capture from vLLM: settings for a need, what the engine will capture, and replies as rollouts.

    settings = capture_settings(support="mask", sampling={"top_k": 20, "top_p": 0.9})
    llm = LLM(folder, **settings.engine)               # or AsyncEngineArgs, or server_arguments()
    model = preflight(llm, settings).model
    outputs = llm.generate(prompts, SamplingParams(**settings.sampling))
    rollouts = [r for o in outputs for r in read_request_output(o, settings, model=model)]
    ...                                                # new weights
    reset_after_weights(llm, "step 7")

What a version would get wrong is refused before the engine starts (``vllm_rules``); what slips
through is found in the data (``rollout``). vLLM is imported only to ask for its version and its
plugins.

Source: vLLM ``SamplingParams``, ``EngineArgs``, ``RequestOutput``, 0.11 to 0.33.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from packhorse._nvtx import ranged, ranged_methods
from packhorse.packed.host import host_count
from packhorse.replay.vllm_outputs import RequestReader, read_request_output
from packhorse.replay.vllm_preflight import EngineLayers, MoeLayer, read_layers
from packhorse.replay.vllm_rules import FIRST, LOGPROBS, MASK, NEWEST, ROUTES, VALUES, check_rules

__all__ = [
    "CaptureSettings",
    "EngineLayers",
    "MoeLayer",
    "RequestReader",
    "capture_settings",
    "preflight",
    "preflight_async",
    "read_request_output",
    "reset_after_weights",
    "reset_after_weights_async",
]

#: Logprobs asked for beyond top_k: ids that tie with the last one are kept by some samplers.
TIE_ROOM: Final = 16
#: Worker methods of the preflight.
EXTENSION: Final = "packhorse.replay.vllm_preflight.LayerReport"

_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
_NEUTRAL: Final = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True)
@ranged_methods("server_arguments", "routes_from")
class CaptureSettings:
    """What to start vLLM with and to ask of it, and what its replies must hold."""

    version: str
    routes: bool
    support: Literal["mask", "logprobs"] | None
    logprobs: bool
    engine: dict[str, Any]  # arguments of LLM and AsyncEngineArgs
    sampling: dict[str, Any]  # arguments of SamplingParams
    environment: dict[str, str] = field(default_factory=dict)  # before vLLM is imported
    endpoint: str | None = None  # completions, chat or generate; None: in this process
    device: str = "cuda"

    @property
    def minor(self) -> int:
        """x of version 0.x."""
        return _minor("CaptureSettings", self.version)

    def server_arguments(self) -> list[str]:
        """``engine`` as command-line arguments of ``vllm serve``."""
        arguments = []
        for name, value in self.engine.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif value is False:
                arguments.append("--no-" + flag[2:])
            elif value is not None:
                text = json.dumps(value) if isinstance(value, dict | list) else str(value)
                arguments += [flag, text]
        if self.endpoint == "generate":
            arguments.append("--enable-scale-out")
        return arguments

    def routes_from(self, num_rows: int, num_prompt_tokens: int) -> dict[str, int]:
        """The request field that asks for the routes from a row on, where this version has it.

        Args:
            num_rows: rows that are there (``Trace.num_rows``).
            num_prompt_tokens: P of the request.

        Returns:
            ``{"routed_experts_prompt_start": n}`` for ``SamplingParams`` or the body of a request,
            with the largest n that the version takes; nothing where that is 0.
        """
        name = "CaptureSettings.routes_from"
        start = min(host_count(num_rows, f"{name}: num_rows"), num_prompt_tokens)
        kind = "routes from a row" + ("" if self.endpoint is None else " over HTTP")
        if not self.routes or self.minor < FIRST[kind]:
            return {}
        if self.minor < FIRST["routes from the prompt's end"]:
            start = min(start, num_prompt_tokens - 1)
        return {"routed_experts_prompt_start": start} if start > 0 else {}


@ranged
def capture_settings(
    *,
    routes: bool = True,
    support: Literal["mask", "logprobs"] | None = None,
    logprobs: bool = True,
    engine: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    version: str | None = None,
    device: Literal["cuda", "cpu"] | None = None,
    endpoint: Literal["completions", "chat", "generate"] | None = None,
    streaming: bool = False,
    preflight: bool = False,
) -> CaptureSettings:
    """The settings with which vLLM returns what is needed, or a refusal that names the wrong one.

    Args:
        routes: the experts of each token.
        support: ids that top-k, top-p and min-p left at each response token. "mask": vLLM's own
            sampling mask (0.28 on), which needs ``top_k``. "logprobs": the finite ones of the
            processed logprobs, ``top_k`` and some more a token, since ids may tie with the last.
        logprobs: of the sampled tokens.
        engine, sampling: arguments of ``LLM`` and ``SamplingParams`` that the caller wants; they
            are kept, and completed.
        version: of vLLM; by default the installed one, whose plugins are looked at too.
        device: what the engine runs on; by default what the installed vLLM is for, and "cuda" for
            a version that is named.
        endpoint: of the HTTP server; by default the engine is in this process or a child of it.
        streaming: the reply comes in parts.
        preflight: let the workers report their layers (``worker_extension_cls``), which an engine
            in another process needs for ``preflight``.

    Raises:
        ValueError: this version has not what is needed; a setting makes it wrong (docs/capture.md
            has the table); ``top_k`` is missing; fewer logprobs are asked for than ``top_k``.
        TypeError: a setting that is compared is of another type.
        ModuleNotFoundError: there is no vLLM, and no ``version``.
    """
    name = "capture_settings"
    if support not in (None, "mask", "logprobs"):
        raise ValueError(f"{name}: support must be 'mask', 'logprobs' or None, got {support!r}")
    if endpoint not in (None, "completions", "chat", "generate"):
        raise ValueError(
            f"{name}: endpoint must be 'completions', 'chat', 'generate' or None, got {endpoint!r}"
        )
    installed = version is None
    if version is None:
        import vllm

        version = vllm.__version__
    minor = _minor(name, version)
    if device is None:
        device = _installed_device() if installed else "cuda"
    wants = frozenset(
        word
        for word, wanted in (
            (ROUTES, routes),
            (MASK, support == "mask"),
            (LOGPROBS, support == "logprobs"),
            (VALUES, logprobs and support is None),
        )
        if wanted
    )
    for want in (ROUTES, MASK, LOGPROBS):
        if want in wants and minor < FIRST[want]:
            raise ValueError(
                f"{name}: vLLM {version} has no {want}: they came with 0.{FIRST[want]}"
            )
    own_engine, own_sampling = dict(engine or {}), dict(sampling or {})
    given: dict[str, Any] = {"device": device}
    given |= {f"engine.{key}": value for key, value in own_engine.items()}
    given |= {f"sampling.{key}": value for key, value in own_sampling.items()}
    given |= {"request.endpoint": endpoint, "request.streaming": streaming}
    check_rules(name, minor, wants, device, given)
    if endpoint in ("completions", "chat") and streaming and routes:
        raise ValueError(f"{name}: request.streaming=True: {endpoint!r} then has no routes")
    if installed and wants & {MASK, LOGPROBS, VALUES}:
        _refuse_plugins(name)

    runner = {}
    if MASK in wants or (routes and minor >= FIRST["routes by runner 2"]):
        runner = {_RUNNER: "1"}
        if installed and os.environ.get(_RUNNER, "1") != "1":
            raise ValueError(
                f"{name}: {_RUNNER}={os.environ[_RUNNER]} with vLLM {version}: only runner 2 has"
                f" {'masks' if MASK in wants else 'routes'}"
            )
    ours = _engine_of(minor, wants, device)
    asked = _sampling_of(name, minor, wants, own_sampling, endpoint)
    if asked.get("logprobs") is not None:
        ours |= _max_logprobs(name, own_engine, asked["logprobs"])
    if preflight:
        other = own_engine.get("worker_extension_cls")
        if other not in (None, "", EXTENSION):
            raise ValueError(
                f"{name}: engine.worker_extension_cls={other!r} with preflight=True: let that class"
                f" inherit {EXTENSION.rpartition('.')[2]}, without preflight"
            )
        ours["worker_extension_cls"] = EXTENSION
    return CaptureSettings(
        version=version,
        routes=routes,
        support=support,
        logprobs=logprobs,
        engine=own_engine | ours,
        sampling=asked,
        environment=runner,
        endpoint=endpoint,
        device=device,
    )


def _minor(name: str, version: Any) -> int:
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if found is None:
        raise ValueError(f"{name}: version must be like '0.32.0', got {version!r}")
    if version.startswith("0.1.dev"):
        raise ValueError(
            f"{name}: vLLM {version} was built from a source without its tags: name the release"
            " that it is like, version='0.x.0'"
        )
    return NEWEST if int(found[1]) else int(found[2])


def _installed_device() -> Literal["cuda", "cpu"]:
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return "cuda"
    return "cpu" if current_platform.is_cpu() else "cuda"


def _refuse_plugins(name: str) -> None:
    """Processors of logits that vLLM loads without being told."""
    from importlib.metadata import entry_points

    found = sorted(point.name for point in entry_points(group="vllm.logits_processors"))
    if found and os.environ.get("VLLM_PLUGINS", "any") != "":
        raise ValueError(
            f"{name}: plugins {', '.join(found)} of vllm.logits_processors are installed and loaded"
            " by vLLM: what they do to the distribution is not known (VLLM_PLUGINS= turns all"
            " plugins off)"
        )


def _engine_of(minor: int, wants: frozenset[str], device: str) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    if ROUTES in wants:
        ours["enable_return_routed_experts"] = True
        if minor >= FIRST["routes by runner 2"]:
            ours["enable_prefix_caching"] = True
        if minor < FIRST["routes from a row"]:
            ours["async_scheduling"] = False
        if device == "cpu":
            ours["enforce_eager"] = True
    if wants & {MASK, LOGPROBS, VALUES}:
        ours["logprobs_mode"] = "processed_logprobs"
    if MASK in wants:
        ours["return_sampling_mask"] = True
    return ours


def _sampling_of(
    name: str, minor: int, wants: frozenset[str], own: dict[str, Any], endpoint: str | None
) -> dict[str, Any]:
    """All of a request that the distribution depends on, so that no server default comes in."""
    asked = _NEUTRAL | own
    if wants <= {ROUTES}:
        return asked
    top_k = asked.get("top_k")
    if wants & {MASK, LOGPROBS}:
        every = LOGPROBS in wants and asked.get("logprobs") == -1
        if not every and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k <= 0):
            raise ValueError(
                f"{name}: sampling.top_k={top_k!r} must be positive for support: a row would have"
                " no bound. top_k=vocab_size keeps all that top_p and min_p leave"
                + (", and so does logprobs=-1" if LOGPROBS in wants else "")
            )
    if LOGPROBS in wants:
        number = asked.setdefault("logprobs", None if top_k is None else top_k + TIE_ROOM)
        if number is not None and type(number) is not int:
            raise TypeError(f"{name}: sampling.logprobs must be an integer, got {number!r}")
        if number is None or (number != -1 and number < (top_k or 0)):
            raise ValueError(
                f"{name}: sampling.logprobs={number!r} for top_k={top_k}: rows would be cut"
            )
    elif asked.get("logprobs") is None:
        asked["logprobs"] = 0  # the sampled token's own
    if endpoint is None and minor >= FIRST["flat logprobs"]:
        asked.setdefault("flat_logprobs", True)
    return asked


def _max_logprobs(name: str, own: dict[str, Any], number: int) -> dict[str, Any]:
    """vLLM's default is 20; more than its limit is refused by the engine, request by request."""
    limit = own.get("max_logprobs")
    if limit is None:
        return {} if 0 <= number <= 20 else {"max_logprobs": number}
    if type(limit) is not int:
        raise TypeError(f"{name}: engine.max_logprobs must be an integer, got {limit!r}")
    if limit != -1 and (number == -1 or number > limit):
        raise ValueError(f"{name}: engine.max_logprobs={limit} for sampling.logprobs={number}")
    return {}


# --- a running engine -----------------------------------------------------------------------------


@ranged
def preflight(llm: Any, settings: CaptureSettings) -> EngineLayers:
    """What an engine will capture, asked of its workers before the first request.

    Args:
        llm: a ``vllm.LLM``. One whose engine is in another process needs
            ``capture_settings(preflight=True)``.
        settings: those it was started with.

    Raises:
        ValueError: a layer's kernel or router will not be captured, all would be zeros, or the
            workers disagree. All reasons in one line.
        RuntimeError: the workers cannot be asked.
    """
    return read_layers("preflight", _ask_workers(llm.collective_rpc), settings.routes)


async def preflight_async(engine: Any, settings: CaptureSettings) -> EngineLayers:
    """``preflight`` of an ``AsyncLLM``, which needs ``capture_settings(preflight=True)``."""
    try:
        reports = await engine.collective_rpc("packhorse_layers")
    except Exception as error:
        raise RuntimeError(_NOT_ASKED.format(name="preflight_async", error=error)) from error
    return read_layers("preflight_async", reports, settings.routes)


def _ask_workers(collective_rpc: Callable[..., list[Any]]) -> list[Any]:
    from packhorse.replay.vllm_preflight import LayerReport

    try:
        return collective_rpc("packhorse_layers")
    except Exception:  # started without preflight=True: sent there, where vLLM takes a function
        try:
            return collective_rpc(LayerReport.packhorse_layers)
        except Exception as error:
            raise RuntimeError(_NOT_ASKED.format(name="preflight", error=error)) from error


_NOT_ASKED: Final = (
    "{name}: the workers cannot be asked; start the engine with capture_settings(preflight=True)"
    " ({error})"
)


@ranged
def reset_after_weights(llm: Any, version: str | None = None) -> None:
    """Forget what the engine computed with its old weights. Call it after every change of them.

    Without it the prefix cache gives the next request keys, values and routes of the old policy for
    the prompt's beginning, and nothing in the reply says so.

    Args:
        llm: a ``vllm.LLM`` with no request under way.
        version: a label of the new weights; replies then carry it for each token (0.32 on).

    Raises:
        RuntimeError: requests are under way, so that the cache was not reset.
    """
    if llm.reset_prefix_cache() is False:
        raise RuntimeError(_NOT_RESET.format(name="reset_after_weights"))
    label = getattr(getattr(llm, "llm_engine", None), "set_weight_version", None)
    if version is not None and label is not None:
        label(version)


async def reset_after_weights_async(engine: Any, version: str | None = None) -> None:
    """``reset_after_weights`` of an ``AsyncLLM``: wait for its requests, or abort them, first."""
    done = engine.reset_prefix_cache()
    if inspect.isawaitable(done):
        done = await done
    if done is False:
        raise RuntimeError(_NOT_RESET.format(name="reset_after_weights_async"))
    label = getattr(engine, "update_weight_version", None)
    if version is not None and label is not None:
        await label(version)


_NOT_RESET: Final = (
    "{name}: the prefix cache was not reset: requests are under way, whose tokens are partly those"
    " of the old weights. Wait for them, or abort them, before the weights change"
)
