"""Packing of lengths into microbatches.

Oracle: every partition of a few lengths tried, and what holds for any partition of many.
"""

import random

import pytest

from packhorse.packed.microbatch import MicrobatchPlan, plan_by_tokens
from packhorse.packed.packing import spread


def tokens_of(plan: MicrobatchPlan, lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in ids) for ids in plan.trajectories]


def each_once(plan: MicrobatchPlan, count: int) -> bool:
    return sorted(i for ids in plan.trajectories for i in ids) == list(range(count))


def draw_lengths(rng: random.Random, most: int) -> list[int]:
    kind = rng.randrange(3)
    high = rng.randrange(1, 40)
    if kind == 0:
        return [rng.randint(1, high) for _ in range(rng.randrange(most))]
    if kind == 1:
        return [high] * rng.randrange(most)
    return [max(1, int(rng.paretovariate(1.1))) % 200 + 1 for _ in range(rng.randrange(most))]


@pytest.mark.parametrize("seed", range(150))
def test_by_tokens_fits_the_budget_with_few_microbatches_as_even_as_proven(seed):
    rng = random.Random(seed)
    lengths = draw_lengths(rng, 8)
    budget = rng.randint(max(lengths, default=1), 2 * max(lengths, default=1) + 20)
    plan = plan_by_tokens(lengths, max_tokens=budget)
    assert each_once(plan, len(lengths))
    assert all(list(ids) == sorted(ids) and ids for ids in plan.trajectories)
    loads = tokens_of(plan, lengths)
    assert loads == sorted(loads, reverse=True)
    assert max(loads, default=0) <= budget
    if not lengths:
        assert len(plan) == 0
        return
    number = len(plan)
    fewest = next(few for few in range(1, number + 1) if can_fit(lengths, budget, few))
    assert number <= (11 * fewest + 6) // 9
    best = next(load for load in range(1, budget + 1) if can_fit(lengths, load, number))
    assert max(loads) <= (4 / 3 - 1 / (3 * number)) * best + 1e-9


def can_fit(lengths: list[int], budget: int, few: int) -> bool:
    """Whether any partition into ``few`` groups fits: each trajectory into each group that can."""
    states = {(budget,) * few}
    for length in sorted(lengths, reverse=True):
        states = {
            tuple(sorted((*room[:k], room[k] - length, *room[k + 1 :])))
            for room in states
            for k in range(few)
            if room[k] >= length
        }
    return bool(states)


@pytest.mark.parametrize("seed", range(60))
def test_by_tokens_holds_for_many_trajectories(seed):
    rng = random.Random(seed)
    lengths = draw_lengths(rng, 300)
    budget = rng.randint(1, 400)
    multiple = rng.randrange(1, 5)
    plan = plan_by_tokens(lengths, max_tokens=budget, multiple=multiple)
    assert each_once(plan, len(lengths))
    assert len(plan) % multiple == 0
    for ids, synthetic in zip(plan.trajectories, plan.synthetic, strict=True):
        assert synthetic == (not ids)
        assert len(ids) <= 1 or sum(lengths[i] for i in ids) <= budget
    # no more than one in two microbatches could be saved even by cutting trajectories in pieces
    shares = sum(min(n, budget) for n in lengths) / budget
    assert len(plan) <= 2 * shares + multiple


def test_a_long_and_a_thousand_short_are_planned_at_once():
    lengths = [1000] + [1] * 10_000
    plan = plan_by_tokens(lengths, max_tokens=1000)
    assert sorted(tokens_of(plan, lengths)) == [1000] * 11
    # more than half the budget each, and a bound that leaves much room: the number is halved to
    lengths = [334] * 3000
    assert len(plan_by_tokens(lengths, max_tokens=999)) == 1500


def test_where_sorted_greedy_does_not_fit_best_fit_is_cut():
    # sorted greedy makes 5 + 4 and 5 + 3 + 3 = 11 of it; 5 + 5 and 4 + 3 + 3 fit
    lengths = [5, 5, 4, 3, 3]
    plan = plan_by_tokens(lengths, max_tokens=10)
    assert sorted(tokens_of(plan, lengths)) == [10, 10]
    assert len(plan) == 2


