"""Ways from one process to another and to a device, against one plain copy of the same bytes.

    python benchmarks/transport_speed.py [--json out.jsonl] [--rounds 9] [--only REGEX] [--dry]
                                         [--mib 512] [--device-mib 400]

One batch of routes [rows, 48, 8] uint8 and support [rows, 20] int32. The providers of a case take
turns, in another order each round, and every result is freed before the next; ratios are medians
over the rounds of the ratios within one, times medians; ``cpu_ms`` is CPU time of this process,
all threads, which other work on the machine disturbs less than the clock's ``ms``.

``ray``, where Ray is installed: put and get in one process, in a store that holds four of them

    packhorse       ``put_batch`` and ``get_batch``
    numpy           ``ray.put`` and ``ray.get`` of one uint8 array of the same bytes
    chunk           ``put_batch`` and ``get_batch`` of an eighth of the trajectories; ``share`` is
                    what its object takes of what the whole one takes, as the store says

``shared``: written and attached in one process

    packhorse       ``share_batch`` and ``attach_batch``
    memcpy          one NumPy copy of one array of the same bytes into ``torch.empty``
    memcpy, huge    the same into ``numpy.empty``, which asks for huge pages
    shared_memory   ``multiprocessing.shared_memory``, and one NumPy copy into it

``device``, where there is a GPU: ``ms`` is the device's, from an event on the copying stream before
the call to one behind the last copy; ``of_copy`` the rate over that of the bare copy

    copy_           bare: one ``copy_`` of one pinned array of the same bytes, on a side stream
    pinned          ``DeviceStager.stage`` of a pinned batch
    pageable        of one in ordinary memory, through the ring
    shared          of one in pages that ``attach_batch`` mapped
    gathered        of half its trajectories, every other one, from ordinary memory
    to              ``Batch.to`` from ordinary memory, for comparison; the host waits

``overlap``: a stage beside bf16 matrix products of about the same time; ``x_longer`` is the time of
both over that of the longer one alone.
"""

import argparse
import gc
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import triton
from harness import Case, Cases, Setting, check_dry

from packhorse.packed.batch import Batch
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.transport import get_batch, put_batch
from packhorse.packed.transport_device import DeviceStager
from packhorse.packed.transport_shared import attach_batch, share_batch

Line = dict[str, Any]

ROUTES, SUPPORT = "rollout_expert_indices", "rollout_sample_support"
LAYERS, TOPK, CANDIDATES = 48, 8, 20
TRAJECTORIES: Final = 64
#: (case, provider) -> key of the line -> what is asked of it
ASKED: Final[dict[tuple[str, str], dict[str, tuple[str, float]]]] = {
    ("ray", "packhorse"): {"x_numpy": ("at_most", 1.1)},
    ("ray", "chunk"): {"share": ("at_most", 0.126)},
    ("device", "pinned"): {"of_copy": ("at_least", 0.9)},
    ("overlap", "pinned"): {"x_longer": ("at_most", 1.1)},
}


def make_batch(num_bytes: int) -> Batch:
    """Routes of every token and support of every fourth, of trajectories of equal length."""
    per_token = LAYERS * TOPK + CANDIDATES
    length = max(num_bytes // (per_token * TRAJECTORIES * 4) * 4, 4)
    generator = np.random.default_rng(0)
    pattern = generator.integers(0, 128, (4096, LAYERS, TOPK), dtype=np.uint8)
    rows = length * TRAJECTORIES
    routes = np.resize(pattern, (rows, LAYERS, TOPK))
    support = generator.integers(0, 2**17, (rows // 4, CANDIDATES), dtype=np.int32)
    return Batch(
        {
            ROUTES: PackedTensor.from_lengths(torch.from_numpy(routes), [length] * TRAJECTORIES),
            SUPPORT: PackedTensor.from_lengths(
                torch.from_numpy(support), [length // 4] * TRAJECTORIES
            ),
        }
    )


def num_bytes_of(batch: Batch) -> int:
    return batch[ROUTES].values.nbytes + batch[SUPPORT].values.nbytes


def bytes_of(batch: Batch) -> torch.Tensor:
    """All of a batch's rows, as one uint8 tensor on the host."""
    parts = (batch[ROUTES].values, batch[SUPPORT].values)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8).cpu() for part in parts])


# --- turns ----------------------------------------------------------------------------------------


Turns = dict[str, list[float]]


def take_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, *, warm: int = 2
) -> tuple[Turns, Turns]:
    """Milliseconds of each call in each round, by the clock and of this process's CPUs. A call
    gives what keeps its result, with a ``release`` where that takes more than to forget it; that is
    not timed."""
    times: Turns = {name: [] for name in calls}
    cpu: Turns = {name: [] for name in calls}
    shuffle = random.Random(0)
    for number in range(rounds + warm):
        for name in shuffle.sample(list(calls), len(calls)):
            cpu_begin, begin = time.process_time(), time.perf_counter()
            result = calls[name]()
            ms = 1e3 * (time.perf_counter() - begin)
            cpu_ms = 1e3 * (time.process_time() - cpu_begin)
            getattr(result, "release", lambda: None)()
            del result
            gc.collect()
            if number >= warm:
                times[name].append(ms)
                cpu[name].append(cpu_ms)
    return times, cpu


