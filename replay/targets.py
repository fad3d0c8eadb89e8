"""The object that answers one router for the length of one schedule.

``TopKRouter`` consults ``router.router_replay`` in one place: it calls
``get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)`` and takes the scores
and ids that come back. On megatron-core 0.16.1 to 0.19.2 any object with that method will do.

    first pass    ids = targets, or the router's own choice in live rows
    recompute     ids = the very ids of that microbatch's first pass
    scores        scores.gather(1, ids): live, so gradients reach the router

A call inside a backward is a recompute. A first pass is remembered for one exactly when the step
wants gradients and the call does not have them: that is how a re-entrant checkpoint runs it. Which
first pass a recompute repeats is told by autograd's sequence numbers, not by the order of calls:
the checkpoint's node was numbered just before its first pass, so backwards may run in any order,
and a microbatch whose backward is left out does not shift the others.

Sizes: T token slots of the rank's routers, K experts a token, E experts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _current_graph_task_id as _graph_task_id

from packhorse.replay.metrics import Tally, merge_tallies, tally_routes


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward here is a recompute."""
    return _graph_task_id() != -1


@dataclass(eq=False, slots=True)
class OpenMicrobatch:
    """What a chunk's routers answer between one ``session.begin`` and the next.

    Attributes:
        index: of the microbatch in the schedule.
        targets: J views [T, K] int32 or int64 on the routers' device, one layer a router, or None:
            every row runs live.
        live_rows: [T] bool, True where the router's own choice stands; None: nowhere.
        padding_masks: [T] bool (True = padding), one for each call that a router makes in one
            microbatch: one, but for a repeated MTP layer.
        has_rows: for each of those calls, whether any row of any rank is no padding.
        input_shape: (sequence, batch) that the router's input must have.
        wants_grad: the step runs with gradients on.
        compared_rows: [T] bool, rows on which the router's own choice is tallied against
            ``targets``; None: it is not asked for.
    """

    index: int
    targets: tuple[Tensor, ...] | None
    live_rows: Tensor | None
    padding_masks: tuple[Tensor, ...]
    has_rows: tuple[bool, ...]
    input_shape: tuple[int, int]
    wants_grad: bool
    compared_rows: Tensor | None = None


class MicrobatchSlot:
    """Where a chunk's routers find the open microbatch: opened once for all of them.

    Attributes:
        current: the open microbatch, or None.
        plain: it too, where every answer is its targets as they are, in int64; else None.
        num_rows: T of it.
        scores_shape: (T, E) of every router's scores, where ``plain``.
        targets: of the routers that must ask in each microbatch.
        asked: routers that have asked for it.
    """

    def __init__(self) -> None:
        self.current: OpenMicrobatch | None = None
        self.plain: OpenMicrobatch | None = None
        self.num_rows = 0
        self.scores_shape = torch.Size((0, 0))
        self.targets: list[RouterTargets] = []
        self.asked = 0

    def open(self, microbatch: OpenMicrobatch) -> None:
        """Answer for this microbatch from now on; the one before must have been asked for."""
        self.close()
        self.current = microbatch
        self.num_rows = microbatch.padding_masks[0].shape[0]
        self.asked = 0
        ids = microbatch.targets
        if (
            ids
            and ids[0].dtype is torch.int64
            and microbatch.live_rows is None
            and microbatch.compared_rows is None
        ):
            self.plain = microbatch
            self.scores_shape = torch.Size((self.num_rows, self.targets[0].num_experts))

    def close(self) -> None:
        """Check that every router asked for the open microbatch, and answer nothing more.

        Raises:
            ValueError: a router never asked; names router and microbatch.
        """
        opened = self.current
        self.current = self.plain = None
        if opened is None or self.asked >= len(self.targets):
            return
        for target in self.targets:
            if not target.has_asked(opened):
                raise ValueError(
                    f"ReplaySession: {target.name} was never asked for its routes in microbatch"
                    f" {opened.index}: its forward did not run, or ran without consulting replay"
                )


class Answer(NamedTuple):
    """What a router was told in one call.

    Attributes:
        topk_ids: [T, K], or None: the router chooses again in the recompute.
        padding_mask: [T] bool, True = padding.
        live_rows: [T] bool, True where ``topk_ids`` are the router's own choice; None: nowhere.
        replays: some row may hold replayed ids; False: the router's own choice everywhere.
        has_rows: some row of some rank is no padding.
    """

    topk_ids: Tensor | None
    padding_mask: Tensor
    live_rows: Tensor | None
    replays: bool
    has_rows: bool


#: ``Answer(*fields)`` of a tuple of its fields, in a third of the time
_answer_of: Callable[[tuple[Any, ...]], Answer] = functools.partial(tuple.__new__, Answer)


class _FirstPass(NamedTuple):
    sequence: int  # number of the next autograd node at the call
    microbatch: int
    answer: Answer


