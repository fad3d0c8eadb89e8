"""The benchmarks without a GPU: every case at 1/100 of its size, what is asked, lines, pictures.

Timing needs a card; everything else of the benchmarks runs here. The scripts import each other by
their plain names, as they do when they are run.
"""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
COMMITTED = sorted((BENCHMARKS / "results").glob("bench_*.jsonl"))
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "performance.md"]

ENVIRONMENT = {
    "gpu": str, "torch": str, "triton": str, "cuda": str, "python": str, "commit": str, "date": str
}  # fmt: skip
MEASURED = {
    "case": str, "provider": str, "tokens": int, "bytes": int, "floor": str, "floor_us": float,
    "copy_ceiling_gbps": int, "write_ceiling_gbps": int, "l2_mib": int,
}  # fmt: skip
TIMES = ("wall_us", "waited_us", "device_us", "graph_us", "graph_warm_us")


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name):
    return import_module(name)


# --- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_provider_of_every_case_gives_the_expected_result(script):
    names = module("harness").check_dry(module(script).cases)
    assert names
    assert len(set(names)) == len(names)


def test_a_script_checks_its_cases_on_the_cpu():
    script = BENCHMARKS / "bench_dummies.py"
    command = [sys.executable, str(script), "--dry", "--only", "^constant"]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    checked = [line for line in ran.stdout.splitlines() if line.startswith("checked")]
    assert checked
    assert all(line.startswith("checked constant") for line in checked)


def test_every_job_that_is_asked_has_a_case():
    harness = module("harness")
    answered = set()
    for script in SCRIPTS:
        for build in module(script).cases(harness.DRY).values():
            answered |= set(build().jobs)
    assert answered == set(module("asked").JOBS)


def small_case(**changed):
    harness = module("harness")
    right = torch.arange(8)
    fields = {
        "tokens": 8, "bytes_moved": 64, "expected": lambda i: right,
        "providers": {"packhorse": lambda i: right.clone(), "torch": lambda i: right.clone()},
    }  # fmt: skip
    return harness.Case(**{**fields, **changed})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda i: torch.arange(8).flip(0), "torch gives a wrong result 0 on set 0"),
        (lambda i: torch.arange(8).int(), "torch gives a wrong result 0 on set 0"),
        (lambda i: torch.empty(8, dtype=torch.int64), "torch gives a wrong result 0 on set 0"),
        (lambda i: torch.arange(8) + i, "torch gives a wrong result 0 on set 1"),
    ],
    ids=["values", "dtype", "unwritten", "second input set"],
)
def test_a_wrong_result_is_found(result, message):
    providers = {"packhorse": lambda i: torch.arange(8), "torch": result}
    with pytest.raises(ValueError, match=message):
        module("harness").check(small_case(providers=providers, num_sets=2))


def test_a_provider_that_is_named_but_absent_is_found():
    with pytest.raises(ValueError, match="kernel"):
        module("harness").check(small_case(capturable=frozenset({"kernel"})))


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "us", "baseline_us", "got", "reached"),
    [
        ({"ratio": 1.25}, 12.5, None, {"ratio": 1.25}, True),
        ({"ratio": 1.25}, 12.6, None, {"ratio": 1.26}, False),
        ({"us": 3.5}, 3.5, None, {"us": 3.5}, True),
        ({"us": 3.5}, 3.6, None, {"us": 3.6}, False),
        ({"ratio": 1.25, "us": 14.0}, 13.5, None, {"ratio": 1.35, "us": 13.5}, True),
        ({"ratio": 1.25, "us": 12.0}, 13.5, None, {"ratio": 1.35, "us": 13.5}, False),
        ({"times": 12.0}, 100.0, 1200.0, {"times": 12.0}, True),
        ({"times": 12.0}, 100.0, 1190.0, {"times": 11.9}, False),
    ],
)
def test_reached_is_what_a_limit_says(limits, us, baseline_us, got, reached):
    asked = module("asked")
    verdict = asked.judge(asked.Job("job", **limits), us, floor_us=10.0, baseline_us=baseline_us)
    assert {kind: verdict[kind] for kind in got} == pytest.approx(got)
    assert verdict["reached"] is reached
    assert (verdict["share"] <= 1) is reached


def test_a_factor_needs_a_baseline():
    asked = module("asked")
    with pytest.raises(ValueError, match="baseline_us"):
        asked.judge(asked.Job("job", times=2.0), 1.0, floor_us=1.0)


def test_each_job_has_a_limit_and_says_it():
    for key, job in module("asked").JOBS.items():
        assert [job.ratio, job.us, job.times] != [None] * 3, key
        assert re.fullmatch(r"([≤≥] [\d.]+ (x floor|x|µs)( or )?)+", job.asked), key


