"""DeviceStager: what arrives, from where it is read, who waits for whom.

Oracle: NumPy and lists of the batch that was staged. Tests that take ``device`` run on the CPU too,
where the same rows are laid out and copied; who waits is seen on a GPU, by kernels that sleep.
"""

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.transport_device import DeviceStager
from tests.packed.transport_helpers import ROUTES, SUPPORT, chosen, flat, make_batch, make_ragged

TENTH = 200_000_000  # cycles of ``torch.cuda._sleep``, about a tenth of a second
SMALL = {"buffer_bytes": 4096, "num_buffers": 2, "num_threads": 2}


@pytest.fixture(params=[{}, SMALL, {"buffer_bytes": 5000, "num_threads": 1}], ids=str)
def stager(request, device) -> DeviceStager:
    return DeviceStager(device, **request.param)


def rows_of(ragged: PackedRagged) -> list[list[list[int]]]:
    """By trajectory and row, the ids; read from the three tensors alone."""
    ids, offsets = ragged.values.tolist(), ragged.row_offsets.tolist()
    rows = [ids[a:b] for a, b in itertools.pairwise(offsets)]
    ends = ragged.cu_seqlens.tolist()
    return [rows[a:b] for a, b in itertools.pairwise(ends)]


def on_host(batch: Batch) -> Batch:
    return batch.to("cpu")


# --- what arrives ---------------------------------------------------------------------------------

SELECTIONS = [
    (None, [0, 1, 2, 3, 4, 5]),
    ([4, 0, 0, 5], [4, 0, 0, 5]),
    ([1, 2, 3, -1], [1, 2, 3, 5]),
    (slice(2, 4), [2, 3]),
    (slice(None, None, -2), [5, 3, 1]),
    (range(1, 3), [1, 2]),
    (np.array([True, False, True, True, False, False]), [0, 2, 3]),
    (torch.tensor([3]), [3]),
    ([], []),
]


@pytest.mark.parametrize(("trajectories", "ids"), SELECTIONS, ids=str)
def test_a_staged_batch_holds_those_trajectories(stager, trajectories, ids):
    batch = make_batch(6, 80)
    before = flat(batch)
    staged = stager.stage(batch, trajectories=trajectories).wait()
    assert {staged[ROUTES].device, staged["token_ids"].device} == {stager.device}
    assert flat(on_host(staged)) == chosen(before, ids) == chosen(flat(batch), ids)
    assert staged.metadata == batch.metadata
    assert len(staged) == len(ids)
    assert staged[ROUTES].lengths == tuple(np.diff(staged[ROUTES].cu_seqlens.cpu()).tolist())


@pytest.mark.parametrize(("trajectories", "ids"), SELECTIONS, ids=str)
def test_a_staged_ragged_field_holds_those_trajectories(stager, trajectories, ids):
    whole = make_ragged(8, 60)
    for ragged in (whole[:6], whole[2:]):  # of the second the first id is not 0
        staged = stager.stage(ragged, trajectories=trajectories).wait()
        assert {staged.values.device, staged.row_offsets.device} == {stager.device}
        rows = rows_of(ragged)
        assert rows_of(staged) == [rows[i] for i in ids]
        assert staged.widths.tolist() == [len(row) for i in ids for row in rows[i]]
        batch = make_batch(6, 10).with_fields({SUPPORT: ragged})
        field = stager.stage(batch, trajectories=trajectories).wait()[SUPPORT]
        assert rows_of(field) == [rows[i] for i in ids]


