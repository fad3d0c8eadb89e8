"""Read the result lines: those of one commit, by benchmark, and what they say of each job asked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asked import JOBS

RESULTS = Path(__file__).parent / "results"

Line = dict[str, Any]


def read_lines(folder: Path = RESULTS) -> list[Line]:
    """Every measurement, in the order of files and lines; ``bench`` names the file it is from."""
    lines = []
    for path in sorted(folder.glob("bench_*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            lines.append({"bench": path.stem, **json.loads(text)})
    return lines


def newest_commit(lines: Sequence[Line]) -> str:
    """The commit of the line that was measured last.

    Raises:
        ValueError: there is no line.
    """
    if not lines:
        raise ValueError("newest_commit: no result lines")
    return max(lines, key=lambda line: line["date"])["commit"]


def newest_set(lines: Sequence[Line]) -> list[Line]:
    """The lines of the newest commit; of a measurement that was repeated there, the last."""
    commit = newest_commit(lines)
    kept = {
        (line["bench"], line["case"], line["provider"]): line
        for line in lines
        if line["commit"] == commit
    }
    return list(kept.values())


def verdicts(lines: Sequence[Line]) -> dict[str, list[tuple[Line, dict[str, Any]]]]:
    """For each job of ``JOBS`` the lines that answer it and their verdicts, the worst first."""
    found: dict[str, list[tuple[Line, dict[str, Any]]]] = {key: [] for key in JOBS}
    for line in lines:
        for key, verdict in line.get("jobs", {}).items():
            found[key].append((line, verdict))
    for answers in found.values():
        answers.sort(key=lambda answer: -answer[1]["share"])
    return found
