"""Row ids of a rank's tokens: for each token slot, which row of a packed field belongs to it.

    slot i -> (sequence b, position s)      by binary search over the padded offsets ("thd"),
                                            or s outer, b inner ("bshd")
    s      -> s + shift                     next-token fields look one position ahead
    row_ids[i] = bases[b] + s - starts[b]   where 0 <= s - starts[b] < counts[b], else -1

A sequence padded to P tokens gives each of R context-parallel ranks P/R of them: chunks r and
2R-1-r of 2R ("zigzag") or chunk r of R ("contiguous"). All of it is integer arithmetic on a table
of a few integers a sequence; nothing is read back.

Sizes: B sequences (a tail pad counts as one, with no rows), M row ids. Contract: shift 0 or 1;
starts[b] + counts[b] does not pass the padded length of b, so a shifted last slot finds no row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, called_directly, is_plain_cuda, kernel_name

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def row_ids_reference(
    offsets: Tensor,
    segments: Tensor,
    num_ids: int,
    first_id: int,
    cp_size: int,
    cp_rank: int,
    zigzag: bool,
    position_major: bool,
    shift: int,
) -> Tensor:
    slots = torch.arange(first_id, first_id + num_ids, device=offsets.device)
    offsets = offsets.long()
    if position_major:  # bshd: every sequence has offsets[1] tokens here
        num_sequences = segments.shape[1]
        sequence, local = slots % num_sequences, slots // num_sequences
        local_length = offsets[1].expand(num_ids)
    else:
        sequence = torch.searchsorted(offsets[:-1].contiguous(), slots, right=True) - 1
        local = slots - offsets[sequence]
        local_length = offsets[sequence + 1] - offsets[sequence]
    if zigzag:
        half = local_length // 2
        mirrored = local >= half
        position = torch.where(
            mirrored, local + (2 * cp_size - 2 - cp_rank) * half, local + cp_rank * half
        )
    else:
        position = local + cp_rank * local_length
    bases, counts, starts = segments.long()[:, sequence]
    row = position + shift - starts
    found = (row >= 0) & (row < counts) & (local < local_length)
    return torch.where(found, bases + row, -1)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def position_in_sequence(local, local_length, cp_size, cp_rank, ZIGZAG: tl.constexpr):
    """Position in the padded sequence of its ``local``-th token on this context-parallel rank."""
    if ZIGZAG:
        half = local_length // 2
        # the second half is chunk 2R-1-r, and local already counts one half
        position = tl.where(
            local < half, local + cp_rank * half, local + (2 * cp_size - 2 - cp_rank) * half
        )
    else:
        position = local + cp_rank * local_length
    return position


@triton.jit
def sequences_of_slots(
    offsets_ptr, slots, in_bounds, first_slot, num_sequences,
    BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M] of each slot the last sequence whose offset is <= slot, so empty ones are passed.

    The slots of a block are ``first_slot`` and those after it. One pass over the offsets finds the
    sequences of the first and of the last; what is left between them is searched slot by slot.
    """
    low = 0
    high = 0
    for begin in range(0, num_sequences - 1, BLOCK_B):
        sequence = begin + 1 + tl.arange(0, BLOCK_B)
        there = sequence < num_sequences
        offset = tl.load(offsets_ptr + sequence, mask=there, other=0)
        low += tl.sum((there & (offset <= first_slot)).to(tl.int32))
        high += tl.sum((there & (offset - first_slot < BLOCK_M)).to(tl.int32))
    span = high - low
    lows = tl.zeros([BLOCK_M], dtype=tl.int32) + low
    highs = lows + span
    while span > 0:
        middle = (lows + highs + 1) // 2
        begins = tl.load(offsets_ptr + middle, mask=in_bounds, other=0) <= slots
        lows = tl.where(begins, middle, lows)
        highs = tl.where(begins, highs, middle - 1)
        span = span // 2
    return lows


