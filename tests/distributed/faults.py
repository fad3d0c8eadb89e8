"""What goes wrong on one rank, and whether the others and the next schedule are right all the same.

Each scenario runs on every rank; the last one is at fault. It returns what the rank's schedule
raised, after how long and what it left, and then the results of the whole case, run in the same
session wherever the ranks are still in step.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from packhorse.replay.layout import TokenLayout
from packhorse.replay.session import ReplayMicrobatch
from tests.distributed.case import Case
from tests.distributed.log import RouteLog
from tests.distributed.models import all_routers_of, routers_of

if TYPE_CHECKING:
    from tests.distributed.worker import ParallelRun

#: after which a collective of Megatron's groups gives up, where a scenario says so
GROUP_TIMEOUT_S = 6.0


def attempt(run: ParallelRun, spoil: Callable[[list[ReplayMicrobatch]], None]) -> dict[str, Any]:
    """A training schedule with spoiled microbatches, and what is left of it."""
    inputs, microbatches = run.make_data(1)
    spoil(microbatches)
    begin, error = time.monotonic(), None
    with RouteLog(run.bare) as log:
        try:
            run.run_schedule(inputs, microbatches, True)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "seconds": time.monotonic() - begin,
        "calls": len(log.calls),
        "objects_left": run.objects_left(),
        "shim_left": shim_is_installed(),
    }


def shim_is_installed() -> bool:
    from megatron.core.transformer.moe.router import TopKRouter

    return hasattr(TopKRouter._apply_expert_bias, "packhorse_shim")


def reset_expert_bias(run: ParallelRun) -> None:
    """As a trainer must that gives up a step: Megatron's counters outlive it."""
    for chunk in run.bare:
        for router in all_routers_of(chunk).values():
            router.local_tokens_per_expert.zero_()
            router.expert_bias.zero_()


# --- refused before the first forward -------------------------------------------------------------


def repeated_id(run: ParallelRun, microbatches: list[ReplayMicrobatch]) -> None:
    """Two tokens too few for the all-to-all: its split sizes would not sum up."""
    routes = microbatches[-1].routes
    assert routes is not None
    routes.values[2, position_of_last_layer(run)] = 3


def id_out_of_range(run: ParallelRun, microbatches: list[ReplayMicrobatch]) -> None:
    routes = microbatches[-1].routes
    assert routes is not None
    routes.values[2, position_of_last_layer(run), 0] = 77


def missing_field(run: ParallelRun, microbatches: list[ReplayMicrobatch]) -> None:
    microbatches[-1] = ReplayMicrobatch(microbatches[-1].layout, None)


def layout_of_another_rank(run: ParallelRun, microbatches: list[ReplayMicrobatch]) -> None:
    """As many rows as its own, of other tokens."""
    given = microbatches[0]
    layout = TokenLayout.build(
        given.layout.lengths,
        format=given.layout.format,
        padded_lengths=given.layout.padded_lengths,
        tp_size=given.layout.tp_size,
        tp_rank=0,
        sequence_parallel=True,
    )
    microbatches[0] = ReplayMicrobatch(
        layout,
        given.routes,
        missing=given.missing,
        live="all",
        loss_masks=None,
        appended=[torch.ones(length, dtype=torch.bool) for length in layout.lengths],
    )


def position_of_last_layer(run: ParallelRun) -> int:
    return run.case.axis.index(run.case.moe_layers[-1])


REFUSED = {
    spoil.__name__: spoil
    for spoil in (repeated_id, id_out_of_range, missing_field, layout_of_another_rank)
}


# --- in the middle of a schedule ------------------------------------------------------------------


def raise_in_forward(run: ParallelRun, *, here: bool) -> dict[str, Any]:
    """The second microbatch's forward step raises, on this rank or not."""
    run.fault = "raise late" if here else None
    try:
        return attempt(run, lambda microbatches: None)
    finally:
        run.fault = None


def never_asked(run: ParallelRun, *, here: bool) -> dict[str, Any]:
    """The last router runs its last microbatch without consulting replay, as a fused one would."""
    run.fault = "bypass" if here else None
    try:
        return attempt(run, lambda microbatches: None)
    finally:
        run.fault = None


# --- scenarios ------------------------------------------------------------------------------------


def run_scenario(name: str, case: Case, at_fault: bool, store: str) -> dict[str, Any]:
    """Args:
    store: URL for the process group that stands for one that broke.
    """
    from tests.distributed.worker import prepare, run_case

    if name == "raise alone":
        rank, world = dist.get_rank(), dist.get_world_size()
        minutes = GROUP_TIMEOUT_S / 60
        with prepare(case, distributed_timeout_minutes=minutes) as (run, _):
            ended = raise_in_forward(run, here=at_fault)
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )
        return {"ended": ended, **run_case(case, None)}
    with prepare(case) as (run, steps):
        if name in REFUSED:
            spoil = REFUSED[name]
            everywhere = case.pp > 1  # every stage has the same routes, and checks its own layers
            ended = attempt(
                run, lambda given: spoil(run, given) if at_fault or everywhere else None
            )
        elif name == "raise together":
            ended = raise_in_forward(run, here=True)
        elif name == "never asked":
            ended = never_asked(run, here=at_fault)
        else:
            raise ValueError(f"no scenario {name!r}")
        reset_expert_bias(run)
        return {"ended": ended, **run.run(steps)}


def bypass(run: ParallelRun) -> None:
    routers = routers_of(run.bare[-1])
    routers[max(routers)].router_replay = None
