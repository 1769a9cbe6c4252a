"""The thread team: every tile once, barriers that hold, host calls, turns."""

import threading
import time

import numpy as np
import pytest

from backends.llvm.launch import HostCall, Launch, Program
from backends.llvm.team import Team
from euler_ir.errors import EulerError
from tests.llvm_kernels import (
    CELLS,
    address_of,
    increment_kernel,
    increments,
    neighbours,
    neighbours_expected,
    where_kernel,
)


@pytest.mark.parametrize("tiles", [1, 2, 3, 1000])
def test_every_tile_runs_once(compiler, team, tiles):
    cells = np.zeros(tiles, np.uint64)
    program = increments(compiler, cells, 5)
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


@pytest.mark.parametrize("threads", [0, -1])
def test_team_without_threads_is_refused(compiler, threads):
    with pytest.raises(EulerError, match=f"threads: {threads} "):
        Team(compiler, threads)
