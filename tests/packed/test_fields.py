"""The field registry, the router's padding mask, and stored rows for every token.

Oracle: worked cases, and loops over trajectories, columns and rows.
"""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed.batch import Batch
from packhorse.packed.fields import (
    DUMMY_ROUTE,
    PACKED_FIELDS,
    FieldRegistry,
    PackedField,
    materialize,
    router_padding_mask,
)
from packhorse.packed.tensor import PackedTensor
from tests.packed import ragged_model
from tests.packed.helpers import as_lists, make_packed

ROUTES, SUPPORT = "rollout_expert_indices", "rollout_sample_support"
ENTROPY = PackedField("rollout_entropy", "token", (torch.float32,), (), fill=0.0)


def make_routes(captured, num_layers=2, topk=2, num_experts=6, dtype=torch.uint8, device="cpu"):
    """Each row K distinct experts that tell the row, none of them the dummy 0, 1, ..."""
    rows = [
        [[2 + (row + layer + k) % (num_experts - 2) for k in range(topk)]
         for layer in range(num_layers)]
        for row in range(sum(captured))
    ]  # fmt: skip
    values = torch.tensor(rows, dtype=dtype, device=device).view(-1, num_layers, topk)
    return PackedTensor.from_lengths(values, captured)


# --- the table ------------------------------------------------------------------------------------


def test_the_registry_is_the_table_of_the_design():
    assert list(PACKED_FIELDS) == [ROUTES, SUPPORT]
    routes, support = PACKED_FIELDS[ROUTES], PACKED_FIELDS[SUPPORT]
    assert (routes.domain, support.domain) == ("captured", "response")
    assert routes.dtypes == (torch.uint8, torch.int16, torch.int32)
    assert support.dtypes == (torch.int32,)
    assert (routes.row_shape, support.row_shape) == ((None, None), (None,))
    assert (routes.fill, support.fill) == (DUMMY_ROUTE, -1)
    assert (routes.ragged, support.ragged) == (False, True)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_padding_and_synthetic_rows_follow_the_domain(count, device):
    routes = make_routes([3, 2, 3], device=device)
    support = make_packed([2, 0, 2], torch.int32, (4,), device)
    entropy = make_packed([3, 2, 3], torch.float32, (), device)
    for rows in (PACKED_FIELDS[ROUTES].padding(routes, count),
                 PACKED_FIELDS[ROUTES].synthetic(routes, count),
                 PACKED_FIELDS[SUPPORT].synthetic(support, count)):  # fmt: skip
        assert as_lists(rows) == [[]] * count
    assert PACKED_FIELDS[ROUTES].padding(routes, count).row_shape == routes.row_shape
    padded = PACKED_FIELDS[SUPPORT].padding(support, count)
    assert as_lists(padded) == [[[-1] * 4] * 2] * count
    assert (padded.dtype, padded.device) == (torch.int32, support.device)
    assert as_lists(ENTROPY.padding(entropy, count)) == [[0.0] * 3] * count
    assert as_lists(ENTROPY.synthetic(entropy, count)) == [[0.0]] * count
    free = PackedField("notes", "any", (torch.float32,), (), fill=0.0)
    assert as_lists(free.padding(entropy, count)) == as_lists(free.synthetic(entropy, count))
    assert as_lists(free.padding(entropy, count)) == [[]] * count


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("first", [[[5], [], [6, 7]], [[]], []])
def test_padding_and_synthetic_rows_of_a_ragged_support_are_empty(first, count, device):
    support = ragged_model.build([first, [[8, 9]]], device)
    rule = PACKED_FIELDS[SUPPORT]
    rule.check("f", support)
    rule.check_lengths("f", support, [9, 9], [len(first), 1])
    padded = rule.padding(support, count)
    ragged_model.check(padded, [[[]] * len(first)] * count)
    ragged_model.check(rule.synthetic(support, count), [[]] * count)
    assert padded.device == support.device
    assert as_lists(padded.to_padded(4)) == [[[-1] * 4] * len(first)] * count
    with pytest.raises(ValueError, match=f"^f: {SUPPORT} of trajectory 1 has 1 rows for 2 respons"):
        rule.check_lengths("f", support, [9, 9], [len(first), 2])
    with pytest.raises(TypeError, match=f"^f: {ROUTES} must be a PackedTensor, got PackedRagged"):
        PACKED_FIELDS[ROUTES].check("f", support)
    with pytest.raises(TypeError, match=f"^f: {SUPPORT} must be a PackedTensor or a PackedRagged,"):
        rule.check("f", support.values)


