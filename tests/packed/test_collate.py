"""pack_routes, pack_support, check_logprobs: what passes is packed exactly, what is wrong is named.

Oracle: Python lists. Every rejection is one line that names the function, the field, the trajectory
and the place, and comes before anything was made.
"""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed.collate import SupportRows, check_logprobs, pack_routes, pack_support

E, K, L = 8, 2, 3


def make_routes(num_rows: int, *, seed: int = 0, dtype=np.uint8, dense=()) -> np.ndarray:
    """[num_rows, L, K] ids below E, distinct in a row, none of them all zeros."""
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(E), (num_rows, L, 1)), axis=-1)[..., :K].astype(dtype)
    ids[:, list(dense)] = 0
    return ids


def pack(*routes, lengths=None, num_experts=E, topk=K, num_layers=L, **options):
    lengths = [len(ids) for ids in routes] if lengths is None else lengths
    return pack_routes(
        routes, lengths, num_experts=num_experts, topk=topk, num_layers=num_layers, **options
    )


def changed(place, value, num_rows=10, dtype=np.int32):
    ids = make_routes(num_rows, dtype=dtype)
    ids[place] = value
    return ids


# --- routes ---------------------------------------------------------------------------------------


@given(num_rows=st.lists(st.integers(0, 5), max_size=5), slack=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_routes_are_joined_in_order(num_rows, slack):
    routes = [make_routes(rows, seed=i) for i, rows in enumerate(num_rows)]
    packed = pack(*routes, lengths=[rows + slack for rows in num_rows])
    assert packed.lengths == tuple(num_rows)
    assert packed.row_shape == (L, K)
    assert [segment.tolist() for segment in packed] == [ids.tolist() for ids in routes]


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64, np.uint64, ">i4"]
)
def test_routes_of_any_integer_dtype_pack_alike(dtype):
    ids = make_routes(4)
    packed = pack(ids.astype(dtype), lengths=[5])
    assert packed.dtype == torch.uint8
    assert packed.values.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [
        (8, torch.uint8), (256, torch.uint8), (257, torch.int16), (384, torch.int16),
        (32768, torch.int16), (32769, torch.int32), (70000, torch.int32),
    ],
)  # fmt: skip
def test_the_number_of_experts_chooses_the_dtype(num_experts, dtype):
    ids = make_routes(3, dtype=np.int64)
    ids[0, 0, 0] = num_experts - 1
    packed = pack(ids, num_experts=num_experts)
    assert packed.dtype == dtype
    assert packed.values.tolist() == ids.tolist()


def test_the_uint16_of_an_engine_becomes_int16():
    ids = make_routes(3, dtype=np.uint16)
    ids[1, 1] = [299, 255]
    for given_ids in (ids, torch.from_numpy(ids)):
        packed = pack(given_ids, num_experts=300)
        assert packed.dtype == torch.int16
        assert packed.values.tolist() == ids.tolist()


def test_routes_of_any_memory_layout_pack_alike_and_stay_untouched():
    ids = make_routes(6)
    expected = ids.tolist()
    read_only = ids.copy()
    read_only.flags.writeable = False
    strided = np.repeat(ids, 2, axis=0)[::2]
    backwards = ids[::-1].copy()[::-1]
    for given_ids in (read_only, np.asfortranarray(ids), strided, backwards, torch.from_numpy(ids)):
        packed = pack(given_ids)
        assert packed.values.tolist() == expected
        packed.values.fill_(0)
        assert given_ids.tolist() == expected


def test_a_trajectory_may_have_no_rows_and_a_batch_no_trajectories():
    packed = pack(make_routes(0), make_routes(2), lengths=[4, 2])
    assert packed.lengths == (0, 2)
    empty = pack(lengths=[])
    assert (len(empty), empty.row_shape, empty.dtype) == (0, (L, K), torch.uint8)


def test_dense_layers_are_zeros_and_not_looked_at_for_repeats():
    ids = make_routes(5, dense=[0, 2])
    assert pack(ids, moe_layers=[1]).values.tolist() == ids.tolist()
    assert pack(np.zeros_like(ids), moe_layers=[]).num_rows == 5
    message = r"trajectory 0, row 0, layer 1: \[\d, \d\] in a dense layer"
    with pytest.raises(ValueError, match=message):
        pack(ids, moe_layers=[])


