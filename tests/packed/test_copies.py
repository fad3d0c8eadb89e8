"""Rows copied into fresh memory.

Oracle: lists, and the rows one by one.
"""

import time

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.copies import (
    cast_rows,
    clone_rows,
    join_rows,
    repeat_rows,
    take_rows,
    take_runs,
)
from packhorse.packed.tensor import PackedTensor

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64,
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.complex64, torch.complex128,
]  # fmt: skip
ROWS = [[[1, 0], [2, 4]], [[8, 1], [0, 2]], [[4, 4], [1, 8]], [[0, 1], [2, 1]], [[8, 8], [4, 0]]]


def rows_of(values: torch.Tensor) -> list:
    wide = torch.complex128 if values.dtype.is_complex else torch.float64
    return values.cpu().to(wide).tolist()


def forms(dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """The same rows in memory of several kinds."""
    counts = torch.tensor(ROWS)
    plain = counts.to(dtype).to(device)
    wide = torch.stack([counts, counts.flip(0)], dim=-1).to(dtype).to(device)
    turned = counts.transpose(1, 2).contiguous().to(dtype).to(device)
    made = {"contiguous": plain, "strided": wide[..., 0], "transposed": turned.transpose(1, 2)}
    if dtype.is_complex:
        made["conjugate"] = plain.conj()
    if dtype.is_floating_point and dtype.itemsize > 1:
        made["with a gradient"] = plain.clone().requires_grad_()
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_lists_whatever_holds_them(dtype, device):
    for name, values in forms(dtype, device).items():
        rows = rows_of(values)
        starts, lengths = np.array([3, 0, 1]), np.array([2, 1, 3])
        for made, expected in (
            (join_rows([values, values[:0], values[2:4]]), [*rows, *rows[2:4]]),
            (join_rows([values[1:2].expand(3, -1, -1), values]), [rows[1]] * 3 + rows),
            (repeat_rows(values, 3), rows * 3),
            (repeat_rows(values, 0), []),
            (take_rows(values, np.array([4, 0, 4])), [rows[4], rows[0], rows[4]]),
            (take_rows(values, np.array([], dtype=np.int64)), []),
            (take_runs(values, starts, lengths), [*rows[3:5], rows[0], *rows[1:4]]),
            (take_runs(values, starts[:1], lengths[:1]), rows[3:5]),
            (take_runs(values, starts[:0], lengths[:0]), []),
            (clone_rows(values), rows),
        ):
            assert (made.dtype, made.device) == (values.dtype, values.device), name
            assert made.shape == (len(expected), 2, 2), name
            assert made.requires_grad == values.requires_grad, name
            assert rows_of(made.resolve_conj().detach()) == expected, name


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.float32, torch.complex128])
def test_rows_are_cast_as_torch_casts_them(dtype, device):
    for values in forms(torch.uint8, device).values():
        made = cast_rows(values, dtype)
        assert (made.dtype, made.device) == (dtype, values.device)
        assert rows_of(made) == rows_of(values)
    assert cast_rows(torch.zeros(0, 2, dtype=torch.uint8), dtype).shape == (0, 2)


def test_copies_are_private_contiguous_and_hold_no_lazy_stride():
    values = torch.arange(12.0).view(6, 2)
    for made in (clone_rows(values), clone_rows(values[::2]), join_rows([values, values]),
                 take_rows(values, np.array([1])), clone_rows(values[:0]), clone_rows(values[0, 0]),
                 join_rows([values[:0], values[:0]]), join_rows([values.T, values.T]),
                 repeat_rows(values.T, 2)):  # fmt: skip
        assert made.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
        assert made.untyped_storage().nbytes() == made.nbytes
        assert made.is_contiguous()
        assert made.reshape(-1).view(torch.uint8).numel() == made.nbytes
        made.fill_(-1)
    assert values.flatten().tolist() == list(range(12))


def test_copying_runs_and_batches_costs_about_a_copy():
    """CPU time, best of several, in turns: 1.0 to 2.4 on a busy 2-core container."""
    lengths = [300 + i % 57 for i in range(200)]
    routes = torch.zeros(sum(lengths), 48, 8, dtype=torch.uint8).add_(7)
    batch = Batch({"routes": PackedTensor.from_lengths(routes, lengths)})
    parts = batch.chunk(8)
    picked = list(range(0, 200, 2))
    half = routes[: sum(lengths[i] for i in picked)].numpy()

    def ratio(call, source: np.ndarray) -> float:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(9):
            for taken, timed in zip(times, (call, source.copy), strict=True):
                begin = time.thread_time()
                timed()
                taken.append(time.thread_time() - begin)
        return min(times[0]) / min(times[1])

    assert ratio(lambda: Batch.cat(parts), routes.numpy()) < 6
    assert ratio(lambda: batch[picked], half) < 6
    assert ratio(batch.clone, routes.numpy()) < 6
