"""Replies of a vLLM server over HTTP, read into rollouts.

    rollouts = read_reply(body, prompt_ids=prompt_ids)      a whole reply, in any form
    joiner = ReplyJoiner(); joiner.add(chunk) …             a stream of /inference/v1/generate
    rollouts = read_reply(joiner.finish(), …)

Endpoints: ``/inference/v1/generate`` (token ids in and out: the one that has all of it),
``/v1/completions`` and ``/v1/chat/completions`` (routes; the support only as far as their logprobs
go). As the server writes them, or packed by ``middleware``. Those of completions and chat need
``"return_token_ids": true``, and ``"return_tokens_as_token_ids": true`` with logprobs.

What is missing is refused by name: it may be that the server has no routes
(``--enable-return-routed-experts``), or that completions and chat were streamed, which drops them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from packhorse._nvtx import ranged, ranged_methods
from packhorse.packed.collate import SupportRows
from packhorse.packed.wire_format import (
    Buffer,
    WireArray,
    WireLimits,
    as_view,
    damaged,
    malformed,
)
from packhorse.packed.wire_frames import MAGIC, decode_frame
from packhorse.packed.wire_json import decode_json
from packhorse.packed.wire_tree import join_tree
from packhorse.replay.client_fields import (
    LogprobRows,
    Rows,
    read_ids,
    read_logprobs,
    read_mask,
    read_routes,
)
from packhorse.replay.rollout import CandidateRows, EngineModel, Rollout, make_rollout

#: a server's own JSON holds the blobs: its text is as large as what it carries
REPLY_LIMITS: Final = WireLimits(max_json_bytes=2**29)
_MAX_CHOICES: Final = 4096
_WHY_ROUTES: Final = (
    "the server has --enable-return-routed-experts off, or the reply of completions or chat was"
    " streamed, which drops them"
)
_WHY_MASK: Final = (
    "the server has --return-sampling-mask off (vLLM 0.28), or the endpoint is completions or chat,"
    " which have no such field"
)


@dataclass(frozen=True, eq=False)
class HttpChoice:
    """One sampled response as the reply has it; what the reply lacks is None."""

    index: int
    prompt_ids: np.ndarray | None  # [P] int32
    response_ids: np.ndarray  # [R] int32
    routes: np.ndarray | None  # [rows, L, K]
    logprobs: LogprobRows | None  # R rows
    mask: Rows | None  # R rows: the sampler's support
    weight_versions: tuple[tuple[str, int, int], ...]  # (version, response tokens [start, stop))
    finish_reason: str | None
    stop_reason: int | str | None
    text: str | None
    num_cached_tokens: int | None


@ranged
def load_reply(body: Buffer, *, limits: WireLimits = REPLY_LIMITS) -> Any:
    """The JSON tree of a reply's bytes: the server's own, or packed in either form.

    Raises:
        TypeError: ``body`` is not contiguous bytes.
        TransientWireError, WireFormatError, ImportError: as ``decode_json``, ``decode_frame``.
    """
    view = as_view("load_reply", body)
    if bytes(view[: len(MAGIC)]) == MAGIC:
        return join_tree(decode_frame(view, limits=limits).fields, limits=limits)
    return decode_json(view, limits=limits)


@ranged
def read_choices(
    tree: Any,
    *,
    prompt_ids: Sequence[int] | np.ndarray | None = None,
    side_channels: bool = True,
    limits: WireLimits = REPLY_LIMITS,
) -> list[HttpChoice]:
    """The choices of a reply in the order of their index.

    Args:
        tree: what ``load_reply`` or ``ReplyJoiner.finish`` gives.
        prompt_ids: [P] what was sent; where the reply has its own, they must be equal.
        side_channels: False: routes, masks and logprobs are not looked at (an evaluation).
        limits: ``max_bytes`` bounds the routes of all choices together.

    Raises:
        WireFormatError: the reply is an error, or a field of it is not what a server writes.
    """
    name = "read_choices"
    if not isinstance(tree, dict):
        malformed(name, f"the reply is {type(tree).__name__}, no object")
    if tree.get("error") is not None:
        malformed(name, f"the server answers with an error: {error_text(tree)}")
    choices = tree.get("choices")
    if not isinstance(choices, list) or not choices:
        malformed(name, "the reply has no choices", "/choices")
    if len(choices) > _MAX_CHOICES:
        malformed(name, f"{len(choices)} choices are above {_MAX_CHOICES}", "/choices")
    sent = None if prompt_ids is None else np.asarray(prompt_ids)
    with _not_too_deep(name, "/prompt_token_ids"):
        own = _prompt_of(name, "/prompt_token_ids", tree.get("prompt_token_ids"), sent)
    cached = _cached_tokens(tree)
    left, read, seen = limits.max_bytes, [], set()
    for i, choice in enumerate(choices):
        place = f"/choices/{i}"
        if not isinstance(choice, dict):
            malformed(name, "it is no object", place)
        with _not_too_deep(name, place):
            one = _read_choice(name, place, choice, own, sent, cached, side_channels, left)
        if one.index in seen:
            malformed(name, f"index {one.index} is there twice", place)
        seen.add(one.index)
        left -= 0 if one.routes is None else one.routes.nbytes
        read.append(one)
    return sorted(read, key=lambda one: one.index)


@ranged
def read_reply(
    reply: Any,
    *,
    prompt_ids: Sequence[int] | np.ndarray | None = None,
    routes: bool = True,
    routes_start: int = 0,
    support: Literal["mask", "logprobs"] | None = "mask",
    logprobs: bool = True,
    model: EngineModel | None = None,
    on_cut: Literal["refuse", "mark"] = "refuse",
    limits: WireLimits = REPLY_LIMITS,
) -> list[Rollout]:
    """The rollouts of a reply, one a choice, in the order of their index.

    Args:
        reply: its bytes, or the tree of ``load_reply`` or ``ReplyJoiner.finish``.
        prompt_ids: [P] what was sent, where the reply does not have them.
        routes: they were asked for. False: they are not looked at.
        routes_start: the row that they were asked from (``routed_experts_prompt_start``).
        support: where it is taken from: ``sampling_mask``, or the finite ones of the best
            candidates (``logprobs_mode="processed_logprobs"`` and more of them than top_k keeps).
            With the mask, those candidates that are there must be in it. None: not wanted.
        logprobs: they were asked for. False, without ``support="logprobs"``: not looked at.
        model, on_cut: as in ``make_rollout``.
        limits: of the reply.

    Raises:
        TransientWireError: its bytes are damaged or cut short.
        WireFormatError: it is an error, a field is not what a server writes, or is not there.
        ValueError: what ``make_rollout`` refuses.
    """
    name = "read_reply"
    if support not in ("mask", "logprobs", None):
        raise ValueError(f"{name}: support must be 'mask', 'logprobs' or None, got {support!r}")
    tree = reply
    if isinstance(reply, bytes | bytearray | memoryview):
        tree = load_reply(reply, limits=limits)
    evaluation = not (routes or support or logprobs)
    choices = read_choices(tree, prompt_ids=prompt_ids, side_channels=not evaluation, limits=limits)
    request_id = tree.get("request_id", tree.get("id"))
    rollouts = []
    for choice in choices:
        place = f"/choices/{choice.index}"
        if choice.prompt_ids is None:
            malformed(
                name,
                'the prompt\'s ids are neither given nor there ("return_token_ids": true)',
                "/prompt_token_ids",
            )
        sampled = choice.response_ids.size > 0
        if routes and choice.routes is None and sampled:
            malformed(name, f"there are none: {_WHY_ROUTES}", f"{place}/routed_experts")
        if support == "mask" and choice.mask is None and sampled:
            malformed(name, f"there is none: {_WHY_MASK}", f"{place}/sampling_mask")
        rows = choice.logprobs
        if (logprobs or support == "logprobs") and rows is None and sampled:
            malformed(name, "there are none: they were not asked for", f"{place}/logprobs")
        if rows is not None and support == "logprobs" and not rows.top.token_ids.size and sampled:
            malformed(name, "there are no candidates beside the sampled ones", f"{place}/logprobs")
        rollouts.append(
            make_rollout(
                choice.prompt_ids,
                choice.response_ids,
                routes=choice.routes if routes else None,
                routes_start=routes_start,
                logprobs=rows.logprobs if rows is not None and logprobs else None,
                support=_support_of(choice) if support == "mask" else None,
                candidates=_candidates_of(choice) if support else None,
                model=model,
                on_cut=on_cut,
                weight_versions=[
                    (start, stop, version) for version, start, stop in choice.weight_versions
                ],
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                num_cached_tokens=choice.num_cached_tokens,
                request_id=request_id if isinstance(request_id, str) else None,
                index=choice.index,
            )
        )
    return rollouts


def _support_of(choice: HttpChoice) -> SupportRows | None:
    return None if choice.mask is None else SupportRows(*choice.mask)


def _candidates_of(choice: HttpChoice) -> CandidateRows | None:
    rows = choice.logprobs
    if rows is None or not rows.top.token_ids.size:
        return None
    return CandidateRows(rows.top.token_ids, rows.top_logprobs, rows.top.offsets)


@contextmanager
def _not_too_deep(function: str, place: str) -> Iterator[None]:
    """Lists in lists that JSON may hold, but an error about them cannot spell."""
    try:
        yield
    except RecursionError:
        malformed(function, "it is nested too deeply", place)


def error_text(tree: Any) -> str:
    """What an error object of a server says, in one short line."""
    error = tree.get("error", tree) if isinstance(tree, dict) else tree
    if isinstance(error, dict):
        error = next((error[key] for key in ("message", "detail") if key in error), error)
    try:
        text = " ".join(str(error).split())
    except RecursionError:
        text = f"a {type(error).__name__} that is nested too deeply"
    return text if len(text) <= 2000 else text[:2000] + "…"


def _prompt_of(function: str, place: str, given: Any, sent: np.ndarray | None) -> np.ndarray | None:
    ids = read_ids(function, place, given)
    if ids is not None and sent is not None and not np.array_equal(ids, sent):
        malformed(function, f"{ids.size} ids are not the {sent.size} that were sent", place)
    return ids


def _cached_tokens(tree: Mapping[str, Any]) -> int | None:
    usage = tree.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int and cached >= 0 else None


def _read_choice(
    function: str,
    place: str,
    choice: Mapping[str, Any],
    prompt_ids: np.ndarray | None,
    sent: np.ndarray | None,
    cached: int | None,
    side_channels: bool,
    max_bytes: int,
) -> HttpChoice:
    index = choice.get("index", 0)
    if type(index) is not int or not 0 <= index < 2**31:
        malformed(function, f"index is {str(index)[:40]!r}", place)
    own = _prompt_of(function, f"{place}/prompt_token_ids", choice.get("prompt_token_ids"), sent)
    ids = read_ids(function, f"{place}/token_ids", choice.get("token_ids"))
    if ids is None:
        malformed(
            function,
            'the reply has no token ids; send "return_token_ids": true',
            f"{place}/token_ids",
        )
    routes = logprobs = mask = None
    spans: tuple[tuple[str, int, int], ...] = ()
    if side_channels:
        routes = read_routes(
            function, f"{place}/routed_experts", choice.get("routed_experts"), max_bytes=max_bytes
        )
        logprobs = read_logprobs(function, f"{place}/logprobs", choice.get("logprobs"))
        if logprobs is not None:
            _check_logprobs(function, f"{place}/logprobs", logprobs, ids)
        mask = read_mask(function, f"{place}/sampling_mask", choice.get("sampling_mask"))
        if mask is not None and mask.offsets.size != ids.size + 1:
            malformed(
                function,
                f"{mask.offsets.size - 1} rows for {ids.size} sampled tokens",
                f"{place}/sampling_mask",
            )
        spans = _read_spans(
            function, f"{place}/weight_versions", choice.get("weight_versions"), ids.size
        )
    message = choice.get("message")
    text = choice.get("text", message.get("content") if isinstance(message, dict) else None)
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if not isinstance(reason, str | None) or type(stop) not in (int, str, type(None)):
        malformed(function, f"finish_reason is {reason!r:.40}, stop_reason {stop!r:.40}", place)
    return HttpChoice(
        index=index,
        prompt_ids=next((given for given in (own, prompt_ids, sent) if given is not None), None),
        response_ids=ids,
        routes=routes,
        logprobs=logprobs,
        mask=mask,
        weight_versions=spans,
        finish_reason=reason,
        stop_reason=stop,
        text=text if isinstance(text, str) else None,
        num_cached_tokens=cached,
    )


def _check_logprobs(function: str, place: str, rows: LogprobRows, ids: np.ndarray) -> None:
    if rows.token_ids.size != ids.size:
        malformed(function, f"{rows.token_ids.size} logprobs of {ids.size} tokens", place)
    differ = np.flatnonzero(rows.token_ids != ids)
    if differ.size:
        token = int(differ[0])
        malformed(
            function,
            f"token {token} is {rows.token_ids[token]}, but {ids[token]} in token_ids",
            place,
        )


def _read_spans(
    function: str, place: str, given: Any, num_tokens: int
) -> tuple[tuple[str, int, int], ...]:
    """Versions of the weights over the response's tokens, one after another."""
    if given is None:
        return ()
    if not isinstance(given, list):
        malformed(function, f"it is {type(given).__name__}, no list", place)
    spans = []
    end = 0
    for i, span in enumerate(given):
        values: list[Any] = []
        if isinstance(span, dict):
            values = [span.get(key) for key in ("version", "start", "end")]
        if [type(value) for value in values] != [str, int, int]:
            malformed(function, "a span must hold version, start and end", f"{place}/{i}")
        version, start, stop = values
        if start != end or not start <= stop <= num_tokens:
            malformed(
                function,
                f"tokens {start} to {stop} of {num_tokens} do not follow token {end}",
                f"{place}/{i}",
            )
        spans.append((version, start, stop))
        end = stop
    return tuple(spans)


