"""What a built wheel and sdist hold, and that the wheel works where no checkout is in sight.

    python tools/check_wheel.py DIST

DIST holds one wheel and one sdist. The wheel is installed without its dependencies into a new
environment that borrows this one's torch, and imported from another folder.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("kernels", "packed", "replay")

# Run by the new environment's Python, in an empty folder.
PROBE = """
import importlib.metadata, importlib.util, pathlib, pkgutil, sys
import packhorse
site = pathlib.Path(sys.prefix).resolve()
assert site in pathlib.Path(packhorse.__file__).resolve().parents, packhorse.__file__
for file in importlib.metadata.files("packhorse"):
    assert file.parts[0] in ("packhorse", f"packhorse-{packhorse.__version__}.dist-info"), file
for part in ("kernels", "packed", "replay"):
    assert importlib.util.find_spec(part) is None, f"{part} is importable as a top-level name"
    package = importlib.import_module(f"packhorse.{part}")
    for module in pkgutil.iter_modules(package.__path__):
        found = importlib.util.find_spec(f"packhorse.{part}.{module.name}")
        assert site in pathlib.Path(found.origin).resolve().parents, found.origin
import torch
from packhorse import gather_rows
out = gather_rows(torch.tensor([10, 11, 12]), torch.tensor([2, -1]), fill=-1)
assert out.tolist() == [12, -1], out
from packhorse.replay.capture import Capture
data = pathlib.Path(packhorse.__file__).parent / "replay" / "data"
Capture.load(data / "vllm_tiny_moe.npz")
"""


def expected_files() -> set[str]:
    """What the wheel must hold beside its metadata: all tracked files of the package."""
    tracked = subprocess.run(
        ["git", "ls-files", *PARTS, "packhorse/*.py", "packhorse/py.typed"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return {name if name.startswith("packhorse/") else f"packhorse/{name}" for name in tracked}


def check_contents(wheel: Path, sdist: Path) -> None:
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = expected_files()
    if held != expected:
        raise SystemExit(
            f"the wheel lacks {sorted(expected - held)} and should not hold"
            f" {sorted(held - expected)}"
        )
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers()}
    lacking = {*expected, "setup.py", "pyproject.toml", "LICENSE", "README.md"} - in_sdist
    if lacking:
        raise SystemExit(f"the sdist lacks {sorted(lacking)}")


def check_installed(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        env, elsewhere = Path(folder, "env"), Path(folder, "elsewhere")
        elsewhere.mkdir()
        venv.create(env, with_pip=True)
        python = env / "bin" / "python"
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

        def run(*command: str) -> str:
            result = subprocess.run(
                [str(python), *command], cwd=elsewhere, env=clean, text=True, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if result.returncode:
                raise SystemExit(f"{' '.join(command)[:60]} failed:\n{result.stdout}")
            return result.stdout

        run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
        # torch and the rest; .pth files in a folder added this way are not read, so this
        # environment's editable packhorse stays out
        site = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run("-c", PROBE)
        run("-m", "packhorse", "demo", "--help")
        doctor = run("-m", "packhorse", "doctor")
        if "gather_rows        on cpu: right" not in doctor:
            raise SystemExit(f"doctor:\n{doctor}")


def main() -> None:
    dist = Path(sys.argv[1]).resolve()
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(wheel, sdist)
    check_installed(wheel)
    sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB, only packhorse/...\n")


if __name__ == "__main__":
    main()
