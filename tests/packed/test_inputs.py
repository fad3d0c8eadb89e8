"""make_inputs, select_for_logprobs, token_masks: against plain loops, in the three paddings."""

import pickle

import numpy as np
import pytest
import torch

from packhorse.kernels.support_rows import gather_support
from packhorse.packed.collate import SupportRows
from packhorse.packed.domains import validate_batch
from packhorse.packed.inputs import make_inputs, select_for_logprobs, token_masks
from packhorse.packed.microbatch import MicrobatchPlan, plan_ranks_by_tokens
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.trajectory import generator_output, pack_trajectories
from packhorse.replay.layout import TokenLayout, columns_from_mask
from tests.packed.inputs_model import (
    PAD,
    PADDINGS,
    E,
    K,
    L,
    V,
    expected,
    make_output,
)
from tests.packed.trace_helpers import add_turn, make_trace, rows

OPTIONS = {"pad_token_id": PAD, "vocab_size": V, "num_experts": E}
DTYPES = {
    "sequences": torch.int64,
    "attention_mask": torch.int64,
    "response_mask": torch.int64,
    "loss_mask": torch.float32,
    "rewards": torch.float32,
    "rollout_logprobs": torch.float32,
    "appended": torch.bool,
    "excused": torch.bool,
}


def check_rows(batch, model) -> None:
    for field, dtype in DTYPES.items():
        assert (field in batch) == (field in model[0]), field
        if field in batch:
            assert batch[field].dtype == dtype
            wanted = torch.tensor([row[field] for row in model], dtype=dtype)
            assert torch.equal(batch[field], wanted.reshape(batch[field].shape)), field
    for field in ("lengths", "response_lengths", "first_columns"):
        assert batch[field] == tuple(row[field] for row in model)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("seed", range(20))
def test_each_token_stands_where_the_padding_says_and_the_rest_is_fill(padding, seed):
    optional = ("loss_masks", "rewards", "rollout_logprobs", "appended")
    dropped = {field: False for k, field in enumerate(optional) if seed >> k & 1}
    output = make_output(seed, **dropped)
    widths = {}
    if seed % 3 == 0:
        widths = {"response_width": 9, **{
            "left": {"width": 14}, "right": {"width": 12}, "two-sided": {"prompt_width": 5},
        }[padding]}  # fmt: skip
    batch = make_inputs(output, padding=padding, **OPTIONS, **widths)
    check_rows(batch, expected(output, padding, widths))
    assert batch["uids"] == tuple(output["uids"])
    assert batch.metadata == {"padding": padding, "pad_token_id": PAD}

    routes = batch["rollout_expert_indices"]
    assert routes.dtype == torch.uint8
    for i, ids in enumerate(output["rollout_expert_indices"]):
        assert routes[i].tolist() == ids.tolist()
    support = batch["rollout_sample_support"]
    for i, given in enumerate(output["rollout_sample_support"]):
        assert [[t for t in row if t >= 0] for row in support[i].tolist()] == given


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_layout_of_the_first_columns_finds_each_token_and_its_support(padding):
    output = make_output(3)
    batch = make_inputs(output, padding=padding, **OPTIONS)
    lengths, columns = batch["lengths"], batch["first_columns"]
    assert columns_from_mask(batch["attention_mask"]) == (list(lengths), list(columns))
    layout = TokenLayout.build(
        lengths, first_columns=columns, batch_width=batch["sequences"].shape[1]
    )
    pairs = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    assert layout.align(batch["sequences"], -1).tolist() == [t for p, r in pairs for t in p + r]
    targets = layout.align(batch["sequences"], -1, next_token=True)
    row_ids = layout.support_row_ids(batch["response_lengths"])
    sampled = [token for ids in output["response_ids"] for token in ids]
    assert targets[row_ids >= 0].tolist() == sampled
    if padding != "right":  # the last columns of the sequences
        width = batch["response_mask"].shape[1]
        last = batch["sequences"][:, -width:]
        assert last[batch["response_mask"].bool()].tolist() == sampled


