"""Members of ragged support rows, where they are packed: order, scores, gradients of their logits.

    order_cells   the ids of each row -> its distinct ids in [0, V) in ascending order
    score_cells   [S, M] logits       -> logprob of the sampled id, entropy, every member's logprob
    grad_cells    gradients of both   -> gradient of each member's logit

What ``members.py`` does for rows of one width; the statuses are those named there. A cell is one id
of the packed ids, so no row is padded. Ordering and scoring take rows of a like width at a time, a
class: ``Rows`` names rows among which are all of it, and of these the ones with 1 to ``width``
cells are taken. The rest goes over cells, whatever row they are of.

Rows of a class of up to 1,024 ids are sorted, each by a program's share. In wider ones an id's
place is how many ids there are before it, counted by a program for a few ids at a time: no row is
one program's alone. Rows of more than 4,096 ids are scored by torch, padded to the widest of them.

Sizes: T tokens, N rows, M cells, R rows of a class, each of at most C ids, V vocabulary. Contract:
each row is named by one token at most; cells of rows that no token names are no members.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.members import (
    MAX_SORTED,
    SUPPORT_INVALID,
    SUPPORT_MISSING,
    SUPPORT_OK,
    grad_members_reference,
    gradient_of_cells,
    ordered_ids,
    row_tile,
    score_members_reference,
    scored_tile,
    sum_parts,
)
from packhorse.packed.sentinels import NO_CANDIDATE

#: column of a cell whose id is outside the vocabulary, or stood in its row before
IGNORED: Final = -2


class Rows(NamedTuple):
    """Some rows of a ragged support, one entry each."""

    tokens: Tensor  # [R] int64: the slot that names the row, -1: none
    begins: Tensor  # [R] int64: its first cell
    counts: Tensor  # [R] int64: how many cells it has

    def part(self, some: slice) -> "Rows":
        return Rows(self.tokens[some], self.begins[some], self.counts[some])


# --- reference: the specification, and what CPU tensors run ---------------------------------------


def cells_of(rows: Rows, width: int) -> tuple[Tensor, Tensor]:
    """[R, C] int64 cells, 0 after a row's last, and whether the entry is one of its row's: none is
    of a row of more than C cells."""
    c = torch.arange(width, device=rows.begins.device)
    inside = (c < rows.counts[:, None]) & (rows.counts <= width)[:, None]
    return torch.where(inside, rows.begins[:, None] + c, 0), inside


def put_entries(out: Tensor, places: Tensor, wanted: Tensor, values: Tensor) -> None:
    """``out[places[wanted]] = values[wanted]``, without reading on the host how many there are."""
    longer = torch.cat([out, out.new_zeros((1, *out.shape[1:]))])
    longer[torch.where(wanted, places, out.shape[0])] = values.to(out.dtype)
    out.copy_(longer[:-1])


def order_cells_reference(
    columns: Tensor,  # [M] int32, written in place at the rows' cells
    cell_tokens: Tensor,  # [M] int32, likewise: the token that names the cell's row, -1: none
    token_ids: Tensor,  # [M] int32
    tokens: Tensor,  # [R] int64, as of Rows
    begins: Tensor,
    counts: Tensor,
    width: int,  # C: rows of more cells are left
    vocab_size: int,
) -> None:
    """A column is the id, ``NO_CANDIDATE`` where there is none, ``IGNORED`` where it is no member.
    Cells of a row that no token names are all ``NO_CANDIDATE``."""
    rows = Rows(tokens, begins, counts)
    cells, inside = cells_of(rows, width)
    if cells.numel() == 0 or columns.shape[0] == 0:
        return
    last = torch.iinfo(torch.int64).max
    ids = torch.where(inside, token_ids[cells].long(), last).sort(dim=1).values
    again = torch.zeros_like(inside)
    again[:, 1:] = ids[:, 1:] == ids[:, :-1]
    member = ~again & (ids >= 0) & (ids < vocab_size)
    column = torch.where(member, ids, torch.where(ids == NO_CANDIDATE, NO_CANDIDATE, IGNORED))
    column = torch.where(tokens[:, None] >= 0, column, NO_CANDIDATE)
    put_entries(columns, cells, inside, column)
    put_entries(cell_tokens, cells, inside, tokens[:, None].expand_as(cells))


def score_cells_reference(
    logprobs: Tensor,  # [T] float32, float64 for float64 logits; this and the next three are
    entropy: Tensor,  # [T]                                       written where a row has a token
    status: Tensor,  # [T] uint8
    num_ignored: Tensor,  # [T] int32
    member_logprobs: Tensor,  # [M], written at the rows' cells: -inf where there is no score
    logits: Tensor,  # [S, M], not yet divided by the temperature
    columns: Tensor,  # [M] int32 of ``order_cells``
    sampled_ids: Tensor,  # [T] int64
    tokens: Tensor,  # [R] int64, as of Rows
    begins: Tensor,
    counts: Tensor,
    width: int,
    temperature: float,
    temperatures: Tensor | None = None,  # [T], in place of it
) -> None:
    rows = Rows(tokens, begins, counts)
    cells, inside = cells_of(rows, width)
    if cells.numel() == 0 or columns.shape[0] == 0:
        return
    if sampled_ids.shape[0] == 0:  # no token, and so no row that one names
        none = torch.full_like(cells, -float("inf"), dtype=logits.dtype)
        put_entries(member_logprobs, cells, inside, none)
        return
    column = torch.where(inside, columns[cells], NO_CANDIDATE)
    known = torch.full_like(tokens, SUPPORT_OK, dtype=torch.uint8)
    known = known.masked_fill(~(column >= 0).any(1), SUPPORT_INVALID)
    known = known.masked_fill(~(column != NO_CANDIDATE).any(1), SUPPORT_MISSING)
    slots, named = tokens.clamp(min=0), (tokens >= 0) & inside.any(1)
    scored = score_members_reference(
        sum_parts(logits)[cells][None],
        column.clamp(min=NO_CANDIDATE),
        known,
        torch.where(named, sampled_ids[slots], -1),
        temperature,
        None if temperatures is None else temperatures[slots],
    )
    for out, values in zip((logprobs, entropy, status), scored[:3], strict=True):
        put_entries(out, slots, named, values)
    put_entries(num_ignored, slots, named, (column == IGNORED).sum(1))
    put_entries(member_logprobs, cells, inside, scored[3])


def grad_cells_reference(
    grad_logprobs: Tensor,  # [T]
    grad_entropy: Tensor,  # [T]
    columns: Tensor,  # [M] int32
    cell_tokens: Tensor,  # [M] int32
    member_logprobs: Tensor,  # [M]
    entropy: Tensor,  # [T]
    sampled_ids: Tensor,  # [T] int64
    temperature: float,
    temperatures: Tensor | None = None,
) -> Tensor:
    """[M] gradient of each logit, exactly 0 where ``member_logprobs`` is -inf."""
    if grad_logprobs.shape[0] == 0 or columns.shape[0] == 0:
        return torch.zeros_like(member_logprobs)
    slots = cell_tokens.long().clamp(min=0)
    g, e, h = grad_logprobs[slots], grad_entropy[slots], entropy[slots]
    scales = None if temperatures is None else temperatures[slots]
    grads = grad_members_reference(
        g, e, columns[:, None], member_logprobs[:, None], h, sampled_ids[slots], temperature, scales
    )
    return grads.squeeze(1)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def _row_bounds(begins_ptr, counts_ptr, r, num_rows, num_cells, width):
    """First cell and number of cells of each row, 0 where the row is not of the class."""
    begin = tl.load(begins_ptr + r, mask=r < num_rows, other=0)
    count = tl.load(counts_ptr + r, mask=r < num_rows, other=0)
    count = tl.where((count > width) | (begin < 0) | (begin + count > num_cells), 0, count)
    return begin, count.to(tl.int32)


@triton.jit(
    repr=kernel_name("order_cells", "BLOCK_C"),
    do_not_specialize=["num_rows", "num_cells", "width", "vocab_size"],
)
def _order_cells_kernel(
    columns_ptr,  # [M] int32
    cell_tokens_ptr,  # [M] int32
    ids_ptr,  # [M] int32
    tokens_ptr,  # [R] int64
    begins_ptr,  # [R] int64
    counts_ptr,  # [R] int64
    num_rows,  # R
    num_cells,  # M
    width,  # C
    vocab_size,  # V
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= C
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin, count = _row_bounds(begins_ptr, counts_ptr, r, num_rows, num_cells, width)
    token = tl.load(tokens_ptr + r, mask=r < num_rows, other=-1)
    c = tl.arange(0, BLOCK_C)
    cells = begin[:, None] + c[None, :]
    ids, member, _, _ = ordered_ids(
        ids_ptr, cells, c[None, :] < count[:, None], c, vocab_size, BLOCK_C
    )
    # what is not of the row was sorted to the front
    pads = (BLOCK_C - count)[:, None]
    written = c[None, :] >= pads
    column = tl.where(member, ids, tl.where(ids == -1, -1, -2))
    column = tl.where((token >= 0)[:, None], column, -1)
    tl.store(columns_ptr + (cells - pads), column, mask=written)
    owner = token.to(tl.int32)[:, None] + tl.zeros_like(ids)
    tl.store(cell_tokens_ptr + (cells - pads), owner, mask=written)


@triton.jit(
    repr=kernel_name("place_cells", "BLOCK_I"),
    do_not_specialize=["num_rows", "num_cells", "width", "vocab_size"],
)
def _place_cells_kernel(
    columns_ptr,  # [M] int32
    cell_tokens_ptr,  # [M] int32
    ids_ptr,  # [M] int32
    tokens_ptr,  # [R] int64
    begins_ptr,  # [R] int64
    counts_ptr,  # [R] int64
    num_rows,  # R
    num_cells,  # M
    width,  # C
    vocab_size,  # V
    BLOCK_I: tl.constexpr,  # cells of a row that a program places
    BLOCK_J: tl.constexpr,  # that it compares them with at once
):
    num_blocks = tl.cdiv(width, BLOCK_I)
    r = tl.program_id(0) // num_blocks
    first_i = (tl.program_id(0) - r * num_blocks) * BLOCK_I
    begin, count = _row_bounds(begins_ptr, counts_ptr, r, num_rows, num_cells, width)
    i = first_i + tl.arange(0, BLOCK_I)
    if first_i < count:
        ids = tl.load(ids_ptr + begin + i, mask=i < count, other=0)
        before = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
        again = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
        for first in range(0, count, BLOCK_J):
            j = first + tl.arange(0, BLOCK_J)
            others = tl.load(ids_ptr + begin + j, mask=j < count, other=0)
            known = (j < count)[None, :]
            same = known & (others[None, :] == ids[:, None]) & (j[None, :] < i[:, None])
            less = known & (others[None, :] < ids[:, None])
            before += (less | same).to(tl.int32)
            again += same.to(tl.int32)
        token = tl.load(tokens_ptr + r)
        is_first = tl.sum(again, axis=1) == 0
        member = is_first & (ids >= 0) & (ids < vocab_size)
        column = tl.where(member, ids, tl.where(ids == -1, -1, -2))
        cells = begin + tl.sum(before, axis=1)
        tl.store(columns_ptr + cells, tl.where(token >= 0, column, -1), mask=i < count)
        tl.store(cell_tokens_ptr + cells, token.to(tl.int32), mask=i < count)


@triton.jit(
    repr=kernel_name("score_cells", "BLOCK_C"),
    do_not_specialize=["num_parts", "num_rows", "num_cells", "width", "temperature"],
)
def _score_cells_kernel(
    logprobs_ptr,  # [T] float32
    entropy_ptr,  # [T] float32
    status_ptr,  # [T] uint8
    ignored_ptr,  # [T] int32
    members_ptr,  # [M] float32
    logits_ptr,  # [S, M] float32
    columns_ptr,  # [M] int32
    sampled_ptr,  # [T] int64
    tokens_ptr,  # [R] int64
    begins_ptr,  # [R] int64
    counts_ptr,  # [R] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    num_parts,  # S
    num_rows,  # R
    num_cells,  # M
    width,  # C
    temperature,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= C
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(tokens_ptr + r, mask=r < num_rows, other=-1)
    begin, count = _row_bounds(begins_ptr, counts_ptr, r, num_rows, num_cells, width)
    named = (token >= 0) & (count > 0)
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = c < count[:, None]
    cells = begin[:, None] + c
    columns = tl.load(columns_ptr + cells, mask=inside, other=-1)
    z = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    first = tl.zeros([], tl.int64)  # cell of the part
    for _ in range(0, num_parts):
        z += tl.load(logits_ptr + (first + cells), mask=inside, other=0.0)
        first += num_cells
    num_named = tl.sum((columns != -1).to(tl.int32), axis=1)
    num_members = tl.sum((columns >= 0).to(tl.int32), axis=1)
    # 1: missing, 2: invalid
    known = tl.where(num_named == 0, 1, tl.where(num_members == 0, 2, 0))
    scale = temperature + tl.zeros([BLOCK_R], tl.float32)
    if temperatures_ptr is not None:
        scale = tl.load(temperatures_ptr + token, mask=named, other=1.0)
    sampled_id = tl.load(sampled_ptr + token, mask=named, other=-1)
    logprob, entropy, status, members = scored_tile(z, columns, known, sampled_id, scale)
    tl.store(logprobs_ptr + token, logprob, mask=named)
    tl.store(entropy_ptr + token, entropy, mask=named)
    tl.store(status_ptr + token, status.to(tl.uint8), mask=named)
    tl.store(ignored_ptr + token, num_named - num_members, mask=named)
    tl.store(members_ptr + cells, members, mask=inside)


@triton.jit(repr=kernel_name("grad_cells"), do_not_specialize=["num_cells", "temperature"])
def _grad_cells_kernel(
    grad_logprobs_ptr,  # [T] float32
    grad_entropy_ptr,  # [T] float32
    columns_ptr,  # [M] int32
    cell_tokens_ptr,  # [M] int32
    members_ptr,  # [M] float32
    entropy_ptr,  # [T] float32
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    grads_ptr,  # [M] float32
    num_cells,  # M
    temperature,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(cell_tokens_ptr + cell, mask=cell < num_cells, other=-1)
    grad, _, live = gradient_of_cells(
        cell, token >= 0, token, grad_logprobs_ptr, grad_entropy_ptr, columns_ptr, members_ptr,
        entropy_ptr, sampled_ptr, temperatures_ptr, temperature,
    )  # fmt: skip
    tl.store(grads_ptr + cell, tl.where(live, grad, 0.0), mask=cell < num_cells)


_launch_order_cells = Launcher(_order_cells_kernel)
_launch_place_cells = Launcher(_place_cells_kernel)
_launch_score_cells = Launcher(_score_cells_kernel)
_launch_grad_cells = Launcher(_grad_cells_kernel)

_BLOCK = 256
#: Wider rows are placed by counting: cells of a program, and what it compares them with at once.
_SORTED, _BLOCK_I, _BLOCK_J = 1024, 8, 128


def _order_cells_cuda(
    columns: Tensor, cell_tokens: Tensor, token_ids: Tensor, tokens: Tensor, begins: Tensor,
    counts: Tensor, width: int, vocab_size: int,
) -> None:  # fmt: skip
    num_rows = tokens.shape[0]
    if num_rows == 0 or width == 0 or token_ids.shape[0] == 0:
        return
    given = columns, cell_tokens, token_ids, tokens, begins, counts
    sizes = num_rows, token_ids.shape[0], width, vocab_size
    if width > _SORTED:
        _launch_place_cells(
            (num_rows * -(-width // _BLOCK_I),), (*given, *sizes), (_BLOCK_I, _BLOCK_J), 4
        )
        return
    num_warps, block_r, block_c = row_tile(width)
    _launch_order_cells((-(-num_rows // block_r),), (*given, *sizes), (block_r, block_c), num_warps)


def _score_cells_cuda(
    logprobs: Tensor, entropy: Tensor, status: Tensor, num_ignored: Tensor, member_logprobs: Tensor,
    logits: Tensor, columns: Tensor, sampled_ids: Tensor, tokens: Tensor, begins: Tensor,
    counts: Tensor, width: int, temperature: float, temperatures: Tensor | None = None,
) -> None:  # fmt: skip
    num_rows, num_cells = tokens.shape[0], columns.shape[0]
    if num_rows == 0 or width == 0 or num_cells == 0:
        return
    outputs = logprobs, entropy, status, num_ignored, member_logprobs
    if logits.dtype == torch.float64 or width > MAX_SORTED:
        score_cells_reference(
            *outputs, logits, columns, sampled_ids, tokens, begins, counts, width, temperature,
            temperatures,
        )  # fmt: skip
        return
    num_warps, block_r, block_c = row_tile(width)
    num_warps = max(num_warps, block_c // 256)  # which bounds of rows of their own need
    _launch_score_cells(
        (-(-num_rows // block_r),),
        (
            *outputs, logits.contiguous(), columns, sampled_ids.contiguous(), tokens, begins,
            counts, temperatures, logits.shape[0], num_rows, num_cells, width, temperature,
        ),
        (block_r, block_c),
        num_warps,
    )  # fmt: skip


def _grad_cells_cuda(
    grad_logprobs: Tensor, grad_entropy: Tensor, columns: Tensor, cell_tokens: Tensor,
    member_logprobs: Tensor, entropy: Tensor, sampled_ids: Tensor, temperature: float,
    temperatures: Tensor | None = None,
) -> Tensor:  # fmt: skip
    arguments = (
        grad_logprobs, grad_entropy, columns, cell_tokens, member_logprobs, entropy, sampled_ids,
    )  # fmt: skip
    if member_logprobs.dtype == torch.float64 or columns.numel() == 0:
        return grad_cells_reference(*arguments, temperature, temperatures)
    grads = torch.empty_like(member_logprobs)
    _launch_grad_cells(
        (-(-grads.shape[0] // _BLOCK),),
        (
            *(argument.contiguous() for argument in arguments), temperatures, grads,
            grads.shape[0], temperature,
        ),
        (_BLOCK,),
        2,
    )  # fmt: skip
    return grads


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::order_cells",
    "(Tensor(a!) columns, Tensor(b!) cell_tokens, Tensor token_ids, Tensor tokens, Tensor begins,"
    " Tensor counts, SymInt width, SymInt vocab_size) -> ()",
)
torch.library.impl("packhorse::order_cells", "CPU", order_cells_reference)
torch.library.impl("packhorse::order_cells", "CUDA", _order_cells_cuda)

torch.library.define(
    "packhorse::score_cells",
    "(Tensor(a!) logprobs, Tensor(b!) entropy, Tensor(c!) status, Tensor(d!) num_ignored,"
    " Tensor(e!) member_logprobs, Tensor logits, Tensor columns, Tensor sampled_ids, Tensor tokens,"
    " Tensor begins, Tensor counts, SymInt width, float temperature, Tensor? temperatures=None)"
    " -> ()",
)
torch.library.impl("packhorse::score_cells", "CPU", score_cells_reference)
torch.library.impl("packhorse::score_cells", "CUDA", _score_cells_cuda)

torch.library.define(
    "packhorse::grad_cells",
    "(Tensor grad_logprobs, Tensor grad_entropy, Tensor columns, Tensor cell_tokens,"
    " Tensor member_logprobs, Tensor entropy, Tensor sampled_ids, float temperature,"
    " Tensor? temperatures=None) -> Tensor",
)
torch.library.impl("packhorse::grad_cells", "CPU", grad_cells_reference)
torch.library.impl("packhorse::grad_cells", "CUDA", _grad_cells_cuda)


@torch.library.register_fake("packhorse::order_cells")
def _order_cells_fake(*_) -> None:
    return None


@torch.library.register_fake("packhorse::score_cells")
def _score_cells_fake(*_) -> None:
    return None


@torch.library.register_fake("packhorse::grad_cells")
def _grad_cells_fake(_grad_logprobs, _grad_entropy, _columns, _tokens, members, *_) -> Tensor:
    return torch.empty_like(members)


_ops = torch.ops.packhorse
order_cells = called_directly(_ops.order_cells.default, _order_cells_cuda)
score_cells = called_directly(_ops.score_cells.default, _score_cells_cuda)
grad_cells = called_directly(_ops.grad_cells.default, _grad_cells_cuda)
