"""full_vocabulary_logprobs against a dense log-softmax in float64: scores, gradients, calls.

The oracle makes all logits at once and lets autograd differentiate them; it shares no code with the
package. Ranks of a vocabulary-parallel group: ``test_lm_head_full_ranks.py``.
"""

import pytest
import torch

from packhorse.kernels import lm_head_full
from packhorse.kernels.lm_head_full import full_vocabulary_logprobs
from packhorse.testing import assert_within_budget
from tests.conftest import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="test_vocabulary_tiles.py runs the kernels in it")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NUM_TOKENS, HIDDEN_SIZE, VOCAB = 37, 24, 90
NAN, INF = float("nan"), float("inf")


def draw(dtype, device, seed=0):
    """hidden [T, H], weight [V, H], bias [V], sampled [T] with rows that have no target."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    bias = torch.randn(VOCAB, generator=generator)
    sampled = torch.randint(VOCAB - 5, (NUM_TOKENS,), generator=generator)
    sampled[::6] = -1
    return [x.to(device, dtype) for x in (hidden, weight, bias)] + [sampled.to(device)]


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def oracle(hidden, weight, bias, sampled, *, temperature=1.0, softcap=None, vocab=VOCAB):
    logits = hidden @ weight.T + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scale = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    log_p = (logits[:, :vocab] / scale).log_softmax(1)
    has_target = sampled >= 0
    chosen = log_p.gather(1, sampled.clamp(min=0)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    return [torch.where(has_target, x, torch.zeros_like(x)) for x in (chosen, entropy)]


def with_gradients(score, hidden, weight, bias, weights, **given):
    """Scores and gradients of one loss in which each score has its own weight."""
    inputs = leaves(hidden, weight, bias)
    logprobs, entropy = score(*inputs, **given)
    loss = (logprobs * weights[0].to(logprobs)).sum() + (entropy * weights[1].to(logprobs)).sum()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)]


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "temperature a token, soft cap": {"temperature": "rows", "softcap": 1.5},
    "padded vocabulary": {"vocab": VOCAB - 5},
}


@pytest.mark.parametrize("tile", [(8192, 1 << 24), (10, 70)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, torch.float16], ids=str)
def test_scores_and_gradients_are_those_of_all_logits(dtype, name, tile, device, monkeypatch):
    monkeypatch.setattr(lm_head_full, "_TOKENS_AT_ONCE", tile[0])
    monkeypatch.setattr(lm_head_full, "_LOGITS_AT_ONCE", tile[1])
    hidden, weight, bias, sampled = draw(dtype, device)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(NUM_TOKENS, generator=generator).to(device) for _ in range(2)]
    options = dict(OPTIONS[name])
    if options.get("temperature") == "rows":
        options["temperature"] = (0.5 + torch.rand(NUM_TOKENS, generator=generator)).to(device)
    wide = dict(options)
    if isinstance(options.get("temperature"), torch.Tensor):
        wide["temperature"] = options["temperature"].double()
        if dtype == F64:
            options["temperature"] = wide["temperature"]
    if "vocab" in options:
        options["vocab_size"] = options.pop("vocab")

    def ours(hidden, weight, bias):
        return full_vocabulary_logprobs(hidden, weight, sampled, bias=bias, **options)

    actual = with_gradients(ours, hidden, weight, bias, weights)
    doubles = [x.double() for x in (hidden, weight, bias)]
    expected = with_gradients(lambda *x: oracle(*x, sampled, **wide), *doubles, weights)
    result = F64 if dtype == F64 else F32
    assert [x.dtype for x in actual] == [result, result, dtype, dtype, dtype]
    unit = torch.finfo(dtype).eps
    for value, wanted in zip(actual[:2], expected[:2], strict=True):
        bound = 1e-12 if dtype == F64 else 2e-5
        torch.testing.assert_close(value.double(), wanted, rtol=bound, atol=bound)
    for value, wanted in zip(actual[2:], expected[2:], strict=True):
        largest = float(wanted.abs().max())
        bound = {"rtol": 2 * unit, "atol": largest * (1e-12 if dtype == F64 else max(unit, 1e-5))}
        torch.testing.assert_close(value.double(), wanted, **bound)


def test_errors_are_within_twice_those_of_float32_torch(device):
    hidden, weight, bias, sampled = draw(BF16, device, seed=3)
    wide, plain = (
        oracle(*(x.to(kind) for x in (hidden, weight, bias)), sampled)[0] for kind in (F64, F32)
    )
    ours = full_vocabulary_logprobs(hidden, weight, sampled, bias=bias).logprobs
    assert_within_budget(ours, plain, wide, factor=2)


def test_gradcheck(device):
    hidden, weight, bias, sampled = draw(F64, device)
    inputs = leaves(hidden[:5], weight[:9], bias[:9])

    def scored(hidden, weight, bias):
        return tuple(
            full_vocabulary_logprobs(
                hidden, weight, sampled[:5] % 9, bias=bias, temperature=0.7, softcap=2.0
            )
        )

    assert torch.autograd.gradcheck(scored, inputs)


def test_a_gradient_is_added_to_main_grad_bit_for_bit_alike_in_two_runs(device, monkeypatch):
    monkeypatch.setattr(lm_head_full, "_LOGITS_AT_ONCE", 500)
    hidden, weight, _, sampled = draw(BF16, device, seed=1)
    before = torch.randn(weight.shape, device=device)
    runs = []
    for _ in range(2):
        leaf, head = leaves(hidden, weight)
        main_grad = before.clone()
        scores = full_vocabulary_logprobs(leaf, head, sampled, main_grad=main_grad)
        (scores.logprobs + scores.entropy).sum().backward()
        assert head.grad is None
        runs.append((scores.logprobs.detach(), leaf.grad, main_grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    dense = leaves(weight)[0]
    scores = full_vocabulary_logprobs(hidden, dense, sampled)
    (scores.logprobs + scores.entropy).sum().backward()
    torch.testing.assert_close(runs[0][2] - before, dense.grad.float(), rtol=1e-2, atol=1e-2)
    frozen = full_vocabulary_logprobs(leaf, weight, sampled, main_grad=main_grad)
    frozen.logprobs.sum().backward()
    assert torch.equal(main_grad, runs[0][2])


def test_rows_without_a_target_may_hold_anything_and_faults_show(device):
    hidden, weight, bias, sampled = draw(F32, device)
    hidden[0], sampled[0] = NAN, -1
    hidden[6], sampled[6] = INF, -100
    inputs = leaves(hidden, weight)
    scores = full_vocabulary_logprobs(*inputs, sampled)
    (scores.logprobs + scores.entropy).sum().backward()
    for x in (*scores, *(leaf.grad for leaf in inputs)):
        assert x.isfinite().all()
    assert not scores.logprobs[sampled < 0].any()
    assert not scores.entropy[sampled < 0].any()
    assert not inputs[0].grad[sampled < 0].any()

    sampled[1], sampled[2] = VOCAB, 7
    hidden[3] = NAN
    bias[7] = -INF
    leaf = leaves(hidden)[0]
    scores = full_vocabulary_logprobs(leaf, weight, sampled, bias=bias)
    assert scores.logprobs[1].isnan()
    assert scores.logprobs[2] == -INF
    assert scores.logprobs[3].isnan()
    assert scores.logprobs[4:].isfinite().all()
    assert scores.entropy[[1, 2]].isfinite().all()  # an id of probability 0 adds nothing
    (5 * scores.entropy[4:].sum() + scores.logprobs[4:].sum()).backward()
    assert leaf.grad[4:].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autocast_changes_no_product(dtype, device):
    """A trainer's autocast would make the products of float32 states bfloat16."""
    hidden, weight, bias, sampled = draw(dtype, device)
    weights = torch.randn(2, NUM_TOKENS, generator=torch.Generator().manual_seed(1)).to(device)
    given = {"sampled_ids": sampled}

    def score(hidden, weight, bias, **given):
        return full_vocabulary_logprobs(hidden, weight, bias=bias, **given)

    plain = with_gradients(score, hidden, weight, bias, weights, **given)
    with torch.autocast(device, dtype=BF16):
        inside = with_gradients(score, hidden, weight, bias, weights, **given)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


