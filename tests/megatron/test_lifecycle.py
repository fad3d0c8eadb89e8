"""One schedule: what begins it, what ends it, and that nothing stays."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.session import ReplayMicrobatch
from tests.megatron.helpers import (
    EXPERTS,
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
    routers_of,
    run_megatron,
    run_schedule,
)

FULL = RECOMPUTE["full uniform"]


def run_by_hand(
    session, model, batches, *, begun=None, forwards=1, wrap=lambda run: run(), training=False
):
    """All forwards, then (``training``) all backwards; fewer or more of each on request."""
    with session.schedule([batch.microbatch for batch in batches]):
        outputs = []
        for i in range(len(batches) if begun is None else begun):
            step = session.begin(model)
            inputs = {**batches[i % len(batches)].inputs, "padding_mask": step.padding_mask}
            for _ in range(forwards):
                outputs.append(wrap(lambda inputs=inputs: model(**inputs)))
        for output in outputs if training else ():
            output.mean().backward()


def non_reentrant(run):
    return checkpoint(run, use_reentrant=False)


def reentrant(run):
    return checkpoint(lambda _: run(), torch.ones(1, requires_grad=True), use_reentrant=True)


# --- nothing stays --------------------------------------------------------------------------------


@pytest.mark.parametrize("own_replay", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_stays_on_the_routers_after_a_schedule(own_replay, training):
    model = build_model(moe_enable_routing_replay=own_replay, **FULL)
    before = replay_objects(model)
    assert all((router is not None) == own_replay for router in before)
    run_schedule(make_session(model), model, [make_batch()], training=training)
    assert_clean(model, before)


def test_nothing_stays_after_an_exception_in_a_forward_step_and_the_next_schedule_works():
    model = build_model(moe_enable_routing_replay=True, **FULL)
    before = replay_objects(model)
    session = make_session(model)
    batches = [make_batch(seed=seed) for seed in range(3)]

    def fail(index, _):
        if index == 1:
            raise RuntimeError("the reward server is gone")

    with pytest.raises(RuntimeError, match="reward server"):
        run_schedule(session, model, batches, before_forward=fail)
    assert_clean(model, before)
    assert not session.report().completed
    with RouteLog() as log:
        run_schedule(session, model, batches)
    assert_replayed(log, model, batches, recomputed=(0, 1, 2))
    assert session.report().completed


def test_nothing_stays_after_an_exception_between_forward_and_recompute():
    model = build_model(**FULL)
    before = replay_objects(model)
    session = make_session(model)
    batch = make_batch()

    def interrupted():
        with session.schedule([batch.microbatch]):
            step = session.begin(model)
            model(**batch.inputs, padding_mask=step.padding_mask)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_clean(model, before)
    run_schedule(session, model, [batch])


def test_a_refused_schedule_leaves_the_routers_alone():
    model = build_model()
    before = replay_objects(model)
    session = make_session(model)
    with (
        pytest.raises(ValueError, match="no routes field"),
        session.schedule([make_batch().microbatch, make_batch(with_routes=False).microbatch]),
    ):
        pytest.fail("the schedule began")
    assert_clean(model, before)


@pytest.mark.parametrize("ends", ["well", "in the step", "at the end"])
def test_no_tensor_of_a_schedule_is_kept_alive(ends):
    """Nor by the traceback of an exception that is being handled."""
    model = build_model(**FULL)
    session = make_session(model)
    batch = make_batch()
    tensors = []

    def run():
        with session.schedule([batch.microbatch]):
            step = session.begin(model)
            opened = routers_of(model)[0].router_replay._open
            tensors.extend(map(weakref.ref, (opened.targets[0], opened.padding_masks[0])))
            del opened
            output = model(**batch.inputs, padding_mask=step.padding_mask).mean()
            del step
            if ends == "in the step":
                del output
                raise ValueError("out of memory")
            if ends == "well":
                output.backward()
            del output

    if ends == "well":
        run()
    else:
        with pytest.raises(ValueError, match=r"out of memory|still holds the routes") as caught:
            run()
        assert caught.value.__traceback__ is not None
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]


def test_the_report_counts_what_ran():
    model = build_model(**FULL)
    session = make_session(model)
    with pytest.raises(ValueError, match="no schedule has ended"):
        session.report()
    batches = [
        make_batch((6, 4), captured=(3, 3), seed=1, live="all"),
        make_batch((5, 2), captured=(4, 1), seed=2),
    ]
    run_schedule(session, model, batches)
    report = session.report()
    assert report.microbatches == 2
    assert report.asked == {
        f"router decoder.layers.{layer}.mlp.router of chunk 0": 2 for layer in range(3)
    }
    assert report.routers == tuple(report.asked)
    assert report.recomputed_calls == 6
    # slots of a layer: 2 x 6, then 2 x 5
    assert (report.rows_replayed, report.rows_live, report.rows_dummy) == (6 + 5, 3 + 1, 2 + 5)
    assert report.completed


# --- one begin for one forward --------------------------------------------------------------------


def test_too_few_microbatches_are_an_error():
    model = build_model()
    session = make_session(model)
    batches = [make_batch(seed=seed) for seed in range(3)]
    with pytest.raises(ValueError, match="chunk 0 began 2 microbatches of 3"):
        run_by_hand(session, model, batches, begun=2)


def test_too_many_microbatches_are_an_error():
    model = build_model()
    session = make_session(model)
    with pytest.raises(
        ValueError, match=r"begun every microbatch of the schedule \(1\), and was asked"
    ):
        run_by_hand(session, model, [make_batch()], begun=2)


@pytest.mark.parametrize("last", [False, True])
def test_a_router_that_was_never_asked_is_an_error_that_names_it(last):
    """A layer that is skipped, or a routing that does not consult replay: silence is the fault."""
    model = build_model()
    session = make_session(model)
    batches = [make_batch(seed=seed) for seed in range(2)]
    router = routers_of(model)[1]
    original = router.routing

    def silent(logits, *args, **options):
        replay, router.router_replay = router.router_replay, None
        try:
            return original(logits, *args, **options)
        finally:
            router.router_replay = replay

    def skip(index, _):
        router.routing = silent if index == int(last) else original

    expected = (
        r"router decoder\.layers\.1\.mlp\.router of chunk 0 was never asked for its routes in"
        rf" microbatch {int(last)}"
    )
    with pytest.raises(ValueError, match=expected):
        run_schedule(session, model, batches, before_forward=skip)


def test_a_forward_without_begin_is_an_error():
    model = build_model()
    session = make_session(model)
    batch = make_batch()
    with (
        pytest.raises(ValueError, match=r"layers\.0\.mlp\.router of chunk 0 ran outside a micro"),
        session.schedule([batch.microbatch]),
    ):
        model(**batch.inputs)


def test_two_forwards_after_one_begin_are_an_error():
    model = build_model()
    session = make_session(model)
    with pytest.raises(ValueError, match="microbatch 0: the router was asked for a second time"):
        run_by_hand(session, model, [make_batch()], forwards=2)


def test_begin_outside_a_schedule_is_an_error():
    model = build_model()
    with pytest.raises(ValueError, match="no schedule is open"):
        make_session(model).begin(model)


def test_begin_with_another_model_is_an_error():
    model, other = build_model(), build_model()
    session = make_session(model)
    with (
        pytest.raises(ValueError, match="GPTModel is no chunk of the session's model"),
        session.schedule([make_batch().microbatch]),
    ):
        session.begin(other)


@pytest.mark.parametrize("attribute", ["module", "policy"])
def test_begin_looks_through_wrappers(attribute):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            setattr(self, attribute, inner)

        def forward(self, **inputs):
            return getattr(self, attribute)(**inputs)

    model = build_model()
    batch = make_batch()
    session = make_session(model)
    wrapped = Wrapper(Wrapper(model))
    with RouteLog() as log, session.schedule([batch.microbatch]):
        step = session.begin(wrapped)
        wrapped(**batch.inputs, padding_mask=step.padding_mask)
    assert_replayed(log, model, [batch])


# --- schedules beside each other ------------------------------------------------------------------


def test_a_second_schedule_of_one_session_is_refused_while_the_first_is_open():
    model = build_model()
    session = make_session(model)
    batch = make_batch()
    with session.schedule([batch.microbatch]):
        with (
            pytest.raises(ValueError, match="a schedule of this session is still open"),
            session.schedule([batch.microbatch]),
        ):
            pytest.fail("the schedule began")
        step = session.begin(model)
        model(**batch.inputs, padding_mask=step.padding_mask)


def test_a_second_session_on_the_same_routers_is_refused_while_the_first_is_open():
    model = build_model()
    first, second = make_session(model), make_session(model)
    batch = make_batch()
    with RouteLog() as log, first.schedule([batch.microbatch]):
        with (
            pytest.raises(ValueError, match="is held by another open schedule"),
            second.schedule([batch.microbatch]),
        ):
            pytest.fail("the schedule began")
        step = first.begin(model)
        model(**batch.inputs, padding_mask=step.padding_mask)
    assert_replayed(log, model, [batch])


def test_a_router_given_twice_is_refused():
    model = build_model()
    with pytest.raises(ValueError, match="of chunk 1 is also router"):
        make_session([model, model])


def test_sessions_of_two_models_may_be_open_together():
    policy, critic = build_model(seed=1), build_model(seed=2)
    sessions = [make_session(policy), make_session(critic)]
    batches = [make_batch(seed=1), make_batch(seed=2)]
    with (
        RouteLog() as log,
        sessions[0].schedule([batches[0].microbatch]),
        sessions[1].schedule([batches[1].microbatch]),
    ):
        for model, session, batch in zip((policy, critic), sessions, batches, strict=True):
            step = session.begin(model)
            model(**batch.inputs, padding_mask=step.padding_mask)
    assert_replayed(log, policy, batches[:1])
    assert_replayed(log, critic, batches[1:])


# --- recompute that does not fit ------------------------------------------------------------------


def gradients_after(model, batches, backward):
    """Gradients of all microbatches' losses, each forward first, then ``backward(losses)``."""
    for parameter in model.parameters():
        parameter.grad = None
    session = make_session(model)
    with session.schedule([batch.microbatch for batch in batches]):
        losses = []
        for batch in batches:
            step = session.begin(model)
            inputs = {**batch.inputs, "labels": None}  # logits: the loss works in place
            output = model(**inputs, padding_mask=step.padding_mask)
            losses.append(output.float().square().mean())
        backward(losses)
    return gradients_of(model)


