"""dummy_routes: K distinct experts a row, and how "spread" deals them over expert-parallel ranks.

Oracle: a loop that shares no code with the package. Tolerance: none.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse import dummy_routes, gather_routes
from packhorse.kernels import dummies
from packhorse.testing import poisoned_empty

DTYPES = sorted(dummies.DUMMY_DTYPES, key=str)


def dummies_loop(
    num_ids: int, topk: int, *, num_experts: int, num_layers: int = 1, dummy: str = "constant",
    ep_size: int = 1, spread_offset: int = 0,
) -> list[list[list[int]]]:  # fmt: skip
    def expert(i: int, k: int) -> int:
        if dummy == "constant":
            return k
        per_rank = num_experts // ep_size
        turn, rank = divmod(i * topk + k + spread_offset, ep_size)
        return rank * per_rank + turn % per_rank

    layer = [[expert(i, k) for k in range(topk)] for i in range(num_ids)]
    return [layer] * num_layers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dummy", ["constant", "spread"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 513, 8), (3, 341, 6), (1, 2050, 3)], ids=str)
def test_matches_a_loop(shape, dummy, dtype, device):
    num_layers, num_ids, topk = shape
    keywords = {
        "num_experts": 60, "num_layers": num_layers, "dummy": dummy, "ep_size": 4,
        "spread_offset": 131,
    }  # fmt: skip
    with poisoned_empty():
        actual = dummy_routes(num_ids, topk, dtype=dtype, device=device, **keywords)
    assert actual.dtype == dtype
    assert actual.shape == shape
    assert actual.tolist() == dummies_loop(num_ids, topk, **keywords)


@given(
    num_ids=st.integers(0, 40),
    topk=st.integers(0, 6),
    num_layers=st.integers(0, 3),
    ep_size=st.sampled_from([1, 2, 3, 6]),
    offset=st.integers(0, 2**40),
)
def test_spread_matches_a_loop(num_ids, topk, num_layers, ep_size, offset):
    keywords = {
        "num_experts": 6, "num_layers": num_layers, "dummy": "spread", "ep_size": ep_size,
        "spread_offset": offset,
    }  # fmt: skip
    actual = dummy_routes(num_ids, topk, **keywords)
    assert actual.tolist() == dummies_loop(num_ids, topk, **keywords)


def test_spread_gives_each_expert_parallel_rank_its_share(device):
    ids = dummy_routes(1000, 8, num_experts=64, dummy="spread", ep_size=4, device=device)[0]
    assert torch.bincount(ids.flatten().cpu() // 16, minlength=4).tolist() == [2000] * 4
    in_order = ids.sort(-1).values
    assert (in_order[:, 1:] != in_order[:, :-1]).all()


@pytest.mark.parametrize("dummy", ["constant", "spread"])
def test_they_are_what_a_gather_writes_where_all_rows_are_missing(dummy, device):
    none = torch.full((37,), -1, dtype=torch.int64, device=device)
    routes = torch.zeros(0, 5, 8, dtype=torch.uint8, device=device)
    keywords = {"num_experts": 64, "dummy": dummy, "ep_size": 8, "spread_offset": 5}
    gathered, _ = gather_routes(routes, none, range(5), **keywords)
    assert torch.equal(gathered, dummy_routes(37, 8, num_layers=5, device=device, **keywords))


def test_ids_above_the_largest_captured_are_writable(device):
    """E = 384 while the batch's largest id is 100: the dtype follows E, not the batch."""
    ids = dummy_routes(
        100, 8, num_experts=384, dtype=torch.int16, dummy="spread", ep_size=8, device=device
    )
    assert ids.max() == 383


def test_operator_contract(device):
    op = torch.ops.packhorse.fill_dummy_routes.default
    for spread in (False, True):
        routes = torch.zeros(2, 5, 3, dtype=torch.int32, device=device)
        torch.library.opcheck(op, (routes, 8, spread, 2, 7))


def test_compiles_whole_and_once(device):
    def make(x):
        return dummy_routes(
            x.shape[0], 4, num_experts=8, dummy="spread", ep_size=2, device=x.device
        )

    compiled = torch.compile(make, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_ids in (9, 21):
        x = torch.empty(num_ids, device=device)
        assert torch.equal(compiled(x), make(x))


def test_replays_in_a_cuda_graph(cuda, no_host_sync):
    def make():
        return dummy_routes(100, 8, num_experts=32, dummy="spread", ep_size=4, device=cuda)

    make()  # compile before capture
    with no_host_sync():
        expected = make()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = make()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu_memory(gib=7)
def test_offsets_past_int32(cuda):
    for dummy in ("constant", "spread"):
        ids = dummy_routes(
            2**31 // 24 + 5, 8, num_experts=250, num_layers=3, dtype=torch.uint8, dummy=dummy,
            ep_size=5, device=cuda,
        )  # fmt: skip
        tail = dummies_loop(3, 8, num_experts=250, dummy=dummy, ep_size=5,
                            spread_offset=(ids.shape[1] - 3) * 8)[0]  # fmt: skip
        assert ids[-1, -3:].tolist() == tail
        assert ids[0, :2].tolist() == dummies_loop(2, 8, num_experts=250, dummy=dummy, ep_size=5)[0]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"dtype": torch.float32}, TypeError, "dtype must be uint8, int16, int32 or int64"),
        ({"num_ids": -1}, ValueError, "num_ids=-1"),
        ({"num_ids": "3"}, TypeError, "num_ids must be an integer, got '3'"),
        ({"num_layers": -2}, ValueError, "num_layers=-2"),
        ({"topk": 9}, ValueError, "9 experts a token, num_experts=8"),
        ({"topk": 300, "num_experts": 300, "dtype": torch.uint8}, ValueError, "does not hold"),
        ({"dummy": "zeros"}, ValueError, "dummy must be"),
        ({"dummy": "spread", "ep_size": 3}, ValueError, "ep_size=3 does not divide"),
        ({"dummy": "spread", "spread_offset": -1}, ValueError, "spread_offset must be >= 0"),
    ],
)
def test_rejects(keywords, error, message):
    arguments = {"num_ids": 4, "topk": 2, "num_experts": 8, **keywords}
    with pytest.raises(error, match="dummy_routes: .*" + message):
        dummy_routes(arguments.pop("num_ids"), arguments.pop("topk"), **arguments)
