"""The middleware's work in front of a server that cannot load it.

    python -m packhorse.replay.proxy --upstream http://127.0.0.1:8000 --port 8001

Every request goes to the upstream as it is, its body in pieces; every reply comes back as it is,
in pieces, but those that a request asked to be packed (``middleware``). A client that goes away
ends the request upstream. Needs ``aiohttp`` (``packhorse[client]``).
"""

import argparse
import asyncio
from typing import Any, Final

from packhorse.replay.middleware import (
    MAX_BODY_BYTES,
    MAX_HELD_BYTES,
    EventPacker,
    Form,
    asked_form,
    pack_body,
    reply_kind,
)

#: of one connection, not of what lies behind (RFC 9110, 7.6.1); and what aiohttp writes itself
_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_CONNECT_S: Final = 30.0


def make_proxy(
    upstream: str,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_held_bytes: int = MAX_HELD_BYTES,
) -> Any:
    """An ``aiohttp.web.Application`` in front of ``upstream``, ``http://host:port``. Run it with
    ``handler_cancellation=True``, or requests go on when their client has left.

    Args:
        upstream: where requests go; their path is put behind it.
        max_body_bytes, max_held_bytes: as in ``PackedReplies``.

    Raises:
        ImportError: without ``aiohttp``.
        ValueError: ``upstream`` is no http address.
    """
    from aiohttp import ClientError, ClientSession, ClientTimeout, web

    if not upstream.startswith(("http://", "https://")):
        raise ValueError(f"make_proxy: upstream must be http://host:port, got {upstream!r}")
    key = web.AppKey("upstream", ClientSession)
    held = _Held(max_held_bytes)

    async def hold_session(app: Any) -> Any:
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with ClientSession(
            timeout=timeout, auto_decompress=False, cookie_jar=_no_cookies()
        ) as session:
            app[key] = session
            yield

    async def forward(request: Any) -> Any:
        # what aiohttp decompresses on arrival goes on as what it is then
        encoded = "Content-Encoding" in request.headers
        dropped = ("content-encoding", "content-length") if encoded else ()
        headers = _forwarded(request.headers, "host", *dropped)
        if not request.raw_path.startswith("/"):
            return web.Response(status=400, text="the request's target must be a path")
        url = upstream.rstrip("/") + request.raw_path
        asked = asked_form(request.headers.getall("Accept", ()))
        body = request.content if request.body_exists else None
        try:
            reply = await request.app[key].request(
                request.method, _as_is(url), headers=headers, data=body, allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )  # fmt: skip
        except asyncio.TimeoutError:
            return web.Response(status=504, text="the upstream does not answer")
        except (ClientError, OSError) as error:
            return web.Response(status=502, text=f"the upstream cannot be reached: {error}")
        try:
            return await _answer(request, reply, asked, held, max_body_bytes)
        finally:
            reply.close()  # of one that was not read to its end, the connection too

    app = web.Application(client_max_size=0)
    app.cleanup_ctx.append(hold_session)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


class _Held:
    """Bytes of replies that are held back."""

    def __init__(self, most: int) -> None:
        self._most, self._now = most, 0

    def take(self, num_bytes: int) -> bool:
        if self._now + num_bytes > self._most:
            return False
        self._now += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self._now -= num_bytes


def _forwarded(headers: Any, *dropped: str) -> Any:
    from multidict import CIMultiDict

    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    left = _HOP | named | set(dropped)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left)


def _no_cookies() -> Any:
    from aiohttp import DummyCookieJar

    return DummyCookieJar()


def _as_is(url: str) -> Any:
    from yarl import URL

    return URL(url, encoded=True)


async def _answer(
    request: Any, reply: Any, form: Form | None, held: _Held, max_body_bytes: int
) -> Any:
    from aiohttp import ClientError, web

    kind = None
    if form is not None:
        names = ("Content-Type", "Content-Encoding")
        kind = reply_kind(reply.status, *(reply.headers.get(name) for name in names))
    first: list[bytes] = []
    taken = 0
    try:
        if form is not None and kind == "body":
            try:
                async for piece in reply.content.iter_any():
                    first.append(piece)
                    if taken + len(piece) > max_body_bytes or not held.take(len(piece)):
                        break
                    taken += len(piece)
                else:
                    packed = await asyncio.to_thread(pack_body, form, b"".join(first))
                    if packed is not None:
                        headers = _retyped(reply.headers, form.content_type)
                        return web.Response(status=reply.status, headers=headers, body=packed)
            except (ClientError, OSError) as error:
                return web.Response(status=502, text=f"the upstream's reply is cut short: {error}")
        events = None
        headers = _forwarded(reply.headers)
        if form is not None and kind == "events":
            events = EventPacker(form, max_body_bytes=max_body_bytes)
            headers = _retyped(reply.headers, events.content_type)
        answer = web.StreamResponse(status=reply.status, reason=reply.reason, headers=headers)
        await answer.prepare(request)
        for piece in first:
            await answer.write(piece)
        first.clear()
        async for piece in reply.content.iter_any():
            if events is not None:
                piece = events.feed(piece)
            if piece:
                await answer.write(piece)
        if events is not None and (rest := events.close()):
            await answer.write(rest)
        await answer.write_eof()
        return answer
    finally:
        held.give_back(taken)


def _retyped(headers: Any, content_type: str) -> Any:
    """Those of a reply that is packed."""
    changed = _forwarded(headers, "content-type", "content-length")
    changed["Content-Type"] = content_type
    changed.add("Vary", "Accept")
    return changed


def main() -> None:
    from aiohttp import web

    parser = argparse.ArgumentParser(
        prog="python -m packhorse.replay.proxy",
        description="Packs the replies of a vLLM server to requests that ask for it.",
    )
    parser.add_argument("--upstream", required=True, help="http://host:port of the server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    args = parser.parse_args()
    web.run_app(
        make_proxy(args.upstream), host=args.host, port=args.port, handler_cancellation=True
    )


if __name__ == "__main__":
    main()
