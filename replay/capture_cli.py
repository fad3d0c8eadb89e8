"""``python -m packhorse capture``: sample from vLLM and write a capture that the demo replays.

From a local model, run by the vLLM of this environment (or of ``--python``'s), or from a server.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from packhorse.replay.capture_save import save_capture
from packhorse.replay.rollout import EngineModel, Rollout, read_engine_model
from packhorse.replay.vllm import (
    CaptureSettings,
    capture_settings,
    preflight,
    read_request_output,
)

#: A reply was wrong, or a request failed.
EXIT_FAILED: Final = 1
#: The run could not begin: a setting, a file, something not installed.
EXIT_REFUSED: Final = 2

_NO_VLLM: Final = (
    "vLLM is not installed in this environment: name one that has it and packhorse with --python"
    " (tools/vllm.sh makes one), or a running server with --server"
)


class Refused(Exception):
    """The run cannot begin."""


@dataclass(frozen=True)
class Prompt:
    """One line of the prompts: exactly one of the three."""

    where: str
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``capture`` on ``parser``."""
    parser.allow_abbrev = False  # the other Python gets the words but --python, whole
    parser.add_argument("prompts", nargs="?", default="-", metavar="PROMPTS",
                        help="a file with one prompt a line; .jsonl: a line is a string, a list"
                        " of token ids, or an object with prompt, token_ids or messages; -:"
                        " stdin")  # fmt: skip
    parser.add_argument("--out", default="capture.npz", metavar="FILE",
                        help=".npz or .safetensors; default: capture.npz")  # fmt: skip
    parser.add_argument("--model", metavar="DIR",
                        help="checkpoint folder: what vLLM runs; with --server, whose config.json"
                        " the replies are held to")  # fmt: skip
    parser.add_argument("--server", metavar="URL", help="a running vLLM server in place of that")
    parser.add_argument("--python", metavar="PYTHON",
                        help="of an environment with vLLM and packhorse, to run there")  # fmt: skip
    parser.add_argument("--jsonl", action="store_true", help="prompts are JSON lines")
    parser.add_argument("--support", choices=["mask", "logprobs"], default="mask",
                        help="the sampler's support from vLLM's mask or from its logprobs;"
                        " default: mask")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1")
    parser.add_argument("--top-k", type=int, default=20, metavar="K", help="default: 20")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: 0")
    parser.add_argument("--seed", type=int, metavar="S",
                        help="request i is seeded with S + i; default: not seeded")  # fmt: skip
    parser.add_argument("--n", type=int, default=1, metavar="N", help="responses a prompt")
    parser.add_argument("--ignore-eos", action="store_true", help="sample max-tokens always")
    parser.add_argument("--device", choices=["cuda", "cpu"],
                        help="default: what vLLM is built for")  # fmt: skip
    parser.add_argument("--engine", default="{}", metavar="JSON",
                        help="more arguments of vllm.LLM: '{\"max_model_len\": 4096}'")  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=16, metavar="N",
                        help="requests at a time to --server; default: 16")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run ``capture``.

    Returns:
        0; ``EXIT_FAILED`` where a reply was wrong; ``EXIT_REFUSED`` after one line on stderr about
        what keeps it from running.
    """
    if args.python is not None:
        return _run_elsewhere(args)
    try:
        if args.model is None and args.server is None:
            raise Refused("name a checkpoint folder with --model, or a server with --server")
        if Path(args.out).suffix not in (".npz", ".safetensors"):
            raise Refused(f"--out {args.out} must end in .npz or .safetensors")
        _check_out(Path(args.out))
        prompts = read_prompts(args.prompts, jsonl=args.jsonl)
        begin = time.perf_counter()
        if args.server is None:
            rollouts, meta = _from_model(args, prompts)
        else:
            rollouts, meta = asyncio.run(_from_server(args, prompts))
    except Refused as error:
        sys.stderr.write(f"packhorse capture: {error}\n")
        return EXIT_REFUSED
    except (ValueError, RuntimeError, ConnectionError, OSError) as error:
        sys.stderr.write(f"packhorse capture: {str(error) or type(error).__name__}\n")
        return EXIT_FAILED
    seconds = time.perf_counter() - begin
    kept = [rollout for rollout in rollouts if rollout.response_ids.size]
    if not kept:
        sys.stderr.write("packhorse capture: no response has a token\n")
        return EXIT_FAILED
    try:
        num_bytes = save_capture(args.out, kept, meta=meta)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"packhorse capture: {error}\n")
        return EXIT_FAILED
    sys.stdout.write("\n".join(_summary(args, kept, len(rollouts), num_bytes, seconds)) + "\n")
    return 0


def _check_out(path: Path) -> None:
    """What would lose the responses only once they are there."""
    if not path.parent.is_dir():
        raise Refused(f"--out {path}: there is no folder {path.parent}")
    if path.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise Refused(f"--out {path}: safetensors is not installed")


def _summary(
    args: argparse.Namespace, kept: Sequence[Rollout], total: int, num_bytes: int, seconds: float
) -> list[str]:
    prompt = sum(rollout.prompt_ids.size for rollout in kept)
    response = sum(rollout.response_ids.size for rollout in kept)
    routes = [rollout.routes for rollout in kept if rollout.routes is not None]
    widths = np.concatenate([np.diff(r.support.row_offsets) for r in kept if r.support is not None])
    cached = sum(rollout.num_cached_tokens or 0 for rollout in kept)
    floored = sum(rollout.num_floored for rollout in kept)
    added = sum(rollout.num_added for rollout in kept)
    lines = [
        f"responses {len(kept)} in {seconds:.1f} s: {prompt} prompt and {response} sampled tokens",
        f"routes    {sum(len(rows) for rows in routes)} rows of {routes[0].shape[1]} x"
        f" {routes[0].shape[2]}, {routes[0].dtype}; {cached} tokens were in the prefix cache",
        f"support   {widths.min()} to {widths.max()} ids a token, {widths.mean():.1f} on average;"
        f" the sampled id added to {added} rows",
        f"logprobs  {floored} missing",
        f"written   {args.out}, {num_bytes} bytes: python -m packhorse demo --capture {args.out}"
        + (f" --model {args.model}" if args.model else ""),
    ]
    if total > len(kept):
        lines.insert(1, f"left out  {total - len(kept)} responses without a token")
    return lines


# --- prompts --------------------------------------------------------------------------------------


def read_prompts(path: str, *, jsonl: bool = False) -> list[Prompt]:
    """One prompt a line that is not empty; of stdin where ``path`` is ``-``."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise Refused(f"{path}: {reason}") from error
    place = "stdin" if path == "-" else path
    json_lines = jsonl or path.endswith(".jsonl")
    prompts = []
    # not splitlines(): it also breaks at U+2028 and others, which JSON strings and texts may hold
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{place}, line {number}"
        prompts.append(_json_prompt(where, line) if json_lines else Prompt(where, text=line))
    if not prompts:
        raise Refused(f"{place} has no prompt")
    return prompts


