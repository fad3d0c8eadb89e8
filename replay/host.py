"""Host integers and masks of a layout, checked without reading a device."""

import itertools
from array import array as pack_array
from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

#: No layout is so large, and sums of such integers stay within int64.
_LARGEST = 2**40

#: One integer a trajectory, on the host.
HostInts: TypeAlias = Sequence[int] | np.ndarray | Tensor


def is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def host_ints(name: str, field: str, values: object) -> tuple[int, ...]:
    """``host_array`` as a tuple of Python integers."""
    return tuple(host_array(name, field, values).tolist())


def host_array(name: str, field: str, values: object) -> np.ndarray:
    """``values`` as an int64 array [B] of its own, each in [0, 2**40], without reading a device."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise TypeError(f"{name}: {field} must be host integers, got a tensor on a device")
        if values.dtype.is_floating_point or values.layout != torch.strided:
            raise TypeError(
                f"{name}: {field} must be one-dimensional integers, got {values.dtype}"
                f" {values.layout}"
            )
        values = values.detach().numpy()
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise TypeError(
                f"{name}: {field} must be one-dimensional integers, got {values.dtype}"
                f" {list(values.shape)}"
            )
    elif isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: {field} must be a sequence of host integers, got {values!r}")
    elif not set(map(type, values)) <= {int}:  # bool is not int here
        for i, value in enumerate(values):
            if not is_int(value):
                raise TypeError(
                    f"{name}: {field} of trajectory {i} must be a host integer, got {value!r}"
                )
    given = cast(Sequence[int], values)
    try:
        # NumPy's own loop is slower; torch.compile knows no other
        if isinstance(given, list | tuple) and not torch.compiler.is_compiling():
            array = np.frombuffer(pack_array("q", given), np.int64)
        else:
            array = np.array(given, dtype=np.int64)  # 64-bit unsigned wrap to negative
    except OverflowError:  # a Python integer past int64
        array = np.array([min(max(value, -1), _LARGEST + 1) for value in given], np.int64)
    if array.size and array.view(np.uint64).max() > _LARGEST:  # a negative one is larger still
        i = int((array.view(np.uint64) > _LARGEST).argmax())
        bound = ">= 0" if given[i] < 0 else f"at most {_LARGEST}"
        raise ValueError(f"{name}: {field} of trajectory {i} must be {bound}, got {given[i]}")
    return array


def host_masks(
    name: str, field: str, masks: object, lengths: Sequence[int]
) -> list[np.ndarray | None]:
    """For each trajectory a bool array [length], or None where it has no mask.

    Args:
        masks: None, or one entry a trajectory: None, or host booleans or 0 and 1 [length].

    Raises:
        TypeError: a mask is on a device, or holds something else; names the trajectory.
        ValueError: the number of masks or the shape of one is wrong.
    """
    if masks is None:
        return [None] * len(lengths)
    if isinstance(masks, Tensor) and masks.device.type != "cpu":
        raise TypeError(f"{name}: {field} must be on the host, not on {masks.device}")
    several = isinstance(masks, Sequence) and not isinstance(masks, str | bytes)
    if isinstance(masks, np.ndarray | Tensor):
        several = masks.ndim > 0 and not getattr(masks, "is_nested", False)
    if not several:
        raise TypeError(
            f"{name}: {field} must be a sequence of one mask a trajectory, got"
            f" {type(masks).__name__}"
        )
    assert isinstance(masks, Sequence | np.ndarray | Tensor)
    if len(masks) != len(lengths):
        raise ValueError(
            f"{name}: {field} has {len(masks)} entries for {len(lengths)} trajectories"
        )
    checked: list[np.ndarray | None] = []
    for i, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask is None:
            checked.append(None)
            continue
        where = f"{name}: {field} of trajectory {i}"
        if isinstance(mask, Tensor):
            if mask.device.type != "cpu":
                raise TypeError(f"{where} must be on the host, not on {mask.device}")
            if mask.is_nested or mask.layout != torch.strided:
                raise TypeError(f"{where} must be dense, got layout {mask.layout}")
            if mask.dtype.is_floating_point:
                mask = mask.double()  # NumPy has no bfloat16
            mask = mask.detach().numpy()
        try:
            values = np.asarray(mask)
        except ValueError as error:  # lists of unlike lengths
            raise ValueError(f"{where} must be [{length}], one a token: {error}") from None
        except (TypeError, RuntimeError):  # tensors in a list: on a device, or with a gradient
            raise TypeError(f"{where} must be one host array or list of numbers") from None
        if values.shape != (length,):
            raise ValueError(f"{where} must be [{length}], one a token, got {list(values.shape)}")
        if values.dtype != np.bool_:
            numbers = values.dtype.kind in "iuf"
            if not numbers or not ((values == 0) | (values == 1)).all():
                raise TypeError(f"{where} must be bool (or 0 and 1), got {values.dtype}")
        checked.append(values.astype(np.bool_))
    return checked


def offsets_of(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lengths, initial=0))
