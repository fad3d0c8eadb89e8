"""Make the small mixture-of-experts checkpoint of the GLM-4-MoE family that the package carries.

    python -m packhorse.replay.tiny_moe FOLDER

Four layers, the first dense; 12 experts in four groups of which a token may use two, top 4 by
sigmoid score plus a correction bias that has no part in the weights; one shared expert; query, key
and value biases, normalised queries and keys, rotary positions on half of each head. Everything
that ``replay/data/tiny_moe`` (qwen3_moe) has not. vLLM, transformers and ``load_hf_model`` read it.

Deterministic on every machine: weights are uniform, made of the raw 64-bit stream of PCG64 by exact
arithmetic, rounded to bfloat16; recipe.json keeps their sha256. The tokenizer is that of
``tiny_moe``.
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
SEED = 20261132
#: Standard deviation by the end of a weight's name; the others' is ``STD``. The head's decides how
#: peaked the distributions are, and how far bfloat16 in the layers below moves a logprob.
STD = 0.15
STDS = {
    "lm_head.weight": 0.3,
    "down_proj.weight": 0.15,
    "norm.weight": 0.1,
    ".bias": 0.4,
    "e_score_correction_bias": 0.1,
}
#: Copied from ``tiny_moe``.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": STD,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "output_router_logits": False,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 512,
}


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name in the checkpoint -> shape, of a glm4_moe model; linear weights are [out, in]."""
    hidden, head = config["hidden_size"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        attention = prefix + "self_attn."
        for kind, heads in (
            ("q", config["num_attention_heads"]),
            ("k", config["num_key_value_heads"]),
            ("v", config["num_key_value_heads"]),
        ):
            shapes[f"{attention}{kind}_proj.weight"] = (heads * head, hidden)
            if config["attention_bias"]:
                shapes[f"{attention}{kind}_proj.bias"] = (heads * head,)
            if config["use_qk_norm"] and kind != "v":
                shapes[f"{attention}{kind}_norm.weight"] = (head,)
        shapes[attention + "o_proj.weight"] = (hidden, config["num_attention_heads"] * head)
        mlps = {"mlp.": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
            shapes[prefix + "mlp.gate.weight"] = (experts, hidden)
            shapes[prefix + "mlp.gate.e_score_correction_bias"] = (experts,)
            mlps = {f"mlp.experts.{expert}.": width for expert in range(experts)}
            mlps["mlp.shared_experts."] = width * config["n_shared_experts"]
        for mlp, width in mlps.items():
            shapes[f"{prefix}{mlp}gate_proj.weight"] = (width, hidden)
            shapes[f"{prefix}{mlp}up_proj.weight"] = (width, hidden)
            shapes[f"{prefix}{mlp}down_proj.weight"] = (hidden, width)
    return shapes


def make_weights(config: dict[str, Any], seed: int = SEED) -> dict[str, Tensor]:
    """Name -> weight, bfloat16; the correction biases float32, of values that bfloat16 has.

    Uniform with the standard deviation of ``STDS``, around 1 for norms and 0 for all others.
    """
    stream = np.random.PCG64(seed)  # of the bits alone NumPy promises that no version changes them
    weights = {}
    for name, shape in sorted(weight_shapes(config).items()):
        std = next((std for end, std in STDS.items() if name.endswith(end)), STD)
        bits = stream.random_raw(int(np.prod(shape))) >> np.uint64(40)
        uniform = bits.astype(np.float64) / 2**23 - 1  # exact, in [-1, 1)
        values = uniform * (std * 3**0.5) + name.endswith("norm.weight")
        weight = torch.from_numpy(values).view(shape).to(torch.bfloat16)
        if name.endswith("e_score_correction_bias"):
            weight = weight.float()
        weights[name] = weight
    return weights


def write_checkpoint(
    folder: str | Path, config: dict[str, Any] | None = None, seed: int = SEED
) -> str:
    """Write config.json, model.safetensors, recipe.json and the tokenizer; needs safetensors.

    Args:
        folder: made if it is not there; files in it are overwritten.
        config: a glm4_moe config.json; by default ``CONFIG``.

    Returns:
        The sha256 of model.safetensors, as recipe.json has it.
    """
    from safetensors.torch import save

    config = CONFIG if config is None else config
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = save(make_weights(config, seed), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    recipe = {
        "made_by": "python -m packhorse.replay.tiny_moe",
        "family": config["model_type"],
        "seed": seed,
        "std": STD,
        "stds": STDS,
        "sha256": digest,
    }
    for name, value in (("config.json", config), ("recipe.json", recipe)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    for name in TOKENIZER:
        shutil.copyfile(DATA / "tiny_moe" / name, folder / name)
    return digest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m packhorse.replay.tiny_moe",
        description="Write a small random checkpoint of the glm4_moe family.",
    )
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args(argv)
    digest = write_checkpoint(args.folder, seed=args.seed)
    sys.stdout.write(f"{args.folder}: model.safetensors sha256 {digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
