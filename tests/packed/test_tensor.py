"""PackedTensor.

Oracle: a batch is a Python list of segments, a segment a list of rows, a row what ``tolist`` gives;
every operation is done once more on those lists. Rows are moved, not computed, so nothing here has
a tolerance.
"""

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.packed import copies
from packhorse.packed.tensor import PackedTensor
from tests.packed.helpers import KINDS, as_lists, check, make_packed, make_rows

INT32_MAX = 2**31 - 1

# --- every operation against lists ----------------------------------------------------------------

lengths_lists = st.lists(st.integers(0, 5), max_size=6)


@st.composite
def selections(draw, num_segments: int) -> tuple[Any, Callable[[list], list]]:
    """A selector of several segments, and the same selection from a list."""
    if num_segments:
        ids = draw(st.lists(st.integers(-num_segments, num_segments - 1), max_size=8))
    else:
        ids = []
    mask = draw(st.lists(st.booleans(), min_size=num_segments, max_size=num_segments))
    bounds = st.none() | st.integers(-8, 8)
    cut = slice(draw(bounds), draw(bounds), draw(bounds.filter(lambda step: step != 0)))
    first, stop = sorted(draw(st.tuples(*[st.integers(0, num_segments)] * 2)))
    span = range(first, stop, draw(st.integers(1, 3)))
    if draw(st.booleans()):
        span = span[::-1]

    def by_ids(segments: list) -> list:
        return [segments[i] for i in ids]

    def by_mask(segments: list) -> list:
        return [segment for segment, keep in zip(segments, mask, strict=True) if keep]

    choices = [
        (ids, by_ids),
        (torch.tensor(ids, dtype=torch.int64), by_ids),
        (torch.tensor(ids, dtype=torch.int32), by_ids),
        (np.array(ids, dtype=np.int64), by_ids),
        (np.array(ids, dtype=np.int16), by_ids),
        ([np.int64(i) for i in ids], by_ids),
        (torch.tensor(mask, dtype=torch.bool), by_mask),
        (np.array(mask, dtype=np.bool_), by_mask),
        (span, lambda segments: [segments[i] for i in span]),
        (cut, lambda segments: segments[cut]),
    ]
    if mask:  # an empty list holds neither ints nor bools
        choices += [(mask, by_mask), ([np.bool_(keep) for keep in mask], by_mask)]
    return draw(st.sampled_from(choices))


@pytest.mark.parametrize(("dtype", "row_shape"), KINDS)
@pytest.mark.parametrize("rows_per_run", [0, 10**9], ids=["copy-runs", "index-rows"])
@given(lengths=lengths_lists, data=st.data())
@settings(max_examples=40, deadline=None)
def test_selecting_matches_lists(dtype, row_shape, rows_per_run, device, lengths, data):
    packed = make_packed(lengths, dtype, row_shape, device)
    model = as_lists(packed)
    selector, select = data.draw(selections(len(lengths)))
    with mock.patch.object(copies, "_ROWS_PER_RUN", rows_per_run):
        check(packed[selector], select(model), packed)
    check(packed, model, packed)


