"""Where a rank's tokens stand: the order of Megatron's ranks, as pure data from host integers.

``TokenLayout`` knows, for one microbatch and one rank, which (trajectory, position) each of its
token slots holds. Everything a model receives is then one idea: make row ids for these slots, and
gather rows of a packed field by them.

    thd    sequences one after another, each with its own pads; batch size 1
    bshd   one rectangle; tokens in the order of the router's flattened ``[s, b, h]``:
           position outer, trajectory inner

Sizes: B trajectories, S columns of the padded batch, T tokens of this context-parallel rank.
Source: Megatron-core's ``get_batch_on_this_cp_rank`` (zigzag halves), its sequence-parallel
scatter, and ``MoELayer``'s flattening.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged, ranged_methods
from packhorse.kernels.layout import row_ids_of_table
from packhorse.kernels.routes import Dummy, gather_routes_of_rows
from packhorse.packed.host import INT32_MAX
from packhorse.packed.tensor import PackedTensor
from packhorse.replay import align as _align
from packhorse.replay.columns import columns_from_mask as columns_from_mask
from packhorse.replay.host import HostInts, host_array, is_int, offsets_of
from packhorse.replay.layout_checks import (
    Fp8,
    check_fp8,
    check_padded,
    check_slice,
    place_columns,
    support_starts,
)
from packhorse.replay.staging import Staged, staged, to_device


class RankRoutes(NamedTuple):
    """Routes of one rank's tokens, as its routers take them.

    Attributes:
        topk_ids: [J, M, K] int32 or int64, one layer after another.
        padding_mask: [M] bool, True where the token has no captured row.
        row_ids: [M] int64 rows of the packed routes, -1: none.
    """

    topk_ids: Tensor
    padding_mask: Tensor
    row_ids: Tensor


@ranged
def sequence_alignment(tp_size: int = 1, cp_size: int = 1, fp8: Fp8 = False) -> int:
    """Tokens that each padded sequence ("thd") or the common length ("bshd") is a multiple of.

    TP without context parallelism, else 2 * TP * CP; with fp8 the least common multiple with what
    the recipe's blocks need: 16 * CP (``True``, "delayed", "tensorwise"), 32 * TP * CP ("mxfp8"),
    128 * TP * CP or, without TP, 16 * CP ("blockwise").
    """
    name = "sequence_alignment"
    check_fp8(name, fp8)
    for kind, size in (("tp", tp_size), ("cp", cp_size)):
        if not is_int(size):
            raise TypeError(f"{name}: {kind}_size must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name}: {kind}_size must be >= 1, got {size}")
    tokens = tp_size if cp_size == 1 else 2 * tp_size * cp_size
    if fp8 is False:
        return tokens
    if fp8 == "mxfp8":
        return math.lcm(tokens, 32 * tp_size * cp_size)
    if fp8 == "blockwise" and tp_size > 1:
        return math.lcm(tokens, 128 * tp_size * cp_size)
    return math.lcm(tokens, 16 * cp_size)


@dataclass(frozen=True, eq=False)
@ranged_methods()
class TokenLayout:
    """The token slots of one rank for one microbatch. Made by ``TokenLayout.build``.

    Attributes:
        format: "thd" or "bshd".
        lengths: real tokens of each trajectory (B host integers).
        padded_lengths: tokens of each padded sequence. "bshd": the one common length, B times.
            "thd": one entry more than ``lengths`` where the slab ends in a pad of its own.
        first_columns: column of each trajectory's first token in the ``[B, S]`` batch.
        batch_width: S.
        num_tokens: T, slots of this context-parallel rank, pads included.
        num_rank_tokens: slots that this rank's routers see: T, or its 1/TP under sequence
            parallelism.
    """

    format: Literal["thd", "bshd"]
    batch_width: int
    tp_size: int
    tp_rank: int
    cp_size: int
    cp_rank: int
    cp_order: Literal["zigzag", "contiguous"]
    sequence_parallel: bool
    device: torch.device
    cp_group: Any
    num_tokens: int
    _lengths: np.ndarray  # [B] int64, as the other two on the host
    _padded: np.ndarray  # [B], with a tail pad [B + 1]
    _columns: np.ndarray  # [B]

    @classmethod
    def build(
        cls,
        lengths: HostInts,
        *,
        format: Literal["thd", "bshd"] = "thd",
        tp_size: int = 1,
        tp_rank: int = 0,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_order: Literal["zigzag", "contiguous"] = "zigzag",
        sequence_parallel: bool = False,
        fp8: Fp8 = False,
        padded_lengths: HostInts | None = None,
        batch_width: int | None = None,
        first_columns: HostInts | None = None,
        device: torch.device | str = "cpu",
        cp_group: Any = None,
    ) -> "TokenLayout":
        """Lay out trajectories of the given lengths for one rank.

        Args:
            lengths: [B] real tokens (prompt + response) of each trajectory, >= 0; host integers.
            format: "thd" (packed) or "bshd" (rectangle).
            tp_size, tp_rank, cp_size, cp_rank: tensor- and context-parallel ranks.
            cp_order: "zigzag": rank r holds chunks r and 2R-1-r of each padded sequence;
                "contiguous": chunk r of R.
            sequence_parallel: the model scatters its hidden states over the TP ranks.
            fp8: ``False``, ``True`` ("delayed", "tensorwise"), "mxfp8" or "blockwise": pads each
                sequence to what the recipe's blocks need.
            padded_lengths: a packer's own padded lengths, which win over the alignment rule. "thd":
                [B], or [B + 1] where the last is a pad of the whole slab; "bshd": [B], all equal.
            batch_width: S of the dense batch; by default the longest trajectory, or the last column
                that ``first_columns`` reaches.
            first_columns: [B] column of the first real token; by default left padded, S - length.
            device: where row ids are made.
            cp_group: the context-parallel process group; ``restore`` gathers over it.

        Raises:
            TypeError: a field is not of host integers.
            ValueError: a rank, order, recipe or length is wrong, or does not divide as the ranks
                need; names the trajectory.
        """
        name = "TokenLayout.build"
        if format not in ("thd", "bshd"):
            raise ValueError(f"{name}: format must be 'thd' or 'bshd', got {format!r}")
        if cp_order not in ("zigzag", "contiguous"):
            raise ValueError(f"{name}: cp_order must be 'zigzag' or 'contiguous', got {cp_order!r}")
        check_fp8(name, fp8)
        for kind, size, rank in (("tp", tp_size, tp_rank), ("cp", cp_size, cp_rank)):
            if not is_int(size) or not is_int(rank):
                raise TypeError(
                    f"{name}: {kind}_size={size!r} and {kind}_rank={rank!r} must be integers"
                )
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{name}: {kind}_rank={rank} is not in [0, {kind}_size={size})")
        alignment = sequence_alignment(tp_size, cp_size, fp8)
        real = host_array(name, "lengths", lengths)
        if padded_lengths is not None:
            padded = host_array(name, "padded_lengths", padded_lengths)
            check_padded(name, format, real, padded, cp_size, cp_order)
        elif format == "thd":
            padded = -(-real // alignment) * alignment if alignment > 1 else real
        else:
            padded = np.full_like(real, -(-int(real.max(initial=0)) // alignment) * alignment)
        if batch_width is not None:
            if not is_int(batch_width):
                raise TypeError(f"{name}: batch_width must be an integer, got {batch_width!r}")
            if batch_width < 0:
                raise ValueError(f"{name}: batch_width must be >= 0, got {batch_width}")
        columns, width = place_columns(name, real, first_columns, batch_width)

        total = int(padded.sum())
        if total > INT32_MAX:
            raise ValueError(f"{name}: {total} padded tokens exceed int32")
        num_tokens = total // cp_size
        if sequence_parallel:
            check_slice(name, format, num_tokens, len(real), tp_size)
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        return cls(
            format=format,
            batch_width=int(width),
            tp_size=int(tp_size),
            tp_rank=int(tp_rank),
            cp_size=int(cp_size),
            cp_rank=int(cp_rank),
            cp_order=cp_order,
            sequence_parallel=bool(sequence_parallel),
            device=place,
            cp_group=cp_group,
            num_tokens=num_tokens,
            _lengths=real,
            _padded=padded,
            _columns=columns,
        )

    @classmethod
    def from_megatron(cls, lengths: HostInts, config: Any, **options: Any) -> "TokenLayout":
        """``build`` with sizes, ranks, groups and fp8 recipe taken from Megatron.

        ``options`` and errors as ``layout_megatron.layout_from_megatron``.
        """
        from packhorse.replay.layout_megatron import layout_from_megatron

        return layout_from_megatron(lengths, config, **options)

    # --- host integers ----------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """[B] real tokens of each trajectory."""
        return tuple(self._lengths.tolist())

    @cached_property
    def padded_lengths(self) -> tuple[int, ...]:
        """[B] tokens of each padded sequence, one more where the slab ends in a pad of its own."""
        return tuple(self._padded.tolist())

    @cached_property
    def first_columns(self) -> tuple[int, ...]:
        """[B] column of each trajectory's first token in the dense batch."""
        return tuple(self._columns.tolist())

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def num_sequences(self) -> int:
        """B, trajectories."""
        return self._lengths.size

    @property
    def num_rank_tokens(self) -> int:
        """Slots of this rank's routers: T, or T / TP under sequence parallelism."""
        return self.num_tokens // self.tp_size if self.sequence_parallel else self.num_tokens

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """[B + 1] offsets of the real tokens, on the host; a tail pad is a sequence without any."""
        tail = (0,) * (len(self.padded_lengths) - len(self.lengths))
        return offsets_of(self.lengths + tail)

    @property
    def cu_seqlens_padded(self) -> tuple[int, ...]:
        """[B + 1] offsets of the padded sequences (with a tail pad [B + 2]) over all
        context-parallel ranks, on the host."""
        return offsets_of(self.padded_lengths)

    # --- row ids ----------------------------------------------------------------------------------

    def row_ids(
        self,
        segment_lengths: HostInts,
        starts: int | HostInts = 0,
        *,
        next_token: bool = False,
        slice: bool = False,
    ) -> Tensor:
        """Row of a packed field for each slot: the field has rows for a run of positions.

        Args:
            segment_lengths: [B] rows of each trajectory, host integers. The packed rows stand back
                to back in this order.
            starts: position of each trajectory's first row; one integer for all, or [B].
            next_token: give slot s the row of position s + 1 (shifted inside the padded sequence,
                before context-parallel sharding: the last slot gets -1, never a neighbour's row).
            slice: this TP rank's slice only, as under sequence parallelism.

        Returns:
            [T] (or [T / TP] with ``slice``) int64 on the layout's device, -1: no row.

        Raises:
            TypeError: a field is not of host integers.
            ValueError: counts differ, or rows lie outside a trajectory; names it.
            RuntimeError: the stream is captured into a CUDA graph; see ``StaticLayout``.
        """
        name = "TokenLayout.row_ids"
        counts = self._per_trajectory(name, "segment_lengths", segment_lengths)
        if is_int(starts):
            first = np.full_like(counts, min(max(int(cast(int, starts)), -1), INT32_MAX))
        else:
            first = self._per_trajectory(name, "starts", cast(HostInts, starts))
        return self._row_ids(name, counts, first, next_token, slice)

    def token_row_ids(self, next_token: bool = False) -> Tensor:
        """Row ids for a field with one row a real token: [T] int64."""
        name = "TokenLayout.token_row_ids"
        return self._row_ids(name, self._lengths, None, next_token, False)

    def support_row_ids(self, response_lengths: HostInts) -> Tensor:
        """Row ids for a field with one row a response token, at the position that predicts it.

        Row r of a trajectory is used at position ``length - response_length + r - 1``.

        Args:
            response_lengths: [B] response tokens, host integers; each less than the length.

        Returns:
            [T] int64. Scoring data is not sliced under sequence parallelism.

        Raises:
            ValueError: a response is as long as its trajectory, so that nothing predicts its first
                token, or longer; names the trajectory.
        """
        name = "TokenLayout.support_row_ids"
        responses = self._per_trajectory(name, "response_lengths", response_lengths)
        starts = support_starts(name, self._lengths, responses)
        return self._row_ids(name, responses, starts, False, False)

    def route_row_ids(self, captured_lengths: HostInts) -> Tensor:
        """Row ids of captured routes for the tokens that this rank's routers see.

        Args:
            captured_lengths: [B] rows of each trajectory's captured prefix, host integers, each
                from 0 to the trajectory's length.

        Returns:
            [num_rank_tokens] int64: the sequence-parallel slice where the layout has it.
        """
        name = "TokenLayout.route_row_ids"
        captured = self._per_trajectory(name, "captured_lengths", captured_lengths)
        return self._route_row_ids(name, captured)

    def gather_routes(
        self,
        routes: PackedTensor,
        layers: range | Sequence[int] | Tensor,
        *,
        num_experts: int,
        dtype: torch.dtype = torch.int32,
        dummy: Dummy = "constant",
        ep_size: int = 1,
        spread_offset: int = 0,
    ) -> RankRoutes:
        """What this rank's routers take of captured routes: one table from the host, three kernels.

        "spread" counts the missing rows in two more; a list of layers that is no run is sent too.

        Args:
            routes: [N, L, K] uint8, int16 or int32 rows on the layout's device, each trajectory's
                captured prefix.
            layers, num_experts, dtype, dummy, ep_size, spread_offset: as in ``gather_routes``.

        Returns:
            topk_ids [J, num_rank_tokens, K], padding_mask and row_ids [num_rank_tokens]: of the
            sequence-parallel slice where the layout has it. Nothing waits for the device.

        Raises:
            TypeError, ValueError: as ``gather_routes``; a trajectory has more rows than tokens.
        """
        name = "TokenLayout.gather_routes"
        if not isinstance(routes, PackedTensor):
            raise TypeError(f"{name}: routes must be a PackedTensor, got {type(routes).__name__}")
        if routes.device != self.device:
            raise ValueError(f"{name}: routes on {routes.device}, the layout on {self.device}")
        bounds = routes.bounds
        captured = bounds[1:] - bounds[:-1]
        self._check_count(name, "routes", captured)
        row_ids = self._route_row_ids(name, captured)
        topk_ids, padding_mask = gather_routes_of_rows(
            name, routes.values, row_ids, layers, num_experts, dtype, dummy, ep_size, spread_offset
        )
        return RankRoutes(topk_ids, padding_mask, row_ids)

    def position_ids(self) -> Tensor:
        """[T] int64 position of each slot in its padded sequence, pads counted on."""
        width = self._padded.size
        table = np.zeros((3, width), np.int64)
        table[1] = self._padded
        memory = staged(self._host_offsets.size + table.size, self.device)
        memory.array[: self._host_offsets.size] = self._host_offsets
        memory.array[self._host_offsets.size :][: table.size] = table.reshape(-1)
        return self._row_ids_of(memory)

    # --- dense batches ----------------------------------------------------------------------------

    def align(self, dense: Tensor, fill: float, *, next_token: bool = False) -> Tensor:
        """Bring a dense per-token batch into this rank's token order.

        Args:
            dense: [B, S, ...], S the layout's ``batch_width``, on the layout's device. Read by the
                layout's ``first_columns``: left padded, unless ``build`` was given others.
            fill: value of slots without a token: a whole number that fits the dtype.
            next_token: slot s gets the value of token s + 1.

        Returns:
            [T, ...] in the router's order; ``to_model`` shapes it as a model takes it.
        """
        return _align.align_dense(self, dense, fill, next_token)

    def restore(self, values: Tensor, fill: float = 0) -> Tensor:
        """Bring values of this rank's tokens back to the batch; gathers over ``cp_group`` for CP.

        Args:
            values: [T, ...], one a slot.
            fill: value of cells without one: a whole number that fits the dtype.

        Returns:
            [B, S - 1, ...]: position s lands in column ``first_column + s``. Every context-parallel
            rank gets the whole batch, and its backward takes its own part of the gradient: all
            ranks compute one and the same loss from it.
        """
        return _align.restore_dense(self, values, fill)

    def restore_gathered(self, values: Sequence[Tensor], fill: float = 0) -> Tensor:
        """``restore`` from the values of every context-parallel rank, in rank order."""
        return _align.restore_gathered(self, values, fill)

    def to_model(self, values: Tensor) -> Tensor:
        """[T, ...] as the model takes it: [1, T, ...] ("thd") or [B, T / B, ...] ("bshd")."""
        if values.dim() < 1 or values.shape[0] != self.num_tokens:
            raise ValueError(
                f"TokenLayout.to_model: values must be [{self.num_tokens}, ...] in this layout's"
                f" token order, got {list(values.shape)}; align brings a dense [B, S, ...] there"
            )
        if self.format == "thd":
            return values.unsqueeze(0)
        return self._rectangle(values).transpose(0, 1).contiguous()

    def from_model(self, output: Tensor) -> Tensor:
        """What the model returns, [1, T, ...] or [B, T / B, ...], as [T, ...]."""
        if self.format == "thd":
            expected = (1, self.num_tokens)
        else:
            expected = (self.num_sequences, self.num_tokens // max(self.num_sequences, 1))
        if tuple(output.shape[:2]) != expected:
            raise ValueError(
                f"TokenLayout.from_model: output must be [{expected[0]}, {expected[1]}, ...],"
                f" got {tuple(output.shape)}"
            )
        if self.format == "thd":
            return output.squeeze(0)
        return output.transpose(0, 1).flatten(0, 1)

    # --- parts ------------------------------------------------------------------------------------

    def _rectangle(self, values: Tensor) -> Tensor:
        batch = self.num_sequences
        return values.reshape(self.num_tokens // max(batch, 1), batch, *values.shape[1:])

    @cached_property
    def _dense_tables(self) -> tuple[Tensor, Tensor]:
        """``offsets`` and ``columns`` of ``align_tokens`` on the device, copied once.

        Ordinary tensors, whoever asks first: a backward may keep none of inference mode's.
        """
        columns = np.stack((self._columns, self._lengths))
        with torch.inference_mode(False):
            offsets, columns_there = to_device((self._host_offsets, columns), self.device)
        return offsets, columns_there

    @cached_property
    def _host_offsets(self) -> np.ndarray:
        if self.format == "bshd":
            common = self._padded[0] // self.cp_size if self._padded.size else 0
            return np.array([0, common], np.int32)
        offsets = np.zeros(self._padded.size + 1, np.int32)
        np.cumsum(self._padded // self.cp_size, out=offsets[1:])
        return offsets

    def _per_trajectory(self, name: str, field: str, values: HostInts) -> np.ndarray:
        listed = host_array(name, field, values)
        self._check_count(name, field, listed)
        return listed

    def _check_count(self, name: str, field: str, listed: np.ndarray) -> None:
        if listed.size != self._lengths.size:
            raise ValueError(
                f"{name}: {field} has {listed.size} entries for {self._lengths.size} trajectories"
            )

    def _check_captured(self, name: str, captured: np.ndarray) -> None:
        beyond = captured > self._lengths
        if beyond.any():
            i = int(beyond.argmax())
            raise ValueError(
                f"{name}: captured_lengths of trajectory {i} is {captured[i]}, but it has"
                f" {self._lengths[i]} tokens"
            )

    def _route_row_ids(self, name: str, captured: np.ndarray) -> Tensor:
        self._check_captured(name, captured)
        return self._row_ids(name, captured, None, False, self.sequence_parallel)

    def _row_ids(
        self,
        name: str,
        counts: np.ndarray,
        first: np.ndarray | None,
        next_token: bool,
        slice: bool,
    ) -> Tensor:
        if first is not None:
            outside = (first < 0) | ((first + counts > self._lengths) & (counts > 0))
            if outside.any():
                i = int(outside.argmax())
                raise ValueError(
                    f"{name}: trajectory {i} has {self._lengths[i]} tokens, but its {counts[i]}"
                    f" rows begin at position {first[i]}"
                )
        width, num_offsets = self._padded.size, self._host_offsets.size
        memory = staged(num_offsets + 3 * width, self.device)
        array = memory.array
        self._write_segments(name, array[num_offsets : num_offsets + 3 * width], counts, first)
        array[:num_offsets] = self._host_offsets
        return self._row_ids_of(memory, next_token=next_token, slice=slice)

    def _write_segments(
        self, name: str, segments: np.ndarray, counts: np.ndarray, first: np.ndarray | None
    ) -> None:
        """Bases, counts and starts of the padded sequences into ``segments`` [3 * B] int32."""
        width, size = self._padded.size, counts.size
        ends = counts.cumsum()
        if size and ends[-1] > INT32_MAX:
            raise ValueError(f"{name}: {ends[-1]} rows exceed int32")
        segments[:size] = ends - counts
        segments[width : width + size] = counts
        segments[2 * width :] = 0
        if first is not None:
            segments[2 * width : 2 * width + size] = first
        if size < width:  # the tail pad
            segments[size:width] = segments[width + size : 2 * width] = 0

    def _row_ids_of(
        self, memory: Staged, *, next_token: bool = False, slice: bool = False
    ) -> Tensor:
        """Of ``offsets`` and ``segments`` one after another."""
        first_id, num_ids = 0, self.num_tokens
        if slice:
            if not self.sequence_parallel:
                check_slice(
                    "TokenLayout.row_ids",
                    self.format,
                    self.num_tokens,
                    self.num_sequences,
                    self.tp_size,
                )
            num_ids //= self.tp_size
            first_id = num_ids * self.tp_rank
        num_offsets, width = self._host_offsets.size, self._padded.size
        return row_ids_of_table(
            memory.place_for_now(num_offsets + 3 * width, self.device),
            num_offsets,
            width,
            num_ids,
            first_id,
            self.cp_size,
            self.cp_rank,
            self.cp_order == "zigzag" and self.cp_size > 1,
            self.format == "bshd",
            int(next_token),
        )
