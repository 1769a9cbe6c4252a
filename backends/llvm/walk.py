"""The native code of the thread team: the loop over a launch table, and how threads wait.

Four functions, written in LLVM IR and compiled and cached like any kernel:

    run(team, program)      the caller, thread 0: start the others, walk, return when all are done
    work(team, thread)      every other thread: wait for a run, walk, again, until told to stop
    stop(team)              let every `work` return; between runs only
    walk(...)               internal: one thread's way through the table

The team's state is a few cache lines of native memory (`State`, below). Threads wait in two places,
for a run to start and at barriers, both on a 32-bit word that changes once: they spin for a moment,
which is enough when all threads have a core of their own, then sleep on a futex. The thread that
changes the word pays for a system call only when somebody sleeps. (Where LLVM's target has no
futex, sleeping is giving up the core again and again.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from llvmlite import ir

from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.launch import WORDS, Entry, Header
from backends.llvm.target import Target


class State(IntEnum):
    """64-bit words of a team's state. Words that change during a run have a line of their own."""

    START = 0  # counts runs; `work` waits for it to change
    START_SLEEPERS = 1 * WORDS
    ARRIVED = 2 * WORDS  # threads that reached the current barrier
    PHASE = 3 * WORDS  # counts barriers; those who arrived wait for it to change
    PHASE_SLEEPERS = 4 * WORDS
    THREADS = 5 * WORDS
    MOST_SPINS = 5 * WORDS + 1  # how often to look before sleeping, at most
    STOP = 5 * WORDS + 2
    PROGRAM = 5 * WORDS + 3  # address of the table being run
    SCRATCH = 5 * WORDS + 4  # address of thread 0's scratch
    SCRATCH_STRIDE = 5 * WORDS + 5  # bytes from one thread's scratch to the next's
    SPINS = 6 * WORDS  # and at present; see `wait`
    SIZE = 7 * WORDS


_I32, _I64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
_POINTER = ir.PointerType()

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_CLOCK_MONOTONIC = 1
_FEWEST_SPINS = 250  # some 6 us, about what the system calls for sleeping and waking cost


def team_source(target: Target) -> KernelSource:
    """The functions run, work and stop, in that order, as the phases of a `KernelSource`."""

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        emitter = _Emitter(module, target)
        emitter.define_run(symbols[0])
        emitter.define_work(symbols[1])
        emitter.define_stop(symbols[2])

    phases = tuple(Phase(name, tiles=0) for name in ("run", "work", "stop"))
    return KernelSource(key="thread team", phases=phases, emit=emit)


