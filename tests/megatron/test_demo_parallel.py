"""The demo on several ranks: real gloo processes through Megatron's schedules, held to one rank.

Every logprob of every variant is within 1e-5 of the one-rank demo's in fp32, live and replayed, and
so are the routes, the gradient's norm and the rows. Expected pads are counted here by hand.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.replay import demo, demo_ranks
from packhorse.replay.demo_model import Sizes

REPOSITORY = Path(__file__).parent.parent.parent
#: tokens of the longest trajectory of each microbatch of three, and of all nine, of both captures
LONGEST, TOKENS = (41, 143, 212), 1020
REPLAYED = TOKENS - 9  # the last sampled token of each was never evaluated
ROUTERS = {"qwen3_moe": 4, "glm4_moe": 3}  # the first layer of the second is dense


def run(*options: object) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(option) for option in options]))


def measure(monkeypatch, *options: object) -> demo.Demo:
    """One run in fp32: what its table was made of."""
    seen = []
    lines = demo.report_lines

    def keep(given: demo.Demo) -> list[str]:
        seen.append(given)
        return lines(given)

    monkeypatch.setattr(demo, "report_lines", keep)
    assert run("--dtype", "fp32", *options) == 0
    return seen[0]


@pytest.fixture(scope="module")
def one_rank(_megatron):
    with pytest.MonkeyPatch.context() as patch:
        return {family: measure(patch, "--family", family).results["fp32"] for family in ROUTERS}


TP2 = "2 processes over gloo: tp 2 (sequence parallel)"
PP2_VPP2 = "2 processes over gloo: pp 2, vpp 2"
EP2 = "2 processes over gloo: ep 2 (2 replicas)"
CP2 = "2 processes over gloo: cp 2 (zigzag)"
TP2_EP2 = "4 processes over gloo: tp 2 (sequence parallel), ep 2 (2 replicas)"


@pytest.mark.parametrize(
    ("family", "options", "multiple", "said"),
    [
        ("qwen3_moe", "--tp 2", 2, TP2),
        ("qwen3_moe", "--pp 2 --vpp 2", 1, PP2_VPP2),
        ("qwen3_moe", "--ep 2", 1, EP2),
        ("qwen3_moe", "--cp 2", 4, CP2),
        ("qwen3_moe", "--tp 2 --ep 2", 2, TP2_EP2),
        ("glm4_moe", "--pp 2 --vpp 2", 1, PP2_VPP2),  # a chunk without experts
        ("glm4_moe", "--cp 2", 4, CP2),  # half of each head is rotated
        ("glm4_moe", "--tp 2 --ep 2", 2, TP2_EP2),  # a shared expert in two, the others whole
    ],
)
def test_every_layout_gives_one_ranks_figures(
    family, options, multiple, said, one_rank, monkeypatch, capsys
):
    one_rank, routers = one_rank[family], ROUTERS[family]
    ran = measure(monkeypatch, "--family", family, "--device", "cpu", *options.split())
    output = capsys.readouterr().out
    assert f"\nranks     {said}\n" in output
    found = ran.results["fp32"]
    for variant, expected in one_rank.differences.items():
        assert found.differences[variant].shape == (133,)
        np.testing.assert_allclose(
            found.differences[variant], expected, rtol=0, atol=1e-5, err_msg=variant
        )
    np.testing.assert_array_equal(found.differing, one_rank.differing)
    assert found.differing_replayed.shape == found.differing.shape
    assert not found.differing_replayed.any()
    assert found.recompute_difference <= 1e-5
    assert found.router_gradient == pytest.approx(one_rank.router_gradient, rel=1e-4)
    assert found.unfinished_gradients == ()
    scored = np.concatenate(ran.capture.sampled_logprobs) + found.differences["both"]
    assert found.loss == pytest.approx(-scored.mean(), rel=1e-5)
    pads = sum(3 * -(-longest // multiple) * multiple for longest in LONGEST) - TOKENS
    for report in (found.forward_report, found.training_report):
        assert report.completed
        assert (report.rows_replayed, report.rows_live) == (REPLAYED, 0)
        assert report.rows_dummy == pads + 9
        assert len(report.asked) == routers
        assert set(report.asked.values()) == {3}
    assert found.training_report.recomputed_calls == 3 * routers
    assert f"{routers} of {routers}, {3 * routers} times" in output
    assert f"{REPLAYED:,} / {pads + 9} / 0" in output


# --- refusals: exit code 2, one line, nothing started ---------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tp 3", "--tp 3 does not divide the model's 4 attention heads"),
        ("--tp 4", "--tp 4 does not divide the model's 2 key-value heads"),
        ("--pp 3", "--pp 3 does not divide the model's 4 layers"),
        ("--pp 2 --vpp 3", "--pp 2 --vpp 3 make 6 model chunks, which do not divide the model's 4"),
        ("--vpp 2", "--vpp 2 needs --pp 2 or more, got 1"),
        (
            "--pp 2 --vpp 2 --microbatch-size 9",
            "--vpp 2 needs as many microbatches as stages: 2, there are 1 (--microbatch-size)",
        ),
        ("--ep 3", "--ep 3 does not divide the model's 8 experts"),
        ("--ep 4", "among 4 replicas, but one microbatch has 3 (--microbatch-size)"),
        ("--ep 2 --microbatch-size 1", "among 2 replicas, but one microbatch has 1"),
        ("--cp 0", "--cp must be at least 1, got 0"),
        ("--tp -1", "--tp must be at least 1, got -1"),
        ("--cp 65", "make 65 processes, at most 64 are started"),
        ("--tp 2 --timeout 0", "--timeout must be above 0, got 0.0"),
        (
            "--cp 64 --device cuda",
            "--device cuda needs 64 GPUs, one a rank (--cp 64), found"
            f" {torch.cuda.device_count()}\n",
        ),
    ],
)
def test_impossible_sizes_are_refused_by_option(options, message, monkeypatch, capsys):
    monkeypatch.setattr(demo_ranks, "_command", lambda *_: pytest.fail("a rank was started"))
    assert run(*options.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("packhorse demo: ")
    assert message in captured.err


# --- a GPU each, or none --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found", "options", "place"),
    [
        (None, 0, "", "cpu"),
        (None, 1, "", "cuda"),
        (None, 1, "--tp 2", "cpu"),
        (None, 2, "--tp 2", "cuda"),
        (None, 3, "--tp 2 --ep 2", "cpu"),
        ("cuda", 4, "--tp 2 --ep 2", "cuda"),
        ("cpu", 4, "--tp 2", "cpu"),
        ("cpu", 0, "", "cpu"),
        ("cuda", 0, "", "--device cuda needs a GPU, found 0"),
        ("cuda", 1, "--cp 2", "--device cuda needs 2 GPUs, one a rank (--cp 2), found 1"),
        ("cuda", 3, "--pp 2 --vpp 2 --ep 2", "needs 4 GPUs, one a rank (--pp 2 --ep 2), found 3"),
        ("cpu", 2, "", "where one rank sees one, found 2; hide them with CUDA_VISIBLE_DEVICES="),
    ],
)
def test_ranks_are_on_gpus_where_there_are_as_many(asked, found, options, place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args([*options.split(), *(["--device", asked] if asked else [])])
    sizes = demo_ranks.sizes_of(args)
    if place in ("cpu", "cuda"):
        assert demo_ranks.device_of(sizes, args) == torch.device(place)
        return
    with pytest.raises(ValueError, match=f"{re.escape(place)}$"):
        demo_ranks.device_of(sizes, args)


def test_a_rank_sees_the_gpus_only_where_it_computes_on_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for name in ("NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert demo_ranks.environment_of(torch.device("cpu"))["CUDA_VISIBLE_DEVICES"] == ""
    found = demo_ranks.environment_of(torch.device("cuda"))
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert found["NCCL_NVLS_ENABLE"] == "0"  # multicast is off
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    assert demo_ranks.environment_of(torch.device("cuda"))["NCCL_NVLS_ENABLE"] == "2"


def test_the_table_says_where_the_ranks_computed():
    sizes = Sizes(tp=2, pp=2)
    assert demo_ranks.shown(sizes, torch.device("cuda")) == (
        "4 processes over NCCL, a GPU each: tp 2 (sequence parallel), pp 2"
    )
    assert demo_ranks.shown(sizes, torch.device("cpu")) == (
        "4 processes over gloo: tp 2 (sequence parallel), pp 2"
    )


# --- ranks that do not end well: exit code 1, nobody is left --------------------------------------


def start_instead(monkeypatch, tmp_path: Path, programs: list[str]) -> Path:
    """Rank r runs ``programs[r]``; the file that names the processes."""
    pids = tmp_path / "pids"

    def command(rank: int, world: int, folder: Path) -> list[str]:
        note = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n"
        return [
            *(sys.executable, "-c", note + programs[rank]),
            *(str(rank), str(world), str(folder)),
        ]

    monkeypatch.setattr(demo_ranks, "_command", command)
    return pids


def assert_ended(pids: Path) -> None:
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("time.sleep(0.5); os.kill(os.getpid(), 9)", "rank 1 of 2 ended by signal 9"),
        ("time.sleep(0.5); print('a last word'); os._exit(3)", "rank 1 of 2 ended with code 3"),
    ],
)
def test_a_rank_that_dies_ends_the_others(program, message, monkeypatch, tmp_path, capsys):
    pids = start_instead(monkeypatch, tmp_path, ["time.sleep(3600)", program])
    began = time.monotonic()
    assert run("--tp", 2) == 1
    assert time.monotonic() - began < 30
    errors = capsys.readouterr().err
    assert errors.endswith(f"packhorse demo: {message}\n")
    assert_ended(pids)


HANGS = """
import sys, time
from pathlib import Path
from packhorse.replay import demo_worker

