"""Logits of members, read and written where the model has them: one launch each.

    score_logits      order_support, the logits of members, score_members    reads [T, V] at [T, C]
                      (supports may be [N, C], of which ``row_ids`` names the tokens' rows)
    put_logit_grads   out[t, column] = gradient of the member's logit        out [T, V], 0 before

What each is composed of is the specification (``members.py``) and what CPU tensors run. A sector of
32 bytes a member is what must be read of logits.

Sizes: T tokens, N rows, C candidates a row, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.members import (
    cells_of_rows,
    grad_members,
    gradient_of_cells,
    order_support,
    ordered_ids,
    row_tile,
    score_members,
    scored_tile,
    wide_dtype,
)

# --- reference: the specification, what CPU tensors run, and rows too wide for one launch ---------


def score_logits_reference(
    logits: Tensor,  # [T, V]
    support_ids: Tensor,  # [T, C], or with row ids [N, C]
    sampled_ids: Tensor,  # [T] int64
    vocab_size: int,
    temperature: float,
    temperatures: Tensor | None = None,
    row_ids: Tensor | None = None,  # [T] int64, as of ``order_support``
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns logprobs, entropy, status, num_ignored [T], columns and member_logprobs [T, C]."""
    columns, known, num_ignored = order_support(support_ids, vocab_size, row_ids)
    wide = wide_dtype(logits)
    # an entry that is no member reads some column, and its value is never selected
    members = logits.gather(1, columns.clamp(min=0).long()).to(wide)
    logprobs, entropy, status, member_logprobs = score_members(
        members[None], columns, known, sampled_ids, temperature, temperatures
    )
    return logprobs, entropy, status, num_ignored, columns, member_logprobs


