"""A GLM-4-MoE-like model, and an engine that would capture nothing.

The first layer is dense; scores are sigmoids with a correction bias, experts are chosen in groups,
and there is a shared expert.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from packhorse.replay.capture import Capture
from packhorse.replay.capture_save import save_capture
from packhorse.replay.rollout import EngineModel, read_engine_model
from packhorse.replay.vllm import capture_settings, preflight, read_request_output
from tests.vllm.conftest import DATA, SMALL, engine_here, random_ids

GLM = DATA / "tiny_glm4_moe"
SAMPLING = {"top_k": 20, "top_p": 0.9, "ignore_eos": True, "max_tokens": 6, "seed": 5}


@pytest.fixture(scope="module")
def settings() -> Any:
    return capture_settings(support="mask", device="cpu", sampling=SAMPLING, engine=SMALL)


@pytest.fixture(scope="module")
def llm(settings) -> Iterator[Any]:
    with engine_here(GLM, settings.engine) as engine:
        yield engine


def test_a_dense_first_layer_is_known_before_and_is_zeros_after(llm, settings, generate):
    config = json.loads((GLM / "config.json").read_text())
    found = preflight(llm, settings)
    assert found.model == read_engine_model(config)
    assert found.model.moe_layers == (1, 2, 3)
    assert (found.model.topk, found.model.num_experts) == (4, 12)
    outputs = generate(llm, [(random_ids(n, n), settings.sampling) for n in (3, 140)])
    for output, length in zip(outputs, (3, 140), strict=True):
        for model in (found.model, None):
            (rollout,) = read_request_output(output, settings, model=model)
            assert rollout.moe_layers == (1, 2, 3)
            assert rollout.routes.shape == (length + 6 - 1, 4, 4)
            assert not rollout.routes[:, 0].any()
            ordered = np.sort(rollout.routes[:, 1:], axis=-1)
            assert (ordered[..., 1:] > ordered[..., :-1]).all()
            assert rollout.routes.max() > 7


def test_a_model_that_is_said_to_have_experts_everywhere_is_refused_by_its_zeros(
    llm, settings, generate
):
    (output,) = generate(llm, [(random_ids(5, 5), settings.sampling)])
    wrong = EngineModel(moe_layers=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="layer 0: all zeros, as in all 10 rows"):
        read_request_output(output, settings, model=wrong)


def test_a_capture_of_it_is_saved_and_loaded(llm, settings, generate, tmp_path):
    (output,) = generate(llm, [(random_ids(5, 5), settings.sampling)])
    rollouts = read_request_output(output, settings)
    config = json.loads((GLM / "config.json").read_text())
    save_capture(tmp_path / "glm.npz", rollouts, meta={"model_config": config})
    capture = Capture.load(tmp_path / "glm.npz", moe_layers=(1, 2, 3))
    assert np.array_equal(capture.routes.values.numpy(), rollouts[0].routes)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """An engine of the arguments that ``capture_settings`` refuses."""
    arguments = SMALL | {
        "enable_return_routed_experts": True, "logprobs_mode": "processed_logprobs",
        "enforce_eager": False,
    }  # fmt: skip
    with engine_here(DATA / "tiny_moe", arguments) as engine:
        yield engine


def test_a_compiled_model_on_a_cpu_captures_nothing_and_is_refused_three_times(compiled, generate):
    """By the settings, by the preflight and in the data; vLLM itself says nothing."""
    engine = SMALL | {"enforce_eager": False}
    with pytest.raises(ValueError, match=r"engine\.enforce_eager=False with"):
        capture_settings(device="cpu", engine=engine)
    plain = capture_settings(device="cpu", engine=SMALL, sampling={"max_tokens": 3})
    with pytest.raises(ValueError, match="on a CPU without enforce_eager every route is zero"):
        preflight(compiled, plain)
    (output,) = generate(compiled, [(random_ids(5, 5), plain.sampling)])
    assert not output.outputs[0].routed_experts.any()
    with pytest.raises(ValueError, match="is all zeros, in all 4 layers"):
        read_request_output(output, plain)
    known = EngineModel(moe_layers=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="layer 0: all zeros, as in all 7 rows"):
        read_request_output(output, plain, model=known)
