"""Microbatches: by count, by tokens, over ranks, and back.

Oracle: plans written by hand, and the batch as plain Python (``batch_model``).
"""

import numpy as np
import pytest
import torch

from packhorse.packed.domains import validate_batch
from packhorse.packed.inputs import make_inputs, token_masks
from packhorse.packed.microbatch import (
    MicrobatchPlan,
    plan_by_count,
    plan_by_tokens,
    plan_ranks_by_count,
    plan_ranks_by_tokens,
)
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout, columns_from_mask
from tests.packed.batch_model import ROUTES, SUPPORT, check, make_batch, model_of
from tests.packed.helpers import as_lists, make_packed


def tokens_of(plan: MicrobatchPlan, lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in ids) for ids in plan.trajectories]


def each_once(plan: MicrobatchPlan, count: int) -> bool:
    return sorted(i for ids in plan.trajectories for i in ids) == list(range(count))


# --- by count -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size", "options", "trajectories", "synthetic"),
    [
        (6, 3, {}, ((0, 1, 2), (3, 4, 5)), (0, 0)),
        (7, 3, {}, ((0, 1, 2), (3, 4, 5), (6,)), (0, 0, 2)),
        (7, 3, {"equal_sizes": False}, ((0, 1, 2), (3, 4, 5), (6,)), (0, 0, 0)),
        (3, 1, {"multiple": 4}, ((0,), (1,), (2,), ()), (0, 0, 0, 1)),
        (3, 2, {"multiple": 4}, ((0, 1), (2,), (), ()), (0, 1, 2, 2)),
        (3, 2, {"multiple": 4, "equal_sizes": False}, ((0, 1), (2,), (), ()), (0, 0, 1, 1)),
        (2, 5, {}, ((0, 1),), (3,)),
        (0, 5, {}, (), ()),
        (0, 5, {"multiple": 4}, (), ()),
    ],
)
def test_by_count_the_last_is_filled_up_or_short(count, size, options, trajectories, synthetic):
    plan = plan_by_count(count, microbatch_size=size, **options)
    assert plan == MicrobatchPlan(trajectories, synthetic)
    assert plan.num_trajectories == count
    assert plan.sizes == tuple(len(t) + n for t, n in zip(trajectories, synthetic, strict=True))


def test_by_count_microbatches_are_views():
    batch = make_batch(5)
    parts = plan_by_count(5, microbatch_size=2, equal_sizes=False).split(batch)
    assert [len(part) for part in parts] == [2, 2, 1]
    for i, part in zip((0, 2, 4), parts, strict=True):
        assert part["token_ids"].data_ptr() == batch["token_ids"][i].data_ptr()
        assert part[ROUTES].values.untyped_storage().data_ptr() == (
            batch[ROUTES].values.untyped_storage().data_ptr()
        )


def test_ranks_of_different_counts_have_the_same_number():
    plans = plan_ranks_by_count([5, 0, 2, 9], microbatch_size=2)
    assert [len(plan) for plan in plans] == [5] * 4
    assert all(plan.sizes == (2,) * 5 for plan in plans)
    assert plans[1] == MicrobatchPlan(((),) * 5, (2,) * 5)
    assert plan_ranks_by_count([], microbatch_size=2) == ()


# --- by tokens ------------------------------------------------------------------------------------


def test_a_trajectory_longer_than_the_budget_is_alone():
    lengths = [3, 20, 2, 4, 15]
    plan = plan_by_tokens(lengths, max_tokens=10)
    assert plan == MicrobatchPlan(((1,), (4,), (0, 2, 3)), (0, 0, 0))
    # more microbatches than needed: the others spread out, it stays alone
    plan = plan_by_tokens(lengths, max_tokens=10, multiple=5)
    assert plan == MicrobatchPlan(((1,), (4,), (3,), (0,), (2,)), (0,) * 5)
    assert plan_by_tokens([20], max_tokens=10) == MicrobatchPlan(((0,),), (0,))


