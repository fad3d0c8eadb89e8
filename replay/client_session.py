"""A trajectory of several turns with a server, kept in a ``Trace``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.packed.trace import Trace
from packhorse.packed.trajectory import Trajectory
from packhorse.replay.rollout import Rollout

if TYPE_CHECKING:
    from packhorse.replay.client import RolloutClient


class RolloutSession:
    """Turns that fill a trace. Each asks only for the route rows that the trace lacks; a turn that
    fails or is cancelled changes nothing, and may be tried again.

    Args:
        client: an open client.
        prompt_ids: [P] of the first turn.
        check_prefix: ask for all rows in each turn, and hold those that are known already to be
            equal, bit for bit: a prefix that was evaluated by other weights (no prefix-cache reset)
            or other kernels shows. Not where the weight version has changed.
        trace: arguments of ``Trace``: sizes, ``has_logprobs``, ``trajectory``.

    Raises:
        TypeError, ValueError: as ``Trace``; ``vocab_size`` is given without a support, or not with
            one.
    """

    def __init__(
        self,
        client: "RolloutClient",
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        check_prefix: bool = False,
        **trace: Any,
    ) -> None:
        if (trace.get("vocab_size") is None) != (client.support is None):
            raise ValueError(
                f"RolloutSession: vocab_size={trace.get('vocab_size')!r} with a client of"
                f" support={client.support!r}: each sampled token has a support row, or none has"
            )
        self._client = client
        self._check_prefix = check_prefix
        self.trace = Trace(prompt_ids, **trace)
        self.rollouts: list[Rollout] = []  # one a turn
        self.num_checked_rows = 0  # of known rows that came again, all equal

    async def turn(self, sampling: Mapping[str, Any] | None = None) -> Rollout:
        """Sample the next tokens after all so far, and add them to the trace.

        Raises:
            ValueError: ``n`` is not 1; as ``RolloutClient.generate`` and ``Trace.add_turn``; with
                ``check_prefix``, a known row came back as another.
            ServerError, ServerUnreachable, TransientWireError, WireFormatError: as ``generate``.
        """
        name = "RolloutSession.turn"
        if sampling is not None and sampling.get("n", 1) != 1:
            raise ValueError(f"{name}: n must be 1, got {sampling['n']!r}")
        ids = self.trace.token_ids
        start = 0
        if not self._check_prefix:
            # one row before the prompt's end at most: vLLM 0.28 and 0.29 die of a start at its end
            start = min(self.trace.num_rows, ids.size - 1)
        [rollout] = await self._client.generate(ids, sampling, routes_start=start)
        if self._check_prefix and rollout.routes is not None:
            self._hold_prefix(name, rollout)
        self.trace.add_turn(**rollout.turn())
        self.rollouts.append(rollout)
        return rollout

    def observe(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Tokens that no model sampled (``Trace.add_observation``)."""
        self.trace.add_observation(token_ids)

    def finalize(self, **keywords: Any) -> Trajectory:
        """``Trace.finalize``."""
        return self.trace.finalize(**keywords)

    def _hold_prefix(self, name: str, rollout: Rollout) -> None:
        assert rollout.routes is not None
        if not self.rollouts or _versions(rollout) != _versions(self.rollouts[-1]):
            return
        untrained = np.zeros(self.trace.num_response_tokens, dtype=np.bool_)
        known = self.trace.finalize(loss_mask=untrained).routes
        assert known is not None
        count = min(len(known), len(rollout.routes))
        differ = (known[:count] != rollout.routes[:count]).any(axis=2)
        if differ.any():
            row, layer = (int(index) for index in np.argwhere(differ)[0])
            raise ValueError(
                f"{name}: routes of turn {len(self.rollouts)}: {int(differ.sum())} of"
                f" {differ.size} known cells came back as others, first row {row}, layer {layer}:"
                f" {rollout.routes[row, layer].tolist()}, known"
                f" {known[row, layer].tolist()}"
            )
        self.num_checked_rows += count


def _versions(rollout: Rollout) -> set[Any]:
    return {span.version for span in rollout.weight_versions}
