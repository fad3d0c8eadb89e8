"""Sampling supports as engines return them, checked on the host.

A batch is read and checked in runs of trajectories, several at a time, so that what a check needs
beside its ids stays small; the first wrong trajectory is named, whatever the threads do.

Sizes: B trajectories, N response tokens, V vocabulary, C width of a support array.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from packhorse.packed.host import accumulate, as_int64, host_ints, row_place
from packhorse.packed.host_arrays import check_sequence, integer_array
from packhorse.packed.pool import count_threads, run_tasks
from packhorse.packed.sentinels import NO_CANDIDATE

SUPPORT_FIELD: Final = "rollout_sample_support"

#: Rows that one task of the pool reads, about; fewer are not worth a thread.
_ROWS_OF_TASK: Final = 1 << 14


class SupportRows(NamedTuple):
    """Support rows of different widths: row r holds ``token_ids[row_offsets[r]:row_offsets[r+1]]``.

    As vLLM's ``sampling_mask`` returns them (ids and counts).
    """

    token_ids: np.ndarray  # [total ids] integers
    row_offsets: np.ndarray  # [rows + 1] integers: first 0, last total ids, non-decreasing


def checked_support(
    name: str, support: Any, sampled_ids: Any, vocab_size: int, *, num_threads: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of all trajectories, checked as ``pack_support`` says, without their -1.

    Returns:
        ids [total] int32, ids of each row [N] int64, and where each trajectory's rows begin
        [B + 1].
    """
    if not isinstance(sampled_ids, Sequence) or isinstance(sampled_ids, str | bytes):
        raise TypeError(f"{name}: sampled_ids must be a sequence of one id sequence a trajectory")
    sampled = [
        host_ints(ids, f"{name}: sampled_ids of trajectory {i}")
        for i, ids in enumerate(sampled_ids)
    ]
    starts = accumulate(name, np.array([ids.size for ids in sampled], dtype=np.int64))
    sampled_flat = np.concatenate([np.empty(0, dtype=np.int64), *sampled])
    rows_of = _Rows(name, support, starts)
    runs = rows_of.runs()
    checked: list[tuple[np.ndarray, np.ndarray]] = [(starts[:0], starts[:0])] * len(runs)

    def check_run(number: int) -> None:
        row, token_ids, counts, wrong = rows_of.read(runs[number])
        of_rows = sampled_flat[row : row + counts.size]
        checked[number] = _check_rows(name, token_ids, counts, of_rows, vocab_size, starts, row)
        if wrong is not None:
            raise wrong

    if num_threads is None:
        num_threads = 1 if len(runs) < 2 else count_threads(None, name)
    run_tasks(check_run, len(runs), num_threads)
    token_ids = np.concatenate([np.empty(0, dtype=np.int32), *(ids for ids, _ in checked)])
    counts = np.concatenate([np.empty(0, dtype=np.int64), *(counts for _, counts in checked)])
    return token_ids, counts, starts


