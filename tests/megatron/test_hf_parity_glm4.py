"""load_hf_model against Hugging Face transformers for the glm4_moe family, in fp32.

Oracle: tests/data/hf_fp32_glm4_moe.npz, made by make_hf_glm4_moe.py beside it: of the packaged
checkpoint and of one that differs from it in every setting, with the routers' own experts and with
random ones. Tolerance: 1e-4 in a logprob, two fp32 implementations of four layers (2e-5 and less
were seen); the routers' own experts exactly.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packhorse.replay
from packhorse.packed.tensor import PackedTensor
from packhorse.replay import tiny_moe
from packhorse.replay.layout import TokenLayout

DATA = Path(__file__).parent.parent / "data"
PACKAGED = Path(next(iter(packhorse.replay.__path__))) / "data" / "tiny_glm4_moe"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(DATA / "hf_fp32_glm4_moe.npz", allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    spec = importlib.util.spec_from_file_location("recipe", DATA / "make_hf_glm4_moe.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    other = tmp_path_factory.mktemp("other")
    tiny_moe.write_checkpoint(other, tiny_moe.CONFIG | recipe.OTHER_CHANGES)
    return {"tiny": PACKAGED, "other": other}


def run(model: Any, ids: np.ndarray, routes: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Logits and logprobs of the next tokens, float64; [2, S, L, K] experts of the routers."""
    from packhorse.replay.compare import record_routes
    from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession

    given = torch.from_numpy(ids.astype(np.int64)).to(DEVICE)
    batch, length = given.shape
    positions = torch.arange(length, device=DEVICE).expand_as(given)
    experts = np.empty(0)
    with torch.no_grad():
        if routes is None:
            with record_routes(model) as recorded:
                logits = model(given, positions, None)
            # a router reads [S, B]
            layers = [calls[0].view(length, batch, -1).transpose(0, 1) for calls in recorded]
            experts = torch.stack(layers, 2).sort(-1).values.cpu().numpy()
        else:
            session = ReplaySession(
                model, captured_layers=CapturedLayers.decoder(model.config.num_layers)
            )
            layout = TokenLayout.build([length] * batch, format="bshd", device=DEVICE)
            packed = PackedTensor.from_segments([torch.from_numpy(rows) for rows in routes])
            masks = [np.arange(length) > 0] * batch
            with session.schedule([ReplayMicrobatch(layout, packed.to(DEVICE), loss_masks=masks)]):
                step = session.begin(model)
                logits = model(given, positions, None, padding_mask=step.padding_mask)
    logits = logits.double().cpu()
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, given.cpu()[:, 1:, None])[..., 0]
    return {"logits": logits.numpy(), "logprobs": logprobs.numpy(), "experts": experts}


@pytest.fixture(scope="module")
def models(_megatron, folders) -> dict[str, Any]:
    from packhorse.replay.megatron import load_hf_model

    return {name: load_hf_model(folder).eval() for name, folder in folders.items()}


