"""What the ranks of a case must have done; each failure names case, rank, layer and slot."""

from __future__ import annotations

import math
from typing import Any

from tests.distributed.case import EXPERTS, TOPK, Case, Trajectory, layout_arguments, trajectories
from tests.distributed.log import Call
from tests.oracle import OracleLayout

#: relative error of a microbatch's loss, and error of a gradient relative to its largest entry.
#: fp32: sums in another order. bf16: a number has 8 bits, so that a rounding moves it by up to
#: 2**-9; some ten of them stand one after another between embedding and logit, and a loss is the
#: mean of a dozen tokens.
LOSS_ERROR = {"fp32": 2e-5, "bf16": 2**-8}
GRADIENT_ERROR = {"fp32": 1e-4, "bf16": 2**-4}
#: of a bias that moves by 1e-3 a step; ``Float16Module`` makes Megatron's a bf16 number
BIAS_ERROR = {"fp32": 1e-6, "bf16": 1e-5}


def check(case: Case, results: list[dict[str, Any]]) -> None:
    """Everything that the ranks of a case must have done."""
    assert_every_layer_is_held(case, results)
    places = []
    for rank, result in enumerate(results):
        assert [s["kind"] for s in result["schedules"]] == list(case.schedules)
        for number, schedule in enumerate(result["schedules"]):
            where = f"{case.name}, rank {rank} {result['ranks']}, schedule {number}"
            places.append((f"{where} ({schedule['kind']})", Slots(case, result["ranks"], number)))
            slots, schedule = places[-1][1], result["schedules"][number]
            assert schedule["completed"], where
            assert schedule["objects_left"] == [], where
            assert schedule["changed"] > 0.7, f"{where}: live routes are the replayed ones"
            check_routes(slots, schedule, places[-1][0])
            check_heads(slots, schedule, places[-1][0])
            check_counts(slots, schedule, places[-1][0])
    for rank, result in enumerate(results):
        for number, schedule in enumerate(result["schedules"]):
            where = f"{case.name}, rank {rank} {result['ranks']}, schedule {number}"
            check_gradients(case, schedule["gradients"], where)
            for layer, error in schedule["bias_error"].items():
                assert error < BIAS_ERROR[case.dtype], (
                    f"{where}, layer {layer}: expert bias is off by {error}"
                )
    for number in range(len(case.schedules)):
        check_losses(case, results, number)
        check_router_losses(case, results, number)
    if case.optimizer != "none":  # the optimizer's steps are seen in the losses after them
        without, after = results[0]["unstepped"], results[0]["schedules"][-1]["expected_losses"]
        moved = max(abs(after[key] / without[key] - 1) for key in without)
        assert moved > 2 * LOSS_ERROR[case.dtype], f"{case.name}: steps moved a loss by {moved}"


def assert_every_layer_is_held(case: Case, results: list[dict[str, Any]]) -> None:
    first = [result["schedules"][0] for result in results]
    held = {layer for schedule in first for chunk in schedule["routers"] for layer in chunk}
    assert held == set(case.moe_layers), case.name
    heads = {depth for schedule in first for chunk in schedule["heads"] for depth in chunk}
    assert heads == set(range(1, case.mtp + 1)), case.name
    for schedule in first:
        assert len(schedule["routers"]) == case.vpp, case.name


# --- slots of a rank ------------------------------------------------------------------------------


class Slots:
    """What the slots of a rank's routers hold in one schedule, by ``tests/oracle.py`` alone."""

    def __init__(self, case: Case, ranks: dict[str, int], number: int) -> None:
        self.case, self.ranks, self.number = case, ranks, number
        self.training = case.schedules[number] == "training"
        self.count = case.count(number)

    def given(self, microbatch: int) -> list[Trajectory]:
        return trajectories(self.case, self.ranks["dp"], microbatch, self.number)

    def layout(self, microbatch: int) -> OracleLayout:
        given = self.given(microbatch)
        return OracleLayout(
            **layout_arguments(self.case, given, self.ranks["tp"], self.ranks["cp"])
        )

    def places(self, microbatch: int) -> list[tuple[int, int]]:
        """(trajectory, position) of each slot; a pad of the slab is a trajectory more."""
        layout = self.layout(microbatch)
        held = layout.slots()
        return layout.tp_slice(held) if layout.sequence_parallel else held

    def covered(self, microbatch: int, ahead: int = 0) -> list[bool]:
        """Of each slot: it is replayed or runs live, and so is the one ``ahead`` of it."""
        given = self.given(microbatch)
        return [
            sequence < len(given) and position + ahead < given[sequence].covered
            for sequence, position in self.places(microbatch)
        ]

    def expected(self, microbatch: int, layer: int) -> list[list[int] | str]:
        """Of each slot: the captured experts, "live" or "dummy"."""
        given = self.given(microbatch)
        layout = self.layout(microbatch)
        captured = [len(trajectory.routes) for trajectory in given]
        position = self.case.axis.index(layer)
        packed = [row[position] for trajectory in given for row in trajectory.routes]
        live_ids = layout.row_ids(
            [trajectory.live for trajectory in given], captured, slice=layout.sequence_parallel
        )
        rows: list[list[int] | str] = []
        for row_id, live_id in zip(layout.route_row_ids(captured), live_ids, strict=True):
            if row_id >= 0:
                rows.append(sorted(packed[row_id].tolist()))
            else:
                rows.append("live" if live_id >= 0 else "dummy")
        return rows