def test_zeros_of_one_expert_a_token_are_legal():
    ids = np.zeros((4, L, 1), dtype=np.uint8)
    assert pack(ids, topk=1).values.tolist() == ids.tolist()


def test_an_expert_may_be_zero_in_every_row():
    ids = np.tile(np.array([0, 3], dtype=np.uint8), (4, L, 1))
    assert pack(ids).values.tolist() == ids.tolist()


WHERE = "pack_routes: rollout_expert_indices of trajectory 1"
GOOD = make_routes(4)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (changed((7, 1, 0), 9), ValueError,
         ", row 7, layer 1: expert 9 is not below num_experts=8"),
        (changed((7, 1, 0), 8), ValueError,
         ", row 7, layer 1: expert 8 is not below num_experts=8"),
        (changed((9, 2, 1), 2**40, dtype=np.int64), ValueError,
         ", row 9, layer 2: expert 1099511627776 is not below num_experts=8"),
        (changed((2, 0, 1), -7), ValueError, ", row 2, layer 0: expert -7 is negative"),
        (changed((2, 0), [5, -1]), ValueError, r", row 2, layer 0: a partial -1, \[5, -1\]"),
        (changed((2, 0), [-1, -1]), ValueError, r", row 2, layer 0: no route \(all -1\); rows end"),
        (changed((3, 2), [5, 5]), ValueError,
         r", row 3, layer 2: expert 5 is repeated in \[5, 5\]"),
        (changed((3, 2), [0, 0]), ValueError,
         r", row 3, layer 2: expert 0 is repeated in \[0, 0\]"),
        (changed((slice(None), 1), 0), ValueError,
         ", row 0, layer 1: all zeros, as in all 10 rows: the engine captured nothing"),
        (np.zeros((5, L, K), dtype=np.uint8), ValueError, ", row 0, layer 0: all zeros"),
        (make_routes(12), ValueError, " has 12 rows for 11 tokens; a token has one at most"),
        (GOOD[:, :2], ValueError, r" has 2 layers, expected 3 \(shape \(4, 2, 2\)\)"),
        (GOOD[:, :, :1], ValueError, r" has 1 experts a token, expected 2 \(shape \(4, 3, 1\)\)"),
        (GOOD[0], ValueError, r" must be \[rows, L, K\], got shape \(3, 2\)"),
        (GOOD[None], ValueError, r" must be \[rows, L, K\], got shape \(1, 4, 3, 2\)"),
        (np.empty(0, dtype=np.uint8), ValueError, r" must be \[rows, L, K\], got shape \(0,\)"),
        (GOOD.astype(np.float32), TypeError, " must hold integers, got float32"),
        (GOOD.astype(np.bool_), TypeError, " must hold integers, got bool"),
        (GOOD.astype(object), TypeError, " must hold integers, got object"),
        (torch.from_numpy(GOOD).float(), TypeError, " must hold integers, got torch.float32"),
        (torch.from_numpy(GOOD).bool(), TypeError, " must hold integers, got torch.bool"),
        (torch.from_numpy(GOOD).to("meta"), TypeError, " is on meta; it must be on the host"),
        (GOOD.tolist(), TypeError, " must be an array or a tensor, got list"),
        (None, TypeError, r" is None; pass \[0, L, K\] where nothing was captured"),
    ],
)  # fmt: skip
def test_routes_are_refused_by_trajectory_row_and_layer(ids, error, message):
    with pytest.raises(error, match=f"^{WHERE}{message}") as caught:
        pack(make_routes(3), ids, make_routes(2), lengths=[3, 11, 2])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize(("row", "layer"), [(0, 0), (29999, 2), (21845, 0), (21845, 1)])
def test_the_one_bad_row_of_many_is_found(row, layer, dtype):
    ids = np.tile(make_routes(100, dtype=dtype, dense=[1]), (300, 1, 1))
    ids[:, 1] = ids[:, 2]
    ids[row, layer, 1] = ids[row, layer, 0]
    with pytest.raises(
        ValueError, match=f"row {row}, layer {layer}: expert {ids[row, layer, 0]} is"
    ):
        pack(ids)


