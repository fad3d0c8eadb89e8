"""Batches to ship, and where in a process their memory lies, read from the kernel's own maps."""

import contextlib
import ctypes
import itertools
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from packhorse.packed.batch import Batch
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor

DOCUMENT = Path(__file__).parents[2] / "docs" / "transport.md"

ROUTES, SUPPORT = "rollout_expert_indices", "rollout_sample_support"


def snippets() -> list[str]:
    """The Python blocks of docs/transport.md, in order."""
    return re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.M | re.S)


def make_batch(num_trajectories: int, rows: int, seed: int = 0, layers: int = 4) -> Batch:
    """Routes of ``rows`` rows a trajectory on average, [layers, 8] uint8, and one of each kind."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(rows // 2, rows + rows // 2 + 1, num_trajectories).tolist()
    routes = generator.integers(0, 128, (sum(lengths), layers, 8), dtype=np.uint8)
    support = generator.integers(0, 2**17, (sum(lengths) // 4 * 4, 5), dtype=np.int32)
    responses = [len(support) // num_trajectories] * (num_trajectories - 1)
    responses.append(len(support) - sum(responses))
    return Batch(
        {
            ROUTES: PackedTensor.from_lengths(torch.from_numpy(routes), lengths),
            "token_ids": torch.from_numpy(generator.integers(0, 1000, (num_trajectories, 7))),
            SUPPORT: PackedTensor.from_lengths(torch.from_numpy(support), responses),
            "nested": {"weights": torch.arange(num_trajectories) / 8},
            "names": [f"trajectory {i}" for i in range(num_trajectories)],
            "images": [torch.full((i, 2), i) for i in range(num_trajectories)],
        },
        metadata={"step": seed},
    )


def make_ragged(num_trajectories: int, rows: int, seed: int = 0) -> PackedRagged:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, rows, num_trajectories)
    widths = generator.integers(0, 9, lengths.sum())
    ids = generator.integers(0, 2**17, widths.sum(), dtype=np.int32)
    return PackedRagged.from_lengths(torch.from_numpy(ids), widths, lengths.tolist())


def flat(batch: Batch) -> dict:
    """What ``make_batch`` made, by trajectory, as lists and bytes; read through NumPy alone."""

    def cut(packed: PackedTensor) -> list[bytes]:
        rows, ends = packed.values.numpy(), packed.cu_seqlens.tolist()
        return [rows[a:b].tobytes() for a, b in itertools.pairwise(ends)]

    return {
        "routes": cut(batch[ROUTES]),
        "token_ids": batch["token_ids"].tolist(),
        "support": cut(batch[SUPPORT]),
        "weights": batch["nested"]["weights"].tolist(),
        "names": list(batch["names"]),
        "images": [image.tolist() for image in batch["images"]],
    }


def chosen(model: dict, ids: list[int]) -> dict:
    return {name: [column[i] for i in ids] for name, column in model.items()}


def mapping_of(tensor: torch.Tensor) -> str:
    """The line of this process's maps that holds all of ``tensor``; "" where none does."""
    begin = tensor.data_ptr()
    end = begin + tensor.nbytes
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= begin and end <= high:
                return line.strip()
    return ""


@contextlib.contextmanager
def read_only(tensor: torch.Tensor) -> Iterator[int]:
    """The whole pages of ``tensor`` read-only: a write there ends this process. How many."""
    page = os.sysconf("SC_PAGE_SIZE")
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(protection: int) -> None:
        size = ctypes.c_size_t(end - begin)
        done = libc.mprotect(ctypes.c_void_p(begin), size, protection)
        assert done == 0, os.strerror(ctypes.get_errno())

    protect(mmap.PROT_READ)
    try:
        yield (end - begin) // page
    finally:
        protect(mmap.PROT_READ | mmap.PROT_WRITE)  # as Ray has it, for its next object


def use(batch: Batch) -> int:
    """Operations that a trainer runs on a batch it got; trajectories of all results."""
    results = [
        batch[1:3], batch[[2, 0, 2]], batch.repeat(2), batch.repeat_interleave(2),
        *batch.split(2), Batch.cat([batch, batch[:1]]), batch.to(torch.float64),
        batch.pad_to_multiple(7, zeroed=["token_ids"]), batch.clone(), batch.contiguous(),
        batch.synthetic(2, attended=None),
    ]  # fmt: skip
    routes = batch[ROUTES]
    routes.to_padded(0)
    routes.widen(torch.int16)
    routes.to_nested()
    batch["token_ids"].add_(1)  # dense fields are the getter's own
    private = routes.clone()
    private.values.fill_(7)
    return sum(map(len, results))
