"""What a ``PackedRagged`` may be made of, and its spans of rows and ids, as host arrays.

No device is read. A row is named by its trajectory: row r of trajectory i is ``bounds[i] + r``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.copies import join_rows, run_rows, take_rows
from packhorse.packed.host import (
    accumulate,
    bounds_of,
    check_total,
    host_count,
    host_ints,
    row_place,
)
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor

_INT64_MAX: Final = 2**63 - 1


# --- checks ---------------------------------------------------------------------------------------


def check_tensor(name: str, field: str, tensor: Any, dtype: torch.dtype, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {field} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name}: {field} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: {field} must be {str(dtype)[6:]}, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: {field} must be {shape}, got shape {tuple(tensor.shape)}")


def check_ids(name: str, num_ids: int) -> None:
    """No tensor has more than int64's maximum of bytes; numpy and torch wrap around."""
    if 4 * num_ids > _INT64_MAX:
        raise ValueError(f"{name}: {num_ids} ids are more than a tensor holds")


def checked_bounds(
    values: Tensor, row_offsets: Tensor, cu_seqlens: Tensor, lengths: Any, widths: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The host's row bounds [B + 1] and id bounds [N + 1], int64, for the parts of a constructor.

    Raises:
        TypeError, ValueError: as ``PackedRagged``.
    """
    name = "PackedRagged"
    check_tensor(name, "values", values, torch.int32, "[ids]")
    for field, tensor, dtype, shape in (
        ("row_offsets", row_offsets, torch.int64, "[N + 1]"),
        ("cu_seqlens", cu_seqlens, torch.int32, "[B + 1]"),
    ):
        check_tensor(name, field, tensor, dtype, shape)
        if tensor.shape[0] == 0:
            raise ValueError(f"{name}: {field} must be {shape}, got no entry")
        if tensor.device != values.device:
            raise ValueError(f"{name}: {field} on {tensor.device}, values on {values.device}")
    on_host = values.device.type == "cpu"
    for field, given, beside in (
        ("lengths", lengths, "cu_seqlens"),
        ("widths", widths, "row_offsets"),
    ):
        if given is None and not on_host:
            raise TypeError(
                f"{name}: {beside} on {values.device} needs {field}= from the host; reading them "
                "back would stall the device"
            )
    num_rows = row_offsets.shape[0] - 1
    check_total(name, num_rows)

    bounds: Any = None
    if lengths is not None:
        bounds = bounds_of(name, lengths)
        if bounds.size != cu_seqlens.shape[0]:
            raise ValueError(
                f"{name}: {bounds.size - 1} lengths for cu_seqlens of {cu_seqlens.shape[0]} entries"
            )
        if bounds[-1] != num_rows:
            raise ValueError(
                f"{name}: lengths sum to {bounds[-1]}, row_offsets has {num_rows} rows"
            )
    if on_host:
        entries = cu_seqlens.numpy().astype(np.int64)
        _check_rise(f"{name}: cu_seqlens", entries, f"row_offsets has {num_rows} rows", num_rows)
        _check_same(f"{name}: lengths and cu_seqlens", bounds, entries)
        bounds = entries

    row_bounds: Any = None
    if widths is not None:
        row_bounds = row_bounds_of(name, widths, bounds, values.shape[0])
    if on_host:
        entries = row_offsets.contiguous().numpy()
        held = f"values has {values.shape[0]} ids"
        _check_rise(f"{name}: row_offsets", entries, held, values.shape[0], bounds)
        _check_same(f"{name}: widths and row_offsets", row_bounds, entries, bounds)
        row_bounds = entries
    return bounds, row_bounds


def _check_rise(
    where: str, entries: np.ndarray, held: str, total: int, bounds: np.ndarray | None = None
) -> None:
    """``entries`` are offsets of segments, or with ``bounds`` of the rows in them."""
    if entries[0] != 0:
        raise ValueError(f"{where} must start at 0, got {entries[0]}")
    falls = np.flatnonzero(entries[1:] < entries[:-1])
    if falls.size:
        raise ValueError(f"{where} decreases at {_entry(falls[0], bounds)}")
    if entries[-1] != total:
        raise ValueError(f"{where} ends at {entries[-1]}, {held}")


def _check_same(
    what: str, bounds: Any, entries: np.ndarray, rows_of: np.ndarray | None = None
) -> None:
    if bounds is not None and not np.array_equal(bounds, entries):
        place = int(np.argmax(np.diff(bounds) != np.diff(entries)))
        raise ValueError(f"{what} differ at {_entry(place, rows_of)}")


def _entry(place: int | np.integer, bounds: np.ndarray | None) -> str:
    return f"trajectory {place}" if bounds is None else row_place(place, bounds)


def host_widths(name: str, widths: Any, bounds: np.ndarray) -> np.ndarray:
    """[N] int64, none negative, as many as ``bounds`` [B + 1] has rows."""
    array = host_ints(widths, f"{name}: widths")
    if array.size != bounds[-1]:
        raise ValueError(
            f"{name}: {array.size} widths for {bounds[-1]} rows of {bounds.size - 1} trajectories"
        )
    if (array < 0).any():
        row = int(np.argmax(array < 0))
        raise ValueError(f"{name}: widths has {array[row]} for {row_place(row, bounds)}")
    return array


def row_bounds_of(name: str, widths: Any, bounds: np.ndarray, num_ids: int) -> np.ndarray:
    """[N + 1] int64 offsets of ``widths`` from a caller, which must sum to ``num_ids``."""
    array = host_widths(name, widths, bounds)
    wide = array > num_ids
    if wide.any():
        row = int(np.argmax(wide))
        raise ValueError(
            f"{name}: widths has {array[row]} for {row_place(row, bounds)}, values has {num_ids} "
            "ids"
        )
    row_bounds = sums(array)
    falls = bool((row_bounds[1:] < row_bounds[:-1]).any())  # past int64
    if falls or row_bounds[-1] != num_ids:
        total = sum(array.tolist()) if falls else row_bounds[-1]
        raise ValueError(f"{name}: widths sum to {total}, values has {num_ids} ids")
    return row_bounds


# --- forms ----------------------------------------------------------------------------------------


def joined_segments(name: str, segments: Iterable[Any]) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Ids [total], row bounds [B + 1] and id bounds [N + 1] of (token_ids, row_offsets) pairs."""
    ids, widths = [], []
    for i, segment in enumerate(segments):
        where = f"{name}: trajectory {i}"
        if not isinstance(segment, tuple) or len(segment) != 2:
            given = type(segment).__name__
            raise TypeError(f"{where} must be a pair (token_ids, row_offsets), got {given}")
        token_ids, row_offsets = segment
        check_tensor(where, "token_ids", token_ids, torch.int32, "[ids]")
        check_tensor(where, "row_offsets", row_offsets, torch.int64, "[rows + 1]")
        for field, tensor in (("token_ids", token_ids), ("row_offsets", row_offsets)):
            if tensor.device.type != "cpu":
                raise TypeError(f"{where}: {field} is on {tensor.device}; join batches with cat")
        entries = row_offsets.numpy()
        if entries.size == 0:
            raise ValueError(f"{where}: row_offsets must be [rows + 1], got no entry")
        num_ids = token_ids.shape[0]
        one = np.array([0, entries.size - 1])
        try:
            _check_rise(f"{where}: row_offsets", entries, f"token_ids has {num_ids}", num_ids, one)
        except ValueError as error:
            raise ValueError(str(error).replace("at trajectory 0, row", "at row")) from None
        ids.append(token_ids)
        widths.append(np.diff(entries))
    bounds = accumulate(name, np.array([part.size for part in widths], dtype=np.int64))
    values = join_rows(ids) if ids else torch.empty(0, dtype=torch.int32)
    return values, bounds, sums(np.concatenate([np.empty(0, dtype=np.int64), *widths]))


def rows_of_padded(name: str, padded: Any, widths: Any) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Ids [total], row bounds [B + 1] and id bounds [N + 1] of packed rows [N, C] filled by -1."""
    if not isinstance(padded, PackedTensor):
        raise TypeError(f"{name}: padded must be a PackedTensor, got {type(padded).__name__}")
    if padded.dtype != torch.int32:
        raise TypeError(f"{name}: padded must be int32, got {padded.dtype}")
    if len(padded.row_shape) != 1:
        raise ValueError(
            f"{name}: padded must have rows of [C], got row shape {tuple(padded.row_shape)}"
        )
    on_host = padded.device.type == "cpu"
    if widths is None and not on_host:
        raise TypeError(f"{name}: padded on {padded.device} needs widths= from the host")
    rows, bounds, width = padded.values, padded.bounds, padded.row_shape[0]
    given = None if widths is None else host_widths(name, widths, bounds)
    if not on_host:
        assert given is not None
        if (given > width).any():
            row = int(np.argmax(given > width))
            raise ValueError(
                f"{name}: widths has {given[row]} for {row_place(row, bounds)}, padded has {width} "
                "columns"
            )
        row_bounds = sums(given)
        cells = padded_cells(row_bounds, width)
        return take_rows(rows.reshape(-1), cells), bounds, row_bounds
    ids = rows.numpy()
    if ids.size and ids.min() < NO_CANDIDATE:
        row, column = divmod(int(np.argmax(ids < NO_CANDIDATE)), width)
        raise ValueError(
            f"{name}: padded, {row_place(row, bounds)}: id {ids[row, column]} is below -1"
        )
    present = ids != NO_CANDIDATE
    found = np.count_nonzero(present, axis=1)
    if given is not None and not np.array_equal(given, found):
        row = int(np.argmax(given != found))
        raise ValueError(
            f"{name}: widths has {given[row]} for {row_place(row, bounds)}, padded has "
            f"{found[row]} ids"
        )
    return torch.from_numpy(ids[present]), bounds, sums(found)


def check_padded_width(
    name: str, widths: np.ndarray, bounds: np.ndarray, width: int, max_bytes: Any
) -> None:
    """Rows of ``widths`` must fit ``width``, and all of them ``max_bytes``."""
    max_bytes = host_count(max_bytes, f"{name}: max_bytes")
    widest = int(np.argmax(widths)) if widths.size else 0
    if widths.size and widths[widest] > width:
        row = int(np.argmax(widths > width))
        raise ValueError(
            f"{name}: {row_place(row, bounds)} has {widths[row]} ids, width is {width}"
        )
    num_bytes = 4 * max(widths.size, 1) * width
    if num_bytes > max_bytes:
        wide = f"; the widest is {row_place(widest, bounds)}" if widths.size else ""
        raise ValueError(
            f"{name}: {widths.size} rows of width {width} are {num_bytes} bytes, above "
            f"max_bytes={max_bytes}{wide}"
        )


# --- spans ----------------------------------------------------------------------------------------


def sums(widths: Sequence[int] | np.ndarray) -> np.ndarray:
    """[N + 1] int64: 0, and the sums of ``widths`` [N] up to each."""
    row_bounds = np.zeros(len(widths) + 1, dtype=np.int64)
    np.cumsum(widths, out=row_bounds[1:])
    return row_bounds


def padded_cells(row_bounds: np.ndarray, width: int) -> np.ndarray:
    """[ids]: the cell of each id in rows of ``width``, flat."""
    first_cells = np.arange(row_bounds.size - 1, dtype=np.int64) * width
    return run_rows(first_cells, np.diff(row_bounds))