def test_the_layer_is_named_on_the_captured_axis():
    ids = make_routes(4, dense=[0])
    ids[2, 2] = 5
    with pytest.raises(ValueError, match="row 2, layer 2: expert 5 is repeated"):
        pack(ids, moe_layers=[1, 2])
    ids = make_routes(4, dense=[0, 2])
    with pytest.raises(ValueError, match="layer 2: all zeros"):
        pack(ids, moe_layers=[2, 1])


@pytest.mark.parametrize("topk", [2, 3, 8, 22])
def test_repeats_are_found_at_any_two_columns(topk):
    rng = np.random.default_rng(topk)
    ids = rng.permuted(np.tile(np.arange(64), (40, 2, 1)), axis=-1)[..., :topk]
    assert pack(ids, num_experts=64, topk=topk, num_layers=2).num_rows == 40
    for first in range(topk):
        for second in range(first):
            wrong = ids.copy()
            wrong[17, 1, first] = expert = wrong[17, 1, second]
            with pytest.raises(ValueError, match=f"row 17, layer 1: expert {expert} is repeated"):
                pack(wrong, num_experts=64, topk=topk, num_layers=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": [4, 4]}, ValueError, "has 1 trajectories, lengths has 2"),
        ({"lengths": [4.0]}, TypeError, r"lengths\[0\] must be an integer"),
        ({"lengths": [-1]}, ValueError, "lengths of trajectory 0 is negative: -1"),
        ({"num_experts": 0}, ValueError, "num_experts must be positive"),
        ({"num_experts": 1}, ValueError, "topk=2 is above num_experts=1"),
        ({"num_experts": 2**31 + 1}, ValueError, "2147483649 experts do not fit int32"),
        ({"num_layers": 10**12}, ValueError, "1000000000000 layers do not fit int32"),
        ({"lengths": np.array([2**64 - 1], dtype=np.uint64)}, ValueError, "past int64"),
        ({"lengths": range(2**40)}, ValueError, "range of more than 2147483647"),
        ({"topk": True}, TypeError, "topk must be an integer"),
        ({"num_layers": -1}, ValueError, "num_layers must not be negative"),
        ({"moe_layers": [3]}, ValueError, r"moe_layers has 3, not in \[0, 3\)"),
        ({"moe_layers": [-1]}, ValueError, "moe_layers has -1"),
        ({"moe_layers": [1, 1]}, ValueError, "moe_layers names a layer twice"),
    ],
)
def test_wrong_arguments_of_pack_routes_are_refused(options, error, message):
    with pytest.raises(error, match=f"^pack_routes: .*{message}"):
        pack(GOOD, **options)


def test_routes_come_as_one_array_a_trajectory():
    with pytest.raises(TypeError, match="must be a sequence of one item a trajectory, got ndarray"):
        pack_routes(GOOD, [1, 1, 1, 1], num_experts=E, topk=K, num_layers=L)


def test_a_long_trajectory_is_checked_in_no_time():
    rng = np.random.default_rng(0)
    ids = rng.random((1000, 48, 128)).argsort(axis=-1)[..., :8].astype(np.uint8)
    ids = np.tile(ids, (32, 1, 1))
    started = time.perf_counter()
    pack(ids, num_experts=128, topk=8, num_layers=48)
    assert time.perf_counter() - started < 1.0  # 0.035 s on an idle core


# --- support --------------------------------------------------------------------------------------

V = 100


@st.composite
def supports(draw):
    """Rows of distinct ids, some of them empty, and for each a sampled id."""
    ids = st.integers(0, V - 1)
    rows = st.lists(ids, max_size=6, unique=True)
    support = draw(st.lists(st.lists(rows, max_size=4), max_size=4))
    sampled = [[draw(st.sampled_from(row or [V])) for row in rows] for rows in support]
    return support, sampled


