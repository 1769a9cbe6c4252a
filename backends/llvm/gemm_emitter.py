"""The code of a matrix product: from the plan of `blocking.py` to LLVM IR.

One native function does it, called once for each tile: block_rows x block_columns of C, and all of
k or a chunk of it, chosen by `blocking.py`. For every block of `depth` values of k, a tile

1. packs its block of B into panels one register tile wide, in the thread's scratch (`packing.py`);
2. packs its block of A likewise where that is stored [k, m], or its rows would collide in L1;
3. runs down the rows, a register tile's at a time, and for each along the panels of B: a panel of A
   stays in L1, the block of B in L2, and C's sums in registers (`microkernel.py`);
4. brings the sums to C: added to those of earlier blocks of k, in the last through the epilogue.
   Where k is cut into chunks, it brings them to the chunk's place in the workspace instead, and a
   second phase adds up the chunks (`gemm_chunks.py`).

    for k0 in range(start of chunk, end of chunk, depth):
        pack B[k0 : k0 + depth, columns]                     # L2
        for row in range(rows, step=tile.rows):              # A[row : …, k0 : …] in L1
            for col in range(columns, step=tile.width):
                sums = A[row : …, k0 : …] @ packed[col]      # registers
                C[row : …, col : …] (+)= epilogue(sums)

Each number of C is the sum over chunks, pairwise, of sums over blocks of k, in order, of sums in
ascending p, whatever tile it is in: results do not depend on the threads, and no sum is longer than
a few hundred terms before it is added to another. The exceptions to the scheme are few rows, for
which B is not worth packing: it is read as it lies, row by row if stored [k, n], as dot products if
stored [n, k].

Tiles share nothing. The price is that B is packed once for each tile along m and A for each along
n: some 6 multiply-adds a number, for block_rows or block_columns of use. Chunks keep both large.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.blocking import Plan
from backends.llvm.emit import I64, POINTER, address, constant
from backends.llvm.epilogue import Epilogue, store_result
from backends.llvm.microkernel import Tile, emit_dot, emit_outer
from backends.llvm.packing import emit_copy_panels, emit_transpose_panel

__all__ = ["GemmEmitter"]


@dataclass(frozen=True)
class _Place:
    """Where a tile stands while it runs, and its memory: i64 values and pointers."""

    args: ir.Value
    a: ir.Value  # op(A) of this item of the batch, from p = 0
    b: ir.Value
    result: ir.Value  # where C's row 0 lies, or that of the chunk's result
    sums: ir.Value  # scratch: a register tile of C
    a_packed: ir.Value  # scratch: a panel of A
    b_packed: ir.Value  # scratch: the block of B
    item: ir.Value  # of the batch
    row0: ir.Value
    rows: ir.Value
    col0: ir.Value
    columns: ir.Value
    k0: ir.Value
    depth: ir.Value
    first: ir.Value  # whether this is the chunk's first block


class GemmEmitter:
    """Emits the function of a matmul's first phase, and the functions that it calls."""

    def __init__(self, plan: Plan, epilogue: Epilogue | None, module: ir.Module, symbol: str):
        self.plan, self.epilogue = plan, epilogue
        self.module, self.symbol = module, symbol
        self.operands = epilogue.operand_count if epilogue else 0
        self.vector = se.value_type(plan.dtype, plan.tile.lanes)
        self.scalar = self.vector.element
        # Whether sums go from registers to their place at once: all of every tile, as they are.
        self.direct = plan.chunks > 1 or (
            plan.form != "zero" and plan.n % plan.tile.width == 0 and epilogue is None
        )
        self.row_stride = plan.n if plan.chunks == 1 else plan.chunk_columns

    def emit_kernel(self) -> None:
        """Find the tile's place in C and in k, then add up block after block."""
        plan = self.plan
        b, args, tile, scratch = e.kernel(self.module, self.symbol)
        # Neighbouring tiles share columns: where B is the large matrix it is read once.
        rest, row_tile = e.divide(b, tile, plan.row_tiles)
        rest, column_tile = e.divide(b, rest, plan.column_tiles)
        item, chunk = e.divide(b, rest, plan.chunks)
        row0 = b.mul(row_tile, constant(plan.block_rows))
        col0 = b.mul(column_tile, constant(plan.block_columns))
        start = b.mul(chunk, constant(plan.chunk))
        length = constant(max(1, plan.k))
        if plan.chunks > 1:
            length = e.minimum(b, constant(plan.chunk), b.sub(constant(plan.k), start))
        a_start, b_start, _ = plan.scratch_layout
        with e.loop(b, length, plan.depth) as (offset, _):
            place = _Place(
                args=args,
                a=self.matrix(b, args, 0, item, 0 if plan.shared_a else plan.m * plan.k),
                b=self.matrix(b, args, 1, item, 0 if plan.shared_b else plan.n * plan.k),
                result=self.result(b, args, item, chunk),
                sums=scratch,
                a_packed=self.at(b, scratch, constant(a_start)),
                b_packed=self.at(b, scratch, constant(b_start)),
                item=item,
                row0=row0,
                rows=e.minimum(b, constant(plan.block_rows), b.sub(constant(plan.m), row0)),
                col0=col0,
                columns=e.minimum(b, constant(plan.block_columns), b.sub(constant(plan.n), col0)),
                k0=b.add(start, offset),
                depth=e.minimum(b, constant(plan.depth), b.sub(length, offset)),
                first=b.icmp_signed("==", offset, constant(0)),
            )
            if plan.pack_a:
                self.emit_pack_a(b, place)
            if plan.pack_b:
                self.emit_pack_b(b, place)
            self.emit_rows(b, place)
        b.ret_void()

    def result(self, b: ir.IRBuilder, args: ir.Value, item: ir.Value, chunk: ir.Value) -> ir.Value:
        """The item's result of the chunk in the workspace; with one chunk the item's C."""
        plan = self.plan
        place = b.mul(item, constant(plan.m * self.row_stride))
        if plan.chunks > 1:
            place = b.add(place, b.mul(chunk, constant(plan.chunk_items)))
        index = 2 + self.operands + (plan.chunks > 1)
        return self.at(b, e.operand(b, args, index), place)

    def emit_pack_a(self, b: ir.IRBuilder, place: _Place) -> None:
        """Pack the block's panels of A."""
        plan = self.plan
        width = plan.tile.rows
        if not plan.trans_a:
            self.emit_transposed(
                b, width, place.rows, place.depth, place.a_packed,
                lambda r: self.at(b, place.a, self.a_index(b, b.add(place.row0, r), place.k0)),
            )  # fmt: skip
            return
        source = self.at(b, place.a, self.a_index(b, place.row0, place.k0))
        arguments = [source, place.depth, place.rows, place.a_packed]
        b.call(self.copy_panels("a", plan.m, width), arguments)

    def emit_pack_b(self, b: ir.IRBuilder, place: _Place) -> None:
        """Pack the block's panels of B."""
        plan = self.plan
        width = plan.tile.width
        if plan.trans_b:
            self.emit_transposed(
                b, width, place.columns, place.depth, place.b_packed,
                lambda c: self.at(b, place.b, self.b_index(b, b.add(place.col0, c), place.k0)),
            )  # fmt: skip
            return
        source = self.at(b, place.b, self.b_index(b, place.col0, place.k0))
        arguments = [source, place.depth, place.columns, place.b_packed]
        b.call(self.copy_panels("b", plan.n, width), arguments)

    def emit_transposed(
        self, b, width: int, count: ir.Value, depth: ir.Value, target: ir.Value, source: Callable
    ) -> None:
        """Pack `count` rows of a matrix as panels of `width` columns; `source(r)` is row r."""
        with e.loop(b, count, width) as (r, _):
            columns = e.minimum(b, b.sub(count, r), constant(width))
            panel = self.panel(b, target, r, width)
            b.call(self.transpose_panel(width), [source(r), depth, columns, panel])

    def emit_rows(self, b: ir.IRBuilder, place: _Place) -> None:
        """Run down the block's rows, a register tile's at a time; C's last may be fewer."""
        plan = self.plan
        rest = plan.m % plan.tile.rows
        with e.loop(b, place.rows, plan.tile.rows) as (r, _):
            row = b.add(place.row0, r)
            if plan.pack_a:
                a_rows = self.panel(b, place.a_packed, r, plan.tile.rows)
            else:
                a_rows = self.at(b, place.a, self.a_index(b, row, place.k0))
            if rest == 0:
                self.emit_strip(b, place, row, a_rows, plan.tile.rows)
            else:
                whole = b.icmp_signed("<=", row, constant(plan.m - plan.tile.rows))
                with b.if_else(whole, likely=True) as (then, otherwise):
                    with then:
                        self.emit_strip(b, place, row, a_rows, plan.tile.rows)
                    with otherwise:
                        self.emit_strip(b, place, row, a_rows, rest)

    def emit_strip(self, b, place: _Place, row: ir.Value, a_rows: ir.Value, rows: int) -> None:
        """`rows` rows of the block: their register tiles from left to right."""
        plan = self.plan
        tile = Tile(rows, plan.tile.vectors, plan.tile.lanes)
        with e.loop(b, place.columns, tile.width) as (c, _):
            col = b.add(place.col0, c)
            out = place.sums
            if self.direct:
                out = self.at(b, place.result, b.add(b.mul(row, constant(self.row_stride)), col))
            if plan.form == "zero":
                b.call(self.zero_kernel(tile), [out])
            elif plan.form == "dot":
                panel = self.at(b, place.b, self.b_index(b, col, place.k0))
                columns = e.minimum(b, b.sub(place.columns, c), constant(tile.width))
                b.call(self.dot_kernel(tile), [a_rows, panel, columns, place.depth, out])
            elif plan.pack_b:
                panel = self.panel(b, place.b_packed, c, tile.width)
                arguments = [a_rows, panel, place.depth, out, place.first]
                b.call(self.outer_kernel(tile, tile.width), arguments)
            else:
                self.emit_unpacked(b, place, tile, a_rows, out, col)
            if not self.direct:
                self.emit_finish(b, place, row, rows, col)

    def emit_finish(self, b, place: _Place, row: ir.Value, rows: int, col: ir.Value) -> None:
        """Bring a register tile from scratch to C, in the last block of k through the epilogue."""
        plan = self.plan
        flat_row = b.add(b.mul(place.item, constant(plan.m)), row)
        arguments = [place.args, place.sums, flat_row, constant(rows), col, place.first]
        if plan.depth_blocks == 1 or not self.epilogue:
            b.call(self.finish(last=True), arguments)
            return
        last_start = constant((plan.depth_blocks - 1) * plan.depth)
        with b.if_else(b.icmp_signed("==", place.k0, last_start)) as (then, otherwise):
            with then:
                b.call(self.finish(last=True), arguments)
            with otherwise:
                b.call(self.finish(last=False), arguments)

    def emit_unpacked(self, b, place: _Place, tile: Tile, a_rows, out, col: ir.Value) -> None:
        """A register tile with B [k, n] read as it lies, but for a right edge, which is packed."""
        plan = self.plan
        panel = self.at(b, place.b, self.b_index(b, col, place.k0))

        def whole() -> None:
            kernel = self.outer_kernel(tile, plan.n)
            b.call(kernel, [a_rows, panel, place.depth, out, place.first])

        def edge() -> None:
            arguments = [panel, place.depth, constant(plan.n % tile.width), place.b_packed]
            b.call(self.copy_panels("b", plan.n, tile.width), arguments)
            kernel = self.outer_kernel(tile, tile.width)
            b.call(kernel, [a_rows, place.b_packed, place.depth, out, place.first])

        self.whole_or_edge(b, col, whole, edge)

    def whole_or_edge(self, b, col: ir.Value, whole: Callable, edge: Callable) -> None:
        """Branch on whether the register tile at `col` lies inside C; emit what can happen."""
        n, width = self.plan.n, self.plan.tile.width
        if n % width == 0:
            whole()
        elif n < width:
            edge()
        else:
            inside = b.icmp_signed("<=", col, constant(n - width))
            with b.if_else(inside, likely=True) as (then, otherwise):
                with then:
                    whole()
                with otherwise:
                    edge()

    def finish(self, last: bool) -> ir.Function:
        """`void f(args, sums, row, rows, col, first)`: a register tile's way from scratch to C.

        Sums of the blocks of k before this one are added unless it is the `first`; the `last` one's
        pass through the epilogue. A loop over rows keeps the epilogue's code small: it would stand
        in a micro-kernel once for each of its registers. The detour through scratch, which is in
        L1, is an estimated 30 of 800 cycles at k = 128; a tile that needs nothing done skips it.
        """

        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            args, sums, row0, rows, col, first = function.args
            c = e.operand(b, args, 2 + self.operands)
            operands = tuple(e.operand(b, args, 2 + i) for i in range(self.operands))
            with e.loop(b, rows, 1) as (r, _):
                row = b.add(row0, r)
                source = self.at(b, sums, b.mul(r, constant(self.plan.tile.width)))
                target = self.at(b, c, b.add(b.mul(row, constant(self.plan.n)), col))

                def store_row(used: int) -> None:
                    self.emit_store_row(b, operands, source, target, row, col, first, last, used)

                self.whole_or_edge(
                    b,
                    col,
                    lambda: store_row(self.plan.tile.width),
                    lambda: store_row(self.plan.n % self.plan.tile.width),
                )

        kinds = [POINTER, POINTER, I64, I64, I64, e.BOOL]
        return self.function(f"finish_{'last' if last else 'partial'}", kinds, define)

    def emit_store_row(self, b, operands, source, target, row, col, first, last, used) -> None:
        """Store `used` columns of one row of sums, vector by vector."""
        lanes = self.plan.tile.lanes
        for start in range(0, used, lanes):
            offset = constant(start)
            mask = e.prefix_mask(lanes, used - start) if used - start < lanes else None
            value = e.load(b, self.at(b, source, offset), self.vector)
            pointer = self.at(b, target, offset)
            if self.plan.depth_blocks > 1:
                before = e.load_lanes(b, pointer, self.vector, mask)
                value = b.select(first, value, b.fadd(before, value))
            epilogue = self.epilogue if last else None
            store_result(b, epilogue, operands, value, pointer, row, b.add(col, offset), mask)

    # The functions that the kernel calls, each defined when first asked for.

    def outer_kernel(self, tile: Tile, b_stride: int) -> ir.Function:
        plan = self.plan
        if plan.pack_a:
            a_strides = (1, plan.tile.rows)
        else:
            a_strides = (1, plan.m) if plan.trans_a else (plan.k, 1)

        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            adds = self.direct and plan.depth_blocks > 1
            out_stride = self.out_stride(tile)
            emit_outer(function, b, self.vector, tile, a_strides, b_stride, out_stride, adds)

        kinds = [POINTER, POINTER, I64, POINTER, e.BOOL]
        return self.function(f"outer_{tile.rows}_{b_stride}", kinds, define)

    def dot_kernel(self, tile: Tile) -> ir.Function:
        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            emit_dot(function, b, self.plan.dtype, tile, self.plan.k, self.out_stride(tile))

        return self.function(f"dot_{tile.rows}", [POINTER, POINTER, I64, I64, POINTER], define)

    def out_stride(self, tile: Tile) -> int:
        """Numbers from row to row where a micro-kernel puts its tile."""
        return self.row_stride if self.direct else tile.width

    def zero_kernel(self, tile: Tile) -> ir.Function:
        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            with e.loop(b, constant(tile.rows * tile.width), tile.lanes) as (i, _):
                e.store(b, ir.Constant(self.vector, None), self.at(b, function.args[0], i))

        return self.function(f"zero_{tile.rows}", [POINTER], define)

    def transpose_panel(self, width: int) -> ir.Function:
        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            emit_transpose_panel(function, b, self.vector, width, self.plan.k)

        return self.function(f"transpose_{width}", [POINTER, I64, I64, POINTER], define)

    def copy_panels(self, name: str, size: int, width: int) -> ir.Function:
        """`void f(source, depth, columns, target)`: pack columns of a matrix [k, size].

        Columns that fill no panel are the matrix's last, hence of a number that is known here.
        """
        kinds = [POINTER, I64, I64, POINTER]

        def copy(used: int) -> ir.Function:
            def define(function: ir.Function, b: ir.IRBuilder) -> None:
                panel_items = self.plan.panel_items(width)
                emit_copy_panels(function, b, self.vector, used, width, size, panel_items)

            return self.function(f"copy_{name}_{used}", kinds, define)

        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            source, depth, columns, target = function.args
            panels = b.udiv(columns, constant(width))
            if size >= width:
                with b.if_then(b.icmp_signed(">", panels, constant(0))):
                    b.call(copy(width), [source, depth, panels, target])
            if size % width:
                start = b.mul(panels, constant(width))
                with b.if_then(b.icmp_signed("<", start, columns)):
                    edge = self.at(b, source, start)
                    place = self.panel(b, target, start, width)
                    b.call(copy(size % width), [edge, depth, constant(1), place])

        return self.function(f"copy_{name}", kinds, define)

    def function(self, name: str, kinds: list[ir.Type], define: Callable) -> ir.Function:
        """The kernel's private function `name`, defined by `define(function, builder)` once."""
        return e.private_function(
            self.module, f"{self.symbol}_{name}", kinds, lambda b, *_: define(b.function, b)
        )

    # Addresses.

    def at(self, b: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return address(b, pointer, index, self.scalar)

    def panel(self, b: ir.IRBuilder, packed: ir.Value, index: ir.Value, width: int) -> ir.Value:
        """The packed panel that begins with row or column `index` of its block."""
        number = b.udiv(index, constant(width))
        return self.at(b, packed, b.mul(number, constant(self.plan.panel_items(width))))

    def matrix(self, b: ir.IRBuilder, args, index: int, item, stride: int) -> ir.Value:
        """A matrix of this item of the batch."""
        return self.at(b, e.operand(b, args, index), b.mul(item, constant(stride)))

    def a_index(self, b: ir.IRBuilder, row: ir.Value, p: ir.Value) -> ir.Value:
        """Where op(A)[row, p] lies."""
        if self.plan.trans_a:
            return b.add(b.mul(p, constant(self.plan.m)), row)
        return b.add(b.mul(row, constant(self.plan.k)), p)

    def b_index(self, b: ir.IRBuilder, col: ir.Value, p: ir.Value) -> ir.Value:
        """Where op(B)[p, col] lies."""
        if self.plan.trans_b:
            return b.add(b.mul(col, constant(self.plan.k)), p)
        return b.add(b.mul(p, constant(self.plan.n)), col)
