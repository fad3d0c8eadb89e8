"""Memory that processes share: who sees which pages, who may crash, who holds what afterwards.

Readers are processes of their own, some of which are killed. What anybody holds is read from /proc:
maps and descriptors that name the batch's token.
"""

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.transport_shared import (
    SharedBatch,
    SharedHandle,
    attach_batch,
    share_batch,
    share_parts,
)
from tests.packed.transport_helpers import (
    ROUTES,
    SUPPORT,
    chosen,
    flat,
    make_batch,
    make_ragged,
    mapping_of,
    use,
)

ROOT = Path(__file__).parents[2]


# --- readers --------------------------------------------------------------------------------------


def serve(pipe: Any) -> None:
    """A reader: runs what it is told, holds one batch, says what it sees."""
    held: list[Batch] = []
    shared: list[SharedBatch] = []

    def attach(handle: SharedHandle) -> tuple[str, str, dict]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            held[:] = [attach_batch(handle)]
        return mapping_of(held[0][ROUTES].values), mapping_of(held[0]["token_ids"]), flat(held[0])

    def read() -> dict:
        return flat(held[0])

    def operate() -> tuple[int, dict]:
        return use(held[0]), flat(attach_batch(handles[-1]))

    def write() -> None:
        held[0][ROUTES].values[0] = 9

    def drop() -> None:
        held.clear()
        gc.collect()

    def share(rows: int) -> SharedHandle:
        shared.append(share_batch(make_batch(3, rows)))
        return shared[-1].handle

    told: dict[str, Callable] = {f.__name__: f for f in (attach, read, operate, write, drop, share)}
    handles = []
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        handles += [argument for argument in arguments if isinstance(argument, SharedHandle)]
        try:
            pipe.send(told[name](*arguments))
        except Exception as error:
            pipe.send(error)


class Reader:
    def __init__(self) -> None:
        # from a server that has torch and no test's memory: each starts at once
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["packhorse.packed.transport_shared"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, *told: Any) -> Any:
        self.pipe.send(told)
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture(scope="module")
def start():
    """Starts readers; those that live are ended at the end."""
    started = []

    def start_one() -> Reader:
        started.append(Reader())
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield start_one
    for reader in started:
        reader.pipe.close()
        reader.process.join(30)


@pytest.fixture(scope="module")
def readers(start) -> list[Reader]:
    return [start(), start()]


