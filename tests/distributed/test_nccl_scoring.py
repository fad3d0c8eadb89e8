"""Scoring with the vocabulary sharded over GPUs, and ``restore`` over CP, over NCCL.

The tests run this file as a program on one, two and four GPUs; each process scores with its shard
alone and leaves what it got. Oracles: full logits in float64 on one GPU for the scores and their
gradients, one rank with the whole weight for rounding, ``tests/oracle.py`` for ``restore``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.replay.layout import TokenLayout
from tests.oracle import OracleLayout
from tests.ranks import results_of_ranks

NUM_TOKENS, HIDDEN_SIZE, VOCAB, WIDTH = 600, 256, 4096, 20
NUM_IDS = VOCAB - 5  # the last rows are pads
TEMPERATURE = 0.8
DTYPES = ("float32", "bfloat16")
#: the whole world's, so that each shard's rows follow from its rank
RESTORED = {
    f"{format}-{order}": {
        "lengths": [37, 1, 64, 23],
        "format": format,
        "cp_order": order,
        "batch_width": 70,
        "first_columns": [3, 0, 6, 47],
    }
    for format in ("thd", "bshd")
    for order in ("zigzag", "contiguous")
}


def inputs_of(dtype: str, device: str) -> list[Tensor]:
    """hidden [T, H], weight [V, H], bias [V], supports [T, C], sampled ids [T]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    bias = torch.randn(VOCAB, generator=generator)
    ids = torch.randint(0, NUM_IDS, (NUM_TOKENS, WIDTH), generator=generator, dtype=torch.int32)
    ids[0], ids[1, 1:], ids[2, 5:] = -1, -1, -1  # none, a singleton, fewer
    ids[3] = torch.arange(WIDTH)  # all on the first shard
    sampled = ids[:, 0].long()
    made = [part.to(getattr(torch, dtype)) for part in (hidden, weight, bias)]
    return [part.to(device) for part in (*made, ids, sampled)]


def score(dtype: str, rows: slice, device: str, **options: Any) -> dict[str, Tensor]:
    hidden, weight, bias, ids, sampled = inputs_of(dtype, device)
    hidden.requires_grad_()
    weight, bias = weight[rows].clone().requires_grad_(), bias[rows].clone().requires_grad_()
    main_grad = torch.zeros(weight.shape, device=device)
    scores = lm_head_support_logprobs(
        hidden, weight, ids, sampled, bias=bias, temperature=TEMPERATURE, vocab_size=NUM_IDS,
        main_grad=main_grad, **options,
    )  # fmt: skip
    (scores.logprobs + 0.3 * scores.entropy).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None
    results = {key: value.detach() for key, value in scores._asdict().items()}
    results |= {"hidden": hidden.grad, "weight": main_grad, "bias": bias.grad}
    return {key: value.cpu() for key, value in results.items()}


def exact(dtype: str) -> dict[str, Tensor]:
    """Full logits in float64; no code of the package."""
    hidden, weight, bias, ids, sampled = inputs_of(dtype, "cpu")
    hidden, weight, bias = (part.double().requires_grad_() for part in (hidden, weight, bias))
    logits = (hidden @ weight.T + bias) / TEMPERATURE
    kept = torch.zeros(NUM_TOKENS, VOCAB, dtype=torch.bool)
    for t, row in enumerate(ids.tolist()):
        kept[t, [i for i in row if i >= 0]] = True
    has_support = kept.any(1)
    masked = logits[has_support].masked_fill(~kept[has_support], -torch.inf)
    logs = masked.log_softmax(1)
    entropy = -(logs.exp() * logs.masked_fill(~kept[has_support], 0)).sum(1)
    logprobs = logs.gather(1, sampled[has_support, None]).squeeze(1)
    (logprobs + 0.3 * entropy).sum().backward()
    whole = [torch.zeros(NUM_TOKENS, dtype=torch.float64) for _ in range(2)]
    whole[0][has_support], whole[1][has_support] = logprobs.detach(), entropy.detach()
    gradients = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return {"logprobs": whole[0], "entropy": whole[1], **gradients}  # type: ignore[dict-item]


