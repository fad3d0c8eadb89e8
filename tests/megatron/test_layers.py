"""Which router replays which captured layer."""

import numpy as np
import pytest
import torch

from packhorse.replay.routers import CapturedLayers, find_routers
from packhorse.replay.session import ReplaySession
from tests.megatron.helpers import (
    RECOMPUTE,
    RouteLog,
    assert_replayed,
    assert_routed,
    build_dense_model,
    build_hybrid,
    build_model,
    keep_layers,
    make_batch,
    make_session,
    megatron_version,
    routers_of,
    run_schedule,
)

FULL = RECOMPUTE["full uniform"]


def assert_replays(model, captured_layers, batch, positions):
    session = ReplaySession(model, captured_layers=captured_layers)
    with RouteLog() as log:
        run_schedule(session, model, [batch])
    assert_replayed(log, model, [batch], positions=positions, recomputed=range(10))


# --- dense layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frequency", "moe_layers"),
    [([0, 1, 1, 1], [1, 2, 3]), (2, [0, 2]), ([0, 1, 0, 1], [1, 3]), (1, [0, 1, 2, 3])],
    ids=["dense first", "every second", "every second from 1", "all"],
)
def test_captures_of_all_layers_map_by_layer_and_of_moe_layers_by_order(frequency, moe_layers):
    model = build_model(num_layers=4, moe_layer_freq=frequency, **FULL)
    assert [router.layer for router in find_routers(model)] == moe_layers
    dense = [layer for layer in range(4) if layer not in moe_layers]
    assert_replays(
        model,
        CapturedLayers.decoder(4),
        make_batch(num_layers=4, dense_layers=dense),
        moe_layers,
    )
    assert_replays(
        model,
        CapturedLayers.moe_only(),
        make_batch(num_layers=len(moe_layers)),
        range(len(moe_layers)),
    )
    backwards = moe_layers[::-1]
    assert_replays(
        model,
        CapturedLayers.listed(backwards),
        make_batch(num_layers=len(backwards)),
        [backwards.index(layer) for layer in moe_layers],
    )


def test_listed_layers_may_name_positions_that_are_no_moe_layer():
    model = build_model(num_layers=3, moe_layer_freq=[0, 1, 1], **FULL)
    captured = CapturedLayers.listed([2, None, 1, None])
    batch = make_batch(num_layers=4, dense_layers=[1, 3])
    assert_replays(model, captured, batch, [2, 0])


def test_routers_numbered_1_and_3_map_to_captured_layers_0_and_2():
    model = build_model(num_layers=4, moe_layer_freq=[1, 0, 1, 0], **FULL)
    assert [router.layer_number for router in routers_of(model)] == [1, 3]
    assert_replays(
        model, CapturedLayers.decoder(4), make_batch(num_layers=4, dense_layers=[1, 3]), [0, 2]
    )


def test_a_chunk_without_moe_layers_is_legal():
    """As the first stage of a model with dense first layers."""
    model = build_model(num_layers=2, moe_layer_freq=[0, 1], **FULL)
    keep_layers(model, slice(0, 1))
    session = ReplaySession(model, captured_layers=CapturedLayers.decoder(2))
    batch = make_batch(num_layers=2, dense_layers=[0])
    with session.schedule([batch.microbatch]):
        step = session.begin(model)
        model(**batch.inputs, padding_mask=step.padding_mask)
    assert session.report().routers == ()


def test_a_model_without_moe_layers_is_refused():
    model = build_dense_model()
    with pytest.raises(ValueError, match="the model has no MoE layer"):
        make_session(model)


# --- what does not fit ----------------------------------------------------------------------------


def test_a_router_without_a_captured_layer_is_refused():
    model = build_model()
    expected = r"router decoder\.layers\.1\.mlp\.router \(layer 1\) has no captured layer in listed"
    with pytest.raises(ValueError, match=expected):
        ReplaySession(model, captured_layers=CapturedLayers.listed([0, 2]))


@pytest.mark.parametrize(
    "captured",
    [CapturedLayers.listed([0, 1, 2]), CapturedLayers.decoder(3), CapturedLayers.moe_only()],
    ids=str,
)
def test_a_captured_layer_without_a_router_is_refused(captured):
    from megatron.core.transformer.mlp import MLP

    model = build_model()
    dense = build_dense_model()
    model.decoder.layers[1].mlp = dense.decoder.layers[1].mlp
    assert isinstance(model.decoder.layers[1].mlp, MLP)
    with pytest.raises(ValueError, match=r"layer 1 is captured in .* but has no router"):
        ReplaySession(model, captured_layers=captured)


def test_an_axis_of_another_depth_is_refused():
    model = build_model()
    with pytest.raises(ValueError, match=r"decoder\(4\), but the model has 3 layers"):
        make_session(model, 4)
    with pytest.raises(ValueError, match=r"\(layer 0\) has no captured layer in listed"):
        ReplaySession(model, captured_layers=CapturedLayers.listed([3, 4, 5]))


