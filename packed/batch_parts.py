"""What ``Batch`` does to one field: its kind, joining, shipping. Nothing here knows a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pickle import PickleBuffer
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.checks import check_alike
from packhorse.packed.copies import join_rows
from packhorse.packed.fields import FieldRegistry, Packed
from packhorse.packed.host import check_total, equal_values, from_buffer
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.segments import PackedSegments
from packhorse.packed.tensor import PackedTensor

Kind = Literal["dense", "packed", "listed", "nested", "neither"]


def kind_of(field: Any) -> Kind:
    if isinstance(field, PackedSegments):
        return "packed"
    if isinstance(field, Tensor):
        return "dense"
    if isinstance(field, tuple):
        return "listed"
    return "nested" if isinstance(field, dict) else "neither"


def check_kind(function: str, path: str, value: Any, registry: FieldRegistry) -> Any:
    """``value`` as a field; a ``TypeError`` or ``ValueError`` where it is none."""
    if path in registry and not isinstance(value, PackedSegments):
        given = type(value).__name__
        raise TypeError(f"{function}: {path} must be {registry[path].forms}, got {given}")
    if isinstance(value, PackedTensor | PackedRagged):
        if path in registry:
            registry[path].check(function, value)
        return value
    if isinstance(value, Tensor):
        if value.is_nested:
            raise TypeError(f"{function}: {path} is nested; wrap it with PackedTensor.from_nested")
        if value.layout != torch.strided:
            raise TypeError(f"{function}: {path} must be dense, got layout {value.layout}")
        if value.dim() == 0:
            raise ValueError(f"{function}: {path} must be [B, ...], got a tensor of no dimension")
        return value
    if isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(value, Mapping):
        return check_kinds(function, value, registry, f"{path}.")
    raise TypeError(
        f"{function}: {path} must be a tensor, a PackedTensor or PackedRagged, a list or a mapping"
        f" of these, got {type(value).__name__}"
    )


def check_kinds(
    function: str, given: Mapping[str, Any], registry: FieldRegistry, prefix: str = ""
) -> dict[str, Any]:
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"{function}: a field's name must be a string, got {name!r}")
    return {
        name: check_kind(function, f"{prefix}{name}", value, registry)
        for name, value in given.items()
    }


def check_fields(
    function: str, given: Any, size: int | None, registry: FieldRegistry
) -> tuple[dict[str, Any], int]:
    """Fields as a batch holds them, and their one batch size; ``size`` where it is given."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{function}: fields must be a mapping, got {type(given).__name__}")
    taken = check_kinds(function, given, registry)
    seen: set[str] = set()
    for path, leaf in leaves(taken):
        if path in seen:
            raise ValueError(f"{function}: {path} names two fields")
        seen.add(path)
        if size is None:
            size = len(leaf)
        if len(leaf) != size:
            raise ValueError(
                f"{function}: {path} has {len(leaf)} trajectories, the batch has {size}"
            )
    if size is None:
        raise ValueError(f"{function}: no field tells the batch size; pass batch_size=")
    check_total(function, size, "trajectories")
    return taken, size


def leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, field) of all that are not mappings; the path of a nested one is "outer.inner"."""
    for key, field in fields.items():
        if isinstance(field, dict):
            yield from leaves(field, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", field


def apply(
    function: str,
    fields: Mapping[str, Any],
    of_dense: Callable[[str, Tensor], Any],
    of_packed: Callable[[str, Packed], Any],
    of_listed: Callable[[str, tuple[Any, ...]], Any],
    prefix: str = "",
) -> dict[str, Any]:
    """Each field by the function of its kind, which gets its path too; errors name the field."""
    made: dict[str, Any] = {}
    for key, field in fields.items():
        if isinstance(field, dict):
            made[key] = apply(function, field, of_dense, of_packed, of_listed, f"{prefix}{key}.")
            continue
        path = f"{prefix}{key}"
        try:
            if isinstance(field, PackedTensor | PackedRagged):
                made[key] = of_packed(path, field)
            elif isinstance(field, tuple):
                made[key] = of_listed(path, field)
            else:
                made[key] = of_dense(path, field)
        except ValueError as error:
            raise ValueError(f"{function}: {path}: {error}") from None
    return made


def cut_fields(fields: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Views of trajectories [start, stop), which are there: nothing here can fail."""
    cut: dict[str, Any] = {}
    for key, field in fields.items():
        if isinstance(field, PackedSegments):
            cut[key] = field._view(start, stop)
        elif isinstance(field, dict):
            cut[key] = cut_fields(field, start, stop)
        else:  # of a tensor in 1.6 us; ``narrow`` takes 2.4
            cut[key] = field[start:stop]
    return cut


# --- joining --------------------------------------------------------------------------------------


