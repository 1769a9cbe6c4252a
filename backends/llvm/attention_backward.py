"""Attention's gradients for the LLVM backend, again with no T×S matrix.

    p = e^(scale q kᵀ - log_sum)       dv = pᵀ do
    ds = p (do vᵀ - delta)             dk = scale dsᵀ q        delta = Σ do o, one a row
                                       dq = scale ds k

A tile owns a batch row, a key head and a stretch of its keys, and all queries of the heads that
share the key head. It packs every query and its gradient, then, for each block of its keys and
each block of query rows, computes p and ds strip by strip (five products in all, none of them
twice) and adds to dk and dv, which stay in cache through the block of keys, and to dq:

    for each block of keys:            pack kᵀ and vᵀ as panels, k as rows
        for each block of rows:
            for each strip of rows:    p, ds in the panels that it sees, 0 in the others
                                       dq += ds k
            for each strip of keys:    dv += pᵀ do,  dk += dsᵀ (scale q)
        write dk and dv
    write scale dq

With batch rows and key heads enough for every core, a tile's stretch is all the keys. Else the
keys are cut, each tile writes a dq of its own to the workspace, and a second phase adds them up in
order.
"""

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.attention_blocks import (
    BlockEmitter,
    Product,
    Scratch,
    Sizes,
    Strip,
    Visible,
    across_lanes,
    add_range_arrays,
    exp,
    larger_int,
)
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node

__all__ = ["attention_backward"]

_ROWS = 48
_KEYS = 128
# Tiles that keep a small machine's cores busy, if the keys can be cut so far.
_TILES = 8
# Numbers of dq that a tile of the second phase adds up.
_SUM_ITEMS = 8192


@lowers(ops.AttentionBackward)
def attention_backward(node: Node, target: Target) -> KernelSource:
    """The kernel of an AttentionBackward node: args q, k, v, lo, hi, o, log_sum, do, dq, dk, dv."""
    q, k = node.inputs[0].type, node.inputs[1].type
    return backward_kernel(Sizes.of(q, k, node.op.scale), target)


