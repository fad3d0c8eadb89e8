"""validate_routes, validate_support: what no router can replay and no scorer can score, counted.

    python benchmarks/bench_validate.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

What comes from an engine is right but for a few cells in 100,000, which are planted here. The floor
is every id, and a sampled id a row, read once; the counters are a few bytes. ``torch`` sorts.
"""

from collections.abc import Callable

import torch
from baselines import ragged_support_faults, route_faults, support_faults
from bench_routes import TOPK, random_routes
from bench_support import SLOTS, VOCABULARY, row_widths
from harness import Case, Cases, Setting, run
from torch import Tensor

from packhorse.kernels.validate import (
    validate_ragged_support,
    validate_routes,
    validate_support,
)

TOKENS = 182_000
ONE_IN = 100_000  # cells with a fault


def _planted(cells: int, device: str) -> Tensor:
    return torch.randperm(cells, device=device)[: max(cells // ONE_IN, 2)]


def routes(setting: Setting, dtype: torch.dtype, experts: int) -> Callable[[], Case]:
    def build() -> Case:
        device, rows, layers = setting.device, setting.size(TOKENS), 48
        bytes_moved = rows * layers * TOPK * dtype.itemsize
        num_sets = setting.num_sets(bytes_moved)
        sets = []
        for _ in range(num_sets):
            drawn = random_routes(rows, layers, experts, dtype, device)
            cells = drawn.view(rows * layers, TOPK)
            cells[_planted(rows * layers, device)] = 0
            faulty = _planted(rows * layers, device)
            cells[faulty, -1] = cells[faulty, 0]
            sets.append(drawn)

        def ours(i):
            found = validate_routes(sets[i], num_experts=experts)
            return found.counts, found.first

        return Case(
            tokens=rows,
            bytes_moved=bytes_moved,
            providers={"packhorse": ours, "torch": lambda i: route_faults(sets[i], experts)},
            expected=lambda i: route_faults(sets[i], experts),
            num_sets=num_sets,
            capturable=frozenset({"packhorse"}),
            no_sync=frozenset({"packhorse"}),
        )

    return build


def support(setting: Setting, width: int) -> Callable[[], Case]:
    def build() -> Case:
        device, rows = setting.device, setting.size(SLOTS)
        bytes_moved = 4 * rows * width + 8 * rows
        num_sets = setting.num_sets(bytes_moved)
        sets = []
        for _ in range(num_sets):
            # ascending, as an engine's masks are: every id a little above the one before
            steps = torch.randint(1, VOCABULARY // width, (rows, width), device=device)
            ids = steps.cumsum(1).to(torch.int32)
            kept = torch.randint(1, width + 1, (rows,), device=device)
            ids[torch.arange(width, device=device) >= kept[:, None]] = -1
            sampled = ids[torch.arange(rows, device=device), kept - 1].long()
            sampled[_planted(rows, device)] = VOCABULARY - 1
            faulty = _planted(rows, device)
            ids[faulty, 0] = ids[faulty, 1]
            sets.append((ids, sampled))

        def ours(i):
            found = validate_support(*sets[i], vocab_size=VOCABULARY)
            return found.counts, found.first

        return Case(
            tokens=rows,
            bytes_moved=bytes_moved,
            providers={
                "packhorse": ours,
                "torch": lambda i: support_faults(*sets[i], VOCABULARY),
            },
            expected=lambda i: support_faults(*sets[i], VOCABULARY),
            num_sets=num_sets,
            capturable=frozenset({"packhorse"}),
            no_sync=frozenset({"packhorse"}),
        )

    return build


def ragged(setting: Setting) -> Callable[[], Case]:
    def build() -> Case:
        device, rows = setting.device, setting.size(SLOTS)
        counts = row_widths(rows, VOCABULARY)
        total = int(counts.sum())
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device)
        bytes_moved = 4 * total + 8 * (rows + 1) + 8 * rows
        num_sets = setting.num_sets(bytes_moved)
        within = torch.arange(total) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        ids = ((within * 17 + 3) % VOCABULARY).to(torch.int32).to(device)
        sets = []
        for i in range(num_sets):
            shifted = (ids + i) % VOCABULARY
            sampled = shifted[offsets[1:] - 1].long()
            sampled[_planted(rows, device)] = VOCABULARY - 1
            sets.append((shifted, offsets, sampled))

        def ours(i):
            found = validate_ragged_support(*sets[i], vocab_size=VOCABULARY)
            return found.counts, found.first

        return Case(
            tokens=rows,
            bytes_moved=bytes_moved,
            providers={
                "packhorse": ours,
                "torch": lambda i: ragged_support_faults(*sets[i], VOCABULARY),
            },
            expected=lambda i: ragged_support_faults(*sets[i], VOCABULARY),
            num_sets=num_sets,
            no_sync=frozenset({"packhorse"}),
        )

    return build


def cases(setting: Setting) -> Cases:
    return {
        "routes 182k x 48x8 uint8, E 128": routes(setting, torch.uint8, 128),
        "routes 182k x 48x8 int16, E 384": routes(setting, torch.int16, 384),
        "support 177k x 20 int32": support(setting, 20),
        "support 177k x 64 int32": support(setting, 64),
        "support 177k rows, CSR, mean 8": ragged(setting),
    }


if __name__ == "__main__":
    run(cases)