def test_a_trajectory_longer_than_the_budget_is_refused_by_choice():
    refused = (
        r"^plan_by_tokens: trajectory 1 has 20 tokens, max_tokens is 10; overlong='alone' gives it"
        " a microbatch of its own$"
    )
    with pytest.raises(ValueError, match=refused):
        plan_by_tokens([3, 20, 2], max_tokens=10, overlong="refuse")
    with pytest.raises(ValueError, match=r"^plan_ranks_by_tokens: rank 1: trajectory 1 has 20 "):
        plan_ranks_by_tokens([[1], [3, 20, 2]], max_tokens=10, overlong="refuse")
    assert len(plan_by_tokens([3, 10], max_tokens=10, overlong="refuse")) == 2


def test_equal_sizes_are_those_of_the_largest_of_all_ranks():
    lengths = [[8, 1, 1, 1, 1], [2], []]
    plans = plan_ranks_by_tokens(lengths, max_tokens=8, equal_sizes=True)
    assert plans == (
        MicrobatchPlan(((0,), (1, 2, 3, 4)), (3, 0)),
        MicrobatchPlan(((0,), ()), (3, 4)),
        MicrobatchPlan(((), ()), (4, 4)),
    )
    assert plan_ranks_by_tokens([[], []], max_tokens=8, equal_sizes=True) == (
        MicrobatchPlan((), ()),
    ) * 2  # fmt: skip


def test_trap_48_ranks_of_different_counts_run_the_same_number_of_microbatches():
    lengths = [[5, 5, 5, 5, 5, 9], [], [1], [30, 2], [3] * 17, [10] * 3, [7, 7], [9, 1, 1, 8, 4, 4]]
    plans = plan_ranks_by_tokens(lengths, max_tokens=10)
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) == 6  # 17 of 3 tokens, 3 in each
    restored = []
    for rank, (own, plan) in enumerate(zip(lengths, plans, strict=True)):
        assert each_once(plan, len(own))
        batch = make_batch(len(own), rank)
        parts = plan.split(batch)
        assert all(len(part) > 0 for part in parts)
        uids = [uid for part in parts for uid in part["uids"] if uid is not None]
        assert sorted(uids) == sorted(batch["uids"])
        restored.append(plan.restore(parts))
        check(restored[-1], model_of(batch), batch)
    assert [len(batch) for batch in restored] == [len(own) for own in lengths]


def test_a_rectangle_costs_its_trajectories_times_its_longest():
    lengths = [9, 1, 1, 1, 8, 2]
    assert len(plan_by_tokens(lengths, max_tokens=18)) == 2
    plan = plan_by_tokens(lengths, max_tokens=18, rectangle=True)
    assert plan == MicrobatchPlan(((0, 4), (1, 2, 3, 5)), (0, 0))
    plans = plan_ranks_by_tokens([lengths, [20, 3], []], max_tokens=10, rectangle=True)
    assert plans == (
        MicrobatchPlan(((0,), (1, 2, 3, 5), (4,)), (0, 0, 0)),  # of 9, 8 and 8
        MicrobatchPlan(((0,), (1,), ()), (0, 0, 1)),
        MicrobatchPlan(((), (), ()), (1, 1, 1)),
    )
    with pytest.raises(ValueError, match=r"^plan_by_tokens: trajectory 0 has 9 tokens, max_tokens"):
        plan_by_tokens(lengths, max_tokens=8, rectangle=True, overlong="refuse")


# --- apart and back -------------------------------------------------------------------------------


def test_a_microbatch_of_synthetic_trajectories_alone(device):
    batch = make_batch(2, device=device)
    plan = MicrobatchPlan(((1, 0), ()), (0, 2))
    real, made = plan.split(batch, values={"token_ids": 7})
    assert model_of(real) == [model_of(batch)[1], model_of(batch)[0]]
    assert made["token_ids"].tolist() == [[7, 7, 7]] * 2
    assert made["attention_mask"].tolist() == [[1, 0, 0]] * 2
    assert made["loss_mask"].tolist() == [[False] * 3] * 2
    assert made["rewards"].tolist() == [0.0, 0.0]
    assert made[ROUTES].lengths == made[SUPPORT].lengths == (0, 0)
    assert made["uids"] == (None, None)
    for k, part in enumerate((real, made)):
        assert plan.microbatch(batch, k, values={"token_ids": 7}) == part
        assert plan.microbatch(batch, k - 2, values={"token_ids": 7}) == part


