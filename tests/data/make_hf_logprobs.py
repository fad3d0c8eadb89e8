"""Make hf_fp32_logprobs.npz: what Hugging Face transformers computes for two small models, in fp32.

    python make_hf_logprobs.py            # torch 2.13.0, transformers 5.19.0, safetensors, numpy

Run in an environment of its own; nothing of the package is imported. Eager attention, one thread,
one sequence at a time, no cache. Fields:

    live_logprobs, replayed_logprobs      [133] of the capture's sampled tokens, full vocabulary,
                                          temperature 1; replayed: with the captured routes
    live_logsumexp, replayed_logsumexp    [1020] of the logits at every position
    logit_positions [16], live_logits, replayed_logits [16, 512]   all logits of some positions
    mixed_ids [2, 12], mixed_logits [2, 12, 96]    the checkpoint of ``write_mixed_checkpoint``
    meta                                  JSON: versions, sha256 of both checkpoints' weights

The routes that are replayed are the capture's; position P + R - 1, which has none, takes experts
0..K-1 and no sampled logprob depends on it.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "replay" / "data"
NUM_LOGIT_POSITIONS = 16

MIXED_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 96,
}


def mixed_weights() -> dict[str, np.ndarray]:
    """A layer without experts between two with, one KV head, scores that are not renormalised."""
    rng = np.random.default_rng(20261130)
    c = MIXED_CONFIG
    hidden, head = c["hidden_size"], c["head_dim"]
    shapes = {"model.embed_tokens": (c["vocab_size"], hidden)}
    norms = {"model.norm": hidden}
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norms[prefix + "input_layernorm"] = norms[prefix + "post_attention_layernorm"] = hidden
        norms[prefix + "self_attn.q_norm"] = norms[prefix + "self_attn.k_norm"] = head
        for kind, heads in (("q", 4), ("k", 1), ("v", 1)):
            shapes[f"{prefix}self_attn.{kind}_proj"] = (heads * head, hidden)
        shapes[prefix + "self_attn.o_proj"] = (hidden, c["num_attention_heads"] * head)
        mlps = {prefix + "mlp.": c["intermediate_size"]}
        if layer not in c["mlp_only_layers"]:
            shapes[prefix + "mlp.gate"] = (c["num_experts"], hidden)
            mlps = {
                f"{prefix}mlp.experts.{expert}.": c["moe_intermediate_size"]
                for expert in range(c["num_experts"])
            }
        for mlp, width in mlps.items():
            shapes[mlp + "gate_proj"] = shapes[mlp + "up_proj"] = (width, hidden)
            shapes[mlp + "down_proj"] = (hidden, width)
    shapes["lm_head"] = (c["vocab_size"], hidden)
    weights = {n: 0.3 * rng.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    weights |= {n: 1 + 0.2 * rng.standard_normal(s, dtype=np.float32) for n, s in norms.items()}
    return {f"{name}.weight": value.astype(np.float32) for name, value in weights.items()}


def write_mixed_checkpoint(folder: Path) -> str:
    """Write ``MIXED_CONFIG`` and its weights in two shards with an index. Returns their sha256."""
    from safetensors.numpy import save_file

    weights = mixed_weights()
    names = sorted(weights)
    where = {}
    for shard in range(2):
        file = f"model-{shard + 1:05d}-of-00002.safetensors"
        own = names[shard::2]  # q, k and v of one layer land in different shards
        save_file({name: weights[name] for name in own}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(MIXED_CONFIG))
    digest = hashlib.sha256()
    for name in names:
        digest.update(weights[name].tobytes())
    return digest.hexdigest()


def mixed_ids() -> np.ndarray:
    return np.random.default_rng(7).integers(0, MIXED_CONFIG["vocab_size"], (2, 12))


def replay_routes(model, source: dict) -> None:
    """Let each router take ``source["routes"]`` [T, L, K] where set, weighted by its softmax."""
    import torch

    routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]

    def make(layer, router):
        live = router.forward

        def forward(hidden):
            if source["routes"] is None:
                return live(hidden)
            hidden = hidden.reshape(-1, router.hidden_dim)
            logits = torch.nn.functional.linear(hidden, router.weight)
            scores = torch.softmax(logits.float(), -1)
            ids = torch.from_numpy(source["routes"][:, layer].astype(np.int64))
            values = scores.gather(-1, ids)
            if router.norm_topk_prob:
                values = values / values.sum(-1, keepdim=True)
            return logits, values.to(logits.dtype), ids

        return forward

    for layer, router in enumerate(routers):
        router.forward = make(layer, router)


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)

    def load(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits_of(model, ids):
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].double()

    capture = np.load(DATA / "vllm_tiny_moe.npz", allow_pickle=False)
    model = load(DATA / "tiny_moe")
    source = {"routes": None}
    replay_routes(model, source)
    out = {f"{kind}_{field}": [] for kind in ("live", "replayed") for field in ("logprobs", "all")}
    for i in range(len(capture["prompt_offsets"]) - 1):
        prompt, response, routes = (
            capture[field][capture[offsets][i] : capture[offsets][i + 1]]
            for field, offsets in (
                ("prompt_ids", "prompt_offsets"),
                ("response_ids", "response_offsets"),
                ("routed_experts", "route_offsets"),
            )
        )
        ids = np.concatenate([prompt, response]).astype(np.int64)
        last = np.arange(routes.shape[2], dtype=routes.dtype)
        full = np.concatenate([routes, np.broadcast_to(last, (1, *routes.shape[1:]))])
        for kind, target in (("live", None), ("replayed", full)):
            source["routes"] = target
            logits = logits_of(model, ids)
            sampled = torch.from_numpy(response.astype(np.int64))[:, None]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, sampled)[:, 0]
            out[f"{kind}_logprobs"].append(logprobs.numpy())
            out[f"{kind}_all"].append(logits.numpy())
    joined = {name: np.concatenate(parts) for name, parts in out.items()}
    num_positions = len(joined["live_all"])
    positions = np.linspace(0, num_positions - 1, NUM_LOGIT_POSITIONS).astype(np.int64)
    fields = {"logit_positions": positions}
    for kind in ("live", "replayed"):
        logits = joined[f"{kind}_all"]
        fields[f"{kind}_logprobs"] = joined[f"{kind}_logprobs"].astype(np.float32)
        fields[f"{kind}_logsumexp"] = np.logaddexp.reduce(logits, -1).astype(np.float32)
        fields[f"{kind}_logits"] = logits[positions].astype(np.float32)

    with tempfile.TemporaryDirectory() as folder:
        mixed_sha256 = write_mixed_checkpoint(Path(folder))
        mixed = load(folder)
    fields["mixed_ids"] = mixed_ids().astype(np.int32)
    mixed_logits = [logits_of(mixed, ids).numpy() for ids in mixed_ids()]
    fields["mixed_logits"] = np.stack(mixed_logits).astype(np.float32)

    weights = (DATA / "tiny_moe" / "model.safetensors").read_bytes()
    fields["meta"] = np.array(
        json.dumps(
            {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
                "python": sys.version.split()[0],
                "dtype": "float32",
                "attention": "eager",
                "tiny_moe_sha256": hashlib.sha256(weights).hexdigest(),
                "mixed_sha256": mixed_sha256,
            }
        )
    )
    path = HERE / "hf_fp32_logprobs.npz"
    np.savez_compressed(path, **fields)
    sys.stdout.write(f"{path.name}: {os.path.getsize(path)} bytes\n")


if __name__ == "__main__":
    main()
