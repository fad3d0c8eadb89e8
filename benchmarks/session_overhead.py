"""What a ReplaySession costs beside its kernel call, on a stack of 48 of Megatron's TopKRouters.

    python benchmarks/session_overhead.py [--json out.jsonl] [--repeats 200] [--dry]

Microseconds of host time of a micro-batch, medians over the micro-batches; few tokens, so that no
launch waits for the GPU:

    overhead   = begin + answers + hooks + open and close - kernel call - topk         asked: <= 60

    begin           session.begin
    answers         every call of a router to the session, each with its gather of scores
    hooks           what the session runs before a router
    open and close  of the schedule, by the number of its micro-batches
    kernel call     inside begin, ``TokenLayout.gather_routes``: row ids, mask, every layer's ids
    topk            what Megatron computes in place of the answers, timed in the same place

Each is timed around the session's own functions and less the clock's own time, so none is a
difference of two long times. A backward runs no code of the session's but under recompute; it ends
in one C++ function either way. ``difference`` is the whole step with replay and without it, as
another look: its error is that of two times of 15 ms.

    ratio      GPU time of a replayed forward of the stack over the live one's, 16k tokens; asked:
               at most 1.02

Calls with and without replay take turns. It needs megatron-core and a GPU; ``--dry`` runs small on
the CPU, checks the routes, and prints what it measured there, which says nothing.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import torch
from harness import environment
from torch import Tensor, nn

from packhorse import CapturedLayers, PackedTensor, ReplayMicrobatch, ReplaySession, TokenLayout
from packhorse.replay.cpu_megatron import install_cpu_shims
from packhorse.replay.megatron import single_process
from packhorse.replay.targets import RouterTargets

LAYERS, EXPERTS, TOPK, HIDDEN = 48, 128, 8, 2048
MICROBATCHES = 8
#: figure -> what is asked of it
ASKED: Final = {"overhead": 60.0, "ratio": 1.02}
#: cycles of a kernel that holds the GPU back while the host launches 48 routers, 15 ms
_HOLD_CYCLES: Final = 40_000_000


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
    rows = layout.route_row_ids(microbatch.captured)
    ids = microbatch.routes.values[:, 0].long()[rows[rows >= 0]]
    replayed = maps[0][rows >= 0]
    if not torch.equal(replayed, torch.zeros_like(replayed).scatter(1, ids, True)):
        raise ValueError("the router did not route what was replayed")


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


class Clock:
    """Host time inside functions, in microseconds, by name; functions may nest."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self._own_us = 0.0  # of one measurement
        empty = self.around("clock", lambda: None)
        times = []
        for _ in range(2000):
            self.us.clear()
            empty()
            times.append(self.us["clock"])
        self._own_us = median(times)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter_ns()
            result = function(*args, **options)
            us = 1e-3 * (time.perf_counter_ns() - begin) - self._own_us
            self.us[name] = self.us.get(name, 0.0) + us
            return result

        return call

    def take(self) -> dict[str, float]:
        """What was timed since the last time."""
        taken, self.us = self.us, {}
        return taken


class _TopkOnly:
    """Stands on ``router.router_replay`` and lets Megatron choose, under the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def get_replay_topk(self, scores, topk, num_groups, group_topk, compute_topk):
        timed = self._clock.around("topk", compute_topk)
        return timed(scores, topk, num_groups, group_topk)


@contextmanager
def timed_session(clock: Clock) -> Iterator[None]:
    """The session's functions under the clock."""
    with ExitStack() as stack:
        for owner, name, said in (
            (RouterTargets, "get_replay_topk", "answers"),
            (RouterTargets, "check_input", "hooks"),
            (TokenLayout, "gather_routes", "kernel call"),
        ):
            timed = clock.around(said, getattr(owner, name))
            function = functools.wraps(getattr(owner, name))(
                lambda *args, timed=timed, **options: timed(*args, **options)
            )
            stack.enter_context(patch.object(owner, name, function))
        yield


