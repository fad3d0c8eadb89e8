"""A layout for CUDA graphs: tables in buffers that stay, lengths that change between replays.

A graph fixes addresses and shapes, so the token slots of a rank keep their number (a packer pads
the slab to it) while the trajectories in them change. ``StaticLayout`` owns the tables that the
kernels of a ``TokenLayout`` read; ``update`` copies a microbatch's into them, outside the graph,
and the captured kernels then follow it.

    static = StaticLayout(layout, max_sequences=64, dense=True)
    with torch.cuda.graph(graph):
        row_ids = static.route_row_ids()
        topk_ids, padding_mask = gather_routes(routes_buffer, row_ids, layers, num_experts=E)
        tokens = static.align(token_ids_buffer, fill=0)
    for layout, routes, token_ids in microbatches:
        static.update(layout, captured_lengths=routes.lengths)
        routes_buffer[: routes.num_rows].copy_(routes.values)
        token_ids_buffer[: len(token_ids)].copy_(token_ids)
        graph.replay()
"""

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged_methods
from packhorse.kernels.layout import make_row_ids
from packhorse.replay.align import align_by_tables, restore_by_tables
from packhorse.replay.host import HostInts, is_int
from packhorse.replay.layout import TokenLayout
from packhorse.replay.layout_checks import support_starts
from packhorse.replay.staging import copy_into

#: What a graph cannot change: properties of a layout that must stay.
_GEOMETRY = (
    "format", "num_tokens", "tp_size", "tp_rank", "cp_size", "cp_rank", "cp_order",
    "sequence_parallel", "device",
)  # fmt: skip


