"""Draw the result lines of the newest commit: time against tokens, and measured over asked.

    python benchmarks/plot.py [--results DIR] [--out docs/images]

time_against_tokens.svg   bench_sweep: the kernels in a CUDA graph, the calls from host lengths, the
                          torch loop, and the copy floor
asked.svg                 each job's worst case, measured over asked: up to 1 is reached
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from asked import JOBS, figure
from results import RESULTS, Line, newest_set, read_lines, verdicts

matplotlib.use("svg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parents[1] / "docs" / "images"

#: provider of a sweep line, its time: label, colour
_CURVES = {
    ("torch loop", "wall_us"): ("torch loop, wall", "#c44e52"),
    ("packhorse", "wall_us"): ("call from host lengths, wall", "#8172b3"),
    ("kernel", "graph_us"): ("kernel, CUDA graph", "#4c72b0"),
    ("kernels", "graph_us"): ("kernels, CUDA graph", "#4c72b0"),
}
_PANELS = {"routes": "routes, 48 layers x 8, uint8 to int32", "row ids": "row ids"}


def _style() -> None:
    # text stays text and ids are fixed: small files, and the same lines draw the same file
    plt.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "packhorse", "font.size": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.alpha": 0.3, "legend.frameon": False,
    })  # fmt: skip


def _save(drawn: Any, path: Path) -> None:
    drawn.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(drawn)


def draw_sweep(lines: Sequence[Line], path: Path) -> None:
    """Raises ValueError where no line is of the sweep."""
    lines = [line for line in lines if line["bench"] == "bench_sweep"]
    if not lines:
        raise ValueError("no lines of bench_sweep at the newest commit")
    drawn, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for panel, (start, title) in zip(panels, _PANELS.items(), strict=True):
        chosen = [line for line in lines if line["case"].startswith(start)]
        for (provider, kind), (label, colour) in _CURVES.items():
            points = sorted(
                (line["tokens"], figure(line[kind]))
                for line in chosen
                if line["provider"] == provider and kind in line
            )
            if points:
                panel.plot(*zip(*points, strict=True), "o-", ms=3, color=colour, label=label)
        floors = sorted({(line["tokens"], line["floor_us"]) for line in chosen})
        panel.plot(*zip(*floors, strict=True), "k--", lw=1, label="copy floor")
        panel.set(yscale="log", title=title, xlabel="tokens", ylabel="µs")
        panel.set_xscale("log", base=2)
        ticks = sorted({line["tokens"] for line in chosen})[::2]
        panel.minorticks_off()
        panel.set_xticks(ticks, [f"{max(tick // 1024, 1)}k" for tick in ticks])
        panel.legend(fontsize=8)
    drawn.suptitle(f"{lines[0]['gpu']}, at {lines[0]['commit']}", fontsize=9)
    drawn.tight_layout()
    _save(drawn, path)


def draw_asked(lines: Sequence[Line], path: Path) -> None:
    """Raises ValueError where no line answers a job."""
    worst = {key: answers[0] for key, answers in verdicts(lines).items() if answers}
    if not worst:
        raise ValueError("no line of the newest commit answers a job")
    drawn, panel = plt.subplots(figsize=(9, 0.3 * len(worst) + 1))
    shares = [verdict["share"] for _, verdict in worst.values()]
    colours = ["#55a868" if verdict["reached"] else "#c44e52" for _, verdict in worst.values()]
    rows = range(len(worst))
    panel.barh(rows, shares, color=colours, height=0.7)
    for row, share in zip(rows, shares, strict=True):
        panel.text(min(share, 3.7), row, f" {share:.2f}", va="center", fontsize=8)
    panel.axvline(1, color="black", lw=1)
    panel.set_yticks(rows, [JOBS[key].what.replace("`", "") for key in worst], fontsize=8)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_xlim(0, min(max(1.2, 1.1 * max(shares)), 4))
    panel.set_xlabel("measured over asked, worst case; up to 1 is reached")
    line = next(iter(worst.values()))[0]
    panel.set_title(f"{line['gpu']}, at {line['commit']}", fontsize=9)
    _save(drawn, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the result lines of the newest commit.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR")
    args = parser.parse_args()
    lines = newest_set(read_lines(args.results))
    args.out.mkdir(parents=True, exist_ok=True)
    _style()
    for draw, name in ((draw_sweep, "time_against_tokens.svg"), (draw_asked, "asked.svg")):
        draw(lines, args.out / name)
        print(args.out / name)


if __name__ == "__main__":
    main()