def measure_overhead(
    stack: RouterStack,
    microbatches: list[ReplayMicrobatch],
    repeats: int,
    *,
    training: bool,
    meet: Callable[[], object] = wait,
) -> dict[str, float]:
    """The figures of "overhead". ``meet`` runs before each schedule: ranks begin it together."""
    session = ReplaySession(stack, captured_layers=CapturedLayers.decoder(len(stack.routers)))
    check(stack, session, microbatches[0])
    layout = microbatches[0].layout
    hidden = torch.randn(layout.num_rank_tokens, 1, stack.config.hidden_size, device=layout.device)
    mask = torch.zeros(1, layout.num_rank_tokens, dtype=torch.bool, device=layout.device)
    clock = Clock()
    begin = clock.around("begin", session.begin)

    def step(padding_mask: Tensor) -> None:
        total = stack(hidden, padding_mask)
        if training:
            total.sum().backward()

    def run_schedule() -> Iterator[dict[str, float]]:
        opened = session.schedule(microbatches)
        meet()
        edges = host_us(opened.__enter__)
        for _ in microbatches:
            clock.take()
            us = host_us(lambda: step(begin(stack).padding_mask))
            yield {**clock.take(), "with": us}
            with without_replay(stack, None):
                yield {"without": host_us(lambda: step(mask))}
            with without_replay(stack, _TopkOnly(clock)):
                step(mask)
            yield clock.take()
        edges += host_us(lambda: opened.__exit__(None, None, None))
        yield {"open and close": edges / len(microbatches)}

    times: dict[str, list[float]] = {}
    grad = nullcontext() if training else torch.no_grad()
    with grad, timed_session(clock):  # a hook is the function that is there when it is placed
        for _ in range(3):
            list(run_schedule())
        while len(times.get("with", ())) < repeats:
            for measured in run_schedule():
                for name, us in measured.items():
                    times.setdefault(name, []).append(us)
    # the median of sums: parts of one micro-batch are slow together
    beside = [
        b + a + h - k - t
        for b, a, h, k, t in zip(
            *(times[name] for name in ("begin", "answers", "hooks", "kernel call", "topk")),
            strict=True,
        )
    ]
    figures = {name: median(values) for name, values in times.items()}
    figures["overhead"] = median(beside) + figures["open and close"]
    figures["difference"] = (
        figures["with"] + figures["open and close"] - figures["without"] - figures["kernel call"]
    )
    return figures


@contextmanager
def without_replay(stack: RouterStack, replay: Any) -> Iterator[None]:
    """The routers hold ``replay`` and nothing of the session's."""
    routers = stack.routers
    placed = [(router.router_replay, dict(router._forward_pre_hooks)) for router in routers]
    for router in routers:
        router.router_replay = replay
        router._forward_pre_hooks.clear()
    try:
        yield
    finally:
        for router, (own, hooks) in zip(routers, placed, strict=True):
            router.router_replay = own
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
    torch.cuda._sleep(_HOLD_CYCLES)  # the launches queue up behind it: no gap is timed
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
                ("ratio", measure_ratio(stack, many, max(args.repeats // 4, 5), training=training)),
            ):
                line = {"case": name, "training": training, "layers": layers, **figures}
                print(", ".join(
                    f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in line.items()
                ))  # fmt: skip
                print(verdict(name, figures[name], training=training, timed=on_gpu))
                if args.json:
                    with open(args.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps({**line, **env}) + "\n")


def verdict(name: str, value: float, *, training: bool, timed: bool) -> str:
    """One line; ``timed``: on a GPU, where alone the figure means something."""
    kept = "kept" if value <= ASKED[name] else "NOT KEPT"
    kind = "training" if training else "forward only"
    judged = kept if timed else "not judged without a GPU"
    return f"{name}, {kind}: {value:.2f}, asked: at most {ASKED[name]:g}: {judged}"


if __name__ == "__main__":
    main()
