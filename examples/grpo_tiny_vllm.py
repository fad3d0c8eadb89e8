"""Rollouts for ``grpo_tiny.py`` by vLLM: what ``TransformersRollout`` does, done by a real engine.

The engine is in a process of its own, of this Python or of another that has vLLM and packhorse;
this file is also what that process runs. It is started with packhorse's ``capture_settings`` and
asked by ``preflight``; its replies are read by ``read_request_output``, so that routes, support and
logprobs are what vLLM returns.

Before each step the trainer's weights are written as a checkpoint, which vLLM reloads by its own
``reload_weights``, and the prefix cache is reset.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo_tiny_model import EOS, ModelSizes, write_folder
from grpo_tiny_rollout import Sampling, TransformersRollout
from torch import Tensor

from packhorse import Trace, Trajectory

#: What an engine on a CPU needs, with its Triton kernels interpreted (tools/vllm.sh).
ON_CPU = {
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def find_vllm(python: Path | None = None) -> Path | None:
    """The Python that runs vLLM: the one given, this one, or where there is no GPU that of
    tools/vllm.sh, which is built for a CPU; else None."""
    if python is not None:
        return python
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    apart = Path(sys.prefix) / "vllm" / "bin" / "python"
    return apart if apart.exists() and not torch.cuda.is_available() else None


def make_rollout(
    kind: str, folder: Path, sizes: ModelSizes, sampling: Sampling, python: Path | None = None
) -> Any:
    """A rollout of a checkpoint folder.

    Args:
        kind: "vllm", "transformers", or "auto": vLLM where ``find_vllm`` finds it.
        python: as ``find_vllm`` has it.

    Raises:
        ModuleNotFoundError: "vllm" is asked for, and not found.
        RuntimeError: the engine did not start.
    """
    found = None if kind == "transformers" else find_vllm(python)
    if found is not None:
        return VllmRollout(folder, sizes, sampling, found)
    if kind == "vllm":
        raise ModuleNotFoundError(
            "make_rollout: vLLM is not installed here, nor in .venv/vllm (tools/vllm.sh install);"
            " --vllm-python names a Python that has it"
        )
    return TransformersRollout(folder, sizes, sampling)


class VllmRollout:
    """vLLM in another process, in bf16; it has the folder's weights before ``load_weights``.

    Args:
        folder: config.json and model.safetensors. New weights go into a folder ``vllm.PID`` beside
            it, which ``close`` removes.
        python: of an environment that has vLLM and packhorse.
    """

    def __init__(self, folder: Path, sizes: ModelSizes, sampling: Sampling, python: Path) -> None:
        self.sizes, self.sampling = sizes, sampling
        self._folder = folder.resolve().parent / f"vllm.{os.getpid()}"
        self._loaded = 0
        environment = {**os.environ}
        if python != Path(sys.executable):
            environment.pop("PYTHONPATH", None)  # libraries of this Python
        for name, value in (QUIET | ({} if torch.cuda.is_available() else ON_CPU)).items():
            environment.setdefault(name, value)
        self._pipe, theirs = Pipe()
        work = {"folder": str(folder.resolve()), "sampling": asdict(sampling)}
        self._process = subprocess.Popen(
            [python, __file__, str(theirs.fileno()), json.dumps(work)],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self.about = self._receive()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hand over the trainer's weights, as a checkpoint."""
        self._loaded += 1
        write_folder(self._folder, self.sizes, dict(weights))
        self._ask("load_weights", str(self._folder), f"step {self._loaded}")

    def generate(self, prompts: np.ndarray, seed: int) -> list[Trajectory]:
        """One response for each row of ``prompts`` [B, P].

        Raises:
            RuntimeError: tokens are not of the weights that were loaded last.
        """
        trajectories = []
        for i, turn in enumerate(self._ask("generate", prompts, seed)):
            if self._loaded and turn["weight_version"] not in (None, f"step {self._loaded}"):
                raise RuntimeError(f"generate: response {i} is of {turn['weight_version']}")
            trace = Trace(prompts[i], trajectory=i, **self.sizes.checks)
            trace.add_turn(**turn)
            trajectories.append(trace.finalize())
        return trajectories

    def close(self) -> None:
        """End the engine's process."""
        self._pipe.close()
        self._process.wait(timeout=60)
        for path in (self._folder / "config.json", self._folder / "model.safetensors"):
            path.unlink(missing_ok=True)
        if self._folder.exists():
            self._folder.rmdir()

    def _ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            code = self._process.wait()
            raise RuntimeError(
                f"VllmRollout: the engine's process ended with code {code}; what it said is above"
            ) from None


# --- in the engine's process ----------------------------------------------------------------------


class Engine:
    def __init__(self, folder: str, sampling: dict[str, Any]) -> None:
        from packhorse.replay.vllm import capture_settings, preflight

        self.on_cpu = not torch.cuda.is_available()
        self.settings = capture_settings(
            support="mask",
            device="cpu" if self.on_cpu else "cuda",
            engine={
                "dtype": "bfloat16",
                "max_model_len": 128,
                "max_num_seqs": 128,
                "max_num_batched_tokens": 4096,
                "kv_cache_memory_bytes": 64 << 20,
                "gpu_memory_utilization": 0.05,  # others run beside it
                "enforce_eager": True,  # it starts in seconds
                "skip_tokenizer_init": True,
                "seed": 0,
            },
            sampling={**sampling, "stop_token_ids": [EOS]},
        )
        os.environ.update(self.settings.environment)
        from vllm import LLM

        self.llm = LLM(folder, **self.settings.engine)
        self.model = preflight(self.llm, self.settings).model

    def about(self) -> dict[str, Any]:
        return {
            "rollout": "vllm",
            "vllm": self.settings.version,
            "rollout_torch": torch.__version__,
        }

    def load_weights(self, folder: str, version: str) -> None:
        from packhorse.replay.vllm import reset_after_weights

        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if self.on_cpu:
            self.llm.apply_model(pack_experts)
        reset_after_weights(self.llm, version)

    def generate(self, prompts: np.ndarray, seed: int) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        from packhorse.replay.vllm import read_request_output

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts.tolist()],
            [
                SamplingParams(**self.settings.sampling | {"seed": seed * len(prompts) + i})
                for i in range(len(prompts))
            ],
            use_tqdm=False,
        )
        return [
            rollout.turn()
            for output in outputs
            for rollout in read_request_output(output, self.settings, model=self.model)
        ]


def pack_experts(model: Any) -> None:
    """What vLLM 0.32's ``reload_weights`` leaves out on a CPU, where the kernel of the experts
    reads weights in an order of its own: without it they are read in the wrong order."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)


def serve(pipe: Connection, work: dict[str, Any]) -> None:
    engine = Engine(**work)
    pipe.send(engine.about())
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:  # the trainer is done
            return
        pipe.send(getattr(engine, name)(*arguments))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
