"""Arrays inside JSON: as documented, exact both ways, no blob ever parsed, and each refusal.

Oracle: ``wire_model``, written from docs/wire.md; the standard library's ``json``.
"""

import base64
import collections
import ctypes
import enum
import json
import re
import sys
import tracemalloc
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from packhorse.packed import wire_base64, wire_format, wire_json
from packhorse.packed.wire import (
    TransientWireError,
    WireArray,
    WireError,
    WireFormatError,
    WireLimits,
    decode_json,
    encode_json,
)
from tests.packed.wire_model import DTYPES, Field, envelope_of, header_of, seal, values_of
from tests.packed.wire_model import encode_json as model_json

RNG = np.random.default_rng(12)
ROUTES = RNG.integers(0, 128, (5, 4, 2), dtype=np.uint8)
LOGPROBS = np.array([-0.5, np.nan, -np.inf, -9999.0], dtype=np.float32)
#: what the format's own text looks like, as a model may well generate it
MARKED = '{"__packhorse__":{"version":1,"name":"/x"},"data":"AA"}, "__packhorse_seal__":"00000000"}'


@pytest.fixture(params=["packages", "hidden libbase64", "standard library"])
def packages(request, monkeypatch):
    """All three packages; a pybase64 that hides libbase64's functions; none of the packages."""
    caches = (
        wire_format._xxh3, wire_base64._pybase64, wire_base64._libbase64, wire_json._orjson
    )  # fmt: skip
    if request.param == "standard library":
        for name in ("xxhash", "pybase64", "orjson"):
            monkeypatch.setitem(sys.modules, name, None)
    if request.param == "hidden libbase64":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    for cached in caches:
        cached.cache_clear()
    yield request.param != "standard library"
    for cached in caches:
        cached.cache_clear()


def same(array: np.ndarray, other: np.ndarray) -> bool:
    return (array.dtype, array.shape, array.tobytes()) == (
        other.dtype,
        other.shape,
        other.tobytes(),
    )


def equal(tree, model) -> bool:
    """A decoded tree and one of the model, which holds a ``Field`` for each array."""
    if isinstance(model, Field):
        return (
            isinstance(tree, WireArray)
            and same(tree.values, model.array)
            and tree.start == model.start
            and tree.values.flags.writeable
            and tree.values.flags.aligned
        )
    if isinstance(model, dict):
        return list(tree) == list(model) and all(equal(tree[key], model[key]) for key in model)
    if isinstance(model, list):
        return len(tree) == len(model) and all(map(equal, tree, model))
    return tree == model and type(tree) is type(model)


def to_send(model):
    if isinstance(model, Field):
        return WireArray(model.array, model.start) if model.start else model.array
    if isinstance(model, dict):
        return {key: to_send(item) for key, item in model.items()}
    return [to_send(item) for item in model] if isinstance(model, list) else model


REPLY = {
    "id": "cmpl-1",
    "choices": [
        {"index": 0, "text": MARKED, "routed_experts": Field("", ROUTES), "sampling_mask": None},
        {"index": 1, "text": "__packhorse__", "routed_experts": Field("", ROUTES[2:], 2),
         "logprobs": {"sampled": Field("", LOGPROBS), "top": None}, "token_ids": [1, 2, 3]},
        {"index": 2, "routed_experts": None, "rows/~": [[Field("", np.zeros((0, 7), np.int32))]]},
    ],
    "usage": {"prompt_tokens": 7, "é": "日本", "ratio": 0.1},
}  # fmt: skip


class TokenSpan(NamedTuple):
    start: int
    stop: int


# --- both ways ------------------------------------------------------------------------------------


def test_a_body_is_byte_for_byte_what_is_documented(packages):
    for algorithm in ("xxh3", "crc32") if packages else ("crc32",):
        body = model_json(REPLY, algorithm)
        assert encode_json(to_send(REPLY), checksum=algorithm) == body
        for received in (body, bytearray(body), memoryview(b"123" + body)[3:]):
            assert equal(decode_json(received), REPLY)