def calls_of(schedule: dict[str, Any], chunk: int, layer: int) -> tuple[list[Call], list[Call]]:
    """First passes and recomputes of a router, each in their order."""
    found = [call for call in schedule["calls"] if (call.chunk, call.layer) == (chunk, layer)]
    return [c for c in found if not c.recompute], [c for c in found if c.recompute]


# --- routes and masks -----------------------------------------------------------------------------


def check_routes(slots: Slots, schedule: dict[str, Any], where: str) -> None:
    case = slots.case
    for chunk, layers in enumerate(schedule["routers"]):
        for layer in layers:
            place = f"{where}, chunk {chunk}, layer {layer}"
            first, again = calls_of(schedule, chunk, layer)
            recomputes = slots.count if slots.training and case.recomputed(layer) else 0
            assert len(first) == slots.count, f"{place}: first passes"
            assert len(again) == recomputes, f"{place}: recomputes"
            replayed = 0
            for m, call in enumerate(first):
                expected = slots.expected(m, layer)
                replayed += sum(not isinstance(row, str) for row in expected)
                check_rows(case, call.rows, expected, f"{place}, microbatch {m}, first pass")
                check_mask(slots, m, call, f"{place}, microbatch {m}, first pass")
            assert replayed > 0, f"{place}: the case replays nothing here"
            for m, call in enumerate(again):
                # live rows and dummies too repeat what the first pass took
                expected = list(first[m].rows)
                check_rows(case, call.rows, expected, f"{place}, microbatch {m}, recompute")
                check_mask(slots, m, call, f"{place}, microbatch {m}, recompute")


def check_rows(case: Case, rows: list[list[int]], expected: list[Any], where: str) -> None:
    assert len(rows) == len(expected), f"{where}: {len(rows)} rows, expected {len(expected)}"
    for slot, (experts, wanted) in enumerate(zip(rows, expected, strict=True)):
        place = f"{where}, slot {slot}"
        assert len(set(experts)) == TOPK, f"{place}: {experts}"
        assert all(0 <= expert < EXPERTS for expert in experts), f"{place}: {experts}"
        if wanted == "dummy" and case.dummy == "constant":
            wanted = list(range(TOPK))
        if not isinstance(wanted, str):
            assert experts == wanted, f"{place}: routed to {experts}, expected {wanted}"


def check_mask(slots: Slots, microbatch: int, call: Call, where: str) -> None:
    """The mask that the model gave its router: True where the slot is neither replayed nor live.

    Megatron 0.16 and 0.17 drop it in layers that full recompute leaves out.
    """
    wanted = [not covered for covered in slots.covered(microbatch)]
    assert call.mask is None or call.mask == wanted, f"{where}: mask {call.mask}, not {wanted}"


# --- heads for multi-token prediction -------------------------------------------------------------


def check_heads(slots: Slots, schedule: dict[str, Any], where: str) -> None:
    """Their routers choose as one rank's do, and never as a captured layer says."""
    case = slots.case
    for chunk, depths in enumerate(schedule["heads"]):
        for depth in depths:
            place = f"{where}, chunk {chunk}, head {depth}"
            first, again = calls_of(schedule, chunk, -depth)
            recomputes = slots.count if slots.training and case.recomputed(0) else 0
            assert (len(first), len(again)) == (slots.count, recomputes), place
            assert [call.rows for call in again] == [call.rows for call in first][:recomputes], (
                f"{place}: the recompute chose others"
            )
            for m, call in enumerate(first):
                wanted, replayed = [], []
                for (i, position), covered in zip(
                    slots.places(m), slots.covered(m, depth), strict=True
                ):
                    if covered:
                        key = (slots.ranks["dp"], m, i)
                        wanted.append(schedule["expected_mtp_routes"][key][depth - 1][position])
                        routes = slots.given(m)[i].routes
                        replayed.append(routes[position].tolist() if position < len(routes) else [])
                actual = [
                    row
                    for row, covered in zip(call.rows, slots.covered(m, depth), strict=True)
                    if covered
                ]
                assert actual == wanted, f"{place}, microbatch {m}: {actual}, of one rank {wanted}"
                for layer in range(len(case.axis)):
                    given = [sorted(row[layer]) for row in replayed if row]
                    assert not given or given != actual[: len(given)], (
                        f"{place}, microbatch {m}: the routes of captured layer {layer}"
                    )


