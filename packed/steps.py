"""The steps of a conversation, each with its whole prompt, merged into one trajectory.

    merge_steps({"prompt_token_ids": [[1, 2], [1, 2, 3, 4, 9, 9]], "response_ids": [[3, 4], [5]],
                 "loss_masks": [[1, 1], [1]]}, ["a", "a"])

    prompt [1, 2]    response [3, 4, 9, 9, 5]    loss_masks [1, 1, 0, 0, 1]

A step extends the one before where its prompt begins with all tokens so far; what the prompt has
beyond them is an observation. Otherwise it begins a trajectory of its own.
"""

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.collate import (
    LOGPROBS_FIELD,
    ROUTES_FIELD,
    SUPPORT_FIELD,
    SupportRows,
)
from packhorse.packed.host import host_ints
from packhorse.packed.host_arrays import integer_array
from packhorse.packed.merge import Output, count_items, is_listed, select_items
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor


class PerToken(NamedTuple):
    """A field of one row a response token; an observation token gets ``fill``, or with ``support``
    an empty row, -1 throughout in an array."""

    fill: Any = 0
    support: bool = False


#: What becomes of a field: the item of the first or last step, a row a token, or what a function
#: makes of the steps' items.
StepRule: TypeAlias = "str | PerToken | Callable[[list[Any]], Any]"

#: The rule of the response ids: an observation token has its own id.
_TOKEN_IDS: Final = PerToken(None)

#: Fields whose meaning is known. Others need a rule.
STEP_RULES: Final[Mapping[str, StepRule]] = {
    "loss_masks": PerToken(0),
    "appended": PerToken(False),
    "excused": PerToken(False),
    "rewards": PerToken(0.0),
    LOGPROBS_FIELD: PerToken(0.0),
    SUPPORT_FIELD: PerToken(NO_CANDIDATE, support=True),
    "stop_reasons": "last",
    "is_last_step": "last",
    "trajectory_ids": "first",
}


#: torch joins them with no other dtype
_UNPROMOTED: Final = (torch.uint16, torch.uint32, torch.uint64)


class MergedSteps(NamedTuple):
    """Fields of the merged trajectories, and which steps became each."""

    output: dict[str, Any]
    steps: list[list[int]]


class _Steps(NamedTuple):
    """What is the same for all fields."""

    chains: list["_Chain"]
    prompt_lengths: list[int]
    response_lengths: list[int]
    rules: Mapping[str, StepRule]
    shared: Collection[str]


class _Chain(NamedTuple):
    """Steps of one trajectory, and the ids of the observation tokens before each."""

    steps: list[int]
    observed: list[np.ndarray]  # [n] int64


@ranged
def merge_steps(
    output: Output,
    groups: Sequence[Hashable],
    *,
    prompt_field: str = "prompt_token_ids",
    response_field: str = "response_ids",
    rules: Mapping[str, StepRule] | None = None,
    shared: Collection[str] = (),
) -> MergedSteps:
    """Make one trajectory of the steps of each conversation.

    Args:
        output: fields of one item a step; those of tokens are lists, or packed.
        groups: the conversation of each step. Its steps are in order, also with others between.
        prompt_field, response_field: the fields of token ids: [P] and [R] a step.
        rules: for a field (``"env.name"`` inside a mapping, or the mapping) what becomes of its
            steps' items: ``"first"`` or ``"last"`` of them, ``PerToken(fill)``, or a function of
            their list. ``STEP_RULES`` has those of known fields; ``rollout_expert_indices``
            [rows, L, K] is extended by the rows that are new, and its captured rows stay as they
            are.
        shared: fields that belong to the whole output; kept as they are.

    Returns:
        The trajectories in order of their conversations' first steps.

    Raises:
        TypeError: an argument or a field is of a wrong kind.
        ValueError: numbers of steps differ, a field has no rule, a per-token field has not as many
            rows as its step has response tokens, or there are more route rows than tokens. Names
            the field and the step.
    """
    name = "merge_steps"
    num_steps = count_items(name, output, shared)
    if not isinstance(groups, Sequence) or isinstance(groups, str | bytes):
        raise TypeError(f"{name}: groups must be a sequence, got {type(groups).__name__}")
    if len(groups) != num_steps:
        raise ValueError(f"{name}: {len(groups)} groups for {num_steps} steps")
    prompts = _token_ids(name, output, prompt_field)
    responses = _token_ids(name, output, response_field)
    steps = _Steps(
        _chains(name, groups, prompts, responses),
        [ids.size for ids in prompts],
        [ids.size for ids in responses],
        {**STEP_RULES, **(rules or {}), prompt_field: "first", response_field: _TOKEN_IDS},
        shared,
    )
    merged = _merged_fields(name, output, steps, "", None)
    return MergedSteps(merged, [chain.steps for chain in steps.chains])


