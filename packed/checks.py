"""What a packed tensor may be made of. Shapes, dtypes and devices only: no value is read."""

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.host import check_total

_INT64_MAX: Final = 2**63 - 1


def check_values(name: str, values: Tensor, what: str = "values") -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: {what} must be a tensor, got {type(values).__name__}")
    if values.is_nested or values.layout != torch.strided:
        raise TypeError(f"{name}: {what} must be a dense tensor, got layout {values.layout}")
    if values.dim() < 1:
        raise ValueError(f"{name}: {what} must be [N, *row_shape], got a tensor of no dimension")
    check_total(name, values.shape[0])


def check_offsets(values: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"PackedTensor: cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}"
        )
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"PackedTensor: cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"PackedTensor: cu_seqlens must be [B + 1], got shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != values.device:
        raise ValueError(
            f"PackedTensor: cu_seqlens on {cu_seqlens.device}, values on {values.device}"
        )


def check_bounds(bounds: np.ndarray, num_rows: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"PackedTensor: cu_seqlens must start at 0, got {bounds[0]}")
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        raise ValueError(f"PackedTensor: cu_seqlens decreases after segment {falls[0]}")
    if bounds[-1] != num_rows:
        raise ValueError(
            f"PackedTensor: cu_seqlens ends at {bounds[-1]}, values has {num_rows} rows"
        )


def check_alike(name: str, what: str, tensor: Tensor, other_what: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name}: {what} is {tensor.dtype}, {other_what} is {other.dtype}")
    if tensor.shape[1:] != other.shape[1:]:
        raise ValueError(
            f"{name}: {what} has row shape {tuple(tensor.shape[1:])}, "
            f"{other_what} has {tuple(other.shape[1:])}"
        )
    if tensor.device != other.device:
        raise ValueError(f"{name}: {what} is on {tensor.device}, {other_what} on {other.device}")


def check_padded_size(name: str, num_segments: int, width: int, values: Tensor) -> None:
    """No tensor has more than int64's maximum of bytes; numpy and torch wrap around, or abort."""
    size_bytes = max(num_segments, 1) * width * max(values.shape[1:].numel(), 1) * values.itemsize
    if size_bytes > _INT64_MAX:
        raise ValueError(f"{name}: width={width} makes a tensor of {size_bytes} bytes")


def check_fill(name: str, fill: Any, dtype: torch.dtype) -> None:
    if not isinstance(fill, int | float | np.integer | np.floating | np.bool_):
        raise TypeError(f"{name}: fill must be a real number, got {type(fill).__name__}")
    fits: bool | np.bool_
    number: Any = fill
    if dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max  # an int may be past every float: compare it as it is
        fits = abs(number) <= largest or (not isinstance(number, int) and not math.isfinite(number))
    elif dtype == torch.bool:
        fits = number in (0, 1)
    else:  # the range first: a NaN is in none
        fits = torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max and int(number) == number
    if not fits:
        raise ValueError(f"{name}: fill={fill} does not fit {dtype}")
