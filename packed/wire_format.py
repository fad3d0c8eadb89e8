"""What both forms of the wire share: a field's header and its checks, checksums, limits, errors.

A header is believed only behind its own CRC-32; what is wrong with it then is permanent.
docs/wire.md has the bytes.
"""

import ctypes
import json
import math
import mmap
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from packhorse.packed.host import host_int

VERSION: Final = 1
#: bytes moved in one go, which stay in a core's own cache until they are hashed
_CHUNK_BYTES: Final = 384 << 10
MAX_NAME_BYTES: Final = 1024

#: from here on fresh memory is asked to be of huge pages, NumPy's own limit
_HUGE_BYTES: Final = 1 << 22
_INT64_MAX: Final = 2**63 - 1
#: dtypes by NumPy's name; on the wire they are spelled as ``numpy.dtype.str``, little-endian
_NAMES: Final = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip
_DTYPES: Final = {np.dtype(name).newbyteorder("<").str: np.dtype(name) for name in _NAMES}
_NAME_OF: Final = dict(zip(_DTYPES, _NAMES, strict=True))  # ``dtype.name`` is Python, and slow
#: ``dtype.str`` of either byte order -> the name on the wire
_SENT_AS: Final = {order + spelled[1:]: spelled for spelled in _DTYPES for order in "<>|"}
_encode_header: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode
_DIGITS: Final = {"xxh3": 16, "crc32": 8}
FIELD_KEYS: Final = ("name", "dtype", "shape", "start", "bytes", "sum")

#: what may be encoded, and what is decoded: bytes, or what has their buffer
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class WireError(ValueError):
    """A message that cannot be read."""

    field: str | None = None  # its name, where it is known


class TransientWireError(WireError):
    """The message is short or damaged: asking for it again may help."""


class WireFormatError(WireError):
    """The message arrived as it was sent, and is not what this version reads: do not ask again."""


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """What a message may ask for; more is a ``WireFormatError`` before anything is allocated."""

    max_bytes: int = 2**31  # of all arrays of a message together
    max_fields: int = 1024
    max_dims: int = 8
    max_header_bytes: int = 2**18  # of a frame
    max_json_bytes: int = 2**26  # of a JSON body without its arrays
    dtypes: Collection[str] = field(default=_NAMES)  # by NumPy's names

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_fields", "max_dims", "max_header_bytes", "max_json_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"WireLimits: {name} must be a count, got {value!r}")
        unknown = [name for name in self.dtypes if name not in _NAMES]
        if unknown:
            raise ValueError(f"WireLimits: dtypes may be {', '.join(_NAMES)}, got {unknown[0]!r}")


@dataclass(frozen=True, eq=False)
class WireArray:
    """Rows ``start``, ``start + 1``, … of a field."""

    values: np.ndarray  # [rows, *row_shape]
    start: int = 0


