"""TokenLayout.gather_routes and StaticLayout: one microbatch's routes, from host lengths.

Oracle: ``tests/oracle.py`` and the loop of ``test_routes``, which share no code with the package.
Tolerance: none.
"""

import pytest
import torch

from packhorse import PackedTensor, StaticLayout, TokenLayout, gather_routes
from packhorse.testing import poisoned_empty
from tests.kernels.test_routes import gather_loop, make_routes
from tests.oracle import OracleLayout

LENGTHS, CAPTURED = [5, 0, 9, 3], [4, 0, 9, 1]
GEOMETRIES = {
    "thd": {"format": "thd"},
    "bshd": {"format": "bshd"},
    "thd zigzag, sequence parallel": {
        "format": "thd", "cp_size": 2, "cp_rank": 1, "tp_size": 2, "tp_rank": 1,
        "sequence_parallel": True,
    },
    "thd contiguous": {
        "format": "thd", "cp_size": 3, "cp_rank": 2, "cp_order": "contiguous", "tp_size": 2,
    },
    "bshd zigzag, sequence parallel": {
        "format": "bshd", "cp_size": 2, "cp_rank": 0, "tp_size": 2, "tp_rank": 1,
        "sequence_parallel": True,
    },
}  # fmt: skip


@pytest.fixture(params=GEOMETRIES)
def geometry(request):
    return GEOMETRIES[request.param]


def packed_routes(captured, device="cpu", num_layers=4, topk=2, num_experts=8) -> PackedTensor:
    values = make_routes(sum(captured), num_layers, topk, num_experts, torch.uint8, device)
    return PackedTensor.from_lengths(values, captured)


@pytest.mark.parametrize("layers", [range(4), range(1, 3), [3, 0]], ids=str)
@pytest.mark.parametrize("dummy", ["constant", "spread"])
def test_one_call_is_the_oracle(geometry, layers, dummy, device):
    layout = TokenLayout.build(LENGTHS, device=device, **geometry)
    routes = packed_routes(CAPTURED, device)
    keywords = {"num_experts": 8, "ep_size": 2, "spread_offset": 3}
    with poisoned_empty():
        result = layout.gather_routes(routes, layers, dummy=dummy, **keywords)
    ids = OracleLayout(LENGTHS, **geometry).route_row_ids(CAPTURED)
    assert result.row_ids.tolist() == ids
    expected, mask = gather_loop(
        routes.values, torch.tensor(ids), list(layers), spread=dummy == "spread", **keywords
    )
    assert torch.equal(result.topk_ids.cpu().long(), expected)
    assert torch.equal(result.padding_mask.cpu(), mask)
    assert result.topk_ids.dtype == torch.int32


def test_a_second_call_of_the_same_layout_is_the_same(geometry, device):
    """Each call copies the tables anew, through memory that is used again."""
    layout = TokenLayout.build(LENGTHS, device=device, **geometry)
    first = layout.gather_routes(packed_routes(CAPTURED, device), range(4), num_experts=8)
    other = [2, 0, 1, 3]
    second = layout.gather_routes(packed_routes(other, device), range(4), num_experts=8)
    again = layout.gather_routes(packed_routes(CAPTURED, device), range(4), num_experts=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert second.row_ids.tolist() == OracleLayout(LENGTHS, **geometry).route_row_ids(other)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1]], ids=str)
def test_next_to_nothing(lengths, device):
    layout = TokenLayout.build(lengths, device=device)
    routes = packed_routes(lengths, device)
    result = layout.gather_routes(routes, range(4), num_experts=8)
    assert result.topk_ids.shape == (4, sum(lengths), 2)
    assert result.row_ids.tolist() == list(range(sum(lengths)))


def test_waits_for_nothing(cuda, no_host_sync, geometry):
    routes = packed_routes(CAPTURED, cuda)
    TokenLayout.build(LENGTHS, device=cuda, **geometry).gather_routes(
        routes, range(4), num_experts=8
    )
    with no_host_sync():
        layout = TokenLayout.build(LENGTHS, device=cuda, **geometry)
        for dummy in ("constant", "spread"):
            layout.gather_routes(routes, range(4), num_experts=8, dummy=dummy)


