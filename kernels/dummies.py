"""Dummy routes: K distinct experts for each token that has none of its own, written on the device.

    constant    out[j, i, k] = k
    spread      out[j, i, k] = expert(i * K + k + offset),
                expert(a) = (a mod EP) * (E / EP) + (a div EP) mod (E / EP)

Megatron's dispatcher counts tokens x topk, so the experts of a row are distinct; "constant" sends
all padding to the expert-parallel rank that holds experts 0..K-1, "spread" deals it over all E.
The rows of ``gather_routes`` whose id is -1 hold the same, by the ordinal of the missing row.

Sizes: M rows, J layers, K experts a row, E experts, EP expert-parallel ranks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, kernel_name
from packhorse.kernels.routes import (
    ROUTE_DTYPES,
    TOPK_ID_DTYPES,
    Dummy,
    check_dummy,
    dealt_expert,
)

DUMMY_DTYPES = ROUTE_DTYPES | TOPK_ID_DTYPES

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def fill_dummy_routes_reference(
    routes: Tensor, num_experts: int, spread: bool, ep_size: int, spread_offset: int
) -> None:
    _, num_ids, topk = routes.shape
    experts = torch.arange(topk, device=routes.device).expand(num_ids, topk)
    if spread:
        per_rank = num_experts // ep_size
        assignment = torch.arange(num_ids * topk, device=routes.device).view(num_ids, topk)
        assignment = assignment + spread_offset
        experts = (assignment % ep_size) * per_rank + (assignment // ep_size) % per_rank
    routes.copy_(experts)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(
    repr=kernel_name("fill_dummy_routes", "routes_ptr"),
    do_not_specialize=[
        "num_units", "num_blocks", "period_blocks", "rounds", "num_experts", "ep_size",
        "spread_offset",
    ],
)  # fmt: skip
def _fill_dummy_routes_kernel(
    routes_ptr,  # [J, M, K], contiguous
    num_units,  # M * K / UNIT
    num_blocks,  # M * K / BLOCK, rounded up
    period_blocks,  # blocks after which the walk repeats: E / gcd(E, BLOCK)
    rounds,  # periods that one program writes
    num_experts,  # E
    ep_size,
    spread_offset,
    UNIT: tl.constexpr,  # elements that stand aligned together in each layer
    BLOCK: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    phase = tl.program_id(0) % period_blocks
    first_block = (tl.program_id(0) // period_blocks * rounds).to(tl.int64) * period_blocks + phase
    # the walk has period E: what is dealt once is written in each round
    walked = (phase.to(tl.int64) * BLOCK + spread_offset) % num_experts
    experts = dealt_expert(walked.to(tl.int32) + offsets, num_experts, ep_size)
    experts = experts.to(routes_ptr.dtype.element_ty)
    layer = tl.program_id(1).to(tl.int64) * num_units * UNIT
    for turn in range(0, rounds):
        block = first_block + turn * period_blocks
        left = (num_units - block * (BLOCK // UNIT)) * UNIT
        written = routes_ptr + layer + block * BLOCK + offsets
        tl.store(written, experts, mask=(offsets < left) & (block < num_blocks))


_launch_fill_dummy_routes = Launcher(_fill_dummy_routes_kernel)

_UNIT_BYTES = 16
_BLOCK = 2048
_BLOCKS_OF_A_PROGRAM = 2


def _fill_dummy_routes_cuda(
    routes: Tensor, num_experts: int, spread: bool, ep_size: int, spread_offset: int
) -> None:
    num_layers, num_ids, topk = routes.shape
    if not routes.is_contiguous():
        raise ValueError("packhorse::fill_dummy_routes: routes must be contiguous")
    if routes.numel() == 0:
        return
    num_elements = num_ids * topk
    if not spread:  # a walk over K experts, in which all layers are one long one
        num_elements, num_layers = num_elements * num_layers, 1
        num_experts, ep_size, spread_offset = topk, 1, 0
    unit = math.gcd(_UNIT_BYTES // routes.itemsize, topk)  # whatever the number of rows
    num_blocks = -(-num_elements // _BLOCK)
    period = min(num_experts // math.gcd(num_experts, _BLOCK), num_blocks)
    rounds = min(_BLOCKS_OF_A_PROGRAM, -(-num_blocks // period))
    _launch_fill_dummy_routes(
        (period * -(-num_blocks // (period * rounds)), num_layers),
        (
            routes, num_elements // unit, num_blocks, period, rounds, num_experts, ep_size,
            spread_offset,
        ),
        (unit, _BLOCK),
    )  # fmt: skip


# --- operator -------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::fill_dummy_routes",
    "(Tensor(a!) routes, int num_experts, bool spread, int ep_size, int spread_offset) -> ()",
)
torch.library.impl("packhorse::fill_dummy_routes", "CPU", fill_dummy_routes_reference)
torch.library.impl("packhorse::fill_dummy_routes", "CUDA", _fill_dummy_routes_cuda)


@torch.library.register_fake("packhorse::fill_dummy_routes")
def _fill_dummy_routes_fake(routes, num_experts, spread, ep_size, spread_offset) -> None:
    return None


_fill_dummy_routes_op = torch.ops.packhorse.fill_dummy_routes.default


# --- public API -----------------------------------------------------------------------------------


@ranged
def dummy_routes(
    num_ids: int,
    topk: int,
    *,
    num_experts: int,
    num_layers: int = 1,
    dtype: torch.dtype = torch.int32,
    dummy: Dummy = "constant",
    ep_size: int = 1,
    spread_offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Routes of tokens that have none: K distinct experts a row, the same in each layer.

    Args:
        num_ids: M >= 0, rows.
        topk: K, experts a row, 0 <= K <= E.
        num_experts: E.
        num_layers: J >= 0.
        dtype: uint8, int16, int32 or int64; must hold E - 1.
        dummy: "constant": experts 0..K-1 in every row; "spread": assignment a of the walk over all
            rows goes to expert ``(a mod EP) * (E / EP) + (a div EP) mod (E / EP)``, so that each
            expert-parallel rank gets its share.
        ep_size: EP, expert-parallel ranks, a divisor of E; used by "spread".
        spread_offset: where this rank begins its walk; used by "spread".
        device: where they are written; nothing is copied from the host.

    Returns:
        [J, M, K] of ``dtype``, contiguous.

    Raises:
        TypeError: ``dtype`` is unsupported, or a count is no integer.
        ValueError: a count is out of range, ``dtype`` does not hold E - 1, or ``ep_size`` does not
            divide E.
    """
    name = "dummy_routes"
    if dtype not in DUMMY_DTYPES:
        raise TypeError(f"{name}: dtype must be uint8, int16, int32 or int64, got {dtype}")
    for field, count in (("num_ids", num_ids), ("num_layers", num_layers), ("topk", topk)):
        if not isinstance(count, int | torch.SymInt) or isinstance(count, bool):
            raise TypeError(f"{name}: {field} must be an integer, got {count!r}")
    if num_ids < 0 or num_layers < 0 or topk < 0:
        raise ValueError(
            f"{name}: num_ids={num_ids}, num_layers={num_layers} and topk={topk} must be >= 0"
        )
    check_dummy(name, dummy, topk, num_experts, ep_size, spread_offset)
    if num_experts - 1 > torch.iinfo(dtype).max:
        raise ValueError(f"{name}: {dtype} does not hold the ids of num_experts={num_experts}")
    out = torch.empty((num_layers, num_ids, topk), dtype=dtype, device=device)
    _fill_dummy_routes_op(out, num_experts, dummy == "spread", ep_size, spread_offset)
    return out
