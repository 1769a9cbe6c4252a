"""The interpreter as a backend: numpy, node by node, in the memory that the plan lays out.

It is slow and exact. Values live in one arena at the planned offsets, so a fault of the schedule
shows as wrong numbers, all the more with `poison`: then whatever is not alive is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from backends.memory import HostBuffer, HostMemory
from euler_ir.graph import Function, Node
from euler_ir.interpreter import run_node
from euler_ir.op import REGISTRY, Composite, Pointwise
from euler_ir.ops import AdamW, UpdateSlice
from euler_ir.plan import Kernel, Place, Plan
from euler_ir.types import TensorType

#: Every byte of poison; a float of such bytes is NaN.
POISON = 0xFF


class ReferenceBackend:
    """`poison` fills memory that holds no live value with NaN before each step."""

    name = "reference"
    epilogues = True

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison

    @property
    def composites(self) -> frozenset[str]:
        """All there are, also those registered later: it evaluates whatever has a meaning."""
        return frozenset(name for name, op in REGISTRY.items() if issubclass(op, Composite))

    def lower(self, function: Function) -> Sequence[Kernel]:
        return [Kernel(node, inplace=_inplace(node)) for node in function.nodes
                if node.op.alias(*(value.type for value in node.inputs)) is None]

    def allocate(self, type: TensorType) -> HostBuffer:
        return HostBuffer(type)

    def link(self, plan: Plan, bound: Mapping[str, HostBuffer] | None = None) -> ReferenceProgram:
        return ReferenceProgram(plan, bound or {}, self.poison)

    def listing(self, kernel: Kernel) -> Mapping[str, str]:
        """Nothing is compiled."""
        return {}


def _inplace(node: Node) -> tuple[tuple[int, int], ...]:
    """Pairs (output, input) that may share memory, had the node a kernel of its own."""
    if isinstance(node.op, AdamW):
        return node.op.renewed
    if isinstance(node.op, UpdateSlice):
        return ((0, 0),)
    if isinstance(node.op, Pointwise):
        return tuple((o, i) for o, result in enumerate(node.outputs)
                     for i, operand in enumerate(node.inputs) if operand.type == result.type)
    return ()


class ReferenceProgram:
    """A plan with its memory."""

    def __init__(self, plan: Plan, bound: Mapping[str, HostBuffer], poison: bool) -> None:
        self.plan, self.poison = plan, poison
        self._memory = HostMemory(plan, bound)
        self._arrays = {value: self._memory.array(value, place)
                        for value, place in plan.places.items()}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Program.run`. Raises EulerError for inputs that do not fit the function's."""
        self._memory.stage(inputs)
        for number, step in enumerate(self.plan.steps):
            if self.poison:
                self._poison(number)
            self._run_node(step.kernel.node)
        if self.poison:
            self._poison(len(self.plan.steps))
        for copy in self.plan.copies:
            source, target = (self._bytes(place, copy.size)
                              for place in (copy.source, copy.target))
            target[...] = source
        return self._memory.fetch()

    def _run_node(self, node: Node) -> None:
        # A result may be an operand's own memory, which the first result written may be in.
        results = [np.array(array)
                   for array in run_node(node, [self._arrays[value] for value in node.inputs])]
        for value, array in zip(node.outputs, results, strict=True):
            self._arrays[value][...] = array

    def _poison(self, step: int) -> None:
        """Fill what holds no value at the beginning of a step, its results' places included."""
        arena = self._memory.arena
        free = np.ones(len(arena), bool)
        for block in self.plan.blocks:
            if block.first < step <= block.last:
                free[block.offset:block.offset + block.size] = False
        arena[free] = POISON

    def _bytes(self, place: Place, size: int) -> np.ndarray:
        return self._memory.region(place)[place.offset:place.offset + size]
