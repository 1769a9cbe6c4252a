"""Where every value of a function lives: kernels in order → a `Plan`.

A value lives from the step that makes it to its last use, in a region of memory:

* a view shares the region of what it is a view of, and keeps it alive;
* a result takes over an operand's region where its kernel may work in place and the operand dies;
* a donated input's buffer holds the output that takes it over, from the moment that output is made
  if nobody needs the input any more, else from the end on, by a copy;
* everything else gets a place of its own in the arena, which `runtime.compiler.arena` packs.

`runtime.compiler.check_plan` proves each plan right by other means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from euler_ir.graph import Function, Value
from euler_ir.plan import ALIGNMENT, Block, Copy, Kernel, Place, Plan, Step
from runtime.compiler.arena import pack


def schedule(function: Function, kernels: Sequence[Kernel], reuse: bool = True) -> Plan:
    """A plan that runs `kernels`, one for every node that is not a view, in the function's order.

    Without `reuse` no two values ever share memory, at any time: the plan to compare with when
    memory is suspected to be overwritten too early."""
    layout = _Layout(function, kernels, reuse)
    for step, kernel in enumerate(kernels):
        for index, value in enumerate(kernel.node.outputs):
            layout.place_output(step, kernel, index, value)
    workspaces = [layout.temporary(step, kernel.workspace) if kernel.workspace else None
                  for step, kernel in enumerate(kernels)]
    results, copies = _final_copies(layout)
    arena_bytes, lower_bound = layout.assign_offsets()
    return Plan(
        function,
        tuple(Step(kernel, region and region.place())
              for kernel, region in zip(kernels, workspaces, strict=True)),
        {value: layout.place(value) for value in function.values()},
        tuple(region.block() for region in layout.arena),
        arena_bytes,
        lower_bound,
        {name: region.place(offset) for name, (region, offset) in results.items()},
        tuple(Copy(source.place(offset), target.place(), size)
              for source, offset, target, size in copies))


@dataclass(eq=False)
class _Region:
    """Memory that holds one value, or several in turn, in the arena or in an input's buffer.

    Alive from `first` to `last`; the present value, `values[-1]`, is there since step `since`."""

    size: int
    first: int
    last: int
    since: int
    values: list[Value] = field(default_factory=list)
    input: str | None = None
    offset: int = 0

    def place(self, offset: int = 0) -> Place:
        return Place(self.offset + offset, self.input)

    def block(self) -> Block:
        return Block(tuple(self.values), self.offset, self.size, self.first, self.last)

    def take(self, value: Value, step: int, last: int) -> None:
        self.values.append(value)
        self.since, self.last = step, last


class _Layout:
    """The regions of a function's values as they are decided, step by step."""

    def __init__(self, function: Function, kernels: Sequence[Kernel], reuse: bool) -> None:
        self.function, self.kernels, self.reuse = function, kernels, reuse
        self.end = len(kernels)
        self.storage = _views(function, kernels)
        self.last_use = self._last_uses()
        self.arena: list[_Region] = []
        self.regions: dict[Value, _Region] = {}
        for value in function.inputs:
            self.regions[value] = _Region(value.type.bytes, -1, self.last_use.get(value, -1), -1,
                                          [value], value.name)
        self.takers = self._takers()
        self.targets: dict[Value, list[_Region]] = {}
        for name, (taker, _) in self.takers.items():
            if taker is not None:
                self.targets.setdefault(taker, []).append(self.regions[function.input(name)])
        self.operands = [self._operands(kernel) for kernel in kernels]
        self.inplace = [_by_output(kernel) for kernel in kernels]

    def _last_uses(self) -> dict[Value, int]:
        """The last step that reads a value or a view of it; the end for outputs."""
        last = {}
        for step, kernel in enumerate(self.kernels):
            for value in (*kernel.node.outputs, *kernel.node.inputs):
                last[self.storage[value][0]] = step
        for value in self.function.outputs:
            last[self.storage[value][0]] = self.end
        return last

    def _takers(self) -> dict[str, tuple[Value | None, int]]:
        """The value that can be made in each donated input's buffer and the step that makes
        it; no value and the end where only a copy can bring the output there."""
        made = {value: step for step, kernel in enumerate(self.kernels)
                for value in kernel.node.outputs}
        takers = {}
        for name, output in self.function.donations.items():
            root, offset = self.storage[self.function.output(output)]
            fits = root.type.bytes == self.function.input(name).type.bytes and offset == 0
            takers[name] = (root, made[root]) if root in made and fits else (None, self.end)
        return takers

    def _operands(self, kernel: Kernel) -> dict[Value, list[int]]:
        """Which operands of a kernel read each root value."""
        positions: dict[Value, list[int]] = {}
        for position, value in enumerate(kernel.node.inputs):
            positions.setdefault(self.storage[value][0], []).append(position)
        return positions

    def place(self, value: Value) -> Place:
        root, offset = self.storage[value]
        return self.regions[root].place(offset)

    def temporary(self, step: int, size: int) -> _Region:
        """Arena memory for one step only."""
        region = _Region(size, step, step, step)
        self.arena.append(region)
        return region

    def place_output(self, step: int, kernel: Kernel, index: int, value: Value) -> None:
        """Decide the region of the value that a kernel makes."""
        region = self._shared(step, kernel, index, value) if self.reuse else None
        if region is None:
            region = _Region(value.type.bytes, step, step, step)
            self.arena.append(region)
        region.take(value, step, self.last_use[value])
        self.regions[value] = region

    def _shared(self, step: int, kernel: Kernel, index: int, value: Value) -> _Region | None:
        """A region for this value that another one had before: the donated buffer it is to end in,
        if that is free or can be taken over, or that of an operand that dies here."""
        for region in self.targets.get(value, ()):
            if region.last < step or self._can_take(region, step, index, value):
                return region
        for position in self.inplace[step].get(index, ()):
            region = self.regions[self.storage[kernel.node.inputs[position]][0]]
            if self._may_borrow(region, value) and self._can_take(region, step, index, value):
                return region
        return None

    def _may_borrow(self, region: _Region, value: Value) -> bool:
        """Whether a value may lie in this region without being in the way: an input's buffer must
        be donated, and free again when the output it is donated to is made."""
        if region.input is None:
            return True
        taker, deadline = self.takers.get(region.input, (None, -1))
        if self.last_use[value] == deadline and taker is not None:
            index = self.kernels[deadline].node.outputs.index(taker)
            return self._overlays(deadline, index, value)
        return self.last_use[value] < deadline

    def _can_take(self, region: _Region, step: int, index: int, value: Value) -> bool:
        """Whether a result may be written over what the region holds now."""
        return (region.last == step and region.since < step
                and region.size == value.type.bytes > 0
                and self._overlays(step, index, region.values[-1]))

    def _overlays(self, step: int, index: int, root: Value) -> bool:
        """Whether the kernel may write result `index` over a value: all operands that lie in it
        are the whole of it, and all may be shared with that result."""
        operands, positions = self.kernels[step].node.inputs, self.operands[step].get(root, ())
        allowed = self.inplace[step].get(index, ())
        return bool(positions) and all(
            position in allowed
            and self.storage[operands[position]][1] == 0
            and operands[position].type.bytes == root.type.bytes
            for position in positions)

    def assign_offsets(self) -> tuple[int, int]:
        """Place the arena's regions; bytes used and the lower bound."""
        regions = [region for region in self.arena if region.size]
        sizes = [region.size for region in regions]
        offsets, used, bound = pack(sizes, [region.first for region in regions],
                                    [region.last for region in regions])
        if not self.reuse:
            offsets, used = _apart(sizes)
        for region, offset in zip(regions, offsets, strict=True):
            region.offset = offset
        return used, bound