@pytest.mark.parametrize(("dtype", "row_shape"), KINDS)
@given(lengths=lengths_lists, data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_chain_of_operations_matches_lists(dtype, row_shape, device, lengths, data):
    packed = like = make_packed(lengths, dtype, row_shape, device)
    model = as_lists(packed)

    def select(packed, model):
        selector, select = data.draw(selections(len(model)))
        return packed[selector], select(model)

    def repeat(packed, model):
        times = data.draw(st.integers(0, 3))
        return packed.repeat(times), model * times

    def repeat_each(packed, model):
        times = data.draw(st.integers(0, 3))
        repeated = [segment for segment in model for _ in range(times)]
        return packed.repeat_interleave(times), repeated

    def repeat_by_counts(packed, model):
        counts = data.draw(st.lists(st.integers(0, 3), min_size=len(model), max_size=len(model)))
        repeated = [seg for seg, times in zip(model, counts, strict=True) for _ in range(times)]
        kind = data.draw(st.sampled_from([list, np.array, torch.tensor]))
        given = counts if not counts or kind is list else kind(counts)
        return packed.repeat_interleave(given), repeated

    def split_and_join(packed, model):
        size = data.draw(st.integers(1, 4))
        parts = packed.split(size)
        expected = [model[i : i + size] for i in range(0, len(model), size)] or [[]]
        assert [as_lists(part) for part in parts] == expected
        return PackedTensor.cat(parts[::-1]), [seg for part in expected[::-1] for seg in part]

    def split_by_sizes(packed, model):
        first = data.draw(st.integers(0, len(model)))
        left, none, right = packed.split([first, 0, len(model) - first])
        check(none, [], like)
        return PackedTensor.cat([right, none, left]), model[first:] + model[:first]

    def chunk(packed, model):
        parts = packed.chunk(chunks := data.draw(st.integers(1, 4)))
        dense = torch.arange(len(model)).chunk(chunks)
        assert [len(part) for part in parts] == [len(part) for part in dense]
        return parts[-1], [model[i] for i in dense[-1].tolist()]

    def cat_with_itself(packed, model):
        return PackedTensor.cat([packed, packed[:1], packed]), model + model[:1] + model

    def rebuild(packed, model):
        other = PackedTensor(packed.values, packed.cu_seqlens, lengths=packed.lengths)
        return PackedTensor.from_segments([*other, other.values[:0]])[:-1], model

    def through_nested(packed, model):
        return PackedTensor.from_nested(packed.to_nested(), lengths=packed.lengths), model

    def through_pickle(packed, model):
        protocol = data.draw(st.integers(2, 5))
        return pickle.loads(pickle.dumps(packed, protocol=protocol)), model

    def keep(packed, model):
        for same in (packed.clone(), packed.contiguous(), packed.detach(), copy.deepcopy(packed)):
            check(same, model, like)
        return packed.to(device), model

    operations = [
        select, repeat, repeat_each, repeat_by_counts, split_and_join, split_by_sizes, chunk,
        cat_with_itself, rebuild, through_nested, through_pickle, keep,
    ]  # fmt: skip
    for operation in data.draw(st.lists(st.sampled_from(operations), min_size=1, max_size=4)):
        if sum(map(len, model)) > 200:
            break
        packed, model = operation(packed, model)
        check(packed, model, like)


@pytest.mark.parametrize(("dtype", "row_shape"), KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@given(lengths=lengths_lists, extra=st.none() | st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_padding_matches_lists(dtype, row_shape, side, device, lengths, extra):
    packed = make_packed(lengths, dtype, row_shape, device)
    longest = max(lengths, default=0)
    width = longest if extra is None else longest + extra
    missing = torch.full(row_shape, 1, dtype=dtype).tolist()
    expected = []
    for segment in as_lists(packed):
        pads = [missing] * (width - len(segment))
        expected.append(pads + segment if side == "left" else segment + pads)
    padded = packed.to_padded(1, None if extra is None else width, side=side)
    assert padded.tolist() == expected
    assert padded.shape == (len(lengths), width, *row_shape)
    assert padded.dtype == dtype


def test_padding_goes_to_the_right_unless_asked():
    assert make_packed([1, 2], row_shape=()).to_padded(0).tolist() == [[1, 0], [2, 3]]


@given(lengths=lengths_lists)
@settings(max_examples=30, deadline=None)
def test_every_integer_kind_names_one_segment(lengths):
    packed = make_packed(lengths)
    model = as_lists(packed)
    for i in range(-len(lengths), len(lengths)):
        for index in (i, np.int64(i), np.int16(i), np.array(i), torch.tensor(i)):
            assert packed[index].tolist() == packed.segment(index).tolist() == model[i]


# --- trap 41: none, empty, one; for every kind of field -------------------------------------------


@pytest.mark.parametrize(("dtype", "row_shape"), KINDS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [3], [0, 2, 0]], ids=str)
def test_no_segment_empty_segments_and_one_segment_are_legal(dtype, row_shape, lengths, device):
    packed = make_packed(lengths, dtype, row_shape, device)
    model = as_lists(packed)
    assert list(map(len, model)) == lengths
    check(packed[:], model, packed)
    check(packed[[]], [], packed)
    check(packed[5:], [], packed)
    check(packed[2:1], [], packed)
    check(packed[::-1], model[::-1], packed)
    check(packed[torch.zeros(len(lengths), dtype=torch.bool)], [], packed)
    check(packed.repeat(0), [], packed)
    check(packed.repeat_interleave(0), [], packed)
    check(PackedTensor.cat([packed[:0], packed[:0]]), [], packed)
    check(PackedTensor.cat([packed[:0], packed]), model, packed)
    check(PackedTensor.empty(row_shape, dtype=dtype, device=device), [], packed)
    check(
        PackedTensor.empty(row_shape, dtype=dtype, num_segments=2, device=device), [[], []], packed
    )
    assert packed.equal(packed.clone())
    assert packed[:0].to_padded(0).shape == (0, 0, *row_shape)
    assert packed.to_padded(0, width=4).shape == (len(lengths), 4, *row_shape)
    if lengths:
        assert packed[-1].tolist() == model[-1]


def test_the_last_segment_is_minus_one():
    assert make_packed([2, 3, 1], row_shape=())[-1].tolist() == [6]


# --- trap 42: dtypes ------------------------------------------------------------------------------


def test_cat_of_two_dtypes_is_an_error_and_widening_is_explicit():
    narrow = make_packed([2], torch.uint8)
    wide = make_packed([1], torch.int16)
    for inputs in ([narrow, wide], [wide, narrow], [narrow, wide[:0]]):
        with pytest.raises(TypeError, match=r"input 1 is torch\.\w+, input 0 is torch"):
            PackedTensor.cat(inputs)
    joined = PackedTensor.cat([narrow.widen(torch.int16), wide])
    assert joined.dtype == torch.int16
    assert as_lists(joined) == as_lists(narrow) + as_lists(wide)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_to_never_casts_integers(dtype):
    packed = make_packed([2, 1], dtype)
    assert packed.to(torch.bfloat16) is packed
    assert packed.to("cpu", torch.float32) is packed
    assert packed.to(dtype) is packed
    for other in {torch.uint8, torch.int64, torch.bool} - {dtype}:
        with pytest.raises(TypeError, match="not floating"):
            packed.to(other)


def test_to_casts_floats_and_leaves_the_offsets():
    packed = make_packed([2, 1], torch.float32)
    half = packed.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.cu_seqlens.dtype == torch.int32
    assert half.values.tolist() == packed.values.tolist()
    assert packed.to(dtype=torch.float64).dtype == torch.float64
    with pytest.raises(TypeError, match="not floating"):
        packed.to(torch.int32)


def test_to_with_copy_is_private():
    packed = make_packed([2, 1])
    assert packed.to("cpu") is packed
    copied = packed.to("cpu", copy=True)
    assert copied.equal(packed)
    assert copied.values.data_ptr() != packed.values.data_ptr()
    assert copied.cu_seqlens.data_ptr() != packed.cu_seqlens.data_ptr()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.int16, torch.uint8), (torch.int32, torch.int16), (torch.uint8, torch.int8),
        (torch.int8, torch.uint8), (torch.uint8, torch.float32), (torch.float32, torch.float64),
        (torch.bool, torch.uint8), (torch.uint16, torch.int16),
    ],
    ids=str,
)  # fmt: skip
def test_widen_refuses_what_could_lose_a_value(source, target):
    with pytest.raises(TypeError, match="widen"):
        make_packed([2], source).widen(target)