def wait_for_ever(*_):
    Path(sys.argv[1]).touch()
    time.sleep(3600)

demo_worker.run_rank = wait_for_ever
demo_worker.serve(0, 2, None)
"""


def test_a_rank_that_hangs_shows_where(tmp_path):
    ready, log = tmp_path / "ready", tmp_path / "rank0.log"
    with open(log, "wb") as output:
        rank = subprocess.Popen(
            [sys.executable, "-c", HANGS, str(ready)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
        )
    assert rank.stdin is not None
    try:
        rank.stdin.write("{}\n")
        rank.stdin.flush()
        wait_until(ready.exists, 300)
        said = demo_ranks._where_they_are([rank], [log])
    finally:
        rank.kill()
        rank.wait()
        rank.stdin.close()
    assert said.startswith("rank0:\n")
    assert re.search(r"^  File .* in wait_for_ever$", said, re.MULTILINE)


def test_ranks_that_hang_are_ended_in_time(monkeypatch, tmp_path, capsys):
    pids = start_instead(monkeypatch, tmp_path, ["time.sleep(3600)", "os._exit(0)"])
    assert run("--tp", 2, "--timeout", 2) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("rank0:\n")
    assert errors.endswith("packhorse demo: rank 0 of 2 did not end in 2 s (--timeout)\n")
    assert_ended(pids)


FAILS = """
import sys
from pathlib import Path
from packhorse.replay import demo_parallel, demo_worker

