"""Packed routes to what each router of a rank takes, from host lengths: row ids, ids, mask.

    python benchmarks/bench_routes.py [--json out.jsonl] [--rounds 3]

``packhorse`` makes the row ids and gathers; ``packhorse + layout`` also builds the
``TokenLayout``, which a microbatch does once; ``gather only`` has its row ids already, so that the
copy floor (routes read once, per-layer ids and mask written once) is its own. ``torch loop`` holds
expert ids in int64 until its last cast, as frameworks do; ``narrow`` in the routes' own dtype.
"""

from collections.abc import Iterator

import torch
from baselines import routes_loop
from harness import Case, run

from packhorse import TokenLayout, gather_routes


def shape(
    name: str, low: int, high: int, batch: int, captured_layers: int, layers: range, experts: int,
    dtype: torch.dtype, topk: int = 8, **parallel: int,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high + 1, (batch,), generator=generator).tolist()
    captured = [length - 1 for length in lengths]
    routes = torch.rand(sum(captured), 1, experts, device="cuda").topk(topk, -1).indices
    shift = torch.arange(captured_layers, device="cuda")[None, :, None]
    routes = ((routes + shift) % experts).to(dtype)  # distinct within a row in each layer
    keywords = {"sequence_parallel": parallel.get("tp_size", 1) > 1, "device": "cuda", **parallel}
    layout = TokenLayout.build(lengths, **keywords)
    row_ids = layout.route_row_ids(captured)
    table = torch.tensor(list(layers), device="cuda")
    dummy_row = torch.arange(topk, device="cuda")

    def gather():
        return gather_routes(routes, row_ids, layers, num_experts=experts)

    def ours():
        ids = layout.route_row_ids(captured)
        return gather_routes(routes, ids, layers, num_experts=experts)

    def ours_with_layout():
        ids = TokenLayout.build(lengths, **keywords).route_row_ids(captured)
        return gather_routes(routes, ids, layers, num_experts=experts)

    def loop(dummy_row=dummy_row):
        return routes_loop(routes, table, dummy_row, captured, layout.padded_lengths, **parallel)

    def narrow_loop():
        return loop(dummy_row.to(dtype))

    present = int((row_ids >= 0).sum())
    per_row = len(layers) * topk
    tokens = layout.num_rank_tokens
    return Case(
        name=f"{name}, {tokens} tokens",
        bytes_moved=present * per_row * routes.element_size() + tokens * (per_row * 4 + 8 + 1),
        providers={
            "packhorse": ours,
            "packhorse + layout": ours_with_layout,
            "gather only": gather,
            "torch loop": loop,
            "torch loop, narrow": narrow_loop,
        },
        expected=loop,
        capturable=frozenset({"gather only"}),
    )


def cases() -> Iterator[Case]:
    u8, i16 = torch.uint8, torch.int16
    yield shape("32 of 2k-8k, 48x8 uint8", 2048, 8192, 32, 48, range(48), 128, u8)
    yield shape(
        "32 of 2k-8k, 48x8 uint8, CP4 TP2", 2048, 8192, 32, 48, range(48), 128, u8,
        cp_size=4, cp_rank=1, tp_size=2, tp_rank=1,
    )  # fmt: skip
    yield shape(
        "128 of 512-2k, 8 of 61x8 int16, CP2", 512, 2048, 128, 61, range(16, 24), 384, i16,
        cp_size=2, cp_rank=1,
    )  # fmt: skip


if __name__ == "__main__":
    run(cases())
