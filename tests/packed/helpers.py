"""Packed tensors for tests, and what they hold as lists."""

import itertools
import math
from typing import Any

import pytest
import torch

from packhorse.packed.tensor import PackedTensor

KINDS = [
    pytest.param(torch.uint8, (3, 2), id="routes"),
    pytest.param(torch.int32, (4,), id="support"),
    pytest.param(torch.float32, (), id="logprobs"),
    pytest.param(torch.bfloat16, (2, 0), id="no-columns"),
    pytest.param(torch.bool, (1,), id="flags"),
]


def make_rows(num_rows: int, dtype: torch.dtype, row_shape: tuple[int, ...]) -> torch.Tensor:
    """Rows whose elements count up, so that a misplaced one shows."""
    count = torch.arange(num_rows * math.prod(row_shape)).reshape(num_rows, *row_shape)
    return (count % 2 if dtype == torch.bool else count % 120 + 1).to(dtype)


def make_packed(lengths, dtype=torch.int32, row_shape=(2,), device="cpu") -> PackedTensor:
    values = make_rows(sum(lengths), dtype, row_shape).to(device)
    return PackedTensor.from_lengths(values, lengths)


def as_lists(packed: PackedTensor) -> list[list[Any]]:
    """The segments as lists, read from values and cu_seqlens alone."""
    rows, ends = packed.values.tolist(), packed.cu_seqlens.tolist()
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def check(packed: PackedTensor, model: list[list[Any]], like: PackedTensor) -> None:
    """``packed`` holds the segments of ``model``, and all its views of itself agree."""
    assert as_lists(packed) == model
    assert [segment.tolist() for segment in packed] == model
    assert packed.lengths == tuple(len(segment) for segment in model)
    assert packed.offsets == tuple(packed.cu_seqlens.tolist())
    assert packed.offsets[0] == 0
    assert packed.offsets[-1] == packed.num_rows == packed.values.shape[0]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.is_contiguous()
    assert packed.cu_seqlens.device == packed.values.device == packed.device == like.device
    assert (packed.dtype, packed.row_shape) == (like.dtype, like.row_shape)
    assert len(packed) == len(model)
    assert packed.max_seqlen == max(map(len, model), default=0)
