"""What a check of packed content found: counters on the device, read when it suits.

    counts[k]   cells of fault k                     first[k]   the first of them, or ``NO_FAULT``

Counts and minima do not depend on the order in which programs run. Checks of several tensors
combine by the sum of counts and, each offset by the cells before it, the minimum of first.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, kernel_name

#: ``first[k]`` where fault k was not found.
NO_FAULT: Final = 2**63 - 1

ROUTE_FAULTS: Final = ("missing", "partly_missing", "out_of_range", "all_zero", "repeated")
SUPPORT_FAULTS: Final = ("out_of_range", "not_compacted", "repeated", "sampled_missing")


# --- reference ------------------------------------------------------------------------------------


def cleared(like: Tensor, num_faults: int) -> Tensor:
    counters = like.new_zeros((2, num_faults), dtype=torch.int64)
    counters[1].fill_(NO_FAULT)
    return counters


def count_cells(counters: Tensor, faults: Sequence[Tensor], cells: Tensor) -> None:
    """Give each of ``cells`` to the first fault that holds there, and add them up."""
    free = torch.ones_like(faults[0])
    for k, holds in enumerate(faults):
        found = holds & free
        free = free & ~holds
        counters[0, k] += found.sum()
        if cells.numel():
            first = torch.where(found, cells, NO_FAULT).min()
            counters[1, k] = torch.minimum(counters[1, k], first)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(repr=kernel_name("clear_checks"))
def _clear_checks_kernel(
    counters_ptr,  # [2, FAULTS] int64
    FAULTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entries = tl.arange(0, BLOCK)
    cleared = tl.where(entries < FAULTS, 0, 0x7FFFFFFFFFFFFFFF)
    tl.store(counters_ptr + entries, cleared, mask=entries < 2 * FAULTS)


@triton.jit
def count_faults(counters_ptr, fault, cells, FAULTS: tl.constexpr):
    """Add up a tile: ``fault`` of each of ``cells``, -1 where there is none."""
    for k in tl.static_range(FAULTS):
        found = fault == k
        count = tl.sum(found.to(tl.int64))
        if count > 0:
            tl.atomic_add(counters_ptr + k, count, sem="relaxed")
            first = tl.min(tl.where(found, cells, 0x7FFFFFFFFFFFFFFF))
            tl.atomic_min(counters_ptr + FAULTS + k, first, sem="relaxed")


_launch_clear_checks = Launcher(_clear_checks_kernel)


def clear_checks(like: Tensor, num_faults: int) -> Tensor:
    counters = like.new_empty((2, num_faults), dtype=torch.int64)
    _launch_clear_checks((1,), (counters,), (num_faults, 16), num_warps=1)
    return counters


# --- results --------------------------------------------------------------------------------------


class RouteFault(NamedTuple):
    """One kind of fault that ``RouteCheck.read`` found."""

    num_cells: int  # (row, layer) that have it
    row: int  # packed row of the first
    layer: int  # captured layer of the first


class SupportFault(NamedTuple):
    """One kind of fault that ``SupportCheck.read`` found."""

    num_rows: int  # that have it
    row: int  # packed row of the first


class RouteCheck(NamedTuple):
    """What ``validate_routes`` found; the tensors are on the device of the routes.

    The entries of both are those of ``ROUTE_FAULTS``.
    """

    counts: Tensor  # [5] int64, (row, layer) cells
    first: Tensor  # [5] int64, row * L + layer of the first, ``NO_FAULT`` where there is none
    num_layers: int  # L, captured

    @ranged
    def read(self) -> dict[str, RouteFault]:
        """Faults that were found, by name; empty for good routes. Waits for the device."""
        return {
            name: RouteFault(count, *divmod(first, self.num_layers))
            for name, count, first in _read(ROUTE_FAULTS, self.counts, self.first)
        }

    @ranged
    def raise_if_any(self, lengths: Sequence[int] | None = None) -> None:
        """Raise for the first fault of all. Waits for the device.

        Args:
            lengths: host integers, rows of each trajectory; with them the trajectory is named.

        Raises:
            ValueError: a fault was found, or ``lengths`` do not hold the row.
        """
        found = self.read()
        if found:
            name, fault = min(found.items(), key=lambda item: item[1][1:])
            where = _place("validate_routes", "rollout_expert_indices", fault.row, lengths)
            totals = _totals({kind: each[0] for kind, each in found.items()})
            raise ValueError(f"{where}, layer {fault.layer}: {_ROUTE_TEXTS[name]}{totals}")


class SupportCheck(NamedTuple):
    """What ``validate_support`` found; the tensors are on the device of the support.

    The entries of both are those of ``SUPPORT_FAULTS``.
    """

    counts: Tensor  # [4] int64, rows
    first: Tensor  # [4] int64, the first row, ``NO_FAULT`` where there is none

    @ranged
    def read(self) -> dict[str, SupportFault]:
        """Faults that were found, by name; empty for a good support. Waits for the device."""
        return {
            name: SupportFault(count, first)
            for name, count, first in _read(SUPPORT_FAULTS, self.counts, self.first)
        }

    @ranged
    def raise_if_any(self, lengths: Sequence[int] | None = None) -> None:
        """As ``RouteCheck.raise_if_any``; ``lengths`` are each trajectory's response tokens."""
        found = self.read()
        if found:
            name, fault = min(found.items(), key=lambda item: item[1].row)
            where = _place("validate_support", "rollout_sample_support", fault.row, lengths)
            totals = _totals({kind: each[0] for kind, each in found.items()})
            raise ValueError(f"{where}: {_SUPPORT_TEXTS[name]}{totals}")


_ROUTE_TEXTS: Final = {
    "missing": "no route (all -1); rows end where the captured prefix ends",
    "partly_missing": "a partial -1",
    "out_of_range": "an expert is out of range",
    "all_zero": (
        "all zeros: the engine captured nothing there (or the layer is dense: leave it out of"
        " layers)"
    ),
    "repeated": "an expert is repeated",
}
_SUPPORT_TEXTS: Final = {
    "out_of_range": "an id is out of range",
    "not_compacted": "an id after a -1",
    "repeated": "an id is repeated",
    "sampled_missing": "the sampled id is not among its ids",
}


def _read(names: Sequence[str], counts: Tensor, first: Tensor) -> list[tuple[str, int, int]]:
    entries = zip(names, counts.tolist(), first.tolist(), strict=True)
    return [entry for entry in entries if entry[1]]


def _place(name: str, field: str, row: int, lengths: Sequence[int] | None) -> str:
    if lengths is None:
        return f"{name}: {field}, packed row {row}"
    begin = 0
    for trajectory, length in enumerate(lengths):
        if row < begin + length:
            return f"{name}: {field} of trajectory {trajectory}, row {row - begin}"
        begin += length
    raise ValueError(
        f"{name}: lengths hold {begin} rows, and packed row {row} of {field} is faulty"
    )


def _totals(counts: dict[str, int]) -> str:
    if sum(counts.values()) == 1:
        return ""
    return " (in all: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + ")"
