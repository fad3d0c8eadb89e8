"""Passes over a tile of the LM head's products: sums for the softmax, and the products' gradients.

    z[t, v] = softcap(products[t, v] + bias[v]) / temperature       v counts from ``first_id``

    sum_vocabulary_tile    sums[:, t] <- sums[:, t] and those of z[t]
    grad_vocabulary_tile   [T, V] gradient of the products, from log sum exp z over all tiles

``lm_head_full`` makes the products tile after tile; each pass reads them once. Of the ids so far
``sums`` [4, T] holds:

    top      max z, -inf before there is a logit
    total    sum exp(z - top)
    spread   sum exp(z - top) (z - top)
    chosen   z of the sampled id, 0 before it came

A top of -inf (no logit yet, or none that is possible) shifts nothing. +inf and NaN are a fault of
the model: the row's total becomes NaN, whatever its top. Maths is float32, float64 for float64
products. A row that few programs would read is read in parts, as many as its shape says, joined in
one order: two runs agree bit for bit.

Sizes: T tokens of the tile, V its ids, P parts of a row. A tile holds no pad of the vocabulary.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, called_directly, kernel_name

#: exp of it is 0 in every dtype: what lies below has no probability, and 0 * -inf would be NaN
LEAST: Final = -1e4
_INF: Final = float("inf")


# --- reference: the specification, what CPU tensors run, and float64 ------------------------------


def sum_vocabulary_tile_reference(
    products: Tensor,  # [T, V] float32 or float64
    sums: Tensor,  # [4, T] of its dtype; changed in place
    sampled_ids: Tensor,  # [T] int64; one that is not in the tile chooses nothing here
    first_id: int,
    bias: Tensor | None,  # [V]
    softcap: float | None,
    temperature: float,
    temperatures: Tensor | None = None,  # [T], in place of it
) -> None:
    top, total, spread, chosen = sums.unbind(0)
    z, _ = _logits(products, bias, softcap, temperature, temperatures)
    sampled, column = _sampled(sampled_ids, first_id, z.shape[1])
    chosen += torch.where(sampled, z.gather(1, column), 0.0).squeeze(1)
    peak = torch.maximum(top, z.amax(1))
    moved_total, moved_spread = shift_sums(top, total, spread, peak)
    z = z.sub_(finite_top(peak)[:, None])
    weights = z.exp()
    total.copy_(moved_total + weights.sum(1))
    spread.copy_(moved_spread + weights.mul_(z.clamp_(min=LEAST)).sum(1))
    top.copy_(peak)


def grad_vocabulary_tile_reference(
    products: Tensor,  # [T, V] float32 or float64
    sampled_ids: Tensor,  # [T] int64; negative: no target, and a gradient of exactly 0
    grad_logprobs: Tensor,  # [T], of the sampled ids' logprobs
    grad_entropy: Tensor,  # [T]
    entropy: Tensor,  # [T] over all ids
    log_sum: Tensor,  # [T] log sum exp z over all ids
    first_id: int,
    dtype: torch.dtype,  # of the result; rounded to it once
    bias: Tensor | None,  # [V]
    softcap: float | None,
    temperature: float,
    temperatures: Tensor | None = None,  # [T], in place of it
) -> Tensor:
    """g (1[v = s] - p) - e p (log p + entropy), through the temperature and the soft cap."""
    g = grad_logprobs[:, None]
    z, slope = _logits(products, bias, softcap, temperature, temperatures)
    log_p = z.sub_(log_sum[:, None])
    p = log_p.exp()
    grads = log_p.clamp_(min=LEAST).add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(g)
    grads.mul_(p).neg_()
    sampled, column = _sampled(sampled_ids, first_id, z.shape[1])
    grads.scatter_(1, column, grads.gather(1, column) + torch.where(sampled, g, 0.0))
    grads /= temperature if temperatures is None else temperatures[:, None]
    if slope is not None:
        grads *= slope
    return grads.masked_fill_((sampled_ids < 0)[:, None], 0.0).to(dtype)


def shift_sums(top: Tensor, total: Tensor, spread: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Total and spread, relative to ``peak`` in place of ``top``, which is at most it."""
    # a total of 0 had no logit, or none that is possible; +inf - +inf stays NaN
    moved = (finite_top(top) - finite_top(peak)).clamp(min=LEAST)
    moved = torch.where(total == 0, 0.0, moved)
    shrunk = moved.exp()
    return total * shrunk, (spread + moved * total) * shrunk


