"""The README's snippets run, in order and in one namespace, and its demo output is a demo's."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.megatron.helpers import DEVICE, EXPERTS, TOPK, VOCAB, build_model, routers_of

README = Path(__file__).parents[2] / "README.md"

LENGTHS, RESPONSES = [5, 7], [3, 4]


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.M | re.S)


def _namespace() -> dict:
    """What the README takes for given: a model, a microbatch of an engine's output, a loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(1, VOCAB, (n,), generator=generator) for n in LENGTHS]
    scores = [torch.rand(n - 1, 3, EXPERTS, generator=generator) for n in LENGTHS]
    width = max(LENGTHS)
    token_ids = torch.zeros(2, width, dtype=torch.int64)
    loss_masks = []
    for i, (sequence, response) in enumerate(zip(tokens, RESPONSES, strict=True)):
        token_ids[i, width - len(sequence) :] = sequence  # left padded
        loss_masks.append([s >= len(sequence) - response for s in range(len(sequence))])
    response_ids = [t[-n:].tolist() for t, n in zip(tokens, RESPONSES, strict=True)]
    others = [[[token, (token + 1) % VOCAB] for token in row] for row in response_ids]
    names: dict = {
        "model": build_model(),
        "device": DEVICE,
        "lengths": LENGTHS,
        "routed_experts": [s.topk(TOPK, -1).indices.to(torch.uint8).numpy() for s in scores],
        "loss_masks": loss_masks,
        "token_ids": token_ids.to(DEVICE),
        "response_ids": response_ids,
        "sampling_masks": others,
        "loss_function": lambda output: (output.float().mean(), {}),
    }

    def forward_backward() -> None:
        layout = names["layout"]
        batch = SimpleNamespace(
            token_ids=layout.align(names["token_ids"], 0),
            labels=layout.align(names["token_ids"], 0, next_token=True),
        )
        get_forward_backward_func()(
            forward_step_func=names["forward_step"],
            data_iterator=iter([batch]),
            model=names["model"],
            num_microbatches=1,
            seq_length=layout.num_tokens // 2,
            micro_batch_size=2,
            forward_only=False,
        )

    names["forward_backward"] = forward_backward
    return names


def test_readme_snippets_run():
    trainer, forward_step, scoring, numbers = snippets()
    names = _namespace()
    # forward_step is printed second but is there before the schedule runs
    names["session"] = None
    exec(forward_step, names)
    exec(trainer, names)
    report = names["session"].report()
    assert report.completed
    assert len(report.routers) == 3
    assert all(count == 1 for count in report.asked.values())
    assert all(router.weight.grad.abs().sum() > 0 for router in routers_of(names["model"]))

    layout = names["layout"]
    names["logits"] = torch.randn(2, layout.num_tokens // 2, VOCAB, device=DEVICE)
    exec(scoring, names)
    assert names["scores"].logprobs.lengths == tuple(RESPONSES)
    assert names["scores"].counts.tolist()[0] == sum(RESPONSES)
    exec(numbers, names)


def test_readme_names_only_what_exists():
    text = README.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (README.parent / link).exists(), link
    import packhorse

    for name in re.findall(r"`([a-z_]+)`(?:, `([a-z_]+)`)? \|", text):
        for part in filter(None, name):
            assert hasattr(packhorse, part), part
    for target in re.findall(r"make ([a-z]+)", text):
        assert re.search(rf"^{target}:", (README.parent / "Makefile").read_text(), re.M), target


def test_readme_shows_the_demo_as_it_prints():
    """Every label of the shown output is one the demo prints; figures that do not depend on the
    machine agree (the fp32 columns, to the digits shown)."""
    block = next(b for b in re.findall(r"^```\n(.*?)^```", README.read_text(), flags=re.M | re.S)
                 if b.startswith("rollout"))  # fmt: skip
    both = next(line for line in block.splitlines() if line.strip().startswith("both"))
    mean, _, maximum = (float(x) for x in both.split()[1:4])
    assert mean == pytest.approx(0.0150, abs=2e-4)
    assert maximum == pytest.approx(0.059, abs=2e-3)
