"""Each public call is a range of the NVTX domain ``packhorse``; without a profiler it is nothing.

What a profiler would see is recorded by a library of our own, injected as nsys injects its own
(``tests/tools/nvtx_recorder.c``), into processes of their own: injection happens at their start.
"""

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import pytest

import packhorse
from packhorse._env import PROFILED
from packhorse._nvtx import RANGE_NAME, ranged, ranged_methods

ROOT = Path(__file__).parents[1]
unprofiled = pytest.mark.skipif(PROFILED, reason="a profiler watches this process")

#: A range and what runs inside it.
Tree = tuple[str, list["Tree"]]


def tree(name: str, *inside: Tree) -> Tree:
    return (name, list(inside))


# --- the recorder ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Callable[[str], list[list[Tree]]]:
    """Run a program; its ranges of our domain as trees, a list of them for each thread."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or importlib.util.find_spec("nvtx") is None:
        pytest.skip("needs a C compiler and the package nvtx")
    folder = tmp_path_factory.mktemp("nvtx")
    library = folder / "nvtx_recorder.so"
    source = ROOT / "tests" / "tools" / "nvtx_recorder.c"
    subprocess.run(
        [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source],
        check=True,
    )

    def run(program: str) -> list[list[Tree]]:
        events = folder / "ranges.txt"
        events.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "NVTX_INJECTION64_PATH": str(library),
                "NVTX_RECORD": str(events),
            },
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return read_trees(events.read_text() if events.exists() else "")

    return run


def read_trees(events: str) -> list[list[Tree]]:
    """What the recorder wrote, as trees; pushes and pops must match on each thread."""
    roots: dict[str, list[Tree]] = {}
    opened: dict[str, list[list[Tree]]] = {}
    for line in events.splitlines():
        thread, kind, domain, *message = line.split(" ")
        if domain != "packhorse":
            continue
        inside = opened.setdefault(thread, [roots.setdefault(thread, [])])
        if kind == "push":
            (name,) = message
            inside[-1].append((name, []))
            inside.append(inside[-1][-1][1])
        else:
            inside.pop()
            assert inside, f"thread {thread} pops more than it pushed"
    assert all(len(inside) == 1 for inside in opened.values()), "a range was never popped"
    return list(roots.values())


MARK = """
from packhorse._nvtx import ranged as _ranged
@_ranged
def mark(): ...
"""


def split_at_marks(ranges: list[Tree]) -> list[list[Tree]]:
    """What was ranged before each ``mark()`` and after the last."""
    parts: list[list[Tree]] = [[]]
    for name, inside in ranges:
        if name == "mark":
            parts.append([])
        else:
            parts[-1].append((name, inside))
    return parts


# --- the decorator --------------------------------------------------------------------------------


@unprofiled
def test_without_a_profiler_a_ranged_function_is_the_function_itself():
    def plain() -> None: ...

    assert ranged(plain) is plain
    assert getattr(plain, RANGE_NAME) == "plain"


def test_a_class_ranges_its_public_methods_but_those_named():
    @dataclass
    @ranged_methods("view")
    class Herd:
        size: int

        def count(self) -> None: ...
        def view(self) -> None: ...
        def _hidden(self) -> None: ...
        def __getitem__(self, i: int) -> None: ...
        def __len__(self) -> int: ...
        @classmethod
        def build(cls) -> None: ...
        @staticmethod
        def cat() -> None: ...
        @property
        def width(self) -> None: ...
        @contextmanager
        @ranged
        def fence(self) -> Iterator[None]: ...

    functions = {name: getattr(Herd, name) for name in vars(Herd) if callable(getattr(Herd, name))}
    names = {getattr(function, RANGE_NAME, None) for function in functions.values()} - {None}
    assert names == {f"Herd.{n}" for n in ("count", "__getitem__", "build", "cat", "fence")}


EXAMPLE = '''
import contextlib, inspect, threading
from packhorse._nvtx import ranged, ranged_methods

@ranged_methods()
class Herd:
    def __init__(self, size): self.size = size
    def count(self, *, start: int = 0) -> int:
        """Heads from ``start`` on."""
        return one(self.size) - start
    @classmethod
    def lost(cls): raise KeyError("gone")

@ranged
def one(x): return x

@contextlib.contextmanager
@ranged
def fence(width):
    yield one(width)

herd = Herd(3)
assert herd.count(start=1) == 2
assert Herd.count.__doc__ == "Heads from ``start`` on." and Herd.count.__name__ == "count"
assert str(inspect.signature(Herd.count)) == "(self, *, start: int = 0) -> int"
'''


RAISING = """
for call in (Herd.lost, lambda: one()):
    try: call()
    except (KeyError, TypeError): pass
    else: raise AssertionError
