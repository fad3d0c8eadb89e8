"""Row ids of a rank's tokens from host lengths.

    python benchmarks/bench_layout.py [--json out.jsonl] [--rounds 3]

``packhorse`` starts from host lengths: one small table copied, one kernel. ``kernel only`` has the
table on the device, so that it can be captured in a graph; the copy floor is its 8 bytes a token.
"""

from collections.abc import Iterator

import torch
from baselines import offsets_of, row_ids_loop
from harness import Case, run

from packhorse import TokenLayout, make_row_ids


def shape(name: str, low: int, high: int, batch: int, **parallel: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high + 1, (batch,), generator=generator).tolist()
    captured = [length - 1 for length in lengths]
    layout = TokenLayout.build(lengths, device="cuda", **parallel)
    tail = [offsets_of(captured)[:-1], captured, [0] * batch]
    segments = torch.tensor(tail, dtype=torch.int32, device="cuda")

    def kernel():
        return make_row_ids(
            layout._offsets, segments, layout.num_tokens, cp_size=layout.cp_size,
            cp_rank=layout.cp_rank, zigzag=True,
        )  # fmt: skip

    return Case(
        name=f"{name}, {layout.num_tokens} tokens",
        bytes_moved=8 * layout.num_tokens,
        providers={
            "packhorse": lambda: layout.route_row_ids(captured),
            "kernel only": kernel,
            "torch loop": lambda: row_ids_loop(captured, layout.padded_lengths, **parallel),
        },
        expected=lambda: row_ids_loop(captured, layout.padded_lengths, **parallel),
        capturable=frozenset({"kernel only"}),
    )


def cases() -> Iterator[Case]:
    yield shape("32 of 2k-8k", 2048, 8192, 32)
    yield shape("256 of 512-2k, CP2", 512, 2048, 256, cp_size=2, cp_rank=1)
    yield shape("1024 of 1-256", 1, 256, 1024)


if __name__ == "__main__":
    run(cases())
