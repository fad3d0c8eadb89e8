"""The chunks of a streamed reply: events of JSON, plain or packed, or frames."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np

from packhorse.packed.wire_format import Buffer, WireFormatError, WireLimits
from packhorse.packed.wire_frames import FrameReader
from packhorse.packed.wire_json import decode_json
from packhorse.packed.wire_tree import join_tree
from packhorse.replay.client_http import Transport
from packhorse.replay.middleware import FRAMES_TYPE, next_event
from packhorse.replay.rollout import Rollout
from packhorse.replay.vllm_http import ReplyJoiner

_ABORT: Final = "/inference/v1/abort_requests"


class ReplyStream:
    """A stream of ``/inference/v1/generate``: (index, new token ids) of each chunk.

    A loop over it that was left may be taken up again, where it was. It raises
    ``TransientWireError`` where the stream is cut short or damaged, and ``WireFormatError`` where
    the server ends it with an error.
    """

    def __init__(
        self,
        transport: Transport,
        reply: Any,
        read: Callable[[Any], list[Rollout]],
        limits: WireLimits,
    ) -> None:
        self._transport, self._reply, self._read, self._limits = transport, reply, read, limits
        self._joiner = ReplyJoiner(limits=limits)
        self._num_bytes = 0
        self._chunks = self._read_chunks()  # one, so that a loop that was left may be taken up
        self.request_id: str | None = None  # of the server, from the first chunk on

    def __aiter__(self) -> AsyncIterator[tuple[int, np.ndarray]]:
        return self._chunks

    async def _read_chunks(self) -> AsyncGenerator[tuple[int, np.ndarray]]:
        content_type = self._reply.headers.get("Content-Type", "").partition(";")[0].strip()
        trees = self._frames() if content_type == FRAMES_TYPE else self._events()
        async for tree in trees:
            if isinstance(tree, dict) and isinstance(tree.get("request_id"), str):
                self.request_id = tree["request_id"]
            for index, ids in self._joiner.add(tree):
                yield index, ids

    async def abort(self) -> None:
        """Ask the server to end the request now. The stream goes on to its last chunk, which has
        what there is (finish_reason ``abort``), and its routes.

        Raises:
            RuntimeError: no chunk has come yet: leave the block instead.
            ServerError, ServerUnreachable: the server does not take it.
        """
        if self.request_id is None:
            raise RuntimeError("ReplyStream.abort: no chunk has come yet, so nothing names it")
        await self._transport.post(
            _ABORT, {"request_ids": [self.request_id]}, accept="*/*", parse=_nothing, in_slot=False
        )

    def rollouts(self) -> list[Rollout]:
        """The whole responses, once the stream has ended.

        Raises:
            TransientWireError: it has not.
            WireFormatError, ValueError: as ``read_reply``.
        """
        return self._read(self._joiner.finish())

    async def close(self) -> None:
        """Nothing more is read; the connection is its owner's to close."""
        with suppress(RuntimeError):  # another task waits in it, and is told by the connection
            await self._chunks.aclose()

    async def _events(self) -> AsyncIterator[Any]:
        rest = bytearray()
        searched = 0
        async for piece in self._pieces():
            rest += piece
            while (event := next_event(rest, searched)) is not None:
                searched = 0
                lines = [line for line in event.splitlines() if line.startswith(b"data:")]
                data = b"\n".join(line[5:].strip() for line in lines)
                if data == b"[DONE]":
                    self._joiner.end()
                    return
                if lines:
                    yield decode_json(data, limits=self._limits)
            searched = len(rest)

    async def _frames(self) -> AsyncIterator[Any]:
        reader = FrameReader(limits=self._limits)
        async for piece in self._pieces():
            for frame in reader.feed(piece):
                if frame.fields:
                    yield join_tree(frame.fields, limits=self._limits)
                if frame.last:
                    self._joiner.end()
                    return
        reader.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._transport.pieces(self._reply):
            self._num_bytes += len(piece)
            if self._num_bytes > self._transport.max_body_bytes:
                raise WireFormatError(
                    "ReplyStream: the stream is above"
                    f" max_body_bytes={self._transport.max_body_bytes}"
                )
            yield piece


def _nothing(body: Buffer) -> None:
    """A reply whose body does not matter."""
