"""Ray's object store: a batch in it once, its pages with every getter, its own rows with each rank.

A real Ray is started here, and worker processes of its own look at the same objects. Where memory
lies is read from /proc/self/maps, what an object takes from the store.
"""

import gc
import importlib
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.transport import get_batch, put_batch, put_parts
from tests.packed.transport_helpers import (
    ROUTES,
    SUPPORT,
    chosen,
    flat,
    make_batch,
    make_ragged,
    mapping_of,
    read_only,
    snippets,
    use,
)

STORE_BYTES = 80 * 2**20
HEAD_BYTES = 6_000  # of an object beside its fields' bytes: the pickle, and Ray's own
refused_before_start: list[str] = []


class Rank:
    """A data-parallel rank in a process of its own."""

    def look(self, batch: Batch) -> tuple[str, str, dict]:
        """Where its packed and dense fields lie, and what the batch holds."""
        return mapping_of(batch[ROUTES].values), mapping_of(batch["token_ids"]), flat(batch)

    def use_read_only(self, batch: Batch) -> tuple[int, int]:
        with warnings.catch_warnings(), read_only(batch[ROUTES].values) as pages:
            warnings.simplefilter("error")
            return pages, use(batch)

    def make(self, rows: int) -> Batch:
        return make_batch(4, rows)

    def put(self, rows: int) -> list:
        return [put_batch(make_batch(4, rows))]


@pytest.fixture(scope="module")
def ray():
    try:
        import ray
    except ImportError:
        if "CI" in os.environ:
            raise
        pytest.skip("Ray is not installed")
    for call in (lambda: put_batch(make_batch(1, 4)), lambda: put_parts(make_batch(1, 4), 1)):
        with pytest.raises(RuntimeError) as error:
            call()
        refused_before_start.append(str(error.value))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ph") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        ray.init(
            num_cpus=1,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def rank(ray):
    actor = ray.remote(num_cpus=0)(Rank).remote()
    yield actor
    ray.kill(actor)


def stored_bytes(ray, ref) -> int:
    return ray.experimental.get_object_locations([ref])[ref]["object_size"]


def in_store(mapping: str) -> bool:
    return "plasma" in mapping and "/dev/shm" in mapping


# --- pages ----------------------------------------------------------------------------------------


