"""Routes of a rank: its layers, its tokens, one pass, widened once, dummies where none exist.

    topk_ids[j, i, k]  = routes[row_ids[i], layers[j], k]     where row_ids[i] >= 0
                       = dummy(ordinal(i), k)                 else
    padding_mask[i]    = row_ids[i] < 0

A dummy row holds K distinct experts, since Megatron's dispatcher counts tokens x topk. "constant"
is 0..K-1. "spread" deals the rank's dummy assignments over all E experts, one expert-parallel rank
after another: assignment a = ordinal * K + k (+ an offset of the rank's own) goes to expert
``(a mod EP) * (E / EP) + (a div EP) mod (E / EP)``; ordinal(i) counts the missing rows before i.

Sizes: N packed rows, L captured layers, J layers of this rank, M row ids, K experts a token,
E experts.
"""

import math
import operator
from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.rows import (
    check_row_ids,
    check_row_range,
    check_tensors,
    check_values,
    checks_values,
    interval,
)

ROUTE_DTYPES = frozenset({torch.uint8, torch.int16, torch.int32})
TOPK_ID_DTYPES = frozenset({torch.int32, torch.int64})

Dummy = Literal["constant", "spread"]

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def gather_routes_reference(
    routes: Tensor,
    row_ids: Tensor,
    layers: Tensor | None,
    first_layer: int,
    layer_step: int,
    num_layers: int,
    num_experts: int,
    spread: bool,
    ep_size: int,
    spread_offset: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    topk = routes.shape[2]
    if layers is None:
        layers = first_layer + layer_step * torch.arange(num_layers, device=routes.device)
    missing = row_ids < 0
    dummies = torch.arange(topk, device=routes.device)[None].expand(row_ids.shape[0], topk)
    if spread:
        per_rank = num_experts // ep_size
        ordinals = missing.cumsum(0) - missing.long()
        assignment = ordinals[:, None] * topk + dummies + spread_offset
        dummies = (assignment % ep_size) * per_rank + (assignment // ep_size) % per_rank
    out = dummies.to(dtype)[None].repeat(num_layers, 1, 1)
    rows = row_ids[~missing]
    for j, layer in enumerate(layers.tolist()):
        out[j, ~missing] = routes[rows, layer].to(dtype)
    return out, missing


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def dealt_expert(assignment, num_experts, ep_size):
    """Expert of a dummy assignment >= 0: one expert-parallel rank after another."""
    per_rank = num_experts // ep_size
    turn = assignment // ep_size
    return (assignment - turn * ep_size) * per_rank + turn % per_rank


@triton.jit(
    repr=kernel_name("gather_routes", "routes_ptr", "topk_ids_ptr", "TOPK", "PACKED_ROW"),
    do_not_specialize=[
        "num_ids", "first_layer", "layer_step", "num_layers", "stride_routes_row",
        "stride_routes_layer", "num_experts", "ep_size", "spread_offset",
    ],
    do_not_specialize_on_alignment=["layers_ptr", "row_ids_ptr", "missing_ptr"],
)  # fmt: skip
def _gather_routes_kernel(
    routes_ptr,  # [N, L, K] uint8 | int16 | int32, unit stride along K
    row_ids_ptr,  # [M] int64
    layers_ptr,  # [J] int32, or None: first_layer + layer_step * j
    missing_ptr,  # [M] int64 missing rows up to and with each slot, or None: constant dummies
    topk_ids_ptr,  # [J, M, K] int32 | int64
    mask_ptr,  # [M] bool
    num_ids,  # M
    first_layer,  # PACKED_ROW: first_layer * K, in units
    layer_step,
    num_layers,  # J
    stride_routes_row,  # both in units of UNIT elements
    stride_routes_layer,
    num_experts,  # E
    ep_size,
    spread_offset,
    TOPK: tl.constexpr,  # K, a power of 2
    UNIT: tl.constexpr,  # elements that stand aligned together, 16 bytes where the routes allow
    PACKED_ROW: tl.constexpr,  # layers stand one after another in a row
    EVEN_LAYERS: tl.constexpr,  # BLOCK_L divides J
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    slot_begin = tl.program_id(0).to(tl.int64) * BLOCK_M
    slots = slot_begin + tl.arange(0, BLOCK_M)
    slot_mask = slots < num_ids
    rows = tl.load(row_ids_ptr + slots, mask=slot_mask, other=-1)
    present = rows >= 0
    layer_begin = tl.program_id(1) * BLOCK_L
    if tl.program_id(1) == 0:
        tl.store(mask_ptr + slots, rows < 0, mask=slot_mask)

    if PACKED_ROW:
        # a row's layers are one run of BLOCK_L * K elements: wide loads, then one transpose
        cols = tl.arange(0, BLOCK_L * TOPK)
        run_begin = first_layer.to(tl.int64) * UNIT + layer_begin * TOPK
        src = (rows * stride_routes_row)[:, None] * UNIT + (run_begin + cols)[None, :]
        wanted = present[:, None]
        if not EVEN_LAYERS:
            wanted = wanted & (layer_begin * TOPK + cols < num_layers * TOPK)[None, :]
        values = tl.load(routes_ptr + src, mask=wanted, other=0)
        values = tl.reshape(values, [BLOCK_M, BLOCK_L, TOPK])
        values = tl.permute(values, (1, 0, 2))  # [BLOCK_L, BLOCK_M, K]
    else:
        layer = layer_begin + tl.arange(0, BLOCK_L)
        k = tl.arange(0, TOPK)
        if layers_ptr is None:
            captured = first_layer + layer_step * layer
        else:
            captured = tl.load(layers_ptr + layer, mask=layer < num_layers, other=0)
        src = (
            (rows * stride_routes_row)[None, :, None]
            + (captured.to(tl.int64) * stride_routes_layer)[:, None, None]
        ) * UNIT + k[None, None, :]
        wanted = present[None, :, None] & (layer < num_layers)[:, None, None]
        values = tl.load(routes_ptr + src, mask=wanted, other=0)

    values = values.to(topk_ids_ptr.dtype.element_ty)
    k = tl.arange(0, TOPK)
    if missing_ptr is None:
        dummies = tl.broadcast_to(k[None, :], [BLOCK_M, TOPK])
    else:
        dummies = tl.zeros([BLOCK_M, TOPK], dtype=tl.int32)
        if tl.max((rows < 0).to(tl.int32)) > 0:  # most programs have no row missing
            ordinals = tl.load(missing_ptr + slots, mask=slot_mask, other=1) - 1
            # the walk has period E, and K <= E; a slot with a row may hold -1 here
            begins = (ordinals * TOPK + spread_offset) % num_experts
            dummies = dealt_expert(begins.to(tl.int32)[:, None] + k[None, :], num_experts, ep_size)
    dummies = dummies.to(values.dtype)
    values = tl.where(present[None, :, None], values, dummies[None, :, :])

    layer = layer_begin + tl.arange(0, BLOCK_L)
    # one layer's tokens are one run of BLOCK_M * K elements
    values = tl.reshape(values, [BLOCK_L, BLOCK_M * TOPK])
    cols = tl.arange(0, BLOCK_M * TOPK)
    left = (num_ids - slot_begin) * TOPK
    dst = (layer.to(tl.int64) * num_ids + slot_begin)[:, None] * TOPK + cols[None, :]
    stored = (layer < num_layers)[:, None] & (cols < left)[None, :]
    tl.store(topk_ids_ptr + dst, values, mask=stored)


@triton.jit(
    repr=kernel_name("gather_routes_by_unit", "routes_ptr", "topk_ids_ptr", "TOPK"),
    do_not_specialize=[
        "num_ids", "first_layer", "layer_step", "num_layers", "stride_routes_row",
        "stride_routes_layer", "num_experts", "ep_size", "spread_offset",
    ],
    do_not_specialize_on_alignment=["layers_ptr", "row_ids_ptr", "missing_ptr"],
)  # fmt: skip
def _gather_routes_by_unit_kernel(
    routes_ptr,  # [N, L, K], unit stride along K; all as in _gather_routes_kernel
    row_ids_ptr,  # [M] int64
    layers_ptr,  # [J] int32, or None
    missing_ptr,  # [M] int64, or None
    topk_ids_ptr,  # [J, M, K]
    mask_ptr,  # [M] bool
    num_ids,
    first_layer,
    layer_step,
    num_layers,
    stride_routes_row,  # both in units of UNIT elements
    stride_routes_layer,
    num_experts,
    ep_size,
    spread_offset,
    TOPK: tl.constexpr,  # not a power of 2
    UNIT: tl.constexpr,  # elements that move together: a power of 2 that divides K and the strides
    LAYERS: tl.constexpr,  # of one program
    BLOCK_U: tl.constexpr,
):
    # a layer's output is one run of M * K / UNIT units, and no unit spans two tokens
    begin = tl.program_id(0).to(tl.int64) * BLOCK_U
    first_slot = begin // (TOPK // UNIT)
    within = (begin - first_slot * (TOPK // UNIT)).to(tl.int32) + tl.arange(0, BLOCK_U)
    passed = within // (TOPK // UNIT)
    unit = within - passed * (TOPK // UNIT)
    slots = first_slot + passed
    in_bounds = slots < num_ids
    rows = tl.load(row_ids_ptr + slots, mask=in_bounds, other=-1)
    present = (rows >= 0)[:, None]
    if tl.program_id(1) == 0:
        tl.store(mask_ptr + slots, rows < 0, mask=in_bounds & (unit == 0))
    lane = tl.arange(0, UNIT)[None, :]
    k = unit[:, None] * UNIT + lane
    if missing_ptr is None:
        dummies = k
    else:
        dummies = tl.zeros([BLOCK_U, UNIT], dtype=tl.int32)
        if tl.max((rows < 0).to(tl.int32)) > 0:
            ordinals = tl.load(missing_ptr + slots, mask=in_bounds, other=1) - 1
            begins = (ordinals * TOPK + spread_offset) % num_experts
            dummies = dealt_expert(begins.to(tl.int32)[:, None] + k, num_experts, ep_size)
    dummies = dummies.to(topk_ids_ptr.dtype.element_ty)
    source = rows * stride_routes_row + unit
    flat = begin + tl.arange(0, BLOCK_U)
    size = num_ids.to(tl.int64) * (TOPK // UNIT)
    for step in tl.static_range(LAYERS):
        layer = tl.program_id(1) * LAYERS + step
        wanted = layer < num_layers
        if layers_ptr is None:
            captured = first_layer + layer_step * layer
        else:
            captured = tl.load(layers_ptr + layer, mask=wanted, other=0)
        src = (source + captured.to(tl.int64) * stride_routes_layer)[:, None] * UNIT + lane
        values = tl.load(routes_ptr + src, mask=present & wanted, other=0)
        values = tl.where(present, values.to(dummies.dtype), dummies)
        dst = (layer.to(tl.int64) * size + flat)[:, None] * UNIT + lane
        tl.store(topk_ids_ptr + dst, values, mask=in_bounds[:, None] & wanted)


_launch_gather_routes = Launcher(_gather_routes_kernel)
_launch_gather_routes_by_unit = Launcher(_gather_routes_by_unit_kernel)

_UNIT_BYTES = 16
_RUNS = (256, 128)  # elements of a row that one program reads
_TILE = 4096
_STRIDED_TILE = 2048  # strided reads hold an int64 address an element
_LAYERS = 8
_BLOCK_U = 512


def _gather_routes_cuda(
    routes: Tensor,
    row_ids: Tensor,
    layers: Tensor | None,
    first_layer: int,
    layer_step: int,
    num_layers: int,
    num_experts: int,
    spread: bool,
    ep_size: int,
    spread_offset: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    num_ids, topk = row_ids.shape[0], routes.shape[2]
    if routes.stride(2) != 1 and topk > 1:
        routes = routes.contiguous()
    out = routes.new_empty((num_layers, num_ids, topk), dtype=dtype)
    mask = routes.new_empty(num_ids, dtype=torch.bool)
    if num_ids == 0:
        return out, mask
    if num_layers == 0 or topk == 0:
        return out, row_ids < 0
    missing = (row_ids < 0).cumsum(0) if spread else None
    stride_row, stride_layer, _ = routes.stride()
    block_k = 1 << (topk - 1).bit_length()
    if block_k != topk:
        unit = math.gcd(_UNIT_BYTES // routes.itemsize, topk, stride_row, stride_layer)
        num_units = num_ids * (topk // unit)
        _launch_gather_routes_by_unit(
            ((num_units + _BLOCK_U - 1) // _BLOCK_U, (num_layers + _LAYERS - 1) // _LAYERS),
            (
                routes, row_ids, layers, missing, out, mask, num_ids, first_layer, layer_step,
                num_layers, stride_row // unit, stride_layer // unit, num_experts, ep_size,
                spread_offset,
            ),
            (topk, unit, _LAYERS, _BLOCK_U),
        )  # fmt: skip
        return out, mask
    packed_row = (
        layers is None and layer_step == 1 and stride_layer == topk and stride_row % topk == 0
    )
    most = _UNIT_BYTES // routes.itemsize
    if packed_row:
        unit = math.gcd(most, stride_row, first_layer * topk)
        first_layer = first_layer * topk // unit
    else:
        unit = math.gcd(most, stride_row, stride_layer)
    block_l = _layers_of_a_program(num_layers, topk)
    block_m = max(16, (_TILE if packed_row else _STRIDED_TILE) // (block_l * topk))
    _launch_gather_routes(
        ((num_ids + block_m - 1) // block_m, (num_layers + block_l - 1) // block_l),
        (
            routes, row_ids, layers, missing, out, mask, num_ids, first_layer, layer_step,
            num_layers, stride_row // unit, stride_layer // unit, num_experts, ep_size,
            spread_offset,
        ),
        (topk, unit, packed_row, num_layers % block_l == 0, block_m, block_l),
        num_warps=8,
    )  # fmt: skip
    return out, mask


def _layers_of_a_program(num_layers: int, topk: int) -> int:
    """A power of 2: the longest run of ``_RUNS`` among those that leave the fewest layers idle."""
    most = 1 << (num_layers - 1).bit_length()
    choices = [max(1, min(run // topk, most)) for run in _RUNS]
    return min(choices, key=lambda block_l: -(-num_layers // block_l) * block_l)


# --- operator -------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::gather_routes",
    "(Tensor routes, Tensor row_ids, Tensor? layers, int first_layer, int layer_step,"
    " SymInt num_layers, int num_experts, bool spread, int ep_size, int spread_offset,"
    " ScalarType dtype) -> (Tensor, Tensor)",
)
torch.library.impl("packhorse::gather_routes", "CPU", gather_routes_reference)
torch.library.impl("packhorse::gather_routes", "CUDA", _gather_routes_cuda)


@torch.library.register_fake("packhorse::gather_routes")
def _gather_routes_fake(
    routes, row_ids, layers, first_layer, layer_step, num_layers, num_experts, spread, ep_size,
    spread_offset, dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_ids = row_ids.shape[0]
    out = routes.new_empty((num_layers, num_ids, routes.shape[2]), dtype=dtype)
    return out, routes.new_empty(num_ids, dtype=torch.bool)


_gather_routes_op = called_directly(torch.ops.packhorse.gather_routes.default, _gather_routes_cuda)


# --- public API -----------------------------------------------------------------------------------


@ranged
def gather_routes(
    routes: Tensor,
    row_ids: Tensor,
    layers: range | Sequence[int] | Tensor,
    *,
    num_experts: int,
    dtype: torch.dtype = torch.int32,
    dummy: Dummy = "constant",
    ep_size: int = 1,
    spread_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Experts of this rank's tokens in each of its layers, and the router padding mask.

    Args:
        routes: [N, L, K] uint8, int16 or int32, CPU or CUDA: packed captured routes.
        row_ids: [M] int64, contiguous, on ``routes.device``, each in [-1, N): from
            ``TokenLayout.route_row_ids``.
        layers: captured layers to deliver, each in [0, L), in the order wanted. A ``range``, or
            integers with a constant step, cost nothing; others are copied to the device on each
            call, so a caller that has such a list keeps it as a [J] int32 tensor there.
        num_experts: E >= K.
        dtype: int32 or int64, of the ids.
        dummy: what a slot without a row gets, K distinct experts: "constant" (0..K-1), or "spread"
            over all E, which keeps padding from going to one expert-parallel rank.
        ep_size: expert-parallel ranks, a divisor of E; used by "spread".
        spread_offset: where this rank begins its walk over the experts; used by "spread".

    Returns:
        topk_ids [J, M, K] of ``dtype``, contiguous, and padding_mask [M] bool, True where the slot
        has no row (Megatron's polarity: True is padding).

    Raises:
        TypeError: a dtype is unsupported, or a count is no integer.
        ValueError: a shape, device, layer or count is wrong, or a row id or expert on the CPU is
            out of range. Values on a GPU are not read, since that would stall it;
            ``PACKHORSE_CHECK=1`` checks row_ids, routes and a table of layers there.
        RuntimeError: ``layers`` would be copied while a CUDA graph is captured.

    Source: ``RouterReplay.target_topk_idx`` of Megatron-core takes one layer's [M, K].
    """
    name = "gather_routes"
    check_tensors(name, routes=routes, row_ids=row_ids)
    check_row_ids(name, row_ids, "routes", routes)
    if checks_values(row_ids):
        check_row_range(name, row_ids, len(routes) if routes.dim() else 0)
    return gather_routes_of_rows(
        name, routes, row_ids, layers, num_experts, dtype, dummy, ep_size, spread_offset
    )


def gather_routes_of_rows(
    name: str, routes: Tensor, row_ids: Tensor, layers: range | Sequence[int] | Tensor,
    num_experts: int, dtype: torch.dtype, dummy: Dummy, ep_size: int, spread_offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``gather_routes`` under another name, with row ids that are right by construction."""
    if routes.dtype not in ROUTE_DTYPES:
        raise TypeError(f"{name}: routes must be uint8, int16 or int32, got {routes.dtype}")
    if routes.dim() != 3:
        raise ValueError(f"{name}: routes must be [N, L, K], got {tuple(routes.shape)}")
    if dtype not in TOPK_ID_DTYPES:
        raise TypeError(f"{name}: dtype must be int32 or int64, got {dtype}")
    check_dummy(name, dummy, routes.shape[2], num_experts, ep_size, spread_offset)
    table, first_layer, layer_step, num_layers = resolve_layers(name, layers, routes)
    if checks_values(routes):
        delivered = table
        if delivered is None:
            steps = torch.arange(num_layers, device=routes.device)
            delivered = first_layer + layer_step * steps
        listed = (delivered >= 0) & (delivered < routes.shape[1])
        check_values(listed.all(), f"{name}: a layer is outside {interval(0, routes.shape[1])}")
        chosen = routes.index_select(1, torch.where(listed, delivered, 0))
        if chosen.numel():  # extremes first: uint8 cannot be compared with 256
            low, high = (extreme.long() for extreme in torch.aminmax(chosen))
            known = (low >= 0) & (high < num_experts)
            check_values(known, f"{name}: an expert is outside {interval(0, num_experts)}")
    return _gather_routes_op(
        routes, row_ids, table, first_layer, layer_step, num_layers, num_experts,
        dummy == "spread", ep_size, spread_offset, dtype,
    )  # fmt: skip


def check_dummy(
    name: str, dummy: str, topk: int, num_experts: int, ep_size: int, spread_offset: int
) -> None:
    for field, count in (
        ("topk", topk), ("num_experts", num_experts), ("ep_size", ep_size),
        ("spread_offset", spread_offset),
    ):  # fmt: skip
        if not isinstance(count, int | torch.SymInt) or isinstance(count, bool):
            raise TypeError(f"{name}: {field} must be an integer, got {count!r}")
    if not 0 <= num_experts < 2**31:
        raise ValueError(f"{name}: num_experts must be from 0 to 2**31 - 1, got {num_experts}")
    if dummy not in ("constant", "spread"):
        raise ValueError(f"{name}: dummy must be 'constant' or 'spread', got {dummy!r}")
    if topk > num_experts:
        raise ValueError(f"{name}: routes name {topk} experts a token, num_experts={num_experts}")
    if dummy == "spread" and (ep_size < 1 or num_experts % ep_size):
        raise ValueError(f"{name}: ep_size={ep_size} does not divide num_experts={num_experts}")
    if not 0 <= spread_offset < 2**62:
        raise ValueError(f"{name}: spread_offset must be >= 0 and below 2**62, got {spread_offset}")


def resolve_layers(
    name: str, layers: range | Sequence[int] | Tensor, routes: Tensor
) -> tuple[Tensor | None, int, int, int]:
    """A table on the device or None, and first, step and count of an arithmetic run."""
    captured = routes.shape[1]
    if type(layers) is range:  # its ends are its extremes
        for layer in (layers[0], layers[-1]) if layers else ():
            if not 0 <= layer < captured:
                raise ValueError(f"{name}: layer {layer} is not in [0, {captured})")
        return None, layers.start, layers.step, len(layers)
    if isinstance(layers, Tensor):
        if layers.dtype != torch.int32 or layers.dim() != 1 or layers.device != routes.device:
            raise ValueError(
                f"{name}: layers as a tensor must be [J] int32 on {routes.device},"
                f" got {tuple(layers.shape)} {layers.dtype} on {layers.device}"
            )
        return layers.contiguous(), 0, 1, layers.shape[0]
    if not isinstance(layers, Sequence):
        raise TypeError(
            f"{name}: layers must be a range, a list or an int32 tensor, got"
            f" {type(layers).__name__}"
        )
    try:
        listed = [operator.index(layer) for layer in layers]
    except TypeError:
        raise TypeError(f"{name}: layers must be integers, got {list(layers)!r}") from None
    for layer in listed:
        if not 0 <= layer < captured:
            raise ValueError(f"{name}: layer {layer} is not in [0, {captured})")
    first = listed[0] if listed else 0
    step = listed[1] - first if len(listed) > 1 else 1
    if listed == [first + step * i for i in range(len(listed))]:
        return None, first, step, len(listed)
    table = torch.tensor(listed, dtype=torch.int32)
    if routes.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: a list of layers cannot be captured in a CUDA graph, whose replays would"
                " copy from memory that is gone; pass an int32 tensor on the device"
            )
        table = table.pin_memory()
    return table.to(routes.device, non_blocking=True), 0, 1, len(listed)
