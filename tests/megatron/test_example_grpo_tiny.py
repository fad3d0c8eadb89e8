"""examples/grpo_tiny.py in its short form: it learns, replay brings it near its rollout, and after
an interruption it goes on as if there had been none.

Oracles: transformers reads the checkpoint folder and scores all tokens anew, in one pass without a
cache, and the sampler's filters are written again in NumPy.
"""

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
APART = Path(sys.prefix) / "transformers"  # where tools/setup.sh puts it
STEPS = 8


@pytest.fixture(scope="module")
def example(_megatron) -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(EXAMPLES))
    if importlib.util.find_spec("transformers") is None:
        sys.path.insert(0, str(APART))
    try:
        if importlib.util.find_spec("transformers") is None:
            if "CI" in os.environ:
                pytest.fail("transformers is not installed")
            pytest.skip("transformers is not installed")
        yield importlib.import_module("grpo_tiny")
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def setup(example) -> Any:
    return dataclasses.replace(example.SHORT, steps=STEPS)


@pytest.fixture(scope="module")
def out(example, setup, tmp_path_factory) -> Path:
    """A folder in which the runs of modes "off" and "both" are."""
    folder = tmp_path_factory.mktemp("grpo")
    for mode in ("off", "both"):
        assert example.run(folder, setup, mode, 0, math.inf) == STEPS
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    """The lines, without what the clock says."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        assert line.pop("seconds") > line.pop("rollout_seconds") > 0
    return lines


def test_reward_rises_and_all_figures_are_finite(out):
    for mode in ("off", "both"):
        lines = read(out / f"{mode}-s0.jsonl")
        assert [line["step"] for line in lines] == list(range(STEPS))
        assert all(math.isfinite(v) for line in lines for v in line.values() if v != mode)
        assert all(line["nonfinite"] == 0 and line["tokens"] > 300 for line in lines)
        assert lines[0]["reward"] < 0.75
        assert max(line["reward"] for line in lines[-3:]) > lines[0]["reward"] + 0.03


def test_replay_brings_the_trainer_near_its_rollout(out):
    """The filter at top-p 0.8 takes up to a fifth of the mass: 0.16 nats; rounding is far less."""
    off, both = (read(out / f"{mode}-s0.jsonl") for mode in ("off", "both"))
    assert off[0]["reward"] == both[0]["reward"]  # of one warm-up, sampled alike
    assert 0.8 < off[0]["ratio_mean"] < 0.95
    for line, replayed in zip(off, both, strict=True):
        assert replayed["abs_diff_mean"] < 0.15 * line["abs_diff_mean"]
        assert replayed["k3"] < 0.1 * line["k3"]
        assert replayed["ratio_mean"] == pytest.approx(1.0, abs=5e-3)
        assert (line["rows_replayed"], replayed["rows_live"]) == (0, 0)
        assert replayed["rows_replayed"] > 500
    assert 0 <= both[0]["route_mismatch"] < 0.1


def test_an_interrupted_run_writes_the_lines_of_an_uninterrupted_one(example, setup, out, tmp_path):
    shutil.copytree(out / "start-s0", tmp_path / "start-s0")
    first = dataclasses.replace(setup, steps=STEPS // 2)
    assert example.run(tmp_path, first, "both", 0, math.inf) == STEPS // 2
    lines = tmp_path / "both-s0.jsonl"
    with lines.open("a", encoding="utf-8") as file:  # of a step that was not saved
        file.write('{"step": 4, "reward": 9.0}\n')
    assert example.run(tmp_path, setup, "both", 0, math.inf) == STEPS
    assert read(lines) == read(out / "both-s0.jsonl")
    assert example.run(tmp_path, setup, "both", 0, math.inf) == STEPS  # nothing is left to do
    assert len(read(lines)) == STEPS


def test_a_run_does_not_go_on_with_another_rollout(example, setup, out, tmp_path):
    shutil.copytree(out / "start-s0", tmp_path / "start-s0")
    saved = torch.load(out / "both-s0.pt", weights_only=False)
    assert saved["rollout"] == "transformers"
    torch.save({**saved, "rollout": "vllm"}, tmp_path / "both-s0.pt")
    with pytest.raises(ValueError, match="begun with --rollout vllm, this is transformers"):
        example.run(tmp_path, setup, "both", 0, math.inf)
    assert not (tmp_path / "both-s0.jsonl").exists()
    environment = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert environment["rollout"] == "transformers"


def test_an_engine_that_does_not_start_is_an_error(example, setup, out, capfd):
    """This Python has no vLLM."""
    import grpo_tiny_vllm

    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    start = out / "start-s0" / "warm"
    with pytest.raises(RuntimeError, match="the engine's process ended with code 1"):
        grpo_tiny_vllm.make_rollout(
            "vllm", start, setup.sizes, setup.sampling, Path(sys.executable)
        )
    assert "No module named 'vllm'" in capfd.readouterr().err


def test_the_clock_ends_a_run_before_its_next_step(example, setup, out, tmp_path):
    shutil.copytree(out / "start-s0", tmp_path / "start-s0")
    assert example.run(tmp_path, setup, "both", 0, 0.0) == 0
    assert read(tmp_path / "both-s0.jsonl") == []


def test_the_rollout_gets_every_weight_that_the_trainer_has(example, setup, out):
    """Against the folder, as transformers reads it."""
    import grpo_tiny_rollout
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = out / "start-s0" / "warm"
    trainer = example.Trainer(folder, setup, "both", 1e-3)
    named = dict(example.named_weights(trainer.model, trainer.config))
    stored = load_file(folder / "model.safetensors")
    assert named.keys() == stored.keys()
    for name, weight in stored.items():
        assert torch.equal(named[name].cpu(), weight), name

    rollout = grpo_tiny_rollout.TransformersRollout(folder, setup.sizes, setup.sampling)
    rollout.load_weights(named.items())
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    got = rollout.model.state_dict()
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(got[name].cpu(), weight), name

    lost = [item for item in named.items() if "experts.3.up_proj" not in item[0]]
    with pytest.raises(KeyError, match=r"experts\.3\.up_proj"):
        rollout.load_weights(lost)
    with pytest.raises(ValueError, match="no place for another"):
        rollout.load_weights([*named.items(), ("another", weight)])


def test_captured_routes_supports_and_logprobs_are_those_of_a_pass_over_all_tokens(
    example, setup, out
):
    import grpo_tiny_rollout

    folder = out / "start-s0" / "warm"
    trainer = example.Trainer(folder, setup, "both", 1e-3)
    rollout = grpo_tiny_rollout.TransformersRollout(folder, setup.sizes, setup.sampling)
    rollout.model.float()  # in bf16 a pass with a cache rounds otherwise than one without
    rollout.load_weights(example.named_weights(trainer.model, trainer.config))
    prompts, _ = example.draw_prompts(setup, 6, np.random.default_rng(0))
    for trajectory, prompt in zip(rollout.generate(prompts, seed=5), prompts, strict=True):
        response = trajectory.response_ids
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            passed = rollout.model(ids.to(rollout.device), output_router_logits=True)
        logits = passed.logits[0].double().cpu().numpy()
        chosen = [r.topk(setup.sizes.topk).indices.sort().values for r in passed.router_logits]
        routes = torch.stack(chosen, dim=1)[:-1].cpu().numpy()
        rows, offsets = trajectory.support
        assert (np.sort(np.asarray(trajectory.routes), axis=-1) == routes).all()
        for r, token in enumerate(response.tolist()):
            kept = filtered(logits[len(prompt) + r - 1], setup.sampling)
            assert set(rows[offsets[r] : offsets[r + 1]].tolist()) == set(kept)
            assert trajectory.logprobs[r] == pytest.approx(kept[token], abs=1e-4)


def filtered(logits: np.ndarray, sampling: Any) -> dict[int, float]:
    """Id -> logprob of what top-k and then top-p leave."""
    best = np.argsort(-logits)[: sampling.top_k]
    p = np.exp(logits[best] - logits[best].max())
    p /= p.sum()
    count = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
    kept = p[:count] / p[:count].sum()
    return dict(zip(best[:count].tolist(), np.log(kept).tolist(), strict=True))
