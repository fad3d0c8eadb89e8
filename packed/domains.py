"""One check of a whole batch on the host before a step: does each field belong to its tokens?

    lengths, columns, masks     agree with each other, and fit their widths
    loss mask, logprobs, rewards    stand inside the response; logprobs are finite, at most 0
    routes    0 <= rows <= length, ids in [0, E), every trained target is covered
    support    a row a response token, ids in [0, V), the sampled id is among them

Where the data says what happened to a wrong field (swapped with another, one token or one
trajectory off, of a batch in another order), the error says it too. Routes name no token: that
they are another trajectory's shows in their numbers of rows alone.

Sizes: B trajectories, S columns, R columns of the response fields, N response tokens of the batch,
V vocabulary, E experts, L captured layers, K experts a token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packhorse._nvtx import ranged
from packhorse.packed import domains_hints as hints
from packhorse.packed.batch import ATTENTION_MASK_FIELD, LOSS_MASK_FIELD, Batch
from packhorse.packed.batch_parts import leaves
from packhorse.packed.collate import LOGPROBS_FIELD, ROUTES_FIELD, SUPPORT_FIELD
from packhorse.packed.domains_hints import SupportIds
from packhorse.packed.fields import PACKED_FIELDS
from packhorse.packed.host import accumulate, host_count, row_place
from packhorse.packed.inputs import host_dense, host_integers
from packhorse.packed.inputs_fields import (
    APPENDED_FIELD,
    EXCUSED_FIELD,
    FIRST_COLUMNS_FIELD,
    LENGTHS_FIELD,
    MISSING_FIELD,
    RESPONSE_LENGTHS_FIELD,
    RESPONSE_MASK_FIELD,
    REWARDS_FIELD,
    SEQUENCES_FIELD,
    check_swapped,
)
from packhorse.packed.merge import is_packed
from packhorse.packed.sentinels import NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor

_NAME = "validate_batch"


@ranged
def validate_batch(
    batch: Batch,
    *,
    vocab_size: int | None = None,
    num_experts: int | None = None,
    num_layers: int | None = None,
    topk: int | None = None,
) -> None:
    """Check the batch of a step, before anything is done with it.

    A field that is not there is not checked, and what belongs to padding and synthetic trajectories
    is legal. A trained target at position j needs j route rows, unless ``excused`` (or
    ``appended``) marks it or ``missing`` its trajectory.

    Args:
        batch: of ``make_inputs``, or with its fields; on the host.
        vocab_size: V, where known.
        num_experts: E, where known.
        num_layers, topk: L and K that the routes must have, where known.

    Raises:
        TypeError: ``batch`` is no ``Batch``, or a field has a wrong type or is on a device.
        KeyError: a field that each batch of ``make_inputs`` has is not there.
        ValueError: a field is not that of its tokens. One line that names field, trajectory and
            token, and what the data says of the cause.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"{_NAME}: batch must be a Batch, got {type(batch).__name__}")
    sizes = [
        None if size is None else host_count(size, f"{_NAME}: {what}")
        for what, size in (
            ("vocab_size", vocab_size), ("num_experts", num_experts), ("num_layers", num_layers),
            ("topk", topk),
        )
    ]  # fmt: skip
    for path, leaf in leaves(batch.fields):
        if is_packed(leaf) and leaf.device.type != "cpu":
            raise TypeError(f"{_NAME}: {path} is on {leaf.device}; it must be on the host")
    routes, support = batch.fields.get(ROUTES_FIELD), batch.fields.get(SUPPORT_FIELD)
    check_swapped(_NAME, routes, support)
    tokens = _tokens(batch, sizes[0])
    trained = _mask(batch, LOSS_MASK_FIELD, tokens)
    appended = _mask(batch, APPENDED_FIELD, tokens)
    excused = _mask(batch, EXCUSED_FIELD, tokens)
    logprobs = _check_numbers(batch, tokens)
    if routes is not None:
        _check_routes(batch, routes, tokens, trained & ~(appended | excused), sizes[1:])
    if support is not None:
        _check_support(support, tokens, trained, appended, logprobs, sizes[0])
    _check_appended(tokens, trained & appended)
    for path, leaf in leaves(batch.fields):
        if path in batch.registry and path not in PACKED_FIELDS:
            batch.registry[path].check_lengths(
                _NAME, leaf, tokens.lengths.tolist(), tokens.responses.tolist()
            )


