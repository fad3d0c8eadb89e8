"""``python -m packhorse demo``: a captured vLLM rollout replayed through a real Megatron model.

Loads the capture and the model, runs the schedules of ``compare`` in fp32 and bf16, and prints how
far the trainer's logprobs are from the rollout's with and without what the rollout decided. Every
figure is computed by the run.
"""

import argparse
import importlib.metadata
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from packhorse.replay import compare, demo_families, demo_plot, demo_ranks
from packhorse.replay.capture import Capture
from packhorse.replay.checkpoint import MoeConfig, read_config, shown
from packhorse.replay.demo_model import Sizes
from packhorse.replay.demo_ranks import RankFailed, Refused

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The training schedule left a gradient missing or not finite, or a rank did not end well.
EXIT_FAILED = 1
#: The run could not begin: a bad file, a model that does not fit, something not installed.
EXIT_REFUSED = 2

_NO_MEGATRON = (
    "megatron-core is not installed: pip install 'megatron-core>=0.16.1' safetensors, or for 0.17"
    " and later on Python 3.11 pip install --no-deps --ignore-requires-python megatron-core==0.19.2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on ``parser``."""
    parser.add_argument(
        "--capture", metavar="FILE.npz", help="trajectories (docs/capture.md); default: packaged"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="Hugging Face checkpoint that was sampled from; default: the packaged one of the"
        " family that the capture's meta names",
    )
    parser.add_argument(
        "--family",
        choices=demo_families.FAMILIES,
        help=f"whose packaged capture and checkpoint; default: {demo_families.DEFAULT}, or that of"
        " --capture",
    )
    parser.add_argument(
        "--dtype", choices=["both", *DTYPES], default="both", help="the trainer's; default: both"
    )
    parser.add_argument(
        "--format",
        choices=["bshd", "thd"],
        default="bshd",
        help="rectangle of padded trajectories, or packed; default: bshd",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="where the trainer computes, each rank of several on a GPU of its own; default: cuda"
        " where there are as many GPUs as ranks, else cpu",
    )
    parser.add_argument(
        "--microbatch-size",
        type=int,
        default=3,
        metavar="N",
        help="trajectories in a microbatch; default: 3",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="the rollout's; default: that of the capture's meta, else 1",
    )
    parser.add_argument(
        "--break",
        dest="misplace",
        choices=compare.BREAKS,
        help="put the routes in the wrong place on purpose: it must show",
    )
    parser.add_argument("--plot", metavar="OUT.png", help="write a picture (needs matplotlib)")
    demo_ranks.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0; ``EXIT_FAILED`` if a gradient was not finite or a rank failed; ``EXIT_REFUSED`` after one
        line on stderr about what keeps it from running.
    """
    began = time.perf_counter()
    try:
        demo = prepare(args)
        if demo.sizes.world > 1:
            demo.results, demo.seconds["import"] = demo_ranks.run(args)
        else:
            _run_here(demo, began)
    except Refused as error:
        return _refuse(error)
    except RankFailed as error:
        sys.stderr.write(error.details)
        return _refuse(error, EXIT_FAILED)
    demo.seconds["total"] = time.perf_counter() - began
    _print("\n".join(report_lines(demo)))
    if args.plot:
        try:
            demo_plot.draw(
                args.plot,
                demo.capture,
                demo.results,
                demo.config.moe_layers,
                routes=misplaced(args.misplace) if args.misplace else None,
            )
        except (OSError, ValueError) as error:
            return _refuse(Refused(f"--plot {args.plot}: {error}"))
        _print(f"picture   {args.plot}")
    if any(result.unfinished_gradients for result in demo.results.values()):
        return EXIT_FAILED
    return 0


def _run_here(demo: "Demo", began: float) -> None:
    from packhorse.replay.megatron import single_process

    with quiet_megatron(), _threads_for(demo), imported_megatron(), single_process():
        demo.seconds["import"] = time.perf_counter() - began
        for name in dtypes_of(demo.args):
            model = load(demo, name)
            demo.results[name] = compare.compare(
                model,
                demo.capture,
                demo.microbatches,
                temperature=demo.temperature,
                moe_layers=demo.config.moe_layers,
            )
            del model


# --- before the first forward ---------------------------------------------------------------------


@dataclass
class Demo:
    """One run: what it was given, and what it found."""

    folder: Path  # of the checkpoint
    config: MoeConfig
    capture: Capture
    microbatches: list[compare.Microbatch]
    device: torch.device  # the trainer's; of several ranks "cuda" is each one's own
    temperature: float
    args: argparse.Namespace
    sizes: Sizes
    results: dict[str, compare.Comparison] = field(default_factory=dict)  # dtype name -> result
    seconds: dict[str, float] = field(default_factory=dict)


def prepare(args: argparse.Namespace, *, in_rank: bool = False) -> Demo:
    """What the options name, read and checked. Raises ``Refused``.

    Microbatches of several ranks are on the CPU, but ``in_rank``, on one of them, on its device.
    """
    sizes = demo_ranks.sizes_of(args)
    try:
        demo_ranks.check_sizes(sizes, args)
        device = demo_ranks.device_of(sizes, args)
        if args.plot:
            demo_plot.check(args.plot)
        path, folder = demo_families.choose(args.capture, args.model, args.family)
        config = read_config(folder)
        capture = Capture.load(
            path,
            num_experts=config.num_experts,
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            topk=config.topk,
            moe_layers=config.moe_layers,
        )
        _check_positions(config, capture)
        _check_options(args, capture)
        temperature = _temperature(args, capture)
        microbatches = compare.make_microbatches(
            capture,
            format=args.format,
            size=args.microbatch_size,
            device=device if in_rank or sizes.world == 1 else "cpu",
            misplace=args.misplace,
            moe_layers=config.moe_layers,
        )
        demo_ranks.check_model(sizes, config, microbatches)
    except (ValueError, TypeError) as error:
        raise Refused(error) from error
    except MemoryError as error:
        raise Refused("not enough memory for the capture") from error
    return Demo(folder, config, capture, microbatches, device, temperature, args, sizes)


def _temperature(args: argparse.Namespace, capture: Capture) -> float:
    """That of the options, else of the capture's meta, else 1."""
    temperature, name = args.temperature, "--temperature"
    if temperature is None:
        name = "the capture's meta: temperature"
        sampling = capture.meta.get("sampling")
        temperature = sampling.get("temperature", 1.0) if isinstance(sampling, dict) else 1.0
    # an int may be past every float, and a float too small for one over it to be finite
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not torch.finfo(torch.float32).tiny <= temperature <= torch.finfo(torch.float32).max
    ):
        raise ValueError(f"{name} must be finite and above 0, got {shown(temperature)}")
    return float(temperature)


