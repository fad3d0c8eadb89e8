"""One response that an engine sampled, checked whole: ``Rollout``, made by ``make_rollout``.

    rollout = make_rollout(prompt_ids, response_ids, routes=..., logprobs=..., support=...)
    trace.add_turn(**rollout.turn())

Whatever way a response came (vLLM's Python objects, its HTTP replies, packed fields), it is made
into plain arrays and checked here, so that all ways refuse the same.

    route rows        n - 1 of n tokens: the last sampled one is never evaluated. A request that
                      asked from row s gets n - 1 - s, or all from an engine that ignored it
    routes            distinct experts in a layer that has experts; a layer of zeros is one that the
                      engine did not capture
    logprobs          what is missing or not finite becomes -9999.0, and is counted
    support           the ids that the sampler's filters left. Of processed logprobs these are the
                      finite ones, and as they are renormalised their probabilities sum to 1: a
                      lesser sum is a row that was cut, by a limit on the number returned

Sizes: P prompt and R response tokens, n = P + R; L captured layers, K experts a token, E experts, V
vocabulary.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from torch import Tensor

from packhorse._nvtx import ranged, ranged_methods
from packhorse.packed.collate import LOGPROBS_FIELD, ROUTES_FIELD, SUPPORT_FIELD, SupportRows
from packhorse.packed.host import INT32_MAX, as_int64, check_total, host_count, host_ints
from packhorse.packed.host_arrays import float_array, integer_array, positive
from packhorse.packed.replies import (
    LOGPROB_FLOOR,
    narrow_routes,
    read_logprobs,
    read_support,
    read_token_ids,
)
from packhorse.packed.route_checks import check_routes, expert_layers
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.trajectory import RowSpan

#: How far from 1 the probabilities of a whole support row may sum: float32 over a vocabulary stays
#: within 1e-5, and the smallest cut that was seen (a tie at the last rank) was 0.06.
MASS_TOLERANCE: Final = 1e-4


class SupportStatus(IntEnum):
    """What is known of the support row of one response token."""

    WHOLE = 0  # all ids that the filters left
    CUT = 1  # some are missing: their probabilities sum to less than 1
    ADDED = 2  # the engine left the sampled id out; the rest of the row may lack others


@dataclass(frozen=True)
class EngineModel:
    """The sizes of the model in an engine, as far as they are known. None: not known."""

    num_layers: int | None = None  # L: all decoder layers
    topk: int | None = None  # K
    num_experts: int | None = None  # E
    moe_layers: tuple[int, ...] | None = None  # captured layers, from 0, that have experts
    vocab_size: int | None = None  # V


class CandidateRows(NamedTuple):
    """An engine's best candidates at each token, of any number: row r is the slice
    [row_offsets[r], row_offsets[r + 1]) of both. The sampled one may stand there twice."""

    token_ids: np.ndarray  # [total] integers; -1: none
    logprobs: np.ndarray  # [total] floats; -inf, NaN and -9999.0: filtered out
    row_offsets: np.ndarray  # [R + 1] integers


@dataclass(frozen=True, eq=False)
@ranged_methods("turn")
class Rollout:
    """One sampled response. Its arrays are read-only; what the engine did not return is None."""

    prompt_ids: np.ndarray  # [P] int64
    response_ids: np.ndarray  # [R] int64
    routes: np.ndarray | None  # [n - 1 - routes_start, L, K] uint8, int16 or int32
    routes_start: int  # token of row 0
    moe_layers: tuple[int, ...] | None  # captured layers, from 0, that have experts
    logprobs: np.ndarray | None  # [R] float32, finite, at most 0
    support: SupportRows | None  # R rows, the sampled id in each
    support_status: np.ndarray | None  # [R] uint8, SupportStatus
    support_mass: np.ndarray | None  # [R] float64: sum of probabilities; NaN: not known
    weight_versions: tuple[RowSpan, ...] = ()  # of the response tokens [start, stop), in order
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None  # prompt tokens taken from the prefix cache
    num_floored: int = 0  # logprobs that were missing: -9999.0
    num_added: int = 0  # support rows that lacked the sampled id
    request_id: str | None = None
    index: int = 0  # of the n responses to one prompt

    @property
    def length(self) -> int:
        """n = P + R."""
        return self.prompt_ids.size + self.response_ids.size

    @property
    def num_cut(self) -> int:
        """Support rows that lack ids which the sampler could have chosen."""
        if self.support_status is None:
            return 0
        return int((self.support_status == SupportStatus.CUT).sum())

    def turn(self) -> dict[str, Any]:
        """The arguments of ``Trace.add_turn`` for this response."""
        versions = {span.version for span in self.weight_versions}
        return {
            "output_ids": self.response_ids,
            "logprobs": self.logprobs,
            "support": self.support,
            "routes": self.routes,
            "routes_start": self.routes_start,
            "prompt_ids": self.prompt_ids,
            "weight_version": versions.pop() if len(versions) == 1 else None,
        }


@ranged
def make_rollout(
    prompt_ids: Sequence[int] | np.ndarray,
    response_ids: Sequence[int] | np.ndarray,
    *,
    routes: np.ndarray | Tensor | None = None,
    routes_start: int = 0,
    logprobs: Any = None,
    support: Any = None,
    candidates: Any = None,
    model: EngineModel | None = None,
    on_cut: Literal["refuse", "mark"] = "refuse",
    weight_versions: Sequence[tuple[int, int, Hashable]] = (),
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
    num_cached_tokens: int | None = None,
    request_id: str | None = None,
    index: int = 0,
) -> Rollout:
    """Check one response of an engine, and bring it to one form. No input is kept or changed.

    Args:
        prompt_ids: [P] integers, at least one.
        response_ids: [R] sampled ids.
        routes: [rows, L, K] of any integer dtype: row t is the route of token ``routes_start + t``.
            None where they were not asked for, or where an aborted request has no response.
        routes_start: the row that the request asked from, at most P. Where all n - 1 rows came all
            the same, the rollout begins at row 0.
        logprobs: [R] of the sampled tokens (a list may hold None). By default those of
            ``candidates``.
        support: R rows, in any form of ``pack_support`` (vLLM ``sampling_mask.token_ids``).
        candidates: the best candidates with their processed logprobs: ``CandidateRows``, or a pair
            of [R, C] arrays, ids and logprobs. Without ``support`` the finite ones are the support.
        model: of the engine. Where its MoE layers are not known, those that hold only zeros are
            taken for dense ones, and it is an error that all do.
        on_cut: what a support row whose probabilities sum to less than 1 is: an error, or marked
            in ``support_status``.
        weight_versions: (start, stop, version) of the response tokens, in order.
        finish_reason, stop_reason, num_cached_tokens, request_id, index: as the engine says.

    Raises:
        TypeError: an argument has a wrong type, or is on a device.
        ValueError: the prompt is empty; a shape or number of rows is not the expected one; an id is
            out of range or repeated in its row; a layer of experts is all zeros, or a dense one is
            not; a logprob is positive; a support row is cut; a candidate was not filtered out,
            but is not in its support row. One line that names the field, the request and the token.
    """
    where = _Where(request_id, index)
    model = EngineModel() if model is None else model
    vocab_size = model.vocab_size
    prompt = read_token_ids(where("prompt_ids"), prompt_ids, vocab_size)
    if prompt.size == 0:
        raise ValueError(f"{where('prompt_ids')} is empty: nothing predicts the first token")
    response = read_token_ids(where("response_ids"), response_ids, vocab_size)
    if on_cut not in ("refuse", "mark"):
        raise ValueError(f"make_rollout: on_cut must be 'refuse' or 'mark', got {on_cut!r}")
    start = host_count(routes_start, where("routes_start"))
    if start > prompt.size:
        raise ValueError(f"{where('routes_start')} is {start}, past the {prompt.size} prompt ids")

    rows, start, moe_layers = _checked_routes(
        where, routes, start, prompt.size, response.size, model
    )
    given = None
    if candidates is not None:
        given = _candidate_rows(where("candidates"), candidates, response.size)
    values = None
    if logprobs is not None:
        values = read_logprobs(where(LOGPROBS_FIELD), logprobs, response.size)
    elif given is not None:
        values = _sampled_logprobs(where(LOGPROBS_FIELD), given, response)
    checked = _checked_support(where, support, given, values, response, vocab_size)
    if checked is None:
        kept, status, mass = None, None, None
    else:
        kept, status, mass = checked
        _check_cut(where(SUPPORT_FIELD), kept, status, mass, on_cut)
    for array in (prompt, response, values, status, mass, *(kept or ())):
        if array is not None:
            array.flags.writeable = False
    return Rollout(
        prompt_ids=prompt,
        response_ids=response,
        routes=rows,
        routes_start=start,
        moe_layers=moe_layers,
        logprobs=values,
        support=kept,
        support_status=status,
        support_mass=mass,
        weight_versions=_checked_spans(where("weight_versions"), weight_versions, response.size),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=num_cached_tokens,
        num_floored=0 if values is None else int((values == LOGPROB_FLOOR).sum()),
        num_added=0 if status is None else int((status == SupportStatus.ADDED).sum()),
        request_id=request_id,
        index=index,
    )


class _Where:
    """How errors name a field of one response."""

    def __init__(self, request_id: Any, index: int):
        self._response = ""
        if request_id is not None:
            self._response = f" of request {request_id}" + (f", response {index}" if index else "")

    def __call__(self, field: str) -> str:
        return f"make_rollout: {field}{self._response}"


# --- routes ---------------------------------------------------------------------------------------


def _checked_routes(
    where: _Where,
    routes: Any,
    start: int,
    num_prompt: int,
    num_response: int,
    model: EngineModel,
) -> tuple[np.ndarray | None, int, tuple[int, ...] | None]:
    """(rows in their stored dtype, token of the first, captured layers that have experts)."""
    if routes is None:
        return None, 0, model.moe_layers
    name = where(ROUTES_FIELD)
    ids = integer_array(routes, name)
    if ids.ndim != 3:
        raise ValueError(f"{name} must be [rows, L, K], got shape {ids.shape}")
    for what, size, known in (
        ("layers", ids.shape[1], model.num_layers),
        ("experts a token", ids.shape[2], model.topk),
    ):
        if known is not None and size != known:
            raise ValueError(f"{name} has {size} {what}, the model {known}")
    evaluated = num_prompt + num_response - 1
    expected = max(evaluated - start, 0)
    if ids.shape[0] == evaluated:
        start = 0
    elif ids.shape[0] != expected:
        asked = f"; from row {start}, {expected}" if start else ""
        raise ValueError(
            f"{name} has {ids.shape[0]} rows; {num_prompt} prompt and {num_response} response"
            f" tokens have {evaluated}{asked}"
        )
    moe_layers = model.moe_layers
    num_layers, topk = ids.shape[1:]
    if moe_layers is None and ids.size and topk > 1:
        used = ids.any(axis=(0, 2))
        if not used.any():
            raise ValueError(
                f"{name} is all zeros, in all {num_layers} layers: the engine captured nothing"
            )
        moe_layers = tuple(np.flatnonzero(used).tolist())
    experts_at = expert_layers("make_rollout", moe_layers, num_layers)
    num_experts = model.num_experts
    check_routes(name, ids, INT32_MAX + 1 if num_experts is None else num_experts, experts_at)
    return narrow_routes(name, ids, num_experts), start, moe_layers


# --- support --------------------------------------------------------------------------------------


def _candidate_rows(where: str, given: Any, num_tokens: int) -> CandidateRows:
    """Rows of the candidates that were not filtered out, each once, int64 and float32."""
    if isinstance(given, CandidateRows):
        ids = host_ints(given.token_ids, f"{where}: token_ids")
        logprobs = float_array(given.logprobs, f"{where}: logprobs")
        offsets = host_ints(given.row_offsets, f"{where}: row_offsets")
        ends = (0, ids.size)
        falls = (offsets[1:] < offsets[:-1]).any()
        if offsets.size == 0 or (offsets[0], offsets[-1]) != ends or falls:
            raise ValueError(f"{where}: row_offsets must rise from 0 to its {ids.size} ids")
        counts = np.diff(offsets)
    else:
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(f"{where} must be CandidateRows or (ids, logprobs), each [R, C]")
        array = integer_array(given[0], f"{where}: ids")
        if array.ndim != 2:
            raise ValueError(f"{where}: ids must be [R, C], got shape {array.shape}")
        counts = np.full(array.shape[0], array.shape[1])
        ids = as_int64(array, f"{where}: ids").reshape(-1)
        logprobs = float_array(given[1], f"{where}: logprobs")
        if logprobs.shape != array.shape:
            raise ValueError(f"{where}: logprobs are {logprobs.shape}, ids {array.shape}")
        logprobs = logprobs.reshape(-1)
    if logprobs.shape != ids.shape:
        raise ValueError(f"{where}: {logprobs.size} logprobs for {ids.size} ids")
    if counts.size != num_tokens:
        raise ValueError(f"{where} has {counts.size} rows for {num_tokens} response tokens")
    rows = np.repeat(np.arange(counts.size), counts)
    with np.errstate(invalid="ignore"):
        kept = np.isfinite(logprobs) & (logprobs > LOGPROB_FLOOR) & (ids != NO_CANDIDATE)
    rows, ids, logprobs = rows[kept], ids[kept], logprobs[kept]
    outside = (ids < 0) | (ids > INT32_MAX)
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(f"{where}, token {rows[first]}: id {ids[first]} is no token id")
    if (logprobs > 0).any():
        first = int(np.argmax(logprobs > 0))
        raise ValueError(f"{where}, token {rows[first]}: logprob {logprobs[first]} is positive")
    order = np.lexsort((ids, rows))  # stable: of equal ids the first comes first
    again = order[1:][(np.diff(rows[order]) == 0) & (np.diff(ids[order]) == 0)]
    first_time = np.ones(ids.size, dtype=np.bool_)
    first_time[again] = False
    rows, ids, logprobs = rows[first_time], ids[first_time], logprobs[first_time]
    counts = np.bincount(rows, minlength=num_tokens)
    return CandidateRows(ids, logprobs, np.concatenate([[0], np.cumsum(counts)]))


def _row_numbers(offsets: np.ndarray) -> np.ndarray:
    """Row of each id."""
    return np.repeat(np.arange(offsets.size - 1), np.diff(offsets))


def _sampled_logprobs(where: str, given: CandidateRows, response: np.ndarray) -> np.ndarray:
    """The sampled tokens' own among the candidates; the floor where it is not."""
    rows = _row_numbers(given.row_offsets)
    values = np.full(response.size, np.nan, dtype=np.float32)
    own = given.token_ids == response[rows]
    values[rows[own]] = given.logprobs[own]
    return read_logprobs(where, values, response.size)


