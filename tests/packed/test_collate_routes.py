"""Routes joined by several threads: what plain NumPy gives, the first fault, no memory but its own.

Oracle: ``np.concatenate`` and plain loops over the rows.
"""

import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed import collate, route_checks
from packhorse.packed.collate import pack_routes, routes_dtype
from packhorse.packed.host_arrays import rows_between

ROOT = Path(__file__).parents[2]
FIELD = "pack_routes: rollout_expert_indices of trajectory"


@pytest.fixture
def _small_tasks(monkeypatch):
    """A few rows a task and a block, so that few rows make many."""
    monkeypatch.setattr(collate, "_BYTES_OF_TASK", 64)
    monkeypatch.setattr(route_checks, "_IDS_OF_TASK", 40)
    monkeypatch.setattr(route_checks, "_PAIRS_AT_ONCE", 200)


def draw_routes(rng, num_rows, num_layers, topk, num_experts, dense=()) -> np.ndarray:
    """[num_rows, L, K] int64, distinct in a row and below E; zeros in ``dense`` layers."""
    keys = rng.random((num_rows, num_layers, num_experts))
    ids = keys.argsort(axis=-1)[..., :topk].astype(np.int64)
    ids[:, list(dense)] = 0
    return ids


def in_layout(rng, ids: np.ndarray):
    """The same ids in some memory layout, as an array or a tensor."""
    kind = rng.integers(7)
    if kind == 0:
        return np.asfortranarray(ids)
    if kind == 1:
        return np.repeat(ids, 3, axis=0)[::3]
    if kind == 2:
        return ids[::-1, :, ::-1].copy()[::-1, :, ::-1]
    if kind == 3:
        ids = ids.copy()
        ids.flags.writeable = False
        return ids
    if kind == 4:
        return torch.from_numpy(ids.copy())
    if kind == 5:
        return torch.from_numpy(ids.transpose(2, 0, 1).copy()).permute(1, 2, 0)
    return ids


def first_fault(ids: list[list[list[int]]], num_experts: int, dense: set[int]) -> bool:
    """Whether plain loops find a fault in one trajectory."""
    for row in ids:
        for layer, experts in enumerate(row):
            if layer in dense:
                if any(experts):
                    return True
            elif len(set(experts)) < len(experts) or not all(
                0 <= expert < num_experts for expert in experts
            ):
                return True
    return False


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_tasks")
@pytest.mark.parametrize("seed", range(60))
def test_any_shapes_dtypes_and_layouts_give_what_concatenate_gives(seed):
    rng = np.random.default_rng(seed)
    num_layers, topk = int(rng.integers(1, 7)), int(rng.integers(1, 12))
    num_experts = int(rng.choice([12, 127, 128, 129, 255, 256, 257, 300]))
    dense = [layer for layer in range(num_layers) if rng.random() < 0.2]
    kinds = [np.int16, np.uint16, np.int32, ">i4", np.int64, np.uint64, "<u4"]
    if num_experts <= 256:
        kinds += [np.uint8] * 3
    if num_experts <= 128:
        kinds += [np.int8]
    plain, given_routes = [], []
    for _ in range(int(rng.integers(0, 8))):
        ids = draw_routes(rng, int(rng.integers(0, 9)), num_layers, topk, num_experts, dense)
        plain.append(ids)
        typed = ids.astype(kinds[rng.integers(len(kinds))])
        given_routes.append(in_layout(rng, typed) if typed.dtype.isnative else typed)
    before = [np.array(ids).tolist() for ids in given_routes]
    empty = np.zeros((0, num_layers, topk), dtype=np.int64)
    expected = np.concatenate([empty, *plain])
    lengths = [len(ids) + int(rng.integers(3)) for ids in plain]
    moe_layers = [layer for layer in range(num_layers) if layer not in dense]
    shape = {"topk": topk, "num_layers": num_layers, "moe_layers": moe_layers}
    for num_threads, check_content in itertools.product((1, 2, 8), (True, False)):
        options = {"num_threads": num_threads, "check_content": check_content}
        packed = pack_routes(given_routes, lengths, num_experts=num_experts, **shape, **options)
        assert packed.dtype == routes_dtype(num_experts)
        assert packed.values.numpy().tolist() == expected.tolist()
        assert packed.lengths == tuple(map(len, plain))
        unknown = pack_routes(given_routes, lengths, num_experts=None, **shape, **options)
        assert unknown.values.tolist() == expected.tolist()
    assert [np.array(ids).tolist() for ids in given_routes] == before
    assert not [thread for thread in threading.enumerate() if "packhorse" in thread.name]


