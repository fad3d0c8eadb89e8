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

Sizes: T tokens, C candidates a row, H hidden size, V vocabulary rows of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.lm_head_members import (
    add_weight_gradient,
    grad_hidden_of_members,
    project_members,
)
from packhorse.kernels.members import grad_members, order_support, score_members, sum_parts
from packhorse.kernels.support import (
    LOGITS_DTYPES,
    SUPPORT_DTYPES,
    SupportScores,
    as_operand,
    check_temperature,
    wants_gradients,
)

_NAME = "lm_head_support_logprobs"


class _Head:
    """What both passes need beside tensors."""

    def __init__(
        self,
        *,
        temperature: float,
        softcap: float | None,
        vocab_size: int,
        vocab_start: int,
        main_grad: Tensor | None,
        group: Any,
        reduce_hidden_grad: bool,
    ) -> None:
        self.temperature = temperature
        self.softcap = softcap
        self.vocab_size = vocab_size
        self.vocab_start = vocab_start
        self.main_grad = main_grad
        self.group = group
        self.reduce_hidden_grad = reduce_hidden_grad

    def operand(self, temperatures: Tensor | None, like: Tensor) -> tuple[float, Tensor | None]:
        if temperatures is not None:
            return 1.0, temperatures
        return as_operand(self.temperature, like)


def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    support_ids: Tensor,
    sampled_ids: Tensor,
    temperatures: Tensor | None,  # [T], in place of the head's one
    head: _Head,
) -> tuple[SupportScores, tuple[Tensor, ...]]:
    """The scores, and for the backward: columns, member_logprobs, capped logits (or nothing)."""
    columns, known, num_ignored = order_support(support_ids, head.vocab_size)
    logits = project_members(hidden, weight, bias, columns, head.vocab_start)
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
    def forward(ctx, hidden, weight, bias, support_ids, sampled_ids, temperatures, head):
        scores, kept = _score(hidden, weight, bias, support_ids, sampled_ids, temperatures, head)
        ctx.save_for_backward(hidden, weight, sampled_ids, temperatures, scores.entropy, *kept)
        ctx.head, ctx.bias_dtype = head, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(scores.status, scores.num_ignored)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_status, _grad_num_ignored):
        hidden, weight, sampled_ids, temperatures, entropy, *kept = ctx.saved_tensors
        columns, member_logprobs, *capped = kept
        head: _Head = ctx.head
        grads = grad_members(
            grad_logprobs, grad_entropy, columns, member_logprobs, entropy, sampled_ids,
            *head.operand(temperatures, member_logprobs),
        )  # fmt: skip
        if capped:  # of d tanh; an entry without a gradient keeps none, whatever its logit
            slope = 1 - (capped[0] / head.softcap) ** 2
            grads = torch.where(grads == 0, grads, grads * slope)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = grad_hidden_of_members(grads, weight, columns, head.vocab_start)
            if head.group is not None and head.reduce_hidden_grad:
                dist.all_reduce(grad_hidden, group=head.group)
        if ctx.needs_input_grad[1]:
            out = head.main_grad
            if out is None:
                out = grad_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            add_weight_gradient(out, grads, hidden, columns, head.vocab_start)
        if ctx.needs_input_grad[2]:
            sums = grads.new_zeros((weight.shape[0], 1))
            ones = hidden.new_ones((hidden.shape[0], 1))
            add_weight_gradient(sums, grads, ones, columns, head.vocab_start)
            grad_bias = sums.squeeze(1).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


# --- public API -----------------------------------------------------------------------------------


