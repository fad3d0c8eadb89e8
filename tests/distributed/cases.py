"""The table of distributed cases, and what every rank of one is given.

Plain data: no torch, nothing of the package. Workers and the comparing parent both read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tests.oracle import OracleLayout

EXPERTS, TOPK, VOCAB, WIDTH = 8, 2, 64, 32
#: tokens of a thd slab when all microbatches have one shape
THD_TOKENS = 40

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
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@dataclass(frozen=True)
class Case:
    """One parallel run.

    Attributes:
        tp, pp, vpp, ep, cp: sizes; TP above 1 runs with sequence parallelism, vpp 1 means none.
        world: processes; what the sizes leave over is data parallel.
        cp_order: "zigzag" (rotary positions) or "contiguous" (learned positions, given by id).
        width: padded length of a bshd row, where all microbatches have one shape.
        fp8: recipe whose alignment the thd lengths have; the numbers are fp32.
        recompute: key of ``RECOMPUTE``.
        num_layers: of the whole model; those in ``dense`` have no router.
        pattern: of a ``HybridModel`` (then ``num_layers`` and ``dense`` say nothing): "*"
            attention, "-" dense, "E" MoE, "|" between pipeline chunks.
        mtp: heads for multi-token prediction after the last layer; their routers run live.
        captured: what the captured layer axis holds: "decoder", "moe_only" or "listed" (no layer
            first, then the MoE layers last to first).
        microbatches: of a training schedule and data-parallel rank, two trajectories each.
        forward_only: microbatches of a forward-only schedule; 0: as many.
        rounds: of a forward-only schedule and a training one.
        dynamic: lengths differ between microbatches, the stages tell each other the shapes.
        dtype: "fp32", or "bf16" in Megatron's ``Float16Module``; then no row runs live, since
            rounding decides what a router chooses.
        ties: experts of a router come in two groups of equal scores.
        optimizer: "none": gradients of each step are compared; "distributed": several steps of
            Megatron's distributed Adam.
        settings: more fields of Megatron's ``TransformerConfig``.
        ddp: fields of ``DistributedDataParallelConfig``.
        since: the first Megatron-core that can run the case.
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
    cp_order: str = "zigzag"
    width: int = 16
    fp8: str | bool = False
    recompute: str = "none"
    num_layers: int = 2
    dense: tuple[int, ...] = ()
    pattern: str = ""
    mtp: int = 0
    captured: str = "decoder"
    microbatches: int = 2
    forward_only: int = 0
    rounds: int = 1
    dummy: str = "constant"
    dynamic: bool = False
    dtype: str = "fp32"
    ties: bool = False
    optimizer: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    since: tuple[int, int] = (0, 16)
    timeout_s: float = 120.0

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Kinds of the schedules that one session runs, one after another."""
        if self.optimizer == "none":
            return ("forward only", "training") * self.rounds
        return ("forward only", "training", "forward only", "training", "training")

    def count(self, schedule: int) -> int:
        """Microbatches of the schedule of this number."""
        forward_only = self.schedules[schedule] == "forward only"
        return self.forward_only or self.microbatches if forward_only else self.microbatches

    # --- layers -----------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Layers of the decoder; of a hybrid model attention and feed-forward count each."""
        return len(self.pattern.replace("|", "")) if self.pattern else self.num_layers

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based global layers that have a router."""
        if self.pattern:
            symbols = self.pattern.replace("|", "")
            return tuple(layer for layer, symbol in enumerate(symbols) if symbol == "E")
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense)

    @cached_property
    def axis(self) -> tuple[int | None, ...]:
        """Layer of each position of the captured axis, None: of none that has a router."""
        if self.captured == "decoder":
            return tuple(x if x in self.moe_layers else None for x in range(self.depth))
        return self.moe_layers if self.captured == "moe_only" else (None, *self.moe_layers[::-1])

    def recomputed(self, layer: int) -> bool:
        """Whether the backward calls the router of this global layer again."""
        if self.recompute == "block":  # the first layer of each chunk
            return layer % (self.num_layers // (self.pp * self.vpp)) == 0
        return self.recompute in ("full", "moe")


@dataclass(frozen=True)
class Trajectory:
    """Attributes:
    tokens: [length] ids.
    trained: [length] bool, True where the token is a trained target.
    appended: [length] bool, True where the generator put the token there itself.
    missing: the engine returned no routes.
    routes: [captured, L, K] distinct experts; zeros where a position is no MoE layer.
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

    @property
    def covered(self) -> int:
        """Positions, from the first, that are replayed or run live."""
        return len(self.routes) + self.live


