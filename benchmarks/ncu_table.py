"""Turn what ncu measured into a table in Markdown.

    python benchmarks/ncu_table.py ncu.csv --cases cases.jsonl [--into docs/profiling.md]

``ncu.csv`` is ncu's ``--csv`` output with the counters of ``METRICS`` (``--page raw``, or the long
form with a row a counter), ``cases.jsonl`` what ``profile_kernels.py --cases`` wrote in that run;
without it the table has the kernels alone. ``--into`` puts the table between the two marks of a
page, ``BEGIN`` and ``END``. No torch here, and no GPU.

    read, written   bytes between DRAM and L2 while the kernel ran. What it wrote and L2 still holds
                    at its end is not among them; ncu empties L2 before each kernel
    fewest          bytes that the case must move: inputs read once, outputs written once
    GB/s            read and written over the duration; ``of peak`` the same as ncu gives it
    warps           active a cycle, of those that a multiprocessor holds: achieved occupancy

Durations are those of one launch under the profiler, at whatever clock the card had; the figures to
compare are those of the benchmarks.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = {
    "duration": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
BEGIN, END = "<!-- benchmarks/ncu_table.py -->", "<!-- end -->"
#: units of ncu, several spellings over its releases -> factor to bytes, microseconds or plain
_UNITS = {
    "": 1.0, "%": 1.0, "register/thread": 1.0,
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0,
    "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One profiled launch; bytes, microseconds, percent."""

    kernel: str
    grid: str
    block: str
    duration: float
    read: float
    written: float
    of_peak: float
    registers: float
    warps: float

    @property
    def gbps(self) -> float:
        return (self.read + self.written) / (self.duration * 1e3) if self.duration else 0.0


def read_launches(lines: Iterable[str]) -> list[Launch]:
    """Launches in their order, from ncu's CSV with its messages before and between the rows.

    Raises:
        ValueError: there is no table, a counter is missing, or a unit or number is not known.
    """
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 2:
        raise ValueError("ncu_table: no table of ncu's --csv in the file")
    header, *rows = rows
    table = [dict(zip(header, row, strict=False)) for row in rows]
    if "Metric Name" in header:
        counted = list(_from_long(table))
    else:
        units, *table = table  # the row below the header
        counted = [
            (row, {metric: (row[metric], units[metric]) for metric in header if metric in units})
            for row in table
        ]
    launches = []
    for row, values in counted:
        missing = [metric for metric in METRICS.values() if metric not in values]
        if missing:
            raise ValueError(f"ncu_table: {row['Kernel Name']} has no {', '.join(missing)}")
        launches.append(
            Launch(
                kernel=row["Kernel Name"],
                grid=row.get("Grid Size", ""),
                block=row.get("Block Size", ""),
                **{field: _number(*values[metric]) for field, metric in METRICS.items()},
            )
        )
    return launches


def _from_long(table: list[dict[str, str]]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    launches: dict[str, tuple[dict[str, str], dict[str, Any]]] = {}
    for row in table:
        _, values = launches.setdefault(row["ID"], (row, {}))
        values[row["Metric Name"]] = (row["Metric Value"], row["Metric Unit"])
    yield from launches.values()


def _number(text: str, unit: str) -> float:
    if unit not in _UNITS:
        raise ValueError(f"ncu_table: the unit {unit!r} is not known")
    try:
        return float(text.replace(",", "")) * _UNITS[unit]
    except ValueError:
        raise ValueError(f"ncu_table: {text!r} is no number; run ncu with LC_ALL=C") from None


def name_cases(launches: list[Launch], cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Case and fewest bytes of each launch, as the table shows them: once a case.

    Raises:
        ValueError: the launches are not those of the cases, in their order.
    """
    expected = [(case, kernel) for case in cases for kernel in case["kernels"]]
    if [kernel for _, kernel in expected] != [launch.kernel for launch in launches]:
        raise ValueError(
            f"ncu_table: {len(launches)} launches in ncu's file, {len(expected)} in the cases, or"
            " in another order: they must be of one run"
        )
    named, seen = [], set()
    for case, _ in expected:
        again = case["case"] in seen
        seen.add(case["case"])
        named.append(("", "") if again else (case["case"], f"{case['bytes'] / 1e6:,.1f}"))
    return named


def table(launches: list[Launch], cases: list[dict[str, Any]] | None = None) -> str:
    """Markdown, a row a launch."""
    header = ["kernel", "grid x block", "registers", "warps", "read MB", "written MB"]
    header += ["µs", "GB/s", "of peak"]
    rows = [
        [
            f"`{launch.kernel}`",
            f"{_size(launch.grid)} x {_size(launch.block)}",
            f"{launch.registers:.0f}",
            f"{launch.warps:.0f} %",
            f"{launch.read / 1e6:,.1f}",
            f"{launch.written / 1e6:,.1f}",
            f"{launch.duration:,.1f}",
            f"{launch.gbps:,.0f}",
            f"{launch.of_peak:.0f} %",
        ]
        for launch in launches
    ]
    if cases is not None:
        header = ["case", *header[:6], "fewest MB", *header[6:]]
        named = name_cases(launches, cases)
        rows = [
            [case, *row[:6], fewest, *row[6:]]
            for (case, fewest), row in zip(named, rows, strict=True)
        ]
    left = 2 if cases is not None else 1
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def caption(cases: list[dict[str, Any]]) -> str:
    """Where and on what the cases ran."""
    keys = ("gpu", "torch", "triton", "python", "commit", "date")
    about = cases[0].get("environment", {}) if cases else {}
    return ", ".join(f"{key} {about[key]}" for key in keys if key in about)


def put_into(page: str, text: str) -> str:
    """``page`` with ``text`` between its two marks.

    Raises:
        ValueError: it has not one of each, in order.
    """
    begin, end = page.partition(BEGIN), page.partition(BEGIN)[2].partition(END)
    if not begin[1] or not end[1] or BEGIN in begin[2]:
        raise ValueError(f"ncu_table: the page needs one line {BEGIN}, and {END} below it")
    return f"{begin[0]}{BEGIN}\n\n{text}\n\n{END}{end[2]}"


def _size(text: str) -> str:
    """ "(128, 1, 1)" as "128", "(24, 3, 1)" as "24·3"."""
    sizes = text.strip("()").replace(" ", "").split(",")
    return "·".join(size for i, size in enumerate(sizes) if i == 0 or size != "1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, help="ncu's --csv output")
    parser.add_argument("--cases", type=Path, help="what profile_kernels.py --cases wrote")
    parser.add_argument("--into", type=Path, help="put the table into this page")
    args = parser.parse_args()
    try:
        launches = read_launches(args.csv.read_text().splitlines())
        cases, text = None, table(launches)
        if args.cases:
            cases = [json.loads(line) for line in args.cases.read_text().splitlines()]
            text = "\n\n".join(filter(None, [caption(cases), table(launches, cases)]))
        if args.into:
            page = put_into(args.into.read_text(encoding="utf-8"), text)
            args.into.write_text(page, encoding="utf-8")
        else:
            print(text)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
