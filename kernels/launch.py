"""Launch a Triton kernel with little host time, under a name that a profiler's reader knows.

    compiled kernel = cache[device, constants, per argument: dtype and alignment, or width]

Triton's own launch binds and specialises every argument anew: 13 to 24 us on the host of an H200.
``Launcher`` keys the compiled kernel by what Triton would specialise on, so that a kernel is never
run on arguments it was not compiled for. Where the launch of this Triton is not known, a hook is
set, or the tensor is not on a GPU (the interpreter, a compile-only driver), it is Triton's own.

Contract for a kernel: its parameters are pointers, then scalars, then constexprs; every scalar is
in ``do_not_specialize``, since each new rollout length would compile again.
"""

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack

#: Triton releases whose launch takes the arguments given here.
_KNOWN_LAUNCH: Final = triton.__version__.startswith("3.6.")
_RUNTIME: Final = triton.knobs.runtime if _KNOWN_LAUNCH else None
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1

_SHORT: Final = {"fp32": "f32", "fp64": "f64", "fp16": "f16", "i1": "u8"}


def kernel_name(verb_noun: str, *parameters: str) -> Callable[[Any], str]:
    """``repr`` for ``triton.jit``: ``packhorse_gather_routes_u8_i32_TOPK8``.

    Args:
        verb_noun: the kernel's name without underscores around it and without ``_kernel``.
        parameters: what the name shows: of a pointer its element type, of a constexpr its value.
    """

    def name(specialization: Any) -> str:
        parts = [f"packhorse_{verb_noun}"]
        for parameter in parameters:
            kind = specialization.signature.get(parameter)
            if isinstance(kind, str) and kind.startswith("*"):
                parts.append(_SHORT.get(kind[1:], kind[1:]))
            else:
                value = specialization.constants.get(parameter)
                if value is not None:  # a pointer that is None names nothing
                    parts.append(f"{parameter}{int(value)}")
        return "_".join(parts)

    return name


def is_plain_cuda(tensor: Tensor) -> bool:
    """Whether the dispatcher would only pass a call of an operator on to its CUDA implementation:
    nothing traces, fakes, compiles or profiles operators, and its memory holds its values."""
    return (
        not torch.compiler.is_compiling()  # first: Dynamo traces nothing of what follows
        and type(tensor) is Tensor
        and tensor.is_cuda
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not _len_torch_dispatch_stack()
        and peek_interpreter_stack() is None  # functorch's transforms
        and torch._C._get_tracing_state() is None  # torch.jit.trace
        and not torch.autograd.profiler._is_profiler_enabled
    )


def called_directly(op: Any, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, whose CUDA implementation is ``launcher``: a plain call on a GPU goes straight there,
    since the dispatcher costs it 5 us."""

    def call(first: Tensor, *args: Any) -> Any:
        return launcher(first, *args) if is_plain_cuda(first) else op(first, *args)

    return call


class Launcher:
    """``launch(grid, args, constants)`` of one ``triton.jit`` kernel, whose pointers end in _ptr.

    Attributes:
        kernel: what ``triton.jit`` made.
        num_compiled: specialisations launched so far on a GPU.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._num_pointers = sum(name.endswith("_ptr") for name in kernel.arg_names)
        self._compiled: dict[Any, Any] = {}

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Tensor | int | float | None, ...],
        constants: tuple[Any, ...] = (),
        num_warps: int = 4,
    ) -> None:
        """Launch on the current stream of the device of ``args[0]``, a tensor.

        Args:
            grid: programs along each of one to three axes, each at least 1.
            args: pointers, then scalars, in the kernel's order; each scalar is always an int, or
                always a float, which is float32 in the kernel.
            constants: its constexprs, in its order.
        """
        first: Any = args[0]
        tensors: Any = args[: self._num_pointers]
        scalars: Any = args[self._num_pointers :]
        for scalar in scalars:
            if type(scalar) is not int:
                # a bool would be compiled as one bit, and NumPy's numbers not at all
                scalars = [
                    float(s) if isinstance(s, float) else int(operator.index(s)) for s in scalars
                ]
                break
        if not first.is_cuda:
            self.kernel[grid](*tensors, *scalars, *constants, num_warps=num_warps)
            return
        device = first.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, args, constants, num_warps)
            return
        key, addresses = _specialisation(device, tensors, scalars, constants, num_warps)
        launch = self._compiled.get(key)
        if launch is None or is_hooked():
            compiled = self.kernel[grid](*tensors, *scalars, *constants, num_warps=num_warps)
            self._compiled[key] = _direct_launch(compiled)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        launch((*grid, 1, 1)[:3], stream, (*addresses, *scalars, *constants))

    def compiled_for(
        self, args: tuple[Any, ...], constants: tuple[Any, ...] = (), num_warps: int = 4
    ) -> Callable[[tuple[int, int, int], int, tuple[Any, ...]], None] | None:
        """What a call with such ``args`` ends in, for ``(grid, stream, addresses, scalars and
        constants)``; None before the first such call, where it is not known, or under a hook. Its
        caller answers for arguments that stay what they are compiled for, and for the device."""
        tensors, scalars = args[: self._num_pointers], args[self._num_pointers :]
        key, _ = _specialisation(args[0].get_device(), tensors, scalars, constants, num_warps)
        return None if is_hooked() else self._compiled.get(key)


def _specialisation(
    device: int, tensors: Any, scalars: Any, constants: tuple[Any, ...], num_warps: int
) -> tuple[tuple[Any, ...], list[int | None]]:
    """What Triton compiles for: dtypes, which pointers are aligned, which scalars need 64 bits; and
    the addresses."""
    parts: list[Any] = [device, num_warps, constants]
    addresses: list[int | None] = []
    union = 0
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            addresses.append(None)
        else:
            address = tensor.data_ptr()
            parts.append(tensor.dtype)
            addresses.append(address)
            union |= address
    if union & 15:
        parts.append(tuple([a is None or a & 15 == 0 for a in addresses]))
    if scalars and (min(scalars) < _INT32_MIN or max(scalars) > _INT32_MAX):
        parts.append(("wide", *[_INT32_MIN <= s <= _INT32_MAX for s in scalars]))
    return tuple(parts), addresses


def _direct_launch(compiled: Any) -> Callable[[tuple[int, ...], int, tuple[Any, ...]], None] | None:
    """What Triton's launch ends in, without what it does before; None where that is not known."""
    if not _KNOWN_LAUNCH:
        return None
    run = compiled.run
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, function, metadata = run.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl

    def direct(grid: tuple[int, ...], stream: int, arguments: tuple[Any, ...]) -> None:
        launch(
            *grid, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
            *arguments,
        )  # fmt: skip

    return direct


def is_hooked() -> bool:
    """Whether something, such as a profiler of Triton's, asked to see each launch."""
    if _RUNTIME is None:
        return False
    return bool(_RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls)
