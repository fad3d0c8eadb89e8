"""Launch a Triton kernel with little host time, under a name that a profiler's reader knows.

    compiled kernel = cache[device, constants, per argument: dtype and alignment, or width]

Triton's own launch binds and specialises every argument anew: 13 to 24 us on the host of an H200.
``Launcher`` keys the compiled kernel by what Triton would specialise on, so that a kernel is never
run on arguments it was not compiled for. Where the launch of this Triton is not known, a hook is
set, or the tensor is not on a GPU (the interpreter, a compile-only driver), it is Triton's own.

Contract for a kernel: its parameters are pointers, then scalars, then constexprs; every scalar is
in ``do_not_specialize``, since each new rollout length would compile again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor

#: Triton releases whose ``CompiledKernel.run`` takes the arguments given here.
_KNOWN_LAUNCH: Final = triton.__version__.startswith("3.6.")
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


class Launcher:
    """``launch(grid, args, constants)`` of one ``triton.jit`` kernel.

    Attributes:
        num_compiled: kernels looked up so far; one more for each new specialisation.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, Any] = {}

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def __call__(
        self,
        grid: tuple[int, ...],
        args: Sequence[Tensor | int | None],
        constants: Sequence[Any] = (),
        num_warps: int = 4,
    ) -> None:
        """Launch on the current stream of the device of ``args[0]``, a tensor.

        Args:
            grid: programs along each of one to three axes, each at least 1.
            args: pointers and scalars, in the kernel's order.
            constants: its constexprs, in its order.
        """
        first = args[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda:
            self.kernel[grid](*args, *constants, num_warps=num_warps)
            return
        device = first.device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, args, constants, num_warps)
            return
        if not _KNOWN_LAUNCH or _is_hooked():
            self.kernel[grid](*args, *constants, num_warps=num_warps)
            return
        values: list[int | None] = []
        key: list[Any] = [device, num_warps, *constants]
        for arg in args:
            if arg is None:
                values.append(None)
                key.append(None)
            elif isinstance(arg, int):
                values.append(arg)
                key.append(_INT32_MIN <= arg <= _INT32_MAX)
            else:
                address = arg.data_ptr()
                values.append(address)
                key.append(arg.dtype if address & 15 else (arg.dtype,))
        compiled = self._compiled.get(tuple(key))
        if compiled is None:
            self._compiled[tuple(key)] = self.kernel[grid](*args, *constants, num_warps=num_warps)
            return
        sizes = grid + (1,) * (3 - len(grid))
        compiled.run(
            *sizes,
            torch._C._cuda_getCurrentRawStream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *values,
            *constants,
        )


def _is_hooked() -> bool:
    """Whether something, such as a profiler of Triton's, asked to see each launch."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
