"""Score the sampled ids over supports of different widths, from hidden states: no logits.

The same scores as ``lm_head_support_logprobs`` of rows padded to the widest, without padding them:
supports, products and gradients stay in the packed cells, and hidden states where the model left
them. Only what looks at a whole row takes rows of a like width together, in classes of 4, 16, 64,
... ids, whose sizes the host knows. A row of the whole vocabulary among rows of two makes none of
these slower.

Sizes: T tokens, N rows, M cells (ids of all rows), H hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.lm_head_cells import grad_hidden_of_cells, project_cells, put_wide_hidden
from packhorse.kernels.lm_head_checks import Head, check_head, unit_rows
from packhorse.kernels.lm_head_members import pair_rows
from packhorse.kernels.members import sum_parts
from packhorse.kernels.ragged_members import grad_cells
from packhorse.kernels.ragged_plan import Plan, check_ragged
from packhorse.kernels.support import SupportScores, wants_gradients

_NAME: Final = "lm_head_ragged_support_logprobs"

#: ids of a row whose hidden gradient one program adds up
_ADDED: Final = 256


class _Kept(NamedTuple):
    """What the backward needs of the forward."""

    columns: Tensor  # [M] int32
    cell_tokens: Tensor  # [M] int32
    member_logprobs: Tensor  # [M]
    capped: tuple[Tensor, ...]  # [M] logits after the soft cap, if there is one


def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    sampled_ids: Tensor,
    temperatures: Tensor | None,
    plan: Plan,
    head: Head,
) -> tuple[SupportScores, _Kept]:
    columns, cell_tokens = plan.order(token_ids, head.vocab_size)
    logits = project_cells(hidden, weight, bias, columns, cell_tokens, head.vocab_start)
    if head.group is not None or head.softcap is not None:
        logits = sum_parts(logits)[None]
    if head.group is not None:
        dist.all_reduce(logits, group=head.group)
    capped: tuple[Tensor, ...] = ()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
        capped = (logits[0],)
    operand = head.operand(temperatures, logits)
    scores, members = plan.score(logits, columns, sampled_ids, *operand)
    return scores, _Kept(columns, cell_tokens, members, capped)


class _LmHeadRaggedSupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, sampled_ids, temperatures, plan, head):
        scores, kept = _score(
            hidden, weight, bias, token_ids, sampled_ids, temperatures, plan, head
        )
        ctx.save_for_backward(
            hidden, weight, sampled_ids, temperatures, scores.entropy, *kept[:3], *kept.capped
        )
        ctx.plan, ctx.head = plan, head
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(scores.status, scores.num_ignored)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_status, _grad_num_ignored):
        hidden, weight, sampled_ids, temperatures, entropy, *kept = ctx.saved_tensors
        columns, cell_tokens, members, *capped = kept
        plan: Plan = ctx.plan
        head: Head = ctx.head
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grads = grad_cells(
            grad_logprobs, grad_entropy, columns, cell_tokens, members, entropy, sampled_ids,
            *head.operand(temperatures, members),
        )  # fmt: skip
        grads = head.through_softcap(grads, *capped)
        grad_hidden = grad_weight = grad_bias = None
        if wants_hidden:
            grad_hidden = grad_hidden_of_cells(
                grads, weight, columns, cell_tokens, *plan.slots[1:], head.vocab_start, _ADDED
            )  # fmt: skip
            for width, rows in plan.classes:
                if width > _ADDED:
                    put_wide_hidden(
                        grad_hidden, grads, weight, columns, *rows, width, head.vocab_start
                    )
            grad_hidden = head.sum_over_group(grad_hidden)
        if wants_weight or wants_bias:
            pairs = pair_rows(grads, columns, head.vocab_start, weight.shape[0]).sort(stable=True)
            grad_weight, grad_bias = head.sum_pairs(
                grads, hidden, weight, pairs, 1, cell_tokens, wants_weight=wants_weight,
                bias_dtype=ctx.bias_dtype if wants_bias else None,
            )  # fmt: skip
        return grad_hidden, grad_weight, grad_bias, *(None,) * 5


# --- public API -----------------------------------------------------------------------------------


@ranged
def lm_head_ragged_support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    row_offsets: Tensor,
    row_ids: Tensor,
    sampled_ids: Tensor,
    *,
    widths: Sequence[int] | np.ndarray,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    main_grad: Tensor | None = None,
    group: Any = None,
    reduce_hidden_grad: bool = True,
) -> SupportScores:
    """Logprob of each sampled id, and the entropy, over supports of different widths.

    Args:
        hidden, weight, sampled_ids: as of ``lm_head_support_logprobs``.
        token_ids, row_offsets: the supports, as of ``gather_ragged_support``.
        row_ids: [T] int64, contiguous: the row of each token, -1: it has none. A row is named once
            at most.
        widths: [N] host integers, ids of each row; believed.
        bias, temperature, softcap, vocab_size, vocab_start, main_grad, group, reduce_hidden_grad:
            as of ``lm_head_support_logprobs``. One all-reduce of a logit a cell.

    Returns:
        ``SupportScores`` [T] as of ``lm_head_support_logprobs``. Not for a CUDA graph: which rows
        are scored together is host data.

    Raises:
        As ``lm_head_support_logprobs`` and ``gather_ragged_support``; ValueError where ``widths``
        are not of N rows, negative or wider together than ``token_ids``.

    Source: vLLM's ``sampling_mask`` is such ids and counts.
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
    plan = check_ragged(_NAME, "hidden", hidden, token_ids, row_offsets, row_ids, widths)
    inputs = unit_rows(hidden), unit_rows(weight), bias
    arguments = *inputs, token_ids, sampled_ids.contiguous(), temperatures, plan, head
    if wants_gradients(hidden, weight, bias):
        return SupportScores(*_LmHeadRaggedSupportLogprobs.apply(*arguments))
    return _score(*arguments)[0]
