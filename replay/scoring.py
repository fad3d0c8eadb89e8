"""Score the sampled tokens of one microbatch, from the logits of one rank or its hidden states.

    logprobs[i, r] = z[s] - log sum_{c in support(i, r)} exp z[c]      z = logits / temperature

s is response token r of trajectory i, z the logits at position ``length - response_length + r - 1``
and support(i, r) the ids the sampler kept there. Without a support the sum is over the vocabulary.
From hidden states and the LM head only the logits of candidates are made.

A response token without a support row (an observation, an appended token) has logprob 0 and no
gradient; one that the loss uses, the end-of-sequence token that a generator appended, is scored
over the whole vocabulary, and so is one whose support was cut, where that is asked for. Their
entropy is 0: they belong to another distribution than the rollout's.

Nothing is read from a device, and all shapes depend on host integers alone, of all trajectories:
ranks that share them call the same collectives, or raise the same error before the first of them.
The results are the same on every context- and tensor-parallel rank.

Sizes: B trajectories, T tokens of this rank, N response tokens, V vocabulary, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.rows import gather_rows, scatter_rows
from packhorse.kernels.support import (
    SAMPLED_IMPOSSIBLE,
    SAMPLED_OUTSIDE,
    SUPPORT_DTYPES,
    SUPPORT_OK,
    check_temperature,
)
from packhorse.packed.host import from_host
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.sentinels import MISSING_ROW
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.host import HostInts, host_ints, host_masks
from packhorse.replay.layout import TokenLayout
from packhorse.replay.scoring_sources import HiddenStates, LmHead, Logits, Source

__all__ = ["SCORED_FULL", "LmHead", "MicrobatchScores", "score_microbatch"]

#: ``status``: scored over the whole vocabulary; the others are those of ``support_logprobs``.
SCORED_FULL: Final = SAMPLED_IMPOSSIBLE + 1
#: The token that a slot predicts where it predicts none; ``full_logprobs`` scores no negative id.
_NO_TARGET: Final = -1
#: ``valid``: the cell holds a score.
_SCORED: Final = (SUPPORT_OK, SCORED_FULL)

_NAME: Final = "score_microbatch"


@dataclass(frozen=True, eq=False)
class MicrobatchScores:
    """What ``score_microbatch`` returns: one entry a response token, packed and as a dense batch.

    The packed fields have the response lengths as ``lengths`` and their values on the device of
    what was scored. Statuses 0 to 4 are constants of ``packhorse.kernels.support``, 5 is one of
    this module:

        0  SUPPORT_OK          scored over its support
        1  SUPPORT_MISSING     it has no support: an observation, or a token that was appended
        2  SUPPORT_INVALID     its support has ids, none of them inside the vocabulary
        3  SAMPLED_OUTSIDE     the sampled id is not in its support, or negative
        4  SAMPLED_IMPOSSIBLE  the sampled id is in its support, and its logit is -inf
        5  SCORED_FULL         scored over the whole vocabulary

    Attributes:
        logprobs: [N] float32 (float64 for float64 logits), differentiable; exactly 0, without a
            gradient, where the status is 1 to 4.
        entropy: [N], dtype as ``logprobs``, nats over the support, differentiable; exactly 0 where
            the status is not 0. Without a support it is over the vocabulary.
        status: [N] uint8, one of the above.
        counts: [6] int64 on their device: response tokens of each status; its index is the status.
        num_ignored: [] int64 there: candidates left out of all supports, since they are repeated or
            outside the vocabulary.
        dense_logprobs, dense_entropy: [B, S - 1], the same as a batch: position s of a trajectory,
            which predicts token s + 1, stands in column ``first_column + s``, and what is no
            response token is 0. S is the layout's ``batch_width``.
        valid: [B, S - 1] bool: the status is 0 or 5.
    """

    logprobs: PackedTensor
    entropy: PackedTensor
    status: PackedTensor
    counts: Tensor
    num_ignored: Tensor
    dense_logprobs: Tensor
    dense_entropy: Tensor
    valid: Tensor


@ranged
def score_microbatch(
    logits: Tensor,
    layout: TokenLayout,
    token_ids: PackedTensor | Tensor,
    support: PackedTensor | PackedRagged | None = None,
    *,
    response_lengths: HostInts | None = None,
    temperature: float = 1.0,
    loss_masks: Sequence[Any] | None = None,
    appended: Sequence[Any] | None = None,
    cut: Sequence[Any] | None = None,
    vocab_size: int | None = None,
    lm_head: LmHead | None = None,
) -> MicrobatchScores:
    """Logprob of each response token, and how it was come by.

    Args:
        logits: as the model returned them, [1, T, V] ("thd") or [B, T / B, V] ("bshd"), or [T, V]
            in the layout's order. Not divided by the temperature, and not a shard of the
            vocabulary, as Megatron returns with ``parallel_output``: its columns would be taken for
            the first V ids. With ``lm_head`` hidden states in their place, of the same shapes with
            H for V, or 1/TP of the tokens where it is ``sequence_parallel``.
        layout: the microbatch's layout on this rank.
        token_ids: the real tokens, prompt and response: packed, one int64 row a token, or dense
            [B, S] int64 with S = ``layout.batch_width``. A dense batch is read by the layout's
            ``first_columns``: it must be LEFT padded unless they were given to
            ``TokenLayout.build``.
        support: [N, C] int32 or int64, one row a response token, -1 filled, or ragged; None: the
            whole vocabulary. Rows are read where they are packed: no [T, C] candidates are made. On
            the logits' device, or on the CPU: then it is checked, and copied from pinned memory
            without waiting.
        response_lengths: [B] host integers; needed without a support.
        temperature: the rollout's, applied here and nowhere else.
        loss_masks: for each trajectory host booleans, or 0 and 1, [length], or None: the tokens
            whose logprob the loss uses.
        appended: as ``loss_masks``: tokens that the generator put there. One that the loss uses
            (all of them where ``loss_masks`` is None) is scored over the whole vocabulary; its
            support row is not looked at.
        cut: as ``appended``, any number a trajectory: tokens whose support does not hold all that
            the sampler kept, so that its mass is below 1. They are scored likewise.
        vocab_size: V where the logits, or the shards of the LM head together, have more columns, as
            those of a padded vocabulary: see ``support_logprobs``. By default all columns are the
            vocabulary.
        lm_head: the LM head; the first argument is then what it is given, and no logits are made
            but those of candidates.

    Returns:
        ``MicrobatchScores``. Logprobs and entropy differentiate once in ``logits``, or in the
        hidden states and the weight and bias of ``lm_head``.

    Raises:
        TypeError, ValueError: a shape, dtype or device is wrong; lengths differ from the layout's;
            a response has no prompt; a trajectory has two appended tokens with loss, or one outside
            its response; a support on the CPU, or a ragged one, has no row for another token with
            loss. Names the trajectory.
    """
    _check_arguments(logits, layout, token_ids, support, lm_head)
    temperature = check_temperature(_NAME, temperature)
    responses = _response_lengths(layout, support, response_lengths)
    row_ids = layout.support_row_ids(responses)  # checks that the responses fit
    full = _full_rows(layout, responses, support, loss_masks, appended, cut)
    sampled_ids = _next_token_ids(layout, token_ids)
    source: Source
    if lm_head is None:
        source = Logits(logits, layout, temperature, vocab_size)
    else:
        source = HiddenStates(logits, layout, lm_head, temperature, vocab_size)
    # a slot that predicts no response token has no target
    sampled_ids = torch.where(row_ids == MISSING_ROW, _NO_TARGET, sampled_ids)
    # a negative id, such as a label of -100, would pass for one of probability 1 there
    over_all = torch.where(sampled_ids < 0, SAMPLED_OUTSIDE, SCORED_FULL).to(torch.uint8)

    if support is None:
        logprobs, entropy = _score_rows(source, layout, sampled_ids, row_ids, sum(responses))
        status = over_all
        num_ignored = torch.zeros_like(row_ids)
    else:
        scores = source.over_support(support, row_ids, sampled_ids)
        logprobs, entropy, status = scores.logprobs, scores.entropy, scores.status
        num_ignored = scores.num_ignored.long()
        if full.any():
            numbers = from_host(np.where(full, full.cumsum() - 1, MISSING_ROW), layout.device)
            full_ids = gather_rows(numbers, row_ids, fill=MISSING_ROW)
            scored, _ = _score_rows(source, layout, sampled_ids, full_ids, int(full.sum()))
            is_full = full_ids != MISSING_ROW
            logprobs = torch.where(is_full, scored, logprobs)
            entropy = torch.where(is_full, 0.0, entropy)
            status = torch.where(is_full, over_all, status)
            num_ignored = num_ignored.masked_fill(is_full, 0)

    # one restore for all: a status and a count of candidates are exact in the logprobs' dtype, and
    # a cell of no response token is 0, one of status s is s + 1
    shown = torch.where(row_ids == MISSING_ROW, 0, status.to(row_ids.dtype) + 1)
    fields = [logprobs, entropy, shown.to(logprobs.dtype), num_ignored.to(logprobs.dtype)]
    restored = layout.restore(torch.stack(fields, dim=1))
    packed = restored.flatten(0, 1).index_select(0, _response_cells(layout, responses))
    shown = restored[..., 2].detach()
    status = (packed[:, 2].detach() - 1).to(torch.uint8)
    statuses = torch.arange(SCORED_FULL + 1, device=status.device)
    return MicrobatchScores(
        logprobs=PackedTensor.from_lengths(packed[:, 0].contiguous(), responses),
        entropy=PackedTensor.from_lengths(packed[:, 1].contiguous(), responses),
        status=PackedTensor.from_lengths(status, responses),
        counts=(status[:, None] == statuses).sum(0),
        num_ignored=packed[:, 3].detach().to(torch.int64).sum(),
        dense_logprobs=restored[..., 0],
        dense_entropy=restored[..., 1],
        valid=(shown == _SCORED[0] + 1) | (shown == _SCORED[1] + 1),
    )


# --- parts ----------------------------------------------------------------------------------------


def _next_token_ids(layout: TokenLayout, token_ids: PackedTensor | Tensor) -> Tensor:
    """[T] int64: the token that each slot predicts, ``_NO_TARGET`` where there is none."""
    packed = isinstance(token_ids, PackedTensor)
    values = token_ids.values if isinstance(token_ids, PackedTensor) else token_ids
    if values.dtype != torch.int64 or values.dim() != (1 if packed else 2):
        raise TypeError(
            f"{_NAME}: token_ids must be int64 {'packed [tokens]' if packed else '[B, S]'}, got"
            f" {values.dtype} {list(values.shape)}"
        )
    if not isinstance(token_ids, PackedTensor):
        return layout.align(token_ids, _NO_TARGET, next_token=True)
    if token_ids.lengths != layout.lengths:
        trajectory, got, length = _first_difference(token_ids.lengths, layout.lengths)
        raise ValueError(
            f"{_NAME}: token_ids of trajectory {trajectory} has {got} rows for {length} tokens"
        )
    return gather_rows(values, layout.token_row_ids(next_token=True), fill=_NO_TARGET)


def _score_rows(
    source: Source, layout: TokenLayout, sampled_ids: Tensor, row_ids: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [T] over the vocabulary of the slots that ``row_ids`` numbers from 0 to
    ``num_rows``, 0 elsewhere; what other slots hold is not read where they are the more, and is
    never part of a result or a gradient."""
    if num_rows >= layout.num_tokens:
        return source.over_vocabulary(torch.where(row_ids == MISSING_ROW, _NO_TARGET, sampled_ids))
    slots = torch.arange(layout.num_tokens, device=layout.device)
    own = scatter_rows(slots, row_ids, num_rows, fill=MISSING_ROW)  # -1: another rank's slot
    targets = gather_rows(sampled_ids, own, fill=_NO_TARGET)
    logprobs, entropy = source.over_vocabulary(targets, own)
    return gather_rows(logprobs, row_ids), gather_rows(entropy, row_ids)


