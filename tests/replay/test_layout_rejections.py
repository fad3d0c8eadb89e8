"""What TokenLayout refuses. The message opens with the function and names field and trajectory."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from packhorse.replay.layout import TokenLayout, columns_from_mask, sequence_alignment


def assert_rejected(
    call: Callable[[], object], error: type[Exception], function: str, *parts: str
) -> None:
    """One line that begins with the function's name and holds every part."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert function in message.split(":")[0], f"{function} does not open: {message}"
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


META = torch.ones(2, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"format": "sbhd"}, ValueError, ["format", "sbhd"]),
        ({"cp_order": "striped"}, ValueError, ["cp_order", "striped"]),
        ({"fp8": "e4m3"}, ValueError, ["fp8", "e4m3"]),
        ({"tp_size": 0}, ValueError, ["tp_size", "0"]),
        ({"cp_size": -1}, ValueError, ["cp_size", "-1"]),
        ({"tp_size": 2, "tp_rank": 2}, ValueError, ["tp_rank", "2"]),
        ({"tp_rank": -1}, ValueError, ["tp_rank", "-1"]),
        ({"cp_size": 2, "cp_rank": 2}, ValueError, ["cp_rank", "2"]),
        ({"cp_rank": -1}, ValueError, ["cp_rank", "-1"]),
        ({"tp_size": 2.0}, TypeError, ["tp_size"]),
        ({"lengths": [4, 2**31]}, ValueError, ["2147483652", "int32"]),
        ({"lengths": [4, -1]}, ValueError, ["lengths", "trajectory 1", "-1"]),
        ({"lengths": [4, True]}, TypeError, ["lengths", "trajectory 1"]),
        ({"lengths": [4, 3.0]}, TypeError, ["lengths", "trajectory 1"]),
        ({"lengths": [4, None]}, TypeError, ["lengths", "trajectory 1"]),
        ({"lengths": 4}, TypeError, ["lengths"]),
        ({"lengths": META}, TypeError, ["lengths", "device"]),
        ({"padded_lengths": [4, 4]}, ValueError, ["padded_lengths", "trajectory 1", "5", "4"]),
        ({"padded_lengths": [4]}, ValueError, ["padded_lengths"]),
        ({"padded_lengths": [4, 6, 2, 2]}, ValueError, ["padded_lengths"]),
        ({"padded_lengths": [4, 6, -2]}, ValueError, ["padded_lengths", "-2"]),
        ({"padded_lengths": [4, True]}, TypeError, ["padded_lengths"]),
        ({"padded_lengths": META}, TypeError, ["padded_lengths", "device"]),
        (
            {"padded_lengths": [4, 6], "cp_size": 2},
            ValueError,
            ["padded_lengths", "trajectory 1", "6", "4"],
        ),
        (
            {"padded_lengths": [4, 7], "cp_size": 2, "cp_order": "contiguous"},
            ValueError,
            ["padded_lengths", "trajectory 1", "7", "2"],
        ),
        ({"padded_lengths": [4, 8, 2], "cp_size": 2}, ValueError, ["padded_lengths", "2"]),
        (
            {"padded_lengths": [4, 5], "tp_size": 2, "sequence_parallel": True},
            ValueError,
            ["9", "tp_size", "2"],
        ),
        ({"padded_lengths": [6, 8], "format": "bshd"}, ValueError, ["padded_lengths", "bshd"]),
        (
            {"padded_lengths": [5, 5], "format": "bshd", "tp_size": 2, "sequence_parallel": True},
            ValueError,
            ["5", "tp_size", "2"],
        ),
        ({"batch_width": 4}, ValueError, ["batch_width", "trajectory 1"]),
        ({"batch_width": 6.0}, TypeError, ["batch_width", "6.0"]),
        ({"lengths": [], "batch_width": -3}, ValueError, ["batch_width", "-3"]),
        (
            {"batch_width": 6, "first_columns": [0, 2]},
            ValueError,
            ["first_columns", "trajectory 1"],
        ),
        (
            {"batch_width": 6, "first_columns": [-1, 0]},
            ValueError,
            ["first_columns", "trajectory 0"],
        ),
        ({"batch_width": 6, "first_columns": [0]}, ValueError, ["first_columns"]),
        ({"batch_width": 6, "first_columns": [0, True]}, TypeError, ["first_columns"]),
        ({"batch_width": 8, "first_columns": META}, TypeError, ["first_columns", "device"]),
    ],
)
def test_build_rejects(arguments, error, parts):
    def call():
        TokenLayout.build(**{"lengths": [4, 5], **arguments})

    assert_rejected(call, error, "build", *parts)


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (
            lambda layout: layout.row_ids([1, 1, 1]),
            ValueError,
            ["row_ids", "segment_lengths", "3", "2"],
        ),
        (
            lambda layout: layout.row_ids([1, -1]),
            ValueError,
            ["row_ids", "segment_lengths", "trajectory 1"],
        ),
        (lambda layout: layout.row_ids([1, True]), TypeError, ["row_ids", "segment_lengths"]),
        (lambda layout: layout.row_ids(META), TypeError, ["row_ids", "segment_lengths", "device"]),
        (lambda layout: layout.row_ids([1, 1], [0]), ValueError, ["row_ids", "starts"]),
        (lambda layout: layout.row_ids([1, 1], META), TypeError, ["row_ids", "starts", "device"]),
        (
            lambda layout: layout.row_ids([1, 3], [0, 3]),
            ValueError,
            ["row_ids", "trajectory 1", "5"],
        ),
        (
            lambda layout: layout.support_row_ids([4, 2]),
            ValueError,
            ["support_row_ids", "response_lengths", "trajectory 0", "4"],
        ),
        (
            lambda layout: layout.support_row_ids([2, 9]),
            ValueError,
            ["support_row_ids", "response_lengths", "trajectory 1", "9"],
        ),
        (
            lambda layout: layout.support_row_ids([2]),
            ValueError,
            ["support_row_ids", "response_lengths"],
        ),
        (
            lambda layout: layout.support_row_ids(META),
            TypeError,
            ["support_row_ids", "response_lengths", "device"],
        ),
        (
            lambda layout: layout.route_row_ids([4, 6]),
            ValueError,
            ["route_row_ids", "captured_lengths", "trajectory 1", "6", "5"],
        ),
        (
            lambda layout: layout.route_row_ids([-1, 2]),
            ValueError,
            ["route_row_ids", "captured_lengths", "trajectory 0", "-1"],
        ),
        (
            lambda layout: layout.route_row_ids([4]),
            ValueError,
            ["route_row_ids", "captured_lengths"],
        ),
        (
            lambda layout: layout.route_row_ids(META),
            TypeError,
            ["route_row_ids", "captured_lengths", "device"],
        ),
        (lambda layout: layout.align(torch.zeros(2, 7), 0), ValueError, ["align", "dense", "6"]),
        (lambda layout: layout.align(torch.zeros(3, 6), 0), ValueError, ["align", "dense", "2"]),
        (lambda layout: layout.align(torch.zeros(6), 0), ValueError, ["align", "dense"]),
        (lambda layout: layout.align(torch.zeros(2, 6), 1.5), TypeError, ["align", "fill"]),
        (lambda layout: layout.align([[1]], 0), TypeError, ["align", "dense", "list"]),
        (lambda layout: layout.restore([1], 0), TypeError, ["restore", "values", "list"]),
        (
            lambda layout: layout.align(torch.zeros(2, 6, dtype=torch.uint8), -1),
            ValueError,
            ["align", "fill", "-1", "uint8"],
        ),
        (
            lambda layout: layout.restore(torch.zeros(9), float("nan")),
            TypeError,
            ["restore", "fill", "nan"],
        ),
        (lambda layout: layout.restore(torch.zeros(9), 1.5), TypeError, ["restore", "fill"]),
        (lambda layout: layout.restore(torch.zeros(8)), ValueError, ["restore", "values", "8"]),
        (
            lambda layout: layout.restore_gathered([torch.zeros(10)]),
            ValueError,
            ["restore_gathered", "values", "10", "9"],
        ),
        (
            lambda layout: layout.restore_gathered([torch.zeros(9), torch.zeros(9)]),
            ValueError,
            ["restore_gathered", "2", "cp_size", "1"],
        ),
        (lambda layout: layout.to_model(torch.zeros(8)), ValueError, ["to_model", "8", "9"]),
        (
            lambda layout: layout.from_model(torch.zeros(1, 8)),
            ValueError,
            ["from_model", "8", "9"],
        ),
        (lambda layout: layout.from_model(torch.zeros(9, 1)), ValueError, ["from_model"]),
    ],
)
def test_a_layout_rejects(call, error, parts):
    layout = TokenLayout.build([4, 5], batch_width=6)
    assert_rejected(lambda: call(layout), error, *parts)


