"""Megatron's own RouterReplay: what it leaves behind, and that nothing stays in a scope."""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch

from packhorse.replay.router_replay import scoped_router_replay
from tests.megatron.helpers import (
    DEVICE,
    EXPERTS,
    RECOMPUTE,
    TOPK,
    RouteLog,
    assert_clean,
    assert_same_gradients,
    build_model,
    gradients_of,
    make_batch,
    make_session,
    replay_objects,
    routers_of,
    run_megatron,
    run_schedule,
)

FULL = RECOMPUTE["full uniform"]
LENGTHS = (6, 4)
LAYERS, MICROBATCHES = 3, 3


@pytest.fixture
def megatron():
    """``RouterReplay`` with no instance, before and after."""
    from megatron.core.transformer.moe import router_replay

    router_replay.RouterReplay.clear_global_router_replay_instances()
    yield router_replay
    router_replay.RouterReplay.clear_global_router_replay_instances()


def build(**over):
    return build_model(moe_enable_routing_replay=True, **{**FULL, **over})


def make_targets(seed, lengths=LENGTHS):
    """[microbatch][layer] [T, K] int64 distinct experts."""
    rng = np.random.default_rng(seed)
    num_slots = make_batch(lengths).microbatch.layout.num_tokens
    drawn = rng.random((MICROBATCHES, LAYERS, num_slots, EXPERTS)).argsort(-1)[..., :TOPK]
    return [[torch.tensor(layer, device=DEVICE) for layer in layers] for layers in drawn]


def run(model, targets, *, training, lengths=LENGTHS, fail_at=None, inside=lambda index: None):
    """One schedule as a user of RouterReplay writes it."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    batches = [make_batch(lengths, seed=seed) for seed in range(MICROBATCHES)]
    index = iter(range(MICROBATCHES))

    def forward_step(data, chunk):
        i = next(index)
        RouterReplay.set_replay_data(targets[i])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = chunk(**next(data).inputs)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        inside(i)
        if i == fail_at:
            raise RuntimeError("the reward server is gone")
        return output, lambda values: (values.float().mean(), {})

    run_megatron(forward_step, model, batches, training)


def wrong_routes(log, model, targets, *, recompute):
    """Router calls that routed other experts than their microbatch's targets, of how many."""
    wrong = calls = 0
    for layer, router in enumerate(routers_of(model)):
        for rows, layers in zip(log.of(router, recompute=recompute), targets, strict=True):
            calls += 1
            wrong += rows != [sorted(row) for row in layers[layer].tolist()]
    return wrong, calls


ALL = LAYERS * MICROBATCHES


def train(model, targets):
    """(wrong first passes, wrong recomputes), gradients."""
    with RouteLog() as log:
        run(model, targets, training=True)
    wrong = []
    for recompute in (False, True):
        count, calls = wrong_routes(log, model, targets, recompute=recompute)
        assert calls == ALL
        wrong.append(count)
    return tuple(wrong), gradients_of(model)


def queues(megatron):
    return [
        len(r.replay_backward_list) for r in megatron.RouterReplay.global_router_replay_instances
    ]


# --- the leak -------------------------------------------------------------------------------------


def test_without_a_scope_a_recompute_takes_the_routes_of_the_forward_only_schedule(megatron):
    model = build()
    old, new = make_targets(1), make_targets(2)
    wrong, expected = train(model, new)
    assert wrong == (0, 0)
    assert queues(megatron) == [0] * LAYERS
    run(model, old, training=False)
    assert queues(megatron) == [MICROBATCHES] * LAYERS
    wrong, gradients = train(model, new)  # and no error
    assert wrong == (0, ALL)
    assert queues(megatron) == [MICROBATCHES] * LAYERS
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients, expected)


def test_in_scopes_every_recompute_takes_its_own_routes_in_any_order_of_schedules(megatron):
    model = build()
    before = replay_objects(model)
    old, new = make_targets(1), make_targets(2)
    _, expected = train(model, new)
    megatron.RouterReplay.clear_global_indices()
    megatron.RouterReplay.clear_global_router_replay_action()
    for _ in range(2):
        with scoped_router_replay():
            run(model, old, training=False)
        assert_clean(model, before)
        for _ in range(2):
            with scoped_router_replay():
                wrong, gradients = train(model, new)
            assert wrong == (0, 0)
            assert_same_gradients(gradients, expected)
            assert_clean(model, before)


