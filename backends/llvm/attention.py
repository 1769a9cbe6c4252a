"""Flash attention for the LLVM backend: o = softmax(scale q kᵀ) v with no T×S matrix.

A tile is a block of queries of one batch row and key head, with the query heads that share that key
head (Dao et al. 2022, arXiv:2205.14135, on a CPU's caches). It reads its queries' key ranges, packs
the queries, times the scale, and goes through the keys that any of them sees, a block at a time:

    pack the block's keys with the keys along vector lanes, its values as rows
    for each strip of rows (as many as a register tile has):
        scores = strip of q · keys                    in the panels that the strip sees
        mask those of its edge panels
        largest' = max(largest, max of scores)
        p = e^(scores - largest'),  shrink = e^(largest - largest')
        total = total shrink + sum of p,  o = o shrink + p · values

and at last o / total and log_sum = largest + log total. `total` is kept a lane at a time and added
up at the end only. A strip's scores stay in the L1 cache from product to product.

Causal blocks differ in work: the last queries, which see most, are tiles handed out first.
"""

from functools import reduce

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.attention_blocks import (
    LOWEST,
    Scratch,
    Sizes,
    clearing_kernel,
    larger,
    register_tile,
    whole,
)
from backends.llvm.attention_decode import MAX_QUERIES, decode_kernel
from backends.llvm.attention_strips import Product, StripEmitter, Visible, add_range_arrays
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.folding import fold
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node

__all__ = ["attention", "attention_kernel"]

# Rows of a tile: enough for packing a key (some 4 multiply-adds a number) to vanish beside them,
# few enough that q, o and a block of keys and values stay in L2. From 48 to 192 rows, and from 64
# to 256 keys, the speed differs by less than 5 %.
_ROWS = 96
_KEYS = 128
# Tiles that keep a machine's cores busy, if the queries can be cut so far.
_TILES = 16


@lowers(ops.Attention)
def attention(node: Node, target: Target) -> KernelSource:
    """The kernel of an Attention node: args q, k, v, lo, hi, o, log_sum."""
    q, k = node.inputs[0].type, node.inputs[1].type
    return attention_kernel(Sizes.of(q, k, node.op.scale), target)


def attention_kernel(sizes: Sizes, target: Target) -> KernelSource:
    """As `attention`, for sizes that need not be a node's."""
    key = f"attention {sizes}"
    if sizes.empty:
        rows = sizes.batch * sizes.queries * sizes.heads
        o_bytes = rows * sizes.width * sizes.dtype.itemsize
        return clearing_kernel(key, [(5, o_bytes), (6, rows * sizes.compute.itemsize)])
    if sizes.queries <= MAX_QUERIES:
        return decode_kernel(key, sizes, target)
    plan = _Plan(sizes, target)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        _Forward(target, plan, module, symbols[0]).emit_kernel()

    phase = Phase("attention", plan.tiles)
    return KernelSource(key, (phase,), emit, scratch_bytes=plan.scratch.bytes)


