"""The optimizer's kernels: one launch for all tensors.

Tiles are stretches of single tensors. Which stretch of which tensor a tile is stands in constant
tables of the kernel, so a hundred tensors of all sizes keep every core as busy as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.emit import I64, constant
from backends.llvm.folding import fold
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node
from euler_ir.scalar import Expr, topological
from euler_ir.types import F64, I32, DType

__all__ = ["adamw", "global_norm"]

_TILE_ELEMENTS = 16 * 1024
_TILES_MOST = 4096
_VECTORS = 4  # accumulators side by side


@dataclass(frozen=True)
class _Tiles:
    """Each tile's tensor, its first element, and how many it has."""

    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], lanes: int) -> _Tiles:
        grain = max(_TILE_ELEMENTS, -(-sum(sizes) // _TILES_MOST))
        grain = -(-grain // lanes) * lanes
        stretches = [(tensor, start, min(grain, size - start))
                     for tensor, size in enumerate(sizes) for start in range(0, size, grain)]
        return cls(*zip(*stretches, strict=True)) if stretches else cls((), (), ())

    def locate(self, b: ir.IRBuilder, tile: ir.Value):
        """The tensor's number, the first element and the count of a tile, as i64 values."""
        return tuple(table_entry(b, name, values, tile) for name, values in (
            ("tensors", self.tensors), ("starts", self.starts), ("counts", self.counts)))


def table_entry(b: ir.IRBuilder, name: str, values: Sequence[int], index: ir.Value) -> ir.Value:
    """values[index], from a constant table of the function's own."""
    kind = ir.ArrayType(I64, len(values))
    table = ir.GlobalVariable(b.module, kind, f"{b.function.name}_{name}")
    table.linkage, table.global_constant = "internal", True
    table.initializer = ir.Constant(kind, list(values))
    return b.load(e.address(b, table, index, I64), typ=I64)


@lowers(ops.GlobalNorm)
def global_norm(node: Node, target: Target) -> KernelSource:
    """Sums of squares in f64, one a tile, then their sum in the order of the tiles."""
    dtype, result = node.inputs[0].dtype, node.output.dtype
    sizes = [value.type.size for value in node.inputs]
    lanes = target.lanes(8)
    tiles = _Tiles.of(sizes, lanes * _VECTORS)
    count = len(tiles.tensors)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        if count:
            b, args, tile, _ = e.kernel(module, symbols[0])
            tensor, start, elements = tiles.locate(b, tile)
            first = e.address(b, e.operand(b, args, tensor), start, se.storage_type(dtype))
            workspace = e.operand(b, args, len(sizes) + 1)
            total = _sum_of_squares(b, first, elements, dtype, lanes)
            e.store(b, total, e.address(b, workspace, tile, total.type))
            b.ret_void()
        b, args, _, _ = e.kernel(module, symbols[-1])
        sums = [se.constant_value(0.0, F64)]
        if count:
            workspace = e.operand(b, args, len(sizes) + 1)
            with e.loop(b, constant(count), 1, sums) as (i, sums):
                pointer = e.address(b, workspace, i, sums[0].type)
                sums[0] = b.fadd(sums[0], e.load(b, pointer, sums[0].type))
        total = Expr("input", (), F64, 0)
        norm = Expr("sqrt", (total,), F64).cast(result)
        value = se.evaluate(b, [norm], {total: sums[0]})[0]
        se.store(b, value, e.operand(b, args, len(sizes)), result)
        b.ret_void()

    phases = ((Phase("squares", count),) if count else ()) + (Phase("norm", 1),)
    return KernelSource(f"global_norm {dtype} {sizes} x{target.vector_bytes}", phases, emit,
                        workspace_bytes=8 * count)


def _sum_of_squares(b: ir.IRBuilder, first: ir.Value, elements: ir.Value, dtype: DType,
                    lanes: int) -> ir.Value:
    """Σ x² in f64 of a stretch: several vectors at a time, then single elements."""
    narrow = Expr("input", (), dtype.compute, 0)
    wide = narrow.cast(F64)
    step = lanes * _VECTORS

    def add_square(total: ir.Value, index: ir.Value, lanes: int) -> ir.Value:
        x = se.load(b, e.address(b, first, index, se.storage_type(dtype)), dtype, lanes)
        x = se.evaluate(b, [wide], {narrow: x}, lanes)[0]
        return e.fma(b, x, x, total)

    sums = [se.constant_value(0.0, F64, lanes)] * _VECTORS
    whole = b.mul(b.udiv(elements, constant(step)), constant(step))
    with e.maybe_loop(b, whole, step, sums) as (index, sums):
        for v in range(_VECTORS):
            sums[v] = add_square(sums[v], b.add(index, constant(v * lanes)), lanes)
    total = [fold(b, "sum", sums, F64)]
    with e.maybe_loop(b, b.sub(elements, whole), 1, total) as (index, total):
        total[0] = add_square(total[0], b.add(whole, index), 1)
    return total[0]


@lowers(ops.AdamW)
def adamw(node: Node, target: Target) -> KernelSource:
    """Every tile updates a stretch of a parameter and its moments; the scalars' part of the
    expressions is computed once a tile."""
    op, dtype = node.op, node.inputs[0].dtype
    sizes = [value.type.size for value in node.inputs[:op.count]]
    lanes = target.lanes(dtype.itemsize)
    tiles = _Tiles.of(sizes, lanes)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        if symbols:
            _AdamWEmitter(op, dtype, lanes, tiles).emit(module, symbols[0])

    phases = (Phase("update", len(tiles.tensors)),) if tiles.tensors else ()
    return KernelSource(f"{op!r} {dtype} {sizes} x{target.vector_bytes}", phases, emit,
                        inplace=op.renewed)


class _AdamWEmitter:
    def __init__(self, op: ops.AdamW, dtype: DType, lanes: int, tiles: _Tiles):
        self.op, self.dtype, self.lanes, self.tiles = op, dtype, lanes, tiles
        kinds = [dtype] * 6 + [I32, dtype, dtype]
        self.leaves = [Expr("input", (), kind, i) for i, kind in enumerate(kinds)]
        self.results = op.update(*self.leaves)
        self.elements, self.scalars = self.leaves[:4], self.leaves[4:]
        #: What does not depend on an element.
        self.shared = [x for x in topological(self.results) if self._is_shared(x)]

    def _is_shared(self, x: Expr) -> bool:
        return not any(leaf in self.elements for leaf in se.leaves(x)) and x.op != "const"

    def emit(self, module: ir.Module, symbol: str) -> None:
        b, args, tile, _ = e.kernel(module, symbol)
        n = self.op.count
        tensor, start, count = self.tiles.locate(b, tile)
        shared = self.shared_values(b, args, tensor)
        places = [b.add(tensor, constant(group * n)) for group in range(4)]
        places += [b.add(tensor, constant(4 * n + 4 + group * n)) for group in range(3)]
        item = se.storage_type(self.dtype)
        pointers = [e.address(b, e.operand(b, args, place), start, item) for place in places]

        def update(index: ir.Value, lanes: int) -> None:
            at = [e.address(b, pointer, index, item) for pointer in pointers]
            values = {x: e.splat(b, value, lanes) if lanes > 1 else value
                      for x, value in shared.items()}
            for x, pointer in zip(self.elements, at, strict=False):
                values[x] = se.load(b, pointer, self.dtype, lanes)
            results = se.evaluate(b, self.results, values, lanes)
            for value, pointer in zip(results, at[4:], strict=True):
                se.store(b, value, pointer, self.dtype)

        whole = b.mul(b.udiv(count, constant(self.lanes)), constant(self.lanes))
        with e.maybe_loop(b, whole, self.lanes) as (index, _):
            update(index, self.lanes)
        with e.maybe_loop(b, b.sub(count, whole), 1) as (index, _):
            update(b.add(whole, index), 1)
        b.ret_void()

    def shared_values(self, b: ir.IRBuilder, args: ir.Value,
                      tensor: ir.Value) -> dict[Expr, ir.Value]:
        """The tensor's decay, the scalar operands, and what is computed from them alone."""
        decay, *scalars = self.scalars
        kind = se.value_type(self.dtype)
        table_type = ir.ArrayType(kind, self.op.count)
        table = ir.GlobalVariable(b.module, table_type, f"{b.function.name}_decay")
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(table_type, list(self.op.decay))
        values = {decay: e.load(b, e.address(b, table, tensor, kind), kind)}
        for i, x in enumerate(scalars):
            values[x] = se.load(b, e.operand(b, args, 4 * self.op.count + i), x.dtype)
        results = se.evaluate(b, self.shared, values)
        return dict(zip(self.shared, results, strict=True))
