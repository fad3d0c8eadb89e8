"""Score the sampled ids over the whole vocabulary, from hidden states: no logits are kept.

    z[t, v]     = softcap(hidden[t] . weight[v] + bias[v]) / temperature
    logprobs[t] = z[t, s] - log sum_v exp z[t, v]                  s = sampled_ids[t]
    entropy[t]  = -sum_v p_v log p_v                               p = softmax of z[t]

What a trainer without sampling supports calls, and what appended tokens fall back to. Logits exist
for a tile of tokens and rows of the weight at a time, forward and again in the backward; between
the matrix products a tile is read once (``vocabulary_tiles.py``). A row of the weight gets its
whole gradient in one tile's turn, so that it is rounded once. Products are added in float32,
float64 for float64 weights; on a GPU the gradients of bfloat16 logits are rounded to bfloat16
before their products, as those of a plain LM head are. Two runs agree bit for bit.

Over a vocabulary that is sharded each rank takes its own rows; one MAX all-reduce of [T] and one
SUM all-reduce of [3, T] join them, of a fixed shape, on shards without a row that counts too.

Where ``sampled_ids[t]`` is negative the row has no target: its logprob, entropy and gradients are
selected to be exactly 0, whatever its hidden states hold.

Sizes: T tokens, H hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.lm_head_checks import Head, check_head, unit_rows
from packhorse.kernels.members import wide_dtype
from packhorse.kernels.support import VocabularyScores, wants_gradients
from packhorse.kernels.vocabulary_tiles import (
    finite_top,
    grad_vocabulary_tile,
    shift_sums,
    sum_vocabulary_tile,
)

_NAME: Final = "full_vocabulary_logprobs"

#: A tile: so many tokens, and so many of their logits. On a GPU one float32 buffer of it exists at
#: a time, in the backward beside one of the gradients' dtype; on a CPU a few.
_TOKENS_AT_ONCE: Final = 1 << 13
_LOGITS_AT_ONCE: Final = 1 << 24
#: A tile has a multiple of so many ids: its rows are read 16 bytes at a time.
_ALIGNED_IDS: Final = 256


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Products stay in the dtypes that they were given in, whatever the trainer's autocast says."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


# --- tiles ----------------------------------------------------------------------------------------


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in float32 (float64), added up in it."""
    if _is_widened(left.dtype, left.device):
        return left.float() @ right.float()
    if left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _is_widened(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product of ``dtype`` makes float32 copies of its factors."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        return not hasattr(torch.ops.aten.mm, "dtype")
    return dtype not in (torch.float32, torch.float64)


@cache
def _adds_wide_products() -> bool:
    """Whether ``addmm`` adds products of bfloat16 to float32 in place: some releases refuse to."""
    if not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    x = torch.zeros(8, 8, device="cuda")
    narrow = x.bfloat16()
    try:
        torch.ops.aten.addmm.dtype_out(x, narrow, narrow, torch.float32, out=x)
    except RuntimeError:
        return False
    return True


def _adds_in_place(out: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` are added to ``out`` by the matrix product itself."""
    if out.dtype == dtype:
        return dtype in (torch.float32, torch.float64)
    is_wide = out.is_cuda and (out.dtype, dtype) == (torch.float32, torch.bfloat16)
    return is_wide and not torch.compiler.is_compiling() and _adds_wide_products()


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out += left @ right`` of float32 (float64), without a buffer for the product if it can."""
    if not _adds_in_place(out, left.dtype):
        out += _product(left, right)
    elif out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)


def _num_ids(weight: Tensor, head: Head) -> int:
    """Rows of this shard that are ids of the vocabulary; those after them are pads."""
    return max(min(weight.shape[0], head.vocab_size - head.vocab_start), 0)


def _tiles(num_tokens: int, num_ids: int, row_size: int = 1) -> Iterator[tuple[slice, list[slice]]]:
    """Rows of the weight, and for each run of them the tokens in turn; ``row_size`` elements of
    each row take no more memory than the logits."""
    tokens = max(min(num_tokens, _TOKENS_AT_ONCE), 1)
    ids = max(_LOGITS_AT_ONCE // max(tokens, row_size), 1)
    if ids > _ALIGNED_IDS:
        ids -= ids % _ALIGNED_IDS
    of_tokens = [slice(t, min(t + tokens, num_tokens)) for t in range(0, num_tokens, tokens)]
    for first in range(0, num_ids, ids):
        yield slice(first, min(first + ids, num_ids)), of_tokens


# --- forward, backward ----------------------------------------------------------------------------


def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sampled_ids: Tensor,
    temperatures: Tensor | None,
    head: Head,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs [T], entropy [T], and for the backward log sum_v exp z [T]."""
    wide = wide_dtype(hidden)
    sums = hidden.new_zeros((4, hidden.shape[0]), dtype=wide)
    sums[0].fill_(-float("inf"))
    temperature, temperatures = head.operand(temperatures, sums[0])
    row_size = weight.shape[1] if _is_widened(hidden.dtype, hidden.device) else 1
    for ids, of_tokens in _tiles(hidden.shape[0], _num_ids(weight, head), row_size):
        rows, biases = weight[ids], None if bias is None else bias[ids]
        for t in of_tokens:
            sum_vocabulary_tile(
                _product(hidden[t], rows.T), sums[:, t], sampled_ids[t],
                head.vocab_start + ids.start, biases, head.softcap, temperature,
                None if temperatures is None else temperatures[t],
            )  # fmt: skip
    top, total, spread, chosen = sums.unbind(0)
    if head.group is not None:
        peak = top.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=head.group)
        joined = torch.stack([*shift_sums(top, total, spread, peak), chosen])
        dist.all_reduce(joined, group=head.group)
        (total, spread, chosen), top = joined.unbind(0), peak
    log_total = total.log()
    shift = finite_top(top)
    logprobs = chosen - shift - log_total
    logprobs = torch.where(sampled_ids < head.vocab_size, logprobs, float("nan"))
    entropy = log_total - spread / total
    has_target = sampled_ids >= 0
    logprobs, entropy = (torch.where(has_target, x, 0.0) for x in (logprobs, entropy))
    return logprobs, entropy, shift + log_total


class _FullVocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, sampled_ids, temperatures, head):
        logprobs, entropy, log_sum = _score(hidden, weight, bias, sampled_ids, temperatures, head)
        ctx.save_for_backward(hidden, weight, bias, sampled_ids, temperatures, entropy, log_sum)
        ctx.head = head
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        with without_autocast(grad_logprobs):
            return _gradients(ctx, grad_logprobs, grad_entropy)


def _gradients(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, sampled_ids, temperatures, entropy, log_sum = ctx.saved_tensors
    head: Head = ctx.head
    # a score without a gradient is that of a row without a target: 0 times what it holds would
    # be NaN where that is
    wanted = (sampled_ids >= 0) & ((grad_logprobs != 0) | (grad_entropy != 0))
    outside = sampled_ids >= head.vocab_size
    g = torch.where(wanted, grad_logprobs.masked_fill(outside, float("nan")), 0.0)
    e = torch.where(wanted, grad_entropy, 0.0)
    sampled_ids = torch.where(wanted, sampled_ids, -1)
    hidden = torch.where(wanted[:, None], hidden, 0.0)
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_hidden = grad_weight = grad_bias = out = None
    if wants_hidden:
        grad_hidden = torch.zeros_like(hidden, dtype=g.dtype)
    if wants_weight:
        out, grad_weight = head.weight_gradient(weight)
    if wants_bias:
        grad_bias = torch.zeros_like(bias, dtype=g.dtype)
    is_narrow = hidden.is_cuda and hidden.dtype == torch.bfloat16
    dtype = torch.bfloat16 if is_narrow else g.dtype
    temperature, temperatures = head.operand(temperatures, g)
    in_place = out is not None and _adds_in_place(out, dtype)
    is_widened = _is_widened(hidden.dtype, hidden.device)
    row_size = 1 if (out is None or in_place) and not is_widened else weight.shape[1]
    for ids, of_tokens in _tiles(hidden.shape[0], _num_ids(weight, head), row_size):
        rows, biases = weight[ids], None if bias is None else bias[ids]
        sums = None
        for t in of_tokens:
            grads = grad_vocabulary_tile(
                _product(hidden[t], rows.T), sampled_ids[t], g[t], e[t], entropy[t], log_sum[t],
                head.vocab_start + ids.start, dtype, biases, head.softcap, temperature,
                None if temperatures is None else temperatures[t],
            )  # fmt: skip
            if grad_bias is not None:
                grad_bias[ids] += grads.sum(0, dtype=g.dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden[t], grads, rows.to(dtype))
            if out is not None and in_place:
                _add_product(out[ids], grads.T, hidden[t].to(dtype))
            elif out is not None and sums is not None:
                _add_product(sums, grads.T, hidden[t].to(dtype))
            elif out is not None:
                sums = _product(grads.T, hidden[t].to(dtype))
            del grads  # the next tile takes its memory, which the L2 cache still holds
        if out is not None and sums is not None:
            out[ids] += sums.to(out.dtype)
    if grad_hidden is not None:
        grad_hidden = head.sum_over_group(grad_hidden.to(hidden.dtype))
    if grad_bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_hidden, grad_weight, grad_bias, None, None, None


# --- public API -----------------------------------------------------------------------------------


@ranged
def full_vocabulary_logprobs(
    hidden: Tensor,
    weight: Tensor,
    sampled_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    main_grad: Tensor | None = None,
    group: Any = None,
    reduce_hidden_grad: bool = True,
) -> VocabularyScores:
    """Logprob of each sampled id, and the entropy, over the whole vocabulary.

    Args:
        hidden: [T, H] float64, float32, bfloat16 or float16: what the LM head is given, the row
            that predicts ``sampled_ids[t]``.
        weight: [V, H] of its dtype: the LM head (or the tied embedding), or this rank's shard.
        sampled_ids: [T] int64. A negative id says that the row has no target.
        bias, temperature, softcap, vocab_size, vocab_start, main_grad, group, reduce_hidden_grad:
            as of ``lm_head_support_logprobs``. Without ``vocab_size`` pad rows take their share of
            the probability.

    Returns:
        ``VocabularyScores``: logprobs and entropy [T] float32 (float64), differentiable once in
        hidden, weight and bias. Both are 0 without a gradient where the sampled id is negative; a
        logprob is NaN where it is the vocabulary's size or more, -inf where its logit is. One
        buffer of 2**24 float32 logits exists at a time on a GPU, a few on a CPU; in the backward at
        most two more of that size, and some of [T, H].

    Raises:
        TypeError, ValueError: as ``lm_head_support_logprobs``.

    Example:
        >>> hidden, weight = torch.zeros(1, 8), torch.zeros(4, 8)
        >>> full_vocabulary_logprobs(hidden, weight, torch.tensor([2])).logprobs.exp()
        tensor([0.2500])
    """
    head, temperatures = check_head(
        _NAME,
        hidden,
        weight,
        sampled_ids,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        main_grad=main_grad,
        group=group,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    arguments = unit_rows(hidden), unit_rows(weight), bias, sampled_ids, temperatures, head
    with without_autocast(hidden):
        if wants_gradients(hidden, weight, bias):
            return VocabularyScores(*_FullVocabularyLogprobs.apply(*arguments))
        return VocabularyScores(*_score(*arguments)[:2])