def synthetic_lines():
    """Lines of one case as the harness makes them from times, floors 10 and 20 us."""
    harness = module("harness")
    case = small_case(
        bytes_moved=40_000,
        providers={name: lambda i: torch.arange(8) for name in ("packhorse", "kernels", "loop")},
        twins={"packhorse": "kernels"},
        no_sync=frozenset({"packhorse"}),
        jobs={"microbatch": "packhorse", "loop_routes": "packhorse", "routes_in_order": "kernels"},
        baseline="loop",
        capturable=frozenset({"kernels"}),
    )
    times = {
        "packhorse": {"wall_us": [90.0, 100.0, 300.0], "waited_us": [150.0, 160.0, 155.0]},
        "kernels": {"wall_us": [20.0, 20.0, 20.0], "graph_us": [12.0, 13.0, 12.5]},
        "loop": {"wall_us": [1300.0, 1250.0, 1200.0]},
    }
    ceilings = {"copy": 4.0, "write": 2.0}
    environment = {
        "gpu": "NVIDIA H200", "l2_mib": 60, "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0",
        "python": "3.12.3", "commit": "0123abc", "date": "2026-11-29T20:00:00Z",
    }  # fmt: skip
    lines = harness.lines_of("32 of 2k-8k", case, times, ceilings, 60 * 2**20)
    return [{**line, **environment} for line in lines]


def test_a_line_holds_floor_ratio_beyond_and_verdicts():
    ours, kernels, loop = synthetic_lines()
    assert kernels["floor_us"] == 10.0
    assert kernels["ratio"] == 1.25
    assert kernels["graph_l2"] == "warm"
    assert kernels["jobs"]["routes_in_order"]["reached"]
    assert ours["beyond_gpu_us"] == pytest.approx(155 - 12.5)
    assert ours["jobs"]["microbatch"] == {
        "of": "beyond_gpu_us", "asked": "≤ 150 µs", "us": 142.5, "share": 0.95, "reached": True
    }  # fmt: skip
    assert ours["jobs"]["loop_routes"]["times"] == 12.5
    assert ours["no_sync"] is True
    assert "jobs" not in loop


def test_the_floor_of_what_only_writes_is_a_fill():
    case = small_case(bytes_moved=40_000, floor="write")
    times = {name: {"device_us": [30.0]} for name in case.providers}
    lines = module("harness").lines_of("fill", case, times, {"copy": 4.0, "write": 2.0}, 2**20)
    assert [(line["floor_us"], line["ratio"]) for line in lines] == [(20.0, 1.5)] * 2


@pytest.mark.parametrize("call_us", [1.0, 30.0, 1300.0, 20e3, 1e6])
def test_a_round_is_short_whatever_a_call_takes(call_us):
    plan = module("harness").Plan.of(call_us)
    calls = plan.calls * plan.walls + plan.waits + plan.devices
    assert min(plan.walls, plan.waits) >= 3
    assert plan.devices >= 5
    assert calls * call_us <= max(80e3, 12 * call_us)


def test_input_sets_pass_l2_twice_where_a_call_does_not():
    setting = module("harness").Setting(l2_bytes=2**20)
    assert [setting.num_sets(size) for size in (2**22, 2**21, 2**20, 2**17, 1)] == [
        1, 1, 2, 16, 128
    ]  # fmt: skip


# --- lines, tables, pictures ----------------------------------------------------------------------


def write_lines(folder, bench, lines):
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / f"{bench}.jsonl").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_line_names_commit_card_and_versions(path):
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        fields = ENVIRONMENT | (MEASURED if "tokens" in line else {})
        for field, kind in fields.items():
            assert isinstance(line[field], kind), (field, text)
        assert re.fullmatch(r"[0-9a-f]{7,40}", line["commit"]), text
        for kind in set(TIMES) & set(line):
            assert line[kind], text
            assert min(line[kind]) > 0, text
        for key, verdict in line.get("jobs", {}).items():
            job = module("asked").JOBS[key]
            assert verdict["asked"] == job.asked, text
            assert verdict["reached"] == (verdict["share"] <= 1), text


def test_the_last_line_of_the_newest_commit_counts(tmp_path):
    results = module("results")
    line = synthetic_lines()[0]
    repeated = [
        {**line, "commit": "old1234", "date": "2026-11-28T20:00:00Z", "wall_us": [1.0]},
        {**line, "wall_us": [2.0]},
        {**line, "wall_us": [3.0]},
    ]
    write_lines(tmp_path, "bench_microbatch", repeated)
    lines = results.read_lines(tmp_path)
    assert results.newest_commit(lines) == "0123abc"
    assert [line["wall_us"] for line in results.newest_set(lines)] == [[3.0]]