def test_finished_traces_become_the_batch_of_their_output():
    traces = [make_trace(2), make_trace(3)]
    add_turn(traces[0], [5, 6], routes=rows(0, 3))
    add_turn(traces[1], [7], routes=rows(0, 3))
    traces[1].add_observation([8, 9])
    traces[1].append_tokens([1])
    finished = [trace.finalize() for trace in traces]
    batch = make_inputs(finished, vocab_size=50)
    assert batch.equal(make_inputs(generator_output(finished), vocab_size=50))
    packed = pack_trajectories(finished, vocab_size=50)
    assert batch["rollout_expert_indices"].equal(packed.routes)
    assert batch["rollout_sample_support"].equal(packed.support)
    assert batch["missing"] == (False, False)
    assert batch["lengths"], batch["response_lengths"] == (packed.lengths, packed.response_lengths)
    for field, masks in (
        ("loss_mask", packed.loss_masks), ("appended", packed.appended),
        ("excused", packed.excused),
    ):  # fmt: skip
        for ours, theirs in zip(token_masks(batch, field), masks, strict=True):
            assert ours.tolist() == theirs.tolist()
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]
    assert batch["appended"].tolist() == [[False] * 4, [False] * 3 + [True]]


@pytest.mark.parametrize("padding", PADDINGS)
def test_token_masks_are_over_each_trajectorys_own_tokens(padding):
    output = make_output(5)
    batch = make_inputs(output, padding=padding, **OPTIONS)
    given = zip(output["prompt_token_ids"], output["loss_masks"], strict=True)
    wanted = [[False] * len(prompt) + [bool(x) for x in mask] for prompt, mask in given]
    assert [mask.tolist() for mask in token_masks(batch)] == wanted
    assert [mask.tolist() for mask in token_masks(batch[::-1])] == wanted[::-1]
    assert token_masks(batch[:0]) == []
    assert token_masks(batch, "values") is None


def test_fields_in_any_form_make_the_same_batch():
    output = make_output(11, size=4, appended=False)
    plain = make_inputs(output, **OPTIONS)
    arrays = output | {
        "prompt_token_ids": [np.array(ids, dtype=np.int32) for ids in output["prompt_token_ids"]],
        "response_ids": PackedTensor.from_segments(
            [torch.tensor(ids, dtype=torch.int64) for ids in output["response_ids"]]
        ),
        "loss_masks": tuple(torch.tensor(m).bool() for m in output["loss_masks"]),
        "rewards": [np.array(row, dtype=np.float64) for row in output["rewards"]],
        "rollout_logprobs": [torch.tensor(row) for row in output["rollout_logprobs"]],
        "rollout_expert_indices": plain["rollout_expert_indices"],
        "rollout_sample_support": [
            SupportRows(
                np.array([t for row in given for t in row], dtype=np.int32),
                np.cumsum([0, *map(len, given)]),
            )
            for given in output["rollout_sample_support"]
        ],
    }
    assert make_inputs(arrays, **OPTIONS).equal(plain)
    packed = output | {"rollout_sample_support": plain["rollout_sample_support"]}
    assert make_inputs(packed, **OPTIONS).equal(plain)


def test_a_ragged_support_holds_the_same_ids():
    output = make_output(8, size=5)
    plain = make_inputs(output, **OPTIONS)
    ragged = make_inputs(output, ragged=True, **OPTIONS)
    support = ragged["rollout_sample_support"]
    assert isinstance(support, PackedRagged)
    assert support.to_padded().equal(plain["rollout_sample_support"])
    assert ragged.drop(["rollout_sample_support"]).equal(plain.drop(["rollout_sample_support"]))
    given = output | {"rollout_sample_support": support}
    assert make_inputs(given, ragged=True, **OPTIONS).equal(ragged)
    cut = make_inputs(given, ragged=True, max_length=7, **OPTIONS)
    assert cut.equal(make_inputs(output, ragged=True, max_length=7, **OPTIONS))
    with pytest.raises(TypeError, match=r"^make_inputs: rollout_sample_support is a PackedRag"):
        make_inputs(given, **OPTIONS)
    with pytest.raises(ValueError, match=r"^make_inputs: support_width is not of a ragged"):
        make_inputs(output, ragged=True, support_width=9, **OPTIONS)
    with pytest.raises(ValueError, match=r"^make_inputs: rollout_sample_support of trajectory \d"):
        make_inputs(given | {"rollout_sample_support": support[::-1]}, ragged=True, **OPTIONS)


