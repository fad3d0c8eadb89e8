"""10,000 corrupted messages: each the right error, none a wrong array, none an allocation of note.

What is right follows from how the message was made, not from reading it: whatever changed after the
checksums were taken is transient; what was changed before them, or follows a whole frame, is
permanent.
"""

import base64
import copy
import random
import re
import tracemalloc
from functools import partial

import numpy as np
import pytest

from packhorse.packed.wire import (
    FrameReader,
    TransientWireError,
    WireError,
    WireFormatError,
    decode_frame,
    decode_json,
)
from tests.packed.wire_model import (
    Field,
    body_of,
    encode_frame,
    encode_json,
    envelope_of,
    frame_of,
    header_of,
    seal,
    values_of,
)

CASES = 2_500  # of each of the four tests
PEAK_BYTES = 200_000  # of messages of 1 to 2 KB
RNG = np.random.default_rng(13)
FIELDS = [
    Field("routed_experts", RNG.integers(0, 128, (6, 4, 2), dtype=np.uint8)),
    Field("support_ids", RNG.integers(0, 2**17, 23, dtype=np.int32), 4),
    Field("logprobs", np.array([-0.5, np.nan, -np.inf], np.float32)),
    Field("mask", np.array([True, False, True])),
    Field("empty", np.zeros((0, 3), np.int16), 9),
]
FRAME = encode_frame(FIELDS)
BODY = encode_json(
    {
        "choices": [
            {"text": 'a "b" {', "routed_experts": FIELDS[0], "support": {"ids": FIELDS[1]}},
            {"routed_experts": FIELDS[0]._replace(array=FIELDS[0].array + 1), "n": [1.5, None]},
        ],
        "logprobs": FIELDS[2],
        "empty": FIELDS[4],
    }
)
#: the fields of a body by their places, and the values of each; all headers by name
PLACED = [
    Field("/a", FIELDS[0].array), Field("/b/0", FIELDS[0].array[::-1].copy()),
    Field("/c", FIELDS[1].array),
]  # fmt: skip
PLACED_DATA = [values_of(field.array) for field in PLACED]
HEADERS = {field.name: header_of(field, "crc32") for field in [*FIELDS, *PLACED]}
FRAME_BODY = body_of(FIELDS)
NASTY = [
    -1, 0, 1, 39, 2**31, 2**60, 2**63 - 1, 2**63, 2**64, 10**40, True, False, None, 1.5, 48.0, "",
    "48", "|O", ">u2", "<f16", "<M8[s]", [], {}, [2**62, 2**62], [0, 2**63], [-6, -4, 2],
    [6, True, 8], [6, 4, 2.0], [[6]], [1] * 40, [0] * 3, [2**60], "xxh3:", "md5:" + "0" * 32,
    "crc32:0000000G",
]  # fmt: skip


def corrupted(message: bytes, rng: random.Random) -> tuple[bytes, type[WireError]]:
    """The message damaged on its way, and what it must be refused as."""
    bad = bytearray(message)
    place = rng.randrange(len(bad))
    kind = rng.randrange(8)
    if kind == 0:  # one bit
        bad[place] ^= 1 << rng.randrange(8)
    elif kind == 1:  # one byte
        bad[place] = (bad[place] + rng.randrange(1, 256)) % 256
    elif kind == 2:  # a burst
        for i in range(place, min(place + rng.randrange(2, 40), len(bad))):
            bad[i] = rng.randrange(256)
    elif kind == 3:  # cut
        del bad[place:]
    elif kind == 4:  # a piece is missing
        del bad[place : place + rng.randrange(1, 80)]
    elif kind == 5:  # a piece comes twice
        bad[place:place] = bad[max(0, place - rng.randrange(1, 80)) : place]
    elif kind == 6:  # two pieces change places
        size = rng.randrange(1, 30)
        other = rng.randrange(len(bad))
        first, second = bad[place : place + size], bad[other : other + size]
        if len(first) == len(second) == size and abs(place - other) >= size:
            bad[place : place + size], bad[other : other + size] = second, first
    else:  # something is put in
        bad[place:place] = rng.randbytes(rng.randrange(1, 20))
    if bytes(bad) == message:
        bad[place] ^= 255
    followed = bytes(bad[: len(message)]) == message
    return bytes(bad), WireFormatError if followed and message is FRAME else TransientWireError


def check_refused(decode, message: bytes, expected: type[WireError]) -> WireError:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        decode(message)
    except WireError as error:
        refused = error
    else:
        pytest.fail(f"was decoded: {message!r}")
    assert tracemalloc.get_traced_memory()[1] - before < PEAK_BYTES, message
    assert type(refused) is expected, (str(refused), message)
    assert refused.field is None or f"field {refused.field!r}: " in str(refused)
    return refused