@pytest.mark.parametrize("check_content", [True, False])
@pytest.mark.parametrize(
    ("largest", "given_dtype", "dtype"),
    [
        (7, np.uint8, torch.uint8), (255, np.uint8, torch.uint8), (255, np.int64, torch.uint8),
        (255, np.int16, torch.uint8), (256, np.int16, torch.int16), (300, np.uint16, torch.int16),
        (32767, np.uint16, torch.int16), (32768, np.uint16, torch.int32),
        (2**31 - 1, np.int64, torch.int32),
    ],
)  # fmt: skip
def test_the_ids_choose_the_dtype_where_the_number_of_experts_is_not_known(
    largest, given_dtype, dtype, check_content
):
    small = np.array([[[0, 1]]], dtype=np.uint8)
    ids = np.array([[[0, 1]], [[2, largest]]], dtype=given_dtype)
    for routes in ([small, ids], [ids, small]):
        packed = pack_routes(
            routes, [2, 2], num_experts=None, topk=2, num_layers=1, check_content=check_content
        )
        assert packed.dtype == dtype
        assert packed.values.tolist() == np.concatenate(routes).tolist()


def test_no_rows_and_no_number_of_experts_are_uint8():
    for check_content in (True, False):
        for routes in ([], [np.zeros((0, 3, 2), dtype=np.int64)]):
            packed = pack_routes(
                routes, [5] * len(routes), num_experts=None, topk=2, num_layers=3,
                check_content=check_content,
            )  # fmt: skip
            assert (packed.dtype, packed.row_shape) == (torch.uint8, (3, 2))


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(sum), draw=st.data())
@settings(max_examples=200, deadline=None)
def test_the_rows_between_two_are_views_of_them(lengths, draw):
    rows = np.arange(sum(lengths))
    bounds = [0, *itertools.accumulate(lengths)]
    arrays = [rows[a:b] for a, b in itertools.pairwise(bounds)]
    start = draw.draw(st.integers(0, rows.size - 1))
    stop = draw.draw(st.integers(start + 1, rows.size))
    parts = rows_between(arrays, bounds, start, stop)
    assert np.concatenate(parts).tolist() == list(range(start, stop))
    assert all(np.shares_memory(part, rows) for part in parts if part.size)


def test_the_result_is_an_ordinary_tensor():
    ids = np.tile(np.arange(8, dtype=np.uint8), (20_000, 32, 1))  # past the size of a huge page
    packed = pack_routes([ids], [20_000], num_experts=8, topk=8, num_layers=32)
    values = packed.values
    expected = torch.from_numpy(ids)
    assert values.is_contiguous()
    assert values.untyped_storage().nbytes() == values.numel()
    for other in (
        pickle.loads(pickle.dumps(packed)).values, values.clone().share_memory_(),
        torch.from_dlpack(values), values.numpy().view(np.uint16).view(np.uint8),
    ):  # fmt: skip
        assert torch.equal(torch.as_tensor(other), expected)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert values.numel() in [buffer.raw().nbytes for buffer in buffers]
    values.share_memory_()
    values[0] = 0
    assert values.is_shared()
    assert torch.equal(packed.values[1:], expected[1:])
    assert ids[0, 0, 1] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_result_is_pinned_and_sent_to_a_device():
    ids = np.tile(np.arange(8, dtype=np.uint8), (20_000, 32, 1))
    packed = pack_routes([ids], [20_000], num_experts=8, topk=8, num_layers=32)
    pinned = packed.pin_memory()
    assert pinned.values.is_pinned()
    assert torch.equal(pinned.to("cuda").values.cpu(), torch.from_numpy(ids))


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_tasks")
@pytest.mark.parametrize("seed", range(60))
def test_the_first_wrong_trajectory_is_named_by_any_number_of_threads(seed):
    rng = np.random.default_rng(seed)
    num_layers, topk, num_experts = 3, int(rng.integers(2, 6)), int(rng.choice([20, 200, 300]))
    dense = [1] if seed % 3 == 0 else []
    dtype = np.int64 if seed % 2 else np.int32
    routes = [
        draw_routes(rng, int(rng.integers(0, 7)), num_layers, topk, num_experts, dense).astype(
            dtype
        )
        for _ in range(12)
    ]
    for i in rng.choice(12, 4, replace=False):
        if routes[i].size:
            row, layer = rng.integers(len(routes[i])), rng.integers(num_layers)
            value = [-1, -5, num_experts, 2**31 - 1, int(routes[i][row, layer, 0])][rng.integers(5)]
            routes[i][row, layer, -1] = value
    faulty = [
        i for i, ids in enumerate(routes) if first_fault(ids.tolist(), num_experts, set(dense))
    ]
    lengths = [len(ids) for ids in routes]
    if rng.random() < 0.3:  # a shape is no earlier fault than the ids of a trajectory before it
        i = int(rng.integers(12))
        routes[i] = routes[i][:, :2]
        faulty = sorted({*faulty, i})
    before = [ids.copy() for ids in routes]
    moe_layers = [layer for layer in range(num_layers) if layer not in dense]
    messages = set()
    for num_threads in (1, 2, 8):

        def call(num_threads=num_threads):
            return pack_routes(
                routes, lengths, num_experts=num_experts, topk=topk, num_layers=num_layers,
                moe_layers=moe_layers, num_threads=num_threads,
            )  # fmt: skip

        if not faulty:
            assert call().num_rows == sum(lengths)
            continue
        with pytest.raises(ValueError, match=f"^{FIELD} {faulty[0]}[ ,]") as caught:
            call()
        messages.add(str(caught.value))
        assert not [thread for thread in threading.enumerate() if "packhorse" in thread.name]
    assert len(messages) == (1 if faulty else 0)
    assert all(map(np.array_equal, routes, before))


