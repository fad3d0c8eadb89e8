"""Time against tokens, 1k to 512k: routes of a 48-layer top-8 model, and row ids. For plot.py.

    python benchmarks/bench_sweep.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

Trajectories of up to 4k tokens. The kernels in a CUDA graph, the calls from host lengths and the
torch loop by the host's clock.
"""

import torch
from bench_layout import shape as row_ids_shape
from bench_microbatch import shape as routes_shape
from harness import Cases, Setting, run

TOKENS = [1024 << doubling for doubling in range(10)]
TRAJECTORY = 4096
KINDS = ("wall_us", "graph_us")


def cases(setting: Setting) -> Cases:
    built: Cases = {}
    for tokens in TOKENS:
        batch = max(tokens // TRAJECTORY, 1)
        lengths = [setting.size(tokens // batch)] * batch
        built[f"routes, {tokens // 1024}k tokens"] = routes_shape(
            setting, lengths, 48, range(48), 128, torch.uint8, jobs={}, loops=("torch loop",),
            with_layout=False, kinds=KINDS,
        )  # fmt: skip
        built[f"row ids, {tokens // 1024}k tokens"] = row_ids_shape(
            setting, lengths, 1, {}, calls=True, kinds=KINDS
        )
    return built


if __name__ == "__main__":
    run(cases)
