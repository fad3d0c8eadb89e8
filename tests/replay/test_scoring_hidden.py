"""score_microbatch from hidden states and the LM head, on one rank.

Oracle: the NumPy loops of ``test_scoring.py`` over logits made in float64 with NumPy; gradients of
hidden states and weight are theirs by the chain rule. Ranks: ``test_scoring_ranks.py``.
"""

import numpy as np
import pytest
import torch

from packhorse.kernels.support import SAMPLED_OUTSIDE
from packhorse.packed.ragged import PackedRagged
from packhorse.replay.layout import TokenLayout
from packhorse.replay.scoring import SCORED_FULL, LmHead, _score_rows, score_microbatch
from packhorse.replay.scoring_sources import HiddenStates
from tests.conftest import INTERPRET
from tests.replay.test_scoring import LENGTHS, RESPONSES, VOCAB, Case, score_loop

HIDDEN_SIZE = 8
F32, F64 = torch.float32, torch.float64


class HeadCase(Case):
    """``Case`` whose logits are those of random hidden states and an LM head."""

    def __init__(self, format, device="cpu", dtype=F64, softcap=None, bias=True):
        super().__init__(format, device, dtype)
        rng = np.random.default_rng(5)

        def leaf(*shape):
            return torch.tensor(
                rng.normal(0, 1, shape), dtype=dtype, device=device, requires_grad=True
            )

        self.hidden = leaf(*self.logits.shape[:2], HIDDEN_SIZE)
        self.weight, self.softcap = leaf(VOCAB, HIDDEN_SIZE), softcap
        self.bias = leaf(VOCAB) if bias else None
        h, w, b = (None if x is None else self.array(x) for x in self.inputs)
        raw = h @ w.T + (0 if b is None else b)
        self.slope = np.ones_like(raw)
        if softcap is not None:
            self.slope = 1 - np.tanh(raw / softcap) ** 2
            raw = softcap * np.tanh(raw / softcap)
        self.logits = torch.tensor(raw)

    @property
    def inputs(self):
        return [self.hidden, self.weight, self.bias]

    @staticmethod
    def array(x) -> np.ndarray:
        return x.detach().cpu().double().numpy()

    def head(self, **options) -> LmHead:
        return LmHead(self.weight, self.bias, softcap=self.softcap, **options)

    def assert_scores(self, scores, expected, tolerance, main_grad=None):
        logprobs, _, gradient = expected
        values = scores.logprobs.values
        np.testing.assert_allclose(self.array(values), logprobs, rtol=0, atol=tolerance)
        weights = torch.arange(1, len(logprobs) + 1, device=values.device)
        inputs = [x for x in self.inputs if x is not None]
        grads = torch.autograd.grad((values * weights).sum(), inputs, allow_unused=True)
        d_raw = gradient * self.slope
        h, w = self.array(self.hidden), self.array(self.weight)
        wanted = [d_raw @ w, np.einsum("btv,bth->vh", d_raw, h), d_raw.sum((0, 1))]
        actual = list(grads)
        if main_grad is not None:
            assert actual[1] is None
            actual[1] = main_grad
        for value, of_loops in zip(actual, wanted, strict=False):
            bound = tolerance * max(1.0, float(np.abs(of_loops).max()))
            np.testing.assert_allclose(self.array(value), of_loops, rtol=0, atol=bound)


def assert_entropy(case, scores, entropies, tolerance):
    np.testing.assert_allclose(case.array(scores.entropy.values), entropies, rtol=0, atol=tolerance)


