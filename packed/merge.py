"""Operations on a generator's output: a mapping of per-trajectory fields, known and unknown ones.

    concatenate_outputs(outputs)                     all trajectories of several outputs
    select_trajectories(output, [0, 2, 3])           some of them, in any order
    replace_trajectories(output, [1], [3])           trajectory 1 becomes a copy of trajectory 3

A field holds one item a trajectory: a list or tuple, an array or tensor of B rows, a packed field
of B segments, or a mapping of fields (dict-of-lists, to any depth). None: the field is not there.
What belongs to the whole output (metrics) is named in ``shared``, ``"env.name"`` inside a mapping:
anything else without B items is an error, so no field stays behind. No input is changed; items of
lists are not copied, but for those that appear twice, and packed fields may share memory with the
input. ``merge_steps`` is in ``steps.py``.

Sizes: B trajectories.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.collate import ROUTES_FIELD, SUPPORT_FIELD
from packhorse.packed.host import Selector, segment_ids
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor

#: Fields by their names.
Output: TypeAlias = Mapping[str, Any]

_ROUTE_DTYPES = (torch.uint8, torch.int16, torch.int32)  # narrow to wide


# --- the operations -------------------------------------------------------------------------------


@ranged
def count_trajectories(output: Output, *, shared: Collection[str] = ()) -> int:
    """B of an output, all of whose fields must agree.

    Args:
        output: fields of B items each.
        shared: fields that belong to the whole output.

    Raises:
        TypeError: ``output`` is no mapping, or a field is not one item a trajectory.
        ValueError: two fields have different numbers of trajectories, or none has any.
    """
    return count_items("count_trajectories", output, shared)


@ranged
def select_trajectories(
    output: Output, trajectories: Selector, *, shared: Collection[str] = ()
) -> dict[str, Any]:
    """The named trajectories, in their order, in every field.

    Args:
        output: fields of B items each.
        trajectories: a list, array or tensor of host integers (negative ones count from the end) or
            of B booleans, a range, or a slice. None at all is legal: every field is then empty.
        shared: fields that belong to the whole output; kept as they are.

    Returns:
        A field of the same kind for each field. A trajectory named twice is copied.

    Raises:
        TypeError: ``output`` or a field is of a wrong kind; an index is no host integer.
        ValueError: numbers of trajectories differ; a mask has another length.
        IndexError: an index is out of range.
    """
    name = "select_trajectories"
    ids = segment_ids(trajectories, count_items(name, output, shared), name)
    return _selected(output, ids, shared)


@ranged
def concatenate_outputs(
    outputs: Sequence[Output],
    *,
    shared: Mapping[str, Callable[[list[Any]], Any]] | None = None,
) -> dict[str, Any]:
    """The trajectories of several outputs, one after another, in every field.

    Args:
        outputs: one or more, with the same fields. A field that is None is so in all of them.
        shared: for each field that belongs to the whole output, what makes one value of the
            outputs' values.

    Returns:
        A field of the same kind for each field. Packed routes are widened to the widest dtype of
        uint8, int16 and int32; packed supports are filled with -1 to the widest row.

    Raises:
        TypeError: an argument or a field is of a wrong kind, or a field's kinds or dtypes differ.
        ValueError: there are no outputs; one lacks a field; numbers of trajectories differ in an
            output; row shapes differ. Names the field and the output.
    """
    name = "concatenate_outputs"
    shared = {} if shared is None else shared
    if not isinstance(outputs, Sequence) or isinstance(outputs, str | bytes):
        raise TypeError(f"{name}: outputs must be a sequence, got {type(outputs).__name__}")
    if not outputs:
        raise ValueError(f"{name}: there are no outputs")
    for i, output in enumerate(outputs):
        count_items(f"{name}: output {i}", output, shared)
    return _concatenated(name, outputs, shared, "")


@ranged
def replace_trajectories(
    output: Output,
    trajectories: Selector,
    replacements: Selector,
    *,
    source: Output | None = None,
    shared: Collection[str] = (),
) -> dict[str, Any]:
    """Put copies of other trajectories in the place of some, in every field.

    Args:
        output: fields of B items each.
        trajectories: those to be replaced, each once; as in ``select_trajectories``.
        replacements: as many, of ``source``.
        source: an output with the same fields; by default ``output`` itself, as it was before.
        shared: fields that belong to the whole output; those of ``output`` are kept.

    Raises:
        TypeError, ValueError, IndexError: as ``select_trajectories`` and ``concatenate_outputs``; a
            trajectory is replaced twice, or there are not as many replacements.
    """
    name = "replace_trajectories"
    num_trajectories = count_items(name, output, shared)
    ids = segment_ids(trajectories, num_trajectories, name)
    if np.unique(ids).size != ids.size:
        twice = ids[np.flatnonzero(np.bincount(ids)[ids] > 1)[0]]
        raise ValueError(f"{name}: trajectory {twice} is replaced twice")
    order = np.arange(num_trajectories)
    if source is None:
        given = segment_ids(replacements, num_trajectories, f"{name}: replacements")
    else:
        num_others = count_items(f"{name}: source", source, shared)
        given = segment_ids(replacements, num_others, f"{name}: replacements") + num_trajectories
    if given.size != ids.size:
        raise ValueError(f"{name}: {given.size} replacements for {ids.size} trajectories")
    order[ids] = given
    if source is not None:
        keep_first = {field: lambda values: values[0] for field in shared}
        output = _concatenated(name, [output, source], keep_first, "")
    return _selected(output, order, shared, copied=ids)


# --- walking over fields --------------------------------------------------------------------------


def count_items(name: str, output: Any, shared: Collection[str]) -> int:
    """B of an output; ``name`` begins each error."""
    if not isinstance(output, Mapping):
        raise TypeError(f"{name}: an output must be a mapping, got {type(output).__name__}")
    first: tuple[str, int] | None = None
    for path, value in _leaves(output, shared, ""):
        size = _num_items(name, path, value)
        if first is None:
            first = path, size
        elif size != first[1]:
            raise ValueError(f"{name}: {path} has {size} trajectories, {first[0]} has {first[1]}")
    if first is None:
        raise ValueError(f"{name}: no field holds one item a trajectory")
    return first[1]


def _leaves(fields: Output, shared: Collection[str], above: str) -> list[tuple[str, Any]]:
    """(path, value) of each field that is there and is per trajectory."""
    found: list[tuple[str, Any]] = []
    for key, value in fields.items():
        path = f"{above}{key}"
        if value is None or path in shared:
            continue
        if isinstance(value, Mapping):
            found += _leaves(value, shared, f"{path}.")
        else:
            found.append((path, value))
    return found


def is_listed(value: Any) -> bool:
    """A list or tuple of items; a NamedTuple is one record."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def is_packed(value: Any) -> bool:
    """A packed field of any class: its own ``cat``, a length, and selection by host indices."""
    return hasattr(type(value), "cat") and hasattr(type(value), "__len__")


