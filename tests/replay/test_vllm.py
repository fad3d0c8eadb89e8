"""Settings for a capture from vLLM, version by version, and replies in every documented shape.

Nothing here needs vLLM: tests/vllm runs the real one. Replies marked RECORDED hold what vLLM 0.32.0
returned (the packaged capture); those of other versions are WRITTEN from the shapes that their
sources document, around the same numbers.
"""

import importlib.metadata
import math
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packhorse.replay.rollout import EngineModel
from packhorse.replay.vllm import CaptureSettings, RequestReader, capture_settings
from packhorse.replay.vllm import read_request_output as read
from packhorse.replay.vllm_preflight import read_layers
from packhorse.replay.vllm_rules import FIRST, NEWEST, RULES

DATA = Path(__file__).parents[2] / "replay" / "data"
VERSIONS = tuple(f"0.{minor}.0" for minor in range(11, NEWEST + 1))


def settings(version: str = "0.32.0", **arguments: Any) -> CaptureSettings:
    return capture_settings(version=version, **arguments)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("minor", [14, 20, 21, 22, 27, 28, 30, 31, 32, 33])
def test_arguments_are_those_that_the_version_has(minor):
    support = "mask" if minor >= 28 else "logprobs"
    made = settings(f"0.{minor}.1", support=support, sampling={"top_k": 20}, engine={"seed": 3})
    expected = {
        "seed": 3, "enable_return_routed_experts": True, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    if minor < 22:
        expected["async_scheduling"] = False
    if minor >= 31:
        expected["enable_prefix_caching"] = True
    if support == "mask":
        expected["return_sampling_mask"] = True
    else:
        expected["max_logprobs"] = 36
    assert made.engine == expected
    assert made.environment == ({"VLLM_USE_V2_MODEL_RUNNER": "1"} if minor >= 28 else {})
    assert made.sampling == {
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": 20,
        "logprobs": 0 if support == "mask" else 36, "flat_logprobs": True,
    }  # fmt: skip


def test_on_a_cpu_the_model_runs_eagerly():
    assert settings(device="cpu").engine["enforce_eager"] is True
    assert "enforce_eager" not in settings().engine


@pytest.mark.parametrize(
    ("want", "first"),
    [
        ({}, 14), ({"support": "mask", "routes": False}, 28),
        ({"support": "logprobs", "routes": False}, 11),
    ],
    ids=["routes", "mask", "logprobs"],
)  # fmt: skip
def test_a_version_without_what_is_needed_is_refused(want, first):
    for minor in range(9, NEWEST + 3):
        if minor >= first:
            settings(f"0.{minor}.0", sampling={"top_k": 9} if want else None, **want)
            continue
        with pytest.raises(ValueError, match=rf"vLLM 0\.{minor}\.0 has no .* with 0\.{first}$"):
            settings(f"0.{minor}.0", sampling={"top_k": 9}, **want)


def asked_for(rule: Any, value: Any) -> dict[str, Any]:
    """Arguments with which the rule applies, with ``value`` at its setting."""
    needs = rule.needs.split()
    support = "mask" if "mask" in needs else "logprobs" if "logprobs" in needs else None
    first = FIRST.get(support or "logprobs", 0)
    if support == "mask" and rule.first < first:
        support = "logprobs"
    arguments: dict[str, Any] = {
        "routes": "routes" in needs, "support": support, "engine": {},
        "sampling": {"top_k": 20} if support else {},
    }  # fmt: skip
    if rule.device:
        arguments["device"] = rule.device
    place, _, name = rule.setting.partition(".")
    if place in ("engine", "sampling"):
        arguments[place] = arguments[place] | {name: value}
    else:
        arguments[name or place] = value
    return arguments


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: f"{rule.setting}-{rule.first}-{rule.needs}"
)
def test_each_rule_refuses_in_its_versions_and_names_the_setting(rule):
    """And in the versions beside them, unless another rule has it there."""
    arguments = asked_for(rule, rule.example)
    for minor in (rule.first, rule.last):
        with pytest.raises(ValueError, match=r"^capture_settings: ") as raised:
            settings(f"0.{minor}.0", **arguments)
        said = str(raised.value)
        assert said == (
            f"capture_settings: {rule.setting}={rule.example!r} with vLLM 0.{minor}: {rule.because}"
        )
    needs = set(rule.needs.split())
    for minor in (rule.first - 1, rule.last + 1):
        others = [
            other for other in RULES
            if other is not rule and other.setting == rule.setting
            and other.first <= minor <= other.last and needs & set(other.needs.split())
            and other.wrong(rule.example) and other.device in ("", arguments.get("device", "cuda"))
        ]  # fmt: skip
        oldest = min(FIRST[need] for need in needs if need in FIRST) if needs & set(FIRST) else 11
        if not others and oldest <= minor <= NEWEST and not (needs == {"mask"} and minor < 28):
            settings(f"0.{minor}.0", **arguments)