def run_rank(rank: int, world: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", world_size=world, rank=rank
    )
    group = torch.distributed.group.WORLD
    shard = slice(rank * VOCAB // world, (rank + 1) * VOCAB // world)
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        runs = [score(dtype, shard, device, group=group) for _ in range(2)]
        results[dtype] = runs[0]
        results[f"{dtype} again"] = runs[1]
        if rank == 0:
            results[f"{dtype} alone"] = score(dtype, slice(0, VOCAB), device)
    for name, arguments in RESTORED.items():
        layout = TokenLayout.build(
            **arguments, cp_size=world, cp_rank=rank, cp_group=group, device=device
        )
        values = values_of_rank(name, world, rank).to(device).requires_grad_()
        restored = layout.restore(values, -1)
        (gradient,) = torch.autograd.grad((weights_of(restored) * restored**2).sum(), values)
        results[name] = restored.detach().cpu(), gradient.cpu()
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def values_of_rank(name: str, world: int, rank: int) -> Tensor:
    slots = OracleLayout(**RESTORED[name], cp_size=world).slots(rank)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 100, (len(slots),), generator=generator).double()


def weights_of(restored: Tensor) -> Tensor:
    return torch.arange(1, 1 + restored.numel(), device=restored.device).view(restored.shape)


@pytest.fixture(scope="module", params=(1, 2, 4))
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    world = request.param
    found = torch.cuda.device_count()
    if found < world:
        pytest.skip(f"needs {world} GPUs, there are {found}")
    folder = tmp_path_factory.mktemp(f"shards{world}")
    return results_of_ranks(__file__, world, folder, gpus=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_err_no_more_than_one_rank_does(dtype, ranks):
    expected, alone = exact(dtype), ranks[0][f"{dtype} alone"]
    shards = [results[dtype] for results in ranks]
    for name in ("logprobs", "entropy", "hidden"):
        for shard in shards:
            assert torch.equal(shard[name], shards[0][name]), name  # every rank the same
    joined = {name: shards[0][name] for name in ("logprobs", "entropy", "hidden")}
    joined |= {name: torch.cat([shard[name] for shard in shards]) for name in ("weight", "bias")}
    for name, value in joined.items():
        scale = expected[name].abs().max()
        bound = 2 * (alone[name] - expected[name]).abs().max() + 1e-6 * scale
        if dtype == "bfloat16" and name == "hidden":  # each shard's share is rounded, then the sum
            bound += 2 * torch.finfo(torch.bfloat16).eps * scale
        error = (value - expected[name]).abs().max()
        assert error <= bound, (name, float(error), float(bound))
    assert (joined["logprobs"][:2] == 0).all()  # no support; a singleton, exactly
    for name in ("status", "num_ignored"):
        for shard in shards:
            assert torch.equal(shard[name], alone[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_backwards_are_bitwise_equal(dtype, ranks):
    for results in ranks:
        for name, value in results[dtype].items():
            assert torch.equal(value, results[f"{dtype} again"][name]), name


@pytest.mark.parametrize("name", RESTORED)
def test_every_rank_restores_the_whole_batch_and_takes_its_own_gradient(name, ranks):
    world = len(ranks)
    by_rank = [values_of_rank(name, world, rank) for rank in range(world)]
    oracle = OracleLayout(**RESTORED[name], cp_size=world)
    expected = torch.from_numpy(oracle.restore([values.numpy() for values in by_rank], -1))
    counts = [len(values) for values in by_rank]
    numbers = np.arange(1, 1 + sum(counts))
    placed = torch.from_numpy(oracle.restore(np.split(numbers, np.cumsum(counts)[:-1]), 0))
    gradient = torch.zeros(1 + sum(counts), dtype=torch.float64)
    gradient[placed.long()] = 2 * weights_of(expected) * expected
    for results, wanted in zip(ranks, gradient[1:].split(counts), strict=True):
        assert torch.equal(results[name][0], expected)
        assert torch.equal(results[name][1], wanted)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[2]))
