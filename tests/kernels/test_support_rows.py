"""gather_support, gather_ragged_support and pad_ragged_support.

Oracle: Python lists that share no code with the package. Tolerance: none; ids are moved.
"""

import os
import subprocess
import sys
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse.kernels import support_rows
from packhorse.kernels.support_rows import (
    MAX_ROW_IDS,
    gather_ragged_support,
    gather_support,
    pad_ragged_support,
)
from packhorse.testing import poisoned_empty, random_row_ids

ragged_op = torch.ops.packhorse.gather_ragged_support.default
pad_op = torch.ops.packhorse.pad_ragged_support.default


# --- oracle and inputs ----------------------------------------------------------------------------


def rows_of(token_ids: torch.Tensor, row_offsets: torch.Tensor) -> list[list[int]]:
    ids, offsets = token_ids.tolist(), row_offsets.tolist()
    return [ids[begin:end] for begin, end in pairwise(offsets)]


def named_rows(
    token_ids: torch.Tensor, row_offsets: torch.Tensor, row_ids: torch.Tensor
) -> list[list[int]]:
    rows = rows_of(token_ids, row_offsets)
    return [rows[row] if row >= 0 else [] for row in row_ids.tolist()]


def make_ragged(widths, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the given widths; every id of the batch is another number."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(widths, dtype=np.int64))])
    ids = np.random.default_rng(seed).permutation(int(offsets[-1])).astype(np.int32) + 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(offsets).to(device)


def draw_widths(num_rows: int, seed: int = 0) -> list[int]:
    """As public figures have them: mean 8, median 2, p99 82; and some rows without an id."""
    rng = np.random.default_rng(seed)
    widths = np.minimum(np.exp(rng.normal(0.7, 1.6, num_rows)).astype(int), 120)
    widths[rng.random(num_rows) < 0.1] = 0
    return widths.tolist()


def check_ragged(token_ids, row_offsets, row_ids, capacity=None) -> None:
    with poisoned_empty():
        out = gather_ragged_support(token_ids, row_offsets, row_ids, capacity=capacity)
    expected = named_rows(token_ids, row_offsets, row_ids)
    flat = [token for row in expected for token in row]
    size = token_ids.shape[0] if capacity is None else capacity
    assert out.token_ids.dtype == torch.int32
    assert out.row_offsets.dtype == torch.int64
    assert out.token_ids.tolist() == flat + [-1] * (size - len(flat))
    assert rows_of(out.token_ids, out.row_offsets) == expected


def check_padded(token_ids, row_offsets, row_ids, width) -> None:
    with poisoned_empty():
        out = pad_ragged_support(token_ids, row_offsets, row_ids, width=width)
    expected = [
        row + [-1] * (width - len(row)) for row in named_rows(token_ids, row_offsets, row_ids)
    ]
    assert out.dtype == torch.int32
    assert out.is_contiguous()
    assert out.shape == (row_ids.shape[0], width)
    assert out.tolist() == expected


def set_blocks(patch: pytest.MonkeyPatch, slots: int, groups: int) -> None:
    """Blocks of so many slots, so many groups read at once: every path on a few rows."""
    for name, value in {
        "_BLOCK_M": slots, "_BLOCK_G": groups, "_BLOCKS": 2, "_CHUNK": 32, "_RUN": 32, "_SPAN": 64
    }.items():  # fmt: skip
        patch.setattr(support_rows, name, value)


@pytest.fixture(params=[(16, 4), (8, 2)], ids=["16-slots-4-groups", "8-slots-2-groups"])
def small_blocks(request, monkeypatch):
    """129 slots are then more groups than are read at once."""
    set_blocks(monkeypatch, *request.param)


# --- fixed width ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 1, 20, 64, 67])
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_gather_support_matches_a_loop(width, missing, device):
    support = torch.arange(90 * width, dtype=torch.int32, device=device).view(90, width) + 1
    row_ids = random_row_ids(70, 90, missing=missing, device=device)
    with poisoned_empty():
        out = gather_support(support, row_ids)
    rows = support.tolist()
    expected = [rows[row] if row >= 0 else [-1] * width for row in row_ids.tolist()]
    assert out.dtype == torch.int32
    assert out.is_contiguous()
    assert out.tolist() == expected


def test_gather_support_of_strided_and_no_rows(device):
    support = torch.arange(240, dtype=torch.int32, device=device).view(12, 20)
    row_ids = torch.tensor([3, -1, 0], device=device)
    for view in (support[::2], support[:, ::2], support[:, 3:7], support.view(20, 12).T):
        assert torch.equal(gather_support(view, row_ids), gather_support(view.clone(), row_ids))
        assert gather_support(view, row_ids)[0].tolist() == view[3].tolist()
    none = torch.tensor([-1, -1], device=device)
    assert gather_support(support[:0], none).tolist() == [[-1] * 20] * 2
    assert gather_support(support, none[:0]).shape == (0, 20)


# --- ragged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_ids", [1, 255, 256, 257, 1500])
def test_gather_ragged_matches_lists(num_ids, missing, device):
    token_ids, row_offsets = make_ragged(draw_widths(1600), device)
    row_ids = random_row_ids(num_ids, 1600, missing=missing, device=device)
    check_ragged(token_ids, row_offsets, row_ids)


@pytest.mark.parametrize("num_ids", [15, 16, 17, 33, 129, 260])
def test_blocks_and_groups_of_any_number(num_ids, small_blocks, device):
    token_ids, row_offsets = make_ragged(draw_widths(400, seed=1), device)
    row_ids = random_row_ids(num_ids, 400, missing=0.2, device=device, seed=num_ids)
    check_ragged(token_ids, row_offsets, row_ids)


def runs_of_rows(lengths: list[int], num_rows: int, missing: int, device: str) -> torch.Tensor:
    """Slots of trajectories: rows in order, then ``missing`` slots without one."""
    ids, first = [], 0
    for length in lengths:
        ids += [*range(first, first + length), *[-1] * missing]
        first = (first + length + 3) % num_rows  # rows between trajectories belong to others
    return torch.tensor(ids, device=device)


@pytest.mark.parametrize("missing", [0, 9])
@pytest.mark.parametrize("lengths", [[90], [40, 1, 0, 30, 7], [5] * 9, [16] * 4], ids=str)
def test_rows_in_order_are_runs(lengths, missing, small_blocks, device):
    """Blocks within one run, across two, and of several short ones; widths past a span."""
    token_ids, row_offsets = make_ragged(draw_widths(200, seed=5), device)
    row_ids = runs_of_rows(lengths, 70, missing, device)
    check_ragged(token_ids, row_offsets, row_ids)


def test_a_run_in_which_one_row_is_named_twice_is_none(small_blocks, device):
    token_ids, row_offsets = make_ragged([3, 0, 2, 70, 1, 4], device)
    row_ids = torch.tensor([0, 1, 2, 2, 3, 4, 5, 5], device=device)
    check_ragged(token_ids, row_offsets, row_ids, capacity=120)


@given(
    widths=st.lists(
        st.one_of(st.integers(0, 3), st.sampled_from([31, 32, 33, 64, 200])), max_size=70
    ),
    missing=st.floats(0, 1),
    spare=st.integers(0, 70),
    seed=st.integers(0, 99),
)
def test_any_widths(widths, missing, spare, seed):
    token_ids, row_offsets = make_ragged(widths, "cpu", seed)
    row_ids = random_row_ids(len(widths), len(widths), missing=missing, device="cpu", seed=seed)
    named = sum(map(len, named_rows(token_ids, row_offsets, row_ids)))
    with pytest.MonkeyPatch.context() as patch:
        set_blocks(patch, 8, 2)
        check_ragged(token_ids, row_offsets, row_ids)
        check_ragged(token_ids, row_offsets, row_ids, capacity=named + spare)
    check_padded(token_ids, row_offsets, row_ids, max(widths, default=0) + spare % 5)


@pytest.mark.parametrize("place", [0, 100, 299])
def test_a_row_of_the_whole_vocabulary_among_rows_of_two(place, device):
    widths = [2] * 300
    widths[place] = 5000
    token_ids, row_offsets = make_ragged(widths, device)
    row_ids = random_row_ids(300, 300, missing=0.0, device=device, seed=place)
    check_ragged(token_ids, row_offsets, row_ids)


def test_only_wide_rows(small_blocks, device):
    token_ids, row_offsets = make_ragged([100] * 40, device)
    check_ragged(token_ids, row_offsets, random_row_ids(40, 40, missing=0.0, device=device))


def test_the_rest_of_the_capacity_is_filled(small_blocks, device):
    token_ids, row_offsets = make_ragged([3, 0, 50, 7], device)
    row_ids = torch.tensor([2, -1, 0], device=device)
    for capacity in (53, 54, 64, 65, 1000):
        check_ragged(token_ids, row_offsets, row_ids, capacity)


@pytest.mark.parametrize("capacity", [0, 1, 31, 32, 33, 64, 100, 159])
def test_a_capacity_too_small_cuts_the_ids_and_tells_the_need(capacity, small_blocks, device):
    token_ids, row_offsets = make_ragged([4, 70, 0, 6] * 20, device)
    row_ids = random_row_ids(80, 80, missing=0.2, device=device)
    expected = named_rows(token_ids, row_offsets, row_ids)
    flat = [token for row in expected for token in row]
    assert capacity < len(flat)
    with poisoned_empty():
        ids, offsets = ragged_op(token_ids, row_offsets, row_ids, capacity)
    assert ids.tolist() == flat[:capacity]
    assert offsets.diff().tolist() == [len(row) for row in expected]


def test_a_row_may_be_named_twice_where_the_capacity_allows(device):
    token_ids, row_offsets = make_ragged([3, 2], device)
    check_ragged(token_ids, row_offsets, torch.tensor([1, 0, 1, 1], device=device), capacity=9)


def test_empty_ragged_inputs(device):
    token_ids, row_offsets = make_ragged([3, 2], device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    check_ragged(token_ids, row_offsets, none)
    check_ragged(token_ids, row_offsets, none, capacity=0)
    check_ragged(token_ids[:0], row_offsets[:1], torch.tensor([-1, -1], device=device))
    check_ragged(token_ids[:0], row_offsets[:1], torch.tensor([-1], device=device), capacity=3)
    check_ragged(*make_ragged([0, 0, 0], device), torch.tensor([2, 0, -1], device=device))


def test_slices_that_are_not_aligned(device):
    token_ids, row_offsets = make_ragged(draw_widths(300, seed=3), device)
    shifted = torch.cat([token_ids[:1], token_ids])[1:]
    row_ids = random_row_ids(300, 300, missing=0.1, device=device)
    whole = torch.cat([row_ids[:1], row_ids])
    for ids in (whole[1:], whole[3:]):
        check_ragged(shifted, torch.cat([row_offsets[:1], row_offsets])[1:], ids)
        check_padded(shifted, row_offsets, ids, 124)


# --- ragged to one width --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [120, 121, 122, 128, 1000])
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_pad_matches_lists(width, missing, device):
    token_ids, row_offsets = make_ragged(draw_widths(150), device)
    check_padded(
        token_ids, row_offsets, random_row_ids(130, 150, missing=missing, device=device), width
    )


def test_pad_of_nothing(device):
    token_ids, row_offsets = make_ragged([0, 0], device)
    row_ids = torch.tensor([1, -1], device=device)
    for width in (0, 3):
        check_padded(token_ids, row_offsets, row_ids, width)
        check_padded(token_ids, row_offsets, row_ids[:0], width)
        check_padded(token_ids, row_offsets[:1], row_ids[1:], width)


def test_pad_does_not_mind_a_wide_row_that_is_not_named(device):
    token_ids, row_offsets = make_ragged([2, 500, 3], device)
    check_padded(token_ids, row_offsets, torch.tensor([2, -1, 0], device=device), 3)


def test_the_width_cuts_rows_off(device):
    token_ids, row_offsets = make_ragged([2, 5, 3], device)
    out = pad_op(token_ids, row_offsets, torch.tensor([1, 0, 2], device=device), 3)
    expected = [token_ids[2:5].tolist(), [*token_ids[:2].tolist(), -1], token_ids[7:].tolist()]
    assert out.tolist() == expected


# --- contracts ------------------------------------------------------------------------------------


def test_operator_contract(device):
    token_ids, row_offsets = make_ragged([3, 0, 5, 1], device)
    row_ids = torch.tensor([2, -1, 0], device=device)
    torch.library.opcheck(ragged_op, (token_ids, row_offsets, row_ids, 9))
    torch.library.opcheck(pad_op, (token_ids, row_offsets, row_ids, 6))


def test_compiles_whole_and_once(device):
    def both(support, token_ids, row_offsets, row_ids):
        ragged = gather_ragged_support(token_ids, row_offsets, row_ids)
        return (
            gather_support(support, row_ids),
            ragged.token_ids,
            ragged.row_offsets,
            pad_ragged_support(token_ids, row_offsets, row_ids, width=130),
        )

    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=counter)
    for num_rows in (9, 21, 40):
        support = torch.arange(num_rows * 5, dtype=torch.int32, device=device).view(num_rows, 5)
        ragged = make_ragged([3, *draw_widths(num_rows - 1)], device, seed=num_rows)
        row_ids = random_row_ids(num_rows - 2, num_rows, missing=0.3, device=device)
        got, wanted = compiled(support, *ragged, row_ids), both(support, *ragged, row_ids)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert counter.frame_count == 1


def test_traces_without_values():
    """Meta tensors have no values: what is returned follows from shapes alone."""
    ids = torch.empty(70, dtype=torch.int32, device="meta")
    offsets = torch.empty(9, dtype=torch.int64, device="meta")
    row_ids = torch.empty(5, dtype=torch.int64, device="meta")
    out = gather_ragged_support(ids, offsets, row_ids)
    assert (out.token_ids.shape, out.row_offsets.shape) == ((70,), (6,))
    assert pad_ragged_support(ids, offsets, row_ids, width=4).shape == (5, 4)
    assert gather_support(ids.view(10, 7), row_ids).shape == (5, 7)


def test_replays_in_a_cuda_graph(cuda):
    """Static buffers, other rows and other lengths at each replay."""
    token_ids, row_offsets = make_ragged(draw_widths(900), cuda)
    row_ids = random_row_ids(700, 900, missing=0.1, device=cuda)

    def call():
        return (
            *gather_ragged_support(token_ids, row_offsets, row_ids, capacity=20_000),
            pad_ragged_support(token_ids, row_offsets, row_ids, width=120),
            gather_support(token_ids[:1800].view(900, 2), row_ids),
        )

    call()  # compile before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2):
        widths = np.random.default_rng(seed).permutation(draw_widths(900))
        offsets = np.concatenate([[0], np.cumsum(widths)])
        row_offsets.copy_(torch.from_numpy(offsets))
        row_ids.copy_(random_row_ids(700, 900, missing=0.3, device=cuda, seed=seed))
        graph.replay()
        rows = named_rows(token_ids, row_offsets, row_ids)
        flat = [token for row in rows for token in row]
        assert out[0].tolist() == flat + [-1] * (20_000 - len(flat))
        assert rows_of(out[0], out[1]) == rows
        assert [[t for t in row if t >= 0] for row in out[2].tolist()] == rows


def test_reads_nothing_back(cuda, no_host_sync):
    token_ids, row_offsets = make_ragged(draw_widths(400), cuda)
    row_ids = random_row_ids(300, 400, missing=0.2, device=cuda)
    for _ in range(2):  # the second time nothing is compiled
        with no_host_sync():
            gather_ragged_support(token_ids, row_offsets, row_ids)
            pad_ragged_support(token_ids, row_offsets, row_ids, width=120)
            gather_support(token_ids[:400].view(400, 1), row_ids)


def test_many_more_slots_than_groups(cuda):
    num_rows = 1_200_000
    widths = torch.randint(0, 6, (num_rows,), generator=torch.Generator().manual_seed(0))
    widths[777_777] = 150_000
    row_offsets = torch.cat([widths.new_zeros(1), widths.cumsum(0)]).to(cuda)
    total = int(row_offsets[-1])
    token_ids = torch.arange(total, dtype=torch.int32, device=cuda)
    row_ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).to(cuda)
    row_ids[::7] = -1
    out = gather_ragged_support(token_ids, row_offsets, row_ids)
    counts = torch.where(row_ids >= 0, row_offsets.diff()[row_ids], 0)
    assert torch.equal(out.row_offsets[1:], counts.cumsum(0))
    slots = torch.repeat_interleave(counts)
    first = row_offsets[row_ids[slots]] - out.row_offsets[slots]
    ids = token_ids[first + torch.arange(slots.shape[0], device=cuda)]
    assert torch.equal(out.token_ids[: slots.shape[0]], ids)
    assert (out.token_ids[slots.shape[0] :] == -1).all()


