"""Kernel sources to native functions: emit, optimise, compile, keep on disk, load.

A kernel found in the object cache costs a file read; LLVM sees only the others. Where many are
missing, servers (see codegen.py) compile along with this process, one to a core. What was compiled
where makes no difference: the object depends on the kernel's key and the target alone.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import llvmlite.binding as llvm
from llvmlite import ir

from backends.llvm import codegen
from backends.llvm.cache import ObjectCache, default_directory, entry_name
from backends.llvm.cpus import available_cpus
from backends.llvm.kernel import KernelSource
from backends.llvm.target import Target

# A server loads LLVM for some 0.2 s before it compiles its first kernel, and a kernel takes 20 to
# 100 ms: with fewer missing than this the process is done alone before a server has paid off.
_KERNELS_WORTH_A_SERVER = 12

_library_numbers = itertools.count()

# llvmlite serialises its calls anyway. A fork waits for this lock: a child would otherwise inherit
# llvmlite's own lock, taken by a thread that it does not have.
_llvm_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_llvm_lock.acquire,
        after_in_parent=_llvm_lock.release,
        after_in_child=_llvm_lock.release,
    )


class Compiler:
    """Compiles and loads kernels for one target.

    Loaded functions live as long as the compiler: whoever keeps an address keeps the compiler.
    `hits` and `compiled` count kernels by where their object came from.
    """

    def __init__(
        self, target: Target, cache: ObjectCache | None = None, servers: int | None = None
    ):
        """`cache` None is the user's default directory; `servers` None is one a core besides this
        process's own."""
        self.target = target
        self.cache = ObjectCache(default_directory()) if cache is None else cache
        self.hits = 0
        self.compiled = 0
        self._servers = available_cpus() - 1 if servers is None else servers
        self._addresses: dict[str, tuple[int, ...]] = {}
        self._libraries: list[llvm.ResourceTracker] = []
        self._generator_made: codegen.CodeGenerator | None = None
        self._jit_made: llvm.LLJIT | None = None

    def load(self, sources: Iterable[KernelSource]) -> dict[str, tuple[int, ...]]:
        """The addresses of every kernel's phases, by kernel key; kernels of equal key share code.

        Kernels loaded before are not loaded again.
        """
        wanted = {source.key: source for source in sources}
        with _llvm_lock:
            self._addresses.update((key, ()) for key, s in wanted.items() if not s.phases)
            missing = [source for key, source in wanted.items() if key not in self._addresses]
            if missing:
                self._link(missing, self._objects(missing))
        return {key: self._addresses[key] for key in wanted}

    def symbols(self, source: KernelSource) -> tuple[str, ...]:
        """The names of a kernel's functions, one a phase; no two different kernels share one."""
        unique = self._entry(source)[:20]
        return tuple(f"euler_{unique}_{phase.name}" for phase in source.phases)

    def llvm_ir(self, source: KernelSource, optimised: bool = False) -> str:
        """A kernel's LLVM IR as emitted, or as it goes to the code generator."""
        text = self._emit(source)
        if not optimised:
            return text
        with _llvm_lock:
            return str(self._generator.optimise(text))

    def assembly(self, source: KernelSource) -> str:
        """A kernel's assembly."""
        with _llvm_lock:
            return self._generator.assembly(self._emit(source))

    @property
    def _generator(self) -> codegen.CodeGenerator:
        # Made when first needed: a warm start never optimises anything.
        if self._generator_made is None:
            self._generator_made = codegen.CodeGenerator(*self._target_names())
        return self._generator_made

    @property
    def _jit(self) -> llvm.LLJIT:
        if self._jit_made is None:
            # The target machine is this compiler's, so that the JIT accepts its objects.
            self._jit_made = llvm.create_lljit_compiler(
                self._generator.target_machine, use_jit_link=True
            )
        return self._jit_made

    def _target_names(self) -> tuple[str, str, str]:
        return self.target.triple, self.target.cpu, self.target.features

    def _entry(self, source: KernelSource) -> str:
        return entry_name(*self._target_names(), source.key)

    def _emit(self, source: KernelSource) -> str:
        module = ir.Module(name=source.key)
        module.triple = self.target.triple
        symbols = self.symbols(source)
        source.emit(module, symbols)
        for symbol in symbols:
            function = module.globals.get(symbol)
            if function is None or function.is_declaration:
                raise RuntimeError(f"kernel '{source.key}' did not define its phase {symbol}")
        return str(module)

    def _objects(self, sources: list[KernelSource]) -> dict[str, bytes]:
        """Objects by kernel key, from the cache as far as it has them."""
        objects: dict[str, bytes] = {}
        missing = []
        for source in sources:
            found = self.cache.get(self._entry(source))
            if found is None:
                missing.append(source)
            else:
                objects[source.key] = found
        self.hits += len(objects)
        if missing:
            for source, compiled in self._compile(missing):
                objects[source.key] = compiled
                self.cache.put(self._entry(source), compiled)
            if not self.compiled:
                self.cache.trim()  # it looks at every entry: once a process is often enough
            self.compiled += len(missing)
        return objects

    def _compile(self, sources: list[KernelSource]) -> list[tuple[KernelSource, bytes]]:
        """Compile here and in servers, each taking the next kernel when it is done with one."""
        waiting = deque(sources)
        done: list[tuple[KernelSource, bytes]] = []
        count = min(self._servers, len(sources) // _KERNELS_WORTH_A_SERVER)
        clients = [
            threading.Thread(target=self._compile_remotely, args=(waiting, done), daemon=True)
            for _ in range(count)
        ]
        for client in clients:
            client.start()
        try:
            self._compile_here(waiting, done)
            for client in clients:
                client.join()
            # What a server failed at was put back by its client.
            self._compile_here(waiting, done)
        except BaseException:
            waiting.clear()  # so that the clients end too
            raise
        return done

    def _compile_here(
        self, waiting: deque[KernelSource], done: list[tuple[KernelSource, bytes]]
    ) -> None:
        while (source := _take(waiting)) is not None:
            done.append((source, self._generator.compile(self._emit(source))))

    def _compile_remotely(
        self, waiting: deque[KernelSource], done: list[tuple[KernelSource, bytes]]
    ) -> None:
        """Feed one server until nothing is waiting. On any trouble with the server, leave quietly:
        this process compiles the rest, and reports what is wrong with a kernel if that was it."""
        source = None
        try:
            with _start_server(self._target_names()) as server:
                try:
                    while (source := _take(waiting)) is not None:
                        codegen.send(server.stdin, self._emit(source).encode())
                        compiled = codegen.receive(server.stdout)
                        if not compiled:
                            break
                        done.append((source, compiled))
                finally:
                    server.kill()
        except (EOFError, OSError):
            pass
        if source is not None:
            waiting.append(source)

    def _link(self, sources: list[KernelSource], objects: dict[str, bytes]) -> None:
        library = llvm.JITLibraryBuilder().add_current_process()
        for source in sources:
            library.add_object_img(objects[source.key])
            for symbol in self.symbols(source):
                library.export_symbol(symbol)
        tracker = library.link(self._jit, f"euler{next(_library_numbers)}")
        self._libraries.append(tracker)
        for source in sources:
            self._addresses[source.key] = tuple(tracker[s] for s in self.symbols(source))


def _take(waiting: deque[KernelSource]) -> KernelSource | None:
    """The next kernel, or None when there is none; safe in several threads."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _start_server(target_names: tuple[str, str, str]) -> subprocess.Popen:
    script = Path(codegen.__file__)
    server = subprocess.Popen(
        # -P: the script's own directory is full of modules named after everyday words.
        [sys.executable, "-P", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for this process; the pipe's end stops the server
    )
    try:
        codegen.send(server.stdin, "\n".join(target_names).encode())
    except OSError:
        server.kill()
        raise
    return server
