"""merge_steps: steps that extend each other become one trajectory, each token with its own rows.

Oracle: written out, and a trace grown over the same conversation.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed.collate import SupportRows, pack_routes, pack_support
from packhorse.packed.collate_ragged import pack_ragged_support
from packhorse.packed.steps import PerToken, merge_steps
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.trace import Trace
from packhorse.replay.capture import Capture
from tests.packed.trace_helpers import rows

CAPTURE = Path(__file__).parents[2] / "replay" / "data" / "vllm_tiny_moe.npz"


def two_steps(**fields):
    return {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 9, 9]],
        "response_ids": [[3, 4], [5]],
        "loss_masks": [[1, 1], [1]],
    } | fields


# --- trap 34 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("support", "merged"),
    [
        ([[[3, 7], [4]], [[5]]], [[3, 7], [4], [], [], [5]]),
        ([np.array([[3, 7], [4, -1]]), np.array([[5]])],
         [[3, 7], [4, -1], [-1, -1], [-1, -1], [5, -1]]),
        ([torch.tensor([[3], [4]]), torch.tensor([[5, 6]])],
         [[3, -1], [4, -1], [-1, -1], [-1, -1], [5, 6]]),
        ([[], [[5]]], None),
    ],
)  # fmt: skip
def test_trap_34_observations_between_steps_are_masked_and_have_no_support(support, merged):
    steps = two_steps(
        rollout_sample_support=support,
        rollout_logprobs=[[-0.3, -0.4], [-0.5]],
        rollout_expert_indices=[rows(0, 3), rows(0, 6, version=1)],
    )
    if merged is None:  # the first step sampled nothing
        steps |= {"prompt_token_ids": [[1, 2], [1, 2, 9]], "response_ids": [[], [5]]}
        steps |= {"loss_masks": [[], [1]], "rollout_logprobs": [[], [-0.5]]}
        steps |= {"rollout_expert_indices": [rows(0, 1), rows(0, 3)]}
        output, _ = merge_steps(steps, ["a", "a"])
        assert output["response_ids"] == [[9, 5]]
        assert output["rollout_sample_support"] == [[[], [5]]]
        return
    output, used = merge_steps(steps, ["a", "a"])
    assert used == [[0, 1]]
    assert output["prompt_token_ids"] == [[1, 2]]
    assert output["response_ids"] == [[3, 4, 9, 9, 5]]
    assert output["loss_masks"] == [[1, 1, 0, 0, 1]]
    assert output["rollout_logprobs"] == [[-0.3, -0.4, 0.0, 0.0, -0.5]]
    (found,) = output["rollout_sample_support"]
    assert (found if isinstance(found, list) else found.tolist()) == merged
    expected = [*rows(0, 3).tolist(), *rows(3, 6, version=1).tolist()]
    assert output["rollout_expert_indices"][0].tolist() == expected  # none captured twice


def test_trap_34_a_prompt_that_does_not_extend_the_last_step_starts_a_trajectory():
    steps = two_steps()
    steps["prompt_token_ids"] = [[1, 2], [1, 2, 3, 8, 9, 9]]
    output, used = merge_steps(steps, ["a", "a"])
    assert used == [[0], [1]]
    assert output == steps
    shorter = two_steps(prompt_token_ids=[[1, 2], [1, 2, 3]])
    assert merge_steps(shorter, ["a", "a"]).steps == [[0], [1]]


def test_steps_of_conversations_may_stand_among_each_other():
    output, used = merge_steps(
        {
            "prompt_token_ids": [[1], [7], [1, 2, 8], [7, 6], [1, 2, 8, 3]],
            "response_ids": [[2], [6], [3], [5], [4]],
            "loss_masks": [[1], [1], [1], [1], [1]],
            "stop_reasons": ("a", "b", "c", "d", "e"),
            "trajectory_ids": np.array([0, 1, 0, 1, 0]),
        },
        [0, 1, 0, 1, 0],
    )
    assert used == [[0, 2, 4], [1, 3]]
    assert output["response_ids"] == [[2, 8, 3, 4], [6, 5]]
    assert output["loss_masks"] == [[1, 0, 1, 1], [1, 1]]
    assert output["stop_reasons"] == ("e", "d")
    assert output["trajectory_ids"].tolist() == [0, 1]


def test_no_steps_merge_to_no_trajectories():
    empty = {"prompt_token_ids": [], "response_ids": [], "rollout_expert_indices": []}
    assert merge_steps(empty, []).output == empty


# --- fields ---------------------------------------------------------------------------------------


def test_a_field_of_tomorrow_needs_a_rule():
    steps = two_steps(entropy=[[0.1, 0.2], [0.3]], env={"score": [1.0, 2.0], "seed": 3})
    with pytest.raises(ValueError, match=r"^merge_steps: entropy has no rule; give one in rules="):
        merge_steps(steps, ["a", "a"], shared=["env.seed"])
    output, _ = merge_steps(
        steps, ["a", "a"], shared=["env.seed"], rules={"entropy": PerToken(-1.0), "env": sum}
    )
    assert output["entropy"] == [[0.1, 0.2, -1.0, -1.0, 0.3]]
    assert output["env"] == {"score": [3.0], "seed": 3}
    rules = {"entropy": "last", "env.score": "first"}
    output, _ = merge_steps(steps, ["a", "a"], shared=["env.seed"], rules=rules)
    assert (output["entropy"], output["env"]["score"]) == ([[0.3]], [1.0])


def test_rewards_are_of_tokens_or_need_a_rule():
    output, _ = merge_steps(two_steps(rewards=[[0.0, 0.1], [1.0]]), ["a", "a"])
    assert output["rewards"] == [[0.0, 0.1, 0.0, 0.0, 1.0]]
    scalar = two_steps(rewards=np.array([0.25, 0.5]))
    with pytest.raises(TypeError, match="rewards must be a list or a packed field of the host"):
        merge_steps(scalar, ["a", "a"])
    assert merge_steps(scalar, ["a", "a"], rules={"rewards": sum}).output["rewards"] == [0.75]
    with pytest.raises(TypeError, match="rewards of step 0 must have a row a response token"):
        merge_steps(two_steps(rewards=[0.25, 0.5]), ["a", "a"])


@pytest.mark.parametrize(
    "kind",
    [
        lambda ids: [torch.tensor(row, dtype=torch.int32) for row in ids],
        lambda ids: [np.array(row, dtype=np.int32) for row in ids],
        lambda ids: PackedTensor.from_segments([torch.tensor(row).int() for row in ids]),
        lambda ids: tuple(map(tuple, ids)),
    ],
)
def test_observations_have_their_own_ids_in_any_kind_of_field(kind):
    steps = two_steps(response_ids=kind([[3, 4], [5]]))
    merged = merge_steps(steps, ["a", "a"]).output["response_ids"]
    assert type(merged) is type(steps["response_ids"])
    assert list(map(int, merged[0])) == [3, 4, 9, 9, 5]
    assert getattr(merged[0], "dtype", torch.int32) in (torch.int32, np.int32)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("narrow", ["uint8", "int16"])
def test_an_observed_id_past_the_dtype_of_the_sampled_ones_is_whole(make, narrow):
    def ids(values):
        return make(values, dtype=getattr(torch if make is torch.tensor else np, narrow))

    steps = two_steps(response_ids=[ids([3, 4]), ids([5])])
    steps["prompt_token_ids"][1] = [1, 2, 3, 4, 150000, 9]
    output, _ = merge_steps(steps, ["a", "a"])
    assert output["response_ids"][0].tolist() == [3, 4, 150000, 9, 5]
    steps["prompt_token_ids"][1] = [1, 2, 3, 4, 100, 9]
    (merged,) = merge_steps(steps, ["a", "a"]).output["response_ids"]
    assert merged.tolist() == [3, 4, 100, 9, 5]
    assert str(merged.dtype).endswith(narrow)


@pytest.mark.parametrize("kind", ["uint8", "uint32"])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_an_observation_has_no_support_in_unsigned_arrays_either(make, kind):
    def ids(values):
        return make(values, dtype=getattr(torch if make is torch.tensor else np, kind))

    steps = two_steps(rollout_sample_support=[ids([[3], [4]]), ids([[5, 6]])])
    (merged,) = merge_steps(steps, ["a", "a"]).output["rollout_sample_support"]
    assert merged.tolist() == [[3, -1], [4, -1], [-1, -1], [-1, -1], [5, 6]]


def test_a_fill_that_an_array_does_not_hold_is_refused():
    steps = two_steps(entropy=[np.array([1, 2]), np.array([3])])
    with pytest.raises(TypeError, match=r"^merge_steps: entropy: 0.5, of an observation token, is"):
        merge_steps(steps, ["a", "a"], rules={"entropy": PerToken(0.5)})


def test_a_ragged_support_is_merged():
    support = [[[3, 7], [4]], [[5]]]
    steps = two_steps(
        rollout_sample_support=pack_ragged_support(support, [[3, 4], [5]], vocab_size=9)
    )
    merged = merge_steps(steps, ["a", "a"]).output["rollout_sample_support"]
    assert merged == pack_ragged_support(
        [[[3, 7], [4], [], [], [5]]], [[3, 4, 9, 9, 5]], vocab_size=10
    )
    apart = merge_steps(steps, ["a", "b"]).output["rollout_sample_support"]
    assert apart == steps["rollout_sample_support"]


def test_fields_keep_their_kinds():
    steps = two_steps(
        response_ids=[np.array([3, 4]), np.array([5])],
        loss_masks=([1, 1], [1]),
        rollout_logprobs=PackedTensor.from_lengths(torch.tensor([-0.3, -0.4, -0.5]), [2, 1]),
        rollout_expert_indices=pack_routes(
            [rows(0, 3), rows(0, 6)], [4, 7], num_experts=256, topk=2, num_layers=3
        ),
        rollout_sample_support=[
            SupportRows(np.array([3, 7, 4]), np.array([0, 2, 3])),
            SupportRows(np.array([5]), np.array([0, 1])),
        ],
    )
    output, _ = merge_steps(steps, ["a", "a"])
    assert output["response_ids"][0].tolist() == [3, 4, 9, 9, 5]
    assert output["loss_masks"] == ([1, 1, 0, 0, 1],)
    assert output["rollout_logprobs"].lengths == (5,)
    assert output["rollout_logprobs"].values[2:4].tolist() == [0, 0]
    assert output["rollout_expert_indices"][0].tolist() == rows(0, 6).tolist()
    packed = pack_support(output["rollout_sample_support"], [[3, 4, 9, 9, 5]], vocab_size=10)
    assert packed.values.tolist() == [[3, 7], [4, -1], [-1, -1], [-1, -1], [5, -1]]


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [("u1", "i2", "i2"), ("i2", "u1", "i2"), ("u2", "i2", "i4"), ("u8", "i8", "i8")],
)
def test_trap_21_routes_of_steps_widen_losslessly(first, second, dtype):
    steps = two_steps(rollout_expert_indices=[rows(0, 3, dtype=first), rows(0, 6, dtype=second)])
    (merged,) = merge_steps(steps, ["a", "a"]).output["rollout_expert_indices"]
    assert merged.dtype == np.dtype(dtype)
    assert merged.tolist() == rows(0, 6).tolist()
    tensors = [torch.from_numpy(given) for given in steps["rollout_expert_indices"]]
    (merged,) = merge_steps(two_steps(rollout_expert_indices=tensors), ["a", "a"]).output[
        "rollout_expert_indices"
    ]
    assert merged.tolist() == rows(0, 6).tolist()


@pytest.mark.parametrize(
    ("routes", "num_rows"),
    [([None, rows(0, 6)], 6), ([rows(0, 3), None], 3), ([rows(0, 3), rows(0, 2)], 3),
     ([None, None], None)],
)  # fmt: skip
def test_routes_of_a_step_may_be_missing_or_shorter(routes, num_rows):
    (merged,) = merge_steps(two_steps(rollout_expert_indices=routes), ["a", "a"]).output[
        "rollout_expert_indices"
    ]
    assert (merged is None) == (num_rows is None)
    assert num_rows is None or merged.tolist() == rows(0, num_rows).tolist()


def test_a_shorter_capture_between_longer_ones_takes_nothing_back():
    steps = {
        "prompt_token_ids": [[1, 2], [1, 2, 3], [1, 2, 3, 4]],
        "response_ids": [[3], [4], [5]],
        "rollout_expert_indices": [rows(0, 3), rows(0, 1, version=1), rows(0, 4, version=2)],
    }
    (merged,) = merge_steps(steps, [0, 0, 0]).output["rollout_expert_indices"]
    assert merged.tolist() == [*rows(0, 3).tolist(), *rows(3, 4, version=2).tolist()]


def test_no_step_is_changed():
    steps = two_steps(rollout_expert_indices=[rows(0, 3), rows(0, 6)])
    output, _ = merge_steps(steps, ["a", "a"])
    output["response_ids"][0][0] = 99
    output["rollout_expert_indices"][0][:] = 0
    assert steps["response_ids"] == [[3, 4], [5]]
    assert steps["rollout_expert_indices"][1].tolist() == rows(0, 6).tolist()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"response_ids": [[3, 4]]}, ValueError, "response_ids has 1 trajectories"),
        ({"response_ids": None}, ValueError, "response_ids is missing"),
        ({"prompt_token_ids": [[1.0], [1]]}, TypeError, r"prompt_token_ids of step 0\[0\] must be"),
        ({"loss_masks": [[1, 1], [1, 1]]}, ValueError,
         "loss_masks of step 1 has 2 rows for 1 response tokens"),
        ({"loss_masks": [[1, 1], None]}, TypeError, "loss_masks of step 1 must have a row a"),
        ({"loss_masks": [[1, 1], np.array([1])]}, TypeError,
         r"loss_masks of steps \[0, 1\] is list and ndarray"),
        ({"rollout_logprobs": [np.zeros(2, "f4"), np.zeros(1)]}, TypeError,
         r"rollout_logprobs is float32 \[\] in step 0, but float64 \[\] in step 1"),
        ({"rollout_expert_indices": [rows(0, 5), rows(0, 6)]}, ValueError,
         "rollout_expert_indices of step 0 has 5 rows for 4 tokens"),
        ({"rollout_expert_indices": [rows(0, 3)[0], None]}, ValueError,
         r"rollout_expert_indices of step 0 must be \[rows, L, K\]"),
        ({"rollout_expert_indices": [rows(0, 3), rows(0, 6)[:, :2]]}, TypeError,
         r"rollout_expert_indices is ndarray of rows \[3, 2\], but ndarray of \[2, 2\] in step 1"),
        ({"rollout_expert_indices": [rows(0, 3).tolist(), None]}, TypeError,
         "rollout_expert_indices of step 0 must be an array or a tensor, got list"),
        ({"stop_reasons": {"a", "b"}}, TypeError, "stop_reasons is not one item a trajectory"),
    ],
)  # fmt: skip
def test_bad_steps_are_one_line_that_names_field_and_step(fields, error, message):
    with pytest.raises(error, match=f"^merge_steps: {message}") as caught:
        merge_steps(two_steps(**fields), ["a", "a"])
    assert "\n" not in str(caught.value)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^merge_steps: 1 groups for 2 steps"):
        merge_steps(two_steps(), ["a"])
    with pytest.raises(TypeError, match=r"^merge_steps: groups must be a sequence, got str"):
        merge_steps(two_steps(), "aa")
    with pytest.raises(TypeError, match=r"^merge_steps: loss_masks: 'sum' is no rule"):
        merge_steps(two_steps(), ["a", "a"], rules={"loss_masks": "sum"})


# --- against a trace, and a real engine -----------------------------------------------------------


@given(data=st.data(), num_steps=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_merged_steps_are_what_a_trace_of_them_holds(data, num_steps):
    tokens = st.lists(st.integers(0, 40), max_size=3)
    prompt = [1, *data.draw(tokens)]
    trace = Trace(prompt, num_layers=3, topk=2, vocab_size=50)
    steps = {name: [] for name in ("prompt_token_ids", "response_ids", "loss_masks")}
    steps |= {name: [] for name in ("rollout_logprobs", "rollout_sample_support")}
    steps["rollout_expert_indices"] = []
    for step in range(num_steps):
        response = data.draw(tokens)
        routes = rows(0, len(prompt) + len(response) - 1, version=step)
        support = [[token, token + 1] for token in response]
        logprobs = [-token / 10 for token in response]
        trace.add_turn(response, logprobs=logprobs, support=support, routes=routes)
        for name, item in (
            ("prompt_token_ids", prompt), ("response_ids", response),
            ("loss_masks", [1] * len(response)), ("rollout_logprobs", logprobs),
            ("rollout_sample_support", support), ("rollout_expert_indices", routes),
        ):  # fmt: skip
            steps[name].append(item)
        observed = data.draw(tokens)
        if step < num_steps - 1:
            trace.add_observation(observed)
        prompt = [*prompt, *response, *observed]
    trajectory = trace.finalize()
    output, used = merge_steps(steps, [0] * num_steps)
    assert used == [list(range(num_steps))]
    assert output["prompt_token_ids"][0] == trajectory.prompt_ids.tolist()
    assert output["response_ids"][0] == trajectory.response_ids.tolist()
    assert output["loss_masks"][0] == trajectory.loss_mask.tolist()
    assert np.float32(output["rollout_logprobs"][0]).tolist() == trajectory.logprobs.tolist()
    ends = trajectory.support.row_offsets
    split = [ids.tolist() for ids in np.split(trajectory.support.token_ids, ends[1:-1])]
    assert output["rollout_sample_support"][0] == split[: len(ends) - 1]
    assert output["rollout_expert_indices"][0].tolist() == trajectory.routes.tolist()


def test_a_real_conversation_becomes_one_trajectory():
    capture = Capture.load(CAPTURE)
    output, used = merge_steps(
        {
            "prompt_token_ids": list(capture.prompt_ids),
            "response_ids": list(capture.response_ids),
            "loss_masks": [np.ones(len(ids), dtype=np.int64) for ids in capture.response_ids],
            "rollout_logprobs": list(capture.sampled_logprobs),
            "rollout_expert_indices": capture.routes,
            "rollout_sample_support": capture.support,
        },
        [i if conv < 0 else "conversation" for i, conv in enumerate(capture.optional["conv"])],
    )
    assert used == [*([i] for i in range(7)), [7, 8]]
    merged = output["rollout_expert_indices"]
    assert merged.lengths == (*capture.routes.lengths[:7], capture.routes.lengths[8])
    assert torch.equal(merged[7], capture.routes[8])  # the engine repeated the first turn's rows
    prompt, response = output["prompt_token_ids"][7], output["response_ids"][7]
    whole = np.concatenate([capture.prompt_ids[8], capture.response_ids[8]])
    assert np.array_equal(np.concatenate([prompt, response]), whole)
    sampled = torch.from_numpy(output["loss_masks"][7] == 1)
    support = output["rollout_sample_support"][7]
    both = torch.cat([capture.support[7], capture.support[8]])
    assert torch.equal(support[sampled], both)
    assert (support[~sampled] == -1).all()
    packed = pack_support(
        [support], [response.tolist()], vocab_size=capture.vocab_size, width=support.shape[1]
    )
    assert torch.equal(packed.values, support)
