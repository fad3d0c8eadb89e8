"""How far a trainer is from its rollout, cheap enough for every step.

    tally = merge_tallies(
        {**tally_logprobs(logprobs, rollout_logprobs, mask), **tally_rows(microbatch)}
        for each microbatch
    )
    figures = tally_metrics(tally)  # read when it suits: .item() is the only wait

    d = logprobs - rollout_logprobs    ratio = exp(d)
    k1 = mean(-d)    k3 = mean(exp(d) - 1 - d)         estimates of KL(rollout || trainer)

A tally is a plain dict of sums and counts. Names that end in ``_max`` merge by the maximum, all
others by addition; so a merged tally is that of the joined microbatches, never a mean of means, and
ranks merge by an all-reduce with the same two operations, over ranks that counted different things:

    logprobs/*             of the values that were given: data-parallel ranks, and context-parallel
                           ones where those are a rank's own slots (``restore`` gives all of them)
    routes/*, padding/*    a rank's own tokens and layers: all ranks, but for tensor-parallel ones
                           without sequence parallelism, which have the same tokens
    rows/*, coverage/*     of whole micro-batches: data-parallel ranks only
    support/*              of the values that were given: as logprobs/*

``ReplaySession.tally`` counts on one rank what several have, so its names add up over all.

Counts are int64 and exact; differences, their exponentials and sums are float64 whatever the inputs
are (float32 sums of 1e6 terms lose the digits that a gap of 1e-7 needs), so a sum depends on the
merging order by float64 rounding alone.

A percentile does not merge, a histogram does. |d| falls into bins of a relative width of 1/64 from
2**-32 to 2**16; the p99 is the upper edge of the bin in which the smallest value lies that 99 % of
the tokens do not exceed, but never more than the maximum: never too small, at most 1.6 % too large
(or 2**-32 where it is smaller than that; from 2**16 on it is the maximum).

What is masked is selected away, so NaN or inf there reaches nothing. An unmasked NaN or inf does:
it is counted, and the figures that depend on it show it.

Nothing here reads a device. Sizes: M rows, J layers, K experts a token, E experts.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.support import SUPPORT_OK
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.scoring import SCORED_FULL, MicrobatchScores

#: Of |d|: bin 0 is below 2**-32, the last one holds 2**16 and more, and what is not finite.
_MIN_EXPONENT: Final = -32
_MAX_EXPONENT: Final = 16
_MANTISSA_BITS: Final = 6
_SHIFT: Final = 23 - _MANTISSA_BITS  # of a float32's bits
_FIRST_BIN: Final = (127 + _MIN_EXPONENT) << _MANTISSA_BITS
_NUM_BINS: Final = ((_MAX_EXPONENT - _MIN_EXPONENT) << _MANTISSA_BITS) + 2

#: name of a tail -> the bound of d that it lies beyond
_TAILS: Final = {
    "ratio_above_2": math.log(2.0),
    "ratio_above_5": math.log(5.0),
    "ratio_below_1_2": -math.log(2.0),
    "ratio_below_1_5": -math.log(5.0),
}
#: name of a figure -> the statuses of ``MicrobatchScores.counts`` that it is the share of
_STATUSES: Final = {"missing": 1, "invalid": 2, "outside": 3, "impossible": 4, "full": SCORED_FULL}
#: Bin b of support sizes holds 2**(b - 1) < size <= 2**b, bin 0 also the empty rows.
_SIZE_BINS: Final = 24
_ID_DTYPES: Final = (torch.uint8, torch.int16, torch.int32, torch.int64)

#: Name -> what was summed or counted: a tensor on its inputs' device, or a host integer.
Tally = dict[str, Any]


# --- what one microbatch adds ---------------------------------------------------------------------


@ranged
def tally_logprobs(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, variant: str | None = None
) -> Tally:
    """Sums over the tokens of ``mask`` from which ``tally_metrics`` makes the logprob figures.

    Args:
        logprobs: the trainer's, any shape, floating point, nats; gradients are not followed.
        rollout_logprobs: of the same tokens in the same order; same shape and device.
        mask: same shape, bool or numbers: tokens that are not 0 count.
        variant: names the tally's entries ``logprobs_VARIANT/*``, so that logprobs with and without
            replay, or over supports and over the vocabulary, stand in one tally.

    Raises:
        TypeError, ValueError: dtype, shape or device is wrong, or ``variant`` is no identifier.
    """
    name = "tally_logprobs"
    if variant is not None and (not isinstance(variant, str) or not variant.isidentifier()):
        raise ValueError(f"{name}: variant must be an identifier or None, got {variant!r}")
    prefix = "logprobs" if variant is None else f"logprobs_{variant}"
    for field, values in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(f"{name}: {field} must be a floating-point tensor, got {_kind(values)}")
    _check_like(name, "rollout_logprobs", rollout_logprobs, "logprobs", logprobs)
    _check_like(name, "mask", mask, "logprobs", logprobs)
    counted = mask.flatten() != 0
    d = logprobs.detach().flatten().double() - rollout_logprobs.detach().flatten().double()
    d = torch.where(counted, d, 0.0)
    size = d.abs()
    tally = {
        f"{prefix}/tokens": counted.sum(),
        f"{prefix}/nonfinite": (~d.isfinite()).sum(),
        f"{prefix}/abs_diff_sum": size.sum(),
        f"{prefix}/abs_diff_max": size.amax() if size.numel() else size.sum(),
        f"{prefix}/abs_diff_bins": _histogram(size, counted),
        f"{prefix}/k1_sum": -d.sum(),
        f"{prefix}/k3_sum": (torch.expm1(d) - d).sum(),
        f"{prefix}/ratio_sum": torch.where(counted, d.exp(), 0.0).sum(),
    }
    for tail, bound in _TAILS.items():
        tally[f"{prefix}/{tail}"] = (d > bound if bound > 0 else d < bound).sum()
    return tally


@ranged
def tally_support(
    scores: MicrobatchScores,
    support: PackedTensor | PackedRagged,
    *,
    full_logprobs: Tensor | None = None,
    repaired: int = 0,
) -> Tally:
    """Counts how the tokens of a microbatch were scored, and over how many ids.

    Args:
        scores: of ``score_microbatch`` with this support.
        support: [N, C] or ragged, on the device of the scores or on the CPU.
        full_logprobs: [N] of the same tokens over the whole vocabulary, by the same trainer: then
            the mass that the support keeps is known, exp(full - over the support).
        repaired: rows to which the sampled id was added when they were packed.

    Raises:
        TypeError, ValueError: dtype, shape or device is wrong, or ``repaired`` is no count.
    """
    name = "tally_support"
    if not isinstance(scores, MicrobatchScores):
        raise TypeError(f"{name}: scores must be of score_microbatch, got {type(scores).__name__}")
    if not isinstance(support, PackedTensor | PackedRagged):
        raise TypeError(f"{name}: support must be packed, got {type(support).__name__}")
    if isinstance(repaired, bool) or not isinstance(repaired, int) or repaired < 0:
        raise ValueError(f"{name}: repaired must be a count of rows, got {repaired!r}")
    logprobs = scores.logprobs.values.detach()
    if support.num_rows != logprobs.shape[0]:
        raise ValueError(f"{name}: support has {support.num_rows} rows, scores {len(logprobs)}")
    if isinstance(support, PackedRagged):
        sizes = torch.from_numpy(support.widths)
    else:
        sizes = (support.values >= 0).sum(1)
    sizes = sizes.to(logprobs.device, non_blocking=True)
    bounds = 2 ** torch.arange(_SIZE_BINS - 1, device=sizes.device)
    bins = torch.bucketize(sizes, bounds)
    counts = torch.zeros(_SIZE_BINS, dtype=torch.int64, device=sizes.device)
    tally: Tally = {
        "support/counts": scores.counts,
        "support/ignored": scores.num_ignored,
        "support/repaired": repaired,
        "support/rows": (sizes > 0).sum(),
        "support/size_sum": sizes.sum(),
        "support/size_max": sizes.amax() if sizes.numel() else sizes.sum(),
        "support/size_bins": counts.scatter_add(0, bins, (sizes > 0).long()),
    }
    if full_logprobs is not None:
        _check_like(name, "full_logprobs", full_logprobs, "scores", logprobs)
        scored = scores.status.values == SUPPORT_OK
        mass = (full_logprobs.detach().double() - logprobs.double()).exp()
        lost = torch.where(scored, 1 - mass, 0.0)
        tally["support/mass_tokens"] = scored.sum()
        tally["support/mass_sum"] = torch.where(scored, mass, 0.0).sum()
        tally["support/lost_mass_max"] = lost.amax() if lost.numel() else lost.sum()
    return tally


@ranged
def tally_routes(live_topk_ids: Tensor, replayed_topk_ids: Tensor, row_mask: Tensor) -> Tally:
    """Counts, for each layer, the rows whose live experts are another set than the replayed ones.

    Args:
        live_topk_ids: [J, M, K] or [M, K] uint8, int16, int32 or int64: the router's own choice.
        replayed_topk_ids: same shape: the rollout's. The order in a row means nothing.
        row_mask: [M] bool, True for the rows to compare (the replayed ones); others may hold
            anything.

    Raises:
        TypeError, ValueError: dtype, shape or device is wrong.
    """
    name = "tally_routes"
    _check_ids(name, "live_topk_ids", live_topk_ids)
    _check_ids(name, "replayed_topk_ids", replayed_topk_ids)
    _check_like(name, "replayed_topk_ids", replayed_topk_ids, "live_topk_ids", live_topk_ids)
    _check_row_mask(name, "row_mask", row_mask, live_topk_ids)
    live, replayed = _by_layer(live_topk_ids).long(), _by_layer(replayed_topk_ids).long()
    topk = live.shape[-1]
    missed = ~_is_among(replayed, live) & row_mask[:, None]
    added = ~_is_among(live, replayed) & row_mask[:, None]
    rows = row_mask.sum().expand(live.shape[0])
    return {
        "routes/rows": rows.clone(),
        "routes/assignments": rows * topk,
        "routes/rows_differing": (missed | added).any(-1).sum(-1),
        "routes/assignments_differing": missed.sum((-2, -1)),
    }


@ranged
def tally_padding(
    topk_ids: Tensor, padding_mask: Tensor, *, num_experts: int, ep_size: int
) -> Tally:
    """Counts, for each layer, the assignments of padding rows that each expert-parallel rank gets.

    Padding is dispatched like any token. Sum over the ranks of the expert-parallel group for what
    its ranks receive.

    Args:
        topk_ids: [J, M, K] or [M, K] uint8, int16, int32 or int64: experts of this rank's rows.
        padding_mask: [M] bool, True = padding.
        num_experts: E. An id outside 0 .. E-1 is not counted.
        ep_size: expert-parallel ranks, a divisor of E; each holds E / ep_size experts in order.

    Raises:
        TypeError, ValueError: dtype, shape or device is wrong, or ``ep_size`` does not divide.
    """
    name = "tally_padding"
    _check_ids(name, "topk_ids", topk_ids)
    _check_row_mask(name, "padding_mask", padding_mask, topk_ids)
    if num_experts < 1:
        raise ValueError(f"{name}: num_experts must be at least 1, got {num_experts}")
    if ep_size < 1 or num_experts % ep_size:
        raise ValueError(f"{name}: ep_size must divide num_experts={num_experts}, got {ep_size}")
    ids = _by_layer(topk_ids).long()
    counted = padding_mask[:, None] & (ids >= 0) & (ids < num_experts)
    per_expert = torch.zeros(ids.shape[0], num_experts, dtype=torch.int64, device=ids.device)
    # one counter an expert, not a rank: fewer additions meet at one address
    per_expert = per_expert.scatter_add(
        1, ids.clamp(0, num_experts - 1).flatten(1), counted.long().flatten(1)
    )
    return {"padding/per_ep_rank": per_expert.view(ids.shape[0], ep_size, -1).sum(-1)}


@ranged
def tally_rows(microbatch: ReplayMicrobatch) -> Tally:
    """Counts a microbatch's rows by kind, and its captured prefixes; host integers.

    Rows are those of all context-parallel ranks together; dummies include the pads. Every tensor-,
    context- and pipeline-parallel rank of a micro-batch counts the same: add them up over
    data-parallel ranks only, or take ``ReplaySession.tally``.
    """
    if not isinstance(microbatch, ReplayMicrobatch):
        raise TypeError(
            f"tally_rows: microbatch must be a ReplayMicrobatch, got {type(microbatch).__name__}"
        )
    lengths, captured = microbatch.layout.lengths, microbatch.captured
    uncovered = [length - rows for length, rows in zip(lengths, captured, strict=True)]
    return {
        "rows/replayed": microbatch.num_replayed,
        "rows/live": microbatch.num_live,
        "rows/dummy": microbatch.num_dummy,
        "coverage/tokens": sum(lengths),
        "coverage/trajectories": len(lengths),
        "coverage/missing": sum(microbatch.missing),
        "coverage/uncovered_max": max(uncovered, default=0),
    }


# --- merging, figures -----------------------------------------------------------------------------


@ranged
def merge_tallies(tallies: Iterable[Mapping[str, Any]]) -> Tally:
    """The tally of all these microbatches together.

    A name that some tallies lack (what is sampled every few steps) is merged over those that have
    it. Across ranks do the same with ``all_reduce``: MAX for names in ``_max``, SUM for the others.

    Raises:
        TypeError: an entry is no mapping.
        ValueError: there is no tally, or one name has two shapes; names it.
    """
    merged: Tally = {}
    count = 0
    for count, tally in enumerate(tallies, 1):
        if not isinstance(tally, Mapping):
            raise TypeError(
                f"merge_tallies: tally {count - 1} must be a dict, got {type(tally).__name__}"
            )
        for key, value in tally.items():
            merged[key] = _merge(key, merged[key], value) if key in merged else value
    if not count:
        raise ValueError("merge_tallies: no tally was given")
    return merged


def _merge(key: str, one: Any, other: Any) -> Any:
    shapes = [list(value.shape) if isinstance(value, Tensor) else [] for value in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"merge_tallies: {key} has shapes {shapes[0]} and {shapes[1]}")
    if not key.endswith("_max"):
        return one + other
    return torch.maximum(one, other) if isinstance(one, Tensor) else max(one, other)


@ranged
def tally_metrics(tally: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a tally, for the parts that it has. Shares and means of nothing are 0.

        logprobs/tokens, /nonfinite                      counts: masked-in tokens, NaN or inf in d
        logprobs/abs_diff_mean, _p99, _max               of |d|, nats
        logprobs/k1, /k3, /ratio_mean                    means
        logprobs/ratio_above_2, _above_5, _below_1_2, _below_1_5   share of tokens
        logprobs_VARIANT/*                               the same of each variant
        support/missing, /invalid, /outside, /impossible, /full   share of tokens scored so
        support/ignored, /repaired                       counts: candidates, rows
        support/size_mean, _p99, _max                    ids of the rows that have any; p99 is the
                                                         power of 2 that holds it, or the maximum
        support/kept_mass_mean, /lost_mass_max           of tokens scored over their support
        routes/row_mismatch, _per_layer [J]              share of rows with another set of experts
        routes/assignment_mismatch, _per_layer [J]       share of replayed experts not in live top-k
        padding/load, padding/load_per_layer [J]         fullest / mean over expert-parallel ranks
        padding/assignments                              count
        rows/replayed, /live, /dummy, and each _share    host numbers
        coverage/captured_share                          captured rows / real tokens
        coverage/missing_share                           trajectories without routes
        coverage/uncovered_max                           tokens after a captured prefix, the most

    Returns:
        Device scalars (float64 or int64; [J] per layer), none of them read; host numbers for rows
        and coverage.

    Raises:
        ValueError: no part is in ``tally``.
    """
    figures: dict[str, Any] = {}
    for key in tally:
        prefix = key.removesuffix("/tokens")
        if prefix != key and (prefix == "logprobs" or prefix.startswith("logprobs_")):
            _logprob_figures(tally, figures, prefix)
    if "support/counts" in tally:
        _support_figures(tally, figures)
    if "routes/rows" in tally:
        for figure, of, share in (
            ("row_mismatch", "rows", "rows_differing"),
            ("assignment_mismatch", "assignments", "assignments_differing"),
        ):
            part, whole = tally[f"routes/{share}"], tally[f"routes/{of}"]
            figures[f"routes/{figure}"] = _share(part.sum(), whole.sum())
            figures[f"routes/{figure}_per_layer"] = _share(part, whole)
    if "padding/per_ep_rank" in tally:
        counts = tally["padding/per_ep_rank"]
        figures["padding/assignments"] = counts.sum()
        figures["padding/load"] = _load(counts.sum(0))
        figures["padding/load_per_layer"] = _load(counts)
    if "rows/replayed" in tally:
        _row_figures(tally, figures)
    if not figures:
        raise ValueError(f"tally_metrics: nothing known in tally, it has {sorted(tally)}")
    return figures


