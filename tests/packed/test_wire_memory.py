"""Peak memory of both forms beyond their input, traced; and the snippets of docs/wire.md."""

import gc
import re
import tracemalloc
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from packhorse.packed.wire import (
    FrameReader,
    decode_frame,
    decode_json,
    encode_frame,
    encode_json,
    frame_parts,
)
from packhorse.packed.wire_tree import join_tree, split_tree

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
ROUTES = np.random.default_rng(0).integers(0, 128, (25_000, 48, 8), dtype=np.uint8)
SUPPORT = np.arange(300_000, dtype=np.int32)
PAYLOAD_BYTES = ROUTES.nbytes + SUPPORT.nbytes
FIELDS = {"routed_experts": ROUTES, "support_ids": SUPPORT}
BODY = {"choices": [{"text": "x" * 100, **FIELDS}]}


def read_in_pieces(frame: bytes) -> list:
    reader = FrameReader()
    view = memoryview(frame)
    frames = [f for i in range(0, len(view), 65536) for f in reader.feed(view[i : i + 65536])]
    reader.close()
    return frames


@pytest.mark.parametrize(
    ("call", "given", "most"),
    [
        (encode_json, BODY, 1.4 if find_spec("pybase64") else 1.42),  # binascii makes its own text
        (decode_json, encode_json(BODY), 1.05),
        (encode_frame, FIELDS, 1.05),
        (frame_parts, FIELDS, 0.05),
        (decode_frame, encode_frame(FIELDS), 0.05),
        (lambda frame: decode_frame(frame, owned=True), encode_frame(FIELDS), 1.05),
        (read_in_pieces, encode_frame(FIELDS), 1.05),
    ],
    ids=[
        "encode_json", "decode_json", "encode_frame", "frame_parts", "views",
        "owned", "reader",
    ],
)  # fmt: skip
def test_peak_memory_beyond_the_input(call: Callable, given: object, most: float):
    call(given)
    gc.collect()
    tracemalloc.start()
    try:
        kept = call(given)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del kept
    assert peak <= most * PAYLOAD_BYTES


def test_the_snippets_of_the_document_run(capsys):
    snippets = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.M | re.S)
    assert len(snippets) == 4
    namespace: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(DOCUMENT), "exec"), namespace)
    said = capsys.readouterr().out
    assert said
    assert all(f"# {line}" in "".join(snippets) for line in said.splitlines())


def test_the_bytes_of_the_document_are_those_of_the_code():
    text = DOCUMENT.read_text()
    assert "`89 50 48 57 49 52 45 0A`" in text
    assert encode_frame({})[:8].hex(" ").upper() == "89 50 48 57 49 52 45 0A"
    envelope = re.search(r'^\{"__packhorse__".*$', text, flags=re.M)[0]
    pattern = re.escape(envelope)
    for word, form in (("HEADER", '"name":.*"'), ("XXXXXXXX", "[0-9a-f]{8}"), ("BASE64", "AQ==")):
        assert word in pattern
        pattern = pattern.replace(word, form)
    seal = re.escape(',"__packhorse_seal__":"') + "[0-9a-f]{8}" + re.escape('"}')
    body = encode_json({"a": np.array([1], np.uint8)}).decode()
    assert re.fullmatch(re.escape('{"a":') + pattern + seal, body)


def test_arrays_are_freed_with_the_last_reference_and_wait_for_no_collection():
    """A cycle in a decoder would hold megabytes until the collector comes by."""
    array = np.zeros((1000, 48, 8), np.uint8)
    body, frame = encode_json({"a": [{"b": array}]}), encode_frame(split_tree({"a": [array]}))
    gc.collect()
    gc.disable()
    try:
        tree = decode_json(body)
        decoded = weakref.ref(tree["a"][0]["b"].values)
        del tree
        joined = join_tree(decode_frame(frame, owned=True).fields)
        placed = weakref.ref(joined["a"][0].values)
        del joined
        sent = weakref.ref(array)
        encode_json({"a": [{"b": array}]})
        split_tree({"a": [array]})
        del array
        assert (decoded(), placed(), sent()) == (None, None, None)
    finally:
        gc.enable()
