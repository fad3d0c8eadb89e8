"""Scoring beside ``lm_head_scoring.py``: ragged supports, the whole vocabulary, from logits.

    python benchmarks/scoring_more.py [--json out.jsonl] [--only REGEX] [--dry]

Device time in milliseconds as there. Nanoseconds a member compare ragged supports with rows of one
width; what a GPU must read at least compares scoring from logits: a sector of 32 bytes a member.

    no support  8k tokens with supports, beside these and as many without, in turn: a prompt's
    ragged      64k tokens, widths log-normal with median 2 and mean 8 (99 % up to some 90), ids
                drawn from Zipf's law, beside 20 ids a row at as many members in all
    vocabulary  all logits in torch, their log-softmax, its backward, beside tiles of them
    logits      support_logprobs, forward and backward, beside reading the members and no more;
                and ragged_support_logprobs

Ragged scoring uploads which rows are of a like width, so it is timed as it is called, not in a
graph; ``_gpu_ms`` is the time of its kernels alone, by torch's profiler.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from bench_support import row_widths
from harness import environment
from lm_head_scoring import captured, draw_ids, draw_ragged, milliseconds, peak_bytes
from torch import Tensor

from packhorse.kernels.lm_head import lm_head_support_logprobs
from packhorse.kernels.lm_head_full import full_vocabulary_logprobs
from packhorse.kernels.lm_head_ragged import lm_head_ragged_support_logprobs
from packhorse.kernels.support import support_logprobs
from packhorse.kernels.support_ragged import ragged_support_logprobs

SECTOR = 32
HIDDEN_SIZE, VOCAB = 2048, 151_936


class Sizes:
    def __init__(self, dry: bool) -> None:
        self.dry, self.device = dry, "cpu" if dry else "cuda"
        self.hidden_size = 64 if dry else HIDDEN_SIZE
        self.vocab = 1000 if dry else VOCAB

    def tokens(self, count: int) -> int:
        return count // 1024 if self.dry else count

    def head(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, weight, and a float32 buffer for its gradient."""
        generator = torch.Generator(self.device).manual_seed(1)
        draw = {"generator": generator, "device": self.device}
        hidden = torch.randn(num_tokens, self.hidden_size, **draw).bfloat16().requires_grad_()
        weight = torch.randn(self.vocab, self.hidden_size, **draw) / self.hidden_size**0.5
        weight = weight.bfloat16().requires_grad_()
        return hidden, weight, torch.zeros(weight.shape, device=self.device)


