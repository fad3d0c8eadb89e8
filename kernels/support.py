"""Score the sampled ids over the ids that the sampler kept, from logits.

    z = logits / temperature,   D(t) = distinct ids of support_ids[t] in [0, V) with z > -inf
    logprobs[t] = z[t, s] - log sum_{c in D(t)} exp z[t, c]          s = sampled_ids[t]
    entropy[t]  = -sum_{c in D(t)} p_c log p_c                       p = softmax of z[t] over D(t)

    d logprobs[t] / d z[t, c] = 1[c = s] - p_c
    d entropy[t]  / d z[t, c] = -p_c (log p_c + entropy[t])      both exactly 0 for c not in D(t)

``support_full.py`` has the same with the whole vocabulary as support. The division by the
temperature is done in these and nowhere else: give the logits as the model made them.

``status[t]`` says whether row t has a score. The first that holds:

    SUPPORT_MISSING     no id at all: every entry is -1 (``NO_CANDIDATE``)
    SUPPORT_INVALID     ids, but none inside the vocabulary
    SAMPLED_OUTSIDE     the sampled id is not among the members
    SAMPLED_IMPOSSIBLE  it is a member, but its logit is -inf: the trainer cannot sample it
    SUPPORT_OK          scored

Where it is not SUPPORT_OK, logprob, entropy and gradient are selected to be exactly 0, whatever the
row's logits hold. Where it is, a NaN or +inf logit of a member is a fault of the model, and makes
the row's logprob, entropy and gradient NaN instead of hiding it. Logits of non-members are never
part of a result. Maths and results are float32, and float64 for float64 logits.

Members are taken in ascending order of id, so the result does not depend on their order, bit for
bit. The backward writes each member's gradient to its own place, so two runs agree bit for bit.

Logits may have more columns than the vocabulary has ids: Megatron pads it, and its pad columns are
trained by nothing. ``vocab_size=`` says where they begin. They are not read, ids that name them are
outside the vocabulary, and their gradient is exactly 0.

Over a vocabulary that is sharded each rank reads the logits of its own members and 0 for the
others, and one all-reduce of [T, C] adds them up: an exact sum, of a fixed shape, on shards without
a member too.

Sizes: T tokens, N rows, V vocabulary, C candidates a row.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.members import (
    SAMPLED_IMPOSSIBLE,
    SAMPLED_OUTSIDE,
    SUPPORT_INVALID,
    SUPPORT_MISSING,
    SUPPORT_OK,
    grad_members,
    order_support,
    score_members,
    wide_dtype,
)
from packhorse.kernels.rows import check_row_range, check_tensors, checks_values
from packhorse.kernels.support_logits import put_logit_grads, score_logits

__all__ = [
    "SAMPLED_IMPOSSIBLE",
    "SAMPLED_OUTSIDE",
    "SUPPORT_INVALID",
    "SUPPORT_MISSING",
    "SUPPORT_OK",
    "SupportScores",
    "VocabularyScores",
    "support_logprobs",
]

LOGITS_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
SUPPORT_DTYPES = frozenset({torch.int32, torch.int64})


class VocabularyScores(NamedTuple):
    """Scores over the whole vocabulary, one entry a token."""

    logprobs: Tensor  # [T] float32 (float64 for float64 inputs), differentiable
    entropy: Tensor  # [T] as logprobs, nats, differentiable


class SupportScores(NamedTuple):
    """What ``support_logprobs`` returns, one entry a token."""

    logprobs: Tensor  # [T] float32 (float64 for float64 logits), differentiable
    entropy: Tensor  # [T] as logprobs, nats, differentiable
    status: Tensor  # [T] uint8, SUPPORT_OK ... SAMPLED_IMPOSSIBLE
    num_ignored: Tensor  # [T] int32: repeated ids, and ids outside [-1, V)


# --- reference: the specification, and, but for members, what every device runs -------------------


class Shard(NamedTuple):
    """Which columns of a sharded vocabulary the logits hold."""

    start: int  # id of the first
    group: Any

    def local(self, columns: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Columns of the shard, and whether the entry is one of its members."""
        local = columns - self.start
        here = (columns >= 0) & (local >= 0) & (local < num_columns)
        return torch.where(here, local, 0), here


