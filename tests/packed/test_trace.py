"""Trace, Trajectory, pack_trajectories: turn by turn, each token's routes, support and logprob.

The engine of ``trace_helpers`` gives each token a route of its own that also depends on the version
of the weights, so that a row of another place or of a later pass shows.
"""

import numpy as np
import pytest
import torch

from packhorse.packed.collate import SupportRows, check_logprobs, pack_routes, pack_support
from packhorse.packed.merge import select_trajectories
from packhorse.packed.replies import LOGPROB_FLOOR, finite_candidates
from packhorse.packed.trace import Trace, TraceTail
from packhorse.packed.trajectory import (
    RowSpan,
    TokenKind,
    generator_output,
    pack_trajectories,
)
from packhorse.replay.layout import TokenLayout
from packhorse.replay.microbatch import ReplayMicrobatch
from tests.packed.trace_helpers import K, L, V, add_turn, make_trace, rows, support_of

# --- routes: widths, overlaps, boundaries ---------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(0, 100), (100, 0)])
def test_trap_21_a_turn_above_255_widens_the_others_in_either_order(first, second):
    trace = make_trace()
    low, high = rows(0, 4, offset=first, dtype=np.uint16), rows(4, 8, offset=second, dtype="i4")
    low[0, 0, 1], high[0, 0, 1] = (200, 300) if second else (300, 200)
    add_turn(trace, [5, 6], routes=low)
    assert trace.finalize().routes.dtype == (np.uint8 if second else np.int16)
    trace.add_observation([7])
    add_turn(trace, [8, 9, 10], routes=high, routes_start=4)
    trace.add_observation([11, 12])  # rows that have no route leave those before alone
    trace.append_tokens([1])
    routes = trace.finalize().routes
    assert routes.dtype == np.int16
    assert routes.tolist() == [*low.tolist(), *high.tolist()]


def test_the_dtype_is_that_of_the_experts_where_they_are_known():
    for num_experts, dtype in ((256, np.uint8), (384, np.int16), (40000, np.int32)):
        trace = make_trace(num_experts=num_experts)
        add_turn(trace, [5], routes=rows(0, 3, dtype=np.int64))
        assert trace.finalize().routes.dtype == dtype


def test_trap_22_rows_that_are_known_are_cut_off_a_full_reply():
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 4), weight_version=1)
    trace.add_observation([7, 8])
    assert trace.num_rows == 4
    full = rows(0, 8, version=1)  # of another version: what it says of rows 0 to 3 is not taken
    add_turn(trace, [9, 10], routes=full, routes_start=4, weight_version=2)
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == [*rows(0, 4).tolist(), *full[4:].tolist()]
    assert trajectory.weight_versions == (RowSpan(0, 4, 1), RowSpan(4, 8, 2))


def test_trap_22_an_aborted_turn_is_continued():
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 4))
    add_turn(trace, [7, 8], routes=rows(0, 6, version=1))
    routes = trace.finalize().routes
    assert len(routes) == 6
    assert routes.tolist() == [*rows(0, 4).tolist(), *rows(4, 6, version=1).tolist()]


def test_trap_23_the_row_of_the_boundary_token_comes_from_the_next_turn_at_its_position():
    trace = make_trace(1)
    add_turn(trace, [5, 6], routes=rows(0, 2))
    add_turn(trace, [7, 8], routes=rows(2, 4), routes_start=2)
    assert trace.finalize().routes.tolist() == rows(0, 4).tolist()


@pytest.mark.parametrize("start", [2, 3, 0])
def test_a_turn_without_routes_is_made_up_for_by_a_later_one(start):
    trace = make_trace()
    add_turn(trace, [5], routes=rows(0, 3))
    add_turn(trace, [6], routes=None)
    add_turn(trace, [7], routes=rows(start, 5), routes_start=start)
    assert trace.finalize().routes.tolist() == rows(0, 5).tolist()


