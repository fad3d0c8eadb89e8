"""Dummy and live rows: who routes them, what is masked, what the expert-bias counters count."""

import numpy as np
import pytest
import torch

from tests.megatron.helpers import (
    DEVICE,
    EXPERTS,
    RECOMPUTE,
    TOPK,
    RouteLog,
    assert_routed,
    build_model,
    make_batch,
    make_session,
    megatron_version,
    routers_of,
    run_megatron,
    run_schedule,
)

FULL = RECOMPUTE["full uniform"]
MODES = ["none", "full uniform", "full block", "moe"]


def appended_eos(lengths=(6, 4), captured=(3, 3), **options):
    """Trajectory 0: rows for tokens 0 to 2; token 5 is a trained end the generator appended."""
    masks = [np.arange(6) >= 2, np.arange(4) >= 2]
    masks[0][4] = False
    appended = [np.arange(6) == 5, np.zeros(4, bool)]
    masks[0][3:5] = False
    return make_batch(lengths, captured, loss_masks=masks, appended=appended, **options)


def mask_of(batch):
    """[S, B] of the definition: True for rows that are neither replayed nor live."""
    rows = [row == "dummy" for row in batch.rows(0)]
    count = len(batch.routes) if batch.microbatch.layout.format == "bshd" else 1
    return torch.tensor(rows).view(-1, count)


def counted(batch, calls):
    """Tokens of each expert by hand: every row that is no dummy, from what the router routed."""
    counts = [0] * EXPERTS
    for row, wanted in zip(calls, batch.rows(0), strict=True):
        if wanted != "dummy":
            for expert in row:
                counts[expert] += 1
    return counts


# --- live rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_appended_eos_runs_live_from_the_first_uncaptured_position(mode):
    model = build_model(**RECOMPUTE[mode])
    batch = appended_eos()
    # positions 3 and 4 of trajectory 0 lie before token 5; token 5 itself feeds no trained logit
    assert batch.microbatch.live_counts == (2, 0)
    assert batch.rows(0)[6::2] == ["live", "live", "dummy"]
    with RouteLog() as log:
        ran = run_schedule(make_session(model), model, [batch])
    for position, router in enumerate(routers_of(model)):
        (first,) = log.of(router, recompute=False)
        assert_routed(first, batch.rows(position))
        assert log.of(router, recompute=True) in ([], [first])
    assert torch.equal(ran.masks[0].cpu().T, mask_of(batch))


def test_live_rows_are_the_routers_own_choice():
    """Of the first layer, whose input no route has touched: as in a run without replay."""
    model = build_model(**FULL)
    batch = appended_eos()
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    with RouteLog() as free:

        def forward_step(data, chunk):
            return chunk(**next(data).inputs), lambda values: (values.mean(), {})

        run_megatron(forward_step, model, [batch], True)
    router = routers_of(model)[0]
    (replayed,), (own,) = (part.of(router, recompute=False) for part in (log, free))
    live = [row for row, wanted in enumerate(batch.rows(0)) if wanted == "live"]
    assert len(live) == 2
    assert [replayed[row] for row in live] == [own[row] for row in live]
    assert replayed != own


def test_a_missing_trajectory_runs_live_beside_a_replayed_one():
    model = build_model(**FULL)
    batch = make_batch((6, 4), captured=(0, 3), missing=[True, False], loss_masks=None, seed=8)
    assert batch.microbatch.live_counts == (6, 0)
    with RouteLog() as log:
        ran = run_schedule(make_session(model), model, [batch])
    for position, router in enumerate(routers_of(model)):
        (first,), (again,) = (log.of(router, recompute=part) for part in (False, True))
        assert_routed(first, batch.rows(position))
        assert again == first
    assert not ran.masks[0][0].any()
    assert ran.masks[0][1].tolist() == [False] * 3 + [True] * 3


