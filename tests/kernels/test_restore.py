"""make_restore_row_ids: each batch cell finds its slot among the values of all ranks.

Oracle: the slots of every rank written down by a loop, then searched. Tolerance: none.
"""

import pytest
import torch
from hypothesis import given

from packhorse import make_restore_row_ids
from packhorse.testing import poisoned_empty
from tests.kernels.test_layout import layouts, local_offsets, slots_of_a_rank, table


def restore_loop(padded, lengths, first_columns, width, cp_size, zigzag, position_major):
    place, begin = {}, 0
    for rank in range(cp_size):
        slots = slots_of_a_rank(padded, cp_size, rank, zigzag, position_major)
        place.update({slot: begin + i for i, slot in enumerate(slots)})
        begin += len(slots)
    out = []
    for b, (length, first) in enumerate(zip(lengths, first_columns, strict=True)):
        for column in range(width):
            s = column - first
            out.append(place[b, s] if 0 <= s < length - 1 else -1)
    return out


@given(case=layouts())
def test_restore_row_ids_match_a_loop(case):
    padded, segments, cp_size, _, zigzag, position_major, _ = case
    zigzag = zigzag and cp_size > 1
    lengths, first_columns = segments[1], segments[2]
    width = max(f + n for f, n in zip(first_columns, lengths, strict=True))
    num_tokens = sum(padded) // cp_size
    with poisoned_empty():
        actual = make_restore_row_ids(
            table(local_offsets(padded, cp_size, position_major), "cpu"),
            table([first_columns, lengths], "cpu"), width, num_tokens, cp_size=cp_size,
            zigzag=zigzag, position_major=position_major,
        )  # fmt: skip
    expected = restore_loop(padded, lengths, first_columns, width, cp_size, zigzag, position_major)
    assert actual.tolist() == expected


def test_empty_batches(device):
    columns = table([[0, 0], [3, 0]], device)
    assert make_restore_row_ids(table([0, 4, 4], device), columns, 0, 4).shape == (0,)
    ids = make_restore_row_ids(table([0, 4, 4], device), columns, 3, 4)
    assert ids.tolist() == [0, 1, -1, -1, -1, -1]


def test_operator_contract(device):
    arguments = (
        table([0, 4, 8], device), table([[0, 1], [5, 6]], device), 6, 8, 2, True, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.packhorse.restore_row_ids.default, arguments)


def test_compiles_whole_and_once(device):
    compiled = torch.compile(
        make_restore_row_ids, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for width in (5, 9):
        offsets, columns = table([0, 8, 16], device), table([[0, 1], [5, 4]], device)
        ids = compiled(offsets, columns, width, 16)
        assert torch.equal(ids, make_restore_row_ids(offsets, columns, width, 16))


def test_replays_in_a_cuda_graph_with_new_lengths(cuda):
    offsets, columns = table([0, 4, 8], cuda), table([[0, 0], [4, 4]], cuda)
    make_restore_row_ids(offsets, columns, 3, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = make_restore_row_ids(offsets, columns, 3, 8)
    columns.copy_(table([[1, 0], [3, 2]], cuda))
    graph.replay()
    assert out.tolist() == [-1, 0, 1, 4, -1, -1]


OFFSETS, COLUMNS = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("offsets", "columns", "keywords", "error", "message"),
    [
        (OFFSETS.long(), COLUMNS, {}, TypeError, "offsets must be int32"),
        (OFFSETS, COLUMNS.long(), {}, TypeError, "columns must be int32"),
        (OFFSETS, COLUMNS[:1], {}, ValueError, r"columns must be \[2, B\]"),
        (OFFSETS[:2], COLUMNS, {}, ValueError, r"offsets must be \[3\]"),
        (OFFSETS, torch.zeros(3, 2, dtype=torch.int32).T, {}, ValueError, "contiguous"),
        (OFFSETS, COLUMNS.to("meta"), {}, ValueError, "columns on meta"),
        (OFFSETS, COLUMNS, {"cp_size": 0}, ValueError, "cp_size=0"),
    ],
)
def test_rejects(offsets, columns, keywords, error, message):
    with pytest.raises(error, match="make_restore_row_ids: .*" + message):
        make_restore_row_ids(offsets, columns, 3, 8, **keywords)