def holders(token: str) -> list[str]:
    """Every mapping and descriptor of any process that is of this batch."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [line for line in (folder / "maps").read_text().split("\n") if token in line]
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found += [str(link)] if token in os.readlink(link) else []
    return found


def files_held() -> int:
    """Descriptors of this process that are shared batches."""
    held = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            held += os.readlink(link).startswith("/memfd:packhorse-")
    return held


def wait_for_no_holder(token: str) -> None:
    for _ in range(100):
        if not holders(token):
            return
        time.sleep(0.1)
    pytest.fail(f"still held: {holders(token)}")


# --- pages ----------------------------------------------------------------------------------------


def test_readers_have_the_pages_that_the_owner_wrote(readers):
    batch = make_batch(5, 300)
    names = sorted(os.listdir("/dev/shm"))
    with share_batch(batch) as shared:
        assert len(pickle.dumps(shared.handle)) < 200
        number = os.fstat(shared.handle.descriptor).st_ino
        for reader in readers:
            packed_at, dense_at, held = reader("attach", shared.handle)
            assert f"/memfd:packhorse-{shared.handle.token}" in packed_at
            assert packed_at.split()[1] == "r--s"
            assert packed_at.split()[4] == str(number)
            assert "packhorse" not in dense_at
            assert held == flat(batch)
        assert sorted(os.listdir("/dev/shm")) == names
    for reader in readers:
        assert reader("read") == flat(batch)
        reader("drop")
    wait_for_no_holder(shared._handle.token)


def test_operations_write_no_shared_page(readers):
    batch = make_batch(5, 200)
    with share_batch(batch) as shared:
        readers[0]("attach", shared.handle)
        results, after = readers[0]("operate")
        assert results > 20
        assert after == flat(batch)
        readers[0]("drop")


def test_this_process_may_attach_too():
    batch, ragged = make_batch(4, 60), make_ragged(6, 60)
    gc.collect()
    before = files_held()
    both = make_batch(6, 10).with_fields({SUPPORT: ragged})
    values = (batch, batch[ROUTES], ragged, ragged[3:], both[1:], batch[1:3], batch[[2, 0]])
    for value in (*values, batch[:0]):
        with share_batch(value) as shared:
            got = attach_batch(shared.handle)
            assert files_held() > before
        assert got == value
        assert type(got) is type(value)
    del got
    gc.collect()
    assert files_held() == before
    assert holders(shared._handle.token) == []


def test_an_eighth_takes_an_eighth():
    values = torch.from_numpy(np.random.default_rng(3).integers(0, 99, (16_000, 8, 8), np.uint8))
    batch = Batch({ROUTES: PackedTensor.from_lengths(values, [1000] * 16)})
    with share_batch(batch) as shared:
        assert values.nbytes < shared.num_bytes < values.nbytes + 8192
    for shared in share_parts(batch, 8):
        assert values.nbytes // 8 < shared.num_bytes < values.nbytes // 8 + 8192
        assert os.fstat(shared.handle.descriptor).st_size == shared.num_bytes
        shared.close()
    column = PackedTensor.from_lengths(values[:, 2:4], [1000] * 16)  # not contiguous
    with share_batch(column) as shared:
        assert shared.num_bytes < values.nbytes // 4 + 8192
        assert attach_batch(shared.handle) == column


@pytest.mark.parametrize("num_threads", [1, 3, None])
def test_large_fields_are_written_whole(num_threads):
    """More than one block, the last one part of a page."""
    values = np.random.default_rng(4).integers(0, 256, 40 * 2**20 + 5, dtype=np.uint8)
    with share_batch(
        PackedTensor.from_lengths(torch.from_numpy(values), [values.size]), num_threads=num_threads
    ) as shared:
        assert np.array_equal(attach_batch(shared.handle).values.numpy(), values)


def test_a_rank_attaches_its_own_trajectories_alone(readers):
    batch = make_batch(5, 30)
    parts = share_parts(batch, [[4, 0], (1,), slice(2, 4)])
    for part, reader, ids in zip(parts, [*readers, readers[0]], ([4, 0], [1], [2, 3]), strict=True):
        assert reader("attach", part.handle)[2] == chosen(flat(batch), ids)
        part.close()
    for reader in readers:
        reader("drop")


def test_parts_by_number_hold_each_trajectory_once():
    for count in range(8):
        packed = PackedTensor.from_lengths(torch.arange(count), [1] * count)
        for number in (1, 2, 3, 5, 9):
            shared = share_parts(packed, number)
            held = [attach_batch(part.handle) for part in shared]
            assert [row for part in held for row in part.values.tolist()] == list(range(count))
            sizes = [len(part) for part in held]
            assert len(sizes) == number
            assert max(sizes) - min(sizes) <= 1
            for part in shared:
                part.close()


# --- lifetimes ------------------------------------------------------------------------------------


def test_a_reader_that_comes_after_the_owner_closed_is_told(readers):
    shared = share_batch(make_batch(2, 10))
    handle = shared.handle
    shared.close()
    shared.close()
    gone = (
        f"attach_batch: process {os.getpid()} holds no such shared batch: its owner has closed it"
        " or ended, or is of another host or container; keep the SharedBatch until all have"
        " attached"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(gone)}$"):
        readers[0]("attach", handle)
    with pytest.raises(RuntimeError, match=r"^SharedBatch: it is closed; no reader"):
        shared.handle  # noqa: B018
    handle = share_batch(make_batch(2, 10)).handle  # dropped at once
    with pytest.raises(RuntimeError, match="its owner has closed it"):
        attach_batch(handle)


def test_a_reader_that_crashes_leaves_nothing_behind(start, readers):
    batch, victim = make_batch(4, 500), start()
    with share_batch(batch) as shared:
        victim("attach", shared.handle)
        victim.kill()
        assert readers[0]("attach", shared.handle)[2] == flat(batch)
        assert attach_batch(shared.handle) == batch
    readers[0]("drop")
    wait_for_no_holder(shared._handle.token)


def test_an_owner_that_crashes_leaves_readers_their_batch_and_nothing_else(start, readers):
    owner = start()
    handle = owner("share", 300)
    held = readers[0]("attach", handle)[2]
    assert held == flat(make_batch(3, 300))
    owner.kill()
    assert readers[0]("read") == held
    with pytest.raises(RuntimeError, match="its owner has closed it or ended"):
        readers[1]("attach", handle)
    readers[0]("drop")
    wait_for_no_holder(handle.token)


def test_a_write_to_shared_rows_ends_the_writer_and_changes_nothing(start):
    batch, victim = make_batch(3, 50), start()
    with share_batch(batch) as shared:
        victim("attach", shared.handle)
        with pytest.raises(EOFError):
            victim("write")
        victim.process.join()
        assert victim.process.exitcode == -signal.SIGSEGV
        assert flat(attach_batch(shared.handle)) == flat(batch)
        for change in (
            lambda: os.pwrite(shared.handle.descriptor, b"x", 5000),
            lambda: os.ftruncate(shared.handle.descriptor, 0),
        ):
            with pytest.raises(PermissionError):
                change()


PROGRAM = """
import multiprocessing, sys
from packhorse.packed.transport_shared import attach_batch, share_batch
from tests.packed.transport_helpers import flat, make_batch

