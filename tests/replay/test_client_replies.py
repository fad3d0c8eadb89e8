"""Replies that a real vLLM 0.32 wrote, recorded, read as they are and packed; and what is refused.

Oracle: the recorded JSON itself, by ``json``, ``base64`` and ``numpy.load``.
"""

import base64
import copy
import io
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.packed.wire import (
    TransientWireError,
    WireArray,
    WireFormatError,
    WireLimits,
    decode_frame,
    decode_json,
    encode_frame,
    encode_json,
)
from packhorse.packed.wire_tree import join_tree, split_tree
from packhorse.replay.client_fields import pack_reply
from packhorse.replay.rollout import Rollout
from packhorse.replay.vllm_http import ReplyJoiner, load_reply, read_choices, read_reply

RECORDED = json.loads(
    Path(__file__).parents[1].joinpath("data/vllm_http_0.32.0.json").read_text("utf-8")
)
ENDPOINTS = ("completions", "chat", "generate")
FORMS = ("plain", "json", "frames")


def body_of(tree: Any, form: str) -> bytes:
    if form == "plain":
        return json.dumps(tree).encode()
    packed = pack_reply(tree, max_bytes=2**30)
    return encode_json(packed) if form == "json" else encode_frame(split_tree(packed))


def prompt_of(endpoint: str) -> list[int]:
    response = RECORDED[endpoint]["response"]
    return response.get("prompt_token_ids") or response["choices"][0]["prompt_token_ids"]


