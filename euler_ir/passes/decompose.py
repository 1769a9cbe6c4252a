"""Replace composite ops by the ops they are made of, where the backend has no kernel for them."""

from __future__ import annotations

from collections.abc import Collection

from euler_ir.graph import Function
from euler_ir.op import Composite
from euler_ir.passes.rewriter import Rewriter


def decompose(function: Function, kernels: Collection[str] = ()) -> Function:
    """`kernels` names the composites that stay. Repeats until none is left."""
    while True:
        found = False
        with Rewriter(function) as rewriter:
            for node in function.nodes:
                if not isinstance(node.op, Composite) or node.op.name in kernels:
                    rewriter.keep(node)
                    continue
                found = True
                rewriter.note(node)
                results = node.op.decompose(rewriter, *rewriter.operands(node))
                rewriter.replace(node.outputs,
                                 results if isinstance(results, (list, tuple)) else [results])
            function = rewriter.finish()
        if not found:
            return function