def _views(function: Function, kernels: Sequence[Kernel]) -> dict[Value, tuple[Value, int]]:
    """The value whose memory each value lies in (itself, if it is no view) and the bytes from the
    start of that."""
    storage = {value: (value, 0) for value in function.inputs}
    expected = iter(kernels)
    for node in function.nodes:
        offset = node.op.alias(*(value.type for value in node.inputs))
        if offset is not None:
            root, start = storage[node.inputs[0]]
            storage[node.output] = (root, start + offset * node.output.dtype.itemsize)
            continue
        if getattr(next(expected, None), "node", None) is not node:
            raise ValueError(f"@{function.name}: no kernel in its place for {node!r}")
        storage.update((value, (value, 0)) for value in node.outputs)
    if next(expected, None) is not None:
        raise ValueError(f"@{function.name}: more kernels than nodes that compute")
    return storage


def _by_output(kernel: Kernel) -> dict[int, list[int]]:
    """The operands that each result may share memory with."""
    pairs: dict[int, list[int]] = {}
    for output, position in kernel.inplace:
        pairs.setdefault(output, []).append(position)
    return pairs


def _apart(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets one after the other, and the bytes used."""
    offsets, used = [], 0
    for size in sizes:
        offsets.append(used)
        used += math.ceil(size / ALIGNMENT) * ALIGNMENT
    return offsets, used


_Move = tuple[_Region, int, _Region, int]


def _final_copies(layout: _Layout) -> tuple[dict[str, tuple[_Region, int]], list[_Move]]:
    """Where each output is read, and the moves (source, offset, target, size) that bring donated
    outputs home. No move overwrites what a later one, or an output, still needs: outputs in such
    a buffer are saved first; a cycle (two inputs donated crosswise) goes through a temporary."""
    function, regions = layout.function, layout.regions
    pending: dict[_Region, tuple[_Region, int]] = {}
    results = {}
    for name, output in function.donations.items():
        root, offset = layout.storage[function.output(output)]
        target = regions[function.input(name)]
        results[output] = (target, 0)
        if regions[root] is not target and target.size:
            pending[target] = (regions[root], offset)
    moves: list[_Move] = []

    def save(source: _Region, offset: int, size: int) -> tuple[_Region, int]:
        temporary = layout.temporary(layout.end, size)
        moves.append((source, offset, temporary, size))
        return temporary, 0

    for output, value in zip(function.output_names, function.outputs, strict=True):
        root, offset = layout.storage[value]
        if output not in results:
            kept = regions[root] not in pending or not value.type.size
            results[output] = ((regions[root], offset) if kept
                               else save(regions[root], offset, value.type.bytes))
    readers = Counter(source for source, _ in pending.values())
    while pending:
        target = next((region for region in pending if not readers[region]), None)
        if target is None:
            target, (source, offset) = next(iter(pending.items()))
            readers[source] -= 1
            pending[target] = save(source, offset, target.size)
            readers[pending[target][0]] += 1
            continue
        source, offset = pending.pop(target)
        readers[source] -= 1
        moves.append((source, offset, target, target.size))
    return results, moves
