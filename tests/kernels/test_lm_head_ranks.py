"""lm_head_support_logprobs over a vocabulary-parallel group: two processes, gloo.

Oracle: one rank with the whole weight. The tests run this file twice as a program; each process
scores with its shard alone and leaves what it got for the tests to compare.
"""

import sys
from pathlib import Path

import pytest
import torch

from packhorse.kernels.lm_head import lm_head_support_logprobs
from tests.conftest import INTERPRET  # the processes then run the Triton kernels too
from tests.ranks import results_of_ranks

NUM_RANKS = 2
NUM_TOKENS, HIDDEN_SIZE, VOCAB, WIDTH = 12 if INTERPRET else 40, 64, 30, 6
NUM_IDS = VOCAB - 3  # the last rows are pads
#: by name: options of a call; "whole" ones name what each rank takes its rows of
CASES: dict[str, dict] = {
    "plain": {},
    "temperature and bias": {"temperature": 0.7, "bias": True},
    "softcap": {"softcap": 2.0},
    "uneven shards": {"cut": 7},
    "one shard has no member": {"cut": 7, "fewest": 7},
    "main_grad": {"main_grad": True},
    "own share of hidden": {"reduce_hidden_grad": False},
}


def inputs_of(fewest: int = 0) -> list[torch.Tensor]:
    """hidden [T, H], weight [V, H], bias [V], supports [T, C] from id ``fewest`` on, sampled."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    bias = torch.randn(VOCAB, generator=generator)
    ids = torch.randint(fewest, VOCAB, (NUM_TOKENS, WIDTH), generator=generator)
    ids[0], ids[1, 3:] = -1, -1  # no support; fewer ids
    return [hidden, weight, bias, ids, ids[:, 0].clone()]


def score(rows: slice, case: dict, **options) -> dict[str, torch.Tensor]:
    """Scores and gradients with these ``rows`` of the weight."""
    hidden, weight, bias, ids, sampled = inputs_of(case.get("fewest", 0))
    hidden.requires_grad_()
    weight, bias = weight[rows].clone().requires_grad_(), bias[rows].clone().requires_grad_()
    options |= {key: case[key] for key in ("temperature", "softcap") if key in case}
    if "bias" in case:
        options["bias"] = bias
    if "main_grad" in case:
        options["main_grad"] = torch.ones_like(weight)
    scores = lm_head_support_logprobs(hidden, weight, ids, sampled, vocab_size=NUM_IDS, **options)
    (scores.logprobs + 0.3 * scores.entropy).sum().backward()
    results = {key: value.detach() for key, value in scores._asdict().items()}
    results |= {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    if "main_grad" in case:
        assert weight.grad is None
        results["weight"] = options["main_grad"]
    return results


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", world_size=NUM_RANKS, rank=rank
    )
    group = torch.distributed.group.WORLD
    results = {}
    for name, case in CASES.items():
        options = {"reduce_hidden_grad": case.get("reduce_hidden_grad", True)}
        if "cut" in case:
            options["vocab_start"] = rank * case["cut"]
        results[name] = score(shard_of(rank, case), case, group=group, **options)
    alone = [torch.distributed.new_group([member]) for member in range(NUM_RANKS)]
    results["a group of one"] = score(slice(0, VOCAB), {}, group=alone[rank])
    refusals = {}
    for what, refused, rows in (
        ("foreign", alone[1 - rank], NUM_IDS - 1),
        ("too few rows", alone[rank], NUM_IDS - 1),
        ("too few rows together", group, 10),
    ):
        try:
            score(slice(0, rows), {}, group=refused)
        except ValueError as error:
            refusals[what] = str(error)
    results["refusals"] = refusals
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def shard_of(rank: int, case: dict) -> slice:
    cut = case.get("cut", VOCAB // 2)
    return slice(cut, VOCAB) if rank else slice(0, cut)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """Scores and gradients of each rank, by case."""
    return results_of_ranks(__file__, NUM_RANKS, tmp_path_factory.mktemp("lm_head"))


@pytest.mark.parametrize("name", CASES)
def test_scores_of_every_rank_are_those_of_one_bit_for_bit(name, results):
    whole = score(slice(0, VOCAB), CASES[name])
    assert (whole["status"] == 0).sum() > NUM_TOKENS // 2
    for of_rank in results:
        for key in ("logprobs", "entropy", "status", "num_ignored"):
            assert torch.equal(of_rank[name][key], whole[key]), key


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_the_gradients_of_its_rows_and_of_the_hidden_states(name, results):
    case = CASES[name]
    whole = score(slice(0, VOCAB), case)
    hidden = [of_rank[name]["hidden"] for of_rank in results]
    if case.get("reduce_hidden_grad", True):
        assert torch.equal(*hidden)
    else:  # each its share
        assert not torch.equal(*hidden)
        hidden = [hidden[0] + hidden[1]]
    for grad in hidden:
        torch.testing.assert_close(grad, whole["hidden"], rtol=1e-5, atol=1e-6)
    for rank, of_rank in enumerate(results):
        for key in ("weight", *(["bias"] if "bias" in case else [])):
            expected = whole[key][shard_of(rank, case)]
            torch.testing.assert_close(of_rank[name][key], expected, rtol=1e-5, atol=1e-6)
    if "fewest" in case:
        assert not results[0][name]["weight"].any()


def test_a_group_of_one_rank_is_no_group(results):
    whole = score(slice(0, VOCAB), {})
    for of_rank in results:
        for key, value in whole.items():
            if value is not None:
                assert torch.equal(of_rank["a group of one"][key], value), key


def test_a_group_without_this_rank_or_without_all_rows_is_refused(results):
    for of_rank in results:
        assert of_rank["refusals"] == {
            "foreign": "lm_head_support_logprobs: this rank is not in group",
            "too few rows": f"lm_head_support_logprobs: vocab_size={NUM_IDS} and vocab_start=0, but"
            f" weight has ids 0 to {NUM_IDS - 2} and no group holds others",
            "too few rows together": f"lm_head_support_logprobs: vocab_size={NUM_IDS}, but 2 shards"
            " of 10 rows hold 20 ids; give vocab_start where shards are uneven",
        }


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
