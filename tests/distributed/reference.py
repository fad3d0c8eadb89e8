"""The same training on one rank, without the package: what a distributed run is compared with.

Each trajectory goes through the whole model by itself, without pads, recompute or schedule; the
routers are answered by an object of this file. Weights of any rank are slices of this model's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.distributed.attention import use_gathered_attention
from tests.distributed.cases import (
    EXPERTS,
    RECOMPUTE,
    TOPK,
    VOCAB,
    WIDTH,
    Case,
    Trajectory,
    trajectories,
)

LEARNING_RATE = 1e-2


def start_ranks(**sizes: Any) -> None:
    """Megatron's groups for these sizes; what they leave over of the world is data parallel."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def build_chunks(case: Case, *, parallel: bool) -> list[Any]:
    """This rank's model chunks, or the whole model on one rank."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": case.num_layers,
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
        "moe_layer_freq": [0] * case.dense + [1] * (case.num_layers - case.dense),
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": True,
    }
    vpp = 1
    if parallel:
        vpp = case.vpp
        settings |= {
            "tensor_model_parallel_size": case.tp,
            "sequence_parallel": case.tp > 1,
            "pipeline_model_parallel_size": case.pp,
            "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
            "context_parallel_size": case.cp,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp or case.tp,
            # with two stages both neighbours are one rank: batched sends would cross
            "batch_p2p_comm": vpp == 1,
            **RECOMPUTE[case.recompute],
            **case.settings,
        }
    config = TransformerConfig(**settings)
    stage, stages = 0, 1
    if parallel:
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), case.pp
    chunks = []
    for i in range(vpp):
        torch.manual_seed(7)
        virtual = {"vp_stage": i} if vpp > 1 else {}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **virtual)
        if parallel and (case.cp > 1 or case.format == "thd"):
            use_gathered_attention(spec)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=stage == 0 and i == 0,
            post_process=stage == stages - 1 and i == vpp - 1,
            position_embedding_type="rope",
            **virtual,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk)
    return chunks


def routers_of(chunk: Any) -> dict[int, Any]:
    """Routers by their 0-based global layer."""
    from megatron.core.transformer.moe.router import TopKRouter

    return {m.layer_number - 1: m for m in chunk.modules() if isinstance(m, TopKRouter)}


# --- slices of the whole model --------------------------------------------------------------------


def whole_name(chunk: Any, name: str, case: Case, ep_rank: int) -> str:
    """Name in the whole model of a parameter of this rank's chunk."""

    def layer(match: re.Match) -> str:
        return f"layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match) -> str:
        return f"local_experts.{ep_rank * (EXPERTS // case.ep) + int(match[1])}."

    name = re.sub(r"(?<=decoder\.)layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def slice_like(whole: Tensor, local: Tensor, name: str, case: Case, tp_rank: int) -> Tensor:
    """This TP rank's slice, along the one dimension in which the shapes differ."""
    if whole.shape == local.shape:
        return whole
    (dimension,) = (d for d in range(whole.dim()) if whole.shape[d] != local.shape[d])
    assert whole.shape[dimension] == case.tp * local.shape[dimension], name
    return whole.chunk(case.tp, dimension)[tp_rank]


# --- one rank -------------------------------------------------------------------------------------


class _GivenRoutes:
    """Answers a router: these experts for the first rows, its own choice or 0..K-1 for others."""

    def __init__(self) -> None:
        self.routes = torch.zeros(0, TOPK, dtype=torch.long)
        self.live = 0
        self.chosen: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        ids = default(scores.detach(), topk, num_groups, group_topk)[1].clone()
        self.chosen = ids[: len(self.routes) + self.live].clone()
        ids[: len(self.routes)] = self.routes
        ids[len(self.routes) + self.live :] = torch.arange(topk)
        return scores.gather(1, ids), ids


@dataclass
class ReferenceStep:
    """One pass over all trajectories of all data-parallel ranks.

    Attributes:
        losses: sum over the trained tokens of each (data-parallel rank, microbatch).
        gradients: of the mean over trained tokens; empty for a forward-only pass.
        expert_bias: of each global layer, after Megatron's update.
        changed: share of replayed rows that the router itself would have sent elsewhere.
    """

    losses: dict[tuple[int, int], float]
    gradients: dict[str, Tensor]
    expert_bias: dict[int, Tensor]
    changed: float


class Reference:
    """The whole model on this process. ``start_ranks()`` must have made groups of size one."""

    def __init__(self, case: Case) -> None:
        self.case = case
        (self.model,) = build_chunks(case, parallel=False)
        with torch.no_grad():  # routers of a fresh model are nearly indifferent
            for router in routers_of(self.model).values():
                router.weight.mul_(20)
        self.weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._adam = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def run(self, kind: str) -> ReferenceStep:
        """ "forward only", or "training": then also the optimizer's step where the case has one."""
        training = kind == "training"
        self.model.zero_grad()
        losses: dict[tuple[int, int], float] = {}
        counts = {layer: torch.zeros(EXPERTS) for layer in routers_of(self.model)}
        same = replayed = num_trained = 0
        with contextlib.nullcontext() if training else torch.no_grad(), self._routed() as answers:
            for dp_rank in range(self.case.dp):
                for m in range(self.case.microbatches):
                    total = 0.0
                    for trajectory in trajectories(self.case, dp_rank, m):
                        loss = self._loss(trajectory, answers)
                        if training:
                            loss.backward()
                        total += float(loss.detach())
                        num_trained += int(trajectory.trained.sum())
                        for layer, answer in answers.items():
                            chosen, given = answer.chosen, answer.routes
                            assert chosen is not None
                            head = chosen[: len(given)].sort(-1).values
                            same += int((head == given.sort(-1).values).all(-1).sum())
                            replayed += len(given)
                            ids = torch.cat([given, chosen[len(given) :]])
                            counts[layer] += torch.bincount(ids.flatten(), minlength=EXPERTS)
                    losses[dp_rank, m] = total
        gradients = {}
        if training:
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None, name
                parameter.grad /= num_trained
                gradients[name] = parameter.grad.clone()
            for layer, router in routers_of(self.model).items():
                offset = counts[layer].mean() - counts[layer]
                router.expert_bias += torch.sign(offset) * router.config.moe_router_bias_update_rate
            if self.case.optimizer != "none":
                self._adam.step()
        bias = {layer: r.expert_bias.clone() for layer, r in routers_of(self.model).items()}
        return ReferenceStep(losses, gradients, bias, 1 - same / replayed)

    def _loss(self, trajectory: Trajectory, answers: dict[int, _GivenRoutes]) -> Tensor:
        length = len(trajectory.tokens)
        for layer, answer in answers.items():
            answer.routes = torch.from_numpy(trajectory.routes[:, layer].copy())
            answer.live = trajectory.live
        tokens = torch.from_numpy(trajectory.tokens)
        values = self.model(
            input_ids=tokens[None],
            position_ids=torch.arange(length)[None],
            attention_mask=torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
            labels=tokens.roll(-1)[None],
        )
        return values[0, :-1][torch.from_numpy(trajectory.trained)[1:]].sum()

    @contextlib.contextmanager
    def _routed(self) -> Iterator[dict[int, _GivenRoutes]]:
        routers = routers_of(self.model)
        answers = {layer: _GivenRoutes() for layer in routers}
        before = {layer: router.router_replay for layer, router in routers.items()}
        for layer, router in routers.items():
            router.router_replay = answers[layer]
        try:
            yield answers
        finally:
            for layer, router in routers.items():
                router.router_replay = before[layer]
