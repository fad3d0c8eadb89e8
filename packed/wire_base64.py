"""Base64 straight into memory that is there already, and out of it, hashed on the way.

``pybase64`` carries libbase64, whose C functions write where they are told; its own Python
functions return new bytes, which costs a copy. A build that hides the former takes that copy, and
without the package ``binascii`` of the standard library does the same, some tens of times slower.
"""

import binascii
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from packhorse.packed.wire_format import Hasher

#: bytes in one go, divisible by 3: they stay in the last cache between hash and base64, and there
#: are few calls
CHUNK_BYTES: Final = 1536 << 10
_CHUNK_CHARACTERS: Final = CHUNK_BYTES // 3 * 4
_SLACK_BYTES: Final = 64


def base64_size(num_bytes: int) -> int:
    """Characters of ``num_bytes``, padding included."""
    return -(-num_bytes // 3) * 4


@cache
def _pybase64() -> Any:
    try:
        import pybase64
    except ImportError:
        return None
    return pybase64


@cache
def _libbase64() -> tuple[Any, Any] | None:
    """``base64_encode`` and ``base64_decode`` of libbase64.h, or None where they cannot be had."""
    if _pybase64() is None:
        return None
    try:
        from pybase64 import _pybase64 as extension

        library = ctypes.CDLL(extension.__file__)
        functions = library.base64_encode, library.base64_decode
    except (ImportError, OSError, AttributeError):
        return None
    for function in functions:
        function.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t),
            ctypes.c_int,
        )  # fmt: skip
    functions[0].restype, functions[1].restype = None, ctypes.c_int
    return functions


def encode_into(data: memoryview, target: memoryview, hashed: Hasher) -> None:
    """Write the text of ``data`` into ``target``, of ``base64_size``; ``data`` is hashed too."""
    functions = _libbase64()
    if functions is not None and data.nbytes:
        encode, source, into = functions[0], _address(data), _address(target)
        written = ctypes.c_size_t()
    position = 0
    for begin in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        hashed.update(chunk)
        if functions is None:
            text = _encoder()(chunk)
            target[position : position + len(text)] = text
            position += len(text)
            del text  # before the next one is made
        else:
            encode(source + begin, len(chunk), into + position, ctypes.byref(written), 0)
            position += written.value


def decode_text(text: memoryview, num_bytes: int, hashed: Hasher) -> memoryview | None:
    """Writable memory of exactly ``num_bytes``, hashed; None where ``text``, of ``base64_size``
    characters, is not their one spelling.
    """
    # text without the padding it must have is of up to two bytes more, which libbase64 writes
    decoded = np.empty(num_bytes + _SLACK_BYTES, dtype=np.uint8)[:num_bytes].data
    if num_bytes == 0:
        return decoded
    decode = _decode_into(text, decoded)
    for begin in range(0, num_bytes, CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, num_bytes)
        if not decode(begin // 3 * 4, begin, end):
            return None
        hashed.update(decoded[begin:end])
    # the last characters hold bits that no byte has: they must be zeros, as an encoder writes them
    rest = num_bytes % 3 or 3
    return decoded if _encoder()(decoded[-rest:]) == bytes(text[-4:]) else None


class _Unhashed:
    def update(self, data: memoryview, /) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def decode_base64(text: str) -> memoryview | None:
    """Writable memory with what ``text`` stands for; None where it is not its one spelling."""
    if not text.isascii() or len(text) % 4:
        return None
    padding = len(text) - len(text[-2:].rstrip("=")) - len(text[:-2])
    num_bytes = len(text) // 4 * 3 - padding
    return decode_text(memoryview(text.encode("ascii")), num_bytes, _Unhashed())


def _decode_into(text: memoryview, decoded: memoryview) -> Callable[[int, int, int], bool]:
    """Whether the text from a character on is that of the bytes [begin, end), then written."""
    functions, module = _libbase64(), _pybase64()
    if functions is not None:
        source, into, written = _address(text), _address(decoded), ctypes.c_size_t()

        def decode(character: int, begin: int, end: int) -> bool:
            size = min(_CHUNK_CHARACTERS, len(text) - character)
            if size > _CHUNK_CHARACTERS or base64_size(end - begin) != size:
                return False
            good = functions[1](source + character, size, into + begin, ctypes.byref(written), 0)
            return good == 1 and written.value == end - begin

        return decode

    def decode_copied(character: int, begin: int, end: int) -> bool:
        chunk = text[character : character + _CHUNK_CHARACTERS]
        try:
            # binascii passes over characters of no meaning, and what has some is short
            piece = (
                binascii.a2b_base64(chunk)
                if module is None
                else module.b64decode(chunk, validate=True)
            )
        except ValueError:  # binascii.Error is one
            return False
        if len(piece) != end - begin:
            return False
        decoded[begin:end] = piece
        return True

    return decode_copied


def _encoder() -> Callable[[memoryview], bytes]:
    module = _pybase64()
    return _b2a_base64 if module is None else module.b64encode


def _b2a_base64(data: memoryview) -> bytes:
    return binascii.b2a_base64(data, newline=False)


def _address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
