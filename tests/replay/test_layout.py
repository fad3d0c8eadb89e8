"""TokenLayout.

Oracle: ``tests/oracle.py``, plain loops that share no code with the package. Tolerance: none. Row
ids are integers and values are moved, so every comparison is ``torch.equal``.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.kernels.rows import gather_rows
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout, columns_from_mask
from tests.oracle import OracleLayout

# One program of the interpreter takes milliseconds, one of the reference microseconds.
EXAMPLES = 8 if os.environ.get("TRITON_INTERPRET") == "1" else 60
FP8 = [False, True, "delayed", "tensorwise", "mxfp8", "blockwise"]
PAD = -1
DTYPES = [torch.int64, torch.int32, torch.int16, torch.float32, torch.float64]


# --- random layouts ------------------------------------------------------------------------------


@st.composite
def padded_by_a_packer(draw, arguments: dict) -> list[int]:
    """Legal padded lengths of a packer's own, off the default alignment, some with a tail."""
    cp_size, lengths = arguments["cp_size"], arguments["lengths"]
    unit = 2 * cp_size if cp_size > 1 and arguments["cp_order"] == "zigzag" else cp_size

    def chunks(length: int) -> int:
        return -(-length // unit) + draw(st.integers(0, 2))

    if arguments["format"] == "bshd":
        counts = [chunks(max(lengths))]
    else:
        counts = [chunks(length) for length in lengths]
        if draw(st.booleans()):
            counts.append(draw(st.integers(0, 3)))
    if arguments["sequence_parallel"]:  # the sum divides by the TP size too
        while sum(counts) * (unit // cp_size) % arguments["tp_size"]:
            counts[-1] += 1
    padded = [count * unit for count in counts]
    return padded * len(lengths) if arguments["format"] == "bshd" else padded


@st.composite
def layouts(draw, **fixed) -> dict:
    """Legal arguments of ``TokenLayout.build``, small, of every kind."""
    tp_size = draw(st.sampled_from([1, 2, 4]))
    cp_size = draw(st.integers(1, 4))
    arguments = {
        "lengths": draw(st.lists(st.integers(0, 11), min_size=1, max_size=5)),
        "format": draw(st.sampled_from(["thd", "bshd"])),
        "tp_size": tp_size,
        "tp_rank": draw(st.integers(0, tp_size - 1)),
        "cp_size": cp_size,
        "cp_rank": draw(st.integers(0, cp_size - 1)),
        "cp_order": draw(st.sampled_from(["zigzag", "contiguous"])),
        "sequence_parallel": draw(st.booleans()),
        "fp8": draw(st.sampled_from(FP8)),
        **fixed,
    }
    lengths = arguments["lengths"]
    if draw(st.booleans()):
        arguments["padded_lengths"] = draw(padded_by_a_packer(arguments))
    if draw(st.booleans()):
        width = max(1, *lengths) + draw(st.integers(0, 4))
        if draw(st.booleans()):
            arguments["batch_width"] = width
        padding = draw(st.sampled_from(["left", "right", "two-sided"]))
        if padding == "right":
            arguments["first_columns"] = [0] * len(lengths)
        elif padding == "two-sided":
            arguments["first_columns"] = [
                draw(st.integers(0, width - length)) for length in lengths
            ]
    return arguments


def build(arguments: dict, device: str = "cpu", **changes) -> TokenLayout:
    return TokenLayout.build(**{**arguments, "device": device, **changes})


def some_of(data: st.DataObject, lengths: list[int]) -> list[int]:
    """For each length an integer from 0 to it."""
    return [data.draw(st.integers(0, length)) for length in lengths]


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> np.ndarray:
    """Never 0 and never negative: what a fill could be taken for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 30000, shape, generator=generator).to(dtype).numpy()


def on(device: str, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)


def ids(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


# --- counts --------------------------------------------------------------------------------------


@given(arguments=layouts())
@settings(max_examples=200, deadline=None)
def test_padded_lengths_and_counts_match_the_loops(arguments):
    layout, oracle = build(arguments), OracleLayout(**arguments)
    assert layout.padded_lengths == tuple(oracle.padded())
    assert layout.lengths == tuple(arguments["lengths"])
    assert layout.num_tokens == len(oracle.slots())
    rank_tokens = oracle.slots()
    if layout.sequence_parallel:
        rank_tokens = oracle.tp_slice(rank_tokens)
    assert layout.num_rank_tokens == len(rank_tokens)
    if layout.format == "thd":
        assert layout.cu_seqlens_padded == tuple(np.cumsum([0, *oracle.padded()]).tolist())


@pytest.mark.parametrize(
    ("fp8", "tp_size", "cp_size", "align"),
    [
        (False, 4, 1, 4),
        (False, 4, 2, 16),
        (True, 1, 1, 16),
        ("delayed", 4, 3, 48),
        ("tensorwise", 4, 1, 16),
        ("tensorwise", 2, 2, 32),
        ("mxfp8", 1, 1, 32),
        ("mxfp8", 2, 3, 192),
        ("blockwise", 1, 1, 16),
        ("blockwise", 1, 2, 32),
        ("blockwise", 2, 1, 256),
        ("blockwise", 2, 2, 512),
    ],
)
def test_one_token_is_padded_to_the_alignment(fp8, tp_size, cp_size, align):
    for arguments in ({"format": "thd"}, {"format": "bshd"}, {"cp_order": "contiguous"}):
        layout = TokenLayout.build([1], fp8=fp8, tp_size=tp_size, cp_size=cp_size, **arguments)
        assert layout.padded_lengths == (align,)


def test_a_layout_keeps_what_it_was_built_from():
    arguments = {
        "lengths": [3, 5],
        "format": "bshd",
        "tp_size": 2,
        "tp_rank": 1,
        "cp_size": 2,
        "cp_rank": 1,
        "cp_order": "contiguous",
        "sequence_parallel": True,
        "batch_width": 7,
        "first_columns": [4, 1],
    }
    layout = TokenLayout.build(**arguments)
    for name, value in arguments.items():
        assert getattr(layout, name) == (tuple(value) if isinstance(value, list) else value)
    assert layout.num_sequences == 2
    assert torch.device(layout.device) == torch.device("cpu")


def test_lengths_of_numpy_are_host_integers():
    layout = TokenLayout.build(np.array([3, 5], dtype=np.int32), tp_size=2)
    assert layout.lengths == (3, 5)
    assert layout.padded_lengths == (4, 6)
    assert all(type(length) is int for length in layout.lengths)


# --- row ids -------------------------------------------------------------------------------------


@given(arguments=layouts(), next_token=st.booleans(), slice=st.booleans(), data=st.data())
@settings(max_examples=EXAMPLES * 2, deadline=None)
def test_row_ids_match_the_loops(arguments, next_token, slice, data, device):
    segment_lengths = some_of(data, arguments["lengths"])
    starts = some_of(
        data, [n - m for n, m in zip(arguments["lengths"], segment_lengths, strict=True)]
    )
    slice = slice and arguments["sequence_parallel"]
    options = {"next_token": next_token, "slice": slice}
    actual = build(arguments, device).row_ids(segment_lengths, starts, **options)
    expected = OracleLayout(**arguments).row_ids(segment_lengths, starts, **options)
    assert torch.equal(actual, ids(expected, device))


@given(arguments=layouts(), data=st.data())
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_one_start_counts_for_every_trajectory(arguments, data, device):
    start = data.draw(st.integers(0, min(arguments["lengths"])))
    segment_lengths = some_of(data, [n - start for n in arguments["lengths"]])
    actual = build(arguments, device).row_ids(segment_lengths, start)
    expected = OracleLayout(**arguments).row_ids(segment_lengths, start)
    assert torch.equal(actual, ids(expected, device))


@given(arguments=layouts(), next_token=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_token_row_ids_match_the_loops(arguments, next_token, device):
    actual = build(arguments, device).token_row_ids(next_token)
    expected = OracleLayout(**arguments).token_row_ids(next_token)
    assert torch.equal(actual, ids(expected, device))


@given(arguments=layouts(), data=st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_route_row_ids_match_the_loops(arguments, data, device):
    captured = some_of(data, arguments["lengths"])
    actual = build(arguments, device).route_row_ids(captured)
    expected = OracleLayout(**arguments).route_row_ids(captured)
    assert torch.equal(actual, ids(expected, device))


@given(arguments=layouts(), data=st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_support_row_ids_match_the_loops(arguments, data, device):
    responses = some_of(data, [max(n - 1, 0) for n in arguments["lengths"]])
    actual = build(arguments, device).support_row_ids(responses)
    expected = OracleLayout(**arguments).support_row_ids(responses)
    assert torch.equal(actual, ids(expected, device))


@given(arguments=layouts(), data=st.data())
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_support_row_ids_are_next_token_row_ids_of_the_response(arguments, data, device):
    responses = some_of(data, [max(n - 1, 0) for n in arguments["lengths"]])
    starts = [n - r for n, r in zip(arguments["lengths"], responses, strict=True)]
    layout = build(arguments, device)
    expected = layout.row_ids(responses, starts, next_token=True)
    assert torch.equal(layout.support_row_ids(responses), expected)


@pytest.mark.parametrize("cp_order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_many_long_sequences_match_the_loops(format, cp_order, device):
    lengths = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    arguments = {
        "lengths": lengths,
        "format": format,
        "tp_size": 2,
        "tp_rank": 1,
        "cp_size": 3,
        "cp_rank": 1,
        "cp_order": cp_order,
        "sequence_parallel": True,
    }
    layout, oracle = build(arguments, device), OracleLayout(**arguments)
    assert torch.equal(layout.token_row_ids(), ids(oracle.token_row_ids(), device))
    assert torch.equal(layout.route_row_ids(lengths), ids(oracle.route_row_ids(lengths), device))
    values = values_of_every_cp_rank(arguments, (), torch.int32)
    restored = layout.restore_gathered([on(device, v) for v in values], PAD)
    assert torch.equal(restored, on(device, oracle.restore(values, PAD)))


@given(arguments=layouts(cp_rank=0, tp_rank=0))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_every_token_is_on_exactly_one_rank(arguments, device):
    held = []
    for cp_rank in range(arguments["cp_size"]):
        on_cp_rank = build(arguments, device, cp_rank=cp_rank).token_row_ids().tolist()
        if arguments["sequence_parallel"]:
            slices = []
            for tp_rank in range(arguments["tp_size"]):
                layout = build(arguments, device, cp_rank=cp_rank, tp_rank=tp_rank)
                slices += layout.route_row_ids(arguments["lengths"]).tolist()
            assert slices == on_cp_rank
        held += on_cp_rank
    assert sorted(row for row in held if row >= 0) == list(range(sum(arguments["lengths"])))
    assert len(held) == sum(OracleLayout(**arguments).padded())


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_layout_without_tokens_has_no_row_ids(format, lengths, device):
    layout = TokenLayout.build(lengths, format=format, tp_size=2, cp_size=2, device=device)
    assert layout.num_tokens == layout.num_rank_tokens == 0
    assert torch.equal(layout.token_row_ids(), ids([], device))
    assert torch.equal(layout.route_row_ids([0] * len(lengths)), ids([], device))
    assert torch.equal(layout.support_row_ids([0] * len(lengths)), ids([], device))


# --- padded batches ------------------------------------------------------------------------------


@given(arguments=layouts(), next_token=st.booleans(), data=st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_align_matches_the_loops(arguments, next_token, data, device):
    oracle = OracleLayout(**arguments)
    dtype = data.draw(st.sampled_from(DTYPES))
    trailing = data.draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    dense = random_values((len(arguments["lengths"]), oracle.width(), *trailing), dtype)
    actual = build(arguments, device).align(on(device, dense), PAD, next_token=next_token)
    expected = oracle.align(dense, PAD, next_token=next_token)
    assert torch.equal(actual, on(device, expected))
    assert actual.dtype == dtype


def values_of_every_cp_rank(
    arguments: dict, trailing: tuple[int, ...], dtype: torch.dtype
) -> list[np.ndarray]:
    oracle = OracleLayout(**arguments)
    return [
        random_values((len(oracle.slots(cp_rank)), *trailing), dtype, seed=cp_rank)
        for cp_rank in range(arguments["cp_size"])
    ]


@given(arguments=layouts(), data=st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_restore_gathered_matches_the_loops(arguments, data, device):
    dtype = data.draw(st.sampled_from(DTYPES))
    trailing = data.draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    values = values_of_every_cp_rank(arguments, trailing, dtype)
    actual = build(arguments, device).restore_gathered([on(device, v) for v in values], PAD)
    assert torch.equal(actual, on(device, OracleLayout(**arguments).restore(values, PAD)))
    assert actual.dtype == dtype


@given(arguments=layouts(cp_size=1, cp_rank=0))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_restore_on_one_cp_rank_gathers_nothing(arguments, device):
    (values,) = values_of_every_cp_rank(arguments, (), torch.float32)
    layout = build(arguments, device)
    expected = on(device, OracleLayout(**arguments).restore([values]))
    assert torch.equal(layout.restore(on(device, values)), expected)
    assert torch.equal(layout.restore_gathered([on(device, values)]), expected)


@given(arguments=layouts(cp_rank=0), next_token=st.booleans())
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_restore_undoes_align_where_a_token_has_a_next_one(arguments, next_token, device):
    oracle = OracleLayout(**arguments)
    width = oracle.width()
    dense = on(device, random_values((len(arguments["lengths"]), width), torch.int64))
    ranks = [build(arguments, device, cp_rank=rank) for rank in range(arguments["cp_size"])]
    aligned = [layout.align(dense, PAD, next_token=next_token) for layout in ranks]
    restored = ranks[0].restore_gathered(aligned)
    expected = torch.zeros_like(restored)
    for trajectory, length in enumerate(arguments["lengths"]):
        first, shift = oracle.first_column(trajectory), int(next_token)
        if length > 1:
            source = dense[trajectory, first + shift : first + shift + length - 1]
            expected[trajectory, first : first + length - 1] = source
    assert torch.equal(restored, expected)


@given(arguments=layouts(), trailing=st.sampled_from([(), (2,)]))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_gradients_through_restore_are_its_adjoint(arguments, trailing, device):
    layout, oracle = build(arguments, device), OracleLayout(**arguments)
    values = values_of_every_cp_rank(arguments, trailing, torch.float64)
    leaves = [on(device, v).requires_grad_() for v in values]
    restored = layout.restore_gathered(leaves)
    gradient = random_values(tuple(restored.shape), torch.float64, seed=9)
    actual = torch.autograd.grad(restored, leaves, on(device, gradient))

    numbers = np.arange(1, 1 + sum(len(v) for v in values))  # where does each token go?
    splits = np.cumsum([len(v) for v in values])[:-1]
    placed = oracle.restore(np.split(numbers, splits))
    expected = np.zeros((len(numbers), *trailing))
    for row, column in np.argwhere(placed > 0):
        expected[placed[row, column] - 1] = gradient[row, column]
    for got, wanted in zip(actual, np.split(expected, splits), strict=True):
        assert torch.equal(got, on(device, wanted))


def test_gradients_through_align_go_back_to_their_columns(device):
    layout = TokenLayout.build(
        [2, 3], tp_size=2, batch_width=4, first_columns=[1, 0], device=device
    )
    dense = torch.zeros(2, 4, dtype=torch.float64, device=device, requires_grad=True)
    gradient = torch.arange(1.0, 7.0, dtype=torch.float64, device=device)
    (actual,) = torch.autograd.grad(layout.align(dense, 0), dense, gradient)
    assert actual.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]


# --- the model's batch ---------------------------------------------------------------------------


@given(arguments=layouts())
@settings(max_examples=EXAMPLES, deadline=None)
def test_position_ids_match_the_loops(arguments, device):
    actual = build(arguments, device).position_ids()
    assert torch.equal(actual, ids(OracleLayout(**arguments).position_ids(), device))


@given(arguments=layouts(), trailing=st.sampled_from([(), (3,)]))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_to_model_is_batch_major_and_from_model_undoes_it(arguments, trailing, device):
    layout, oracle = build(arguments, device), OracleLayout(**arguments)
    values = random_values((len(oracle.slots()), *trailing), torch.float32)
    batch = layout.to_model(on(device, values))
    assert torch.equal(batch, on(device, oracle.to_model(values)))
    assert torch.equal(layout.from_model(batch), on(device, values))


# --- worked examples -----------------------------------------------------------------------------


def model_tokens(layout: TokenLayout, rows: list[int], row_ids: torch.Tensor) -> list[int]:
    return gather_rows(ids(rows, str(layout.device)), row_ids, fill=PAD).tolist()


def test_a_rectangle_lists_position_outer_and_trajectory_inner(device):
    rows = [10, 11, 12, 20, 21, 22]
    layout = TokenLayout.build([3, 3], format="bshd", device=device)
    assert model_tokens(layout, rows, layout.route_row_ids([3, 3])) == [10, 20, 11, 21, 12, 22]
    layout = TokenLayout.build(
        [3, 3], format="bshd", tp_size=2, tp_rank=0, sequence_parallel=True, device=device
    )
    assert model_tokens(layout, rows, layout.route_row_ids([3, 3])) == [10, 20, 11, 21]


def test_row_ids_are_those_of_the_microbatch_not_of_the_batch(device):
    """Trajectories (prompt 3, response 2) and (prompt 2, response 4), sliced to the second."""
    support = PackedTensor.from_lengths(torch.arange(100, 106, device=device), [2, 4])[1:2]
    layout = TokenLayout.build([6], device=device)
    row_ids = layout.support_row_ids(support.lengths)
    assert row_ids.tolist() == [-1, 0, 1, 2, 3, -1]
    gathered = gather_rows(support.values, row_ids, fill=PAD)
    assert gathered.tolist() == [PAD, 102, 103, 104, 105, PAD]


def test_the_next_token_is_found_before_context_parallel_sharding(device):
    rows = [*range(10, 15), *range(20, 26)]

    def next_tokens(**ranks):
        layout = TokenLayout.build([5, 6], device=device, **ranks)
        return model_tokens(layout, rows, layout.token_row_ids(next_token=True))

    # fmt: off
    assert next_tokens(tp_size=4) == [
        11, 12, 13, 14, PAD, PAD, PAD, PAD, 21, 22, 23, 24, 25, PAD, PAD, PAD
    ]
    # fmt: on
    assert next_tokens(cp_size=2, cp_rank=0) == [11, 12, PAD, PAD, 21, 22, PAD, PAD]
    assert next_tokens(cp_size=2, cp_rank=1) == [13, 14, PAD, PAD, 23, 24, 25, PAD]


def test_aligned_next_tokens_never_come_from_the_neighbour(device):
    dense = ids([0, *range(10, 15), *range(20, 26)], device).view(2, 6)
    layout = TokenLayout.build([5, 6], tp_size=4, batch_width=6, device=device)
    # fmt: off
    assert layout.align(dense, PAD, next_token=True).tolist() == [
        11, 12, 13, 14, PAD, PAD, PAD, PAD, 21, 22, 23, 24, 25, PAD, PAD, PAD
    ]
    # fmt: on
    right_padded = ids([1, 2, 99, 3, 4, 5], device).view(2, 3)
    layout = TokenLayout.build([2, 3], batch_width=3, first_columns=[0, 0], device=device)
    assert layout.align(right_padded, PAD, next_token=True).tolist() == [2, PAD, 4, 5, PAD]


def test_contiguous_context_parallel_rank_0_owns_the_first_half(device):
    for rank, owned in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        layout = TokenLayout.build(
            [8], cp_size=2, cp_rank=rank, cp_order="contiguous", device=device
        )
        assert layout.position_ids().tolist() == owned
        assert layout.token_row_ids().tolist() == owned


def test_right_padded_and_two_sided_batches_follow_first_column(device):
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    lengths, first_columns = columns_from_mask(mask)
    assert (list(lengths), list(first_columns)) == ([3, 2, 3], [0, 1, 2])
    layout = TokenLayout.build(
        lengths, batch_width=5, first_columns=first_columns, tp_size=2, device=device
    )
    dense = ids([10, 11, 12, 0, 0, 0, 20, 21, 0, 0, 0, 0, 30, 31, 32], device).view(3, 5)
    rows = [10, 11, 12, 20, 21, 30, 31, 32]
    aligned = layout.align(dense, PAD)
    assert aligned.tolist() == [10, 11, 12, PAD, 20, 21, 30, 31, 32, PAD]
    assert aligned.tolist() == model_tokens(layout, rows, layout.token_row_ids())
    assert layout.restore(aligned).tolist() == [[10, 11, 0, 0], [0, 20, 0, 0], [0, 0, 30, 31]]


def test_a_sequence_shorter_than_two_chunks_a_rank_is_padded_to_them(device):
    by_rank = []
    for rank, (row_ids, positions) in enumerate((([0, -1], [0, 3]), ([-1, -1], [1, 2]))):
        layout = TokenLayout.build([1], cp_size=2, cp_rank=rank, batch_width=3, device=device)
        assert layout.padded_lengths == (4,)
        assert layout.token_row_ids().tolist() == layout.route_row_ids([1]).tolist() == row_ids
        assert layout.position_ids().tolist() == positions
        assert layout.align(ids([7, 8, 9], device).view(1, 3), PAD).tolist() == [
            PAD if row < 0 else 9 for row in row_ids
        ]
        by_rank.append(layout.align(ids([7, 8, 9], device).view(1, 3), PAD))
    # its only token has no next one
    assert layout.restore_gathered(by_rank, fill=5).tolist() == [[5, 5]]
    three = [
        TokenLayout.build([3], cp_size=2, cp_rank=rank, batch_width=4, device=device)
        for rank in (0, 1)
    ]
    dense = ids([6, 7, 8, 9], device).view(1, 4)
    parts = [layout.align(dense, PAD) for layout in three]
    assert three[0].restore_gathered(parts, fill=5).tolist() == [[5, 7, 8]]


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tokens_and_routes_are_counted_by_one_rule(fp8, format, sequence_parallel, device):
    layout = TokenLayout.build(
        [5, 6],
        format=format,
        tp_size=2,
        tp_rank=1,
        cp_size=2,
        fp8=fp8,
        sequence_parallel=sequence_parallel,
        device=device,
    )
    share = 2 if sequence_parallel else 1
    tokens = layout.align(torch.zeros(2, 6, device=device), 0)
    assert len(tokens) == layout.num_tokens == sum(layout.padded_lengths) // 2
    assert layout.num_rank_tokens == layout.num_tokens // share
    assert len(layout.route_row_ids([5, 6])) == layout.num_rank_tokens
    assert len(layout.token_row_ids()) == len(layout.support_row_ids([2, 2])) == layout.num_tokens


def test_pads_between_sequences_are_masked_as_well_as_those_at_the_end(device):
    layout = TokenLayout.build([3, 2, 4], padded_lengths=[4, 4, 4, 2], device=device)
    # fmt: off
    assert (layout.route_row_ids([3, 2, 4]) < 0).tolist() == [
        False, False, False, True, False, False, True, True,
        False, False, False, False, True, True,
    ]
    # fmt: on


def test_a_packers_own_padding_wins_over_the_alignment(device):
    layout = TokenLayout.build([3, 1], tp_size=4, fp8=True, padded_lengths=[3, 2], device=device)
    assert layout.padded_lengths == (3, 2)
    assert layout.token_row_ids().tolist() == [0, 1, 2, 3, -1]


@pytest.mark.parametrize(("rank", "positions"), [(0, [0, 3, 0, 1, 6, 7]), (1, [1, 2, 2, 3, 4, 5])])
def test_a_tail_pad_is_sharded_like_any_other_sequence(rank, positions, device):
    layout = TokenLayout.build([3], padded_lengths=[4, 8], cp_size=2, cp_rank=rank, device=device)
    assert layout.position_ids().tolist() == positions
    assert (layout.token_row_ids()[2:] == -1).all()


# --- the device ----------------------------------------------------------------------------------


def every_result(layout: TokenLayout, device: str) -> list[torch.Tensor]:
    """All that a step of [B 2, S 6], lengths 4 and 5, asks of a layout of 2 CP ranks."""
    values = torch.ones(layout.num_tokens, 3, device=device)
    return [
        layout.row_ids([4, 5], [0, 0], next_token=True, slice=True),
        layout.token_row_ids(),
        layout.support_row_ids([2, 3]),
        layout.route_row_ids([3, 4]),
        layout.position_ids(),
        layout.align(torch.ones(2, 6, 3, device=device), 0),
        layout.restore_gathered([values, values]),
        layout.to_model(values),
        layout.from_model(layout.to_model(values)),
    ]


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_a_layout_never_waits_for_the_device(format, device, no_host_sync):
    def build_and_ask():
        layout = TokenLayout.build(
            [4, 5],
            format=format,
            tp_size=2,
            cp_size=2,
            sequence_parallel=True,
            batch_width=6,
            device=device,
        )
        return every_result(layout, device)

    build_and_ask()  # compiles
    with no_host_sync():
        build_and_ask()


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_shapes_come_from_the_host_alone(format):
    arguments = {"format": format, "tp_size": 2, "cp_size": 2, "sequence_parallel": True}
    shapes = {}
    for device in ("meta", "cpu"):
        layout = TokenLayout.build([4, 5], batch_width=6, device=device, **arguments)
        results = every_result(layout, device)
        shapes[device] = [(result.shape, result.dtype) for result in results]
        assert all(result.device.type == device for result in results)
    assert shapes["meta"] == shapes["cpu"]
