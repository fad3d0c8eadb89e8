"""A real vLLM HTTP server of the tiny model, in a process of its own on a loopback port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODEL = Path(__file__).parents[2] / "replay" / "data" / "tiny_moe"
START_S, STOP_S = 240, 20
ARGUMENTS = (
    "--max-model-len=512", "--enforce-eager", "--kv-cache-memory-bytes=64M", "--max-num-seqs=16",
    "--max-num-batched-tokens=512", "--seed=0", "--logprobs-mode=processed_logprobs",
    "--max-logprobs=64", "--enable-return-routed-experts", "--return-sampling-mask",
    "--enable-scale-out", "--enable-prompt-tokens-details", "--served-model-name=tiny",
    "--middleware=packhorse.replay.middleware.PackedReplies",
)  # fmt: skip


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """The server's address while it runs; it is ended, with all its processes, in any case."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL),
        "--host", "127.0.0.1", "--port", str(port), *ARGUMENTS,
    ]  # fmt: skip
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    lines = log.read_text("utf-8", "replace").splitlines()
    raise RuntimeError(f"no server at {url}:\n" + "\n".join(lines[-40:]))
