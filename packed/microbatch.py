"""Microbatches of a batch: by number of trajectories or by tokens, as many on every rank.

    plan = plan_by_tokens(batch["lengths"], max_tokens=16384, group=data_parallel_gloo_group)
    outputs = [forward(microbatch) for microbatch in plan.split(batch)]
    values = plan.restore(outputs)             # trajectory i of the batch at i, synthetic ones gone

A plan is host integers: which trajectories each microbatch holds, and how many synthetic ones
(``Batch.synthetic``: one attended token, in no loss) stand beside them. All data-parallel ranks run
the same number of microbatches, since each is a step of collectives (expert parallelism, gradient
reduction): the number is the most that any rank needs. Ranks learn it in one host all-reduce
(``plan_by_*`` with a group), or one place that knows all plans for them (``plan_ranks_by_*``).

By tokens, ``packing`` finds few microbatches within the budget, then spreads a rank's trajectories
evenly over as many as all ranks agreed on. What counts is the sum of the tokens ("thd"), or with
``rectangle`` all trajectories as long as the longest ("bshd", which pads them). The heaviest is
first: ranks meet alike loads at the same step, and memory that does not suffice shows at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from packhorse._nvtx import ranged, ranged_methods
from packhorse.packed.batch import ATTENTION_MASK_FIELD, Batch
from packhorse.packed.checks import check_alike, check_values
from packhorse.packed.host import check_total, from_host, host_count, host_int, host_ints
from packhorse.packed.inputs_fields import HOST_FIELDS
from packhorse.packed.packing import pack, pack_rectangles, spread, spread_rectangles
from packhorse.packed.tensor import PackedTensor

#: What becomes of a trajectory longer than the budget: a microbatch of its own, or an error.
Overlong = Literal["alone", "refuse"]
_OVERLONG: Final = ("alone", "refuse")

_INT64_MAX: Final = 2**63 - 1
_MOST_SETTINGS: Final = 6

T = TypeVar("T")
_Ids = tuple[int, ...]


@ranged_methods()
@dataclass(frozen=True)
class MicrobatchPlan:
    """Which trajectories of a batch are in which microbatch.

    Args:
        trajectories: by microbatch, the ids of its trajectories in their order; 0 ... B - 1 each
            exactly once.
        synthetic: by microbatch, the synthetic trajectories that follow them.

    Raises:
        TypeError: an id or a count is no integer.
        ValueError: an id stands twice or is missing, a microbatch holds nothing, counts differ.
    """

    trajectories: tuple[_Ids, ...]
    synthetic: tuple[int, ...]

    def __post_init__(self) -> None:
        name = "MicrobatchPlan"
        if len(self.trajectories) != len(self.synthetic):
            raise ValueError(
                f"{name}: trajectories has {len(self.trajectories)} microbatches, synthetic has"
                f" {len(self.synthetic)}"
            )
        seen: set[int] = set()
        trajectories, synthetic = [], []  # its own: lists that were given may change later
        for k, (ids, count) in enumerate(zip(self.trajectories, self.synthetic, strict=True)):
            trajectories.append(
                tuple(host_ints(ids, f"{name}: trajectories of microbatch {k}").tolist())
            )
            for i in trajectories[-1]:
                if i in seen:
                    raise ValueError(f"{name}: trajectory {i} of microbatch {k} stands twice")
                seen.add(i)
            synthetic.append(host_count(count, f"{name}: synthetic of microbatch {k}"))
            if synthetic[-1] + len(trajectories[-1]) == 0:
                raise ValueError(f"{name}: microbatch {k} holds no trajectory")
        object.__setattr__(self, "trajectories", tuple(trajectories))
        object.__setattr__(self, "synthetic", tuple(synthetic))
        total = sum(self.sizes)
        check_total(name, total, "trajectories")
        for i in range(len(seen)):
            if i not in seen:
                raise ValueError(f"{name}: trajectory {i} of {len(seen)} is in no microbatch")

    def __len__(self) -> int:
        """Microbatches."""
        return len(self.trajectories)

    @cached_property
    def num_trajectories(self) -> int:
        """B, the real ones."""
        return sum(map(len, self.trajectories))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """By microbatch, its trajectories, synthetic ones included."""
        return tuple(len(ids) + n for ids, n in zip(self.trajectories, self.synthetic, strict=True))

    # --- there ------------------------------------------------------------------------------------

    def split(
        self,
        batch: Batch,
        *,
        attended: str | None = ATTENTION_MASK_FIELD,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[Batch, ...]:
        """The microbatches of ``batch``: consecutive trajectories are views, others are copied.

        Args:
            batch: of the B trajectories that were planned.
            attended, values: as in ``Batch.synthetic``; used where the plan has synthetic ones.

        Raises:
            TypeError: ``batch`` is no ``Batch``.
            ValueError: it has another number of trajectories; or what ``Batch.synthetic`` refuses.
            KeyError: ``attended`` or a field of ``values`` is not there.
        """
        name = "MicrobatchPlan.split"
        self._check(name, batch)
        stand_ins = self._stand_ins(name, batch, max(self.synthetic, default=0), attended, values)
        return tuple(self._take(batch, stand_ins, k) for k in range(len(self)))

    def microbatch(
        self,
        batch: Batch,
        index: int,
        *,
        attended: str | None = ATTENTION_MASK_FIELD,
        values: Mapping[str, Any] | None = None,
    ) -> Batch:
        """``split(batch)[index]`` alone, for a loop that holds one microbatch at a time.

        Raises:
            IndexError: no such microbatch; else as ``split``.
        """
        name = "MicrobatchPlan.microbatch"
        self._check(name, batch)
        k = host_int(index, f"{name}: index")
        if not -len(self) <= k < len(self):
            raise IndexError(f"{name}: index {k} is out of range for {len(self)} microbatches")
        k %= len(self)
        stand_ins = self._stand_ins(name, batch, self.synthetic[k], attended, values)
        return self._take(batch, stand_ins, k)

    def _check(self, name: str, batch: Batch) -> None:
        if not isinstance(batch, Batch):
            raise TypeError(f"{name}: batch must be a Batch, got {type(batch).__name__}")
        if len(batch) != self.num_trajectories:
            raise ValueError(
                f"{name}: batch has {len(batch)} trajectories, the plan has {self.num_trajectories}"
            )

    def _stand_ins(
        self,
        name: str,
        batch: Batch,
        count: int,
        attended: str | None,
        values: Mapping[str, Any] | None,
    ) -> Batch | None:
        if count == 0:
            return None
        try:
            stand_ins = batch.synthetic(count, attended=attended, values=values)
            # what their layout takes, of batches that list it on the host
            listed = {name: value for name, value in HOST_FIELDS.items() if name in batch}
            return stand_ins.with_fields({
                name: [value] * count
                for name, value in listed.items()
                if isinstance(batch.fields[name], tuple)
            })  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            text = str(error.args[0]).removeprefix("Batch.synthetic: ")
            raise type(error)(f"{name}: {text}") from None

    def _take(self, batch: Batch, stand_ins: Batch | None, k: int) -> Batch:
        ids, count = self.trajectories[k], self.synthetic[k]
        if stand_ins is None or count == 0:
            return batch[list(ids)]
        if not ids:
            return stand_ins[:count]
        return Batch.cat([batch[list(ids)], stand_ins[:count]])

    # --- and back ---------------------------------------------------------------------------------

    def restore(self, outputs: Sequence[Any]) -> Any:
        """What the microbatches gave, by trajectory of the batch; that of synthetic ones is left.

        Args:
            outputs: one a microbatch, all of one kind: dense tensors [size, ...] alike in dtype,
                row shape and device, ``PackedTensor`` of ``size`` segments, ``Batch``, or lists of
                ``size`` things, synthetic trajectories last as they were handed out. Values by
                token are packed first: ``PackedTensor.from_lengths(values, lengths)``.

        Returns:
            The same kind, of B trajectories in the batch's order; gradients flow through tensors.
            Nothing waits for a device.

        Raises:
            TypeError: kinds or dtypes differ, or the kind is another.
            ValueError: numbers of outputs or trajectories, row shapes or devices differ; each names
                the microbatch.
        """
        name = "MicrobatchPlan.restore"
        if not isinstance(outputs, list | tuple):
            raise TypeError(f"{name}: outputs must be a list, got {type(outputs).__name__}")
        if len(outputs) != len(self):
            raise ValueError(f"{name}: {len(outputs)} outputs for {len(self)} microbatches")
        if not outputs:
            raise ValueError(f"{name}: no outputs to take a kind from")
        first = outputs[0]
        kind = next(
            (k for k in (Batch, PackedTensor, Tensor, list, tuple) if isinstance(first, k)), None
        )
        if kind is None:
            raise TypeError(
                f"{name}: output of microbatch 0 must be a tensor, a PackedTensor, a Batch or a"
                f" list, got {type(first).__name__}"
            )
        for k, (output, size) in enumerate(zip(outputs, self.sizes, strict=True)):
            what = f"output of microbatch {k}"
            if not isinstance(output, kind):
                raise TypeError(
                    f"{name}: {what} is a {type(output).__name__}, that of microbatch 0 a"
                    f" {type(first).__name__}"
                )
            if isinstance(output, Tensor):
                check_values(name, output, what)
            if len(output) != size:
                raise ValueError(
                    f"{name}: {what} has {len(output)} trajectories, the microbatch has {size}"
                )
            if isinstance(output, Tensor):
                check_alike(name, what, output, "that of microbatch 0", first)
            elif isinstance(output, PackedTensor):
                check_alike(name, what, output.values, "that of microbatch 0", first.values)
        real = [o[: len(ids)] for o, ids in zip(outputs, self.trajectories, strict=True)]
        if kind in (list, tuple):
            things = dict(
                zip(chain.from_iterable(self.trajectories), chain.from_iterable(real), strict=True)
            )
            return kind(things[i] for i in range(self.num_trajectories))
        places = self._places
        in_order = bool((places[1:] > places[:-1]).all())
        if kind is Tensor:
            dense = torch.cat(real)
            if in_order:
                return dense
            return dense.index_select(0, from_host(places.copy(), dense.device))
        try:
            joined: Any = Batch.cat(real) if kind is Batch else PackedTensor.cat(real)
        except (TypeError, ValueError) as error:
            text = str(error).removeprefix("Batch.cat: ").removeprefix("PackedTensor.cat: ")
            raise type(error)(f"{name}: {text.replace('input ', 'microbatch ')}") from None
        return joined if in_order else joined[places]

    @cached_property
    def _places(self) -> np.ndarray:
        """[B] int64: where trajectory i stands among the real ones of all microbatches."""
        order = np.fromiter(
            chain.from_iterable(self.trajectories), dtype=np.int64, count=self.num_trajectories
        )
        places = np.empty_like(order)
        places[order] = np.arange(order.size, dtype=np.int64)
        return places


# --- by number of trajectories --------------------------------------------------------------------


@ranged
def plan_by_count(
    num_trajectories: int,
    *,
    microbatch_size: int,
    equal_sizes: bool = True,
    multiple: int = 1,
    group: Any = None,
) -> MicrobatchPlan:
    """Consecutive trajectories, ``microbatch_size`` in each microbatch.

    Args:
        num_trajectories: B of this rank, 0 included.
        microbatch_size: trajectories of a microbatch.
        equal_sizes: whether synthetic trajectories fill up the last one where it is short, and a
            microbatch of them alone. False: it stays short, and theirs has one.
        multiple: what the number of microbatches must divide by (pipeline stages of an interleaved
            schedule).
        group: a ``torch.distributed`` group of all data-parallel ranks that takes host tensors,
            such as gloo; every rank of it calls this. None: this rank is alone.

    Returns:
        The plan of this rank; each rank's has the same number of microbatches. No microbatch where
        no rank has a trajectory.

    Raises:
        TypeError, ValueError: an argument is wrong, or another one on another rank; names it.
        RuntimeError: another rank of the group failed.
    """
    name = "plan_by_count"

    def need() -> tuple[dict[str, int], tuple[int, int, int], int]:
        size, step = _check_count(name, microbatch_size, equal_sizes, multiple)
        count = host_count(num_trajectories, f"{name}: num_trajectories")
        check_total(name, count, "trajectories")
        settings = {"planning by tokens": 0, "microbatch_size": size}
        settings |= {"equal_sizes": int(equal_sizes), "multiple": step}
        return settings, (count, size, step), -(-count // size)

    ranks = None if group is None else _Ranks(name, group)
    (count, size, step), number = _agree(name, ranks, need)
    return _plan_count(name, count, size, equal_sizes, _round_up(number, step))


@ranged
def plan_ranks_by_count(
    num_trajectories: Sequence[int],
    *,
    microbatch_size: int,
    equal_sizes: bool = True,
    multiple: int = 1,
) -> tuple[MicrobatchPlan, ...]:
    """``plan_by_count`` of every rank, where the numbers of all are known; no collective.

    Args:
        num_trajectories: by rank, its B, on the host.
        microbatch_size, equal_sizes, multiple: as there.

    Raises:
        TypeError, ValueError: an argument is wrong; names it and the rank.
    """
    name = "plan_ranks_by_count"
    size, step = _check_count(name, microbatch_size, equal_sizes, multiple)
    counts = host_ints(num_trajectories, f"{name}: num_trajectories").tolist()
    for rank, count in enumerate(counts):
        host_count(count, f"{name}: num_trajectories of rank {rank}")
        check_total(f"{name}: rank {rank}", count, "trajectories")
    number = _round_up(max((-(-count // size) for count in counts), default=0), step)
    return tuple(_plan_count(name, count, size, equal_sizes, number) for count in counts)


def _check_count(name: str, size: Any, equal_sizes: Any, multiple: Any) -> tuple[int, int]:
    size = _positive(size, f"{name}: microbatch_size")
    check_total(name, size, "trajectories of a microbatch")
    return size, _check_common(name, equal_sizes, multiple)


def _plan_count(name: str, count: int, size: int, equal_sizes: bool, number: int) -> MicrobatchPlan:
    groups = [tuple(range(i, min(i + size, count))) for i in range(0, count, size)]
    return _plan(name, groups, number, size if equal_sizes else 0)


# --- by tokens ------------------------------------------------------------------------------------


@ranged
def plan_by_tokens(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    rectangle: bool = False,
    overlong: Overlong = "alone",
    equal_sizes: bool = False,
    multiple: int = 1,
    group: Any = None,
) -> MicrobatchPlan:
    """Trajectories of at most ``max_tokens`` tokens together, balanced, heaviest microbatch first.

    Args:
        lengths: B numbers of tokens of this rank, each at least 1, on the host; padded ones where
            the layout pads a sequence.
        max_tokens: of one microbatch. The one token of a synthetic trajectory is not counted.
        rectangle: whether a microbatch costs its trajectories times its longest, as a layout does
            that pads them to one length; else the sum of their tokens.
        overlong: a trajectory of more tokens gets a microbatch "alone", or is "refuse"d.
        equal_sizes: whether synthetic trajectories make all microbatches of all ranks as large, in
            trajectories, as the largest. False: only a microbatch without a real one has one. Not
            with ``rectangle``, where each would cost as much as the longest beside it.
        multiple, group: as in ``plan_by_count``.

    Returns:
        The plan of this rank; each rank's has the same number of microbatches, over which its
        trajectories are spread. Within one their order is that of the batch.

    Raises:
        TypeError, ValueError: an argument is wrong, or another one on another rank; names it and
            the trajectory.
        RuntimeError: another rank of the group failed.
    """
    name = "plan_by_tokens"

    def need() -> tuple[dict[str, int], tuple[list[int], list[_Ids], int, int], int]:
        budget, step = _check_tokens(name, max_tokens, rectangle, overlong, equal_sizes, multiple)
        tokens = _check_lengths(name, lengths, budget, overlong)
        packed = _pack(tokens, budget, rectangle)
        settings = {"planning by tokens": 1, "max_tokens": budget}
        settings |= {"equal_sizes": int(equal_sizes), "multiple": step}
        settings |= {"overlong": _OVERLONG.index(overlong), "rectangle": int(rectangle)}
        return settings, (tokens, packed, budget, step), len(packed)

    ranks = None if group is None else _Ranks(name, group)
    (tokens, packed, budget, step), number = _agree(name, ranks, need)
    number = _round_up(number, step)
    groups = _spread(tokens, packed, budget, number, rectangle)
    size = max(map(len, groups), default=1) if equal_sizes else 0
    if equal_sizes and ranks is not None:
        (size,) = ranks.maxima([size])
    return _plan(name, groups, number, size)


@ranged
def plan_ranks_by_tokens(
    lengths: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    rectangle: bool = False,
    overlong: Overlong = "alone",
    equal_sizes: bool = False,
    multiple: int = 1,
) -> tuple[MicrobatchPlan, ...]:
    """``plan_by_tokens`` of every rank, where the lengths of all are known; no collective.

    Args:
        lengths: by rank, its numbers of tokens, on the host.
        max_tokens, rectangle, overlong, equal_sizes, multiple: as there.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, rank and trajectory.
    """
    name = "plan_ranks_by_tokens"
    budget, step = _check_tokens(name, max_tokens, rectangle, overlong, equal_sizes, multiple)
    if not isinstance(lengths, list | tuple):
        raise TypeError(
            f"{name}: lengths must be a list of each rank's, got {type(lengths).__name__}"
        )
    tokens = [
        _check_lengths(f"{name}: rank {rank}", own, budget, overlong)
        for rank, own in enumerate(lengths)
    ]
    packed = [_pack(own, budget, rectangle) for own in tokens]
    number = _round_up(max(map(len, packed), default=0), step)
    ranks = [
        _spread(own, groups, budget, number, rectangle)
        for own, groups in zip(tokens, packed, strict=True)
    ]
    size = max(map(len, chain.from_iterable(ranks)), default=1) if equal_sizes else 0
    return tuple(_plan(name, groups, number, size) for groups in ranks)


def _pack(tokens: list[int], budget: int, rectangle: bool) -> list[_Ids]:
    return pack_rectangles(tokens, budget) if rectangle else pack(tokens, budget)


def _spread(
    tokens: list[int], packed: list[_Ids], budget: int, number: int, rectangle: bool
) -> list[_Ids]:
    if rectangle:
        return spread_rectangles(tokens, budget, number)
    return spread(tokens, packed, budget, number)


def _check_tokens(
    name: str, max_tokens: Any, rectangle: Any, overlong: Any, equal_sizes: Any, multiple: Any
) -> tuple[int, int]:
    budget = _positive(max_tokens, f"{name}: max_tokens")
    if not isinstance(rectangle, bool):
        raise TypeError(f"{name}: rectangle must be a bool, got {type(rectangle).__name__}")
    if rectangle and equal_sizes is True:
        raise ValueError(
            f"{name}: equal_sizes=True with rectangle=True: a synthetic trajectory would cost as"
            " much as the longest beside it; plan by count, max_tokens // longest in a microbatch"
        )
    if overlong not in _OVERLONG:
        raise ValueError(f"{name}: overlong must be 'alone' or 'refuse', got {overlong!r}")
    return budget, _check_common(name, equal_sizes, multiple)


def _check_lengths(name: str, lengths: Any, budget: int, overlong: str) -> list[int]:
    array = host_ints(lengths, f"{name}: lengths")
    check_total(name, array.size, "trajectories")
    if (array < 1).any():
        i = int(np.argmax(array < 1))
        raise ValueError(f"{name}: length of trajectory {i} must be positive, got {array[i]}")
    if overlong == "refuse" and (array > budget).any():
        i = int(np.argmax(array > budget))
        raise ValueError(
            f"{name}: trajectory {i} has {array[i]} tokens, max_tokens is {budget};"
            " overlong='alone' gives it a microbatch of its own"
        )
    return array.tolist()


def _plan(name: str, groups: list[_Ids], number: int, size: int) -> MicrobatchPlan:
    """``number`` microbatches, filled up to ``size``, or where that is 0 to one trajectory."""
    size = max(size, 1)
    check_total(name, size * number, "trajectories with synthetic ones")
    filled = [*groups, *[()] * (number - len(groups))]
    return MicrobatchPlan(tuple(filled), tuple(max(size - len(ids), 0) for ids in filled))


# --- all ranks ------------------------------------------------------------------------------------


def _positive(value: Any, where: str) -> int:
    number = host_int(value, where)
    if not 1 <= number <= _INT64_MAX:
        raise ValueError(f"{where} must be positive and fit int64, got {number}")
    return number


def _check_common(name: str, equal_sizes: Any, multiple: Any) -> int:
    if not isinstance(equal_sizes, bool):
        raise TypeError(f"{name}: equal_sizes must be a bool, got {type(equal_sizes).__name__}")
    step = _positive(multiple, f"{name}: multiple")
    check_total(name, step, "microbatches")
    return step


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Ranks:
    """The ranks of a group, joined by all-reduces of a few host integers."""

    def __init__(self, name: str, group: Any) -> None:
        if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: this rank is not in the group")
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{name}: group must be a torch.distributed process group, got"
                f" {type(group).__name__}"
            )
        if "cpu:" not in dist.get_backend_config(group):
            raise ValueError(
                f"{name}: group must take host tensors, as gloo does; its backend is"
                f" {dist.get_backend(group)}"
            )
        self.rank, self._group = dist.get_rank(), group

    def maxima(self, numbers: list[int]) -> list[int]:
        """Each number's largest over all ranks."""
        joined = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=self._group)
        return joined.tolist()


def _agree(
    name: str, ranks: _Ranks | None, need: Callable[[], tuple[dict[str, int], T, int]]
) -> tuple[T, int]:
    """What ``need`` makes of this rank, and the most microbatches that any rank needs.

    ``need`` gives the settings, which must be those of all ranks, what it made, and the number. A
    rank on which it raises says so in the same all-reduce: none is left waiting in it.
    """
    if ranks is None:
        return need()[1:]
    try:
        settings, made, number = need()
    except Exception:
        ranks.maxima([ranks.rank + 1, 0, *[-_INT64_MAX] * 2 * _MOST_SETTINGS])
        raise
    own = [*settings.values(), *[0] * (_MOST_SETTINGS - len(settings))]
    failed, most, *largest = ranks.maxima([0, number, *own, *(-x for x in own)])
    if failed:
        raise RuntimeError(f"{name}: rank {failed - 1} of the group failed; its own error says why")
    for at, what in enumerate(settings):
        high, low = largest[at], -largest[at + _MOST_SETTINGS]
        if high != low:
            raise ValueError(
                f"{name}: {what} must be the same on all ranks, here {own[at]}, others from {low}"
                f" to {high}"
            )
    return made, most
