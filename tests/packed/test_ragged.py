"""PackedRagged.

Oracle: a batch is a Python list of segments, a segment a list of rows, a row a list of ids; every
operation is done once more on those lists. Ids are moved, not computed: nothing has a tolerance.
"""

import copy
import mmap
import pickle
import random
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from packhorse.kernels.support_rows import gather_ragged_support, pad_ragged_support
from packhorse.packed import copies
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from tests.packed.ragged_model import MODEL, Model, as_lists, build, check, lists_of, random_model
from tests.packed.test_tensor_memory import ForbidReads

# --- every operation against lists ----------------------------------------------------------------


def random_selection(rng: random.Random, num_segments: int) -> tuple[Any, list[int]]:
    """A selector of several segments, and the segments it names."""
    num_ids = rng.randrange(7) if num_segments else 0
    ids = [rng.randrange(-num_segments, num_segments) for _ in range(num_ids)]
    mask = [rng.random() < 0.5 for _ in range(num_segments)]
    kept = [i for i, keep in enumerate(mask) if keep]

    def bound() -> int | None:
        return rng.choice([None, rng.randrange(-8, 9)])

    cut = slice(bound(), bound(), rng.choice([None, 1, 1, 2, 3, -1, -2]))
    everything = range(num_segments)
    choices: list[tuple[Any, list[int]]] = [
        (ids, ids),
        (torch.tensor(ids, dtype=torch.int64), ids),
        (np.array(ids, dtype=np.int16), ids),
        (torch.tensor(mask, dtype=torch.bool), kept),
        (np.array(mask, dtype=np.bool_), kept),
        (everything[cut], list(everything[cut])),
        (cut, list(everything[cut])),
        (cut, list(everything[cut])),
    ]
    if mask:
        choices.append((mask, kept))
    return rng.choice(choices)


def random_operation(rng: random.Random, packed: PackedRagged, model: Model) -> Any:
    """One operation on both, chosen by ``rng``; what it gives."""
    which = rng.choice([
        "select", "select", "select", "segment", "cat", "repeat", "interleave", "counts", "split",
        "sizes", "chunk", "padded", "pickle", "same", "rebuild",
    ])  # fmt: skip
    if which == "select":
        selector, named = random_selection(rng, len(model))
        return packed[selector], [model[i] for i in named]
    if which == "segment" and model:
        i = rng.randrange(-len(model), len(model))
        for index in (i, np.int64(i), torch.tensor(i)):
            assert lists_of(*packed[index]) == model[i]
    if which == "cat":
        other = random_model(rng)
        parts = [(packed, model), (build(other), other), (packed[:1], model[:1])]
        rng.shuffle(parts)
        return PackedRagged.cat(p for p, _ in parts), [s for _, m in parts for s in m]
    if which == "repeat":
        times = rng.randrange(4)
        return packed.repeat(times), model * times
    if which == "interleave":
        times = rng.randrange(4)
        return packed.repeat_interleave(times), [s for s in model for _ in range(times)]
    if which == "counts":
        counts = [rng.randrange(4) for _ in model]
        given = rng.choice([list, lambda c: torch.tensor(c, dtype=torch.int64)])(counts)
        repeated = [s for s, times in zip(model, counts, strict=True) for _ in range(times)]
        return packed.repeat_interleave(given), repeated
    if which == "split":
        size = rng.randrange(1, 5)
        parts = packed.split(size)
        expected = [model[i : i + size] for i in range(0, len(model), size)] or [[]]
        assert [as_lists(part) for part in parts] == expected
        return PackedRagged.cat(parts[::-1]), [s for part in expected[::-1] for s in part]
    if which == "sizes":
        first = rng.randrange(len(model) + 1)
        left, none, right = packed.split([first, 0, len(model) - first])
        check(none, [])
        return PackedRagged.cat([right, none, left]), model[first:] + model[:first]
    if which == "chunk":
        dense = torch.arange(len(model)).chunk(chunks := rng.randrange(1, 5))
        parts = packed.chunk(chunks)
        assert [len(part) for part in parts] == [len(part) for part in dense]
        last = rng.randrange(len(parts))
        return parts[last], [model[i] for i in dense[last].tolist()]
    if which == "padded":
        width = packed.max_width + rng.randrange(3)
        padded = packed.to_padded(width)
        rows = [row + [-1] * (width - len(row)) for segment in model for row in segment]
        assert padded.values.tolist() == rows
        assert padded.values.shape == (len(rows), width)
        assert padded.lengths == packed.lengths
        return PackedRagged.from_padded(padded, widths=rng.choice([None, packed.widths])), model
    if which == "pickle":
        return pickle.loads(pickle.dumps(packed, protocol=rng.randrange(2, 6))), model
    if which == "same":
        same = [packed.clone(), packed.contiguous(), copy.deepcopy(packed), packed.to("cpu")]
        same += [packed.to("cpu", copy=True), packed.pin_memory(), packed.to(torch.bfloat16)]
        assert all(one == packed and as_lists(one) == model for one in same)
        return rng.choice(same), model
    if which == "rebuild":
        if rng.random() < 0.5:
            return PackedRagged.from_segments(packed), model
        parts = (packed.values, packed.row_offsets, packed.cu_seqlens)
        return PackedRagged(*parts, lengths=packed.lengths, widths=packed.widths), model
    return packed, model


