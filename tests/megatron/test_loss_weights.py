"""What the optimizer sees of the routers' losses on two ranks, against formulas of one rank."""

from dataclasses import astuple

import pytest
import torch

from tests.megatron.helpers import EXPERTS, TOPK, megatron_version
from tests.megatron.loss_schedule_worker import (
    BATCH,
    COEFFICIENT,
    KINDS,
    LENGTH,
    MICROBATCHES,
    LossCase,
    captured_of,
    positions_of,
    routes_of,
)
from tests.megatron.two_ranks import run_module_twice

PARALLELISMS = ["tp", "cp", "dp"]


@pytest.fixture(scope="module", params=PARALLELISMS)
def ran(request, tmp_path_factory):
    """(parallelism, what each of its two ranks left)."""
    folder = tmp_path_factory.mktemp(request.param)
    worker = "tests.megatron.loss_schedule_worker"
    return request.param, run_module_twice(worker, folder, request.param, timeout_s=600)


class Replica:
    """The real tokens of one micro-batch on one data-parallel rank, trajectory by trajectory.

    Attributes:
        logits: [N_i, E] float64 of each trajectory.
        used: [N_i, E] of each, 1 where a token uses an expert.
    """

    def __init__(self, case, parallelism, results, weight, dp_rank, microbatch):
        members = [dp_rank] if parallelism == "dp" else [0, 1]
        hidden = torch.empty(LENGTH, BATCH, weight.shape[1], dtype=torch.float64)
        for rank in members:
            hidden[positions_of(parallelism, rank)] = results[rank]["hidden"][microbatch]
        captured = captured_of(case, dp_rank, microbatch)
        routes = torch.tensor(routes_of(dp_rank, microbatch))
        self.logits = [hidden[:count, i] @ weight.t() for i, count in enumerate(captured)]
        self.used = []
        for i, logits in enumerate(self.logits):
            replays = case.how in ("padded", "whole")
            ids = routes[i, : len(logits)] if replays else logits.topk(TOPK).indices
            self.used.append(torch.zeros_like(logits).scatter(1, ids, 1.0).detach())
        self.tokens = sum(captured)

    def scores(self):
        scores = [logits.sigmoid() for logits in self.logits]
        return [part / part.sum(-1, keepdim=True) for part in scores]

    def counts(self):
        return torch.cat(self.used).sum(0)


def loss_of(kind, replica):
    """One rank's loss of all tokens of a micro-batch."""
    if not replica.tokens:
        return torch.zeros((), dtype=torch.float64)
    if kind == "z_loss":
        return COEFFICIENT * torch.cat(replica.logits).logsumexp(-1).square().mean()
    if kind == "aux_loss":
        total = replica.counts() @ torch.cat(replica.scores()).sum(0)
        return COEFFICIENT * EXPERTS / (TOPK * replica.tokens**2) * total
    pairs = zip(replica.used, replica.scores(), strict=True)
    total = sum(used.sum(0) @ scores.sum(0) for used, scores in pairs)
    return COEFFICIENT * EXPERTS / (TOPK * (replica.tokens / BATCH) ** 2) * total / BATCH


def running_losses(batches):
    """Of each micro-batch over all ranks, with the counts averaged over those so far."""
    losses, counts = [], []
    for replicas in batches:
        tokens = sum(replica.tokens for replica in replicas)
        counts.append(sum(replica.counts() for replica in replicas))
        sums = sum(torch.cat(replica.scores()).sum(0) for replica in replicas)
        average = torch.stack(counts).mean(0)
        losses.append(COEFFICIENT * EXPERTS / (TOPK * tokens**2) * (average @ sums))
    return losses


def expected_gradient(case, parallelism, results):
    dp_size = 2 if parallelism == "dp" else 1
    weight = results[0]["weight"].clone().requires_grad_()
    batches = [
        [
            Replica(case, parallelism, results, weight, dp_rank, microbatch)
            for dp_rank in range(dp_size)
        ]
        for microbatch in range(MICROBATCHES)
    ]
    losses, tokens = [], []  # of each micro-batch, the mean over data-parallel ranks
    if case.kind == "global_aux_loss":
        losses = [loss / dp_size for loss in running_losses(batches)]
        tokens = [sum(replica.tokens for replica in replicas) for replicas in batches]
    else:
        flat = [replica for replicas in batches for replica in replicas]
        losses = [loss_of(case.kind, replica) for replica in flat]
        tokens = [replica.tokens for replica in flat]
    if case.per_token:
        total = sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
    else:
        total = sum(losses) / len(losses)
    (gradient,) = torch.autograd.grad(total, weight)
    return gradient


@pytest.mark.parametrize("how", ["padded", "whole", "live"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_final_gradient_is_that_of_one_ranks_losses(ran, kind, per_token, how):
    """After Megatron's sums over ranks and its division by the tokens: the mean of the
    micro-batches' losses, or the mean weighted by their real tokens."""
    parallelism, parts = ran
    case = LossCase(kind, per_token, how)
    results = [part[astuple(case)] for part in parts]
    wanted = expected_gradient(case, parallelism, results)
    assert wanted.abs().max() > 1e-4
    for result in results:
        torch.testing.assert_close(
            result["gradient"], wanted, rtol=1e-4, atol=2e-6 * float(wanted.abs().max())
        )


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_padding_a_session_has_the_gradient_of_megatron_alone(ran, kind, per_token):
    """Which is given no mask. Up to 0.18 it divides by TP x CP what is weighed by tokens, and
    "seq_aux_loss" by the batch size too."""
    parallelism, parts = ran
    alone, session = (
        parts[0][astuple(LossCase(kind, per_token, how))]["gradient"] for how in ("plain", "live")
    )
    missing = 1
    if per_token and megatron_version() < (0, 19):
        missing = (1 if parallelism == "dp" else 2) * (BATCH if kind == "seq_aux_loss" else 1)
    torch.testing.assert_close(session, missing * alone, rtol=1e-5, atol=1e-8)