def backward_in_order(losses):
    for loss in losses:
        loss.backward()


def backward_reversed(losses):
    for loss in reversed(losses):
        loss.backward()


def backward_of_the_sum(losses):
    sum(losses).backward()


@pytest.mark.parametrize("recompute", ["full uniform", "full block", "moe"])
@pytest.mark.parametrize("backward", [backward_in_order, backward_reversed, backward_of_the_sum])
def test_backwards_in_any_order_recompute_their_own_microbatch(recompute, backward):
    batches = [make_batch(seed=seed) for seed in range(3)]  # of equal token counts
    expected = gradients_after(build_model(), batches, backward)
    actual = gradients_after(build_model(**RECOMPUTE[recompute]), batches, backward)
    assert_same_gradients(actual, expected)


def test_a_backward_that_is_left_out_does_not_shift_the_others():
    batches = [make_batch(seed=seed) for seed in range(2)]
    model = build_model(**FULL)
    with pytest.raises(ValueError, match="still holds the routes of microbatch 0 "):
        gradients_after(model, batches, lambda losses: losses[1].backward())
    alone = build_model()
    expected = gradients_after(alone, batches, lambda losses: losses[1].backward())
    assert_same_gradients(gradients_of(model), expected)


def test_a_second_backward_of_one_graph_is_an_error_under_recompute():
    batches = [make_batch(seed=seed) for seed in range(2)]

    def twice(losses):
        losses[0].backward(retain_graph=True)
        losses[0].backward()

    with pytest.raises(ValueError, match="is recomputed twice"):
        gradients_after(build_model(**FULL), batches, twice)


