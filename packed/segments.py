"""What the packed forms share: segments of rows, cut by offsets that the host knows.

    segment i = rows bounds[i] to bounds[i + 1]

A form adds what a row is, and its public operations, which take their arguments and errors from
here or from ``host``.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.host import (
    accumulate,
    host_int,
    offsets_on,
    segment_ids,
    slice_bounds,
    split_stops,
)

S = TypeVar("S", bound="PackedSegments")


class PackedSegments:
    """B segments of rows, one after another: a ``PackedTensor`` or a ``PackedRagged``."""

    __slots__ = ("__weakref__", "_bounds", "_cu_seqlens", "_lengths", "_values")

    _values: Tensor
    _bounds: np.ndarray  # [B + 1] int64, the offsets on the host
    _cu_seqlens: Tensor | None  # on the CPU made on first use: a slice makes none
    _lengths: tuple[int, ...] | None  # made on first use

    def _set_segments(
        self, values: Tensor, bounds: np.ndarray, cu_seqlens: Tensor | None = None
    ) -> None:
        """From parts already checked; ``bounds`` belongs to the result."""
        if cu_seqlens is None and not values.is_cpu:
            cu_seqlens = offsets_on(values.device, bounds)
        self._values, self._bounds, self._cu_seqlens = values, bounds, cu_seqlens
        self._lengths = None

    # --- what it is -------------------------------------------------------------------------------

    @property
    def cu_seqlens(self) -> Tensor:
        """[B + 1] int32 on ``device``: the first row of each segment, then the number of rows."""
        if self._cu_seqlens is None:
            self._cu_seqlens = offsets_on(self._values.device, self._bounds)
        return self._cu_seqlens

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment, on the host."""
        if self._lengths is None:
            self._lengths = tuple(np.diff(self._bounds).tolist())
        return self._lengths

    @property
    def bounds(self) -> np.ndarray:
        """``offsets`` as an int64 array [B + 1], read-only."""
        self._bounds.flags.writeable = False
        return self._bounds

    @property
    def offsets(self) -> tuple[int, ...]:
        """``cu_seqlens`` on the host: B + 1 integers."""
        return tuple(self._bounds.tolist())

    @property
    def max_seqlen(self) -> int:
        """Rows of the longest segment; 0 without segments."""
        return max(self.lengths, default=0)

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        return self._values.device

    def __len__(self) -> int:
        """B."""
        return self._bounds.size - 1

    def __eq__(self, other: object) -> bool:
        return self.equal(other) if isinstance(other, type(self)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def equal(self, other: Any) -> bool:
        raise NotImplementedError

    # --- which rows -------------------------------------------------------------------------------

    def _index(self, index: Any) -> int:
        """``index`` in [0, B)."""
        name = type(self).__name__
        i = host_int(index, f"{name}: the index")
        if not -len(self) <= i < len(self):
            raise IndexError(f"{name}: index {i} is out of range for {len(self)} segments")
        return i % len(self)

    def _select(self: S, selector: Any) -> S:
        """Several segments; of a slice of step 1 a view."""
        name = type(self).__name__
        if isinstance(selector, slice):
            start, stop, step = slice_bounds(selector, len(self), name)
            if step == 1:
                return self._view(start, max(start, stop))
        return self._gather(segment_ids(selector, len(self), name))

    def _view(self: S, start: int, stop: int) -> S:
        """Segments [start, stop), which are there, over the same memory."""
        raise NotImplementedError

    def _gather(self: S, ids: np.ndarray) -> S:
        """Segments ``ids``, which are there; a view where their rows lie side by side."""
        raise NotImplementedError

    def _parts(self: S, name: str, split_size: Any) -> tuple[S, ...]:
        stops = split_stops(name, split_size, len(self), "segments")
        return tuple(self._view(a, b) for a, b in zip([0, *stops], stops, strict=False))

    def _cut(self, start: int, stop: int) -> tuple[int, np.ndarray, Tensor | None]:
        """The first row of segments [start, stop), and their bounds and offsets from 0."""
        bounds = self._bounds[start : stop + 1]
        first = int(bounds[0])
        if self._values.is_cpu:
            return first, bounds - first, None
        # the host's offset, so that this is one launch and no read
        cu_seqlens = self.cu_seqlens[start : stop + 1]
        return first, bounds - first, cu_seqlens - first if first else cu_seqlens

    def _runs(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bounds of segments ``ids`` one after another; first row and length of each run of rows
        that lie side by side, none of length 0."""
        starts, lengths = self._bounds[ids], self._bounds[ids + 1] - self._bounds[ids]
        bounds = accumulate(type(self).__name__, lengths)
        filled = lengths > 0
        starts, lengths = starts[filled], lengths[filled]
        if starts.size == 0:
            return bounds, starts, lengths
        first_of_run = np.append(0, 1 + np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]))
        return bounds, starts[first_of_run], np.add.reduceat(lengths, first_of_run)
