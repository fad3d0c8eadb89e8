"""Fuzzing of what reads a server's replies and packs them; ``fuzz_wire`` calls it.

An input is a reply as it arrives (the server's JSON, or packed with its checksums put right), or a
stream of events. Found is whatever is no ``WireError``, or a reply that is read otherwise once it
is packed.
"""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

REPLY, PACKED, EVENTS = 0, 1, 2


def try_http(kind: int, message: bytes) -> None:
    if kind == EVENTS:
        try_events(message)
    else:
        try_reply(message, plain=kind == REPLY)


def limits() -> Any:
    from packhorse.packed.wire import WireLimits

    return WireLimits(max_bytes=1 << 17, max_header_bytes=1 << 16, max_json_bytes=1 << 17)


def try_reply(message: bytes, *, plain: bool) -> None:
    from packhorse.packed.wire import WireError
    from packhorse.replay.middleware import FRAMES_TYPE, JSON_TYPE, Form, pack_body
    from packhorse.replay.vllm_http import load_reply, read_choices, read_reply

    outcome = outcome_of(message)
    try:
        tree = load_reply(message, limits=limits())
        read_choices(tree, side_channels=False, limits=limits())
        read_reply(tree, limits=limits(), on_cut="mark")
    except WireError:
        pass
    except ValueError as error:
        if not str(error).startswith("make_rollout: "):
            raise
    if plain:
        for content_type in (JSON_TYPE, FRAMES_TYPE):
            packed = pack_body(Form(content_type), message)
            if packed is not None:
                again = outcome_of(packed)
                assert (again is None) == (outcome is None), (outcome, again)
                if outcome is not None and again is not None:
                    check_choices(again, outcome)


def outcome_of(message: bytes) -> Any:
    """The choices; None where they are refused."""
    from packhorse.packed.wire import WireError
    from packhorse.replay.vllm_http import load_reply, read_choices

    try:
        return read_choices(load_reply(message, limits=limits()), limits=limits())
    except WireError:
        return None


def check_choices(again: Any, choices: Any) -> None:
    assert len(again) == len(choices)
    for one, other in zip(again, choices, strict=True):
        for field in fields(one):
            check_same(getattr(one, field.name), getattr(other, field.name))


def check_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for part, its in zip(one, other, strict=True):
            check_same(part, its)
    elif isinstance(one, float):
        assert one == other or math.isnan(one) == math.isnan(other)
    else:
        assert one == other


def try_events(message: bytes) -> None:
    from packhorse.packed.wire import FrameReader, WireError
    from packhorse.packed.wire_tree import join_tree
    from packhorse.replay.middleware import FRAMES_TYPE, JSON_TYPE, EventPacker, Form, next_event
    from packhorse.replay.vllm_http import ReplyJoiner, load_reply, read_choices

    middle = len(message) // 3
    for content_type in (JSON_TYPE, FRAMES_TYPE):
        packer, whole = (EventPacker(Form(content_type), max_body_bytes=900) for _ in range(2))
        packed = packer.feed(message[:middle]) + packer.feed(message[middle:]) + packer.close()
        longest = max(map(len, message.replace(b"\r", b"").split(b"\n\n")), default=0)
        if longest < 900 - 4:  # else it depends on the pieces where packing ends
            assert packed == whole.feed(message) + whole.close()
        if content_type == FRAMES_TYPE:
            for frame in FrameReader().feed(packed):
                if frame.fields:
                    join_tree(frame.fields)
    joiner = ReplyJoiner(limits=limits())
    rest = bytearray(message)
    try:
        while (event := next_event(rest)) is not None:
            if event.startswith(b"data: "):
                joiner.add(load_reply(event[6:].strip(), limits=limits()))
        joiner.end()
        read_choices(joiner.finish(), limits=limits())
    except WireError:
        pass


def http_seeds() -> list[tuple[int, bytes]]:
    """(kind, message): replies that vLLM wrote, cut to a few tokens, plain and packed; a stream."""
    from packhorse.replay.middleware import FRAMES_TYPE, JSON_TYPE, Form, pack_body

    recorded = json.loads(
        Path(__file__).parents[1].joinpath("data/vllm_http_0.32.0.json").read_text("utf-8")
    )
    made: list[tuple[int, bytes]] = []
    for name in ("completions", "chat", "generate"):
        reply = recorded[name]["response"]
        for choice in reply["choices"]:
            cut_choice(choice)
        body = json.dumps(
            {key: reply[key] for key in ("choices", "usage", "prompt_token_ids") if key in reply}
        ).encode()
        made.append((REPLY, body))
        for content_type in (JSON_TYPE, FRAMES_TYPE):
            packed = pack_body(Form(content_type), body)
            assert packed is not None
            made.append((PACKED, packed))
    nested = json.dumps({"choices": [{"token_ids": [1], "routed_experts": [[[1, 2]], [[0, 3]]]}]})
    made.append((REPLY, nested.encode()))
    made.append((EVENTS, recorded["generate_stream"]["response_sse"].encode()))
    return made


def cut_choice(choice: dict[str, Any]) -> None:
    """Two candidates a token are enough."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        for entry in logprobs["content"]:
            entry["top_logprobs"] = entry["top_logprobs"][:2]
    else:
        logprobs["top_logprobs"] = [
            dict(list(entry.items())[:2]) for entry in logprobs["top_logprobs"]
        ]
