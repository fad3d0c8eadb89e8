"""Members of a support row: which ids they are, their scores, the gradients of their logits.

    order_support  [T, C] ids          -> the distinct ids in [0, V) in ascending order, -1 between
                   [N, C], row ids [T]    the same of row ``row_ids[t]``; -1: it has none
    score_members  [S, T, C] logits    -> logprob of the sampled id, entropy, every logprob
    grad_members   gradients of both   -> gradient of each member's logit

Where the logits come from is the caller's: ``support_logprobs`` reads them, ``lm_head`` makes them.
They may come in S parts that add up (slices of the hidden size). Maths is float32, float64 for
float64 logits. Sums run over a row in the order of its ids, so they do not depend on the order in
which the engine listed them, bit for bit.

The status of a row is the first that holds:

    SUPPORT_MISSING     no id at all: every entry is -1 (``NO_CANDIDATE``)
    SUPPORT_INVALID     ids, but none inside the vocabulary
    SAMPLED_OUTSIDE     the sampled id is not among the members
    SAMPLED_IMPOSSIBLE  it is a member, but its logit is -inf: the trainer cannot sample it
    SUPPORT_OK          scored; for all others score and gradient are selected to be exactly 0

The temperature is one number, or with ``temperatures`` one a token: a compiler, which would compile
anew for each number that an operator is given, gets it as a tensor too.

Sizes: T tokens, N rows, C candidates a row, V vocabulary. Contract: a logit of an entry that is -1
in ``columns`` is read but is never part of a result.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse.kernels.launch import Launcher, called_directly, kernel_name
from packhorse.kernels.rows import _gather_rows_op
from packhorse.packed.sentinels import NO_CANDIDATE

#: ``status[t]``: row t was scored.
SUPPORT_OK: Final = 0
#: ``status[t]``: every entry of the support row is -1 (an observation, an appended token, a pad).
SUPPORT_MISSING: Final = 1
#: ``status[t]``: the support row holds ids, none of them inside the vocabulary.
SUPPORT_INVALID: Final = 2
#: ``status[t]``: the sampled id is not a member of the support.
SAMPLED_OUTSIDE: Final = 3
#: ``status[t]``: the sampled id is a member whose logit is -inf.
SAMPLED_IMPOSSIBLE: Final = 4

_INF: Final = float("inf")
#: Ids of a row that one program sorts; wider rows are sorted by torch.
MAX_SORTED: Final = 4096

# --- reference: the specification, and what CPU tensors run ---------------------------------------


def order_support_reference(
    support_ids: Tensor,  # [T, C], or with row ids [N, C]
    vocab_size: int,
    row_ids: Tensor | None = None,  # [T] int64: the row of each token, -1: it has none
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns columns [T, C] int32, status [T] uint8 (the first two or OK), num_ignored [T]."""
    if row_ids is not None:
        support_ids = _gather_rows_op(support_ids, row_ids.contiguous(), NO_CANDIDATE)
    num_tokens = support_ids.shape[0]
    if support_ids.shape[1] == 0:
        return (
            support_ids.new_empty((num_tokens, 0), dtype=torch.int32),
            support_ids.new_full((num_tokens,), SUPPORT_MISSING, dtype=torch.uint8),
            support_ids.new_zeros((num_tokens,), dtype=torch.int32),
        )
    ids = support_ids.contiguous().sort(dim=1).values
    before = torch.cat([ids.new_full((num_tokens, 1), NO_CANDIDATE), ids[:, :-1]], dim=1)
    named = ids != NO_CANDIDATE
    # the first of each run of equal ids, inside the vocabulary
    member = (ids != before) & (ids >= 0) & (ids < vocab_size)
    status = torch.full_like(ids[:, 0], SUPPORT_OK, dtype=torch.uint8)
    status = status.masked_fill(~member.any(1), SUPPORT_INVALID)
    status = status.masked_fill(~named.any(1), SUPPORT_MISSING)
    columns = torch.where(member, ids, NO_CANDIDATE).to(torch.int32)
    return columns, status, (named.sum(1) - member.sum(1)).to(torch.int32)


def wide_dtype(x: Tensor) -> torch.dtype:
    """What the maths of ``x`` is in, and its scores: float32, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def sum_parts(logits: Tensor) -> Tensor:
    """[T, C] of [S, T, C], in the order of the parts: torch's own sum takes another."""
    total = logits[0]
    for part in logits[1:]:
        total = total + part
    return total