# --- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Where the tokens are. [B] and [N] are int64."""

    lengths: np.ndarray  # [B]
    responses: np.ndarray  # [B]
    within: np.ndarray  # [B, R] bool: response tokens
    sampled: np.ndarray  # [N] their ids
    bounds: np.ndarray  # [B + 1] offsets of the trajectories in it

    @property
    def trajectories(self) -> np.ndarray:
        """[N]: of each response token."""
        return np.repeat(np.arange(self.responses.size), self.responses)

    @property
    def ranks(self) -> np.ndarray:
        """[N]: number of each response token in its response."""
        return np.arange(self.sampled.size) - self.bounds[self.trajectories]

    @property
    def positions(self) -> np.ndarray:
        """[N]: of each response token in its trajectory."""
        return self.ranks + (self.lengths - self.responses)[self.trajectories]


def _tokens(batch: Batch, vocab_size: int | None) -> _Tokens:
    lengths = host_integers(_NAME, batch, LENGTHS_FIELD)
    responses = host_integers(_NAME, batch, RESPONSE_LENGTHS_FIELD)
    first = host_integers(_NAME, batch, FIRST_COLUMNS_FIELD)
    sequences = _matrix(batch, SEQUENCES_FIELD)
    width = sequences.shape[1]
    if sequences.dtype != np.int64:
        raise TypeError(f"{_NAME}: {SEQUENCES_FIELD} must be int64, got {sequences.dtype}")
    _check_lengths(lengths, responses, first, width)

    attention = _matrix(batch, ATTENTION_MASK_FIELD, sequences.shape)
    columns = np.arange(width)
    runs = (columns >= first[:, None]) & (columns < (first + lengths)[:, None])
    wrong = (attention != runs).any(1)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"{_NAME}: {ATTENTION_MASK_FIELD} of trajectory {i} is not 1 at the columns"
            f" [{first[i]}, {first[i] + lengths[i]}) and 0 elsewhere"
            f"{hints.rows(attention != 0, runs, i)}"
        )
    ids = sequences[runs]
    outside = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        problem = "negative" if ids[at] < 0 else f"not below vocab_size={vocab_size}"
        place = row_place(at, accumulate(_NAME, lengths)).replace("row", "token")
        raise ValueError(f"{_NAME}: {SEQUENCES_FIELD} of {place}: id {ids[at]} is {problem}")

    within = _response_mask(batch, responses)
    bounds = accumulate(_NAME, responses)
    starts = np.cumsum(lengths) - responses  # of each response among all tokens
    places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], responses)
    return _Tokens(lengths, responses, within, ids[places], bounds)


def _check_lengths(
    lengths: np.ndarray, responses: np.ndarray, first: np.ndarray, width: int
) -> None:
    if lengths.size and (responses > lengths).any() and (responses >= lengths).all():
        raise ValueError(
            f"{_NAME}: {LENGTHS_FIELD} and {RESPONSE_LENGTHS_FIELD} are swapped: no trajectory has"
            " more tokens than its response"
        )
    for wrong, what in (
        (lengths < 1, LENGTHS_FIELD), ((responses < 0) | (responses > lengths),
        RESPONSE_LENGTHS_FIELD), ((first < 0) | (first + lengths > width), FIRST_COLUMNS_FIELD),
    ):  # fmt: skip
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ValueError(
                f"{_NAME}: {what} of trajectory {i}: {lengths[i]} tokens, {responses[i]} of them of"
                f" the response, from column {first[i]} of {width}"
            )
    bare = responses == lengths
    if bare.any():
        i = int(np.argmax(bare))
        raise ValueError(
            f"{_NAME}: {RESPONSE_LENGTHS_FIELD} of trajectory {i}: all its {lengths[i]} tokens are"
            " of the response, so that nothing predicts the first"
        )