# --- trap 44: slicing rebases ---------------------------------------------------------------------


def test_row_ids_of_a_slice_start_at_its_first_row():
    from packhorse.replay.layout import TokenLayout

    prompts, responses = [3, 2], [2, 4]
    support = make_packed(responses, torch.int32, (5,))
    second = support[1:2]
    assert second.offsets == (0, 4)
    assert second.cu_seqlens.tolist() == [0, 4]
    layout = TokenLayout.build([prompts[1] + responses[1]])
    row_ids = layout.support_row_ids(second.lengths).tolist()
    assert row_ids == [-1, 0, 1, 2, 3, -1]
    rows = [second.values[row].tolist() for row in row_ids if row >= 0]
    assert rows == support[1].tolist()


# --- equality, gradients --------------------------------------------------------------------------


def test_equality_means_dtype_lengths_row_shape_and_values():
    packed = make_packed([2, 1])
    assert packed == packed.clone()
    assert packed != packed.widen(torch.int64)
    assert packed != make_packed([1, 2])
    assert packed != PackedTensor.from_lengths(packed.values[:, :1], [2, 1])
    assert packed != PackedTensor.from_lengths(packed.values + 1, [2, 1])
    assert make_packed([], row_shape=(2,)) != make_packed([], row_shape=(3,))
    assert packed != packed.to("meta")
    assert (packed == 3) is False
    with pytest.raises(TypeError, match="other is a Tensor"):
        packed.equal(packed.values)
    with pytest.raises(TypeError, match="unhashable"):
        hash(packed)