def _checked_support(
    where: _Where,
    support: Any,
    given: CandidateRows | None,
    logprobs: np.ndarray | None,
    response: np.ndarray,
    vocab_size: int | None,
) -> tuple[SupportRows, np.ndarray, np.ndarray] | None:
    """(rows, status of each, sum of its probabilities), or None where there is no support."""
    if support is None and given is None:
        return None
    name = where(SUPPORT_FIELD)
    source = support
    if source is None:
        assert given is not None
        source = SupportRows(given.token_ids, given.row_offsets)
    limit = INT32_MAX if vocab_size is None else positive(vocab_size, where("vocab_size"))
    check_total("make_rollout", limit, "token ids")
    reply = read_support(name, source, response, limit)
    rows = SupportRows(reply.token_ids, np.concatenate([[0], np.cumsum(reply.counts)]))
    status = np.where(reply.added, SupportStatus.ADDED, SupportStatus.WHOLE).astype(np.uint8)
    mass = np.full(response.size, np.nan)
    if given is None:
        return rows, status, mass
    of_candidates = _row_numbers(given.row_offsets)
    mass = np.zeros(response.size)
    np.add.at(mass, of_candidates, np.exp(given.logprobs.astype(np.float64)))
    if support is not None:
        _check_members(name, rows, given, of_candidates)
        some = np.diff(given.row_offsets) < np.diff(rows.row_offsets)
        mass[some] = np.nan  # of all members it is not known
        return rows, status, mass
    if logprobs is not None:  # a sampled id that was not among the candidates, with its own
        own = reply.added & (logprobs > LOGPROB_FLOOR)
        mass[own] += np.exp(logprobs[own].astype(np.float64))
    with_candidates = np.diff(given.row_offsets) > 0
    status[with_candidates & (mass < 1 - MASS_TOLERANCE)] = SupportStatus.CUT
    return rows, status, mass


