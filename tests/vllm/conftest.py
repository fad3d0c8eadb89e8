"""A real vLLM on a CPU, in the environment of tools/vllm.sh (``make test-vllm``).

Elsewhere nothing here is collected. The tests of one module share its engine; what
they look at was sampled in one batch, and each looks at it with plain Python.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: set by tools/vllm.sh, with the environment that the interpreted engine needs
RUNS = "PACKHORSE_TEST_VLLM" in os.environ
collect_ignore_glob = [] if RUNS else ["test_*.py"]

DATA = Path(__file__).parents[2] / "replay" / "data"
#: small enough for a CPU; block size is 128 there
SMALL = {
    "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16,
    "max_num_batched_tokens": 512, "seed": 0,
}  # fmt: skip


def random_ids(count: int, seed: int) -> list[int]:
    """Ids of the tiny models' vocabulary, past their special tokens."""
    return np.random.default_rng(seed).integers(4, 512, count).tolist()


@contextmanager
def engine_here(folder: Path, arguments: dict[str, Any]) -> Iterator[Any]:
    """An ``LLM`` whose engine is in this process."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        llm = LLM(str(folder), **arguments)
        yield llm
        del llm
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[str]:
    """The address of one HTTP server of tiny_moe for all modules."""
    from tests.vllm.http_server import serving

    with serving(tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[Any]]:
    """``generate(llm, [(prompt ids, sampling), ...])``: the outputs, of one batch."""

    def run(llm: Any, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        sampling = [SamplingParams(**arguments) for _, arguments in requests]
        return llm.generate(prompts, sampling, use_tqdm=False)

    return run
