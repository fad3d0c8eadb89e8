"""PackedTensor: which operation reads a device, which copies rows, and what a pickle holds.

Oracle: the addresses of the rows, and the lists that ``tolist`` gives.
"""

import io
import mmap
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.packed import copies
from packhorse.packed.tensor import PackedTensor
from tests.packed.helpers import as_lists, make_packed, make_rows

# --- trap 43: nothing reads a device --------------------------------------------------------------


class ForbidReads(TorchDispatchMode):
    """Fails at every operator that brings a device tensor's content to the host."""

    READS = frozenset(
        {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "unique"}
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_device = any(
            isinstance(arg, torch.Tensor) and arg.device.type != "cpu"
            for arg in (*args, *kwargs.values())
        )
        name = func.overloadpacket.__name__
        reads = name in self.READS or (name == "index" and args[1][0].dtype == torch.bool)
        assert not (on_device and reads), f"{name} reads the device"
        if on_device and name in ("_to_copy", "copy_"):
            target = args[0].device if name == "copy_" else kwargs.get("device")
            assert target is None or torch.device(target).type != "cpu", f"{name} reads the device"
        return func(*args, **kwargs)


def use_every_operation(values: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """``values`` [6, 2] in segments of 2, 0 and 4 rows."""
    packed = PackedTensor(values, cu_seqlens, lengths=[2, 0, 4])
    PackedTensor.from_lengths(values, [1, 5])
    PackedTensor.from_segments([values, values[:2]])
    PackedTensor.empty((2,), dtype=values.dtype, num_segments=3, device=values.device)
    assert packed.lengths == (2, 0, 4)
    assert (packed[-1].shape, packed.segment(0).shape) == ((4, 2), (2, 2))
    assert [len(segment) for segment in packed] == [2, 0, 4]
    assert packed[1:].lengths == packed[-2:].lengths == (0, 4)
    for rows_per_run in (0, 10**9):
        with mock.patch.object(copies, "_ROWS_PER_RUN", rows_per_run):
            for selector in ([2, 0, 2], torch.tensor([2, 0, 2]), np.array([2, 0, 2])):
                assert packed[selector].lengths == (4, 2, 4)
            assert packed[::-1].lengths == (4, 0, 2)
            assert packed[range(2, -1, -2)].lengths == (4, 2)
            assert packed.repeat_interleave(2).lengths == (2, 2, 0, 0, 4, 4)
            assert packed.repeat_interleave([2, 0, 1]).lengths == (2, 2, 4)
    assert packed[[True, False, True]].lengths == (2, 4)
    assert packed[torch.tensor([True, False, True])].lengths == (2, 4)
    assert packed[[]].lengths == packed[1:1].lengths == ()
    assert PackedTensor.cat([packed, packed[:1]]).lengths == (2, 0, 4, 2)
    assert packed.repeat(2).lengths == (2, 0, 4, 2, 0, 4)
    assert [part.lengths for part in packed.split(2)] == [(2, 0), (4,)]
    assert [part.lengths for part in packed.split([1, 2])] == [(2,), (0, 4)]
    assert [part.lengths for part in packed.chunk(2)] == [(2, 0), (4,)]
    assert packed.to(values.device, non_blocking=True).device == values.device
    assert packed.to(torch.float16).dtype == values.dtype
    assert packed.widen(torch.int64).dtype == torch.int64
    assert packed.clone().contiguous().detach().lengths == (2, 0, 4)
    assert packed.to_padded(0).shape == packed.to_padded(0, 4, side="left").shape == (3, 4, 2)
    assert PackedTensor.from_nested(packed.to_nested(), lengths=packed.lengths).lengths == (2, 0, 4)
    assert not packed.equal(packed[:2])
    assert not packed.equal(packed.widen(torch.int64))
    assert "3 segments" in repr(packed)
    assert pickle.loads(pickle.dumps(packed[1:])).lengths == (0, 4)


def test_no_operation_reads_a_device_without_data():
    values = torch.empty(6, 2, dtype=torch.int32, device="meta")
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    with ForbidReads():
        use_every_operation(values, cu_seqlens)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.to("cpu"),
        lambda x: x.cpu(),
        lambda x: torch.empty(2).copy_(x),
        lambda x: x[0].item(),
        lambda x: bool(x[0]),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
    ],
)
def test_the_read_guard_sees_reads(read):
    with pytest.raises(AssertionError, match="reads the device"), ForbidReads():
        read(torch.empty(2, device="meta"))