@pytest.mark.parametrize("captured", [CapturedLayers.decoder(3), CapturedLayers.moe_only()])
def test_routes_with_another_number_of_layers_are_refused(captured):
    model = build_model()
    session = ReplaySession(model, captured_layers=captured)
    with (
        pytest.raises(ValueError, match="microbatch 1: routes have 4 layers, captured_layers des"),
        session.schedule([make_batch().microbatch, make_batch(num_layers=4).microbatch]),
    ):
        pytest.fail("the schedule began")


def test_two_chunks_that_replay_one_layer_are_refused():
    with pytest.raises(ValueError, match=r"of chunk 1 and .* both replay captured layer 0"):
        make_session([build_model(), build_model()])


def test_layers_that_change_between_schedules_are_found_anew():
    model = build_model()
    session = make_session(model)
    run_schedule(session, model, [make_batch()])
    other = build_model(seed=3)
    model.decoder.layers[1].mlp = other.decoder.layers[1].mlp
    batch = make_batch(seed=4)
    with RouteLog() as log:
        run_schedule(session, model, [batch])
    assert_replayed(log, model, [batch])


# --- models beside each other ---------------------------------------------------------------------


def test_a_rebuilt_model_replays_and_stale_instances_of_megatrons_list_do_not_matter():
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    try:
        model = build_model(moe_enable_routing_replay=True, **FULL)
        del model
        model = build_model(moe_enable_routing_replay=True, seed=2, **FULL)
        reference = build_model(moe_enable_routing_replay=True, seed=3, **FULL)
        listed = list(RouterReplay.global_router_replay_instances)
        assert len(listed) == 9
        batch, inputs = make_batch(), make_batch(seed=5).inputs
        session = make_session(model)
        with RouteLog() as log:
            run_schedule(session, model, [batch])
            # the reference model runs live, also while a schedule is open
            with session.schedule([batch.microbatch]), torch.no_grad():
                step = session.begin(model)
                reference(**inputs)
                model(**batch.inputs, padding_mask=step.padding_mask)
            with torch.no_grad():
                reference(**inputs)
        for router, position in zip(routers_of(model), range(3), strict=True):
            for rows in log.of(router, recompute=False):
                assert_routed(rows, batch.rows(position))
        for router in routers_of(reference):
            inside, outside = log.of(router, recompute=False)
            assert inside == outside
        assert listed == RouterReplay.global_router_replay_instances
    finally:
        RouterReplay.clear_global_router_replay_instances()


# --- multi-token prediction -----------------------------------------------------------------------


def mtp_model(**over):
    settings = {"num_layers": 2, "mtp_num_layers": 1, "moe_layer_freq": 1}
    settings.update(over)
    return build_model(**settings)


class Wrapper(torch.nn.Module):
    """A user's own, whose attribute's name says nothing about the model in it."""

    def __init__(self, inner):
        super().__init__()
        self.mtp_policy = inner
        self.config = inner.config

    def forward(self, **inputs):
        return self.mtp_policy(**inputs)


def test_a_wrapper_whose_attribute_begins_with_mtp_does_not_make_routers_live():
    model = build_model()
    wrapped, batch = Wrapper(model), make_batch()
    session = make_session(wrapped)
    with RouteLog() as log, session.schedule([batch.microbatch]):
        step = session.begin(wrapped)
        wrapped(**batch.inputs, padding_mask=step.padding_mask)
    assert_replayed(log, model, [batch])


def test_who_slices_the_padding_mask_is_told_through_any_wrapper():
    from packhorse.replay.routers import scatters_padding_mask

    model = build_model()
    assert scatters_padding_mask(model)
    assert scatters_padding_mask(Wrapper(model))
    model.pre_process = False
    assert not scatters_padding_mask(Wrapper(model))