def _check_rows(
    name: str,
    token_ids: np.ndarray,
    counts: np.ndarray,
    sampled: np.ndarray,
    vocab_size: int,
    starts: np.ndarray,
    first_row: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, ids of each row) of rows from ``first_row`` of the batch on; the first wrong row
    is named."""
    rows = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    present = token_ids != NO_CANDIDATE
    if not present.all():
        rows, token_ids = rows[present], token_ids[present]
        counts = np.bincount(rows, minlength=counts.size)
    problem = ""
    wrong = counts.size  # the first row that is

    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        wrong, token = int(rows[first]), token_ids[first]
        limit = f"not below vocab_size={vocab_size}" if token > 0 else "negative"
        problem = f"id {token} is {limit}"
        before = int(np.searchsorted(rows, wrong))  # the ids of the rows before it
        rows, token_ids = rows[:before], token_ids[:before]
    keys = np.sort(rows * vocab_size + token_ids)  # rows < 2**31 and ids < 2**31: int64 holds it
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if repeated.size:
        wrong, token = divmod(int(keys[repeated[0]]), vocab_size)
        problem = f"id {token} is repeated"
    is_member = np.zeros(counts.size, dtype=np.bool_)
    is_member[rows[token_ids == sampled[rows]]] = True
    missing = np.flatnonzero((counts > 0) & ~is_member)
    if missing.size and missing[0] < wrong:
        wrong = int(missing[0])
        problem = f"the sampled id {sampled[wrong]} is not among its {counts[wrong]} ids"
    if problem:
        place = row_place(first_row + wrong, starts)
        raise ValueError(f"{name}: {SUPPORT_FIELD} of {place}: {problem}")
    return token_ids.astype(np.int32), counts


class _Rows:
    """The rows of a batch, read in runs; ``starts`` [B + 1] are those of its trajectories."""

    def __init__(self, name: str, support: Any, starts: np.ndarray):
        self._where, self._starts = f"{name}: {SUPPORT_FIELD}", starts
        self._joined: tuple[np.ndarray, np.ndarray] | None = None  # ids, offsets of all rows
        num_rows, num_trajectories = int(starts[-1]), starts.size - 1
        if isinstance(support, SupportRows):
            token_ids, counts = csr_rows(self._where, support)
            if counts.size != num_rows:
                raise ValueError(
                    f"{self._where} has {counts.size} rows for {num_rows} response tokens of "
                    f"{num_trajectories} trajectories"
                )
            self._joined = token_ids, np.concatenate([[0], np.cumsum(counts)])
        else:
            check_sequence(name, SUPPORT_FIELD, support, num_trajectories, "sampled_ids")
        self._support = support

    def runs(self) -> list[tuple[int, int]]:
        """Where each run begins and ends: rows of a joined support, else trajectories."""
        if self._joined is not None:
            cuts = list(range(0, int(self._starts[-1]), _ROWS_OF_TASK))
            return list(pairwise([*cuts, int(self._starts[-1])]))
        # a run ends with the trajectory that fills it
        run_of = self._starts[:-1] // _ROWS_OF_TASK
        cuts = np.flatnonzero(np.diff(run_of, prepend=-1)).tolist()
        return list(pairwise([*cuts, run_of.size]))

    def read(
        self, run: tuple[int, int]
    ) -> tuple[int, np.ndarray, np.ndarray, TypeError | ValueError | None]:
        """First row, ids [n] int64 and ids of each row of a run. Where a trajectory is malformed,
        those before it, and what is wrong."""
        begin, end = run
        if self._joined is not None:
            token_ids, offsets = self._joined
            ids = token_ids[offsets[begin] : offsets[end]]
            return begin, ids, np.diff(offsets[begin : end + 1]), None
        empty = np.empty(0, dtype=np.int64)
        parts, wrong = [(empty, empty)], None
        for i in range(begin, end):
            num_tokens = int(self._starts[i + 1] - self._starts[i])
            try:
                parts.append(
                    _rows_of(f"{self._where} of trajectory {i}", self._support[i], num_tokens)
                )
            except (TypeError, ValueError) as error:
                wrong = error
                break
        token_ids = np.concatenate([ids for ids, _ in parts])
        counts = np.concatenate([counts for _, counts in parts])
        return int(self._starts[begin]), token_ids, counts, wrong


def _rows_of(where: str, given: Any, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] int64, ids of each row) of one trajectory."""
    if isinstance(given, SupportRows):
        part = csr_rows(where, given)
    elif isinstance(given, np.ndarray | Tensor):
        array = integer_array(given, where)
        if array.ndim != 2:
            raise ValueError(f"{where} must be [response tokens, C], got shape {array.shape}")
        if array.shape[0] != num_tokens:
            raise ValueError(f"{where} has {array.shape[0]} rows for {num_tokens} response tokens")
        part = as_int64(array, where).reshape(-1), np.full(array.shape[0], array.shape[1])
    else:
        part = listed_rows(where, given)
    if part[1].size != num_tokens:
        raise ValueError(f"{where} has {part[1].size} rows for {num_tokens} response tokens")
    return part


def csr_rows(where: str, given: SupportRows) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] int64, ids of each row) of rows whose offsets must fit their ids."""
    token_ids = host_ints(given.token_ids, f"{where}: token_ids")
    offsets = host_ints(given.row_offsets, f"{where}: row_offsets")
    ends = (0, token_ids.size)
    if offsets.size == 0 or (offsets[0], offsets[-1]) != ends or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{where}: row_offsets must rise from 0 to its {token_ids.size} ids")
    return token_ids, np.diff(offsets)


def listed_rows(where: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] int64, ids of each row) of a sequence of id sequences."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"{where} must be a sequence of rows, got {type(given).__name__}")
    if all(isinstance(ids, list | tuple) for ids in given):  # engines': one pass over all ids
        flat = list(chain.from_iterable(given))
        if all(type(token) is int for token in flat):
            counts = np.fromiter(map(len, given), dtype=np.int64, count=len(given))
            return host_ints(flat, where), counts
    rows = [host_ints(ids, f"{where}, row {row}") for row, ids in enumerate(given)]
    counts = np.array([ids.size for ids in rows], dtype=np.int64)
    return np.concatenate([np.empty(0, dtype=np.int64), *rows]), counts