def test_turns_without_tokens_or_rows_are_defined():
    trace = make_trace()
    trace.add_turn([], routes=rows(0, 2))  # aborted after the prompt was evaluated
    trace.add_turn([])  # aborted before
    trace.add_turn([], logprobs=[], support=[], routes=rows(2, 2), routes_start=2)
    assert (trace.num_rows, trace.length) == (2, 3)
    add_turn(trace, [5], routes=rows(2, 3), routes_start=2)
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == rows(0, 3).tolist()
    assert trajectory.response_ids.tolist() == [5]
    untouched = make_trace().finalize()
    assert untouched.routes.shape == (0, L, K)
    assert untouched.response_ids.size == 0


def test_a_pass_over_all_tokens_gives_the_last_rows():
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 4))
    trace.append_tokens([1])
    trace.add_routes(rows(0, 6, version=1), evaluated=6, weight_version="b")
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == [*rows(0, 4).tolist(), *rows(4, 6, version=1).tolist()]
    assert trajectory.weight_versions == (RowSpan(0, 4, None), RowSpan(4, 6, "b"))
    trace.add_routes(rows(6, 6), routes_start=6)  # there is nothing more to know
    assert trace.num_rows == 6


def test_captured_rows_are_nobody_elses_memory():
    trace = make_trace()
    reply = rows(0, 4)
    add_turn(trace, [5, 6], routes=reply)
    reply[:] = 0
    first = trace.finalize()
    assert first.routes.tolist() == rows(0, 4).tolist()
    for array in (first.routes, first.response_ids, first.logprobs, first.support.token_ids):
        array[:] = 0
    second = trace.finalize()
    assert second.routes.tolist() == rows(0, 4).tolist()
    assert second.response_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    "form",
    [
        np.asfortranarray, torch.from_numpy, lambda ids: ids.astype(np.int64),
        lambda ids: np.repeat(ids, 2, axis=0)[::2], lambda ids: ids.astype(">u2"),
    ],
)  # fmt: skip
def test_replies_of_any_memory_layout_are_taken_alike(form):
    trace = make_trace()
    add_turn(trace, [5, 6], routes=form(rows(0, 4)))
    trajectory = trace.finalize()
    assert trajectory.routes.dtype == np.uint8
    assert trajectory.routes.tolist() == rows(0, 4).tolist()


# --- what must be covered -------------------------------------------------------------------------


def test_trap_24_a_trained_target_past_the_captured_prefix_is_named():
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 3), evaluated=3)
    message = (
        r"^Trace.finalize: rollout_expert_indices of trajectory 3: token 4 is a trained target and"
        r" needs 4 rows, there are 3 \(append_tokens and mark_missing make the exceptions\)$"
    )
    with pytest.raises(ValueError, match=message):
        trace.finalize()
    assert trace.finalize(loss_mask=[1, 0]).loss_mask.tolist() == [True, False]
    with pytest.raises(ValueError, match="token 4"):
        trace.finalize(loss_mask=[0, 1])


def test_trap_24_the_same_target_appended_by_the_generator_runs_live():
    trace = make_trace()
    add_turn(trace, [5], routes=rows(0, 3))
    trace.append_tokens([1])
    packed = pack_trajectories([trace.finalize()], vocab_size=V)
    assert packed.appended[0].tolist() == [False] * 4 + [True]
    assert packed.loss_masks[0].tolist() == [False] * 3 + [True] * 2
    microbatch = ReplayMicrobatch(
        TokenLayout.build(packed.lengths),
        packed.routes,
        loss_masks=packed.loss_masks,
        appended=packed.excused,
        missing=packed.missing,
    )
    assert (microbatch.captured, microbatch.live_counts) == ((3,), (1,))


def test_trap_25_observations_in_the_middle_keep_their_routes_and_have_no_support():
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 4))
    trace.add_observation([7, 8])
    add_turn(trace, [9], routes=rows(4, 7), routes_start=4)
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == rows(0, 7).tolist()
    assert support_of(trajectory) == [[5, 6], [6, 7], [], [], [9, 10]]
    assert trajectory.loss_mask.tolist() == [True, True, False, False, True]
    assert trajectory.logprobs.tolist() == np.float32([-0.5, -0.6, 0, 0, -0.9]).tolist()
    packed = pack_trajectories([trajectory], vocab_size=V)
    assert packed.support.values.tolist() == [[5, 6], [6, 7], [-1, -1], [-1, -1], [9, 10]]