@pytest.mark.parametrize("padding", PADDINGS)
def test_no_trajectories_make_an_empty_batch_of_the_same_fields(padding):
    fields = ("prompt_token_ids", "response_ids", "rewards", "rollout_logprobs", "appended", "uids")
    batch = make_inputs({field: [] for field in fields}, padding=padding)
    assert len(batch) == 0
    assert list(batch.fields) == [
        "sequences", "attention_mask", "response_mask", "loss_mask", "rewards",
        "rollout_logprobs", "appended", "excused", "lengths", "response_lengths", "first_columns",
        "uids",
    ]  # fmt: skip
    assert batch["sequences"].shape == (0, 1)  # the column of a synthetic trajectory
    assert batch["rewards"].shape == (0, 0)


def test_masks_of_floats_are_those_of_integers():
    output = {"prompt_token_ids": [[1], [2]], "response_ids": [[3, 4], [5]]}
    plain = make_inputs(output | {"loss_masks": [[1, 0], [1]]})
    for masks in (
        [[1.0, 0.0], [1]], [torch.tensor([1.0, 0.0]), torch.ones(1)],
        [np.array([1.0, 0.0]), (True,)], [torch.tensor([1, 0]).bfloat16(), [1.0]],
    ):  # fmt: skip
        assert make_inputs(output | {"loss_masks": masks}).equal(plain)


def test_a_reward_of_a_trajectory_is_that_of_its_last_response_token():
    output = {"prompt_token_ids": [[1], [1, 2], [3]], "response_ids": [[4, 5], [6], []]}
    for rewards in ([0.5, -1, 0], np.array([0.5, -1.0, 0.0]), torch.tensor([0.5, -1.0, 0.0])):
        batch = make_inputs(output | {"rewards": rewards})
        assert batch["rewards"].tolist() == [[0, 0.5], [0, -1], [0, 0]]
    batch = make_inputs(output | {"rewards": [0.5, -1, 0]}, padding="two-sided", response_width=3)
    assert batch["rewards"].tolist() == [[0, 0.5, 0], [-1, 0, 0], [0, 0, 0]]


def test_what_no_trajectory_has_is_not_in_the_batch():
    output = {
        "prompt_token_ids": [[1], [2]], "response_ids": [[3], [4, 5]], "rewards": None,
        "rollout_logprobs": [None, None], "rollout_expert_indices": [None, None],
        "rollout_sample_support": None,
    }  # fmt: skip
    batch = make_inputs(output)
    assert list(batch.fields) == [
        "sequences", "attention_mask", "response_mask", "loss_mask", "lengths",
        "response_lengths", "first_columns",
    ]  # fmt: skip
    assert batch["loss_mask"].tolist() == [[0, 1], [1, 1]]


def test_trap_36_a_trajectory_whose_routes_are_lost_is_marked():
    output = make_output(2, size=3, appended=False)
    routes = [output["rollout_expert_indices"][0], None, output["rollout_expert_indices"][2]]
    lost = output | {"rollout_expert_indices": routes, "missing": [False, True, False]}
    batch = make_inputs(lost, **OPTIONS)
    assert batch["rollout_expert_indices"].lengths == (len(routes[0]), 0, len(routes[2]))
    assert batch["missing"] == (False, True, False)


