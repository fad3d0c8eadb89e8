"""align_tokens and restore_tokens: every rejection with its message; nothing is moved by then."""

import pytest
import torch

from packhorse.kernels.dense import align_tokens, restore_tokens

OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
COLUMNS = torch.tensor([[1, 0], [2, 2]], dtype=torch.int32)
ROWS = torch.zeros(2, 3)
SHARED = [
    (ROWS.to(torch.complex64), OFFSETS, COLUMNS, {}, TypeError, "unsupported dtype"),
    (ROWS, OFFSETS.long(), COLUMNS, {}, TypeError, "offsets must be int32"),
    (ROWS, OFFSETS, COLUMNS.long(), {}, TypeError, "columns must be int32"),
    (ROWS, OFFSETS, COLUMNS[:1], {}, ValueError, r"columns must be \[2, B\]"),
    (ROWS, OFFSETS[:2], COLUMNS, {}, ValueError, r"offsets must be \[3\] or longer"),
    (ROWS, OFFSETS[None], COLUMNS, {}, ValueError, r"offsets must be \[3\] or longer"),
    (ROWS, OFFSETS[:1], COLUMNS, {"position_major": True}, ValueError, r"offsets must be \[2\]"),
    (ROWS, OFFSETS, COLUMNS.T.contiguous().T, {}, ValueError, "columns must be contiguous"),
    (ROWS, OFFSETS, COLUMNS.to("meta"), {}, ValueError, "columns on meta"),
    (ROWS.to("meta"), OFFSETS, COLUMNS, {}, ValueError, "offsets on cpu, .* on meta"),
    (ROWS, OFFSETS, COLUMNS, {"fill": 0.5}, TypeError, "fill must be an integer"),
    (ROWS.half(), OFFSETS, COLUMNS, {"fill": 100_000}, ValueError, "fill=100000 does not fit"),
    (ROWS.bool(), OFFSETS, COLUMNS, {"fill": 2}, ValueError, "fill=2 does not fit"),
    (ROWS, OFFSETS, COLUMNS, {"cp_size": 0}, ValueError, "cp_size must be >= 1, got 0"),
    (ROWS, OFFSETS + 1, COLUMNS, {}, ValueError, "offsets must rise from 0"),
    (ROWS, OFFSETS.flip(0), COLUMNS, {}, ValueError, "offsets must rise from 0"),
    (ROWS, 2 * OFFSETS, COLUMNS, {}, ValueError, "offsets must rise from 0 to at most"),
    (ROWS, 3 * OFFSETS[:2], COLUMNS, {"position_major": True}, ValueError, "to at most the tok"),
    (ROWS, OFFSETS, COLUMNS - 1, {}, ValueError, "columns reach beyond the batch"),
    (ROWS, OFFSETS, COLUMNS + 1, {}, ValueError, "columns reach beyond the batch"),
    (ROWS, OFFSETS // 2, COLUMNS, {}, ValueError, "exceeds the padded one"),
    (
        ROWS, OFFSETS // 2, COLUMNS, {"cp_size": 2, "zigzag": True}, ValueError,
        "zigzag needs an even number",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "offsets", "columns", "keywords", "error", "message"),
    [
        *SHARED,
        (ROWS[0], OFFSETS, COLUMNS, {}, ValueError, r"dense must be \[B, S, ...\]"),
        (ROWS[:1], OFFSETS, COLUMNS, {}, ValueError, "dense of 1 rows, columns of 2"),
        (ROWS, OFFSETS, COLUMNS, {"cp_rank": 1}, ValueError, r"cp_rank=1 is not in \[0, cp_size=1"),
        (ROWS, OFFSETS, COLUMNS, {"cp_rank": -1}, ValueError, "cp_rank=-1 is not in"),
        (ROWS, OFFSETS, COLUMNS, {"shift": 2}, ValueError, "shift must be 0 or 1, got 2"),
        (ROWS, OFFSETS, COLUMNS, {"num_tokens": -1}, ValueError, "num_tokens must be in .*got -1"),
        (ROWS, OFFSETS, COLUMNS, {"num_tokens": 2**31}, ValueError, "num_tokens must be in"),
    ],
)
def test_align_rejects(rows, offsets, columns, keywords, error, message):
    with pytest.raises(error, match="align_tokens: .*" + message):
        align_tokens(rows, offsets, columns, **{"num_tokens": 4, **keywords})


@pytest.mark.parametrize(
    ("rows", "offsets", "columns", "keywords", "error", "message"),
    [
        *SHARED,
        (ROWS[0, 0], OFFSETS, COLUMNS, {}, ValueError, r"values must be \[R \* T, ...\]"),
        (ROWS, OFFSETS, COLUMNS, {"cp_size": 3}, ValueError, "cp_size=3 does not divide 4 values"),
        (ROWS, OFFSETS, COLUMNS, {"width": -1}, ValueError, r"width must be in .*got -1"),
        (ROWS, OFFSETS, COLUMNS, {"width": 1}, ValueError, "columns reach beyond the batch"),
    ],
)
def test_restore_rejects(rows, offsets, columns, keywords, error, message):
    # [2, 3] as [4]: the tokens of this layout
    values = rows if rows.dim() == 0 else rows.flatten()[:4].repeat(keywords.get("cp_size") or 1)
    if "cp_size=3" in message:
        values = values[:4]
    with pytest.raises(error, match="restore_tokens: .*" + message):
        restore_tokens(values, offsets, columns, **{"width": 2, **keywords})
