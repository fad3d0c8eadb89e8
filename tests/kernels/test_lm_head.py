"""lm_head_support_logprobs against full logits in float64: scores, statuses, gradients.

The oracle makes every logit, masks those of non-members and lets autograd differentiate a dense
log-softmax; it shares no code with the package.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.kernels import lm_head_members, members
from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.lm_head_members import pair_rows
from packhorse.kernels.support import support_logprobs
from packhorse.testing import assert_within_budget
from tests.conftest import INTERPRET

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
OK, MISSING, INVALID, OUTSIDE, IMPOSSIBLE = range(5)


def draw(num_tokens, hidden, vocab, width, *, dtype=BF16, device="cpu", seed=0):
    """hidden [T, H], weight [V, H], ids [T, C] of every kind, sampled [T]."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype)
    # few popular ids, as a sampler's are: some segments of the weight's gradient are long
    popular = torch.rand(num_tokens, width, generator=generator) ** 3
    ids = (popular * (vocab + 2)).int() - 1
    sampled = ids[:, 0].long()
    if width:
        sampled[0], ids[0] = vocab // 2, -1  # an observation
    if num_tokens > 3 and width:
        ids[1] = vocab + 7  # nothing inside the vocabulary
        sampled[2] = (ids[2].long().max() + 1) % vocab  # outside, mostly
        ids[3], sampled[3] = -1, 0
        ids[3, -1] = 0  # a singleton
    return [x.to(device) for x in (states, weight, ids, sampled)]


def members_of(ids, vocab):
    """[T, V] bool, by a loop."""
    mask = torch.zeros(ids.shape[0], vocab, dtype=torch.bool)
    for row, named in enumerate(ids.tolist()):
        for token in named:
            if 0 <= token < vocab:
                mask[row, token] = True
    return mask.to(ids.device)


def oracle(states, weight, ids, sampled, *, bias=None, temperature=1.0, softcap=None, vocab=None):
    """(logprobs, entropy, scored) in the dtype of ``states``, differentiable."""
    logits = states @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scale = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    mask = members_of(ids, weight.shape[0] if vocab is None else vocab)
    mask = torch.nn.functional.pad(mask, (0, weight.shape[0] - mask.shape[1]))
    inside = (sampled >= 0) & (sampled < weight.shape[0])
    target = torch.where(inside, sampled, 0)
    scored = inside & mask.gather(1, target[:, None]).squeeze(1)
    full = torch.where(scored[:, None], mask, torch.ones_like(mask))  # no NaN for rows without one
    logp = (logits / scale).masked_fill(~full, float("-inf")).log_softmax(1)
    chosen = logp.gather(1, target[:, None]).squeeze(1)
    entropy = -(logp.exp() * torch.where(full, logp, 0.0)).sum(1)
    zero = torch.zeros_like(chosen)
    return torch.where(scored, chosen, zero), torch.where(scored, entropy, zero), scored


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def in_float64(states, weight, ids, sampled, grads, **options):
    """The oracle's scores and the gradients of ``states`` and ``weight`` (and ``bias``)."""
    given = [states, weight, *([options["bias"]] if options.get("bias") is not None else [])]
    wide = leaves(*(x.double() for x in given))
    if len(wide) == 3:
        options["bias"] = wide[2]
    logprobs, entropy, scored = oracle(*wide[:2], ids, sampled, **options)
    (logprobs * grads[0].double() + entropy * grads[1].double()).sum().backward()
    return logprobs.detach(), entropy.detach(), scored, [x.grad for x in wide]


SHAPES = [(9, 48, 11, 7)] if INTERPRET else [(70, 136, 300, 20), (33, 520, 50, 5)]


