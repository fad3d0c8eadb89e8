"""Small models, random routes, and what Megatron's routers did, seen through Megatron itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.layout import TokenLayout
from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession

EXPERTS, TOPK, VOCAB, WIDTH = 8, 2, 64, 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "full uniform 3": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 3,
    },
    "full block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
#: decoder layers of a 3-layer model whose router is called again in the backward
RECOMPUTED_LAYERS = {
    "none": (),
    "full uniform": (0, 1, 2),
    "full uniform 3": (0, 1, 2),
    "full block": (0,),
    "moe": (0, 1, 2),
}


def megatron_version() -> tuple[int, ...]:
    import megatron.core

    return tuple(int(part) for part in megatron.core.__version__.split("+")[0].split(".")[:2])


# --- models ---------------------------------------------------------------------------------------


def make_config(**over: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 3,
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
    settings.update(over)
    return TransformerConfig(**settings)


def build_model(*, seed: int = 7, tied: bool = False, **over: Any) -> Any:
    """A GPTModel from local modules; one seed gives one set of weights. ``tied``: the embedding is
    the LM head too."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    torch.manual_seed(seed)
    config = make_config(**over)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    extra = {}
    if config.mtp_num_layers:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker.clear()  # process-global, sized by the first model's heads
        extra["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        **extra,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model.to(DEVICE)


def build_dense_model() -> Any:
    return build_model(
        num_moe_experts=None, moe_ffn_hidden_size=None, moe_router_enable_expert_bias=False
    )


def keep_layers(model: Any, kept: slice) -> None:
    """Make ``model`` the stage of a pipeline that holds these layers (and both its ends)."""
    for index in sorted(set(range(len(model.decoder.layers))) - set(range(64)[kept]), reverse=True):
        del model.decoder.layers[index]
    model.decoder.num_layers_per_pipeline_rank = len(model.decoder.layers)


def build_hybrid(pattern: str, **over: Any) -> Any:
    """A HybridModel (0.18 and later) of attention "*", dense "-" and MoE "E" layers.

    The shipped specs need Transformer Engine; this one is made of the GPT modules.
    """
    import megatron.core.models.hybrid.hybrid_block as hybrid_block
    from megatron.core.enums import ModelType
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm
    torch.manual_seed(7)
    config = make_config(num_layers=len(pattern), **over)
    dense = get_gpt_layer_local_spec(num_experts=None)
    moe = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    parts = type(dense.submodules)

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
    model = HybridModel(
        config=config,
        hybrid_stack_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
    )
    model.model_type = ModelType.encoder_or_decoder
    return model.to(DEVICE)


def routers_of(model: Any, mtp: bool = False) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter) and ("mtp" in name) == mtp
    ]


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if DEVICE.type == "cuda":  # atomic additions are not ordered
            torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert torch.equal(actual[name], gradient), name


# --- microbatches ---------------------------------------------------------------------------------


@dataclass
class Batch:
    """A microbatch, the routes in it as plain arrays, and the model's inputs."""

    microbatch: ReplayMicrobatch
    routes: list[np.ndarray]  # per trajectory [captured, L, K]
    inputs: dict[str, torch.Tensor]

    def rows(self, position: int) -> list[list[int] | str]:
        """What each router row of one captured layer holds: ids, "dummy" or "live".

        Written from the definition of the "bshd" order, position outer and trajectory inner, or of
        "thd", one padded sequence after another.
        """
        layout = self.microbatch.layout
        slots = []
        if layout.format == "bshd":
            for s in range(max(layout.padded_lengths)):
                slots += [(i, s) for i in range(len(layout.lengths))]
        else:
            for i, padded in enumerate(layout.padded_lengths):
                slots += [(i, s) for s in range(padded)]
        rows: list[list[int] | str] = []
        for i, s in slots:
            if i == len(layout.lengths):  # the slab's own pad
                rows.append("dummy")
                continue
            captured, live = len(self.routes[i]), self.microbatch.live_counts[i]
            if s < captured:
                rows.append(sorted(self.routes[i][s, position].tolist()))
            else:
                rows.append("live" if s < captured + live else "dummy")
        return rows


def make_batch(
    lengths: Sequence[int] = (6, 4),
    captured: Sequence[int] | None = None,
    *,
    num_layers: int = 3,
    dense_layers: Sequence[int] = (),
    seed: int = 0,
    format: str = "bshd",
    routes_device: str = "cpu",
    dtype: torch.dtype = torch.uint8,
    with_routes: bool = True,
    loss_masks: Any = "captured",
    layout: dict[str, Any] | None = None,
    **options: Any,
) -> Batch:
    """Random distinct routes; by default all but the last token of each trajectory is captured.

    ``loss_masks="captured"`` trains every target that the captured rows reach.
    """
    generator = np.random.default_rng(seed)
    if captured is None:
        captured = [length - 1 for length in lengths]
    routes = []
    for count in captured:
        draw = generator.random((count, num_layers, EXPERTS)).argsort(-1)[..., :TOPK]
        draw[:, list(dense_layers)] = 0
        routes.append(draw)
    token_layout = TokenLayout.build(list(lengths), format=format, device=DEVICE, **(layout or {}))  # type: ignore[arg-type]
    packed = None
    if with_routes:
        packed = PackedTensor.from_segments(
            [torch.tensor(part).to(routes_device, dtype) for part in routes]
        )
    if loss_masks == "captured":
        loss_masks = [
            np.arange(length) <= count if length else np.zeros(0, bool)
            for length, count in zip(lengths, captured, strict=True)
        ]
        for mask in loss_masks:
            mask[:1] = False
    microbatch = ReplayMicrobatch(token_layout, packed, loss_masks=loss_masks, **options)
    return Batch(microbatch, routes, make_inputs(token_layout, seed))


