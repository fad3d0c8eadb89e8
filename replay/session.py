"""Replay a rollout's routes through Megatron's routers for the length of one pipeline schedule.

    session = ReplaySession(model, captured_layers=CapturedLayers.decoder(num_layers))
    with session.schedule(microbatches):
        get_forward_backward_func()(forward_step_func=forward_step, ...)

    def forward_step(data_iterator, model):
        step = session.begin(model)  # this chunk's next microbatch
        ...model(..., padding_mask=step.padding_mask)

The session owns its state. For one schedule it puts its own object on each router of the model it
was given and takes it off again, whatever happened: no configuration flag, no global list, no queue
of somebody else's. What can be wrong on the host is found before the first forward.

Sizes: B trajectories, T token slots of this rank's routers, L captured layers, K experts a token,
E experts. Megatron-core 0.16.1 to 0.19.2.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packhorse._nvtx import ranged, ranged_methods
from packhorse.replay import routers as _routers
from packhorse.replay.agreement import Agreement, Fact, check_all_ranks
from packhorse.replay.aux_loss import install_loss_shim
from packhorse.replay.device_rows import MicrobatchRows, as_range
from packhorse.replay.expert_bias import install_expert_bias_shim
from packhorse.replay.host import is_int
from packhorse.replay.layout import TokenLayout
from packhorse.replay.metrics import Tally, tally_metrics, tally_rows
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.routers import CapturedLayers, LocatedRouter
from packhorse.replay.sampling import RouteSample, ScheduleCounts
from packhorse.replay.survey import Chunk, Survey, check_microbatches, router_name
from packhorse.replay.targets import MicrobatchSlot, OpenMicrobatch, RouterTargets

__all__ = [
    "CapturedLayers",
    "ReplayMicrobatch",
    "ReplaySession",
    "ReplayStep",
    "ScheduleReport",
]

_NAME = "ReplaySession"


@dataclass(frozen=True, eq=False)
class ReplayStep:
    """What ``session.begin`` tells a forward step.

    Attributes:
        padding_mask: what this chunk's forward takes as ``padding_mask``: [B, S] (thd: [1, T]) bool
            on the layout's device, True = padding or not captured.
        layout: the microbatch's layout.
        index: of the microbatch in the schedule.
        chunk: index of the model chunk.
        microbatch: what was given to ``schedule``.
    """

    padding_mask: Tensor
    layout: TokenLayout
    index: int
    chunk: int
    microbatch: ReplayMicrobatch


@dataclass(frozen=True)
class ScheduleReport:
    """What a schedule did. Host integers; rows are those of all ranks, dummies include pads.

    Attributes:
        microbatches: given to the schedule.
        asked: first passes of each router by its name; MTP routers, which run live, are left out.
        recomputed_calls: router calls answered inside a backward.
        rows_replayed, rows_live, rows_dummy: token slots of a layer, summed over microbatches.
        completed: the schedule ended without an exception.
    """

    microbatches: int
    asked: dict[str, int]
    recomputed_calls: int
    rows_replayed: int
    rows_live: int
    rows_dummy: int
    completed: bool

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the replayed routers of this rank."""
        return tuple(self.asked)


