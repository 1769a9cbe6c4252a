"""Micro-kernels: one register tile of C, in the two forms that a matmul on a CPU takes.

*Outer product.* The tile's rows x (vectors·lanes) sums stay in registers while p runs: each step
loads a row of B (`vectors` vectors), broadcasts `rows` numbers of A and does rows·vectors fused
multiply-adds. Two multiply-add units with 4 cycles of latency want at least 8 independent sums, and
loads must not outnumber them, so the tile is as large as the registers allow (`outer_tile`).

*Dot product.* Where A has a handful of rows (one token being decoded) and B is stored [n, k], each
number of B is used too rarely to pay for transposing it. The vectors then run along k, read both
matrices as they lie, and are added across lanes at the end.

Both write a whole tile; where that is not all inside C, the caller has it written elsewhere.
"""

from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import scalar_emitter as se
from backends.llvm.emit import (
    address,
    constant,
    fma,
    item_bytes,
    load,
    load_lanes,
    loop,
    maybe_loop,
    minimum,
    prefetch,
    prefix_mask,
    splat,
    store,
)
from backends.llvm.folding import BLOCK, fold
from backends.llvm.target import Target
from euler_ir.types import DType

__all__ = [
    "Tile", "dot_columns", "dot_rows", "emit_dot", "emit_outer", "outer_sums", "outer_tile",
]  # fmt: skip

# How far ahead of its use B is asked for where it is read as it lies, a short run in each row.
_PREFETCH_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """A register tile: `rows` x (`vectors` of `lanes`) sums."""

    rows: int
    vectors: int
    lanes: int

    @property
    def width(self) -> int:
        """Columns of C that the tile covers."""
        return self.vectors * self.lanes


