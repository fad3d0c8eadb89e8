"""Small tables on their way to a device: through pinned memory that is used again.

A fresh pinned tensor costs an event when it is dropped, half of what such a copy costs the host.
``_Ring`` keeps pinned slots a thread and stream, in parts, each with memory of its own on the
device, which a kernel fills (``kernels/tables.py``). An event is recorded as a part is left, and a
part is entered again only after its event is past. Nothing waits: where the device is so far behind
that the next part is still in flight, the table takes a fresh tensor and a copy engine. While
another thread captures a CUDA graph, stage nothing: an event that is queried then spoils the
capture, as one of torch's own pinned memory does.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from packhorse.kernels.tables import PinnedTable, pull_table

_PARTS, _SLOTS_PER_PART = 4, 8
_SLOT_INTS = (1024, 16384)  # a larger table takes a fresh tensor


class Staged(NamedTuple):
    """Host memory of a table on its way."""

    array: np.ndarray  # int32, to write into
    host: Tensor  # the same memory
    pinned: PinnedTable | None  # in a ring, which keeps both until the stream is past them

    def place(self, num_ints: int, device: torch.device) -> Tensor:
        """[num_ints] int32 on ``device``, in stream order, without a wait."""
        if self.pinned is not None and num_ints:
            table = torch.empty(num_ints, dtype=torch.int32, device=device)
            pull_table(table, self.host)
            return table
        return self.host[:num_ints].to(device, non_blocking=True)

    def place_for_now(self, num_ints: int, device: torch.device) -> Tensor:
        """``place``, or more behind it, for launches that follow at once on the current stream:
        a later table may overwrite it."""
        if self.pinned is not None and num_ints:
            self.pinned.pull(num_ints)
            return self.pinned.table
        return self.host.to(device, non_blocking=True)


class _Ring:
    """Slots of one size, for one thread and stream."""

    def __init__(self, slot_ints: int, device: int, stream: int) -> None:
        shape = (_PARTS * _SLOTS_PER_PART, slot_ints)
        hosts = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        tables = torch.empty(shape, dtype=torch.int32, device=torch.device("cuda", device))
        self.slots = [
            Staged(host.numpy(), host, PinnedTable(table, host, stream))
            for host, table in zip(hosts, tables, strict=True)
        ]
        self._events: list[torch.cuda.Event | None] = [None] * _PARTS
        self._device = device
        self._next = 0  # slot

    def take(self) -> Staged | None:
        """A slot that no copy in flight reads; None where there is none."""
        slot = self._next
        if slot % _SLOTS_PER_PART == 0:
            part = slot // _SLOTS_PER_PART
            event = self._events[part]
            if event is not None and not event.query():
                return None
            left = self._events[part - 1] or torch.cuda.Event()
            left.record(torch.cuda.current_stream(self._device))
            self._events[part - 1] = left
        self._next = (slot + 1) % len(self.slots)
        return self.slots[slot]


#: by thread, device, stream and size. Not thread-local: what a thread that ended has launched may
#: still have to read its slots; a later thread of the same number goes on with them.
_rings: dict[tuple[int, int, int, int], _Ring] = {}


def staged(num_ints: int, device: torch.device) -> Staged:
    """Host memory to write ``num_ints`` int32 into, at least; ``place`` brings them to the device.

    Raises:
        RuntimeError: the current stream is captured into a CUDA graph: its replays would copy from
            memory that holds another table by then.
    """
    if device.type != "cuda":
        tensor = torch.empty(num_ints, dtype=torch.int32)
        return Staged(tensor.numpy(), tensor, None)
    if torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError(
            "packhorse: tables made from host integers cannot be captured in a CUDA graph;"
            " StaticLayout.update copies them outside of it"
        )
    small, large = _SLOT_INTS
    if num_ints <= large:
        size = small if num_ints <= small else large
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        key = threading.get_ident(), index, stream, size
        ring = _rings.get(key)
        if ring is None:
            ring = _rings[key] = _Ring(size, index, stream)
        slot = ring.take()
        if slot is not None:
            return slot
    tensor = torch.empty(num_ints, dtype=torch.int32, pin_memory=True)
    return Staged(tensor.numpy(), tensor, None)


def to_device(tables: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Each of ``tables`` as int32 on ``device``, sent together, without a wait."""
    memory = staged(sum(table.size for table in tables), device)
    end = _write(memory.array, tables)
    placed, begin = memory.place(end, device), 0
    parts = []
    for table in tables:
        parts.append(placed[begin : begin + table.size].view(table.shape))
        begin += table.size
    return tuple(parts)


def copy_into(placed: Tensor, tables: Sequence[np.ndarray]) -> None:
    """Overwrite ``placed`` [n] int32 by the n integers of ``tables``, on its current stream."""
    memory = staged(placed.numel(), placed.device)
    end = _write(memory.array, tables)
    if memory.pinned is not None and end:
        pull_table(placed, memory.host)
    else:
        placed.copy_(memory.host[:end], non_blocking=True)


def _write(array: np.ndarray, tables: Sequence[np.ndarray]) -> int:
    begin = 0
    for table in tables:
        end = begin + table.size
        array[begin:end] = table.reshape(-1)
        begin = end
    return begin
