"""Products of hidden states with the LM-head rows that ragged supports name, and their gradients.

    logits[m]       = hidden[token of m] . weight[column[m] - vocab_start] + bias
    grad hidden[t]  = sum over the cells m of t's row of grad[m] * weight[column[m]]

What ``lm_head_members.py`` does for rows of one width, over the packed cells. A program of the
forward takes a run of cells, whatever rows they are of: none waits for a row of thousands. In the
backward a row is one program's, a wide row that of several, whose sums torch adds in one order.

Sizes: T tokens, N rows, M cells, R rows of a class, H hidden size, V vocabulary, S slices of H.
Contract: a column that names no row of this shard is never read through; of the cells of a row each
is its token's.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.lm_head_members import (
    empty_products,
    grad_hidden_reference,
    local_rows,
    slices,
    sum_of_rows,
    widened,
)
from packhorse.kernels.members import wide_dtype
from packhorse.kernels.ragged_members import Rows, cells_of, put_entries
from packhorse.kernels.rows import move_rows

#: products that the reference widens at once
_CELLS_AT_ONCE = 1 << 12

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def project_cells_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: Tensor,  # [M] int32
    cell_tokens: Tensor,  # [M] int32
    vocab_start: int,
) -> Tensor:
    """[S, M] logits in parts, here one: 0 where the cell is no member of this shard."""
    rows, here = local_rows(columns, vocab_start, weight.shape[0])
    wide = wide_dtype(hidden)
    out = hidden.new_zeros((1, columns.shape[0]), dtype=wide)
    if hidden.shape[0] == 0:
        return out
    for begin in range(0, columns.shape[0], _CELLS_AT_ONCE):
        some = slice(begin, begin + _CELLS_AT_ONCE)
        token = cell_tokens[some].long().clamp(min=0)
        products = (widened(weight[rows[some]]) * widened(hidden[token])).sum(1)
        if bias is not None:
            products = products + widened(bias)[rows[some]]
        out[0, some] = torch.where(here[some], products, 0.0)
    return out


def grad_hidden_of_cells_reference(
    grads: Tensor,  # [M]
    weight: Tensor,
    columns: Tensor,  # [M] int32
    cell_tokens: Tensor,  # [M] int32
    begins: Tensor,  # [T] int64: the first cell of the token's row
    counts: Tensor,  # [T] int64: its cells, 0 where it has no row
    vocab_start: int,
    limit: int,
) -> Tensor:
    """[T, H] of the weight's dtype; of rows of more than ``limit`` cells 0."""
    rows, here = local_rows(columns, vocab_start, weight.shape[0])
    sums = grads.new_zeros((counts.shape[0], weight.shape[1]))
    if sums.shape[0] == 0:
        return sums.to(weight.dtype)
    token = cell_tokens.long().clamp(min=0)
    taken = here & (cell_tokens >= 0) & (counts[token] <= limit)
    grads = torch.where(taken, grads, 0.0)
    for begin in range(0, columns.shape[0], _CELLS_AT_ONCE):
        some = slice(begin, begin + _CELLS_AT_ONCE)
        # a factor of 0 reads nothing: whatever the row holds, it adds 0
        rest = torch.where((grads[some] != 0)[:, None], widened(weight[rows[some]]), 0.0)
        # in one order on a GPU too, where index_add_ has none
        sums.index_put_((token[some],), grads[some, None] * rest, accumulate=True)
    return sums.to(weight.dtype)