def _score_logits(
    logits: Tensor,
    support_ids: Tensor,
    sampled_ids: Tensor,
    temperature: float,
    vocab_size: int | None,
    shard: Shard | None,
    row_ids: Tensor | None,
) -> tuple[SupportScores, Tensor, Tensor]:
    """Returns the scores, and for the backward: columns [T, C] int32, member_logprobs [T, C]."""
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    if shard is None:
        wide = wide_dtype(logits)
        *row, columns, member_logprobs = score_logits(
            logits, support_ids, sampled_ids, vocab_size,
            *as_operand(temperature, logits, wide), row_ids,
        )  # fmt: skip
        return SupportScores(*row), columns, member_logprobs
    columns, known, num_ignored = order_support(support_ids, vocab_size, row_ids)
    wide = wide_dtype(logits)
    local, here = shard.local(columns, logits.shape[1])
    members = torch.where(here, logits.gather(1, local.long()).to(wide), 0.0)
    dist.all_reduce(members, group=shard.group)
    logprobs, entropy, status, member_logprobs = score_members(
        members[None], columns, known, sampled_ids, *as_operand(temperature, members)
    )
    return SupportScores(logprobs, entropy, status, num_ignored), columns, member_logprobs


def as_operand(
    temperature: float, like: Tensor, dtype: torch.dtype | None = None
) -> tuple[float, Tensor | None]:
    """``temperature`` and ``temperatures`` for an operator; of ``like`` [T, ...] the dtype."""
    if torch.compiler.is_compiling():
        return 1.0, like.new_ones((like.shape[0],), dtype=dtype) * temperature
    return temperature, None


