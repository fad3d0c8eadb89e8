"""A batch as items of one trajectory, for a replay buffer, and any of them as a batch again.

    join_trajectories(split_trajectories(batch)[i] for i in ids) == batch[ids]      bit for bit

An item is a ``Batch`` of one that owns its memory: dropping the others frees theirs, and pickling
one ships its rows alone. Items of different batches join too, where their fields are alike.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.packed.batch import Batch
from packhorse.packed.batch_parts import leaves
from packhorse.packed.checks import check_fill


@ranged
def split_trajectories(batch: Batch, *, copy: bool = True) -> list[Batch]:
    """One item for each trajectory, in order.

    Args:
        batch: B trajectories.
        copy: whether an item owns its memory. False: items are views, and one keeps the memory of
            all of them.

    Returns:
        B batches of one trajectory, with the batch's metadata and registry. Together they take as
        many bytes as the batch.

    Raises:
        TypeError: ``batch`` is no ``Batch``.
    """
    if not isinstance(batch, Batch):
        raise TypeError(f"split_trajectories: batch must be a Batch, got {type(batch).__name__}")
    return [item.clone() if copy else item for item in batch]


@ranged
def join_trajectories(
    items: Iterable[Batch],
    *,
    widen: bool = False,
    fills: Mapping[str, float] | None = None,
    side: Literal["left", "right"] = "left",
) -> Batch:
    """A batch of items in their order, repeats allowed.

    Args:
        items: of ``split_trajectories``, one or more; of one batch or several, alike in fields,
            dtypes, row shapes and devices.
        widen: as in ``Batch.cat``: routes of batches of different dtypes are cast to the widest.
        fills: by dense field [B, S, ...], nested ones as "outer.inner", what makes it as wide as
            the widest item's where S differs between items.
        side: where the fill goes; "left" suits left-padded sequences and right-aligned responses.

    Returns:
        A batch whose dense and packed fields own their memory; listed things, and all of a single
        item, are the items'. The metadata is that of item 0.

    Raises:
        TypeError: an item is no ``Batch``, or kinds or dtypes differ.
        ValueError: no items, or fields, row shapes or devices differ; names field and item. A fill
            does not fit its field.
        KeyError: ``fills`` names what is no dense field with columns.
    """
    name = "join_trajectories"
    listed = list(items)
    if not listed:
        raise ValueError(f"{name}: no items to take the fields from")
    for i, item in enumerate(listed):
        if not isinstance(item, Batch):
            raise TypeError(f"{name}: item {i} is a {type(item).__name__}")
    if side not in ("left", "right"):
        raise ValueError(f"{name}: side must be 'left' or 'right', got {side!r}")
    if fills:
        listed = _as_wide(name, listed, dict(fills), side)
    try:
        return Batch.cat(listed, widen=widen)
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix("Batch.cat: ").replace("input ", "item ")
        raise type(error)(f"{name}: {text}") from None


def _as_wide(name: str, items: list[Batch], fills: dict[str, float], side: str) -> list[Batch]:
    found = [dict(leaves(item.fields)) for item in items]
    widths: dict[str, int] = {}
    for path, fill in fills.items():
        for i, fields in enumerate(found):
            field = fields.get(path)
            if not isinstance(field, Tensor) or field.dim() < 2:
                raise KeyError(f"{name}: item {i} has no dense field {path!r} with columns")
            check_fill(f"{name}: fills[{path!r}]", fill, field.dtype)
            widths[path] = max(widths.get(path, 0), field.shape[1])

    def widened(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, field in fields.items():
            path = f"{prefix}{key}"
            if isinstance(field, dict):
                field = widened(field, f"{path}.")
            elif path in widths and field.shape[1] < widths[path]:
                shape = (field.shape[0], widths[path] - field.shape[1], *field.shape[2:])
                pads = field.new_full(shape, fills[path])
                field = torch.cat([pads, field] if side == "left" else [field, pads], dim=1)
            made[key] = field
        return made

    return [item.with_fields(widened(item.fields, "")) for item in items]
