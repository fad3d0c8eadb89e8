"""make_row_ids: the operator itself. ``TokenLayout``'s tests hold the layouts it is used for.

Oracle: a loop over sequences and positions that shares no code with the package. Tolerance: none.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse import make_row_ids
from packhorse.kernels import layout
from packhorse.testing import poisoned_empty


def slots_of_a_rank(
    padded: list[int], cp_size: int, cp_rank: int, zigzag: bool, position_major: bool
) -> list[tuple[int, int]]:
    """(sequence, position) of each slot, chunk by chunk."""
    per_sequence = []
    for b, length in enumerate(padded):
        positions = list(range(length))
        if zigzag:
            step = length // (2 * cp_size)
            chunks = [positions[c * step : (c + 1) * step] for c in range(2 * cp_size)]
            mine = chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]
        else:
            step = length // cp_size
            mine = positions[cp_rank * step : (cp_rank + 1) * step]
        per_sequence.append([(b, s) for s in mine])
    if position_major:
        return [slot for column in zip(*per_sequence, strict=True) for slot in column]
    return [slot for sequence in per_sequence for slot in sequence]


def row_ids_loop(slots, segments, shift, first_id, num_ids) -> list[int]:
    out = []
    for b, s in slots[first_id : first_id + num_ids]:
        base, count, start = (row[b] for row in segments)
        row = s + shift - start
        out.append(base + row if 0 <= row < count else -1)
    return out


@pytest.mark.parametrize("position_major", [False, True])
def test_slots_past_the_last_sequence_have_no_row(position_major, device):
    """Not those of another rank, whose positions follow."""
    offsets = table([0, 2], device)
    segments = table([[0], [4], [0]], device)
    keywords = {"cp_size": 2, "position_major": position_major}
    assert make_row_ids(offsets, segments, 6, **keywords).tolist() == [0, 1, -1, -1, -1, -1]


def table(values, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def local_offsets(padded: list[int], cp_size: int, position_major: bool) -> list[int]:
    if position_major:
        return [0, padded[0] // cp_size]
    out = [0]
    for length in padded:
        out.append(out[-1] + length // cp_size)
    return out


@st.composite
def layouts(draw):
    cp_size = draw(st.integers(1, 4))
    zigzag = draw(st.booleans())
    position_major = draw(st.booleans())
    chunk = 2 * cp_size
    if position_major:
        padded = [chunk * draw(st.integers(1, 6))] * draw(st.integers(1, 5))
    else:
        padded = [chunk * n for n in draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))]
    segments, base = [[], [], []], 0
    for length in padded:
        start = draw(st.integers(0, length))
        count = draw(st.integers(0, length - start))
        for row, value in zip(segments, (base, count, start), strict=True):
            row.append(value)
        base += count
    rank = draw(st.integers(0, cp_size - 1))
    return padded, segments, cp_size, rank, zigzag, position_major, draw(st.integers(0, 1))


@given(case=layouts(), part=st.sampled_from([(0, 1), (0, 2), (1, 2)]))
def test_row_ids_match_a_loop(case, part):
    padded, segments, cp_size, cp_rank, zigzag, position_major, shift = case
    slots = slots_of_a_rank(padded, cp_size, cp_rank, zigzag and cp_size > 1, position_major)
    num_ids = len(slots) // part[1]
    first_id = part[0] * num_ids
    with poisoned_empty():
        actual = make_row_ids(
            table(local_offsets(padded, cp_size, position_major), "cpu"),
            table(segments, "cpu"), num_ids, first_id=first_id, cp_size=cp_size, cp_rank=cp_rank,
            zigzag=zigzag, position_major=position_major, shift=shift,
        )  # fmt: skip
    assert actual.tolist() == row_ids_loop(slots, segments, shift, first_id, num_ids)


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 255, 256, 257])
def test_search_finds_every_sequence(num_sequences, device):
    padded = [(7 * b) % 5 for b in range(num_sequences)]
    offsets = local_offsets(padded, 1, False)
    segments = [offsets[:-1], padded, [0] * num_sequences]
    ids = make_row_ids(table(offsets, device), table(segments, device), offsets[-1])
    assert ids.tolist() == list(range(offsets[-1]))


def test_empty_and_single_token(device):
    one = table([0, 1], device)
    segment = table([[5], [1], [0]], device)
    assert make_row_ids(one, segment, 1).tolist() == [5]
    assert make_row_ids(one, segment, 1, shift=1).tolist() == [-1]
    assert make_row_ids(one, segment, 0).shape == (0,)
    nothing = make_row_ids(table([0], device), torch.zeros(3, 0, dtype=torch.int32).to(device), 0)
    assert nothing.shape == (0,)
    assert nothing.dtype == torch.int64


def test_operator_contract(device):
    arguments = (
        table([0, 4, 8], device), table([[0, 3], [3, 2], [0, 1]], device), 8, 0, 2, 1, True, False,
        1,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.packhorse.row_ids.default, arguments)


def test_compiles_whole_and_once(device):
    compiled = torch.compile(make_row_ids, fullgraph=True, dynamic=True, backend="aot_eager")
    for padded in ([8, 4], [16, 12]):
        offsets, segments = (
            table([0, padded[0], sum(padded)], device),
            table([[0, 2], [2, 3], [1, 0]], device),
        )
        ids = compiled(offsets, segments, sum(padded))
        assert torch.equal(ids, make_row_ids(offsets, segments, sum(padded)))


def test_replays_in_a_cuda_graph_with_new_lengths(cuda):
    offsets, segments = table([0, 4, 8], cuda), table([[0, 3], [3, 2], [0, 1]], cuda)
    make_row_ids(offsets, segments, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = make_row_ids(offsets, segments, 8)
    offsets.copy_(table([0, 2, 8], cuda))
    segments.copy_(table([[0, 1], [1, 6], [1, 0]], cuda))
    graph.replay()
    assert out.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]


OFFSETS, SEGMENTS = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("offsets", "segments", "keywords", "error", "message"),
    [
        (OFFSETS.long(), SEGMENTS, {}, TypeError, "offsets must be int32"),
        (OFFSETS, SEGMENTS.float(), {}, TypeError, "segments must be int32"),
        (OFFSETS, SEGMENTS[:2], {}, ValueError, r"segments must be \[3, B\]"),
        (OFFSETS[:2], SEGMENTS, {}, ValueError, r"offsets must be \[3\]"),
        (OFFSETS, SEGMENTS, {"position_major": True}, ValueError, r"offsets must be \[2\]"),
        (OFFSETS, torch.zeros(2, 3, dtype=torch.int32).T, {}, ValueError, "contiguous"),
        (OFFSETS, SEGMENTS.to("meta"), {}, ValueError, "segments on meta"),
        (OFFSETS, SEGMENTS, {"cp_rank": 1}, ValueError, "cp_rank=1 is not in"),
        (OFFSETS, SEGMENTS, {"shift": 2}, ValueError, "shift must be 0 or 1"),
        (OFFSETS, SEGMENTS, {"first_id": -1}, ValueError, "first_id=-1"),
        (OFFSETS[:1], SEGMENTS[:, :0].contiguous(), {}, ValueError, "name no sequence"),
    ],
)
def test_rejects(offsets, segments, keywords, error, message):
    with pytest.raises(error, match="make_row_ids: .*" + message):
        make_row_ids(offsets, segments, 4, **keywords)


def test_reference_and_launcher_take_the_same_arguments():
    import inspect

    assert list(inspect.signature(layout.row_ids_reference).parameters) == list(
        inspect.signature(layout._row_ids_cuda).parameters
    )
