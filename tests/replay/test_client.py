"""The client against a server of the test's own on a loopback port, with real faults on the way.

Oracle: ``client_server``, whose fixed engine says what each rollout must hold.
"""

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from packhorse.packed.wire import TransientWireError, WireFormatError, encode_json
from packhorse.replay.client import RetryPolicy, RolloutClient, ServerError, ServerUnreachable
from packhorse.replay.rollout import Rollout
from tests.replay import client_server as engine
from tests.replay.client_server import PROMPT, SAMPLING, Request, Server, cut_at, http, plain, whole

QUICK = RetryPolicy(attempts=4, first_s=0.001, most_s=0.01)
TRACE = {"num_layers": engine.L, "topk": engine.K, "vocab_size": engine.V}


def run(
    script: list[Any],
    use: Callable[[Server, RolloutClient], Awaitable[Any]],
    **settings: Any,
) -> Server:
    async def main() -> Server:
        async with Server(script) as server:
            given = {"retry": QUICK, "timeout_s": 20.0, **settings}
            async with RolloutClient(server.url, **given) as client:
                await use(server, client)
            return server

    return asyncio.run(asyncio.wait_for(main(), 60))


def check(rollout: Rollout, prompt: list[int], count: int, start: int = 0, index: int = 0) -> None:
    ids = engine.sampled_ids(prompt, count, index)
    tokens = prompt + ids
    rows = [engine.route(place, token) for place, token in enumerate(tokens[:-1])]
    assert rollout.prompt_ids.tolist() == prompt
    assert rollout.response_ids.tolist() == ids
    assert rollout.routes is not None
    assert (rollout.routes.tolist(), rollout.routes_start) == (rows[start:], start)
    assert rollout.logprobs is not None
    assert np.array_equal(rollout.logprobs, np.full(count, math.log(0.5), np.float32))
    assert rollout.support is not None
    bounds = rollout.support.row_offsets.tolist()
    for i, token in enumerate(ids):
        row = rollout.support.token_ids[bounds[i] : bounds[i + 1]].tolist()
        assert sorted(row) == sorted(one for one, _ in engine.candidates(token))
    assert [tuple(span) for span in rollout.weight_versions] == [(0, count, "v3")]


# --- whole replies --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "frames", "plain"])
def test_a_reply_becomes_rollouts_and_the_request_asks_for_what_is_needed(form):
    async def use(server: Server, client: RolloutClient) -> None:
        rollouts = await client.generate(PROMPT, {**SAMPLING, "n": 3}, routes_start=2)
        assert len(rollouts) == 3
        for index, rollout in enumerate(rollouts):
            check(rollout, PROMPT, 4, start=2, index=index)

    headers = {"Authorization": "Bearer x"}
    server = run([plain(whole)], use, form=form, model="tiny", headers=headers)
    [request] = server.requests
    assert (request.method, request.path) == ("POST", "/inference/v1/generate")
    assert request.payload == {
        "token_ids": PROMPT,
        "model": "tiny",
        "sampling_params": {**SAMPLING, "n": 3, "logprobs": 0, "routed_experts_prompt_start": 2},
    }
    assert request.headers["authorization"] == "bearer x"
    kind = {"json": "application/vnd.packhorse+json", "frames": "application/vnd.packhorse.frames"}
    assert request.headers["accept"].startswith(kind.get(form, "application/json"))


def test_an_evaluation_asks_for_nothing_beside_the_tokens_and_looks_at_nothing():
    def answer(request: Request) -> bytes:
        reply = engine.generate(request.payload)
        for choice in reply["choices"]:
            assert choice["logprobs"] is None
            choice["routed_experts"] = "not even base64"
        return http(200, json.dumps(reply).encode())

    async def use(server: Server, client: RolloutClient) -> None:
        [rollout] = await client.generate(PROMPT, SAMPLING, evaluation=True)
        assert rollout.response_ids.tolist() == engine.sampled_ids(PROMPT, 4)
        absent = (rollout.routes, rollout.logprobs, rollout.support, rollout.support_status)
        assert absent == (None, None, None, None)

    [request] = run([plain(answer)], use).requests
    assert request.payload["sampling_params"] == SAMPLING
    assert "fields=none" in request.headers["accept"]


