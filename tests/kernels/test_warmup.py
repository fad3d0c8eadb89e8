"""After ``warmup`` a training step compiles nothing, whatever its lengths, and a second process has
everything from the cache.

On a machine without a GPU the same calls run on ``meta`` tensors, with each operator's launcher in
place of its shape rule and a compiler for an absent GPU: what a launch would compile is compiled.
"""

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import packhorse.kernels
from packhorse.__main__ import main
from packhorse.kernels.launch import Launcher
from packhorse.kernels.support_ragged import ragged_support_logprobs
from packhorse.kernels.support_rows import gather_ragged_support, pad_ragged_support
from packhorse.kernels.validate import validate_routes, validate_support
from packhorse.packed.ragged import PackedRagged
from packhorse.packed.tensor import PackedTensor
from packhorse.replay import warmup as module
from packhorse.replay.device_rows import MicrobatchRows
from packhorse.replay.layout import TokenLayout
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.scoring import score_microbatch
from packhorse.replay.warmup import WarmKernel, WarmupReport, warmup
from tests.conftest import GPU, INTERPRET

ROOT = Path(__file__).parents[2]
if not INTERPRET:
    from tests.tools.aot import compile_only

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "48x8 of 128, thd, TP 2 with sequence parallel, CP 2, support of 20": {
        "num_captured_layers": 48, "topk": 8, "num_experts": 128,
        "tp_size": 2, "cp_size": 2, "sequence_parallel": True,
        "support_width": 20, "ragged_support": True,
        "logits_dtype": torch.bfloat16, "vocab_size": 151_936, "validation": True,
    },
    "8 of 61x8 of 384, thd, CP 4 contiguous, spread, int64": {
        "num_captured_layers": 61, "topk": 8, "num_experts": 384, "layers": range(17, 25),
        "cp_size": 4, "cp_order": "contiguous", "dummy": "spread", "ep_size": 8,
        "topk_ids_dtype": torch.int64, "support_width": 64,
    },
    "every other of 12x2 of 8, bshd, CP 2, whole vocabulary": {
        "num_captured_layers": 12, "topk": 2, "num_experts": 8, "layers": range(1, 12, 2),
        "format": "bshd", "num_trajectories": 24, "cp_size": 2,
        "dense_dtypes": (torch.float32, torch.bfloat16),
    },
    "listed of 27x6 of 64, bshd, validated support of 7 with an odd vocabulary": {
        "num_captured_layers": 27, "topk": 6, "num_experts": 64, "layers": [1, 2, 5, 26],
        "format": "bshd", "num_trajectories": 1, "validation": True,
        "support_width": 7, "vocab_size": 1001,
        "dense_dtypes": (torch.int32, torch.uint8, torch.float64),
    },
}  # fmt: skip

#: kernels of operators that no training step calls by itself
#: compiled by their first call: they depend on the model's LM head, not on routes and layouts
LM_HEAD = {
    "_sum_vocabulary_tile_kernel", "_join_vocabulary_parts_kernel", "_grad_vocabulary_tile_kernel",
    "_project_members_kernel", "_grad_hidden_kernel", "_grad_weight_kernel",
    "_join_weight_parts_kernel", "_order_support_kernel", "_score_members_kernel",
    "_grad_members_kernel", "_project_cells_kernel", "_grad_hidden_cells_kernel",
    "_grad_hidden_pieces_kernel", "_grad_cells_kernel",
}  # fmt: skip
#: beside those, the one for ragged rows of more than 1,024 ids, which no configuration here has
NOT_WARMED = {"_fill_dummy_routes_kernel", "_place_cells_kernel", *LM_HEAD}
LAYOUT_SETTINGS = ("format", "tp_size", "cp_size", "cp_order", "sequence_parallel")


# --- a training step of any lengths ---------------------------------------------------------------


def training_step(device: str, seed: int, **settings: Any) -> None:
    """The public calls of one microbatch; ``settings`` as ``warmup`` takes them."""
    rng = np.random.default_rng(seed)
    batch = settings.get("num_trajectories") or int(rng.integers(1, 40))
    lengths = rng.integers(2, 700, batch).tolist()
    captured = [int(rng.integers(length - 1, length + 1)) for length in lengths]
    responses = [int(rng.integers(1, length)) for length in lengths]
    where = {key: settings[key] for key in LAYOUT_SETTINGS if key in settings}
    layout = OnEveryRank.build(lengths, device=device, **where)
    replay(layout, captured, settings)
    for dtype in settings.get("dense_dtypes", (torch.float32, torch.int64, torch.bool)):
        dense = torch.zeros(batch, layout.batch_width, dtype=dtype, device=device)
        dense.requires_grad_(dtype.is_floating_point)
        aligned = layout.align(dense, 0, next_token=bool(seed % 2))
        restored = layout.restore_gathered([aligned] * layout.cp_size)
        if dtype.is_floating_point:
            restored.sum().backward()
    score(layout, responses, settings)


