"""The binary form: one frame is a prefix, a header and the arrays' own bytes, aligned to 64.

prefix [32]   magic 8s | version u16 | flags u16 | header bytes u32 | body bytes u64
              | CRC-32 of the header u32 | CRC-32 of the 28 bytes before u32; little-endian
header        {"fields":[{name, dtype, shape, start, bytes, sum}, …]}, and spaces up to 64
body          each field's values, C order, little-endian, zeros up to 64 after each
"""

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from packhorse._nvtx import ranged, ranged_methods
from packhorse.packed.wire_format import (
    VERSION,
    Buffer,
    FieldHeader,
    Outgoing,
    WireArray,
    WireError,
    WireLimits,
    as_array,
    as_view,
    blank_sum,
    check_content,
    check_digest,
    choose_checksum,
    copy_hashed,
    damaged,
    digest_of,
    dump_header,
    load_header,
    malformed,
    new_bytes,
    outgoing,
    read_field,
)

MAGIC: Final = b"\x89PHWIRE\n"
ALIGNMENT: Final = 64

_PREFIX: Final = struct.Struct("<8sHHIQI")
_CRC: Final = struct.Struct("<I")
_PREFIX_BYTES: Final = _PREFIX.size + _CRC.size
_LAST: Final = 1  # flag: no frame of the stream comes after this one
_ZEROS: Final = bytes(ALIGNMENT)
_DEFAULT: Final = WireLimits()


@dataclass(frozen=True, eq=False)
class WireFrame:
    """The fields of one frame, in the order they were sent."""

    fields: dict[str, WireArray]
    last: bool = True  # nothing of the stream comes after it


# --- encoding -------------------------------------------------------------------------------------


@ranged
def encode_frame(
    fields: Mapping[str, np.ndarray | WireArray], *, last: bool = True, checksum: str | None = None
) -> bytes:
    """One frame as bytes, written once into memory of its exact size.

    Args:
        fields: by name, arrays [rows, *row_shape] of booleans, integers or floats up to 64 bits, or
            ``WireArray`` with the number of its first row. Any byte order and any strides; those
            that are not C-ordered and little-endian are copied once more on the way.
        last: no frame of the stream comes after this one.
        checksum: of the values: ``"xxh3"`` (the package ``xxhash``) or ``"crc32"`` (slower, always
            there). By default xxh3 where ``xxhash`` is installed.

    Raises:
        TypeError: ``fields`` is no mapping from strings to arrays; a dtype is another.
        ValueError: an array of no dimension, or a negative ``start``.
        ImportError: ``checksum="xxh3"`` without ``xxhash``.
    """
    name = "encode_frame"
    algorithm = choose_checksum(name, checksum)
    arrays = _outgoing_fields(name, fields)
    head_bytes = len(_head(arrays, [blank_sum(algorithm)] * len(arrays), last))
    frame, view = new_bytes(head_bytes + sum(_padded(array.data.nbytes) for array in arrays))
    sums, begin = [], head_bytes
    for array in arrays:
        end = begin + array.data.nbytes
        sums.append(f"{algorithm}:{copy_hashed(name, algorithm, array.data, view[begin:end])}")
        begin += _padded(array.data.nbytes)
        view[end:begin] = _ZEROS[: begin - end]
    view[:head_bytes] = _head(arrays, sums, last)
    return frame


@ranged
def frame_parts(
    fields: Mapping[str, np.ndarray | WireArray], *, last: bool = True, checksum: str | None = None
) -> list[bytes | memoryview]:
    """The same frame as buffers to send one after another; the arrays' own memory is not copied.

    Args, Raises: as ``encode_frame``. The arrays must not change until the parts are sent.
    """
    name = "frame_parts"
    algorithm = choose_checksum(name, checksum)
    arrays = _outgoing_fields(name, fields)
    sums = [f"{algorithm}:{digest_of(name, algorithm, array.data)}" for array in arrays]
    parts: list[bytes | memoryview] = [_head(arrays, sums, last)]
    for array in arrays:
        parts.append(array.data)
        parts.append(_ZEROS[: _padded(array.data.nbytes) - array.data.nbytes])
    return [part for part in parts if len(part)]


def _outgoing_fields(function: str, fields: Any) -> list[Outgoing]:
    if not isinstance(fields, Mapping):
        raise TypeError(f"{function}: fields must be a mapping, got {type(fields).__name__}")
    for name in fields:
        if not isinstance(name, str):
            raise TypeError(f"{function}: a field's name must be a string, got {name!r}")
    return [outgoing(function, name, given) for name, given in fields.items()]


