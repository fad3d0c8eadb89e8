"""The demo on several GPUs of one host, a rank on each, over NCCL: its figures are one GPU's.

One start of the ranks a layout, for fp32 and bf16. With RESULTS=DIR each layout's figures are a
line of DIR/multi_gpu_demo.jsonl, as the benchmarks write theirs. Layouts that need more GPUs than
there are are skipped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.replay import compare, demo, demo_ranks
from tests.distributed.pool import megatron_version

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: options -> what the table says of the ranks
LAYOUTS = {
    "--tp 2": "2 processes over NCCL, a GPU each: tp 2 (sequence parallel)",
    "--pp 2": "2 processes over NCCL, a GPU each: pp 2",
    "--pp 2 --vpp 2": "2 processes over NCCL, a GPU each: pp 2, vpp 2",
    "--ep 2": "2 processes over NCCL, a GPU each: ep 2 (2 replicas)",
    "--cp 2 --format thd": "2 processes over NCCL, a GPU each: cp 2 (zigzag)",
    "--tp 2 --pp 2": "4 processes over NCCL, a GPU each: tp 2 (sequence parallel), pp 2",
    # four replicas share out a microbatch of at least four trajectories
    "--ep 4 --microbatch-size 5": "4 processes over NCCL, a GPU each: ep 4 (4 replicas)",
    "--cp 2 --tp 2 --format thd": (
        "4 processes over NCCL, a GPU each: tp 2 (sequence parallel), cp 2 (zigzag)"
    ),
    "--pp 2 --vpp 2 --ep 2": "4 processes over NCCL, a GPU each: pp 2, vpp 2, ep 2 (2 replicas)",
}
#: of a logprob in fp32: sums in another order. On a CPU it is up to 9e-6; a GPU takes its matrix
#: products' order from their shapes, which differ from one rank's, and attention's too. What is
#: compared is 300 times as large in the mean.
LOGPROB_ERROR = 5e-5
#: (token, layer) pairs whose experts K and K + 1 are a near tie, which that rounding may decide:
#: of 4,044 two do between a CPU and a GPU. A live trajectory that has one is another computation
#: from there on.
NEAR_TIES = 2
TIMEOUT_S = 120
LIVE = ("neither", "support")
REPLAYED = 1020 - 9  # tokens of the capture; the last one of each trajectory was never evaluated


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(options)


def measure(monkeypatch: pytest.MonkeyPatch, *options: str) -> demo.Demo:
    """One run of the demo on GPUs in both dtypes: what its table was made of."""
    seen = []
    lines = demo.report_lines

    def keep(given: demo.Demo) -> list[str]:
        seen.append(given)
        return lines(given)

    with monkeypatch.context() as patch:
        patch.setattr(demo, "report_lines", keep)
        args = parse("--device", "cuda", "--timeout", str(TIMEOUT_S), *options)
        assert demo.run(args) == 0
    return seen[0]


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[demo.Demo]:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    if not megatron_version():
        pytest.skip("megatron-core is not installed")
    with pytest.MonkeyPatch.context() as patch:
        ran = measure(patch)
        write_line(patch, ran, "", ran)
        yield ran


@pytest.mark.parametrize("options", LAYOUTS)
def test_each_layout_on_gpus_gives_one_gpus_figures(options, one_gpu, monkeypatch, capsys):
    world = demo_ranks.sizes_of(parse(*options.split())).world
    found = torch.cuda.device_count()
    if found < world:
        pytest.skip(f"needs {world} GPUs, there are {found}")
    ran = measure(monkeypatch, *options.split())
    write_line(monkeypatch, ran, options, one_gpu)
    output = capsys.readouterr().out
    assert f"\nranks     {LAYOUTS[options]}\n" in output
    assert f", {torch.cuda.get_device_name()}; " in output
    for dtype, result in ran.results.items():
        check_replay(result, len(ran.microbatches), dtype)
    check_fp32(ran, one_gpu.results["fp32"])
    check_bf16(ran.results["bf16"])


def check_replay(result: compare.Comparison, microbatches: int, dtype: str) -> None:
    assert result.differing_replayed.shape == (REPLAYED, 4), dtype
    assert not result.differing_replayed.any(), dtype
    assert result.unfinished_gradients == (), dtype
    for report in (result.forward_report, result.training_report):
        assert report.completed, dtype
        assert (report.rows_replayed, report.rows_live) == (REPLAYED, 0), dtype
        assert list(report.asked.values()) == [microbatches] * 4, dtype
    assert result.training_report.recomputed_calls == 4 * microbatches, dtype


def check_fp32(ran: demo.Demo, one_gpu: compare.Comparison) -> None:
    found = ran.results["fp32"]
    same = same_live_routes(ran, found, one_gpu)
    for variant, expected in one_gpu.differences.items():
        assert found.differences[variant].shape == (133,)
        error = np.abs(found.differences[variant] - expected)
        if variant in LIVE:
            error = error[same]
        assert error.max() <= LOGPROB_ERROR, variant
    assert found.recompute_difference <= LOGPROB_ERROR
    assert found.router_gradient == pytest.approx(one_gpu.router_gradient, rel=1e-4)
    assert found.loss == pytest.approx(one_gpu.loss, rel=2e-5)
    both, support = found.gaps["both"], found.gaps["support"]
    assert both.mean < support.mean / 2
    assert both.max < support.max / 5


def same_live_routes(
    ran: demo.Demo, found: compare.Comparison, one_gpu: compare.Comparison
) -> np.ndarray:
    """[response tokens] bool: those of trajectories whose live routes are one GPU's."""
    other = (found.differing != one_gpu.differing).any(1)
    rows = np.cumsum([0, *(len(routes) for routes in ran.capture.routes)])
    moved = [bool(other[a:b].any()) for a, b in itertools.pairwise(rows)]
    assert sum(moved) <= NEAR_TIES
    return np.repeat(np.logical_not(moved), ran.capture.response_lengths)


