"""Writing captures, and ``python -m packhorse capture`` as far as it goes without vLLM."""

import asyncio
import io
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from packhorse.__main__ import main
from packhorse.replay.capture import Capture
from packhorse.replay.capture_cli import Prompt, Refused, read_prompts
from packhorse.replay.capture_save import save_capture
from packhorse.replay.rollout import make_rollout
from tests.replay import client_server as engine
from tests.replay.client_server import Request, Server, http, plain, whole

META = {
    "vllm": "0.32.0", "model_config": {"n_routed_experts": 8, "vocab_size": 16},
    "sampling": {"temperature": 1.0},
}  # fmt: skip


def rollouts(num_layers: int = 2):
    rng = np.random.default_rng(1)
    made = []
    for num_prompt, num_response in ((3, 2), (1, 1), (4, 3)):
        response = rng.integers(0, 16, num_response).tolist()
        rows = rng.random((num_prompt + num_response - 1, num_layers, 8)).argsort(-1)[..., :2]
        made.append(
            make_rollout(
                rng.integers(0, 16, num_prompt).tolist(), response, routes=rows,
                logprobs=[-0.5] * num_response, num_cached_tokens=num_prompt - 1,
                support=[[id, (id + 1) % 16] for id in response],
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_is_saved_is_loaded(suffix, tmp_path):
    path = tmp_path / f"capture{suffix}"
    saved = rollouts()
    size = save_capture(path, saved, meta=META, columns={"request_seed": [7, 8, 9]})
    assert size == path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]
    capture = Capture.load(path)
    assert (capture.num_experts, capture.vocab_size) == (8, 16)
    assert capture.meta["capture_version"] == 1
    assert capture.optional["request_seed"].tolist() == [7, 8, 9]
    assert capture.optional["num_cached_tokens"].tolist() == [2, 0, 3]
    for i, rollout in enumerate(saved):
        assert np.array_equal(capture.prompt_ids[i], rollout.prompt_ids)
        assert np.array_equal(capture.response_ids[i], rollout.response_ids)
        assert np.array_equal(capture.routes.segment(i).numpy(), rollout.routes)
        assert np.array_equal(capture.sampled_logprobs[i], rollout.logprobs)
        rows = capture.support.segment(i).tolist()
        offsets = rollout.support.row_offsets.tolist()
        ids = rollout.support.token_ids.tolist()
        assert rows == [ids[a:b] for a, b in itertools.pairwise(offsets)]


def without(field):
    given = rollouts()
    arguments = {
        "routes": given[1].routes, "logprobs": given[1].logprobs, "support": given[1].support,
    }  # fmt: skip
    arguments[field] = None
    given[1] = make_rollout(given[1].prompt_ids, given[1].response_ids, **arguments)
    return given


@pytest.mark.parametrize("field", ["routes", "logprobs", "support"])
def test_a_rollout_that_lacks_a_field_is_not_saved(field, tmp_path):
    with pytest.raises(ValueError, match=f"rollout 1 has no {field}"):
        save_capture(tmp_path / "c.npz", without(field))
    assert list(tmp_path.iterdir()) == []


def test_what_no_capture_can_hold_is_refused(tmp_path):
    whole = rollouts()
    late = make_rollout([1, 2, 3], [4, 5], routes=np.array([[[0, 1]] * 2] * 2), routes_start=2,
                        logprobs=[-1.0] * 2, support=[[4], [5]])  # fmt: skip
    cases = [
        (tmp_path / "c.npy", whole, {}, "must end in .npz or .safetensors"),
        (tmp_path / "c.npz", [], {}, "there is no rollout"),
        (tmp_path / "c.npz", [*whole, late], {}, "routes of rollout 3 begin at 2"),
        (tmp_path / "c.npz", [*whole, *rollouts(3)], {}, "of rollout 3 are .* of other layers"),
        (tmp_path / "c.npz", whole, {"meta": {"a": float("nan")}}, "meta is no JSON"),
        (tmp_path / "c.npz", whole, {"columns": {"turn": [1]}}, "turn has 1 entries for 3"),
    ]
    for path, given, more, message in cases:
        with pytest.raises(ValueError, match=message):
            save_capture(path, given, **more)
    assert list(tmp_path.iterdir()) == []


def test_a_capture_of_a_later_version_is_refused(tmp_path):
    save_capture(tmp_path / "c.npz", rollouts(), meta=META | {"capture_version": 2})
    with pytest.raises(ValueError, match="capture_version is 2; this packhorse reads up to 1"):
        Capture.load(tmp_path / "c.npz")


@pytest.mark.parametrize("cut", [0, 7, 40, 900])
def test_a_truncated_safetensors_file_is_one_line(cut, tmp_path):
    path = tmp_path / "c.safetensors"
    save_capture(path, rollouts(), meta=META)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="truncated, or no safetensors file") as raised:
        Capture.load(path)
    assert len(str(raised.value).splitlines()) == 1


# --- prompts --------------------------------------------------------------------------------------


