"""Replay under Megatron's parallelisms, on CPU processes over gloo.

Every routed row of every first pass and recompute is held against ``tests/oracle.py`` and the
packed routes, masks and the tokens counted for the expert bias likewise; losses, gradients and
expert bias against ``reference.py``, one rank's training of the same weights without the package.
The cases stand in ``cases.py``, what is checked in ``checks.py``.
"""

from __future__ import annotations

import pytest

from tests.distributed.cases import CASES, ON_OLDEST
from tests.distributed.checks import check
from tests.distributed.pool import megatron_version


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.oldest) if name in ON_OLDEST else name for name in CASES],
)
def test_each_rank_routes_its_slots_as_captured_and_trains_like_one_rank(name, pool):
    case = CASES[name]
    if megatron_version() < case.since:
        pytest.skip(f"megatron-core before {case.since[0]}.{case.since[1]} has no such model")
    if megatron_version() == (0, 18) and case.mtp and case.recompute == "full":
        pytest.skip("0.18 cannot recompute MTP at all")  # its checkpoint refuses a padding mask
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
    with pytest.raises(AssertionError, match=r"tp2-sp-full, rank 1 .*expert bias counted"):
        check(case, results)


def test_a_loss_that_balances_the_live_choice_is_noticed(pool):
    case = CASES["tp2-sp-aux-and-z-loss-full"]
    results = pool.run(case.name, case.world, case.timeout_s, "live aux loss")
    with pytest.raises(AssertionError, match=r"tp2-sp-aux-and-z-loss-full, .*gradient of"):
        check(case, results)


def test_a_rank_that_raises_ends_the_case_and_is_named(pool):
    with pytest.raises(AssertionError) as raised:
        pool.run("ep2-full", 2, 120.0, "raise")
    message = str(raised.value)
    assert "ep2-full: rank 1 failed:" in message
    assert "a fault on purpose" in message


def test_a_rank_that_hangs_ends_the_case_and_the_next_one_runs(pool):
    with pytest.raises(AssertionError, match=r"pp2-none: rank \d did not answer"):
        pool.run("pp2-none", 2, 10.0, "hang")
    case = CASES["pp2-none"]
    check(case, pool.run(case.name, case.world, case.timeout_s))