def _response_cells(layout: TokenLayout, responses: Sequence[int]) -> Tensor:
    """[N] int64 cells of the flattened [B, S - 1] that hold the response tokens' scores."""
    width = max(layout.batch_width - 1, 0)
    places = zip(layout.first_columns, layout.lengths, responses, strict=True)
    runs = [
        i * width + column + length - response - 1 + np.arange(response)
        for i, (column, length, response) in enumerate(places)
    ]
    return from_host(np.concatenate([np.empty(0, np.int64), *runs]), layout.device)


# --- checks, on host data -------------------------------------------------------------------------


def _check_arguments(
    logits: object, layout: object, token_ids: object, support: object, lm_head: object
) -> None:
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"{_NAME}: layout must be a TokenLayout, got {type(layout).__name__}")
    if lm_head is not None and not isinstance(lm_head, LmHead):
        raise TypeError(f"{_NAME}: lm_head must be an LmHead, got {type(lm_head).__name__}")
    what = "logits" if lm_head is None else "hidden states"
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"{_NAME}: {what} must be a floating-point tensor, got {got}")
    if not isinstance(token_ids, PackedTensor | Tensor):
        raise TypeError(
            f"{_NAME}: token_ids must be a PackedTensor or a tensor, got {type(token_ids).__name__}"
        )
    for name, device in (("layout", layout.device), ("token_ids", token_ids.device)):
        if device != logits.device:
            raise ValueError(f"{_NAME}: {name} is on {device}, {what} are on {logits.device}")
    if support is None:
        return
    field = f"{_NAME}: rollout_sample_support"
    if not isinstance(support, PackedTensor | PackedRagged):
        raise TypeError(
            f"{field} must be a PackedTensor, a PackedRagged or None, got {type(support).__name__}"
        )
    if support.dtype not in SUPPORT_DTYPES:
        raise TypeError(f"{field} must be int32 or int64, got {support.dtype}")
    if isinstance(support, PackedTensor) and len(support.row_shape) != 1:
        raise ValueError(f"{field} must be [N, C], got {list(support.values.shape)}")
    if support.device not in (logits.device, torch.device("cpu")):
        raise ValueError(
            f"{field} is on {support.device}, {what} are on {logits.device}; it must be there or on"
            " the CPU"
        )