def test_support_from_logprobs_is_the_finite_candidates_and_a_cut_row_is_refused():
    async def use(server: Server, client: RolloutClient) -> None:
        [rollout] = await client.generate(PROMPT, SAMPLING)
        check(rollout, PROMPT, 4)

    run([plain(whole)], use, support="logprobs", num_logprobs=3)

    def tied(request: Request) -> bytes:  # four were kept, three are returned: a tie at rank 3
        reply = engine.generate(request.payload)
        for entry in reply["choices"][0]["logprobs"]["content"]:
            entry["top_logprobs"][2]["logprob"] = math.log(0.1)
        return http(200, json.dumps(reply).encode())

    async def refused(server: Server, client: RolloutClient) -> None:
        with pytest.raises(ValueError, match=r"token 0: .* sum to 0\.9000: the row is cut"):
            await client.generate(PROMPT, SAMPLING)

    assert len(run([plain(tied)], refused, support="logprobs", num_logprobs=3).requests) == 1


def test_floors_of_minus_9999_are_no_members_and_are_counted_where_sampled():
    def answer(request: Request) -> bytes:
        reply = engine.generate(request.payload)
        content = reply["choices"][0]["logprobs"]["content"]
        content[1]["top_logprobs"].append({"token_id": 40, "logprob": -9999.0, "rank": 9})
        content[2]["logprob"] = -9999.0
        content[3]["logprob"] = None
        return http(200, json.dumps(reply).encode())

    async def use(server: Server, client: RolloutClient) -> None:
        [rollout] = await client.generate(PROMPT, SAMPLING)
        assert rollout.num_floored == 2
        assert rollout.logprobs is not None
        assert rollout.logprobs[2:].tolist() == [-9999.0, -9999.0]
        assert rollout.support is not None
        assert 40 not in rollout.support.token_ids

    run([plain(answer)], use, support="logprobs", num_logprobs=3)


# --- transient ------------------------------------------------------------------------------------


def packed(request: Request) -> bytes:
    reply = engine.generate(request.payload)
    for choice in reply["choices"]:
        choice["token_ids"] = np.array(choice["token_ids"], dtype=np.int32)
    return http(200, encode_json(reply), "application/vnd.packhorse+json")


def damaged(request: Request) -> bytes:
    """The packed reply with one character of its base64 changed, and as long as it should be."""
    body = bytearray(packed(request))
    place = body.index(b'"data":"') + 9
    body[place] = ord("B") if body[place] != ord("B") else ord("C")
    return bytes(body)


def test_a_body_cut_at_any_byte_is_asked_for_again():
    rng = random.Random(3)
    size = len(whole(Request("POST", "/", {}, json.dumps({"token_ids": PROMPT,
        "sampling_params": {**SAMPLING, "logprobs": 0}}).encode())))  # fmt: skip
    places = [0, 1, 9, 17, 40, size - 1, *(rng.randrange(size) for _ in range(18))]
    script: list[Any] = []
    for place in places:
        script += [cut_at(whole, lambda data, place=place: place), plain(whole)]

    async def use(server: Server, client: RolloutClient) -> None:
        for _ in places:
            [rollout] = await client.generate(PROMPT, SAMPLING)
            check(rollout, PROMPT, 4)
        assert client.num_retries == len(places)

    assert len(run(script, use).requests) == 2 * len(places)


@pytest.mark.parametrize(
    "fault",
    [
        engine.reset,
        plain(damaged),
        plain(lambda request: http(200, b'{"choices": [{"index": 0, "tok')),
        plain(lambda request: http(502, b"bad gateway", "text/html")),
        plain(lambda request: http(503, b"", Retry_After="0")),
        plain(lambda request: http(504, b"")),
        plain(lambda request: http(429, b'{"error": {"message": "slow"}}', Retry_After="0.01")),
        plain(lambda request: http(408, b"")),
    ],
    ids=["reset", "checksum", "half of a JSON", "502", "503", "504", "429", "408"],
)
def test_a_transient_fault_is_asked_again_and_the_next_answer_is_taken(fault):
    async def use(server: Server, client: RolloutClient) -> None:
        [rollout] = await client.generate(PROMPT, SAMPLING)
        check(rollout, PROMPT, 4)
        assert client.num_retries == 2

    assert len(run([fault, fault, plain(packed)], use).requests) == 3


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (engine.reset, ServerUnreachable, r"RolloutClient: http://\S+/inference/v1/generate: "),
        (plain(damaged), TransientWireError, "checksum of its 16 bytes is wrong"),
        (
            plain(lambda request: http(503, b'{"error": {"message": "paused\\nnow"}}')),
            ServerError,
            r"/inference/v1/generate: status 503: paused now",
        ),
    ],
    ids=["reset", "checksum", "503"],
)
def test_attempts_are_bounded_and_the_last_fault_is_raised(fault, error, message):
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(error, match=message):
            await client.generate(PROMPT, SAMPLING)

    assert len(run([fault], use).requests) == QUICK.attempts