def _head(arrays: list[Outgoing], sums: list[str], last: bool) -> bytes:
    """Prefix and header."""
    fields = [array.header_with(text) for array, text in zip(arrays, sums, strict=True)]
    header = dump_header({"fields": fields})
    header += b" " * (_padded(_PREFIX_BYTES + len(header)) - _PREFIX_BYTES - len(header))
    body_bytes = sum(_padded(array.data.nbytes) for array in arrays)
    prefix = _PREFIX.pack(
        MAGIC, VERSION, _LAST if last else 0, len(header), body_bytes, zlib.crc32(header)
    )
    return prefix + _CRC.pack(zlib.crc32(prefix)) + header


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# --- decoding -------------------------------------------------------------------------------------


class _Prefix(NamedTuple):
    last: bool
    header_bytes: int
    body_bytes: int
    header_crc: int

    @property
    def body_begin(self) -> int:
        return _PREFIX_BYTES + self.header_bytes

    @property
    def frame_bytes(self) -> int:
        return self.body_begin + self.body_bytes


@ranged
def decode_frame(frame: Buffer, *, owned: bool = False, limits: WireLimits = _DEFAULT) -> WireFrame:
    """The fields of one whole frame.

    Args:
        frame: its bytes, no more and no fewer.
        owned: False: arrays are read-only views of ``frame``'s memory, which must not change while
            they are used. True: each is writable memory of its own.
        limits: what the frame may ask for.

    Raises:
        TypeError: ``frame`` is not contiguous bytes.
        TransientWireError: the frame is short, or a checksum is wrong.
        WireFormatError: behind good checksums, the version is unknown, the header inconsistent or
            past ``limits``, or bytes follow the frame.
        ImportError: the checksum is xxh3, and ``xxhash`` is not installed.
    """
    name = "decode_frame"
    view = as_view(name, frame)
    prefix = _read_prefix(name, view, limits)
    headers = _read_header(name, view, prefix, limits)
    _check_whole(name, view, prefix, headers)
    decoded = _read_body(name, view, prefix, headers, copied=owned)
    if len(view) > prefix.frame_bytes:
        malformed(name, f"{len(view) - prefix.frame_bytes} bytes follow the frame")
    return decoded


