"""Run a test module's ``run_rank`` in processes of their own: ``python MODULE.py RANK FOLDER``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def results_of_ranks(module: str, num_ranks: int, folder: Path) -> list[Any]:
    """What each rank saved as ``folder / rankR.pt``; a rank that fails shows its errors."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, module, str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]