@pytest.mark.parametrize("options", ["plain", "bias", "temperature", "softcap", "padded"])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients_are_those_of_full_logits(shape, dtype, options, device):
    states, weight, ids, sampled = draw(*shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(shape[0], generator=generator).to(device) for _ in range(2)]
    extra = {
        "plain": {},
        "bias": {"bias": torch.randn(shape[2], generator=generator).to(device, dtype)},
        "temperature": {
            "temperature": (0.5 + torch.rand(shape[0], generator=generator)).to(device)
        },
        "softcap": {"softcap": 1.5, "temperature": 0.7},
        "padded": {},
    }[options]
    wide = dict(extra)
    if options == "temperature":
        wide["temperature"] = extra["temperature"].double()
    ours = dict(extra)
    if options == "padded":
        wide["vocab"], ours["vocab_size"] = shape[2] - 3, shape[2] - 3
    logprobs, entropy, scored, expected = in_float64(states, weight, ids, sampled, grads, **wide)

    inputs = leaves(states, weight, *([extra["bias"]] if options == "bias" else []))
    if options == "bias":
        ours["bias"] = inputs[2]
    scores = lm_head_support_logprobs(*inputs[:2], ids, sampled, **ours)
    assert torch.equal(scores.status == OK, scored)
    assert scores.status[0] == MISSING
    assert scores.logprobs.dtype == F32
    torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=1e-5, atol=2e-5)
    (scores.logprobs * grads[0] + scores.entropy * grads[1]).sum().backward()
    unit = torch.finfo(dtype).eps
    for leaf, wanted in zip(inputs, expected, strict=True):
        assert leaf.grad.dtype == dtype
        bound = {"rtol": unit, "atol": float(wanted.abs().max()) * max(unit / 8, 1e-5)}
        torch.testing.assert_close(leaf.grad.double(), wanted, **bound)


def test_errors_are_within_twice_those_of_float32_torch(device):
    shape = SHAPES[0]
    states, weight, ids, sampled = draw(*shape, device=device, seed=3)
    wide, _, _ = oracle(states.double(), weight.double(), ids, sampled)
    plain, _, _ = oracle(states.float(), weight.float(), ids, sampled)
    ours = lm_head_support_logprobs(states, weight, ids, sampled).logprobs
    assert_within_budget(ours, plain, wide, factor=2)


def test_a_gradient_is_added_to_main_grad_and_autograd_gets_none(device):
    states, weight, ids, sampled = draw(*SHAPES[0], device=device, seed=1)
    states, weight = leaves(states, weight)
    before = torch.randn(weight.shape, device=device)
    main_grad = before.clone()
    scores = lm_head_support_logprobs(states, weight, ids, sampled, main_grad=main_grad)
    scores.logprobs.sum().backward()
    assert weight.grad is None
    dense = leaves(weight)[0]
    lm_head_support_logprobs(states.detach(), dense, ids, sampled).logprobs.sum().backward()
    torch.testing.assert_close(main_grad - before, dense.grad.float(), rtol=1e-2, atol=1e-3)
    named = members_of(ids, weight.shape[0]).any(0)
    assert torch.equal(main_grad[~named], before[~named])  # rows that nobody named are not touched
    untouched = main_grad.clone()
    frozen = weight.detach()
    lm_head_support_logprobs(
        states, frozen, ids, sampled, main_grad=main_grad
    ).logprobs.sum().backward()
    assert torch.equal(main_grad, untouched)


@pytest.mark.parametrize(("chunk", "parts_bytes"), [(1, 1 << 20), (4, 0), (64, 1 << 20)])
def test_two_backwards_are_equal_bit_for_bit_in_any_chunking(
    chunk, parts_bytes, device, monkeypatch
):
    monkeypatch.setattr(lm_head_members, "_CHUNK", chunk)
    monkeypatch.setattr(lm_head_members, "_PARTS_BYTES", parts_bytes)
    shape = (9, 296, 11, 7) if INTERPRET else (70, 1032, 300, 20)
    states, weight, ids, sampled = draw(*shape, device=device, seed=2)
    ids[4:, 1] = 3  # one row of the weight in nearly every token
    runs = []
    for _ in range(2):
        inputs = leaves(states, weight)
        main_grad = torch.zeros(weight.shape, device=device)
        scores = lm_head_support_logprobs(*inputs, ids, sampled, main_grad=main_grad)
        (scores.logprobs + scores.entropy).sum().backward()
        runs.append((scores.logprobs.detach(), inputs[0].grad, main_grad))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    *_, expected = in_float64(states, weight, ids, sampled, [torch.ones_like(runs[0][0])] * 2)
    torch.testing.assert_close(
        runs[0][2].double(), expected[1], rtol=1e-4, atol=1e-5 * float(expected[1].abs().max())
    )