@pytest.mark.gpu_memory(gib=32)
def test_totals_past_int32(cuda):
    widths = [3, *[MAX_ROW_IDS] * 520, 5]
    token_ids = torch.arange(sum(widths), device=cuda, dtype=torch.int64).int()  # wraps
    assert token_ids.shape[0] > 2**31
    offsets = [0, *accumulate(widths)]
    row_offsets = torch.tensor(offsets, device=cuda)
    rows = [521, *range(520, 0, -1), -1, 0]
    row_ids = torch.tensor(rows, device=cuda)
    out = gather_ragged_support(token_ids, row_offsets, row_ids)
    expected = [0, *accumulate(widths[row] if row >= 0 else 0 for row in rows)]
    assert out.row_offsets.tolist() == expected
    for slot, row in enumerate(rows):
        if row >= 0:
            slice = out.token_ids[expected[slot] : expected[slot + 1]]
            assert torch.equal(slice, token_ids[offsets[row] : offsets[row + 1]])
    del out, slice
    padded = pad_ragged_support(token_ids, row_offsets, row_ids, width=MAX_ROW_IDS)
    for slot, row in enumerate(rows):
        width = widths[row] if row >= 0 else 0
        assert torch.equal(padded[slot, :width], token_ids[offsets[row] :][:width])
        assert (padded[slot, width:] == -1).all()


