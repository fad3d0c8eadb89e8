"""One cut for all per-token fields of a generator's output, as ``Trace.truncate`` cuts a trace.

    truncate_output(output, max_length=4096)

    prompt               stays whole
    response             its first ``max_length`` - P tokens
    fields of a row a response token (logprobs, loss masks, rewards, support)    the same rows
    routes               the rows of the kept tokens: one that was not the last has its row
    all other fields     stay

Sizes: B trajectories, P prompt and R response tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.collate import ROUTES_FIELD, SupportRows
from packhorse.packed.host import accumulate, host_count
from packhorse.packed.merge import Output, count_items, is_listed, is_packed
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.steps import STEP_RULES, PerToken, StepRule
from packhorse.packed.tensor import PackedTensor

PROMPTS_FIELD: Final = "prompt_token_ids"
RESPONSES_FIELD: Final = "response_ids"


@ranged
def truncate_output(
    output: Output,
    *,
    max_length: int,
    rules: Mapping[str, StepRule] | None = None,
    shared: Collection[str] = (),
) -> dict[str, Any]:
    """Cut the responses of trajectories that have more than ``max_length`` tokens.

    Args:
        output: fields of B items each; those of tokens are lists, or packed.
        max_length: prompt and response tokens, more than the longest prompt has.
        rules: as in ``merge_steps``: a field of ``PerToken`` is cut, any other rule says that it is
            not. ``STEP_RULES`` has those of known fields.
        shared: fields that belong to the whole output.

    Returns:
        The output with those fields cut, of the same kinds, no input changed.

    Raises:
        TypeError: an argument or a field is of a wrong kind.
        ValueError: a prompt is as long as ``max_length`` and has a response; a per-token field has
            not as many rows as its trajectory has response tokens; a field without a rule has, in
            every trajectory, so that it may be one. Names field and trajectory.
    """
    name = "truncate_output"
    most = host_count(max_length, f"{name}: max_length")
    num_trajectories = count_items(name, output, shared)
    tokens = []
    for field in (PROMPTS_FIELD, RESPONSES_FIELD):
        if output.get(field) is None:
            raise ValueError(f"{name}: {field} is missing")
        items = items_of(f"{name}: {field}", output[field])
        tokens.append(np.array([len(ids) for ids in items], dtype=np.int64))
    prompts, responses = tokens
    full = (prompts >= most) & (responses > 0)
    if full.any():
        i = int(np.argmax(full))
        raise ValueError(
            f"{name}: {PROMPTS_FIELD} of trajectory {i} has {prompts[i]} tokens, max_length={most}"
            " leaves none for its response"
        )
    kept = np.minimum(responses, np.maximum(most - prompts, 0))
    if (kept == responses).all():
        return dict(output)
    known = {**STEP_RULES, **(rules or {}), RESPONSES_FIELD: PerToken(), PROMPTS_FIELD: "first"}
    cut = _Cut(name, prompts, responses, kept, known, shared)
    assert num_trajectories == kept.size
    return cut.fields(output, "", None)


class _Cut:
    """What is the same for all fields."""

    def __init__(
        self,
        name: str,
        prompts: np.ndarray,
        responses: np.ndarray,
        kept: np.ndarray,
        rules: Mapping[str, StepRule],
        shared: Collection[str],
    ) -> None:
        self.name, self.rules, self.shared = name, rules, shared
        self.responses, self.kept = responses, kept
        self.lengths = prompts + kept

    def fields(self, fields: Output, above: str, outer: Any) -> dict[str, Any]:
        return {key: self._field(f"{above}{key}", value, outer) for key, value in fields.items()}

    def _field(self, path: str, value: Any, outer: Any) -> Any:
        if value is None or path in self.shared:
            return value
        rule = self.rules.get(path, outer)
        if isinstance(value, Mapping):
            return self.fields(value, f"{path}.", rule)
        if rule is None and path == ROUTES_FIELD:
            return _first_rows(value, np.minimum(_counts(value, self.lengths), self.lengths))
        if isinstance(rule, PerToken):
            if path == "rewards" and not _are_rows(value):
                return value  # one number a trajectory
            self._check(path, value)
            return _first_rows(value, self.kept)
        if rule is None and self._may_be_rows(value):
            raise ValueError(
                f"{self.name}: {path} has no rule and a row a response token in every trajectory;"
                " give one in rules=, PerToken() to cut it, 'last' to leave it"
            )
        return value

    def _check(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray | Tensor):
            raise TypeError(
                f"{self.name}: {path} must be a list or packed to be cut, got"
                f" {type(value).__name__}"
            )
        counts = _counts(value, self.responses)
        wrong = counts != self.responses
        if wrong.any():
            i = int(np.argmax(wrong))
            if counts[i] < 0:
                raise TypeError(
                    f"{self.name}: {path} of trajectory {i} must have a row a response token, got"
                    f" {type(value[i]).__name__}"
                )
            raise ValueError(
                f"{self.name}: {path} of trajectory {i} has {counts[i]} rows for"
                f" {self.responses[i]} response tokens"
            )

    def _may_be_rows(self, value: Any) -> bool:
        if not _are_rows(value):
            return False
        return bool((_counts(value, self.responses) == self.responses).all())


def items_of(where: str, value: Any) -> list[Any]:
    """One item a trajectory of a field of any kind."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{where} is a masked array; fill it first")
    for i, item in enumerate(value if is_listed(value) else ()):
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError(f"{where} of trajectory {i} is a masked array; fill it first")
    if is_listed(value) or isinstance(value, PackedTensor):
        return list(value)
    if isinstance(value, np.ndarray | Tensor) and value.ndim:
        return list(value)
    raise TypeError(f"{where} must hold one item a trajectory, got {type(value).__name__}")


