"""Rollouts from a vLLM server over HTTP, asynchronously.

    async with RolloutClient("http://127.0.0.1:8000", support="mask") as client:
        [rollout] = await client.generate(prompt_ids, {"temperature": 1.0, "top_k": 20})
        session = client.start_session(prompt_ids, num_layers=48, topk=8, vocab_size=151936)
        await session.turn({"temperature": 1.0, "top_k": 20, "max_tokens": 256})

``generate`` speaks to ``/inference/v1/generate`` (``--enable-scale-out``), which has routes, mask
and weight versions; ``complete`` and ``chat`` to the OpenAI endpoints. Replies are asked for packed
and read in whatever form they come. Needs ``aiohttp`` (``packhorse[client]``).

aiohttp, not httpx: its parser is C, bodies of megabytes arrive in pieces without a copy through
h11, and vLLM has it already; it also serves (``proxy``).
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from packhorse.packed.wire_format import WireFormatError, WireLimits, malformed
from packhorse.packed.wire_json import decode_json
from packhorse.replay.client_fields import read_ids
from packhorse.replay.client_http import RetryPolicy, ServerError, ServerUnreachable, Transport
from packhorse.replay.client_session import RolloutSession
from packhorse.replay.client_stream import ReplyStream
from packhorse.replay.middleware import FRAMES_TYPE, JSON_TYPE
from packhorse.replay.rollout import EngineModel, Rollout
from packhorse.replay.vllm_http import read_reply

__all__ = ["RetryPolicy", "RolloutClient", "ServerError", "ServerUnreachable"]

GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_ACCEPT: Final = {
    "json": f"{JSON_TYPE}, application/json;q=0.9, text/event-stream;q=0.9",
    "frames": f"{FRAMES_TYPE}, application/json;q=0.9, text/event-stream;q=0.9",
    "plain": "application/json, text/event-stream",
}
#: set by the client, by its own arguments
_OWN: Final = ("logprobs", "top_logprobs", "routed_experts_prompt_start", "stream", "prompt")
_DEFAULT_RETRY: Final = RetryPolicy()


class RolloutClient:
    """A client of one vLLM server. Open it with ``async with``; any number of requests may wait.

    Args:
        url: ``http://host:port``.
        model: its name at the server, which completions and chat need where it serves several.
        routes: the server runs with ``--enable-return-routed-experts``, and each rollout must have
            its routes.
        support: ``"mask"``: it runs with ``--return-sampling-mask``, which only ``generate``
            returns. ``"logprobs"``: the finite ones of the ``num_logprobs`` best. None: no support.
        num_logprobs: candidates asked for at each token beside the sampled one; with
            ``support="logprobs"`` at least top_k, and more for ties.
        engine: sizes of the model; what is known is checked (``make_rollout``).
        on_cut: what a support row that was cut is: an error, or marked.
        form: ``"json"`` or ``"frames"``: packed so by ``middleware`` or ``proxy`` where there is
            one; ``"plain"``: as the server writes it.
        retry, timeout_s, max_concurrency, headers: of the requests; ``timeout_s`` is one attempt's.
        max_body_bytes: of one reply.

    Raises:
        ImportError: without ``aiohttp``, when it is opened.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        routes: bool = True,
        support: Literal["mask", "logprobs"] | None = "mask",
        num_logprobs: int = 0,
        engine: EngineModel | None = None,
        on_cut: Literal["refuse", "mark"] = "refuse",
        form: Literal["json", "frames", "plain"] = "frames",
        retry: RetryPolicy = _DEFAULT_RETRY,
        timeout_s: float | None = 600.0,
        max_concurrency: int = 64,
        max_body_bytes: int = 2**29,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        name = "RolloutClient"
        if support not in ("mask", "logprobs", None):
            raise ValueError(f"{name}: support must be 'mask', 'logprobs' or None, got {support!r}")
        if form not in _ACCEPT:
            raise ValueError(f"{name}: form must be 'json', 'frames' or 'plain', got {form!r}")
        if type(num_logprobs) is not int or num_logprobs < (support == "logprobs"):
            raise ValueError(f"{name}: num_logprobs={num_logprobs!r} with support={support!r}")
        self._model = model
        self._routes = bool(routes)
        self._support = support
        self._num_logprobs = num_logprobs
        self._engine = engine
        self._on_cut = on_cut
        self._accept = _ACCEPT[form]
        self._limits = WireLimits(max_json_bytes=max_body_bytes, max_bytes=2 * max_body_bytes)
        self._transport = Transport(
            url,
            retry=retry,
            timeout_s=timeout_s,
            max_concurrency=max_concurrency,
            max_body_bytes=max_body_bytes,
            headers=None if headers is None else dict(headers),
        )

    async def __aenter__(self) -> "RolloutClient":
        await self._transport.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._transport.close()

    @property
    def num_retries(self) -> int:
        """Requests that were sent again so far."""
        return self._transport.num_retries

    @property
    def support(self) -> str | None:
        return self._support

    async def version(self) -> str:
        """The server's version of vLLM.

        Raises:
            ServerError, ServerUnreachable, WireFormatError: as ``generate``.
        """
        tree = await self._transport.get("/version", decode_json)
        if not isinstance(tree, dict) or not isinstance(tree.get("version"), str):
            raise WireFormatError("RolloutClient.version: the server names none")
        return tree["version"]

    async def tokenize(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a text, or of messages by the chat template with the generation prompt, as
        the server's tokenizer makes them (``/tokenize``).

        Raises:
            ServerError, ServerUnreachable, TransientWireError, WireFormatError: as ``generate``.
        """
        payload: dict[str, Any] = {"prompt": prompt}
        if not isinstance(prompt, str):
            payload = {
                "messages": [dict(message) for message in prompt],
                "add_generation_prompt": True,
            }
        if self._model is not None:
            payload["model"] = self._model
        return await self._transport.post(
            "/tokenize", payload, accept="application/json", parse=_read_tokens
        )

    # --- requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Mapping[str, Any] | None = None,
        *,
        routes_start: int = 0,
        evaluation: bool = False,
    ) -> list[Rollout]:
        """The ``n`` responses to a prompt, through ``/inference/v1/generate``.

        Args:
            prompt_ids: [P] integers.
            sampling: vLLM's sampling parameters.
            routes_start: ask for the rows from this one on, at most P.
            evaluation: ask for tokens alone: no routes, mask or logprobs. (vLLM 0.32 sends the
                first two all the same; the middleware takes them out.)

        Raises:
            ValueError: before sending, where the server would answer 500 without a word: a mask
                needs temperature > 0 and top_k > 0; or what ``make_rollout`` refuses.
            ServerError: the server refuses (its text is in the message), or has failed at every
                attempt.
            ServerUnreachable: no answer after all attempts.
            TransientWireError: damaged or cut short at every attempt.
            WireFormatError: a reply that cannot be read, or lacks what was asked for.
        """
        name = "RolloutClient.generate"
        ids = _listed(name, prompt_ids)
        payload = self._generate_payload(name, ids, sampling, routes_start, evaluation)
        return await self._post(
            GENERATE, payload, prompt_ids=ids, routes_start=routes_start, evaluation=evaluation,
            mask=True,
        )  # fmt: skip

    async def complete(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        sampling: Mapping[str, Any] | None = None,
        *,
        routes_start: int = 0,
        evaluation: bool = False,
    ) -> list[Rollout]:
        """The ``n`` responses to a text or to token ids, through ``/v1/completions``: with
        ``support="logprobs"`` or None. Arguments and errors as ``generate``."""
        name = "RolloutClient.complete"
        self._check_openai(name, evaluation)
        ids = None if isinstance(prompt, str) else _listed(name, prompt)
        payload = self._openai_payload(name, sampling, routes_start, evaluation)
        payload["prompt"] = prompt if ids is None else ids
        if not evaluation:
            payload["logprobs"] = self._num_logprobs
        return await self._post(
            COMPLETIONS, payload, prompt_ids=ids, routes_start=routes_start, evaluation=evaluation,
            mask=False,
        )  # fmt: skip

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any] | None = None,
        *,
        routes_start: int = 0,
        evaluation: bool = False,
    ) -> list[Rollout]:
        """The ``n`` responses to messages, through ``/v1/chat/completions``, as ``complete``."""
        name = "RolloutClient.chat"
        self._check_openai(name, evaluation)
        payload = self._openai_payload(name, sampling, routes_start, evaluation)
        payload["messages"] = [dict(message) for message in messages]
        if not evaluation:
            payload.update(logprobs=True, top_logprobs=self._num_logprobs)
        return await self._post(
            CHAT, payload, prompt_ids=None, routes_start=routes_start, evaluation=evaluation,
            mask=False,
        )  # fmt: skip

    @asynccontextmanager
    async def stream(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Mapping[str, Any] | None = None,
        *,
        routes_start: int = 0,
    ) -> AsyncIterator[ReplyStream]:
        """Tokens of ``/inference/v1/generate`` as they are sampled, and the rollouts at the end.

            async with client.stream(prompt_ids, sampling) as stream:
                async for index, new_ids in stream: ...
                rollouts = stream.rollouts()

        It is sent again until it has begun, not later. Leaving the block early closes the
        connection and ends the request at the server; ``stream.abort()`` ends it with what there
        is. Arguments and errors as ``generate``.
        """
        name = "RolloutClient.stream"
        ids = _listed(name, prompt_ids)
        payload = self._generate_payload(name, ids, sampling, routes_start, False)
        payload["stream"] = True
        read = partial(
            _read_all, num_choices=_num_choices(sampling), prompt_ids=ids,
            routes=self._routes, routes_start=routes_start,
            support=self._support, logprobs=True, model=self._engine, on_cut=self._on_cut,
            limits=self._limits,
        )  # fmt: skip
        async with self._transport.stream(GENERATE, payload, accept=self._accept) as reply:
            stream = ReplyStream(self._transport, reply, read, self._limits)
            try:
                yield stream
            finally:
                await stream.close()

    def start_session(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        check_prefix: bool = False,
        **trace: Any,
    ) -> RolloutSession:
        """A trajectory of several turns: ``RolloutSession``, whose arguments these are."""
        return RolloutSession(self, prompt_ids, check_prefix=check_prefix, **trace)

    # --- parts ------------------------------------------------------------------------------------

    async def _post(
        self,
        path: str,
        payload: dict[str, Any],
        *,
        prompt_ids: list[int] | None,
        routes_start: int,
        evaluation: bool,
        mask: bool,
    ) -> list[Rollout]:
        support = self._support if mask or self._support == "logprobs" else None
        parse = partial(
            _read_all,
            num_choices=_num_choices(payload.get("sampling_params", payload)),
            prompt_ids=prompt_ids,
            routes=self._routes and not evaluation,
            routes_start=routes_start,
            support=None if evaluation else support,
            logprobs=not evaluation,
            model=self._engine,
            on_cut=self._on_cut,
            limits=self._limits,
        )
        accept = self._accept
        if evaluation:
            for kind in (JSON_TYPE, FRAMES_TYPE):
                accept = accept.replace(kind, f"{kind};fields=none")
        return await self._transport.post(path, payload, accept=accept, parse=parse)

    def _generate_payload(
        self, name: str, ids: list[int], sampling: Any, routes_start: int, evaluation: bool
    ) -> dict[str, Any]:
        given = self._checked_sampling(name, sampling)
        if not 0 <= routes_start <= len(ids):
            raise ValueError(f"{name}: routes_start={routes_start} of {len(ids)} prompt ids")
        if not evaluation:
            given["logprobs"] = self._num_logprobs
            if routes_start:
                given["routed_experts_prompt_start"] = routes_start
        payload: dict[str, Any] = {"token_ids": ids, "sampling_params": given}
        if self._model is not None:
            payload["model"] = self._model
        return payload

    def _openai_payload(
        self, name: str, sampling: Any, routes_start: int, evaluation: bool
    ) -> dict[str, Any]:
        payload = self._checked_sampling(name, sampling)
        payload.update(return_token_ids=True, return_tokens_as_token_ids=True)
        if self._model is not None:
            payload["model"] = self._model
        if routes_start and not evaluation:
            payload["routed_experts_prompt_start"] = routes_start
        return payload

    def _check_openai(self, name: str, evaluation: bool) -> None:
        if self._support == "mask" and not evaluation:
            raise ValueError(
                f"{name}: support='mask', but completions and chat return no sampling mask; use"
                " generate, or a client with support='logprobs' or None"
            )

    def _checked_sampling(self, name: str, sampling: Any) -> dict[str, Any]:
        """A copy. The server answers what is refused here with status 500 and no text."""
        given = {} if sampling is None else dict(sampling)
        for key in _OWN:
            if key in given:
                raise ValueError(f"{name}: {key} is set by the client")
        for key, value in given.items():
            own = key == "temperature" and self._support is not None  # checked below
            # JSON has no such number: null would be sent, which is the server's default
            if isinstance(value, float) and not np.isfinite(value) and not own:
                raise ValueError(f"{name}: {key} must be finite, got {value!r}")
        if self._support is None:
            return given
        temperature, top_k = given.get("temperature"), given.get("top_k")
        if not _is_positive(temperature):
            raise ValueError(
                f"{name}: temperature must be given and above 0 for a support (at 0 no filter is"
                f" applied), got {temperature!r}"
            )
        if self._support == "mask" and (type(top_k) is not int or top_k <= 0):
            raise ValueError(
                f"{name}: top_k must be given and above 0 for a sampling mask (the size of the"
                f" vocabulary for none), got {top_k!r}"
            )
        if self._support == "logprobs" and type(top_k) is int and top_k > self._num_logprobs:
            raise ValueError(
                f"{name}: top_k={top_k} keeps more than num_logprobs={self._num_logprobs}"
            )
        return given


def _read_tokens(body: Any) -> list[int]:
    tree = decode_json(body)
    given = tree.get("tokens") if isinstance(tree, dict) else None
    ids = read_ids("RolloutClient.tokenize", "/tokens", given)
    if ids is None:
        malformed("RolloutClient.tokenize", "the reply has no token ids", "/tokens")
    return ids.tolist()


def _num_choices(sampling: Mapping[str, Any] | None) -> Any:
    return 1 if sampling is None else sampling.get("n", 1)


def _read_all(reply: Any, *, num_choices: Any, **keywords: Any) -> list[Rollout]:
    """``read_reply``, of as many responses as were asked for."""
    rollouts = read_reply(reply, **keywords)
    if type(num_choices) is int and len(rollouts) != num_choices:
        malformed(
            "RolloutClient", f"it has {len(rollouts)} choices for n={num_choices}", "/choices"
        )
    return rollouts


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < np.inf


def _listed(name: str, prompt_ids: Any) -> list[int]:
    array = np.asarray(prompt_ids)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{name}: prompt_ids must be integers [P], P > 0, got {array.shape}")
    return array.tolist()
