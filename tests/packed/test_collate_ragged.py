"""Sampling supports of an engine to ragged rows.

Oracle: the lists that the forms were made of; and ``pack_support``, whose checks are its own.
"""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.packed.collate import SupportRows, pack_support
from packhorse.packed.collate_ragged import pack_ragged_support
from packhorse.packed.ragged import PackedRagged
from tests.packed.ragged_model import check


def test_a_trajectory_without_response_tokens_joins_others():
    support = [[], [[3, 1], [2]], np.empty((0, 4), dtype=np.int32)]
    packed = pack_ragged_support(support, [[], [1, 2], []], vocab_size=4)
    check(packed, [[], [[3, 1], [2]], []])
    assert packed[0].token_ids.shape == (0,)
    assert packed[0].row_offsets.tolist() == [0]
    assert packed.to_padded(4)[0].shape == (0, 4)


def test_observation_rows_of_an_engine_become_empty():
    support = [[[8, 2], [-1, -1], [5, -1]], [[], [9]]]
    check(
        pack_ragged_support(support, [[2, 0, 5], [1, 9]], vocab_size=10),
        [[[8, 2], [], [5]], [[], [9]]],
    )


@pytest.mark.parametrize("seed", range(10))
def test_every_form_of_an_engine_s_rows_packs_alike(seed):
    rng = random.Random(seed)
    model, sampled = [], []
    for _ in range(rng.randrange(5)):
        rows = [rng.sample(range(30), rng.randrange(6)) for _ in range(rng.randrange(5))]
        model.append(rows)
        sampled.append([rng.choice(row) if row else rng.randrange(30) for row in rows])

    def padded(rows: list[list[int]]) -> np.ndarray:
        array = np.full((len(rows), 6), -1, dtype=np.int16)
        for row, ids in zip(array, rows, strict=True):
            row[: len(ids)] = ids
        return array

    def csr(rows: list[list[int]]) -> SupportRows:
        offsets = [0, *itertools.accumulate(map(len, rows))]
        ids = np.array([token for row in rows for token in row], dtype=np.int32)
        return SupportRows(ids, np.array(offsets))

    forms: list[Any] = [
        model, [padded(rows) for rows in model],
        [torch.from_numpy(padded(rows).copy(order="F")) for rows in model],
        [csr(rows) for rows in model], csr([row for rows in model for row in rows]),
        [rng.choice([padded, csr, list])(rows) for rows in model],
    ]  # fmt: skip
    for support in forms:
        packed = pack_ragged_support(support, sampled, vocab_size=30)
        check(packed, model)
        assert packed.to_padded().equal(pack_support(support, sampled, vocab_size=30))
        assert PackedRagged.from_padded(pack_support(support, sampled, vocab_size=30)) == packed


def test_a_row_of_the_whole_vocabulary_costs_its_own_ids_only():
    vocabulary = 50_000
    support = [[list(range(vocabulary)), *[[5]] * 30_000]]
    packed = pack_ragged_support(support, [[3, *[5] * 30_000]], vocab_size=vocabulary)
    assert packed.num_ids == vocabulary + 30_000
    with pytest.raises(ValueError, match="the widest is trajectory 0, row 0"):
        packed.to_padded()


@pytest.mark.parametrize(
    ("support", "sampled", "error", "message"),
    [
        ([[[1, 9]]], [[1]], ValueError, "trajectory 0, row 0: id 9 is not below vocab_size=9"),
        ([[[1]], [[2], [3, -2]]], [[1], [2, 3]], ValueError, "trajectory 1, row 1: id -2 is neg"),
        ([[], [[2, 4, 2]]], [[], [2]], ValueError, "trajectory 1, row 0: id 2 is repeated"),
        ([[[1]], [[], [2, 3]]], [[1], [0, 4]], ValueError,
         "trajectory 1, row 1: the sampled id 4 is not among its 2 ids"),
        ([[[1]], [[2]]], [[1], [2, 3]], ValueError, "trajectory 1 has 1 rows for 2 response tok"),
        ([[[1]]], [[1], [2]], ValueError, "has 1 trajectories, sampled_ids has 2"),
        ([[[1]], None], [[1], [2]], TypeError, "trajectory 1 must be a sequence of rows"),
        ([[[1.5]]], [[1]], TypeError, "trajectory 0, row 0"),
        ([np.zeros((1, 1))], [[0]], TypeError, "trajectory 0 must hold integers"),
        ([torch.zeros(1, 1, dtype=torch.int32, device="meta")], [[0]], TypeError,
         "trajectory 0 is on meta"),
        (SupportRows(np.array([1]), np.array([0, 2])), [[1]], ValueError, "row_offsets must rise"),
        (SupportRows(np.array([1]), np.array([0, 1])), [[1], [2]], ValueError, "has 1 rows for 2"),
    ],
)  # fmt: skip
def test_packing_rejects(support, sampled, error, message):
    with pytest.raises(error, match=f"^pack_ragged_support: rollout_sample_support.*{message}"):
        pack_ragged_support(support, sampled, vocab_size=9)


def test_packing_rejects_its_other_arguments():
    for sampled, vocab_size, error, message in (
        (None, 9, TypeError, "sampled_ids must be a sequence"),
        ("a", 9, TypeError, "sampled_ids must be a sequence"),
        ([["a"]], 9, TypeError, r"sampled_ids of trajectory 0\[0\]"),
        ([[1]], 0, ValueError, "vocab_size must be positive"),
        ([[1]], 2**31, ValueError, "do not fit int32"),
    ):
        with pytest.raises(error, match=f"^pack_ragged_support: .*{message}"):
            pack_ragged_support([[[1]]], sampled, vocab_size=vocab_size)