def _check_positions(config: MoeConfig, capture: Capture) -> None:
    if sum(capture.response_lengths) == 0:
        raise ValueError(f"{capture.path}: no response tokens: there is nothing to compare")
    for i, length in enumerate(capture.lengths):
        if length > config.max_positions:
            raise ValueError(
                f"{capture.path}: trajectory {i} has {length} tokens, the model"
                f" {config.max_positions} positions"
            )


def _check_options(args: argparse.Namespace, capture: Capture) -> None:
    """What ``make_microbatches`` would refuse, in the words of the command line."""
    if args.microbatch_size < 1:
        raise ValueError(f"--microbatch-size must be at least 1, got {args.microbatch_size}")
    if args.misplace != "batch-major":
        return
    if args.format != "bshd":
        raise ValueError(f"--break batch-major needs --format bshd, got {args.format}")
    if args.microbatch_size < 2:
        raise ValueError(
            f"--break batch-major needs --microbatch-size 2 or more, got {args.microbatch_size}"
        )
    if capture.num_trajectories < 2:
        raise ValueError(
            f"--break batch-major needs at least 2 trajectories, {capture.path} has"
            f" {capture.num_trajectories}"
        )


def dtypes_of(args: argparse.Namespace) -> list[str]:
    return list(DTYPES) if args.dtype == "both" else [args.dtype]


