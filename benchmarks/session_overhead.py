"""What a ReplaySession costs beside its kernel call, on a stack of 48 of Megatron's TopKRouters.

    python benchmarks/session_overhead.py [--json out.jsonl] [--repeats 200] [--dry]

Two questions, each a line with its median over the repeats, microseconds:

    overhead   host time of a micro-batch with replay (begin, forward, backward, and its share of
               opening and closing the schedule) less that of the same without, less the kernel
               call (row ids, mask, each layer's ids); few tokens, so that no launch waits for the
               GPU; asked: at most 60
    ratio      GPU time of a replayed forward of the stack over the live one's, 16k tokens; asked:
               at most 1.02

Both are interleaved, a call with and a call without. It needs megatron-core and a GPU; ``--dry``
runs small on the CPU, checks the routes, and prints what it measured there, which says nothing.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from harness import environment
from torch import Tensor, nn

from packhorse import CapturedLayers, PackedTensor, ReplayMicrobatch, ReplaySession, TokenLayout
from packhorse.replay.cpu_megatron import install_cpu_shims
from packhorse.replay.device_rows import MicrobatchRows
from packhorse.replay.megatron import single_process

LAYERS, EXPERTS, TOPK, HIDDEN = 48, 128, 8, 2048
MICROBATCHES = 8


class _Layer(nn.Module):
    """As much of a transformer layer as a session looks for."""

    def __init__(self, router: nn.Module, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.mlp = nn.Module()
        self.mlp.router = router


class RouterStack(nn.Module):
    """The routers of a model without its other parts."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        self.config = config
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layers = []
        for number in range(1, config.num_layers + 1):
            router = TopKRouter(config, pg_collection=groups)
            router.set_layer_number(number)
            layers.append(_Layer(router, number))
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(layers)
        self.to(device)

    @property
    def routers(self) -> list[Any]:
        return [layer.mlp.router for layer in self.decoder.layers]

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """[s, b, H] -> the sum of every layer's probabilities, [T, E]."""
        total = torch.zeros((), device=hidden.device)
        mask = None if padding_mask is None else padding_mask.t()
        for router in self.routers:
            probs, _ = router(hidden, padding_mask=mask)
            total = total + probs
        return total


def make_config(num_layers: int, hidden: int, experts: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=num_layers, hidden_size=hidden, num_attention_heads=8, ffn_hidden_size=64,
        moe_ffn_hidden_size=32, num_moe_experts=experts, moe_router_topk=TOPK,
        moe_router_load_balancing_type="none", moe_router_score_function="softmax",
        moe_router_dtype="fp32", add_bias_linear=False, use_cpu_initialization=True,
    )  # fmt: skip


def make_microbatches(
    count: int, lengths: list[int], num_layers: int, experts: int, device: torch.device
) -> list[ReplayMicrobatch]:
    generator = torch.Generator().manual_seed(0)
    layout = TokenLayout.build(lengths, device=device)
    captured = [length - 1 for length in lengths]
    made = []
    for _ in range(count):
        draw = torch.rand(sum(captured), num_layers, experts, generator=generator)
        values = draw.topk(TOPK, -1).indices.to(torch.uint8).to(device)
        made.append(ReplayMicrobatch(layout, PackedTensor.from_lengths(values, captured)))
    return made


def check(stack: RouterStack, session: ReplaySession, microbatch: ReplayMicrobatch) -> None:
    """Raise where the first layer's router did not route what was replayed."""
    layout, router = microbatch.layout, stack.routers[0]
    hidden = torch.randn(layout.num_rank_tokens, 1, stack.config.hidden_size, device=layout.device)
    maps = []
    handle = router.register_forward_hook(lambda _, __, output: maps.append(output[1]))
    with session.schedule([microbatch]):
        stack(hidden, session.begin(stack).padding_mask)
    handle.remove()
    assert microbatch.routes is not None
    row, slot = 0, 0
    for length, captured in zip(layout.padded_lengths, microbatch.captured, strict=True):
        ids = microbatch.routes.values[row : row + captured, 0].long()
        wanted = torch.zeros_like(maps[0][slot : slot + captured]).scatter(1, ids, True)
        if not torch.equal(maps[0][slot : slot + captured], wanted):
            raise ValueError("the router did not route what was replayed")
        row, slot = row + captured, slot + length


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(call: Callable[[], object]) -> float:
    """Host time of one call; what it started on the GPU is waited for before and after."""
    wait()
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    wait()
    return 1e6 * (end - begin)