def test_the_rows_of_padding_are_those_of_trajectory_0_when_it_has_none():
    support = make_packed([0, 2], torch.int32, (4,))
    assert as_lists(PACKED_FIELDS[SUPPORT].padding(support, 2)) == [[], []]
    assert as_lists(PACKED_FIELDS[SUPPORT].padding(support[:0], 1)) == [[]]
    ragged = ragged_model.build([])
    ragged_model.check(PACKED_FIELDS[SUPPORT].padding(ragged, 2), [[], []])


# --- a field of the user's own --------------------------------------------------------------------


def test_a_registry_with_a_field_more_leaves_the_old_one_as_it_was():
    fields = PACKED_FIELDS.with_field(ENTROPY)
    assert list(fields) == [ROUTES, SUPPORT, "rollout_entropy"]
    assert "rollout_entropy" not in PACKED_FIELDS
    assert fields.rule("f", "rollout_entropy") is ENTROPY
    assert fields.merge(PACKED_FIELDS) == fields
    assert PACKED_FIELDS.merge(fields) == fields
    assert PACKED_FIELDS.merge(PACKED_FIELDS) is PACKED_FIELDS
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(fields, protocol=protocol)) == fields
    assert repr(fields) == f"FieldRegistry({ROUTES}, {SUPPORT}, rollout_entropy)"


def test_rules_that_say_the_same_are_equal_a_fill_of_nan_too():
    def rule(fill):
        return PackedField("rollout_values", "token", (torch.float32,), (), fill=fill)

    one, other = rule(float("nan")), pickle.loads(pickle.dumps(rule(float("nan"))))
    assert one == other
    assert hash(one) == hash(other)
    assert one != rule(0.0)
    assert one != "rollout_values"
    fields = PACKED_FIELDS.with_field(one)
    assert fields.merge(PACKED_FIELDS.with_field(other)) == fields
    values = PackedTensor.from_lengths(torch.rand(3), [1, 2])
    batch = Batch({"rollout_values": values}, registry=fields)
    assert len(Batch.cat([batch, pickle.loads(pickle.dumps(batch, protocol=5))])) == 4


def test_a_fixed_row_shape_is_held_to():
    flags = PackedField("flags", "any", (torch.bool,), (3, None), fill=False)
    flags.check("f", make_packed([2], torch.bool, (3, 7)))
    with pytest.raises(ValueError, match=r"^f: flags must have rows \[3, \*\], got \[2, 7\]"):
        flags.check("f", make_packed([2], torch.bool, (2, 7)))
    with pytest.raises(ValueError, match=r"^f: flags must have rows \[3, \*\], got \[3\]"):
        flags.check("f", make_packed([2], torch.bool, (3,)))
    with pytest.raises(TypeError, match=r"^f: flags must be torch.bool, got torch.uint8"):
        flags.check("f", make_packed([2], torch.uint8, (3, 1)))


