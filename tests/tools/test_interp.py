"""The sanitizer catches planted faults that the plain interpreter lets pass, and the fixes hold.

Runs under ``TRITON_INTERPRET=1`` only: otherwise there is no interpreter to check.
"""

import os

import pytest
import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.errors import InterpreterError

from tests.tools.interp import sanitize

pytestmark = pytest.mark.nosan  # each test opens its own sanitizer


@triton.jit
def _copy_kernel(src_ptr, dst_ptr, num, bound, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst_ptr + i, tl.load(src_ptr + i, mask=i < num, other=0), mask=i < bound)


@triton.jit
def _copy_without_other_kernel(src_ptr, dst_ptr, num, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(dst_ptr + i, tl.load(src_ptr + i, mask=i < num))


@triton.jit
def _store_program_id_kernel(dst_ptr):
    tl.store(dst_ptr, tl.program_id(0))


@triton.jit
def _store_constant_kernel(dst_ptr):
    tl.store(dst_ptr, 7)


@triton.jit
def _shift_in_place_kernel(x_ptr):
    i = tl.program_id(0)
    tl.store(x_ptr + i, tl.load(x_ptr + i + 1))


@triton.jit
def _count_kernel(dst_ptr):
    tl.atomic_add(dst_ptr, 1)


@triton.jit
def _offset_kernel(dst_ptr, rows, stride):
    tl.store(dst_ptr, (rows * stride).to(tl.int64))


@triton.jit
def _wide_offset_kernel(dst_ptr, rows, stride):
    tl.store(dst_ptr, rows.to(tl.int64) * stride)


@triton.jit
def _assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "x must be positive")


@triton.jit
def _sum_kernel(x_ptr, out_ptr, num):
    total = 0.0
    for i in range(0, num):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))


def ints(num: int) -> torch.Tensor:
    return torch.arange(num, dtype=torch.int32)


def caught(message: str):
    return pytest.raises(InterpreterError, match=message)


@pytest.mark.parametrize(
    ("num", "bound", "message"),
    [
        (8, 9, r"out of bounds store.*dst_ptr\[8\] of 8"),
        (9, 8, r"out of bounds load.*src_ptr\[8\]"),
    ],
)
def test_an_access_past_the_end_is_caught(num, bound, message):
    with sanitize(), caught(message):
        _copy_kernel[(1,)](ints(8), ints(8), num, bound, BLOCK=16)


def test_an_access_to_an_empty_tensor_is_caught():
    with sanitize(), caught("out of bounds load.*no tensor argument has elements"):
        _shift_in_place_kernel[(1,)](ints(8)[:0])


def test_an_access_between_strided_elements_is_caught():
    with sanitize(), caught(r"out of bounds store.*dst_ptr\[1\] of 15"):
        _copy_kernel[(1,)](ints(8), ints(16)[::2], 8, 8, BLOCK=8)


def test_an_access_in_the_gap_between_two_arguments_is_caught():
    storage = ints(24)
    with sanitize(), caught(r"src_ptr\[8\] of 8"):
        _copy_kernel[(1,)](storage[:8], storage[12:], 12, 12, BLOCK=16)


def test_a_correct_kernel_passes():
    src, dst = ints(100) + 1, torch.zeros(100, dtype=torch.int32)
    with sanitize():
        _copy_kernel[(7,)](src, dst, 100, 100, BLOCK=16)
    assert torch.equal(src, dst)


def test_a_strided_view_of_an_argument_passes():
    x = ints(16)
    with sanitize():
        _copy_kernel[(1,)](x, x[:8], 8, 8, BLOCK=8)
    assert torch.equal(x, ints(16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_lanes_masked_off_without_other_hold_poison(dtype):
    src, dst = torch.ones(8, dtype=dtype), torch.zeros(16, dtype=dtype)
    with sanitize():
        _copy_without_other_kernel[(1,)](src, dst, 8, BLOCK=16)
    assert torch.equal(dst[:8], src)
    left = dst[8:]
    assert left.isnan().all() if dtype.is_floating_point else (left != 0).all()


def test_two_programs_that_store_different_values_are_caught():
    with sanitize(), caught("race: program"):
        _store_program_id_kernel[(2,)](ints(1))


def test_two_programs_that_store_the_same_value_pass():
    with sanitize():
        _store_constant_kernel[(3,)](ints(1))


@pytest.mark.parametrize("order", [None, 0, 1])
def test_a_program_that_reads_what_another_stores_is_caught(order):
    with sanitize(order=order), caught("race: program"):
        _shift_in_place_kernel[(7,)](ints(8))


def test_the_race_check_can_be_turned_off():
    with sanitize(race=False, order=None):
        _shift_in_place_kernel[(7,)](ints(8))


def test_atomics_are_no_race():
    count = torch.zeros(1, dtype=torch.int32)
    with sanitize():
        _count_kernel[(5,)](count)
    assert count.item() == 5


def test_an_atomic_out_of_bounds_is_caught():
    with sanitize(), caught("out of bounds atomic"):
        _count_kernel[(1,)](ints(4)[:0])


def test_programs_run_in_another_order():
    seen = []
    for order in (None, 3):
        last = torch.zeros(1, dtype=torch.int32)
        with sanitize(order=order, race=False):
            _store_program_id_kernel[(64,)](last)
        seen.append(last.item())
    assert seen[0] == 63
    assert seen[1] != 63


def test_an_int32_product_that_overflows_is_caught():
    out = torch.zeros(1, dtype=torch.int64)
    with sanitize(), caught("int32 overflow"):
        _offset_kernel[(1,)](out, 70_000, 70_000)
    with sanitize():
        _wide_offset_kernel[(1,)](out, 70_000, 70_000)
    assert out.item() == 70_000**2


def test_a_device_assert_fires():
    with sanitize(), caught("x must be positive"):
        _assert_kernel[(1,)](torch.zeros(1))


def test_the_sanitizer_leaves_no_hook_behind():
    with sanitize(), caught("out of bounds"):
        _copy_kernel[(1,)](ints(8), ints(8), 8, 9, BLOCK=16)
    dst = torch.zeros(1, dtype=torch.int32)
    _store_program_id_kernel[(2,)](dst)
    assert dst.item() == 1


def test_a_runtime_range_runs():
    x, out = torch.rand(5), torch.zeros(1)
    _sum_kernel[(1,)](x, out, 5)
    torch.testing.assert_close(out[0], x.sum())


def test_bfloat16_rounds_to_nearest_even():
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    x[:3] = torch.tensor([float("nan"), float("inf"), 1.00390625])  # the last one is a tie
    out = torch.zeros(1024, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, out, BLOCK=1024)
    torch.testing.assert_close(out, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_a_bfloat16_dot_multiplies_values():
    a, b = torch.randint(-4, 5, (2, 16, 16)).to(torch.bfloat16)
    out = torch.zeros(16, 16)
    _dot_kernel[(1,)](a, b, out, BLOCK=16)
    assert torch.equal(out, a.float() @ b.float())