def test_a_getter_has_the_stores_own_pages(ray, rank):
    batch = make_batch(5, 300)
    ref = put_batch(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = get_batch(ref)
    assert flat(got) == flat(batch)
    assert got.metadata == {"step": 0}
    for packed in (got[ROUTES], got[SUPPORT]):
        assert in_store(mapping_of(packed.values))
    assert not in_store(mapping_of(batch[ROUTES].values))
    again = get_batch(ref)
    assert again[ROUTES].values.data_ptr() == got[ROUTES].values.data_ptr()

    packed_at, dense_at, held = ray.get(rank.look.remote(ref))
    assert in_store(packed_at)
    assert dense_at
    assert not in_store(dense_at)
    assert held == flat(batch)


def test_a_packed_field_alone_is_put_as_a_batch_is(ray):
    routes, ragged = make_batch(3, 200)[ROUTES], make_ragged(6, 300)
    got = get_batch(put_batch(routes))
    assert in_store(mapping_of(got.values))
    assert got == routes
    got = get_batch(put_batch(ragged[2:]))
    assert isinstance(got, PackedRagged)
    assert in_store(mapping_of(got.values))
    assert in_store(mapping_of(got.row_offsets))
    assert got == ragged[2:]
    batch = make_batch(6, 30).with_fields({SUPPORT: ragged})
    got = get_batch(put_parts(batch, 3)[1])
    assert got[SUPPORT] == ragged[2:4]
    assert in_store(mapping_of(got[SUPPORT].values))


def test_a_worker_puts_too(ray, rank):
    (ref,) = ray.get(rank.put.remote(50))
    got = get_batch(ref)
    assert flat(got) == flat(make_batch(4, 50))
    assert in_store(mapping_of(got[ROUTES].values))


def test_operations_write_no_page_of_the_store(ray, rank):
    batch = make_batch(5, 2000)
    before, ref = flat(batch), put_batch(batch)
    pages, results = ray.get(rank.use_read_only.remote(ref))  # a write ends that process
    assert pages >= 5
    assert results > 20
    assert flat(get_batch(ref)) == before


def test_a_dense_field_that_was_got_is_written_without_another_getter_seeing_it(ray):
    ref = put_batch(make_batch(3, 10))
    first, second = get_batch(ref), get_batch(ref)
    kept = second["token_ids"].tolist()
    first["token_ids"].fill_(-5)
    assert second["token_ids"].tolist() == kept == get_batch(ref)["token_ids"].tolist()


def test_a_view_keeps_its_object_when_the_reference_is_gone(ray):
    batch = make_batch(4, 20_000, layers=16)  # 10 MB of 80
    ref = put_batch(batch)
    part = get_batch(ref)[1:2]
    del ref
    gc.collect()
    wanted = chosen(flat(batch), [1])
    for seed in range(3):  # more than the store holds, each in the room of the one before
        others = [put_batch(make_batch(4, 20_000, 4 * seed + i, layers=16)) for i in range(4)]
        del others
    assert in_store(mapping_of(part[ROUTES].values))
    assert flat(part) == wanted


def test_objects_that_were_spilled_to_disk_come_back(ray):
    batches = [make_batch(4, 20_000, seed, layers=16) for seed in range(2)]
    first = [put_batch(batch) for batch in batches]
    others = [put_batch(make_batch(4, 20_000, seed + 9, layers=16)) for seed in range(8)]
    where = ray.experimental.get_object_locations(first)
    assert any(where[ref]["did_spill"] for ref in first)
    for ref, batch in zip(first, batches, strict=True):
        got = get_batch(ref)
        assert flat(got) == flat(batch)
        assert "(deleted)" in mapping_of(got[ROUTES].values)  # of a file that the store made
    del others


def test_a_small_result_that_ray_sends_by_message_is_a_batch_like_any(ray, rank):
    small, large = get_batch(rank.make.remote(4)), get_batch(rank.make.remote(8000))
    assert not in_store(mapping_of(small[ROUTES].values))
    assert in_store(mapping_of(large[ROUTES].values))
    for got, rows in ((small, 4), (large, 8000)):
        assert flat(got) == flat(make_batch(4, rows))
        use(got)


# --- sizes and parts ------------------------------------------------------------------------------


def test_an_eighth_ships_an_eighth(ray):
    lengths = [1000] * 16
    values = torch.from_numpy(np.random.default_rng(3).integers(0, 99, (16_000, 8, 8), np.uint8))
    batch = Batch({ROUTES: PackedTensor.from_lengths(values, lengths)})
    whole = stored_bytes(ray, put_batch(batch))
    assert values.nbytes <= whole <= values.nbytes + HEAD_BYTES
    for part in (batch.chunk(8)[3], batch[[6, 7]], batch[[3, 9]]):
        size = stored_bytes(ray, put_batch(part))
        assert values.nbytes // 8 <= size <= values.nbytes // 8 + HEAD_BYTES
    sizes = [stored_bytes(ray, ref) for ref in put_parts(batch, 8)]
    assert max(sizes) <= values.nbytes // 8 + HEAD_BYTES
    column = PackedTensor.from_lengths(values[:, 2:4], lengths)  # not contiguous
    ref = put_batch(column)
    assert values.nbytes // 4 <= stored_bytes(ray, ref) <= values.nbytes // 4 + HEAD_BYTES
    assert get_batch(ref) == column


@pytest.mark.parametrize(
    ("parts", "ids"),
    [
        (3, [[0, 1, 2], [3, 4], [5, 6]]),
        (1, [[0, 1, 2, 3, 4, 5, 6]]),
        (9, [[0], [1], [2], [3], [4], [5], [6], [], []]),
        ([[6, 0], (3, 3), range(1, 3)], [[6, 0], [3, 3], [1, 2]]),
        ([slice(2, 4), slice(None, None, 3)], [[2, 3], [0, 3, 6]]),
        ([np.array([True, False] * 3 + [True]), torch.tensor([5])], [[0, 2, 4, 6], [5]]),
        (([-1], []), [[6], []]),
    ],
    ids=str,
)  # fmt: skip
def test_a_rank_gets_its_own_trajectories_alone(ray, rank, parts, ids):
    batch = make_batch(7, 30)
    refs = put_parts(batch, parts)
    assert len(refs) == len(ids)
    for ref, own in zip(refs, ids, strict=True):
        assert flat(get_batch(ref)) == chosen(flat(batch), own)
    assert ray.get(rank.look.remote(refs[0]))[2] == chosen(flat(batch), ids[0])


def test_parts_of_packed_fields_are_cut_as_those_of_a_batch(ray):
    ragged = make_ragged(5, 40)
    first, second = map(get_batch, put_parts(ragged, 2))
    assert (first, second) == (ragged[:3], ragged[3:])


def test_the_page_with_ray_runs(ray):
    batch = make_batch(4, 50)
    names = {"__name__": "__main__", "batch": batch, "dp_size": 1}  # whose classes go by value
    exec(snippets()[0], names)
    assert names["counts"] == [(4, batch[ROUTES].num_rows)]


def test_the_benchmarks_calls_give_what_was_put(ray, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    bench = importlib.import_module("transport_speed")
    batch = bench.make_batch(2**20)
    array = bench.bytes_of(batch).numpy()
    calls = bench.ray_calls(batch, array)
    assert torch.equal(bench.bytes_of(calls["packhorse"]()[0]), torch.from_numpy(array))
    assert np.array_equal(calls["numpy"]()[0], array)
    assert calls["chunk"]()[0] == batch[24:32]
    sizes = bench.ray_sizes(calls)
    assert array.nbytes <= sizes["numpy"] <= sizes["packhorse"] <= array.nbytes + HEAD_BYTES
    assert array.nbytes // 8 <= sizes["chunk"] <= array.nbytes // 8 + HEAD_BYTES


# --- what is refused ------------------------------------------------------------------------------


def test_nothing_is_put_before_ray_is_started(ray):
    put, parts = refused_before_start
    assert put == "put_batch: Ray is not started in this process; call ray.init() first"
    assert parts.startswith("put_parts: Ray is not started")


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for call in (put_batch, get_batch, lambda batch: put_parts(batch, 2)):
        with pytest.raises(ImportError, match=r"needs the package ray: pip install 'packhorse"):
            call(make_batch(2, 4))


def on_meta(batch: Batch, path: str) -> Batch:
    if path == "metadata":
        batch.metadata["scale"] = torch.ones(2, device="meta")
        return batch
    if path == "nested":
        return batch.with_fields({path: {"weights": batch[path]["weights"].to("meta")}})
    if path == "images":
        return batch.with_fields({path: [*batch[path][:2], torch.ones(1, device="meta")]})
    return batch.with_fields({path: batch[path].to("meta")})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (ROUTES, ROUTES),
        ("token_ids", "token_ids"),
        ("nested", "nested.weights"),
        ("images", "images of trajectory 2"),
        ("metadata", "metadata 'scale'"),
    ],
)
def test_a_tensor_of_a_device_is_refused_by_name(ray, path, said):
    batch = on_meta(make_batch(3, 4), path)
    for name, call in (("put_batch", put_batch), ("put_parts", lambda batch: put_parts(batch, 2))):
        with pytest.raises(ValueError, match=f"^{name}: {said} is on meta; only host memory"):
            call(batch)


