"""One microbatch of a replay schedule: its layout, its routes, and which rows run live.

    replayed   positions [0, captured)             the rollout's experts
    live       positions [captured, live_end)      the router's own choice, counted as real
    dummy      the other real tokens and all pads  K distinct experts, masked in the router

A trained target at position j is predicted by the logit of position j - 1, which depends on every
position before j: it needs captured >= j. Where the generator put the token there itself (a
synthetic EOS) or the engine returned no routes at all, the positions before it run live instead.

Sizes: N route rows, L captured layers, K experts a token, E experts.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from packhorse._nvtx import ranged_methods
from packhorse.kernels.routes import ROUTE_DTYPES
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.host import host_masks
from packhorse.replay.layout import TokenLayout

_NAME = "ReplayMicrobatch"


@ranged_methods()
class ReplayMicrobatch:
    """What one microbatch replays. Built on the host; nothing on a device is read.

    Args:
        layout: this rank's token order.
        routes: [N, L, K] uint8, int16 or int32 rows of B trajectories, each trajectory's captured
            prefix. On the layout's device, or on the CPU: then ``session.begin`` copies the layers
            of its chunk from pinned memory without waiting. ``None``: nothing is replayed.
        loss_masks: per trajectory a host bool array [length], True where the token at that
            position is a trained target; or None for the whole argument, or for a trajectory:
            every token but the first is then taken for trained.
        appended: per trajectory a host bool array [length] (or None), True where the generator put
            the token there itself.
        missing: per trajectory, True where the engine returned no routes; all its tokens run live.
        dummy: the experts of masked rows, as in ``gather_routes``.
        live: "required": positions run live where a trained target depends on them; "all": every
            real position without a row does.

    Attributes:
        captured: rows of each trajectory.
        live_counts: positions after them that run live.
        num_replayed, num_live, num_dummy: rows of all ranks together; dummies include the pads.
        has_targets: some token is trained.

    Raises:
        TypeError: a field is of the wrong kind, or on a device.
        ValueError: counts differ, a trajectory has more rows than tokens, or a trained target has
            neither rows nor an excuse; names the trajectory.
    """

    def __init__(
        self,
        layout: TokenLayout,
        routes: PackedTensor | None,
        *,
        loss_masks: Sequence[Any] | None = None,
        appended: Sequence[Any] | None = None,
        missing: Sequence[bool] | None = None,
        dummy: Literal["constant", "spread"] = "constant",
        live: Literal["required", "all"] = "required",
    ) -> None:
        if not isinstance(layout, TokenLayout):
            raise TypeError(f"{_NAME}: layout must be a TokenLayout, got {type(layout).__name__}")
        if dummy not in ("constant", "spread"):
            raise ValueError(f"{_NAME}: dummy must be 'constant' or 'spread', got {dummy!r}")
        if live not in ("required", "all"):
            raise ValueError(f"{_NAME}: live must be 'required' or 'all', got {live!r}")
        if routes is not None:
            _check_routes(layout, routes)
        self.layout = layout
        self.routes = routes
        self.dummy = dummy
        self.missing = _flags(layout, missing)
        trained = _positions(layout, "loss_masks", loss_masks)
        placed = _positions(layout, "appended", appended)
        if routes is None:
            self.captured = (0,) * layout.num_sequences
            self.live_counts = layout.lengths
        else:
            self.captured = routes.lengths
            self.live_counts = tuple(
                self._live_count(i, trained[i], placed[i], live)
                for i in range(layout.num_sequences)
            )
        self.has_targets = any(
            length > 1 if positions is None else positions.size > 0
            for length, positions in zip(layout.lengths, trained, strict=True)
        )
        self.num_replayed = sum(self.captured)
        self.num_live = sum(self.live_counts)
        self.num_dummy = layout.num_tokens * layout.cp_size - self.num_replayed - self.num_live
        self._checked: dict[int, set[int]] = {}

    def check_content(self, index: int, num_experts: int, positions: Sequence[int]) -> None:
        """Check routes on the CPU: ids below ``num_experts``, none twice in a row.

        What was found right is not checked again. Routes on a device are not read here;
        ``PACKHORSE_CHECK=1`` checks them there.

        Args:
            index: of this microbatch, for messages.
            positions: on the captured layer axis, of MoE layers: dense layers hold zeros.

        Raises:
            ValueError: names microbatch, trajectory, row and layer.
        """
        if self.routes is None or self.routes.device.type != "cpu":
            return
        done = self._checked.setdefault(num_experts, set())
        for position in positions:
            if position not in done:
                self._check_layer(index, num_experts, position)
                done.add(position)

    def _check_layer(self, index: int, num_experts: int, position: int) -> None:
        assert self.routes is not None
        columns = np.ascontiguousarray(self.routes.values.numpy()[:, position].T)  # [K, N]
        if columns.size == 0:
            return
        if columns.min() < 0 or columns.max() >= num_experts:
            outside = ((columns < 0) | (columns >= num_experts)).any(0)
            row = int(outside.argmax())
            bad = next(int(e) for e in columns[:, row] if not 0 <= e < num_experts)
            raise ValueError(
                f"{self._place(index, row, position)}: expert {bad} is not below"
                f" num_experts={num_experts}"
            )
        repeated = np.zeros(columns.shape[1], bool)
        ordered = np.sort(columns, axis=0) if columns.shape[0] > 16 else None
        for k in range(columns.shape[0] - 1):
            if ordered is not None:
                repeated |= ordered[k] == ordered[k + 1]
            else:
                repeated |= (columns[k] == columns[k + 1 :]).any(0)
        if repeated.any():
            row = int(repeated.argmax())
            why = f"experts {columns[:, row].tolist()} repeat"
            if not columns.any():
                why = "every id is 0: the engine captured nothing for this layer"
            raise ValueError(f"{self._place(index, row, position)}: {why}")

    def _place(self, index: int, row: int, position: int) -> str:
        assert self.routes is not None
        trajectory = int(np.searchsorted(self.routes.offsets, row, side="right")) - 1
        return (
            f"ReplaySession: routes of microbatch {index}, trajectory {trajectory}, row"
            f" {row - self.routes.offsets[trajectory]}, captured layer {position}"
        )

    def _live_count(
        self, i: int, trained: np.ndarray | None, placed: np.ndarray | None, live: str
    ) -> int:
        length, captured = self.layout.lengths[i], self.captured[i]
        if self.missing[i]:
            if captured:
                raise ValueError(
                    f"{_NAME}: trajectory {i} is marked missing, but has {captured} route rows"
                )
            return length
        if trained is None:
            beyond = np.arange(captured + 1, length)
        else:
            beyond = trained[trained > captured]
        unexcused = beyond if placed is None else np.setdiff1d(beyond, placed)
        if unexcused.size:
            hint = "" if trained is not None else "; loss_masks says which tokens are trained"
            raise ValueError(
                f"{_NAME}: token {unexcused[0]} of trajectory {i} is a trained target and needs"
                f" {unexcused[0]} route rows, there are {captured} (appended= and missing= name"
                f" the exceptions{hint})"
            )
        if live == "all":
            return length - captured
        return int(beyond[-1]) - captured if beyond.size else 0


def _check_routes(layout: TokenLayout, routes: PackedTensor) -> None:
    if not isinstance(routes, PackedTensor):
        raise TypeError(
            f"{_NAME}: routes must be a PackedTensor or None, got {type(routes).__name__}"
        )
    if routes.dtype not in ROUTE_DTYPES:
        raise TypeError(f"{_NAME}: routes must be uint8, int16 or int32, got {routes.dtype}")
    if len(routes.row_shape) != 2:
        raise ValueError(f"{_NAME}: routes must have [L, K] rows, got {list(routes.row_shape)}")
    if len(routes) != layout.num_sequences:
        raise ValueError(
            f"{_NAME}: routes of {len(routes)} trajectories for a layout of {layout.num_sequences}"
        )
    if routes.device.type != "cpu" and routes.device != layout.device:
        raise ValueError(
            f"{_NAME}: routes on {routes.device}, layout on {layout.device}; they must be on the"
            " layout's device or on the CPU"
        )
    for i, (rows, length) in enumerate(zip(routes.lengths, layout.lengths, strict=True)):
        if rows > length:
            raise ValueError(f"{_NAME}: trajectory {i} has {rows} route rows for {length} tokens")


def _per_trajectory(layout: TokenLayout, field: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise TypeError(f"{_NAME}: {field} must be on the host, not on {values.device}")
    if not isinstance(values, Sequence | np.ndarray | Tensor):
        raise TypeError(
            f"{_NAME}: {field} must be a sequence of one entry a trajectory, got"
            f" {type(values).__name__}"
        )
    listed = list(values)
    if len(listed) != layout.num_sequences:
        raise ValueError(
            f"{_NAME}: {field} has {len(listed)} entries for {layout.num_sequences} trajectories"
        )
    return listed


def _flags(layout: TokenLayout, missing: Sequence[bool] | None) -> tuple[bool, ...]:
    if missing is None:
        return (False,) * layout.num_sequences
    flags = []
    for i, value in enumerate(_per_trajectory(layout, "missing", missing)):
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{_NAME}: missing of trajectory {i} must be a bool, got {value!r}")
        flags.append(bool(value))
    return tuple(flags)


def _positions(
    layout: TokenLayout, field: str, masks: Sequence[Any] | None
) -> list[np.ndarray | None]:
    """Ascending True positions of each trajectory's mask; None where there is no mask."""
    positions: list[np.ndarray | None] = []
    for i, mask in enumerate(host_masks(_NAME, field, masks, layout.lengths)):
        found = None if mask is None else np.flatnonzero(mask)
        if field == "loss_masks" and found is not None and found.size and found[0] == 0:
            raise ValueError(
                f"{_NAME}: {field} of trajectory {i} trains token 0, which nothing predicts: the"
                " mask is over the tokens that are targets, not over the positions of their logits"
            )
        positions.append(found)
    return positions
