"""validate_routes, the results of all checks, and their contracts.

Oracle: loops over Python lists that share no code with the package. Every count is exact.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse import PackedTensor
from packhorse.kernels.faults import NO_FAULT
from packhorse.kernels.routes import ROUTE_DTYPES
from packhorse.kernels.validate import (
    validate_ragged_support,
    validate_routes,
    validate_support,
)
from packhorse.packed import collate
from tests.kernels.validate_oracle import (
    check_routes,
    faults_of_routes,
    faults_of_rows,
    make_ragged,
    make_routes,
    make_support,
    spoil,
    spoil_support,
)

DTYPES = sorted(ROUTE_DTYPES, key=str)
routes_op = torch.ops.packhorse.validate_routes.default
support_op = torch.ops.packhorse.validate_support.default
ragged_op = torch.ops.packhorse.validate_ragged_support.default


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 2, 3, 6, 8, 22, 32, 33])
def test_routes_match_a_loop(dtype, topk, device):
    routes = make_routes(60, 5, topk, 40, dtype, device)
    check_routes(routes, 40)
    spoil(routes, 40, 0.3, seed=topk)
    check_routes(routes, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 41, 300])
def test_faults_are_counted_over_many_blocks(dtype, num_rows, device):
    routes = make_routes(num_rows, 7, 8, 64, dtype, device, seed=num_rows)
    spoil(routes, 64, 0.2, seed=num_rows)
    check_routes(routes, 64)


@pytest.mark.parametrize(
    "layers",
    [range(6), range(2, 5), range(5, 6), range(0), range(5, -1, -2), [1, 3, 5], [4, 0, 3], [2, 2]],
    ids=str,
)
@pytest.mark.parametrize("topk", [1, 4, 6])
def test_only_the_named_layers_are_read(layers, topk, device):
    routes = make_routes(90, 6, topk, 9, torch.int16, device)
    spoil(routes, 9, 0.3, seed=1)
    check_routes(routes, 9, layers)
    table = torch.tensor(list(layers), dtype=torch.int32, device=device)
    check_routes(routes, 9, table)
    untouched = sorted(set(range(6)) - set(layers))
    before = validate_routes(routes, num_experts=9, layers=layers).read()
    routes[:, untouched] = 99
    assert validate_routes(routes, num_experts=9, layers=layers).read() == before


@given(
    shape=st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(0, 9)),
    dtype=st.sampled_from(DTYPES),
    num_experts=st.sampled_from([1, 3, 9, 10, 255, 256, 300]),
    data=st.data(),
)
def test_any_routes(shape, dtype, num_experts, data):
    low = 0 if dtype == torch.uint8 else -3
    high = min(num_experts + 2, torch.iinfo(dtype).max)
    size = shape[0] * shape[1] * shape[2]
    few = st.sampled_from([low, 0, 1, 2, high - 2, high])
    ids = data.draw(st.lists(st.one_of(few, st.integers(low, high)), min_size=size, max_size=size))
    check_routes(torch.tensor(ids, dtype=dtype).view(shape), num_experts)


def test_an_all_zero_layer_is_an_engine_that_captured_nothing(device):
    """Legal are the zeros of a dense layer, which is not named, and those of K = 1."""
    routes = make_routes(5, 3, 4, 8, torch.uint8, device)
    routes[:, 0] = 0
    assert validate_routes(routes, num_experts=8).read() == {"all_zero": (5, 0, 0)}
    assert validate_routes(routes, num_experts=8, layers=range(1, 3)).read() == {}
    ones = torch.zeros(5, 3, 1, dtype=torch.uint8, device=device)
    assert validate_routes(ones, num_experts=8).read() == {}


def test_each_cell_has_one_fault(device):
    cells = {
        (-1, -1, -1): "missing",
        (-1, 9, 9): "partly_missing",
        (0, 0, -1): "partly_missing",
        (9, 9, 0): "out_of_range",
        (-2, -2, -1): "partly_missing",
        (-2, -2, 3): "out_of_range",
        (0, 0, 0): "all_zero",
        (2, 0, 2): "repeated",
        (0, 0, 1): "repeated",
    }
    for ids, name in cells.items():
        routes = torch.tensor([[ids]], dtype=torch.int32, device=device)
        assert validate_routes(routes, num_experts=9).read() == {name: (1, 0, 0)}


def test_an_id_of_255_is_an_expert_of_uint8(device):
    routes = torch.tensor([[[255, 0]], [[254, 255]]], dtype=torch.uint8, device=device)
    for num_experts in (256, 384):
        assert validate_routes(routes, num_experts=num_experts).read() == {}
    assert validate_routes(routes, num_experts=255).read() == {"out_of_range": (2, 0, 0)}


def test_an_id_that_wrapped_is_negative_and_not_another_expert(device):
    """int16 has no expert above 32767: 40000 written into it is -25536."""
    routes = torch.tensor([[[-25536, 1]], [[32767, 1]]], dtype=torch.int16, device=device)
    for num_experts in (32768, 40001, 60000, 2**31 - 1):
        assert validate_routes(routes, num_experts=num_experts).read() == {
            "out_of_range": (1, 0, 0)
        }
    routes = torch.tensor([[[2**31 - 1, -(2**31)]], [[2**31 - 2, 0]]], device=device).int()
    found = validate_routes(routes, num_experts=2**31 - 1).read()
    assert found == {"out_of_range": (1, 0, 0)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_that_share_bits_are_not_the_same(dtype, device):
    bits = torch.iinfo(dtype).bits - (dtype != torch.uint8)
    ids = [1 << bit for bit in range(bits)] + [(1 << bits) - 1, 3, 0]
    routes = torch.tensor([[ids]], dtype=dtype, device=device)
    num_experts = min(1 << bits, 2**31 - 1)
    expected = {} if bits < 31 else {"out_of_range": (1, 0, 0)}  # E cannot be 2**31
    assert validate_routes(routes, num_experts=num_experts).read() == expected
    pairs = routes.view(-1)[torch.combinations(torch.arange(len(ids), device=device))][:, None]
    pairs = pairs[(pairs < num_experts).all(2).all(1)]
    assert validate_routes(pairs, num_experts=num_experts).read() == {}


def test_the_first_is_the_least_row_then_layer(device):
    routes = make_routes(700, 6, 2, 9, torch.uint8, device)
    for row, layer in ((600, 1), (321, 5), (321, 4), (699, 0)):
        routes[row, layer] = 7
    for layers in (None, [5, 4, 1, 0], range(5, -1, -1)):
        found = validate_routes(routes, num_experts=9, layers=layers)
        assert found.read() == {"repeated": (4, 321, 4)}


def test_strided_routes(device):
    routes = make_routes(24, 6, 8, 16, torch.int16, device)
    spoil(routes, 16, 0.4, seed=2)
    for view in (
        routes[::2], routes[:, ::2], routes[:, :, ::2], routes.transpose(0, 1), routes[3:, 1:],
        routes[:, :, 1:], routes[:, :, 3:7], routes[:, 2:3], routes[:, ::2, :1], routes[5:6, 3:4],
        routes.transpose(1, 2), routes[:1].expand(7, 6, 8), routes.flip(0),
    ):  # fmt: skip
        check_routes(view, 16)
        check_routes(view, 16, range(view.shape[1] - 1, -1, -1))
    flat = torch.zeros(24 * 6 * 8 + 3, dtype=torch.uint8, device=device)
    for shift in range(4):  # words of 8, 4, 2 and 1 bytes
        moved = flat[shift : shift + 24 * 6 * 8].view(24, 6, 8)
        moved.copy_(make_routes(24, 6, 8, 16, torch.uint8, device))
        moved[7, 5, 3] = moved[7, 5, 2]
        assert validate_routes(moved, num_experts=16).read() == {"repeated": (1, 7, 5)}


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_routes(shape, device):
    routes = torch.zeros(shape, dtype=torch.int16, device=device)
    assert validate_routes(routes, num_experts=4).read() == {}
    assert validate_routes(routes, num_experts=4, layers=[]).read() == {}


def test_checks_of_parts_combine(device):
    routes = make_routes(50, 3, 4, 8, torch.int16, device)
    spoil(routes, 8, 0.4, seed=3)
    whole = validate_routes(routes, num_experts=8)
    parts = [validate_routes(part, num_experts=8) for part in (routes[:20], routes[20:])]
    assert torch.equal(whole.counts, parts[0].counts + parts[1].counts)
    later = torch.where(parts[1].counts > 0, parts[1].first + 20 * 3, NO_FAULT)
    assert torch.equal(whole.first, torch.minimum(parts[0].first, later))


# --- results --------------------------------------------------------------------------------------


def test_a_route_fault_names_trajectory_row_and_layer(device):
    routes = make_routes(9, 3, 4, 8, torch.int16, device)
    check = validate_routes(routes, num_experts=8)
    check.raise_if_any()
    check.raise_if_any(lengths=[4, 0, 5])
    routes[6, 2, 1] = routes[6, 2, 0]
    check = validate_routes(routes, num_experts=8)
    with pytest.raises(ValueError, match=r"packed row 6, layer 2: an expert is repeated$"):
        check.raise_if_any()
    where = "^validate_routes: rollout_expert_indices of trajectory 2, row 2, layer 2: "
    with pytest.raises(ValueError, match=where + "an expert is repeated$"):
        check.raise_if_any(lengths=[4, 0, 5])
    with pytest.raises(ValueError, match="lengths hold 6 rows, and packed row 6 of rollout_expert"):
        check.raise_if_any(lengths=[4, 2])
    routes[6, 1] = -1
    routes[8, 2] = -1
    routes[8, 0] = 0
    routes[8, 1] = 0
    with pytest.raises(
        ValueError, match=r"row 2, layer 1: no route \(all -1\); rows end where"
    ) as e:
        validate_routes(routes, num_experts=8).raise_if_any(lengths=(4, 0, 5))
    assert str(e.value).endswith("(in all: 2 missing, 2 all_zero, 1 repeated)")


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([-1, -1], "no route (all -1); rows end where the captured prefix ends"),
        ([-1, 2], "a partial -1"),
        ([9, 2], "an expert is out of range"),
        ([0, 0], "all zeros: the engine captured nothing there (or the layer is dense"),
        ([2, 2], "an expert is repeated"),
    ],
)
def test_each_route_fault_has_a_text(ids, text, device):
    routes = torch.tensor([[ids]], dtype=torch.int16, device=device)
    with pytest.raises(ValueError, match="validate_routes") as e:
        validate_routes(routes, num_experts=9).raise_if_any(lengths=[1])
    assert f"of trajectory 0, row 0, layer 0: {text}" in str(e.value)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([9, -1], "an id is out of range"),
        ([-1, 2], "an id after a -1"),
        ([2, 2], "an id is repeated"),
        ([1, 3], "the sampled id is not among its ids"),
    ],
)
def test_each_support_fault_has_a_text(ids, text, device):
    support = torch.tensor([[2, -1], ids, ids], dtype=torch.int32, device=device)
    sampled = torch.tensor([2, 2, 2], device=device)
    check = validate_support(support, sampled, vocab_size=9)
    with pytest.raises(ValueError, match="validate_support: rollout_sample_support") as e:
        check.raise_if_any(lengths=[1, 2])
    assert f"rollout_sample_support of trajectory 1, row 0: {text} (in all: 2 " in str(e.value)
    with pytest.raises(ValueError, match="rollout_sample_support, packed row 1: "):
        check.raise_if_any()
    validate_support(support[:1], sampled[:1], vocab_size=9).raise_if_any(lengths=[1])


def test_fields_are_named_as_the_packer_names_them():
    routes = torch.full((1, 1, 2), 9, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{collate.ROUTES_FIELD} of"):
        validate_routes(routes, num_experts=2).raise_if_any([1])
    support = torch.tensor([[9]], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{collate.SUPPORT_FIELD} of"):
        validate_support(support, torch.tensor([9]), vocab_size=2).raise_if_any([1])


# --- contracts ------------------------------------------------------------------------------------


def test_operator_contract(device):
    routes = make_routes(9, 4, 2, 8, torch.uint8, device)
    torch.library.opcheck(routes_op, (routes, None, 0, 1, 4, 8))
    table = torch.tensor([3, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(routes_op, (routes, table, 0, 1, 2, 8))
    support, sampled = make_support(9, 4, 20, device, ascending=True)
    torch.library.opcheck(support_op, (support, sampled, 20))
    ids, offsets = make_ragged([[3, 4], [], [1]], device)
    torch.library.opcheck(ragged_op, (ids, offsets, sampled[:3], 20))


def test_compiles_whole_and_once(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    def all_three(routes, support, sampled, ids, offsets):
        return (
            validate_routes(routes, num_experts=8),
            validate_routes(routes, num_experts=8, layers=[0, 3]),
            validate_support(support, sampled, vocab_size=20),
            validate_ragged_support(ids, offsets, sampled, vocab_size=20),
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(all_three, fullgraph=True, dynamic=True, backend=counter)
    for num_rows in (9, 21, 33):
        routes = make_routes(num_rows, 4, 2, 8, torch.uint8, device)
        routes[num_rows - 3, 1] = 0
        support, sampled = make_support(num_rows, 5, 20, device, ascending=False)
        sampled[num_rows - 2] = 99
        rows = [[token for token in row if token >= 0] for row in support.tolist()]
        arguments = (routes, support, sampled, *make_ragged(rows, device))
        for got, wanted in zip(compiled(*arguments), all_three(*arguments), strict=True):
            assert type(got) is type(wanted)
            assert got.read() == wanted.read()
    assert counter.frame_count == 1


def test_traces_without_values():
    routes = torch.empty(5, 3, 4, dtype=torch.uint8, device="meta")
    table = torch.empty(2, dtype=torch.int32, device="meta")
    for layers in (None, [0, 2], table):
        found = validate_routes(routes, num_experts=8, layers=layers)
        assert (found.counts.shape, found.counts.device.type) == ((5,), "meta")
    sampled = torch.empty(5, dtype=torch.int64, device="meta")
    support = torch.empty(5, 3, dtype=torch.int32, device="meta")
    assert validate_support(support, sampled, vocab_size=8).first.shape == (4,)
    ragged = support.view(15), torch.empty(6, dtype=torch.int64, device="meta")
    assert validate_ragged_support(*ragged, sampled, vocab_size=8).first.shape == (4,)


def test_outputs_do_not_depend_on_what_memory_held(poisoned, device):
    routes = make_routes(3, 2, 2, 8, torch.uint8, device)
    assert validate_routes(routes, num_experts=8).counts.tolist() == [0] * 5
    assert validate_routes(routes, num_experts=8).first.tolist() == [NO_FAULT] * 5
    support = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    found = validate_support(
        support, torch.zeros(3, dtype=torch.int64, device=device), vocab_size=2
    )
    assert found.counts.tolist() == [0] * 4
    assert found.first.tolist() == [NO_FAULT] * 4


def test_replays_in_a_cuda_graph(cuda):
    """Each replay counts anew."""
    routes = make_routes(300, 6, 8, 32, torch.uint8, cuda)
    support, sampled = make_support(300, 20, 90, cuda, ascending=True)
    rows = [[token for token in row if token >= 0] for row in support.tolist()]
    ids, offsets = make_ragged(rows, cuda)

    def call():
        return (
            validate_routes(routes, num_experts=32),
            validate_support(support, sampled, vocab_size=90),
            validate_ragged_support(ids, offsets, sampled, vocab_size=90),
        )

    call()  # compile before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    assert [check.read() for check in found] == [{}, {}, {}]
    spoil(routes, 32, 0.1, seed=0)
    spoil_support(support, sampled, 90, seed=0)
    for _ in range(2):
        graph.replay()
        assert found[0].read() == faults_of_routes(routes, range(6), 32)
        assert found[1].read() == faults_of_rows(support.tolist(), sampled, 90)
        assert found[2].read() == faults_of_rows(rows, sampled, 90)


def test_reads_nothing_back(cuda, no_host_sync):
    routes = make_routes(300, 6, 8, 32, torch.uint8, cuda)
    wide = make_routes(30, 2, 40, 64, torch.uint8, cuda)
    support, sampled = make_support(300, 20, 90, cuda, ascending=False)
    very_wide = support.repeat(1, 9)
    ids, offsets = make_ragged(support.tolist(), cuda)
    for _ in range(2):  # the second time nothing is compiled
        with no_host_sync():
            validate_routes(routes, num_experts=32)
            validate_routes(routes, num_experts=32, layers=[4, 0, 3])
            validate_routes(wide, num_experts=64)
            validate_support(support, sampled, vocab_size=90)
            validate_support(very_wide, sampled, vocab_size=90)
            validate_ragged_support(ids, offsets, sampled, vocab_size=90)


@pytest.mark.gpu_memory(gib=12)
def test_offsets_past_int32(cuda):
    num_rows = 2**31 // 384 + 999
    routes = torch.arange(8, dtype=torch.uint8, device=cuda).expand(num_rows, 48, 8).contiguous()
    routes[-1, 47, 7] = 8
    routes[-1, 46, 7] = 1
    for layers in (None, range(40, 48), [40, 47, 46]):
        assert validate_routes(routes, num_experts=8, layers=layers).read() == {
            "out_of_range": (1, num_rows - 1, 47),
            "repeated": (1, num_rows - 1, 46),
        }
    del routes
    num_rows = 2**31 // 128 + 999
    support = torch.full((num_rows, 128), -1, dtype=torch.int32, device=cuda)
    support[-1, 0], support[-2, 1] = 3, 3
    sampled = torch.zeros(num_rows, dtype=torch.int32, device=cuda)
    assert validate_support(support, sampled, vocab_size=8).read() == {
        "not_compacted": (1, num_rows - 2),
        "sampled_missing": (1, num_rows - 1),
    }


# --- rejections -----------------------------------------------------------------------------------

ROUTES = torch.tensor([[[0, 1], [2, 3], [1, 0]]] * 2, dtype=torch.uint8)
TABLE = torch.tensor([0, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("routes", "keywords", "error", "message"),
    [
        (PackedTensor.from_lengths(ROUTES, [2]), {}, TypeError, "routes must be a .* its values"),
        ([[[0, 1]]], {}, TypeError, "routes must be a tensor, got list"),
        (ROUTES.long(), {}, TypeError, "routes must be uint8, int16 or int32, got torch.int64"),
        (ROUTES[0], {}, ValueError, r"routes must be \[N, L, K\], got \(3, 2\)"),
        (ROUTES, {"num_experts": 4.0}, TypeError, "num_experts must be an int, got float"),
        (ROUTES, {"num_experts": True}, TypeError, "num_experts must be an int, got bool"),
        (ROUTES, {"num_experts": 0}, ValueError, r"num_experts must be from 1 to 2\*\*31 - 1"),
        (ROUTES, {"num_experts": 2**31}, ValueError, "num_experts must be from 1"),
        (ROUTES, {"layers": [0, 3]}, ValueError, r"layer 3 is not in \[0, 3\)"),
        (ROUTES, {"layers": range(-1, 2)}, ValueError, "layer -1 is not in"),
        (ROUTES, {"layers": [1.0]}, TypeError, "layers must be integers"),
        (ROUTES, {"layers": 1}, TypeError, "layers must be a range, a list or"),
        (ROUTES, {"layers": TABLE.long()}, ValueError, r"layers as a tensor must be \[J\] int32"),
        (ROUTES, {"layers": TABLE}, ValueError, r"a layer is outside \[0, 3\)"),
        (ROUTES, {"layers": -TABLE}, ValueError, r"a layer is outside \[0, 3\)"),
    ],
)
def test_validate_routes_rejects(routes, keywords, error, message):
    with pytest.raises(error, match="^validate_routes: " + message):
        validate_routes(routes, **{"num_experts": 4, **keywords})


def test_a_table_of_layers_on_a_device_is_read_when_checked(cuda):
    code = """
import torch
from packhorse.kernels.validate import *
routes = torch.zeros(2, 3, 1, dtype=torch.uint8, device="cuda")
for last in (2, 3):
    print("layer", last, flush=True)
    table = torch.tensor([0, last], dtype=torch.int32, device="cuda")
    assert validate_routes(routes, num_experts=4, layers=table).read() == {}
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PACKHORSE_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert result.stdout.startswith("layer 2\nlayer 3\n")
    assert "assert" in result.stderr
