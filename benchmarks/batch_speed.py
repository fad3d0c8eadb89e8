"""Operations of a ``Batch`` of 1,024 trajectories with 500 MB of routes, on the host.

    python benchmarks/batch_speed.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

Five dense fields, routes of 48 x 8 bytes a token, a support of 20 candidates a row or ragged with
8 a row in the mean. Nothing here needs a GPU. ``packhorse`` is the operation on the whole batch;
``torch`` the same by a trainer's own lists of one tensor a trajectory: dense tensors by ``[a:b]``,
``index_select`` and ``torch.cat``, packed ones by slices of the lists and ``torch.cat`` of what
they name.

    wall_us   best call of each round; what copies takes turns with ``copy_us``, torch's copies run
              once
    copy_us   one NumPy copy of as many bytes as the result has, into fresh memory
    ratio     best wall over best copy; asked of packhorse: at most 1.25
    views     the result shares the batch's memory; asked: at most 50 us for a slice or a chunk

The machine's load stands in each line: on a shared one the best call is the figure.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from harness import Case, Cases, Setting, check_dry
from torch import Tensor

from packhorse.packed.batch import Batch
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.segments import PackedSegments
from packhorse.packed.tensor import PackedTensor

TRAJECTORIES, LAYERS, TOPK, CANDIDATES, CHUNKS = 1024, 48, 8, 20, 8
ROUTES, SUPPORT = "rollout_expert_indices", "rollout_sample_support"
#: figure -> what is asked of packhorse
ASKED: Final = {"slice_us": 50.0, "ratio": 1.25}

Lists = dict[str, Any]  # dense tensors, and lists of one tensor a trajectory


@dataclass(frozen=True)
class HostCase:
    """One operation: what it gives, as tensors, and what is timed."""

    ours: Callable[[], Any]
    torch: Callable[[], Any]
    parts_of_ours: Callable[[Any], tuple[Tensor, ...]]
    parts_of_torch: Callable[[Any], tuple[Tensor, ...]]
    is_view: bool
    results: int = 1  # of one call: a chunk's time is its share
    num_bytes: int = 0  # of the results; of views what they show


# --- batches --------------------------------------------------------------------------------------


def make_batch(setting: Setting, ragged: bool) -> Batch:
    lengths = setting.lengths(400, 2200, TRAJECTORIES)
    responses = [max(length // 2, 1) for length in lengths]
    width, rows, answers = max(lengths), sum(lengths), sum(responses)
    generator = np.random.default_rng(0)

    def integers(high: int, dtype: Any, *shape: int) -> Tensor:
        return torch.from_numpy(generator.integers(0, high, shape, dtype=dtype))

    def support() -> PackedTensor | PackedRagged:
        if not ragged:
            ids = integers(150_000, np.int32, answers, CANDIDATES)
            return PackedTensor.from_lengths(ids, responses)
        widths = generator.integers(0, 17, answers)
        ids = integers(150_000, np.int32, int(widths.sum()))
        return PackedRagged.from_lengths(ids, widths, responses)

    return Batch({
        "token_ids": integers(150_000, np.int64, TRAJECTORIES, width),
        "attention_mask": integers(2, np.int64, TRAJECTORIES, width),
        "loss_mask": integers(2, np.uint8, TRAJECTORIES, width).bool(),
        "advantages": integers(9, np.int32, TRAJECTORIES, width).float(),
        "rewards": integers(9, np.int32, TRAJECTORIES).float(),
        ROUTES: PackedTensor.from_lengths(integers(128, np.uint8, rows, LAYERS, TOPK), lengths),
        SUPPORT: support(),
    })  # fmt: skip


def as_lists(batch: Batch) -> Lists:
    """The same as a trainer without packed fields holds it; a ragged segment is ids and widths."""
    lists: Lists = {}
    for name, field in batch.fields.items():
        if isinstance(field, PackedRagged):
            lists[f"{name} ids"] = [ids for ids, _ in field]
            lists[f"{name} widths"] = [offsets.diff() for _, offsets in field]
        else:
            lists[name] = list(field) if isinstance(field, PackedTensor) else field
    return lists


def of_batch(batch: Batch) -> tuple[Tensor, ...]:
    """Its tensors: of a packed field the rows and where each trajectory's begin."""
    parts: list[Tensor] = []
    for field in batch.fields.values():
        if isinstance(field, PackedRagged):
            parts += [field.values, field.row_offsets.diff()]
        elif isinstance(field, PackedTensor):
            parts.append(field.values)
        else:
            parts.append(field)
        if isinstance(field, PackedSegments):
            parts.append(field.cu_seqlens)
    return tuple(parts)


