"""The client against the real vLLM HTTP server, with the middleware in it, on a loopback port.

The server is started and stopped here. Oracle: the server's own JSON, read by ``json``, ``base64``
and ``numpy.load``; what one request returns twice must be the same bits, whatever its form.
"""

import asyncio
import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from packhorse.packed.wire import WireFormatError
from packhorse.replay.client import RetryPolicy, RolloutClient, ServerError
from packhorse.replay.proxy import make_proxy
from packhorse.replay.rollout import EngineModel, Rollout

ENGINE = EngineModel(4, 2, 8, (0, 1, 2, 3), 512)
SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 1}
RNG = np.random.default_rng(6)
SHORT = RNG.integers(3, 500, 20).tolist()
LONG = RNG.integers(3, 500, 150).tolist()  # more than a block of the KV cache, 128 tokens
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def run(url: str, use: Callable[[RolloutClient], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with RolloutClient(url, **{"engine": ENGINE, "model": "tiny", **settings}) as client:
            return await use(client)

    return asyncio.run(asyncio.wait_for(main(), 120))


def post(url: str, path: str, payload: Any) -> Any:
    """The server's own JSON."""
    request = urllib.request.Request(
        url + path, json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def rows_of(rollout: Rollout) -> list[list[int]]:
    assert rollout.support is not None
    parts = np.split(rollout.support.token_ids, rollout.support.row_offsets[1:-1])
    return [sorted(part.tolist()) for part in parts]


def alike(one: Rollout, other: Rollout, *, but: tuple[str, ...] = ()) -> None:
    """Bit for bit, beside what names the request."""
    for name in vars(one).keys() - {"request_id", "num_cached_tokens", *but}:
        first, second = getattr(one, name), getattr(other, name)
        if name == "support" and first is not None:
            assert [part.tobytes() for part in first] == [part.tobytes() for part in second]
        elif isinstance(first, np.ndarray):
            same = (first.dtype, first.shape, first.tobytes())
            assert same == (second.dtype, second.shape, second.tobytes()), name
        else:
            assert first == second, name


def check(rollout: Rollout, prompt: list[int], count: int, start: int = 0) -> None:
    """n - 1 rows of distinct experts; the sampled id in its support; finite logprobs."""
    assert rollout.prompt_ids.tolist() == prompt
    assert rollout.response_ids.size == count
    assert rollout.routes is not None
    assert rollout.routes.shape == (len(prompt) + count - 1 - start, 4, 2)
    assert (rollout.routes[..., 0] != rollout.routes[..., 1]).all()
    assert rollout.logprobs is not None
    assert (rollout.logprobs > -50).all()
    if rollout.support is not None:
        for token, row in zip(rollout.response_ids.tolist(), rows_of(rollout), strict=True):
            assert token in row
    assert (rollout.num_floored, rollout.num_added, rollout.num_cut) == (0, 0, 0)


# --- endpoints and forms --------------------------------------------------------------------------


def test_all_endpoints_give_n_minus_1_rows_and_the_same_for_the_same_prompt(server):
    async def use(client: RolloutClient) -> tuple[Rollout, Rollout, Rollout]:
        assert (await client.version()).startswith("0.")
        sampling = {**SAMPLING, "max_tokens": 6}
        [generated] = await client.generate(SHORT, sampling)
        [completed] = await client.complete(SHORT, sampling)
        [chatted] = await client.chat(MESSAGES, sampling)
        return generated, completed, chatted

    generated, completed, chatted = run(server, use, support="logprobs", num_logprobs=40)
    check(generated, SHORT, 6)
    check(completed, SHORT, 6)
    check(chatted, chatted.prompt_ids.tolist(), 6)
    alike(generated, completed, but=("weight_versions",))
    assert [(span.start, span.stop) for span in generated.weight_versions] == [(0, 6)]
    assert chatted.prompt_ids.size > 4


def test_the_middleware_changes_no_bit_of_what_is_read(server):
    """The same request with it and without, in both forms, through the proxy too."""

    async def use(client: RolloutClient) -> list[Rollout]:
        [rollout] = await client.generate(SHORT, {**SAMPLING, "max_tokens": 6})
        return [rollout]

    payload = {
        "token_ids": SHORT,
        "sampling_params": {**SAMPLING, "max_tokens": 6, "logprobs": 20},
    }
    choice = post(server, "/inference/v1/generate", payload)["choices"][0]
    rollouts = [
        run(server, use, form=form, num_logprobs=20)[0] for form in ("plain", "json", "frames")
    ]

    async def proxied() -> Rollout:
        async with (
            proxy(server) as url,
            RolloutClient(url, engine=ENGINE, num_logprobs=20) as client,
        ):
            return (await use(client))[0]

    rollouts.append(asyncio.run(proxied()))
    for rollout in rollouts:
        check(rollout, SHORT, 6)
        alike(rollout, rollouts[0])
        assert rollout.response_ids.tolist() == choice["token_ids"]
        assert rollout.routes is not None
        assert np.array_equal(rollout.routes, npy(choice["routed_experts"]))
        assert rows_of(rollout) == choice["sampling_mask"]
        assert rollout.logprobs is not None
        given = [np.float32(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        assert rollout.logprobs.tolist() == given


@asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[str]:
    from aiohttp import web

    runner = web.AppRunner(make_proxy(upstream), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def test_the_mask_is_the_finite_processed_logprobs(server):
    """And their probabilities sum to 1; -inf is written as -9999.0."""
    payload = {
        "token_ids": SHORT,
        "sampling_params": {**SAMPLING, "max_tokens": 12, "logprobs": 40},
    }
    choice = post(server, "/inference/v1/generate", payload)["choices"][0]
    filtered = 0
    for mask, entry in zip(choice["sampling_mask"], choice["logprobs"]["content"], strict=True):
        best = {one["token_id"]: one["logprob"] for one in entry["top_logprobs"]}
        assert sorted(token for token, value in best.items() if value != -9999.0) == mask
        assert abs(sum(np.exp(best[token]) for token in mask) - 1) < 1e-4
        filtered += sum(value == -9999.0 for value in best.values())
    assert filtered > 0

    async def use(client: RolloutClient) -> Rollout:
        return (await client.generate(SHORT, {**SAMPLING, "max_tokens": 12}))[0]

    by_mask = run(server, use, support="mask", num_logprobs=40)
    by_logprobs = run(server, use, support="logprobs", num_logprobs=40)
    assert rows_of(by_mask) == rows_of(by_logprobs) == choice["sampling_mask"]
    assert by_logprobs.support_mass is not None
    assert np.abs(by_logprobs.support_mass - 1).max() < 1e-4


def test_a_tie_larger_than_top_k_is_whole_in_the_mask_and_refused_where_logprobs_cut_it(server):
    async def use(client: RolloutClient) -> list[Rollout]:
        sampling = {"temperature": 1.0, "top_k": 5, "max_tokens": 8}  # bf16 logits tie often
        requests = (client.generate(LONG[i : i + 9], {**sampling, "seed": i}) for i in (0, 6))
        return [rollouts[0] for rollouts in await asyncio.gather(*requests)]

    masked = run(server, use, support="mask")
    sizes = np.concatenate([np.diff(rollout.support.row_offsets) for rollout in masked])
    assert sizes.max() > 5
    with pytest.raises(ValueError, match=r"candidates sum to 0\.\d+: the row is cut"):
        run(server, use, support="logprobs", num_logprobs=5)


def test_n_responses_have_their_own_routes_and_share_those_of_the_prompt(server):
    async def use(client: RolloutClient) -> list[Rollout]:
        return await client.generate(SHORT, {**SAMPLING, "seed": None, "n": 3, "max_tokens": 8})

    rollouts = run(server, use)
    assert [rollout.index for rollout in rollouts] == [0, 1, 2]
    for rollout in rollouts:
        check(rollout, SHORT, 8)
        assert np.array_equal(rollout.routes[: len(SHORT)], rollouts[0].routes[: len(SHORT)])
    assert len({tuple(rollout.response_ids.tolist()) for rollout in rollouts}) > 1


def test_a_stop_token_ends_the_response_with_one_row_less_than_its_tokens(server):
    async def use(client: RolloutClient) -> list[Rollout]:
        sampling = {**SAMPLING, "max_tokens": 6}
        [free] = await client.generate(SHORT, sampling)
        stop = free.response_ids.tolist()[2]
        [stopped] = await client.generate(SHORT, {**sampling, "stop_token_ids": [stop]})
        return [free, stopped]

    free, stopped = run(server, use)
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    ids = free.response_ids.tolist()
    first = ids.index(ids[2])
    check(stopped, SHORT, first + 1)
    assert stopped.response_ids.tolist() == ids[: first + 1]
    assert stopped.stop_reason == ids[2]


def test_an_evaluation_gets_tokens_alone(server):
    async def use(client: RolloutClient) -> Rollout:
        [rollout] = await client.generate(SHORT, {**SAMPLING, "max_tokens": 6}, evaluation=True)
        return rollout

    rollout = run(server, use)
    assert rollout.response_ids.size == 6
    assert (rollout.routes, rollout.logprobs, rollout.support) == (None, None, None)


# --- turns ----------------------------------------------------------------------------------------


def test_the_second_turn_brings_the_rows_that_are_missing_and_the_known_ones_are_bit_equal(server):
    """A prefix that the engine had cached included."""
    sampling = {**SAMPLING, "max_tokens": 8}
    tool = RNG.integers(3, 500, 30).tolist()

    async def turns(client: RolloutClient, check_prefix: bool) -> Any:
        session = client.start_session(
            LONG, check_prefix=check_prefix, num_layers=4, topk=2, num_experts=8, vocab_size=512
        )
        first = await session.turn(sampling)
        session.observe(tool)
        second = await session.turn(sampling)
        return session, first, second, session.finalize()

    _, first, second, trajectory = run(server, lambda client: turns(client, False))
    check(first, LONG, 8)
    prompt = LONG + first.response_ids.tolist() + tool
    check(second, prompt, 8, start=len(LONG) + 7)
    assert second.routes_start == len(LONG) + 7
    assert second.num_cached_tokens == 128
    assert len(trajectory.routes) == len(prompt) + 7
    assert np.array_equal(trajectory.routes[: len(first.routes)], first.routes)
    assert np.array_equal(trajectory.routes[len(first.routes) :], second.routes)

    again, _, whole, checked = run(server, lambda client: turns(client, True))
    assert again.num_checked_rows == len(LONG) + 7  # all of turn 1's, bit for bit
    assert whole.routes_start == 0
    assert checked.response_ids.tolist() == trajectory.response_ids.tolist()
    assert np.array_equal(checked.routes, trajectory.routes)


def test_rows_from_a_start_are_the_last_ones_of_all(server):
    async def use(client: RolloutClient) -> list[Rollout]:
        sampling = {**SAMPLING, "max_tokens": 4}
        asked = [client.generate(SHORT, sampling, routes_start=start) for start in (0, 7, 19, 20)]
        return [rollouts[0] for rollouts in await asyncio.gather(*asked)]

    rollouts = run(server, use)
    assert [rollout.routes_start for rollout in rollouts] == [0, 7, 19, 20]
    for rollout in rollouts:
        check(rollout, SHORT, 4, start=rollout.routes_start)
        assert np.array_equal(rollout.routes, rollouts[0].routes[rollout.routes_start :])


# --- streams and aborts ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "json", "frames"])
def test_a_stream_gives_what_the_whole_reply_gives(server, form):
    async def use(client: RolloutClient) -> tuple[list[int], Rollout, Rollout]:
        sampling = {**SAMPLING, "max_tokens": 4}
        seen: list[int] = []
        async with client.stream(SHORT, sampling) as stream:
            async for _, ids in stream:
                seen += ids.tolist()
            [streamed] = stream.rollouts()
        [whole] = await client.generate(SHORT, sampling)
        return seen, streamed, whole

    seen, streamed, whole = run(server, use, form=form, num_logprobs=5)
    check(streamed, SHORT, 4)
    assert seen == streamed.response_ids.tolist()
    alike(streamed, whole)


def running(url: str) -> float:
    """Requests that the engine works on, of its own metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    values = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in values)


def test_an_abort_in_the_middle_of_a_stream_gives_what_there_is_with_all_its_rows(server):
    async def use(client: RolloutClient) -> Rollout:
        seen = 0
        async with client.stream(SHORT, {**SAMPLING, "max_tokens": 300}) as stream:
            async for _, ids in stream:
                seen += ids.size
                if seen == 4:
                    await stream.abort()
        [rollout] = stream.rollouts()
        assert rollout.finish_reason == "abort"
        assert 4 <= rollout.response_ids.size == seen < 200
        return rollout

    rollout = run(server, use)
    check(rollout, SHORT, rollout.response_ids.size)


def test_leaving_a_stream_or_cancelling_a_request_ends_the_work_at_the_server(server):
    async def idle() -> None:
        for _ in range(100):
            if not await asyncio.to_thread(running, server):
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the server still works on a request that nobody waits for")

    async def use(client: RolloutClient) -> None:
        long = {**SAMPLING, "max_tokens": 400}
        async with client.stream(SHORT, long) as stream:
            async for _ in stream:
                assert await asyncio.to_thread(running, server) == 1
                break
        await idle()
        task = asyncio.create_task(client.generate(SHORT, long))
        while not await asyncio.to_thread(running, server):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle()
        [rollout] = await client.generate(SHORT, {**SAMPLING, "max_tokens": 2})
        check(rollout, SHORT, 2)

    run(server, use)


# --- faults ---------------------------------------------------------------------------------------


@asynccontextmanager
async def cutting(upstream: str, cuts: list[int | None]) -> AsyncIterator[str]:
    """A TCP proxy that closes connection i after ``cuts[i]`` bytes of the reply (None: never)."""
    port = int(upstream.rsplit(":", 1)[1])
    left = list(cuts)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: Any) -> None:
        sent = 0
        while data := await reader.read(1 << 16):
            if most is not None and sent + len(data) >= most:
                writer.write(data[: most - sent])
                await writer.drain()
                return
            sent += len(data)
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        most = left.pop(0) if left else None
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        tasks = [
            asyncio.create_task(pump(reader, up_writer, None)),
            asyncio.create_task(pump(up_reader, writer, most)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            up_writer.close()
            writer.close()

    proxy_server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{proxy_server.sockets[0].getsockname()[1]}"
    finally:
        proxy_server.close()
        assert not left


@pytest.mark.parametrize("form", ["plain", "frames"])
def test_a_connection_that_is_cut_inside_the_reply_is_tried_again(server, form):
    async def main() -> tuple[Rollout, Rollout]:
        settings = {"engine": ENGINE, "form": form}
        retry = RetryPolicy(attempts=5, first_s=0.01)
        sampling = {**SAMPLING, "max_tokens": 4}
        async with (
            cutting(server, [0, 60, 700, None]) as url,
            RolloutClient(url, retry=retry, **settings) as client,
        ):
            [rollout] = await client.generate(SHORT, sampling)
            assert client.num_retries == 3
        async with RolloutClient(server, **settings) as client:
            return rollout, (await client.generate(SHORT, sampling))[0]

    rollout, expected = asyncio.run(asyncio.wait_for(main(), 120))
    check(rollout, SHORT, 4)
    alike(rollout, expected)


def test_what_the_server_refuses_is_raised_at_once_with_its_words(server):
    async def use(client: RolloutClient) -> None:
        with pytest.raises(ServerError, match=r"status 400: .*(512|maximum context)") as raised:
            await client.generate(LONG * 4, {**SAMPLING, "max_tokens": 2})
        assert raised.value.status == 400
        with pytest.raises(ServerError, match=r"status 404: .*nobody"):
            await RolloutClient.generate(other, SHORT, {**SAMPLING, "max_tokens": 2})
        assert (client.num_retries, other.num_retries) == (0, 0)

    other = RolloutClient(server, model="nobody")

    async def both(client: RolloutClient) -> None:
        async with other:
            await use(client)

    run(server, both)


def test_a_server_with_masks_answers_500_without_a_word_to_what_the_client_refuses(server):
    payload = {"token_ids": SHORT, "sampling_params": {"max_tokens": 2, "temperature": 1.0}}
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(server, "/inference/v1/generate", payload)
    assert raised.value.code == 500
    assert json.load(raised.value)["error"]["message"] == ""

    async def use(client: RolloutClient) -> None:
        with pytest.raises(ValueError, match="top_k must be given and above 0"):
            await client.generate(SHORT, payload["sampling_params"])

    run(server, use)


def test_text_for_tokens_is_refused_by_name(server):
    """Without ``return_tokens_as_token_ids`` several tokens collapse to one string."""
    from packhorse.replay.vllm_http import read_reply

    payload = {
        **SAMPLING, "prompt": SHORT, "max_tokens": 3, "logprobs": 5, "return_token_ids": True
    }  # fmt: skip
    reply = post(server, "/v1/completions", payload)
    with pytest.raises(WireFormatError, match="is no token_id:N; send"):
        read_reply(reply, support="logprobs")


def test_many_requests_at_a_time_come_back_to_their_own(server):
    async def use(client: RolloutClient) -> list[list[Rollout]]:
        sampling = {**SAMPLING, "max_tokens": 3}
        asked = (client.generate(LONG[: 10 + i], sampling) for i in range(8))
        return await asyncio.gather(*asked)

    for i, [rollout] in enumerate(run(server, use, max_concurrency=4)):
        check(rollout, LONG[: 10 + i], 3)
