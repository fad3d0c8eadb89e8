"""Bring dense per-token batches to the order of a rank's tokens, and back: one launch each.

    slot i of rank r -> (sequence b, position s)                      as in ``make_row_ids``
    (b, s)           -> cell (b, first_columns[b] + s + shift)        where s < lengths[b] - trim
    align_tokens     [B, S, ...] -> [T, ...]: each slot receives its cell, or fill
    restore_tokens   [R * T, ...] -> [B, S - 1, ...]: each cell receives its slot, or fill

Slots and cells are in one-to-one relation, so both are partial permutations: bit-exact and
deterministic, and with the same shift and trim each is the other's adjoint. ``align_tokens`` is for
one rank, with shift = trim = 1 for the next token, else 0; ``restore_tokens`` for all R, with
shift 0 and trim 1, since the last position predicts no token.

Sizes: B trajectories (a pad of the whole slab is one sequence more), S columns, T slots of one
context-parallel rank, R ranks, W elements of a token. Contract: whatever the tables hold, nothing
outside the tensors is touched, and what has no partner is fill.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.layout import check_tables, position_in_sequence
from packhorse.kernels.rows import (
    SUPPORTED_DTYPES,
    check_tensors,
    check_values,
    checks_values,
    fill_fits,
    is_differentiated,
)

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def _cells_of_slots(
    offsets: Tensor, columns: Tensor, num_columns: int, num_tokens: int, shift: int, trim: int,
    cp_size: int, cp_rank: int | None, zigzag: bool, position_major: bool,
) -> Tensor:  # fmt: skip
    """[T], or [R * T] of all ranks: the cell of each slot, b * num_columns + column; -1: none."""
    num_sequences, num_padded = columns.shape[1], offsets.shape[0] - 1
    rank = (torch.arange(cp_size) if cp_rank is None else torch.tensor([cp_rank]))[:, None]
    if (num_sequences if position_major else num_padded) == 0:
        return torch.full((len(rank) * num_tokens,), -1)
    slots, offsets = torch.arange(num_tokens), offsets.long()
    if position_major:  # bshd: every sequence has offsets[1] tokens here
        sequence, local = slots % num_sequences, slots // num_sequences
        local_length = offsets[1].expand(num_tokens)
    else:
        sequence = torch.searchsorted(offsets[:-1].contiguous(), slots, right=True) - 1
        local = slots - offsets[sequence]
        local_length = offsets[sequence + 1] - offsets[sequence]
    if zigzag:
        half = local_length // 2
        mirrored = local + (2 * cp_size - 2 - rank) * half
        position = torch.where(local < half, local + rank * half, mirrored)
    else:
        position = local + rank * local_length
    pads = torch.zeros(2, max(num_padded - num_sequences, 0), dtype=torch.int64)
    first_column, length = torch.cat((columns.long(), pads), dim=1)[:, sequence]
    column = first_column + position + shift
    present = (local < local_length) & (position < length - trim)
    present = present & (column >= 0) & (column < num_columns)
    return torch.where(present, sequence * num_columns + column, -1).flatten()


def align_tokens_reference(
    dense: Tensor, offsets: Tensor, columns: Tensor, num_tokens: int, fill: int, *layout: Any
) -> Tensor:
    cells = _cells_of_slots(offsets, columns, dense.shape[1], num_tokens, *layout)
    out = dense.new_full((len(cells), *dense.shape[2:]), fill)
    present = cells >= 0
    out[present] = dense.flatten(0, 1)[cells[present]]
    return out


def restore_tokens_reference(
    values: Tensor, offsets: Tensor, columns: Tensor, width: int, fill: int, *layout: Any
) -> Tensor:
    _, _, cp_size, cp_rank, _, _ = layout
    num_tokens = values.shape[0] // (cp_size if cp_rank is None else 1)
    cells = _cells_of_slots(offsets, columns, width, num_tokens, *layout)
    out = values.new_full((columns.shape[1] * width, *values.shape[1:]), fill)
    present = cells >= 0
    out[cells[present]] = values[present]
    return out.unflatten(0, (columns.shape[1], width))


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def _find_sequence(offsets_ptr, slot, size):
    """The last of ``size`` sequences whose offset is <= slot; 32 probes a round."""
    low = tl.full([], 0, tl.int32)
    probe = tl.arange(0, 32)
    while size > 1:
        step = (size + 31) // 32
        begins = tl.load(offsets_ptr + low + probe * step, mask=probe * step < size, other=0)
        begun = (probe * step < size) & (begins <= slot)
        skipped = tl.maximum(tl.sum(begun.to(tl.int32), axis=0) - 1, 0) * step
        low += skipped
        size = tl.minimum(step, size - skipped)
    return low


@triton.jit
def _find_sequences(offsets_ptr, slots, first, last):
    """``_find_sequence`` for each of ``slots`` among the sequences from ``first`` to ``last``."""
    low = tl.zeros_like(slots) + first
    high = tl.zeros_like(slots) + last
    size = last - first
    while size > 0:
        middle = (low + high + 1) // 2
        begins = tl.load(offsets_ptr + middle) <= slots
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
        size = size // 2
    return low


@triton.jit
def _move_rows(
    src_ptr, dst_ptr, source, target, present, inside, width, fill,
    VEC: tl.constexpr, BLOCK_W: tl.constexpr, MANY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows ``target`` of dst, where ``inside``: the row at offset ``source`` of src, where
    ``present``, else fill. All [*, *]; the offset and ``width`` in units of VEC elements."""
    dtype: tl.constexpr = src_ptr.dtype.element_ty
    # by way of float32, which narrow floats need; float64 holds every integer fill exactly
    if dtype.is_floating() and dtype != tl.float64:
        missing = fill.to(tl.float32).to(dtype)
    else:
        missing = fill.to(dtype)
    if BLOCK_W == 1:
        values = tl.load(src_ptr + source, mask=present, other=missing)
        tl.store(dst_ptr + target, values, mask=inside)
    else:
        source, target = (source * VEC)[:, :, None], (target * width * VEC)[:, :, None]
        present, inside = present[:, :, None], inside[:, :, None]
        end = width * VEC if MANY_BLOCKS else BLOCK_W
        for begin in range(0, end, BLOCK_W):
            cols = begin + tl.arange(0, BLOCK_W)[None, None, :]
            in_row = cols < width * VEC
            values = tl.load(src_ptr + source + cols, mask=present & in_row, other=missing)
            tl.store(dst_ptr + target + cols, values, mask=inside & in_row)


