"""The form inside JSON: each array is an envelope whose base64 text no JSON parser ever sees.

    {"__packhorse__":{version, name, dtype, shape, start, bytes, sum, crc32},"data":"<base64>"}

    encode    arrays out of the body, the rest dumped, the envelopes put in their places
    decode    envelopes cut out of the received bytes, the rest parsed, the arrays put in order

The name is the place in the body, a JSON pointer: ``/choices/0/routed_experts``. The last member of
a body with arrays is its seal, the CRC-32 of everything but the base64.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from packhorse._nvtx import ranged
from packhorse.packed.wire_base64 import base64_size, decode_text, encode_into
from packhorse.packed.wire_format import (
    FIELD_KEYS,
    MAX_NAME_BYTES,
    VERSION,
    Buffer,
    FieldHeader,
    Outgoing,
    WireArray,
    WireLimits,
    as_array,
    as_view,
    blank_sum,
    check_content,
    check_digest,
    choose_checksum,
    damaged,
    dump_header,
    hasher,
    load_header,
    malformed,
    new_bytes,
    outgoing,
    read_field,
)

KEY: Final = "__packhorse__"
SEAL_KEY: Final = "__packhorse_seal__"

_OPEN: Final = b'{"__packhorse__":'
_CRC: Final = b',"crc32":"'
_DATA: Final = b'"},"data":"'
_CLOSE: Final = b'"}'
_SEAL: Final = b'"__packhorse_seal__":"'
_SEAL_BYTES: Final = len(_SEAL) + 8 + len(_CLOSE)
#: of an envelope before its base64, beside its header
_ENVELOPE_BYTES: Final = len(_OPEN) + len(_CRC) + 8 + len(_DATA) - 1
#: more than a header's other members need
_REGION_BYTES: Final = MAX_NAME_BYTES + 2048
_DEFAULT: Final = WireLimits()

_OPENED: Final = re.compile(re.escape(_OPEN))
#: a key of ours, in whatever layout; inside a JSON string its quotes would be escaped
_OURS: Final = re.compile(rb'(?<!\\)"__packhorse_(?:_|seal__)"\s*:')
_OUR_ARRAYS: Final = re.compile(rb'(?<!\\)"__packhorse__"\s*:')
_LOOSE_HEADER: Final = re.compile(
    rb'"__packhorse__"\s*:\s*(\{(?:[^"{}\\]|"(?:[^"\\]|\\.)*")*\})', re.DOTALL
)
_LOOSE_DATA: Final = re.compile(rb'\s*,\s*"data"\s*:\s*"')
_LOOSE_OPEN: Final = re.compile(rb"\{\s*\Z")
_LOOSE_CLOSE: Final = re.compile(rb'"\s*\}')
_DATA_FIRST: Final = re.compile(rb'\{\s*"data"\s*:\s*"\Z')
_DATA_ENDS: Final = re.compile(rb'"\s*,\s*\Z')
_BRACE: Final = re.compile(rb"\s*\}")

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_PLAIN: Final[dict[type, Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
_CONTAINERS: Final = frozenset({dict, list})


# --- encoding -------------------------------------------------------------------------------------


@ranged
def encode_json(body: dict[str, Any], *, checksum: str | None = None) -> bytes:
    """A JSON body with arrays in it, written once into memory of its exact size.

    Args:
        body: of dicts, lists, strings, numbers, booleans and None, and anywhere among them arrays
            or ``WireArray`` as ``encode_frame`` takes them. It is not changed. A float that is not
            finite becomes null; in arrays all values stay as they are.
        checksum: as in ``encode_frame``.

    Raises:
        TypeError: ``body`` is no dict, or holds another type; names its place.
        ValueError: a key is one of the format's own, the body is nested too deeply, or what
            ``encode_frame`` refuses.
        ImportError: ``checksum="xxh3"`` without ``xxhash``.
    """
    name = "encode_json"
    algorithm = choose_checksum(name, checksum)
    texts, arrays = _split(name, body)
    if not arrays:
        return texts[0]
    blank = blank_sum(algorithm)
    headers = [dump_header({"version": VERSION, **array.header_with(blank)}) for array in arrays]
    size = sum(map(len, texts)) + sum(map(len, headers)) + _SEAL_BYTES
    size += _ENVELOPE_BYTES * len(arrays)
    size += sum(base64_size(array.data.nbytes) for array in arrays)
    encoded, view = new_bytes(size)
    begin = seal = 0

    def put(text: bytes) -> None:
        nonlocal begin, seal
        view[begin : begin + len(text)] = text
        begin += len(text)
        seal = zlib.crc32(text, seal)

    for text, array, header in zip(texts, arrays, headers, strict=False):
        put(text)
        head = begin
        begin += len(header) + _ENVELOPE_BYTES
        hashed = hasher(name, algorithm)
        end = begin + base64_size(array.data.nbytes)
        encode_into(array.data, view[begin:end], hashed)
        begin = end
        envelope = _envelope(header, blank, f"{algorithm}:{hashed.hexdigest()}")
        view[head : head + len(envelope)] = envelope
        seal = zlib.crc32(envelope, seal)
    put(texts[-1])
    put(_SEAL)
    put(b"%08x" % seal + _CLOSE)
    return encoded


def _envelope(header: bytes, blank: str, checksum: str) -> bytes:
    """All before the base64; what closes it is in the text that follows."""
    before, _, after = header.rpartition(blank.encode())  # the sum is the last member
    header = b"".join((before, checksum.encode(), after))
    return b"".join((_OPEN, header[:-1], _CRC, b"%08x" % zlib.crc32(header), _DATA))


def _split(function: str, body: Any) -> tuple[list[bytes], list[Outgoing]]:
    """The JSON text before, between and after the envelopes, up to the seal's member; without any
    array the whole text."""
    if not isinstance(body, dict):
        raise TypeError(f"{function}: body must be a dict, got {type(body).__name__}")
    arrays: list[Outgoing] = []
    hole = _new_hole()
    try:
        text = dump_json(function, _without_arrays(function, body, "", hole, arrays))
    except RecursionError:
        raise ValueError(f"{function}: body is nested too deeply") from None
    if not arrays:
        return [text], []
    texts = text[:-1].split(b'"' + hole.encode() + b'"')
    texts[1:] = [_CLOSE + part for part in texts[1:]]
    texts[-1] += b","
    return texts, arrays


def _new_hole() -> str:
    """A string that no body holds."""
    return os.urandom(16).hex()


def _without_arrays(
    function: str, value: Any, place: str, hole: str, arrays: list[Outgoing]
) -> Any:
    """``value`` with ``hole`` for each array; what holds none is not copied."""
    if isinstance(value, np.ndarray | WireArray):
        arrays.append(outgoing(function, place, value))
        return hole
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{function}: a key at {place or '/'} must be a string: {key!r}")
            if key in (KEY, SEAL_KEY):
                raise ValueError(f"{function}: the key {key!r} at {place or '/'} is the format's")
        if _SCALARS.issuperset(map(type, value.values())):
            return value
        return {
            key: _without_arrays(function, item, f"{place}/{escaped(key)}", hole, arrays)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if type(value) is list and _SCALARS.issuperset(map(type, value)):
            return value
        return [
            _without_arrays(function, item, f"{place}/{i}", hole, arrays)
            for i, item in enumerate(value)
        ]
    if type(value) in _SCALARS:
        return value
    for kind, plain in _PLAIN.items():  # an enum, a numpy.float64
        if isinstance(value, kind):
            return plain(value)
    raise TypeError(f"{function}: {place} is {type(value).__name__}, which JSON does not hold")


def escaped(key: str) -> str:
    """A token of a JSON pointer, RFC 6901."""
    return key.replace("~", "~0").replace("/", "~1")


# --- decoding -------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """An envelope in the received bytes."""

    begin: int
    data_begin: int
    data_end: int
    header: FieldHeader

    @property
    def end(self) -> int:
        return self.data_end + len(_CLOSE)


@ranged
def decode_json(body: Buffer, *, limits: WireLimits = _DEFAULT) -> Any:
    """What ``encode_json`` was given, with a ``WireArray`` of writable memory of its own for each
    array; other JSON (a server's error, a reply without arrays) as any parser reads it.

    Args:
        body: the received bytes.
        limits: what it may ask for.

    Raises:
        TypeError: ``body`` is not contiguous bytes.
        TransientWireError: it is short, is not JSON, or a checksum is wrong.
        WireFormatError: an envelope was written anew on the way (key order, spaces); or behind good
            checksums the version is unknown, a header inconsistent or past ``limits``, or an array
            is not where it was put.
        ImportError: the checksum is xxh3, and ``xxhash`` is not installed.
    """
    name = "decode_json"
    view = as_view(name, body)
    if _OURS.search(view) is None:
        _check_json_size(name, len(view), limits)
        try:
            return load_json(bytes(view))
        except (ValueError, RecursionError) as error:
            damaged(name, f"the body is not JSON: {str(error)[:80]}")
    found = _find_envelopes(name, view, limits)
    text = _sealed_text(name, view, found, limits)
    try:
        tree = load_json(text)
    except (ValueError, RecursionError) as error:
        malformed(name, f"the body is not JSON: {str(error)[:80]}")
    for (holder, key), envelope in zip(_places(name, tree, found), found, strict=True):
        holder[key] = _read_array(name, view, envelope)
    return tree


def _find_envelopes(function: str, view: memoryview, limits: WireLimits) -> list[_Found]:
    """The envelopes in their order, each behind a good checksum of its header; no data is read."""
    found: list[_Found] = []
    total = position = 0
    while (opened := _OPENED.search(view, position)) is not None:
        if len(found) == limits.max_fields:
            malformed(function, f"more arrays than max_fields={limits.max_fields}")
        envelope = _read_envelope(function, view, opened.start(), limits)
        total += envelope.header.num_bytes
        if total > limits.max_bytes:
            malformed(function, f"{total} bytes in all are above max_bytes={limits.max_bytes}")
        found.append(envelope)
        position = envelope.end
    return found


def _read_envelope(function: str, view: memoryview, begin: int, limits: WireLimits) -> _Found:
    region_begin = begin + len(_OPEN)
    region = bytes(view[region_begin : region_begin + _REGION_BYTES])
    text_bytes = region.find(_CRC)
    if text_bytes < 0:
        _refuse(function, view, "the header of an array is cut short or damaged")
    digits_begin = text_bytes + len(_CRC)
    text = region[:text_bytes] + b"}"
    if region[digits_begin : digits_begin + 8] != b"%08x" % zlib.crc32(text):
        _refuse(function, view, "the checksum of an array's header is wrong")
    fields = load_header(function, text)
    if not isinstance(fields, dict) or next(iter(fields), None) != "version":
        malformed(function, "the header of an array must begin with its version")
    version = fields.pop("version")
    if type(version) is not int or version != VERSION:
        malformed(function, f"version {version!r:.40} of the format; this reads version {VERSION}")
    header = read_field(function, fields, limits)
    data_begin = digits_begin + 8 + len(_DATA)
    if region[digits_begin + 8 : data_begin] != _DATA:
        _refuse(function, view, "its envelope is damaged", header.name)
    data_begin += region_begin
    data_end = data_begin + base64_size(header.num_bytes)
    if data_end > len(view):
        there, needed = len(view) - data_begin, data_end - data_begin
        damaged(function, f"cut short: {there} of its {needed} characters are there", header.name)
    if bytes(view[data_end : data_end + len(_CLOSE)]) != _CLOSE:
        _refuse(function, view, "its envelope is damaged", header.name)
    return _Found(begin, data_begin, data_end, header)


def _sealed_text(function: str, view: memoryview, found: list[_Found], limits: WireLimits) -> bytes:
    """The body with ``{"__packhorse__":i}`` in the place of envelope i, verified by its seal."""
    digits_begin = len(view) - len(_CLOSE) - 8
    end = bytes(view[max(0, len(view) - _SEAL_BYTES) :])
    if not end.startswith(_SEAL) or not end.endswith(_CLOSE):
        _refuse(function, view, "the body is cut short: its seal is not at its end")
    seal = position = 0
    for envelope in found:
        seal = zlib.crc32(view[position : envelope.data_begin], seal)
        position = envelope.data_end
    seal = zlib.crc32(view[position:digits_begin], seal)
    if end[len(_SEAL) : -len(_CLOSE)] != b"%08x" % seal:
        _refuse(function, view, "the checksum of what is around the arrays is wrong")
    _check_json_size(
        function, len(view) - sum(base64_size(envelope.header.num_bytes) for envelope in found),
        limits,
    )  # fmt: skip
    parts: list[bytes | memoryview] = []
    position = 0
    for i, envelope in enumerate(found):
        parts += [view[position : envelope.begin], _OPEN, b"%d}" % i]
        position = envelope.end
    return b"".join([*parts, view[position:]])


def _check_json_size(function: str, num_bytes: int, limits: WireLimits) -> None:
    if num_bytes > limits.max_json_bytes:
        malformed(
            function,
            f"{num_bytes} bytes beside the arrays are above max_json_bytes={limits.max_json_bytes}",
        )


def _places(function: str, tree: Any, found: list[_Found]) -> list[tuple[Any, Any]]:
    """Where each envelope lies, (dict or list, key or index); the seal is taken out."""
    if not isinstance(tree, dict) or tree.pop(SEAL_KEY, None) is None or KEY in tree:
        malformed(function, "the body is no object that ends with its seal")
    places: list[tuple[Any, Any]] = []
    try:
        _visit(function, tree, "", found, places)
    except RecursionError:
        malformed(function, "the body is nested too deeply")
    if len(places) != len(found):
        name = found[len(places)].header.name
        malformed(function, "another member of the same name follows it", name)
    return places


# a function of the module: a closure that calls itself would keep the decoded arrays alive
def _visit(
    function: str, holder: Any, place: str, found: list[_Found], places: list[tuple[Any, Any]]
) -> None:
    if type(holder) is list and _CONTAINERS.isdisjoint(map(type, holder)):
        return
    for key, item in list(holder.items()) if type(holder) is dict else enumerate(holder):
        if type(item) not in _CONTAINERS:
            continue
        inner = f"{place}/{escaped(key) if type(key) is str else key}"
        if type(item) is list or KEY not in item:
            _visit(function, item, inner, found, places)
            continue
        i = len(places)
        if type(item[KEY]) is not int or item != {KEY: i} or i >= len(found):
            malformed(function, f"{inner!r} is not the next of the body's arrays")
        if found[i].header.name != inner:
            malformed(function, f"it lies at {inner!r}", found[i].header.name)
        places.append((holder, key))


def _read_array(function: str, view: memoryview, envelope: _Found) -> WireArray:
    header = envelope.header
    hashed = hasher(function, header.algorithm)
    data = decode_text(view[envelope.data_begin : envelope.data_end], header.num_bytes, hashed)
    if data is None:
        damaged(function, "its base64 is damaged", header.name)
    check_digest(function, header, hashed.hexdigest())
    check_content(function, header, data)
    return WireArray(as_array(header, data), header.start)


# --- what cannot be read --------------------------------------------------------------------------


def _refuse(function: str, view: memoryview, problem: str, name: str | None = None) -> NoReturn:
    """Permanent where a whole envelope is there in another layout; else transient."""
    written_anew = _written_anew(view)
    if written_anew is not None:
        malformed(
            function,
            "its envelope was written anew on the way (order of keys, spaces); the body must arrive"
            " byte for byte",
            written_anew,
        )
    damaged(function, problem, name)


def _written_anew(view: memoryview) -> str | None:
    """The first field of a body whose envelopes are all whole, and none as it is encoded: a parser
    and a writer of JSON stood between. Damage spares the others, or breaks the one that it meets.
    """
    names = []
    for found in _OUR_ARRAYS.finditer(view):
        name = _name_of_loose(view, found.start())
        if name is None:
            return None
        names.append(name)
    return names[0] if names else None


def _name_of_loose(view: memoryview, begin: int) -> str | None:
    """The field whose key begins here, if its envelope is whole but spelled in another way."""
    region = bytes(view[begin : begin + 2 * _REGION_BYTES])
    loose = _LOOSE_HEADER.match(region)
    if loose is None:
        return None
    try:
        pairs = json.loads(loose[1], object_pairs_hook=list)
        fields = dict(pairs)
        spelled = dump_header({key: fields[key] for key in ("version", *FIELD_KEYS)})
        digits = f"{zlib.crc32(spelled):08x}"
        if len(pairs) != len(FIELD_KEYS) + 2 or fields["crc32"] != digits:
            return None
        if fields["version"] != VERSION:
            return None
        header = read_field("", {key: fields[key] for key in FIELD_KEYS}, _DEFAULT)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    canonical = b"".join((_OPEN, spelled[:-1], _CRC, digits.encode(), _DATA))
    size = base64_size(header.num_bytes)
    for data_begin in _loose_data(view, begin, loose.end(), region, size):
        after = bytes(view[data_begin + size : data_begin + size + len(_CLOSE)])
        head = bytes(view[max(0, data_begin - len(canonical)) : data_begin])
        text = view[data_begin : data_begin + size]
        hashed = hasher("decode_json", header.algorithm)
        if (head, after) == (canonical, _CLOSE) or len(text) != size:
            continue
        if decode_text(text, header.num_bytes, hashed) is not None:
            return header.name if hashed.hexdigest() == header.digest else None
    return None


def _loose_data(
    view: memoryview, begin: int, header_bytes: int, region: bytes, size: int
) -> Iterator[int]:
    """Where ``size`` characters of base64 lie in the object whose header begins at ``begin``."""
    before = bytes(view[max(0, begin - 64) : begin])
    after = _LOOSE_DATA.match(region, header_bytes)
    if after is not None and _LOOSE_OPEN.search(before):
        data_begin = begin + after.end()
        if _LOOSE_CLOSE.match(view[data_begin + size : data_begin + size + 64]):
            yield data_begin
    ends = _DATA_ENDS.search(before)
    if ends is not None and _BRACE.match(region, header_bytes):
        data_begin = begin - len(before) + ends.start() - size
        if data_begin > 0 and _DATA_FIRST.search(view[max(0, data_begin - 64) : data_begin]):
            yield data_begin


# --- JSON -----------------------------------------------------------------------------------------


@cache
def _orjson() -> Any:
    """``orjson``, or None where it is not installed: the standard library's ``json`` does it."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson


def load_json(text: Buffer) -> Any:
    """Any JSON; a ValueError or RecursionError where it is none."""
    module = _orjson()
    if module is not None:
        return module.loads(text)
    return json.loads(bytes(text), parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dump_json(function: str, tree: Any) -> bytes:
    """JSON of a tree without arrays; a float that is not finite becomes null."""
    module = _orjson()
    try:
        if module is not None:
            return module.dumps(tree)
        keywords: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}
        try:
            text = json.dumps(tree, allow_nan=False, **keywords)
        except ValueError:
            text = json.dumps(_finite(tree), allow_nan=False, **keywords)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function}: body is not JSON: {error}") from None


def _finite(value: Any) -> Any:
    """``value`` with None for floats that are not finite, as orjson writes them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
