"""Ranks that all modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool, megatron_version


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    if not megatron_version():
        pytest.skip("megatron-core is not installed")
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.fixture(scope="session")
def gpu_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks that share one GPU over gloo."""
    if not megatron_version():
        pytest.skip("megatron-core is not installed")
    ranks = RankPool(tmp_path_factory.mktemp("gpu-ranks"), gpu=True)
    try:
        yield ranks
    finally:
        ranks.end()
