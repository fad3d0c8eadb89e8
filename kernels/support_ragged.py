"""Score the sampled ids over supports of different widths, from logits: no row is padded.

    logits[m]                                = logits[token of m, column[m] - vocab_start]
    grad logits[token of m, column[m] - ...] = gradient of m's logit, 0 elsewhere

The same scores as ``support_logprobs`` of rows padded to the widest, while supports, members and
their gradients stay in the packed cells: a row of 3,700 ids among 64k rows of two costs its own
cells and no more. Rows of a like width are scored together (``ragged_plan.py``); logits are read
and written where the model has them, whatever row they are of. Each member's gradient has a place
of its own, so two backwards agree bit for bit.

Sizes: T tokens, N rows, M cells (ids of all rows), V vocabulary columns of this rank. Contract: a
column that names no column of this shard is never read through; of the cells of a row each is its
token's.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.members import gradient_of_cells, wide_dtype
from packhorse.kernels.ragged_members import grad_cells_reference
from packhorse.kernels.ragged_plan import Plan, check_ragged
from packhorse.kernels.support import (
    Shard,
    SupportScores,
    all_zero,
    as_operand,
    check_logits,
    wants_gradients,
)

_NAME: Final = "ragged_support_logprobs"

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def _places(
    num_columns: int, columns: Tensor, cell_tokens: Tensor, vocab_start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token and column of each cell, 0 where it is no member of this shard, and where it is."""
    local = columns.long() - vocab_start
    here = (columns >= 0) & (cell_tokens >= 0) & (local >= 0) & (local < num_columns)
    return torch.where(here, cell_tokens.long(), 0), torch.where(here, local, 0), here


def read_cell_logits_reference(
    logits: Tensor,  # [T, V]
    columns: Tensor,  # [M] int32
    cell_tokens: Tensor,  # [M] int32
    vocab_start: int,  # id of the first column
) -> Tensor:
    """[1, M] float32 (float64) logits: 0 where the cell is no member of this shard."""
    wide = wide_dtype(logits)
    if logits.shape[0] == 0:
        return logits.new_zeros((1, columns.shape[0]), dtype=wide)
    tokens, local, here = _places(logits.shape[1], columns, cell_tokens, vocab_start)
    return torch.where(here, logits[tokens, local].to(wide), 0.0)[None]


