"""The wire's codecs, one way and the other: against pybase64 alone, one memcpy, and JSON lists.

    python benchmarks/wire_speed.py [--json out.jsonl] [--rounds 9] [--only REGEX] [--dry]

One array a message; no GPU takes part, and every codec runs on one thread. The codecs take turns,
in another order each round; a turn is the fastest of 5 calls one after another, each result freed
before the next call. Ratios are medians over the rounds of the ratios within one:

    json             ``encode_json``, ``decode_json``
    pybase64         ``b64encode`` and ``b64decode(validate=True)`` of the same bytes, no more
    pybase64, loose  the same with its default, ``validate=False``
    frame            ``encode_frame``, ``decode_frame(owned=True)``
    frame, views     ``frame_parts``, ``decode_frame``
    frame, crc32     as ``frame``, where ``xxhash`` is not installed
    memcpy           one NumPy copy, which asks for huge pages
    lists            ``orjson`` of nested lists, and the array again; in the first two rounds only

A line holds the milliseconds of each round both ways, wall and CPU of the thread, the ratios to
pybase64 of both ways together and to a memcpy of each, and the peaks of traced memory beyond the
input over the array's bytes. On a machine that others use too the ratios of CPU time say more:
``asked`` judges them, and the peaks.
"""

import argparse
import json
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from collate_speed import environment
from harness import Case, Cases, Setting, check_dry

from packhorse.packed.wire import (
    decode_frame,
    decode_json,
    encode_frame,
    encode_json,
    frame_parts,
)

try:
    import orjson
    import pybase64
except ImportError:  # --dry runs without the extra "wire"
    orjson = pybase64 = None

