"""gather_routes: this rank's layers and tokens, dummies where there is no row, and the mask.

Oracle: a NumPy loop that shares no code with the package. Tolerance: none.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse import PackedTensor, gather_routes
from packhorse.kernels import routes as routes_module
from packhorse.kernels.routes import gather_routes_reference
from packhorse.testing import poisoned_empty, random_row_ids

DTYPES = sorted(routes_module.ROUTE_DTYPES, key=str)


def gather_loop(
    routes, row_ids, layers, *, num_experts, spread=False, ep_size=1, spread_offset=0
) -> tuple[torch.Tensor, torch.Tensor]:
    source, ids = routes.cpu().numpy(), row_ids.tolist()
    topk = routes.shape[2]
    out = np.zeros((len(layers), len(ids), topk), dtype=np.int64)
    ordinal = 0
    for i, row in enumerate(ids):
        for j, layer in enumerate(layers):
            for k in range(topk):
                if row >= 0:
                    out[j, i, k] = source[row, layer, k]
                elif spread:
                    a = ordinal * topk + k + spread_offset
                    per_rank = num_experts // ep_size
                    out[j, i, k] = (a % ep_size) * per_rank + (a // ep_size) % per_rank
                else:
                    out[j, i, k] = k
        ordinal += row < 0
    mask = torch.tensor([row < 0 for row in ids], dtype=torch.bool)
    return torch.from_numpy(out), mask


def make_routes(num_rows, num_layers, topk, num_experts, dtype, device, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_layers, num_experts, generator=generator)
    return scores.topk(topk, -1).indices.to(dtype).to(device)


def check(routes, row_ids, layers, dtype=torch.int32, **keywords):
    listed = layers.tolist() if isinstance(layers, torch.Tensor) else list(layers)
    with poisoned_empty():
        actual, mask = gather_routes(routes, row_ids, layers, dtype=dtype, **keywords)
    keywords = dict(keywords)
    spread = keywords.pop("dummy", "constant") == "spread"
    expected, expected_mask = gather_loop(routes, row_ids, listed, spread=spread, **keywords)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert torch.equal(actual.cpu().long(), expected)
    assert mask.dtype == torch.bool
    assert torch.equal(mask.cpu(), expected_mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_gather_matches_a_loop(dtype, out_dtype, missing, device):
    routes = make_routes(70, 6, 8, 60, dtype, device)
    row_ids = random_row_ids(50, 70, missing=missing, device=device)
    check(routes, row_ids, range(6), out_dtype, num_experts=60)


@pytest.mark.parametrize(
    "layers",
    [range(6), range(2, 5), range(5, 6), range(0), range(5, -1, -2), [1, 3, 5], [4, 0, 3], [2, 2]],
    ids=str,
)
@pytest.mark.parametrize("topk", [1, 2, 6, 8])
def test_any_layers_in_any_order(layers, topk, device):
    routes = make_routes(20, 6, topk, 9, torch.uint8, device)
    check(routes, random_row_ids(9, 20, missing=0.3, device=device), layers, num_experts=9)


def test_layers_as_a_device_table(device):
    routes = make_routes(20, 6, 4, 9, torch.int16, device)
    layers = torch.tensor([5, 0, 2], dtype=torch.int32, device=device)
    check(routes, random_row_ids(9, 20, missing=0.3, device=device), layers, num_experts=9)


@pytest.mark.parametrize("shape", [(48, 8, 128), (61, 8, 256), (40, 22, 512), (3, 1, 4), (2, 4, 4)])
def test_published_router_shapes(shape, device):
    num_layers, topk, num_experts = shape
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    routes = make_routes(40, num_layers, topk, num_experts, dtype, device)
    row_ids = random_row_ids(33, 40, missing=0.2, device=device)
    check(routes, row_ids, range(num_layers), num_experts=num_experts)


@given(
    num_ids=st.integers(0, 40),
    topk=st.integers(1, 5),
    num_layers=st.integers(1, 4),
    ep_size=st.sampled_from([1, 2, 4]),
    offset=st.integers(0, 70),
    seed=st.integers(0, 99),
)
def test_spread_dummies_match_a_loop(num_ids, topk, num_layers, ep_size, offset, seed):
    routes = make_routes(40, num_layers, topk, 8, torch.uint8, "cpu", seed)
    row_ids = random_row_ids(num_ids, 40, missing=0.6, device="cpu", seed=seed)
    check(
        routes, row_ids, range(num_layers), num_experts=8, dummy="spread", ep_size=ep_size,
        spread_offset=offset,
    )  # fmt: skip


def test_spread_gives_each_expert_parallel_rank_its_share(device):
    row_ids = torch.full((1000,), -1, dtype=torch.int64, device=device)
    routes = torch.zeros(0, 1, 8, dtype=torch.uint8, device=device)
    ids, mask = gather_routes(
        routes, row_ids, range(1), num_experts=64, dummy="spread", ep_size=4, spread_offset=5
    )
    assert mask.all()
    assert torch.bincount(ids.flatten().cpu() // 16, minlength=4).tolist() == [2000] * 4
    in_order = ids[0].sort(-1).values
    assert (in_order[:, 1:] != in_order[:, :-1]).all()


def test_dummies_are_distinct_experts(device):
    routes = make_routes(4, 2, 8, 16, torch.uint8, device)
    row_ids = torch.tensor([-1, 2, -1], device=device)
    for dummy in ("constant", "spread"):
        ids, _ = gather_routes(routes, row_ids, range(2), num_experts=16, dummy=dummy)
        in_order = ids.sort(-1).values
        assert (in_order[..., 1:] > in_order[..., :-1]).all()
        assert (ids < 16).all()


def test_only_the_wanted_layers_are_widened(cuda):
    routes = make_routes(4096, 61, 8, 256, torch.uint8, cuda)
    row_ids = torch.arange(4096, device=cuda)
    gather_routes(routes, row_ids, range(4), num_experts=256)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gather_routes(routes, row_ids, range(4), num_experts=256)
    four_layers = 4 * 4096 * 8 * 4 + 4096
    assert torch.cuda.max_memory_allocated() - before <= four_layers + 2**10


class _Largest(TorchDispatchMode):
    """The most elements of one result, with its dtype's width."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.itemsize)
        return result


