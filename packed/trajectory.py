"""A finished trajectory, and B of them packed for a trainer.

    trajectories = [trace.finalize() for trace in traces]
    pack_trajectories(trajectories, num_experts=128, vocab_size=151936)
    generator_output(trajectories)   # or as lists, to filter, replace and join first

Sizes: B trajectories, P prompt and R response tokens, L captured layers, K experts a token, E
experts, V vocabulary, C width of the support, N rows.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from packhorse._nvtx import ranged
from packhorse.packed.collate import (
    LOGPROBS_FIELD,
    ROUTES_FIELD,
    SUPPORT_FIELD,
    SupportRows,
    pack_routes,
    pack_support,
)
from packhorse.packed.tensor import PackedTensor


class TokenKind(IntEnum):
    """Where a response token came from."""

    SAMPLED = 0
    OBSERVATION = 1  # a tool's or user's: no loss
    APPENDED = 2  # put there by the generator (a synthetic EOS)
    RESTORED = 3  # sampled, cut off, and put back behind other tokens


class RowSpan(NamedTuple):
    """Route rows [start, stop) were captured under one version of the weights."""

    start: int
    stop: int
    version: Hashable


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A finished trace. Its arrays are its own; a field that was not declared is None."""

    prompt_ids: np.ndarray  # [P] int64
    response_ids: np.ndarray  # [R] int64
    kinds: np.ndarray  # [R] uint8, TokenKind
    loss_mask: np.ndarray  # [R] bool: the token is a trained target
    logprobs: np.ndarray | None  # [R] float32, finite, at most 0
    support: SupportRows | None  # R rows; empty: no support
    routes: np.ndarray | None  # [captured, L, K] uint8, int16 or int32; no rows where missing
    weight_versions: tuple[RowSpan, ...]  # of the route rows, in order
    missing: bool  # the engine's routes are lost: all its tokens run live
    num_floored: int  # logprobs that were missing: -9999.0
    num_added: int  # support rows that lacked the sampled id

    @property
    def length(self) -> int:
        """P + R."""
        return self.prompt_ids.size + self.response_ids.size

    @property
    def appended(self) -> np.ndarray:
        """[R] bool: tokens that the generator put there (``score_microbatch(appended=)``)."""
        return self.kinds == TokenKind.APPENDED

    @property
    def excused(self) -> np.ndarray:
        """[R] bool: targets that may lie past the captured prefix: appended or restored tokens."""
        return self.appended | (self.kinds == TokenKind.RESTORED)


class PackedTrajectories(NamedTuple):
    """B trajectories as ``ReplayMicrobatch`` and ``score_microbatch`` take them."""

    lengths: tuple[int, ...]  # P + R
    response_lengths: tuple[int, ...]
    routes: PackedTensor | None  # [N, L, K]
    support: PackedTensor | None  # [ΣR, C] int32
    logprobs: list[np.ndarray] | None  # B times [R] float32
    loss_masks: list[np.ndarray]  # B times [P + R] bool
    appended: list[np.ndarray]  # B times [P + R] bool: for scoring
    excused: list[np.ndarray]  # B times [P + R] bool: for replay, restored tokens too
    missing: tuple[bool, ...]


@ranged
def generator_output(trajectories: Sequence[Trajectory]) -> dict[str, list[Any] | None]:
    """Finished traces as the fields that ``select_trajectories`` and its like work on.

    Args:
        trajectories: B, with the same fields.

    Returns:
        Lists of B items: ``prompt_token_ids`` [P] and ``response_ids`` [R] int64; ``loss_masks``,
        ``appended`` and ``excused`` [R] bool; ``rollout_logprobs`` [R] float32;
        ``rollout_sample_support`` ``SupportRows``; ``rollout_expert_indices`` [captured, L, K];
        ``missing`` bools. A field that no trajectory has is None; where there is no trajectory each
        is an empty list. Nothing is copied.

    Raises:
        TypeError: ``trajectories`` is no sequence of ``Trajectory``.
        ValueError: a field is None in some trajectories only.
    """
    name = "generator_output"
    _check_trajectories(name, trajectories)
    fields: dict[str, list[Any] | None] = {
        "prompt_token_ids": [given.prompt_ids for given in trajectories],
        "response_ids": [given.response_ids for given in trajectories],
        "loss_masks": [given.loss_mask for given in trajectories],
        "appended": [given.appended for given in trajectories],
        "excused": [given.excused for given in trajectories],
        "missing": [given.missing for given in trajectories],
    }
    if not trajectories:
        return {**fields, LOGPROBS_FIELD: [], SUPPORT_FIELD: [], ROUTES_FIELD: []}
    return fields | {
        LOGPROBS_FIELD: _field(name, LOGPROBS_FIELD, [given.logprobs for given in trajectories]),
        SUPPORT_FIELD: _field(name, SUPPORT_FIELD, [given.support for given in trajectories]),
        ROUTES_FIELD: _field(name, ROUTES_FIELD, [given.routes for given in trajectories]),
    }


