"""tally_support, variants of tally_logprobs, and their figures, against NumPy."""

import numpy as np
import pytest
import torch

from packhorse.packed.ragged import PackedRagged
from packhorse.replay.metrics import merge_tallies, tally_logprobs, tally_metrics, tally_support
from packhorse.replay.scoring import score_microbatch
from tests.replay.test_scoring import RESPONSES, Case


def scored(device, seed=0):
    case = Case("thd", device, seed=seed)
    case.support[0][2] = -1
    case.support[1][1] = [(case.tokens[1][6] + 1) % 40, 41, -1, -1, -1]
    given = case.logits, case.layout, case.token_ids
    scores = score_microbatch(*given, case.packed_support, appended=case.masks((0, 5)))
    full = score_microbatch(*given, response_lengths=RESPONSES).logprobs.values
    return case, scores, full


@pytest.mark.parametrize("kind", ["one width", "ragged", "on the host"])
def test_figures_of_supports_are_those_of_numpy(kind, device):
    tallies, sizes, masses = [], [], []
    for seed in range(2):
        case, scores, full = scored(device, seed)
        support = case.packed_support if kind == "one width" else case.packed_support.to("cpu")
        if kind == "ragged":
            support = PackedRagged.from_padded(support)
        tallies.append(tally_support(scores, support, full_logprobs=full, repaired=2 + seed))
        sizes.append((np.concatenate(case.support) >= 0).sum(1))
        over_support = scores.status.values.cpu().numpy() == 0
        difference = (full - scores.logprobs.values).detach().cpu().numpy()
        masses.append(np.exp(difference)[over_support])
    figures = tally_metrics(merge_tallies(tallies))
    sizes, masses = np.concatenate(sizes), np.concatenate(masses)
    num_tokens = 2 * sum(RESPONSES)
    assert figures["support/full"].item() == pytest.approx(2 / num_tokens)
    assert figures["support/outside"].item() == pytest.approx(2 / num_tokens)
    assert figures["support/missing"].item() == 0
    assert figures["support/ignored"].item() == 2
    assert figures["support/repaired"] == 5
    present = sizes[sizes > 0]
    assert figures["support/size_mean"].item() == pytest.approx(present.mean())
    assert figures["support/size_max"].item() == present.max()
    assert figures["support/size_p99"].item() == present.max()
    assert 0 < masses.min() < masses.max() <= 1
    assert figures["support/kept_mass_mean"].item() == pytest.approx(masses.mean())
    assert figures["support/lost_mass_max"].item() == pytest.approx(1 - masses.min())


def test_the_p99_of_sizes_is_the_power_of_2_that_holds_it(device):
    case, scores, _ = scored(device)
    tally = tally_support(scores, case.packed_support)
    sizes = torch.tensor([1] * 50 + [2] * 148 + [7] + [300])
    bins = torch.zeros_like(tally["support/size_bins"])
    for size in sizes.tolist():
        bins[int(np.ceil(np.log2(size)))] += 1
    tally |= {
        "support/size_bins": bins,
        "support/rows": torch.tensor(200, device=device),
        "support/size_max": sizes.amax().to(device),
    }
    assert tally_metrics(tally)["support/size_p99"].item() == 2
    tally["support/rows"] = torch.tensor(201, device=device)
    assert tally_metrics(tally)["support/size_p99"].item() == 8


def test_variants_of_logprobs_stand_beside_each_other(device):
    _, scores, full = scored(device)
    rollout, ours = scores.logprobs.values - 0.1, scores.logprobs.values
    mask = scores.status.values == 0
    tally = {
        **tally_logprobs(ours, rollout, mask, variant="both"),
        **tally_logprobs(full, rollout, mask, variant="routes"),
    }
    figures = tally_metrics(merge_tallies([tally, tally]))
    assert figures["logprobs_both/ratio_mean"].item() == pytest.approx(np.exp(0.1))
    d = (full - rollout).detach()[mask].cpu().numpy()
    assert figures["logprobs_routes/ratio_mean"].item() == pytest.approx(np.exp(d).mean())
    assert figures["logprobs_routes/ratio_below_1_2"].item() == pytest.approx(
        (d < -np.log(2)).mean()
    )
    assert not any(key.startswith("logprobs/") for key in figures)


def test_nothing_waits_for_the_device(cuda, no_host_sync):
    case, scores, full = scored(cuda)
    support = case.packed_support
    tally_metrics(tally_support(scores, support, full_logprobs=full))
    with no_host_sync():
        tally_metrics(tally_support(scores, support, full_logprobs=full))


def test_rejects(device):
    case, scores, full = scored(device)
    support = case.packed_support
    for change, error, message in (
        ({"scores": full}, TypeError, "scores must be of score_microbatch, got Tensor"),
        ({"support": support.values}, TypeError, "support must be packed, got Tensor"),
        ({"support": support[:1]}, ValueError, "support has 3 rows, scores 11"),
        ({"repaired": -1}, ValueError, "repaired must be a count of rows, got -1"),
        ({"full_logprobs": full[1:]}, ValueError, "full_logprobs must have the shape of scores"),
    ):
        with pytest.raises(error, match=f"^tally_support: {message}"):
            tally_support(**{"scores": scores, "support": support, **change})
    with pytest.raises(ValueError, match=r"^tally_logprobs: variant must be an identifier or None"):
        tally_logprobs(full, full, full, variant="a/b")
