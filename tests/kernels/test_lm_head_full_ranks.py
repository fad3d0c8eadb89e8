"""full_vocabulary_logprobs over a vocabulary-parallel group: two processes, gloo.

Oracle: one rank with the whole weight. The tests run this file twice as a program; each process
scores with its shard alone and leaves what it got for the tests to compare.
"""

import sys
from pathlib import Path

import pytest
import torch

from packhorse.kernels.lm_head_full import full_vocabulary_logprobs
from tests.conftest import INTERPRET
from tests.ranks import results_of_ranks

pytestmark = pytest.mark.skipif(INTERPRET, reason="plain torch: the interpreter changes nothing")

NUM_RANKS, NUM_TOKENS, HIDDEN_SIZE, VOCAB = 2, 40, 32, 30
NUM_IDS = VOCAB - 3  # the last rows are pads
CASES: dict[str, dict] = {
    "plain": {},
    "soft cap, temperature": {"softcap": 2.0, "temperature": 0.7},
    "one shard has pads alone": {"cut": NUM_IDS},
    "main_grad": {"main_grad": True},
    "own share of hidden": {"reduce_hidden_grad": False},
}


def score(rows: slice, case: dict, **options) -> dict[str, torch.Tensor]:
    """Scores and gradients with these ``rows`` of the weight."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    bias = torch.randn(VOCAB, generator=generator)[rows].clone().requires_grad_()
    sampled = torch.randint(-3, NUM_IDS, (NUM_TOKENS,), generator=generator)
    weight = weight[rows].clone().requires_grad_()
    options |= {key: case[key] for key in ("temperature", "softcap") if key in case}
    main_grad = torch.ones_like(weight) if "main_grad" in case else None
    scores = full_vocabulary_logprobs(
        hidden, weight, sampled, bias=bias, vocab_size=NUM_IDS, main_grad=main_grad, **options
    )
    (scores.logprobs + 0.3 * scores.entropy).sum().backward()
    results = {key: value.detach() for key, value in scores._asdict().items()}
    results |= {"hidden": hidden.grad, "bias": bias.grad}
    return {**results, "weight": weight.grad if main_grad is None else main_grad}


def shard_of(rank: int, case: dict) -> slice:
    cut = case.get("cut", VOCAB // 2)
    return slice(cut, VOCAB) if rank else slice(0, cut)


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", world_size=NUM_RANKS, rank=rank
    )
    results = {}
    for name, case in CASES.items():
        shard = shard_of(rank, case)
        results[name] = score(
            shard,
            case,
            group=torch.distributed.group.WORLD,
            vocab_start=shard.start,
            reduce_hidden_grad=case.get("reduce_hidden_grad", True),
        )
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """Scores and gradients of each rank, by case."""
    return results_of_ranks(__file__, NUM_RANKS, tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients_of_shards_are_those_of_one_rank(name, results):
    case = CASES[name]
    whole = score(slice(0, VOCAB), case)
    assert whole["logprobs"].any()
    for key in ("logprobs", "entropy"):
        assert torch.equal(results[0][name][key], results[1][name][key])
        torch.testing.assert_close(results[0][name][key], whole[key], rtol=1e-5, atol=1e-5)
    hidden = [of_rank[name]["hidden"] for of_rank in results]
    if "reduce_hidden_grad" in case:
        assert not torch.equal(*hidden)
        hidden = [hidden[0] + hidden[1]]
    for grad in hidden:
        torch.testing.assert_close(grad, whole["hidden"], rtol=1e-4, atol=1e-6)
    for rank, of_rank in enumerate(results):
        for key in ("weight", "bias"):
            expected = whole[key][shard_of(rank, case)]
            torch.testing.assert_close(of_rank[name][key], expected, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
