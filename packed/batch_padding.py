"""What the fields of padding and of synthetic trajectories hold. Nothing here knows a batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packhorse.packed.batch_parts import apply, kind_of, leaves
from packhorse.packed.fields import ROUTER_PADDING_MASK_FIELD, PackedField
from packhorse.packed.host import without_waiting


def check_zeroed(function: str, fields: Mapping[str, Any], zeros: frozenset[str]) -> None:
    """Refuse a field that is not there, or of which nobody knows what a zero is."""
    found = dict(leaves(fields))
    for path in sorted(zeros):
        if path not in found:
            raise ValueError(f"{function}: zeroed names {path}, which is no field")
        field = found[path]
        if isinstance(field, tuple):
            legal = all(isinstance(thing, Tensor | int | float) for thing in field[:1])
        else:
            legal = isinstance(field, Tensor)
        if not legal:
            raise ValueError(
                f"{function}: zeroed names {path}, which is {kind_of(field)}; it must be dense, or"
                " a list of tensors or numbers"
            )


def padding_fields(
    function: str,
    fields: Mapping[str, Any],
    count: int,
    zeros: frozenset[str],
    rules: Mapping[str, PackedField],
) -> dict[str, Any]:
    """``count`` copies of trajectory 0, but zeros in ``zeros``, packed fields by their rule, and
    the router told to count none of their tokens."""

    def pad_dense(path: str, dense: Tensor) -> Tensor:
        if path in zeros:
            return dense.new_zeros((count, *dense.shape[1:]))
        if path == ROUTER_PADDING_MASK_FIELD:
            return dense.new_ones((count, *dense.shape[1:]))
        return dense[:1].expand(count, *(-1 for _ in dense.shape[1:]))

    def pad_listed(path: str, listed: tuple[Any, ...]) -> tuple[Any, ...]:
        thing = listed[0]
        if path in zeros:
            thing = torch.zeros_like(thing) if isinstance(thing, Tensor) else type(thing)(0)
        return (thing,) * count

    return apply(
        function,
        fields,
        pad_dense,
        lambda path, packed: rules[path].padding(packed, count),
        pad_listed,
    )


def synthetic_fields(
    function: str,
    fields: Mapping[str, Any],
    count: int,
    attended: str | None,
    values: Mapping[str, Any],
    rules: Mapping[str, PackedField],
) -> dict[str, Any]:
    """``count`` trajectories of one attended token, like those of ``fields``."""
    dense_fields = {path: leaf for path, leaf in leaves(fields) if isinstance(leaf, Tensor)}
    for path in [*values, *([] if attended is None else [attended])]:
        if path not in dense_fields:
            raise KeyError(f"{function}: no dense field {path!r}")
    if attended is not None:
        shape = list(dense_fields[attended].shape)
        if len(shape) != 2 or shape[1] == 0:
            raise ValueError(f"{function}: {attended} must be [B, S] with a column, got {shape}")
    rows = {path: _row(function, path, value, dense_fields[path]) for path, value in values.items()}

    def make_dense(path: str, dense: Tensor) -> Tensor:
        made = dense.new_zeros((count, *dense.shape[1:]))
        if path in rows:
            made.copy_(rows[path].expand_as(made))
        elif path == attended:
            made[:, 0] = 1
        elif path == ROUTER_PADDING_MASK_FIELD:
            made.fill_(1)
        return made

    def make_listed(_: str, listed: tuple[Any, ...]) -> tuple[Any, ...]:
        thing = listed[0] if listed else None
        if isinstance(thing, Tensor):
            thing = thing.new_empty((0, *thing.shape[1:]))
        else:
            thing = None
        return (thing,) * count

    return apply(
        function,
        fields,
        make_dense,
        lambda path, packed: rules[path].synthetic(packed, count),
        make_listed,
    )


def _row(function: str, path: str, value: Any, dense: Tensor) -> Tensor:
    """``value``, a number or a row, in the dtype and on the device of ``dense`` [B, ...]."""
    try:
        row = torch.as_tensor(value).to(dense.dtype)
        return without_waiting(row, dense.device).expand(dense.shape[1:])
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"{function}: the value of {path} must be a number or a row {list(dense.shape[1:])}"
        ) from None