@triton.jit(
    repr=kernel_name("align_tokens", "dense_ptr", "VEC"),
    do_not_specialize=[
        "num_tokens", "num_sequences", "num_padded", "num_columns", "width", "stride_batch",
        "stride_column", "fill", "shift", "trim", "cp_size", "first_rank",
    ],
    do_not_specialize_on_alignment=["offsets_ptr", "columns_ptr"],
)  # fmt: skip
def _align_tokens_kernel(
    dense_ptr,  # [B, S, W]
    offsets_ptr,  # [num_padded + 1] int32; with POSITION_MAJOR [2]
    columns_ptr,  # [2, B] int32: first columns, lengths
    out_ptr,  # [ranks of the grid's last axis, T, W]
    num_tokens,  # T
    num_sequences,  # B
    num_padded,  # sequences of offsets, >= B
    num_columns,  # S
    width,  # W; it and the strides in units of VEC elements
    stride_batch, stride_column, fill, shift, trim, cp_size, first_rank,
    ZIGZAG: tl.constexpr, POSITION_MAJOR: tl.constexpr, VEC: tl.constexpr,
    BLOCK_B: tl.constexpr,  # sequences, with POSITION_MAJOR
    BLOCK_S: tl.constexpr,  # slots; with POSITION_MAJOR of one sequence
    BLOCK_W: tl.constexpr,  # elements of a row; 1 where W is
    MANY_BLOCKS: tl.constexpr,  # of BLOCK_W in a row
):  # fmt: skip
    block = tl.program_id(0) * BLOCK_S
    if POSITION_MAJOR:
        sequence = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
        local = (block + tl.arange(0, BLOCK_S))[:, None]
        local_length = tl.load(offsets_ptr + 1)
        known = sequence < num_sequences
        first_column = tl.load(columns_ptr + sequence, mask=known, other=0)
        length = tl.load(columns_ptr + num_sequences + sequence, mask=known, other=0)
        slot = local.to(tl.int64) * num_sequences + sequence
        inside = known & (slot < num_tokens)
    else:
        slot = block + tl.arange(0, BLOCK_S)
        inside = slot < num_tokens
        # most blocks lie within one sequence, whose entries of the tables are scalars
        first = _find_sequence(offsets_ptr, block, num_padded)
        first_begin = tl.load(offsets_ptr + first)
        first_end = tl.load(offsets_ptr + first + 1)
        known = first < num_sequences
        zeros = tl.zeros_like(slot)
        sequence, begin, end = first + zeros, first_begin + zeros, first_end + zeros
        first_column = tl.load(columns_ptr + first, mask=known, other=0) + zeros
        length = tl.load(columns_ptr + num_sequences + first, mask=known, other=0) + zeros
        last_slot = tl.minimum(block + (BLOCK_S - 1), num_tokens - 1)
        if (first_end <= last_slot) & (first + 1 < num_padded):
            last = first + _find_sequence(offsets_ptr + first, last_slot, num_padded - first)
            sequence = _find_sequences(offsets_ptr, slot, first, last)
            begin = tl.load(offsets_ptr + sequence)
            end = tl.load(offsets_ptr + sequence + 1)
            each_known = sequence < num_sequences
            first_column = tl.load(columns_ptr + sequence, mask=each_known, other=0)
            length = tl.load(columns_ptr + num_sequences + sequence, mask=each_known, other=0)
        local, local_length = (slot - begin)[:, None], (end - begin)[:, None]
        first_column, length = first_column[:, None], length[:, None]
        sequence, slot, inside = sequence[:, None], slot[:, None], inside[:, None]
    rank = first_rank + tl.program_id(2)
    position = position_in_sequence(local, local_length, cp_size, rank, ZIGZAG)
    column = first_column + position + shift
    present = inside & (local < local_length) & (position < length - trim)
    present = present & (column >= 0) & (column < num_columns)
    source = sequence.to(tl.int64) * stride_batch + column.to(tl.int64) * stride_column
    target = tl.program_id(2).to(tl.int64) * num_tokens + slot
    _move_rows(
        dense_ptr, out_ptr, source, target, present, inside, width, fill, VEC, BLOCK_W, MANY_BLOCKS
    )


