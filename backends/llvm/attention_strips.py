"""Strips of rows against panels of keys: products on register tiles, key ranges and masks.

All the arithmetic of attention is products of blocks that fit a core's cache, with a little work on
rows of scores between them. Rows are handled in *strips*, as many as a register tile has; keys,
where they run along vector lanes, in *panels*, as wide as a register tile. A strip knows the hull
and the core of its rows' key ranges

    hull = [min lo, max hi)        core = [max lo, min hi)

Panels outside the hull are skipped, panels inside the core need no mask, and those between are
masked one score at a time. Rows without keys, and the rows that fill up the last strip, have the
range [S, 0): it leaves the hull as it is and empties the core.

Keys that nobody sees may hold anything, NaN included. Their scores are masked; where a key or value
is multiplied by a weight of 0, its packed copy is zeros. `seen` says which keys those are: the
prefix sums of +1 at each lo and -1 at each hi.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm.attention_blocks import BlockEmitter, Scratch, Sizes
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.microkernel import Tile, outer_sums

__all__ = ["Product", "StripEmitter", "Visible", "add_range_arrays"]


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
    def values(self) -> tuple[ir.Value, ...]:
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


def add_range_arrays(scratch: Scratch, sizes: Sizes, tile: Tile, queries: int, rows: int) -> None:
    """The arrays that `load_ranges` fills, for so many queries and (padded) rows."""
    scratch.add("seen", sizes.keys + 1, I32)
    scratch.add("keep", queries, I32)
    scratch.add("row_lo", rows, I32)
    scratch.add("row_hi", rows, I32)
    scratch.add("bounds", 4 * (rows // tile.rows), I32)
    scratch.add("hull", 2, I32)


class StripEmitter(BlockEmitter):
    """Emits products of strips, and what decides which of their panels are seen."""

    def product(self, name: str, layout: Product) -> ir.Function:
        """`void f(a, b, panels, depth, c, ...)`: a strip of C, panel after panel.

        'scale' takes the rows' factors besides, 'mask' row_lo, row_hi and the first column's key.
        """
        tile = self.tile
        kinds = [POINTER, POINTER, I64, I64, POINTER]
        kinds += {"scale": [POINTER], "mask": [POINTER, POINTER, I64]}.get(layout.then, [])

        def define(b, a, right, panels, depth, c, *more):
            with e.loop(b, panels, 1) as (panel, _):
                b_panel = self.at(b, right, b.mul(panel, constant(layout.b_panel)))
                column = b.mul(panel, constant(tile.width))
                strides = (layout.a_row, layout.a_depth)
                sums = outer_sums(b, self.vector, tile, a, b_panel, depth, strides, layout.b_depth)
                if layout.then == "mask":
                    more = (*more[:2], b.add(more[2], column))
                for r in range(tile.rows):
                    row = self.at(b, c, b.add(column, constant(r * layout.c_row)))
                    row_sums = sums[r * tile.vectors : (r + 1) * tile.vectors]
                    self.finish_row(b, layout.then, row, constant(r), row_sums, more)

        return self.function(name, kinds, define)

    def finish_row(self, b, then: str, row: ir.Value, r: ir.Value, sums, more) -> None:
        """What becomes of row r of a register tile."""
        if then == "scale":
            factor = self.spread(b, self.at(b, more[0], r))
        elif then == "mask":
            seen = self.seen(b, *more, r)
        for v, total in enumerate(sums):
            pointer = self.at(b, row, v * self.tile.lanes)
            if then == "scale":
                total = e.fma(b, e.load(b, pointer, self.vector), factor, total)
            elif then == "add":
                total = b.fadd(e.load(b, pointer, self.vector), total)
            elif then == "mask":
                # Masked here, not in memory: LLVM would make that a masked store, which is slow
                # on some CPUs and stalls the load that follows on all.
                total = b.select(seen[v], total, self.number(float("-inf")))
            e.store(b, total, pointer)

    # Key ranges.

    def load_ranges(self) -> ir.Function:
        """`void f(lo, hi, queries, strips, scratch)`: fill the arrays row_lo, row_hi, bounds (each
        strip's min lo, max lo, min hi, max hi), keep (whether a query has keys), seen and hull (min
        lo, max hi of all)."""
        keys, at = self.sizes.keys, self.scratch.at

        def define(b, lo, hi, queries, strips, scratch):
            with e.loop(b, constant(keys + 1), 1) as (j, _):
                e.store(b, I32(0), at(b, scratch, "seen", j))
            with e.loop(b, queries, 1) as (i, _):
                self.load_range(b, lo, hi, i, scratch)
            rows = b.mul(queries, constant(self.sizes.repeat))
            with self.count_up(b, rows, b.mul(strips, constant(self.tile.rows))) as row:
                e.store(b, I32(keys), at(b, scratch, "row_lo", row))
                e.store(b, I32(0), at(b, scratch, "row_hi", row))
            with e.loop(b, constant(keys), 1, [I32(0)]) as (j, carried):
                mark = at(b, scratch, "seen", j)
                carried[0] = b.add(carried[0], e.load(b, mark, I32))
                e.store(b, carried[0], mark)
            with e.loop(b, strips, 1, [I32(keys), I32(0)]) as (s, hull):
                min_lo, max_hi = self.bound_strip(b, s, scratch)
                hull[:] = e.minimum(b, hull[0], min_lo), e.maximum(b, hull[1], max_hi)
            for n, bound in enumerate(hull):
                e.store(b, bound, at(b, scratch, "hull", n))

        return self.function("load_ranges", [POINTER, POINTER, I64, I64, POINTER], define)

    def load_range(self, b, lo, hi, i, scratch) -> None:
        """Query i's range, cut to the keys that exist: its mark in `seen`, and its rows'."""
        keys, repeat, at = self.sizes.keys, self.sizes.repeat, self.scratch.at
        first = e.maximum(b, e.load(b, e.address(b, lo, i, I32), I32), I32(0))
        end = e.minimum(b, e.load(b, e.address(b, hi, i, I32), I32), I32(keys))
        some = b.icmp_signed("<", first, end)
        first, end = b.select(some, first, I32(keys)), b.select(some, end, I32(0))
        e.store(b, b.zext(some, I32), at(b, scratch, "keep", i))
        for bound, step in ((first, 1), (end, -1)):
            mark = at(b, scratch, "seen", b.sext(bound, I64))
            step = b.select(some, I32(step), I32(0))
            e.store(b, b.add(e.load(b, mark, I32), step), mark)
        for r in range(repeat):
            row = b.add(b.mul(i, constant(repeat)), constant(r))
            e.store(b, first, at(b, scratch, "row_lo", row))
            e.store(b, end, at(b, scratch, "row_hi", row))

    def bound_strip(self, b, s, scratch) -> tuple[ir.Value, ir.Value]:
        """Fill the bounds of strip s, and give its hull."""
        row, at = b.mul(s, constant(self.tile.rows)), self.scratch.at
        bounds = []
        for name in ("row_lo", "row_hi"):
            values = [e.load(b, at(b, scratch, name, b.add(row, constant(r))), I32)
                      for r in range(self.tile.rows)]
            for pick in (e.minimum, e.maximum):
                bounds.append(reduce(lambda x, y, pick=pick: pick(b, x, y), values))
        for n, bound in enumerate(bounds):
            e.store(b, bound, at(b, scratch, "bounds", b.add(b.mul(s, constant(4)), constant(n))))
        return bounds[0], bounds[3]

    def visible_panels(self, b, s: ir.Value, key0: ir.Value, panels: ir.Value, scratch) -> Visible:
        """Which panels of a block of keys, the first of them `key0`, the rows of strip s see."""
        panel = self.tile.width
        min_lo, max_lo, min_hi, max_hi = (
            b.sub(self.load_bound(b, scratch, "bounds", b.add(b.mul(s, constant(4)), constant(n))),
                  key0)
            for n in range(4)
        )  # fmt: skip
        shift, last = constant(panel.bit_length() - 1), constant(panel - 1)

        def within(x: ir.Value, least: ir.Value, most: ir.Value) -> ir.Value:
            return e.minimum(b, e.maximum(b, x, least), most)

        first = within(b.ashr(min_lo, shift), constant(0), panels)
        stop = within(b.ashr(b.add(max_hi, last), shift), first, panels)
        core_first = within(b.ashr(b.add(max_lo, last), shift), first, stop)
        core_stop = within(b.ashr(min_hi, shift), core_first, stop)
        end = e.minimum(b, max_hi, b.mul(panels, constant(panel)))
        return Visible(first, stop, core_first, core_stop, end)

    def load_bound(self, b, scratch, name: str, index: ir.Value | int) -> ir.Value:
        """A key's number from one of the arrays, as an i64."""
        return b.sext(e.load(b, self.scratch.at(b, scratch, name, index), I32), I64)

    def seen(self, b, row_lo, row_hi, key0: ir.Value, r: ir.Value) -> list[ir.Value]:
        """Which keys of a panel, the first of them `key0`, row r of a strip sees: a mask for each
        of the panel's vectors."""
        lanes = self.tile.lanes
        lo, hi = (
            e.splat(b, e.load(b, e.address(b, bound, r, I32), I32), lanes)
            for bound in (row_lo, row_hi)
        )
        key = e.splat(b, b.trunc(key0, I32), lanes)
        masks = []
        for start in range(0, self.tile.width, lanes):
            steps = ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
            index = b.add(key, steps)
            masks.append(b.and_(b.icmp_signed("<=", lo, index), b.icmp_signed("<", index, hi)))
        return masks

    @contextmanager
    def count_up(self, b: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator:
        """A loop over start, start + step, … below stop, which may be none. Yields the index."""
        with e.maybe_loop(b, b.sub(stop, start), step) as (offset, _):
            yield b.add(start, offset)
