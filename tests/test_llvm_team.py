"""The thread team: every tile once, barriers that hold, and life with forks, signals and exits."""

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

from backends.llvm.cache import ObjectCache
from backends.llvm.compiler import Compiler
from backends.llvm.cpus import available_cpus, cgroup_quota, default_threads
from backends.llvm.launch import HostCall, Launch, Program
from backends.llvm.target import Target
from backends.llvm.team import Team
from euler_ir.errors import EulerError
from tests.llvm_kernels import increment_kernel, neighbour_kernel, where_kernel

ROOT = Path(__file__).resolve().parents[1]
CELLS = 13


@pytest.fixture(scope="module")
def compiler():
    return Compiler(Target.host(), ObjectCache(None), servers=0)


@pytest.fixture(params=[1, 2, 4, 8])
def team(compiler, request):
    before = threading.active_count()
    team = Team(compiler, request.param)
    yield team
    team.close()
    assert threading.active_count() == before, "a thread of the team did not find its way out"


def address_of(compiler, source):
    return compiler.load([source])[source.key][0]


def increments(compiler, cells, launches, barrier_after=True):
    """A program that adds 1 to each of `cells` in every one of its launches."""
    address = address_of(compiler, increment_kernel())
    launch = Launch(address, [cells.ctypes.data], len(cells), barrier_after)
    return Program([launch] * launches, keep=cells)


def neighbours(compiler, first, second, launches):
    """A program that goes back and forth between two arrays, each cell made of two of the other
    array: one tile run early or late changes the result."""
    address = address_of(compiler, neighbour_kernel(len(first)))
    pointers = [first.ctypes.data, second.ctypes.data]
    there = Launch(address, pointers, len(first))
    back = Launch(address, pointers[::-1], len(first))
    return Program([back if step % 2 else there for step in range(launches)], keep=(first, second))


def neighbours_expected(start, launches):
    for _ in range(launches):
        start = start + np.roll(start, -1)
    return start


@pytest.mark.parametrize("tiles", [1, 2, 3, 1000])
@pytest.mark.parametrize("barrier_after", [True, False])
def test_every_tile_runs_once(compiler, team, tiles, barrier_after):
    cells = np.zeros(tiles, np.uint64)
    program = increments(compiler, cells, 5, barrier_after=True)
    for _ in range(10):
        team.run(program)
    np.testing.assert_array_equal(cells, 50)


def test_launches_without_barrier_are_done_when_the_run_is(compiler, team):
    address = address_of(compiler, increment_kernel())
    rows = np.zeros((300, CELLS), np.uint64)
    program = Program([Launch(address, [row.ctypes.data], CELLS, False) for row in rows])
    for _ in range(10):
        team.run(program)
    np.testing.assert_array_equal(rows, 10)


def test_barriers_order_what_depends(compiler, team):
    launches = 2000
    start = np.random.default_rng(0).integers(0, 2**60, CELLS, dtype=np.uint64)
    first, second = start.copy(), np.zeros_like(start)
    team.run(neighbours(compiler, first, second, launches))
    np.testing.assert_array_equal(first, neighbours_expected(start, launches))


def test_ten_thousand_barriers(compiler):
    start = np.arange(3, dtype=np.uint64)
    for threads in (2, 3):
        team = Team(compiler, threads)
        first, second = start.copy(), np.zeros_like(start)
        team.run(neighbours(compiler, first, second, 10_000))
        np.testing.assert_array_equal(first, neighbours_expected(start, 10_000))
        team.close()


def test_many_short_runs(compiler, team):
    cells = np.zeros(2, np.uint64)
    program = increments(compiler, cells, 1)
    for _ in range(1000):
        team.run(program)
    np.testing.assert_array_equal(cells, 1000)


def test_empty_program_and_launch_of_no_tiles(compiler, team):
    team.run(Program([]))
    cells = np.zeros(0, np.uint64)
    team.run(increments(compiler, cells, 3))


def test_arguments_can_be_changed_between_runs(compiler, team):
    first, second = np.zeros(CELLS, np.uint64), np.zeros(CELLS, np.uint64)
    program = increments(compiler, first, 1)
    team.run(program)
    program.arguments(0)[0] = second.ctypes.data
    team.run(program)
    team.run(program)
    np.testing.assert_array_equal(first, 1)
    np.testing.assert_array_equal(second, 2)


def test_scratch_is_aligned_private_and_grows(compiler, team):
    tiles = 4000
    seen = np.zeros(tiles, np.uint64)
    launch = Launch(address_of(compiler, where_kernel()), [seen.ctypes.data], tiles)
    for scratch_bytes in (8, 5000, 100, 40_000):
        team.run(Program([launch], scratch_bytes=scratch_bytes))
        addresses = np.unique(seen)
        assert 1 <= len(addresses) <= team.threads
        assert not np.any(addresses % np.uint64(64))
        assert np.all(np.diff(addresses) >= scratch_bytes)