def score_members_reference(
    logits: Tensor,  # [S, T, C] float32 or float64, not yet divided by the temperature
    columns: Tensor,  # [T, C] int32 of ``order_support``
    known: Tensor,  # [T] uint8, its status
    sampled_ids: Tensor,  # [T] int64
    temperature: float,
    temperatures: Tensor | None = None,  # [T], in place of it
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns logprobs [T], entropy [T], status [T] uint8, member_logprobs [T, C].

    The last are -inf where the entry is no member, or its row has no score.
    """
    z = sum_parts(logits) / (temperature if temperatures is None else temperatures[:, None])
    member = columns >= 0
    sampled = member & (columns == sampled_ids[:, None])
    status = torch.full_like(known, SUPPORT_OK)
    status = status.masked_fill((sampled & (z == -_INF)).any(1), SAMPLED_IMPOSSIBLE)
    status = status.masked_fill(~sampled.any(1), SAMPLED_OUTSIDE)
    status = torch.where(known == SUPPORT_OK, status, known)
    ok = status == SUPPORT_OK

    # from here on a row without a score has no member, and each sum over it is 0
    live = member & (z != -_INF) & ok[:, None]
    top = z.new_full((z.shape[0], 1), -_INF)
    if z.shape[1]:
        top = torch.where(live, z, -_INF).amax(1, keepdim=True)
    # a spread past the dtype stays finite: its weight is 0, and 0 * -inf would be NaN
    shifted = torch.where(live, (z - top).clamp(min=torch.finfo(z.dtype).min), 0.0)
    weights = torch.where(live, shifted.exp(), 0.0)
    total = torch.where(ok, weights.sum(1), 1.0)
    log_total = total.log()
    logprobs = torch.where(sampled, shifted, 0.0).sum(1) - log_total
    entropy = log_total - (weights * shifted).sum(1) / total
    member_logprobs = torch.where(live, shifted - log_total[:, None], -_INF)
    return logprobs, entropy, status, member_logprobs


def grad_members_reference(
    grad_logprobs: Tensor,  # [T]
    grad_entropy: Tensor,  # [T]
    columns: Tensor,  # [T, C] int32
    member_logprobs: Tensor,  # [T, C]
    entropy: Tensor,  # [T]
    sampled_ids: Tensor,  # [T] int64
    temperature: float,
    temperatures: Tensor | None = None,  # [T], in place of it
) -> Tensor:
    """[T, C] gradient of each logit, exactly 0 where ``member_logprobs`` is -inf, and in rows whose
    scores both have the gradient 0: whatever a row holds that the loss masks, it adds nothing.

    d logprob / d z_c = 1[c = s] - p_c        d entropy / d z_c = -p_c (log p_c + entropy)
    """
    wanted = ((grad_logprobs != 0) | (grad_entropy != 0))[:, None]
    live = (member_logprobs != -_INF) & wanted
    log_p = torch.where(live, member_logprobs, 0.0)
    p = log_p.exp()
    chosen = (columns == sampled_ids[:, None]).to(p.dtype)
    grad = grad_logprobs[:, None] * (chosen - p)
    grad = grad - grad_entropy[:, None] * p * (log_p + entropy[:, None])
    grad = grad / (temperature if temperatures is None else temperatures[:, None])
    return torch.where(live, grad, 0.0)


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def cells_of_rows(row_ids_ptr, token, in_batch, c, width):
    """Cells of the tokens' rows, and which are some: none where a token has no row."""
    row = token.to(tl.int64)
    if row_ids_ptr is not None:
        row = tl.load(row_ids_ptr + token, mask=in_batch, other=-1)
    return row[:, None] * width + c[None, :], (in_batch & (row >= 0))[:, None] & (c < width)[
        None, :
    ]


@triton.jit
def ordered_ids(ids_ptr, cells, inside, c, vocab_size, BLOCK_C: tl.constexpr):
    """Ids of a tile's rows, pads first and then ascending; which are members; how many of each."""
    pad: tl.constexpr = -2147483648  # sorts before every id, which is at least one more
    ids = tl.load(ids_ptr + cells, mask=inside, other=-1).to(tl.int64)
    ids = tl.minimum(tl.maximum(ids, pad + 1), 2147483647).to(tl.int32)
    ids = tl.sort(tl.where(inside, ids, pad), dim=1)
    place = c[None, :] + tl.zeros_like(ids)
    before = tl.gather(ids, tl.maximum(place - 1, 0), 1)
    named = (ids != -1) & (ids != pad)
    member = ((ids != before) | (place == 0)) & (ids >= 0) & (ids < vocab_size)
    num_named = tl.sum(named.to(tl.int32), axis=1)
    num_members = tl.sum(member.to(tl.int32), axis=1)
    return ids, member, num_named, num_members


@triton.jit
def scored_tile(z, columns, known, sampled_id, scale):
    """Logprob, entropy, status and member logprobs of rows; ``known``: their status before."""
    inf: tl.constexpr = float("inf")
    z = tl.div_rn(z, scale[:, None] + tl.zeros_like(z))
    member = columns >= 0
    sampled = member & (columns.to(tl.int64) == sampled_id[:, None])
    is_sampled = tl.max(sampled.to(tl.int32), axis=1) > 0
    impossible = tl.max((sampled & (z == -inf)).to(tl.int32), axis=1) > 0
    # 3: outside, 4: impossible
    status = tl.where(known != 0, known, tl.where(~is_sampled, 3, tl.where(impossible, 4, 0)))
    ok = status == 0

    live = member & (z != -inf) & ok[:, None]
    top = tl.where(ok, tl.max(tl.where(live, z, -inf), axis=1), 0.0)
    shifted = z - top[:, None]
    # a spread past float32 stays finite; a NaN stays NaN
    shifted = tl.where(shifted < -3.4028234663852886e38, -3.4028234663852886e38, shifted)
    shifted = tl.where(live, shifted, 0.0)
    weights = tl.where(live, tl.exp(shifted), 0.0)
    total = tl.where(ok, tl.sum(weights, axis=1), 1.0)
    log_total = tl.log(total)
    logprob = tl.sum(tl.where(sampled, shifted, 0.0), axis=1) - log_total
    entropy = log_total - tl.div_rn(tl.sum(weights * shifted, axis=1), total)
    members = tl.where(live, shifted - log_total[:, None], -inf)
    return tl.where(ok, logprob, 0.0), tl.where(ok, entropy, 0.0), status, members


@triton.jit(
    repr=kernel_name("order_support", "ids_ptr", "BLOCK_C"),
    do_not_specialize=["num_tokens", "width", "vocab_size"],
)
def _order_support_kernel(
    ids_ptr,  # [T, C], or with row ids [N, C]
    row_ids_ptr,  # [T] int64, or None: row t is of token t
    columns_ptr,  # [T, C] int32
    status_ptr,  # [T] uint8
    ignored_ptr,  # [T] int32
    num_tokens,  # T
    width,  # C
    vocab_size,  # V
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= C
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = token < num_tokens
    c = tl.arange(0, BLOCK_C)
    cells = token.to(tl.int64)[:, None] * width + c[None, :]
    source, named = cells_of_rows(row_ids_ptr, token, known, c, width)
    ids, member, num_named, num_members = ordered_ids(
        ids_ptr, source, named, c, vocab_size, BLOCK_C
    )
    # 1: missing, 2: invalid
    status = tl.where(num_named == 0, 1, tl.where(num_members == 0, 2, 0))
    tl.store(status_ptr + token, status.to(tl.uint8), mask=known)
    tl.store(ignored_ptr + token, num_named - num_members, mask=known)
    pads = BLOCK_C - width
    written = known[:, None] & (c >= pads)[None, :]
    tl.store(columns_ptr + (cells - pads), tl.where(member, ids, -1), mask=written)


@triton.jit(
    repr=kernel_name("score_members", "logits_ptr", "BLOCK_C"),
    do_not_specialize=["num_parts", "num_tokens", "width", "temperature"],
)
def _score_members_kernel(
    logits_ptr,  # [S, T, C] float32
    columns_ptr,  # [T, C] int32
    known_ptr,  # [T] uint8
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    logprobs_ptr,  # [T] float32
    entropy_ptr,  # [T] float32
    status_ptr,  # [T] uint8
    members_ptr,  # [T, C] float32
    num_parts,  # S
    num_tokens,  # T
    width,  # C
    temperature,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= C
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = token < num_tokens
    c = tl.arange(0, BLOCK_C)
    cells = token.to(tl.int64)[:, None] * width + c[None, :]
    inside = known[:, None] & (c < width)[None, :]
    columns = tl.load(columns_ptr + cells, mask=inside, other=-1)
    z = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    first = tl.zeros([], tl.int64)  # row of the part
    for _ in range(0, num_parts):
        z += tl.load(logits_ptr + (first * width + cells), mask=inside, other=0.0)
        first += num_tokens
    scale = temperature + tl.zeros([BLOCK_T], tl.float32)
    if temperatures_ptr is not None:
        scale = tl.load(temperatures_ptr + token, mask=known, other=1.0)
    sampled_id = tl.load(sampled_ptr + token, mask=known, other=-1)
    before = tl.load(known_ptr + token, mask=known, other=1).to(tl.int32)
    logprob, entropy, status, members = scored_tile(z, columns, before, sampled_id, scale)
    tl.store(logprobs_ptr + token, logprob, mask=known)
    tl.store(entropy_ptr + token, entropy, mask=known)
    tl.store(status_ptr + token, status.to(tl.uint8), mask=known)
    tl.store(members_ptr + cells, members, mask=inside)


@triton.jit
def gradient_of_cells(
    cell, inside, token, grad_logprobs_ptr, grad_entropy_ptr, columns_ptr, members_ptr,
    entropy_ptr, sampled_ptr, temperatures_ptr, temperature,
):  # fmt: skip
    """Of cells of [T, C]: the gradient of each member's logit, its column, whether it is one."""
    inf: tl.constexpr = float("inf")
    log_p = tl.load(members_ptr + cell, mask=inside, other=-inf)
    column = tl.load(columns_ptr + cell, mask=inside, other=-1)
    grad_logprob = tl.load(grad_logprobs_ptr + token, mask=inside, other=0.0)
    grad_entropy = tl.load(grad_entropy_ptr + token, mask=inside, other=0.0)
    entropy = tl.load(entropy_ptr + token, mask=inside, other=0.0)
    sampled_id = tl.load(sampled_ptr + token, mask=inside, other=-1)
    live = (log_p != -inf) & ((grad_logprob != 0.0) | (grad_entropy != 0.0))
    log_p = tl.where(live, log_p, 0.0)
    p = tl.exp(log_p)
    chosen = (column.to(tl.int64) == sampled_id).to(tl.float32)
    grad = grad_logprob * (chosen - p) - grad_entropy * p * (log_p + entropy)
    if temperatures_ptr is None:
        grad = tl.div_rn(grad, temperature + tl.zeros_like(grad))
    else:
        grad = tl.div_rn(grad, tl.load(temperatures_ptr + token, mask=inside, other=1.0))
    return grad, column, live


@triton.jit(
    repr=kernel_name("grad_members"), do_not_specialize=["num_cells", "width", "temperature"]
)
def _grad_members_kernel(
    grad_logprobs_ptr,  # [T] float32
    grad_entropy_ptr,  # [T] float32
    columns_ptr,  # [T, C] int32
    members_ptr,  # [T, C] float32
    entropy_ptr,  # [T] float32
    sampled_ptr,  # [T] int64
    temperatures_ptr,  # [T] float32, or None: ``temperature``
    grads_ptr,  # [T, C] float32
    num_cells,  # T * C
    width,  # C
    temperature,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < num_cells
    token = cell // width
    grad, _, live = gradient_of_cells(
        cell, inside, token, grad_logprobs_ptr, grad_entropy_ptr, columns_ptr, members_ptr,
        entropy_ptr, sampled_ptr, temperatures_ptr, temperature,
    )  # fmt: skip
    tl.store(grads_ptr + cell, tl.where(live, grad, 0.0), mask=inside)


_launch_order_support = Launcher(_order_support_kernel)
_launch_score_members = Launcher(_score_members_kernel)
_launch_grad_members = Launcher(_grad_members_kernel)

_BLOCK = 256


def row_tile(width: int) -> tuple[int, int, int]:
    """Warps, BLOCK_T, BLOCK_C of rows of C entries: four rows a warp where they are narrow.

    At least two warps: the exchange of one warp with itself is what racecheck takes for a hazard.
    """
    block_c = max(1 << (width - 1).bit_length(), 2)
    num_warps = min(max(block_c // 256, 2), 8)
    return num_warps, min(max(256 // block_c, 1), 8), block_c


def _order_support_cuda(
    support_ids: Tensor, vocab_size: int, row_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = support_ids.shape
    num_tokens = num_rows if row_ids is None else row_ids.shape[0]
    if width > MAX_SORTED or num_tokens * width == 0:
        return order_support_reference(support_ids, vocab_size, row_ids)
    columns = support_ids.new_empty((num_tokens, width), dtype=torch.int32)
    status = support_ids.new_empty((num_tokens,), dtype=torch.uint8)
    ignored = support_ids.new_empty((num_tokens,), dtype=torch.int32)
    num_warps, block_t, block_c = row_tile(width)
    _launch_order_support(
        (-(-num_tokens // block_t),),
        (
            support_ids.contiguous(), None if row_ids is None else row_ids.contiguous(), columns,
            status, ignored, num_tokens, width, vocab_size,
        ),
        (block_t, block_c),
        num_warps,
    )  # fmt: skip
    return columns, status, ignored


def _score_members_cuda(
    logits: Tensor, columns: Tensor, known: Tensor, sampled_ids: Tensor, temperature: float,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    num_tokens, width = columns.shape
    if logits.dtype == torch.float64 or width > MAX_SORTED or columns.numel() == 0:
        return score_members_reference(
            logits, columns, known, sampled_ids, temperature, temperatures
        )
    logprobs, entropy = logits.new_empty((num_tokens,)), logits.new_empty((num_tokens,))
    status, members = torch.empty_like(known), logits.new_empty((num_tokens, width))
    num_warps, block_t, block_c = row_tile(width)
    _launch_score_members(
        (-(-num_tokens // block_t),),
        (
            logits.contiguous(), columns, known, sampled_ids.contiguous(), temperatures, logprobs,
            entropy, status, members, logits.shape[0], num_tokens, width, temperature,
        ),
        (block_t, block_c),
        num_warps,
    )  # fmt: skip
    return logprobs, entropy, status, members


def _grad_members_cuda(
    grad_logprobs: Tensor, grad_entropy: Tensor, columns: Tensor, member_logprobs: Tensor,
    entropy: Tensor, sampled_ids: Tensor, temperature: float, temperatures: Tensor | None = None,
) -> Tensor:  # fmt: skip
    arguments = grad_logprobs, grad_entropy, columns, member_logprobs, entropy, sampled_ids
    if member_logprobs.dtype == torch.float64 or columns.numel() == 0:
        return grad_members_reference(*arguments, temperature, temperatures)
    grads = torch.empty_like(member_logprobs)
    _launch_grad_members(
        (-(-grads.numel() // _BLOCK),),
        (
            *(argument.contiguous() for argument in arguments), temperatures, grads,
            grads.numel(), grads.shape[1], temperature,
        ),
        (_BLOCK,),
        2,
    )  # fmt: skip
    return grads


# --- operators ------------------------------------------------------------------------------------

torch.library.define(
    "packhorse::order_support",
    "(Tensor support_ids, SymInt vocab_size, Tensor? row_ids=None) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("packhorse::order_support", "CPU", order_support_reference)
torch.library.impl("packhorse::order_support", "CUDA", _order_support_cuda)

torch.library.define(
    "packhorse::score_members",
    "(Tensor logits, Tensor columns, Tensor known, Tensor sampled_ids, float temperature,"
    " Tensor? temperatures=None) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("packhorse::score_members", "CPU", score_members_reference)
torch.library.impl("packhorse::score_members", "CUDA", _score_members_cuda)

torch.library.define(
    "packhorse::grad_members",
    "(Tensor grad_logprobs, Tensor grad_entropy, Tensor columns, Tensor member_logprobs,"
    " Tensor entropy, Tensor sampled_ids, float temperature, Tensor? temperatures=None) -> Tensor",
)
torch.library.impl("packhorse::grad_members", "CPU", grad_members_reference)
torch.library.impl("packhorse::grad_members", "CUDA", _grad_members_cuda)


@torch.library.register_fake("packhorse::order_support")
def _order_support_fake(support_ids, _vocab_size, row_ids=None) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = (support_ids if row_ids is None else row_ids).shape[0]
    return (
        support_ids.new_empty((num_tokens, support_ids.shape[1]), dtype=torch.int32),
        support_ids.new_empty((num_tokens,), dtype=torch.uint8),
        support_ids.new_empty((num_tokens,), dtype=torch.int32),
    )


@torch.library.register_fake("packhorse::score_members")
def _score_members_fake(logits, columns, known, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = logits.new_empty((columns.shape[0],))
    return row, row.clone(), torch.empty_like(known), logits.new_empty(tuple(columns.shape))


@torch.library.register_fake("packhorse::grad_members")
def _grad_members_fake(_grad_logprobs, _grad_entropy, _columns, member_logprobs, *_) -> Tensor:
    return torch.empty_like(member_logprobs)


_ops = torch.ops.packhorse
order_support = called_directly(_ops.order_support.default, _order_support_cuda)
score_members = called_directly(_ops.score_members.default, _score_members_cuda)
grad_members = called_directly(_ops.grad_members.default, _grad_members_cuda)
