"""Load a Hugging Face checkpoint into a Megatron-core ``GPTModel``: one process, one rank.

The model is built from Megatron's local layer specification, so neither Transformer Engine nor Apex
is needed. Loading is strict: a checkpoint weight that is not used and a model parameter that is not
set are errors, because a q/k norm or an expert that is left out still gives finite logits.

A GPTModel of one rank holds the whole model, so the checkpoint must fit one device. Weights are
read one at a time and written in place; nothing is held twice.

Megatron is imported by the functions that need it. Without a GPU or Transformer Engine call
``packhorse.replay.cpu_megatron.install_cpu_shims()`` first. Megatron-core 0.16.1 to 0.19.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.replay.checkpoint import Checkpoint, MoeConfig, read_config

#: ``recompute=``: the TransformerConfig settings it stands for.
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@contextmanager
@ranged
def single_process(seed: int = 0) -> Iterator[None]:
    """Give Megatron the process groups of one rank, and take back those made here.

    Uses NCCL with a GPU and gloo without; needs no address and no port. Groups that exist already
    are left as they are.

    Raises:
        ValueError: a torch.distributed group of more than one process is running.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if dist.is_initialized() and dist.get_world_size() != 1:
        raise ValueError(
            f"single_process: one process only, torch.distributed has {dist.get_world_size()}"
        )
    made_group = not dist.is_initialized()
    made_parallel = not parallel_state.model_parallel_is_initialized()
    if made_group:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if made_parallel:
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        if made_parallel:
            parallel_state.destroy_model_parallel()
        if made_group:
            dist.destroy_process_group()


@ranged
def load_hf_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
    core_attention: Any = None,
) -> Any:
    """Build a ``GPTModel`` for the checkpoint folder ``directory`` and fill it.

    Args:
        directory: a Hugging Face folder: config.json and model.safetensors, or shards with
            model.safetensors.index.json. Its ``model_type`` is one of ``checkpoint.MODEL_TYPES``.
        dtype: float32 or bfloat16: parameters and activations. The router computes in float32 with
            both (``moe_router_dtype="fp32"``).
        recompute: a key of ``RECOMPUTE``.
        core_attention: class to stand for Megatron's ``DotProductAttention``, which takes no packed
            sequences; ``packed_attention.PackedAttention`` does.

    Returns:
        The model, on the GPU if there is one. Takes ``input_ids``, ``position_ids`` [B, S] and
        ``attention_mask`` None (causal); gives logits [B, S, V].

    Raises:
        TypeError: ``dtype`` is neither.
        ValueError: ``recompute`` is unknown, model-parallel groups are missing or hold more than
            one rank, or the checkpoint does not fit: see ``checkpoint.read_config``; a weight is
            missing, left over or of another shape.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"load_hf_model: dtype must be float32 or bfloat16, got {dtype}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"load_hf_model: recompute={recompute!r}; known: {', '.join(RECOMPUTE)}")
    config = read_config(directory)
    _require_one_rank()
    with Checkpoint(directory) as checkpoint:
        _check_sizes(config, checkpoint)
        model = _build_model(config, dtype, recompute, core_attention)
        _fill(model, config, checkpoint)
    return model


# --- the model ------------------------------------------------------------------------------------


def _require_one_rank() -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise ValueError("load_hf_model: no model-parallel groups; call it inside single_process()")
    size = torch.distributed.get_world_size()
    if size != 1:
        raise ValueError(f"load_hf_model: one rank only, torch.distributed has {size}")


def _build_model(config: MoeConfig, dtype: torch.dtype, recompute: str, core_attention: Any) -> Any:
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    limited = config.group_topk < config.num_groups
    transformer_config = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        num_moe_experts=config.num_experts,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_layer_freq=[int(layer in config.moe_layers) for layer in range(config.num_layers)],
        moe_router_topk=config.topk,
        moe_router_score_function=config.score_function,
        # softmax over the chosen logits is softmax over all, renormalised; the weights of sigmoid
        # scores are renormalised always
        moe_router_pre_softmax=config.score_function == "softmax" and not config.renormalise,
        moe_router_enable_expert_bias=config.correction_bias,
        moe_router_num_groups=config.num_groups if limited else None,
        moe_router_group_topk=config.group_topk if limited else None,
        moe_router_topk_scaling_factor=(
            config.scaling_factor if config.scaling_factor != 1 else None
        ),
        moe_shared_expert_intermediate_size=config.shared_intermediate_size or None,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        perform_initialization=False,  # every parameter is read from the checkpoint
        **RECOMPUTE[recompute],
    )
    spec = get_gpt_decoder_block_spec(
        transformer_config, use_transformer_engine=False, normalization="RMSNorm"
    )
    spec.layer_norm = WrappedTorchNorm  # with Apex the default is a LayerNorm
    if core_attention is not None:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = core_attention
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_positions,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=config.rotary_percent,
        share_embeddings_and_output_weights=False,
    )
    model.model_type = ModelType.encoder_or_decoder
    # norms and routers are made on the CPU in float32; Megatron's training loop moves and casts too
    model.to("cuda" if torch.cuda.is_available() else "cpu", dtype)
    restore_router_buffers(model)
    return model


def restore_router_buffers(model: Any) -> None:
    """Make the routers' buffers (expert biases, counts) float32 again after a cast of the model.

    A bias that was rounded chooses other experts, and counts stop at 256 in bfloat16. Megatron
    does it for the bias at the router's first call, when its bits are lost.
    """
    for name, buffer in model.named_buffers():
        if ".router." in name:
            buffer.data = buffer.data.float()


# --- weights --------------------------------------------------------------------------------------


def _check_sizes(config: MoeConfig, checkpoint: Checkpoint) -> None:
    """Refuse a config.json whose sizes are not the weights', before memory is taken for them."""
    layer = f"model.layers.{config.moe_layers[0]}."
    expert = f"{layer}mlp.experts.{config.num_experts - 1}."
    checkpoint.shape(f"model.layers.{config.num_layers - 1}.input_layernorm.weight")
    checks: list[tuple[str, str, list[int]]] = [
        ("vocab_size, hidden_size", "model.embed_tokens.weight",
         [config.vocab_size, config.hidden_size]),
        ("num_attention_heads, head_dim, hidden_size", f"{layer}self_attn.q_proj.weight",
         [config.num_heads * config.head_dim, config.hidden_size]),
        ("num_key_value_heads, head_dim, hidden_size", f"{layer}self_attn.k_proj.weight",
         [config.num_kv_heads * config.head_dim, config.hidden_size]),
        ("num_experts, hidden_size", f"{layer}mlp.gate.weight",
         [config.num_experts, config.hidden_size]),
        ("moe_intermediate_size, hidden_size", f"{expert}gate_proj.weight",
         [config.moe_intermediate_size, config.hidden_size]),
    ]  # fmt: skip
    if config.qk_norm:
        checks.append(("head_dim", f"{layer}self_attn.q_norm.weight", [config.head_dim]))
    if config.shared_intermediate_size:
        checks.append((
            "n_shared_experts, moe_intermediate_size, hidden_size",
            f"{layer}mlp.shared_experts.gate_proj.weight",
            [config.shared_intermediate_size, config.hidden_size],
        ))  # fmt: skip
    dense = sorted(set(range(config.num_layers)) - set(config.moe_layers))
    if dense:
        checks.append((
            "intermediate_size, hidden_size", f"model.layers.{dense[0]}.mlp.gate_proj.weight",
            [config.intermediate_size, config.hidden_size],
        ))  # fmt: skip
    for settings, name, expected in checks:
        if checkpoint.shape(name) != expected:
            raise ValueError(
                f"load_hf_model: {settings} of config.json make {expected} of {name}, the"
                f" checkpoint's weight is {checkpoint.shape(name)}"
            )