def test_any_parser_reads_the_body_and_finds_the_values():
    tree = json.loads(encode_json(to_send(REPLY)))
    envelope = tree["choices"][0]["routed_experts"]
    assert base64.b64decode(envelope["data"]) == ROUTES.tobytes()
    assert envelope["__packhorse__"]["shape"] == [5, 4, 2]
    assert tree["choices"][0]["text"] == MARKED


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_length_of_base64_arrives(dtype, packages):
    arrays = [np.arange(size).astype(dtype) for size in range(9)]
    arrays.append(np.arange(6).astype(dtype).reshape(2, 3)[:, ::-1])
    tree = decode_json(encode_json({"all": arrays}))
    for got, array in zip(tree["all"], arrays, strict=True):
        assert same(got.values, np.ascontiguousarray(array))


def test_blobs_of_many_chunks_arrive(packages):
    size = wire_base64.CHUNK_BYTES
    for num_bytes in (size - 1, size, size + 1, 2 * size + 2):
        array = RNG.integers(0, 256, num_bytes, dtype=np.uint8)
        body = encode_json({"a": array})
        assert base64.b64encode(array.tobytes()) in body
        assert same(decode_json(body)["a"].values, array)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False), st.just(MARKED),
)  # fmt: skip
FIELDS = st.builds(
    Field,
    st.just(""),
    npst.arrays(
        st.sampled_from(sorted(DTYPES)).map(np.dtype),
        npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
    ),
    st.integers(0, 9),
)
TREES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        SCALARS | FIELDS,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(max_examples=80)
@given(TREES)
def test_any_body_arrives_as_it_is(tree):
    body = encode_json(to_send(tree))
    assert equal(decode_json(body), tree)


def test_a_body_without_arrays_is_plain_json(packages):
    plain = {"error": {"message": MARKED, "code": 404}, "routed_experts": None, "e": {}}
    assert encode_json(plain) == json.dumps(plain, separators=(",", ":")).encode()
    for text in (json.dumps(plain), json.dumps(plain, indent=2), "[1, null]", "7"):
        assert decode_json(text.encode()) == json.loads(text)


def test_a_float_that_is_not_finite_becomes_null_but_in_an_array(packages):
    sent = {"top": [1.0, float("nan"), [float("-inf")]], "logprobs": LOGPROBS}
    tree = decode_json(encode_json(sent))
    assert tree["top"] == [1.0, None, [None]]
    assert same(tree["logprobs"].values, LOGPROBS)


def test_kinds_of_plain_values_are_sent_as_what_they_are(packages):
    class Reason(str, enum.Enum):
        STOP = "stop"

    class Kind(enum.IntEnum):
        SAMPLED = 3

    sent = {
        "logprob": np.float64(-0.5), "reason": Reason.STOP, "kinds": [Kind.SAMPLED, True, None],
        "span": TokenSpan(1, 2), "pairs": ((1, "a"), (2, ROUTES)), "e": collections.OrderedDict(),
    }  # fmt: skip
    tree = decode_json(encode_json(sent))
    assert same(tree["pairs"][1].pop().values, ROUTES)
    assert tree == {
        "logprob": -0.5, "reason": "stop", "kinds": [3, True, None], "span": [1, 2],
        "pairs": [[1, "a"], [2]], "e": {},
    }  # fmt: skip


def test_the_body_that_was_given_is_not_changed():
    tree = to_send(REPLY)
    encode_json(tree)
    assert equal(decode_json(encode_json(tree)), REPLY)
    assert isinstance(tree["choices"][0]["routed_experts"], np.ndarray)


def test_no_parser_is_given_a_blob_and_no_list_of_numbers_is_made(monkeypatch):
    """Trap 40, at 30,000 tokens x 48 x 8."""
    routes = RNG.integers(0, 128, (30_000, 48, 8), dtype=np.uint8)
    sizes = []

    class Spy:
        def loads(self, text):
            sizes.append(len(text))
            return json.loads(text)

        def dumps(self, tree):
            text = json.dumps(tree, separators=(",", ":")).encode()
            sizes.append(len(text))
            return text

    with mock.patch.object(wire_json, "_orjson", Spy):
        body = encode_json({"choices": [{"routed_experts": routes}]})
        assert same(decode_json(body)["choices"][0]["routed_experts"].values, routes)
    assert len(sizes) == 2
    assert max(sizes) < 200
    assert len(body) < routes.nbytes * 4 / 3 + 500


