"""Collation of routes on the host: one fill against one memcpy and against a padded rectangle.

    python benchmarks/collate_speed.py [--json out.jsonl] [--rounds 7] [--only REGEX] [--dry]
                                       [--mib 1024] [--cpus 2]

B arrays of uint8 [rows, 48, 8] (or int16), as an engine returns them, ``--mib`` MiB together, on
``--cpus`` CPUs; no GPU takes part. The providers take turns, in another order each round, and every
result is freed before the next, so each writes fresh memory; ratios are medians over the rounds of
the ratios within one:

    fill 1, fill 2         ``pack_routes(check_content=False)`` on 1 and 2 threads
    checked 1, checked 2   the same with every id checked
    memcpy                 one NumPy copy of one array of the same bytes into ``torch.empty``
    memcpy, huge pages     the same into ``numpy.empty``, which asks for huge pages, as a fill does
    concatenate            ``numpy.concatenate``
    rectangle              int16 [B, S, 48, 8] of zeros, filled one trajectory after another, left
                           padded; in the first three rounds only

A line holds a provider's milliseconds of each round (``wall_ms``, and ``cpu_ms`` of all threads),
its medians of ratios (``x_memcpy``, ``x_memcpy_huge``, ``x_rectangle``; ``cpu_x_…`` of the CPU
time, which other processes disturb less), the bytes of its result over the packed bytes
(``memory``), how far the process's resident memory rose, over the same (``peak``, where the system
lets the peak be reset), and the share of the machine's CPU time that other processes took
(``load_of_others``).
"""

import argparse
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import triton
from harness import Case, Cases, Setting, check_dry

from packhorse.packed.collate import pack_routes

LAYERS, TOPK = 48, 8
#: what is asked of a provider: key of the line -> at most
ASKED: Final = {
    "fill 2": {"x_memcpy": 1.15, "x_memcpy_huge": 1.15, "peak": 1.02},
    "checked 2": {"peak": 1.02},
}


@dataclass(frozen=True)
class Batch:
    """Trajectories as an engine returns them."""

    routes: list[np.ndarray]  # B of [rows, L, K]
    num_experts: int
    width: int  # S

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.routes]

    @property
    def num_bytes(self) -> int:
        return sum(ids.nbytes for ids in self.routes)


def make_batch(
    num_bytes: int, width: int, shortest: float, num_experts: int, dtype: type = np.uint8
) -> Batch:
    """Lengths uniform from ``shortest`` times ``width`` to ``width``, until they fill the bytes."""
    rng = np.random.default_rng(0)
    draw = rng.random((64, LAYERS, num_experts), dtype=np.float32)
    pattern = np.argpartition(draw, TOPK, axis=-1)[..., :TOPK].astype(dtype)
    per_row, rows, routes = pattern[0].nbytes, num_bytes // pattern[0].nbytes, []
    while rows * per_row > 0:
        length = min(rows, int(rng.integers(int(width * shortest), width + 1)))
        repeats = -(-length // 64)
        routes.append(np.tile(pattern, (repeats, 1, 1))[:length])
        rows -= length
    return Batch(routes, num_experts, width)


# --- providers ------------------------------------------------------------------------------------


def collate(batch: Batch, num_threads: int, check_content: bool) -> torch.Tensor:
    return pack_routes(
        batch.routes, batch.lengths, num_experts=batch.num_experts, topk=TOPK, num_layers=LAYERS,
        check_content=check_content, num_threads=num_threads,
    ).values  # fmt: skip


def memcpy(source: np.ndarray, huge_pages: bool) -> torch.Tensor:
    if huge_pages:
        copied = np.empty(source.shape, dtype=source.dtype)
        np.copyto(copied, source)
        return torch.from_numpy(copied)
    result = torch.empty(source.shape, dtype=torch.from_numpy(source[:0]).dtype)
    np.copyto(result.numpy(), source)
    return result


def rectangle(batch: Batch) -> torch.Tensor:
    result = torch.zeros((len(batch.routes), batch.width, LAYERS, TOPK), dtype=torch.int16)
    for i, ids in enumerate(batch.routes):
        result[i, batch.width - len(ids) :] = torch.from_numpy(ids)
    return result


def rows_of_rectangle(batch: Batch, filled: torch.Tensor) -> torch.Tensor:
    parts = [row[batch.width - length :] for row, length in zip(filled, batch.lengths, strict=True)]
    return torch.cat(parts).to(torch.from_numpy(batch.routes[0][:0]).dtype)


def providers(batch: Batch, source: np.ndarray) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "fill 1": lambda: collate(batch, 1, False),
        "fill 2": lambda: collate(batch, 2, False),
        "checked 1": lambda: collate(batch, 1, True),
        "checked 2": lambda: collate(batch, 2, True),
        "memcpy": lambda: memcpy(source, False),
        "memcpy, huge pages": lambda: memcpy(source, True),
        "concatenate": lambda: torch.from_numpy(np.concatenate(batch.routes)),
        "rectangle": lambda: rectangle(batch),
    }


