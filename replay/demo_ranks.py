"""The demo on several ranks: processes on this machine, started and watched from here.

Each rank is a ``demo_worker``: on a GPU of its own, over NCCL, or on the CPU, over gloo. All are
ended as soon as one has failed, or when the time is over.
"""

import argparse
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from packhorse.replay.checkpoint import MoeConfig
from packhorse.replay.compare import Comparison, Microbatch
from packhorse.replay.demo_model import Sizes

#: Of one machine: more is a slip of the keyboard.
MAX_RANKS = 64
_WORKER = "packhorse.replay.demo_worker"
#: For the others to say what they met, once a rank has failed.
_GRACE_S = 1.0
#: Where nothing else is set. Megatron asks for one connection where tensor-parallel ranks share a
#: sequence; NVLink multicast needs more of a machine than it always has.
_ON_GPUS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0"}


class Refused(Exception):
    """What keeps the demo from running, in one line."""


class RankFailed(Exception):
    """A rank raised, died or did not end in time. One line, and the rank's traceback if any."""

    def __init__(self, line: str, details: str = "") -> None:
        super().__init__(line)
        self.details = details


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a parallel run on ``parser``."""
    group = parser.add_argument_group(
        "several ranks, over NCCL on a GPU each or over gloo on the CPU"
    )
    for option, what in (
        ("tp", "tensor-parallel ranks, with sequence parallelism"),
        ("pp", "pipeline stages"),
        ("vpp", "model chunks of a stage, interleaved; needs --pp 2 or more"),
        ("ep", "expert-parallel ranks, over as many replicas that share the trajectories"),
        ("cp", "context-parallel ranks (zigzag)"),
    ):
        says = f"{what}; default: 1"
        group.add_argument(f"--{option}", type=int, default=1, metavar="N", help=says)
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds until ranks that have not ended are ended; default: 600",
    )


def sizes_of(args: argparse.Namespace) -> Sizes:
    return Sizes(**{name: getattr(args, name) for name in ("tp", "pp", "vpp", "ep", "cp")})


def check_sizes(sizes: Sizes, args: argparse.Namespace) -> None:
    """Refuse what no model can run. ValueError names the option."""
    for name in ("tp", "pp", "vpp", "ep", "cp"):
        if getattr(sizes, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(sizes, name)}")
    if sizes.vpp > 1 and sizes.pp == 1:
        raise ValueError(f"--vpp {sizes.vpp} needs --pp 2 or more, got 1")
    if sizes.world > MAX_RANKS:
        raise ValueError(
            f"--tp {sizes.tp} --pp {sizes.pp} --ep {sizes.ep} --cp {sizes.cp} make {sizes.world}"
            f" processes, at most {MAX_RANKS} are started"
        )
    if not args.timeout > 0:
        raise ValueError(f"--timeout must be above 0, got {args.timeout}")


def device_of(sizes: Sizes, args: argparse.Namespace) -> torch.device:
    """Where every rank computes: on a GPU each if there are as many, else on the CPU.

    Raises:
        ValueError: ``--device`` asks for what is not there; names it and the GPUs that were found.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cuda" and found < sizes.world:
        named = ("tp", "pp", "ep", "cp")
        options = " ".join(f"--{n} {getattr(sizes, n)}" for n in named if getattr(sizes, n) > 1)
        needed = f"{sizes.world} GPUs, one a rank ({options})" if options else "a GPU"
        raise ValueError(f"--device cuda needs {needed}, found {found}")
    if args.device == "cpu" and found and sizes.world == 1:
        raise ValueError(
            f"--device cpu: Megatron computes on a GPU where one rank sees one, found {found};"
            " hide them with CUDA_VISIBLE_DEVICES="
        )
    on_gpus = args.device != "cpu" and found >= sizes.world
    return torch.device("cuda" if on_gpus else "cpu")


def check_model(sizes: Sizes, config: MoeConfig, microbatches: Sequence[Microbatch]) -> None:
    """Refuse what this model and these microbatches cannot run. ValueError names the option."""
    shared = [
        ("tp", sizes.tp, config.num_heads, "attention heads"),
        ("tp", sizes.tp, config.num_kv_heads, "key-value heads"),
        ("tp", sizes.tp, config.vocab_size, "vocabulary ids"),
        ("tp", sizes.tp, config.moe_intermediate_size, "columns of an expert"),
        ("pp", sizes.pp, config.num_layers, "layers"),
        ("ep", sizes.ep, config.num_experts, "experts"),
    ]
    if len(config.moe_layers) < config.num_layers:
        shared.append(("tp", sizes.tp, config.intermediate_size, "columns of a dense layer"))
    if config.shared_intermediate_size:
        columns = config.shared_intermediate_size
        shared.append(("tp", sizes.tp, columns, "columns of the shared expert"))
    for name, size, count, what in shared:
        if count % size:
            raise ValueError(f"--{name} {size} does not divide the model's {count} {what}")
    if config.num_layers % (sizes.pp * sizes.vpp):
        raise ValueError(
            f"--pp {sizes.pp} --vpp {sizes.vpp} make {sizes.pp * sizes.vpp} model chunks, which do"
            f" not divide the model's {config.num_layers} layers"
        )
    if sizes.vpp > 1 and len(microbatches) < sizes.pp:
        raise ValueError(
            f"--vpp {sizes.vpp} needs as many microbatches as stages: {sizes.pp}, there are"
            f" {len(microbatches)} (--microbatch-size)"
        )
    fewest = min(microbatch.layout.num_sequences for microbatch in microbatches)
    if fewest < sizes.ep:
        raise ValueError(
            f"--ep {sizes.ep} shares a microbatch's trajectories out among {sizes.ep} replicas, but"
            f" one microbatch has {fewest} (--microbatch-size)"
        )