def npy_of(choice: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def npy_text(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def logprobs_of(endpoint: str, choice: dict[str, Any]) -> list[tuple[float, dict[int, float]]]:
    """(sampled logprob, candidate -> logprob) of each token."""
    given = choice["logprobs"]
    if endpoint == "completions":
        best = [
            {int(key.split(":")[1]): value for key, value in entry.items()}
            for entry in given["top_logprobs"]
        ]
        return list(zip(given["token_logprobs"], best, strict=True))

    def id_of(entry: dict[str, Any]) -> int:
        return entry["token_id"] if "token_id" in entry else int(entry["token"].split(":")[1])

    return [
        (entry["logprob"], {id_of(one): one["logprob"] for one in entry["top_logprobs"]})
        for entry in given["content"]
    ]


def rows_of(rollout: Rollout) -> list[list[int]]:
    assert rollout.support is not None
    bounds = rollout.support.row_offsets.tolist()
    return [
        rollout.support.token_ids[begin:end].tolist() for begin, end in itertools.pairwise(bounds)
    ]


# --- recorded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_recorded_reply_is_read_exactly_in_every_form(endpoint, form):
    response = RECORDED[endpoint]["response"]
    choice = response["choices"][0]
    support = "mask" if endpoint == "generate" else "logprobs"
    [rollout] = read_reply(body_of(response, form), support=support)
    prompt = prompt_of(endpoint)
    assert rollout.prompt_ids.tolist() == prompt
    assert rollout.response_ids.tolist() == choice["token_ids"]
    routes = npy_of(choice)
    assert len(routes) == len(prompt) + len(choice["token_ids"]) - 1
    assert rollout.routes is not None
    assert np.array_equal(rollout.routes, routes)
    sampled, best = zip(*logprobs_of(endpoint, choice), strict=True)
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [float(np.float32(value)) for value in sampled]
    finite = [sorted(i for i, value in row.items() if value > -9999.0) for row in best]
    assert [sorted(row) for row in rows_of(rollout)] == finite
    if endpoint == "generate":
        assert finite == choice["sampling_mask"]
        assert [tuple(span) for span in rollout.weight_versions] == [(0, 6, "default")]
    assert rollout.support_mass is not None
    masses = [sum(math.exp(value) for value in row.values()) for row in best]
    assert np.allclose(rollout.support_mass, masses, rtol=0, atol=1e-6)
    assert np.abs(rollout.support_mass - 1).max() < 1e-4
    assert (rollout.finish_reason, rollout.num_floored, rollout.num_added) == ("length", 0, 0)


def test_a_packed_reply_holds_no_base64_of_npy_and_no_list_of_numbers():
    """Nowhere on the path is there a JSON list of numbers, or an array as text in a string."""
    for endpoint in ENDPOINTS:
        packed = pack_reply(RECORDED[endpoint]["response"], max_bytes=2**30)
        text = split_tree(packed)["json"].tobytes().decode()  # type: ignore[union-attr]
        tree = json.loads(text)

        def lists(value: Any, place: str = "") -> list[str]:
            found = []
            if isinstance(value, list):
                found += [place] if any(isinstance(one, int | float) for one in value) else []
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in items:
                if isinstance(one, list | dict):
                    found += lists(one, f"{place}/{key}")
            return found

        assert lists(tree) == []
        assert "k05VTVBZ" not in text
        assert b"k05VTVBZ" not in encode_json(packed)
        assert b"token_id:" not in encode_json(packed)
        assert len(encode_frame(split_tree(packed))) < len(json.dumps(RECORDED[endpoint]))


@pytest.mark.parametrize("form", FORMS)
def test_a_recorded_stream_is_joined_to_the_reply_it_is_in_every_form(form):
    joiner = ReplyJoiner()
    text = RECORDED["generate_stream"]["response_sse"]
    seen = []
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            chunk = json.loads(event[6:])
            seen += joiner.add(load_reply(body_of(chunk, form)))
    assert [(index, ids.tolist()) for index, ids in seen] == [(0, [21]), (0, [291]), (0, [124])]
    joiner.end()
    prompt = RECORDED["generate_stream"]["request"]["token_ids"]
    [rollout] = read_reply(joiner.finish(), prompt_ids=prompt, logprobs=False)
    whole = copy.deepcopy(RECORDED["generate"]["response"])
    choice = whole["choices"][0]
    assert rollout.response_ids.tolist() == choice["token_ids"][:3]
    assert rows_of(rollout) == choice["sampling_mask"][:3]
    assert rollout.routes is not None
    assert np.array_equal(rollout.routes, npy_of(choice)[: len(prompt) + 2])
    assert rollout.logprobs is None
    assert [tuple(span) for span in rollout.weight_versions] == [(0, 3, "default")]


def test_nested_lists_of_vllm_0_21_are_read_and_packed_as_the_same_array():
    """Recorded shape, not run: 0.21 writes the routes as lists."""
    response = copy.deepcopy(RECORDED["generate"]["response"])
    choice = response["choices"][0]
    expected = npy_of(choice)
    choice["routed_experts"] = expected.tolist()
    for form in FORMS:
        [rollout] = read_reply(body_of(response, form))
        assert rollout.routes is not None
        assert np.array_equal(rollout.routes, expected)
    packed = pack_reply(response, max_bytes=2**30)
    assert isinstance(packed["choices"][0]["routed_experts"], WireArray)


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "<u2", "int16", "int32", ">i8"])
def test_routes_of_every_integer_dtype_and_byte_order_are_read(dtype):
    routes = np.stack([[[0, 300 % 256 if dtype == "uint8" else 300]] * 4] * 25).astype(dtype)
    response = copy.deepcopy(RECORDED["generate"]["response"])
    response["choices"][0]["routed_experts"] = npy_text(routes)
    for form in FORMS:
        [choice] = read_choices(load_reply(body_of(response, form)))
        assert choice.routes is not None
        assert choice.routes.dtype.isnative
        assert np.array_equal(choice.routes, routes)


def test_several_choices_come_in_the_order_of_their_index():
    response = copy.deepcopy(RECORDED["generate"]["response"])
    first = response["choices"][0]
    other = copy.deepcopy(first)
    other["index"], other["routed_experts"] = 1, npy_text(7 - npy_of(first))
    response["choices"] = [other, first]
    for form in FORMS:
        rollouts = read_reply(body_of(response, form))
        assert [rollout.index for rollout in rollouts] == [0, 1]
        for rollout, routes in zip(rollouts, (npy_of(first), 7 - npy_of(first)), strict=True):
            assert rollout.routes is not None
            assert np.array_equal(rollout.routes, routes)


