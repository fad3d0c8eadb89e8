"""What the tests of ``kernels/support.py`` share: the oracle, a plain PyTorch baseline, inputs.

The oracle is plain loops over Python numbers in 40 decimal digits, rounded to float64 at the end.
It shares no code with the package and calls nothing of torch.
"""

from decimal import Decimal, localcontext
from typing import NamedTuple

import torch

from packhorse.kernels import support
from packhorse.kernels.support import SupportScores, support_logprobs

torch.set_num_threads(1)

INF, NAN = float("inf"), float("nan")
DTYPES = sorted(support.LOGITS_DTYPES, key=str)
OK, MISSING, INVALID, OUTSIDE, IMPOSSIBLE = range(5)


# --- oracle ---------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One token: scores, and the gradients of the logprob and of the entropy, length V."""

    logprob: float
    entropy: float
    status: int
    num_ignored: int
    grad_logprob: list[float]
    grad_entropy: list[float]


def score_row(logits: list[float], ids: list[int], sampled: int, temperature: float) -> Row:
    members: list[int] = []
    num_ignored = 0
    for token in ids:
        if token == -1:
            continue
        if 0 <= token < len(logits) and token not in members:
            members.append(token)
        else:
            num_ignored += 1
    zeros = [0.0] * len(logits)
    if all(token == -1 for token in ids):
        status = MISSING
    elif not members:
        status = INVALID
    elif sampled not in members:
        status = OUTSIDE
    elif logits[sampled] == -INF:
        status = IMPOSSIBLE
    else:
        status = OK
    if status != OK:
        return Row(0.0, 0.0, status, num_ignored, zeros, zeros)

    with localcontext() as context:
        context.prec = 40
        heat = Decimal(temperature)
        z = {c: Decimal(logits[c]) / heat for c in members if logits[c] > -INF}
        top = max(z.values())
        log_total = sum((x - top).exp() for x in z.values()).ln()
        log_p = {c: x - top - log_total for c, x in z.items()}
        p = {c: x.exp() for c, x in log_p.items()}
        entropy = -sum(p[c] * log_p[c] for c in z)
        grad_logprob, grad_entropy = list(zeros), list(zeros)
        for c in z:
            grad_logprob[c] = float(((1 if c == sampled else 0) - p[c]) / heat)
            grad_entropy[c] = float(-p[c] * (log_p[c] + entropy) / heat)
        # Decimal has a negative zero, and so would the float
        return Row(
            float(log_p[sampled]) + 0.0, float(entropy) + 0.0, status, num_ignored,
            grad_logprob, grad_entropy,
        )  # fmt: skip


def score_rows(
    logits: torch.Tensor, ids: torch.Tensor, sampled: torch.Tensor, temperature: float = 1.0
) -> list[Row]:
    rows = zip(logits.double().tolist(), ids.tolist(), sampled.tolist(), strict=True)
    return [score_row(*row, temperature) for row in rows]


def column(rows: list[Row], name: str, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float64, device=device)


def dense_scores(
    logits: torch.Tensor, rows: list[Row], ids: torch.Tensor, sampled: torch.Tensor, heat: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What plain PyTorch gives: a masked dense log-softmax in the precision of the result."""
    ok = torch.tensor([row.status == OK for row in rows], device=logits.device)
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for t, row in enumerate(ids.tolist()):
        mask[t, [c for c in row if 0 <= c < logits.shape[1]]] = True
    mask = torch.where(ok[:, None], mask, True)
    z = logits.to(result_dtype(logits.dtype)) / heat
    z = torch.where(mask & ok[:, None], z, torch.where(mask, 0.0, -INF))
    log_p = torch.log_softmax(z, dim=1)
    chosen = log_p.gather(1, torch.where(ok, sampled, 0)[:, None]).squeeze(1)
    log_p = torch.where(log_p > -INF, log_p, 0.0)
    terms = torch.where(z > -INF, log_p.exp() * log_p, 0.0)
    return torch.where(ok, chosen, 0.0), torch.where(ok, -terms.sum(1), 0.0)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- inputs ---------------------------------------------------------------------------------------


def draw(
    num_tokens: int, vocab_size: int, width: int, *, dtype=torch.float32, device="cpu", seed=0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with some -inf, supports with -1, repeats and foreign ids, mostly sampled members."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(num_tokens, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -INF
    ids = torch.randint(0, vocab_size, (num_tokens, width), generator=generator)
    kind = torch.rand(ids.shape, generator=generator)
    ids[kind < 0.2] = -1
    ids[kind > 0.95] += vocab_size
    ids[:, width // 2] = ids[:, 0]
    sampled = ids[:, 0].clone()
    sampled[::7] = torch.randint(0, vocab_size, sampled[::7].shape, generator=generator)
    ids[3::11] = -1
    ids[5::11] = vocab_size + 5
    return logits.to(device, dtype), ids.to(device, torch.int32), sampled.to(device)


def literal(*logits: float, dtype=torch.float32, device="cpu", grad=False) -> torch.Tensor:
    return torch.tensor([logits], dtype=dtype, device=device, requires_grad=grad)


def score_one(
    logits: torch.Tensor, ids: list[int], sampled: int, *, temperature: float = 1.0
) -> tuple[float, float, int, int]:
    scores = support_logprobs(
        logits,
        torch.tensor([ids], dtype=torch.int32, device=logits.device),
        torch.tensor([sampled], device=logits.device),
        temperature=temperature,
    )
    logprob, entropy, status, num_ignored = (x.item() for x in scores)
    return logprob, entropy, int(status), int(num_ignored)


def gradients(scores: SupportScores, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (of_logprobs,) = torch.autograd.grad(scores.logprobs.sum(), logits, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(scores.entropy.sum(), logits)
    return of_logprobs, of_entropy
