"""What one rank does wrong: the others hear of it before they wait, and the next schedule is right.

Every scenario ends with the whole case, compared as in ``test_distributed.py``; each is bounded by
the pool's time, so that a rank left in a collective fails its test.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed.case import Case
from tests.distributed.cases import CASES
from tests.distributed.checks import check
from tests.distributed.faults import GROUP_TIMEOUT_S

BAD_IDS = {
    "repeated_id": r"row 2, captured layer 1: experts \[3, 3\] repeat",
    "id_out_of_range": r"row 2, captured layer 1: expert 77 is not below num_experts=8",
}
REFUSALS = [
    *(
        (name, scenario, message)
        for name in ("tp2-sp-full", "ep2-full", "pp2-full", "cp2-thd-full")
        for scenario, message in BAD_IDS.items()
    ),
    ("ep2-full", "missing_field", r"microbatch 1 has no routes field"),
    ("pp2-vpp2-full", "missing_field", None),
    ("tp2-sp-full", "layout_of_another_rank", r"tp_rank=0, this process is tp rank 1"),
]


def run(pool, name, scenario):
    case = CASES[name]
    results = pool.run(name, case.world, case.timeout_s, scenario=scenario)
    ended = [result.pop("ended") for result in results]
    for end in ended:
        assert end["objects_left"] == []
        assert not end["shim_left"]
    return results, ended


@pytest.mark.parametrize(
    ("name", "scenario", "message"),
    [
        pytest.param(
            *refusal,
            id="-".join(refusal[:2]),
            marks=[pytest.mark.oldest] if refusal[0] == "ep2-full" else [],
        )
        for refusal in REFUSALS
    ],
)
def test_all_ranks_refuse_before_the_first_forward_and_the_next_schedule_is_right(
    name, scenario, message, pool
):
    case = CASES[name]
    results, ended = run(pool, name, scenario)
    if message is None:  # every rank sees it by itself
        assert all(end["calls"] == 0 for end in ended)
        assert all(end["error"].startswith("ValueError: ReplaySession.schedule: ") for end in ended)
    else:
        found = assert_refused_together(ended, case)
        assert re.search(message, found), found
    check(case, results)


def assert_refused_together(ended: list[dict[str, Any]], case: Case) -> str:
    """Before the first forward the last rank raised and the others name it; returns its error."""
    *others, last = ended
    for end in ended:
        assert end["calls"] == 0
        assert end["objects_left"] == []
        assert not end["shim_left"]
    assert last["error"].startswith("ValueError: ReplaySession")
    (found,) = {end["error"].split(": ValueError: ")[-1] for end in others}
    assert last["error"] == f"ValueError: {found}"
    for end in others:
        assert end["error"].startswith(
            f"RuntimeError: ReplaySession.schedule: rank {case.world - 1} failed: ValueError: "
        )
    return found


@pytest.mark.parametrize(
    "name", [pytest.param("ep2-full", marks=pytest.mark.oldest), "tp2-sp-full", "cp2-thd-full"]
)
def test_all_ranks_that_raise_in_a_forward_leave_nothing_and_the_session_goes_on(name, pool):
    case = CASES[name]
    results, ended = run(pool, name, "raise together")
    assert [end["error"] for end in ended] == ["RuntimeError: a fault on purpose"] * case.world
    assert all(end["calls"] > 0 for end in ended)
    check(case, results)


@pytest.mark.parametrize("name", ["pp2-full", "ep2-full"])
def test_a_rank_that_raises_in_a_forward_leaves_others_to_their_timeout_with_clean_sessions(
    name, pool
):
    """They wait in a collective: only the group's own timeout ends that. On new groups all is
    right again."""
    case = CASES[name]
    results, ended = run(pool, name, "raise alone")
    *others, last = ended
    assert last["error"] == "RuntimeError: a fault on purpose"
    for end in others:
        assert end["error"].startswith(("RuntimeError", "DistBackendError"))
        assert "fault on purpose" not in end["error"]
        assert end["seconds"] < 3 * GROUP_TIMEOUT_S
    check(case, results)


@pytest.mark.oldest
def test_a_router_that_never_asked_is_named_on_its_rank_and_no_rank_hangs(pool):
    case = CASES["ep2-full"]
    results, (first, last) = run(pool, case.name, "never asked")
    assert first["error"] is None
    assert last["error"] == (
        "ValueError: ReplaySession: router decoder.layers.1.mlp.router of chunk 0 was never asked"
        " for its routes in microbatch 1: its forward did not run, or ran without consulting replay"
    )
    check(case, results)
