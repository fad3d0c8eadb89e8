"""validate_support and validate_ragged_support: what is found in rows of candidates.

Oracle: loops over Python lists that share no code with the package. Every count is exact.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse.kernels.validate import validate_ragged_support, validate_support
from tests.kernels.validate_oracle import (
    check_ragged,
    check_support,
    make_ragged,
    make_support,
    spoil_support,
)

# --- support --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("width", [1, 2, 7, 20, 64, 128, 129])
def test_support_matches_a_loop(width, ascending, sampled_dtype, device):
    num_rows = 120 if width <= 20 else 30
    support, sampled = make_support(num_rows, width, 900, device, ascending=ascending, seed=width)
    sampled = sampled.to(sampled_dtype)
    check_support(support, sampled, 900)
    assert validate_support(support, sampled, vocab_size=900).read() == {}
    spoil_support(support, sampled, 900, seed=width)
    check_support(support, sampled, 900)


@given(
    num_rows=st.integers(0, 20),
    width=st.integers(0, 6),
    vocab_size=st.integers(1, 5),
    data=st.data(),
)
def test_any_support(num_rows, width, vocab_size, data):
    size = num_rows * width
    ids = data.draw(st.lists(st.integers(-2, 5), min_size=size, max_size=size))
    sampled = data.draw(st.lists(st.integers(-1, 5), min_size=num_rows, max_size=num_rows))
    support = torch.tensor(ids, dtype=torch.int32).view(num_rows, width)
    sampled = torch.tensor(sampled, dtype=torch.int64)
    check_support(support, sampled, vocab_size)
    rows = [[token for token in row if token != -1] for row in support.tolist()]
    check_ragged(rows, sampled, vocab_size)


def test_a_sampled_id_outside_the_support_is_found(device):
    """Trap 57: support {0, 1}, sampled 3. A row without an id belongs to no sampled token."""
    support = torch.tensor([[0, 1], [-1, -1], [3, -1]], dtype=torch.int32, device=device)
    sampled = torch.tensor([3, 3, 3], device=device)
    found = validate_support(support, sampled, vocab_size=4)
    assert found.read() == {"sampled_missing": (1, 0)}


def test_each_row_has_one_fault(device):
    rows = {
        (9, -1, 9): "out_of_range",
        (-2, 1, 1): "out_of_range",
        (1, -1, 1): "not_compacted",
        (-1, 5, 5): "not_compacted",
        (5, 1, 5): "repeated",
        (1, 1, -1): "repeated",
        (1, 2, 3): "sampled_missing",
        (3, 2, 1): "sampled_missing",
    }
    for ids, name in rows.items():
        support = torch.tensor([ids], dtype=torch.int32, device=device)
        sampled = torch.tensor([7], device=device)
        assert validate_support(support, sampled, vocab_size=9).read() == {name: (1, 0)}


def test_a_sampled_id_past_int32_is_no_member(device):
    support = torch.tensor([[5, -1]], dtype=torch.int32, device=device)
    for sampled in (2**32 + 5, -(2**32) + 5, -1):
        found = validate_support(support, torch.tensor([sampled], device=device), vocab_size=9)
        assert found.read() == {"sampled_missing": (1, 0)}


def test_repeats_are_found_wherever_they_stand(device):
    for width in (2, 5, 33, 128):
        for first in (0, width // 2):
            for second in {min(first + 1, width - 1), width - 1} - {first}:
                ids = torch.arange(width, dtype=torch.int32, device=device).repeat(3, 1)
                ids[1, second] = ids[1, first]
                sampled = torch.zeros(3, dtype=torch.int64, device=device)
                found = validate_support(ids, sampled, vocab_size=width)
                assert found.read() == {"repeated": (1, 1)}


def test_strided_support(device):
    support, sampled = make_support(40, 24, 90, device, ascending=False)
    spoil_support(support, sampled, 90, seed=1)
    for view in (support[::2], support[:, ::2], support[:, 3:9], support[3:, 1:], support.flip(0)):
        check_support(view, sampled[: view.shape[0]], 90)
        check_support(view, torch.stack([sampled, sampled], 1)[: view.shape[0], 0], 90)
    check_support(support[:24].T, sampled[:24], 90)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (0, 200)])
def test_empty_support(shape, device):
    support = torch.full(shape, -1, dtype=torch.int32, device=device)
    sampled = torch.zeros(shape[0], dtype=torch.int64, device=device)
    assert validate_support(support, sampled, vocab_size=4).read() == {}


# --- ragged support -------------------------------------------------------------------------------


@pytest.mark.parametrize("ascending", [True, False])
def test_ragged_matches_a_loop(ascending, device):
    support, sampled = make_support(200, 30, 400, device, ascending=ascending)
    rows = [[token for token in row if token != -1] for row in support.tolist()]
    rows[77] = list(range(399, -1, -1))
    sampled[77] = 5
    check_ragged(rows, sampled, 400)
    rng = np.random.default_rng(0)
    for row in rng.choice(200, 60, replace=False):
        if rows[row]:
            c = rng.integers(len(rows[row]))
            rows[row][c] = [rows[row][0], 400, -1, -2, 2**31 - 1, -(2**31)][rng.integers(6)]
    check_ragged(rows, sampled, 400)
    check_ragged(rows, sampled.int(), 400)


def test_equal_ids_of_two_rows_are_no_repeat(device):
    sampled = torch.tensor([5, 5, 5], device=device)
    check_ragged([[5], [5], [5, 5]], sampled, 9)
    check_ragged([[4, 5], [5, 4], []], sampled, 9)
    big = 2**31 - 1
    check_ragged([[big - 2, big - 1], [-4, -4], [0]], sampled * 0 + big - 1, big)


def test_empty_ragged_support(device):
    check_ragged([], torch.zeros(0, dtype=torch.int64, device=device), 9)
    check_ragged([[], [], []], torch.zeros(3, dtype=torch.int64, device=device), 9)


# --- rejections -----------------------------------------------------------------------------------

SUPPORT, SAMPLED = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32), torch.tensor([0, 2])
IDS, OFFSETS = make_ragged([[0, 1], [2]], "cpu")

SAMPLED_FAULTS = [
    ({"sampled_ids": SAMPLED.short()}, TypeError, "sampled_ids must be int64 or int32, got torch"),
    ({"sampled_ids": SAMPLED[:1]}, ValueError, r"sampled_ids must be \[N\] with N = 2, got \(1,\)"),
    ({"sampled_ids": SAMPLED[None]}, ValueError, r"sampled_ids must be \[N\] with N = 2"),
    ({"sampled_ids": SAMPLED.to("meta")}, ValueError, "sampled_ids on meta, [a-z_]* on cpu"),
    ({"vocab_size": 4.0}, TypeError, "vocab_size must be an int, got float"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be from 1"),
    ({"vocab_size": 2**31}, ValueError, "vocab_size must be from 1"),
]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"support": SUPPORT.long()}, TypeError, "support must be int32, got torch.int64"),
        ({"support": IDS}, ValueError, r"support must be \[N, C\], got \(3,\)"),
        *SAMPLED_FAULTS,
    ],
)
def test_validate_support_rejects(changed, error, message):
    given = {"support": SUPPORT, "sampled_ids": SAMPLED, "vocab_size": 4, **changed}
    with pytest.raises(error, match="^validate_support: " + message):
        validate_support(**given)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"token_ids": IDS.long()}, TypeError, "token_ids must be int32, got torch.int64"),
        ({"token_ids": SUPPORT}, ValueError, r"token_ids must be contiguous \[total ids\]"),
        ({"row_offsets": OFFSETS.int()}, TypeError, "row_offsets must be int64, got torch.int32"),
        ({"row_offsets": OFFSETS[:0]}, ValueError, r"row_offsets must be \[N \+ 1\], got no"),
        ({"row_offsets": OFFSETS[:-1]}, ValueError, "row_offsets must rise from 0 to the number"),
        ({"row_offsets": OFFSETS.to("meta")}, ValueError, "row_offsets on meta, token_ids on cpu"),
        *SAMPLED_FAULTS,
    ],
)
def test_validate_ragged_support_rejects(changed, error, message):
    given = {
        "token_ids": IDS, "row_offsets": OFFSETS, "sampled_ids": SAMPLED, "vocab_size": 4, **changed
    }  # fmt: skip
    with pytest.raises(error, match="^validate_ragged_support: " + message):
        validate_ragged_support(**given)
