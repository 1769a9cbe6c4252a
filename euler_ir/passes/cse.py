"""Common subexpression elimination: equal ops on equal operands are computed once.

Every op is a pure function of its operands (random bits are keyed by operands too), so this is
always right."""

from __future__ import annotations

from euler_ir.graph import Function
from euler_ir.passes.rewriter import Rewriter


def eliminate_common_subexpressions(function: Function) -> Function:
    rewriter = Rewriter(function)
    known: dict = {}
    for node in function.nodes:
        key = (node.op, rewriter.operands(node))
        if key in known:
            rewriter.replace(node.outputs, known[key])
        else:
            known[key] = node.outputs
            rewriter.keep(node)
    return rewriter.finish()
