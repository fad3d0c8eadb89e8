"""The same training on one rank, without the package: what a distributed run is compared with.

Each trajectory goes through the whole model by itself, without pads, recompute or schedule; the
routers are answered by an object of this file. Weights of any rank are slices of this model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.distributed.case import EXPERTS, TOPK, Case, Trajectory, trajectories
from tests.distributed.models import all_routers_of, build_chunks, causal_mask, routers_of
from tests.distributed.router_losses import DEVICE, RouterLosses

LEARNING_RATE = 2e-2
#: gradients below it are rounding: a step must not be made of their signs
ADAM_EPS = 1e-4
Rows = list[list[int]]


class _GivenRoutes:
    """Answers a router: these experts for the first rows, its own choice or 0..K-1 for others."""

    def __init__(self) -> None:
        self.routes = torch.zeros(0, TOPK, dtype=torch.long, device=DEVICE)
        self.live = 0
        self.chosen: Tensor | None = None
        self.hidden = torch.zeros(0)  # [length, 1, H], what the router is given

    def keep(self, router: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.hidden = inputs[0]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        ids = default(scores.detach(), topk, num_groups, group_topk)[1].clone()
        self.chosen = ids[: len(self.routes) + self.live].clone()
        ids[: len(self.routes)] = self.routes
        ids[len(self.routes) + self.live :] = torch.arange(topk, device=ids.device)
        return scores.gather(1, ids), ids


@dataclass
class ReferenceStep:
    """One pass over all trajectories of all data-parallel ranks.

    Attributes:
        losses: sum over the trained tokens of each (data-parallel rank, microbatch).
        gradients: of the mean over trained tokens; empty for a forward-only pass.
        expert_bias: of each global layer and head (minus its depth), after Megatron's update.
        mtp_routes: of each (data-parallel rank, microbatch, trajectory), for each head: the experts
            that it chose for each token.
        changed: share of replayed rows that the router itself would have sent elsewhere.
        router_losses: (name in Megatron's log, global layer, data-parallel rank) -> sum over
            microbatches, without coefficient.
        share: of the routers' own losses in the gradient of a router, the least of all layers.
    """

    losses: dict[tuple[int, int], float]
    gradients: dict[str, Tensor]
    expert_bias: dict[int, Tensor]
    mtp_routes: dict[tuple[int, int, int], list[Rows]]
    changed: float
    router_losses: dict[tuple[str, int, int], float]
    share: float


class Reference:
    """The whole model on this process. ``start_ranks()`` must have made groups of size one."""

    def __init__(self, case: Case) -> None:
        self.case = case
        (self.model,) = build_chunks(case, parallel=False)
        with torch.no_grad():  # routers of a fresh model are nearly indifferent
            for router in routers_of(self.model).values():
                router.weight.mul_(20)
                if case.ties:  # the best K are never the whole of a group
                    half = EXPERTS // 2
                    router.weight.copy_(router.weight[::half].repeat_interleave(half, 0))
            if case.dtype == "bf16":
                for parameter in self.model.parameters():
                    parameter.copy_(parameter.bfloat16())
        self.weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.unstepped: dict[tuple[int, int], float] = {}  # of the last schedule
        self._adam = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)

    def run(self, number: int) -> ReferenceStep:
        """The schedule of this number; a training one also with the optimizer's step, if any."""
        case, training = self.case, self.case.schedules[number] == "training"
        self.model.zero_grad()
        if case.mtp:
            from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

            MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        losses: dict[tuple[int, int], float] = {}
        mtp_routes: dict[tuple[int, int, int], list[Rows]] = {}
        counts = {
            layer: torch.zeros(EXPERTS, device=DEVICE) for layer in all_routers_of(self.model)
        }
        same = replayed = num_trained = 0
        own = RouterLosses(case, routers_of(self.model))
        with contextlib.nullcontext() if training else torch.no_grad(), self._routed() as answers:
            for dp_rank in range(case.dp):
                for m in range(case.count(number)):
                    total, step = 0.0, torch.zeros((), device=DEVICE)
                    for i, trajectory in enumerate(trajectories(case, dp_rank, m, number)):
                        loss = self._loss(trajectory, answers)
                        step = step + loss
                        total += float(loss.detach())
                        num_trained += int(trajectory.trained.sum())
                        for layer, answer in answers.items():
                            chosen, routes = answer.chosen, answer.routes
                            assert chosen is not None
                            if layer < 0:  # a head of depth d needs the token d places on
                                ids = chosen[: max(trajectory.covered + layer, 0)]
                                counts[layer] += torch.bincount(ids.flatten(), minlength=EXPERTS)
                                continue
                            head = chosen[: len(routes)].sort(-1).values
                            same += int((head == routes.sort(-1).values).all(-1).sum())
                            replayed += len(routes)
                            ids = torch.cat([routes, chosen[len(routes) :]])
                            counts[layer] += torch.bincount(ids.flatten(), minlength=EXPERTS)
                            own.see(layer, answer.hidden, routes, len(ids))
                        mtp_routes[dp_rank, m, i] = [
                            sorted_rows(answers[-depth].chosen) for depth in range(1, case.mtp + 1)
                        ]
                    losses[dp_rank, m] = total
                    if training:
                        (step + own.of_microbatch(dp_rank)).backward()
        gradients = {}
        divisor = case.dp * case.count(number) if case.router_losses else num_trained
        share = 1.0
        if training:
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None, name
                parameter.grad /= divisor
                gradients[name] = parameter.grad.clone()
            for layer, router in all_routers_of(self.model).items():
                offset = counts[layer].mean() - counts[layer]
                router.expert_bias += torch.sign(offset) * router.config.moe_router_bias_update_rate
            if case.optimizer != "none":
                self._adam.step()
            share = own.share(divisor)
        bias = {layer: r.expert_bias.clone() for layer, r in all_routers_of(self.model).items()}
        changed = 1 - same / replayed
        return ReferenceStep(losses, gradients, bias, mtp_routes, changed, own.sums, share)

    def without_steps(self, number: int) -> dict[tuple[int, int], float]:
        """Losses of the schedule of this number with the weights of the beginning."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name])
        return self.run(number).losses

    def _loss(self, trajectory: Trajectory, answers: dict[int, _GivenRoutes]) -> Tensor:
        length = len(trajectory.tokens)
        for layer, answer in answers.items():
            if layer < 0:
                answer.live = length
                continue
            position = self.case.axis.index(layer)
            answer.routes = torch.from_numpy(trajectory.routes[:, position].copy()).to(DEVICE)
            answer.live = trajectory.live
        tokens = torch.from_numpy(trajectory.tokens).to(DEVICE)
        trained = torch.from_numpy(trajectory.trained)[1:].to(DEVICE)
        masked = {}
        if self.case.mtp:
            masked["loss_mask"] = torch.nn.functional.pad(trained.float(), (0, 1))[None]
        values = self.model(
            input_ids=tokens[None],
            position_ids=torch.arange(length, device=DEVICE)[None],
            attention_mask=causal_mask(length),
            labels=tokens.roll(-1)[None],
            **masked,
        )
        return values[0, :-1][trained].sum()

    @contextlib.contextmanager
    def _routed(self) -> Iterator[dict[int, _GivenRoutes]]:
        """Answers by global layer, those of heads by minus their depth."""
        routers = all_routers_of(self.model)
        answers = {layer: _GivenRoutes() for layer in routers}
        before = {layer: router.router_replay for layer, router in routers.items()}
        for layer, router in routers.items():
            router.router_replay = answers[layer]
        hooks = [r.register_forward_pre_hook(answers[layer].keep) for layer, r in routers.items()]
        try:
            yield answers
        finally:
            for hook in hooks:
                hook.remove()
            for layer, router in routers.items():
                router.router_replay = before[layer]


def sorted_rows(ids: Tensor | None) -> Rows:
    assert ids is not None
    return ids.sort(-1).values.tolist()
