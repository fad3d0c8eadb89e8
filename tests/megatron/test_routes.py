"""The routes that Megatron's routers take are the captured ones, in both passes of every mode."""

import numpy as np
import pytest
import torch

from tests.megatron import helpers
from tests.megatron.helpers import (
    RECOMPUTE,
    RECOMPUTED_LAYERS,
    RouteLog,
    assert_replayed,
    assert_same_gradients,
    build_model,
    gradients_of,
    keep_layers,
    make_batch,
    make_session,
    routers_of,
    run_schedule,
)


def two_batches(**options):
    return [make_batch((6, 4), seed=1, **options), make_batch((6, 6), seed=2, **options)]


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_forward_and_recompute_take_the_captured_routes(mode):
    model = build_model(**RECOMPUTE[mode])
    batches = two_batches()
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches, recomputed=RECOMPUTED_LAYERS[mode])


@pytest.mark.parametrize("mode", [mode for mode in RECOMPUTE if mode != "none"])
def test_gradients_are_those_without_recompute_bit_for_bit(mode):
    batches = two_batches()
    plain = build_model()
    run_schedule(make_session(plain), plain, batches)
    recomputing = build_model(**RECOMPUTE[mode])
    recomputing.load_state_dict(plain.state_dict())
    run_schedule(make_session(recomputing), recomputing, batches)
    assert_same_gradients(gradients_of(recomputing), gradients_of(plain))


@pytest.mark.parametrize("mode", RECOMPUTE)
def test_gradients_with_live_rows_are_those_without_recompute_bit_for_bit(mode):
    batches = [make_batch((6, 4), captured=(3, 3), seed=1, live="all")]
    plain = build_model()
    run_schedule(make_session(plain), plain, batches)
    recomputing = build_model(**RECOMPUTE[mode])
    recomputing.load_state_dict(plain.state_dict())
    run_schedule(make_session(recomputing), recomputing, batches)
    assert_same_gradients(gradients_of(recomputing), gradients_of(plain))


def test_free_routing_differs_from_the_captured_routes():
    # what the other tests here would show if replay did nothing
    model = build_model()
    batches = two_batches()
    with RouteLog() as log:
        run_schedule(make_session(model), model, [make_batch((6, 4), with_routes=False)])
    with pytest.raises(AssertionError):
        assert_replayed(log, model, batches[:1])


def test_forward_only_schedule_leaves_nothing_for_the_training_schedule():
    """A forward-only schedule with routes A, then training with full recompute and routes B."""
    model = build_model(**RECOMPUTE["full uniform"])
    session = make_session(model)
    old, new = [make_batch((6, 4), seed=10)], [make_batch((6, 4), seed=11)]
    run_schedule(session, model, old, training=False)
    with RouteLog() as log:
        run_schedule(session, model, new)
    assert_replayed(log, model, new, recomputed=(0, 1, 2))


def test_unequal_token_counts_of_following_schedules_do_not_meet():
    model = build_model(**RECOMPUTE["full uniform"])
    session = make_session(model)
    for lengths in ((9, 9), (4, 3), (7, 2)):
        batches = [make_batch(lengths, seed=sum(lengths))]
        run_schedule(session, model, batches, training=False)
        with RouteLog() as log:
            run_schedule(session, model, batches)
        assert_replayed(log, model, batches, recomputed=(0, 1, 2))


def test_two_forwards_before_the_first_backward_recompute_in_their_order():
    """1F1B with two microbatches in flight, driven by hand."""
    model = build_model(**RECOMPUTE["full uniform"])
    session = make_session(model)
    batches = [make_batch((6, 4), seed=seed) for seed in range(3)]
    with RouteLog() as log, session.schedule([batch.microbatch for batch in batches]):
        losses = []
        for i in (0, 1):
            step = session.begin(model)
            losses.append(model(**batches[i].inputs, padding_mask=step.padding_mask).mean())
        losses[0].backward()
        step = session.begin(model)
        losses.append(model(**batches[2].inputs, padding_mask=step.padding_mask).mean())
        losses[1].backward()
        losses[2].backward()
    assert_replayed(log, model, batches, recomputed=(0, 1, 2))


