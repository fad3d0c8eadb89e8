"""Router losses under replay: of the routes that are taken, over real tokens.

    aux_loss = coeff * E / (K * N**2) * sum_e (tokens that use e) * (sum over tokens of score_e)
    z_loss   = coeff / N * sum over tokens of logsumexp(logits)**2

Megatron's router chooses a top-k of its own for the first (from the scores without expert bias and
groups), whatever was replayed; the loss then balances routes that nobody took. For the length of a
schedule ``install_loss_shim`` stands over the methods of one router:

    routing                hands on the session's mask of this call: 0.16 and 0.17 drop the model's
                           in layers that full or block recompute leaves out and at MTP heads
    _apply_aux_loss        (per micro-batch), _apply_seq_aux_loss (per sequence) and
    _apply_global_aux_loss (running) are handed the map of the replayed routes
    attach_and_log_load_balancing_loss, apply_z_loss
                           weigh the gradient of each rank's part, as below

A row that runs live keeps Megatron's own top-k, and padding counts nowhere; so a schedule without
routes has Megatron's own losses. Everything else is Megatron's: the formula, the sums over its
TP, CP and DP groups, the log (for the z-loss the mean of the ranks' means). Under "seq_aux_loss" a
packed ("thd") batch is one sequence, as it is without replay. Scores are live, so the gradient is
too; both losses are computed where gradients are on, that is in a recompute and not in the first
pass it repeats. A router that computes its loss elsewhere than in those methods is told by a probe
when a session is made, and refused.

Weights. Of micro-batch m on data-parallel rank d let N_md be the real tokens on its TP x CP ranks
and L_md one rank's loss of them all, which the parts of those ranks add up to. The optimizer sees

    calculate_per_token_loss=False    mean over m and d of grad L_md
    calculate_per_token_loss=True     sum over m and d of N_md grad L_md / tokens

where ``tokens`` is what Megatron divides by in ``finalize_model_grads``, the sum of the counts that
the trainer's loss function returns: of all real tokens, and the second is the mean weighted by
tokens, for one micro-batch grad L; of the trained ones, and it is larger by real / trained tokens.
The second follows from weight N_md on every part, since Megatron adds gradients up over ranks and
micro-batches, and then divides. Where nothing is padded N_md are the slots of the group, the weight
of Megatron 0.19 without a mask. With one it counts the group's tokens where it means the rank's and
multiplies by TP x CP again; up to 0.18 it lacks that factor, and for "seq_aux_loss" the batch size:
there the weight without a mask is too small. Here it is N_md on each.

"global_aux_loss" is one L_m of all ranks, and Megatron's mean over d makes grad L_m / DP of it. So
its weight is N_m / DP, with N_m the real tokens of all ranks.

Megatron's z-loss is the mean of the ranks' means. Each rank's gradient is multiplied by its real
tokens over the mean of its group's, or by (real tokens of the rank) * TP * CP per token.

A micro-batch without any real token has losses and gradients of 0: Megatron's formula would divide
0 by 0 tokens.

Sizes: T token slots of the rank's routers, K experts a token, E experts, N real tokens of the
group. Sources: ``TopKRouter`` and ``moe_utils.py`` of megatron-core 0.16.1 to 0.19.2.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packhorse.replay.targets import RouterTargets

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_ATTACH = "attach_and_log_load_balancing_loss"


def has_aux_loss(router: Any) -> bool:
    """Whether the router computes a load-balancing loss."""
    return any(router.get_aux_loss_coeff(kind) > 0 for kind in AUX_LOSSES)


def has_losses(router: Any) -> bool:
    """Whether the router computes any loss of its own."""
    return router.config.moe_z_loss_coeff is not None or has_aux_loss(router)


def can_replay_aux_loss(router: Any) -> bool:
    """Whether each loss that the router computes sees replayed routes, or can be made to."""
    maps = aux_loss_maps(type(router))
    return all(kind in maps for kind in AUX_LOSSES if router.get_aux_loss_coeff(kind) > 0)


def install_loss_shim(
    router: Any, target: RouterTargets, *, live_aux_loss: bool
) -> Callable[[], None]:
    """Stand over ``router``'s methods and return the function that takes everything off.

    A loss that is handed the replayed routes anyway is handed the same again.

    Args:
        router: a ``TopKRouter`` that ``has_losses``.
        target: the object on its ``router_replay``.
        live_aux_loss: leave the load-balancing loss to Megatron's own top-k.
    """
    call = _Call(router, target)
    placed = {"routing": call.routing()}
    if has_aux_loss(router):
        for name in (f"_apply_{kind}" for kind in AUX_LOSSES):
            if hasattr(router, name):
                placed[name] = call.apply_loss(name, replayed=not live_aux_loss)
        if router.calculate_per_token_loss and hasattr(router, _ATTACH):
            placed[_ATTACH] = call.attach()
    if router.config.moe_z_loss_coeff is not None and router.tp_cp_group.size() > 1:
        placed["apply_z_loss"] = call.apply_z_loss()
    own = vars(router)
    before = {name: own[name] for name in placed if name in own}
    own.update(placed)  # an instance's attribute hides its class's method

    def undo() -> None:
        for name, method in placed.items():
            if own.get(name) is method:
                del own[name]
        own.update(before)

    return undo


# --- what a router does by itself -----------------------------------------------------------------


def aux_loss_maps(router_class: Any) -> dict[str, str]:
    """Under replay each kind of loss is handed the "own" top-k of this ``TopKRouter`` class, or the
    "replayed" routes. A kind is missing that got neither: it may be computed somewhere else.
    """
    routing = tuple(vars(owner).get("routing") for owner in router_class.__mro__)
    return _probe(router_class, routing)


@functools.lru_cache(maxsize=16)
def _probe(router_class: Any, _: tuple[Any, ...]) -> dict[str, str]:
    """Asks ``routing`` itself; the functions it consists of are part of the key."""
    maps: dict[str, list[list[int]]] = {}
    # whatever it raises: what a loss was handed before counts, of the others nothing is known
    with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
        _make_router(router_class, maps).routing(_logits())
    known = {"own": [[1, 0, 0, 0]] * 2, "replayed": [[0, 0, 0, 1]] * 2}
    return {kind: name for kind in maps for name, rows in known.items() if maps[kind] == rows}


def _logits() -> Tensor:
    """[2, 1, 4], expert 0 the best; on the CPU, whatever the default device is."""
    row = [3.0, 2.0, 1.0, 0.0]
    return torch.tensor([[row], [row]], dtype=torch.float32, device="cpu")


def _make_router(router_class: Any, maps: dict[str, list[list[int]]]) -> Any:
    """An instance with as much of a router as ``routing`` reads; ``maps`` takes the maps."""

    def keep(kind: str) -> Callable[..., Tensor]:
        def apply(probs: Tensor, _: Tensor, routing_map: Tensor, *args: Any, **__: Any) -> Tensor:
            maps[kind] = routing_map.long().tolist()
            return probs

        return apply

    def pass_on(x: Any = None, *_: Any, **__: Any) -> Any:
        return x

    def off(_: Any, __: str) -> None:  # whatever else this class reads
        return None

    probe_class: Any = type("Probe", (router_class,), {"__getattr__": off})
    router = object.__new__(probe_class)
    vars(router).update(
        config=_Settings(
            num_moe_experts=4, moe_router_pre_softmax=True, moe_aux_loss_coeff=[1.0] * 3
        ),
        num_experts=4,
        topk=1,
        score_function="softmax",
        routing_type=list(AUX_LOSSES),
        training=True,
        router_replay=SimpleNamespace(get_replay_topk=_take_last),
        expert_bias=None,
        is_aux_loss_enabled=lambda: True,
        apply_z_loss=pass_on,
        _apply_expert_bias=pass_on,
    )
    vars(router)[_ATTACH] = pass_on
    for kind in AUX_LOSSES:
        if hasattr(router_class, f"_apply_{kind}"):
            vars(router)[f"_apply_{kind}"] = keep(kind)
    return router


def _take_last(scores: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Replays expert 3, the last choice."""
    ids = torch.full((scores.shape[0], 1), 3, device=scores.device)
    return scores.gather(1, ids), ids


