"""What other systems got wrong when they scored over a support, from hidden states, by kind.

Small inputs with known answers, for rows of one width and ragged ones alike; the same from logits
is in ``test_support.py``.
"""

import math

import pytest
import torch
import torch._dynamo.testing

from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.lm_head_members import add_weight_gradient_reference, pair_rows
from packhorse.kernels.lm_head_ragged import lm_head_ragged_support_logprobs
from packhorse.kernels.support import support_logprobs
from tests.conftest import INTERPRET

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
OK, MISSING, INVALID, OUTSIDE, IMPOSSIBLE = range(5)
INF = float("inf")


def fixed(hidden, weight, rows, sampled, **options):
    width = max(map(len, rows))
    ids = [[*row, *[-1] * (width - len(row))] for row in rows]
    ids = torch.tensor(ids, dtype=torch.int32, device=hidden.device)
    return lm_head_support_logprobs(hidden, weight, ids, sampled, **options)


def ragged(hidden, weight, rows, sampled, **options):
    widths = [len(row) for row in rows]
    flat = torch.tensor([i for row in rows for i in row], dtype=torch.int32, device=hidden.device)
    ends = torch.tensor([0, *widths], device=hidden.device).cumsum(0)
    row_ids = torch.arange(len(rows), device=hidden.device)
    return lm_head_ragged_support_logprobs(
        hidden, weight, flat, ends, row_ids, sampled, widths=widths, **options
    )


@pytest.fixture(params=[fixed, ragged], ids=lambda scorer: scorer.__name__)
def scorer(request):
    return request.param


def head_of(logits, device):
    """Hidden states and weight whose product is ``logits`` [T, V]: the identity and its columns."""
    logits = torch.tensor(logits, device=device)
    hidden = torch.eye(len(logits), device=device)
    return hidden.requires_grad_(), logits.T.contiguous().requires_grad_()


def test_a_sampled_id_outside_the_support_is_reported_and_never_above_0(scorer, device):
    hidden, weight = head_of([[1.0, 2.0, 3.0, 4.0]], device)
    scores = scorer(hidden, weight, [[0, 1]], torch.tensor([3], device=device))
    assert scores.status.tolist() == [OUTSIDE]
    assert (scores.logprobs.item(), scores.entropy.item()) == (0, 0)
    (scores.logprobs + scores.entropy).sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_supports_outside_the_vocabulary_empty_and_of_one_id(scorer, device):
    hidden, weight = head_of([[1.0, 2.0, 3.0]] * 3, device)
    rows, sampled = [[7, 9], [], [2]], torch.tensor([7, 1, 2], device=device)
    scores = scorer(hidden, weight, rows, sampled, temperature=0.3)
    assert scores.status.tolist() == [INVALID, MISSING, OK]
    assert scores.num_ignored.tolist() == [2, 0, 0]
    assert not scores.logprobs.any()
    assert not scores.entropy.any()
    (scores.logprobs + scores.entropy).sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_repeated_ids_count_once_and_are_counted(scorer, device):
    hidden, weight = head_of([[0.0, 0.0, 0.0, 5.0]], device)
    scores = scorer(hidden, weight, [[2, 0, 2, 1, 2, 99]], torch.tensor([2], device=device))
    assert scores.logprobs.item() == pytest.approx(-math.log(3), abs=1e-6)
    assert scores.num_ignored.tolist() == [3]


def test_equal_logits_share_alike(scorer, device):
    hidden, weight = head_of([[2.5, 2.5, 2.5, 2.5, 9.0]], device)
    scores = scorer(hidden, weight, [[3, 1, 0, 2]], torch.tensor([1], device=device))
    assert scores.logprobs.item() == pytest.approx(-math.log(4), abs=1e-6)
    assert scores.entropy.item() == pytest.approx(math.log(4), abs=1e-6)
    scores.logprobs.sum().backward()
    expected = torch.tensor([-0.25, 0.75, -0.25, -0.25, 0.0], device=device)
    torch.testing.assert_close(weight.grad[:, 0], expected)