def test_first_passes_of_two_threads_are_refused_under_recompute():
    from concurrent.futures import ThreadPoolExecutor

    batches = [make_batch(seed=seed) for seed in range(2)]
    model = build_model(**FULL)
    session = make_session(model)
    torch.ones(1, requires_grad=True).exp()  # this thread's numbers are ahead of a new one's

    def run():
        with session.schedule([batch.microbatch for batch in batches]):
            step = session.begin(model)
            model(**batches[0].inputs, padding_mask=step.padding_mask)
            step = session.begin(model)
            inputs = {**batches[1].inputs, "padding_mask": step.padding_mask}
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: model(**inputs)).result()

    with pytest.raises(ValueError, match="must run in one thread"):
        run()


def test_a_non_reentrant_checkpoint_is_a_loud_error():
    """Its first pass keeps gradients on, so nothing tells that it will be recomputed."""
    model = build_model()
    batch = make_batch()
    session = make_session(model)
    with pytest.raises(ValueError, match=r"no routes were kept for it.*non-re-entrant"):
        run_by_hand(session, model, [batch], wrap=non_reentrant, training=True)


def test_a_non_reentrant_checkpoint_is_loud_with_several_microbatches_in_flight():
    model = build_model(**RECOMPUTE["full block"])  # layer 0 keeps routes, layers 1 and 2 do not
    batches = [make_batch(seed=seed) for seed in range(3)]
    session = make_session(model)
    with pytest.raises(ValueError, match="is recomputed in a backward, but no routes were kept"):
        run_by_hand(session, model, batches, wrap=non_reentrant, training=True)


