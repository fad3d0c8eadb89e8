"""Models of the distributed cases: chunks of a rank, their routers, slices of the whole weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.distributed.attention import use_gathered_attention
from tests.distributed.case import EXPERTS, RECOMPUTE, TOPK, VOCAB, WIDTH, Case
from tests.distributed.router_losses import DEVICE, settings_of


def start_ranks(**sizes: Any) -> None:
    """Megatron's groups for these sizes; what they leave over of the world is data parallel."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def make_config(case: Case, *, parallel: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": case.depth,
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 32,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": 1,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "pipeline_dtype": torch.float32,
    }
    if not case.pattern:
        settings["moe_layer_freq"] = [int(x in case.moe_layers) for x in range(case.num_layers)]
    if case.mtp:
        settings |= {"mtp_num_layers": case.mtp, "calculate_per_token_loss": True}
    if parallel:
        settings |= {
            "tensor_model_parallel_size": case.tp,
            "sequence_parallel": case.tp > 1,
            "pipeline_model_parallel_size": case.pp,
            "virtual_pipeline_model_parallel_size": case.vp_size,
            "context_parallel_size": case.cp,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp or case.tp,
            # with two stages both neighbours are one rank: batched sends would cross
            "batch_p2p_comm": case.vp_size is None,
            **RECOMPUTE[case.recompute],
            **settings_of(case),
            **case.settings,
        }
        if case.dtype == "bf16":
            settings |= {"bf16": True, "params_dtype": torch.bfloat16}
            settings["pipeline_dtype"] = torch.bfloat16
    return TransformerConfig(**settings)


def build_chunks(case: Case, *, parallel: bool) -> list[Any]:
    """This rank's model chunks, or the whole model on one rank."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType

    config = make_config(case, parallel=parallel)
    stage, stages, vpp = 0, 1, 1
    if parallel:
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), case.pp
        vpp = case.vpp
    chunks = []
    for i in range(vpp):
        torch.manual_seed(7)
        build = _build_hybrid if case.pattern else _build_gpt
        chunk = build(
            case,
            config,
            gathered=parallel and (case.cp > 1 or case.format == "thd"),
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=stage == 0 and i == 0,
            post_process=stage == stages - 1 and i == vpp - 1,
            # Megatron's rotary positions of a rank are zigzag
            position_embedding_type="rope" if case.cp_order == "zigzag" else "learned_absolute",
            **({"vp_stage": i} if parallel and case.vp_size else {}),
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk.to(DEVICE))
    return chunks


def _build_gpt(case: Case, config: Any, *, gathered: bool, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    virtual = {name: value for name, value in options.items() if name == "vp_stage"}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **virtual)
    if gathered:
        use_gathered_attention(spec.layer_specs, case.cp_order)
    if case.mtp:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker.clear()  # process-global, sized by the first model's heads
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, **virtual
        )
    return GPTModel(config=config, transformer_layer_spec=spec, **options)


def _build_hybrid(case: Case, config: Any, *, gathered: bool, **options: Any) -> Any:
    """From the GPT modules: the shipped specs need Transformer Engine."""
    import megatron.core.models.hybrid.hybrid_block as hybrid_block
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm
    dense = get_gpt_layer_local_spec(num_experts=None)
    moe = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    parts = type(dense.submodules)
    if gathered:
        use_gathered_attention([dense], case.cp_order)

    def feed_forward(module: Any, of: Any) -> Any:
        return ModuleSpec(
            module=module,
            submodules=parts(
                pre_mlp_layernorm=of.submodules.pre_mlp_layernorm,
                mlp=of.submodules.mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    spec = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=dense.module,
                submodules=parts(
                    input_layernorm=dense.submodules.input_layernorm,
                    self_attention=dense.submodules.self_attention,
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=feed_forward(MLPLayer, dense),
            moe_layer=feed_forward(moe.module, moe),
        ),
    )
    cut = config.pipeline_model_parallel_size > 1
    pattern = case.pattern if cut else case.pattern.replace("|", "")
    return HybridModel(
        config=config, hybrid_stack_spec=spec, hybrid_layer_pattern=pattern, **options
    )


def causal_mask(width: int) -> Tensor:
    """[1, 1, width, width] bool, True where a position must not look."""
    return torch.ones(width, width, dtype=torch.bool, device=DEVICE).triu(1)[None, None]


# --- routers --------------------------------------------------------------------------------------


def routers_of(chunk: Any) -> dict[int, Any]:
    """The decoder's routers by their 0-based global layer."""
    return {router.layer_number - 1: router for router in _routers(chunk, mtp=False)}


def mtp_routers_of(chunk: Any) -> dict[int, Any]:
    """Routers of heads by their depth, from 1."""
    return dict(enumerate(_routers(chunk, mtp=True), start=1))


def all_routers_of(chunk: Any) -> dict[int, Any]:
    """By global layer; those of heads by minus their depth."""
    return routers_of(chunk) | {-d: router for d, router in mtp_routers_of(chunk).items()}


def _routers(chunk: Any, *, mtp: bool) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [
        module
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and name.startswith("mtp.") == mtp
    ]


# --- slices of the whole model --------------------------------------------------------------------


def whole_name(chunk: Any, name: str, case: Case, ep_rank: int) -> str:
    """Name in the whole model of a parameter of this rank's chunk."""

    def layer(match: re.Match) -> str:
        return f"layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match) -> str:
        return f"local_experts.{ep_rank * (EXPERTS // case.ep) + int(match[1])}."

    name = re.sub(r"(?<=^decoder\.)layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def slice_like(whole: Tensor, local: Tensor, name: str, case: Case, tp_rank: int) -> Tensor:
    """This TP rank's slice, along the one dimension in which the shapes differ."""
    if whole.shape == local.shape:
        return whole
    (dimension,) = (d for d in range(whole.dim()) if whole.shape[d] != local.shape[d])
    assert whole.shape[dimension] == case.tp * local.shape[dimension], name
    return whole.chunk(case.tp, dimension)[tp_rank]
