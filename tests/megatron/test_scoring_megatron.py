"""Scores from the hidden states of a Megatron model are those of its own logits, gradients too.

Oracle: the model's output layer and ``score_microbatch`` from logits, which loops hold.
"""

import pytest
import torch

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from packhorse.replay.scoring import score_microbatch
from packhorse.replay.scoring_megatron import hidden_states_of, lm_head_of

LENGTHS, RESPONSES = [7, 5], [4, 2]


@pytest.fixture(params=["own weight", "tied embedding"])
def scored(request):
    """A model, a call that runs it, and what ``score_microbatch`` takes beside its output."""
    from tests.megatron.helpers import DEVICE, VOCAB, build_model

    model = build_model(tied=request.param == "tied embedding")
    layout = TokenLayout.build(LENGTHS, format="bshd", device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator)
    support = torch.randint(VOCAB, (sum(RESPONSES), 6), generator=generator).int()
    sampled = torch.cat([tokens[3:7], tokens[10:12]])
    support[:, 3] = sampled.int()
    dense = torch.zeros(2, 7, dtype=torch.int64)
    dense[0], dense[1, 2:] = tokens[:7], tokens[7:]
    aligned = layout.align(dense.to(DEVICE), 0)
    causal = torch.ones(7, 7, dtype=torch.bool, device=DEVICE).triu(1)[None, None]

    def run():
        positions = layout.to_model(layout.position_ids())
        return model(layout.to_model(aligned), positions, causal)

    given = {
        "layout": layout,
        "token_ids": PackedTensor.from_lengths(tokens, LENGTHS).to(DEVICE),
        "temperature": 0.7,
    }
    return model, run, given, PackedTensor.from_lengths(support, RESPONSES).to(DEVICE)


def gradients(model, logprobs):
    model.zero_grad(set_to_none=True)
    (logprobs * torch.arange(1, len(logprobs) + 1, device=logprobs.device)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("over", ["support", "vocabulary"])
def test_hidden_states_score_as_the_models_logits(over, scored):
    model, run, given, support = scored
    given |= {"support": support} if over == "support" else {"response_lengths": RESPONSES}
    logits = run()
    expected = score_microbatch(logits, **given)
    wanted = gradients(model, expected.logprobs.values)
    head = lm_head_of(model)
    with hidden_states_of(model):
        hidden = run()
    assert hidden.shape[:2] == logits.shape[:2]
    assert hidden.shape[2] == head.weight.shape[1]
    scores = score_microbatch(hidden, **given, lm_head=head)
    torch.testing.assert_close(
        scores.logprobs.values, expected.logprobs.values, rtol=1e-5, atol=1e-5
    )
    for name, grad in gradients(model, scores.logprobs.values).items():
        if wanted[name] is None:
            assert grad is None
        else:
            torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-5, msg=name)
    assert torch.equal(run(), logits)  # the output layer is back


def test_main_grad_takes_the_weights_gradient(scored):
    model, run, given, support = scored
    weight = lm_head_of(model).weight
    with pytest.raises(ValueError, match=r"^lm_head_of: the output layer's weight has no"):
        lm_head_of(model, main_grad=True)
    weight.main_grad = torch.zeros_like(weight)
    with hidden_states_of(model):
        hidden = run()
    head = lm_head_of(model, main_grad=True)
    scores = score_microbatch(hidden, support=support, **given, lm_head=head)
    grads = gradients(model, scores.logprobs.values)
    assert weight.main_grad.any()
    if not model.share_embeddings_and_output_weights:
        assert grads["output_layer.weight"] is None


def test_main_grad_of_two_microbatches_in_ddp_is_what_autograd_adds(scored):
    """Of a tied embedding too: its own part comes from autograd, the LM head's does not."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model, run, given, support = scored
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config=model.config, ddp_config=settings, module=model)
    grads = []
    for main_grad in (False, True):
        ddp.zero_grad_buffer()
        for _ in range(2):
            with hidden_states_of(ddp):
                hidden = run()
            head = lm_head_of(ddp, main_grad=main_grad)
            scores = score_microbatch(hidden, support=support, **given, lm_head=head)
            scores.logprobs.values.sum().backward()
        grads.append({name: p.main_grad.clone() for name, p in ddp.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    assert any(grad.any() for name, grad in grads[0].items() if "embedding" in name)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_an_exception_inside_puts_the_output_layer_back(scored):
    model, run, *_ = scored
    logits = run()
    with (
        pytest.raises(ValueError, match="output layer's forward is replaced already"),
        hidden_states_of([model]),
        hidden_states_of(model),
    ):
        pass
    assert torch.equal(run(), logits)


def test_what_has_no_output_layer_or_needs_it_is_refused():
    from tests.megatron.helpers import build_model

    with pytest.raises(ValueError, match=r"^lm_head_of: Linear has no output layer on this stage"):
        lm_head_of(torch.nn.Linear(2, 2))
    with hidden_states_of([torch.nn.Linear(2, 2)]):  # a stage in the middle of a pipeline
        pass
    model = build_model(mtp_num_layers=1)
    with (
        pytest.raises(ValueError, match=r"^hidden_states_of: the model has multi-token prediction"),
        hidden_states_of(model),
    ):
        pass
