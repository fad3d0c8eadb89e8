"""The pool of threads: every task once, the first error, no thread left; CPUs from real files."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from packhorse.packed.pool import MOST_THREADS, cgroup_quota, count_threads, run_tasks, usable_cpus

ROOT = Path(__file__).parents[2]


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "packhorse" in thread.name]


def run_program(program: str, timeout: int = 100) -> str:
    # Python 3.12 warns of every fork beside threads
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 8, 100])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 37])
def test_each_task_runs_once(num_tasks, num_threads):
    runs = np.zeros(num_tasks, dtype=int)

    def task(number):
        runs[number] += 1

    run_tasks(task, num_tasks, num_threads)
    assert runs.tolist() == [1] * num_tasks
    assert pool_threads() == []


def test_tasks_run_at_once_on_as_many_threads_as_asked_the_caller_s_among_them():
    barrier, threads = threading.Barrier(3, timeout=60), set()

    def task(number):
        barrier.wait()  # passes only if three tasks are in it together
        threads.add(threading.get_ident())

    run_tasks(task, 9, 3)
    assert len(threads) == 3
    assert threading.get_ident() in threads


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_the_first_error_is_raised_whatever_the_threads_do(num_threads):
    rng = np.random.default_rng(num_threads)
    for _ in range(20):
        wrong = sorted(rng.choice(40, 5, replace=False).tolist())
        delays = rng.random(40) * 1e-3
        delays[wrong[0]] = 3e-3  # the first to fail is the last to say so
        done = []

        def task(number, wrong=wrong, delays=delays, done=done):
            time.sleep(delays[number])
            if number in wrong:
                raise ValueError(f"task {number}")
            done.append(number)

        with pytest.raises(ValueError, match=f"^task {wrong[0]}$"):
            run_tasks(task, 40, num_threads)
        assert set(range(wrong[0])) <= set(done)
        assert pool_threads() == []


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_interrupt_ends_the_call(num_threads):
    ran = []

    def task(number):
        ran.append(number)
        if number == 3:
            raise KeyboardInterrupt
        time.sleep(1e-3)

    with pytest.raises(KeyboardInterrupt):
        run_tasks(task, 1000, num_threads)
    assert len(ran) < 20
    assert pool_threads() == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_error_keeps_nothing_alive_once_it_is_handled(num_threads):
    def fail():
        data = np.zeros(3)

        def task(number):
            if number == 1:
                raise ValueError(f"of {data.size}")

        with contextlib.suppress(ValueError):
            run_tasks(task, 4, num_threads)
        return weakref.ref(data)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_an_interrupt_while_threads_start_leaves_none(monkeypatch):
    start, release, started, ended = threading.Thread.start, threading.Event(), [], []

    def interrupted(thread):
        if started:
            release.set()
            raise KeyboardInterrupt
        start(thread)
        started.append(thread)

    def task(number):
        assert release.wait(60)
        time.sleep(0.05)
        ended.append(number)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(task, 1000, 3)
    assert pool_threads() == []
    assert ended == [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_in_the_middle_has_a_pool_of_its_own():
    program = """
import os, signal, threading
from packhorse.packed.pool import run_tasks

entered, go = threading.Barrier(3, timeout=60), threading.Event()
def task(number):
    entered.wait()
    assert go.wait(60)
running = threading.Thread(target=run_tasks, args=(task, 2, 2))
running.start()
entered.wait()  # both threads of the pool are inside a task
child = os.fork()
if child == 0:
    signal.alarm(60)
    done = []
    run_tasks(done.append, 50, 4)
    os._exit(0 if sorted(done) == list(range(50)) and threading.active_count() == 1 else 1)
go.set()
running.join()
assert os.waitpid(child, 0)[1] == 0
assert threading.active_count() == 1
print("done")
"""
    assert run_program(program) == "done\n"


def test_tasks_run_while_the_interpreter_shuts_down():
    program = """
import atexit, threading
from packhorse.packed.pool import run_tasks

def last():
    done = []
    run_tasks(done.append, 20, 4)
    print(sorted(done) == list(range(20)))

class Late:
    def __del__(self):
        last()