class RouterTargets:
    """Stands on ``router.router_replay``.

    Args:
        name: path and chunk, for messages.
        layer: of the router among those of ``OpenMicrobatch.targets``.
        num_experts, topk: E and K of the router.
        is_mtp: the router chooses itself in both passes; only its padding mask is ours.
        slot: shared by the routers of a chunk; None: one of its own.

    Attributes:
        tally: of ``tally_routes`` over the first passes of a sampled schedule; None: no such call.
    """

    #: Megatron writes it when a layer is renumbered.
    layer_number: int | None = None

    def __init__(
        self,
        name: str,
        *,
        layer: int = 0,
        num_experts: int,
        topk: int,
        is_mtp: bool = False,
        slot: MicrobatchSlot | None = None,
    ) -> None:
        self.name = name
        self.layer = layer
        self.num_experts = num_experts
        self.topk = topk
        self.is_mtp = is_mtp
        self._last: Answer | OpenMicrobatch | None = None  # the microbatch: a plain answer of it
        self.tally: Tally | None = None
        self.asked = 0
        self.recomputed = 0
        self._slot = MicrobatchSlot() if slot is None else slot
        if not is_mtp:
            self._slot.targets.append(self)
        self._answered: OpenMicrobatch | None = None  # the last one that was asked for
        self._calls = 0  # for it
        self._remembered: list[_FirstPass] = []  # ascending in sequence
        self._recomputed_by: dict[int, int] = {}  # checkpoint node -> the backward that ran it

    # --- the session's side -----------------------------------------------------------------------

    @property
    def answer(self) -> Answer | None:
        """Of the call that asked last; the expert-bias and loss shims read it."""
        last = self._last
        if isinstance(last, OpenMicrobatch):
            assert last.targets is not None
            ids, mask = last.targets[self.layer], last.padding_masks[0]
            last = self._last = Answer(ids, mask, None, True, last.has_rows[0])
        return last

    @property
    def _open(self) -> OpenMicrobatch | None:
        return self._slot.current

    def open(self, microbatch: OpenMicrobatch) -> None:
        """``MicrobatchSlot.open``, for a router that stands alone."""
        self._slot.open(microbatch)

    def has_asked(self, microbatch: OpenMicrobatch) -> bool:
        """Whether the router was last asked for this microbatch."""
        return self._answered is microbatch

    def begin_schedule(self) -> None:
        """Count from 0 again."""
        self.asked = self.recomputed = 0
        self.tally = None

    def check_nothing_left(self) -> None:
        """Raises ``ValueError`` if a first pass was remembered and not recomputed."""
        if self._remembered:
            raise ValueError(
                f"ReplaySession: {self.name} still holds the routes of microbatch"
                f" {self._remembered[0].microbatch} ({len(self._remembered)} in all): its recompute"
                " did not run inside the schedule. Run every backward inside the schedule, and"
                " session.begin itself under torch.no_grad() where the forward is; a checkpoint"
                " whose input needs no gradient (frozen lower layers) has no backward"
            )

    def forget(self) -> None:
        """Drop every tensor."""
        slot = self._slot
        slot.current = slot.plain = self._answered = self._last = None
        if self._remembered or self._recomputed_by:
            self._remembered.clear()
            self._recomputed_by.clear()

    def check_input(self, router: Any, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the router: its input is [sequence, batch, hidden] as laid out.

        Rows in another order have the same count: a "bshd" batch under a "thd" layout, or
        Megatron's re-ordering by ``PackedSeqParams.tokens_per_sample``.
        """
        if self._open is None or self.is_mtp or in_backward():
            return
        if not inputs or inputs[0].dim() != 3:
            return
        shape = tuple(inputs[0].shape[:2])
        if shape != self._open.input_shape:
            raise ValueError(
                f"{self._where()}: the router's input is [sequence, batch] = {list(shape)},"
                f" the layout's {list(self._open.input_shape)}"
            )

    # --- the router's side ------------------------------------------------------------------------

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, K] and ids [T, K] int64 for ``scores`` [T, E]; what Megatron calls."""
        slot = self._slot
        opened = slot.plain
        if (
            opened is not None
            and self._answered is not opened
            and self.layer  # the first one looks at the device
            and scores.shape == slot.scores_shape
            and topk == self.topk
            and (not opened.wants_grad or is_grad_enabled())
            and _graph_task_id() == -1
        ):  # nearly every call, so without another frame; what ``_answer`` does, in short
            self._answered = self._last = opened
            self._calls = 1
            self.asked += 1
            slot.asked += 1
            topk_ids = opened.targets[self.layer]  # type: ignore[index]
            return scores.gather(1, topk_ids), topk_ids
        assert default_compute_topk is not None
        if _graph_task_id() != -1:
            answer = self._recall()
            self._check_call(scores, topk, answer.padding_mask.shape[0], recompute=True)
        else:
            answer = self._answer(scores, topk, num_groups, group_topk, default_compute_topk)
        self._last = answer
        replayed = answer.topk_ids
        if replayed is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        topk_ids = replayed if replayed.dtype is torch.int64 else replayed.long()
        return scores.gather(1, topk_ids), topk_ids

    def _answer(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> Answer:
        slot = self._slot
        opened = slot.current
        if opened is None:
            raise ValueError(
                f"ReplaySession: {self.name} ran outside a microbatch: forward_step must call"
                " session.begin(model) before each forward of the model"
            )
        if self._answered is not opened:
            self._answered, self._calls = opened, 0
            slot.asked += 1
        elif self._calls == len(opened.padding_masks):
            raise ValueError(
                f"{self._where()}: the router was asked for a second time: forward_step must call"
                " session.begin(model) before each forward of the model"
            )
        mask, has_rows = opened.padding_masks[self._calls], opened.has_rows[self._calls]
        self._calls += 1
        self.asked += 1
        self._check_call(scores, topk, slot.num_rows)
        if self.layer == 0 and scores.device != mask.device:  # a chunk's routers share a device
            raise ValueError(
                f"{self._where()}: the router is on {scores.device}, the layout on {mask.device}"
            )
        if self.is_mtp:
            answer = _answer_of((None, mask, None, False, has_rows))
        elif opened.targets is None:
            chosen = compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
            answer = _answer_of((chosen, mask, None, False, has_rows))
        else:
            topk_ids, live_rows = opened.targets[self.layer], opened.live_rows
            if live_rows is not None or opened.compared_rows is not None:
                chosen = compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
                chosen = chosen.to(topk_ids.dtype)
                self._compare(chosen, topk_ids, opened.compared_rows)
                if live_rows is not None:
                    topk_ids = torch.where(live_rows[:, None], chosen, topk_ids)
            answer = _answer_of((topk_ids, mask, live_rows, True, has_rows))
        if opened.wants_grad and not is_grad_enabled():
            self._remember(opened.index, answer)
        return answer

    def _compare(self, chosen: Tensor, replayed: Tensor, rows: Tensor | None) -> None:
        if rows is not None:
            tally = tally_routes(chosen, replayed, rows)
            self.tally = tally if self.tally is None else merge_tallies([self.tally, tally])

    def _remember(self, microbatch: int, answer: Answer) -> None:
        sequence = torch.autograd._get_sequence_nr()
        if self._remembered and sequence < self._remembered[-1].sequence:
            raise ValueError(
                f"{self._where()}: first passes under recompute must run in one thread, since"
                " autograd numbers its nodes in each thread by itself"
            )
        self._remembered.append(_FirstPass(sequence, microbatch, answer))

    def _recall(self) -> Answer:
        """The answer of the first pass that the running checkpoint node wraps: the earliest one
        after the node's own number."""
        node = torch._C._current_autograd_node()._sequence_nr()
        backward = _graph_task_id()
        kept = self._kept_for(node)
        if kept is None or self._recomputed_by.setdefault(node, backward) != backward:
            raise ValueError(
                f"ReplaySession: {self.name} is recomputed in a backward, but no routes were kept"
                f" for it ({self.asked} first passes, {self.recomputed} recomputes so far): its"
                " first pass ran with gradients on, as a non-re-entrant checkpoint does, or"
                " session.begin ran under torch.no_grad() and the forward did not, or it is"
                " recomputed twice. Use Megatron's own re-entrant recompute"
            )
        self.recomputed += 1
        return self._remembered.pop(kept).answer

    def _kept_for(self, node: int) -> int | None:
        return next((i for i, f in enumerate(self._remembered) if f.sequence > node), None)

    def next_padding_mask(self) -> Tensor | None:
        """[T] bool of the call that is about to ask; None where it will be refused."""
        if in_backward():
            kept = self._kept_for(torch._C._current_autograd_node()._sequence_nr())
            return None if kept is None else self._remembered[kept].answer.padding_mask
        opened = self._open
        calls = self._calls if self._answered is opened else 0
        if opened is None or calls == len(opened.padding_masks):
            return None
        return opened.padding_masks[calls]

    # --- checks -----------------------------------------------------------------------------------

    def _where(self) -> str:
        index = self._open.index if self._open is not None else "?"
        return f"ReplaySession: {self.name}, microbatch {index}"

    def _check_call(
        self, scores: Tensor, topk: int, num_rows: int, *, recompute: bool = False
    ) -> None:
        if scores.shape == (num_rows, self.num_experts) and topk == self.topk:
            return
        if scores.dim() != 2 or scores.shape[1] != self.num_experts or topk != self.topk:
            raise ValueError(
                f"ReplaySession: {self.name} was called with scores {tuple(scores.shape)} and"
                f" topk={topk}; it had {self.num_experts} experts and topk={self.topk} at the"
                " start of the schedule"
            )
        if recompute:
            raise ValueError(
                f"ReplaySession: {self.name} recomputes {scores.shape[0]} tokens, its first pass"
                f" had {num_rows}"
            )
        raise ValueError(
            f"{self._where()}: the router holds {scores.shape[0]} tokens, the layout {num_rows}"
        )
