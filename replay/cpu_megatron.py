"""Run Megatron-core where it does not expect to run: without a GPU, and without Transformer Engine.

``install_cpu_shims()`` replaces the few names that stand in the way, for tests and the demo. It is
called explicitly, never at import; ``remove_cpu_shims()`` puts everything back. Held against
megatron-core 0.16.1 and 0.19.2 with torch 2.13; one process or several over gloo.

On a machine with a GPU only what stands for a missing Transformer Engine is installed.
"""

import contextlib
import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from packhorse._nvtx import ranged

_ABSENT = object()
_patched: list[tuple[Any, str, Any]] = []


@ranged
def install_cpu_shims() -> bool:
    """Replace what keeps Megatron-core from running here; calling it again does nothing.

    Call it before the first import of Megatron: its ``torch.compile`` decorators are then left out,
    which saves seconds a process. Later is legal, and slower.

    Returns:
        Whether this call replaced anything: then ``remove_cpu_shims`` is the caller's to call.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
    """
    if _patched:
        return False
    try:
        if torch.cuda.is_available():
            importlib.import_module("megatron.core")
        else:
            _import_without_compiling()
            _patch_cuda_calls()
            _patch_device_arguments()
            _patch_random_state()
            _patch_split_sizes()
            _patch_type_names()
        if importlib.util.find_spec("transformer_engine") is None:
            _patch_norm()
            _define_missing_names()
    except BaseException:
        remove_cpu_shims()
        raise
    return bool(_patched)


def remove_cpu_shims() -> None:
    """Undo ``install_cpu_shims``. Megatron stays imported."""
    while _patched:
        owner, name, original = _patched.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _patch(owner: Any, name: str, value: Any) -> None:
    _patched.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


# --- for want of a GPU ----------------------------------------------------------------------------


def _import_without_compiling() -> None:
    """Megatron decorates its small functions with ``torch.compile`` while it is imported.

    On a CPU each would run the C++ compiler on its first call.
    """
    compile_ = torch.compile
    torch.compile = _leave_uncompiled  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
    finally:
        torch.compile = compile_


def _leave_uncompiled(model: Any = None, *args: Any, **options: Any) -> Any:
    return model if model is not None else _leave_uncompiled


class _NoStream:
    """Stands for ``torch.cuda.Stream`` and ``Event``; the CPU runs everything in order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = wait_stream = wait_event = record

    def record_event(self, *args: Any) -> "_NoStream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _patch_cuda_calls() -> None:
    """The device of buffers, the dispatcher's side streams, and synchronisation in the schedules.

    Without them: "Torch not compiled with CUDA enabled".
    """
    stream = _NoStream()

    @contextlib.contextmanager
    def run_in(_: Any) -> Iterator[None]:
        yield

    _patch(torch.cuda, "current_device", lambda: torch.device("cpu"))
    _patch(torch.cuda, "synchronize", lambda *args, **options: None)
    _patch(torch.cuda, "Stream", _NoStream)
    _patch(torch.cuda, "Event", _NoStream)
    _patch(torch.cuda, "current_stream", lambda *args, **options: stream)
    _patch(torch.cuda, "default_stream", lambda *args, **options: stream)
    _patch(torch.cuda, "stream", run_in)
    _patch(torch.Tensor, "cuda", lambda tensor, *args, **options: tensor)


def _patch_device_arguments() -> None:
    """``device="cuda"`` in the schedules' token counts, ``pin_memory=True`` in RoPE under CP.

    A block ``with torch.device(...)`` knows the functions that it gives its device to by identity,
    from a set that is made at its first use. It must be made of the functions that are wrapped
    here: else transformers' ``from_pretrained`` takes its meta tensors for real ones, and leaves
    its buffers unset.
    """
    with torch.device("cpu"):
        torch.empty(0)

    def on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            if str(options.get("device")).startswith("cuda"):
                options["device"] = "cpu"
            if options.get("pin_memory"):
                options["pin_memory"] = False
            return make(*args, **options)

        return made

    for name in ("zeros", "ones", "empty", "tensor", "full", "arange", "rand", "randn"):
        _patch(torch, name, on_host(getattr(torch, name)))


def _patch_random_state() -> None:
    """Activation recompute saves and restores the GPU's random state; here there is none.

    PyTorch's own CPU state is saved by the same code, so dropout stays reproducible.
    """
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def no_state(*args: Any, **options: Any) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def ignore(*args: Any, **options: Any) -> None:
        pass

    _patch(random, "_get_cuda_rng_state", no_state)
    _patch(random, "_set_cuda_rng_state", ignore)
    _patch(torch.cuda, "get_rng_state", no_state)
    _patch(torch.cuda, "manual_seed", ignore)


def _patch_split_sizes() -> None:
    """The all-to-all dispatcher makes NumPy split sizes only of tensors that were on a GPU."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
        out = move(tensor, as_numpy=as_numpy, **options)
        return out.cpu().numpy() if as_numpy and isinstance(out, Tensor) else out

    _patch(dispatcher, "maybe_move_tensor_to_cpu", moved)


def _patch_type_names() -> None:
    """Gradient clipping and the mixed-precision optimizer compare ``Tensor.type()`` with the names
    of CUDA tensors."""
    type_of = torch.Tensor.type

    def named(tensor: Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(dtype, str):  # such a name, of another tensor
            dtype = dtype.replace("torch.cuda.", "torch.")
        out = type_of(tensor, dtype, *args, **options)
        if isinstance(out, str) and not out.startswith("torch.cuda."):
            return out.replace("torch.", "torch.cuda.", 1)
        return out

    _patch(torch.Tensor, "type", named)


# --- for want of Transformer Engine ---------------------------------------------------------------


def _patch_norm() -> None:
    """``WrappedTorchNorm`` refuses sequence parallelism; it only needs its weights marked.

    Megatron sums the gradients of parameters marked ``sequence_parallel`` over the TP ranks.
    """
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    make = norm.__new__

    def new(cls: type, config: Any, *args: Any, **options: Any) -> torch.nn.Module:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        module = make(cls, unsplit, *args, **options)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    _patch(norm, "__new__", new)


def _define_missing_names() -> None:
    """Names that Megatron reads although the import that defines them failed."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        _patch(moe_utils, "te_general_gemm", None)
    mtp = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    if hasattr(mtp, "is_inference_column_parallel_linear"):
        _patch(mtp, "is_inference_column_parallel_linear", lambda module: False)