def batches(num_bytes: int, width: int) -> dict[str, Callable[[], Batch]]:
    return {
        "ragged, 1/16 to 1": lambda: make_batch(num_bytes, width, 1 / 16, 128),
        "mild, 1/2 to 1": lambda: make_batch(num_bytes, width, 1 / 2, 128),
        "uniform": lambda: make_batch(num_bytes, width, 1, 128),
        "ragged, 256 experts": lambda: make_batch(num_bytes, width, 1 / 16, 256),
        "ragged, int16, 384 experts": lambda: make_batch(num_bytes, width, 1 / 16, 384, np.int16),
    }


def cases(setting: Setting) -> Cases:
    """For the check without a clock: every provider gives the rows that concatenate gives."""

    def build(make: Callable[[], Batch]) -> Case:
        batch = make()
        source = np.concatenate(batch.routes)
        made = providers(batch, source)
        calls = {name: lambda i, fn=fn: fn() for name, fn in made.items()}
        calls["rectangle"] = lambda i: rows_of_rectangle(batch, made["rectangle"]())
        return Case(
            tokens=len(source),
            bytes_moved=2 * batch.num_bytes,
            providers=calls,
            expected=lambda i: torch.from_numpy(source),
        )

    small = batches(setting.size(100 << 20), setting.size(16_000))
    return {name: lambda make=make: build(make) for name, make in small.items()}