def read(handle):
    global kept
    kept = attach_batch(handle)
    sys.exit(0 if flat(kept) == flat(make_batch(3, 40)) else 3)

if __name__ == "__main__":
    shared = share_batch(make_batch(3, 40))
    process = multiprocessing.get_context("spawn").Process(target=read, args=(shared.handle,))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_nothing_warns_at_exit(tmp_path):
    """Neither the reader lets go nor the owner closes; no resource tracker has anything to say."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# --- what is refused ------------------------------------------------------------------------------


def test_a_descriptor_that_is_another_file_by_now_is_a_stale_handle():
    shared = share_batch(make_batch(2, 10))
    handle = shared.handle
    shared.close()
    other = os.memfd_create("other")
    os.dup2(other, handle.descriptor)
    with pytest.raises(
        RuntimeError, match="any more: the handle is stale, its owner has closed it"
    ):
        attach_batch(handle)
    for descriptor in {other, handle.descriptor}:
        os.close(descriptor)
    with share_batch(make_batch(2, 10)) as second:
        stale = handle._replace(descriptor=second.handle.descriptor)
        with pytest.raises(RuntimeError, match="is stale"):
            attach_batch(stale)


def damage(shared: SharedBatch, change: Callable[[bytearray], bytes]) -> tuple[SharedHandle, int]:
    """A file of the same name and other content."""
    data = bytearray(os.pread(shared.handle.descriptor, shared.num_bytes, 0))
    data = change(data)
    descriptor = os.memfd_create(f"packhorse-{shared.handle.token}")
    os.pwrite(descriptor, data, 0)
    return shared.handle._replace(descriptor=descriptor), descriptor


def flipped(place: int) -> Callable[[bytearray], bytes]:
    def flip(data: bytearray) -> bytes:
        data[place] ^= 1
        return bytes(data)

    return flip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], r"damaged: it has \d+ bytes, its handle says \d+$"),
        (lambda data: bytes(len(data)), "damaged: no header"),
        (flipped(0), "damaged: no header"),
        (flipped(30), "damaged: the header's checksum differs"),
        (flipped(44), "damaged: the header's checksum differs"),
        (flipped(58), "damaged: the checksum of its pickle differs"),
        (flipped(400), "damaged: the checksum of its pickle differs"),
    ],
    ids=["short", "zeros", "magic", "sizes", "checksum", "places", "pickle"],
)
def test_what_is_damaged_is_refused_before_it_is_mapped(change, said):
    with share_batch(make_batch(3, 20)) as shared:
        handle, descriptor = damage(shared, change)
        with pytest.raises(ValueError, match=f"^attach_batch: the shared batch is {said}"):
            attach_batch(handle)
        assert len(holders(handle.token)) == 2  # the two descriptors
        os.close(descriptor)


def test_a_token_of_another_batch_is_refused():
    with share_batch(make_batch(3, 20)) as one, share_batch(make_batch(3, 20)) as two:
        other = bytearray(os.pread(two.handle.descriptor, two.num_bytes, 0))
        handle, descriptor = damage(one, lambda _: bytes(other))
        with pytest.raises(ValueError, match="its header is that of another one"):
            attach_batch(handle)
        os.close(descriptor)


def test_an_owner_is_not_sent_its_handle_is():
    with share_batch(make_batch(2, 3)) as shared:
        with pytest.raises(TypeError, match=r"^SharedBatch: its owner keeps it; send its handle"):
            pickle.dumps(shared)
        with pytest.raises(TypeError, match=r"^SharedBatch: its owner keeps it; send its handle"):
            copy.copy(shared)
        assert pickle.loads(pickle.dumps(shared.handle)) == shared.handle


def test_what_cannot_be_shared_is_refused_and_nothing_is_held():
    batch = make_batch(2, 2000)
    gc.collect()
    before = files_held()
    for call, error, said in (
        (lambda: share_batch([batch]), TypeError, "share_batch: value must be a Batch"),
        (lambda: share_batch(batch, num_threads=0), ValueError, "share_batch: num_threads must"),
        (lambda: share_parts(batch, 0), ValueError, "share_parts: parts must be positive, got 0"),
        (lambda: share_parts(batch, [[5]]), IndexError, "share_parts: part 0: index 5 is out of"),
        (lambda: attach_batch(("a", 1)), TypeError, "attach_batch: handle must be a SharedHandle"),
        (
            lambda: share_batch(batch.with_fields({SUPPORT: batch[SUPPORT].to("meta")})),
            ValueError,
            f"share_batch: {SUPPORT} is on meta; only host memory is shipped",
        ),
    ):
        with pytest.raises(error, match=f"^{re.escape(said)}"):
            call()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        for call in (lambda: share_batch(batch), lambda: share_parts(batch, [[], [0]])):
            with pytest.raises(OSError, match="File too large"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert files_held() == before
