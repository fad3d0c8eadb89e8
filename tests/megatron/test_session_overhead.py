"""benchmarks/session_overhead.py without a GPU: it runs, and what it measures is what it says."""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from packhorse.replay.device_rows import MicrobatchRows
from packhorse.replay.layout import TokenLayout
from packhorse.replay.targets import RouterTargets

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYERS, EXPERTS, REPEATS = 2, 16, 16
SLOW_US = 8000.0


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("session_overhead")


def measure(script):
    # Megatron moves a router's weight to the GPU of a machine that has one
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stack = script.RouterStack(script.make_config(LAYERS, 32, EXPERTS), device)
    microbatches = script.make_microbatches(8, [9, 7], LAYERS, EXPERTS, device)
    return script.measure_overhead(stack, microbatches, REPEATS, training=False)


def slowed(function):
    def call(*args, **options):
        until = time.perf_counter() + 1e-6 * SLOW_US
        while time.perf_counter() < until:
            pass
        return function(*args, **options)

    return call


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [
        (MicrobatchRows, "model_mask", 1),
        (RouterTargets, "check_input", 1),
        (RouterTargets, "get_replay_topk", LAYERS),
        (TokenLayout, "gather_routes", 0),
    ],
)
def test_what_the_session_does_beside_its_kernel_call_is_counted(
    owner, name, times, script, monkeypatch
):
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    overhead = measure(script)["overhead"]
    assert overhead > (times - 0.25) * SLOW_US
    if not times:
        assert overhead < 0.5 * SLOW_US


def test_what_megatron_would_compute_instead_is_taken_off(script, monkeypatch):
    monkeypatch.setattr(torch, "topk", slowed(torch.topk))
    assert measure(script)["overhead"] < (0.5 - LAYERS) * SLOW_US


@pytest.mark.parametrize(
    ("value", "said"), [(60.0, "60.00, asked: at most 60: kept"), (60.1, "at most 60: NOT KEPT")]
)
def test_the_verdict_is_that_of_what_is_asked(value, said, script):
    assert script.verdict("overhead", value, training=True, timed=True).endswith(said)
    untimed = script.verdict("overhead", value, training=True, timed=False)
    assert untimed.endswith("not judged without a GPU")


def test_the_script_runs_dry_and_writes_its_lines(tmp_path):
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(BENCHMARKS.parent)])
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "session_overhead.py"), "--dry", "--repeats", "8",
         "--json", str(tmp_path / "lines.jsonl")],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(line["case"], line["training"]) for line in lines] == [
        ("overhead", False), ("ratio", False), ("overhead", True), ("ratio", True)
    ]  # fmt: skip
    parts = {"begin", "answers", "hooks", "open and close", "kernel call", "topk", "difference"}
    assert all(parts <= line.keys() for line in lines if line["case"] == "overhead")
    assert all(line["ratio"] > 0 for line in lines if line["case"] == "ratio")
    assert ran.stdout.count("not judged without a GPU") == 4
