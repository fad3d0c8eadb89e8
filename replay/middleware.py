"""Packed replies from a vLLM server: arrays in the place of base64 of ``.npy`` and of id lists.

    python -m vllm.entrypoints.openai.api_server … \\
        --middleware packhorse.replay.middleware.PackedReplies

An ASGI middleware; ``packhorse.replay.proxy`` does the same in front of a server. A request asks
for a form by its header Accept, and gets what the server wrote without it:

    application/vnd.packhorse+json      the envelopes of ``encode_json``
    application/vnd.packhorse.frames    one frame (``split_tree``); of a stream one an event

With the parameter ``fields=none`` (an evaluation) routes and sampling masks are left out. Which
fields are packed, and how: ``client_fields``. Only JSON and event streams of status 200 are
touched, and no request. A reply is held back up to a bound, and passes as it is beyond it; the
form of a reply is its Content-Type.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, NamedTuple

from packhorse.packed.wire_frames import encode_frame
from packhorse.packed.wire_json import encode_json, load_json
from packhorse.packed.wire_tree import split_tree
from packhorse.replay.client_fields import pack_reply

JSON_TYPE: Final = "application/vnd.packhorse+json"
FRAMES_TYPE: Final = "application/vnd.packhorse.frames"
MAX_BODY_BYTES: Final = 2**29  # of one reply, or of one event of a stream
MAX_HELD_BYTES: Final = 2**31  # of all replies that are held back at a time
#: from here on a reply is packed in a thread, and other requests go on
_THREAD_BYTES: Final = 1 << 17
_DONE: Final = b"[DONE]"
_ZERO_WEIGHT: Final = re.compile(r"q=0(?:\.0{0,3})?")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Form(NamedTuple):
    """What a request asks for."""

    content_type: str  # JSON_TYPE or FRAMES_TYPE
    keep_fields: bool = True  # False: no routes, no masks


def asked_form(accept: Iterable[str]) -> Form | None:
    """The first of our types in the values of Accept that is not of weight 0 (RFC 9110, 12.4.2:
    "not acceptable"); None where there is none."""
    for value in accept:
        for part in value.split(","):
            kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
            refused = any(_ZERO_WEIGHT.fullmatch(piece) for piece in parameters)
            if kind in (JSON_TYPE, FRAMES_TYPE) and not refused:
                return Form(kind, "fields=none" not in parameters)
    return None


def reply_kind(status: int, content_type: str | None, encoding: str | None) -> str | None:
    """ "body" or "events" of a reply that can be packed; None of any other."""
    if status != 200 or (encoding or "identity").strip().lower() != "identity":
        return None
    kind = (content_type or "").partition(";")[0].strip().lower()
    return {"application/json": "body", "text/event-stream": "events"}.get(kind)


def pack_body(form: Form, body: bytes) -> bytes | None:
    """A whole reply in the form; None where it cannot be: it then passes as it is."""
    try:
        tree = pack_reply(load_json(body), max_bytes=MAX_BODY_BYTES, keep_fields=form.keep_fields)
        if form.content_type == FRAMES_TYPE:
            return encode_frame(split_tree(tree))
        return encode_json(tree)
    except (ValueError, TypeError, RecursionError):
        return None


def next_event(rest: bytearray, searched: int = 0) -> bytes | None:
    """Take the next whole event off ``rest``, with the empty line that ends it; None where it has
    not come yet. Its first ``searched`` bytes hold no end."""
    begin = max(0, searched - 3)
    ends = [
        found + len(end) for end in (b"\n\n", b"\r\n\r\n") if (found := rest.find(end, begin)) >= 0
    ]
    if not ends:
        return None
    event = bytes(rest[: min(ends)])
    del rest[: min(ends)]
    return event


class EventPacker:
    """The events of a stream in the form, as they arrive in pieces of any size."""

    def __init__(self, form: Form, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._form = form
        self._frames = form.content_type == FRAMES_TYPE
        self._max_body_bytes = max_body_bytes
        self._rest = bytearray()
        self._searched = 0
        self._ended = False  # nothing more is packed

    @property
    def content_type(self) -> str:
        return FRAMES_TYPE if self._frames else "text/event-stream; charset=utf-8"

    def feed(self, piece: bytes) -> bytes:
        """What ``piece`` completes."""
        if self._ended:
            return b"" if self._frames else piece
        self._rest += piece
        packed = []
        while not self._ended and (event := self._next_event()) is not None:
            packed.append(self._pack_event(event))
        if not self._ended and len(self._rest) > self._max_body_bytes:
            self._ended = True
            if self._frames:
                problem = f"an event of the stream is above {self._max_body_bytes} bytes"
                packed.append(self._frame({"error": {"message": problem, "code": 500}}, last=True))
        if self._ended:
            if not self._frames:
                packed.append(bytes(self._rest))
            self._rest.clear()
        return b"".join(packed)

    def close(self) -> bytes:
        """What is left when the stream has ended: as it is in a stream of events, nothing in one of
        frames, which so lacks its last one."""
        rest = b"" if self._frames else bytes(self._rest)
        self._rest.clear()
        return rest

    def _next_event(self) -> bytes | None:
        event = next_event(self._rest, self._searched)
        self._searched = len(self._rest) if event is None else 0
        return event

    def _pack_event(self, event: bytes) -> bytes:
        lines = event.splitlines()
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data:  # a comment
            return b"" if self._frames else event
        if len(data) > 1:  # one text in several lines, which JSON is wherever it is broken
            data = [b"\n".join(data)]
        if data[0] == _DONE:
            self._ended = True
            return encode_frame({}) if self._frames else event
        if not self._frames:
            packed = pack_body(self._form, data[0])
            if packed is None:
                return event
            others = [line for line in lines if line and not line.startswith(b"data:")]
            return b"\n".join([*others, b"data: " + packed, b"", b""])
        try:
            tree = load_json(data[0])
            tree = pack_reply(
                tree, max_bytes=self._max_body_bytes, keep_fields=self._form.keep_fields
            )
        except (ValueError, RecursionError):
            tree = {"error": {"message": "an event of the stream is not JSON", "code": 502}}
        return self._frame(tree, last=False)

    @staticmethod
    def _frame(tree: Any, *, last: bool) -> bytes:
        return encode_frame(split_tree(tree), last=last)


class PackedReplies:
    """The middleware: an ASGI application around another.

    Args:
        app: the server's application.
        max_body_bytes: of a reply or an event; a larger one passes as it is.
        max_held_bytes: of all replies that are held back at a time; while it is reached others pass
            as they are.
    """

    def __init__(
        self,
        app: App,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        form = None
        if scope["type"] == "http":
            accept = [
                value.decode("latin-1")
                for name, value in scope["headers"]
                if name.lower() == b"accept"
            ]
            form = asked_form(accept)
        if form is None:
            await self._app(scope, receive, send)
            return
        reply = _Reply(self, form, send)
        try:
            await self._app(scope, receive, reply.send)
        finally:
            reply.release()

    def hold(self, num_bytes: int) -> bool:
        """Whether there is room for so many bytes more; then they are counted."""
        if self._held_bytes + num_bytes > self._max_held_bytes:
            return False
        self._held_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes

    @property
    def max_body_bytes(self) -> int:
        return self._max_body_bytes


class _Reply:
    """One reply on its way out."""

    def __init__(self, owner: PackedReplies, form: Form, send: Send) -> None:
        self._owner, self._form, self._send = owner, form, send
        self._start: Message | None = None  # held back
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._events: EventPacker | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] != "http.response.body":
            await self._pass()
            await self._send(message)
        elif self._events is not None:
            await self._send_events(message)
        elif self._start is None:
            await self._send(message)
        else:
            await self._hold(message)

    async def _begin(self, message: Message) -> None:
        headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", ())}

        def header(name: bytes) -> str | None:
            value = headers.get(name)
            return None if value is None else value.decode("latin-1")

        kind = reply_kind(message["status"], header(b"content-type"), header(b"content-encoding"))
        if kind == "body":
            self._start = message
            return
        if kind == "events":
            self._events = EventPacker(self._form, max_body_bytes=self._owner.max_body_bytes)
            message = _with_type(message, self._events.content_type, None)
        await self._send(message)

    async def _send_events(self, message: Message) -> None:
        assert self._events is not None
        piece, more = message.get("body", b""), message.get("more_body", False)
        if len(piece) < _THREAD_BYTES:
            packed = self._events.feed(piece)
        else:
            packed = await asyncio.to_thread(self._events.feed, piece)
        if not more:
            packed += self._events.close()
        if packed or not more:
            await self._send({**message, "body": packed})

    async def _hold(self, message: Message) -> None:
        piece, more = message.get("body", b""), message.get("more_body", False)
        fits = self._held_bytes + len(piece) <= self._owner.max_body_bytes
        if not fits or not self._owner.hold(len(piece)):
            await self._pass()
            await self._send(message)
            return
        self._held_bytes += len(piece)
        self._parts.append(piece)
        if more:
            return
        body = b"".join(self._parts)
        if len(body) < _THREAD_BYTES:
            packed = pack_body(self._form, body)
        else:
            packed = await asyncio.to_thread(pack_body, self._form, body)
        if packed is None:
            await self._pass(more=False)
            return
        start, self._start = self._start, None
        assert start is not None
        self.release()
        del body
        await self._send(_with_type(start, self._form.content_type, len(packed)))
        await self._send({**message, "body": packed})

    async def _pass(self, *, more: bool = True) -> None:
        """What was held back, as it is."""
        if self._start is None:
            return
        start, self._start = self._start, None
        body = b"".join(self._parts)
        self.release()
        await self._send(start)
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def release(self) -> None:
        self._parts.clear()
        self._owner.release(self._held_bytes)
        self._held_bytes = 0


def _with_type(message: Message, content_type: str, length: int | None) -> Message:
    """The start of a reply with another content type and length, and that it depends on Accept."""
    dropped = (b"content-type", b"content-length")
    headers: Headers = [
        (name, value) for name, value in message.get("headers", ()) if name.lower() not in dropped
    ]
    headers += [(b"content-type", content_type.encode("latin-1")), (b"vary", b"accept")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {**message, "headers": headers}