@pytest.mark.parametrize("rows_per_run", [0, 10**9])
def test_gradients_reach_the_rows_that_were_taken(rows_per_run, device):
    values = make_rows(6, torch.float64, (2,)).to(device).requires_grad_()
    packed = PackedTensor.from_lengths(values, [2, 0, 4])
    assert packed.requires_grad
    assert not packed.detach().requires_grad
    with mock.patch.object(copies, "_ROWS_PER_RUN", rows_per_run):
        taken = packed[[2, 0, 2]]
    (gradient,) = torch.autograd.grad(taken.values.sum(), values, retain_graph=True)
    assert gradient.tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 4
    (gradient,) = torch.autograd.grad(packed.to_padded(0.0).sum() * 3, values)
    assert gradient.tolist() == [[3.0, 3.0]] * 6
    joined = PackedTensor.cat([packed[1:], packed]).repeat(2)
    (gradient,) = torch.autograd.grad(joined.values.sum(), values)
    assert gradient.tolist() == [[2.0, 2.0]] * 2 + [[4.0, 4.0]] * 4


# --- what is refused ------------------------------------------------------------------------------

V = torch.arange(6, dtype=torch.int32).view(3, 2)


def offsets(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32)


@pytest.mark.parametrize(
    ("values", "cu_seqlens", "lengths", "error", "message"),
    [
        ([1, 2, 3], offsets(0, 3), None, TypeError, "values must be a tensor, got list"),
        (torch.tensor(3), offsets(0, 3), None, ValueError, "no dimension"),
        (V.to_sparse(), offsets(0, 3), None, TypeError, "dense tensor"),
        (V, [0, 3], None, TypeError, "cu_seqlens must be a tensor"),
        (V, torch.tensor([0, 3]), None, TypeError, "cu_seqlens must be int32, got torch.int64"),
        (V, offsets(0, 3)[None], None, ValueError, r"cu_seqlens must be \[B \+ 1\]"),
        (V, offsets(), None, ValueError, r"cu_seqlens must be \[B \+ 1\]"),
        (V, offsets(1, 3), None, ValueError, "must start at 0, got 1"),
        (V, offsets(0, 2), None, ValueError, "ends at 2, values has 3 rows"),
        (V, offsets(0), None, ValueError, "ends at 0, values has 3 rows"),
        (V, offsets(0, 2, 1, 3), None, ValueError, "decreases after segment 1"),
        (V, offsets(0, 3).to("meta"), [3], ValueError, "cu_seqlens on meta, values on cpu"),
        (V, offsets(0, 1, 3), [2, 1], ValueError, "differ at segment 0"),
        (V, offsets(0, 1, 3), [3], ValueError, "1 lengths for cu_seqlens of 3 entries"),
        (V, offsets(0, 1, 3), [4, -1], ValueError, "length of segment 1 is negative"),
        (V, offsets(0, 1, 3), [1, 1], ValueError, "lengths sum to 2, values has 3 rows"),
        (V, offsets(0, 1, 3), [1, 2.0], TypeError, r"lengths\[1\] must be an integer, got float"),
        (V, offsets(0, 1, 3), [1, True], TypeError, r"lengths\[1\] must be an integer, got True"),
        (V, offsets(0, 1, 3), np.array([1.0, 2.0]), TypeError, "must hold integers, got float64"),
        (V, offsets(0, 1, 3), np.array([[1, 2]]), ValueError, "must be 1-D"),
        (V, offsets(0, 1, 3), "12", TypeError, "list of integers, got str"),
        (V.to("meta"), offsets(0, 3).to("meta"), [2**70], ValueError, "past int64"),
        (V.to("meta"), offsets(0, 3).to("meta"), [2**62] * 4 + [3], ValueError, "do not fit int32"),
    ],
)  # fmt: skip
def test_the_constructor_rejects(values, cu_seqlens, lengths, error, message):
    with pytest.raises(error, match=f"^PackedTensor: .*{message}"):
        PackedTensor(values, cu_seqlens, lengths=lengths)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "index 3 is out of range for 3 segments"),
        (-4, IndexError, "index -4 is out of range"),
        ([0, 3], IndexError, "index 3 is out of range"),
        (torch.tensor([-4]), IndexError, "index -4 is out of range"),
        (range(2, 5), IndexError, "index 3 is out of range"),
        ([True, False], ValueError, r"a mask of shape \(2,\) for 3 segments"),
        (torch.ones(4, dtype=torch.bool), ValueError, r"a mask of shape \(4,\)"),
        (np.ones((3, 1), dtype=np.bool_), ValueError, r"a mask of shape \(3, 1\)"),
        ([True, 0, 1], TypeError, "mixes booleans and integers"),
        (True, TypeError, "must be an integer, got True"),
        (np.True_, TypeError, "must be an integer, got"),
        (torch.tensor(True), TypeError, "must be an integer, got"),
        ((0, 1), TypeError, "got a tuple"),
        (1.0, TypeError, "cannot index with float"),
        (None, TypeError, "cannot index with NoneType"),
        (..., TypeError, "cannot index with ellipsis"),
        ("0", TypeError, "cannot index with str"),
        ([0, 1.0], TypeError, r"index\[1\] must be an integer, got float"),
        (torch.tensor([0.0]), TypeError, "must hold integers, got torch.float32"),
        (range(10**12), IndexError, "index 3 is out of range for 3 segments"),
        (range(0, -(10**12), -1), IndexError, "index -4 is out of range for 3 segments"),
        (range(10**30, 10**30 + 2), ValueError, "past int64"),
        (np.array([2**64 - 1], dtype=np.uint64), ValueError, "past int64, 18446744073709551615"),
        (np.array([]), TypeError, "must hold integers, got float64"),
        (torch.tensor([[0]]), ValueError, "must be 1-D"),
        (torch.tensor([1, 0, 1], dtype=torch.uint8), TypeError, "uint8 tensor as index"),
        (slice(None, None, 0), ValueError, "step must not be 0"),
        (slice(0.0, 1), TypeError, "slice bound must be an integer"),
    ],
)  # fmt: skip
def test_indexing_rejects(index, error, message):
    with pytest.raises(error, match=f"^PackedTensor: .*{message}"):
        make_packed([1, 1, 1])[index]