def _response_mask(batch: Batch, responses: np.ndarray) -> np.ndarray:
    """[B, R] bool: one run a trajectory, all aligned on one side."""
    within = _zeros_and_ones(batch, RESPONSE_MASK_FIELD)
    sums = within.sum(1)
    wrong = sums != responses
    if wrong.any():
        i = int(np.argmax(wrong))
        hint = hints.counts(sums, responses, i, "token")
        if LOSS_MASK_FIELD in batch:
            loss = _matrix(batch, LOSS_MASK_FIELD)
            if loss.shape == within.shape and ((loss != 0).sum(1) == responses).all():
                hint = f"; {LOSS_MASK_FIELD} does: the two are swapped"
        raise ValueError(
            f"{_NAME}: {RESPONSE_MASK_FIELD} of trajectory {i} has {sums[i]} tokens, not the"
            f" {responses[i]} of {RESPONSE_LENGTHS_FIELD}{hint}"
        )
    columns = np.arange(within.shape[1])
    sides = []
    for starts in (np.zeros_like(responses), within.shape[1] - responses):
        runs = (columns >= starts[:, None]) & (columns < (starts + responses)[:, None])
        sides.append((runs == within).all(1))
    if not any(side.all() for side in sides):
        side = max(sides, key=np.count_nonzero)
        i = int(np.argmax(~side))
        raise ValueError(
            f"{_NAME}: {RESPONSE_MASK_FIELD} of trajectory {i} is no run of 1 that begins at column"
            " 0 or ends at the last, as those of the other trajectories do"
        )
    return within