def test_synthetic_trajectories_have_the_host_values_that_a_layout_takes():
    batch = make_inputs(
        {"prompt_token_ids": [[1, 2], [3]], "response_ids": [[4, 5], [6]], "missing": [False, True]}
    )
    plan = MicrobatchPlan(((1, 0), ()), (1, 2))
    real, made = plan.split(batch)
    assert real["lengths"] == (2, 4, 1)
    assert real["response_lengths"] == (1, 2, 0)
    assert real["first_columns"] == (2, 0, 0)
    assert real["missing"] == (True, False, False)
    assert made["lengths"] == (1, 1)
    validate_batch(real)
    validate_batch(plan.microbatch(batch, -1))
    assert [mask.tolist() for mask in token_masks(real)][2] == [False]
    layout = TokenLayout.build(
        real["lengths"], first_columns=real["first_columns"], batch_width=4, format="bshd"
    )
    assert columns_from_mask(real["attention_mask"]) == ([2, 4, 1], [2, 0, 0])
    assert layout.align(real["sequences"], -1).tolist()[:3] == [3, 1, 0]
    dense = batch.with_fields({"lengths": torch.tensor([4, 2])})
    assert plan.split(dense)[1]["lengths"].tolist() == [0, 0]


def test_a_plan_of_lists_is_its_own():
    trajectories, synthetic = [[0, np.int64(2)], [1]], [0, 1]
    plan = MicrobatchPlan(trajectories, synthetic)
    trajectories[0].append(3)
    synthetic[0] = 5
    assert plan == MicrobatchPlan(((0, 2), (1,)), (0, 1))
    assert hash(plan) == hash(MicrobatchPlan(((0, 2), (1,)), (0, 1)))
    assert plan.sizes == (2, 2)


def test_a_rank_without_trajectories_runs_synthetic_ones():
    batch = make_batch(3).select(["attention_mask", "token_ids", ROUTES])[:0]
    _, plan = plan_ranks_by_count([3, 0], microbatch_size=2)
    parts = plan.split(batch)
    assert [part["attention_mask"].tolist() for part in parts] == [[[1, 0, 0]] * 2] * 2
    back = plan.restore([part["token_ids"].float() for part in parts])
    assert back.shape == (0, 3)
    assert plan.restore([["a", "b"], ["c", "d"]]) == []


def test_outputs_come_back_in_the_order_of_the_batch(device):
    plan = MicrobatchPlan(((3, 0), (), (2, 4, 1)), (1, 2, 0))
    rows = [torch.tensor([[3.0], [0.0], [9.0]]), torch.full((2, 1), 9.0)]
    rows.append(torch.tensor([[2.0], [4.0], [1.0]]))
    rows = [x.to(device).requires_grad_() for x in rows]
    back = plan.restore(rows)
    assert back.device.type == torch.device(device).type
    assert back.tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    (back[:, 0] * torch.arange(1.0, 6.0, device=device)).sum().backward()
    assert rows[0].grad.tolist() == [[4.0], [1.0], [0.0]]
    assert rows[1].grad.tolist() == [[0.0], [0.0]]
    assert rows[2].grad.tolist() == [[3.0], [5.0], [2.0]]

    assert plan.restore([["3", "0", None], [None, None], ["2", "4", "1"]]) == list("01234")
    packed = [
        PackedTensor.from_lengths(torch.tensor([3, 3, 3, 9]), [3, 0, 1]),
        PackedTensor.from_lengths(torch.tensor([9]), [1, 0]),
        PackedTensor.from_lengths(torch.tensor([2, 2, 4, 4, 4, 4, 1]), [2, 4, 1]),
    ]
    assert as_lists(plan.restore(packed)) == [[], [1], [2, 2], [3] * 3, [4] * 4]