def test_other_fields_are_carried_along():
    output = make_output(4, size=3) | {
        "env": {"scores": np.arange(3.0), "names": np.array(["a", "b", "c"]), "step": 7},
        "images": torch.zeros(3, 2),
        "metrics": {"mean": 0.5},
    }
    batch = make_inputs(output, shared=("metrics", "env.step"), **OPTIONS)
    assert batch["env"]["scores"].tolist() == [0, 1, 2]
    assert batch["env"]["names"] == ("a", "b", "c")
    assert batch["images"].shape == (3, 2)
    assert batch.metadata["metrics"] == {"mean": 0.5}
    assert batch.metadata["env.step"] == 7


def test_no_input_is_written_and_none_shares_memory():
    output = make_output(9, size=3)
    ids = [np.array(row, dtype=np.int64) for row in output["prompt_token_ids"]]
    given = output | {"prompt_token_ids": ids, "marks": np.arange(3)}
    before = pickle.dumps(given)
    batch = make_inputs(given, **OPTIONS)
    for field in ("sequences", "rewards", "marks", "loss_mask"):
        batch[field].fill_(1)
    batch["rollout_expert_indices"].values.fill_(3)
    assert pickle.dumps(given) == before


def test_the_selection_for_logprobs_has_what_replay_and_scoring_need():
    output = make_output(6, size=3) | {"values": [1.0, 2.0, 3.0]}
    batch = make_inputs(output, **OPTIONS)
    chosen = select_for_logprobs(batch)
    assert list(chosen.fields) == [
        "sequences", "attention_mask", "response_mask", "loss_mask", "lengths",
        "response_lengths", "first_columns", "appended", "excused", "rollout_expert_indices",
        "rollout_sample_support",
    ]  # fmt: skip
    for field in chosen.fields:
        assert chosen[field] is batch[field]
    mask = torch.zeros(3, batch["sequences"].shape[1], dtype=torch.bool)
    bare = make_inputs({k: output[k] for k in ("prompt_token_ids", "response_ids")})
    bare["router_padding_mask"] = mask
    assert list(select_for_logprobs(bare).fields)[-1] == "router_padding_mask"


# --- into a model's order -------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("form", ["thd", "bshd"])
def test_every_token_of_eight_ranks_meets_its_own_routes_and_support_once(padding, form, device):
    output = make_output(21, size=30)
    batch = make_inputs(output, padding=padding, **OPTIONS)
    parts = [list(range(rank, 30, 8)) for rank in range(8)]
    plans = plan_ranks_by_tokens(
        [[batch["lengths"][i] for i in part] for part in parts],
        max_tokens=15,
        rectangle=form == "bshd",
    )
    met: dict[str, int] = {}
    for part, plan in zip(parts, plans, strict=True):
        for microbatch in plan.split(batch[part]):
            layout = TokenLayout.build(
                microbatch["lengths"],
                format=form,
                first_columns=microbatch["first_columns"],
                batch_width=microbatch["sequences"].shape[1],
                device=device,
            )
            placed = microbatch.to(device)
            routes = layout.gather_routes(
                placed["rollout_expert_indices"], range(2), num_experts=E, dtype=torch.int64
            )
            experts, masked = routes.topk_ids.tolist(), routes.padding_mask.tolist()
            tokens = layout.align(placed["sequences"], -1).tolist()
            row_ids = layout.support_row_ids(microbatch["response_lengths"])
            support = gather_support(placed["rollout_sample_support"].values, row_ids).tolist()
            for b, uid in enumerate(microbatch["uids"]):
                longest = max(microbatch["lengths"])
                for s in range(microbatch["lengths"][b]):
                    if form == "bshd":
                        slot = s * len(microbatch) + b
                        assert slot < longest * len(microbatch)
                    else:
                        slot = sum(microbatch["lengths"][:b]) + s
                    if uid is None:
                        assert masked[slot]
                        continue
                    i = output["uids"].index(uid)
                    prompt, response = output["prompt_token_ids"][i], output["response_ids"][i]
                    known = output["rollout_expert_indices"][i]
                    assert tokens[slot] == (prompt + response)[s]
                    assert masked[slot] == (s >= len(known))
                    if s < len(known):
                        assert [experts[layer][slot] for layer in range(2)] == known[s].tolist()
                    r = s + 1 - len(prompt)
                    own = output["rollout_sample_support"][i][r] if 0 <= r < len(response) else []
                    assert [token for token in support[slot] if token >= 0] == own
                met[uid] = met.get(uid, 0) + 1
    met.pop(None, None)
    assert met == dict.fromkeys(output["uids"], 1)


