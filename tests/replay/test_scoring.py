"""score_microbatch.

Oracle: NumPy loops in float64 over trajectories and response tokens; gradients in closed form.
Tolerance: float64 logits 1e-12 (sums of at most 40 terms of order 10), float32 logits 2e-6.
"""

import numpy as np
import pytest
import torch

from packhorse.kernels import support as support_module
from packhorse.kernels.rows import gather_rows
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from packhorse.replay.scoring import SCORED_FULL, score_microbatch

VOCAB = 40
WIDTH = 5  # candidates a row
LENGTHS = (6, 9, 4, 5)
RESPONSES = (3, 4, 0, 4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


class Case:
    """Random tokens, logits and support; ``slot(i, s)`` is where position s of trajectory i is."""

    def __init__(self, format: str, device: str, dtype=torch.float64, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.format = format
        self.layout = TokenLayout.build(
            LENGTHS, format=format, tp_size=4, batch_width=11, device=device
        )
        padded = [-(-n // 4) * 4 for n in LENGTHS]
        if format == "bshd":
            padded = [max(padded)] * len(LENGTHS)
        self.padded = padded
        self.tokens = [rng.integers(0, VOCAB, n) for n in LENGTHS]
        shape = (1, sum(padded)) if format == "thd" else (len(LENGTHS), padded[0])
        raw = rng.normal(0, 3, (*shape, VOCAB))
        self.logits = torch.tensor(raw, dtype=dtype, device=device, requires_grad=True)
        self.support = []
        for tokens, response in zip(self.tokens, RESPONSES, strict=True):
            rows = np.full((response, WIDTH), -1, np.int32)
            for r in range(response):
                width = rng.integers(1, WIDTH + 1)
                others = rng.permutation(VOCAB)[:width]
                rows[r, :width] = others
                sampled = tokens[len(tokens) - response + r]
                if sampled not in others:
                    rows[r, rng.integers(width)] = sampled
            self.support.append(rows)
        self.device = device

    def place(self, i: int, s: int) -> tuple[int, int]:
        return (0, sum(self.padded[:i]) + s) if self.format == "thd" else (i, s)

    @property
    def packed_support(self) -> PackedTensor:
        rows = torch.from_numpy(np.concatenate(self.support)).to(self.device)
        return PackedTensor.from_lengths(rows, RESPONSES)

    @property
    def token_ids(self) -> PackedTensor:
        values = torch.from_numpy(np.concatenate(self.tokens)).to(self.device)
        return PackedTensor.from_lengths(values, LENGTHS)

    def masks(self, *marked: tuple[int, int]) -> list[np.ndarray]:
        masks = [np.zeros(n, bool) for n in LENGTHS]
        for i, s in marked:
            masks[i][s] = True
        return masks


def score_loop(case: Case, temperature: float, full=(), support=True):
    """logprobs, entropies [N]; gradient of the logprobs' weighted sum, weights 1, 2, 3, ..."""
    logits = case.logits.detach().cpu().double().numpy()
    gradient = np.zeros_like(logits)
    logprobs, entropies = [], []
    for i, (length, response) in enumerate(zip(LENGTHS, RESPONSES, strict=True)):
        for r in range(response):
            token = length - response + r
            place = case.place(i, token - 1)
            z = logits[place] / temperature
            sampled = int(case.tokens[i][token])
            everything = not support or (i, token) in full
            ids = case.support[i][r].tolist()
            members = range(VOCAB) if everything else sorted({c for c in ids if 0 <= c < VOCAB})
            if sampled not in members:
                logprobs.append(0.0)
                entropies.append(0.0)
                continue
            total = np.log(sum(np.exp(z[c]) for c in members))
            p = {c: np.exp(z[c] - total) for c in members}
            logprobs.append(z[sampled] - total)
            replaced = support and everything  # of another distribution than the rollout's
            entropies.append(0.0 if replaced else -sum(q * np.log(q) for q in p.values()))
            for c, q in p.items():
                gradient[place][c] += len(logprobs) * ((c == sampled) - q) / temperature
    return np.array(logprobs), np.array(entropies), gradient


def assert_scores(case: Case, scores, expected, dtype=torch.float64):
    logprobs, entropies, gradient = expected
    tolerance = TOLERANCE[dtype]
    assert scores.logprobs.lengths == RESPONSES
    values = scores.logprobs.values
    np.testing.assert_allclose(values.detach().cpu().numpy(), logprobs, rtol=0, atol=tolerance)
    entropy = scores.entropy.values.detach().cpu().numpy()
    np.testing.assert_allclose(entropy, entropies, rtol=0, atol=tolerance)
    weights = torch.arange(1, len(logprobs) + 1, device=values.device)
    (actual,) = torch.autograd.grad((values * weights).sum(), case.logits)
    assert actual.dtype == case.logits.dtype
    scale = len(logprobs)  # the largest weight
    np.testing.assert_allclose(actual.cpu().numpy(), gradient, rtol=0, atol=tolerance * scale)
    assert (actual.cpu().numpy()[gradient == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_scores_match_loops(format, temperature, dtype, device):
    case = Case(format, device, dtype)
    scores = score_microbatch(
        case.logits, case.layout, case.token_ids, case.packed_support, temperature=temperature
    )
    assert_scores(case, scores, score_loop(case, temperature), dtype)
    assert scores.counts.tolist() == [sum(RESPONSES), 0, 0, 0, 0, 0]


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_scores_over_the_vocabulary_match_loops(format, device):
    case = Case(format, device)
    scores = score_microbatch(
        case.logits, case.layout, case.token_ids, response_lengths=RESPONSES, temperature=0.7
    )
    assert_scores(case, scores, score_loop(case, 0.7, support=False))
    assert scores.counts.tolist() == [0, 0, 0, 0, 0, sum(RESPONSES)]


@pytest.mark.parametrize("support", [True, False])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_a_padded_vocabulary_scores_as_the_true_one(format, support, device):
    """Megatron's pad columns: NaN here. Appended tokens are scored over the true vocabulary."""
    case = Case(format, device)
    true = case.logits
    pad = true.new_full((*true.shape[:2], 24), torch.nan)
    case.logits = torch.cat([true.detach(), pad], -1).requires_grad_()
    appended = [(0, 5), (3, 4)] if support else []
    scores = score_microbatch(
        case.logits,
        case.layout,
        case.token_ids,
        case.packed_support if support else None,
        response_lengths=RESPONSES,
        temperature=0.7,
        appended=case.masks(*appended),
        vocab_size=VOCAB,
    )
    padded, case.logits = case.logits, true
    logprobs, entropies, gradient = score_loop(case, 0.7, full=appended, support=support)
    case.logits = padded
    gradient = np.concatenate([gradient, np.zeros(pad.shape)], -1)
    assert_scores(case, scores, (logprobs, entropies, gradient))


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_dense_and_packed_tokens_score_alike(format, device):
    case = Case(format, device)
    dense = np.full((len(LENGTHS), 11), 7)
    for row, tokens in zip(dense, case.tokens, strict=True):
        row[11 - len(tokens) :] = tokens  # left padded, the layout's default
    packed = score_microbatch(case.logits, case.layout, case.token_ids, case.packed_support)
    other = score_microbatch(
        case.logits, case.layout, torch.from_numpy(dense).to(device), case.packed_support
    )
    assert torch.equal(packed.logprobs.values, other.logprobs.values)


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_logits_in_layout_order_score_as_the_models(format, device):
    case = Case(format, device)
    flat = case.layout.from_model(case.logits)
    given = (case.layout, case.token_ids, case.packed_support)
    ours, models = score_microbatch(flat, *given), score_microbatch(case.logits, *given)
    assert torch.equal(ours.logprobs.values, models.logprobs.values)


@pytest.mark.parametrize("row", ["no-row", "a-row-that-is-not-its-own"])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_appended_tokens_with_loss_are_scored_over_the_vocabulary(format, row, device):
    case = Case(format, device)
    appended = [(0, 5), (3, 4)]
    for i, s in appended:
        if row == "no-row":
            case.support[i][s - LENGTHS[i] + RESPONSES[i]] = -1
    scores = score_microbatch(
        case.logits,
        case.layout,
        case.token_ids,
        case.packed_support,
        temperature=0.7,
        appended=case.masks(*appended),
    )
    assert_scores(case, scores, score_loop(case, 0.7, full=appended))
    assert scores.status.values.tolist() == [0, 0, SCORED_FULL] + [0] * 7 + [SCORED_FULL]
    assert scores.counts.tolist() == [sum(RESPONSES) - 2, 0, 0, 0, 0, 2]


def test_appended_tokens_without_loss_stay_unscored(device):
    case = Case("thd", device)
    case.support[0][2] = -1
    scores = score_microbatch(
        case.logits,
        case.layout,
        case.token_ids,
        case.packed_support,
        appended=case.masks((0, 5)),
        loss_masks=case.masks((0, 4), (1, 8)),
    )
    assert_scores(case, scores, score_loop(case, 1.0))
    assert scores.counts.tolist() == [sum(RESPONSES) - 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list], ids=lambda kind: kind.__name__)
def test_masks_of_0_and_1_are_masks(kind):
    case = Case("thd", "cpu")
    case.support[0][2] = -1
    given = case.logits, case.layout, case.token_ids, case.packed_support
    appended, losses = case.masks((0, 5)), case.masks((0, 5), (1, 8))
    expected = score_microbatch(*given, appended=appended, loss_masks=losses)
    whole = [[kind(mask.astype(int).tolist()) for mask in masks] for masks in (appended, losses)]
    scores = score_microbatch(*given, appended=whole[0], loss_masks=whole[1])
    assert torch.equal(scores.logprobs.values, expected.logprobs.values)
    assert scores.counts.tolist() == [sum(RESPONSES) - 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_masks_may_be_tensors_of_any_dtype_and_need_a_gradient(dtype):
    case = Case("thd", "cpu")
    case.support[0][2] = -1
    given = case.logits, case.layout, case.token_ids, case.packed_support
    appended, losses = case.masks((0, 5)), case.masks((0, 5), (1, 8))
    expected = score_microbatch(*given, appended=appended, loss_masks=losses)
    needs = dtype.is_floating_point
    tensors = [
        [torch.from_numpy(mask).to(dtype).requires_grad_(needs) for mask in masks]
        for masks in (appended, losses)
    ]
    scores = score_microbatch(*given, appended=tensors[0], loss_masks=tensors[1])
    assert torch.equal(scores.logprobs.values, expected.logprobs.values)
    assert scores.counts.tolist() == expected.counts.tolist()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_support_on_the_host_scores_alike_without_waiting(pinned, cuda, no_host_sync):
    case = Case("thd", cuda)
    given = case.logits, case.layout, case.token_ids
    expected = score_microbatch(*given, case.packed_support)
    support = case.packed_support.to("cpu")
    support = support.pin_memory() if pinned else support
    assert support.is_pinned() == pinned
    torch.cuda.synchronize()
    with no_host_sync():
        scores = score_microbatch(*given, support)
    assert torch.equal(scores.logprobs.values, expected.logprobs.values)
    assert scores.logprobs.device == case.logits.device


@pytest.mark.parametrize("where", ["with the logits", "on the host"])
def test_a_ragged_support_scores_as_its_rows_of_one_width(where, device):
    case = Case("thd", device)
    expected = score_microbatch(case.logits, case.layout, case.token_ids, case.packed_support)
    ragged = PackedRagged.from_padded(case.packed_support.to("cpu"))
    if where == "with the logits":
        ragged = ragged.to(device)
    scores = score_microbatch(case.logits, case.layout, case.token_ids, ragged)
    assert torch.equal(scores.status.values, expected.status.values)
    grads = []
    for found in (scores, expected):
        loss = (found.logprobs.values + 3 * found.entropy.values).sum()
        grads.append(torch.autograd.grad(loss, case.logits)[0])
    fields = [[x.logprobs.values, x.entropy.values] for x in (scores, expected)]
    pairs = [*zip(*fields, strict=True), grads]
    assert expected.logprobs.values.dtype == torch.float64
    for a, b in pairs:  # rows of another width are summed in another order
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_a_support_on_the_host_is_taken_by_logits_elsewhere():
    case = Case("thd", "cpu")
    layout = TokenLayout.build(LENGTHS, tp_size=4, batch_width=11, device="meta")
    scores = score_microbatch(
        case.logits.to("meta"), layout, case.token_ids.to("meta"), case.packed_support
    )
    assert scores.logprobs.values.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_fields_keep_their_dtypes(dtype, device):
    case = Case("thd", device, dtype)
    scores = score_microbatch(case.logits, case.layout, case.token_ids, case.packed_support)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (scores.logprobs.dtype, scores.entropy.dtype) == (wide, wide)
    assert scores.status.dtype == torch.uint8
    assert (scores.counts.dtype, scores.num_ignored.dtype) == (torch.int64, torch.int64)
    assert scores.logprobs.requires_grad
    assert scores.entropy.requires_grad
    assert not any(t.requires_grad for t in (scores.status.values, scores.counts))
    assert scores.num_ignored.shape == ()


@pytest.mark.parametrize("support", [True, False], ids=["support", "vocabulary"])
def test_the_entropy_differentiates(support):
    """In float64 against central differences of the loop's entropies."""
    case = Case("thd", "cpu")
    over = {"support": case.packed_support} if support else {"response_lengths": RESPONSES}
    weights = torch.arange(1, sum(RESPONSES) + 1)

    def total() -> float:
        entropies = score_loop(case, 0.7, support=support)[1]
        return float((torch.from_numpy(entropies) * weights).sum())

    scores = score_microbatch(case.logits, case.layout, case.token_ids, temperature=0.7, **over)
    (gradient,) = torch.autograd.grad((scores.entropy.values * weights).sum(), case.logits)
    for place in (case.place(0, 2), case.place(1, 6), case.place(3, 3)):
        token = int(gradient[place].abs().argmax())
        ends = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                case.logits[place][token] += step
            ends.append(total())
        with torch.no_grad():
            case.logits[place][token] += 1e-5
        assert gradient[place][token] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_every_context_parallel_rank_scores_the_whole_batch_in_one_restore(format, monkeypatch):
    """Of two ranks in one process: each rank's restore is given the other's values."""
    case = Case(format, "cpu")
    case.support[0][2] = -1
    case.support[1][0] = [case.tokens[1][5], VOCAB, VOCAB + 1, -1, -1]
    positions = [case.place(i, s) for i, n in enumerate(LENGTHS) for s in range(n)]
    rows = torch.stack([case.logits[place] for place in positions])
    layouts = [
        TokenLayout.build(LENGTHS, format=format, cp_size=2, cp_rank=rank, batch_width=11)
        for rank in range(2)
    ]
    sent: list[torch.Tensor] = []

    def send(layout, values, fill=0):
        sent.append(values.detach())
        return values.new_zeros(len(LENGTHS), 10, *values.shape[1:])

    def score(rank: int):
        logits = gather_rows(rows, layouts[rank].token_row_ids())
        appended = case.masks((0, 5))
        given = layouts[rank], case.token_ids, case.packed_support
        return score_microbatch(logits, *given, temperature=0.7, appended=appended)

    monkeypatch.setattr(TokenLayout, "restore", send)
    for rank in range(2):
        score(rank)
    assert len(sent) == 2
    expected = score_loop(case, 0.7, full=[(0, 5)])
    gradient = torch.zeros_like(case.logits)
    for rank in range(2):
        others = iter([sent[1 - rank]])

        def receive(layout, values, fill=0, rank=rank, others=others):
            both = [next(others), values]
            return layout.restore_gathered(both if rank else both[::-1], fill)

        monkeypatch.setattr(TokenLayout, "restore", receive)
        scores = score(rank)
        np.testing.assert_allclose(scores.logprobs.values.detach(), expected[0], atol=1e-12)
        np.testing.assert_allclose(scores.entropy.values.detach(), expected[1], atol=1e-12)
        assert scores.counts.tolist() == [sum(RESPONSES) - 1, 0, 0, 0, 0, 1]
        assert scores.num_ignored == 2
        weights = torch.arange(1, sum(RESPONSES) + 1)
        loss = (scores.logprobs.values * weights).sum()
        gradient += torch.autograd.grad(loss, case.logits, retain_graph=True)[0]
    np.testing.assert_allclose(gradient, expected[2], rtol=0, atol=1e-12 * sum(RESPONSES))


def test_each_status_is_counted_and_has_no_score(device):
    case = Case("bshd", device)
    case.support[0][0] = -1
    case.support[1][0] = [VOCAB, VOCAB + 3, -7, -1, -1]
    sampled = case.tokens[1][6]
    case.support[1][1] = [(sampled + 1) % VOCAB, -1, -1, -1, -1]
    with torch.no_grad():
        case.logits[case.place(3, 3)][int(case.tokens[3][4])] = -torch.inf
    scores = score_microbatch(case.logits, case.layout, case.token_ids, case.packed_support)
    names = ("SUPPORT_MISSING", "SUPPORT_INVALID", "SAMPLED_OUTSIDE", "SAMPLED_IMPOSSIBLE")
    missing, invalid, outside, impossible = (getattr(support_module, name) for name in names)
    expected = [missing, 0, 0, invalid, outside, 0, 0, 0, 0, 0, impossible]
    assert scores.status.values.tolist() == expected
    counts = scores.counts.tolist()
    assert [counts[s] for s in (missing, invalid, outside, impossible)] == [1, 1, 1, 1]
    assert sum(counts) == sum(RESPONSES)
    assert scores.num_ignored == 3
    bad = torch.tensor([s != 0 for s in expected], device=device)
    assert (scores.logprobs.values[bad] == 0).all()
    (gradient,) = torch.autograd.grad(scores.logprobs.values.sum(), case.logits)
    assert torch.isfinite(gradient).all()
    assert (gradient[case.place(3, 3)] == 0).all()


@pytest.mark.parametrize("support", [True, False])
def test_logits_that_score_nothing_may_hold_nan(support, device):
    case = Case("bshd", device)
    used = {
        case.place(i, length - response + r - 1)
        for i, (length, response) in enumerate(zip(LENGTHS, RESPONSES, strict=True))
        for r in range(response)
    }
    with torch.no_grad():
        for b, s in np.ndindex(*case.logits.shape[:2]):
            if (b, s) not in used:
                case.logits[b, s] = torch.nan
    given = {} if support else {"response_lengths": RESPONSES}
    scores = score_microbatch(
        case.logits, case.layout, case.token_ids, case.packed_support if support else None, **given
    )
    assert torch.isfinite(scores.logprobs.values).all()
    (gradient,) = torch.autograd.grad(scores.logprobs.values.sum(), case.logits)
    assert torch.isfinite(gradient).all()


def test_a_microbatch_without_responses_scores_nothing(device):
    layout = TokenLayout.build([3, 2], device=device)
    tokens = PackedTensor.from_lengths(torch.zeros(5, dtype=torch.int64, device=device), [3, 2])
    support = torch.empty(0, WIDTH, dtype=torch.int32, device=device)
    logits = torch.zeros(1, 5, VOCAB, device=device, requires_grad=True)
    scores = score_microbatch(logits, layout, tokens, PackedTensor.from_lengths(support, [0, 0]))
    assert scores.logprobs.lengths == (0, 0)
    scores.logprobs.values.sum().backward()
    assert (logits.grad == 0).all()


CASE = Case("thd", "cpu")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": CASE.logits[:, 1:]}, ValueError, "output must be"),
        ({"logits": CASE.logits[0, 1:]}, ValueError, r"logits must be \[32, V\]"),
        ({"support": None}, ValueError, "response_lengths must be given"),
        (
            {"response_lengths": [3, 4, 1, 4]},
            ValueError,
            "of trajectory 2 has 0 rows for 1 response tokens",
        ),
        ({"response_lengths": [3, 4], "support": None}, ValueError, "2 responses for 4"),
        ({"response_lengths": [3, 4]}, ValueError, "2 responses for 4 trajectories"),
        ({"temperature": 0}, ValueError, "temperature must be finite and > 0, got 0"),
        ({"temperature": torch.ones(32)}, TypeError, "temperature must be a number, got Tensor"),
        (
            {"logits": CASE.logits.to("meta"), "support": None, "response_lengths": RESPONSES},
            ValueError,
            "layout is on cpu, logits are on meta",
        ),
        (
            {"token_ids": PackedTensor.from_lengths(torch.arange(24, device="meta"), LENGTHS)},
            ValueError,
            "token_ids is on meta, logits are on cpu",
        ),
        (
            {"response_lengths": [3, 4, 4, 4], "support": None},
            ValueError,
            "trajectory 2 is 4 of 4 tokens",
        ),
        (
            {"token_ids": PackedTensor.from_lengths(torch.arange(24), [6, 9, 5, 4])},
            ValueError,
            "token_ids of trajectory 2 has 5 rows for 4 tokens",
        ),
        (
            {"token_ids": PackedTensor.from_lengths(torch.arange(24).int(), LENGTHS)},
            TypeError,
            "token_ids must be int64",
        ),
        (
            {"appended": CASE.masks((1, 6), (1, 8))},
            ValueError,
            "appended of trajectory 1: tokens 6 and 8 both have loss",
        ),
        (
            {"appended": CASE.masks((3, 0))},
            ValueError,
            "trajectory 3: token 0 is not one of its 4 response",
        ),
        ({"appended": [None]}, ValueError, "appended has 1 entries for 4 trajectories"),
        (
            {"loss_masks": [None, np.ones(3, bool), None, None]},
            ValueError,
            r"loss_masks of trajectory 1 must be \[9\], one a token, got \[3\]",
        ),
        (
            {"loss_masks": [None, None, [0, 1, 1, 2], None]},
            TypeError,
            r"loss_masks of trajectory 2 must be bool \(or 0 and 1\), got int64",
        ),
        (
            {"loss_masks": [[[0], [1, 1]], None, None, None]},
            ValueError,
            r"loss_masks of trajectory 0 must be \[6\], one a token",
        ),
        (
            {"appended": [None, torch.ones(9, device="meta"), None, None]},
            TypeError,
            "appended of trajectory 1 must be on the host, not on meta",
        ),
        (
            {"appended": torch.ones(4, 9, device="meta")},
            TypeError,
            "appended must be on the host, not on meta",
        ),
        ({"loss_masks": 1}, TypeError, "loss_masks must be a sequence of one mask a trajectory"),
        (
            {"support": PackedTensor.from_lengths(torch.zeros(11, WIDTH), RESPONSES)},
            TypeError,
            "rollout_sample_support must be int32 or int64, got torch.float32",
        ),
        (
            {"support": PackedTensor.from_lengths(torch.zeros(11).int(), RESPONSES)},
            ValueError,
            r"rollout_sample_support must be \[N, C\], got \[11\]",
        ),
        (
            {"support": CASE.packed_support.values},
            TypeError,
            "rollout_sample_support must be a PackedTensor, a PackedRagged or None, got Tensor",
        ),
        (
            {"support": CASE.packed_support.to("meta")},
            ValueError,
            "rollout_sample_support is on meta, logits are on cpu; it must be there or on the CPU",
        ),
        (
            {"response_lengths": [3, 4, 5, 4], "support": None, "loss_masks": CASE.masks((0, 5))},
            ValueError,
            "trajectory 2 is 5 of 4 tokens",
        ),
        (
            {
                "support": PackedTensor.from_lengths(
                    torch.full((16, WIDTH), -1).int(), [3, 4, 5, 4]
                ),
                "loss_masks": CASE.masks((2, 3)),
            },
            ValueError,
            "trajectory 2 is 5 of 4 tokens",
        ),
        (
            {
                "support": PackedTensor.from_lengths(torch.zeros(11).int(), RESPONSES),
                "loss_masks": CASE.masks((0, 5)),
            },
            ValueError,
            r"rollout_sample_support must be \[N, C\], got \[11\]",
        ),
        ({"loss_masks": torch.tensor(1.0)}, TypeError, "loss_masks must be a sequence of one"),
        (
            {"loss_masks": [None, None, torch.full((4,), 0.5).bfloat16(), None]},
            TypeError,
            r"loss_masks of trajectory 2 must be bool \(or 0 and 1\)",
        ),
        (
            {"loss_masks": [None, None, torch.ones(4).to_sparse(), None]},
            TypeError,
            "loss_masks of trajectory 2 must be dense",
        ),
        (
            {"loss_masks": [None, None, [torch.ones((), requires_grad=True)] * 4, None]},
            TypeError,
            "loss_masks of trajectory 2 must be one host array or list of numbers",
        ),
        (
            {"loss_masks": [None, None, [torch.ones((), device="meta")] * 4, None]},
            TypeError,
            "loss_masks of trajectory 2 must be one host array or list of numbers",
        ),
        (
            {"loss_masks": [None, None, list("1111"), None]},
            TypeError,
            r"loss_masks of trajectory 2 must be bool \(or 0 and 1\), got <U1",
        ),
        (
            {"loss_masks": torch.nested.nested_tensor([torch.ones(n) for n in LENGTHS])},
            TypeError,
            "loss_masks must be a sequence of one mask a trajectory",
        ),
        (
            {"loss_masks": PackedTensor.from_lengths(torch.ones(24), LENGTHS)},
            TypeError,
            "loss_masks must be a sequence of one mask a trajectory, got PackedTensor",
        ),
        ({"vocab_size": VOCAB + 1}, ValueError, "vocab_size must be from 1 to the 40 columns"),
        ({"vocab_size": "40"}, TypeError, "vocab_size must be an int, got str"),
        ({"logits": None}, TypeError, "logits must be a floating-point tensor, got NoneType"),
        ({"logits": CASE.logits.long()}, TypeError, "logits must be .*, got torch.int64"),
        ({"layout": None}, TypeError, "layout must be a TokenLayout, got NoneType"),
        ({"token_ids": None}, TypeError, "token_ids must be a PackedTensor or a tensor"),
    ],
)
def test_rejects(change, error, message):
    given = {
        "logits": CASE.logits,
        "layout": CASE.layout,
        "token_ids": CASE.token_ids,
        "support": CASE.packed_support,
    } | change
    with pytest.raises(error, match=rf"^(score_microbatch|TokenLayout\.\w+): .*{message}"):
        score_microbatch(**given)


def test_rejects_a_trained_token_without_candidates():
    case = Case("thd", "cpu")
    case.support[1][2] = -1
    with pytest.raises(ValueError, match="trajectory 1 has no candidate for token 7"):
        score_microbatch(
            case.logits,
            case.layout,
            case.token_ids,
            case.packed_support,
            loss_masks=case.masks((1, 6), (1, 7)),
        )