def check_joinable(
    function: str, prefix: str, parts: Sequence[dict[str, Any]], widen: bool
) -> None:
    """Refuse fields that do not fit together, before anything is joined; names field and input."""
    first = parts[0]
    for i, part in enumerate(parts):
        for there, lacking, at in ((first, part, i), (part, first, 0)):
            for key in there:
                if key not in lacking:
                    raise ValueError(f"{function}: input {at} has no field {prefix}{key}")
    for key, field in first.items():
        path = f"{prefix}{key}"
        column = [part[key] for part in parts]
        for i, other in enumerate(column):
            if kind_of(other) != kind_of(field):
                raise TypeError(
                    f"{function}: {path} is {kind_of(other)} in input {i}, {kind_of(field)} in"
                    " input 0"
                )
        if isinstance(field, dict):
            check_joinable(function, f"{path}.", column, widen)
        elif isinstance(field, PackedSegments):
            _check_forms(function, path, column)
            if widen:
                column = widened(function, path, column)
            for i, other in enumerate(column):
                _check_alike(function, path, i, other.values, column[0].values)
        elif isinstance(field, Tensor):
            for i, other in enumerate(column):
                _check_alike(function, path, i, other, field)


def _check_forms(function: str, path: str, column: Sequence[Packed]) -> None:
    for i, packed in enumerate(column):
        if type(packed) is not type(column[0]):
            raise TypeError(
                f"{function}: {path} is {_form(packed)} in input {i}, {_form(column[0])} in input"
                " 0; PackedRagged.from_padded and PackedRagged.to_padded give the other form"
            )


def _form(packed: Packed) -> str:
    return "a PackedRagged" if isinstance(packed, PackedRagged) else "a PackedTensor of one width"


def _check_alike(function: str, path: str, i: int, tensor: Tensor, first: Tensor) -> None:
    check_alike(function, f"{path} of input {i}", tensor, "that of input 0", first)


def widened(function: str, path: str, column: Sequence[Any]) -> list[Any]:
    """Integer fields in the widest dtype among them; others as they are. Of one form."""
    dtypes = {packed.dtype for packed in column}
    if len(dtypes) == 1 or any(dtype.is_floating_point for dtype in dtypes):
        return list(column)
    widest = max(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)))
    try:
        return [packed.widen(widest) for packed in column]
    except TypeError as error:
        raise TypeError(f"{function}: {path}: {error}") from None


def join_fields(function: str, parts: Sequence[dict[str, Any]], prefix: str = "") -> dict[str, Any]:
    """Fields that ``check_joinable`` let pass, one after another."""
    joined: dict[str, Any] = {}
    for key, field in parts[0].items():
        path = f"{prefix}{key}"
        column = [part[key] for part in parts]
        if isinstance(field, dict):
            joined[key] = join_fields(function, column, f"{path}.")
        elif isinstance(field, PackedTensor | PackedRagged):
            try:
                joined[key] = type(field).cat(widened(function, path, column))
            except ValueError as error:
                raise ValueError(f"{function}: {path}: {error}") from None
        elif isinstance(field, tuple):
            joined[key] = tuple(chain.from_iterable(column))
        else:
            joined[key] = join_rows(column)
    return joined


# --- small things ---------------------------------------------------------------------------------


def shown(field: Any) -> str:
    """Kind, shape and dtype of a field; no value is read."""
    if isinstance(field, PackedTensor):
        return f"{field.num_rows} packed rows {list(field.row_shape)} {field.dtype}"
    if isinstance(field, PackedRagged):
        return f"{field.num_rows} ragged rows of {field.num_ids} ids"
    if isinstance(field, tuple):
        return "list"
    return f"{list(field.shape)} {field.dtype}"


def equal_fields(one: Any, other: Any) -> bool:
    """Same kind, dtype, device and values."""
    if kind_of(one) != kind_of(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_fields(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list) and isinstance(other, type(one)):
        return len(one) == len(other) and all(map(equal_fields, one, other))
    if isinstance(one, PackedSegments):
        return one == other
    if isinstance(one, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and one.device == other.device and equal_values(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(np.all(one == other))


# --- shipping -------------------------------------------------------------------------------------


class Shipped:
    """A tensor on its way: pickled as its own elements alone, by protocol 5 as one buffer.

    What is loaded is a tensor, not a ``Shipped``.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        tensor = self.tensor
        if int(protocol) >= 5 and tensor.device.type == "cpu" and not tensor.requires_grad:
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
            if tensor.numel():
                data = tensor.view(-1).view(torch.uint8).numpy()
            else:
                data = np.empty(0, dtype=np.uint8)
            buffer = PickleBuffer(data)  # type: ignore[arg-type]  # arrays are buffers
            return _from_buffer, (buffer, tensor.dtype, tuple(tensor.shape))
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        packed = PackedTensor.from_lengths(rows, [rows.shape[0]])  # it knows the other ways
        return _from_packed, (packed, tensor.dim() == 0)


def _from_buffer(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = from_buffer(buffer, dtype, shape)
    # a write to read-only pages would end the process, and these fields are written by trainers
    return tensor.clone() if memoryview(buffer).readonly else tensor


def _from_packed(packed: PackedTensor, is_scalar: bool) -> Tensor:
    return packed.values[0] if is_scalar else packed.values


def received(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as they are held; ``copy`` hands over what was never pickled."""
    return {
        key: received(field)
        if isinstance(field, dict)
        else field.tensor
        if isinstance(field, Shipped)
        else field
        for key, field in fields.items()
    }
