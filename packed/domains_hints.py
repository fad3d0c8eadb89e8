"""What the data says of the cause of a wrong field, as the end of an error's line.

Each function gives "" where nothing is recognised. They run after a check has failed, on what it
looked at, so they may look at every trajectory.

Sizes: B trajectories, N response tokens of the batch.
"""

from typing import Any, NamedTuple

import numpy as np

from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor

_NEIGHBOURS = ((1, "previous"), (-1, "next"))


class SupportIds(NamedTuple):
    """The ids of all support rows, one after another."""

    token_ids: np.ndarray  # [total ids] int64
    rows: np.ndarray  # [total ids] int64: of each id
    counts: np.ndarray  # [N] int64: ids of each row

    @classmethod
    def of(cls, support: Any) -> "SupportIds":
        """Of a ``PackedTensor`` of one width, or of ragged rows."""
        if isinstance(support, PackedTensor):
            held = support.values.numpy()
            present = held != NO_CANDIDATE
            rows, _ = present.nonzero()
            return cls(held[present].astype(np.int64), rows, present.sum(1))
        counts = np.asarray(support.widths, dtype=np.int64)
        rows = np.repeat(np.arange(counts.size), counts)
        return cls(support.values.numpy().astype(np.int64), rows, counts)

    def members(self, token_ids: np.ndarray) -> np.ndarray:
        """[N] bool: row r holds ``token_ids[r]`` ([N])."""
        found = np.zeros(self.counts.size, dtype=np.bool_)
        found[self.rows[self.token_ids == token_ids[self.rows]]] = True
        return found


# --- numbers of rows ------------------------------------------------------------------------------


def counts(given: np.ndarray, expected: np.ndarray, i: int, what: str) -> str:
    """Numbers of rows ``given`` [B] where ``expected`` [B] are needed, wrong in ``i``."""
    for shift, which in _NEIGHBOURS:
        if (given == np.roll(expected, shift)).all():
            return f"; each trajectory has as many as the {which} one needs: one trajectory off"
    if (np.sort(given) == np.sort(expected)).all():
        return (
            f"; trajectory {_at(expected, given[i], i)} needs as many: of a batch in another order"
        )
    off = given - expected
    if (off == off[0]).all() and abs(off[0]) == 1:
        return f"; one {what} too {'many' if off[0] > 0 else 'few'} in every trajectory"
    return ""


def captured(given: np.ndarray, lengths: np.ndarray, needs: np.ndarray, i: int) -> str:
    """Route rows ``given`` [B], wrong in ``i``; legal are ``needs`` [B] to ``lengths`` [B]."""
    for shift, which in _NEIGHBOURS:
        fits = (given <= np.roll(lengths, shift)) & (given >= np.roll(needs, shift))
        if fits.all():
            return f"; each trajectory's rows fit the {which} one: one trajectory off"
    for evaluated in (lengths - 1, lengths):
        if (np.sort(given) == np.sort(evaluated)).all():
            other = _at(evaluated, given[i], i)
            return f"; they fit trajectory {other}: of a batch in another order"
    short = needs - given
    if (needs > 0).any() and (short[needs > 0] == 1).all():
        return "; one row too few in every trajectory"
    return ""


def _at(values: np.ndarray, value: np.integer, i: int) -> int:
    """Another trajectory than ``i`` with this value."""
    found = np.flatnonzero(values == value)
    return int(found[found != i][0])


# --- masks ----------------------------------------------------------------------------------------


def rows(given: np.ndarray, expected: np.ndarray, i: int) -> str:
    """Masks ``given`` [B, S] bool where ``expected`` [B, S] are needed, wrong in ``i``."""
    for shift, which in _NEIGHBOURS:
        if (given == np.roll(expected, shift, axis=0)).all():
            return f"; each trajectory has that of the {which} one: one trajectory off"
        if (given == np.roll(expected, shift, axis=1)).all():
            return f"; one column {'late' if shift > 0 else 'early'} in every trajectory"
    found = np.flatnonzero((expected == given[i]).all(1))
    return f"; it is that of trajectory {found[0]}" if found.size else ""