@pytest.mark.usefixtures("_small_tasks")
@pytest.mark.parametrize("seed", range(200))
def test_a_proof_never_passes_a_fault_and_never_refuses_what_is_right(seed):
    rng = np.random.default_rng(seed)
    topk = int(rng.choice([2, 3, 8, 17]))
    num_experts = int(rng.choice([topk + 1, 100, 128, 129, 255, 256, 257, 400]))
    num_experts = max(num_experts, topk + 1)
    dense = [0, 2] if seed % 2 else []
    ids = draw_routes(rng, 9, 4, topk, num_experts, dense)
    dtype = np.uint8 if num_experts <= 256 and rng.random() < 0.7 else np.int16
    experts_at = ~np.isin(np.arange(4), dense)
    route_checks.check_routes("f", ids.astype(dtype), num_experts, experts_at)
    row, layer = rng.integers(9), rng.choice([1, 3])
    first, second = rng.choice(topk, 2, replace=False)
    wrong = ids.copy()
    wrong[row, layer, first] = wrong[row, layer, second]
    message = f"^f, row {row}, layer {layer}: expert {wrong[row, layer, first]} is repeated"
    with pytest.raises(ValueError, match=message):
        route_checks.check_routes("f", wrong.astype(dtype), num_experts, experts_at)


@pytest.mark.parametrize("num_experts", [16, 128, 250, 256, 300, 20_000, 40_000])
def test_equal_ids_of_neighbouring_rows_and_layers_are_no_repeat(num_experts):
    ids = np.tile([num_experts - 1, 0, num_experts - 2], (50, 4, 1))
    packed = pack_routes([ids] * 3, [50] * 3, num_experts=num_experts, topk=3, num_layers=4)
    assert packed.values.tolist() == np.concatenate([ids] * 3).tolist()


def test_without_a_number_of_experts_faults_are_named_all_the_same():
    right = np.array([[[0, 1]], [[5, 300]]])
    for wrong, message in (
        ([[[0, 0]]], "1, row 0, layer 0: all zeros"),
        ([[[4, 4]]], "1, row 0, layer 0: expert 4 is repeated"),
        ([[[4, -1]]], r"1, row 0, layer 0: a partial -1"),
        ([[[4, 2**31]]], "1, row 0, layer 0: expert 2147483648 is past int32"),
    ):
        for check_content in (True, False):
            options = {"topk": 2, "num_layers": 1, "check_content": check_content}
            routes, lengths = [right, np.array(wrong), right], [2, 1, 2]
            if not check_content and ("repeated" in message or "zeros" in message):
                assert pack_routes(routes, lengths, num_experts=None, **options).num_rows == 5
                continue
            with pytest.raises(ValueError, match=f"^{FIELD} {message}"):
                pack_routes(routes, lengths, num_experts=None, **options)


