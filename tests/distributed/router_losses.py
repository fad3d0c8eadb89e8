"""Load-balancing and z-losses of routers: by their formulas on one rank, and as Megatron logs them.

    aux_loss     = coeff * E / (K * N**2) * sum_e (tokens that use e) * (sum over tokens of score_e)
    seq_aux_loss = the mean over trajectories, each with the mean length for N
    z_loss       = coeff * mean over tokens of logsumexp(logits)**2

of one microbatch, over its N covered tokens. A step minimises the mean over microbatches of
(summed token losses + router losses), which is what ``calculate_per_token_loss=False`` makes of a
loss function that returns a sum. Megatron's z-loss is the mean of the ranks' means: that of one
rank only where all of a group have as many tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.distributed.case import AUX_COEFFICIENT, EXPERTS, TOPK, Z_COEFFICIENT, Case

#: of the models; a rank that sees no GPU computes on the CPU
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

#: names in Megatron's log
LOGGED = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}


class RouterLosses:
    """The routers' own losses in one training schedule of the reference.

    Attributes:
        sums: (name in Megatron's log, global layer, data-parallel rank) -> sum over microbatches,
            without the coefficient.
    """

    def __init__(self, case: Case, routers: dict[int, Any]) -> None:
        self._case, self._routers = case, routers
        self._seen: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._gradients: dict[int, Tensor] = {}
        self.sums: dict[tuple[str, int, int], float] = {}

    def see(self, layer: int, hidden: Tensor, routes: Tensor, covered: int) -> None:
        """A trajectory's pass through a router.

        Args:
            hidden: [length, 1, H], what the router was given.
            routes: [captured, K], where it sent the first tokens; the other covered ones run live,
                and count with the best scores, whatever an expert bias made of them.
        """
        if self._case.router_losses:
            hidden = hidden.flatten(0, 1)[:covered]
            logits = hidden.float() @ self._routers[layer].weight.float().t()
            experts = torch.cat([routes, logits[len(routes) :].topk(TOPK).indices])
            all_logits, all_experts = self._seen.setdefault(layer, ([], []))
            all_logits.append(logits)
            all_experts.append(experts)

    def of_microbatch(self, dp_rank: int) -> Tensor:
        """What is added to the summed losses of the tokens seen since the last call."""
        total = torch.zeros((), device=DEVICE)
        for layer, (logits, experts) in self._seen.items():
            for name, value in _losses_of(self._case, logits, experts).items():
                key = (name, layer, dp_rank)
                self.sums[key] = self.sums.get(key, 0.0) + float(value)
                added = COEFFICIENT[name] * value
                weight = self._routers[layer].weight
                (gradient,) = torch.autograd.grad(added, weight, retain_graph=True)
                self._gradients[layer] = self._gradients.get(layer, 0.0) + gradient
                total = total + added
        self._seen = {}
        return total

    def share(self, divisor: int) -> float:
        """Largest entry of their own gradient beside that of the whole, the least of all routers.

        Args:
            divisor: of the sums in the gradients that the routers have.
        """
        shares = [
            float(gradient.abs().max() / divisor / self._routers[layer].weight.grad.abs().max())
            for layer, gradient in self._gradients.items()
        ]
        return min(shares, default=1.0)


def _losses_of(case: Case, logits: list[Tensor], experts: list[Tensor]) -> dict[str, Tensor]:
    """Of one router in one microbatch, without their coefficients, by their names in the log.

    Args:
        logits: [N, E] of the covered tokens of each trajectory.
        experts: [N, K] that they were sent to.
    """
    made = {}
    if case.aux:
        scores = [part.sigmoid() for part in logits]
        sums = torch.stack([(part / part.sum(-1, keepdim=True)).sum(0) for part in scores])
        counts = torch.stack(
            [torch.bincount(part.flatten(), minlength=EXPERTS).float() for part in experts]
        )
        tokens = sum(len(part) for part in logits)
        if case.aux == "aux_loss":
            total = counts.sum(0) @ sums.sum(0) / tokens**2
        else:
            total = (counts * sums).sum() / (tokens / len(logits)) ** 2 / len(logits)
        made[LOGGED[case.aux]] = EXPERTS / TOPK * total
    if case.z_loss:
        made["z_loss"] = torch.cat(logits).logsumexp(-1).square().mean()
    return made


def settings_of(case: Case) -> dict[str, Any]:
    """Of Megatron's ``TransformerConfig``."""
    settings: dict[str, Any] = {"calculate_per_token_loss": not case.router_losses}
    if case.aux:
        settings["moe_router_load_balancing_type"] = case.aux
        settings["moe_aux_loss_coeff"] = AUX_COEFFICIENT
    if case.z_loss:
        settings["moe_z_loss_coeff"] = Z_COEFFICIENT
    return settings


COEFFICIENT = {**dict.fromkeys(LOGGED.values(), AUX_COEFFICIENT), "z_loss": Z_COEFFICIENT}


# --- Megatron's log -------------------------------------------------------------------------------


def take_logged() -> dict[str, list[float]]:
    """What this rank's routers logged since the last call: name -> sum of each layer."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.19
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        tracker = get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"].tolist() for name, entry in tracker.items()}
    else:
        tracker = get_moe_metrics_tracker()._metrics
        found = {name: entry.values.tolist() for name, entry in tracker.items()}
    tracker.clear()
    return found