PACKED = make_packed([2, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PackedTensor.cat([]), ValueError, "cat: no inputs"),
        (lambda: PackedTensor.cat([PACKED, V]), TypeError, "cat: input 1 is a Tensor"),
        (lambda: PackedTensor.cat([PACKED, make_packed([1], row_shape=(3,))]), ValueError,
         r"input 1 has row shape \(3,\), input 0 has \(2,\)"),
        (lambda: PackedTensor.cat([PACKED, PACKED.to("meta")]), ValueError,
         "input 1 is on meta, input 0 on cpu"),
        (lambda: PackedTensor.from_segments([]), ValueError, "use PackedTensor.empty"),
        (lambda: PackedTensor.from_segments([V, V.long()]), TypeError, "segment 1 is torch.int64"),
        (lambda: PackedTensor.from_segments([V, V[:, :1]]), ValueError, "segment 1 has row shape"),
        (lambda: PackedTensor.from_segments([V, [1]]), TypeError, "segment 1 must be a tensor"),
        (lambda: PackedTensor.from_lengths(V, [1]), ValueError, "lengths sum to 1"),
        (lambda: PACKED.repeat(-1), ValueError, "repeat: times must not be negative"),
        (lambda: PACKED.repeat(2.0), TypeError, "repeat: times must be an integer"),
        (lambda: PACKED.repeat_interleave([1]), ValueError, "1 repeats for 2 segments"),
        (lambda: PACKED.repeat_interleave([1, -1]), ValueError, "must not be negative, got -1"),
        (lambda: PACKED.split(0), ValueError, "split_size must be positive"),
        (lambda: PACKED.split([1]), ValueError, "sum to 2 segments"),
        (lambda: PACKED.split([3, -1]), ValueError, "sum to 2 segments"),
        (lambda: PACKED.split([2**63 - 1, 2**63 - 1, 4]), ValueError, "sum to 2 segments"),
        (lambda: PACKED[:0].chunk(10**12), ValueError, "1000000000000 chunks do not fit int32"),
        (lambda: PackedTensor.empty((2,), dtype=torch.int8, num_segments=-1), ValueError,
         "num_segments must not be negative"),
        (lambda: PackedTensor.empty((2,), dtype=torch.int8, num_segments=10**12), ValueError,
         "1000000000000 segments do not fit int32"),
        (lambda: PACKED.to_padded(0, width=2**62), ValueError, "width=4611686018427387904 makes"),
        (lambda: PACKED[:0].to_padded(0, width=10**30), ValueError, "makes a tensor of"),
        (lambda: make_packed([1], torch.bfloat16, (2, 0)).to_padded(0, width=10**30), ValueError,
         "makes a tensor of"),
        (lambda: PACKED.to_padded(1j), TypeError, "fill must be a real number, got complex"),
        (lambda: PACKED.to_padded(np.complex64(1)), TypeError, "fill must be a real number"),
        (lambda: make_packed([1], torch.float32).to_padded(10**400), ValueError, "does not fit"),
        (lambda: make_packed([1], torch.complex64).to_padded(10**400), ValueError, "does not fit"),
        (lambda: PACKED.chunk(0), ValueError, "chunks must be positive"),
        (lambda: PACKED.to(torch.float32, torch.float16), TypeError, "two dtypes"),
        (lambda: PACKED.to("cpu", device="cpu"), TypeError, "two devices"),
        (lambda: PACKED.to_padded(0, width=1), ValueError, "segment 0 has 2 rows, width is 1"),
        (lambda: PACKED.to_padded(0, width=-1), ValueError, "width must not be negative"),
        (lambda: PACKED.to_padded(0, side="both"), ValueError, "side must be"),
        (lambda: PACKED.to_padded(0.5), ValueError, "fill=0.5 does not fit"),
        (lambda: PACKED.to_padded(float("nan")), ValueError, "fill=nan does not fit"),
        (lambda: PACKED.to_padded(2**31), ValueError, "does not fit torch.int32"),
        (lambda: PACKED.to_padded(None), TypeError, "fill must be a real number"),
        (lambda: make_packed([1], torch.uint8).to_padded(-1), ValueError, "fill=-1 does not fit"),
        (lambda: make_packed([1], torch.bool).to_padded(2), ValueError, "fill=2 does not fit"),
        (lambda: make_packed([1], torch.float16).to_padded(1e9), ValueError, "does not fit"),
        (lambda: PackedTensor.from_nested(V), TypeError, "layout torch.jagged"),
    ],
)  # fmt: skip
def test_operations_reject(call, error, message):
    with pytest.raises(error, match=rf"^PackedTensor\.(\w+: .*)?{message}"):
        call()