def test_nothing_is_as_large_as_all_layers_widened():
    routes = make_routes(512, 61, 8, 256, torch.uint8, "cpu")
    with _Largest() as largest:
        gather_routes_reference(
            routes, torch.arange(512), None, 0, 1, 4, 256, False, 1, 0, torch.int32
        )
    assert largest.num_bytes <= 4 * 512 * 8 * 8  # four layers, at most in int64


def test_column_order_is_kept(device):
    routes = torch.tensor([[[5, 1, 3]]], dtype=torch.uint8, device=device)
    ids, _ = gather_routes(routes, torch.tensor([0], device=device), range(1), num_experts=6)
    assert ids.tolist() == [[[5, 1, 3]]]


def test_strided_routes(device):
    routes = make_routes(12, 6, 4, 9, torch.int16, device)
    row_ids = random_row_ids(5, 6, missing=0.3, device=device)
    check(routes[::2], row_ids, range(6), num_experts=9)
    check(routes[:, ::2], row_ids, range(3), num_experts=9)
    check(routes[:, :, ::2], row_ids, range(6), num_experts=9)
    check(routes.transpose(0, 1), row_ids, range(12), num_experts=9)
    for one_layer in (range(1, 2), [2]):
        check(routes[:, ::2], row_ids, one_layer, num_experts=9)
        check(routes[:, :, :2], row_ids, one_layer, num_experts=9)


