"""Which function makes a node's kernel: one table, filled by the modules that have kernels.

    @lowers(ops.Gather)
    def gather(node: Node, target: Target) -> KernelSource: ...

A row for a class serves its subclasses too, so pointwise and row ops from anywhere need none of
their own.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.llvm.access import RowProgram
from backends.llvm.kernel import KernelSource
from backends.llvm.row import row_kernel
from backends.llvm.row_trace import trace_node
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.errors import EulerError
from euler_ir.graph import Node
from euler_ir.op import Composite, Op, Pointwise, Row

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


@lowers(Pointwise, Row)
def _row(node: Node, target: Target) -> KernelSource:
    return _row_kernel(node, trace_node(node), target)


@lowers(ops.Fused)
def _fused(node: Node, target: Target) -> KernelSource:
    if node.op.kind == "matmul":
        from backends.llvm.matmul import fused_matmul
        return fused_matmul(node, target)
    return _row(node, target)


def _row_kernel(node: Node, program: RowProgram, target: Target) -> KernelSource:
    """The row kernel; operands of another size than a result never share its memory."""
    source = row_kernel(program, target)
    pairs = [(o, i) for o, i in source.inplace
             if node.inputs[i].type.bytes == node.outputs[o].type.bytes]
    # An operand given twice is traced as one of its places: all of them may be overwritten.
    same = [(o, j) for o, i in pairs for j, value in enumerate(node.inputs)
            if value is node.inputs[i]]
    return KernelSource(source.key, source.phases, source.emit, source.workspace_bytes,
                        source.scratch_bytes, tuple(dict.fromkeys(same)))