@pytest.fixture(autouse=True)
def _traced():
    decode_frame(FRAME)
    decode_json(BODY)
    tracemalloc.start()
    yield
    tracemalloc.stop()


def read_stream(message: bytes) -> None:
    reader = FrameReader()
    reader.feed(message)
    reader.close()


def test_a_damaged_frame_is_transient():
    rng = random.Random(1)
    for _ in range(CASES):
        bad, expected = corrupted(FRAME, rng)
        ways = [decode_frame, partial(decode_frame, owned=True)]
        if expected is TransientWireError:
            ways.append(read_stream)  # to which what follows is the next frame
        check_refused(rng.choice(ways), bad, expected)


def test_a_damaged_body_is_transient():
    rng = random.Random(2)
    for _ in range(CASES):
        check_refused(decode_json, *corrupted(BODY, rng))


def hostile(field: Field, rng: random.Random, in_frame: bool) -> dict:
    """A header with one member that cannot be, or cannot be with the others."""
    header = copy.deepcopy(HEADERS[field.name])
    while True:
        key = rng.choice([*header, "more"])
        bad = {**header, key: rng.choice(NASTY)}
        if rng.random() < 0.1:
            del bad[rng.choice(list(header))]
        if len(bad) != len(header) or key not in ("name", "start"):
            if repr(bad) != repr(header):
                return bad
            continue
        # another first row is legal, and in a frame another name
        named = isinstance(bad["name"], str) and (in_frame or bad["name"] == header["name"])
        counts = type(bad["start"]) is int and 0 <= bad["start"] < 2**63 - header["shape"][0]
        if not (named and counts):
            return bad


def test_a_hostile_frame_behind_good_checksums_is_permanent():
    rng = random.Random(3)
    for _ in range(CASES):
        headers = [copy.deepcopy(HEADERS[field.name]) for field in FIELDS]
        spoiled = rng.randrange(4)  # not the empty one, to which most shapes are legal
        kind = rng.random()
        if kind < 0.6:
            headers[spoiled] = hostile(FIELDS[spoiled], rng, in_frame=True)
            bad = frame_of(headers, FRAME_BODY)
        elif kind < 0.8:  # the same bytes as other fields
            headers[spoiled]["shape"][0] += rng.choice([-1, 1, 2**40])
            bad = frame_of(headers, FRAME_BODY)
        else:
            wrong = rng.choice(
                [
                    {"magic": rng.randbytes(8)}, {"version": rng.randrange(2, 2**16)},
                    {"flags": rng.randrange(2, 2**16)}, {"body_bytes": rng.randrange(2**64)},
                    {"header_bytes": rng.randrange(2**18 + 1, 2**32)},
                ]
            )  # fmt: skip
            bad = frame_of(headers, FRAME_BODY, **wrong)
        check_refused(rng.choice([decode_frame, read_stream]), bad, WireFormatError)


def test_a_hostile_body_behind_good_checksums_is_permanent():
    rng = random.Random(4)
    for _ in range(CASES):
        headers = [copy.deepcopy(HEADERS[field.name]) for field in PLACED]
        data = list(PLACED_DATA)
        spoiled, version = rng.randrange(3), 1
        kind = rng.random()
        if kind < 0.7:
            headers[spoiled] = hostile(PLACED[spoiled], rng, in_frame=False)
        elif kind < 0.9:  # whole envelopes change places
            other = (spoiled + rng.randrange(1, 3)) % 3
            for given in (headers, data):
                given[spoiled], given[other] = given[other], given[spoiled]
        else:
            version = rng.choice([given for given in NASTY if given != 1 or given is True])
        envelopes = [
            envelope_of(header, blob, version if i == spoiled else 1)
            for i, (header, blob) in enumerate(zip(headers, data, strict=True))
        ]
        unsealed = b'{"a":%s,"b":[%s,7],"c":%s,"__packhorse_seal__":"' % tuple(envelopes)
        bad = seal(unsealed, [base64.b64encode(blob) for blob in data])
        check_refused(decode_json, bad, WireFormatError)


def test_blobs_that_change_places_are_transient_and_name_the_field():
    """Two fields of one size: only the checksums tell."""
    first, second = re.findall(rb'"data":"([^"]{64})"', BODY)[:2]
    swapped = BODY.replace(first, b"?" * 64).replace(second, first).replace(b"?" * 64, second)
    refused = check_refused(decode_json, swapped, TransientWireError)
    assert refused.field == "/choices/0/routed_experts"
    same_size = [FIELDS[0], FIELDS[0]._replace(name="more", array=FIELDS[0].array[::-1].copy())]
    frame = encode_frame(same_size)
    head, body = frame[: -len(body_of(same_size))], body_of(same_size)
    swapped = head + body[64:] + body[:64]
    assert check_refused(decode_frame, swapped, TransientWireError).field == "routed_experts"