@pytest.mark.parametrize("ids_per_run", [0, 10**9], ids=["copy-runs", "index-ids"])
@pytest.mark.parametrize("seed", range(8))
def test_any_chain_of_operations_matches_lists(seed, ids_per_run):
    """40 chains each: 640 in all."""
    rng = random.Random(seed)
    with mock.patch.object(copies, "_ROWS_PER_RUN", ids_per_run):
        for _ in range(40):
            model = random_model(rng, most=6)
            packed = first = build(model)
            before = copy.deepcopy(model)
            for _ in range(rng.randrange(1, 7)):
                if sum(map(len, model)) > 200:
                    break
                packed, model = random_operation(rng, packed, model)
                check(packed, model)
            check(first, before)  # nothing is written in place


# --- traps 26, 41: none, empty, one ---------------------------------------------------------------


@pytest.mark.parametrize("model", [[], [[]], [[], []], [[[]]], [[[5]]], [[], [[], [3, 4]], []]])
def test_no_segment_no_row_and_no_id_are_legal(model, device):
    packed = build(model, device)
    check(packed, model)
    check(packed[:], model)
    for none in (
        packed[[]],
        packed[5:],
        packed[2:1],
        packed.repeat(0),
        packed.repeat_interleave(0),
    ):
        check(none, [])
    check(packed[::-1], model[::-1])
    check(PackedRagged.cat([packed[:0], packed]), model)
    check(PackedRagged.cat([packed[:0], packed[:0]]), [])
    assert packed[torch.zeros(len(model), dtype=torch.bool)] == packed[:0]
    assert packed.equal(packed.clone())
    assert pickle.loads(pickle.dumps(packed, protocol=5)) == packed
    assert packed.to_padded().values.shape == (packed.num_rows, max(packed.max_width, 1))
    if model:
        assert lists_of(*packed[-1]) == model[-1]


def test_rows_without_ids_are_what_padding_trajectories_hold(device):
    packed = PackedRagged.cat([build([[[1], [2, 3]], [[4]]], device),
                               PackedRagged.empty([2, 0], device=device)])  # fmt: skip
    check(packed, [[[1], [2, 3]], [[4]], [[], []], []])
    assert packed.to_padded().values.tolist() == [[1, -1], [2, 3], [4, -1], [-1, -1], [-1, -1]]
    check(PackedRagged.empty(), [])
    check(PackedRagged.from_segments([]), [])


# --- traps 25, 29: rows of -1, one member ---------------------------------------------------------


