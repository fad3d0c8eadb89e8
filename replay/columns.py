"""Where the trajectories of a padded batch stand, read from its mask."""

import numpy as np
from torch import Tensor

from packhorse._nvtx import ranged


@ranged
def columns_from_mask(attention_mask: Tensor | np.ndarray) -> tuple[list[int], list[int]]:
    """Lengths and first columns of the trajectories of a padded batch.

    Args:
        attention_mask: [B, S], nonzero for real tokens, on the host. Left, right and two-sided
            padding are all legal.

    Returns:
        lengths [B] and first_columns [B], for ``TokenLayout.build``. A row without a token has
        length 0 and first column 0.

    Raises:
        TypeError: the mask is on a device.
        ValueError: it is not [B, S], or a row has a hole; names the trajectory.
    """
    name = "columns_from_mask"
    if isinstance(attention_mask, Tensor):
        if attention_mask.device.type != "cpu":
            raise TypeError(f"{name}: attention_mask must be on the host, not on a device")
        attention_mask = attention_mask.detach().numpy()
    mask = np.asarray(attention_mask) != 0
    if mask.ndim != 2:
        raise ValueError(f"{name}: attention_mask must be [B, S], got {mask.shape}")
    lengths = mask.sum(1)
    first = mask.argmax(1) if mask.shape[1] else np.zeros(mask.shape[0], np.int64)
    for i, (row, length, column) in enumerate(zip(mask, lengths, first, strict=True)):
        if not row[column : column + length].all():
            raise ValueError(f"{name}: attention_mask of trajectory {i} has a hole")
    return lengths.tolist(), first.tolist()
