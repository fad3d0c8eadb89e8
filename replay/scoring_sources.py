"""What one microbatch is scored from: the logits of a model, or the hidden states before its head.

Both answer the same two questions for rows in the layout's order, so that ``score_microbatch`` does
not know which it has: the scores over supports, and over the whole vocabulary.

Hidden states of tensor-parallel ranks are treated as Megatron's output layer treats them: those of
a sequence-parallel rank are gathered and their gradients reduce-scattered, the others' gradients
summed over the ranks, once for all that was scored from them.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.lm_head_checks import check_head
from packhorse.kernels.lm_head_full import full_vocabulary_logprobs
from packhorse.kernels.lm_head_ragged import lm_head_ragged_support_logprobs
from packhorse.kernels.rows import gather_rows
from packhorse.kernels.support import (
    SupportScores,
    check_vocab_size,
    support_logprobs,
)
from packhorse.kernels.support_full import full_scores
from packhorse.kernels.support_ragged import ragged_support_logprobs
from packhorse.packed.host import without_waiting
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout

_NAME: Final = "score_microbatch"


@dataclass(frozen=True, eq=False)
class LmHead:
    """The LM head of a model, given to ``score_microbatch`` beside hidden states.

    Attributes:
        weight: [V, H]: its weight or the tied embedding, or this rank's shard of it. Of a frozen
            model: without ``requires_grad``, or under ``no_grad``.
        bias: [V], or None.
        vocab_start: id of the weight's first row; by default shards of V rows in the ranks' order.
        group: ranks that hold the shards: the tensor-parallel group.
        main_grad: [V, H] float32 (float64) buffer that the backward adds the weight's gradient to,
            as Megatron's ``weight.main_grad``; None: autograd gets a dense gradient.
        softcap: logits are ``softcap * tanh(logits / softcap)``; None: as they are.
        sequence_parallel: the hidden states are this rank's 1/TP of the tokens.
    """

    weight: Tensor
    bias: Tensor | None = None
    vocab_start: int | None = None
    group: Any = None
    main_grad: Tensor | None = None
    softcap: float | None = None
    sequence_parallel: bool = False


class Source(Protocol):
    """Scores rows of the layout's T slots."""

    device: torch.device

    def over_support(
        self, support: PackedTensor | PackedRagged, row_ids: Tensor, sampled_ids: Tensor
    ) -> SupportScores:
        """[T]: slot t over row ``row_ids[t]`` of the support; -1: it has none."""
        ...

    def over_vocabulary(
        self, sampled_ids: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropy of all slots, or of those in ``slots`` [M] (-1: none); a negative
        sampled id is no target."""
        ...


class Logits:
    """[T, V] logits in the layout's order."""

    def __init__(
        self, logits: Tensor, layout: TokenLayout, temperature: float, vocab_size: int | None
    ) -> None:
        if logits.dim() == 3:
            logits = layout.from_model(logits)
        if logits.dim() != 2 or logits.shape[0] != layout.num_tokens:
            raise ValueError(
                f"{_NAME}: logits must be [{layout.num_tokens}, V] or as the model returns them,"
                f" got {list(logits.shape)}"
            )
        check_vocab_size(_NAME, logits, vocab_size)
        self.logits, self.device = logits, logits.device
        self._options: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab_size}

    def over_support(
        self, support: PackedTensor | PackedRagged, row_ids: Tensor, sampled_ids: Tensor
    ) -> SupportScores:
        if isinstance(support, PackedRagged):
            return ragged_support_logprobs(
                self.logits, *_ragged_rows(support, row_ids), row_ids, sampled_ids,
                widths=support.widths, **self._options,
            )  # fmt: skip
        rows = without_waiting(support.values, row_ids.device)
        return support_logprobs(self.logits, rows, sampled_ids, row_ids=row_ids, **self._options)

    def over_vocabulary(
        self, sampled_ids: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits if slots is None else gather_rows(self.logits, slots)
        return full_scores(logits, sampled_ids, **self._options)


class HiddenStates:
    """[T, H] hidden states in the layout's order, gathered where they are sequence-parallel."""

    def __init__(
        self,
        hidden: Tensor,
        layout: TokenLayout,
        head: LmHead,
        temperature: float,
        vocab_size: int | None,
    ) -> None:
        parts = 1
        if head.sequence_parallel:
            if head.group is None:
                raise ValueError(f"{_NAME}: lm_head is sequence_parallel and has no group")
            parts = dist.get_world_size(head.group)
        num_rows, left = divmod(layout.num_tokens, max(parts, 1))
        if left:
            raise ValueError(
                f"{_NAME}: {layout.num_tokens} tokens do not divide by {parts} sequence-parallel"
                " ranks"
            )
        hidden = _rows_of_model(hidden, layout, num_rows)
        self._options: dict[str, Any] = {
            "bias": head.bias,
            "temperature": temperature,
            "softcap": head.softcap,
            "vocab_size": vocab_size,
            "vocab_start": head.vocab_start,
            "main_grad": head.main_grad,
            "group": head.group,
            "reduce_hidden_grad": head.group is None,
        }
        targets = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
        check_head(_NAME, hidden, head.weight, targets, **self._options)
        if parts > 1:
            hidden = _GatherSequence.apply(hidden, head.group)
        elif head.group is not None and dist.get_world_size(head.group) > 1:
            hidden = _SumGradients.apply(hidden, head.group)
        self.hidden, self.weight, self.device = hidden, head.weight, hidden.device

    def over_support(
        self, support: PackedTensor | PackedRagged, row_ids: Tensor, sampled_ids: Tensor
    ) -> SupportScores:
        if isinstance(support, PackedRagged):
            return lm_head_ragged_support_logprobs(
                self.hidden, self.weight, *_ragged_rows(support, row_ids), row_ids, sampled_ids,
                widths=support.widths, **self._options,
            )  # fmt: skip
        rows = without_waiting(support.values, row_ids.device)
        return lm_head_support_logprobs(
            self.hidden, self.weight, rows, sampled_ids, row_ids=row_ids, **self._options
        )

    def over_vocabulary(
        self, sampled_ids: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden = self.hidden if slots is None else gather_rows(self.hidden, slots)
        return full_vocabulary_logprobs(hidden, self.weight, sampled_ids, **self._options)


def _ragged_rows(support: PackedRagged, row_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Its ids and the offsets of its rows, on the device of ``row_ids``."""
    ids = without_waiting(support.values, row_ids.device)
    return ids.contiguous(), without_waiting(support.row_offsets, row_ids.device)


def _rows_of_model(hidden: Tensor, layout: TokenLayout, num_rows: int) -> Tensor:
    """[num_rows, H] of it, or of what the model returns in place of logits: batch first."""
    batch = layout.num_sequences if layout.format == "bshd" else 1
    if hidden.dim() == 3 and tuple(hidden.shape[:2]) == (batch, num_rows // max(batch, 1)):
        return hidden.transpose(0, 1).flatten(0, 1)
    if hidden.dim() == 2 and hidden.shape[0] == num_rows:
        return hidden
    raise ValueError(
        f"{_NAME}: hidden states must be [{num_rows}, H] in the layout's order, or"
        f" [{batch}, {num_rows // max(batch, 1)}, H], got {list(hidden.shape)}"
    )


class _GatherSequence(torch.autograd.Function):
    """[T / TP, H] -> [T, H]; each rank has a share of every row's gradient: reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = hidden.new_empty((dist.get_world_size(group) * hidden.shape[0], *hidden.shape[1:]))
        dist.all_gather_into_tensor(out, hidden.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        num_rows = grad.shape[0] // dist.get_world_size(ctx.group)
        out = grad.new_empty((num_rows, *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class _SumGradients(torch.autograd.Function):
    """The identity; each rank has a share of every row's gradient: summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