@pytest.mark.parametrize(
    ("name", "rows", "lengths", "responses", "error", "message"),
    [
        (ROUTES, [3, 2], [3, 1], None, ValueError, "of trajectory 1 has 2 rows for 1 tokens; a to"),
        (SUPPORT, [3, 2], [4, 4], [3, 1], ValueError, "of trajectory 1 has 2 rows for 1 response"),
        (SUPPORT, [3, 2], [4, 4], [4, 2], ValueError, "of trajectory 0 has 3 rows for 4 response"),
        (SUPPORT, [3, 2], [4, 4], None, TypeError, "needs response_lengths"),
        (SUPPORT, [3, 2], [4, 4], [3], ValueError, "has 2 trajectories, response_lengths has 1"),
        (ROUTES, [3, 2], [3, 2, 1], None, ValueError, "has 2 trajectories, lengths has 3"),
        ("rollout_entropy", [3, 2], [3, 3], None, ValueError, "of trajectory 1 has 2 rows for 3 t"),
    ],
)
def test_row_counts_are_held_to_the_domain(name, rows, lengths, responses, error, message):
    rule = PACKED_FIELDS.with_field(ENTROPY)[name]
    with pytest.raises(error, match=f"^f: {name} {message}"):
        rule.check_lengths("f", make_packed(rows), lengths, responses)