def trajectories(case: Case, dp_rank: int, microbatch: int, schedule: int) -> list[Trajectory]:
    """Two trajectories. Most lack the last token's row; some lack more, and one has none.

    Those of each schedule are others: routes of an earlier one would be noticed.
    """
    generator = np.random.default_rng([17, dp_rank, microbatch, schedule])
    made = []
    for i in range(2):
        length = int(generator.integers(6, min(12, case.width) + 1))
        kind = (microbatch + 2 * i + dp_rank) % 4
        if case.dtype == "bf16":
            kind = 0
        captured = {0: length - 1, 1: length - 3, 2: length - 1, 3: 0}[kind]
        missing = kind == 3
        routes = generator.random((captured, len(case.axis), EXPERTS)).argsort(-1)[..., :TOPK]
        routes[:, [layer is None for layer in case.axis]] = 0
        # a head's loss is divided by its targets in the microbatch: with as many in each
        # trajectory that is what each divides by alone
        trained = np.arange(length) >= (length - 3 if case.mtp else 2)
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
        "cp_order": case.cp_order,
        "sequence_parallel": case.tp > 1,
    }
    if not case.dynamic:
        if case.format == "bshd":
            arguments["padded_lengths"] = [case.width] * len(given)
        else:
            padded = OracleLayout(**arguments, fp8=case.fp8).padded()
            arguments["padded_lengths"] = [*padded, THD_TOKENS - sum(padded)]
    return arguments


def table() -> dict[str, Case]:
    cases = [*_tensor_parallel(), *_pipelines(), *_interleaved(), *_experts(), *_contexts()]
    cases += [*_models(), *_optimizers()]
    # ranks live from case to case: those of one world stand together
    return {case.name: case for case in sorted(cases, key=lambda case: -case.world)}


def _tensor_parallel() -> list[Case]:
    return [
        *(Case(f"tp2-sp-{r}", tp=2, recompute=r) for r in ("none", "full", "moe", "core_attn")),
        Case("tp2-sp-thd-full", tp=2, format="thd", recompute="full", dummy="spread"),
        Case("tp2-sp-thd-fp8-padding-moe", tp=2, format="thd", fp8="delayed", recompute="moe"),
        # 8 tokens on each rank and 8 experts: a mask of the wrong shape broadcasts
        *(
            Case(f"tp2-sp-tokens-equal-experts-{r}", tp=2, width=8, recompute=r, rounds=2)
            for r in ("none", "full")
        ),
        Case("tp2-sp-ties-full", tp=2, ties=True, recompute="full"),
        Case("tp2-sp-bf16-full", tp=2, dtype="bf16", recompute="full"),
        Case(
            "tp2-sp-allgather-moe",
            tp=2,
            recompute="moe",
            settings={"moe_token_dispatcher_type": "allgather"},
        ),
        Case("tp4-sp-full", world=4, tp=4, recompute="full"),
    ]