def fail(*args, **options):
    raise OSError("a fault\\non purpose")

if sys.argv[1] == "1":
    demo_parallel.share_out = fail
sys.exit(demo_worker.serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
"""


def test_a_rank_that_raises_is_the_one_that_is_named(monkeypatch, tmp_path, capsys):
    """Not its peer, which waits for it in a collective."""
    pids = start_instead(monkeypatch, tmp_path, [FAILS, FAILS])
    assert run("--tp", 2, "--dtype", "fp32", "--device", "cpu") == 1
    errors = capsys.readouterr().err
    assert re.search(r"^  File .* in fail$", errors, re.MULTILINE)
    assert errors.endswith("packhorse demo: rank 1 of 2 failed: OSError: a fault on purpose\n")
    assert_ended(pids)


PARENT = """
import argparse, sys
from packhorse.replay import demo, demo_ranks
program = '''import os, sys, time
from packhorse.replay import demo_worker
demo_worker.run_rank = lambda *_: (print(os.getpid(), file=open(%r, "a")), time.sleep(3600))
demo_worker.serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
''' % sys.argv[1]
demo_ranks._command = lambda *where: [sys.executable, "-c", program, *map(str, where)]
parser = argparse.ArgumentParser()
demo.add_arguments(parser)
demo.run(parser.parse_args(["--tp", "2", "--device", "cpu"]))
"""


def test_ranks_whose_parent_is_gone_end(tmp_path):
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(pids)], cwd=REPOSITORY)
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 300)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(is_running, pids.read_text().split())), 20)


def is_running(pid: str) -> bool:
    """Not ended, and no zombie that nobody has waited for."""
    try:
        os.kill(int(pid), 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
