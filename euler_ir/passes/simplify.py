"""Algebraic clean-up: rules that replace a node by an existing value or a simpler node.

Only rules that hold for every value, NaN and infinities included: x · 0 is not 0. `x + 0` is taken
for x although it turns -0 into +0, which no op of ours tells apart except division.
"""

from __future__ import annotations

from collections.abc import Callable

from euler_ir import ops
from euler_ir.graph import Function, Node, Value
from euler_ir.op import Op
from euler_ir.passes.rewriter import Rewriter

#: Nodes by the current values they define, for looking at a node's operands.
Producers = dict[Value, Node]
Rule = Callable[[Rewriter, Producers, Op, tuple[Value, ...]], Value | None]


def simplify(function: Function) -> Function:
    """Apply the rules in one forward walk; each sees its operands already simplified."""
    with Rewriter(function) as rewriter:
        producers: Producers = {}
        for node in function.nodes:
            operands = rewriter.operands(node)
            rewriter.note(node)
            rule = _RULES.get(type(node.op))
            first_new = len(rewriter.nodes)
            result = rule(rewriter, producers, node.op, operands) if rule else None
            if result is None:
                rewriter.keep(node)
            else:
                rewriter.replace(node.outputs, [result])
            for made in rewriter.nodes[first_new:]:
                producers.update(dict.fromkeys(made.outputs, made))
        return rewriter.finish()


def _constant(producers: Producers, value: Value) -> float | None:
    node = producers.get(value)
    return node.op.value if node is not None and isinstance(node.op, ops.Full) else None


def _of(producers: Producers, value: Value, op_class: type[Op]) -> Node | None:
    """The node that defines the value, if it is of this class."""
    node = producers.get(value)
    return node if node is not None and isinstance(node.op, op_class) else None


def _add(b, producers, op, operands):
    x, y = operands
    if _constant(producers, y) == 0.0:
        return x
    return y if _constant(producers, x) == 0.0 else None


def _mul(b, producers, op, operands):
    x, y = operands
    if _constant(producers, y) == 1.0:
        return x
    return y if _constant(producers, x) == 1.0 else None


def _sub(b, producers, op, operands):
    return operands[0] if _constant(producers, operands[1]) == 0.0 else None


def _div(b, producers, op, operands):
    return operands[0] if _constant(producers, operands[1]) == 1.0 else None


def _neg(b, producers, op, operands):
    inner = _of(producers, operands[0], ops.Neg)
    return inner.inputs[0] if inner else None


def _cast(b, producers, op, operands):
    return operands[0] if operands[0].dtype is op.dtype else None


def _reshape(b, producers, op, operands):
    (x,) = operands
    if x.shape == op.shape:
        return x
    simpler = _constant(producers, x) is not None or _of(producers, x, ops.Reshape)
    return _reshaped(b, producers, x, op.shape) if simpler else None


def _reshaped(b, producers, x: Value, shape: tuple[int, ...]) -> Value:
    """x under another shape, seen through earlier reshapes."""
    value = _constant(producers, x)
    if value is not None:
        return b.full(value, x.dtype, shape)
    inner = _of(producers, x, ops.Reshape)
    return b.reshape(inner.inputs[0] if inner else x, shape)


def _broadcast(b, producers, op, operands):
    (x,) = operands
    if x.shape == op.shape:
        return x
    value = _constant(producers, x)
    if value is not None:
        return b.full(value, x.dtype, op.shape)
    inner = _of(producers, x, ops.Broadcast)
    return b.broadcast(inner.inputs[0], op.shape) if inner else None


def _transpose(b, producers, op, operands):
    (x,) = operands
    identity = tuple(range(len(x.shape)))
    if op.permutation == identity:
        return x
    if sum(n != 1 for n in x.shape) <= 1:
        return _reshaped(b, producers, x, tuple(x.shape[axis] for axis in op.permutation))
    inner = _of(producers, x, ops.Transpose)
    if inner is None:
        return None
    permutation = tuple(inner.op.permutation[axis] for axis in op.permutation)
    source = inner.inputs[0]
    return source if permutation == identity else b.transpose(source, permutation)


def _slice(b, producers, op, operands):
    (x,) = operands
    return x if op.infer(x.type)[0] == x.type else None


def _concat(b, producers, op, operands):
    return operands[0] if len(operands) == 1 else None


def _pad(b, producers, op, operands):
    return operands[0] if op.shape == operands[0].shape else None


def _reduce(b, producers, op, operands):
    """Reducing axes of extent 1 chooses or adds nothing."""
    (x,) = operands
    if all(x.shape[axis] == 1 for axis in op.axes):
        return _reshaped(b, producers, x, op.reduced(x.shape))
    return None


_RULES: dict[type[Op], Rule] = {
    ops.Add: _add, ops.Sub: _sub, ops.Mul: _mul, ops.Div: _div, ops.Neg: _neg, ops.Cast: _cast,
    ops.Reshape: _reshape, ops.Broadcast: _broadcast, ops.Transpose: _transpose,
    ops.Slice: _slice, ops.Concat: _concat, ops.Pad: _pad,
    ops.ReduceSum: _reduce, ops.ReduceMax: _reduce, ops.ReduceMin: _reduce,
}
