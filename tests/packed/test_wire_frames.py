"""Frames: byte for byte as documented, exact both ways, and what each inconsistency is refused as.

Oracle: ``wire_model``, written from docs/wire.md.
"""

import itertools
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from packhorse.packed import wire_format
from packhorse.packed.wire import (
    FrameJoiner,
    FrameReader,
    TransientWireError,
    WireArray,
    WireError,
    WireFormatError,
    WireFrame,
    WireLimits,
    decode_frame,
    encode_frame,
    frame_parts,
    join_frames,
)
from tests.packed.wire_model import (
    DTYPES,
    Field,
    body_of,
    frame_of,
    header_of,
    values_of,
)
from tests.packed.wire_model import encode_frame as model_frame

RNG = np.random.default_rng(11)
ROUTES = RNG.integers(0, 128, (5, 4, 2), dtype=np.uint8)


def draw(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = RNG.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    if dtype == "bool":
        return (bits[..., 0] & 1).astype(np.bool_)
    values = np.ascontiguousarray(bits).view(dtype).reshape(shape)
    return np.nan_to_num(values, nan=1.5) if values.dtype.kind == "f" else values


def same(array: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit."""
    return (
        (array.dtype, array.shape) == (other.dtype, other.shape)
        and array.dtype.isnative
        and array.tobytes() == other.tobytes()
    )


def model(array: np.ndarray, name: str = "routes", start: int = 0) -> bytes:
    return model_frame([Field(name, array, start)])


# --- both ways ------------------------------------------------------------------------------------

SHAPES = [(0,), (1,), (7,), (0, 3), (4, 0, 2), (3, 2, 2), (1, 1, 1, 1, 1, 1, 1, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_is_byte_for_byte_what_is_documented(dtype):
    fields = [Field(f"f{i}", draw(dtype, shape), 3 * i) for i, shape in enumerate(SHAPES)]
    given = {field.name: WireArray(field.array, field.start) for field in fields}
    for last, algorithm in itertools.product((True, False), ("xxh3", "crc32")):
        expected = model_frame(fields, last, algorithm)
        assert encode_frame(given, last=last, checksum=algorithm) == expected
        assert b"".join(frame_parts(given, last=last, checksum=algorithm)) == expected
        for owned in (False, True):
            frame = decode_frame(expected, owned=owned)
            assert frame.last is last
            assert list(frame.fields) == [field.name for field in fields]
            for field in fields:
                assert same(frame.fields[field.name].values, field.array)
                assert frame.fields[field.name].start == field.start


@pytest.mark.parametrize(
    "array",
    [
        ROUTES[::2],
        ROUTES[:, ::-1],
        ROUTES.T,
        np.asfortranarray(ROUTES),
        np.broadcast_to(ROUTES[:1], (3, 4, 2)),
        ROUTES.astype(">u2"),
        np.array([1.5, -np.inf, 7e-300], dtype=">f8"),
    ],
    ids=["step", "reversed", "transposed", "fortran", "broadcast", "big-endian", "big floats"],
)
def test_strides_and_byte_order_do_not_travel(array):
    native = array.astype(array.dtype.newbyteorder("="))
    frame = encode_frame({"routes": array})
    assert frame == model(np.ascontiguousarray(native))
    assert same(decode_frame(frame).fields["routes"].values, np.ascontiguousarray(native))


def test_every_bit_of_a_float_arrives_the_payload_of_a_nan_too():
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800000, 0x80000000], dtype=np.uint32)
    arrived = decode_frame(encode_frame({"logprobs": bits.view(np.float32)})).fields["logprobs"]
    assert arrived.values.view(np.uint32).tolist() == bits.tolist()


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=20),
        st.tuples(
            npst.arrays(
                st.sampled_from(sorted(DTYPES)).map(np.dtype),
                npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5),
            ),
            st.integers(0, 2**40),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_any_fields_arrive_as_they_are(fields, owned):
    given = {name: WireArray(array, start) for name, (array, start) in fields.items()}
    frame = decode_frame(encode_frame(given), owned=owned)
    assert list(frame.fields) == list(fields)
    for name, (array, start) in fields.items():
        assert same(frame.fields[name].values, array)
        assert frame.fields[name].start == start


# --- whose memory ---------------------------------------------------------------------------------


def memory_of(array: np.ndarray) -> tuple[int, int]:
    begin = array.__array_interface__["data"][0]  # of a contiguous one
    return begin, begin + array.nbytes


def test_a_view_lies_in_the_frame_and_cannot_be_made_writable():
    frame = bytearray(encode_frame({"routes": ROUTES, "ids": np.arange(9)}))
    begin, end = memory_of(np.frombuffer(frame, np.uint8))
    for field in decode_frame(frame).fields.values():
        low, high = memory_of(field.values)
        assert begin <= low <= high <= end
        with pytest.raises(ValueError, match="read-only"):
            field.values[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            field.values.flags.writeable = True


def test_an_owned_array_is_writable_and_its_own():
    frame = encode_frame({"routes": ROUTES})
    first, second = (decode_frame(frame, owned=True).fields["routes"].values for _ in range(2))
    first[:] = 255
    assert same(second, ROUTES)
    assert same(decode_frame(frame).fields["routes"].values, ROUTES)
    assert torch.from_numpy(second).sum() == ROUTES.sum()


def test_the_parts_of_a_frame_share_the_memory_of_its_arrays():
    array = np.arange(100, dtype=np.int32)
    part = frame_parts({"ids": array})[1]
    assert np.shares_memory(np.frombuffer(part, np.uint8), array)


def test_values_are_aligned_wherever_the_frame_lies():
    frame = encode_frame({"mask": np.ones(3, np.bool_), "ids": np.arange(5)})
    for offset in range(9):
        moved = memoryview(bytes(offset) + frame)[offset:]
        values = decode_frame(moved).fields["ids"].values
        assert values.flags.aligned
        assert not values.flags.writeable
        assert values.tolist() == list(range(5))


# --- what is refused at the sender ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ([ROUTES], TypeError, "encode_frame: fields must be a mapping, got list"),
        ({7: ROUTES}, TypeError, "encode_frame: a field's name must be a string, got 7"),
        ({"a": [1]}, TypeError, "encode_frame: field 'a' must be an array, got list"),
        ({"a": torch.ones(2)}, TypeError, "encode_frame: field 'a' is a tensor; pass its array"),
        ({"a": np.array(["x"])}, TypeError, "encode_frame: field 'a' is <U1, none of bool, int8"),
        ({"a": np.array([1j])}, TypeError, "encode_frame: field 'a' is complex128, none of"),
        ({"a": np.array([None])}, TypeError, "encode_frame: field 'a' is object, none of"),
        ({"a": np.ma.array([1])}, TypeError, "field 'a' must be an array, got MaskedArray"),
        ({"a": np.array(3)}, ValueError, "field 'a' has no rows; pass an array of one row"),
        ({"a": WireArray(ROUTES, -1)}, ValueError, "field 'a': start=-1 is no row"),
        ({"a": WireArray(ROUTES, 2**63 - 5)}, ValueError, "start=9223372036854775803 is no row"),
        ({"a": WireArray(ROUTES, True)}, TypeError, "field 'a': start must be an integer, got Tr"),
        ({"a": np.array([2], np.uint8).view(np.bool_)}, ValueError, "a boolean that is neither 0"),
        ({"a" * 2000: ROUTES}, ValueError, "a field's name has 2000 characters: 'aaaa"),
    ],
)
def test_what_is_no_field_is_refused_before_it_is_sent(fields, error, message):
    for function in (encode_frame, frame_parts):
        with pytest.raises(error) as caught:
            function(fields)
        assert message.removeprefix("encode_frame: ") in str(caught.value)
        assert str(caught.value).startswith(f"{function.__name__}: ")
    with pytest.raises(ValueError, match="checksum must be 'xxh3', 'crc32' or None, got 'md5'"):
        encode_frame({}, checksum="md5")


# --- permanent: wrong behind good checksums -------------------------------------------------------


def changed(**fields) -> list[dict]:
    return [{**header_of(Field("routes", ROUTES), "xxh3"), **fields}]


def without(key: str) -> list[dict]:
    header = changed()[0]
    del header[key]
    return [header]


ZEROS = "xxh3:" + "0" * 16
HOSTILE = {
    "2**60 bytes": (changed(shape=[2**60], bytes=2**60), "are above max_bytes="),
    "2**63 bytes": (changed(shape=[2**63], bytes=2**63), "bytes must be a count, got an integer"),
    "2**63 rows": (changed(shape=[2**63, 0], bytes=0), "a dimension must be a count, got an int"),
    "empty and huge": (changed(shape=[0, 2**62, 2**62], bytes=0), "is past any memory"),
    "wraps": (changed(shape=[2**32, 2**32], bytes=0), "is past any memory"),
    "negative": (changed(shape=[-5, -8]), "a dimension must be a count, got -5"),
    "boolean": (changed(shape=[True, 40]), "a dimension must be a count, got True"),
    "float": (changed(shape=[5.0, 8]), "a dimension must be a count, got 5.0"),
    "text": (changed(shape=["5", 8]), "a dimension must be a count, got '5'"),
    "shape no list": (changed(shape=40), "shape must be a list with the number of rows first"),
    "no dimension": (changed(shape=[], bytes=1), "shape must be a list with the number of rows"),
    "many dimensions": (changed(shape=[1] * 9, bytes=1), "9 dimensions are above max_dims=8"),
    "bytes off by one": (changed(bytes=41), "[5, 4, 2] of uint8 is 40 bytes, not 41"),
    "bytes fewer": (changed(bytes=39), "[5, 4, 2] of uint8 is 40 bytes, not 39"),
    "bytes null": (changed(bytes=None), "bytes must be a count, got None"),
    "unknown dtype": (changed(dtype="|O"), "unknown dtype '|O'"),
    "big-endian dtype": (changed(dtype=">u2"), "unknown dtype '>u2'"),
    "no dtype": (changed(dtype=3), "unknown dtype '3'"),
    "negative start": (changed(start=-1), "start must be a count, got -1"),
    "start past int64": (changed(start=2**63 - 3), "no row has the number 9223372036854775805 +"),
    "unknown checksum": (changed(sum="md5:00"), "unknown checksum 'md5:00'"),
    "short checksum": (changed(sum="xxh3:00"), "unknown checksum 'xxh3:00'"),
    "upper checksum": (changed(sum=ZEROS[:-1] + "A"), "unknown checksum"),
    "checksum no text": (changed(sum=7), "unknown checksum 7"),
    "name no text": (changed(name=["x"]), "a field's name must be a short string"),
    "long name": (changed(name="x" * 2000), "a field's name must be a short string"),
    "missing": (without("start"), "must hold name, dtype, shape, start, bytes, sum, in this order"),
    "more": (changed(offset=0), "must hold name, dtype, shape, start, bytes, sum, in this order"),
    "other order": (
        [dict(reversed(changed()[0].items()))],
        "must hold name, dtype, shape, start, bytes, sum, in this order",
    ),
    "no field": ([[]], "a field's header must hold"),
    "twice": (changed() * 2, "it is there twice"),
    "many": (changed() * 1025, "1025 fields are above max_fields=1024"),
    "no list": (b'{"fields":{}}', "the header's fields must be a list"),
    "other key": (b'{"field":[]}', "the header must hold the fields, and nothing else"),
    "no object": (b"[]", "the header must hold the fields, and nothing else"),
    "no JSON": (b"\xff\xfe", "the header is not JSON"),
    "nested": (b"[" * 20000, "the header is not JSON"),
    "digits": (b'{"fields":' + b"9" * 5000 + b"}", "the header is not JSON"),
    "spaces": (b'{"fields": []}', "the header is not spelled as this version writes it"),
    "repeated key": (b'{"fields":[],"fields":[]}', "the header is not spelled as this version"),
    "body": (changed(shape=[5], bytes=5) + changed(name="b"), "do not make a body of 64 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_permanent_and_allocates_nothing(case):
    headers, message = HOSTILE[case]
    frame = frame_of(headers, body_of([Field("routes", ROUTES)]))
    tracemalloc.start()
    try:
        with pytest.raises(WireFormatError) as caught:
            decode_frame(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("decode_frame: ")
    assert message in str(caught.value)
    assert peak < 100_000 + 30 * len(frame)  # the header as Python has it
    if message.startswith(("[", "start", "unknown dtype", "bytes", "it is")):
        assert caught.value.field == "routes"
        assert "field 'routes': " in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ({"magic": b"\x93NUMPY\x01\x00"}, r"a frame begins with b'\x89PHWIRE\n', not b'\x93NUMPY"),
        ({"version": 2}, "version 2 of the format; this reads version 1"),
        ({"flags": 3}, "unknown flags 0x3"),
        ({"header_bytes": 2**32 - 1}, "a header of 4294967295 bytes is above max_header_bytes="),
        ({"body_bytes": 2**64 - 1}, "a body of 18446744073709551615 bytes; max_bytes=2147483648"),
        ({"body_bytes": 128}, "the fields do not make a body of 128 bytes"),
    ],
)
def test_a_prefix_of_another_kind_is_permanent(prefix, message):
    fields = [Field("routes", ROUTES)]
    frame = frame_of([header_of(fields[0], "xxh3")], body_of(fields), **prefix)
    with pytest.raises(WireFormatError) as caught:
        decode_frame(frame)
    assert message in str(caught.value)


def test_what_follows_a_frame_is_permanent():
    with pytest.raises(WireFormatError, match="decode_frame: 3 bytes follow the frame"):
        decode_frame(model(ROUTES) + b"abc")


def test_no_rows_of_an_enormous_row_are_legal():
    header = changed(shape=[0, 2**62], bytes=0, sum="crc32:00000000")
    assert decode_frame(frame_of(header, b"")).fields["routes"].values.shape == (0, 2**62)


def test_a_boolean_that_is_neither_is_permanent():
    twos = np.array([0, 1, 2], np.uint8)
    header = {**header_of(Field("mask", twos), "xxh3"), "dtype": "|b1"}
    for owned in (False, True):
        with pytest.raises(WireFormatError, match="field 'mask': a boolean is 2"):
            decode_frame(frame_of([header], body_of([Field("mask", twos)])), owned=owned)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (WireLimits(max_bytes=39), "field 'a': 40 bytes are above max_bytes=39"),
        (WireLimits(max_bytes=79), "80 bytes in all are above max_bytes=79"),
        (WireLimits(max_fields=1), "2 fields are above max_fields=1"),
        (WireLimits(max_dims=2), "field 'a': 3 dimensions are above max_dims=2"),
        (WireLimits(max_header_bytes=9), "is above max_header_bytes=9"),
        (WireLimits(dtypes=["int8", "bool"]), "field 'a': uint8 is none of int8, bool"),
    ],
)
def test_a_limit_is_what_was_asked(limits, message):
    frame = encode_frame({"a": ROUTES, "b": ROUTES})
    with pytest.raises(WireFormatError) as caught:
        decode_frame(frame, limits=limits)
    assert message in str(caught.value)
    with pytest.raises(WireFormatError) as caught:
        FrameReader(limits=limits).feed(frame)
    assert message in str(caught.value)


def test_limits_are_counts_and_known_dtypes():
    with pytest.raises(ValueError, match="WireLimits: max_bytes must be a count, got -1"):
        WireLimits(max_bytes=-1)
    with pytest.raises(ValueError, match=r"WireLimits: dtypes may be bool, .*, got 'object'"):
        WireLimits(dtypes=["object"])


def test_only_bytes_are_decoded():
    for wrong in ("text", 7, None, memoryview(b"abcd")[::2]):
        with pytest.raises(TypeError, match="decode_frame: needs contiguous bytes, got"):
            decode_frame(wrong)


# --- transient: short or damaged ------------------------------------------------------------------


def test_a_frame_cut_anywhere_is_transient_and_names_the_field():
    fields = [Field("routes", ROUTES), Field("ids", np.arange(30))]
    frame = model_frame(fields)
    head = len(frame) - len(body_of(fields))
    for length in range(len(frame)):
        with pytest.raises(TransientWireError, match="cut short") as caught:
            decode_frame(frame[:length])
        expected = None if length < head else "routes" if length < head + 40 else "ids"
        if expected is None or length < head + 64 + 240:
            assert caught.value.field == expected
            assert (f"field {expected!r}: " in str(caught.value)) == (expected is not None)


def test_each_checksum_names_what_it_covers():
    frame = bytearray(model(ROUTES))
    for byte, message in ((3, "its prefix is wrong"), (40, "of the header is wrong")):
        bad = bytearray(frame)
        bad[byte] ^= 1
        with pytest.raises(TransientWireError, match=message):
            decode_frame(bad)
    bad = bytearray(frame)
    bad[-40] ^= 1
    with pytest.raises(TransientWireError, match="field 'routes': the checksum of its 40 bytes"):
        decode_frame(bad)
    bad = bytearray(frame)
    bad[-1] = 1
    with pytest.raises(TransientWireError, match=r"field 'routes': what follows it .* not zeros"):
        decode_frame(bad, owned=True)


# --- without the optional package -----------------------------------------------------------------


@pytest.fixture
def no_xxhash(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    wire_format._xxh3.cache_clear()
    yield
    wire_format._xxh3.cache_clear()


def test_without_xxhash_the_checksum_is_crc32_and_none_is_passed_over(no_xxhash):
    frame = encode_frame({"routes": ROUTES})
    assert frame == model_frame([Field("routes", ROUTES)], algorithm="crc32")
    assert same(decode_frame(frame).fields["routes"].values, ROUTES)
    with pytest.raises(ImportError, match=r"decode_frame: .* pip install 'packhorse\[wire\]'"):
        decode_frame(model(ROUTES))
    with pytest.raises(ImportError, match="encode_frame: the checksum xxh3 needs"):
        encode_frame({"routes": ROUTES}, checksum="xxh3")


# --- streams --------------------------------------------------------------------------------------


def chunks(array: np.ndarray, bounds: list[int], name: str = "routes") -> list[bytes]:
    pairs = list(itertools.pairwise(bounds))
    return [encode_frame({name: WireArray(array[a:b], a)}, last=b == bounds[-1]) for a, b in pairs]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_a_stream_in_pieces_of_any_size_is_its_frames(sizes):
    frames = [encode_frame({}, last=False), *chunks(ROUTES, [0, 2, 2, 5])]
    stream, reader, got = b"".join(frames), FrameReader(), []
    for size in itertools.cycle(sizes):
        got += reader.feed(stream[:size])
        stream = stream[size:]
        if not stream:
            break
    reader.close()
    assert [frame.last for frame in got] == [False, False, False, True]
    joined = join_frames(got)
    assert same(joined["routes"].values, ROUTES)
    got[1].fields["routes"].values[:] = 7  # its own memory


def test_a_stream_that_ends_inside_a_frame_is_transient():
    frame = model(ROUTES)
    for length in range(1, len(frame)):
        reader = FrameReader()
        assert reader.feed(frame[:length]) == []
        with pytest.raises(TransientWireError) as caught:
            reader.close()
        into_body = length - (len(frame) - 64)
        assert caught.value.field == ("routes" if 0 <= into_body < 40 else None)
    FrameReader().close()


def test_a_reader_that_failed_stays_failed():
    reader = FrameReader()
    with pytest.raises(WireFormatError, match="version 9"):
        reader.feed(frame_of([], b"", version=9))
    for call in (lambda: reader.feed(b""), reader.close):
        with pytest.raises(WireFormatError, match="version 9"):
            call()


def test_a_hostile_stream_is_refused_before_its_memory_is_taken():
    frame = frame_of(changed(shape=[2**30], bytes=2**30), b"", body_bytes=2**30)
    tracemalloc.start()
    try:
        with pytest.raises(WireFormatError, match="a body of 1073741824 bytes; max_"):
            FrameReader(limits=WireLimits(max_bytes=2**29)).feed(frame)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def frame(start: int, array: np.ndarray = ROUTES, last: bool = False) -> WireFrame:
    return WireFrame({"routes": WireArray(array, start)}, last)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (frame(6), "field 'routes': rows 5 to 5 are missing"),
        (frame(9), "field 'routes': rows 5 to 8 are missing"),
        (frame(0), "field 'routes': a chunk starts at row 0, but 5 is the next"),
        (frame(4), "field 'routes': a chunk starts at row 4, but 5 is the next"),
        (frame(5, ROUTES.astype(np.int16)), "field 'routes': uint8 becomes int16 at row 5"),
        (frame(5, ROUTES[:, :3]), r"field 'routes': rows of \[4, 2\] become \[3, 2\] at row 5"),
        (frame(5, np.repeat(ROUTES, 9, axis=0)), "400 bytes in all are above max_bytes=200"),
    ],
)
def test_a_chunk_that_does_not_follow_is_permanent_and_not_taken(second, message):
    joiner = FrameJoiner(limits=WireLimits(max_bytes=200))
    joiner.add(frame(0))
    with pytest.raises(WireFormatError, match=message):
        joiner.add(second)
    joiner.add(frame(5, last=True))
    assert same(joiner.finish()["routes"].values, np.concatenate([ROUTES, ROUTES]))


def test_the_last_frame_ends_the_stream():
    with pytest.raises(TransientWireError, match=r"FrameJoiner.finish: the stream ends before"):
        join_frames([frame(0)])
    with pytest.raises(TransientWireError, match="the stream ends before"):
        join_frames([])
    with pytest.raises(WireFormatError, match="a frame follows the last one"):
        join_frames([frame(0, last=True), frame(5, last=True)])
    with pytest.raises(TypeError, match=r"FrameJoiner\.add: frame must be a WireFrame, got dict"):
        join_frames([{}])


def test_a_field_of_some_frames_joins_from_its_own_first_row():
    """Turn 2 asks for the rows it lacks; the mask comes with each token, the routes at the end."""
    mask = np.arange(6, dtype=np.int32).reshape(3, 2)
    frames = [
        WireFrame({"mask": WireArray(mask[:1], 0)}, False),
        WireFrame({"mask": WireArray(mask[1:1], 1)}, False),
        WireFrame({"mask": WireArray(mask[1:], 1), "routes": WireArray(ROUTES, 40)}, True),
    ]
    joined = join_frames(frames)
    assert same(joined["mask"].values, mask)
    assert joined["routes"].start == 40
    assert joined["routes"].values is ROUTES


def test_too_many_fields_of_a_stream_are_permanent():
    joiner = FrameJoiner(limits=WireLimits(max_fields=1))
    joiner.add(frame(0))
    with pytest.raises(WireFormatError, match="more fields than max_fields=1"):
        joiner.add(WireFrame({"other": WireArray(ROUTES)}, True))


def test_both_errors_are_wire_errors_and_value_errors_and_pickle():
    import pickle

    assert issubclass(TransientWireError, WireError)
    assert issubclass(WireFormatError, WireError)
    assert not issubclass(WireFormatError, TransientWireError)
    assert issubclass(WireError, ValueError)
    with pytest.raises(TransientWireError) as caught:
        decode_frame(model(ROUTES)[:-60])
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is TransientWireError
    assert (str(again), again.field) == (str(caught.value), "routes")


def test_the_model_spells_values_as_memory_has_them():
    assert values_of(np.array([[1, 2], [258, 4]], dtype=np.uint16)) == b"\1\0\2\0\2\1\4\0"