DTYPES = [
    torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_stride(stager, dtype):
    generator = np.random.default_rng(5)
    bits = torch.from_numpy(generator.integers(0, 2, (90, 6, 32), dtype=np.uint8))
    values = bits.view(dtype) if dtype != torch.bool else bits.bool()
    lengths = [40, 0, 30, 20]
    for given in (values, values[:, 2:5], values.transpose(1, 2), values.flip(0)[:, ::2]):
        packed = PackedTensor.from_lengths(given, lengths)
        staged = stager.stage(packed, trajectories=[2, 1, 0]).wait()
        assert staged.lengths == (30, 0, 40)
        assert staged.values.is_contiguous()
        raw = [x.contiguous().view(torch.uint8) for x in (given[40:70], given[:40])]
        assert torch.equal(staged.values.cpu().view(torch.uint8), torch.cat(raw))


def test_views_with_a_pending_conjugate_or_sign(stager):
    values = torch.arange(12).view(6, 2).to(torch.complex64) * (1 + 2j)
    staged = stager.stage(Batch({"x": values.conj(), "y": values.conj().imag})).wait()
    assert torch.equal(staged["x"].cpu(), values.conj().resolve_conj())
    assert torch.equal(staged["y"].cpu(), -values.imag)


def test_things_without_rows_or_dimension(stager):
    batch = Batch(
        {
            "empty": torch.empty(2, 0, 3),
            "routes": PackedTensor.empty((3, 2), dtype=torch.int16, num_segments=2),
            "listed": [torch.tensor(7), None],
            "outer": {"inner": torch.arange(2)},
        }
    )
    staged = stager.stage(batch, trajectories=[1, 0]).wait()
    assert staged["empty"].shape == (2, 0, 3)
    assert staged["routes"].values.shape == (0, 3, 2)
    assert staged["listed"][0] is None
    assert staged["listed"][1].shape == ()
    assert staged["listed"][1].item() == 7
    assert staged["outer"]["inner"].tolist() == [1, 0]
    nothing = stager.stage(Batch({}, batch_size=3)).wait()
    assert (len(nothing), dict(nothing.fields)) == (3, {})


def test_random_batches_and_selections(device):
    draw = random.Random(7)
    for seed in range(40):
        count = draw.randrange(1, 12)
        batch = make_batch(count, draw.randrange(1, 60), seed)
        ids = [draw.randrange(count) for _ in range(draw.randrange(0, 15))]
        stager = DeviceStager(
            device,
            buffer_bytes=draw.randrange(4096, 20_000),
            num_buffers=draw.randrange(2, 6),
            num_threads=draw.randrange(1, 4),
        )
        staged = on_host(stager.stage(batch, trajectories=ids).wait())
        assert flat(staged) == chosen(flat(batch), ids), (seed, ids)


def test_what_was_staged_is_private(stager):
    batch = make_batch(3, 50)
    wanted = flat(batch)
    copy = stager.stage(batch)
    batch[ROUTES].values.fill_(0)
    batch["token_ids"].fill_(0)
    staged = copy.wait()
    assert flat(on_host(staged)) == wanted
    storages = {
        x.untyped_storage().data_ptr()
        for x in (staged[ROUTES].values, staged[ROUTES].cu_seqlens, staged["token_ids"])
    }
    assert len(storages) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_batch_is_staged_in_any_grad_mode(device, mode):
    stager, batch = DeviceStager(device, **SMALL), make_batch(4, 60)
    with mode():
        staged = stager.stage(batch, trajectories=[3, 1]).wait()
        assert flat(on_host(staged)) == chosen(flat(batch), [3, 1])


def test_prefetch_gives_all_in_order_and_takes_them_early(device):
    taken = []

    def batches():
        for k in range(5):
            taken.append(k)
            yield make_batch(2, 20, seed=k)

    stager = DeviceStager(device)
    for k, staged in enumerate(stager.prefetch(batches(), ahead=2)):
        assert taken == list(range(min(k + 3, 5)))
        assert flat(on_host(staged)) == flat(make_batch(2, 20, seed=k))
    assert k == 4
    taken.clear()
    next(stager.prefetch(batches(), ahead=0))
    assert taken == [0]
    assert list(stager.prefetch([])) == []


def test_threads_share_a_stager(device):
    stager, wrong = DeviceStager(device, **SMALL), []

    def work(number: int) -> None:
        for seed in range(8):
            batch = make_batch(4, 40, seed=100 * number + seed)
            if flat(on_host(stager.stage(batch).wait())) != flat(batch):
                wrong.append((number, seed))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"device": "meta"}, ValueError, "device must be a CUDA device or 'cpu', got meta"),
        ({"buffer_bytes": 64}, ValueError, "buffer_bytes must be at least 4096, got 64"),
        ({"buffer_bytes": 1e6}, TypeError, "buffer_bytes must be an integer, got float"),
        ({"num_buffers": 1}, ValueError, "num_buffers must be at least 2, got 1"),
        ({"num_threads": 0}, ValueError, "num_threads must be positive, got 0"),
    ],
    ids=str,
)
def test_a_stager_that_cannot_work_is_refused(options, error, said):
    with pytest.raises(error, match=f"^DeviceStager: {said}"):
        DeviceStager(**{"device": "cpu", **options})