def test_empty_inputs(device):
    routes = make_routes(3, 2, 4, 9, torch.uint8, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    check(routes, none, range(2), num_experts=9)
    check(routes[:0], torch.tensor([-1], device=device), range(2), num_experts=9)
    check(routes, torch.tensor([1], device=device), range(0), num_experts=9)


def test_operator_contract(device):
    routes = make_routes(9, 4, 2, 8, torch.uint8, device)
    row_ids = random_row_ids(6, 9, missing=0.3, device=device)
    op = torch.ops.packhorse.gather_routes.default
    torch.library.opcheck(op, (routes, row_ids, None, 0, 1, 4, 8, False, 1, 0, torch.int32))
    torch.library.opcheck(op, (routes, row_ids, None, 3, -1, 2, 8, True, 2, 1, torch.int64))


def test_operator_contract_with_a_table_of_layers(device):
    routes = make_routes(9, 4, 3, 8, torch.uint8, device)
    row_ids = random_row_ids(6, 9, missing=0.3, device=device)
    layers = torch.tensor([3, 0], dtype=torch.int32, device=device)
    op = torch.ops.packhorse.gather_routes.default
    torch.library.opcheck(op, (routes, row_ids, layers, 0, 1, 2, 8, True, 2, 1, torch.int32))


def test_a_list_of_layers_is_not_captured(cuda):
    routes = make_routes(9, 4, 2, 8, torch.uint8, cuda)
    row_ids = random_row_ids(6, 9, missing=0.3, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="gather_routes: a list of lay"):
        gather_routes(routes, row_ids, [3, 0, 1], num_experts=8)


def test_compiles_whole_and_once(device):
    def both(routes, row_ids):
        return gather_routes(routes, row_ids, range(1, 3), num_experts=8)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_rows in (9, 21):
        routes = make_routes(num_rows, 4, 2, 8, torch.uint8, device)
        row_ids = random_row_ids(num_rows - 2, num_rows, missing=0.3, device=device)
        for actual, expected in zip(compiled(routes, row_ids), both(routes, row_ids), strict=True):
            assert torch.equal(actual, expected)


def test_replays_in_a_cuda_graph(cuda):
    routes = make_routes(64, 4, 8, 32, torch.uint8, cuda)
    row_ids = random_row_ids(32, 64, missing=0.0, device=cuda)
    for dummy in ("constant", "spread"):
        gather_routes(routes, row_ids, range(4), num_experts=32, dummy=dummy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, mask = gather_routes(routes, row_ids, range(4), num_experts=32, dummy=dummy)
        row_ids.copy_(random_row_ids(32, 64, missing=0.5, device=cuda, seed=1))
        graph.replay()
        expected, expected_mask = gather_loop(
            routes, row_ids, range(4), num_experts=32, spread=dummy == "spread"
        )
        assert torch.equal(out.cpu().long(), expected)
        assert torch.equal(mask.cpu(), expected_mask)


def test_reads_nothing_back(cuda, no_host_sync):
    routes = make_routes(64, 6, 8, 32, torch.uint8, cuda)
    row_ids = random_row_ids(32, 64, missing=0.2, device=cuda)
    for layers in (range(6), [4, 0, 3]):
        for dummy in ("constant", "spread"):
            gather_routes(routes, row_ids, layers, num_experts=32, dummy=dummy)
            with no_host_sync():
                gather_routes(routes, row_ids, layers, num_experts=32, dummy=dummy)


@pytest.mark.gpu_memory(gib=14)
def test_offsets_past_int32(cuda):
    routes = torch.zeros(2**31 // 384 + 8, 48, 8, dtype=torch.uint8, device=cuda)
    routes[-1] = torch.arange(8, device=cuda)
    last = torch.tensor([routes.shape[0] - 1], dtype=torch.int64, device=cuda)
    ids, _ = gather_routes(routes, last, range(48), num_experts=8)
    assert (ids == torch.arange(8, device=cuda)).all()
    many = last.expand(2**31 // 384 + 8).contiguous()
    ids, _ = gather_routes(routes, many, range(48), num_experts=8)
    assert (ids[-1, -1] == torch.arange(8, device=cuda)).all()
    assert (ids == torch.arange(8, dtype=torch.int32, device=cuda)).all()


ROUTES, IDS = torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("routes", "row_ids", "keywords", "error", "message"),
    [
        (ROUTES.long(), IDS, {}, TypeError, "routes must be uint8, int16 or int32"),
        (ROUTES[0], IDS, {}, ValueError, r"routes must be \[N, L, K\]"),
        (ROUTES, IDS.int(), {}, TypeError, "row_ids must be int64"),
        (ROUTES, IDS[None], {}, ValueError, r"row_ids must be contiguous \[M\]"),
        (ROUTES, IDS.to("meta"), {}, ValueError, "row_ids on meta"),
        (ROUTES, IDS, {"dtype": torch.int16}, TypeError, "dtype must be int32 or int64"),
        (ROUTES, IDS, {"layers": [0, 3]}, ValueError, r"layer 3 is not in \[0, 3\)"),
        (ROUTES, IDS, {"layers": [-1]}, ValueError, "layer -1 is not in"),
        (ROUTES, IDS, {"layers": [1.0]}, TypeError, "layers must be integers"),
        (ROUTES, IDS, {"layers": 1}, TypeError, "layers must be a range, a list or"),
        (PackedTensor.from_lengths(ROUTES, [2]), IDS, {}, TypeError, "routes .* pass its values"),
        (ROUTES, IDS + 2, {}, ValueError, r"a row id is outside \[-1, 2\)"),
        (ROUTES, IDS - 2, {}, ValueError, r"a row id is outside \[-1, 2\)"),
        (ROUTES + 8, IDS, {}, ValueError, r"an expert is outside \[0, 8\)"),
        (ROUTES, IDS, {"layers": IDS}, ValueError, r"layers as a tensor must be \[J\] int32"),
        (ROUTES, IDS, {"num_experts": 3}, ValueError, "num_experts=3"),
        (ROUTES, IDS, {"dummy": "zeros"}, ValueError, "dummy must be"),
        (ROUTES, IDS, {"dummy": "spread", "ep_size": 3}, ValueError, "ep_size=3 does not divide"),
        (ROUTES, IDS, {"spread_offset": -1}, ValueError, "spread_offset must be >= 0"),
        (ROUTES, IDS, {"spread_offset": 2**70}, ValueError, "spread_offset must be >= 0 and below"),
        (ROUTES, IDS, {"num_experts": "8"}, TypeError, "num_experts must be an integer, got '8'"),
        (ROUTES, IDS, {"num_experts": 8.5}, TypeError, "num_experts must be an integer, got 8.5"),
        (ROUTES, IDS, {"num_experts": 2**31}, ValueError, "num_experts must be from 0 to"),
        (ROUTES, IDS, {"ep_size": True}, TypeError, "ep_size must be an integer, got True"),
    ],
)
def test_rejects(routes, row_ids, keywords, error, message):
    arguments = {"layers": range(3), "num_experts": 8, **keywords}
    with pytest.raises(error, match="gather_routes: .*" + message):
        gather_routes(routes, row_ids, **arguments)