def put_wide_hidden_reference(
    out: Tensor,  # [T, H], written in place at the rows' tokens
    grads: Tensor,  # [M]
    weight: Tensor,
    columns: Tensor,  # [M] int32
    tokens: Tensor,  # [R] int64, as of ``Rows``: -1: written nowhere
    begins: Tensor,
    counts: Tensor,
    width: int,
    vocab_start: int,
) -> None:
    """The gradients of a class of rows that ``grad_hidden_of_cells`` leaves 0."""
    cells, inside = cells_of(Rows(tokens, begins, counts), width)
    of_rows = torch.where(inside, grads[cells], 0.0)
    sums = grad_hidden_reference(of_rows, weight, columns[cells], vocab_start)
    put_entries(out, tokens, tokens >= 0, sums)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(
    repr=kernel_name("project_cells", "weight_ptr", "WHOLE"),
    do_not_specialize=[
        "num_cells", "num_units", "stride_hidden", "stride_weight", "vocab_start", "num_rows",
    ],
)  # fmt: skip
def _project_cells_kernel(
    hidden_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    bias_ptr,  # [V], or None
    columns_ptr,  # [M] int32
    cell_tokens_ptr,  # [M] int32
    logits_ptr,  # [S, M] float32
    num_cells,  # M
    num_units,  # H; it and the strides in units of VEC elements
    stride_hidden,
    stride_weight,
    vocab_start,
    num_rows,  # V of this shard
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,  # slices divide H
    RUN: tl.constexpr,  # cells of a program
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * RUN
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < num_units * VEC
    logits_ptr += tl.program_id(1).to(tl.int64) * num_cells
    for first in range(0, RUN, BLOCK_C):
        cell = begin + first + tl.arange(0, BLOCK_C)
        row = tl.load(columns_ptr + cell, mask=cell < num_cells, other=-1)
        token = tl.load(cell_tokens_ptr + cell, mask=cell < num_cells, other=-1)
        here = (row >= vocab_start) & (row - vocab_start < num_rows)
        row = tl.where(here, row - vocab_start, 0)
        rows = weight_ptr + (row.to(tl.int64) * stride_weight)[:, None] * VEC + cols[None, :]
        wanted = here[:, None] if WHOLE else here[:, None] & in_row[None, :]
        # neighbours are mostly of one token, whose hidden state the first brings near
        states = hidden_ptr + (token.to(tl.int64) * stride_hidden)[:, None] * VEC + cols[None, :]
        hidden = tl.load(states, mask=wanted, other=0.0).to(tl.float32)
        weight = tl.load(rows, mask=wanted, other=0.0).to(tl.float32)
        logits = tl.sum(weight * hidden, axis=1)
        logits = tl.where(here, logits, 0.0)
        if bias_ptr is not None:
            first_slice = here & (tl.program_id(1) == 0)
            logits += tl.load(bias_ptr + row, mask=first_slice, other=0.0).to(tl.float32)
        # each lane has all of them: one by one, so that none goes by way of shared memory
        for k in tl.static_range(BLOCK_C):
            logit = tl.sum(tl.where(tl.arange(0, BLOCK_C) == k, logits, 0.0), axis=0)
            tl.store(logits_ptr + begin + first + k, logit, mask=begin + first + k < num_cells)


@triton.jit
def _sum_of_cells(
    grads_ptr, columns_ptr, weight_ptr, begin, count, cols, in_row, stride_weight, vocab_start,
    num_rows, VEC: tl.constexpr, WHOLE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """[BLOCK_H]: the weight's rows of ``count`` cells, each times its gradient."""
    total = tl.zeros([BLOCK_H], tl.float32)
    grads_ptr += begin
    columns_ptr += begin
    for first in range(0, count, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        grad = tl.load(grads_ptr + c, mask=c < count, other=0.0)
        row = tl.load(columns_ptr + c, mask=c < count, other=-1)
        here = (row >= vocab_start) & (row - vocab_start < num_rows) & (grad != 0.0)
        row = tl.where(here, row - vocab_start, 0)
        rows = weight_ptr + (row.to(tl.int64) * stride_weight)[:, None] * VEC + cols[None, :]
        wanted = here[:, None] if WHOLE else here[:, None] & in_row[None, :]
        total += sum_of_rows(rows, wanted, tl.where(here, grad, 0.0))
    return total


@triton.jit(
    repr=kernel_name("grad_hidden_cells", "weight_ptr", "WHOLE"),
    do_not_specialize=[
        "num_cells", "num_units", "stride_weight", "vocab_start", "num_rows", "limit",
    ],
)  # fmt: skip
def _grad_hidden_cells_kernel(
    grads_ptr,  # [M] float32
    weight_ptr,  # [V, H]
    columns_ptr,  # [M] int32
    begins_ptr,  # [T] int64
    counts_ptr,  # [T] int64
    out_ptr,  # [T, H]
    num_cells,  # M
    num_units,  # H; it and the stride in units of VEC elements
    stride_weight,
    vocab_start,
    num_rows,  # V of this shard
    limit,  # cells of a row
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    hidden_size = num_units * VEC
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < hidden_size
    begin = tl.load(begins_ptr + token)
    count = tl.load(counts_ptr + token)
    count = tl.where((count > limit) | (begin < 0), 0, count)
    count = tl.minimum(count, num_cells - begin).to(tl.int32)
    total = _sum_of_cells(
        grads_ptr, columns_ptr, weight_ptr, begin, count, cols, in_row, stride_weight, vocab_start,
        num_rows, VEC, WHOLE, BLOCK_C, BLOCK_H,
    )  # fmt: skip
    total = total.to(out_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(out_ptr + token * hidden_size + cols, total)
    else:
        tl.store(out_ptr + token * hidden_size + cols, total, mask=in_row)


@triton.jit(
    repr=kernel_name("grad_hidden_pieces", "weight_ptr", "WHOLE"),
    do_not_specialize=[
        "num_cells", "num_pieces", "size", "num_units", "stride_weight", "vocab_start", "num_rows",
    ],
)  # fmt: skip
def _grad_hidden_pieces_kernel(
    grads_ptr,  # [M] float32
    weight_ptr,  # [V, H]
    columns_ptr,  # [M] int32
    begins_ptr,  # [R] int64
    counts_ptr,  # [R] int64
    parts_ptr,  # [R, num_pieces, H] float32
    num_cells,  # M
    num_pieces,  # of a row
    size,  # cells of a piece
    num_units,  # H; it and the stride in units of VEC elements
    stride_weight,
    vocab_start,
    num_rows,
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    hidden_size = num_units * VEC
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < hidden_size
    piece = part % num_pieces * size
    begin = tl.load(begins_ptr + part // num_pieces)
    count = tl.load(counts_ptr + part // num_pieces)
    is_none = (count > num_pieces * size) | (begin < 0)
    count = tl.where(is_none, 0, tl.minimum(count, num_cells - begin)) - piece
    count = tl.minimum(tl.maximum(count, 0), size).to(tl.int32)
    total = _sum_of_cells(
        grads_ptr, columns_ptr, weight_ptr, begin + piece, count, cols, in_row, stride_weight,
        vocab_start, num_rows, VEC, WHOLE, BLOCK_C, BLOCK_H,
    )  # fmt: skip
    tl.store(parts_ptr + part * hidden_size + cols, total, mask=in_row)


_launch_project_cells = Launcher(_project_cells_kernel)
_launch_grad_hidden_cells = Launcher(_grad_hidden_cells_kernel)
_launch_grad_hidden_pieces = Launcher(_grad_hidden_pieces_kernel)

_RUN, _BLOCK_C = 8, 4
#: cells of a wide row that one program adds up, and partial sums that exist at once
_PIECE, _PARTS = 64, 4096


def _project_cells_cuda(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    cell_tokens: Tensor,
    vocab_start: int,
) -> Tensor:
    num_cells, hidden_size = columns.shape[0], hidden.shape[1]
    if hidden.dtype == torch.float64 or num_cells == 0 or hidden.shape[0] == 0:
        return project_cells_reference(hidden, weight, bias, columns, cell_tokens, vocab_start)
    block, num_slices = slices(hidden_size)
    logits = hidden.new_empty((num_slices, num_cells), dtype=torch.float32)
    vec = math.gcd(16 // hidden.itemsize, hidden_size, hidden.stride(0), weight.stride(0))
    _launch_project_cells(
        (-(-num_cells // _RUN), num_slices),
        (
            hidden, weight, None if bias is None else bias.contiguous(), columns, cell_tokens,
            logits, num_cells, hidden_size // vec, hidden.stride(0) // vec,
            weight.stride(0) // vec, vocab_start, weight.shape[0],
        ),
        (vec, hidden_size % block == 0, _RUN, _BLOCK_C, block),
        1,
    )  # fmt: skip
    return logits


def _grad_hidden_of_cells_cuda(
    grads: Tensor, weight: Tensor, columns: Tensor, cell_tokens: Tensor, begins: Tensor,
    counts: Tensor, vocab_start: int, limit: int,
) -> Tensor:  # fmt: skip
    num_tokens, hidden_size = counts.shape[0], weight.shape[1]
    if weight.dtype == torch.float64 or num_tokens == 0 or columns.numel() == 0:
        return grad_hidden_of_cells_reference(
            grads, weight, columns, cell_tokens, begins, counts, vocab_start, limit
        )
    out = weight.new_empty((num_tokens, hidden_size))
    block, num_slices = slices(hidden_size)
    vec = math.gcd(16 // weight.itemsize, hidden_size, weight.stride(0))
    _launch_grad_hidden_cells(
        (num_tokens, num_slices),
        (
            grads, weight, columns, begins, counts, out, columns.shape[0],
            hidden_size // vec, weight.stride(0) // vec, vocab_start, weight.shape[0], limit,
        ),
        (vec, hidden_size % block == 0, _BLOCK_C, block),
        1,
    )  # fmt: skip
    return out


def _put_wide_hidden_cuda(
    out: Tensor, grads: Tensor, weight: Tensor, columns: Tensor, tokens: Tensor, begins: Tensor,
    counts: Tensor, width: int, vocab_start: int,
) -> None:  # fmt: skip
    if tokens.shape[0] == 0 or columns.numel() == 0:
        return
    if weight.dtype == torch.float64:
        put_wide_hidden_reference(
            out, grads, weight, columns, tokens, begins, counts, width, vocab_start
        )
        return
    hidden_size = weight.shape[1]
    block, num_slices = slices(hidden_size)
    vec = math.gcd(16 // weight.itemsize, hidden_size, weight.stride(0))
    num_pieces = -(-width // _PIECE)
    size = max(_PARTS // num_pieces, 1)
    for first in range(0, tokens.shape[0], size):
        some = slice(first, first + size)
        num_rows = tokens[some].shape[0]
        parts = grads.new_empty((num_rows, num_pieces, hidden_size))
        _launch_grad_hidden_pieces(
            (num_rows * num_pieces, num_slices),
            (
                grads, weight, columns, begins[some], counts[some], parts, columns.shape[0],
                num_pieces, _PIECE, hidden_size // vec, weight.stride(0) // vec, vocab_start,
                weight.shape[0],
            ),
            (vec, hidden_size % block == 0, _BLOCK_C, block),
            1,
        )  # fmt: skip
        move_rows(parts.sum(1).to(out.dtype), tokens[some], out, scatter=True, fill=0)


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::project_cells",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor columns, Tensor cell_tokens,"
    " SymInt vocab_start) -> Tensor",
)
torch.library.impl("packhorse::project_cells", "CPU", project_cells_reference)
torch.library.impl("packhorse::project_cells", "CUDA", _project_cells_cuda)

torch.library.define(
    "packhorse::grad_hidden_of_cells",
    "(Tensor grads, Tensor weight, Tensor columns, Tensor cell_tokens, Tensor begins,"
    " Tensor counts, SymInt vocab_start, SymInt limit) -> Tensor",
)
torch.library.impl("packhorse::grad_hidden_of_cells", "CPU", grad_hidden_of_cells_reference)
torch.library.impl("packhorse::grad_hidden_of_cells", "CUDA", _grad_hidden_of_cells_cuda)

torch.library.define(
    "packhorse::put_wide_hidden",
    "(Tensor(a!) out, Tensor grads, Tensor weight, Tensor columns, Tensor tokens, Tensor begins,"
    " Tensor counts, SymInt width, SymInt vocab_start) -> ()",
)
torch.library.impl("packhorse::put_wide_hidden", "CPU", put_wide_hidden_reference)
torch.library.impl("packhorse::put_wide_hidden", "CUDA", _put_wide_hidden_cuda)


@torch.library.register_fake("packhorse::project_cells")
def _project_cells_fake(hidden, _weight, _bias, columns, *_) -> Tensor:
    return empty_products(hidden, columns)


@torch.library.register_fake("packhorse::grad_hidden_of_cells")
def _grad_hidden_of_cells_fake(_grads, weight, _columns, _tokens, _begins, counts, *_) -> Tensor:
    return weight.new_empty((counts.shape[0], weight.shape[1]))


@torch.library.register_fake("packhorse::put_wide_hidden")
def _put_wide_hidden_fake(*_) -> None:
    return None


_ops = torch.ops.packhorse
project_cells = called_directly(_ops.project_cells.default, _project_cells_cuda)
grad_hidden_of_cells = called_directly(
    _ops.grad_hidden_of_cells.default, _grad_hidden_of_cells_cuda
)
put_wide_hidden = called_directly(_ops.put_wide_hidden.default, _put_wide_hidden_cuda)
