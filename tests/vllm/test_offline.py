"""``LLM`` in this process, of a Qwen3-MoE model: rows, turns, stops, masks, weights."""

import math
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packhorse.packed.trace import Trace
from packhorse.replay.rollout import EngineModel
from packhorse.replay.vllm import (
    capture_settings,
    preflight,
    read_request_output,
    reset_after_weights,
)
from tests.vllm.conftest import DATA, SMALL, engine_here, random_ids

MODEL = EngineModel(num_layers=4, topk=2, num_experts=8, moe_layers=(0, 1, 2, 3), vocab_size=512)
#: as wide as top_k with room for ties, so that every mask has all its logprobs
SAMPLING = {"top_k": 20, "top_p": 0.9, "logprobs": 36, "ignore_eos": True, "max_tokens": 6}
#: up to the block of 128 tokens, across it, and of one token
LENGTHS = (1, 5, 127, 128, 129, 200)


@pytest.fixture(scope="module")
def settings() -> Any:
    return capture_settings(support="mask", device="cpu", sampling=SAMPLING, engine=SMALL)


@pytest.fixture(scope="module")
def by_logprobs() -> Any:
    return capture_settings(support="logprobs", device="cpu", sampling=SAMPLING, engine=SMALL)


@pytest.fixture(scope="module")
def llm(settings) -> Iterator[Any]:
    arguments = settings.engine | {"max_logprobs": 64}
    with engine_here(DATA / "tiny_moe", arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def sampled(llm, settings, generate) -> SimpleNamespace:
    """One batch: a prompt of each length, three responses to one, and one of a single token."""
    asked = [(random_ids(n, n), settings.sampling | {"seed": n}) for n in LENGTHS]
    asked.append((random_ids(9, 9), settings.sampling | {"n": 3}))
    asked.append((random_ids(20, 20), settings.sampling | {"max_tokens": 1}))
    dicts = [(random_ids(7, 7), settings.sampling | {"flat_logprobs": False, "seed": 1})]
    outputs = generate(llm, asked + dicts)
    return SimpleNamespace(
        lengths=outputs[: len(LENGTHS)], three=outputs[-3], single=outputs[-2], dicts=outputs[-1]
    )


def test_the_installed_version_is_asked(settings):
    assert settings.version.startswith("0.32.")
    unnamed = capture_settings(support="mask", sampling=SAMPLING, engine=SMALL)
    assert unnamed == settings, "that it is built for a CPU is seen"
    assert settings.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_the_preflight_lists_the_layers_that_will_be_captured(llm, settings):
    found = preflight(llm, settings)
    assert found.model == MODEL
    assert [layer.layer for layer in found.layers] == [0, 1, 2, 3]
    assert all(layer.bound and not layer.monolithic for layer in found.layers)
    assert str(found).startswith("4 of 4 layers have experts, 2 of 8 a token")


# --- rows -----------------------------------------------------------------------------------------


def test_every_token_but_the_last_has_a_row(sampled, settings):
    for output, length in zip(sampled.lengths, LENGTHS, strict=True):
        (rollout,) = read_request_output(output, settings, model=MODEL)
        assert rollout.prompt_ids.tolist() == random_ids(length, length)
        assert rollout.routes.shape == (length + 6 - 1, 4, 2)
        assert rollout.routes.tolist() == output.outputs[0].routed_experts.tolist()
        assert rollout.finish_reason == "length"
    (rollout,) = read_request_output(sampled.single, settings, model=MODEL)
    assert rollout.routes.shape[0] == 20


def test_the_layers_with_experts_are_found_without_the_model(sampled, settings):
    (rollout,) = read_request_output(sampled.lengths[1], settings)
    assert rollout.moe_layers == (0, 1, 2, 3)


def test_each_of_three_responses_has_all_rows_of_the_prompt(sampled, settings):
    rollouts = read_request_output(sampled.three, settings, model=MODEL)
    assert [rollout.index for rollout in rollouts] == [0, 1, 2]
    assert len({tuple(rollout.response_ids.tolist()) for rollout in rollouts}) == 3
    for rollout in rollouts:
        assert rollout.routes.shape[0] == 9 + 6 - 1
        assert np.array_equal(rollout.routes[:9], rollouts[0].routes[:9])


def test_the_second_turn_repeats_the_rows_of_the_first_from_the_prefix_cache(
    llm, settings, generate
):
    """Rows over the first turn are bit-equal, and asked from a row on the others come alone."""
    prompt = random_ids(150, 4242)
    (first,) = generate(llm, [(prompt, settings.sampling | {"seed": 7})])
    (turn_1,) = read_request_output(first, settings, model=MODEL)
    trace = Trace(prompt, num_layers=4, topk=2, num_experts=8, vocab_size=512)
    trace.add_turn(**turn_1.turn())
    trace.add_observation(random_ids(11, 3))
    longer = trace.token_ids.tolist()
    start = settings.routes_from(trace.num_rows, len(longer))
    assert start == {"routed_experts_prompt_start": 155}
    whole, rest = generate(
        llm, [(longer, settings.sampling | {"seed": 8} | more) for more in ({}, start)]
    )
    (of_all,) = read_request_output(whole, settings, model=MODEL)
    (of_rest,) = read_request_output(rest, settings, model=MODEL, routes_start=155)
    assert of_all.num_cached_tokens == 128
    assert np.array_equal(of_all.routes[:155], turn_1.routes)
    assert of_rest.routes_start == 155
    assert of_rest.response_ids.tolist() == of_all.response_ids.tolist()
    assert np.array_equal(of_rest.routes, of_all.routes[155:])
    trace.add_turn(**of_rest.turn())
    assert np.array_equal(trace.finalize().routes, of_all.routes)


def test_a_start_at_the_prompts_end_leaves_the_responses_rows(llm, settings, generate):
    prompt = random_ids(12, 12)
    start = settings.routes_from(12, 12)
    assert start == {"routed_experts_prompt_start": 12}
    (output,) = generate(llm, [(prompt, settings.sampling | start)])
    (rollout,) = read_request_output(output, settings, model=MODEL, routes_start=12)
    assert rollout.routes.shape[0] == 6 - 1
    with pytest.raises(ValueError, match="has 5 rows; 12 prompt and 6 response tokens have 17"):
        read_request_output(output, settings, model=MODEL)


def test_a_stop_token_and_a_stop_string_end_the_rows_before_the_last_token(llm, settings, generate):
    prompt, arguments = random_ids(6, 6), settings.sampling | {"seed": 3, "max_tokens": 8}
    (free,) = generate(llm, [(prompt, arguments)])
    ids = list(free.outputs[0].token_ids)
    at = next(i for i in range(2, 8) if ids[i] not in ids[:i])
    text = llm.get_tokenizer().decode([ids[at]])
    ends = ({"stop_token_ids": [ids[at]]}, {"stop": [text]})
    stopped, by_text = generate(llm, [(prompt, arguments | end) for end in ends])
    (rollout,) = read_request_output(stopped, settings, model=MODEL)
    assert rollout.response_ids.tolist() == ids[: at + 1]
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", ids[at])
    assert rollout.routes.shape[0] == 6 + at + 1 - 1
    assert rollout.support.row_offsets.size == at + 2
    (rollout,) = read_request_output(by_text, settings, model=MODEL)
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", text)
    assert rollout.response_ids.tolist() == ids[: rollout.response_ids.size]
    assert rollout.routes.shape[0] == 6 + rollout.response_ids.size - 1


# --- support and logprobs -------------------------------------------------------------------------


def listed(rollout: Any) -> list[list[int]]:
    ids, offsets = rollout.support.token_ids.tolist(), rollout.support.row_offsets.tolist()
    return [ids[a:b] for a, b in pairwise(offsets)]


def test_the_mask_is_the_finite_processed_logprobs(sampled, settings, by_logprobs):
    """Flat logprobs and dicts; each token's are of a distribution over its mask."""
    for output in (*sampled.lengths, sampled.dicts):
        part = output.outputs[0]
        (mask,) = read_request_output(output, settings, model=MODEL)
        (finite,) = read_request_output(output, by_logprobs, model=MODEL)
        assert (
            [sorted(row) for row in listed(finite)] == listed(mask) == part.sampling_mask.token_ids
        )
        for token, row, sampled_id in zip(part.logprobs, listed(mask), part.token_ids, strict=True):
            left = {id: entry.logprob for id, entry in token.items() if entry.logprob > -math.inf}
            assert sorted(left) == row
            assert sampled_id in row
            assert math.fsum(map(math.exp, left.values())) == pytest.approx(1, abs=1e-5)
        own = [token[id].logprob for token, id in zip(part.logprobs, part.token_ids, strict=True)]
        for rollout in (mask, finite):
            assert rollout.logprobs.tolist() == pytest.approx(own, abs=1e-6)
            assert rollout.support_mass.tolist() == pytest.approx([1] * 6, abs=1e-5)
            assert (rollout.num_floored, rollout.num_added, rollout.num_cut) == (0, 0, 0)


def test_fewer_logprobs_than_the_support_are_found_by_their_mass(llm, settings, generate):
    """top_k 20 with 6 logprobs: settings refuse it; sent all the same, the data shows it."""
    with pytest.raises(ValueError, match=r"sampling\.logprobs=6 for top_k=20: rows would be cut"):
        capture_settings(
            support="logprobs", device="cpu", sampling={"top_k": 20, "logprobs": 6}, engine=SMALL
        )
    asked = capture_settings(support="logprobs", device="cpu", sampling=SAMPLING, engine=SMALL)
    (output,) = generate(llm, [(random_ids(8, 8), asked.sampling | {"logprobs": 6, "top_p": 1.0})])
    with pytest.raises(ValueError, match="the row is cut"):
        read_request_output(output, asked, model=MODEL)
    (marked,) = read_request_output(output, asked, model=MODEL, on_cut="mark")
    assert marked.num_cut == 6
    assert (marked.support_mass < 0.99).all()


def test_vllm_does_in_silence_what_the_rules_refuse(llm, settings, generate):
    """A temperature below 0.01 is raised; greedy sampling filters nothing."""
    from vllm import SamplingParams

    assert SamplingParams(temperature=0.001).temperature == 0.01
    with pytest.raises(ValueError, match="requires top_k > 0"):
        generate(llm, [([5, 6], settings.sampling | {"top_k": 0})])
    with pytest.raises(ValueError, match="requires temperature > 0"):
        generate(llm, [([5, 6], settings.sampling | {"temperature": 0.0})])
    for refused in ({"temperature": 0.001}, {"temperature": 0.0}, {"top_k": 0}):
        with pytest.raises(ValueError, match=rf"sampling\.{next(iter(refused))}="):
            capture_settings(support="mask", device="cpu", sampling=SAMPLING | refused)


def test_the_model_runner_that_cannot_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0 with vLLM"):
        capture_settings(support="mask", device="cpu", sampling=SAMPLING)


# --- weights --------------------------------------------------------------------------------------


def test_after_new_weights_the_prefix_cache_must_be_reset(llm, settings, generate):
    """Without it the cached prefix keeps the routes of the old weights, and no field says so."""
    prompt = random_ids(140, 77)
    arguments = settings.sampling | {"seed": 1}

    def rows(**more: Any) -> Any:
        (output,) = generate(llm, [(prompt, arguments | more)])
        (rollout,) = read_request_output(output, settings, model=MODEL)
        return rollout

    def roll_embedding(model: Any) -> None:
        model.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight.data.roll(3, 0))

    old = rows()
    saved = llm.apply_model(lambda model: model.model.embed_tokens.weight.data.clone())[0]
    llm.apply_model(roll_embedding)
    try:
        fresh = rows(skip_reading_prefix_cache=True)
        stale = rows()
        assert stale.num_cached_tokens == 128
        assert np.array_equal(stale.routes[:128], old.routes[:128])
        assert not np.array_equal(fresh.routes[:128], old.routes[:128])
        reset_after_weights(llm, "step 1")
        new = rows()
        assert new.num_cached_tokens == 0
        assert np.array_equal(new.routes[:140], fresh.routes[:140])
        assert [tuple(span) for span in new.weight_versions] == [(0, 6, "step 1")]
        assert [tuple(span) for span in old.weight_versions] == [(0, 6, "default")]
    finally:
        llm.apply_model(lambda model: model.model.embed_tokens.weight.data.copy_(saved))
        reset_after_weights(llm, "default")


def test_a_reset_while_a_request_is_under_way_is_an_error(llm, settings):
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request(
        "open", {"prompt_token_ids": random_ids(9, 1)}, SamplingParams(**settings.sampling)
    )
    engine.step()
    with pytest.raises(RuntimeError, match="the prefix cache was not reset"):
        reset_after_weights(llm)
    while engine.has_unfinished_requests():
        engine.step()
    reset_after_weights(llm)