def test_nested_tensors_with_holes_or_another_ragged_dimension_are_refused():
    nested = PACKED.to_nested()
    with pytest.raises(ValueError, match="ragged in dimension 1"):
        PackedTensor.from_nested(nested.transpose(1, 2))
    holes = torch.nested.nested_tensor_from_jagged(
        V, torch.tensor([0, 2, 3]), lengths=torch.tensor([1, 1])
    )
    with pytest.raises(ValueError, match="holes"):
        PackedTensor.from_nested(holes)


def test_rows_past_int32_are_refused_before_anything_is_made():
    half = PackedTensor.from_lengths(torch.zeros(1).expand(2**30), [2**29] * 2)
    for call in (
        lambda: half.repeat(2),
        lambda: half.repeat_interleave(2),
        lambda: half.repeat_interleave([1, 3]),
        lambda: half[[0, 1, 0, 1]],
        lambda: PackedTensor.cat([half, half]),
        lambda: PackedTensor.from_segments([half.values, half.values]),
        lambda: PackedTensor.from_lengths(torch.zeros(1).expand(2**31), [2**30] * 2),
        lambda: PackedTensor(torch.zeros(1).expand(2**31), offsets(0, 1)),
        lambda: make_packed([0]).repeat(2**31),
        lambda: make_packed([0]).repeat_interleave(2**31),
    ):
        with pytest.raises(ValueError, match="do not fit int32"):
            call()


