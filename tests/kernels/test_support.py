"""support_logprobs: values, statuses, what NaN and inf do, gradients.

Tolerance: the error against the oracle may not exceed that of a dense log-softmax of plain PyTorch
in the same dtype times a factor; where there are too few rows for that, a bound counted from the
roundings (``rounding_bound``). What is selected rather than computed (rows without a score,
non-members) is compared exactly.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.kernels import support, support_full
from packhorse.kernels.support import SupportScores, support_logprobs
from packhorse.kernels.support_full import full_logprobs, full_scores
from packhorse.testing import assert_within_budget
from tests.conftest import INTERPRET
from tests.kernels.support_oracle import (
    DTYPES,
    IMPOSSIBLE,
    INF,
    INVALID,
    MISSING,
    NAN,
    OK,
    OUTSIDE,
    column,
    dense_scores,
    draw,
    gradients,
    literal,
    result_dtype,
    score_one,
    score_rows,
)

pytestmark = pytest.mark.skipif(
    INTERPRET, reason="hundreds of rows; test_lm_head runs the same kernels under the interpreter"
)

# --- values ---------------------------------------------------------------------------------------


def test_constants_are_the_contract():
    assert (support.SUPPORT_OK, support.SUPPORT_MISSING, support.SUPPORT_INVALID) == (0, 1, 2)
    assert (support.SAMPLED_OUTSIDE, support.SAMPLED_IMPOSSIBLE) == (3, 4)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_match_the_loops_within_the_error_of_a_dense_softmax(
    dtype, temperature, ids_dtype, device
):
    logits, ids, sampled = draw(99, 160, 20, dtype=dtype, device=device)
    rows = score_rows(logits, ids, sampled, temperature)
    assert {row.status for row in rows} == {OK, MISSING, INVALID, OUTSIDE, IMPOSSIBLE}
    scores = support_logprobs(logits, ids.to(ids_dtype), sampled, temperature=temperature)
    dense = dense_scores(logits, rows, ids, sampled, temperature)
    for actual, baseline, name in zip(scores[:2], dense, ("logprob", "entropy"), strict=True):
        assert actual.dtype == result_dtype(dtype)
        # 2: both round each exp and each sum, in another order (1.7 at the worst of 200 draws)
        assert_within_budget(actual, baseline, column(rows, name, device), factor=2)
    assert scores.status.dtype == torch.uint8
    assert scores.status.tolist() == [row.status for row in rows]
    assert scores.num_ignored.dtype == torch.int32
    assert scores.num_ignored.tolist() == [row.num_ignored for row in rows]
    unscored = scores.status != OK
    assert (scores.logprobs[unscored] == 0).all()
    assert (scores.entropy[unscored] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_match_the_loops_within_the_error_of_a_dense_softmax(dtype, temperature, device):
    logits, ids, sampled = draw(99, 160, 20, dtype=dtype, device=device, seed=1)
    rows = score_rows(logits, ids, sampled, temperature)
    logits.requires_grad_()
    scores = support_logprobs(logits, ids, sampled, temperature=temperature)
    dense = SupportScores(
        *dense_scores(logits, rows, ids, sampled, temperature), scores.status, scores.num_ignored
    )
    names = ("grad_logprob", "grad_entropy")
    for actual, baseline, name in zip(
        gradients(scores, logits), gradients(dense, logits), names, strict=True
    ):
        exact = column(rows, name, device)
        assert actual.dtype == dtype
        assert_within_budget(actual, baseline, exact, factor=2)
        assert (actual[exact == 0] == 0).all()


def rounding_bound(logits: torch.Tensor, width: int, temperature: float) -> float:
    """Roundings of one result, in absolute terms, times 2 for the functions' own last bits.

    z and z - max are each off by half an eps of max|z|, which enters the chosen member and the sum;
    the sum rounds once a member; a few operations round values of size 1 + log C.
    """
    size = max([abs(x) for x in logits.double().flatten().tolist() if abs(x) < INF], default=0.0)
    eps = torch.finfo(result_dtype(logits.dtype)).eps
    return 2 * eps * (4 * size / temperature + width + 4) * (1 + math.log(width + 1))


@st.composite
def problems(draw_value):
    vocab_size = draw_value(st.integers(1, 9))
    num_tokens = draw_value(st.integers(1, 5))
    width = draw_value(st.integers(0, 8))
    finite = st.floats(-30, 30, width=16)
    logit = st.one_of(finite, finite, finite, st.just(-INF))
    token = st.integers(-2, vocab_size + 1)

    def grid(entry, columns):
        row = st.lists(entry, min_size=columns, max_size=columns)
        return draw_value(st.lists(row, min_size=num_tokens, max_size=num_tokens))

    dtype = draw_value(st.sampled_from(DTYPES))
    logits = torch.tensor(grid(logit, vocab_size), dtype=torch.float64).to(dtype)
    ids = torch.tensor(grid(token, width), dtype=torch.int32).reshape(num_tokens, width)
    sampled = torch.tensor(grid(token, 1)).reshape(num_tokens)
    if width and draw_value(st.booleans()):
        sampled = ids[:, 0].long()
    return logits, ids, sampled, draw_value(st.sampled_from([1.0, 0.7, 2.5]))


@given(problems())
@settings(max_examples=150, deadline=None)
def test_any_support_is_scored_as_by_the_loops(problem):
    logits, ids, sampled, temperature = problem
    rows = score_rows(logits, ids, sampled, temperature)
    bound = rounding_bound(logits, ids.shape[1], temperature)
    logits.requires_grad_()
    scores = support_logprobs(logits, ids, sampled, temperature=temperature)
    assert scores.status.tolist() == [row.status for row in rows]
    assert scores.num_ignored.tolist() == [row.num_ignored for row in rows]
    for actual, name in zip(scores[:2], ("logprob", "entropy"), strict=True):
        assert ((actual.double() - column(rows, name)).abs() <= bound).all()
    names = ("grad_logprob", "grad_entropy")
    for actual, name in zip(gradients(scores, logits), names, strict=True):
        exact = column(rows, name)
        eps = torch.finfo(logits.dtype)
        allowed = bound / temperature + eps.eps * exact.abs() + eps.smallest_normal
        assert ((actual.double() - exact).abs() <= allowed).all()


def test_a_sampled_id_outside_the_support_is_reported_and_finite(device):
    logits = literal(1, 2, 3, 4, device=device)
    # z_3 - logsumexp(z_0, z_1) would be +1.687
    assert score_one(logits, [0, 1], 3) == (0.0, 0.0, OUTSIDE, 0)
    assert score_one(logits, [0, 1], -1) == (0.0, 0.0, OUTSIDE, 0)
    assert score_one(logits, [0, 1, 9], 9) == (0.0, 0.0, OUTSIDE, 1)
    logprob, _, status, _ = score_one(logits, [0, 1], 1)
    assert status == OK
    assert logprob == pytest.approx(-math.log1p(math.exp(-1)), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_singleton_has_logprob_entropy_and_gradient_zero(dtype, device):
    logits = literal(1, 2, 3, 4, dtype=dtype, device=device, grad=True)
    for ids in ([2], [-1, 2, -1], [2, 2, 7]):
        assert score_one(logits, ids, 2, temperature=0.7)[:3] == (0.0, 0.0, OK)
    ids, sampled = torch.tensor([[2]], device=device), torch.tensor([2], device=device)
    for grad in gradients(support_logprobs(logits, ids, sampled), logits):
        assert torch.equal(grad, torch.zeros_like(logits))


def test_a_support_outside_the_vocabulary_is_an_invalid_row(device):
    logits = literal(1, 2, 3, 4, device=device)
    assert score_one(logits, [4, 5, 1000], 4) == (0.0, 0.0, INVALID, 3)
    assert score_one(logits, [-2, -1, 4], 2) == (0.0, 0.0, INVALID, 2)
    top = torch.iinfo(torch.int32).max
    assert score_one(logits, [top, -top - 1], 4) == (0.0, 0.0, INVALID, 2)


def test_an_empty_row_is_missing_whatever_was_sampled(device):
    logits = literal(1, 2, 3, 4, device=device)
    for ids in ([-1], [-1, -1, -1], []):
        for sampled in (-1, 2, 99):
            assert score_one(logits, ids, sampled) == (0.0, 0.0, MISSING, 0)


def test_repeated_and_foreign_members_are_ignored_and_counted(device):
    logits = literal(1, 2, 3, 4, device=device)
    plain = score_one(logits, [3, 1], 1)
    assert plain[3] == 0
    assert score_one(logits, [1, 3, 1, 4, -1, 3, -7, 1], 1) == (*plain[:3], 5)


def test_an_impossible_member_has_no_part_in_the_score(device):
    logits = literal(1, -INF, 3, -INF, device=device, grad=True)
    assert score_one(logits, [0, 1, 2, 3], 2) == score_one(logits, [0, 2], 2)
    assert score_one(logits, [1, 2], 2)[:3] == (0.0, 0.0, OK)
    ids, sampled = torch.tensor([[0, 1, 2]], device=device), torch.tensor([2], device=device)
    for grad in gradients(support_logprobs(logits, ids, sampled), logits):
        assert torch.isfinite(grad).all()
        assert (grad[0, [1, 3]] == 0).all()
        assert (grad[0, [0, 2]] != 0).all()


def test_an_impossible_sampled_id_is_reported_and_finite(device):
    logits = literal(1, -INF, 3, -INF, device=device, grad=True)
    assert score_one(logits, [0, 1, 2], 1) == (0.0, 0.0, IMPOSSIBLE, 0)
    assert score_one(logits, [1, 3], 1) == (0.0, 0.0, IMPOSSIBLE, 0)
    assert score_one(logits, [1, 3], 2) == (0.0, 0.0, OUTSIDE, 0)
    ids, sampled = torch.tensor([[0, 1, 2]], device=device), torch.tensor([1], device=device)
    for grad in gradients(support_logprobs(logits, ids, sampled), logits):
        assert torch.equal(grad, torch.zeros_like(logits))


def test_temperature_is_applied_once(device):
    z = [x / 0.7 for x in (1.0, 2.0, 4.0)]
    exact = z[1] - math.log(sum(math.exp(x) for x in z))
    logits = literal(1, 2, 3, 4, dtype=torch.float64, device=device)
    assert score_one(logits, [0, 1, 3], 1, temperature=0.7)[0] == pytest.approx(exact, abs=1e-14)
    assert score_one(logits / 0.7, [0, 1, 3], 1)[0] == pytest.approx(exact, abs=1e-14)
    everything = z[1] - math.log(sum(math.exp(x / 0.7) for x in (1, 2, 3, 4)))
    full = full_logprobs(logits, torch.tensor([1], device=device), temperature=0.7)
    assert full.item() == pytest.approx(everything, abs=1e-14)
    assert score_one(logits, [0, 1, 3], 1, temperature=2) == score_one(logits / 2, [0, 1, 3], 1)


def test_the_order_of_members_does_not_matter_bit_for_bit(device):
    logits, ids, sampled = draw(64, 50, 12, device=device, seed=3)
    logits.requires_grad_()
    generator = torch.Generator().manual_seed(0)
    shuffle = torch.rand(ids.shape, generator=generator).argsort(dim=1).to(device)
    first = support_logprobs(logits, ids, sampled, temperature=0.9)
    second = support_logprobs(logits, ids.gather(1, shuffle), sampled, temperature=0.9)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    pairs = zip(gradients(first, logits), gradients(second, logits), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_whole_vocabulary_as_support_is_the_full_softmax(device):
    logits, _, sampled = draw(40, 33, 8, device=device, seed=4)
    logits = logits.where(logits > -INF, 0.0)
    sampled = sampled % 33
    ids = torch.arange(33, dtype=torch.int32, device=device).expand(40, 33).flip(1)
    rows = score_rows(logits, ids, sampled, 0.8)
    exact = column(rows, "logprob", device)
    dense = torch.log_softmax(logits / 0.8, dim=1).gather(1, sampled[:, None]).squeeze(1)
    scores = support_logprobs(logits, ids, sampled, temperature=0.8)
    assert (scores.status == OK).all()
    assert_within_budget(scores.logprobs, dense, exact, factor=2)
    full = full_logprobs(logits, sampled, temperature=0.8)
    assert_within_budget(full, dense, exact, factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_scores_are_the_dense_softmax_and_its_entropy(dtype, device, monkeypatch):
    """Logits of -inf have no part in it; with pad columns, a negative target and several chunks."""
    logits, _, sampled = draw(40, 33, 8, dtype=dtype, device=device, seed=4)
    sampled = sampled % 30
    sampled[::7] = -1
    logits.requires_grad_()
    monkeypatch.setattr(support_full, "_CHUNK_ELEMENTS", 33 * 9)
    options = {"temperature": 0.8, "vocab_size": 30}
    scores = full_scores(logits, sampled, **options)
    assert torch.equal(scores.logprobs, full_logprobs(logits, sampled, **options))
    found = torch.autograd.grad(scores.logprobs.sum() + 3 * scores.entropy.sum(), logits)[0]
    exact = logits.detach().double().requires_grad_()
    log_p = (exact[:, :30] / 0.8).log_softmax(1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p.clamp(min=-1e4), 0.0).sum(1)
    chosen = log_p.gather(1, sampled.clamp(min=0)[:, None]).squeeze(1)
    kept = (sampled >= 0) & (chosen > -INF)
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    bound = {"rtol": 16 * unit, "atol": 64 * unit}
    for x, y in ((scores.logprobs, chosen), (scores.entropy, entropy)):
        torch.testing.assert_close(x[kept].double(), y[kept], **bound)
        assert not x[sampled < 0].any()
    expected = torch.autograd.grad(chosen[kept].sum() + 3 * entropy[kept].sum(), exact)[0]
    rounded = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 64 * unit}
    torch.testing.assert_close(found[kept].double(), expected[kept], **rounded)
    assert not found[sampled < 0].any()
    assert not found[:, 30:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_logits_score_as_the_same_logits_in_float32(dtype, device):
    half, ids, sampled = draw(64, 50, 12, dtype=dtype, device=device, seed=5)
    single = half.float().requires_grad_()
    half.requires_grad_()
    narrow = support_logprobs(half, ids, sampled, temperature=0.7)
    wide = support_logprobs(single, ids, sampled, temperature=0.7)
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
    pairs = zip(gradients(narrow, half), gradients(wide, single), strict=True)
    assert all(torch.equal(a, b.to(dtype)) for a, b in pairs)


# --- NaN, inf, selection --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_logits_of_non_members_are_never_part_of_a_result(bad, device):
    logits, ids, sampled = draw(64, 50, 6, device=device, seed=6)
    member = torch.zeros(64, 51, dtype=torch.bool, device=device)
    member.scatter_(1, torch.where((ids >= 0) & (ids < 50), ids, 50).long(), True)
    clean = logits.clone().requires_grad_()
    spoilt = torch.where(member[:, :50], logits, bad).requires_grad_()
    first, second = (support_logprobs(x, ids, sampled) for x in (clean, spoilt))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    pairs = zip(gradients(first, clean), gradients(second, spoilt), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_without_a_score_are_zero_whatever_their_logits_hold(bad, device):
    ids = torch.tensor([[-1, -1], [9, -5], [0, 1], [0, 1]], dtype=torch.int32, device=device)
    sampled = torch.tensor([0, 1, 3, 1], device=device)
    logits = torch.full((4, 4), bad, device=device)
    logits[3] = torch.tensor([bad, -INF, bad, bad], device=device)
    logits.requires_grad_()
    scores = support_logprobs(logits, ids, sampled)
    assert scores.status.tolist() == [MISSING, INVALID, OUTSIDE, IMPOSSIBLE]
    assert (scores.logprobs == 0).all()
    assert (scores.entropy == 0).all()
    # not even by a gradient that is itself NaN
    for output in scores[:2]:
        upstream = torch.full_like(output, NAN)
        (grad,) = torch.autograd.grad(output, logits, upstream, retain_graph=True)
        assert torch.equal(grad, torch.zeros_like(logits))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", [0, 1], ids=["other-member", "sampled"])
def test_a_nan_or_inf_logit_of_a_member_is_not_hidden(bad, where, device):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2, device=device)
    logits[0, where] = bad
    logits.requires_grad_()
    ids = torch.tensor([[0, 1, 2]] * 2, device=device)
    scores = support_logprobs(logits, ids, torch.tensor([1, 1], device=device))
    assert scores.status.tolist() == [OK, OK]
    for output in scores[:2]:
        assert output.isnan().tolist() == [True, False]
    for grad in gradients(scores, logits):
        assert grad.isnan().tolist() == [[True, True, True, False], [False] * 4]


def test_masked_positions_holding_nan_or_inf_stay_finite_after_selection(device):
    logits, ids, sampled = draw(12, 30, 5, device=device, seed=7)
    ids = ids.where((ids >= 0) & (ids < 30), 1)
    sampled = ids[:, 0].long()
    logits = logits.where(logits > -INF, 0.0)
    logits[4], logits[9] = NAN, INF
    mask = torch.ones(12, dtype=torch.bool, device=device)
    mask[[4, 9]] = False
    logits.requires_grad_()
    scores = support_logprobs(logits, ids, sampled)
    assert scores.logprobs[~mask].isnan().all()
    loss = (torch.where(mask, scores.logprobs, 0.0) - torch.where(mask, scores.entropy, 0.0)).sum()
    assert torch.isfinite(loss)
    kept = support_logprobs(logits[mask], ids[mask], sampled[mask])
    (grad,) = torch.autograd.grad(loss, logits)
    (grad_kept,) = torch.autograd.grad((kept.logprobs - kept.entropy).sum(), logits)
    assert torch.equal(grad[mask], grad_kept[mask])
    # rows whose trace says so in the support need no selection: their row is -1
    ids = torch.where(mask[:, None], ids, -1)
    scores = support_logprobs(logits, ids, sampled)
    (grad,) = torch.autograd.grad((scores.logprobs - scores.entropy).sum(), logits)
    assert torch.isfinite(grad).all()
    assert (grad[~mask] == 0).all()


def test_huge_logits_do_not_overflow(device):
    logits = literal(30000, 29999, -30000, 0, device=device)
    exact = -math.log1p(math.exp(-1))
    assert score_one(logits, [0, 1, 2], 0)[0] == pytest.approx(exact, rel=1e-6)
    full = full_logprobs(logits, torch.tensor([0], device=device))
    assert full.item() == pytest.approx(exact, rel=1e-6)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(temperature, device):
    ids = torch.tensor(
        [
            [0, 2, 5, -1],
            [1, 1, 9, 4],
            [-1, -1, -1, -1],
            [7, 8, -3, 9],
            [0, 1, 2, 3],
            [3, -1, -1, 3],
        ],
        device=device,
    )
    sampled = torch.tensor([2, 4, 0, 0, 5, 3], device=device)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 6, dtype=torch.float64, generator=generator).to(device)
    logits[0, 5] = -INF
    logits.requires_grad_()

    def scores(x):
        return support_logprobs(x, ids, sampled, temperature=temperature)[:2]

    assert support_logprobs(logits, ids, sampled).status.tolist() == [0, 0, 1, 2, 3, 0]
    assert torch.autograd.gradcheck(scores, logits)
    finite = logits.detach().where(logits > -INF, 0.5).requires_grad_()
    targets = torch.tensor([0, 3, -1, 5, -100, 2], device=device)
    assert torch.autograd.gradcheck(
        lambda x: full_logprobs(x, targets, temperature=temperature), finite
    )
    assert torch.autograd.gradcheck(
        lambda x: tuple(full_scores(x, targets, temperature=temperature)), finite
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_twice_is_bitwise_equal(dtype, device):
    logits, ids, sampled = draw(256, 64, 48, dtype=dtype, device=device, seed=8)
    ids = torch.cat([ids, ids[:, :40]], dim=1)  # nearly every member comes twice
    logits.requires_grad_()
    upstream = torch.randn(256, generator=torch.Generator().manual_seed(1)).to(device)
    runs = []
    for _ in range(3):
        scores = support_logprobs(logits, ids, sampled)
        loss = (upstream * (scores.logprobs + 0.1 * scores.entropy)).sum()
        runs.append(torch.autograd.grad(loss, logits)[0])
    assert all(torch.equal(runs[0], run) for run in runs[1:])
    assert not (runs[0] == 0).all()


def test_a_second_derivative_is_refused():
    logits = literal(1, 2, 3, 4, grad=True)
    weight = torch.ones(1, requires_grad=True)
    scores = support_logprobs(logits, torch.tensor([[0, 1]]), torch.tensor([1]))
    for output in (scores.logprobs, scores.entropy, full_logprobs(logits, torch.tensor([1]))):
        (grad,) = torch.autograd.grad((weight * output).sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_status_and_counts_carry_no_gradient_and_no_grad_records_nothing():
    logits = literal(1, 2, 3, 4, grad=True)
    ids, sampled = torch.tensor([[0, 1]]), torch.tensor([1])
    scores = support_logprobs(logits, ids, sampled)
    assert [x.requires_grad for x in scores] == [True, True, False, False]
    with torch.no_grad():
        assert not any(x.requires_grad for x in support_logprobs(logits, ids, sampled))
    assert not any(x.requires_grad for x in support_logprobs(logits.detach(), ids, sampled))