def test_an_attempt_that_is_too_slow_is_given_up_and_its_connection_closed():
    async def use(server: Server, client: RolloutClient) -> None:
        server.script = [server.held_up(30), plain(whole)]
        [rollout] = await client.generate(PROMPT, SAMPLING)
        check(rollout, PROMPT, 4)
        await asyncio.sleep(0.05)
        assert server.left == 1

    run([], use, timeout_s=0.3)


def test_a_server_that_is_not_there_is_unreachable():
    async def main() -> None:
        async with RolloutClient("http://127.0.0.1:9", retry=QUICK) as client:
            with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:9/inference"):
                await client.generate(PROMPT, SAMPLING)
            assert client.num_retries == QUICK.attempts - 1

    asyncio.run(main())


def test_delays_grow_up_to_a_bound_and_follow_retry_after_up_to_it():
    policy = RetryPolicy(attempts=9, first_s=1.0, most_s=8.0)
    for attempt, usual in enumerate([1, 2, 4, 8, 8, 8]):
        drawn = [policy.delay_s(attempt, 0.0) for _ in range(200)]
        assert 0.5 * usual <= min(drawn) < 0.7 * usual < 1.3 * usual < max(drawn) <= 1.5 * usual
    assert policy.delay_s(0, 5.0) == 5.0
    assert policy.delay_s(0, 1e9) == 8.0


# --- permanent ------------------------------------------------------------------------------------


def without(key: str) -> Any:
    def answer(request: Request) -> bytes:
        reply = engine.generate(request.payload)
        for choice in reply["choices"]:
            choice[key] = None
        return http(200, json.dumps(reply).encode())

    return plain(answer)


def changed(key: str, value: Any) -> Any:
    def answer(request: Request) -> bytes:
        reply = engine.generate(request.payload)
        reply["choices"][0][key] = value
        return http(200, json.dumps(reply).encode())

    return plain(answer)


def rows_of(experts: list[int], count: int) -> str:
    return engine.npy([[experts] * engine.L] * count)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (
            plain(lambda request: http(400, b'{"error": {"message": "max_tokens is too large"}}')),
            ServerError,
            "status 400: max_tokens is too large",
        ),
        (plain(lambda request: http(401, b"who?", "text/plain")), ServerError, "status 401: who?"),
        (
            plain(lambda request: http(422, b'{"detail": [{"loc": ["body"]}]}')),
            ServerError,
            r"status 422: \[\{'loc': \['body'\]\}\]",
        ),
        (
            plain(lambda request: http(500, b'{"error": {"message": "", "code": 500}}')),
            ServerError,
            "status 500: .*top_k or temperature",
        ),
        (plain(lambda request: http(302, b"", Location="/x")), ServerError, "status 302: an empty"),
        (plain(lambda request: http(200, b"[1]")), WireFormatError, "the reply is list, no object"),
        (
            plain(lambda request: http(200, b'{"error": {"message": "engine is dead"}}')),
            WireFormatError,
            "answers with an error: engine is dead",
        ),
        (plain(lambda request: http(200, b'{"choices": []}')), WireFormatError, "no choices"),
        (
            without("routed_experts"),
            WireFormatError,
            "field '/choices/0/routed_experts': there are none: .*--enable-return-routed-experts",
        ),
        (
            without("sampling_mask"),
            WireFormatError,
            "field '/choices/0/sampling_mask': there is none: .*--return-sampling-mask",
        ),
        (without("token_ids"), WireFormatError, 'no token ids; send "return_token_ids": true'),
        (without("logprobs"), WireFormatError, "/choices/0/logprobs': there are none"),
        (plain(lambda request: http(200, json.dumps(
            {"choices": engine.generate(request.payload)["choices"] * 2}).replace(
                '"index": 0', '"index": 1', 1).encode())),
         WireFormatError, "field '/choices': it has 2 choices for n=1"),
        (changed("routed_experts", rows_of([1, 2], 5)), ValueError, "has 5 rows; 5 pr"),
        (changed("routed_experts", rows_of([0, 0], 8)), ValueError, "is all zeros"),
        (changed("routed_experts", rows_of([4, 4], 8)), ValueError, "repeated"),
        (changed("sampling_mask", [[1]] * 3), WireFormatError, "3 rows for 4 sampled tokens"),
    ],
)  # fmt: skip
def test_a_permanent_fault_is_raised_at_once_with_what_the_server_says(fault, error, message):
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(error, match=message) as raised:
            await client.generate(PROMPT, SAMPLING)
        assert not isinstance(raised.value, TransientWireError)
        # the client goes on
        server.script = [plain(whole)]
        check((await client.generate(PROMPT, SAMPLING))[0], PROMPT, 4)

    assert len(run([fault], use).requests) == 2