# --- which steps belong together ------------------------------------------------------------------


def _token_ids(name: str, output: Output, field: str) -> list[np.ndarray]:
    if output.get(field) is None:
        raise ValueError(f"{name}: {field} is missing")
    items = _items(f"{name}: {field}", output[field])
    return [host_ints(ids, f"{name}: {field} of step {i}") for i, ids in enumerate(items)]


def _chains(
    name: str,
    groups: Sequence[Hashable],
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
) -> list[_Chain]:
    steps_of: dict[Hashable, list[int]] = {}
    for step, group in enumerate(groups):
        if isinstance(group, Tensor):  # each is another key, equal or not
            raise TypeError(f"{name}: group of step {step} is a tensor; give its number")
        try:
            steps_of.setdefault(group, []).append(step)
        except TypeError:
            what = type(group).__name__
            raise TypeError(f"{name}: group of step {step} is a {what}, not hashable") from None
    chains: list[_Chain] = []
    for steps in steps_of.values():
        known: np.ndarray | None = None
        for step in steps:
            prompt = prompts[step]
            if known is not None and np.array_equal(prompt[: known.size], known):
                chains[-1].steps.append(step)
                chains[-1].observed.append(prompt[known.size :])
            else:
                chains.append(_Chain([step], [prompt[:0]]))
            known = np.concatenate([prompt, responses[step]])
    return chains


# --- one field ------------------------------------------------------------------------------------


def _items(where: str, value: Any) -> list[Any]:
    """The items of a field that holds one of its own size a step."""
    if is_listed(value) or isinstance(value, PackedTensor):
        return list(value)
    if isinstance(value, PackedRagged) and value.device.type == "cpu":
        return [SupportRows(ids.numpy(), np.asarray(offsets)) for ids, offsets in value]
    raise TypeError(
        f"{where} must be a list or a packed field of the host to be merged, got"
        f" {type(value).__name__}"
    )


def _like(value: Any, items: list[Any]) -> Any:
    """A field of the kind of ``value`` that holds ``items``."""
    if isinstance(value, PackedTensor):
        if not items:
            return value[:0]
        return PackedTensor.from_segments(items)
    if isinstance(value, PackedRagged):
        if not items:
            return value[:0]
        return PackedRagged.from_segments(
            [
                (torch.from_numpy(rows.token_ids), torch.from_numpy(rows.row_offsets))
                for rows in items
            ]
        )
    return tuple(items) if isinstance(value, tuple) else items