def test_the_packaged_weights_are_made_again_byte_for_byte(tmp_path, expected, folders):
    digest = tiny_moe.write_checkpoint(tmp_path)
    for name in ("model.safetensors", "config.json", "recipe.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (PACKAGED / name).read_bytes(), name
    meta = json.loads(str(expected["meta"]))
    assert json.loads((PACKAGED / "recipe.json").read_text())["sha256"] == digest
    assert digest == meta["tiny_sha256"]
    other = json.loads((folders["other"] / "recipe.json").read_text())
    assert other["sha256"] == meta["other_sha256"]
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 1_000_000


@pytest.mark.parametrize("name", ["tiny", "other"])
@pytest.mark.parametrize("kind", ["live", "replayed"])
def test_logits_and_logprobs_equal_transformers(kind, name, models, expected):
    routes = expected[f"{name}_routes"] if kind == "replayed" else None
    found = run(models[name], expected[f"{name}_ids"], routes)
    difference = np.abs(found["logprobs"] - expected[f"{name}_{kind}_logprobs"])
    assert difference.max() <= TOLERANCE
    some = found["logits"][:, expected[f"{name}_positions"]]
    assert np.abs(some - expected[f"{name}_{kind}_logits"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_live_experts_equal_transformers(name, models, expected):
    found = run(models[name], expected[f"{name}_ids"])["experts"]
    theirs = expected[f"{name}_live_experts"]
    first = models[name].config.num_layers - found.shape[2]
    assert first == {"tiny": 1, "other": 2}[name]
    np.testing.assert_array_equal(found, theirs[:, :, first:])
    assert not theirs[:, :, :first].any()


@pytest.mark.parametrize("name", ["tiny", "other"])
def test_replay_changes_what_transformers_changes(name, expected):
    moved = expected[f"{name}_live_logprobs"] - expected[f"{name}_replayed_logprobs"]
    assert np.abs(moved).max() > 1000 * TOLERANCE  # else the replayed half would prove nothing


def test_the_correction_bias_chooses_experts_and_weighs_none(models, expected):
    """Live it decides which experts are taken; under replay nothing depends on it, bit for bit."""
    from packhorse.replay.megatron import expert_biases

    model, ids, routes = models["tiny"], expected["tiny_ids"], expected["tiny_routes"]
    live, replayed = run(model, ids), run(model, ids, routes)
    biases = [bias for _, bias in expert_biases(model)]
    assert len(biases) == 3
    assert all(bias.abs().max() > 0.05 for bias in biases)
    kept = [bias.clone() for bias in biases]
    try:
        for bias in biases:
            bias.zero_()
        without = run(model, ids)
        assert (without["experts"] != live["experts"]).any(-1).mean() > 0.1
        unbiased = run(model, ids, routes)["logits"]
        if torch.cuda.is_available():  # there the sum over a token's experts has no fixed order
            np.testing.assert_allclose(unbiased, replayed["logits"], rtol=0, atol=1e-5)
        else:
            np.testing.assert_array_equal(unbiased, replayed["logits"])
    finally:
        for bias, value in zip(biases, kept, strict=True):
            bias.copy_(value)
    # the rollout's own experts replayed are what the router had chosen, and so are their weights
    own = np.concatenate([np.zeros_like(live["experts"][:, :, :1]), live["experts"]], 2)
    again = run(model, ids, own.astype(np.uint8))
    assert np.abs(again["logits"] - live["logits"]).max() <= 1e-5


def test_a_token_uses_experts_of_two_groups_of_the_four(models, expected):
    experts = expected["tiny_live_experts"][:, :, 1:]
    groups = [len(set(row // 3)) for row in experts.reshape(-1, 4)]
    assert set(groups) == {2}
    everywhere = {len(set(row // 3)) for row in expected["tiny_routes"][:, :, 1:].reshape(-1, 4)}
    assert max(everywhere) == 4  # what is replayed need not have been chosen by these rules


@pytest.mark.parametrize("recompute", ["full", "block", "moe"])
def test_recompute_changes_no_logit_and_every_gradient_is_finite(recompute, folders, expected):
    from packhorse.replay.megatron import load_hf_model

    model = load_hf_model(folders["other"], recompute=recompute)
    ids = torch.from_numpy(expected["other_ids"].astype(np.int64)).to(DEVICE)
    logits = model(ids, torch.arange(ids.shape[1], device=DEVICE).expand_as(ids), None)
    some = logits.detach().cpu().numpy()[:, expected["other_positions"]]
    assert np.abs(some - expected["other_live_logits"]).max() <= TOLERANCE
    logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


def rewrite(source: Path, folder: Path, change: Any) -> Path:
    """A copy of the checkpoint ``source`` after ``change(weights)``."""
    from safetensors.torch import load_file, save_file

    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def test_a_bias_between_two_bfloat16_values_is_kept_by_a_bfloat16_model(tmp_path, expected):
    from packhorse.replay.megatron import expert_biases, load_hf_model

    value = torch.linspace(0.1, 0.11, 12)
    folder = rewrite(PACKAGED, tmp_path, lambda weights: weights.update({BIAS: value}))
    model = load_hf_model(folder, dtype=torch.bfloat16).eval()
    run(model, expected["tiny_ids"])
    biases = dict(expert_biases(model))
    kept = biases["decoder.layers.2.mlp.router.expert_bias"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept.cpu(), value)
    counts = [b for n, b in model.named_buffers() if n.endswith("local_tokens_per_expert")]
    assert [count.dtype for count in counts] == [torch.float32] * 3


def test_a_bias_that_is_missing_or_of_another_shape_is_named(tmp_path):
    from packhorse.replay.megatron import load_hf_model

    folder = rewrite(PACKAGED, tmp_path, lambda weights: weights.pop(BIAS))
    with pytest.raises(ValueError, match=f"Checkpoint: .*weight {BIAS} is missing"):
        load_hf_model(folder)
    rewrite(PACKAGED, tmp_path, lambda weights: weights.update({BIAS: torch.zeros(6)}))
    with pytest.raises(ValueError, match=r"layers.2.mlp.router.expert_bias is \[12\], .* \[6\]"):
        load_hf_model(folder)


def test_a_shared_expert_of_another_size_is_refused_by_setting(tmp_path, monkeypatch):
    from packhorse.replay import megatron

    rewrite(PACKAGED, tmp_path, lambda weights: None)
    config = json.loads((tmp_path / "config.json").read_text()) | {"n_shared_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(megatron, "_build_model", None)
    with pytest.raises(
        ValueError, match=r"n_shared_experts, .* make \[64, 64\] of model.layers.1.mlp.shared_exp"
    ):
        megatron.load_hf_model(tmp_path)