def _check_members(
    where: str, rows: SupportRows, given: CandidateRows, of_candidates: np.ndarray
) -> None:
    """Each candidate that was not filtered out must be in its support row."""
    width = 1 + max(int(rows.token_ids.max(initial=0)), int(given.token_ids.max(initial=0)))
    of_ids = _row_numbers(rows.row_offsets)
    members = of_ids * width + rows.token_ids
    lacking = ~np.isin(of_candidates * width + given.token_ids, members)
    if lacking.any():
        first = int(np.argmax(lacking))
        raise ValueError(
            f"{where}, token {of_candidates[first]}: candidate {given.token_ids[first]} with"
            f" logprob {given.logprobs[first]:.4g} is not in the mask; the logprobs are not those"
            " that were sampled from (logprobs_mode='processed_logprobs')"
        )


def _check_cut(
    where: str, rows: SupportRows, status: np.ndarray, mass: np.ndarray, on_cut: str
) -> None:
    cut = status == SupportStatus.CUT
    # False for NaN; a whole row sums to 1 unless its logprobs are of another distribution
    wrong = (mass > 1 + MASS_TOLERANCE) | (
        (mass < 1 - MASS_TOLERANCE) & (status == SupportStatus.WHOLE)
    )
    if wrong.any():
        token = int(np.argmax(wrong))
        raise ValueError(
            f"{where}, token {token}: the probabilities of all its candidates sum to"
            f" {mass[token]:.4f}; the logprobs are not those that were sampled from"
            " (logprobs_mode='processed_logprobs')"
        )
    if on_cut == "refuse" and cut.any():
        token = int(np.argmax(cut))
        width = int(rows.row_offsets[token + 1] - rows.row_offsets[token])
        raise ValueError(
            f"{where}, token {token}: the probabilities of its {width} candidates sum to"
            f" {mass[token]:.4f}: the row is cut, as are {int(cut.sum()) - 1} others. Ask for more"
            " logprobs than top_k keeps, ties included, or for the mask"
        )


