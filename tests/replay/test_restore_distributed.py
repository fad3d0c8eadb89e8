"""TokenLayout.restore over a context-parallel group: two processes, gloo.

Oracle: ``tests/oracle.py``. The tests run this file twice as a program; each process restores
every case with its own values alone and leaves what it got for the tests to compare.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.replay.layout import TokenLayout
from tests.oracle import OracleLayout
from tests.ranks import results_of_ranks

CP_SIZE = 2
LAYOUTS = {
    f"{format}-{cp_order}": {
        "lengths": [5, 1, 6],
        "format": format,
        "cp_size": CP_SIZE,
        "cp_order": cp_order,
        "batch_width": 8,
        "first_columns": [3, 0, 1],
    }
    for format in ("thd", "bshd")
    for cp_order in ("zigzag", "contiguous")
}
TRAILING = {"float64": (3,), "bfloat16": (), "int64": (2,)}


def values_of_rank(name: str, dtype: str, cp_rank: int) -> torch.Tensor:
    num_tokens = len(OracleLayout(**LAYOUTS[name]).slots(cp_rank))
    generator = torch.Generator().manual_seed(cp_rank)
    shape = (num_tokens, *TRAILING[dtype])
    return torch.randint(1, 100, shape, generator=generator).to(getattr(torch, dtype))


def loss_of(restored: torch.Tensor) -> torch.Tensor:
    """One number of the whole batch; every cell weighs differently, and squares: values matter."""
    weights = torch.arange(1, 1 + restored.numel(), dtype=restored.dtype).view(restored.shape)
    return (weights * restored**2).sum()


def run_rank(cp_rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", world_size=CP_SIZE, rank=cp_rank
    )
    group = torch.distributed.group.WORLD
    results = {}
    for name, arguments in LAYOUTS.items():
        layout = TokenLayout.build(**arguments, cp_rank=cp_rank, cp_group=group)
        for dtype in TRAILING:
            values = values_of_rank(name, dtype, cp_rank)
            gradient = None
            if dtype == "float64":
                values.requires_grad_()
                restored = layout.restore(values, -1)
                (gradient,) = torch.autograd.grad(loss_of(restored), values)
            else:
                restored = layout.restore(values, -1)
            results[name, dtype] = restored.detach(), gradient
    torch.save(results, folder / f"rank{cp_rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """(restored, gradient) of each rank, for every layout and dtype."""
    return results_of_ranks(__file__, CP_SIZE, tmp_path_factory.mktemp("restore"))


@pytest.mark.parametrize("dtype", TRAILING)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_restores_the_whole_batch(name, dtype, results):
    by_rank = [values_of_rank(name, dtype, cp_rank) for cp_rank in range(CP_SIZE)]
    arrays = [values.double().numpy() for values in by_rank]
    expected = torch.from_numpy(OracleLayout(**LAYOUTS[name]).restore(arrays, -1))
    alone = TokenLayout.build(**LAYOUTS[name]).restore_gathered(by_rank, -1)
    for rank_results in results:
        restored = rank_results[name, dtype][0]
        assert torch.equal(restored, expected.to(restored.dtype))
        assert torch.equal(restored, alone)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_gets_its_own_slice_of_one_losss_gradient(name, results):
    """All ranks compute the same loss: its gradient arrives once, not once a rank."""
    by_rank = [values_of_rank(name, "float64", cp_rank) for cp_rank in range(CP_SIZE)]
    counts = [len(values) for values in by_rank]
    numbers = np.arange(1, 1 + sum(counts))  # where does each token go?
    placed = OracleLayout(**LAYOUTS[name]).restore(np.split(numbers, np.cumsum(counts)[:-1]))
    flat = torch.cat(by_rank)
    expected = torch.zeros_like(flat)
    weights = np.arange(1, 1 + placed.size * 3).reshape(*placed.shape, 3)
    for row, column in np.argwhere(placed > 0):
        token = placed[row, column] - 1
        expected[token] = 2 * torch.from_numpy(weights[row, column]) * flat[token]
    assert expected.any()
    for rank_results, wanted in zip(results, expected.split(counts), strict=True):
        assert torch.equal(rank_results[name, "float64"][1], wanted)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