@pytest.mark.parametrize("temperature", [0.0, NAN])
def test_the_temperature_of_a_row_without_a_target_may_be_anything(temperature, device):
    hidden, weight, bias, sampled = draw(F32, device)
    inputs = leaves(hidden, weight, bias)
    temperatures = torch.full((NUM_TOKENS,), 0.7, device=device)
    temperatures[sampled < 0] = temperature
    scores = full_vocabulary_logprobs(
        *inputs[:2], sampled, bias=inputs[2], temperature=temperatures
    )
    (scores.logprobs + scores.entropy).sum().backward()
    assert all(x.isfinite().all() for x in (*scores, *(leaf.grad for leaf in inputs)))
    assert inputs[1].grad.any()


def test_a_spread_past_float32_has_a_finite_entropy(device):
    hidden = torch.tensor([[1.0], [1.0]], device=device, requires_grad=True)
    weight = torch.tensor([[3e38], [-3e38], [3e38]], device=device)
    scores = full_vocabulary_logprobs(hidden, weight, torch.tensor([0, 2], device=device))
    torch.testing.assert_close(scores.logprobs.exp(), torch.full((2,), 0.5, device=device))
    torch.testing.assert_close(scores.entropy.exp(), torch.full((2,), 2.0, device=device))


def test_no_tokens_and_strides(device):
    hidden, weight, bias, sampled = draw(F32, device)
    inputs = leaves(hidden[:0], weight)
    scores = full_vocabulary_logprobs(*inputs, sampled[:0])
    assert [x.shape for x in scores] == [(0,), (0,)]
    scores.logprobs.sum().backward()
    assert not inputs[1].grad.any()
    wide = torch.cat([hidden, hidden], 1)
    expected = full_vocabulary_logprobs(hidden, weight, sampled, bias=bias)
    actual = full_vocabulary_logprobs(
        wide[:, :HIDDEN_SIZE], weight.T.contiguous().T, sampled, bias=bias
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest result of an operator, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x._base is None:
                self.elements = max(self.elements, x.numel())
        return out


def test_logits_exist_a_tile_at_a_time(device, monkeypatch):
    monkeypatch.setattr(lm_head_full, "_LOGITS_AT_ONCE", NUM_TOKENS * 10)
    hidden, weight, _, sampled = draw(BF16, device)
    leaf, head = leaves(hidden, weight)
    main_grad = torch.zeros(weight.shape, device=device)
    with _Largest() as forward:
        scores = full_vocabulary_logprobs(leaf, head, sampled, main_grad=main_grad)
    assert forward.elements <= NUM_TOKENS * HIDDEN_SIZE  # less than all logits
    with _Largest() as backward:
        torch.autograd.grad(scores.logprobs.sum(), leaf)
    assert backward.elements == NUM_TOKENS * HIDDEN_SIZE


def test_compiles_whole(device):
    hidden, weight, bias, sampled = draw(F32, device)
    compiled = torch.compile(full_vocabulary_logprobs, fullgraph=True, backend="aot_eager")
    leaf = leaves(hidden)[0]
    actual = compiled(leaf, weight, sampled, bias=bias, temperature=0.7)
    eager = full_vocabulary_logprobs(leaf, weight, sampled, bias=bias, temperature=0.7)
    for a, b in zip(actual, eager, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(x.logprobs.sum(), leaf)[0] for x in (actual, eager)]
    torch.testing.assert_close(*grads)


def test_nothing_waits_for_the_device_and_a_cuda_graph_replays(cuda, no_host_sync):
    hidden, weight, _, sampled = draw(BF16, cuda)
    head = leaves(weight)[0]
    main_grad = torch.zeros(weight.shape, device=cuda)
    static = hidden.clone()

    def step():
        leaf = static.detach().requires_grad_()
        scores = full_vocabulary_logprobs(leaf, head, sampled, main_grad=main_grad)
        return scores.logprobs, *torch.autograd.grad(scores.logprobs.sum(), leaf)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with no_host_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    static.copy_(hidden.flip(0))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"hidden": torch.zeros(3, 8).int()}, TypeError, "hidden has unsupported dtype"),
        ({"weight": torch.zeros(10, 9)}, ValueError, "weight must be .* H = 8, got"),
        ({"sampled_ids": torch.zeros(4).long()}, ValueError, r"sampled_ids must be \[T\]"),
        ({"temperature": -1.0}, ValueError, "temperature must be finite and > 0"),
        ({"softcap": 0}, ValueError, "softcap must be finite and > 0"),
        ({"vocab_size": 11}, ValueError, "vocab_size=11 .* no group holds others"),
        ({"main_grad": torch.zeros(10, 8).half()}, TypeError, "main_grad must be torch.float32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, error, said):
    given = {
        "hidden": torch.zeros(3, 8),
        "weight": torch.zeros(10, 8),
        "sampled_ids": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(error, match=f"^full_vocabulary_logprobs: .*{said}"):
        full_vocabulary_logprobs(**{**given, **change})
