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
from backends.llvm.attention_blocks import Scratch, Sizes, clearing_kernel, register_tile, whole
from backends.llvm.attention_strips import Product, StripEmitter, Visible, add_range_arrays
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.folding import fold
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node

__all__ = ["attention_backward", "backward_kernel"]

# Rows of a block: p and ds of a block stay in L2. From 24 to 96 makes no difference that could be
# measured; blocks of 64 keys cost 10 %.
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
    """As `attention_backward`, for sizes that need not be a node's."""
    key = f"attention_backward {sizes}"
    if sizes.empty:
        row_bytes = sizes.batch * sizes.width * sizes.dtype.itemsize
        dq_bytes = sizes.queries * sizes.heads * row_bytes
        dk_bytes = sizes.keys * sizes.groups * row_bytes
        return clearing_kernel(key, [(8, dq_bytes), (9, dk_bytes), (10, dk_bytes)])
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
        key,
        tuple(phases),
        emit,
        workspace_bytes=plan.workspace_bytes,
        scratch_bytes=plan.scratch.bytes,
    )


class _Plan:
    """How the work is cut, and the memory that a tile needs."""

    def __init__(self, sizes: Sizes, target: Target):
        self.sizes = sizes
        self.tile = tile = register_tile(target, sizes)
        pairs = sizes.batch * sizes.groups
        self.strips = -(-sizes.queries * sizes.repeat // tile.rows)
        self.block_strips = min(_ROWS // tile.rows, self.strips)
        self.block_keys = min(_KEYS, whole(sizes.keys, tile.width))
        blocks = -(-sizes.keys // self.block_keys)
        stretch_blocks = -(-blocks // min(blocks, -(-_TILES // pairs)))
        self.stretches = -(-blocks // stretch_blocks)
        self.stretch_keys = stretch_blocks * self.block_keys
        self.tiles = pairs * self.stretches
        self.columns = whole(sizes.width, tile.width)
        self.key_rows = whole(self.block_keys, tile.rows)
        # Rows of p and ds hold whole strips of keys, and are longer by a bit: with a power of two a
        # column of them would crowd into few of the cache's sets.
        self.p_row = whole(self.key_rows + 1, tile.width)
        self.scratch = self._layout()
        self.dq_items = sizes.batch * sizes.queries * sizes.heads * sizes.width
        parts = self.stretches if self.stretches > 1 else 0
        self.workspace_bytes = parts * self.dq_items * sizes.compute.itemsize

    def _layout(self) -> Scratch:
        sizes, tile, columns = self.sizes, self.tile, self.columns
        rows, scalar = self.strips * tile.rows, se.value_type(sizes.compute)
        scratch = Scratch()
        add_range_arrays(scratch, sizes, tile, sizes.queries, rows)
        for name in ("q", "do", "dq"):
            scratch.add(name, rows * columns, scalar)
        for name in ("log_sum", "delta"):
            scratch.add(name, rows, scalar)
        for name in ("keys", "values"):
            scratch.add(name, self.block_keys * sizes.width, scalar)
        scratch.add("key_rows", self.block_keys * columns, scalar)
        for name in ("dk", "dv"):
            scratch.add(name, self.key_rows * columns, scalar)
        for name in ("p", "ds"):
            scratch.add(name, self.block_strips * tile.rows * self.p_row, scalar)
        return scratch


class _Backward(StripEmitter):
    """Emits the kernel's one or two phases."""

    def __init__(self, target: Target, plan: _Plan, module: ir.Module, symbol: str):
        super().__init__(target, plan.sizes, plan.scratch, module, symbol)
        self.plan = plan
        self.columns = constant(plan.columns)

    def emit_gradients(self) -> None:
        """The first phase: a tile's queries, then its blocks of keys, then dq."""
        sizes, plan = self.sizes, self.plan
        b, args, number, scratch = e.kernel(self.module, self.symbol)
        # The first keys, which causal queries see most of, are handed out first.
        stretch, pair = e.divide(b, number, sizes.batch * sizes.groups)
        item, group = e.divide(b, pair, sizes.groups)
        token0 = b.mul(item, constant(sizes.queries))
        head = b.add(b.mul(token0, constant(sizes.heads)), b.mul(group, constant(sizes.repeat)))
        b.call(self.begin(), [args, token0, head, scratch])
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
        load_ranges, outer = self.load_ranges(), sizes.heads * sizes.width
        pack_q = self.pack_rows("pack_q", outer, sizes.repeat, sizes.scale)
        pack_do = self.pack_rows("pack_do", outer, sizes.repeat)
        rows, used = plan.strips * self.tile.rows, sizes.queries * sizes.repeat

        def define(b, args, token0, head, scratch):
            lo, hi = (e.address(b, e.operand(b, args, n), token0, I32) for n in (3, 4))
            queries, strips = constant(sizes.queries), constant(plan.strips)
            b.call(load_ranges, [lo, hi, queries, strips, scratch])
            first = b.mul(head, constant(sizes.width))
            for n, name, pack in ((0, "q", pack_q), (7, "do", pack_do)):
                source = self.element(b, e.operand(b, args, n), first)
                b.call(pack, [source, at(b, scratch, "keep"), queries, at(b, scratch, name)])
                rest = at(b, scratch, name, used * plan.columns)
                self.zero(b, rest, constant((rows - used) * plan.columns))
            self.zero(b, at(b, scratch, "dq"), constant(rows * plan.columns))
            with e.loop(b, constant(rows), 1) as (row, _):
                for name in ("log_sum", "delta"):
                    e.store(b, ir.Constant(self.scalar, 0.0), at(b, scratch, name, row))
            with e.loop(b, queries, 1) as (i, _), e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.add(b.mul(i, constant(sizes.repeat)), r)
                place = b.add(head, b.add(b.mul(i, constant(sizes.heads)), r))
                self.load_statistics(b, args, row, place, scratch)

        return self.function("begin", [POINTER, I64, I64, POINTER], define)

    def load_statistics(self, b, args, row, place, scratch) -> None:
        """log_sum and delta = Σ do o of a row, whose results are number `place` of all."""
        at = self.scratch.at
        log_sum = e.load(b, self.at(b, e.operand(b, args, 6), place), self.scalar)
        e.store(b, log_sum, at(b, scratch, "log_sum", row))
        do = at(b, scratch, "do", b.mul(row, self.columns))
        o = self.element(b, e.operand(b, args, 5), b.mul(place, constant(self.sizes.width)))
        total = self.number(0.0)
        for start, mask in self.starts(self.sizes.width):
            left = e.load(b, self.at(b, do, start), self.vector)
            total = e.fma(b, left, self.read(b, self.element(b, o, start), mask), total)
        delta = fold(b, "sum", [total], self.sizes.compute)
        e.store(b, delta, at(b, scratch, "delta", row))

    def key_block(self) -> ir.Function:
        """`void f(args, place, key0, count, scratch)`: dk and dv of a block of keys, which start at
        number `place` of k and v, and what the block adds to dq."""
        plan, at = self.plan, self.scratch.at
        pack_block, row_block, write_keys = self.pack_block(), self.row_block(), self.write_keys()
        strips, block_strips = constant(plan.strips), constant(plan.block_strips)

        def define(b, args, place, key0, count, scratch):
            for name in ("dk", "dv"):
                self.zero(b, at(b, scratch, name), constant(plan.key_rows * plan.columns))
            first, stop = (self.load_bound(b, scratch, "hull", n) for n in range(2))
            some = b.and_(
                b.icmp_signed("<", key0, stop), b.icmp_signed("<", first, b.add(key0, count))
            )
            with b.if_then(some):
                b.call(pack_block, [args, place, key0, count, scratch])
                panels = b.udiv(self.whole_panels(b, count), constant(self.tile.width))
                with e.loop(b, strips, plan.block_strips) as (strip0, _):
                    strip_stop = e.minimum(b, b.add(strip0, block_strips), strips)
                    b.call(row_block, [strip0, strip_stop, key0, panels, scratch])
            for n, name in ((9, "dk"), (10, "dv")):
                target = self.element(b, e.operand(b, args, n), place)
                b.call(write_keys, [at(b, scratch, name), count, target])

        return self.function("key_block", [POINTER, I64, I64, I64, POINTER], define)

    def pack_block(self) -> ir.Function:
        """`void f(args, place, key0, count, scratch)`: keys and values as panels, keys as rows."""
        sizes, at = self.sizes, self.scratch.at
        pack_rows = self.pack_rows("pack_key_rows", sizes.groups * sizes.width, 1)
        pack_transposed = self.pack_transposed()

        def define(b, args, place, key0, count, scratch):
            k, v = (self.element(b, e.operand(b, args, n), place) for n in (1, 2))
            b.call(pack_transposed, [k, count, at(b, scratch, "keys")])
            b.call(pack_transposed, [v, count, at(b, scratch, "values")])
            packed = at(b, scratch, "key_rows")
            b.call(pack_rows, [k, at(b, scratch, "seen", key0), count, packed])
            rest = b.sub(self.whole_panels(b, count), count)
            self.zero(b, self.at(b, packed, b.mul(count, self.columns)), b.mul(rest, self.columns))

        return self.function("pack_block", [POINTER, I64, I64, I64, POINTER], define)

    def row_block(self) -> ir.Function:
        """`void f(strip0, strip_stop, key0, panels, scratch)`: a block of rows meets a block of
        keys. Only the strips and panels between the first and last that see, or are seen, go on to
        dk and dv."""
        tile, plan = self.tile, self.plan
        row_strip, key_strips = self.row_strip(), self.key_strips()

        def define(b, strip0, strip_stop, key0, panels, scratch):
            nothing = [strip_stop, strip0, panels, constant(0)]
            with e.loop(b, b.sub(strip_stop, strip0), 1, nothing) as (offset, used):
                s = b.add(strip0, offset)
                visible = self.visible_panels(b, s, key0, panels, scratch)
                place = b.mul(offset, constant(tile.rows * plan.p_row))
                row = b.mul(s, constant(tile.rows))
                b.call(row_strip, [row, place, key0, panels, *visible.values, scratch])
                some = b.icmp_signed("<", visible.first, visible.stop)
                wider = [
                    e.minimum(b, used[0], s),
                    e.maximum(b, used[1], b.add(s, constant(1))),
                    e.minimum(b, used[2], visible.first),
                    e.maximum(b, used[3], visible.stop),
                ]
                used[:] = [b.select(some, x, y) for x, y in zip(wider, used, strict=True)]
            first, stop, *key_panels = used
            with b.if_then(b.icmp_signed("<", first, stop)):
                row = b.mul(first, constant(tile.rows))
                rows = b.mul(b.sub(stop, first), constant(tile.rows))
                place = b.mul(b.sub(first, strip0), constant(tile.rows * plan.p_row))
                keys = [b.mul(n, constant(tile.width)) for n in key_panels]
                b.call(key_strips, [row, rows, place, *keys, scratch])

        return self.function("row_block", [I64] * 4 + [POINTER], define)

    def row_strip(self) -> ir.Function:
        """`void f(row, place, key0, panels, *visible, scratch)`: p and ds of a strip of rows, at
        number `place` of their arrays, and what it adds to dq."""
        sizes, plan, at, panel = self.sizes, self.plan, self.scratch.at, self.tile.width
        score = self.product("score", Product(
            a_row=plan.columns, a_depth=1, b_panel=sizes.width * panel, b_depth=panel,
            c_row=plan.p_row, then="store",
        ))  # fmt: skip
        add_dq = self.product("add_dq", Product(
            a_row=plan.p_row, a_depth=1, b_panel=panel, b_depth=plan.columns, c_row=plan.columns,
            then="add",
        ))  # fmt: skip
        inside, edge, clear = self.differentiate(False), self.differentiate(True), self.clear()
        width, across = constant(sizes.width), constant(plan.columns // panel)

        def define(b, row, place, key0, panels, *more):
            *visible, scratch = more
            first, stop, *_, end = visible
            p, ds = (at(b, scratch, name, place) for name in ("p", "ds"))
            with b.if_then(b.icmp_signed("<", first, stop)):
                padded_row, column = b.mul(row, self.columns), b.mul(first, constant(panel))
                for left, right, result in (("q", "keys", p), ("do", "values", ds)):
                    a = at(b, scratch, left, padded_row)
                    right = at(b, scratch, right, b.mul(column, width))
                    c = self.at(b, result, column)
                    b.call(score, [a, right, b.sub(stop, first), width, c])
                for start, some, masked in Visible(*visible).runs(b):
                    b.call(edge if masked else inside, [place, key0, start, some, row, scratch])
                key_rows = at(b, scratch, "key_rows", b.mul(column, self.columns))
                dq, depth = at(b, scratch, "dq", padded_row), b.sub(end, column)
                b.call(add_dq, [self.at(b, ds, column), key_rows, across, depth, dq])
            for array in (p, ds):
                b.call(clear, [array, constant(0), first])
                b.call(clear, [array, stop, panels])

        return self.function("row_strip", [I64] * 9 + [POINTER], define)

    def differentiate(self, masked: bool) -> ir.Function:
        """`void f(place, key0, first, panels, row, scratch)`: of a strip, scores to p and do vᵀ to
        ds in some panels of the block that starts at key `key0`; 0 where `masked` finds a key that
        the row does not see."""
        tile, plan, at = self.tile, self.plan, self.scratch.at

        def define(b, place, key0, first, panels, row, scratch):
            los, his = (at(b, scratch, name, row) for name in ("row_lo", "row_hi"))
            with e.loop(b, constant(tile.rows), 1) as (r, _):
                log_sum, delta = (
                    self.spread(b, at(b, scratch, name, b.add(row, r)))
                    for name in ("log_sum", "delta")
                )
                start = b.add(place, b.mul(r, constant(plan.p_row)))
                with e.loop(b, panels, 1) as (offset, _):
                    column = b.mul(b.add(first, offset), constant(tile.width))
                    seen = self.seen(b, los, his, b.add(key0, column), r) if masked else None
                    for v in range(tile.vectors):
                        number = b.add(b.add(start, column), constant(v * tile.lanes))
                        p, ds = (at(b, scratch, name, number) for name in ("p", "ds"))
                        weight = self.exp(b, b.fsub(e.load(b, p, self.vector), log_sum))
                        rest = b.fsub(e.load(b, ds, self.vector), delta)
                        for value, pointer in ((weight, p), (b.fmul(weight, rest), ds)):
                            if masked:
                                value = b.select(seen[v], value, self.number(0.0))
                            e.store(b, value, pointer)

        name = "differentiate_edge" if masked else "differentiate"
        return self.function(name, [I64] * 5 + [POINTER], define)

    def clear(self) -> ir.Function:
        """`void f(array, first, stop)`: zeros in a strip's panels [first, stop)."""
        tile, plan = self.tile, self.plan

        def define(b, array, first, stop):
            with self.count_up(b, first, stop) as panel:
                with e.loop(b, constant(tile.rows), 1) as (r, _):
                    place = b.add(
                        b.mul(r, constant(plan.p_row)), b.mul(panel, constant(tile.width))
                    )
                    self.zero(b, self.at(b, array, place), constant(tile.width))

        return self.function("clear", [POINTER, I64, I64], define)

    def key_strips(self) -> ir.Function:
        """`void f(row, rows, place, key_first, key_stop, scratch)`: what so many query rows, whose
        p and ds start at number `place`, add to dk and dv of some keys of the block."""
        tile, plan, at = self.tile, self.plan, self.scratch.at
        add = self.product("add_keys", Product(
            a_row=1, a_depth=plan.p_row, b_panel=tile.width, b_depth=plan.columns,
            c_row=plan.columns, then="add",
        ))  # fmt: skip
        across = constant(plan.columns // tile.width)

        def define(b, row, rows, place, key_first, key_stop, scratch):
            strip_rows = constant(tile.rows)
            first = b.udiv(key_first, strip_rows)
            stop = b.udiv(b.add(key_stop, constant(tile.rows - 1)), strip_rows)
            with self.count_up(b, first, stop) as s:
                key = b.mul(s, strip_rows)
                for left, right, result in (("p", "do", "dv"), ("ds", "q", "dk")):
                    a = at(b, scratch, left, b.add(place, key))
                    right = at(b, scratch, right, b.mul(row, self.columns))
                    c = at(b, scratch, result, b.mul(key, self.columns))
                    b.call(add, [a, right, across, rows, c])

        return self.function("key_strips", [I64] * 5 + [POINTER], define)

    def write_keys(self) -> ir.Function:
        """`void f(source, count, target)`: rows of dk or dv to where they lie in the result."""
        sizes = self.sizes

        def define(b, source, count, target):
            with e.loop(b, count, 1) as (key, _):
                row = self.at(b, source, b.mul(key, self.columns))
                place = self.element(b, target, b.mul(key, constant(sizes.groups * sizes.width)))
                self.copy_out(b, row, place, sizes.dtype, lambda value: value)

        return self.function("write_keys", [POINTER, I64, POINTER], define)

    def write_dq(self) -> ir.Function:
        """`void f(args, head, stretch, scratch)`: scale dq to where it lies in the result, or in
        the part of the workspace that belongs to the stretch."""
        sizes, plan, at = self.sizes, self.plan, self.scratch.at
        dtype = sizes.dtype if plan.stretches == 1 else sizes.compute
        kind, scale = se.storage_type(dtype), self.number(sizes.scale)

        def define(b, args, head, stretch, scratch):
            target = e.operand(b, args, 8 if plan.stretches == 1 else 11)
            start = b.mul(head, constant(sizes.width))
            if plan.stretches > 1:
                start = b.add(start, b.mul(stretch, constant(plan.dq_items)))
            target, queries = e.address(b, target, start, kind), constant(sizes.queries)
            with e.loop(b, queries, 1) as (i, _), e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.add(b.mul(i, constant(sizes.repeat)), r)
                source = at(b, scratch, "dq", b.mul(row, self.columns))
                place = b.mul(b.add(b.mul(i, constant(sizes.heads)), r), constant(sizes.width))
                place = e.address(b, target, place, kind)
                self.copy_out(b, source, place, dtype, lambda value: b.fmul(value, scale))

        return self.function("write_dq", [POINTER, I64, I64, POINTER], define)

    def emit_sum(self, symbol: str) -> None:
        """The second phase: dq is the sum of its parts, those of the first keys first."""
        plan, lanes = self.plan, self.tile.lanes
        b, args, number, _ = e.kernel(self.module, symbol)
        dq, parts = e.operand(b, args, 8), e.operand(b, args, 11)
        start = b.mul(number, constant(_SUM_ITEMS))
        stop = e.minimum(b, b.add(start, constant(_SUM_ITEMS)), constant(plan.dq_items))

        def add_up(kind: ir.Type, index: ir.Value) -> None:
            total = e.load(b, self.at(b, parts, index), kind)
            for n in range(1, plan.stretches):
                part = self.at(b, parts, b.add(index, constant(n * plan.dq_items)))
                total = b.fadd(total, e.load(b, part, kind))
            se.store(b, total, self.element(b, dq, index), self.sizes.dtype)

        vectors_stop = b.sub(stop, b.urem(b.sub(stop, start), constant(lanes)))
        with self.count_up(b, start, vectors_stop, lanes) as index:
            add_up(self.vector, index)
        with self.count_up(b, vectors_stop, stop) as index:
            add_up(self.scalar, index)
        b.ret_void()