def _response_lengths(
    layout: TokenLayout,
    support: PackedTensor | PackedRagged | None,
    response_lengths: HostInts | None,
) -> tuple[int, ...]:
    if response_lengths is not None:
        responses = host_ints(_NAME, "response_lengths", response_lengths)
    elif support is not None:
        responses = support.lengths
    else:
        raise ValueError(f"{_NAME}: without a support, response_lengths must be given")
    if len(responses) != layout.num_sequences:
        raise ValueError(
            f"{_NAME}: {len(responses)} responses for {layout.num_sequences} trajectories"
        )
    if support is not None and support.lengths != responses:
        trajectory, got, length = _first_difference(support.lengths, responses)
        raise ValueError(
            f"{_NAME}: rollout_sample_support of trajectory {trajectory} has {got} rows for"
            f" {length} response tokens"
        )
    return responses


def _first_difference(got: Sequence[int], expected: Sequence[int]) -> tuple[int, int, int]:
    """The first trajectory where two lists of lengths differ, and what each says (0: nothing)."""
    for i in range(max(len(got), len(expected))):
        pair = (got[i] if i < len(got) else 0, expected[i] if i < len(expected) else 0)
        if pair[0] != pair[1] or i >= min(len(got), len(expected)):
            return i, *pair
    raise AssertionError("the lists are equal")


