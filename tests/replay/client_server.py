"""A small server that answers as vLLM 0.32 does, and faults on the way: for tests of the client.

Shares no code with the package. The "engine" is a fixed function: the route of a token depends on
its place and id, the sampled ids on the prompt's length. HTTP/1.1 is written by hand, so that a
reply may be cut, damaged, held up or reset at any byte.
"""

import asyncio
import base64
import io
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

L, K, E, V = 4, 2, 8, 512
SAMPLING = {"temperature": 1.0, "top_k": 3, "max_tokens": 4}
PROMPT = [7, 3, 9, 11, 2]


def route(place: int, token: int) -> list[list[int]]:
    """[L, K] distinct experts."""
    first = [(place + 3 * token + 5 * layer) % E for layer in range(L)]
    return [[expert, (expert + 1 + token % (E - 1)) % E] for expert in first]


def sampled_ids(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    return [(len(prompt) + 7 * i + 13 * choice) % V for i in range(count)]


def candidates(token: int) -> list[tuple[int, float]]:
    """The sampler's support at a token, with logprobs that sum to 1: the sampled one first."""
    others = sorted({(token + 1) % V, (token + 2) % V})
    return [(token, math.log(0.5)), *zip(others, (math.log(0.3), math.log(0.2)), strict=True)]


def npy(rows: list[Any]) -> str:
    file = io.BytesIO()
    np.save(file, np.array(rows, dtype=np.uint8).reshape(-1, L, K))
    return base64.b64encode(file.getvalue()).decode()


def generate(payload: dict[str, Any]) -> dict[str, Any]:
    """A whole reply of /inference/v1/generate."""
    prompt, sampling = payload["token_ids"], payload["sampling_params"]
    choices = []
    for index in range(sampling.get("n", 1)):
        ids = sampled_ids(prompt, sampling.get("max_tokens", 16), index)
        tokens = prompt + ids
        rows = [route(place, token) for place, token in enumerate(tokens[:-1])]
        logprobs = None
        if "logprobs" in sampling:
            content = []
            for token in ids:
                best = candidates(token)[: max(sampling["logprobs"], 1)]
                entries = [{"token_id": i, "logprob": p, "rank": 1} for i, p in best]
                content.append({**entries[0], "top_logprobs": entries})
            logprobs = {"content": content}
        choices.append(
            {
                "index": index,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": ids,
                "routed_experts": npy(rows[sampling.get("routed_experts_prompt_start", 0) :]),
                "sampling_mask": [sorted(i for i, _ in candidates(token)) for token in ids],
                "weight_versions": [{"version": "v3", "start": 0, "end": len(ids)}],
                "logprobs": logprobs,
            }
        )
    return {"request_id": "generate-1", "model": "tiny", "prompt_token_ids": None,
            "usage": {"prompt_tokens": len(prompt)}, "choices": choices}  # fmt: skip


def events(reply: dict[str, Any]) -> list[bytes]:
    """The same reply of one choice as server-sent events, a token each."""
    choice = reply["choices"][0]
    count = len(choice["token_ids"])
    made = []
    for i in range(count):
        last = i == count - 1
        logprobs = choice["logprobs"]
        chunk = {
            **choice,
            "token_ids": choice["token_ids"][i : i + 1],
            "sampling_mask": choice["sampling_mask"][i : i + 1],
            "logprobs": logprobs and {"content": logprobs["content"][i : i + 1]},
            "routed_experts": choice["routed_experts"] if last else None,
            "weight_versions": choice["weight_versions"] if last else None,
            "finish_reason": choice["finish_reason"] if last else None,
        }
        made.append({"request_id": reply["request_id"], "usage": None, "choices": [chunk]})
    return [*(b"data: " + json.dumps(one).encode() + b"\n\n" for one in made), b"data: [DONE]\n\n"]


def http(status: int, body: bytes, content_type: str = "application/json", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}"]
    lines += [f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def payload(self) -> Any:
        return json.loads(self.body)


#: what a server does with a request: writes to its client, and returns whether it may send another
Handler = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


def plain(answer: Callable[[Request], bytes]) -> Handler:
    async def handle(request: Request, reader: Any, writer: Any) -> bool:
        writer.write(answer(request))
        await writer.drain()
        return True

    return handle


def whole(request: Request) -> bytes:
    """The reply as it should be."""
    return http(200, json.dumps(generate(request.payload)).encode())


@dataclass
class Server:
    """Handles the requests in the order of ``script``, then all others with its last entry."""

    script: list[Handler]
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    left: int = 0  # requests whose client went away before their reply
    at_a_time: int = 0
    most_at_a_time: int = 0

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._tasks: set[asyncio.Task[None]] = set()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (request := await read_request(reader)) is not None:
                handler = self.script[min(len(self.requests), len(self.script) - 1)]
                self.requests.append(request)
                self.at_a_time += 1
                self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
                try:
                    if not await handler(request, reader, writer):
                        break
                finally:
                    self.at_a_time -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:  # the server ends
            pass
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.close()

    def held_up(self, seconds: float) -> Handler:
        """Answers after a time, unless the client goes away before."""

        async def handle(request: Request, reader: Any, writer: Any) -> bool:
            try:
                await asyncio.wait_for(reader.read(1), seconds)
            except asyncio.TimeoutError:
                writer.write(whole(request))
                await writer.drain()
                return True
            self.left += 1
            return False

        return handle


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    method, path, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body)


async def cut_short(data: bytes, writer: asyncio.StreamWriter) -> bool:
    """Send that, and close."""
    writer.write(data)
    await writer.drain()
    return False


def cut_at(answer: Callable[[Request], bytes], place: Callable[[bytes], int]) -> Handler:
    async def handle(request: Request, reader: Any, writer: Any) -> bool:
        data = answer(request)
        return await cut_short(data[: place(data)], writer)

    return handle


async def reset(request: Request, reader: Any, writer: asyncio.StreamWriter) -> bool:
    writer.transport.abort()
    return False
