"""Activation checkpointing: compute a segment's values again in the backward pass instead of
keeping them from the forward pass (Chen et al. 2016, arXiv:1604.06174).

Of a recomputed layer only its input lives until its gradients are due; all else that they read is
computed anew from it just before. The copies run the same ops on the same operands, so gradients
are the same to the bit; the price is one more forward pass of the layer.
"""

from __future__ import annotations

from collections.abc import Collection

from euler_ir.graph import Function, Node, Value
from euler_ir.passes.rewriter import Rewriter

_BACKWARD = " backward"


def recompute(function: Function, segments: Collection[str]) -> Function:
    """`segments` are names that the builder gave (`Node.segment`). Must not be followed by CSE,
    which would find that the copies equal what they are copies of."""
    if not segments:
        return function
    copied = _copies(function, segments)
    with Rewriter(function) as rewriter:
        for node in function.nodes:
            for original in copied.get(node, ()):
                rewriter.note(original)
                rewriter.segment = f"{original.segment} again"
                results = rewriter.apply(original.op, *rewriter.operands(original))
                rewriter.replace(original.outputs,
                                 results if isinstance(results, tuple) else (results,))
            rewriter.keep(node)
        return rewriter.finish()


def _copies(function: Function, segments: Collection[str]) -> dict[Node, list[Node]]:
    """The nodes to copy, in order, before the node that first needs one of the copies."""
    consumers, outputs = function.consumers(), set(function.outputs)
    position = {node: i for i, node in enumerate(function.nodes)}
    result: dict[Node, list[Node]] = {}
    for segment in segments:
        own = [node for node in function.nodes if node.segment == segment]
        inside = set(own)
        kept, lost, readers = set(), set(), []
        for node in own:
            for value in node.outputs:
                outside = [user for user in consumers[value] if user not in inside]
                if value in outputs or any(not user.segment.endswith(_BACKWARD)
                                           for user in outside):
                    kept.add(value)  # the rest of the forward pass reads it: it lives on anyway
                elif outside:
                    lost.add(value)
                    readers += outside
        if lost:
            first = min(readers, key=position.__getitem__)
            result.setdefault(first, []).extend(_needed(own, lost, kept))
    return result


def _needed(own: list[Node], lost: set[Value], kept: set[Value]) -> list[Node]:
    """The segment's nodes that the lost values are computed by, from the kept ones on."""
    wanted, needed = set(lost), []
    for node in reversed(own):
        if any(value in wanted for value in node.outputs):
            needed.append(node)
            wanted.update(value for value in node.inputs if value not in kept)
    return needed[::-1]
