"""What a profiler runs: each kernel once, warm, at the shape that a benchmark measures.

    python benchmarks/profile_kernels.py [--only REGEX] [--cases cases.jsonl] [--dry]

Each case is first called until nothing is compiled any more, then once between cudaProfilerStart
and cudaProfilerStop, inside an NVTX range named as the case; ``ncu --profile-from-start off`` sees
that call alone. ``--cases`` writes a line a case: its kernels of ours in the order of their
launches, and the fewest bytes it can move, both for ``ncu_table.py``. The ranges of the cases are
torch's, which needs no package; those of packhorse appear inside them where ``nvtx`` is installed.
``--dry`` calls each case at 1/100 of its size on the CPU.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from bench_support import row_widths
from harness import DRY, Case, Cases, Setting, environment
from lm_head_scoring import draw_ids, draw_ragged
from torch import Tensor

from packhorse import (
    full_vocabulary_logprobs,
    gather_routes,
    lm_head_ragged_support_logprobs,
    lm_head_support_logprobs,
    ragged_support_logprobs,
    support_logprobs,
)

#: (script, case) of the benchmarks
PROFILED = (
    ("bench_routes", "32 of 2k-8k, 48x8 uint8 -> int32"),
    ("bench_routes", "32 of 2k-8k, 48x8 int16 -> int32, E 384"),
    ("bench_routes", "32 of 2k-8k, 48x8 uint8 -> int64"),
    ("bench_routes", "16 of 4k, 4 of 61x8 uint8 -> int32"),
    ("bench_routes", "32 of 2k-8k, 48x8 uint8, 10% spread dummies"),
    ("bench_layout", "B 32, CP 1"),
    ("bench_layout", "B 1024, CP 4"),
    ("bench_microbatch", "128 of 512-2k, 8 of 61x8 int16, CP2"),
    ("bench_rows", "gather, routes 48x8 uint8, 0% missing"),
    ("bench_rows", "scatter, routes 48x8 uint8, 0% missing"),
    ("bench_rows", "gather, hidden 2048 bf16, 0% missing"),
    ("bench_dense", "align 32 x 8k fp32, forward"),
    ("bench_dense", "align 32 x 8k int64, forward"),
    ("bench_dense", "restore 32 x 8k fp32, forward"),
    ("bench_support", "177k x 20 int32"),
    ("bench_support", "177k rows, CSR, mean 8"),
    ("bench_support", "177k rows, CSR of up to 64 -> [M, 64]"),
    ("bench_validate", "routes 182k x 48x8 uint8, E 128"),
    ("bench_validate", "support 177k x 20 int32"),
    ("bench_dummies", "constant, 48 x 64k x 8 int32, 101 MB"),
    ("bench_dummies", "spread, 48 x 64k x 8 int32, 101 MB"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--cases", help="write a JSON line a case to this file")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, without a profiler")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        sys.stderr.write("profile_kernels: no GPU here, so nothing to profile (--dry runs small)\n")
        return 1
    setting = DRY if args.dry else Setting()
    lines = []
    for name, build in cases(setting).items():
        if re.search(args.only, name):
            lines.append(profile(name, build, args.dry))
            print(name, *lines[-1]["kernels"], sep="\n    ", flush=True)
    if args.cases:
        with open(args.cases, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0 if lines else 1


def cases(setting: Setting) -> Cases:
    """What is profiled, in order."""
    found: Cases = {}
    for script, name in PROFILED:
        build = importlib.import_module(script).cases(setting)[name]
        found[f"{script.removeprefix('bench_')}: {name}"] = build
    return {
        **found,
        "routes: 32 of 2k-8k, 26x6 uint8 -> int32": six_experts(setting),
        "scoring: 8k x 2048, V 151,936, C 20, forward and backward": scoring(setting),
        "scoring: 8k x 2048, ragged, mean 8, forward and backward": ragged_scoring(setting),
        "scoring: 512 x 2048, all of V 151,936, forward and backward": vocabulary(setting),
        "scoring: logits 2k x 151,936, C 20, forward and backward": from_logits(setting),
        "scoring: logits 2k x 151,936, ragged, forward and backward": from_logits(setting, 0),
    }


def six_experts(setting: Setting) -> Callable[[], Case]:
    """A K that is no power of 2 has a kernel of its own, and no benchmark."""

    def build() -> Case:
        num_rows, num_layers, topk, num_experts = sum(setting.lengths(2048, 8192, 32)), 26, 6, 64
        scores = torch.rand(num_rows, num_layers, num_experts, device=setting.device)
        routes = scores.topk(topk, -1).indices.to(torch.uint8)
        row_ids = torch.arange(num_rows, device=setting.device)

        def ours(_: int) -> tuple[Tensor, ...]:
            return gather_routes(routes, row_ids, range(num_layers), num_experts=num_experts)

        per_row = num_layers * topk
        return Case(
            tokens=num_rows,
            bytes_moved=num_rows * (per_row + 8) + num_rows * (4 * per_row + 1),
            providers={"packhorse": ours},
            expected=ours,
        )

    return build


def scoring(setting: Setting) -> Callable[[], Case]:
    """Scores over the support from hidden states, with both gradients."""

    def build() -> Case:
        num_tokens, hidden_size, width = setting.size(8192), 2048, 20
        vocab = max(setting.size(151936), width)
        device, dtype = setting.device, torch.bfloat16
        hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocab, hidden_size, device=device).to(dtype).requires_grad_()
        ids = draw_ids(num_tokens, vocab, width, 1.0, device)
        sampled = ids[:, 0].long()
        main_grad = torch.zeros(weight.shape, device=device)

        def ours(_: int) -> tuple[Tensor, ...]:
            scores = lm_head_support_logprobs(hidden, weight, ids, sampled, main_grad=main_grad)
            return torch.autograd.grad(scores.logprobs.sum(), hidden)

        distinct = int(ids.unique().numel())
        # rows of the weight in both passes, their gradients read and written; hidden states
        row_bytes = hidden_size * (2 * 2 + 2 * 4)
        return Case(
            tokens=num_tokens,
            bytes_moved=distinct * row_bytes + num_tokens * hidden_size * 2 * 3,
            providers={"packhorse": ours},
            expected=ours,
        )

    return build


def ragged_scoring(setting: Setting) -> Callable[[], Case]:
    """Scores over rows of different widths, one of them of thousands, with both gradients."""

    def build() -> Case:
        num_tokens, hidden_size = setting.size(8192), 2048
        vocab = max(setting.size(151936), 64)
        device, dtype = setting.device, torch.bfloat16
        hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocab, hidden_size, device=device).to(dtype).requires_grad_()
        widths = row_widths(num_tokens, vocab)
        widths[0] = min(2000, vocab)
        ids, offsets, sampled = draw_ragged(widths, vocab, device)
        row_ids = torch.arange(num_tokens, device=device)
        main_grad = torch.zeros(weight.shape, device=device)

        def ours(_: int) -> tuple[Tensor, ...]:
            scores = lm_head_ragged_support_logprobs(
                hidden, weight, ids, offsets, row_ids, sampled, widths=widths.numpy(),
                main_grad=main_grad,
            )  # fmt: skip
            return torch.autograd.grad(scores.logprobs.sum(), hidden)

        row_bytes = hidden_size * (2 * 2 + 2 * 4)
        return Case(
            tokens=num_tokens,
            bytes_moved=int(ids.unique().numel()) * row_bytes + num_tokens * hidden_size * 2 * 3,
            providers={"packhorse": ours},
            expected=ours,
        )

    return build


def from_logits(setting: Setting, width: int = 20) -> Callable[[], Case]:
    """Scores over the support from logits, with their gradient; ``width`` 0: over ragged rows."""

    def build() -> Case:
        num_tokens, device = setting.size(2048), setting.device
        vocab = max(setting.size(151936), 64)
        logits = torch.randn(num_tokens, vocab, device=device).to(torch.bfloat16)
        logits.requires_grad_()
        widths = torch.full((num_tokens,), width) if width else row_widths(num_tokens, vocab)
        ids, offsets, sampled = draw_ragged(widths, vocab, device)
        row_ids = torch.arange(num_tokens, device=device)

        def ours(_: int) -> tuple[Tensor, ...]:
            if width:
                scores = support_logprobs(logits, ids.view(-1, width), sampled, row_ids=row_ids)
            else:
                scores = ragged_support_logprobs(
                    logits, ids, offsets, row_ids, sampled, widths=widths.numpy()
                )
            return torch.autograd.grad(scores.logprobs.sum(), logits)

        # a sector of 32 bytes a member, and the gradient
        return Case(
            tokens=num_tokens,
            bytes_moved=len(ids) * 32 + num_tokens * vocab * 2,
            providers={"packhorse": ours},
            expected=ours,
        )

    return build


def vocabulary(setting: Setting) -> Callable[[], Case]:
    """Scores over the vocabulary, with both gradients, of so few tokens that rows come in parts."""

    def build() -> Case:
        num_tokens, hidden_size, vocab = setting.size(512), 2048, setting.size(151936)
        device, dtype = setting.device, torch.bfloat16
        hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
        weight = torch.randn(vocab, hidden_size, device=device).to(dtype).requires_grad_()
        sampled = torch.arange(num_tokens, device=device) % vocab
        main_grad = torch.zeros(weight.shape, device=device)

        def ours(_: int) -> tuple[Tensor, ...]:
            scores = full_vocabulary_logprobs(hidden, weight, sampled, main_grad=main_grad)
            return torch.autograd.grad(scores.logprobs.sum(), hidden)

        # the weight in both passes, its gradient read and written; hidden states
        row_bytes = hidden_size * (2 * 2 + 2 * 4)
        return Case(
            tokens=num_tokens,
            bytes_moved=vocab * row_bytes + num_tokens * hidden_size * 2 * 3,
            providers={"packhorse": ours},
            expected=ours,
        )

    return build


def profile(name: str, build: Callable[[], Case], dry: bool) -> dict[str, Any]:
    """Run one case, and say what a profiler saw of it."""
    case = build()
    call = next(iter(case.providers.values()))  # the first is ours
    with launched_kernels() as kernels:
        call(0)
    for _ in range(2):
        call(0)
    if not dry:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with torch.cuda.nvtx.range(name.replace("{", "(").replace("}", ")")):
            call(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    line = {"case": name, "kernels": kernels, "bytes": case.bytes_moved}
    return line if dry else {**line, "environment": environment()}


@contextmanager
def launched_kernels() -> Iterator[list[str]]:
    """Names of the Triton kernels that are launched meanwhile."""
    names: list[str] = []

    def note(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(note)
    try:
        yield names
    finally:
        hooks.remove(note)


if __name__ == "__main__":
    sys.exit(main())
