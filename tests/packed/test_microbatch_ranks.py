"""Microbatches of several ranks: as many on each, every real trajectory exactly once.

Eight ranks are threads that meet in a barrier; batches are held against their plain-Python model.
The tests run this file twice as a program for a real host all-reduce.
"""

import json
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from packhorse.packed import microbatch
from packhorse.packed.batch import Batch
from packhorse.packed.microbatch import (
    MicrobatchPlan,
    plan_by_count,
    plan_by_tokens,
    plan_ranks_by_count,
    plan_ranks_by_tokens,
)
from tests.packed.batch_model import ROUTES, SUPPORT, check, make_batch, model_of

RANKS = 8


# --- eight ranks ----------------------------------------------------------------------------------


class Meeting:
    """Ranks of one process, a thread each, that meet in an all-reduce of host integers."""

    def __init__(self, number: int) -> None:
        self.numbers: list[list[int]] = [[] for _ in range(number)]
        self.barrier = threading.Barrier(number, timeout=20)
        self.local = threading.local()

    def maxima(self, numbers: list[int]) -> list[int]:
        self.numbers[self.local.rank] = numbers
        self.barrier.wait()
        assert len({len(given) for given in self.numbers}) == 1, "different collectives"
        joined = [max(column) for column in zip(*self.numbers, strict=True)]
        self.barrier.wait()
        return joined

    def run(self, monkeypatch, function) -> list:
        """``function(rank)`` of each, or what it raised."""
        meeting = self

        class Ranks:
            def __init__(self, name, group):
                self.rank, self.maxima = meeting.local.rank, meeting.maxima

        monkeypatch.setattr(microbatch, "_Ranks", Ranks)
        results = [None] * len(self.numbers)

        def work(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class DataParallel:
    """Eight ranks with queues of trajectories; each step takes some, runs them and hands back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made = 0
        self.queues = [make_batch(0) for _ in range(RANKS)]
        self.runs: dict[str, int] = {}  # uid -> how often its rows ran
        self.expected: dict[str, dict] = {}
        self.hows = ["count", "sum", "rectangle"]  # in turn, from another one in each seed
        self.random.shuffle(self.hows)
        self.steps = 0

    def arrive(self) -> None:
        for rank in range(RANKS):
            count = self.random.choice([0, 0, 1, 3, self.random.randrange(9)])
            self.made += 1
            batch = make_batch(count, 1000 + self.made)
            self.expected |= {t["uids"]: t for t in model_of(batch)}
            self.queues[rank] = Batch.cat([self.queues[rank], batch]) if count else (
                self.queues[rank]
            )  # fmt: skip

    def shuffle(self) -> None:
        for rank, queue in enumerate(self.queues):
            self.random.shuffle(order := list(range(len(queue))))
            self.queues[rank] = queue[order]

    def move(self) -> None:
        """Trajectories of one rank become another's."""
        source, target = self.random.sample(range(RANKS), 2)
        queue = self.queues[source]
        at = self.random.randrange(len(queue) + 1)
        self.queues[target] = Batch.cat([self.queues[target], queue[at:]])
        self.queues[source] = queue[:at]

    def run(self, monkeypatch) -> None:
        take = [queue[: self.random.randrange(len(queue) + 1)] for queue in self.queues]
        self.queues = [q[len(t) :] for q, t in zip(self.queues, take, strict=True)]
        plans = self.plans(take, monkeypatch)
        assert len({len(plan) for plan in plans}) == 1, "a rank would wait for ever"
        for batch, plan in zip(take, plans, strict=True):
            outputs = []
            for part in plan.split(batch):
                assert len(part) > 0
                model = model_of(part)
                for trajectory in model:
                    uid = trajectory["uids"]
                    if uid is None:
                        assert trajectory["attention_mask"] == [1, 0, 0]
                        assert not any(trajectory["loss_mask"])
                        assert trajectory[ROUTES] == trajectory[SUPPORT] == []
                    else:
                        assert trajectory == self.expected[uid]
                        self.runs[uid] = self.runs.get(uid, 0) + 1
                outputs.append(part["token_ids"].sum(1) + part["rewards"])
            if len(plan):
                back = plan.restore(outputs)
                assert back.tolist() == (batch["token_ids"].sum(1) + batch["rewards"]).tolist()
                names = [name for name in batch.fields if name != "images" or len(batch)]
                parts = [part.select(names) for part in plan.split(batch)]
                check(plan.restore(parts), model_of(batch.select(names)), batch.select(names))
            self.check_sizes(plan)

    def plans(self, take: list[Batch], monkeypatch) -> list[MicrobatchPlan]:
        how = self.hows[self.steps % len(self.hows)]
        self.steps += 1
        self.equal = self.random.random() < 0.5 and how != "rectangle"
        options = {"equal_sizes": self.equal, "multiple": self.random.choice([1, 1, 2, 4])}
        self.multiple = options["multiple"]
        counts = [len(batch) for batch in take]
        if how == "count":
            options["microbatch_size"] = self.random.randrange(1, 5)
            given = plan_ranks_by_count(counts, **options)
            joined = Meeting(RANKS).run(
                monkeypatch, lambda rank: plan_by_count(counts[rank], group=0, **options)
            )
        else:
            options["max_tokens"] = budget = self.random.randrange(1, 60)
            options["rectangle"] = how == "rectangle"
            lengths = [[self.random.randrange(1, 30) for _ in batch] for batch in take]
            given = plan_ranks_by_tokens(lengths, **options)
            joined = Meeting(RANKS).run(
                monkeypatch, lambda rank: plan_by_tokens(lengths[rank], group=0, **options)
            )
            for own, plan in zip(lengths, given, strict=True):
                for ids in plan.trajectories:
                    cost = sum(own[i] for i in ids)
                    if how == "rectangle":
                        cost = len(ids) * max((own[i] for i in ids), default=0)
                    assert len(ids) < 2 or cost <= budget
        assert list(given) == joined
        sizes = {size for plan in given for size in plan.sizes}
        assert not self.equal or len(sizes) <= 1
        return joined

    def check_sizes(self, plan: MicrobatchPlan) -> None:
        assert len(plan) % self.multiple == 0
        if not self.equal:
            assert all(n == (not t) for t, n in zip(plan.trajectories, plan.synthetic, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_eight_ranks_run_every_real_trajectory_exactly_once(seed, monkeypatch):
    ranks = DataParallel(seed)
    for _ in range(6):
        ranks.arrive()
        ranks.random.choice([ranks.shuffle, ranks.move])()
        ranks.run(monkeypatch)
    rest = [uid for queue in ranks.queues for uid in queue["uids"]]
    assert len(rest) == len(set(rest))
    assert set(ranks.runs.values()) <= {1}
    assert ranks.runs.keys() | set(rest) == ranks.expected.keys()
    assert not ranks.runs.keys() & set(rest)


def test_a_rank_that_fails_leaves_none_waiting(monkeypatch):
    lengths = [[1, 2], [3], [0], [1]]
    results = Meeting(4).run(
        monkeypatch,
        lambda rank: plan_by_tokens(lengths[rank], max_tokens=5, equal_sizes=True, group=0),
    )
    assert isinstance(results[2], ValueError)
    assert str(results[2]) == "plan_by_tokens: length of trajectory 0 must be positive, got 0"
    for rank in (0, 1, 3):
        assert isinstance(results[rank], RuntimeError)
        assert str(results[rank]) == (
            "plan_by_tokens: rank 2 of the group failed; its own error says why"
        )


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("max_tokens", [{"max_tokens": 5}, {"max_tokens": 6}]),
        ("equal_sizes", [{"max_tokens": 5, "equal_sizes": True}, {"max_tokens": 5}]),
        ("multiple", [{"max_tokens": 5, "multiple": 2}, {"max_tokens": 5}]),
        ("rectangle", [{"max_tokens": 5, "rectangle": True}, {"max_tokens": 5}]),
        ("overlong", [{"max_tokens": 5, "overlong": "refuse"}, {"max_tokens": 5}]),
    ],
)
def test_settings_that_differ_between_ranks_are_refused_on_each(what, options, monkeypatch):
    results = Meeting(2).run(
        monkeypatch, lambda rank: plan_by_tokens([1, 2], group=0, **options[rank])
    )
    for result in results:
        assert isinstance(result, ValueError)
        assert str(result).startswith(f"plan_by_tokens: {what} must be the same on all ranks, here")


def test_one_rank_by_count_and_one_by_tokens_are_refused(monkeypatch):
    results = Meeting(2).run(
        monkeypatch,
        lambda rank: (
            plan_by_tokens([1, 2], max_tokens=2, group=0)
            if rank
            else plan_by_count(2, microbatch_size=2, group=0)
        ),
    )
    assert all("planning by tokens must be the same on all" in str(result) for result in results)


# --- a real all-reduce ----------------------------------------------------------------------------


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, world_size=2, rank=rank)
    group = dist.new_group(backend="gloo")
    alone = [dist.new_group([i], backend="gloo") for i in (0, 1)]
    mine, other = alone[rank], alone[1 - rank]
    lengths = [[4, 4, 4, 4, 1], [5]][rank]
    plans = [
        plan_by_count(len(lengths), microbatch_size=2, group=group),
        plan_by_tokens(lengths, max_tokens=5, equal_sizes=True, group=group),
        plan_by_tokens(lengths, max_tokens=5, group=mine),
    ]
    results = [[plan.trajectories, plan.synthetic] for plan in plans]
    for case in (
        lambda: plan_by_count(-rank, microbatch_size=1, group=group),
        lambda: plan_by_count(1, microbatch_size=1, group=other),
        lambda: plan_by_count(1, microbatch_size=1, group="gloo"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            case()
        results.append(str(caught.value))
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_join_their_numbers_over_gloo(tmp_path):
    from tests.megatron.two_ranks import run_two_ranks

    first, second = run_two_ranks(__file__, tmp_path)
    assert first[0] == [[[0, 1], [2, 3], [4]], [0, 0, 1]]
    assert second[0] == [[[0], [], []], [1, 2, 2]]
    (trajectories, synthetic), own = first[1], [4, 4, 4, 4, 1]
    assert len(trajectories) == len(second[1][0]) == 4
    assert sorted(sum(own[i] for i in ids) for ids in trajectories) == [4, 4, 4, 5]
    assert sorted(synthetic) == [0, 1, 1, 1]
    assert second[1] == [[[0], [], [], []], [1, 2, 2, 2]]
    assert (len(first[2][0]), len(second[2][0])) == (4, 1)
    assert first[3] == "plan_by_count: rank 1 of the group failed; its own error says why"
    assert second[3] == "plan_by_count: num_trajectories must not be negative, got -1"
    assert first[4] == second[4] == "plan_by_count: this rank is not in the group"
    message = "plan_by_count: group must be a torch.distributed process group, got str"
    assert first[5] == second[5] == message


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
