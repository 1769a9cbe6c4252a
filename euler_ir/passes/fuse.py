"""Fusion of pointwise and row ops into row kernels.

Nodes over one row space (…, C) become one kernel that reads each operand once: producers and
consumers, and siblings that share an operand. What never costs a kernel of its own is copied into
those that use it: broadcasts and constants (a zero stride, an immediate) and non-contiguous slices
(an offset). A concatenation along the last axis of a kernel's results becomes stores at column
offsets. The result is one `fused` node a kernel; its body says what it does.

Two groups may merge if no path leads from one to the other through a node outside both.
"""

from __future__ import annotations

import heapq
import math

from euler_ir import ops
from euler_ir.graph import Function, Node, Value
from euler_ir.op import Pointwise, Row
from euler_ir.passes.extract import COPIED, fused_node

#: Elements that an operand must have for two kernels to be merged because both read it.
_SIBLING_SIZE = 2048


class _Group:
    """Nodes that will be one kernel, as positions in the function. With `whole_rows` there are row
    ops among them, which reduce over the last axis of the space as it is."""

    def __init__(self, node: Node, position: int) -> None:
        self.space = _row_space(node)
        self.whole_rows = isinstance(node.op, Row)
        self.members = [position]
        self.first = self.last = position

    def absorb(self, other: _Group) -> None:
        self.whole_rows |= other.whole_rows
        self.members += other.members
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)


class _Fusion:
    def __init__(self, function: Function) -> None:
        self.function = function
        self.consumers = function.consumers()
        self.producers = function.producers()
        self.position = {node: i for i, node in enumerate(function.nodes)}
        self.groups = [_Group(node, i) for i, node in enumerate(function.nodes)]
        #: The positions of the nodes that must come after each node.
        self.readers = [{self.position[user] for value in node.outputs
                         for user in self.consumers[value]} for node in function.nodes]
        for reader, writer in function.anti_dependences():
            self.readers[self.position[reader]].add(self.position[writer])

    def run(self) -> Function:
        for node in self.function.nodes:
            if self._group(node).space is None:
                continue
            for candidate in self._neighbours(node):
                mine, other = self._group(node), self._group(candidate)
                space = _common_space(mine, other)
                if mine is not other and space is not None and self._independent(mine, other):
                    self._merge(mine, other, space)
        for node in self.function.nodes:
            self._absorb_concat(node)
        return self.function.replace(nodes=tuple(self._emit()))

    def _group(self, node: Node) -> _Group:
        return self.groups[self.position[node]]

    def _neighbours(self, node: Node) -> list[Node]:
        """Fusable producers of the node's operands, then earlier siblings that share one as large
        as the row space (smaller ones cost little to read twice)."""
        producers, siblings = [], []
        # Small siblings gain nothing and may tie together what a larger fusion needs apart.
        size = max(math.prod(self._group(node).space), _SIBLING_SIZE)
        for value in self._read_through(node):
            producer = self.producers.get(value)
            if producer is not None and self._group(producer).space is not None:
                producers.append(producer)
            if value.type.size >= size:
                # Of one segment: a kernel of both passes would keep alive what is recomputed.
                siblings += [user for user in self._users(value)
                             if self.position[user] < self.position[node]
                             and user.segment == node.segment
                             and self._group(user).space is not None]
        return list(dict.fromkeys(reversed(producers))) + list(dict.fromkeys(reversed(siblings)))

    def _read_through(self, node: Node) -> list[Value]:
        """The node's operands, seen through what is copied into its kernel."""
        values = []
        for value in node.inputs:
            producer = self.producers.get(value)
            if producer is not None and _is_copied(producer):
                values += producer.inputs
            else:
                values.append(value)
        return values

    def _users(self, value: Value) -> list[Node]:
        users = []
        for user in self.consumers[value]:
            users += self.consumers[user.outputs[0]] if _is_copied(user) else [user]
        return users

    def _independent(self, a: _Group, b: _Group) -> bool:
        """No path between the groups through a third: merging them leaves no cycle."""
        limit = max(a.last, b.last)
        inside = (a, b)
        seen: set[_Group] = set(inside)
        stack = [group for source in inside for group in self._successors(source)
                 if group not in inside]
        while stack:
            group = stack.pop()
            if group in seen or group.first > limit:
                continue
            seen.add(group)
            for successor in self._successors(group):
                if successor in inside:
                    return False
                stack.append(successor)
        return True

    def _successors(self, group: _Group) -> set[_Group]:
        groups = self.groups
        return {groups[reader] for i in group.members for reader in self.readers[i]} - {group}

    def _merge(self, a: _Group, b: _Group, space: tuple[int, ...]) -> None:
        a.space = space
        a.absorb(b)
        for i in b.members:
            self.groups[i] = a

    def _absorb_concat(self, node: Node) -> None:
        """Let the group that makes all pieces of a last-axis concatenation store them in place."""
        if not isinstance(node.op, ops.Concat) or node.op.axis != len(node.output.shape) - 1:
            return
        makers = [self.producers.get(value) for value in node.inputs]
        if None in makers or len(set(node.inputs)) != len(node.inputs):
            return
        group, own = self._group(makers[0]), self._group(node)
        if group.space is None or any(self._group(maker) is not group for maker in makers) or any(
                value.shape != group.space for value in node.inputs):
            return
        if self._independent(group, own):
            self._merge(group, own, group.space)

    def _emit(self) -> list[Node]:
        """One node a group, in an order that respects dependences, else that of the text."""
        groups = list(dict.fromkeys(self.groups))
        waiting = {group: 0 for group in groups}
        successors = {group: self._successors(group) for group in groups}
        for group in groups:
            for successor in successors[group]:
                waiting[successor] += 1
        ready = [(group.last, group.first, group) for group in groups if not waiting[group]]
        heapq.heapify(ready)
        nodes = []
        while ready:
            _, _, group = heapq.heappop(ready)
            nodes.append(self._kernel(group))
            for successor in successors[group]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    heapq.heappush(ready, (successor.last, successor.first, successor))
        return nodes

    def _kernel(self, group: _Group) -> Node:
        members = [self.function.nodes[i] for i in sorted(group.members)]
        if group.space is None:
            return members[0]
        defined = {value for node in members for value in node.outputs}
        copied = dict.fromkeys(
            producer for node in members for value in node.inputs
            if value not in defined and (producer := self.producers.get(value)) is not None
            and _is_copied(producer))
        if len(members) == 1 and not copied:
            return members[0]
        inside = set(members)
        outputs = set(self.function.outputs)
        results = [value for value in defined if value in outputs or any(
            user not in inside for user in self.consumers[value])]
        return fused_node("row", [*copied, *members], results)