def _pipelines() -> list[Case]:
    return [
        Case("pp2-none", pp=2, microbatches=5),
        Case("pp2-full", pp=2, microbatches=5, recompute="full"),
        Case("pp2-rounds-full", pp=2, microbatches=4, forward_only=1, rounds=2, recompute="full"),
        Case(
            "pp2-dynamic-thd-moe",
            pp=2,
            microbatches=4,
            recompute="moe",
            format="thd",
            dynamic=True,
            settings={"variable_seq_lengths": True},
        ),
        Case(
            "pp2-dense-first-full",
            pp=2,
            num_layers=4,
            dense=(0, 1),
            captured="moe_only",
            microbatches=4,
            recompute="full",
        ),
        Case(
            "pp2-every-second-layer-full",
            pp=2,
            num_layers=4,
            dense=(1, 3),
            captured="listed",
            microbatches=3,
            recompute="full",
        ),
        Case(
            "pp2-uneven-full",
            pp=2,
            num_layers=4,
            microbatches=3,
            recompute="full",
            settings={"num_layers_in_first_pipeline_stage": 1},
        ),
        Case(
            "pp2-embedding-in-split-moe",
            pp=2,
            num_layers=3,
            microbatches=3,
            recompute="moe",
            settings={"account_for_embedding_in_pipeline_split": True},
        ),
        Case(
            "pp2-layout-full",
            pp=2,
            num_layers=4,
            microbatches=3,
            recompute="full",
            settings={
                "pipeline_model_parallel_layout": [
                    ["embedding", "decoder"],
                    ["decoder", "decoder", "decoder", "loss"],
                ]
            },
        ),
        Case("pp2-ep2-full", world=4, pp=2, ep=2, microbatches=4, recompute="full"),
        Case("pp4-full", world=4, pp=4, num_layers=4, microbatches=5, recompute="full"),
    ]


def _interleaved() -> list[Case]:
    return [
        *(
            Case(f"pp2-vpp2-{r}", pp=2, vpp=2, num_layers=4, microbatches=8, recompute=r)
            for r in ("none", "full", "moe")
        ),
        Case(
            "pp2-vpp2-rounds-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            forward_only=2,
            rounds=2,
            recompute="full",
        ),
        Case(
            "pp2-vpp2-chunk-without-router",
            pp=2,
            vpp=2,
            num_layers=4,
            dense=(0,),
            microbatches=8,
            recompute="full",
        ),
        Case(
            "pp2-vpp2-layout-chunk-without-layer",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            recompute="full",
            settings={
                "pipeline_model_parallel_layout": [
                    ["embedding", "decoder"],
                    ["decoder", "decoder"],
                    ["decoder"],
                    ["loss"],
                ]
            },
        ),
        Case(
            "pp2-vpp2-overlap-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=6,
            recompute="full",
            settings={"overlap_p2p_comm": True},
        ),
        Case(
            "pp2-vpp2-groups-of-3-full",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=6,
            recompute="full",
            settings={"microbatch_group_size_per_vp_stage": 3},
        ),
        Case(
            "pp2-vpp2-bf16-moe",
            pp=2,
            vpp=2,
            num_layers=4,
            microbatches=4,
            dtype="bf16",
            recompute="moe",
        ),
        Case("pp2-vpp4-block", pp=2, vpp=4, num_layers=8, microbatches=4, recompute="block"),
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
    ]


def _experts() -> list[Case]:
    return [
        *(Case(f"ep2-{r}", ep=2, recompute=r, dummy="spread") for r in ("none", "full", "moe")),
        Case(
            "ep2-allgather-full",
            ep=2,
            recompute="full",
            settings={"moe_token_dispatcher_type": "allgather"},
        ),
        Case("ep2-ties-moe", ep=2, ties=True, recompute="moe"),
        Case("ep2-bf16-full", ep=2, dtype="bf16", recompute="full"),
        Case("ep2-rounds-moe", ep=2, forward_only=1, rounds=2, recompute="moe"),
        Case("tp2-ep4-etp1-moe", world=4, tp=2, ep=4, etp=1, recompute="moe", dummy="spread"),
        Case(
            "pp2-vpp2-ep2-moe",
            world=4,
            pp=2,
            vpp=2,
            ep=2,
            num_layers=4,
            microbatches=4,
            recompute="moe",
            dummy="spread",
        ),
    ]