# --- streams --------------------------------------------------------------------------------------


@ranged_methods()
class ReplyJoiner:
    """The chunks of a stream of ``/inference/v1/generate``, joined to one reply.

    Token ids, masks and logprobs come in parts; routes with a choice's last chunk.
    """

    def __init__(self, *, limits: WireLimits = REPLY_LIMITS) -> None:
        self._limits = limits
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt_ids: Any = None
        self._usage: Any = None
        self._done = False

    @property
    def done(self) -> bool:
        """The server has said that the stream is over."""
        return self._done

    def add(self, tree: Any) -> list[tuple[int, np.ndarray]]:
        """Take the next chunk, parsed; gives (index, new token ids) for each of its choices.

        Raises:
            WireFormatError: it is an error of the server, or not what it writes.
        """
        name = "ReplyJoiner.add"
        if self._done:
            malformed(name, "a chunk follows the end of the stream")
        if not isinstance(tree, dict):
            malformed(name, f"a chunk is {type(tree).__name__}, no object")
        if tree.get("error") is not None:
            malformed(name, f"the server ends the stream: {error_text(tree)}")
        choices = tree.get("choices")
        if not isinstance(choices, list):
            malformed(name, "a chunk has no choices", "/choices")
        if tree.get("prompt_token_ids") is not None:
            self._prompt_ids = tree["prompt_token_ids"]
        if tree.get("usage") is not None:
            self._usage = tree["usage"]
        added = []
        for i, one in enumerate(choices):
            with _not_too_deep(name, f"/choices/{i}"):
                added.append(self._add_choice(name, f"/choices/{i}", one))
        return added

    def _add_choice(self, name: str, place: str, choice: Any) -> tuple[int, np.ndarray]:
        if not isinstance(choice, dict):
            malformed(name, "it is no object", place)
        index = choice.get("index", 0)
        if type(index) is not int or not 0 <= index < _MAX_CHOICES:
            malformed(name, f"index is {str(index)[:40]!r}", place)
        held = self._choices.setdefault(
            index, {"ids": [], "masks": [], "logprobs": [], "last": None}
        )
        if held["last"] is not None:
            malformed(name, f"a chunk follows the last one of choice {index}", place)
        ids = read_ids(name, f"{place}/token_ids", choice.get("token_ids"))
        if ids is None:
            malformed(name, "the chunk has no token ids", f"{place}/token_ids")
        held["ids"].append(ids)
        held["masks"].append(read_mask(name, f"{place}/sampling_mask", choice.get("sampling_mask")))
        held["logprobs"].append(read_logprobs(name, f"{place}/logprobs", choice.get("logprobs")))
        if choice.get("finish_reason") is not None:
            held["last"] = choice
        return index, ids

    def end(self) -> None:
        """The server has said that the stream is over (``[DONE]``, or the last frame)."""
        self._done = True

    def finish(self) -> dict[str, Any]:
        """The whole reply.

        Raises:
            TransientWireError: the stream ended before its end.
            WireFormatError: only some chunks of a choice have a field.
        """
        name = "ReplyJoiner.finish"
        if not self._done:
            damaged(name, "the stream is cut short: its end has not come")
        for index, held in self._choices.items():
            if held["last"] is None:
                damaged(name, f"the stream is cut short: choice {index} has no finish_reason")
        return {
            "prompt_token_ids": self._prompt_ids,
            "usage": self._usage,
            "choices": [
                _joined(name, index, held) for index, held in sorted(self._choices.items())
            ],
        }


