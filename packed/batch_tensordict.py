"""Fields of a batch as a ``tensordict.TensorDict`` and back; the package is optional."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from packhorse.packed.tensor import PackedTensor


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
        elif isinstance(field, tuple):
            value = package.NonTensorStack(*map(package.NonTensorData, field))
        elif isinstance(field, dict):
            value = _converted(package, field, size)
        made.set(key, value)
    return made


def parts_of(
    function: str, source: Any, lengths: Mapping[str, Sequence[int]] | None
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """(fields, batch size, metadata), as ``Batch.from_tensordict`` says."""
    package = require_tensordict(function)
    if not isinstance(source, package.TensorDictBase):
        raise TypeError(f"{function}: source must be a TensorDict, got {type(source).__name__}")
    if len(source.batch_size) != 1:
        shape = list(source.batch_size)
        raise ValueError(f"{function}: source must have batch size [B], got {shape}")
    metadata: dict[str, Any] = {}
    given = dict(lengths or {})

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
                    fields[key] = PackedTensor.from_nested(value, lengths=given.get(path))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{function}: {path}: {error}") from None
            elif isinstance(value, Tensor):
                fields[key] = value
            elif isinstance(value, package.TensorDictBase):
                fields[key] = convert(value, f"{path}.")
            else:
                raise TypeError(f"{function}: {path} is a {type(value).__name__}")
        return fields

    return convert(source, ""), source.batch_size[0], metadata
