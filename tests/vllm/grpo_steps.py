"""What test_grpo_vllm.py looks at: steps of the GRPO example with vLLM as its rollout, as JSON.

It runs in the environment with Megatron-core and transformers; the engine runs in PYTHON.

    python grpo_steps.py FOLDER PYTHON
"""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from grpo_tiny import (
    SHORT,
    Trainer,
    draw_prompts,
    install_cpu_shims,
    named_weights,
    one_step,
    single_process,
    warm_up,
)
from grpo_tiny_vllm import make_rollout

SETUP = replace(SHORT, prompts=3, samples=4, warmup_steps=60, wrong_steps=0)


def main(folder: Path, python: Path) -> dict[str, Any]:
    warm = warm_up(folder, SETUP, seed=0)
    first = folder / "first"  # random weights, from before the warm-up
    with closing(make_rollout("vllm", warm, SETUP.sizes, SETUP.sampling, python)) as rollout:
        found: dict[str, Any] = {"about": rollout.about}
        for mode in ("off", "both"):
            trainer = Trainer(warm, SETUP, mode, SETUP.lr)
            found[mode] = [one_step(trainer, rollout, 0, step) for step in range(2)]

        prompts = draw_prompts(SETUP, 8, np.random.default_rng(7))[0]
        sampled = []
        for source in (warm, first, warm):
            trainer = Trainer(source, SETUP, "off", SETUP.lr)
            rollout.load_weights(named_weights(trainer.model, trainer.config))
            sampled.append(rollout.generate(prompts, seed=3))
    found["again"] = all(
        one.response_ids.tolist() == other.response_ids.tolist()
        and one.logprobs.tolist() == other.logprobs.tolist()
        and np.array_equal(np.asarray(one.routes), np.asarray(other.routes))
        for one, other in zip(sampled[0], sampled[2], strict=True)
    )
    found["distance"] = {
        f"{of.name} by {by.name}": distance(by, prompts, trajectories)
        for of, trajectories in ((warm, sampled[0]), (first, sampled[1]))
        for by in (warm, first)
    }
    found["left"] = sorted(path.name for path in folder.iterdir())
    return found


def distance(folder: Path, prompts: np.ndarray, trajectories: list[Any]) -> float:
    """Mean |difference| to the logprobs, over the captured support, of transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences = []
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        response = trajectory.response_ids
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].double().numpy()
        rows, offsets = trajectory.support
        for r, token in enumerate(response.tolist()):
            kept = logits[r, rows[offsets[r] : offsets[r + 1]]]
            logprob = logits[r, token] - np.log(np.exp(kept).sum())
            differences.append(abs(logprob - trajectory.logprobs[r]))
    return float(np.mean(differences))


if __name__ == "__main__":
    install_cpu_shims()
    with single_process(seed=0):
        print("@" + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))  # noqa: T201