def test_live_all_runs_every_uncaptured_token_live_and_pads_as_dummies():
    model = build_model()
    batch = make_batch((6, 4), captured=(3, 2), live="all")
    with RouteLog() as log:
        ran = run_schedule(make_session(model), model, [batch])
    assert [row for row in batch.rows(0) if row == "dummy"] == ["dummy"] * 2
    for position, router in enumerate(routers_of(model)):
        assert_routed(log.of(router, recompute=False)[0], batch.rows(position))
    assert torch.equal(ran.masks[0].cpu().T, mask_of(batch))


def test_dummy_rows_may_be_spread_over_the_experts():
    model = build_model()
    batch = make_batch((6, 1), captured=(2, 0), dummy="spread")
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    (rows,) = log.of(routers_of(model)[0], recompute=False)
    dummies = [row for row, wanted in zip(rows, batch.rows(0), strict=True) if wanted == "dummy"]
    assert len(dummies) == 10
    assert all(len(row) == TOPK for row in dummies)
    counts = np.bincount(np.concatenate(dummies), minlength=EXPERTS)
    assert counts.max() - counts.min() <= 1  # 20 assignments over 8 experts


def test_what_a_dummy_row_routes_does_not_reach_a_trained_logit():
    """Constant and spread dummies, and live ones: the same outputs up to the captured prefix."""
    model = build_model()
    outputs = []
    for options in ({}, {"dummy": "spread"}, {"live": "all"}):
        batch = make_batch((6, 4), captured=(4, 3), **options)
        session = make_session(model)
        with session.schedule([batch.microbatch]), torch.no_grad():
            step = session.begin(model)
            outputs.append(model(**batch.inputs, padding_mask=step.padding_mask))
    for other in outputs[1:]:
        # an expert's product rounds differently with the number of its tokens
        for i, captured in enumerate((4, 3)):
            torch.testing.assert_close(
                other[i, :captured], outputs[0][i, :captured], rtol=1e-6, atol=1e-6
            )
        assert (other - outputs[0]).abs().max() > 1e-4


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bshd", "thd"])
def test_the_padding_mask_is_true_for_padding_in_the_models_shape(format):
    model = build_model()
    layout = {"padded_lengths": [6, 5, 3]} if format == "thd" else {}
    batch = make_batch((4, 5), captured=(3, 5), format=format, layout=layout)
    ran = run_schedule(make_session(model), model, [batch])
    if format == "bshd":
        expected = [[False] * 3 + [True] * 2, [False] * 5]
    else:  # the pads between the sequences and the slab's own as well
        expected = [[False] * 3 + [True] * 3 + [False] * 5 + [True] * 3]
    assert ran.masks[0].dtype == torch.bool
    assert ran.masks[0].tolist() == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pass_mask", [True, False])
def test_expert_bias_counts_replayed_and_live_rows_once_and_no_dummies(mode, pass_mask):
    """Also where the caller forgets the mask, and where the release drops it under recompute."""
    model = build_model(**RECOMPUTE[mode])
    batches = [appended_eos(seed=1), make_batch((5, 3), captured=(2, 3), seed=2)]
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches, pass_mask=pass_mask)
    for router in routers_of(model):
        calls = log.of(router, recompute=False)
        by_hand = np.add(counted(batches[0], calls[0]), counted(batches[1], calls[1]))
        assert router.local_tokens_per_expert.tolist() == by_hand.tolist()
        assert by_hand.sum() == TOPK * ((3 + 2 + 3) + (2 + 3))


@pytest.mark.parametrize("mode", MODES)
def test_expert_bias_is_right_where_tokens_are_as_many_as_experts(mode):
    """T = E: a mask that is broadcast along the wrong axis does not raise, it is wrong."""
    model = build_model(**RECOMPUTE[mode])
    batch = make_batch((8,), captured=(5,), seed=3)
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    for router in routers_of(model):
        (calls,) = log.of(router, recompute=False)
        assert len(calls) == EXPERTS
        assert router.local_tokens_per_expert.tolist() == counted(batch, calls)


