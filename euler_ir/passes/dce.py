"""Dead code elimination: drop nodes none of whose results is needed."""

from __future__ import annotations

from euler_ir.graph import Function


def eliminate_dead_code(function: Function) -> Function:
    needed = set(function.outputs)
    kept = []
    for node in reversed(function.nodes):
        if any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return function.replace(nodes=tuple(reversed(kept)))
