"""One rank that refuses a schedule: every rank raises, and none is left in a collective.

The tests run this file twice as a program (data parallel, gloo). Each process runs the cases one
after another, an all-reduce after each as the step's first collective, and says how it ended.
"""

import contextlib
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from packhorse.replay.agreement import Agreement
from tests.megatron.two_ranks import WORLD, join, leave, run_two_ranks


def run_rank(rank: int, folder: Path) -> None:
    join(rank, folder)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    results = {name: end_of(case, rank) for name, case in CASES.items()}
    leave(results, rank, folder)


def end_of(case, rank: int) -> str:
    try:
        said = case(rank)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    dist.all_reduce(torch.ones(1))  # the ranks are still in step
    return said or "ok"


def model_and_session(**options):
    from tests.megatron.helpers import build_model, make_session

    model = build_model()
    return model, make_session(model, **options)


def batch_of(rank: int, *, bad: bool):
    """A microbatch; a bad one names an expert that is not there."""
    from tests.megatron.helpers import make_batch

    batch = make_batch(seed=rank)
    if bad:
        batch.microbatch.routes.values[2, 1, 0] = 77
    return batch


def good(rank):
    from tests.megatron.helpers import run_schedule

    model, session = model_and_session()
    run_schedule(session, model, [batch_of(rank, bad=False)])
    return f"completed={session.report().completed}"


def one_bad_microbatch(rank, **options):
    from tests.megatron.helpers import run_schedule

    model, session = model_and_session(**options)
    run_schedule(session, model, [batch_of(rank, bad=rank == 1)])


def a_group_of_its_own(rank):
    one_bad_microbatch(rank, agree=dist.new_group([0, 1], backend="gloo"))


def both_bad(rank):
    from tests.megatron.helpers import run_schedule

    model, session = model_and_session()
    run_schedule(session, model, [batch_of(rank, bad=True)])


def nothing_stays_and_the_next_schedule_runs(rank):
    from tests.megatron.helpers import assert_clean, replay_objects, run_schedule

    model, session = model_and_session()
    before = replay_objects(model)
    with pytest.raises(RuntimeError if rank == 0 else ValueError):
        run_schedule(session, model, [batch_of(rank, bad=rank == 1)])
    assert_clean(model, before)
    run_schedule(session, model, [batch_of(rank, bad=False)])
    return f"completed={session.report().completed}"


def no_agreement(rank):
    """The bad rank raises alone; nobody waits for it here, since no collective is in the step."""
    one_bad_microbatch(rank, agree=False)


def one_bad_model(rank):
    from tests.megatron.helpers import build_model, make_session

    model = build_model()
    model.config.moe_router_fusion = rank == 1
    make_session(model)


def one_bad_making(rank):
    _, session = model_and_session()
    with session.agreed():
        if rank == 0:
            raise KeyError("no reward")


def one_bad_interval(rank):
    model_and_session(sample_routes_every=-1 if rank == 0 else 0)


def sampled(session) -> bool:
    return "routes/rows" in session.tally()


def sampling_after_a_refusal(rank):
    """What no rank opened counts on none."""
    from tests.megatron.helpers import run_schedule

    model, session = model_and_session(sample_routes_every=2)
    with pytest.raises(RuntimeError if rank == 0 else ValueError):
        run_schedule(session, model, [batch_of(rank, bad=rank == 1)])
    said = []
    for _ in range(3):
        run_schedule(session, model, [batch_of(rank, bad=False)], training=False)
        said.append(sampled(session))
        for values in session.tally().values():  # the ranks have the same names and shapes
            dist.all_reduce(torch.as_tensor(values))
    return str(said)


def sampling_after_a_failure(rank):
    """What all opened counts on all, also where it fails on one."""
    from tests.megatron.helpers import run_schedule

    def fail(*_):
        if rank == 1:
            raise KeyError("in the middle")

    model, session = model_and_session(sample_routes_every=2)
    with pytest.raises(KeyError) if rank == 1 else contextlib.nullcontext():
        run_schedule(session, model, [batch_of(rank, bad=False)], before_forward=fail)
    said = []
    for _ in range(3):
        run_schedule(session, model, [batch_of(rank, bad=False)], training=False)
        said.append(sampled(session))
    return str(said)


def batch_without_rows():
    from tests.megatron.helpers import make_batch

    return make_batch((6, 4), (0, 0), missing=[True, True], loss_masks=None)


def one_rank_without_rows(rank):
    from tests.megatron.helpers import run_schedule

    model, session = model_and_session()
    batch = batch_without_rows() if rank == 0 else batch_of(rank, bad=False)
    run_schedule(session, model, [batch])
    report = session.report()
    return f"{report.rows_replayed} replayed, {report.rows_live} live"


def no_rank_with_rows(rank):
    from tests.megatron.helpers import assert_clean, replay_objects, run_schedule

    model, session = model_and_session()
    before = replay_objects(model)
    try:
        run_schedule(session, model, [batch_without_rows()])
    finally:
        assert_clean(model, before)


def no_rows_and_no_agreement(rank):
    from tests.megatron.helpers import run_schedule

    model, session = model_and_session(agree=False)
    batch = batch_without_rows() if rank == 0 else batch_of(rank, bad=False)
    run_schedule(session, model, [batch])


def one_rank_without_routes(rank):
    from tests.megatron.helpers import make_batch, run_schedule

    model, session = model_and_session()
    run_schedule(session, model, [make_batch(with_routes=rank == 0)])