def ratio(times: Turns, of: str, to: str) -> float:
    return median(a / b for a, b in zip(times[of], times[to], strict=True))


class Held:
    """A result and how to give it up."""

    def __init__(self, value: Any, release: Callable[[], object]) -> None:
        self.value, self._release = value, release

    def release(self) -> None:
        self.value = None
        self._release()


# --- ray ------------------------------------------------------------------------------------------


def ray_calls(batch: Batch, array: np.ndarray) -> dict[str, Callable[[], Any]]:
    import ray

    def through_store(put: Callable[[], Any], get: Callable[[Any], Any]) -> Any:
        ref = put()
        return get(ref), ref

    eighth = batch.chunk(8)[3]
    return {
        "packhorse": lambda: through_store(lambda: put_batch(batch), get_batch),
        "numpy": lambda: through_store(lambda: ray.put(array), ray.get),
        "chunk": lambda: through_store(lambda: put_batch(eighth), get_batch),
    }


def ray_sizes(calls: dict[str, Callable[[], Any]]) -> dict[str, int]:
    """Bytes that each call's object takes, as the store says."""
    import ray

    sizes = {}
    for name, call in calls.items():
        _, ref = call()
        sizes[name] = ray.experimental.get_object_locations([ref])[ref]["object_size"]
    return sizes