def check_bf16(found: compare.Comparison) -> None:
    """As the one-rank demo's are held (``tests/megatron/test_demo.py``): bf16 rounds otherwise in
    every layout, so that figures differ and the order of the columns does not."""
    gaps = found.gaps
    assert gaps["neither"].mean >= 0.2
    assert gaps["both"].mean <= 0.025
    assert gaps["both"].max <= 0.15
    assert gaps["both"].mean < gaps["support"].mean / 1.5
    assert gaps["both"].max < gaps["support"].max / 3


# --- lines ----------------------------------------------------------------------------------------


def write_line(
    monkeypatch: pytest.MonkeyPatch, ran: demo.Demo, options: str, one_gpu: demo.Demo
) -> None:
    folder = os.environ.get("RESULTS")
    if not folder:
        return
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from harness import environment

        line = line_of(ran, options, one_gpu) | environment()
    with open(Path(folder) / "multi_gpu_demo.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def line_of(ran: demo.Demo, options: str, one_gpu: demo.Demo) -> dict[str, Any]:
    """The figures of one layout; ``beside_one_gpu``: the largest difference of a logprob from the
    one-rank demo's, a column an item."""
    on_gpus = ran.device.type == "cuda"
    line: dict[str, Any] = {
        "case": "demo",
        "options": options,
        "world": ran.sizes.world,
        "over": ("NCCL" if on_gpus else "gloo") if ran.sizes.world > 1 else "one rank",
        "format": ran.args.format,
        "capture": ran.capture.path.name,
        "megatron": importlib.metadata.version("megatron-core"),
    }
    if on_gpus:
        line["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for dtype, result in ran.results.items():
        one = one_gpu.results[dtype].differences
        line[dtype] = {
            **{
                variant: {
                    "mean": round(gap.mean, 6),
                    "max": round(gap.max, 6),
                    "beside_one_gpu": float(
                        np.abs(result.differences[variant] - one[variant]).max()
                    ),
                }
                for variant, gap in result.gaps.items()
            },
            "route_sets": result.differing.size,
            "differing_live": int(result.differing.sum()),
            "differing_replayed": int(result.differing_replayed.sum()),
            "recompute_difference": result.recompute_difference,
            "loss": result.loss,
            "router_gradient": result.router_gradient,
            "seconds": {name: round(seconds, 3) for name, seconds in result.seconds.items()},
        }
    return line
