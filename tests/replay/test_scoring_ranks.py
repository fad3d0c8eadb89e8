"""score_microbatch from hidden states over tensor- and context-parallel ranks: processes, gloo.

Oracle: one rank with the whole weight, itself held against loops in ``test_scoring_hidden.py``. The
tests run this file as a program, once a rank; each process scores with its shard of the LM head and
its tokens, and leaves what it got for the tests to compare.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from packhorse.kernels.rows import gather_rows
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from packhorse.replay.scoring import LmHead, score_microbatch
from tests.conftest import INTERPRET
from tests.ranks import results_of_ranks

pytestmark = pytest.mark.skipif(INTERPRET, reason="the kernels' own rank tests run interpreted")

TP, CP = 2, 2
LENGTHS, RESPONSES = (9, 5, 14, 2), (4, 0, 9, 1)
HIDDEN_SIZE, VOCAB, NUM_IDS, WIDTH = 16, 32, 30, 5
FIELDS = ("logprobs", "entropy", "status", "counts", "num_ignored", "dense_logprobs", "valid")
CASES: dict[str, dict] = {
    "thd": {"format": "thd"},
    "bshd, sequence-parallel, main_grad": {
        "format": "bshd", "sequence_parallel": True, "main_grad": True,
    },
    "thd, sequence-parallel, ragged": {
        "format": "thd", "sequence_parallel": True, "support": "ragged",
    },
    "thd contiguous, over the vocabulary, soft cap": {
        "format": "thd", "cp_order": "contiguous", "support": None, "softcap": 2.0,
    },
    "bshd, over the vocabulary, main_grad": {
        "format": "bshd", "support": None, "sequence_parallel": True, "main_grad": True,
    },
    "thd, appended and cut": {
        "format": "thd", "sequence_parallel": True, "full": True, "main_grad": True,
    },
    "bshd, appended and cut, one shard without a member": {
        "format": "bshd", "full": True, "most": VOCAB // 2,
    },
}  # fmt: skip


def inputs_of(case: dict):
    """Hidden states of the real tokens [., H], weight, bias, token ids, support [N, C]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    most = case.get("most", NUM_IDS)
    tokens = torch.randint(most, (sum(LENGTHS),), generator=generator)
    support = torch.randint(-1, most, (sum(RESPONSES), WIDTH), generator=generator).int()
    ends = np.cumsum(LENGTHS)
    sampled = [tokens[e - r : e] for e, r in zip(ends, RESPONSES, strict=True)]
    support[:, 2] = torch.cat(sampled).int()
    support[5] = -1
    return hidden, weight, bias, tokens, support