def padded(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


def csr(rows: list[list[int]]) -> SupportRows:
    offsets = np.cumsum([0, *map(len, rows)])
    return SupportRows(np.array([token for row in rows for token in row], dtype=np.int32), offsets)


@given(batch=supports(), extra=st.none() | st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_support_rows_are_joined_and_filled_with_minus_one(batch, extra):
    support, sampled = batch
    widest = max([1, *(len(row) for rows in support for row in rows)])
    width = widest + (extra or 0)
    options = {"vocab_size": V, "width": None if extra is None else width}
    forms = [
        support,
        [[np.array(row, dtype=np.int64) for row in rows] for rows in support],
        [csr(rows) for rows in support],
        [np.array(padded(rows, 7), dtype=np.int64).reshape(-1, 7) for rows in support],
        [torch.tensor(padded(rows, 7), dtype=torch.int32).reshape(-1, 7) for rows in support],
        csr([row for rows in support for row in rows]),
    ]
    for given_support in forms:
        packed = pack_support(given_support, sampled, **options)
        assert packed.dtype == torch.int32
        assert packed.row_shape == (width,)
        assert packed.lengths == tuple(map(len, support))
        assert [segment.tolist() for segment in packed] == [padded(rows, width) for rows in support]


def test_the_order_of_candidates_is_kept_and_gaps_are_closed():
    packed = pack_support([[[5, -1, 3, -1], [-1, -1], [-1, 2]]], [[3, 9, 2]], vocab_size=V)
    assert packed.values.tolist() == [[5, 3], [-1, -1], [2, -1]]


def test_no_response_token_is_an_empty_segment_of_the_common_width():
    packed = pack_support([[], [[1, 2, 3]]], [[], [2]], vocab_size=V)
    assert packed.lengths == (0, 1)
    assert packed[0].shape == (0, 3)
    assert pack_support([[]], [[]], vocab_size=V, width=20)[0].shape == (0, 20)
    assert pack_support([], [], vocab_size=V).row_shape == (1,)


def test_an_empty_row_needs_no_sampled_id():
    packed = pack_support([[[], [4]]], [[V + 5, 4]], vocab_size=V)
    assert packed.values.tolist() == [[-1], [4]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2], [3]], r", row 1: the sampled id 2 is not among its 1 ids"),
        ([[1], [2, V]], f", row 1: id {V} is not below vocab_size={V}"),
        ([[1], [2, 2**33]], f", row 1: id {2**33} is not below"),
        ([[1, -2], [2]], ", row 0: id -2 is negative"),
        ([[1], [7, 2, 7]], ", row 1: id 7 is repeated"),
        ([[1, 4, 5, 6], [2]], ", row 0: 4 ids do not fit width=3"),
        ([[1]], " has 1 rows for 2 response tokens"),
        ([[1], [2], [3]], " has 3 rows for 2 response tokens"),
    ],
)
def test_support_is_refused_by_trajectory_and_row(rows, message):
    where = "^pack_support: rollout_sample_support of trajectory 2"
    before, after = [[8, 9]], [[3]]
    sampled = [[8], [], [1, 2], [3]]
    arrays = [np.array(row) for row in rows]
    for form in (rows, tuple(map(tuple, rows)), arrays, csr_of_int64(rows)):
        with pytest.raises(ValueError, match=where + message) as caught:
            pack_support([before, [], form, after], sampled, vocab_size=V, width=3)
        assert "\n" not in str(caught.value)
    if "response tokens" not in message:
        joined = csr_of_int64([*before, *rows, *after])
        with pytest.raises(ValueError, match=where + message):
            pack_support(joined, sampled, vocab_size=V, width=3)


def csr_of_int64(rows):
    return SupportRows(np.array([token for row in rows for token in row]), csr_offsets(rows))


def csr_offsets(rows):
    return np.cumsum([0, *map(len, rows)])