def test_trap_26_no_response_tokens_make_an_empty_support_of_the_batchs_width():
    empty, full = make_trace(2), make_trace()
    add_turn(full, [5], support=[[5, 6, 7]], routes=rows(0, 3))
    assert support_of(empty.finalize()) == []
    packed = pack_trajectories([empty.finalize(), full.finalize()], vocab_size=V)
    assert packed.support.lengths == (0, 1)
    assert packed.support.segment(0).shape == (0, 3)
    assert packed.response_lengths == (0, 1)
    assert packed.routes.lengths == (0, 3)


def test_trap_36_a_trajectory_without_routes_is_marked_and_runs_live():
    lost, kept = make_trace(), make_trace(2)
    add_turn(lost, [5, 6])
    add_turn(kept, [7], routes=rows(0, 2))
    with pytest.raises(ValueError, match="token 3 is a trained target and needs 3 rows"):
        lost.finalize()
    lost.mark_missing()
    packed = pack_trajectories([lost.finalize(), kept.finalize()], vocab_size=V)
    assert packed.missing == (True, False)
    assert packed.routes.lengths == (0, 2)
    microbatch = ReplayMicrobatch(
        TokenLayout.build(packed.lengths),
        packed.routes,
        loss_masks=packed.loss_masks,
        missing=packed.missing,
    )
    assert microbatch.live_counts == (5, 0)


def test_trap_36_nothing_to_replay_in_the_whole_batch_is_an_error():
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 3), evaluated=3)
    trace.mark_missing()  # its rows are given up with it
    assert trace.finalize().routes.shape == (0, L, K)
    assert trace.finalize().weight_versions == ()
    with pytest.raises(ValueError, match="rollout_expert_indices is missing in all 2 trajectories"):
        pack_trajectories([trace.finalize()] * 2, vocab_size=V)


def test_finished_traces_are_filtered_as_a_generators_output():
    kept, lost = make_trace(), make_trace(2)
    add_turn(kept, [5, 6], routes=rows(0, 4))
    kept.append_tokens([1])
    add_turn(lost, [7])
    lost.mark_missing()
    trajectories = [kept.finalize(), lost.finalize()]
    output = select_trajectories(generator_output(trajectories), [1, 0])
    assert output["missing"] == [True, False]
    assert [mask.tolist() for mask in output["appended"]] == [[False], [False, False, True]]
    assert [mask.tolist() for mask in output["loss_masks"]] == [[True], [True] * 3]
    expected = pack_trajectories(trajectories[::-1], num_experts=256, vocab_size=V)
    lengths = [given.length for given in trajectories[::-1]]
    routes = pack_routes(
        output["rollout_expert_indices"], lengths, num_experts=256, topk=K, num_layers=L
    )
    assert routes.equal(expected.routes)
    sampled = [ids.tolist() for ids in output["response_ids"]]
    support = pack_support(output["rollout_sample_support"], sampled, vocab_size=V)
    assert support.equal(expected.support)
    assert generator_output([]) == {field: [] for field in output}
    both = [kept.finalize(), make_trace(has_logprobs=False).finalize()]
    with pytest.raises(ValueError, match=r"^generator_output: rollout_logprobs is None in traj"):
        generator_output(both)


def test_a_batch_of_no_trajectories_packs():
    packed = pack_trajectories([])
    assert (packed.lengths, packed.routes, packed.missing) == ((), None, ())


# --- cutting --------------------------------------------------------------------------------------


def test_trap_27_one_cut_for_all_per_token_fields():
    trace = make_trace()
    output = list(range(5, 13))
    add_turn(trace, output, routes=rows(0, 10), weight_version=1)
    trace.truncate(5)
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == rows(0, 8).tolist()
    assert support_of(trajectory) == [[token, token + 1] for token in output[:5]]
    assert trajectory.logprobs.tolist() == np.float32([-t / 10 for t in output[:5]]).tolist()
    assert trajectory.response_ids.tolist() == output[:5]
    assert trajectory.kinds.size == trajectory.loss_mask.size == 5
    assert trajectory.weight_versions == (RowSpan(0, 8, 1),)


