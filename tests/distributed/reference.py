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

from tests.distributed.cases import EXPERTS, TOPK, Case, Trajectory, trajectories
from tests.distributed.models import all_routers_of, build_chunks, routers_of

LEARNING_RATE = 1e-2
Rows = list[list[int]]


class _GivenRoutes:
    """Answers a router: these experts for the first rows, its own choice or 0..K-1 for others."""

    def __init__(self) -> None:
        self.routes = torch.zeros(0, TOPK, dtype=torch.long)
        self.live = 0
        self.chosen: Tensor | None = None

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
        ids[len(self.routes) + self.live :] = torch.arange(topk)
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
    """

    losses: dict[tuple[int, int], float]
    gradients: dict[str, Tensor]
    expert_bias: dict[int, Tensor]
    mtp_routes: dict[tuple[int, int, int], list[Rows]]
    changed: float


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
        self._adam = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def run(self, number: int) -> ReferenceStep:
        """The schedule of this number; a training one also with the optimizer's step, if any."""
        case, training = self.case, self.case.schedules[number] == "training"
        self.model.zero_grad()
        if case.mtp:
            from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

            MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        losses: dict[tuple[int, int], float] = {}
        mtp_routes: dict[tuple[int, int, int], list[Rows]] = {}
        counts = {layer: torch.zeros(EXPERTS) for layer in all_routers_of(self.model)}
        same = replayed = num_trained = 0
        with contextlib.nullcontext() if training else torch.no_grad(), self._routed() as answers:
            for dp_rank in range(case.dp):
                for m in range(case.count(number)):
                    total = 0.0
                    for i, trajectory in enumerate(trajectories(case, dp_rank, m, number)):
                        loss = self._loss(trajectory, answers)
                        if training:
                            loss.backward()
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
                        mtp_routes[dp_rank, m, i] = [
                            sorted_rows(answers[-depth].chosen) for depth in range(1, case.mtp + 1)
                        ]
                    losses[dp_rank, m] = total
        gradients = {}
        if training:
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None, name
                parameter.grad /= num_trained
                gradients[name] = parameter.grad.clone()
            for layer, router in all_routers_of(self.model).items():
                offset = counts[layer].mean() - counts[layer]
                router.expert_bias += torch.sign(offset) * router.config.moe_router_bias_update_rate
            if case.optimizer != "none":
                self._adam.step()
        bias = {layer: r.expert_bias.clone() for layer, r in all_routers_of(self.model).items()}
        return ReferenceStep(losses, gradients, bias, mtp_routes, 1 - same / replayed)

    def _loss(self, trajectory: Trajectory, answers: dict[int, _GivenRoutes]) -> Tensor:
        length = len(trajectory.tokens)
        for layer, answer in answers.items():
            if layer < 0:
                answer.live = length
                continue
            position = self.case.axis.index(layer)
            answer.routes = torch.from_numpy(trajectory.routes[:, position].copy())
            answer.live = trajectory.live
        tokens = torch.from_numpy(trajectory.tokens)
        trained = torch.from_numpy(trajectory.trained)[1:]
        masked = {}
        if self.case.mtp:
            masked["loss_mask"] = torch.nn.functional.pad(trained.float(), (0, 1))[None]
        values = self.model(
            input_ids=tokens[None],
            position_ids=torch.arange(length)[None],
            attention_mask=torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
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
        try:
            yield answers
        finally:
            for layer, router in routers.items():
                router.router_replay = before[layer]


def sorted_rows(ids: Tensor | None) -> Rows:
    assert ids is not None
    return ids.sort(-1).values.tolist()
