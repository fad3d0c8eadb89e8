"""Draw the result lines of the newest commit: time against tokens, and measured over asked.

    python benchmarks/plot.py [--results DIR] [--out docs/images]

time_against_tokens.svg   bench_sweep: the kernels in a CUDA graph, the calls from host lengths, the
                          torch loop, and the copy floor
asked.svg                 each job's worst case, measured over asked: up to 1 is reached
scoring.svg               lm_head_scoring: scores over the support from hidden states, beside the
                          same products in chunks of torch and beside full logits
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from asked import JOBS, figure
from results import RESULTS, Line, newest_commit, newest_set, read_lines, verdicts

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
_SCORERS = {
    "logits": ("full logits, torch", "#c44e52"),
    "chunked": ("the pairs' products in chunks, torch", "#8172b3"),
    "packhorse": ("lm_head_support_logprobs", "#4c72b0"),
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


def draw_scoring(lines: Sequence[Line], path: Path) -> None:
    """Raises ValueError where there is no line."""
    commit = newest_commit(lines)
    lines = [line for line in lines if line["commit"] == commit]
    times = {(line["case"], line["provider"]): line for line in lines}
    cases = list(dict.fromkeys(line["case"] for line in lines))
    drawn, panels = plt.subplots(1, 2, figsize=(9, 0.75 * len(cases) + 1), sharey=True)
    for panel, kind in zip(panels, ("forward", "both"), strict=True):
        for k, (provider, (label, colour)) in enumerate(_SCORERS.items()):
            rows = [row for row, case in enumerate(cases) if (case, provider) in times]
            widths = [times[cases[row], provider][f"{kind}_ms"] for row in rows]
            places = [row + 0.27 * (k - 1) for row in rows]
            panel.barh(places, widths, height=0.25, color=colour, label=label)
            for place, width in zip(places, widths, strict=True):
                panel.text(width, place, f" {width:.3g}", va="center", fontsize=7)
        panel.set(xscale="log", xlabel="ms", title={"both": "forward and backward"}.get(kind, kind))
        panel.set_xlim(right=3 * panel.get_xlim()[1])
        panel.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(cases)), cases, fontsize=8)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(
        handles, labels, ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.06), fontsize=8
    )
    drawn.suptitle(f"{lines[0]['gpu']}, at {commit}, bf16", fontsize=9)
    drawn.tight_layout()
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
    scored = args.results / "lm_head_scoring.jsonl"
    if scored.exists():
        lines = [json.loads(text) for text in scored.read_text(encoding="utf-8").splitlines()]
        draw_scoring(lines, args.out / "scoring.svg")
        print(args.out / "scoring.svg")


if __name__ == "__main__":
    main()
