"""One rank of the demo; what ``demo_ranks`` starts.

    python -m packhorse.replay.demo_worker RANK WORLD FOLDER

Reads the demo's options as a line of JSON, meets the other ranks through a file in FOLDER, and
leaves there what went wrong, or on rank 0 the figures. Its standard input stays open as long as the
parent lives: a rank whose parent is gone ends itself. SIGUSR1 makes it print where its threads are.
"""

import argparse
import faulthandler
import gc
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from packhorse.replay import demo, demo_parallel
from packhorse.replay.compare import Comparison
from packhorse.replay.demo_model import Sizes, build_chunks
from packhorse.replay.demo_ranks import Refused, sizes_of
from packhorse.replay.megatron import single_process
from packhorse.replay.packed_attention import PackedAttention

#: device -> of torch.distributed. Rank r's GPU is cuda:r.
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def serve(rank: int, world: int, folder: Path) -> int:
    faulthandler.register(signal.SIGUSR1)
    args = argparse.Namespace(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        results = run_rank(args, rank, world, folder)
        if rank == 0:
            (folder / "result.pkl").write_bytes(pickle.dumps(results))
    except BaseException as error:
        refused = isinstance(error, Refused)
        said = {
            "when": time.monotonic(),
            "refused": refused,
            "line": str(error) if refused else f"{type(error).__name__}: {error}",
            "details": traceback.format_exc(),
        }
        partial = folder / f"error{rank}.part"
        partial.write_text(json.dumps(said))
        partial.rename(folder / f"error{rank}.json")
        sys.stdout.flush()
        os._exit(1)  # others may be in a collective with this one: no waiting for its threads
    return 0


def _end_with_the_parent() -> None:
    # the descriptor, not the stream: its lock would be held at the interpreter's end
    while os.read(0, 1024):
        pass
    os._exit(1)


def run_rank(
    args: argparse.Namespace, rank: int, world: int, folder: Path
) -> tuple[dict[str, Comparison], float]:
    """Every dtype's figures, on rank 0, and the seconds until Megatron was imported."""
    began = time.perf_counter()
    sizes = sizes_of(args)
    if args.device == "cuda":  # before anything is put on "cuda": NCCL, Megatron and layouts ask
        torch.cuda.set_device(rank)
    given = demo.prepare(args, in_rank=True)
    threads = 1 if given.config.hidden_size < 1024 else max(1, (os.cpu_count() or 1) // world)
    torch.set_num_threads(threads)
    results = {}
    with demo.quiet_megatron(), demo.imported_megatron():
        imports = time.perf_counter() - began
        for dtype in demo.dtypes_of(args):
            with single_process():
                whole = demo.load(given, dtype)
            dist.init_process_group(
                BACKENDS[given.device.type],
                init_method=f"file://{folder}/store-{dtype}",
                rank=rank,
                world_size=world,
            )
            result = _compare(whole, given, sizes)
            del whole
            if result is not None:
                results[dtype] = result
            dist.barrier()  # a rank that leaves first would close what another still reads
            gc.collect()  # models in cycles hold groups, which the next dtype makes anew
            dist.destroy_process_group()
    return results, imports


def _compare(whole: Any, given: demo.Demo, sizes: Sizes) -> Comparison | None:
    """``compare`` on this rank, with Megatron's groups; the figures on rank 0."""
    num_microbatches = len(given.microbatches)
    attention = PackedAttention if sizes.cp > 1 or given.args.format == "thd" else None
    with sizes.started():
        chunks = build_chunks(
            whole,
            given.config,
            sizes,
            num_microbatches=num_microbatches,
            core_attention=attention,
        )
        part = demo_parallel.run_part(
            chunks,
            given.capture.num_layers,
            demo_parallel.share_out(given.microbatches, chunks[0].config, sizes),
            sizes,
            num_targets=sum(given.capture.response_lengths),
            temperature=given.temperature,
        )
        parts = demo_parallel.gather(part)
    if parts is None:
        return None
    return demo_parallel.combine(
        parts, given.capture, given.microbatches, sizes, given.config.moe_layers
    )


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
