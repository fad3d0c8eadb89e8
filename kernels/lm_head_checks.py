"""What scoring from hidden states and the LM head takes, checked before anything is computed.

``check_head`` serves ``lm_head_support_logprobs``, its ragged kin and ``full_vocabulary_logprobs``:
the same arguments mean the same in each, and an error begins with the function's name.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packhorse.kernels.lm_head_members import add_weight_gradient
from packhorse.kernels.members import wide_dtype
from packhorse.kernels.support import (
    LOGITS_DTYPES,
    as_operand,
    check_shards,
    check_temperature,
)


@dataclass(frozen=True, eq=False)
class Head:
    """What both passes need beside tensors of the tokens.

    Attributes:
        temperature: a number; 1 where there is one a token.
        softcap: or None.
        vocab_size: ids of the whole vocabulary.
        vocab_start: id of the first row of the weight.
        main_grad: or None.
        group: of the shards; None where there is one.
        reduce_hidden_grad: the gradient of the hidden states is summed over the group.
    """

    temperature: float
    softcap: float | None
    vocab_size: int
    vocab_start: int
    main_grad: Tensor | None
    group: Any
    reduce_hidden_grad: bool

    def operand(self, temperatures: Tensor | None, like: Tensor) -> tuple[float, Tensor | None]:
        """``temperature`` and ``temperatures`` of an operator."""
        if temperatures is not None:
            return 1.0, temperatures
        return as_operand(self.temperature, like)

    def weight_gradient(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the backward adds the weight's gradient, and what autograd is given of it."""
        if self.main_grad is not None:
            return self.main_grad, None
        dense = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return dense, dense

    def through_softcap(self, grads: Tensor, *capped: Tensor) -> Tensor:
        """Gradients before the soft cap, of those after it and the capped logits, if there are."""
        if self.softcap is None:
            return grads
        slope = 1 - (capped[0] / self.softcap) ** 2
        # of d tanh; an entry without a gradient keeps none, whatever its logit
        return torch.where(grads == 0, grads, grads * slope)

    def sum_pairs(
        self,
        grads: Tensor,
        hidden: Tensor,
        weight: Tensor,
        pairs: tuple[Tensor, Tensor],
        width: int,
        tokens: Tensor | None = None,
        *,
        wants_weight: bool,
        bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What autograd is given of the weight's and the bias's gradient: None where not asked for
        (``bias_dtype``) or added to ``main_grad``. Arguments of ``add_weight_gradient``."""
        grad_weight = grad_bias = None
        if wants_weight:
            out, grad_weight = self.weight_gradient(weight)
            add_weight_gradient(out, grads, hidden, *pairs, width, tokens)
        if bias_dtype is not None:
            sums = grads.new_zeros((weight.shape[0], 1))
            ones = hidden.new_ones((hidden.shape[0], 1))
            add_weight_gradient(sums, grads, ones, *pairs, width, tokens)
            grad_bias = sums.squeeze(1).to(bias_dtype)
        return grad_weight, grad_bias

    def sum_over_group(self, grad_hidden: Tensor) -> Tensor:
        """The gradient of the hidden states, which each shard has a share of."""
        if self.group is not None and self.reduce_hidden_grad:
            dist.all_reduce(grad_hidden, group=self.group)
        return grad_hidden


def check_head(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    sampled_ids: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_size: int | None,
    vocab_start: int | None,
    main_grad: Tensor | None,
    group: Any,
    reduce_hidden_grad: bool,
) -> tuple[Head, Tensor | None]:
    """The head, and temperatures [T] where they are given one a token.

    Raises:
        TypeError, ValueError: as of ``lm_head_support_logprobs``, beginning with ``name``.
    """
    num_rows = _check_tensors(name, hidden, weight, bias, sampled_ids)
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures = _check_temperatures(name, temperature, hidden)
        temperature = 1.0
    else:
        temperature = check_temperature(name, temperature)
    if softcap is not None:
        softcap = check_softcap(name, softcap)
    num_shards = 1 if group is None else dist.get_world_size(group)
    if num_shards < 1:
        raise ValueError(f"{name}: this rank is not in group")
    are_even = vocab_start is None
    vocab_size = num_rows * num_shards if vocab_size is None else vocab_size
    if vocab_start is None:
        vocab_start = 0 if num_shards == 1 else num_rows * dist.get_rank(group)
    for field, value, least in (("vocab_size", vocab_size, 1), ("vocab_start", vocab_start, 0)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{name}: {field} must be an int, got {type(value).__name__}")
        if not least <= value < 2**31:
            raise ValueError(f"{name}: {field} must be from {least} to 2**31 - 1, got {value}")
    if num_shards == 1 and (vocab_start > 0 or vocab_size > num_rows):
        raise ValueError(
            f"{name}: vocab_size={vocab_size} and vocab_start={vocab_start}, but weight has ids 0"
            f" to {num_rows - 1} and no group holds others"
        )
    if num_shards > 1 and are_even:
        check_shards(name, vocab_size, num_shards, num_rows, "rows")
    if not isinstance(reduce_hidden_grad, bool):
        given = type(reduce_hidden_grad).__name__
        raise TypeError(f"{name}: reduce_hidden_grad must be a bool, got {given}")
    if main_grad is not None:
        check_main_grad(name, main_grad, weight)
    head = Head(
        temperature=temperature,
        softcap=softcap,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        main_grad=main_grad,
        group=group if num_shards > 1 else None,
        reduce_hidden_grad=reduce_hidden_grad,
    )
    return head, temperatures


def unit_rows(x: Tensor) -> Tensor:
    """[R, H] whose rows have unit stride."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _check_temperatures(name: str, temperature: Tensor, hidden: Tensor) -> Tensor:
    wide = wide_dtype(hidden)
    if temperature.dtype != wide:
        raise TypeError(f"{name}: temperature must be {wide}, got {temperature.dtype}")
    if temperature.shape != hidden.shape[:1] or temperature.device != hidden.device:
        raise ValueError(
            f"{name}: temperature must be a number or [T] with T = {hidden.shape[0]} on"
            f" {hidden.device}, got {tuple(temperature.shape)} on {temperature.device}"
        )
    if temperature.requires_grad:
        raise ValueError(f"{name}: temperature gets no gradient; detach it")
    return temperature.contiguous()


def _check_tensors(
    name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, sampled_ids: Tensor
) -> int:
    for field, tensor in (
        ("hidden", hidden),
        ("weight", weight),
        ("sampled_ids", sampled_ids),
        ("bias", bias),
    ):
        if not isinstance(tensor, Tensor) and (tensor is not None or field != "bias"):
            raise TypeError(f"{name}: {field} must be a tensor, got {type(tensor).__name__}")
    if hidden.dtype not in LOGITS_DTYPES:
        raise TypeError(f"{name}: hidden has unsupported dtype {hidden.dtype}")
    for field, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"{name}: {field} is {tensor.dtype}, hidden {hidden.dtype}")
    if sampled_ids.dtype != torch.int64:
        raise TypeError(f"{name}: sampled_ids must be int64, got {sampled_ids.dtype}")
    if hidden.dim() != 2 or hidden.shape[1] == 0:
        raise ValueError(f"{name}: hidden must be [T, H] with H > 0, got {tuple(hidden.shape)}")
    num_tokens, hidden_size = hidden.shape
    if weight.dim() != 2 or weight.shape[1] != hidden_size or weight.shape[0] == 0:
        raise ValueError(
            f"{name}: weight must be [V, H] with V > 0 and H = {hidden_size}, got"
            f" {tuple(weight.shape)}"
        )
    expected = (
        ("bias", bias, (weight.shape[0],), "[V]"),
        ("sampled_ids", sampled_ids, (num_tokens,), "[T]"),
    )
    for field, tensor, shape, words in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: {field} must be {words} = {list(shape)}, got {list(tensor.shape)}"
            )
    for field, tensor in (("weight", weight), ("bias", bias), ("sampled_ids", sampled_ids)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: {field} on {tensor.device}, hidden on {hidden.device}")
    return weight.shape[0]


def check_softcap(name: str, softcap: float) -> float:
    """A finite number > 0, as a float."""
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"{name}: softcap must be a number, got {type(softcap).__name__}")
    if not 0 < softcap < float("inf"):
        raise ValueError(f"{name}: softcap must be finite and > 0, got {softcap}")
    return float(softcap)


def check_main_grad(name: str, main_grad: Tensor, weight: Tensor) -> None:
    """Float32 (float64) rows of unit stride beside a weight that is a leaf."""
    if not isinstance(main_grad, Tensor):
        given = type(main_grad).__name__
        raise TypeError(f"{name}: main_grad must be a tensor, got {given}")
    wide = wide_dtype(weight)
    if main_grad.dtype != wide:
        raise TypeError(f"{name}: main_grad must be {wide}, got {main_grad.dtype}")
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{name}: main_grad must be {list(weight.shape)} on {weight.device} as weight, got"
            f" {list(main_grad.shape)} on {main_grad.device}"
        )
    if main_grad.stride(1) != 1 and main_grad.shape[1] > 1:
        raise ValueError(f"{name}: main_grad must have rows of unit stride")
    if main_grad.requires_grad:
        raise ValueError(f"{name}: main_grad must not require a gradient")
    if weight.requires_grad and not weight.is_leaf:
        raise ValueError(
            f"{name}: main_grad is for a weight that is a leaf; what this one is made of would get"
            " no gradient"
        )
