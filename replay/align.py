"""Dense ``[B, S, ...]`` batches to a rank's token order and back: ``TokenLayout``'s methods.

``align_dense`` and ``restore_gathered`` are one launch each, differentiable, and each the other's
inverse on the cells it covers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from packhorse.kernels.dense import align_tokens, restore_tokens
from packhorse.kernels.rows import fill_fits

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
    return align_by_tables(layout, layout._dense_tables, dense, whole, next_token)


def restore_dense(layout: "TokenLayout", values: Tensor, fill: float) -> Tensor:
    """[T, ...] of this rank -> [B, S - 1, ...]; see ``TokenLayout.restore``."""
    name = "TokenLayout.restore"
    _check_values(name, values, layout)
    whole = _whole(name, fill, values.dtype)
    if layout.cp_size == 1:
        return restore_by_tables(layout, layout._dense_tables, values, whole)
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
    return restore_by_tables(layout, layout._dense_tables, gathered, whole)


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
    everyone = values[0] if len(values) == 1 else torch.cat(list(values))
    return restore_by_tables(layout, layout._dense_tables, everyone, whole)


def align_by_tables(
    layout: "TokenLayout",
    tables: tuple[Tensor, Tensor],
    dense: Tensor,
    fill: int,
    next_token: bool,
) -> Tensor:
    """``align_tokens`` in the layout's order, by its ``offsets`` and ``columns`` or others."""
    return align_tokens(
        dense,
        *tables,
        layout.num_tokens,
        fill=fill,
        shift=int(next_token),
        cp_size=layout.cp_size,
        cp_rank=layout.cp_rank,
        zigzag=layout.cp_order == "zigzag",
        position_major=layout.format == "bshd",
    )


def restore_by_tables(
    layout: "TokenLayout", tables: tuple[Tensor, Tensor], values: Tensor, fill: int
) -> Tensor:
    """[R * T, ...] -> [B, S - 1, ...]: ``restore_tokens``, likewise."""
    return restore_tokens(
        values,
        *tables,
        max(layout.batch_width - 1, 0),
        fill=fill,
        cp_size=layout.cp_size,
        zigzag=layout.cp_order == "zigzag",
        position_major=layout.format == "bshd",
    )


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