def test_a_member_of_logit_minus_infinity_has_probability_0_and_finite_gradients(scorer, device):
    hidden, weight = head_of([[1.0, 2.0, 3.0, 4.0]], device)
    bias = torch.tensor([0.0, 0.0, -INF, 0.0], device=device)
    sampled = torch.tensor([1], device=device)
    scores = scorer(hidden, weight, [[0, 1, 2]], sampled, bias=bias)
    expected = scorer(hidden, weight, [[0, 1]], sampled)
    assert scores.status.tolist() == [OK]
    torch.testing.assert_close(scores.logprobs, expected.logprobs)
    torch.testing.assert_close(scores.entropy, expected.entropy)
    (scores.logprobs + scores.entropy).sum().backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert weight.grad[2] == 0
    impossible = scorer(hidden, weight, [[0, 1, 2]], torch.tensor([2], device=device), bias=bias)
    assert impossible.status.tolist() == [IMPOSSIBLE]
    assert impossible.logprobs.item() == 0


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_temperature_and_soft_cap_apply_once_as_from_logits(scorer, softcap, device):
    """The cap first, then the temperature."""
    raw = [[1.0, -2.0, 3.0, 0.5], [0.1, 4.0, -1.0, 2.0]]
    hidden, weight = head_of(raw, device)
    rows, sampled = [[0, 1, 3], [3, 1, 2]], torch.tensor([3, 1], device=device)
    scores = scorer(hidden, weight, rows, sampled, temperature=0.7, softcap=softcap)
    logits = torch.tensor(raw, device=device)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ids = torch.tensor(rows, dtype=torch.int32, device=device)
    expected = support_logprobs(logits, ids, sampled, temperature=0.7)
    torch.testing.assert_close(scores.logprobs, expected.logprobs)
    torch.testing.assert_close(scores.entropy, expected.entropy)
    z = [x / 0.7 for x in logits[0].tolist()]
    by_hand = z[3] - math.log(sum(math.exp(z[c]) for c in rows[0]))
    assert scores.logprobs[0].item() == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.skipif(INTERPRET, reason="4,096 columns; shorter rows run the same kernels")
def test_bfloat16_inputs_of_4096_columns_err_as_float32_sums_do(scorer, device):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4096, generator=generator).to(device, BF16)
    weight = (torch.randn(50, 4096, generator=generator) / 64).to(device, BF16)
    rows = [list(range(t, t + 20)) for t in range(6)]
    sampled = torch.arange(6, device=device) + 3
    scores = scorer(hidden, weight, rows, sampled)
    logits = hidden.double() @ weight.double().T
    exact = [logits[t, rows[t]].log_softmax(0)[3] for t in range(6)]
    error = (scores.logprobs.double() - torch.stack(exact)).abs().max()
    assert error < 5e-6  # products in bfloat16 err by 0.009


def test_float64_weight_gradients_are_those_of_the_reference(device):
    """By the kernels on a GPU, which read nothing back; repeated ids meet in one row."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(-1, 5, (9, 6), generator=generator).int().to(device)
    grads = torch.randn(9, 6, generator=generator, dtype=F64).to(device)
    hidden = torch.randn(9, 10, generator=generator, dtype=F64).to(device)
    out, expected = (torch.ones(4, 10, dtype=F64, device=device) for _ in range(2))
    again = out.clone()
    pairs = pair_rows(grads, columns, 1, 4).sort(stable=True)
    for target in (out, again):
        torch.ops.packhorse.add_weight_gradient(target, grads, hidden, *pairs, 6)
    add_weight_gradient_reference(expected, grads, hidden, *pairs, 6)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(out, again)


@pytest.mark.skipif(INTERPRET, reason="traces operators, not kernels")
def test_compiles_whole_and_once(device):
    # torch 2.11 takes the hidden size of a GPU's tensors for a constant, as it is of a model
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lm_head_support_logprobs, fullgraph=True, dynamic=True, backend=counter
    )
    for seed, (tokens, size, vocab, width) in enumerate([(9, 16, 20, 5), (12, 16, 33, 7)]):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, size, generator=generator).to(device).requires_grad_()
        weight = torch.randn(vocab, size, generator=generator).to(device).requires_grad_()
        ids = torch.randint(-1, vocab, (tokens, width), generator=generator).int().to(device)
        sampled = ids[:, 0].long()
        results = []
        for score in (compiled, lm_head_support_logprobs):
            scores = score(hidden, weight, ids, sampled, temperature=0.5 + 0.2 * seed)
            loss = (scores.logprobs + 3 * scores.entropy).sum()
            results.append((*scores, *torch.autograd.grad(loss, (hidden, weight))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("score", [fixed, ragged], ids=["one width", "ragged"])
def test_a_strided_bias_is_read_where_it_stands(score, device):
    hidden, weight = torch.randn(2, 8, device=device), torch.randn(6, 8, device=device)
    between = torch.full((6, 3), float("nan"), device=device)
    between[:, 1] = torch.arange(6.0, device=device)
    rows, sampled = [[5, 1, 3], [0, 4]], torch.tensor([3, 4], device=device)
    actual, expected = (
        score(hidden, weight, rows, sampled, bias=bias)
        for bias in (between[:, 1], between[:, 1].contiguous())
    )
    assert torch.equal(actual.logprobs, expected.logprobs)
    assert torch.equal(actual.entropy, expected.entropy)
    z = (hidden.double() @ weight.T.double() + torch.arange(6, device=device)).cpu()
    wanted = [z[0, 3] - z[0, [1, 3, 5]].logsumexp(0), z[1, 4] - z[1, [0, 4]].logsumexp(0)]
    torch.testing.assert_close(
        actual.logprobs.cpu().double(), torch.stack(wanted), rtol=0, atol=1e-5
    )