# --- refusals -------------------------------------------------------------------------------------

BASE = {"prompt_token_ids": [[1, 2], [3]], "response_ids": [[4, 5], [6]]}
ROUTES = [np.array([[[0, 1]]] * 3), np.array([[[2, 1]]])]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"pad_token_id": 2**31}, "pad_token_id must be at most 2147483647, got 2147483648"),
        ({"loss_masks": [[1, 0.5], [1]]}, {}, "loss_masks of trajectory 0 must hold booleans"),
        ({"loss_masks": [torch.tensor([1, 0.5]), [1]]}, {}, "loss_masks of trajectory 0 must hold"),
        ({}, {"padding": "both"}, "padding must be one of ('left', 'right', 'two-sided'), got"),
        ({"prompt_token_ids": None}, {}, "prompt_token_ids is missing"),
        ({"prompt_token_ids": [[1, 2], []]}, {}, "prompt_token_ids of trajectory 1 is empty"),
        ({"response_ids": [[4, 5]]}, {}, "response_ids has 1 trajectories, prompt_token_ids has 2"),
        ({"response_ids": [[4, 5], [-6]]}, {},
         "response_ids of trajectory 1, token 0: id -6 is negative"),
        ({}, {"vocab_size": 6},
         "response_ids of trajectory 1, token 0: id 6 is not below vocab_size=6"),
        ({"response_ids": [[4, 5], [0.5]]}, {}, "response_ids of trajectory 1[0] must be an int"),
        ({"loss_masks": [[1], [1]]}, {},
         "loss_masks of trajectory 0 has shape (1,), expected [2]"),
        ({"loss_masks": [[1, 2], [1]]}, {}, "loss_masks of trajectory 0, token 1: 2 is neither 0"),
        ({"loss_masks": [None, [1]]}, {},
         "loss_masks is None in trajectory 0, but not in trajectory 1"),
        ({"rewards": [1.0, None]}, {},
         "rewards is None in trajectory 1, but not in trajectory 0"),
        ({"rewards": [1.0, [1.0]]}, {},
         "rewards is one number in trajectory 0, but one a response token in trajectory 1"),
        ({"rewards": [[1.0, 2.0], [1.0, 2.0]]}, {},
         "rewards of trajectory 1 has shape (2,), expected [1] or one number"),
        ({"rewards": [float("nan"), 1.0]}, {}, "rewards of trajectory 0 is not finite"),
        ({"rewards": ["good", "bad"]}, {}, "rewards of trajectory 0 must be a number, or one a"),
        ({"rewards": [1e39, 1.0]}, {}, "rewards of trajectory 0 is not finite"),
        ({"rewards": np.ma.masked_array([1.0, 2.0], [0, 1])}, {}, "rewards is a masked array;"),
        ({"response_ids": [[4, 5], np.ma.masked_array([6], [1])]}, {},
         "response_ids of trajectory 1 is a masked array; fill it first"),
        ({"extra": np.ma.masked_array([1.0, 2.0], [0, 1])}, {}, "extra is a masked array; fill it"),
        ({"env": {"score": np.zeros(2, np.longdouble)}}, {},
         f"env.score must hold numbers of a dtype of torch, got {np.dtype(np.longdouble)}"),
        ({"padding": "mine"}, {"shared": ["padding"]},
         "padding is named in shared=, but is made here"),
        ({"response_ids": [[4, 5], []], "rewards": [1.0, 1.0]}, {},
         "rewards of trajectory 1 is 1.0, and it has no response token to hold it"),
        ({"rollout_logprobs": [[-1.0, -1.0], None]}, {},
         "rollout_logprobs is None in trajectory 1, but not in trajectory 0"),
        ({"rollout_logprobs": [[-1.0], [-1.0]]}, {},
         "rollout_logprobs of trajectory 0 has shape (1,), expected [2]"),
        ({"rollout_logprobs": [[-1.0, 0.5], [-1.0]]}, {},
         "rollout_logprobs of trajectory 0, token 1: 0.5 is positive"),
        ({"appended": [[0, 0], [0, 1]]}, {}, "appended of trajectory 1 has shape (2,), expected"),
        ({"missing": [0, 1]}, {}, "missing of trajectory 0 must be a bool, got 0"),
        ({"rollout_expert_indices": [ROUTES[0], None]}, {},
         "rollout_expert_indices is None in trajectory 1, but not in trajectory 0; missing marks"),
        ({"rollout_expert_indices": ROUTES, "missing": [True, True]}, {},
         "rollout_expert_indices is missing in all 2 trajectories, so there is nothing to replay"),
        ({"rollout_expert_indices": ROUTES[::-1]}, {},
         "rollout_expert_indices of trajectory 1 has 3 rows for 2 tokens"),
        ({"rollout_expert_indices": ROUTES}, {"num_experts": 2},
         "rollout_expert_indices of trajectory 1, row 0, layer 0: expert 2 is not below"),
        ({"rollout_expert_indices": [ROUTES[0][:, :0], ROUTES[1]]}, {},
         "rollout_expert_indices of trajectory 0 has 0 layers and 2 experts a token (shape (3, 0,"),
        ({"rollout_expert_indices": ROUTES}, {"topk": 3},
         "rollout_expert_indices of trajectory 0 has 2 experts a token, expected 3"),
        ({"rollout_expert_indices": ROUTES}, {"num_layers": 0}, "num_layers must be positive, got"),
        ({"rollout_expert_indices": PackedTensor.from_segments([torch.zeros(2, 1, 1).byte()] * 2)},
         {"num_layers": 2}, "rollout_expert_indices has 1 layers, expected 2"),
        ({"rollout_expert_indices": PackedTensor.from_lengths(
            torch.zeros(4, 1, 1, dtype=torch.uint8, device="meta"), [2, 2])}, {},
         "rollout_expert_indices is on meta; it must be on the host"),
        ({"rollout_sample_support": [[[4], [5]], [[6]]]}, {},
         "vocab_size is needed for rollout_sample_support"),
        ({"rollout_sample_support": [[[4], [5]], None]}, {"vocab_size": 9},
         "rollout_sample_support is None in trajectory 1, but not in trajectory 0"),
        ({"rollout_sample_support": [[[4], [5]], [[7]]]}, {"vocab_size": 9},
         "rollout_sample_support of trajectory 1, row 0: the sampled id 6 is not among its 1 ids"),
        ({"rollout_sample_support": [[[4], [5]], [[6, 7]]]}, {"vocab_size": 9, "support_width": 1},
         "rollout_sample_support of trajectory 1, row 0: 2 ids do not fit width=1"),
        ({"rollout_expert_indices": [[[4], [5]], [[6]]], "rollout_sample_support": ROUTES}, {},
         "rollout_expert_indices and rollout_sample_support are swapped: the first holds rows of"),
        ({}, {"width": 3}, "width=3 is below the 4 tokens of trajectory 0"),
        ({}, {"response_width": 1}, "response_width=1 is below the 2 response tokens of traj"),
        ({}, {"response_width": 5}, "response_width=5 is above width=4: response fields are the"),
        ({}, {"prompt_width": 5}, "prompt_width is of 'two-sided' padding, not of 'left'"),
        ({}, {"width": 5, "padding": "two-sided"}, "width is prompt_width + response_width in"),
        ({}, {"prompt_width": 1, "padding": "two-sided"}, "prompt_width=1 is below the 2 prompt"),
        ({"sequences": [1, 2]}, {}, "the output has a field sequences, which is made here"),
        ({"metrics": 0.5}, {}, "metrics is not one item a trajectory, but float; name it in"),
        ({}, {"max_length": 2},
         "prompt_token_ids of trajectory 0 has 2 tokens, max_length=2 leaves none for its"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line_that_names_the_trajectory(change, options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        make_inputs(BASE | change, **options)
    text = str(caught.value)
    assert text.startswith(f"make_inputs: {message}")
    assert "\n" not in text


def test_a_rank_without_a_trajectory_has_what_the_others_have():
    """Eight ranks, each with a generator of its own, one of which returned nothing."""
    sizes = {"vocab_size": V, "num_experts": E, "num_layers": L, "topk": K}
    outputs = [make_output(seed, 3) for seed in range(7)]
    nothing = {field: [] for field in outputs[0]}
    for padding in PADDINGS:
        for ragged in (False, True):
            options = {"padding": padding, "ragged": ragged, **sizes}
            batches = [make_inputs(output, **options) for output in (*outputs, nothing)]
            assert set(batches[-1].fields) == set(batches[0].fields)
            assert batches[-1]["rollout_expert_indices"].row_shape == (L, K)
            plans = plan_ranks_by_tokens([batch["lengths"] for batch in batches], max_tokens=9)
            counts = set()
            for batch, plan in zip(batches, plans, strict=True):
                microbatches = plan.split(batch)
                counts.add(len(microbatches))
                for microbatch in microbatches:
                    validate_batch(microbatch, **sizes)
                    assert "rollout_expert_indices" in microbatch
            assert len(counts) == 1
    # and traces: none, but what they would have is known
    batch = make_inputs([], **sizes)
    (microbatch,) = MicrobatchPlan(((),), (1,)).split(batch)
    validate_batch(microbatch, **sizes)
    assert microbatch["sequences"].shape == (1, 1)
    assert microbatch["rollout_expert_indices"].lengths == (0,)
    assert microbatch["rollout_sample_support"].lengths == (0,)
    assert "rollout_expert_indices" not in make_inputs([], vocab_size=V)
    assert "rollout_sample_support" not in make_inputs([])


def test_one_csr_may_hold_the_support_of_all_trajectories():
    rows_of_all = SupportRows(np.array([4, 9, 5, 6]), np.array([0, 2, 3, 4]))
    batch = make_inputs(BASE | {"rollout_sample_support": rows_of_all}, vocab_size=10)
    assert batch["rollout_sample_support"].lengths == (2, 1)
    assert batch["rollout_sample_support"].values.tolist() == [[4, 9], [5, -1], [6, -1]]


def test_flags_and_numbers_of_any_array_are_taken():
    fields = {"missing": torch.tensor([False, True]), "score": np.array([1, 2], dtype=">i4")}
    batch = make_inputs(BASE | fields)
    assert batch["missing"] == (False, True)
    assert batch["score"].tolist() == [1, 2]


def test_other_arguments_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"^make_inputs: trajectory 0 must be a Trajectory, got in"):
        make_inputs([1, 2])
    with pytest.raises(TypeError, match=r"^select_for_logprobs: batch must be a Batch, got dict"):
        select_for_logprobs({})
    batch = make_inputs(BASE)
    with pytest.raises(KeyError, match="select_for_logprobs: no field 'loss_mask'"):
        select_for_logprobs(batch.drop(["loss_mask"]))
    with pytest.raises(TypeError, match=r"^token_masks: batch must be a Batch, got int"):
        token_masks(1)
    batch["rewards"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^token_masks: rewards is \[2, 3\], response_mask is"):
        token_masks(batch, "rewards")
    batch["response_mask"] = torch.tensor([[1, 1], [1, 1]])
    with pytest.raises(
        ValueError,
        match=r"^token_masks: response_mask of trajectory 1 has 2 tokens, response_lengths says 1",
    ):
        token_masks(batch)
    with pytest.raises(TypeError, match=r"^token_masks: uids must be a dense tensor, got tuple"):
        token_masks(batch.with_fields({"uids": ["a", "b"]}), "uids")
    meta = batch.to("meta")
    with pytest.raises(TypeError, match=r"^token_masks: loss_mask is on meta; it must be on the"):
        token_masks(meta)
