"""Score the sampled ids over supports of different widths, from hidden states: no logits.

The same scores as ``lm_head_support_logprobs`` of rows padded to the widest, without padding them:
rows of a like width are scored together, in classes of 4, 16, 64, ... ids, whose sizes the host
knows. A row of the whole vocabulary among rows of two makes none of these wider. Rows are read
where they are packed, hidden states where the model left them.

Rows of more than 64 ids are projected in pieces of 64, so that none is one program's alone.

Sizes: T tokens, N rows, C candidates of a class, H hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.lm_head_checks import Head, check_head, unit_rows
from packhorse.kernels.lm_head_members import (
    add_weight_gradient,
    project_members,
    put_hidden_gradient,
)
from packhorse.kernels.members import (
    SUPPORT_MISSING,
    grad_members,
    order_support,
    score_members,
    sum_parts,
)
from packhorse.kernels.rows import gather_rows, put_rows, scatter_rows
from packhorse.kernels.support import SupportScores, wants_gradients
from packhorse.kernels.support_rows import check_ragged_rows, pad_ragged_support

_NAME: Final = "lm_head_ragged_support_logprobs"

#: ids of the narrowest class; the next is 4 times as wide
_NARROWEST: Final = 4
#: ids of a row that one program projects
_PROJECTED: Final = 64
#: ids of a row whose hidden gradient one program adds up
_ADDED: Final = 1024
#: partial sums of hidden gradients that exist at once
_PARTS: Final = 4096


class _Class(NamedTuple):
    width: int  # C
    rows: slice  # of the rows in the order of the classes
    cells: slice  # of all classes' cells, one after another


class _Plan(NamedTuple):
    """Which row is scored where."""

    classes: tuple[_Class, ...]
    tokens: Tensor  # [R] int64: the slot of each row, -1: none on this rank
    row_ids: Tensor  # [R] int64: the row, -1 where it has no slot
    places: Tensor  # [T] int64: the row of each slot in the order of the classes, -1: none


def _make_plan(row_ids: Tensor, widths: np.ndarray) -> _Plan:
    classes, rows, begin, cell = [], [], 0, 0
    width, least = _NARROWEST, 0
    while least < widths.max(initial=0):
        (members,) = np.nonzero((widths > least) & (widths <= width))
        if members.size:
            rows.append(members)
            stop, end = begin + members.size, cell + members.size * width
            classes.append(_Class(width, slice(begin, stop), slice(cell, end)))
            begin, cell = stop, end
        width, least = 4 * width, width
    if cell >= 2**31:
        raise ValueError(f"{_NAME}: {cell} cells of supports do not fit int32")
    device = row_ids.device
    listed = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows]))
    if device.type == "cuda":
        listed = listed.pin_memory().to(device, non_blocking=True)
    else:
        listed = listed.to(device)
    slots = torch.arange(row_ids.shape[0], device=device)
    tokens = gather_rows(scatter_rows(slots, row_ids, len(widths), fill=-1), listed)
    places = scatter_rows(torch.arange(begin, device=device), tokens, row_ids.shape[0], fill=-1)
    return _Plan(tuple(classes), tokens, torch.where(tokens >= 0, listed, -1), places)


def _pieces(x: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[G, C] and its rows' tokens, in rows of ``width``."""
    count = x.shape[1] // width
    if count <= 1:
        return x, tokens
    return x.view(-1, width), tokens[:, None].expand(-1, count).reshape(-1).contiguous()


def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    row_offsets: Tensor,
    sampled_ids: Tensor,
    temperatures: Tensor | None,
    plan: _Plan,
    head: Head,
) -> tuple[SupportScores, list[Tensor]]:
    """The scores [T], and for the backward those of the rows: sampled ids, entropy, all columns
    and member logprobs, and capped logits where there are."""
    sampled = gather_rows(sampled_ids, plan.tokens, fill=-1)
    scales = None if temperatures is None else gather_rows(temperatures, plan.tokens, fill=1)
    ordered, logits = [], []
    for width, rows, _ in plan.classes:
        ids = pad_ragged_support(token_ids, row_offsets, plan.row_ids[rows], width=width)
        ordered.append(order_support(ids, head.vocab_size))
        columns, tokens = _pieces(ordered[-1][0], plan.tokens[rows], _PROJECTED)
        parts = project_members(hidden, weight, bias, columns, head.vocab_start, tokens)
        logits.append(parts.view(parts.shape[0], -1, width))
    kept: list[Tensor] = []
    if head.group is not None or head.softcap is not None:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        flat = [sum_parts(parts).flatten() for parts in logits]
        joined = torch.cat([hidden.new_empty(0, dtype=wide), *flat])
        if head.group is not None:
            dist.all_reduce(joined, group=head.group)
        if head.softcap is not None:
            joined = head.softcap * torch.tanh(joined / head.softcap)
            kept.append(joined)
        logits = [joined[cells].view(1, -1, width) for width, _, cells in plan.classes]
    scored = [
        score_members(
            parts, columns, known, sampled[rows],
            *head.operand(None if scales is None else scales[rows], parts[0]),
        )
        for parts, (columns, known, _), (_, rows, _) in zip(
            logits, ordered, plan.classes, strict=True
        )
    ]  # fmt: skip
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat([hidden.new_empty(0, dtype=dtype), *(part.flatten() for part in parts)])

    entropy = join([s[1] for s in scored], wide)
    scores = SupportScores(
        gather_rows(join([s[0] for s in scored], wide), plan.places),
        gather_rows(entropy, plan.places),
        gather_rows(join([s[2] for s in scored], torch.uint8), plan.places, fill=SUPPORT_MISSING),
        gather_rows(join([o[2] for o in ordered], torch.int32), plan.places),
    )
    columns = join([o[0] for o in ordered], torch.int32)
    members = join([s[3] for s in scored], wide)
    return scores, [sampled, entropy, columns, members, *kept]


