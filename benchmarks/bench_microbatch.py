"""The call of a microbatch: host lengths in; each layer's ids, padding mask and row ids out.

    python benchmarks/bench_microbatch.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

``packhorse`` is ``TokenLayout.gather_routes``; ``with layout`` also builds the ``TokenLayout``,
which a microbatch does once for all its fields; ``kernels`` is the same work on the GPU with every
table there already, so that the rest is the host's (``beyond``). ``torch loop`` holds expert ids in
int64 until its last cast, as frameworks do; ``narrow`` in the routes' own dtype. The floor is the
routes of the delivered layers read once, the ids, the mask and the row ids written once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from baselines import offsets_of, routes_loop
from bench_layout import padded_lengths
from bench_routes import TOPK, random_routes, slot_row_ids
from harness import KINDS, Case, Cases, Setting, run

from packhorse import PackedTensor, TokenLayout, gather_routes, make_row_ids


def shape(
    setting: Setting,
    lengths: Sequence[int],
    captured_layers: int,
    layers: range,
    experts: int,
    dtype: torch.dtype,
    *,
    jobs: dict[str, str],
    loops: Sequence[str] = (),
    with_layout: bool = True,
    cp_size: int = 1,
    tp_size: int = 1,
    kinds: Sequence[str] = KINDS,
) -> Callable[[], Case]:
    def build() -> Case:
        device, cp_rank, tp_rank = setting.device, int(cp_size > 1), tp_size - 1
        captured = [length - 1 for length in lengths]
        padded = padded_lengths(lengths, cp_size, tp_size)
        row_ids = slot_row_ids(lengths, captured, device, cp_size=cp_size, tp_size=tp_size)
        slots, per_row = row_ids.shape[0], len(layers) * TOPK
        present = int((row_ids >= 0).sum())
        bytes_moved = present * per_row * dtype.itemsize + slots * (per_row * 4 + 8 + 1)
        num_sets = setting.num_sets(bytes_moved)
        routes = [random_routes(sum(captured), captured_layers, experts, dtype, device)]
        routes += [((routes[0].int() + i) % experts).to(dtype) for i in range(1, num_sets)]
        packed = [PackedTensor.from_lengths(values, captured) for values in routes]
        table = torch.tensor(list(layers), device=device)
        dummy_row = torch.arange(TOPK, device=device)
        parallel = {"cp_size": cp_size, "cp_rank": cp_rank, "tp_size": tp_size, "tp_rank": tp_rank}
        keywords: dict[str, Any] = {**parallel, "sequence_parallel": tp_size > 1, "device": device}
        layout = TokenLayout.build(lengths, **keywords)
        local = [length // cp_size for length in padded]
        offsets = torch.tensor(offsets_of(local), dtype=torch.int32, device=device)
        rows = [offsets_of(captured)[:-1], captured, [0] * len(lengths)]
        segments = torch.tensor(rows, dtype=torch.int32, device=device)

        def call(i):
            return layout.gather_routes(packed[i], layers, num_experts=experts)

        def call_with_layout(i):
            built = TokenLayout.build(lengths, **keywords)
            return built.gather_routes(packed[i], layers, num_experts=experts)

        def kernels(i):
            ids = make_row_ids(
                offsets, segments, slots, first_id=tp_rank * slots, cp_size=cp_size,
                cp_rank=cp_rank, zigzag=cp_size > 1,
            )  # fmt: skip
            return *gather_routes(routes[i], ids, layers, num_experts=experts), ids

        def loop(i, dummy_row=dummy_row):
            return routes_loop(routes[i], table, dummy_row, captured, padded, **parallel)

        def narrow_loop(i):
            return loop(i, dummy_row.to(dtype))

        providers: dict[str, Callable] = {"packhorse": call, "kernels": kernels}
        if with_layout:
            providers["with layout"] = call_with_layout
        known = {"torch loop": loop, "torch loop, narrow": narrow_loop}
        providers |= {name: known[name] for name in loops}
        ours = frozenset(providers) - set(loops)
        return Case(
            tokens=slots,
            bytes_moved=bytes_moved,
            providers=providers,
            expected=lambda i: (*loop(i), row_ids),
            partial=frozenset(loops),
            num_sets=num_sets,
            capturable=frozenset({"kernels"}),
            no_sync=ours,
            twins=dict.fromkeys(ours - {"kernels"}, "kernels"),
            jobs=jobs,
            baseline=loops[0] if loops else "",
            kinds=kinds,
        )

    return build


def cases(setting: Setting) -> Cases:
    u8, both = torch.uint8, ("torch loop", "torch loop, narrow")
    long, all48 = setting.lengths(2048, 8192, 32), range(48)
    beyond = {"microbatch": "packhorse"}
    return {
        "32 of 2k-8k, 48x8 uint8": shape(
            setting, long, 48, all48, 128, u8, jobs={**beyond, "loop_routes": "packhorse"},
            loops=both,
        ),
        "256 of 341-1082, 48x8 uint8": shape(
            setting, setting.lengths(341, 1082, 256), 48, all48, 128, u8, jobs=beyond
        ),
        "1024 of 85-271, 48x8 uint8": shape(
            setting, setting.lengths(85, 271, 1024), 48, all48, 128, u8, jobs=beyond
        ),
        "1024 of 85-271, 4 of 61x8 uint8": shape(
            setting, setting.lengths(85, 271, 1024), 61, range(16, 20), 256, u8, jobs=beyond
        ),
        "128 of 512-2k, 8 of 61x8 int16, CP2": shape(
            setting, setting.lengths(512, 2048, 128), 61, range(16, 24), 384, torch.int16,
            jobs={**beyond, "loop_routes_128": "packhorse"}, loops=both, cp_size=2,
        ),
        "32 of 2k-8k, 48x8 uint8, CP4 TP2": shape(
            setting, long, 48, all48, 128, u8, jobs=beyond, loops=both, cp_size=4, tp_size=2
        ),
    }  # fmt: skip


if __name__ == "__main__":
    run(cases)