def _full_rows(
    layout: TokenLayout,
    responses: Sequence[int],
    support: PackedTensor | PackedRagged | None,
    loss_masks: Sequence[Any] | None,
    appended: Sequence[Any] | None,
    cut: Sequence[Any] | None,
) -> np.ndarray:
    """[N] bool: the response tokens with loss that are scored over the vocabulary in any case."""
    masks = host_masks(_NAME, "loss_masks", loss_masks, layout.lengths)
    added = host_masks(_NAME, "appended", appended, layout.lengths)
    parted = host_masks(_NAME, "cut", cut, layout.lengths)
    has_candidates = None if support is None else _has_candidates(support)
    rows = np.zeros(sum(responses), bool)
    end = 0
    for i, (length, response) in enumerate(zip(layout.lengths, responses, strict=True)):
        begin, end = end, end + response
        loss = np.ones(length, bool) if masks[i] is None else masks[i]
        full = np.zeros(length, bool)
        for field, marked in (("appended", added[i]), ("cut", parted[i])):
            if marked is None:
                continue
            marked = marked & loss
            tokens = np.flatnonzero(marked)
            where = f"{_NAME}: {field} of trajectory {i}"
            if field == "appended" and len(tokens) > 1:
                raise ValueError(
                    f"{where}: tokens {tokens[0]} and {tokens[1]} both have loss; at most one a"
                    " trajectory"
                )
            if len(tokens) and tokens[0] < length - response:
                raise ValueError(
                    f"{where}: token {tokens[0]} is not one of its {response} response tokens"
                )
            full |= marked
        rows[begin:end] = full[length - response :]
        if has_candidates is not None and masks[i] is not None:
            unscored = ~has_candidates[begin:end] & (loss & ~full)[length - response :]
            if unscored.any():
                token = length - response + int(unscored.argmax())
                raise ValueError(
                    f"{_NAME}: rollout_sample_support of trajectory {i} has no candidate for"
                    f" token {token}, which has loss and was not appended"
                )
    return rows


def _has_candidates(support: PackedTensor | PackedRagged) -> np.ndarray | None:
    """[N] bool: the row names an id; None where only the device knows."""
    if isinstance(support, PackedRagged):
        return support.widths > 0
    if support.device.type != "cpu":
        return None
    return (support.values >= 0).any(1).numpy()