class _Emitter:
    def __init__(self, module: ir.Module, target: Target):
        self.module = module
        self.architecture = target.triple.split("-")[0]
        self.has_futex = "linux" in target.triple and self.architecture in _FUTEX_NUMBER
        self.sched_yield = self._declare("sched_yield", _I32, [])
        self.syscall = self._declare("syscall", _I64, [_I64], var_arg=True)
        self.clock_gettime = self._declare("clock_gettime", _I32, [_I32, _POINTER])
        self.wait = self._define_wait()
        self.announce = self._define_announce()
        self.barrier = self._define_barrier()
        self.now = self._define_now()
        self.walk = self._define_walk()

    def define_run(self, symbol: str) -> None:
        b, (team, program) = self._function(symbol, _VOID, [_POINTER, _POINTER])
        count = _load(b, program, Header.COUNT)
        with _for(b, count) as index:
            _store(b, _I64(0), _entry(b, program, index), Entry.COUNTER)
        _store(b, _I64(0), program, Header.STOPPED)
        _store(b, b.ptrtoint(program, _I64), team, State.PROGRAM)
        b.call(self.announce, [_word(b, team, State.START), _word(b, team, State.START_SLEEPERS)])
        b.call(self.walk, [team, _I64(0)])
        b.ret_void()

    def define_work(self, symbol: str) -> None:
        b, (team, thread) = self._function(symbol, _VOID, [_POINTER, _I64])
        first, again = b.block, b.append_basic_block("again")
        walk, leave = b.append_basic_block("walk"), b.append_basic_block("leave")
        b.branch(again)
        b.position_at_end(again)
        # A run ends at a barrier of all threads, so START is one further each time round.
        seen = b.phi(_I32, "seen")
        seen.add_incoming(_I32(0), first)
        start, sleepers = _word(b, team, State.START), _word(b, team, State.START_SLEEPERS)
        b.call(self.wait, [team, start, seen, sleepers])
        stopped = b.icmp_signed("!=", _load(b, team, State.STOP), _I64(0))
        b.cbranch(stopped, leave, walk)
        b.position_at_end(walk)
        b.call(self.walk, [team, thread])
        seen.add_incoming(b.add(seen, _I32(1)), b.block)
        b.branch(again)
        b.position_at_end(leave)
        b.ret_void()

    def define_stop(self, symbol: str) -> None:
        b, (team,) = self._function(symbol, _VOID, [_POINTER])
        _store(b, _I64(1), team, State.STOP)
        b.call(self.announce, [_word(b, team, State.START), _word(b, team, State.START_SLEEPERS)])
        b.ret_void()

    def _define_walk(self) -> ir.Function:
        """void walk(team, thread): this thread's part of the program's whole table.

        No thread but the first reads the table after the last barrier: the caller, whom that
        barrier releases, may change the program or drop it.
        """
        b, (team, thread) = self._function("walk", _VOID, [_POINTER, _I64], internal=True)
        program = b.inttoptr(_load(b, team, State.PROGRAM), _POINTER)
        offset = b.mul(thread, _load(b, team, State.SCRATCH_STRIDE))
        scratch = b.inttoptr(b.add(_load(b, team, State.SCRATCH), offset), _POINTER)
        is_first = b.icmp_signed("==", thread, _I64(0))
        timed = b.and_(is_first, _is_set(b, program, Header.TIMED))
        finish = b.append_basic_block("finish")
        with _for(b, _load(b, program, Header.COUNT)) as index:
            entry = _entry(b, program, index)
            with b.if_then(timed, likely=False):
                _store(b, b.neg(b.call(self.now, [])), entry, Entry.NANOSECONDS)
            is_host = _is_set(b, entry, Entry.HOST)
            with b.if_else(is_host, likely=False) as (host, native):
                with host:
                    self._call_host(b, program, entry, is_first)
                with native:
                    self._take_tiles(b, entry, scratch)
            with b.if_then(_is_set(b, entry, Entry.BARRIER)):
                b.call(self.barrier, [team])
            with b.if_then(timed, likely=False):
                since = b.add(_load(b, entry, Entry.NANOSECONDS), b.call(self.now, []))
                _store(b, since, entry, Entry.NANOSECONDS)
            with b.if_then(is_host, likely=False):
                stopped = _is_set(b, program, Header.STOPPED)
                # Nobody may start the next run, which resets STOPPED, before all have read it.
                b.call(self.barrier, [team])
                goes_on = b.append_basic_block("goes_on")
                b.cbranch(stopped, finish, goes_on)
                b.position_at_end(goes_on)
        b.branch(finish)
        b.position_at_end(finish)
        b.ret_void()
        return b.function

    def _take_tiles(self, b: ir.IRBuilder, entry: ir.Value, scratch: ir.Value) -> None:
        kernel = ir.FunctionType(_VOID, [_POINTER, _I64, _POINTER])
        function = b.inttoptr(_load(b, entry, Entry.ADDRESS), kernel.as_pointer())
        args = b.inttoptr(_load(b, entry, Entry.ARGS), _POINTER)
        tiles = _load(b, entry, Entry.TILES)
        take, call = b.append_basic_block("take"), b.append_basic_block("call")
        exhausted = b.append_basic_block("exhausted")
        b.branch(take)
        b.position_at_end(take)
        counter = _word(b, entry, Entry.COUNTER)
        tile = b.atomic_rmw("add", counter, _I64(1), "monotonic")
        b.cbranch(b.icmp_signed("<", tile, tiles), call, exhausted)
        b.position_at_end(call)
        b.call(function, [args, tile, scratch])
        b.branch(take)
        b.position_at_end(exhausted)

    def _call_host(
        self, b: ir.IRBuilder, program: ir.Value, entry: ir.Value, is_first: ir.Value
    ) -> None:
        with b.if_then(is_first):
            callback = ir.FunctionType(_I64, []).as_pointer()
            status = b.call(b.inttoptr(_load(b, entry, Entry.ADDRESS), callback), [])
            with b.if_then(b.icmp_signed("!=", status, _I64(0))):
                _store(b, _I64(1), program, Header.STOPPED)

    def _define_barrier(self) -> ir.Function:
        """void barrier(team): return when all threads of the team have called."""
        b, (team,) = self._function("barrier", _VOID, [_POINTER], internal=True)
        phase, sleepers = _word(b, team, State.PHASE), _word(b, team, State.PHASE_SLEEPERS)
        threads = _load(b, team, State.THREADS)
        with b.if_then(b.icmp_signed("==", threads, _I64(1))):
            b.ret_void()
        # PHASE cannot change before this thread has arrived, so reading it first is safe.
        old = b.load_atomic(phase, "monotonic", 4, typ=_I32)
        before = b.atomic_rmw("add", _word(b, team, State.ARRIVED), _I64(1), "acq_rel")
        is_last = b.icmp_signed("==", b.add(before, _I64(1)), threads)
        with b.if_else(is_last) as (last, other):
            with last:
                b.atomic_rmw("xchg", _word(b, team, State.ARRIVED), _I64(0), "monotonic")
                b.call(self.announce, [phase, sleepers])
            with other:
                b.call(self.wait, [team, phase, old, sleepers])
        b.ret_void()
        return b.function

    def _define_announce(self) -> ir.Function:
        """void announce(word, sleepers): change the word and wake those who sleep on it.

        The change and the look at `sleepers` are sequentially consistent, as are a waiter's
        entry in `sleepers` and its last look at the word: one of the two sees the other.
        """
        b, (word, sleepers) = self._function("announce", _VOID, [_POINTER] * 2, internal=True)
        b.atomic_rmw("add", word, _I32(1), "seq_cst")
        if self.has_futex:
            asleep = b.load_atomic(sleepers, "seq_cst", 4, typ=_I32)
            with b.if_then(b.icmp_signed("!=", asleep, _I32(0)), likely=False):
                self._futex(b, word, _FUTEX_WAKE_PRIVATE, _I32(2**31 - 1))
        b.ret_void()
        return b.function

    def _define_wait(self) -> ir.Function:
        """void wait(team, word, old, sleepers): return when the word is no longer `old`.

        Spinning in vain halves the next wait's spins, spinning with success restores them: where
        other programs want the cores, the awaited thread often has none, and a thread that spins
        keeps it from getting this one.
        """
        types = [_POINTER, _POINTER, _I32, _POINTER]
        b, (team, word, old, sleepers) = self._function("wait", _VOID, types, internal=True)
        spins, most = _word(b, team, State.SPINS), _load(b, team, State.MOST_SPINS)
        present = b.load_atomic(spins, "monotonic", 8, typ=_I64)
        with _for(b, present):
            with b.if_then(self._changed(b, word, old)):
                with b.if_then(b.icmp_signed("!=", present, most), likely=False):
                    b.atomic_rmw("xchg", spins, most, "monotonic")
                b.ret_void()
            self._pause(b)
        with b.if_then(b.icmp_signed(">", present, _I64(_FEWEST_SPINS))):
            b.atomic_rmw("xchg", spins, b.lshr(present, _I64(1)), "monotonic")
        b.atomic_rmw("add", sleepers, _I32(1), "seq_cst")
        look, sleep = b.append_basic_block("look"), b.append_basic_block("sleep")
        awake = b.append_basic_block("awake")
        b.branch(look)
        b.position_at_end(look)
        b.cbranch(self._changed(b, word, old), awake, sleep)
        b.position_at_end(sleep)
        if self.has_futex:
            # Returns at once if the word has changed; signals wake it too, hence the loop.
            self._futex(b, word, _FUTEX_WAIT_PRIVATE, old)
        else:
            b.call(self.sched_yield, [])
        b.branch(look)
        b.position_at_end(awake)
        b.atomic_rmw("sub", sleepers, _I32(1), "seq_cst")
        b.ret_void()
        return b.function

    def _define_now(self) -> ir.Function:
        """int64 now(): nanoseconds of the monotonic clock."""
        b, () = self._function("now", _I64, [], internal=True)
        timespec = b.alloca(_I64, size=2)
        b.call(self.clock_gettime, [_I32(_CLOCK_MONOTONIC), timespec])
        seconds = b.mul(_load(b, timespec, 0), _I64(1_000_000_000))
        b.ret(b.add(seconds, _load(b, timespec, 1)))
        return b.function

    def _changed(self, b: ir.IRBuilder, word: ir.Value, old: ir.Value) -> ir.Value:
        return b.icmp_signed("!=", b.load_atomic(word, "seq_cst", 4, typ=_I32), old)

    def _pause(self, b: ir.IRBuilder) -> None:
        """Tell the core that this is a spin loop, where the architecture has a word for that."""
        if self.architecture == "x86_64":
            b.call(self._declare("llvm.x86.sse2.pause", _VOID, []), [])
        elif self.architecture == "aarch64":
            b.call(self._declare("llvm.aarch64.hint", _VOID, [_I32]), [_I32(1)])  # yield

    def _futex(self, b: ir.IRBuilder, word: ir.Value, operation: int, value: ir.Value) -> None:
        number = _I64(_FUTEX_NUMBER[self.architecture])
        no_timeout = _I64(0)
        b.call(self.syscall, [number, word, _I32(operation), value, no_timeout])

    def _declare(
        self, name: str, result: ir.Type, arguments: list[ir.Type], var_arg: bool = False
    ) -> ir.Function:
        declared = self.module.globals.get(name)
        if declared is None:
            signature = ir.FunctionType(result, arguments, var_arg=var_arg)
            declared = ir.Function(self.module, signature, name)
        return declared

    def _function(
        self, name: str, result: ir.Type, arguments: list[ir.Type], internal: bool = False
    ) -> tuple[ir.IRBuilder, tuple[ir.Argument, ...]]:
        function = ir.Function(self.module, ir.FunctionType(result, arguments), name)
        if internal:
            function.linkage = "internal"
        return ir.IRBuilder(function.append_basic_block("entry")), function.args