def test_rows_of_missing_candidates_become_empty_and_come_back():
    rows = torch.tensor([[4, 7, -1], [-1, -1, -1], [5, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    padded = PackedTensor.from_lengths(rows, [2, 0, 2])
    ragged = PackedRagged.from_padded(padded)
    check(ragged, [[[4, 7], []], [], [[5], []]])
    assert ragged.to_padded(3).equal(padded)
    assert ragged.to_padded().values.tolist() == rows[:, :2].tolist()
    gap = PackedTensor.from_lengths(torch.tensor([[-1, 6, -1, 2]], dtype=torch.int32), [1])
    check(PackedRagged.from_padded(gap), [[[6, 2]]])
    check(
        PackedRagged.from_padded(PackedTensor.from_lengths(rows[:, :0], [1, 3])), [[[]], [[]] * 3]
    )


# --- trap 42: dtypes ------------------------------------------------------------------------------


def test_ids_are_int32_and_no_other_dtype_gets_in():
    packed = build(MODEL)
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.float32):
        with pytest.raises(TypeError, match=f"values must be int32, got {dtype}"):
            PackedRagged(packed.values.to(dtype), packed.row_offsets, packed.cu_seqlens)
    for dtype in (torch.uint8, torch.int64, torch.bool):
        with pytest.raises(TypeError, match=r"PackedRagged\.to: .* support ids are int32"):
            packed.to(dtype)
    assert packed.to(torch.bfloat16) is packed.to("cpu", torch.float32) is packed.to(torch.int32)


# --- trap 43: nothing reads a device --------------------------------------------------------------


def use_every_operation(packed: PackedRagged) -> None:
    """``packed`` holds the lengths and widths of ``MODEL``."""
    device = packed.device
    parts = (packed.values, packed.row_offsets, packed.cu_seqlens)
    assert PackedRagged(*parts, lengths=packed.lengths, widths=packed.widths).num_rows == 9
    assert [segment.row_offsets.shape[0] for segment in packed] == [4, 1, 2, 3, 4]
    assert packed[-1].token_ids.shape == (5,)
    assert packed[1:3].lengths == packed[[1, 2]].lengths == (0, 1)
    for ids_per_run in (0, 10**9):
        with mock.patch.object(copies, "_ROWS_PER_RUN", ids_per_run):
            assert packed[[4, 0, 4]].widths.tolist() == [1, 4, 0, 0, 2, 1, 1, 4, 0]
            assert packed[torch.tensor([4, 0])].num_ids == packed[np.array([4, 0])].num_ids == 8
            assert packed[::-1].widths.tolist() == [1, 4, 0, 0, 0, 3, 0, 2, 1]
            assert packed.repeat_interleave([2, 0, 1, 0, 0]).lengths == (3, 3, 1)
    assert packed[[True, False, False, False, True]].lengths == (3, 3)
    assert PackedRagged.cat([packed, packed[2:]]).num_ids == 19
    assert packed.repeat(2).num_ids == 22
    assert [part.num_ids for part in packed.split(2)] == [3, 3, 5]
    assert [part.num_ids for part in packed.chunk(2)] == [6, 5]
    assert packed.to(device, non_blocking=True) is packed
    assert packed.to(device, copy=True).clone().contiguous().num_ids == 11
    padded = packed.to_padded(5)
    assert padded.values.shape == (9, 5)
    assert PackedRagged.from_padded(padded, widths=packed.widths).num_ids == 11
    assert not packed.equal(packed[:2])
    assert not packed.equal(PackedRagged.empty(packed.lengths, device=device))
    assert "5 segments of [3, 0, 1, 2, 3] rows, 11 ids" in repr(packed)


def test_no_operation_reads_a_device_without_data():
    packed = build(MODEL).to("meta")
    with ForbidReads():
        use_every_operation(packed)
    assert pickle.loads(pickle.dumps(packed[2:])).widths.tolist() == [3, 0, 0, 1, 4, 0]


def test_no_operation_waits_for_the_gpu(cuda):
    host = build(MODEL).pin_memory()
    assert host.is_pinned()
    assert host.pin_memory() is host
    packed = host.to(cuda)
    use_every_operation(packed)  # kernels are compiled here
    torch.cuda.set_sync_debug_mode("error")
    try:
        use_every_operation(packed)
        assert host.to(cuda, non_blocking=True).lengths == packed.lengths
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(packed[[4, 0, 4]], [MODEL[i] for i in (4, 0, 4)])
    check(packed[2:], MODEL[2:])
    check(packed.to("cpu"), MODEL)
    assert packed.to_padded(6).to("cpu").equal(build(MODEL).to_padded(6))
    with pytest.raises(ValueError, match="values are on cuda"):
        packed.pin_memory()


def test_device_offsets_need_the_host_s_lengths_and_widths():
    packed = build(MODEL).to("meta")
    parts = (packed.values, packed.row_offsets, packed.cu_seqlens)
    with pytest.raises(TypeError, match="cu_seqlens on meta needs lengths="):
        PackedRagged(*parts, widths=packed.widths)
    with pytest.raises(TypeError, match="row_offsets on meta needs widths="):
        PackedRagged(*parts, lengths=packed.lengths)
    with pytest.raises(TypeError, match="widths is on meta"):
        PackedRagged(*parts, lengths=packed.lengths, widths=packed.row_offsets[1:])
    with pytest.raises(TypeError, match="padded on meta needs widths="):
        PackedRagged.from_padded(packed.to_padded())
    with pytest.raises(TypeError, match="trajectory 0: token_ids is on meta"):
        PackedRagged.from_segments([packed[0]])
    with pytest.raises(TypeError, match="on meta"):
        packed[torch.empty(1, dtype=torch.int64, device="meta")]


# --- trap 44, and the kernels ---------------------------------------------------------------------


def test_row_ids_of_a_slice_start_at_its_first_row(device):
    prompts, responses = [3, 2], [2, 4]
    model = [[[1], [2, 3]], [[4, 5], [], [6], [7, 8, 9]]]
    second = build(model, device)[1:2]
    layout = TokenLayout.build([prompts[1] + responses[1]], device=device)
    row_ids = layout.support_row_ids(second.lengths)
    assert row_ids.tolist() == [-1, 0, 1, 2, 3, -1]
    gathered = gather_ragged_support(second.values, second.row_offsets, row_ids)
    laid = lists_of(gathered.token_ids, gathered.row_offsets)
    assert laid == [[], *model[1], []]


@pytest.mark.parametrize("seed", range(6))
def test_every_rank_s_tokens_find_their_rows(seed, device):
    """Against the rows of the model, by positions worked out here (thd, context parallel)."""
    rng = random.Random(seed)
    model = [segment for segment in random_model(rng, most=6) if segment] or [[[1, 2]]]
    keep = [rng.randrange(len(model)) for _ in range(4)]
    packed, model = build(model, device)[keep], [model[i] for i in keep]
    lengths = [rng.randrange(1, 4) + len(segment) for segment in model]
    cp_size = rng.choice([1, 2])
    for cp_rank in range(cp_size):
        layout = TokenLayout.build(lengths, cp_size=cp_size, cp_rank=cp_rank, device=device)
        expected: list[list[int]] = []
        for length, rows in zip(lengths, model, strict=True):
            align = 2 * cp_size if cp_size > 1 else 1
            padded = -(-length // align) * align
            slots: list[list[int]] = [[] for _ in range(padded)]
            for r, row in enumerate(rows):
                slots[length - len(rows) + r - 1] = row
            if cp_size == 1:
                expected += slots
                continue
            size = padded // (2 * cp_size)
            for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
                expected += slots[part * size : (part + 1) * size]
        row_ids = layout.support_row_ids(packed.lengths)
        ids, offsets = gather_ragged_support(
            packed.values, packed.row_offsets, row_ids, capacity=packed.num_ids
        )
        assert lists_of(ids, offsets) == expected
        width = packed.max_width
        wide = pad_ragged_support(packed.values, packed.row_offsets, row_ids, width=width)
        assert wide.tolist() == [row + [-1] * (width - len(row)) for row in expected]


def test_the_kernels_give_a_batch_back_by_its_own_rows(device):
    packed = build(MODEL, device)[[4, 2, 0]]
    rows = torch.arange(packed.num_rows, device=device)
    ids, offsets = gather_ragged_support(packed.values, packed.row_offsets, rows)
    again = PackedRagged(
        ids, offsets, packed.cu_seqlens, lengths=packed.lengths, widths=packed.widths
    )
    check(again, [MODEL[i] for i in (4, 2, 0)])
    padded = pad_ragged_support(packed.values, packed.row_offsets, rows, width=5)
    assert torch.equal(padded, packed.to_padded(5).values)


# --- memory, trap 49 ------------------------------------------------------------------------------


def test_what_moves_no_id_is_a_view(device):
    packed = build(MODEL, device)
    base = packed.values.untyped_storage().data_ptr()

    def is_view(result: PackedRagged) -> bool:
        return result.values.untyped_storage().data_ptr() == base

    views = [packed[2:4], packed[[2, 3]], packed[range(1, 4)], packed[[0, 2]], packed[[0, 1, 2, 3]]]
    views += [packed.to(device), *packed.split(2), *packed.chunk(3), packed.repeat(1)]
    views += [packed.repeat_interleave(1), packed[[False, False, True, True, True]]]
    assert all(map(is_view, views))
    assert packed[4].token_ids.untyped_storage().data_ptr() == base
    copies = [packed[[4, 2]], packed[[0, 0]], packed.clone(), packed.repeat(2)]
    copies += [PackedRagged.cat([packed, packed])]
    assert not any(map(is_view, copies))
    assert PackedRagged.cat([packed]) is packed


def test_a_slice_whose_offsets_were_never_read_is_cut_further(device):
    def rest() -> PackedRagged:
        return build(MODEL, device)[2:]  # its ids start at 3 of the parent's

    check(rest()[1:], MODEL[3:])
    check(rest()[2:][:], MODEL[4:])
    check(rest()[[2, 0]], [MODEL[4], MODEL[2]])
    check(rest().repeat(2), MODEL[2:] * 2)
    check(rest().repeat_interleave([0, 1, 2]), [MODEL[3], MODEL[4], MODEL[4]])
    check(PackedRagged.cat([rest(), rest()[1:]]), MODEL[2:] + MODEL[3:])
    check(PackedRagged.from_padded(rest().to_padded(), widths=rest().widths), MODEL[2:])
    check(rest().clone(), MODEL[2:])
    check(rest().to(device, copy=True), MODEL[2:])
    assert lists_of(*rest()[-1]) == MODEL[-1]
    for protocol in (2, 5):
        check(pickle.loads(pickle.dumps(rest(), protocol=protocol)), MODEL[2:])


def test_a_slice_is_right_while_another_thread_reads_the_offsets():
    class Raced(PackedRagged):
        """Another thread makes ``row_offsets`` whenever the host's bounds have been read."""

        __slots__ = ()
        _slot = PackedRagged._row_bounds

        @property
        def _row_bounds(self):
            found = Raced._slot.__get__(self)
            Raced._slot.__set__(self, found - found[0])
            return found

        @_row_bounds.setter
        def _row_bounds(self, bounds):
            Raced._slot.__set__(self, bounds)

    rows = [[[1], [2, 3]], [[4, 5, 6]], [[7], [], [8, 9]]]
    for read in (lambda x: x[1:], lambda x: x.clone()[1:], lambda x: x[[1, 0]][::-1]):
        base = build(rows)[1:]  # its bounds begin at the ids of the first segment
        raced = Raced._make(base.values, base.bounds.copy(), base._row_bounds.copy())
        assert as_lists(read(raced)) == as_lists(read(base))


def test_a_slice_makes_nothing_a_row():
    lengths = [10**5] * 10
    packed = PackedRagged.from_lengths(torch.zeros(10**6, dtype=torch.int32), [1] * 10**6, lengths)
    packed[1:2].cu_seqlens.tolist()
    tracemalloc.start()
    try:
        parts = [packed[1:9], *packed.split(3), packed[[2, 3]]]
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()
    assert parts[0].row_offsets[-1] == parts[0].num_ids == 8 * 10**5


def test_a_clone_is_private():
    packed = build(MODEL)
    for source in (packed, packed[2:], packed[:3]):
        before = as_lists(source)
        for private in (source.clone(), source.to("cpu", copy=True)):
            private.values.fill_(-5)
            private.row_offsets.fill_(-5)
            private.cu_seqlens.fill_(-5)
            assert as_lists(source) == before
    check(packed, MODEL)


def test_the_ids_of_a_strided_input_are_read_in_place():
    values = torch.arange(22, dtype=torch.int32)[::2]
    packed = PackedRagged.from_lengths(values, [3, 0, 8], [1, 2])
    assert as_lists(packed) == [[[0, 2, 4]], [[], [6, 8, 10, 12, 14, 16, 18, 20]]]
    assert packed.values.data_ptr() == values.data_ptr()
    assert packed.contiguous().values.is_contiguous()
    assert packed.contiguous() == packed == pickle.loads(pickle.dumps(packed, protocol=5))
    offsets = torch.tensor([0, 9, 3, 9, 11, 9])[::2]
    counts = torch.tensor([0, 9, 2, 9], dtype=torch.int32)[::2]
    strided = PackedRagged(values, offsets, counts)
    assert strided.row_offsets.is_contiguous()
    assert as_lists(strided)[0][0] == [0, 2, 4]


def test_pickle_protocol_5_ships_buffers_of_its_own_rows_alone():
    packed = build(MODEL)
    for part, num_ids, num_rows in (
        (packed, 11, 9), (packed[2:4], 3, 3), (packed[:1], 3, 3), (packed[1:2], 0, 0),
        (packed[[4, 0]], 8, 6),
    ):  # fmt: skip
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
        assert [buffer.raw().nbytes for buffer in buffers] == [4 * num_ids, 8 * (num_rows + 1)]
        loaded = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
        assert loaded == part
        assert as_lists(loaded) == as_lists(part)
    large = PackedRagged.from_lengths(torch.zeros(10**6).int(), [1, 999_999], [1, 1])
    for protocol in range(2, 6):
        assert len(pickle.dumps(large[:1], protocol)) < 2000


def test_buffers_that_do_not_fit_their_lengths_are_refused():
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(build(MODEL), protocol=5, buffer_callback=buffers.append)
    values, offsets = (bytes(buffer.raw()) for buffer in buffers)
    with pytest.raises(ValueError, match="row_offsets ends at 11, values has 10 ids"):
        pickle.loads(data, buffers=[values[:-4], offsets])
    with pytest.raises(ValueError, match="ends at 9, row_offsets has 8 rows"):
        pickle.loads(data, buffers=[values, offsets[:-8]])


def test_read_only_memory_is_never_written(tmp_path):
    # the pages are mapped without write permission: a write ends this process
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(build(MODEL), protocol=5, buffer_callback=buffers.append)
    pages = []
    for i, buffer in enumerate(buffers):
        (tmp_path / str(i)).write_bytes(bytes(buffer.raw()))
        with (tmp_path / str(i)).open("rb") as handle:
            pages.append(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    packed = pickle.loads(data, buffers=pages)
    use_every_operation(packed)
    check(packed, MODEL)
    check(packed[2:], MODEL[2:])
    private = packed.clone()
    private.values.fill_(0)
    check(packed, MODEL)


def test_offsets_past_int32_are_kept():
    """2**33 ids that take no memory: one id, expanded."""
    ids = torch.zeros(1, dtype=torch.int32).expand(2**33)
    packed = PackedRagged.from_lengths(ids, [2**32 - 1, 1, 2**32], [1, 1, 1])
    assert packed.row_offsets.tolist() == [0, 2**32 - 1, 2**32, 2**33]
    assert packed[2:].num_ids == packed[2].token_ids.shape[0] == 2**32
    assert packed[1:].row_offsets.tolist() == [0, 1, 2**32 + 1]
    with pytest.raises(ValueError, match=r"repeat: \d+ ids are more than a tensor holds"):
        packed.repeat(2**29)


def test_equality_means_lengths_widths_ids_and_device():
    packed = build(MODEL)
    assert packed == packed.clone()
    assert packed != build([*MODEL[:-1], [[8, 5], [6, 7, 0], []]])
    assert packed != build([[*MODEL[0], *MODEL[1]], *MODEL[2:]])
    assert packed != build([[[], [7, 9], [3]], *MODEL[1:]])
    assert packed != packed.to("meta")
    assert (packed == 3) is False
    with pytest.raises(TypeError, match="other is a Tensor"):
        packed.equal(packed.values)
    with pytest.raises(TypeError, match="unhashable"):
        hash(packed)