def _read_prefix(function: str, view: memoryview, limits: WireLimits) -> _Prefix:
    if len(view) < _PREFIX_BYTES:
        damaged(function, f"the frame is cut short after {len(view)} bytes")
    magic, version, flags, header_bytes, body_bytes, crc = _PREFIX.unpack_from(view)
    if _CRC.unpack_from(view, _PREFIX.size) != (zlib.crc32(view[: _PREFIX.size]),):
        damaged(function, "this is no frame, or the checksum of its prefix is wrong")
    if magic != MAGIC:
        malformed(function, f"a frame begins with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        malformed(function, f"version {version} of the format; this reads version {VERSION}")
    if flags & ~_LAST:
        malformed(function, f"unknown flags {flags:#x}")
    if header_bytes > limits.max_header_bytes:
        malformed(
            function,
            f"a header of {header_bytes} bytes is above max_header_bytes={limits.max_header_bytes}",
        )
    if body_bytes > limits.max_bytes + ALIGNMENT * limits.max_fields:
        malformed(function, f"a body of {body_bytes} bytes; max_bytes={limits.max_bytes}")
    return _Prefix(bool(flags & _LAST), header_bytes, body_bytes, crc)


def _read_header(
    function: str, view: memoryview, prefix: _Prefix, limits: WireLimits
) -> list[FieldHeader]:
    text = bytes(view[_PREFIX_BYTES : prefix.body_begin])
    if len(text) < prefix.header_bytes:
        damaged(function, f"the header is cut short: {len(text)} of {prefix.header_bytes} bytes")
    if zlib.crc32(text) != prefix.header_crc:
        damaged(function, "the checksum of the header is wrong")
    stripped = text.rstrip(b" ")
    header = load_header(function, stripped)
    if not isinstance(header, dict) or list(header) != ["fields"]:
        malformed(function, "the header must hold the fields, and nothing else")
    given = header["fields"]
    if not isinstance(given, list):
        malformed(function, "the header's fields must be a list")
    if len(given) > limits.max_fields:
        malformed(function, f"{len(given)} fields are above max_fields={limits.max_fields}")
    if _PREFIX_BYTES + len(text) != _padded(_PREFIX_BYTES + len(stripped)):
        malformed(function, f"the header does not end at a multiple of {ALIGNMENT}")
    headers = [read_field(function, entry, limits) for entry in given]
    seen: set[str] = set()
    for entry in headers:
        if entry.name in seen:
            malformed(function, "it is there twice", entry.name)
        seen.add(entry.name)
    total = sum(entry.num_bytes for entry in headers)
    if total > limits.max_bytes:
        malformed(function, f"{total} bytes in all are above max_bytes={limits.max_bytes}")
    if sum(_padded(entry.num_bytes) for entry in headers) != prefix.body_bytes:
        malformed(function, f"the fields do not make a body of {prefix.body_bytes} bytes")
    return headers


def _check_whole(
    function: str, view: memoryview, prefix: _Prefix, headers: list[FieldHeader]
) -> None:
    if len(view) >= prefix.frame_bytes:
        return
    there = len(view) - prefix.body_begin
    for header in headers:
        if there < header.num_bytes:
            damaged(
                function, f"cut short: {there} of its {header.num_bytes} bytes are there",
                header.name,
            )  # fmt: skip
        there -= _padded(header.num_bytes)
    damaged(function, f"cut short: {len(view)} of {prefix.frame_bytes} bytes are there")


def _read_body(
    function: str, view: memoryview, prefix: _Prefix, headers: list[FieldHeader], *, copied: bool
) -> WireFrame:
    """Arrays over ``view``, as writable as that is, or copies; all of it is verified first."""
    fields = {}
    begin = prefix.body_begin
    for header in headers:
        end = begin + header.num_bytes
        data = view[begin:end]
        if copied:
            source, data = data, np.empty(header.num_bytes, dtype=np.uint8).data
            digest = copy_hashed(function, header.algorithm, source, data)
        else:
            digest = digest_of(function, header.algorithm, data)
        check_digest(function, header, digest)
        check_content(function, header, data)
        begin += _padded(header.num_bytes)
        if bytes(view[end:begin]) != _ZEROS[: begin - end]:
            damaged(function, "what follows it up to the next field is not zeros", header.name)
        values = as_array(header, data)
        if view.readonly and not copied:
            values.flags.writeable = False
        fields[header.name] = WireArray(values, header.start)
    return WireFrame(fields, prefix.last)


# --- streams --------------------------------------------------------------------------------------


@ranged_methods()
class FrameReader:
    """Frames out of a byte stream that arrives in pieces of any size.

        reader = FrameReader()
        async for piece in response.content.iter_any():
            for frame in reader.feed(piece):
                joiner.add(frame)
        reader.close()

    Each frame lies in one piece of memory of its own, allocated once its header is verified and
    within the limits; its arrays are writable. After an error the reader is of no more use.
    """

    def __init__(self, *, limits: WireLimits = _DEFAULT) -> None:
        self._limits = limits
        self._failure: WireError | None = None
        self._start_frame()

    def _start_frame(self) -> None:
        self._prefix: _Prefix | None = None
        self._headers: list[FieldHeader] | None = None
        self._memory = np.empty(_PREFIX_BYTES, dtype=np.uint8)
        self._filled = 0

    def feed(self, piece: Buffer) -> list[WireFrame]:
        """The frames that ``piece`` completes.

        Raises:
            TypeError, TransientWireError, WireFormatError, ImportError: as ``decode_frame``.
        """
        name = "FrameReader.feed"
        if self._failure is not None:
            raise self._failure
        view = as_view(name, piece)
        frames: list[WireFrame] = []
        try:
            while len(view) or self._filled == self._memory.size:
                taken = min(len(view), self._memory.size - self._filled)
                self._memory.data[self._filled : self._filled + taken] = view[:taken]
                self._filled += taken
                view = view[taken:]
                if self._filled == self._memory.size:
                    frames.extend(self._next_part(name))
        except WireError as error:
            self._failure = error
            raise
        return frames

    def _next_part(self, name: str) -> Iterable[WireFrame]:
        """The prefix, the header or the body is there: a frame, or memory for what follows."""
        memory = self._memory.data
        if self._prefix is None:
            self._prefix = _read_prefix(name, memory.toreadonly(), self._limits)
            needed = self._prefix.body_begin
        elif self._headers is None:
            self._headers = _read_header(name, memory.toreadonly(), self._prefix, self._limits)
            needed = self._prefix.frame_bytes
        else:
            frame = _read_body(name, memory, self._prefix, self._headers, copied=False)
            self._start_frame()
            return (frame,)
        grown = np.empty(needed, dtype=np.uint8)
        grown[: self._filled] = self._memory
        self._memory = grown
        return ()

    def close(self) -> None:
        """The stream has ended.

        Raises:
            TransientWireError: in the middle of a frame; names the field where its header is known.
        """
        name = "FrameReader.close"
        if self._failure is not None:
            raise self._failure
        if self._prefix is not None and self._headers is not None:
            there = self._memory.data[: self._filled]
            _check_whole(name, there, self._prefix, self._headers)
        if self._filled:
            damaged(name, f"the stream ends {self._filled} bytes into a frame")


@ranged_methods()
class FrameJoiner:
    """The fields of a stream's frames, joined by the numbers of their rows.

    A field may be in some frames only; its first chunk may start at any row (a later turn's), and
    each other must start where the one before ended, with the same dtype and row shape.
    """

    def __init__(self, *, limits: WireLimits = _DEFAULT) -> None:
        self._limits = limits
        self._chunks: dict[str, list[WireArray]] = {}
        self._num_bytes = 0
        self._ended = False

    def add(self, frame: WireFrame) -> None:
        """Take the next frame; nothing is taken of one that does not fit.

        Raises:
            TypeError: ``frame`` is no ``WireFrame``.
            WireFormatError: rows are missing or come twice, the dtype or the row shape changes,
                a frame follows the last one, or all of them together pass the limits.
        """
        name = "FrameJoiner.add"
        if not isinstance(frame, WireFrame):
            raise TypeError(f"{name}: frame must be a WireFrame, got {type(frame).__name__}")
        if self._ended:
            malformed(name, "a frame follows the last one")
        for field, chunk in frame.fields.items():
            self._check_next(name, field, chunk)
        num_bytes = sum(chunk.values.nbytes for chunk in frame.fields.values())
        if self._num_bytes + num_bytes > self._limits.max_bytes:
            _past_limit(name, self._num_bytes + num_bytes, self._limits)
        if len(self._chunks.keys() | frame.fields.keys()) > self._limits.max_fields:
            malformed(name, f"more fields than max_fields={self._limits.max_fields}")
        for field, chunk in frame.fields.items():
            self._chunks.setdefault(field, []).append(chunk)
        self._num_bytes += num_bytes
        self._ended = frame.last

    def _check_next(self, name: str, field: str, chunk: WireArray) -> None:
        if field not in self._chunks:
            return
        before = self._chunks[field][-1]
        if chunk.values.dtype != before.values.dtype:
            change = f"{before.values.dtype} becomes {chunk.values.dtype}"
            malformed(name, f"{change} at row {chunk.start}", field)
        if chunk.values.shape[1:] != before.values.shape[1:]:
            old, new = list(before.values.shape[1:]), list(chunk.values.shape[1:])
            malformed(name, f"rows of {old} become {new} at row {chunk.start}", field)
        expected = before.start + len(before.values)
        if chunk.start > expected:
            malformed(name, f"rows {expected} to {chunk.start - 1} are missing", field)
        if chunk.start < expected:
            malformed(
                name, f"a chunk starts at row {chunk.start}, but {expected} is the next", field
            )

    def finish(self) -> dict[str, WireArray]:
        """The joined fields; one of a single chunk is that chunk.

        Raises:
            TransientWireError: the last frame has not come.
        """
        if not self._ended:
            damaged("FrameJoiner.finish", "the stream ends before its last frame")
        return {
            field: chunks[0]
            if len(chunks) == 1
            else WireArray(np.concatenate([chunk.values for chunk in chunks]), chunks[0].start)
            for field, chunks in self._chunks.items()
        }


def _past_limit(name: str, num_bytes: int, limits: WireLimits) -> NoReturn:
    malformed(name, f"{num_bytes} bytes in all are above max_bytes={limits.max_bytes}")


@ranged
def join_frames(
    frames: Iterable[WireFrame], *, limits: WireLimits = _DEFAULT
) -> dict[str, WireArray]:
    """``FrameJoiner`` over all the frames of a stream.

    Raises:
        TypeError, TransientWireError, WireFormatError: as its ``add`` and ``finish``.
    """
    joiner = FrameJoiner(limits=limits)
    for frame in frames:
        joiner.add(frame)
    return joiner.finish()