def test_times_are_recorded_only_when_asked(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    launch = Launch(address_of(compiler, increment_kernel()), [cells.ctypes.data], CELLS)
    pause = HostCall(lambda: time.sleep(0.01))
    timed = Program([launch, pause, launch], timed=True)
    team.run(timed)
    assert timed.nanoseconds[1] >= 10_000_000
    assert np.all(timed.nanoseconds > 0)
    untimed = Program([launch, pause, launch])
    team.run(untimed)
    assert not untimed.nanoseconds.any()


def test_host_call_runs_once_between_its_neighbours(compiler, team):
    cells = np.zeros(1000, np.uint64)
    launch = Launch(
        address_of(compiler, increment_kernel()), [cells.ctypes.data], len(cells), False
    )
    seen = []

    def call():
        seen.append((cells.min(), cells.max(), threading.get_ident()))
        cells[:] *= 10

    program = Program([launch, HostCall(call), launch, launch, HostCall(call)])
    # Neither launch of the middle pair waits for the other, and they touch the same cells: give
    # the second one cells of its own.
    other = np.zeros_like(cells)
    program.arguments(3)[0] = other.ctypes.data
    team.run(program)
    me = threading.get_ident()
    assert seen == [(1, 1, me), (11, 11, me)]
    np.testing.assert_array_equal(cells, 110)
    np.testing.assert_array_equal(other, 1)


def test_host_call_that_raises_ends_the_run(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    launch = Launch(address_of(compiler, increment_kernel()), [cells.ctypes.data], CELLS)
    fail = [True]

    def call():
        if fail[0]:
            raise ValueError("from the call-back")

    program = Program([launch, HostCall(call), launch])
    for _ in range(100):  # a thread late out of the stopped run must not stray into the next
        fail[0], cells[:] = True, 0
        with pytest.raises(ValueError, match="from the call-back"):
            team.run(program)
        np.testing.assert_array_equal(cells, 1)
        fail[0] = False
        team.run(program)
        np.testing.assert_array_equal(cells, 3)


def test_host_call_must_not_run_its_own_team(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    inner = increments(compiler, cells, 1)
    with pytest.raises(RuntimeError, match="call-back started a run"):
        team.run(Program([HostCall(lambda: team.run(inner))]))
    team.run(inner)
    np.testing.assert_array_equal(cells, 1)


def test_two_python_threads_take_turns(compiler, team):
    arrays = [np.zeros(CELLS, np.uint64) for _ in range(3)]
    programs = [increments(compiler, cells, 50) for cells in arrays]

    def repeat(program):
        for _ in range(20):
            team.run(program)

    runners = [threading.Thread(target=repeat, args=(program,)) for program in programs]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    for cells in arrays:
        np.testing.assert_array_equal(cells, 1000)


def test_two_teams_at_once(compiler):
    arrays = [np.zeros(CELLS, np.uint64) for _ in range(2)]

    def repeat(cells):
        team, program = Team(compiler, 2), increments(compiler, cells, 50)
        for _ in range(20):
            team.run(program)
        team.close()

    runners = [threading.Thread(target=repeat, args=(cells,)) for cells in arrays]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    for cells in arrays:
        np.testing.assert_array_equal(cells, 1000)


def test_closed_team_starts_again_and_leaves_no_threads(compiler, team):
    cells = np.zeros(CELLS, np.uint64)
    program = increments(compiler, cells, 2)
    before = threading.active_count()
    team.run(program)
    assert threading.active_count() == before + team.threads - 1
    team.close()
    assert threading.active_count() == before
    team.run(program)
    np.testing.assert_array_equal(cells, 4)


def test_dropped_team_ends_its_threads(compiler):
    before = threading.active_count()
    team = Team(compiler, 3)
    team.run(increments(compiler, np.zeros(CELLS, np.uint64), 1))
    del team
    assert threading.active_count() == before


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
        for _ in range(10):
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


def test_default_team_is_shared_between_ranks(compiler):
    assert default_threads(1) == available_cpus()
    assert default_threads(2) == max(1, available_cpus() // 2)
    assert default_threads(1000) == 1
    assert Team(compiler, ranks_on_host=1000).threads == 1


@pytest.mark.parametrize("threads", [0, -1])
def test_team_without_threads_is_refused(compiler, threads):
    with pytest.raises(EulerError, match=f"threads: {threads} "):
        Team(compiler, threads)


def quota(tmp_path, membership, limits):
    """cgroup_quota() on a made-up system: the process's groups and the files of limits."""
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cgroup_quota(tmp_path / "cgroup", tmp_path / "membership")


@pytest.mark.parametrize(
    "membership, limits, expected",
    [
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "800000 100000\n"}, 0.5),
        ("0::/not/visible/here\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "4:memory:/m\n3:cpu,cpuacct:/c\n",
            {
                "cpu,cpuacct/c/cpu.cfs_quota_us": "200000\n",
                "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            "1:cpu:/c\n0::/\n",
            {"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"},
            None,
        ),
    ],
)
def test_cgroup_quota(tmp_path, membership, limits, expected):
    assert quota(tmp_path, membership, limits) == expected


@pytest.mark.parametrize("limit, expected", [(None, 8), (2.0, 2), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_quota_limits_the_cpus(monkeypatch, limit, expected):
    monkeypatch.setattr("backends.llvm.cpus.cgroup_quota", lambda: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert available_cpus() == expected