# --- what is refused at the sender ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ([ROUTES], TypeError, ": body must be a dict, got list"),
        ({"a": {1: ROUTES}}, TypeError, ": a key at /a must be a string: 1"),
        ({"a": [{"__packhorse__": 1}]}, ValueError, ": the key '__packhorse__' at /a/0 is the fo"),
        ({"__packhorse_seal__": 1}, ValueError, ": the key '__packhorse_seal__' at / is the form"),
        ({"a": [0, {1, 2}]}, TypeError, ": /a/1 is set, which JSON does not hold"),
        ({"a": np.float32(1)}, TypeError, ": /a is float32, which JSON does not hold"),
        ({"a": {"b/c": np.array(1)}}, ValueError, ": field '/a/b~1c' has no rows"),
        ({"a": "\ud800", "b": ROUTES}, ValueError, ": body is not JSON: "),
    ],
)
def test_what_is_no_body_is_refused_before_it_is_sent(body, error, message, packages):
    with pytest.raises(error) as caught:
        encode_json(body)
    assert str(caught.value).startswith("encode_json" + message)


def test_a_body_nested_too_deeply_is_refused(packages):
    nested: list = [ROUTES]
    for _ in range(3000):
        nested = [nested]
    with pytest.raises(ValueError, match="encode_json: body is nested too deeply"):
        encode_json({"a": nested})


# --- permanent ------------------------------------------------------------------------------------


def body_with(envelopes: list[bytes], blobs: list[bytes], keys: str = "ab") -> bytes:
    """A sealed body of these envelopes, whatever they say."""
    members = [b'"%c":' % ord(key) + text for key, text in zip(keys, envelopes, strict=False)]
    blobs = [base64.b64encode(blob) for blob in blobs]
    return seal(b"{" + b",".join(members) + b',"__packhorse_seal__":"', blobs)


def one(data: bytes = ROUTES.tobytes(), version: object = 1, **changed: object) -> bytes:
    header = {**header_of(Field("/a", ROUTES), "xxh3"), **changed}
    return body_with([envelope_of(header, data, version)], [data])


