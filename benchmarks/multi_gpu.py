"""What replay and scoring cost on several GPUs of one host, over NCCL.

    torchrun --nproc-per-node 2 benchmarks/multi_gpu.py [--json out.jsonl] [--repeats 200] [--dry]

    session    host time of a microbatch beside its kernel call, as ``session_overhead.py`` measures
               it, of a stack of 48 routers whose tokens are shared out over context-parallel ranks;
               each schedule also agrees over all ranks (one host all-reduce over gloo)
    scoring    ``lm_head_support_logprobs`` with the vocabulary sharded over all ranks, beside one
               GPU with the whole weight; 8,192 tokens, H 2,048, V 151,936, 20 ids a token, bf16;
               called plainly, with the host's launches in it, and the time on the device alone
    padding    token-experts that each rank's experts get from 90 % padding, "spread" beside
               "constant", and the time of an all-to-all of their hidden states with those sizes

Microseconds; medians, of several ranks the slowest one's, and each rank's own. ``--dry`` runs small
on the CPU over gloo, checks the results, and prints what it measured there, which says nothing.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from harness import environment
from lm_head_scoring import draw_ids
from session_overhead import RouterStack, make_config, measure_overhead
from torch import Tensor

from packhorse import PackedTensor, ReplayMicrobatch, TokenLayout
from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.routes import gather_routes
from packhorse.replay.cpu_megatron import install_cpu_shims

TOPK: Final = 8
#: some 3 ms: longer than the host takes for a call
PAUSE_CYCLES: Final = 5_000_000


class Machine:
    """This rank, where it computes, and how it measures."""

    def __init__(self, dry: bool) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.dry = dry
        if not dry:
            torch.cuda.set_device(self.rank)
        self.device = torch.device("cpu" if dry else f"cuda:{self.rank}")
        dist.init_process_group("gloo" if dry else "nccl")

    def gathered(self, value: float) -> list[float]:
        """Every rank's, in their order."""
        values = torch.zeros(self.world, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        dist.all_reduce(values)
        return values.tolist()

    def us(self, call: Callable[[], object], repeats: int, *, queued: bool = False) -> float:
        """Median time of a call on this rank's device, all ranks starting together; ``queued``: its
        launches wait there behind a pause, as where the host is ahead, and are no part of it."""
        times = []
        token = torch.zeros(1, device=self.device)
        for i in range(repeats + 10):
            dist.all_reduce(token)
            if self.dry:
                call()
                times.append(0.0)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if queued:
                torch.cuda._sleep(PAUSE_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if i >= 10:
                times.append(1e3 * begin.elapsed_time(end))
        return median(times)


def session(machine: Machine, repeats: int) -> list[dict[str, Any]]:
    from megatron.core import parallel_state, tensor_parallel

    layers, hidden, experts = (4, 32, 16) if machine.dry else (48, 2048, 128)
    parallel_state.initialize_model_parallel(context_parallel_size=machine.world)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = make_config(layers, hidden, experts)
    config.context_parallel_size = machine.world
    stack = RouterStack(config, machine.device)
    microbatches = [_microbatch(machine, layers, experts, seed) for seed in range(8)]
    lines = []
    for training in (False, True):
        figures = measure_overhead(
            stack, microbatches, repeats, training=training, meet=dist.barrier
        )
        line: dict[str, Any] = {"case": "session", "training": training, "layers": layers}
        for name, value in figures.items():
            ranks = machine.gathered(value)
            line[name], line[f"{name} of ranks"] = max(ranks), [round(us, 1) for us in ranks]
        lines.append(line)
    parallel_state.destroy_model_parallel()
    return lines


def _microbatch(machine: Machine, layers: int, experts: int, seed: int) -> ReplayMicrobatch:
    """As many tokens of a rank as ``session_overhead.py`` has: 64."""
    lengths = [33 * machine.world, 31 * machine.world]
    layout = TokenLayout.build(
        lengths, cp_size=machine.world, cp_rank=machine.rank,
        cp_group=dist.group.WORLD, device=machine.device,
    )  # fmt: skip
    captured = [length - 1 for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(sum(captured), layers, experts, generator=generator)
    values = draw.topk(TOPK, -1).indices.to(torch.uint8).to(machine.device)
    return ReplayMicrobatch(layout, PackedTensor.from_lengths(values, captured))


def scoring(machine: Machine, repeats: int) -> list[dict[str, Any]]:
    tokens, hidden_size, vocab, width = (
        (64, 32, 512, 5) if machine.dry else (8192, 2048, 151936, 20)
    )
    dtype = torch.float32 if machine.dry else torch.bfloat16
    generator = torch.Generator(machine.device).manual_seed(0)
    options = {"generator": generator, "device": machine.device}
    hidden = torch.randn(tokens, hidden_size, **options).to(dtype)  # type: ignore[call-overload]
    weight = torch.randn(vocab, hidden_size, **options).to(dtype)  # type: ignore[call-overload]
    weight /= hidden_size**0.5
    ids = draw_ids(tokens, vocab, width, 1.0, str(machine.device))
    sampled = ids[:, 0].long()
    size = vocab // machine.world
    shard = weight[machine.rank * size : (machine.rank + 1) * size].clone()

    def calls(rows: Tensor, **options: Any) -> tuple[Callable[[], Any], Callable[[], Any], Tensor]:
        main_grad = torch.zeros(rows.shape, device=machine.device)
        states, rows = hidden.clone().requires_grad_(), rows.requires_grad_()

        def forward() -> Any:
            with torch.no_grad():
                return lm_head_support_logprobs(hidden, rows.detach(), ids, sampled, **options)

        def both() -> None:
            states.grad = None
            scores = lm_head_support_logprobs(
                states, rows, ids, sampled, main_grad=main_grad, **options
            )
            scores.logprobs.sum().backward()

        return forward, both, states

    sharded = calls(shard, group=dist.group.WORLD)
    alone = calls(weight)
    error = (sharded[0]().logprobs - alone[0]().logprobs).abs().max()
    if error > 1e-4:
        raise ValueError(f"sharded logprobs are off by {float(error)}")
    lines = []
    for name, index in (("forward", 0), ("both", 1)):
        line: dict[str, Any] = {
            "case": "scoring", "part": name, "tokens": tokens, "hidden": hidden_size,
            "vocab": vocab, "width": width,
        }  # fmt: skip
        for suffix, queued in (("", False), (", on the device", True)):
            for key, (*both, _) in (("sharded", sharded), ("one GPU", alone)):
                ranks = machine.gathered(machine.us(both[index], repeats, queued=queued))
                line[key + suffix] = max(ranks)
                line[f"{key} of ranks{suffix}"] = [round(us, 1) for us in ranks]
        lines.append(line)
    return lines


def padding(machine: Machine, repeats: int) -> list[dict[str, Any]]:
    slots, real, experts, hidden_size = (640, 64, 16, 32) if machine.dry else (8192, 819, 256, 2048)
    generator = torch.Generator().manual_seed(machine.rank)
    routes = torch.rand(real, 1, experts, generator=generator).topk(TOPK, -1).indices
    row_ids = torch.arange(slots).where(torch.arange(slots) < real, -1).to(machine.device)
    routes = routes.to(torch.int16).to(machine.device)
    lines = []
    for dummy in ("constant", "spread"):
        ids, mask = gather_routes(
            routes, row_ids, range(1), num_experts=experts, dummy=dummy, ep_size=machine.world,  # type: ignore[arg-type]
            spread_offset=machine.rank * TOPK,
        )  # fmt: skip
        places = ids[0] // (experts // machine.world)
        sent = torch.bincount(places.flatten(), minlength=machine.world)
        padded = torch.bincount(places[mask].flatten(), minlength=machine.world)
        dist.all_reduce(padded)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        to, of = sent.tolist(), received.tolist()
        dtype = torch.float32 if machine.dry else torch.bfloat16
        rows = torch.zeros(sum(to), hidden_size, dtype=dtype, device=machine.device)
        out = torch.empty(sum(of), hidden_size, dtype=dtype, device=machine.device)
        exchange = functools.partial(dist.all_to_all_single, out, rows, of, to)
        counts = padded.double()
        lines.append({
            "case": "padding", "dummy": dummy, "slots": slots, "real": real, "experts": experts,
            "padding of ranks": padded.tolist(), "fullest": float(counts.max() / counts.mean()),
            "all_to_all": max(machine.gathered(machine.us(exchange, repeats))),
        })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU over gloo")
    args = parser.parse_args()
    install_cpu_shims()
    machine = Machine(args.dry)
    env = {} if args.dry else environment()
    for measure in (scoring, padding, session):
        for line in measure(machine, args.repeats):
            if machine.rank == 0:
                line = {**line, "gpus": machine.world, **env}
                print(json.dumps(line), flush=True)
                if args.json:
                    with open(args.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
