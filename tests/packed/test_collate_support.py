"""Supports read in several runs at once: what plain lists give, and the first wrong trajectory.

Oracle: Python lists and loops.
"""

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from packhorse.packed import collate, support_checks
from packhorse.packed.collate import SupportRows, pack_support
from packhorse.packed.collate_ragged import pack_ragged_support
from packhorse.packed.support_checks import checked_support

V = 40
FIELD = "f: rollout_sample_support of trajectory"


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch):
    monkeypatch.setattr(support_checks, "_ROWS_OF_TASK", 3)
    monkeypatch.setattr(collate, "_BYTES_OF_TASK", 40)


def draw_batch(rng: random.Random) -> tuple[list, list]:
    """Rows of distinct ids, some empty, and for each a sampled id."""
    support = [
        [rng.sample(range(V), rng.randrange(6)) for _ in range(rng.randrange(7))]
        for _ in range(rng.randrange(9))
    ]
    sampled = [[rng.choice(row or [V + 3]) for row in rows] for rows in support]
    return support, sampled


def as_csr(rows: list[list[int]], dtype=np.int32) -> SupportRows:
    offsets = [0, *itertools.accumulate(map(len, rows))]
    return SupportRows(np.array([token for row in rows for token in row], dtype), np.array(offsets))


def as_array(rows: list[list[int]]) -> np.ndarray:
    """[rows, C] with -1 in some columns between the ids."""
    array = np.full((len(rows), 12), -1, dtype=np.int16, order="F")
    for at, row in enumerate(rows):
        array[at, 1 : 2 * len(row) + 1 : 2] = row
    return array


def forms(rng: random.Random, support: list) -> list:
    one_of = [as_csr, as_array, list, lambda rows: torch.from_numpy(as_array(rows).copy())]
    return [
        support, [as_csr(rows) for rows in support], [rng.choice(one_of)(rows) for rows in support],
        as_csr([row for rows in support for row in rows], np.int64),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_supports_read_in_runs_are_what_the_lists_hold(seed):
    rng = random.Random(seed)
    support, sampled = draw_batch(rng)
    rows = [row for part in support for row in part]
    width = max([1, *map(len, rows)])
    for given in forms(rng, support):
        for num_threads in (1, 2, 8):
            ids, counts, starts = checked_support("f", given, sampled, V, num_threads=num_threads)
            assert ids.dtype == np.int32
            assert ids.tolist() == [token for row in rows for token in row]
            assert counts.tolist() == [len(row) for row in rows]
            assert starts.tolist() == [0, *itertools.accumulate(map(len, support))]
        packed = pack_support(given, sampled, vocab_size=V)
        assert packed.values.tolist() == [row + [-1] * (width - len(row)) for row in rows]
        assert packed.lengths == tuple(map(len, support))
        ragged = pack_ragged_support(given, sampled, vocab_size=V)
        assert ragged.values.tolist() == [token for row in rows for token in row]
    assert not [thread for thread in threading.enumerate() if "packhorse" in thread.name]


def first_problem(rows, sampled) -> tuple[int, str] | None:
    """(row, what is wrong of it) of one trajectory, by plain loops."""
    for at, (row, token) in enumerate(zip(rows, sampled, strict=True)):
        ids = [i for i in row if i != -1]
        for i in ids:
            if not 0 <= i < V:
                return at, "is not below" if i > 0 else "is negative"
        if len(set(ids)) < len(ids):
            return at, "is repeated"
        if ids and token not in ids:
            return at, f"the sampled id {token} is not among its {len(ids)} ids"
    return None


@pytest.mark.parametrize("seed", range(80))
def test_the_first_wrong_trajectory_and_row_are_named_by_any_number_of_threads(seed):
    rng = random.Random(seed)
    support, sampled = draw_batch(rng)
    while sum(map(len, support)) < 3:
        support, sampled = draw_batch(rng)
    places = [(i, row) for i, rows in enumerate(support) for row in range(len(rows))]
    for i, row in rng.sample(places, 3):
        ids = support[i][row]
        match rng.randrange(4):
            case 0:
                ids.append(rng.choice([V, -2, 2**40]))
            case 1 if ids:
                ids.append(ids[0])
            case _:
                sampled[i][row] = V + 1
    problems = [
        (i, *found)
        for i, parts in enumerate(zip(support, sampled, strict=True))
        if (found := first_problem(*parts))
    ]
    for given in (support, [as_csr(rows, np.int64) for rows in support],
                  as_csr([row for rows in support for row in rows], np.int64)):  # fmt: skip
        messages = set()
        for num_threads in (1, 2, 8):
            if not problems:
                checked_support("f", given, sampled, V, num_threads=num_threads)
                continue
            i, row, problem = problems[0]
            with pytest.raises(ValueError, match=f"^{FIELD} {i}, row {row}: .*{problem}") as caught:
                checked_support("f", given, sampled, V, num_threads=num_threads)
            messages.add(str(caught.value))
        assert len(messages) == min(1, len(problems))


def test_a_malformed_trajectory_is_no_earlier_fault_than_a_wrong_id_before_it():
    right, wrong, malformed = [[1, 2]], [[3, 3]], [[1.5]]
    for support, message in (
        ([right, wrong, malformed], "1, row 0: id 3 is repeated"),
        ([right, right, right, right, wrong, malformed], "4, row 0: id 3 is repeated"),
    ):
        with pytest.raises(ValueError, match=f"^{FIELD} {message}"):
            checked_support("f", support, [[int(row[0][0])] for row in support], V)
    for support, i in (([right, malformed, wrong], 1), ([malformed, wrong, wrong, wrong], 0)):
        with pytest.raises(TypeError, match=rf"^{FIELD} {i}, row 0\[0\] must be an integer"):
            checked_support("f", support, [[1]] * len(support), V)
