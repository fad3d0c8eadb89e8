"""Rows copied into fresh memory: by NumPy on the host, by torch everywhere else.

NumPy asks the system for huge pages and copies a run at a time; torch does neither, and its threads
wait for each other where cores are shared. On 2 cores, 499 MB of rows of 384 bytes: one copy 94 to
190 ms by NumPy, 1,270 by ``clone``; 512 runs of 1,270 rows, half of it, 44 to 92 against 1,290 to
1,400 by ``torch.cat``, and single rows of them 1.1 to 2.5 times as fast as ``index_select``.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.host import from_host, same_bits

#: Mean rows of a run from which copying runs beats indexing rows: an index costs 8 bytes and
#: nanoseconds of host time a row, a run about a microsecond.
_ROWS_PER_RUN: Final = 256

#: integers that hold the bits of an element, by its bytes
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` of tensors [rows_i, ...] of one dtype, row shape and device, contiguous."""
    arrays = [_bits_of(part) for part in parts]
    if not arrays or any(array is None for array in arrays):
        bits = [same_bits(part) for part in parts]
        joined = torch.cat(bits)
        return joined if bits[0] is parts[0] else joined.view(parts[0].dtype)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    memory = np.empty(shape, dtype=arrays[0].dtype)  # type: ignore[union-attr]
    np.concatenate(arrays, out=memory)  # type: ignore[arg-type]  # without out= as these lie
    return _tensor_of(memory, parts[0].dtype)


def repeat_rows(values: Tensor, times: int) -> Tensor:
    """All rows [N, ...], ``times`` times over."""
    if times == 0:
        return values.narrow(0, 0, 0)
    return join_rows([values] * times)


def take_rows(values: Tensor, rows: np.ndarray) -> Tensor:
    """``values[rows]`` for int64 host indices, none negative; the array belongs to the result."""
    # NumPy would copy all of a strided array first
    array = _bits_of(values) if values.is_contiguous() else None
    if array is None:
        return index_rows(values, from_host(rows, values.device))
    return _tensor_of(array.take(rows, axis=0), values.dtype)


def index_rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]`` for int64 indices on its device, of dtypes that torch hardly knows too."""
    bits = same_bits(values)
    taken = bits.index_select(0, rows)
    return taken if bits is values else taken.view(values.dtype)


def take_runs(values: Tensor, starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """``values[start : start + length]`` of each pair, one after another; of one pair a view.

    No length is 0.
    """
    if starts.size <= 1:
        return values.narrow(0, *((int(starts[0]), int(lengths[0])) if starts.size else (0, 0)))
    if lengths.sum() >= _ROWS_PER_RUN * starts.size and not values.requires_grad:
        runs = zip(starts.tolist(), lengths.tolist(), strict=True)
        return join_rows([values.narrow(0, start, length) for start, length in runs])
    return take_rows(values, run_rows(starts, lengths))


def run_rows(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers [start, start + length) of each pair, one after another."""
    shift = starts - (np.cumsum(lengths) - lengths)
    return np.repeat(shift, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def clone_rows(values: Tensor) -> Tensor:
    """A contiguous copy in memory of its own."""
    array = _bits_of(values)
    if array is None:
        return values.clone(memory_format=torch.contiguous_format)
    return _tensor_of(array.copy(), values.dtype)


def cast_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values.to(dtype)`` for another dtype."""
    if _bits_of(values) is None or dtype.itemsize not in _BITS:
        return values.to(dtype)
    memory = np.empty(tuple(values.shape), dtype=f"i{dtype.itemsize}")
    return _tensor_of(memory, dtype).copy_(values)


def _bits_of(values: Tensor) -> np.ndarray | None:
    """The same memory as integers of its dtype's width; None where torch has to copy it."""
    if not values.is_cpu or values.requires_grad or type(values) is not Tensor:
        return None
    if torch.compiler.is_compiling():
        return None
    if values.is_conj() or values.is_neg() or (bits := _BITS.get(values.itemsize)) is None:
        return None
    return values.view(bits).numpy()


def _tensor_of(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    if bits.size == 0:  # ``from_numpy`` gives it strides of 0, which no view as bytes takes
        return torch.empty(bits.shape, dtype=dtype)
    return torch.from_numpy(bits).view(dtype)
