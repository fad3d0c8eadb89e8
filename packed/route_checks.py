"""Whether the ids of routes are what a router can have chosen, on the host.

    an id is in [0, E)                     no id stands twice in one row and layer
    a layer without experts holds zeros    with K > 1 a layer with experts is not all zeros

Rows are read in blocks that stay in the cache, whatever trajectories they belong to. A block is
first proven to hold no fault, in a few NumPy operations over all of it: that the ids of a row
differ is that the differences (xor) of all their pairs are not 0. Where a proof fails, the
trajectories of the block are looked at one after another, which finds the row to name.

Sizes: L captured layers, K experts a token, E experts, P (row, layer) pairs of a block.
"""

import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from packhorse.packed.host import INT32_MAX, host_ints
from packhorse.packed.host_arrays import rows_between
from packhorse.packed.pool import run_tasks
from packhorse.packed.sentinels import MISSING_EXPERT

#: Pairs of ids that one proof compares, about: their differences are what it keeps in the cache.
#: Half as many take 1.3 times as long, an eighth 2.7 times (K = 8, one core of an EPYC).
_PAIRS_AT_ONCE: Final = 1 << 21
#: Ids that one task of the pool reads, about; fewer are not worth a thread.
_IDS_OF_TASK: Final = 1 << 21
#: (row, layer) pairs that one look for the repeated expert covers.
_LOOKED_AT: Final = 1 << 16

_UNSIGNED: Final = tuple(np.dtype(f"u{size}") for size in (1, 2, 4, 8))


def expert_layers(name: str, moe_layers: Sequence[int] | None, num_layers: int) -> np.ndarray:
    """[L] bool: whether a captured layer has experts; all have where ``moe_layers`` is None."""
    if moe_layers is None:
        return np.ones(num_layers, dtype=np.bool_)
    layers = host_ints(moe_layers, f"{name}: moe_layers")
    outside = (layers < 0) | (layers >= num_layers)
    if outside.any():
        raise ValueError(f"{name}: moe_layers has {layers[outside][0]}, not in [0, {num_layers})")
    mask = np.zeros(num_layers, dtype=np.bool_)
    mask[layers] = True
    if mask.sum() != layers.size:
        raise ValueError(f"{name}: moe_layers names a layer twice")
    return mask


def check_routes(where: str, ids: np.ndarray, num_experts: int, experts_at: np.ndarray) -> None:
    """One trajectory's integer ``ids`` [rows, L, K]; ``experts_at`` [L] bool as above.

    Raises:
        ValueError: an id is out of range or repeated, stands in a dense layer, or a layer is all
            zeros; begins with ``where`` and names row and layer.
    """
    check_all_routes(
        lambda _: where, [ids], [0, ids.shape[0]], num_experts, experts_at, num_threads=1
    )


