"""The thread team and its process: idleness, forks, signals, CPU masks and exits."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from backends.llvm.launch import HostCall, Launch, Program
from backends.llvm.team import Team
from tests.llvm_kernels import (
    CELLS,
    address_of,
    increment_kernel,
    increments,
    neighbours,
    neighbours_expected,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_idle_team_sleeps(compiler):
    def states():
        workers = set(threading.enumerate()) - {threading.current_thread()}
        stats = [Path(f"/proc/self/task/{worker.native_id}/stat") for worker in workers]
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}

    team = Team(compiler, 4)
    team.run(increments(compiler, np.zeros(CELLS, np.uint64), 100))
    deadline = time.monotonic() + 20
    while states() != {"S"}:
        assert time.monotonic() < deadline, f"workers still {states()}"
        time.sleep(0.001)
    team.close()


def in_child(function) -> int:
    """Run `function` in a forked child; its exit code, or -SIGALRM if it hung."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_has_a_team_of_its_own(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    program = increments(compiler, cells, 3)
    team.run(program)

    def child():
        for _ in range(5):
            team.run(program)
        np.testing.assert_array_equal(cells, 18)
        assert in_child(lambda: team.run(program)) == 0  # a grandchild

    assert in_child(child) == 0
    team.run(program)
    np.testing.assert_array_equal(cells, 6)


def test_fork_before_the_first_run(compiler, team):
    program = increments(compiler, np.zeros(CELLS, np.uint64), 3)
    assert in_child(lambda: team.run(program)) == 0
    team.run(program)


def test_fork_while_another_thread_runs(compiler, team):
    stop = threading.Event()
    busy = increments(compiler, np.zeros(CELLS, np.uint64), 200)
    cells = np.zeros(CELLS, np.uint64)
    own = increments(compiler, cells, 3)

    def keep_running():
        while not stop.is_set():
            team.run(busy)

    runner = threading.Thread(target=keep_running)
    runner.start()
    try:
        for _ in range(5):
            assert in_child(lambda: team.run(own)) == 0
            assert in_child(lambda: team.run(busy)) == 0
    finally:
        stop.set()
        runner.join()
    team.run(own)
    np.testing.assert_array_equal(cells, 3)


def test_fork_in_a_host_call(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    launch = Launch(address_of(compiler, increment_kernel()), [cells.ctypes.data], CELLS)
    forked = []
    program = Program([launch, HostCall(lambda: forked.append(os.fork())), launch, launch])
    parent = os.getpid()
    signal.alarm(0)
    try:
        team.run(program)
        if os.getpid() != parent:
            team.run(Program([launch]))
        expected = 3 if os.getpid() == parent else 4
        np.testing.assert_array_equal(cells, expected)
    finally:
        if os.getpid() != parent:
            os._exit(0 if (cells == 4).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 0


def test_multiprocessing_fork(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    program = increments(compiler, cells, 3)
    team.run(program)
    child = multiprocessing.get_context("fork").Process(target=team.run, args=(program,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    team.run(program)
    np.testing.assert_array_equal(cells, 6)


def test_signals_do_not_break_waiting(compiler, team):
    handled = []
    previous = signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
    start = np.arange(CELLS, dtype=np.uint64)
    first, second = start.copy(), np.zeros_like(start)
    program = neighbours(compiler, first, second, 200)
    expected = neighbours_expected(start, 200)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        while len(handled) < 20:
            first[:] = start
            team.run(program)
            np.testing.assert_array_equal(first, expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_interrupt_is_raised_after_the_run(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    address = address_of(compiler, increment_kernel())
    launch = Launch(address, [cells.ctypes.data], CELLS)
    program = Program([launch, HostCall(lambda: os.kill(os.getpid(), signal.SIGINT)), launch])
    with pytest.raises(KeyboardInterrupt):
        team.run(program)
    ordinary = increments(compiler, cells, 1)
    cells[:] = 0
    team.run(ordinary)
    np.testing.assert_array_equal(cells, 1)


SCRIPT_START = """
import os, sys, threading, time
import numpy as np
from backends.llvm.cache import ObjectCache
from backends.llvm.compiler import Compiler
from backends.llvm.cpus import available_cpus, default_threads
from backends.llvm.launch import Launch, Program
from backends.llvm.target import Target
from backends.llvm.team import Team
from tests.llvm_kernels import increment_kernel
"""


def python(script, *arguments) -> str:
    """Output of a fresh interpreter that runs `script`, which must succeed."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT_START + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout


@pytest.mark.parametrize("how", ["idle", "running", "error"])
def test_interpreter_exits_cleanly(how):
    output = python(
        """
        compiler = Compiler(Target.host(), ObjectCache(None), servers=0)
        kernel = increment_kernel()
        cells = np.zeros(4, np.uint64)
        launch = Launch(compiler.load([kernel])[kernel.key][0], [cells.ctypes.data], 4)
        program = Program([launch] * 100)
        team = Team(compiler, 4)
        team.run(program)
        def forever():
            while True:
                team.run(program)
        if sys.argv[1] == "running":
            threading.Thread(target=forever, daemon=True).start()
            time.sleep(0.05)
        print("end", flush=True)
        if sys.argv[1] == "error":
            sys.exit(0)
        """,
        how,
    )
    assert output == "end\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU masks here")
def test_default_team_stays_within_the_mask():
    output = python(
        """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        compiler = Compiler(Target.host(), ObjectCache(None), servers=0)
        print(available_cpus(), Team(compiler).threads, Team(compiler, threads=3).threads)
        """
    )
    assert output == "1 1 3\n"
