"""wrap_forward_step through Megatron's own schedule, against a forward step written by hand."""

import functools

import pytest

from packhorse.replay.wrap import wrap_forward_step
from tests.megatron.helpers import (
    RECOMPUTE,
    RouteLog,
    assert_clean,
    assert_replayed,
    assert_same_gradients,
    build_model,
    gradients_of,
    make_batch,
    make_session,
    replay_objects,
    run_megatron,
    run_schedule,
)


def three_lines(losses):
    """A trainer's forward step: the first two of the lines are in it."""

    def forward_step(data_iterator, model, *, step):
        batch = next(data_iterator)
        output = model(**batch.inputs, padding_mask=step.padding_mask)

        def loss(values):
            losses.append(float(values.detach().float().mean()))
            return values.float().mean(), {}

        return output, loss

    return forward_step


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full uniform"])
def test_a_schedule_does_what_the_one_by_hand_does(training, recompute):
    model = build_model(**RECOMPUTE[recompute])
    before = replay_objects(model)
    session = make_session(model)
    batches = [make_batch(seed=seed) for seed in range(3)]
    with RouteLog() as by_hand:
        expected = run_schedule(session, model, batches, training=training)
    gradients, report = gradients_of(model), session.report()

    losses = []
    with RouteLog() as log, session.schedule([batch.microbatch for batch in batches]):
        wrapped = wrap_forward_step(three_lines(losses), session)
        run_megatron(wrapped, model, batches, training)
    recomputed = (0, 1, 2) if training and recompute != "none" else ()
    assert_replayed(log, model, batches, recomputed=recomputed)
    assert [call.rows for call in log.calls] == [call.rows for call in by_hand.calls]
    assert losses == expected.losses
    assert_same_gradients(gradients_of(model), gradients)
    assert session.report() == report
    assert_clean(model, before)


def test_each_call_begins_one_microbatch_of_its_chunk_and_passes_the_rest_on():
    model = build_model()
    session = make_session(model)
    batches = [make_batch(seed=seed) for seed in range(2)]
    seen = []

    def forward_step(data_iterator, model, checkpoint_activations_microbatch=None, step=None):
        seen.append((step.index, step.microbatch, checkpoint_activations_microbatch))
        batch = next(data_iterator)
        return model(**batch.inputs, padding_mask=step.padding_mask), None

    wrapped = wrap_forward_step(forward_step, session)
    data = iter(batches)
    with session.schedule([batch.microbatch for batch in batches]):
        wrapped(data, model)
        wrapped(data, model, True)
    assert seen == [(0, batches[0].microbatch, None), (1, batches[1].microbatch, True)]
    assert wrapped.__name__ == "forward_step"


def test_outside_a_schedule_it_is_an_error():
    session = make_session(build_model())
    wrapped = wrap_forward_step(three_lines([]), session)
    with pytest.raises(ValueError, match=r"ReplaySession\.begin: no schedule is open"):
        wrapped(iter([]), build_model())


def test_a_forward_step_that_is_bound_or_partial_or_takes_any_keyword():
    class Trainer:
        def forward_step(self, data_iterator, model, step):
            return step

    session = make_session(build_model())
    for forward_step in (
        Trainer().forward_step,
        functools.partial(lambda extra, data_iterator, model, step: step, 1),
        lambda data_iterator, model, **options: options,
    ):
        wrap_forward_step(forward_step, session)


@pytest.mark.parametrize(
    "forward_step",
    [
        lambda data_iterator, model: None,
        lambda data_iterator, model, mask=None: None,
        lambda step, /, model: None,
        lambda data_iterator, model, *step: None,
    ],
)
def test_a_forward_step_that_takes_no_step_is_refused(forward_step):
    session = make_session(build_model())
    with pytest.raises(TypeError, match="wrap_forward_step: forward_step must take step"):
        wrap_forward_step(forward_step, session)


def test_what_is_no_session_and_no_function_is_refused():
    with pytest.raises(TypeError, match="session must be a ReplaySession, got NoneType"):
        wrap_forward_step(three_lines([]), None)
    with pytest.raises(TypeError, match="forward_step must be a function, got int"):
        wrap_forward_step(3, make_session(build_model()))
