"""Named arrays between processes, exactly: routes, supports, logprobs, any field of a user's.

    body = encode_json({"choices": [{"text": "…", "routed_experts": routes}]})   # inside JSON
    tree = decode_json(body)
    frame = encode_frame({"routed_experts": routes, "support_ids": ids})         # beside JSON
    fields = decode_frame(frame).fields

Both say of each array its name, dtype, shape and first row, with checksums of that and of its
values. No pickle; nothing is believed, or allocated, before it is verified and within
``WireLimits``.

What cannot be read is one of two errors that name the field: ``TransientWireError`` (short, or a
checksum is wrong: ask again) and ``WireFormatError`` (whole, but not what this version reads).

docs/wire.md has both formats byte by byte. The extra ``wire`` brings ``xxhash`` (a fast checksum of
the values; CRC-32 without), ``pybase64`` and ``orjson``.
"""

from packhorse.packed.wire_format import (
    TransientWireError,
    WireArray,
    WireError,
    WireFormatError,
    WireLimits,
)
from packhorse.packed.wire_frames import (
    FrameJoiner,
    FrameReader,
    WireFrame,
    decode_frame,
    encode_frame,
    frame_parts,
    join_frames,
)
from packhorse.packed.wire_json import decode_json, encode_json

__all__ = [
    "FrameJoiner",
    "FrameReader",
    "TransientWireError",
    "WireArray",
    "WireError",
    "WireFormatError",
    "WireFrame",
    "WireLimits",
    "decode_frame",
    "decode_json",
    "encode_frame",
    "encode_json",
    "frame_parts",
    "join_frames",
]
