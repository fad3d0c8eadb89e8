"""Coverage-guided fuzzing of both decoders of the wire, and of what reads and packs a server's
replies (``fuzz_http``), by atheris (libFuzzer).

    tests/fuzz/run.sh [SECONDS]    60 by default; installs atheris where it is not there

An input is a message as it arrives, or one whose checksums are put right first: random bytes never
pass those, and what lies behind them is what a hostile sender reaches. Found is whatever is no
``WireError``, an error whose text does not name its field, a message that is decoded otherwise when
it is encoded again, or more memory than the limits allow. libFuzzer adds crashes and hangs.
"""

import base64
import json
import re
import struct
import sys
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.fuzz_http import PACKED, http_seeds, try_http

LIMIT_BYTES = 1 << 16
PEAK_BYTES = 4 << 20  # a header and a body as Python has them, at most 30 times 64 KiB

_HEADER = re.compile(rb'\{"__packhorse__":(\{.*?),"crc32":"', re.DOTALL)
_SUM = re.compile(rb'"sum":"[^"]*"')
_DATA = re.compile(rb'"\},"data":"([^"]*)"\}')


# --- checksums put right --------------------------------------------------------------------------


def repaired_frame(message: bytes) -> bytes:
    """The message with the checksums of its prefix and its header, and crc32 sums of its fields."""
    if len(message) < 32:
        return message
    size = struct.unpack_from("<I", message, 12)[0]
    header, body = message[32 : 32 + size], message[32 + size :]
    try:
        parsed = json.loads(header)
        begin = 0
        for field in parsed["fields"]:
            data = body[begin : begin + field["bytes"]]
            field["sum"] = f"crc32:{zlib.crc32(data):08x}"
            begin += -(-field["bytes"] // 64) * 64
        spelled = json.dumps(parsed, separators=(",", ":")).encode()
        if message[9]:  # else the header stays as it is spelled
            spelled += b" " * (-(32 + len(spelled)) % 64)
            header = spelled
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    prefix = message[:12] + struct.pack("<I", len(header)) + message[16:24]
    prefix += struct.pack("<I", zlib.crc32(header))
    return prefix + struct.pack("<I", zlib.crc32(prefix)) + header + body


def repaired_body(message: bytes) -> bytes:
    """The message with the checksums of its headers, crc32 sums of its fields, and its seal."""
    parts: list[bytes] = []
    seal = position = 0
    for found in _HEADER.finditer(message):
        if found.start() < position:
            continue
        data = _DATA.search(message, found.end())
        if data is None:
            break
        try:
            value = base64.b64decode(data[1])
        except ValueError:
            value = b""
        checksum = b'"sum":"crc32:%08x"' % zlib.crc32(value)
        header = _SUM.sub(checksum, found[1]) + b"}"
        opened = message[position : found.start()] + b'{"__packhorse__":' + header[:-1]
        opened += b',"crc32":"%08x"},"data":"' % zlib.crc32(header)
        seal = zlib.crc32(opened, seal)
        parts += [opened, data[1]]
        position = data.end(1)
    rest = message[position:]
    end = rest.rfind(b'"__packhorse_seal__":"')
    if end >= 0:
        rest = rest[: end + 22]
        rest += b'%08x"}' % zlib.crc32(rest, seal)
    return b"".join([*parts, rest])


# --- one input ------------------------------------------------------------------------------------


def try_one(data: bytes) -> None:
    from packhorse.packed.wire import (
        FrameReader,
        WireError,
        WireLimits,
        decode_frame,
        decode_json,
        encode_frame,
        encode_json,
    )

    if not data:
        return
    limits = WireLimits(
        max_bytes=LIMIT_BYTES, max_fields=16, max_header_bytes=1 << 14, max_json_bytes=LIMIT_BYTES
    )
    kind, message = data[0], data[1:]
    if kind & 16:
        try_traced(lambda: try_http((kind >> 5) % 3, repaired_reply(kind, message)), len(message))
        return
    in_json, repaired = bool(kind & 1), bool(kind & 2)
    if repaired:
        message = repaired_body(message) if in_json else repaired_frame(message)
    if not tracemalloc.is_tracing():  # once: starting and stopping it loses memory
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        if in_json:
            decoded = decode_json(message, limits=limits)
        elif kind & 4:
            reader = FrameReader(limits=limits)
            frames = reader.feed(message[:40]) + reader.feed(message[40:])
            reader.close()
            decoded = frames[0] if frames else None
        else:
            decoded = decode_frame(message, owned=bool(kind & 8), limits=limits)
    except WireError as error:
        check_error(error)
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak < PEAK_BYTES + 30 * len(message), peak
    if in_json:
        if isinstance(decoded, dict) and b"__packhorse_seal__" in message:
            check_alike(decode_json(encode_json(decoded)), decoded)
    elif decoded is not None:
        again = decode_frame(encode_frame(decoded.fields, last=decoded.last))
        assert again.last == decoded.last
        check_alike(again.fields, decoded.fields)


def repaired_reply(kind: int, message: bytes) -> bytes:
    """One of packed fields, with its checksums right where that is asked."""
    if kind & 2 and (kind >> 5) % 3 == PACKED:
        return repaired_body(message) if kind & 1 else repaired_frame(message)
    return message


def try_traced(call: Callable[[], None], num_bytes: int) -> None:
    """The call, and no more memory than a few parsed copies of its input."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    call()
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < PEAK_BYTES + 100 * num_bytes, peak


def check_error(error: Any) -> None:
    assert type(error).__name__ in ("TransientWireError", "WireFormatError"), error
    assert error.field is None or f"field {error.field!r}: " in str(error), error


def check_alike(again: object, decoded: object) -> None:
    from packhorse.packed.wire import WireArray

    assert type(again) is type(decoded)
    if isinstance(decoded, WireArray):
        assert isinstance(again, WireArray)
        values, other = again.values, decoded.values
        assert (values.dtype, values.shape, again.start) == (
            other.dtype, other.shape, decoded.start
        )  # fmt: skip
        assert values.tobytes() == other.tobytes()
    elif isinstance(decoded, dict):
        assert isinstance(again, dict)
        assert list(again) == list(decoded)
        for key, value in decoded.items():
            check_alike(again[key], value)
    elif isinstance(decoded, list):
        assert isinstance(again, list)
        assert len(again) == len(decoded)
        for one, other_one in zip(again, decoded, strict=True):
            check_alike(one, other_one)
    else:
        assert again == decoded


def seeds() -> list[bytes]:
    """Whole messages to begin with, in every way they are read."""
    from packhorse.packed.wire import WireArray, encode_frame, encode_json

    routes = np.arange(24, dtype=np.uint8).reshape(3, 4, 2)
    ids = WireArray(np.arange(5, dtype=np.int32), 2)
    mask = np.array([True, False])
    fields = {"routes": routes, "ids": ids, "mask": mask, "none": np.zeros((0, 2), np.float32)}
    bodies = [
        encode_json({"choices": [{"routes": routes, "n": None}, {"a/b": {"ids": ids}}], "m": mask}),
        encode_json({"text": "a \\ b", "logprobs": np.array([-0.5, np.nan])}, checksum="crc32"),
        b'{"error":{"message":"no","code":404}}',
    ]
    frames = [
        encode_frame(fields), encode_frame(fields, last=False, checksum="crc32"),
        encode_frame({"ids": ids}) + encode_frame({}),
    ]  # fmt: skip
    made = [bytes([kind]) + body for kind in (1, 3) for body in bodies]
    made += [bytes([kind]) + frame for kind in (0, 2, 4, 6, 10) for frame in frames]
    for kind, message in http_seeds():
        ways = (0,)
        if kind == PACKED:
            ways = (0, 2) if message.startswith(b"\x89") else (1, 3)
        made += [bytes([16 | kind << 5 | way]) + message for way in ways]
    return made


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["packhorse.packed", "packhorse.replay"]):
        import packhorse.packed.wire
        import packhorse.replay.middleware
        import packhorse.replay.vllm_http
    assert packhorse.packed.wire

    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(seeds()):
            Path(folder, f"seed{i}").write_bytes(seed)
        atheris.Setup([*sys.argv, folder, "-max_len=8192", "-timeout=20"], try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