# --- expert bias ----------------------------------------------------------------------------------


def check_counts(slots: Slots, schedule: dict[str, Any], where: str) -> None:
    """Tokens that each expert counted before the update, by hand: each covered slot of each first
    pass once, no dummy, nothing for a recompute, nothing without gradients."""
    for kind, sign in (("routers", 1), ("heads", -1)):
        for chunk, numbers in enumerate(schedule[kind]):
            for number in numbers:
                layer = sign * number
                counts = [0] * EXPERTS
                first, _ = calls_of(schedule, chunk, layer)
                for m, call in enumerate(first if slots.training else []):
                    ahead = number if kind == "heads" else 0
                    for row, covered in zip(call.rows, slots.covered(m, ahead), strict=True):
                        for expert in row if covered else ():
                            counts[expert] += 1
                actual = schedule["counts"][layer]
                assert actual == counts, (
                    f"{where}, chunk {chunk}, {kind} {number}: expert bias counted {actual},"
                    f" by hand {counts}"
                )


# --- losses and gradients -------------------------------------------------------------------------


def check_losses(case: Case, results: list[dict[str, Any]], number: int) -> None:
    """Summed over context-parallel ranks, the loss of each microbatch is one rank's."""
    expected = results[0]["schedules"][number]["expected_losses"]
    # a rank that reports is a last stage; tensor-parallel ranks report the same
    for tp_rank in range(case.tp):
        for (dp_rank, microbatch), wanted in expected.items():
            parts = [
                result["schedules"][number]["losses"]
                for result in results
                if result["ranks"]["tp"] == tp_rank
                and result["ranks"]["dp"] == dp_rank
                and result["ranks"]["pp"] == case.pp - 1
            ]
            where = f"{case.name}, schedule {number}, dp rank {dp_rank}, tp rank {tp_rank}"
            assert len(parts) == case.cp, where
            assert all(len(part) == case.count(number) for part in parts), where
            actual = sum(part[microbatch] for part in parts)
            assert math.isclose(actual, wanted, rel_tol=LOSS_ERROR[case.dtype]), (
                f"{where}, microbatch {microbatch}: loss {actual}, of one rank {wanted}"
            )


def check_router_losses(case: Case, results: list[dict[str, Any]], number: int) -> None:
    """What Megatron logs: load-balancing losses in parts that sum up over tensor- and
    context-parallel ranks, z-losses of each rank's own tokens."""
    expected = results[0]["schedules"][number]["expected_router_losses"]
    training = case.schedules[number] == "training"
    assert bool(expected) == (case.router_losses and training), case.name
    assert results[0]["schedules"][number]["share"] > 0.1, f"{case.name}: too small to be seen"
    if not expected:
        for result in results:
            assert not any(map(any, result["schedules"][number]["logged"].values())), case.name
    for (name, layer, dp_rank), wanted in expected.items():
        parts = [
            schedule["logged"][name][layer]
            for result in results
            for schedule in [result["schedules"][number]]
            if result["ranks"]["dp"] == dp_rank and any(layer in c for c in schedule["routers"])
        ]
        where = f"{case.name}, schedule {number}, dp rank {dp_rank}, layer {layer}"
        assert len(parts) == case.tp * case.cp, where
        actual = sum(parts) / (len(parts) if name == "z_loss" else 1)
        assert math.isclose(actual, wanted, rel_tol=LOSS_ERROR[case.dtype]), (
            f"{where}: {name} {actual}, of one rank {wanted}"
        )


def check_gradients(case: Case, gradients: dict[str, tuple[float, float]], where: str) -> None:
    for name, (error, largest) in gradients.items():
        assert math.isfinite(error), f"{where}: gradient of {name} is not finite"
        allowed = 1e-6 + GRADIENT_ERROR[case.dtype] * largest
        assert error <= allowed, f"{where}: gradient of {name} is off by {error} of {largest}"
        if "router" in name:
            assert largest > 1e-7, f"{where}: gradient of {name} is zero"