def put_logit_grads_reference(
    out: Tensor,  # [T, V], 0 where members stand; written in place
    grad_logprobs: Tensor,  # [T]
    grad_entropy: Tensor,  # [T]
    columns: Tensor,  # [T, C] int32
    member_logprobs: Tensor,  # [T, C]
    entropy: Tensor,  # [T]
    sampled_ids: Tensor,  # [T] int64
    temperature: float,
    temperatures: Tensor | None = None,
) -> None:
    grads = grad_members(
        grad_logprobs, grad_entropy, columns, member_logprobs, entropy, sampled_ids, temperature,
        temperatures,
    )  # fmt: skip
    # entries that are no member add 0 to some column, whatever the order
    out.scatter_add_(1, columns.clamp(min=0).long(), grads.to(out.dtype))


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit(
    repr=kernel_name("score_logits", "logits_ptr", "BLOCK_C"),
    do_not_specialize=[
        "num_tokens", "width", "vocab_size", "stride_token", "stride_column", "temperature",
    ],
)  # fmt: skip
def _score_logits_kernel(
    logits_ptr,  # [T, V]
    ids_ptr,  # [T, C], or with row ids [N, C]
    row_ids_ptr,  # [T] int64, or None: row t is of token t
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    logprobs_ptr,  # [T] float32
    entropy_ptr,  # [T] float32
    status_ptr,  # [T] uint8
    ignored_ptr,  # [T] int32
    columns_ptr,  # [T, C] int32
    members_ptr,  # [T, C] float32
    num_tokens,  # T
    width,  # C
    vocab_size,  # V
    stride_token,
    stride_column,
    temperature,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= C
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = token < num_tokens
    c = tl.arange(0, BLOCK_C)
    cells = token.to(tl.int64)[:, None] * width + c[None, :]
    inside = in_batch[:, None] & (c < width)[None, :]
    rows, named = cells_of_rows(row_ids_ptr, token, in_batch, c, width)
    ids, member, num_named, num_members = ordered_ids(ids_ptr, rows, named, c, vocab_size, BLOCK_C)
    # pads were sorted to the front: to where ``score_members`` finds a row
    place = tl.minimum(c + (BLOCK_C - width), BLOCK_C - 1)[None, :] + tl.zeros_like(ids)
    columns = tl.gather(tl.where(member, ids, -1), place, 1)
    columns = tl.where(inside, columns, -1)
    source = token.to(tl.int64)[:, None] * stride_token + columns.to(tl.int64) * stride_column
    z = tl.load(logits_ptr + source, mask=columns >= 0, other=0.0).to(tl.float32)
    known = tl.where(num_named == 0, 1, tl.where(num_members == 0, 2, 0))
    scale = temperature + tl.zeros([BLOCK_T], tl.float32)
    if temperatures_ptr is not None:
        scale = tl.load(temperatures_ptr + token, mask=in_batch, other=1.0)
    sampled_id = tl.load(sampled_ptr + token, mask=in_batch, other=-1)
    logprob, entropy, status, members = scored_tile(z, columns, known, sampled_id, scale)
    tl.store(logprobs_ptr + token, logprob, mask=in_batch)
    tl.store(entropy_ptr + token, entropy, mask=in_batch)
    tl.store(status_ptr + token, status.to(tl.uint8), mask=in_batch)
    tl.store(ignored_ptr + token, num_named - num_members, mask=in_batch)
    tl.store(columns_ptr + cells, columns, mask=inside)
    tl.store(members_ptr + cells, members, mask=inside)


@triton.jit(
    repr=kernel_name("put_logit_grads", "out_ptr"),
    do_not_specialize=["num_cells", "width", "stride_token", "stride_column", "temperature"],
)
def _put_logit_grads_kernel(
    out_ptr,  # [T, V]
    grad_logprobs_ptr,  # [T] float32
    grad_entropy_ptr,  # [T] float32
    columns_ptr,  # [T, C] int32
    members_ptr,  # [T, C] float32
    entropy_ptr,  # [T] float32
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    num_cells,  # T * C
    width,  # C
    stride_token,
    stride_column,
    temperature,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < num_cells
    token = cell // width
    grad, column, live = gradient_of_cells(
        cell, inside, token, grad_logprobs_ptr, grad_entropy_ptr, columns_ptr, members_ptr,
        entropy_ptr, sampled_ptr, temperatures_ptr, temperature,
    )  # fmt: skip
    place = token * stride_token + column.to(tl.int64) * stride_column
    tl.store(out_ptr + place, grad.to(out_ptr.dtype.element_ty), mask=live & (column >= 0))


_launch_score_logits = Launcher(_score_logits_kernel)
_launch_put_logit_grads = Launcher(_put_logit_grads_kernel)
_BLOCK = 256
#: A wider row does not fit one launch's registers.
_WIDEST = 256
#: Entries of a program: half of what ``row_tile`` takes, as its loads miss the cache.
_TILE = 128


def _score_logits_cuda(
    logits: Tensor, support_ids: Tensor, sampled_ids: Tensor, vocab_size: int, temperature: float,
    temperatures: Tensor | None = None, row_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    num_tokens, width = logits.shape[0], support_ids.shape[1]
    if logits.dtype == torch.float64 or width > _WIDEST or num_tokens * width == 0:
        return score_logits_reference(
            logits, support_ids, sampled_ids, vocab_size, temperature, temperatures, row_ids
        )
    logprobs = logits.new_empty((num_tokens,), dtype=torch.float32)
    entropy = logits.new_empty((num_tokens,), dtype=torch.float32)
    status = support_ids.new_empty((num_tokens,), dtype=torch.uint8)
    ignored = support_ids.new_empty((num_tokens,), dtype=torch.int32)
    columns = support_ids.new_empty((num_tokens, width), dtype=torch.int32)
    members = logits.new_empty((num_tokens, width), dtype=torch.float32)
    num_warps, _, block_c = row_tile(width)
    block_t = min(max(_TILE // block_c, 1), 8)
    _launch_score_logits(
        (-(-num_tokens // block_t),),
        (
            logits, support_ids.contiguous(), None if row_ids is None else row_ids.contiguous(),
            sampled_ids.contiguous(), temperatures, logprobs, entropy, status, ignored, columns,
            members, num_tokens, width, vocab_size, logits.stride(0), logits.stride(1), temperature,
        ),
        (block_t, block_c),
        num_warps,
    )  # fmt: skip
    return logprobs, entropy, status, ignored, columns, members


def _put_logit_grads_cuda(
    out: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor, columns: Tensor,
    member_logprobs: Tensor, entropy: Tensor, sampled_ids: Tensor, temperature: float,
    temperatures: Tensor | None = None,
) -> None:  # fmt: skip
    arguments = grad_logprobs, grad_entropy, columns, member_logprobs, entropy, sampled_ids
    if member_logprobs.dtype == torch.float64 or columns.numel() == 0:
        put_logit_grads_reference(out, *arguments, temperature, temperatures)
        return
    _launch_put_logit_grads(
        (-(-columns.numel() // _BLOCK),),
        (
            out, *(argument.contiguous() for argument in arguments), temperatures, columns.numel(),
            columns.shape[1], out.stride(0), out.stride(1), temperature,
        ),
        (_BLOCK,),
        2,
    )  # fmt: skip


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::score_logits",
    "(Tensor logits, Tensor support_ids, Tensor sampled_ids, SymInt vocab_size, float temperature,"
    " Tensor? temperatures=None, Tensor? row_ids=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("packhorse::score_logits", "CPU", score_logits_reference)
torch.library.impl("packhorse::score_logits", "CUDA", _score_logits_cuda)

torch.library.define(
    "packhorse::put_logit_grads",
    "(Tensor(a!) out, Tensor grad_logprobs, Tensor grad_entropy, Tensor columns,"
    " Tensor member_logprobs, Tensor entropy, Tensor sampled_ids, float temperature,"
    " Tensor? temperatures=None) -> ()",
)
torch.library.impl("packhorse::put_logit_grads", "CPU", put_logit_grads_reference)
torch.library.impl("packhorse::put_logit_grads", "CUDA", _put_logit_grads_cuda)


@torch.library.register_fake("packhorse::score_logits")
def _score_logits_fake(logits, support_ids, *_) -> tuple[Tensor, ...]:
    num_tokens = logits.shape[0]
    wide = wide_dtype(logits)
    row = logits.new_empty((num_tokens,), dtype=wide)
    cells = num_tokens, support_ids.shape[1]
    return (
        row,
        row.clone(),
        support_ids.new_empty((num_tokens,), dtype=torch.uint8),
        support_ids.new_empty((num_tokens,), dtype=torch.int32),
        support_ids.new_empty(cells, dtype=torch.int32),
        logits.new_empty(cells, dtype=wide),
    )


@torch.library.register_fake("packhorse::put_logit_grads")
def _put_logit_grads_fake(*_) -> None:
    return None


_ops = torch.ops.packhorse
score_logits = called_directly(_ops.score_logits.default, _score_logits_cuda)
put_logit_grads = called_directly(_ops.put_logit_grads.default, _put_logit_grads_cuda)
