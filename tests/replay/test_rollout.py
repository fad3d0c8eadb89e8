"""One response of an engine, checked whole: the rules, against plain Python."""

import math

import numpy as np
import pytest
import torch

from packhorse.packed.collate import SupportRows
from packhorse.packed.trace import Trace
from packhorse.replay.rollout import (
    CandidateRows,
    EngineModel,
    Rollout,
    SupportStatus,
    make_rollout,
    read_engine_model,
)

PROMPT = [5, 6, 7]
RESPONSE = [8, 9]


def distinct(num_rows: int, num_layers: int, topk: int, num_experts: int, seed: int = 0):
    """Routes as a router makes them: K different experts in each row and layer."""
    rng = np.random.default_rng(seed)
    rows = rng.random((num_rows, num_layers, num_experts)).argsort(-1)[..., :topk]
    return rows.astype(np.int64)


ROUTES = distinct(4, 3, 2, 8)


def test_a_rollout_is_read_only_and_keeps_what_it_was_given():
    routes = ROUTES.astype(np.uint16)
    rollout = make_rollout(
        PROMPT, RESPONSE, routes=routes, logprobs=[-0.5, -1.0], support=[[8, 1], [9]],
        finish_reason="stop", stop_reason=9, num_cached_tokens=2, request_id="a", index=1,
    )  # fmt: skip
    assert rollout.prompt_ids.tolist() == PROMPT
    assert rollout.response_ids.tolist() == RESPONSE
    assert rollout.routes.dtype == np.uint8
    assert np.array_equal(rollout.routes, ROUTES)
    assert rollout.logprobs.tolist() == [-0.5, -1.0]
    assert rollout.support.token_ids.tolist() == [8, 1, 9]
    assert rollout.support.row_offsets.tolist() == [0, 2, 3]
    assert rollout.support_status.tolist() == [SupportStatus.WHOLE] * 2
    assert (rollout.finish_reason, rollout.stop_reason, rollout.index) == ("stop", 9, 1)
    assert (rollout.length, rollout.num_cut, rollout.num_floored) == (5, 0, 0)
    routes[:] = 0
    assert np.array_equal(rollout.routes, ROUTES), "the engine's array is not kept"
    arrays = (
        rollout.prompt_ids, rollout.response_ids, rollout.routes, rollout.logprobs,
        rollout.support.token_ids, rollout.support.row_offsets, rollout.support_status,
    )  # fmt: skip
    assert not any(array.flags.writeable for array in arrays)


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "num_rows", "first"), [(0, 4, 0), (2, 2, 2), (3, 1, 3), (2, 4, 0)],
    ids=["whole", "from a row", "from the prompt's end", "start ignored"],
)  # fmt: skip
def test_rows_are_all_but_the_last_tokens_from_the_row_asked(start, num_rows, first):
    rows = ROUTES[4 - num_rows :]
    rollout = make_rollout(PROMPT, RESPONSE, routes=rows, routes_start=start)
    assert rollout.routes_start == first
    assert np.array_equal(rollout.routes, rows)


@pytest.mark.parametrize(("start", "num_rows"), [(0, 3), (0, 5), (2, 1), (2, 3), (2, 5), (0, 0)])
def test_any_other_number_of_rows_is_refused(start, num_rows):
    with pytest.raises(ValueError, match=f"has {num_rows} rows; 3 prompt and 2 response tokens"):
        make_rollout(PROMPT, RESPONSE, routes=distinct(num_rows, 3, 2, 8), routes_start=start)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64, torch.int32]
)
def test_any_integer_dtype_becomes_the_narrowest_that_holds_the_experts(dtype):
    routes = torch.from_numpy(ROUTES) if isinstance(dtype, torch.dtype) else ROUTES.astype(dtype)
    for num_experts, stored in ((8, np.uint8), (300, np.int16), (None, np.uint8)):
        model = EngineModel(num_experts=num_experts)
        rollout = make_rollout(PROMPT, RESPONSE, routes=routes, model=model)
        assert rollout.routes.dtype == stored
        assert np.array_equal(rollout.routes, ROUTES)


def test_an_expert_above_255_is_not_wrapped():
    routes = ROUTES.astype(np.uint16)
    routes[2, 1] = [299, 3]
    rollout = make_rollout(PROMPT, RESPONSE, routes=routes)
    assert rollout.routes[2, 1].tolist() == [299, 3]


