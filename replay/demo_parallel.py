"""The demo's three schedules on one of several ranks, and their figures put together on rank 0.

What ``compare`` does for one rank: the same microbatches through Megatron's pipeline schedules,
live, replayed and in training. Every rank keeps what it saw of its own trajectories, layers and
token slots; ``gather`` makes of all parts one ``Comparison``, after checking that ranks which hold
the same tell the same.

A microbatch's trajectories are shared out among the data-parallel ranks (those of ``--ep``), with
the pads of the whole microbatch.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.kernels.rows import scatter_rows
from packhorse.replay import compare
from packhorse.replay.capture import Capture
from packhorse.replay.compare import Comparison, Microbatch
from packhorse.replay.demo_model import Sizes, whole_name
from packhorse.replay.layout import TokenLayout, sequence_alignment
from packhorse.replay.routers import find_routers
from packhorse.replay.session import (
    CapturedLayers,
    ReplayMicrobatch,
    ReplaySession,
    ScheduleReport,
)


@dataclass
class Part:
    """What one rank saw. Arrays are on the host."""

    tp: int
    pp: int
    cp: int
    dp: int
    #: schedule -> (over the support, microbatch) -> logprobs of this replica's response tokens;
    #: on the last pipeline stage
    logprobs: dict[str, dict[tuple[bool, int], np.ndarray]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of the training schedule, likewise
    #: "live" or "replayed" -> (layer, microbatch) -> [rows, K] experts of the route rows, -1:
    #: another rank's row
    routes: dict[str, dict[tuple[int, int], np.ndarray]] = field(default_factory=dict)
    router_gradients: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> float64
    unfinished_gradients: set[str] = field(default_factory=set)
    reports: dict[str, ScheduleReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def share_out(microbatches: Sequence[Microbatch], config: Any, sizes: Sizes) -> list[Microbatch]:
    """This rank's microbatches: of each its replica's trajectories, in this rank's layout."""
    from megatron.core import parallel_state

    dp_rank = parallel_state.get_data_parallel_rank()
    shared = []
    for whole in microbatches:
        bounds = np.linspace(0, whole.layout.num_sequences, sizes.ep + 1).astype(int)
        part = slice(*bounds[dp_rank : dp_rank + 2].tolist())
        lengths = whole.layout.lengths[part]
        padded = None
        if whole.layout.format == "bshd":
            alignment = sequence_alignment(sizes.tp, sizes.cp)
            width = -(-max(whole.layout.lengths) // alignment) * alignment
            padded = [width] * len(lengths)
        layout = TokenLayout.from_megatron(
            lengths,
            config,
            format=whole.layout.format,
            padded_lengths=padded,
            batch_width=whole.layout.batch_width,
            first_columns=whole.layout.first_columns[part],
            device=whole.layout.device,
        )
        shared.append(
            Microbatch(layout, whole.batch[part], whole.routes[part], whole.loss_masks[part])
        )
    return shared


def run_part(
    chunks: list[Any],
    num_layers: int,
    microbatches: Sequence[Microbatch],
    sizes: Sizes,
    *,
    num_targets: int,
    temperature: float,
) -> Part:
    """Run the three schedules on this rank.

    Args:
        chunks: of ``build_chunks``. Their gradients are replaced.
        num_layers: of the capture.
        microbatches: of ``share_out``.
        num_targets: response tokens of all replicas together.
        temperature: the rollout's.
    """
    from megatron.core import parallel_state

    part = Part(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
    )
    session = ReplaySession(
        chunks if len(chunks) > 1 else chunks[0], captured_layers=CapturedLayers.decoder(num_layers)
    )
    share = len(microbatches) / max(num_targets, 1)  # the schedule takes the microbatches' mean

    def run(schedule: str, begin: Callable[[Any], Any] | None) -> None:
        training = schedule == "training"
        began = time.perf_counter()
        with torch.set_grad_enabled(training):
            results = compare.run_schedule(
                chunks, microbatches, temperature, share, not training, begin
            )
        part.seconds[schedule] = time.perf_counter() - began
        part.logprobs[schedule] = {
            (support, i): result[f"support={support}"].cpu().numpy().astype(np.float64)
            for i, result in enumerate(results)
            for support in (False, True)
        }
        if training:
            part.losses = [float(result["loss"]) for result in results]

    for chunk in chunks:
        chunk.eval()
    with ExitStack() as recording:
        recorded = [recording.enter_context(compare.record_routes(chunk)) for chunk in chunks]
        run("live", None)
    part.routes["live"] = _routes_by_row(chunks, recorded, microbatches)

    given = [ReplayMicrobatch(m.layout, m.routes, loss_masks=m.loss_masks) for m in microbatches]
    with ExitStack() as recording:
        recorded = [recording.enter_context(compare.record_dispatch(chunk)) for chunk in chunks]
        recording.enter_context(session.schedule(given))
        run("replayed", session.begin)
    part.reports["replayed"] = session.report()
    part.routes["replayed"] = _routes_by_row(chunks, recorded, microbatches)

    for chunk in chunks:
        chunk.train()
        chunk.zero_grad(set_to_none=True)
    with session.schedule(given):
        run("training", session.begin)
    part.reports["training"] = session.report()
    _keep_gradients(part, chunks, sizes)
    return part


def gather(part: Part) -> list[Part] | None:
    """Every rank's part, on rank 0; None elsewhere. A collective over all ranks."""
    import torch.distributed as dist

    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(part, parts, dst=0)
    return parts


# --- one rank -------------------------------------------------------------------------------------


def _routes_by_row(
    chunks: list[Any], recorded: Sequence[list[list[Tensor]]], microbatches: Sequence[Microbatch]
) -> dict[tuple[int, int], np.ndarray]:
    """What ``record_routes`` or ``record_dispatch`` kept of each chunk, as ``Part.routes``."""
    taken = {}
    for chunk, routers in zip(chunks, recorded, strict=True):
        for layer, calls in zip(_layers(chunk), routers, strict=True):
            for i, (batch, topk_ids) in enumerate(zip(microbatches, calls, strict=True)):
                routes = batch.rollout_routes
                row_ids = batch.layout.route_row_ids(routes.lengths)
                rows = scatter_rows(topk_ids, row_ids, routes.num_rows, fill=-1)
                taken[layer, i] = rows.cpu().numpy()
    return taken


def _layers(chunk: Any) -> list[int]:
    """Of the routers of ``record_routes``, from 0 in the whole model."""
    return [router.module.layer_number - 1 for router in _routers(chunk)]


def _routers(chunk: Any) -> list[Any]:
    return [router for router in find_routers(chunk) if not router.is_mtp]


def _keep_gradients(part: Part, chunks: list[Any], sizes: Sizes) -> None:
    """Router gradients of this rank's tokens alone, and what has no finite gradient."""
    from megatron.core import parallel_state

    for chunk in chunks:
        num_local = (chunk.config.num_moe_experts or 0) // sizes.ep
        experts_before = parallel_state.get_expert_model_parallel_rank() * num_local
        for name, parameter in chunk.named_parameters():
            whole = whole_name(chunk, name, experts_before)
            if parameter.grad is None or not torch.isfinite(parameter.grad).all():
                part.unfinished_gradients.add(whole)
        for layer, router in zip(_layers(chunk), _routers(chunk), strict=True):
            grad = router.module.weight.grad
            if grad is not None:
                part.router_gradients[layer] = grad.double().cpu().numpy()


# --- rank 0 ---------------------------------------------------------------------------------------


def combine(
    parts: Sequence[Part],
    capture: Capture,
    microbatches: Sequence[Microbatch],
    sizes: Sizes,
    moe_layers: Sequence[int],
) -> Comparison:
    """One ``Comparison`` of every rank's part.

    Raises:
        RuntimeError: two ranks that score the same tokens disagree, or a row has no route.
    """
    logprobs = {
        (schedule, support): _joined_logprobs(parts, sizes, schedule, support, len(microbatches))
        for schedule in ("live", "replayed", "training")
        for support in (False, True)
    }
    rollout = np.concatenate(capture.sampled_logprobs).astype(np.float64)
    differences = {
        variant: logprobs["replayed" if uses_routes else "live", uses_support] - rollout
        for variant, (uses_routes, uses_support) in compare.VARIANTS.items()
    }
    training = logprobs["training", True] - logprobs["replayed", True]
    scoring = [p for p in parts if p.losses and p.tp == p.cp == 0]
    gradients: dict[int, np.ndarray] = {}
    for part in parts:
        for layer, grad in part.router_gradients.items():
            gradients[layer] = gradients.get(layer, 0.0) + grad
    # the schedule scales by the context-parallel ranks, whose mean a trainer takes
    norm = sum(float(np.square(grad / sizes.cp).sum()) for grad in gradients.values()) ** 0.5
    return Comparison(
        differences=differences,
        differing=_differing_routes(parts, "live", microbatches, sizes, moe_layers),
        differing_replayed=_differing_routes(parts, "replayed", microbatches, sizes, moe_layers),
        forward_report=_joined_report(parts, "replayed"),
        training_report=_joined_report(parts, "training"),
        recompute_difference=float(np.abs(training).max()),
        loss=float(
            np.mean([np.sum(losses) for losses in zip(*(p.losses for p in scoring), strict=True)])
        ),
        router_gradient=norm,
        unfinished_gradients=tuple(sorted(set().union(*(p.unfinished_gradients for p in parts)))),
        seconds={
            schedule: max(part.seconds[schedule] for part in parts) for schedule in parts[0].seconds
        },
    )


def _joined_logprobs(
    parts: Sequence[Part], sizes: Sizes, schedule: str, support: bool, num_microbatches: int
) -> np.ndarray:
    """[response tokens] in the capture's order."""
    joined = []
    for i in range(num_microbatches):
        for dp in range(sizes.ep):
            said = [
                part.logprobs[schedule][support, i]
                for part in parts
                if part.dp == dp and part.pp == sizes.pp - 1
            ]
            if any(not np.array_equal(other, said[0], equal_nan=True) for other in said[1:]):
                raise RuntimeError(
                    f"ranks that scored the same tokens of microbatch {i} disagree ({schedule})"
                )
            joined.append(said[0])
    return np.concatenate(joined)


def _differing_routes(
    parts: Sequence[Part],
    schedule: str,
    microbatches: Sequence[Microbatch],
    sizes: Sizes,
    moe_layers: Sequence[int],
) -> np.ndarray:
    """[route rows, MoE layers] bool: where the set of a schedule's experts is not the rollout's."""
    rows = []
    for i, batch in enumerate(microbatches):
        layers = []
        for layer in moe_layers:
            # of the ranks of one replica each saw some of its rows; ids beat -1
            taken = np.concatenate([
                np.max([
                    part.routes[schedule][layer, i]
                    for part in parts
                    if part.dp == dp and (layer, i) in part.routes[schedule]
                ], 0)
                for dp in range(sizes.ep)
            ])  # fmt: skip
            if (taken < 0).any():
                raise RuntimeError(f"no rank saw a row of layer {layer}, microbatch {i}")
            captured = batch.rollout_routes.values[:, layer].cpu().numpy().astype(np.int64)
            layers.append((np.sort(taken, -1) != np.sort(captured, -1)).any(-1))
        rows.append(np.stack(layers, 1))
    return np.concatenate(rows)


def _joined_report(parts: Sequence[Part], schedule: str) -> ScheduleReport:
    """Of the whole model: a router that several ranks hold counts as the one asked least."""
    reports = [(part, part.reports[schedule]) for part in parts]
    asked: dict[str, int] = {}
    recomputed = 0
    for stage in sorted({part.pp for part in parts}):
        peers = [report for part, report in reports if part.pp == stage]
        for name in peers[0].asked:
            asked[f"{name} of stage {stage}"] = min(report.asked[name] for report in peers)
        recomputed += min(report.recomputed_calls for report in peers)
    # a report's rows are those of all ranks of its replica
    replicas = [report for part, report in reports if part.tp == part.pp == part.cp == 0]
    return ScheduleReport(
        microbatches=reports[0][1].microbatches,
        asked=asked,
        recomputed_calls=recomputed,
        rows_replayed=sum(report.rows_replayed for report in replicas),
        rows_live=sum(report.rows_live for report in replicas),
        rows_dummy=sum(report.rows_dummy for report in replicas),
        completed=all(report.completed for _, report in reports),
    )
