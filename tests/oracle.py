"""Token layouts as plain loops: the specification that the package is tested against.

Shares no code with the package and imports nothing of it; no torch either. Slow, and meant to be
read. Nothing here is checked: the arguments are taken to be legal.

A *slot* is one token place of the model: ``(sequence, position)``. The sequences are the
trajectories, and last, where ``padded_lengths`` has one entry more than ``lengths``, the tail that
pads the whole slab and belongs to no trajectory. A slot is *real* where its position is below the
trajectory's length, and a pad everywhere else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Slot = tuple[int, int]


@dataclass(frozen=True)
class OracleLayout:
    lengths: Sequence[int]
    format: str = "thd"
    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    cp_order: str = "zigzag"
    sequence_parallel: bool = False
    fp8: bool | str = False
    padded_lengths: Sequence[int] | None = None
    batch_width: int | None = None
    first_columns: Sequence[int] | None = None

    # --- sequences -------------------------------------------------------------------------------

    def alignment(self) -> int:
        """What a padded length is a multiple of, unless the packer chose the lengths itself."""
        align = self.tp_size if self.cp_size == 1 else 2 * self.tp_size * self.cp_size
        if self.fp8 in (True, "delayed", "tensorwise"):
            return math.lcm(align, 16 * self.cp_size)
        if self.fp8 == "mxfp8":
            return math.lcm(align, 32 * self.tp_size * self.cp_size)
        if self.fp8 == "blockwise":
            tokens = 16 if self.tp_size == 1 else 128 * self.tp_size
            return math.lcm(align, tokens * self.cp_size)
        return align

    def padded(self) -> list[int]:
        """Padded length of each sequence, the tail included. bshd: all have that of the longest."""
        if self.padded_lengths is not None:
            return list(self.padded_lengths)
        align = self.alignment()
        padded = [math.ceil(length / align) * align for length in self.lengths]
        if self.format == "bshd":
            return [max(padded, default=0)] * len(padded)
        return padded

    # --- slots -----------------------------------------------------------------------------------

    def owner(self, position: int, padded_length: int) -> int:
        """The CP rank that holds this position of a sequence padded to ``padded_length``."""
        if self.cp_size == 1:
            return 0
        if self.cp_order == "contiguous":
            return position // (padded_length // self.cp_size)
        chunk = position // (padded_length // (2 * self.cp_size))
        return min(chunk, 2 * self.cp_size - 1 - chunk)

    def slots(self, cp_rank: int | None = None) -> list[Slot]:
        """Slots of a CP rank (this one unless told) in the order in which the router sees them.

        thd: sequence after sequence. bshd: position after position, the trajectories inside it.
        """
        rank = self.cp_rank if cp_rank is None else cp_rank
        padded = self.padded()
        held = [
            (sequence, position)
            for sequence, padded_length in enumerate(padded)
            for position in range(padded_length)
            if self.owner(position, padded_length) == rank
        ]
        if self.format == "bshd":
            held.sort(key=lambda slot: (slot[1], slot[0]))
        return held

    def tp_slice(self, tokens: list) -> list:
        """This TP rank's share of what lies along a CP rank's slots.

        thd: an equal run of tokens. bshd: an equal run of positions, all trajectories of each.
        """
        share = len(tokens) // self.tp_size
        return tokens[self.tp_rank * share : (self.tp_rank + 1) * share]

    def position_ids(self) -> list[int]:
        return [position for _, position in self.slots()]

    # --- row ids ---------------------------------------------------------------------------------

    def row_ids(
        self,
        segment_lengths: Sequence[int],
        starts: int | Sequence[int] = 0,
        *,
        next_token: bool = False,
        slice: bool = False,
    ) -> list[int]:
        """Packed row of each slot, -1 where it has none.

        Trajectory i has ``segment_lengths[i]`` rows; they belong to the positions from
        ``starts[i]`` on and are packed back to back. With ``next_token`` a slot takes the row of
        the position after its own, inside its own sequence.
        """
        if isinstance(starts, int):
            starts = [starts] * len(self.lengths)
        row_of = {}
        for trajectory, (segment_length, start) in enumerate(
            zip(segment_lengths, starts, strict=True)
        ):
            for row in range(segment_length):
                row_of[trajectory, start + row] = len(row_of)
        ids = []
        for sequence, position in self.slots():
            wanted = position + 1 if next_token else position
            ids.append(row_of.get((sequence, wanted), -1))
        return self.tp_slice(ids) if slice else ids

    def token_row_ids(self, next_token: bool = False) -> list[int]:
        return self.row_ids(self.lengths, next_token=next_token)

    def route_row_ids(self, captured_lengths: Sequence[int]) -> list[int]:
        """The captured prefix starts at position 0. A sequence-parallel layout takes its slice."""
        return self.row_ids(captured_lengths, slice=self.sequence_parallel)

    def support_row_ids(self, response_lengths: Sequence[int]) -> list[int]:
        """A response token's row stands where its logit is made, one position before the token."""
        starts = [
            length - response - 1
            for length, response in zip(self.lengths, response_lengths, strict=True)
        ]
        return self.row_ids(response_lengths, starts)

    # --- padded batches --------------------------------------------------------------------------

    def width(self) -> int:
        """S of the padded batch [B, S]: room for every trajectory and no more, unless told."""
        if self.batch_width is not None:
            return self.batch_width
        if self.first_columns is None:
            return max(self.lengths, default=0)
        ends = [first + n for first, n in zip(self.first_columns, self.lengths, strict=True)]
        return max(ends, default=0)

    def first_column(self, trajectory: int) -> int:
        """Column of the trajectory's first token: left padding unless told."""
        if self.first_columns is None:
            return self.width() - self.lengths[trajectory]
        return self.first_columns[trajectory]

    def is_real(self, sequence: int, position: int) -> bool:
        return sequence < len(self.lengths) and position < self.lengths[sequence]

    def align(self, dense: np.ndarray, fill, *, next_token: bool = False) -> np.ndarray:
        """[B, S, ...] -> [tokens of this CP rank, ...]; ``fill`` where no real token is meant."""
        slots = self.slots()
        out = np.full((len(slots), *dense.shape[2:]), fill, dtype=dense.dtype)
        for token, (sequence, position) in enumerate(slots):
            wanted = position + 1 if next_token else position
            if self.is_real(sequence, wanted):
                out[token] = dense[sequence, self.first_column(sequence) + wanted]
        return out

    def restore(self, values_by_cp_rank: Sequence[np.ndarray], fill=0) -> np.ndarray:
        """[tokens of each CP rank, ...] -> [B, S-1, ...].

        A logit of position s predicts position s+1, so the last token of a trajectory has none.
        """
        first = values_by_cp_rank[0]
        shape = (len(self.lengths), max(self.width() - 1, 0), *first.shape[1:])
        out = np.full(shape, fill, dtype=first.dtype)
        for cp_rank, values in enumerate(values_by_cp_rank):
            for value, (sequence, position) in zip(values, self.slots(cp_rank), strict=True):
                if self.is_real(sequence, position + 1):
                    out[sequence, self.first_column(sequence) + position] = value
        return out

    # --- the model's batch -----------------------------------------------------------------------

    def to_model(self, values: np.ndarray) -> np.ndarray:
        """[tokens, ...] -> [1, tokens, ...] (thd) or [B, positions, ...] (bshd)."""
        if self.format == "thd":
            return values[None]
        slots = self.slots()
        columns = {
            position: column for column, position in enumerate(sorted({p for _, p in slots}))
        }
        out = np.empty((len(self.lengths), len(columns), *values.shape[1:]), dtype=values.dtype)
        for value, (sequence, position) in zip(values, slots, strict=True):
            out[sequence, columns[position]] = value
        return out