def _contexts() -> list[Case]:
    return [
        Case("cp2-thd-full", cp=2, format="thd", recompute="full"),
        Case("cp2-bshd-full", cp=2, recompute="full"),
        Case("cp2-thd-moe", cp=2, format="thd", recompute="moe", dummy="spread"),
        Case(
            "cp2-contiguous-thd-full", cp=2, cp_order="contiguous", format="thd", recompute="full"
        ),
        Case("cp2-contiguous-bshd-moe", cp=2, cp_order="contiguous", recompute="moe"),
        Case("cp2-tp2-thd-full", world=4, cp=2, tp=2, format="thd", recompute="full"),
        Case("cp2-thd-bf16-moe", cp=2, format="thd", dtype="bf16", recompute="moe"),
        Case(
            "pp2-vpp2-cp2-thd-full",
            world=4,
            pp=2,
            vpp=2,
            cp=2,
            format="thd",
            num_layers=4,
            microbatches=4,
            recompute="full",
        ),
        Case("cp2-ep4-full", world=4, cp=2, ep=4, format="thd", recompute="full"),
    ]


def _models() -> list[Case]:
    """Multi-token prediction and ``HybridModel``."""
    return [
        *(Case(f"pp2-mtp-{r}", pp=2, mtp=1, microbatches=4, recompute=r) for r in ("none", "full")),
        Case("tp2-sp-mtp-full", tp=2, mtp=1, recompute="full"),
        Case("ep2-mtp2-moe", ep=2, mtp=2, recompute="moe"),
        Case("tp2-sp-thd-mtp-moe", tp=2, mtp=1, format="thd", recompute="moe"),
        Case(
            "pp2-vpp2-mtp-full",
            pp=2,
            vpp=2,
            num_layers=4,
            mtp=1,
            microbatches=4,
            recompute="full",
        ),
        Case(
            "dp2-mtp-distributed-optimizer-full", mtp=1, recompute="full", optimizer="distributed"
        ),
        Case(
            "hybrid-ep2-full",
            ep=2,
            pattern="*-*E*E",
            captured="moe_only",
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "hybrid-tp2-sp-moe",
            tp=2,
            pattern="*-*E*E",
            captured="moe_only",
            recompute="moe",
            since=(0, 18),
        ),
        Case(
            "hybrid-pp2-vpp2-full",
            pp=2,
            vpp=2,
            pattern="*-|*E|*E|*E",
            captured="listed",
            microbatches=4,
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "hybrid-cp2-thd-moe",
            cp=2,
            format="thd",
            pattern="*-*E*E",
            captured="moe_only",
            recompute="moe",
            since=(0, 18),
        ),
        Case(
            "hybrid-pp2-bf16-full",
            pp=2,
            pattern="*-*E|*E",
            captured="moe_only",
            dtype="bf16",
            recompute="full",
            since=(0, 18),
        ),
        Case(
            "hybrid-dp2-distributed-optimizer-full",
            pattern="*-*E*E",
            captured="moe_only",
            recompute="full",
            optimizer="distributed",
            since=(0, 18),
        ),
    ]


def _optimizers() -> list[Case]:
    return [
        Case("dp2-distributed-optimizer-full", recompute="full", optimizer="distributed"),
        Case("ep2-distributed-optimizer-moe", ep=2, recompute="moe", optimizer="distributed"),
        Case(
            "cp2-thd-distributed-optimizer-full",
            cp=2,
            format="thd",
            recompute="full",
            optimizer="distributed",
        ),
        Case(
            "tp2-sp-distributed-optimizer-moe",
            world=4,
            tp=2,
            recompute="moe",
            optimizer="distributed",
        ),
        Case(
            "dp2-bf16-distributed-optimizer-full",
            dtype="bf16",
            recompute="full",
            optimizer="distributed",
        ),
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
    ]


CASES = table()