def _merged_fields(
    name: str, fields: Output, steps: _Steps, above: str, outer_rule: Any
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, value in fields.items():
        path = f"{above}{key}"
        rule = steps.rules.get(path, outer_rule)
        if value is None or path in steps.shared:
            merged[key] = value
        elif isinstance(value, Mapping):
            merged[key] = _merged_fields(name, value, steps, f"{path}.", rule)
        elif rule is not None:
            merged[key] = _merged(f"{name}: {path}", value, steps, rule)
        elif path == ROUTES_FIELD:
            merged[key] = _merged_routes(f"{name}: {path}", value, steps)
        else:
            raise ValueError(f"{name}: {path} has no rule; give one in rules=, 'last' for example")
    return merged


def _merged(where: str, value: Any, steps: _Steps, rule: Any) -> Any:
    if isinstance(rule, str) and rule in ("first", "last"):
        ends = [chain.steps[0 if rule == "first" else -1] for chain in steps.chains]
        return select_items(value, np.array(ends, dtype=np.int64), np.empty(0, dtype=np.int64))
    if isinstance(rule, PerToken):
        items = _items(where, value)
        for step, item in enumerate(items):
            _check_rows(f"{where} of step {step}", item, steps.response_lengths[step])
        items = _holding(where, items, steps.chains, rule)
        return _like(value, [_joined_tokens(where, items, chain, rule) for chain in steps.chains])
    if not callable(rule):
        raise TypeError(f"{where}: {rule!r} is no rule: 'first', 'last', PerToken or a function")
    items = list(value) if isinstance(value, np.ndarray | Tensor) else _items(where, value)
    return [rule([items[step] for step in chain.steps]) for chain in steps.chains]


def _check_rows(where: str, item: Any, num_tokens: int) -> None:
    if isinstance(item, SupportRows):
        num_rows = len(item.row_offsets) - 1
    elif is_listed(item) or (isinstance(item, np.ndarray | Tensor) and item.ndim):
        num_rows = len(item)
    else:
        raise TypeError(
            f"{where} must have a row a response token, got {type(item).__name__}; a rule for the"
            " field makes one value of the steps' values"
        )
    if num_rows != num_tokens:
        raise ValueError(f"{where} has {num_rows} rows for {num_tokens} response tokens")


def _joined_tokens(where: str, items: list[Any], chain: _Chain, rule: PerToken) -> Any:
    """The rows of a chain's steps, the fill for the observations before each."""
    parts = [items[step] for step in chain.steps]
    kinds = {list if isinstance(part, tuple) and is_listed(part) else type(part) for part in parts}
    if len(kinds) > 1:
        names = sorted(kind.__name__ for kind in kinds)
        raise TypeError(f"{where} of steps {chain.steps} is {' and '.join(names)}")
    if isinstance(parts[0], SupportRows):
        return _joined_support(parts, chain.observed)
    if is_listed(parts[0]):
        rows: list[Any] = []
        for part, ids in zip(parts, chain.observed, strict=True):
            rows += ids.tolist() if rule is _TOKEN_IDS else _list_fill(rule, ids.size)
            rows += part
        return rows
    return _joined_arrays(where, parts, chain, rule)


def _list_fill(rule: PerToken, num_tokens: int) -> list[Any]:
    fill = [] if rule.support else rule.fill
    return [copy.deepcopy(fill) for _ in range(num_tokens)]


def _joined_support(parts: list[SupportRows], observed: list[np.ndarray]) -> SupportRows:
    counts: list[np.ndarray] = []
    for part, ids in zip(parts, observed, strict=True):
        counts += [np.zeros_like(ids), np.diff(np.asarray(part.row_offsets))]
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts))])
    return SupportRows(np.concatenate([np.asarray(part.token_ids) for part in parts]), offsets)


def _joined_arrays(where: str, parts: list[Any], chain: _Chain, rule: PerToken) -> Any:
    if rule.support and all(part.ndim == 2 for part in parts):
        parts = _padded(parts, max(part.shape[1] for part in parts))
    rows: list[Any] = []
    for part, ids, step in zip(parts, chain.observed, chain.steps, strict=True):
        if part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype:
            raise TypeError(
                f"{where} is {parts[0].dtype} {list(parts[0].shape[1:])} in step {chain.steps[0]},"
                f" but {part.dtype} {list(part.shape[1:])} in step {step}"
            )
        shape = (ids.size, *part.shape[1:])
        if isinstance(part, Tensor):
            own = torch.from_numpy(ids).to(part) if rule is _TOKEN_IDS else None
            rows += [part.new_full(shape, rule.fill) if own is None else own, part]
        else:
            fill = ids if rule is _TOKEN_IDS else rule.fill
            rows += [np.full(shape, fill, dtype=part.dtype), part]
    return torch.cat(rows) if isinstance(rows[0], Tensor) else np.concatenate(rows)


