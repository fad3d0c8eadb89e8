"""The tiny Qwen3-MoE of ``grpo_tiny.py``: sizes, first weights, its trainer in Megatron, and the
way of the trainer's weights back to the names that Hugging Face and vLLM know.

A folder (config.json, model.safetensors) is what both sides load. Sizes: V vocabulary, H hidden, E
experts, G key-value heads, D head size.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse import load_hf_model
from packhorse.replay.checkpoint import MoeConfig, read_config

PAD, EOS, BOS, PLUS, EQUALS = 0, 1, 2, 3, 4
DIGIT = 10  # the id of digit 0


@dataclass(frozen=True)
class ModelSizes:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    topk: int
    moe_intermediate_size: int

    @property
    def checks(self) -> dict[str, int]:
        """What packhorse holds routes and supports against."""
        return {
            "num_experts": self.num_experts,
            "vocab_size": self.vocab_size,
            "num_layers": self.num_layers,
            "topk": self.topk,
        }


# --- a folder -------------------------------------------------------------------------------------


def write_folder(folder: Path, sizes: ModelSizes, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "float32",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.topk,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    held = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def first_weights(sizes: ModelSizes, seed: int) -> dict[str, Tensor]:
    """Matrices drawn with the deviation 1 / sqrt(inputs), norms 1."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    hidden, inner = sizes.hidden_size, sizes.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab_size, hidden),
        "lm_head.weight": (sizes.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}self_attn.q_norm.weight": (sizes.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (sizes.head_dim,),
            f"{prefix}mlp.gate.weight": (sizes.num_experts, hidden),
        }
        for expert in range(sizes.num_experts):
            shapes |= {
                f"{prefix}mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
                f"{prefix}mlp.experts.{expert}.up_proj.weight": (inner, hidden),
                f"{prefix}mlp.experts.{expert}.down_proj.weight": (hidden, inner),
            }
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


# --- the trainer's model --------------------------------------------------------------------------


def build_model(folder: Path) -> tuple[Any, MoeConfig]:
    """Megatron's model of a folder, fp32, in Megatron's DDP: gradients go to fp32 buffers."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    module = load_hf_model(folder)
    module.config.calculate_per_token_loss = True  # the mean over all tokens of a step
    module.config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(
        config=module.config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=module,
    )
    return model, read_config(folder)


def build_optimizer(model: Any, lr: float) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32
    )
    return get_megatron_optimizer(config, [model])


_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.router": "mlp.gate",
}


def named_weights(model: Any, config: MoeConfig) -> Iterator[tuple[str, Tensor]]:
    """The trainer's weights under their names in a checkpoint: views, or parts of them."""
    for full_name, parameter in model.module.named_parameters():
        weight = parameter.detach()
        if full_name in _OUTER:
            yield _OUTER[full_name], weight
            continue
        _, _, layer, field = full_name.split(".", 3)
        prefix, field = f"model.layers.{layer}.", field.removesuffix(".weight")
        if field in _IN_LAYER:
            yield f"{prefix}{_IN_LAYER[field]}.weight", weight
        elif field == "self_attention.linear_qkv":
            # key-value head by key-value head: its queries, its key, its value
            groups, size = config.num_kv_heads, config.head_dim
            queries = config.num_heads // groups * size
            parts = weight.view(groups, -1, weight.shape[1]).split([queries, size, size], dim=1)
            for kind, part in zip("qkv", parts, strict=True):
                yield f"{prefix}self_attn.{kind}_proj.weight", part.flatten(0, 1)
        else:
            expert, _, linear = field.removeprefix("mlp.experts.local_experts.").partition(".")
            if linear == "linear_fc1":
                for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                    yield f"{prefix}mlp.experts.{expert}.{part}_proj.weight", half
            else:
                yield f"{prefix}mlp.experts.{expert}.down_proj.weight", weight