def _joined(name: str, index: int, held: dict[str, Any]) -> dict[str, Any]:
    place = f"/choices/{index}"
    counts = [ids.size for ids in held["ids"]]
    masks = _all_or_none(name, f"{place}/sampling_mask", held["masks"], counts)
    logprobs = _all_or_none(name, f"{place}/logprobs", held["logprobs"], counts)
    joined: dict[str, Any] = {
        "index": index,
        "token_ids": WireArray(np.concatenate(held["ids"])),
        "sampling_mask": None,
        "logprobs": None,
    }
    for key in ("routed_experts", "weight_versions", "finish_reason", "stop_reason"):
        joined[key] = held["last"].get(key)
    if masks is not None:
        rows = _join_rows(masks)
        joined["sampling_mask"] = {
            "token_ids": WireArray(rows.token_ids),
            "offsets": WireArray(rows.offsets),
        }
    if logprobs is not None:
        top = _join_rows([rows.top for rows in logprobs])
        joined["logprobs"] = {
            "token_ids": WireArray(np.concatenate([rows.token_ids for rows in logprobs])),
            "logprobs": WireArray(np.concatenate([rows.logprobs for rows in logprobs])),
            "top_token_ids": WireArray(top.token_ids),
            "top_logprobs": WireArray(np.concatenate([rows.top_logprobs for rows in logprobs])),
            "offsets": WireArray(top.offsets),
        }
    return joined


def _all_or_none(name: str, place: str, parts: list[Any], counts: list[int]) -> list[Any] | None:
    """The parts that are there; None where no chunk has one. A chunk without tokens may lack it."""
    there = [part for part in parts if part is not None]
    lacking = [i for i, part in enumerate(parts) if part is None and counts[i]]
    if there and lacking:
        malformed(name, f"chunk {lacking[0]} has none, others do", place)
    return there or None


def _join_rows(parts: list[Rows]) -> Rows:
    counts = np.concatenate([np.diff(rows.offsets) for rows in parts])
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return Rows(np.concatenate([rows.token_ids for rows in parts]), offsets)
