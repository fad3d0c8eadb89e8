"""Check the content of packed routes and support on the device; read the outcome later.

A cell is one (row, layer) of the routes, or one row of the support, and has one fault at most: the
first that holds of

    routes    missing          every entry is -1: rows end where the captured prefix ends
              partly_missing   some entries are -1
              out_of_range     an expert outside [0, E)
              all_zero         K > 1 zeros: an engine that captured nothing
              repeated         an expert twice: Megatron's dispatcher would split wrongly
    support   out_of_range     an id outside [0, V); -1 (``NO_CANDIDATE``) ends a row of fixed width
              not_compacted    an id after a -1
              repeated         an id twice
              sampled_missing  ids, but the sampled one is not among them; no ids at all is legal

Nothing is read back; ``faults.py`` says what the counters hold. The result is deterministic.

Sizes: N rows, L captured layers, J of them to check, K experts a token, E experts, C width of the
support, V vocabulary.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.faults import (
    ROUTE_FAULTS,
    SUPPORT_FAULTS,
    RouteCheck,
    SupportCheck,
    clear_checks,
    cleared,
    count_cells,
    count_faults,
)
from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.routes import ROUTE_DTYPES, resolve_layers
from packhorse.kernels.rows import check_tensors, check_values, checks_values, interval
from packhorse.kernels.support_rows import check_ragged_rows
from packhorse.packed.sentinels import MISSING_EXPERT, NO_CANDIDATE

#: Ids that the references widen at once.
_CHUNK_IDS: Final = 1 << 22


# --- references: the specification, and what CPU tensors run --------------------------------------


def validate_routes_reference(
    routes: Tensor,
    layers: Tensor | None,
    first_layer: int,
    layer_step: int,
    num_layers: int,
    num_experts: int,
) -> Tensor:
    """Returns [2, 5] int64: counts and first."""
    captured, topk = routes.shape[1:]
    counters = cleared(routes, len(ROUTE_FAULTS))
    if layers is None:
        layers = first_layer + layer_step * torch.arange(num_layers, device=routes.device)
    if topk == 0 or layers.shape[0] == 0:
        return counters
    first_row = 0
    for rows in routes.split(max(1, _CHUNK_IDS // (layers.shape[0] * topk))):
        ids = rows[:, layers.long()].int()
        missing = ids == MISSING_EXPERT
        in_order = ids.sort(-1).values
        faults = (
            missing.all(-1),
            missing.any(-1),
            ((ids < 0) | (ids >= num_experts)).any(-1),
            (ids == 0).all(-1) & (topk > 1),
            (in_order[..., 1:] == in_order[..., :-1]).any(-1),
        )
        row = first_row + torch.arange(rows.shape[0], device=routes.device)
        count_cells(counters, faults, row[:, None] * captured + layers)
        first_row += rows.shape[0]
    return counters


def validate_support_reference(support: Tensor, sampled_ids: Tensor, vocab_size: int) -> Tensor:
    """Returns [2, 4] int64: counts and first."""
    counters = cleared(support, len(SUPPORT_FAULTS))
    width = support.shape[1]
    first_row = 0
    for ids in support.split(max(1, _CHUNK_IDS // max(1, width))):
        row = first_row + torch.arange(ids.shape[0], device=ids.device)
        sampled = sampled_ids[first_row : first_row + ids.shape[0], None]
        named = ids != NO_CANDIDATE
        in_order = ids.sort(1).values
        twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != NO_CANDIDATE)
        faults = (
            (named & ((ids < 0) | (ids >= vocab_size))).any(1),
            (named[:, 1:] & ~named[:, :-1]).any(1),
            twice.any(1),
            named.any(1) & ~(named & (ids == sampled)).any(1),
        )
        count_cells(counters, faults, row)
        first_row += ids.shape[0]
    return counters


def validate_ragged_support_reference(
    token_ids: Tensor, row_offsets: Tensor, sampled_ids: Tensor, vocab_size: int
) -> Tensor:
    """As ``validate_support_reference``, of rows of different widths. Runs on every device: one
    sort of all ids finds the repeated ones whatever the widths, and nothing waits for it."""
    counters = cleared(token_ids, len(SUPPORT_FAULTS))
    begins, ends = row_offsets[:-1], row_offsets[1:]
    rows = torch.arange(begins.shape[0], device=token_ids.device)
    row = rows.repeat_interleave(ends - begins, output_size=token_ids.shape[0])
    keys = (row * 2**32 + token_ids).sort().values  # rows stay where they are
    twice = torch.zeros_like(keys)
    twice[1:] = keys[1:] == keys[:-1]

    def in_rows(holds: Tensor) -> Tensor:
        before = torch.cat([begins.new_zeros(1), holds.cumsum(0)])
        return before[ends] > before[begins]

    faults = (
        in_rows((token_ids < 0) | (token_ids >= vocab_size)),
        torch.zeros_like(rows, dtype=torch.bool),
        in_rows(twice),
        (ends > begins) & ~in_rows(token_ids == sampled_ids[row]),
    )
    count_cells(counters, faults, rows)
    return counters


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def id_of_word(word, i: tl.constexpr, ID_BITS: tl.constexpr):
    """The i-th id of a word as uint32: -1 is all its bits, and every negative id a large one."""
    part = (word >> (ID_BITS * i)).to(tl.uint32)
    if ID_BITS < 32:
        part = part & ((1 << ID_BITS) - 1)
    return part


@triton.jit(
    repr=kernel_name("validate_routes", "TOPK", "ID_BITS"),
    do_not_specialize=[
        "num_cells", "num_layers", "captured", "first_layer", "layer_step", "stride_row",
        "stride_layer", "bound",
    ],
    do_not_specialize_on_alignment=["words_ptr", "layers_ptr"],
)  # fmt: skip
def _validate_routes_kernel(
    words_ptr,  # [N, L, WORDS], unit stride along WORDS: the ids of a cell, several to a word
    layers_ptr,  # [J] int32, or None: first_layer + layer_step * j
    counters_ptr,  # [2, 5] int64
    num_cells,  # N * J
    num_layers,  # J
    captured,  # L
    first_layer,
    layer_step,
    stride_row,  # words
    stride_layer,
    bound,  # E, or what the signed ids can reach of it
    FLAT: tl.constexpr,  # the cells stand one after another, layers in order
    TOPK: tl.constexpr,  # K
    WORDS: tl.constexpr,
    ID_BITS: tl.constexpr,  # 8: unsigned; 16, 32: signed, -1 no expert
    BLOCK: tl.constexpr,
):
    # int64 before the first multiply; within a block 32 bits hold the cell, and divide
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    in_bounds = begin + lanes < num_cells
    if FLAT:
        cells = begin + lanes
        words = words_ptr + cells * WORDS
    else:
        first_row = begin // num_layers
        within = (begin - first_row * num_layers).to(tl.int32) + lanes
        passed = within // num_layers
        layer = within - passed * num_layers
        if layers_ptr is None:
            layer = first_layer + layer_step * layer
        else:
            layer = tl.load(layers_ptr + layer, mask=in_bounds, other=0)
        row, layer = first_row + passed, layer.to(tl.int64)
        cells = row * captured + layer
        words = words_ptr + row * stride_row + layer * stride_layer

    PER_WORD: tl.constexpr = TOPK // WORDS
    ids = ()
    for w in tl.static_range(WORDS):
        word = tl.load(words + w, mask=in_bounds, other=0)
        for i in tl.static_range(PER_WORD):
            ids += (id_of_word(word, i, ID_BITS),)  # type: ignore[assignment]
    bound = bound.to(tl.uint32)
    outside = tl.zeros([BLOCK], dtype=tl.int1)
    repeated = tl.zeros([BLOCK], dtype=tl.int1)
    for k in tl.static_range(TOPK):
        outside = outside | (ids[k] >= bound)
        for other in tl.static_range(k):
            repeated = repeated | (ids[k] == ids[other])
    # K > 1 zeros are a repeated expert, and -1 is outside
    faulty = (outside | repeated) & in_bounds
    if tl.max(faulty.to(tl.int32)) > 0:
        # read anew: the compiler would do this for good cells too, beside their own work
        num_missing = tl.zeros([BLOCK], dtype=tl.int32)
        any_bit = tl.zeros([BLOCK], dtype=tl.uint32)
        outside = tl.zeros([BLOCK], dtype=tl.int1)
        for w in tl.static_range(WORDS):
            word = tl.load(words + w, mask=in_bounds, other=0, volatile=True)
            for i in tl.static_range(PER_WORD):
                expert = id_of_word(word, i, ID_BITS)
                if ID_BITS > 8:
                    num_missing += (expert == (1 << ID_BITS) - 1).to(tl.int32)
                any_bit = any_bit | expert
                outside = outside | (expert >= bound)
        fault = tl.where(any_bit == 0, 3, 4)
        fault = tl.where(outside, 2, fault)
        fault = tl.where(num_missing > 0, 1, fault)
        fault = tl.where(num_missing == TOPK, 0, fault)
        count_faults(counters_ptr, tl.where(faulty, fault, -1), cells, 5)


@triton.jit(
    repr=kernel_name("validate_support", "BLOCK_C"),
    do_not_specialize=["num_rows", "width", "stride_row", "vocab_size"],
    do_not_specialize_on_alignment=["support_ptr", "sampled_ptr"],
)
def _validate_support_kernel(
    support_ptr,  # [N, C] int32, unit stride along C
    sampled_ptr,  # [N] int64 | int32
    counters_ptr,  # [2, 4] int64
    num_rows,  # N
    width,  # C
    stride_row,
    vocab_size,  # V
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_C)
    in_rows = rows < num_rows
    places = support_ptr + rows[:, None] * stride_row + columns[None, :]
    ids = tl.load(places, mask=in_rows[:, None] & (columns < width)[None, :], other=-1)
    has_next = in_rows[:, None] & (columns + 1 < width)[None, :]
    following = tl.load(places + 1, mask=has_next, other=-1)
    sampled = tl.load(sampled_ptr + rows, mask=in_rows, other=-1)

    named = ids != -1
    outside = named & ((ids < 0) | (ids >= vocab_size))
    gap = ~named & (following != -1)
    descends = named & (following != -1) & (following <= ids)
    is_sampled = named & (ids == sampled[:, None])
    # rows that ascend, as vLLM's mask has them, repeat nothing: one reduction settles them
    seen = tl.where(is_sampled, 2, named.to(tl.int32))
    state = tl.max(tl.where(outside | gap | descends, 3, seen), axis=1)
    if tl.max(((state == 3) | (state == 1)).to(tl.int32)) > 0:
        # an id that is there twice equals two of the entries
        matches = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.int32)
        if tl.max(tl.max(descends.to(tl.int32), axis=1)) > 0:
            sought = tl.where(named, ids, -2)
            for c in range(0, width):
                one = tl.load(support_ptr + rows * stride_row + c, mask=in_rows, other=-1)
                matches += (sought == one[:, None]).to(tl.int32)
        repeated = tl.max(matches, axis=1) > 1
        fault = tl.where(tl.max(seen, axis=1) == 1, 3, -1)
        fault = tl.where(repeated, 2, fault)
        fault = tl.where(tl.max(gap.to(tl.int32), axis=1) > 0, 1, fault)
        fault = tl.where(tl.max(outside.to(tl.int32), axis=1) > 0, 0, fault)
        count_faults(counters_ptr, fault, rows, 4)


_launch_validate_routes = Launcher(_validate_routes_kernel)
_launch_validate_support = Launcher(_validate_support_kernel)

#: Wider cells run the reference, which sorts them.
_MAX_TOPK = 32
_MAX_WIDTH = 128
_TILE_IDS = 4096
_TILE_ENTRIES = 1024


def _as_words(routes: Tensor) -> Tensor:
    """View ``routes`` [N, L, K] as [N, L, words], several ids to a word where its strides allow."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        ids = dtype.itemsize // routes.itemsize
        counts = (*routes.stride()[:2], routes.storage_offset(), routes.shape[2])
        if ids <= 1 or any(count % ids for count in counts):
            continue
        if routes.stride(2) == 1 and routes.data_ptr() % dtype.itemsize == 0:
            return routes.view(dtype)
    return routes