@contextmanager
def imported_megatron() -> Iterator[None]:
    """Megatron can be used; shims that were put here are taken off. May raise ``Refused``."""
    from packhorse.replay.cpu_megatron import install_cpu_shims, remove_cpu_shims

    installed = False
    try:
        try:
            installed = install_cpu_shims()
            import megatron.core  # noqa: F401
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "megatron":
                raise Refused(_NO_MEGATRON) from error
            raise Refused(f"Megatron-core cannot be imported: {error}") from error
        yield
    finally:
        if installed:
            remove_cpu_shims()


def load(demo: Demo, dtype: str) -> Any:
    """The whole model on this process; inside ``single_process()``. May raise ``Refused``."""
    from packhorse.replay.megatron import load_hf_model
    from packhorse.replay.packed_attention import PackedAttention

    began = time.perf_counter()
    try:
        model = load_hf_model(
            demo.folder,
            dtype=DTYPES[dtype],
            recompute="full",
            core_attention=PackedAttention if demo.args.format == "thd" else None,
        )
    except ModuleNotFoundError as error:
        raise Refused(f"{error.name} is not installed: pip install {error.name}") from error
    except ValueError as error:
        raise Refused(error) from error
    demo.seconds[f"load {dtype}"] = time.perf_counter() - began
    return model


def _refuse(error: Exception, code: int = EXIT_REFUSED) -> int:
    line = " ".join(str(error).split())
    sys.stderr.write(f"packhorse demo: {line}\n")
    return code


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Megatron warns at its import of what is not installed, and logs at each model it builds."""
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.")
            # the compiler's, of sources that are imported for the first time: they name no module
            warnings.filterwarnings("ignore", category=SyntaxWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _threads_for(demo: Demo) -> Iterator[None]:
    """One thread for a small model on a CPU: more cost it more than they do."""
    threads = torch.get_num_threads()
    if demo.device.type == "cpu" and demo.config.hidden_size < 1024:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- the table ------------------------------------------------------------------------------------

_LABEL = 40
_COLUMN = 8


def report_lines(demo: Demo) -> list[str]:
    """The demo's table, a line an item."""
    capture, config = demo.capture, demo.config
    num_tokens, num_sampled = sum(capture.lengths), sum(capture.response_lengths)
    engine = capture.meta.get("vllm")
    dtype = capture.meta.get("dtype", "dtype unknown")
    source = f"vLLM {shown(engine, str)} ({shown(dtype, str)})" if engine else "an unnamed engine"
    lines = [
        f"rollout   {capture.path.name}: {capture.num_trajectories} trajectories,"
        f" {num_tokens:,} tokens, {num_sampled:,} of them sampled by {source}",
        f"model     {config.model_type}, {config.num_layers} layers{_dense(config)},"
        f" {config.num_experts} experts, top {config.topk}, vocabulary {config.vocab_size:,}",
        *([f"          {details}"] if (details := demo_families.described(config)) else []),
        f"trainer   megatron-core {_version('megatron-core')}, torch {_version('torch')},"
        f" {_device_name(demo.device)}; {len(demo.microbatches)} microbatches"
        f" ({demo.args.format})",
        f"kernels   {_kernels(demo.device)}",
    ]
    if demo.sizes.world > 1:
        lines.append(f"ranks     {demo_ranks.shown(demo.sizes, demo.device)}")
    if demo.args.misplace:
        lines.append(f"routes    {misplaced(demo.args.misplace)}")
    lines.append("")
    group = 4 * _COLUMN + 1
    names = list(demo.results)
    lines.append(" " * _LABEL + "".join(f"{name:^{group + 2}}" for name in names))
    heads = "".join(f"{head:>{_COLUMN}}" for head in ("mean", "p99", "max")) + "    k3 KL"
    lines.append(f"{'|trainer - rollout| logprob, with':<{_LABEL}}" + f"{heads}  " * len(names))
    for variant in compare.VARIANTS:
        cells = ""
        for result in demo.results.values():
            gap = result.gaps[variant]
            cells += _fixed(gap.mean, _COLUMN, 4) + _fixed(gap.p99, _COLUMN, 3)
            cells += _fixed(gap.max, _COLUMN, 3) + _fixed(gap.k3, _COLUMN + 1, 5) + "  "
        lines.append(f"{'  ' + variant:<{_LABEL}}{cells}".rstrip())
    for label, show in _ROWS:
        cells = "".join(f"{show(result):>{group}}  " for result in demo.results.values())
        lines.append(f"{label:<{_LABEL}}{cells}".rstrip())
    lines += [
        "",
        f"bytes     routes {_row_bytes(capture.routes)} a token, support"
        f" {_row_bytes(capture.support)} a response token",
        f"seconds   {demo.seconds['total']:.1f} in all, of which imports"
        f" {demo.seconds['import']:.1f}",
    ]
    return [line.rstrip() for line in lines]


