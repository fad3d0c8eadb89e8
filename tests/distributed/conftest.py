"""Ranks that all modules share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool, megatron_version


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "oldest: runs on the oldest Megatron-core too in `make test`"
    )


def _find_megatron() -> None:
    """``PACKHORSE_TEST_MEGATRON`` may state the version that is meant to run."""
    version, stated = megatron_version(), os.environ.get("PACKHORSE_TEST_MEGATRON")
    if stated and list(version) != [int(part) for part in stated.split(".")[:2]]:
        pytest.fail(f"the ranks would import megatron-core {version}, not {stated}")
    if not version:
        pytest.skip("megatron-core is not installed")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    _find_megatron()
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.fixture(scope="session")
def gpu_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks that share one GPU over gloo."""
    _find_megatron()
    ranks = RankPool(tmp_path_factory.mktemp("gpu-ranks"), place="one gpu")
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.fixture(scope="session")
def nccl_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks with a GPU each, over NCCL."""
    _find_megatron()
    ranks = RankPool(tmp_path_factory.mktemp("nccl-ranks"), place="gpus")
    try:
        yield ranks
    finally:
        ranks.end()