def test_layers_of_zeros_are_an_engine_that_captured_nothing_unless_they_are_dense():
    routes = ROUTES.copy()
    routes[:, 0] = 0
    named = EngineModel(moe_layers=(1, 2))
    assert make_rollout(PROMPT, RESPONSE, routes=routes, model=named).moe_layers == (1, 2)
    assert make_rollout(PROMPT, RESPONSE, routes=routes).moe_layers == (1, 2)
    with pytest.raises(ValueError, match="layer 0: all zeros, as in all 4 rows"):
        make_rollout(PROMPT, RESPONSE, routes=routes, model=EngineModel(moe_layers=(0, 1, 2)))
    with pytest.raises(ValueError, match="is all zeros, in all 3 layers"):
        make_rollout(PROMPT, RESPONSE, routes=np.zeros_like(routes))
    # of one expert a token, zeros are routes
    one = make_rollout(PROMPT, RESPONSE, routes=np.zeros((4, 3, 1), dtype=np.uint8))
    assert one.routes.shape == (4, 3, 1)


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        ((1, 2, [3, 3]), {}, "row 1, layer 2: expert 3 is repeated"),
        ((1, 2, [3, 8]), {"num_experts": 8}, "expert 8 is not below num_experts=8"),
        ((1, 2, [-1, -1]), {}, "row 1, layer 2: no route"),
        ((3, 0, [1, 0]), {"moe_layers": (1, 2)}, "in a dense layer"),
        ((0, 0, [1, 0]), {"num_layers": 4}, "has 3 layers, the model 4"),
        ((0, 0, [1, 0]), {"topk": 8}, "has 2 experts a token, the model 8"),
    ],
    ids=["repeated", "too large", "missing", "dense", "layers", "topk"],
)
def test_routes_that_no_router_chose_are_refused(change, model, message):
    row, layer, ids = change
    routes = ROUTES.copy()
    routes[row, layer] = ids
    with pytest.raises(ValueError, match=message):
        make_rollout(PROMPT, RESPONSE, routes=routes, model=EngineModel(**model))


def test_a_request_that_was_aborted_before_its_first_token_has_no_routes_and_no_rows():
    rollout = make_rollout(PROMPT, [], logprobs=[], support=[], finish_reason="abort")
    assert rollout.routes is None
    assert rollout.support.row_offsets.tolist() == [0]
    assert rollout.length == 3


# --- logprobs -------------------------------------------------------------------------------------


def test_missing_and_infinite_logprobs_are_floored_and_counted():
    rollout = make_rollout(PROMPT, [1, 2, 3, 4], logprobs=[-0.1, math.nan, -math.inf, None])
    assert rollout.logprobs.tolist() == pytest.approx([-0.1, -9999.0, -9999.0, -9999.0])
    assert rollout.num_floored == 3


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [([-0.1], r"has shape \(1,\), expected \[2\]"), ([-0.1, 0.2], "token 1: 0.2.* is positive")],
)
def test_logprobs_of_another_number_or_sign_are_refused(logprobs, message):
    with pytest.raises(ValueError, match=message):
        make_rollout(PROMPT, RESPONSE, logprobs=logprobs)


# --- support --------------------------------------------------------------------------------------

LOG = [math.log(p) for p in (0.5, 0.3, 0.2)]
INF = -math.inf


def test_the_finite_candidates_are_the_support_in_every_form():
    ids = np.array([[8, 4, 2, 7], [1, 9, 5, 3]])
    logprobs = np.array([[LOG[0], LOG[1], LOG[2], INF], [0.0, INF, math.nan, -9999.0]])
    logprobs[1] = [INF, 0.0, INF, -9999.0]
    flat = CandidateRows(ids.reshape(-1), logprobs.reshape(-1), np.array([0, 4, 8]))
    for given in ((ids, logprobs), flat):
        rollout = make_rollout(PROMPT, RESPONSE, candidates=given)
        assert rollout.support.token_ids.tolist() == [8, 4, 2, 9]
        assert rollout.support.row_offsets.tolist() == [0, 3, 4]
        assert rollout.logprobs.tolist() == pytest.approx([LOG[0], 0.0])
        assert rollout.support_mass.tolist() == pytest.approx([1, 1])


def test_the_sampled_id_that_stands_twice_is_one_member_and_counts_once():
    given = CandidateRows(
        np.array([4, 8, 4, 2]), np.array([LOG[1], LOG[0], LOG[1], LOG[2]]), np.array([0, 4])
    )
    rollout = make_rollout(PROMPT, [4], candidates=given)
    assert rollout.support.token_ids.tolist() == [4, 8, 2]
    assert rollout.support_mass.tolist() == pytest.approx([1])
    assert rollout.logprobs.tolist() == pytest.approx([LOG[1]])