@pytest.mark.parametrize(
    "repeats", [[0, 0, 2**30, 0], [0, 0, 2**31, 0], [2**62] * 4, 2**62, 10**30]
)
def test_repeats_past_int32_are_refused_before_an_index_is_made(repeats):
    packed = make_packed([1, 1, 5, 1])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"repeat_interleave: .* do not fit int32"):
            packed.repeat_interleave(repeats)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_no_segments_repeat_any_number_of_times():
    none = make_packed([])
    assert len(none.repeat(10**30)) == len(none.repeat_interleave(10**30)) == 0


def test_infinite_fills_are_legal_in_floats():
    for fill in (float("inf"), -float("inf"), np.float32("nan")):
        padded = make_packed([1, 0], torch.bfloat16, ()).to_padded(fill)
        np.testing.assert_equal(padded.float().tolist(), [[1.0], [float(fill)]])


def test_the_largest_total_that_int32_holds_is_legal():
    packed = PackedTensor.from_lengths(torch.zeros(1).expand(INT32_MAX), [2**30, 2**30 - 1])
    assert packed.offsets == (0, 2**30, INT32_MAX)
    assert packed.cu_seqlens.tolist() == [0, 2**30, INT32_MAX]
    assert packed[1].shape == (2**30 - 1,)
    no_columns = PackedTensor.from_lengths(torch.empty(2**20, 0), [2**20])
    assert no_columns.repeat(3)[[2, 0]].num_rows == 2**21


def test_the_representation_reads_no_value():
    text = repr(make_packed([2] * 20).to("meta"))
    assert text.startswith("PackedTensor(20 segments of [2, 2, 2, 2, 2, 2, 2, 2, ...] rows")