def test_the_table_in_the_docs_is_that_of_the_rules():
    lines = (DATA.parents[1] / "docs" / "capture.md").read_text().splitlines()
    table = [[part.strip() for part in line.split(" | ")] for line in lines]
    found = [(row[0], row[2], row[3]) for row in table if len(row) == 4 and "=" in row[0]]
    assert found == [
        (
            f"| `{rule.setting}={rule.example!r}`",
            f"0.{rule.first} \N{EN DASH}" + (f" 0.{rule.last}" if rule.last < NEWEST else ""),
            f"{rule.because} |",
        )
        for rule in RULES
    ]  # fmt: skip


def test_what_no_rule_names_is_kept():
    engine = {"tensor_parallel_size": 2, "max_model_len": 4096, "enable_expert_parallel": True}
    sampling = {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "stop": ["x"], "min_tokens": 2, "n": 4}
    made = settings(support="mask", engine=engine, sampling=sampling)
    assert made.engine.items() >= engine.items()
    assert made.sampling.items() >= sampling.items()
    assert (engine, len(sampling)) == ({**engine}, 6), "the caller's are not changed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"support": "mask"}, r"sampling\.top_k=None must be positive for support"),
        ({"support": "mask", "sampling": {"top_k": 0}}, r"sampling\.top_k=0 must be positive"),
        ({"support": "mask", "sampling": {"top_k": -1}}, r"top_k=vocab_size keeps all"),
        ({"support": "logprobs", "sampling": {"top_k": 0}}, "and so does logprobs=-1"),
        ({"support": "logprobs", "sampling": {"top_k": 9, "logprobs": 8}}, "rows would be cut"),
        (
            {"support": "logprobs", "sampling": {"top_k": 9}, "engine": {"max_logprobs": 20}},
            r"engine\.max_logprobs=20 for sampling\.logprobs=25",
        ),
        ({"support": "guess"}, "support must be 'mask', 'logprobs' or None"),
        ({"endpoint": "embeddings"}, "endpoint must be 'completions'"),
        ({"endpoint": "chat", "streaming": True}, "'chat' then has no routes"),
        ({"version": "dev"}, "version must be like '0.32.0', got 'dev'"),
        (
            {"preflight": True, "engine": {"worker_extension_cls": "mine.Worker"}},
            "let that class inherit LayerReport",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        capture_settings(**{"version": "0.32.0"} | arguments)


def test_support_of_the_whole_vocabulary_is_asked_for_by_its_size_or_by_all_logprobs():
    assert settings(support="mask", sampling={"top_k": 151936}).sampling["top_k"] == 151936
    made = settings(support="logprobs", sampling={"logprobs": -1})
    assert made.engine["max_logprobs"] == -1


def test_an_evaluation_may_be_greedy_and_filtered_without_logprobs():
    made = settings(routes=True, logprobs=False, sampling={"temperature": 0.0, "top_p": 0.5})
    assert "logprobs" not in made.sampling
    assert "logprobs_mode" not in made.engine


@pytest.mark.parametrize(
    ("version", "endpoint", "rows", "sent"),
    [
        ("0.21.0", None, 5, None), ("0.22.0", None, 5, 5), ("0.28.0", None, 9, 8),
        ("0.29.3", None, 9, 8), ("0.30.0", None, 9, 9), ("0.32.0", None, 12, 9),
        ("0.27.0", "completions", 5, None), ("0.28.0", "completions", 5, 5),
        ("0.32.0", "generate", 0, None),
    ],
)  # fmt: skip
def test_rows_are_asked_from_where_the_version_allows(version, endpoint, rows, sent):
    """0.28 and 0.29 die of a start at the prompt's end (9); before 0.22 there is no such field."""
    made = settings(version, endpoint=endpoint)
    expected = {} if sent is None else {"routed_experts_prompt_start": sent}
    assert made.routes_from(rows, 9) == expected


def test_arguments_of_the_server_are_the_engines():
    made = settings(
        support="mask", endpoint="generate", sampling={"top_k": 9}, device="cpu",
        engine={"max_model_len": 64, "compilation_config": {"level": 0}, "enable_lora": False,
                "quantization": None},
    )  # fmt: skip
    assert made.server_arguments() == [
        "--max-model-len", "64", "--compilation-config", '{"level": 0}', "--no-enable-lora",
        "--enable-return-routed-experts", "--enable-prefix-caching", "--enforce-eager",
        "--logprobs-mode", "processed_logprobs", "--return-sampling-mask", "--enable-scale-out",
    ]  # fmt: skip


def installed(monkeypatch, version: str) -> None:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_the_installed_version_counts_and_its_runner_and_plugins_are_looked_at(monkeypatch):
    installed(monkeypatch, "0.31.2.dev3+cpu")
    assert capture_settings().minor == 31
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="only runner 2 has routes"):
        capture_settings()
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    point = SimpleNamespace(name="bias")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    with pytest.raises(ValueError, match=r"plugins bias of vllm\.logits_processors"):
        capture_settings()
    monkeypatch.setenv("VLLM_PLUGINS", "")
    capture_settings()


