"""One name for each meaning of a negative index. All are -1; they are not the same thing."""

from typing import Final

#: ``row_ids[i]``: this token has no row in the other buffer.
MISSING_ROW: Final = -1
#: ``rollout_sample_support[r, c]``: no candidate here; the row is shorter than the batch's width.
NO_CANDIDATE: Final = -1
#: ``routed_experts[t, l, k]``: no route was recorded; then all k of a (token, layer) are -1.
MISSING_EXPERT: Final = -1