def fuse_rows(function: Function) -> Function:
    """Copied nodes that end up without readers are left for dead code elimination."""
    return _Fusion(function).run()


def _is_copied(node: Node) -> bool:
    """Broadcasts, constants and non-contiguous slices: read in place by the kernels using them."""
    if isinstance(node.op, ops.Slice):
        return node.op.alias(node.inputs[0].type) is None
    return isinstance(node.op, COPIED)


def _row_space(node: Node) -> tuple[int, ...] | None:
    """The row space a node computes over, None for nodes that are never fused."""
    if isinstance(node.op, Pointwise) and not isinstance(node.op, ops.Full):
        return node.outputs[0].shape if node.inputs else None
    if isinstance(node.op, Row):
        types = [value.type for value in node.inputs]
        space = node.op.space(*types)
        # Column sums of a single row look like a value of its, to be read in the same kernel.
        sums = any(expr.op == "column_sum" for expr in node.op.trace(*types))
        return None if sums and len(space) == 1 else space
    return None


def _common_space(a: _Group, b: _Group) -> tuple[int, ...] | None:
    """The row space of a merged group: equal ones, or one that holds a value a row of the other
    (unless that is a row of its own to a row op)."""
    if a.space is None or b.space is None or len(a.space) != len(b.space):
        return None
    if a.space == b.space or _holds_row_values(b, a):
        return a.space
    return b.space if _holds_row_values(a, b) else None


def _holds_row_values(group: _Group, of: _Group) -> bool:
    return group.space == of.space[:-1] + (1,) and not group.whole_rows
