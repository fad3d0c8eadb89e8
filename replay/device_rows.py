"""Device side of one replay microbatch: which row each slot takes, its mask, a chunk's targets.

Nothing here reads the device. Sizes: T token slots of this rank's routers, L captured layers,
J layers of a chunk, K experts a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packhorse._env import CHECK_VALUES
from packhorse.kernels.routes import gather_routes
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.routers import spread_offset


class MicrobatchRows:
    """Made once a microbatch; the same for every chunk of a rank.

    Args:
        microbatch: whose rows these are.
    """

    def __init__(self, microbatch: ReplayMicrobatch) -> None:
        self.microbatch = microbatch
        self._row_ids: Tensor | None = None
        self._without_row: Tensor | None = None
        self._live_rows: Tensor | None = None
        self._padding_mask: Tensor | None = None

    @classmethod
    def build(cls, microbatch: ReplayMicrobatch) -> "MicrobatchRows":
        """Nothing is launched before it is asked for."""
        return cls(microbatch)

    @property
    def row_ids(self) -> Tensor:
        """[T] int64 rows of the packed routes, -1: none."""
        if self._row_ids is None:
            self._row_ids = self.microbatch.layout.route_row_ids(self.microbatch.captured)
        return self._row_ids

    @property
    def live_rows(self) -> Tensor | None:
        """[T] bool, True where the router chooses; None: nowhere."""
        if self._live_rows is None and self.microbatch.num_live:
            layout = self.microbatch.layout
            live_ids = layout.row_ids(
                self.microbatch.live_counts,
                starts=self.microbatch.captured,
                slice=layout.sequence_parallel,
            )
            self._live_rows = live_ids >= 0
        return self._live_rows

    @property
    def padding_mask(self) -> Tensor:
        """[T] bool, True for slots neither replayed nor live."""
        if self._padding_mask is None:
            without_row = self._without_row if self._without_row is not None else self.row_ids < 0
            live_rows = self.live_rows
            self._padding_mask = without_row if live_rows is None else without_row & ~live_rows
        return self._padding_mask

    def model_mask(self, *, scattered_by_model: bool) -> Tensor:
        """[B, S] bool for the model: whole where it slices the mask itself, else this rank's."""
        layout = self.microbatch.layout
        if not layout.sequence_parallel:
            return layout.to_model(self.padding_mask)
        if scattered_by_model:
            return layout.to_model(layout.row_ids(self._covered()) < 0)
        if layout.format == "thd":
            return self.padding_mask.unsqueeze(0)
        return self.padding_mask.view(-1, layout.num_sequences).transpose(0, 1).contiguous()

    def mtp_masks(self, depths: Sequence[int]) -> tuple[Tensor, ...]:
        """[T] bool for MTP heads: one of depth d sees a position with the token d places on."""
        layout = self.microbatch.layout
        return tuple(
            layout.row_ids(
                [max(count - depth, 0) for count in self._covered()],
                slice=layout.sequence_parallel,
            )
            < 0
            for depth in depths
        )

    def gather_targets(
        self,
        positions: Sequence[int],
        *,
        num_experts: int,
        topk: int,
        ep_size: int,
        dtype: torch.dtype = torch.int32,
    ) -> Tensor:
        """[J, T, K] ``dtype``: experts of the layers at these ``positions`` of the axis."""
        routes = self.microbatch.routes
        assert routes is not None
        layout, layers = self.microbatch.layout, as_range(positions)
        spread = self.microbatch.dummy == "spread"
        options: dict[str, Any] = {
            "num_experts": num_experts,
            "dtype": dtype,
            "dummy": self.microbatch.dummy,
            "ep_size": ep_size,
            "spread_offset": spread_offset(layout, topk) if spread else 0,
        }
        if self._row_ids is None and routes.device == layout.device:  # the first chunk
            gathered = layout.gather_routes(routes, layers, **options)
            topk_ids, self._without_row, self._row_ids = gathered
        else:
            values = routes.values
            if values.device != layout.device:
                values, layers = _copy_layers(values, layers, layout.device)
            topk_ids, self._without_row = gather_routes(values, self.row_ids, layers, **options)
        if CHECK_VALUES and topk > 1:
            ordered = topk_ids.sort(-1).values
            distinct = (ordered[..., 1:] != ordered[..., :-1]).all()
            torch._assert_async(distinct, "ReplaySession: a replayed row repeats an expert")
        return topk_ids

    def any_covered(self, depth: int = 0) -> bool:
        """Whether an MTP head of this depth (0: the decoder) has any row that is no padding."""
        if depth == 0:
            return self.microbatch.num_replayed + self.microbatch.num_live > 0
        return any(count > depth for count in self._covered())

    def _covered(self) -> list[int]:
        """Replayed and live positions of each trajectory: a prefix."""
        captured, live = self.microbatch.captured, self.microbatch.live_counts
        return [a + b for a, b in zip(captured, live, strict=True)]


def as_range(positions: Sequence[int]) -> range | Sequence[int]:
    """``positions`` as a range where they are one of step 1, which needs no table of them."""
    if isinstance(positions, range) or not positions:
        return positions
    run = range(positions[0], positions[0] + len(positions))
    return run if list(run) == list(positions) else positions


def _copy_layers(
    values: Tensor, layers: range | Sequence[int], device: torch.device
) -> tuple[Tensor, range | Sequence[int]]:
    """Only these layers cross, and from pinned memory the copy does not wait."""
    if values.is_pinned() and len(layers) == values.shape[1]:
        return values.to(device, non_blocking=True), layers
    shape = (values.shape[0], len(layers), values.shape[2])
    staged = torch.empty(shape, dtype=values.dtype, pin_memory=True)
    if isinstance(layers, range):
        staged.copy_(values[:, layers.start : layers.stop])
    else:
        torch.index_select(values, 1, torch.tensor(layers), out=staged)
    return staged.to(device, non_blocking=True), range(len(layers))
