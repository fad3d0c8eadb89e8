"""Real Megatron-core in one process, on the CPU or on a GPU.

The version that is installed, or another one by ``PYTHONPATH``; ``PACKHORSE_TEST_MEGATRON`` may
state the one that is meant to run. Megatron is imported under the CPU shims, so test modules import
it inside functions only.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch


def pytest_report_header() -> str:
    spec = importlib.util.find_spec("megatron.core") if _has_megatron() else None
    return f"megatron-core: {spec.origin if spec else 'not installed'}"


def _has_megatron() -> bool:
    return importlib.util.find_spec("megatron") is not None


@pytest.fixture(autouse=True, scope="module")
def _megatron() -> Iterator[None]:
    if not _has_megatron():
        if "PACKHORSE_TEST_MEGATRON" in os.environ:
            pytest.fail("PACKHORSE_TEST_MEGATRON is set, but megatron-core is not installed")
        pytest.skip("megatron-core is not installed")
    from packhorse.replay.cpu_megatron import install_cpu_shims, remove_cpu_shims
    from packhorse.replay.megatron import single_process

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    install_cpu_shims()
    try:
        with single_process(seed=1234):
            yield
    finally:
        remove_cpu_shims()
        torch.set_num_threads(threads)
