"""support_logprobs, and of ragged rows, of logits that are sharded over the vocabulary: two
processes, gloo.

Oracle: one rank with all columns. The tests run this file as a program, once a rank; each process
scores its own columns and leaves what it got for the tests to compare.
"""

import sys
from pathlib import Path

import pytest
import torch

from packhorse.kernels.support import support_logprobs
from packhorse.kernels.support_ragged import ragged_support_logprobs
from tests.conftest import INTERPRET
from tests.ranks import results_of_ranks

pytestmark = pytest.mark.skipif(
    INTERPRET, reason="test_lm_head_ranks and test_support_ragged run the same kernels"
)

NUM_RANKS, NUM_TOKENS, VOCAB, NUM_IDS, WIDTH = 2, 30, 24, 21, 5
CASES: dict[str, dict] = {
    "plain": {},
    "overwritten": {"overwrite_logits": True},
    "uneven shards": {"cut": 7},
    "one shard has no member": {"cut": 7, "fewest": 7},
    "by row ids": {"cut": 7, "rows": "named"},
    "ragged": {"rows": "ragged"},
    "ragged, overwritten": {"rows": "ragged", "overwrite_logits": True},
    "ragged, uneven shards": {"rows": "ragged", "cut": 7},
    "ragged, one shard has no member": {"rows": "ragged", "cut": 7, "fewest": 7},
}


def score(columns: slice, case: dict, **options) -> dict[str, torch.Tensor]:
    """Scores, and the gradient of these ``columns`` of the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_TOKENS, VOCAB, generator=generator)
    ids = torch.randint(case.get("fewest", 0), VOCAB, (NUM_TOKENS, WIDTH), generator=generator)
    ids[0], sampled = -1, ids[:, 0].clone()
    leaf = logits[:, columns].clone().requires_grad_()
    scorer, support = support_logprobs, [ids]
    row_ids = torch.arange(NUM_TOKENS).flip(0)
    if case.get("rows") == "named":
        support, options["row_ids"] = [ids.flip(0)], row_ids
    elif case.get("rows") == "ragged":
        options["widths"] = [t % (WIDTH + 1) for t in range(NUM_TOKENS)]
        rows = [ids[-1 - t, :width].int() for t, width in enumerate(options["widths"])]
        ends = torch.tensor([0, *options["widths"]]).cumsum(0)
        scorer, support = ragged_support_logprobs, [torch.cat(rows), ends, row_ids]
    scores = scorer(
        leaf * 1,
        *support,
        sampled,
        temperature=0.7,
        vocab_size=NUM_IDS,
        overwrite_logits="overwrite_logits" in case,
        **options,
    )
    (scores.logprobs + 0.3 * scores.entropy).sum().backward()
    results = {key: value.detach() for key, value in scores._asdict().items()}
    return results | {"logits": leaf.grad}


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
        options = {"vocab_start": rank * case["cut"]} if "cut" in case else {}
        shard = shard_of(rank, case)
        results[name] = score(shard, case, group=torch.distributed.group.WORLD, **options)
    for name in ("plain", "ragged"):
        try:
            score(slice(0, 10), CASES[name], group=torch.distributed.group.WORLD)
        except ValueError as error:
            results[f"refusal, {name}"] = str(error)
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """Scores and gradients of each rank, by case."""
    return results_of_ranks(__file__, NUM_RANKS, tmp_path_factory.mktemp("support"))


@pytest.mark.parametrize("name", CASES)
def test_shards_score_as_all_columns_bit_for_bit(name, results):
    case = CASES[name]
    whole = score(slice(0, VOCAB), case)
    assert (whole["status"] == 0).sum() > NUM_TOKENS // 2
    for rank, of_rank in enumerate(results):
        for key in ("logprobs", "entropy", "status", "num_ignored"):
            assert torch.equal(of_rank[name][key], whole[key]), key
        assert torch.equal(of_rank[name]["logits"], whole["logits"][:, shard_of(rank, case)])
    if "fewest" in case:
        assert not results[0][name]["logits"].any()


def test_a_vocabulary_that_the_shards_do_not_hold_is_refused(results):
    for of_rank in results:
        assert of_rank["refusal, ragged"] == f"ragged_{of_rank['refusal, plain']}"
        assert of_rank["refusal, plain"] == (
            f"support_logprobs: vocab_size={NUM_IDS}, but 2 shards of 10 columns hold 20 ids; give"
            " vocab_start where shards are uneven"
        )


def test_a_first_column_without_a_group_is_refused():
    with pytest.raises(ValueError, match=r"^support_logprobs: vocab_start=5, but no group holds"):
        support_logprobs(
            torch.zeros(2, 9), torch.zeros(2, 3).int(), torch.zeros(2).long(), vocab_start=5
        )


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