def test_the_order_of_members_does_not_matter_bit_for_bit(device):
    states, weight, ids, sampled = draw(*SHAPES[0], device=device, seed=4)
    turned = ids.flip(1).contiguous()
    for a, b in zip(
        lm_head_support_logprobs(states, weight, ids, sampled),
        lm_head_support_logprobs(states, weight, turned, sampled),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_singleton_is_exactly_zero_and_has_no_gradient(device):
    states, weight, _, _ = draw(*SHAPES[0], device=device)
    sampled = torch.arange(states.shape[0], device=device) % weight.shape[0]
    inputs = leaves(states, weight)
    scores = lm_head_support_logprobs(*inputs, sampled[:, None].int(), sampled, temperature=0.3)
    (scores.logprobs + scores.entropy).sum().backward()
    zeros = (scores.logprobs, scores.entropy, inputs[0].grad, inputs[1].grad)
    assert all(not x.any() for x in zeros)
    assert not scores.status.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_of_the_weight_that_no_member_names_are_never_part_of_a_result(bad, device):
    states, weight, ids, sampled = draw(*SHAPES[0], device=device)
    spoiled = weight.clone()
    spoiled[~members_of(ids, weight.shape[0]).any(0)] = bad
    assert not torch.equal(spoiled, weight)
    results = []
    for rows in (weight, spoiled):
        inputs = leaves(states, rows)
        scores = lm_head_support_logprobs(*inputs, ids, sampled)
        (scores.logprobs + scores.entropy).sum().backward()
        results.append((*scores, inputs[0].grad, inputs[1].grad))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean.detach(), other.detach())


def test_hidden_states_of_rows_without_a_score_may_hold_anything(device):
    states, weight, ids, sampled = draw(*SHAPES[0], device=device)
    spoiled = states.clone()
    status = lm_head_support_logprobs(states, weight, ids, sampled).status
    spoiled[status != OK] = float("nan")
    inputs = leaves(spoiled, weight)
    scores = lm_head_support_logprobs(*inputs, ids, sampled)
    (scores.logprobs + scores.entropy).sum().backward()
    assert torch.equal(scores.status, status)
    for tensor in (scores.logprobs, scores.entropy, inputs[0].grad, inputs[1].grad):
        assert tensor.isfinite().all()


def test_an_impossible_sampled_id_is_reported(device):
    states, weight, ids, sampled = draw(*SHAPES[0], dtype=F32, device=device)
    bias = torch.zeros(weight.shape[0], device=device)
    row = int((lm_head_support_logprobs(states, weight, ids, sampled).status == OK).nonzero()[-1])
    bias[sampled[row]] = float("-inf")
    scores = lm_head_support_logprobs(states, weight, ids, sampled, bias=bias)
    assert scores.status[row] == IMPOSSIBLE
    assert scores.logprobs[row] == 0


