"""A persistent team of threads that runs programs (see launch.py), one native call a run.

The caller is thread 0; the others are daemon threads that stay inside one native call (walk.py),
where they hold no GIL and, between runs, sleep in the kernel.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

from backends.llvm.compiler import Compiler
from backends.llvm.cpus import available_cpus, default_threads
from backends.llvm.launch import Program, aligned_array
from backends.llvm.walk import State, team_source
from euler_ir.errors import EulerError

# 4000 looks take about 100 us. Threads of one kernel rarely differ by more, and one that sleeps is
# late for its next kernel: a system call, a core to wake, perhaps a core to share at first. With
# more threads than cores spinning only keeps a core from the thread that everybody waits for.
_SPINS = 4000

_SCRATCH_ALIGNMENT = 128  # two cache lines: adjacent ones are fetched in pairs

_teams: weakref.WeakSet[Team] = weakref.WeakSet()


class Team:
    """`threads` threads that share the work of each run.

    Starts them at the first run. `threads` None takes what the CPU mask and the container's quota
    allow, divided among `ranks_on_host` processes. One run at a time: a second Python thread waits
    for the first one's run to end. After `os.fork` the child starts threads of its own.

    Raises EulerError for a thread count below 1.
    """

    def __init__(self, compiler: Compiler, threads: int | None = None, ranks_on_host: int = 1):
        if threads is not None and threads < 1:
            raise EulerError(f"threads: {threads} is not a team; give 1 or more")
        self.threads = default_threads(ranks_on_host) if threads is None else threads
        self._compiler = compiler
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        self._runner: int | None = None  # the Python thread inside `run`
        _teams.add(self)

    def run(self, program: Program) -> None:
        """Run a program to its end. Raises what a host call-back of it raised.

        A call-back must not run a program on the team that is running it.
        """
        if len(program) == 0:
            return
        if self._runner == threading.get_ident():
            raise RuntimeError("a host call-back started a run on the team that is running it")
        with self._lock:
            if self._crew is None:
                self._crew = _Crew(self._compiler, self.threads)
            self._runner = threading.get_ident()
            try:
                self._crew.run(program)
            finally:
                self._runner = None
            program.raise_pending()

    def close(self) -> None:
        """End the team's threads; a later run starts them again."""
        with self._lock:
            if self._crew is not None:
                self._crew.close()
                self._crew = None

    def _after_fork_in_child(self) -> None:
        """The other threads did not come along; the lock may be held by one of them."""
        if self._crew is not None:
            self._crew.abandon()
        self._lock = threading.Lock()
        self._crew = None
        if self._runner != threading.get_ident():
            self._runner = None


class _Crew:
    """The native state of a team and the threads that live in it."""

    def __init__(self, compiler: Compiler, threads: int):
        run, work, stop = compiler.load([source := team_source(compiler.target)])[source.key]
        self._keep = compiler
        self._state = aligned_array(State.SIZE)
        self._state_address = self._state.ctypes.data
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(run)
        self._scratch_bytes = 0
        self._state[State.THREADS] = threads
        spins = _SPINS if threads <= available_cpus() else 0
        self._state[State.MOST_SPINS] = self._state[State.SPINS] = spins
        native_work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(work)
        native_stop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(stop)
        self._workers: list[threading.Thread] = []
        # Also runs at interpreter exit, so that no thread returns from its sleep into code that
        # is being torn down.
        self.close = weakref.finalize(self, _stop, native_stop, self._state, self._workers)
        try:
            for thread in range(1, threads):
                # The arguments keep alive what the thread uses: this crew may go before it.
                worker = threading.Thread(
                    target=_work,
                    args=(native_work, self._state, thread, compiler),
                    name=f"euler-{thread}",
                    daemon=True,
                )
                worker.start()
                self._workers.append(worker)
        except RuntimeError:
            self.close()
            raise EulerError(
                f"threads: the system refused thread {thread + 1} of {threads}; ask for fewer"
            ) from None

    def run(self, program: Program) -> None:
        if program.scratch_bytes > self._scratch_bytes:
            self._provide_scratch(program.scratch_bytes)
        self._run(self._state_address, program.address)

    def abandon(self) -> None:
        """In a forked child: there is nobody to stop. If the fork happened in a host call-back,
        all other threads were waiting for it, and this one finishes the run by itself."""
        self.close.detach()
        self._state[State.THREADS] = 1

    def _provide_scratch(self, wanted: int) -> None:
        """Give every thread at least `wanted` bytes; between runs nobody uses the old ones."""
        self._scratch_bytes = -(-wanted // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        threads = 1 + len(self._workers)
        self._scratch = aligned_array(self._scratch_bytes // 8 * threads)
        self._state[State.SCRATCH] = self._scratch.ctypes.data
        self._state[State.SCRATCH_STRIDE] = self._scratch_bytes


def _work(native_work, state, thread: int, compiler: Compiler) -> None:
    native_work(state.ctypes.data, thread)


def _stop(native_stop, state, workers: list[threading.Thread]) -> None:
    native_stop(state.ctypes.data)
    for worker in workers:
        worker.join(timeout=1.0)


def _after_fork_in_child() -> None:
    for team in list(_teams):
        team._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