def outer_tile(target: Target, item_bytes: int, m: int, n: int) -> Tile:
    """The tile for C[m, n]: what fills the registers, or all of m if that is less.

    Measured on one Zen 3 core, operands in L1 (peak 94 GFLOP/s): 6x2 vectors 93 GFLOP/s, 4x3 81 to
    92, 5x2 92. On AVX-512 14x2 fills 28 of 32 registers. With fewer rows than that, more vectors
    side by side keep enough sums in flight and read longer runs of B.
    """
    lanes = target.lanes(item_bytes)
    if target.registers < 32:
        rows, by_rows = 6, {1: 8, 2: 4, 3: 4}
    elif target.vector_bytes == 64:
        rows, by_rows = 14, {1: 8, 2: 8, 3: 8, 4: 4, 5: 4, 6: 4}
    else:
        rows, by_rows = 8, {1: 8, 2: 8, 3: 6, 4: 4}
    rows = min(rows, m)
    vectors = min(by_rows.get(rows, 2), -(-n // lanes))
    return Tile(rows, vectors, lanes)


def emit_outer(
    function: ir.Function,
    b: ir.IRBuilder,
    vector: ir.VectorType,
    tile: Tile,
    a_strides: tuple[int, int],
    b_stride: int,
    out_stride: int,
    adds: bool,
) -> None:
    """`void f(a, b, depth, out, first)`: out[r, j] = sum over p < depth of a[r, p]·b[p, j], p
    ascending. A kernel that `adds` adds the sums to those in `out`, unless they are the `first`.

    `a_strides` are those of (r, p), `b_stride` that of p, `out_stride` that of r, all constants:
    every address in the loop is then one register plus a displacement, and A needs no packing to
    be read fast.
    """
    a, b_matrix, depth, out, first = function.args
    scalar = vector.element
    ahead = _PREFETCH_ROWS if b_stride > tile.width else 0
    sums = outer_sums(b, vector, tile, a, b_matrix, depth, a_strides, b_stride, ahead)
    for r in range(tile.rows):
        for v in range(tile.vectors):
            place = address(b, out, constant(r * out_stride + v * tile.lanes), scalar)
            value = sums[r * tile.vectors + v]
            if adds:
                value = b.select(first, value, b.fadd(load(b, place, vector), value))
            store(b, value, place)


def outer_sums(
    b: ir.IRBuilder,
    vector: ir.VectorType,
    tile: Tile,
    a: ir.Value,
    b_matrix: ir.Value,
    depth: ir.Value,
    a_strides: tuple[int, int],
    b_stride: int,
    ahead: int = 0,
) -> list[ir.Value]:
    """The sums of an outer-product tile, row after row, in registers; operands as in `emit_outer`.

    Row p + `ahead` of B is prefetched where `ahead` is not 0.
    """
    scalar = vector.element
    zero = ir.Constant(vector, None)
    with loop(b, depth, 1, [zero] * (tile.rows * tile.vectors)) as (p, sums):
        a_column = address(b, a, b.mul(p, constant(a_strides[1])), scalar)
        b_row = address(b, b_matrix, b.mul(p, constant(b_stride)), scalar)
        if ahead:
            for start in range(0, tile.width, 64 // item_bytes(scalar)):
                place = constant(ahead * b_stride + start)
                prefetch(b, address(b, b_row, place, scalar))
        b_vectors = [
            load(b, address(b, b_row, constant(v * tile.lanes), scalar), vector)
            for v in range(tile.vectors)
        ]
        for r in range(tile.rows):
            number = load(b, address(b, a_column, constant(r * a_strides[0]), scalar), scalar)
            a_vector = splat(b, number, tile.lanes)
            for v, b_vector in enumerate(b_vectors):
                i = r * tile.vectors + v
                sums[i] = fma(b, a_vector, b_vector, sums[i])
    return sums


def dot_rows(target: Target) -> int:
    """Rows of A in a dot-product tile at most: rows·4 sums, rows vectors of A and one of B."""
    return 3 if target.registers < 32 else 6


def dot_columns(rows: int) -> int:
    """Columns in a dot-product tile: at least 8 sums in flight."""
    return 8 if rows == 1 else 4


def emit_dot(
    function: ir.Function, b: ir.IRBuilder, dtype: DType, tile: Tile, k: int, out_stride: int
) -> None:
    """`void f(a, b, columns, depth, out)`: out[r, j] = a[r, :depth]·b[j, :depth] for j < width and
    rows k numbers apart.

    `columns` >= 1 of them exist; the last is repeated for those that do not. The order of addition
    is fixed: lane l sums p = l, l + lanes, … of a block of p, then the blocks' sums are added to a
    total, then lanes pairwise. Only where `depth` reaches k is it no multiple of the lanes.
    """
    a, b_matrix, columns, depth, out = function.args
    vector = se.value_type(dtype, tile.lanes)
    scalar, lanes, rows, width = vector.element, tile.lanes, tile.rows, tile.width
    last_column = b.sub(columns, constant(1))
    group = dot_columns(rows)
    zeros = [ir.Constant(vector, None)] * (rows * group)
    rest = b.urem(depth, constant(lanes))
    whole = b.sub(depth, rest)

    def accumulate(pointers, p, sums, mask):
        a_vectors = [
            load_lanes(b, address(b, a, b.add(p, constant(r * k)), scalar), vector, mask)
            for r in range(rows)
        ]
        for j, pointer in enumerate(pointers):
            b_vector = load_lanes(b, address(b, pointer, p, scalar), vector, mask)
            for r, a_vector in enumerate(a_vectors):
                sums[j * rows + r] = fma(b, a_vector, b_vector, sums[j * rows + r])

    with loop(b, constant(width), group) as (first, _):
        pointers = []
        for j in range(group):
            column = minimum(b, b.add(first, constant(j)), last_column)
            pointers.append(address(b, b_matrix, b.mul(column, constant(k)), scalar))
        with maybe_loop(b, whole, BLOCK * lanes, zeros) as (start, totals):
            count = minimum(b, constant(BLOCK * lanes), b.sub(whole, start))
            with loop(b, count, lanes, zeros) as (p, sums):
                accumulate(pointers, b.add(start, p), sums, None)
            totals[:] = [b.fadd(total, value) for total, value in zip(totals, sums, strict=True)]
        if k % lanes:
            with maybe_loop(b, rest, lanes, totals) as (_, totals):
                accumulate(pointers, whole, totals, prefix_mask(lanes, k % lanes))
        out_column = address(b, out, first, scalar)
        for j in range(group):
            for r in range(rows):
                place = address(b, out_column, constant(r * out_stride + j), scalar)
                store(b, fold(b, "sum", [totals[j * rows + r]], dtype), place)