def of_lists(lists: Lists) -> tuple[Tensor, ...]:
    """The same of ``as_lists``, whether its lists are joined already or not."""
    parts: list[Tensor] = []
    for name, field in lists.items():
        parts.append(torch.cat(field) if isinstance(field, list) else field)
        if name in (ROUTES, SUPPORT, f"{SUPPORT} widths"):
            pieces = field if isinstance(field, list) else lists["pieces"][name]
            counts = torch.tensor([len(piece) for piece in pieces])
            parts.append(torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32))
    return tuple(parts)


def bytes_of(batch: Batch) -> int:
    return sum(part.nbytes for part in of_batch(batch))


# --- cases ----------------------------------------------------------------------------------------


def build(setting: Setting, operation: str, ragged: bool) -> HostCase:
    batch = make_batch(setting, ragged)
    lists = as_lists(batch)
    start, stop = TRAJECTORIES // 8, TRAJECTORIES // 2
    ids = torch.randperm(TRAJECTORIES, generator=torch.Generator().manual_seed(1))
    ids = ids[: TRAJECTORIES // 2].tolist()
    step = TRAJECTORIES // CHUNKS

    def cut(a: int, b: int) -> Lists:
        return {name: field[a:b] for name, field in lists.items()}

    def cut_all() -> list[Lists]:
        return [cut(a, a + step) for a in range(0, TRAJECTORIES, step)]

    def join(name: str, pieces: list[Tensor], joined: Lists) -> None:
        joined[name] = torch.cat(pieces)
        joined.setdefault("pieces", {})[name] = pieces

    def select() -> Lists:
        rows, joined = torch.tensor(ids), {}
        for name, field in lists.items():
            if isinstance(field, list):
                join(name, [field[i] for i in ids], joined)
            else:
                joined[name] = field.index_select(0, rows)
        return joined

    def cat() -> Lists:
        joined: Lists = {}
        for name, field in lists.items():
            if isinstance(field, list):
                join(name, [piece for part in parts for piece in part[name]], joined)
            else:
                joined[name] = torch.cat([part[name] for part in parts])
        return joined

    def each(of: Callable[[Any], tuple[Tensor, ...]]) -> Callable[[Any], tuple[Tensor, ...]]:
        return lambda results: tuple(part for result in results for part in of(result))

    def of_joined(joined: Lists) -> tuple[Tensor, ...]:
        pieces = joined.get("pieces", {})
        return of_lists({name: pieces.get(name, joined[name]) for name in lists})

    if operation == "slice":
        return HostCase(lambda: batch[start:stop], lambda: cut(start, stop), of_batch, of_lists,
                        is_view=True, num_bytes=bytes_of(batch[start:stop]))  # fmt: skip
    if operation == "chunk":
        return HostCase(lambda: batch.chunk(CHUNKS), cut_all, each(of_batch), each(of_lists),
                        is_view=True, results=CHUNKS, num_bytes=bytes_of(batch))  # fmt: skip
    if operation == "select":
        return HostCase(lambda: batch[ids], select, of_batch, of_joined, is_view=False,
                        num_bytes=bytes_of(batch[ids]))  # fmt: skip
    chunks, parts = batch.chunk(CHUNKS), cut_all()
    return HostCase(lambda: Batch.cat(chunks), cat, of_batch, of_joined, is_view=False,
                    num_bytes=bytes_of(batch))  # fmt: skip


def host_cases(setting: Setting) -> dict[str, Callable[[], HostCase]]:
    def one(operation: str, ragged: bool) -> Callable[[], HostCase]:
        return lambda: build(setting, operation, ragged)

    return {
        f"{operation}, {form}": one(operation, form == "ragged support")
        for operation in ("slice", "chunk", "select", "cat")
        for form in ("support of one width", "ragged support")
    }


def cases(setting: Setting) -> Cases:
    """As the harness checks them: the tensors of both providers against each other."""

    def checked(make: Callable[[], HostCase]) -> Callable[[], Case]:
        def case() -> Case:
            host = make()

            def of_torch(_: int) -> tuple[Tensor, ...]:
                return host.parts_of_torch(host.torch())

            return Case(
                tokens=0,
                bytes_moved=host.num_bytes,
                providers={"packhorse": lambda _: host.parts_of_ours(host.ours())},
                expected=of_torch,
            )

        return case

    return {name: checked(make) for name, make in host_cases(setting).items()}


# --- clocks ---------------------------------------------------------------------------------------


def best_us(call: Callable[[], object], calls: int = 1, repeats: int = 1) -> float:
    """Host time of one call, the best of ``repeats`` runs of ``calls``."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return 1e6 * best


def measure(case: HostCase, rounds: int) -> list[dict[str, Any]]:
    """One line a provider, without case and environment."""
    times: dict[str, list[float]] = {"packhorse": [], "torch": [], "copy": []}
    source = np.ones(case.num_bytes, dtype=np.uint8)
    for _ in range(rounds):  # in turns, so that the machine's load is under all alike
        if case.is_view:
            for name, call in (("packhorse", case.ours), ("torch", case.torch)):
                times[name].append(best_us(call, calls=5, repeats=200) / case.results)
        else:
            turns = [(best_us(case.ours), best_us(source.copy)) for _ in range(5)]
            times["packhorse"].append(min(ours for ours, _ in turns))
            times["copy"].append(min(copy for _, copy in turns))
            if not times["torch"]:
                times["torch"].append(best_us(case.torch))
    lines = []
    for name in ("packhorse", "torch"):
        line: dict[str, Any] = {"provider": name, "bytes": case.num_bytes, "view": case.is_view}
        line["wall_us"] = [round(us, 2) for us in times[name]]
        if times["copy"]:
            line["copy_us"] = [round(us, 2) for us in times["copy"]]
            line["ratio"] = round(min(times[name]) / min(times["copy"]), 3)
        if name == "packhorse":
            figure, key = (
                (min(times[name]), "slice_us") if case.is_view else (line["ratio"], "ratio")
            )
            line["asked"], line["reached"] = {key: ASKED[key]}, bool(figure <= ASKED[key])
        lines.append(line)
    return lines


def environment() -> dict[str, Any]:
    commit = os.environ.get("BENCH_COMMIT", "")
    if not commit:
        command = ["git", "describe", "--always", "--dirty"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = ran.stdout.strip()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "gpu": "none",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "triton": "none",
        "cuda": "none",
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--rounds", type=int, default=3, help="whole passes; the lines hold all")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--dry", action="store_true", help="1/100 of the size: check, do not time")
    args = parser.parse_args(arguments)
    if args.dry:
        for name in check_dry(cases, args.only):
            print(f"checked {name}")
        return
    env = environment()
    print(" | ".join(f"{key} {value}" for key, value in env.items()))
    print(
        f"{'case':30s} {'provider':10s} {'MB':>7s} {'wall us':>11s} {'copy us':>11s} {'ratio':>6s}"
    )
    wrong = []
    for name, make in host_cases(Setting(device="cpu")).items():
        if not re.search(args.only, name):
            continue
        case = make()
        got = case.parts_of_ours(case.ours())
        wanted = case.parts_of_torch(case.torch())
        if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
            wrong.append(name)
            print(f"{name}: wrong, not timed")
            continue
        del got, wanted
        for line in measure(case, args.rounds):
            copy = f"{min(line['copy_us']):11.0f}" if "copy_us" in line else f"{'-':>11s}"
            ratio = f"{line['ratio']:6.2f}" if "ratio" in line else f"{'-':>6s}"
            verdict = {True: "reached", False: "NOT REACHED", None: ""}[line.get("reached")]
            print(
                f"{name:30s} {line['provider']:10s} {line['bytes'] / 1e6:7.0f}"
                f" {min(line['wall_us']):11.1f} {copy} {ratio} {verdict}".rstrip()
            )
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": name, **line, **env}) + "\n")
        del case
    if wrong:
        sys.exit(f"not timed: {len(wrong)} of the cases")


if __name__ == "__main__":
    main()
