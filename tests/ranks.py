"""Run a test module's ``run_rank`` in processes of their own: ``python MODULE.py RANK FOLDER``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def results_of_ranks(module: str, num_ranks: int, folder: Path, *, gpus: bool = False) -> list[Any]:
    """What each rank saved as ``folder / rankR.pt``; a rank that fails shows its errors.

    ``gpus``: the processes see this one's GPUs; else none. Each finds ``num_ranks`` in WORLD_SIZE.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(num_ranks)}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    processes = [
        subprocess.Popen(
            [sys.executable, module, str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]