class OnEveryRank(TokenLayout):
    """This rank's values stand for those of all ranks, so that one process is enough."""

    def restore(self, values: Tensor, fill: float = 0) -> Tensor:
        return self.restore_gathered([values] * self.cp_size, fill)


def replay(layout: TokenLayout, captured: list[int], settings: dict[str, Any]) -> None:
    num_layers, topk = settings["num_captured_layers"], settings["topk"]
    num_experts = settings["num_experts"]
    layers = settings.get("layers", range(num_layers))
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    ep_size = settings.get("ep_size", 1)
    dummy = settings.get("dummy", "constant")

    def routes_of(captured: list[int]) -> PackedTensor:
        shape = (sum(captured), num_layers, topk)
        experts = torch.arange(topk).to(dtype).expand(shape).contiguous()
        return PackedTensor.from_lengths(experts, captured)

    from_host = routes_of(captured)
    for routes in (from_host, from_host.to(layout.device)):
        rows = MicrobatchRows.build(ReplayMicrobatch(layout, routes, dummy=dummy))
        for ids_dtype in (torch.int32, torch.int64):  # with recompute, and without
            rows.gather_targets(
                tuple(layers),
                num_experts=num_experts,
                topk=topk,
                ep_size=ep_size,
                dtype=ids_dtype,
            )
        rows.model_mask(scattered_by_model=True)
    where = {key: settings[key] for key in LAYOUT_SETTINGS if key in settings}
    lengths = [captured[0] + i for i in range(1, 10)]
    batch = routes_of([length - 1 for length in lengths]).to(layout.device)
    for begin in range(0, 9, 2):  # microbatches cut out of a batch
        part = slice(begin, begin + 2)
        TokenLayout.build(lengths[part], device=layout.device, **where).gather_routes(
            batch[part],
            layers,
            num_experts=num_experts,
            dtype=settings.get("topk_ids_dtype", torch.int32),
            dummy=dummy,
            ep_size=ep_size,
        )
        if settings.get("validation"):
            validate_routes(batch[part].values, num_experts=num_experts, layers=layers)


def score(layout: TokenLayout, responses: list[int], settings: dict[str, Any]) -> None:
    width, num_columns = settings.get("support_width"), settings.get("vocab_size")
    tokens = PackedTensor.from_lengths(
        torch.zeros(sum(layout.lengths), dtype=torch.int64).to(layout.device), layout.lengths
    )
    support = appended = None
    if width is not None:
        candidates = torch.arange(width, dtype=torch.int32).repeat(sum(responses), 1)
        support = PackedTensor.from_lengths(candidates, responses)
    if num_columns is not None:
        appended = [np.arange(length) == length - 1 for length in layout.lengths]
    logits = torch.zeros(
        layout.num_tokens,
        num_columns or 128,
        dtype=settings.get("logits_dtype", torch.float32),
        device=layout.device,
        requires_grad=True,
    )
    scores = score_microbatch(
        logits, layout, tokens, support, response_lengths=responses, appended=appended
    )
    scores.logprobs.values.sum().backward()
    if settings.get("validation") and support is not None:
        validate_support(
            support.to(layout.device).values,
            torch.zeros(sum(responses), dtype=torch.int64, device=layout.device),
            vocab_size=num_columns or 128,
        )
    if settings.get("ragged_support"):
        assert width is not None
        ids = torch.zeros(sum(responses) * 3, dtype=torch.int32, device=layout.device)
        offsets = torch.arange(sum(responses) + 1, device=layout.device) * 3
        row_ids = layout.support_row_ids(responses)
        gather_ragged_support(ids, offsets, row_ids, capacity=len(ids) + 5)
        pad_ragged_support(ids, offsets, row_ids, width=width)
        score_ragged(logits, layout, tokens, responses, width)


