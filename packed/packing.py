"""Host integers into groups: few within a budget, or a number of groups as even as possible.

    a group costs the sum of its tokens
    pack     at most 11/9 of the fewest groups that are possible, + 4    best-fit decreasing
    spread   the heaviest at most 4/3 - 1/(3 * groups) of the lightest possible    sorted greedy

    a group costs its size times its longest
    pack_rectangles     the fewest groups that are possible    runs of the sorted ids
    spread_rectangles   the heaviest as light as possible      the same, least budget that suffices

All are deterministic: ties go by id. Time n log n, ``pack`` log n times that, ``spread_rectangles``
log of the budget times n.

Runs of sorted ids are best since the longest id of a group fixes how many it can hold: exchanging
any of its other ids for a longer one of another group makes no group's longest longer.

Sources: R. Graham, Bounds on multiprocessing timing anomalies, 1969 (4/3); D. Johnson and others,
Worst-case performance bounds for simple one-dimensional packing algorithms, 1974 (11/9).
"""

import bisect
import heapq
from itertools import chain

_Ids = tuple[int, ...]


def pack(tokens: list[int], budget: int) -> list[_Ids]:
    """Ids 0 ... n - 1 in few groups of at most ``budget`` tokens, a longer one alone in its own.

    Args:
        tokens: of each id, at least 1.
        budget: at least 1.
    """
    alone: list[_Ids] = [(i,) for i, length in enumerate(tokens) if length > budget]
    ids = [i for i, length in enumerate(tokens) if length <= budget]
    best = _best_fit(tokens, ids, budget)
    # best fit needs at most 11/9 of the fewest groups, + 4; sorted greedy may do with less
    total, halves = sum(tokens[i] for i in ids), sum(2 * tokens[i] > budget for i in ids)
    least, most = max(-(-total // budget), halves), len(best)
    while least < most:
        number = (least + most) // 2
        groups = _greedy(tokens, ids, number)
        if _fits(tokens, groups, budget):
            best, most = groups, number
        else:
            least = number + 1
    return alone + best


def spread(tokens: list[int], packed: list[_Ids], budget: int, number: int) -> list[_Ids]:
    """The ids of ``packed`` over ``number`` groups, or as many as there are ids; heaviest first.

    None but an id alone is past the budget.

    Args:
        tokens, budget: as in ``pack``.
        packed: of ``pack``, whose single ids past the budget stay alone.
        number: at least as many as ``packed`` has.
    """
    alone = [ids for ids in packed if tokens[ids[0]] > budget]
    groups = [ids for ids in packed if tokens[ids[0]] <= budget]
    rest = list(chain.from_iterable(groups))
    wanted = min(number - len(alone), len(rest))
    even = _greedy(tokens, rest, wanted)
    if _fits(tokens, even, budget):
        groups = even
    else:  # then that is heavier than what is cut here, which stays within the budget
        heap = [(-_load(tokens, ids), ids) for ids in groups if len(ids) > 1]
        single: list[_Ids] = [ids for ids in groups if len(ids) == 1]
        heapq.heapify(heap)
        while heap and len(heap) + len(single) < wanted:
            _, ids = heapq.heappop(heap)
            for half in _greedy(tokens, list(ids), 2):
                if len(half) > 1:
                    heapq.heappush(heap, (-_load(tokens, half), half))
                else:
                    single.append(half)
        groups = single + [ids for _, ids in heap]
    return sorted(alone + groups, key=lambda ids: (-_load(tokens, ids), ids))


# --- rectangles -----------------------------------------------------------------------------------


def pack_rectangles(tokens: list[int], budget: int) -> list[_Ids]:
    """Ids 0 ... n - 1 in the fewest groups whose size times their longest is at most ``budget``.

    Args:
        tokens: of each id, at least 1; one past the budget is alone in its group.
        budget: at least 1.
    """
    return _runs(tokens, _longest_first(tokens, list(range(len(tokens)))), budget)


def spread_rectangles(tokens: list[int], budget: int, number: int) -> list[_Ids]:
    """The ids over ``number`` groups, or as many as there are ids; costliest first, which costs as
    little as is possible.

    Args:
        tokens, budget: as in ``pack_rectangles``.
        number: at least as many groups as that gives.
    """
    order = _longest_first(tokens, list(range(len(tokens))))
    least, most = max((length for length in tokens if length <= budget), default=budget), budget
    while least < most:
        middle = (least + most) // 2
        if len(_runs(tokens, order, middle)) <= number:
            most = middle
        else:
            least = middle + 1
    runs = _runs(tokens, order, most)
    single: list[_Ids] = [ids for ids in runs if len(ids) == 1]
    heap = [(-_area(tokens, ids), ids) for ids in runs if len(ids) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(single) < number:
        _, ids = heapq.heappop(heap)
        members = _longest_first(tokens, list(ids))
        for half in (members[: len(members) // 2], members[len(members) // 2 :]):
            if len(half) > 1:
                heapq.heappush(heap, (-_area(tokens, tuple(half)), tuple(sorted(half))))
            else:
                single.append(tuple(half))
    groups = single + [ids for _, ids in heap]
    return sorted(groups, key=lambda ids: (-_area(tokens, ids), ids))


def _runs(tokens: list[int], order: list[int], budget: int) -> list[_Ids]:
    """Each group holds as many of the next ids as fit; one past the budget is alone."""
    groups: list[_Ids] = []
    start = 0
    while start < len(order):
        size = max(budget // tokens[order[start]], 1)
        groups.append(tuple(sorted(order[start : start + size])))
        start += size
    return groups


def _area(tokens: list[int], ids: _Ids) -> int:
    return len(ids) * max(tokens[i] for i in ids)


# --- parts ----------------------------------------------------------------------------------------


def _longest_first(tokens: list[int], ids: list[int]) -> list[int]:
    return sorted(ids, key=lambda i: (-tokens[i], i))


def _greedy(tokens: list[int], ids: list[int], number: int) -> list[_Ids]:
    """``number`` groups, at most as many as ids: longest first, each to the lightest group."""
    groups: list[list[int]] = [[] for _ in range(number)]
    heap = [(0, k) for k in range(number)]
    for i in _longest_first(tokens, ids):
        load, k = heap[0]
        groups[k].append(i)
        heapq.heapreplace(heap, (load + tokens[i], k))
    return [tuple(sorted(group)) for group in groups]


def _best_fit(tokens: list[int], ids: list[int], budget: int) -> list[_Ids]:
    """Longest first, each to the fullest group that has room for it, else to a new one."""
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, group), ascending
    for i in _longest_first(tokens, ids):
        at = bisect.bisect_left(room, (tokens[i], -1))
        if at < len(room):
            left, k = room.pop(at)
        else:
            left, k = budget, len(groups)
            groups.append([])
        groups[k].append(i)
        bisect.insort(room, (left - tokens[i], k))
    return [tuple(sorted(group)) for group in groups]


def _load(tokens: list[int], ids: _Ids) -> int:
    return sum(tokens[i] for i in ids)


def _fits(tokens: list[int], groups: list[_Ids], budget: int) -> bool:
    return all(_load(tokens, ids) <= budget for ids in groups)
