"""Requests to a server with retries: what is transient is asked again, a bounded number of times.

    transient    a connection that fails or is cut, a body that is short, a wrong checksum, a
                 timeout, status 408, 429, 502, 503, 504 (429 and 503 after their Retry-After)
    permanent    any other status, and a reply that arrived as it was sent and cannot be read

A request that is cancelled closes its connection: the server sees that and stops the work.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from packhorse.packed.wire_format import Buffer, TransientWireError, WireFormatError
from packhorse.packed.wire_json import dump_json, load_json
from packhorse.replay.vllm_http import error_text

T = TypeVar("T")

TRANSIENT_STATUS: Final = frozenset({408, 429, 502, 503, 504})
_ERROR_BYTES: Final = 1 << 16  # read of an error's text
#: from here on a body is decoded in a thread, and other requests go on
_THREAD_BYTES: Final = 1 << 17


class ServerError(RuntimeError):
    """The server answered with another status than 200; its text is in the message."""

    def __init__(self, message: str, status: int, text: str) -> None:
        super().__init__(message)
        self.status = status
        self.text = text


class ServerUnreachable(ConnectionError):
    """No answer, after all attempts: the connection failed, was cut, or timed out."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a request is sent, and how long is waited in between, in seconds.

    After attempt i: ``min(first_s * 2**i, most_s)``, up to a half more or less at random; a
    Retry-After of the server where it is longer, up to ``most_s``.
    """

    attempts: int = 5
    first_s: float = 0.25
    most_s: float = 8.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise ValueError(f"RetryPolicy: attempts must be at least 1, got {self.attempts!r}")
        if not 0 <= self.first_s <= self.most_s:
            raise ValueError(
                f"RetryPolicy: first_s must be in [0, most_s], got {self.first_s} and {self.most_s}"
            )

    def delay_s(self, attempt: int, retry_after_s: float) -> float:
        usual = min(self.first_s * 2.0 ** min(attempt, 60), self.most_s)
        return max(usual * random.uniform(0.5, 1.5), min(retry_after_s, self.most_s))


class _Transient(Exception):
    """An attempt that may be repeated; ``error`` is what is raised when none is left."""

    def __init__(self, error: Exception, retry_after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.retry_after_s = error, retry_after_s


class Transport:
    """Connections to one server. ``async with`` opens and closes them.

    Args:
        url: ``http://host:port``; paths are put behind it.
        retry: of each request.
        timeout_s: of one attempt, from sending to its last byte. None: none.
        max_concurrency: requests at a time; others wait.
        max_body_bytes: of one reply.
        headers: of every request (Authorization).
    """

    def __init__(
        self,
        url: str,
        *,
        retry: RetryPolicy,
        timeout_s: float | None,
        max_concurrency: int,
        max_body_bytes: int,
        headers: dict[str, str] | None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"RolloutClient: url must be http://host:port, got {url!r}")
        if type(max_concurrency) is not int or max_concurrency < 1:
            raise ValueError(
                f"RolloutClient: max_concurrency must be at least 1, got {max_concurrency!r}"
            )
        self._url = url.rstrip("/")
        self._retry = retry
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self._max_body_bytes = max_body_bytes
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        self._session: Any = None
        self.num_retries = 0  # of all requests so far

    @property
    def max_body_bytes(self) -> int:
        return self._max_body_bytes

    async def open(self) -> None:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=30.0),
                headers=self._headers,
            )

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def get(self, path: str, parse: Callable[[Buffer], T]) -> T:
        """``parse`` of the reply to a GET."""

        async def attempt() -> T:
            async with self._reply("GET", path, None, "application/json") as reply:
                body = await self._whole_body(reply)
            try:
                return parse(body)
            except TransientWireError as error:
                raise _Transient(error) from None

        return await self._repeat(attempt)

    async def post(
        self,
        path: str,
        payload: Any,
        *,
        accept: str,
        parse: Callable[[Buffer], T],
        in_slot: bool = True,
    ) -> T:
        """``parse`` of the reply to a POST of JSON. What ``parse`` raises as transient is asked
        again too.

        Raises:
            ServerError, ServerUnreachable, TransientWireError: permanent, or no attempt is left.
            WireFormatError, ValueError: of ``parse``, at once.
        """
        data = dump_json("RolloutClient", payload)

        async def attempt() -> T:
            async with self._reply("POST", path, data, accept) as reply:
                body = await self._whole_body(reply)
            try:
                if len(body) < _THREAD_BYTES:
                    return parse(body)
                return await asyncio.to_thread(parse, body)
            except TransientWireError as error:
                raise _Transient(error) from None

        return await self._repeat(attempt, in_slot=in_slot)

    @asynccontextmanager
    async def stream(self, path: str, payload: Any, *, accept: str) -> AsyncIterator[Any]:
        """The open reply to a POST of JSON. It is asked again only until it has begun; leaving
        closes the connection, which ends the work at the server."""
        data = dump_json("RolloutClient", payload)
        async with self._slots:

            async def attempt() -> Any:
                return await self._begin("POST", path, data, accept)

            reply = await self._repeat(attempt, in_slot=False)
            try:
                yield reply
            finally:
                reply.close()

    # --- one attempt ------------------------------------------------------------------------------

    async def _repeat(self, attempt: Callable[[], Awaitable[T]], *, in_slot: bool = True) -> T:
        last = self._retry.attempts - 1
        for number in range(last + 1):
            try:
                if not in_slot:
                    return await attempt()
                async with self._slots:
                    return await attempt()
            except _Transient as problem:
                if number == last:
                    raise problem.error from None
                delay_s = self._retry.delay_s(number, problem.retry_after_s)
            self.num_retries += 1
            await asyncio.sleep(delay_s)
        raise AssertionError

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, data: bytes | None, accept: str
    ) -> AsyncIterator[Any]:
        reply = await self._begin(method, path, data, accept)
        try:
            yield reply
        finally:
            # a connection whose reply was read to its end is kept, any other is closed
            reply.release()

    async def _begin(self, method: str, path: str, data: bytes | None, accept: str) -> Any:
        """A reply of status 200."""
        import aiohttp

        if self._session is None:
            raise RuntimeError("RolloutClient: open it first: async with RolloutClient(...)")
        headers = {"Accept": accept}
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            reply = await self._session.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False
            )
        except aiohttp.InvalidURL as error:
            raise ValueError(f"RolloutClient: {self._url}{path} is no address: {error}") from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Transient(self._unreachable(path, error)) from None
        if reply.status == 200:
            return reply
        try:
            text = error_text(_json_or_text(await _first_bytes(reply, _ERROR_BYTES)))
        finally:
            reply.close()
        shown = text or "an empty message (vLLM: top_k or temperature is not what a mask needs)"
        if reply.status not in (500, *TRANSIENT_STATUS):
            shown = text or "an empty message"
        problem = ServerError(
            f"RolloutClient: {path}: status {reply.status}: {shown}", reply.status, text
        )
        if reply.status in TRANSIENT_STATUS:
            raise _Transient(problem, _retry_after_s(reply.headers.get("Retry-After")))
        raise problem

    async def _whole_body(self, reply: Any) -> bytearray:
        import aiohttp

        path = reply.url.path
        length = reply.content_length
        body = bytearray()
        try:
            if length is None or length <= self._max_body_bytes:
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > self._max_body_bytes:
                        break
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Transient(self._unreachable(path, error)) from None
        if max(length or 0, len(body)) > self._max_body_bytes:
            reply.close()
            raise WireFormatError(
                f"RolloutClient: {path}: the reply is above max_body_bytes={self._max_body_bytes}"
            )
        return body

    def _unreachable(self, path: str, error: BaseException) -> ServerUnreachable:
        said = str(error) or type(error).__name__
        if isinstance(error, asyncio.TimeoutError):
            said = f"no whole reply within {self._timeout_s} s"
        return ServerUnreachable(f"RolloutClient: {self._url}{path}: {said}")

    async def pieces(self, reply: Any) -> AsyncIterator[bytes]:
        """The body of an open reply as it arrives.

        Raises:
            TransientWireError: it is cut short.
        """
        import aiohttp

        try:
            async for piece in reply.content.iter_any():
                yield piece
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            said = str(error) or type(error).__name__
            raise TransientWireError(f"RolloutClient: the stream is cut short: {said}") from None


async def _first_bytes(reply: Any, most: int) -> bytes:
    """Of a body that may come in pieces, as much as comes, up to ``most``."""
    import aiohttp

    body = bytearray()
    try:
        while len(body) < most and (piece := await reply.content.read(most - len(body))):
            body += piece
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        pass  # cut short: what has come may say it
    return bytes(body)


def _json_or_text(body: bytes) -> Any:
    try:
        return load_json(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")


def _retry_after_s(value: str | None) -> float:
    """Seconds; a date, which the header may hold too, counts for none."""
    try:
        return max(float(value or 0), 0.0)
    except ValueError:
        return 0.0
