"""Batch: which operation reads a device, which copies rows, what a pickle and a TensorDict hold.

Oracle: the addresses of the rows, and the lists that ``tolist`` gives.
"""

import copy
import mmap
import pickle
import time
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.buffer import join_trajectories, split_trajectories
from packhorse.packed.ragged import PackedRagged
from tests.packed.batch_model import MARKS, ROUTES, SUPPORT, check, flat, make_batch, model_of
from tests.packed.helpers import make_packed
from tests.packed.test_tensor_memory import ForbidReads

# --- trap 43: nothing reads a device --------------------------------------------------------------


def use_every_operation(batch: Batch) -> None:
    """``batch`` of 3 trajectories, of every kind."""
    assert [len(part) for part in batch.split(2)] == [2, 1]
    assert [len(part) for part in batch.chunk(2)] == [2, 1]
    assert [len(one) for one in batch] == [1, 1, 1]
    for selector, size in (
        (slice(1, None), 2), (slice(None, None, -1), 3), ([2, 0, 2], 3), (torch.tensor([2, 0]), 2),
        (np.array([2, 0]), 2), ([True, False, True], 2), (range(2, -1, -2), 2), ([], 0),
    ):  # fmt: skip
        assert len(batch[selector]) == size
    assert len(batch[-1]) == 1
    assert len(batch.repeat(2)) == len(batch.repeat_interleave(2)) == 6
    assert len(batch.repeat_interleave([0, 2, 1])) == 3
    assert len(Batch.cat([batch, batch[:1]])) == 4
    assert len(batch.pad_to_multiple(5)) == 5
    assert len(batch.synthetic(2, values={"rewards": 1.5, "token_ids": [1, 2, 3]})) == 2
    assert len(batch.clone().contiguous().detach()) == 3
    device = batch["rewards"].device
    assert len(batch.to(device, non_blocking=True).to(torch.float16)) == 3
    assert len(batch.select(["rewards", ROUTES]).with_fields({"x": batch["rewards"]})) == 3
    assert len(join_trajectories(split_trajectories(batch)[::-1])) == 3
    assert batch.repeat(2) != batch
    assert "3 trajectories" in repr(batch)


@pytest.mark.parametrize("ragged", [False, True])
def test_trap_43_no_operation_reads_a_device_without_data(ragged):
    batch = make_batch(3, ragged=ragged).to("meta")
    with ForbidReads():
        use_every_operation(batch)
        assert len(pickle.loads(pickle.dumps(batch[1:]))) == 2


@pytest.mark.parametrize("ragged", [False, True])
def test_trap_43_no_operation_waits_for_the_gpu(ragged, cuda, no_host_sync):
    batch = make_batch(3, ragged=ragged, device=cuda)
    host = make_batch(3, ragged=ragged).pin_memory()
    assert host[MARKS].is_pinned()
    with no_host_sync():
        use_every_operation(batch)
        assert len(host.to(cuda, non_blocking=True)) == 3
    assert host.to(cuda) == batch
    with pytest.raises(ValueError, match=r"^Batch\.pin_memory: token_ids is on cuda"):
        batch.pin_memory()


@pytest.mark.parametrize(
    "index",
    [torch.empty(1, dtype=torch.int64, device="meta"), torch.empty(3, device="meta") > 0,
     torch.empty((), dtype=torch.int64, device="meta")],
    ids=["ids", "mask", "scalar"],
)  # fmt: skip
def test_trap_43_an_index_on_a_device_is_refused(index):
    with pytest.raises(TypeError, match=r"^Batch: the index is on meta"):
        make_batch(3)[index]


# --- memory and time ------------------------------------------------------------------------------


def storages(batch: Batch) -> list[int]:
    return [
        (field if isinstance(field, torch.Tensor) else field.values).untyped_storage().data_ptr()
        for field in flat(batch.fields).values()
        if not isinstance(field, tuple)
    ] + [image.untyped_storage().data_ptr() for image in batch["images"][:1]]


@pytest.mark.parametrize("ragged", [False, True])
def test_what_moves_no_row_is_a_view(ragged, device):
    batch = make_batch(6, 3, ragged=ragged, device=device)
    whole = [storages(batch)[:-1]] * 2
    for views in (
        (batch[1:4], batch[[2, 3]]), (batch[range(1, 3)], batch[-1]), batch.chunk(2),
        (batch[[False, True, True, False, False, False]], batch.repeat_interleave(1)),
        (batch.to(device), batch.detach()), (batch.contiguous(), batch.select(batch.fields)),
        split_trajectories(batch, copy=False)[:2],
    ):  # fmt: skip
        assert [storages(view)[:-1] for view in views] == whole
    assert batch.repeat(1) is batch
    assert Batch.cat([batch]) is batch
    assert batch.pad_to_multiple(3) is batch
    own = set(storages(batch))
    for private in (batch.clone(), batch.to(device, copy=True), *split_trajectories(batch)):
        assert not own & {address for address in storages(private) if address}
    for moved in (batch[[1, 0]], batch.repeat(2)):
        assert moved["rewards"].data_ptr() != batch["rewards"].data_ptr()
        assert moved["images"][0] is batch["images"][1 if len(moved) == 2 else 0]