HOSTILE = {
    "2**60 bytes": ({"shape": [2**60], "bytes": 2**60}, "1152921504606846976 bytes are above"),
    "2**63 bytes": ({"shape": [2**63], "bytes": 2**63}, "bytes must be a count, got an integer"),
    "wraps": ({"shape": [2**32, 2**32], "bytes": 0}, "is past any memory"),
    "negative": ({"shape": [-5, -8]}, "a dimension must be a count, got -5"),
    "boolean": ({"shape": [True, 40]}, "a dimension must be a count, got True"),
    "bytes off by one": ({"bytes": 41}, "[5, 4, 2] of uint8 is 40 bytes, not 41"),
    "unknown dtype": ({"dtype": "|O"}, "unknown dtype '|O'"),
    "big-endian": ({"dtype": ">u2"}, "unknown dtype '>u2'"),
    "start": ({"start": -1}, "start must be a count, got -1"),
    "another place": ({"name": "/b"}, "field '/b': it lies at '/a'"),
    "version": ({"version": 2}, "version 2 of the format; this reads version 1"),
    "boolean version": ({"version": True}, "version True of the format; this reads version 1"),
    "more": ({"offset": 1}, "must hold name, dtype, shape, start, bytes, sum, in this order"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_permanent_and_allocates_nothing(case, packages):
    changed, message = HOSTILE[case]
    body = one(**changed)
    tracemalloc.start()
    try:
        with pytest.raises(WireFormatError) as caught:
            decode_json(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("decode_json: ")
    assert message in str(caught.value)
    assert peak < 100_000


def test_fields_that_changed_places_are_permanent():
    first, second = Field("/a", ROUTES), Field("/b", ROUTES + 1)
    envelopes = [envelope_of(header_of(f, "crc32"), values_of(f.array)) for f in (first, second)]
    blobs = [values_of(f.array) for f in (first, second)]
    assert list(decode_json(body_with(envelopes, blobs))) == ["a", "b"]
    with pytest.raises(WireFormatError, match="field '/b': it lies at '/a'") as caught:
        decode_json(body_with(envelopes[::-1], blobs[::-1]))
    assert caught.value.field == "/b"
    with pytest.raises(WireFormatError, match="field '/b': it lies at '/c'"):
        decode_json(body_with(envelopes, blobs, keys="ac"))
    with pytest.raises(WireFormatError, match="'/a' is not the next of the body's arrays"):
        decode_json(body_with(envelopes[:1] * 2, blobs[:1] * 2, keys="aa"))


def rewritten(tree, **how):
    """A body as a proxy writes it anew."""
    return json.dumps(tree, **how).encode()


def reversed_envelopes(value):
    if isinstance(value, dict):
        items = [(key, reversed_envelopes(item)) for key, item in value.items()]
        return dict(reversed(items) if "__packhorse__" in value else items)
    return [reversed_envelopes(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"indent": 2},
        {"separators": (", ", ":")},
        {"separators": (",", ": ")},
        {"separators": (",", ":"), "sort_keys": True},
        {"reverse": True, "separators": (",", ":")},
        {"reverse": True, "indent": 1},
    ],
    ids=str,
)
def test_the_same_fields_in_another_layout_are_permanent(how, packages):
    """Trap 37: key order, spaces."""
    how = dict(how)
    tree = json.loads(encode_json(to_send(REPLY)))
    if how.pop("reverse", False):
        tree = reversed_envelopes(tree)
    with pytest.raises(WireFormatError, match="written anew on the way") as caught:
        decode_json(rewritten(tree, **how))
    assert caught.value.field in [
        "/choices/0/routed_experts", "/choices/1/routed_experts", "/choices/1/logprobs/sampled"
    ]  # fmt: skip


def test_damage_to_a_body_written_anew_is_transient():
    tree = json.loads(encode_json({"a": ROUTES}))
    body = bytearray(rewritten(tree))
    body[body.index(b'"data"') + 12] ^= 1
    with pytest.raises(TransientWireError):
        decode_json(body)
    with pytest.raises(TransientWireError):
        decode_json(rewritten(tree)[:-40])


def test_an_envelope_that_is_no_member_of_ours_is_permanent():
    """Behind a good seal, a second object that looks like a placeholder."""
    data = ROUTES.tobytes()
    envelope = envelope_of(header_of(Field("/b", ROUTES), "xxh3"), data)
    blob = base64.b64encode(data)
    for rogue in (b'{ "__packhorse__":0}', b'{"\\u005f_packhorse__":0}', b'{ "__packhorse__":[]}'):
        body = seal(b'{"a":' + rogue + b',"b":' + envelope + b',"__packhorse_seal__":"', [blob])
        with pytest.raises(WireFormatError, match=r"'/a' is not the next|lies at '/a'"):
            decode_json(body)
    body = seal(b'{"b":' + envelope + b',"a":{ "__packhorse__":1},"__packhorse_seal__":"', [blob])
    with pytest.raises(WireFormatError, match="'/a' is not the next of the body's arrays"):
        decode_json(body)
    body = seal(b'[{"b":' + envelope + b'},{"__packhorse_seal__":"', [blob])
    with pytest.raises(WireFormatError, match="the body is not JSON"):
        decode_json(body)


def test_a_boolean_that_is_neither_is_permanent():
    twos = Field("/a", np.array([0, 2], np.uint8))
    envelope = envelope_of({**header_of(twos, "crc32"), "dtype": "|b1"}, b"\0\2")
    with pytest.raises(WireFormatError, match="field '/a': a boolean is 2"):
        decode_json(body_with([envelope], [b"\0\2"]))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (WireLimits(max_bytes=39), "field '/a': 40 bytes are above max_bytes=39"),
        (WireLimits(max_bytes=79), "80 bytes in all are above max_bytes=79"),
        (WireLimits(max_fields=1), "more arrays than max_fields=1"),
        (WireLimits(max_json_bytes=99), "bytes beside the arrays are above max_json_bytes=99"),
        (WireLimits(dtypes=["int8"]), "field '/a': uint8 is none of int8"),
    ],
)
def test_a_limit_is_what_was_asked(limits, message):
    with pytest.raises(WireFormatError) as caught:
        decode_json(encode_json({"a": ROUTES, "b": ROUTES}), limits=limits)
    assert message in str(caught.value)
    with pytest.raises(WireFormatError, match="101 bytes beside the arrays are above max_json_byt"):
        decode_json(b'"' + b"x" * 99 + b'"', limits=WireLimits(max_json_bytes=100))


# --- transient ------------------------------------------------------------------------------------


