"""Every kernel compiles for GPUs that are not there, spills nothing, and keeps its wide accesses.

``LAUNCHES`` calls the package's own launchers on ``meta`` tensors, so that block sizes and argument
specialisation are those of a real launch. A kernel without an entry fails the suite.

The budgets are for all targets together. ``loads`` and ``stores`` say how much of what the code
moves must go through accesses of at least so many bits; one entry is (bits, share of the bytes).
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import packhorse.kernels
from packhorse.kernels import dense as dense_
from packhorse.kernels import dummies as dummy
from packhorse.kernels import (
    layout,
    lm_head_cells,
    lm_head_members,
    members,
    ragged_members,
    routes,
    rows,
    support_logits,
    support_ragged,
    support_rows,
    tables,
    validate,
    vocabulary_tiles,
)
from tests.tools.aot import AMD_TARGETS, TARGETS, Report, amd_spills, compile_only, report

u8, i16, i32, i64 = torch.uint8, torch.int16, torch.int32, torch.int64
TOKENS = 4099  # a rollout length: never a multiple of anything


@dataclass(frozen=True)
class Launch:
    kernel: str
    run: Callable[[], object]
    registers: int  # a thread, at most
    loads: tuple[int, float] = (8, 1.0)
    stores: tuple[int, float] = (8, 1.0)


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ids() -> Tensor:
    return meta(TOKENS, dtype=i64)


def move_rows(
    width: tuple[int, ...], dtype: torch.dtype, registers: int, bits: int, *, scatter: bool = False
) -> Launch:
    def run() -> Tensor:
        if scatter:
            return rows._scatter_rows_cuda(meta(TOKENS, *width, dtype=dtype), ids(), 9001, 0)
        return rows._gather_rows_cuda(meta(9001, *width, dtype=dtype), ids(), 0)

    # the ids are a third of what the code loads: one int64 for 16 bytes of a row
    return Launch("_move_rows_kernel", run, registers, (bits, 0.6), (bits, 1.0))


def scatter_inverse() -> Launch:
    def run() -> Tensor:
        return rows._scatter_rows_cuda(meta(TOKENS, 48, 8, dtype=u8), ids(), 9001, 0)

    return Launch("_invert_row_ids_kernel", run, 40, (64, 1.0), (32, 1.0))


def dummies(topk: int, dtype: torch.dtype, *, spread: bool, bits: int = 128) -> Launch:
    def run() -> None:
        routes = meta(48, TOKENS, topk, dtype=dtype)
        return dummy._fill_dummy_routes_cuda(routes, 256, spread, 8, 3)

    return Launch("_fill_dummy_routes_kernel", run, 64, (8, 0.0), (bits, 1.0))


def row_ids(*, cp_size: int, zigzag: bool, bshd: bool) -> Launch:
    def run() -> Tensor:
        offsets, segments = meta(2 if bshd else 33, dtype=i32), meta(3, 32, dtype=i32)
        return layout._row_ids_cuda(
            offsets, segments, TOKENS, 0, cp_size, cp_size - 1, zigzag, bshd, 1
        )

    return Launch("_make_row_ids_kernel", run, 40, (32, 1.0), (64, 1.0))


def pulled_table() -> Launch:
    def run() -> None:
        tables.pull_table(meta(TOKENS, dtype=i32), meta(TOKENS, dtype=i32))

    return Launch("_pull_table_kernel", run, 32, (32, 1.0), (32, 1.0))


def dense(
    width: tuple[int, ...], dtype: torch.dtype, *, cp_size: int = 1, bshd: bool = False,
    restore: bool = False, registers: int = 64, bits: int = 128,
) -> Launch:  # fmt: skip
    def run() -> Tensor:
        offsets, columns = meta(2 if bshd else 33, dtype=i32), meta(2, 32, dtype=i32)
        if restore:
            values = meta(cp_size * TOKENS, *width, dtype=dtype)
            return dense_._restore_tokens_cuda(
                values, offsets, columns, 8191, 0, 0, 1, cp_size, None, cp_size > 1, bshd
            )
        batch = meta(32, 8192, *width, dtype=dtype)
        return dense_._align_tokens_cuda(
            batch, offsets, columns, TOKENS, 0, 0, 0, cp_size, cp_size - 1, cp_size > 1, bshd
        )

    # beside whole rows the loads are of the tables; a cell of one number moves by itself
    kernel = "_restore_tokens_kernel" if restore else "_align_tokens_kernel"
    return Launch(kernel, run, registers, (bits, 0.3), (bits, 1.0))


def ragged_support(kernel: str, load_bits: int, store_bits: int) -> Launch:
    def run() -> tuple[Tensor, Tensor]:
        return support_rows._gather_ragged_support_cuda(
            meta(9001, dtype=i32), meta(4100, dtype=i64), ids(), 9001
        )

    return Launch(kernel, run, 64, (load_bits, 0.9), (store_bits, 0.9))


def padded_support(width: int, store_bits: int) -> Launch:
    def run() -> Tensor:
        return support_rows._pad_ragged_support_cuda(
            meta(9001, dtype=i32), meta(4100, dtype=i64), ids(), width
        )

    return Launch("_pad_support_rows_kernel", run, 48, (32, 1.0), (store_bits, 1.0))


def check_routes(captured: tuple[int, int], dtype: torch.dtype, layers: int | None, bits: int):
    def run() -> Tensor:
        listed = None if layers is None else meta(layers, dtype=i32)
        count = captured[0] if layers is None else layers
        routes = meta(TOKENS, *captured, dtype=dtype)
        return validate._validate_routes_cuda(routes, listed, 0, 1, count, 512)

    return Launch("_validate_routes_kernel", run, 96, (bits, 1.0), (8, 0.0))


def check_support(width: int, kernel: str = "_validate_support_kernel") -> Launch:
    def run() -> Tensor:
        return validate._validate_support_cuda(meta(TOKENS, width, dtype=i32), ids(), 1000)

    stores = (64, 1.0) if kernel == "_clear_checks_kernel" else (8, 0.0)
    return Launch(kernel, run, 96, (32, 0.0), stores)


def member_rows(
    kernel: str, width: int, registers: int = 96, *, by_row_ids: bool = False
) -> Launch:
    """The kernels over [T, C] that support scoring shares; each cell moves by itself."""

    def run() -> None:
        if by_row_ids:
            members._order_support_cuda(meta(9001, width, dtype=i32), 1000, ids())
            return
        columns, members_ = meta(TOKENS, width, dtype=i32), meta(TOKENS, width, dtype=torch.float32)
        row, known = meta(TOKENS, dtype=torch.float32), meta(TOKENS, dtype=u8)
        members._order_support_cuda(columns, 1000)
        members._score_members_cuda(members_[None], columns, known, ids(), 0.7)
        members._grad_members_cuda(row, row, columns, members_, row, ids(), 0.7)

    return Launch(kernel, run, registers)


def from_logits(kernel: str, width: int, *, by_row_ids: bool = False) -> Launch:
    """Members of logits, each cell by itself."""

    def run() -> None:
        logits, columns = meta(TOKENS, 9001, dtype=torch.bfloat16), meta(TOKENS, width, dtype=i32)
        members_, row = meta(TOKENS, width, dtype=torch.float32), meta(TOKENS, dtype=torch.float32)
        if by_row_ids:
            packed = meta(9001, width, dtype=i32)
            support_logits._score_logits_cuda(logits, packed, ids(), 9001, 0.7, None, ids())
            return
        support_logits._score_logits_cuda(logits, columns, ids(), 9001, 0.7)
        support_logits._put_logit_grads_cuda(logits, row, row, columns, members_, row, ids(), 0.7)

    return Launch(kernel, run, 96)


def lm_head(
    kernel: str, hidden_size: int, loads: tuple[int, float], stores: tuple[int, float]
) -> Launch:
    """Of rows of 20 ids, each of its token."""

    def run() -> None:
        hidden = meta(TOKENS, hidden_size, dtype=torch.bfloat16)
        weight = meta(9001, hidden_size, dtype=torch.bfloat16)
        columns, grads = meta(TOKENS, 20, dtype=i32), meta(TOKENS, 20, dtype=torch.float32)
        main_grad = meta(9001, hidden_size, dtype=torch.float32)
        known = meta(TOKENS, dtype=u8)
        lm_head_members._project_members_cuda(hidden, weight, None, columns, known, 0)
        lm_head_members._grad_hidden_of_members_cuda(grads, weight, columns, known, 0)
        rows, pairs = meta(TOKENS * 20, dtype=i32), meta(TOKENS * 20, dtype=i64)
        lm_head_members._add_weight_gradient_cuda(main_grad, grads, hidden, rows, pairs, 20)

    return Launch(kernel, run, 128, loads, stores)


def lm_head_cells_of(
    kernel: str, hidden_size: int, loads: tuple[int, float], stores: tuple[int, float]
) -> Launch:
    """Of the cells of ragged rows, some of them of up to 256 ids."""

    def run() -> None:
        hidden = meta(TOKENS, hidden_size, dtype=torch.bfloat16)
        weight = meta(9001, hidden_size, dtype=torch.bfloat16)
        columns, owners, grads = (meta(9000, dtype=d) for d in (i32, i32, torch.float32))
        main_grad = meta(9001, hidden_size, dtype=torch.float32)
        lm_head_cells._project_cells_cuda(hidden, weight, None, columns, owners, 0)
        lm_head_cells._grad_hidden_of_cells_cuda(
            grads, weight, columns, owners, ids(), ids(), 0, 64
        )
        rows = (meta(100, dtype=i64) for _ in range(3))
        lm_head_cells._put_wide_hidden_cuda(hidden, grads, weight, columns, *rows, 256, 0)
        pairs = meta(9000, dtype=i32), meta(9000, dtype=i64)
        lm_head_members._add_weight_gradient_cuda(main_grad, grads, hidden, *pairs, 1, owners)

    return Launch(kernel, run, 128, loads, stores)


def ragged_rows(kernel: str, width: int, registers: int = 128) -> Launch:
    def run() -> None:
        cells, token = meta(9000, dtype=i32), meta(TOKENS, dtype=torch.float32)
        floats, status = meta(9000, dtype=torch.float32), meta(TOKENS, dtype=u8)
        rows = ids(), ids(), ids()
        ragged_members._order_cells_cuda(cells, cells, cells, *rows, width, 9001)
        logits, ignored = meta(2, 9000, dtype=torch.float32), meta(TOKENS, dtype=i32)
        ragged_members._score_cells_cuda(
            token, token, status, ignored, floats, logits, cells, ids(), *rows, width, 0.7
        )
        ragged_members._grad_cells_cuda(token, token, cells, cells, floats, token, ids(), 0.7)

    return Launch(kernel, run, registers)


def cells_of_logits(kernel: str) -> Launch:
    """Of the cells of ragged rows, each by itself."""

    def run() -> None:
        logits, cells = meta(TOKENS, 9001, dtype=torch.bfloat16), meta(9000, dtype=i32)
        floats, row = meta(9000, dtype=torch.float32), meta(TOKENS, dtype=torch.float32)
        support_ragged._read_cell_logits_cuda(logits, cells, cells, 0)
        support_ragged._put_cell_grads_cuda(
            logits, row, row, cells, cells, floats, row, ids(), 0, 0.7
        )

    return Launch(kernel, run, 64)


def float64_weight(kernel: str) -> Launch:
    """Two elements are an access of 16 bytes."""

    def run() -> None:
        hidden, out = meta(TOKENS, 256, dtype=torch.float64), meta(9001, 256, dtype=torch.float64)
        rows, pairs = meta(TOKENS * 20, dtype=i32), meta(TOKENS * 20, dtype=i64)
        grads = meta(TOKENS, 20, dtype=torch.float64)
        lm_head_members._add_weight_gradient_cuda(out, grads, hidden, rows, pairs, 20)

    return Launch(kernel, run, 128, (64, 0.6), (64, 1.0))


def vocabulary_tile(
    kernel: str, num_tokens: int, width: int, registers: int, loads: tuple[int, float],
    stores: tuple[int, float], *, dtype: torch.dtype = torch.bfloat16, capped: bool = False,
) -> Launch:  # fmt: skip
    """Sums and gradients of a tile; a row of few is read in parts. ``capped``: every option."""

    def run() -> None:
        products = meta(num_tokens, width, dtype=torch.float32)
        sums, sampled = meta(4, num_tokens, dtype=torch.float32), meta(num_tokens, dtype=i64)
        row, options = sums[0], (None, None, 1.0)
        if capped:
            options = (meta(width, dtype=torch.bfloat16), 30.0, 1.0, row)
        vocabulary_tiles._sum_vocabulary_tile_cuda(products, sums, sampled, 0, *options)
        vocabulary_tiles._grad_vocabulary_tile_cuda(
            products, sampled, row, row, row, row, 0, dtype, *options
        )

    return Launch(f"_{kernel}_kernel", run, registers, loads, stores)


def gather_routes(
    captured: tuple[int, int],
    dtype: torch.dtype,
    layers: range | int,
    *,
    load_bits: int,
    store_bits: int,
    spread: bool = False,
    out: torch.dtype = i32,
    any_topk: bool = False,
) -> Launch:
    """``layers``: a range of captured layers, or how many a table on the device lists."""

    def run() -> tuple[Tensor, Tensor]:
        listed = meta(layers, dtype=i32) if isinstance(layers, int) else None
        run = range(layers) if isinstance(layers, int) else layers
        return routes._gather_routes_cuda(
            meta(9001, *captured, dtype=dtype), ids(), listed, run.start, run.step, len(run),
            256, spread, 8 if spread else 1, 3 if spread else 0, out,
        )  # fmt: skip

    # a program's row ids are as many bytes as what it loads 16 bytes at a time
    loads = (load_bits, 0.35 if load_bits == 128 else 0.9)
    kernel = "_gather_routes_by_unit_kernel" if any_topk else "_gather_routes_kernel"
    return Launch(kernel, run, 80, loads, (store_bits, 0.9))


LAUNCHES = {
    "gather routes 48x8 uint8": move_rows((48, 8), u8, 48, 128),
    "gather routes 48x8 int16": move_rows((48, 8), i16, 48, 128),
    "gather hidden bf16": move_rows((2048,), torch.bfloat16, 48, 128),
    "gather support of 20": move_rows((20,), i32, 48, 128),
    "gather logprobs": move_rows((), torch.float32, 64, 32),
    "scatter routes 48x8 uint8": move_rows((48, 8), u8, 56, 128, scatter=True),
    "scatter logprobs, inverse": scatter_inverse(),
    "scatter logprobs": move_rows((), torch.float32, 64, 32, scatter=True),
    "row ids thd": row_ids(cp_size=1, zigzag=False, bshd=False),
    "row ids thd zigzag": row_ids(cp_size=4, zigzag=True, bshd=False),
    "row ids thd contiguous": row_ids(cp_size=4, zigzag=False, bshd=False),
    "row ids bshd": row_ids(cp_size=1, zigzag=False, bshd=True),
    "row ids bshd zigzag": row_ids(cp_size=4, zigzag=True, bshd=True),
    "table of host integers": pulled_table(),
    "align float32": dense((), torch.float32, bits=32),
    "align int64 zigzag": dense((), i64, cp_size=4, bits=32),
    "align bool bshd": dense((), torch.bool, bshd=True, bits=8),
    "align 4 float32": dense((4,), torch.float32),
    "align hidden bf16": dense((2048,), torch.bfloat16),
    "restore float32": dense((), torch.float32, restore=True, bits=32),
    "restore int64 zigzag": dense((), i64, cp_size=4, restore=True, bits=32),
    "restore float32 bshd zigzag": dense(
        (), torch.float32, cp_size=2, bshd=True, restore=True, bits=32
    ),
    "restore hidden bf16": dense((2048,), torch.bfloat16, restore=True),
    "sums of ragged support": ragged_support("_sum_support_rows_kernel", 64, 64),
    "ragged support": ragged_support("_copy_support_rows_kernel", 32, 32),
    "ragged support to 64": padded_support(64, 128),
    "ragged support to 30": padded_support(30, 64),
    "check routes 48x8 uint8": check_routes((48, 8), u8, None, 64),
    "check routes 5 of 40x22 int16": check_routes((40, 22), i16, 5, 32),
    "check support of 20": check_support(20),
    "check support of 128": check_support(128),
    "clear checks": check_support(20, "_clear_checks_kernel"),
    "order support of 20": member_rows("_order_support_kernel", 20),
    "order support of 1000": member_rows("_order_support_kernel", 1000),
    "order support of 20 by row ids": member_rows("_order_support_kernel", 20, by_row_ids=True),
    "score support of 20": member_rows("_score_members_kernel", 20),
    "score support of 1000": member_rows("_score_members_kernel", 1000),
    "gradients of members": member_rows("_grad_members_kernel", 20),
    "score support of 20 from logits": from_logits("_score_logits_kernel", 20),
    "score support of 200 from logits": from_logits("_score_logits_kernel", 200),
    "score support of 20 from logits by row ids": from_logits(
        "_score_logits_kernel", 20, by_row_ids=True
    ),
    "gradients of logits": from_logits("_put_logit_grads_kernel", 20),
    "LM head of 512": lm_head("_project_members_kernel", 512, (128, 0.8), (8, 0.0)),
    "LM head of 520": lm_head("_project_members_kernel", 520, (128, 0.8), (8, 0.0)),
    "LM head of 512, hidden": lm_head("_grad_hidden_kernel", 512, (128, 0.6), (128, 1.0)),
    "LM head of 512, weight": lm_head("_grad_weight_kernel", 512, (128, 0.6), (128, 1.0)),
    "LM head of 512, parts": lm_head("_join_weight_parts_kernel", 512, (128, 0.8), (128, 1.0)),
    "LM head of 256, float64 weight": float64_weight("_grad_weight_kernel"),
    "LM head of 256, float64 parts": float64_weight("_join_weight_parts_kernel"),
    "LM head of 512, cells": lm_head_cells_of("_project_cells_kernel", 512, (128, 0.8), (8, 0.0)),
    "LM head of 520, cells": lm_head_cells_of("_project_cells_kernel", 520, (128, 0.8), (8, 0.0)),
    "LM head of 512, hidden, cells": lm_head_cells_of(
        "_grad_hidden_cells_kernel", 512, (128, 0.5), (128, 1.0)
    ),
    "LM head of 512, hidden, wide rows": lm_head_cells_of(
        "_grad_hidden_pieces_kernel", 512, (128, 0.5), (128, 1.0)
    ),
    "LM head of 520, hidden, cells": lm_head_cells_of(
        "_grad_hidden_cells_kernel", 520, (128, 0.5), (128, 1.0)
    ),
    "LM head of 520, hidden, wide rows": lm_head_cells_of(
        "_grad_hidden_pieces_kernel", 520, (128, 0.5), (128, 1.0)
    ),
    "LM head of 512, weight, cells": lm_head_cells_of(
        "_grad_weight_kernel", 512, (128, 0.5), (128, 1.0)
    ),
    "order ragged support of 4": ragged_rows("_order_cells_kernel", 4),
    "order ragged support of 1000": ragged_rows("_order_cells_kernel", 1000),
    "order ragged support of 4000": ragged_rows("_place_cells_kernel", 4000),
    "score ragged support of 16": ragged_rows("_score_cells_kernel", 16),
    "score ragged support of 4000": ragged_rows("_score_cells_kernel", 4000, 168),
    "gradients of cells": ragged_rows("_grad_cells_kernel", 16),
    "logits of cells": cells_of_logits("_read_cell_logits_kernel"),
    "gradients of logits of cells": cells_of_logits("_put_cell_grads_kernel"),
    # beside the tile a program loads what its row is scored by
    "sums of a tile": vocabulary_tile(
        "sum_vocabulary_tile", TOKENS, 2048, 48, (128, 0.6), (32, 1.0)
    ),
    "sums of a tile, capped": vocabulary_tile(
        "sum_vocabulary_tile", TOKENS, 2048, 64, (64, 0.7), (32, 1.0), capped=True
    ),
    "sums of a narrow tile": vocabulary_tile(
        "sum_vocabulary_tile", TOKENS, 1024, 48, (128, 0.5), (32, 1.0)
    ),
    "sums of an odd tile": vocabulary_tile(
        "sum_vocabulary_tile", TOKENS, 2047, 64, (16, 1.0), (32, 1.0), capped=True
    ),
    "sums of parts of rows": vocabulary_tile(
        "sum_vocabulary_tile", 32, 151_936, 48, (128, 1.0), (32, 1.0)
    ),
    "sums of parts of rows, capped": vocabulary_tile(
        "sum_vocabulary_tile", 32, 151_936, 64, (64, 0.9), (32, 1.0), capped=True
    ),
    "sums of parts, joined": vocabulary_tile(
        "join_vocabulary_parts", 32, 151_936, 48, (32, 1.0), (32, 1.0)
    ),
    "sums of parts, joined, capped": vocabulary_tile(
        "join_vocabulary_parts", 32, 151_936, 48, (16, 1.0), (32, 1.0), capped=True
    ),
    "gradients of a tile": vocabulary_tile(
        "grad_vocabulary_tile", TOKENS, 2048, 48, (128, 0.7), (64, 1.0)
    ),
    "gradients of a tile, float32": vocabulary_tile(
        "grad_vocabulary_tile", TOKENS, 2048, 48, (128, 0.7), (128, 1.0), dtype=torch.float32
    ),
    "gradients of a tile, capped": vocabulary_tile(
        "grad_vocabulary_tile", TOKENS, 2048, 80, (64, 0.8), (64, 1.0), capped=True
    ),
    "gradients of an odd tile": vocabulary_tile(
        "grad_vocabulary_tile", TOKENS, 2047, 96, (16, 1.0), (16, 1.0), capped=True
    ),
    "dummies of 8": dummies(8, i32, spread=False),
    "dummies of 8 uint8": dummies(8, u8, spread=False, bits=64),
    "dummies of 8 spread": dummies(8, i32, spread=True),
    "dummies of 8 spread to int64": dummies(8, i64, spread=True),
    "routes 48x8 uint8": gather_routes((48, 8), u8, range(48), load_bits=128, store_bits=128),
    "routes 48x8 uint8 to int64": gather_routes(
        (48, 8), u8, range(48), load_bits=128, store_bits=128, out=i64
    ),
    "routes 48x8 uint8 spread": gather_routes(
        (48, 8), u8, range(48), load_bits=128, store_bits=128, spread=True
    ),
    "routes 8 of 61x8 int16": gather_routes(
        (61, 8), i16, range(16, 24), load_bits=64, store_bits=128
    ),
    "routes 12x2 uint8": gather_routes((12, 2), u8, range(12), load_bits=8, store_bits=64),
    "routes every 2nd of 48x8 uint8": gather_routes(
        (48, 8), u8, range(1, 48, 2), load_bits=8, store_bits=128
    ),
    "routes listed 5 of 48x6 uint8": gather_routes(
        (48, 6), u8, 5, load_bits=16, store_bits=64, any_topk=True
    ),
    "routes listed 5 of 48x6 uint8 spread to int64": gather_routes(
        (48, 6), u8, 5, load_bits=16, store_bits=128, spread=True, out=i64, any_topk=True
    ),
    "routes 40x22 int16": gather_routes(
        (40, 22), i16, range(40), load_bits=32, store_bits=64, any_topk=True
    ),
}


def is_jitted(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def launched_kernels() -> set[str]:
    """Names of the ``triton.jit`` functions of kernels/*.py that no other of them calls."""
    (folder,) = packhorse.kernels.__path__
    jitted: dict[str, ast.FunctionDef] = {}
    for path in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and is_jitted(node):
                jitted[node.name] = node
    called = {
        call.func.id
        for function in jitted.values()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return set(jitted) - called


def test_every_kernel_has_an_entry():
    assert launched_kernels() == {launch.kernel for launch in LAUNCHES.values()}


def reports(launch: Launch, target: str) -> list[Report]:
    with compile_only(target) as compiled:
        launch.run()
    return [report(kernel) for kernel in compiled]


@pytest.mark.compile
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_within_its_budget(name, target):
    launch = LAUNCHES[name]
    shown = f"packhorse{launch.kernel.removesuffix('_kernel')}"
    (kernel,) = (r for r in reports(launch, target) if r.name.startswith(shown))
    assert kernel.target == target
    assert not kernel.spills, kernel
    assert kernel.registers <= launch.registers, kernel
    for kind, (bits, share) in (("LDG", launch.loads), ("STG", launch.stores)):
        assert kernel.wide_share(kind, bits) >= share, (kind, bits, kernel)


@pytest.mark.compile
@pytest.mark.parametrize("target", AMD_TARGETS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_for_other_makers(name, target):
    with compile_only(target) as compiled:
        LAUNCHES[name].run()
    assert compiled
    assert [amd_spills(kernel) for kernel in compiled] == [0] * len(compiled)
