"""Replay under Megatron's parallelisms, 0.19.2, on CPU processes over gloo.

Every routed row of every first pass and recompute is held against ``tests/oracle.py`` and the
packed routes; losses, gradients and expert bias against ``reference.py``, one rank's training of
the same weights without the package. The cases stand in ``cases.py``.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.cases import CASES, EXPERTS, TOPK, Case, layout_arguments, trajectories
from tests.distributed.pool import RankPool
from tests.oracle import OracleLayout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.mark.parametrize("name", CASES)
def test_each_rank_routes_its_slots_as_captured_and_trains_like_one_rank(name, pool):
    case = CASES[name]
    check(case, pool.run(name, case.world, case.timeout_s))


# --- the tests notice -----------------------------------------------------------------------------


def test_a_row_of_another_token_is_named_by_case_rank_layer_microbatch_and_slot(pool):
    case = CASES["pp2-full"]
    results = pool.run(case.name, case.world, case.timeout_s, "row")
    with pytest.raises(
        AssertionError,
        match=r"pp2-full, rank 1 .*schedule 1 \(training\), chunk 0, layer 1, microbatch 1,"
        r" first pass, slot 2: routed to",
    ):
        check(case, results)


def test_counted_padding_is_noticed_in_the_expert_bias(pool):
    case = CASES["tp2-sp-full"]
    results = pool.run(case.name, case.world, case.timeout_s, "mask")
    with pytest.raises(AssertionError, match=r"tp2-sp-full, rank .*expert bias is off"):
        check(case, results)


def test_a_rank_that_raises_ends_the_case_and_is_named(pool):
    with pytest.raises(AssertionError) as raised:
        pool.run("ep2-full", 2, 60.0, "raise")
    message = str(raised.value)
    assert "ep2-full: rank 1 failed:" in message
    assert "a fault on purpose" in message


def test_a_rank_that_hangs_ends_the_case_and_the_next_one_runs(pool):
    with pytest.raises(AssertionError, match=r"pp2-none: rank \d did not answer"):
        pool.run("pp2-none", 2, 5.0, "hang")
    case = CASES["pp2-none"]
    check(case, pool.run(case.name, case.world, case.timeout_s))


# --- a case ---------------------------------------------------------------------------------------


def check(case: Case, results: list[dict[str, Any]]) -> None:
    """Everything that the ranks of a case must have done; failures name the place."""
    assert_every_layer_is_held(case, results)
    places = []
    for rank, result in enumerate(results):
        assert [s["kind"] for s in result["schedules"]] == list(case.schedules)
        for number, schedule in enumerate(result["schedules"]):
            where = f"rank {rank} {result['ranks']}, schedule {number} ({schedule['kind']})"
            places.append((f"{case.name}, {where}", result["ranks"], schedule))
    for where, ranks, schedule in places:
        assert schedule["completed"], where
        assert schedule["objects_left"] == [], where
        assert schedule["changed"] > 0.8, f"{where}: live routes are the replayed ones"
        check_routes(case, ranks, schedule, where)
    for where, _, schedule in places:
        check_gradients(schedule["gradients"], where)
        for layer, error in schedule["bias_error"].items():
            assert error < 1e-6, f"{where}, layer {layer}: expert bias is off by {error}"
    for number in range(len(case.schedules)):
        check_losses(case, results, number)
    if case.optimizer != "none":  # the optimizer's steps are seen in the losses after them
        before, after = (
            sum(results[0]["schedules"][number]["expected_losses"].values()) for number in (0, -1)
        )
        assert abs(after - before) > 1e-2 * before, case.name


def assert_every_layer_is_held(case: Case, results: list[dict[str, Any]]) -> None:
    held = {
        layer
        for result in results
        for chunk in result["schedules"][0]["routers"]
        for layer in chunk
    }
    assert held == set(range(case.dense, case.num_layers)), case.name
    for result in results:
        assert len(result["schedules"][0]["routers"]) == case.vpp, case.name


# --- routes ---------------------------------------------------------------------------------------


def expected_rows(
    case: Case, ranks: dict[str, int], microbatch: int, layer: int
) -> list[list[int] | str]:
    """Of each slot of this rank's routers: the captured experts, "live" or "dummy"."""
    given = trajectories(case, ranks["dp"], microbatch)
    layout = OracleLayout(**layout_arguments(case, given, ranks["tp"], ranks["cp"]))
    captured = [len(trajectory.routes) for trajectory in given]
    packed = [row[layer] for trajectory in given for row in trajectory.routes]
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


def check_routes(case: Case, ranks: dict[str, int], schedule: dict[str, Any], where: str) -> None:
    training = schedule["kind"] == "training"
    for chunk, layers in enumerate(schedule["routers"]):
        for layer in layers:
            place = f"{where}, chunk {chunk}, layer {layer}"
            first, again = (
                [
                    rows
                    for c, at, recompute, rows in schedule["calls"]
                    if (c, at, recompute) == (chunk, layer, kind)
                ]
                for kind in (False, True)
            )
            recomputes = case.microbatches if training and case.recomputed(layer) else 0
            assert len(first) == case.microbatches, f"{place}: first passes"
            assert len(again) == recomputes, f"{place}: recomputes"
            for microbatch, rows in enumerate(first):
                expected = expected_rows(case, ranks, microbatch, layer)
                check_rows(case, rows, expected, f"{place}, microbatch {microbatch}, first pass")
            for microbatch, rows in enumerate(again):
                # live rows and dummies too repeat what the first pass took
                expected = list(first[microbatch])
                check_rows(case, rows, expected, f"{place}, microbatch {microbatch}, recompute")


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
            assert all(len(part) == case.microbatches for part in parts), where
            actual = sum(part[microbatch] for part in parts)
            assert math.isclose(actual, wanted, rel_tol=2e-5), (
                f"{where}, microbatch {microbatch}: loss {actual}, of one rank {wanted}"
            )


def check_gradients(gradients: dict[str, tuple[float, float]], where: str) -> None:
    for name, (error, largest) in gradients.items():
        assert math.isfinite(error), f"{where}: gradient of {name} is not finite"
        assert error <= 1e-6 + 1e-4 * largest, f"{where}: gradient of {name} is off by {error}"
        if "router" in name:
            assert largest > 1e-7, f"{where}: gradient of {name} is zero"