def _word(b: ir.IRBuilder, base: ir.Value, index: int) -> ir.Value:
    """The address of 64-bit word `index` after `base`."""
    return b.gep(base, [_I64(int(index))], inbounds=True, source_etype=_I64)


def _load(b: ir.IRBuilder, base: ir.Value, index: int) -> ir.Value:
    return b.load(_word(b, base, index), typ=_I64)


def _store(b: ir.IRBuilder, value: ir.Value, base: ir.Value, index: int) -> None:
    b.store(value, _word(b, base, index))


def _is_set(b: ir.IRBuilder, base: ir.Value, index: int) -> ir.Value:
    return b.icmp_signed("!=", _load(b, base, index), _I64(0))


def _entry(b: ir.IRBuilder, program: ir.Value, index: ir.Value) -> ir.Value:
    """The line of entry `index`, which follows the header's line."""
    words = b.mul(b.add(index, _I64(1)), _I64(WORDS))
    return b.gep(program, [words], inbounds=True, source_etype=_I64)


@contextmanager
def _for(b: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    """A loop over [0, count); the body is written inside the `with`, which gives the index."""
    before = b.block
    check, body = b.append_basic_block("check"), b.append_basic_block("body")
    done = b.append_basic_block("done")
    b.branch(check)
    b.position_at_end(check)
    index = b.phi(_I64)
    index.add_incoming(_I64(0), before)
    b.cbranch(b.icmp_signed("<", index, count), body, done)
    b.position_at_end(body)
    yield index
    index.add_incoming(b.add(index, _I64(1)), b.block)
    b.branch(check)
    b.position_at_end(done)
