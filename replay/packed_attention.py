"""Causal attention over packed sequences ("thd") in plain torch, for Megatron's local layers.

    out[t] = softmax_s(q[t] k[s] / sqrt(D)) v[s]      over s <= t of t's own sequence

Megatron's own ``DotProductAttention`` refuses packed sequences; its other choice is Transformer
Engine. This one holds a [T, T] mask, so it is meant for checks and demonstrations, not for training
at length. One context-parallel rank.

Sizes: T tokens of the slab, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Stands for ``DotProductAttention``: same constructor, same call, "thd" and "sbhd"."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(
                "PackedAttention: one context-parallel rank only, got"
                f" context_parallel_size={config.context_parallel_size}"
            )
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, heads, D], or [S, B, heads, D] without packed_seq_params
        key: Tensor,  # the same with the key-value heads
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[T, heads * D], or [S, B, heads * D]. ``attention_mask`` is not looked at: causal."""
        packed = packed_seq_params is not None
        if packed and query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        num_tokens, batch = query.shape[:2]
        token = torch.arange(num_tokens, device=query.device)
        allowed = token[None, :] <= token[:, None]
        if packed:
            ends = packed_seq_params.cu_seqlens_q_padded
            ends = (packed_seq_params.cu_seqlens_q if ends is None else ends)[1:]
            sequence = torch.bucketize(token, ends.to(token.dtype), right=True)
            allowed = allowed & (sequence[None, :] == sequence[:, None])
        q, k, v = (
            x.repeat_interleave(query.shape[2] // x.shape[2], 2).permute(1, 2, 0, 3)
            for x in (query, key, value)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, scale=self.scale
        )
        out = out.permute(2, 0, 1, 3).reshape(num_tokens, batch, -1)
        return out.squeeze(1) if packed else out
