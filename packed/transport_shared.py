"""A batch in memory that processes of one host share, without Ray: one copy in, none out.

    with share_batch(batch) as shared:                       # the writer
        queue.put(shared.handle)                             # 100 bytes, however it likes to send
        wait_until_all_have_attached()

    batch = attach_batch(queue.get())                        # each reader

The memory is an anonymous file (``memfd_create``): no name is left in /dev/shm, no resource tracker
watches it, /dev/shm may be as small as containers have it. The kernel frees it when its owner has
closed it, or ended, and the last view of every reader is gone, whichever of them crashes. It is
sealed once it is written: nobody can change or truncate it, and a write to a packed field of a
reader ends that process. Linux only; readers run as the owner's user and see its process id.

What lies in it:

    header    magic, version, token, sizes, checksums; verified before anything is mapped
    places    (offset, bytes) of each buffer
    pickle    of the batch without its buffers, by protocol 5
    buffers   the fields, each from a page of its own on
"""

import errno
import fcntl
import mmap
import os
import pickle
import secrets
import struct
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

from packhorse._nvtx import ranged, ranged_methods
from packhorse.packed.pool import count_threads, run_tasks
from packhorse.packed.transport_parts import Shippable, check_kind, check_shippable, parts_of

_MAGIC: Final = b"packhors"
_VERSION: Final = 1
#: magic, version, buffers, token, bytes in all, bytes of the pickle, checksum of places and pickle
_HEADER: Final = struct.Struct("<8sII16sQQI")
_CHECKSUM: Final = struct.Struct("<I")  # of the header, behind it
_PLACE: Final = struct.Struct("<QQ")
#: What one task writes; a multiple of every page size.
_BLOCK_BYTES: Final = 16 * 2**20
_MOST_THREADS: Final = 8
#: linux/memfd.h: never to be executed, which some systems ask for
_MFD_NOEXEC_SEAL: Final = 8


class SharedHandle(NamedTuple):
    """Where a shared batch is; send it to any process of the same host and user."""

    process: int
    descriptor: int
    token: str
    num_bytes: int


@ranged_methods()
class SharedBatch:
    """The owner's side of a batch that ``share_batch`` wrote; a context manager.

    Once it is closed, or dropped, or its process has ended, no reader can attach; those that have
    keep what they have. It is not sent or copied itself (``TypeError``): its ``handle`` is.
    """

    def __init__(self, descriptor: int, token: bytes, num_bytes: int) -> None:
        self._handle = SharedHandle(os.getpid(), descriptor, token.hex(), num_bytes)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # the kernel does

    @property
    def handle(self) -> SharedHandle:
        """For ``attach_batch``. Raises ``RuntimeError`` once it is closed."""
        if not self._close.alive:
            raise RuntimeError("SharedBatch: it is closed; no reader could attach")
        return self._handle

    @property
    def num_bytes(self) -> int:
        """Of memory, header and pickle included."""
        return self._handle.num_bytes

    def close(self) -> None:
        """Give up the owner's hold; the memory is freed with the last reader's view. Twice is
        fine."""
        self._close()

    def __enter__(self) -> "SharedBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("SharedBatch: its owner keeps it; send its handle to the readers")

    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        return f"SharedBatch({self.num_bytes} bytes{state})"


@ranged
def share_batch(value: Shippable, *, num_threads: int | None = None) -> SharedBatch:
    """Write a batch into memory that other processes of this host can attach, once.

    Args:
        value: a ``Batch``, ``PackedTensor`` or ``PackedRagged`` on the host. A slice takes its own
            rows alone; values that are not contiguous are copied once more on the way.
        num_threads: that write; by default the usable CPUs, 8 at most.

    Returns:
        A ``SharedBatch``. Keep it until every reader has attached, then close it.

    Raises:
        TypeError: ``value`` is another thing.
        ValueError: a field is on a device or requires grad; names it.
        OSError: no memory, or no descriptor left; nothing is held then. Not Linux.
    """
    name = "share_batch"
    check_shippable(name, value)
    return _share(name, value, min(count_threads(num_threads, name), _MOST_THREADS))


@ranged
def share_parts(
    value: Shippable, parts: int | Sequence[Any], *, num_threads: int | None = None
) -> list[SharedBatch]:
    """Write the part of each rank into memory of its own; a rank maps its own alone.

    Args:
        value: as ``share_batch`` takes it, of B trajectories.
        parts: how many, for parts of consecutive trajectories whose numbers differ by at most one;
            or by part what ``value[...]`` takes, as ``put_parts`` says.
        num_threads: as ``share_batch``.

    Returns:
        One ``SharedBatch`` a part.

    Raises:
        TypeError, ValueError, OSError: as ``share_batch``.
        TypeError, ValueError, IndexError: a part names trajectories that are not there.
    """
    name = "share_parts"
    check_shippable(name, value)
    threads = min(count_threads(num_threads, name), _MOST_THREADS)
    selectors = parts_of(name, value, parts)
    made: list[SharedBatch] = []
    try:
        for selector in selectors:
            made.append(_share(name, value[selector], threads))
    except BaseException:
        for shared in made:
            shared.close()
        raise
    return made


