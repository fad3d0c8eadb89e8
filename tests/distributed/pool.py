"""Ranks that live from case to case, so that Megatron is imported once a process.

A case that fails or hangs ends its ranks; the next one starts new ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

START_S = 240.0  # importing Megatron on a busy machine; not part of a case's time
GRACE_S = 2.0  # for the other ranks, once one has failed
RUNS = 40  # cases of one set of ranks


def megatron_version() -> tuple[int, ...]:
    """(0, 19) of 0.19.2: the version that the ranks import; empty if there is none."""
    if importlib.util.find_spec("megatron") is None:
        return ()
    spec = importlib.util.find_spec("megatron.core")  # does not import it
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("package_info.py").read_text()
    found = {name: int(n) for name, n in re.findall(r"^(MAJOR|MINOR) = (\d+)$", text, re.M)}
    return found["MAJOR"], found["MINOR"]


class RankPool:
    """Args:
    folder: for rendezvous files, results and what the ranks print.
    place: where the ranks compute: "cpu", over gloo; "one gpu", all on the first that this process
        sees, over gloo; "gpus", each on its own, over NCCL.
    """

    def __init__(self, folder: Path, *, place: Literal["cpu", "one gpu", "gpus"] = "cpu") -> None:
        self._folder = folder
        self._environment = {**os.environ}
        if place == "cpu":
            self._environment["CUDA_VISIBLE_DEVICES"] = ""
        elif place == "gpus":
            # Megatron asks for one connection where tensor-parallel ranks share a sequence
            self._environment |= {"PACKHORSE_TEST_NCCL": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        self._ranks: list[subprocess.Popen] = []
        self._run = self._started_at = 0

    def run(
        self,
        case: str,
        world: int,
        timeout_s: float,
        fault: str | None = None,
        scenario: str | None = None,
    ) -> list[dict[str, Any]]:
        """Results of every rank.

        Args:
            fault: what the last rank does wrong on purpose, see ``worker.py``.
            scenario: of ``faults.py``; the case is then run after it.

        Raises:
            AssertionError: a rank raised, died or did not answer in time; names case and rank.
        """
        spent = self._run - self._started_at >= RUNS
        gone = any(rank.poll() is not None for rank in self._ranks)
        if len(self._ranks) != world or gone or spent:
            self.end()
            self._start(world)
            self._started_at = self._run
        self._run += 1
        asked = {"case": case, "run": self._run, "fault": fault, "scenario": scenario}
        line = json.dumps(asked) + "\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        answers = self._collect(time.monotonic() + timeout_s)
        wrong = [
            f"{case}: rank {rank} {self._state(rank, answer)}"
            for rank, answer in enumerate(answers)
            if answer is None or "error" in answer
        ]
        if wrong:
            self.end()
            raise AssertionError("\n".join(wrong))
        return [answer["result"] for answer in answers if answer is not None]

    def end(self) -> None:
        """End the ranks, also those that hang."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            if rank.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.stdin.close()
        self._ranks = []

    def _start(self, world: int) -> None:
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        for rank in range(world):
            with open(self._folder / f"rank{rank}.log", "w") as log:
                self._ranks.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "tests.distributed.worker"),
                            *(str(rank), str(world), str(self._folder)),
                        ],
                        env={**self._environment, "PYTHONPATH": path},
                        cwd=root,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        text=True,
                    )
                )

        deadline = time.monotonic() + START_S
        for rank, process in enumerate(self._ranks):
            ready = self._folder / f"ready-{process.pid}"
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    self.end()
                    log = (self._folder / f"rank{rank}.log").read_text()[-2000:]
                    raise AssertionError(f"rank {rank} of {world} did not start:\n{log}")
                time.sleep(0.02)

    def _collect(self, deadline: float) -> list[dict[str, Any] | None]:
        answers: list[dict[str, Any] | None] = [None] * len(self._ranks)
        failed = False
        while None in answers and time.monotonic() < deadline:
            time.sleep(0.02)
            for rank, process in enumerate(self._ranks):
                if answers[rank] is not None:
                    continue
                over = process.poll() is not None
                file = self._folder / f"{self._run}-{rank}.pkl"
                if file.exists():
                    answers[rank] = pickle.loads(file.read_bytes())
                elif over:
                    answers[rank] = {"error": f"ended with code {process.returncode}"}
                answer = answers[rank]
                if answer is not None and "error" in answer and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _state(self, rank: int, answer: dict[str, Any] | None) -> str:
        if answer is None:
            return "did not answer; it hangs, or waits for another rank"
        log = (self._folder / f"rank{rank}.log").read_text()[-2000:]
        return f"failed:\n{answer['error']}\n{log}"