def test_chunks_of_one_schedule_keep_their_own_counts_and_routes():
    """Two chunks, interleaved F0.0 F0.1 F1.0 F1.1 B1.0 B0.0 ..., each with routers of its own."""
    first = build_model(seed=1, **RECOMPUTE["full uniform"])
    second = build_model(seed=2, num_layers=6, **RECOMPUTE["full uniform"])
    keep_layers(second, slice(3, 6))  # as a later stage of a model of six layers
    first.config.num_layers = second.config.num_layers
    session = make_session([first, second], num_layers=6)
    batches = [make_batch((6, 4), num_layers=6, seed=seed) for seed in range(2)]
    outputs = {}
    with RouteLog() as log, session.schedule([batch.microbatch for batch in batches]):
        for chunk, model, i in ((0, first, 0), (0, first, 1), (1, second, 0), (1, second, 1)):
            step = session.begin(model)
            assert (step.chunk, step.index) == (chunk, i)
            outputs[chunk, i] = model(**batches[i].inputs, padding_mask=step.padding_mask).mean()
        for key in ((1, 0), (0, 0), (1, 1), (0, 1)):
            outputs[key].backward()
    assert_replayed(log, first, batches, positions=(0, 1, 2), recomputed=range(6))
    assert_replayed(log, second, batches, positions=(3, 4, 5), recomputed=range(6))


def test_only_the_chunks_own_layers_are_widened():
    """A capture of six layers on a stage of the last two."""
    model = build_model(num_layers=6)
    keep_layers(model, slice(4, 6))
    session = make_session(model, num_layers=6)
    batch = make_batch((6, 4), num_layers=6)
    with RouteLog() as log, session.schedule([batch.microbatch]):
        step = session.begin(model)
        targets = routers_of(model)[0].router_replay._open.targets
        assert [part.dtype for part in targets] == [torch.int64] * 2
        assert targets[0].untyped_storage().nbytes() == 2 * 12 * helpers.TOPK * 8
        model(**batch.inputs, padding_mask=step.padding_mask)
    assert_replayed(log, model, [batch], positions=(4, 5))


def test_bshd_routes_reach_the_router_position_by_position():
    """B=2, S=3, rows 10 11 12 / 20 21 22: the router sees 10 20 11 21 12 22."""
    model = build_model(num_moe_experts=32, moe_router_topk=1)
    rows = [[10, 11, 12], [20, 21, 22]]
    batch = make_batch((3, 3), captured=(3, 3))
    for trajectory, experts in enumerate(rows):
        start = 3 * trajectory
        values = batch.microbatch.routes.values
        values[start : start + 3] = torch.tensor(experts, dtype=torch.uint8)[:, None, None]
    routes = type(batch.microbatch.routes)(
        values[..., :1].contiguous(), batch.microbatch.routes.cu_seqlens
    )
    batch.microbatch = type(batch.microbatch)(batch.microbatch.layout, routes)
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    for router in routers_of(model):
        (seen,) = log.of(router, recompute=False)
        assert seen == [[10], [20], [11], [21], [12], [22]]


def test_thd_routes_follow_the_padded_sequences():
    model = build_model(**RECOMPUTE["full uniform"])
    batches = [make_batch((5, 3, 1), format="thd", seed=3, layout={"padded_lengths": [6, 4, 2, 4]})]
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches, recomputed=(0, 1, 2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_every_captured_dtype_replays(dtype):
    model = build_model()
    batches = [make_batch((6, 4), dtype=dtype)]
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches)


def test_routes_on_the_layouts_device_replay_like_those_on_the_host():
    model = build_model()
    batches = [make_batch((6, 4), routes_device=str(helpers.DEVICE))]
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches)


