"""Markdown tables from the result lines of the newest commit, so that none is typed.

    python benchmarks/table.py asked             print one block
    python benchmarks/table.py --write FILE...   put the blocks into these files
    python benchmarks/table.py --check FILE...   exit code 1 where a block differs from the lines

A file holds a block between two lines, which stay:

    <!-- benchmarks/table.py NAME -->
    <!-- end -->

NAME is ``asked`` (each job: what is asked, what was measured) or a script, ``bench_routes`` and so
on (every measurement of it).
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from asked import JOBS, figure
from results import RESULTS, Line, newest_commit, newest_set, read_lines, verdicts

_BLOCK = re.compile(
    r"(?P<begin><!-- benchmarks/table\.py (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_KINDS = {
    "wall_us": "wall", "waited_us": "waited", "device_us": "device", "graph_us": "graph",
    "graph_warm_us": "warm", "beyond_gpu_us": "beyond",
}  # fmt: skip


def number(value: float) -> str:
    """Three digits or a few more: 2.31, 98.1, 1,299."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _value(line: Line, kind: str) -> float:
    value = line[kind]
    return figure(value) if isinstance(value, list) else value


def _measured(line: Line, verdict: dict) -> str:
    us = _value(line, verdict["of"])
    if "times" in verdict:
        return f"{number(verdict['times'])} x ({number(us)} µs)"
    if "ratio" in verdict:
        return f"{verdict['ratio']:.2f} x ({number(us)} µs)"
    return f"{number(us)} µs"


def _source(line: Line) -> str:
    return (
        f"{line['gpu']}, torch {line['torch']}, triton {line['triton']}, CUDA {line['cuda']},"
        f" at {line['commit']}; a large copy moves {line['copy_ceiling_gbps']:,} GB/s, a large"
        f" fill {line['write_ceiling_gbps']:,} GB/s."
    )


def asked_table(lines: Sequence[Line]) -> str:
    """Each job of ``JOBS``: the limit, the worst and the best case measured, whether reached."""
    commit = newest_commit(lines)
    current = newest_set(lines)
    rows = ["| job | asked | measured | reached |", "| --- | --- | --- | --- |"]
    for key, answers in verdicts(current).items():
        job = JOBS[key]
        if not answers:
            rows.append(f"| {job.what} | {job.asked} | not measured at {commit} | |")
            continue
        measured = _measured(*answers[0])
        if len(answers) > 1:
            measured = f"{_measured(*answers[-1])} … {measured}"
        failed = sum(not verdict["reached"] for _, verdict in answers)
        reached = "yes" if not failed else f"**no**: {failed} of {len(answers)}"
        rows.append(f"| {job.what} | {job.asked} | {measured} | {reached} |")
    source = [line for line in current if "write_ceiling_gbps" in line]
    return "\n".join([*rows, "", _source(source[0])] if source else rows) + "\n"


def bench_table(lines: Sequence[Line], bench: str) -> str:
    """Every measurement of one script, a row each; times in microseconds."""
    current = [line for line in newest_set(lines) if line["bench"] == bench and "floor" in line]
    if not current:
        return f"Not measured at {newest_commit(lines)}.\n"
    kinds = {kind: title for kind, title in _KINDS.items() if any(kind in x for x in current)}
    titles = ["case", "by", *kinds.values(), "floor", "x floor"]
    rows = [f"| {' | '.join(titles)} |", f"|{' --- |' * 2}{' ---: |' * (len(titles) - 2)}"]
    previous = ""
    for line in current:
        case = "" if line["case"] == previous else line["case"]
        previous = line["case"]
        cells = [number(_value(line, kind)) if kind in line else "" for kind in kinds]
        ratio = f"{line['ratio']:.2f}" if "ratio" in line else ""
        if line.get("graph_l2") == "warm":
            ratio += " (warm L2)"
        row = [case, line["provider"], *cells, number(line["floor_us"]), ratio]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows) + "\n"


def block(lines: Sequence[Line], name: str) -> str:
    return asked_table(lines) if name == "asked" else bench_table(lines, name)


def filled(text: str, lines: Sequence[Line]) -> tuple[str, list[str]]:
    """``text`` with every block made anew, and the names of its blocks."""
    names = [found["name"] for found in _BLOCK.finditer(text)]

    def make(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{block(lines, found['name'])}\n{found['end']}"

    return _BLOCK.sub(make, text), names


def main() -> int:
    parser = argparse.ArgumentParser(description="Markdown tables from the result lines.")
    parser.add_argument("block", nargs="?", help="print this block: asked, bench_routes, …")
    parser.add_argument("--write", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    lines = read_lines(args.results)
    if args.block:
        print(block(lines, args.block), end="")
    stale = 0
    for path in args.write:
        path.write_text(filled(path.read_text("utf-8"), lines)[0], "utf-8")
    for path in args.check:
        text = path.read_text("utf-8")
        wanted, names = filled(text, lines)
        if wanted != text:
            stale += 1
            print(f"{path}: a block of {names} is not what the lines say; --write makes it so")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