def test_what_was_cut_off_and_put_back_at_once_is_as_before():
    trace = make_trace()
    add_turn(trace, [5, 6, 7], routes=rows(0, 5), weight_version=1)
    trace.add_observation([8])
    tail = trace.truncate(1)
    assert isinstance(tail, TraceTail)
    assert tail.token_ids.tolist() == [6, 7, 8]
    trace.restore(tail)
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == rows(0, 5).tolist()
    assert trajectory.response_ids.tolist() == [5, 6, 7, 8]
    assert trajectory.kinds.tolist() == [TokenKind.SAMPLED] * 3 + [TokenKind.OBSERVATION]
    assert trajectory.weight_versions == (RowSpan(0, 5, 1),)


def test_trap_28_a_sampled_eos_restored_after_observations_keeps_its_support_and_logprob():
    trace = make_trace()
    add_turn(trace, [5, 6, 1], routes=rows(0, 5))
    eos = trace.truncate(2)
    trace.add_observation([7, 8])
    trace.restore(eos)
    trajectory = trace.finalize()
    assert trajectory.response_ids.tolist() == [5, 6, 7, 8, 1]
    assert support_of(trajectory) == [[5, 6], [6, 7], [], [], [1, 2]]
    assert trajectory.logprobs.tolist()[-1] == np.float32(-0.1)
    assert trajectory.loss_mask.tolist() == [True, True, False, False, True]
    assert trajectory.routes.tolist() == rows(0, 5).tolist()
    assert trajectory.kinds[-1] == TokenKind.RESTORED
    packed = pack_trajectories([trajectory], vocab_size=V)
    assert not packed.appended[0].any()  # it is scored over its own support
    assert packed.excused[0].tolist() == [False] * 7 + [True]


def test_rows_that_came_after_a_cut_stay_before_what_is_put_back():
    trace = make_trace()
    add_turn(trace, [5, 6, 7], routes=rows(0, 2), evaluated=2)
    tail = trace.truncate(2)
    trace.add_routes(rows(0, 5), evaluated=5)
    trace.restore(tail)
    trajectory = trace.finalize()
    assert trajectory.routes.tolist() == rows(0, 5).tolist()
    assert trajectory.kinds.tolist() == [TokenKind.SAMPLED] * 2 + [TokenKind.RESTORED]


def test_a_cut_takes_the_counts_of_missing_values_with_it():
    trace = make_trace()
    add_turn(trace, [5, 6, 7], logprobs=[-0.5, None, None], support=[[5], [], [8]])
    trace.mark_missing()
    assert (trace.finalize().num_floored, trace.finalize().num_added) == (2, 2)
    trace.truncate(2)
    assert (trace.finalize().num_floored, trace.finalize().num_added) == (1, 1)


# --- support and logprobs of a reply --------------------------------------------------------------


def test_trap_29_filtered_candidates_leave_the_sampled_id():
    support = finite_candidates(
        np.array([[5, 6, 7], [8, 9, 3]]), np.array([[-np.inf] * 3, [-0.5, -1.5, -9999.0]])
    )
    trace = make_trace()
    trace.add_turn([5, 9], logprobs=[-0.5, -1.5], support=support, routes=rows(0, 4))
    trajectory = trace.finalize()
    packed = pack_trajectories([trajectory], vocab_size=V, width=3)
    assert packed.support.values.tolist() == [[5, -1, -1], [8, 9, -1]]
    assert trajectory.num_added == 1


def test_a_repeated_candidate_is_kept_once():
    ids, logprobs = torch.tensor([[4, 4, 2, -1]]), torch.tensor([[-0.5, -0.5, -1.0, 0.0]])
    assert finite_candidates(ids, logprobs).token_ids.tolist() == [4, 2]
    first_filtered = torch.tensor([[-torch.inf, -0.5, torch.nan, 0.0]])
    assert finite_candidates(ids, first_filtered).token_ids.tolist() == [4]
    assert finite_candidates(ids[:, :0], logprobs[:, :0]).row_offsets.tolist() == [0, 0]