def test_null_fields_stay_null_and_null_logprobs_are_floored_and_counted():
    response = copy.deepcopy(RECORDED["generate"]["response"])
    choice = response["choices"][0]
    choice.update(sampling_mask=None, weight_versions=None)
    for entry in choice["logprobs"]["content"]:
        entry["top_logprobs"] = []
    choice["logprobs"]["content"][2]["logprob"] = None
    choice["logprobs"]["content"][4]["logprob"] = -9999.0
    for form in FORMS:
        [rollout] = read_reply(body_of(response, form), support=None)
        assert rollout.logprobs is not None
        assert np.flatnonzero(rollout.logprobs == -9999.0).tolist() == [2, 4]
        assert (rollout.num_floored, rollout.support, rollout.weight_versions) == (2, None, ())


def test_a_field_that_cannot_be_packed_stays_as_it_is_and_its_reader_names_it():
    response = copy.deepcopy(RECORDED["chat"]["response"])
    choice = response["choices"][0]
    choice["logprobs"]["content"][3]["token"] = " ink"
    choice["routed_experts"] = "AAAA"
    packed = pack_reply(response, max_bytes=2**30)
    assert packed["choices"][0]["logprobs"] is choice["logprobs"]
    assert packed["choices"][0]["routed_experts"] == "AAAA"
    assert isinstance(packed["choices"][0]["token_ids"], WireArray)
    assert isinstance(response["choices"][0]["token_ids"], list)  # the reply itself is not changed
    for form in FORMS:
        with pytest.raises(WireFormatError, match="'/choices/0/routed_experts': its base64 holds"):
            read_reply(body_of(response, form), support=None)
        body = body_of({**response, "choices": [{**choice, "routed_experts": None}]}, form)
        with pytest.raises(WireFormatError, match=r"content/3': ' ink' is no token_id:N; send"):
            read_choices(load_reply(body))


# --- refused --------------------------------------------------------------------------------------


def npy_header(dtype: str, shape: str) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    return text.encode() + b" " * 7 + b"\n"


def header_text(header: bytes, body: bytes = b"") -> str:
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k05VTVBZ*", "its base64 is damaged"),
        ("k05V", "its base64 holds no .npy file"),
        (base64.b64encode(b"\x93NUMPY\x03\x00" + bytes(80)).decode(), "holds no .npy file"),
        (header_text(b"{'descr': '|u1'"), "does not hold integers in C order: .*'descr'"),
        (header_text(b"(" * 900), "does not hold integers in C order"),
        (npy_text(np.zeros((1, 1, 1), np.float32)), "integers in C order: .*<f4"),
        (npy_text(np.zeros((2, 2, 2), np.uint8, order="F")), "integers in C order: .*'fort"),
        (npy_text(np.zeros((2, 2, 2), "M8[s]")), "does not hold integers in C order"),
        (header_text(npy_header("|O", "(1, 1, 1)")), "does not hold integers in C order"),
        (header_text(npy_header("|u1", "(2, 1, 1)"), b"a"), r"holds 1 bytes, \(2, 1, 1\) of uint8"),
        (header_text(npy_header("<u8", "(4294967296, 4294967296, 1048576)")),
         "holds 0 bytes, .* of uint64 is 154742504910672534362390528"),
        (header_text(npy_header("|u1", "(0, 999999999999999999, 99999999999)")), "has shape"),
        (header_text(npy_header("|u1", "(-1, -1, 1)"), b"a"), "does not hold integers in C"),
        (header_text(npy_header("|u1", "(True, 1, 1)"), b"a"), "does not hold integers in C"),
        (header_text(npy_header("|u1", "(1, 1)"), b"a"), r"must be \[rows, layers, K\], got"),
        (header_text(npy_header("|u1", "(1, 1, 1)"), b"a")[:-4], "does not hold integers in C"),
        ([[[1, 2], [3]]], r"its lists make no array"),
        ([[[1, 2.5]]], "must be integers"),
        ([[[1, True]]], "must be integers"),
        ([["x" * 10**6, *"ab" * 10**6]], "its lists make no array"),  # 8 TB in NumPy's own form
        ([], r"must be integers \[rows, layers, K\], got float64 \[0\]"),
        ({"data": "x"}, "it is dict, no routes"),
        (7, "it is int, no routes"),
    ],
)  # fmt: skip
def test_routes_that_are_no_routes_are_refused_by_name(text, message):
    response = copy.deepcopy(RECORDED["generate"]["response"])
    response["choices"][0]["routed_experts"] = text
    with pytest.raises(WireFormatError, match=f"field '/choices/0/routed_experts': .*{message}"):
        read_reply(body_of(response, "plain"))