# --- rejections -----------------------------------------------------------------------------------

IDS, OFFSETS, ROWS = *make_ragged([2, 3], "cpu"), torch.tensor([1, -1])


@pytest.mark.parametrize(
    ("support", "row_ids", "error", "message"),
    [
        (IDS[:4].view(2, 2).long(), ROWS, TypeError, "support must be int32, got torch.int64"),
        (IDS, ROWS, ValueError, r"support must be \[N, C\], got \(5,\)"),
        (IDS[:4].view(2, 2), ROWS.int(), TypeError, "row_ids must be int64"),
        (IDS[:4].view(2, 2), ROWS[None], ValueError, r"row_ids must be contiguous \[M\]"),
        (IDS[:4].view(2, 2), ROWS.to("meta"), ValueError, "row_ids on meta, support on cpu"),
        (IDS[:4].view(2, 2), ROWS + 1, ValueError, r"a row id is outside \[-1, 2\)"),
        (IDS[:4].view(2, 2), ROWS - 1, ValueError, r"a row id is outside \[-1, 2\)"),
    ],
)
def test_gather_support_rejects(support, row_ids, error, message):
    with pytest.raises(error, match="^gather_support: " + message):
        gather_support(support, row_ids)


RISE = "row_offsets must rise from 0 to the number of token_ids"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"token_ids": IDS.long()}, TypeError, "token_ids must be int32, got torch.int64"),
        ({"token_ids": IDS[None]}, ValueError, r"token_ids must be contiguous \[total ids\], got"),
        ({"token_ids": IDS[::2]}, ValueError, r"token_ids must be contiguous"),
        ({"row_offsets": OFFSETS.int()}, TypeError, "row_offsets must be int64, got torch.int32"),
        ({"row_offsets": OFFSETS[None]}, ValueError, r"row_offsets must be contiguous \[N \+ 1\]"),
        ({"row_offsets": OFFSETS[:0]}, ValueError, r"row_offsets must be \[N \+ 1\], got no entry"),
        ({"row_offsets": OFFSETS.to("meta")}, ValueError, "row_offsets on meta, token_ids on cpu"),
        ({"row_offsets": OFFSETS + 1}, ValueError, RISE),
        ({"row_offsets": torch.tensor([0, 6, 5])}, ValueError, RISE),
        ({"row_offsets": torch.tensor([0, 2, 4])}, ValueError, RISE),
        ({"row_ids": ROWS.int()}, TypeError, "row_ids must be int64"),
        ({"row_ids": ROWS[None]}, ValueError, r"row_ids must be contiguous \[M\]"),
        ({"row_ids": ROWS.to("meta")}, ValueError, "row_ids on meta, token_ids on cpu"),
        ({"row_ids": ROWS + 1}, ValueError, r"a row id is outside \[-1, 2\)"),
        ({"row_ids": ROWS - 1}, ValueError, r"a row id is outside \[-1, 2\)"),
        ({"size": 1.0}, TypeError, "SIZE must be an int, got float"),
        ({"size": True}, TypeError, "SIZE must be an int, got bool"),
        ({"size": -1}, ValueError, "SIZE must be >= 0, got -1"),
        ({"size": 2}, ValueError, "(the rows have|a row has) more ids than SIZE=2"),
    ],
)
@pytest.mark.parametrize(
    ("function", "size"), [(gather_ragged_support, "capacity"), (pad_ragged_support, "width")]
)
def test_ragged_rejects(function, size, changed, error, message):
    given = {"token_ids": IDS, "row_offsets": OFFSETS, "row_ids": ROWS, "size": 3, **changed}
    given[size] = given.pop("size")
    with pytest.raises(error, match=f"^{function.__name__}: " + message.replace("SIZE", size)):
        function(**given)