@pytest.mark.parametrize("lengths", [(9, 9), (3, 2)], ids=["longer", "shorter"])
def test_a_forward_only_schedule_of_other_lengths_leaves_nothing_either(lengths, megatron):
    model = build()
    with scoped_router_replay():
        run(model, make_targets(1, lengths), training=False, lengths=lengths)
    with scoped_router_replay():
        wrong, _ = train(model, make_targets(2))
    assert wrong == (0, 0)


@pytest.mark.parametrize("recompute", ["none", "full block"])
def test_a_training_schedule_that_recomputes_less_leaves_nothing(recompute, megatron):
    """Layers without a recompute never take from their queue."""
    model = build_model(moe_enable_routing_replay=True, **RECOMPUTE[recompute])
    before = replay_objects(model)
    with scoped_router_replay():
        run(model, make_targets(1), training=True)
        assert queues(megatron)[1:] == [MICROBATCHES] * (LAYERS - 1)
    assert_clean(model, before)


# --- within a scope -------------------------------------------------------------------------------


def test_targets_are_not_cleared_between_microbatches(megatron):
    """As 1F1B: all forwards, then the backwards in the same order."""
    replay, action = megatron.RouterReplay, megatron.RouterReplayAction
    model, targets = build(), make_targets(3)
    with RouteLog() as log, scoped_router_replay():
        outputs = []
        for i, layers in enumerate(targets):
            replay.set_replay_data(layers)
            replay.set_global_router_replay_action(action.REPLAY_FORWARD)
            outputs.append(model(**make_batch(LENGTHS, seed=i).inputs))
        replay.set_global_router_replay_action(action.REPLAY_BACKWARD)
        for output in outputs:
            output.mean().backward()
    assert wrong_routes(log, model, targets, recompute=False) == (0, ALL)
    assert wrong_routes(log, model, targets, recompute=True) == (0, ALL)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fail_at", range(MICROBATCHES))
def test_after_an_exception_all_is_clear_and_the_next_schedule_is_right(
    fail_at, training, megatron
):
    model, targets = build(), make_targets(4)
    before = replay_objects(model)
    with pytest.raises(RuntimeError, match="reward server"), scoped_router_replay():
        run(model, targets, training=training, fail_at=fail_at)
    assert_clean(model, before)
    with scoped_router_replay():
        wrong, _ = train(model, make_targets(5))
    assert wrong == (0, 0)


def test_no_target_is_kept_alive(megatron):
    model = build()

    def replayed():
        targets = make_targets(6)
        alive = [weakref.ref(layer) for layers in targets for layer in layers]
        with scoped_router_replay():
            run(model, targets, training=False)
        return alive

    alive = replayed()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_a_model_built_inside_is_cleared_too(megatron):
    with scoped_router_replay():
        model = build()
        run(model, make_targets(1), training=False)
    assert_clean(model, replay_objects(model))
    assert len(megatron.RouterReplay.global_router_replay_instances) == LAYERS


def test_routers_that_leave_the_global_list_inside_are_cleared_too(megatron):
    model = build()
    with scoped_router_replay():
        run(model, make_targets(1), training=False)
        megatron.RouterReplay.clear_global_router_replay_instances()
    for replay in replay_objects(model):
        assert replay.replay_backward_list == []
        assert replay.target_topk_idx is None
        assert replay.router_replay_action is None


def test_what_was_recorded_outlives_the_scope_and_may_be_replayed_in_the_next(megatron):
    replay, action = megatron.RouterReplay, megatron.RouterReplayAction
    model = build()
    batch = make_batch(LENGTHS)
    with RouteLog() as log, scoped_router_replay(), torch.no_grad():
        replay.set_global_router_replay_action(action.RECORD)
        model(**batch.inputs)
    recorded = replay.get_recorded_data()
    with scoped_router_replay():
        again = replay.get_recorded_data()
    for router, layer, same in zip(routers_of(model), recorded, again, strict=True):
        (rows,) = log.of(router, recompute=False)
        assert [sorted(row) for row in layer.tolist()] == rows
        assert same is layer


