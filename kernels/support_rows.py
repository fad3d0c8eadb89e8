"""Lay sampling-support rows out in model order: by row id, on the device, nothing read back.

    gather_support          out[i] = support[row_ids[i]]                                [M, C]
    gather_ragged_support   out[out_offsets[i] : out_offsets[i + 1]] = row(row_ids[i])
    pad_ragged_support      out[i] = row(row_ids[i]), then -1                           [M, width]

    row(r) = token_ids[row_offsets[r] : row_offsets[r + 1]];  no id at all where r = -1

How many ids a ragged gather yields depends on the data. Nothing reads that: the output has
``capacity`` ids, of which out_offsets[M] are used and the others are -1 (``NO_CANDIDATE``). A
capacity that is too small loses ids and nothing else: out_offsets tell what was needed, and the ids
up to the capacity are right.

Two launches. The first sums the widths of blocks of BLOCK_M slots and of groups of blocks. In the
second, program b < used_blocks writes the offsets of block b and its first SPAN ids; the others
share out the further spans, so that a row of the whole vocabulary among rows of two is copied by as
many programs as it has spans, and then the end of the buffer. Where the rows of a block are one run
of ``token_ids``, as those of a trajectory are, it is copied as one; else each position counts the
rows that begin at or before it.

Sizes: N rows, M row ids, C width. Offsets are int64: 14,000 rows of a vocabulary of 152,000 ids
pass 2**31, and a row's 8 bytes are few beside its ids. Any M and any total work; a row that is
gathered ragged has at most ``MAX_ROW_IDS`` ids, so that a block's positions fit 32 bits.
"""

import math
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.rows import (
    _gather_rows_op,
    check_row_ids,
    check_row_range,
    check_tensors,
    check_values,
    checks_values,
)
from packhorse.packed.sentinels import NO_CANDIDATE

#: More than any vocabulary has; 256 such rows are 2**30 ids.
MAX_ROW_IDS: Final = 1 << 22


class RaggedSupport(NamedTuple):
    """Support rows of different widths, in model order.

    Slot i has ``token_ids[row_offsets[i] : row_offsets[i + 1]]``.
    """

    token_ids: Tensor  # [capacity] int32, -1 from row_offsets[M] on
    row_offsets: Tensor  # [M + 1] int64, 0 first


# --- reference: the specification, and what CPU tensors run ---------------------------------------


