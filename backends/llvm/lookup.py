"""Table look-up and its gradient."""

from __future__ import annotations

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.emit import I32, I64, constant
from backends.llvm.folding import combine
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node
from euler_ir.types import DType

__all__ = ["gather", "scatter_add"]

_GATHER_BYTES = 64 * 1024  # of a tile's rows
# A scatter's tile sums into this much of the table, which should stay in L2.
_SCATTER_BYTES = 128 * 1024
_SCATTER_TILES = 32  # cut a small table into about so many tiles


@lowers(ops.Gather)
def gather(node: Node, target: Target) -> KernelSource:
    """Rows copied one by one; zeros for an index outside the table."""
    table, indices = (value.type for value in node.inputs)
    row_bytes = table.shape[1] * table.dtype.itemsize
    count = indices.size
    block = max(1, _GATHER_BYTES // max(row_bytes, 1))
    tiles = -(-count // block) if row_bytes else 0

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        b, args, tile, _ = e.kernel(module, symbols[0])
        source, places, result = (e.operand(b, args, i) for i in range(3))
        first = b.mul(tile, constant(block))
        stop = e.minimum(b, constant(block), b.sub(constant(count), first))
        with e.loop(b, stop, 1) as (i, _):
            item = b.add(first, i)
            index = b.sext(b.load(e.address(b, places, item, I32), typ=I32, align=4), I64)
            to = e.bytes_after(b, result, b.mul(item, constant(row_bytes)))
            inside = b.icmp_unsigned("<", index, constant(table.shape[0]))
            with b.if_else(inside, likely=True) as (then, otherwise):
                with then:
                    row = e.bytes_after(b, source, b.mul(index, constant(row_bytes)))
                    e.copy_bytes(b, to, row, constant(row_bytes))
                with otherwise:
                    e.clear_bytes(b, to, constant(row_bytes))
        b.ret_void()

    phases = (Phase("gather", tiles),) if tiles else ()
    return KernelSource(f"gather {table} {indices}", phases, emit)


@lowers(ops.ScatterAdd)
def scatter_add(node: Node, target: Target) -> KernelSource:
    """A tile owns a block of the table's rows: it looks through all indices, in order, for those
    of its rows. So no two tiles write to one place, and every sum has one order.

    16-bit sums are kept in f32 in scratch, and rounded once."""
    indices, updates = (value.type for value in node.inputs)
    emitter = _Scatter(indices.size, node.op.rows, updates.shape[-1], updates.dtype, target)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        emitter.emit(module, symbols[0])

    return KernelSource(
        f"scatter_add {indices} {updates} rows {node.op.rows} x{target.vector_bytes}",
        (Phase("scatter", emitter.tiles),) if emitter.tiles else (), emit,
        scratch_bytes=emitter.block_bytes if emitter.narrow else 0)


class _Scatter:
    def __init__(self, count: int, rows: int, columns: int, dtype: DType, target: Target):
        self.count, self.rows, self.columns, self.dtype = count, rows, columns, dtype
        self.compute, self.narrow = dtype.compute, dtype.compute is not dtype
        self.lanes = target.lanes(self.compute.itemsize)
        self.scan_lanes = target.lanes(4)
        row_bytes = max(columns * self.compute.itemsize, 1)
        block = min(_SCATTER_BYTES // row_bytes, -(-rows // _SCATTER_TILES))
        self.block = max(block, 1)
        self.block_bytes = self.block * row_bytes
        self.tiles = -(-rows // self.block) if columns else 0

    def emit(self, module: ir.Module, symbol: str) -> None:
        b, args, tile, scratch = e.kernel(module, symbol)
        self.indices, self.updates, result = (e.operand(b, args, i) for i in range(3))
        first = b.mul(tile, constant(self.block))
        rows = e.minimum(b, constant(self.block), b.sub(constant(self.rows), first))
        elements = b.mul(rows, constant(self.columns))
        own = e.address(b, result, b.mul(first, constant(self.columns)), self.item)
        self.sums = scratch if self.narrow else own
        e.clear_bytes(b, self.sums, b.mul(elements, constant(self.compute.itemsize)))
        self.scan(b, first, rows)
        if self.narrow:
            with e.loop(b, elements, 1) as (i, _):
                value = se.load(b, self.sum_at(b, i), self.compute)
                se.store(b, value, e.address(b, own, i, self.item), self.dtype)
        b.ret_void()

    @property
    def item(self) -> ir.Type:
        return se.storage_type(self.dtype)

    def sum_at(self, b: ir.IRBuilder, index: ir.Value) -> ir.Value:
        return e.address(b, self.sums, index, se.storage_type(self.compute))

    def scan(self, b: ir.IRBuilder, first: ir.Value, rows: ir.Value) -> None:
        """Go through the indices, a vector of them at a time: most have none of this tile's."""
        lanes = self.scan_lanes
        whole = self.count // lanes * lanes
        low, width = b.trunc(first, I32), b.trunc(rows, I32)
        if whole:
            with e.loop(b, constant(whole), lanes) as (i, _):
                pointer = e.address(b, self.indices, i, I32)
                some = e.load(b, pointer, ir.VectorType(I32, lanes))
                places = b.sub(some, e.splat(b, low, lanes))
                hits = b.icmp_unsigned("<", places, e.splat(b, width, lanes))
                bits = b.bitcast(hits, ir.IntType(lanes))
                with b.if_then(b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))):
                    with e.loop(b, constant(lanes), 1) as (lane, _):
                        self.add_if_mine(b, b.add(i, lane), low, width)
        if whole < self.count:
            with e.loop(b, constant(self.count - whole), 1) as (i, _):
                self.add_if_mine(b, b.add(i, constant(whole)), low, width)

    def add_if_mine(self, b: ir.IRBuilder, item: ir.Value, low: ir.Value,
                    width: ir.Value) -> None:
        index = b.load(e.address(b, self.indices, item, I32), typ=I32, align=4)
        place = b.sub(index, low)
        with b.if_then(b.icmp_unsigned("<", place, width)):
            source = e.address(b, self.updates, b.mul(item, constant(self.columns)), self.item)
            target = self.sum_at(b, b.mul(b.zext(place, I64), constant(self.columns)))
            self.add_row(b, source, target)

    def add_row(self, b: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        whole = self.columns // self.lanes * self.lanes

        def add(column: ir.Value, lanes: int, mask: ir.Constant | None) -> None:
            at = e.address(b, target, column, se.storage_type(self.compute))
            value = se.load(b, e.address(b, source, column, self.item), self.dtype, lanes, mask)
            so_far = se.load(b, at, self.compute, lanes, mask)
            total = combine(b, "sum", so_far, value, self.compute)
            se.store(b, total, at, self.compute, mask)

        if whole:
            with e.loop(b, constant(whole), self.lanes) as (column, _):
                add(column, self.lanes, None)
        if whole < self.columns:
            add(constant(whole), self.lanes, e.prefix_mask(self.lanes, self.columns - whole))