def test_torchs_own_reentrant_checkpoint_replays():
    model = build_model()
    batches = [make_batch(seed=seed) for seed in range(2)]
    with RouteLog() as log:
        run_by_hand(make_session(model), model, batches, wrap=reentrant, training=True)
    assert_replayed(log, model, batches, recomputed=(0, 1, 2))


def test_a_forward_only_schedule_that_keeps_gradients_on_is_an_error_under_recompute():
    """Megatron's ``forward_only`` does not turn gradients off: the kept routes would stay."""
    model = build_model(**FULL)
    session = make_session(model)
    batches = [make_batch(seed=seed) for seed in range(2)]

    def forward_step(data, chunk):
        step = session.begin(chunk)
        output = chunk(**next(data).inputs, padding_mask=step.padding_mask)
        return output, lambda values: (values.mean(), {})

    from megatron.core.pipeline_parallel import get_forward_backward_func

    message = r"still holds the routes of microbatch 0 \(2 in all\).*torch\.no_grad"
    with (
        pytest.raises(ValueError, match=message),
        session.schedule([batch.microbatch for batch in batches]),
    ):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=2,
            seq_length=32,
            micro_batch_size=1,
            forward_only=True,
        )


def test_a_backward_outside_the_schedule_is_an_error():
    """The recompute would take the router's own choice, silently."""
    model = build_model(**FULL)
    session = make_session(model)
    batch = make_batch()
    with pytest.raises(ValueError, match="every backward inside the schedule"):
        run_by_hand(session, model, [batch])


def test_a_schedule_without_routes_runs_live_in_both_passes():
    model = build_model(**FULL)
    batches = [make_batch(with_routes=False)]
    session = make_session(model)
    with RouteLog() as log:
        run_schedule(session, model, batches)
    with RouteLog() as free:
        inputs = batches[0].inputs

        def forward_step(data, chunk):
            next(data)
            return chunk(**inputs), lambda values: (values.mean(), {})

        run_megatron(forward_step, model, batches, True)
    assert [call.rows for call in log.calls] == [call.rows for call in free.calls]
    assert session.report().rows_live == 10


def test_all_routes_empty_is_legal_where_nothing_is_trained():
    """Trajectories that equalise the ranks: one token each, no rows, all masked."""
    model = build_model(**FULL)
    batches = [make_batch((1, 1, 1), captured=(0, 0, 0), seed=seed) for seed in range(2)]
    with RouteLog() as log:
        ran = run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches, recomputed=(0, 1, 2))
    assert all(mask.all() for mask in ran.masks)


def test_one_microbatch_without_rows_among_others_is_legal():
    model = build_model(**FULL)
    batches = [make_batch((6, 4)), make_batch((1, 1), captured=(0, 0))]
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches, recomputed=(0, 1, 2))


def test_a_trajectory_without_tokens_is_legal():
    model = build_model()
    batches = [make_batch((3, 0, 5), captured=(2, 0, 4))]
    with RouteLog() as log:
        run_schedule(make_session(model), model, batches)
    assert_replayed(log, model, batches)


def test_the_same_microbatch_may_be_scheduled_again():
    model = build_model()
    session = make_session(model)
    batch = make_batch()
    for batches in ([batch, batch], [batch]):
        with RouteLog() as log:
            run_schedule(session, model, batches)
        assert_replayed(log, model, batches)


def test_content_is_checked_once():
    from unittest import mock

    model = build_model()
    session = make_session(model)
    batch = make_batch()
    with mock.patch.object(
        ReplayMicrobatch, "_check_layer", autospec=True, side_effect=ReplayMicrobatch._check_layer
    ) as check:
        run_schedule(session, model, [batch])
        run_schedule(session, model, [batch], training=False)
    assert check.call_count == 3  # layers


def test_only_this_models_layers_are_checked_and_replayed():
    """A dense layer holds zeros, which would repeat an expert."""
    model = build_model(moe_layer_freq=[0, 1, 1])
    batch = make_batch(dense_layers=[0])
    assert isinstance(batch.microbatch.routes, PackedTensor)
    assert not batch.microbatch.routes.values[:, 0].any()
    with RouteLog() as log:
        run_schedule(make_session(model), model, [batch])
    assert_replayed(log, model, [batch], positions=(1, 2))
    assert EXPERTS > 2