def test_trap_30_a_sampled_id_that_is_no_candidate_becomes_one_and_is_counted():
    trace = make_trace()
    add_turn(trace, [5, 6, 7], support=[[4, 9], [6], [2, 3, -1]], routes=rows(0, 5))
    trajectory = trace.finalize()
    assert support_of(trajectory) == [[4, 9, 5], [6], [2, 3, 7]]
    assert trajectory.num_added == 2


@pytest.mark.parametrize(
    "support",
    [
        [[5, 6], [6]],
        ([5, 6], (6,)),
        np.array([[5, 6], [6, -1]]),
        torch.tensor([[5, 6], [6, -1]]),
        SupportRows(np.array([5, 6, 6]), np.array([0, 2, 3])),
    ],
)
def test_support_of_any_form_is_taken_alike(support):
    trace = make_trace()
    add_turn(trace, [5, 6], support=support, routes=rows(0, 4))
    assert support_of(trace.finalize()) == [[5, 6], [6]]


def test_trap_31_missing_logprobs_become_the_floor_and_are_counted():
    trace = make_trace()
    logprobs = [-0.1, float("nan"), -float("inf"), None]
    add_turn(trace, [5, 6, 7, 8], logprobs=logprobs, routes=rows(0, 6))
    trajectory = trace.finalize()
    assert trajectory.logprobs.tolist() == [np.float32(-0.1), *[LOGPROB_FLOOR] * 3]
    assert trajectory.num_floored == 3
    check_logprobs([trajectory.logprobs], [4])


def test_trap_32_fewer_logprobs_than_tokens_are_an_error():
    trace = make_trace()
    with pytest.raises(ValueError, match=r"rollout_logprobs of trajectory 3, turn 0 has shape \(1"):
        add_turn(trace, [5, 6], logprobs=[-0.1])
    assert trace.num_response_tokens == 0


def test_trap_35_zeros_of_a_layer_with_experts_are_an_engine_that_captured_nothing():
    reply = rows(0, 4)
    reply[:, 1] = 0
    with pytest.raises(ValueError, match="turn 0, row 0, layer 1: all zeros, as in all 4 rows"):
        add_turn(make_trace(), [5, 6], routes=reply)
    dense = make_trace(moe_layers=[0, 2])
    add_turn(dense, [5, 6], routes=reply)
    assert dense.finalize().routes.tolist() == reply.tolist()
    single = make_trace(topk=1)
    add_turn(single, [5, 6], routes=np.zeros((4, L, 1), dtype=np.uint8))
    assert single.num_rows == 4
    add_turn(dense, [7], routes=rows(4, 5) * [[[1], [0], [1]]], routes_start=4)
    with pytest.raises(ValueError, match="turn 2, counted from row 5, row 0, layer 0: all zeros"):
        add_turn(dense, [8, 9], routes=reply[:2] * 0, routes_start=5)


# --- errors ---------------------------------------------------------------------------------------