def test_row_counts_that_the_domain_allows_pass():
    PACKED_FIELDS[ROUTES].check_lengths("f", make_packed([0, 2]), [3, 2])
    PACKED_FIELDS[SUPPORT].check_lengths("f", make_packed([0, 2]), [3, 2], [0, 2])
    ENTROPY.check_lengths("f", make_packed([3, 2]), [3, 2])
    PackedField("n", "any", (torch.int32,), (2,), 0).check_lengths("f", make_packed([9]), [3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PackedField("", "any", (torch.bool,), (), 0), TypeError, "PackedField: name"),
        (lambda: PackedField("x", "all", (torch.bool,), (), 0), ValueError, "PackedField: x: doma"),
        (lambda: PackedField("x", "any", (), (), 0), TypeError, "PackedField: x: dtypes must hold"),
        (lambda: PackedField("x", "any", ("int",), (), 0), TypeError, "PackedField: x: dtypes"),
        (lambda: PackedField("x", "any", torch.bool, (), 0), TypeError, "x: dtypes must be a tup"),
        (lambda: PackedField("x", "any", (torch.bool,), [2], 0), TypeError, "x: row_shape must be"),
        (lambda: PackedField("x", "any", (torch.bool,), (-1,), 0), ValueError, "a size of row_sha"),
        (lambda: PackedField("x", "any", (torch.bool,), (2.0,), 0), TypeError, "a size of row_sha"),
        (lambda: PackedField("x", "any", (torch.uint8,), (), -1), ValueError, "x: fill=-1 does no"),
        (lambda: PackedField("x", "any", (torch.uint8,), (), None), TypeError, "x: fill must be a"),
        (lambda: PackedField("x", "token", (torch.uint8,), (1, 2), DUMMY_ROUTE), ValueError,
         "x: dummy routes need"),
        (lambda: PackedField("x", "captured", (torch.uint8,), (2,), DUMMY_ROUTE), ValueError,
         "x: dummy routes need"),
        (lambda: PackedField("x", "captured", (torch.half,), (1, 2), DUMMY_ROUTE), TypeError,
         "x: dummy routes need integer"),
        *[(lambda dtype=dtype, shape=shape, fill=fill: PackedField(
              "x", "any", (dtype,), shape, fill, ragged=True), ValueError, "x: ragged needs rows")
          for dtype, shape, fill in ((torch.int64, (None,), -1), (torch.int32, (4,), -1),
                                     (torch.int32, (None, None), -1), (torch.int32, (None,), 0))],
        (lambda: PackedField("x", "any", (torch.int32,), (None,), -1, ragged=1), TypeError,
         "x: ragged must be a bool, got int"),
        (lambda: FieldRegistry(["routes"]), TypeError, "FieldRegistry: a rule must be a PackedFie"),
        (lambda: FieldRegistry([ENTROPY, ENTROPY]), ValueError, "rollout_entropy is registered al"),
        (lambda: PACKED_FIELDS.with_field(PACKED_FIELDS[SUPPORT]), ValueError, "is registered alr"),
        (lambda: PACKED_FIELDS.rule("f", "x"), ValueError, "f: x is packed and has no registered"),
        (lambda: FieldRegistry([ENTROPY]).merge(FieldRegistry(
            [PackedField("rollout_entropy", "any", (torch.float32,), (), 0)])), ValueError,
         "rollout_entropy has two different rules"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- the mask -------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_mask_matches_loops(data):
    lengths = data.draw(st.lists(st.integers(0, 5), max_size=5))
    captured = [data.draw(st.integers(0, length)) for length in lengths]
    width = max(lengths, default=0) + data.draw(st.integers(0, 2))
    first = [data.draw(st.integers(0, width - length)) for length in lengths]
    if data.draw(st.booleans()):
        first, given_first = [width - length for length in lengths], None
    else:
        given_first = first
    extra = torch.rand(len(lengths), width) < 0.2
    expected = [
        [not first[i] <= s < first[i] + captured[i] for s in range(width)]
        for i in range(len(lengths))
    ]
    rows = make_routes(captured) if data.draw(st.booleans()) else captured
    mask = router_padding_mask(rows, lengths, width=width, first_columns=given_first)
    assert (mask.dtype, mask.shape) == (torch.bool, (len(lengths), width))
    assert mask.tolist() == expected
    both = router_padding_mask(
        rows, lengths, width=width, first_columns=given_first, explicit=extra
    )
    assert torch.equal(both, mask | extra)


def test_the_mask_is_left_padded_and_as_wide_as_the_longest():
    assert router_padding_mask([1, 2], [2, 3]).tolist() == [
        [True, False, True],
        [False, False, True],
    ]


def test_the_mask_reads_no_device():
    routes = make_routes([1, 2]).to("meta")
    assert router_padding_mask(routes, [2, 3]).device.type == "meta"
    explicit = torch.empty(2, 3, dtype=torch.bool, device="meta")
    assert router_padding_mask([1, 2], [2, 3], explicit=explicit).device.type == "meta"
    assert router_padding_mask(routes, [2, 3], device="cpu").device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        (([3], [2]), {}, ValueError, f"{ROUTES} of trajectory 0 has 3 rows for 2 tokens"),
        (([0, -1], [2, 2]), {}, ValueError, "of trajectory 1 has -1 rows"),
        (([1], [2, 2]), {}, ValueError, "captured has 1 trajectories, lengths 2"),
        (([1], [-1]), {}, ValueError, "length of trajectory 0 is negative"),
        (([1], [2]), {"width": 1}, ValueError, "trajectory 0 of 2 tokens from column -1 does not"),
        (([1], [2]), {"width": 3, "first_columns": [2]}, ValueError, "from column 2 does not fit"),
        (([1], [2]), {"first_columns": [0, 0]}, ValueError, "first_columns has 2 trajectories"),
        (([1], [2]), {"explicit": torch.ones(1, 2)}, TypeError, "explicit must be a bool tensor"),
        (([1], [2]), {"explicit": torch.ones(1, 3) > 0}, ValueError, r"explicit must be \[1, 2\]"),
        (([1], [2]), {"explicit": torch.ones(1, 2) > 0, "device": "meta"}, ValueError,
         "explicit is on cpu"),
        (([1.0], [2]), {}, TypeError, r"captured\[0\] must be an integer"),
        (([1], torch.empty(1, dtype=torch.int64, device="meta")), {}, TypeError, "lengths is on"),
    ],
)  # fmt: skip
def test_the_mask_refuses(arguments, keywords, error, message):
    with pytest.raises(error, match=f"^router_padding_mask: .*{message}"):
        router_padding_mask(*arguments, **keywords)


# --- materialize ----------------------------------------------------------------------------------


