"""Each public call is a range of the NVTX domain ``packhorse``; without a profiler it is nothing.

What a profiler would see is recorded by a library of our own, injected as nsys injects its own
(``tests/tools/nvtx_recorder.c``), into processes of their own: injection happens at their start.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

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


def test_a_range_is_named_as_the_method_nests_and_keeps_the_signature(record):
    (ranges,) = record(EXAMPLE)
    assert ranges == [tree("Herd"), tree("Herd.count", tree("one"))]


def test_an_exception_ends_the_range(record):
    program = """
for call in (Herd.lost, lambda: one()):
    try: call()
    except (KeyError, TypeError): pass
    else: raise AssertionError
one(2)
"""
    (ranges,) = record(EXAMPLE + program)
    assert ranges[2:] == [tree("Herd.lost"), tree("one"), tree("one")]


def test_the_range_of_a_context_manager_spans_its_block(record):
    program = """
with fence(4) as width:
    assert width == 4
    one(1)
with contextlib.suppress(ZeroDivisionError), fence(4):
    1 / 0
"""
    (ranges,) = record(EXAMPLE + program)
    assert ranges[2:] == [tree("fence", tree("one"), tree("one")), tree("fence", tree("one"))]


def test_each_thread_nests_its_own_ranges(record):
    program = """
with fence(4):
    thread = threading.Thread(target=herd.count)
    thread.start()
    thread.join()
"""
    main, other = record(EXAMPLE + program)
    assert main[2:] == [tree("fence", tree("one"))]
    assert other == [tree("Herd.count", tree("one"))]


def test_without_the_package_a_profiled_call_runs_unranged(record):
    assert record("import sys; sys.modules['nvtx'] = None\n" + EXAMPLE) == []


def test_a_traced_call_is_not_ranged(record):
    """``fullgraph=True`` raises at a graph break, which a push inside a traced call would be."""
    (ranges,) = record(
        "import torch\n" + EXAMPLE + "def twice(x): return one(x) + herd.count()\n"
        "traced = torch.compile(twice, fullgraph=True, backend='eager')\n"
        "assert torch.equal(traced(torch.ones(2)), torch.full((2,), 4.0))"
    )
    assert ranges == [tree("Herd"), tree("Herd.count", tree("one"))]