def finite_top(top: Tensor) -> Tensor:
    return torch.where(top == -_INF, 0.0, top)


def _logits(
    products: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    temperature: float,
    temperatures: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Logits [T, V] in memory of their own, and the slope of the soft cap."""
    z, slope = products if bias is None else products + bias, None
    if softcap is not None:
        z = torch.tanh(z / softcap)
        slope = 1 - z.square()
        z *= softcap
    return z / (temperature if temperatures is None else temperatures[:, None]), slope


def _sampled(sampled_ids: Tensor, first_id: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """[T, 1]: whether the sampled id is one of the tile's, and its column, or 0."""
    column = sampled_ids - first_id
    sampled = (column >= 0) & (column < num_ids)
    return sampled[:, None], torch.where(sampled, column, 0)[:, None]


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def _tanh(x):
    """Off by at most 8 * 2**-24 of its size; the odd polynomial is a fit to [-0.55, 0.55]."""
    square = x * x
    near = square * -0.006274239160120487 + 0.021071678027510643
    near = near * square - 0.05385230854153633
    near = near * square + 0.13332585990428925
    near = near * square - 0.33333316445350647
    near = x + x * (square * near)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.55, near, tl.where(x < 0, -far, far))


@triton.jit
def _tile_logits(z, bias, softcap, scale, CAPPED: tl.constexpr, SCALED: tl.constexpr):
    """Of products: their logits, and the slope of the soft cap, 1 without one."""
    z += bias
    slope = tl.zeros_like(z) + 1.0
    if CAPPED:
        z = _tanh(tl.div_rn(z, softcap + tl.zeros_like(z)))
        slope = 1.0 - z * z
        z *= softcap
    if SCALED:
        z = tl.div_rn(z, scale + tl.zeros_like(z))
    return z, slope


