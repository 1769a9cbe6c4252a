"""Which function makes a node's kernel: one table, filled by the modules that have kernels.

    @lowers(ops.Gather)
    def gather(node: Node, target: Target) -> KernelSource: ...

A row for a class serves its subclasses too, so pointwise and row ops from anywhere need none of
their own.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.llvm.kernel import KernelSource
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.errors import EulerError
from euler_ir.graph import Node
from euler_ir.op import Composite, Op

__all__ = ["LOWERINGS", "lower_node", "lowers", "structure"]

Lowering = Callable[[Node, Target], KernelSource]

#: The lowering of each op class that has one.
LOWERINGS: dict[type[Op], Lowering] = {}


def lowers(*classes: type[Op]) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for op classes."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(classes, function))
        return function

    return register


def lower_node(node: Node, target: Target) -> KernelSource:
    """The kernel of a node that is not a view. EulerError if this backend has none for its op."""
    for kind in type(node.op).__mro__:
        if kind in LOWERINGS:
            return LOWERINGS[kind](node, target)
    hint = " (it is a composite: run the decompose pass first)" if isinstance(
        node.op, Composite) else ""
    raise EulerError(f"the llvm backend has no kernel for {node!r}{hint}")


def structure(node: Node) -> tuple:
    """Equal for nodes that have the same kernel: everything but the names of values."""
    op = node.op
    types = tuple(value.type for value in node.inputs)
    places = tuple(map(node.inputs.index, node.inputs))
    if not isinstance(op, ops.Fused):
        return type(op), repr(op), types, places
    number = {value: i for i, value in enumerate(op.body.inputs)}
    body = []
    for inner in op.body.nodes:
        body.append((type(inner.op), repr(inner.op), tuple(number[v] for v in inner.inputs)))
        for value in inner.outputs:
            number[value] = len(number)
    return op.kind, types, places, tuple(body), tuple(number[v] for v in op.body.outputs)