def _json_prompt(where: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where} is not JSON ({error})") from error
    if isinstance(value, str):
        value = {"prompt": value}
    elif isinstance(value, list):
        value = {"token_ids": value}
    if not isinstance(value, dict):
        raise Refused(f"{where} must be a string, a list of token ids or an object")
    given = [key for key in ("prompt", "token_ids", "messages") if key in value]
    if len(given) != 1:
        raise Refused(f"{where} must have one of prompt, token_ids and messages, has {given}")
    content = value[given[0]]
    if given == ["prompt"]:
        if not isinstance(content, str):
            raise Refused(f"{where}: prompt must be a string")
        return Prompt(where, text=content)
    if given == ["token_ids"]:
        if not isinstance(content, list) or not content or {*map(type, content)} != {int}:
            raise Refused(f"{where}: token_ids must be a list of integers, not empty")
        if min(content) < 0 or max(content) >= 2**31:
            raise Refused(f"{where}: token_ids must be from 0 to 2**31 - 1")
        return Prompt(where, token_ids=content)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise Refused(f"{where}: messages must be a list of objects")
    return Prompt(where, messages=content)


# --- a model in this process ----------------------------------------------------------------------


def _from_model(
    args: argparse.Namespace, prompts: Sequence[Prompt]
) -> tuple[list[Rollout], dict[str, Any]]:
    settings = _settings(args)
    os.environ.update(settings.environment)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # one process and so one address space for prompts, engine and replies
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(args.model, **settings.engine)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[-1] or type(error).__name__
        raise Refused(f"vLLM {settings.version} does not start: {reason}") from error
    layers = preflight(llm, settings)
    sys.stderr.write(f"vLLM {settings.version} on {settings.device}: {layers}\n")
    inputs = [_engine_input(llm, prompt) for prompt in prompts]
    asked = [
        SamplingParams(**settings.sampling | _seed(args, number)) for number in range(len(prompts))
    ]
    outputs = llm.generate(inputs, asked)  # draws vLLM's own progress bar
    rollouts = [
        rollout
        for output in outputs
        for rollout in read_request_output(output, settings, model=layers.model)
    ]
    dtype = str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    meta = _meta(args, settings.version, settings.sampling) | {
        "dtype": dtype,
        "device": settings.device,
        "engine": {k: v for k, v in settings.engine.items() if _is_plain(v)},
    }
    return rollouts, meta


