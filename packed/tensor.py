"""Rows of several trajectories in one buffer, without padding.

    segment(i) = values[cu_seqlens[i] : cu_seqlens[i + 1]]

Sizes: N rows, B segments (one a trajectory), ``row_shape`` the shape of one row. The lengths are
kept on the host as well, so no operation but ``equal`` reads the device: what a gather needs there
is built from them and copied without waiting. No segments and empty segments are legal everywhere.

Results share memory with their inputs wherever no row has to move, and memory that another process
shares may be read-only: nothing is ever written in place. ``clone`` gives a private copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from pickle import PickleBuffer
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
import torch
from torch import Tensor

from packhorse._env import CHECK_VALUES
from packhorse._nvtx import ranged_methods
from packhorse.packed.checks import (
    check_alike,
    check_bounds,
    check_fill,
    check_offsets,
    check_padded_size,
    check_values,
)
from packhorse.packed.copies import cast_rows, clone_rows, join_rows, repeat_rows, take_runs
from packhorse.packed.host import (
    Selector,
    accumulate,
    bounds_of,
    check_total,
    chunk_sizes,
    device_and_dtype,
    equal_values,
    from_buffer,
    from_host,
    host_count,
    is_scalar,
    offsets_on,
    repeat_counts,
    same_bits,
)
from packhorse.packed.segments import PackedSegments


@ranged_methods("detach", "empty", "is_pinned", "segment")
class PackedTensor(PackedSegments):
    """B segments of rows, one after another in ``values``.

    Args:
        values: [N, *row_shape], any dtype, any device. Not copied.
        cu_seqlens: [B + 1] int32 on the device of ``values``: first 0, last N, non-decreasing. Not
            copied, not to be changed afterwards.
        lengths: B host integers, rows of each segment. Required when ``cu_seqlens`` is not on the
            CPU; the host side then believes it (``PACKHORSE_CHECK=1`` compares the two on the
            device). On the CPU it must agree.

    Raises:
        TypeError: ``values`` or ``cu_seqlens`` is no dense tensor, ``cu_seqlens`` is not int32, or
            is on a device and ``lengths`` is missing or not from the host.
        ValueError: a shape, a device, the offsets or the lengths are wrong, or N is past int32.

    Example:
        >>> routes = PackedTensor(torch.tensor([10, 11, 20]), torch.tensor([0, 2, 3]).int())
        >>> routes[0], routes[[1, 0]].values
        (tensor([10, 11]), tensor([20, 10, 11]))
    """

    __slots__ = ()

    def __init__(
        self, values: Tensor, cu_seqlens: Tensor, *, lengths: Sequence[int] | None = None
    ) -> None:
        check_values("PackedTensor", values)
        check_offsets(values, cu_seqlens)
        on_host = cu_seqlens.device.type == "cpu"
        if lengths is None and not on_host:
            raise TypeError(
                f"PackedTensor: cu_seqlens on {cu_seqlens.device} needs lengths= from the host; "
                "reading them back would stall the device"
            )
        bounds = None
        if lengths is not None:
            bounds = bounds_of("PackedTensor", lengths, num_rows=values.shape[0])
            if bounds.size != cu_seqlens.shape[0]:
                raise ValueError(
                    f"PackedTensor: {bounds.size - 1} lengths for cu_seqlens of "
                    f"{cu_seqlens.shape[0]} entries"
                )
        if on_host:
            given = cu_seqlens.numpy().astype(np.int64)
            check_bounds(given, values.shape[0])
            if bounds is not None and not np.array_equal(bounds, given):
                segment = int(np.flatnonzero(np.diff(bounds) != np.diff(given))[0])
                raise ValueError(
                    f"PackedTensor: lengths and cu_seqlens differ at segment {segment}"
                )
            bounds = given
        assert bounds is not None
        if CHECK_VALUES and cu_seqlens.device.type == "cuda":
            same = (cu_seqlens == offsets_on(cu_seqlens.device, bounds)).all()
            torch._assert_async(same, "PackedTensor: cu_seqlens on the device differs from lengths")
        self._set_segments(values, bounds, cu_seqlens.contiguous())

    # --- constructors -----------------------------------------------------------------------------

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Sequence[int]) -> "PackedTensor":
        """Cut ``values`` [N, *row_shape] into segments of ``lengths`` rows; N is their sum."""
        check_values("PackedTensor.from_lengths", values)
        return cls._make(
            values, bounds_of("PackedTensor.from_lengths", lengths, num_rows=values.shape[0])
        )

    @classmethod
    def from_segments(cls, segments: Iterable[Tensor]) -> "PackedTensor":
        """Copy tensors [length_i, *row_shape] of one dtype, row shape and device into one buffer.

        Raises:
            TypeError: a segment is no tensor, or its dtype is not that of segment 0.
            ValueError: no segments (``PackedTensor.empty`` makes that), or a row shape or device is
                not that of segment 0, or the rows are past int32 together.
        """
        name = "PackedTensor.from_segments"
        segments = list(segments)
        if not segments:
            raise ValueError(f"{name}: no segments to take a dtype from; use PackedTensor.empty")
        for i, segment in enumerate(segments):
            check_values(name, segment, f"segment {i}")
            check_alike(name, f"segment {i}", segment, "segment 0", segments[0])
        bounds = bounds_of(name, [segment.shape[0] for segment in segments])
        return cls._make(join_rows(segments), bounds)

    @classmethod
    def empty(
        cls,
        row_shape: Sequence[int],
        *,
        dtype: torch.dtype,
        num_segments: int = 0,
        device: torch.device | str = "cpu",
    ) -> "PackedTensor":
        """``num_segments`` segments of no rows."""
        num_segments = host_count(num_segments, "PackedTensor.empty: num_segments")
        check_total("PackedTensor.empty", num_segments, "segments")
        values = torch.empty((0, *row_shape), dtype=dtype, device=device)
        return cls._make(values, np.zeros(num_segments + 1, dtype=np.int64))

    @classmethod
    def from_nested(cls, nested: Tensor, *, lengths: Sequence[int] | None = None) -> "PackedTensor":
        """Wrap the buffer of a jagged ``torch.nested`` tensor [B, j, *row_shape].

        Args:
            nested: of layout ``torch.jagged``, without holes, ragged in dimension 1. Not copied.
            lengths: as in the constructor: required when ``nested`` is not on the CPU.

        Raises:
            TypeError: ``nested`` is not jagged, or is on a device and ``lengths`` is missing.
            ValueError: it has holes, or another dimension is ragged.
        """
        name = "PackedTensor.from_nested"
        if not (isinstance(nested, Tensor) and nested.is_nested and nested.layout == torch.jagged):
            raise TypeError(f"{name}: nested must be a nested tensor of layout torch.jagged")
        if nested.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(f"{name}: nested has holes; call its contiguous() first")
        if getattr(nested, "_ragged_idx", 1) != 1:
            raise ValueError(f"{name}: nested must be ragged in dimension 1")
        offsets = nested.offsets().to(torch.int32)  # type: ignore[attr-defined]
        return cls(nested.values(), offsets, lengths=lengths)

    @classmethod
    def _make(
        cls, values: Tensor, bounds: np.ndarray, cu_seqlens: Tensor | None = None
    ) -> "PackedTensor":
        """From parts already checked; ``bounds`` belongs to the result."""
        packed = object.__new__(cls)
        packed._set_segments(values, bounds, cu_seqlens)
        return packed

    # --- what it is -------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor:
        """[N, *row_shape]: the rows of all segments. May be shared or read-only: never write it."""
        return self._values

    @property
    def row_shape(self) -> torch.Size:
        return self._values.shape[1:]

    @property
    def num_rows(self) -> int:
        return self._values.shape[0]

    @property
    def requires_grad(self) -> bool:
        return self._values.requires_grad

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:8])) + (", ..." if len(self) > 8 else "")
        return (
            f"PackedTensor({len(self)} segments of [{shown}] rows, row_shape="
            f"{tuple(self.row_shape)}, dtype={self.dtype}, device='{self.device}')"
        )

    # --- segments ---------------------------------------------------------------------------------

    def segment(self, index: SupportsIndex) -> Tensor:
        """[length, *row_shape]: a view of segment ``index``; -1 is the last one."""
        i = self._index(index)
        start = int(self._bounds[i])
        return self._values.narrow(0, start, int(self._bounds[i + 1]) - start)

    def __iter__(self) -> Iterator[Tensor]:
        """Views of the segments, in order."""
        return iter(self._values.split(list(self.lengths)))

    @overload
    def __getitem__(self, selector: int | np.integer) -> Tensor: ...

    @overload
    def __getitem__(self, selector: Selector) -> "PackedTensor": ...

    def __getitem__(self, selector: Any) -> "Tensor | PackedTensor":
        """One segment by an integer, several by anything else.

        An integer gives ``segment(i)``. A slice without a step gives a view, rebased to offset 0.
        A list, a range, a slice with a step, or an array or CPU tensor of integers gathers in its
        order, repeats allowed; rows that turn out to lie side by side are a view. A list, array or
        CPU tensor of B booleans is a mask.

        Raises:
            TypeError: an index on a device, a tuple, a uint8 tensor, booleans mixed with integers.
            ValueError: a mask whose length is not B, or rows past int32 in the result.
            IndexError: an integer out of range.
        """
        return self.segment(selector) if is_scalar(selector) else self._select(selector)

    def _view(self, start: int, stop: int) -> "PackedTensor":
        first, bounds, cu_seqlens = self._cut(start, stop)
        return self._make(self._values[first : first + int(bounds[-1])], bounds, cu_seqlens)

    def _gather(self, ids: np.ndarray) -> "PackedTensor":
        bounds, starts, lengths = self._runs(ids)
        return self._make(take_runs(self._values, starts, lengths), bounds)

    # --- whole batches ----------------------------------------------------------------------------

    @staticmethod
    def cat(tensors: Iterable["PackedTensor"]) -> "PackedTensor":
        """Join batches, in order. One input is returned as it is.

        Raises:
            TypeError: an input is no ``PackedTensor``, or dtypes differ: nothing is promoted, call
                ``widen`` on the narrow ones.
            ValueError: no inputs, row shapes or devices differ, or the rows are past int32.
        """
        tensors = list(tensors)
        if not tensors:
            raise ValueError("PackedTensor.cat: no inputs")
        for i, packed in enumerate(tensors):
            if not isinstance(packed, PackedTensor):
                raise TypeError(f"PackedTensor.cat: input {i} is a {type(packed).__name__}")
            check_alike(
                "PackedTensor.cat", f"input {i}", packed._values, "input 0", tensors[0]._values
            )
        if len(tensors) == 1:
            return tensors[0]
        lengths = np.concatenate([np.diff(packed._bounds) for packed in tensors])
        bounds = accumulate("PackedTensor.cat", lengths)
        return PackedTensor._make(join_rows([packed._values for packed in tensors]), bounds)

    def repeat(self, times: int) -> "PackedTensor":
        """The whole batch ``times`` times over: segments 0 1 become 0 1 0 1. 1 returns it as is."""
        times = host_count(times, "PackedTensor.repeat: times")
        if times == 1 or len(self) == 0:
            return self
        check_total("PackedTensor.repeat", len(self) * times, "segments")
        check_total("PackedTensor.repeat", self.num_rows * times)
        bounds = accumulate("PackedTensor.repeat", np.tile(np.diff(self._bounds), times))
        return self._make(repeat_rows(self._values, times), bounds)

    def repeat_interleave(self, repeats: int | Sequence[int] | Tensor) -> "PackedTensor":
        """Each segment ``repeats`` times in place: 0 1 become 0 0 1 1.

        Args:
            repeats: one count, or B of them on the host; 0 leaves the segment out.
        """
        counts = repeat_counts("PackedTensor.repeat_interleave", repeats, np.diff(self._bounds))
        return self._gather(np.repeat(np.arange(len(self), dtype=np.int64), counts))

    def split(self, split_size: int | Sequence[int]) -> tuple["PackedTensor", ...]:
        """Views of consecutive segments, as ``torch.split`` cuts dimension 0 of a dense batch.

        Args:
            split_size: segments a part, fewer in the last; or one size for each part, B in sum.
        """
        return self._parts("PackedTensor.split", split_size)

    def chunk(self, chunks: int) -> tuple["PackedTensor", ...]:
        """``split`` into parts of ceil(B / chunks) segments: the same cut as ``torch.chunk``, so it
        stays in step with dense tensors, fewer parts than asked where theirs are fewer."""
        return self.split(chunk_sizes("PackedTensor.chunk", chunks, len(self)))

    # --- placement and dtype ----------------------------------------------------------------------

    def to(
        self,
        target: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> "PackedTensor":
        """Move, or cast floating values: ``to(device)``, ``to(dtype)``, ``to(device, dtype)``.

        ``dtype`` works as in ``torch.nn.Module.to``: it must be floating and casts floating values;
        integers (routes, support ids) pass unchanged, so one call serves all fields of a batch.
        ``widen`` changes an integer dtype. Returns ``self`` when nothing changes.

        Raises:
            TypeError: ``dtype`` is not floating and not that of the values; a target given twice.
        """
        name = "PackedTensor.to"
        place, dtype = device_and_dtype(name, target, dtype, device)
        if dtype is not None and dtype != self.dtype and not dtype.is_floating_point:
            raise TypeError(f"{name}: {dtype} is not floating; widen() changes an integer dtype")
        if dtype is None or not self.dtype.is_floating_point:
            dtype = self.dtype
        values = self._values.to(
            self.device if place is None else place, dtype, non_blocking=non_blocking, copy=copy
        )
        if values is self._values:
            return self
        same_place = values.device == self.device and not copy
        return self._make(values, self._bounds, self._cu_seqlens if same_place else None)

    def widen(self, dtype: torch.dtype) -> "PackedTensor":
        """Cast integer values to an integer ``dtype`` that holds every value of theirs.

        Raises:
            TypeError: a dtype is not an integer one, or ``dtype`` is narrower.
        """
        if dtype == self.dtype:
            return self
        for given in (self.dtype, dtype):
            if given.is_floating_point or given.is_complex or given == torch.bool:
                raise TypeError(f"PackedTensor.widen: {given} is not an integer dtype")
        source, result = torch.iinfo(self.dtype), torch.iinfo(dtype)
        if not (result.min <= source.min and source.max <= result.max):
            raise TypeError(f"PackedTensor.widen: {dtype} does not hold all of {self.dtype}")
        return self._make(cast_rows(self._values, dtype), self._bounds, self._cu_seqlens)

    def pin_memory(self) -> "PackedTensor":
        """Copy to page-locked memory, from where ``to(device, non_blocking=True)`` does not wait.

        Returns ``self`` when it is pinned already, and on a machine without an accelerator.
        """
        if self.device.type != "cpu":
            raise ValueError(f"PackedTensor.pin_memory: values are on {self.device}")
        if not torch.accelerator.is_available() or self.is_pinned():
            return self
        return self._make(self._values.pin_memory(), self._bounds, self.cu_seqlens.pin_memory())

    def is_pinned(self) -> bool:
        return self._values.is_pinned()

    def contiguous(self) -> "PackedTensor":
        """``self``, or a copy whose rows lie one after another in memory."""
        if self._values.is_contiguous():
            return self
        return self._make(self._values.contiguous(), self._bounds, self._cu_seqlens)

    def clone(self) -> "PackedTensor":
        """A private, writable, contiguous copy."""
        cu_seqlens = None if self._values.is_cpu else self.cu_seqlens.clone()
        return self._make(clone_rows(self._values), self._bounds, cu_seqlens)

    def detach(self) -> "PackedTensor":
        """The same rows outside the autograd graph."""
        return self._make(self._values.detach(), self._bounds, self._cu_seqlens)

    # --- other forms ------------------------------------------------------------------------------

    def to_padded(
        self, fill: float, width: int | None = None, side: Literal["left", "right"] = "right"
    ) -> Tensor:
        """A dense copy [B, width, *row_shape], ``fill`` where a segment has no row.

        Args:
            fill: must fit the dtype.
            width: at least the longest segment, which is the default.
            side: where the fill goes: "right" after the rows, "left" before them.

        Raises:
            TypeError: ``fill`` is no number of the values' dtype.
            ValueError: ``fill`` does not fit, ``width`` is too small or past what int64 counts in
                bytes, or ``side`` is another word.
        """
        name = "PackedTensor.to_padded"
        width = self.max_seqlen if width is None else host_count(width, f"{name}: width")
        if side not in ("left", "right"):
            raise ValueError(f"{name}: side must be 'left' or 'right', got {side!r}")
        lengths = np.diff(self._bounds)
        if (lengths > width).any():
            segment = int(np.argmax(lengths > width))
            raise ValueError(
                f"{name}: segment {segment} has {lengths[segment]} rows, width is {width}"
            )
        check_fill(name, fill, self.dtype)
        check_padded_size(name, len(self), width, self._values)
        out = self._values.new_full((len(self) * width, *self.row_shape), fill)
        if self.num_rows:
            first_cells = np.arange(len(self), dtype=np.int64) * width
            if side == "left":
                first_cells += width - lengths
            cells = np.repeat(first_cells - self._bounds[:-1], lengths)
            cells += np.arange(self.num_rows, dtype=np.int64)
            rows = same_bits(self._values)  # torch puts no uint16 and not every float8
            same_bits(out).index_put_((from_host(cells, self.device),), rows)
        return out.view(len(self), width, *self.row_shape)

    def to_nested(self) -> Tensor:
        """A jagged ``torch.nested`` tensor [B, j, *row_shape] over the same rows.

        Its offsets are int64, like those torch makes, and it knows its shortest and longest
        segment, so that torch does not read them back.
        """
        return torch.nested.nested_tensor_from_jagged(
            self._values,
            self.cu_seqlens.to(torch.int64),
            min_seqlen=min(self.lengths, default=0),
            max_seqlen=self.max_seqlen,
        )

    # --- equality, pickling -----------------------------------------------------------------------

    def equal(self, other: "PackedTensor") -> bool:
        """Same dtype, device, lengths, row shape and values (a NaN equals nothing).

        On a device this reads the answer back, and only when all else is equal: the one operation
        that waits for it. ``==`` is the same, so a ``PackedTensor`` is no key of a dict.
        """
        if not isinstance(other, PackedTensor):
            raise TypeError(f"PackedTensor.equal: other is a {type(other).__name__}")
        if self.dtype != other.dtype or self.device != other.device:
            return False
        if self.row_shape != other.row_shape or not np.array_equal(self._bounds, other._bounds):
            return False
        return equal_values(self._values, other._values)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Only its own rows travel; by protocol 5 CPU rows are one buffer, out of band if asked."""
        values = self._values.contiguous()
        if values.device.type == "cpu" and not values.requires_grad and int(protocol) >= 5:
            if values.numel():
                data = values.view(-1).view(torch.uint8).numpy()
            else:
                data = np.empty(0, dtype=np.uint8)
            shape = tuple(values.shape)
            buffer = PickleBuffer(data)  # type: ignore[arg-type]  # arrays are buffers
            return _from_buffer, (buffer, values.dtype, shape, self.lengths)
        if values.untyped_storage().nbytes() > values.nbytes:
            values = values.clone()
        if (bits := same_bits(values)).dtype != values.dtype:  # torch pickles no float8, no uint16
            return _from_bits, (bits.detach(), values.dtype, values.requires_grad, self.lengths)
        return PackedTensor.from_lengths, (values, self.lengths)


def _from_bits(
    bits: Tensor, dtype: torch.dtype, requires_grad: bool, lengths: tuple[int, ...]
) -> PackedTensor:
    return PackedTensor.from_lengths(bits.view(dtype).requires_grad_(requires_grad), lengths)


def _from_buffer(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], lengths: tuple[int, ...]
) -> PackedTensor:
    return PackedTensor.from_lengths(from_buffer(buffer, dtype, shape), lengths)
