"""Lengths, offsets, counts and indices as host integers, and their way to a device.

Nothing here reads a device: a tensor that is not on the CPU is refused, since reading it would
stall the device that holds it.
"""

import ctypes
import operator
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

INT32_MAX: Final = 2**31 - 1
_INT64: Final = np.iinfo(np.int64)
_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

#: What selects several segments: a list, tensor or array of ints or bools, a range, a slice.
Selector: TypeAlias = "list[int] | list[bool] | range | slice | np.ndarray | Tensor"


def is_scalar(value: Any) -> bool:
    """Whether ``value`` is one integer (or bool), not several: an array or tensor of no dim too."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 0
    return isinstance(value, np.generic) or hasattr(value, "__index__")


def host_int(value: Any, where: str) -> int:
    """``value`` as an int. Booleans, floats and tensors of a device are a ``TypeError``."""
    if isinstance(value, Tensor) and value.ndim == 0:
        value = tensor_array(value, where)[()]
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{where} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must be an integer, got {type(value).__name__}") from None


def host_count(value: Any, where: str) -> int:
    """``host_int`` that must not be negative."""
    count = host_int(value, where)
    if count < 0:
        raise ValueError(f"{where} must not be negative, got {count}")
    return count


def host_ints(values: Any, where: str) -> np.ndarray:
    """[n] int64 from a list, tuple, range, 1-D integer array or 1-D integer CPU tensor.

    Raises:
        TypeError: another type, an element that is no integer, or a tensor of a device.
        ValueError: not 1-D, or an integer past int64.
    """
    if isinstance(values, Tensor):
        values = tensor_array(values, where)
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise TypeError(f"{where} must hold integers, got {values.dtype}")
        if values.ndim != 1:
            raise ValueError(f"{where} must be 1-D, got shape {values.shape}")
        return as_int64(values, where)
    if isinstance(values, range):
        ends = (values[0], values[-1]) if values else (0, 0)
        if not all(_INT64.min <= end <= _INT64.max for end in ends):
            raise ValueError(f"{where} holds an integer past int64")
        if abs(ends[1] - ends[0]) // abs(values.step) > INT32_MAX:
            raise ValueError(f"{where} is a range of more than {INT32_MAX} integers")
        return ends[0] + values.step * np.arange(len(values), dtype=np.int64)
    if not isinstance(values, list | tuple):
        raise TypeError(f"{where} must be a list of integers, got {type(values).__name__}")
    if not all(type(value) is int for value in values):
        values = [host_int(value, f"{where}[{i}]") for i, value in enumerate(values)]
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{where} holds an integer past int64") from None


def as_int64(values: np.ndarray, where: str) -> np.ndarray:
    """A copy of integers as int64; one of uint64 that it does not hold is a ``ValueError``."""
    if values.dtype.kind == "u" and values.size and values.max() > _INT64.max:
        place = np.unravel_index(int(np.argmax(values)), values.shape)
        raise ValueError(
            f"{where} holds an integer past int64, {values[place]} at {[int(i) for i in place]}"
        )
    return values.astype(np.int64)


def tensor_array(tensor: Tensor, where: str) -> np.ndarray:
    """The host array over an integer or boolean tensor's memory.

    Raises:
        TypeError: the tensor is on a device, is not dense, or holds neither.
    """
    _refuse_device(tensor, where)
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{where} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise TypeError(f"{where} must hold integers, got {tensor.dtype}")
    return tensor.detach().numpy()


def slice_bounds(selector: slice, num_segments: int, where: str) -> tuple[int, int, int]:
    """(start, stop, step) of a slice over ``num_segments``, as Python's own sequences take it."""
    start, stop, step = (
        None if bound is None else host_int(bound, f"{where}: a slice bound")
        for bound in (selector.start, selector.stop, selector.step)
    )
    if step == 0:
        raise ValueError(f"{where}: a slice step must not be 0")
    return slice(start, stop, step).indices(num_segments)


