"""What a training framework runs today in plain torch, written as well as that allows.

Routes: one layer ``index_select``, one output filled with the dummy row, one slice copy a
trajectory (never a token), slice copies for the two context-parallel halves of each sequence, a
tensor-parallel slice, one permute + contiguous + cast. The dtype of the dummy row is that of the
output until the cast: int64 where it is ``torch.arange(K)``, as frameworks hold expert ids; the
routes' own narrow dtype is the best that plain torch does. Row ids: the same with ``arange``.
Dense batches: one slice copy a trajectory. Where row ids exist already, whole-tensor operations.
Everything that depends only on the lengths is computed before the clock starts.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def offsets_of(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


# --- from host lengths: one slice copy a trajectory -----------------------------------------------


def shard_sequences(full: Tensor, padded: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Chunks r and 2R-1-r of each padded sequence, a slice copy each."""
    out = full.new_empty((full.shape[0] // cp_size, *full.shape[1:]))
    begin = end = 0
    for length in padded:
        half = length // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            source = begin + chunk * half
            out[end : end + half] = full[source : source + half]
            end += half
        begin += length
    return out


def routes_loop(
    routes: Tensor,
    layers: Tensor,
    dummy_row: Tensor,
    captured: Sequence[int],
    padded: Sequence[int],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> tuple[Tensor, Tensor]:
    """[N, L, K] packed routes to [J, T, K] int32 and the padding mask [T] of one rank (thd)."""
    selected = routes.index_select(1, layers)
    total, rows = sum(padded), offsets_of(captured)
    full = dummy_row.new_empty((total, *selected.shape[1:]))
    full[:] = dummy_row
    mask = torch.ones(total, dtype=torch.bool, device=routes.device)
    for i, begin in enumerate(offsets_of(padded)[:-1]):
        full[begin : begin + captured[i]] = selected[rows[i] : rows[i + 1]]
        mask[begin : begin + captured[i]] = False
    if cp_size > 1:
        full = shard_sequences(full, padded, cp_size, cp_rank)
        mask = shard_sequences(mask, padded, cp_size, cp_rank)
    count = full.shape[0] // tp_size
    mine = slice(tp_rank * count, (tp_rank + 1) * count)
    return full[mine].permute(1, 0, 2).contiguous().to(torch.int32), mask[mine].contiguous()


def row_ids_loop(
    captured: Sequence[int],
    padded: Sequence[int],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    device: str = "cuda",
) -> Tensor:
    """[T] int64 row ids of captured prefixes, one slice copy a trajectory."""
    total, rows = sum(padded), offsets_of(captured)
    ids = torch.full((total,), -1, dtype=torch.int64, device=device)
    for i, begin in enumerate(offsets_of(padded)[:-1]):
        ids[begin : begin + captured[i]] = torch.arange(rows[i], rows[i + 1], device=device)
    return ids if cp_size == 1 else shard_sequences(ids, padded, cp_size, cp_rank)


def align_loop(
    dense: Tensor, first_columns: Sequence[int], lengths: Sequence[int], fill: float
) -> Tensor:
    """[B, S, ...] to [T, ...], sequences back to back, one slice copy a trajectory."""
    out = dense.new_full((sum(lengths), *dense.shape[2:]), fill)
    for i, begin in enumerate(offsets_of(lengths)[:-1]):
        column = first_columns[i]
        out[begin : begin + lengths[i]] = dense[i, column : column + lengths[i]]
    return out


def restore_loop(
    values: Tensor, first_columns: Sequence[int], lengths: Sequence[int], width: int, fill: float
) -> Tensor:
    """[T, ...] to [B, width, ...], the last position of each sequence left out."""
    out = values.new_full((len(lengths), width, *values.shape[1:]), fill)
    for i, begin in enumerate(offsets_of(lengths)[:-1]):
        kept = max(lengths[i] - 1, 0)
        out[i, first_columns[i] : first_columns[i] + kept] = values[begin : begin + kept]
    return out


# --- from row ids on the device: whole-tensor operations ------------------------------------------


def rows_by_id(rows: Tensor, row_ids: Tensor, fill: int) -> Tensor:
    """``gather_rows``: every row read, then the missing ones filled."""
    missing = (row_ids < 0).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(missing, fill, rows.index_select(0, row_ids.clamp(min=0)))


def rows_to_ids(rows: Tensor, row_ids: Tensor, num_rows: int, fill: int) -> Tensor:
    """``scatter_rows``: missing rows are written to one row more, which is cut off."""
    out = rows.new_full((num_rows + 1, *rows.shape[1:]), fill)
    return out.index_copy_(0, torch.where(row_ids < 0, num_rows, row_ids), rows)[:num_rows]


def routes_by_id(
    routes: Tensor, row_ids: Tensor, layers: Tensor, dummies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``gather_routes``: [J, M, K] of ``dtype`` and the mask; ``dummies`` [K] or [M, K]."""
    missing = row_ids < 0
    chosen = routes.index_select(1, layers).index_select(0, row_ids.clamp(min=0))
    dummies = dummies.to(routes.dtype)
    if dummies.dim() == 2:
        dummies = dummies[:, None]
    filled = torch.where(missing[:, None, None], dummies, chosen)
    return filled.permute(1, 0, 2).contiguous().to(dtype), missing


def ragged_by_id(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, total: int
) -> tuple[Tensor, Tensor]:
    """``gather_ragged_support``: the ids of the named rows, ``total`` in all, and their offsets."""
    begins, counts = _row_bounds(row_offsets, row_ids)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = torch.repeat_interleave(begins - offsets[:-1], counts, output_size=total)
    return token_ids[shift + torch.arange(total, device=token_ids.device)], offsets


def padded_by_id(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, width: int, fill: int
) -> Tensor:
    """``pad_ragged_support``: [M, width], the ids of each row, then ``fill``."""
    begins, counts = _row_bounds(row_offsets, row_ids)
    columns = torch.arange(width, device=token_ids.device)
    present = columns < counts[:, None]
    source = torch.where(present, begins[:, None] + columns, 0)
    return torch.where(present, token_ids[source], fill)


def _row_bounds(row_offsets: Tensor, row_ids: Tensor) -> tuple[Tensor, Tensor]:
    rows = row_ids.clamp(min=0)
    begins = row_offsets[rows]
    return begins, torch.where(row_ids < 0, 0, row_offsets[rows + 1] - begins)


def spread_experts(
    missing: Tensor, topk: int, num_experts: int, ep_size: int, offset: int = 0
) -> Tensor:
    """[M, K] experts of the missing rows, dealt over the expert-parallel ranks in turn."""
    ordinal = missing.cumsum(0) - missing.long()
    walk = ordinal[:, None] * topk + torch.arange(topk, device=missing.device) + offset
    per_rank = num_experts // ep_size
    return (walk % ep_size) * per_rank + (walk // ep_size) % per_rank


# --- faults: each cell has the first that holds ---------------------------------------------------


def route_faults(routes: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """``validate_routes``: counts and first cells of missing, partly missing, outside, all zero,
    repeated."""
    ids = routes.int().flatten(0, 1)
    missing = ids == -1
    in_order = ids.sort(1).values
    zero = (ids == 0).all(1) & (ids.shape[1] > 1)
    outside = ((ids < 0) | (ids >= num_experts)).any(1)
    repeated = (in_order[:, 1:] == in_order[:, :-1]).any(1)
    return _faults([missing.all(1), missing.any(1), outside, zero, repeated])


def support_faults(support: Tensor, sampled: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """``validate_support``: of outside, not compacted, repeated, sampled id missing."""
    named = support != -1
    in_order = support.sort(1).values
    outside = (named & ((support < 0) | (support >= vocab_size))).any(1)
    gap = (named[:, 1:] & ~named[:, :-1]).any(1)
    repeated = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != -1)).any(1)
    lost = named.any(1) & ~(support == sampled[:, None]).any(1)
    return _faults([outside, gap, repeated, lost])


def ragged_support_faults(
    token_ids: Tensor, row_offsets: Tensor, sampled: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """``validate_ragged_support``: the same of rows of different widths."""
    counts = row_offsets.diff()
    rows = torch.arange(counts.shape[0], device=counts.device)
    row = rows.repeat_interleave(counts, output_size=token_ids.shape[0])
    keys = (row * 2**32 + token_ids).sort().values
    twice = row[1:][keys[1:] == keys[:-1]]

    def rows_with(found: Tensor) -> Tensor:
        held = torch.zeros_like(counts, dtype=torch.bool)
        held[found] = True
        return held

    outside = rows_with(row[(token_ids < 0) | (token_ids >= vocab_size)])
    kept = rows_with(row[token_ids == sampled[row]])
    return _faults([outside, torch.zeros_like(outside), rows_with(twice), (counts > 0) & ~kept])


def _faults(holds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    cells = torch.arange(holds[0].shape[0], device=holds[0].device)
    free = torch.ones_like(holds[0])
    counts, first = [], []
    for fault in holds:
        found = fault & free
        free &= ~fault
        counts.append(found.sum())
        first.append(torch.where(found, cells, 2**63 - 1).min())
    return torch.stack(counts), torch.stack(first)