@ranged
def lm_head_support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    support_ids: Tensor,
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
) -> SupportScores:
    """Logprob of each sampled id, and the entropy, over the ids that the sampler kept.

    Args:
        hidden: [T, H] float64, float32, bfloat16 or float16: what the LM head is given, the row
            that predicts ``sampled_ids[t]``.
        weight: [V, H] of its dtype: the LM head (or the tied embedding), or this rank's shard.
        support_ids: [T, C] int32 or int64, ids of the whole vocabulary, as for
            ``support_logprobs``.
        sampled_ids: [T] int64.
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
            want a gradient; this rank is not in ``group``. Ids are not read: ``status`` reports
            them.
        NotImplementedError, RuntimeError: of torch, in forward mode or under ``torch.func``.
    """
    num_rows = _check_tensors(hidden, weight, bias, support_ids, sampled_ids)
    if isinstance(temperature, Tensor):
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        if temperature.dtype != wide:
            raise TypeError(f"{_NAME}: temperature must be {wide}, got {temperature.dtype}")
        if temperature.shape != sampled_ids.shape or temperature.device != hidden.device:
            raise ValueError(
                f"{_NAME}: temperature must be a number or [T] with T = {hidden.shape[0]} on"
                f" {hidden.device}, got {tuple(temperature.shape)} on {temperature.device}"
            )
        if temperature.requires_grad:
            raise ValueError(f"{_NAME}: temperature gets no gradient; detach it")
        temperatures, temperature = temperature.contiguous(), 1.0
    else:
        temperature, temperatures = check_temperature(_NAME, temperature), None
    if softcap is not None:
        softcap = _check_softcap(softcap)
    num_shards = 1 if group is None else dist.get_world_size(group)
    if num_shards < 1:
        raise ValueError(f"{_NAME}: this rank is not in group")
    vocab_size = num_rows * num_shards if vocab_size is None else vocab_size
    if vocab_start is None:
        vocab_start = 0 if num_shards == 1 else num_rows * dist.get_rank(group)
    for field, value, least in (("vocab_size", vocab_size, 1), ("vocab_start", vocab_start, 0)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{_NAME}: {field} must be an int, got {type(value).__name__}")
        if not least <= value < 2**31:
            raise ValueError(f"{_NAME}: {field} must be from {least} to 2**31 - 1, got {value}")
    if num_shards == 1 and (vocab_start > 0 or vocab_size > num_rows):
        raise ValueError(
            f"{_NAME}: vocab_size={vocab_size} and vocab_start={vocab_start}, but weight has ids 0"
            f" to {num_rows - 1} and no group holds others"
        )
    if not isinstance(reduce_hidden_grad, bool):
        given = type(reduce_hidden_grad).__name__
        raise TypeError(f"{_NAME}: reduce_hidden_grad must be a bool, got {given}")
    if main_grad is not None:
        _check_main_grad(main_grad, weight)
    head = _Head(
        temperature=temperature,
        softcap=softcap,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        main_grad=main_grad,
        group=group if num_shards > 1 else None,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    arguments = _rows(hidden), _rows(weight), bias, support_ids, sampled_ids, temperatures, head
    if wants_gradients(hidden, weight, bias):
        return SupportScores(*_LmHeadSupportLogprobs.apply(*arguments))
    return _score(*arguments)[0]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _check_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, support_ids: Tensor, sampled_ids: Tensor
) -> int:
    for field, tensor in (
        ("hidden", hidden),
        ("weight", weight),
        ("support_ids", support_ids),
        ("sampled_ids", sampled_ids),
        ("bias", bias),
    ):
        if not isinstance(tensor, Tensor) and (tensor is not None or field != "bias"):
            raise TypeError(f"{_NAME}: {field} must be a tensor, got {type(tensor).__name__}")
    if hidden.dtype not in LOGITS_DTYPES:
        raise TypeError(f"{_NAME}: hidden has unsupported dtype {hidden.dtype}")
    for field, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"{_NAME}: {field} is {tensor.dtype}, hidden {hidden.dtype}")
    if support_ids.dtype not in SUPPORT_DTYPES:
        raise TypeError(f"{_NAME}: support_ids must be int32 or int64, got {support_ids.dtype}")
    if sampled_ids.dtype != torch.int64:
        raise TypeError(f"{_NAME}: sampled_ids must be int64, got {sampled_ids.dtype}")
    if hidden.dim() != 2 or hidden.shape[1] == 0:
        raise ValueError(f"{_NAME}: hidden must be [T, H] with H > 0, got {tuple(hidden.shape)}")
    num_tokens, hidden_size = hidden.shape
    if weight.dim() != 2 or weight.shape[1] != hidden_size or weight.shape[0] == 0:
        raise ValueError(
            f"{_NAME}: weight must be [V, H] with V > 0 and H = {hidden_size}, got"
            f" {tuple(weight.shape)}"
        )
    expected = (
        ("bias", bias, (weight.shape[0],), "[V]"),
        ("sampled_ids", sampled_ids, (num_tokens,), "[T]"),
    )
    for field, tensor, shape, words in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{_NAME}: {field} must be {words} = {list(shape)}, got {list(tensor.shape)}"
            )
    if support_ids.dim() != 2 or support_ids.shape[0] != num_tokens:
        raise ValueError(
            f"{_NAME}: support_ids must be [T, C] with T = {num_tokens}, got"
            f" {tuple(support_ids.shape)}"
        )
    if support_ids.numel() >= 2**31:
        raise ValueError(f"{_NAME}: {support_ids.numel()} entries of support_ids do not fit int32")
    for field, tensor in (
        ("weight", weight),
        ("bias", bias),
        ("support_ids", support_ids),
        ("sampled_ids", sampled_ids),
    ):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{_NAME}: {field} on {tensor.device}, hidden on {hidden.device}")
    return weight.shape[0]


def _check_softcap(softcap: float) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"{_NAME}: softcap must be a number, got {type(softcap).__name__}")
    if not 0 < softcap < float("inf"):
        raise ValueError(f"{_NAME}: softcap must be finite and > 0, got {softcap}")
    return float(softcap)


def _check_main_grad(main_grad: Tensor, weight: Tensor) -> None:
    if not isinstance(main_grad, Tensor):
        given = type(main_grad).__name__
        raise TypeError(f"{_NAME}: main_grad must be a tensor, got {given}")
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if main_grad.dtype != wide:
        raise TypeError(f"{_NAME}: main_grad must be {wide}, got {main_grad.dtype}")
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{_NAME}: main_grad must be {list(weight.shape)} on {weight.device} as weight, got"
            f" {list(main_grad.shape)} on {main_grad.device}"
        )
    if main_grad.stride(1) != 1 and main_grad.shape[1] > 1:
        raise ValueError(f"{_NAME}: main_grad must have rows of unit stride")
    if main_grad.requires_grad:
        raise ValueError(f"{_NAME}: main_grad must not require a gradient")
    if weight.requires_grad and not weight.is_leaf:
        raise ValueError(
            f"{_NAME}: main_grad is for a weight that is a leaf; what this one is made of would get"
            " no gradient"
        )
