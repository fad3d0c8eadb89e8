"""vLLM's Python replies as rollouts: any ``RequestOutput`` of 0.11 to 0.33, by what it holds.

    routed experts   one array, or since 0.21 until 0.22 the prompt's on the request and the rest
                     on each output; int16, int32, uint8, uint16
    logprobs         a dict a token, or ``FlatLogprobs``, where the sampled token stands twice
    sampling mask    id lists, of the whole response or of one part of a stream

Nothing of vLLM is imported: attributes are looked at.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from packhorse._nvtx import ranged, ranged_methods
from packhorse.replay.rollout import CandidateRows, EngineModel, Rollout, make_rollout

if TYPE_CHECKING:
    from packhorse.replay.vllm import CaptureSettings


@ranged
def read_request_output(
    output: Any,
    settings: "CaptureSettings",
    *,
    model: EngineModel | None = None,
    routes_start: int = 0,
    on_cut: Literal["refuse", "mark"] = "refuse",
) -> list[Rollout]:
    """The responses of one finished request, each checked as ``make_rollout`` says.

    Args:
        output: a ``vllm.RequestOutput``, the last one of a request that was not streamed in parts
            (``RequestReader`` joins those).
        settings: what was asked for; what of it is missing is an error.
        model: ``preflight(...).model``. Without it MoE layers are found in the data.
        routes_start: ``routed_experts_prompt_start`` of the request.
        on_cut: as ``make_rollout`` has it.

    Raises:
        TypeError: ``output`` is no such object.
        ValueError: it is not finished, has no prompt ids, lacks what was asked for, or is wrong.
    """
    name = "read_request_output"
    outputs = getattr(output, "outputs", None)
    if not isinstance(outputs, Sequence):
        raise TypeError(f"{name}: output must be a RequestOutput, got {type(output).__name__}")
    if not getattr(output, "finished", True):
        raise ValueError(
            f"{name}: request {output.request_id} is not finished; RequestReader joins its parts"
        )
    return [
        _read_completion(name, output, _Parts(part), settings, model, routes_start, on_cut)
        for part in sorted(outputs, key=lambda part: part.index)
    ]


@ranged_methods()
class RequestReader:
    """Joins the outputs that an ``AsyncLLM`` yields for one request.

        reader = RequestReader(settings, model=model)
        async for output in engine.generate(prompt, params, request_id):
            reader.add(output)
        rollouts = reader.finish()

    Args:
        settings, model, routes_start, on_cut: as ``read_request_output`` has them.
        delta: an output holds what is new (``RequestOutputKind.DELTA``); otherwise each holds all
            so far, and the last one is kept.
    """

    def __init__(
        self,
        settings: "CaptureSettings",
        *,
        delta: bool = False,
        model: EngineModel | None = None,
        routes_start: int = 0,
        on_cut: Literal["refuse", "mark"] = "refuse",
    ) -> None:
        self._settings, self._model = settings, model
        self._routes_start, self._on_cut = routes_start, on_cut
        self._delta = delta
        self._last: Any = None
        self._prompt_ids: Any = None
        self._parts: dict[int, Any] = {}  # _Parts, or the last output's

    def add(self, output: Any) -> None:
        """Take the next output.

        Raises:
            ValueError: it is of another request.
        """
        if self._last is not None and output.request_id != self._last.request_id:
            raise ValueError(
                f"RequestReader.add: an output of request {output.request_id} after those of"
                f" {self._last.request_id}"
            )
        self._last = output
        if output.prompt_token_ids:
            self._prompt_ids = output.prompt_token_ids
        for part in output.outputs:
            known = self._parts.get(part.index)
            if not self._delta:
                self._parts[part.index] = part
            elif known is None:
                self._parts[part.index] = _Parts(part)
            else:
                known.add(part)

    def finish(self) -> list[Rollout]:
        """The responses, in the order of their index; an aborted one too.

        Raises:
            ValueError: no output came, or a response has not ended.
        """
        name = "RequestReader.finish"
        if self._last is None:
            raise ValueError(f"{name}: no output came")
        joined = {
            index: part if self._delta else _Parts(part) for index, part in self._parts.items()
        }
        for index, parts in joined.items():
            if parts.last.finish_reason is None:
                raise ValueError(
                    f"{name}: response {index} of request {self._last.request_id} has not ended"
                )
        return [
            _read_completion(
                name, self._last, joined[index], self._settings, self._model,
                self._routes_start, self._on_cut, self._prompt_ids,
            )
            for index in sorted(joined)
        ]  # fmt: skip


class _Parts:
    """One response, from one output or from several that each hold what is new."""

    def __init__(self, part: Any):
        self.last = part
        self.token_ids = list(part.token_ids)
        self.logprobs: list[Any] = [] if part.logprobs is None else [part.logprobs]
        self.mask: list[Any] | None = None
        self.routes = getattr(part, "routed_experts", None)
        self._add_mask(part)

    def add(self, part: Any) -> None:
        self.last = part
        self.token_ids += part.token_ids
        if part.logprobs is not None:
            self.logprobs.append(part.logprobs)
        routes = getattr(part, "routed_experts", None)
        if routes is not None:
            self.routes = routes
        self._add_mask(part)

    def _add_mask(self, part: Any) -> None:
        mask = getattr(part, "sampling_mask", None)
        if mask is not None:
            self.mask = (self.mask or []) + list(mask.token_ids)


def _read_completion(
    name: str,
    request: Any,
    parts: _Parts,
    settings: "CaptureSettings",
    model: EngineModel | None,
    routes_start: int,
    on_cut: Literal["refuse", "mark"],
    prompt_ids: Any = None,
) -> Rollout:
    last = parts.last
    prompt_ids = request.prompt_token_ids if prompt_ids is None else prompt_ids
    where = f"{name}: request {request.request_id}, response {last.index}"
    if prompt_ids is None:
        raise ValueError(f"{where}: it has no prompt ids")
    if getattr(request, "encoder_prompt_token_ids", None) is not None:
        raise ValueError(f"{where}: it has an encoder, whose tokens have routes of their own")
    num_tokens = len(parts.token_ids)
    routes = None
    if settings.routes:
        routes = _joined_routes(where, getattr(request, "prompt_routed_experts", None), parts)
        if routes is None and num_tokens:
            raise ValueError(
                f"{where}: it has no routes; was the engine started with the settings' arguments?"
            )
    candidates = _candidates(where, parts.logprobs, num_tokens)
    if candidates is None and num_tokens and (settings.support == "logprobs" or settings.logprobs):
        raise ValueError(f"{where}: it has no logprobs; they were asked for")
    mask = None
    if settings.support == "mask":
        mask = parts.mask if num_tokens or parts.mask is not None else []
        if mask is None:
            raise ValueError(
                f"{where}: it has no sampling mask; was the engine started with the settings'"
                " arguments?"
            )
    of_sampled = None
    if settings.support is None and candidates is not None:
        of_sampled, candidates = _own_logprobs(candidates, parts.token_ids), None
    spans = getattr(last, "weight_versions", None) or ()
    return make_rollout(
        list(prompt_ids),
        parts.token_ids,
        routes=routes,
        routes_start=routes_start,
        logprobs=of_sampled,
        support=mask,
        candidates=candidates,
        model=model,
        on_cut=on_cut,
        weight_versions=[(span.start, span.end, span.version) for span in spans],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_cached_tokens=getattr(request, "num_cached_tokens", None),
        request_id=str(request.request_id),
        index=last.index,
    )


def _joined_routes(where: str, of_prompt: Any, parts: _Parts) -> np.ndarray | None:
    """One array: 0.21 has the prompt's rows on the request and only the others on the output."""
    if of_prompt is None:
        return parts.routes
    if parts.routes is None:
        return np.asarray(of_prompt)
    first, second = np.asarray(of_prompt), np.asarray(parts.routes)
    if first.ndim != 3 or second.ndim != 3 or first.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"{where}: prompt_routed_experts {first.shape} and routed_experts {second.shape} are"
            " not [rows, L, K] alike"
        )
    return np.concatenate([first, second])