def segment_ids(selector: Any, num_segments: int, where: str) -> np.ndarray:
    """[n] int64 in [0, num_segments): the segments that ``selector`` names, in its order.

    A boolean list, array or tensor is a mask over all segments. Negative ids count from the end.

    Raises:
        TypeError: a tuple (it would read as several dimensions), a uint8 tensor (torch once took it
            for a mask), a tensor of a device, booleans mixed with integers, any other type.
        ValueError: a mask of another length, or a selector that is not 1-D.
        IndexError: an id out of range.
    """
    if isinstance(selector, slice):
        return np.arange(*slice_bounds(selector, num_segments, where), dtype=np.int64)
    if isinstance(selector, tuple):
        raise TypeError(f"{where}: got a tuple as index; select several segments with a list")
    if isinstance(selector, Tensor):
        if selector.dtype == torch.uint8:
            raise TypeError(f"{where}: a uint8 tensor as index is ambiguous; use bool or int64")
        selector = tensor_array(selector, f"{where}: the index")
    if isinstance(selector, list) and selector:
        num_bools = sum(isinstance(item, bool | np.bool_) for item in selector)
        if num_bools == len(selector):
            selector = np.array(selector, dtype=np.bool_)
        elif num_bools:
            raise TypeError(f"{where}: an index mixes booleans and integers")
    if isinstance(selector, np.ndarray) and selector.dtype == np.bool_:
        if selector.shape != (num_segments,):
            raise ValueError(
                f"{where}: a mask of shape {selector.shape} for {num_segments} segments"
            )
        return np.flatnonzero(selector)
    if not isinstance(selector, list | range | np.ndarray):
        raise TypeError(f"{where}: cannot index with {type(selector).__name__}")

    if isinstance(selector, range):  # of more ids than are legal, one of the first is not
        selector = selector[: 2 * num_segments + 1]
    ids = host_ints(selector, f"{where}: the index")
    outside = (ids < -num_segments) | (ids >= num_segments)
    if outside.any():
        first = int(ids[outside][0])
        raise IndexError(f"{where}: index {first} is out of range for {num_segments} segments")
    return np.where(ids < 0, ids + num_segments, ids)


# --- lengths and offsets --------------------------------------------------------------------------


def check_total(name: str, total: int, what: str = "rows") -> None:
    """Offsets are int32: more than ``INT32_MAX`` of anything is a ``ValueError``."""
    if total > INT32_MAX:
        raise ValueError(f"{name}: {total} {what} do not fit int32 (at most {INT32_MAX})")


def accumulate(name: str, lengths: np.ndarray) -> np.ndarray:
    """[B + 1] int64 offsets of ``lengths`` [B] int64, none negative; the total must fit int32."""
    check_total(name, int(lengths.max(initial=0)))  # so that int64 holds any sum of them
    bounds = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    check_total(name, int(bounds[-1]))
    return bounds


def bounds_of(name: str, lengths: Any, *, num_rows: int | None = None) -> np.ndarray:
    """``accumulate`` for lengths from a caller; they must sum to ``num_rows`` where it is given."""
    array = host_ints(lengths, f"{name}: lengths")
    if (array < 0).any():
        segment = int(np.argmax(array < 0))
        raise ValueError(f"{name}: length of segment {segment} is negative: {array[segment]}")
    bounds = accumulate(name, array)
    if num_rows is not None and bounds[-1] != num_rows:
        raise ValueError(f"{name}: lengths sum to {bounds[-1]}, values has {num_rows} rows")
    return bounds


def repeat_counts(name: str, repeats: Any, lengths: np.ndarray) -> np.ndarray:
    """[B] int64 from one count or B of them; the repeats of ``lengths`` [B] must fit int32."""
    if is_scalar(repeats):
        counts = [host_count(repeats, f"{name}: repeats")] * lengths.size
    else:
        counts = host_ints(repeats, f"{name}: repeats").tolist()
        if len(counts) != lengths.size:
            raise ValueError(f"{name}: {len(counts)} repeats for {lengths.size} segments")
        if min(counts, default=0) < 0:
            raise ValueError(f"{name}: repeats must not be negative, got {min(counts)}")
    check_total(name, sum(counts), "segments")
    array = np.array(counts, dtype=np.int64)
    check_total(name, int(np.dot(array, lengths)))  # both sum to int32, so int64 holds it
    return array


