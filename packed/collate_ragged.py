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
from packhorse.packed.host import check_total
from packhorse.packed.host_arrays import positive
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.support_checks import SupportRows, checked_support


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
    vocab_size = positive(vocab_size, f"{name}: vocab_size")
    check_total(name, vocab_size, "token ids")
    token_ids, counts, bounds = checked_support(name, support, sampled_ids, vocab_size)
    values = torch.from_numpy(token_ids)
    return PackedRagged.from_lengths(values, counts, np.diff(bounds).tolist())
