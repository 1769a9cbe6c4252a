"""Kernels of row programs: pointwise chains, norms, softmax, losses and their gradients.

A tile is a block of rows (or, where nothing needs a row as such, of columns). For each row: load
what there is once a row; then, level by level (see row_plan.py), loop over the columns a vector at
a time, with several accumulators for every reduction, combined in a fixed order. Column sums add up
in a row of the workspace that belongs to the tile; a second phase adds those rows in order.

    for row in tile:
        values a row
        for level:
            for columns, `unroll` vectors at a time; single vectors; a masked vector:
                evaluate, accumulate, store
            reductions of this level
        stores a row
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.access import Access, RowProgram
from backends.llvm.emit import constant
from backends.llvm.folding import BLOCK, combine, fold, neutral
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.row_chunk import Chunk, Visits
from backends.llvm.row_plan import Loop, RowPlan, is_reduction, plan_rows
from backends.llvm.target import Target
from euler_ir.scalar import Expr

__all__ = ["RowEmitter", "row_kernel"]

_SUM_COLUMNS = 256  # columns of a tile of the second phase of column sums


def row_kernel(program: RowProgram, target: Target) -> KernelSource:
    """The kernel of a row program; its args are as the program's accesses count them."""
    plan = plan_rows(program, target)
    sums = plan.program.column_sums
    phases = [Phase("rows", plan.tiles)] if plan.tiles else []
    if sums and plan.columns:
        phases.append(Phase("columns", -(-plan.columns // _SUM_COLUMNS)))

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        names = dict(zip((phase.name for phase in phases), symbols, strict=True))
        if "rows" in names:
            RowEmitter(plan, module, names["rows"]).emit()
        if "columns" in names:
            _emit_column_phase(plan, module, names["columns"])

    return KernelSource(
        key=f"row {plan.text()}",
        phases=tuple(phases),
        emit=emit,
        workspace_bytes=plan.tiles * sum(_partial_bytes(plan)),
        scratch_bytes=sum(plan.kept_bytes(x) for x in plan.kept),
        inplace=plan.inplace(),
    )


def _partial_bytes(plan: RowPlan) -> list[int]:
    """Bytes of a tile's row of partial sums, for each column sum."""
    return [plan.padded_columns * x.dtype.itemsize for x, _ in plan.program.column_sums]


class RowEmitter:
    """Emits the phase that goes through the rows."""

    def __init__(self, plan: RowPlan, module: ir.Module, symbol: str):
        self.plan, self.lanes = plan, plan.lanes
        self.b, self.args, self.tile, self.scratch = e.kernel(module, symbol)
        self.arguments: dict[int, ir.Value] = {}
        #: Values of expressions that do not vary along the row, as far as they are computed.
        self.values: dict[Expr, ir.Value] = {}
        self.bases: dict[Access, ir.Value] = {}
        self.segment_bases: dict[Access, ir.Value] = {}
        self.partials: list[ir.Value] = []

    def emit(self) -> None:
        plan, b = self.plan, self.b
        for access in self.accesses:
            if access.argument is not None:
                self.argument(access.argument)
        segment_tiles, inner_tiles, column_tiles = plan.tile_counts
        rest, column_block = e.divide(b, self.tile, column_tiles)
        segment_block, inner_block = e.divide(b, rest, inner_tiles)
        self.locate_scratch()
        self.clear_partials()
        self.evaluate_fixed()
        segment0 = b.mul(segment_block, constant(plan.tile_segments))
        inner0 = b.mul(inner_block, constant(plan.tile_inner))
        with _count(b, segment0, plan.tile_segments, plan.segments) as segment:
            self.locate_segment(segment)
            with _count(b, inner0, plan.tile_inner, plan.inner) as row:
                self.locate_row(row)
                self.emit_row(column_block)
        b.ret_void()

    @property
    def accesses(self) -> list[Access]:
        program = self.plan.program
        used = [program.loads[x.value] for x in self.plan.order if x.op == "input"]
        return [*used, *(access for _, access in program.stores)]

    def argument(self, index: int) -> ir.Value:
        """The pointer that stands at `index` of the kernel's args."""
        if index not in self.arguments:
            self.arguments[index] = e.operand(self.b, self.args, index)
        return self.arguments[index]

    # Where things lie.

    def locate_scratch(self) -> None:
        self.kept_rows, place = {}, 0
        for x in self.plan.kept:
            self.kept_rows[x] = e.bytes_after(self.b, self.scratch, constant(place))
            place += self.plan.kept_bytes(x)

    def clear_partials(self) -> None:
        """Find this tile's rows of partial sums in the workspace, and set them to 0."""
        b, plan = self.b, self.plan
        sizes = _partial_bytes(plan)
        if not sizes:
            return
        workspace = self.argument(_workspace_argument(plan))
        own = b.mul(self.tile, constant(sum(sizes)))
        for i, (x, _) in enumerate(plan.program.column_sums):
            start = b.add(own, constant(sum(sizes[:i])))
            self.partials.append(e.bytes_after(b, workspace, start))
            kind = se.value_type(x.dtype, self.lanes)
            with e.loop(b, constant(plan.columns), self.lanes) as (column, _):
                pointer = e.address(b, self.partials[i], column, e.element(kind))
                e.store(b, ir.Constant(kind, None), pointer)

    def locate_segment(self, segment: ir.Value) -> None:
        """Where each access stands at the first inner row of a segment."""
        b, outer = self.b, self.plan.program.space[:-2]
        indices, rest = [], segment
        for extent in reversed(outer[1:]):
            rest, index = e.divide(b, rest, extent)
            indices.insert(0, index)
        indices = [rest, *indices][:len(outer)]
        for access in self.accesses:
            place = constant(access.offset)
            for index, stride in zip(indices, access.strides[:-2], strict=True):
                if stride:
                    place = b.add(place, b.mul(index, constant(stride)))
            self.segment_bases[access] = place

    def locate_row(self, row: ir.Value) -> None:
        b = self.b
        for access in self.accesses:
            place = self.segment_bases[access]
            if len(access.strides) > 1 and access.strides[-2]:
                place = b.add(place, b.mul(row, constant(access.strides[-2])))
            self.bases[access] = place

    def pointer(self, access: Access) -> ir.Value:
        """The element of an access at column 0 of the current row."""
        return e.address(self.b, self.arguments[access.argument], self.bases[access],
                         se.storage_type(access.dtype))

    # Values that do not vary along the row.

    def evaluate_fixed(self) -> None:
        """What is the same for all rows: once a tile."""
        for access in self.accesses:
            self.bases[access] = constant(access.offset)
        self.fixed: set[Expr] = set()
        for x in self.plan.order:
            if x.op == "input":
                same = not any(self.plan.program.loads[x.value].strides)
            else:
                same = not is_reduction(x) and all(arg in self.fixed for arg in x.args)
            if same:
                self.fixed.add(x)
                self.values[x] = self.evaluate_once(x)

    def evaluate_row_values(self, level: int) -> None:
        """What does not vary along the row, and what `level` loops over it have made known."""
        for x in self.plan.order:
            if (x not in self.plan.varying and x not in self.values
                    and self.plan.levels[x] <= level):
                self.values[x] = self.evaluate_once(x)

    def evaluate_once(self, x: Expr) -> ir.Value:
        if x.op != "input":
            return se.operation(self.b, x, [self.values[arg] for arg in x.args])
        access = self.plan.program.loads[x.value]
        if access.argument is None:
            return self.b.trunc(self.bases[access], e.I32)
        return se.load(self.b, self.pointer(access), access.dtype)

    # A row.

    def emit_row(self, column_block: ir.Value) -> None:
        plan, b = self.plan, self.b
        self.values = {x: value for x, value in self.values.items() if x in self.fixed}
        for loop in plan.loops:
            self.evaluate_row_values(loop.level)
            if loop.roots or loop.column_sums:
                self.emit_loop(loop, column_block)
        self.evaluate_row_values(len(plan.loops))
        for x, access in plan.row_stores:
            se.store(b, self.values[x], self.pointer(access), access.dtype)

    def emit_loop(self, loop: Loop, column_block: ir.Value) -> None:
        self.visits = Visits(self.plan.visits(loop), self.plan.kept_before(loop))
        accumulators = [[neutral(r.op, r.dtype, self.lanes)] * loop.unroll for r in loop.reductions]
        if self.plan.tile_columns < self.plan.columns:
            self.emit_block(loop, column_block)
        else:
            for start, stop, turns in self.plan.stretches(loop):
                self.emit_stretch(loop, start, stop, turns, accumulators)
        for r, parts in zip(loop.reductions, accumulators, strict=True):
            self.values[r] = fold(self.b, r.op, parts, r.dtype)

    def emit_block(self, loop: Loop, column_block: ir.Value) -> None:
        """The tile's block of columns; only the last one may be short."""
        plan, b = self.plan, self.b
        first = b.mul(column_block, constant(plan.tile_columns))
        last_start = (plan.columns - 1) // plan.tile_columns * plan.tile_columns

        def part(start: ir.Value | None, stop: int) -> None:
            self.emit_stretch(loop, 0, stop, {}, [], start)

        rest = plan.columns - last_start
        if rest == plan.tile_columns:
            part(first, plan.tile_columns)
            return
        inside = b.icmp_signed("<", first, constant(last_start))
        with b.if_else(inside, likely=True) as (then, other):
            with then:
                part(first, plan.tile_columns)
            with other:
                part(constant(last_start), rest)

    def emit_stretch(self, loop: Loop, start: int, stop: int, turns: dict[int, int],
                     accumulators: list[list[ir.Value]], first: ir.Value | None = None) -> None:
        """Columns [start, stop) (after `first`), in which a row turned by d is displaced by
        `turns[d]`."""
        lanes = self.lanes

        def vectors(at: int, count: int, unroll: int) -> None:
            if not count:
                return
            parts = [values[i] for values in accumulators for i in range(unroll)]
            with _repeat(self.b, at, count, unroll * lanes, parts) as (column, carried):
                if first is not None:
                    column = self.b.add(first, column)
                chunks = [Chunk(self, self.visits, column, lanes * i, None, turns)
                          for i in range(unroll)]
                self.emit_chunks(loop, chunks, carried)
            for values in accumulators:
                for i in range(unroll):
                    values[i] = carried.pop(0)

        whole, tail = divmod(stop - start, lanes)
        main = whole // loop.unroll
        blocks = main // BLOCK if loop.reductions and main >= 2 * BLOCK else 0
        if blocks:
            self.emit_blocks(loop, start, blocks, turns, accumulators)
        rest = start + blocks * BLOCK * loop.unroll * lanes
        vectors(rest, main - blocks * BLOCK, loop.unroll)
        if loop.unroll > 1:
            vectors(start + main * loop.unroll * lanes, whole - main * loop.unroll, 1)
        if tail:
            column = constant(start + whole * lanes)
            if first is not None:
                column = self.b.add(first, column)
            mask = e.prefix_mask(lanes, tail)
            carried = [values[0] for values in accumulators]
            self.emit_chunks(loop, [Chunk(self, self.visits, column, 0, mask, turns)], carried)
            for values in accumulators:
                values[0] = carried.pop(0)

    def emit_blocks(self, loop: Loop, start: int, count: int, turns: dict[int, int],
                    accumulators: list[list[ir.Value]]) -> None:
        """Blocks of the columns of a long row, each added up on its own and then to the totals."""
        size = BLOCK * loop.unroll * self.lanes
        totals = [value for values in accumulators for value in values]
        with e.loop(self.b, constant(count * size), size, totals) as (first, carried):
            own = [[neutral(r.op, r.dtype, self.lanes)] * loop.unroll for r in loop.reductions]
            first = self.b.add(first, constant(start))
            self.emit_stretch(loop, 0, size, turns, own, first)
            parts = [value for values in own for value in values]
            kinds = [r for r in loop.reductions for _ in range(loop.unroll)]
            carried[:] = [combine(self.b, r.op, total, part, r.dtype)
                          for r, total, part in zip(kinds, carried, parts, strict=True)]
        for values in accumulators:
            for i in range(loop.unroll):
                values[i] = carried.pop(0)

    def emit_chunks(self, loop: Loop, chunks: Sequence[Chunk], carried: list[ir.Value]) -> None:
        """Evaluate everything for all chunks, then store: a result may overwrite an operand."""
        b, writes = self.b, []
        for i, chunk in enumerate(chunks):
            for place, r in enumerate(loop.reductions):
                at = place * len(chunks) + i
                carried[at] = chunk.accumulate(r, carried[at])
            for x in loop.keeps:
                writes.append((chunk, chunk.value(x), x))
            for x, access in loop.stores:
                writes.append((chunk, chunk.value(x), access))
            for place in loop.column_sums:
                x = self.plan.program.column_sums[place][0]
                writes.append((chunk, chunk.value(x), place))
        for chunk, value, where in writes:
            if isinstance(where, Access):
                chunk.store(value, where)
            elif isinstance(where, Expr):
                e.store(b, value, chunk.row_address(self.kept_rows[where], value.type, 0))
            else:
                pointer = chunk.row_address(self.partials[where], value.type, 0)
                e.store(b, b.fadd(e.load(b, pointer, value.type), value), pointer)


def _emit_column_phase(plan: RowPlan, module: ir.Module, symbol: str) -> None:
    """Add up the tiles' partial sums, tile by tile, for a block of columns."""
    b, args, tile, _ = e.kernel(module, symbol)
    sizes, lanes = _partial_bytes(plan), plan.lanes
    workspace = e.operand(b, args, _workspace_argument(plan))
    first = b.mul(tile, constant(_SUM_COLUMNS))
    whole = plan.columns // lanes * lanes
    for i, (x, access) in enumerate(plan.program.column_sums):
        target, kind = e.operand(b, args, access.argument), se.value_type(x.dtype, lanes)
        partial = e.bytes_after(b, workspace, constant(sum(sizes[:i])))

        def add_up(column: ir.Value, mask: ir.Constant | None, kind=kind, partial=partial,
                   target=target, access=access) -> None:
            total = ir.Constant(kind, None)
            if plan.tiles:
                with e.loop(b, constant(plan.tiles), 1, [total]) as (index, carried):
                    row = e.bytes_after(b, partial, b.mul(index, constant(sum(sizes))))
                    pointer = e.address(b, row, column, e.element(kind))
                    carried[0] = b.fadd(carried[0], e.load(b, pointer, kind))
                total = carried[0]
            pointer = e.address(b, target, column, se.storage_type(access.dtype))
            se.store(b, total, pointer, access.dtype, mask)

        stop = e.minimum(b, b.sub(constant(whole), first), constant(_SUM_COLUMNS))
        with b.if_then(b.icmp_signed(">", stop, constant(0))):
            with e.loop(b, stop, lanes) as (column, _):
                add_up(b.add(first, column), None)
        if whole < plan.columns:
            is_last = b.icmp_signed("==", tile, constant((plan.columns - 1) // _SUM_COLUMNS))
            with b.if_then(is_last):
                add_up(constant(whole), e.prefix_mask(lanes, plan.columns - whole))
    b.ret_void()


def _workspace_argument(plan: RowPlan) -> int:
    program = plan.program
    return 1 + max(a.argument for _, a in (*program.stores, *program.column_sums))


@contextmanager
def _count(b: ir.IRBuilder, first: ir.Value, most: int, limit: int):
    """A loop over first, first + 1, … for `most` turns, or fewer where `limit` comes before."""
    if most == 1:
        yield first
        return
    turns = constant(most)
    if limit % most:
        turns = e.minimum(b, turns, b.sub(constant(limit), first))
    with e.loop(b, turns, 1) as (index, _):
        yield b.add(first, index)


@contextmanager
def _repeat(b: ir.IRBuilder, start: int, count: int, step: int, carried: Sequence[ir.Value]):
    """`count` turns from `start` on; straight code if there is one turn only."""
    if count == 1:
        values = list(carried)
        yield constant(start), values
        return
    with e.loop(b, constant(count * step), step, carried) as (index, values):
        yield b.add(index, constant(start)), values