def test_routes_above_the_bound_are_refused_and_all_choices_share_it():
    response = copy.deepcopy(RECORDED["generate"]["response"])
    choice = response["choices"][0]
    other = {**copy.deepcopy(choice), "index": 1}
    response["choices"].append(other)
    size = npy_of(choice).nbytes
    limits = WireLimits(max_bytes=2 * size)
    assert len(read_reply(body_of(response, "plain"), limits=limits)) == 2
    limits = WireLimits(max_bytes=2 * size - 1)
    with pytest.raises(WireFormatError, match=r"/choices/1/routed_experts'.* above max_bytes=199"):
        read_reply(body_of(response, "plain"), limits=limits)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("token_ids",), "21", "/choices/0/token_ids': it is str, no list"),
        (("token_ids", 2), True, "token_ids': True is no token id"),
        (("token_ids", 2), 1.5, "token_ids': 1.5 is no token id"),
        (("token_ids", 2), -1, "token_ids': -1 is no token id"),
        (("token_ids", 2), 2**31, "token_ids': 2147483648 is no token id"),
        (("token_ids", 2), 10**30, "token_ids': (an integer past int64|1e.30) is no token id"),
        (("token_ids", 2), 7, "logprobs': token 2 is 124, but 7 in token_ids"),
        (("token_ids",), [21], "logprobs': 6 logprobs of 1 tokens"),
        (("sampling_mask",), 3, "sampling_mask': it is int"),
        (("sampling_mask", 1), 3, "sampling_mask/1': it is no list"),
        (("sampling_mask", 1, 0), None, "sampling_mask': None is no token id"),
        (("sampling_mask",), [[1]], "sampling_mask': 1 rows for 6 sampled tokens"),
        (("logprobs",), [], "logprobs': it is list"),
        (("logprobs",), {"a": 1}, "logprobs': its members are 'a', no logprobs"),
        (("logprobs", "content"), {}, "logprobs/content': it is dict"),
        (("logprobs", "content", 1), None, "content/1': it has no logprob"),
        (("logprobs", "content", 1, "logprob"), "x", "content': 'x' is no logprob"),
        (("logprobs", "content", 1, "token_id"), "x", "content/1': None is no token_id:N"),
        (("logprobs", "content", 1, "top_logprobs"), 4, "content/1/top_logprobs': it is int"),
        (("weight_versions",), {}, "weight_versions': it is dict"),
        (("weight_versions", 0), [], "weight_versions/0': a span must hold"),
        (("weight_versions", 0, "start"), 1, "weight_versions/0': tokens 1 to 6 of 6 do not"),
        (("weight_versions", 0, "end"), 7, "weight_versions/0': tokens 0 to 7 of 6 do not"),
        (("index",), "0", "/choices/0': index is '0'"),
        (("finish_reason",), 3, "/choices/0': finish_reason is 3"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_a_server_writes_is_refused_by_name(place, value, message):
    response = copy.deepcopy(RECORDED["generate"]["response"])
    holder = response["choices"][0]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    for form in FORMS if value != 10**30 else ("plain",):  # that is packed by no one
        with pytest.raises(WireFormatError, match=message):
            read_reply(body_of(response, form))


@pytest.mark.parametrize(
    "key", ["index", "finish_reason", "stop_reason", "token_ids", "sampling_mask", "logprobs"]
)
def test_a_field_nested_as_deep_as_json_may_be_is_refused_by_name(key):
    pytest.importorskip("orjson")  # the standard library does not parse what is that deep
    deep = b"[" * 1015 + b"]" * 1015
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", key: "deep"}
    body = json.dumps({"choices": [choice]}).encode().replace(b'"deep"', deep)
    with pytest.raises(WireFormatError, match="field '/choices/0"):
        read_reply(body, prompt_ids=[1], routes=False)
    if key not in ("finish_reason", "stop_reason"):  # the last chunk's are read with the whole
        with pytest.raises(WireFormatError, match="field '/choices/0"):
            ReplyJoiner().add(load_reply(body))
    with pytest.raises(WireFormatError, match="error: a list that is nested too deeply"):
        read_reply(b'{"error":' + deep + b"}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["a"] * 6}, "tokens/0': 'a' is no token_id:N; send"),
        ({"tokens": ["token_id:-1"] * 6}, "'token_id:-1' is no token_id:N"),
        ({"tokens": ["token_id:" + "9" * 30] * 6}, "is no token_id:N"),
        ({"tokens": ["token_id:1"]}, "6 token_logprobs of 1 tokens"),
        ({"tokens": None}, "tokens and token_logprobs must be lists"),
        ({"top_logprobs": [None]}, "top_logprobs must be a list of one entry a token"),
        ({"top_logprobs": [3] * 6}, "top_logprobs/0': it is int"),
        ({"top_logprobs": [{"hello": -1.0}] * 6}, "top_logprobs/0': 'hello' is no token_id:N"),
    ],
)  # fmt: skip
def test_completions_need_ids_as_numbers(change, message):
    """Tokens as text collapse: several ids decode to the same string."""
    response = copy.deepcopy(RECORDED["completions"]["response"])
    response["choices"][0]["logprobs"].update(change)
    for form in FORMS:
        with pytest.raises(WireFormatError, match=message):
            read_reply(body_of(response, form), support="logprobs")


