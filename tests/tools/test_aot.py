"""The compile tool sees spills, narrow accesses and code that only the interpreter accepts."""

import os

import pytest
import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels; the interpreter cannot", allow_module_level=True)

from triton.runtime.jit import JITFunction

from tests.tools.aot import TARGETS, compile_for, compile_only, report

pytestmark = pytest.mark.compile


@triton.jit
def _copy_kernel(src_ptr, dst_ptr, num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst_ptr + i, tl.load(src_ptr + i, mask=i < num), mask=i < num)


@triton.jit
def _normalise_kernel(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    x = tl.exp(x - tl.max(x))
    tl.store(x_ptr + i, x / tl.sum(x))


@triton.jit
def _change_type_kernel(x_ptr, num):
    total = 0
    for i in range(0, num):
        total = total + tl.load(x_ptr + i).to(tl.int64)
    tl.store(x_ptr, total)


@pytest.mark.parametrize("target", TARGETS)
def test_aligned_pointers_and_bounds_give_wide_accesses(target):
    args = {"src_ptr": "*i32", "dst_ptr": "*i32", "num": 4096, "BLOCK": 1024}
    wide = report(compile_for(target, _copy_kernel, args))
    assert (wide.name, wide.target) == ("_copy_kernel", target)
    assert wide.wide_share("LDG", 128) == wide.wide_share("STG", 128) == 1.0
    assert 0 < wide.registers < 64
    narrow = report(compile_for(target, _copy_kernel, {**args, "src_ptr": "*i32:1"}))
    assert narrow.wide_share("LDG", 128) == 0.0
    assert narrow.wide_share("LDG", 32) == narrow.wide_share("STG", 128) == 1.0
    uneven = report(compile_for(target, _copy_kernel, {**args, "num": "i32"}))
    assert uneven.wide_share("STG", 64) == 0.0


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_spills_is_seen(target):
    args = {"x_ptr": "*fp32", "BLOCK": 65536}
    assert report(compile_for(target, _normalise_kernel, args, num_warps=4)).spills
    args = {"x_ptr": "*fp32", "BLOCK": 2048}
    assert not report(compile_for(target, _normalise_kernel, args, num_warps=4)).spills


def test_a_loop_variable_that_changes_its_type_is_refused():
    with pytest.raises(Exception, match="type"):
        compile_for("sm_90", _change_type_kernel, {"x_ptr": "*i32", "num": "i32"})


def test_a_launch_compiles_as_it_would_run_and_runs_nothing():
    src, dst = torch.ones(1024, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    run, driver = JITFunction.run, triton.runtime.driver._active
    with compile_only("sm_90") as compiled:
        _copy_kernel[(1,)](src, dst, 1024, BLOCK=1024)
        _copy_kernel[(1,)](src, dst[1:], 1023, BLOCK=1024)
    assert [report(kernel).wide_share("STG", 128) for kernel in compiled] == [1.0, 0.0]
    assert not dst.any()
    assert JITFunction.run is run
    assert triton.runtime.driver._active is driver


def test_an_argument_of_an_unknown_kind_is_refused():
    args = {"src_ptr": "*i32", "dst_ptr": "*i32", "num": 1.5, "BLOCK": 64}
    with pytest.raises(TypeError, match="compile_for: num is a float"):
        compile_for("sm_90", _copy_kernel, args)
