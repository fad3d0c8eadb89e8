"""Dense ``[B, S, ...]`` batches to a rank's token order and back, by row ids.

``align_dense`` gathers ``dense.flatten(0, 1)``; ``restore_gathered`` gathers the concatenated
values of all context-parallel ranks. Both are differentiable, and each is the other's inverse on
the cells it covers. ``TokenLayout`` offers them as methods.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from packhorse.kernels.restore import make_restore_row_ids
from packhorse.kernels.rows import fill_fits, gather_rows
from packhorse.packed.host import INT32_MAX

if TYPE_CHECKING:
    from packhorse.replay.layout import TokenLayout


def align_dense(layout: "TokenLayout", dense: Tensor, fill: float, next_token: bool) -> Tensor:
    """[B, S, ...] -> [T, ...]; see ``TokenLayout.align``."""
    name = "TokenLayout.align"
    batch, width = layout.num_sequences, layout.batch_width
    if not isinstance(dense, Tensor):
        raise TypeError(f"{name}: dense must be a tensor, got {type(dense).__name__}")
    if dense.dim() < 2 or tuple(dense.shape[:2]) != (batch, width):
        raise ValueError(f"{name}: dense must be [{batch}, {width}, ...], got {list(dense.shape)}")
    _check_device(name, "dense", dense, layout)
    whole = _whole(name, fill, dense.dtype)
    if batch * width > INT32_MAX:
        raise ValueError(f"{name}: {batch} x {width} cells exceed int32")
    bases = [i * width + column for i, column in enumerate(layout.first_columns)]
    row_ids = layout._make(
        layout._stacked((bases, layout.lengths, ()), layout._padded.size), next_token=next_token
    )
    return gather_rows(dense.flatten(0, 1), row_ids, fill=whole)


def restore_dense(layout: "TokenLayout", values: Tensor, fill: float) -> Tensor:
    """[T, ...] of this rank -> [B, S - 1, ...]; see ``TokenLayout.restore``."""
    name = "TokenLayout.restore"
    _check_values(name, values, layout)
    _whole(name, fill, values.dtype)
    if layout.cp_size == 1:
        return restore_gathered(layout, [values], fill)
    if layout.cp_group is None:
        raise ValueError(
            f"{name}: cp_size={layout.cp_size} needs cp_group in TokenLayout.build, or"
            " restore_gathered with the values of every rank"
        )
    if layout.cp_group.size() != layout.cp_size or layout.cp_group.rank() != layout.cp_rank:
        raise ValueError(
            f"{name}: cp_group is rank {layout.cp_group.rank()} of {layout.cp_group.size()}, the"
            f" layout rank {layout.cp_rank} of {layout.cp_size}"
        )
    gathered = _GatherRanks.apply(values, layout.cp_group)
    return restore_gathered(layout, gathered.chunk(layout.cp_size), fill)


def restore_gathered(layout: "TokenLayout", values: Sequence[Tensor], fill: float) -> Tensor:
    """Values of every context-parallel rank -> [B, S - 1, ...]."""
    name = "TokenLayout.restore_gathered"
    if len(values) != layout.cp_size:
        raise ValueError(f"{name}: values of {len(values)} ranks for cp_size={layout.cp_size}")
    for rank, part in enumerate(values):
        _check_values(name, part, layout)
        if part.dtype != values[0].dtype:
            raise TypeError(
                f"{name}: values of rank {rank} are {part.dtype}, those of rank 0 {values[0].dtype}"
            )
        if part.shape != values[0].shape:
            raise ValueError(
                f"{name}: values of rank {rank} are {list(part.shape)}, those of rank 0"
                f" {list(values[0].shape)}"
            )
    whole = _whole(name, fill, values[0].dtype)
    width = max(layout.batch_width - 1, 0)
    columns = layout._table((layout.first_columns, layout.lengths), layout.num_sequences)
    row_ids = make_restore_row_ids(
        layout._offsets,
        columns,
        width,
        layout.num_tokens,
        cp_size=layout.cp_size,
        zigzag=layout.cp_order == "zigzag",
        position_major=layout.format == "bshd",
    )
    everyone = values[0] if len(values) == 1 else torch.cat(list(values))
    restored = gather_rows(everyone, row_ids, fill=whole)
    return restored.reshape(layout.num_sequences, width, *everyone.shape[1:])


class _GatherRanks(torch.autograd.Function):
    """[T, ...] -> [R * T, ...]. Every rank computes the same loss, so backward slices, not sums."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.num_tokens = group.rank(), values.shape[0]
        out = values.new_empty((group.size() * values.shape[0], *values.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, values.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        begin = ctx.rank * ctx.num_tokens
        return grad[begin : begin + ctx.num_tokens].contiguous(), None


def _check_values(name: str, values: Tensor, layout: "TokenLayout") -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: values must be a tensor, got {type(values).__name__}")
    if values.dim() < 1 or values.shape[0] != layout.num_tokens:
        raise ValueError(
            f"{name}: values must be [{layout.num_tokens}, ...], got {list(values.shape)}"
        )
    _check_device(name, "values", values, layout)


def _whole(name: str, fill: object, dtype: torch.dtype) -> int:
    if not isinstance(fill, int) and not (isinstance(fill, float) and fill.is_integer()):
        raise TypeError(f"{name}: fill must be a whole number, got {fill!r}")
    if not fill_fits(int(fill), dtype):
        raise ValueError(f"{name}: fill={fill} does not fit {dtype}")
    return int(fill)


def _check_device(name: str, field: str, tensor: Tensor, layout: "TokenLayout") -> None:
    if tensor.device != layout.device:
        raise ValueError(f"{name}: {field} on {tensor.device}, the layout on {layout.device}")
