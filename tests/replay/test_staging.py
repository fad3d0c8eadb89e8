"""Tables made of host integers arrive as they were, however far the device is behind."""

import gc
import threading

import numpy as np
import pytest
import torch

from packhorse import TokenLayout
from packhorse.replay import staging
from packhorse.replay.staging import to_device


def tables(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return tuple(generator.integers(-5, 2**31, shape) for shape in ((size,), (3, size)))


def test_tables_share_one_copy(device):
    placed = to_device(tables(0, 5), torch.device(device))
    assert [t.shape for t in placed] == [(5,), (3, 5)]
    assert placed[0].untyped_storage().data_ptr() == placed[1].untyped_storage().data_ptr()
    for t, table in zip(placed, tables(0, 5), strict=True):
        assert t.dtype == torch.int32
        assert t.tolist() == table.tolist()


def test_empty_tables(device):
    (placed,) = to_device([np.zeros((3, 0), np.int64)], torch.device(device))
    assert placed.shape == (3, 0)


def send(seeds: range, sizes: list[int]) -> list[tuple[int, int, tuple[torch.Tensor, ...]]]:
    place = torch.device("cuda", torch.cuda.current_device())
    return [(s, n, to_device(tables(s, n), place)) for s in seeds for n in sizes]


def check(sent) -> None:
    for seed, size, placed in sent:
        for t, table in zip(placed, tables(seed, size), strict=True):
            assert t.cpu().tolist() == table.tolist()


@pytest.mark.parametrize("sizes", [[5], [1000], [3, 4000, 20000]], ids=str)
def test_nothing_in_flight_is_overwritten(cuda, sizes, no_host_sync):
    """The device sleeps while more tables are sent than the pinned memory holds."""
    send(range(2), sizes)
    with no_host_sync():
        torch.cuda._sleep(200_000_000)  # cycles, about a tenth of a second
        sent = send(range(120), sizes)
    check(sent)


def test_streams_and_threads_have_memory_of_their_own(cuda):
    results = {}

    def work(name: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            results[name] = send(range(name * 100, name * 100 + 40), [700])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sent in results.values():
        check(sent)
    assert len(results) == 4


def test_a_thread_may_end_before_its_tables_were_read(cuda):
    results = []

    def work() -> None:
        torch.cuda._sleep(100_000_000)
        results.append(send(range(5), [700]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    for _ in range(64):  # would be given the memory that is read still
        torch.empty((32, 1024), dtype=torch.int32, pin_memory=True).fill_(-7)
    check(results[0])


def test_pinned_memory_is_used_again(cuda):
    place = torch.device("cuda", torch.cuda.current_device())
    seen = set()
    for _ in range(10):
        for _ in range(20):
            seen.add(staging.staged(500, place).host.data_ptr())
        torch.cuda.synchronize()
    assert len(seen) <= staging._PARTS * staging._SLOTS_PER_PART


def test_a_captured_stream_is_refused(cuda):
    layout = TokenLayout.build([5, 3], device=cuda)
    layout.route_row_ids([4, 3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="StaticLayout"):
        layout.route_row_ids([4, 3])