def gpu_ms(call: Callable[[], object], repeats: int = 5) -> float:
    """The time of a call's kernels, one after another: what lies between them does not count."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    totals = []
    for _ in range(repeats):
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        totals.append(sum(event.self_device_time_total for event in profile.key_averages()))
    return round(1e-3 * median(totals), 4)


def timed(sizes: Sizes, call: Callable[[], object], *, graph: bool, repeats: int = 15) -> dict:
    call()
    if sizes.dry:
        return {}
    line = {"eager_ms": milliseconds(call, repeats), "gpu_ms": gpu_ms(call)}
    return line | ({"graph_ms": milliseconds(captured(call), repeats)} if graph else {})


def passes(
    sizes: Sizes,
    score: Callable[[], Tensor],
    leaves: tuple[Tensor, ...],
    *,
    graph: bool,
) -> dict[str, Any]:
    """Both kinds of call, named ``forward_*`` and ``both_*``."""

    def forward() -> Tensor:
        with torch.no_grad():
            return score()

    def both() -> tuple[Any, ...]:
        logprobs = score()
        ones = torch.ones_like(logprobs)
        return torch.autograd.grad(logprobs, leaves, ones, allow_unused=True)

    line = {}
    for kind, call in (("forward", forward), ("both", both)):
        for key, value in timed(sizes, call, graph=graph).items():
            line[f"{kind}_{key}"] = value
    if not sizes.dry:
        line["both_peak_mib"] = peak_bytes(both) >> 20
    return line


def without_support(sizes: Sizes) -> list[dict[str, Any]]:
    lines = []
    for share in (1, 2):
        num_tokens = share * sizes.tokens(8192)
        hidden, weight, main_grad = sizes.head(num_tokens)
        ids = draw_ids(num_tokens, sizes.vocab, 20, 1.0, sizes.device)
        sampled = ids[:, 3].long().contiguous()
        if share == 2:
            ids[1::2] = -1

        def score(
            given: tuple[Tensor, ...] = (hidden, weight, ids, sampled), to=main_grad
        ) -> Tensor:
            return lm_head_support_logprobs(*given, main_grad=to).logprobs

        line = {"case": "half without support" if share == 2 else "all with support"}
        line |= {"tokens": num_tokens, "members": num_tokens // share * 20}
        lines.append(line | passes(sizes, score, (hidden, weight), graph=True))
    return lines


def ragged(sizes: Sizes) -> list[dict[str, Any]]:
    num_tokens = sizes.tokens(1 << 16)
    hidden, weight, main_grad = sizes.head(num_tokens)
    drawn = row_widths(num_tokens, sizes.vocab)
    flat, offsets, sampled = draw_ragged(drawn, sizes.vocab, sizes.device)
    widths, num_ids = drawn.numpy(), len(flat)
    row_ids = torch.arange(num_tokens, device=sizes.device)

    def score() -> Tensor:
        return lm_head_ragged_support_logprobs(
            hidden, weight, flat, offsets, row_ids, sampled, widths=widths, main_grad=main_grad
        ).logprobs

    line = {"case": "ragged", "tokens": num_tokens, "members": num_ids}
    line |= {"widest": int(widths.max()), "p99": int(np.quantile(widths, 0.99))}
    line |= passes(sizes, score, (hidden, weight), graph=False)

    width = 20
    fixed = max(num_ids // width, 1)
    ids = draw_ids(fixed, sizes.vocab, width, 1.0, sizes.device)
    some = hidden[:fixed].detach().requires_grad_()
    chosen = ids[:, 3].long().contiguous()

    def score_fixed() -> Tensor:
        return lm_head_support_logprobs(some, weight, ids, chosen, main_grad=main_grad).logprobs

    other = {"case": "one width", "tokens": fixed, "members": fixed * width}
    other |= passes(sizes, score_fixed, (some, weight), graph=True)
    for x in (line, other):
        for kind in ("forward", "both"):
            if f"{kind}_gpu_ms" in x:
                x[f"{kind}_ns_a_member"] = round(1e6 * x[f"{kind}_gpu_ms"] / x["members"], 3)
    return [line, other]


def vocabulary(sizes: Sizes) -> list[dict[str, Any]]:
    num_tokens = sizes.tokens(8192)
    hidden, weight, main_grad = sizes.head(num_tokens)
    sampled = torch.arange(num_tokens, device=sizes.device) * 17 % sizes.vocab

    def tiles() -> Tensor:
        return full_vocabulary_logprobs(hidden, weight, sampled, main_grad=main_grad).logprobs

    def torch_logits() -> Tensor:
        return (hidden @ weight.T).float().log_softmax(1).gather(1, sampled[:, None]).squeeze(1)

    with torch.no_grad():
        exact = (hidden[:64].double() @ weight.double().T).log_softmax(1)
        exact = exact.gather(1, sampled[:64, None]).squeeze(1)
        error = float((tiles()[:64].double() - exact).abs().max())
    if error > 1e-4:
        raise ValueError(f"full_vocabulary_logprobs: error {error:.2e}")
    lines = []
    for name, score in (("vocabulary", tiles), ("vocabulary, torch", torch_logits)):
        line = {"case": name, "tokens": num_tokens} | passes(
            sizes, score, (hidden, weight), graph=name == "vocabulary"
        )
        lines.append(line)
    lines[0]["error"] = error
    # the fallback of one appended token a trajectory
    few = hidden[:32].detach().requires_grad_()

    def fallback() -> Tensor:
        return full_vocabulary_logprobs(few, weight, sampled[:32], main_grad=main_grad).logprobs

    lines.append({"case": "vocabulary, 32 tokens", "tokens": 32})
    lines[-1] |= passes(sizes, fallback, (few, weight), graph=True)
    return lines


@triton.jit
def _read_members_kernel(
    logits_ptr, ids_ptr, out_ptr, num_cells, width, vocab, BLOCK: tl.constexpr
):
    """What any scoring from logits has to do at least: each member's logit, once."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(ids_ptr + cell, mask=cell < num_cells, other=0)
    place = (cell // width).to(tl.int64) * vocab + column
    member = tl.load(logits_ptr + place, mask=cell < num_cells, other=0.0)
    tl.store(out_ptr + cell, member.to(tl.float32), mask=cell < num_cells)


def bare_reads(logits: Tensor, ids: Tensor) -> float:
    """Milliseconds of reading the members, in a CUDA graph as ours."""
    out = torch.empty(ids.shape, device=ids.device)

    def read() -> Tensor:
        grid = (-(-ids.numel() // 256),)
        _read_members_kernel[grid](
            logits, ids, out, ids.numel(), *ids.shape[1:], logits.shape[1], 256
        )
        return out

    read()
    if not torch.equal(out, logits.detach().gather(1, ids.long()).float()):
        raise ValueError("the bare reads are wrong")
    return milliseconds(captured(read), 15)


def from_logits(sizes: Sizes) -> list[dict[str, Any]]:
    lines = []
    for width in (20, 64):
        num_tokens = sizes.tokens(16384)
        generator = torch.Generator(sizes.device).manual_seed(2)
        logits = torch.randn(num_tokens, sizes.vocab, generator=generator, device=sizes.device)
        logits = logits.bfloat16().requires_grad_()
        ids = draw_ids(num_tokens, sizes.vocab, width, 1.0, sizes.device)
        sampled = ids[:, 3].long().contiguous()

        def score(logits: Tensor = logits, ids: Tensor = ids, sampled: Tensor = sampled) -> Tensor:
            return support_logprobs(logits, ids, sampled).logprobs

        line = {"case": f"logits, C {width}", "tokens": num_tokens}
        line["sector_bytes"] = num_tokens * width * SECTOR
        if not sizes.dry:
            line["bare_reads_ms"] = bare_reads(logits, ids)
        lines.append(line | passes(sizes, score, (logits,), graph=True))
        del logits
    return lines + ragged_from_logits(sizes)


def ragged_from_logits(sizes: Sizes) -> list[dict[str, Any]]:
    num_tokens = sizes.tokens(16384)
    logits = torch.randn(num_tokens, sizes.vocab, device=sizes.device).bfloat16().requires_grad_()
    drawn = row_widths(num_tokens, sizes.vocab)
    flat, offsets, sampled = draw_ragged(drawn, sizes.vocab, sizes.device)
    widths, num_ids = drawn.numpy(), len(flat)
    row_ids = torch.arange(num_tokens, device=sizes.device)

    def score() -> Tensor:
        return ragged_support_logprobs(
            logits, flat, offsets, row_ids, sampled, widths=widths
        ).logprobs

    line = {"case": "logits, ragged", "tokens": num_tokens, "members": num_ids}
    line |= {"widest": int(widths.max()), "sector_bytes": num_ids * SECTOR}
    return [line | passes(sizes, score, (logits,), graph=False)]


CASES = {
    "no support": without_support,
    "ragged": ragged,
    "vocabulary": vocabulary,
    "logits": from_logits,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, nothing timed")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        sys.exit("no GPU here, so nothing to time; --dry checks the cases on the CPU")
    if not args.dry:  # a graph cannot capture the default stream, and a backward keeps its own
        torch.cuda.set_stream(torch.cuda.Stream())
    env = {} if args.dry else environment()
    for name, measure in CASES.items():
        if not re.search(args.only, name):
            continue
        for line in measure(Sizes(args.dry)):
            print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, **env}) + "\n")
        if not args.dry:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