class FieldHeader(NamedTuple):
    """What a header says of one field, checked."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    algorithm: str
    digest: str


# --- checksums ------------------------------------------------------------------------------------


class Hasher(Protocol):
    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Any, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


@cache
def _xxh3() -> Any:
    """``xxhash.xxh3_64``, or None where the package is not installed."""
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash.xxh3_64


def choose_checksum(function: str, asked: str | None) -> str:
    """The algorithm to encode with: xxh3 where ``xxhash`` is installed, unless one is asked."""
    if asked is None:
        return "crc32" if _xxh3() is None else "xxh3"
    if asked not in _DIGITS:
        raise ValueError(f"{function}: checksum must be 'xxh3', 'crc32' or None, got {asked!r}")
    return asked


def hasher(function: str, algorithm: str) -> Hasher:
    if algorithm == "crc32":
        return _Crc32()
    made = _xxh3()
    if made is None:
        raise ImportError(
            f"{function}: the checksum xxh3 needs the package xxhash: pip install"
            " 'packhorse[wire]'; checksum='crc32' at the sender needs none"
        )
    return made()


def blank_sum(algorithm: str) -> str:
    """As long as any checksum of the algorithm."""
    return f"{algorithm}:{'0' * _DIGITS[algorithm]}"


def digest_of(function: str, algorithm: str, data: memoryview) -> str:
    made = hasher(function, algorithm)
    made.update(data)
    return made.hexdigest()


def copy_hashed(function: str, algorithm: str, source: memoryview, target: memoryview) -> str:
    """Copy ``source`` and hash what was copied, each chunk while it is in the cache."""
    made = hasher(function, algorithm)
    for begin in range(0, source.nbytes, _CHUNK_BYTES):
        chunk = target[begin : begin + _CHUNK_BYTES]
        chunk[:] = source[begin : begin + _CHUNK_BYTES]
        made.update(chunk)
    return made.hexdigest()


# --- arrays to bytes ------------------------------------------------------------------------------


class Outgoing(NamedTuple):
    """A field to encode: C-ordered little-endian values as bytes, and its header without a sum."""

    name: str
    data: memoryview
    header: dict[str, Any]

    def header_with(self, checksum: str) -> dict[str, Any]:
        return {**self.header, "sum": checksum}


def outgoing(function: str, name: str, given: Any) -> Outgoing:
    """The bytes of an array or ``WireArray``; copied only where not contiguous or big-endian."""
    where = f"{function}: field {name!r}"
    if _is_long(name):
        raise ValueError(f"{function}: a field's name has {len(name)} characters: {name[:40]!r}…")
    values, start = (given.values, given.start) if isinstance(given, WireArray) else (given, 0)
    if isinstance(values, Tensor):
        raise TypeError(f"{where} is a tensor; pass its array: tensor.numpy()")
    if not isinstance(values, np.ndarray) or isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{where} must be an array, got {type(values).__name__}")
    spelled = _SENT_AS.get(values.dtype.str)
    if spelled is None:
        raise TypeError(f"{where} is {values.dtype}, none of {', '.join(_NAMES)}")
    if values.ndim == 0:
        raise ValueError(f"{where} has no rows; pass an array of one row: value.reshape(1)")
    start = host_int(start, f"{where}: start")
    if not 0 <= start <= _INT64_MAX - values.shape[0]:
        raise ValueError(f"{where}: start={start} is no row")
    values = np.ascontiguousarray(values, dtype=spelled)
    if values.dtype == np.bool_ and values.size and values.view(np.uint8).max() > 1:
        raise ValueError(f"{where} holds a boolean that is neither 0 nor 1")
    header = {
        "name": name,
        "dtype": spelled,
        "shape": list(values.shape),
        "start": start,
        "bytes": values.nbytes,
    }
    return Outgoing(name, values.reshape(-1).view(np.uint8).data.toreadonly(), header)


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Bytes of ``size`` that nobody else has seen, and a view to write them before anybody does.

    ``PyBytes_FromStringAndSize(NULL, size)`` of Python's C API. Large ones ask for huge pages, as
    NumPy's arrays do: faults of small ones cost several times the copy.
    """
    if size < 2:  # Python shares the empty one and those of one character
        raise ValueError(f"new_bytes: size={size}")
    make, find, advise = _memory_functions()
    made = make(None, size)
    address = find(made)
    if advise is not None and size >= _HUGE_BYTES:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(begin, address + size - begin, mmap.MADV_HUGEPAGE)  # a hint: it may fail
    return made, memoryview((ctypes.c_char * size).from_address(address)).cast("B")


@cache
def _memory_functions() -> tuple[Any, Any, Any]:
    make = ctypes.pythonapi.PyBytes_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    find = ctypes.pythonapi.PyBytes_AsString
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    advise = None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return make, find, advise


# --- bytes to arrays ------------------------------------------------------------------------------


def as_view(function: str, given: Any) -> memoryview:
    """The received bytes, read-only."""
    try:
        view = memoryview(given)
        if not view.c_contiguous:
            raise TypeError
        return view.cast("B").toreadonly()
    except TypeError:
        raise TypeError(f"{function}: needs contiguous bytes, got {type(given).__name__}") from None


def as_array(header: FieldHeader, data: Any) -> np.ndarray:
    """An array over ``data``, of its exact size; copied only where the memory is not aligned."""
    if header.num_bytes == 0:
        return np.empty(header.shape, dtype=header.dtype)
    values = np.frombuffer(data, dtype=header.dtype).reshape(header.shape)
    return values if values.flags.aligned else values.copy()


def check_content(function: str, header: FieldHeader, data: memoryview) -> None:
    """A byte of a boolean is 0 or 1: NumPy and torch compute nonsense from any other."""
    if header.dtype == np.bool_ and header.num_bytes:
        largest = int(np.frombuffer(data, dtype=np.uint8).max())
        if largest > 1:
            malformed(function, f"a boolean is {largest}", header.name)


