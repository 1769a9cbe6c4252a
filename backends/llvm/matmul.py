"""Matmul nodes, alone or with pointwise ops on their result, as calls of the gemm emitter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.access import Access, RowProgram
from backends.llvm.chain import Part, Temporary, aligned, chain
from backends.llvm.emit import constant
from backends.llvm.epilogue import Epilogue, EpilogueContext
from backends.llvm.gemm import gemm
from backends.llvm.kernel import KernelSource
from backends.llvm.lowering import lowers
from backends.llvm.row import row_kernel
from backends.llvm.row_plan import merge_axes, program_text
from backends.llvm.row_trace import trace_function
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.errors import EulerError
from euler_ir.graph import Node
from euler_ir.scalar import Expr
from euler_ir.types import F32, DType, TensorType

__all__ = ["fused_matmul", "matmul"]


@lowers(ops.Matmul)
def matmul(node: Node, target: Target) -> KernelSource:
    """The kernel of a Matmul node."""
    return _kernel(node, target, None, [0, 1, 2])


def fused_matmul(node: Node, target: Target) -> KernelSource:
    """The kernel of a fused node of kind 'matmul': the body's first node, and an epilogue."""
    body = node.op.body
    product, *rest = body.nodes
    if not isinstance(product.op, ops.Matmul) or len(body.outputs) != 1:
        raise ValueError(f"{node!r}: the body is no matmul followed by pointwise ops")
    if body.outputs[0].type != product.output.type:
        raise ValueError(f"{node!r}: the epilogue's result is not of the matmul's type")
    program = trace_function((*body.inputs, product.output), rest, body.outputs)
    epilogue = _Epilogue(program, product_argument=len(body.inputs))
    # An operand may serve twice, as in x·x or x·w + x, so gemm's args are chosen from the node's.
    order = [body.inputs.index(value) for value in product.inputs]
    order += [*epilogue.operands, len(body.inputs)]
    return _kernel(product, target, epilogue.for_gemm(), order)


def _kernel(product: Node, target: Target, epilogue: Epilogue | None,
            order: list[int]) -> KernelSource:
    """gemm on the args in this order: A, B, the epilogue's operands, C."""
    a, b, result = (value.type for value in (*product.inputs, product.output))
    source = _gemm(product, target, epilogue)
    if a.dtype.compute is not a.dtype:
        return _widened(product, source, target, order)
    inplace = tuple((o, order[i]) for o, i in source.inplace if order.count(order[i]) == 1)
    if order == list(range(len(order))):
        return replace(source, inplace=inplace)
    own = [Temporary(0)] * (source.workspace_bytes > 0)
    return chain("matmul", [Part(source, (*order, *own))], order[-1] + 1, source.workspace_bytes,
                 inplace)


def _gemm(product: Node, target: Target, epilogue: Epilogue | None) -> KernelSource:
    a, b = (value.type for value in product.inputs)
    if not a.dtype.is_float:
        raise EulerError(f"the llvm backend multiplies matrices of floats, not {a.dtype} "
                         f"({product!r})")
    m, n = product.output.shape[-2:]
    k = a.shape[-2] if product.op.transpose_a else a.shape[-1]
    return gemm(target, a.dtype.compute, math.prod(a.shape[:-2]), m, n, k,
                product.op.transpose_a, product.op.transpose_b,
                shared_b=len(b.shape) == 2 and len(a.shape) > 2, epilogue=epilogue)


def _widened(product: Node, source: KernelSource, target: Target,
             order: list[int]) -> KernelSource:
    """A product of 16-bit matrices: both brought to f32 in the workspace, the result back."""
    types = [value.type for value in (*product.inputs, product.output)]
    places, end = [], 0
    for kind in types:
        places.append(Temporary(end))
        end += aligned(4 * kind.size)
    a, b, c = places
    parts = [Part(_conversion(kind, F32, target), (order[i], places[i]))
             if i < 2 else Part(_conversion(kind.with_dtype(F32), kind.dtype, target),
                                (c, order[-1])) for i, kind in enumerate(types)]
    own = [Temporary(end)] * (source.workspace_bytes > 0)
    middle = Part(source, (a, b, *order[2:-1], c, *own))
    return chain("matmul", [*parts[:2], middle, parts[2]], order[-1] + 1,
                 end + source.workspace_bytes)


def _conversion(source: TensorType, dtype: DType, target: Target) -> KernelSource:
    """A tensor in another float type."""
    read = Access(0, source.dtype, (1,))
    element = Expr("input", (), source.dtype.compute, 0)
    return row_kernel(RowProgram((source.size,), (read,), ((element, Access(1, dtype, (1,))),)),
                      target)


class _Epilogue:
    """The pointwise ops on a product, as gemm wants them."""

    def __init__(self, program: RowProgram, product_argument: int):
        self.program = merge_axes(program, by_rows=True)
        ((self.result, _),) = self.program.stores
        self.product = product_argument
        accesses = [a for a in self.program.loads if a.argument not in (None, self.product)]
        #: The operands' places among the body's inputs.
        self.operands = sorted({access.argument for access in accesses})
        own = Access(0, F32, self.program.stores[0][1].strides)
        #: Those that are read only where the result is written.
        self.elementwise = tuple(
            i for i, argument in enumerate(self.operands)
            if all((a.strides, a.offset, a.dtype.itemsize) == (own.strides, 0, self.width)
                   for a in accesses if a.argument == argument))
        self.key = program_text(self.program)

    def for_gemm(self) -> Epilogue:
        return Epilogue(self.key, len(self.operands), self.emit, self.elementwise)

    @property
    def width(self) -> int:
        return self.program.stores[0][1].dtype.itemsize

    def emit(self, b: ir.IRBuilder, context: EpilogueContext, value: ir.Value, row: ir.Value,
             column: ir.Value) -> ir.Value:
        indices = self.indices(b, row)
        leaves = {}
        for x in se.leaves(self.result):
            access = self.program.loads[x.value]
            leaves[x] = value if access.argument == self.product else self.load(
                b, context, access, indices, column)
        return se.evaluate(b, [self.result], leaves, context.vector.count)[0]

    def indices(self, b: ir.IRBuilder, row: ir.Value) -> list[ir.Value]:
        """The row's place on each of the outer axes, of which a single row has none."""
        if len(self.program.space) == 1:
            return []
        result, rest = [], row
        for extent in reversed(self.program.space[1:-1]):
            result.insert(0, b.urem(rest, constant(extent)))
            rest = b.udiv(rest, constant(extent))
        return [rest, *result]

    def load(self, b: ir.IRBuilder, context: EpilogueContext, access: Access,
             indices: Sequence[ir.Value], column: ir.Value) -> ir.Value:
        """An operand's values at a vector of columns of a row."""
        stride = access.strides[-1]
        place = constant(access.offset)
        for index, step in zip((*indices, column), access.strides, strict=True):
            if step:
                place = b.add(place, b.mul(index, constant(step)))
        lanes = context.vector.count
        if access.argument is None:
            return se.ramp(b, b.trunc(place, e.I32), stride, lanes)
        pointer = context.operands[self.operands.index(access.argument)]
        pointer = e.address(b, pointer, place, se.storage_type(access.dtype))
        if stride == 1:
            return se.load(b, pointer, access.dtype, lanes, context.mask)
        if stride == 0:
            return e.splat(b, se.load(b, pointer, access.dtype), lanes)
        raise ValueError(f"an epilogue's operand with a stride of {stride} along the columns")
