"""Make hf_fp32_glm4_moe.npz: what Hugging Face transformers computes for glm4_moe models, in fp32.

    PYTHONPATH=REPOSITORY python make_hf_glm4_moe.py   # torch 2.13.0, transformers 5.19.0

Run in an environment of its own; of the package only the generator of the weights is imported.
Eager attention, one thread, one sequence at a time, no cache. Fields, for "tiny", the packaged
checkpoint, and "other", that of ``OTHER``:

    NAME_ids [2, S]                 random tokens
    NAME_routes [2, S, L, K]        random experts that are replayed; zeros in dense layers
    NAME_live_experts [2, S, L, K]  what the routers choose themselves, sorted; zeros likewise
    NAME_KIND_logits [2, P, V]      KIND live or replayed, at NAME_positions [P]
    NAME_KIND_logprobs [2, S - 1]   of each next token, over the whole vocabulary
    meta                            JSON: versions, sha256 of both checkpoints' weights
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
PACKAGED = HERE.parent.parent / "replay" / "data" / "tiny_glm4_moe"

#: What the packaged model is not: two dense layers, two shared experts, one group, top 3, one
#: key-value head, no query and key norms, no biases, all of a head rotated, no scaling, one weight
#: of the routed experts alone.
OTHER_CHANGES = {
    "attention_bias": False,
    "first_k_dense_replace": 2,
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {
        "partial_rotary_factor": 1.0,
        "rope_theta": 5000.0,
        "rope_type": "default",
    },
    "rms_norm_eps": 1e-4,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 96,
}


def inputs(config: dict, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [2, S] and, for each, distinct experts [2, S, L, K], zeros in dense layers."""
    rng = np.random.default_rng(config["vocab_size"])
    layers, topk = config["num_hidden_layers"], config["num_experts_per_tok"]
    ids = rng.integers(0, config["vocab_size"], (2, num_tokens))
    order = rng.random((2, num_tokens, layers, config["n_routed_experts"])).argsort(-1)
    routes = order[..., :topk].astype(np.uint8)
    routes[:, :, : config["first_k_dense_replace"]] = 0
    return ids.astype(np.int32), routes


def replay_routes(model, source: dict, seen: dict) -> None:
    """Let each router take ``source["routes"]`` [T, L, K] where set; ``seen`` keeps its choice."""
    import torch

    def make(layer, router):
        live = router.forward

        def forward(hidden):
            if source["routes"] is None:
                logits, weights, ids = live(hidden)
                seen[layer] = np.sort(ids.numpy(), -1)
                return logits, weights, ids
            hidden = hidden.reshape(-1, router.hidden_dim)
            logits = torch.nn.functional.linear(hidden.float(), router.weight.float())
            ids = torch.from_numpy(source["routes"][:, layer].astype(np.int64))
            weights = torch.sigmoid(logits).gather(-1, ids)  # the bias has no part in the weights
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return logits, weights * router.routed_scaling_factor, ids

        return forward

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.forward = make(layer, block.mlp.gate)


def main() -> None:
    import torch
    import transformers

    from packhorse.replay.tiny_moe import CONFIG, write_checkpoint

    torch.set_num_threads(1)
    fields, digests = {}, {}

    def compute(name: str, folder: Path, config: dict, num_tokens: int) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        source, seen = {"routes": None}, {}
        replay_routes(model, source, seen)
        ids, routes = inputs(config, num_tokens)
        positions = np.linspace(0, num_tokens - 1, 6).astype(np.int64)
        fields.update(
            {f"{name}_ids": ids, f"{name}_routes": routes, f"{name}_positions": positions}
        )
        experts = np.zeros_like(routes)
        for kind in ("live", "replayed"):
            logits = []
            for i in range(len(ids)):
                source["routes"] = routes[i] if kind == "replayed" else None
                given = torch.from_numpy(ids[i].astype(np.int64))[None]
                with torch.no_grad():
                    logits.append(model(input_ids=given, use_cache=False).logits[0].double())
                while seen:  # live alone
                    layer, chosen = seen.popitem()
                    experts[i, :, layer] = chosen
            both = torch.stack(logits)
            following = torch.from_numpy(ids[:, 1:].astype(np.int64))[..., None]
            logprobs = both[:, :-1].log_softmax(-1).gather(-1, following)[..., 0]
            fields[f"{name}_{kind}_logits"] = both[:, positions].numpy().astype(np.float32)
            fields[f"{name}_{kind}_logprobs"] = logprobs.numpy().astype(np.float32)
        fields[f"{name}_live_experts"] = experts

    compute("tiny", PACKAGED, CONFIG, 64)
    digests["tiny_sha256"] = json.loads((PACKAGED / "recipe.json").read_text())["sha256"]
    with tempfile.TemporaryDirectory() as folder:
        digests["other_sha256"] = write_checkpoint(folder, CONFIG | OTHER_CHANGES)
        compute("other", Path(folder), CONFIG | OTHER_CHANGES, 16)
    fields["meta"] = np.array(
        json.dumps(
            {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
                "python": sys.version.split()[0],
                "dtype": "float32",
                "attention": "eager",
                **digests,
            }
        )
    )
    path = HERE / "hf_fp32_glm4_moe.npz"
    np.savez_compressed(path, **fields)
    sys.stdout.write(f"{path.name}: {os.path.getsize(path)} bytes\n")


if __name__ == "__main__":
    main()