def test_a_tensor_of_a_graph_is_refused_by_name(ray):
    batch = make_batch(2, 4).with_fields({"logits": torch.zeros(2, 3, requires_grad=True)})
    with pytest.raises(ValueError, match=r"^put_batch: logits requires grad; ship its detach"):
        put_batch(batch)
    assert get_batch(put_batch(batch.detach())) == batch.detach()


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        (0, ValueError, "parts must be positive, got 0"),
        (2.0, TypeError, "parts must be a number, or the trajectories of each part, got float"),
        ("all", TypeError, "parts must be a number, or the trajectories of each part, got str"),
        ([0, 1], TypeError, "part 0 must be the trajectories of a rank, got 0"),
        ([[0], [7]], IndexError, "part 1: index 7 is out of range for 3 segments"),
        ([[0], [True]], ValueError, r"part 1: a mask of shape \(1,\) for 3 segments"),
        ([slice(0, 3, 0)], ValueError, "part 0: a slice step must not be 0"),
        ([["a"]], TypeError, r"part 0: the index\[0\] must be an integer, got str"),
    ],
)
def test_parts_that_are_not_there_are_refused(ray, parts, error, said):
    with pytest.raises(error, match=f"^put_parts: {said}"):
        put_parts(make_batch(3, 4), parts)


def test_what_is_no_batch_is_refused(ray):
    one = make_batch(2, 4)
    kinds = "must be a Batch, a PackedTensor or a PackedRagged, got"
    for call, said in (
        (lambda: put_batch(np.zeros(3)), f"put_batch: value {kinds} ndarray"),
        (lambda: put_parts([one], 2), f"put_parts: value {kinds} list"),
        (lambda: get_batch(ray.put(3)), f"get_batch: the object {kinds} int"),
        (lambda: get_batch([put_batch(one)]), "get_batch: ref must be a ray.ObjectRef, got list"),
        (lambda: get_batch(one), "get_batch: ref must be a ray.ObjectRef, got Batch; a batch that"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
            call()
