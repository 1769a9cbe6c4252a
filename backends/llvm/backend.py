"""The LLVM backend: nodes to native kernels, plans to launch tables that a thread team walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from backends.llvm.compiler import Compiler
from backends.llvm.kernel import KernelSource
from backends.llvm.kernels import LOWERINGS, lower_node, structure
from backends.llvm.launch import Launch, Program
from backends.llvm.movement import copy_kernel
from backends.llvm.target import Target
from backends.llvm.team import Team
from backends.memory import HostBuffer, HostMemory
from euler_ir.graph import Function, Node
from euler_ir.op import Composite
from euler_ir.plan import Kernel, Place, Plan
from euler_ir.types import TensorType

__all__ = ["LLVMBackend", "LLVMProgram"]


class LLVMBackend:
    """Compiles for this machine's CPU; one thread team and one set of loaded kernels for all its
    programs.

    `threads` None takes what the CPU mask and quota allow. `cpu_features` switches features, see
    `Target.host`. With `timed`, programs record the time of every kernel."""

    name = "llvm"
    epilogues = True

    def __init__(self, threads: int | None = None, cpu_features: str | None = None,
                 timed: bool = False, compiler: Compiler | None = None) -> None:
        self.target = compiler.target if compiler else Target.host(cpu_features or "")
        self.compiler = compiler or Compiler(self.target)
        self.team = Team(self.compiler, threads)
        self.timed = timed
        self._sources: dict[tuple, KernelSource] = {}

    @property
    def composites(self) -> frozenset[str]:
        return frozenset(op.name for op in LOWERINGS if issubclass(op, Composite))

    def lower(self, function: Function) -> Sequence[Kernel]:
        kernels = []
        for node in function.nodes:
            if node.op.alias(*(value.type for value in node.inputs)) is None:
                source = self._source(node)
                kernels.append(Kernel(node, source.workspace_bytes, source.inplace, source))
        return kernels

    def _source(self, node: Node) -> KernelSource:
        key = structure(node)
        if key not in self._sources:
            self._sources[key] = lower_node(node, self.target)
        return self._sources[key]

    def allocate(self, type: TensorType) -> HostBuffer:
        return HostBuffer(type)

    def link(self, plan: Plan, bound: Mapping[str, HostBuffer] | None = None) -> LLVMProgram:
        return LLVMProgram(self, plan, bound or {})

    def listing(self, kernel: Kernel) -> Mapping[str, str]:
        """LLVM IR (as optimised) and assembly."""
        return {"ll": self.compiler.llvm_ir(kernel.code, optimised=True),
                "s": self.compiler.assembly(kernel.code)}


class LLVMProgram:
    """A plan with its memory and its launch table."""

    def __init__(self, backend: LLVMBackend, plan: Plan, bound: Mapping[str, HostBuffer]) -> None:
        self.plan, self._team = plan, backend.team
        self._memory = HostMemory(plan, bound)
        self._nodes: list[Node | None] = []
        self.launches: list[Launch] = []
        self._program = self._link(backend)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Program.run`. Raises EulerError for inputs that do not fit the function's."""
        self._memory.stage(inputs)
        self._team.run(self._program)
        return self._memory.fetch()

    def times(self) -> list[tuple[Node | None, float]]:
        """Each launch's node (None for a final copy) and seconds in the last run, where the
        backend is `timed`."""
        return list(zip(self._nodes, self._program.nanoseconds / 1e9, strict=True))

    def _link(self, backend: LLVMBackend) -> Program:
        copies = {copy: copy_kernel(copy.size) for copy in self.plan.copies}
        sources = [step.kernel.code for step in self.plan.steps]
        addresses = backend.compiler.load([*sources, *copies.values()])
        table = _Table()
        for step, source in zip(self.plan.steps, sources, strict=True):
            node = step.kernel.node
            reads = [self._span(self.plan.places[value], value.type.bytes) for value in node.inputs]
            writes = [self._span(self.plan.places[value], value.type.bytes)
                      for value in node.outputs]
            if source.workspace_bytes:
                writes.append(self._span(step.workspace, source.workspace_bytes))
            table.add(source, addresses[source.key], reads, writes)
            self._nodes += [node] * len(source.phases)
        for copy, source in copies.items():
            table.add(source, addresses[source.key], [self._span(copy.source, copy.size)],
                      [self._span(copy.target, copy.size)])
            self._nodes += [None] * len(source.phases)
        scratch = max((source.scratch_bytes for source in sources), default=0)
        self.launches = table.launches
        return Program(self.launches, scratch, backend.timed,
                       keep=(backend.compiler, self._memory))

    def _span(self, place: Place, size: int) -> tuple[int, int]:
        """First address, and the one after the last."""
        start = self._memory.region(place).ctypes.data + place.offset
        return start, start + size


class _Table:
    """Launches with as few barriers as their memory allows.

    A kernel must wait if it reads what was written, or writes what was read or written, since the
    barrier before."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._reads: list[tuple[int, int]] = []
        self._writes: list[tuple[int, int]] = []

    def add(self, source: KernelSource, addresses: Sequence[int], reads: list[tuple[int, int]],
            writes: list[tuple[int, int]]) -> None:
        if not source.phases:
            return
        if _meet(reads, self._writes) or _meet(writes, self._writes) or _meet(writes, self._reads):
            self._wait()
        args = [start for start, _ in (*reads, *writes)]
        for number, (address, phase) in enumerate(zip(addresses, source.phases, strict=True)):
            if number:
                self._wait()
            self.launches.append(Launch(address, args, phase.tiles, barrier_after=False))
        self._reads += reads
        self._writes += writes

    def _wait(self) -> None:
        last = self.launches[-1]
        self.launches[-1] = Launch(last.address, last.args, last.tiles, barrier_after=True)
        self._reads, self._writes = [], []


def _meet(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(start < other_stop and other_start < stop
               for start, stop in some for other_start, other_stop in others)