def test_no_operation_waits_for_the_gpu(cuda):
    values = torch.arange(12, dtype=torch.int32, device=cuda).view(6, 2)
    cu_seqlens = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=cuda)
    host = make_packed([2, 0, 4]).pin_memory()
    pickled = pickle.dumps  # copies to the host, as pickling must
    with mock.patch.object(pickle, "dumps", lambda packed: pickled(make_packed(packed.lengths))):
        torch.cuda.set_sync_debug_mode("error")
        try:
            use_every_operation(values, cu_seqlens)
            assert host.to(cuda, non_blocking=True).lengths == (2, 0, 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_device_offsets_need_host_lengths():
    values = torch.empty(3, device="meta")
    cu_seqlens = torch.empty(2, dtype=torch.int32, device="meta")
    with pytest.raises(TypeError, match=r"needs lengths="):
        PackedTensor(values, cu_seqlens)
    with pytest.raises(TypeError, match="lengths is on meta"):
        PackedTensor(values, cu_seqlens, lengths=torch.empty(1, dtype=torch.int64, device="meta"))
    with pytest.raises(TypeError, match=r"needs lengths="):
        PackedTensor.from_nested(make_packed([2]).to("meta").to_nested())


@pytest.mark.parametrize(
    "index",
    [
        torch.empty(1, dtype=torch.int64, device="meta"),
        torch.empty(2, dtype=torch.bool, device="meta"),
        torch.empty((), dtype=torch.int64, device="meta"),
        [0, torch.empty((), dtype=torch.int64, device="meta")],
        slice(torch.empty((), dtype=torch.int64, device="meta"), None),
    ],
    ids=["ids", "mask", "scalar", "scalar-in-a-list", "slice-bound"],
)
def test_an_index_on_a_device_is_refused(index):
    with pytest.raises(TypeError, match="on meta"):
        make_packed([2, 1])[index]
    with pytest.raises(TypeError, match="on meta"):
        make_packed([2, 1]).repeat_interleave(torch.empty(2, dtype=torch.int64, device="meta"))


# --- memory ---------------------------------------------------------------------------------------


def test_what_moves_no_row_is_a_view(device):
    packed = make_packed([2, 0, 3, 1], device=device)
    base = packed.values.untyped_storage().data_ptr()

    def is_view(result: PackedTensor) -> bool:
        return result.values.untyped_storage().data_ptr() == base

    assert packed[1].untyped_storage().data_ptr() == base
    views = [packed[1:3], packed[[2, 3]], packed[range(1, 4)], packed[[0, 2]], packed[[2, 1, 3]]]
    views += [packed[[False, False, True, True]], packed.to(device), packed.detach()]
    views += [*packed.split(2), *packed.chunk(3), packed.repeat(1), packed.repeat_interleave(1)]
    assert all(map(is_view, views))
    copies = [packed[[3, 2]], packed[[0, 0]], packed.clone(), packed.repeat(2)]
    copies += [PackedTensor.from_segments([packed.values]), PackedTensor.cat([packed, packed])]
    assert not any(map(is_view, copies))
    assert PackedTensor.cat([packed]) is packed


def test_the_rows_of_a_strided_input_are_read_in_place():
    wide = make_rows(6, torch.int32, (4,))
    packed = PackedTensor.from_lengths(wide[:, ::2], [4, 2])
    expected = wide[:, ::2].tolist()
    assert as_lists(packed) == [expected[:4], expected[4:]]
    assert as_lists(packed[[1, 0]]) == [expected[4:], expected[:4]]
    assert packed.contiguous().values.is_contiguous()
    assert not packed.values.is_contiguous()
    assert pickle.loads(pickle.dumps(packed, protocol=5)).equal(packed)
    offsets = torch.tensor([0, 9, 4, 9, 6, 9], dtype=torch.int32)[::2]
    assert PackedTensor(wide, offsets).cu_seqlens.is_contiguous()


def test_read_only_memory_is_never_written(tmp_path):
    # the pages are mapped without write permission: a write ends this process
    source = make_packed([2, 0, 4])
    file = tmp_path / "rows"
    file.write_bytes(source.values.numpy().tobytes())
    with file.open("rb") as handle:
        pages = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    pickled = pickle.dumps(source, protocol=5, buffer_callback=lambda _: False)
    packed = pickle.loads(pickled, buffers=[pages])
    assert packed.equal(source)
    use_every_operation(packed.values, packed.cu_seqlens)
    private = packed.clone()
    private.values.fill_(0)
    assert packed.equal(source)
    assert not private.equal(source)


def test_pickle_protocol_5_ships_one_buffer_of_the_rows_alone():
    packed = make_packed([2, 3, 1], torch.int16, (4, 2))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(packed[1:2], protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [3 * 4 * 2 * 2]
    loaded = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert loaded.equal(packed[1:2])
    rest = make_packed([1, 4000], torch.int64)
    assert len(pickle.dumps(rest[:1], protocol=2)) < 2000


ODD_DTYPES = [
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
def test_dtypes_that_torch_hardly_knows_travel_compare_and_pad(dtype):
    counts = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 64.0]])
    packed = PackedTensor.from_lengths(counts.to(dtype), [1, 2])
    for protocol in range(2, 6):
        loaded = pickle.loads(pickle.dumps(packed, protocol))
        assert loaded.dtype == dtype
        assert loaded.lengths == (1, 2)
        assert loaded.values.float().tolist() == counts.tolist()
        assert loaded == packed
    assert packed[:1] != PackedTensor.from_lengths(packed.values[1:2], [1])
    padded = packed.to_padded(2, side="left")
    assert padded.dtype == dtype
    assert padded.float().tolist() == [[[2.0, 2.0], [1.0, 2.0]], counts[1:].tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint16, torch.float64])
def test_pickle_keeps_every_dtype(dtype):
    packed = make_packed([1, 2], dtype, (3,))
    saved = io.BytesIO()
    torch.save(packed, saved)
    saved.seek(0)
    for loaded in (pickle.loads(pickle.dumps(packed, 5)), torch.load(saved, weights_only=False)):
        assert loaded.dtype == dtype
        assert as_lists(loaded) == as_lists(packed)


def test_pinned_copies_keep_their_rows(cuda):
    packed = make_packed([2, 0, 1])
    pinned = packed.pin_memory()
    assert pinned.is_pinned()
    assert pinned.cu_seqlens.is_pinned()
    assert pinned.pin_memory() is pinned
    assert pinned.to(cuda, non_blocking=True).to("cpu").equal(packed)
    with pytest.raises(ValueError, match="values are on cuda"):
        packed.to(cuda).pin_memory()


def test_pinning_without_an_accelerator_changes_nothing():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    packed = make_packed([2])
    assert packed.pin_memory() is packed