@triton.jit
def _finite_top(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _shifted_sums(top, total, spread, peak):
    """``shift_sums``."""
    moved = _finite_top(top) - _finite_top(peak)
    moved = tl.where(moved < -1e4, -1e4, moved)
    moved = tl.where(total == 0.0, 0.0, moved)
    shrunk = tl.exp(moved)
    return total * shrunk, (spread + moved * total) * shrunk


@triton.jit
def _add_chosen(
    chosen_ptr, row_ptr, bias_ptr, sampled_id, first_id, width, softcap, scale,
    CAPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Where the sampled id is one of the tile's, adds its logit."""
    column = sampled_id - first_id
    here = (column >= 0) & (column < width)
    column = tl.where(here, column, 0)
    z = tl.load(row_ptr + column, mask=here, other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=here, other=0.0).to(tl.float32)
    z, _ = _tile_logits(z, bias, softcap, scale, CAPPED, SCALED)
    tl.store(chosen_ptr, tl.load(chosen_ptr) + tl.where(here, z, 0.0))


@triton.jit(
    repr=kernel_name("sum_vocabulary_tile", "bias_ptr", "CAPPED", "SCALED"),
    do_not_specialize=[
        "num_units", "num_blocks", "first_id", "num_tokens", "stride_sums", "softcap",
        "temperature",
    ],
)  # fmt: skip
def _sum_vocabulary_tile_kernel(
    products_ptr,  # [T, V] float32
    bias_ptr,  # [V], or None
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    sums_ptr,  # [4, T] float32, changed in place where a row is one part
    parts_ptr,  # [3, T, P] float32: top, total, spread of each part; or None: a row is one
    num_units,  # V, in units of VEC
    num_blocks,  # of a part
    first_id,
    num_tokens,  # T
    stride_sums,
    softcap,
    temperature,
    VEC: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    inf: tl.constexpr = float("inf")
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    width = num_units * VEC
    products_ptr += token * width
    scale = temperature
    if temperatures_ptr is not None:
        scale = tl.load(temperatures_ptr + token)
    if parts_ptr is None:
        sums_ptr += token
        top = tl.load(sums_ptr)
        total = tl.load(sums_ptr + stride_sums)
        spread = tl.load(sums_ptr + 2 * stride_sums)
    else:
        top = tl.full([], -inf, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        spread = tl.full([], 0.0, tl.float32)
    begin = part * num_blocks * BLOCK_V
    for first in range(begin, tl.minimum(begin + num_blocks * BLOCK_V, width), BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        inside = v < width
        z = tl.load(products_ptr + v, mask=inside, other=0.0)
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + v, mask=inside, other=0.0).to(tl.float32)
        z, _ = _tile_logits(z, bias, softcap, scale, CAPPED, SCALED)
        z = tl.where(inside, z, -inf)
        peak = tl.maximum(top, tl.max(z, axis=0))
        total, spread = _shifted_sums(top, total, spread, peak)
        z -= _finite_top(peak)
        weights = tl.exp(z)
        total += tl.sum(weights, axis=0)
        spread += tl.sum(weights * tl.maximum(z, -1e4), axis=0)
        top = peak
    if parts_ptr is None:
        tl.store(sums_ptr, top)
        tl.store(sums_ptr + stride_sums, total)
        tl.store(sums_ptr + 2 * stride_sums, spread)
        _add_chosen(
            sums_ptr + 3 * stride_sums, products_ptr, bias_ptr, tl.load(sampled_ptr + token),
            first_id, width, softcap, scale, CAPPED, SCALED,
        )  # fmt: skip
    else:
        num_parts = tl.num_programs(1)
        stride_parts = num_tokens.to(tl.int64) * num_parts
        parts_ptr += token * num_parts + part
        tl.store(parts_ptr, top)
        tl.store(parts_ptr + stride_parts, total)
        tl.store(parts_ptr + 2 * stride_parts, spread)


@triton.jit(
    repr=kernel_name("join_vocabulary_parts", "bias_ptr", "CAPPED", "SCALED"),
    do_not_specialize=[
        "width", "num_parts", "first_id", "num_tokens", "stride_sums", "softcap", "temperature",
    ],
)  # fmt: skip
def _join_vocabulary_parts_kernel(
    products_ptr,  # [T, V] float32
    bias_ptr,  # [V], or None
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    sums_ptr,  # [4, T] float32, changed in place
    parts_ptr,  # [3, T, P] float32
    width,  # V
    num_parts,  # P
    first_id,
    num_tokens,  # T
    stride_sums,
    softcap,
    temperature,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_P: tl.constexpr,  # >= P
):
    inf: tl.constexpr = float("inf")
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    there = part < num_parts
    stride_parts = num_tokens.to(tl.int64) * num_parts
    parts_ptr += token * num_parts + part
    tops = tl.load(parts_ptr, mask=there, other=-inf)
    totals = tl.load(parts_ptr + stride_parts, mask=there, other=0.0)
    spreads = tl.load(parts_ptr + 2 * stride_parts, mask=there, other=0.0)
    sums_ptr += token
    top = tl.load(sums_ptr)
    total = tl.load(sums_ptr + stride_sums)
    spread = tl.load(sums_ptr + 2 * stride_sums)
    peak = tl.maximum(top, tl.max(tops, axis=0))
    total, spread = _shifted_sums(top, total, spread, peak)
    totals, spreads = _shifted_sums(tops, totals, spreads, peak)
    tl.store(sums_ptr, peak)
    tl.store(sums_ptr + stride_sums, total + tl.sum(totals, axis=0))
    tl.store(sums_ptr + 2 * stride_sums, spread + tl.sum(spreads, axis=0))
    scale = temperature
    if temperatures_ptr is not None:
        scale = tl.load(temperatures_ptr + token)
    _add_chosen(
        sums_ptr + 3 * stride_sums, products_ptr + token * width, bias_ptr,
        tl.load(sampled_ptr + token), first_id, width, softcap, scale, CAPPED, SCALED,
    )  # fmt: skip


@triton.jit(
    repr=kernel_name("grad_vocabulary_tile", "out_ptr", "bias_ptr", "CAPPED", "SCALED"),
    do_not_specialize=["num_units", "num_blocks", "first_id", "softcap", "temperature"],
)
def _grad_vocabulary_tile_kernel(
    products_ptr,  # [T, V] float32
    bias_ptr,  # [V], or None
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    grad_logprobs_ptr,  # [T] float32
    grad_entropy_ptr,  # [T] float32
    entropy_ptr,  # [T] float32
    log_sum_ptr,  # [T] float32
    out_ptr,  # [T, V]
    num_units,  # V, in units of VEC
    num_blocks,  # of a row
    first_id,
    softcap,
    temperature,
    VEC: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    width = num_units * VEC
    v = (tl.program_id(0) % num_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < width
    z = tl.load(products_ptr + token * width + v, mask=inside, other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + v, mask=inside, other=0.0).to(tl.float32)
    scale = temperature
    if temperatures_ptr is not None:
        scale = tl.load(temperatures_ptr + token)
    sampled_id = tl.load(sampled_ptr + token)
    column = sampled_id - first_id
    column = tl.where((column >= 0) & (column < width), column, -1).to(tl.int32)
    grad_logprob = tl.load(grad_logprobs_ptr + token)
    grad_entropy = tl.load(grad_entropy_ptr + token)

    z, slope = _tile_logits(z, bias, softcap, scale, CAPPED, SCALED)
    log_p = z - tl.load(log_sum_ptr + token)
    p = tl.exp(log_p)
    log_p = tl.where(log_p < -1e4, -1e4, log_p)
    grad = -p * ((log_p + tl.load(entropy_ptr + token)) * grad_entropy + grad_logprob)
    grad = tl.where(v == column, grad + grad_logprob, grad)
    if SCALED:
        grad = tl.div_rn(grad, scale + tl.zeros_like(grad))
    grad = tl.where(sampled_id >= 0, grad * slope, 0.0)
    tl.store(out_ptr + token * width + v, grad.to(out_ptr.dtype.element_ty), mask=inside)


_launch_sum_vocabulary_tile = Launcher(_sum_vocabulary_tile_kernel)
_launch_join_vocabulary_parts = Launcher(_join_vocabulary_parts_kernel)
_launch_grad_vocabulary_tile = Launcher(_grad_vocabulary_tile_kernel)

#: Logits that a program holds at a time, and its warps.
_BLOCK: Final = 2048
_NUM_WARPS: Final = 4
#: Programs that keep a GPU busy: fewer rows than that are read in parts, at most so many a row.
_PROGRAMS: Final = 2048
_MAX_PARTS: Final = 128


def _row_blocks(width: int) -> tuple[int, int, int]:
    """Elements moved together, BLOCK_V, and blocks of a row."""
    vec = 4 if width % 4 == 0 else 1
    block_v = _BLOCK if vec > 1 and width > _BLOCK // 2 else _BLOCK // 2
    return vec, block_v, -(-width // block_v)


def _sum_vocabulary_tile_cuda(
    products: Tensor, sums: Tensor, sampled_ids: Tensor, first_id: int, bias: Tensor | None,
    softcap: float | None, temperature: float, temperatures: Tensor | None = None,
) -> None:  # fmt: skip
    if products.numel() == 0:
        return
    if products.dtype == torch.float64:
        sum_vocabulary_tile_reference(
            products, sums, sampled_ids, first_id, bias, softcap, temperature, temperatures
        )
        return
    num_tokens, width = products.shape
    vec, block_v, num_blocks = _row_blocks(width)
    parts = None
    most = min(max(_PROGRAMS // num_tokens, 1), _MAX_PARTS)
    num_blocks_of_part = -(-num_blocks // most)
    num_parts = -(-num_blocks // num_blocks_of_part)
    if num_parts > 1:
        parts = products.new_empty((3, num_tokens, num_parts))
    capped, scaled = softcap is not None, temperatures is not None or temperature != 1
    scalars = (num_tokens, sums.stride(0), 1.0 if softcap is None else softcap, temperature)
    pointers = (
        products.contiguous(), None if bias is None else bias.contiguous(),
        sampled_ids.contiguous(), temperatures, sums, parts,
    )  # fmt: skip
    _launch_sum_vocabulary_tile(
        (num_tokens, num_parts),
        (*pointers, width // vec, num_blocks_of_part, first_id, *scalars),
        (vec, capped, scaled, block_v),
        _NUM_WARPS,
    )
    if num_parts > 1:
        _launch_join_vocabulary_parts(
            (num_tokens,),
            (*pointers, width, num_parts, first_id, *scalars),
            (capped, scaled, _MAX_PARTS),
            2,
        )


def _grad_vocabulary_tile_cuda(
    products: Tensor, sampled_ids: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor,
    entropy: Tensor, log_sum: Tensor, first_id: int, dtype: torch.dtype, bias: Tensor | None,
    softcap: float | None, temperature: float, temperatures: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows = sampled_ids, grad_logprobs, grad_entropy, entropy, log_sum
    if products.dtype == torch.float64 or products.numel() == 0:
        return grad_vocabulary_tile_reference(
            products, *rows, first_id, dtype, bias, softcap, temperature, temperatures
        )
    num_tokens, width = products.shape
    out = products.new_empty((num_tokens, width), dtype=dtype)
    vec, block_v, num_blocks = _row_blocks(width)
    sampled_ids, *numbers = (row.contiguous() for row in rows)
    capped, scaled = softcap is not None, temperatures is not None or temperature != 1
    _launch_grad_vocabulary_tile(
        (num_tokens * num_blocks,),
        (
            products.contiguous(), None if bias is None else bias.contiguous(), sampled_ids,
            temperatures, *numbers, out, width // vec, num_blocks, first_id,
            1.0 if softcap is None else softcap, temperature,
        ),
        (vec, capped, scaled, block_v),
        _NUM_WARPS,
    )  # fmt: skip
    return out


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::sum_vocabulary_tile",
    "(Tensor products, Tensor(a!) sums, Tensor sampled_ids, SymInt first_id, Tensor? bias,"
    " float? softcap, float temperature, Tensor? temperatures=None) -> ()",
)
torch.library.impl("packhorse::sum_vocabulary_tile", "CPU", sum_vocabulary_tile_reference)
torch.library.impl("packhorse::sum_vocabulary_tile", "CUDA", _sum_vocabulary_tile_cuda)

torch.library.define(
    "packhorse::grad_vocabulary_tile",
    "(Tensor products, Tensor sampled_ids, Tensor grad_logprobs, Tensor grad_entropy,"
    " Tensor entropy, Tensor log_sum, SymInt first_id, ScalarType dtype, Tensor? bias,"
    " float? softcap, float temperature, Tensor? temperatures=None) -> Tensor",
)
torch.library.impl("packhorse::grad_vocabulary_tile", "CPU", grad_vocabulary_tile_reference)
torch.library.impl("packhorse::grad_vocabulary_tile", "CUDA", _grad_vocabulary_tile_cuda)


@torch.library.register_fake("packhorse::sum_vocabulary_tile")
def _sum_vocabulary_tile_fake(*_) -> None:
    return None


@torch.library.register_fake("packhorse::grad_vocabulary_tile")
def _grad_vocabulary_tile_fake(products, *rest) -> Tensor:
    return products.new_empty(tuple(products.shape), dtype=rest[6])


_ops = torch.ops.packhorse
sum_vocabulary_tile = called_directly(_ops.sum_vocabulary_tile.default, _sum_vocabulary_tile_cuda)
grad_vocabulary_tile = called_directly(
    _ops.grad_vocabulary_tile.default, _grad_vocabulary_tile_cuda
)