def test_strided_inputs_and_empty_ones(device):
    states, weight, ids, sampled = draw(*SHAPES[0], device=device)
    expected = lm_head_support_logprobs(states, weight, ids, sampled)
    padded = torch.randn(states.shape[0], states.shape[1] + 8, device=device).to(BF16)
    padded[:, : states.shape[1]] = states
    turned = weight.T.contiguous().T
    wide = torch.cat([ids, ids], dim=1)[:, : ids.shape[1]]
    actual = lm_head_support_logprobs(padded[:, : states.shape[1]], turned, wide, sampled)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    nothing = lm_head_support_logprobs(states[:0], weight, ids[:0], sampled[:0])
    assert [x.shape for x in nothing] == [(0,)] * 4
    inputs = leaves(states, weight)
    without = lm_head_support_logprobs(*inputs, ids[:, :0], sampled)
    without.logprobs.sum().backward()
    assert (without.status == MISSING).all()
    assert not inputs[0].grad.any()
    assert not inputs[1].grad.any()


@pytest.mark.parametrize("hidden_size", [1, 13, 33])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_odd_sizes_at_odd_addresses(hidden_size, dtype, device):
    """Rows that no access of 16 bytes divides, and wider strides than rows."""
    states, weight, ids, sampled = draw(7, hidden_size, 11, 5, dtype=dtype, device=device, seed=8)
    grads = [torch.ones(7, device=device), torch.ones(7, device=device)]
    logprobs, _, _, expected = in_float64(states, weight, ids, sampled, grads)
    inputs = []
    for tensor, before, after in ((states, 1, 2), (weight, 3, 4)):
        wide = torch.full((tensor.shape[0], before + hidden_size + after), float("nan"))
        wide = wide.to(device, dtype)
        wide[:, before : before + hidden_size] = tensor
        inputs.append(wide[:, before : before + hidden_size].requires_grad_())
    around = torch.ones(11, hidden_size + 7, device=device)
    main_grad = around[:, 2 : hidden_size + 2]
    for options in ({}, {"main_grad": main_grad}):
        for leaf in inputs:
            leaf.grad = None
        scores = lm_head_support_logprobs(*inputs, ids, sampled, **options)
        torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=1e-5, atol=2e-5)
        (scores.logprobs + scores.entropy).sum().backward()
        unit = torch.finfo(dtype).eps
        bound = {"rtol": 2 * unit, "atol": max(unit, 1e-5) * float(expected[0].abs().max())}
        torch.testing.assert_close(inputs[0].grad.double(), expected[0], **bound)
        if not options:
            bound["atol"] = max(unit, 1e-5) * float(expected[1].abs().max())
            torch.testing.assert_close(inputs[1].grad.double(), expected[1], **bound)
    torch.testing.assert_close(main_grad.double() - 1, expected[1], rtol=1e-4, atol=1e-4)
    main_grad.fill_(1)
    assert (around == 1).all()  # nothing beside it was written


@pytest.mark.skipif(INTERPRET, reason="float64 runs the reference")
def test_gradcheck(device):
    states, weight, ids, sampled = draw(6, 5, 9, 4, dtype=F64, device=device)
    bias = torch.randn(9, dtype=F64, device=device, requires_grad=True)

    def scored(states, weight, bias):
        return lm_head_support_logprobs(
            states, weight, ids, sampled, bias=bias, temperature=0.7, softcap=2.0
        )[:2]

    assert torch.autograd.gradcheck(scored, (*leaves(states, weight), bias))


@settings(max_examples=40 if not INTERPRET else 3)
@given(seed=st.integers(0, 2**20), width=st.integers(1, 9), vocab=st.integers(1, 12))
def test_any_support_is_scored_as_by_full_logits(seed, width, vocab):
    states, weight, ids, sampled = draw(6, 16, vocab, width, dtype=F32, seed=seed)
    grads = [torch.ones(6), torch.ones(6)]
    logprobs, entropy, scored, expected = in_float64(states, weight, ids, sampled, grads)
    inputs = leaves(states, weight)
    scores = lm_head_support_logprobs(*inputs, ids, sampled)
    assert torch.equal(scores.status == OK, scored)
    torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    (scores.logprobs + scores.entropy).sum().backward()
    for leaf, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(leaf.grad.double(), wanted, rtol=1e-4, atol=1e-5)