# --- clock ----------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    commit = os.environ.get("BENCH_COMMIT", "")
    if not commit:
        commit = os.popen("git describe --always --dirty 2>/dev/null").read().strip()
    models = re.findall(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    pages = re.findall(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "huge_pages": pages[0] if pages else "unknown",
        "gpu": "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", _read("/proc/self/status"))
    return int(found[1]) << 10 if found else 0


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def _busy_s() -> float:
    """CPU time of every process of the machine."""
    words = _read("/proc/stat").split("\n", 1)[0].split()[1:]
    ticks = [int(word) for word in words]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


@dataclass(frozen=True)
class Turn:
    wall_s: float
    cpu_s: float
    result_bytes: int
    peak_bytes: int | None  # over the resident memory before


def take_turn(call: Callable[[], torch.Tensor]) -> Turn:
    resets = _reset_peak()
    before = _status_bytes("VmRSS")
    cpu, begin = time.process_time(), time.perf_counter()
    result = call()
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    peak = _status_bytes("VmHWM") - before if resets and before else None
    return Turn(wall_s, cpu_s, result.numel() * result.element_size(), peak)


def measure(name: str, batch: Batch, rounds: int) -> Iterator[dict[str, Any]]:
    """One line a provider, without the environment."""
    source = np.concatenate(batch.routes)
    calls = providers(batch, source)
    turns: dict[str, list[Turn]] = {provider: [] for provider in calls}
    busy, mine, begin = _busy_s(), time.process_time(), time.perf_counter()
    shuffle = random.Random(0)
    for number in range(rounds):
        order = [provider for provider in calls if provider != "rectangle" or number < 3]
        for provider in shuffle.sample(order, len(order)):
            turns[provider].append(take_turn(calls[provider]))
    others = (_busy_s() - busy) - (time.process_time() - mine)
    load = others / ((time.perf_counter() - begin) * (os.cpu_count() or 1))

    def times_of(provider: str, baseline: str, clock: str = "wall_s") -> float:
        pairs = zip(turns[provider], turns[baseline], strict=False)  # the rounds that both took
        return median(getattr(turn, clock) / getattr(other, clock) for turn, other in pairs)

    for provider, taken in turns.items():
        line: dict[str, Any] = {
            "case": name,
            "provider": provider,
            "bytes": batch.num_bytes,
            "trajectories": len(batch.routes),
            "wall_ms": [round(1e3 * turn.wall_s, 2) for turn in taken],
            "cpu_ms": [round(1e3 * turn.cpu_s, 2) for turn in taken],
            "x_memcpy": round(times_of(provider, "memcpy"), 3),
            "x_memcpy_huge": round(times_of(provider, "memcpy, huge pages"), 3),
            "x_rectangle": round(times_of(provider, "rectangle"), 4),
            "cpu_x_memcpy": round(times_of(provider, "memcpy", "cpu_s"), 3),
            "cpu_x_memcpy_huge": round(times_of(provider, "memcpy, huge pages", "cpu_s"), 3),
            "cpu_x_rectangle": round(times_of(provider, "rectangle", "cpu_s"), 4),
            "memory": round(taken[0].result_bytes / batch.num_bytes, 3),
            "load_of_others": round(load, 3),
        }
        peaks = [turn.peak_bytes for turn in taken if turn.peak_bytes is not None]
        if peaks:
            line["peak"] = round(max(peaks) / batch.num_bytes, 4)
        line["asked"] = {
            key: {"at_most": limit, "reached": line[key] <= limit}
            for key, limit in ASKED.get(provider, {}).items()
            if key in line
        }
        yield line


def show(line: dict[str, Any]) -> str:
    asked = "; ".join(
        f"{key} ≤ {verdict['at_most']:g}: {'reached' if verdict['reached'] else 'NOT REACHED'}"
        for key, verdict in line["asked"].items()
    )
    peak = f"{line['peak']:7.3f}" if "peak" in line else f"{'-':>7s}"
    return (
        f"{line['case'][:28]:28s} {line['provider']:19s} {median(line['wall_ms']):9.1f}"
        f" {median(line['cpu_ms']):9.1f} {line['x_memcpy']:9.2f} {line['x_memcpy_huge']:9.2f}"
        f" {line['x_rectangle']:9.3f} {line['memory']:7.2f} {peak}  {asked}".rstrip()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--dry", action="store_true", help="small: check, do not time")
    parser.add_argument("--mib", type=int, default=1024, help="of the packed routes")
    parser.add_argument("--cpus", type=int, default=2, help="that this process may use")
    args = parser.parse_args()
    if args.dry:
        for name in check_dry(cases, args.only):
            print(f"checked {name}")
        return
    if not hasattr(os, "sched_setaffinity"):
        sys.exit("needs Linux")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cpus])
    torch.set_num_threads(args.cpus)
    env = environment()
    print(" | ".join(f"{key} {value}" for key, value in env.items()))
    print(
        f"\n{'case':28s} {'by':19s} {'wall ms':>9s} {'CPU ms':>9s} {'x memcpy':>9s} {'x huge':>9s}"
        f" {'x rect.':>9s} {'memory':>7s} {'peak':>7s}  asked"
    )
    for name, make in batches(args.mib << 20, 16_384).items():
        if not re.search(args.only, name):
            continue
        for line in measure(name, make(), args.rounds):
            print(show(line), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, **env}, ensure_ascii=False) + "\n")
        print(f"{'':28s} other processes took {line['load_of_others']:.0%} of the machine's CPUs")


if __name__ == "__main__":
    main()