def wants_gradients(*inputs: Tensor | None) -> bool:
    """Whether to go by way of autograd. In forward mode too, which the closed forms refuse: the
    operators below them would drop its tangents in silence."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


# --- autograd: a closed form, which keeps nothing of size V for support_logprobs ------------------


class _SupportLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, support_ids, sampled_ids, temperature, vocab_size, shard, row_ids, overwrite
    ):
        scores, columns, member_logprobs = _score_logits(
            logits, support_ids, sampled_ids, temperature, vocab_size, shard, row_ids
        )
        overwritten = (logits,) if overwrite else ()
        ctx.save_for_backward(columns, member_logprobs, scores.entropy, sampled_ids, *overwritten)
        ctx.temperature, ctx.num_columns, ctx.dtype = temperature, logits.shape[1], logits.dtype
        ctx.shard = shard
        ctx.mark_non_differentiable(scores.status, scores.num_ignored)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_status, _grad_num_ignored):
        columns, member_logprobs, entropy, sampled_ids, *overwritten = ctx.saved_tensors
        if overwritten:
            out = all_zero(overwritten[0].detach())
        elif torch.compiler.is_compiling():
            out = columns.new_zeros((columns.shape[0], ctx.num_columns), dtype=ctx.dtype)
        else:
            shape = columns.shape[0], ctx.num_columns
            out = all_zero(columns.new_empty(shape, dtype=ctx.dtype))
        arguments = (
            grad_logprobs, grad_entropy, columns, member_logprobs, entropy, sampled_ids,
            *as_operand(ctx.temperature, member_logprobs),
        )  # fmt: skip
        if ctx.shard is None:
            put_logit_grads(out, *arguments)
        else:
            local, here = ctx.shard.local(columns, ctx.num_columns)
            # an entry that is no member adds 0 to some column, whatever the order
            grads = torch.where(here, grad_members(*arguments), 0.0).to(out.dtype)
            out.scatter_add_(1, local.long(), grads)
        return out, *(None,) * 7


def all_zero(x: Tensor) -> Tensor:
    """``x.zero_()``, of narrow floats as wider words: a third faster on an H200."""
    if x.is_contiguous() and x.itemsize < 4 and x.numel() * x.itemsize % 4 == 0:
        x.view(-1).view(torch.int32).zero_()
    else:
        x.zero_()
    return x


# --- public API -----------------------------------------------------------------------------------


@ranged
def support_logprobs(
    logits: Tensor,
    support_ids: Tensor,
    sampled_ids: Tensor,
    *,
    row_ids: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    group: Any = None,
    overwrite_logits: bool = False,
) -> SupportScores:
    """Logprob of each sampled id, and the entropy, over the ids that the sampler kept.

    Args:
        logits: [T, V] or wider, float64, float32, bfloat16 or float16, any strides, not yet divided
            by the temperature. Row t is the one that predicts ``sampled_ids[t]``.
        support_ids: [T, C] int32 or int64 on ``logits.device``; -1 is no candidate, anywhere in a
            row. Repeated ids count once; ids outside [-1, V) are ignored; ``num_ignored`` counts
            both. As vLLM returns them in ``sampling_mask.token_ids``. With ``row_ids`` [N, C]:
            packed rows, which are read where they stand.
        sampled_ids: [T] int64 on ``logits.device``. Any value; one that is no member is reported.
        row_ids: [T] int64 on ``logits.device``, each in [-1, N): the row of
            ``support_ids`` that token t is scored over; -1: it has none. From
            ``TokenLayout.support_row_ids``. By default row t is of token t.
        temperature: the rollout's, finite and > 0, applied here.
        vocab_size: V, at most the columns of ``logits``; those after it are a padded vocabulary's,
            and no part of anything. By default all columns are the vocabulary.
            Of a sharded vocabulary that of all ranks; by default the columns of all of them.
        vocab_start: id of the first column of a shard; by default shards of V columns in the order
            of the ranks.
        group: ranks that hold the shards; all call with the same supports and sampled ids, and get
            the same scores. The gradient of the logits is that of this rank's columns.
        overwrite_logits: the backward writes the gradient of the logits into their own memory, so
            that no other of their size is made. Nothing else may need the logits by then; autograd
            refuses what would read them afterwards.

    Returns:
        ``SupportScores``: logprobs [T] and entropy [T] (float32; float64 for float64 logits; both
        differentiable once in ``logits``, in reverse mode), status [T] uint8 and num_ignored [T]
        int32. Rows whose status is not ``SUPPORT_OK`` hold 0 and have no gradient. Beyond the
        gradient of the logits, memory is O(T C).

    Raises:
        TypeError: a dtype is unsupported, the temperature is not a number or ``vocab_size`` no int.
        ValueError: a shape or device is wrong, the temperature is not finite and > 0, or
            ``vocab_size`` is not from 1 to the columns of ``logits``, or logits to be overwritten
            share memory among themselves; or a row id on the CPU is out of range. Token ids are
            not read for a check, since that would stall the GPU: ``status`` reports them;
            ``PACKHORSE_CHECK=1`` checks row ids there.

    Source: "keep sampling mask" of the DeepSeek-V3.2 report.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> support_logprobs(logits, torch.tensor([[3, 2, -1]]), torch.tensor([3])).logprobs
        tensor([-0.3133])
    """
    name = "support_logprobs"
    temperature, vocab_size, shard = check_logits(
        name, logits, sampled_ids, temperature, vocab_size, vocab_start, group, overwrite_logits
    )
    check_support(name, "logits", logits, support_ids, row_ids)
    arguments = logits, support_ids, sampled_ids, temperature, vocab_size, shard, row_ids
    if wants_gradients(logits):
        return SupportScores(*_SupportLogprobs.apply(*arguments, overwrite_logits))
    return _score_logits(*arguments)[0]


def validate_logits(op: str, logits: Tensor, sampled_ids: Tensor, temperature: float) -> float:
    """Check what both functions take; returns the temperature, a whole one as a float."""
    for field, tensor in (("logits", logits), ("sampled_ids", sampled_ids)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {field} must be a tensor, got {type(tensor).__name__}")
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"{op}: logits has unsupported dtype {logits.dtype}")
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"{op}: logits must be [T, V] with V > 0, got {tuple(logits.shape)}")
    if sampled_ids.dtype != torch.int64:
        raise TypeError(f"{op}: sampled_ids must be int64, got {sampled_ids.dtype}")
    if sampled_ids.dim() != 1 or sampled_ids.shape[0] != logits.shape[0]:
        raise ValueError(
            f"{op}: sampled_ids must be [T] with T = {logits.shape[0]}, "
            f"got {tuple(sampled_ids.shape)}"
        )
    if sampled_ids.device != logits.device:
        raise ValueError(f"{op}: sampled_ids on {sampled_ids.device}, logits on {logits.device}")
    return check_temperature(op, temperature)


def check_temperature(op: str, temperature: float) -> float:
    """A finite number > 0, as a float."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"{op}: temperature must be a number, got {type(temperature).__name__}")
    least = torch.finfo(torch.float32).tiny
    if not least <= temperature <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"{op}: temperature must be finite and > 0, got {temperature} (float32 holds it from"
            f" {least:.2g} on)"
        )
    return float(temperature) if isinstance(temperature, int) else temperature


