"""examples/megatron_grpo_step.py as it is: in this process, and under torchrun with two.

Expected: the demo's largest |trainer - rollout| with routes and support is 0.059, so every ratio
lies in exp(+-0.07); with the support alone it is 0.723. The mean over all tokens and the clipped
gradient do not depend on how many ranks share the groups.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_grpo_step.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("megatron_grpo_step", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def with_replay(_megatron) -> dict[str, float]:
    return load_example().run()


def assert_trained(figures: dict[str, float]) -> None:
    assert math.isfinite(figures["loss"])
    assert math.isfinite(figures["grad_norm"])
    assert figures["grad_norm"] > 0.1
    assert figures["updated"]


def test_replay_keeps_every_ratio_near_one(with_replay):
    assert_trained(with_replay)
    assert math.exp(-0.07) < with_replay["ratio_min"] < 1 < with_replay["ratio_max"]
    assert with_replay["ratio_max"] < math.exp(0.07)
    assert with_replay["abs_diff_mean"] == pytest.approx(0.0150, rel=0.03)
    assert with_replay["rows_replayed"] == 1011


def test_without_replay_ratios_are_far_from_one():
    figures = load_example().run(replay=False)
    assert_trained(figures)
    widest = max(-math.log(figures["ratio_min"]), math.log(figures["ratio_max"]))
    assert widest == pytest.approx(0.723, rel=0.03)
    assert figures["abs_diff_mean"] == pytest.approx(0.0426, rel=0.03)
    assert figures["rows_replayed"] == 0


def test_two_ranks_under_torchrun_do_the_same_step(with_replay):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(EXAMPLE)),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=EXAMPLE.parents[1],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("loss=")]
    figures = {name: float(value) for name, value in (pair.split("=") for pair in line.split())}
    assert_trained(figures)
    for name in ("loss", "grad_norm", "ratio_min", "ratio_max", "abs_diff_mean"):
        assert figures[name] == pytest.approx(with_replay[name], rel=1e-3), name
    assert 0 < figures["rows_replayed"] < 1011  # rank 0's groups alone


def test_the_lines_that_replay_adds_are_marked():
    marked = [line for line in EXAMPLE.read_text().splitlines() if "  # replay" in line]
    assert len(marked) == 3
