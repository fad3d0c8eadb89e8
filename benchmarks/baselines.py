"""What a training framework runs today in plain torch, written as well as that allows.

Routes: one layer ``index_select``, one output filled with the dummy row, one slice copy a
trajectory (never a token), slice copies for the two context-parallel halves of each sequence, a
tensor-parallel slice, one permute + contiguous + cast. The dtype of the dummy row is that of the
output until the cast: int64 where it is ``torch.arange(K)``, as frameworks hold expert ids; the
routes' own narrow dtype is the best that plain torch does. Row ids: the same with ``arange``.
Everything that depends only on the lengths is computed before the clock starts.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def offsets_of(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


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