def ragged_of(lengths: list[int], width: int = 2) -> PackedRagged:
    num_rows = sum(lengths)
    ids = torch.arange(num_rows * width, dtype=torch.int32)
    return PackedRagged.from_lengths(ids, [width] * num_rows, lengths)


@pytest.mark.parametrize("ragged", [False, True])
def test_slicing_costs_no_copy_and_little_time(ragged):
    """31 to 33 us on a busy 2-core container (8 dense, 2 packed and 2 listed fields)."""
    size = 1024
    counts = [1 + i % 7 for i in range(size)]
    batch = Batch({
        **{f"dense_{i}": torch.zeros(size, 8) for i in range(8)},
        ROUTES: make_packed(counts, torch.uint8, (8, 2)),
        SUPPORT: ragged_of(counts) if ragged else make_packed(counts, torch.int32, (4,)),
        "images": [torch.zeros(2)] * size,
        "uids": ["uid"] * size,
    })  # fmt: skip

    def best_us(start: int, stop: int) -> float:
        times = []
        for _ in range(200):
            begin = time.thread_time()
            for _ in range(5):
                batch[start:stop]
            times.append((time.thread_time() - begin) / 5)
        return min(times) * 1e6

    assert best_us(1, size - 1) < 100  # several times what it takes, for slower machines


def test_operations_cost_their_result_and_not_the_batch():
    size = 50_000
    batch = Batch({
        "token_ids": torch.zeros(size, 2),
        ROUTES: make_packed([1] * size, torch.uint8, (1, 1)),
        SUPPORT: ragged_of([1] * size),
        "uids": ["uid"] * size,
        "extra": {"parts": [0] * size},
    })  # fmt: skip
    few = batch[100:108]
    for call in (
        lambda: batch[-9:-1], lambda: batch[7], lambda: batch[[3, size - 1, 3]],
        lambda: batch[range(0, 8, 2)], lambda: batch[::10_000], lambda: few.repeat(3),
        lambda: few.repeat_interleave(3), lambda: Batch.cat([few, few]), lambda: few.split(2),
        lambda: few.pad_to_multiple(5, zeroed=()), lambda: batch.synthetic(3, attended=None),
        lambda: pickle.dumps(few, protocol=5), lambda: split_trajectories(few),
    ):  # fmt: skip
        call()
        tracemalloc.start()
        try:
            call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 50_000  # the offsets alone are 400,000 bytes


def test_placement_and_dtype_reach_every_kind():
    batch = make_batch(3)
    half = batch.to(torch.bfloat16)
    for path, field in flat(half.fields).items():
        before = flat(batch.fields)[path]
        if not isinstance(field, tuple):
            floats = before.dtype.is_floating_point
            assert field.dtype == (torch.bfloat16 if floats else before.dtype), path
    assert half["images"][0].dtype == torch.bfloat16
    meta = batch.to(device="meta", dtype=torch.float64)
    assert {image.device.type for image in meta["images"]} == {"meta"}
    assert meta[ROUTES].device.type == meta["extra"]["rows"].device.type == "meta"
    assert (meta["rewards"].dtype, meta[ROUTES].dtype) == (torch.float64, torch.uint8)
    assert meta["uids"] == batch["uids"]


def test_pinning_without_an_accelerator_changes_nothing():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    batch = make_batch(2)
    assert batch.pin_memory() is batch


# --- trap 49: pickling ----------------------------------------------------------------------------