def put_cell_grads_reference(
    out: Tensor,  # [T, V], 0 where members stand; written in place
    grad_logprobs: Tensor,  # [T]
    grad_entropy: Tensor,  # [T]
    columns: Tensor,  # [M] int32
    cell_tokens: Tensor,  # [M] int32
    member_logprobs: Tensor,  # [M]
    entropy: Tensor,  # [T]
    sampled_ids: Tensor,  # [T] int64
    vocab_start: int,
    temperature: float,
    temperatures: Tensor | None = None,
) -> None:
    if out.shape[0] == 0 or columns.shape[0] == 0:
        return
    grads = grad_cells_reference(
        grad_logprobs, grad_entropy, columns, cell_tokens, member_logprobs, entropy, sampled_ids,
        temperature, temperatures,
    )  # fmt: skip
    tokens, local, here = _places(out.shape[1], columns, cell_tokens, vocab_start)
    # cells that are no member add 0 to some place, whatever the order
    grads = torch.where(here, grads, 0.0).to(out.dtype)
    out.index_put_((tokens, local), grads, accumulate=True)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(
    repr=kernel_name("read_cell_logits", "logits_ptr"),
    do_not_specialize=[
        "num_cells", "num_columns", "vocab_start", "stride_token", "stride_column",
    ],
)  # fmt: skip
def _read_cell_logits_kernel(
    logits_ptr,  # [T, V]
    columns_ptr,  # [M] int32
    cell_tokens_ptr,  # [M] int32
    members_ptr,  # [M] float32
    num_cells,  # M
    num_columns,  # V
    vocab_start,
    stride_token,
    stride_column,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(cell_tokens_ptr + cell, mask=cell < num_cells, other=-1)
    column = tl.load(columns_ptr + cell, mask=cell < num_cells, other=-1)
    here = (token >= 0) & (column >= vocab_start) & (column - vocab_start < num_columns)
    local = (column - vocab_start).to(tl.int64)
    source = token.to(tl.int64) * stride_token + local * stride_column
    z = tl.load(logits_ptr + source, mask=here, other=0.0).to(tl.float32)
    tl.store(members_ptr + cell, z, mask=cell < num_cells)


@triton.jit(
    repr=kernel_name("put_cell_grads", "out_ptr"),
    do_not_specialize=[
        "num_cells", "num_columns", "vocab_start", "stride_token", "stride_column", "temperature",
    ],
)  # fmt: skip
def _put_cell_grads_kernel(
    out_ptr,  # [T, V]
    grad_logprobs_ptr,  # [T] float32
    grad_entropy_ptr,  # [T] float32
    columns_ptr,  # [M] int32
    cell_tokens_ptr,  # [M] int32
    members_ptr,  # [M] float32
    entropy_ptr,  # [T] float32
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    num_cells,  # M
    num_columns,  # V
    vocab_start,
    stride_token,
    stride_column,
    temperature,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(cell_tokens_ptr + cell, mask=cell < num_cells, other=-1)
    grad, column, live = gradient_of_cells(
        cell, token >= 0, token, grad_logprobs_ptr, grad_entropy_ptr, columns_ptr, members_ptr,
        entropy_ptr, sampled_ptr, temperatures_ptr, temperature,
    )  # fmt: skip
    here = live & (column >= vocab_start) & (column - vocab_start < num_columns)
    local = (column - vocab_start).to(tl.int64)
    place = token.to(tl.int64) * stride_token + local * stride_column
    tl.store(out_ptr + place, grad.to(out_ptr.dtype.element_ty), mask=here)


_launch_read_cell_logits = Launcher(_read_cell_logits_kernel)
_launch_put_cell_grads = Launcher(_put_cell_grads_kernel)
_BLOCK = 256


def _read_cell_logits_cuda(
    logits: Tensor, columns: Tensor, cell_tokens: Tensor, vocab_start: int
) -> Tensor:
    num_cells = columns.shape[0]
    if logits.dtype == torch.float64 or num_cells == 0:
        return read_cell_logits_reference(logits, columns, cell_tokens, vocab_start)
    members = logits.new_empty((1, num_cells), dtype=torch.float32)
    _launch_read_cell_logits(
        (-(-num_cells // _BLOCK),),
        (
            logits, columns.contiguous(), cell_tokens.contiguous(), members, num_cells,
            logits.shape[1], vocab_start, logits.stride(0), logits.stride(1),
        ),
        (_BLOCK,),
        2,
    )  # fmt: skip
    return members


def _put_cell_grads_cuda(
    out: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor, columns: Tensor, cell_tokens: Tensor,
    member_logprobs: Tensor, entropy: Tensor, sampled_ids: Tensor, vocab_start: int,
    temperature: float, temperatures: Tensor | None = None,
) -> None:  # fmt: skip
    arguments = (
        grad_logprobs, grad_entropy, columns, cell_tokens, member_logprobs, entropy, sampled_ids,
    )  # fmt: skip
    num_cells = columns.shape[0]
    if member_logprobs.dtype == torch.float64 or num_cells == 0:
        put_cell_grads_reference(out, *arguments, vocab_start, temperature, temperatures)
        return
    _launch_put_cell_grads(
        (-(-num_cells // _BLOCK),),
        (
            out, *(argument.contiguous() for argument in arguments), temperatures, num_cells,
            out.shape[1], vocab_start, out.stride(0), out.stride(1), temperature,
        ),
        (_BLOCK,),
        2,
    )  # fmt: skip


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::read_cell_logits",
    "(Tensor logits, Tensor columns, Tensor cell_tokens, SymInt vocab_start) -> Tensor",
)
torch.library.impl("packhorse::read_cell_logits", "CPU", read_cell_logits_reference)
torch.library.impl("packhorse::read_cell_logits", "CUDA", _read_cell_logits_cuda)

torch.library.define(
    "packhorse::put_cell_grads",
    "(Tensor(a!) out, Tensor grad_logprobs, Tensor grad_entropy, Tensor columns,"
    " Tensor cell_tokens, Tensor member_logprobs, Tensor entropy, Tensor sampled_ids,"
    " SymInt vocab_start, float temperature, Tensor? temperatures=None) -> ()",
)
torch.library.impl("packhorse::put_cell_grads", "CPU", put_cell_grads_reference)
torch.library.impl("packhorse::put_cell_grads", "CUDA", _put_cell_grads_cuda)


@torch.library.register_fake("packhorse::read_cell_logits")
def _read_cell_logits_fake(logits, columns, _cell_tokens, _vocab_start) -> Tensor:
    wide = wide_dtype(logits)
    return logits.new_empty((1, columns.shape[0]), dtype=wide)


@torch.library.register_fake("packhorse::put_cell_grads")
def _put_cell_grads_fake(*_) -> None:
    return None


_ops = torch.ops.packhorse
read_cell_logits = called_directly(_ops.read_cell_logits.default, _read_cell_logits_cuda)
put_cell_grads = called_directly(_ops.put_cell_grads.default, _put_cell_grads_cuda)


# --- autograd: a closed form, which keeps [M] and nothing of size V -------------------------------


def _score(
    logits: Tensor,
    token_ids: Tensor,
    sampled_ids: Tensor,
    temperature: float,
    vocab_size: int | None,
    shard: Shard | None,
    plan: Plan,
) -> tuple[SupportScores, tuple[Tensor, Tensor, Tensor]]:
    """The scores, and for the backward columns, cell_tokens and member_logprobs [M]."""
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    columns, cell_tokens = plan.order(token_ids, vocab_size)
    members = read_cell_logits(logits, columns, cell_tokens, _start_of(shard))
    if shard is not None:
        dist.all_reduce(members, group=shard.group)
    operand = as_operand(temperature, sampled_ids, members.dtype)
    scores, member_logprobs = plan.score(members, columns, sampled_ids, *operand)
    return scores, (columns, cell_tokens, member_logprobs)


def _start_of(shard: Shard | None) -> int:
    return 0 if shard is None else shard.start


class _RaggedSupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, token_ids, sampled_ids, temperature, vocab_size, shard, plan, overwrite
    ):
        scores, kept = _score(logits, token_ids, sampled_ids, temperature, vocab_size, shard, plan)
        overwritten = (logits,) if overwrite else ()
        ctx.save_for_backward(sampled_ids, scores.entropy, *kept, *overwritten)
        ctx.temperature, ctx.start, ctx.dtype = temperature, _start_of(shard), logits.dtype
        ctx.num_columns = logits.shape[1]
        ctx.mark_non_differentiable(scores.status, scores.num_ignored)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_status, _grad_num_ignored):
        sampled_ids, entropy, columns, cell_tokens, members, *overwritten = ctx.saved_tensors
        if overwritten:
            out = all_zero(overwritten[0].detach())
        else:
            shape = sampled_ids.shape[0], ctx.num_columns
            out = all_zero(entropy.new_empty(shape, dtype=ctx.dtype))
        put_cell_grads(
            out, grad_logprobs, grad_entropy, columns, cell_tokens, members, entropy, sampled_ids,
            ctx.start, *as_operand(ctx.temperature, entropy),
        )  # fmt: skip
        return out, *(None,) * 7


# --- public API -----------------------------------------------------------------------------------


@ranged
def ragged_support_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    row_offsets: Tensor,
    row_ids: Tensor,
    sampled_ids: Tensor,
    *,
    widths: Sequence[int] | np.ndarray,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    group: Any = None,
    overwrite_logits: bool = False,
) -> SupportScores:
    """Logprob of each sampled id, and the entropy, over supports of different widths, from logits.

    Args:
        logits, sampled_ids: as of ``support_logprobs``.
        token_ids, row_offsets: the supports, as of ``gather_ragged_support``.
        row_ids: [T] int64 on ``logits.device``: the row of each token, -1: it has none. A row is
            named once at most.
        widths: [N] host integers, ids of each row; believed.
        temperature, vocab_size, vocab_start, group, overwrite_logits: as of ``support_logprobs``.
            Over shards one all-reduce of a logit a cell.

    Returns:
        ``SupportScores`` [T] as of ``support_logprobs``. Beyond the gradient of the logits, memory
        is a few numbers a cell; of rows of more than 4,096 ids, a few dozen. Not for a CUDA graph:
        which rows are scored together is host data.

    Raises:
        As ``support_logprobs`` and ``gather_ragged_support``; ValueError where ``widths`` are not
        of N rows, negative or wider together than ``token_ids``.

    Source: vLLM's ``sampling_mask`` is such ids and counts.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).expand(2, 4)
        >>> token_ids = torch.tensor([3, 2, 1], dtype=torch.int32)
        >>> ragged_support_logprobs(
        ...     logits, token_ids, torch.tensor([0, 1, 3]), torch.tensor([1, 0]),
        ...     torch.tensor([2, 3]), widths=[1, 2],
        ... ).logprobs
        tensor([-0.3133,  0.0000])
    """  # fmt: skip
    temperature, vocab_size, shard = check_logits(
        _NAME, logits, sampled_ids, temperature, vocab_size, vocab_start, group, overwrite_logits
    )
    plan = check_ragged(_NAME, "logits", logits, token_ids, row_offsets, row_ids, widths)
    sampled_ids = sampled_ids.contiguous()
    arguments = logits, token_ids, sampled_ids, temperature, vocab_size, shard, plan
    if wants_gradients(logits):
        return SupportScores(*_RaggedSupportLogprobs.apply(*arguments, overwrite_logits))
    return _score(*arguments)[0]