def test_a_version_after_the_newest_known_is_like_it():
    for version in ("0.40.0", "1.2.0"):
        assert settings(version).engine == settings(f"0.{NEWEST}.0").engine


# --- replies --------------------------------------------------------------------------------------


@dataclass
class Completion:
    """vLLM's ``CompletionOutput``; what a version has not is not set."""

    token_ids: Any
    logprobs: Any = None
    index: int = 0
    finish_reason: str | None = "length"
    stop_reason: Any = None


@dataclass
class Request:
    """vLLM's ``RequestOutput``."""

    prompt_token_ids: Any
    outputs: list[Any]
    request_id: str = "r"
    finished: bool = True
    num_cached_tokens: int | None = 0


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Flat:
    """vLLM's ``FlatLogprobs``."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def recorded() -> SimpleNamespace:
    """RECORDED: one request of vLLM 0.32.0, as plain lists."""
    with np.load(DATA / "vllm_tiny_moe.npz") as fields:
        name = 2

        def part(values: str, offsets: str) -> Any:
            bounds = fields[offsets]
            return fields[values][bounds[name] : bounds[name + 1]]

        first, last = fields["response_offsets"][name : name + 2].tolist()
        rows = fields["support_offsets"][first : last + 1].tolist()
        return SimpleNamespace(
            prompt=part("prompt_ids", "prompt_offsets").tolist(),
            response=part("response_ids", "response_offsets").tolist(),
            routes=part("routed_experts", "route_offsets"),
            logprobs=fields["sampled_logprobs"][first:last].astype(float).tolist(),
            topk_ids=fields["topk_ids"][first:last].tolist(),
            topk_logprobs=fields["topk_logprobs"][first:last].astype(float).tolist(),
            mask=[fields["support_ids"][a:b].tolist() for a, b in pairwise(rows)],
        )


def as_dicts(recorded: SimpleNamespace, wrap: Any = Logprob) -> list[dict[int, Any]]:
    """The sampled token first, merged with its place among the best."""
    tokens = []
    for i, sampled in enumerate(recorded.response):
        entries = {sampled: wrap(recorded.logprobs[i])}
        for id, logprob in zip(recorded.topk_ids[i], recorded.topk_logprobs[i], strict=True):
            entries.setdefault(id, wrap(logprob))
        tokens.append(entries)
    return tokens


def as_flat(
    recorded: SimpleNamespace, start: int = 0, stop: int | None = None, gap: int = 0
) -> Flat:
    """The sampled token, then the best, where it stands again; may begin behind other entries."""
    flat = Flat(token_ids=[9] * gap, logprobs=[0.0] * gap)
    for i in range(start, len(recorded.response) if stop is None else stop):
        flat.start_indices.append(len(flat.token_ids))
        flat.token_ids += [recorded.response[i], *recorded.topk_ids[i]]
        flat.logprobs += [recorded.logprobs[i], *recorded.topk_logprobs[i]]
        flat.end_indices.append(len(flat.token_ids))
    return flat


#: how a version returns routes: its number, the dtype, where the array is split
SHAPES = {
    "0.14, 0.16 to 0.20: one array of int32": ("0.18.0", np.int32, False),
    "0.21: the prompt's on the request, int16": ("0.21.0", np.int16, True),
    "0.22 to 0.33: one array of uint8": ("0.32.0", np.uint8, False),
    "0.22 to 0.33: uint16 of more than 256 experts": ("0.33.0", np.uint16, False),
}


def request_of(recorded: SimpleNamespace, dtype: Any, split: bool, **more: Any) -> Request:
    completion = Completion(recorded.response, **more)
    request = Request(recorded.prompt, [completion])
    routes = recorded.routes.astype(dtype)
    if split:
        request.prompt_routed_experts = routes[: len(recorded.prompt)]  # type: ignore[attr-defined]
        routes = routes[len(recorded.prompt) :]
    completion.routed_experts = routes  # type: ignore[attr-defined]
    return request


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["dicts", "numbers", "flat", "flat from a part"])
def test_every_version_is_read_to_the_same_rollout(recorded, shape, form):
    """WRITTEN shapes around RECORDED numbers."""
    version, dtype, split = SHAPES[shape]
    logprobs = {
        "dicts": lambda: as_dicts(recorded), "numbers": lambda: as_dicts(recorded, float),
        "flat": lambda: as_flat(recorded), "flat from a part": lambda: as_flat(recorded, gap=7),
    }[form]()  # fmt: skip
    made = settings(version, support="logprobs", sampling={"top_k": 20, "logprobs": 20})
    (rollout,) = read(request_of(recorded, dtype, split, logprobs=logprobs), made)
    assert rollout.prompt_ids.tolist() == recorded.prompt
    assert rollout.response_ids.tolist() == recorded.response
    assert rollout.routes.dtype == np.uint8
    assert np.array_equal(rollout.routes, recorded.routes)
    assert rollout.logprobs.tolist() == pytest.approx(recorded.logprobs)
    ids, offsets = rollout.support.token_ids.tolist(), rollout.support.row_offsets.tolist()
    assert [sorted(ids[a:b]) for a, b in pairwise(offsets)] == [sorted(m) for m in recorded.mask]
    assert rollout.num_added == rollout.num_floored == rollout.num_cut == 0


def with_mask(request: Request, mask: Any) -> Request:
    request.outputs[0].sampling_mask = None if mask is None else SimpleNamespace(token_ids=mask)
    return request


def test_a_mask_is_read_beside_one_logprob_a_token(recorded):
    """0.28 on. WRITTEN: 0.28 to 0.31 have no weight versions."""
    own = [{id: Logprob(lp)} for id, lp in zip(recorded.response, recorded.logprobs, strict=True)]
    for version in ("0.28.0", "0.32.0"):
        request = with_mask(request_of(recorded, np.uint8, False, logprobs=own), recorded.mask)
        if version == "0.32.0":
            spans = [SimpleNamespace(start=0, end=3, version="a"),
                     SimpleNamespace(start=3, end=len(recorded.response), version="b")]  # fmt: skip
            request.outputs[0].weight_versions = spans
        made = settings(version, support="mask", sampling={"top_k": 20})
        (rollout,) = read(request, made)
        ids, offsets = rollout.support.token_ids.tolist(), rollout.support.row_offsets.tolist()
        assert [ids[a:b] for a, b in pairwise(offsets)] == recorded.mask
        assert rollout.logprobs.tolist() == pytest.approx(recorded.logprobs)
        expected = [(0, 3, "a"), (3, len(recorded.response), "b")] if version == "0.32.0" else []
        assert [tuple(span) for span in rollout.weight_versions] == expected


@pytest.mark.parametrize("masks_at_the_end", [False, True], ids=["0.32 on", "0.28 to 0.31"])
def test_parts_of_a_stream_are_joined(recorded, masks_at_the_end):
    """Masks with each part, or all with the last; routes with the last. WRITTEN."""
    made = settings(support="mask", sampling={"top_k": 20})
    reader = RequestReader(made, delta=True)
    count = len(recorded.response)
    for start in range(0, count, 5):
        stop = min(start + 5, count)
        part = Completion(recorded.response[start:stop], as_flat(recorded, start, stop))
        part.finish_reason = "length" if stop == count else None
        if masks_at_the_end:
            mask = recorded.mask if stop == count else None
        else:
            mask = recorded.mask[start:stop]
        part.sampling_mask = None if mask is None else SimpleNamespace(token_ids=mask)
        part.routed_experts = recorded.routes if stop == count else None
        request = Request(recorded.prompt, [part], finished=stop == count)
        if stop < count:
            with pytest.raises(ValueError, match="request r is not finished"):
                read(request, made)
        reader.add(request)
    (rollout,) = reader.finish()
    assert rollout.response_ids.tolist() == recorded.response
    assert np.array_equal(rollout.routes, recorded.routes)
    assert rollout.logprobs.tolist() == pytest.approx(recorded.logprobs)
    assert rollout.support.token_ids.tolist() == [id for row in recorded.mask for id in row]


def test_several_responses_are_in_the_order_of_their_index(recorded):
    first = Completion(recorded.response, index=0)
    second = Completion(recorded.response[:1], index=1)
    first.routed_experts, second.routed_experts = (  # type: ignore[attr-defined]
        recorded.routes, recorded.routes[: len(recorded.prompt)],
    )  # fmt: skip
    made = settings(logprobs=False)
    rollouts = read(Request(recorded.prompt, [second, first]), made)
    assert [rollout.index for rollout in rollouts] == [0, 1]
    assert [rollout.routes.shape[0] for rollout in rollouts] == [
        len(recorded.routes), len(recorded.prompt),
    ]  # fmt: skip


def test_a_request_that_was_aborted_before_its_first_token_is_empty():
    completion = Completion([], None, finish_reason="abort")
    made = settings(support="mask", sampling={"top_k": 20})
    (rollout,) = read(Request([5, 6], [completion]), made)
    assert rollout.response_ids.size == 0
    assert rollout.routes is None
    assert rollout.support.row_offsets.tolist() == [0]
    assert rollout.finish_reason == "abort"


def test_a_sampled_token_that_is_filtered_out_or_missing_is_floored_and_added():
    """Its own logprob -inf, and it left out of its candidates."""
    made = settings(routes=False, support="logprobs", sampling={"top_k": 2})
    completion = Completion([5, 6], [{5: Logprob(-math.inf), 3: Logprob(0.0)}, {4: Logprob(0.0)}])
    (rollout,) = read(Request([1], [completion]), made)
    assert rollout.logprobs.tolist() == [-9999.0, -9999.0]
    assert rollout.support.token_ids.tolist() == [3, 5, 4, 6]
    assert (rollout.num_floored, rollout.num_added) == (2, 2)


def changed(recorded: SimpleNamespace, what: str) -> tuple[Request, str]:
    request = with_mask(
        request_of(recorded, np.uint8, False, logprobs=as_dicts(recorded)), recorded.mask
    )
    part = request.outputs[0]
    if what == "routes":
        part.routed_experts = None
        return request, "response 0: it has no routes"
    if what == "mask":
        part.sampling_mask = None
        return request, "response 0: it has no sampling mask"
    if what == "logprobs":
        part.logprobs = None
        return request, "response 0: it has no logprobs"
    if what == "short logprobs":
        part.logprobs = part.logprobs[1:]
        return (
            request,
            f"logprobs of {len(recorded.response) - 1} tokens for {len(recorded.response)}",
        )
    if what == "short mask":
        part.sampling_mask = SimpleNamespace(token_ids=recorded.mask[1:])
        return request, f"has {len(recorded.mask) - 1} rows for {len(recorded.mask)} sampled tokens"
    if what == "a lost row":
        part.routed_experts = recorded.routes[1:]
        return request, f"has {len(recorded.routes) - 1} rows"
    if what == "zeros":
        part.routed_experts = np.zeros_like(recorded.routes)
        return request, "is all zeros"
    if what == "raw logprobs":
        part.logprobs = [{id: value - 0.5 for id, value in token.items()}
                         for token in as_dicts(recorded, float)]  # fmt: skip
        return request, "the logprobs are not those that were sampled from"
    if what == "another split":
        request.prompt_routed_experts = recorded.routes[:, :2]
        return request, "prompt_routed_experts .* are not"
    if what == "an encoder":
        request.encoder_prompt_token_ids = [1]
        return request, "it has an encoder"
    request.prompt_token_ids = None
    return request, "it has no prompt ids"


@pytest.mark.parametrize(
    "what",
    ["routes", "mask", "logprobs", "short logprobs", "short mask", "a lost row", "zeros",
     "raw logprobs", "another split", "an encoder", "prompt"],
)  # fmt: skip
def test_a_reply_that_lacks_what_was_asked_for_is_refused(recorded, what):
    made = settings(support="mask", sampling={"top_k": 20, "logprobs": 20})
    request, message = changed(recorded, what)
    with pytest.raises(ValueError, match=message):
        read(request, made)


def test_what_is_no_reply_is_refused(recorded):
    made = settings(logprobs=False)
    with pytest.raises(TypeError, match="output must be a RequestOutput, got list"):
        read([], made)
    reader = RequestReader(made)
    with pytest.raises(ValueError, match="no output came"):
        reader.finish()
    reader.add(Request([1], [Completion([2], finish_reason=None)]))
    with pytest.raises(ValueError, match="response 0 of request r has not ended"):
        reader.finish()
    with pytest.raises(ValueError, match="an output of request s after those of r"):
        reader.add(Request([1], [], request_id="s"))


# --- the preflight --------------------------------------------------------------------------------

LAYER = ("model.layers.{}.mlp.experts", 1, "BaseRouter", 2, 8, "Method", False, True)


def report(*layers: tuple, **more: Any) -> dict[str, Any]:
    return {"layers": list(layers), "num_layers": 4, "vocab_size": 512, "eager": True,
            "device": "cuda:0"} | more  # fmt: skip


def layer(number: int, **more: Any) -> tuple:
    names = ("name", "layer", "router", "topk", "num_experts", "kernel", "monolithic", "bound")
    values = dict(zip(names, LAYER, strict=True)) | {"layer": number} | more
    return tuple(values.values())


def test_reports_of_all_workers_become_the_model():
    found = read_layers("preflight", [report(layer(3), layer(1))] * 2, True)
    assert found.model == EngineModel(4, 2, 8, (1, 3), 512)
    assert [at.layer for at in found.layers] == [1, 3]
    assert str(found) == "2 of 4 layers have experts, 2 of 8 a token, by Method"


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report(layer(0, bound=False, monolithic=True))], "layers 0 are not captured"),
        ([report(layer(0), device="cpu", eager=False)], "on a CPU without enforce_eager"),
        ([report()], "the model has no layer with experts"),
        ([report(layer(0), layer(0))], "layer 0 is there twice"),
        ([report(layer(0), layer(1, topk=4))], "layers differ in their experts"),
        ([report(layer(0)), report(layer(1))], "worker 1 has other MoE layers than worker 0"),
    ],
)
def test_an_engine_that_would_not_capture_is_refused(reports, message):
    with pytest.raises(ValueError, match=message):
        read_layers("preflight", reports, True)
    with pytest.raises(RuntimeError, match="no worker answered"):
        read_layers("preflight", [], True)


def test_without_routes_nothing_is_held_against_the_layers():
    assert read_layers("preflight", [report()], False).model.moe_layers is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling": {"top_k": 5, "temperature": "1"}}, "sampling.temperature must be a number"),
        (
            {"engine": {"pipeline_parallel_size": "2"}},
            "engine.pipeline_parallel_size must be a num",
        ),
        ({"sampling": {"top_k": 5, "logprobs": "5"}}, "sampling.logprobs must be an integer"),
        ({"engine": {"max_logprobs": "9"}}, "engine.max_logprobs must be an integer, got '9'"),
    ],
)
def test_a_setting_of_another_type_is_named(given, message):
    with pytest.raises(TypeError, match=f"capture_settings: {message}"):
        capture_settings(
            version="0.32.0", **{"support": "logprobs", "sampling": {"top_k": 5}, **given}
        )


@pytest.mark.parametrize("setting", ["temperature", "top_p", "min_p"])
def test_a_number_that_is_none_is_refused(setting):
    sampling = {"top_k": 5, setting: float("nan")}
    with pytest.raises(ValueError, match=f"sampling.{setting} must be a number, got nan"):
        capture_settings(version="0.32.0", support="logprobs", sampling=sampling)


def test_a_version_is_read_whatever_follows_and_a_build_without_tags_is_no_old_release():
    for version, minor in (("0.30.0rc1", 30), ("0.33.0+cpu", 33), ("0.32", 32), ("1.0", 33)):
        assert capture_settings(version=version, device="cuda").minor == minor
    with pytest.raises(ValueError, match="built from a source without its tags"):
        capture_settings(version="0.1.dev1+gabcdef0")