def check_logits(
    op: str, logits: Tensor, sampled_ids: Tensor, temperature: float, vocab_size: int | None,
    vocab_start: int | None, group: Any, overwrite_logits: bool,
) -> tuple[float, int | None, Shard | None]:  # fmt: skip
    """Check what scoring from logits takes beside a support, and raise as ``support_logprobs``, in
    the name of ``op``. Returns the temperature, the size of the whole vocabulary (None: all
    columns), and the shard where it is one of several."""
    temperature = validate_logits(op, logits, sampled_ids, temperature)
    shard = None
    if group is not None and dist.get_world_size(group) > 1:
        shard, vocab_size = _shard_of(op, logits, vocab_size, vocab_start, group)
    else:
        if vocab_start not in (None, 0):
            raise ValueError(f"{op}: vocab_start={vocab_start}, but no group holds other columns")
        check_vocab_size(op, logits, vocab_size)
    if not isinstance(overwrite_logits, bool):
        given = type(overwrite_logits).__name__
        raise TypeError(f"{op}: overwrite_logits must be a bool, got {given}")
    if overwrite_logits and _overlaps(logits):
        raise ValueError(
            f"{op}: overwrite_logits is for logits of their own memory, got strides"
            f" {logits.stride()}"
        )
    return temperature, vocab_size, shard


def _shard_of(
    name: str, logits: Tensor, vocab_size: int | None, vocab_start: int | None, group: Any
) -> tuple[Shard, int]:
    num_columns = logits.shape[1]
    size = num_columns * dist.get_world_size(group) if vocab_size is None else vocab_size
    start = num_columns * dist.get_rank(group) if vocab_start is None else vocab_start
    for field, value, least in (("vocab_size", size, 1), ("vocab_start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: {field} must be an int, got {type(value).__name__}")
        if not least <= value < 2**31:
            raise ValueError(f"{name}: {field} must be from {least} to 2**31 - 1, got {value}")
    if vocab_start is None:
        check_shards(name, size, dist.get_world_size(group), num_columns, "columns")
    return Shard(start, group), size


def check_shards(op: str, vocab_size: int, num_shards: int, num_ids: int, what: str) -> None:
    """Of even shards: there is no id that none holds, whose logit would be 0."""
    if vocab_size > num_shards * num_ids:
        raise ValueError(
            f"{op}: vocab_size={vocab_size}, but {num_shards} shards of {num_ids} {what} hold"
            f" {num_shards * num_ids} ids; give vocab_start where shards are uneven"
        )


def check_support(
    op: str, field: str, tokens: Tensor, support_ids: Tensor, row_ids: Tensor | None
) -> None:
    """Check the supports of the rows of ``tokens``, the argument ``field``."""
    if not isinstance(support_ids, Tensor):
        given = type(support_ids).__name__
        raise TypeError(f"{op}: support_ids must be a tensor, got {given}")
    if support_ids.dtype not in SUPPORT_DTYPES:
        raise TypeError(f"{op}: support_ids must be int32 or int64, got {support_ids.dtype}")
    num_tokens, shape = tokens.shape[0], tuple(support_ids.shape)
    if row_ids is None:
        if support_ids.dim() != 2 or support_ids.shape[0] != num_tokens:
            raise ValueError(f"{op}: support_ids must be [T, C] with T = {num_tokens}, got {shape}")
    elif support_ids.dim() != 2:
        raise ValueError(f"{op}: support_ids must be [N, C], got {shape}")
    if support_ids.device != tokens.device:
        raise ValueError(f"{op}: support_ids on {support_ids.device}, {field} on {tokens.device}")
    if row_ids is None:
        return
    check_token_rows(op, field, tokens, row_ids)
    if checks_values(row_ids):
        check_row_range(op, row_ids, support_ids.shape[0])


def check_token_rows(op: str, field: str, tokens: Tensor, row_ids: Tensor) -> None:
    """Check that ``row_ids`` are one a row of ``tokens``, the argument ``field``."""
    check_tensors(op, row_ids=row_ids)
    if row_ids.dtype != torch.int64:
        raise TypeError(f"{op}: row_ids must be int64, got {row_ids.dtype}")
    if row_ids.shape != tokens.shape[:1]:
        raise ValueError(
            f"{op}: row_ids must be [T] = [{tokens.shape[0]}], got {list(row_ids.shape)}"
        )
    if row_ids.device != tokens.device:
        raise ValueError(f"{op}: row_ids on {row_ids.device}, {field} on {tokens.device}")


def _overlaps(x: Tensor) -> bool:
    """Whether elements of [T, V] may share memory, as those of windows that overlap."""
    if x.numel() == 0:
        return False
    taken = 1  # elements up to the last of the narrower dimension
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < taken:
                return True
            taken += stride * (size - 1)
    return False


def check_vocab_size(op: str, logits: Tensor, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise TypeError(f"{op}: vocab_size must be an int, got {type(vocab_size).__name__}")
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"{op}: vocab_size must be from 1 to the {logits.shape[1]} columns of logits, got"
            f" {vocab_size}"
        )
