"""How far a Megatron trainer's logprobs are from a rollout's, with and without replay.

One model, three schedules of Megatron's own ``get_forward_backward_func``, all over the same
microbatches: forward only and live (routes are recorded), forward only with the rollout's routes,
and a training schedule with the rollout's routes, whose loss is the mean negative logprob of the
sampled tokens. Each is scored over the whole vocabulary and over the sampler's support.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from packhorse.kernels.rows import scatter_rows
from packhorse.packed.batch import Batch
from packhorse.packed.collate import ROUTES_FIELD, SUPPORT_FIELD
from packhorse.packed.domains import validate_batch
from packhorse.packed.inputs import make_inputs, token_masks
from packhorse.packed.inputs_fields import FIRST_COLUMNS_FIELD, LENGTHS_FIELD, SEQUENCES_FIELD
from packhorse.packed.microbatch import plan_by_count
from packhorse.packed.tensor import PackedTensor
from packhorse.packed.trace import Trace
from packhorse.replay.capture import Capture
from packhorse.replay.layout import TokenLayout
from packhorse.replay.routers import find_routers
from packhorse.replay.scoring import LmHead, score_microbatch
from packhorse.replay.scoring_megatron import hidden_states_of, lm_head_of
from packhorse.replay.session import CapturedLayers, ReplayMicrobatch, ReplaySession

#: What is taken from the rollout -> (its routes, its support).
VARIANTS = {
    "neither": (False, False),
    "routes": (True, False),
    "support": (False, True),
    "both": (True, True),
}
#: Ways to misplace routes on purpose -> where they are then.
BREAKS = {
    "late": "one token late",
    "early": "one token early",
    "batch-major": "rows in the order [B, S] where the model reads [S, B]",
    "layers": "layers in reverse order",
}


@dataclass(frozen=True)
class Gap:
    """Of d = trainer logprob - rollout logprob over the sampled tokens."""

    mean: float  # of |d|
    p99: float  # of |d|, interpolated
    max: float  # of |d|
    k3: float  # mean of exp(d) - 1 - d, an estimate of KL(rollout || trainer)

    @classmethod
    def of(cls, differences: np.ndarray) -> "Gap":
        d = np.asarray(differences, np.float64)
        if not d.size:
            return cls(0.0, 0.0, 0.0, 0.0)
        size = np.abs(d)
        k3 = float((np.expm1(d) - d).mean())
        return cls(float(size.mean()), float(np.quantile(size, 0.99)), float(size.max()), k3)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Some trajectories of a capture, laid out for one rank."""

    layout: TokenLayout
    batch: Batch  # of ``make_inputs``, on the layout's device
    routes: PackedTensor  # [rows, L, K], what is replayed: misplaced where that was asked for
    loss_masks: tuple[np.ndarray, ...]  # [length] bool, host: the response tokens

    @property
    def rollout_routes(self) -> PackedTensor:
        """[rows, L, K], what the rollout took."""
        return self.batch[ROUTES_FIELD]

    @property
    def support(self) -> PackedTensor:
        """[response tokens, C]."""
        return self.batch[SUPPORT_FIELD]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What ``compare`` found for one model."""

    differences: dict[str, np.ndarray]  # variant -> [response tokens], trainer - rollout
    differing: np.ndarray  # [route rows, MoE layers] bool: live experts are not the rollout's
    differing_replayed: np.ndarray  # the same of the forward-only schedule with replay
    forward_report: Any  # the session's report of the forward-only schedule
    training_report: Any  # and of the training schedule
    recompute_difference: float  # max |training - forward-only| logprob, with replay
    loss: float
    router_gradient: float  # Euclidean norm over all router weights
    unfinished_gradients: tuple[str, ...]  # parameters whose gradient is missing or not finite
    seconds: dict[str, float]  # schedule -> wall time

    @property
    def gaps(self) -> dict[str, Gap]:
        return {variant: Gap.of(d) for variant, d in self.differences.items()}


def make_microbatches(
    capture: Capture,
    *,
    format: Literal["thd", "bshd"],
    size: int,
    device: torch.device | str = "cpu",
    misplace: str | None = None,
    moe_layers: Sequence[int] | None = None,
) -> list[Microbatch]:
    """Cut a capture into microbatches of ``size`` trajectories, in its order.

    Args:
        misplace: one of ``BREAKS``: move the routes to wrong rows, to see that it shows. "late",
            "early": by one token; "layers": the order of ``moe_layers`` is reversed; "batch-major":
            a row at [b, s] goes where [s, b] is wanted.

    Raises:
        ValueError: ``size`` < 1, or ``misplace`` is unknown or moves nothing in this format.
    """
    if size < 1:
        raise ValueError(f"make_microbatches: size must be at least 1, got {size}")
    if misplace is not None and misplace not in BREAKS:
        raise ValueError(f"make_microbatches: misplace={misplace!r}; known: {', '.join(BREAKS)}")
    if misplace == "batch-major" and (format == "thd" or min(size, capture.num_trajectories) < 2):
        raise ValueError(
            "make_microbatches: misplace='batch-major' needs format='bshd' and at least 2"
            " trajectories in a microbatch"
        )
    layers = list(range(capture.num_layers) if moe_layers is None else moe_layers)
    batch = make_batch(capture, moe_layers=moe_layers)
    microbatches = []
    for part in plan_by_count(len(batch), microbatch_size=size, equal_sizes=False).split(batch):
        layout = TokenLayout.build(
            part[LENGTHS_FIELD],
            format=format,
            first_columns=part[FIRST_COLUMNS_FIELD],
            batch_width=part[SEQUENCES_FIELD].shape[1],
            device=device,
        )
        placed = part.to(device)
        routes = placed[ROUTES_FIELD]
        if misplace is not None:
            routes = _misplace(part[ROUTES_FIELD], misplace, layout, layers).to(device)
        loss_masks = token_masks(part)
        assert loss_masks is not None
        microbatches.append(Microbatch(layout, placed, routes, tuple(loss_masks)))
    return microbatches


def make_batch(capture: Capture, *, moe_layers: Sequence[int] | None = None) -> Batch:
    """The trajectories of a capture as a trainer gets them: traces, inputs, one check of all."""
    trajectories = []
    for i, prompt in enumerate(capture.prompt_ids):
        trace = Trace(
            prompt,
            num_layers=capture.num_layers,
            topk=capture.topk,
            num_experts=capture.num_experts,
            moe_layers=moe_layers,
            vocab_size=capture.vocab_size,
            trajectory=i,
        )
        routes = capture.routes[i]
        trace.add_turn(
            capture.response_ids[i],
            logprobs=capture.sampled_logprobs[i],
            support=capture.support[i],
            routes=routes,
            evaluated=len(routes),
        )
        trajectories.append(trace.finalize())
    batch = make_inputs(
        trajectories,
        vocab_size=capture.vocab_size,
        num_experts=capture.num_experts,
        moe_layers=moe_layers,
    )
    validate_batch(
        batch,
        vocab_size=capture.vocab_size,
        num_experts=capture.num_experts,
        num_layers=capture.num_layers,
        topk=capture.topk,
    )
    return batch


def compare(
    model: Any,
    capture: Capture,
    microbatches: Sequence[Microbatch],
    *,
    temperature: float = 1.0,
    moe_layers: Sequence[int] | None = None,
) -> Comparison:
    """Run the three schedules on ``model`` (of ``load_hf_model``) and compare logprobs.

    Args:
        model: a ``GPTModel`` on the microbatches' device. Its gradients are replaced.
        microbatches: of ``make_microbatches``, for the same capture.
        temperature: the rollout's.
        moe_layers: decoder layers that have experts, from 0; by default all.

    Raises:
        ValueError: as ``ReplaySession``: the model's layers or experts are not the capture's.
    """
    session = ReplaySession(model, captured_layers=CapturedLayers.decoder(capture.num_layers))
    layers = list(range(capture.num_layers) if moe_layers is None else moe_layers)
    seconds = {}
    rollout = np.concatenate(capture.sampled_logprobs).astype(np.float64)

    model.eval()
    began = time.perf_counter()
    with record_routes(model) as recorded, torch.no_grad():
        live = _run_schedule(model, microbatches, temperature, forward_only=True)
    seconds["live"] = time.perf_counter() - began

    replayed_microbatches = [
        ReplayMicrobatch(m.layout, m.routes, loss_masks=m.loss_masks) for m in microbatches
    ]
    began = time.perf_counter()
    with (
        record_dispatch(model) as dispatched,
        session.schedule(replayed_microbatches),
        torch.no_grad(),
    ):
        replayed = _run_schedule(model, microbatches, temperature, True, session.begin)
    forward_report = session.report()
    seconds["replayed"] = time.perf_counter() - began

    model.train()
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    with session.schedule(replayed_microbatches):
        trained = _run_schedule(model, microbatches, temperature, False, session.begin)
    training_report = session.report()
    seconds["training"] = time.perf_counter() - began

    logprobs = {
        variant: (replayed if uses_routes else live).logprobs[uses_support]
        for variant, (uses_routes, uses_support) in VARIANTS.items()
    }
    routers = [p.grad for n, p in model.named_parameters() if n.endswith("router.weight")]
    unfinished = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not torch.isfinite(parameter.grad).all()
    ]
    return Comparison(
        differences={variant: values - rollout for variant, values in logprobs.items()},
        differing=_differing_routes(recorded, microbatches, layers),
        differing_replayed=_differing_routes(dispatched, microbatches, layers),
        forward_report=forward_report,
        training_report=training_report,
        recompute_difference=float(np.abs(trained.logprobs[True] - logprobs["both"]).max()),
        loss=trained.loss,
        router_gradient=sum(float(g.double().square().sum()) for g in routers if g is not None)
        ** 0.5,
        unfinished_gradients=tuple(unfinished),
        seconds=seconds,
    )


# --- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Scored:
    logprobs: dict[bool, np.ndarray]  # over the support or not -> [response tokens] float64
    loss: float


def _run_schedule(
    model: Any,
    microbatches: Sequence[Microbatch],
    temperature: float,
    forward_only: bool,
    begin: Callable[[Any], Any] | None = None,
) -> _Scored:
    num_targets = sum(m.support.num_rows for m in microbatches)
    share = len(microbatches) / max(num_targets, 1)  # the schedule takes the microbatches' mean
    results = run_schedule([model], microbatches, temperature, share, forward_only, begin)
    logprobs = {
        support: torch.cat([result[f"support={support}"] for result in results]).cpu().numpy()
        for support in (False, True)
    }
    loss = float(torch.stack([result["loss"] for result in results]).mean())
    return _Scored({key: value.astype(np.float64) for key, value in logprobs.items()}, loss)


def run_schedule(
    chunks: list[Any],
    microbatches: Sequence[Microbatch],
    temperature: float,
    share: float,
    forward_only: bool,
    begin: Callable[[Any], Any] | None,
) -> list[dict[str, Tensor]]:
    """What the loss function kept, a microbatch an item; empty but on the last pipeline stage.

    ``share`` weighs the loss of a microbatch. Tokens are scored from the hidden states: nobody
    makes logits.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable]:
        batch = next(batches)
        step = None if begin is None else begin(chunk)
        layout = batch.layout
        token_ids = layout.align(batch.batch[SEQUENCES_FIELD], 0)
        output = chunk(
            layout.to_model(token_ids),
            layout.to_model(layout.position_ids()),
            None,
            packed_seq_params=_packed_seq_params(layout),
            padding_mask=None if step is None else step.padding_mask,
        )

        def loss(hidden: Tensor) -> tuple[Tensor, dict]:
            return _loss(hidden, lm_head_of(chunk), batch, temperature, share)

        return output, loss

    iterators = [iter(microbatches) for _ in chunks]
    many = len(chunks) > 1
    with hidden_states_of(chunks):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if many else iterators[0],
            model=chunks if many else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=max(m.layout.num_tokens * m.layout.cp_size for m in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _loss(
    hidden: Tensor, head: LmHead, batch: Microbatch, temperature: float, share: float
) -> tuple[Tensor, dict]:
    token_ids = batch.batch[SEQUENCES_FIELD]
    hidden = hidden.to(head.weight.dtype)  # a wrapper may have widened it, which changed no value
    over_support = score_microbatch(
        hidden, batch.layout, token_ids, batch.support, temperature=temperature, lm_head=head
    )
    with torch.no_grad():
        over_all = score_microbatch(
            hidden,
            batch.layout,
            token_ids,
            response_lengths=batch.support.lengths,
            temperature=temperature,
            lm_head=head,
        )
    loss = -share * over_support.logprobs.values.sum()
    return loss, {
        "support=True": over_support.logprobs.values.detach(),
        "support=False": over_all.logprobs.values,
        "loss": loss.detach().clone(),  # Megatron divides the loss itself, in place
    }


def _packed_seq_params(layout: TokenLayout) -> Any:
    if layout.format != "thd":
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor(layout.cu_seqlens_padded, dtype=torch.int32, device=layout.device)
    longest = max(layout.padded_lengths, default=0)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


# --- live routes ----------------------------------------------------------------------------------


class _Recorder:
    """Takes the place of a ``RouterReplay``: lets the router choose, and keeps the choice."""

    def __init__(self) -> None:
        self.topk_ids: list[Tensor] = []  # [rows, K] int64, one a call

    def get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk):
        values, ids = default_compute_topk(scores, topk, num_groups, group_topk)
        self.topk_ids.append(ids)
        return values, ids


