"""Replay on several GPUs of one host, a rank on each, over NCCL.

Everything is compared as in ``test_distributed.py``, with one rank's training on the rank's own
GPU. Cases that need more GPUs than there are are skipped. Of the shims only those for a missing
Transformer Engine are installed.
"""

from __future__ import annotations

import re
import time

import pytest
import torch

from tests.distributed.cases import NCCL_CASES
from tests.distributed.checks import check
from tests.distributed.test_faults import BAD_IDS, assert_refused_together

#: until every rank has raised, a wait for one that hangs not counted out
RAISED_WITHIN_S = 30.0


def needs_gpus(count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} GPUs, there are {found}")


@pytest.mark.parametrize("name", NCCL_CASES)
def test_each_rank_on_its_gpu_routes_as_captured_and_trains_like_one_rank(name, nccl_pool):
    case = NCCL_CASES[name]
    needs_gpus(case.world)
    check(case, nccl_pool.run(name, case.world, case.timeout_s))


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        *((name, "repeated_id") for name in ("tp2-sp-full", "ep2-full", "pp2-full")),
        ("cp2-thd-full", "id_out_of_range"),
        *((name, "repeated_id") for name in ("cp2-tp2-thd-full", "ep4-full")),
    ],
)
def test_all_ranks_raise_in_time_and_the_next_schedule_is_right(name, scenario, nccl_pool):
    case = NCCL_CASES[name]
    needs_gpus(case.world)
    results = nccl_pool.run(name, case.world, case.timeout_s, scenario=scenario)
    ended = [result.pop("ended") for result in results]
    found = assert_refused_together(ended, case)
    assert re.search(BAD_IDS[scenario], found), found
    assert max(end["seconds"] for end in ended) < RAISED_WITHIN_S
    check(case, results)


def test_ranks_that_raise_in_a_forward_together_leave_nothing(nccl_pool):
    case = NCCL_CASES["ep2-full"]
    needs_gpus(case.world)
    begin = time.monotonic()
    results = nccl_pool.run(case.name, case.world, case.timeout_s, scenario="raise together")
    assert time.monotonic() - begin < case.timeout_s
    ended = [result.pop("ended") for result in results]
    assert [end["error"] for end in ended] == ["RuntimeError: a fault on purpose"] * case.world
    assert all(end["objects_left"] == [] and not end["shim_left"] for end in ended)
    check(case, results)
