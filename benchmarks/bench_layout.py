"""Row ids of a rank's tokens: the kernel on device tables, and the call from host lengths.

    python benchmarks/bench_layout.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

``kernel`` has its table on the device already; its floor is the 8 bytes a token that it writes.
``packhorse`` starts from host lengths: checks, one small table copied, the kernel.
"""

from collections.abc import Callable, Sequence

import torch
from baselines import offsets_of, row_ids_loop
from harness import KINDS, Case, Cases, Setting, run

from packhorse import TokenLayout, make_row_ids


def padded_lengths(lengths: Sequence[int], cp_size: int, tp_size: int = 1) -> list[int]:
    multiple = tp_size if cp_size == 1 else 2 * cp_size * tp_size
    return [-(-length // multiple) * multiple for length in lengths]


def shape(
    setting: Setting,
    lengths: Sequence[int],
    cp_size: int,
    jobs: dict[str, str],
    *,
    calls: bool,
    kinds: Sequence[str] = KINDS,
) -> Callable[[], Case]:
    def build() -> Case:
        device, cp_rank = setting.device, cp_size // 2
        captured = [length - 1 for length in lengths]
        padded = padded_lengths(lengths, cp_size)
        offsets = torch.tensor(offsets_of([n // cp_size for n in padded]), dtype=torch.int32)
        tables = [offsets_of(captured)[:-1], captured, [0] * len(lengths)]
        segments = torch.tensor(tables, dtype=torch.int32, device=device)
        tokens = int(offsets[-1])
        offsets = offsets.to(device)
        layout = TokenLayout.build(lengths, device=device, cp_size=cp_size, cp_rank=cp_rank)

        def kernel(_):
            return make_row_ids(
                offsets, segments, tokens, cp_size=cp_size, cp_rank=cp_rank, zigzag=cp_size > 1
            )

        def loop(_):
            return row_ids_loop(captured, padded, cp_size=cp_size, cp_rank=cp_rank, device=device)

        def from_lengths(_):
            return layout.route_row_ids(captured)

        providers = {"kernel": kernel}
        if calls:
            providers |= {"packhorse": from_lengths, "torch loop": loop}
        return Case(
            tokens=tokens,
            bytes_moved=8 * tokens,
            providers=providers,
            expected=loop,
            num_sets=setting.num_sets(8 * tokens),  # the tables are a few KiB
            capturable=frozenset({"kernel"}),
            no_sync=frozenset(providers) - {"torch loop"},
            twins={"packhorse": "kernel"} if calls else {},
            jobs=jobs,
            baseline="torch loop" if calls else "",
            kinds=kinds,
        )

    return build


def cases(setting: Setting) -> Cases:
    built: Cases = {}
    for cp_size in (1, 4):  # 182k tokens on this rank, whatever CP
        for batch, low, high in ((32, 2048, 8192), (256, 341, 1082), (1024, 85, 271)):
            lengths = setting.lengths(cp_size * low, cp_size * high, batch)
            built[f"B {batch}, CP {cp_size}"] = shape(
                setting, lengths, cp_size, {"row_ids": "kernel"}, calls=False
            )
    for name, batch, low, high, cp_size, jobs in (
        ("from lengths, 32 of 2k-8k", 32, 2048, 8192, 1, {}),
        ("from lengths, 256 of 512-2k, CP 2", 256, 512, 2048, 2, {"loop_row_ids": "packhorse"}),
        ("from lengths, 1024 of 1-256", 1024, 1, 256, 1, {}),
    ):
        lengths = setting.lengths(low, high, batch)
        built[name] = shape(setting, lengths, cp_size, jobs, calls=True)
    return built


if __name__ == "__main__":
    run(cases)