def _dense(config: MoeConfig) -> str:
    dense = config.num_layers - len(config.moe_layers)
    return f" ({dense} dense)" if dense else ""


def _fixed(value: float, width: int, decimals: int) -> str:
    """``value`` in ``width`` characters, a space first: one too long for it gets an exponent."""
    text = f"{value:.{decimals}f}"
    return f"{text if len(text) < width else format(value, '.1e'):>{width}}"


def misplaced(how: str) -> str:
    """What ``--break HOW`` did to the routes."""
    return f"misplaced on purpose: {compare.BREAKS[how]} (--break {how})"


def _differing(result: compare.Comparison) -> str:
    differing = result.differing
    share = 100 * differing.mean() if differing.size else 0.0
    return f"{share:.2f} % of {differing.size:,}"


def _gradients(result: compare.Comparison) -> str:
    if result.unfinished_gradients:
        return f"{len(result.unfinished_gradients)} NOT FINITE"
    return f"all finite, {result.router_gradient:.2e}"


def _seconds(result: compare.Comparison) -> str:
    return " / ".join(f"{seconds:.2f}" for seconds in result.seconds.values())


def _asked(result: compare.Comparison) -> str:
    asked = result.training_report.asked
    return f"{sum(map(bool, asked.values()))} of {len(asked)}, {sum(asked.values())} times"


def _rows(result: compare.Comparison) -> str:
    report = result.training_report
    return f"{report.rows_replayed:,} / {report.rows_dummy:,} / {report.rows_live:,}"


_ROWS: Sequence[tuple[str, Callable[[compare.Comparison], str]]] = (
    ("route sets that differ without replay", _differing),
    ("routers asked, in the training schedule", _asked),
    ("  and answered again in recompute", lambda r: f"{r.training_report.recomputed_calls} times"),
    ("rows replayed / dummy / live, a layer", _rows),
    (
        "training schedule, full recompute",
        lambda result: f"loss {_fixed(result.loss, 12, 4).strip()}",
    ),
    ("  gradients; norm at the routers", _gradients),
    ("  max |logprob - forward-only's|", lambda result: f"{result.recompute_difference:.1e}"),
    ("seconds live / replayed / training", _seconds),
)


def _row_bytes(packed: Any) -> str:
    dtype = str(packed.dtype).removeprefix("torch.")
    return f"{packed.dtype.itemsize * packed.row_shape.numel()} ({dtype} {list(packed.row_shape)})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"


def _kernels(device: torch.device) -> str:
    if device.type == "cuda":
        return f"Triton {_version('triton')}"
    return "the torch references (Triton's run on a GPU)"


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()
