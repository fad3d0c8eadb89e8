"""From the sampling supports an engine returned to packed rows of different widths.

    pack_ragged_support   ids a response token -> rollout_sample_support, ragged

Input, checks and their order are those of ``pack_support``, and so is the result but for its form:
``pack_ragged_support(...).to_padded()`` holds the same ids. No row makes another one wider, so rows
of the whole vocabulary (tokens that no filter cut) cost their own ids only.

Sizes: B trajectories, N response tokens, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.collate import SUPPORT_FIELD, SupportRows, _positive, _support_rows
from packhorse.packed.host import accumulate, check_total, host_ints
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.ragged_rows import row_place
from packhorse.packed.sentinels import NO_CANDIDATE


@ranged
def pack_ragged_support(
    support: SupportRows | Sequence[SupportRows | np.ndarray | Tensor | Sequence[Sequence[int]]],
    sampled_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
) -> PackedRagged:
    """Join the sampling supports of B trajectories, each row as wide as it is.

    Args:
        support: for each trajectory one row a response token (vLLM ``sampling_mask.token_ids``): a
            sequence of id sequences, a ``SupportRows``, or a host array [response tokens, C]. One
            ``SupportRows`` may hold the rows of all trajectories, in order. Ids are in [0, V), none
            twice in a row. -1 (``NO_CANDIDATE``) is no id and is dropped, so a row of nothing else
            becomes empty. An empty row belongs to a token that was not sampled (an observation, an
            appended EOS).
        sampled_ids: B sequences of response token ids. Each is a member of its row unless that is
            empty.
        vocab_size: V.

    Returns:
        B segments of one row a response token, on the CPU: the ids in their given order. It shares
        no memory with the input.

    Raises:
        TypeError: an argument or a trajectory has a wrong type, or is on a device.
        ValueError: the rows of a trajectory are not as many as its response tokens; an id is out of
            range or repeated in its row; the sampled id is no member.

    Example:
        >>> packed = pack_ragged_support([[[7, 9], []], [[4]]], [[9, 1], [4]], vocab_size=10)
        >>> packed.values.tolist(), packed.row_offsets.tolist(), packed.lengths
        ([7, 9, 4], [0, 2, 2, 3], (2, 1))
    """
    name = "pack_ragged_support"
    vocab_size = _positive(vocab_size, f"{name}: vocab_size")
    check_total(name, vocab_size, "token ids")
    if not isinstance(sampled_ids, Sequence) or isinstance(sampled_ids, str | bytes):
        raise TypeError(f"{name}: sampled_ids must be a sequence of one id sequence a trajectory")
    sampled = [
        host_ints(ids, f"{name}: sampled_ids of trajectory {i}")
        for i, ids in enumerate(sampled_ids)
    ]
    bounds = accumulate(name, np.array([ids.size for ids in sampled], dtype=np.int64))
    lengths = np.diff(bounds)
    token_ids, counts = _support_rows(name, support, lengths)
    sampled_flat = np.concatenate([np.empty(0, dtype=np.int64), *sampled])

    rows = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    present = token_ids != NO_CANDIDATE
    if not present.all():
        rows, token_ids = rows[present], token_ids[present]
        counts = np.bincount(rows, minlength=counts.size)
    where = f"{name}: {SUPPORT_FIELD} of"
    _check_rows(where, token_ids, rows, counts, sampled_flat, bounds, vocab_size)
    values = torch.from_numpy(token_ids.astype(np.int32))
    return PackedRagged.from_lengths(values, counts, lengths.tolist())


def _check_rows(
    where: str,
    token_ids: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
    sampled: np.ndarray,
    bounds: np.ndarray,
    vocab_size: int,
) -> None:
    """``token_ids`` [ids] of ``rows`` [ids], of ``counts`` [N] ids; ``sampled`` [N] ids."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        token = token_ids[first]
        problem = f"not below vocab_size={vocab_size}" if token > 0 else "negative"
        raise ValueError(f"{where} {row_place(rows[first], bounds)}: id {token} is {problem}")
    keys = np.sort(rows * vocab_size + token_ids)  # rows < 2**31 and ids < 2**31: int64 holds it
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if repeated.size:
        row, token = divmod(int(keys[repeated[0]]), vocab_size)
        raise ValueError(f"{where} {row_place(row, bounds)}: id {token} is repeated")
    is_member = np.zeros(counts.size, dtype=np.bool_)
    is_member[rows[token_ids == sampled[rows]]] = True
    missing = np.flatnonzero((counts > 0) & ~is_member)
    if missing.size:
        row = int(missing[0])
        raise ValueError(
            f"{where} {row_place(row, bounds)}: the sampled id {sampled[row]} is not among its "
            f"{counts[row]} ids"
        )
