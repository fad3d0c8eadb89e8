"""Sampling-support rows of different widths, of several trajectories, in one buffer (CSR).

    row r = values[row_offsets[r] : row_offsets[r + 1]]
    segment i = rows cu_seqlens[i] to cu_seqlens[i + 1]

Sizes: B segments (one a trajectory), N rows (one a response token), any number of ids: their
offsets are int64, since 14,000 rows of a vocabulary of 152,000 ids pass 2**31. An empty row belongs
to a token that was not sampled (an observation, an appended EOS). The lengths and the widths are
kept on the host as well, so no operation but ``equal`` reads the device: what a gather needs there
is built from them and copied without waiting. No segments, segments of no rows and rows of no ids
are legal everywhere.

Results share memory with their inputs wherever no id has to move, and memory that another process
shares may be read-only: nothing is ever written in place. ``clone`` gives a private copy.

``pack_ragged_support`` (packed/collate_ragged.py) makes one from what an engine returned.
"""

from collections.abc import Iterable, Iterator, Sequence
from pickle import PickleBuffer
from typing import Any, SupportsIndex, overload

import numpy as np
import torch
from torch import Tensor

from packhorse._env import CHECK_VALUES
from packhorse._nvtx import ranged_methods
from packhorse.kernels.support_rows import RaggedSupport, pad_ragged_support
from packhorse.packed.copies import clone_rows, join_rows, repeat_rows, run_rows, take_runs
from packhorse.packed.host import (
    Selector,
    accumulate,
    bounds_of,
    check_total,
    chunk_sizes,
    device_and_dtype,
    from_buffer,
    from_host,
    host_count,
    is_scalar,
    offsets_on,
    repeat_counts,
    without_waiting,
)
from packhorse.packed.ragged_rows import (
    check_ids,
    check_padded_width,
    check_tensor,
    checked_bounds,
    joined_segments,
    padded_cells,
    row_bounds_of,
    rows_of_padded,
    sums,
)
from packhorse.packed.segments import PackedSegments
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor


