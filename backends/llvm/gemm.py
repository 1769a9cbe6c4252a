"""Matrix products for the LLVM backend: C[b] = op(A[b])·op(B[b]), with a fused epilogue.

DRAFT-DOC
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm.blocking import Plan, plan_gemm
from backends.llvm.emit import I64, POINTER, VOID, address, constant
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.microkernel import Tile, emit_dot, emit_outer
from backends.llvm.packing import emit_copy_panels, emit_transpose_panel
from backends.llvm.target import Target

__all__ = ["Epilogue", "EpilogueContext", "gemm"]


@dataclass(frozen=True)
class EpilogueContext:
    """What an epilogue may use besides the values: its operands, read in the lanes that exist.

    `operands` are the pointers of the epilogue's operands, in order. `vector` is the type of the
    values (its `count` the lanes); `mask` is None where every lane is stored, else a constant that
    switches on the lanes left of C's right edge.
    """

    target: Target
    operands: tuple[ir.Value, ...]
    vector: ir.VectorType
    mask: ir.Constant | None

    def load(self, b: ir.IRBuilder, operand: int, index: ir.Value) -> ir.Value:
        """The vector that starts at element `index` of an operand (of C's dtype)."""
        pointer = address(b, self.operands[operand], index, self.vector.element)
        return e.load_lanes(b, pointer, self.vector, self.mask)

    def broadcast(self, b: ir.IRBuilder, operand: int, index: ir.Value) -> ir.Value:
        """Element `index` of an operand, in every lane."""
        pointer = address(b, self.operands[operand], index, self.vector.element)
        return e.splat(b, e.load(b, pointer, self.vector.element), self.vector.count)


@dataclass(frozen=True)
class Epilogue:
    """What is done to C's values between the last multiply-add and the store.

    `emit(builder, context, value, row, col)` returns the vector to store for the vector `value`
    that stands at columns col, col + 1, … of a row; `row` counts through the batch (b·m + i), and
    both are i64 values. It may load operands through the context, and branch: the builder's current
    block on return is where the store goes. `key` names what it does, for the kernel's key.
    `elementwise` lists the operands that are read at (row, col) alone, so that C may overwrite
    them.
    """

    key: str
    operand_count: int
    emit: Callable[[ir.IRBuilder, EpilogueContext, ir.Value, ir.Value, ir.Value], ir.Value]
    elementwise: tuple[int, ...] = ()


def gemm(
    target: Target,
    dtype: str,
    batch: int,
    m: int,
    n: int,
    k: int,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    shared_a: bool = False,
    shared_b: bool = False,
    epilogue: Epilogue | None = None,
    key: str = "matmul",
) -> KernelSource:
    """The kernel of C[b] = op(A[b])·op(B[b]) for `dtype` f32 or f64; C is [batch, m, n].

    A is stored [batch, m, k], or [batch, k, m] with `trans_a`; B [batch, k, n], or [batch, n, k]
    with `trans_b`. A `shared` operand has no batch axis and serves every item of the batch. The
    kernel's args are A, B, the epilogue's operands, C. Sizes of 0 are fine: with k = 0 the product
    is 0, and with an empty C there is nothing to run. `key` comes first in the kernel's key.
    """
    layout = ("T" if trans_a else "N") + ("T" if trans_b else "N")
    parts = [key, dtype, layout, f"{batch}x{m}x{n}x{k}"]
    parts += ["shared-a"] * shared_a + ["shared-b"] * shared_b
    parts += [f"epilogue({epilogue.key})"] if epilogue else []
    full_key = " ".join(parts)
    if batch * m * n == 0:
        return KernelSource(full_key, (), lambda module, symbols: None)
    if shared_b and not shared_a and not trans_a:
        batch, m, shared_b = 1, batch * m, False  # the batch is more rows of one product
    plan = plan_gemm(target, dtype, batch, m, n, k, trans_a, trans_b, shared_a, shared_b)
    # With several blocks of k, C holds partial sums while operands are still to be read.
    elementwise = epilogue.elementwise if epilogue and plan.depth_blocks == 1 else ()

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        _Emitter(target, plan, epilogue, module, symbols[0]).emit_kernel()

    return KernelSource(
        key=full_key,
        phases=(Phase("matmul", plan.tiles),),
        emit=emit,
        scratch_bytes=plan.scratch_bytes,
        inplace=tuple((0, 2 + i) for i in elementwise),
    )


@dataclass(frozen=True)
class _Place:
    """Where a tile stands while it runs, and its memory: i64 values and pointers."""

    args: ir.Value
    a: ir.Value  # op(A) of this item of the batch, from p = 0
    b: ir.Value
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


class _Emitter:
    """Emits the function of a matmul's one phase, and the functions that it calls."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        epilogue: Epilogue | None,
        module: ir.Module,
        symbol: str,
    ):
        self.target, self.plan, self.epilogue = target, plan, epilogue
        self.module, self.symbol = module, symbol
        self.operands = epilogue.operand_count if epilogue else 0
        self.scalar = e.float_type(plan.dtype)
        self.vector = ir.VectorType(self.scalar, plan.tile.lanes)
        self.functions: dict[str, ir.Function] = {}

    def emit_kernel(self) -> None:
        """Find the tile's place in C, then add up block after block of k."""
        plan = self.plan
        function = ir.Function(self.module, e.KERNEL_TYPE, self.symbol)
        args, tile, scratch = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        # Neighbouring tiles share columns: where B is the large matrix it is read once.
        rest = b.udiv(tile, constant(plan.row_tiles))
        row0 = b.mul(b.urem(tile, constant(plan.row_tiles)), constant(plan.block_rows))
        col0 = b.mul(b.urem(rest, constant(plan.column_tiles)), constant(plan.block_columns))
        item = b.udiv(rest, constant(plan.column_tiles))
        a_start, b_start, _ = plan.scratch_layout
        with e.loop(b, constant(plan.depth_blocks), 1) as (index, _):
            k0 = b.mul(index, constant(plan.depth))
            place = _Place(
                args=args,
                a=self.matrix(b, args, 0, item, 0 if plan.shared_a else plan.m * plan.k),
                b=self.matrix(b, args, 1, item, 0 if plan.shared_b else plan.n * plan.k),
                sums=scratch,
                a_packed=self.at(b, scratch, constant(a_start)),
                b_packed=self.at(b, scratch, constant(b_start)),
                item=item,
                row0=row0,
                rows=e.minimum(b, constant(plan.block_rows), b.sub(constant(plan.m), row0)),
                col0=col0,
                columns=e.minimum(b, constant(plan.block_columns), b.sub(constant(plan.n), col0)),
                k0=k0,
                depth=e.minimum(b, constant(plan.depth), b.sub(constant(plan.k), k0)),
            )
            if plan.pack_a:
                self.emit_pack_a(b, place)
            if plan.pack_b:
                self.emit_pack_b(b, place)
            self.emit_rows(b, place)
        b.ret_void()

    def emit_pack_a(self, b: ir.IRBuilder, place: _Place) -> None:
        """Pack the block's panels of A."""
        plan = self.plan
        width = plan.tile.rows
        if not plan.trans_a:
            self.emit_transposed(
                b, width, plan.a_panel_items, place.rows, place.depth, place.a_packed,
                lambda r: self.at(b, place.a, self.a_index(b, b.add(place.row0, r), place.k0)),
            )  # fmt: skip
            return
        source = self.at(b, place.a, self.a_index(b, place.row0, place.k0))
        arguments = [source, place.depth, place.rows, place.a_packed]
        b.call(self.copy_panels("a", plan.m, width, plan.a_panel_items), arguments)

    def emit_pack_b(self, b: ir.IRBuilder, place: _Place) -> None:
        """Pack the block's panels of B."""
        plan = self.plan
        width = plan.tile.width
        if plan.trans_b:
            self.emit_transposed(
                b, width, plan.b_panel_items, place.columns, place.depth, place.b_packed,
                lambda c: self.at(b, place.b, self.b_index(b, b.add(place.col0, c), place.k0)),
            )  # fmt: skip
            return
        source = self.at(b, place.b, self.b_index(b, place.col0, place.k0))
        arguments = [source, place.depth, place.columns, place.b_packed]
        b.call(self.copy_panels("b", plan.n, width, plan.b_panel_items), arguments)

    def emit_transposed(
        self, b, width: int, panel_items: int, count, depth, target, source: Callable
    ) -> None:
        """Pack `count` rows of a matrix as panels of `width` columns; `source(r)` is row r."""
        with e.loop(b, count, width) as (r, _):
            columns = e.minimum(b, b.sub(count, r), constant(width))
            index = b.udiv(r, constant(width))
            panel = self.at(b, target, b.mul(index, constant(panel_items)))
            b.call(self.transpose_panel(width), [source(r), depth, columns, panel])

    def emit_rows(self, b: ir.IRBuilder, place: _Place) -> None:
        """Run down the block's rows, a register tile's at a time; C's last may be fewer."""
        plan = self.plan
        rest = plan.m % plan.tile.rows
        with e.loop(b, place.rows, plan.tile.rows) as (r, _):
            row = b.add(place.row0, r)
            if plan.pack_a:
                panel = b.udiv(r, constant(plan.tile.rows))
                a_rows = self.at(b, place.a_packed, b.mul(panel, constant(plan.a_panel_items)))
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
        flat_row = b.add(b.mul(place.item, constant(plan.m)), row)
        with e.loop(b, place.columns, tile.width) as (c, _):
            col = b.add(place.col0, c)
            if plan.form == "zero":
                b.call(self.zero_kernel(tile), [place.sums])
            elif plan.form == "dot":
                panel = self.at(b, place.b, self.b_index(b, col, place.k0))
                columns = e.minimum(b, b.sub(place.columns, c), constant(tile.width))
                b.call(self.dot_kernel(tile), [a_rows, panel, columns, place.sums])
            elif plan.pack_b:
                panel = self.b_panel(b, place, c)
                kernel = self.outer_kernel(tile, tile.width)
                b.call(kernel, [a_rows, panel, place.depth, place.sums])
            else:
                self.emit_unpacked(b, place, tile, a_rows, col)
            first = b.icmp_signed("==", place.k0, constant(0))
            arguments = [place.args, place.sums, flat_row, constant(rows), col, first]
            if plan.depth_blocks == 1 or not self.epilogue:
                b.call(self.finish(last=True), arguments)
            else:
                last_start = constant((plan.depth_blocks - 1) * plan.depth)
                with b.if_else(b.icmp_signed("==", place.k0, last_start)) as (then, otherwise):
                    with then:
                        b.call(self.finish(last=True), arguments)
                    with otherwise:
                        b.call(self.finish(last=False), arguments)

    def emit_unpacked(self, b, place: _Place, tile: Tile, a_rows: ir.Value, col: ir.Value) -> None:
        """A register tile with B [k, n] read as it lies, but for a right edge, which is packed."""
        plan = self.plan
        panel = self.at(b, place.b, self.b_index(b, col, place.k0))

        def whole() -> None:
            kernel = self.outer_kernel(tile, plan.n)
            b.call(kernel, [a_rows, panel, place.depth, place.sums])

        def edge() -> None:
            copy = self.copy_panels("b", plan.n, tile.width, plan.b_panel_items)
            arguments = [panel, place.depth, constant(plan.n % tile.width), place.b_packed]
            b.call(copy, arguments)
            kernel = self.outer_kernel(tile, tile.width)
            b.call(kernel, [a_rows, place.b_packed, place.depth, place.sums])

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
        L1, costs 2 % at k = 128.
        """

        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            args, sums, row0, rows, col, first = function.args
            c = self.operand(b, args, 2 + self.operands)
            with e.loop(b, rows, 1) as (r, _):
                row = b.add(row0, r)
                source = self.at(b, sums, b.mul(r, constant(self.plan.tile.width)))
                target = self.at(b, c, b.add(b.mul(row, constant(self.plan.n)), col))

                def store_row(used: int) -> None:
                    self.emit_store_row(b, args, source, target, row, col, first, last, used)

                self.whole_or_edge(
                    b,
                    col,
                    lambda: store_row(self.plan.tile.width),
                    lambda: store_row(self.plan.n % self.plan.tile.width),
                )

        kinds = [POINTER, POINTER, I64, I64, I64, e.BOOL]
        return self.function(f"finish_{'last' if last else 'partial'}", kinds, define)

    def emit_store_row(self, b, args, source, target, row, col, first, last, used: int) -> None:
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
            if last and self.epilogue:
                pointers = tuple(self.operand(b, args, 2 + i) for i in range(self.operands))
                context = EpilogueContext(self.target, pointers, self.vector, mask)
                value = self.epilogue.emit(b, context, value, row, b.add(col, offset))
            e.store_lanes(b, value, pointer, mask)

    # The functions that the kernel calls, each defined when first asked for.

    def outer_kernel(self, tile: Tile, b_stride: int) -> ir.Function:
        plan = self.plan
        if plan.pack_a:
            a_strides = (1, plan.tile.rows)
        else:
            a_strides = (1, plan.m) if plan.trans_a else (plan.k, 1)

        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            emit_outer(function, b, self.vector, tile, a_strides, b_stride)

        kinds = [POINTER, POINTER, I64, POINTER]
        return self.function(f"outer_{tile.rows}_{b_stride}", kinds, define)

    def dot_kernel(self, tile: Tile) -> ir.Function:
        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            emit_dot(function, b, self.vector, tile, self.plan.k)

        return self.function(f"dot_{tile.rows}", [POINTER, POINTER, I64, POINTER], define)

    def zero_kernel(self, tile: Tile) -> ir.Function:
        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            with e.loop(b, constant(tile.rows * tile.width), tile.lanes) as (i, _):
                e.store(b, ir.Constant(self.vector, None), self.at(b, function.args[0], i))

        return self.function(f"zero_{tile.rows}", [POINTER], define)

    def transpose_panel(self, width: int) -> ir.Function:
        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            emit_transpose_panel(function, b, self.vector, width, self.plan.k)

        return self.function(f"transpose_{width}", [POINTER, I64, I64, POINTER], define)

    def copy_panels(self, name: str, size: int, width: int, panel_items: int) -> ir.Function:
        """`void f(source, depth, columns, target)`: pack columns of a matrix [k, size].

        Columns that fill no panel are the matrix's last, hence of a number that is known here.
        """

        def define(function: ir.Function, b: ir.IRBuilder) -> None:
            source, depth, columns, target = function.args
            panels = b.udiv(columns, constant(width))
            kinds = [POINTER, I64, I64, POINTER]
            if size >= width:

                def define_whole(whole: ir.Function, inner: ir.IRBuilder) -> None:
                    emit_copy_panels(whole, inner, self.vector, width, width, size, panel_items)

                whole = self.function(f"copy_{name}_panels", kinds, define_whole)
                with b.if_then(b.icmp_signed(">", panels, constant(0))):
                    b.call(whole, [source, depth, panels, target])
            if size % width:

                def define_edge(edge: ir.Function, inner: ir.IRBuilder) -> None:
                    emit_copy_panels(
                        edge, inner, self.vector, size % width, width, size, panel_items
                    )

                edge = self.function(f"copy_{name}_edge", kinds, define_edge)
                start = b.mul(panels, constant(width))
                with b.if_then(b.icmp_signed("<", start, columns)):
                    place = self.at(b, target, b.mul(panels, constant(panel_items)))
                    b.call(edge, [self.at(b, source, start), depth, constant(1), place])

        return self.function(f"copy_{name}", [POINTER, I64, I64, POINTER], define)

    def function(self, name: str, kinds: list[ir.Type], define: Callable) -> ir.Function:
        """The kernel's private function `name`, defined by `define(function, builder)` once.

        Never inlined: a body compiled on its own keeps its registers, and LLVM's time stays linear.
        """
        if name not in self.functions:
            kind = ir.FunctionType(VOID, kinds)
            function = ir.Function(self.module, kind, f"{self.symbol}_{name}")
            function.linkage = "internal"
            function.attributes.add("noinline")
            self.functions[name] = function
            b = ir.IRBuilder(function.append_basic_block("entry"))
            define(function, b)
            b.ret_void()
        return self.functions[name]

    # Addresses.

    def b_panel(self, b: ir.IRBuilder, place: _Place, c: ir.Value) -> ir.Value:
        """The packed panel of B that holds column `c` of the block."""
        index = b.udiv(c, constant(self.plan.tile.width))
        return self.at(b, place.b_packed, b.mul(index, constant(self.plan.b_panel_items)))

    def at(self, b: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return address(b, pointer, index, self.scalar)

    def operand(self, b: ir.IRBuilder, args: ir.Value, index: int) -> ir.Value:
        """The pointer that stands at `index` of the kernel's args."""
        return b.load(b.gep(args, [constant(index)], source_etype=POINTER), typ=POINTER)

    def matrix(self, b: ir.IRBuilder, args, index: int, item, stride: int) -> ir.Value:
        """A matrix of this item of the batch."""
        return self.at(b, self.operand(b, args, index), b.mul(item, constant(stride)))

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