def _validate_routes_cuda(
    routes: Tensor,
    layers: Tensor | None,
    first_layer: int,
    layer_step: int,
    num_layers: int,
    num_experts: int,
) -> Tensor:
    num_rows, captured, topk = routes.shape
    if topk > _MAX_TOPK:
        return validate_routes_reference(
            routes, layers, first_layer, layer_step, num_layers, num_experts
        )
    counters = clear_checks(routes, len(ROUTE_FAULTS))
    num_cells = num_rows * num_layers
    if num_cells == 0 or topk == 0:
        return counters
    if routes.stride(2) != 1 and topk > 1:
        routes = routes.contiguous()
    flat = layers is None and (first_layer, layer_step, num_layers) == (0, 1, captured)
    words = _as_words(routes)
    bound = min(num_experts, 2**15) if routes.dtype == torch.int16 else num_experts
    block = min(512, _TILE_IDS // (1 << (topk - 1).bit_length()))
    _launch_validate_routes(
        ((num_cells + block - 1) // block,),
        (
            words, layers, counters, num_cells, num_layers, captured, first_layer, layer_step,
            words.stride(0), words.stride(1), bound,
        ),
        (flat and routes.is_contiguous(), topk, words.shape[2], 8 * routes.itemsize, block),
    )  # fmt: skip
    return counters


def _validate_support_cuda(support: Tensor, sampled_ids: Tensor, vocab_size: int) -> Tensor:
    num_rows, width = support.shape
    if width > _MAX_WIDTH:
        return validate_support_reference(support, sampled_ids, vocab_size)
    counters = clear_checks(support, len(SUPPORT_FAULTS))
    if num_rows == 0 or width == 0:
        return counters
    if support.stride(1) != 1 and width > 1:
        support = support.contiguous()
    block_c = 1 << (width - 1).bit_length()
    block_m = min(_TILE_ENTRIES // block_c, 128)
    _launch_validate_support(
        ((num_rows + block_m - 1) // block_m,),
        (
            support, sampled_ids.contiguous(), counters, num_rows, width, support.stride(0),
            vocab_size,
        ),
        (block_m, block_c),
    )  # fmt: skip
    return counters


def _validate_ragged_support_cuda(
    token_ids: Tensor, row_offsets: Tensor, sampled_ids: Tensor, vocab_size: int
) -> Tensor:
    return validate_ragged_support_reference(token_ids, row_offsets, sampled_ids, vocab_size)


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::validate_routes",
    "(Tensor routes, Tensor? layers, int first_layer, int layer_step, SymInt num_layers,"
    " int num_experts) -> Tensor",
)
torch.library.impl("packhorse::validate_routes", "CPU", validate_routes_reference)
torch.library.impl("packhorse::validate_routes", "CUDA", _validate_routes_cuda)

torch.library.define(
    "packhorse::validate_support",
    "(Tensor support, Tensor sampled_ids, int vocab_size) -> Tensor",
)
torch.library.impl("packhorse::validate_support", "CPU", validate_support_reference)
torch.library.impl("packhorse::validate_support", "CUDA", _validate_support_cuda)

torch.library.define(
    "packhorse::validate_ragged_support",
    "(Tensor token_ids, Tensor row_offsets, Tensor sampled_ids, int vocab_size) -> Tensor",
)
torch.library.impl("packhorse::validate_ragged_support", "CPU", validate_ragged_support_reference)
torch.library.impl("packhorse::validate_ragged_support", "CUDA", _validate_ragged_support_cuda)


@torch.library.register_fake("packhorse::validate_routes")
def _validate_routes_fake(
    routes, layers, first_layer, layer_step, num_layers, num_experts
) -> Tensor:
    return routes.new_empty((2, len(ROUTE_FAULTS)), dtype=torch.int64)


@torch.library.register_fake("packhorse::validate_support")
def _validate_support_fake(support, sampled_ids, vocab_size) -> Tensor:
    return support.new_empty((2, len(SUPPORT_FAULTS)), dtype=torch.int64)


@torch.library.register_fake("packhorse::validate_ragged_support")
def _validate_ragged_support_fake(token_ids, row_offsets, sampled_ids, vocab_size) -> Tensor:
    return token_ids.new_empty((2, len(SUPPORT_FAULTS)), dtype=torch.int64)


_ops = torch.ops.packhorse
_validate_routes_op = called_directly(_ops.validate_routes.default, _validate_routes_cuda)
_validate_support_op = called_directly(_ops.validate_support.default, _validate_support_cuda)
_validate_ragged_support_op = called_directly(
    _ops.validate_ragged_support.default, _validate_ragged_support_cuda
)


# --- public API -----------------------------------------------------------------------------------


@ranged
def validate_routes(
    routes: Tensor,
    *,
    num_experts: int,
    layers: range | Sequence[int] | Tensor | None = None,
) -> RouteCheck:
    """Find routes that no router can replay, without waiting for the device.

    Args:
        routes: [N, L, K] uint8, int16 or int32, CPU or CUDA: packed captured routes.
        num_experts: E, from 1 to 2**31 - 1.
        layers: captured layers that have experts, as ``gather_routes`` takes them; the others,
            which are zeros by contract, are not read. By default all.

    Returns:
        ``RouteCheck``. Its ``read`` and ``raise_if_any`` wait for the device; the call does not.

    Raises:
        TypeError: a dtype is unsupported, or ``num_experts`` is no int.
        ValueError: a shape or a layer is wrong, or ``num_experts`` is out of its range. A table of
            layers on a GPU is not read; ``PACKHORSE_CHECK=1`` checks it there.

    Source: vLLM's ``routed_experts``. Megatron's dispatcher counts tokens x topk, so a repeated
    expert breaks its split sizes, and -1 aborts the process.

    Example:
        >>> routes = torch.tensor([[[0, 3]], [[2, 2]]], dtype=torch.uint8)
        >>> validate_routes(routes, num_experts=4).read()
        {'repeated': RouteFault(num_cells=1, row=1, layer=0)}
    """
    name = "validate_routes"
    check_tensors(name, routes=routes)
    if routes.dtype not in ROUTE_DTYPES:
        raise TypeError(f"{name}: routes must be uint8, int16 or int32, got {routes.dtype}")
    if routes.dim() != 3:
        raise ValueError(f"{name}: routes must be [N, L, K], got {tuple(routes.shape)}")
    _check_bound(name, "num_experts", num_experts)
    captured = routes.shape[1]
    if layers is None:
        layers = range(captured)
    table, first_layer, layer_step, num_layers = resolve_layers(name, layers, routes)
    if table is not None and checks_values(table):
        listed = (table >= 0) & (table < captured)
        check_values(listed.all(), f"{name}: a layer is outside {interval(0, captured)}")
    counters = _validate_routes_op(routes, table, first_layer, layer_step, num_layers, num_experts)
    return RouteCheck(counters[0], counters[1], captured)


@ranged
def validate_support(support: Tensor, sampled_ids: Tensor, *, vocab_size: int) -> SupportCheck:
    """Find support rows that cannot score their sampled id, without waiting for the device.

    Args:
        support: [N, C] int32, CPU or CUDA: the ids that the sampler kept at each response token,
            then -1. Rows that ascend, as vLLM's ``sampling_mask`` has them, are settled by reading
            them; others cost C compares an id up to C = 128, and a sort beyond.
        sampled_ids: [N] int64 or int32 on ``support.device``: the response tokens. Not looked at
            where the row is empty: such a token was not sampled.
        vocab_size: V, from 1 to 2**31 - 1.

    Returns:
        ``SupportCheck``. Its ``read`` and ``raise_if_any`` wait for the device; the call does not.

    Raises:
        TypeError: a dtype is wrong, or ``vocab_size`` is no int.
        ValueError: a shape or device is wrong, or ``vocab_size`` is out of its range.

    Source: vLLM's ``sampling_mask``, packed by ``pack_support``.

    Example:
        >>> support = torch.tensor([[3, 7], [5, -1], [-1, -1]], dtype=torch.int32)
        >>> validate_support(support, torch.tensor([7, 6, 0]), vocab_size=8).read()
        {'sampled_missing': SupportFault(num_rows=1, row=1)}
    """
    name = "validate_support"
    check_tensors(name, support=support, sampled_ids=sampled_ids)
    if support.dtype != torch.int32:
        raise TypeError(f"{name}: support must be int32, got {support.dtype}")
    if support.dim() != 2:
        raise ValueError(f"{name}: support must be [N, C], got {tuple(support.shape)}")
    _check_sampled(name, sampled_ids, "support", support, support.shape[0])
    _check_bound(name, "vocab_size", vocab_size)
    return SupportCheck(*_validate_support_op(support, sampled_ids, vocab_size))


@ranged
def validate_ragged_support(
    token_ids: Tensor, row_offsets: Tensor, sampled_ids: Tensor, *, vocab_size: int
) -> SupportCheck:
    """As ``validate_support``, of rows of different widths.

    Args:
        token_ids: [total ids] int32, contiguous, CPU or CUDA: the ids of all rows, one row after
            another. There is no -1: it is out of range.
        row_offsets: [N + 1] int64, contiguous, on ``token_ids.device``, as
            ``gather_ragged_support`` takes them.
        sampled_ids: [N] int64 or int32 on ``token_ids.device``.
        vocab_size: V, from 1 to 2**31 - 1.

    Returns:
        ``SupportCheck``, whose "not_compacted" is never found. One sort of all ids, whatever their
        order and the widths: about 40 bytes an id of memory for its time.

    Raises:
        As ``validate_support``; ValueError on the CPU where the offsets do not rise from 0 to the
        total.
    """
    name = "validate_ragged_support"
    check_ragged_rows(name, token_ids, row_offsets)
    _check_sampled(name, sampled_ids, "token_ids", token_ids, row_offsets.shape[0] - 1)
    _check_bound(name, "vocab_size", vocab_size)
    counters = _validate_ragged_support_op(token_ids, row_offsets, sampled_ids, vocab_size)
    return SupportCheck(*counters)


# --- validation -----------------------------------------------------------------------------------


def _check_bound(name: str, field: str, bound: int) -> None:
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise TypeError(f"{name}: {field} must be an int, got {type(bound).__name__}")
    if not 1 <= bound < 2**31:
        raise ValueError(f"{name}: {field} must be from 1 to 2**31 - 1, got {bound}")


def _check_sampled(name: str, sampled_ids: Tensor, field: str, ids: Tensor, num_rows: int) -> None:
    if sampled_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: sampled_ids must be int64 or int32, got {sampled_ids.dtype}")
    if sampled_ids.dim() != 1 or sampled_ids.shape[0] != num_rows:
        raise ValueError(
            f"{name}: sampled_ids must be [N] with N = {num_rows}, got {tuple(sampled_ids.shape)}"
        )
    if sampled_ids.device != ids.device:
        raise ValueError(f"{name}: sampled_ids on {sampled_ids.device}, {field} on {ids.device}")
