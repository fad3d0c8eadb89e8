"""Compile before the first training step what that step would otherwise wait for.

    print(warmup(num_captured_layers=48, topk=8, num_experts=128, layers=range(12, 24)))

    python -m packhorse warmup --captured-layers 48 --topk 8 --experts 128 --layers 12:24

The public calls run on a microbatch of a few tokens. What compiles depends on dtypes, the shape of
a row and the layout's settings, never on how many tokens there are, so these calls compile what a
real microbatch will launch, and nothing else. Kernels that Triton's cache on disk holds from an
earlier process are loaded from there.

Sizes: L captured layers, J of them on this rank, K experts a token, E experts, C candidates.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from packhorse._nvtx import ranged
from packhorse.kernels.ragged_plan import NARROWEST
from packhorse.kernels.routes import Dummy
from packhorse.kernels.support_ragged import ragged_support_logprobs
from packhorse.kernels.support_rows import gather_ragged_support, pad_ragged_support
from packhorse.kernels.validate import validate_routes, validate_support
from packhorse.packed.collate import routes_dtype as fitting_routes_dtype
from packhorse.packed.tensor import PackedTensor
from packhorse.replay.device_rows import MicrobatchRows
from packhorse.replay.host import is_int
from packhorse.replay.layout import TokenLayout
from packhorse.replay.microbatch import ReplayMicrobatch
from packhorse.replay.scoring import score_microbatch

_NAME: Final = "warmup"

#: Lengths of the trajectories, in turn.
_LENGTHS: Final[tuple[int, ...]] = (4, 5)


@dataclass(frozen=True)
class WarmKernel:
    """One kernel that this process did not have yet.

    Attributes:
        name: as a profiler shows it.
        seconds: that Triton took to compile it, or to find it in its cache.
        from_cache: it was compiled by an earlier process.
    """

    name: str
    seconds: float
    from_cache: bool


@dataclass(frozen=True)
class WarmupReport:
    """What ``warmup`` did.

    Attributes:
        seconds: of its calls, with compiling, loading and waiting for the device; imports and the
            start of CUDA are not counted.
        kernels: in the order in which they were first launched. Those that the process had already
            are left out; empty with a Triton before 3.4, which does not tell.
        interpreted: nothing ran, since ``TRITON_INTERPRET=1`` compiles nothing.
    """

    seconds: float
    kernels: tuple[WarmKernel, ...]
    interpreted: bool = False

    @property
    def num_compiled(self) -> int:
        """Kernels compiled now."""
        return sum(not kernel.from_cache for kernel in self.kernels)

    @property
    def num_from_cache(self) -> int:
        """Kernels that an earlier process had compiled."""
        return sum(kernel.from_cache for kernel in self.kernels)

    def __str__(self) -> str:
        if self.interpreted:
            return "nothing to compile: TRITON_INTERPRET=1 runs the kernels in Triton's interpreter"
        lines = [
            f"{'cache' if kernel.from_cache else 'compiled':8s} {1e3 * kernel.seconds:6.0f} ms"
            f"  {kernel.name}"
            for kernel in self.kernels
        ]
        sums = f"{self.num_compiled} kernels compiled, {self.num_from_cache} from the cache"
        return "\n".join([*lines, f"{sums}, in {self.seconds:.2f} s"])


@ranged
def warmup(
    *,
    num_captured_layers: int,
    topk: int,
    num_experts: int,
    layers: range | Sequence[int] | None = None,
    routes_dtype: torch.dtype | None = None,
    topk_ids_dtype: torch.dtype = torch.int32,
    format: Literal["thd", "bshd"] = "thd",
    num_trajectories: int | None = None,
    tp_size: int = 1,
    cp_size: int = 1,
    cp_order: Literal["zigzag", "contiguous"] = "zigzag",
    sequence_parallel: bool = False,
    dummy: Dummy = "constant",
    ep_size: int = 1,
    support_width: int | None = None,
    ragged_support: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    dense_dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64, torch.bool),
    validation: bool = False,
    device: torch.device | str | None = None,
) -> WarmupReport:
    """Compile the kernels of one configuration, by running what a training step runs.

    These are: row ids and layouts, routes to per-layer ids, both from the host (``ReplaySession``)
    and from packed routes on the device (``TokenLayout.gather_routes``, a slice of a batch too),
    ``align`` and ``restore`` of each dense dtype, forward and backward, and ``score_microbatch``.

    Args:
        num_captured_layers: L, the layer axis of the routes.
        topk: K, experts a token.
        num_experts: E.
        layers: captured layers that this rank's routers replay, in their order; all by default.
            With virtual pipeline stages call once for each chunk's.
        routes_dtype: of the packed routes; by default the narrowest that ``pack_routes`` takes.
        topk_ids_dtype: int32 or int64, of ``TokenLayout.gather_routes``; a session's are int32
            under recompute, else int64, and both are compiled.
        num_trajectories: B of a microbatch, needed for "bshd": dense batches move in tiles of as
            many trajectories, up to 32. In "thd" it does not matter.
        format, tp_size, cp_size, cp_order, sequence_parallel: as in ``TokenLayout.build``. Ranks do
            not matter: nothing is compiled for one of them.
        dummy, ep_size: as in ``gather_routes``.
        support_width: C of ``rollout_sample_support``; None: scored over the whole vocabulary.
        ragged_support: support rows of different widths too: ``gather_ragged_support``, and with
            a ``support_width`` ``pad_ragged_support`` to it and ``ragged_support_logprobs`` of
            rows of up to so many ids.
        logits_dtype: of the model's logits on this rank.
        vocab_size: columns of the logits, where appended tokens are scored over all of them
            (``score_microbatch(appended=...)``); None: there are none.
        dense_dtypes: of the ``[B, S]`` batches that are aligned and restored.
        validation: ``validate_routes`` of ``layers`` and, with a ``support_width``,
            ``validate_support`` too.
        device: a CUDA device, by default the current one.

    Returns:
        How long it took, and which kernels were compiled or taken from Triton's cache.

    Raises:
        RuntimeError: torch sees no GPU. Under ``TRITON_INTERPRET=1``, where nothing is compiled, it
            needs none and runs nothing.
        TypeError, ValueError: a setting is wrong; from the call that refuses it.
    """
    for field, value in (
        ("num_captured_layers", num_captured_layers),
        ("topk", topk),
        ("num_experts", num_experts),
        ("support_width", 1 if support_width is None else support_width),
        ("vocab_size", 1 if vocab_size is None else vocab_size),
        ("num_trajectories", 1 if num_trajectories is None else num_trajectories),
    ):
        if not is_int(value):
            raise TypeError(f"{_NAME}: {field} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{_NAME}: {field} must be >= 1, got {value}")
    if topk > num_experts:
        raise ValueError(f"{_NAME}: topk={topk} is more than num_experts={num_experts}")
    if format == "bshd" and num_trajectories is None:
        raise ValueError(f"{_NAME}: num_trajectories of a microbatch is needed for 'bshd'")
    positions = range(num_captured_layers) if layers is None else layers
    if not all(map(is_int, positions)):
        raise TypeError(f"{_NAME}: layers must be integers, got {list(positions)!r}")
    for layer in positions:
        if not 0 <= layer < num_captured_layers:
            raise ValueError(f"{_NAME}: layer {layer} is not in [0, {num_captured_layers})")
    for dtype in dense_dtypes:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{_NAME}: dense_dtypes must be dtypes, got {dtype!r}")
    if not isinstance(tl.sum, triton.JITFunction):
        return WarmupReport(0.0, (), interpreted=True)
    place = _gpu(device)
    settings = _Settings(
        num_captured_layers=num_captured_layers,
        topk=topk,
        num_experts=num_experts,
        layers=positions,
        routes_dtype=routes_dtype or fitting_routes_dtype(num_experts),
        lengths=tuple(_LENGTHS[i % 2] for i in range(num_trajectories or 2)),
        topk_ids_dtype=topk_ids_dtype,
        layout={
            "format": format,
            "tp_size": tp_size,
            "cp_size": cp_size,
            "cp_order": cp_order,
            "sequence_parallel": sequence_parallel,
            "device": place,
        },
        dummy=dummy,
        ep_size=ep_size,
        support_width=support_width,
        ragged_support=ragged_support,
        logits_dtype=logits_dtype,
        vocab_size=vocab_size,
        dense_dtypes=tuple(dense_dtypes),
        validation=validation,
        device=place,
    )
    with torch.cuda.device(place):
        torch.zeros(1, device=place)
        torch.cuda.synchronize()
        return settings.run(torch.cuda.synchronize)


def _gpu(device: torch.device | str | None) -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{_NAME}: torch sees no GPU to compile for (python -m packhorse doctor says what it"
            " sees); CPU tensors run the references, which need no warm-up"
        )
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        raise ValueError(f"{_NAME}: device must be a CUDA device, got {place}")
    return torch.device("cuda", torch.cuda.current_device()) if place.index is None else place


class _OneForAllRanks(TokenLayout):
    """Restores as if every context-parallel rank had the same values: no process group is asked."""

    def restore(self, values: Tensor, fill: float = 0) -> Tensor:
        return self.restore_gathered([values] * self.cp_size, fill)


@dataclass(frozen=True)
class _Settings:
    """The arguments of ``warmup``, and the calls they stand for."""

    num_captured_layers: int
    topk: int
    num_experts: int
    layers: range | Sequence[int]
    routes_dtype: torch.dtype
    topk_ids_dtype: torch.dtype
    lengths: tuple[int, ...]
    layout: dict[str, Any]
    dummy: Dummy
    ep_size: int
    support_width: int | None
    ragged_support: bool
    logits_dtype: torch.dtype
    vocab_size: int | None
    dense_dtypes: tuple[torch.dtype, ...]
    validation: bool
    device: torch.device

    @property
    def responses(self) -> list[int]:
        return [length - 2 for length in self.lengths]

    def run(self, wait: Callable[[], None]) -> WarmupReport:
        """Make the calls; ``wait`` for what they left on the device."""
        begin = time.perf_counter()
        with _compilations() as kernels, torch.enable_grad():
            layout = _OneForAllRanks.build(self.lengths, **self.layout)
            self._replay(layout)
            for dtype in self.dense_dtypes:
                self._move_dense(layout, dtype)
            self._score(layout)
            if self.ragged_support:
                self._gather_ragged(layout)
            if self.validation:
                self._validate()
            wait()
        return WarmupReport(time.perf_counter() - begin, tuple(kernels))

    def _replay(self, layout: TokenLayout) -> None:
        routes = self._routes(self.lengths)
        for given in (routes, routes.to(self.device)):
            microbatch = ReplayMicrobatch(layout, given, dummy=self.dummy)
            rows = MicrobatchRows.build(microbatch)
            for dtype in (torch.int32, torch.int64):
                rows.gather_targets(
                    tuple(self.layers),
                    num_experts=self.num_experts,
                    topk=self.topk,
                    ep_size=self.ep_size,
                    dtype=dtype,
                )
            for scattered_by_model in (False, True):
                rows.model_mask(scattered_by_model=scattered_by_model)
        batch = self._routes(_LENGTHS).to(self.device)
        # the second begins an odd number of rows into the buffer: aligned to 16 bytes or not
        for part in (slice(0, 1), slice(1, 2)):
            sliced = TokenLayout.build(_LENGTHS[part], **self.layout)
            sliced.gather_routes(
                batch[part],
                self.layers,
                num_experts=self.num_experts,
                dtype=self.topk_ids_dtype,
                dummy=self.dummy,
                ep_size=self.ep_size,
            )

    def _routes(self, lengths: Sequence[int]) -> PackedTensor:
        """On the CPU, of every token but the last; distinct experts, as the routers need."""
        captured = [length - 1 for length in lengths]
        shape = (sum(captured), self.num_captured_layers, self.topk)
        experts = torch.arange(self.topk).to(self.routes_dtype)
        return PackedTensor.from_lengths(experts.expand(shape).contiguous(), captured)

    def _move_dense(self, layout: TokenLayout, dtype: torch.dtype) -> None:
        dense = torch.zeros(
            layout.num_sequences,
            layout.batch_width,
            dtype=dtype,
            device=self.device,
            requires_grad=dtype.is_floating_point,
        )
        for next_token in (False, True):
            restored = layout.restore(layout.align(dense, 0, next_token=next_token))
            if restored.requires_grad:
                restored.sum().backward()

    def _score(self, layout: TokenLayout) -> None:
        num_columns = max(self.vocab_size or 0, self.support_width or 0, sum(self.lengths))
        tokens = torch.arange(sum(self.lengths)).to(self.device)
        support = None
        if self.support_width is not None:
            row = torch.arange(self.support_width, dtype=torch.int32)
            rows = row.expand(sum(self.responses), self.support_width).contiguous()
            support = PackedTensor.from_lengths(rows, self.responses)
        appended = None
        if self.vocab_size is not None:
            appended = [[False] * (length - 1) + [True] for length in self.lengths]
        logits = torch.zeros(
            layout.num_tokens,
            num_columns,
            dtype=self.logits_dtype,
            device=self.device,
            requires_grad=True,
        )
        scores = score_microbatch(
            logits,
            layout,
            PackedTensor.from_lengths(tokens, self.lengths),
            support,
            response_lengths=self.responses,
            appended=appended,
        )
        (scores.logprobs.values + scores.entropy.values).sum().backward()

    def _gather_ragged(self, layout: TokenLayout) -> None:
        num_rows = sum(self.responses)
        ids = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        offsets = torch.arange(num_rows + 1, device=self.device)
        row_ids = layout.support_row_ids(self.responses)
        gather_ragged_support(ids, offsets, row_ids)
        if self.support_width is not None:
            pad_ragged_support(ids, offsets, row_ids, width=self.support_width)
            self._score_ragged(self.support_width)

    def _score_ragged(self, widest: int) -> None:
        """A row of each class, of ids that begin at 16 bytes and of ids that do not."""
        widths = [NARROWEST]
        while widths[-1] < widest:
            widths.append(min(4 * widths[-1], widest))
        ids = torch.zeros(sum(widths) + 1, dtype=torch.int32, device=self.device)
        offsets = torch.tensor([0, *widths]).cumsum(0).to(self.device)
        row_ids = torch.arange(len(widths), device=self.device)
        sampled_ids = torch.zeros_like(row_ids)
        for token_ids in (ids[1:], ids[:-1]):
            logits = torch.zeros(
                len(widths), 2, dtype=self.logits_dtype, device=self.device, requires_grad=True
            )
            scores = ragged_support_logprobs(
                logits, token_ids, offsets, row_ids, sampled_ids, widths=widths
            )
            (scores.logprobs + scores.entropy).sum().backward()

    def _validate(self) -> None:
        batch = self._routes(_LENGTHS).to(self.device)
        for part in (slice(0, 1), slice(1, 2)):
            validate_routes(batch[part].values, num_experts=self.num_experts, layers=self.layers)
        if self.support_width is not None:
            support = torch.arange(self.support_width, dtype=torch.int32).expand(2, -1)
            support = support.contiguous().to(self.device)
            sampled_ids = torch.zeros(2, dtype=torch.int64, device=self.device)
            validate_support(support, sampled_ids, vocab_size=self.support_width)


@contextmanager
def _compilations() -> Iterator[list[WarmKernel]]:
    """Each kernel that Triton compiles meanwhile, or takes from its cache on disk."""
    kernels: list[WarmKernel] = []
    knobs: Any = getattr(triton, "knobs", None)
    if knobs is None or not hasattr(knobs.compilation, "listener"):
        yield kernels
        return
    before = knobs.compilation.listener

    def note(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **others: Any) -> None:
        kernels.append(WarmKernel(metadata["name"], times.total / 1e6, cache_hit))
        if before is not None:
            before(metadata=metadata, times=times, cache_hit=cache_hit, **others)

    knobs.compilation.listener = note
    try:
        yield kernels
    finally:
        knobs.compilation.listener = before


# --- python -m packhorse warmup -------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: the arguments of ``warmup``."""
    add = parser.add_argument
    add("--captured-layers", type=int, required=True, metavar="L", help="layer axis of the routes")
    add("--topk", type=int, required=True, metavar="K", help="experts a token")
    add("--experts", type=int, required=True, metavar="E", help="experts of a layer")
    add(
        "--layers",
        type=_layers,
        metavar="12:24",
        help="captured layers of this rank: FIRST:END, FIRST:END:STEP or 1,2,5; all by default",
    )
    add("--routes-dtype", type=_dtype, help="of the packed routes; the narrowest by default")
    add("--topk-ids-dtype", type=_dtype, default=torch.int32, help="int32 (default) or int64")
    add("--format", choices=("thd", "bshd"), default="thd")
    add("--num-trajectories", type=int, metavar="B", help="of a bshd microbatch")
    add("--tp-size", type=int, default=1)
    add("--cp-size", type=int, default=1)
    add("--cp-order", choices=("zigzag", "contiguous"), default="zigzag")
    add("--sequence-parallel", action="store_true")
    add("--dummy", choices=("constant", "spread"), default="constant")
    add("--ep-size", type=int, default=1)
    add("--support-width", type=int, metavar="C", help="candidates of a support row")
    add("--ragged-support", action="store_true", help="support rows of different widths too")
    add("--logits-dtype", type=_dtype, default=torch.float32, help="float32 by default")
    add("--vocab-size", type=int, metavar="V", help="logits' columns, where tokens are appended")
    add(
        "--dense-dtypes",
        type=_dtype,
        nargs="*",
        default=(torch.float32, torch.int64, torch.bool),
        metavar="DTYPE",
        help="of the [B, S] batches: float32 int64 bool by default",
    )
    add("--validation", action="store_true", help="the checks of routes and support too")
    add("--device", help="a CUDA device, by default the current one")


def run(arguments: argparse.Namespace) -> int:
    """Warm up and print the report; 2 where it is refused."""
    settings = vars(arguments)
    settings["num_captured_layers"] = settings.pop("captured_layers")
    settings["num_experts"] = settings.pop("experts")
    try:
        report = warmup(**settings)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(f"{_NAME}:"):
            raise  # a fault of the machine, not a refusal
        sys.stderr.write(f"packhorse {error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    return 0


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r} is no dtype of torch")
    return dtype


def _layers(text: str) -> range | list[int]:
    try:
        if ":" in text:
            return range(*(int(part) for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not FIRST:END, FIRST:END:STEP or a list like 1,2,5"
        ) from None