def test_no_lines_is_an_error():
    with pytest.raises(ValueError, match="no result lines"):
        module("results").newest_commit([])


def test_the_table_says_what_was_reached_missed_and_not_measured(tmp_path):
    lines = synthetic_lines()
    slow = json.loads(json.dumps(lines[1]))
    slow["case"] = "permuted"
    slow["graph_us"] = [20.0]
    slow["jobs"]["routes_in_order"] |= {"ratio": 2.0, "share": 1.6, "reached": False}
    write_lines(tmp_path, "bench_microbatch", [*lines, slow])
    text = module("table").asked_table(module("results").read_lines(tmp_path))
    assert "| ≥ 12 x | 12.5 x (100 µs) | yes |" in text
    assert "| ≤ 1.25 x floor | 1.25 x (12.5 µs) … 2.00 x (20.0 µs) | **no**: 1 of 2 |" in text
    assert "| ≤ 3.5 µs | not measured at 0123abc | |" in text
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, CUDA 13.0, at 0123abc" in text


def test_blocks_are_written_and_then_agree(tmp_path):
    lines, page = tmp_path / "results", tmp_path / "page.md"
    lines.mkdir()
    write_lines(lines, "bench_microbatch", synthetic_lines())
    page.write_text(
        "before\n<!-- benchmarks/table.py asked -->\n<!-- end -->\nbetween\n"
        "<!-- benchmarks/table.py bench_microbatch -->\nstale\n<!-- end -->\nafter\n",
        encoding="utf-8",
    )
    command = [sys.executable, str(BENCHMARKS / "table.py"), "--results", str(lines)]
    stale = subprocess.run([*command, "--check", str(page)], capture_output=True, text=True)
    assert stale.returncode == 1
    assert "'asked', 'bench_microbatch'" in stale.stdout
    subprocess.run([*command, "--write", str(page)], check=True)
    subprocess.run([*command, "--check", str(page)], check=True)
    text = page.read_text(encoding="utf-8")
    assert re.findall("^(before|between|after|stale)$", text, re.MULTILINE) == [
        "before", "between", "after"
    ]  # fmt: skip
    assert "| packhorse | 100 | 155 | " in text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_the_documents_are_those_of_the_lines(path):
    text = path.read_text(encoding="utf-8")
    lines = module("results").read_lines()
    assert module("table").filled(text, lines)[0] == text, (
        f"python benchmarks/table.py --write {path.relative_to(ROOT)}"
    )


def test_the_pictures_are_drawn_from_lines(tmp_path):
    pytest.importorskip("matplotlib")
    results, images = tmp_path / "results", tmp_path / "images"
    results.mkdir()
    write_lines(results, "bench_microbatch", synthetic_lines())
    sweep = []
    for case, kernel in (("routes", "kernels"), ("row ids", "kernel")):
        for tokens in (1024, 4096, 65536):
            for line in synthetic_lines():
                provider = {"kernels": kernel, "loop": "torch loop"}.get(line["provider"])
                line |= {"case": f"{case}, {tokens}", "tokens": tokens, "floor_us": tokens / 4e3}
                sweep.append(line | {"provider": provider or line["provider"]})
    write_lines(results, "bench_sweep", sweep)
    shape = {"case": "8k, C 20", "gpu": "a GPU", "commit": "0123abc", "date": "2026-01-02"}
    scored = [
        {**shape, "provider": provider, "forward_ms": ms, "both_ms": 3 * ms}
        for provider, ms in (("packhorse", 0.0871), ("chunked", 1.37), ("logits", 7.41))
    ]
    older = {**scored[0], "commit": "9999fff", "date": "2026-01-01", "forward_ms": 55.5}
    write_lines(results, "lm_head_scoring", [older, *scored])
    command = [sys.executable, str(BENCHMARKS / "plot.py"), "--results", str(results)]
    subprocess.run([*command, "--out", str(images)], check=True, capture_output=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in images.iterdir()}
    assert set(drawn) == {"time_against_tokens.svg", "asked.svg", "scoring.svg"}
    for label in ("8k, C 20", "full logits, torch", "0.0871", "22.2", "at 0123abc"):
        assert label in drawn["scoring.svg"]
    assert "55.5" not in drawn["scoring.svg"]
    for label in ("torch loop, wall", "kernels, CUDA graph", "copy floor", "at 0123abc"):
        assert label in drawn["time_against_tokens.svg"]
    assert "gather_routes, 182k tokens" in drawn["asked.svg"]
    assert all(len(text) < 100_000 for text in drawn.values())
