"""pull_table: host integers reach the device by a kernel that reads pinned memory.

The tests of what sends tables (``tests/replay/test_staging.py``) hold it to its stream order.
"""

import pytest
import torch

from packhorse.kernels.tables import _BLOCK, pull_table
from tests.conftest import INTERPRET


def pinned(size: int, device: str) -> torch.Tensor:
    host = torch.arange(7, 7 + size, dtype=torch.int32) * 65_537
    return host.pin_memory() if device == "cuda" else host


@pytest.mark.parametrize("size", [1, 3, _BLOCK - 1, _BLOCK, _BLOCK + 1, 16384])
def test_the_first_integers_arrive_and_nothing_beside_them(size, device):
    if device == "cpu" and not INTERPRET:
        pytest.skip("a table on the CPU is not sent")
    host = pinned(size + 5, device)
    whole = torch.full((size + 9,), -1, dtype=torch.int32, device=device)
    pull_table(whole[4 : 4 + size], host)
    assert whole.tolist() == [-1] * 4 + host[:size].tolist() + [-1] * 5


def test_memory_that_is_written_again_is_read_again(cuda):
    host, table = pinned(600, "cuda"), torch.empty(600, dtype=torch.int32, device="cuda")
    for step in range(20):
        host.fill_(step)
        pull_table(table, host)
        torch.cuda.synchronize()
        assert table.tolist() == [step] * 600


def test_a_kernel_after_it_sees_the_table(cuda, no_host_sync):
    host, table = pinned(16384, "cuda"), torch.empty(16384, dtype=torch.int32, device="cuda")
    pull_table(table, host)
    sums = []
    with no_host_sync():
        for _ in range(50):
            table.zero_()
            pull_table(table, host)
            sums.append(table.sum())
    assert {int(s) for s in sums} == {int(host.sum())}
