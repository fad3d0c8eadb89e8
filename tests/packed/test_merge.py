"""concatenate, select, replace, count: every per-trajectory field follows, whatever it is.

Oracle: Python lists of trajectories, one dictionary each.
"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed.merge import (
    concatenate_outputs,
    count_trajectories,
    replace_trajectories,
    select_trajectories,
)
from packhorse.packed.tensor import PackedTensor

L, K = 2, 2


def make_output(names, *, shared=False, dtype=torch.uint8, width=2) -> dict:
    """One trajectory a name (a number below 50), its fields of every kind and telling it."""
    lengths = [name % 4 for name in names]
    total = sum(lengths)
    values = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
    routes = torch.tensor(values, dtype=dtype)[:, None, None].expand(total, L, K).clone()
    support = torch.tensor(values, dtype=torch.int32)[:, None].expand(total, width).clone()
    output = {
        "prompt_token_ids": [[name, name + 1] for name in names],
        "response_ids": [[name] * (name % 3) for name in names],
        "rewards": np.array(names, dtype=np.float32).reshape(-1),
        "stop_reasons": tuple(f"stop {name}" for name in names),
        "advantages": torch.tensor(names, dtype=torch.float64).reshape(-1, 1).repeat(1, 3),
        "rollout_logprobs": None,
        "rollout_expert_indices": PackedTensor.from_lengths(routes, lengths),
        "rollout_sample_support": PackedTensor.from_lengths(support, lengths),
        "a_field_of_tomorrow": np.array([{"name": name} for name in names] + [None])[:-1],
        "env": {
            "scores": [float(name) for name in names],
            "inner": {"notes": [{"of": [name]} for name in names], "absent": None},
        },
    }
    if shared:
        output["rollout_metrics"] = {"mean": sum(names) / max(len(names), 1)}
        output["env"]["seed"] = len(names)
    return output


def trajectories_of(output) -> list[dict]:
    """What each trajectory holds, as plain Python."""
    return [
        {
            "prompt": output["prompt_token_ids"][i],
            "response": output["response_ids"][i],
            "reward": float(output["rewards"][i]),
            "stop": output["stop_reasons"][i],
            "advantage": output["advantages"][i].tolist(),
            "routes": output["rollout_expert_indices"][i].tolist(),
            "support": output["rollout_sample_support"][i].tolist(),
            "tomorrow": output["a_field_of_tomorrow"][i],
            "score": output["env"]["scores"][i],
            "note": output["env"]["inner"]["notes"][i],
        }
        for i in range(len(output["prompt_token_ids"]))
    ]


def check(output, names) -> None:
    """``output`` holds the trajectories ``names``, in fields of the kinds it began with."""
    expected = make_output(names)
    assert trajectories_of(output) == trajectories_of(expected)
    assert count_trajectories(output, shared=SHARED) == len(names)
    for field in expected:
        assert type(output[field]) is type(expected[field]), field
    assert output["rollout_logprobs"] is None
    assert output["env"]["inner"]["absent"] is None
    assert output["rewards"].dtype == np.float32
    assert output["advantages"].shape == (len(names), 3)


SHARED = ("rollout_metrics", "env.seed")


# --- trap 33 --------------------------------------------------------------------------------------


def test_trap_33_every_field_follows_a_filter_and_a_replacement():
    output = make_output([10, 21, 32, 43])
    check(select_trajectories(output, [0, 2, 3]), [10, 32, 43])
    check(replace_trajectories(output, [1], [3]), [10, 43, 32, 43])
    check(output, [10, 21, 32, 43])


def test_trap_33_an_empty_keep_list_is_a_defined_result():
    empty = select_trajectories(make_output([10, 21]), [])
    check(empty, [])
    assert empty["rollout_expert_indices"].row_shape == (L, K)
    assert empty["env"] == {"scores": [], "inner": {"notes": [], "absent": None}}
    check(concatenate_outputs([empty, make_output([5])]), [5])
    check(select_trajectories(empty, []), [])


def test_a_replacement_is_a_copy():
    output = make_output([10, 21, 32])
    replaced = replace_trajectories(output, [0], [2])
    replaced["response_ids"][0].append(99)
    replaced["env"]["inner"]["notes"][0]["of"].append(99)
    replaced["a_field_of_tomorrow"][0]["name"] = 99
    replaced["rewards"][0] = 99
    check(output, [10, 21, 32])
    assert replaced["response_ids"][2] == [32, 32]
    assert replaced["a_field_of_tomorrow"][2] == {"name": 32}


def test_a_trajectory_selected_twice_is_copied_once():
    output = make_output([11, 20])
    twice = select_trajectories(output, [1, 1, 0])
    assert twice["response_ids"][0] is output["response_ids"][1]
    assert twice["response_ids"][1] is not output["response_ids"][1]
    check(twice, [20, 20, 11])


# --- against lists --------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_operations_agrees_with_lists(data):
    names = data.draw(st.lists(st.integers(0, 49), max_size=5))
    output = make_output(names)
    for _ in range(data.draw(st.integers(1, 4))):
        what = data.draw(st.sampled_from(["select", "mask", "slice", "cat", "replace", "source"]))
        places = st.integers(-len(names), len(names) - 1) if names else st.nothing()
        ids = data.draw(st.lists(places, max_size=6)) if names else []
        if what == "select":
            form = data.draw(st.sampled_from([list, np.array, torch.tensor]))
            output = select_trajectories(output, form(ids) if ids else [])
            names = [names[i] for i in ids]
        elif what == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
            output = select_trajectories(output, np.array(mask, dtype=np.bool_))
            names = [name for name, kept in zip(names, mask, strict=True) if kept]
        elif what == "slice":
            part = slice(*data.draw(st.tuples(places, places)) if names else (0, 0))
            output, names = select_trajectories(output, part), names[part]
        elif what == "cat":
            more = data.draw(st.lists(st.integers(0, 49), max_size=3))
            output = concatenate_outputs([output, make_output(more), output])
            names = [*names, *more, *names]
        else:
            others = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=3))
            source = make_output(others) if what == "source" else None
            pool = names if source is None else others
            targets = sorted({i % len(names) for i in ids}) if names else []
            given_ones = [data.draw(st.integers(0, len(pool) - 1)) for _ in targets]
            output = replace_trajectories(output, targets, given_ones, source=source)
            new = {t: pool[g] for t, g in zip(targets, given_ones, strict=True)}
            names = [new.get(i, name) for i, name in enumerate(names)]
    check(output, names)


# --- what belongs to the whole output -------------------------------------------------------------


def test_shared_fields_are_kept_or_made_of_all():
    output = make_output([10, 21], shared=True)
    chosen = select_trajectories(output, [1], shared=SHARED)
    check(chosen, [21])
    assert chosen["rollout_metrics"] == {"mean": 15.5}
    assert chosen["env"]["seed"] == 2
    replaced = replace_trajectories(
        output, [0], [0], source=make_output([5], shared=True), shared=SHARED
    )
    check(replaced, [5, 21])
    assert (replaced["rollout_metrics"], replaced["env"]["seed"]) == ({"mean": 15.5}, 2)
    joined = concatenate_outputs(
        [output, make_output([32], shared=True)],
        shared={"rollout_metrics": lambda values: values, "env.seed": max},
    )
    check(joined, [10, 21, 32])
    assert joined["rollout_metrics"] == [{"mean": 15.5}, {"mean": 32.0}]
    assert joined["env"]["seed"] == 2


def test_packed_routes_widen_and_supports_are_filled():
    wide = make_output([43], dtype=torch.int16, width=4)
    for outputs, names in (([make_output([10]), wide], [10, 43]), ([wide, make_output([10])], 0)):
        joined = concatenate_outputs(outputs)
        assert joined["rollout_expert_indices"].dtype == torch.int16
        support = joined["rollout_sample_support"].values.tolist()
        rows = [[10, 10, -1, -1]] * 2, [[43] * 4] * 3
        assert support == (rows[0] + rows[1] if names else rows[1] + rows[0])


def test_packed_classes_of_their_own_are_taken_by_their_own_operations():
    class Packed:
        def __init__(self, items):
            self.items = list(items)

        def __len__(self):
            return len(self.items)

        def __getitem__(self, ids):
            return Packed([self.items[i] for i in ids])

        @staticmethod
        def cat(parts):
            return Packed([item for part in parts for item in part.items])

    output = {"x": Packed("abc")}
    assert replace_trajectories(output, [0], [2])["x"].items == ["c", "b", "c"]
    assert concatenate_outputs([output, output])["x"].items == list("abcabc")


def test_texts_of_other_lengths_are_joined():
    joined = concatenate_outputs([{"x": np.array(["a"])}, {"x": np.array(["long"])}])
    assert joined["x"].tolist() == ["a", "long"]


# --- errors ---------------------------------------------------------------------------------------


def without(output, field):
    return {key: value for key, value in output.items() if key != field}


BAD_FIELDS = [
    ({"x": [1, 2], "rewards": [1.0]}, ValueError, "rewards has 1 trajectories, x has 2"),
    ({"x": [1, 2], "env": {"a": {"b": [1]}}}, ValueError, "env.a.b has 1 trajectories, x has 2"),
    ({"x": [1, 2], "mean": 0.5}, TypeError, r"mean is not one item a trajectory, but float; name"),
    ({"x": [1], "env": {"name": "go"}}, TypeError, "env.name is not one item a trajectory, but st"),
    ({"x": np.float32(1)}, TypeError, "x is not one item a trajectory, but float32"),
    ({"x": torch.tensor(1)}, TypeError, "x is not one item .*, but Tensor of no dimension"),
    ({"x": {1, 2}}, TypeError, "x is not one item a trajectory, but set"),
    ({"x": None, "y": {}}, ValueError, "no field holds one item a trajectory"),
    ([1, 2], TypeError, "an output must be a mapping, got list"),
]


@pytest.mark.parametrize(("output", "error", "message"), BAD_FIELDS)
def test_a_bad_output_is_refused_by_every_operation(output, error, message):
    for call, name in (
        (lambda: count_trajectories(output), "count_trajectories"),
        (lambda: select_trajectories(output, [0]), "select_trajectories"),
        (lambda: replace_trajectories(output, [0], [0]), "replace_trajectories"),
        (lambda: replace_trajectories({"x": [1]}, [0], [0], source=output), "replace_traj.*source"),
        (lambda: concatenate_outputs([{"x": [1]}, output]), "concatenate_outputs: output 1"),
    ):
        with pytest.raises(error, match=f"^{name}: {message}") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_namedtuple_is_a_record_not_a_list():
    from packhorse.packed.collate import SupportRows

    rows = SupportRows(np.array([1]), np.array([0, 1]))
    with pytest.raises(TypeError, match="x is not one item a trajectory, but SupportRows"):
        count_trajectories({"x": rows})
    assert count_trajectories({"x": [rows]}) == 1


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        (without(make_output([1]), "rewards"), ValueError, "rewards is in output 0, but not in"),
        (make_output([1]) | {"new": [1]}, ValueError, "new is in output 1, but not in output 0"),
        (make_output([1]) | {"rewards": [1.0]}, TypeError,
         "rewards is ndarray in output 0, but list in output 1"),
        (make_output([1]) | {"rollout_logprobs": [[0.0]]}, TypeError,
         "rollout_logprobs is None in output 0, but list in output 1"),
        (make_output([1]) | {"rewards": np.ones(1)}, TypeError,
         "rewards is float32 in output 0, but float64 in output 1"),
        (make_output([1]) | {"advantages": torch.ones(1, 2, dtype=torch.float64)}, ValueError,
         r"advantages has row shape \(3,\) in output 0, but \(2,\) in output 1"),
        (make_output([1]) | {"rollout_expert_indices": PackedTensor.from_lengths(
            torch.ones(1, L, 3, dtype=torch.uint8), [1])}, ValueError,
         r"rollout_expert_indices has row shape \(2, 2\) in output 0, but \(2, 3\) in output 1"),
        (make_output([1]) | {"env": {"scores": [1.0], "inner": {"notes": [1]}}}, ValueError,
         "env.inner.absent is in output 0, but not in output 1"),
    ],
)  # fmt: skip
def test_outputs_that_differ_are_refused_by_field_and_output(second, error, message):
    with pytest.raises(error, match=f"^concatenate_outputs: {message}"):
        concatenate_outputs([make_output([5, 6]), second])
    with pytest.raises(error, match=f"^replace_trajectories: {message}"):
        replace_trajectories(make_output([5, 6]), [0], [0], source=second)


def test_rows_past_int32_are_refused_by_field():
    many = torch.zeros(1, 1, 1, dtype=torch.uint8).expand(2**30, 1, 1)
    output = {"env": {"rollout_expert_indices": PackedTensor.from_lengths(many, [2**30])}}
    message = (
        r"^concatenate_outputs: env.rollout_expert_indices: .* 2147483648 rows do not fit int32"
    )
    with pytest.raises(ValueError, match=message):
        concatenate_outputs([output, output])


def test_bad_arguments_are_refused():
    output = make_output([1, 2])
    before = copy.deepcopy(trajectories_of(output))
    for call, error, message in (
        (lambda: concatenate_outputs([]), ValueError, "concatenate_outputs: there are no outputs"),
        (lambda: concatenate_outputs(output), TypeError, "concatenate_outputs: outputs must be a"),
        (lambda: select_trajectories(output, [2]), IndexError, "select_trajectories: index 2 is"),
        (lambda: select_trajectories(output, (0,)), TypeError, "select_trajectories: got a tuple"),
        (lambda: select_trajectories(output, [True]), ValueError, "select_trajectories: a mask of"),
        (lambda: replace_trajectories(output, [0], []), ValueError,
         "replace_trajectories: 0 replacements for 1 trajectories"),
        (lambda: replace_trajectories(output, [1, -1], [0, 0]), ValueError,
         "replace_trajectories: trajectory 1 is replaced twice"),
        (lambda: replace_trajectories(output, [1], [4]), IndexError,
         "replace_trajectories: replacements: index 4 is out of range"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            call()
    assert trajectories_of(output) == before