def test_a_cut_row_is_found_by_its_mass_and_refused_or_marked():
    given = np.array([[8, 4], [9, 1]]), np.array([[LOG[0], LOG[1]], [0.0, INF]])
    with pytest.raises(
        ValueError, match=r"token 0: the probabilities of its 2 candidates sum to 0\.8"
    ):
        make_rollout(PROMPT, RESPONSE, candidates=given)
    rollout = make_rollout(PROMPT, RESPONSE, candidates=given, on_cut="mark")
    assert rollout.support_status.tolist() == [SupportStatus.CUT, SupportStatus.WHOLE]
    assert rollout.support_mass.tolist() == pytest.approx([0.8, 1])
    assert rollout.num_cut == 1


def test_a_sampled_id_beside_the_candidates_completes_the_row_with_its_own_logprob():
    """Whole where its probability is what was missing, cut where others are missing too."""
    candidates = np.array([[4, 2]]), np.array([[LOG[0], LOG[1]]])
    rollout = make_rollout(PROMPT, [8], candidates=candidates, logprobs=[LOG[2]])
    assert rollout.support.token_ids.tolist() == [4, 2, 8]
    assert rollout.support_status.tolist() == [SupportStatus.ADDED]
    assert rollout.num_added == 1
    with pytest.raises(ValueError, match="the row is cut"):
        make_rollout(PROMPT, [8], candidates=candidates, logprobs=[-5.0])


def test_of_candidates_that_are_all_filtered_out_the_sampled_id_is_the_support():
    rollout = make_rollout(PROMPT, [5], candidates=(np.array([[1, 2]]), np.array([[INF, INF]])))
    assert rollout.support.token_ids.tolist() == [5]
    assert rollout.support_status.tolist() == [SupportStatus.ADDED]


def test_a_sampled_id_outside_the_mask_becomes_a_member_and_is_counted():
    rollout = make_rollout(PROMPT, RESPONSE, support=[[1, 2], [9, 3]])
    assert rollout.support.token_ids.tolist() == [1, 2, 8, 9, 3]
    assert rollout.num_added == 1


def test_a_mask_is_whole_whatever_number_of_candidates_stands_beside_it():
    candidates = np.array([[8, 4], [9, 1]]), np.array([[LOG[0], LOG[1]], [0.0, INF]])
    rollout = make_rollout(PROMPT, RESPONSE, support=[[2, 4, 8], [9]], candidates=candidates)
    assert rollout.support_status.tolist() == [SupportStatus.WHOLE] * 2
    assert math.isnan(rollout.support_mass[0])  # id 2 has no logprob
    assert rollout.support_mass[1] == 1
    with pytest.raises(ValueError, match=r"token 0: the probabilities of all its .* sum to 0\.8"):
        make_rollout(PROMPT, RESPONSE, support=[[4, 8], [9]], candidates=candidates)
    with pytest.raises(ValueError, match="token 0: candidate 4 with"):
        make_rollout(PROMPT, RESPONSE, support=[[2, 8], [9]], candidates=candidates)