@contextmanager
def record_routes(model: Any) -> Iterator[list[list[Tensor]]]:
    """Record which experts each router of ``model`` chooses, layer by layer.

    Yields:
        For each router, in the order of the layers, its choices: [rows, K], one a call. Only the
        routers of this model are touched, and they are as before afterwards.
    """
    routers = [router.module for router in find_routers(model) if not router.is_mtp]
    before = [router.router_replay for router in routers]
    recorders = [_Recorder() for _ in routers]
    try:
        for router, recorder in zip(routers, recorders, strict=True):
            router.router_replay = recorder
        yield [recorder.topk_ids for recorder in recorders]
    finally:
        for router, replay in zip(routers, before, strict=True):
            router.router_replay = replay


@contextmanager
def record_dispatch(model: Any) -> Iterator[list[list[Tensor]]]:
    """Record which experts each router of ``model`` sends its tokens to, whoever chose them.

    Yields:
        As ``record_routes``; read from the [rows, E] map that the dispatcher is given.
    """
    routers = [router.module for router in find_routers(model) if not router.is_mtp]
    dispatched: list[list[Tensor]] = [[] for _ in routers]

    def keep(calls: list[Tensor]) -> Callable[..., None]:
        def hook(router: Any, given: Any, made: tuple[Tensor, Tensor]) -> None:
            calls.append(made[1].int().topk(router.topk).indices)

        return hook

    hooks = []
    try:
        for router, calls in zip(routers, dispatched, strict=True):
            hooks.append(router.register_forward_hook(keep(calls)))
        yield dispatched
    finally:
        for hook in hooks:
            hook.remove()


