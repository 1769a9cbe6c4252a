"""Proves a plan right by executing it on labels instead of numbers.

Every byte of the arena and of the inputs' buffers is labelled with the value whose content it
holds. Steps are walked in order: an operand must find its own label in all its bytes, a result and
a workspace write theirs. So every way in which two values could be confused shows as a read of
something else: lifetimes cut short, overlaps, views that went astray, donated inputs read too late,
copies in the wrong order. Nothing of the scheduler is used or believed but the plan itself.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import combinations, product

import numpy as np

from euler_ir.graph import Node, Value
from euler_ir.plan import ALIGNMENT, Block, Kernel, Place, Plan, Step


class PlanError(Exception):
    """A plan that would compute wrong numbers; a fault of the scheduler, not of the user."""


def check_plan(plan: Plan) -> None:
    """Raises PlanError, with the step, the values and the bytes concerned, for a plan that reads
    anything but what was written, writes out of bounds or where it may not, leaves a value
    unaligned, loses an output, or changes an input that is not donated."""
    _Walk(plan).check()
    _check_blocks(plan)


class _Memory:
    """Labels of one buffer's bytes: a sorted list of stretches (start, label), up to the next.

    A label is (root value or text, bytes from `start` back to the root's first byte)."""

    def __init__(self, name: str, size: int, content: Value | str) -> None:
        self.name, self.size = name, size
        self.starts = [0]
        self.labels: list[tuple[Value | str, int]] = [(content, 0)]

    def write(self, start: int, size: int, content: Value | str, origin: int) -> None:
        """Label bytes; `origin` is where in this buffer the content's first byte would lie."""
        first, last = self._cut(start), self._cut(start + size)
        self.starts[first:last] = [start]
        self.labels[first:last] = [(content, origin)]

    def stretches(self, start: int, size: int) -> list[tuple[int, int, Value | str, int]]:
        """(start, stop, content, origin) of what lies in a range."""
        stop, index = start + size, bisect_right(self.starts, start) - 1
        found = []
        while index < len(self.starts) and self.starts[index] < stop:
            end = self.starts[index + 1] if index + 1 < len(self.starts) else self.size
            found.append((max(start, self.starts[index]), min(stop, end), *self.labels[index]))
            index += 1
        return found

    def _cut(self, at: int) -> int:
        """The index of the stretch that starts at this byte, made if there is none."""
        if at >= self.size:
            return len(self.starts)
        index = bisect_right(self.starts, at) - 1
        if self.starts[index] == at:
            return index
        self.starts.insert(index + 1, at)
        self.labels.insert(index + 1, self.labels[index])
        return index + 1


class _Walk:
    """One symbolic execution of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.function = plan, plan.function
        self.arena = _Memory("the arena", plan.arena_bytes, "nothing")
        self.buffers = {value.name: _Memory(f"input %{value.name}", value.type.bytes, value)
                        for value in self.function.inputs}
        self.roots = {value: (value, 0) for value in self.function.inputs}

    def check(self) -> None:
        for value in self.function.inputs:
            if self.plan.places.get(value) != Place(0, value.name):
                raise PlanError(f"input %{value.name} is at {self.plan.places.get(value)}, not at "
                                "the start of its own buffer")
        steps = iter(enumerate(self.plan.steps))
        for node in self.function.nodes:
            offset = node.op.alias(*(value.type for value in node.inputs))
            if offset is not None:
                self._view(node, offset)
                continue
            number, step = next(steps, (0, None))
            if step is None or step.kernel.node is not node:
                raise PlanError(f"{node!r} is not run in its turn")
            self._step(f"step {number} ({node.op.name})", step)
        if (extra := next(steps, None)) is not None:
            raise PlanError(f"step {extra[0]} runs a node that is not the function's")
        self._copies()
        self._results()

    def _view(self, node: Node, offset: int) -> None:
        """A view lies where its elements are, inside of what it is a view of."""
        (view,), base = node.outputs, node.inputs[0]
        start = offset * base.dtype.itemsize
        if view.dtype is not base.dtype or start < 0 or start + view.type.bytes > base.type.bytes:
            raise PlanError(f"{view!r} is no view of {base!r} at element {offset}")
        where = self._place(base)
        if self._place(view) != Place(where.offset + start, where.base):
            raise PlanError(f"view %{view.name} is at {self._place(view)}, but %{base.name}, at "
                            f"{where}, has it {start} bytes in")
        root, inner = self.roots[base]
        self.roots[view] = (root, inner + start)

    def _step(self, name: str, step: Step) -> None:
        node, kernel = step.kernel.node, step.kernel
        for value in node.inputs:
            self._read(f"{name} reads %{value.name}", value, self._place(value))
        written = [(f"its result %{value.name}", self._place(value), value.type.bytes)
                   for value in node.outputs]
        if kernel.workspace:
            if step.workspace is None:
                raise PlanError(f"{name} has no place for its workspace")
            written.append(("its workspace", step.workspace, kernel.workspace))
        for what, place, size in written:
            self._writable(f"{name} writes {what}", place, size)
        self._check_sharing(name, kernel, written)
        for value in node.outputs:
            self.roots[value] = (value, 0)
            self._write(self._place(value), value.type.bytes, value, self._place(value).offset)
        if kernel.workspace:
            self._write(step.workspace, kernel.workspace, f"the workspace of {name}", 0)

    def _check_sharing(self, name: str, kernel: Kernel, written) -> None:
        """What a kernel writes is disjoint, and off its operands but where it may work in place."""
        buffers: dict[str | None, tuple[list, list]] = {}
        for index, (what, place, size) in enumerate(written):
            buffers.setdefault(place.base, ([], []))[0].append((index, what, place, size))
        for position, value in enumerate(kernel.node.inputs):
            base = self._place(value).base
            buffers.setdefault(base, ([], []))[1].append((position, value))
        pairs = set(kernel.inplace)
        for results, operands in buffers.values():
            for (_, a, *first), (_, b, *second) in combinations(results, 2):
                if _overlap(*first, *second):
                    raise PlanError(f"{name}: {a} overlaps {b}")
            for (index, what, place, size), (position, value) in product(results, operands):
                self._check_inplace(f"{name}: {what}", place, size, value,
                                    (index, position) in pairs)

    def _check_inplace(self, what: str, place: Place, size: int, value: Value,
                       allowed: bool) -> None:
        """A result overlaps an operand only where the kernel allows, and then exactly."""
        operand = self._place(value)
        if not _overlap(place, size, operand, value.type.bytes):
            return
        if not allowed:
            raise PlanError(f"{what} overlaps operand %{value.name}, which the kernel does not "
                            "allow")
        if place != operand or size != value.type.bytes:
            raise PlanError(f"{what} overlaps a part of operand %{value.name}")

    def _copies(self) -> None:
        for copy in self.plan.copies:
            name = f"the copy {copy.source} → {copy.target}"
            self._inside(name, copy.source, copy.size)
            self._writable(name, copy.target, copy.size)
            if _overlap(copy.source, copy.size, copy.target, copy.size):
                raise PlanError(f"{name} of {copy.size} bytes overlaps itself")
            shift = copy.target.offset - copy.source.offset
            for start, stop, content, origin in self._memory(copy.source).stretches(
                    copy.source.offset, copy.size):
                self._write(Place(start + shift, copy.target.base), stop - start, content,
                            origin + shift)

    def _results(self) -> None:
        """Every output is whole at the end, and every input that is not donated unchanged."""
        function = self.function
        for name, value in zip(function.output_names, function.outputs, strict=True):
            if name not in self.plan.results:
                raise PlanError(f"output {name} has no place")
            self._read(f"output {name} is %{value.name}", value, self.plan.results[name])
        for name, output in function.donations.items():
            value, taker = function.input(name), function.output(output)
            if taker.type.bytes != value.type.bytes:
                raise PlanError(f"input %{name} is donated to output {output} of another size")
            self._read(f"donated input %{name} ends as output {output}", taker, Place(0, name))
        for value in function.inputs:
            if value.name not in function.donations:
                self._read(f"input %{value.name} is not donated", value, Place(0, value.name))

    def _read(self, what: str, value: Value, place: Place) -> None:
        """The bytes at a place are those of a value, all of them."""
        self._inside(what, place, value.type.bytes)
        if value not in self.roots:
            raise PlanError(f"{what} before it is made")
        root, inner = self.roots[value]
        for start, stop, content, origin in self._memory(place).stretches(
                place.offset, value.type.bytes):
            if content is not root or origin != place.offset - inner:
                found = f"%{content.name}" if isinstance(content, Value) else content
                if content is root:
                    found = f"another part of %{root.name}"
                raise PlanError(f"{what} at bytes {start} to {stop} of "
                                f"{self._memory(place).name}, which hold {found}")

    def _writable(self, what: str, place: Place, size: int) -> None:
        self._inside(what, place, size)
        if place.base is not None and place.base not in self.function.donations:
            raise PlanError(f"{what} over input %{place.base}, which is not donated")
        if place.offset % ALIGNMENT:
            raise PlanError(f"{what} at byte {place.offset}, which is not a multiple of "
                            f"{ALIGNMENT}")

    def _inside(self, what: str, place: Place, size: int) -> None:
        memory = self._memory(place)
        if place.offset < 0 or place.offset + size > memory.size:
            raise PlanError(f"{what} at bytes {place.offset} to {place.offset + size} of "
                            f"{memory.name}, which has {memory.size}")

    def _write(self, place: Place, size: int, content: Value | str, origin: int) -> None:
        if size:
            self._memory(place).write(place.offset, size, content, origin)

    def _memory(self, place: Place) -> _Memory:
        if place.base is None:
            return self.arena
        if place.base not in self.buffers:
            raise PlanError(f"{place} is in the buffer of no input")
        return self.buffers[place.base]

    def _place(self, value: Value) -> Place:
        if value not in self.plan.places:
            raise PlanError(f"%{value.name} has no place")
        return self.plan.places[value]


def _overlap(a: Place, a_size: int, b: Place, b_size: int) -> bool:
    return (a.base == b.base and min(a_size, b_size) > 0
            and a.offset < b.offset + b_size and b.offset < a.offset + a_size)


def _check_blocks(plan: Plan) -> None:
    """The blocks, which say what is alive when, cover every value that is made in the arena, and
    the stated lower bound and size are theirs."""
    blocks = {value: block for block in plan.blocks for value in block.values}
    last_use, roots = _uses(plan)
    for number, step in enumerate(plan.steps):
        for value in step.kernel.node.outputs:
            if plan.places[value].base is not None:
                continue
            block = blocks.get(value)
            if block is None or plan.places[value].offset != block.offset:
                raise PlanError(f"%{value.name} lies in the arena, but in no block")
            if not (block.first <= number and last_use[value] <= block.last
                    and value.type.bytes <= block.size):
                raise PlanError(f"%{value.name} is alive from step {number} to {last_use[value]}, "
                                f"which its block does not cover: {block}")
    _check_disjoint(plan.blocks)
    live = _live_bytes(plan.blocks)
    if max(live, default=0) != plan.lower_bound:
        raise PlanError(f"the lower bound is {max(live, default=0)} bytes, not {plan.lower_bound}")
    if plan.lower_bound > plan.arena_bytes:
        raise PlanError(f"an arena of {plan.arena_bytes} bytes is below its lower bound")


def _check_disjoint(blocks: tuple[Block, ...]) -> None:
    """No two blocks have a byte and a step in common."""
    used = [block for block in blocks if block.size]
    start, size, first, last = np.array(
        [(block.offset, block.size, block.first, block.last) for block in used],
        np.int64).reshape(-1, 4).T
    for index, block in enumerate(used[:-1]):
        rest = slice(index + 1, None)
        clash = ((start[rest] < block.offset + block.size)
                 & (start[rest] + size[rest] > block.offset)
                 & (first[rest] <= block.last) & (last[rest] >= block.first))
        if clash.any():
            raise PlanError(f"{block} overlaps {used[index + 1 + int(np.argmax(clash))]}")


def _uses(plan: Plan) -> tuple[dict[Value, int], dict[Value, Value]]:
    """The last step that needs each value or a view of it."""
    roots: dict[Value, Value] = {}
    for node in plan.function.nodes:
        is_view = node.op.alias(*(value.type for value in node.inputs)) is not None
        for value in node.outputs:
            roots[value] = roots.get(node.inputs[0], node.inputs[0]) if is_view else value
    last: dict[Value, int] = {}
    for number, step in enumerate(plan.steps):
        for value in (*step.kernel.node.inputs, *step.kernel.node.outputs):
            last[roots.get(value, value)] = number
    for value in plan.function.outputs:
        last[roots.get(value, value)] = len(plan.steps)
    return last, roots


def _live_bytes(blocks: tuple[Block, ...]) -> list[int]:
    """Bytes alive at each step, sizes rounded up to the alignment."""
    changes: dict[int, int] = {}
    for block in blocks:
        size = (block.size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        changes[block.first] = changes.get(block.first, 0) + size
        changes[block.last + 1] = changes.get(block.last + 1, 0) - size
    live, now = [], 0
    for step in sorted(changes):
        now += changes[step]
        live.append(now)
    return live