# --- the rest -------------------------------------------------------------------------------------


def _checked_spans(
    where: str, given: Sequence[tuple[int, int, Hashable]], num_tokens: int
) -> tuple[RowSpan, ...]:
    spans = tuple(RowSpan(*span) for span in given)
    at = 0
    for span in spans:
        if not at <= span.start <= span.stop <= num_tokens:
            raise ValueError(
                f"{where}: [{span.start}, {span.stop}) is not in order, or past the {num_tokens}"
                " response tokens"
            )
        at = span.stop
    return spans


@ranged
def read_engine_model(config: Mapping[str, Any]) -> EngineModel:
    """The sizes that a model's config.json names, None where it does not.

    Args:
        config: the JSON object, or ``to_dict()`` of a transformers config. Of a multimodal model
            its ``text_config`` is read.

    Raises:
        TypeError: it is no mapping.
        ValueError: a size is no positive integer.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"read_engine_model: config must be a mapping, got {type(config).__name__}")
    text = config.get("text_config")
    source = text if isinstance(text, Mapping) else config

    def first(*names: str) -> int | None:
        for name in names:
            value = source.get(name)
            if value is not None and value != 0:  # a dense model may say 0 experts
                return positive(value, f"read_engine_model: {name}")
        return None

    num_layers = first("num_hidden_layers", "num_layers", "n_layer")
    num_experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return EngineModel(
        num_layers=num_layers,
        topk=first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
        num_experts=num_experts,
        moe_layers=_moe_layers(source, num_layers, num_experts),
        vocab_size=first("vocab_size"),
    )


def _moe_layers(
    source: Mapping[str, Any], num_layers: int | None, num_experts: int | None
) -> tuple[int, ...] | None:
    """Decoder layers, from 0, that have experts, where the family's settings say so."""
    if num_layers is None or num_experts is None:
        return None
    dense = source.get("first_k_dense_replace")
    if dense is not None:
        step = source.get("moe_layer_freq", 1)
        if type(dense) is not int or type(step) is not int or dense < 0 or step < 1:
            return None
        return tuple(i for i in range(dense, num_layers) if i % step == 0)
    if "decoder_sparse_step" in source or "mlp_only_layers" in source:
        step, only = source.get("decoder_sparse_step", 1), source.get("mlp_only_layers") or ()
        if type(step) is not int or step < 1:
            return None
        return tuple(i for i in range(num_layers) if i not in only and (i + 1) % step == 0)
    return None