def test_what_is_in_order_is_not_gathered():
    plan = plan_by_count(4, microbatch_size=2)
    assert plan.restore([torch.arange(2), torch.arange(2, 4)]).tolist() == [0, 1, 2, 3]
    assert plan.restore((("a", "b"), ("c", "d"))) == ("a", "b", "c", "d")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plan_by_count(-1, microbatch_size=2), ValueError,
         "plan_by_count: num_trajectories must not be negative, got -1"),
        (lambda: plan_by_count(2.0, microbatch_size=2), TypeError,
         "plan_by_count: num_trajectories must be an integer, got float"),
        (lambda: plan_by_count(2**31, microbatch_size=2), ValueError,
         "plan_by_count: 2147483648 trajectories do not fit int32"),
        (lambda: plan_by_count(2, microbatch_size=0), ValueError,
         "plan_by_count: microbatch_size must be positive and fit int64, got 0"),
        (lambda: plan_by_count(2, microbatch_size=2**31), ValueError,
         "plan_by_count: 2147483648 trajectories of a microbatch do not fit"),
        (lambda: plan_by_count(2, microbatch_size=1, multiple=True), TypeError,
         "plan_by_count: multiple must be an integer, got True"),
        (lambda: plan_by_count(2, microbatch_size=1, equal_sizes=1), TypeError,
         "plan_by_count: equal_sizes must be a bool, got int"),
        (lambda: plan_by_count(2, microbatch_size=1, group=1), TypeError,
         "plan_by_count: group must be a torch.distributed process group, got int"),
        (lambda: plan_ranks_by_count([1, -2], microbatch_size=1), ValueError,
         "plan_ranks_by_count: num_trajectories of rank 1 must not be negative, got -2"),
        (lambda: plan_ranks_by_count(3, microbatch_size=1), TypeError,
         "plan_ranks_by_count: num_trajectories must be a list of integers, got int"),
        (lambda: plan_by_tokens([3, 0, 1], max_tokens=5), ValueError,
         "plan_by_tokens: length of trajectory 1 must be positive, got 0"),
        (lambda: plan_by_tokens([3, 1.5], max_tokens=5), TypeError,
         r"plan_by_tokens: lengths\[1\] must be an integer, got float"),
        (lambda: plan_by_tokens(np.ones((2, 2), int), max_tokens=5), ValueError,
         r"plan_by_tokens: lengths must be 1-D, got shape \(2, 2\)"),
        (lambda: plan_by_tokens([3], max_tokens=0), ValueError,
         "plan_by_tokens: max_tokens must be positive and fit int64, got 0"),
        (lambda: plan_by_tokens([3], max_tokens=2**63), ValueError,
         "plan_by_tokens: max_tokens must be positive and fit int64"),
        (lambda: plan_by_tokens([3], max_tokens=5, overlong="cut"), ValueError,
         "plan_by_tokens: overlong must be 'alone' or 'refuse', got 'cut'"),
        (lambda: plan_by_tokens([3], max_tokens=5, rectangle=1), TypeError,
         "plan_by_tokens: rectangle must be a bool, got int"),
        (lambda: plan_ranks_by_tokens([[3]], max_tokens=5, rectangle=True, equal_sizes=True),
         ValueError, "plan_ranks_by_tokens: equal_sizes=True with rectangle=True: a synthetic"),
        (lambda: plan_ranks_by_tokens([[3], [1, -1]], max_tokens=5), ValueError,
         "plan_ranks_by_tokens: rank 1: length of trajectory 1 must be positive, got -1"),
        (lambda: plan_ranks_by_tokens(np.ones(3, int), max_tokens=5), TypeError,
         "plan_ranks_by_tokens: lengths must be a list of each rank's, got ndarray"),
        (lambda: MicrobatchPlan(((0, 1), (1,)), (0, 0)), ValueError,
         "MicrobatchPlan: trajectory 1 of microbatch 1 stands twice"),
        (lambda: MicrobatchPlan(((0,), (2,)), (0, 0)), ValueError,
         "MicrobatchPlan: trajectory 1 of 2 is in no microbatch"),
        (lambda: MicrobatchPlan(((0,), ()), (0, 0)), ValueError,
         "MicrobatchPlan: microbatch 1 holds no trajectory"),
        (lambda: MicrobatchPlan(((0,), ()), (0,)), ValueError,
         "MicrobatchPlan: trajectories has 2 microbatches, synthetic has 1"),
        (lambda: MicrobatchPlan(((0,),), (-1,)), ValueError,
         "MicrobatchPlan: synthetic of microbatch 0 must not be negative"),
        (lambda: MicrobatchPlan((("a",),), (0,)), TypeError,
         r"MicrobatchPlan: trajectories of microbatch 0\[0\] must be an integer, got str"),
    ],
)  # fmt: skip
def test_planning_rejects(call, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        call()
    assert "\n" not in str(caught.value)


def test_lengths_on_a_device_are_refused_not_read(device):
    if device == "cpu":
        pytest.skip("needs a device")
    with pytest.raises(TypeError, match=r"^plan_by_tokens: lengths is on"):
        plan_by_tokens(torch.ones(3, dtype=torch.int64, device=device), max_tokens=4)


PLAN = MicrobatchPlan(((2, 0), (1,)), (0, 1))
X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (X, TypeError, "outputs must be a list, got Tensor"),
        ([X], ValueError, "1 outputs for 2 microbatches"),
        ([X, X[:1]], ValueError, "output of microbatch 1 has 1 trajectories, the microbatch has 2"),
        ([X, X.double()], TypeError, "output of microbatch 1 is torch.float64, that of microbatch"),
        ([X, X[:, :2]], ValueError, r"output of microbatch 1 has row shape \(2,\), that of"),
        ([X, ["a", "b"]], TypeError, "output of microbatch 1 is a list, that of microbatch 0 a Te"),
        ([3, 3], TypeError, "output of microbatch 0 must be a tensor, .*, got int"),
        ([X, torch.tensor(1.0)], ValueError, "output of microbatch 1 must be "),
        ([make_packed([1, 2]), make_packed([3])], ValueError, "output of microbatch 1 has 1 traj"),
        ([make_packed([1, 2]), make_packed([1, 1], torch.int16)], TypeError,
         "output of microbatch 1 is torch.int16"),
        ([make_batch(2), make_batch(2).drop(["uids"])], ValueError,
         "microbatch 1 has no field uids"),
        ([make_batch(2), make_batch(2, routes_dtype=torch.int16)], TypeError,
         f"{ROUTES} of microbatch 1 is torch.int16"),
    ],
)  # fmt: skip
def test_restore_rejects(outputs, error, message):
    with pytest.raises(error, match=rf"^MicrobatchPlan\.restore: {message}"):
        PLAN.restore(outputs)