def gather_ragged_support_reference(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    begins, counts = _row_bounds(row_offsets, row_ids)
    out_offsets = row_offsets.new_zeros(row_ids.shape[0] + 1)
    out_offsets[1:] = counts.cumsum(0)
    slots = torch.repeat_interleave(counts)[:capacity]
    positions = torch.arange(slots.shape[0], device=slots.device) - out_offsets[slots]
    out = token_ids.new_full((capacity,), NO_CANDIDATE)
    out[: slots.shape[0]] = token_ids[begins[slots] + positions]
    return out, out_offsets


def pad_ragged_support_reference(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, width: int
) -> Tensor:
    begins, counts = _row_bounds(row_offsets, row_ids)
    columns = torch.arange(width, device=row_ids.device)
    present = columns < counts[:, None]
    out = token_ids.new_full((row_ids.shape[0], width), NO_CANDIDATE)
    out[present] = token_ids[(begins[:, None] + columns)[present]]
    return out


def _row_bounds(row_offsets: Tensor, row_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the row of each slot begins, and its number of ids."""
    begins, counts = torch.zeros_like(row_ids), torch.zeros_like(row_ids)
    present = row_ids >= 0
    begins[present] = row_offsets[row_ids[present]]
    counts[present] = row_offsets[row_ids[present] + 1] - begins[present]
    return begins, counts


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(
    repr=kernel_name("sum_support_rows", "BLOCK_M"),
    do_not_specialize=["num_ids", "num_groups"],
    do_not_specialize_on_alignment=["row_offsets_ptr", "row_ids_ptr"],
)
def _sum_support_rows_kernel(
    row_offsets_ptr,  # [N + 1] int64
    row_ids_ptr,  # [M] int64
    sums_ptr,  # int64: ids of each group, spans after the first of its blocks, ids of each block
    num_ids,  # M
    num_groups,
    BLOCKS: tl.constexpr,  # of a group
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    blocks = group * BLOCKS + tl.arange(0, BLOCKS)
    slots = blocks[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    rows = tl.load(row_ids_ptr + slots, mask=slots < num_ids, other=-1)
    begins = tl.load(row_offsets_ptr + rows, mask=rows >= 0, other=0)
    ends = tl.load(row_offsets_ptr + rows + 1, mask=rows >= 0, other=0)
    totals = tl.sum(ends - begins, axis=1)
    tl.store(sums_ptr + 2 * num_groups + blocks, totals)
    tl.store(sums_ptr + group, tl.sum(totals))
    tl.store(sums_ptr + num_groups + group, tl.sum(totals // SPAN))


@triton.jit(
    repr=kernel_name("copy_support_rows", "BLOCK_M", "CHUNK"),
    do_not_specialize=["num_ids", "num_groups", "used_blocks", "capacity"],
    do_not_specialize_on_alignment=["token_ids_ptr", "row_offsets_ptr", "row_ids_ptr"],
)
def _copy_support_rows_kernel(
    token_ids_ptr,  # [*] int32
    row_offsets_ptr,  # [N + 1] int64
    row_ids_ptr,  # [M] int64
    sums_ptr,  # as above
    shifts_ptr,  # [programs, BLOCK_M] int64: of each row with an id, where its first one is in
    #              token_ids, less its position in the block
    marks_ptr,  # [programs, SPAN] int8: 1 where a row begins
    out_ptr,  # [capacity] int32
    out_offsets_ptr,  # [M + 1] int64
    num_ids,  # M
    num_groups,
    used_blocks,  # with a slot
    capacity,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,  # positions of a program
    CHUNK: tl.constexpr,  # of them at once, where each has to find its row
    RUN: tl.constexpr,  # and where all are one run
    BLOCK_G: tl.constexpr,  # groups read at once
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_G)
    members = tl.arange(0, BLOCKS)
    begin = (program - program).to(tl.int64)  # ids of all blocks before this one
    span = begin
    if program < used_blocks:
        block = program
        group = program // BLOCKS
        groups_before = group
    else:
        # the span of this ordinal among all but the first of each block
        span += program - used_blocks
        seen = begin
        passed = begin
        group = program - program
        groups_before = group
        for first in range(0, num_groups, BLOCK_G):
            there = first + lanes < num_groups
            sums = tl.load(sums_ptr + first + lanes, mask=there, other=0)
            spans = tl.load(sums_ptr + num_groups + first + lanes, mask=there, other=0)
            earlier = there & (seen + tl.cumsum(spans) <= span)
            group += tl.sum(earlier.to(tl.int32))
            begin += tl.sum(tl.where(earlier, sums, 0))
            passed += tl.sum(tl.where(earlier, spans, 0))
            seen += tl.sum(spans)
        span -= passed
        block = group * BLOCKS
        if group < num_groups:
            sums = tl.load(sums_ptr + 2 * num_groups + block + members)
            earlier = tl.cumsum(sums // SPAN) <= span
            block += tl.sum(earlier.to(tl.int32))
            span += 1 - tl.sum(tl.where(earlier, sums // SPAN, 0))
    if group < num_groups:
        local = tl.arange(0, BLOCK_M)
        slots = block.to(tl.int64) * BLOCK_M + local
        rows = tl.load(row_ids_ptr + slots, mask=slots < num_ids, other=-1)
        begins = tl.load(row_offsets_ptr + rows, mask=rows >= 0, other=0)
        ends = tl.load(row_offsets_ptr + rows + 1, mask=rows >= 0, other=0)
        for first in range(0, groups_before, BLOCK_G):
            earlier = first + lanes < groups_before
            begin += tl.sum(tl.load(sums_ptr + first + lanes, mask=earlier, other=0))
        sums = tl.load(sums_ptr + 2 * num_groups + group * BLOCKS + members)
        begin += tl.sum(tl.where(members < block % BLOCKS, sums, 0))
        counts = (ends - begins).to(tl.int32)
        stops = tl.cumsum(counts)
        total = tl.sum(counts)
        if span == 0:
            tl.store(out_offsets_ptr + 1 + slots, begin + stops, mask=slots < num_ids)
            if block == 0:
                tl.store(out_offsets_ptr, begin)
        used = counts > 0
        shifts = begins - (stops - counts)
        least = tl.min(tl.where(used, shifts, 1 << 62))
        most = tl.max(tl.where(used, shifts, -(1 << 62)))
        position = (span * SPAN).to(tl.int32)
        end = tl.minimum(total, position + SPAN)
        if least >= most:
            # the rows of the block are one run of token_ids
            end = tl.maximum(tl.minimum(capacity - begin, end), 0).to(tl.int32)
            lane = tl.arange(0, RUN)
            while position < end:
                wanted = lane < end - position
                ids = tl.load(token_ids_ptr + (least + position) + lane, mask=wanted, other=0)
                tl.store(out_ptr + (begin + position) + lane, ids, mask=wanted)
                position += RUN
        else:
            # the row of a position: how many rows with an id begin at or before it
            shifts_ptr += program.to(tl.int64) * BLOCK_M
            marks_ptr += program.to(tl.int64) * SPAN
            tl.store(marks_ptr + tl.arange(0, SPAN), tl.zeros([SPAN], dtype=tl.int8))
            tl.store(shifts_ptr + tl.cumsum(used.to(tl.int32)) - 1, shifts, mask=used)
            tl.debug_barrier()  # other threads of the program write and read them
            begun = used & (stops > position) & (stops - counts < position + SPAN)
            at = tl.maximum(stops - counts - position, 0)
            tl.store(marks_ptr + at, tl.full([BLOCK_M], 1, dtype=tl.int8), mask=begun)
            tl.debug_barrier()
            seen = tl.sum((used & (stops <= position)).to(tl.int32)) - 1
            chunk = tl.arange(0, CHUNK)
            while position < end:
                marks = tl.load(marks_ptr + chunk).to(tl.int32)
                place = position + chunk
                wanted = (place < end) & (begin + place < capacity)
                shift = tl.load(shifts_ptr + seen + tl.cumsum(marks), mask=wanted, other=0)
                ids = tl.load(token_ids_ptr + shift + place, mask=wanted, other=0)
                tl.store(out_ptr + begin + place, ids, mask=wanted)
                seen += tl.sum(marks)
                marks_ptr += CHUNK
                position += CHUNK
    else:
        # past the last id: ``begin`` is the total
        for first in range(0, SPAN, CHUNK):
            out = begin + span * SPAN + first + tl.arange(0, CHUNK)
            tl.store(out_ptr + out, tl.full([CHUNK], -1, dtype=tl.int32), mask=out < capacity)


@triton.jit(
    repr=kernel_name("pad_support_rows", "VEC"),
    do_not_specialize=["num_units", "units_per_row"],
    do_not_specialize_on_alignment=["token_ids_ptr", "row_offsets_ptr", "row_ids_ptr"],
)
def _pad_support_rows_kernel(
    token_ids_ptr,  # [*] int32
    row_offsets_ptr,  # [N + 1] int64
    row_ids_ptr,  # [M] int64
    out_ptr,  # [M, width] int32
    num_units,  # M * units_per_row
    units_per_row,  # width / VEC
    VEC: tl.constexpr,  # ids of a unit: 16 bytes where the width allows
    BLOCK_U: tl.constexpr,
):
    # as in rows.py: one 64-bit division a program, 32 bits within it
    begin = tl.program_id(0).to(tl.int64) * BLOCK_U
    first_slot = begin // units_per_row
    within = (begin - first_slot * units_per_row).to(tl.int32) + tl.arange(0, BLOCK_U)
    passed = within // units_per_row
    unit = within - passed * units_per_row
    flat = begin + tl.arange(0, BLOCK_U)
    in_bounds = flat < num_units
    rows = tl.load(row_ids_ptr + first_slot + passed, mask=in_bounds, other=-1)
    begins = tl.load(row_offsets_ptr + rows, mask=rows >= 0, other=0)
    ends = tl.load(row_offsets_ptr + rows + 1, mask=rows >= 0, other=0)
    lane = tl.arange(0, VEC)[None, :]
    source = (begins + unit.to(tl.int64) * VEC)[:, None] + lane
    ids = tl.load(token_ids_ptr + source, mask=source < ends[:, None], other=-1)
    tl.store(out_ptr + flat[:, None] * VEC + lane, ids, mask=in_bounds[:, None])


_launch_sum_support_rows = Launcher(_sum_support_rows_kernel)
_launch_copy_support_rows = Launcher(_copy_support_rows_kernel)
_launch_pad_support_rows = Launcher(_pad_support_rows_kernel)

_BLOCK_M = 256  # slots of a block
_BLOCKS = 4  # of a group
_BLOCK_G = 256  # groups read at once
_SPAN = 4096  # ids that a program copies
_CHUNK = 512  # of them at once
_RUN = 2048
_BLOCK_U = 512


def _gather_ragged_support_cuda(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    num_ids = row_ids.shape[0]
    if num_ids == 0:
        return token_ids.new_full((capacity,), NO_CANDIDATE), row_offsets.new_zeros(1)
    out = token_ids.new_empty(capacity)
    out_offsets = row_offsets.new_empty(num_ids + 1)
    used_blocks = _ceil_div(num_ids, _BLOCK_M)
    num_groups = _ceil_div(used_blocks, _BLOCKS)
    # a span after the first has SPAN ids of its block before it, so that so many programs reach the
    # capacity: with such spans, and from the last id on with those of the end
    programs = used_blocks + capacity // _SPAN + 2
    num_sums = num_groups * (2 + _BLOCKS)
    scratch = row_offsets.new_empty(num_sums + programs * _BLOCK_M)
    sums, shifts = scratch[:num_sums], scratch[num_sums:]
    marks = token_ids.new_empty(programs * _SPAN, dtype=torch.int8)
    _launch_sum_support_rows(
        (num_groups,),
        (row_offsets, row_ids, sums, num_ids, num_groups),
        (_BLOCKS, _BLOCK_M, _SPAN),
    )
    _launch_copy_support_rows(
        (programs,),
        (
            token_ids, row_offsets, row_ids, sums, shifts, marks, out, out_offsets, num_ids,
            num_groups, used_blocks, capacity,
        ),
        (_BLOCKS, _BLOCK_M, _SPAN, _CHUNK, _RUN, _BLOCK_G),
    )  # fmt: skip
    return out, out_offsets


def _pad_ragged_support_cuda(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, width: int
) -> Tensor:
    num_ids = row_ids.shape[0]
    out = token_ids.new_empty((num_ids, width))
    if out.numel() == 0:
        return out
    vec = math.gcd(4, width)
    num_units = num_ids * (width // vec)
    _launch_pad_support_rows(
        (_ceil_div(num_units, _BLOCK_U),),
        (token_ids, row_offsets, row_ids, out, num_units, width // vec),
        (vec, _BLOCK_U),
    )
    return out


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::gather_ragged_support",
    "(Tensor token_ids, Tensor row_offsets, Tensor row_ids, SymInt capacity) -> (Tensor, Tensor)",
)
torch.library.impl("packhorse::gather_ragged_support", "CPU", gather_ragged_support_reference)
torch.library.impl("packhorse::gather_ragged_support", "CUDA", _gather_ragged_support_cuda)

torch.library.define(
    "packhorse::pad_ragged_support",
    "(Tensor token_ids, Tensor row_offsets, Tensor row_ids, SymInt width) -> Tensor",
)
torch.library.impl("packhorse::pad_ragged_support", "CPU", pad_ragged_support_reference)
torch.library.impl("packhorse::pad_ragged_support", "CUDA", _pad_ragged_support_cuda)


@torch.library.register_fake("packhorse::gather_ragged_support")
def _gather_ragged_support_fake(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    return token_ids.new_empty(capacity), row_offsets.new_empty(row_ids.shape[0] + 1)


@torch.library.register_fake("packhorse::pad_ragged_support")
def _pad_ragged_support_fake(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, width: int
) -> Tensor:
    return token_ids.new_empty((row_ids.shape[0], width))


_ops = torch.ops.packhorse
_gather_ragged_support_op = called_directly(
    _ops.gather_ragged_support.default, _gather_ragged_support_cuda
)
_pad_ragged_support_op = called_directly(_ops.pad_ragged_support.default, _pad_ragged_support_cuda)


# --- public API -----------------------------------------------------------------------------------


@ranged
def gather_support(support: Tensor, row_ids: Tensor) -> Tensor:
    """Collect the support rows of one width that ``row_ids`` names.

    Args:
        support: [N, C] int32, CPU or CUDA: the ids that the sampler kept at each response token,
            then -1.
        row_ids: [M] int64, contiguous, on ``support.device``, each in [-1, N): from
            ``TokenLayout.support_row_ids``.

    Returns:
        [M, C] int32, contiguous; -1 where the slot has no row.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape or device is wrong, or a row id on the CPU is out of range. Values on a
            GPU are not read, since that would stall it; ``PACKHORSE_CHECK=1`` checks them there.

    Source: vLLM's ``sampling_mask``, packed by ``pack_support``.

    Example:
        >>> support = torch.tensor([[7, 9], [4, -1]], dtype=torch.int32)
        >>> gather_support(support, torch.tensor([1, -1])).tolist()
        [[4, -1], [-1, -1]]
    """
    name = "gather_support"
    check_tensors(name, support=support, row_ids=row_ids)
    if support.dtype != torch.int32:
        raise TypeError(f"{name}: support must be int32, got {support.dtype}")
    if support.dim() != 2:
        raise ValueError(f"{name}: support must be [N, C], got {tuple(support.shape)}")
    check_row_ids(name, row_ids, "support", support)
    if checks_values(row_ids):
        check_row_range(name, row_ids, support.shape[0])
    return _gather_rows_op(support, row_ids, NO_CANDIDATE)


@ranged
def gather_ragged_support(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, *, capacity: int | None = None
) -> RaggedSupport:
    """Collect the support rows of different widths that ``row_ids`` names.

    Args:
        token_ids: [total ids] int32, contiguous, CPU or CUDA: the ids of all rows, one row after
            another.
        row_offsets: [N + 1] int64, contiguous, on ``token_ids.device``: row r holds
            ``token_ids[row_offsets[r] : row_offsets[r + 1]]``, at most ``MAX_ROW_IDS`` ids. First
            0, last the total, non-decreasing.
        row_ids: [M] int64, contiguous, on ``token_ids.device``, each in [-1, N).
        capacity: ids of the output, at least those of the named rows. By default as many as
            ``token_ids`` has, which suffices while no row is named twice; a caller that knows fewer
            saves writing the rest.

    Returns:
        ``RaggedSupport``: token_ids [capacity] int32 and row_offsets [M + 1] int64; a slot without
        a row has no id, and the ids from ``row_offsets[M]`` on are -1. On a GPU a capacity that is
        too small cuts the ids off at its end, while ``row_offsets`` tell what was needed.

    Raises:
        TypeError: a dtype is wrong, or ``capacity`` is no int.
        ValueError: a shape or device is wrong, ``capacity`` is negative; or, on the CPU, the
            offsets do not rise from 0 to the total, a row is too wide, a row id is out of range, or
            ``capacity`` is too small. Values on a GPU are not read; ``PACKHORSE_CHECK=1`` checks
            them there.

    Source: vLLM's ``sampling_mask`` is such ids and counts.

    Example:
        >>> token_ids = torch.tensor([7, 9, 4], dtype=torch.int32)
        >>> out = gather_ragged_support(token_ids, torch.tensor([0, 2, 3]), torch.tensor([1, -1]))
        >>> out.token_ids.tolist(), out.row_offsets.tolist()
        ([4, -1, -1], [0, 1, 1])
    """
    name = "gather_ragged_support"
    check_ragged_rows(name, token_ids, row_offsets)
    check_row_ids(name, row_ids, "token_ids", token_ids)
    if checks_values(row_ids):
        check_row_range(name, row_ids, row_offsets.shape[0] - 1)
    if capacity is None:
        capacity = token_ids.shape[0]
    else:
        _check_size(name, "capacity", capacity)
    if checks_values(row_offsets):
        narrow = (row_offsets.diff() <= MAX_ROW_IDS).all()
        check_values(narrow, f"{name}: a row has more than MAX_ROW_IDS={MAX_ROW_IDS} ids")
    ids, offsets = _gather_ragged_support_op(token_ids, row_offsets, row_ids, capacity)
    if checks_values(row_ids):
        shown = "capacity" if torch.compiler.is_compiling() else f"capacity={capacity}"
        check_values(offsets[-1] <= capacity, f"{name}: the rows have more ids than {shown}")
    return RaggedSupport(ids, offsets)


@ranged
def pad_ragged_support(
    token_ids: Tensor, row_offsets: Tensor, row_ids: Tensor, *, width: int
) -> Tensor:
    """Collect support rows of different widths into rows of one, as ``support_logprobs`` takes.

    Args:
        token_ids, row_offsets, row_ids: as for ``gather_ragged_support``.
        width: C, at least the widest of the named rows: known to the host, which packed them.

    Returns:
        [M, width] int32, contiguous: the ids of the slot's row, then -1. On a GPU a row that is
        wider is cut off, which is wrong and cannot be seen without ``PACKHORSE_CHECK=1``.

    Raises:
        As ``gather_ragged_support``; ValueError on the CPU where a named row is wider.

    Example:
        >>> token_ids = torch.tensor([7, 9, 4], dtype=torch.int32)
        >>> offsets, row_ids = torch.tensor([0, 2, 3]), torch.tensor([1, -1, 0])
        >>> pad_ragged_support(token_ids, offsets, row_ids, width=2).tolist()
        [[4, -1], [-1, -1], [7, 9]]
    """
    name = "pad_ragged_support"
    check_ragged_rows(name, token_ids, row_offsets)
    check_row_ids(name, row_ids, "token_ids", token_ids)
    if checks_values(row_ids):
        check_row_range(name, row_ids, row_offsets.shape[0] - 1)
    _check_size(name, "width", width)
    if checks_values(row_ids):
        # -1 takes the last entry, the width of no row
        widths = torch.cat([row_offsets.diff(), row_offsets.new_zeros(1)])[row_ids]
        shown = "width" if torch.compiler.is_compiling() else f"width={width}"
        check_values((widths <= width).all(), f"{name}: a row has more ids than {shown}")
    return _pad_ragged_support_op(token_ids, row_offsets, row_ids, width)


def _check_size(name: str, field: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
        raise TypeError(f"{name}: {field} must be an int, got {type(size).__name__}")
    if size < 0:
        raise ValueError(f"{name}: {field} must be >= 0, got {size}")


def check_ragged_rows(name: str, token_ids: Tensor, row_offsets: Tensor) -> None:
    for field, tensor, dtype, shape in (
        ("token_ids", token_ids, torch.int32, "[total ids]"),
        ("row_offsets", row_offsets, torch.int64, "[N + 1]"),
    ):
        check_tensors(name, **{field: tensor})
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: {field} must be {str(dtype)[6:]}, got {tensor.dtype}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {field} must be contiguous {shape}, got {tuple(tensor.shape)}"
            )
    if row_offsets.shape[0] == 0:
        raise ValueError(f"{name}: row_offsets must be [N + 1], got no entry")
    if row_offsets.device != token_ids.device:
        raise ValueError(
            f"{name}: row_offsets on {row_offsets.device}, token_ids on {token_ids.device}"
        )
    if checks_values(row_offsets):
        rise = (row_offsets[0] == 0) & (row_offsets[-1] == token_ids.shape[0])
        rise = rise & (row_offsets.diff() >= 0).all()
        check_values(rise, f"{name}: row_offsets must rise from 0 to the number of token_ids")