@ranged_methods()
class StaticLayout:
    """The methods of a ``TokenLayout`` for microbatches of one geometry, from tables that stay.

    Args:
        layout: a microbatch's layout; later ones have its format, ranks, device and number of
            tokens ("thd": give ``TokenLayout.build`` ``padded_lengths`` with a tail pad; "bshd":
            its number of trajectories too). Its tables are there, its rows are not until
            ``update`` names them.
        max_sequences: W, most padded sequences of a microbatch, a tail pad counted.
        dense: ``align`` and ``restore`` are used: later layouts have its ``batch_width`` too.

    Raises:
        TypeError, ValueError: ``layout`` is no layout, or has more sequences than that.
    """

    def __init__(self, layout: TokenLayout, *, max_sequences: int, dense: bool = False) -> None:
        name = "StaticLayout"
        if not isinstance(layout, TokenLayout):
            raise TypeError(f"{name}: layout must be a TokenLayout, got {type(layout).__name__}")
        if not is_int(max_sequences):
            raise TypeError(f"{name}: max_sequences must be an integer, got {max_sequences!r}")
        if max_sequences < 1:
            raise ValueError(f"{name}: max_sequences must be >= 1, got {max_sequences}")
        if layout.format == "bshd" and max_sequences != layout.num_sequences:
            raise ValueError(
                f"{name}: max_sequences={max_sequences}, but 'bshd' interleaves the layout's"
                f" {layout.num_sequences} trajectories"
            )
        self._layout = layout
        self._dense = dense
        self._width = width = int(max_sequences)
        num_offsets = 2 if layout.format == "bshd" else width + 1
        sizes = (num_offsets, 3 * width, 3 * width, 3 * width, 2 * width)
        self._tables = torch.zeros(sum(sizes), dtype=torch.int32, device=layout.device)
        self._offsets, *rest = self._tables.split(sizes)
        self._routes, self._support, self._tokens, self._columns = (
            part.view(-1, width) for part in rest
        )
        self.update(layout)

    def update(
        self,
        layout: TokenLayout,
        captured_lengths: HostInts | None = None,
        response_lengths: HostInts | None = None,
    ) -> None:
        """Lay out another microbatch: one table on the current stream, no wait.

        Args:
            layout: of the same geometry.
            captured_lengths: [B] rows of routes of each trajectory, as in
                ``TokenLayout.route_row_ids``; by default none has any.
            response_lengths: [B] response tokens, as in ``TokenLayout.support_row_ids``; likewise.

        Raises:
            TypeError, ValueError: the geometry differs, there are too many sequences, or a length
                is wrong; nothing was changed then.
        """
        name = "StaticLayout.update"
        if not isinstance(layout, TokenLayout):
            raise TypeError(f"{name}: layout must be a TokenLayout, got {type(layout).__name__}")
        for field in (*_GEOMETRY, "batch_width") if self._dense else _GEOMETRY:
            given, fixed = getattr(layout, field), getattr(self._layout, field)
            if given != fixed:
                raise ValueError(f"{name}: {field} is {given}, but the graph's is {fixed}")
        num_sequences, width = layout._padded.size, self._width
        if num_sequences > width or (layout.format == "bshd" and num_sequences != width):
            raise ValueError(f"{name}: {num_sequences} padded sequences for max_sequences={width}")
        none = np.zeros(layout.num_sequences, np.int64)
        captured = responses = none
        if captured_lengths is not None:
            captured = layout._per_trajectory(name, "captured_lengths", captured_lengths)
        if response_lengths is not None:
            responses = layout._per_trajectory(name, "response_lengths", response_lengths)
        layout._check_captured(name, captured)
        starts = support_starts(name, layout._lengths, responses)
        # empty sequences at the end take no slot, and the last of them every slot that is left
        offsets = np.pad(
            layout._host_offsets,
            (0, self._offsets.numel() - layout._host_offsets.size),
            mode="edge",
        )
        segments = np.zeros((3, 3, width), np.int32)  # of routes, of support, of tokens
        for table, counts, first in zip(
            segments, (captured, responses, layout._lengths), (none, starts, none), strict=True
        ):
            part = np.empty((3, num_sequences), np.int32)
            layout._write_segments(name, part.reshape(-1), counts, first)
            table[:, :num_sequences] = part
        columns = np.zeros((2, width), np.int64)
        columns[:, : layout.num_sequences] = layout._columns, layout._lengths
        copy_into(self._tables, (offsets, segments, columns))

    def route_row_ids(self) -> Tensor:
        """[num_rank_tokens] int64 rows of the captured routes, -1: none."""
        layout = self._layout
        first_id = layout.num_rank_tokens * layout.tp_rank if layout.sequence_parallel else 0
        return self._row_ids(self._routes, layout.num_rank_tokens, first_id, 0)

    def support_row_ids(self) -> Tensor:
        """[T] int64 rows of a field with one row a response token, at the position before it."""
        return self._row_ids(self._support, self._layout.num_tokens, 0, 0)

    def token_row_ids(self, next_token: bool = False) -> Tensor:
        """[T] int64 rows of a field with one row a real token."""
        return self._row_ids(self._tokens, self._layout.num_tokens, 0, int(next_token))

    def align(self, dense: Tensor, fill: int, *, next_token: bool = False) -> Tensor:
        """A dense batch in this rank's token order.

        Args:
            dense: [W, S, ...] on the layout's device: rows past the trajectories are not read.
            fill: value of slots without a token; must fit the dtype.
            next_token: slot s gets the value of token s + 1.

        Returns:
            [T, ...], differentiable in ``dense``.

        Raises:
            RuntimeError: made without ``dense=True``.
            TypeError, ValueError: as ``align_tokens``.
        """
        layout = self._dense_layout("align")
        return align_by_tables(layout, (self._offsets, self._columns), dense, fill, next_token)

    def restore(self, values: Tensor, fill: int = 0) -> Tensor:
        """Values of every context-parallel rank's tokens, one rank after another, as a batch.

        Args:
            values: [R * T, ...]; a caller gathers them over the ranks.
            fill: value of cells without one; must fit the dtype.

        Returns:
            [W, S - 1, ...], differentiable in ``values``; rows past the trajectories are fill.

        Raises:
            RuntimeError: made without ``dense=True``.
            TypeError, ValueError: as ``restore_tokens``.
        """
        layout = self._dense_layout("restore")
        return restore_by_tables(layout, (self._offsets, self._columns), values, fill)

    def _dense_layout(self, method: str) -> TokenLayout:
        if not self._dense:
            raise RuntimeError(f"StaticLayout.{method}: made without dense=True")
        return self._layout

    def _row_ids(self, segments: Tensor, num_ids: int, first_id: int, shift: int) -> Tensor:
        layout = self._layout
        return make_row_ids(
            self._offsets,
            segments,
            num_ids,
            first_id=first_id,
            cp_size=layout.cp_size,
            cp_rank=layout.cp_rank,
            zigzag=layout.cp_order == "zigzag",
            position_major=layout.format == "bshd",
            shift=shift,
        )