TURN = "Trace.add_turn: {} of trajectory 3, turn 1"
ROUTES = TURN.format("rollout_expert_indices")
SUPPORT = TURN.format("rollout_sample_support")
LOGPROBS = TURN.format("rollout_logprobs")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"routes": rows(0, 5)}, ValueError,
         f"{ROUTES} has 5 rows; 6 evaluated of 7 tokens make 6 from row 0$"),
        ({"routes": rows(4, 7), "routes_start": 4}, ValueError,
         f"{ROUTES} has 3 rows; 6 evaluated of 7 tokens make 2 from row 4, 6 from row 0$"),
        ({"routes": rows(5, 6), "routes_start": 5}, ValueError,
         f"{ROUTES} starts at row 5, but 4 rows are known; those between are missing$"),
        ({"routes": rows(0, 7), "evaluated": 8}, ValueError, f"{ROUTES}: evaluated=8 of 7 tokens$"),
        ({"routes": rows(0, 6)[:, :2]}, ValueError,
         rf"{ROUTES} must be \[rows, 3, 2\], got \(6, 2, 2\)$"),
        ({"routes": rows(0, 6).tolist()}, TypeError, f"{ROUTES} must be an array or a tensor"),
        ({"routes": rows(0, 6).astype(float)}, TypeError, f"{ROUTES} must hold integers"),
        ({"routes": torch.zeros(6, L, K, dtype=torch.uint8, device="meta")}, TypeError,
         f"{ROUTES} is on meta; it must be on the host"),
        ({"routes": rows(0, 6, dtype=np.int64) - 2**40}, ValueError,
         f"{ROUTES}, counted from row 4, row 0, layer 0: expert -1099.* is negative$"),
        ({"routes": rows(0, 6, dtype=np.int64) + 2**31}, ValueError,
         f"{ROUTES}, counted from row 4, row 0, layer 0: expert 21474"),
        ({"routes": rows(0, 6), "routes_start": -1}, ValueError,
         f"{ROUTES}: routes_start must not be negative"),
        ({"routes": rows(0, 6), "routes_start": True}, TypeError,
         f"{ROUTES}: routes_start must be an integer"),
        ({"support": [[5]]}, ValueError, f"{SUPPORT} has 1 rows for 2 sampled tokens$"),
        ({"support": [[8, 50], [9]]}, ValueError, f"{SUPPORT}, row 0: id 50 is not below"),
        ({"support": [[8], [9, -2]]}, ValueError, f"{SUPPORT}, row 1: id -2 is negative$"),
        ({"support": [[8], [9, 3, 9]]}, ValueError, f"{SUPPORT}, row 1: id 9 is repeated$"),
        ({"support": np.zeros(2, dtype=np.int64)}, ValueError, rf"{SUPPORT} must be \[sampled tok"),
        ({"support": None}, ValueError, f"{SUPPORT} is missing for 2 sampled tokens"),
        ({"logprobs": None}, ValueError, f"{LOGPROBS} is missing for 2 sampled tokens"),
        ({"logprobs": [-1.0, 0.5]}, ValueError, f"{LOGPROBS}, token 1: 0.5 is positive$"),
        ({"logprobs": [1, "a"]}, TypeError, f"{LOGPROBS} must hold floats"),
        ({"prompt_ids": [0, 1, 2, 5, 7]}, ValueError,
         f"{TURN.format('prompt_ids')}, token 4: id 7, the trace has 6$"),
        ({"prompt_ids": [0, 1, 2, 5]}, ValueError, "prompt_ids .* has 4 tokens, the trace has 5$"),
        ({"loss_mask": [1]}, ValueError, rf"{TURN.format('loss_mask')} has shape \(1,\), expected"),
        ({"loss_mask": [1, 2]}, ValueError, "loss_mask .*, token 1: 2 is neither 0 nor 1$"),
        ({"loss_mask": [1.0, 0.0]}, TypeError, "loss_mask .* must hold booleans, 0 or 1"),
        ({"loss_mask": [[1], [1, 0]]}, TypeError, "loss_mask .* must hold booleans, 0 or 1, got l"),
        ({"loss_mask": torch.ones(2, dtype=torch.bfloat16)}, TypeError, "loss_mask .* must hold"),
        ({"loss_mask": 1}, TypeError, "loss_mask .* must be a list or host array, got int$"),
    ],
)  # fmt: skip
def test_a_bad_turn_is_one_line_that_names_it_and_changes_nothing(options, error, message):
    trace = make_trace()
    add_turn(trace, [5, 6], routes=rows(0, 4), weight_version=1)
    before = trace.finalize()
    with pytest.raises(error, match=f"^(?:Trace.add_turn: )?{message}") as caught:
        add_turn(trace, [8, 9], **options)
    assert "\n" not in str(caught.value)
    after = trace.finalize()
    assert after.response_ids.tolist() == before.response_ids.tolist()
    assert after.routes.tolist() == before.routes.tolist()
    assert support_of(after) == support_of(before)
    assert after.weight_versions == before.weight_versions
    add_turn(trace, [8, 9], routes=rows(4, 6), routes_start=4)
    assert trace.finalize().routes.tolist() == rows(0, 6).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_ids": [50]}, "output_ids of trajectory 3, turn 0, token 0: id 50 is not below"),
        ({"output_ids": [-1]}, "output_ids of trajectory 3, turn 0, token 0: id -1 is negative"),
        ({"output_ids": [1.5]}, r"output_ids of trajectory 3, turn 0\[0\] must be an integer"),
        ({"routes": rows(0, 3)}, "rollout_expert_indices .* is given, but Trace has no num_layers"),
        ({"logprobs": [-1.0]}, "rollout_logprobs .* is given, but Trace has has_logprobs=False"),
    ],
)
def test_what_was_not_declared_is_refused(options, message):
    trace = make_trace(num_layers=None, topk=None, has_logprobs=False)
    with pytest.raises((TypeError, ValueError), match=f"^Trace.add_turn: {message}"):
        trace.add_turn(**({"output_ids": [5], "support": [[5]]} | options))
    trace.add_turn([5], support=[[5]])
    trajectory = trace.finalize()
    assert (trajectory.routes, trajectory.logprobs) == (None, None)
    without = make_trace(vocab_size=None)
    with pytest.raises(ValueError, match=r"rollout_sample_support .* but Trace has no vocab_size"):
        add_turn(without, [5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids of trajectory 3 is empty: nothing predicts the first"),
        ({"prompt_ids": [4, 77]}, "prompt_ids of trajectory 3, token 1: id 77 is not below vocab"),
        ({"topk": None}, "num_layers=3 and topk=None; give both or none"),
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"num_experts": 1}, "num_experts=1 with topk=2"),
        ({"moe_layers": [3]}, r"moe_layers has 3, not in \[0, 3\)"),
        ({"num_layers": None, "topk": None, "moe_layers": [0]}, "moe_layers without num_layers"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
    ],
)
def test_a_bad_trace_is_refused(options, message):
    defaults = {"prompt_ids": [1], "num_layers": L, "topk": K, "vocab_size": V, "trajectory": 3}
    with pytest.raises(ValueError, match=f"^Trace: {message}"):
        Trace(**(defaults | options))


