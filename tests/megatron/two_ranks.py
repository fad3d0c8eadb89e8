"""Run a test file twice as a program: ``FILE RANK FOLDER``, which meet in FOLDER over gloo."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD, TIMEOUT_S = 2, 120


def join(rank: int, folder: Path) -> None:
    """In the program: the CPU shims and the group of both."""
    torch.set_num_threads(1)
    from packhorse.replay.cpu_megatron import install_cpu_shims

    install_cpu_shims()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", world_size=WORLD, rank=rank
    )


def leave(results: Any, rank: int, folder: Path) -> None:
    """In the program: what ``run_two_ranks`` returns of this rank."""
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run_two_ranks(file: str, folder: Path) -> list[Any]:
    """The results of both ranks; none of them lives longer than ``TIMEOUT_S``."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(root)])
    processes = [
        subprocess.Popen(
            [sys.executable, file, str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        errors = [
            process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1]
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def run_module_twice(module: str, folder: Path, argument: str, timeout_s: float) -> list[Any]:
    """What each rank of ``python -m MODULE RANK STORE OUT ARGUMENT`` saved in OUT."""
    outs = [folder / f"{rank}.pt" for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder / "store"), str(out), argument],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD, printed
    return [torch.load(out) for out in outs]