IDS = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("support", "sampled", "error", "message"),
    [
        ([[[1.0]]], [[1]], TypeError, r"trajectory 0, row 0\[0\] must be an integer, got float"),
        ([[[None]]], [[1]], TypeError, r"trajectory 0, row 0\[0\] must be an integer"),
        ([[[True]]], [[1]], TypeError, r"trajectory 0, row 0\[0\] must be an integer, got True"),
        ([[1]], [[1]], TypeError, "trajectory 0, row 0 must be a list of integers, got int"),
        ([["12"]], [[1]], TypeError, "trajectory 0, row 0 must be a list of integers, got str"),
        (["12"], [[1, 2]], TypeError, "trajectory 0 must be a sequence of rows, got str"),
        ([None], [[1]], TypeError, "trajectory 0 must be a sequence of rows, got NoneType"),
        (None, [[1]], TypeError, "must be a sequence of one item a trajectory, got NoneType"),
        ([[[1]]], [[1], [2]], ValueError, "has 1 trajectories, sampled_ids has 2"),
        ([IDS], [[1]], ValueError,
         r"trajectory 0 must be \[response tokens, C\], got shape \(3,\)"),
        ([torch.ones(1, 1)], [[1]], TypeError, "must hold integers, got torch.float32"),
        ([torch.ones(1, 1, device="meta")], [[1]], TypeError, "is on meta"),
        (SupportRows(IDS, np.array([0, 2])), [[1]], ValueError, "must rise from 0 to its 3 ids"),
        (SupportRows(IDS, np.array([1, 3])), [[1]], ValueError, "must rise from 0 to its 3 ids"),
        (SupportRows(IDS, np.array([0, 2, 1, 3])), [[1] * 3], ValueError, "must rise from 0"),
        (SupportRows(IDS, np.array([], dtype=int)), [[1]], ValueError, "must rise from 0"),
        (SupportRows(IDS, np.array([0, 3])), [[1], [2]], ValueError,
         "has 1 rows for 2 response tokens of 2 trajectories"),
        (SupportRows(IDS, np.array([0, 2**63 - 1, -2, 3])), [[1] * 3], ValueError, "must rise"),
        (SupportRows(IDS, np.array([0, 2**63 - 1, 2**63 - 1, 3])), [[1] * 3], ValueError,
         "must rise"),
        (SupportRows(IDS, np.array([0, 2**64 - 1, 3], dtype=np.uint64)), [[1] * 2], ValueError,
         r"row_offsets holds an integer past int64, 18446744073709551615 at \[1\]"),
        (SupportRows(np.array([1, 2**64 - 1], dtype=np.uint64), np.array([0, 2])), [[1]],
         ValueError, r"token_ids holds an integer past int64, 18446744073709551615 at \[1\]"),
        ([np.array([[1, 2], [1, 2**64 - 1]], dtype=np.uint64)], [[1, 1]], ValueError,
         r"trajectory 0 holds an integer past int64, 18446744073709551615 at \[1, 1\]"),
        ([[np.array([1, 2**64 - 1], dtype=np.uint64)]], [[1]], ValueError,
         "trajectory 0, row 0 holds an integer past int64"),
        ([np.empty((2**40, 0), dtype=np.int32)], [[1]], ValueError,
         "trajectory 0 has 1099511627776 rows for 1 response tokens"),
        ([torch.ones(1, 1).bfloat16()], [[1]], TypeError, "must hold integers, got torch.bfloat16"),
        ([torch.ones(1, 1).int().to_sparse()], [[1]], TypeError, "must be a dense tensor"),
        ([[torch.ones(1).bfloat16()]], [[1]], TypeError, "row 0 must hold integers"),
        ([[[1]]], [np.array([2**64 - 1], dtype=np.uint64)], ValueError,
         "sampled_ids of trajectory 0 holds an integer past int64"),
        ([[[1]]], 3, TypeError, "sampled_ids must be a sequence"),
        ([[[1]]], [[1.5]], TypeError, "sampled_ids of trajectory 0.* must be an integer"),
    ],
)  # fmt: skip
def test_malformed_support_is_refused(support, sampled, error, message):
    with pytest.raises(error, match=f"^pack_support: .*{message}"):
        pack_support(support, sampled, vocab_size=V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be positive"),
        ({"vocab_size": 2**31}, "do not fit int32"),
        ({"vocab_size": V, "width": 0}, "width must be positive"),
        ({"vocab_size": V, "max_bytes": -1}, "max_bytes must not be negative"),
    ],
)
def test_wrong_arguments_of_pack_support_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^pack_support: .*{message}"):
        pack_support([[[1]]], [[1]], **options)


@pytest.mark.parametrize("dtype", [np.uint64, ">i4", ">u8", np.int8])
def test_support_of_any_integer_dtype_packs_alike(dtype):
    ids = np.array([3, 4, 5, 6])
    rows = SupportRows(ids.astype(dtype), np.array([0, 1, 1, 4]).astype(dtype))
    packed = pack_support(rows, [[3, 0, 5]], vocab_size=V)
    assert packed.values.tolist() == [[3, -1, -1], [-1, -1, -1], [4, 5, 6]]
    grid = ids.reshape(2, 2).astype(dtype)
    assert pack_support([grid], [[3, 6]], vocab_size=V).values.tolist() == [[3, 4], [5, 6]]