def test_other_bad_calls_are_refused_and_change_nothing():
    trace = make_trace(trajectory=None)
    add_turn(trace, [5, 6], routes=rows(0, 4))
    for call, message in (
        (
            lambda: trace.truncate(3),
            "Trace.truncate: num_response_tokens of turn 1 is 3",
        ),
        (lambda: trace.truncate(-1), "Trace.truncate: .* must not be negative"),
        (lambda: trace.restore([5]), "Trace.restore: tail of turn 1 must be a TraceTail"),
        (lambda: trace.add_routes(None), "Trace.add_routes: rollout_expert_indices .* is None"),
        (
            lambda: trace.add_observation([99]),
            "Trace.add_observation: token_ids of turn 1",
        ),
        (lambda: trace.append_tokens([1], logprobs=[]), "Trace.append_tokens: rollout_logprobs of"),
        (lambda: trace.finalize(loss_mask=[1]), "Trace.finalize: loss_mask has shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call()
    assert trace.finalize().response_ids.tolist() == [5, 6]


def test_bad_batches_of_trajectories_are_refused():
    trace, bare = make_trace(), make_trace(vocab_size=None)
    add_turn(trace, [5, 6], routes=rows(0, 4))
    add_turn(bare, [5, 6], routes=rows(0, 4), support=None)
    for given_ones, options, message in (
        (trace.finalize(), {}, "trajectories must be a sequence, got Trajectory"),
        ([trace], {}, "trajectory 0 must be a Trajectory, got Trace"),
        ([trace.finalize()], {}, "vocab_size is needed for rollout_sample_support"),
        ([trace.finalize(), bare.finalize()], {"vocab_size": V},
         "rollout_sample_support is None in trajectory 1, but not in trajectory 0"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^pack_trajectories: {message}"):
            pack_trajectories(given_ones, **options)
    other = make_trace(num_layers=2)
    add_turn(other, [5], routes=rows(0, 3)[:, :2])
    with pytest.raises(ValueError, match="trajectory 1 has 2 layers, expected 3"):
        pack_trajectories([trace.finalize(), other.finalize()], vocab_size=V)