def _logprob_figures(tally: Mapping[str, Any], figures: dict[str, Any], prefix: str) -> None:
    tokens = tally[f"{prefix}/tokens"]
    for key in ("tokens", "nonfinite"):
        figures[f"{prefix}/{key}"] = tally[f"{prefix}/{key}"]
    for key, figure in (
        ("abs_diff_sum", "abs_diff_mean"),
        ("k1_sum", "k1"),
        ("k3_sum", "k3"),
        ("ratio_sum", "ratio_mean"),
    ):
        figures[f"{prefix}/{figure}"] = _share(tally[f"{prefix}/{key}"], tokens)
    largest = tally[f"{prefix}/abs_diff_max"]
    figures[f"{prefix}/abs_diff_p99"] = _p99(tally[f"{prefix}/abs_diff_bins"], tokens, largest)
    figures[f"{prefix}/abs_diff_max"] = largest
    for tail in _TAILS:
        figures[f"{prefix}/{tail}"] = _share(tally[f"{prefix}/{tail}"], tokens)


def _support_figures(tally: Mapping[str, Any], figures: dict[str, Any]) -> None:
    counts = tally["support/counts"]
    for figure, status in _STATUSES.items():
        figures[f"support/{figure}"] = _share(counts[status], counts.sum())
    for key in ("ignored", "repaired"):
        figures[f"support/{key}"] = tally[f"support/{key}"]
    rows, largest = tally["support/rows"], tally["support/size_max"]
    figures["support/size_mean"] = _share(tally["support/size_sum"], rows)
    index = (tally["support/size_bins"].cumsum(0) < (99 * rows + 99) // 100).sum()
    figures["support/size_p99"] = torch.minimum(2**index, largest)
    figures["support/size_max"] = largest
    if "support/mass_sum" in tally:
        mass, tokens = tally["support/mass_sum"], tally["support/mass_tokens"]
        figures["support/kept_mass_mean"] = _share(mass, tokens)
        figures["support/lost_mass_max"] = tally["support/lost_mass_max"]


def _row_figures(tally: Mapping[str, Any], figures: dict[str, Any]) -> None:
    kinds = ("replayed", "live", "dummy")
    rows = sum(tally[f"rows/{kind}"] for kind in kinds)
    for kind in kinds:
        figures[f"rows/{kind}"] = tally[f"rows/{kind}"]
        figures[f"rows/{kind}_share"] = tally[f"rows/{kind}"] / max(rows, 1)
    tokens, trajectories = tally["coverage/tokens"], tally["coverage/trajectories"]
    figures["coverage/captured_share"] = tally["rows/replayed"] / max(tokens, 1)
    figures["coverage/missing_share"] = tally["coverage/missing"] / max(trajectories, 1)
    figures["coverage/uncovered_max"] = tally["coverage/uncovered_max"]


# --- parts ----------------------------------------------------------------------------------------


def _histogram(size: Tensor, counted: Tensor) -> Tensor:
    """[_NUM_BINS] int64. A float32's exponent and first mantissa bits are the bin."""
    finite = torch.where(size.isfinite(), size, math.inf).float()
    bins = (finite.view(torch.int32) >> _SHIFT) - (_FIRST_BIN - 1)
    bins = bins.clamp(0, _NUM_BINS - 1).long()
    empty = torch.zeros(_NUM_BINS, dtype=torch.int64, device=size.device)
    return empty.scatter_add(0, bins, counted.long())


def _p99(bins: Tensor, tokens: Tensor, largest: Tensor) -> Tensor:
    needed = (99 * tokens + 99) // 100  # rounded up
    index = (bins.cumsum(0) < needed).sum()
    edge = ((index + _FIRST_BIN) << _SHIFT).to(torch.int32).view(torch.float32).double()
    return torch.where((index == _NUM_BINS - 1) | (largest < edge), largest, edge)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part.double() / whole.clamp(min=1), 0.0)


