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
from packhorse.kernels.members import SUPPORT_MISSING, sum_parts
from packhorse.kernels.ragged_members import Rows, grad_cells, order_cells, score_cells
from packhorse.kernels.rows import (
    check_values,
    checks_values,
    gather_rows,
    interval,
    scatter_rows,
)
from packhorse.kernels.support import SupportScores, wants_gradients
from packhorse.kernels.support_rows import check_ragged_rows

_NAME: Final = "lm_head_ragged_support_logprobs"

#: ids of the narrowest class; the next is 4 times as wide
_NARROWEST: Final = 4
#: ids of a row whose hidden gradient one program adds up
_ADDED: Final = 256


class _Class(NamedTuple):
    width: int
    rows: Rows


class _Plan(NamedTuple):
    """Which rows are of a like width. Rows without an id are in no class."""

    classes: tuple[_Class, ...]
    slots: Rows  # one entry a token: its row


def _make_plan(row_ids: Tensor, row_offsets: Tensor, widths: np.ndarray) -> _Plan:
    device, num_rows = row_ids.device, len(widths)
    slots = torch.arange(row_ids.shape[0], device=device)
    counts = row_offsets.diff()
    rows = Rows(scatter_rows(slots, row_ids, num_rows, fill=-1), row_offsets[:-1], counts)
    classes = [_Class(_NARROWEST, rows)] if num_rows else []  # most rows: not worth a list
    rest = np.flatnonzero(widths > _NARROWEST)
    # 4**k < width <= 4**(k + 1): k is half the power of 2 in width - 1
    powers = np.frexp((widths[rest] - 1).astype(np.float32))[1].astype(np.uint8) - 1
    order = np.argsort(powers // 2, kind="stable")
    listed = torch.from_numpy(rest[order].astype(np.int32))
    if device.type == "cuda":
        listed = listed.pin_memory().to(device, non_blocking=True)
    else:
        listed = listed.to(device)
    of_list = Rows(*(x.index_select(0, listed) for x in rows))
    end = 0
    for k, size in enumerate(np.bincount(powers // 2).tolist()):
        if size:
            classes.append(_Class(4 ** (k + 1), of_list.part(slice(end, end + size))))
        end += size
    begins = gather_rows(rows.begins.contiguous(), row_ids)
    return _Plan(tuple(classes), Rows(slots, begins, gather_rows(counts, row_ids)))


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
    plan: _Plan,
    head: Head,
) -> tuple[SupportScores, _Kept]:
    columns = torch.full_like(token_ids, -1)
    cell_tokens = torch.full_like(token_ids, -1)
    for width, rows in plan.classes:
        order_cells(columns, cell_tokens, token_ids, *rows, width, head.vocab_size)
    logits = project_cells(hidden, weight, bias, columns, cell_tokens, head.vocab_start)
    if head.group is not None or head.softcap is not None:
        logits = sum_parts(logits)[None]
    if head.group is not None:
        dist.all_reduce(logits, group=head.group)
    capped: tuple[Tensor, ...] = ()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
        capped = (logits[0],)
    num_tokens = sampled_ids.shape[0]
    scores = SupportScores(
        logits.new_zeros(num_tokens),
        logits.new_zeros(num_tokens),
        torch.full_like(sampled_ids, SUPPORT_MISSING, dtype=torch.uint8),
        torch.zeros_like(sampled_ids, dtype=torch.int32),
    )
    members = torch.full_like(logits[0], -float("inf"))
    operand = head.operand(temperatures, logits)
    for width, rows in plan.classes:
        score_cells(*scores, members, logits, columns, sampled_ids, *rows, width, *operand)
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
        plan: _Plan = ctx.plan
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
    check_ragged_rows(_NAME, token_ids, row_offsets)
    for field, tensor in (("token_ids", token_ids), ("row_ids", row_ids)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {field} must be a tensor, got {type(tensor).__name__}")
        if tensor.device != hidden.device:
            raise ValueError(f"{_NAME}: {field} on {tensor.device}, hidden on {hidden.device}")
    if row_ids.dtype != torch.int64:
        raise TypeError(f"{_NAME}: row_ids must be int64, got {row_ids.dtype}")
    if row_ids.shape != sampled_ids.shape:
        raise ValueError(
            f"{_NAME}: row_ids must be [T] = {list(sampled_ids.shape)}, got {list(row_ids.shape)}"
        )
    listed = _check_widths(widths, row_offsets.shape[0] - 1, token_ids.shape[0])
    if checks_values(row_ids):
        _check_rows(row_ids, row_offsets, listed)
    plan = _make_plan(row_ids.contiguous(), row_offsets, listed)
    inputs = unit_rows(hidden), unit_rows(weight), bias
    arguments = *inputs, token_ids, sampled_ids.contiguous(), temperatures, plan, head
    if wants_gradients(hidden, weight, bias):
        return SupportScores(*_LmHeadRaggedSupportLogprobs.apply(*arguments))
    return _score(*arguments)[0]


def _check_widths(widths: object, num_rows: int, num_ids: int) -> np.ndarray:
    if isinstance(widths, Tensor):
        raise TypeError(f"{_NAME}: widths must be host integers, got a tensor")
    listed = np.asarray(widths)
    if listed.size == 0:
        listed = listed.astype(np.int64)
    if listed.dtype.kind not in "iu" or listed.ndim != 1:
        raise TypeError(f"{_NAME}: widths must be host integers [N], got {listed.dtype}")
    if listed.size != num_rows:
        raise ValueError(f"{_NAME}: {listed.size} widths for {num_rows} rows")
    if listed.size and (listed.min() < 0 or listed.sum() > num_ids):
        raise ValueError(f"{_NAME}: widths are negative, or more than the {num_ids} ids")
    return listed


def _check_rows(row_ids: Tensor, row_offsets: Tensor, widths: np.ndarray) -> None:
    """What a GPU believes, unless it is asked to check values."""
    expected = torch.from_numpy(widths.astype(np.int64)).to(row_offsets.device)
    fits = (row_offsets.diff() == expected).all()
    check_values(fits, f"{_NAME}: widths must be those of row_offsets")
    inside = ((row_ids >= -1) & (row_ids < len(widths))).all()
    check_values(inside, f"{_NAME}: row_ids must be in {interval(-1, len(widths))}")
    named = scatter_rows(torch.ones_like(row_ids), row_ids, len(widths), fill=0).sum()
    once = named == (row_ids >= 0).sum()
    check_values(once, f"{_NAME}: row_ids must name a row once at most")