def inside(held: np.ndarray, within: np.ndarray) -> str:
    """Values not 0 at ``held`` [B, R] bool, some of them outside ``within`` [B, R]."""
    for shift, which in _NEIGHBOURS:
        if not (held & ~np.roll(within, shift, axis=0)).any():
            return f"; each trajectory's fit the {which} one: one trajectory off"
    for shift, how in ((1, "early"), (-1, "late")):
        if not (np.roll(held, shift, axis=1) & ~within).any():
            return f"; all fit one column {'later' if shift > 0 else 'earlier'}: one token {how}"
    if not (held & ~within[:, ::-1]).any():
        return "; all fit responses aligned on the other side"
    return ""


def moved(held: np.ndarray, bare: np.ndarray, bounds: np.ndarray, what: str) -> str:
    """Values not 0 at response tokens ``held`` [N] bool, some ``bare`` [N]: without a support row,
    where they cannot be. ``what`` names them.

    That the moved ones miss those tokens is not enough, since a forced first token of each response
    does too: some token that has a row must lack the value that it then gets.
    """
    first, last = bounds[:-1], bounds[1:] - 1
    for shift, how in ((1, "early"), (-1, "late")):
        there = np.roll(held, shift)
        # what leaves its response belongs to no token
        ends = (first if shift > 0 else last)[bounds[1:] > bounds[:-1]]
        there[ends] = False
        if (there & ~held & ~bare).any() and not (there & bare).any():
            return f"; {what} fits if it is moved by one: it is one token {how}"
    return ""


# --- the ids of the support -----------------------------------------------------------------------


def support(ids: SupportIds, sampled: np.ndarray, bounds: np.ndarray, row: int) -> str:
    """Row ``row`` lacks its sampled id: whose rows may these be?"""
    held = ids.counts > 0
    i = int(np.searchsorted(bounds, row, side="right")) - 1
    own = slice(int(bounds[i]), int(bounds[i + 1]))
    for shift, how in ((1, "late"), (-1, "early")):
        neighbour = np.roll(sampled, shift)
        tested = held.copy()
        ends = (bounds[:-1] if shift > 0 else bounds[1:] - 1)[bounds[1:] > bounds[:-1]]
        tested[ends] = False  # has no neighbour on that side
        fits = ids.members(neighbour) | ~tested
        if tested[own].any() and fits[own].all():
            where = "every trajectory" if fits.all() else f"trajectory {i}"
            what = "before" if shift > 0 else "after"
            return f"; in {where} each row holds the token {what} its own: one token {how}"
    for j in range(bounds.size - 1):
        if j != i and _fits(ids, sampled, bounds, i, j):
            size = bounds.size - 1
            for shift, which in _NEIGHBOURS:
                if all(_fits(ids, sampled, bounds, k, (k - shift) % size) for k in range(size)):
                    return f"; each trajectory has the rows of the {which} one: one trajectory off"
            return f"; its rows hold the tokens of trajectory {j}: of a batch in another order"
    return ""


def _fits(ids: SupportIds, sampled: np.ndarray, bounds: np.ndarray, i: int, j: int) -> bool:
    """Whether the rows of trajectory ``i`` hold the response tokens of ``j``."""
    if bounds[i + 1] - bounds[i] != bounds[j + 1] - bounds[j]:
        return False
    start, stop = int(bounds[i]), int(bounds[i + 1])
    span = slice(*np.searchsorted(ids.rows, [start, stop]).tolist())  # rows are in order
    rows = ids.rows[span] - start
    held = ids.counts[start:stop] == 0
    held[rows[ids.token_ids[span] == sampled[bounds[j] : bounds[j + 1]][rows]]] = True
    return bool(held.all())