def test_nothing_is_restored_from_nothing():
    with pytest.raises(ValueError, match=r"^MicrobatchPlan\.restore: no outputs to take a kind"):
        MicrobatchPlan((), ()).restore([])


def test_split_rejects_and_changes_nothing():
    batch = make_batch(3)
    before = model_of(batch)
    name = r"MicrobatchPlan\.split"
    with pytest.raises(TypeError, match=f"^{name}: batch must be a Batch, got dict"):
        PLAN.split({})
    with pytest.raises(ValueError, match=f"^{name}: batch has 2 trajectories, the plan has 3"):
        PLAN.split(batch[:2])
    with pytest.raises(KeyError, match=f"{name}: no dense field 'mask'"):
        PLAN.split(batch, attended="mask")
    with pytest.raises(ValueError, match=f"^{name}: the value of token_ids must be a number or"):
        PLAN.split(batch, values={"token_ids": [1, 2]})
    batch["unknown"] = make_packed([1, 1, 1])
    with pytest.raises(ValueError, match=f"^{name}: unknown is packed and has no registered rule"):
        PLAN.split(batch)
    assert len(MicrobatchPlan(((2, 0), (1,)), (0, 0)).split(batch)) == 2
    with pytest.raises(IndexError, match=r"^MicrobatchPlan\.microbatch: index 2 is out of range"):
        PLAN.microbatch(batch, 2)
    assert model_of(batch.drop(["unknown"])) == before
