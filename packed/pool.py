"""Several tasks at once on the CPUs that this process may use.

    run_tasks(fill_block, num_blocks, num_threads)

The threads live for one call: none is left behind, a forked child inherits none, and a call while
the interpreter shuts down runs its tasks in the calling thread. They help where the tasks release
the GIL, as NumPy does while it copies or computes numbers.

How many CPUs: those of the process's affinity, and no more than the quotas of its control groups
(``cpu.max`` of version 2, ``cpu.cfs_quota_us`` of version 1) of every level that is visible. A
container that is given 2 CPUs of 64 so gets 2 threads.
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from packhorse.packed.host import host_count

#: Most threads where the caller names no number; more than 2 were not measured.
MOST_THREADS: Final = 16


def run_tasks(task: Callable[[int], None], num_tasks: int, num_threads: int) -> None:
    """``task(0)``, ``task(1)``, … ``task(num_tasks - 1)`` on at most ``num_threads`` threads.

    The calling thread is one of them. Tasks begin in order. Where some fail, the error of the first
    of them is raised, whatever the threads did in the meantime: the tasks before it have all run,
    those after it need not have. No thread is left when it returns or raises.
    """
    queue = iter(range(num_tasks))
    lock = threading.Lock()
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(queue, None)
            if number is None:
                return
            try:
                task(number)
            except BaseException as error:  # also an interrupt: no other task begins
                with lock:
                    errors[number] = error
                return

    helpers: list[threading.Thread] = []
    num_helpers = min(num_threads, num_tasks) - 1
    if sys.is_finalizing():  # a thread would never get the GIL
        num_helpers = 0
    try:
        for _ in range(num_helpers):
            helper = threading.Thread(target=work, name="packhorse-pool", daemon=True)
            helpers.append(helper)
            try:
                helper.start()
            except RuntimeError:  # the system or, in its shutdown, the interpreter gives no more
                helpers.pop()
                break
        work()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # an interrupt, before, between or after tasks
        with lock:
            errors.setdefault(num_tasks, error)
        for helper in helpers:
            if helper.ident is not None:  # one that has not begun will find the error first
                helper.join()
        raise
    if errors:
        first = errors[min(errors)]
        errors.clear()  # whose tracebacks hold what the tasks did, and this frame
        try:
            raise first
        finally:
            del first


def count_threads(num_threads: int | None, where: str) -> int:
    """``num_threads`` of a caller, at least 1; None: one for each usable CPU, 16 at most."""
    if num_threads is None:
        return min(usable_cpus(), MOST_THREADS)
    num_threads = host_count(num_threads, f"{where}: num_threads")
    if num_threads == 0:
        raise ValueError(f"{where}: num_threads must be positive, got 0")
    return num_threads


def usable_cpus(proc: str | Path = "/proc/self") -> int:
    """CPUs that this process may keep busy, at least 1; part of a CPU counts as a whole one.

    A quota of 1.5 CPUs so gives 2: two threads use all of it, one would leave a third. ``proc`` as
    in ``cgroup_quota``.
    """
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    quota = cgroup_quota(proc)
    return max(1, cpus if quota is None else min(cpus, math.ceil(quota)))


def cgroup_quota(proc: str | Path = "/proc/self") -> float | None:
    """CPUs that the control groups of a process allow, the least of all levels; None: no limit.

    Args:
        proc: folder with the process's ``cgroup`` and ``mountinfo``. What cannot be read is no
            limit.
    """
    limits: list[float] = []
    try:
        groups = Path(proc, "cgroup").read_text().splitlines()
        mounts = Path(proc, "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    for is_v2, folders in _group_folders(groups, mounts):
        for folder in folders:
            limit = _v2_limit(folder) if is_v2 else _v1_limit(folder)
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def _group_folders(groups: list[str], mounts: list[str]) -> Iterator[tuple[bool, list[Path]]]:
    """(whether version 2, the process's group and all above it) of each hierarchy with CPU limits.

    A line of ``mounts``: id, parent, device, root, mount point, options, ..., "-", type, source,
    super options. The group "/a/b" of a hierarchy whose root "/a" is mounted at M is M/b.
    """
    paths = {}
    for line in groups:  # number:controllers:path
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or len(kind) < 3 or kind[0] not in paths:
            continue
        if kind[0] == "cgroup" and "cpu" not in kind[2].split(","):
            continue
        root, mount_point = (_unescaped(field) for field in fields[3:5])
        group = PurePosixPath(paths[kind[0]])
        if group.is_relative_to(root):
            parts = group.relative_to(root).parts
        else:  # the path of another namespace: what is mounted is this process's own group
            parts = ()
        folders = [Path(mount_point, *parts[:depth]) for depth in range(len(parts) + 1)]
        yield kind[0] == "cgroup2", folders


def _v2_limit(folder: Path) -> float | None:
    """``cpu.max``: "max 100000", or quota and period in microseconds."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no integer
        return None


def _v1_limit(folder: Path) -> float | None:
    """``cpu.cfs_quota_us`` (-1: none) over ``cpu.cfs_period_us``."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _unescaped(field: str) -> str:
    """A path of ``mountinfo``, which writes space, tab, newline and backslash in octal."""
    for code in ("040", "011", "012", "134"):
        field = field.replace(f"\\{code}", chr(int(code, 8)))
    return field