# --- how it is called -----------------------------------------------------------------------------


def test_nothing_waits_for_the_device(cuda, no_host_sync):
    states, weight, ids, sampled = draw(70, 136, 300, 20, device=cuda)
    inputs = leaves(states, weight)
    main_grad = torch.zeros(weight.shape, device=cuda)

    def step():
        scores = lm_head_support_logprobs(*inputs, ids, sampled, main_grad=main_grad)
        scores.logprobs.sum().backward()

    step()
    with no_host_sync():
        step()


def test_a_cuda_graph_replays_both_passes(cuda):
    states, weight, ids, sampled = draw(70, 136, 300, 20, device=cuda)
    static = [x.clone() for x in (states, ids, sampled)]
    leaf = weight.clone().requires_grad_()
    main_grad = torch.zeros(weight.shape, device=cuda)

    def step():
        hidden = static[0].detach().requires_grad_()
        scores = lm_head_support_logprobs(hidden, leaf, *static[1:], main_grad=main_grad)
        return scores.logprobs, *torch.autograd.grad(scores.logprobs.sum(), hidden)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = draw(70, 136, 300, 20, device=cuda, seed=9)
    for target, source in zip(static, (other[0], *other[2:]), strict=True):
        target.copy_(source)
    main_grad.zero_()
    graph.replay()
    summed = main_grad.clone()
    main_grad.zero_()
    expected = step()
    assert torch.equal(captured[0], expected[0])
    assert torch.equal(captured[1], expected[1])
    assert torch.equal(summed, main_grad)


def test_operators_pass_opcheck(device):
    states, weight, ids, sampled = draw(12, 40, 30, 5, device=device)
    ops = torch.ops.packhorse
    columns, known, _ = ops.order_support(ids, 30)
    torch.library.opcheck(ops.order_support.default, (ids, 30))
    logits = ops.project_members(states, weight, None, columns, known, 0)
    torch.library.opcheck(ops.project_members.default, (states, weight, None, columns, known, 0))
    given = (logits, columns, known, sampled, 0.7)
    torch.library.opcheck(ops.score_members.default, given)
    logprobs, entropy, _, members = ops.score_members(*given)
    given = (logprobs, entropy, columns, members, entropy, sampled, 0.7)
    torch.library.opcheck(ops.grad_members.default, given)
    grads = ops.grad_members(*given)
    torch.library.opcheck(ops.grad_hidden_of_members.default, (grads, weight, columns, known, 0))
    out = torch.zeros(weight.shape, device=device)
    pairs = pair_rows(grads, columns, 0, 30).sort(stable=True)
    torch.library.opcheck(ops.add_weight_gradient.default, (out, grads, states, *pairs, 5))


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 5, 20, 33, 300])
def test_members_of_logits_are_those_of_the_parts(width, dtype, device):
    """One launch is ``order_support``, a gather and ``score_members``; its backward likewise."""
    vocab = 50
    logits, _, _, _ = draw(9, vocab, 4, 2, device=device, seed=3)
    generator = torch.Generator().manual_seed(width)
    ids = torch.randint(-2, vocab + 3, (9, width), generator=generator, dtype=torch.int32)
    ids[0], ids[1], ids[2, 0] = -1, vocab + 1, 7
    sampled = ids[:, 0].long().clamp(0, vocab - 1).to(device)
    logits, ids = logits.detach().to(dtype), ids.to(device)
    logits[3, 5:20] = -float("inf")
    ops = torch.ops.packhorse
    logprobs, entropy, status, ignored, columns, members = ops.score_logits(
        logits, ids, sampled, vocab, 0.7
    )
    torch.library.opcheck(ops.score_logits.default, (logits, ids, sampled, vocab, 0.7))
    wanted, known, num_ignored = ops.order_support(ids, vocab)
    parts = logits.gather(1, wanted.clamp(min=0).long()).to(logprobs.dtype)[None]
    scored = ops.score_members(parts, wanted, known, sampled, 0.7)
    for found, expected in zip(
        (columns, ignored, logprobs, entropy, status, members),
        (wanted, num_ignored, *scored),
        strict=True,
    ):
        assert found.dtype == expected.dtype
        if found.dtype.is_floating_point:  # a compiler may join other products and sums in each
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
        else:
            assert torch.equal(found, expected)
    assert (status == 0).any()
    assert (status != 0).any()
    given = (torch.ones_like(logprobs), entropy, columns, members, entropy, sampled, 0.7)
    out = torch.zeros_like(logits)
    ops.put_logit_grads(out, *given)
    grads = ops.grad_members(*given).to(dtype)
    placed = torch.zeros_like(logits).scatter_add_(1, columns.clamp(min=0).long(), grads)
    torch.testing.assert_close(out, placed)
    assert torch.equal(out == 0, placed == 0)
    torch.library.opcheck(ops.put_logit_grads.default, (torch.zeros_like(logits), *given))