def test_more_groups_are_cut_from_a_packing_where_sorted_greedy_does_not_fit():
    """Full groups, one group more: sorted greedy often misses what was full, a cut never does."""
    rng = random.Random(0)
    missed = 0
    for _ in range(400):
        budget, lengths, packed = rng.randrange(25, 40), [], []
        for _ in range(rng.randrange(10, 14)):
            parts = rng.choice([2, 3, 3, 4])
            group = [budget // parts + rng.randrange(-2, 3) for _ in range(parts - 1)]
            group.append(budget - sum(group))
            packed.append(tuple(range(len(lengths), len(lengths) + parts)))
            lengths += group
        number = len(packed) + rng.randrange(3)
        groups = spread(lengths, packed, budget, number)
        assert len(groups) == number
        assert sorted(i for ids in groups for i in ids) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in ids) for ids in groups]
        assert loads == sorted(loads, reverse=True)
        assert loads[0] <= budget
        greedy = [0] * number
        for length in sorted(lengths, reverse=True):
            greedy[greedy.index(min(greedy))] += length
        missed += max(greedy) > budget and number > len(packed)
    assert missed > 3


# --- rectangles -----------------------------------------------------------------------------------


def partitions(ids: list[int]):
    """Every way to put ids into groups."""
    if not ids:
        yield []
        return
    first, rest = ids[0], ids[1:]
    for groups in partitions(rest):
        yield [[first], *groups]
        for k, group in enumerate(groups):
            yield [*groups[:k], [first, *group], *groups[k + 1 :]]


def areas(groups, lengths: list[int]) -> list[int]:
    return [len(ids) * max(lengths[i] for i in ids) for ids in groups if ids]


@pytest.mark.parametrize("seed", range(60))
def test_by_rectangles_the_fewest_microbatches_and_the_lightest_heaviest(seed):
    rng = random.Random(seed)
    lengths = draw_lengths(rng, 8)
    budget = rng.randint(1, 2 * max(lengths, default=1) + 30)
    multiple = rng.choice([1, 1, 3, 5])
    plan = plan_by_tokens(lengths, max_tokens=budget, rectangle=True, multiple=multiple)
    assert each_once(plan, len(lengths))
    assert all(list(ids) == sorted(ids) for ids in plan.trajectories)
    costs = areas(plan.trajectories, lengths)
    assert costs == sorted(costs, reverse=True)

    def legal(groups) -> bool:
        return all(
            len(ids) == 1 or len(ids) * max(lengths[i] for i in ids) <= budget for ids in groups
        )

    assert legal([ids for ids in plan.trajectories if ids])
    every = [groups for groups in partitions(list(range(len(lengths)))) if legal(groups)]
    fewest = min(map(len, every))
    assert len(plan) == -(-fewest // multiple) * multiple
    assert len(costs) == min(len(plan), len(lengths))  # none is synthetic that could be real
    best = min((max(areas(g, lengths)) for g in every if g and len(g) <= len(plan)), default=0)
    assert max(costs, default=0) == best


@pytest.mark.parametrize("seed", range(20))
def test_by_rectangles_many_trajectories_fit_and_cost_no_more_than_in_their_order(seed):
    rng = random.Random(seed)
    lengths = draw_lengths(rng, 300)
    budget = rng.randint(1, 2000)
    plan = plan_by_tokens(lengths, max_tokens=budget, rectangle=True)
    assert each_once(plan, len(lengths))
    for ids in plan.trajectories:
        assert len(ids) == 1 or len(ids) * max(lengths[i] for i in ids) <= budget
    in_order: list[list[int]] = []
    for i in range(len(lengths)):
        if in_order and areas([[*in_order[-1], i]], lengths)[0] <= budget:
            in_order[-1].append(i)
        else:
            in_order.append([i])
    assert len(plan) <= len(in_order)
    assert plan_by_tokens(lengths, max_tokens=budget, rectangle=True) == plan