def test_trap_49_each_field_leaves_as_one_buffer_of_its_exact_size():
    counts = [5, 0, 7, 3]
    batch = Batch({
        "token_ids": torch.arange(400).view(4, 100),
        "rewards": torch.ones(4),
        ROUTES: make_packed(counts, torch.uint8, (6, 2)),
        SUPPORT: make_packed(counts, torch.int32, (8,)),
        MARKS: ragged_of(counts, 3),
        "images": [torch.zeros(i, 10) for i in range(4)],
        "uids": list("abcd"),
    })  # fmt: skip
    for part, rows in ((batch, 15), (batch[2:], 10), (batch.chunk(4)[0], 5), (batch[[2, 0]], 12)):
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
        sizes = [buffer.raw().nbytes for buffer in buffers]
        images = [image.nbytes for image in part["images"]]
        size = len(part)
        ragged = [12 * rows, 8 * (rows + 1)]
        assert sizes == [800 * size, 4 * size, 12 * rows, 32 * rows, *ragged, *images]
        assert len(data) < 2000
        loaded = pickle.loads(data, buffers=buffers)
        assert loaded == part
        received = [np.frombuffer(buffer.raw(), dtype=np.uint8).ctypes.data for buffer in buffers]
        assert loaded[ROUTES].values.data_ptr() == received[2]
        assert loaded[MARKS].values.data_ptr() == received[4]
        assert loaded[MARKS].row_offsets.data_ptr() == received[5]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_trap_49_a_slice_ships_only_its_own_rows(protocol):
    batch = Batch({
        "token_ids": torch.zeros(1000, 100),
        ROUTES: make_packed([50] * 1000, torch.uint8, (6, 2)),
        SUPPORT: ragged_of([50] * 1000),
        "images": list(torch.zeros(1000, 300)),
    })  # fmt: skip
    assert len(pickle.dumps(batch[3:5], protocol=protocol)) < 10_000
    assert pickle.loads(pickle.dumps(batch[3:5], protocol=protocol)) == batch[3:5]


def test_metadata_and_rules_travel():
    batch = make_batch(2, metadata={"version": 3, "names": ["a"]})
    loaded = pickle.loads(pickle.dumps(batch, protocol=5))
    assert loaded.metadata == batch.metadata
    assert loaded.registry == batch.registry
    assert len(loaded.pad_to_multiple(4)) == 4
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    assert deep == shallow == batch
    deep.metadata["names"].append("b")
    shallow.metadata["version"] = 4
    assert batch.metadata == {"version": 3, "names": ["a"]}
    assert deep["rewards"].data_ptr() != batch["rewards"].data_ptr()


@pytest.mark.parametrize("ragged", [False, True])
def test_read_only_pages_hold_packed_fields_and_other_fields_are_private(ragged, tmp_path):
    # the pages are mapped without write permission: a write ends this process
    source = make_batch(3, ragged=ragged)
    buffers: list[Any] = []
    data = pickle.dumps(source, protocol=5, buffer_callback=buffers.append)
    received = []
    for i, buffer in enumerate(buffers):
        (tmp_path / str(i)).write_bytes(raw := bytes(buffer.raw()))
        if raw:
            with (tmp_path / str(i)).open("rb") as file:
                raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        received.append(raw)
    batch = pickle.loads(data, buffers=received)
    assert batch == source
    use_every_operation(batch)
    batch["token_ids"].zero_()
    batch["images"][0].zero_()
    batch["extra"]["scores"].add_(1)
    for name in (ROUTES, SUPPORT, MARKS):
        batch.clone()[name].values.zero_()
        assert batch[name] == source[name]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickle_keeps_every_dtype_and_shape(dtype, protocol):
    values = torch.tensor([[1.0, 0.0, 2.0], [4.0, 1.0, 0.0]]).to(dtype)
    batch = Batch({"x": values.T, "things": [values[0, 0], values[:0], values[:, 1]]})
    loaded = pickle.loads(pickle.dumps(batch, protocol=protocol))
    for ours, theirs in zip((loaded["x"], *loaded["things"]), (batch["x"], *batch["things"]),
                            strict=True):  # fmt: skip
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        kept = torch.complex64 if dtype.is_complex else torch.float32
        assert ours.to(kept).tolist() == theirs.to(kept).tolist()


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_conjugate_that_is_only_marked_travels(protocol):
    x = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert x.is_conj()
    loaded = pickle.loads(pickle.dumps(Batch({"x": x}), protocol=protocol))
    assert loaded["x"].tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize(
    "dtype",
    [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
     torch.float8_e8m0fnu, torch.complex64, torch.bfloat16],
    ids=str,
)  # fmt: skip
def test_dtypes_that_torch_hardly_knows_pass_every_operation(dtype):
    x = torch.tensor([[1.0, 1.0], [2.0, 4.0], [8.0, 1.0]]).to(dtype)
    batch = Batch({"x": x, "loss_mask": torch.ones(3)})
    kept = torch.complex64 if dtype.is_complex else torch.float32
    rows = x.to(kept).tolist()
    for made, expected in (
        (batch[[2, 0]], [rows[2], rows[0]]),
        (batch[::-1], rows[::-1]),
        (batch.repeat(2), rows * 2),
        (Batch.cat([batch, batch]), rows * 2),
        (batch.pad_to_multiple(2), [*rows, rows[0]]),
        (batch.synthetic(1, attended=None, values={"x": 1}), [[1, 1]]),
        (batch.clone(), rows),
    ):
        assert made["x"].dtype == dtype
        assert made["x"].to(kept).tolist() == expected
    assert batch == batch.clone()
    assert batch != batch[::-1]


