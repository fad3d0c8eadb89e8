"""Sampled schedules: figures against counts by hand, from the routers' inputs; no read, no cost."""

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.replay import session as session_module
from packhorse.replay import targets as targets_module
from packhorse.replay.metrics import merge_tallies, tally_metrics
from packhorse.replay.sampling import plot_route_mismatch
from packhorse.replay.targets import RouterTargets
from tests.megatron.helpers import (
    EXPERTS,
    RECOMPUTE,
    TOPK,
    assert_same_gradients,
    build_model,
    gradients_of,
    keep_layers,
    make_batch,
    make_session,
    routers_of,
    run_schedule,
)

LIVE = {"lengths": (6, 5), "captured": (5, 0), "missing": [False, True], "loss_masks": None}


class Choices:
    """Each router's own choice in every first pass, computed from its input in NumPy."""

    def __init__(self, *models):
        self.of = {}
        self._hooks = [
            router.register_forward_pre_hook(self._keep)
            for model in models
            for router in routers_of(model)
        ]

    def _keep(self, router, inputs):
        if torch._C._current_graph_task_id() != -1:
            return  # a recompute
        rows = inputs[0].detach().double().cpu().numpy().reshape(-1, inputs[0].shape[-1])
        logits = rows @ router.weight.detach().double().cpu().numpy().T
        chosen = np.argsort(-(1 / (1 + np.exp(-logits))), axis=1)[:, :TOPK]
        self.of.setdefault(router, []).append([set(row) for row in chosen.tolist()])

    def remove(self):
        for hook in self._hooks:
            hook.remove()


def count_by_hand(choices, model, batches, positions):
    """position -> rows, rows that differ, assignments that differ."""
    counts = {}
    for router, position in zip(routers_of(model), positions, strict=True):
        rows = differing = missed = 0
        for chosen, batch in zip(choices.of[router], batches, strict=True):
            for own, wanted in zip(chosen, batch.rows(position), strict=True):
                if isinstance(wanted, list):
                    rows += 1
                    differing += own != set(wanted)
                    missed += len(set(wanted) - own)
        counts[position] = (rows, differing, missed)
    return counts


def replay_own_choice(model, batch, share, seed=0):
    """Write the model's own choice into the routes, but for a ``share`` of the rows."""
    choices = Choices(model)
    empty = make_batch(batch.microbatch.layout.lengths, with_routes=False)
    run_schedule(make_session(model), model, [empty], training=False)
    choices.remove()
    generator = np.random.default_rng(seed)
    values, start = batch.microbatch.routes.values, 0
    width = len(batch.microbatch.layout.lengths)
    for i, captured in enumerate(batch.microbatch.captured):
        for s, layer in np.ndindex(captured, 3):
            own = sorted(choices.of[routers_of(model)[layer]][0][s * width + i])
            if generator.random() < share:
                own[0] = next(e for e in range(EXPERTS) if e not in own)
            values[start + s, layer] = torch.tensor(own).to(values.dtype)
            batch.routes[i][s, layer] = own
        start += captured


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_the_mismatch_is_that_of_a_count_by_hand(mode, training):
    """A recomputed call is not counted twice; live rows are no replayed ones."""
    model = build_model(**RECOMPUTE[mode])
    batches = [make_batch(seed=0), make_batch(seed=1, **LIVE), make_batch((7, 3), seed=2)]
    session = make_session(model, sample_routes_every=1)
    choices = Choices(model)
    run_schedule(session, model, batches, training=training)
    choices.remove()
    counts = count_by_hand(choices, model, batches, (0, 1, 2))
    figures = session.metrics()
    shares = [differing / rows for rows, differing, _ in counts.values()]
    assert figures["routes/row_mismatch_per_layer"].tolist() == pytest.approx(shares)
    total = np.sum(list(counts.values()), axis=0)
    assert figures["routes/row_mismatch"].item() == pytest.approx(total[1] / total[0])
    assert figures["routes/assignment_mismatch"].item() == pytest.approx(
        total[2] / (total[0] * TOPK)
    )
    assert total[0] == 3 * (8 + 5 + 8)
    assert 0 < total[1] < total[0]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_router_that_was_not_moved_agrees_with_what_it_chose(share):
    model = build_model(moe_router_enable_expert_bias=False)
    batch = make_batch((9, 8))
    replay_own_choice(model, batch, share)
    session = make_session(model, sample_routes_every=1)
    choices = Choices(model)
    run_schedule(session, model, [batch])
    choices.remove()
    figures = session.metrics()
    counts = count_by_hand(choices, model, [batch], (0, 1, 2))
    shares = [differing / rows for rows, differing, _ in counts.values()]
    assert figures["routes/row_mismatch_per_layer"].tolist() == pytest.approx(shares)
    if not share:
        assert figures["routes/row_mismatch"].item() == 0
    else:  # the later layers see other hidden states; the first sees the same
        assert 0 < shares[0] < 0.8