def test_logits_of_shards_add_up_to_the_whole_bit_for_bit(device):
    """What ranks do, one after another: each shard's logits, their sum, each shard's gradients."""
    states, weight, ids, _ = draw(*SHAPES[0], dtype=F32, device=device, seed=6)
    ops = torch.ops.packhorse
    vocab = weight.shape[0]
    columns, known, _ = ops.order_support(ids, vocab)
    cuts = [0, vocab // 3, vocab // 3 + 1, vocab]
    shards = [(weight[a:b].contiguous(), a) for a, b in pairwise(cuts)]
    whole = ops.project_members(states, weight, None, columns, known, 0).sum(0)
    parts = [ops.project_members(states, w, None, columns, known, a).sum(0) for w, a in shards]
    assert torch.equal(sum(parts), whole)
    grads = torch.randn(columns.shape, device=device).masked_fill(columns < 0, 0)
    out = torch.zeros(weight.shape, device=device)
    width = columns.shape[1]
    pairs = pair_rows(grads, columns, 0, vocab).sort(stable=True)
    ops.add_weight_gradient(out, grads, states, *pairs, width)
    for w, a in shards:
        part = torch.zeros(w.shape, device=device)
        pairs = pair_rows(grads, columns, a, w.shape[0]).sort(stable=True)
        ops.add_weight_gradient(part, grads, states, *pairs, width)
        torch.testing.assert_close(part, out[a : a + w.shape[0]])  # chunks end elsewhere
    summed = sum(ops.grad_hidden_of_members(grads, w, columns, known, a) for w, a in shards)
    torch.testing.assert_close(summed, ops.grad_hidden_of_members(grads, weight, columns, known, 0))


def test_parts_are_added_in_their_order_by_ranks_as_by_one(device):
    """A rank adds the parts before the all-reduce, one rank alone while it scores."""
    _, weight, ids, sampled = draw(*SHAPES[0], device=device)
    columns, known, _ = torch.ops.packhorse.order_support(ids, weight.shape[0])
    generator = torch.Generator().manual_seed(7)
    parts = torch.randn(14, *columns.shape, generator=generator).to(device)
    added = members.sum_parts(parts)
    by_hand = torch.zeros_like(added)
    for part in parts:
        by_hand += part
    assert torch.equal(added, by_hand)
    scores = [
        torch.ops.packhorse.score_members(x, columns, known, sampled, 0.7)
        for x in (parts, added[None])
    ]
    for of_parts, of_sum in zip(*scores, strict=True):
        assert torch.equal(of_parts, of_sum)


def test_ids_beyond_int32_and_rows_wider_than_one_program_sorts(device):
    states, weight, _, _ = draw(6, 16, 40, 1, dtype=F32, device=device)
    for width in (2, 33, 70) if INTERPRET else (2, 33, 4096, 5000):
        generator = torch.Generator().manual_seed(width)
        ids = torch.randint(-1, 40, (6, width), generator=generator)
        ids[:, 0] = torch.arange(6)
        ids[1, 1:], ids[2, :] = 2**31, -(2**40)
        ids[3, 1] = 2**32 + 5  # 5 in its low half
        sampled = torch.arange(6)
        logprobs, _, scored = oracle(states.cpu(), weight.cpu(), ids, sampled)
        named = [[token for token in row if token != -1] for row in ids.tolist()]
        inside = [{token for token in row if 0 <= token < 40} for row in named]
        scores = lm_head_support_logprobs(states, weight, ids.to(device), sampled.to(device))
        assert scores.status[2] == INVALID
        assert torch.equal(scores.status.cpu() == OK, scored)
        torch.testing.assert_close(scores.logprobs.cpu(), logprobs, rtol=1e-5, atol=2e-5)
        ignored = [len(row) - len(kept) for row, kept in zip(named, inside, strict=True)]
        assert scores.num_ignored.tolist() == ignored


@pytest.mark.parametrize("edited", ["hidden", "weight", "sampled_ids", "temperature"])
def test_a_backward_after_an_edit_of_what_it_needs_is_refused(edited, device):
    states, weight, ids, sampled = draw(*SHAPES[0], dtype=F32, device=device)
    given = {
        "hidden": states.requires_grad_() * 1,
        "weight": weight.requires_grad_() * 1,
        "sampled_ids": sampled,
        "temperature": torch.ones(len(sampled), device=device),
    }
    scores = lm_head_support_logprobs(**given, support_ids=ids)
    with torch.no_grad():
        given[edited].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.logprobs.sum().backward()


def test_supports_may_be_edited_before_the_backward(device):
    states, weight, ids, sampled = draw(*SHAPES[0], dtype=F32, device=device)
    grads = []
    for edit in (False, True):
        inputs, support = leaves(states, weight), ids.clone()
        scores = lm_head_support_logprobs(*inputs, support, sampled)
        if edit:
            support.fill_(-1)
        scores.logprobs.sum().backward()
        grads.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_gradients_of_higher_order_and_of_forward_mode_are_refused(device):
    states, weight, ids, sampled = draw(*SHAPES[0], dtype=F32, device=device)

    def of_hidden(x):
        return lm_head_support_logprobs(x, weight, ids, sampled).logprobs

    def of_logits(x):
        return support_logprobs(x @ weight.T, ids, sampled).logprobs

    for scored in (of_hidden, of_logits):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(states, torch.ones_like(states))
            with pytest.raises(NotImplementedError, match="jvp"):
                scored(dual)
        for transformed in (
            lambda scored=scored: torch.func.jvp(scored, (states,), (states,)),
            lambda scored=scored: torch.func.grad(lambda x: scored(x).sum())(states),
        ):
            with pytest.raises(RuntimeError, match="setup_context"):
                transformed()
        leaf = leaves(states)[0]
        (grad,) = torch.autograd.grad((scored(leaf) ** 2).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_a_tied_embedding_gets_the_gradients_of_both_uses(device):
    _, weight, ids, sampled = draw(*SHAPES[0], dtype=F32, device=device)
    prompts = torch.arange(len(sampled), device=device) % weight.shape[0]
    tied = leaves(weight)[0]
    lm_head_support_logprobs(tied[prompts], tied, ids, sampled).logprobs.sum().backward()
    wide = leaves(weight.double())[0]
    oracle(wide[prompts], wide, ids, sampled)[0].sum().backward()
    torch.testing.assert_close(tied.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


def test_hooks_of_a_weight_with_main_grad_fire(device):
    """Megatron's gradient buffers count on them."""
    states, weight, ids, sampled = draw(*SHAPES[0], dtype=F32, device=device)
    leaf, fired = leaves(weight)[0], []
    node = leaf.expand_as(leaf).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: fired.append("node"))
    leaf.register_post_accumulate_grad_hook(lambda _: fired.append("leaf"))
    main_grad = torch.zeros_like(weight)
    scores = lm_head_support_logprobs(states, leaf, ids, sampled, main_grad=main_grad)
    scores.logprobs.sum().backward()
    assert sorted(fired) == ["leaf", "node"]


# --- refusals -------------------------------------------------------------------------------------

T, H, V, C = 3, 8, 10, 2


def good():
    return {
        "hidden": torch.zeros(T, H),
        "weight": torch.zeros(V, H),
        "support_ids": torch.zeros(T, C, dtype=torch.int32),
        "sampled_ids": torch.zeros(T, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"hidden": torch.zeros(T, H, dtype=torch.int32)}, TypeError, "hidden has unsupported"),
        ({"hidden": torch.zeros(T, 1, H)}, ValueError, r"hidden must be \[T, H\]"),
        ({"weight": torch.zeros(V, H).half()}, TypeError, "weight is torch.float16, hidden"),
        ({"weight": torch.zeros(V, H + 1)}, ValueError, "weight must be .* H = 8, got"),
        ({"bias": torch.zeros(V + 1)}, ValueError, r"bias must be \[V\] = \[10\]"),
        ({"support_ids": torch.zeros(T, C)}, TypeError, "support_ids must be int32 or int64"),
        ({"support_ids": torch.zeros(T + 1, C).int()}, ValueError, "support_ids must be .* T = 3"),
        ({"sampled_ids": torch.zeros(T).int()}, TypeError, "sampled_ids must be int64"),
        ({"sampled_ids": torch.zeros(T + 1).long()}, ValueError, r"sampled_ids must be \[T\]"),
        ({"weight": torch.zeros(V, H, device="meta")}, ValueError, "weight on meta, hidden on cpu"),
        ({"temperature": 0.0}, ValueError, "temperature must be finite and > 0"),
        ({"temperature": "1"}, TypeError, "temperature must be a number"),
        ({"temperature": torch.ones(T).double()}, TypeError, "temperature must be torch.float32"),
        ({"temperature": torch.ones(T + 1)}, ValueError, r"temperature must be a number or \[T\]"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and > 0, got -1.0"),
        ({"softcap": True}, TypeError, "softcap must be a number"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be from 1"),
        ({"vocab_size": 11}, ValueError, "vocab_size=11 .* weight has ids 0 to 9 and no group"),
        ({"vocab_start": 5}, ValueError, "vocab_start=5, .* no group holds others"),
        ({"vocab_start": -1}, ValueError, "vocab_start must be from 0"),
        ({"vocab_start": 1.0}, TypeError, "vocab_start must be an int"),
        ({"main_grad": torch.zeros(V, H).half()}, TypeError, "main_grad must be torch.float32"),
        ({"main_grad": torch.zeros(V, H + 1)}, ValueError, r"main_grad must be \[10, 8\]"),
        ({"main_grad": torch.zeros(H, V).T}, ValueError, "rows of unit stride"),
        ({"main_grad": torch.zeros(V, H).requires_grad_()}, ValueError, "must not require"),
        ({"main_grad": 1.0}, TypeError, "main_grad must be a tensor, got float"),
        (
            {"main_grad": torch.zeros(V, H), "weight": torch.zeros(V, H).requires_grad_() * 2},
            ValueError,
            "main_grad is for a weight that is a leaf",
        ),
        ({"temperature": torch.ones(T).requires_grad_()}, ValueError, "temperature gets no grad"),
        ({"hidden": [[0.0]]}, TypeError, "hidden must be a tensor, got list"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"bias": 0.0}, TypeError, "bias must be a tensor, got float"),
        ({"reduce_hidden_grad": 1}, TypeError, "reduce_hidden_grad must be a bool, got int"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(change, error, said):
    with pytest.raises(error, match=f"lm_head_support_logprobs: .*{said}"):
        lm_head_support_logprobs(**{**good(), **change})
