"""Score the rows of a ragged support together where they are of a like width, whatever has made
their logits.

    plan                 = check_ragged(...)                     classes of 4, 16, 64, ... ids
    columns, cell_tokens = plan.order(token_ids, vocab_size)     of each cell
    scores, members      = plan.score(logits [S, M], ...)        of each token, of each cell

A cell is one id of the packed ids. Only what looks at a whole row takes rows of a like width at a
time; what ``ragged_support_logprobs`` and ``lm_head_ragged_support_logprobs`` do with a cell's
logit and its gradient is theirs. Which rows are of a class is host data, so that nothing waits for
the device.

Sizes: T tokens, N rows, M cells.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse.kernels.members import MAX_SORTED, SUPPORT_MISSING
from packhorse.kernels.ragged_members import Rows, order_cells, score_cells
from packhorse.kernels.rows import (
    check_values,
    checks_values,
    gather_rows,
    interval,
    scatter_rows,
)
from packhorse.kernels.support import SupportScores, check_token_rows
from packhorse.kernels.support_rows import check_ragged_rows

#: ids of the narrowest class; the next is 4 times as wide
NARROWEST: Final = 4


class Class(NamedTuple):
    width: int
    rows: Rows


class Plan(NamedTuple):
    """Which rows are of a like width. Rows without an id are in no class."""

    classes: tuple[Class, ...]
    slots: Rows  # one entry a token: its row

    def order(self, token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Columns and tokens of the cells, [M] int32, as of ``order_cells``."""
        columns = torch.full_like(token_ids, -1)
        cell_tokens = torch.full_like(token_ids, -1)
        for width, rows in self.classes:
            order_cells(columns, cell_tokens, token_ids, *rows, width, vocab_size)
        return columns, cell_tokens

    def score(
        self,
        logits: Tensor,  # [S, M], not yet divided by the temperature
        columns: Tensor,  # [M] int32
        sampled_ids: Tensor,  # [T] int64
        temperature: float,
        temperatures: Tensor | None = None,
    ) -> tuple[SupportScores, Tensor]:
        """The scores, and the logprob of each member [M]."""
        num_tokens = sampled_ids.shape[0]
        scores = SupportScores(
            logits.new_zeros(num_tokens),
            logits.new_zeros(num_tokens),
            torch.full_like(sampled_ids, SUPPORT_MISSING, dtype=torch.uint8),
            torch.zeros_like(sampled_ids, dtype=torch.int32),
        )
        members = torch.full_like(logits[0], -float("inf"))
        given = logits, columns, sampled_ids
        for width, rows in self.classes:
            score_cells(*scores, members, *given, *rows, width, temperature, temperatures)
        return scores, members


def _upload(listed: np.ndarray, device: torch.device) -> Tensor:
    """From pinned memory where it goes to a GPU: nothing waits."""
    tensor = torch.from_numpy(listed)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def make_plan(row_ids: Tensor, row_offsets: Tensor, widths: np.ndarray) -> Plan:
    """Classes of rows of ``widths`` [N] ids, and the row of each token."""
    device, num_rows = row_ids.device, len(widths)
    slots = torch.arange(row_ids.shape[0], device=device)
    counts = row_offsets.diff()
    rows = Rows(scatter_rows(slots, row_ids, num_rows, fill=-1), row_offsets[:-1], counts)
    classes = [Class(NARROWEST, rows)] if num_rows else []  # most rows: not worth a list
    rest = np.flatnonzero(widths > NARROWEST)
    # 4**k < width <= 4**(k + 1): k is half the power of 2 in width - 1
    powers = np.frexp((widths[rest] - 1).astype(np.float32))[1].astype(np.uint8) - 1
    order = np.argsort(powers // 2, kind="stable")
    sizes = np.bincount(powers // 2)
    # a class begins at an even place of the list: at 16 bytes, for which its kernels are compiled
    taken = sizes + sizes % 2
    firsts = taken.cumsum() - taken
    places = np.arange(len(rest)) + np.repeat(firsts - (sizes.cumsum() - sizes), sizes)
    on_host = np.zeros(int(taken.sum()), np.int32)
    on_host[places] = rest[order]
    listed = _upload(on_host, device)
    of_list = Rows(*(x.index_select(0, listed) for x in rows))
    for k, (first, size) in enumerate(zip(firsts.tolist(), sizes.tolist(), strict=True)):
        if size:
            width = 4 ** (k + 1)
            if width > MAX_SORTED:  # torch pads these
                width = int(widths[on_host[first : first + size]].max())
            classes.append(Class(width, of_list.part(slice(first, first + size))))
    begins = gather_rows(rows.begins.contiguous(), row_ids)
    return Plan(tuple(classes), Rows(slots, begins, gather_rows(counts, row_ids)))


def check_ragged(
    op: str,
    field: str,
    tokens: Tensor,
    token_ids: Tensor,
    row_offsets: Tensor,
    row_ids: Tensor,
    widths: Sequence[int] | np.ndarray,
) -> Plan:
    """Check the ragged supports of the rows of ``tokens``, the argument ``field``, and plan them.

    Raises:
        TypeError, ValueError: as of ``lm_head_ragged_support_logprobs``, beginning with ``op``.
    """
    check_ragged_rows(op, token_ids, row_offsets)
    if token_ids.device != tokens.device:
        raise ValueError(f"{op}: token_ids on {token_ids.device}, {field} on {tokens.device}")
    check_token_rows(op, field, tokens, row_ids)
    listed = _check_widths(op, widths, row_offsets.shape[0] - 1, token_ids.shape[0])
    row_ids = row_ids.contiguous()
    if checks_values(row_ids):
        _check_rows(op, row_ids, row_offsets, listed)
    return make_plan(row_ids, row_offsets, listed)


def _check_widths(op: str, widths: object, num_rows: int, num_ids: int) -> np.ndarray:
    if isinstance(widths, Tensor):
        raise TypeError(f"{op}: widths must be host integers, got a tensor")
    listed = np.asarray(widths)
    if listed.size == 0:
        listed = listed.astype(np.int64)
    if listed.dtype.kind not in "iu" or listed.ndim != 1:
        raise TypeError(f"{op}: widths must be host integers [N], got {listed.dtype}")
    if listed.size != num_rows:
        raise ValueError(f"{op}: {listed.size} widths for {num_rows} rows")
    if listed.size and (listed.min() < 0 or listed.sum() > num_ids):
        raise ValueError(f"{op}: widths are negative, or more than the {num_ids} ids")
    return listed


def _check_rows(op: str, row_ids: Tensor, row_offsets: Tensor, widths: np.ndarray) -> None:
    """What a GPU believes, unless it is asked to check values."""
    expected = _upload(widths.astype(np.int64), row_offsets.device)
    fits = (row_offsets.diff() == expected).all()
    check_values(fits, f"{op}: widths must be those of row_offsets")
    inside = ((row_ids >= -1) & (row_ids < len(widths))).all()
    check_values(inside, f"{op}: row_ids must be in {interval(-1, len(widths))}")
    named = scatter_rows(torch.ones_like(row_ids), row_ids, len(widths), fill=0).sum()
    once = named == (row_ids >= 0).sum()
    check_values(once, f"{op}: row_ids must name a row once at most")