def _holding(where: str, items: list[Any], chains: list[_Chain], rule: PerToken) -> list[Any]:
    """``items`` with arrays that hold what observations get: integers are int64 where theirs does
    not."""
    arrays = [item for item in items if isinstance(item, np.ndarray | Tensor)]
    observed = [ids for chain in chains for ids in chain.observed if ids.size]
    if rule is _TOKEN_IDS:
        fill: Any = max((int(ids.max()) for ids in observed), default=0)
    elif observed or rule.support:
        fill = rule.fill
    else:
        return items
    if all(_holds(array, fill) for array in arrays):
        return items
    if not isinstance(fill, int) or any(_limits(array) is None for array in arrays):
        dtypes = " and ".join(sorted({str(array.dtype) for array in arrays}))
        raise TypeError(f"{where}: {fill!r}, of an observation token, is no value of {dtypes}")
    wide: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            item = item.to(torch.int64)
        wide.append(item.astype(np.int64) if isinstance(item, np.ndarray) else item)
    return wide


def _holds(array: np.ndarray | Tensor, value: Any) -> bool:
    limits = _limits(array)
    value = value.item() if isinstance(value, np.generic) else value
    if limits is None or not isinstance(value, int | float):
        return True
    return bool(value == value // 1 and limits[0] <= value <= limits[1])


def _limits(array: np.ndarray | Tensor) -> tuple[int, int] | None:
    """The least and largest value of integers and booleans."""
    if array.dtype in (torch.bool, np.dtype(bool)):
        return 0, 1
    if isinstance(array, Tensor):
        if array.is_floating_point() or array.is_complex():
            return None
        return torch.iinfo(array.dtype).min, torch.iinfo(array.dtype).max
    if array.dtype.kind not in "iu":
        return None
    return int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max)


def _padded(parts: list[Any], width: int) -> list[Any]:
    padded = []
    for part in parts:
        missing = width - part.shape[1]
        if isinstance(part, Tensor):
            part = torch.nn.functional.pad(part, (0, missing), value=NO_CANDIDATE)
        else:
            part = np.pad(part, ((0, 0), (0, missing)), constant_values=NO_CANDIDATE)
        padded.append(part)
    return padded


def _merged_routes(where: str, value: Any, steps: _Steps) -> Any:
    """The captured prefix of each chain: of a step the rows that are new."""
    items = _items(where, value)
    for step, item in enumerate(items):
        if item is None:
            continue
        ids = integer_array(item, f"{where} of step {step}")
        if ids.ndim != 3:
            raise ValueError(f"{where} of step {step} must be [rows, L, K], got {ids.shape}")
        length = steps.prompt_lengths[step] + steps.response_lengths[step]
        if ids.shape[0] > length:
            raise ValueError(f"{where} of step {step} has {ids.shape[0]} rows for {length} tokens")
    return _like(value, [_joined_routes(where, items, chain) for chain in steps.chains])


def _joined_routes(where: str, items: list[Any], chain: _Chain) -> Any:
    known: list[Any] = []
    num_rows = 0
    for step in chain.steps:
        item = items[step]
        if item is None:
            continue
        if known and (item.shape[1:] != known[0].shape[1:] or type(item) is not type(known[0])):
            raise TypeError(
                f"{where} is {type(known[0]).__name__} of rows {list(known[0].shape[1:])}, but"
                f" {type(item).__name__} of {list(item.shape[1:])} in step {step}"
            )
        known.append(item[num_rows:])
        num_rows = max(num_rows, len(item))
    if not known:
        return None
    if isinstance(known[0], Tensor):
        if any(rows.dtype in _UNPROMOTED for rows in known) and len({x.dtype for x in known}) > 1:
            known = [rows.to(torch.int64) for rows in known]
        return torch.cat(known)
    dtype = np.result_type(*known)  # of integers; uint64 with a signed one would be a float
    return np.concatenate(known, dtype=dtype if dtype.kind in "iu" else np.int64, casting="unsafe")