def test_the_text_of_an_error_is_read_to_its_end():
    said = "max_tokens is too large; " + "x" * 1500

    async def in_pieces(request: Request, reader: Any, writer: Any) -> bool:
        data = http(400, json.dumps({"error": {"message": said}}).encode())
        for begin in range(0, len(data), 100):
            writer.write(data[begin : begin + 100])
            await writer.drain()
            await asyncio.sleep(0.002)
        return False

    async def cut(request: Request, reader: Any, writer: Any) -> bool:
        data = http(400, b"the engine is dead" + b" " * 90)
        return await engine.cut_short(data[:-20], writer)

    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(ServerError) as raised:
            await client.generate(PROMPT, SAMPLING)
        assert raised.value.text == said
        with pytest.raises(ServerError, match="status 400: the engine is dead"):
            await client.generate(PROMPT, SAMPLING)

    assert len(run([in_pieces, cut], use).requests) == 2


def test_a_number_that_json_lacks_is_not_sent_as_null():
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(ValueError, match="generate: top_p must be finite, got nan"):
            await client.generate(PROMPT, {**SAMPLING, "top_p": math.nan})

    assert run([plain(whole)], use).requests == []


def test_what_is_no_address_is_not_asked_again():
    async def main() -> None:
        far = RetryPolicy(first_s=60, most_s=60)
        async with RolloutClient("http://127.0.0.1:99999", retry=far) as client:
            with pytest.raises(ValueError, match=r"RolloutClient: http.*:99999/version is no addr"):
                await client.version()
        assert client.num_retries == 0

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_version_that_cannot_be_read_is_a_wire_error():
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(TransientWireError, match="the body is not JSON"):
            await client.version()
        with pytest.raises(WireFormatError, match="the server names none"):
            await client.version()
        assert await client.version() == "0.32.0"

    page = plain(lambda request: http(200, b"<html>", "text/html"))
    none = plain(lambda request: http(200, b"[]"))
    run([page] * 4 + [none, plain(lambda request: http(200, b'{"version": "0.32.0"}'))], use)


def test_a_reply_above_the_bound_is_refused_before_it_is_read():
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(WireFormatError, match="the reply is above max_body_bytes=3000"):
            await client.generate(PROMPT, SAMPLING)

    def claims(request: Request) -> bytes:
        head = b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n"
        return head + b"Content-Length: 99999999999\r\n\r\n{"

    def endless(request: Request) -> bytes:  # no length: until the connection ends
        return b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n\r\n" + b" " * 5000

    for answer in (claims, endless):
        assert len(run([plain(answer)], use, max_body_bytes=3000).requests) == 1