@ranged
def pack_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    num_experts: int | None = None,
    moe_layers: Sequence[int] | None = None,
    vocab_size: int | None = None,
    width: int | None = None,
) -> PackedTrajectories:
    """Join finished traces; a trajectory without response tokens or routes has empty segments.

    Args:
        trajectories: B, with the same fields, L and K.
        num_experts: E, which chooses the dtype of the routes; by default the ids do.
        moe_layers: as in ``pack_routes``.
        vocab_size: V, required where there is support.
        width: C, by default as wide as the widest row.

    Raises:
        TypeError: an argument has a wrong type, or ``vocab_size`` is missing.
        ValueError: fields or sizes differ; all trajectories are marked missing, so that there is
            nothing to replay; or what ``pack_routes`` and ``pack_support`` refuse.
    """
    name = "pack_trajectories"
    _check_trajectories(name, trajectories)
    routes = _field(name, ROUTES_FIELD, [given.routes for given in trajectories])
    support = _field(name, SUPPORT_FIELD, [given.support for given in trajectories])
    logprobs = _field(name, LOGPROBS_FIELD, [given.logprobs for given in trajectories])
    lengths = [given.length for given in trajectories]
    packed_routes = packed_support = None
    if routes is not None:
        if all(given.missing for given in trajectories):
            raise ValueError(
                f"{name}: {ROUTES_FIELD} is missing in all {len(routes)} trajectories, so there is"
                " nothing to replay"
            )
        num_layers, topk = routes[0].shape[1:]
        if num_experts is None:
            num_experts = max(topk, *(int(ids.max(initial=0)) + 1 for ids in routes))
        packed_routes = pack_routes(
            routes,
            lengths,
            num_experts=num_experts,
            topk=topk,
            num_layers=num_layers,
            moe_layers=moe_layers,
        )
    if support is not None:
        if vocab_size is None:
            raise TypeError(f"{name}: vocab_size is needed for {SUPPORT_FIELD}")
        sampled = [given.response_ids.tolist() for given in trajectories]
        packed_support = pack_support(support, sampled, vocab_size=vocab_size, width=width)
    return PackedTrajectories(
        lengths=tuple(lengths),
        response_lengths=tuple(given.response_ids.size for given in trajectories),
        routes=packed_routes,
        support=packed_support,
        logprobs=logprobs,
        loss_masks=[_over_tokens(given, given.loss_mask) for given in trajectories],
        appended=[_over_tokens(given, given.appended) for given in trajectories],
        excused=[_over_tokens(given, given.excused) for given in trajectories],
        missing=tuple(given.missing for given in trajectories),
    )


def _check_trajectories(name: str, trajectories: Any) -> None:
    if not isinstance(trajectories, Sequence):
        raise TypeError(
            f"{name}: trajectories must be a sequence, got {type(trajectories).__name__}"
        )
    for i, given in enumerate(trajectories):
        if not isinstance(given, Trajectory):
            raise TypeError(
                f"{name}: trajectory {i} must be a Trajectory, got {type(given).__name__}"
            )


def _field(name: str, field: str, values: list[Any]) -> list[Any] | None:
    """``values``, or None where no trajectory has the field."""
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise ValueError(
            f"{name}: {field} is None in trajectory {absent.index(True)}, but not in trajectory"
            f" {absent.index(False)}"
        )
    return values


def _over_tokens(trajectory: Trajectory, mask: np.ndarray) -> np.ndarray:
    """[P + R] bool from [R]."""
    return np.concatenate([np.zeros(trajectory.prompt_ids.size, dtype=np.bool_), mask])