@ranged_methods("report", "tally")
class ReplaySession:
    """Replays routes through the routers of ``model``.

    Args:
        model: this rank's model, or the list of its chunks, as given to the schedule function; DDP
            and Float16Module wrappers are looked through.
        captured_layers: what the layer axis of the routes stands for.
        allow_live_aux_loss: leave a load-balancing loss to Megatron's own top-k of the live scores.
            Without it the loss is that of the replayed routes; in either case over real tokens
            (``replay/aux_loss.py``).
        sample_routes_every: every so many schedules that have routes, the first one included, each
            replayed router's own choice is computed too and tallied against the rollout's
            (``replay/sampling.py``). 0: never. The other schedules pay nothing. Schedules entered
            under ``torch.no_grad()`` are counted apart from the others, so that both kinds are
            sampled however a step mixes them. One counts once all ranks have opened it, whatever
            becomes of it then: ranks sample the same ones.
        agree: with several ranks, join the outcome of the checks before the first forward, here
            and in each ``schedule``: where one rank fails all raise, and none waits for it in a
            collective. True: all ranks of torch.distributed, each of which then makes its sessions
            and opens its schedules in the same order; a process group with a host backend (gloo):
            its ranks, where not all run this model; False: nobody. One host all-reduce of 4 bytes
            a schedule (its cost: ``replay/agreement.py``); no GPU waits.

    Raises:
        TypeError: ``model`` is not made of modules.
        RuntimeError: another rank failed; names it and its error. It may wait in vain for one whose
            ``agree`` is refused.
        ValueError: a router cannot replay (fused or other routing that ignores it, dropped tokens,
            CUDA graphs, a Megatron-core before 0.16), a router has no captured layer or a captured
            layer no router, or the model has no MoE layers; names router or layer.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        captured_layers: CapturedLayers,
        allow_live_aux_loss: bool = False,
        sample_routes_every: int = 0,
        agree: Any = True,
    ) -> None:
        self._agreement = Agreement(agree)
        with self._agreement.together(_NAME):
            if not is_int(sample_routes_every) or sample_routes_every < 0:
                raise ValueError(
                    f"{_NAME}: sample_routes_every must be an integer >= 0, got"
                    f" {sample_routes_every!r}"
                )
            self._survey = _first_survey(model, captured_layers, allow_live_aux_loss)
            first = self._survey.chunks()[0].module
            self._tp_rank, self._pp_rank = (
                _routers.rank_of("tp", first),
                _routers.rank_of("pp", first),
            )
        self._targets: _Targets | None = None
        self._sample_every = sample_routes_every
        self._opened_with_routes = {True: 0, False: 0}  # by whether gradients were on
        self._counts: ScheduleCounts | None = None
        self._schedule: _Schedule | None = None
        self._report: ScheduleReport | None = None
        self._live_aux_loss = allow_live_aux_loss

    @contextmanager
    @ranged
    def schedule(self, microbatches: Sequence[ReplayMicrobatch]) -> Iterator["ReplaySession"]:
        """Replay one pipeline schedule: every forward and backward of it runs inside.

        Args:
            microbatches: all of the schedule, in the order in which each chunk runs them. Either
                all have routes or none has (the routers then run live, pads still masked), on all
                ranks that agree. Where routes are asked for, some trajectory of some rank has rows.

        Raises:
            TypeError, ValueError: before the first forward, for what does not fit; names the
                microbatch. At the end, unless an exception is already under way, when a chunk began
                fewer microbatches, a router was never asked, or a recompute did not run.
            RuntimeError: before the first forward: another rank failed; names it and its error.
        """
        name = f"{_NAME}.schedule"
        with contextlib.ExitStack() as on_failure:
            with self._agreement.together(name) as facts:
                opened = self._open(microbatches)
                on_failure.callback(opened.uninstall)
                facts.own = opened.facts()
            check_all_ranks(name, facts)
            on_failure.pop_all()
        if self._sample_every and facts.joined & Fact.WITH_ROUTES:
            kind = bool(facts.joined & Fact.GRADIENTS)
            if self._opened_with_routes[kind] % self._sample_every == 0:
                opened.sample()
            self._opened_with_routes[kind] += 1
        completed = False
        try:
            self._schedule = opened
            yield self
            opened.finish()
            self._counts = opened.counts()
            completed = True
        finally:
            self._schedule = None
            opened.uninstall()
            self._report = opened.report(completed)

    def _open(self, microbatches: Sequence[ReplayMicrobatch]) -> "_Schedule":
        """Check everything and put the objects on the routers; on failure nothing stays."""
        if self._schedule is not None:
            raise ValueError(f"{_NAME}.schedule: a schedule of this session is still open")
        if not isinstance(microbatches, Sequence):
            raise TypeError(
                f"{_NAME}.schedule: microbatches must be a list of ReplayMicrobatch, got"
                f" {type(microbatches).__name__}"
            )
        chunks = self._survey.chunks()
        given = list(microbatches)
        check_microbatches(f"{_NAME}.schedule", chunks, given)
        if self._targets is None or self._targets.chunks is not chunks:
            self._targets = _Targets(chunks)
        opened = _Schedule(self._targets, given, live_aux_loss=self._live_aux_loss)
        opened.install()
        return opened

    @contextmanager
    @ranged
    def agreed(self) -> Iterator[None]:
        """Around host work that may fail on one rank, such as making the microbatches.

        Every rank of the group enters it; where one fails inside, all raise. One host all-reduce.

        Raises:
            RuntimeError: another rank failed; names it and its error.
        """
        with self._agreement.together(f"{_NAME}.agreed"):
            yield

    def begin(self, model: nn.Module) -> ReplayStep:
        """Begin this chunk's next microbatch; call it in ``forward_step`` before the forward.

        Args:
            model: what ``forward_step`` was given.

        Raises:
            ValueError: no schedule is open, ``model`` is no chunk of it, every microbatch was begun
                already, or the chunk's last one never asked for its routes.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{_NAME}.begin: model must be the module that forward_step was given, got"
                f" {type(model).__name__}"
            )
        if self._schedule is None:
            raise ValueError(f"{_NAME}.begin: no schedule is open")
        return self._schedule.begin(model)

    def report(self) -> ScheduleReport:
        """What the last schedule did, also one that ended in an exception."""
        if self._report is None:
            raise ValueError(f"{_NAME}.report: no schedule has ended yet")
        return self._report

    def tally(self) -> Tally:
        """Counts of the last completed schedule, each on one rank of those that have the same.

        Merge them over steps by ``merge_tallies`` and over ranks by an all-reduce of each name, MAX
        for names in ``_max`` and SUM for the others, over all ranks. Rows and coverage, host
        integers, are counted on the first tensor, context and pipeline rank and 0 on the others.
        Routes and padding, where the schedule was sampled, lie on the captured layer axis; each
        rank counts its own tokens and layers (tensor ranks without sequence parallelism have the
        same: the first one does).
        """
        if self._counts is None:
            raise ValueError(f"{_NAME}.tally: no schedule has completed yet")
        return self._counts.counted_once(self._tp_rank, self._pp_rank)

    def metrics(self) -> dict[str, Any]:
        """``tally_metrics`` of the last completed schedule: this rank's figures, none of them read.

        Always shares of rows replayed, live and dummy and the coverage of the captured prefixes,
        of this rank's micro-batches on every rank that runs them; in a sampled schedule also the
        route mismatch, per captured layer and in total, and the padding that each expert-parallel
        rank gets from here.
        """
        if self._counts is None:
            raise ValueError(f"{_NAME}.metrics: no schedule has completed yet")
        return tally_metrics(self._counts.own())