def test_padding_and_coverage_are_those_of_a_count_by_hand():
    model = build_model()
    batches = [make_batch((6, 4), dummy="spread"), make_batch((5, 2), seed=1)]
    session = make_session(model, sample_routes_every=1)
    run_schedule(session, model, batches)
    tally, figures = session.tally(), session.metrics()
    dummies = sum(batch.rows(0).count("dummy") for batch in batches)
    assert tally["padding/per_ep_rank"].tolist() == [[dummies * TOPK]] * 3
    assert figures["padding/assignments"].item() == 3 * dummies * TOPK
    assert figures["padding/load"].item() == 1
    kinds = Counter(
        row if isinstance(row, str) else "replayed" for batch in batches for row in batch.rows(0)
    )
    assert figures["rows/replayed_share"] == kinds["replayed"] / kinds.total()
    assert figures["rows/dummy_share"] == kinds["dummy"] / kinds.total()
    assert figures["coverage/captured_share"] == (5 + 3 + 4 + 1) / (6 + 4 + 5 + 2)


def test_the_padding_of_each_expert_parallel_rank(monkeypatch):
    """Constant dummies go to the first rank; the rank's own share, not yet that of the group."""
    model = build_model()
    batch = make_batch((6, 4))
    session = make_session(model, sample_routes_every=1)
    monkeypatch.setattr(model.config, "expert_model_parallel_size", 4)
    run_schedule(session, model, [batch], training=False)
    dummies = batch.rows(0).count("dummy")
    assert session.tally()["padding/per_ep_rank"].tolist() == [[dummies * TOPK, 0, 0, 0]] * 3
    assert session.metrics()["padding/load"].item() == 4


def test_every_second_schedule_with_routes_is_sampled_and_the_first_is():
    model = build_model()
    session = make_session(model, sample_routes_every=2)
    sampled = []
    for with_routes in (True, False, True, True, False, True):
        run_schedule(session, model, [make_batch(with_routes=with_routes)], training=False)
        sampled.append("routes/row_mismatch" in session.metrics())
        assert "rows/replayed_share" in session.metrics()
    assert sampled == [True, False, False, True, False, False]


@pytest.mark.parametrize("every", [2, 3])
def test_forward_only_and_training_schedules_are_counted_apart(every):
    """One of each a step: an even interval would otherwise sample one kind only."""
    model = build_model()
    session = make_session(model, sample_routes_every=every)
    sampled = {False: [], True: []}
    for step in range(4):
        for training in (False, True):
            with contextlib.nullcontext() if training else torch.no_grad():
                run_schedule(session, model, [make_batch(seed=step)], training=training)
            sampled[training].append("routes/row_mismatch" in session.metrics())
    wanted = [step % every == 0 for step in range(4)]
    assert sampled == {False: wanted, True: wanted}


def test_a_schedule_that_was_refused_uses_up_no_sample():
    model = build_model()
    session = make_session(model, sample_routes_every=2)
    bad = make_batch()
    bad.microbatch.routes.values[0, 0, :] = 1
    without_rows = make_batch((6, 4), (0, 0), missing=[True, True], loss_masks=None)
    for batch in (bad, without_rows):
        with pytest.raises(ValueError, match=r"repeat|no trajectory has any route row"):
            run_schedule(session, model, [batch], training=False)
    run_schedule(session, model, [make_batch()], training=False)
    assert "routes/row_mismatch" in session.metrics()


def test_a_schedule_that_is_not_sampled_chooses_nothing(monkeypatch):
    model = build_model()
    session = make_session(model, sample_routes_every=2)
    calls = Counter()
    topk, tally = torch.topk, targets_module.tally_routes
    monkeypatch.setattr(torch, "topk", lambda *a, **k: calls.update(["topk"]) or topk(*a, **k))
    monkeypatch.setattr(
        targets_module, "tally_routes", lambda *a: calls.update(["tally"]) or tally(*a)
    )
    batches = [make_batch(), make_batch(seed=1)]
    run_schedule(session, model, batches)
    assert calls == {"topk": 6, "tally": 6}
    run_schedule(session, model, batches)
    assert calls == {"topk": 6, "tally": 6}


@pytest.mark.parametrize("mode", ["none", "full uniform"])
def test_sampling_changes_no_loss_and_no_gradient(mode):
    results = []
    for every in (0, 1):
        model = build_model(**RECOMPUTE[mode])
        session = make_session(model, sample_routes_every=every)
        ran = run_schedule(session, model, [make_batch(), make_batch(seed=1, **LIVE)])
        results.append((ran.losses, gradients_of(model)))
    assert results[0][0] == results[1][0]
    assert_same_gradients(results[0][1], results[1][1])