def measure_ray(num_bytes: int, rounds: int) -> Iterator[Line]:
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    batch = make_batch(num_bytes)
    array = bytes_of(batch).numpy()
    ray.init(
        num_cpus=1,
        object_store_memory=4 * num_bytes,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        calls = ray_calls(batch, array)
        if not torch.equal(bytes_of(calls["packhorse"]()[0]), torch.from_numpy(array)):
            raise ValueError("ray: another batch came back")
        sizes = ray_sizes(calls)
        times, cpu = take_turns(calls, rounds, warm=4)
        for name, taken in times.items():
            num_bytes = array.nbytes // (8 if name == "chunk" else 1)
            line = {"case": "ray", "provider": name, "bytes": num_bytes, "ms": rounded(taken)}
            line |= {"object_bytes": sizes[name], "share": sizes[name] / sizes["packhorse"]}
            line |= {"cpu_ms": rounded(cpu[name]), "x_numpy": round(ratio(times, name, "numpy"), 3)}
            line["x_numpy_cpu"] = round(ratio(cpu, name, "numpy"), 3)
            yield line | {"ray": ray.__version__}
    finally:
        ray.shutdown()


# --- shared memory --------------------------------------------------------------------------------


def shared_calls(batch: Batch, array: np.ndarray) -> dict[str, Callable[[], Any]]:
    def share() -> Held:
        with share_batch(batch) as shared:
            return Held(attach_batch(shared.handle), lambda: None)

    def memcpy(into: np.ndarray) -> Held:
        np.copyto(into, array)
        return Held(torch.from_numpy(into), lambda: None)

    def shared_memory() -> Held:
        memory = SharedMemory(create=True, size=array.nbytes)
        other = SharedMemory(memory.name)
        memcpy(np.ndarray(array.shape, np.uint8, memory.buf))
        value = torch.from_numpy(np.ndarray(array.shape, np.uint8, other.buf))

        def release() -> None:
            nonlocal value
            del value
            gc.collect()
            other.close()
            memory.close()
            memory.unlink()

        return Held(value.clone() if array.nbytes < 2**24 else None, release)

    return {
        "packhorse": share,
        "memcpy": lambda: memcpy(torch.empty(array.nbytes, dtype=torch.uint8).numpy()),
        "memcpy, huge": lambda: memcpy(np.empty_like(array)),
        "shared_memory": shared_memory,
    }


def measure_shared(num_bytes: int, rounds: int) -> Iterator[Line]:
    batch = make_batch(num_bytes)
    array = bytes_of(batch).numpy()
    calls = shared_calls(batch, array)
    if not torch.equal(bytes_of(calls["packhorse"]().value), torch.from_numpy(array)):
        raise ValueError("shared: another batch came back")
    times, cpu = take_turns(calls, rounds)
    for name, taken in times.items():
        line = {"case": "shared", "provider": name, "bytes": array.nbytes, "ms": rounded(taken)}
        line["cpu_ms"] = rounded(cpu[name])
        for other in ("memcpy", "memcpy, huge"):
            line[f"x_{other.replace(', ', '_')}"] = round(ratio(times, name, other), 3)
        yield line


# --- device ---------------------------------------------------------------------------------------


def device_calls(
    batch: Batch, stager: DeviceStager, stream: "torch.cuda.Stream", attached: Batch
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Calls that send, and how many bytes each sends."""
    source = bytes_of(batch).pin_memory()
    target = torch.empty_like(source, device="cuda")
    pinned, every_other = batch.pin_memory(), range(0, len(batch), 2)

    def bare() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def to() -> Any:
        with torch.cuda.stream(stream):
            return batch.to("cuda")

    calls = {
        "copy_": bare,
        "pinned": lambda: stager.stage(pinned),
        "pageable": lambda: stager.stage(batch),
        "shared": lambda: stager.stage(attached),
        "gathered": lambda: stager.stage(batch, trajectories=every_other),
        "to": to,
    }
    sent = dict.fromkeys(calls, source.nbytes)
    return calls, sent | {"gathered": num_bytes_of(batch[every_other])}


def device_ms(call: Callable[[], object], stream: "torch.cuda.Stream") -> tuple[float, float]:
    """(from before the call to its last copy, on the device; host time of the call)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record(stream)
    started = time.perf_counter()
    result = call()
    host_ms = 1e3 * (time.perf_counter() - started)
    end.record(stream)
    torch.cuda.synchronize()
    del result
    return begin.elapsed_time(end), host_ms


def measure_device(num_bytes: int, rounds: int) -> Iterator[Line]:
    stream = torch.cuda.Stream()
    stager, batch = DeviceStager(stream=stream), make_batch(num_bytes)
    with share_batch(batch) as shared:
        attached = attach_batch(shared.handle)
    calls, sent = device_calls(batch, stager, stream, attached)
    for name in ("pinned", "pageable", "shared"):
        if not torch.equal(bytes_of(calls[name]().wait()), bytes_of(batch)):
            raise ValueError(f"device: {name} brings another batch")
    half = stager.stage(batch, trajectories=range(0, len(batch), 2)).wait()
    if not torch.equal(bytes_of(half), bytes_of(batch[::2])):
        raise ValueError("device: gathered brings another batch")
    del half

    times: Turns = {name: [] for name in calls}
    host: Turns = {name: [] for name in calls}
    shuffle = random.Random(0)
    for number in range(rounds + 2):
        for name in shuffle.sample(list(calls), len(calls)):
            ms, host_ms = device_ms(calls[name], stream)
            if number >= 2:
                times[name].append(ms)
                host[name].append(host_ms)
    for name, taken in times.items():
        share = sent[name] / sent["copy_"]
        yield {
            "case": "device",
            "provider": name,
            "bytes": sent[name],
            "ms": rounded(taken),
            "host_ms": rounded(host[name]),
            "gbps": round(sent[name] / median(taken) / 1e6, 2),
            "of_copy": round(share / ratio(times, name, "copy_"), 3),
            "threads": stager._num_threads,
        }
    yield from measure_overlap(calls, stream, median(times["copy_"]), rounds)


def measure_overlap(
    calls: dict[str, Callable[[], Any]], stream: "torch.cuda.Stream", copy_ms: float, rounds: int
) -> Iterator[Line]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    main = torch.cuda.current_stream()

    def products(count: int) -> None:
        for _ in range(count):
            torch.matmul(a, a, out=out)

    products(20)
    one_ms = median(device_ms(lambda: products(5), main)[0] / 5 for _ in range(5))
    for name in ("copy_", "pinned", "pageable"):
        alone_ms = median(device_ms(calls[name], stream)[0] for _ in range(3))
        count = max(round(max(alone_ms, copy_ms) / one_ms), 1)

        def both(name: str = name, count: int = count) -> Any:
            stream.wait_stream(main)  # both begin behind the first event
            products(count)
            result = calls[name]()
            main.wait_stream(stream)
            return result

        times: Turns = {"copy": [], "product": [], "both": []}
        for _ in range(rounds):
            times["copy"].append(device_ms(calls[name], stream)[0])
            times["product"].append(device_ms(lambda c=count: products(c), main)[0])
            times["both"].append(device_ms(both, main)[0])
        longer = [max(pair) for pair in zip(times["copy"], times["product"], strict=True)]
        yield {
            "case": "overlap",
            "provider": name,
            "products": count,
            **{f"{key}_ms": rounded(taken) for key, taken in times.items()},
            "x_longer": round(
                median(a / b for a, b in zip(times["both"], longer, strict=True)), 3
            ),
        }  # fmt: skip


# --- check without a clock ------------------------------------------------------------------------


def cases(setting: Setting) -> Cases:
    """For the harness: each way gives the same bytes. Ray has its check among the tests."""

    def build(calls: dict[str, Callable[[], torch.Tensor]], batch: Batch) -> Case:
        return Case(
            tokens=batch[ROUTES].num_rows,
            bytes_moved=2 * num_bytes_of(batch),
            providers={name: lambda i, call=call: call() for name, call in calls.items()},
            expected=lambda i: bytes_of(batch),
        )

    def shared() -> Case:
        batch = make_batch(setting.size(100 << 20))
        made = shared_calls(batch, bytes_of(batch).numpy())

        def read(call: Callable[[], Any]) -> torch.Tensor:
            held = call()
            value = held.value
            result = bytes_of(value) if isinstance(value, Batch) else value
            held.release()
            return result

        return build({name: lambda call=call: read(call) for name, call in made.items()}, batch)

    def device() -> Case:
        batch, stager = make_batch(setting.size(100 << 20)), DeviceStager(setting.device)
        both = [range(0, len(batch), 2), range(1, len(batch), 2)]

        def gathered() -> torch.Tensor:
            halves = [stager.stage(batch, trajectories=ids).wait() for ids in both]
            order = [i // 2 + (i % 2) * len(halves[0]) for i in range(len(batch))]
            return bytes_of(Batch.cat(halves)[order])

        calls = {
            "stage": lambda: bytes_of(stager.stage(batch).wait()),
            "gathered": gathered,
            "to": lambda: bytes_of(batch.to(setting.device)),
        }
        return build(calls, batch)

    return {"shared": shared, "device": device}


# --- command --------------------------------------------------------------------------------------


def rounded(ms: list[float]) -> list[float]:
    return [round(value, 3) for value in ms]


def environment() -> dict[str, Any]:
    commit = os.environ.get("BENCH_COMMIT", "")  # for a copy of the tree without its history
    if not commit:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        ).stdout.strip()
    models = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def judged(line: Line) -> Line:
    asked = ASKED.get((line["case"], line["provider"]), {})
    line["asked"] = {
        key: {
            bound: limit,
            "reached": line[key] <= limit if bound == "at_most" else line[key] >= limit,
        }
        for key, (bound, limit) in asked.items()
    }
    return line


def show(line: Line) -> str:
    shown = [f"{line['case']:8s} {line['provider']:14s}"]
    for key, value in line.items():
        if key.endswith("ms"):
            shown.append(f"{key} {median(value):.2f}")
        elif key.startswith("x_") or key in (
            "share",
            "of_copy",
            "gbps",
            "object_bytes",
            "products",
        ):
            shown.append(f"{key} {value:.4g}")
    for key, verdict in line["asked"].items():
        (bound, limit), (_, reached) = verdict.items()
        words = f"{key} {bound.replace('_', ' ')} {limit:g}"
        shown.append(f"{words}: {'reached' if reached else 'NOT REACHED'}")
    return "  ".join(shown)


def has_ray() -> bool:
    try:
        import ray  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU: check, do not time")
    parser.add_argument("--mib", type=int, default=512, help="of the batch for ray and shared")
    parser.add_argument("--device-mib", type=int, default=400, help="of the batch for device")
    args = parser.parse_args()
    if args.dry:
        for name in check_dry(cases, args.only):
            print(f"checked {name}")
        return
    measures: dict[str, tuple[str, Callable[[], Iterator[Line]]]] = {
        "ray": (
            "" if has_ray() else "Ray is not installed",
            lambda: measure_ray(args.mib << 20, args.rounds),
        ),
        "shared": ("", lambda: measure_shared(args.mib << 20, args.rounds)),
        "device": (
            "" if torch.cuda.is_available() else "no GPU here",
            lambda: measure_device(args.device_mib << 20, args.rounds),
        ),
    }
    env = environment()
    print(" | ".join(f"{key} {value}" for key, value in env.items()))
    for name, (lacking, measure) in measures.items():
        if not re.search(args.only, name):
            continue
        if lacking:
            print(f"{name}: {lacking}, left out")
            continue
        for line in measure():
            print(show(judged(line)), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, **env}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