def _candidates(where: str, chunks: list[Any], num_tokens: int) -> CandidateRows | None:
    if not chunks:
        return None
    parts = [
        _flat(chunk) if hasattr(chunk, "start_indices") else _listed(chunk) for chunk in chunks
    ]
    counts = np.concatenate([count for _, _, count in parts])
    if counts.size != num_tokens:
        raise ValueError(f"{where}: logprobs of {counts.size} tokens for {num_tokens} token ids")
    return CandidateRows(
        np.concatenate([ids for ids, _, _ in parts]),
        np.concatenate([logprobs for _, logprobs, _ in parts]),
        np.concatenate([[0], np.cumsum(counts)]),
    )


def _flat(chunk: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, logprobs, ids a token) of a ``FlatLogprobs``, which may begin anywhere."""
    starts = np.asarray(chunk.start_indices, dtype=np.int64)
    ends = np.asarray(chunk.end_indices, dtype=np.int64)
    ids = np.asarray(chunk.token_ids, dtype=np.int64)
    logprobs = np.asarray(chunk.logprobs, dtype=np.float64)
    counts = ends - starts
    first = np.repeat(starts - np.cumsum(counts) + counts, counts)
    order = first + np.arange(counts.sum())
    return ids[order], logprobs[order], counts


def _listed(chunk: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of one dict a token: id -> ``Logprob``, or a number."""
    ids: list[int] = []
    logprobs: list[float] = []
    counts = []
    for at_token in chunk:
        entries: Mapping[int, Any] = at_token or {}
        counts.append(len(entries))
        ids += entries
        logprobs += [getattr(value, "logprob", value) for value in entries.values()]
    return (
        np.array(ids, dtype=np.int64),
        np.array(logprobs, dtype=np.float64),
        np.array(counts, dtype=np.int64),
    )


def _own_logprobs(given: CandidateRows, token_ids: list[int]) -> np.ndarray:
    """[R] of the sampled tokens, NaN where they are not among the candidates."""
    rows = np.repeat(np.arange(len(token_ids)), np.diff(given.row_offsets))
    own = given.token_ids == np.asarray(token_ids, dtype=np.int64)[rows]
    values = np.full(len(token_ids), np.nan)
    values[rows[own]] = given.logprobs[own]
    return values