@given(data=st.data(), spread=st.booleans())
@settings(max_examples=60, deadline=None)
def test_materialized_rows_match_loops(data, spread):
    lengths = data.draw(st.lists(st.integers(0, 5), max_size=5))
    captured = [data.draw(st.integers(0, length)) for length in lengths]
    topk, experts, ep_size, offset = 3, 12, 4, data.draw(st.integers(0, 20))
    routes = make_routes(captured, num_layers=2, topk=topk, num_experts=experts)
    expected, masked, assignment = [], [], offset
    for segment, length in zip(as_lists(routes), lengths, strict=True):
        rows = list(segment)
        while len(rows) < length:
            chosen = []
            for k in range(topk):
                a = assignment + k
                chosen.append(a % ep_size * 3 + a // ep_size % 3 if spread else k)
            assignment += topk
            rows.append([chosen] * 2)
        expected.append(rows)
        masked.append([False] * len(segment) + [True] * (length - len(segment)))
    full, mask = materialize(
        routes, lengths, num_experts=experts, dummy="spread" if spread else "constant",
        ep_size=ep_size, spread_offset=offset,
    )  # fmt: skip
    assert as_lists(full) == expected
    assert as_lists(mask) == masked
    assert (full.dtype, mask.dtype) == (torch.uint8, torch.bool)
    assert full.lengths == mask.lengths == tuple(lengths)


def test_the_mask_of_materialized_rows_is_that_of_the_captured_ones():
    routes, lengths = make_routes([3, 0, 2]), [4, 2, 2]
    full, mask = materialize(routes, lengths, num_experts=6)
    explicit = mask.to_padded(True, 5, side="left")
    derived = router_padding_mask(full, lengths, width=5, explicit=explicit)
    assert torch.equal(derived, router_padding_mask(routes, lengths, width=5))


@pytest.mark.parametrize(
    ("dtype", "num_experts", "expected"),
    [
        (torch.uint8, 256, torch.uint8), (torch.uint8, 384, torch.int16),
        (torch.uint8, 40000, torch.int32), (torch.int16, 40000, torch.int32),
        (torch.int32, 8, torch.int32),
    ],
)  # fmt: skip
def test_materialized_rows_hold_every_expert(dtype, num_experts, expected, device):
    routes = make_routes([1, 0], dtype=dtype, device=device)
    full, _ = materialize(
        routes, [1, 2], num_experts=num_experts, dummy="spread", spread_offset=num_experts - 2
    )
    assert full.dtype == expected
    assert full[0].tolist() == routes[0].tolist()
    assert full[1].tolist() == [
        [[num_experts - 2, num_experts - 1]] * 2,
        [[0, 1]] * 2,
    ]


def test_materialize_reads_no_device():
    full, mask = materialize(make_routes([1, 0]).to("meta"), [2, 1], num_experts=6)
    assert (full.device.type, mask.device.type) == ("meta", "meta")
    assert full.lengths == mask.lengths == (2, 1)


@pytest.mark.parametrize(
    ("routes", "lengths", "keywords", "error", "message"),
    [
        (make_routes([3]), [2], {}, ValueError, "of trajectory 0 has 3 rows for 2 tokens"),
        (make_routes([1]), [2, 2], {}, ValueError, "has 1 trajectories, lengths has 2"),
        (make_routes([1]), [2], {"num_experts": 1}, ValueError, "2 experts a token, num_experts=1"),
        (make_routes([1, 2], 1), [2, 2], {"num_experts": 5}, ValueError,
         f"{ROUTES} of trajectory 1, row 1: an expert is outside"),
        (make_routes([1]), [2], {"dummy": "spread", "ep_size": 4}, ValueError, "ep_size=4 does"),
        (make_routes([1]).values, [2], {}, TypeError, "routes must be a PackedTensor, got Tensor"),
        (make_packed([1], torch.int64, (2, 2)), [2], {}, TypeError, f"{ROUTES} must be torch"),
        (make_packed([1], torch.uint8, (2,)), [2], {}, ValueError, f"{ROUTES} must have rows"),
    ],
)  # fmt: skip
def test_materialize_refuses(routes, lengths, keywords, error, message):
    with pytest.raises(error, match=f"^materialize: .*{message}"):
        materialize(routes, lengths, **{"num_experts": 6, **keywords})
