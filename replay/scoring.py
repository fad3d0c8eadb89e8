"""Score the sampled tokens of one microbatch, from the logits of one rank.

    logprobs[i, r] = z[s] - log sum_{c in support(i, r)} exp z[c]      z = logits / temperature

s is response token r of trajectory i, z the logits at position ``length - response_length + r - 1``
and support(i, r) the ids the sampler kept there. Without a support the sum is over the vocabulary.

A response token without a support row (an observation, an appended token) has logprob 0 and no
gradient; one that the loss uses, the end-of-sequence token that a generator appended, is scored
over the whole vocabulary. Its entropy is 0: it belongs to another distribution than the rollout's.

Nothing is read from a device, and all shapes depend on host integers alone. The result has one
entry a response token, the same on every context-parallel rank.

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
    SUPPORT_DTYPES,
    check_vocab_size,
    full_logprobs,
    support_logprobs,
)
from packhorse.packed.host import from_host, without_waiting
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.sentinels import MISSING_ROW, NO_CANDIDATE
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.host import HostInts, host_ints, host_masks
from packhorse.replay.layout import TokenLayout

#: ``status``: scored over the whole vocabulary; the others are those of ``support_logprobs``.
SCORED_FULL: Final = SAMPLED_IMPOSSIBLE + 1
#: The token that a slot predicts where it predicts none; ``full_logprobs`` scores no negative id.
_NO_TARGET: Final = -1

_NAME: Final = "score_microbatch"


@dataclass(frozen=True, eq=False)
class MicrobatchScores:
    """What ``score_microbatch`` returns: one entry a response token, trajectory after trajectory.

    The packed fields have the response lengths as ``lengths`` and their values on the logits'
    device. Statuses 0 to 4 are constants of ``packhorse.kernels.support``, 5 is one of this module:

        0  SUPPORT_OK          scored over its support
        1  SUPPORT_MISSING     it has no support: an observation, or a token that was appended
        2  SUPPORT_INVALID     its support has ids, none of them inside the vocabulary
        3  SAMPLED_OUTSIDE     the sampled id is not in its support
        4  SAMPLED_IMPOSSIBLE  the sampled id is in its support, and its logit is -inf
        5  SCORED_FULL         scored over the whole vocabulary

    Attributes:
        logprobs: [N] float32 (float64 for float64 logits), differentiable; exactly 0, without a
            gradient, where the status is 1 to 4.
        entropy: [N], dtype as ``logprobs``, nats over the support, differentiable; exactly 0 where
            the status is not 0.
        status: [N] uint8, one of the above.
        counts: [6] int64 on the logits' device: response tokens of each status; its index is the
            status.
        num_ignored: [] int64 on the logits' device: candidates left out of all supports, since they
            are repeated or outside the vocabulary.
    """

    logprobs: PackedTensor
    entropy: PackedTensor
    status: PackedTensor
    counts: Tensor
    num_ignored: Tensor


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
    vocab_size: int | None = None,
) -> MicrobatchScores:
    """Logprob of each response token, and how it was come by.

    Args:
        logits: as the model returned them, [1, T, V] ("thd") or [B, T / B, V] ("bshd"), or [T, V]
            in the layout's order. Not divided by the temperature.
        layout: the microbatch's layout on this rank.
        token_ids: the real tokens, prompt and response: packed, one int64 row a token, or dense
            [B, S] int64 with S = ``layout.batch_width``. A dense batch is read by the layout's
            ``first_columns``: it must be LEFT padded unless they were given to
            ``TokenLayout.build``.
        support: [N, C] int32 or int64, one row a response token, -1 filled, or ragged (it is padded
            to its widest row here); None: the whole vocabulary. On the device of the logits, or on
            the CPU: then it is checked, and copied from pinned memory without waiting.
        response_lengths: [B] host integers; needed without a support.
        temperature: the rollout's, applied here and nowhere else.
        loss_masks: for each trajectory host booleans, or 0 and 1, [length], or None: the tokens
            whose logprob the loss uses.
        appended: as ``loss_masks``: tokens that the generator put there. One that the loss uses
            (all of them where ``loss_masks`` is None) is scored over the whole vocabulary; its
            support row is not looked at.
        vocab_size: V where the logits have more columns, as those of a padded vocabulary: see
            ``support_logprobs``. By default all columns are the vocabulary.

    Returns:
        ``MicrobatchScores``. ``logprobs`` differentiates once in ``logits``.

    Raises:
        TypeError, ValueError: a shape, dtype or device is wrong; lengths differ from the layout's;
            a response has no prompt; a trajectory has two appended tokens with loss, or one outside
            its response; a support on the CPU has no row for another token with loss. Names the
            trajectory.
    """
    if isinstance(support, PackedRagged):
        support = support.to_padded()
    _check_arguments(logits, layout, token_ids, support)
    responses = _response_lengths(layout, support, response_lengths)
    if logits.dim() == 3:
        logits = layout.from_model(logits)
    if logits.dim() != 2 or logits.shape[0] != layout.num_tokens:
        raise ValueError(
            f"{_NAME}: logits must be [{layout.num_tokens}, V] or as the model returns them, got"
            f" {list(logits.shape)}"
        )
    check_vocab_size(_NAME, logits, vocab_size)
    row_ids = layout.support_row_ids(responses)  # checks that the responses fit
    full_positions = _full_positions(layout, responses, support, loss_masks, appended)
    sampled_ids = _next_token_ids(layout, token_ids)
    # a slot that predicts no response token has no target
    sampled_ids = torch.where(row_ids == MISSING_ROW, _NO_TARGET, sampled_ids)

    if support is None:
        logprobs = full_logprobs(
            logits, sampled_ids, temperature=temperature, vocab_size=vocab_size
        )
        entropy = torch.zeros_like(logprobs)
        status = torch.full_like(row_ids, SCORED_FULL, dtype=torch.uint8)
        num_ignored = torch.zeros_like(row_ids)
    else:
        rows = without_waiting(support.values, logits.device)
        candidates = gather_rows(rows, row_ids, fill=NO_CANDIDATE)
        scores = support_logprobs(
            logits, candidates, sampled_ids, temperature=temperature, vocab_size=vocab_size
        )
        logprobs, entropy, status = scores.logprobs, scores.entropy, scores.status
        num_ignored = scores.num_ignored.long()
        if any(position is not None for position in full_positions):
            full, is_full = _score_full(
                layout, logits, sampled_ids, full_positions, temperature, vocab_size
            )
            logprobs = torch.where(is_full, full, logprobs)
            entropy = torch.where(is_full, 0.0, entropy)
            status = status.masked_fill(is_full, SCORED_FULL)
            num_ignored = num_ignored.masked_fill(is_full, 0)

    # one restore for all: a status and a count of candidates are exact in the logprobs' dtype
    fields = [logprobs, entropy, status.to(logprobs.dtype), num_ignored.to(logprobs.dtype)]
    restored = layout.restore(torch.stack(fields, dim=1)).flatten(0, 1)
    restored = restored.index_select(0, _response_cells(layout, responses))
    logprobs, entropy, status, num_ignored = restored.unbind(1)
    status = status.detach().to(torch.uint8)
    statuses = torch.arange(SCORED_FULL + 1, device=status.device)

    def packed(values: Tensor) -> PackedTensor:
        return PackedTensor.from_lengths(values.contiguous(), responses)

    return MicrobatchScores(
        logprobs=packed(logprobs),
        entropy=packed(entropy if support is not None else entropy.detach()),
        status=packed(status),
        counts=(status[:, None] == statuses).sum(0),
        num_ignored=num_ignored.detach().to(torch.int64).sum(),
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


def _score_full(
    layout: TokenLayout,
    logits: Tensor,
    sampled_ids: Tensor,
    positions: Sequence[int | None],
    temperature: float,
    vocab_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Scores [T] and where they hold [T] bool; only the named slots' logits are read."""
    counts = [int(position is not None) for position in positions]
    row_ids = layout.row_ids(counts, [position or 0 for position in positions])
    slots = torch.arange(layout.num_tokens, device=logits.device)
    own = scatter_rows(slots, row_ids, sum(counts), fill=MISSING_ROW)  # another rank's slot
    targets = gather_rows(sampled_ids, own, fill=_NO_TARGET)
    scored = full_logprobs(
        gather_rows(logits, own), targets, temperature=temperature, vocab_size=vocab_size
    )
    return gather_rows(scored, row_ids), row_ids != MISSING_ROW


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
    logits: object, layout: object, token_ids: object, support: PackedTensor | None
) -> None:
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"{_NAME}: layout must be a TokenLayout, got {type(layout).__name__}")
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"{_NAME}: logits must be a floating-point tensor, got {got}")
    if not isinstance(token_ids, PackedTensor | Tensor):
        raise TypeError(
            f"{_NAME}: token_ids must be a PackedTensor or a tensor, got {type(token_ids).__name__}"
        )
    if support is None:
        return
    field = f"{_NAME}: rollout_sample_support"
    if not isinstance(support, PackedTensor):
        raise TypeError(
            f"{field} must be a PackedTensor, a PackedRagged or None, got {type(support).__name__}"
        )
    if support.dtype not in SUPPORT_DTYPES:
        raise TypeError(f"{field} must be int32 or int64, got {support.dtype}")
    if len(support.row_shape) != 1:
        raise ValueError(f"{field} must be [N, C], got {list(support.values.shape)}")
    if support.device not in (logits.device, torch.device("cpu")):
        raise ValueError(
            f"{field} is on {support.device}, logits are on {logits.device}; it must be there or on"
            " the CPU"
        )


