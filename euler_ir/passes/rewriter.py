"""What passes build new functions with: a builder that starts from an old function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from euler_ir.builder import Builder
from euler_ir.graph import Function, Node, Value


class Rewriter(Builder):
    """Walk the old function's nodes, `keep` or replace each, then `finish`.

    Values that stay are the old function's own; new ones get fresh names. The rewriter is active
    for arithmetic on values while it is used as a context."""

    def __init__(self, function: Function) -> None:
        super().__init__(function.name)
        self._function = function
        self._inputs = list(function.inputs)
        self._names = {value.name for value in function.values()}
        self._counter = 1 + max((int(n) for n in self._names if n.isdigit()), default=-1)
        self._replaced: dict[Value, Value] = {}

    def current(self, value: Value) -> Value:
        """What stands for an old value now."""
        return self._replaced.get(value, value)

    def operands(self, node: Node) -> tuple[Value, ...]:
        return tuple(self.current(value) for value in node.inputs)

    def keep(self, node: Node) -> None:
        """Take the node over, reading the current values of its operands."""
        operands = self.operands(node)
        if operands != node.inputs:
            node = dataclasses.replace(node, inputs=operands)
        self._nodes.append(node)

    def note(self, node: Node) -> None:
        """Give what is appended from here on the notes of this node."""
        self.source, self.segment = node.source, node.segment

    def replace(self, old: Sequence[Value], new: Sequence[Value]) -> None:
        """From here on the new values stand for the old ones."""
        self._replaced.update(zip(old, new, strict=True))

    def finish(self) -> Function:
        outputs = tuple(self.current(value) for value in self._function.outputs)
        return self._function.replace(nodes=tuple(self._nodes), outputs=outputs)