def test_starts_may_be_a_numpy_integer():
    layout = TokenLayout.build([3])
    assert layout.row_ids([2], np.int64(1)).tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("sizes", "error", "part"), [((0, 1), ValueError, "tp_size"), ((1, "2"), TypeError, "cp_size")]
)
def test_alignment_rejects_sizes(sizes, error, part):
    assert_rejected(lambda: sequence_alignment(*sizes), error, "sequence_alignment", part)


def test_a_tail_pad_is_a_sequence_without_tokens():
    layout = TokenLayout.build([4, 5], padded_lengths=[6, 6, 2])
    assert layout.cu_seqlens == (0, 4, 9, 9)
    assert layout.cu_seqlens_padded == (0, 6, 12, 14)


def test_a_fill_may_be_written_as_a_float():
    layout = TokenLayout.build([2, 1])
    assert layout.restore(torch.ones(3), -9999.0).tolist() == [[1.0], [-9999.0]]


def test_a_response_as_long_as_its_trajectory_is_named():
    """Its first token would need a logit from before the trajectory."""
    layout = TokenLayout.build([5, 3, 4])
    assert_rejected(
        lambda: layout.support_row_ids([4, 3, 4]), ValueError, "support_row_ids", "trajectory 1"
    )


def test_values_of_another_dtype_on_one_rank_are_not_promoted():
    layout = TokenLayout.build([4], cp_size=2)
    values = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    assert_rejected(
        lambda: layout.restore_gathered(values), TypeError, "restore_gathered", "float64"
    )