def test_fields_that_are_not_on_the_host_are_refused_by_name(stager):
    batch = make_batch(2, 4)
    for path, said in (("token_ids", "token_ids"), (ROUTES, ROUTES)):
        with pytest.raises(ValueError, match=f"^DeviceStager.stage: {said} is on meta; only host"):
            stager.stage(batch.with_fields({path: batch[path].to("meta")}))
    nested = batch.with_fields({"nested": {"weights": torch.ones(2, requires_grad=True)}})
    with pytest.raises(ValueError, match=r"stage: nested\.weights requires grad; stage its det"):
        stager.stage(nested)
    with pytest.raises(TypeError, match="value must be a Batch, a PackedTensor or a PackedRagg"):
        stager.stage(torch.zeros(3))
    with pytest.raises(IndexError, match="stage: trajectories: index 2 is out of range for 2"):
        stager.stage(batch, trajectories=[2])
    with pytest.raises(ValueError, match="ahead must not be negative, got -1"):
        stager.prefetch([batch], ahead=-1)


def test_rows_past_int32_are_refused_by_field():
    many = PackedTensor.from_lengths(torch.zeros(1, dtype=torch.uint8).expand(2**30), [2**30])
    batch = Batch({"env": {"steps": many}})
    with pytest.raises(ValueError, match=r"^DeviceStager.stage: env.steps: .* 2147483648 rows do"):
        DeviceStager("cpu").stage(batch, trajectories=[0, 0])


def test_a_captured_stream_is_refused(cuda):
    stager = DeviceStager(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="cannot be captured in a CUDA"):
        stager.stage(make_batch(2, 4))


# --- who waits ------------------------------------------------------------------------------------


def test_the_copy_passes_what_the_device_computes(cuda, no_host_sync):
    """Neither ``stage`` nor ``wait`` waits for the device, and the copy ends beside its work."""
    stager, batch = DeviceStager(cuda), make_batch(8, 2000)
    stager.stage(batch).wait()
    computed = torch.cuda.Event()
    with no_host_sync():
        torch.cuda._sleep(10 * TENTH)
        copy = stager.stage(batch)
        staged = copy.wait()
        computed.record()
    while not copy.is_done():
        pass
    assert not computed.query()
    assert flat(on_host(staged)) == flat(batch)


