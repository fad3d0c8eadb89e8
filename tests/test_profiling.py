"""The profiling scripts: what they run, what they say without a profiler, and ncu's table."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse.kernels.launch import Launcher

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def ncu_table(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ncu_table")


# --- ncu's table ----------------------------------------------------------------------------------

ABOUT = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
ABOUT += '"Block Size","Grid Size","Device","CC"'


def about(number: int, kernel: str, grid: str = "(4096, 1, 1)") -> str:
    return f'"{number}","77","python3","host","{kernel}","1","7","(128, 1, 1)","{grid}","0","9.0"'


RAW = f"""==PROF== Connected to process 77 (/usr/bin/python3)
==PROF== Profiling "packhorse_gather_routes_u8_i32": 0%....50%....100% - 2 passes
{ABOUT},"dram__bytes_read.sum","dram__bytes_write.sum",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",\
"launch__registers_per_thread","sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","Mbyte","byte","%","us","register/thread","%"
{about(0, "packhorse_gather_routes_u8_i32", "(24, 3, 1)")},\
"71.5","279,500,000","84.36","100.00","56","61.5"
{about(1, "packhorse_make_row_ids")},"0.25","0","1.5","2.00","30","22.25"
==PROF== Disconnected from process 77
"""
LONG = f"""{ABOUT},"Section Name","Metric Name","Metric Unit","Metric Value"
""" + "\n".join(
    f'{about(number, kernel)},"Command line profiler metrics","{metric}","{unit}","{value}"'
    for number, kernel in enumerate(["packhorse_move_rows_u8", "packhorse_move_rows_u8"])
    for metric, unit, value in (
        ("dram__bytes_read.sum", "Gbyte", "1.5"),
        ("dram__bytes_write.sum", "Kbyte", "500,000"),
        ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "90"),
        ("gpu__time_duration.sum", "ms", "0.5"),
        ("launch__registers_per_thread", "register/thread", "32"),
        ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "75"),
    )
)
CASES = [
    {"case": "routes: 48x8", "kernels": ["packhorse_gather_routes_u8_i32"], "bytes": 350_000_000},
    {"case": "layout: B 32", "kernels": ["packhorse_make_row_ids"], "bytes": 1_456_000},
]


def test_raw_rows_are_read_with_their_units(ncu_table):
    routes, ids = ncu_table.read_launches(RAW.splitlines())
    assert (routes.read, routes.written, routes.duration) == (71.5e6, 279.5e6, 100.0)
    assert routes.gbps == pytest.approx(3510)
    assert (ids.kernel, ids.registers, ids.warps) == ("packhorse_make_row_ids", 30, 22.25)


def test_a_row_a_counter_is_read_too(ncu_table):
    first, second = ncu_table.read_launches(LONG.splitlines())
    assert first == second
    assert (first.read, first.written, first.duration) == (1.5e9, 0.5e9, 500)
    assert first.gbps == pytest.approx(4000)


def test_the_table_names_each_case_once(ncu_table):
    launches = ncu_table.read_launches(RAW.splitlines())
    assert ncu_table.table(launches, CASES).splitlines()[2:] == [
        "| routes: 48x8 | `packhorse_gather_routes_u8_i32` | 24·3 x 128 | 56 | 62 % | 71.5 | 279.5"
        " | 350.0 | 100.0 | 3,510 | 84 % |",
        "| layout: B 32 | `packhorse_make_row_ids` | 4096 x 128 | 30 | 22 % | 0.2 | 0.0 | 1.5 | 2.0"
        " | 125 | 2 % |",
    ]
    both = [{"case": "all", "kernels": [launch.kernel for launch in launches], "bytes": 0}]
    assert [row.split(" | ")[0] for row in ncu_table.table(launches, both).splitlines()[2:]] == [
        "| all", "| ",
    ]  # fmt: skip
    widths = {line.count("|") for line in ncu_table.table(launches).splitlines()}
    assert widths == {10}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== The user does not have permission", "no table of ncu's --csv"),
        (RAW.replace('"us"', '"fortnight"'), "the unit 'fortnight' is not known"),
        (RAW.replace('"100.00"', '"100.00.1"'), "'100.00.1' is no number; run ncu with LC_ALL=C"),
        (RAW.replace("dram__bytes_read", "dram__bytes"), "has no dram__bytes_read.sum"),
    ],
)
def test_what_is_no_table_is_said(ncu_table, text, message):
    with pytest.raises(ValueError, match=f"^ncu_table: .*{message}"):
        ncu_table.read_launches(text.splitlines())


def test_cases_of_another_run_are_refused(ncu_table):
    launches = ncu_table.read_launches(RAW.splitlines())
    with pytest.raises(ValueError, match="2 launches in ncu's file, 1 in the cases"):
        ncu_table.table(launches, CASES[:1])


def test_the_table_goes_between_the_marks_of_a_page(ncu_table, tmp_path, monkeypatch, capsys):
    files = {
        "ncu.csv": RAW,
        "page.md": f"# Title\n\n{ncu_table.BEGIN}\nold\n{ncu_table.END}\nmore\n",
        "cases.jsonl": "".join(
            json.dumps({**case, "environment": {"gpu": "NVIDIA H200", "commit": "abc"}}) + "\n"
            for case in CASES
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("ncu.csv", "cases.jsonl", "page.md")]
    monkeypatch.setattr(sys, "argv", ["", paths[0], "--cases", paths[1], "--into", paths[2]])
    assert ncu_table.main() == 0
    page = (tmp_path / "page.md").read_text().splitlines()
    assert page[:5] == ["# Title", "", ncu_table.BEGIN, "", "gpu NVIDIA H200, commit abc"]
    assert page[-3:] == ["", ncu_table.END, "more"]
    assert "old" not in page
    (tmp_path / "page.md").write_text("no marks")
    assert ncu_table.main() == 1
    assert "needs one line <!-- benchmarks/ncu_table.py -->" in capsys.readouterr().err


def test_the_page_on_profiling_has_a_place_for_it_and_the_command(ncu_table):
    page = (ROOT / "docs" / "profiling.md").read_text()
    ncu_table.put_into(page, "table")
    assert f"--metrics {','.join(ncu_table.METRICS.values())} \\\n" in page
    script = (FOLDER / "profile.sh").read_text()
    for option in (
        "--clock-control none --profile-from-start off",
        "--csv --page raw --log-file",
        "--report nvtx_sum --report nvtx_kern_sum --report cuda_gpu_kern_sum",
    ):
        assert option in page
        assert option in script


# --- what is profiled -----------------------------------------------------------------------------


def run_cases(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    path = tmp_path / "cases.jsonl"
    subprocess.run(
        [sys.executable, FOLDER / "profile_kernels.py", "--cases", path, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, timeout=600, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_case_that_is_profiled_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("profile_kernels")
    seen = run_cases(tmp_path, "--dry")
    assert [line["case"] for line in seen] == list(module.cases(module.DRY))
    assert all(line["bytes"] > 0 for line in seen)


def names_of_kernels() -> list[str]:
    """Where the name of each kernel begins."""
    modules = [
        importlib.import_module(f"packhorse.kernels.{path.stem}")
        for path in (ROOT / "kernels").glob("*.py")
    ]
    launchers = {v for module in modules for v in vars(module).values() if isinstance(v, Launcher)}
    nouns = [launcher.kernel.__name__.strip("_").removesuffix("_kernel") for launcher in launchers]
    return sorted(f"packhorse_{noun}" for noun in nouns)


def test_the_page_on_profiling_names_every_kernel():
    page = (ROOT / "docs" / "profiling.md").read_text()
    assert [name for name in names_of_kernels() if f"`{name}`" not in page] == []


def test_every_kernel_is_profiled(cuda, tmp_path):
    seen = {kernel for line in run_cases(tmp_path) for kernel in line["kernels"]}
    names = names_of_kernels()
    assert [name for name in names if not any(k.startswith(name) for k in seen)] == []


# --- profile.sh -----------------------------------------------------------------------------------

#: stands for a profiler: says how it was called, and leaves what it would leave
TOOL = """#!/bin/sh
echo "$0" "$@" >>{calls}
while [ $# -gt 0 ]; do
    case $1 in
    --log-file) cp {csv} "$2" ;;
    --cases) cp {cases} "$2" ;;
    --output) touch "$2.nsys-rep" ;;
    esac
    shift