def _matrix(batch: Batch, field: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    values = host_dense(_NAME, batch, field)
    if values.ndim != 2:
        raise ValueError(f"{_NAME}: {field} must be of 2 dimensions, got {list(values.shape)}")
    if shape is not None and values.shape != shape:
        raise ValueError(f"{_NAME}: {field} must be {list(shape)}, got {list(values.shape)}")
    return values


def _zeros_and_ones(batch: Batch, field: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    values = _matrix(batch, field, shape)
    wrong = (values != 0) & (values != 1)
    if wrong.any():
        i, column = np.unravel_index(np.argmax(wrong), wrong.shape)
        raise ValueError(
            f"{_NAME}: {field} of trajectory {i}, column {column}: {values[i, column]} is neither 0"
            " nor 1"
        )
    return values != 0


# --- response fields ------------------------------------------------------------------------------


def _mask(batch: Batch, field: str, tokens: _Tokens) -> np.ndarray:
    """[N] bool of a [B, R] field, all False where it is not there."""
    if field not in batch:
        return np.zeros(tokens.sampled.size, dtype=np.bool_)
    mask = _zeros_and_ones(batch, field, tokens.within.shape)
    _check_inside(field, mask, tokens)
    return mask[tokens.within]


def _check_inside(field: str, held: np.ndarray, tokens: _Tokens) -> None:
    wrong = (held & ~tokens.within).any(1)
    if wrong.any():
        i = int(np.argmax(wrong))
        column = int(np.argmax(held[i] & ~tokens.within[i]))
        raise ValueError(
            f"{_NAME}: {field} of trajectory {i} is not 0 in column {column}, where it has no"
            f" response token{hints.inside(held, tokens.within)}"
        )


def _check_numbers(batch: Batch, tokens: _Tokens) -> np.ndarray | None:
    """[N] logprobs, where the batch has them."""
    found = {}
    for field in (LOGPROBS_FIELD, REWARDS_FIELD):
        if field not in batch:
            continue
        values = found[field] = _matrix(batch, field, tokens.within.shape)
        wrong = ~np.isfinite(values)
        if wrong.any():
            i, column = np.unravel_index(np.argmax(wrong), wrong.shape)
            raise ValueError(
                f"{_NAME}: {field} of trajectory {i}, column {column}: {values[i, column]} is not"
                " finite"
            )
        _check_inside(field, values != 0, tokens)
    logprobs, rewards = found.get(LOGPROBS_FIELD), found.get(REWARDS_FIELD)
    if logprobs is not None and (logprobs > 0).any():
        i, column = np.unravel_index(np.argmax(logprobs > 0), logprobs.shape)
        hint = ""
        if rewards is not None and (rewards <= 0).all() and (rewards < 0).any():
            hint = f"; {REWARDS_FIELD} holds no positive one: the two are swapped"
        raise ValueError(
            f"{_NAME}: {LOGPROBS_FIELD} of trajectory {i}, column {column}: {logprobs[i, column]}"
            f" is positive{hint}"
        )
    return None if logprobs is None else logprobs[tokens.within]


def _check_appended(tokens: _Tokens, trained: np.ndarray) -> None:
    counts = np.bincount(tokens.trajectories[trained], minlength=tokens.lengths.size)
    if (counts > 1).any():
        i = int(np.argmax(counts > 1))
        raise ValueError(
            f"{_NAME}: {APPENDED_FIELD} of trajectory {i}: {counts[i]} tokens with loss; at most"
            " one a trajectory is scored over the whole vocabulary"
        )


# --- routes ---------------------------------------------------------------------------------------


def _check_routes(
    batch: Batch, routes: Any, tokens: _Tokens, bound: np.ndarray, sizes: list[int | None]
) -> None:
    """``bound`` [N] bool: trained targets that need the rows before them."""
    if not isinstance(routes, PackedTensor):
        raise TypeError(
            f"{_NAME}: {ROUTES_FIELD} must be a PackedTensor, got {type(routes).__name__}"
        )
    PACKED_FIELDS[ROUTES_FIELD].check(_NAME, routes)
    num_experts, *row_shape = sizes
    for size, given, what in zip(
        row_shape, routes.row_shape, ("layers", "experts a token"), strict=True
    ):
        if size is not None and size != given:
            raise ValueError(f"{_NAME}: {ROUTES_FIELD} has {given} {what}, expected {size}")
    missing = _missing(batch)
    rows = np.diff(routes.bounds)
    owners = tokens.trajectories
    bound = bound & ~missing[owners]
    needs = np.zeros(rows.size, dtype=np.int64)
    np.maximum.at(needs, owners[bound], tokens.positions[bound])
    wrong = rows > tokens.lengths
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"{_NAME}: {ROUTES_FIELD} of trajectory {i} has {rows[i]} rows for {tokens.lengths[i]}"
            f" tokens{hints.captured(rows, tokens.lengths, needs, i)}"
        )
    if (missing & (rows > 0)).any():
        i = int(np.argmax(missing & (rows > 0)))
        raise ValueError(
            f"{_NAME}: {ROUTES_FIELD} of trajectory {i} has {rows[i]} rows, but {MISSING_FIELD}"
            " says that its routes are lost"
        )
    if rows.size and missing.all():
        raise ValueError(
            f"{_NAME}: {ROUTES_FIELD} is missing in all {rows.size} trajectories, so there is"
            " nothing to replay"
        )
    if (rows < needs).any():
        i = int(np.argmax(rows < needs))
        positions = tokens.positions[bound & (owners == i)]
        token = int(positions[positions > rows[i]].min())
        raise ValueError(
            f"{_NAME}: {ROUTES_FIELD} of trajectory {i}: token {token} is a trained target and"
            f" needs {token} rows, there are {rows[i]} ({EXCUSED_FIELD} and {MISSING_FIELD} mark"
            f" the exceptions){hints.captured(rows, tokens.lengths, needs, i)}"
        )
    _check_experts(routes, num_experts)


def _missing(batch: Batch) -> np.ndarray:
    """[B] bool."""
    given = batch.fields.get(MISSING_FIELD)
    if given is None:
        return np.zeros(len(batch), dtype=np.bool_)
    if not isinstance(given, tuple):
        raise TypeError(
            f"{_NAME}: {MISSING_FIELD} must be booleans in a list, got {type(given).__name__}"
        )
    for i, flag in enumerate(given):
        if flag is not None and not isinstance(flag, bool | np.bool_):
            raise TypeError(
                f"{_NAME}: {MISSING_FIELD} of trajectory {i} must be a bool, got {flag!r:.60}"
            )
    return np.array([bool(flag) for flag in given], dtype=np.bool_)


def _check_experts(routes: PackedTensor, num_experts: int | None) -> None:
    if routes.values.numel() == 0:
        return
    ids = routes.values.numpy()
    experts = torch.iinfo(torch.int32).max + 1 if num_experts is None else num_experts
    if ids.min() >= 0 and ids.max() < experts:
        return
    wrong = (ids < 0) | (ids >= experts)
    row, layer, k = np.unravel_index(np.argmax(wrong), wrong.shape)
    expert = ids[row, layer, k]
    problem = "negative" if expert < 0 else f"not below num_experts={num_experts}"
    raise ValueError(
        f"{_NAME}: {ROUTES_FIELD} of {row_place(row, routes.bounds)}, layer {layer}: expert"
        f" {expert} is {problem}"
    )


# --- support --------------------------------------------------------------------------------------


def _check_support(
    support: Any,
    tokens: _Tokens,
    trained: np.ndarray,
    appended: np.ndarray,
    logprobs: np.ndarray | None,
    vocab_size: int | None,
) -> None:
    if isinstance(support, PackedTensor):
        PACKED_FIELDS[SUPPORT_FIELD].check(_NAME, support)
    elif not is_packed(support):
        raise TypeError(f"{_NAME}: {SUPPORT_FIELD} must be packed, got {type(support).__name__}")
    rows = np.diff(support.bounds)
    wrong = rows != tokens.responses
    if wrong.any():
        i = int(np.argmax(wrong))
        hint = hints.counts(rows, tokens.responses, i, "row")
        if (rows == tokens.lengths).all():
            hint = "; every trajectory has a row a token, prompt and response"
        raise ValueError(
            f"{_NAME}: {SUPPORT_FIELD} of trajectory {i} has {rows[i]} rows for"
            f" {tokens.responses[i]} response tokens{hint}"
        )

    def place(row: np.integer | int) -> str:
        return f"{_NAME}: {SUPPORT_FIELD} of {row_place(row, tokens.bounds)}"

    held, least = support.values.numpy(), 0
    if isinstance(support, PackedTensor):
        least = NO_CANDIDATE
        late = (held[:, 1:] != NO_CANDIDATE) & (held[:, :-1] == NO_CANDIDATE)
        if late.any():
            raise ValueError(f"{place(int(np.argmax(late.any(1))))}: an id after a -1")
    limit = torch.iinfo(torch.int32).max + 1 if vocab_size is None else vocab_size
    if held.size and (held.min() < least or held.max() >= limit):
        ids = SupportIds.of(support)
        at = int(np.argmax((ids.token_ids < 0) | (ids.token_ids >= limit)))
        token = ids.token_ids[at]
        problem = "negative" if token < 0 else f"not below vocab_size={vocab_size}"
        raise ValueError(f"{place(ids.rows[at])}: id {token} is {problem}")
    empty, members = _members(support, tokens.sampled)
    lacking = ~empty & ~members
    if lacking.any():
        row = int(np.argmax(lacking))
        ids = SupportIds.of(support)
        raise ValueError(
            f"{place(row)}: the sampled id {tokens.sampled[row]} is not among its"
            f" {ids.counts[row]} ids{hints.support(ids, tokens.sampled, tokens.bounds, row)}"
        )
    bare = empty & trained & ~appended
    if bare.any():
        row = int(np.argmax(bare))
        raise ValueError(
            f"{place(row)} is empty, but its token is trained and not marked {APPENDED_FIELD}"
            f"{hints.moved(trained, empty & ~appended, tokens.bounds, 'the loss mask')}"
        )
    if logprobs is not None:
        # a trajectory without any support is padding; and an engine may keep none of a token that
        # it sampled, so that only a shift that fits is an error
        some = np.bincount(tokens.trajectories[~empty], minlength=rows.size) > 0
        observed = empty & ~appended & some[tokens.trajectories]
        wrong = (logprobs != 0) & observed
        hint = hints.moved(logprobs != 0, observed, tokens.bounds, "the field")
        if wrong.any() and hint:
            row = int(np.argmax(wrong))
            where = row_place(row, tokens.bounds).replace("row", "response token")
            raise ValueError(
                f"{_NAME}: {LOGPROBS_FIELD} of {where}: {logprobs[row]}, but its support row is"
                f" empty{hint}"
            )


def _members(support: Any, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] bool each: the row is empty, and it holds its sampled id."""
    if not isinstance(support, PackedTensor):
        ids = SupportIds.of(support)
        return ids.counts == 0, ids.members(sampled)
    held = support.values.numpy()
    if held.shape[1] == 0:
        return np.ones(sampled.size, dtype=np.bool_), np.zeros(sampled.size, dtype=np.bool_)
    own = sampled.astype(held.dtype)  # a token id past int32 is in no row
    own[own != sampled] = NO_CANDIDATE - 1
    return held[:, 0] == NO_CANDIDATE, (held == own[:, None]).any(1)
