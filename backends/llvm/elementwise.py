"""Lowerings of everything written in the scalar language: pointwise, row and fused nodes."""

from __future__ import annotations

from dataclasses import replace

from backends.llvm.access import RowProgram
from backends.llvm.kernel import KernelSource
from backends.llvm.lowering import lowers
from backends.llvm.matmul import fused_matmul
from backends.llvm.row import row_kernel
from backends.llvm.row_trace import trace_node
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node
from euler_ir.op import Pointwise, Row

__all__ = ["node_kernel"]


@lowers(Pointwise, Row)
def _row(node: Node, target: Target) -> KernelSource:
    return node_kernel(node, trace_node(node), target)


@lowers(ops.Fused)
def _fused(node: Node, target: Target) -> KernelSource:
    return (fused_matmul if node.op.kind == "matmul" else _row)(node, target)


def node_kernel(node: Node, program: RowProgram, target: Target) -> KernelSource:
    """The kernel of a node that is this row program."""
    source = row_kernel(program, target)
    # Only whole buffers of one size can share memory.
    pairs = [(o, i) for o, i in source.inplace
             if node.inputs[i].type.bytes == node.outputs[o].type.bytes]
    # An operand given twice is traced as one of its places: all of them may be overwritten.
    same = [(o, j) for o, i in pairs for j, value in enumerate(node.inputs)
            if value is node.inputs[i]]
    return replace(source, inplace=tuple(dict.fromkeys(same)))