def score(case: dict, rank: int | None, groups: dict) -> dict:
    """Scores and gradients on ``rank``, or with everything on one."""
    hidden, weight, bias, tokens, support = inputs_of(case)
    hidden.requires_grad_()
    layout_options = {key: case[key] for key in ("format", "cp_order") if key in case}
    rows, head_options, sequence_parallel = slice(0, VOCAB), {}, False
    if rank is not None:
        tp_rank, cp_rank = rank % TP, rank // TP
        sequence_parallel = case.get("sequence_parallel", False)
        layout_options |= {
            "tp_size": TP, "tp_rank": tp_rank, "cp_size": CP, "cp_rank": cp_rank,
            "cp_group": groups.get("cp"), "sequence_parallel": sequence_parallel,
        }  # fmt: skip
        rows = slice(VOCAB // TP * tp_rank, VOCAB // TP * (tp_rank + 1))
        head_options = {"group": groups["tp"], "sequence_parallel": sequence_parallel}
    layout = TokenLayout.build(LENGTHS, **layout_options)
    of_slots = gather_rows(hidden, layout.token_row_ids())
    if sequence_parallel:
        of_slots = of_slots.chunk(TP)[rank % TP]
    weight, bias = (x[rows].clone().requires_grad_() for x in (weight, bias))
    main_grad = torch.ones_like(weight) if "main_grad" in case else None
    head = LmHead(weight, bias, softcap=case.get("softcap"), main_grad=main_grad, **head_options)
    packed = PackedTensor.from_lengths(support, RESPONSES)
    kind = case.get("support", "one width")
    full = {}
    if "full" in case:
        appended, cut = ([np.zeros(n, bool) for n in LENGTHS] for _ in range(2))
        appended[0][8] = appended[2][13] = True
        cut[2][5:8] = True
        full = {"appended": appended, "cut": cut}
    scores = score_microbatch(
        of_slots,
        layout,
        PackedTensor.from_lengths(tokens, LENGTHS),
        PackedRagged.from_padded(packed) if kind == "ragged" else packed if kind else None,
        response_lengths=RESPONSES,
        temperature=0.8,
        vocab_size=NUM_IDS,
        lm_head=head,
        **full,
    )
    weights = torch.arange(1, 1 + sum(RESPONSES))
    loss = (scores.logprobs.values * weights).sum() + (scores.entropy.values * weights).sum() / 3
    loss.backward()
    results = {field: getattr(scores, field) for field in FIELDS}
    results = {
        key: (x.values if isinstance(x, PackedTensor) else x).detach() for key, x in results.items()
    }
    return results | {
        "hidden": hidden.grad,
        "weight": weight.grad if main_grad is None else main_grad - 1,
        "bias": bias.grad,
    }


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", world_size=TP * CP, rank=rank
    )
    groups = {}
    for cp_rank in range(CP):
        members = [cp_rank * TP + t for t in range(TP)]
        group = dist.new_group(members)
        groups |= {"tp": group} if rank in members else {}
    for tp_rank in range(TP):
        members = [c * TP + tp_rank for c in range(CP)]
        group = dist.new_group(members)
        groups |= {"cp": group} if rank in members else {}
    results: dict = {name: score(case, rank, groups) for name, case in CASES.items()}
    two = [np.zeros(n, bool) for n in LENGTHS]
    two[2][[6, 13]] = True  # predicted on two context-parallel ranks
    layout = TokenLayout.build(
        LENGTHS, cp_size=CP, cp_rank=rank // TP, tp_size=TP, cp_group=groups["cp"]
    )
    hidden, weight, _, tokens, support = inputs_of({})
    try:
        score_microbatch(
            gather_rows(hidden, layout.token_row_ids()),
            layout,
            PackedTensor.from_lengths(tokens, LENGTHS),
            PackedTensor.from_lengths(support, RESPONSES),
            appended=two,
            lm_head=LmHead(weight, group=groups["tp"]),
        )
    except ValueError as error:
        results["two appended"] = str(error)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """What each rank got, by case."""
    return results_of_ranks(__file__, TP * CP, tmp_path_factory.mktemp("scoring"))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_scores_of_one(name, results):
    whole = score(CASES[name], None, {})
    assert whole["logprobs"].any()
    assert whole["entropy"].any()
    for of_rank in results:
        for field in FIELDS:
            torch.testing.assert_close(of_rank[name][field], whole[field], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_ranks_add_up_to_those_of_one(name, results):
    """Each context-parallel rank has those of its tokens, each tensor-parallel rank those of its
    rows of the weight; hidden states are whole on both, or a slice each if sequence-parallel."""
    whole = score(CASES[name], None, {})
    by_rank = [of_rank[name] for of_rank in results]
    if CASES[name].get("sequence_parallel"):
        hidden = sum(x["hidden"] for x in by_rank)
    else:
        for cp_rank in range(CP):
            pair = [by_rank[cp_rank * TP + t]["hidden"] for t in range(TP)]
            torch.testing.assert_close(*pair, rtol=0, atol=1e-12)
        hidden = sum(by_rank[cp_rank * TP]["hidden"] for cp_rank in range(CP))
    torch.testing.assert_close(hidden, whole["hidden"], rtol=1e-10, atol=1e-10)
    for key in ("weight", "bias"):
        shards = [sum(by_rank[c * TP + t][key] for c in range(CP)) for t in range(TP)]
        torch.testing.assert_close(torch.cat(shards), whole[key], rtol=1e-10, atol=1e-10)
    if "most" in CASES[name]:  # the upper shard holds no member: its gradients are there
        lower = [by_rank[c * TP + 1] for c in range(CP)]
        assert all(x["weight"] is not None for x in lower)


def test_two_appended_tokens_with_loss_are_the_same_error_on_every_rank(results):
    """Although each is predicted on another context-parallel rank."""
    said = {of_rank["two appended"] for of_rank in results}
    assert said == {
        "score_microbatch: appended of trajectory 2: tokens 6 and 13 both have loss; at most one a"
        " trajectory"
    }


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
