"""The fields of a generator's output, read and checked for ``make_inputs``.

``name`` begins each error: the function that the user called.

Sizes: B trajectories, R response tokens, L captured layers, K experts a token, E experts, V
vocabulary, C width of the support.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse.packed.batch import LOSS_MASK_FIELD
from packhorse.packed.collate import (
    LOGPROBS_FIELD,
    ROUTES_FIELD,
    SUPPORT_FIELD,
    SupportRows,
    check_logprobs,
    pack_routes,
    pack_support,
)
from packhorse.packed.collate_ragged import pack_ragged_support
from packhorse.packed.fields import PACKED_FIELDS
from packhorse.packed.inputs_cut import PROMPTS_FIELD, RESPONSES_FIELD, items_of
from packhorse.packed.merge import Output, is_packed
from packhorse.packed.replies import read_loss_mask, read_token_ids
from packhorse.packed.tensor import PackedTensor

SEQUENCES_FIELD: Final = "sequences"
RESPONSE_MASK_FIELD: Final = "response_mask"
REWARDS_FIELD: Final = "rewards"
LENGTHS_FIELD: Final = "lengths"
RESPONSE_LENGTHS_FIELD: Final = "response_lengths"
FIRST_COLUMNS_FIELD: Final = "first_columns"
MISSING_FIELD: Final = "missing"
APPENDED_FIELD: Final = "appended"
EXCUSED_FIELD: Final = "excused"

#: Listed fields of host values, and what a synthetic trajectory has: one token at column 0.
HOST_FIELDS: Final[Mapping[str, Any]] = {
    LENGTHS_FIELD: 1,
    RESPONSE_LENGTHS_FIELD: 0,
    FIRST_COLUMNS_FIELD: 0,
    MISSING_FIELD: False,
}
LOSS_MASKS_FIELD: Final = "loss_masks"
#: Fields of an output that become others here.
_READ: Final = (
    PROMPTS_FIELD, RESPONSES_FIELD, LOSS_MASKS_FIELD, REWARDS_FIELD, LOGPROBS_FIELD, APPENDED_FIELD,
    EXCUSED_FIELD, MISSING_FIELD, ROUTES_FIELD, SUPPORT_FIELD,
)  # fmt: skip


def field_items(name: str, output: Output, field: str) -> list[Any] | None:
    """One item a trajectory, or None where no trajectory has the field."""
    value = output.get(field)
    if value is None:
        return None
    items = items_of(f"{name}: {field}", value)
    absent = [item is None for item in items]
    if items and all(absent):
        return None
    if any(absent):
        raise ValueError(
            f"{name}: {field} is None in trajectory {absent.index(True)}, but not in trajectory"
            f" {absent.index(False)}"
        )
    return items


def token_ids_of(name: str, output: Output, field: str, vocab_size: int | None) -> list[np.ndarray]:
    if output.get(field) is None:
        raise ValueError(f"{name}: {field} is missing")
    items = items_of(f"{name}: {field}", output[field])
    return [
        read_token_ids(f"{name}: {field} of trajectory {i}", ids, vocab_size)
        for i, ids in enumerate(items)
    ]


def response_fields(
    name: str, output: Output, tokens: list[int]
) -> dict[str, tuple[list[np.ndarray], Any]]:
    """By field, [R] a trajectory and the dtype it is stored in; ``tokens`` are B times R."""
    given = {field: field_items(name, output, field) for field in (
        LOSS_MASKS_FIELD, REWARDS_FIELD, LOGPROBS_FIELD, APPENDED_FIELD, EXCUSED_FIELD,
    )}  # fmt: skip

    def masks(field: str, items: list[Any]) -> list[np.ndarray]:
        return [
            read_loss_mask(f"{name}: {field} of trajectory {i}", _whole(item), tokens[i])
            for i, item in enumerate(items)
        ]

    losses = given[LOSS_MASKS_FIELD]
    trained = (
        [np.ones(count, dtype=np.bool_) for count in tokens]
        if losses is None
        else masks(LOSS_MASKS_FIELD, losses)
    )
    found: dict[str, tuple[list[np.ndarray], Any]] = {LOSS_MASK_FIELD: (trained, np.float32)}
    if given[REWARDS_FIELD] is not None:
        found[REWARDS_FIELD] = _rewards(name, given[REWARDS_FIELD], tokens), np.float32
    if given[LOGPROBS_FIELD] is not None:
        with errors_of(name, "check_logprobs"):
            found[LOGPROBS_FIELD] = check_logprobs(given[LOGPROBS_FIELD], tokens), np.float32
    for field, other in ((APPENDED_FIELD, EXCUSED_FIELD), (EXCUSED_FIELD, APPENDED_FIELD)):
        items = given[other] if given[field] is None else given[field]
        if items is not None:
            found[field] = masks(field, items), np.bool_
    return found


def _whole(mask: Any) -> Any:
    """A mask of floats 0 and 1 as booleans; any other as it is."""
    if isinstance(mask, Tensor) and mask.is_floating_point() and mask.device.type == "cpu":
        mask = mask.detach().to(torch.float32).numpy()
    elif isinstance(mask, list | tuple) and any(isinstance(value, float) for value in mask):
        return [bool(value) for value in mask] if all(v in (0, 1) for v in mask) else mask
    floats = isinstance(mask, np.ndarray) and mask.dtype.kind == "f"
    return mask.astype(np.bool_) if floats and ((mask == 0) | (mask == 1)).all() else mask


def _rewards(name: str, items: list[Any], tokens: list[int]) -> list[np.ndarray]:
    """[R] float32 a trajectory; one number becomes that of its last response token."""
    read = []
    for i, item in enumerate(items):
        where = f"{name}: {REWARDS_FIELD} of trajectory {i}"
        if isinstance(item, Tensor):
            if item.device.type != "cpu":
                raise TypeError(f"{where} is on {item.device}; it must be on the host")
            item = item.detach().numpy() if item.dtype != torch.bfloat16 else item.float().numpy()
        try:
            array = np.asarray(item)
        except ValueError:  # lists of different lengths
            raise TypeError(f"{where} must hold numbers, got lists") from None
        if array.size and array.dtype.kind not in "biuf":
            raise TypeError(f"{where} must be a number, or one a response token, got {item!r:.60}")
        with np.errstate(over="ignore"):  # past float32 it is not finite, as is said below
            read.append(array.astype(np.float32))
    one_each = [array.ndim == 0 for array in read]
    if any(one_each) and not all(one_each):
        raise ValueError(
            f"{name}: {REWARDS_FIELD} is one number in trajectory {one_each.index(True)}, but one a"
            f" response token in trajectory {one_each.index(False)}"
        )
    rewards = []
    for i, (array, count) in enumerate(zip(read, tokens, strict=True)):
        where = f"{name}: {REWARDS_FIELD} of trajectory {i}"
        if not np.isfinite(array).all():
            raise ValueError(f"{where} is not finite")
        if array.ndim == 0:
            if count == 0 and array != 0:
                raise ValueError(f"{where} is {array}, and it has no response token to hold it")
            row = np.zeros(count, dtype=np.float32)
            row[-1:] = array
            array = row
        if array.shape != (count,):
            raise ValueError(f"{where} has shape {array.shape}, expected [{count}] or one number")
        rewards.append(array)
    return rewards


def routes_of(
    name: str,
    output: Output,
    lengths: list[int],
    num_experts: Any,
    row_shape: tuple[int | None, int | None],  # L and K, None where not known
    moe_layers: Any,
) -> dict[str, Any]:
    flags = output.get(MISSING_FIELD)
    missing = [False] * len(lengths)
    if flags is not None:
        for i, flag in enumerate(items_of(f"{name}: {MISSING_FIELD}", flags)):
            if isinstance(flag, Tensor) and flag.ndim == 0 and flag.device.type == "cpu":
                flag = flag.numpy()[()]
            if not isinstance(flag, bool | np.bool_):
                raise TypeError(
                    f"{name}: {MISSING_FIELD} of trajectory {i} must be a bool, got {flag!r:.60}"
                )
            missing[i] = bool(flag)
    fields = {} if flags is None else {MISSING_FIELD: missing}
    value = output.get(ROUTES_FIELD)
    if not lengths and None not in row_shape and not isinstance(value, PackedTensor):
        value = []  # of no trajectory
    elif value is None:
        return fields
    if missing and all(missing):
        raise ValueError(
            f"{name}: {ROUTES_FIELD} is missing in all {len(missing)} trajectories, so there is"
            " nothing to replay"
        )
    if isinstance(value, PackedTensor):
        rule = PACKED_FIELDS[ROUTES_FIELD]
        rule.check(name, value)
        rule.check_lengths(name, value, lengths)
        _check_on_host(name, ROUTES_FIELD, value)
        for size, given, what in zip(
            row_shape, value.row_shape, ("layers", "experts a token"), strict=True
        ):
            if size is not None and size != given:
                raise ValueError(f"{name}: {ROUTES_FIELD} has {given} {what}, expected {size}")
        return fields | {ROUTES_FIELD: value}
    routes = items_of(f"{name}: {ROUTES_FIELD}", value)
    known = [i for i, ids in enumerate(routes) if ids is not None]
    if not known and (lengths or None in row_shape):
        return fields
    for i, ids in enumerate(routes):
        if ids is None and not missing[i]:
            raise ValueError(
                f"{name}: {ROUTES_FIELD} is None in trajectory {i}, but not in trajectory"
                f" {known[0]}; {MISSING_FIELD} marks a trajectory whose routes are lost"
            )
    shape = (1, 1)
    for i in known[:1]:
        if getattr(routes[i], "ndim", 0) == 3:
            shape = tuple(routes[i].shape[1:])
            if 0 in shape:
                raise ValueError(
                    f"{name}: {ROUTES_FIELD} of trajectory {i} has {shape[0]} layers and {shape[1]}"
                    f" experts a token (shape {tuple(routes[i].shape)})"
                )
    num_layers, topk = (
        found if size is None else size for size, found in zip(row_shape, shape, strict=True)
    )
    empty = np.empty((0, num_layers, topk), dtype=np.uint8)
    routes = [empty if ids is None else ids for ids in routes]
    with errors_of(name, "pack_routes"):
        packed = pack_routes(
            routes, lengths, num_experts=num_experts, topk=topk, num_layers=num_layers,
            moe_layers=moe_layers,
        )  # fmt: skip
    return fields | {ROUTES_FIELD: packed}


def support_of(
    name: str,
    output: Output,
    responses: Any,  # B times [R]
    vocab_size: int | None,
    width: int | None,
    ragged: bool,
) -> dict[str, Any]:
    value = output.get(SUPPORT_FIELD)
    if value is None:
        return {}
    if is_packed(value):
        if ragged == isinstance(value, PackedTensor):
            raise TypeError(
                f"{name}: {SUPPORT_FIELD} is a {type(value).__name__} already, ragged={ragged}"
            )
        PACKED_FIELDS[SUPPORT_FIELD].check(name, value)
        _check_on_host(name, SUPPORT_FIELD, value)
        rows, tokens = np.diff(value.bounds), np.array([ids.size for ids in responses])
        if (rows != tokens).any():
            i = int(np.argmax(rows != tokens))
            raise ValueError(
                f"{name}: {SUPPORT_FIELD} of trajectory {i} has {rows[i]} rows for {tokens[i]}"
                " response tokens"
            )
        return {SUPPORT_FIELD: value}
    support: Any = value
    if not isinstance(value, SupportRows):
        support = field_items(name, output, SUPPORT_FIELD)
    if support is None or not (responses or vocab_size):
        return {}
    if vocab_size is None:
        raise TypeError(f"{name}: vocab_size is needed for {SUPPORT_FIELD}")
    with errors_of(name, "pack_support", "pack_ragged_support"):
        if ragged:
            if width is not None:
                raise ValueError(f"{name}: support_width is not of a ragged support")
            return {SUPPORT_FIELD: pack_ragged_support(support, responses, vocab_size=vocab_size)}
        packed = pack_support(support, responses, vocab_size=vocab_size, width=width)
        return {SUPPORT_FIELD: packed}


def _check_on_host(name: str, field: str, packed: Any) -> None:
    if packed.device.type != "cpu":
        raise TypeError(f"{name}: {field} is on {packed.device}; it must be on the host")


def check_swapped(name: str, routes: Any, support: Any) -> None:
    """Refuse routes that are given as the support, and the reverse."""
    if _looks_like(routes) == "support" and _looks_like(support) == "routes":
        raise ValueError(
            f"{name}: {ROUTES_FIELD} and {SUPPORT_FIELD} are swapped: the first holds rows of ids,"
            " the second rows [L, K]"
        )


def _looks_like(field: Any) -> str:
    if isinstance(field, list | tuple) and not isinstance(field, SupportRows):
        field = next((item for item in field if item is not None), None)
    if isinstance(field, PackedTensor):
        field = field.values
    if isinstance(field, np.ndarray | Tensor):
        return {2: "support", 3: "routes"}.get(field.ndim, "neither")
    return "support" if isinstance(field, list | tuple) or is_packed(field) else "neither"


def carried_fields(
    name: str, fields: Output, shared: Collection[str], above: str, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Fields that nothing is made of; those of the whole output go to ``metadata``."""
    carried: dict[str, Any] = {}
    for key, value in fields.items():
        path = f"{above}{key}"
        if value is None or (not above and key in _READ):
            continue
        if path in shared:
            if path in metadata:
                raise ValueError(f"{name}: {path} is named in shared=, but is made here")
            metadata[path] = value
        elif isinstance(value, Mapping):
            carried[key] = carried_fields(name, value, shared, f"{path}.", metadata)
        elif isinstance(value, np.ndarray):
            carried[key] = _carried_array(f"{name}: {path}", value)
        else:
            carried[key] = value
    return carried


def _carried_array(where: str, array: np.ndarray) -> Any:
    """A copy: a tensor of numbers, else a list."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{where} is a masked array; fill it first")
    if array.dtype.kind not in "biuf":
        return array.tolist()
    try:  # torch knows the machine's own byte order alone
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    except TypeError:  # long double
        raise TypeError(
            f"{where} must hold numbers of a dtype of torch, got {array.dtype}"
        ) from None


@contextmanager
def errors_of(name: str, *functions: str) -> Iterator[None]:
    """Errors of ``functions`` begin with ``name``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        for function in functions:
            text = text.removeprefix(f"{function}: ")
        if not text.startswith(f"{name}: "):
            text = f"{name}: {text}"
        raise type(error)(text) from None