def test_rejects():
    layout = TokenLayout.build(LENGTHS)
    name = "TokenLayout.gather_routes: "
    for routes, error, message in (
        (packed_routes(CAPTURED).values, TypeError, "routes must be a PackedTensor, got Tensor"),
        (packed_routes([4, 0, 9]), ValueError, "routes has 3 entries for 4 trajectories"),
        (packed_routes([4, 1, 9, 1]), ValueError, "trajectory 1 is 1, but it has 0 tokens"),
        (packed_routes(CAPTURED).to("meta"), ValueError, "routes on meta, the layout on cpu"),
    ):
        with pytest.raises(error, match=name + ".*" + message):
            layout.gather_routes(routes, range(4), num_experts=8)


# --- static tables --------------------------------------------------------------------------------


def microbatches(geometry) -> list[tuple[list[int], dict, list[int]]]:
    """Lengths, what builds their layout at one number of tokens, and captured rows."""
    if geometry["format"] == "bshd":
        batches = [[5, 0, 9, 3], [12, 12, 1, 0], [0, 0, 0, 0]]
        return [(b, {"padded_lengths": [12] * 4}, [max(n - 1, 0) for n in b]) for b in batches]
    out = []
    for lengths in ([5, 0, 9, 3], [20], [], [1] * 9):
        padded = [-(-n // 12) * 12 for n in lengths]
        padded.append(120 - sum(padded))
        out.append((lengths, {"padded_lengths": padded}, [max(n - 1, 0) for n in lengths]))
    return out


def test_static_tables_follow_the_microbatch(geometry, device):
    batches = microbatches(geometry)
    layouts = [
        TokenLayout.build(lengths, device=device, **geometry, **padded)
        for lengths, padded, _ in batches
    ]
    sequences = 4 if geometry["format"] == "bshd" else 12
    static = StaticLayout(layouts[0], max_sequences=sequences)
    assert (static.route_row_ids() == -1).all()
    for layout, (_, _, captured) in zip(layouts, batches, strict=True):
        static.update(layout, captured)
        assert torch.equal(static.route_row_ids(), layout.route_row_ids(captured))


def test_a_graph_replays_other_lengths(cuda, no_host_sync, geometry):
    batches = microbatches(geometry)
    layouts = [
        TokenLayout.build(lengths, device=cuda, **geometry, **padded)
        for lengths, padded, _ in batches
    ]
    sequences = 4 if geometry["format"] == "bshd" else 12
    static = StaticLayout(layouts[0], max_sequences=sequences)
    buffer = torch.zeros(120, 4, 2, dtype=torch.uint8, device=cuda)
    keywords = {"num_experts": 8, "dummy": "spread", "ep_size": 2}
    gather_routes(buffer, static.route_row_ids(), range(4), **keywords)  # compile before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk_ids, mask = gather_routes(buffer, static.route_row_ids(), range(4), **keywords)
    for layout, (_, _, captured) in zip(layouts, batches, strict=True):
        routes = packed_routes(captured, cuda)
        with no_host_sync():
            static.update(layout, captured)
            buffer[: routes.num_rows].copy_(routes.values)
            graph.replay()
        expected = layout.gather_routes(routes, range(4), **keywords)
        assert torch.equal(topk_ids, expected.topk_ids)
        assert torch.equal(mask, expected.padding_mask)


def test_every_table_follows_the_microbatch(geometry, device):
    """Support rows, next tokens and dense batches, against the layout that was laid in."""
    batches = microbatches(geometry)
    layouts = [
        TokenLayout.build(lengths, device=device, batch_width=24, **geometry, **padded)
        for lengths, padded, _ in batches
    ]
    width = 4 if geometry["format"] == "bshd" else 12
    static = StaticLayout(layouts[0], max_sequences=width, dense=True)
    assert (static.support_row_ids() == -1).all()
    for layout, (lengths, _, captured) in zip(layouts, batches, strict=True):
        batch, responses = len(lengths), [n // 2 for n in lengths]
        static.update(layout, captured, responses)
        assert torch.equal(static.route_row_ids(), layout.route_row_ids(captured))
        assert torch.equal(static.support_row_ids(), layout.support_row_ids(responses))
        for next_token in (False, True):
            expected = layout.token_row_ids(next_token)
            assert torch.equal(static.token_row_ids(next_token), expected)
            dense = torch.arange(width * 24, device=device).view(width, 24)
            aligned = static.align(dense, -1, next_token=next_token)
            assert torch.equal(aligned, layout.align(dense[:batch], -1, next_token=next_token))
        ranks = [torch.randn(layout.num_tokens, device=device) for _ in range(layout.cp_size)]
        restored = static.restore(torch.cat(ranks), fill=-3)
        assert torch.equal(restored[:batch], layout.restore_gathered(ranks, fill=-3))
        assert (restored[batch:] == -3).all()


def test_a_graph_replays_dense_batches_of_other_lengths(cuda, no_host_sync):
    def build(lengths):
        padded = [*lengths, 40 - sum(lengths)]
        return TokenLayout.build(lengths, padded_lengths=padded, batch_width=24, device=cuda)

    static = StaticLayout(build([5, 9]), max_sequences=6, dense=True)
    dense, values = torch.zeros(6, 24, device=cuda), torch.zeros(40, device=cuda)

    def run():
        return static.align(dense, -1, next_token=True), static.restore(values, fill=-3)

    run()  # compile before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aligned, restored = run()
    for lengths in ([5, 9], [20, 3, 1], [], [8] * 5):
        layout, batch = build(lengths), len(lengths)
        given, scored = torch.randn(6, 24, device=cuda), torch.randn(40, device=cuda)
        with no_host_sync():
            static.update(layout)
            dense.copy_(given)
            values.copy_(scored)
            graph.replay()
        assert torch.equal(aligned, layout.align(given[:batch], -1, next_token=True))
        assert torch.equal(restored[:batch], layout.restore(scored, fill=-3))


def test_static_tables_refuse_another_geometry():
    def build(lengths, **keywords):
        return TokenLayout.build(lengths, padded_lengths=[8, 4], **keywords)

    static = StaticLayout(build([5, 4]), max_sequences=2)
    before = static.route_row_ids()
    for layout, captured, error, message in (
        ([5, 4], [5, 4], TypeError, "layout must be a TokenLayout, got list"),
        (build([5, 4], format="thd", cp_size=2), [5, 4], ValueError, "num_tokens is 6, but .* 12"),
        (TokenLayout.build([12]), [13], ValueError, "trajectory 0 is 13, but it has 12 tokens"),
        (TokenLayout.build([4, 4, 4]), [4, 4, 4], ValueError, "3 padded .* max_sequences=2"),
    ):
        with pytest.raises(error, match="StaticLayout.update: .*" + message):
            static.update(layout, captured)
    with pytest.raises(ValueError, match="response_lengths of trajectory 1 is 4 of 4 tokens"):
        static.update(build([5, 4]), [5, 4], [2, 4])
    with pytest.raises(RuntimeError, match=r"StaticLayout\.align: made without dense=True"):
        static.align(torch.zeros(2, 5), 0)
    assert torch.equal(static.route_row_ids(), before)
    wide = StaticLayout(build([5, 4], batch_width=9), max_sequences=2, dense=True)
    with pytest.raises(ValueError, match="batch_width is 8, but the graph's is 9"):
        wide.update(build([5, 4], batch_width=8))
    with pytest.raises(TypeError, match=r"max_sequences must be an integer, got 2\.0"):
        StaticLayout(build([5, 4]), max_sequences=2.0)
    with pytest.raises(ValueError, match="3 padded sequences for max_sequences=2"):
        StaticLayout(TokenLayout.build([4, 4, 4]), max_sequences=2)
    with pytest.raises(ValueError, match="max_sequences must be >= 1"):
        StaticLayout(TokenLayout.build([]), max_sequences=0)
    with pytest.raises(ValueError, match="'bshd' interleaves the layout's 2"):
        StaticLayout(TokenLayout.build([4, 4], format="bshd"), max_sequences=3)
