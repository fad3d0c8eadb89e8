"""Replay on one GPU: one rank, and two or four that share it over gloo, which takes its tensors.

Everything is compared as in ``test_distributed.py``, with one rank's training on the same GPU. NCCL
does not give one GPU to two ranks, and gloo cannot send from one (PP): those stay on the CPU. Of
the shims only those for a missing Transformer Engine are installed.
"""

from __future__ import annotations

import pytest

from tests.distributed.cases import GPU_CASES
from tests.distributed.checks import check


@pytest.mark.parametrize("name", GPU_CASES)
def test_ranks_on_one_gpu_route_as_captured_and_train_like_one_rank(name, cuda, gpu_pool):
    case = GPU_CASES[name]
    check(case, gpu_pool.run(name, case.world, case.timeout_s))
