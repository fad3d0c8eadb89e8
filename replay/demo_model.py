"""This rank's part of a loaded model: the demo's model chunks for any tensor, pipeline, expert and
context parallelism.

``build_chunks`` takes the whole model of ``load_hf_model`` and gives each parameter of this rank
its slice of it, so every layout has one and the same weights. A process holds the whole model for
that long: meant for models that fit a machine several times.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packhorse.replay.checkpoint import MoeConfig
from packhorse.replay.megatron import expert_biases, restore_router_buffers


@dataclass(frozen=True)
class Sizes:
    """Ranks of each kind; ``ep`` data-parallel replicas of the rest bring the ranks of ``--ep``."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.ep

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks of an expert: with ``ep`` whole ones, since these ranks gather
        unequal numbers of tokens, which gloo does not."""
        return self.tp if self.ep == 1 else 1

    @contextmanager
    def started(self, seed: int = 0) -> Iterator[None]:
        """Megatron's process groups; torch.distributed has ``world`` processes."""
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
        )
        try:
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            yield
        finally:
            parallel_state.destroy_model_parallel()


def build_chunks(
    whole: Any,
    config: MoeConfig,
    sizes: Sizes,
    *,
    num_microbatches: int,
    core_attention: Any = None,
) -> list[Any]:
    """This rank's model chunks, filled; inside ``sizes.started()``.

    Args:
        whole: ``load_hf_model``'s, of one rank.
        config: of its checkpoint.
        num_microbatches: of a schedule: the interleaved one takes them in groups of its divisors.
        core_attention: a class in the place of Megatron's.
    """
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    interleaved = sizes.vpp > 1
    rank_config = dataclasses.replace(
        whole.config,
        tensor_model_parallel_size=sizes.tp,
        sequence_parallel=sizes.tp > 1,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if interleaved else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        # microbatches have lengths of their own
        variable_seq_lengths=sizes.pp > 1,
        # with two stages both neighbours are one rank: batched sends, and shapes sent both ways in
        # one call, would reach the wrong microbatch
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        # a last group smaller than the number of stages is refused by Megatron
        microbatch_group_size_per_vp_stage=(
            None
            if not interleaved
            else sizes.pp
            if num_microbatches % sizes.pp == 0
            else num_microbatches
        ),
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for i in range(sizes.vpp):
        virtual = {"vp_stage": i} if interleaved else {}
        spec = get_gpt_decoder_block_spec(
            rank_config, use_transformer_engine=False, normalization="RMSNorm", **virtual
        )
        spec.layer_norm = WrappedTorchNorm  # with Apex the default is a LayerNorm
        if core_attention is not None:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = core_attention
        chunk = GPTModel(
            config=rank_config,
            transformer_layer_spec=spec,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_positions,
            pre_process=stage == 0 and i == 0,
            post_process=stage == sizes.pp - 1 and i == sizes.vpp - 1,
            position_embedding_type="rope",
            rotary_base=config.rope_theta,
            rotary_percent=config.rotary_percent,
            share_embeddings_and_output_weights=False,
            **virtual,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        first = next(whole.parameters())
        chunks.append(chunk.to(first.device, first.dtype))
        restore_router_buffers(chunk)
    _fill(chunks, whole, config, sizes)
    return chunks


# --- weights --------------------------------------------------------------------------------------


def whole_name(chunk: Any, name: str, experts_before: int) -> str:
    """Name in the whole model of this chunk's parameter ``name``.

    Args:
        experts_before: experts of a layer that ranks before this one hold.
    """

    def layer(match: re.Match[str]) -> str:
        return f"layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        return f"local_experts.{experts_before + int(match[1])}."

    name = re.sub(r"(?<=^decoder\.)layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def _fill(chunks: list[Any], whole: Any, config: MoeConfig, sizes: Sizes) -> None:
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    experts_before = ep_rank * config.num_experts // sizes.ep
    weights = dict(whole.named_parameters())
    biases = dict(expert_biases(whole))
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                given = weights[whole_name(chunk, name, experts_before)]
                parameter.copy_(tensor_slice(given, parameter.shape, name, sizes.tp, tp_rank))
            for name, bias in expert_biases(chunk):
                bias.copy_(biases[whole_name(chunk, name, experts_before)])


def tensor_slice(whole: Tensor, shape: torch.Size, name: str, size: int, rank: int) -> Tensor:
    """Of the whole weight [out, in] what tensor-parallel rank ``rank`` of ``size`` holds.

    A run of rows, or of columns, whichever ``shape`` has fewer of. The rows of a gated ``fc1`` are
    the gate's and then the up-projection's: a rank holds its run of each. Those of the attention
    stand key-value head by key-value head, a vocabulary's id by id.

    Raises:
        ValueError: the slice is not of ``shape``.
    """
    if whole.shape == shape:
        return whole
    if name.endswith("linear_fc1.weight"):
        part = whole.unflatten(0, (2, -1)).chunk(size, 1)[rank].flatten(0, 1)
    else:
        part = whole.chunk(size, 0 if whole.shape[0] != shape[0] else 1)[rank]
    if part.shape != shape:
        raise ValueError(
            f"demo: {name} is {list(shape)} on this rank, {list(part.shape)} was cut from the"
            f" model's {list(whole.shape)}"
        )
    return part
