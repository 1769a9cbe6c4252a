"""What all attention kernels share: sizes, scratch memory, packing rows and keys, writing results.

The query heads that share a key head are stacked: row i·R + r of a block is query i's head r of R,
so that a key is read, and packed, once for all of them. Tensors may be f32, f64 or 16 bits wide;
what is packed, summed or a statistic is in the type that computes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.folding import fold
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.microkernel import Tile, outer_tile
from backends.llvm.packing import transpose
from backends.llvm.target import Target
from backends.llvm.vector_math import flushed_exp
from euler_ir import scalar
from euler_ir.scalar import Expr
from euler_ir.types import F64, DType, TensorType

__all__ = [
    "LOWEST", "BlockEmitter", "Scratch", "Sizes", "clearing_kernel", "larger", "register_tile",
    "whole",
]  # fmt: skip

# Scores below any that matter, yet finite: a row that has seen no key has no NaN on its way.
LOWEST = -3.0e38

_ALIGNMENT = 64
# More rows and columns than any register tile has.
_MANY = 1024


@dataclass(frozen=True)
class Sizes:
    """q [B,T,H,D], k and v [B,S,G,D] of `dtype`; `repeat` = H/G query heads share a key head."""

    dtype: DType
    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    width: int
    scale: float

    @classmethod
    def of(cls, q: TensorType, k: TensorType, scale: float) -> "Sizes":
        batch, queries, heads, width = q.shape
        return cls(q.dtype, batch, queries, k.shape[1], heads, k.shape[2], width, scale)

    @property
    def repeat(self) -> int:
        return self.heads // self.groups

    @property
    def compute(self) -> DType:
        return self.dtype.compute

    @property
    def empty(self) -> bool:
        """Whether there is nothing to attend, or nothing to attend to."""
        return 0 in (self.batch, self.queries, self.keys, self.heads, self.width)

    def __str__(self) -> str:
        return (f"{self.dtype} B{self.batch} T{self.queries} S{self.keys} H{self.heads} "
                f"G{self.groups} D{self.width} scale={self.scale!r}")


class Scratch:
    """Arrays in a kernel's scratch memory, by name, each starting on a cache line."""

    def __init__(self) -> None:
        self.bytes = 0
        self._arrays: dict[str, tuple[int, ir.Type]] = {}

    def add(self, name: str, items: int, scalar: ir.Type) -> None:
        size = e.item_bytes(scalar)
        self._arrays[name] = (self.bytes // size, scalar)
        self.bytes = -(-(self.bytes + items * size) // _ALIGNMENT) * _ALIGNMENT

    def at(
        self, b: ir.IRBuilder, scratch: ir.Value, name: str, index: ir.Value | int = 0
    ) -> ir.Value:
        """The address of element `index` of an array."""
        start, scalar = self._arrays[name]
        if isinstance(index, int):
            return e.address(b, scratch, constant(start + index), scalar)
        return e.address(b, scratch, b.add(index, constant(start)), scalar)


class BlockEmitter:
    """Base of the attention kernels' emitters: private functions of one module, made on demand.

    `tile` is the register tile: a *strip* of rows by a *panel* of columns.
    """

    def __init__(
        self, target: Target, sizes: Sizes, scratch: Scratch, module: ir.Module, symbol: str
    ):
        self.sizes, self.scratch = sizes, scratch
        self.tile = register_tile(target, sizes)
        self.module, self.symbol = module, symbol
        self.scalar = se.value_type(sizes.compute)
        self.storage = se.storage_type(sizes.dtype)
        self.vector = ir.VectorType(self.scalar, self.tile.lanes)

    def function(self, name: str, kinds: Sequence[ir.Type], define: Callable) -> ir.Function:
        """The kernel's private function `name`, see `emit.private_function`."""
        return e.private_function(self.module, f"{self.symbol}_{name}", kinds, define)

    # Addresses and values.

    def at(self, b: ir.IRBuilder, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        """The address of a number in scratch, or of one of log_sum."""
        index = constant(index) if isinstance(index, int) else index
        return e.address(b, pointer, index, self.scalar)

    def element(self, b: ir.IRBuilder, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        """The address of an element of one of the tensors."""
        index = constant(index) if isinstance(index, int) else index
        return e.address(b, pointer, index, self.storage)

    def read(self, b: ir.IRBuilder, pointer: ir.Value, mask: ir.Constant | None) -> ir.Value:
        """A vector of a tensor's elements; lanes that the mask switches off are not touched."""
        return se.load(b, pointer, self.sizes.dtype, self.tile.lanes, mask)

    def number(self, value: float) -> ir.Constant:
        """The number in every lane."""
        return ir.Constant(self.vector, [value] * self.vector.count)

    def spread(self, b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        """The number at `pointer` in every lane."""
        return e.splat(b, e.load(b, pointer, self.scalar), self.vector.count)

    def starts(self, width: int) -> list[tuple[int, ir.Constant | None]]:
        """Where the vectors of a row of `width` numbers start, and the mask of each."""
        lanes = self.tile.lanes
        return [(start, e.prefix_mask(lanes, width - start) if width - start < lanes else None)
                for start in range(0, width, lanes)]

    def exp(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """e^x of every lane. It gives weights, so that in f32 the smallest may as well be 0."""
        double = self.sizes.compute is F64
        return self._apply(b, scalar.exp if double else flushed_exp, x, self.tile.lanes)

    def _apply(self, b: ir.IRBuilder, function: Callable, x: ir.Value, lanes: int) -> ir.Value:
        argument = Expr("input", (), self.sizes.compute, 0)
        return se.evaluate(b, [function(argument)], {argument: x}, lanes)[0]

    # Packing.

    def pack_rows(self, name: str, outer: int, repeat: int, factor: float = 1.0) -> ir.Function:
        """`void f(source, keep, count, target)`: `count` times `repeat` rows of D numbers times
        `factor`, padded with zeros to whole panels; row (i, r) is read at i·outer + r·D. Rows i
        whose `keep` (i32) is 0 become zeros."""
        width, columns = self.sizes.width, whole(self.sizes.width, self.tile.width)

        def define(b, source, keep, count, target):
            with e.loop(b, count, 1) as (i, _):
                kept = b.icmp_signed("!=", e.load(b, e.address(b, keep, i, I32), I32), I32(0))
                for r in range(repeat):
                    place = b.add(b.mul(i, constant(outer)), constant(r * width))
                    row = self.element(b, source, place)
                    place = b.add(b.mul(i, constant(repeat * columns)), constant(r * columns))
                    packed = self.at(b, target, place)
                    with b.if_else(kept, likely=True) as (then, otherwise):
                        with then:
                            self.copy_row(b, row, packed, columns, factor)
                        with otherwise:
                            self.zero(b, packed, constant(columns))

        return self.function(name, [POINTER, POINTER, I64, POINTER], define)

    def copy_row(self, b, source, target, columns: int, factor: float) -> None:
        """A row of D numbers times `factor`, and zeros up to `columns`."""
        starts = self.starts(self.sizes.width)
        for start, mask in starts:
            value = self.read(b, self.element(b, source, start), mask)
            if factor != 1.0:
                value = b.fmul(value, self.number(factor))
            e.store(b, value, self.at(b, target, start))
        for start in range(len(starts) * self.tile.lanes, columns, self.tile.lanes):
            e.store(b, self.number(0.0), self.at(b, target, start))

    def pack_transposed(self) -> ir.Function:
        """`void f(source, count, target)`: keys (rows of D numbers, G·D apart) into panels with the
        keys along the lanes: [panels][D][panel]. The last key fills up the last panel."""
        width, lanes, panel = self.sizes.width, self.tile.lanes, self.tile.width
        key_row = constant(self.sizes.groups * width)

        def define(b, source, count, target):
            last = b.sub(count, constant(1))
            with e.loop(b, self.whole_panels(b, count), lanes) as (key, _):
                keys = []
                for lane in range(lanes):
                    existing = e.minimum(b, b.add(key, constant(lane)), last)
                    keys.append(self.element(b, source, b.mul(existing, key_row)))
                number, column = e.divide(b, key, panel)
                place = b.add(b.mul(number, constant(width * panel)), column)
                packed = self.at(b, target, place)
                mask = e.prefix_mask(lanes, width) if width < lanes else None
                with e.loop(b, constant(width), lanes) as (index, _):
                    # A width that is no multiple of the lanes ends on a block that overlaps.
                    p = index if mask else e.minimum(b, index, constant(width - lanes))
                    block = [self.read(b, self.element(b, k, p), mask) for k in keys]
                    rows = self.at(b, packed, b.mul(p, constant(panel)))
                    for t, value in enumerate(transpose(b, block)[:width]):
                        e.store(b, value, self.at(b, rows, t * panel))

        return self.function("pack_transposed", [POINTER, I64, POINTER], define)

    def whole_panels(self, b: ir.IRBuilder, count: ir.Value) -> ir.Value:
        """`count` rounded up to whole panels (a power of two)."""
        panel = self.tile.width
        return b.and_(b.add(count, constant(panel - 1)), constant(-panel))

    def zero(self, b: ir.IRBuilder, target: ir.Value, items: ir.Value) -> None:
        """Zeros in `items` numbers, a multiple of the lanes, maybe none."""
        with e.maybe_loop(b, items, self.tile.lanes) as (i, _):
            e.store(b, self.number(0.0), self.at(b, target, i))

    # Results.

    def copy_out(self, b, source, target, dtype: DType, transform: Callable) -> None:
        """`transform` of D numbers of a padded row to where a result of `dtype` lies."""
        kind = se.storage_type(dtype)
        for start, mask in self.starts(self.sizes.width):
            value = transform(e.load(b, self.at(b, source, start), self.vector))
            se.store(b, value, e.address(b, target, constant(start), kind), dtype, mask)

    def normalise(self, b, total, largest, source, args, place) -> None:
        """Results number `place` (counting token by token, head by head): o / total and log_sum,
        or zeros if the row saw no key. `total` points to the lanes that add up to it."""
        total = fold(b, "sum", [e.load(b, total, self.vector)], self.sizes.compute)
        one, zero = ir.Constant(self.scalar, 1.0), ir.Constant(self.scalar, 0.0)
        # NaN scores must come out as NaN, so only a true zero counts as "no keys".
        none = b.fcmp_ordered("==", total, zero)
        divisor = b.select(none, one, total)
        everywhere = e.splat(b, divisor, self.tile.lanes)
        target = self.element(b, e.operand(b, args, 5), b.mul(place, constant(self.sizes.width)))
        self.copy_out(b, source, target, self.sizes.dtype, lambda x: b.fdiv(x, everywhere))
        log = self._apply(b, scalar.log, divisor, 1)
        log_sum = b.select(none, zero, b.fadd(e.load(b, largest, self.scalar), log))
        e.store(b, log_sum, self.at(b, e.operand(b, args, 6), place))


def register_tile(target: Target, sizes: Sizes) -> Tile:
    """The matmul's register tile, whole."""
    return outer_tile(target, sizes.compute.itemsize, _MANY, _MANY)


def whole(size: int, unit: int) -> int:
    """`size` rounded up to whole units."""
    return -(-size // unit) * unit


def larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x where it is larger, else y: y too where one is NaN (x86's maxps, one instruction)."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def clearing_kernel(key: str, results: Sequence[tuple[int, int]]) -> KernelSource:
    """The kernel for sizes with nothing to do: zeros in results given as (arg, bytes)."""

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        b, args, _, _ = e.kernel(module, symbols[0])
        for index, size in results:
            e.clear_bytes(b, e.operand(b, args, index), constant(size))
        b.ret_void()

    return KernelSource(key, (Phase("clear", 1),), emit)