class _LmHeadRaggedSupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, token_ids, row_offsets, sampled_ids, temperatures, plan, head
    ):
        scores, kept = _score(
            hidden, weight, bias, token_ids, row_offsets, sampled_ids, temperatures, plan, head
        )
        ctx.save_for_backward(hidden, weight, temperatures, *kept)
        ctx.plan, ctx.head = plan, head
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(scores.status, scores.num_ignored)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_status, _grad_num_ignored):
        hidden, weight, temperatures, sampled, entropy, columns, members, *capped = (
            ctx.saved_tensors
        )
        plan: _Plan = ctx.plan
        head: Head = ctx.head
        scales = None if temperatures is None else gather_rows(temperatures, plan.tokens, fill=1)
        g, e = (gather_rows(x.contiguous(), plan.tokens) for x in (grad_logprobs, grad_entropy))
        grads = torch.empty_like(members)
        for width, rows, cells in plan.classes:
            shape = (-1, width)
            scale = head.operand(
                None if scales is None else scales[rows], members[cells].view(shape)
            )
            of_class = grad_members(
                g[rows], e[rows], columns[cells].view(shape), members[cells].view(shape),
                entropy[rows], sampled[rows], *scale,
            )  # fmt: skip
            grads[cells] = of_class.flatten()
        if capped:
            slope = 1 - (capped[0] / head.softcap) ** 2
            grads = torch.where(grads == 0, grads, grads * slope)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
            for width, rows, cells in plan.classes:
                shape = (-1, width)
                _put_class(
                    grad_hidden, grads[cells].view(shape), weight, columns[cells].view(shape),
                    head.vocab_start, plan.tokens[rows],
                )  # fmt: skip
            grad_hidden = head.sum_over_group(grad_hidden)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            pieces = [
                _pieces(columns[cells].view(-1, width), plan.tokens[rows], _NARROWEST)[1]
                for width, rows, cells in plan.classes
            ]
            tokens = torch.cat([plan.tokens[:0], *pieces])
            pairs = grads.view(-1, _NARROWEST)
            of_pairs = columns.view(-1, _NARROWEST)
        if ctx.needs_input_grad[1]:
            out, grad_weight = head.weight_gradient(weight)
            add_weight_gradient(out, pairs, hidden, of_pairs, head.vocab_start, tokens)
        if ctx.needs_input_grad[2]:
            sums = grads.new_zeros((weight.shape[0], 1))
            ones = hidden.new_ones((hidden.shape[0], 1))
            add_weight_gradient(sums, pairs, ones, of_pairs, head.vocab_start, tokens)
            grad_bias = sums.squeeze(1).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 6


def _put_class(
    out: Tensor, grads: Tensor, weight: Tensor, columns: Tensor, vocab_start: int, tokens: Tensor
) -> None:
    """The gradients of one class's hidden states, to their rows of ``out``."""
    width = columns.shape[1]
    if width <= _ADDED:
        put_hidden_gradient(out, grads, weight, columns, vocab_start, tokens)
        return
    count = width // _ADDED
    size = max(_PARTS // count, 1)
    for begin in range(0, columns.shape[0], size):
        some = slice(begin, begin + size)
        of_pieces = columns[some].view(-1, _ADDED)
        parts = grads.new_empty((of_pieces.shape[0], out.shape[1]))
        order = torch.arange(parts.shape[0], device=parts.device)
        put_hidden_gradient(
            parts, grads[some].view(-1, _ADDED), weight, of_pieces, vocab_start, order
        )
        sums = parts.view(-1, count, out.shape[1]).sum(1).to(out.dtype)
        put_rows(out, sums, tokens[some])


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
            as of ``lm_head_support_logprobs``. One all-reduce of all cells of the classes.

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
    plan = _make_plan(row_ids.contiguous(), listed)
    inputs = unit_rows(hidden), unit_rows(weight), bias
    arguments = *inputs, token_ids, row_offsets, sampled_ids.contiguous(), temperatures, plan, head
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