ids = np.array
WRONG = [
    ({"support": [[8]]}, "has 1 rows for 2 sampled tokens"),
    ({"support": [[8, 8], [9]]}, "row 0: id 8 is repeated"),
    ({"support": [[8, 12], [9]], "model": EngineModel(vocab_size=12)}, "below vocab_size=12"),
    ({"support": SupportRows(ids([8]), ids([0, 2]))}, "row_offsets must rise"),
    ({"candidates": (ids([[8], [9]]), ids([[0.0], [0.1]]))}, r"token 1: logprob 0\.1.* positive"),
    (
        {"candidates": (ids([[8, 1], [9, 1]]), np.full((2, 2), -0.1))},
        r"sum to 1\.8097; the logprobs are not",
    ),
    ({"candidates": (ids([[8]]), ids([[0.0]]))}, "has 1 rows for 2 response tokens"),
    ({"candidates": (ids([8, 9]), np.zeros(2))}, r"ids must be \[R, C\]"),
    ({"candidates": (ids([[8], [9]]), np.zeros((2, 2)))}, r"logprobs are \(2, 2\)"),
    ({"candidates": CandidateRows(ids([8, 9]), np.zeros(1), ids([0, 1, 2]))}, "1 logprobs for 2"),
    ({"candidates": CandidateRows(ids([8, 9]), np.zeros(2), ids([0, 2, 1]))}, "must rise from 0"),
    ({"on_cut": "keep"}, "on_cut must be 'refuse' or 'mark'"),
    ({"routes_start": 4}, "routes_start.* is 4, past the 3 prompt ids"),
    ({"weight_versions": [(0, 2, "a"), (1, 2, "b")]}, r"\[1, 2\) is not in order"),
    ({"weight_versions": [(0, 3, "a")]}, "past the 2 response tokens"),
    ({"routes": np.zeros((4, 2), dtype=np.uint8)}, r"must be \[rows, L, K\]"),
    ({"model": EngineModel(vocab_size=9)}, "response_ids.*token 1: id 9 is not below vocab_size"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_is_wrong_is_named_with_the_request(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        make_rollout(PROMPT, RESPONSE, request_id="r7", **arguments)
    assert str(raised.value).startswith("make_rollout: ")
    if "on_cut" not in arguments:
        assert " of request r7" in str(raised.value)


def test_an_empty_prompt_and_wrong_types_are_refused():
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        make_rollout([], [1])
    with pytest.raises(TypeError, match="candidates must be CandidateRows or"):
        make_rollout(PROMPT, RESPONSE, candidates=[1, 2, 3])
    with pytest.raises(TypeError, match="must hold integers"):
        make_rollout(PROMPT, RESPONSE, routes=np.zeros((4, 3, 2)))


# --- into a trace ---------------------------------------------------------------------------------


def test_two_turns_fill_a_trace_and_no_row_is_taken_twice():
    routes = distinct(9, 3, 2, 8, seed=3)
    trace = Trace(PROMPT, num_layers=3, topk=2, vocab_size=16)
    first = make_rollout(
        PROMPT, RESPONSE, routes=routes[:4], logprobs=[-1.0, -2.0], support=[[8], [9, 1]],
        weight_versions=[(0, 2, 7)],
    )  # fmt: skip
    trace.add_turn(**first.turn())
    trace.add_observation([3, 3])
    second_prompt = trace.token_ids.tolist()
    for start in (0, trace.num_rows):
        second = make_rollout(
            second_prompt, [2, 4, 1], routes=routes[start:9], routes_start=start,
            logprobs=[-1.0] * 3, support=[[2], [4], [1]],
        )  # fmt: skip
        assert isinstance(second, Rollout)
    trace.add_turn(**second.turn())
    trajectory = trace.finalize()
    assert np.array_equal(trajectory.routes, routes)
    assert trajectory.weight_versions[0].version == 7


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_hidden_layers": 4, "num_experts_per_tok": 2, "num_local_experts": 8,
             "vocab_size": 512, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            EngineModel(4, 2, 8, (1,), 512),
        ),
        (
            {"num_hidden_layers": 4, "num_experts_per_tok": 8, "n_routed_experts": 64,
             "first_k_dense_replace": 1, "vocab_size": 9},
            EngineModel(4, 8, 64, (1, 2, 3), 9),
        ),
        (
            {"text_config": {"num_hidden_layers": 3, "num_experts": 16, "first_k_dense_replace": 1,
                             "moe_layer_freq": 2}},
            EngineModel(3, None, 16, (2,), None),
        ),
        ({"num_hidden_layers": 2, "num_local_experts": 8}, EngineModel(2, None, 8, None, None)),
        ({"num_hidden_layers": 2, "num_experts": 0}, EngineModel(2)),
        ({}, EngineModel()),
    ],
    ids=["qwen3_moe", "glm4_moe", "nested", "mixtral", "dense", "empty"],
)  # fmt: skip
def test_the_sizes_of_the_model_are_read_from_its_config(config, expected):
    assert read_engine_model(config) == expected


def test_a_config_with_other_sizes_is_refused():
    with pytest.raises(ValueError, match="num_experts must not be negative"):
        read_engine_model({"num_experts": -1})
    with pytest.raises(TypeError, match="config must be a mapping"):
        read_engine_model([])


@pytest.mark.parametrize("wrong", [-3, 2**31, 2**62])
def test_a_candidate_that_is_no_token_id_is_not_taken_for_a_member_of_another_row(wrong):
    """-3 in row 1 of width 6 is 3 in row 0."""
    candidates = (np.array([[3], [wrong]]), np.array([[0.0], [-0.5]]))
    with pytest.raises(ValueError, match=rf"candidates, token 1: id {wrong} is no token id"):
        make_rollout(
            [1, 1], [3, 4], support=[[3], [4, 5]], candidates=candidates, logprobs=[-0.1, -0.1]
        )