@ranged_methods("detach", "empty", "is_pinned", "segment")
class PackedRagged(PackedSegments):
    """B segments of rows of token ids, of any width each, one after another in ``values``.

    Args:
        values: [ids] int32, CPU or a device: the ids of all rows. Not copied, not read.
        row_offsets: [N + 1] int64 on the device of ``values``: first 0, last the number of ids,
            non-decreasing. Not copied, not to be changed afterwards.
        cu_seqlens: [B + 1] int32 on the device of ``values``, over rows: first 0, last N,
            non-decreasing. Not copied, not to be changed afterwards.
        lengths: B host integers, rows of each segment.
        widths: N host integers, ids of each row. Both are required when ``values`` is not on the
            CPU; the host side then believes them (``PACKHORSE_CHECK=1`` compares them with the
            offsets on the device). On the CPU they must agree.

    Raises:
        TypeError: a tensor is none, is not dense or has another dtype, or is on a device and
            ``lengths`` or ``widths`` is missing or not from the host.
        ValueError: a shape, a device, offsets, lengths or widths are wrong, or N is past int32.

    Source: vLLM's ``sampling_mask`` (ids and counts).

    Example:
        >>> ids, row_offsets = torch.tensor([7, 9, 4]).int(), torch.tensor([0, 2, 2, 3])
        >>> support = PackedRagged(ids, row_offsets, torch.tensor([0, 2, 3]).int())
        >>> support[1].token_ids, support[[1, 0]].widths
        (tensor([4], dtype=torch.int32), array([1, 2, 0]))
    """

    __slots__ = ("_max_width", "_row_bounds", "_row_offsets")

    _row_bounds: np.ndarray  # [N + 1] int64: row_offsets on the host, but for a common first id
    _row_offsets: Tensor | None  # on the CPU made on first use: a slice costs nothing a row
    _max_width: int | None

    def __init__(
        self,
        values: Tensor,
        row_offsets: Tensor,
        cu_seqlens: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        widths: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        bounds, row_bounds = checked_bounds(values, row_offsets, cu_seqlens, lengths, widths)
        if CHECK_VALUES and values.device.type == "cuda":
            same = (cu_seqlens == offsets_on(values.device, bounds)).all()
            same &= (row_offsets == from_host(row_bounds.copy(), values.device)).all()
            message = "PackedRagged: offsets on the device differ from lengths and widths"
            torch._assert_async(same, message)
        self._set(values, bounds, row_bounds, row_offsets.contiguous(), cu_seqlens.contiguous())

    # --- constructors -----------------------------------------------------------------------------

    @classmethod
    def from_lengths(
        cls, values: Tensor, widths: Sequence[int] | np.ndarray, lengths: Sequence[int]
    ) -> "PackedRagged":
        """Cut ``values`` [ids] int32 into N rows of ``widths`` ids, and these into B segments of
        ``lengths`` rows. Both are host integers; they sum to the number of ids and to N."""
        name = "PackedRagged.from_lengths"
        check_tensor(name, "values", values, torch.int32, "[ids]")
        bounds = bounds_of(name, lengths)
        return cls._make(values, bounds, row_bounds_of(name, widths, bounds, values.shape[0]))

    @classmethod
    def from_segments(cls, segments: Iterable[tuple[Tensor, Tensor]]) -> "PackedRagged":
        """Copy pairs of ids [ids_i] int32 and row offsets [rows_i + 1] int64, on the CPU, as
        ``segment`` gives them, into one buffer.

        Raises:
            TypeError: a segment is no such pair, has another dtype or is on a device (join packed
                batches with ``cat`` there: they know their widths).
            ValueError: offsets do not rise from 0 to the number of ids; rows past int32 together.
        """
        return cls._make(*joined_segments("PackedRagged.from_segments", segments))

    @classmethod
    def from_padded(
        cls, padded: PackedTensor, *, widths: Sequence[int] | np.ndarray | None = None
    ) -> "PackedRagged":
        """Drop the -1 (``NO_CANDIDATE``) of rows of one width; a row of nothing else becomes empty.

        Args:
            padded: rows [N, C] int32, as ``pack_support`` makes them. On the CPU a -1 may stand
                anywhere in a row; the ids keep their order.
            widths: N host integers, ids of each row, which are its first columns. Required when
                ``padded`` is on a device, which is not read; on the CPU they must agree.

        Raises:
            TypeError: ``padded`` is no ``PackedTensor`` of int32, or is on a device without
                ``widths``.
            ValueError: its rows are not 1-D; an id is below -1; ``widths`` are wrong.
        """
        ids, bounds, row_bounds = rows_of_padded("PackedRagged.from_padded", padded, widths)
        return cls._make(ids, bounds, row_bounds, cu_seqlens=padded.cu_seqlens)

    @classmethod
    def empty(
        cls, lengths: Sequence[int] = (), *, device: torch.device | str = "cpu"
    ) -> "PackedRagged":
        """Segments of ``lengths`` rows without an id: what padding trajectories hold."""
        bounds = bounds_of("PackedRagged.empty", lengths)
        values = torch.empty(0, dtype=torch.int32, device=device)
        return cls._make(values, bounds, np.zeros(int(bounds[-1]) + 1, dtype=np.int64))

    @classmethod
    def _make(
        cls,
        values: Tensor,
        bounds: np.ndarray,
        row_bounds: np.ndarray,
        row_offsets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> "PackedRagged":
        """From parts already checked; the arrays belong to the result."""
        packed = object.__new__(cls)
        packed._set(values, bounds, row_bounds, row_offsets, cu_seqlens)
        return packed

    def _set(
        self,
        values: Tensor,
        bounds: np.ndarray,
        row_bounds: np.ndarray,
        row_offsets: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        self._set_segments(values, bounds, cu_seqlens)
        if row_offsets is None and not values.is_cpu:
            row_offsets = from_host(row_bounds - row_bounds[0], values.device)
        self._row_bounds, self._row_offsets = row_bounds, row_offsets
        self._max_width = None

    # --- what it is -------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor:
        """[ids] int32: the ids of all rows. May be shared or read-only: never write it."""
        return self._values

    @property
    def row_offsets(self) -> Tensor:
        """[N + 1] int64 on ``device``: where each row starts in ``values``, then the number of ids.

        With ``values`` it is what ``gather_ragged_support`` and ``pad_ragged_support`` take.
        """
        if self._row_offsets is None:
            row_bounds = self._row_bounds
            if row_bounds[0]:
                self._row_bounds = row_bounds = row_bounds - row_bounds[0]
            self._row_offsets = torch.from_numpy(row_bounds)
        return self._row_offsets

    @property
    def widths(self) -> np.ndarray:
        """[N] int64 on the host, a new array: ids of each row."""
        return np.diff(self._row_bounds)

    @property
    def max_width(self) -> int:
        """Ids of the widest row, as ``pad_ragged_support`` asks for; 0 without rows."""
        if self._max_width is None:
            self._max_width = int(self.widths.max(initial=0))
        return self._max_width

    @property
    def num_rows(self) -> int:
        """N."""
        return self._row_bounds.size - 1

    @property
    def num_ids(self) -> int:
        return self._values.shape[0]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:8])) + (", ..." if len(self) > 8 else "")
        return (
            f"PackedRagged({len(self)} segments of [{shown}] rows, {self.num_ids} ids, "
            f"device='{self.device}')"
        )

    # --- segments ---------------------------------------------------------------------------------

    def segment(self, index: SupportsIndex) -> RaggedSupport:
        """Views of segment ``index``: its ids, and its row offsets from 0; -1 is the last one."""
        i = self._index(index)
        one = self._view(i, i + 1)
        return RaggedSupport(one.values, one.row_offsets)

    def __iter__(self) -> Iterator[RaggedSupport]:
        """The segments, in order."""
        return map(self.segment, range(len(self)))

    @overload
    def __getitem__(self, selector: int | np.integer) -> RaggedSupport: ...

    @overload
    def __getitem__(self, selector: Selector) -> "PackedRagged": ...

    def __getitem__(self, selector: Any) -> "RaggedSupport | PackedRagged":
        """One segment by an integer, several by anything else, as ``PackedTensor`` takes them.

        Raises:
            TypeError: an index on a device, a tuple, a uint8 tensor, booleans mixed with integers.
            ValueError: a mask whose length is not B, or rows past int32 in the result.
            IndexError: an integer out of range.
        """
        return self.segment(selector) if is_scalar(selector) else self._select(selector)

    def _view(self, start: int, stop: int) -> "PackedRagged":
        return self._view_rows(*self._cut(start, stop))

    def _view_rows(
        self, first_row: int, bounds: np.ndarray, cu_seqlens: Tensor | None = None
    ) -> "PackedRagged":
        """The rows from ``first_row`` on, cut by ``bounds``."""
        rows = slice(first_row, first_row + int(bounds[-1]) + 1)
        of_all = self._row_bounds  # read once: another thread may make ``row_offsets`` meanwhile
        row_bounds, zero = of_all[rows], int(of_all[0])
        first_id = int(row_bounds[0]) - zero
        values = self._values[first_id : int(row_bounds[-1]) - zero]
        row_offsets = None
        if self._row_offsets is not None and not self._values.is_cpu:
            row_offsets = self._row_offsets[rows]
            row_offsets = row_offsets - first_id if first_id else row_offsets
        return self._make(values, bounds, row_bounds, row_offsets, cu_seqlens)

    def _gather(self, ids: np.ndarray) -> "PackedRagged":
        bounds, starts, lengths = self._runs(ids)
        if starts.size <= 1:
            return self._view_rows(int(starts[0]) if starts.size else 0, bounds)
        row_bounds = self._row_bounds
        first_ids, num_ids = row_bounds[starts], row_bounds[starts + lengths] - row_bounds[starts]
        check_ids("PackedRagged", sum(num_ids.tolist()))
        rows, filled = run_rows(starts, lengths), num_ids > 0
        values = take_runs(self._values, first_ids[filled] - row_bounds[0], num_ids[filled])
        return self._make(values, bounds, sums(row_bounds[rows + 1] - row_bounds[rows]))

    # --- whole batches ----------------------------------------------------------------------------

    @staticmethod
    def cat(tensors: Iterable["PackedRagged"]) -> "PackedRagged":
        """Join batches, in order. One input is returned as it is.

        Raises:
            TypeError: an input is no ``PackedRagged``.
            ValueError: no inputs, devices differ, or the rows are past int32.
        """
        name = "PackedRagged.cat"
        tensors = list(tensors)
        if not tensors:
            raise ValueError(f"{name}: no inputs")
        for i, packed in enumerate(tensors):
            if not isinstance(packed, PackedRagged):
                raise TypeError(f"{name}: input {i} is a {type(packed).__name__}")
            if packed.device != tensors[0].device:
                raise ValueError(
                    f"{name}: input {i} is on {packed.device}, input 0 on {tensors[0].device}"
                )
        if len(tensors) == 1:
            return tensors[0]
        bounds = accumulate(name, np.concatenate([np.diff(packed._bounds) for packed in tensors]))
        check_ids(name, sum(packed.num_ids for packed in tensors))
        row_bounds = sums(np.concatenate([packed.widths for packed in tensors]))
        return PackedRagged._make(join_rows([p._values for p in tensors]), bounds, row_bounds)

    def repeat(self, times: int) -> "PackedRagged":
        """The whole batch ``times`` times over: segments 0 1 become 0 1 0 1. 1 returns it as is."""
        name = "PackedRagged.repeat"
        times = host_count(times, f"{name}: times")
        if times == 1 or len(self) == 0:
            return self
        check_total(name, len(self) * times, "segments")
        check_total(name, self.num_rows * times)
        check_ids(name, self.num_ids * times)
        bounds = accumulate(name, np.tile(np.diff(self._bounds), times))
        row_bounds = sums(np.tile(self.widths, times))
        return self._make(repeat_rows(self._values, times), bounds, row_bounds)

    def repeat_interleave(self, repeats: int | Sequence[int] | Tensor) -> "PackedRagged":
        """Each segment ``repeats`` times in place: 0 1 become 0 0 1 1.

        Args:
            repeats: one count, or B of them on the host; 0 leaves the segment out.
        """
        counts = repeat_counts("PackedRagged.repeat_interleave", repeats, np.diff(self._bounds))
        return self._gather(np.repeat(np.arange(len(self), dtype=np.int64), counts))

    def split(self, split_size: int | Sequence[int]) -> tuple["PackedRagged", ...]:
        """Views of consecutive segments, as ``torch.split`` cuts dimension 0 of a dense batch.

        Args:
            split_size: segments a part, fewer in the last; or one size for each part, B in sum.
        """
        return self._parts("PackedRagged.split", split_size)

    def chunk(self, chunks: int) -> tuple["PackedRagged", ...]:
        """``split`` into parts of ceil(B / chunks) segments: the same cut as ``torch.chunk``."""
        return self.split(chunk_sizes("PackedRagged.chunk", chunks, len(self)))

    # --- placement --------------------------------------------------------------------------------

    def to(
        self,
        target: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> "PackedRagged":
        """Move: ``to(device)``. A floating dtype given to a whole batch leaves ids as they are.

        Returns ``self`` when nothing changes.

        Raises:
            TypeError: ``dtype`` is neither floating nor int32; a target given twice.
        """
        name = "PackedRagged.to"
        place, dtype = device_and_dtype(name, target, dtype, device)
        if dtype is not None and dtype != torch.int32 and not dtype.is_floating_point:
            raise TypeError(f"{name}: {dtype} is not floating; support ids are int32")
        values = self._values.to(
            self.device if place is None else place, non_blocking=non_blocking, copy=copy
        )
        if values is self._values:
            return self
        row_offsets = None
        if self.device.type == "cpu" and values.device.type != "cpu":  # it may be pinned already
            row_offsets = without_waiting(self.row_offsets, values.device)
        return self._make(values, self._bounds, self._own_row_bounds(), row_offsets)

    def _own_row_bounds(self) -> np.ndarray:
        """A copy, from 0: an offset tensor made of it shares memory with no other one."""
        row_bounds = self._row_bounds
        return row_bounds - row_bounds[0]

    def pin_memory(self) -> "PackedRagged":
        """Copy to page-locked memory, from where ``to(device, non_blocking=True)`` does not wait.

        Returns ``self`` when it is pinned already, and on a machine without an accelerator.
        """
        if self.device.type != "cpu":
            raise ValueError(f"PackedRagged.pin_memory: values are on {self.device}")
        if not torch.accelerator.is_available() or self.is_pinned():
            return self
        row_offsets = self.row_offsets.pin_memory()
        return self._make(
            self._values.pin_memory(), self._bounds, row_offsets.numpy(), row_offsets,
            self.cu_seqlens.pin_memory(),
        )  # fmt: skip

    def is_pinned(self) -> bool:
        return self._values.is_pinned()

    def contiguous(self) -> "PackedRagged":
        """``self``, or a copy whose ids lie one after another in memory, as the kernels ask."""
        if self._values.is_contiguous():
            return self
        return self._make(
            self._values.contiguous(), self._bounds, self._row_bounds, self._row_offsets,
            self._cu_seqlens,
        )  # fmt: skip

    def clone(self) -> "PackedRagged":
        """A private, writable, contiguous copy."""
        values, row_bounds = clone_rows(self._values), self._own_row_bounds()
        if values.is_cpu:
            return self._make(values, self._bounds, row_bounds)
        offsets = (self.row_offsets.clone(), self.cu_seqlens.clone())
        return self._make(values, self._bounds, row_bounds, *offsets)

    def detach(self) -> "PackedRagged":
        """``self``: ids have no gradient."""
        return self

    # --- other forms ------------------------------------------------------------------------------

    def to_padded(self, width: int | None = None, *, max_bytes: int = 4 * 2**30) -> PackedTensor:
        """Rows of one width, as ``pack_support`` makes and ``gather_support`` takes.

        Args:
            width: C, at least the widest row; by default as wide as that, and at least 1.
            max_bytes: what the result may take, 4 N C bytes: one row of the whole vocabulary makes
                every row as wide.

        Returns:
            [N, C] int32 in segments of the same lengths: the ids of a row from column 0, then -1.

        Raises:
            ValueError: a row does not fit ``width``, or makes the result larger than ``max_bytes``.
        """
        name = "PackedRagged.to_padded"
        widest = max(self.max_width, 1)
        width = widest if width is None else host_count(width, f"{name}: width")
        check_padded_width(name, self.widths, self._bounds, width, max_bytes)
        if self.device.type == "cuda":
            rows = torch.arange(self.num_rows, device=self.device)
            ids = self._values.contiguous()
            padded = pad_ragged_support(ids, self.row_offsets, rows, width=width)
        else:
            padded = self._values.new_full((self.num_rows * width,), NO_CANDIDATE)
            cells = from_host(padded_cells(self._own_row_bounds(), width), self.device)
            padded.index_put_((cells,), self._values)
            padded = padded.view(self.num_rows, width)
        return PackedTensor(padded, self.cu_seqlens, lengths=self.lengths)

    # --- equality, pickling -----------------------------------------------------------------------

    def equal(self, other: "PackedRagged") -> bool:
        """Same device, lengths, widths and ids; ``==`` is the same.

        On a device this reads the answer back, and only when all else is equal: the one operation
        that waits for it.
        """
        if not isinstance(other, PackedRagged):
            raise TypeError(f"PackedRagged.equal: other is a {type(other).__name__}")
        if self.device != other.device or not np.array_equal(self._bounds, other._bounds):
            return False
        return np.array_equal(self.widths, other.widths) and torch.equal(
            self._values, other._values
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Only its own rows travel; by protocol 5 CPU ids and row offsets are a buffer each."""
        values = self._values.contiguous()
        if values.device.type == "cpu" and int(protocol) >= 5:
            buffers = [PickleBuffer(part.numpy()) for part in (values, self.row_offsets)]  # type: ignore[arg-type]
            return _from_buffers, (*buffers, self.lengths)
        if values.untyped_storage().nbytes() > values.nbytes:
            values = values.clone()
        return PackedRagged.from_lengths, (values, self.widths, self.lengths)


def _from_buffers(values: Any, row_offsets: Any, lengths: tuple[int, ...]) -> PackedRagged:
    ids, offsets = (
        from_buffer(buffer, dtype, (memoryview(buffer).nbytes // dtype.itemsize,))
        for buffer, dtype in ((values, torch.int32), (row_offsets, torch.int64))
    )
    cu_seqlens = offsets_on(ids.device, bounds_of("PackedRagged", lengths))
    return PackedRagged(ids, offsets, cu_seqlens)
