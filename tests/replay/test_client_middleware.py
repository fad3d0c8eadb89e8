"""The middleware under uvicorn and the proxy under aiohttp, in front of recorded replies of vLLM.

Oracle: the recorded bytes; what is read of them with and without either must be the same.
"""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import aiohttp
import uvicorn

from packhorse.packed.wire import FrameReader, decode_frame, decode_json
from packhorse.packed.wire_tree import join_tree
from packhorse.replay import middleware as module
from packhorse.replay.client import RetryPolicy, RolloutClient, ServerError
from packhorse.replay.middleware import (
    FRAMES_TYPE,
    JSON_TYPE,
    EventPacker,
    Form,
    PackedReplies,
    asked_form,
)
from packhorse.replay.proxy import make_proxy
from packhorse.replay.vllm_http import read_reply

RECORDED = json.loads(
    Path(__file__).parents[1].joinpath("data/vllm_http_0.32.0.json").read_text("utf-8")
)
BODIES = {
    f"/{name}": json.dumps(RECORDED[name]["response"]).encode()
    for name in ("completions", "chat", "generate")
}
EVENTS = RECORDED["generate_stream"]["response_sse"].encode()
PROMPT = RECORDED["generate"]["request"]["token_ids"]
SAMPLING = {"temperature": 1.0, "top_k": 20}
LARGE = json.dumps({"choices": [{"token_ids": list(range(90_000))}]}).encode()


