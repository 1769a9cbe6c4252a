"""From IR nodes to row programs: every op of a kernel traced to one expression DAG.

The trace runs from the results back to the operands. It carries, for each value, which axis of the
kernel's space each of the value's axes follows; views (broadcasts, slices of an operand, axes of
extent 1 that come and go) change only that, and end up in the operands' strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from backends.llvm.access import Access, Interner, RowProgram, row_major
from euler_ir import ops, scalar
from euler_ir.graph import Node, Value
from euler_ir.op import Pointwise, Row
from euler_ir.scalar import Expr
from euler_ir.types import I32, U32

__all__ = ["trace_function", "trace_node"]

#: For each axis of a value the axis of the space that it follows; None for an extent of 1.
Axes = tuple[int | None, ...]


def trace_node(node: Node) -> RowProgram:
    """The row program of one pointwise or row node, or of a fused node of kind 'row'."""
    if isinstance(node.op, ops.Fused):
        return trace_function(node.op.body.inputs, node.op.body.nodes, node.op.body.outputs)
    return trace_function(node.inputs, (node,), node.outputs)


def trace_function(inputs: Sequence[Value], nodes: Sequence[Node],
                   outputs: Sequence[Value]) -> RowProgram:
    """The row program of straight-line nodes. Its kernel's args are the inputs, then the outputs.

    Raises ValueError for what is no row program: the pass that fused the nodes is at fault."""
    return _Tracer(inputs, nodes, outputs).trace()


class _Tracer:
    def __init__(self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value]):
        self.nodes, self.outputs = nodes, outputs
        # A value may be given twice; either place serves.
        self.arguments = {value: i for i, value in enumerate(inputs)}
        self.first_output = len(inputs)
        self.producers = {value: node for node in nodes for value in node.outputs}
        self.space = _space(nodes)
        self.interner = Interner(self.space[-1])
        self.memo: dict[tuple, Expr | tuple[Expr, ...]] = {}

    def trace(self) -> RowProgram:
        self.trace_in_order()
        stores, sums = [], []
        for i, value in enumerate(self.outputs):
            argument = self.first_output + i
            producer = self.producers.get(value)
            if producer is not None and isinstance(producer.op, ops.Concat):
                stores += self.pieces(producer, argument)
                continue
            axes = self.result_axes(value)
            if axes is None:
                sums.append((self.column_sum(value), self.access(value, argument,
                                                                 (len(self.space) - 1,))))
            else:
                stores.append((self.expr(value, axes), self.access(value, argument, axes)))
        return RowProgram(self.space, tuple(self.interner.loads), tuple(stores), tuple(sums))

    def trace_in_order(self) -> None:
        """Trace nodes that lie in the space as it is, first to last: without this, the way back
        from the results would go as deep as the longest chain."""
        for node in self.nodes:
            shape = node.outputs[0].shape
            if isinstance(node.op, (Pointwise, Row)) and len(shape) == len(self.space) and all(
                    n in (1, extent) for n, extent in zip(shape, self.space, strict=True)):
                self.node_exprs(node, tuple(None if n == 1 else i for i, n in enumerate(shape)))

    def result_axes(self, value: Value) -> Axes | None:
        """How a result follows the space; None for a column sum."""
        producer = self.producers.get(value)
        if producer is not None and isinstance(producer.op, Row):
            place = producer.outputs.index(value)
            whole = tuple(range(len(self.space)))
            if self.node_exprs(producer, whole)[place].op == "column_sum":
                return None
        for shape in (self.space, self.space[:-1] + (1,)):
            axes = _follow(shape, value.shape, tuple(range(len(shape))))
            if axes is not None:
                return axes
        raise ValueError(f"{value!r} is no result of a row kernel over {self.space}")

    def column_sum(self, value: Value) -> Expr:
        """What is summed over the rows."""
        producer = self.producers[value]
        exprs = self.node_exprs(producer, tuple(range(len(self.space))))
        return exprs[producer.outputs.index(value)].args[0]

    def pieces(self, node: Node, argument: int) -> list[tuple[Expr, Access]]:
        """A concatenation that leaves the kernel: each piece a store beside the others."""
        result, axis, place = node.output, node.op.axis, 0
        strides = row_major(result.shape)
        stores = []
        for piece in node.inputs:
            if piece.shape != self.space or axis != len(self.space) - 1:
                raise ValueError(f"{piece!r} is no piece of a row kernel over {self.space}")
            axes = tuple(range(len(self.space)))
            stores.append((self.expr(piece, axes),
                           Access(argument, result.dtype, strides, place * strides[axis])))
            place += piece.shape[axis]
        return stores

    def expr(self, value: Value, axes: Axes) -> Expr:
        """The expression of a value whose axes follow the space so."""
        key = (value, axes)
        if key not in self.memo:
            self.memo[key] = self._expr(value, axes)
        return self.memo[key]

    def _expr(self, value: Value, axes: Axes) -> Expr:
        if value in self.arguments:
            return self.interner.leaf(self.access(value, self.arguments[value], axes))
        node = self.producers[value]
        match node.op:
            case ops.Broadcast():
                operand = node.inputs[0]
                kept = axes[len(axes) - len(operand.shape):]
                return self.expr(operand, tuple(
                    None if n == 1 else axis for n, axis in zip(operand.shape, kept, strict=True)))
            case ops.Reshape():
                inner = _follow(value.shape, node.inputs[0].shape, axes)
                if inner is None:
                    raise ValueError(f"{node!r} is no view in a row kernel")
                return self.expr(node.inputs[0], inner)
            case ops.Slice():
                return self.slice(node, axes)
        return self.node_exprs(node, axes)[node.outputs.index(value)]

    def slice(self, node: Node, axes: Axes) -> Expr:
        """A part of an operand: other strides than a tensor of the part's shape, and an offset."""
        operand = node.inputs[0]
        if operand not in self.arguments:
            raise ValueError(f"{node!r} cuts no operand of the kernel")
        whole = self.access(operand, self.arguments[operand], axes)
        return self.interner.leaf(Access(whole.argument, whole.dtype, whole.strides,
                                         node.op.offset(operand.shape)))

    def node_exprs(self, node: Node, axes: Axes) -> tuple[Expr, ...]:
        """All results of a pointwise or row node whose results follow the space so."""
        last = len(self.space) - 1
        if isinstance(node.op, Row):
            axes = axes[:-1] + (last,)
        key = (node, axes)
        if key not in self.memo:
            operands = [self.expr(value, self.operand_axes(value, axes)) for value in node.inputs]
            coordinates = {}
            if isinstance(node.op, Row):
                columns = node.op.space(*(value.type for value in node.inputs))[-1]
                if columns != self.space[-1]:
                    raise ValueError(f"{node!r} has another row than the kernel's {self.space}")
                results = node.op.row(scalar.RowContext(columns), *operands)
                coordinates["index"] = Access(None, I32, (0,) * last + (int(columns != 1),))
            else:
                results = node.op.scalar(*operands)
                strides = self.strides(node.outputs[0].shape, axes)
                coordinates["linear"] = Access(None, U32, strides)
            results = results if isinstance(results, (tuple, list)) else (results,)
            self.memo[key] = tuple(self.interner.intern(expr, coordinates) for expr in results)
        return self.memo[key]

    def operand_axes(self, value: Value, axes: Axes) -> Axes:
        """The axes of an operand that broadcasts against a node's results."""
        kept = axes[len(axes) - len(value.shape):]
        return tuple(None if n == 1 else axis for n, axis in zip(value.shape, kept, strict=True))

    def access(self, value: Value, argument: int, axes: Axes) -> Access:
        return Access(argument, value.dtype, self.strides(value.shape, axes))

    def strides(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """A tensor's own strides, put where its axes lie in the space."""
        result = [0] * len(self.space)
        for stride, axis in zip(row_major(shape), axes, strict=True):
            if axis is not None:
                result[axis] += stride
        return tuple(result)


def _space(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The space of a kernel: that of its row ops, else the largest shape among its results."""
    best: tuple[int, ...] = ()
    for node in nodes:
        if isinstance(node.op, Row):
            return node.op.space(*(value.type for value in node.inputs))
        if isinstance(node.op, (Pointwise, ops.Broadcast)):
            shape = node.outputs[0].shape
            if not best or math.prod(shape) > math.prod(best):
                best = shape
    return best or (1,)


def _follow(shape: tuple[int, ...], other: tuple[int, ...], axes: Axes) -> Axes | None:
    """The axes of a tensor of shape `other` with the elements of one of `shape` that follows
    `axes`, where the shapes differ in extents of 1 only; else None."""
    remaining = [(n, axis) for n, axis in zip(shape, axes, strict=True) if n != 1]
    result: list[int | None] = []
    for extent in other:
        if extent == 1:
            result.append(None)
        elif remaining and remaining[0][0] == extent:
            result.append(remaining.pop(0)[1])
        else:
            return None
    return tuple(result) if not remaining else None
