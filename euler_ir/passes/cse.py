"""Common subexpression elimination: equal ops on equal operands are computed once.

Every op is a pure function of its operands (random bits are keyed by operands too), so this is
always right. A value that takes over a donated input's memory stays where it is: an equal one from
earlier would overwrite the input before its readers are done."""

from __future__ import annotations

from euler_ir.graph import Function
from euler_ir.passes.rewriter import Rewriter


def eliminate_common_subexpressions(function: Function) -> Function:
    rewriter = Rewriter(function)
    known: dict = {}
    takers = {function.output(name) for name in function.donations.values()}
    for node in function.nodes:
        key = (node.op, rewriter.operands(node))
        if key in known and takers.isdisjoint(node.outputs):
            rewriter.replace(node.outputs, known[key])
        else:
            known[key] = node.outputs
            rewriter.keep(node)
    return rewriter.finish()