def measure_overhead(
    stack: RouterStack, microbatches: list[ReplayMicrobatch], repeats: int, *, training: bool
) -> dict[str, float]:
    session = ReplaySession(stack, captured_layers=CapturedLayers.decoder(len(stack.routers)))
    check(stack, session, microbatches[0])
    layout = microbatches[0].layout
    hidden = torch.randn(layout.num_rank_tokens, 1, stack.config.hidden_size, device=layout.device)
    mask = torch.zeros(1, layout.num_rank_tokens, dtype=torch.bool, device=layout.device)
    config, num_layers = stack.config, len(stack.routers)

    def step(padding_mask: Tensor) -> None:
        total = stack(hidden, padding_mask)
        if training:
            total.sum().backward()

    def kernel_call() -> None:
        MicrobatchRows.build(microbatches[0]).gather_targets(
            range(num_layers), num_experts=config.num_moe_experts, topk=TOPK, ep_size=1,
            dtype=torch.int64,
        )  # fmt: skip

    def schedule() -> Iterator[tuple[str, float]]:
        opened = session.schedule(microbatches)
        edges = host_us(opened.__enter__)
        for _ in microbatches:
            yield "with", host_us(lambda: step(session.begin(stack).padding_mask))
            yield "without", host_us(lambda: step(mask))
            yield "kernel call", host_us(kernel_call)
        edges += host_us(lambda: opened.__exit__(None, None, None))
        yield "open and close", edges / len(microbatches)

    with nullcontext() if training else torch.no_grad():
        for _ in range(3):
            list(schedule_without_replay(schedule, stack))
        times: dict[str, list[float]] = {}
        while len(times.get("with", ())) < repeats:
            for name, us in schedule_without_replay(schedule, stack):
                times.setdefault(name, []).append(us)
    figures = {name: median(values) for name, values in times.items()}
    figures["overhead"] = (
        figures["with"] + figures["open and close"] - figures["without"] - figures["kernel call"]
    )
    return figures


def schedule_without_replay(
    schedule: Callable[[], Iterator[tuple[str, float]]], stack: RouterStack
) -> Iterator[tuple[str, float]]:
    """The schedule; the steps "without" run on routers that hold nothing of the session's."""
    routers = stack.routers
    steps = schedule()
    placed: list[Any] = []
    for name, us in steps:
        yield name, us
        if name == "with":
            placed = [(r.router_replay, dict(r._forward_pre_hooks)) for r in routers]
            for router in routers:
                router.router_replay = None
                router._forward_pre_hooks.clear()
        elif name == "without":
            for router, (replay, hooks) in zip(routers, placed, strict=True):
                router.router_replay = replay
                router._forward_pre_hooks.update(hooks)


def measure_ratio(
    stack: RouterStack, microbatch: ReplayMicrobatch, repeats: int, *, training: bool
) -> dict[str, float]:
    session = ReplaySession(stack, captured_layers=CapturedLayers.decoder(len(stack.routers)))
    layout = microbatch.layout
    hidden = torch.randn(layout.num_rank_tokens, 1, stack.config.hidden_size, device=layout.device)
    mask = torch.zeros(1, layout.num_rank_tokens, dtype=torch.bool, device=layout.device)
    times: dict[str, list[float]] = {"live": [], "replayed": []}
    with nullcontext() if training else torch.no_grad():
        for i in range(repeats + 5):
            with session.schedule([microbatch]):
                padding_mask = session.begin(stack).padding_mask
                replayed = gpu_us(lambda m=padding_mask: stack(hidden, m))
            live = gpu_us(lambda: stack(hidden, mask))
            if i >= 5:
                times["live"].append(live)
                times["replayed"].append(replayed)
    figures = {name: median(values) for name, values in times.items()}
    figures["ratio"] = figures["replayed"] / figures["live"]
    return figures


def gpu_us(call: Callable[[], object]) -> float:
    """GPU time of one call, from its first launch to its last; host time without a GPU."""
    if not torch.cuda.is_available():
        return host_us(call)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)  # the launches queue up behind it: no gap is timed
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not args.dry
    if not on_gpu and not args.dry:
        raise SystemExit("no GPU here, so nothing to time; --dry runs small on the CPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    layers, hidden, experts = (LAYERS, HIDDEN, EXPERTS) if on_gpu else (4, 32, 16)
    tokens = 4096 if on_gpu else 16
    env = environment() if on_gpu else {}
    if not on_gpu:
        install_cpu_shims()
    with single_process():
        stack = RouterStack(make_config(layers, hidden, experts), device)
        few = make_microbatches(MICROBATCHES, [33, 31], layers, experts, device)
        many = make_microbatches(1, [tokens] * 4, layers, experts, device)[0]
        for training in (False, True):
            for name, figures in (
                ("overhead", measure_overhead(stack, few, args.repeats, training=training)),
                ("ratio", measure_ratio(stack, many, args.repeats, training=training)),
            ):
                line = {"case": name, "training": training, "layers": layers, **figures}
                print(", ".join(
                    f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in line.items()
                ))  # fmt: skip
                if args.json:
                    with open(args.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps({**line, **env}) + "\n")


if __name__ == "__main__":
    main()
