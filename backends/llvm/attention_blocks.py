"""What the attention kernels are made of: register-tiled products, packing, key ranges and masks.

All the arithmetic of attention is matrix products of blocks that fit a core's cache, with a little
work on rows of scores between them. The query heads that share a key head are stacked: row
i·R + r of a block is query i's head r of R, so a key is packed once for all of them. Rows are
handled in *strips*, as many as a register tile has; keys, where they run along vector lanes, in
*panels*, as wide as a register tile. A strip knows the hull and the core of its rows' key ranges

    hull = [min lo, max hi)        core = [max lo, min hi)

Panels outside the hull are skipped, panels inside the core need no mask, and those between are
masked one score at a time. Rows without keys, and the rows that fill up the last strip, have the
range [S, 0): it leaves the hull as it is and empties the core.

Keys that nobody sees may hold anything, NaN included. Their scores are masked; where a key or value
is multiplied by a weight of 0, its packed copy is zeros. `seen` says which keys those are: the
prefix sums of +1 at each lo and -1 at each hi.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.emit import I32, I64, POINTER, VOID, constant
from backends.llvm.packing import transpose
from backends.llvm.target import Target
from backends.llvm.vector_math import flushed_exp
from euler_ir import scalar
from euler_ir.scalar import Expr
from euler_ir.types import F32, F64, DType, TensorType

__all__ = ["BlockEmitter", "Product", "Scratch", "Sizes", "Strip", "Visible"]

# Scores below any that matter, yet finite: a row that has seen no key has no NaN on its way.
LOWEST = -3.0e38

_ALIGNMENT = 64


@dataclass(frozen=True)
class Sizes:
    """q [B,T,H,D], k and v [B,S,G,D]; `repeat` = H/G query heads share a key head.

    `dtype` is that of the tensors in memory; what is packed, summed or a statistic is `compute`."""

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

    def __str__(self) -> str:
        return (f"{self.dtype} B{self.batch} T{self.queries} S{self.keys} H{self.heads} "
                f"G{self.groups} D{self.width} scale={self.scale!r}")


@dataclass(frozen=True)
class Strip:
    """The register tile: `rows` rows by `vectors` vectors of `lanes`, `panel` columns."""

    rows: int
    vectors: int
    lanes: int

    @classmethod
    def of(cls, target: Target, sizes: Sizes) -> "Strip":
        """Two vectors wide, and as many rows as leave registers for two operands and a number."""
        rows = 6 if target.registers < 32 else 12
        return cls(rows, 2, target.lanes(sizes.compute.itemsize))

    @property
    def panel(self) -> int:
        return self.vectors * self.lanes

    def panels(self, width: int) -> int:
        """The panels that `width` columns take."""
        return -(-width // self.panel)

    def columns(self, width: int) -> int:
        """`width` rounded up to whole panels."""
        return self.panels(width) * self.panel


class Scratch:
    """Arrays in a kernel's scratch memory, by name, each starting on a cache line."""

    def __init__(self) -> None:
        self.bytes = 0
        self._arrays: dict[str, tuple[int, ir.Type]] = {}

    def add(self, name: str, items: int, scalar: ir.Type) -> None:
        size = 4 if scalar is I32 else e.item_bytes(scalar)
        self._arrays[name] = (self.bytes // size, scalar)
        self.bytes = _round_up(self.bytes + items * size, _ALIGNMENT)

    def at(self, b: ir.IRBuilder, scratch: ir.Value, name: str, index: ir.Value | int = 0):
        """The address of element `index` of an array."""
        start, scalar = self._arrays[name]
        if isinstance(index, int):
            return e.address(b, scratch, constant(start + index), scalar)
        return e.address(b, scratch, b.add(index, constant(start)), scalar)


@dataclass(frozen=True)
class Product:
    """The layout of C (+)= A·B: strides in elements. A is read at row·a_row + p·a_depth; B's panel
    n starts at n·b_panel and its row p at p·b_depth; C's rows are c_row apart.

    `then` says what happens to the sums: 'store'; 'add' to what C holds; 'scale', which first
    multiplies C's row r by element r of a further argument; or 'mask', which stores -inf for the
    keys (columns) that a row does not see.
    """

    a_row: int
    a_depth: int
    b_panel: int
    b_depth: int
    c_row: int
    then: str


class BlockEmitter:
    """Base of the attention kernels' emitters: private functions of one module, made on demand."""

    def __init__(self, target: Target, sizes: Sizes, module: ir.Module, symbol: str):
        self.sizes = sizes
        self.strip = Strip.of(target, sizes)
        self.module, self.symbol = module, symbol
        self.scalar = se.value_type(sizes.compute)
        self.storage = se.storage_type(sizes.dtype)
        self.vector = ir.VectorType(self.scalar, self.strip.lanes)
        self.functions: dict[str, ir.Function] = {}

    def function(self, name: str, kinds: Sequence[ir.Type], define: Callable) -> ir.Function:
        """The private function `name`, defined by `define(builder, *arguments)` once.

        Never inlined: a body compiled on its own keeps its registers, and LLVM's time stays linear.
        """
        if name not in self.functions:
            kind = ir.FunctionType(VOID, list(kinds))
            function = ir.Function(self.module, kind, f"{self.symbol}_{name}")
            function.linkage = "internal"
            function.attributes.add("noinline")
            self.functions[name] = function
            b = ir.IRBuilder(function.append_basic_block("entry"))
            define(b, *function.args)
            b.ret_void()
        return self.functions[name]

    # Addresses and small values.

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
        return se.load(b, pointer, self.sizes.dtype, self.strip.lanes, mask)

    def operand(self, b: ir.IRBuilder, args: ir.Value, index: int) -> ir.Value:
        """The pointer that stands at `index` of the kernel's args."""
        return b.load(b.gep(args, [constant(index)], source_etype=POINTER), typ=POINTER)

    def number(self, value: float) -> ir.Constant:
        """The number in every lane."""
        return ir.Constant(self.vector, [value] * self.vector.count)

    def spread(self, b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        """The number at `pointer` in every lane."""
        return e.splat(b, e.load(b, pointer, self.scalar), self.vector.count)

    def load_index(self, b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        """The i32 at `pointer` as an i64."""
        return b.sext(load_i32(b, pointer), I64)

    # Products.

    def product(self, name: str, layout: Product) -> ir.Function:
        """`void f(a, b, panels, depth, c, ...)`: a strip of C, panel after panel.

        'scale' takes the rows' factors besides, 'mask' row_lo, row_hi and the first column's key.
        """
        strip = self.strip
        kinds = [POINTER, POINTER, I64, I64, POINTER]
        kinds += {"scale": [POINTER], "mask": [POINTER, POINTER, I64]}.get(layout.then, [])

        def define(b, a, right, panels, depth, c, *more):
            with e.loop(b, panels, 1) as (panel, _):
                b_panel = self.at(b, right, b.mul(panel, constant(layout.b_panel)))
                column = b.mul(panel, constant(strip.panel))
                sums = [self.number(0.0)] * (strip.rows * strip.vectors)
                with e.loop(b, depth, 1, sums) as (p, sums):
                    self.multiply_add(
                        b, layout,
                        self.at(b, a, b.mul(p, constant(layout.a_depth))),
                        self.at(b, b_panel, b.mul(p, constant(layout.b_depth))), sums,
                    )  # fmt: skip
                if layout.then == "mask":
                    more = (*more[:2], b.add(more[2], column))
                for r in range(strip.rows):
                    row = self.at(b, c, b.add(column, constant(r * layout.c_row)))
                    tile_row = sums[r * strip.vectors : (r + 1) * strip.vectors]
                    self.finish_row(b, layout.then, row, constant(r), tile_row, more)

        return self.function(name, kinds, define)

    def finish_row(self, b, then: str, row: ir.Value, r: ir.Value, sums, more) -> None:
        """What becomes of row r of a register tile."""
        pointers = [self.at(b, row, v * self.strip.lanes) for v in range(self.strip.vectors)]
        if then == "scale":
            factor = self.spread(b, self.at(b, more[0], r))
        elif then == "mask":
            seen = self.seen(b, *more, r)
        for v, (pointer, total) in enumerate(zip(pointers, sums, strict=True)):
            if then == "scale":
                total = e.fma(b, e.load(b, pointer, self.vector), factor, total)
            elif then == "add":
                total = b.fadd(e.load(b, pointer, self.vector), total)
            elif then == "mask":
                total = b.select(seen[v], total, self.number(float("-inf")))
            e.store(b, total, pointer)

    def multiply_add(self, b, layout: Product, a_column, b_row, sums: list[ir.Value]) -> None:
        """One step of the inner loop: a column of A times a row of B onto the register tile."""
        strip = self.strip
        right = [
            e.load(b, self.at(b, b_row, v * strip.lanes), self.vector)
            for v in range(strip.vectors)
        ]
        for r in range(strip.rows):
            left = self.spread(b, self.at(b, a_column, r * layout.a_row))
            for v, vector in enumerate(right):
                i = r * strip.vectors + v
                sums[i] = e.fma(b, left, vector, sums[i])

    # Packing.

    def pack_rows(self, name: str, outer: int, repeat: int, factor: float = 1.0) -> ir.Function:
        """`void f(source, keep, count, target)`: `count` times `repeat` rows of D numbers, padded
        with zeros to whole panels; row (i, r) is read at i·outer + r·D. Rows i whose `keep` (i32)
        is 0 become zeros."""
        width, columns = self.sizes.width, self.strip.columns(self.sizes.width)

        def define(b, source, keep, count, target):
            with e.loop(b, count, 1) as (i, _):
                kept = b.icmp_signed("!=", load_i32(b, e.address(b, keep, i, I32)), I32(0))
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
        width, lanes = self.sizes.width, self.strip.lanes
        for start in range(0, columns, lanes):
            value = self.number(0.0)
            if start < width:
                mask = e.prefix_mask(lanes, width - start) if width - start < lanes else None
                value = self.read(b, self.element(b, source, start), mask)
                if factor != 1.0:
                    value = b.fmul(value, self.number(factor))
            e.store(b, value, self.at(b, target, start))

    def pack_transposed(self) -> ir.Function:
        """`void f(source, count, target)`: keys (rows of D numbers, G·D apart) into panels with the
        keys along the lanes: [panels][D][panel]. The last key fills up the last panel."""
        strip, sizes = self.strip, self.sizes
        width, lanes, row = sizes.width, strip.lanes, sizes.groups * sizes.width

        def define(b, source, count, target):
            last = b.sub(count, constant(1))
            with e.loop(b, self.round_up(b, count), lanes) as (key, _):
                keys = [
                    self.element(b, source, b.mul(e.minimum(b, b.add(key, constant(j)), last),
                                                  constant(row)))
                    for j in range(lanes)
                ]  # fmt: skip
                panel = b.udiv(key, constant(strip.panel))
                place = b.add(
                    b.mul(panel, constant(width * strip.panel)),
                    b.urem(key, constant(strip.panel)),
                )
                packed = self.at(b, target, place)
                mask = e.prefix_mask(lanes, width) if width < lanes else None
                with e.loop(b, constant(width), lanes) as (index, _):
                    # A width that is no multiple of the lanes ends on a block that overlaps.
                    p = index if mask else e.minimum(b, index, constant(width - lanes))
                    block = [self.read(b, self.element(b, k, p), mask) for k in keys]
                    column = self.at(b, packed, b.mul(p, constant(strip.panel)))
                    for t, value in enumerate(transpose(b, block)[:width]):
                        e.store(b, value, self.at(b, column, t * strip.panel))

        return self.function("pack_transposed", [POINTER, I64, POINTER], define)

    def round_up(self, b: ir.IRBuilder, count: ir.Value) -> ir.Value:
        """`count` rounded up to whole panels."""
        panel = self.strip.panel
        return b.and_(b.add(count, constant(panel - 1)), constant(-panel))

    def zero(self, b: ir.IRBuilder, target: ir.Value, items: ir.Value) -> None:
        """Zeros in `items` numbers, a multiple of the lanes, maybe none."""
        with b.if_then(b.icmp_signed(">", items, constant(0))):
            with e.loop(b, items, self.strip.lanes) as (i, _):
                e.store(b, self.number(0.0), self.at(b, target, i))

    def copy_out(self, b, source, target, dtype: DType, transform: Callable) -> None:
        """`transform` of D numbers of a padded row to where a result of `dtype` lies."""
        width, lanes, kind = self.sizes.width, self.strip.lanes, se.storage_type(dtype)
        for start in range(0, width, lanes):
            mask = e.prefix_mask(lanes, width - start) if width - start < lanes else None
            value = transform(e.load(b, self.at(b, source, start), self.vector))
            se.store(b, value, e.address(b, target, constant(start), kind), dtype, mask)

    def normalise(self, b, total, largest, source, args, place) -> None:
        """Results number `place` (counting token by token, head by head): o / total and log_sum,
        or zeros if the row saw no key. `total` points to the lanes that add up to it."""
        total = across_lanes(b, e.load(b, total, self.vector), lambda b, x, y: b.fadd(x, y))
        one, zero = ir.Constant(self.scalar, 1.0), ir.Constant(self.scalar, 0.0)
        # NaN scores must come out as NaN, so only a true zero counts as "no keys".
        none = b.fcmp_ordered("==", total, zero)
        divisor = b.select(none, one, total)
        target = self.element(b, self.operand(b, args, 5), b.mul(place, constant(self.sizes.width)))
        everywhere = e.splat(b, divisor, self.strip.lanes)
        self.copy_out(
            b, source, target, self.sizes.dtype, lambda value: b.fdiv(value, everywhere)
        )
        log_sum = b.fadd(e.load(b, largest, self.scalar), log(b, divisor))
        e.store(b, b.select(none, zero, log_sum), self.at(b, self.operand(b, args, 6), place))

    # Key ranges.

    def load_ranges(self, scratch_map: Scratch) -> ir.Function:
        """`void f(lo, hi, queries, strips, scratch)`: fill the arrays row_lo, row_hi, bounds (each
        strip's min lo, max lo, min hi, max hi), keep (whether a query has keys), seen and hull (min
        lo, max hi of all)."""
        strip, keys, repeat = self.strip, self.sizes.keys, self.sizes.repeat
        at = scratch_map.at

        def define(b, lo, hi, queries, strips, scratch):
            with e.loop(b, constant(keys + 1), 1) as (j, _):
                b.store(I32(0), at(b, scratch, "seen", j))
            with e.loop(b, queries, 1) as (i, _):
                first = load_i32(b, e.address(b, lo, i, I32))
                end = load_i32(b, e.address(b, hi, i, I32))
                first = larger_int(b, first, I32(0))
                end = e.minimum(b, end, I32(keys))
                some = b.icmp_signed("<", first, end)
                first = b.select(some, first, I32(keys))
                end = b.select(some, end, I32(0))
                b.store(b.zext(some, I32), at(b, scratch, "keep", i))
                for bound, step in ((first, 1), (end, -1)):
                    mark = at(b, scratch, "seen", b.sext(bound, I64))
                    step = b.select(some, I32(step), I32(0))
                    b.store(b.add(load_i32(b, mark), step), mark)
                for r in range(repeat):
                    row = b.add(b.mul(i, constant(repeat)), constant(r))
                    b.store(first, at(b, scratch, "row_lo", row))
                    b.store(end, at(b, scratch, "row_hi", row))
            rows, padded = b.mul(queries, constant(repeat)), b.mul(strips, constant(strip.rows))
            with self.count_up(b, rows, padded) as row:
                b.store(I32(keys), at(b, scratch, "row_lo", row))
                b.store(I32(0), at(b, scratch, "row_hi", row))
            with e.loop(b, constant(keys), 1, [I32(0)]) as (j, carried):
                mark = at(b, scratch, "seen", j)
                carried[0] = b.add(carried[0], load_i32(b, mark))
                b.store(carried[0], mark)
            with e.loop(b, strips, 1, [I32(keys), I32(0)]) as (s, hull):
                row = b.mul(s, constant(strip.rows))
                los, his = (
                    [load_i32(b, at(b, scratch, name, b.add(row, constant(r))))
                     for r in range(strip.rows)]
                    for name in ("row_lo", "row_hi")
                )  # fmt: skip
                bounds = [
                    fold(b, e.minimum, los), fold(b, larger_int, los),
                    fold(b, e.minimum, his), fold(b, larger_int, his),
                ]  # fmt: skip
                for n, bound in enumerate(bounds):
                    place = b.add(b.mul(s, constant(4)), constant(n))
                    b.store(bound, at(b, scratch, "bounds", place))
                hull[0] = e.minimum(b, hull[0], bounds[0])
                hull[1] = larger_int(b, hull[1], bounds[3])
            b.store(hull[0], at(b, scratch, "hull", 0))
            b.store(hull[1], at(b, scratch, "hull", 1))

        return self.function("load_ranges", [POINTER, POINTER, I64, I64, POINTER], define)

    def visible_panels(self, b, bounds: ir.Value, key0: ir.Value, panels: ir.Value) -> "Visible":
        """Which panels of a block of keys, the first of them `key0`, a strip's rows can see."""
        panel = self.strip.panel
        min_lo, max_lo, min_hi, max_hi = (
            b.sub(self.load_index(b, e.address(b, bounds, constant(n), I32)), key0)
            for n in range(4)
        )
        shift, last = constant(_log2(panel)), constant(panel - 1)

        def within(x: ir.Value, least: ir.Value, most: ir.Value) -> ir.Value:
            return e.minimum(b, larger_int(b, x, least), most)

        first = within(b.ashr(min_lo, shift), constant(0), panels)
        stop = within(b.ashr(b.add(max_hi, last), shift), first, panels)
        core_first = within(b.ashr(b.add(max_lo, last), shift), first, stop)
        core_stop = within(b.ashr(min_hi, shift), core_first, stop)
        end = e.minimum(b, max_hi, b.mul(panels, constant(panel)))
        return Visible(first, stop, core_first, core_stop, end)

    def seen(self, b, row_lo, row_hi, key0: ir.Value, r: ir.Value) -> list[ir.Value]:
        """Which keys of a panel, the first of them `key0`, row r of a strip sees: a mask for each
        of the panel's vectors."""
        lanes = self.strip.lanes
        lo, hi = (
            e.splat(b, load_i32(b, e.address(b, bound, r, I32)), lanes)
            for bound in (row_lo, row_hi)
        )
        key = e.splat(b, b.trunc(key0, I32), lanes)
        masks = []
        for start in range(0, self.strip.panel, lanes):
            steps = ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
            index = b.add(key, steps)
            masks.append(b.and_(b.icmp_signed("<=", lo, index), b.icmp_signed("<", index, hi)))
        return masks

    @contextmanager
    def count_up(self, b: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator:
        """A loop over start, start + step, … below stop, which may be none. Yields the index."""
        with b.if_then(b.icmp_signed("<", start, stop)):
            with e.loop(b, b.sub(stop, start), step) as (offset, _):
                yield b.add(start, offset)


@dataclass(frozen=True)
class Visible:
    """The panels [first, stop) hold a strip's hull, [core_first, core_stop) of them its core; `end`
    is the column after the last key in the hull."""

    first: ir.Value
    stop: ir.Value
    core_first: ir.Value
    core_stop: ir.Value
    end: ir.Value

    @property
    def panels(self) -> tuple[ir.Value, ...]:
        return self.first, self.stop, self.core_first, self.core_stop, self.end

    def runs(self, b: ir.IRBuilder) -> Iterator[tuple[ir.Value, ir.Value, bool]]:
        """(first panel, panels, whether to mask) of the edge before the core, the core, and the
        edge after it, the builder standing where there are such panels."""
        for first, stop, masked in (
            (self.first, self.core_first, True),
            (self.core_first, self.core_stop, False),
            (self.core_stop, self.stop, True),
        ):
            with b.if_then(b.icmp_signed("<", first, stop)):
                yield first, b.sub(stop, first), masked


def larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x if it is larger, else y: y too where one is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def larger_int(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed(">", x, y), x, y)


def add_range_arrays(
    scratch: Scratch, sizes: Sizes, strip: Strip, queries: int, rows: int
) -> None:
    """The arrays that `load_ranges` fills, for so many queries and (padded) rows."""
    scratch.add("seen", sizes.keys + 1, I32)
    scratch.add("keep", queries, I32)
    scratch.add("row_lo", rows, I32)
    scratch.add("row_hi", rows, I32)
    scratch.add("bounds", 4 * (rows // strip.rows), I32)
    scratch.add("hull", 2, I32)


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x of every lane: weights, so that in f32 the smallest may as well be 0."""
    double = e.item_bytes(x.type.element) == 8
    function = scalar.exp if double else flushed_exp
    return _apply(b, function, x, F64 if double else F32, x.type.count)


def log(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The natural logarithm of a number."""
    return _apply(b, scalar.log, x, F64 if e.item_bytes(x.type) == 8 else F32, 1)


def _apply(b: ir.IRBuilder, function: Callable, x: ir.Value, dtype: DType, lanes: int) -> ir.Value:
    argument = Expr("input", (), dtype, 0)
    return se.evaluate(b, [function(argument)], {argument: x}, lanes)[0]


def load_i32(b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    return b.load(pointer, typ=I32, align=4)


def across_lanes(b: ir.IRBuilder, value: ir.Value, combine) -> ir.Value:
    """Combine the lanes of a vector: the upper half onto the lower until one is left."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        lower = e.shuffle(b, value, value, range(lanes))
        upper = e.shuffle(b, value, value, range(lanes, 2 * lanes))
        value = combine(b, lower, upper)
    return b.extract_element(value, constant(0))


def fold(b: ir.IRBuilder, combine: Callable, values: Sequence[ir.Value]) -> ir.Value:
    result = values[0]
    for value in values[1:]:
        result = combine(b, result, value)
    return result


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _log2(power: int) -> int:
    return power.bit_length() - 1
