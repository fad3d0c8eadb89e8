"""Compile Triton kernels for GPUs that are not there; read registers, spills and access widths.

    with compile_only("sm_90") as compiled:      # every launch compiles, none runs
        gather_rows_launcher(cpu_or_meta_tensors)
    report(compiled[0])                          # from the machine code alone

    compile_for("sm_90", kernel, {"src_ptr": "*i32", "num": "i32", "BLOCK": 1024}, num_warps=4)

``compile_only`` runs the package's own host code, so block sizes, dtypes and the specialisation of
each argument are those of a real launch. ptxas and the disassemblers come with the Triton wheel; no
driver and no toolkit is needed. ``TRITON_INTERPRET`` must be unset. Tried on Triton 3.6.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}
#: Compiled for as well; their machine code is not disassembled.
AMD_TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64)}


# --- compiling ------------------------------------------------------------------------------------


def compile_for(
    target: str, kernel: JITFunction, args: Mapping[str, Any], **options: Any
) -> CompiledKernel:
    """Compile ``kernel`` for ``target`` as a launch with such arguments would.

    Args:
        target: a key of ``TARGETS``.
        kernel: a function decorated with ``triton.jit``.
        args: each parameter's value. "*i32" is a 16-byte aligned pointer, "*i32:1" one without a
            claim; "i32" a scalar without a claim; an int is specialised as the launch would (1 is a
            constant, multiples of 16 are noted); a constexpr parameter takes any value.
        options: ``num_warps``, ``num_stages``, ...
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    divisible = [["tt.divisibility", 16]]
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, args[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (value == 1 and specialised):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, str):
            signature[name], _, alignment = value.partition(":")
            if value.startswith("*") and alignment != "1":
                attributes[(i,)] = divisible
        elif isinstance(value, bool):
            signature[name] = "u1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialised:
                attributes[(i,)] = divisible
        else:
            raise TypeError(f"compile_for: {name} is a {type(value).__name__}")
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=(TARGETS | AMD_TARGETS)[target], options=options)


class _AbsentGPU(DriverBase):
    """Enough of a driver for a launch to compile for ``target``."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:  # one cache of compiled kernels a target
        return f"{self.target.backend}{self.target.arch}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        return lambda fn, quantiles=None, **kwargs: [0.0, 0.0, 0.0]

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    @classmethod
    def is_active(cls) -> bool:
        return True


@contextmanager
def compile_only(target: str) -> Iterator[list[CompiledKernel]]:
    """Turn each launch into a compilation for ``target``; yields the list they are appended to."""
    compiled: list[CompiledKernel] = []
    run, driver = JITFunction.run, triton.runtime.driver._active

    def compile_and_keep(
        self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> CompiledKernel:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_AbsentGPU((TARGETS | AMD_TARGETS)[target]))
    JITFunction.run = compile_and_keep
    try:
        yield compiled
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = driver


# --- reading the machine code ---------------------------------------------------------------------

_MEMORY = re.compile(r"\b(LDG|LDGSTS|STG|LDS|STS|LDL|STL)((?:\.[A-Z0-9_]+)*)\b")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True)
class Report:
    """Resources and memory instructions of one compiled kernel."""

    name: str
    target: str
    registers: int  # a thread
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    accesses: Counter[tuple[str, int]]  # ("LDG" | "STG" | "LDL" | ..., bits) -> instructions

    @property
    def spills(self) -> bool:
        in_code = any(kind in ("LDL", "STL") for kind, _ in self.accesses)
        return in_code or self.stack_bytes > 0 or self.local_bytes > 0

    def wide_share(self, kind: str, bits: int) -> float:
        """Of the bytes that the code loads ("LDG") or stores ("STG"), the share that instructions
        of at least ``bits`` bits move; each instruction counts once, whatever loop it is in."""
        moved = {width: width * n for (k, width), n in self.accesses.items() if k == kind}
        wide = sum(size for width, size in moved.items() if width >= bits)
        return wide / sum(moved.values()) if moved else 0.0


def report(kernel: CompiledKernel) -> Report:
    """Read a compiled kernel's resources out of its machine code."""
    metadata = kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    numbers = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout + usage.stderr
    )
    if numbers is None:
        raise RuntimeError(f"report: cuobjdump said {usage.stdout!r} {usage.stderr!r}")
    accesses: Counter[tuple[str, int]] = Counter()
    for kind, suffixes in _MEMORY.findall(kernel.asm["sass"]):
        bits = next((_WIDTHS[s] for s in suffixes.split(".") if s in _WIDTHS), 32)
        accesses["LDG" if kind == "LDGSTS" else kind, bits] += 1
    return Report(
        name=metadata.name,
        target=f"sm_{metadata.target.arch}",
        registers=int(numbers[1]),
        stack_bytes=int(numbers[2]),
        local_bytes=int(numbers[3]),
        shared_bytes=metadata.shared,
        accesses=accesses,
    )


def amd_spills(kernel: CompiledKernel) -> int:
    """Vector and scalar registers that a kernel compiled for an AMD target spills."""
    counts = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
    if not counts:
        raise RuntimeError(f"amd_spills: {kernel.metadata.name} names no spill count")
    return sum(map(int, counts))