def test_a_copy_ends_within_a_matrix_product(cuda):
    stager = DeviceStager(cuda)
    batch = make_batch(8, 20_000, layers=16).pin_memory()
    a = torch.randn(8192, 8192, device=cuda, dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    begun, ended = torch.cuda.Event(), torch.cuda.Event()
    begun.record()
    for _ in range(100):
        a @ a
    ended.record()
    begun.synchronize()
    copy = stager.stage(batch)
    while not copy.is_done():
        pass
    assert not ended.query()
    assert flat(on_host(copy.wait())) == flat(batch)


def test_the_current_stream_waits_for_the_copy(cuda, no_host_sync):
    side = torch.cuda.Stream()
    stager, batch = DeviceStager(cuda, stream=side), make_batch(8, 500)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with no_host_sync(), torch.cuda.stream(stream):
            with torch.cuda.stream(side):
                torch.cuda._sleep(TENTH)
            staged = stager.stage(batch).wait().to("cuda", copy=True)
        stream.synchronize()
        assert flat(on_host(staged)) == flat(batch)


def test_a_buffer_is_written_again_only_after_its_copy(cuda, no_host_sync):
    """The copying stream sleeps, so that all buffers are in flight when the next is needed."""
    side = torch.cuda.Stream()
    stager = DeviceStager(cuda, stream=side, **SMALL)
    batches = [make_batch(6, 60, seed) for seed in range(6)]  # each more than 2 buffers
    copies = []
    with no_host_sync():
        for batch in batches:
            with torch.cuda.stream(side):
                torch.cuda._sleep(TENTH // 4)
            copies.append(stager.stage(batch))
    for copy, batch in zip(copies, batches, strict=True):
        assert flat(on_host(copy.wait())) == flat(batch)


def test_memory_that_was_given_back_is_not_written_while_it_is_read(cuda):
    """A batch is dropped when its use is launched, not when it has ended; the next may not get its
    memory before."""
    stager = DeviceStager(cuda)
    batches = [make_batch(8, 1000, seed) for seed in range(4)]
    wanted = [batch[ROUTES].values for batch in batches]
    stager.stage(batches[0]).wait()
    used = []
    for batch in batches:
        staged = stager.stage(batch).wait()
        torch.cuda._sleep(2 * TENTH)
        used.append(staged[ROUTES].values.clone())
        del staged
    torch.cuda.synchronize()
    for out, values in zip(used, wanted, strict=True):
        assert torch.equal(out.cpu(), values)


@pytest.mark.parametrize("registered", [False, True])
def test_a_pinned_source_is_kept_until_it_was_read(cuda, registered):
    side = torch.cuda.Stream()
    stager = DeviceStager(cuda, stream=side)
    batch = make_batch(8, 6000)
    assert batch[ROUTES].values.nbytes > 2**20
    source = batch.pin_memory()
    pages = None
    if registered:  # pinned by another than torch, which so does not know of the copy
        pages = torch.from_numpy(np.empty(2**24, dtype=np.uint8))
        values = pages[: batch[ROUTES].values.nbytes].view(batch[ROUTES].values.shape)
        values.copy_(batch[ROUTES].values)
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)
        )
        source = source.with_fields(
            {ROUTES: PackedTensor.from_lengths(values, batch[ROUTES].lengths)}
        )
        assert source[ROUTES].is_pinned()
    with torch.cuda.stream(side):
        torch.cuda._sleep(5 * TENTH)
    copy = stager.stage(source)
    kept = [tensor.untyped_storage().data_ptr() for _, held in stager._sources for tensor in held]
    assert source[ROUTES].values.untyped_storage().data_ptr() in kept
    del source
    for _ in range(8):  # would be given the memory that is read still
        torch.empty(2**22, dtype=torch.uint8, pin_memory=True).fill_(99)
    assert not copy.is_done()
    assert flat(on_host(copy.wait())) == flat(batch)
    if registered:
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(pages.data_ptr()))


def test_pinned_rows_are_sent_from_where_they_are(cuda):
    """Short runs of them go through the buffers like others."""
    stager, batch = DeviceStager(cuda), make_batch(8, 20_000).pin_memory()
    for ids in ([3, 4, 5], [6, 0, 3], list(range(8))):
        assert flat(on_host(stager.stage(batch, trajectories=ids).wait())) == chosen(
            flat(batch.to("cpu")), ids
        )
    assert stager._sources
    torch.cuda.synchronize()
    stager.stage(make_batch(2, 4)).wait()
    assert not stager._sources


def test_a_prefetched_loop_never_waits(cuda, no_host_sync):
    stager = DeviceStager(cuda, num_buffers=12, num_threads=4)
    batches = [make_batch(8, 1500, seed) for seed in range(6)]
    next(stager.prefetch(batches[:1]))
    with no_host_sync():
        sums = [b[ROUTES].values.sum(dtype=torch.int64) for b in stager.prefetch(batches)]
    assert [int(s) for s in sums] == [int(b[ROUTES].values.numpy().sum()) for b in batches]