def _fill(model: Any, config: MoeConfig, checkpoint: Checkpoint) -> None:
    used: set[str] = set()

    def read(name: str) -> Tensor:
        used.add(name)
        return checkpoint.tensor(name)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = _source(name, config)(read)
            if weight.shape != parameter.shape:
                raise ValueError(
                    f"load_hf_model: {name} is {list(parameter.shape)}, the checkpoint's weight"
                    f" {list(weight.shape)}"
                )
            parameter.copy_(weight)
        for name, buffer in expert_biases(model):
            weight = read(f"model.layers.{name.split('.')[2]}.mlp.gate.e_score_correction_bias")
            if weight.shape != buffer.shape:
                raise ValueError(
                    f"load_hf_model: {name} is {list(buffer.shape)}, the checkpoint's weight"
                    f" {list(weight.shape)}"
                )
            buffer.copy_(weight)
    left_over = sorted(checkpoint.names - used)
    if left_over:
        raise ValueError(
            f"load_hf_model: {len(left_over)} weights of the checkpoint have no place in the"
            f" model: {', '.join(left_over[:3])}{' ...' if len(left_over) > 3 else ''}"
        )


def expert_biases(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and buffer, [E] float32, of each router that chooses by a biased score."""
    for name, buffer in model.named_buffers():
        if name.endswith("router.expert_bias"):
            yield name, buffer


_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}

_Read = Callable[[str], Tensor]


def _source(name: str, config: MoeConfig) -> Callable[[_Read], Tensor]:
    """How the Megatron parameter ``name`` is made of checkpoint weights; both are [out, in]."""
    if name in _OUTER:
        return lambda read: read(_OUTER[name])
    head, _, rest = name.partition("decoder.layers.")
    layer, _, field = rest.partition(".")
    if not head and layer.isdigit():
        prefix = f"model.layers.{layer}."
        if field in _IN_LAYER:
            return lambda read: read(prefix + _IN_LAYER[field])
        attention, _, kind = field.partition(".linear_qkv.")
        if attention == "self_attention" and kind in ("weight", "bias"):
            return lambda read: _grouped_qkv(read, prefix + "self_attn.", kind, config)
        block, _, linear = field.rpartition(".linear_fc")
        block = block.replace("mlp.experts.local_experts.", "mlp.experts.")
        if linear == "1.weight":
            return lambda read: torch.cat(
                [read(f"{prefix}{block}.{part}.weight") for part in ("gate_proj", "up_proj")]
            )
        if linear == "2.weight":
            return lambda read: read(f"{prefix}{block}.down_proj.weight")
    raise ValueError(f"load_hf_model: the model's parameter {name} has no weight in a checkpoint")


def _grouped_qkv(read: _Read, prefix: str, of: str, config: MoeConfig) -> Tensor:
    """[(heads + 2 KV heads) D, ...]: for each KV head its query heads, its key, its value.

    Args:
        of: "weight", [.., H], or "bias", [..].
    """
    groups = config.num_kv_heads
    parts = []
    for kind in ("q", "k", "v"):
        weight = read(f"{prefix}{kind}_proj.{of}")
        if weight.shape[0] % groups:
            raise ValueError(
                f"load_hf_model: {prefix}{kind}_proj.{of} has {weight.shape[0]} rows for"
                f" {groups} key-value heads"
            )
        parts.append(weight.unflatten(0, (groups, -1)))
    return torch.cat(parts, 1).flatten(0, 1)
