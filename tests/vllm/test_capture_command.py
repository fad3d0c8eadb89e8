"""``python -m packhorse capture`` from a model and from a server, into files that load whole."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.__main__ import main
from packhorse.replay.capture import Capture
from tests.vllm.conftest import DATA, SMALL, random_ids

MODEL = str(DATA / "tiny_moe")
MESSAGES = [{"role": "user", "content": "one plus one"}]
LINES = ["the quick brown fox", random_ids(140, 1), {"messages": MESSAGES}]


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return str(path)


def check(path: Path, count: int, tokens: int) -> Capture:
    """Tokens as the tokenizer has them; sizes of the model from the file's own meta."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    capture = Capture.load(path)
    text = tokenizer.encode(LINES[0])
    chat = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    expected = [ids for ids in (text, LINES[1], chat) for _ in range(count)]
    assert [ids.tolist() for ids in capture.prompt_ids] == expected
    assert {ids.size for ids in capture.response_ids} == {tokens}
    assert (capture.num_experts, capture.vocab_size, capture.num_layers) == (8, 512, 4)
    assert list(capture.routes.lengths) == [len(ids) + tokens - 1 for ids in expected]
    assert capture.meta["vllm"].startswith("0.32.")
    assert capture.meta["sampling"]["top_k"] == 20
    return capture


def test_a_local_model_is_sampled_in_this_process(prompts, tmp_path, capsys, monkeypatch):
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    path = tmp_path / "local.npz"
    try:
        assert main([
            "capture", prompts, "--model", MODEL, "--out", str(path), "--max-tokens", "4",
            "--n", "2", "--ignore-eos", "--engine", json.dumps(SMALL), "--device", "cpu",
        ]) == 0  # fmt: skip
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
    said = capsys.readouterr()
    assert "4 of 4 layers have experts, 2 of 8 a token" in said.err
    assert "responses 6 in " in said.out  # behind what vLLM logs
    capture = check(path, 2, 4)
    assert capture.meta["dtype"] == "bfloat16"
    assert capture.meta["engine"]["enforce_eager"] is True
    assert not np.array_equal(capture.response_ids[2], capture.response_ids[3])


@pytest.mark.parametrize("support", ["mask", "logprobs"])
def test_a_server_is_asked_and_tokenizes(server, prompts, tmp_path, capsys, support: Any):
    path = tmp_path / "served.safetensors"
    assert main([
        "capture", prompts, "--server", server, "--model", MODEL, "--out", str(path),
        "--max-tokens", "4", "--seed", "7", "--ignore-eos", "--support", support,
    ]) == 0  # fmt: skip
    assert capsys.readouterr().out.startswith("responses 3 in ")
    assert check(path, 1, 4).meta["seed"] == 7


def test_a_server_that_is_not_there_is_one_line(prompts, tmp_path, capsys):
    path = tmp_path / "none.npz"
    assert main(["capture", prompts, "--server", "http://127.0.0.1:9", "--out", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("packhorse capture: ")
    assert len(said.splitlines()) == 1
    assert not path.exists()
