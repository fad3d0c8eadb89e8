"""PackedRagged: what it refuses, in one line, and that nothing has changed by then."""

import pytest
import torch

from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from tests.packed.ragged_model import MODEL, build, check

IDS = torch.tensor([7, 9, 4], dtype=torch.int32)
ROWS = torch.tensor([0, 2, 2, 3])
CUTS = torch.tensor([0, 2, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("parts", "host", "error", "message"),
    [
        (([7], ROWS, CUTS), {}, TypeError, "values must be a tensor, got list"),
        ((IDS[None], ROWS, CUTS), {}, ValueError, r"values must be \[ids\], got shape \(1, 3\)"),
        ((IDS.to_sparse(), ROWS, CUTS), {}, TypeError, "values must be a dense tensor"),
        ((IDS, [0, 3], CUTS), {}, TypeError, "row_offsets must be a tensor"),
        ((IDS, ROWS.int(), CUTS), {}, TypeError, "row_offsets must be int64, got torch.int32"),
        ((IDS, ROWS, CUTS.long()), {}, TypeError, "cu_seqlens must be int32, got torch.int64"),
        ((IDS, ROWS[:0], CUTS), {}, ValueError, r"row_offsets must be \[N \+ 1\], got no entry"),
        ((IDS, ROWS, CUTS[:0]), {}, ValueError, r"cu_seqlens must be \[B \+ 1\], got no entry"),
        ((IDS, ROWS.to("meta"), CUTS), {}, ValueError, "row_offsets on meta, values on cpu"),
        ((IDS, ROWS + 1, CUTS), {}, ValueError, "row_offsets must start at 0, got 1"),
        ((IDS, torch.tensor([0, 2, 1, 3]), CUTS), {}, ValueError,
         "row_offsets decreases at trajectory 0, row 1"),
        ((IDS, torch.tensor([0, 2, 4, 3]), CUTS), {}, ValueError, "at trajectory 1, row 0"),
        ((IDS, torch.tensor([0, 1, 2, 2]), CUTS), {}, ValueError, "ends at 2, values has 3 ids"),
        ((IDS, ROWS, CUTS + 1), {}, ValueError, "cu_seqlens must start at 0"),
        ((IDS, ROWS, CUTS[:2]), {}, ValueError, "cu_seqlens ends at 2, row_offsets has 3 rows"),
        ((IDS, ROWS, torch.tensor([0, 4, 3]).int()), {}, ValueError, "decreases at trajectory 1"),
        ((IDS, ROWS, CUTS), {"lengths": [1, 2]}, ValueError, "differ at trajectory 0"),
        ((IDS, ROWS, CUTS), {"lengths": [3]}, ValueError, "1 lengths for cu_seqlens of 3"),
        ((IDS, ROWS, CUTS), {"lengths": [2, 2]}, ValueError, "lengths sum to 4, row_offsets has 3"),
        ((IDS, ROWS, CUTS), {"lengths": [4, -1]}, ValueError, "length of segment 1 is negative"),
        ((IDS, ROWS, CUTS), {"widths": [2, 1, 0]}, ValueError, "differ at trajectory 0, row 1"),
        ((IDS, ROWS, CUTS), {"widths": [2, 1]}, ValueError, "2 widths for 3 rows of 2 traj"),
        ((IDS, ROWS, CUTS), {"widths": [2, -1, 2]}, ValueError, "-1 for trajectory 0, row 1"),
        ((IDS, ROWS, CUTS), {"widths": [2, 0, 4]}, ValueError, "4 for trajectory 1, row 0, val"),
        ((IDS, ROWS, CUTS), {"widths": [2, 0, 2]}, ValueError, "widths sum to 4, values has 3"),
        ((IDS, ROWS, CUTS), {"widths": [2, 0, 1.0]}, TypeError, r"widths\[2\] must be an integer"),
    ],
)  # fmt: skip
def test_the_constructor_rejects(parts, host, error, message):
    with pytest.raises(error, match=f"^PackedRagged: .*{message}"):
        PackedRagged(*parts, **host)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (5, IndexError, "index 5 is out of range for 5 segments"),
        ([0, -6], IndexError, "index -6 is out of range"),
        ([True, False], ValueError, r"a mask of shape \(2,\) for 5 segments"),
        ([True, 0, 1, 1, 1], TypeError, "mixes booleans and integers"),
        (True, TypeError, "must be an integer, got True"),
        ((0, 1), TypeError, "got a tuple"),
        (1.0, TypeError, "cannot index with float"),
        (torch.tensor([1, 0], dtype=torch.uint8), TypeError, "uint8 tensor as index"),
        (slice(None, None, 0), ValueError, "step must not be 0"),
    ],
)
def test_indexing_rejects(index, error, message):
    with pytest.raises(error, match=f"^PackedRagged: .*{message}"):
        build(MODEL)[index]


PACKED = build(MODEL)


