"""What a distributed case is, and what every rank of one is given.

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
#: such that a router's own losses move its gradient as much as the tokens' do
AUX_COEFFICIENT, Z_COEFFICIENT = 4.0, 0.5

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
        tp, pp, vpp, ep, cp: sizes; TP above 1 runs with sequence parallelism.
        vpp_given: a VPP of 1 is told to Megatron as 1 and takes the interleaved schedule; else as
            None, and it takes the other one.
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
        aux: load-balancing loss, "aux_loss" or "seq_aux_loss"; "" for none.
        z_loss: with a z-loss; then all ranks of a group have as many covered tokens.
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
    vpp_given: bool = False
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
    aux: str = ""
    z_loss: bool = False
    optimizer: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    since: tuple[int, int] = (0, 16)
    timeout_s: float = 120.0

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def vp_size(self) -> int | None:
        """As Megatron is told."""
        return self.vpp if self.vpp > 1 or self.vpp_given else None

    @property
    def router_losses(self) -> bool:
        return bool(self.aux) or self.z_loss

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
        # up to the padded length, so that the last rank of a split sequence holds routes
        length = case.width - int(generator.integers(0, case.width // 3))
        kind = (microbatch + 2 * i + dp_rank) % 4
        if case.dtype == "bf16":
            kind = 0
        captured = {0: length - 1, 1: length - 3, 2: length - 1, 3: 0}[kind]
        missing = kind == 3
        if case.z_loss:
            length = case.width
            captured = 0 if missing else length
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
