"""Both forms of the wire after docs/wire.md, in plain Python; shares no code with the package.

A field is (name, array, start). Arrays go through ``tolist`` and ``struct``, not through NumPy's
buffers.
"""

import base64
import json
import os
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest

try:
    import xxhash
except ImportError:
    if "CI" in os.environ:
        raise
    pytest.skip("xxhash is not installed", allow_module_level=True)

#: dtype by NumPy's name: (its name on the wire, struct's letter)
DTYPES = {
    "bool": ("|b1", "?"), "int8": ("|i1", "b"), "uint8": ("|u1", "B"), "int16": ("<i2", "h"),
    "uint16": ("<u2", "H"), "int32": ("<i4", "i"), "uint32": ("<u4", "I"), "int64": ("<i8", "q"),
    "uint64": ("<u8", "Q"), "float16": ("<f2", "e"), "float32": ("<f4", "f"),
    "float64": ("<f8", "d"),
}  # fmt: skip


class Field(NamedTuple):
    name: str
    array: np.ndarray
    start: int = 0


def values_of(array: np.ndarray) -> bytes:
    """The values one after another, the last axis fastest, little-endian."""
    flat: list[Any] = []

    def walk(given: Any) -> None:
        if isinstance(given, list):
            for item in given:
                walk(item)
        else:
            flat.append(given)

    walk(array.tolist())
    return struct.pack(f"<{len(flat)}{DTYPES[array.dtype.name][1]}", *flat)


def checksum_of(data: bytes, algorithm: str) -> str:
    if algorithm == "xxh3":
        return "xxh3:" + xxhash.xxh3_64_digest(data).hex()
    return f"crc32:{zlib.crc32(data):08x}"


def header_of(field: Field, algorithm: str) -> dict[str, Any]:
    data = values_of(field.array)
    return {
        "name": field.name,
        "dtype": DTYPES[field.array.dtype.name][0],
        "shape": list(field.array.shape),
        "start": field.start,
        "bytes": len(data),
        "sum": checksum_of(data, algorithm),
    }


def spell(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# --- frames ---------------------------------------------------------------------------------------


def frame_of(headers: Any, body: bytes, last: bool = True, **changed: Any) -> bytes:
    """A frame whose checksums are good, whatever the header says."""
    header = spell({"fields": headers}) if isinstance(headers, list) else headers
    header += b" " * (-(32 + len(header)) % 64)
    prefix = struct.pack(
        "<8sHHIQI",
        changed.get("magic", b"\x89PHWIRE\n"),
        changed.get("version", 1),
        changed.get("flags", int(last)),
        changed.get("header_bytes", len(header)),
        changed.get("body_bytes", len(body)),
        zlib.crc32(header),
    )
    return prefix + struct.pack("<I", zlib.crc32(prefix)) + header + body


def body_of(fields: list[Field]) -> bytes:
    body = b""
    for field in fields:
        data = values_of(field.array)
        body += data + bytes(-len(data) % 64)
    return body


def encode_frame(fields: list[Field], last: bool = True, algorithm: str = "xxh3") -> bytes:
    headers = [header_of(field, algorithm) for field in fields]
    return frame_of(headers, body_of(fields), last)


# --- JSON -----------------------------------------------------------------------------------------


def envelope_of(header: dict[str, Any], data: bytes, version: Any = 1) -> bytes:
    spelled = spell({"version": version, **header})
    return (
        b'{"__packhorse__":' + spelled[:-1] + b',"crc32":"%08x"},"data":"' % zlib.crc32(spelled)
        + base64.b64encode(data) + b'"}'
    )  # fmt: skip


def seal(unsealed: bytes, blobs: list[bytes]) -> bytes:
    """``unsealed`` ends before the seal's digits; ``blobs``: its base64 texts, in order."""
    bare, rest = b"", unsealed
    for blob in blobs:
        before, _, rest = rest.partition(b'"data":"' + blob + b'"')
        bare += before + b'"data":""'
    return unsealed + b'%08x"}' % zlib.crc32(bare + rest)


def encode_json(tree: dict[str, Any], algorithm: str = "xxh3") -> bytes:
    """``tree`` holds a ``Field`` in the place of each array; its name is overwritten."""
    blobs: list[bytes] = []

    def text(value: Any, place: str) -> bytes:
        if isinstance(value, Field):
            named = value._replace(name=place)
            data = values_of(value.array)
            blobs.append(base64.b64encode(data))
            return envelope_of(header_of(named, algorithm), data)
        if isinstance(value, dict):
            members = [
                spell_text(key) + b":" + text(item, f"{place}/{token(key)}")
                for key, item in value.items()
            ]
            return b"{" + b",".join(members) + b"}"
        if isinstance(value, list):
            return b"[" + b",".join(text(v, f"{place}/{i}") for i, v in enumerate(value)) + b"]"
        return spell_text(value)

    whole = text(tree, "")
    if not blobs:
        return whole
    return seal(whole[:-1] + b',"__packhorse_seal__":"', blobs)


def spell_text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def token(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
