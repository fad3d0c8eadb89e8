"""Fields of a batch as a ``tensordict.TensorDict`` and back; the package is optional.

A ``PackedRagged`` has two ragged dimensions and a jagged nested tensor one: it becomes a
``TensorDict`` of two, the ids of each trajectory and the widths of its rows.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
from torch import Tensor

from packhorse.packed.host import from_host
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor

#: keys of a ``PackedRagged``: [B, j] int32 ids, [B, j] int64 widths
RAGGED_KEYS: Final = ("ragged_ids", "ragged_widths")


def require_tensordict(function: str) -> Any:
    try:
        return import_module("tensordict")
    except ImportError:
        raise ImportError(f"{function} needs the package tensordict, pip install it") from None


def tensordict_of(
    function: str, fields: Mapping[str, Any], size: int, metadata: Mapping[str, Any]
) -> Any:
    """As ``Batch.to_tensordict`` says."""
    package = require_tensordict(function)
    for key in metadata:
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"{function}: metadata {key!r} has no name of its own")
    made = _converted(package, fields, size)
    for key, value in metadata.items():
        made.set(key, package.NonTensorData(value, batch_size=[size]))
    return made


def _converted(package: Any, fields: Mapping[str, Any], size: int) -> Any:
    made = package.TensorDict({}, batch_size=[size])
    for key, field in fields.items():
        value: Any = field
        if isinstance(field, PackedTensor):
            value = field.to_nested()
        elif isinstance(field, PackedRagged):
            value = _converted(package, _parts_of_ragged(field), size)
        elif isinstance(field, tuple):
            value = package.NonTensorStack(*map(package.NonTensorData, field))
        elif isinstance(field, dict):
            value = _converted(package, field, size)
        made.set(key, value)
    return made


def _parts_of_ragged(field: PackedRagged) -> dict[str, PackedTensor]:
    widths = field.widths
    sums = np.append(0, np.cumsum(widths))[field.bounds]
    parts = (field.values, np.diff(sums)), (from_host(widths, field.device), field.lengths)
    return {
        key: PackedTensor.from_lengths(values, lengths)
        for key, (values, lengths) in zip(RAGGED_KEYS, parts, strict=True)
    }


def parts_of(
    function: str,
    source: Any,
    lengths: Mapping[str, Sequence[int]] | None,
    widths: Mapping[str, Sequence[int]] | None,
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """(fields, batch size, metadata), as ``Batch.from_tensordict`` says."""
    package = require_tensordict(function)
    if not isinstance(source, package.TensorDictBase):
        raise TypeError(f"{function}: source must be a TensorDict, got {type(source).__name__}")
    if len(source.batch_size) != 1:
        shape = list(source.batch_size)
        raise ValueError(f"{function}: source must have batch size [B], got {shape}")
    metadata: dict[str, Any] = {}
    known_lengths, known_widths = dict(lengths or {}), dict(widths or {})

    def convert(part: Any, prefix: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in part.items():
            path = f"{prefix}{key}"
            if isinstance(value, package.NonTensorStack):
                fields[key] = tuple(value.tolist())
            elif isinstance(value, package.NonTensorData):
                if prefix:
                    raise TypeError(f"{function}: {path} is metadata of a nested dictionary")
                metadata[key] = value.data
            elif isinstance(value, Tensor) and value.is_nested:
                try:
                    fields[key] = PackedTensor.from_nested(value, lengths=known_lengths.get(path))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{function}: {path}: {error}") from None
            elif isinstance(value, Tensor):
                fields[key] = value
            elif isinstance(value, package.TensorDictBase):
                if set(value.keys()) == set(RAGGED_KEYS):
                    try:
                        fields[key] = _ragged_of(
                            value, known_lengths.get(path), known_widths.get(path)
                        )
                    except (TypeError, ValueError) as error:
                        raise type(error)(f"{function}: {path}: {error}") from None
                else:
                    fields[key] = convert(value, f"{path}.")
            else:
                raise TypeError(f"{function}: {path} is a {type(value).__name__}")
        return fields

    return convert(source, ""), source.batch_size[0], metadata


def _ragged_of(source: Any, lengths: Any, widths: Any) -> PackedRagged:
    ids, rows = (source.get(key) for key in RAGGED_KEYS)
    for key, nested in zip(RAGGED_KEYS, (ids, rows), strict=True):
        if not (isinstance(nested, Tensor) and nested.is_nested):
            raise TypeError(f"{key} must be a nested tensor of layout torch.jagged")
    if ids.device.type != "cpu":
        if lengths is None or widths is None:
            raise TypeError(f"on {ids.device} it needs lengths= and widths= from the host")
        return PackedRagged.from_lengths(ids.values(), widths, lengths)
    wide, segments = PackedTensor.from_nested(rows), PackedTensor.from_nested(ids)
    packed = PackedRagged.from_lengths(segments.values, wide.values.numpy(), wide.lengths)
    row_bounds = np.append(0, np.cumsum(packed.widths))
    if not np.array_equal(row_bounds[wide.bounds], segments.bounds):
        i = int(np.argmax(np.diff(row_bounds[wide.bounds]) != np.diff(segments.bounds)))
        raise ValueError(f"{RAGGED_KEYS[1]} of trajectory {i} do not sum to its ids")
    if lengths is not None or widths is not None:  # what the caller knows must agree
        return PackedRagged(
            packed.values, packed.row_offsets, packed.cu_seqlens, lengths=lengths, widths=widths
        )
    return packed
