"""The demo's picture: a row a dtype, left the logprob differences, right where live routes differ.

matplotlib is imported by ``draw`` and renders without a display.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.replay.capture import Capture
from packhorse.replay.compare import Comparison

# Okabe-Ito: told apart with any colour vision
_BEFORE, _BETWEEN, _AFTER = "#d55e00", "#7f7f7f", "#0072b2"
_SAME = "#dce3ea"
_MAX_ROWS, _MAX_COLUMNS = 480, 800


def check(path: str) -> None:
    """Raise ValueError where ``draw`` could not write ``path``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {folder}")
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path}: the name must end in .png, .svg or .pdf")


def draw(
    path: str,
    capture: Capture,
    results: Mapping[str, Comparison],
    moe_layers: Sequence[int],
    *,
    routes: str | None = None,
) -> None:
    """Write the picture to ``path``; its ending is the format.

    Args:
        routes: what the title says of the routes, where they are not the rollout's own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.6 + 3.9 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    title = (
        f"A vLLM rollout ({sum(capture.response_lengths):,} sampled tokens) in a Megatron trainer,"
        " without and with replay"
    )
    figure.suptitle(title if routes is None else f"{title}\nroutes {routes}")
    bins = _bins(results)
    axes = figure.subplots(len(results), 2, squeeze=False, width_ratios=(1, 1.25))
    for (distribution, route_map), (name, result) in zip(axes, results.items(), strict=True):
        _draw_distribution(distribution, name, result, bins)
        _draw_routes(route_map, name, result, capture.routes.lengths, moe_layers)
    figure.savefig(path, dpi=150)


def _bins(results: Mapping[str, Comparison]) -> np.ndarray:
    """The same bins for every panel; the smallest 2 % of the differences fall into the first."""
    sizes = np.concatenate([np.abs(d) for r in results.values() for d in r.differences.values()])
    sizes = np.maximum(sizes, 1e-9)
    low, high = np.log10(np.quantile(sizes, 0.02)), np.log10(sizes.max())
    low, high = np.floor(2 * low) / 2, np.ceil(4 * high) / 4
    return np.logspace(low, max(high, low + 1), 40)


def _draw_distribution(axes: Any, name: str, result: Comparison, bins: np.ndarray) -> None:
    shown = {
        "neither": ("without replay", {"color": _BEFORE, "histtype": "stepfilled", "alpha": 0.55}),
        "support": ("support only", {"color": _BETWEEN, "histtype": "step", "linewidth": 1.6}),
        "both": ("routes and support", {"color": _AFTER, "histtype": "stepfilled", "alpha": 0.55}),
    }
    for variant, (label, style) in shown.items():
        gap = result.gaps[variant]
        sizes = np.clip(np.abs(result.differences[variant]), bins[0], bins[-1])
        label = f"{label}: mean {gap.mean:.3f}, max {gap.max:.3f}"
        axes.hist(sizes, bins, label=label, **style)
        axes.axvline(gap.mean, color=style["color"], linestyle="--", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(bins[0], bins[-1])
    axes.margins(y=0.25)
    axes.set_xlabel("|trainer logprob - rollout logprob| of a sampled token (nats; dashed: mean)")
    axes.set_ylabel("sampled tokens")
    axes.set_title(f"trainer in {name}: distance to the rollout")
    axes.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="white")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_routes(
    axes: Any, name: str, result: Comparison, rows: Sequence[int], moe_layers: Sequence[int]
) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    num_layers = len(moe_layers)
    shown = max(1, min(len(rows), _MAX_ROWS // (num_layers + 1)))
    width = -(-max(max(rows[:shown]), 1) // _MAX_COLUMNS)  # positions in a column
    columns = -(-max(max(rows[:shown]), 1) // width)
    gap = max(1, round(num_layers / 4))
    image = np.zeros((shown * (num_layers + gap), columns))
    start = 0
    for i in range(shown):
        cells = result.differing[start : start + rows[i]]
        start += rows[i]
        for position, layers in enumerate(cells):
            column = image[i * (num_layers + gap) :, position // width][:num_layers]
            np.maximum(column, np.where(layers, 2, 1), out=column)
    axes.imshow(
        image,
        cmap=ListedColormap(["white", _SAME, _BEFORE]),
        vmin=0,
        vmax=2,
        aspect="auto",
        interpolation="nearest",
        extent=(0, columns * width, len(image), 0),
    )
    share = 100 * result.differing.mean() if result.differing.size else 0.0
    axes.set_title(f"trainer in {name}: without replay {share:.2f} % of the expert sets differ")
    axes.set_xlabel("position in the trajectory (tokens)")
    layers = f"layers {moe_layers[0]} to {moe_layers[-1]}, top to bottom"
    axes.set_ylabel(f"trajectory (each: {layers})")
    step = -(-shown // 20)
    ticks = np.arange(0, shown, step)
    axes.set_yticks(ticks * (num_layers + gap) + num_layers / 2, [str(i) for i in ticks])
    axes.tick_params(length=0)
    axes.legend(
        handles=[
            Patch(color=_SAME, label="the rollout's experts"),
            Patch(color=_BEFORE, label="other experts"),
        ],
        loc="upper right",
        frameon=False,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
