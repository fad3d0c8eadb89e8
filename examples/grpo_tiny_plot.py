"""Gather and draw what ``grpo_tiny.py`` wrote.

    python examples/grpo_tiny_plot.py --gather build/grpo_tiny --lines grpo_tiny.jsonl
    python examples/grpo_tiny_plot.py --lines grpo_tiny.jsonl --out docs/images/grpo_tiny.svg

Gathered, a run is one line: its mode and seed, the environment, and a list over steps for each
figure. The picture shows the mean over seeds, and the band from the lowest to the highest. It also
prints a table: means over seeds and steps, and the spread of the seeds' means.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Run = dict[str, Any]

MODES = ("off", "routes", "support", "both")
#: figure of a line -> title, whether its axis is logarithmic
PANELS = {
    "reward": ("reward", False),
    "abs_diff_mean": ("|trainer - rollout| logprob, mean", True),
    "abs_diff_p99": ("|trainer - rollout| logprob, p99", True),
    "k3": ("k3 KL", True),
    "ratio_mean": ("ratio trainer / rollout, mean", False),
    "outside": ("tokens whose ratio is outside 1 ± 0.2", False),
}
#: of the table; the last steps are those after the first half
COLUMNS = ("reward", "exact", "abs_diff_mean", "abs_diff_p99", "k3", "ratio_mean", "outside")
# Okabe-Ito: told apart with any colour vision
COLOURS = {"off": "#d55e00", "routes": "#e69f00", "support": "#56b4e9", "both": "#0072b2"}
_PER_RUN = ("mode", "seed", "step")


def gather(folder: Path) -> list[Run]:
    """One run a file MODE-sSEED.jsonl of ``folder``, in the order of modes and seeds."""
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    runs = []
    for path in folder.glob("*-s*.jsonl"):
        steps = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        if not steps:
            continue
        run = {"mode": steps[0]["mode"], "seed": steps[0]["seed"], **environment}
        for name in steps[0]:
            if name not in _PER_RUN and name != "route_mismatch":
                run[name] = [float(f"{step[name]:.5g}") for step in steps]
        sampled = [s for s in steps if "route_mismatch" in s]
        run["route_mismatch"] = [[s["step"], float(f"{s['route_mismatch']:.4g}")] for s in sampled]
        runs.append(run)
    return sorted(runs, key=lambda run: (MODES.index(run["mode"]), run["seed"]))


def read_runs(path: Path) -> list[Run]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def curves(runs: Sequence[Run], mode: str, figure: str) -> np.ndarray:
    """[seeds, steps] of a mode, as long as the shortest run."""
    found = [run[figure] for run in runs if run["mode"] == mode]
    steps = min(map(len, found))
    return np.array([values[:steps] for values in found])


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean over the last ``width`` steps, of fewer at the start."""
    sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)
    ends = np.arange(1, values.shape[1] + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[:, ends] - sums[:, starts]) / (ends - starts)


def draw(runs: Sequence[Run], path: Path, width: int = 5) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    # text stays text and ids are fixed: the same lines draw the same file
    plt.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "packhorse", "font.size": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.alpha": 0.3, "legend.frameon": False,
    })  # fmt: skip
    drawn, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    present = [mode for mode in MODES if any(run["mode"] == mode for run in runs)]
    for panel, (figure, (title, logarithmic)) in zip(axes.flat, PANELS.items(), strict=True):
        for mode in present:
            seeds = smooth(curves(runs, mode, figure), width)
            steps = np.arange(seeds.shape[1])
            panel.plot(steps, seeds.mean(0), color=COLOURS[mode], label=mode, linewidth=1.4)
            low, high = seeds.min(0), seeds.max(0)
            panel.fill_between(steps, low, high, color=COLOURS[mode], alpha=0.18, linewidth=0)
        panel.set_title(title)
        panel.set_xlabel("step")
        if logarithmic:
            panel.set_yscale("log")
    axes[0, 0].legend()
    seeds = len({run["seed"] for run in runs})
    drawn.suptitle(
        f"GRPO on a tiny Qwen3-MoE, {runs[0]['gpu']}: {seeds} seeds, mean and range; each point the"
        f" mean of {width} steps"
    )
    drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    plt.close(drawn)


def table(runs: Sequence[Run], steps: slice) -> list[str]:
    """A row a mode: mean over seeds of the mean over ``steps``, and half the seeds' range."""
    rows = ["| mode | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for mode in MODES:
        if not any(run["mode"] == mode for run in runs):
            continue
        cells = []
        for figure in COLUMNS:
            means = curves(runs, mode, figure)[:, steps].mean(1)
            cells.append(f"{means.mean():.4g} ± {(means.max() - means.min()) / 2:.2g}")
        rows.append(f"| {mode} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=Path, default=Path("benchmarks/results/grpo_tiny.jsonl"))
    parser.add_argument("--gather", type=Path, metavar="FOLDER", help="write --lines from this")
    parser.add_argument("--out", type=Path, help="a picture: .svg or .png")
    args = parser.parse_args()
    if args.gather:
        text = "".join(json.dumps(run) + "\n" for run in gather(args.gather))
        args.lines.write_text(text, encoding="utf-8")
    runs = read_runs(args.lines)
    if not runs:
        parser.error(f"{args.lines} holds no run")
    steps = min(len(run["reward"]) for run in runs)
    for name, part in (
        ("first ten steps", slice(0, 10)),
        (f"steps {steps // 2} to {steps - 1}", slice(steps // 2, steps)),
    ):
        print(f"\n{name}\n" + "\n".join(table(runs, part)))  # noqa: T201
    if args.out:
        draw(runs, args.out)


if __name__ == "__main__":
    main()
