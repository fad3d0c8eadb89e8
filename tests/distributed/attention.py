"""Causal attention of the tests' own, over packed sequences and over context-parallel ranks.

Megatron's ``DotProductAttention`` refuses both, and Transformer Engine is not installed. Keys and
values of all context-parallel ranks are gathered, and masked by their place in the whole batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0; the backward sums the ranks' gradients of the own part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.count = group, values.shape[0]
        parts = [torch.empty_like(values) for _ in range(group.size())]
        torch.distributed.all_gather(parts, values.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        begin = ctx.group.rank() * ctx.count
        return gradient[begin : begin + ctx.count], None


def _held(bounds: list[int], cp_size: int, cp_rank: int, order: str) -> list[int]:
    """Places in the whole batch that a rank holds of each sequence: chunks r and 2R-1-r of 2R
    (zigzag), or chunk r of R (contiguous)."""
    chunks, count = [cp_rank, 2 * cp_size - 1 - cp_rank], 2 * cp_size
    if order == "contiguous":
        chunks, count = [cp_rank], cp_size
    places = []
    for begin, end in itertools.pairwise(bounds):
        width = (end - begin) // count
        for chunk in chunks:
            places += range(begin + chunk * width, begin + (chunk + 1) * width)
    return places


class GatheredAttention(torch.nn.Module):
    """Stands for ``DotProductAttention``; "thd" and "sbhd", zigzag over the CP group."""

    order = "zigzag"

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **options: Any) -> None:
        super().__init__()
        from megatron.core import parallel_state

        if pg_collection is None:
            self.group = parallel_state.get_context_parallel_group()
        else:
            self.group = pg_collection.cp
        self.scale = options.get("softmax_scale") or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        packed = packed_seq_params is not None
        if packed and query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        ranks, rank = self.group.size(), self.group.rank()
        bounds = [0, query.shape[0] * ranks]
        if packed:
            bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        held = [list(range(bounds[-1]))]
        if ranks > 1:
            held = [_held(bounds, ranks, r, self.order) for r in range(ranks)]
            key, value = (_GatherSequence.apply(x, self.group) for x in (key, value))
        mine = torch.tensor(held[rank])
        theirs = torch.tensor([place for places in held for place in places])
        owner = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
        allowed = (owner[mine][:, None] == owner[theirs]) & (theirs <= mine[:, None])
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed.to(q.device), scale=self.scale
        )
        out = out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
        return out.squeeze(1) if packed else out


class ContiguousAttention(GatheredAttention):
    order = "contiguous"


def use_gathered_attention(layer_specs: list[Any], order: str) -> None:
    attention = {"zigzag": GatheredAttention, "contiguous": ContiguousAttention}[order]
    for layer in layer_specs:
        layer.submodules.self_attention.submodules.core_attention = attention
