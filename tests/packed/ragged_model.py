"""Ragged batches for tests, and what they hold as lists."""

import itertools
import random

import torch

from packhorse.packed.ragged import PackedRagged

Model = list[list[list[int]]]

#: rows of several widths, an empty row first and last, segments of no rows
MODEL: Model = [[[], [7, 9], [4]], [], [[1, 2, 3]], [[], []], [[8], [5, 6, 7, 0], []]]


def build(model: Model, device: torch.device | str = "cpu") -> PackedRagged:
    rows = [row for segment in model for row in segment]
    ids = [token for row in rows for token in row]
    return PackedRagged.from_lengths(
        torch.tensor(ids, dtype=torch.int32).to(device), [*map(len, rows)], [*map(len, model)]
    )


def lists_of(ids: torch.Tensor, row_offsets: torch.Tensor) -> list[list[int]]:
    flat = ids.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(row_offsets.tolist())]


def as_lists(packed: PackedRagged) -> Model:
    """The segments as lists, read from the three tensors alone."""
    rows = lists_of(packed.values, packed.row_offsets)
    return [rows[a:b] for a, b in itertools.pairwise(packed.cu_seqlens.tolist())]


def check(packed: PackedRagged, model: Model) -> None:
    """``packed`` holds ``model``, and all its views of itself agree."""
    assert as_lists(packed) == model
    assert [lists_of(*segment) for segment in packed] == model
    rows = [row for segment in model for row in segment]
    assert packed.lengths == tuple(map(len, model))
    assert packed.offsets == tuple(packed.cu_seqlens.tolist()) == tuple(packed.bounds.tolist())
    assert packed.widths.tolist() == list(map(len, rows))
    assert (packed.num_rows, packed.num_ids) == (len(rows), sum(map(len, rows)))
    assert packed.max_width == max(map(len, rows), default=0)
    assert packed.max_seqlen == max(map(len, model), default=0)
    assert len(packed) == len(model)
    assert packed.values.dtype == packed.cu_seqlens.dtype == packed.dtype == torch.int32
    assert packed.row_offsets.dtype == torch.int64
    assert packed.row_offsets.is_contiguous()
    assert packed.cu_seqlens.is_contiguous()
    assert packed.values.device == packed.row_offsets.device == packed.cu_seqlens.device
    assert packed.row_offsets[0] == packed.cu_seqlens[0] == 0
    assert packed.row_offsets[-1] == packed.num_ids == packed.values.shape[0]


def random_model(rng: random.Random, most: int = 5) -> Model:
    def row() -> list[int]:
        return [rng.randrange(50) for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 9]))]

    return [[row() for _ in range(rng.randrange(4))] for _ in range(rng.randrange(most + 1))]
