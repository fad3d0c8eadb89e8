"""Sessions of several turns into a trace, and streams, against the test's own server.

Oracle: ``client_server``'s fixed engine.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from packhorse.packed.trajectory import TokenKind
from packhorse.packed.wire import TransientWireError, WireFormatError
from packhorse.replay.client import RolloutClient
from packhorse.replay.client_session import RolloutSession
from packhorse.replay.middleware import FRAMES_TYPE, EventPacker, Form
from packhorse.replay.rollout import Rollout
from tests.replay import client_server as engine
from tests.replay.client_server import PROMPT, SAMPLING, Request, Server, http, plain, whole
from tests.replay.test_client import TRACE, check, run

TOOL = [21, 22, 23]


def all_rows(request: Request) -> bytes:
    """A server that ignores the row which is asked from."""
    payload = request.payload
    payload["sampling_params"].pop("routed_experts_prompt_start", None)
    return http(200, json.dumps(engine.generate(payload)).encode())


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [whole, all_rows], ids=["rows it lacks", "start ignored"])
def test_a_turn_asks_for_the_rows_that_the_trace_lacks_and_none_is_added_twice(answer):
    async def use(server: Server, client: RolloutClient) -> None:
        session = client.start_session(PROMPT, **TRACE)
        first = await session.turn(SAMPLING)
        session.observe(TOOL)
        second = await session.turn({**SAMPLING, "max_tokens": 2})
        prompt = [*PROMPT, *engine.sampled_ids(PROMPT, 4), *TOOL]
        check(first, PROMPT, 4)
        check(second, prompt, 2, start=8 if answer is whole else 0)
        trajectory = session.finalize()
        tokens = prompt + engine.sampled_ids(prompt, 2)
        rows = [engine.route(place, token) for place, token in enumerate(tokens[:-1])]
        assert trajectory.routes is not None
        assert trajectory.routes.tolist() == rows
        assert trajectory.response_ids.tolist() == tokens[len(PROMPT) :]
        kinds = [TokenKind.SAMPLED] * 4 + [TokenKind.OBSERVATION] * 3 + [TokenKind.SAMPLED] * 2
        assert trajectory.kinds.tolist() == kinds
        assert [tuple(span) for span in trajectory.weight_versions] == [(0, len(rows), "v3")]
        assert trajectory.num_added == 0

    requests = run([plain(answer)], use).requests
    starts = [
        request.payload["sampling_params"].get("routed_experts_prompt_start")
        for request in requests
    ]
    assert starts == [None, 8]  # 5 + 4 tokens, the last of which had no row
    assert requests[1].payload["token_ids"][:9] == PROMPT + engine.sampled_ids(PROMPT, 4)


def test_a_turn_that_fails_or_is_cancelled_leaves_the_trace_as_it_was():
    async def use(server: Server, client: RolloutClient) -> None:
        server.script = [
            plain(whole), server.held_up(30), plain(lambda request: http(200, b"{}")), plain(whole)
        ]  # fmt: skip
        session = client.start_session(PROMPT, **TRACE)
        await session.turn(SAMPLING)
        before = session.trace.token_ids.tolist()
        turn = asyncio.create_task(session.turn(SAMPLING))
        while len(server.requests) < 2:
            await asyncio.sleep(0.005)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        with pytest.raises(WireFormatError, match="no choices"):
            await session.turn(SAMPLING)
        assert session.trace.token_ids.tolist() == before
        assert (session.trace.num_rows, len(session.rollouts)) == (8, 1)
        await session.turn(SAMPLING)
        assert session.trace.num_rows == 12
        assert len(session.rollouts) == 2

    run([], use)


def test_known_rows_are_held_to_come_again_bit_for_bit_where_that_is_asked():
    async def use(server: Server, client: RolloutClient) -> None:
        session = client.start_session(PROMPT, check_prefix=True, **TRACE)
        await session.turn(SAMPLING)
        assert session.num_checked_rows == 0
        await session.turn(SAMPLING)
        assert session.num_checked_rows == 8

        def other(request: Request) -> bytes:
            reply = engine.generate(request.payload)
            choice = reply["choices"][0]
            tokens = request.payload["token_ids"] + choice["token_ids"]
            rows = [engine.route(place, token) for place, token in enumerate(tokens[:-1])]
            rows[6][1] = rows[6][1][::-1]  # the order of the experts
            choice["routed_experts"] = engine.npy(rows)
            return http(200, json.dumps(reply).encode())

        server.script = [plain(other)]
        length = session.trace.length
        with pytest.raises(ValueError, match="1 of 48 known cells came back as oth"):
            await session.turn(SAMPLING)
        assert session.trace.length == length

        def synced(request: Request) -> bytes:  # other weights may route otherwise
            body = other(request).replace(b'"v3"', b'"v4"')
            return body

        server.script = [plain(synced)]
        rollout = await session.turn(SAMPLING)
        assert {span.version for span in rollout.weight_versions} == {"v4"}
        versions = [tuple(span) for span in session.finalize().weight_versions]
        assert versions == [(0, 12, "v3"), (12, 16, "v4")]

    requests = run([plain(whole)], use).requests
    assert all("prompt_start" not in request.body.decode() for request in requests)


def test_a_session_has_a_support_just_as_its_client_has_and_takes_one_response():
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(ValueError, match="vocab_size=None with a client of support='mask'"):
            RolloutSession(client, PROMPT, num_layers=4, topk=2)
        session = client.start_session(PROMPT, **TRACE)
        with pytest.raises(ValueError, match=r"RolloutSession\.turn: n must be 1, got 2"):
            await session.turn({**SAMPLING, "n": 2})

    assert not run([], use).requests


# --- streams --------------------------------------------------------------------------------------


def streamed(request: Request, end: int | None = None) -> bytes:
    body = b"".join(engine.events(engine.generate(request.payload))[:end])
    return http(200, body, "text/event-stream; charset=utf-8")


async def read_all(client: RolloutClient, sampling: dict[str, Any]) -> list[Rollout]:
    async with client.stream(PROMPT, sampling) as stream:
        async for _ in stream:
            pass
        return stream.rollouts()


def test_a_stream_gives_each_token_and_then_the_whole_rollout():
    async def use(server: Server, client: RolloutClient) -> None:
        seen: list[int] = []
        async with client.stream(PROMPT, SAMPLING, routes_start=1) as stream:
            async for index, ids in stream:
                assert index == 0
                seen += ids.tolist()
                with pytest.raises(TransientWireError, match="its end has not come"):
                    stream.rollouts()
            check(stream.rollouts()[0], PROMPT, 4, start=1)
        assert seen == engine.sampled_ids(PROMPT, 4)
        assert stream.request_id == "generate-1"

    [request] = run([plain(streamed)], use).requests
    assert request.payload["stream"] is True


@pytest.mark.parametrize("form", ["plain", "frames"])
def test_a_loop_over_a_stream_that_was_left_goes_on_where_it_was(form):
    def answer(request: Request) -> bytes:
        if form == "plain":
            return streamed(request)
        packer = EventPacker(Form(FRAMES_TYPE))
        body = packer.feed(b"".join(engine.events(engine.generate(request.payload))))
        return http(200, body, FRAMES_TYPE)

    async def use(server: Server, client: RolloutClient) -> None:
        seen: list[int] = []
        async with client.stream(PROMPT, SAMPLING) as stream:
            for _ in range(6):
                async for _, ids in stream:
                    seen += ids.tolist()
                    break
            check(stream.rollouts()[0], PROMPT, 4)
        assert seen == engine.sampled_ids(PROMPT, 4)

    run([plain(answer)], use, form=form)


def test_a_stream_that_does_not_begin_is_asked_for_again():
    async def use(server: Server, client: RolloutClient) -> None:
        check((await read_all(client, SAMPLING))[0], PROMPT, 4)

    faults = [engine.reset, plain(lambda request: http(503, b""))]
    assert len(run([*faults, plain(streamed)], use).requests) == 3


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (engine.cut_at(streamed, lambda data: len(data) - 40), TransientWireError, "cut short: "),
        (plain(lambda request: streamed(request, -1)), TransientWireError, "end has not come"),
        (plain(lambda request: streamed(request, -2)), TransientWireError, "end has not come"),
        (
            plain(lambda request: http(200, b"".join(engine.events(engine.generate(
                request.payload))[:2]) + b"data: [DONE]\n\n", "text/event-stream")),
            TransientWireError,
            "choice 0 has no finish_reason",
        ),
        (
            plain(lambda request: http(200, b'data: {"error": {"message": "it died"}}\n\n',
                                       "text/event-stream")),
            WireFormatError,
            "the server ends the stream: it died",
        ),
        (
            plain(lambda request: http(200, b"data: {}\n\n", "text/event-stream")),
            WireFormatError,
            "a chunk has no choices",
        ),
        (
            plain(lambda request: http(200, b'data: {"choi\n\n', "text/event-stream")),
            TransientWireError,
            "not JSON",
        ),
    ],
)  # fmt: skip
def test_a_stream_that_ends_early_is_no_rollout(fault, error, message):
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(error, match=message):
            await read_all(client, SAMPLING)
        server.script = [plain(whole)]
        check((await client.generate(PROMPT, SAMPLING))[0], PROMPT, 4)

    assert len(run([fault], use).requests) == 2


def test_leaving_a_stream_closes_its_connection():
    async def slowly(request: Request, reader: Any, writer: Any) -> bool:
        body = engine.events(engine.generate(request.payload))
        writer.write(http(200, b"x" * 10_000, "text/event-stream")[:-10_000] + body[0])
        await writer.drain()
        closed.append(await reader.read(1))
        return False

    closed: list[bytes] = []

    async def use(server: Server, client: RolloutClient) -> None:
        async with client.stream(PROMPT, SAMPLING) as stream:
            with pytest.raises(RuntimeError, match="no chunk has come yet"):
                await stream.abort()
            async for _, ids in stream:
                assert ids.size == 1
                break
        await asyncio.sleep(0.05)
        assert closed == [b""]
        server.script = [plain(whole)]
        check((await client.generate(PROMPT, SAMPLING))[0], PROMPT, 4)

    run([slowly], use, max_concurrency=1)


def test_a_stream_above_the_bound_is_refused():
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(WireFormatError, match="the stream is above max_body_bytes=900"):
            await read_all(client, {**SAMPLING, "max_tokens": 40})

    run([plain(streamed)], use, max_body_bytes=900)


def test_parts_of_a_stream_that_do_not_fit_are_refused():
    def without_one(request: Request) -> bytes:
        events = engine.events(engine.generate(request.payload))
        chunk = json.loads(events[1][6:])
        chunk["choices"][0]["sampling_mask"] = None
        events[1] = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        return http(200, b"".join(events), "text/event-stream")

    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(WireFormatError, match="/sampling_mask': chunk 1 has none, others"):
            await read_all(client, SAMPLING)

    run([plain(without_one)], use)


def test_the_example_of_the_documentation_runs():
    document = Path(__file__).parents[2] / "docs" / "client.md"
    [snippet] = re.findall(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(snippet, scope)

    async def use(server: Server, client: RolloutClient) -> None:
        rollouts, trajectory = await scope["sample"](server.url, PROMPT, TOOL)
        for index, rollout in enumerate(rollouts):
            check(rollout, PROMPT, 256, index=index)
        assert len(rollouts) == 4
        assert trajectory.response_ids.size == 256 + len(TOOL) + 256
        assert len(trajectory.routes) == trajectory.length - 1

    assert len(run([plain(whole)], use).requests) == 3