# --- before the first forward ---------------------------------------------------------------------


def _first_survey(model: object, captured_layers: object, allow_live_aux_loss: bool) -> Survey:
    if not isinstance(model, nn.Module | Sequence):
        raise TypeError(
            f"{_NAME}: model must be a module or a list of them, got {type(model).__name__}"
        )
    models = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in models:
        if not isinstance(chunk, nn.Module):
            raise TypeError(
                f"{_NAME}: model must be a module or a list of them, got {type(chunk).__name__}"
            )
    if not models:
        raise ValueError(f"{_NAME}: no model chunk was given")
    if not isinstance(captured_layers, CapturedLayers):
        raise TypeError(
            f"{_NAME}: captured_layers must be CapturedLayers, got {type(captured_layers).__name__}"
        )
    survey = Survey(models, captured_layers, allow_live_aux_loss=allow_live_aux_loss)
    survey.chunks()
    return survey


# --- one schedule ---------------------------------------------------------------------------------


class _Targets:
    """What stands on the routers of these chunks, schedule after schedule."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self.slots = [MicrobatchSlot() for _ in chunks]
        self.decoder: list[list[RouterTargets]] = []
        self.mtp: list[list[RouterTargets]] = []
        for chunk, slot in zip(chunks, self.slots, strict=True):
            self.decoder.append(
                [_make_targets(chunk, router, j, slot) for j, router in enumerate(chunk.routers)]
            )
            self.mtp.append([_make_targets(chunk, router) for router in chunk.masked_mtp_routers])
        #: of each chunk, for ``MicrobatchRows.gather_targets``
        self.gather_options = [
            {
                "positions": as_range(chunk.positions),
                "num_experts": chunk.num_experts,
                "topk": chunk.topk,
                "ep_size": chunk.config.expert_model_parallel_size,
                "dtype": _ids_dtype(chunk),
            }
            for chunk in chunks
        ]
        self.all = [target for part in (*self.decoder, *self.mtp) for target in part]


class _Schedule:
    """State of one schedule: the objects on the routers and each chunk's count."""

    def __init__(
        self,
        targets: _Targets,
        microbatches: list[ReplayMicrobatch],
        *,
        live_aux_loss: bool,
    ) -> None:
        self._chunks = chunks = targets.chunks
        self._microbatches = microbatches
        self._live_aux_loss = live_aux_loss
        self._begun = [0] * len(chunks)
        self._rows: dict[int, MicrobatchRows] = {}
        self._chunk_by_model: dict[nn.Module, Chunk] = {}  # as forward_step is given it
        self._undo: list[Callable[[], None]] = []
        self._replaced: list[tuple[Any, Any]] = []  # router, what stood on it
        self._slots, self._targets, self._mtp = targets.slots, targets.decoder, targets.mtp
        self._gather_options: list[dict[str, Any]] = targets.gather_options
        self._all_targets = targets.all
        for target in targets.all:
            target.begin_schedule()
        self._sample: RouteSample | None = None

    def facts(self) -> int:
        """Bits of ``Fact``: what this rank tells the others."""
        facts = Fact.GRADIENTS if torch.is_grad_enabled() else 0
        if self._microbatches[0].routes is None:
            return facts | Fact.WITHOUT_ROUTES
        facts |= Fact.WITH_ROUTES
        if any(microbatch.num_replayed for microbatch in self._microbatches):
            facts |= Fact.HAS_ROWS
        elif any(part.has_targets or any(part.missing) for part in self._microbatches):
            facts |= Fact.NEEDS_ROWS
        return facts

    def sample(self) -> None:
        """Tally this schedule's routes; before its first microbatch."""
        self._sample = RouteSample(
            axis_length=max(chunk.axis_length for chunk in self._chunks),
            ep_size=self._chunks[0].config.expert_model_parallel_size,
            device=self._microbatches[0].layout.device,
        )
        for chunk, targets in zip(self._chunks, self._targets, strict=True):
            self._sample.watch(chunk.positions, targets)

    # --- on and off the routers -------------------------------------------------------------------

    def install(self) -> None:
        """Put the objects on the routers; on failure nothing stays."""
        placed: list[tuple[Any, RouterTargets, bool]] = []
        for chunk, targets, mtp in zip(self._chunks, self._targets, self._mtp, strict=True):
            routers = [*chunk.routers, *chunk.masked_mtp_routers]
            for router, target in zip(routers, [*targets, *mtp], strict=True):
                placed.append((router.module, target, chunk.has_losses))
        for module, target, _ in placed:
            if isinstance(module.router_replay, RouterTargets):
                raise ValueError(
                    f"{_NAME}.schedule: {target.name} is held by another open schedule"
                )
        try:
            if any(module.enable_expert_bias for module, _, _ in placed):
                self._undo.append(install_expert_bias_shim())
            for module, target, has_losses in placed:
                self._place(module, target, has_losses)
        except BaseException:
            self.uninstall()
            raise

    def _place(self, module: Any, target: RouterTargets, has_losses: bool) -> None:
        target.layer_number = module.layer_number
        self._replaced.append((module, module.router_replay))
        _put_replay(module, target)
        if target.layer == 0 and not target.is_mtp:  # a chunk's routers see the same rows
            self._undo.append(module.register_forward_pre_hook(target.check_input).remove)
        if has_losses:
            live = self._live_aux_loss
            self._undo.append(install_loss_shim(module, target, live_aux_loss=live))

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()
        while self._replaced:
            _put_replay(*self._replaced.pop())
        self._rows.clear()
        for target in self._all_targets:
            target.forget()

    # --- microbatches -----------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> ReplayStep:
        chunk = self._chunk_by_model.get(model)
        if chunk is None:
            chunk = self._chunk_by_model[model] = self._chunk_of(model)
        index = self._begun[chunk.index]
        if index == len(self._microbatches):
            raise ValueError(
                f"{_NAME}.begin: chunk {chunk.index} has begun every microbatch of the schedule"
                f" ({len(self._microbatches)}), and was asked for another one"
            )
        microbatch = self._microbatches[index]
        layout = microbatch.layout
        targets, mtp = self._targets[chunk.index], self._mtp[chunk.index]
        rows = self._rows.get(index)
        if rows is None:
            rows = self._rows[index] = MicrobatchRows.build(microbatch)
        batch = layout.num_sequences if layout.format == "bshd" else 1
        shape = (layout.num_rank_tokens // max(batch, 1), batch)
        wants_grad = torch.is_grad_enabled()

        ids = None
        if microbatch.routes is not None and targets:
            ids = rows.gather_targets(**self._gather_options[chunk.index])
        compared = None
        if self._sample is not None and ids is not None:
            compared = rows.row_ids >= 0
            self._sample.add_padding(
                chunk.positions, ids, rows.padding_mask, num_experts=chunk.num_experts
            )
        masks, has_rows = (rows.padding_mask,), (rows.any_covered(),)
        opened = OpenMicrobatch(
            index,
            None if ids is None else ids.unbind(0),
            rows.live_rows,
            masks,
            has_rows,
            shape,
            wants_grad,
            compared,
        )
        self._slots[chunk.index].open(opened)
        for router, target in zip(chunk.masked_mtp_routers, mtp, strict=True):
            depths = _mtp_depths(router)
            target.open(
                OpenMicrobatch(
                    index,
                    None,
                    None,
                    rows.mtp_masks(depths),
                    tuple(map(rows.any_covered, depths)),
                    shape,
                    wants_grad,
                )
            )
        self._begun[chunk.index] += 1
        if min(self._begun) > index:
            self._rows.pop(index, None)
        return ReplayStep(
            padding_mask=rows.model_mask(scattered_by_model=chunk.scatters_mask),
            layout=layout,
            index=index,
            chunk=chunk.index,
            microbatch=microbatch,
        )

    def finish(self) -> None:
        """Checks of a schedule that ended by itself."""
        given = len(self._microbatches)
        for chunk, begun in zip(self._chunks, self._begun, strict=True):
            if begun != given:
                raise ValueError(
                    f"{_NAME}.schedule: chunk {chunk.index} began {begun} microbatches of {given}"
                )
        for slot in self._slots:
            slot.close()
        for target in self._all_targets:
            target.check_nothing_left()

    def counts(self) -> ScheduleCounts:
        return ScheduleCounts(
            rows=[(tally_rows(part), part.layout.cp_rank) for part in self._microbatches],
            sampled={} if self._sample is None else self._sample.tally(),
            sequence_parallel=bool(self._chunks[0].config.sequence_parallel),
        )

    def report(self, completed: bool) -> ScheduleReport:
        return ScheduleReport(
            microbatches=len(self._microbatches),
            asked={target.name: target.asked for part in self._targets for target in part},
            recomputed_calls=sum(target.recomputed for part in self._targets for target in part),
            rows_replayed=sum(microbatch.num_replayed for microbatch in self._microbatches),
            rows_live=sum(microbatch.num_live for microbatch in self._microbatches),
            rows_dummy=sum(microbatch.num_dummy for microbatch in self._microbatches),
            completed=completed,
        )

    def _chunk_of(self, model: nn.Module) -> Chunk:
        levels = list(_routers.unwrap(model))
        for chunk in self._chunks:
            if any(level is chunk.module for level in levels):
                return chunk
        for chunk in self._chunks:  # a wrapper of another kind
            if any(module is chunk.module for module in model.modules()):
                return chunk
        raise ValueError(
            f"{_NAME}.begin: this {type(model).__name__} is no chunk of the session's model; it"
            " must be the model that forward_step receives"
        )


def _put_replay(module: Any, replay: Any) -> None:
    own = module.__dict__
    if "router_replay" in own:  # past nn.Module's own setter, which is slow
        own["router_replay"] = replay
    else:
        module.router_replay = replay


def _make_targets(
    chunk: Chunk, router: LocatedRouter, layer: int = 0, slot: MicrobatchSlot | None = None
) -> RouterTargets:
    return RouterTargets(
        router_name(chunk.index, router),
        layer=layer,
        num_experts=router.module.num_experts,
        topk=router.module.topk,
        is_mtp=router.is_mtp,
        slot=slot,
    )


def _ids_dtype(chunk: Chunk) -> torch.dtype:
    """Autograd keeps an int64 copy of each router's ids for the backward, so that is what is made;
    under recompute only the ids themselves stay from one pass to the other."""
    return torch.int64 if chunk.config.recompute_granularity is None else torch.int32


def _mtp_depths(router: LocatedRouter) -> Sequence[int]:
    """Depths of the heads that the router serves, in the order of its calls."""
    config = router.module.config
    if getattr(config, "mtp_use_repeated_layer", False):
        return range(1, config.mtp_num_layers + 1)
    return (router.layer,)