def row_place(row: int | np.integer, bounds: np.ndarray) -> str:
    """Trajectory and row of row ``row`` of the batch; ``bounds`` [B + 1] are the rows' offsets."""
    i = int(np.searchsorted(bounds, row, side="right")) - 1
    return f"trajectory {i}, row {row - bounds[i]}"


def split_stops(name: str, split_size: Any, count: int, what: str) -> list[int]:
    """Where each part of ``count`` things (``what``) ends, as ``torch.split`` cuts; none is one."""
    if is_scalar(split_size):
        size = host_int(split_size, f"{name}: split_size")
        if size < 1:
            raise ValueError(f"{name}: split_size must be positive, got {size}")
        return [*range(size, count, size), count]
    sizes = host_ints(split_size, f"{name}: split_size")
    if (sizes < 0).any() or sum(sizes.tolist()) != count:
        raise ValueError(f"{name}: sizes must be >= 0 and sum to {count} {what}")
    return list(np.cumsum(sizes).tolist())


def chunk_sizes(name: str, chunks: Any, count: int) -> int | list[int]:
    """``split_size`` of a split into parts of ceil(count / chunks), as ``torch.chunk`` cuts: that
    many empty ones of nothing."""
    chunks = host_int(chunks, f"{name}: chunks")
    if chunks < 1:
        raise ValueError(f"{name}: chunks must be positive, got {chunks}")
    if count == 0:
        check_total(name, chunks, "chunks")
        return [0] * chunks
    return -(-count // chunks)


def device_and_dtype(name: str, target: Any, dtype: Any, device: Any) -> tuple[Any, Any]:
    """What ``to(device)``, ``to(dtype)`` or ``to(device, dtype)`` asks for, None where nothing."""
    if isinstance(target, torch.dtype):
        if dtype is not None:
            raise TypeError(f"{name}: two dtypes")
        dtype, target = target, None
    if target is not None and device is not None:
        raise TypeError(f"{name}: two devices")
    return (device if target is None else target), dtype


def from_host(array: np.ndarray, device: torch.device) -> Tensor:
    """``array`` on ``device``, without waiting for it. The array belongs to the result."""
    return without_waiting(torch.from_numpy(array), device)


def without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; from the host through pinned memory."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def offsets_on(device: torch.device, bounds: np.ndarray) -> Tensor:
    """[B + 1] int32 on ``device`` from the host's int64 offsets."""
    return from_host(bounds.astype(np.int32), device)


def same_bits(values: Tensor) -> Tensor:
    """``values``, or a view as integers of what few torch operators take: float8, wide unsigned."""
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        return values.view(torch.uint8)
    signed = _SIGNED.get(values.dtype)
    return values if signed is None else values.view(signed)


def equal_values(values: Tensor, other: Tensor) -> bool:
    """``torch.equal``, of float8 too. Waits for a device."""
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        values, other = values.float(), other.float()
    return torch.equal(values, other)


def from_buffer(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over the memory of ``buffer``, which may be read-only (an object store's pages)."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    if data.size == 0:
        return torch.empty(shape, dtype=dtype)
    # torch has no read-only tensors and warns of such memory; an address carries no such flag
    memory = (ctypes.c_char * data.size).from_address(data.ctypes.data)
    memory.owner = data  # type: ignore[attr-defined]  # the tensor keeps memory, memory the buffer
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _refuse_device(tensor: Tensor, where: str) -> None:
    if tensor.device.type != "cpu":
        raise TypeError(f"{where} is on {tensor.device}; it must be on the host, not read back")