def test_gradients_pass_through_selections():
    x = torch.ones(3, 2, requires_grad=True)
    batch = Batch({"x": x, "y": [x[0], x[1], x[2]]})
    picked = batch[[2, 0, 2]].repeat(2)
    (gradient,) = torch.autograd.grad(picked["x"].sum(), x)
    assert gradient.tolist() == [[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]]
    assert not batch.detach()["x"].requires_grad


# --- TensorDict -----------------------------------------------------------------------------------


def test_without_the_package_tensordict_is_asked_for_by_name():
    with mock.patch.dict("sys.modules", {"tensordict": None}):
        for call in (make_batch(1).to_tensordict, lambda: Batch.from_tensordict(None)):
            with pytest.raises(ImportError, match=r"^Batch\.\w+_tensordict needs the package tens"):
                call()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_tensordict_holds_every_kind_over_the_same_rows(size, ragged):
    package = pytest.importorskip("tensordict")
    batch = make_batch(size, ragged=ragged, metadata={"step": 4, "names": ["a", "b"]})
    made = batch.to_tensordict()
    assert isinstance(made, package.TensorDict)
    assert tuple(made.batch_size) == (size,)
    assert made[ROUTES].is_nested
    assert made[ROUTES].values().data_ptr() == batch[ROUTES].values.data_ptr()
    ids, widths = made[MARKS, "ragged_ids"], made[MARKS, "ragged_widths"]
    assert ids.values().data_ptr() == batch[MARKS].values.data_ptr()
    for part, trajectory in enumerate(model_of(batch)):
        rows = trajectory[MARKS]
        assert ids[part].tolist() == [token for row in rows for token in row]
        assert widths[part].tolist() == [len(row) for row in rows]
    assert made["rewards"].data_ptr() == batch["rewards"].data_ptr()
    again = Batch.from_tensordict(made, registry=batch.registry)
    check(again, model_of(batch), batch)
    assert again.metadata == batch.metadata
    assert again.registry == batch.registry


def test_a_tensordict_is_refused_where_it_is_no_batch():
    package = pytest.importorskip("tensordict")
    with pytest.raises(TypeError, match=r"^Batch\.from_tensordict: source must be a TensorDict, g"):
        Batch.from_tensordict({"x": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^Batch\.from_tensordict: source must have batch size"):
        Batch.from_tensordict(package.TensorDict({}, batch_size=[2, 3]))
    nested = make_packed([1, 2]).to("meta").to_nested()
    source = package.TensorDict({"a": {"rows": nested}}, batch_size=[2])
    with pytest.raises(TypeError, match=r"^Batch\.from_tensordict: a\.rows: .*needs lengths="):
        Batch.from_tensordict(source)
    batch = Batch.from_tensordict(source, lengths={"a.rows": [1, 2]})
    assert batch["a"]["rows"].lengths == (1, 2)
    ragged = ragged_of([1, 2])
    source = Batch({"a": {"rows": ragged.to("meta")}}).to_tensordict()
    with pytest.raises(TypeError, match=r"^Batch\.from_tensordict: a\.rows: on meta it needs len"):
        Batch.from_tensordict(source, lengths={"a.rows": [1, 2]})
    known = {"lengths": {"a.rows": [1, 2]}, "widths": {"a.rows": [2, 2, 2]}}
    assert Batch.from_tensordict(source, **known)["a"]["rows"].widths.tolist() == [2, 2, 2]
    source = Batch({"x": ragged}).to_tensordict()
    for known, message in (
        ({"lengths": {"x": [2, 1]}}, "lengths and cu_seqlens differ at trajectory 0"),
        ({"widths": {"x": [2, 1, 3]}}, "widths and row_offsets differ at trajectory 1, row 0"),
    ):
        with pytest.raises(ValueError, match=rf"^Batch\.from_tensordict: x: .*{message}"):
            Batch.from_tensordict(source, **known)
    source["x", "ragged_ids"] = make_packed([3, 3], torch.int32, ()).to_nested()
    with pytest.raises(ValueError, match="x: ragged_widths of trajectory 0 do not sum to its ids"):
        Batch.from_tensordict(source)
    source["x", "ragged_ids"] = torch.zeros(2, 3).int()
    with pytest.raises(TypeError, match="x: ragged_ids must be a nested tensor"):
        Batch.from_tensordict(source)
    clash = Batch({"x": torch.zeros(2)}, metadata={"x": 1})
    with pytest.raises(ValueError, match=r"^Batch\.to_tensordict: metadata 'x' has no name of its"):
        clash.to_tensordict()
