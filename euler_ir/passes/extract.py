"""Turning a set of nodes into one `fused` node with a nested function as its body."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from euler_ir import ops
from euler_ir.graph import Function, Node, Value
from euler_ir.ops.fused import Fused

#: Ops without a cost of their own: kernels that use them take a copy along.
COPIED = (ops.Broadcast, ops.Full)


def fused_node(kind: str, nodes: Sequence[Node], results: Collection[Value]) -> Node:
    """A node that runs `nodes` (in order) and gives those of their values that are in `results`.

    Its operands are the values the nodes read from outside, in order of first use. The body names
    values by number, so that equal kernels have equal bodies wherever they stand."""
    names: dict[Value, Value] = {}

    def renamed(value: Value, prefix: str) -> Value:
        return names.setdefault(value, Value(f"{prefix}{len(names)}", value.type))

    defined = {value for node in nodes for value in node.outputs}
    operands = tuple(dict.fromkeys(
        value for node in nodes for value in node.inputs if value not in defined))
    inputs = tuple(renamed(value, "x") for value in operands)
    body_nodes = tuple(
        Node(node.op, tuple(names[value] for value in node.inputs),
             tuple(renamed(value, "v") for value in node.outputs), node.source)
        for node in nodes)
    outputs = tuple(value for node in nodes for value in node.outputs if value in results)
    body = Function(kind, inputs, body_nodes, tuple(names[value] for value in outputs),
                    tuple(map(str, range(len(outputs)))))
    noted = next((node for node in nodes if node.source), nodes[0])
    return Node(Fused(kind, body), operands, outputs, noted.source, noted.segment)