def test_a_session_and_a_scope_do_not_touch_each_other(megatron):
    model = build()
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(2)]
    with scoped_router_replay():
        run_schedule(make_session(model), model, batches)
        wrong, _ = train(model, make_targets(7))
    assert wrong == (0, 0)


# --- what is left over from before ----------------------------------------------------------------


def leave(megatron, kind):
    replay, action = megatron.RouterReplay, megatron.RouterReplayAction
    first, *_ = replay.global_router_replay_instances
    if kind == "queue":
        first.replay_backward_list.append(torch.zeros(1, TOPK, dtype=torch.long))
    elif kind == "target":
        first.target_topk_idx = torch.zeros(1, TOPK, dtype=torch.long)
    elif kind == "all":
        replay.set_replay_data([torch.zeros(1, TOPK, dtype=torch.long)] * LAYERS)
    else:
        first.set_router_replay_action(action[kind])


LEFT = {
    "queue": "of 3 instances router 0 has 1 in its queue. Put",
    "target": "of 3 instances router 0 has a target. Put",
    "REPLAY_FORWARD": "of 3 instances router 0 has action REPLAY_FORWARD. Put",
    "REPLAY_BACKWARD": "of 3 instances router 0 has action REPLAY_BACKWARD. Put",
    "all": r"router 0 has 1 in its queue, a target \(and 2 more routers\)",
}


def snapshot(megatron):
    return [
        (r.target_topk_idx, list(r.replay_backward_list), r.router_replay_action)
        for r in megatron.RouterReplay.global_router_replay_instances
    ]


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_over_is_refused_and_nothing_changed_or_cleared_on_request(kind, megatron):
    model = build()
    leave(megatron, kind)
    before = snapshot(megatron)
    with (
        pytest.raises(ValueError, match=f"scoped_router_replay: .*{LEFT[kind]}"),
        scoped_router_replay(),
    ):
        pytest.fail("the scope began")
    for (target, *rest), (was, *same) in zip(snapshot(megatron), before, strict=True):
        assert target is was
        assert rest == same
    with scoped_router_replay(left_over="clear"):
        assert_clean(model, replay_objects(model))
        wrong, _ = train(model, make_targets(8))
    assert wrong == (0, 0)


def test_a_record_action_of_megatrons_inference_is_dropped_without_a_word(megatron):
    model = build()
    leave(megatron, "RECORD")
    with scoped_router_replay():
        assert_clean(model, replay_objects(model))


def test_a_scope_inside_a_schedule_is_refused_and_the_schedule_goes_on(megatron):
    model, targets = build(), make_targets(9)

    def nest(index):
        with pytest.raises(ValueError, match="in use"), scoped_router_replay():
            pytest.fail("the scope began")

    with RouteLog() as log, scoped_router_replay():
        run(model, targets, training=True, inside=nest)
    assert wrong_routes(log, model, targets, recompute=True) == (0, ALL)


def test_a_model_without_routing_replay_has_nothing_to_scope(megatron):
    build_model()
    assert megatron.RouterReplay.global_router_replay_instances == []
    with scoped_router_replay():
        pass


def test_an_unknown_left_over_is_refused():
    with (
        pytest.raises(ValueError, match="left_over must be 'refuse' or 'clear', got 'keep'"),
        scoped_router_replay(left_over="keep"),
    ):
        pytest.fail("the scope began")


def test_a_megatron_without_router_replay_is_refused(monkeypatch):
    import megatron.core.transformer.moe as moe

    name = "megatron.core.transformer.moe.router_replay"
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError
    monkeypatch.delattr(moe, "router_replay", raising=False)
    with (
        pytest.raises(ValueError, match="this Megatron-core has no RouterReplay"),
        scoped_router_replay(),
    ):
        pytest.fail("the scope began")