# few shapes: the interpreter runs each launch in some milliseconds
SETTINGS = [(F32, 1e-5)] if INTERPRET else [(F64, 1e-11), (F32, 2e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["one width", "ragged", "on the host"])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_scores_over_supports_match_loops(format, kind, dtype, tolerance, device):
    case = HeadCase(format, device, dtype, softcap=4.0)
    support = case.packed_support
    if kind != "one width":
        support = support.to("cpu")
    if kind == "ragged":
        support = PackedRagged.from_padded(support).to(device)
    main_grad = torch.zeros_like(case.weight)
    scores = score_microbatch(
        case.hidden,
        case.layout,
        case.token_ids,
        support,
        temperature=0.7,
        lm_head=case.head(main_grad=main_grad),
    )
    expected = score_loop(case, 0.7)
    case.assert_scores(scores, expected, tolerance, main_grad)
    assert_entropy(case, scores, expected[1], tolerance)
    assert scores.counts.tolist() == [sum(RESPONSES), 0, 0, 0, 0, 0]


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_scores_over_the_vocabulary_match_loops_and_have_an_entropy(format, device):
    case = HeadCase(format, device)
    scores = score_microbatch(
        case.hidden,
        case.layout,
        case.token_ids,
        response_lengths=RESPONSES,
        temperature=0.7,
        lm_head=case.head(),
    )
    expected = score_loop(case, 0.7, support=False)
    case.assert_scores(scores, expected, 1e-11)
    z = case.logits.numpy() / 0.7
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    entropies = -(np.exp(log_p) * log_p).sum(-1)
    places = [
        case.place(i, length - response + r - 1)
        for i, (length, response) in enumerate(zip(LENGTHS, RESPONSES, strict=True))
        for r in range(response)
    ]
    assert_entropy(case, scores, [entropies[place] for place in places], 1e-11)
    assert scores.entropy.requires_grad
    assert scores.counts.tolist() == [0, 0, 0, 0, 0, sum(RESPONSES)]


@pytest.mark.parametrize("scored_from", ["hidden states", "logits"])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_appended_tokens_and_cut_supports_are_scored_over_the_vocabulary(
    format, scored_from, device
):
    case = HeadCase(format, device)
    appended, cut = [(0, 5), (3, 4)], [(1, 6), (1, 7), (3, 2)]
    case.support[0][2] = -1
    hidden = scored_from == "hidden states"
    scores = score_microbatch(
        case.hidden if hidden else case.logits.to(device).requires_grad_(),
        case.layout,
        case.token_ids,
        case.packed_support,
        temperature=0.7,
        appended=case.masks(*appended),
        cut=case.masks(*cut),
        lm_head=case.head() if hidden else None,
    )
    expected = score_loop(case, 0.7, full=appended + cut)
    if hidden:
        case.assert_scores(scores, expected, 1e-11)
    else:
        np.testing.assert_allclose(case.array(scores.logprobs.values), expected[0], atol=1e-11)
    assert_entropy(case, scores, expected[1], 1e-11)
    status = scores.status.values.tolist()
    assert [i for i, s in enumerate(status) if s == SCORED_FULL] == [2, 4, 5, 8, 10]
    assert scores.counts.tolist() == [sum(RESPONSES) - 5, 0, 0, 0, 0, 5]


def test_a_cut_token_without_loss_keeps_its_support(device):
    case = HeadCase("thd", device)
    scores = score_microbatch(
        case.hidden,
        case.layout,
        case.token_ids,
        case.packed_support,
        cut=case.masks((1, 6), (1, 7)),
        loss_masks=case.masks((1, 7), (3, 2)),
        lm_head=case.head(),
    )
    case.assert_scores(scores, score_loop(case, 1.0, full=[(1, 7)]), 1e-11)


@pytest.mark.parametrize("support", [True, False])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_a_batch_of_the_same_scores_says_where_they_are(format, support, device):
    case = HeadCase(format, device)
    case.support[1][0] = -1
    scores = score_microbatch(
        case.hidden,
        case.layout,
        case.token_ids,
        case.packed_support if support else None,
        response_lengths=RESPONSES,
        lm_head=case.head(),
    )
    assert scores.dense_logprobs.shape == (len(LENGTHS), 10)
    expected = torch.zeros(3, len(LENGTHS), 10, dtype=F64)
    row = 0
    for i, (length, response) in enumerate(zip(LENGTHS, RESPONSES, strict=True)):
        for r in range(response):
            column = 11 - length + length - response + r - 1
            expected[0, i, column] = scores.logprobs.values[row]
            expected[1, i, column] = scores.entropy.values[row]
            expected[2, i, column] = scores.status.values[row] in (0, SCORED_FULL)
            row += 1
    assert torch.equal(scores.dense_logprobs.cpu(), expected[0])
    assert torch.equal(scores.dense_entropy.cpu(), expected[1])
    assert torch.equal(scores.valid.cpu(), expected[2].bool())
    assert scores.valid.sum() == sum(RESPONSES) - (1 if support else 0)
    (packed,) = torch.autograd.grad(scores.logprobs.values.sum(), case.hidden, retain_graph=True)
    (dense,) = torch.autograd.grad(scores.dense_logprobs.sum(), case.hidden)
    torch.testing.assert_close(dense, packed)


def test_hidden_states_in_layout_order_score_alike(device):
    case = HeadCase("bshd", device)
    given = case.layout, case.token_ids, case.packed_support
    flat = case.layout.from_model(case.hidden)
    ours, models = (score_microbatch(x, *given, lm_head=case.head()) for x in (flat, case.hidden))
    assert torch.equal(ours.logprobs.values, models.logprobs.values)


@pytest.mark.parametrize("support", [True, False])
def test_hidden_states_that_score_nothing_may_hold_nan(support, device):
    case = HeadCase("bshd", device)
    used = {
        case.place(i, length - response + r - 1)
        for i, (length, response) in enumerate(zip(LENGTHS, RESPONSES, strict=True))
        for r in range(response)
    }
    with torch.no_grad():
        for place in np.ndindex(*case.hidden.shape[:2]):
            if place not in used:
                case.hidden[place] = torch.nan
    scores = score_microbatch(
        case.hidden,
        case.layout,
        case.token_ids,
        case.packed_support if support else None,
        response_lengths=RESPONSES,
        appended=case.masks((0, 5)) if support else None,
        lm_head=case.head(),
    )
    assert torch.isfinite(scores.logprobs.values).all()
    for grad in torch.autograd.grad(scores.logprobs.values.sum(), case.inputs):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("held", [float("nan"), "an id outside the vocabulary"])
def test_slots_beside_many_that_are_scored_over_the_vocabulary_add_nothing(held, device):
    """Of a context-parallel rank, on which fewer slots stand than tokens are scored so."""
    layout = TokenLayout.build([8], cp_size=2, device=device)
    hidden, weight = (torch.randn(rows, 6, device=device) for rows in (4, 9))
    sampled = torch.tensor([1, 2, 3, 4], device=device)
    row_ids = torch.tensor([0, -1, 5, 6], device=device)
    if isinstance(held, str):
        sampled[1] = 9
    else:
        hidden[1] = held
    hidden.requires_grad_(), weight.requires_grad_()
    source = HiddenStates(hidden, layout, LmHead(weight), 1.0, None)
    logprobs, entropy = _score_rows(source, layout, sampled, row_ids, 7)
    (logprobs + entropy)[row_ids >= 0].sum().backward()
    assert logprobs[1] == 0
    assert not hidden.grad[1].any()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("over", ["the vocabulary", "the vocabulary, being cut", "its support"])
@pytest.mark.parametrize("scored_from", ["hidden states", "logits"])
def test_a_negative_token_is_reported_and_no_token_of_probability_1(scored_from, over, device):
    case = HeadCase("thd", device)
    place = 1, LENGTHS[1] - RESPONSES[1]
    case.tokens[1][place[1]] = -100  # as a label of a token without loss
    given = {"layout": case.layout, "token_ids": case.token_ids}
    if scored_from == "hidden states":
        given |= {"logits": case.hidden, "lm_head": case.head()}
    else:
        given |= {"logits": case.logits.to(device)}
    if over == "the vocabulary":
        scores = score_microbatch(**given, response_lengths=RESPONSES)
    else:
        cut = case.masks(place) if "cut" in over else None
        scores = score_microbatch(**given, support=case.packed_support, cut=cut)
    row = RESPONSES[0]
    assert (scores.status.values == SAMPLED_OUTSIDE).nonzero().tolist() == [[row]]
    assert scores.logprobs.values[row] == 0
    assert int(scores.valid.sum()) == sum(RESPONSES) - 1
    if scored_from == "hidden states":
        full = [place] if "cut" in over else ()
        expected = score_loop(case, 1.0, full, support=over != "the vocabulary")
        case.assert_scores(scores, expected, 1e-11)


def test_policy_and_reference_score_by_the_same_call(device):
    """A frozen head and ``no_grad`` give the same numbers, bit for bit, and no graph."""
    case = HeadCase("thd", device)
    given = case.layout, case.token_ids, case.packed_support
    policy = score_microbatch(case.hidden, *given, lm_head=case.head())
    with torch.no_grad():
        old = score_microbatch(case.hidden, *given, lm_head=case.head())
    frozen = LmHead(case.weight.detach(), case.bias.detach())
    reference = score_microbatch(case.hidden.detach(), *given, lm_head=frozen)
    for other in (old, reference):
        assert torch.equal(other.logprobs.values, policy.logprobs.values)
        assert not other.logprobs.requires_grad


@pytest.mark.parametrize("support", [True, False], ids=["support", "vocabulary"])
@pytest.mark.parametrize("source", ["hidden states", "logits"])
def test_nan_at_a_scored_token_that_the_loss_masks_is_part_of_no_gradient(support, source, device):
    case = HeadCase("thd", device)
    with torch.no_grad():
        case.hidden[case.place(1, LENGTHS[1] - RESPONSES[1] - 1)] = float("nan")
    over = {"support": case.packed_support} if support else {"response_lengths": RESPONSES}
    if source == "logits":
        logits = (case.hidden.detach() @ case.weight.detach().T).requires_grad_()
        scores = score_microbatch(logits, case.layout, case.token_ids, **over)
    else:
        over["lm_head"] = case.head()
        scores = score_microbatch(case.hidden, case.layout, case.token_ids, **over)
    mask = torch.arange(sum(RESPONSES), device=device) != RESPONSES[0]
    assert scores.logprobs.values.isnan().tolist() == (~mask).tolist()
    loss = torch.where(mask, scores.logprobs.values, 0.0).sum()
    assert loss.isfinite()
    loss.backward()
    leaves = [logits] if source == "logits" else [case.weight, case.hidden]
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert all(leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("tokens", ["packed", "dense"])
def test_an_old_policy_scored_in_inference_mode_leaves_the_layout_to_the_policy(tokens, device):
    case = HeadCase("thd", device)
    token_ids = case.token_ids
    if tokens == "dense":
        token_ids = torch.zeros(len(LENGTHS), case.layout.batch_width, dtype=torch.int64)
        for row, column, ids in zip(token_ids, case.layout.first_columns, case.tokens, strict=True):
            row[column : column + len(ids)] = torch.from_numpy(ids)
        token_ids = token_ids.to(device)

    def scores():
        return score_microbatch(
            case.hidden, case.layout, token_ids, case.packed_support, lm_head=case.head()
        )

    with torch.inference_mode():
        old = scores().logprobs.values
    policy = scores()
    assert torch.equal(policy.logprobs.values, old)
    case.assert_scores(policy, score_loop(case, 1.0), 1e-11)


def test_a_microbatch_without_responses_scores_nothing(device):
    case = HeadCase("thd", device)
    layout = TokenLayout.build(LENGTHS, tp_size=4, device=device)
    scores = score_microbatch(
        case.hidden, layout, case.token_ids, response_lengths=[0] * 4, lm_head=case.head()
    )
    assert scores.logprobs.lengths == (0,) * 4
    scores.logprobs.values.sum().backward()
    assert not case.hidden.grad.any()
    assert not scores.valid.any()


CASE = HeadCase("thd")


@pytest.mark.parametrize(
    ("change", "head", "error", "message"),
    [
        ({}, {"weight": CASE.weight[:, 1:]}, ValueError, r"weight must be \[V, H\]"),
        ({}, {"weight": CASE.weight.float()}, TypeError, "weight is torch.float32, hidden"),
        ({}, {"softcap": -1}, ValueError, "softcap must be finite and > 0"),
        ({}, {"main_grad": torch.zeros(3, 8)}, TypeError, "main_grad must be torch.float64"),
        ({}, {"vocab_start": 3}, ValueError, "vocab_start=3, but weight has ids 0 to 39"),
        ({}, {"sequence_parallel": True}, ValueError, "is sequence_parallel and has no group"),
        ({"vocab_size": 41}, {}, ValueError, "vocab_size=41 and vocab_start=0"),
        ({"temperature": 0}, {}, ValueError, "temperature must be finite and > 0"),
        # one a token would fit the slots over their supports, and not those over the vocabulary
        ({"temperature": torch.ones(32).double()}, {}, TypeError, "must be a number, got Tensor"),
        (
            {"logits": CASE.hidden.to("meta")},
            {"weight": CASE.weight.to("meta")},
            ValueError,
            "layout is on cpu, hidden states are on meta",
        ),
        ({"logits": CASE.hidden[:, 1:]}, {}, ValueError, r"hidden states must be \[32, H\]"),
        ({"logits": CASE.hidden.long()}, {}, TypeError, "hidden states must be a floating"),
        ({"lm_head": CASE.weight}, {}, TypeError, "lm_head must be an LmHead, got Tensor"),
        ({"cut": CASE.masks((1, 2))}, {}, ValueError, "cut of trajectory 1: token 2 is not one"),
        ({"cut": [None]}, {}, ValueError, "cut has 1 entries for 4 trajectories"),
        (
            {"support": CASE.packed_support.to("meta")},
            {},
            ValueError,
            "rollout_sample_support is on meta, hidden states are on cpu",
        ),
    ],
    ids=str,
)
def test_rejects(change, head, error, message):
    given = {
        "logits": CASE.hidden,
        "layout": CASE.layout,
        "token_ids": CASE.token_ids,
        "support": CASE.packed_support,
        "lm_head": LmHead(**{"weight": CASE.weight, **head}),
    }
    with pytest.raises(error, match=f"^score_microbatch: .*{message}"):
        score_microbatch(**{**given, **change})


def test_a_ragged_support_without_a_row_for_a_token_with_loss_is_refused():
    case = HeadCase("thd")
    case.support[1][2] = -1
    ragged = PackedRagged.from_padded(case.packed_support)
    with pytest.raises(ValueError, match="trajectory 1 has no candidate for token 7"):
        score_microbatch(
            case.hidden,
            case.layout,
            case.token_ids,
            ragged,
            loss_masks=case.masks((1, 7)),
            lm_head=case.head(),
        )
