"""From host memory to a device, beside what the device computes.

    stager = DeviceStager("cuda")
    for microbatch in stager.prefetch(plan.split(batch)):   # the next one is on its way meanwhile
        train(microbatch)

    copy = stager.stage(batch, trajectories=[5, 2, 9])      # those rows alone, gathered on the way
    ...
    microbatch = copy.wait()                                # the current stream waits, not the host

Rows in pageable memory (an object store's or shared pages too) go through a bounded ring of pinned
buffers, filled by several threads; pinned ones are copied from where they are. All of it runs on a
stream of the stager's own. A buffer is used again only after the event behind its last copy: where
all are in flight ``stage`` waits for the oldest copy, never for what the device computes.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from packhorse._nvtx import ranged_methods
from packhorse.packed.host import host_count, segment_ids
from packhorse.packed.pool import count_threads, run_tasks
from packhorse.packed.transport_parts import Shippable, check_kind, tensors_of
from packhorse.packed.transport_rows import Chunk, LayOut, Made

V = TypeVar("V", bound=Shippable)

_BUFFER_BYTES: Final = 8 * 2**20
#: Threads that fill buffers: as many as keep a PCIe 5 link busy.
_MOST_THREADS: Final = 8
#: Buffers beyond one a thread, so that some are on their way while all threads write.
_SPARE_BUFFERS: Final = 4


@ranged_methods()
class StagedCopy:
    """What ``DeviceStager.stage`` has sent: on its way to the device, or there."""

    __slots__ = ("_done", "_memory", "_value")

    def __init__(self, value: Any, memory: Tensor, done: "torch.cuda.Event | None") -> None:
        self._value, self._memory, self._done = value, memory, done

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> Any:
        """The batch on the device, for work that is launched on a stream from now on.

        Args:
            stream: which waits for the copy, and which the memory is kept for; the current one by
                default. The host does not wait. Call it again for each other stream.
        """
        if self._done is not None:
            if stream is None:
                stream = torch.cuda.current_stream(self._memory.device)
            stream.wait_event(self._done)
            # it is the copying stream's: given back, it must not be written before this one is past
            self._memory.record_stream(stream)
        return self._value

    def is_done(self) -> bool:
        """Whether the copy has ended, so that a pinned source may be written again. Waits for
        nothing."""
        return self._done is None or self._done.query()


@ranged_methods()
class DeviceStager:
    """Copies batches to one device on a stream of its own, through pinned buffers that it keeps.

    Args:
        device: a CUDA device, by default the current one; or "cpu", where the same calls are plain
            copies.
        buffer_bytes: of one pinned buffer, which one copy to the device empties. A row that is
            larger is cut.
        num_buffers: at least 2; by default 4 more than threads. ``num_buffers * buffer_bytes`` is
            all the pinned memory it ever takes, from its construction on.
        num_threads: that fill buffers; by default the usable CPUs, 8 at most.
        stream: to copy on, in place of one of its own.

    Raises:
        TypeError, ValueError: a number is none, or too small; another kind of device.

    One stager serves several threads, one call after another. While a CUDA graph is captured, by
    any thread, stage nothing.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
        num_buffers: int | None = None,
        num_threads: int | None = None,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        name = "DeviceStager"
        place = torch.device("cuda" if device is None else device)
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: device must be a CUDA device or 'cpu', got {place}")
        self._buffer_bytes = host_count(buffer_bytes, f"{name}: buffer_bytes")
        if self._buffer_bytes < 4096:
            raise ValueError(f"{name}: buffer_bytes must be at least 4096, got {buffer_bytes}")
        self._num_threads = count_threads(num_threads, name)
        if num_threads is None:
            self._num_threads = min(self._num_threads, _MOST_THREADS)
        if num_buffers is None:
            num_buffers = self._num_threads + _SPARE_BUFFERS
        num_buffers = host_count(num_buffers, f"{name}: num_buffers")
        if num_buffers < 2:
            raise ValueError(f"{name}: num_buffers must be at least 2, got {num_buffers}")
        self._lock = threading.Lock()
        self._stream = stream
        self._sources: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._ring: _Ring | None = None
        if place.type == "cuda":
            index = torch.cuda.current_device() if place.index is None else place.index
            place = torch.device("cuda", index)
            if stream is None:
                self._stream = torch.cuda.Stream(place)
            elif stream.device != place:
                raise ValueError(f"{name}: stream is of {stream.device}, device is {place}")
            self._ring = _Ring(num_buffers, self._buffer_bytes)
        self.device = place

    def stage(self, value: V, *, trajectories: Any = None) -> StagedCopy:
        """Send a batch, or some of its trajectories, to the device.

        Returns as soon as the last row left pageable memory: rows of that are the caller's again,
        pinned ones are not to be written before ``StagedCopy.is_done``.

        Args:
            value: a ``Batch``, ``PackedTensor`` or ``PackedRagged`` on the host; read-only memory
                is fine, and so are views with any strides: of ``values[:, first:last]`` only those
                layers are sent. Metadata and listed things that are no tensors stay as they are.
            trajectories: what ``value[...]`` takes for several: a list, array or tensor of
                integers or booleans, a range or a slice, repeats allowed. Their rows go straight
                into the pinned buffers.

        Returns:
            A ``StagedCopy``; its ``wait()`` is equal to ``value[trajectories]`` on the device. All
            its fields lie in one allocation, which lives as long as one of them does.

        Raises:
            TypeError: ``value`` is another thing.
            ValueError: a field is on a device or requires grad; names it.
            RuntimeError: the current stream is captured into a CUDA graph.
            TypeError, ValueError, IndexError: ``trajectories`` are not there.
        """
        name = "DeviceStager.stage"
        check_kind(name, value)
        for path, held in tensors_of(value):
            if held.device.type != "cpu":
                raise ValueError(f"{name}: {path} is on {held.device}; only host fields are staged")
            if getattr(held, "requires_grad", False):
                raise ValueError(f"{name}: {path} requires grad; stage its detach()")
        ids: np.ndarray | None = None
        chosen: Any = value
        if isinstance(trajectories, slice) and trajectories.step in (None, 1):
            chosen = value[trajectories]  # a view
        elif trajectories is not None:
            ids = segment_ids(trajectories, len(value), f"{name}: trajectories")
        if self._ring is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: a copy from host memory cannot be captured in a CUDA graph; stage before"
            )
        layout = LayOut(direct=self._ring is not None, max_bytes=self._buffer_bytes)
        try:
            make = layout.add_value(chosen, ids)
        except ValueError as error:
            raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
        if self._ring is None:
            return self._copy_on_host(layout, make)
        with self._lock:
            return self._send(layout, make, self._ring)

    def prefetch(self, values: Iterable[V], *, ahead: int = 1) -> Iterator[V]:
        """Each of ``values`` on the device, while those behind it are on their way.

        Args:
            values: batches, as ``stage`` takes them; taken from the iterable ``ahead`` early.
            ahead: how many are sent before the current one is used; 0: none.

        Yields:
            ``stage(value).wait()``. Up to ``ahead + 1`` of them are on the device, and what the
            device has still to compute with.
        """
        ahead = host_count(ahead, "DeviceStager.prefetch: ahead")
        return self._prefetch(values, ahead)

    def _prefetch(self, values: Iterable[V], ahead: int) -> Iterator[V]:
        sent: deque[StagedCopy] = deque()
        for value in values:
            sent.append(self.stage(value))
            if len(sent) > ahead:
                yield sent.popleft().wait()
        while sent:
            yield sent.popleft().wait()

    # --- copies -----------------------------------------------------------------------------------

    def _copy_on_host(self, layout: LayOut, make: Made) -> StagedCopy:
        memory = torch.from_numpy(np.empty(layout.num_bytes, dtype=np.uint8))
        array = memory.numpy()
        chunks = layout.chunks()

        def copy(k: int) -> None:
            chunks[k].write(array[chunks[k].place :])

        run_tasks(copy, len(chunks), self._num_threads)
        return StagedCopy(make(memory), memory, None)

    def _send(self, layout: LayOut, make: Made, ring: "_Ring") -> StagedCopy:
        stream = self._stream
        assert stream is not None
        # no tensor of inference mode: the threads that write it are not in it
        with torch.inference_mode(False), torch.cuda.device(self.device), torch.cuda.stream(stream):
            memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
            sources, through_ring = [], []
            for chunk in layout.chunks():
                source = chunk.direct
                if source is None:
                    through_ring.append(chunk)
                else:
                    memory[chunk.place : chunk.place + chunk.num_bytes].copy_(source, True)
                    sources.append(source)
            ring.send(through_ring, memory, stream, self._num_threads)
            value = make(memory)
            done = torch.cuda.Event()
            done.record(stream)
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        if sources:  # pinned by others than torch they would not be kept
            self._sources.append((done, sources))
        return StagedCopy(value, memory, done)