def cost(rank):
    agreement = Agreement()
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        with agreement.together("cost"):
            pass
        times.append(time.perf_counter() - begin)
    return f"{sorted(times)[100] * 1e6:.0f} us"


CASES = {
    case.__name__: case
    for case in (
        good,
        one_bad_microbatch,
        a_group_of_its_own,
        both_bad,
        nothing_stays_and_the_next_schedule_runs,
        no_agreement,
        one_bad_model,
        one_bad_making,
        one_bad_interval,
        sampling_after_a_refusal,
        sampling_after_a_failure,
        one_rank_without_rows,
        no_rank_with_rows,
        no_rows_and_no_agreement,
        one_rank_without_routes,
        cost,
    )
}
BAD = (
    "ValueError: ReplaySession: routes of microbatch 0, trajectory 0, row 2, captured layer 1:"
    " expert 77 is not below num_experts=8"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    return run_two_ranks(__file__, tmp_path_factory.mktemp("agreement"))


@pytest.mark.parametrize("case", ["good", "nothing_stays_and_the_next_schedule_runs"])
def test_ranks_that_agree_run_the_schedule(case, results):
    assert [rank[case] for rank in results] == ["completed=True"] * WORLD


@pytest.mark.parametrize("case", ["one_bad_microbatch", "a_group_of_its_own"])
def test_a_bad_microbatch_on_one_rank_raises_on_both(case, results):
    assert results[1][case] == BAD
    assert results[0][case] == f"RuntimeError: ReplaySession.schedule: rank 1 failed: {BAD}"


def test_ranks_that_both_fail_raise_their_own_errors(results):
    assert [rank["both_bad"] for rank in results] == [BAD, BAD]


def test_without_agreement_the_others_go_on(results):
    assert [rank["no_agreement"] for rank in results] == ["ok", BAD]


def test_a_model_that_one_rank_refuses_raises_on_both(results):
    assert results[1]["one_bad_model"].startswith("ValueError: ReplaySession: router decoder")
    assert results[0]["one_bad_model"] == (
        f"RuntimeError: ReplaySession: rank 1 failed: {results[1]['one_bad_model']}"
    )


def test_work_of_the_users_own_is_agreed_on(results):
    assert results[0]["one_bad_making"] == "KeyError: 'no reward'"
    assert results[1]["one_bad_making"] == (
        "RuntimeError: ReplaySession.agreed: rank 0 failed: KeyError: 'no reward'"
    )


def test_a_bad_argument_of_one_rank_raises_on_both(results):
    said = "ValueError: ReplaySession: sample_routes_every must be an integer >= 0, got -1"
    assert results[0]["one_bad_interval"] == said
    assert results[1]["one_bad_interval"] == f"RuntimeError: ReplaySession: rank 0 failed: {said}"


def test_a_schedule_that_was_refused_uses_up_no_sample_on_any_rank(results):
    assert [r["sampling_after_a_refusal"] for r in results] == ["[True, False, True]"] * WORLD


def test_a_schedule_that_failed_on_one_rank_counts_on_all(results):
    assert [r["sampling_after_a_failure"] for r in results] == ["[False, True, False]"] * WORLD


def test_a_rank_whose_trajectories_are_all_missing_runs_live_beside_one_that_replays(results):
    assert [r["one_rank_without_rows"] for r in results] == [
        "0 replayed, 10 live",
        "8 replayed, 0 live",
    ]


def test_replay_without_a_row_on_any_rank_is_an_error_on_all(results):
    said = (
        "ValueError: ReplaySession.schedule: replay was asked for, but no trajectory has any route"
        " row"
    )
    assert [r["no_rank_with_rows"] for r in results] == [said] * WORLD
    assert [r["no_rows_and_no_agreement"] for r in results] == [said, "ok"]


def test_routes_on_some_ranks_only_are_an_error_on_all(results):
    for rank, start in enumerate(
        (
            "the microbatches have a routes field, those of another rank have none;",
            "the microbatches have no routes field, those of another rank have one;",
        )
    ):
        said = results[rank]["one_rank_without_routes"]
        assert said.startswith(f"ValueError: ReplaySession.schedule: {start}")


def test_agreeing_takes_no_20_milliseconds(results):
    """Wide, for a loaded machine; measured figures are in the module's docstring."""
    for rank in results:
        assert float(rank["cost"].split()[0]) < 20_000


# --- one process ----------------------------------------------------------------------------------


def test_one_rank_has_nobody_to_agree_with():
    assert Agreement(True).group is None
    assert Agreement(False).group is None
    assert Agreement(dist.new_group(backend="gloo")).group is None


@pytest.mark.parametrize("agree", [None, "gloo", 1])
def test_what_is_no_group_is_refused(agree):
    with pytest.raises(
        TypeError, match="ReplaySession: agree must be True, False or a process group, got"
    ):
        Agreement(agree)


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="this rank is not in the group given as agree"):
        Agreement(dist.GroupMember.NON_GROUP_MEMBER)


def test_a_group_without_a_host_backend_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(ValueError, match="must be a group that takes host tensors, such as gloo"):
        Agreement(dist.group.WORLD)


def test_a_world_without_a_host_backend_is_given_one_once(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options) or "host group")
    monkeypatch.setattr("packhorse.replay.agreement._of_world", None)
    assert [Agreement().group, Agreement().group] == ["host group"] * 2
    assert made == [{"backend": "gloo"}]


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
