"""Score the sampled ids over the whole vocabulary, from logits.

    logprobs[t] = z[t, s] - log sum_v exp z[t, v]      z = logits / temperature, s = sampled_ids[t]
    entropy[t]  = -sum_v p_v log p_v                   p = softmax of z[t]

What ``support_logprobs`` is with all ids as support, in plain torch: logits are widened some tokens
at a time, forward and again in the backward. Pad columns of a padded vocabulary, from
``vocab_size=`` on, are not read.

Sizes: T tokens, V vocabulary.
"""

from typing import Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packhorse._nvtx import ranged
from packhorse.kernels.members import wide_dtype
from packhorse.kernels.support import VocabularyScores, check_vocab_size, validate_logits
from packhorse.kernels.vocabulary_tiles import LEAST

#: Widened logits that ``full_logprobs`` holds at once: 64 MiB of float32.
_CHUNK_ELEMENTS: Final = 1 << 24

# --- reference: the specification, and what every device runs -------------------------------------


def _scale(x: Tensor, temperature: float) -> Tensor:
    """Widen logits and divide them by the temperature: the one place where that is done."""
    return x.to(wide_dtype(x)) / temperature


def full_scores_reference(
    logits: Tensor,
    sampled_ids: Tensor,
    temperature: float,
    vocab_size: int | None,
    *,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns logprobs and entropy [T], and for the backward: row_max [T], log_total [T]."""
    num_columns = logits.shape[1]
    vocab_size = num_columns if vocab_size is None else vocab_size
    row_maxs, log_totals, chosen, spreads = [], [], [], []
    columns = sampled_ids.clamp(0, vocab_size - 1)
    for rows, column in zip(_row_chunks(logits), _row_chunks(columns, num_columns), strict=True):
        z = _scale(rows[:, :vocab_size], temperature)
        row_max = z.amax(1)
        shifted = z - row_max[:, None]
        weights = shifted.exp()
        total = weights.sum(1)
        row_maxs.append(row_max)
        log_totals.append(total.log())
        chosen.append(shifted.gather(1, column[:, None]).squeeze(1))
        if with_entropy:  # sum p (z - max), with 0 for what has no probability
            spreads.append((weights * shifted.clamp(min=LEAST)).sum(1) / total)
    row_max, log_total = torch.cat(row_maxs), torch.cat(log_totals)
    logprobs = torch.cat(chosen) - log_total
    logprobs = torch.where(sampled_ids < vocab_size, logprobs, float("nan"))
    entropy = log_total - torch.cat(spreads) if with_entropy else torch.zeros_like(logprobs)
    has_target = sampled_ids >= 0
    logprobs, entropy = (torch.where(has_target, x, 0.0) for x in (logprobs, entropy))
    return logprobs, entropy, row_max, log_total


def full_scores_backward_reference(
    grad_logprobs: Tensor,  # [T]
    grad_entropy: Tensor | None,  # [T]
    logits: Tensor,  # [T, V]
    sampled_ids: Tensor,  # [T]
    entropy: Tensor,  # [T]
    row_max: Tensor,  # [T]
    log_total: Tensor,  # [T]
    temperature: float,
    vocab_size: int | None,
) -> Tensor:
    """Returns the gradient of the logits, of their shape and dtype."""
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    # a score without a gradient adds nothing, whatever the row holds
    wanted = grad_logprobs != 0
    if grad_entropy is not None:
        wanted = wanted | (grad_entropy != 0)
    wanted = wanted & (sampled_ids >= 0)
    grad = torch.where(sampled_ids < vocab_size, grad_logprobs, float("nan")) / temperature
    slope = torch.zeros_like(grad) if grad_entropy is None else grad_entropy / temperature
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    per_row = (grad, slope, sampled_ids, entropy, row_max, log_total, wanted)
    for out, rows, *chunk in zip(
        _row_chunks(grad_logits),
        _row_chunks(logits),
        *(_row_chunks(x, logits.shape[1]) for x in per_row),
        strict=True,
    ):
        g, e, sampled, h, m, total, taken = (x[:, None] for x in chunk)
        log_p = _scale(rows[:, :vocab_size], temperature) - m - total
        grad_z = -g * log_p.exp()
        if grad_entropy is not None:
            grad_z = grad_z - e * log_p.exp() * (log_p.clamp(min=LEAST) + h)
        grad_z = grad_z.scatter_add_(1, sampled.clamp(0, vocab_size - 1), g)
        out[:, :vocab_size] = torch.where(taken, grad_z, 0.0)
        out[:, vocab_size:] = 0
    return grad_logits


def _row_chunks(x: Tensor, num_columns: int | None = None) -> tuple[Tensor, ...]:
    """Split along the tokens so that one chunk of the logits widens to ``_CHUNK_ELEMENTS``."""
    if torch.compiler.is_compiling():
        return (x,)  # a compiler fuses the widening into the reductions
    return x.split(max(1, _CHUNK_ELEMENTS // (num_columns or x.shape[1])))


# --- autograd: a closed form ----------------------------------------------------------------------


class _FullScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, sampled_ids, temperature, vocab_size, with_entropy):
        logprobs, entropy, *kept = full_scores_reference(
            logits, sampled_ids, temperature, vocab_size, with_entropy=with_entropy
        )
        ctx.save_for_backward(logits, sampled_ids, entropy, *kept)
        ctx.temperature, ctx.vocab_size = temperature, vocab_size
        return (logprobs, entropy) if with_entropy else logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy=None):
        logits, sampled_ids, entropy, row_max, log_total = ctx.saved_tensors
        grad_logits = full_scores_backward_reference(
            grad_logprobs, grad_entropy, logits, sampled_ids, entropy, row_max, log_total,
            ctx.temperature, ctx.vocab_size,
        )  # fmt: skip
        return grad_logits, None, None, None, None


# --- public API -----------------------------------------------------------------------------------


@ranged
def full_logprobs(
    logits: Tensor,
    sampled_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Logprob of each sampled id over the whole vocabulary.

    Args:
        logits: [T, V] or wider, as for ``support_logprobs``. Kept for the backward.
        sampled_ids: [T] int64 on ``logits.device``. A negative id says that the row has no target.
        temperature: as for ``support_logprobs``.
        vocab_size: V, as for ``support_logprobs``. Without it the pad columns of a padded
            vocabulary take their share of the probability, and every logprob is too low.

    Returns:
        [T] float32 (float64 for float64 logits), differentiable once in ``logits``. 0 without a
        gradient where the sampled id is negative; NaN where it is V or more, since there is no
        status to report it; -inf where its logit is -inf; NaN where a logit of the row is NaN or
        +inf, or all are -inf. Widened logits exist for 2**24 elements at a time.

    Raises:
        As ``support_logprobs``.

    Example:
        >>> full_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
        tensor([0.2500])
    """
    temperature = validate_logits("full_logprobs", logits, sampled_ids, temperature)
    check_vocab_size("full_logprobs", logits, vocab_size)
    given = logits, sampled_ids, temperature, vocab_size
    if torch.is_grad_enabled() and logits.requires_grad:
        return _FullScores.apply(*given, False)
    return full_scores_reference(*given, with_entropy=False)[0]


@ranged
def full_scores(
    logits: Tensor,
    sampled_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> VocabularyScores:
    """``full_logprobs``, and the entropy over the whole vocabulary.

    Args:
        logits, sampled_ids, temperature, vocab_size: as of ``full_logprobs``.

    Returns:
        ``VocabularyScores``: logprobs as of ``full_logprobs``, and the entropy [T] in nats, of the
        same dtype, differentiable once too: 0 without a gradient where the sampled id is negative,
        NaN where a logit of the row is NaN or +inf, or all are -inf.

    Raises:
        As ``support_logprobs``.

    Example:
        >>> full_scores(torch.zeros(1, 4), torch.tensor([2])).entropy.exp()
        tensor([4.])
    """
    temperature = validate_logits("full_scores", logits, sampled_ids, temperature)
    check_vocab_size("full_scores", logits, vocab_size)
    given = logits, sampled_ids, temperature, vocab_size
    if torch.is_grad_enabled() and logits.requires_grad:
        return VocabularyScores(*_FullScores.apply(*given, True))
    return VocabularyScores(*full_scores_reference(*given)[:2])