def test_one_pad_token_in_four_leaves_three_counted():
    model = build_model(num_layers=1, moe_router_topk=1)
    batch = make_batch((3,), captured=(3,), num_layers=1, format="thd",
                       layout={"padded_lengths": [4]})  # fmt: skip
    values = batch.microbatch.routes.values[..., :1]
    packed = type(batch.microbatch.routes).from_lengths(values.contiguous(), [3])
    batch.microbatch = type(batch.microbatch)(batch.microbatch.layout, packed)
    run_schedule(make_session(model, 1), model, [batch])
    assert routers_of(model)[0].local_tokens_per_expert.sum() == 3


def test_expert_bias_counts_nothing_in_a_forward_only_schedule():
    model = build_model()
    run_schedule(make_session(model), model, [make_batch()], training=False)
    assert not any(router.local_tokens_per_expert.any() for router in routers_of(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [1, 2])
def test_mtp_heads_count_the_tokens_that_have_a_token_to_embed(mode, heads):
    """The head of depth d sees position s with the token of s + d: both must be real."""
    if megatron_version() == (0, 18) and mode.startswith("full"):
        pytest.skip("0.18 cannot recompute MTP at all: its checkpoint takes no padding_mask")
    model = build_model(num_layers=2, mtp_num_layers=heads, **RECOMPUTE[mode])
    batch = make_batch((6, 4), captured=(5, 4), num_layers=2)
    with RouteLog() as log:
        run_schedule(make_session(model, 2), model, [batch])
    for depth, head in enumerate(routers_of(model, mtp=True), start=1):
        (calls,) = log.of(head, recompute=False)
        counts = [0] * EXPERTS
        for s in range(6):
            for i, captured in enumerate((5, 4)):
                if s + depth < captured:
                    for expert in calls[2 * s + i]:
                        counts[expert] += 1
        assert head.local_tokens_per_expert.tolist() == counts
        assert sum(counts) == TOPK * (5 + 4 - 2 * depth)


@pytest.mark.parametrize("mode", ["none", "full uniform", "moe"])
def test_a_repeated_mtp_layer_counts_each_depth_by_its_own_mask(mode):
    """One router, called once a depth; recompute comes to the last call first."""
    if megatron_version() < (0, 17):
        pytest.skip("mtp_use_repeated_layer came with 0.17")
    if megatron_version() == (0, 18) and mode == "full uniform":
        pytest.skip("0.18 cannot recompute MTP at all")
    model = build_model(
        num_layers=2, mtp_num_layers=2, mtp_use_repeated_layer=True, **RECOMPUTE[mode]
    )
    batches = [make_batch((6, 4), num_layers=2, captured=(c, 4), seed=c) for c in (5, 2)]
    with RouteLog() as log:
        run_schedule(make_session(model, 2), model, batches)
    (head,) = routers_of(model, mtp=True)
    calls = log.of(head, recompute=False)
    assert len(calls) == 4
    counts = [0] * EXPERTS
    for call, (lengths, depth) in zip(
        calls, [((5, 4), 1), ((5, 4), 2), ((2, 4), 1), ((2, 4), 2)], strict=True
    ):
        for s in range(6):
            for i, captured in enumerate(lengths):
                if s + depth < captured:
                    for expert in call[2 * s + i]:
                        counts[expert] += 1
    assert head.local_tokens_per_expert.tolist() == counts


def test_a_model_without_expert_bias_takes_no_shim():
    from megatron.core.transformer.moe.router import TopKRouter

    before = TopKRouter._apply_expert_bias
    model = build_model(moe_router_enable_expert_bias=False)
    session = make_session(model)
    with session.schedule([make_batch().microbatch]) as same:
        assert same is session
        assert TopKRouter._apply_expert_bias is before
        step = session.begin(model)
        model(**make_batch().inputs, padding_mask=step.padding_mask)


def test_the_mask_lies_on_the_layouts_device():
    model = build_model()
    ran = run_schedule(make_session(model), model, [make_batch()])
    assert ran.masks[0].device.type == DEVICE.type