def check_all_routes(
    where: Callable[[int], str],
    arrays: Sequence[np.ndarray],
    bounds: Sequence[int],
    num_experts: int,
    experts_at: np.ndarray,
    *,
    num_threads: int,
) -> int:
    """``check_routes`` of B trajectories' ids: the first wrong one is named by ``where(i)``.

    ``bounds`` [B + 1]: the first of the rows of each in all. Returns the largest id, -1 of none.
    """
    num_rows = bounds[-1]
    if num_rows == 0 or 0 in arrays[0].shape[1:]:
        return -1
    _, num_layers, topk = arrays[0].shape
    proof = _Proof(num_rows, topk, num_experts, experts_at)

    def check_block(start: int) -> None:
        stop = min(start + proof.block_rows, num_rows)
        if proof.holds(rows_between(arrays, bounds, start, stop)):
            return
        first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)
        for i in range(first, last):
            _find_fault(where(i), arrays[i], num_experts, experts_at)

    blocks = range(0, num_rows, proof.block_rows)
    blocks_of_task = max(1, _IDS_OF_TASK // (proof.block_rows * num_layers * topk))
    tasks = [blocks[at : at + blocks_of_task] for at in range(0, len(blocks), blocks_of_task)]

    def check_task(number: int) -> None:
        for start in tasks[number]:
            check_block(start)

    run_tasks(check_task, len(tasks), num_threads)
    return max(proof.largest_ids)


def check_id_range(
    where: Callable[[int], str],
    arrays: Sequence[np.ndarray],
    bounds: Sequence[int],
    num_experts: int,
    *,
    num_threads: int,
) -> int:
    """That ids are in [0, E), as ``check_all_routes``; nothing else of them is looked at."""
    num_rows = bounds[-1]
    if num_rows == 0 or 0 in arrays[0].shape[1:]:
        return -1
    _, num_layers, topk = arrays[0].shape
    largest_ids = []
    at_once = max(1, _IDS_OF_TASK // (num_layers * topk))
    every_layer = np.ones(num_layers, dtype=np.bool_)

    def check_task(number: int) -> None:
        start = number * at_once
        stop = min(start + at_once, num_rows)
        first = bisect_right(bounds, start) - 1
        for i, ids in enumerate(rows_between(arrays, bounds, start, stop), first):
            if ids.size == 0:
                continue
            largest = int(ids.max())
            if largest >= num_experts or ids.min() < 0:
                _find_fault(where(i), arrays[i], num_experts, every_layer)
            largest_ids.append(largest)

    run_tasks(check_task, -(-num_rows // at_once), num_threads)
    return max(largest_ids)


class _Proof:
    """That rows hold no fault; several threads may ask at once."""

    def __init__(self, num_rows: int, topk: int, num_experts: int, experts_at: np.ndarray):
        self._topk, self._num_experts = topk, num_experts
        self._num_layers = experts_at.size
        self._dense = np.flatnonzero(~experts_at)
        self.largest_ids: list[int] = []  # of each block
        most = _PAIRS_AT_ONCE // (self._num_layers * topk * max(topk - 1, 4))
        self.block_rows = max(1, min(num_rows, most))
        self._num_pairs = self.block_rows * self._num_layers
        self._marks: dict[tuple[np.dtype, bool], np.ndarray] = {}
        self._of_thread = threading.local()

    def holds(self, parts: Sequence[np.ndarray]) -> bool:
        """Whether ``parts`` [rows, L, K], at most ``block_rows`` together, are free of faults."""
        parts = [part for part in parts if part.shape[0]]
        dtypes = {part.dtype for part in parts}
        if len(dtypes) > 1:
            return all(self.holds([part]) for part in parts)
        (dtype,) = dtypes
        unsigned = _UNSIGNED[dtype.itemsize.bit_length() - 1]  # a negative id becomes a large one
        if len(parts) == 1 and parts[0].flags.c_contiguous and dtype.isnative:
            ids = parts[0].view(unsigned)
        else:
            num_rows = sum(part.shape[0] for part in parts)
            ids = self._scratch("ids", unsigned, self._topk * self._num_pairs)
            ids = ids[: num_rows * self._num_layers * self._topk]
            ids = ids.reshape(num_rows, self._num_layers, self._topk)
            np.concatenate(parts, out=ids.view(dtype.newbyteorder("=")))
        largest = int(ids.max())
        if largest >= self._num_experts:
            return False
        self.largest_ids.append(largest)
        if self._dense.size:
            if ids[:, self._dense].any():
                return False
            largest = max(largest, self._topk - 1)  # as dense layers are marked below
        return self._topk == 1 or self._rows_are_distinct(ids, largest)

    def _rows_are_distinct(self, ids: np.ndarray, largest: int) -> bool:
        """Whether no id stands twice in a row of ``ids`` [rows, L, K], none above ``largest``."""
        topk, size = self._topk, ids.size
        narrow = next(kind for kind in _UNSIGNED if largest <= np.iinfo(kind).max)
        in_place = largest <= np.iinfo(narrow).max // 2  # a bit is free to mark with
        marks = self._marks_of(narrow, in_place)
        values = self._scratch("values", narrow, topk * (self._num_pairs + 1))
        rows = values[:size]
        if ids.dtype == narrow:
            np.bitwise_xor(ids.reshape(-1), marks[:size], out=rows)
        else:
            np.copyto(rows, ids.reshape(-1), casting="unsafe")
            np.bitwise_xor(rows, marks[:size], out=rows)
        if in_place:
            # the row behind the last one is marked unlike it, as any two neighbours are
            values[size : size + topk] = marks[size : size + topk]
            later = np.ndarray(
                (topk - 1, size), narrow, values, narrow.itemsize, (narrow.itemsize,) * 2
            )
            apart = self._scratch("all apart", narrow, topk * (topk - 1) * self._num_pairs)
            apart = apart[: (topk - 1) * size].reshape(topk - 1, size)
            np.bitwise_xor(later, rows, out=apart)
            return bool(apart.min())
        num_pairs = size // topk
        planes = self._scratch("planes", narrow, topk * self._num_pairs)[:size]
        planes = planes.reshape(topk, num_pairs)
        np.copyto(planes, rows.reshape(num_pairs, topk).T)
        apart = self._scratch("apart", narrow, topk * self._num_pairs)
        for k in range(1, topk):
            differences = apart[: (topk - k) * num_pairs].reshape(topk - k, num_pairs)
            np.bitwise_xor(planes[k:], planes[:-k], out=differences)
            if not differences.min():
                return False
        return True

    def _marks_of(self, dtype: np.dtype, alternate: bool) -> np.ndarray:
        """[(P + 1) K]: what makes ids that may be equal differ, when it is xored into them.

        A dense layer's zeros become 0..K-1. With ``alternate`` the ids of every second pair get the
        highest bit, so that an id and one of the next row and layer differ.
        """
        found = self._marks.get((dtype, alternate))
        if found is None:
            marks = np.zeros((self._num_pairs + 1, self._topk), dtype=dtype)
            layers = marks[:-1].reshape(self.block_rows, self._num_layers, self._topk)
            layers[:, self._dense] = np.arange(self._topk).astype(dtype)
            if alternate:
                marks[1::2] |= dtype.type(np.iinfo(dtype).max // 2 + 1)
            found = self._marks[dtype, alternate] = marks.reshape(-1)
        return found

    def _scratch(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        """This thread's array [size]; it holds what the last call left."""
        arrays: dict[str, np.ndarray] = self._of_thread.__dict__
        key = f"{name} {dtype}"
        if key not in arrays:
            arrays[key] = _scratch_array(size, dtype)
        return arrays[key]


def _scratch_array(size: int, dtype: np.dtype) -> np.ndarray:
    """[size], not set; a large one's pages go back to the system with it, not to the heap."""
    num_bytes = size * dtype.itemsize
    if num_bytes < 1 << 20:
        return np.empty(size, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=dtype)


def _find_fault(where: str, ids: np.ndarray, num_experts: int, experts_at: np.ndarray) -> None:
    """Raise for the first fault of one trajectory's ``ids`` [rows, L, K], if there is one."""
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= num_experts:
        outside = (ids < 0) | (ids >= num_experts)
        row, layer, k = np.unravel_index(np.argmax(outside), ids.shape)
        where = f"{where}, row {row}, layer {layer}"
        expert = ids[row, layer, k]
        if expert >= num_experts:
            known = num_experts <= INT32_MAX
            limit = f"not below num_experts={num_experts}" if known else "past int32"
            raise ValueError(f"{where}: expert {expert} is {limit}")
        if expert != MISSING_EXPERT:
            raise ValueError(f"{where}: expert {expert} is negative")
        if (ids[row, layer] == MISSING_EXPERT).all():
            raise ValueError(f"{where}: no route (all -1); rows end where the captured prefix ends")
        raise ValueError(f"{where}: a partial -1, {ids[row, layer].tolist()}")

    if not experts_at.all():
        dense = ids[:, ~experts_at]
        if dense.any():
            row, nth, _ = np.unravel_index(np.argmax(dense != 0), dense.shape)
            layer = np.flatnonzero(~experts_at)[nth]
            raise ValueError(
                f"{where}, row {row}, layer {layer}: {ids[row, layer].tolist()} in a dense layer; "
                "name it in moe_layers if it has experts"
            )
        ids = ids[:, experts_at]
    topk = ids.shape[2]
    pairs = ids.reshape(-1, topk)
    for start in range(0, pairs.shape[0], _LOOKED_AT):
        planes = np.ascontiguousarray(pairs[start : start + _LOOKED_AT].T)
        if not any((planes[k:] == planes[:-k]).any() for k in range(1, topk)):
            continue
        in_order = np.sort(planes, axis=0)
        repeated = in_order[1:] == in_order[:-1]
        pair = int(np.argmax(repeated.any(axis=0)))
        row, nth = divmod(start + pair, ids.shape[1])
        layer = np.flatnonzero(experts_at)[nth]
        if not ids[:, nth].any():
            raise ValueError(
                f"{where}, row {row}, layer {layer}: all zeros, as in all {ids.shape[0]} rows: the "
                "engine captured nothing there (or the layer is dense: leave it out of moe_layers)"
            )
        expert = in_order[np.argmax(repeated[:, pair]), pair]
        raise ValueError(
            f"{where}, row {row}, layer {layer}: expert {expert} is repeated in "
            f"{ids[row, nth].tolist()}"
        )
