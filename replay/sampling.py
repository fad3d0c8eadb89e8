"""Tallies of a sampled schedule: what the live routers would have chosen, beside what is replayed.

    routes/*                of each replayed router call, on the rows that hold replayed ids
    padding/per_ep_rank     where the rank's masked rows were sent

Every first pass of a sampled schedule also computes the router's own choice, from its live scores;
a recompute repeats a first pass and is not counted again. Counts lie on the captured layer axis
[L], zero where a layer stands on another rank, so that all ranks have the same names and shapes.
Everything stays on the device; nothing is read.

    rows/*, coverage/*      the same on every tensor, context and pipeline rank of a micro-batch
    routes/*, padding/*     a rank's own tokens and layers; without sequence parallelism the same on
                            every tensor rank

``ScheduleCounts.counted_once`` keeps each of these on one of the ranks that have the same, and 0 on
the others: an all-reduce of each name over all ranks then counts every micro-batch, token and layer
once.

Sizes: L captured layers, J layers of a chunk, T token slots, K experts a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packhorse.replay.metrics import Tally, merge_tallies, tally_padding
from packhorse.replay.targets import RouterTargets

_ROUTES = ("rows", "assignments", "rows_differing", "assignments_differing")


class RouteSample:
    """Collects one schedule.

    Args:
        axis_length: L.
        ep_size: expert-parallel ranks.
        device: of the tallies, where this rank replays no layer at all.
    """

    def __init__(self, *, axis_length: int, ep_size: int, device: torch.device) -> None:
        self._axis_length, self._ep_size, self._device = axis_length, ep_size, device
        self._routers: dict[int, RouterTargets] = {}  # by captured position
        self._padding: dict[tuple[int, ...], Tally] = {}  # by the positions of a chunk

    def watch(self, positions: Sequence[int], targets: Sequence[RouterTargets]) -> None:
        """Take the tallies of these routers in the end; one captured position each."""
        self._routers.update(zip(positions, targets, strict=True))

    def add_padding(
        self,
        positions: Sequence[int],
        topk_ids: Tensor,
        padding_mask: Tensor,
        *,
        num_experts: int,
    ) -> None:
        """Count a microbatch's masked rows [T] of the layers ``topk_ids`` [J, T, K]."""
        tally = tally_padding(
            topk_ids, padding_mask, num_experts=num_experts, ep_size=self._ep_size
        )
        key = tuple(positions)
        kept = self._padding.get(key)
        self._padding[key] = tally if kept is None else merge_tallies([kept, tally])

    def tally(self) -> Tally:
        """The joined counts: [L] each, the padding's [L, ep_size]."""
        tallies: Tally = {}
        for name in (f"routes/{part}" for part in _ROUTES):
            found = {
                position: target.tally[name]
                for position, target in self._routers.items()
                if target.tally
            }
            tallies[name] = self._on_axis(found, (1,))
        name = "padding/per_ep_rank"
        rows: dict[int, Tensor] = {}
        for positions, tally in self._padding.items():
            rows |= zip(positions, tally[name].split(1), strict=True)
        tallies[name] = self._on_axis(rows, (1, self._ep_size))
        return tallies

    def _on_axis(self, found: Mapping[int, Tensor], shape: tuple[int, ...]) -> Tensor:
        device = next(iter(found.values())).device if found else self._device
        none = torch.zeros(shape, dtype=torch.int64, device=device)
        return torch.cat([found.get(position, none) for position in range(self._axis_length)])


@dataclass(frozen=True)
class ScheduleCounts:
    """What a schedule counted; merged where it is asked for.

    Attributes:
        rows: ``tally_rows`` of each microbatch, and the context-parallel rank of its layout.
        sampled: of ``RouteSample.tally``, or empty.
        sequence_parallel: routers of the tensor ranks see different tokens.
    """

    rows: Sequence[tuple[Tally, int]]
    sampled: Tally
    sequence_parallel: bool

    def own(self) -> Tally:
        """Of what this rank ran."""
        return merge_tallies([*(tally for tally, _ in self.rows), self.sampled])

    def counted_once(self, tp_rank: int, pp_rank: int) -> Tally:
        """What this rank adds to the others'."""
        sampled = self.sampled
        if tp_rank and not self.sequence_parallel:
            sampled = {name: torch.zeros_like(counts) for name, counts in sampled.items()}
        rows = [
            dict.fromkeys(tally, 0) if tp_rank or pp_rank or cp_rank else tally
            for tally, cp_rank in self.rows
        ]
        return merge_tallies([*rows, sampled])


def plot_route_mismatch(axes: Any, figures: Mapping[str, Any], *, label: str | None = None) -> None:
    """Draw, for each captured layer, the share of rows whose live experts are others.

    Args:
        axes: a matplotlib ``Axes``; several calls draw steps of a run into one picture.
        figures: of ``tally_metrics`` or ``session.metrics()`` of a sampled schedule; read here.
        label: of the line in a legend.

    Raises:
        ValueError: ``figures`` are of no sampled schedule.
    """
    name = "routes/row_mismatch_per_layer"
    if name not in figures:
        raise ValueError(
            f"plot_route_mismatch: figures has no {name}; sample_routes_every of the session says"
            " which schedules have it"
        )
    shares = [100 * share for share in figures[name].tolist()]
    axes.plot(range(len(shares)), shares, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.set_xlabel("captured layer")
    axes.set_ylabel("rows with other live experts (%)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if label is not None:
        axes.legend(frameon=False)