one(2)
"""
SPANNING = """
with fence(4) as width:
    assert width == 4
    one(1)
with contextlib.suppress(ZeroDivisionError), fence(4):
    1 / 0
"""
THREADED = """
with fence(4):
    thread = threading.Thread(target=herd.count)
    thread.start()
    thread.join()
"""
#: ``fullgraph=True`` raises at a graph break, which a push inside a traced call would be
TRACED = """
import torch
def twice(x): return one(x) + herd.count()
traced = torch.compile(twice, fullgraph=True, backend="eager")
assert torch.equal(traced(torch.ones(2)), torch.full((2,), 4.0))
"""


@pytest.fixture(scope="module")
def example(record) -> dict[str, list[Tree]]:
    """The ranges of each program above."""
    programs = {
        "calls": EXAMPLE, "raising": RAISING, "spanning": SPANNING, "threaded": THREADED,
        "traced": TRACED,
    }  # fmt: skip
    main, other = record(MARK + "mark()".join(programs.values()))
    return {**dict(zip(programs, split_at_marks(main), strict=True)), "other thread": other}


def test_a_range_is_named_as_the_method_nests_and_keeps_the_signature(example):
    assert example["calls"] == [tree("Herd"), tree("Herd.count", tree("one"))]


def test_an_exception_ends_the_range(example):
    assert example["raising"] == [tree("Herd.lost"), tree("one"), tree("one")]


def test_the_range_of_a_context_manager_spans_its_block(example):
    spans = [tree("fence", tree("one"), tree("one")), tree("fence", tree("one"))]
    assert example["spanning"] == spans


def test_each_thread_nests_its_own_ranges(example):
    assert example["threaded"] == [tree("fence", tree("one"))]
    assert example["other thread"] == [tree("Herd.count", tree("one"))]


def test_a_traced_call_is_not_ranged(example):
    assert example["traced"] == []


def test_without_the_package_a_profiled_call_runs_unranged(record):
    assert record("import sys; sys.modules['nvtx'] = None\n" + EXAMPLE) == []


# --- the public names -----------------------------------------------------------------------------

#: public methods without a range: they look at host integers or wrap a view, nothing more
#: views and host values; what is asynchronous, whose range would not nest across other tasks
UNRANGED = {
    "CaptureSettings.routes_from", "CaptureSettings.server_arguments", "CapturedLayers.decoder",
    "CapturedLayers.listed", "CapturedLayers.moe_only", "PackedRagged.detach", "PackedRagged.empty",
    "PackedRagged.is_pinned", "PackedRagged.segment", "PackedReplies", "PackedReplies.hold",
    "PackedReplies.release", "PackedTensor.detach", "PackedTensor.empty", "PackedTensor.is_pinned",
    "PackedTensor.segment", "ReplaySession.report", "ReplaySession.tally", "ReplyStream",
    "ReplyStream.abort", "ReplyStream.close", "ReplyStream.rollouts", "RetryPolicy.delay_s",
    "Rollout.turn", "RolloutClient", "RolloutClient.chat", "RolloutClient.complete",
    "RolloutClient.generate", "RolloutClient.start_session", "RolloutClient.stream",
    "RolloutClient.tokenize", "RolloutClient.version", "RolloutSession", "RolloutSession.finalize",
    "RolloutSession.observe", "RolloutSession.turn", "ServerError", "make_proxy",
    "plot_route_mismatch", "preflight_async", "reset_after_weights_async",
}  # fmt: skip


def public_functions() -> dict[str, Callable]:
    """Range name -> function, for each public function and each method written in a public class.

    Properties are attributes to their users; what a ``NamedTuple`` or a dataclass generates is
    not written by us.
    """
    found: dict[str, Callable] = {}
    for name in packhorse.__all__:
        value = getattr(packhorse, name)
        if inspect.isclass(value):
            for method, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if not inspect.isfunction(function) or function.__module__ != value.__module__:
                    continue
                if method == "__init__" and not is_dataclass(value):
                    found[name] = function
                elif not method.startswith("_") or method == "__getitem__":
                    found[f"{name}.{method}"] = function
        elif callable(value):
            found[name] = value
    return found


def test_every_public_function_and_method_is_ranged_under_its_name():
    functions = public_functions()
    assert set(functions) >= UNRANGED
    names = {name: getattr(f, RANGE_NAME, None) for name, f in functions.items()}
    assert names == {name: None if name in UNRANGED else name for name in functions}


# --- a run ----------------------------------------------------------------------------------------

MICROBATCH = """
import torch
from packhorse import PackedRagged, PackedTensor, TokenLayout
from packhorse import gather_routes, gather_rows, score_microbatch