def test_token_dispatcher_receives_the_captured_experts(monkeypatch):
    """One place further than the router: what is dispatched."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    seen = []
    original = MoEAlltoAllTokenDispatcher.dispatch_preprocess

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        seen.append([row.nonzero().flatten().tolist() for row in routing_map])
        return original(self, hidden_states, routing_map, probs)

    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "dispatch_preprocess", dispatch_preprocess)
    model = build_model()
    batch = make_batch((6, 6), captured=(6, 6))
    run_schedule(make_session(model), model, [batch], training=False)
    assert seen == [batch.rows(position) for position in range(3)]


def test_scores_of_experts_outside_the_live_topk_are_gathered_and_trained():
    """The replayed ids are the worst of the live scores; probabilities and gradients are theirs."""
    model = build_model(moe_router_enable_expert_bias=False, num_layers=1)
    free = make_batch((5,), captured=(5,), num_layers=1, seed=3, with_routes=False)
    with RouteLog() as log:
        run_schedule(make_session(model, 1), model, [free], training=False)
    live = log.calls[0].rows
    batch = make_batch((5,), captured=(5,), num_layers=1, seed=3)
    values = batch.microbatch.routes.values
    for s in range(5):
        outside = [e for e in range(helpers.EXPERTS) if e not in live[s]]
        values[s, 0] = torch.tensor(outside[-helpers.TOPK :], dtype=torch.uint8)
    with RouteLog() as log:
        run_schedule(make_session(model, 1), model, [batch])
    call = log.calls[0]
    for s in range(5):
        assert not set(call.rows[s]) & set(live[s])
        chosen = call.probs[s][call.rows[s]]
        assert (chosen > 0).all()
        torch.testing.assert_close(chosen.sum(), torch.tensor(1.0))
    assert routers_of(model)[0].weight.grad.abs().sum() > 0


def test_column_order_of_replayed_ids_is_kept(monkeypatch):
    """The ids and scores that come back to Megatron stand in the captured order."""
    from packhorse.replay.targets import RouterTargets

    returned = []
    original = RouterTargets.get_replay_topk

    def get_replay_topk(self, scores, *args):
        values, ids = original(self, scores, *args)
        returned.append((scores, values, ids))
        return values, ids

    monkeypatch.setattr(RouterTargets, "get_replay_topk", get_replay_topk)
    model = build_model(num_layers=1)
    batch = make_batch((6,), captured=(6,), num_layers=1, seed=5)
    run_schedule(make_session(model, 1), model, [batch], training=False)
    ((scores, values, ids),) = returned
    captured = batch.routes[0][:, 0]
    assert ids.tolist() == captured.tolist()
    assert (captured[:, 0] > captured[:, 1]).any()
    for row, experts in enumerate(captured):
        assert values[row].tolist() == [float(scores[row, e]) for e in experts]


def test_equal_scores_at_rank_k_dispatch_alike_in_forward_and_recompute():
    """All scores equal: the choice is the sort's whim, but it is made once."""
    model = build_model(**RECOMPUTE["full uniform"])
    for router in routers_of(model):
        router.weight.data.zero_()
    batch = make_batch((6, 4), captured=(2, 2), live="all")
    session = make_session(model)

    # the router's own top-k answers differently on every call, as it may where scores are equal
    from megatron.core.transformer.moe import router as router_module

    original = router_module.topk_routing_with_score_function

    def unstable(logits, *args, **options):
        order = torch.randperm(logits.shape[1], generator=generator)
        noise = torch.zeros_like(logits)
        noise[:, order[: helpers.TOPK]] = 1e-6
        return original(logits + noise, *args, **options)

    generator = torch.Generator().manual_seed(0)
    router_module.topk_routing_with_score_function = unstable
    try:
        with RouteLog() as log:
            run_schedule(session, model, [batch])
    finally:
        router_module.topk_routing_with_score_function = original
    for router in routers_of(model):
        first, again = log.of(router, recompute=False), log.of(router, recompute=True)
        assert len(first) == len(again) == 1
        assert first == again


def test_softmax_grouped_and_scaled_routing_replay_too():
    for over in (
        {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False},
        {
            "moe_router_score_function": "softmax",
            "moe_router_enable_expert_bias": False,
            "moe_router_pre_softmax": True,
        },
        {
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
        },
    ):
        model = build_model(**over, **RECOMPUTE["full uniform"])
        batches = [make_batch((6, 4), captured=(4, 3), live="all")]
        with RouteLog() as log:
            run_schedule(make_session(model), model, batches)
        assert_replayed(log, model, batches, recomputed=(0, 1, 2))


def test_bfloat16_models_in_megatrons_wrappers_replay():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.transformer.module import Float16Module

    model = build_model(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    config = model.config
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=Float16Module(config, model),
    )
    batches = two_batches()
    for given in (wrapped, model):
        wrapped.zero_grad_buffer()
        with RouteLog() as log:
            run_schedule(make_session(given), wrapped, batches)
        assert_replayed(log, model, batches)


def test_a_model_in_eval_mode_replays():
    model = build_model().eval()
    batches = two_batches()
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches, training=False)
    assert_replayed(log, model, batches)


def test_losses_change_with_the_routes_and_not_with_the_recompute():
    model = build_model()
    one = run_schedule(make_session(model), model, [make_batch((6, 4), seed=1)]).losses
    again = run_schedule(make_session(model), model, [make_batch((6, 4), seed=1)]).losses
    batch = make_batch((6, 4), seed=1)
    other = (np.concatenate(batch.routes) + 1) % helpers.EXPERTS
    batch.microbatch.routes.values.copy_(torch.tensor(other))
    assert one == pytest.approx(again, rel=1e-6)
    assert run_schedule(make_session(model), model, [batch]).losses != one
