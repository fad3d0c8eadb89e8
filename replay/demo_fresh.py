"""Sample the demo's prompts anew, from the vLLM of this environment; ``make demo CAPTURE=fresh``.

    python -m packhorse.replay.demo_fresh --family glm4_moe --out FILE.npz

The requests are those of the packaged captures: prompts of 1 to 200 tokens around the 128 of a KV
block on a CPU, and a conversation of two turns, the second of which vLLM begins in its prefix
cache. The engine is started, asked and read by ``capture_settings``, ``preflight`` and
``read_request_output``, as ``python -m packhorse capture`` does.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from packhorse.replay.capture_save import save_capture
from packhorse.replay.demo_families import FAMILIES
from packhorse.replay.rollout import Rollout
from packhorse.replay.vllm import capture_settings, preflight, read_request_output

ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "seed": 0,
}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "ignore_eos": True}


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    conv: int = -1  # conversation, -1: none
    turn: int = 0


def first_requests(vocab_size: int) -> list[Request]:
    """Single turns, and last the first turn of the conversation."""
    asked = zip((1, 5, 17, 64, 127, 129, 200), (16, 12, 24, 8, 16, 5, 12), strict=True)
    singles = [
        Request(_random_ids(length, 500 + length, vocab_size), sampled, 1000 + length)
        for length, sampled in asked
    ]
    return [*singles, Request(_random_ids(150, 4242, vocab_size), 24, 7, conv=0)]


def next_turn(request: Request, response_ids: Sequence[int], vocab_size: int) -> Request:
    """The conversation so far, and 20 tokens of an observation."""
    observed = _random_ids(20, 4243, vocab_size)
    prompt = [*request.prompt_ids, *response_ids, *observed]
    return Request(prompt, 16, request.seed + 1, request.conv, request.turn + 1)


def _random_ids(count: int, seed: int, vocab_size: int) -> list[int]:
    """Past the special tokens."""
    return np.random.default_rng(seed).integers(4, vocab_size, count).tolist()


def sample(folder: Path) -> tuple[list[Request], list[Rollout], dict[str, Any]]:
    """Every request, its response, and the capture's meta; from one engine in this process."""
    import torch

    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    engine = ENGINE | ({"kv_cache_memory_bytes": 64 << 20} if device == "cpu" else {})
    settings = capture_settings(support="mask", device=device, engine=engine, sampling=SAMPLING)
    os.environ.update(settings.environment)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    llm = LLM(str(folder), **settings.engine)
    model = preflight(llm, settings).model

    def run(requests: Sequence[Request]) -> list[Rollout]:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_ids} for request in requests],
            [
                SamplingParams(**settings.sampling | {"max_tokens": r.max_tokens, "seed": r.seed})
                for r in requests
            ],
            use_tqdm=False,
        )
        return [r for output in outputs for r in read_request_output(output, settings, model=model)]

    requests = first_requests(config["vocab_size"])
    rollouts = run(requests)
    requests.append(
        next_turn(requests[-1], rollouts[-1].response_ids.tolist(), config["vocab_size"])
    )
    rollouts += run(requests[-1:])
    dtype = str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    weights = (folder / "model.safetensors").read_bytes()
    meta = {
        "made_by": "python -m packhorse.replay.demo_fresh",
        "vllm": settings.version,
        "torch": torch.__version__,
        "triton_interpret": os.environ.get("TRITON_INTERPRET") == "1",
        "dtype": dtype,
        "device": device,
        "engine": ENGINE | {"block_size": llm.llm_engine.vllm_config.cache_config.block_size},
        "sampling": SAMPLING,
        "model_config": config,
        "model_sha256": hashlib.sha256(weights).hexdigest(),
    }
    return requests, rollouts, meta


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m packhorse.replay.demo_fresh")
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--out", required=True, metavar="FILE.npz")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    requests, rollouts, meta = sample(FAMILIES[args.family].model)
    num_bytes = save_capture(
        args.out,
        rollouts,
        meta=meta,
        columns={
            "conv": [request.conv for request in requests],
            "turn": [request.turn for request in requests],
            "request_seed": [request.seed for request in requests],
        },
    )
    tokens = sum(rollout.response_ids.size for rollout in rollouts)
    sys.stdout.write(
        f"sampled   {tokens} tokens of {args.family} by vLLM {meta['vllm']} on {meta['device']},"
        f" {time.perf_counter() - began:.1f} s, {num_bytes:,} bytes\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
