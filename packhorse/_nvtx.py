"""An NVTX range around each public call: domain ``packhorse``, named as the function or method.

    @ranged
    def gather_rows(...): ...

    @ranged_methods("segment")  # all public methods but these, which only wrap a view
    class PackedTensor: ...

Free without a profiler: the decorator then returns the function itself. A profiler injects its
library when the process starts, so that is decided once, at decoration; the optional package
``nvtx`` is imported only where one did. A traced call is not ranged: ``torch.compile`` sees the
function alone.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from packhorse._env import PROFILED

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

DOMAIN: Final = "packhorse"
#: attribute of a ranged function: the name of its range
RANGE_NAME: Final = "__packhorse_range__"


def ranged(function: F) -> F:
    """Put a range around each call of ``function``; an exception ends it too.

    The range of a method is named ``TokenLayout.align``, that of ``__init__`` as its class. Around
    a generator it lasts until the generator ends: under ``contextmanager`` it spans the block.
    """
    name = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
    setattr(function, RANGE_NAME, name)
    domain = _watched_domain()
    if domain is None:
        return function
    import torch

    attributes = domain.get_event_attributes(message=name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        domain.push_range(attributes)
        try:
            return function(*args, **kwargs)
        finally:
            domain.pop_range()

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Any:
        domain.push_range(attributes)
        try:
            return (yield from function(*args, **kwargs))
        finally:
            domain.pop_range()

    return cast(F, generate if inspect.isgeneratorfunction(function) else call)


def ranged_methods(*unranged: str) -> Callable[[C], C]:
    """Range each public method that a class writes, its ``__init__`` and ``__getitem__`` too.

    Properties are not; neither is what ``dataclass`` adds, which therefore stands above this. A
    method under ``contextmanager`` is given its own ``ranged``, below it.
    """

    def decorate(cls: C) -> C:
        for name, member in list(vars(cls).items()):
            public = not name.startswith("_") or name in ("__init__", "__getitem__")
            if not public or name in unranged:
                continue
            if isinstance(member, classmethod | staticmethod):
                setattr(cls, name, type(member)(ranged(member.__func__)))
            elif inspect.isfunction(member) and not hasattr(member, RANGE_NAME):
                setattr(cls, name, ranged(member))
        return cls

    return decorate


@functools.cache
def _watched_domain() -> Any:
    """The NVTX domain, or None where nobody listens or ``nvtx`` is not installed."""
    if not PROFILED:
        return None
    try:
        import nvtx
    except ImportError:
        return None

    def probe() -> None: ...

    if nvtx.annotate("probe", domain=DOMAIN)(probe) is probe:  # its own way to say so
        return None
    return nvtx.get_domain(DOMAIN)
