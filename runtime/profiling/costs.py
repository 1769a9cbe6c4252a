"""What a node must do at least: arithmetic and memory traffic, to hold measured times against.

Arithmetic counts as is usual: a multiply and an add are two operations, exp is one. Traffic counts
every operand and result once, as if nothing were in a cache and nothing were read twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from euler_ir import ops, scalar
from euler_ir.graph import Node
from euler_ir.op import Pointwise, Row

#: Scalar expressions that move or choose, but compute nothing.
_FREE = frozenset({"input", "const", "index", "linear", "cast", "bitcast", "select", "roll"})
#: Operations an element of AdamW's update, of the global norm and of a sum.
_ADAMW, _NORM, _SUM = 16, 2, 1


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes."""

    flops: int
    bytes: int


def cost(node: Node) -> Cost:
    """The least work of a node."""
    return Cost(_flops(node), _bytes(node))


def _flops(node: Node) -> int:
    op, types = node.op, [value.type for value in node.inputs]
    match op:
        case ops.Fused():
            return sum(map(_flops, op.body.nodes))
        case ops.Matmul():
            inner = types[0].shape[-2 if op.transpose_a else -1]
            return 2 * node.output.type.size * inner
        case ops.Attention():
            return 2 * _attention_matmul(types)
        case ops.AttentionBackward():
            return 5 * _attention_matmul(types)
        case Pointwise():
            size = node.outputs[0].type.size
            return size * len(_computing(op.trace(*types)))
        case Row():
            space = op.space(*types)
            rows = math.prod(space[:-1])
            return sum(rows * (space[-1] if expr.varies or expr.op in scalar.REDUCTIONS else 1)
                       for expr in _computing(op.trace(*types)))
        case ops.AdamW():
            return _ADAMW * sum(type.size for type in types[:op.count])
        case ops.GlobalNorm():
            return _NORM * sum(type.size for type in types)
        case ops.ReduceSum() | ops.ReduceMax() | ops.ReduceMin():
            return _SUM * types[0].size
    return 0


def _attention_matmul(types) -> int:
    """One of attention's products, over all query heads. The mask is taken for causal where there
    are as many queries as keys, and then leaves out half; ranges are data, not known here."""
    (batch, queries, heads, width), keys = types[0].shape, types[1].shape[1]
    whole = 2 * batch * heads * queries * keys * width
    return whole // 2 if queries == keys else whole


def _computing(exprs) -> list[scalar.Expr]:
    return [expr for expr in scalar.topological(exprs) if expr.op not in _FREE]


def _bytes(node: Node) -> int:
    op, result = node.op, node.outputs[0].type.bytes
    match op:
        case ops.Gather():  # not the whole table
            return 2 * result + node.inputs[1].type.bytes
        case ops.UpdateSlice():  # in place: not the whole buffer
            return 2 * node.inputs[1].type.bytes
        case ops.DynamicSlice():
            return 2 * result
    values = dict.fromkeys((*node.inputs, *node.outputs))
    return sum(value.type.bytes for value in values)