@ranged
def attach_batch(handle: SharedHandle) -> Any:
    """The batch behind a handle, its packed fields in the shared pages.

    Args:
        handle: of a ``SharedBatch`` on this host.

    Returns:
        What was shared; packed fields are views of the shared memory, which they keep, and which
        cannot be written: ``clone`` them to write. Dense and listed fields are private copies.

    Raises:
        TypeError: ``handle`` is another thing.
        RuntimeError: its owner has closed it or ended, is of another user or another container, or
            what is there now is another thing (a stale handle).
        ValueError: what is there is damaged, or of another version of this package.
    """
    name = "attach_batch"
    if not isinstance(handle, SharedHandle):
        raise TypeError(f"{name}: handle must be a SharedHandle, got {type(handle).__name__}")
    descriptor = _open(name, handle)
    try:
        places, pickled = _read_head(name, handle, descriptor)
        pages = mmap.mmap(descriptor, handle.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    view = memoryview(pages)
    value = pickle.loads(pickled, buffers=[view[begin : begin + size] for begin, size in places])
    check_kind(name, value, "what was shared")
    return value


# --- writing --------------------------------------------------------------------------------------


def _share(name: str, value: Shippable, num_threads: int) -> SharedBatch:
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(buffer.raw()) for buffer in buffers]
    end = _HEADER.size + _CHECKSUM.size + _PLACE.size * len(parts) + len(pickled)
    places = []
    for part in parts:
        begin = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        places.append((begin, part.nbytes))
        end = begin + part.nbytes
    num_bytes = max(end, 1)
    token = secrets.token_bytes(16)
    table = b"".join(_PLACE.pack(*place) for place in places) + pickled
    header = _HEADER.pack(
        _MAGIC, _VERSION, len(parts), token, num_bytes, len(pickled), zlib.crc32(table)
    )
    head = header + _CHECKSUM.pack(zlib.crc32(header)) + table

    descriptor = _create(name, token.hex())
    try:
        os.ftruncate(descriptor, num_bytes)
        _write(descriptor, memoryview(head), 0)
        blocks = [
            (place + offset, part[offset : offset + _BLOCK_BYTES])
            for (place, _), part in zip(places, parts, strict=True)
            for offset in range(0, part.nbytes, _BLOCK_BYTES)
        ]
        # written, not mapped: no page is cleared first, and where memory is short it is an error
        run_tasks(
            lambda k: _write(descriptor, blocks[k][1], blocks[k][0]), len(blocks), num_threads
        )
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return SharedBatch(descriptor, token, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _create(name: str, token: str) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError(f"{name} needs Linux: there is no memfd_create here")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(_file_name(token), flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(_file_name(token), flags)  # before Linux 6.3


def _file_name(token: str) -> str:
    return f"packhorse-{token}"


def _write(descriptor: int, data: memoryview, place: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


# --- reading --------------------------------------------------------------------------------------


def _open(name: str, handle: SharedHandle) -> int:
    path = f"/proc/{handle.process}/fd/{handle.descriptor}"
    gone = f"{name}: process {handle.process} holds no such shared batch"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_file_name(handle.token)} "):
            raise RuntimeError(f"{gone} any more: the handle is stale, its owner has closed it")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        raise RuntimeError(
            f"{gone}: its owner has closed it or ended, or is of another host or container; keep"
            " the SharedBatch until all have attached"
        ) from None
    except PermissionError:
        raise RuntimeError(
            f"{name}: process {handle.process} does not let this one see its files; attach as the"
            " same user"
        ) from None


def _read_head(
    name: str, handle: SharedHandle, descriptor: int
) -> tuple[list[tuple[int, int]], bytes]:
    """The places of the buffers, all within the memory, and the pickle."""

    def damaged(what: str) -> ValueError:
        return ValueError(f"{name}: the shared batch is damaged: {what}")

    size = os.fstat(descriptor).st_size
    if size != handle.num_bytes:
        raise damaged(f"it has {size} bytes, its handle says {handle.num_bytes}")
    head = os.pread(descriptor, _HEADER.size + _CHECKSUM.size, 0)
    if len(head) < _HEADER.size + _CHECKSUM.size or not head.startswith(_MAGIC):
        raise damaged("no header")
    header, checksum = head[: _HEADER.size], head[_HEADER.size :]
    _, version, num_buffers, token, num_bytes, num_pickled, table_sum = _HEADER.unpack(header)
    if (zlib.crc32(header),) != _CHECKSUM.unpack(checksum):
        raise damaged("the header's checksum differs")
    if version != _VERSION:
        raise ValueError(f"{name}: the shared batch has format {version}, this reads {_VERSION}")
    if token.hex() != handle.token or num_bytes != size:
        raise damaged("its header is that of another one")
    table_bytes = num_buffers * _PLACE.size + num_pickled
    if len(head) + table_bytes > size:
        raise damaged(f"{num_buffers} buffers and {num_pickled} bytes of pickle do not fit")
    table = os.pread(descriptor, table_bytes, len(head))
    if len(table) != table_bytes or zlib.crc32(table) != table_sum:
        raise damaged("the checksum of its pickle differs")
    places = [_PLACE.unpack_from(table, i * _PLACE.size) for i in range(num_buffers)]
    for begin, length in places:
        if begin + length > size:
            raise damaged(f"a buffer ends at {begin + length} of {size} bytes")
    return places, table[num_buffers * _PLACE.size :]
