"""What Megatron's routers were asked and what they answered, call by call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.distributed.models import all_routers_of


@dataclass
class Call:
    """One call of one router.

    Attributes:
        layer: 0-based and global; of a head minus its depth.
        rows: sorted experts of each row of the routing map that Megatron's router returned.
        mask: the padding mask that the router was given, flat, or None.
    """

    chunk: int
    layer: int
    recompute: bool
    rows: list[list[int]]
    mask: list[bool] | None


class RouteLog:
    """Calls of Megatron's routers, in their order."""

    def __init__(self, chunks: list[Any]) -> None:
        self.calls: list[Call] = []
        self._where = {
            id(router): (index, layer)
            for index, chunk in enumerate(chunks)
            for layer, router in all_routers_of(chunk).items()
        }

    def __enter__(self) -> RouteLog:
        from megatron.core.transformer.moe.router import TopKRouter

        self._original = TopKRouter.routing
        log = self

        def routing(router: Any, logits: Any, padding_mask: Any = None, **options: Any) -> Any:
            probs, routing_map = log._original(router, logits, padding_mask, **options)
            rows = [row.nonzero().flatten().tolist() for row in routing_map]
            recompute = torch._C._current_graph_task_id() != -1
            mask = None if padding_mask is None else padding_mask.flatten().tolist()
            log.calls.append(Call(*log._where[id(router)], recompute, rows, mask))
            return probs, routing_map

        TopKRouter.routing = routing
        return self

    def __exit__(self, *exc: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        TopKRouter.routing = self._original
