"""The README's snippets run, in order and in one namespace, and its demo output is a demo's."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from packhorse.replay import demo
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
        batch = SimpleNamespace(token_ids=names["token_ids"])
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
    trainer, forward_step, scoring, generator, numbers, rows = snippets()
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
    exec(rows, names)

    routes = torch.rand(8, 3, EXPERTS).topk(TOPK, -1).indices.to(torch.uint8).numpy()
    names |= {
        "prompt_ids": [1, 2, 3],
        "replies": [_reply([4, 5], routes[:4]), _reply([8, 9], routes)],
        "observations": [[6, 7], []],
        "eos_id": 1,
        "dp_group": None,
    }
    exec(generator, names)
    replayed = names["replayed"]
    assert replayed.captured == (8,)
    assert replayed.live_counts == (1,)  # the position that the appended token needs
    assert names["batch"]["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 1, 1]]


def _reply(tokens: list[int], routes) -> SimpleNamespace:
    """One turn of an engine; routes of all that it evaluated, but the last token."""
    return SimpleNamespace(
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        sampling_mask=[[token, token + 1] for token in tokens],
        routed_experts=routes,
    )


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


def test_readme_has_no_placeholder_for_a_figure():
    assert not re.findall(r"\w*_FIGURE\w*", README.read_text())


# --- the demo's output ----------------------------------------------------------------------------

LABEL, COLUMNS = 40, 33  # characters of a line: its label, and the fp32 group


def assert_alike(printed: str, shown: str, slack: float = 0.0) -> None:
    """Equal but for decimals, which may differ by 2 %, by 2 in the last place or by ``slack``."""
    decimal = r"\d+\.\d+(?:e[-+]\d+)?"
    assert re.sub(decimal, "#", printed).split() == re.sub(decimal, "#", shown).split()
    for ours, theirs in zip(re.findall(decimal, printed), re.findall(decimal, shown), strict=True):
        mantissa, _, exponent = theirs.partition("e")
        place = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if float(theirs) == 0:
            place = 5e-6  # a GPU's recompute may round in another order
        expected = pytest.approx(float(theirs), rel=0.02, abs=max(2 * place, slack))
        assert float(ours) == expected, shown


def test_readme_shows_the_demo_as_it_prints(capsys):
    """Its labels and fp32 columns; not versions, devices, seconds, nor what bf16 gives."""
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.run(parser.parse_args(["--dtype", "fp32"])) == 0
    printed = capsys.readouterr().out.splitlines()
    blocks = re.findall(r"^```\n(.*?)^```", README.read_text(), flags=re.M | re.S)
    (shown,) = (block.splitlines() for block in blocks if block.startswith("rollout"))
    assert len(printed) == len(shown)
    for ours, theirs in zip(printed, shown, strict=True):
        name = theirs[:10].strip()
        assert ours[:10] == theirs[:10]
        if name in ("rollout", "model", "bytes"):
            assert ours == theirs
        elif name == "trainer":
            version = r"megatron-core [\d.]+\w*, torch \S+, .*(?=;)"
            assert re.sub(version, "", ours, count=1) == re.sub(version, "", theirs, count=1)
            assert re.search(version, theirs)
        elif name not in ("kernels", "seconds"):  # a line of the table
            assert ours[:LABEL] == theirs[:LABEL]
            cells = [line[LABEL : LABEL + COLUMNS + 2] for line in (ours, theirs)]
            if theirs.startswith("seconds live"):
                assert [cell.count("/") for cell in cells] == [2, 2]
            else:
                differing = theirs.startswith("route sets that differ")
                assert_alike(*cells, slack=0.06 if differing else 0.0)