class _Settings(SimpleNamespace):
    def __getattr__(self, _: str) -> None:  # whatever else a version reads is off
        return None


# --- what stands over the methods -----------------------------------------------------------------


class _Call:
    """The methods over one router's own; between them the padding mask of the call at hand."""

    def __init__(self, router: Any, target: RouterTargets) -> None:
        self._router = router
        self._target = target
        self._mask: Tensor | None = None  # [T] bool, True = padding

    def routing(self) -> Callable[..., Any]:
        under = self._method_under("routing")

        def routing(logits: Tensor, padding_mask: Tensor | None = None, **options: Any) -> Any:
            mask = self._target.next_padding_mask()
            if mask is not None and mask.numel() == logits[..., 0].numel():  # else refused later
                padding_mask = mask
            self._mask = padding_mask
            return under(logits, padding_mask=padding_mask, **options)

        return routing

    def apply_loss(self, name: str, *, replayed: bool) -> Callable[..., Any]:
        under = self._method_under(name)
        target = self._target

        def apply(
            probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, **options: Any
        ) -> Any:
            if target.answer is not None and not target.answer.has_rows:
                options["with_padding_mask"] = False  # count slots; map and scores are 0 all over
            if replayed:
                routing_map = _replayed_map(routing_map, target)
            return under(probs, scores, routing_map, *args, **options)

        return apply

    def attach(self) -> Callable[..., Any]:
        """Only where ``calculate_per_token_loss``."""
        under = self._method_under(_ATTACH)
        router = self._router

        def attach(
            activation: Tensor,
            aux_loss_coeff: float,
            aux_loss: Tensor,
            aux_loss_name: str,
            reduce_group: Any,
            *args: Any,
            **options: Any,
        ) -> Any:
            tokens = self._count(activation, reduce_group)
            weight = tokens * router.tp_cp_group.size() / reduce_group.size()
            aux_loss = _ScaleGradient.apply(aux_loss, weight)
            with _weighing_nothing(router):
                return under(
                    activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group,
                    *args, **options,
                )  # fmt: skip

        return attach

    def apply_z_loss(self) -> Callable[..., Any]:
        under = self._method_under("apply_z_loss")
        router = self._router

        def apply_z_loss(logits: Tensor, *args: Any, **options: Any) -> Any:
            if not (router.training and torch.is_grad_enabled()):  # Megatron computes none
                return under(logits, *args, **options)
            weight = self._count(logits) * router.tp_cp_group.size()
            if not router.calculate_per_token_loss:
                weight = weight / self._count(logits, router.tp_cp_group).clamp(min=1)
            with _weighing_nothing(router):
                with_loss = under(_ScaleGradient.apply(logits, weight), *args, **options)
            return _Join.apply(logits, with_loss)

        return apply_z_loss

    def _count(self, rows: Tensor, group: Any = None) -> Tensor:
        """Real tokens of this rank's ``rows`` [T, ...], or of all ranks of a group."""
        mask = self._mask
        count = rows.new_full((), rows.shape[0], dtype=torch.int64)
        if mask is not None:
            count = count - mask.sum()
        if group is not None and group.size() > 1:
            dist.all_reduce(count, group=group)
        return count

    def _method_under(self, name: str) -> Callable[..., Any]:
        """The router's method now, found at the call: its class may be patched meanwhile."""
        router = self._router
        mine = vars(router).get(name)
        if mine is not None:
            return mine
        return lambda *args, **options: getattr(type(router), name)(router, *args, **options)


def _replayed_map(routing_map: Tensor, target: RouterTargets) -> Tensor:
    """[T, E] bool: the replayed experts, Megatron's own in live rows, none in padding."""
    answer = target.answer
    if answer is None or answer.topk_ids is None or not answer.replays:
        return routing_map
    replayed = torch.zeros_like(routing_map).scatter(1, answer.topk_ids.long(), True)
    if answer.live_rows is not None:
        replayed = torch.where(answer.live_rows[:, None], routing_map, replayed)
    return replayed & ~answer.padding_mask[:, None]


# --- weights --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _weighing_nothing(router: Any) -> Iterator[None]:
    """The router attaches its loss without a weight of its own."""
    own = vars(router)
    before, own["calculate_per_token_loss"] = own["calculate_per_token_loss"], False
    try:
        yield
    finally:
        own["calculate_per_token_loss"] = before


class _ScaleGradient(torch.autograd.Function):
    """``x``; its gradient is multiplied by ``weight``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return (gradient * weight).to(gradient.dtype), None


class _Join(torch.autograd.Function):
    """``x``; what hangs on ``other`` runs in the backward too, with a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(gradient)