def _num_items(name: str, path: str, value: Any) -> int:
    if is_listed(value) or is_packed(value):
        return len(value)
    if isinstance(value, np.ndarray | Tensor) and value.ndim:
        return value.shape[0]
    what = type(value).__name__
    if isinstance(value, np.ndarray | Tensor):
        what += " of no dimension"
    raise TypeError(
        f"{name}: {path} is not one item a trajectory, but {what}; name it in shared= if it belongs"
        " to the whole output"
    )


def _selected(
    fields: Output,
    ids: np.ndarray,
    shared: Collection[str],
    above: str = "",
    copied: np.ndarray | None = None,
) -> dict[str, Any]:
    """Items ``ids`` of each field; of lists those at ``copied`` and repeated ones as copies."""
    if copied is None:
        _, firsts = np.unique(ids, return_index=True)
        copied = np.setdiff1d(np.arange(ids.size), firsts)
    chosen: dict[str, Any] = {}
    for key, value in fields.items():
        path = f"{above}{key}"
        if value is None or path in shared:
            chosen[key] = value
        elif isinstance(value, Mapping):
            chosen[key] = _selected(value, ids, shared, f"{path}.", copied)
        else:
            chosen[key] = select_items(value, ids, copied)
    return chosen


def select_items(value: Any, ids: np.ndarray, copied: np.ndarray) -> Any:
    """Items ``ids`` of one field; of a list those at the places ``copied`` as copies."""
    if is_packed(value) or isinstance(value, np.ndarray):
        items = value[ids]
        if isinstance(items, np.ndarray) and items.dtype == object:
            for place in copied:
                items[place] = copy.deepcopy(items[place])
        return items
    if isinstance(value, Tensor):
        return value[torch.from_numpy(ids)]
    items = [value[i] for i in ids.tolist()]
    for place in copied.tolist():
        items[place] = copy.deepcopy(items[place])
    return tuple(items) if isinstance(value, tuple) else items