CALLS, LIST_ROUNDS = 5, 2
#: what is asked of a codec: key of the line -> at most
ASKED: Final = {
    "json": {"cpu_x_pybase64": 1.5, "encode_peak": 1.4, "decode_peak": 1.05},
    "frame": {
        "cpu_encode_x_memcpy": 1.6, "cpu_decode_x_memcpy": 1.6, "encode_peak": 1.05,
        "decode_peak": 1.05,
    },
    "frame, views": {
        "cpu_encode_x_memcpy": 1.6, "cpu_decode_x_memcpy": 1.6, "encode_peak": 0.05,
        "decode_peak": 0.05,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Codec:
    encode: Callable[[], Any]
    decode: Callable[[bytes], Any]
    array: Callable[[Any], np.ndarray]  # of what is decoded
    received: Callable[[Any], bytes] = bytes  # of what is encoded


def codecs(given: np.ndarray) -> dict[str, Codec]:
    raw = given.tobytes()
    body, fields = {"choices": [{"text": "", "field": given}]}, {"field": given}

    def of_bytes(data: bytes) -> np.ndarray:
        return np.frombuffer(data, given.dtype).reshape(given.shape)

    def of_body(tree: Any) -> np.ndarray:
        return tree["choices"][0]["field"].values

    def of_frame(frame: Any) -> np.ndarray:
        return frame.fields["field"].values

    made = {
        "json": Codec(lambda: encode_json(body), decode_json, of_body),
        "pybase64": Codec(
            lambda: pybase64.b64encode(raw),
            lambda text: pybase64.b64decode(text, validate=True),
            of_bytes,
        ),
        "pybase64, loose": Codec(lambda: pybase64.b64encode(raw), pybase64.b64decode, of_bytes),
        "frame": Codec(
            lambda: encode_frame(fields), lambda frame: decode_frame(frame, owned=True), of_frame
        ),
        "frame, views": Codec(lambda: frame_parts(fields), decode_frame, of_frame, b"".join),
        "frame, crc32": Codec(
            lambda: encode_frame(fields, checksum="crc32"),
            lambda frame: decode_frame(frame, owned=True),
            of_frame,
        ),
        "memcpy": Codec(
            lambda: given.copy(), lambda data: of_bytes(data).copy(), lambda array: array
        ),
        "lists": Codec(
            lambda: orjson.dumps({"field": given.tolist()}),
            lambda text: np.array(orjson.loads(text)["field"], dtype=given.dtype),
            lambda array: array,
        ),
    }
    missing = ("pybase64", "pybase64, loose", "lists") if pybase64 is None else ()
    return {name: codec for name, codec in made.items() if name not in missing}


def arrays(setting: Setting) -> dict[str, Callable[[], np.ndarray]]:
    rng = np.random.default_rng(0)
    tokens = setting.size(30_000)
    return {
        "routes, 30,000 x 48 x 8 uint8": lambda: rng.integers(0, 128, (tokens, 48, 8), np.uint8),
        "routes, 30,000 x 61 x 8 int16": lambda: rng.integers(0, 384, (tokens, 61, 8), np.int16),
        "support, 240,000 ids int32": lambda: rng.integers(0, 151_936, 8 * tokens, np.int32),
    }


def cases(setting: Setting) -> Cases:
    """For the check without a clock: every codec gives the array again."""

    def build(make: Callable[[], np.ndarray]) -> Case:
        given = make()

        def both_ways(codec: Codec) -> torch.Tensor:
            decoded = codec.array(codec.decode(codec.received(codec.encode())))
            return torch.from_numpy(decoded.copy())

        return Case(
            tokens=len(given),
            bytes_moved=2 * given.nbytes,
            providers={
                name: lambda i, codec=codec: both_ways(codec)
                for name, codec in codecs(given).items()
            },
            expected=lambda i: torch.from_numpy(given),
        )

    return {name: lambda make=make: build(make) for name, make in arrays(setting).items()}


# --- clock ----------------------------------------------------------------------------------------


def take_turn(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """(wall, CPU) seconds of the fastest of some calls."""
    wall_s = cpu_s = float("inf")
    for _ in range(calls):
        cpu, begin = time.thread_time(), time.perf_counter()
        result = call()
        end, cpu_end = time.perf_counter(), time.thread_time()
        del result
        wall_s, cpu_s = min(wall_s, end - begin), min(cpu_s, cpu_end - cpu)
    return wall_s, cpu_s


def peak_bytes(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        del result
        tracemalloc.stop()


def measure(name: str, given: np.ndarray, rounds: int) -> Iterator[dict[str, Any]]:
    """One line a codec, without the environment."""
    made = codecs(given)
    messages = {codec: made[codec].received(made[codec].encode()) for codec in made}
    calls = {
        codec: (coder.encode, lambda coder=coder, codec=codec: coder.decode(messages[codec]))
        for codec, coder in made.items()
    }
    turns: dict[str, list[list[tuple[float, float]]]] = {codec: [] for codec in made}
    shuffle = random.Random(0)
    for number in range(rounds):
        taken = [codec for codec in made if codec != "lists" or number < LIST_ROUNDS]
        for codec in shuffle.sample(taken, len(taken)):
            times = 1 if codec == "lists" else CALLS
            turns[codec].append([take_turn(call, times) for call in calls[codec]])

    def ratio(codec: str, baseline: str, way: int | None, clock: int) -> float:
        def of(turn: list[tuple[float, float]]) -> float:
            return turn[way][clock] if way is not None else turn[0][clock] + turn[1][clock]

        pairs = zip(turns[codec], turns[baseline], strict=False)  # the rounds that both took
        return float(f"{median(of(turn) / of(other) for turn, other in pairs):.4g}")

    for codec, taken in turns.items():
        line: dict[str, Any] = {
            "case": name, "provider": codec, "bytes": given.nbytes,
            "message_bytes": len(messages[codec]),
        }  # fmt: skip
        for way, word in enumerate(("encode", "decode")):
            for clock, kind in enumerate(("wall", "cpu")):
                line[f"{word}_{kind}_ms"] = [round(1e3 * turn[way][clock], 3) for turn in taken]
            line[f"{word}_x_memcpy"] = ratio(codec, "memcpy", way, 0)
            line[f"cpu_{word}_x_memcpy"] = ratio(codec, "memcpy", way, 1)
            line[f"{word}_peak"] = round(peak_bytes(calls[codec][way]) / given.nbytes, 4)
        for baseline in ("pybase64", "lists"):
            line[f"x_{baseline}"] = ratio(codec, baseline, None, 0)
            line[f"cpu_x_{baseline}"] = ratio(codec, baseline, None, 1)
        line["asked"] = {
            key: {"at_most": limit, "reached": line[key] <= limit}
            for key, limit in ASKED.get(codec, {}).items()
        }
        yield line


def show(line: dict[str, Any]) -> str:
    missed = [key for key, verdict in line["asked"].items() if not verdict["reached"]]
    asked = "NOT REACHED: " + ", ".join(missed) if missed else "reached" if line["asked"] else ""
    return (
        f"{line['case'][:30]:30s} {line['provider']:16s}"
        f" {median(line['encode_cpu_ms']):10.2f} {median(line['decode_cpu_ms']):10.2f}"
        f" {line['cpu_x_pybase64']:10.2f} {line['cpu_encode_x_memcpy']:9.2f}"
        f" {line['cpu_decode_x_memcpy']:9.2f} {1 / line['cpu_x_lists']:8.0f}"
        f" {line['encode_peak']:8.2f} {line['decode_peak']:8.2f}  {asked}".rstrip()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--dry", action="store_true", help="small: check, do not time")
    args = parser.parse_args()
    if args.dry:
        for name in check_dry(cases, args.only):
            print(f"checked {name}")
        return
    if pybase64 is None:
        sys.exit("needs the packages of packhorse[wire]")
    env = {**environment(), "pybase64": pybase64.get_version(), "orjson": orjson.__version__}
    print(" | ".join(f"{key} {value}" for key, value in env.items()))
    print(
        f"\n{'case':30s} {'codec':16s} {'encode ms':>10s} {'decode ms':>10s} {'x pybase64':>10s}"
        f" {'x memcpy':>9s} {'x memcpy':>9s} {'lists x':>8s} {'peak':>8s} {'peak':>8s}  asked"
    )
    for name, make in arrays(Setting()).items():
        if not re.search(args.only, name):
            continue
        for line in measure(name, make(), args.rounds):
            print(show(line), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, **env}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