def rows_of(*rows: list[int]) -> PackedTensor:
    return PackedTensor.from_lengths(torch.tensor(rows, dtype=torch.int32), [1, len(rows) - 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PackedRagged.cat([]), ValueError, "cat: no inputs"),
        (lambda: PackedRagged.cat([PACKED, IDS]), TypeError, "cat: input 1 is a Tensor"),
        (lambda: PackedRagged.cat([PACKED, PACKED.to("meta")]), ValueError,
         "cat: input 1 is on meta, input 0 on cpu"),
        (lambda: PACKED.repeat(-1), ValueError, "repeat: times must not be negative"),
        (lambda: PACKED.repeat(2**31), ValueError, "repeat: .* do not fit int32"),
        (lambda: PACKED.repeat_interleave([1]), ValueError, "1 repeats for 5 segments"),
        (lambda: PACKED.repeat_interleave(2**31), ValueError, "do not fit int32"),
        (lambda: PACKED.split(0), ValueError, "split: split_size must be positive"),
        (lambda: PACKED.split([1]), ValueError, "split: sizes must .* sum to 5 segments"),
        (lambda: PACKED.chunk(0), ValueError, "chunk: chunks must be positive"),
        (lambda: PACKED[:0].chunk(10**12), ValueError, "chunks do not fit int32"),
        (lambda: PACKED.to(torch.float32, torch.float16), TypeError, "to: two dtypes"),
        (lambda: PACKED.to("cpu", device="cpu"), TypeError, "to: two devices"),
        (lambda: PACKED.to_padded(3), ValueError,
         "to_padded: trajectory 4, row 1 has 4 ids, width is 3"),
        (lambda: PACKED.to_padded(-1), ValueError, "to_padded: width must not be negative"),
        (lambda: PACKED.to_padded(max_bytes=143), ValueError,
         "9 rows of width 4 are 144 bytes, above max_bytes=143; the widest is trajectory 4, row 1"),
        (lambda: PACKED.to_padded(2**62), ValueError, "above max_bytes"),
        (lambda: PackedRagged.from_padded(IDS), TypeError, "padded must be a PackedTensor"),
        (lambda: PackedRagged.from_padded(rows_of([1], [2]).widen(torch.int64)), TypeError,
         "padded must be int32, got torch.int64"),
        (lambda: PackedRagged.from_padded(PackedTensor.from_lengths(IDS, [3])), ValueError,
         r"padded must have rows of \[C\], got row shape \(\)"),
        (lambda: PackedRagged.from_padded(rows_of([1, 2], [3, 4], [5, -2])), ValueError,
         "padded, trajectory 1, row 1: id -2 is below -1"),
        (lambda: PackedRagged.from_padded(rows_of([1, -1], [3, 4]), widths=[1, 1]), ValueError,
         "widths has 1 for trajectory 1, row 0, padded has 2 ids"),
        (lambda: PackedRagged.from_padded(rows_of([1, -1], [3, 4]).to("meta"), widths=[1, 3]),
         ValueError, "widths has 3 for trajectory 1, row 0, padded has 2 columns"),
        (lambda: PackedRagged.from_padded(rows_of([1], [2]), widths=[1]), ValueError,
         "1 widths for 2 rows of 2 trajectories"),
        (lambda: PackedRagged.from_lengths(IDS, [2, 2], [2]), ValueError, "widths sum to 4"),
        (lambda: PackedRagged.from_lengths(IDS, [2], [2]), ValueError, "1 widths for 2 rows"),
        (lambda: PackedRagged.from_lengths(IDS.long(), [3], [1]), TypeError, "must be int32"),
        (lambda: PackedRagged.from_lengths(
            IDS[:1].expand(2**60), [2**60] * 16, [16]),
         ValueError, "widths sum to 18446744073709551616"),
        (lambda: PackedRagged.from_segments([PACKED[0], IDS]), TypeError,
         "trajectory 1 must be a pair"),
        (lambda: PackedRagged.from_segments([(IDS, ROWS), (IDS, ROWS.int())]), TypeError,
         "trajectory 1: row_offsets must be int64"),
        (lambda: PackedRagged.from_segments([(IDS, ROWS), (IDS, ROWS[:3])]), ValueError,
         "trajectory 1: row_offsets ends at 2, token_ids has 3"),
        (lambda: PackedRagged.from_segments([(IDS, torch.tensor([0, 2, 1, 3]))]), ValueError,
         "trajectory 0: row_offsets decreases at row 1"),
        (lambda: PackedRagged.from_segments([(IDS, ROWS[:0])]), ValueError, "got no entry"),
        (lambda: PackedRagged.empty([-1]), ValueError, "length of segment 0 is negative"),
    ],
)  # fmt: skip
def test_operations_reject(call, error, message):
    with pytest.raises(error, match=rf"^PackedRagged\.(\w+: .*)?{message}") as caught:
        call()
    assert "\n" not in str(caught.value)
    check(PACKED, MODEL)