def _response_lengths(
    layout: TokenLayout, support: PackedTensor | None, response_lengths: HostInts | None
) -> tuple[int, ...]:
    if response_lengths is None:
        if support is None:
            raise ValueError(f"{_NAME}: without a support, response_lengths must be given")
        responses = support.lengths
    else:
        responses = host_ints(_NAME, "response_lengths", response_lengths)
        if support is not None and support.lengths != responses:
            trajectory, got, length = _first_difference(support.lengths, responses)
            raise ValueError(
                f"{_NAME}: rollout_sample_support of trajectory {trajectory} has {got} rows for"
                f" {length} response tokens"
            )
    if len(responses) != layout.num_sequences:
        raise ValueError(
            f"{_NAME}: {len(responses)} responses for {layout.num_sequences} trajectories"
        )
    return responses


def _first_difference(got: Sequence[int], expected: Sequence[int]) -> tuple[int, int, int]:
    """The first trajectory where two lists of lengths differ, and what each says (0: nothing)."""
    for i in range(max(len(got), len(expected))):
        pair = (got[i] if i < len(got) else 0, expected[i] if i < len(expected) else 0)
        if pair[0] != pair[1] or i >= min(len(got), len(expected)):
            return i, *pair
    raise AssertionError("the lists are equal")


def _full_positions(
    layout: TokenLayout,
    responses: Sequence[int],
    support: PackedTensor | None,
    loss_masks: Sequence[Any] | None,
    appended: Sequence[Any] | None,
) -> list[int | None]:
    """For each trajectory the position whose logits score its appended token with loss."""
    masks = host_masks(_NAME, "loss_masks", loss_masks, layout.lengths)
    added = host_masks(_NAME, "appended", appended, layout.lengths)
    positions: list[int | None] = []
    for i, (length, response) in enumerate(zip(layout.lengths, responses, strict=True)):
        loss, put = masks[i], added[i]
        full = np.zeros(length, bool) if put is None else put if loss is None else put & loss
        tokens = np.flatnonzero(full)
        if len(tokens) > 1:
            raise ValueError(
                f"{_NAME}: appended of trajectory {i}: tokens {tokens[0]} and {tokens[1]} both have"
                " loss; at most one a trajectory"
            )
        if len(tokens) and tokens[0] < length - response:
            raise ValueError(
                f"{_NAME}: appended of trajectory {i}: token {tokens[0]} is not one of its"
                f" {response} response tokens"
            )
        positions.append(int(tokens[0]) - 1 if len(tokens) else None)
        if support is not None and support.values.device.type == "cpu" and loss is not None:
            bare = (support.segment(i) < 0).all(1).numpy()
            unscored = bare & (loss & ~full)[length - response :]
            if unscored.any():
                token = length - response + int(unscored.argmax())
                raise ValueError(
                    f"{_NAME}: rollout_sample_support of trajectory {i} has no candidate for"
                    f" token {token}, which has loss and was not appended"
                )
    return positions
