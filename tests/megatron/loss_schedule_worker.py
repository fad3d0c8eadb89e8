"""One of two ranks of a pipeline schedule whose only gradients are the router's own losses'.

usage: python -m tests.megatron.loss_schedule_worker RANK STORE OUT PARALLELISM

Runs each of ``cases()`` through Megatron's schedule, data-parallel wrapper and
``finalize_model_grads``, and leaves in OUT what the router was given and its final gradient.
"""

import contextlib
import sys
from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.distributed as dist

from packhorse.packed.tensor import PackedTensor
from packhorse.replay.cpu_megatron import install_cpu_shims
from packhorse.replay.layout import TokenLayout
from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession
from tests.megatron.helpers import EXPERTS, TOPK, VOCAB, WIDTH, make_config

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
COEFFICIENT, LENGTH, BATCH, MICROBATCHES = 0.5, 8, 2, 2
#: ranks hold unlike numbers of real tokens: (data-parallel rank, micro-batch) -> of each trajectory
PADDED = {(0, 0): (7, 5), (0, 1): (3, 2), (1, 0): (0, 0), (1, 1): (8, 7)}


@dataclass(frozen=True)
class LossCase:
    """``how`` the routers run: with "padded" or "whole" routes, "live" without routes, or "plain":
    Megatron without a session and without a mask. All but the first have no padding."""

    kind: str
    per_token: bool
    how: str


def cases():
    return [
        LossCase(kind, per_token, how)
        for kind in KINDS
        for per_token in (False, True)
        for how in ("padded", "whole", "live", "plain")
    ]


def captured_of(case, dp_rank, microbatch):
    return PADDED[dp_rank, microbatch] if case.how == "padded" else (LENGTH,) * BATCH


def routes_of(dp_rank, microbatch):
    """[LENGTH, K] of each trajectory; a prefix of it is captured."""
    generator = np.random.default_rng([5, dp_rank, microbatch])
    return generator.random((BATCH, LENGTH, EXPERTS)).argsort(-1)[..., :TOPK]


def positions_of(parallelism, rank):
    """Of the router's rows on this rank, each of which holds every trajectory."""
    if parallelism == "tp":
        return list(range(4 * rank, 4 * rank + 4))
    if parallelism == "cp":  # zigzag: the first and last quarter, or both in the middle
        return [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
    return list(range(LENGTH))


class NoAttention(torch.nn.Module):
    """Each token keeps its own value, so no tokens of other ranks are needed."""

    def __init__(self, *args, **options):
        super().__init__()

    def forward(self, query, key, value, *args, **options):
        return value.reshape(*value.shape[:2], -1)


def build(case, parallelism):
    """A model in the wrapper that sums gradients, and its router."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    settings = {"num_layers": 1, "calculate_per_token_loss": case.per_token,
                "moe_router_enable_expert_bias": False}  # fmt: skip
    if case.kind == "z_loss":
        settings["moe_z_loss_coeff"] = COEFFICIENT
    else:
        settings["moe_router_load_balancing_type"] = case.kind
        settings["moe_aux_loss_coeff"] = COEFFICIENT
    if parallelism == "tp":
        settings |= {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    if parallelism == "cp":
        settings["context_parallel_size"] = 2
    config = make_config(**settings)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = NoAttention
    torch.manual_seed(7)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    model.model_type = ModelType.encoder_or_decoder
    router = model.decoder.layers[0].mlp.router
    generator = torch.Generator().manual_seed(3)
    router.weight.data.copy_(0.3 * torch.randn(EXPERTS, WIDTH, generator=generator))
    config.finalize_model_grads_func = finalize_model_grads
    wrapper = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config=config, ddp_config=wrapper, module=model), router


def make_microbatch(case, config, dp_rank, microbatch):
    captured = captured_of(case, dp_rank, microbatch)
    layout = TokenLayout.from_megatron([LENGTH] * BATCH, config, format="bshd", device="cpu")
    if case.how == "live":
        return ReplayMicrobatch(layout, None)
    routes = routes_of(dp_rank, microbatch)
    packed = PackedTensor.from_segments(
        [
            torch.tensor(part[:count, None]).to(torch.uint8)
            for part, count in zip(routes, captured, strict=True)
        ]
    )
    trained = [(np.arange(LENGTH) > 0) & (np.arange(LENGTH) <= count) for count in captured]
    return ReplayMicrobatch(layout, packed, loss_masks=trained)


def run(case, parallelism, rank):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dp_rank = rank if parallelism == "dp" else 0
    model, router = build(case, parallelism)
    session = None
    if case.how != "plain":
        session = ReplaySession(model, captured_layers=CapturedLayers.decoder(1))
    given = [make_microbatch(case, model.config, dp_rank, m) for m in range(MICROBATCHES)]
    own = positions_of(parallelism, rank)
    columns = own if parallelism == "cp" else list(range(LENGTH))  # of the model's input
    hidden = []
    router.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].detach().double()))

    def forward_step(data, chunk):
        microbatch = next(data)
        extra = {}
        if session is not None:
            extra["padding_mask"] = session.begin(chunk).padding_mask
        generator = torch.Generator().manual_seed(11 + 2 * microbatch + dp_rank)
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)[:, columns]
        positions = torch.tensor(columns).expand(BATCH, -1)
        output = chunk(ids, positions, None, **extra)
        captured = captured_of(case, dp_rank, microbatch)
        tokens = sum(c < count for c in columns for count in captured)  # real ones

        def loss(values):
            nothing = 0.0 * values.float().sum()
            return (nothing, torch.tensor(tokens), {}) if case.per_token else (nothing, {})

        return output, loss

    with contextlib.nullcontext() if session is None else session.schedule(given):
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(MICROBATCHES)),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
    return {
        "gradient": router.weight.main_grad.detach().double().clone(),
        "weight": router.weight.detach().double().clone(),
        "hidden": hidden,  # of each micro-batch [positions, trajectories, H]
    }


def main(rank, store, out, parallelism):
    torch.set_num_threads(1)
    install_cpu_shims()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2 if parallelism == "tp" else 1,
        context_parallel_size=2 if parallelism == "cp" else 1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.save({astuple(case): run(case, parallelism, rank) for case in cases()}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