def shown(sizes: Sizes, device: torch.device) -> str:
    """What runs, for the table's head."""
    parts = [
        f"tp {sizes.tp} (sequence parallel)" if sizes.tp > 1 else "",
        f"pp {sizes.pp}" if sizes.pp > 1 else "",
        f"vpp {sizes.vpp}" if sizes.vpp > 1 else "",
        f"ep {sizes.ep} ({sizes.ep} replicas)" if sizes.ep > 1 else "",
        f"cp {sizes.cp} (zigzag)" if sizes.cp > 1 else "",
    ]
    over = "NCCL, a GPU each" if device.type == "cuda" else "gloo"
    return f"{sizes.world} processes over {over}: {', '.join(filter(None, parts))}"


# --- the parent -----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> tuple[dict[str, Comparison], float]:
    """Run the demo's schedules on ``sizes_of(args).world`` processes.

    Returns:
        dtype name -> what rank 0 put together; the seconds until it had imported Megatron.

    Raises:
        Refused: a rank refused what it was given; the message is its own.
        RankFailed: a rank raised, died, or did not end in ``args.timeout`` seconds. None is left.
    """
    sizes = sizes_of(args)
    world, device = sizes.world, device_of(sizes, args)
    deadline = time.monotonic() + args.timeout
    with (
        tempfile.TemporaryDirectory(prefix="packhorse-demo-") as name,
        _ranks(world, Path(name), args, device) as ranks,
    ):
        folder = Path(name)
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() not in (None, 0) for rank in ranks):
                break
            if time.monotonic() > deadline:
                late = [r for r, rank in enumerate(ranks) if rank.poll() is None]
                raise RankFailed(
                    f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} of {world} did"
                    f" not end in {args.timeout:g} s (--timeout)",
                    _where_they_are(
                        [ranks[r] for r in late], [folder / f"rank{r}.log" for r in late]
                    ),
                )
            time.sleep(0.02)
        if any(rank.poll() != 0 for rank in ranks):
            _explain(ranks, folder)
        return pickle.loads((folder / "result.pkl").read_bytes())


def environment_of(device: torch.device) -> dict[str, str]:
    """Of a rank's process: it finds packhorse, and sees this one's GPUs or none."""
    source = str(Path(__file__).absolute().parents[2])  # the folder that has packhorse
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))
    environment = {**os.environ, "PYTHONPATH": path}
    if device.type == "cuda":
        return _ON_GPUS | environment
    return environment | {"CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def _ranks(
    world: int, folder: Path, args: argparse.Namespace, device: torch.device
) -> Iterator[list[subprocess.Popen]]:
    """The processes; ended, whatever happened."""
    environment = environment_of(device)
    line = json.dumps({**vars(args), "device": device.type}) + "\n"
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(world):
            with open(folder / f"rank{rank}.log", "wb") as log:
                ranks.append(
                    subprocess.Popen(
                        _command(rank, world, folder),
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        text=True,
                    )
                )
        for process in ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died already: seen by its exit code
                process.stdin.write(line)
                process.stdin.flush()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


def _command(rank: int, world: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", _WORKER, str(rank), str(world), str(folder)]


def _where_they_are(ranks: Sequence[subprocess.Popen], logs: Sequence[Path]) -> str:
    """What ranks that hang are doing, each thread's stack, and what they said before."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # it ended meanwhile
            rank.send_signal(signal.SIGUSR1)
    time.sleep(_GRACE_S)
    said = [f"{log.stem}:\n{log.read_text(errors='replace').strip()[-20_000:]}\n" for log in logs]
    return "".join(said)


def _explain(ranks: Sequence[subprocess.Popen], folder: Path) -> None:
    """Raise for the rank that failed first: the others' errors are that it is gone."""
    until = time.monotonic() + _GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(0.02)
    errors = {}
    for rank in range(len(ranks)):
        with contextlib.suppress(OSError, ValueError):
            errors[rank] = json.loads((folder / f"error{rank}.json").read_text())
    for rank, process in enumerate(ranks):
        if process.poll() not in (None, 0) and rank not in errors:
            code = process.returncode
            how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
            said = (folder / f"rank{rank}.log").read_text(errors="replace").strip()
            raise RankFailed(f"rank {rank} of {len(ranks)} {how}", f"{said[-2000:]}\n")
    rank = min(errors, key=lambda rank: errors[rank]["when"])
    error = errors[rank]
    if error["refused"]:
        raise Refused(error["line"])
    raise RankFailed(f"rank {rank} of {len(ranks)} failed: {error['line']}", error["details"])