def _settings(args: argparse.Namespace) -> CaptureSettings:
    engine = _json_object("--engine", args.engine)
    try:
        return capture_settings(
            support=args.support, engine=engine, sampling=_sampling(args), device=args.device
        )
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise Refused(_NO_VLLM) from error
    except ValueError as error:
        raise Refused(error) from error


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "n", "ignore_eos")
    return {name: getattr(args, name) for name in names}


def _seed(args: argparse.Namespace, number: int) -> dict[str, int]:
    return {} if args.seed is None else {"seed": args.seed + number}


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Refused(f"{option}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise Refused(f"{option} must be a JSON object, got {text}")
    return value


def _engine_input(llm: Any, prompt: Prompt) -> Any:
    if prompt.text is not None:
        return prompt.text
    ids = prompt.token_ids
    if prompt.messages is not None:
        try:
            ids = llm.get_tokenizer().apply_chat_template(
                prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program
            raise Refused(f"{prompt.where}: the chat template fails ({error})") from error
    return {"prompt_token_ids": list(ids or [])}


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _meta(args: argparse.Namespace, version: str, sampling: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "made_by": "python -m packhorse capture",
        "vllm": version,
        "sampling": {name: value for name, value in sampling.items() if _is_plain(value)},
    }
    if args.seed is not None:
        meta["seed"] = args.seed
    if args.model is not None:
        config = _config(args.model)
        if config is not None:
            meta["model_config"] = config
        weights = Path(args.model) / "model.safetensors"
        if weights.is_file():
            with weights.open("rb") as stream:
                meta["model_sha256"] = _sha256(stream)
    return meta


def _config(folder: str) -> dict[str, Any] | None:
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    return _json_object(str(path), path.read_text(encoding="utf-8"))


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


# --- a server -------------------------------------------------------------------------------------


async def _from_server(
    args: argparse.Namespace, prompts: Sequence[Prompt]
) -> tuple[list[Rollout], dict[str, Any]]:
    from packhorse.replay.client import RolloutClient

    config = None if args.model is None else _config(args.model)
    model = EngineModel() if config is None else read_engine_model(config)
    num_logprobs = args.top_k + 16 if args.support == "logprobs" else 0
    async with RolloutClient(
        args.server,
        support=args.support,
        num_logprobs=num_logprobs,
        engine=model,
        max_concurrency=args.concurrency,
    ) as client:
        version = await client.version()
        try:
            settings = capture_settings(
                support=args.support,
                sampling=_sampling(args) | ({"logprobs": num_logprobs} if num_logprobs else {}),
                version=version,
                endpoint="generate",
            )
        except ValueError as error:
            raise Refused(error) from error
        sampling = {k: v for k, v in settings.sampling.items() if k != "logprobs"}
        bar = _Bar(len(prompts))

        async def one(number: int, prompt: Prompt) -> list[Rollout]:
            ids = prompt.token_ids
            if ids is None:
                try:
                    ids = await client.tokenize(
                        prompt.messages or [] if prompt.text is None else prompt.text
                    )
                except (ValueError, RuntimeError, ConnectionError) as error:
                    raise RuntimeError(f"{prompt.where}: {error}") from error
            found = await client.generate(ids, sampling | _seed(args, number))
            bar.add(sum(rollout.response_ids.size for rollout in found))
            return found

        tasks = [asyncio.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            bar.end()
    return [rollout for part in found for rollout in part], _meta(args, version, sampling)


class _Bar:
    """Requests that are done, on a terminal's stderr."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._tokens = total, 0, 0
        self._begin = time.perf_counter()
        self._shown = sys.stderr.isatty()

    def add(self, num_tokens: int) -> None:
        self._done += 1
        self._tokens += num_tokens
        if self._shown:
            filled = 30 * self._done // self._total
            rate = self._tokens / max(time.perf_counter() - self._begin, 1e-9)
            sys.stderr.write(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {self._done}/{self._total} requests,"
                f" {self._tokens} tokens, {rate:.0f}/s"
            )
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\n")


# --- in another environment -----------------------------------------------------------------------


def _run_elsewhere(args: argparse.Namespace) -> int:
    """The same command by another Python, which must have vLLM and packhorse."""
    probe = "import packhorse, vllm"
    try:
        found = subprocess.run([args.python, "-c", probe], capture_output=True, text=True)
    except OSError as error:
        sys.stderr.write(f"packhorse capture: --python {args.python}: {error.strerror}\n")
        return EXIT_REFUSED
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["it failed"])[-1]
        sys.stderr.write(f"packhorse capture: --python {args.python}: {reason}\n")
        return EXIT_REFUSED
    words = list(sys.argv[2:] if args.given is None else args.given)
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == "--python":
            skip = True
        elif not word.startswith("--python="):
            kept.append(word)
    return subprocess.run([args.python, "-m", "packhorse", "capture", *kept]).returncode
