"""``AsyncLLM``, whose engine is another process: streams, aborts, and a model whose logits tie.

The output head has each of its rows twice, so that every logit ties with another: with an odd
top_k the last place is always shared, and the sampler of this build keeps both.
"""

import asyncio
import gc
import shutil
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from packhorse.replay.rollout import SupportStatus
from packhorse.replay.vllm import (
    RequestReader,
    capture_settings,
    preflight_async,
    read_request_output,
    reset_after_weights_async,
)
from tests.vllm.conftest import DATA, SMALL, random_ids

TOP_K = 5
SAMPLING = {"top_k": TOP_K, "logprobs": 20, "ignore_eos": True, "max_tokens": 8, "seed": 2}


@pytest.fixture(scope="module")
def settings() -> Any:
    return capture_settings(
        support="mask", device="cpu", sampling=SAMPLING, engine=SMALL, preflight=True
    )


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory) -> Any:
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(DATA / "tiny_moe", folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[256:] = head[:256]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(loop, settings, tied_model) -> Iterator[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tied_model), **settings.engine))

    made = loop.run_until_complete(start())
    yield made
    made.shutdown()
    del made
    gc.collect()  # at the interpreter's end its finalizer would find nothing of vLLM
    loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture(scope="module")
def run(loop) -> Callable[[Coroutine], Any]:
    return lambda work: loop.run_until_complete(asyncio.wait_for(work, 120))


async def outputs_of(engine: Any, request_id: str, prompt: list[int], **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    stream = engine.generate({"prompt_token_ids": prompt}, SamplingParams(**sampling), request_id)
    return [output async for output in stream]


def kinds() -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    return {kind.name: kind for kind in RequestOutputKind}


def test_the_preflight_reaches_an_engine_in_another_process(engine, settings, run):
    found = run(preflight_async(engine, settings))
    assert found.model.moe_layers == (0, 1, 2, 3)
    assert all(layer.bound for layer in found.layers)


def test_parts_of_a_stream_join_to_what_one_output_holds(engine, settings, run):
    """Delta, cumulative and final-only: the routes come with the last part, masks with each."""
    prompt = random_ids(130, 1)
    found = {}
    for name in ("FINAL_ONLY", "CUMULATIVE", "DELTA"):
        outputs = run(
            outputs_of(engine, name, prompt, **settings.sampling, output_kind=kinds()[name])
        )
        reader = RequestReader(settings, delta=name == "DELTA")
        for output in outputs:
            reader.add(output)
        (found[name],) = reader.finish()
        if name == "DELTA":
            assert len(outputs) > 2
            with pytest.raises(ValueError, match="is not finished; RequestReader joins its parts"):
                read_request_output(outputs[0], settings)
        else:
            (last,) = read_request_output(outputs[-1], settings)
            assert np.array_equal(last.routes, found[name].routes)
    whole = found["FINAL_ONLY"]
    assert whole.routes.shape[0] == 130 + 8 - 1
    for rollout in found.values():
        assert rollout.response_ids.tolist() == whole.response_ids.tolist()
        assert np.array_equal(rollout.routes, whole.routes)
        assert np.array_equal(rollout.logprobs, whole.logprobs)
        assert np.array_equal(rollout.support.token_ids, whole.support.token_ids)
        assert np.array_equal(rollout.support.row_offsets, whole.support.row_offsets)


def test_a_tie_at_the_last_rank_makes_the_support_larger_than_top_k(engine, settings, run):
    """It is kept, whole: its probabilities sum to 1 over one id more than top_k."""
    outputs = run(outputs_of(engine, "tie", random_ids(6, 6), **settings.sampling))
    (rollout,) = read_request_output(outputs[-1], settings)
    widths = np.diff(rollout.support.row_offsets)
    assert (widths == TOP_K + 1).all()
    assert (rollout.support_status == SupportStatus.WHOLE).all()
    assert rollout.support_mass.tolist() == pytest.approx([1] * 8, abs=1e-5)


def test_logprobs_as_many_as_top_k_cut_a_tie_and_room_for_it_does_not(engine, settings, run):
    exact, roomy = (
        capture_settings(
            support="logprobs", device="cpu", sampling=SAMPLING | {"logprobs": number}, engine=SMALL
        )
        for number in (TOP_K, TOP_K + 3)
    )
    outputs = run(outputs_of(engine, "cut", random_ids(6, 6), **exact.sampling))
    with pytest.raises(ValueError, match=f"the probabilities of its {TOP_K} candidates sum to 0"):
        read_request_output(outputs[-1], exact)
    (marked,) = read_request_output(outputs[-1], exact, on_cut="mark")
    assert marked.num_cut > 0
    outputs = run(outputs_of(engine, "room", random_ids(6, 6), **roomy.sampling))
    (whole,) = read_request_output(outputs[-1], roomy)
    assert (np.diff(whole.support.row_offsets) == TOP_K + 1).all()
    assert whole.num_cut == 0


def test_three_responses_stream_side_by_side(engine, settings, run):
    asked = settings.sampling | {"n": 3, "seed": None, "output_kind": kinds()["DELTA"]}
    reader = RequestReader(settings, delta=True)
    for output in run(outputs_of(engine, "three", random_ids(7, 7), **asked)):
        reader.add(output)
    rollouts = reader.finish()
    assert [rollout.index for rollout in rollouts] == [0, 1, 2]
    for rollout in rollouts:
        assert rollout.routes.shape[0] == 7 + 8 - 1
        assert np.array_equal(rollout.routes[:7], rollouts[0].routes[:7])


def test_an_abort_in_the_middle_leaves_whole_rows_of_what_was_sampled(engine, settings, run):
    from vllm import SamplingParams

    asked = settings.sampling | {"max_tokens": 300, "output_kind": kinds()["DELTA"]}

    async def aborted() -> list[Any]:
        outputs = []
        stream = engine.generate(
            {"prompt_token_ids": random_ids(20, 20)}, SamplingParams(**asked), "abort"
        )
        async for output in stream:
            outputs.append(output)
            if len(outputs) == 5:
                await engine.abort("abort")
        return outputs

    reader = RequestReader(settings, delta=True)
    for output in run(aborted()):
        reader.add(output)
    (rollout,) = reader.finish()
    assert rollout.finish_reason == "abort"
    count = rollout.response_ids.size
    assert 5 <= count < 300
    assert rollout.routes.shape[0] == 20 + count - 1
    assert rollout.support.row_offsets.size == count + 1
    assert rollout.logprobs.shape == (count,)


def test_a_reset_gives_later_replies_their_version(engine, settings, run):
    prompt = random_ids(140, 9)

    def rollout(request_id: str) -> Any:
        outputs = run(outputs_of(engine, request_id, prompt, **settings.sampling))
        return read_request_output(outputs[-1], settings)[0]

    rollout("before")
    assert rollout("cached").num_cached_tokens == 128
    run(reset_after_weights_async(engine, "step 4"))
    after = rollout("after")
    assert after.num_cached_tokens == 0
    assert [tuple(span) for span in after.weight_versions] == [(0, 8, "step 4")]
