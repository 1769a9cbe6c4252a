"""The launch table: a compiled step as one array of native memory that `walk.py`'s loop reads.

An entry is a kernel's phase with its arguments, or a host call-back. All threads walk the table
together: each takes tiles of an entry until there are none left and goes on to the next entry,
waiting for the others only where the entry asks for a barrier. An entry without one may overlap
the next, which therefore must not depend on it.

Every entry fills one 64-byte cache line, its tile counter included, so that starting on an entry
moves a single line between cores. The line before the first entry is the program's header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

WORDS = 8  # 64-bit words in a line


class Header(IntEnum):
    """Words of the header line."""

    COUNT = 0  # entries
    TIMED = 1  # whether thread 0 records times
    STOPPED = 2  # set by a host call-back that raised: the walk ends after it


class Entry(IntEnum):
    """Words of an entry's line."""

    ADDRESS = 0  # of the function
    ARGS = 1  # address of its array of pointers
    TILES = 2
    BARRIER = 3  # whether all threads meet after this entry
    COUNTER = 4  # next tile to hand out; zeroed at the start of every run
    HOST = 5  # whether ADDRESS is a call-back `int64_t (*)(void)` for thread 0 alone
    NANOSECONDS = 6  # of the last timed run


@dataclass(frozen=True)
class Launch:
    """One phase of one kernel: `tiles` calls of the function at `address` with pointers `args`."""

    address: int
    args: Sequence[int]
    tiles: int
    barrier_after: bool = True


@dataclass(frozen=True)
class HostCall:
    """A Python function that the calling thread runs while every other one waits."""

    function: Callable[[], None]


class Program:
    """Launches laid out for the walk. Owns the table and the argument arrays, not the buffers that
    the arguments point to. The table holds the state of the run: not for two teams at once.

    `scratch_bytes` is the most that any of the kernels needs. `keep` is held as long as the
    program lives: the compiler that owns the code, and the buffers. With `timed` set, a run
    records `nanoseconds` at the cost of a clock reading an entry.
    """

    def __init__(
        self,
        launches: Sequence[Launch | HostCall],
        scratch_bytes: int = 0,
        timed: bool = False,
        keep: object = None,
    ):
        self.scratch_bytes = scratch_bytes
        self._keep = keep
        self._error: BaseException | None = None
        self._lines = aligned_array((len(launches) + 1) * WORDS).reshape(-1, WORDS)
        self._lines[0, Header.COUNT] = len(launches)
        self._lines[0, Header.TIMED] = timed
        self._args = [_arguments(launch) for launch in launches]
        self._callbacks = []
        for index, launch in enumerate(launches):
            line = self._lines[index + 1]
            if isinstance(launch, HostCall):
                callback = _HOST_CALL(self._guarded(launch.function))
                self._callbacks.append(callback)
                line[Entry.ADDRESS] = ctypes.cast(callback, ctypes.c_void_p).value
                line[Entry.HOST] = line[Entry.BARRIER] = 1
                self._lines[index, Entry.BARRIER] = 1 if index else 0
            else:
                line[Entry.ADDRESS] = launch.address
                line[Entry.ARGS] = self._args[index].ctypes.data
                line[Entry.TILES] = launch.tiles
                line[Entry.BARRIER] = launch.barrier_after
        if launches:
            self._lines[-1, Entry.BARRIER] = 1  # a run ends when every thread is done
        self.address = self._lines.ctypes.data  # of the table

    def __len__(self) -> int:
        return len(self._lines) - 1

    @property
    def nanoseconds(self) -> np.ndarray:
        """Time of each entry in the last timed run, as thread 0 saw it (its barrier included)."""
        return self._lines[1:, Entry.NANOSECONDS].copy()

    def arguments(self, index: int) -> np.ndarray:
        """Entry `index`'s pointers (uint64), to read or to change between runs."""
        return self._args[index]

    def raise_pending(self) -> None:
        """Raise what a host call-back raised during the last run, if one did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, function: Callable[[], None]) -> Callable[[], int]:
        """`function` as the walk wants it: 0 to go on, 1 to stop, and no exception across C."""

        def call() -> int:
            try:
                function()
            except BaseException as error:
                self._error = error
                return 1
            return 0

        return call


_HOST_CALL = ctypes.CFUNCTYPE(ctypes.c_int64)


def aligned_array(words: int) -> np.ndarray:
    """Zeroed uint64 words that start on a cache line."""
    spare = np.zeros(words + WORDS, dtype=np.uint64)
    start = -spare.ctypes.data % 64 // 8
    return spare[start : start + words]


def _arguments(launch: Launch | HostCall) -> np.ndarray:
    return np.array(getattr(launch, "args", ()), dtype=np.uint64)
