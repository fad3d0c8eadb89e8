"""Score the sampled ids over the ids that the sampler kept, from hidden states: no logits.

    logits[t, c] = softcap(hidden[t] . weight[c] + bias[c])      only for members c of row t
    scores       = as ``support_logprobs`` of these logits, members only

What full logits would take, [T, V], is never made: the forward keeps [T, C], the backward writes
the gradients that are asked for and little more. Products are added in float32, float64 for float64
weights. Gradients are deterministic, bit for bit; on a GPU not those of float64, which runs the
reference there, and waits for the device.

Over a vocabulary that is sharded, each rank makes the logits of its own members and 0 for the
others, and one all-reduce of [T, C] adds them up: an exact sum, so the scores are those of one
rank, bit for bit, on each of them. It has a fixed shape, and a shard without members takes part.

Sizes: T tokens, N rows, C candidates a row, H hidden size, V vocabulary rows of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.lm_head_checks import Head, check_head, unit_rows
from packhorse.kernels.lm_head_members import (
    grad_hidden_of_members,
    pair_rows,
    project_members,
)
from packhorse.kernels.members import grad_members, order_support, score_members, sum_parts
from packhorse.kernels.support import SupportScores, check_support, wants_gradients

_NAME = "lm_head_support_logprobs"


def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    support_ids: Tensor,
    sampled_ids: Tensor,
    temperatures: Tensor | None,  # [T], in place of the head's one
    head: Head,
    row_ids: Tensor | None,
) -> tuple[SupportScores, tuple[Tensor, ...]]:
    """The scores, and for the backward: columns, member_logprobs, capped logits (or nothing)."""
    columns, known, num_ignored = order_support(support_ids, head.vocab_size, row_ids)
    logits = project_members(hidden, weight, bias, columns, known, head.vocab_start)
    if head.group is not None or head.softcap is not None:
        logits = sum_parts(logits)[None]
    if head.group is not None:
        dist.all_reduce(logits, group=head.group)
    capped: tuple[Tensor, ...] = ()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
        capped = (logits[0],)
    logprobs, entropy, status, member_logprobs = score_members(
        logits, columns, known, sampled_ids, *head.operand(temperatures, logits[0])
    )
    scores = SupportScores(logprobs, entropy, status, num_ignored)
    return scores, (columns, member_logprobs, *capped)


class _LmHeadSupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, support_ids, sampled_ids, temperatures, head, row_ids):
        scores, kept = _score(
            hidden, weight, bias, support_ids, sampled_ids, temperatures, head, row_ids
        )
        ctx.save_for_backward(
            hidden, weight, sampled_ids, temperatures, scores.entropy, scores.status, *kept
        )
        ctx.head, ctx.bias_dtype = head, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(scores.status, scores.num_ignored)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_status, _grad_num_ignored):
        hidden, weight, sampled_ids, temperatures, entropy, status, *kept = ctx.saved_tensors
        columns, member_logprobs, *capped = kept
        head: Head = ctx.head
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]

        def of_members() -> Tensor:
            grads = grad_members(
                grad_logprobs, grad_entropy, columns, member_logprobs, entropy, sampled_ids,
                *head.operand(temperatures, member_logprobs),
            )  # fmt: skip
            return head.through_softcap(grads, *capped)

        grads = of_members()
        grad_hidden = grad_weight = grad_bias = None
        if wants_hidden:
            grad_hidden = grad_hidden_of_members(grads, weight, columns, status, head.vocab_start)
            grad_hidden = head.sum_over_group(grad_hidden)
        if wants_weight or wants_bias:
            unsorted = pair_rows(grads, columns, head.vocab_start, weight.shape[0])
            del grads  # the sort takes most of the memory: less to make them again than to keep
            pairs = unsorted.sort(stable=True)
            del unsorted
            grads = of_members()
            grad_weight, grad_bias = head.sum_pairs(
                grads, hidden, weight, pairs, columns.shape[1],
                wants_weight=wants_weight, bias_dtype=ctx.bias_dtype if wants_bias else None,
            )  # fmt: skip
        return grad_hidden, grad_weight, grad_bias, *(None,) * 5


# --- public API -----------------------------------------------------------------------------------


@ranged
def lm_head_support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    support_ids: Tensor,
    sampled_ids: Tensor,
    *,
    row_ids: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    main_grad: Tensor | None = None,
    group: Any = None,
    reduce_hidden_grad: bool = True,
) -> SupportScores:
    """Logprob of each sampled id, and the entropy, over the ids that the sampler kept.

    Args:
        hidden: [T, H] float64, float32, bfloat16 or float16: what the LM head is given, the row
            that predicts ``sampled_ids[t]``.
        weight: [V, H] of its dtype: the LM head (or the tied embedding), or this rank's shard.
        support_ids: [T, C] int32 or int64, ids of the whole vocabulary, as for
            ``support_logprobs``; with ``row_ids`` [N, C], packed rows.
        sampled_ids: [T] int64.
        row_ids: [T] int64, as for ``support_logprobs``: the row of ``support_ids`` of each token.
        bias: [V] of the LM head.
        temperature: the rollout's, finite and > 0, or one a token, [T] float32 (float64 for
            float64 hidden states; its values are not read for a check, and it gets no gradient).
        softcap: logits are ``softcap * tanh(logits / softcap)``; None: as they are.
        vocab_size: ids of the whole vocabulary; rows after it are pads. By default the rows of all
            shards: V without a group, else V times its ranks.
        vocab_start: id of the first row of ``weight``; by default shards of V rows in the order of
            the ranks. 0 without a group.
        main_grad: [V, H] float32 (float64), to which the backward adds the gradient of ``weight``,
            a leaf, in place; autograd then gives it none. Without it autograd gets a dense one of
            the weight's dtype.
        group: ranks that hold the shards; all call with the same tokens, supports and, but for
            rounding, gradients. One all-reduce of [T, C] in the forward, and in the backward one
            of the gradient of ``hidden``.
        reduce_hidden_grad: False: the gradient of ``hidden`` is this shard's share, for a caller
            who reduce-scatters it (sequence parallelism).

    Returns:
        ``SupportScores`` as of ``support_logprobs``: logprobs and entropy [T] float32 (float64),
        differentiable once in hidden, weight and bias; status [T] and num_ignored [T].

    Raises:
        TypeError: an argument is no tensor or number where it must be, or a dtype is unsupported.
        ValueError: a shape, device, number or stride does not fit; temperatures or ``main_grad``
            want a gradient; this rank is not in ``group``; a row id on the CPU is out of range.
            Token ids are not read: ``status`` reports them.
        NotImplementedError, RuntimeError: of torch, in forward mode or under ``torch.func``.
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
    check_support(_NAME, "hidden", hidden, support_ids, row_ids)
    num_cells = hidden.shape[0] * support_ids.shape[1]
    if num_cells >= 2**31:
        raise ValueError(f"{_NAME}: {num_cells} candidates of all tokens do not fit int32")
    inputs = unit_rows(hidden), unit_rows(weight), bias
    arguments = *inputs, support_ids, sampled_ids, temperatures, head, row_ids
    if wants_gradients(hidden, weight, bias):
        return SupportScores(*_LmHeadSupportLogprobs.apply(*arguments))
    return _score(*arguments)[0]
