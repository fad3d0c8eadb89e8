"""Row ids for a CUDA graph: tables in buffers that stay, lengths that change between replays.

A graph fixes addresses and shapes, so the token slots of a rank keep their number (a packer pads
the slab to it) while the trajectories in them change. ``StaticRowIds`` owns the two tables that
``make_row_ids`` reads; ``update`` copies a microbatch's into them, outside the graph, and the
captured kernels then find the new rows.

    static = StaticRowIds(layout, max_sequences=64)
    with torch.cuda.graph(graph):
        row_ids = static.row_ids()
        topk_ids, padding_mask = gather_routes(routes_buffer, row_ids, layers, num_experts=E)
    for layout, routes in microbatches:
        static.update(layout, routes.lengths)
        routes_buffer[: routes.num_rows].copy_(routes.values)
        graph.replay()
"""

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged_methods
from packhorse.kernels.layout import row_ids_of_table
from packhorse.replay.host import HostInts, is_int
from packhorse.replay.layout import TokenLayout
from packhorse.replay.staging import copy_into

#: What a graph cannot change: properties of a layout that must stay.
_GEOMETRY = (
    "format", "num_tokens", "tp_size", "tp_rank", "cp_size", "cp_rank", "cp_order",
    "sequence_parallel", "device",
)  # fmt: skip


@ranged_methods()
class StaticRowIds:
    """Route row ids of microbatches of one geometry, from tables at fixed addresses.

    Args:
        layout: a microbatch's layout; later ones have its format, ranks, device and number of
            tokens ("thd": give ``TokenLayout.build`` ``padded_lengths`` with a tail pad; "bshd":
            its number of trajectories too).
        max_sequences: most padded sequences of a microbatch, a tail pad counted.

    Raises:
        TypeError, ValueError: ``layout`` is no layout, or has more sequences than that.
    """

    def __init__(self, layout: TokenLayout, *, max_sequences: int) -> None:
        name = "StaticRowIds"
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
        self._width = max_sequences
        self._num_offsets = 2 if layout.format == "bshd" else max_sequences + 1
        size = self._num_offsets + 3 * max_sequences
        self._tables = torch.zeros(size, dtype=torch.int32, device=layout.device)
        self.update(layout, np.zeros(layout.num_sequences, np.int64))

    def update(self, layout: TokenLayout, captured_lengths: HostInts) -> None:
        """Lay out another microbatch: one asynchronous copy on the current stream, no wait.

        Args:
            layout: of the same geometry.
            captured_lengths: [B] rows of each trajectory, as in ``TokenLayout.route_row_ids``.

        Raises:
            TypeError, ValueError: the geometry differs, there are too many sequences, or a length
                is wrong; nothing was changed then.
        """
        name = "StaticRowIds.update"
        if not isinstance(layout, TokenLayout):
            raise TypeError(f"{name}: layout must be a TokenLayout, got {type(layout).__name__}")
        for field in _GEOMETRY:
            given, fixed = getattr(layout, field), getattr(self._layout, field)
            if given != fixed:
                raise ValueError(f"{name}: {field} is {given}, but the graph's is {fixed}")
        offsets, segments = layout.route_tables(captured_lengths, name=name)
        num_sequences = segments.shape[1]
        if num_sequences > self._width or (
            layout.format == "bshd" and num_sequences != self._width
        ):
            raise ValueError(
                f"{name}: {num_sequences} padded sequences for max_sequences={self._width}"
            )
        # empty sequences at the end take no slot, and the last of them every slot that is left
        offsets = np.pad(offsets, (0, self._num_offsets - offsets.size), mode="edge")
        segments = np.pad(segments, ((0, 0), (0, self._width - num_sequences)))
        copy_into(self._tables, (offsets, segments))

    def row_ids(self) -> Tensor:
        """[num_rank_tokens] int64, -1: no row. Captured in a graph, it follows ``update``."""
        layout = self._layout
        num_ids = layout.num_rank_tokens
        return row_ids_of_table(
            self._tables,
            self._num_offsets,
            self._width,
            num_ids,
            num_ids * layout.tp_rank if layout.sequence_parallel else 0,
            layout.cp_size,
            layout.cp_rank,
            layout.cp_order == "zigzag" and layout.cp_size > 1,
            layout.format == "bshd",
            0,
        )