class _Ring:
    """Pinned buffers, used in turn; each has the event behind its last copy."""

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        self._buffers = torch.empty(num_buffers, buffer_bytes, dtype=torch.uint8, pin_memory=True)
        self._arrays = self._buffers.numpy()
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def send(
        self, chunks: list[Chunk], memory: Tensor, stream: "torch.cuda.Stream", num_threads: int
    ) -> None:
        """Write ``chunks`` into buffers and copy these to ``memory`` on ``stream``."""
        first, num_buffers = self._next, len(self._events)
        launched = [threading.Event() for _ in chunks]

        def send_one(k: int) -> None:
            chunk, slot = chunks[k], (first + k) % num_buffers
            try:
                if k >= num_buffers:
                    launched[k - num_buffers].wait()
                event = self._events[slot]
                if event is not None:
                    event.synchronize()
                chunk.write(self._arrays[slot])
                with torch.cuda.device(memory.device), torch.cuda.stream(stream):
                    into = memory[chunk.place : chunk.place + chunk.num_bytes]
                    into.copy_(self._buffers[slot, : chunk.num_bytes], True)
                    event = event or torch.cuda.Event()
                    event.record(stream)
                self._events[slot] = event
            finally:
                launched[k].set()

        self._next = (first + len(chunks)) % num_buffers
        run_tasks(send_one, len(chunks), num_threads)
