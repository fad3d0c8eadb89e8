"""From a generator's output to a trainer's batch, in one call.

    batch = make_inputs(output, vocab_size=151936, num_experts=128)

    field              what                            shape    dtype
    sequences          prompt, then response           [B, S]   int64
    attention_mask     1 at their tokens               [B, S]   int64
    response_mask      1 at response tokens            [B, R]   int64
    loss_mask          1 at trained ones               [B, R]   float32
    rewards            if given                        [B, R]   float32
    rollout_logprobs   if given                        [B, R]   float32
    appended, excused  if given                        [B, R]   bool
    lengths, response_lengths, first_columns           B host integers each
    missing            if given                        B booleans
    rollout_expert_indices, rollout_sample_support     packed; if given
    all other fields of the output                     as they are

The names are those of RL trainers (SkyRL's ``TrainingInputBatch``). Trajectory i has the columns
[first_columns[i], first_columns[i] + lengths[i]) of ``sequences``; everything else is padding:

    padding      sequences [B, S]               response fields [B, R]
    "left"       . . p p r r r                  . r r r    the last R columns of sequences
    "right"      p p r r r . .                  r r r .
    "two-sided"  . p p | r r r .                r r r .    the last R columns; S = P + R

Sizes: B trajectories, S columns, R columns of the response fields, P those of prompts.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.batch import ATTENTION_MASK_FIELD, LOSS_MASK_FIELD, Batch
from packhorse.packed.collate import ROUTES_FIELD, SUPPORT_FIELD, SupportRows
from packhorse.packed.fields import PACKED_FIELDS, ROUTER_PADDING_MASK_FIELD, FieldRegistry
from packhorse.packed.host import INT32_MAX, accumulate, check_total, host_count
from packhorse.packed.host_arrays import positive
from packhorse.packed.inputs_cut import PROMPTS_FIELD, RESPONSES_FIELD, truncate_output
from packhorse.packed.inputs_fields import (
    APPENDED_FIELD,
    EXCUSED_FIELD,
    FIRST_COLUMNS_FIELD,
    HOST_FIELDS,
    LENGTHS_FIELD,
    MISSING_FIELD,
    RESPONSE_LENGTHS_FIELD,
    RESPONSE_MASK_FIELD,
    SEQUENCES_FIELD,
    carried_fields,
    check_swapped,
    errors_of,
    response_fields,
    routes_of,
    support_of,
    token_ids_of,
)
from packhorse.packed.merge import Output, count_items
from packhorse.packed.steps import StepRule
from packhorse.packed.trajectory import Trajectory, generator_output

Padding = Literal["left", "right", "two-sided"]
_PADDINGS: Final = ("left", "right", "two-sided")

_NEEDED: Final = (
    SEQUENCES_FIELD, ATTENTION_MASK_FIELD, RESPONSE_MASK_FIELD, LOSS_MASK_FIELD, LENGTHS_FIELD,
    RESPONSE_LENGTHS_FIELD, FIRST_COLUMNS_FIELD,
)  # fmt: skip
_USED: Final = (
    APPENDED_FIELD, EXCUSED_FIELD, MISSING_FIELD, ROUTES_FIELD, SUPPORT_FIELD,
    ROUTER_PADDING_MASK_FIELD,
)  # fmt: skip


@ranged
def make_inputs(
    output: Output | Sequence[Trajectory],
    *,
    padding: Padding = "left",
    pad_token_id: int = 0,
    vocab_size: int | None = None,
    num_experts: int | None = None,
    num_layers: int | None = None,
    topk: int | None = None,
    moe_layers: Sequence[int] | None = None,
    ragged: bool = False,
    support_width: int | None = None,
    max_length: int | None = None,
    rules: Mapping[str, StepRule] | None = None,
    width: int | None = None,
    prompt_width: int | None = None,
    response_width: int | None = None,
    shared: Collection[str] = (),
    registry: FieldRegistry = PACKED_FIELDS,
) -> Batch:
    """Training inputs of B trajectories, checked and padded on the host.

    Args:
        output: a generator's output, or finished traces. Fields of B items each, those that are
            None are not there: ``prompt_token_ids`` [P >= 1] and ``response_ids`` [R] integers;
            ``loss_masks`` [R] 0 or 1, by default all 1; ``rewards`` one number a trajectory, which
            its last response token gets, or [R]; ``rollout_logprobs`` [R], finite, at most 0;
            ``appended`` and ``excused`` [R] booleans, of each other where one is absent;
            ``rollout_expert_indices`` [rows, L, K] or packed, in any form of ``pack_routes``;
            ``missing`` booleans: the routes of this trajectory are lost, and may be None;
            ``rollout_sample_support`` packed, or in any form of ``pack_support``. Any other field
            is carried along.
        padding: where padding stands.
        pad_token_id: in ``sequences``.
        vocab_size: V: ids are checked against it. Needed for a support that is not packed yet.
        num_experts: E, which chooses the dtype of the routes; by default their ids do. Packed ones
            are taken as they are.
        num_layers, topk: L and K that the routes must have, where known. A rank that may get no
            trajectory gives them: its batch then has routes too, of no rows.
        moe_layers: as in ``pack_routes``.
        ragged: the support becomes a ``PackedRagged``, else a ``PackedTensor``.
        support_width: C, by default as wide as the widest row.
        max_length: a trajectory of more tokens is cut to it first, as ``truncate_output`` does
            with ``rules``.
        width: S of "left" and "right", by default the longest trajectory. Without any trajectory
            it is 1, which a synthetic one needs.
        prompt_width: P of "two-sided", by default the longest prompt, or 1.
        response_width: R, by default the longest response.
        shared: fields that belong to the whole output (``"env.name"`` inside a mapping): they
            become metadata.
        registry: of the batch.

    Returns:
        The batch. Its metadata has ``padding`` and ``pad_token_id``.

    Raises:
        TypeError: an argument or a field has a wrong type, or is on a device.
        ValueError: a field is None in some trajectories only, or has another number of items than
            a trajectory has tokens; an id, logprob or reward is out of range; a width is too small;
            all routes are missing; or what ``pack_routes``, ``pack_support`` and
            ``truncate_output`` refuse. Names field and trajectory.
    """
    name = "make_inputs"
    if padding not in _PADDINGS:
        raise ValueError(f"{name}: padding must be one of {_PADDINGS}, got {padding!r}")
    if not isinstance(output, Mapping):
        with errors_of(name, "generator_output"):
            output = generator_output(output)
    pad_token_id = host_count(pad_token_id, f"{name}: pad_token_id")
    if pad_token_id > INT32_MAX:
        raise ValueError(f"{name}: pad_token_id must be at most {INT32_MAX}, got {pad_token_id}")
    if vocab_size is not None:
        vocab_size = host_count(vocab_size, f"{name}: vocab_size")
    if max_length is not None:
        with errors_of(name, "truncate_output"):
            output = truncate_output(output, max_length=max_length, rules=rules, shared=shared)
    num_layers, topk = (
        None if size is None else positive(size, f"{name}: {what}")
        for size, what in ((num_layers, "num_layers"), (topk, "topk"))
    )
    # one ``SupportRows`` of all rows is no item a trajectory; ``pack_support`` counts its rows
    counted = {
        field: value
        for field, value in output.items()
        if not (field == SUPPORT_FIELD and isinstance(value, SupportRows))
    }
    num_trajectories = count_items(name, counted, shared)
    prompts = token_ids_of(name, output, PROMPTS_FIELD, vocab_size)
    responses = token_ids_of(name, output, RESPONSES_FIELD, vocab_size)
    for i, ids in enumerate(prompts):
        if ids.size == 0:
            raise ValueError(
                f"{name}: {PROMPTS_FIELD} of trajectory {i} is empty: nothing predicts the first"
                " token of its response"
            )
    check_swapped(name, output.get(ROUTES_FIELD), output.get(SUPPORT_FIELD))
    sizes = _Sizes.of(name, prompts, responses)
    places = _places(name, sizes, padding, width, prompt_width, response_width)

    tokens = [ids for pair in zip(prompts, responses, strict=True) for ids in pair]
    fields: dict[str, Any] = {
        SEQUENCES_FIELD: _filled(places.first, sizes.lengths, places.width, tokens, pad_token_id),
        ATTENTION_MASK_FIELD: _ones(places.first, sizes.lengths, places.width),
        RESPONSE_MASK_FIELD: _ones(places.starts, sizes.responses, places.response_width),
    }
    for field, (rows, dtype) in response_fields(name, output, sizes.responses.tolist()).items():
        fields[field] = _filled(
            places.starts, sizes.responses, places.response_width, rows, 0, dtype
        )
    fields[LENGTHS_FIELD] = sizes.lengths.tolist()
    fields[RESPONSE_LENGTHS_FIELD] = sizes.responses.tolist()
    fields[FIRST_COLUMNS_FIELD] = places.first.tolist()
    row_shape = (num_layers, topk)
    fields |= routes_of(name, output, sizes.lengths.tolist(), num_experts, row_shape, moe_layers)
    fields |= support_of(name, output, responses, vocab_size, support_width, ragged)
    metadata: dict[str, Any] = {"padding": padding, "pad_token_id": pad_token_id}
    carried = carried_fields(name, output, shared, "", metadata)
    for field in carried:
        if field in fields:
            raise ValueError(f"{name}: the output has a field {field}, which is made here")
    with errors_of(name, "Batch"):
        return Batch(
            fields | carried, batch_size=num_trajectories, metadata=metadata, registry=registry
        )


@ranged
def select_for_logprobs(batch: Batch) -> Batch:
    """What a forward-only pass needs (old and reference logprobs): tokens, masks, routes, support.

    The loss mask goes with it: it says which positions without a route run live and which appended
    token is scored over the whole vocabulary, as in training.

    Args:
        batch: of ``make_inputs``.

    Returns:
        A batch of those fields, no tensor copied.

    Raises:
        TypeError: ``batch`` is no ``Batch``.
        KeyError: a field that each batch of ``make_inputs`` has is not there.
    """
    name = "select_for_logprobs"
    if not isinstance(batch, Batch):
        raise TypeError(f"{name}: batch must be a Batch, got {type(batch).__name__}")
    for field in _NEEDED:
        if field not in batch:
            raise KeyError(f"{name}: no field {field!r}")
    return batch.select([*_NEEDED, *(field for field in _USED if field in batch)])


@ranged
def token_masks(batch: Batch, field: str = LOSS_MASK_FIELD) -> list[np.ndarray] | None:
    """A response field as masks over all tokens of each trajectory, as replay and scoring take it.

        ReplayMicrobatch(layout, routes, loss_masks=token_masks(batch),
                         appended=token_masks(batch, "excused"))
        score_microbatch(..., appended=token_masks(batch, "appended"))

    Args:
        batch: of ``make_inputs``, on the host: before it goes to a device.
        field: ``loss_mask``, ``appended``, ``excused`` or another [B, R] one.

    Returns:
        B times [length] bool, False over the prompt, True where the field is not 0. None where the
        batch has no such field.

    Raises:
        TypeError: the field or ``response_mask`` is on a device.
        KeyError: a field that each batch of ``make_inputs`` has is not there.
        ValueError: the shapes are not alike, or ``response_mask`` has not the response lengths.
    """
    name = "token_masks"
    if not isinstance(batch, Batch):
        raise TypeError(f"{name}: batch must be a Batch, got {type(batch).__name__}")
    if field not in batch:
        return None
    values = host_dense(name, batch, field)
    within = host_dense(name, batch, RESPONSE_MASK_FIELD) != 0
    if values.shape != within.shape:
        raise ValueError(
            f"{name}: {field} is {list(values.shape)}, {RESPONSE_MASK_FIELD} is"
            f" {list(within.shape)}"
        )
    lengths = host_integers(name, batch, LENGTHS_FIELD)
    responses = host_integers(name, batch, RESPONSE_LENGTHS_FIELD)
    wrong = within.sum(1) != responses
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"{name}: {RESPONSE_MASK_FIELD} of trajectory {i} has {within[i].sum()} tokens,"
            f" {RESPONSE_LENGTHS_FIELD} says {responses[i]}"
        )
    bounds = accumulate(name, lengths)
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    mask = np.zeros(places.size, dtype=np.bool_)
    mask[places >= np.repeat(lengths - responses, lengths)] = (values != 0)[within]
    return np.split(mask, bounds[1:-1]) if len(batch) else []


# --- reading a batch ------------------------------------------------------------------------------


def host_dense(name: str, batch: Batch, field: str) -> np.ndarray:
    """The host array of a dense field."""
    if field not in batch:
        raise KeyError(f"{name}: no field {field!r}")
    value = batch[field]
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {field} must be a dense tensor, got {type(value).__name__}")
    if value.device.type != "cpu":
        raise TypeError(f"{name}: {field} is on {value.device}; it must be on the host")
    if value.dtype.is_floating_point:
        value = value.to(torch.float32)  # NumPy has no bfloat16
    return value.detach().numpy()


def host_integers(name: str, batch: Batch, field: str) -> np.ndarray:
    """[B] int64 of a field of ``HOST_FIELDS``; a synthetic trajectory holds None, or its value."""
    if field not in batch:
        raise KeyError(f"{name}: no field {field!r}")
    value = batch[field]
    if not isinstance(value, tuple):
        raise TypeError(
            f"{name}: {field} must be host integers in a list, got {type(value).__name__}"
        )
    for i, number in enumerate(value):
        is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if number is not None and not is_integer:
            raise TypeError(f"{name}: {field} of trajectory {i} must be an integer, got {number!r}")
    numbers = [HOST_FIELDS[field] if number is None else int(number) for number in value]
    return np.array(numbers, dtype=np.int64)


# --- places ---------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """[B] int64 each."""

    lengths: np.ndarray
    prompts: np.ndarray
    responses: np.ndarray

    @classmethod
    def of(cls, name: str, prompts: list[np.ndarray], responses: list[np.ndarray]) -> "_Sizes":
        before = np.array([ids.size for ids in prompts], dtype=np.int64)
        after = np.array([ids.size for ids in responses], dtype=np.int64)
        check_total(name, int((before + after).sum()), "tokens")
        return cls(before + after, before, after)


class _Places(NamedTuple):
    """Columns of the first token and of the first response token, [B] int64, and widths."""

    first: np.ndarray  # in [B, S]
    width: int
    starts: np.ndarray  # in [B, R]
    response_width: int


def _places(
    name: str,
    sizes: _Sizes,
    padding: Padding,
    width: int | None,
    prompt_width: int | None,
    response_width: int | None,
) -> _Places:
    right = _width(name, "response_width", response_width, sizes.responses, "response tokens")
    zeros = np.zeros_like(sizes.lengths)
    if padding == "two-sided":
        if width is not None:
            raise ValueError(
                f"{name}: width is prompt_width + response_width in 'two-sided' padding; give those"
            )
        left = _width(name, "prompt_width", prompt_width, sizes.prompts, "prompt tokens", least=1)
        return _Places(left - sizes.prompts, left + right, zeros, right)
    if prompt_width is not None:
        raise ValueError(f"{name}: prompt_width is of 'two-sided' padding, not of {padding!r}")
    whole = _width(name, "width", width, sizes.lengths, "tokens", least=1)
    if padding == "right":
        return _Places(zeros, whole, zeros, right)
    if right > whole:
        raise ValueError(
            f"{name}: response_width={right} is above width={whole}: response fields are the last"
            " columns of the sequences"
        )
    return _Places(whole - sizes.lengths, whole, right - sizes.responses, right)


def _width(
    name: str, what: str, given: int | None, sizes: np.ndarray, of: str, *, least: int = 0
) -> int:
    widest = int(sizes.max(initial=0))
    if given is None:
        return max(widest, least)
    width = host_count(given, f"{name}: {what}")
    if width < widest:
        raise ValueError(
            f"{name}: {what}={width} is below the {widest} {of} of trajectory"
            f" {int(np.argmax(sizes))}"
        )
    return width


def _ones(starts: np.ndarray, lengths: np.ndarray, width: int) -> Tensor:
    """[B, width] int64: 1 at the columns of each trajectory's run."""
    return torch.from_numpy(_inside(starts, lengths, width).astype(np.int64))


def _inside(starts: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    columns = np.arange(width)
    return (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])


def _filled(
    starts: np.ndarray,
    lengths: np.ndarray,
    width: int,
    rows: list[np.ndarray],
    fill: int,
    dtype: Any = np.int64,
) -> Tensor:
    """[B, width]: the values of all trajectories, one after another, in their runs."""
    filled = np.full((lengths.size, width), fill, dtype=dtype)
    flat = np.concatenate([np.empty(0, dtype=dtype), *rows], dtype=dtype, casting="unsafe")
    filled[_inside(starts, lengths, width)] = flat  # row after row, as they stand in ``flat``
    return torch.from_numpy(filled)