def make_inputs(layout: TokenLayout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, VOCAB, (2, layout.num_tokens), generator=generator).to(DEVICE)
    ids, labels = layout.to_model(flat[0]), layout.to_model(flat[1])
    width = ids.shape[1]
    owner = torch.zeros(width, dtype=torch.long)
    if layout.format == "thd":
        owner = torch.repeat_interleave(
            torch.arange(len(layout.padded_lengths)), torch.tensor(layout.padded_lengths)
        )
    hidden = torch.ones(width, width, dtype=torch.bool).triu(1) | (owner[:, None] != owner)
    return {
        "input_ids": ids,
        "position_ids": layout.to_model(layout.position_ids()),
        "attention_mask": hidden[None, None].to(DEVICE),
        "labels": labels,
    }


# --- schedules ------------------------------------------------------------------------------------


@dataclass
class Ran:
    losses: list[float] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)


def run_schedule(
    session: ReplaySession,
    model: Any,
    batches: Sequence[Batch],
    *,
    training: bool = True,
    before_forward: Callable[[int, Any], None] | None = None,
    pass_mask: bool = True,
) -> Ran:
    """One schedule of Megatron's own; fresh gradients."""
    ran = Ran()

    def forward_step(data: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Callable]:
        step = session.begin(chunk)
        batch = next(data)
        assert step.microbatch is batch.microbatch
        ran.masks.append(step.padding_mask)
        if before_forward is not None:
            before_forward(step.index, chunk)
        extra = {"padding_mask": step.padding_mask} if pass_mask else {}
        output = chunk(**batch.inputs, **extra)

        def loss(values: torch.Tensor) -> tuple[torch.Tensor, dict]:
            ran.losses.append(float(values.detach().float().mean()))
            return values.float().mean(), {}

        return output, loss

    with session.schedule([batch.microbatch for batch in batches]):
        run_megatron(forward_step, model, batches, training)
    return ran


def run_megatron(forward_step: Any, model: Any, batches: Sequence[Any], training: bool) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for parameter in model.parameters():
        parameter.grad = None
    with contextlib.nullcontext() if training else torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(list(batches)),
            model=model,
            num_microbatches=len(batches),
            seq_length=32,
            micro_batch_size=1,
            forward_only=not training,
        )


def make_session(model: Any, num_layers: int = 3, **options: Any) -> ReplaySession:
    return ReplaySession(model, captured_layers=CapturedLayers.decoder(num_layers), **options)


# --- what was routed ------------------------------------------------------------------------------


@dataclass
class Call:
    """One router call: which router, recompute or first pass, and the experts of each row."""

    router: Any
    recompute: bool
    rows: list[list[int]]
    probs: torch.Tensor  # [T, E]


class RouteLog:
    """Keeps the routing map that each router of Megatron returned, in order of the calls."""

    def __enter__(self) -> RouteLog:
        from megatron.core.transformer.moe.router import TopKRouter

        self.calls: list[Call] = []
        self._original = TopKRouter.routing
        log = self

        def routing(router: Any, logits: Any, *args: Any, **options: Any) -> Any:
            probs, routing_map = log._original(router, logits, *args, **options)
            rows = [row.nonzero().flatten().tolist() for row in routing_map.cpu()]
            recompute = torch._C._current_graph_task_id() != -1
            log.calls.append(Call(router, recompute, rows, probs.detach().cpu()))
            return probs, routing_map

        TopKRouter.routing = routing
        return self

    def __exit__(self, *exc: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        TopKRouter.routing = self._original

    def of(self, router: Any, *, recompute: bool) -> list[list[list[int]]]:
        return [
            call.rows
            for call in self.calls
            if call.router is router and call.recompute is recompute
        ]


def assert_routed(actual: list[list[int]], expected: list[list[int] | str]) -> None:
    """Each row holds the replayed ids, or K distinct experts where it is a dummy or live."""
    assert len(actual) == len(expected)
    for row, (experts, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert len(experts) == TOPK, f"row {row}"
        if wanted == "dummy":
            assert experts == list(range(TOPK)), f"row {row}"
        elif wanted != "live":
            assert experts == wanted, f"row {row}"


def assert_replayed(
    log: RouteLog,
    model: Any,
    batches: Sequence[Batch],
    *,
    positions: Sequence[int] = (0, 1, 2),
    recomputed: Sequence[int] = (),
) -> None:
    """Every router routed what its captured layer says, in both passes."""
    for router, position in zip(routers_of(model), positions, strict=True):
        first = log.of(router, recompute=False)
        again = log.of(router, recompute=True)
        assert len(first) == len(batches)
        assert len(again) == (len(batches) if router.layer_number - 1 in recomputed else 0)
        for rows, batch in zip(first, batches, strict=True):
            assert_routed(rows, batch.rows(position))
        assert not again or again == first


def assert_clean(model: Any, before: Sequence[Any]) -> None:
    """Nothing of a schedule is left on the routers or in Megatron's global state."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routers = [*routers_of(model), *routers_of(model, mtp=True)]
    assert [router.router_replay for router in routers] == list(before)
    assert not any(router._forward_pre_hooks for router in routers)
    assert not hasattr(TopKRouter._apply_expert_bias, "packhorse_shim")
    for instance in RouterReplay.global_router_replay_instances:
        assert instance.target_topk_idx is None
        assert instance.replay_backward_list == []
        assert instance.router_replay_action is None


def replay_objects(model: Any) -> list[Any]:
    return [router.router_replay for router in [*routers_of(model), *routers_of(model, mtp=True)]]