def test_a_body_cut_anywhere_is_transient_and_names_the_field(packages):
    body = encode_json({"text": "x", "a": ROUTES, "b": {"c": LOGPROBS}})
    inside = {}
    for found in re.finditer(rb'"name":"([^"]+)".*?"data":"([^"]*)"', body):
        inside.update(dict.fromkeys(range(found.start(2), found.end(2)), found[1].decode()))
    for length in range(len(body)):
        with pytest.raises(TransientWireError) as caught:
            decode_json(body[:length])
        if length in inside:
            assert caught.value.field == inside[length]
            assert f"field {inside[length]!r}: cut short: " in str(caught.value)


def test_each_checksum_names_what_it_covers(packages):
    body = encode_json({"text": "hello", "a": ROUTES})
    data = body.index(b'"data":"') + 8
    for place, message in (
        (body.index(b"hello"), "the checksum of what is around the arrays is wrong"),
        (body.index(b'"shape"') + 9, "the checksum of an array's header is wrong"),
        (data + 5, "field '/a': the checksum of its 40 bytes is wrong"),
        (len(body) - 3, "the checksum of what is around the arrays is wrong"),
        (len(body) - 1, "its seal is not at its end"),
    ):
        bad = bytearray(body)
        bad[place] = ord("A") if bad[place] != ord("A") else ord("B")
        with pytest.raises(TransientWireError) as caught:
            decode_json(bad)
        assert message in str(caught.value)
    bad = bytearray(body)
    bad[data + 5] = ord("*")
    with pytest.raises(TransientWireError, match="field '/a': its base64 is damaged"):
        decode_json(bad)


def test_base64_that_spells_the_same_bytes_otherwise_is_damaged(packages):
    """Bits that no byte has are zeros; padding stands at the end only."""
    for array, old, new in ((b"\0", b"AA==", b"AB=="), (b"\0\0", b"AAA=", b"AAB=")):
        body = encode_json({"a": np.frombuffer(array, np.uint8)})
        assert old in body
        for wrong in (new, b"AAAA", b"A===", b"====", b"A=A=", b"AA=A", b" AA=", b"AA\\n"):
            if wrong == old:
                continue
            with pytest.raises(TransientWireError, match="field '/a': its base64 is damaged"):
                decode_json(body.replace(old, wrong[:4]))


def test_libbase64_writes_no_byte_past_the_slack():
    """Text of any length, without the padding it must have too, between two canaries."""
    functions = wire_base64._libbase64()
    if functions is None:
        pytest.skip("pybase64 is not installed, or hides its functions")
    written = ctypes.c_size_t()
    for size in [*range(1, 200), 4094, 4095, 4096]:
        data = RNG.bytes(size)
        text = base64.b64encode(data)
        for function, sent, room in (
            (functions[0], data, len(text)),
            (functions[1], text, size),
            (functions[1], text.replace(b"=", b"A"), size + wire_base64._SLACK_BYTES),
        ):
            memory = (ctypes.c_char * (64 + room + 128))()
            ctypes.memset(memory, 0xEE, len(memory))
            into = ctypes.addressof(memory) + 64
            function(ctypes.cast(sent, ctypes.c_void_p), len(sent), into, ctypes.byref(written), 0)
            assert memory.raw[:64] == b"\xee" * 64
            assert memory.raw[64 + room :] == b"\xee" * 128


def test_what_is_not_json_is_transient(packages):
    for body in (b"", b"<html>", b'{"a":', b"\xff", b'{"a":NaN}', b'{"a":Infinity}', b"[" * 5000):
        with pytest.raises(TransientWireError, match="decode_json: the body is not JSON"):
            decode_json(body)


def test_only_bytes_are_decoded():
    for wrong in ("{}", None, {}):
        with pytest.raises(TypeError, match="decode_json: needs contiguous bytes, got"):
            decode_json(wrong)


def test_without_xxhash_a_checksum_is_not_passed_over(monkeypatch):
    body = encode_json({"a": ROUTES}, checksum="xxh3")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    wire_format._xxh3.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"decode_json: .* pip install 'packhorse\[wire\]'"):
            decode_json(body)
        again = encode_json({"a": ROUTES})
    finally:
        wire_format._xxh3.cache_clear()
    assert b'"sum":"crc32:' in again


def test_an_error_is_one_of_the_two():
    assert {TransientWireError, WireFormatError} == set(WireError.__subclasses__())