layout = TokenLayout.build([5, 3], tp_size=2)
routes = torch.arange(8, dtype=torch.uint8).repeat(6, 4, 1)[..., :2]
row_ids = layout.route_row_ids([4, 2])
gather_routes(routes, row_ids, range(1, 3), num_experts=8)
aligned = layout.align(torch.arange(10.0).view(2, 5), 0)
layout.restore(aligned)
"""
SCORE = """
tokens = PackedTensor.from_lengths(torch.arange(8), layout.lengths)
support = PackedTensor.from_lengths(torch.tensor([[3, 1], [4, 2], [7, 6]]).int(), [2, 1])
logits = torch.zeros(1, layout.num_tokens, 9, requires_grad=True)
score_microbatch(logits, layout, tokens, support).logprobs.values.sum().backward()
"""
RAGGED = """
ragged = PackedRagged.from_padded(support)
score_microbatch(logits, layout, tokens, ragged).logprobs.values.sum().backward()
"""
REFUSED = """
for call in (
    lambda: layout.align(torch.zeros(2, 4), 0),
    lambda: gather_routes(routes, row_ids, [9], num_experts=8),
    lambda: layout.restore(aligned[1:]),
):
    try: call()
    except ValueError: pass
    else: raise AssertionError
layout.position_ids()
"""
TRACED_ROWS = """
traced = torch.compile(
    lambda x, ids: gather_rows(x, ids, fill=7) * 2, fullgraph=True, dynamic=True,
    backend="aot_eager",
)
x, ids = torch.arange(6).view(3, 2), torch.tensor([2, -1])
assert traced(x, ids).tolist() == [[8, 10], [14, 14]]
gather_rows(x, ids)
"""


@pytest.fixture(scope="module")
def run(record) -> dict[str, list[Tree]]:
    """The ranges of each program above, on the thread that runs them."""
    programs = {
        "microbatch": MICROBATCH, "score": SCORE, "ragged": RAGGED, "refused": REFUSED,
        "traced rows": TRACED_ROWS,
    }  # fmt: skip
    main, *_ = record(MARK + "mark()".join(programs.values()))  # autograd may have its own thread
    return dict(zip(programs, split_at_marks(main), strict=True))


def test_the_ranges_of_a_microbatch_are_its_calls(run):
    assert run["microbatch"] == [
        tree("TokenLayout.build", tree("sequence_alignment")),
        tree("TokenLayout.route_row_ids"),
        tree("gather_routes"),
        tree("TokenLayout.align", tree("align_tokens")),
        tree("TokenLayout.restore", tree("restore_tokens")),
    ]


def test_scoring_shows_its_parts(run):
    *before, (name, inside) = run["score"]
    assert before == [tree("PackedTensor.from_lengths")] * 2
    assert name == "score_microbatch"
    assert tree("TokenLayout.support_row_ids") in inside
    assert tree("support_logprobs") in inside
    assert tree("TokenLayout.restore", tree("restore_tokens")) in inside


def test_scoring_ragged_rows_shows_its_parts(run):
    name, inside = run["ragged"][-1]
    assert name == "score_microbatch"
    (ragged,) = (part for part in inside if part[0] == "ragged_support_logprobs")
    assert ragged == tree(
        "ragged_support_logprobs",
        *[tree("scatter_rows")] * 2,  # of the check of host row ids, and of the plan
        *[tree("gather_rows")] * 2,
    )


def test_a_refused_call_ends_its_ranges(run):
    assert run["refused"] == [
        tree("TokenLayout.align"),
        tree("gather_routes"),
        tree("TokenLayout.restore"),
        tree("TokenLayout.position_ids"),
    ]


def test_gather_rows_traces_whole_under_a_profiler(run):
    assert run["traced rows"] == [tree("gather_rows")]