@triton.jit(
    repr=kernel_name("make_row_ids", "ZIGZAG", "POSITION_MAJOR"),
    do_not_specialize=[
        "first_offset", "first_segment", "num_ids", "first_id", "num_sequences", "cp_size",
        "cp_rank", "shift",
    ],
    do_not_specialize_on_alignment=["offsets_ptr", "segments_ptr"],
)  # fmt: skip
def _make_row_ids_kernel(
    offsets_ptr,  # [B + 1] int32; with POSITION_MAJOR [2]: 0, tokens of a sequence on this rank
    segments_ptr,  # [3, B] int32: bases, counts, starts
    row_ids_ptr,  # [M] int64
    first_offset,  # where in the memory of offsets_ptr they begin
    first_segment,
    num_ids,  # M
    first_id,  # slot of row_ids[0]
    num_sequences,  # B
    cp_size,
    cp_rank,
    shift,
    ZIGZAG: tl.constexpr,
    POSITION_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    offsets_ptr += first_offset
    segments_ptr += first_segment
    # int64 for the bound and the address: the last block may pass 2**31 slots
    begin = tl.program_id(0).to(tl.int64) * BLOCK_M
    ids = begin + tl.arange(0, BLOCK_M)
    in_bounds = ids < num_ids
    slots = tl.where(in_bounds, ids + first_id, 0).to(tl.int32)
    if POSITION_MAJOR:
        sequence = slots % num_sequences
        local = slots // num_sequences
        local_length = tl.load(offsets_ptr + 1)
    else:
        sequence = sequences_of_slots(
            offsets_ptr, slots, in_bounds, (begin + first_id).to(tl.int32), num_sequences,
            BLOCK_M, BLOCK_B,
        )  # fmt: skip
        begins = tl.load(offsets_ptr + sequence, mask=in_bounds, other=0)
        local = slots - begins
        local_length = tl.load(offsets_ptr + sequence + 1, mask=in_bounds, other=0) - begins
    position = position_in_sequence(local, local_length, cp_size, cp_rank, ZIGZAG)
    base = tl.load(segments_ptr + sequence, mask=in_bounds, other=0)
    count = tl.load(segments_ptr + num_sequences + sequence, mask=in_bounds, other=0)
    start = tl.load(segments_ptr + 2 * num_sequences + sequence, mask=in_bounds, other=0)
    row = position + shift - start
    found = (row >= 0) & (row < count) & (local < local_length)
    tl.store(row_ids_ptr + ids, tl.where(found, base + row, -1).to(tl.int64), mask=in_bounds)


_launch_make_row_ids = Launcher(_make_row_ids_kernel)

_BLOCK_M = 256
_BLOCK_B = 1024


def _row_ids_cuda(
    offsets: Tensor,
    segments: Tensor,
    num_ids: int,
    first_id: int,
    cp_size: int,
    cp_rank: int,
    zigzag: bool,
    position_major: bool,
    shift: int,
) -> Tensor:
    return _launch_row_ids(
        offsets, segments, 0, 0, segments.shape[1], num_ids, first_id, cp_size, cp_rank, zigzag,
        position_major, shift,
    )  # fmt: skip


def _launch_row_ids(
    offsets: Tensor,
    segments: Tensor,
    first_offset: int,
    first_segment: int,
    num_sequences: int,
    num_ids: int,
    first_id: int,
    cp_size: int,
    cp_rank: int,
    zigzag: bool,
    position_major: bool,
    shift: int,
) -> Tensor:
    out = offsets.new_empty(num_ids, dtype=torch.int64)
    if num_ids > 0:
        _launch_make_row_ids(
            ((num_ids + _BLOCK_M - 1) // _BLOCK_M,),
            (
                offsets, segments, out, first_offset, first_segment, num_ids, first_id,
                num_sequences, cp_size, cp_rank, shift,
            ),
            (zigzag, position_major, _BLOCK_M, _BLOCK_B),
        )  # fmt: skip
    return out


# --- operator -------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::row_ids",
    "(Tensor offsets, Tensor segments, SymInt num_ids, SymInt first_id, int cp_size, int cp_rank,"
    " bool zigzag, bool position_major, int shift) -> Tensor",
)
torch.library.impl("packhorse::row_ids", "CPU", row_ids_reference)
torch.library.impl("packhorse::row_ids", "CUDA", _row_ids_cuda)


@torch.library.register_fake("packhorse::row_ids")
def _row_ids_fake(
    offsets, segments, num_ids, first_id, cp_size, cp_rank, zigzag, position_major, shift
) -> Tensor:
    return offsets.new_empty(num_ids, dtype=torch.int64)


_row_ids_op = called_directly(torch.ops.packhorse.row_ids.default, _row_ids_cuda)


def row_ids_of_table(
    table: Tensor, num_offsets: int, num_sequences: int, num_ids: int, first_id: int,
    cp_size: int, cp_rank: int, zigzag: bool, position_major: bool, shift: int,
) -> Tensor:  # fmt: skip
    """``make_row_ids`` without its checks, of ``offsets`` and ``segments`` one after another in
    ``table`` [num_offsets + 3 B or longer] int32: a plain call on a GPU cuts nothing out of it."""
    if is_plain_cuda(table):
        return _launch_row_ids(
            table, table, 0, num_offsets, num_sequences, num_ids, first_id, cp_size, cp_rank,
            zigzag, position_major, shift,
        )  # fmt: skip
    segments = table[num_offsets : num_offsets + 3 * num_sequences].view(3, num_sequences)
    return _row_ids_op(
        table[:num_offsets], segments, num_ids, first_id, cp_size, cp_rank, zigzag,
        position_major, shift,
    )  # fmt: skip


# --- public API -----------------------------------------------------------------------------------


@ranged
def make_row_ids(
    offsets: Tensor,
    segments: Tensor,
    num_ids: int,
    *,
    first_id: int = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
    zigzag: bool = False,
    position_major: bool = False,
    shift: int = 0,
) -> Tensor:
    """Row id of each token slot of one rank. ``TokenLayout.row_ids`` is the usual way to call it.

    Args:
        offsets: [B + 1] int32, contiguous: where each sequence begins among this context-parallel
            rank's tokens, 0 first. With ``position_major`` [2]: 0 and the tokens of one sequence.
        segments: [3, B] int32, contiguous, on ``offsets.device``: of each sequence the row id of
            its first row, its number of rows, and the position of the first row.
        num_ids: M, slots ``first_id`` to ``first_id + M - 1``; those past the last sequence have no
            row.
        first_id: first slot, >= 0: where a sequence-parallel slice begins.
        cp_size, cp_rank: context-parallel ranks and this one.
        zigzag: this rank holds chunks r and 2R-1-r of each sequence; else chunk r of R.
        position_major: slots run over sequences first (the router's order of ``[s, b, h]``).
        shift: 1 for the next token's row, else 0.

    Returns:
        [M] int64, -1 where the slot has no row.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, or a number is out of range.
            The values of the tables are not read.
    """
    name = "make_row_ids"
    check_tables(name, offsets, "segments", segments, num_rows=3)
    expected = 2 if position_major else segments.shape[1] + 1
    if offsets.dim() != 1 or offsets.shape[0] != expected:
        raise ValueError(f"{name}: offsets must be [{expected}], got {tuple(offsets.shape)}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{name}: cp_rank={cp_rank} is not in [0, cp_size={cp_size})")
    if not isinstance(shift, int) or shift not in (0, 1):
        raise ValueError(f"{name}: shift must be 0 or 1, got {shift}")
    if num_ids < 0 or first_id < 0:
        raise ValueError(f"{name}: num_ids={num_ids} and first_id={first_id} must be >= 0")
    if num_ids > 0 and segments.shape[1] == 0:
        raise ValueError(f"{name}: {num_ids} slots, but segments name no sequence")
    return _row_ids_op(
        offsets, segments, num_ids, first_id, cp_size, cp_rank, zigzag and cp_size > 1,
        position_major, shift,
    )  # fmt: skip


def check_tables(name: str, offsets: Tensor, field: str, table: Tensor, *, num_rows: int) -> None:
    """``offsets`` and the [num_rows, B] ``table`` are contiguous int32 on one device."""
    for argument, given in (("offsets", offsets), (field, table)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(given).__name__}")
        if given.dtype != torch.int32:
            raise TypeError(f"{name}: {argument} must be int32, got {given.dtype}")
        if not given.is_contiguous():
            raise ValueError(f"{name}: {argument} must be contiguous")
    if table.dim() != 2 or table.shape[0] != num_rows:
        raise ValueError(f"{name}: {field} must be [{num_rows}, B], got {tuple(table.shape)}")
    if table.device != offsets.device:
        raise ValueError(f"{name}: {field} on {table.device}, offsets on {offsets.device}")
