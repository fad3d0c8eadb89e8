"""What each job is asked to reach on one NVIDIA H200, and whether a measurement reaches it.

A job names one limit, or two of which either is enough:

    ratio   GPU time over the floor, at most; the floor is the fewest bytes over the copy speed
            (``dummy_routes``: the write speed) measured in the same run
    us      microseconds, at most: GPU time of a small shape, or host time beyond the GPU's
    times   the baseline's time over ours, at least

A figure is the median over the rounds of the medians of one round. GPU time is the time in a CUDA
graph over inputs and outputs that together pass L2 (``graph_us``); the dense batches of 1 to 2 MB,
asked in microseconds, are judged in an L2 that holds them (``graph_warm_us``). No torch here: the
table and the pictures are made from the lines alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Job:
    what: str  # readable, for the table
    of: str = "graph_us"  # the time that is judged
    ratio: float | None = None
    us: float | None = None
    times: float | None = None

    @property
    def asked(self) -> str:
        parts = []
        if self.ratio is not None:
            parts.append(f"≤ {self.ratio:g} x floor")
        if self.us is not None:
            parts.append(f"≤ {self.us:g} µs")
        if self.times is not None:
            parts.append(f"≥ {self.times:g} x")
        return " or ".join(parts)


_ROUTES = "`gather_routes`, 182k tokens"
_WARM = "graph_warm_us"
_LOOP = "against the plain torch loop, wall:"

#: in the order of the table; the keys are those of ``Case.jobs`` and of the lines
JOBS: dict[str, Job] = {
    "routes_in_order": Job(f"{_ROUTES} x 48 x 8 uint8 to int32, rows in order", ratio=1.25),
    "routes_permuted": Job("the same, rows permuted", ratio=1.30),
    "routes_some_layers": Job(f"{_ROUTES}, 58 of 61 layers", ratio=1.35),
    "routes_int16": Job(f"{_ROUTES} x 48 x 8 int16 to int32, 384 experts", ratio=1.35),
    "routes_int64": Job(f"{_ROUTES} x 48 x 8 uint8 to int64", ratio=1.35),
    "routes_few_layers": Job("`gather_routes`, 64k tokens, 4 of 61 layers", ratio=2.5, us=8.0),
    "row_ids": Job("`make_row_ids`, 182k tokens, B = 32, 256, 1024, CP 1 and 4", us=3.5),
    "support_wide": Job("`gather_support`, 177k tokens x 20 and x 64 int32", ratio=1.3, us=8.0),
    "support_csr": Job("`gather_support`, 177k rows, CSR, mean 8 ids", ratio=1.6, us=8.0),
    "align_fp32": Job("`align_tokens`, 32 x 8k fp32, forward and backward", of=_WARM, us=2.5),
    "align_int64": Job("`align_tokens`, 32 x 8k int64", of=_WARM, us=3.5),
    "restore_fp32": Job("`restore_tokens`, 32 x 8k fp32, forward and backward", of=_WARM, us=2.5),
    "restore_int64": Job("`restore_tokens`, 32 x 8k int64", of=_WARM, us=3.5),
    "dummies": Job("`dummy_routes`, ≥ 64 MB, constant and spread", ratio=1.2),
    "microbatch": Job(
        "the per-microbatch call, B = 32, 256, 1024: wall beyond the GPU's, no sync",
        of="beyond_gpu_us",
        us=150.0,
    ),
    "loop_routes": Job(f"{_LOOP} the first row's shape, row ids and mask", of="wall_us", times=12),
    "loop_row_ids": Job(
        f"{_LOOP} row ids of 256 trajectories of 512 to 2k, CP 2", of="wall_us", times=200
    ),
    "loop_routes_128": Job(
        f"{_LOOP} routes of 128 of 512 to 2k, 8 of 61 layers int16, CP 2", of="wall_us", times=100
    ),
}


def judge(
    job: Job, us: float, *, floor_us: float, baseline_us: float | None = None
) -> dict[str, Any]:
    """Whether ``us`` reaches what ``job`` asks, and by how much, for a result line.

    ``share`` is what was got over what was asked: up to 1 where the limit is reached. Of two
    alternatives the better one counts.
    """
    got: dict[str, float] = {}
    shares: list[float] = []
    if job.ratio is not None:
        got["ratio"] = us / floor_us
        shares.append(got["ratio"] / job.ratio)
    if job.us is not None:
        got["us"] = us
        shares.append(us / job.us)
    if job.times is not None:
        if baseline_us is None:
            raise ValueError(f"judge: '{job.what}' is a factor and needs baseline_us")
        got["times"] = baseline_us / us
        shares.append(job.times / got["times"])
    share = min(shares)
    return {
        "of": job.of,
        "asked": job.asked,
        **{kind: round(value, 3) for kind, value in got.items()},
        "share": round(share, 3),
        "reached": share <= 1,
    }


def figure(rounds: Sequence[float]) -> float:
    """The figure of a measurement: the median over its rounds."""
    return median(rounds)


def beyond_gpu_us(
    times: Mapping[str, Sequence[float]], gpu: Mapping[str, Sequence[float]]
) -> float:
    """Host time of a call beyond the GPU's: ``waited_us`` less ``graph_us`` of the same work."""
    return figure(times["waited_us"]) - figure(gpu["graph_us"])