class App:
    """An ASGI application that answers as was recorded, in pieces, and notes what it is asked."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.left = threading.Event()  # a client went away

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        path = scope["path"]
        status, kind, extra = 200, b"application/json", []
        if path == "/inference/v1/generate":
            path = "/stream" if json.loads(body).get("stream") else "/generate"
        answer = BODIES.get(path, b"")
        if path == "/stream":
            answer, kind = EVENTS, b"text/event-stream; charset=utf-8"
        elif path == "/wait":
            answer, kind = EVENTS[:40], b"text/event-stream"
        elif path == "/zip":
            answer, extra = gzip.compress(BODIES["/generate"]), [(b"content-encoding", b"gzip")]
        elif path == "/error":
            status, answer = 400, b'{"error": {"message": "no"}}'
        elif path == "/text":
            kind, answer = b"text/plain", b"plain text"
        elif path == "/broken":
            answer = b'{"choices": [{"token_ids": [1'
        elif path == "/large":
            answer = LARGE
        headers = [(b"content-type", kind), (b"x-other", b"kept"), *extra]
        if kind.startswith(b"application"):
            headers.append((b"content-length", str(len(answer)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for begin in range(0, len(answer), 700):
            piece = answer[begin : begin + 700]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if path == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The address of an ASGI application under uvicorn."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def proxied(upstream: str, **bounds: int) -> AsyncIterator[str]:
    from aiohttp import web

    runner = web.AppRunner(make_proxy(upstream, **bounds), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def run(way: str, use: Callable[[App, str, Any], Awaitable[None]], **bounds: int) -> None:
    """``use`` with the address of the recorded server through the middleware or the proxy."""

    async def main() -> None:
        app = App()
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            if way == "middleware":
                async with served(PackedReplies(app, **bounds)) as url:
                    await use(app, url, session)
            else:
                async with served(app) as upstream, proxied(upstream, **bounds) as url:
                    await use(app, url, session)

    asyncio.run(asyncio.wait_for(main(), 60))


WAYS = pytest.mark.parametrize("way", ["middleware", "proxy"])


async def ask(session: Any, url: str, accept: str, body: bytes = b"{}") -> tuple[Any, bytes]:
    async with session.post(url, data=body, headers={"Accept": accept}) as reply:
        return reply, await reply.read()


def alike(one: Any, other: Any) -> None:
    for rollout, again in zip(one, other, strict=True):
        for name in vars(rollout):
            first, second = getattr(rollout, name), getattr(again, name)
            if isinstance(first, np.ndarray):
                assert (first.dtype, first.tobytes()) == (second.dtype, second.tobytes()), name
            elif name == "support":
                assert [part.tobytes() for part in first] == [part.tobytes() for part in second]
            else:
                assert first == second, name


@WAYS
def test_a_reply_is_packed_in_the_form_that_is_asked_for_and_holds_the_same(way):
    async def use(app: App, url: str, session: Any) -> None:
        for path, body in BODIES.items():
            support = "mask" if path == "/generate" else "logprobs"
            expected = read_reply(body, support=support)
            for accept, kind, load in (
                (JSON_TYPE, JSON_TYPE, decode_json),
                (FRAMES_TYPE, FRAMES_TYPE, lambda data: join_tree(decode_frame(data).fields)),
                (f"text/html;q=0.4, {FRAMES_TYPE.upper()}; q=1", FRAMES_TYPE,
                 lambda data: join_tree(decode_frame(data).fields)),
            ):  # fmt: skip
                reply, data = await ask(session, url + path, accept)
                assert reply.headers["Content-Type"] == kind
                assert reply.headers["Content-Length"] == str(len(data))
                assert reply.headers["Vary"].lower() == "accept"
                assert reply.headers["X-Other"] == "kept"
                assert b"k05VTVBZ" not in data
                alike(read_reply(load(data), support=support), expected)

    run(way, use)


@WAYS
def test_other_requests_and_other_replies_pass_byte_for_byte(way):
    async def use(app: App, url: str, session: Any) -> None:
        for accept in ("*/*", "application/json", f"{JSON_TYPE}x", f"x{FRAMES_TYPE}"):
            reply, data = await ask(session, f"{url}/generate", accept, b'{"prompt": [1]}')
            assert (reply.headers["Content-Type"], data) == (
                "application/json",
                BODIES["/generate"],
            )
            assert "Vary" not in reply.headers
            assert app.bodies[-1] == b'{"prompt": [1]}'
            assert app.headers[-1][b"accept"].decode() == accept
        for path, status, kind, expected in (
            ("/error", 400, "application/json", b'{"error": {"message": "no"}}'),
            ("/text", 200, "text/plain", b"plain text"),
            ("/broken", 200, "application/json", b'{"choices": [{"token_ids": [1'),
            ("/zip", 200, "application/json", gzip.compress(BODIES["/generate"])),
        ):
            reply, data = await ask(session, url + path, FRAMES_TYPE)
            assert (reply.status, reply.headers["Content-Type"]) == (status, kind)
            if path == "/zip":
                assert gzip.decompress(data) == gzip.decompress(expected)
            else:
                assert data == expected

    run(way, use)


@WAYS
def test_a_reply_above_the_bound_passes_as_it_is(way):
    async def use(app: App, url: str, session: Any) -> None:
        reply, data = await ask(session, f"{url}/large", JSON_TYPE)
        assert (reply.headers["Content-Type"], data) == ("application/json", LARGE)
        reply, data = await ask(session, f"{url}/generate", JSON_TYPE)
        assert reply.headers["Content-Type"] == JSON_TYPE

    run(way, use, max_body_bytes=100_000)
    run(way, use, max_held_bytes=100_000)


@WAYS
def test_a_large_reply_is_packed_too(way):
    async def use(app: App, url: str, session: Any) -> None:
        reply, data = await ask(session, f"{url}/large", FRAMES_TYPE)
        assert reply.headers["Content-Type"] == FRAMES_TYPE
        ids = join_tree(decode_frame(data).fields)["choices"][0]["token_ids"].values
        assert (ids.dtype, ids.tolist()) == (np.int32, list(range(90_000)))

    run(way, use)


@WAYS
def test_an_evaluation_gets_no_routes_and_no_masks(way):
    async def use(app: App, url: str, session: Any) -> None:
        for kind in (JSON_TYPE, FRAMES_TYPE):
            _, data = await ask(session, f"{url}/generate", f"{kind}; fields=none")
            tree = decode_json(data) if kind == JSON_TYPE else join_tree(decode_frame(data).fields)
            choice = tree["choices"][0]
            assert (choice["routed_experts"], choice["sampling_mask"]) == (None, None)
            expected = RECORDED["generate"]["response"]["choices"][0]["token_ids"]
            assert choice["token_ids"].values.tolist() == expected

    run(way, use)


@WAYS
def test_a_stream_is_packed_event_by_event(way):
    async def use(app: App, url: str, session: Any) -> None:
        reply, data = await ask(session, f"{url}/stream", JSON_TYPE)
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        assert data.count(b"\n\n") == EVENTS.count(b"\n\n") == 4
        assert data.endswith(b"data: [DONE]\n\n")
        assert b"k05VTVBZ" not in data
        reply, data = await ask(session, f"{url}/stream", FRAMES_TYPE)
        assert reply.headers["Content-Type"] == FRAMES_TYPE
        reader = FrameReader()
        frames = reader.feed(data)
        reader.close()
        assert [frame.last for frame in frames] == [False, False, False, True]
        reply, data = await ask(session, f"{url}/stream", "text/event-stream")
        assert data == EVENTS

    run(way, use)


@WAYS
@pytest.mark.parametrize("form", ["json", "frames", "plain"])
def test_the_client_reads_the_same_in_every_form(way, form):
    async def use(app: App, url: str, session: Any) -> None:
        async with RolloutClient(url, form=form) as client:
            got = await client.generate(PROMPT, SAMPLING)
            alike(got, read_reply(BODIES["/generate"]))
            async with client.stream(PROMPT, SAMPLING) as stream:
                seen = [ids.tolist() async for _, ids in stream]
            assert seen == [[21], [291], [124]]

    run(way, use)


@WAYS
def test_a_client_that_leaves_ends_the_request_at_the_server(way):
    async def use(app: App, url: str, session: Any) -> None:
        reply = await session.post(f"{url}/wait", data=b"", headers={"Accept": JSON_TYPE})
        assert not app.left.is_set()
        reply.close()
        for _ in range(400):
            await asyncio.sleep(0.005)
            if app.left.is_set():
                break
        assert app.left.is_set()

    run(way, use)


def test_the_proxy_says_when_there_is_no_upstream():
    async def main() -> None:
        async with proxied("http://127.0.0.1:9") as url:
            retry = RetryPolicy(attempts=2, first_s=0.001)
            async with RolloutClient(url, retry=retry) as client:
                with pytest.raises(ServerError, match="status 502: the upstream cannot be reached"):
                    await client.generate(PROMPT, SAMPLING)
                assert client.num_retries == 1

    asyncio.run(main())
    with pytest.raises(ValueError, match="make_proxy: upstream must be http://host:port"):
        make_proxy("127.0.0.1:8000")


def test_the_proxy_hands_on_what_is_asked_and_a_reply_that_the_upstream_cuts_is_no_reply():
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        kind = b"text/plain" if b"/plain" in head else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nContent-Type: " + kind)
        writer.write(b"\r\n\r\n" + b'{"choices": [')
        await writer.drain()
        writer.close()

    heads: list[bytes] = []

    async def main() -> None:
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with proxied(f"http://127.0.0.1:{port}") as url, aiohttp.ClientSession() as session:
            headers = {"Accept": JSON_TYPE, "X-One": "1", "Connection": "close, X-One"}
            async with session.get(f"{url}/a%2Fb?c=%20d", headers=headers) as reply:
                assert (reply.status, "cut short" in await reply.text()) == (502, True)
            async with session.get(f"{url}/plain") as reply:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await reply.read()
        server.close()

    asyncio.run(main())
    assert heads[0].startswith(b"GET /a%2Fb?c=%20d HTTP/1.1\r\n")
    assert b"x-one" not in heads[0].lower()


# --- parts ----------------------------------------------------------------------------------------


def test_accept_names_the_form():
    assert asked_form([]) is None
    assert asked_form(["*/*", "application/json"]) is None
    assert asked_form(["application/json", f"a/b, {JSON_TYPE};q=0.5"]) == Form(JSON_TYPE)
    assert asked_form([f"{JSON_TYPE};q=0, {FRAMES_TYPE} ; Q=0.000, */*"]) is None
    assert asked_form([f"{FRAMES_TYPE};q=0.0, {JSON_TYPE};q=0.001"]) == Form(JSON_TYPE)
    assert asked_form([f"{FRAMES_TYPE} ; Fields=None, {JSON_TYPE}"]) == Form(FRAMES_TYPE, False)


@pytest.mark.parametrize("size", [1, 7, 333, 100_000])
def test_events_are_packed_however_they_arrive(size):
    stream = EVENTS.replace(b"\n\n", b"\r\n\r\n", 1)
    stream = b": a comment\n\n" + b"event: chunk\n" + stream
    for kind in (JSON_TYPE, FRAMES_TYPE):
        packer, whole = EventPacker(Form(kind)), EventPacker(Form(kind))
        expected = whole.feed(stream) + whole.close()
        pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
        assert b"".join(map(packer.feed, pieces)) + packer.close() == expected
        assert (b": a comment" in expected, b"event: chunk" in expected) == (kind == JSON_TYPE,) * 2


def test_an_event_of_several_data_lines_is_one_text():
    event = b'data: {"choices":\r\ndata: [{"token_ids": [1, 2]}]}\r\n\r\n'
    frame = decode_frame(EventPacker(Form(FRAMES_TYPE)).feed(event))
    [choice] = join_tree(frame.fields)["choices"]
    assert choice["token_ids"].values.tolist() == [1, 2]
    packed = EventPacker(Form(JSON_TYPE)).feed(event)
    assert packed.startswith(b"data: {")
    assert packed.count(b"data:") == 1


def test_what_is_left_of_a_stream_that_is_cut_passes_in_events_and_not_in_frames():
    for kind, rest in ((JSON_TYPE, b"data: {"), (FRAMES_TYPE, b"")):
        packer = EventPacker(Form(kind))
        assert packer.feed(b"data: {") == b""
        assert packer.close() == rest


def test_an_event_above_the_bound_passes_as_it_is_or_ends_the_frames_with_an_error():
    stream = b"data: " + b"x" * 5000 + b"\n\ndata: [DONE]\n\n"
    packer = EventPacker(Form(JSON_TYPE), max_body_bytes=1000)
    assert b"".join(packer.feed(stream[i : i + 900]) for i in range(0, 6000, 900)) == stream
    packer = EventPacker(Form(FRAMES_TYPE), max_body_bytes=1000)
    data = b"".join(packer.feed(stream[i : i + 900]) for i in range(0, 6000, 900))
    frame = decode_frame(data)
    assert frame.last
    assert (
        join_tree(frame.fields)["error"]["message"] == "an event of the stream is above 1000 bytes"
    )
    assert module.pack_body(Form(JSON_TYPE), b"{") is None