def test_each_line_that_is_not_empty_is_a_prompt(tmp_path, monkeypatch):
    path = tmp_path / "prompts.txt"
    path.write_text("one plus one\n\n  \n[1, 2] is text here\n")
    texts = [prompt.text for prompt in read_prompts(str(path))]
    assert texts == ["one plus one", "[1, 2] is text here"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert read_prompts("-") == [Prompt("stdin, line 1", text="from stdin")]


def test_only_line_feeds_end_a_prompt(tmp_path, monkeypatch):
    """Not U+2028, U+0085 and form feed, which JSON need not escape and a text may hold."""
    texts = ["one\u2028two", "three\x85four\x0cfive"]
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeff" + "\r\n".join(texts), encoding="utf-8", newline="")
    assert [prompt.text for prompt in read_prompts(str(path))] == texts
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + "\n".join(texts)))
    assert [prompt.text for prompt in read_prompts("-")] == texts
    lines = "\n".join(json.dumps(text, ensure_ascii=False) for text in texts)
    path.with_suffix(".jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(str(path.with_suffix(".jsonl")))] == texts


def test_json_lines_are_text_token_ids_or_messages(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    lines = ["text", [1, 2], {"prompt": "more"}, {"token_ids": [3]}, {"messages": messages}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [(p.text, p.token_ids, p.messages) for p in read_prompts(str(path))] == [
        ("text", None, None), (None, [1, 2], None), ("more", None, None), (None, [3], None),
        (None, None, messages),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("3", "line 2 must be a string, a list of token ids or an object"),
        ("{}", "line 2 must have one of prompt, token_ids and messages"),
        ('{"prompt": "a", "token_ids": [1]}', "line 2 must have one of"),
        ('{"prompt": 1}', "line 2: prompt must be a string"),
        ("[]", "line 2: token_ids must be a list of integers"),
        ("[1, true]", "line 2: token_ids must be a list of integers"),
        ("[1, -1]", "line 2: token_ids must be from 0"),
        ("[1, 2147483648]", "line 2: token_ids must be from 0"),
        ('{"messages": "a"}', "line 2: messages must be a list of objects"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(Refused, match=message):
        read_prompts(str(path))


# --- the command ----------------------------------------------------------------------------------


def refused(capsys, *arguments: str) -> str:
    assert main(["capture", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("packhorse capture: ")
    return said.err


def test_a_run_that_cannot_begin_says_why_in_one_line(capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    given = str(prompts)
    assert "name a checkpoint folder with --model" in refused(capsys, given)
    assert "must end in .npz" in refused(capsys, given, "--model", "x", "--out", "c.txt")
    nowhere = str(tmp_path / "absent" / "c.npz")
    assert "there is no folder" in refused(capsys, given, "--model", "x", "--out", nowhere)
    assert "absent: No such file" in refused(capsys, str(tmp_path / "absent"), "--model", "x")
    prompts.write_text("\n")
    assert "has no prompt" in refused(capsys, given, "--model", "x")
    prompts.write_bytes(b"\xff\xfe\xfa")
    assert "it is not UTF-8" in refused(capsys, given, "--model", "x")
    prompts.write_text("one\n")
    for given_engine, message in (
        ("{", "--engine: not JSON"),
        ("3", "--engine must be a JSON object"),
    ):
        assert message in refused(capsys, given, "--model", "x", "--engine", given_engine)


def test_without_vllm_the_ways_to_it_are_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    said = refused(capsys, str(prompts), "--model", "x")
    assert "vLLM is not installed in this environment" in said
    assert "--python" in said
    assert "--server" in said


def test_another_python_without_vllm_is_named(capsys, tmp_path):
    absent = str(tmp_path / "python")
    assert f"--python {absent}: No such file" in refused(capsys, "--python", absent)
    this = Path(sys.executable)
    said = refused(capsys, "--model", "x", f"--python={this}")
    assert "No module named 'vllm'" in said


def test_an_option_is_not_abbreviated_so_that_the_other_python_does_not_start_itself_again(capsys):
    with pytest.raises(SystemExit):
        main(["capture", "--model", "x", "--pyth", sys.executable])
    assert "unrecognized arguments: --pyth" in capsys.readouterr().err


def serving(script, arguments: list[str]) -> int:
    """``capture`` from a server on a loopback port."""

    async def use() -> int:
        async with Server(script) as server:
            return await asyncio.to_thread(main, ["capture", "--server", server.url, *arguments])

    return asyncio.run(asyncio.wait_for(use(), 60))


def answered(request: Request) -> bytes:
    if request.path == "/version":
        return http(200, b'{"version": "0.32.0"}')
    if request.path == "/tokenize":
        return http(200, json.dumps({"tokens": engine.PROMPT}).encode())
    return whole(request)


def test_a_capture_from_a_server_is_loaded_again(capsys, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for any of the requests
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "c.npz"
    prompts.write_text('"text"\n[1, 2]\n{"messages": [{"role": "user", "content": "a"}]}\n')
    given = [str(prompts), "--out", str(out), "--max-tokens", "4", "--top-k", "3"]
    assert serving([plain(answered)], given) == 0
    assert "responses 3" in capsys.readouterr().out
    capture = Capture.load(out, num_experts=engine.E, vocab_size=engine.V)
    assert [ids.tolist() for ids in capture.prompt_ids] == [engine.PROMPT, [1, 2], engine.PROMPT]


def test_what_the_server_says_of_a_prompt_is_said_with_its_line(capsys, tmp_path):
    pytest.importorskip("aiohttp")

    def too_long(request: Request) -> bytes:
        if request.path == "/tokenize":
            return http(400, b'{"error": {"message": "messages lack a role"}}')
        return answered(request)

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\none\n")
    assert serving([plain(too_long)], [str(prompts), "--out", str(tmp_path / "c.npz")]) == 1
    said = capsys.readouterr().err
    assert "line 2: " in said
    assert "status 400: messages lack a role" in said
    assert len(said.splitlines()) == 1