def _load(counts: Tensor) -> Tensor:
    """Fullest over mean along the last dimension."""
    return _share(counts.amax(-1) * counts.shape[-1], counts.sum(-1))


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    """[J, M, K] bool: whether an id is one of the row's ``others``; K passes, no [K, K] table."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for k in range(others.shape[-1]):
        found = found | (ids == others[..., k : k + 1])
    return found


def _by_layer(topk_ids: Tensor) -> Tensor:
    return topk_ids if topk_ids.dim() == 3 else topk_ids.unsqueeze(0)


# --- checks ---------------------------------------------------------------------------------------


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _check_like(name: str, field: str, values: object, like: str, other: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: {field} must be a tensor, got {type(values).__name__}")
    if values.shape != other.shape:
        raise ValueError(
            f"{name}: {field} must have the shape of {like}, {list(other.shape)}, got"
            f" {list(values.shape)}"
        )
    if values.device != other.device:
        raise ValueError(f"{name}: {field} is on {values.device}, {like} on {other.device}")


def _check_ids(name: str, field: str, topk_ids: object) -> None:
    if not isinstance(topk_ids, Tensor) or topk_ids.dtype not in _ID_DTYPES:
        raise TypeError(
            f"{name}: {field} must be uint8, int16, int32 or int64, got {_kind(topk_ids)}"
        )
    if topk_ids.dim() not in (2, 3):
        raise ValueError(f"{name}: {field} must be [J, M, K] or [M, K], got {list(topk_ids.shape)}")


def _check_row_mask(name: str, field: str, mask: object, topk_ids: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{name}: {field} must be a bool tensor, got {_kind(mask)}")
    if mask.shape != topk_ids.shape[-2:-1]:
        raise ValueError(
            f"{name}: {field} must be [{topk_ids.shape[-2]}], one a row, got {list(mask.shape)}"
        )
    if mask.device != topk_ids.device:
        raise ValueError(f"{name}: {field} is on {mask.device}, the ids on {topk_ids.device}")