def test_restore_over_context_parallel_ranks_needs_their_group():
    layout = TokenLayout.build([4], cp_size=2)
    assert_rejected(lambda: layout.restore(torch.zeros(2)), ValueError, "restore", "cp_group")


@pytest.mark.parametrize("hole", [[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 1]])
def test_a_mask_with_holes_is_an_error(hole):
    mask = torch.tensor([[0, 1, 1, 0], hole])
    for spelling in (mask, mask.bool(), mask.numpy()):
        assert_rejected(
            lambda spelling=spelling: columns_from_mask(spelling),
            ValueError,
            "columns_from_mask",
            "trajectory 1",
        )


def test_a_trajectory_without_tokens_has_an_empty_mask_row():
    lengths, first_columns = columns_from_mask(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]]))
    assert list(lengths) == [2, 0]
    layout = TokenLayout.build(lengths, batch_width=4, first_columns=first_columns)
    assert layout.token_row_ids().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("mask", "error", "part"),
    [
        (torch.ones(2, 3, device="meta"), TypeError, "device"),
        (torch.ones(3), ValueError, "[B, S]"),
    ],
)
def test_columns_from_mask_rejects(mask, error, part):
    assert_rejected(
        lambda: columns_from_mask(mask), error, "columns_from_mask", "attention_mask", part
    )
