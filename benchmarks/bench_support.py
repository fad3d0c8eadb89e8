"""gather_support and its ragged kin: sampling-support rows in model order.

    python benchmarks/bench_support.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

Ragged rows ("CSR") are as wide as samplers keep ids: log-normal with median 2 and mean 8, the
widest some thousands. The floor is the named rows, their offsets and an int64 id a slot read once,
the output written once.
"""

import math
from collections.abc import Callable

import torch
from baselines import padded_by_id, ragged_by_id, rows_by_id
from harness import Case, Cases, Setting, run
from torch import Tensor

from packhorse.kernels.support_rows import (
    gather_ragged_support,
    gather_support,
    pad_ragged_support,
)

SLOTS = 177_152
TRAJECTORY = 5536  # slots; the last of each has no row
VOCABULARY = 151_936


def slot_row_ids(slots: int, device: str) -> Tensor:
    """[M] int64: rows in order, -1 at the end of each trajectory."""
    present = torch.arange(slots) % TRAJECTORY != min(slots, TRAJECTORY) - 1
    return torch.where(present, present.cumsum(0) - 1, -1).to(device)


def row_widths(num_rows: int, widest: int) -> Tensor:
    """[N] int64 ids that a sampler keeps: median 2, mean 8 (7.9 of 177k rows), 99 % up to 91."""
    normal = torch.randn(num_rows, generator=torch.Generator().manual_seed(0))
    return (math.log(2) + 1.65 * normal).exp().round().clamp(1, widest).long()


def fixed(setting: Setting, width: int) -> Callable[[], Case]:
    def build() -> Case:
        slots, device = setting.size(SLOTS), setting.device
        row_ids = slot_row_ids(slots, device)
        present = int((row_ids >= 0).sum())
        bytes_moved = 4 * width * (present + slots) + 8 * slots
        num_sets = setting.num_sets(bytes_moved)
        shape = (present, width)
        support = [
            torch.randint(VOCABULARY, shape, dtype=torch.int32, device=device)
            for _ in range(num_sets)
        ]
        providers = {
            "packhorse": lambda i: gather_support(support[i], row_ids),
            "torch": lambda i: rows_by_id(support[i], row_ids, -1),
        }
        return Case(
            tokens=slots,
            bytes_moved=bytes_moved,
            providers=providers,
            expected=providers["torch"],
            num_sets=num_sets,
            capturable=frozenset(providers),
            no_sync=frozenset({"packhorse"}),
            jobs={"support_wide": "packhorse"},
        )

    return build


def ragged(setting: Setting, padded_width: int | None) -> Callable[[], Case]:
    def build() -> Case:
        slots, device = setting.size(SLOTS), setting.device
        row_ids = slot_row_ids(slots, device)
        present = int((row_ids >= 0).sum())
        counts = row_widths(present, padded_width or VOCABULARY)
        total = int(counts.sum())
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(device)
        read = 4 * total + 8 * (present + 1) + 8 * slots
        written = 4 * total + 8 * (slots + 1) if padded_width is None else 4 * slots * padded_width
        num_sets = setting.num_sets(read + written)
        token_ids = [
            torch.randint(VOCABULARY, (total,), dtype=torch.int32, device=device)
            for _ in range(num_sets)
        ]

        def ours(i):
            if padded_width is None:
                return gather_ragged_support(token_ids[i], offsets, row_ids)
            return pad_ragged_support(token_ids[i], offsets, row_ids, width=padded_width)

        def torch_ops(i):
            if padded_width is None:
                return ragged_by_id(token_ids[i], offsets, row_ids, total)
            return padded_by_id(token_ids[i], offsets, row_ids, padded_width, -1)

        return Case(
            tokens=slots,
            bytes_moved=read + written,
            providers={"packhorse": ours, "torch": torch_ops},
            expected=torch_ops,
            num_sets=num_sets,
            capturable=frozenset({"packhorse"}),
            no_sync=frozenset({"packhorse"}),
            jobs={"support_csr": "packhorse"} if padded_width is None else {},
        )

    return build


def cases(setting: Setting) -> Cases:
    return {
        "177k x 20 int32": fixed(setting, 20),
        "177k x 64 int32": fixed(setting, 64),
        "177k rows, CSR, mean 8": ragged(setting, None),
        "177k rows, CSR of up to 64 -> [M, 64]": ragged(setting, 64),
    }


if __name__ == "__main__":
    run(cases)