@pytest.mark.parametrize(
    ("support", "sampling", "message"),
    [
        ("mask", {"temperature": 0.0, "top_k": 3}, "temperature must be given and above 0 .*0.0"),
        ("mask", {"top_k": 3}, "temperature must be given and above 0 .*None"),
        ("mask", {"temperature": float("nan"), "top_k": 3}, "temperature must be given"),
        ("mask", {"temperature": True, "top_k": 3}, "temperature must be given"),
        ("mask", {"temperature": 1.0}, "top_k must be given and above 0 .*None"),
        ("mask", {"temperature": 1.0, "top_k": 0}, "top_k must be given and above 0"),
        ("mask", {"temperature": 1.0, "top_k": -1}, "top_k must be given and above 0"),
        ("logprobs", {"temperature": 1.0, "top_k": 9}, "top_k=9 keeps more than num_logprobs=3"),
        (None, {"logprobs": 3}, "logprobs is set by the client"),
        (None, {"temperature": float("inf")}, "temperature must be finite, got inf"),
        (None, {"stream": True}, "stream is set by the client"),
    ],
)  # fmt: skip
def test_what_a_server_would_answer_with_500_is_refused_before_it_is_sent(
    support, sampling, message
):
    async def use(server: Server, client: RolloutClient) -> None:
        with pytest.raises(ValueError, match=f"^RolloutClient.generate: {message}"):
            await client.generate(PROMPT, sampling)
        with pytest.raises(ValueError, match=f"^RolloutClient.stream: {message}"):
            async with client.stream(PROMPT, sampling):
                pass

    assert not run([], use, support=support, num_logprobs=3).requests


def test_arguments_are_checked():
    for settings, message in (
        ({"support": "all"}, "support must be"),
        ({"form": "xml"}, "form must be"),
        ({"support": "logprobs"}, "num_logprobs=0 with support='logprobs'"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^RolloutClient: {message}"):
            RolloutClient("http://x", **settings)
    with pytest.raises(ValueError, match=r"^RolloutClient: url must be"):
        RolloutClient("127.0.0.1:8000")
    with pytest.raises(ValueError, match=r"^RetryPolicy: attempts"):
        RetryPolicy(attempts=0)
    with pytest.raises(ValueError, match=r"^RetryPolicy: first_s"):
        RetryPolicy(first_s=9.0)

    async def use(server: Server, client: RolloutClient) -> None:
        for prompt in ([], [[1]], [1.5]):
            with pytest.raises(ValueError, match=r"prompt_ids must be integers \[P\]"):
                await client.generate(prompt, SAMPLING)
        with pytest.raises(ValueError, match="routes_start=6 of 5 prompt ids"):
            await client.generate(PROMPT, SAMPLING, routes_start=6)
        for call in (client.complete("x", SAMPLING), client.chat([], SAMPLING)):
            with pytest.raises(ValueError, match="completions and chat return no sampling mask"):
                await call

    assert not run([], use).requests

    async def closed() -> None:
        with pytest.raises(RuntimeError, match="open it first"):
            await RolloutClient("http://127.0.0.1:9").generate(PROMPT, SAMPLING)

    asyncio.run(closed())


# --- many requests, and cancellation --------------------------------------------------------------


def test_no_more_requests_run_than_the_limit_and_connections_are_kept():
    async def use(server: Server, client: RolloutClient) -> None:
        server.script = [server.held_up(0.02)]
        prompts = [[*PROMPT, i] for i in range(20)]
        got = await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))
        for prompt, [rollout] in zip(prompts, got, strict=True):
            check(rollout, prompt, 4)
        assert server.most_at_a_time == 3
        assert server.connections == 3

    run([], use, max_concurrency=3)


def test_a_cancelled_request_closes_its_connection_and_frees_its_place():
    async def use(server: Server, client: RolloutClient) -> None:
        server.script = [server.held_up(30), server.held_up(30), plain(whole)]
        tasks = [asyncio.create_task(client.generate(PROMPT, SAMPLING)) for _ in range(2)]
        while len(server.requests) < 2:
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        assert [type(end) for end in await asyncio.gather(*tasks, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        check((await client.generate(PROMPT, SAMPLING))[0], PROMPT, 4)
        await asyncio.sleep(0.05)
        assert (server.left, server.connections) == (2, 1)

    server = run([], use, max_concurrency=2)
    assert (server.connections, len(server.requests)) == (0, 3)


def test_a_request_cancelled_while_it_waits_to_try_again_is_not_sent_again():
    async def use(server: Server, client: RolloutClient) -> None:
        task = asyncio.create_task(client.generate(PROMPT, SAMPLING))
        while not client.num_retries:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    retry = RetryPolicy(attempts=5, first_s=30.0, most_s=30.0)
    assert len(run([engine.reset], use, retry=retry).requests) == 1
