"""Base64 into memory that is there already, and out of it: ``pybase64`` where it is installed.

Without it the standard library's ``binascii`` does the same, some tens of times slower.
"""

import binascii
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np

from packhorse.packed.wire_format import Hasher

#: bytes encoded in one go, divisible by 3: their text stays in a core's own cache until it is in
#: its place, and is below what malloc maps anew each time
CHUNK_BYTES: Final = 90 << 10
_CHUNK_CHARACTERS: Final = CHUNK_BYTES // 3 * 4


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


def encode_text(data: memoryview) -> bytes:
    module = _pybase64()
    return binascii.b2a_base64(data, newline=False) if module is None else module.b64encode(data)


def encode_chunks(data: memoryview, hashed: Hasher) -> Iterator[bytes]:
    """The text of ``data`` in pieces; each piece's bytes are hashed while they are in the cache."""
    for begin in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        hashed.update(chunk)
        yield encode_text(chunk)


def decode_text(text: memoryview, num_bytes: int) -> memoryview | None:
    """Writable memory of exactly ``num_bytes``, or None where ``text`` is not their one spelling.

    ``text`` has ``base64_size(num_bytes)`` characters.
    """
    module = _pybase64()
    decoded: memoryview | None
    try:
        if module is None:
            decoded = _decode_chunks(text, num_bytes)
        else:
            decoded = memoryview(module.b64decode_as_bytearray(text, validate=True))
    except ValueError:  # binascii.Error is one
        return None
    if decoded is None or len(decoded) != num_bytes:
        return None
    # the last characters hold bits that no byte has: they must be zeros, as an encoder writes them
    rest = num_bytes % 3 or 3
    return decoded if encode_text(decoded[-rest:]) == bytes(text[-4:]) else None


def _decode_chunks(text: memoryview, num_bytes: int) -> memoryview | None:
    decoded = np.empty(num_bytes, dtype=np.uint8).data
    filled = 0
    for begin in range(0, len(text), _CHUNK_CHARACTERS):
        # characters of no meaning are passed over, so a piece that has some is short
        piece = binascii.a2b_base64(text[begin : begin + _CHUNK_CHARACTERS])
        if len(piece) != min(CHUNK_BYTES, num_bytes - filled):
            return None
        decoded[filled : filled + len(piece)] = piece
        filled += len(piece)
    return decoded