atexit.register(last)
keep = Late()  # dropped with the module, after threads can be started no more
"""
    assert run_program(program) == "True\nTrue\n"


# --- CPUs -----------------------------------------------------------------------------------------


def write_process(folder: Path, groups: str, mounts: list[tuple[str, str, str, str]]) -> Path:
    """``/proc/self`` of a process; ``mounts`` are (root, mount point, type, super options)."""
    proc = folder / "self"
    proc.mkdir(exist_ok=True)
    (proc / "cgroup").write_text(groups)
    lines = [
        f"{30 + i} 23 0:{28 + i} {root} {str(point).replace(' ', chr(92) + '040')} rw,nosuid"
        f" shared:9 - {kind} {kind} {options}\n"
        for i, (root, point, kind, options) in enumerate(mounts)
    ]
    (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/root rw\n" + "".join(lines))
    return proc


def write_files(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("cpu_max", "quota"),
    [
        ("200000 100000\n", 2.0), ("150000 100000\n", 1.5), ("25000 50000\n", 0.5),
        ("max 100000\n", None), ("", None), ("nonsense 1 2\n", None), ("5 0\n", None),
    ],
)  # fmt: skip
def test_a_quota_of_version_2_is_read(tmp_path, cpu_max, quota):
    mount = tmp_path / "sys fs"
    write_files(mount / "pod" / "container", cpu__max=cpu_max)
    proc = write_process(tmp_path, "0::/pod/container\n", [("/", mount, "cgroup2", "rw")])
    assert cgroup_quota(proc) == quota


@pytest.mark.parametrize(
    ("quota_us", "period_us", "quota"),
    [("400000", "100000", 4.0), ("-1", "100000", None), ("50000", "100000", 0.5), ("1", "0", None)],
)
def test_a_quota_of_version_1_is_read(tmp_path, quota_us, period_us, quota):
    mount = tmp_path / "cpu"
    write_files(mount / "job", cpu__cfs_quota_us=quota_us, cpu__cfs_period_us=period_us)
    groups = "5:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/\n"
    mounts = [("/", tmp_path / "memory", "cgroup", "rw,memory"),
              ("/", mount, "cgroup", "rw,cpu,cpuacct")]  # fmt: skip
    assert cgroup_quota(write_process(tmp_path, groups, mounts)) == quota


def test_the_least_quota_of_all_levels_and_hierarchies_counts(tmp_path):
    two, one = tmp_path / "unified", tmp_path / "cpu"
    write_files(two, cpu__max="max 100000")
    write_files(two / "a", cpu__max="300000 100000")
    write_files(two / "a" / "b", cpu__max="800000 100000")
    write_files(one / "x", cpu__cfs_quota_us="700000", cpu__cfs_period_us="100000")
    mounts = [("/", two, "cgroup2", "rw"), ("/", one, "cgroup", "rw,cpu")]
    assert cgroup_quota(write_process(tmp_path, "0::/a/b\n4:cpu:/x\n", mounts)) == 3.0
    write_files(one / "x", cpu__cfs_quota_us="100000")
    assert cgroup_quota(write_process(tmp_path, "0::/a/b\n4:cpu:/x\n", mounts)) == 1.0


@pytest.mark.parametrize(
    ("root", "path"), [("/docker/12ab", "/docker/12ab"), ("/", "/../elsewhere"), ("/k8s/pod", "/")]
)
def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path, root, path):
    mount = write_files(tmp_path / "cgroup", cpu__max="150000 100000")
    proc = write_process(tmp_path, f"0::{path}\n", [(root, mount, "cgroup2", "rw")])
    assert cgroup_quota(proc) == 1.5


def test_a_group_below_the_mounted_root_is_found(tmp_path):
    mount = tmp_path / "cgroup"
    write_files(mount / "inner", cpu__max="100000 100000")
    proc = write_process(tmp_path, "0::/docker/1/inner\n", [("/docker/1", mount, "cgroup2", "rw")])
    assert cgroup_quota(proc) == 1.0


def test_what_cannot_be_read_is_no_limit(tmp_path):
    assert cgroup_quota(tmp_path / "absent") is None
    proc = write_process(tmp_path, "0::/a\nrubbish\n\n", [("/", tmp_path / "b", "cgroup2", "rw")])
    (proc / "mountinfo").write_text("rubbish\n1 2 - cgroup2\n - \n\n")
    assert cgroup_quota(proc) is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs the affinity of Linux")
def test_cpus_are_the_affinity_s_and_no_more_than_the_quota(tmp_path):
    mine = len(os.sched_getaffinity(0))
    for cpu_max, expected in (
        ("max 100000", mine), (f"{mine * 200000} 100000", mine), ("10000 100000", 1),
        ("100000 100000", 1), ("110000 100000", min(2, mine)),
    ):  # fmt: skip
        mount = write_files(tmp_path / "cgroup", cpu__max=cpu_max)
        proc = write_process(tmp_path, "0::/\n", [("/", mount, "cgroup2", "rw")])
        assert usable_cpus(proc) == expected
    program = """
import os
from packhorse.packed.pool import usable_cpus
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(usable_cpus())
"""
    assert run_program(program) == "1\n"


def test_the_number_of_threads_is_the_caller_s_or_the_cpus():
    assert count_threads(3, "f") == 3
    assert count_threads(None, "f") == min(usable_cpus(), MOST_THREADS)
    for wrong, error, message in (
        (0, ValueError, "f: num_threads must be positive, got 0"),
        (-2, ValueError, "f: num_threads must not be negative, got -2"),
        (1.5, TypeError, "f: num_threads must be an integer, got float"),
        (True, TypeError, "f: num_threads must be an integer, got True"),
    ):
        with pytest.raises(error, match=f"^{message}$"):
            count_threads(wrong, "f")
