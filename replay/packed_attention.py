"""Causal attention over packed sequences and context-parallel ranks, for Megatron's local layers.

    out[t] = softmax_s(q[t] k[s] / sqrt(D)) v[s]      over s <= t of t's own sequence, on any rank

Megatron's own ``DotProductAttention`` refuses packed sequences ("thd") and context parallelism; its
other choice is Transformer Engine. Each of R ranks holds chunks r and 2R-1-r of every padded
sequence. Keys and values of all ranks are gathered and masked by their place in the whole batch, so
the result is one rank's to rounding. The mask is [T / R, T] and the offsets are read back: for
checks and demonstrations in plain torch, not for training at length.

Sizes: T tokens of the whole slab (or S of the rectangle), R ranks, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Stands for ``DotProductAttention``: same constructor, same call, "thd" and "sbhd"."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__()
        self.group = None
        if config.context_parallel_size > 1:
            from megatron.core import parallel_state

            self.group = parallel_state.get_context_parallel_group()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,  # [T / R, heads, D], or [S / R, B, heads, D] without packed_seq_params
        key: Tensor,  # the same with the key-value heads
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[T / R, heads * D], or [S / R, B, heads * D]. ``attention_mask`` is not looked at."""
        packed = packed_seq_params is not None
        if packed and query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        num_tokens, batch = query.shape[:2]
        size, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        bounds = torch.tensor([0, num_tokens * size])
        if packed:
            given = packed_seq_params.cu_seqlens_q_padded
            bounds = (packed_seq_params.cu_seqlens_q if given is None else given).long().cpu()
            if bounds[-1] < num_tokens * size:  # a pad of the whole slab
                bounds = torch.cat([bounds, bounds.new_tensor([num_tokens * size])])
        places = torch.cat([zigzag_places(bounds, size, r) for r in range(size)])
        mine = places[rank * num_tokens :][:num_tokens]
        sequence = torch.bucketize(torch.arange(int(bounds[-1])), bounds[1:], right=True)
        allowed = (sequence[places] == sequence[mine][:, None]) & (places <= mine[:, None])
        if self.group is not None:
            key, value = (_Gather.apply(x, self.group) for x in (key, value))
        q, k, v = (
            x.repeat_interleave(query.shape[2] // x.shape[2], 2).permute(1, 2, 0, 3)
            for x in (query, key, value)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed.to(query.device), scale=self.scale
        )
        out = out.permute(2, 0, 1, 3).reshape(num_tokens, batch, -1)
        return out.squeeze(1) if packed else out


def zigzag_places(bounds: Tensor, size: int, rank: int) -> Tensor:
    """[T / R] int64 places in the whole batch of a rank's slots.

    Args:
        bounds: [B + 1] int64 offsets of the padded sequences on the host. With several ranks 2R
            divides their lengths.
        size, rank: R and r: chunks r and 2R-1-r of each sequence.
    """
    if size == 1:
        return torch.arange(int(bounds[-1]))
    widths = bounds.diff() // (2 * size)
    runs = [
        torch.arange(int(begin + chunk * width), int(begin + (chunk + 1) * width))
        for begin, width in zip(bounds, widths, strict=False)
        for chunk in (rank, 2 * size - 1 - rank)
    ]
    return torch.cat(runs)


class _Gather(torch.autograd.Function):
    """[T / R, ...] -> [T, ...]; the backward sums the ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.num_tokens = group, values.shape[0]
        parts = [torch.empty_like(values) for _ in range(group.size())]
        torch.distributed.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank() * ctx.num_tokens :][: ctx.num_tokens], None