class _Plan:
    """How the work is cut, and the scratch that a tile needs."""

    def __init__(self, sizes: Sizes, target: Target):
        self.sizes = sizes
        self.tile = tile = register_tile(target, sizes)
        pairs, rows = sizes.batch * sizes.groups, sizes.queries * sizes.repeat
        parts = max(-(-rows // _ROWS), min(-(-_TILES // pairs), -(-rows // (4 * tile.rows))))
        self.block_queries = -(-sizes.queries // parts)
        self.blocks = -(-sizes.queries // self.block_queries)
        self.tiles = pairs * self.blocks
        self.block_keys = min(_KEYS, whole(sizes.keys, tile.width))
        self.columns = whole(sizes.width, tile.width)
        self.rows = whole(self.block_queries * sizes.repeat, tile.rows)
        self.scratch = self._layout()

    def _layout(self) -> Scratch:
        scalar, tile = se.value_type(self.sizes.compute), self.tile
        rows_of_strip = whole(tile.rows, tile.lanes)  # read as whole vectors
        scratch = Scratch()
        add_range_arrays(scratch, self.sizes, tile, self.block_queries, self.rows)
        scratch.add("q", self.rows * self.columns, scalar)
        scratch.add("keys", self.block_keys * self.sizes.width, scalar)
        scratch.add("values", self.block_keys * self.columns, scalar)
        scratch.add("scores", tile.rows * self.block_keys, scalar)
        scratch.add("o", self.rows * self.columns, scalar)
        scratch.add("largest", self.rows + rows_of_strip, scalar)
        scratch.add("next_largest", rows_of_strip, scalar)
        scratch.add("shrink", rows_of_strip, scalar)
        scratch.add("total", self.rows * tile.lanes, scalar)
        return scratch


class _Forward(StripEmitter):
    """Emits the kernel's one phase."""

    def __init__(self, target: Target, plan: _Plan, module: ir.Module, symbol: str):
        super().__init__(target, plan.sizes, plan.scratch, module, symbol)
        self.plan = plan

    def emit_kernel(self) -> None:
        """Find the block of queries, then go through the keys that it sees."""
        sizes, plan = self.sizes, self.plan
        b, args, number, scratch = e.kernel(self.module, self.symbol)
        block, pair = e.divide(b, number, sizes.batch * sizes.groups)
        item, group = e.divide(b, pair, sizes.groups)
        query0 = b.mul(b.sub(constant(plan.blocks - 1), block), constant(plan.block_queries))
        queries = e.minimum(b, constant(plan.block_queries), b.sub(constant(sizes.queries), query0))
        token0 = b.add(b.mul(item, constant(sizes.queries)), query0)
        head = b.add(b.mul(token0, constant(sizes.heads)), b.mul(group, constant(sizes.repeat)))
        b.call(self.begin(), [args, token0, head, queries, scratch])
        start, stop = (self.load_bound(b, scratch, "hull", n) for n in range(2))
        with self.count_up(b, start, stop, plan.block_keys) as key0:
            count = e.minimum(b, constant(plan.block_keys), b.sub(stop, key0))
            token = b.add(b.mul(item, constant(sizes.keys)), key0)
            place = b.mul(b.add(b.mul(token, constant(sizes.groups)), group), constant(sizes.width))
            b.call(self.pack_block(), [args, place, key0, count, scratch])
            b.call(self.attend_block(), [key0, count, queries, scratch])
        b.call(self.finish(), [args, head, queries, scratch])
        b.ret_void()

    def strips(self, b: ir.IRBuilder, queries: ir.Value) -> ir.Value:
        """How many strips the rows of so many queries fill."""
        rows = b.mul(queries, constant(self.sizes.repeat))
        return b.udiv(b.add(rows, constant(self.tile.rows - 1)), constant(self.tile.rows))

    def begin(self) -> ir.Function:
        """`void f(args, token0, head, queries, scratch)`: ranges, queries, and no keys seen yet."""
        sizes, at, columns = self.sizes, self.scratch.at, constant(self.plan.columns)
        load_ranges = self.load_ranges()
        pack_queries = self.pack_rows(
            "pack_queries", sizes.heads * sizes.width, sizes.repeat, sizes.scale
        )

        def define(b, args, token0, head, queries, scratch):
            lo, hi = (e.address(b, e.operand(b, args, n), token0, I32) for n in (3, 4))
            strips = self.strips(b, queries)
            b.call(load_ranges, [lo, hi, queries, strips, scratch])
            source = self.element(b, e.operand(b, args, 0), b.mul(head, constant(sizes.width)))
            packed, keep = at(b, scratch, "q"), at(b, scratch, "keep")
            b.call(pack_queries, [source, keep, queries, packed])
            rows = b.mul(strips, constant(self.tile.rows))
            used = b.mul(queries, constant(sizes.repeat))
            rest = self.at(b, packed, b.mul(used, columns))
            self.zero(b, rest, b.mul(b.sub(rows, used), columns))
            self.zero(b, at(b, scratch, "o"), b.mul(rows, columns))
            self.zero(b, at(b, scratch, "total"), b.mul(rows, constant(self.tile.lanes)))
            with e.loop(b, rows, 1) as (row, _):
                e.store(b, ir.Constant(self.scalar, LOWEST), at(b, scratch, "largest", row))

        return self.function("begin", [POINTER, I64, I64, I64, POINTER], define)

    def pack_block(self) -> ir.Function:
        """`void f(args, place, key0, count, scratch)`: pack a block's keys and values, which start
        at number `place` of k and v."""
        sizes, at, columns = self.sizes, self.scratch.at, constant(self.plan.columns)
        pack_keys = self.pack_transposed()
        pack_values = self.pack_rows("pack_values", sizes.groups * sizes.width, 1)

        def define(b, args, place, key0, count, scratch):
            keys, values = (self.element(b, e.operand(b, args, n), place) for n in (1, 2))
            packed = at(b, scratch, "values")
            b.call(pack_keys, [keys, count, at(b, scratch, "keys")])
            b.call(pack_values, [values, at(b, scratch, "seen", key0), count, packed])
            rest = b.sub(self.whole_panels(b, count), count)
            self.zero(b, self.at(b, packed, b.mul(count, columns)), b.mul(rest, columns))

        return self.function("pack_block", [POINTER, I64, I64, I64, POINTER], define)

    def attend_block(self) -> ir.Function:
        """`void f(key0, count, queries, scratch)`: every strip attends to a block of keys."""
        score_strip, weigh, mix = self.score_strip(), self.weigh(), self.mix()
        at, columns = self.scratch.at, constant(self.plan.columns)
        panel, across = constant(self.tile.width), self.plan.columns // self.tile.width

        def define(b, key0, count, queries, scratch):
            panels = b.udiv(self.whole_panels(b, count), panel)
            with e.loop(b, self.strips(b, queries), 1) as (s, _):
                visible = self.visible_panels(b, s, key0, panels, scratch)
                with b.if_then(b.icmp_signed("<", visible.first, visible.stop)):
                    row = b.mul(s, constant(self.tile.rows))
                    b.call(score_strip, [row, key0, *visible.values, scratch])
                    column = b.mul(visible.first, panel)
                    scores = at(b, scratch, "scores", column)
                    numbers = b.mul(b.sub(visible.stop, visible.first), panel)
                    b.call(weigh, [scores, numbers, row, scratch])
                    values = at(b, scratch, "values", b.mul(column, columns))
                    o, shrink = at(b, scratch, "o", b.mul(row, columns)), at(b, scratch, "shrink")
                    depth = b.sub(visible.end, column)
                    b.call(mix, [scores, values, constant(across), depth, o, shrink])

        return self.function("attend_block", [I64, I64, I64, POINTER], define)

    def mix(self) -> ir.Function:
        """o = o shrink + weights · values, of a strip."""
        plan = self.plan
        return self.product("mix", Product(
            a_row=plan.block_keys, a_depth=1, b_panel=self.tile.width, b_depth=plan.columns,
            c_row=plan.columns, then="scale",
        ))  # fmt: skip

    def score_strip(self) -> ir.Function:
        """`void f(row, key0, *visible, scratch)`: a strip's scores, -inf where they are masked."""
        sizes, plan, at, panel = self.sizes, self.plan, self.scratch.at, self.tile.width
        inside, edge = (
            self.product(name, Product(
                a_row=plan.columns, a_depth=1, b_panel=sizes.width * panel, b_depth=panel,
                c_row=plan.block_keys, then=then,
            ))
            for name, then in (("score", "store"), ("score_edge", "mask"))
        )  # fmt: skip

        def define(b, row, key0, *more):
            *visible, scratch = more
            q = at(b, scratch, "q", b.mul(row, constant(plan.columns)))
            los, his = (at(b, scratch, name, row) for name in ("row_lo", "row_hi"))
            for first, panels, masked in Visible(*visible).runs(b):
                column = b.mul(first, constant(panel))
                keys = at(b, scratch, "keys", b.mul(column, constant(sizes.width)))
                scores = at(b, scratch, "scores", column)
                arguments = [q, keys, panels, constant(sizes.width), scores]
                if masked:
                    b.call(edge, [*arguments, los, his, b.add(key0, column)])
                else:
                    b.call(inside, arguments)

        return self.function("score_strip", [I64] * 7 + [POINTER], define)

    def weigh(self) -> ir.Function:
        """`void f(scores, count, row, scratch)`: a strip's scores into weights e^(score - largest),
        with `largest`, `shrink` and `total` of its rows, the first of them `row`, brought up."""
        rows, lanes, at = self.tile.rows, self.tile.lanes, self.scratch.at

        def define(b, scores, count, row, scratch):
            with e.loop(b, constant(rows), 1) as (r, _):
                self.find_largest(b, scores, count, row, r, scratch)
            for start in range(0, rows, lanes):
                place = b.add(row, constant(start))
                before = e.load(b, at(b, scratch, "largest", place), self.vector)
                now = e.load(b, at(b, scratch, "next_largest", start), self.vector)
                shrink = self.exp(b, b.fsub(before, now))
                e.store(b, shrink, at(b, scratch, "shrink", start))
            with e.loop(b, constant(rows), 1) as (r, _):
                self.weigh_row(b, scores, count, row, r, scratch)

        return self.function("weigh", [POINTER, I64, I64, POINTER], define)

    def find_largest(self, b, scores, count, row, r, scratch) -> None:
        """next_largest of row r of a strip."""
        at, tile = self.scratch.at, self.tile
        first = self.at(b, scores, b.mul(r, constant(self.plan.block_keys)))
        before = self.spread(b, at(b, scratch, "largest", b.add(row, r)))
        with e.loop(b, count, tile.width, [before] * tile.vectors) as (j, most):
            for v in range(tile.vectors):
                pointer = self.at(b, first, b.add(j, constant(v * tile.lanes)))
                most[v] = larger(b, e.load(b, pointer, self.vector), most[v])
        largest = fold(b, "max", most, self.sizes.compute)
        e.store(b, largest, at(b, scratch, "next_largest", r))

    def weigh_row(self, b, scores, count, row, r, scratch) -> None:
        """Weights of row r of a strip, its total and its largest."""
        at, tile = self.scratch.at, self.tile
        first = self.at(b, scores, b.mul(r, constant(self.plan.block_keys)))
        largest = self.spread(b, at(b, scratch, "next_largest", r))
        with e.loop(b, count, tile.width, [self.number(0.0)] * tile.vectors) as (j, sums):
            for v in range(tile.vectors):
                pointer = self.at(b, first, b.add(j, constant(v * tile.lanes)))
                weight = self.exp(b, b.fsub(e.load(b, pointer, self.vector), largest))
                e.store(b, weight, pointer)
                sums[v] = b.fadd(sums[v], weight)
        total = at(b, scratch, "total", b.mul(b.add(row, r), constant(tile.lanes)))
        shrink = self.spread(b, at(b, scratch, "shrink", r))
        sums.append(b.fmul(e.load(b, total, self.vector), shrink))
        e.store(b, reduce(b.fadd, sums), total)
        number = e.load(b, at(b, scratch, "next_largest", r), self.scalar)
        e.store(b, number, at(b, scratch, "largest", b.add(row, r)))

    def finish(self) -> ir.Function:
        """`void f(args, head, queries, scratch)`: divide by the totals and write the results."""
        sizes, at = self.sizes, self.scratch.at

        def define(b, args, head, queries, scratch):
            with e.loop(b, queries, 1) as (i, _), e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.add(b.mul(i, constant(sizes.repeat)), r)
                self.normalise(
                    b,
                    at(b, scratch, "total", b.mul(row, constant(self.tile.lanes))),
                    at(b, scratch, "largest", row),
                    at(b, scratch, "o", b.mul(row, constant(self.plan.columns))),
                    args,
                    b.add(head, b.add(b.mul(i, constant(sizes.heads)), r)),
                )

        return self.function("finish", [POINTER, I64, I64, POINTER], define)