def _concatenated(
    name: str, outputs: Sequence[Output], shared: Mapping[str, Callable], above: str
) -> dict[str, Any]:
    first = outputs[0]
    for i, output in enumerate(outputs):
        differing = sorted(map(str, first.keys() ^ output.keys()))
        if differing:
            owner, other = (0, i) if differing[0] in map(str, first) else (i, 0)
            raise ValueError(
                f"{name}: {above}{differing[0]} is in output {owner}, but not in output {other}"
            )
    joined: dict[str, Any] = {}
    for key in first:
        path, values = f"{above}{key}", [output[key] for output in outputs]
        if path in shared:
            joined[key] = shared[path](values)
            continue
        kinds = [_kind(value) for value in values]
        for i, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise TypeError(
                    f"{name}: {path} is {kinds[0]} in output 0, but {kind} in output {i}"
                )
        if values[0] is None:
            joined[key] = None
        elif isinstance(values[0], Mapping):
            joined[key] = _concatenated(name, values, shared, f"{path}.")
        else:
            joined[key] = _concatenated_items(name, path, values)
    return joined


def _kind(value: Any) -> str:
    for kind in (Mapping, np.ndarray, Tensor, list, tuple):
        if isinstance(value, kind):
            return kind.__name__
    return "None" if value is None else type(value).__name__


def _concatenated_items(name: str, path: str, values: list[Any]) -> Any:
    if isinstance(values[0], list | tuple):
        items = [item for value in values for item in value]
        return tuple(items) if isinstance(values[0], tuple) else items
    if isinstance(values[0], PackedTensor):
        field = path.rpartition(".")[2]
        if field == ROUTES_FIELD:
            values = _widened(values)
        elif field == SUPPORT_FIELD:
            values = _filled(values)
    plain = isinstance(values[0], PackedTensor | np.ndarray | Tensor)
    for i, value in enumerate(values if plain else ()):
        _check_alike(f"{name}: {path}", i, value, values[0])
    if is_packed(values[0]):
        try:
            return type(values[0]).cat(values)
        except ValueError as error:  # past int32
            raise ValueError(f"{name}: {path}: {error}") from None
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else torch.cat(values)


def _check_alike(where: str, i: int, value: Any, first: Any) -> None:
    both_text = isinstance(value, np.ndarray) and value.dtype.kind == first.dtype.kind == "U"
    if value.dtype != first.dtype and not both_text:
        raise TypeError(f"{where} is {first.dtype} in output 0, but {value.dtype} in output {i}")
    shapes = [
        tuple(each.row_shape if isinstance(each, PackedTensor) else each.shape[1:])
        for each in (first, value)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{where} has row shape {shapes[0]} in output 0, but {shapes[1]} in output {i}"
        )
    if not isinstance(value, np.ndarray) and value.device != first.device:
        raise ValueError(f"{where} is on {first.device} in output 0, but {value.device} in {i}")


def _widened(routes: list[PackedTensor]) -> list[PackedTensor]:
    if not all(packed.dtype in _ROUTE_DTYPES for packed in routes):
        return routes
    widest = max((packed.dtype for packed in routes), key=_ROUTE_DTYPES.index)
    return [packed.widen(widest) for packed in routes]


def _filled(supports: list[PackedTensor]) -> list[PackedTensor]:
    if not all(len(packed.row_shape) == 1 for packed in supports):
        return supports
    width = max(packed.row_shape[0] for packed in supports)
    filled = []
    for packed in supports:
        if packed.row_shape[0] < width:
            missing = (0, width - packed.row_shape[0])
            values = torch.nn.functional.pad(packed.values, missing, value=NO_CANDIDATE)
            packed = PackedTensor(values, packed.cu_seqlens, lengths=packed.lengths)
        filled.append(packed)
    return filled