def _differing_routes(
    recorded: Sequence[Sequence[Tensor]],
    microbatches: Sequence[Microbatch],
    layers: Sequence[int],
) -> np.ndarray:
    """[route rows, MoE layers] bool: where the set of recorded experts is not the rollout's own."""
    parts = []
    for i, batch in enumerate(microbatches):
        taken = torch.stack([calls[i] for calls in recorded], 1)  # [M, L, K]
        routes = batch.rollout_routes
        row_ids = batch.layout.route_row_ids(routes.lengths)
        taken = scatter_rows(taken, row_ids, routes.num_rows, fill=-1).sort(-1).values
        captured = routes.values[:, list(layers)].long().sort(-1).values
        parts.append((taken != captured).any(-1).cpu().numpy())
    return np.concatenate(parts)


# --- routes put in the wrong place, on purpose ----------------------------------------------------


def _misplace(
    routes: PackedTensor, how: str, layout: TokenLayout, moe_layers: Sequence[int]
) -> PackedTensor:
    segments = [routes.segment(i) for i in range(len(routes))]
    if how == "late":
        moved = [torch.cat([rows[:1], rows[:-1]]) for rows in segments]
    elif how == "early":
        moved = [torch.cat([rows[1:], rows[-1:]]) for rows in segments]
    elif how == "layers":
        order = list(range(routes.row_shape[0]))
        for layer, other in zip(moe_layers, reversed(moe_layers), strict=True):
            order[layer] = other
        moved = [rows[:, order] for rows in segments]
    else:
        moved = _batch_major(segments, layout.padded_lengths[0])
    return PackedTensor.from_segments(moved)


def _batch_major(segments: Sequence[Tensor], width: int) -> list[Tensor]:
    """What each token gets where [B, S] rows are installed in a model that reads [S, B]."""
    batch = len(segments)
    moved = []
    for b, rows in enumerate(segments):
        dummy = torch.arange(rows.shape[2], dtype=rows.dtype).expand(rows.shape[1:])
        new = dummy.repeat(len(rows), 1, 1)
        for s in range(len(rows)):
            other, position = divmod(s * batch + b, width)
            if position < len(segments[other]):
                new[s] = segments[other][position]
        moved.append(new)
    return moved