def _are_rows(value: Any) -> bool:
    """Whether the items have rows, as a list of lists or a packed field."""
    if is_packed(value):
        return True
    return is_listed(value) and any(_num_rows(item) is not None for item in value)


def _num_rows(item: Any) -> int | None:
    if isinstance(item, SupportRows):
        return len(item.row_offsets) - 1
    if is_listed(item) or (isinstance(item, np.ndarray | Tensor) and item.ndim):
        return len(item)
    return None


def _counts(value: Any, absent: np.ndarray) -> np.ndarray:
    """[B] rows of each item; of one that is None those of ``absent``, of no rows -1."""
    if is_packed(value):
        return np.diff(value.bounds)
    counts = [_num_rows(item) for item in value]
    return np.array(
        [
            rest if item is None else -1 if count is None else count
            for item, count, rest in zip(value, counts, absent.tolist(), strict=True)
        ],
        dtype=np.int64,
    )


def _first_rows(value: Any, counts: np.ndarray) -> Any:
    """A field of the same kind with the first ``counts[i]`` rows of each item."""
    if isinstance(value, PackedTensor):
        bounds = accumulate("truncate_output", counts)
        rows = np.arange(bounds[-1]) + np.repeat(value.bounds[:-1] - bounds[:-1], counts)
        return PackedTensor.from_lengths(value.values[torch.from_numpy(rows)], counts.tolist())
    if isinstance(value, PackedRagged):
        segments = [
            (ids[: int(offsets[count])], offsets[: count + 1])
            for (ids, offsets), count in zip(value, counts.tolist(), strict=True)
        ]
        return PackedRagged.from_segments(segments) if segments else value
    items: Sequence[Any] = [
        _first(item, count) for item, count in zip(value, counts.tolist(), strict=True)
    ]
    return tuple(items) if isinstance(value, tuple) else items


def _first(item: Any, count: int) -> Any:
    if item is None:
        return None
    if isinstance(item, SupportRows):
        ids, offsets = np.asarray(item.token_ids), np.asarray(item.row_offsets)
        return SupportRows(ids[: int(offsets[count])], offsets[: count + 1])
    return item[:count]
