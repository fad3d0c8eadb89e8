"""gather_routes: packed routes to each layer's ids and the padding mask, row ids given.

    python benchmarks/bench_routes.py [--json out.jsonl] [--rounds 3] [--only REGEX] [--dry]

The floor is what must move: the delivered layers of each present row read once, an int64 row id a
slot, the ids and the mask written once. ``torch`` has the same row ids and works on whole tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from baselines import offsets_of, routes_by_id, shard_sequences, spread_experts
from harness import Case, Cases, Setting, run
from torch import Tensor

from packhorse import gather_routes

U8, I16, I32, I64 = torch.uint8, torch.int16, torch.int32, torch.int64
TOPK = 8


def random_routes(
    num_rows: int, num_layers: int, num_experts: int, dtype: torch.dtype, device: str
) -> Tensor:
    """[N, L, 8]: distinct experts in each row, other ones in each layer."""
    first = torch.rand(num_rows, 1, num_experts, device=device).topk(TOPK, -1).indices
    shift = torch.arange(num_layers, device=device)[None, :, None]
    return ((first + shift) % num_experts).to(dtype)


def slot_row_ids(
    lengths: Sequence[int], captured: Sequence[int], device: str, *, cp_size: int, tp_size: int
) -> Tensor:
    """[M] int64 of one rank (the second one), without the code that is measured."""
    padded = [-(-length // (2 * cp_size * tp_size)) * 2 * cp_size * tp_size for length in lengths]
    if cp_size * tp_size == 1:
        padded = list(lengths)
    ids = torch.full((sum(padded),), -1, dtype=I64)
    rows = offsets_of(captured)
    for i, begin in enumerate(offsets_of(padded)[:-1]):
        ids[begin : begin + captured[i]] = torch.arange(rows[i], rows[i + 1])
    if cp_size > 1:
        ids = shard_sequences(ids, padded, cp_size, 1)
    count = ids.shape[0] // tp_size
    return ids[(tp_size - 1) * count :].to(device)


def shape(
    setting: Setting,
    lengths: Sequence[int],
    captured_layers: int,
    layers: range,
    experts: int,
    source: torch.dtype,
    out: torch.dtype = I32,
    *,
    job: str = "",
    permuted: bool = False,
    spread_ep: int = 0,
    captured_share: float = 1.0,
    cp_size: int = 1,
    tp_size: int = 1,
) -> Callable[[], Case]:
    def build() -> Case:
        device = setting.device
        captured = [max(int(length * captured_share) - 1, 0) for length in lengths]
        row_ids = slot_row_ids(lengths, captured, device, cp_size=cp_size, tp_size=tp_size)
        present = int((row_ids >= 0).sum())
        if permuted:
            held = row_ids[row_ids >= 0]
            row_ids[row_ids >= 0] = held[torch.randperm(present, device=device)]
        per_row, slots = len(layers) * TOPK, row_ids.shape[0]
        bytes_moved = present * per_row * source.itemsize + slots * (per_row * out.itemsize + 8 + 1)
        num_sets = setting.num_sets(bytes_moved)
        routes = [random_routes(sum(captured), captured_layers, experts, source, device)]
        routes += [((routes[0].to(I32) + i) % experts).to(source) for i in range(1, num_sets)]
        table = torch.tensor(list(layers), device=device)
        keywords: dict[str, Any] = {}
        dummies = torch.arange(TOPK, device=device)
        if spread_ep:
            keywords = {"dummy": "spread", "ep_size": spread_ep}
            dummies = spread_experts(row_ids < 0, TOPK, experts, spread_ep)

        def ours(i):
            return gather_routes(
                routes[i], row_ids, layers, num_experts=experts, dtype=out, **keywords
            )

        def torch_ops(i):
            return routes_by_id(routes[i], row_ids, table, dummies, out)

        return Case(
            tokens=slots,
            bytes_moved=bytes_moved,
            providers={"packhorse": ours, "torch": torch_ops},
            expected=torch_ops,
            num_sets=num_sets,
            capturable=frozenset({"packhorse", "torch"}),
            no_sync=frozenset({"packhorse"}),
            jobs={job: "packhorse"} if job else {},
        )

    return build


def cases(setting: Setting) -> Cases:
    long = setting.lengths(2048, 8192, 32)
    short = setting.lengths(512, 2048, 128)
    all48, experts = range(48), 128
    return {
        "32 of 2k-8k, 48x8 uint8 -> int32": shape(
            setting, long, 48, all48, experts, U8, job="routes_in_order"
        ),
        "the same, permuted": shape(
            setting, long, 48, all48, experts, U8, job="routes_permuted", permuted=True
        ),
        "32 of 2k-8k, 58 of 61x8 uint8 -> int32": shape(
            setting, long, 61, range(3, 61), 256, U8, job="routes_some_layers"
        ),
        "32 of 2k-8k, 48x8 int16 -> int32, E 384": shape(
            setting, long, 48, all48, 384, I16, job="routes_int16"
        ),
        "32 of 2k-8k, 48x8 uint8 -> int64": shape(
            setting, long, 48, all48, experts, U8, I64, job="routes_int64"
        ),
        "16 of 4k, 4 of 61x8 uint8 -> int32": shape(
            setting, [setting.size(4096)] * 16, 61, range(16, 20), 256, U8, job="routes_few_layers"
        ),
        "32 of 2k-8k, 48x8 uint8, CP4 TP2": shape(
            setting, long, 48, all48, experts, U8, cp_size=4, tp_size=2
        ),
        "128 of 512-2k, 8 of 61x8 int16, CP2": shape(
            setting, short, 61, range(16, 24), 384, I16, cp_size=2
        ),
        "32 of 2k-8k, 48x8 uint8, 10% spread dummies": shape(
            setting, long, 48, all48, experts, U8, spread_ep=8, captured_share=0.9
        ),
    }


if __name__ == "__main__":
    run(cases)
