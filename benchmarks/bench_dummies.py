"""dummy_routes: K distinct experts a row, written and never read.

    python benchmarks/bench_dummies.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

The floor is a large fill: every byte of the output written once. ``torch`` copies one row over the
output (constant), or computes the walk once and copies it to each layer (spread).
"""

from collections.abc import Callable
from typing import Any

import torch
from baselines import spread_experts
from harness import Case, Cases, Setting, run

from packhorse import dummy_routes

TOPK, EXPERTS, EP = 8, 256, 8


def shape(
    setting: Setting, num_rows: int, num_layers: int, dtype: torch.dtype, spread: bool
) -> Callable[[], Case]:
    def build() -> Case:
        device, rows = setting.device, setting.size(num_rows)
        keywords: dict[str, Any] = {"dummy": "spread", "ep_size": EP} if spread else {}
        missing = torch.ones(rows, dtype=torch.bool, device=device)
        row = torch.arange(TOPK, device=device)
        bytes_moved = num_layers * rows * TOPK * dtype.itemsize

        def ours(_):
            return dummy_routes(
                rows, TOPK, num_experts=EXPERTS, num_layers=num_layers, dtype=dtype,
                device=device, **keywords,
            )  # fmt: skip

        def torch_ops(_):
            experts = spread_experts(missing, TOPK, EXPERTS, EP) if spread else row
            out = torch.empty((num_layers, rows, TOPK), dtype=dtype, device=device)
            return out.copy_(experts)

        return Case(
            tokens=rows,
            bytes_moved=bytes_moved,
            providers={"packhorse": ours, "torch": torch_ops},
            expected=torch_ops,
            num_sets=setting.num_sets(bytes_moved),  # there is no input
            capturable=frozenset({"packhorse", "torch"}),
            no_sync=frozenset({"packhorse"}),
            jobs={"dummies": "packhorse"},
            floor="write",
        )

    return build


def cases(setting: Setting) -> Cases:
    built: Cases = {}
    for kind, spread in (("constant", False), ("spread", True)):
        built[f"{kind}, 2M rows x 8 int32, 67 MB"] = shape(setting, 2**21, 1, torch.int32, spread)
        built[f"{kind}, 48 x 64k x 8 int32, 101 MB"] = shape(
            setting, 2**16, 48, torch.int32, spread
        )
        built[f"{kind}, 48 x 64k x 8 int64, 201 MB"] = shape(
            setting, 2**16, 48, torch.int64, spread
        )
    return built


if __name__ == "__main__":
    run(cases)