def test_what_is_not_there_is_refused_by_name_with_what_to_ask():
    generate = RECORDED["generate"]["response"]

    def lacking(endpoint: str, *keys: str) -> bytes:
        response = copy.deepcopy(RECORDED[endpoint]["response"])
        for key in keys:
            response["choices"][0].pop(key, None)
            response.pop(key, None)
        return body_of(response, "plain")

    for keywords, body, message in (
        ({}, lacking("generate", "routed_experts"), "routed_experts': there are none: .*streamed"),
        ({}, lacking("chat"), "sampling_mask': there is none: .*completions or chat"),
        ({"support": "logprobs"}, lacking("completions", "logprobs"), "logprobs': there are none"),
        ({}, lacking("generate", "token_ids"), "no token ids; send .return_token_ids"),
        (
            {},
            lacking("generate", "prompt_token_ids"),
            "/prompt_token_ids': the prompt's ids",
        ),
        ({"prompt_ids": [1]}, body_of(generate, "plain"), "20 ids are not the 1 that were sent"),
    ):
        with pytest.raises(WireFormatError, match=message):
            read_reply(body, **keywords)
    with pytest.raises(ValueError, match="read_reply: support must be"):
        read_reply(b"{}", support="all")
    # an aborted request that no token came of has none of it, rightly
    response = copy.deepcopy(generate)
    response["choices"][0].update(
        token_ids=[], routed_experts=None, sampling_mask=None, logprobs=None, weight_versions=None,
        finish_reason="abort",
    )  # fmt: skip
    [rollout] = read_reply(body_of(response, "plain"))
    assert (rollout.response_ids.size, rollout.routes) == (0, None)