def score_ragged(
    logits: Tensor, layout: TokenLayout, tokens: PackedTensor, responses: list[int], width: int
) -> None:
    """From the host, and from the device where a slice of the ids begins anywhere."""
    widths = np.arange(sum(responses)) % width + 1
    ends = torch.from_numpy(np.concatenate([[0], widths.cumsum()]))
    ids = torch.zeros(int(ends[-1]) + 1, dtype=torch.int32)
    bounds = torch.tensor([0, *responses]).cumsum(0).int()
    support = PackedRagged(ids[1:], ends, bounds)
    score_microbatch(logits, layout, tokens, support).logprobs.values.sum().backward()
    place, ids, ends = layout.device, ids.to(layout.device), ends.to(layout.device)
    sampled_ids = torch.zeros(layout.num_tokens, dtype=torch.int64, device=place)
    for token_ids in (ids[:-1], ids[1:]):
        ragged_support_logprobs(
            logits, token_ids, ends, layout.support_row_ids(responses), sampled_ids, widths=widths
        ).logprobs.sum().backward()


# --- a GPU that is not there ----------------------------------------------------------------------


@pytest.fixture
def on_meta(monkeypatch) -> Iterator[Callable[[dict[str, Any]], "Seen"]]:
    """Warm a configuration up, then run training steps; says what each launched and compiled."""
    launchers = torch.library.Library("packhorse", "IMPL")
    modules = [
        importlib.import_module(f"packhorse.kernels.{info.name}")
        for info in pkgutil.iter_modules(packhorse.kernels.__path__)
    ]
    defined = set(torch._C._dispatch_get_all_op_names())
    for kernels in modules:
        for name, launcher in vars(kernels).items():
            op = name[1:].removesuffix("_cuda")
            if name == f"_{op}_cuda" and f"packhorse::{op}" in defined:
                launchers.impl(op, launcher, "Meta", allow_override=True)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)
    )
    meta = torch.device("meta")
    monkeypatch.setattr(module, "_gpu", lambda device: meta)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(settings: dict[str, Any]) -> Seen:
        with compile_only("sm_90") as launched:
            report = warmup(**settings)
            warmed = list(launched)
            launched.clear()
            with module._compilations() as late:
                for seed in range(4):
                    training_step("meta", seed, **settings)
            return Seen(report, warmed, launched, late)

    try:
        yield run
    finally:
        launchers._destroy()


@dataclass(frozen=True)
class Seen:
    report: WarmupReport
    warmed: list[Any]  # a compiled kernel for each launch of the warm-up
    launched: list[Any]  # and of the training steps
    late: list[WarmKernel]  # compiled in the training steps

    def names_of(self, kernels: Iterable[Any]) -> set[str]:
        return {kernel.src.fn.__name__ for kernel in kernels}


@pytest.mark.compile
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_warm_up_compiles_what_training_launches_and_nothing_else(on_meta, name):
    seen = on_meta(CONFIGURATIONS[name])
    assert seen.late == []
    used = {id(kernel) for kernel in seen.launched}
    assert seen.names_of(kernel for kernel in seen.warmed if id(kernel) not in used) == set()


@pytest.mark.compile
def test_every_kernel_is_warmed_up_or_said_not_to_be(on_meta):
    modules = [m for name, m in sys.modules.items() if name.startswith("packhorse.kernels.")]
    launchers = [v for m in modules for v in vars(m).values() if isinstance(v, Launcher)]
    warmed = set()
    for settings in CONFIGURATIONS.values():
        seen = on_meta(settings)
        warmed |= seen.names_of(seen.warmed)
    # host integers are sent to a GPU only; its tests see that a first step compiles nothing
    sent = {"_pull_table_kernel"}
    assert warmed | NOT_WARMED | sent == {launcher.kernel.__name__ for launcher in launchers}
    assert not warmed & NOT_WARMED


@pytest.mark.compile
def test_the_report_names_each_kernel_and_whether_it_was_compiled(on_meta, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    settings = {
        "num_captured_layers": 3, "topk": 4, "num_experts": 8, "dense_dtypes": (torch.int16,),
    }  # fmt: skip
    first, again = on_meta(settings).report, on_meta(settings).report
    assert first.num_compiled == len(first.kernels) > 0
    assert first.seconds > sum(kernel.seconds for kernel in first.kernels) > 0
    assert any("gather_routes_u8_i32_TOPK4" in kernel.name for kernel in first.kernels)
    assert str(first).splitlines()[-1].startswith(f"{first.num_compiled} kernels compiled, 0 from")
    assert again.kernels == ()  # this process has them


# --- without a GPU --------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"num_captured_layers": 2, "topk": 2, "num_experts": 4}


@pytest.mark.skipif(GPU or INTERPRET, reason="torch sees a GPU, or the interpreter needs none")
def test_without_a_gpu_it_says_what_to_ask():
    with pytest.raises(RuntimeError, match=r"^warmup: torch sees no GPU .* packhorse doctor"):
        warmup(**SMALL)


@pytest.mark.skipif(not INTERPRET, reason="kernels are compiled here")
def test_under_the_interpreter_it_compiles_nothing_and_says_so():
    report = warmup(**SMALL)
    assert (report.kernels, report.interpreted) == ((), True)
    assert "TRITON_INTERPRET=1" in str(report)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"topk": 0}, ValueError, "topk must be >= 1, got 0"),
        ({"topk": 5}, ValueError, "topk=5 is more than num_experts=4"),
        (
            {"num_captured_layers": 1.5},
            TypeError,
            "num_captured_layers must be an integer, got 1.5",
        ),
        ({"support_width": 0}, ValueError, "support_width must be >= 1, got 0"),
        ({"vocab_size": True}, TypeError, "vocab_size must be an integer, got True"),
        ({"format": "bshd"}, ValueError, "num_trajectories of a microbatch is needed for 'bshd'"),
        ({"layers": [0, 2]}, ValueError, r"layer 2 is not in \[0, 2\)"),
        ({"layers": [0, "1"]}, TypeError, r"layers must be integers, got \[0, '1'\]"),
        ({"dense_dtypes": ("int64",)}, TypeError, "dense_dtypes must be dtypes, got 'int64'"),
    ],
)
def test_settings_are_refused_before_anything_runs(changed, error, message):
    with pytest.raises(error, match=f"^warmup: {message}"):
        warmup(**{**SMALL, **changed})