@triton.jit(
    repr=kernel_name("restore_tokens", "values_ptr", "VEC"),
    do_not_specialize=[
        "num_tokens", "num_sequences", "num_columns", "width", "stride", "fill", "shift", "trim",
        "cp_size", "first_rank", "num_ranks",
    ],
    do_not_specialize_on_alignment=["offsets_ptr", "columns_ptr"],
)  # fmt: skip
def _restore_tokens_kernel(
    values_ptr,  # [num_ranks, T, W]
    offsets_ptr,  # [> B] int32; with POSITION_MAJOR [2]
    columns_ptr,  # [2, B] int32: first columns, lengths
    out_ptr,  # [B, S, W]
    num_tokens,  # T
    num_sequences,  # B
    num_columns,  # S
    width,  # W; it and the stride in units of VEC elements
    stride, fill, shift, trim, cp_size, first_rank, num_ranks,
    SPLIT: tl.constexpr,  # cp_size > 1
    ZIGZAG: tl.constexpr, POSITION_MAJOR: tl.constexpr, VEC: tl.constexpr,
    BLOCK_B: tl.constexpr,  # sequences
    BLOCK_S: tl.constexpr,  # columns
    BLOCK_W: tl.constexpr,  # elements of a row; 1 where W is
    MANY_BLOCKS: tl.constexpr,  # of BLOCK_W in a row
):  # fmt: skip
    column = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S))[None, :]
    sequence = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    known = sequence < num_sequences
    inside = known & (column < num_columns)
    first_column = tl.load(columns_ptr + sequence, mask=known, other=0)
    length = tl.load(columns_ptr + num_sequences + sequence, mask=known, other=0)
    if POSITION_MAJOR:
        local_length = tl.load(offsets_ptr + 1)
    else:
        begin = tl.load(offsets_ptr + sequence, mask=known, other=0)
        local_length = tl.load(offsets_ptr + sequence + 1, mask=known, other=0) - begin
    position = column - first_column - shift
    present = inside & (position >= 0) & (position < length - trim)
    local = tl.maximum(position, 0)
    if SPLIT:  # the inverse of position_in_sequence
        chunk_length = tl.maximum(local_length // 2 if ZIGZAG else local_length, 1)
        chunk = (local.to(tl.uint32) // chunk_length.to(tl.uint32)).to(tl.int32)
        local -= chunk * chunk_length
        rank = chunk
        if ZIGZAG:
            mirrored = chunk >= cp_size
            rank = tl.where(mirrored, 2 * cp_size - 1 - chunk, chunk)
            local = tl.where(mirrored, local + chunk_length, local)
        rank -= first_rank
        present = present & (rank >= 0) & (rank < num_ranks)
    present = present & (local < local_length)
    if POSITION_MAJOR:
        slot = local.to(tl.int64) * num_sequences + sequence
    else:
        slot = begin + local
    present = present & (slot >= 0) & (slot < num_tokens)
    source = slot.to(tl.int64)
    if SPLIT:
        source += rank.to(tl.int64) * num_tokens
    target = sequence.to(tl.int64) * num_columns + column
    _move_rows(
        values_ptr, out_ptr, source * stride, target, present, inside, width, fill, VEC, BLOCK_W,
        MANY_BLOCKS,
    )  # fmt: skip


_launch_align_tokens = Launcher(_align_tokens_kernel)
_launch_restore_tokens = Launcher(_restore_tokens_kernel)

_MAX_GRID_Y = 65535


def _tile(width: int, vec: int, itemsize: int, num_sequences: int, beside: bool) -> tuple[int, ...]:
    """Warps, BLOCK_B, BLOCK_S, BLOCK_W: 4 accesses a thread, 8 narrow ones where it transposes.

    ``beside``: the tokens of a position lie beside each other, so that a tile is a transpose.
    Narrow accesses in order have nothing to gain from a large program, and a small one ends sooner.
    """
    num_warps = 4 if beside or vec * itemsize == 16 else 2
    num_accesses = 128 * num_warps
    if beside and vec * itemsize < 16:
        num_accesses = 1024
    block_w = min(1 << (width // vec - 1).bit_length(), num_accesses)
    num_rows = num_accesses // block_w
    block_b = min(1 << (num_sequences - 1).bit_length(), 32, num_rows) if beside else 1
    while block_b * _MAX_GRID_Y < num_sequences:
        block_b *= 2
    return num_warps, block_b, max(num_rows // block_b, 1), block_w * vec


def _as_rows(x: Tensor, num_leading: int) -> Tensor:
    """``x`` with its trailing dimensions as one of unit stride; bool as bytes."""
    rows = x.unsqueeze(-1) if x.dim() == num_leading else x.flatten(num_leading)
    rows = rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
    return rows.view(torch.uint8) if x.dtype == torch.bool else rows


def _align_tokens_cuda(
    dense: Tensor, offsets: Tensor, columns: Tensor, num_tokens: int, fill: int, shift: int,
    trim: int, cp_size: int, cp_rank: int | None, zigzag: bool, position_major: bool,
) -> Tensor:  # fmt: skip
    (num_sequences, num_columns), num_ranks = dense.shape[:2], cp_size if cp_rank is None else 1
    num_padded = num_sequences if position_major else offsets.shape[0] - 1
    out = dense.new_empty((num_ranks * num_tokens, *dense.shape[2:]))
    if out.numel() == 0:
        return out
    if num_padded == 0:
        return out.fill_(fill)
    rows = _as_rows(dense, 2)
    width, (stride_batch, stride_column, _) = rows.shape[2], rows.stride()
    vec = math.gcd(16 // rows.itemsize, width, stride_batch, stride_column)
    num_beside = num_sequences if position_major else 1
    num_warps, *tile = _tile(width, vec, rows.itemsize, num_beside, position_major)
    num_blocks = -(-num_tokens // (num_beside * tile[1]))
    _launch_align_tokens(
        (num_blocks, -(-num_beside // tile[0]), num_ranks),
        (
            rows, offsets, columns, out.view(rows.dtype), num_tokens, num_sequences, num_padded,
            num_columns, width // vec, stride_batch // vec, stride_column // vec, fill, shift,
            trim, cp_size, cp_rank or 0,
        ),
        (zigzag, position_major, vec, *tile, width > tile[2]),
        num_warps,
    )  # fmt: skip
    return out


def _restore_tokens_cuda(
    values: Tensor, offsets: Tensor, columns: Tensor, width: int, fill: int, shift: int,
    trim: int, cp_size: int, cp_rank: int | None, zigzag: bool, position_major: bool,
) -> Tensor:  # fmt: skip
    num_sequences, num_ranks = columns.shape[1], cp_size if cp_rank is None else 1
    out = values.new_empty((num_sequences, width, *values.shape[1:]))
    if out.numel() == 0:
        return out
    rows = _as_rows(values, 1)
    row_width, stride = rows.shape[1], rows.stride(0)
    vec = math.gcd(16 // rows.itemsize, row_width, stride)
    num_warps, *tile = _tile(row_width, vec, rows.itemsize, num_sequences, position_major)
    _launch_restore_tokens(
        (-(-width // tile[1]), -(-num_sequences // tile[0])),
        (
            rows, offsets, columns, out.view(rows.dtype), rows.shape[0] // num_ranks,
            num_sequences, width, row_width // vec, stride // vec, fill, shift, trim, cp_size,
            cp_rank or 0, num_ranks,
        ),
        (cp_size > 1, zigzag, position_major, vec, *tile, row_width > tile[2]),
        num_warps,
    )  # fmt: skip
    return out


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::align_tokens",
    "(Tensor dense, Tensor offsets, Tensor columns, SymInt num_tokens, int fill, int shift,"
    " int trim, int cp_size, int? cp_rank, bool zigzag, bool position_major) -> Tensor",
)
torch.library.impl("packhorse::align_tokens", "CPU", align_tokens_reference)
torch.library.impl("packhorse::align_tokens", "CUDA", _align_tokens_cuda)

torch.library.define(
    "packhorse::restore_tokens",
    "(Tensor values, Tensor offsets, Tensor columns, SymInt width, int fill, int shift, int trim,"
    " int cp_size, int? cp_rank, bool zigzag, bool position_major) -> Tensor",
)
torch.library.impl("packhorse::restore_tokens", "CPU", restore_tokens_reference)
torch.library.impl("packhorse::restore_tokens", "CUDA", _restore_tokens_cuda)


@torch.library.register_fake("packhorse::align_tokens")
def _align_tokens_fake(
    dense, offsets, columns, num_tokens, fill, shift, trim, cp_size, cp_rank, *_
) -> Tensor:
    num_ranks = cp_size if cp_rank is None else 1
    return dense.new_empty((num_ranks * num_tokens, *dense.shape[2:]))


@torch.library.register_fake("packhorse::restore_tokens")
def _restore_tokens_fake(values, offsets, columns, width, *_) -> Tensor:
    return values.new_empty((columns.shape[1], width, *values.shape[1:]))


_ops = torch.ops.packhorse
_align_tokens_op = called_directly(_ops.align_tokens.default, _align_tokens_cuda)
_restore_tokens_op = called_directly(_ops.restore_tokens.default, _restore_tokens_cuda)


# --- autograd: outside the operators, so inference pays for none of it ----------------------------


class _AlignTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dense, offsets, columns, num_tokens, fill, *layout):
        ctx.save_for_backward(offsets, columns)
        ctx.width, ctx.layout = dense.shape[1], layout
        return _align_tokens_op(dense, offsets, columns, num_tokens, fill, *layout)

    @staticmethod
    def backward(ctx, grad_out):
        offsets, columns = ctx.saved_tensors
        grad = _restore(grad_out, offsets, columns, ctx.width, 0, *ctx.layout)
        return grad, *(None,) * (4 + len(ctx.layout))


class _RestoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, offsets, columns, width, fill, *layout):
        ctx.save_for_backward(offsets, columns)
        _, _, cp_size, cp_rank, _, _ = layout
        ctx.num_tokens = values.shape[0] // (cp_size if cp_rank is None else 1)
        ctx.layout = layout
        return _restore_tokens_op(values, offsets, columns, width, fill, *layout)

    @staticmethod
    def backward(ctx, grad_out):
        offsets, columns = ctx.saved_tensors
        grad = _align(grad_out, offsets, columns, ctx.num_tokens, 0, *ctx.layout)
        return grad, *(None,) * (4 + len(ctx.layout))


def _align(dense: Tensor, *arguments: Any) -> Tensor:
    call = _AlignTokens.apply if is_differentiated(dense) else _align_tokens_op
    return call(dense, *arguments)


def _restore(values: Tensor, *arguments: Any) -> Tensor:
    call = _RestoreTokens.apply if is_differentiated(values) else _restore_tokens_op
    return call(values, *arguments)


# --- public API -----------------------------------------------------------------------------------


@ranged
def align_tokens(
    dense: Tensor, offsets: Tensor, columns: Tensor, num_tokens: int, *, fill: int = 0,
    shift: int = 0, cp_size: int = 1, cp_rank: int = 0, zigzag: bool = False,
    position_major: bool = False,
) -> Tensor:  # fmt: skip
    """Bring a dense batch into one rank's token order. ``TokenLayout.align`` is the usual way.

    Args:
        dense: [B, S, ...], a dtype of ``SUPPORTED_DTYPES``, CPU or CUDA; strided as it may be.
        offsets: [B + 1] int32 or longer, contiguous, on ``dense.device``: where each sequence
            begins among this context-parallel rank's tokens, 0 first; sequences past B are pads.
            With ``position_major`` [2]: 0 and the tokens of one sequence.
        columns: [2, B] int32, contiguous: the column of each trajectory's first token, and its
            length.
        num_tokens: T, slots of this context-parallel rank; those past the sequences are fill.
        fill: value of slots without a token. Must fit ``dense.dtype``.
        shift: 1 for the next token's value, else 0.
        cp_size, cp_rank: context-parallel ranks and this one.
        zigzag: a rank holds chunks r and 2R-1-r of each padded sequence; else chunk r of R.
        position_major: slots run over sequences first (the router's order of ``[s, b, h]``).

    Returns:
        [T, ...] of ``dense.dtype``, contiguous. Differentiable in ``dense``.

    Raises:
        TypeError: a dtype is unsupported, or ``fill`` is no integer.
        ValueError: a shape or device is wrong, a number is out of range, or tables on the CPU are
            no layout. Those on a GPU are not read; ``PACKHORSE_CHECK=1`` checks them there.

    Example:
        >>> dense = torch.tensor([[0, 11, 12], [21, 22, 23]])  # left padded
        >>> offsets = torch.tensor([0, 4, 7], dtype=torch.int32)
        >>> columns = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)
        >>> align_tokens(dense, offsets, columns, 7, fill=-1)
        tensor([11, 12, -1, -1, 21, 22, 23])
    """
    name = "align_tokens"
    _check(name, "dense", dense, "[B, S, ...]", fill, offsets, columns, cp_size, position_major)
    if not 0 <= num_tokens < 2**31:
        raise ValueError(f"{name}: num_tokens must be in [0, 2**31), got {num_tokens}")
    if dense.shape[0] != columns.shape[1]:
        raise ValueError(f"{name}: dense of {dense.shape[0]} rows, columns of {columns.shape[1]}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{name}: cp_rank={cp_rank} is not in [0, cp_size={cp_size})")
    if shift not in (0, 1):
        raise ValueError(f"{name}: shift must be 0 or 1, got {shift}")
    zigzag = zigzag and cp_size > 1
    if checks_values(offsets):
        _check_table_values(
            name, offsets, columns, dense.shape[1], num_tokens, cp_size, zigzag, position_major
        )
    return _align(
        dense, offsets, columns, num_tokens, fill, shift, shift, cp_size, cp_rank, zigzag,
        position_major,
    )  # fmt: skip


@ranged
def restore_tokens(
    values: Tensor, offsets: Tensor, columns: Tensor, width: int, *, fill: int = 0,
    cp_size: int = 1, zigzag: bool = False, position_major: bool = False,
) -> Tensor:  # fmt: skip
    """Bring the values of all ranks' tokens back to the batch; see ``TokenLayout.restore``.

    The value of position s lands in column ``first_column + s``; that of the last position, which
    predicts no token, is left out.

    Args:
        values: [R * T, ...], a dtype of ``SUPPORTED_DTYPES``, CPU or CUDA: the values of the
            context-parallel ranks one after another, T each.
        offsets, columns, cp_size, zigzag, position_major: as in ``align_tokens``.
        width: S - 1, columns of the result.
        fill: value of cells without a token. Must fit ``values.dtype``.

    Returns:
        [B, S - 1, ...] of ``values.dtype``, contiguous. Differentiable in ``values``.

    Raises:
        As ``align_tokens``.
    """
    name = "restore_tokens"
    _check(name, "values", values, "[R * T, ...]", fill, offsets, columns, cp_size, position_major)
    if not 0 <= width < 2**31 - 1:
        raise ValueError(f"{name}: width must be in [0, 2**31 - 1), got {width}")
    if values.shape[0] % cp_size:
        raise ValueError(f"{name}: cp_size={cp_size} does not divide {values.shape[0]} values")
    zigzag = zigzag and cp_size > 1
    if checks_values(offsets):
        num_tokens = values.shape[0] // cp_size
        _check_table_values(
            name, offsets, columns, width + 1, num_tokens, cp_size, zigzag, position_major
        )
    cp_rank = None if cp_size > 1 else 0
    return _restore(
        values, offsets, columns, width, fill, 0, 1, cp_size, cp_rank, zigzag, position_major
    )


def _check(
    name: str, field: str, rows: Tensor, shape: str, fill: int, offsets: Tensor, columns: Tensor,
    cp_size: int, position_major: bool,
) -> None:  # fmt: skip
    check_tensors(name, **{field: rows}, offsets=offsets, columns=columns)
    if rows.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"{name}: {field} has unsupported dtype {rows.dtype}")
    num_leading = shape.count(",")  # dimensions before the dots
    if rows.dim() < num_leading or any(size >= 2**31 for size in rows.shape[:num_leading]):
        raise ValueError(f"{name}: {field} must be {shape} below 2**31, got {[*rows.shape]}")
    if not isinstance(fill, int | torch.SymInt):
        raise TypeError(f"{name}: fill must be an integer, got {fill!r}")
    if not fill_fits(fill, rows.dtype):
        raise ValueError(f"{name}: fill={fill} does not fit {rows.dtype}")
    check_tables(name, offsets, "columns", columns, num_rows=2)
    if offsets.device != rows.device:
        raise ValueError(f"{name}: offsets on {offsets.device}, {field} on {rows.device}")
    fewest = 2 if position_major else columns.shape[1] + 1
    if offsets.dim() != 1 or offsets.shape[0] < fewest:
        raise ValueError(f"{name}: offsets must be [{fewest}] or longer, got {[*offsets.shape]}")
    if cp_size < 1:
        raise ValueError(f"{name}: cp_size must be >= 1, got {cp_size}")


def _check_table_values(
    name: str, offsets: Tensor, columns: Tensor, num_columns: int, num_tokens: int, cp_size: int,
    zigzag: bool, position_major: bool,
) -> None:  # fmt: skip
    offsets, (first_column, length) = offsets.long(), columns.long()
    local_length = offsets[1:] - offsets[:-1]
    num_used = offsets[1] * columns.shape[1] if position_major else offsets[-1]
    rises = (offsets[0] == 0) & (local_length >= 0).all() & (num_used <= num_tokens)
    check_values(rises, f"{name}: offsets must rise from 0 to at most the tokens of a rank")
    in_batch = (first_column >= 0) & (length >= 0) & (first_column + length <= num_columns)
    check_values(in_batch.all(), f"{name}: columns reach beyond the batch")
    local_length = local_length[: 1 if position_major else columns.shape[1]]
    fits = (length <= cp_size * local_length).all()
    check_values(fits, f"{name}: a length of columns exceeds the padded one of offsets")
    if zigzag:
        even = (local_length % 2 == 0).all()
        check_values(even, f"{name}: zigzag needs an even number of each sequence's tokens")