def test_a_model_of_which_nothing_would_replay_is_refused():
    class OwnStack(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    with pytest.raises(ValueError, match=r"OwnStack has MoE layers .* nothing of it would replay"):
        make_session(OwnStack(build_model().config))


def test_an_mtp_head_numbered_like_a_decoder_layer_runs_live():
    model = mtp_model()
    (head,) = routers_of(model, mtp=True)
    if hasattr(head, "is_mtp_layer"):
        assert head.layer_number == 1  # 0.17 and later: the decoder's first layer has it too
    located = find_routers(model)
    assert [(router.layer, router.is_mtp) for router in located] == [
        (0, False),
        (1, False),
        (1, True),
    ]
    batch = make_batch(num_layers=2, captured=(6, 6), lengths=(6, 6))
    with RouteLog() as log:
        session = make_session(model, 2)
        run_schedule(session, model, [batch])
    assert_replayed(log, model, [batch], positions=(0, 1))
    (head_rows,) = log.of(head, recompute=False)
    assert head_rows != batch.rows(0)
    assert head_rows != batch.rows(1)
    with RouteLog() as free:
        run_schedule(session, model, [batch])
    assert free.of(head, recompute=False) == [head_rows]
    assert len(session.report().routers) == 2


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mode", ["full uniform", "moe"])
def test_mtp_heads_recompute_beside_replayed_layers(mode, heads):
    if megatron_version() == (0, 18) and mode == "full uniform":
        pytest.skip("0.18 cannot recompute MTP at all")
    model = mtp_model(mtp_num_layers=heads, **RECOMPUTE[mode])
    batches = [make_batch(num_layers=2, seed=seed) for seed in range(2)]
    with RouteLog() as log:
        run_schedule(make_session(model, 2), model, batches)
    assert_replayed(log, model, batches, positions=(0, 1), recomputed=(0, 1))
    for head in routers_of(model, mtp=True):
        first, again = log.of(head, recompute=False), log.of(head, recompute=True)
        assert len(first) == 2
        assert again == first


def test_a_repeated_mtp_layer_runs_live_and_recomputes():
    model = mtp_model_repeated()
    batches = [make_batch(num_layers=2, seed=seed) for seed in range(2)]
    with RouteLog() as log:
        run_schedule(make_session(model, 2), model, batches)
    assert_replayed(log, model, batches, positions=(0, 1), recomputed=(0, 1))
    (head,) = routers_of(model, mtp=True)
    assert len(log.of(head, recompute=False)) == len(log.of(head, recompute=True)) == 4


def mtp_model_repeated():
    if megatron_version() < (0, 17):
        pytest.skip("mtp_use_repeated_layer came with 0.17")
    if megatron_version() == (0, 18):
        pytest.skip("0.18 cannot recompute MTP at all")
    return mtp_model(mtp_num_layers=2, mtp_use_repeated_layer=True, **FULL)


# --- hybrid stacks --------------------------------------------------------------------------------


def hybrid(pattern):
    if megatron_version() < (0, 18):
        pytest.skip("HybridModel came with 0.18")
    return build_hybrid(pattern)


def test_hybrid_stacks_map_moe_captures_by_the_order_of_their_moe_layers():
    model = hybrid("*-*E*E")
    assert [router.layer_number for router in routers_of(model)] == [4, 6]
    batch = make_batch(num_layers=2)
    session = ReplaySession(model, captured_layers=CapturedLayers.moe_only())
    with RouteLog() as log:
        run_schedule(session, model, [batch])
    assert_replayed(log, model, [batch], positions=(0, 1))


def test_hybrid_stacks_map_listed_captures_of_blocks():
    """Blocks of attention and feed-forward: three captured layers, the first of them dense."""
    model = hybrid("*-*E*E")
    captured = CapturedLayers.listed([None, 3, 5])
    batch = make_batch(num_layers=3, dense_layers=[0])
    with RouteLog() as log:
        run_schedule(ReplaySession(model, captured_layers=captured), model, [batch])
    assert_replayed(log, model, [batch], positions=(1, 2))


def test_hybrid_stacks_refuse_a_decoder_axis_that_counts_blocks():
    model = hybrid("*-*E*E")
    with pytest.raises(ValueError, match=r"decoder\(3\), but the model has 6 layers; a stack that"):
        make_session(model, 3)


# --- the description itself -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CapturedLayers.decoder(0), r"decoder: num_layers must be an integer >= 1, got 0"),
        (lambda: CapturedLayers.decoder(True), r"decoder: num_layers must be an integer"),
        (lambda: CapturedLayers.listed([]), r"listed: no layer is named"),
        (lambda: CapturedLayers.listed([None]), r"listed: no layer is named"),
        (lambda: CapturedLayers.listed([1, 1]), r"listed: a layer is named twice"),
        (lambda: CapturedLayers.listed([-1]), r"listed: layers must be integers >= 0 or None"),
    ],
)
def test_captured_layers_refuses_what_is_no_axis(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_session_refuses_what_is_no_model_or_axis():
    with pytest.raises(TypeError, match="model must be a module or a list of them, got str"):
        ReplaySession(["model"], captured_layers=CapturedLayers.moe_only())
    with pytest.raises(ValueError, match="no model chunk was given"):
        ReplaySession([], captured_layers=CapturedLayers.moe_only())
    with pytest.raises(TypeError, match="captured_layers must be CapturedLayers, got int"):
        ReplaySession(build_model(), captured_layers=3)


def test_what_is_no_list_of_microbatches_or_no_module_is_refused_by_name():
    model, batch = build_model(), make_batch()
    captured = CapturedLayers.decoder(3)
    with pytest.raises(TypeError, match="ReplaySession: model must be a module or a list"):
        ReplaySession(None, captured_layers=captured)
    session = ReplaySession(model, captured_layers=captured)
    schedule = session.schedule(batch.microbatch)
    with pytest.raises(TypeError, match="microbatches must be a list of ReplayMicrobatch"):
        schedule.__enter__()
    with pytest.raises(TypeError, match=r"ReplaySession.begin: model must be the module"):
        session.begin([model])


def test_captured_layers_take_numpy_integers():
    assert CapturedLayers.decoder(np.int64(3)) == CapturedLayers.decoder(3)
    assert CapturedLayers.listed(np.array([2, 0])) == CapturedLayers.listed([2, 0])