def backward_kernel(sizes: Sizes, target: Target) -> KernelSource:
    plan = _Plan(sizes, target)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        emitter = _Backward(target, plan, module, symbols[0])
        emitter.emit_gradients()
        if plan.stretches > 1:
            emitter.emit_sum(symbols[1])

    phases = [Phase("gradients", plan.tiles)]
    if plan.stretches > 1:
        phases.append(Phase("sum", -(-plan.dq_items // _SUM_ITEMS)))
    return KernelSource(
        f"attention_backward {sizes}",
        tuple(phases),
        emit,
        workspace_bytes=plan.workspace_bytes,
        scratch_bytes=plan.scratch.bytes,
    )


class _Plan:
    """How the work is cut, and the memory that a tile needs."""

    def __init__(self, sizes: Sizes, target: Target):
        self.sizes = sizes
        strip = self.strip = Strip.of(target, sizes)
        pairs = sizes.batch * sizes.groups
        self.strips = -(-sizes.queries * sizes.repeat // strip.rows)
        self.block_strips = min(_ROWS // strip.rows, self.strips)
        self.block_rows = self.block_strips * strip.rows
        self.block_keys = min(_KEYS, strip.columns(sizes.keys))
        blocks = -(-sizes.keys // self.block_keys)
        self.stretch_blocks = -(-blocks // min(blocks, -(-_TILES // pairs)))
        self.stretches = -(-blocks // self.stretch_blocks)
        self.stretch_keys = self.stretch_blocks * self.block_keys
        self.tiles = pairs * self.stretches
        self.columns = strip.columns(sizes.width)
        # Rows of p and ds: room for a strip of keys that ends past the block, and an odd number of
        # cache lines, so that a column of them does not crowd into few of the cache's sets.
        self.p_row = self.block_keys + strip.panel
        self.scratch = self._layout()
        self.dq_items = sizes.batch * sizes.queries * sizes.heads * sizes.width
        parts = self.stretches if self.stretches > 1 else 0
        self.workspace_bytes = parts * self.dq_items * sizes.compute.itemsize

    def _layout(self) -> Scratch:
        strip, sizes = self.strip, self.sizes
        rows, scalar = self.strips * strip.rows, se.value_type(sizes.compute)
        key_rows = -(-self.block_keys // strip.rows) * strip.rows
        scratch = Scratch()
        add_range_arrays(scratch, sizes, strip, sizes.queries, rows)
        for name in ("q", "do", "dq"):
            scratch.add(name, rows * self.columns, scalar)
        for name in ("log_sum", "delta"):
            scratch.add(name, rows, scalar)
        for name in ("keys", "values"):
            scratch.add(name, self.block_keys * sizes.width, scalar)
        scratch.add("key_rows", self.block_keys * self.columns, scalar)
        for name in ("dk", "dv"):
            scratch.add(name, key_rows * self.columns, scalar)
        for name in ("p", "ds"):
            scratch.add(name, self.block_rows * self.p_row, scalar)
        return scratch


class _Backward(BlockEmitter):
    def __init__(self, target: Target, plan: _Plan, module: ir.Module, symbol: str):
        super().__init__(target, plan.sizes, module, symbol)
        self.plan, self.scratch = plan, plan.scratch

    def emit_gradients(self) -> None:
        """The first phase: a tile's queries, then its blocks of keys, then dq."""
        sizes, plan = self.sizes, self.plan
        function = ir.Function(self.module, e.KERNEL_TYPE, self.symbol)
        args, tile, scratch = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        # The first keys, which causal queries see most of, are handed out first.
        pairs = constant(sizes.batch * sizes.groups)
        stretch, pair = b.udiv(tile, pairs), b.urem(tile, pairs)
        item, group = b.udiv(pair, constant(sizes.groups)), b.urem(pair, constant(sizes.groups))
        head = b.add(
            b.mul(b.mul(item, constant(sizes.queries)), constant(sizes.heads)),
            b.mul(group, constant(sizes.repeat)),
        )
        b.call(self.begin(), [args, b.mul(item, constant(sizes.queries)), head, scratch])
        start = b.mul(stretch, constant(plan.stretch_keys))
        stop = e.minimum(b, b.add(start, constant(plan.stretch_keys)), constant(sizes.keys))
        with self.count_up(b, start, stop, plan.block_keys) as key0:
            count = e.minimum(b, constant(plan.block_keys), b.sub(stop, key0))
            token = b.add(b.mul(item, constant(sizes.keys)), key0)
            place = b.mul(b.add(b.mul(token, constant(sizes.groups)), group), constant(sizes.width))
            b.call(self.key_block(), [args, place, key0, count, scratch])
        b.call(self.write_dq(), [args, head, stretch, scratch])
        b.ret_void()

    def begin(self) -> ir.Function:
        """`void f(args, token0, head, scratch)`: all that is known of the rows, and dq = 0."""
        sizes, plan, at = self.sizes, self.plan, self.scratch.at
        load_ranges, outer = self.load_ranges(self.scratch), sizes.heads * sizes.width
        pack_q = self.pack_rows("pack_q", outer, sizes.repeat, sizes.scale)
        pack_do = self.pack_rows("pack_do", outer, sizes.repeat)
        rows, used = plan.strips * self.strip.rows, sizes.queries * sizes.repeat

        def define(b, args, token0, head, scratch):
            lo, hi = (e.address(b, self.operand(b, args, n), token0, I32) for n in (3, 4))
            queries, strips = constant(sizes.queries), constant(plan.strips)
            b.call(load_ranges, [lo, hi, queries, strips, scratch])
            first = b.mul(head, constant(sizes.width))
            for n, name, pack in ((0, "q", pack_q), (7, "do", pack_do)):
                source = self.element(b, self.operand(b, args, n), first)
                b.call(pack, [source, at(b, scratch, "keep"), queries, at(b, scratch, name)])
                rest = at(b, scratch, name, used * plan.columns)
                self.zero(b, rest, constant((rows - used) * plan.columns))
            self.zero(b, at(b, scratch, "dq"), constant(rows * plan.columns))
            with e.loop(b, constant(rows), 1) as (row, _):
                for name in ("log_sum", "delta"):
                    e.store(b, ir.Constant(self.scalar, 0.0), at(b, scratch, name, row))
            o, log_sum = (self.operand(b, args, n) for n in (5, 6))
            with e.loop(b, queries, 1) as (i, _), e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.add(b.mul(i, constant(sizes.repeat)), r)
                place = b.add(head, b.add(b.mul(i, constant(sizes.heads)), r))
                e.store(
                    b, e.load(b, self.at(b, log_sum, place), self.scalar),
                    at(b, scratch, "log_sum", row),
                )  # fmt: skip
                do = at(b, scratch, "do", b.mul(row, constant(plan.columns)))
                delta = self.dot(b, do, self.element(b, o, b.mul(place, constant(sizes.width))))
                e.store(b, delta, at(b, scratch, "delta", row))

        return self.function("begin", [POINTER, I64, I64, POINTER], define)

    def dot(self, b: ir.IRBuilder, padded: ir.Value, row: ir.Value) -> ir.Value:
        """The dot product of a padded row of scratch and a row of D numbers."""
        width, lanes, total = self.sizes.width, self.strip.lanes, self.number(0.0)
        for start in range(0, width, lanes):
            mask = e.prefix_mask(lanes, width - start) if width - start < lanes else None
            left = e.load(b, self.at(b, padded, start), self.vector)
            right = self.read(b, self.element(b, row, start), mask)
            total = e.fma(b, left, right, total)
        return across_lanes(b, total, lambda b, x, y: b.fadd(x, y))

    def key_block(self) -> ir.Function:
        """`void f(args, place, key0, count, scratch)`: dk and dv of a block of keys, which start at
        number `place` of k and v, and what the block adds to dq."""
        plan, at = self.plan, self.scratch.at
        pack_keys, pack_block = self.pack_transposed(), self.pack_block()
        row_block, write = self.row_block(), self.write_keys()
        block_rows, strips = plan.block_rows, plan.strips

        def define(b, args, place, key0, count, scratch):
            for name in ("dk", "dv"):
                key_rows = -(-plan.block_keys // self.strip.rows) * self.strip.rows
                self.zero(b, at(b, scratch, name), constant(key_rows * plan.columns))
            first, stop = (self.load_index(b, at(b, scratch, "hull", n)) for n in range(2))
            some = b.and_(
                b.icmp_signed("<", key0, stop), b.icmp_signed("<", first, b.add(key0, count))
            )
            with b.if_then(some):
                k, v = (self.element(b, self.operand(b, args, n), place) for n in (1, 2))
                b.call(pack_keys, [k, count, at(b, scratch, "keys")])
                b.call(pack_keys, [v, count, at(b, scratch, "values")])
                b.call(pack_block, [k, key0, count, scratch])
                panels = b.udiv(self.round_up(b, count), constant(self.strip.panel))
                with e.loop(b, constant(strips), plan.block_strips) as (strip0, _):
                    stop = e.minimum(
                        b, b.add(strip0, constant(plan.block_strips)), constant(strips)
                    )
                    b.call(row_block, [strip0, stop, key0, panels, scratch])
            for n, name in ((9, "dk"), (10, "dv")):
                target = self.element(b, self.operand(b, args, n), place)
                b.call(write, [at(b, scratch, name), count, target])

        assert block_rows % self.strip.rows == 0
        return self.function("key_block", [POINTER, I64, I64, I64, POINTER], define)

    def pack_block(self) -> ir.Function:
        """`void f(k, key0, count, scratch)`: the block's keys as rows."""
        sizes, plan, at = self.sizes, self.plan, self.scratch.at
        pack_rows = self.pack_rows("pack_key_rows", sizes.groups * sizes.width, 1)

        def define(b, k, key0, count, scratch):
            packed, columns = at(b, scratch, "key_rows"), constant(plan.columns)
            b.call(pack_rows, [k, at(b, scratch, "seen", key0), count, packed])
            rest = b.mul(b.sub(self.round_up(b, count), count), columns)
            self.zero(b, self.at(b, packed, b.mul(count, columns)), rest)

        return self.function("pack_block", [POINTER, I64, I64, POINTER], define)

    def row_block(self) -> ir.Function:
        """`void f(strip0, strip_stop, key0, panels, scratch)`: a block of query rows meets a block
        of keys."""
        strip, plan, at = self.strip, self.plan, self.scratch.at
        row_strip, key_strips = self.row_strip(), self.key_strips()

        def define(b, strip0, strip_stop, key0, panels, scratch):
            nothing = [strip_stop, strip0, panels, constant(0)]
            with e.loop(b, b.sub(strip_stop, strip0), 1, nothing) as (offset, seen):
                s = b.add(strip0, offset)
                bounds = at(b, scratch, "bounds", b.mul(s, constant(4)))
                visible = self.visible_panels(b, bounds, key0, panels)
                some = b.icmp_signed("<", visible.first, visible.stop)
                row = b.mul(s, constant(strip.rows))
                place = b.mul(offset, constant(strip.rows * plan.p_row))
                b.call(row_strip, [row, place, key0, panels, *visible.panels, scratch])
                wider = [
                    e.minimum(b, seen[0], s),
                    larger_int(b, seen[1], b.add(s, constant(1))),
                    e.minimum(b, seen[2], visible.first),
                    larger_int(b, seen[3], visible.stop),
                ]
                seen[:] = [b.select(some, x, y) for x, y in zip(wider, seen, strict=True)]
            first, stop, first_panel, panel_stop = seen
            with b.if_then(b.icmp_signed("<", first, stop)):
                row = b.mul(first, constant(strip.rows))
                rows = b.mul(b.sub(stop, first), constant(strip.rows))
                offset = b.mul(b.sub(first, strip0), constant(strip.rows * plan.p_row))
                keys = [b.mul(n, constant(strip.panel)) for n in (first_panel, panel_stop)]
                b.call(key_strips, [row, rows, offset, *keys, scratch])

        return self.function("row_block", [I64] * 4 + [POINTER], define)

    def row_strip(self) -> ir.Function:
        """`void f(row, place, key0, panels, *visible, scratch)`: p and ds of a strip of rows, at
        number `place` of their arrays, and what it adds to dq."""
        strip, plan, sizes, at = self.strip, self.plan, self.sizes, self.scratch.at
        score = self.product("score", Product(
            a_row=plan.columns, a_depth=1, b_panel=sizes.width * strip.panel, b_depth=strip.panel,
            c_row=plan.p_row, then="store",
        ))  # fmt: skip
        add_dq = self.product("add_dq", Product(
            a_row=plan.p_row, a_depth=1, b_panel=strip.panel, b_depth=plan.columns,
            c_row=plan.columns, then="add",
        ))  # fmt: skip
        inside, edge, clear = self.differentiate(False), self.differentiate(True), self.clear()

        def define(b, row, place, key0, panels, *more):
            *visible, scratch = more
            first, stop, *_, end = visible
            p, ds = (at(b, scratch, name, place) for name in ("p", "ds"))
            some = b.icmp_signed("<", first, stop)
            with b.if_then(some):
                column = b.mul(first, constant(strip.panel))
                used, depth = b.sub(stop, first), b.sub(end, column)
                deep = b.mul(column, constant(sizes.width))
                padded_row = b.mul(row, constant(plan.columns))
                for left, right, result in (("q", "keys", p), ("do", "values", ds)):
                    b.call(score, [
                        at(b, scratch, left, padded_row), at(b, scratch, right, deep), used,
                        constant(sizes.width), self.at(b, result, column),
                    ])  # fmt: skip
                for start, some_panels, masked in Visible(*visible).runs(b):
                    b.call(edge if masked else inside, [
                        place, key0, start, some_panels, row, scratch,
                    ])  # fmt: skip
                b.call(add_dq, [
                    self.at(b, ds, column),
                    at(b, scratch, "key_rows", b.mul(column, constant(plan.columns))),
                    constant(strip.panels(self.sizes.width)), depth,
                    at(b, scratch, "dq", padded_row),
                ])  # fmt: skip
            for array in (p, ds):
                b.call(clear, [array, constant(0), b.select(some, first, panels)])
                b.call(clear, [array, b.select(some, stop, panels), panels])

        return self.function("row_strip", [I64] * 9 + [POINTER], define)

    def differentiate(self, masked: bool) -> ir.Function:
        """`void f(place, key0, first, panels, row, scratch)`: of a strip, scores to p and do vᵀ to
        ds in some panels of the block that starts at key `key0`; 0 where `masked` finds a key that
        the row does not see."""
        strip, plan, at = self.strip, self.plan, self.scratch.at

        def define(b, place, key0, first, panels, row, scratch):
            los, his = (at(b, scratch, name, row) for name in ("row_lo", "row_hi"))
            with e.loop(b, constant(strip.rows), 1) as (r, _):
                log_sum, delta = (
                    self.spread(b, at(b, scratch, name, b.add(row, r)))
                    for name in ("log_sum", "delta")
                )
                start = b.add(place, b.mul(r, constant(plan.p_row)))
                with e.loop(b, panels, 1) as (offset, _):
                    column = b.mul(b.add(first, offset), constant(strip.panel))
                    seen = self.seen(b, los, his, b.add(key0, column), r) if masked else None
                    for v in range(strip.vectors):
                        number = b.add(b.add(start, column), constant(v * strip.lanes))
                        p, ds = (at(b, scratch, name, number) for name in ("p", "ds"))
                        weight = exp(b, b.fsub(e.load(b, p, self.vector), log_sum))
                        rest = b.fsub(e.load(b, ds, self.vector), delta)
                        for value, pointer in ((weight, p), (b.fmul(weight, rest), ds)):
                            if masked:
                                value = b.select(seen[v], value, self.number(0.0))
                            e.store(b, value, pointer)

        name = "differentiate_edge" if masked else "differentiate"
        return self.function(name, [POINTER if n == 5 else I64 for n in range(6)], define)

    def clear(self) -> ir.Function:
        """`void f(array, first, stop)`: zeros in a strip's panels [first, stop)."""
        strip, plan = self.strip, self.plan

        def define(b, array, first, stop):
            with self.count_up(b, first, stop) as panel:
                with e.loop(b, constant(strip.rows), 1) as (r, _):
                    place = b.add(
                        b.mul(r, constant(plan.p_row)), b.mul(panel, constant(strip.panel))
                    )
                    self.zero(b, self.at(b, array, place), constant(strip.panel))

        return self.function("clear", [POINTER, I64, I64], define)

    def key_strips(self) -> ir.Function:
        """`void f(row, rows, offset, key_first, key_stop, scratch)`: what so many query rows, whose
        p and ds start at number `offset`, add to dk and dv of some keys of the block."""
        strip, plan, at = self.strip, self.plan, self.scratch.at
        add = self.product("add_keys", Product(
            a_row=1, a_depth=plan.p_row, b_panel=strip.panel, b_depth=plan.columns,
            c_row=plan.columns, then="add",
        ))  # fmt: skip

        def define(b, row, rows, offset, key_first, key_stop, scratch):
            strip_rows = constant(strip.rows)
            first = b.udiv(key_first, strip_rows)
            stop = b.udiv(b.add(key_stop, constant(strip.rows - 1)), strip_rows)
            across = constant(strip.panels(self.sizes.width))
            with self.count_up(b, first, stop) as s:
                key = b.mul(s, strip_rows)
                for left, right, result in (("p", "do", "dv"), ("ds", "q", "dk")):
                    b.call(add, [
                        at(b, scratch, left, b.add(offset, key)),
                        at(b, scratch, right, b.mul(row, constant(plan.columns))), across, rows,
                        at(b, scratch, result, b.mul(key, constant(plan.columns))),
                    ])  # fmt: skip

        return self.function("key_strips", [I64] * 5 + [POINTER], define)

    def write_keys(self) -> ir.Function:
        """`void f(source, count, target)`: rows of dk or dv to where they lie in the result."""
        sizes = self.sizes

        def define(b, source, count, target):
            with e.loop(b, count, 1) as (key, _):
                row = self.at(b, source, b.mul(key, constant(self.plan.columns)))
                place = self.element(b, target, b.mul(key, constant(sizes.groups * sizes.width)))
                self.copy_out(b, row, place, sizes.dtype, lambda value: value)

        return self.function("write_keys", [POINTER, I64, POINTER], define)

    def write_dq(self) -> ir.Function:
        """`void f(args, head, stretch, scratch)`: scale dq to where it lies in the result, or in
        the part of the workspace that belongs to the stretch."""
        sizes, plan, at = self.sizes, self.plan, self.scratch.at
        dtype = sizes.dtype if plan.stretches == 1 else sizes.compute
        scale = self.number(sizes.scale)

        def define(b, args, head, stretch, scratch):
            target = self.operand(b, args, 8 if plan.stretches == 1 else 11)
            start = b.mul(head, constant(sizes.width))
            if plan.stretches > 1:
                start = b.add(start, b.mul(stretch, constant(plan.dq_items)))
            target = e.address(b, target, start, se.storage_type(dtype))
            queries = constant(sizes.queries)
            with e.loop(b, queries, 1) as (i, _), e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.add(b.mul(i, constant(sizes.repeat)), r)
                source = at(b, scratch, "dq", b.mul(row, constant(plan.columns)))
                place = b.mul(b.add(b.mul(i, constant(sizes.heads)), r), constant(sizes.width))
                place = e.address(b, target, place, se.storage_type(dtype))
                self.copy_out(b, source, place, dtype, lambda value: b.fmul(value, scale))

        return self.function("write_dq", [POINTER, I64, I64, POINTER], define)

    def emit_sum(self, symbol: str) -> None:
        """The second phase: dq is the sum of its parts, those of the first keys first."""
        plan, lanes = self.plan, self.strip.lanes
        function = ir.Function(self.module, e.KERNEL_TYPE, symbol)
        args, tile, _ = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        dq, parts = self.operand(b, args, 8), self.operand(b, args, 11)
        start = b.mul(tile, constant(_SUM_ITEMS))
        stop = e.minimum(b, b.add(start, constant(_SUM_ITEMS)), constant(plan.dq_items))

        def add_up(kind: ir.Type, index: ir.Value) -> None:
            total = e.load(b, self.at(b, parts, index), kind)
            for n in range(1, plan.stretches):
                part = self.at(b, parts, b.add(index, constant(n * plan.dq_items)))
                total = b.fadd(total, e.load(b, part, kind))
            se.store(b, total, self.element(b, dq, index), self.sizes.dtype)

        whole = b.sub(stop, b.urem(b.sub(stop, start), constant(lanes)))
        with self.count_up(b, start, whole, lanes) as index:
            add_up(self.vector, index)
        with self.count_up(b, whole, stop) as index:
            add_up(self.scalar, index)
        b.ret_void()
