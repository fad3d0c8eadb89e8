"""Router losses under replay: of the routes that are taken, over real tokens.

    aux_loss = coeff * E / (K * N**2) * sum_e (tokens that use e) * (sum over tokens of score_e)
    z_loss   = coeff * mean over tokens of logsumexp(logits)**2

Megatron's router chooses a top-k of its own for the first (from the scores without expert bias and
groups), whatever was replayed; the loss then balances routes that nobody took. For the length of a
schedule ``install_loss_shim`` stands over the methods of one router:

    routing                hands on the session's mask of this call: 0.16 and 0.17 drop the model's
                           in layers that full or block recompute leaves out and at MTP heads
    _apply_aux_loss        (per micro-batch), _apply_seq_aux_loss (per sequence) and
    _apply_global_aux_loss (running) are handed the map of the replayed routes

A row that runs live keeps Megatron's own top-k, and padding counts nowhere; so a schedule without
routes has Megatron's own losses. Everything else is Megatron's: the formula, the sums over its
TP, CP and DP groups, the scale, the logging. Under "seq_aux_loss" a packed ("thd") batch is one
sequence, as it is without replay. Scores are live, so the gradient is too; both losses are
computed where gradients are on, that is in a recompute and not in the first pass it repeats.

A micro-batch without any real token has losses and gradients of 0: Megatron's formula would divide
0 by 0 tokens.

Sizes: T token slots of the rank's routers, K experts a token, E experts, N real tokens of the
group. Sources: ``TopKRouter`` and ``moe_utils.py`` of megatron-core 0.16.1 to 0.19.2.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from packhorse.replay.targets import RouterTargets

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_METHODS = tuple(f"_apply_{kind}" for kind in AUX_LOSSES)


def has_aux_loss(router: Any) -> bool:
    """Whether the router computes a load-balancing loss."""
    return any(router.get_aux_loss_coeff(kind) > 0 for kind in AUX_LOSSES)


def has_losses(router: Any) -> bool:
    """Whether the router computes any loss of its own."""
    return router.config.moe_z_loss_coeff is not None or has_aux_loss(router)


def can_replay_aux_loss(router: Any) -> bool:
    """Whether the loss of this Megatron-core sees replayed routes, or can be made to."""
    return not aux_loss_needs_shim(router.__class__) or all(hasattr(router, m) for m in _METHODS)


def install_loss_shim(
    router: Any, target: RouterTargets, *, live_aux_loss: bool
) -> Callable[[], None]:
    """Stand over ``router``'s methods and return the function that takes everything off.

    Args:
        router: a ``TopKRouter`` that ``has_losses``.
        target: the object on its ``router_replay``.
        live_aux_loss: leave the load-balancing loss to Megatron's own top-k.
    """
    placed = {"routing": _with_mask_of_the_call(router, target)}
    if has_aux_loss(router) and not live_aux_loss and aux_loss_needs_shim(router.__class__):
        placed |= {name: _with_replayed_map(router, name, target) for name in _METHODS}
    elif has_aux_loss(router):
        placed |= {name: _without_division_by_zero(router, name, target) for name in _METHODS}
    own = vars(router)
    before = {name: own[name] for name in placed if name in own}
    own.update(placed)  # an instance's attribute hides its class's method

    def undo() -> None:
        for name, method in placed.items():
            if own.get(name) is method:
                del own[name]
        own.update(before)

    return undo


@functools.cache
def aux_loss_needs_shim(router_class: Any) -> bool:
    """Whether this ``TopKRouter`` balances its own top-k under replay. Asks ``routing`` itself."""
    probe = _Probe()
    with torch.enable_grad():
        try:
            router_class.routing(probe, _Probe.logits)
        except Exception:  # whatever it is: the shim is right in any case
            return True
    return probe.seen is None or probe.seen.long().argmax(-1).tolist() != [_Probe.replayed] * 2


class _Probe:
    """As much of a router as ``routing`` reads; the routes that it replays are no top-k."""

    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]] * 2)  # [sequence, batch, E]
    replayed = 3

    def __init__(self) -> None:
        self.config = _Settings(num_moe_experts=4, moe_router_pre_softmax=True)
        self.topk, self.score_function, self.routing_type = 1, "softmax", "aux_loss"
        self.training, self.router_replay, self.expert_bias = True, self, None
        self.seen: Tensor | None = None

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        ids = torch.full((scores.shape[0], 1), self.replayed)
        return scores.gather(1, ids), ids

    def is_aux_loss_enabled(self) -> bool:
        return True

    def apply_z_loss(self, logits: Tensor, **_: Any) -> Tensor:
        return logits

    def _apply_aux_loss(self, probs: Tensor, _: Tensor, routing_map: Tensor, **__: Any) -> Tensor:
        self.seen = routing_map
        return probs

    def _apply_seq_aux_loss(self, probs: Tensor, *_: Any, **__: Any) -> Tensor:
        return probs

    def _apply_global_aux_loss(self, probs: Tensor, *_: Any, **__: Any) -> Tensor:
        return probs

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None: ...


class _Settings(SimpleNamespace):
    def __getattr__(self, _: str) -> None:  # whatever else a version reads is off
        return None


# --- what stands over the methods -----------------------------------------------------------------


def _method_under(router: Any, name: str) -> Callable[..., Any]:
    """The router's method now, found at the call: its class may be patched meanwhile."""
    mine = vars(router).get(name)
    if mine is not None:
        return mine
    return lambda *args, **options: getattr(type(router), name)(router, *args, **options)


def _with_mask_of_the_call(router: Any, target: RouterTargets) -> Callable[..., Any]:
    under = _method_under(router, "routing")

    def routing(logits: Tensor, padding_mask: Tensor | None = None, **options: Any) -> Any:
        mask = target.next_padding_mask()
        if mask is not None and mask.numel() == logits[..., 0].numel():  # else refused later
            padding_mask = mask
        return under(logits, padding_mask=padding_mask, **options)

    return routing


def _with_replayed_map(router: Any, name: str, target: RouterTargets) -> Callable[..., Any]:
    under = _without_division_by_zero(router, name, target)

    def apply(
        probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, **options: Any
    ) -> Any:
        routing_map = _replayed_map(routing_map, target)
        return under(probs, scores, routing_map, *args, **options)

    return apply


def _without_division_by_zero(router: Any, name: str, target: RouterTargets) -> Callable[..., Any]:
    under = _method_under(router, name)

    def apply(
        probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, **options: Any
    ) -> Any:
        if target.answer is not None and not target.answer.has_rows:
            options["with_padding_mask"] = False  # count slots; map and scores are 0 all over
        return under(probs, scores, routing_map, *args, **options)

    return apply


def _replayed_map(routing_map: Tensor, target: RouterTargets) -> Tensor:
    """[T, E] bool: the replayed experts, Megatron's own in live rows, none in padding."""
    answer = target.answer
    if answer is None or answer.topk_ids is None or not answer.replays:
        return routing_map
    replayed = torch.zeros_like(routing_map).scatter(1, answer.topk_ids.long(), True)
    if answer.live_rows is not None:
        replayed = torch.where(answer.live_rows[:, None], routing_map, replayed)
    return replayed & ~answer.padding_mask[:, None]
