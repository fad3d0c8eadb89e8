"""lm_head_support_logprobs beside what frameworks run: the products in chunks, and full logits.

    python benchmarks/lm_head_scoring.py [--json out.jsonl] [--only REGEX] [--dry]

Device time in milliseconds, median of repeats, L2 emptied before each; of ours in a CUDA graph,
where the host's launches do not count, and called plainly (``_eager_ms``). ``forward`` has no
gradient, ``both`` is forward and backward with gradients of the hidden states and of the weight:
ours adds the latter to a float32 buffer, as Megatron keeps it; torch makes a dense one. Memory is
what a call takes at its peak beyond its inputs and the gradients asked for, as a share of the
logits in bf16.

    chunked    both sides of 16,384 (token, id) pairs at once by index_select, product, sum
    logits     hidden @ weight.T, gather of the members, log-softmax over them

Ids of a row are drawn without replacement from a Zipf law of exponent 1, or uniformly; seed fixed.
Each provider is checked against float64 on some rows first: ours may err twice as much as float32
torch on the same inputs.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch
from harness import device_us, environment
from torch import Tensor

from packhorse.kernels.lm_head import lm_head_support_logprobs

#: name -> T, H, V, C, law, limits: ms forward, ms both, then factors over chunked and over logits
CASES: Final[dict[str, dict[str, Any]]] = {
    "8k x 2048, V 151,936, C 20": {
        "shape": (8192, 2048, 151936, 20),
        "forward": {"ms": 0.10, "chunked": 24, "logits": 70},
        "both": {"ms": 0.80, "chunked": 13, "logits": 20},
    },
    "8k x 2048, V 151,936, C 20, uniform ids": {"shape": (8192, 2048, 151936, 20), "law": 0.0},
    "16k x 4096, V 151,936, C 20": {
        "shape": (16384, 4096, 151936, 20),
        "forward": {"chunked": 24, "logits": 70},
        "both": {"chunked": 13, "logits": 20},
    },
    "8k x 7168, V 129,280, C 20": {
        "shape": (8192, 7168, 129280, 20),
        "forward": {"chunked": 24, "logits": 70},
        "both": {"chunked": 13, "logits": 20},
    },
    "8k x 2048, V 151,936, C 64": {
        "shape": (8192, 2048, 151936, 64),
        "forward": {"ms": 0.33, "chunked": 14, "logits": 23},
        "both": {"ms": 1.6, "chunked": 19},
    },
}
PAIRS_AT_ONCE: Final = 16384
MEMORY_SHARE: Final = 0.01
ROWS_CHECKED: Final = 256


def draw_ids(num_tokens: int, vocab: int, width: int, law: float, device: str) -> Tensor:
    """[T, C] int32, no id twice in a row; popular ids are spread over the vocabulary."""
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.arange(1, vocab + 1, device=device, dtype=torch.float64).pow(-law)
    rows = []
    for begin in range(0, num_tokens, 512):
        count = min(512, num_tokens - begin)
        noise = torch.rand(count, vocab, generator=generator, device=device, dtype=torch.float64)
        rows.append((weights.log() - noise.clamp(1e-300).log().neg().log()).topk(width).indices)
    places = torch.randperm(vocab, generator=generator, device=device)
    return places[torch.cat(rows)].int()


def draw_ragged(widths: Tensor, vocab: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Packed int32 ids of rows of ``widths`` [N] from Zipf's law, the rows' offsets [N + 1], and
    the first id of each row, as if it had been sampled."""
    count = int(widths.sum())
    ids = draw_ids(-(-count // 64), vocab, 64, 1.0, device).flatten()[:count].contiguous()
    offsets = torch.cat([widths.new_zeros(1), widths.cumsum(0)]).to(device)
    return ids, offsets, ids[offsets[:-1]].long()


def log_softmax_of(members: Tensor, ids: Tensor, sampled: Tensor) -> Tensor:
    chosen = (ids == sampled[:, None]).to(members.dtype)
    return (members.log_softmax(1) * chosen).sum(1)


def chunked(hidden: Tensor, weight: Tensor, ids: Tensor, sampled: Tensor) -> Tensor:
    width = ids.shape[1]
    tokens = torch.arange(ids.numel(), device=ids.device) // width
    flat = ids.flatten().long()
    parts = []
    for begin in range(0, flat.numel(), PAIRS_AT_ONCE):
        pairs = slice(begin, begin + PAIRS_AT_ONCE)
        left, right = hidden.index_select(0, tokens[pairs]), weight.index_select(0, flat[pairs])
        parts.append((left * right).sum(1))
    return log_softmax_of(torch.cat(parts).view(ids.shape).float(), ids, sampled)


def logits(hidden: Tensor, weight: Tensor, ids: Tensor, sampled: Tensor) -> Tensor:
    members = (hidden @ weight.T).gather(1, ids.long())
    return log_softmax_of(members.float(), ids, sampled)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    return round(1e-3 * median(device_us(call, repeats) for _ in range(3)), 4)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """One call in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    replay()
    return replay


def peak_bytes(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def check(hidden: Tensor, weight: Tensor, ids: Tensor, sampled: Tensor) -> tuple[float, float]:
    """Largest errors over some rows: ours, and float32 torch's on the same inputs."""
    some = slice(0, ROWS_CHECKED)
    h, i, s = hidden[some], ids[some], sampled[some]
    rows = weight[i.long()]  # [t, C, H]
    exact = log_softmax_of((rows.double() * h.double()[:, None]).sum(2), i, s)
    plain = log_softmax_of((rows.float() * h.float()[:, None]).sum(2), i, s)
    ours = lm_head_support_logprobs(hidden, weight, ids, sampled).logprobs[some]
    errors = [float((x.double() - exact).abs().max()) for x in (ours, plain)]
    if errors[0] > 2 * errors[1] + 1e-6:
        raise ValueError(f"error {errors[0]:.2e}, float32 torch has {errors[1]:.2e}")
    return errors[0], errors[1]


def measure(name: str, case: dict[str, Any], device: str, shrink: int) -> list[dict[str, Any]]:
    num_tokens, size, vocab, width = case["shape"]
    num_tokens, vocab = num_tokens // shrink, vocab // shrink
    generator = torch.Generator(device).manual_seed(1)
    draw = {"generator": generator, "device": device}
    hidden = torch.randn(num_tokens, size, **draw).bfloat16()
    weight = (torch.randn(vocab, size, **draw) / size**0.5).bfloat16()
    ids = draw_ids(num_tokens, vocab, width, case.get("law", 1.0), device)
    sampled = ids[:, width // 2].long().contiguous()
    error, error_fp32 = check(hidden, weight, ids, sampled)
    if shrink > 1:
        return [{"case": name, "error": error, "error_fp32": error_fp32}]
    main_grad = torch.zeros(weight.shape, device=device)
    gradient = torch.randn(num_tokens, device=device)
    leaf, head = hidden.clone().requires_grad_(), weight.requires_grad_()

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return lm_head_support_logprobs(h, w, ids, sampled, main_grad=main_grad).logprobs

    providers: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "packhorse": ours,
        "chunked": lambda h, w: chunked(h, w, ids, sampled),
        "logits": lambda h, w: logits(h, w, ids, sampled),
    }
    lines: list[dict[str, Any]] = []
    for provider, score in providers.items():
        repeats = 30 if provider == "packhorse" else 7

        def forward(score: Any = score) -> Tensor:
            with torch.no_grad():
                return score(hidden, weight)

        def both(score: Any = score) -> tuple[Any, ...]:
            return torch.autograd.grad(score(leaf, head), (leaf, head), gradient, allow_unused=True)

        line: dict[str, Any] = {"case": name, "provider": provider, "shape": case["shape"]}
        for kind, call in (("forward", forward), ("both", both)):
            call()
            key = f"{kind}_ms"
            if provider == "packhorse":
                line[f"{kind}_eager_ms"] = milliseconds(call, repeats)
                call = captured(call)
            line[key] = milliseconds(call, repeats)
        asked_for = hidden.nbytes + (0 if provider == "packhorse" else weight.nbytes)
        line["memory_share"] = round((peak_bytes(both) - asked_for) / (2 * num_tokens * vocab), 5)
        if provider == "packhorse":
            line |= {
                "distinct": int(ids.unique().numel()),
                "error": error,
                "error_fp32": error_fp32,
            }
            first, second = (torch.zeros_like(main_grad) for _ in range(2))
            for target in (first, second):
                main_grad.zero_()
                both()
                target.copy_(main_grad)
            if not torch.equal(first, second):
                raise ValueError("two backward runs differ")
            del first, second
        lines.append(line)
    own = lines[0]
    for kind in ("forward", "both"):
        limits = case.get(kind, {})
        for other in lines[1:]:
            times = other[f"{kind}_ms"] / own[f"{kind}_ms"]
            own[f"{kind}_times_{other['provider']}"] = round(times, 2)
        own[f"{kind}_reached"] = {
            key: own[f"{kind}_ms"] <= limit if key == "ms" else own[f"{kind}_times_{key}"] >= limit
            for key, limit in limits.items()
        }
        own[f"{kind}_asked"] = limits
    own["memory_reached"] = own["memory_share"] <= MEMORY_SHARE
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="append one JSON line a measurement to this file")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument(
        "--dry", action="store_true", help="1/64 of the size on the CPU, check only"
    )
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        sys.exit("no GPU here, so nothing to time; --dry checks the cases on the CPU")
    if not args.dry:  # a graph cannot capture the default stream, and a backward keeps its own
        torch.cuda.set_stream(torch.cuda.Stream())
    env = {} if args.dry else environment()
    for name, case in CASES.items():
        if not re.search(args.only, name):
            continue
        for line in measure(name, case, "cpu" if args.dry else "cuda", 64 if args.dry else 1):
            print(", ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            if args.json:
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, **env}) + "\n")
        if not args.dry:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