# --- the command ----------------------------------------------------------------------------------

REQUIRED = ["--captured-layers", "4", "--topk", "2", "--experts", "8"]


def settings_of(*options: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return vars(parser.parse_args([*REQUIRED, *options]))


def test_the_command_takes_every_argument_with_its_default():
    renamed = {"num_captured_layers": "captured_layers", "num_experts": "experts"}
    given = settings_of()
    for name, parameter in inspect.signature(warmup).parameters.items():
        value = given.pop(renamed.get(name, name))
        assert parameter.default in (inspect.Parameter.empty, value), name
    assert given == {}


@pytest.mark.parametrize(
    ("text", "layers"),
    [("12:24", range(12, 24)), ("1:12:2", range(1, 12, 2)), ("3", [3]), ("1,2,5", [1, 2, 5])],
)
def test_layers_are_a_run_or_a_list(text, layers):
    assert settings_of("--layers", text)["layers"] == layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "one"), "'one' is not FIRST:END"),
        (("--layers", "1:2:3:4"), "'1:2:3:4' is not FIRST:END"),
        (("--routes-dtype", "uint4b"), "'uint4b' is no dtype"),
        (("--dense-dtypes", "int64", "nn"), "'nn' is no dtype"),
    ],
)
def test_the_command_says_which_option_it_cannot_read(options, message, capsys):
    with pytest.raises(SystemExit):
        settings_of(*options)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(GPU or INTERPRET, reason="torch sees a GPU, or the interpreter needs none")
def test_the_command_is_refused_in_one_line_without_a_gpu(capsys):
    assert main(["warmup", *REQUIRED]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("packhorse warmup: torch sees no GPU")
    assert said.err.count("\n") == 1
    assert said.out == ""


# --- with a GPU -----------------------------------------------------------------------------------


def num_compiled() -> int:
    """Kernels of ours that Triton holds for this device."""
    modules = [m for name, m in sys.modules.items() if name.startswith("packhorse.kernels.")]
    launchers = {v for m in modules for v in vars(m).values() if isinstance(v, Launcher)}
    device = torch.cuda.current_device()
    return sum(len(launcher.kernel.device_caches[device][0]) for launcher in launchers)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_after_a_warm_up_training_compiles_nothing(cuda, name):
    settings = CONFIGURATIONS[name]
    warmup(**settings)
    held = num_compiled()
    assert held > 0
    for seed in range(3):
        training_step("cuda", seed, **settings)
    torch.cuda.synchronize()
    assert num_compiled() == held


PROGRAM = """
import json, sys, torch
from packhorse.replay.warmup import warmup
report = warmup(
    num_captured_layers=48, topk=8, num_experts=128, tp_size=2, cp_size=2, sequence_parallel=True,
    dummy="spread", support_width=20, logits_dtype=torch.bfloat16, vocab_size=151936,
)
print(json.dumps([report.seconds, report.num_compiled, report.num_from_cache]))
"""


def test_a_cold_warm_up_takes_at_most_15_s_and_a_second_process_1_s(cuda, tmp_path):
    """Imports and the start of CUDA are not counted, in either."""

    def seen() -> list[float]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    cold, compiled, found = seen()
    assert compiled > 0
    assert found == 0
    assert cold <= 15
    warm, compiled_again, found = seen()
    assert (compiled_again, found) == (0, compiled)
    assert warm <= 1
