"""One GRPO training step in Megatron-core, with the rollout's routes and supports replayed.

    python examples/megatron_grpo_step.py                         one process, CPU or GPU
    torchrun --nproc-per-node 2 examples/megatron_grpo_step.py    two data-parallel ranks
    ... --no-replay                                               routers choose for themselves

What a Megatron trainer has already (forward_step, loss_func, schedule, DDP, optimizer) is written
as in Megatron's pretrain scripts; the three lines in it that replay adds are marked ``# replay``,
inside ``session.schedule``. The rollout is the packaged capture of vLLM: 9 trajectories, taken here
for three groups of three. Its rewards are made up: the share of distinct tokens in a response.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import packhorse.replay
from packhorse import (
    Capture,
    CapturedLayers,
    PackedTensor,
    ReplayMicrobatch,
    ReplaySession,
    TokenLayout,
    gather_rows,
    install_cpu_shims,
    load_hf_model,
    merge_tallies,
    score_microbatch,
    single_process,
    tally_logprobs,
    tally_metrics,
    wrap_forward_step,
)
from packhorse.replay.checkpoint import read_config
from packhorse.replay.demo_model import Sizes, build_chunks

DATA = Path(next(iter(packhorse.replay.__path__))) / "data"
GROUP_SIZE = 3
CLIP = 0.2


@dataclass
class Batch:
    """One microbatch: a group of trajectories."""

    layout: TokenLayout
    token_ids: PackedTensor  # [tokens] int64
    routes: PackedTensor  # [rows, L, K] as the rollout returned them
    support: PackedTensor  # [response tokens, C]
    old_logprobs: Tensor  # [response tokens], the rollout's
    advantages: Tensor  # [response tokens]
    loss_masks: list[np.ndarray]  # of each trajectory [length] bool


# --- the trainer's own ----------------------------------------------------------------------------


def forward_step(data_iterator: Iterator[Batch], model: Any, *, step: Any):  # replay: takes step
    batch = next(data_iterator)
    layout = batch.layout
    tokens = gather_rows(batch.token_ids.values, layout.token_row_ids())
    logits = model(
        layout.to_model(tokens),
        layout.to_model(layout.position_ids()),
        None,
        padding_mask=step.padding_mask,  # replay: pads and rows without a route
    )
    return logits, partial(loss_func, batch)


def loss_func(batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    # over the ids that the sampler kept: the distribution that was sampled from
    scores = score_microbatch(logits, batch.layout, batch.token_ids, batch.support)
    logprobs = scores.logprobs.values
    ratio = torch.exp(logprobs - batch.old_logprobs)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).sum()
    num_tokens = torch.tensor(logprobs.numel(), dtype=torch.int, device=logprobs.device)
    kept = {
        "loss": loss.detach().clone(),  # the schedule scales the loss in place
        "num_tokens": num_tokens,
        "ratio": torch.stack([ratio.detach().min(), ratio.detach().max()]),
        "tally": tally_logprobs(logprobs, batch.old_logprobs, torch.ones_like(logprobs)),
    }
    return loss, num_tokens, kept


def train_step(model: Any, optimizer: Any, batches: list[Batch], replay: bool) -> dict[str, float]:
    """Forward, backward and update; figures over all data-parallel ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    session = ReplaySession(model, captured_layers=CapturedLayers.decoder(4))
    microbatches = [
        ReplayMicrobatch(b.layout, b.routes if replay else None, loss_masks=b.loss_masks)
        for b in batches
    ]
    with session.schedule(microbatches):
        results = get_forward_backward_func()(
            forward_step_func=wrap_forward_step(forward_step, session),  # replay: wraps it
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=max(b.layout.num_tokens for b in batches),
            micro_batch_size=1,
            forward_only=False,
        )
    updated, grad_norm, _ = optimizer.step()
    report = session.report()
    return {
        **reduce_results(results),
        "grad_norm": float(grad_norm),
        "updated": bool(updated),
        "rows_replayed": report.rows_replayed,  # of this rank
    }


def reduce_results(results: list[dict[str, Any]]) -> dict[str, float]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, results)
    everything = [result for rank in ranks for result in rank]
    num_tokens = sum(int(result["num_tokens"]) for result in everything)
    figures = tally_metrics(merge_tallies(result["tally"] for result in everything))
    return {
        "loss": sum(float(result["loss"]) for result in everything) / num_tokens,
        "ratio_min": min(float(result["ratio"][0]) for result in everything),
        "ratio_max": max(float(result["ratio"][1]) for result in everything),
        "abs_diff_mean": float(figures["logprobs/abs_diff_mean"]),
    }


# --- data -----------------------------------------------------------------------------------------


def make_batches(config: Any) -> list[Batch]:
    """This data-parallel rank's groups of the packaged rollout."""
    from megatron.core import parallel_state

    capture = Capture.load(
        DATA / "vllm_tiny_moe.npz", num_experts=8, vocab_size=512, num_layers=4, topk=2
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = []
    for start in range(0, capture.num_trajectories, GROUP_SIZE):
        group = slice(start, start + GROUP_SIZE)
        prompts, responses = capture.prompt_ids[group], capture.response_ids[group]
        rewards = np.array([len(np.unique(ids)) / len(ids) for ids in responses])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        sampled = [len(ids) for ids in responses]
        lengths = capture.lengths[group]
        # ranks, groups and recipes from Megatron; each rank gets its own token order
        layout = TokenLayout.from_megatron(lengths, config, format="bshd", device=device)
        pairs = zip(prompts, responses, strict=True)
        batches.append(
            Batch(
                layout=layout,
                token_ids=PackedTensor.from_segments(
                    [torch.from_numpy(np.concatenate(pair)) for pair in pairs]
                ).to(device),
                routes=capture.routes[group].to(device),
                support=capture.support[group].to(device),
                old_logprobs=_floats(np.concatenate(capture.sampled_logprobs[group]), device),
                advantages=_floats(np.repeat(advantages, sampled), device),
                loss_masks=[
                    np.arange(length) >= length - count
                    for length, count in zip(lengths, sampled, strict=True)
                ],
            )
        )
    rank = parallel_state.get_data_parallel_rank()
    return batches[rank :: parallel_state.get_data_parallel_world_size()]


def _floats(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)


# --- model, optimizer, ranks ----------------------------------------------------------------------


def build_model(whole: Any) -> Any:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    (chunk,) = build_chunks(whole, read_config(DATA / "tiny_moe"), Sizes(), num_microbatches=1)
    chunk.config.calculate_per_token_loss = True  # the mean over the tokens of all ranks
    chunk.config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(
        config=chunk.config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        module=chunk,
    )


def build_optimizer(model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-5, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32
    )
    return get_megatron_optimizer(config, [model])


@contextmanager
def ranks() -> Iterator[None]:
    """Megatron's groups: torchrun's processes, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with single_process():
            yield
        return
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run(replay: bool = True) -> dict[str, float]:
    """One step; its figures, the same on every rank but for ``rows_replayed``."""
    install_cpu_shims()  # does nothing for a GPU with Transformer Engine
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with single_process():
        whole = load_hf_model(DATA / "tiny_moe", recompute="full")
    with ranks():
        model = build_model(whole)
        batches = make_batches(model.module.config)
        return train_step(model, build_optimizer(model), batches, replay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-replay", action="store_true", help="routers choose for themselves")
    figures = run(replay=not parser.parse_args().no_replay)
    if os.environ.get("RANK", "0") == "0":
        print(" ".join(f"{name}={value:.6g}" for name, value in figures.items()))  # noqa: T201


if __name__ == "__main__":
    main()
