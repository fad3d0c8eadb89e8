"""What may be shipped to another process, and the parts of a batch that ranks get.

Shipped is what lies on the host and pickles by protocol 5 as buffers: a tensor of a device or of an
autograd graph would go through a pickle's own bytes, copied on the way, so it is refused by name.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from packhorse.packed.batch import Batch
from packhorse.packed.batch_parts import leaves
from packhorse.packed.host import check_total, host_int, is_scalar, segment_ids, slice_bounds
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor

#: What is put, shared or staged as one.
Shippable: TypeAlias = "Batch | PackedTensor | PackedRagged"

_KINDS = (Batch, PackedTensor, PackedRagged)


def check_kind(function: str, value: Any, what: str = "value") -> None:
    if not isinstance(value, _KINDS):
        raise TypeError(
            f"{function}: {what} must be a Batch, a PackedTensor or a PackedRagged, got"
            f" {type(value).__name__}"
        )


def check_shippable(function: str, value: Any) -> None:
    """A ``TypeError`` or ``ValueError`` where ``value`` is no batch, or not all on the host."""
    check_kind(function, value)
    for path, held in tensors_of(value, metadata=True):
        if held.device.type != "cpu":
            raise ValueError(
                f"{function}: {path} is on {held.device}; only host memory is shipped, move it"
                " there first: to('cpu')"
            )
        if getattr(held, "requires_grad", False):
            raise ValueError(f"{function}: {path} requires grad; ship its detach()")


def tensors_of(value: Shippable, *, metadata: bool = False) -> Iterator[tuple[str, Any]]:
    """(path, tensor or packed field) of all that ``value`` holds, on request its metadata too."""
    if not isinstance(value, Batch):
        yield "values", value
        return
    for path, leaf in leaves(value.fields):
        if not isinstance(leaf, tuple):
            yield path, leaf
            continue
        for i, thing in enumerate(leaf):
            if isinstance(thing, Tensor | PackedTensor | PackedRagged):
                yield f"{path} of trajectory {i}", thing
    for key, thing in value.metadata.items() if metadata else ():
        if isinstance(thing, Tensor | PackedTensor | PackedRagged):
            yield f"metadata {key!r}", thing


def parts_of(function: str, value: Shippable, parts: Any) -> list[slice | np.ndarray]:
    """What ``value[...]`` takes for each part: that many slices of consecutive trajectories, their
    sizes as even as they can be, or the trajectories given; all are there."""
    count = len(value)
    if is_scalar(parts):
        number = host_int(parts, f"{function}: parts")
        if number < 1:
            raise ValueError(f"{function}: parts must be positive, got {number}")
        check_total(function, number, "parts")
        size, more = divmod(count, number)
        stops = [(i + 1) * size + min(i + 1, more) for i in range(number)]
        return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise TypeError(
            f"{function}: parts must be a number, or the trajectories of each part, got"
            f" {type(parts).__name__}"
        )
    selectors: list[slice | np.ndarray] = []
    for i, part in enumerate(parts):
        where = f"{function}: part {i}"
        if isinstance(part, slice):
            start, stop, step = slice_bounds(part, count, where)
            if step == 1:
                selectors.append(slice(start, max(start, stop)))
                continue
        elif is_scalar(part):
            raise TypeError(f"{where} must be the trajectories of a rank, got {part!r}")
        given = list(part) if isinstance(part, tuple) else part  # of a MicrobatchPlan
        selectors.append(segment_ids(given, count, where))
    return selectors
