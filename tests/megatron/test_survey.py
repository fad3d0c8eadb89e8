"""A survey is kept while the model holds, and made anew for whatever changes in it."""

import contextlib
import time

import pytest
import torch

from packhorse.replay import survey as survey_module
from packhorse.replay.session import CapturedLayers
from packhorse.replay.survey import CONFIG_SETTINGS, Survey
from tests.megatron.helpers import (
    RouteLog,
    assert_replayed,
    build_model,
    make_batch,
    make_session,
    routers_of,
    run_schedule,
)


def make_survey(model, captured=None):
    captured = captured or CapturedLayers.decoder(3)
    return Survey([model], captured, allow_live_aux_loss=False)


def test_a_model_that_stays_is_surveyed_once():
    model = build_model()
    session = make_session(model)
    for training in (True, False, True):
        run_schedule(session, model, [make_batch()], training=training)
    assert session._survey.count == 1


def test_what_a_forward_and_an_optimizer_step_do_is_no_change():
    model = build_model()
    session = make_session(model)
    optimizer = torch.optim.Adam(model.parameters())
    for seed in range(3):
        batch = make_batch(seed=seed)
        with RouteLog() as log:
            run_schedule(session, model, [batch])
        assert_replayed(log, model, [batch])
        optimizer.step()
        model.train(seed % 2 == 0)
        model.config.no_sync_func = contextlib.nullcontext
        model.config.grad_scale_func = lambda loss: loss
    assert session._survey.count == 1


def replace_router(model, other):
    model.decoder.layers[1].mlp.router = other.decoder.layers[1].mlp.router


def replace_moe(model, other):
    model.decoder.layers[1].mlp = other.decoder.layers[1].mlp


def replace_layer(model, other):
    model.decoder.layers[1] = other.decoder.layers[1]


def replace_layers(model, other):
    model.decoder.layers = other.decoder.layers


def replace_decoder(model, other):
    model.decoder = other.decoder


@pytest.mark.parametrize(
    "change", [replace_router, replace_moe, replace_layer, replace_layers, replace_decoder]
)
def test_a_part_that_is_rebuilt_between_schedules_replays(change):
    model = build_model()
    session = make_session(model)
    run_schedule(session, model, [make_batch()])
    old = routers_of(model)[1]
    change(model, build_model(seed=3))
    new = routers_of(model)[1]
    assert new is not old
    batch = make_batch(seed=4)
    with RouteLog() as log:
        run_schedule(session, model, [batch])
    assert_replayed(log, model, [batch])
    assert log.of(new, recompute=False)
    assert not log.of(old, recompute=False)
    assert session._survey.count == 2


def test_a_layer_that_is_added_is_found():
    model = build_model()
    last = model.decoder.layers[2]
    del model.decoder.layers[2]
    survey = make_survey(model)
    assert survey.chunks()[0].positions == (0, 1)
    model.decoder.layers.append(last)
    assert survey.chunks()[0].positions == (0, 1, 2)
    del model.decoder.layers[0]
    assert survey.chunks()[0].positions == (1, 2)


def test_a_layer_added_to_a_dense_chunk_is_found():
    model = build_model()
    layers = list(model.decoder.layers)
    del model.decoder.layers[:]
    survey = make_survey(model)
    assert survey.chunks()[0].routers == []
    model.decoder.layers.append(layers[0])
    assert [router.module for router in survey.chunks()[0].routers] == [layers[0].mlp.router]


def test_a_layer_that_does_not_fit_is_refused_at_every_schedule():
    model = build_model()
    session = make_session(model)
    model.decoder.layers.append(build_model().decoder.layers[1])
    for _ in range(2):
        with pytest.raises(ValueError, match="are both layer 1"):
            run_schedule(session, model, [make_batch()])
    del model.decoder.layers[3]
    run_schedule(session, model, [make_batch()])


def test_a_chunk_that_is_wrapped_holds_and_one_whose_inside_is_exchanged_does_not():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapper = Wrapper(build_model())
    survey = make_survey(wrapper)
    assert survey.chunks() is survey.chunks()
    wrapper.module = build_model(seed=5)
    assert survey.chunks()[0].module is wrapper.module
    assert survey.count == 2


@pytest.mark.parametrize(
    ("setting", "value"), [("layer_number", 7), ("topk", 3), ("routing_type", ["sinkhorn"])]
)
def test_a_router_whose_own_setting_changed_is_refused(setting, value):
    model = build_model()
    session = make_session(model)
    setattr(routers_of(model)[1], setting, value)
    with pytest.raises(ValueError, match=r"^ReplaySession: "):
        run_schedule(session, model, [make_batch()])


def test_a_list_of_the_config_that_changes_in_place_is_noticed():
    model = build_model(moe_layer_freq=[1, 1, 1])
    survey = make_survey(model, CapturedLayers.moe_only())
    survey.chunks()
    model.config.moe_layer_freq[2] = 0
    with pytest.raises(ValueError, match="has no captured layer"):
        survey.chunks()


def test_every_setting_that_a_survey_reads_of_the_config_is_watched():
    """Those that a schedule reads live, and the methods of a dataclass, aside."""
    model = build_model(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.0)
    kind = type(model.config)
    read = set()

    class Recording(kind):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    for captured in (CapturedLayers.decoder(3), CapturedLayers.moe_only()):
        model.config.__class__ = Recording
        survey = make_survey(model, captured)
        survey._survey()
        model.config.__class__ = kind
    assert "num_moe_experts" in read
    assert {name for name in read if not name.startswith("__")} <= set(CONFIG_SETTINGS)


def test_keeping_a_survey_is_cheaper_than_making_one():
    model = build_model()
    survey = make_survey(model)
    survey.chunks()

    def fastest(call):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert fastest(survey.chunks) < 0.5 * fastest(survey._survey)
    assert survey.count == 1


def test_experts_are_not_walked():
    model = build_model()
    experts = {id(m) for layer in model.decoder.layers for m in layer.mlp.experts.modules()}
    watched = {id(module) for module in survey_module._watched(model)}
    assert experts
    assert not experts & watched
    assert watched | experts == {id(module) for module in model.modules()}
