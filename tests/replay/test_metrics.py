"""The per-step figures against NumPy and loops; merged microbatches say what a joined one says."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse.kernels.routes import gather_routes
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from packhorse.replay.metrics import (
    merge_tallies,
    tally_logprobs,
    tally_metrics,
    tally_padding,
    tally_routes,
    tally_rows,
)
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.routers import spread_offset


def read(figures):
    """Tensors as host numbers or lists."""
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in figures.items()}


# --- logprobs -------------------------------------------------------------------------------------


def make_logprobs(count, *, seed=0, scale=0.3, dtype=torch.float32, device="cpu"):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(2.0, count)
    trainer = rollout + rng.standard_t(2, count) * scale
    mask = rng.random(count) < 0.7
    made = [torch.tensor(a).to(device, dtype) for a in (trainer, rollout)]
    return *made, torch.tensor(mask, device=device)


def expected_logprob_figures(logprobs, rollout, mask):
    """By NumPy, all tokens of all microbatches at once; the p99 is left out."""
    a, b, kept = (np.asarray(t.cpu().double().numpy()) for t in (logprobs, rollout, mask))
    d = (a - b)[kept != 0]
    if not d.size:
        names = "tokens nonfinite abs_diff_mean abs_diff_max k1 k3 ratio_mean"
        return dict.fromkeys(names.split(), 0) | dict.fromkeys(TAILS, 0)
    ratio = np.exp(d)
    return {
        "tokens": d.size,
        "nonfinite": 0,
        "abs_diff_mean": np.abs(d).mean(),
        "abs_diff_max": np.abs(d).max(),
        "k1": -d.mean(),
        "k3": (ratio - 1 - d).mean(),
        "ratio_mean": ratio.mean(),
        "ratio_above_2": (ratio > 2).mean(),
        "ratio_above_5": (ratio > 5).mean(),
        "ratio_below_1_2": (ratio < 1 / 2).mean(),
        "ratio_below_1_5": (ratio < 1 / 5).mean(),
    }


TAILS = ("ratio_above_2", "ratio_above_5", "ratio_below_1_2", "ratio_below_1_5")


def p99_of(d):
    """The smallest value that 99 % of the tokens do not exceed."""
    ordered = np.sort(np.abs(d))
    return float(ordered[-(-99 * len(ordered) // 100) - 1]) if len(ordered) else 0.0


def check_logprob_figures(figures, logprobs, rollout, mask):
    figures = read(figures)
    for key, value in expected_logprob_figures(logprobs, rollout, mask).items():
        assert figures.pop(f"logprobs/{key}") == pytest.approx(value, rel=1e-12, abs=1e-15), key
    d = (logprobs.double() - rollout.double())[mask != 0].cpu().numpy()
    exact, p99 = p99_of(d), figures.pop("logprobs/abs_diff_p99")
    assert exact * (1 - 1e-15) <= p99 <= max(exact * 1.016, 2.0**-32)
    assert not figures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-9, 1e-4, 0.3, 3.0])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_logprob_figures_are_numpys(count, scale, dtype, device):
    made = make_logprobs(count, scale=scale, dtype=dtype, device=device)
    check_logprob_figures(tally_metrics(tally_logprobs(*made)), *made)


def test_figures_by_hand():
    rollout = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    logprobs = rollout + torch.tensor([0.0, 1.0, -2.0, 9.0])
    tally = tally_logprobs(logprobs, rollout, torch.tensor([1, 1, 1, 0]))
    figures = read(tally_metrics(tally))
    assert figures == {
        "logprobs/tokens": 3,
        "logprobs/nonfinite": 0,
        "logprobs/abs_diff_mean": 1.0,
        "logprobs/abs_diff_p99": 2.0,
        "logprobs/abs_diff_max": 2.0,
        "logprobs/k1": pytest.approx(1 / 3),
        "logprobs/k3": pytest.approx((math.e - 2 + math.exp(-2) + 1) / 3),
        "logprobs/ratio_mean": pytest.approx((1 + math.e + math.exp(-2)) / 3),
        "logprobs/ratio_above_2": pytest.approx(1 / 3),
        "logprobs/ratio_above_5": 0.0,
        "logprobs/ratio_below_1_2": pytest.approx(1 / 3),
        "logprobs/ratio_below_1_5": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_masked_reaches_no_figure(value, mask_dtype, device):
    logprobs, rollout, mask = make_logprobs(200, device=device)
    expected = read(tally_metrics(tally_logprobs(logprobs, rollout, mask)))
    mask = mask.to(mask_dtype)
    for left, right in ((value, 0.0), (0.0, value), (value, value), (value, -value)):
        garbled = [
            torch.where(mask != 0, values, filled)
            for values, filled in ((logprobs, left), (rollout, right))
        ]
        assert read(tally_metrics(tally_logprobs(*garbled, mask))) == expected


@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_batch_without_a_counted_token_has_figures_of_zero(count, device):
    logprobs, rollout, mask = make_logprobs(count, device=device)
    logprobs = logprobs.fill_(math.nan)
    figures = read(tally_metrics(tally_logprobs(logprobs, rollout, torch.zeros_like(mask))))
    assert set(figures.values()) == {0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_counted_nan_or_inf_is_not_hidden(value):
    logprobs, rollout, mask = make_logprobs(200)
    logprobs[3], mask[3] = value, True
    figures = read(tally_metrics(tally_logprobs(logprobs, rollout, mask)))
    assert figures["logprobs/nonfinite"] == 1
    for key in ("abs_diff_mean", "abs_diff_max", "k1", "k3"):
        assert not math.isfinite(figures[f"logprobs/{key}"])
    assert math.isfinite(figures["logprobs/abs_diff_p99"])  # 1 of 140 tokens is beyond it
    only = read(tally_metrics(tally_logprobs(logprobs[3:4], rollout[3:4], mask[3:4])))
    assert str(only["logprobs/abs_diff_p99"]) == str(abs(value))


@pytest.mark.parametrize("size", [0.0, 2.0**-40, 2.0**-32, 1e-3, 1.0, 2.0**15.99, 2.0**16, 1e30])
def test_p99_over_the_whole_range_of_a_float(size):
    rollout = torch.zeros(1000, dtype=torch.float64)
    logprobs = torch.full_like(rollout, -size)
    logprobs[0] = -2 * size
    tally = tally_logprobs(logprobs, rollout, torch.ones(1000, dtype=torch.bool))
    p99 = float(tally_metrics(tally)["logprobs/abs_diff_p99"])
    if size >= 2.0**16:
        assert p99 == 2 * size  # the maximum, beyond the bins
    else:
        assert size <= p99 <= max(size * 1.016, min(2 * size, 2.0**-32))


@pytest.mark.parametrize("count", [1, 99, 100, 101, 199, 200, 201])
def test_p99_leaves_out_one_percent_and_no_more(count):
    """All |d| are 1, the largest ``left_out`` are 4."""
    for left_out in range(4):
        logprobs = torch.ones(count)
        logprobs[: min(left_out, count)] = 4.0
        mask = torch.ones(count, dtype=torch.bool)
        p99 = float(tally_metrics(tally_logprobs(logprobs, torch.zeros(count), mask))[
            "logprobs/abs_diff_p99"
        ])  # fmt: skip
        assert (p99 > 2) == (100 * min(left_out, count) > count), (left_out, p99)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    masked=st.booleans(),
    seed=st.integers(0, 999),
    order=st.randoms(use_true_random=False),
)
def test_merged_microbatches_say_what_the_joined_batch_says(sizes, masked, seed, order):
    parts = [make_logprobs(size, seed=seed + i, scale=0.5**i) for i, size in enumerate(sizes)]
    if masked:
        parts[0][2].zero_()
    joined = [torch.cat(fields) for fields in zip(*parts, strict=True)]
    tallies = [tally_logprobs(*part) for part in parts]
    order.shuffle(tallies)
    split = order.randrange(len(tallies)) if len(tallies) > 1 else 0
    merged = merge_tallies([merge_tallies(tallies[:split]), *tallies[split:]] if split else tallies)
    whole = tally_logprobs(*joined)
    for key, value in whole.items():
        if value.dtype == torch.int64 or key.endswith("_max"):
            assert torch.equal(merged[key], value), key
        else:
            torch.testing.assert_close(merged[key], value, rtol=1e-13, atol=1e-13)
    assert torch.equal(
        tally_metrics(merged)["logprobs/abs_diff_p99"],
        tally_metrics(whole)["logprobs/abs_diff_p99"],
    )
    check_logprob_figures(tally_metrics(merged), *joined)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 2.0**-20), (torch.float64, 2.0**-26)], ids=str
)
def test_a_million_tiny_differences_keep_their_means(dtype, size):
    """All d are exactly ``size``; float32 sums, or exp(d) - 1, would lose the means."""
    rollout = torch.full((1_000_000,), -8.0, dtype=dtype)
    tally = tally_logprobs(rollout + size, rollout, torch.ones(1_000_000, dtype=torch.bool))
    figures = tally_metrics(tally)
    assert float(figures["logprobs/abs_diff_mean"]) == size
    assert float(figures["logprobs/k3"]) == pytest.approx(size**2 / 2, rel=1e-6)


def test_gradients_are_not_followed():
    logprobs, rollout, mask = make_logprobs(9)
    tally = tally_logprobs(logprobs.requires_grad_(), rollout, mask)
    assert not any(value.requires_grad for value in tally.values())


# --- routes ---------------------------------------------------------------------------------------


def make_ids(num_layers, num_rows, topk, num_experts, seed):
    rng = np.random.default_rng(seed)
    return rng.random((num_layers, num_rows, num_experts)).argsort(-1)[..., :topk]


def expected_route_figures(live, replayed, mask):
    """By sets, row by row: {layer: (rows, rows differing, ids missed)}."""
    counts = []
    for layer_live, layer_replayed in zip(live.tolist(), replayed.tolist(), strict=True):
        rows = [
            (set(a), set(b))
            for a, b, kept in zip(layer_live, layer_replayed, mask.tolist(), strict=True)
            if kept
        ]
        counts.append((len(rows), sum(a != b for a, b in rows), sum(len(b - a) for a, b in rows)))
    return counts


def check_route_figures(figures, counts, topk):
    figures = read(figures)
    rows, differing, missed = (list(column) for column in zip(*counts, strict=True))
    expected = {
        "routes/row_mismatch": sum(differing) / max(sum(rows), 1),
        "routes/row_mismatch_per_layer": [
            d / max(r, 1) for d, r in zip(differing, rows, strict=True)
        ],
        "routes/assignment_mismatch": sum(missed) / max(sum(rows) * topk, 1),
        "routes/assignment_mismatch_per_layer": [
            m / max(r * topk, 1) for m, r in zip(missed, rows, strict=True)
        ],
    }
    assert figures == {key: pytest.approx(value) for key, value in expected.items()}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("topk", [1, 2, 6])
def test_route_mismatch_compares_sets(topk, dtype, device):
    live, replayed = make_ids(3, 50, topk, 8, 0), make_ids(3, 50, topk, 8, 1)
    replayed[:, :20] = live[:, :20, ::-1]  # the same experts in another order
    mask = np.random.default_rng(2).random(50) < 0.6
    tally = tally_routes(
        torch.tensor(live.copy()).to(device, dtype),
        torch.tensor(replayed.copy()).to(device, dtype),
        torch.tensor(mask, device=device),
    )
    check_route_figures(tally_metrics(tally), expected_route_figures(live, replayed, mask), topk)


def test_rows_of_a_known_mismatch():
    live = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    replayed = torch.tensor([[1, 0], [3, 4], [6, 7], [-1, 99]])  # same, one of two, none, masked
    figures = read(tally_metrics(tally_routes(live, replayed, torch.tensor([1, 1, 1, 0]).bool())))
    assert figures["routes/row_mismatch"] == pytest.approx(2 / 3)
    assert figures["routes/assignment_mismatch"] == pytest.approx(3 / 6)


def test_a_repeated_expert_makes_another_set_either_way_round():
    twice, both = torch.tensor([[1, 1]]), torch.tensor([[1, 2]])
    for live, replayed in ((twice, both), (both, twice)):
        tally = tally_routes(live, replayed, torch.ones(1, dtype=torch.bool))
        assert int(tally["routes/rows_differing"]) == 1


@pytest.mark.parametrize("num_rows", [0, 4])
def test_no_compared_row_is_a_mismatch_of_zero(num_rows, device):
    ids = torch.zeros(2, num_rows, 3, dtype=torch.int32, device=device)
    tally = tally_routes(ids, ids + 1, torch.zeros(num_rows, dtype=torch.bool, device=device))
    figures = read(tally_metrics(tally))
    assert figures["routes/row_mismatch"] == 0
    assert figures["routes/row_mismatch_per_layer"] == [0, 0]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_merged_route_tallies_are_exact(sizes, seed):
    live = [make_ids(2, size, 2, 4, seed + i) for i, size in enumerate(sizes)]
    replayed = [make_ids(2, size, 2, 4, seed + 50 + i) for i, size in enumerate(sizes)]
    masks = [np.random.default_rng(seed + i).random(size) < 0.6 for i, size in enumerate(sizes)]
    merged = merge_tallies(
        tally_routes(*map(torch.tensor, part)) for part in zip(live, replayed, masks, strict=True)
    )
    counts = expected_route_figures(
        np.concatenate(live, 1), np.concatenate(replayed, 1), np.concatenate(masks)
    )
    check_route_figures(tally_metrics(merged), counts, 2)


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_padding_load_matches_a_loop(ep_size, device):
    ids = make_ids(3, 40, 2, 8, 0)
    mask = np.random.default_rng(1).random(40) < 0.5
    tally = tally_padding(
        torch.tensor(ids.copy()).to(device, torch.int16),
        torch.tensor(mask, device=device),
        num_experts=8,
        ep_size=ep_size,
    )
    expected = [[0] * ep_size for _ in range(3)]
    for layer in range(3):
        for row in np.flatnonzero(mask):
            for expert in ids[layer, row]:
                expected[layer][expert // (8 // ep_size)] += 1
    assert tally["padding/per_ep_rank"].tolist() == expected
    figures = read(tally_metrics(tally))
    total = np.sum(expected, axis=0)
    assert figures["padding/assignments"] == int(mask.sum()) * 2 * 3
    assert figures["padding/load"] == pytest.approx(total.max() / total.mean())
    loads = [max(layer) / np.mean(layer) for layer in expected]
    assert figures["padding/load_per_layer"] == pytest.approx(loads)


def test_rows_that_are_no_padding_and_ids_that_are_no_expert_are_not_counted():
    ids = torch.tensor([[0, 1], [2, 3], [-1, 4], [99, 0]])
    tally = tally_padding(ids, torch.tensor([0, 1, 1, 0]).bool(), num_experts=4, ep_size=2)
    assert tally["padding/per_ep_rank"].tolist() == [[0, 2]]


@pytest.mark.parametrize("num_rows", [0, 5])
def test_no_padding_is_a_load_of_zero(num_rows, device):
    ids = torch.zeros(num_rows, 2, dtype=torch.uint8, device=device)
    mask = torch.zeros(num_rows, dtype=torch.bool, device=device)
    tally = tally_padding(ids, mask, num_experts=4, ep_size=2)
    assert read(tally_metrics(tally)) == {
        "padding/assignments": 0,
        "padding/load": 0,
        "padding/load_per_layer": [0],
    }


def padded_rows(num_rows, num_padding, dummy, *, offset=0):
    """Padding load tally of E = 256, EP = 64, K = 8; the padding is scattered among the rows."""
    rng = np.random.default_rng(num_rows + offset)
    row_ids = np.arange(num_rows)
    row_ids[rng.permutation(num_rows)[:num_padding]] = -1
    routes = make_ids(num_rows, 2, 8, 256, offset)
    topk_ids, mask = gather_routes(
        torch.tensor(routes.astype(np.uint8)),
        torch.tensor(row_ids),
        range(2),
        num_experts=256,
        dummy=dummy,
        ep_size=64,
        spread_offset=offset,
    )
    assert int(mask.sum()) == num_padding
    assert (np.diff(np.sort(topk_ids.numpy(), -1)) > 0).all()
    return tally_padding(topk_ids, mask, num_experts=256, ep_size=64)


@pytest.mark.parametrize("num_rows", [1000, 2048])
def test_spread_padding_of_90_percent_loads_64_ranks_evenly_and_constant_padding_two(num_rows):
    figures = tally_metrics(padded_rows(num_rows, num_rows * 9 // 10, "spread"))
    assert max(read(figures)["padding/load_per_layer"]) <= 1.05
    figures = tally_metrics(padded_rows(num_rows, num_rows * 9 // 10, "constant"))
    assert read(figures)["padding/load_per_layer"] == [32, 32]


@pytest.mark.parametrize("tp_size", [1, 4])
def test_three_pads_on_each_of_64_ranks_are_even_with_the_ranks_own_offsets(tp_size, monkeypatch):
    """As many pads as an alignment leaves; without offsets all ranks load the same 24."""
    layouts = [
        TokenLayout.build([8], format="thd", tp_size=tp_size, tp_rank=rank, sequence_parallel=True)
        if tp_size > 1
        else TokenLayout.build([8], format="thd")
        for rank in range(tp_size)
    ]
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_rank=lambda with_context_parallel: data_rank,
    )
    core = SimpleNamespace(parallel_state=state)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    offsets = []
    for data_rank in range(64 // tp_size):  # noqa: B007  (read by state)
        offsets += [spread_offset(layout, 8) for layout in layouts]
    tallies = [padded_rows(10, 3, "spread", offset=offset) for offset in offsets]
    assert max(read(tally_metrics(merge_tallies(tallies)))["padding/load_per_layer"]) <= 1.1
    tallies = [padded_rows(10, 3, "spread") for _ in range(64)]
    assert float(tally_metrics(merge_tallies(tallies))["padding/load"]) > 2.5


# --- rows and coverage ----------------------------------------------------------------------------


def make_microbatch(lengths, captured, **options):
    values = torch.arange(2).repeat(sum(captured), 3, 1).to(torch.uint8)
    layout = TokenLayout.build(list(lengths), format="thd")
    return ReplayMicrobatch(layout, PackedTensor.from_lengths(values, list(captured)), **options)


def test_rows_and_coverage_by_hand():
    one = make_microbatch([6, 4], [5, 3])
    other = make_microbatch([8, 2], [4, 0], missing=[False, True], live="all", loss_masks=[
        np.arange(8) == 2, None
    ])  # fmt: skip
    figures = tally_metrics(merge_tallies([tally_rows(one), tally_rows(other)]))
    slots = one.layout.num_tokens + other.layout.num_tokens
    dummy = slots - 12 - 6
    assert figures == {
        "rows/replayed": 12,
        "rows/live": 6,
        "rows/dummy": dummy,
        "rows/replayed_share": pytest.approx(12 / slots),
        "rows/live_share": pytest.approx(6 / slots),
        "rows/dummy_share": pytest.approx(dummy / slots),
        "coverage/captured_share": pytest.approx(12 / 20),
        "coverage/missing_share": pytest.approx(1 / 4),
        "coverage/uncovered_max": 4,
    }


# --- all of it ------------------------------------------------------------------------------------


def all_tallies(logprobs, rollout, mask, live, replayed, row_mask):
    return {
        **tally_logprobs(logprobs, rollout, mask),
        **tally_routes(live, replayed, row_mask),
        **tally_padding(replayed, ~row_mask, num_experts=8, ep_size=4),
    }


def make_inputs(num_tokens, device="cpu"):
    ids = [torch.tensor(make_ids(2, num_tokens, 2, 8, seed)).to(device) for seed in (0, 1)]
    row_mask = torch.tensor(np.arange(num_tokens) % 3 > 0, device=device)
    return *make_logprobs(num_tokens, device=device), *ids, row_mask


def step(*inputs):
    tally = all_tallies(*inputs)
    return tally_metrics(merge_tallies([tally, tally]))


def test_nothing_is_read_from_a_device(device, no_host_sync):
    inputs = make_inputs(40, device)
    with no_host_sync():
        step(*inputs)
    on_meta = step(*(tensor.to("meta") for tensor in inputs))
    assert all(value.device.type == "meta" for value in on_meta.values())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_whole_step_compiles_into_one_graph_for_all_lengths(backend, device):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (40, 57, 23):
        inputs = make_inputs(num_tokens, device)
        expected = step(*inputs)
        with torch._dynamo.config.patch(error_on_recompile=num_tokens != 40):
            actual = compiled(*inputs)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=1e-12, atol=1e-15, msg=key)


def test_a_step_in_a_cuda_graph(cuda):
    inputs = make_inputs(64, cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*inputs)
    for tensor, fresh in zip(inputs, make_inputs(64, cuda), strict=True):
        tensor.copy_(fresh.flip(-2 if fresh.dim() == 3 else 0))
    graph.replay()
    for key, value in step(*inputs).items():
        torch.testing.assert_close(captured[key], value, rtol=1e-12, atol=1e-15, msg=key)


def test_strided_inputs_are_read_as_they_are():
    inputs = make_inputs(40)
    wide = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in inputs]
    assert not any(tensor.is_contiguous() for tensor in wide)
    assert read(step(*wide)) == read(step(*inputs))


def test_a_name_that_only_some_microbatches_have_is_merged_over_those():
    logprobs, rollout, mask, live, replayed, row_mask = make_inputs(30)
    sampled = tally_routes(live, replayed, row_mask)
    each = tally_logprobs(logprobs, rollout, mask)
    figures = tally_metrics(merge_tallies([each, {**each, **sampled}, each]))
    assert int(figures["logprobs/tokens"]) == 3 * int(mask.sum())
    expected = tally_metrics(sampled)["routes/row_mismatch"]
    assert torch.equal(figures["routes/row_mismatch"], expected)


def test_merging_changes_none_of_its_tallies():
    inputs = make_inputs(30)
    tallies = [all_tallies(*inputs) for _ in range(3)]
    before = [read(tally) for tally in tallies]
    merge_tallies(tallies)
    assert [read(tally) for tally in tallies] == before


# --- rejections -----------------------------------------------------------------------------------

F, B, I = torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tally_logprobs([0.0], F, B), TypeError,
         "tally_logprobs: logprobs must be a floating-point tensor, got list"),
        (lambda: tally_logprobs(F, B, B), TypeError,
         "tally_logprobs: rollout_logprobs must be a floating-point tensor, got torch.bool"),
        (lambda: tally_logprobs(F, F[:3], B), ValueError,
         r"tally_logprobs: rollout_logprobs must have the shape of logprobs, \[4\], got \[3\]"),
        (lambda: tally_logprobs(F, F, B[:, None]), ValueError,
         r"tally_logprobs: mask must have the shape of logprobs, \[4\], got \[4, 1\]"),
        (lambda: tally_logprobs(F, F, None), TypeError,
         "tally_logprobs: mask must be a tensor, got NoneType"),
        (lambda: tally_logprobs(F, F, B.to("meta")), ValueError,
         "tally_logprobs: mask is on meta, logprobs on cpu"),
        (lambda: tally_routes(I.float(), I, B), TypeError,
         "tally_routes: live_topk_ids must be uint8, int16, int32 or int64, got torch.float32"),
        (lambda: tally_routes(I[0], I[0], B), ValueError,
         r"tally_routes: live_topk_ids must be \[J, M, K\] or \[M, K\], got \[2\]"),
        (lambda: tally_routes(I, I[None], B), ValueError,
         "tally_routes: replayed_topk_ids must have the shape of live_topk_ids"),
        (lambda: tally_routes(I, I, B.int()), TypeError,
         "tally_routes: row_mask must be a bool tensor, got torch.int32"),
        (lambda: tally_routes(I, I, B[:3]), ValueError,
         r"tally_routes: row_mask must be \[4\], one a row, got \[3\]"),
        (lambda: tally_padding(I, B.to("meta"), num_experts=4, ep_size=2), ValueError,
         "tally_padding: padding_mask is on meta, the ids on cpu"),
        (lambda: tally_padding(I, B, num_experts=0, ep_size=1), ValueError,
         "tally_padding: num_experts must be at least 1, got 0"),
        (lambda: tally_padding(I, B, num_experts=6, ep_size=4), ValueError,
         "tally_padding: ep_size must divide num_experts=6, got 4"),
        (lambda: tally_rows(None), TypeError,
         "tally_rows: microbatch must be a ReplayMicrobatch, got NoneType"),
        (lambda: merge_tallies([]), ValueError, "merge_tallies: no tally was given"),
        (lambda: merge_tallies([{}, 3]), TypeError,
         "merge_tallies: tally 1 must be a dict, got int"),
        (lambda: merge_tallies([{"a": F}, {"a": F[:2]}]), ValueError,
         r"merge_tallies: a has shapes \[4\] and \[2\]"),
        (lambda: tally_metrics({"mine": 1}), ValueError,
         r"tally_metrics: nothing known in tally, it has \['mine'\]"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
