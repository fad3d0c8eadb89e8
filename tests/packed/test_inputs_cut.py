"""truncate_output: what ``Trace.truncate`` leaves of a trace, for every field of an output."""

import numpy as np
import pytest
import torch

from packhorse.packed.collate import SupportRows, pack_routes, pack_support
from packhorse.packed.collate_ragged import pack_ragged_support
from packhorse.packed.inputs import make_inputs
from packhorse.packed.inputs_cut import truncate_output
from packhorse.packed.steps import PerToken
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.trajectory import generator_output
from tests.packed.inputs_model import V, make_output
from tests.packed.trace_helpers import add_turn, make_trace, rows


def make_traces():
    """Sampled, observed and appended tokens; captured to the end, short of it, not at all."""
    first = make_trace(3)
    add_turn(first, [5, 6, 7], routes=rows(0, 5))
    first.add_observation([8, 9])
    add_turn(first, [10, 11], routes=rows(5, 9), routes_start=5)
    first.append_tokens([1])
    second = make_trace(1)
    add_turn(second, [4, 3, 2], routes=rows(0, 4), evaluated=4)
    third = make_trace(2)
    add_turn(third, [4, 3])
    third.mark_missing()
    return [first, second, third]


@pytest.mark.parametrize("max_length", range(4, 12))
def test_trap_27_the_cut_is_that_of_the_traces_in_every_field(max_length):
    traces = make_traces()
    whole = [trace.finalize() for trace in traces]
    for trace in traces:
        prompt = trace.num_prompt_tokens
        trace.truncate(min(trace.num_response_tokens, max_length - prompt))
    wanted = generator_output([trace.finalize() for trace in traces])
    before = generator_output(whole)
    cut = truncate_output(before, max_length=max_length)
    assert list(cut) == list(wanted)
    for field, items in wanted.items():
        for ours, theirs in zip(cut[field], items, strict=True):
            if field == "rollout_sample_support":
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
                assert ours.row_offsets.tolist() == theirs.row_offsets.tolist()
            else:
                assert np.array_equal(ours, theirs), field
    inputs = make_inputs(whole, max_length=max_length, vocab_size=50)
    assert inputs.equal(make_inputs(wanted, vocab_size=50))


@pytest.mark.parametrize("seed", range(10))
def test_every_field_of_an_output_is_cut_alike(seed):
    output = make_output(seed) | {"entropy": [[0.5] * 9], "env": {"turns": None}}
    size = len(output["uids"])
    output["entropy"] = [list(range(len(ids))) for ids in output["response_ids"]]
    output["env"] = {"tools": [list(range(len(ids))) for ids in output["response_ids"]]}
    most = max(map(len, output["prompt_token_ids"])) + seed % 3 + 1
    rules = {"entropy": PerToken(), "env.tools": PerToken()}
    cut = truncate_output(output, max_length=most, rules=rules)
    for i in range(size):
        prompt, response = output["prompt_token_ids"][i], output["response_ids"][i]
        kept = min(len(response), most - len(prompt))
        assert cut["prompt_token_ids"][i] == prompt
        assert cut["uids"][i] == output["uids"][i]
        for field in (
            "response_ids", "loss_masks", "rewards", "rollout_logprobs", "appended",
            "rollout_sample_support", "entropy",
        ):  # fmt: skip
            assert cut[field][i] == output[field][i][:kept], field
        assert cut["env"]["tools"][i] == output["env"]["tools"][i][:kept]
        routes = output["rollout_expert_indices"][i]
        assert torch.equal(cut["rollout_expert_indices"][i], routes[: len(prompt) + kept])


@pytest.mark.parametrize("pack", [pack_support, pack_ragged_support])
def test_packed_fields_are_cut_as_lists_are(pack):
    output = make_output(3, size=5)
    lengths = [
        len(p) + len(r)
        for p, r in zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ]

    def packed(fields):
        sizes = {"num_experts": 40, "topk": 2, "num_layers": 2}
        return {
            "rollout_expert_indices": pack_routes(
                fields["rollout_expert_indices"], lengths, **sizes
            ),
            "rollout_sample_support": pack(
                fields["rollout_sample_support"], fields["response_ids"], vocab_size=V
            ),
            "rollout_logprobs": PackedTensor.from_segments(
                [torch.tensor(row) for row in fields["rollout_logprobs"]]
            ),
        }

    cut = truncate_output(output | packed(output), max_length=6)
    wanted = packed(truncate_output(output, max_length=6))
    for field, value in wanted.items():
        ours = cut[field]
        assert type(ours) is type(value)
        assert ours.lengths == value.lengths
        if field == "rollout_sample_support" and isinstance(ours, PackedTensor):
            width = value.row_shape[0]  # the uncut one may be wider
            assert torch.equal(ours.values[:, :width], value.values)
            assert (ours.values[:, width:] == -1).all()
        else:
            assert torch.equal(ours.values, value.values)


def test_what_needs_no_cut_is_handed_back_and_a_single_reward_stays():
    output = {"prompt_token_ids": [[1]], "response_ids": [(2, 3)], "rewards": [0.5]}
    same = truncate_output(output, max_length=3)
    assert same == output
    assert same is not output
    cut = truncate_output(output, max_length=2)
    assert cut == {"prompt_token_ids": [[1]], "response_ids": [(2,)], "rewards": [0.5]}
    assert output["response_ids"] == [(2, 3)]


def test_a_field_that_may_be_per_token_needs_a_rule():
    output = {"prompt_token_ids": [[1], [1]], "response_ids": [[2, 3], [4]]}
    marks = output | {"marks": [["a", "b"], ["c"]]}
    message = r"^truncate_output: marks has no rule and a row a response token in every trajectory"
    with pytest.raises(ValueError, match=message):
        truncate_output(marks, max_length=2)
    assert truncate_output(marks, max_length=2, rules={"marks": "last"})["marks"] == marks["marks"]
    tags = output | {"tags": [["a"], ["c"]], "names": ["xy", "z"]}
    assert truncate_output(tags, max_length=2)["tags"] == [["a"], ["c"]]
    shared = output | {"metrics": {"mean": 1.0}}
    assert truncate_output(shared, max_length=2, shared=("metrics",))["metrics"] == {"mean": 1.0}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"max_length": -1}, "max_length must not be negative, got -1"),
        ({}, {"max_length": 1}, "prompt_token_ids of trajectory 0 has 2 tokens, max_length=1"),
        ({"response_ids": None}, {}, "response_ids is missing"),
        ({"prompt_token_ids": {}}, {}, "prompt_token_ids must hold one item a traj"),
        ({"loss_masks": [[1, 1], [1]]}, {},
         "loss_masks of trajectory 1 has 1 rows for 2 response tokens"),
        ({"loss_masks": [[1, 1], 7]}, {},
         "loss_masks of trajectory 1 must have a row a response token, got int"),
        ({"loss_masks": np.ones((2, 2))}, {},
         "loss_masks must be a list or packed to be cut, got ndarray"),
        ({"rollout_sample_support": [SupportRows([1], [0, 1]), None]}, {},
         "rollout_sample_support of trajectory 0 has 1 rows for 2 response tokens"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change, options, message):
    output = {"prompt_token_ids": [[1, 2], [1]], "response_ids": [[3, 4], [5, 6]]}
    with pytest.raises((TypeError, ValueError)) as caught:
        truncate_output(output | change, **({"max_length": 3} | options))
    assert str(caught.value).startswith(f"truncate_output: {message}")