def malformed(function: str, problem: str, name: str | None = None) -> NoReturn:
    raise _named(WireFormatError, function, problem, name)


def damaged(function: str, problem: str, name: str | None = None) -> NoReturn:
    raise _named(TransientWireError, function, problem, name)


def _named(kind: type[WireError], function: str, problem: str, name: str | None) -> WireError:
    place = "" if name is None else f"field {name!r}: "
    error = kind(f"{function}: {place}{problem}")
    error.field = name
    return error


def check_digest(function: str, header: FieldHeader, digest: str) -> None:
    if digest != header.digest:
        damaged(
            function,
            f"the checksum of its {header.num_bytes} bytes is wrong ({header.algorithm} {digest},"
            f" sent {header.digest})",
            header.name,
        )


def dump_header(header: Any) -> bytes:
    """The one spelling of a header: no spaces, ASCII."""
    return _encode_header(header).encode("ascii")


def load_header(function: str, text: bytes) -> Any:
    """What ``dump_header`` wrote, behind a good checksum; any other spelling is malformed."""
    try:
        header = json.loads(text)
        again = dump_header(header)
    except (ValueError, RecursionError):
        malformed(function, "the header is not JSON")
    if again != text:
        malformed(function, "the header is not spelled as this version writes it")
    return header


def read_field(function: str, header: Any, limits: WireLimits) -> FieldHeader:
    """One field of a header behind a good checksum, all its numbers checked against ``limits``."""
    if not isinstance(header, dict) or tuple(header) != FIELD_KEYS:
        malformed(function, f"a field's header must hold {', '.join(FIELD_KEYS)}, in this order")
    name = header["name"]
    if not isinstance(name, str) or _is_long(name):
        malformed(function, "a field's name must be a short string")
    if not isinstance(header["dtype"], str) or header["dtype"] not in _DTYPES:
        malformed(function, f"unknown dtype {str(header['dtype'])[:40]!r}", name)
    dtype = _DTYPES[header["dtype"]]
    if _NAME_OF[header["dtype"]] not in limits.dtypes:
        malformed(function, f"{dtype} is none of {', '.join(limits.dtypes)}", name)
    shape = header["shape"]
    if not isinstance(shape, list) or not shape:
        malformed(function, "shape must be a list with the number of rows first", name)
    if len(shape) > limits.max_dims:
        malformed(function, f"{len(shape)} dimensions are above max_dims={limits.max_dims}", name)
    for what in ("start", "bytes"):
        if not _is_count(header[what]):
            malformed(function, f"{what} must be a count, got {_short(header[what])}", name)
    for size in shape:
        if not _is_count(size):
            malformed(function, f"a dimension must be a count, got {_short(size)}", name)
    start, num_bytes = header["start"], header["bytes"]
    if start + shape[0] > _INT64_MAX:
        malformed(function, f"no row has the number {start} + {shape[0]}", name)
    # a dimension of 0 makes no bytes, but arrays of any shape are bounded by the others
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize > _INT64_MAX:
        malformed(function, f"shape {shape} is past any memory", name)
    if math.prod(shape) * dtype.itemsize != num_bytes:
        needed = math.prod(shape) * dtype.itemsize
        malformed(function, f"{shape} of {dtype} is {needed} bytes, not {num_bytes}", name)
    if num_bytes > limits.max_bytes:
        malformed(function, f"{num_bytes} bytes are above max_bytes={limits.max_bytes}", name)
    checksum = header["sum"]
    algorithm, _, digest = checksum.partition(":") if isinstance(checksum, str) else ("", "", "")
    if len(digest) != _DIGITS.get(algorithm) or set(digest) - set("0123456789abcdef"):
        malformed(function, f"unknown checksum {_short(checksum)}", name)
    return FieldHeader(name, dtype, tuple(shape), start, num_bytes, algorithm, digest)


def _is_long(name: str) -> bool:
    """Spelled in JSON; a character takes up to 12 bytes there."""
    return 12 * len(name) + 2 > MAX_NAME_BYTES and len(_encode_header(name)) > MAX_NAME_BYTES


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INT64_MAX


def _short(value: Any) -> str:
    """``repr`` of what may be long, or too long to spell."""
    if isinstance(value, int) and not -_INT64_MAX <= value <= _INT64_MAX:
        return "an integer past int64"
    return repr(value)[:40]
