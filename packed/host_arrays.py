"""Per-trajectory fields as callers give them, as host arrays; what is wrong is named by ``where``.

Nothing is copied but what another dtype needs, and nothing is written.
"""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.host import host_count, host_ints, tensor_array


def positive(value: Any, where: str) -> int:
    """``host_count`` that must not be 0."""
    count = host_count(value, where)
    if count == 0:
        raise ValueError(f"{where} must be positive, got 0")
    return count


def checked_lengths(name: str, what: str, given: Any) -> np.ndarray:
    """[B] int64, none negative; ``what`` names the argument of function ``name``."""
    lengths = host_ints(given, f"{name}: {what}")
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise ValueError(f"{name}: {what} of trajectory {i} is negative: {lengths[i]}")
    return lengths


def check_sequence(name: str, field: str, given: Any, expected: int, beside: str) -> None:
    """``given`` must be a sequence of ``expected`` items, as many as argument ``beside`` has."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"{name}: {field} must be a sequence of one item a trajectory, got "
            f"{type(given).__name__}"
        )
    if len(given) != expected:
        raise ValueError(f"{name}: {field} has {len(given)} trajectories, {beside} has {expected}")


def integer_array(given: Any, where: str) -> np.ndarray:
    """The array of an integer host array or CPU tensor, over the same memory."""
    if isinstance(given, Tensor):
        if given.dtype == torch.bool:
            raise TypeError(f"{where} must hold integers, got {given.dtype}")
        return tensor_array(given, where)
    if not isinstance(given, np.ndarray):
        raise TypeError(f"{where} must be an array or a tensor, got {type(given).__name__}")
    if given.dtype.kind not in "iu":
        raise TypeError(f"{where} must hold integers, got {given.dtype}")
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(f"{where} is a masked array; fill it first")
    return given


def float_array(given: Any, where: str) -> np.ndarray:
    """Contiguous float32 of floats: an array, a CPU tensor or a list; None becomes NaN.

    An array that is that already is returned as it is. An overflow becomes infinite, but an int
    past float64 is a ``ValueError``.
    """
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise TypeError(f"{where} is on {given.device}; it must be on the host")
        if not given.dtype.is_floating_point or given.is_nested or given.layout != torch.strided:
            raise TypeError(f"{where} must hold floats, got {given.dtype}, {given.layout}")
        given = given.detach().to(torch.float32).numpy()
    elif isinstance(given, np.ndarray):
        if given.dtype.kind != "f":
            raise TypeError(f"{where} must hold floats, got {given.dtype}")
    elif not isinstance(given, list | tuple):
        raise TypeError(f"{where} must be an array or list of floats, got {type(given).__name__}")
    try:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(given, dtype=np.float32)
    except OverflowError:  # an int past float64
        for token, value in enumerate(given):
            if isinstance(value, int) and abs(value) > sys.float_info.max:
                sign = "-" if value < 0 else ""
                raise ValueError(f"{where}, token {token}: {sign}inf is not finite") from None
        raise TypeError(f"{where} must hold floats only") from None
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
        raise TypeError(f"{where} must hold floats only") from None


def rows_between(
    arrays: Sequence[np.ndarray], bounds: Sequence[int], start: int, stop: int
) -> list[np.ndarray]:
    """Views of the rows [start, stop) of all ``arrays`` in a row, at least one of them.

    ``bounds`` [B + 1]: the rows of array i are [bounds[i], bounds[i + 1]) of all.
    """
    first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)
    found = list(arrays[first:last])
    found[-1] = found[-1][: stop - bounds[last - 1]]
    found[0] = found[0][start - bounds[first] :]
    return found
