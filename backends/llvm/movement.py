"""Kernels of the ops that move data: views made whole, concatenation, padding, cache writes.

What changes only where elements lie (transpose, slice, broadcast) is a row program that reads its
operand with other strides and computes nothing. The rest are copies of stretches of memory.
"""

from __future__ import annotations

import math

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm.access import Access, RowProgram, row_major
from backends.llvm.chain import Part, chain, side_by_side
from backends.llvm.elementwise import node_kernel
from backends.llvm.emit import I32, I64, constant
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.row import row_kernel
from backends.llvm.target import Target
from euler_ir import ops, scalar
from euler_ir.graph import Node
from euler_ir.scalar import Expr
from euler_ir.types import TensorType

__all__ = ["copy_kernel"]

_TILE_BYTES = 256 * 1024


def copy_kernel(size: int) -> KernelSource:
    """`size` bytes from the first argument to the second."""

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        b, args, tile, _ = e.kernel(module, symbols[0])
        _copy_tile(b, e.operand(b, args, 1), e.operand(b, args, 0), tile, size)
        b.ret_void()

    return KernelSource(f"copy {size}", _phases(copy=-(-size // _TILE_BYTES)), emit)


@lowers(ops.Transpose)
def transpose(node: Node, target: Target) -> KernelSource:
    strides = row_major(node.inputs[0].shape)
    return _reading(node, target, tuple(strides[axis] for axis in node.op.permutation))


@lowers(ops.Slice)
def slice_(node: Node, target: Target) -> KernelSource:
    shape = node.inputs[0].shape
    return _reading(node, target, row_major(shape), node.op.offset(shape))


@lowers(ops.Broadcast)
def broadcast(node: Node, target: Target) -> KernelSource:
    strides = row_major(node.inputs[0].shape)
    return _reading(node, target, (0,) * (len(node.op.shape) - len(strides)) + strides)


def _reading(node: Node, target: Target, strides: tuple[int, ...],
             offset: int = 0) -> KernelSource:
    """The kernel that makes a node's result of its operand's elements at these strides."""
    result = node.output.type
    read = Access(0, result.dtype, strides, offset)
    return node_kernel(node, _copy_program(result.shape, read, _written(result, 1)), target)


def _written(result: TensorType, argument: int, offset: int = 0) -> Access:
    return Access(argument, result.dtype, row_major(result.shape), offset)


def _copy_program(space: tuple[int, ...], read: Access, write: Access) -> RowProgram:
    if not space:  # a scalar is a row of one
        space = (1,)
        read, write = (Access(a.argument, a.dtype, (0,), a.offset) for a in (read, write))
    element = Expr("input", (), read.dtype.compute, 0)
    return RowProgram(space, (read,), ((element, write),))


@lowers(ops.Concat)
def concat(node: Node, target: Target) -> KernelSource:
    """Every operand to its place in the result, side by side."""
    result, place, parts = node.output.type, 0, []
    strides = row_major(result.shape)
    for i, value in enumerate(node.inputs):
        read = Access(i, result.dtype, row_major(value.shape))
        write = Access(len(node.inputs), result.dtype, strides, place * strides[node.op.axis])
        parts.append(row_kernel(_copy_program(value.shape, read, write), target))
        place += value.shape[node.op.axis]
    return side_by_side("concat", parts)


@lowers(ops.Pad)
def pad(node: Node, target: Target) -> KernelSource:
    """Zeros everywhere, then the operand in its place."""
    operand, result = node.inputs[0].type, node.output.type
    zero = scalar.const(0, result.dtype)
    space = result.shape or (1,)
    fill = RowProgram(space, (), ((zero, Access(1, result.dtype, row_major(space))),))
    strides = row_major(result.shape)
    offset = sum(start * step for start, step in zip(node.op.starts, strides, strict=True))
    write = Access(1, result.dtype, strides, offset)
    read = Access(0, result.dtype, row_major(operand.shape))
    copy = _copy_program(operand.shape, read, write)
    return chain("pad", [Part(row_kernel(program, target), (0, 1)) for program in (fill, copy)])


@lowers(ops.UpdateSlice)
def update_slice(node: Node, target: Target) -> KernelSource:
    """The buffer, unless the result already is it, then the new rows."""
    buffer, new = node.inputs[0].type, node.inputs[1].type
    run = _Rows(buffer, new.shape[node.op.axis], node.op.axis)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        b, args, tile, _ = e.kernel(module, symbols[0])
        source, result = e.operand(b, args, 0), e.operand(b, args, 3)
        with b.if_then(b.icmp_unsigned("!=", b.ptrtoint(source, I64), b.ptrtoint(result, I64))):
            _copy_tile(b, result, source, tile, buffer.bytes)
        b.ret_void()
        if not new.bytes:
            return
        b, args, tile, _ = e.kernel(module, symbols[1])
        whole, part, count, _, _ = run.locate(b, args, tile, position=2)
        with b.if_then(b.icmp_signed(">", count, constant(0))):
            e.copy_bytes(b, e.bytes_after(b, e.operand(b, args, 3), whole),
                         e.bytes_after(b, e.operand(b, args, 1), part), count)
        b.ret_void()

    phases = _phases(copy=-(-buffer.bytes // _TILE_BYTES), write=run.tiles if new.bytes else 0)
    return KernelSource(f"update_slice {buffer} {new} axis {node.op.axis}", phases, emit,
                        inplace=((0, 0),))


@lowers(ops.DynamicSlice)
def dynamic_slice(node: Node, target: Target) -> KernelSource:
    """Rows from where the position says, zeros where there are none."""
    x, axis, size = node.inputs[0].type, node.op.axis, node.op.size
    run = _Rows(x, size, axis)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        b, args, tile, _ = e.kernel(module, symbols[0])
        result = e.operand(b, args, 2)
        whole, part, count, first, rows = run.locate(b, args, tile, position=1)
        e.clear_bytes(b, e.bytes_after(b, result, first), b.mul(rows, constant(run.row_bytes)))
        with b.if_then(b.icmp_signed(">", count, constant(0))):
            e.copy_bytes(b, e.bytes_after(b, result, part),
                         e.bytes_after(b, e.operand(b, args, 0), whole), count)
        b.ret_void()

    key = f"dynamic_slice {x} axis {axis} size {size}"
    return KernelSource(key, _phases(copy=run.tiles if node.output.type.bytes else 0), emit)


class _Rows:
    """`size` rows along an axis of a tensor from a position on that is known at run time only,
    beside the tensor of these rows alone. A tile is a block of the rows of one outer index."""

    def __init__(self, whole: TensorType, size: int, axis: int):
        self.size, self.extent = size, whole.shape[axis]
        self.row_bytes = math.prod(whole.shape[axis + 1:]) * whole.dtype.itemsize
        self.outer = math.prod(whole.shape[:axis])
        self.block = min(max(_TILE_BYTES // max(self.row_bytes, 1), 1), max(size, 1))
        self.blocks = -(-size // self.block)

    @property
    def tiles(self) -> int:
        return self.outer * self.blocks

    def locate(self, b: ir.IRBuilder, args: ir.Value, tile: ir.Value, position: int):
        """Byte offsets of the tile's rows in the whole and in the part, and how many bytes lie in
        both; then the byte offset and the number of all the tile's rows in the part."""
        place = b.sext(b.load(e.operand(b, args, position), typ=I32, align=4), I64)
        outer, block = e.divide(b, tile, self.blocks)
        row0 = b.mul(block, constant(self.block))
        stop = e.minimum(b, b.add(row0, constant(self.block)), constant(self.size))
        low = e.maximum(b, row0, b.neg(place))
        high = e.minimum(b, stop, b.sub(constant(self.extent), place))

        def offset(extent: int, row: ir.Value) -> ir.Value:
            index = b.add(b.mul(outer, constant(extent)), row)
            return b.mul(index, constant(self.row_bytes))

        whole, part = offset(self.extent, b.add(place, low)), offset(self.size, low)
        count = b.mul(b.sub(high, low), constant(self.row_bytes))
        return whole, part, count, offset(self.size, row0), b.sub(stop, row0)


def _copy_tile(b: ir.IRBuilder, target: ir.Value, source: ir.Value, tile: ir.Value,
               size: int) -> None:
    start = b.mul(tile, constant(_TILE_BYTES))
    count = e.minimum(b, b.sub(constant(size), start), constant(_TILE_BYTES))
    e.copy_bytes(b, e.bytes_after(b, target, start), e.bytes_after(b, source, start), count)


def _phases(**tiles: int) -> tuple[Phase, ...]:
    """Phases by name, those without tiles left out."""
    return tuple(Phase(name, count) for name, count in tiles.items() if count)