def test_one_row_of_the_whole_vocabulary_does_not_widen_many_rows_without_bound():
    # 20,000 rows of 151,936 ids would be 12 GB
    rows = [[7]] * 20_000
    support = [rows[:9], [*rows[9:12], list(range(151_936)), *rows[13:]]]
    sampled = [[7] * len(part) for part in support]
    where = (
        "^pack_support: rollout_sample_support of trajectory 1, row 3: 151936 ids are its widest"
    )
    with pytest.raises(
        ValueError, match=where + ".* 12154880000 bytes, above max_bytes=4294967296"
    ):
        pack_support(support, sampled, vocab_size=151_936)


def test_the_bound_on_bytes_is_the_callers():
    assert pack_support([[[1, 2], [3]]], [[1, 3]], vocab_size=V, max_bytes=16).num_rows == 2
    for width in (None, 2):
        with pytest.raises(ValueError, match="16 bytes, above max_bytes=15"):
            pack_support([[[1, 2], [3]]], [[1, 3]], vocab_size=V, width=width, max_bytes=15)


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs_come_back_as_float32():
    values = [-0.5, 0.0, -9999.0]
    forms = [
        values, tuple(values), np.array(values, dtype=np.float64), np.array(values, dtype=">f4"),
        np.array([-9.0, *values])[1:], torch.tensor(values), torch.tensor(values).bfloat16(),
    ]  # fmt: skip
    for given_values, checked in zip(forms, check_logprobs(forms, [3] * len(forms)), strict=True):
        assert checked.dtype == np.float32
        assert checked.flags.c_contiguous
        expected = torch.tensor(values).bfloat16().tolist() if given_values is forms[-1] else values
        assert checked.tolist() == expected
    assert check_logprobs([[], np.empty(0)], [0, 0])[0].shape == (0,)
    assert check_logprobs([], []) == []


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([-0.1, float("nan")], ValueError, ", token 1: nan is not finite"),
        ([-0.1, None], ValueError, ", token 1: nan is not finite"),
        ([float("-inf"), -0.1], ValueError, ", token 0: -inf is not finite"),
        ([-0.1, float("inf")], ValueError, ", token 1: inf is not finite"),
        (np.array([-1e300, 0.0]), ValueError, ", token 0: -inf is not finite"),
        ([-0.1, -(10**400)], ValueError, ", token 1: -inf is not finite"),
        ([10**400, -0.1], ValueError, ", token 0: inf is not finite"),
        ([[-(10**400)], -0.1], TypeError, " must hold floats only"),
        ([torch.zeros(1, requires_grad=True)] * 2, TypeError, " must hold floats only"),
        (torch.zeros(2).to_sparse(), TypeError, " must hold floats, got torch.float32, torch.sp"),
        ([-0.1, 1e-6], ValueError, ", token 1: 9.99.*e-07 is positive"),
        ([-0.1], ValueError, r" has shape \(1,\), expected \[2\]"),
        ([-0.1] * 3, ValueError, r" has shape \(3,\), expected \[2\]"),
        (np.full((2, 1), -0.1), ValueError, r" has shape \(2, 1\), expected \[2\]"),
        (np.array([0, -1]), TypeError, " must hold floats, got int64"),
        (torch.tensor([0, -1]), TypeError, " must hold floats, got torch.int64"),
        (torch.tensor([0.0, -1.0], device="meta"), TypeError, " is on meta"),
        (["a", "b"], TypeError, " must hold floats only"),
        ([[-0.1], [-0.1, -0.2]], TypeError, " must hold floats only"),
        (None, TypeError, " must be an array or list of floats, got NoneType"),
    ],
)
def test_logprobs_are_refused_by_trajectory_and_token(values, error, message):
    where = "^check_logprobs: rollout_logprobs of trajectory 1"
    with pytest.raises(error, match=where + message) as caught:
        check_logprobs([[-0.5], values], [1, 2])
    assert "\n" not in str(caught.value)


def test_as_many_logprobs_as_trajectories_and_no_length_below_0():
    with pytest.raises(ValueError, match="has 1 trajectories, response_lengths has 2"):
        check_logprobs([[-0.5]], [1, 1])
    with pytest.raises(ValueError, match="response_lengths of trajectory 1 is negative: -2"):
        check_logprobs([[-0.5], []], [1, -2])
