"""Count only real tokens for the expert bias: a shim on ``TopKRouter._apply_expert_bias``.

    local_tokens_per_expert += (routing_map & ~padding_mask[:, None]).sum(0)

In every release from 0.16 to 0.19.2 the method combines a [T, E] map with a [T] mask, which raises,
or masks whole experts where T equals E; and 0.16 and 0.17 do not hand the model's mask to layers
that full or block recompute leaves out, nor to MTP heads. The shim masks the map first and hands
the original no mask, which is right on each of them. Inside a replay schedule it takes the mask of
the call at hand from the session's object on that router.

``padding_mask`` is True for padding, whatever Megatron's docstrings say.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.replay.targets import RouterTargets

_METHOD = "_apply_expert_bias"


class _Shim:
    """One layer over the method that was there; passes everything on once it is undone."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self.installs = 0

        def _apply_expert_bias(
            router: Any, routing_map: Tensor, padding_mask: Tensor | None = None
        ) -> None:
            if self.installs:
                routing_map = _without_padding(router, routing_map, padding_mask)
                padding_mask = None
            original(router, routing_map, padding_mask=padding_mask)

        self.method = _apply_expert_bias
        vars(self.method)["packhorse_shim"] = self


@ranged
def install_expert_bias_shim() -> Callable[[], None]:
    """Put the shim on ``TopKRouter`` and return the function that takes it off.

    Installs may overlap: the shim stays until each was undone. Undoing twice does nothing. A method
    that somebody put over the shim meanwhile is left alone, with an inert shim under it.

    Raises:
        ValueError: this Megatron-core's router has no such method (before 0.16).
    """
    from megatron.core.transformer.moe.router import TopKRouter

    method = vars(TopKRouter).get(_METHOD)
    if method is None:
        raise ValueError(
            "install_expert_bias_shim: this Megatron-core's TopKRouter has no _apply_expert_bias;"
            " 0.16.1 is the first that has"
        )
    shim = getattr(method, "packhorse_shim", None)
    if shim is None:
        shim = _Shim(method)
        setattr(TopKRouter, _METHOD, shim.method)
    shim.installs += 1
    undone = False

    def undo() -> None:
        nonlocal undone
        if undone:
            return
        undone = True
        shim.installs -= 1
        if not shim.installs and vars(TopKRouter)[_METHOD] is shim.method:
            setattr(TopKRouter, _METHOD, shim.original)

    return undo


def expert_bias_needs_shim() -> bool:
    """Whether this Megatron-core miscounts a masked map by itself. Asks the method, not a version.

    A replay schedule installs the shim in any case: the mask of the call at hand does not reach
    every router of the older releases.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    method = vars(TopKRouter).get(_METHOD)
    while hasattr(method, "packhorse_shim"):
        method = method.packhorse_shim.original
    if method is None:
        return True
    return not all(_counts_right(method, num_tokens, 4) for num_tokens in (3, 4))


def _counts_right(method: Callable[..., None], num_tokens: int, num_experts: int) -> bool:
    counts = torch.zeros(num_experts)
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=counts)
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[-1] = True
    routing_map = torch.ones(num_tokens, num_experts, dtype=torch.bool)
    # force_eager: the method is wrapped in torch.compile, which costs seconds
    with torch.compiler.set_stance("force_eager"), torch.enable_grad():
        try:
            method(router, routing_map, padding_mask=mask)
        except Exception:  # whatever it is: the shim never hands the original a mask
            return False
    return bool((router.local_tokens_per_expert == num_tokens - 1).all())


def _without_padding(router: Any, routing_map: Tensor, padding_mask: Tensor | None) -> Tensor:
    replay = getattr(router, "router_replay", None)
    if isinstance(replay, RouterTargets) and replay.answer is not None:
        padding_mask = replay.answer.padding_mask
    if padding_mask is None:
        return routing_map
    if padding_mask.numel() != routing_map.shape[0]:
        raise ValueError(
            f"expert-bias shim: a padding mask of {padding_mask.numel()} tokens for a routing map"
            f" of {routing_map.shape[0]}"
        )
    return routing_map & ~padding_mask.reshape(-1, 1).bool()
