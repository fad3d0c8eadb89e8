"""load_hf_model against Hugging Face transformers, in fp32.

Oracle: tests/data/hf_fp32_logprobs.npz, made by make_hf_logprobs.py beside it, and the capture's
``hf_fp32_routes``. Tolerance: 1e-4 in a logprob, two fp32 implementations of four layers (2e-5 and
less were seen); route sets exactly.
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
from packhorse.replay.capture import Capture
from packhorse.replay.layout import TokenLayout

DATA = Path(__file__).parent.parent / "data"
PACKAGED = Path(next(iter(packhorse.replay.__path__))) / "data"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(DATA / "hf_fp32_logprobs.npz", allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def capture() -> Capture:
    return Capture.load(PACKAGED / "vllm_tiny_moe.npz")


@pytest.fixture(scope="module")
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("recipe", DATA / "make_hf_logprobs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(_megatron, capture) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """ "live" and "replayed" -> logits [1020, V] and, live, experts [1011, L, K]."""
    from packhorse.replay.compare import record_routes
    from packhorse.replay.megatron import load_hf_model
    from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession

    model = load_hf_model(PACKAGED / "tiny_moe").eval()
    session = ReplaySession(model, captured_layers=CapturedLayers.decoder(4))
    microbatches = []
    for i, length in enumerate(capture.lengths):
        layout = TokenLayout.build([length], device=DEVICE)
        routes = capture.routes[i : i + 1].to(DEVICE)
        mask = np.arange(length) >= length - capture.response_lengths[i]
        microbatches.append(ReplayMicrobatch(layout, routes, loss_masks=[mask]))

    def forward(i: int, **given: Any) -> np.ndarray:
        ids = np.concatenate([capture.prompt_ids[i], capture.response_ids[i]])
        positions = torch.arange(len(ids), device=DEVICE)[None]
        logits = model(torch.from_numpy(ids)[None].to(DEVICE), positions, None, **given)
        return logits[0].cpu().numpy()

    trajectories = range(capture.num_trajectories)
    with torch.no_grad(), record_routes(model) as recorded:
        live = [forward(i) for i in trajectories]
    replayed = []
    with torch.no_grad(), session.schedule(microbatches):
        for i in trajectories:
            step = session.begin(model)
            replayed.append(forward(i, padding_mask=step.padding_mask))
    experts = [
        torch.stack([layer[i] for layer in recorded], 1)[: capture.routes.lengths[i]].cpu().numpy()
        for i in trajectories
    ]
    return {
        "live": (np.concatenate(live), np.concatenate(experts)),
        "replayed": (np.concatenate(replayed), np.empty(0)),
    }


def test_the_weights_are_those_the_data_was_made_of(expected, recipe):
    import hashlib

    meta = json.loads(str(expected["meta"]))
    packaged = (PACKAGED / "tiny_moe" / "model.safetensors").read_bytes()
    assert hashlib.sha256(packaged).hexdigest() == meta["tiny_moe_sha256"]
    digest = hashlib.sha256()
    for _, value in sorted(recipe.mixed_weights().items()):
        digest.update(value.tobytes())
    assert digest.hexdigest() == meta["mixed_sha256"]


@pytest.mark.parametrize("kind", ["live", "replayed"])
def test_logprobs_of_sampled_tokens_equal_transformers(kind, runs, capture, expected):
    logits = runs[kind][0].astype(np.float64)
    start, logprobs = 0, []
    for length, response in zip(capture.lengths, capture.response_ids, strict=True):
        z = logits[start + length - len(response) - 1 : start + length - 1]
        total = np.logaddexp.reduce(z, -1)
        logprobs.append(z[np.arange(len(response)), response] - total)
        start += length
    difference = np.abs(np.concatenate(logprobs) - expected[f"{kind}_logprobs"])
    assert difference.shape == (133,)
    assert difference.max() <= TOLERANCE


@pytest.mark.parametrize("kind", ["live", "replayed"])
def test_logits_equal_transformers(kind, runs, expected):
    logits = runs[kind][0].astype(np.float64)
    total = np.logaddexp.reduce(logits, -1)
    assert np.abs(total - expected[f"{kind}_logsumexp"]).max() <= TOLERANCE
    some = logits[expected["logit_positions"]]
    assert np.abs(some - expected[f"{kind}_logits"]).max() <= TOLERANCE


def test_replay_changes_what_transformers_changes(expected):
    moved = np.abs(expected["live_logprobs"] - expected["replayed_logprobs"]).max()
    assert moved > 100 * TOLERANCE  # else the replayed half of these tests would prove nothing


def test_live_route_sets_equal_transformers(runs, capture):
    ours = np.sort(runs["live"][1], -1)
    theirs = np.sort(capture.optional["hf_fp32_routes"].astype(np.int64), -1)
    assert ours.shape == theirs.shape == (1011, 4, 2)
    assert (ours == theirs).all()


@pytest.mark.parametrize("recompute", ["none", "full", "block", "moe"])
def test_a_sharded_checkpoint_with_a_dense_layer_equals_transformers(
    recompute, recipe, expected, tmp_path
):
    from packhorse.replay.megatron import load_hf_model

    recipe.write_mixed_checkpoint(tmp_path)
    model = load_hf_model(tmp_path, recompute=recompute)
    ids = torch.from_numpy(expected["mixed_ids"].astype(np.int64)).to(DEVICE)
    positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
    logits = model(ids, positions, None)
    difference = np.abs(logits.detach().cpu().numpy() - expected["mixed_logits"]).max()
    assert difference <= TOLERANCE
    logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


def test_packed_attention_equals_one_sequence_at_a_time(capture):
    from megatron.core.packed_seq_params import PackedSeqParams

    from packhorse.replay.megatron import load_hf_model
    from packhorse.replay.packed_attention import PackedAttention

    model = load_hf_model(PACKAGED / "tiny_moe", core_attention=PackedAttention).eval()
    plain = load_hf_model(PACKAGED / "tiny_moe").eval()
    ids = [np.concatenate([capture.prompt_ids[i], capture.response_ids[i]]) for i in range(3)]
    packed = PackedTensor.from_segments([torch.from_numpy(x) for x in ids]).to(DEVICE)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )
    positions = torch.cat([torch.arange(n) for n in packed.lengths]).to(DEVICE)
    with torch.no_grad():
        together = model(packed.values[None], positions[None], None, packed_seq_params=params)[0]
        alone = [plain(x[None], torch.arange(len(x), device=DEVICE)[None], None)[0] for x in packed]
    assert (together - torch.cat(alone)).abs().max() <= TOLERANCE


# --- what cannot be loaded ------------------------------------------------------------------------


@pytest.fixture
def folder(recipe, tmp_path):
    recipe.write_mixed_checkpoint(tmp_path)
    return tmp_path


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder: Path, change: Any) -> None:
    """Write the weights of ``folder`` again, in one file, after ``change(weights)``."""
    from safetensors.numpy import load_file, save_file

    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_missing_weight_is_named(folder):
    from packhorse.replay.megatron import load_hf_model

    rewrite(folder, lambda weights: weights.pop("model.layers.2.self_attn.k_norm.weight"))
    with pytest.raises(ValueError, match=r"weight model.layers.2.self_attn.k_norm.weight is miss"):
        load_hf_model(folder)


def test_a_left_over_weight_is_named(folder):
    from packhorse.replay.megatron import load_hf_model

    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    rewrite(folder, lambda weights: weights.update(extra))
    with pytest.raises(ValueError, match=r"no place in the model: model.layers.0.self_attn.q_proj"):
        load_hf_model(folder)


def test_a_weight_of_another_shape_is_named(folder):
    from packhorse.replay.megatron import load_hf_model

    wrong = {"model.layers.0.self_attn.o_proj.weight": np.zeros((24, 16), np.float32)}
    rewrite(folder, lambda weights: weights.update(wrong))
    with pytest.raises(ValueError, match=r"linear_proj.weight is \[24, 32\], the .* \[24, 16\]"):
        load_hf_model(folder)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"head_dim": 4},
            r"head_dim, hidden_size of config.json make \[16, 24\] of model.layers.0",
        ),
        (
            {"intermediate_size": 2**30},
            r"\[1073741824, 24\] of model.layers.\d.mlp.gate_proj.weight",
        ),
        (
            {"num_hidden_layers": 9000},
            r"weight model.layers.8999.input_layernorm.weight is missing",
        ),
    ],
)
def test_sizes_that_are_not_the_weights_are_refused_before_a_model_is_built(
    setting, message, folder, monkeypatch
):
    from packhorse.replay import megatron

    set_config(folder, rope_theta=5000.0, **setting)
    monkeypatch.setattr(megatron, "_build_model", None)
    with pytest.raises(ValueError, match=message):
        megatron.load_hf_model(folder)


def test_unknown_dtypes_and_recomputes_are_refused():
    from packhorse.replay.megatron import load_hf_model

    with pytest.raises(TypeError, match="float32 or bfloat16"):
        load_hf_model(PACKAGED / "tiny_moe", dtype=torch.float16)
    with pytest.raises(ValueError, match="recompute='some'; known: none, full, block, moe"):
        load_hf_model(PACKAGED / "tiny_moe", recompute="some")
