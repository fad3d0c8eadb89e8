"""The table of distributed cases, and what every rank of one is given.

Plain data: no torch, nothing of the package. Workers and the comparing parent both read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle import OracleLayout

EXPERTS, TOPK, VOCAB, WIDTH = 8, 2, 64, 32
#: tokens of a trajectory's bshd row, and of a thd slab, when all microbatches have one shape
BSHD_TOKENS, THD_TOKENS = 16, 40

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@dataclass(frozen=True)
class Case:
    """One parallel run.

    Attributes:
        tp, pp, vpp, ep, cp: sizes; TP above 1 runs with sequence parallelism, vpp 1 means none.
        world: processes; what the sizes leave over is data parallel.
        recompute: key of ``RECOMPUTE``.
        num_layers: of the whole model; the first ``dense`` of them have no router.
        microbatches: of a schedule and data-parallel rank, two trajectories each.
        dynamic: lengths differ between microbatches, the stages tell each other the shapes.
        optimizer: "none": gradients of one step are compared; "distributed": several steps of
            Megatron's distributed Adam.
        settings: more fields of Megatron's ``TransformerConfig``.
        ddp: fields of ``DistributedDataParallelConfig``.
        timeout_s: after which the processes are killed and the case fails.
    """

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    world: int = 2
    format: str = "bshd"
    recompute: str = "none"
    num_layers: int = 2
    dense: int = 0
    microbatches: int = 2
    dummy: str = "constant"
    dynamic: bool = False
    optimizer: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Kinds of the schedules that one session runs, one after another."""
        if self.optimizer == "none":
            return ("forward only", "training")
        return ("forward only", "training", "forward only", "training", "training")

    def recomputed(self, layer: int) -> bool:
        """Whether the backward calls the router of this global layer again."""
        if self.recompute == "block":  # the first layer of each chunk
            return layer % (self.num_layers // (self.pp * self.vpp)) == 0
        return self.recompute != "none"


@dataclass(frozen=True)
class Trajectory:
    """Attributes:
    tokens: [length] ids.
    trained: [length] bool, True where the token is a trained target.
    appended: [length] bool, True where the generator put the token there itself.
    missing: the engine returned no routes.
    routes: [captured, L, K] distinct experts; zeros in dense layers.
    """

    tokens: np.ndarray
    trained: np.ndarray
    appended: np.ndarray
    missing: bool
    routes: np.ndarray

    @property
    def live(self) -> int:
        """Positions after the captured ones on which a trained target depends: target j is made by
        the logit of position j - 1, which sees every position before j."""
        if self.missing:
            return len(self.tokens)
        return max(int(np.flatnonzero(self.trained)[-1]) - len(self.routes), 0)


def trajectories(case: Case, dp_rank: int, microbatch: int) -> list[Trajectory]:
    """Two trajectories. Most lack the last token's row; some lack more, and one has none."""
    generator = np.random.default_rng([17, dp_rank, microbatch])
    made = []
    for i in range(2):
        length = int(generator.integers(6, 13))
        kind = (microbatch + 2 * i + dp_rank) % 4
        captured = {0: length - 1, 1: length - 3, 2: length - 1, 3: 0}[kind]
        missing = kind == 3
        routes = generator.random((captured, case.num_layers, EXPERTS)).argsort(-1)[..., :TOPK]
        routes[:, : case.dense] = 0
        trained = np.arange(length) >= 2
        appended = np.zeros(length, bool)
        if kind == 1:
            appended[length - 2 :] = True
        tokens = generator.integers(0, VOCAB, length)
        made.append(Trajectory(tokens, trained, appended, missing, routes))
    return made


def layout_arguments(
    case: Case, given: list[Trajectory], tp_rank: int, cp_rank: int
) -> dict[str, Any]:
    """Keyword arguments that ``OracleLayout`` and ``TokenLayout.build`` share."""
    arguments: dict[str, Any] = {
        "lengths": [len(trajectory.tokens) for trajectory in given],
        "format": case.format,
        "tp_size": case.tp,
        "tp_rank": tp_rank,
        "cp_size": case.cp,
        "cp_rank": cp_rank,
        "sequence_parallel": case.tp > 1,
    }
    if not case.dynamic:
        if case.format == "bshd":
            arguments["padded_lengths"] = [BSHD_TOKENS] * len(given)
        else:
            padded = OracleLayout(**arguments).padded()
            arguments["padded_lengths"] = [*padded, THD_TOKENS - sum(padded)]
    return arguments


def table() -> dict[str, Case]:
    cases = [
        *(Case(f"tp2-sp-{r}", tp=2, recompute=r) for r in ("none", "full", "moe")),
        Case("tp2-sp-thd-full", tp=2, format="thd", recompute="full", dummy="spread"),
        Case("pp2-none", pp=2, microbatches=5),
        Case("pp2-full", pp=2, microbatches=5, recompute="full"),
        Case(
            "pp2-dynamic-thd-moe",
            pp=2,
            microbatches=4,
            recompute="moe",
            format="thd",
            dynamic=True,
            settings={"variable_seq_lengths": True},
        ),
        Case("pp2-dense-first-full", pp=2, num_layers=4, dense=2, microbatches=4, recompute="full"),
        *(
            Case(f"pp2-vpp2-{r}", pp=2, vpp=2, num_layers=4, microbatches=8, recompute=r)
            for r in ("none", "full", "moe")
        ),
        Case(
            "pp2-vpp2-chunk-without-router",
            pp=2,
            vpp=2,
            num_layers=4,
            dense=1,
            microbatches=8,
            recompute="full",
        ),
        *(Case(f"ep2-{r}", ep=2, recompute=r, dummy="spread") for r in ("none", "full", "moe")),
        Case(
            "ep2-allgather-full",
            ep=2,
            recompute="full",
            settings={"moe_token_dispatcher_type": "allgather"},
        ),
        Case("cp2-thd-full", cp=2, format="thd", recompute="full"),
        Case("cp2-bshd-full", cp=2, recompute="full"),
        Case("cp2-thd-moe", cp=2, format="thd", recompute="moe", dummy="spread"),
        Case(
            "pp2-vpp2-overlap-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=6,
            recompute="full",
            settings={"overlap_p2p_comm": True},
        ),
        Case("pp2-vpp4-block", pp=2, vpp=4, num_layers=8, microbatches=4, recompute="block"),
        Case(
            "pp2-uneven-full",
            pp=2,
            num_layers=4,
            microbatches=3,
            recompute="full",
            settings={"num_layers_in_first_pipeline_stage": 1},
        ),
        Case("dp2-distributed-optimizer-full", recompute="full", optimizer="distributed"),
        Case("ep2-distributed-optimizer-moe", ep=2, recompute="moe", optimizer="distributed"),
        Case(
            "dp2-overlapped-distributed-optimizer-full",
            recompute="full",
            microbatches=3,
            optimizer="distributed",
            ddp={"overlap_grad_reduce": True},
        ),
        Case(
            "pp2-vpp2-dp2-distributed-optimizer-full",
            world=4,
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            recompute="full",
            optimizer="distributed",
        ),
        Case(
            "tp2-pp2-vpp2-full",
            world=4,
            tp=2,
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            recompute="full",
        ),
        Case("cp2-tp2-thd-full", world=4, cp=2, tp=2, format="thd", recompute="full"),
        Case("pp2-ep2-full", world=4, pp=2, ep=2, microbatches=4, recompute="full"),
        Case("tp2-ep4-etp1-moe", world=4, tp=2, ep=4, etp=1, recompute="moe", dummy="spread"),
    ]
    # ranks live from case to case: those of one world stand together
    return {case.name: case for case in sorted(cases, key=lambda case: -case.world)}


CASES = table()
