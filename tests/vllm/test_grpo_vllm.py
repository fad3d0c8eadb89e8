"""examples/grpo_tiny.py with vLLM as its rollout: two steps, and weights that reach the engine.

vLLM runs in this environment, the trainer in the one around it. Oracle: transformers reads the
checkpoint folder and scores, in fp32, what vLLM sampled.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: the environment that this one stands in
OUTER = Path(sys.prefix).parent
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    python, apart = OUTER / "bin" / "python", OUTER / "transformers"
    environment = {**os.environ, "PYTHONPATH": str(apart)}
    environment.pop("TRITON_INTERPRET", None)
    code = "import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, sys.argv[1:])))"
    there = (
        python.exists()
        and not subprocess.run(
            [python, "-c", code, "megatron", "transformers"], env=environment
        ).returncode
    )
    if not there:
        if "CI" in os.environ:
            pytest.fail(f"{python} has no Megatron-core, or no transformers")
        pytest.skip("no environment with Megatron-core and transformers around this one")
    folder = tmp_path_factory.mktemp("grpo")
    done = subprocess.run(
        [python, HERE / "grpo_steps.py", folder, sys.executable],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("@")[2])


def test_each_step_is_finite_and_replay_brings_the_trainer_near_vllm(found):
    assert found["about"]["rollout"] == "vllm"
    assert found["about"]["vllm"].startswith("0.32.")
    for off, both in zip(found["off"], found["both"], strict=True):
        for line in (off, both):
            assert all(math.isfinite(value) for value in line.values())
            assert line["nonfinite"] == 0
            assert line["tokens"] >= 12
        assert off["rows_replayed"] == both["rows_live"] == 0
        assert both["rows_replayed"] > 12 * 8
        assert both["abs_diff_mean"] < 0.3 * off["abs_diff_mean"]
        assert both["abs_diff_mean"] < 0.03
        assert abs(both["ratio_mean"] - 1) < 0.02 < 1 - off["ratio_mean"]
    # of the same weights, sampled alike
    assert found["off"][0]["reward"] == found["both"][0]["reward"]


def test_new_weights_reach_every_layer_of_the_engine(found):
    """Its linear layers and experts are packed: writing into them would change nothing."""
    distance = found["distance"]
    assert distance["warm by warm"] < 0.05
    assert distance["first by first"] < 0.05
    assert distance["warm by first"] > 0.3
    assert distance["first by warm"] > 0.3


def test_the_old_weights_sample_the_same_again(found):
    """After others; nothing of those is left in the engine or in its prefix cache."""
    assert found["again"]
    assert found["left"] == ["first", "warm"]
