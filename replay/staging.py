"""Small tables on their way to a device: through pinned memory that is used again.

A fresh pinned tensor costs an event when it is dropped, half of what such a copy costs the host.
``_Ring`` keeps a pinned buffer a thread and stream, in parts; an event is recorded as a part fills,
and a part is written again only after its event is past. Nothing waits: where the device is so far
behind that the next part is still in flight, the table takes a fresh tensor.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PARTS = 4
_PART_INTS = 16384  # 64 KiB; a table that is larger takes a fresh tensor


class _Ring:
    """For one thread and stream."""

    def __init__(self) -> None:
        self._buffer = torch.empty(_PARTS * _PART_INTS, dtype=torch.int32, pin_memory=True)
        self._array = self._buffer.numpy()
        self._events: list[torch.cuda.Event | None] = [None] * _PARTS
        self._part = 0
        self._used = 0  # ints of this part

    def place(self, num_ints: int) -> tuple[Tensor, np.ndarray] | None:
        """``num_ints`` that no copy in flight reads; None where there are none."""
        if self._used + num_ints > _PART_INTS:
            if num_ints > _PART_INTS:
                return None
            following = (self._part + 1) % _PARTS
            past = self._events[following]
            if past is not None and not past.query():
                return None
            event = self._events[self._part] or torch.cuda.Event()
            event.record()
            self._events[self._part] = event
            self._part, self._used = following, 0
        begin = self._part * _PART_INTS + self._used
        self._used += num_ints
        end = begin + num_ints
        return self._buffer[begin:end], self._array[begin:end]


class _Rings(threading.local):
    def __init__(self) -> None:
        self.of_stream: dict[tuple[int, int], _Ring] = {}


_rings = _Rings()


def to_device(tables: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Each of ``tables`` as int32 on ``device``, by one asynchronous copy of all of them.

    Raises:
        RuntimeError: the current stream is captured into a CUDA graph: its replays would copy from
            memory that holds another table by then.
    """
    sizes = [table.size for table in tables]
    total = sum(sizes)
    placed = torch.empty(total, dtype=torch.int32, device=device)
    copy_into(placed, tables)
    if len(tables) == 1:
        return (placed.view(tables[0].shape),)
    parts = placed.split(sizes)
    return tuple(part.view(table.shape) for part, table in zip(parts, tables, strict=True))


def copy_into(placed: Tensor, tables: Sequence[np.ndarray]) -> None:
    """Overwrite ``placed`` [n] int32 by the n integers of ``tables``, on its current stream."""
    if not placed.is_cuda:
        staged = np.empty(placed.numel(), np.int32)
        _write(staged, tables)
        placed.copy_(torch.from_numpy(staged))
        return
    if placed.numel() == 0:
        return
    device = placed.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            copy_into(placed, tables)
        return
    if torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError(
            "packhorse: tables made from host integers cannot be captured in a CUDA graph;"
            " StaticRowIds.update copies them outside of it"
        )
    key = device, torch._C._cuda_getCurrentRawStream(device)
    ring = _rings.of_stream.get(key)
    if ring is None:
        ring = _rings.of_stream[key] = _Ring()
    pinned = ring.place(placed.numel())
    if pinned is None:
        fresh = torch.empty(placed.numel(), dtype=torch.int32, pin_memory=True)
        pinned = fresh, fresh.numpy()
    _write(pinned[1], tables)
    placed.copy_(pinned[0], non_blocking=True)


def _write(flat: np.ndarray, tables: Sequence[np.ndarray]) -> None:
    begin = 0
    for table in tables:
        end = begin + table.size
        flat[begin:end] = table.reshape(-1)
        begin = end