def test_two_chunks_lie_on_one_axis():
    first = build_model(seed=1, **RECOMPUTE["full uniform"])
    second = build_model(seed=2, num_layers=6, **RECOMPUTE["full uniform"])
    keep_layers(second, slice(4, 6))
    first.config.num_layers = second.config.num_layers
    session = make_session([first, second], num_layers=6, sample_routes_every=1)
    batches = [make_batch((6, 4), num_layers=6, seed=seed) for seed in range(2)]
    choices = Choices(first, second)
    outputs = {}
    with session.schedule([batch.microbatch for batch in batches]):
        for chunk, model, i in ((0, first, 0), (0, first, 1), (1, second, 0), (1, second, 1)):
            step = session.begin(model)
            outputs[chunk, i] = model(**batches[i].inputs, padding_mask=step.padding_mask).mean()
        for key in ((1, 0), (0, 0), (1, 1), (0, 1)):
            outputs[key].backward()
    choices.remove()
    counts = count_by_hand(choices, first, batches, (0, 1, 2))
    counts |= count_by_hand(choices, second, batches, (4, 5))
    tally = session.tally()
    for part, column in (("rows", 0), ("rows_differing", 1), ("assignments_differing", 2)):
        wanted = [counts[position][column] if position != 3 else 0 for position in range(6)]
        assert tally[f"routes/{part}"].tolist() == wanted
    assert (tally["padding/per_ep_rank"].flatten() > 0).tolist() == [True] * 3 + [False] + [
        True
    ] * 2
    assert session.metrics()["routes/row_mismatch_per_layer"][3] == 0


def test_tallies_of_several_schedules_merge_exactly():
    model = build_model()
    session = make_session(model, sample_routes_every=2)
    tallies = []
    batches = [make_batch(seed=seed) for seed in range(3)]
    for batch in batches:
        run_schedule(session, model, [batch], training=False)
        tallies.append(session.tally())
    merged = tally_metrics(merge_tallies(tallies))
    joined = make_session(model, sample_routes_every=1)
    run_schedule(joined, model, [batches[0], batches[2]], training=False)
    name = "routes/row_mismatch_per_layer"
    assert merged[name].tolist() == joined.metrics()[name].tolist()
    assert merged["rows/replayed"] == 3 * 8


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.equal.default,
        ):
            raise AssertionError(f"{function} reads the device")
        return function(*args, **(kwargs or {}))


def test_nothing_of_a_sampled_schedule_is_read(monkeypatch, no_host_sync):
    """Megatron itself reads (its dispatcher's split sizes); what is ours runs under a guard."""

    def guarded(function):
        def call(*args, **options):
            with contextlib.ExitStack() as stack:
                stack.enter_context(_NoReads())
                stack.enter_context(no_host_sync())
                return function(*args, **options)

        return call

    monkeypatch.setattr(RouterTargets, "get_replay_topk", guarded(RouterTargets.get_replay_topk))
    monkeypatch.setattr(
        session_module._Schedule, "counts", guarded(session_module._Schedule.counts)
    )
    monkeypatch.setattr(
        session_module.RouteSample, "add_padding", guarded(session_module.RouteSample.add_padding)
    )
    model = build_model(**RECOMPUTE["moe"])
    session = make_session(model, sample_routes_every=1)
    monkeypatch.setattr(session, "metrics", guarded(session.metrics))
    monkeypatch.setattr(session, "tally", guarded(session.tally))
    run_schedule(session, model, [make_batch(), make_batch(seed=1, **LIVE)])
    figures, tally = session.metrics(), session.tally()
    assert tally["routes/rows"].device == figures["routes/row_mismatch"].device
    assert figures["routes/row_mismatch"].device.type == make_batch().microbatch.layout.device.type


def test_figures_of_no_schedule_and_of_a_failed_one_are_errors():
    model = build_model()
    session = make_session(model, sample_routes_every=1)
    for method in (session.metrics, session.tally):
        said = rf"ReplaySession\.{method.__name__}: no schedule has completed yet"
        with pytest.raises(ValueError, match=said):
            method()

    def fail(*_):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        run_schedule(session, model, [make_batch()], before_forward=fail)
    with pytest.raises(ValueError, match="no schedule has completed yet"):
        session.tally()


@pytest.mark.parametrize("every", [-1, 1.5, True, "2"])
def test_an_interval_that_is_no_count_is_refused(every):
    with pytest.raises(ValueError, match="sample_routes_every must be an integer >= 0, got"):
        make_session(build_model(), sample_routes_every=every)


def test_the_picture_shows_each_layer(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    plot_route_mismatch(axes, {"routes/row_mismatch_per_layer": shares}, label="step 0")
    plot_route_mismatch(axes, {"routes/row_mismatch_per_layer": shares / 2}, label="step 8")
    assert axes.lines[0].get_ydata().tolist() == [0, 25, 50]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["step 0", "step 8"]
    figure.savefig(tmp_path / "mismatch.png")
    assert (tmp_path / "mismatch.png").stat().st_size > 2000
    with pytest.raises(ValueError, match="plot_route_mismatch: figures has no routes/row_mis"):
        plot_route_mismatch(axes, {"rows/replayed": 3})