def test_a_row_wider_than_any_vocabulary_is_refused():
    offsets = torch.tensor([0, MAX_ROW_IDS + 1])
    token_ids = torch.zeros(1, dtype=torch.int32).expand(MAX_ROW_IDS + 1).contiguous()
    with pytest.raises(ValueError, match=r"^gather_ragged_support: a row has more than MAX_ROW"):
        gather_ragged_support(token_ids, offsets, torch.tensor([-1]))
    pad_ragged_support(token_ids, offsets, torch.tensor([-1]), width=1)


CHECKED = """
import sys, torch
from packhorse.kernels.support_rows import *
ids = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32, device="cuda")
offsets, rows = torch.tensor([0, 2, 5], device="cuda"), torch.tensor([1, -1, 0], device="cuda")
{}
torch.cuda.synchronize()
"""
FAULTS = [
    "gather_support(ids[None], rows)",
    "gather_ragged_support(ids, offsets, rows, capacity=4)",
    "gather_ragged_support(ids, offsets, rows + 1)",
    "gather_ragged_support(ids, offsets + 1, rows)",
    "pad_ragged_support(ids, offsets, rows, width=2)",
]
RIGHT = """
gather_support(ids[None].expand(2, 5), rows)
gather_ragged_support(ids, offsets, rows)
pad_ragged_support(ids, offsets, rows, width=3)
"""


@pytest.mark.parametrize("statement", [*FAULTS, RIGHT])
def test_values_on_a_device_are_checked_on_request(statement, cuda):
    """A failed device-side assert ends its process; on the CPU values are always checked."""
    result = subprocess.run(
        [sys.executable, "-c", CHECKED.format(statement)],
        env={**os.environ, "PACKHORSE_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode == 0) == (statement == RIGHT), result.stderr
    assert statement == RIGHT or "assert" in result.stderr