done
"""


BASE_PATH = "/usr/bin:/bin"


def run_script(tmp_path: Path, tools: list[str], *arguments: str) -> tuple[Any, str]:
    """Its outcome, and the calls of the profilers that there are."""
    if any(shutil.which(tool, path=BASE_PATH) for tool in ("nsys", "ncu")):
        pytest.skip("profilers of this machine are among its basic tools")
    calls, csv, cases = (tmp_path / name for name in ("calls", "in.csv", "in.jsonl"))
    calls.touch()
    csv.write_text(RAW)
    cases.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    path = tmp_path / "bin"
    path.mkdir()
    for tool in tools:
        (path / tool).write_text(TOOL.format(calls=calls, csv=csv, cases=cases))
        (path / tool).chmod(0o755)
    done = subprocess.run(
        [FOLDER / "profile.sh", *arguments],
        env={
            "PATH": f"{path}:{BASE_PATH}",
            "PYTHON": sys.executable,
            "OUT": str(tmp_path / "out"),
            "NSIGHT_PLACES": str(tmp_path),
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done, calls.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "profile: neither nsys nor ncu here"),
        (("ncu",), "profile: no ncu here"),
        (("nsys",), "profile: no nsys here"),
        (("perf",), "profile: 'perf' is not nsys or ncu"),
    ],
)
def test_without_a_profiler_it_says_so(tmp_path, arguments, message):
    done, _ = run_script(tmp_path, [], *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_ncu_leaves_the_clocks_alone_and_sees_our_kernels_once(tmp_path, ncu_table):
    done, calls = run_script(tmp_path, ["ncu"])
    assert done.returncode == 0, done.stderr
    assert "--clock-control none" in calls
    assert "--profile-from-start off" in calls
    assert "--kernel-name regex:packhorse_ " in calls
    assert f"--metrics {','.join(ncu_table.METRICS.values())} " in calls
    assert "| routes: 48x8 | `packhorse_gather_routes_u8_i32` |" in done.stdout
    assert "== no nsys here: no timeline" in done.stdout


def test_one_kernel_is_profiled_by_name(tmp_path):
    done, calls = run_script(tmp_path, ["ncu"], "ncu", "gather_routes")
    assert done.returncode == 0, done.stderr
    assert "--kernel-name regex:packhorse_.*gather_routes " in calls
    assert "| `packhorse_gather_routes_u8_i32` |" in done.stdout


def test_nsys_gives_tables_of_ranges_and_kernels(tmp_path):
    done, calls = run_script(tmp_path, ["nsys"], "nsys")
    assert done.returncode == 0, done.stderr
    profile, stats = calls.splitlines()
    assert "--trace=cuda,nvtx" in profile
    assert "--report nvtx_sum --report nvtx_kern_sum --report cuda_gpu_kern_sum" in stats
    assert stats.endswith("packhorse.nsys-rep")