def test_content_left_to_the_device_is_kept_as_it_is_and_counted_there():
    repeated = np.array([[[3, 3]], [[0, 0]], [[1, 2]]], dtype=np.uint8)
    packed = pack_routes([repeated], [3], num_experts=8, topk=2, num_layers=1, check_content=False)
    assert packed.values.tolist() == repeated.tolist()
    with pytest.raises(ValueError, match="2 layers, expected 1"):
        pack_routes(
            [np.tile(repeated, (1, 2, 1))], [3], num_experts=8, topk=2, num_layers=1,
            check_content=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "dtype", "num_experts"),
    [(-1, np.int16, 256), (256, np.int32, 256), (65535, np.uint16, 300), (2**32, np.int64, 256)],
)
def test_ids_that_would_wrap_are_refused_with_content_unchecked_too(value, dtype, num_experts):
    ids = np.array([[[1, 2]], [[3, value]]], dtype=dtype)
    for num_threads in (1, 2, 8):
        with pytest.raises(ValueError, match=f"^{FIELD} 1, row 1, layer 0: "):
            pack_routes(
                [ids[:1], ids], [1, 2], num_experts=num_experts, topk=2, num_layers=1,
                check_content=False, num_threads=num_threads,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"check_content": 1}, TypeError, "check_content must be a bool, got 1"),
        ({"check_content": None}, TypeError, "check_content must be a bool, got None"),
        ({"num_threads": 0}, ValueError, "num_threads must be positive, got 0"),
        ({"num_threads": "2"}, TypeError, "num_threads must be an integer, got str"),
        ({"num_experts": 0}, ValueError, "num_experts must be positive"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    ids = np.array([[[1, 2]]])
    with pytest.raises(error, match=f"^pack_routes: {message}"):
        pack_routes([ids], [1], **{"num_experts": 8, "topk": 2, "num_layers": 1, **options})


def test_a_masked_array_is_refused():
    ids = np.ma.masked_equal(np.array([[[1, 2]]]), 2)
    with pytest.raises(TypeError, match=f"^{FIELD} 0 is a masked array; fill it first"):
        pack_routes([ids], [1], num_experts=8, topk=2, num_layers=1)


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_peak_is_the_packed_size_and_two_percent():
    program = """
import threading
import numpy as np
from packhorse.packed.collate import pack_routes

def kib(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])

row = np.arange(48 * 8).reshape(1, 48, 8) % 128
routes = [
    np.repeat(row.astype(dtype), rows, axis=0)
    for dtype, rows in (("uint8", 400_000), ("uint8", 1), ("int16", 100_000))
]
options = dict(num_experts=128, topk=8, num_layers=48, num_threads=2)
pack_routes([routes[0][:20_000]], [20_000], **options)  # what is imported and kept
before = kib("VmRSS")
ballast = max(0, kib("VmHWM") - before)  # as high as the peak so far, so that the next shows
ballast = np.ones(ballast << 10, dtype=np.uint8)
before = kib("VmRSS")
packed = pack_routes(routes, [len(ids) for ids in routes], **options)
print(packed.values.numel(), (kib("VmHWM") - before) << 10, threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    size, peak, threads = map(int, done.stdout.split())
    assert size == 500_001 * 48 * 8
    assert size * 0.9 < peak <= size * 1.02
    assert threads == 1


def test_many_short_trajectories_cost_little_more_than_joining_them():
    rng = np.random.default_rng(0)
    ids = draw_routes(rng, 1000, 4, 2, 16).astype(np.uint8)
    routes = [ids[i % 1000 : i % 1000 + i % 4] for i in range(100_000)]
    lengths = [3] * len(routes)
    started = time.thread_time()
    expected = np.concatenate(routes)
    joined_s = time.thread_time() - started
    started = time.thread_time()
    packed = pack_routes(routes, lengths, num_experts=16, topk=2, num_layers=4, num_threads=1)
    packed_s = time.thread_time() - started
    assert np.array_equal(packed.values.numpy(), expected)
    assert packed_s < 30 * joined_s  # 5 times as long on one core of an EPYC
