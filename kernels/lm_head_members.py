"""Products of hidden states with a few rows of the LM-head weight each, and their gradients.

    logits[t, c] = hidden[t] . weight[column[t, c] - vocab_start] + bias      float32 accumulation
    grad hidden[t]  = sum over c of grad[t, c] * weight[column[t, c]]
    grad weight[v]  = sum over (t, c) with column v, in the order of t, of grad[t, c] * hidden[t]

Only the named rows are read: 20 products a token in place of 150,000. Ids repeat, so most reads are
of the L2 cache: programs take one slice of the hidden size for all tokens before the next, and
popular rows of the slice stay near. Parts of a product, one a slice, are added in order. The
weight's gradient sorts the (token, candidate) pairs by row, cuts them into chunks, and adds what
spans several chunks in their order: no atomics, bit-equal in every run. A pair whose gradient is 0
is not read.

A shard of the vocabulary holds rows from ``vocab_start`` on; ids of other shards have logit 0 here.

Supports of different widths have their products in ``lm_head_cells.py``; the gradient of the weight
is one for both: a pair's token is ``pair // width``, or ``tokens[pair // width]`` where given.

Sizes: T tokens, C candidates a row, H hidden size, V vocabulary, S slices of H, P = T C pairs.
Contract: an entry of ``columns`` that names no row of this shard is never read through.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.members import wide_dtype

#: (token, candidate) products that the reference widens at once
_PAIRS_AT_ONCE = 1 << 12

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def local_rows(columns: Tensor, vocab_start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 rows of this shard's weight, and whether the entry is one of its members."""
    rows = columns.long() - vocab_start
    here = (columns >= 0) & (rows >= 0) & (rows < num_rows)
    return torch.where(here, rows, 0), here


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def project_members_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    known: Tensor,
    vocab_start: int,
) -> Tensor:
    """[S, T, C] logits in parts, here one: 0 where the entry is no member of this shard. ``known``
    is the status [T] of ``order_support``: of a row without a member nothing is read."""
    rows, here = local_rows(columns, vocab_start, weight.shape[0])
    size = max(_PAIRS_AT_ONCE // max(columns.shape[1], 1), 1)
    chunks = []
    for h, r in zip(hidden.split(size), rows.split(size), strict=True):
        products = (widened(weight[r]) * widened(h)[:, None]).sum(2)
        chunks.append(products if bias is None else products + widened(bias)[r])
    return torch.where(here, torch.cat(chunks), 0.0)[None]


def grad_hidden_reference(
    grads: Tensor, weight: Tensor, columns: Tensor, vocab_start: int
) -> Tensor:
    """[T, H] of the weight's dtype."""
    rows, here = local_rows(columns, vocab_start, weight.shape[0])
    grads = torch.where(here, grads, 0.0)
    out = grads.new_zeros((columns.shape[0], weight.shape[1]))
    for c in range(columns.shape[1]):
        # a factor of 0 reads nothing: whatever the row holds, it adds 0
        rest = torch.where((grads[:, c] != 0)[:, None], widened(weight[rows[:, c]]), 0.0)
        out += grads[:, c, None] * rest
    return out.to(weight.dtype)


def grad_hidden_of_members_reference(
    grads: Tensor, weight: Tensor, columns: Tensor, status: Tensor, vocab_start: int
) -> Tensor:
    """[T, H] of the weight's dtype. ``status`` [T] is that of the scores: a row that has none has
    no gradient, and is not read."""
    grads = torch.where((status == 0)[:, None], grads, 0.0)
    return grad_hidden_reference(grads, weight, columns, vocab_start)


def pair_rows(grads: Tensor, columns: Tensor, vocab_start: int, num_rows: int) -> Tensor:
    """[P] int32 rows of this shard, ``num_rows`` for what has none or no gradient."""
    rows = columns - vocab_start
    taken = (rows >= 0) & (rows < num_rows) & (columns >= 0)
    return rows.masked_fill_(~(taken & (grads != 0)), num_rows).flatten()


def add_weight_gradient_reference(
    out: Tensor,
    grads: Tensor,
    hidden: Tensor,
    rows: Tensor,
    pairs: Tensor,
    width: int,
    tokens: Tensor | None = None,
) -> None:
    """Adds to ``out`` [V, H] in place; the sum of a row is rounded to its dtype once. ``rows`` and
    ``pairs`` are ``pair_rows`` sorted, stable, and where each stood."""
    taken = rows < out.shape[0]
    rows, pairs = rows[taken], pairs[taken]
    sums = out if out.dtype == grads.dtype else torch.zeros_like(out, dtype=grads.dtype)
    for begin in range(0, pairs.numel(), _PAIRS_AT_ONCE):
        some = slice(begin, begin + _PAIRS_AT_ONCE)
        token = pairs[some] // width
        source = hidden[token if tokens is None else tokens[token].long()]
        of_pairs = grads.flatten()[pairs[some]]
        sums.index_add_(0, rows[some], of_pairs[:, None] * widened(source))
    if sums is not out:
        out += sums


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def _products(rows, wanted, hidden):
    """[BLOCK_C] of rows [BLOCK_C, BLOCK_H] of the weight, with hidden states [BLOCK_H]."""
    weight = tl.load(rows, mask=wanted, other=0.0)
    return tl.sum(weight.to(tl.float32) * hidden[None, :], axis=1)


@triton.jit
def sum_of_rows(rows, wanted, grad):
    """[BLOCK_H]: rows of the weight, each times its gradient."""
    weight = tl.load(rows, mask=wanted, other=0.0)
    return tl.sum(weight.to(tl.float32) * grad[:, None], axis=0)


@triton.jit(
    repr=kernel_name("project_members", "weight_ptr", "WHOLE"),
    do_not_specialize=[
        "num_tokens", "width", "num_units", "stride_hidden", "stride_weight", "vocab_start",
        "num_rows",
    ],
)  # fmt: skip
def _project_members_kernel(
    hidden_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    bias_ptr,  # [V], or None
    columns_ptr,  # [T, C] int32
    known_ptr,  # [T] uint8: other than 0 where the row has no member
    logits_ptr,  # [S, T, C] float32
    num_tokens,  # T
    width,  # C
    num_units,  # H; it and the strides in units of VEC elements
    stride_hidden,
    stride_weight,
    vocab_start,
    num_rows,  # V of this shard
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,  # slices divide H
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    hidden_size = num_units * VEC
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < hidden_size
    hidden_ptr += token * stride_hidden * VEC
    scored = tl.load(known_ptr + token) == 0
    if WHOLE:
        hidden = tl.load(hidden_ptr + cols, mask=scored, other=0.0).to(tl.float32)
    else:
        hidden = tl.load(hidden_ptr + cols, mask=scored & in_row, other=0.0).to(tl.float32)
    columns_ptr += token * width
    logits_ptr += (tl.program_id(1).to(tl.int64) * num_tokens + token) * width
    for first in range(0, tl.where(scored, 0, width), 32):
        c = first + tl.arange(0, 32)
        tl.store(logits_ptr + c, tl.zeros([32], tl.float32), mask=c < width)
    for first in range(0, tl.where(scored, width, 0), BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        row = tl.load(columns_ptr + c, mask=c < width, other=-1)
        here = (row >= vocab_start) & (row - vocab_start < num_rows)
        row = tl.where(here, row - vocab_start, 0)
        rows = weight_ptr + (row.to(tl.int64) * stride_weight)[:, None] * VEC + cols[None, :]
        wanted = here[:, None] if WHOLE else here[:, None] & in_row[None, :]
        logits = tl.where(here, _products(rows, wanted, hidden), 0.0)
        if bias_ptr is not None:
            first_slice = here & (tl.program_id(1) == 0)
            logits += tl.load(bias_ptr + row, mask=first_slice, other=0.0).to(tl.float32)
        # each lane has all of them: one by one, so that none goes by way of shared memory
        for k in tl.static_range(BLOCK_C):
            logit = tl.sum(tl.where(tl.arange(0, BLOCK_C) == k, logits, 0.0), axis=0)
            tl.store(logits_ptr + first + k, logit, mask=first + k < width)


@triton.jit(
    repr=kernel_name("grad_hidden", "weight_ptr", "WHOLE"),
    do_not_specialize=["width", "num_units", "stride_weight", "vocab_start", "num_rows"],
)
def _grad_hidden_kernel(
    grads_ptr,  # [T, C] float32
    weight_ptr,  # [V, H]
    columns_ptr,  # [T, C] int32
    status_ptr,  # [T] uint8: other than 0 where the row has no gradient
    out_ptr,  # [T, H]
    width,  # C
    num_units,  # H; it and the stride in units of VEC elements
    stride_weight,
    vocab_start,
    num_rows,
    VEC: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    hidden_size = num_units * VEC
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < hidden_size
    columns_ptr += token * width
    grads_ptr += token * width
    total = tl.zeros([BLOCK_H], tl.float32)
    scored = tl.load(status_ptr + token) == 0
    for first in range(0, tl.where(scored, width, 0), BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        grad = tl.load(grads_ptr + c, mask=c < width, other=0.0)
        row = tl.load(columns_ptr + c, mask=c < width, other=-1)
        here = (row >= vocab_start) & (row - vocab_start < num_rows) & (grad != 0.0)
        row = tl.where(here, row - vocab_start, 0)
        rows = weight_ptr + (row.to(tl.int64) * stride_weight)[:, None] * VEC + cols[None, :]
        wanted = here[:, None] if WHOLE else here[:, None] & in_row[None, :]
        total += sum_of_rows(rows, wanted, tl.where(here, grad, 0.0))
    total = total.to(out_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(out_ptr + token * hidden_size + cols, total)
    else:
        tl.store(out_ptr + token * hidden_size + cols, total, mask=in_row)


@triton.jit(
    repr=kernel_name("grad_weight", "hidden_ptr", "out_ptr"),
    do_not_specialize=[
        "num_pairs", "width", "num_units", "stride_hidden", "stride_out", "num_rows"
    ],
)  # fmt: skip
def _grad_weight_kernel(
    hidden_ptr,  # [T, H]
    rows_ptr,  # [P] int32, ascending; num_rows: no pair of this shard
    pairs_ptr,  # [P] int64: which cell of [T, C] stands there
    tokens_ptr,  # int32, or None
    grads_ptr,  # [T, C] float32, float64 as hidden, out and parts
    out_ptr,  # [V, H]
    parts_ptr,  # [chunks, 2, H] float32: sums of rows that begin before a chunk, and go on after it
    num_pairs,  # P
    width,  # C
    num_units,  # H; it and the strides in units of VEC elements
    stride_hidden,
    stride_out,
    num_rows,
    VEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    chunk = tl.program_id(0)
    hidden_size = num_units * VEC
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = cols < hidden_size
    place = chunk * CHUNK
    end = tl.minimum(place + CHUNK, num_pairs)
    before = tl.load(rows_ptr + place - 1, mask=place > 0, other=-1)
    after = tl.load(rows_ptr + end, mask=end < num_pairs, other=-1)
    row = tl.load(rows_ptr + place)
    parts_ptr += chunk.to(tl.int64) * 2 * hidden_size
    total = tl.zeros([BLOCK_H], parts_ptr.dtype.element_ty)
    while (place < end) & (row < num_rows):
        pair = tl.load(pairs_ptr + place)
        grad = tl.load(grads_ptr + pair)
        token = pair // width
        if tokens_ptr is not None:
            token = tl.load(tokens_ptr + token).to(tl.int64)
        source = hidden_ptr + token * stride_hidden * VEC + cols
        total += grad * tl.load(source, mask=in_row, other=0.0).to(total.dtype)
        place += 1
        following = tl.load(rows_ptr + place, mask=place < end, other=num_rows)
        if following != row:
            if row == before:
                tl.store(parts_ptr + cols, total, mask=in_row)
            elif (place == end) & (row == after):
                tl.store(parts_ptr + hidden_size + cols, total, mask=in_row)
            else:
                cells = out_ptr + row.to(tl.int64) * stride_out * VEC + cols
                total += tl.load(cells, mask=in_row, other=0.0).to(total.dtype)
                tl.store(cells, total.to(out_ptr.dtype.element_ty), mask=in_row)
            total = tl.zeros([BLOCK_H], parts_ptr.dtype.element_ty)
            row = following


@triton.jit(
    repr=kernel_name("join_weight_parts", "out_ptr"),
    do_not_specialize=["num_pairs", "num_units", "stride_out", "num_rows"],
)
def _join_weight_parts_kernel(
    rows_ptr,  # [P] int32
    parts_ptr,  # [chunks, 2, H] float32
    out_ptr,  # [V, H]
    num_pairs,
    num_units,  # H; it and the stride in units of VEC elements
    stride_out,
    num_rows,
    VEC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,  # chunks added at once
    BLOCK_H: tl.constexpr,
):
    chunk = tl.program_id(0)
    end = (chunk + 1) * CHUNK
    if end < num_pairs:
        row = tl.load(rows_ptr + end - 1)
        after = tl.load(rows_ptr + end)
        before = tl.load(rows_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
        # the row begins in this chunk and goes on: the chunks after it whose first row it is
        if (row == after) & (row != before) & (row < num_rows):
            stop = chunk + 2
            high = (num_pairs + CHUNK - 1) // CHUNK
            while stop < high:
                middle = (stop + high) // 2
                goes_on = tl.load(rows_ptr + middle * CHUNK) == row
                stop = tl.where(goes_on, middle + 1, stop)
                high = tl.where(goes_on, high, middle)
            hidden_size = num_units * VEC
            cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_row = cols < hidden_size
            begins = chunk.to(tl.int64) * 2 + 1
            total = tl.load(parts_ptr + begins * hidden_size + cols, mask=in_row, other=0.0)
            for first in range(chunk + 1, stop, BLOCK_N):
                chunks = first + tl.arange(0, BLOCK_N)
                starts = (chunks.to(tl.int64) * 2 * hidden_size)[:, None] + cols[None, :]
                wanted = (chunks < stop)[:, None] & in_row[None, :]
                total += tl.sum(tl.load(parts_ptr + starts, mask=wanted, other=0.0), axis=0)
            cells = out_ptr + row.to(tl.int64) * stride_out * VEC + cols
            total += tl.load(cells, mask=in_row, other=0.0).to(total.dtype)
            tl.store(cells, total.to(out_ptr.dtype.element_ty), mask=in_row)


_launch_project_members = Launcher(_project_members_kernel)
_launch_grad_hidden = Launcher(_grad_hidden_kernel)
_launch_grad_weight = Launcher(_grad_weight_kernel)
_launch_join_weight_parts = Launcher(_join_weight_parts_kernel)

_BLOCK_C, _BLOCK_H = 4, 512
_CHUNK, _BLOCK_N, _WEIGHT_BLOCK_H = 64, 8, 256
#: What partial sums may take: bytes a token, less those that sorted pairs take where a token has
#: more than so many, so that both stay small beside the logits that are not made.
_PARTS_BYTES, _PAIR_BYTES, _FREE_PAIRS = 2048, 24, 20


def slices(hidden_size: int) -> tuple[int, int]:
    """Elements of a slice, and how many slices: one access of 16 bytes times two a lane."""
    block = min(_BLOCK_H, max(1 << (hidden_size - 1).bit_length(), 32))
    return block, -(-hidden_size // block)


def _project_members_cuda(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    known: Tensor,
    vocab_start: int,
) -> Tensor:
    num_tokens, width = columns.shape
    hidden_size = hidden.shape[1]
    if hidden.dtype == torch.float64 or columns.numel() == 0 or hidden_size == 0:
        return project_members_reference(hidden, weight, bias, columns, known, vocab_start)
    block, num_slices = slices(hidden_size)
    logits = hidden.new_empty((num_slices, num_tokens, width), dtype=torch.float32)
    vec = math.gcd(16 // hidden.itemsize, hidden_size, hidden.stride(0), weight.stride(0))
    _launch_project_members(
        (num_tokens, num_slices),
        (
            hidden, weight, None if bias is None else bias.contiguous(), columns, known, logits,
            num_tokens, width, hidden_size // vec, hidden.stride(0) // vec,
            weight.stride(0) // vec, vocab_start, weight.shape[0],
        ),
        (vec, hidden_size % block == 0, _BLOCK_C, block),
        1,
    )  # fmt: skip
    return logits


def _grad_hidden_of_members_cuda(
    grads: Tensor, weight: Tensor, columns: Tensor, status: Tensor, vocab_start: int
) -> Tensor:
    hidden_size = weight.shape[1]
    if weight.dtype == torch.float64 or columns.numel() == 0 or hidden_size == 0:
        return grad_hidden_of_members_reference(grads, weight, columns, status, vocab_start)
    out = weight.new_empty((columns.shape[0], hidden_size))
    block, num_slices = slices(hidden_size)
    vec = math.gcd(16 // weight.itemsize, hidden_size, weight.stride(0))
    _launch_grad_hidden(
        (columns.shape[0], num_slices),
        (
            grads, weight, columns, status, out, columns.shape[1], hidden_size // vec,
            weight.stride(0) // vec, vocab_start, weight.shape[0],
        ),
        (vec, hidden_size % block == 0, _BLOCK_C, block),
        1,
    )  # fmt: skip
    return out


def _add_weight_gradient_cuda(
    out: Tensor,
    grads: Tensor,
    hidden: Tensor,
    rows: Tensor,
    pairs: Tensor,
    width: int,
    tokens: Tensor | None = None,
) -> None:
    num_tokens, hidden_size = hidden.shape
    num_rows, num_pairs = out.shape[0], pairs.numel()
    if num_pairs == 0 or hidden_size == 0:
        return
    chunk = _CHUNK * (1 if num_pairs <= 1 << 18 else 2 if num_pairs <= 1 << 20 else 4)
    num_chunks = -(-num_pairs // chunk)
    block = min(_WEIGHT_BLOCK_H, max(1 << (hidden_size - 1).bit_length(), 32))
    # columns at a time
    budget = _PARTS_BYTES * num_tokens
    budget -= _PAIR_BYTES * max(num_pairs - _FREE_PAIRS * num_tokens, 0)
    slab = max(budget // (2 * grads.itemsize * num_chunks) // block, 1) * block
    parts = grads.new_empty((num_chunks, 2, min(slab, hidden_size)))
    vec = math.gcd(16 // hidden.itemsize, hidden_size, hidden.stride(0), out.stride(0))
    for begin in range(0, hidden_size, slab):
        columns_of = slice(begin, min(begin + slab, hidden_size))
        source, target = hidden[:, columns_of], out[:, columns_of]
        num_units = source.shape[1] // vec
        grid = (num_chunks, -(-source.shape[1] // block))
        _launch_grad_weight(
            grid,
            (
                source, rows, pairs, tokens, grads, target, parts, num_pairs, width, num_units,
                hidden.stride(0) // vec, out.stride(0) // vec, num_rows,
            ),
            (vec, chunk, block),
            1,
        )  # fmt: skip
        _launch_join_weight_parts(
            grid,
            (rows, parts, target, num_pairs, num_units, out.stride(0) // vec, num_rows),
            (vec, chunk, _BLOCK_N, block),
            1,
        )


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::project_members",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor columns, Tensor known, SymInt vocab_start)"
    " -> Tensor",
)
torch.library.impl("packhorse::project_members", "CPU", project_members_reference)
torch.library.impl("packhorse::project_members", "CUDA", _project_members_cuda)

torch.library.define(
    "packhorse::grad_hidden_of_members",
    "(Tensor grads, Tensor weight, Tensor columns, Tensor status, SymInt vocab_start) -> Tensor",
)
torch.library.impl("packhorse::grad_hidden_of_members", "CPU", grad_hidden_of_members_reference)
torch.library.impl("packhorse::grad_hidden_of_members", "CUDA", _grad_hidden_of_members_cuda)

torch.library.define(
    "packhorse::add_weight_gradient",
    "(Tensor(a!) out, Tensor grads, Tensor hidden, Tensor rows, Tensor pairs, SymInt width,"
    " Tensor? tokens=None) -> ()",
)
torch.library.impl("packhorse::add_weight_gradient", "CPU", add_weight_gradient_reference)
torch.library.impl("packhorse::add_weight_gradient", "CUDA", _add_weight_gradient_cuda)


def empty_products(hidden: Tensor, columns: Tensor) -> Tensor:
    """[S, ...] of ``columns``' shape: the parts that products with ``hidden`` come in."""
    plain = hidden.device.type != "cuda" or hidden.dtype == torch.float64
    parts = 1 if plain else slices(hidden.shape[1])[1]
    return hidden.new_empty((parts, *columns.shape), dtype=wide_dtype(hidden))


@torch.library.register_fake("packhorse::project_members")
def _project_members_fake(hidden, _weight, _bias, columns, *_) -> Tensor:
    return empty_products(hidden, columns)


@torch.library.register_fake("packhorse::grad_hidden_of_members")
def _grad_hidden_of_members_fake(_grads, weight, columns, *_) -> Tensor:
    return weight.new_empty((columns.shape[0], weight.shape[1]))


@torch.library.register_fake("packhorse::add_weight_gradient")
def _add_weight_gradient_fake(*_) -> None:
    return None


_ops = torch.ops.packhorse
project_members = called_directly(_ops.project_members.default, _project_members_cuda)
grad_hidden_of_members = called_directly(
    _ops.grad_hidden_of_members.default, _grad_hidden_of_members_cuda
)
add_weight_gradient = called_directly(_ops.add_weight_gradient.default, _add_weight_gradient_cuda)