def test_a_damaged_packed_reply_is_transient_and_one_that_was_made_wrong_is_permanent():
    response = RECORDED["generate"]["response"]
    for form in ("json", "frames"):
        body = body_of(response, form)
        for end in (len(body) - 1, len(body) // 2, 40):
            with pytest.raises(TransientWireError):
                read_reply(body[:end])
        middle = bytearray(body)
        middle[len(body) - 300] ^= 1
        with pytest.raises(TransientWireError):
            read_reply(bytes(middle))
    packed = pack_reply(response, max_bytes=2**30)
    for key, value, message in (
        ("token_ids", WireArray(np.zeros((6, 1), np.int32)), "must be integers"),
        ("token_ids", WireArray(np.array([0.5])), "must be integers"),
        ("token_ids", WireArray(np.array([-3] * 6)), "-3 is no token id"),
        ("token_ids", WireArray(np.array([2**40] * 6)), "1099511627776 is no token id"),
        ("routed_experts", WireArray(np.zeros((25, 4, 2), np.float32)), "must be integers"),
        ("sampling_mask", {"token_ids": WireArray(np.zeros(3, np.int32))}, "must hold the arrays"),
        ("sampling_mask", {"token_ids": WireArray(np.zeros(3, np.int32)),
                           "offsets": WireArray(np.array([0, 2, 1, 3]))}, "not rise from 0 to 3"),
        ("sampling_mask", {"token_ids": WireArray(np.zeros(3, np.int32)),
                           "offsets": WireArray(np.array([0, 4]))}, "do not rise from 0 to 3"),
    ):  # fmt: skip
        tree = {**packed, "choices": [{**packed["choices"][0], key: value}]}
        with pytest.raises(WireFormatError, match=message):
            read_reply(encode_json(tree))
    logprobs = packed["choices"][0]["logprobs"]
    for key, value, message in (
        ("logprobs", WireArray(np.zeros(6, np.int32)), "logprobs/logprobs': it must be floats"),
        ("top_logprobs", WireArray(np.zeros(6, np.float32)), "must be floats .120., got"),
        ("offsets", WireArray(np.array([0, 120])), "1 rows for 6 tokens"),
    ):
        changed = {**packed["choices"][0], "logprobs": {**logprobs, key: value}}
        with pytest.raises(WireFormatError, match=message):
            read_reply(encode_json({**packed, "choices": [changed]}))


# --- trees as frames ------------------------------------------------------------------------------


def test_a_tree_comes_back_from_a_frame_with_its_arrays_in_their_places():
    array, start = np.arange(6, dtype=np.int16).reshape(3, 2), WireArray(np.ones(2), 5)
    tree = {"a": [1, {"b/c~": array}, None], "text": "json", "json": start, "n": {"": array}}
    fields = split_tree(tree)
    assert list(fields) == ["json", "/a/1/b~1c~0", "/json", "/n/"]
    again = join_tree(decode_frame(encode_frame(fields)).fields)
    assert list(again) == list(tree)
    assert again["a"][0] == 1
    assert np.array_equal(again["a"][1]["b/c~"].values, array)
    assert again["json"].start == 5
    assert np.array_equal(again["n"][""].values, array)
    assert join_tree(decode_frame(encode_frame(split_tree(None))).fields) is None
    with pytest.raises(ValueError, match=r"split_tree: a key at /a must be a string: 3"):
        split_tree({"a": {3: 4}})
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"nested too deeply|not JSON"):
        split_tree(deep)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (None, "/a", "field 'json': there is no text"),
        (b'{"a": ', "/a", "field 'json': it is not JSON"),
        (b'{"a": 1}', "/a", "field '/a': the text has no null at this place"),
        (b'{"a": null}', "/b", "no null"),
        (b'{"a": null}', "a", "no null"),
        (b'{"a": null}', "", "no null"),
        (b"[null]", "/00", "no null"),
        (b"[null]", "/-1", "no null"),
        (b"[null]", "/1", "no null"),
        (b"[null]", "/0/0", "no null"),
        (b'{"~2": null}', "/~2", "no null"),
        (b'"text"', "/0", "no null"),
    ],
)
def test_a_frame_that_is_no_tree_is_refused(text, place, message):
    fields = {place: WireArray(np.zeros(1))}
    if text is not None:
        fields["json"] = WireArray(np.frombuffer(text, np.uint8))
    with pytest.raises(WireFormatError, match=message):
        join_tree(fields)
    with pytest.raises(WireFormatError, match="above max_json_bytes=3"):
        join_tree({"json": WireArray(np.zeros(4, np.uint8))}, limits=WireLimits(max_json_bytes=3))


def test_a_body_without_our_arrays_is_any_json():
    assert decode_json(b'{"choices": [1, null]}') == {"choices": [1, None]}
    assert load_reply(bytearray(b"[1]")) == [1]
