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

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.attention_blocks import (
    LOWEST,
    BlockEmitter,
    Product,
    Scratch,
    Sizes,
    Strip,
    across_lanes,
    add_range_arrays,
    exp,
    fold,
    larger,
)
from backends.llvm.attention_decode import MAX_QUERIES, decode_kernel
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.graph import Node

__all__ = ["attention"]

# Rows of a tile: enough for packing a key (some 4 multiply-adds a number) to vanish beside them,
# few enough that q, o and a block of keys and values stay in L2.
_ROWS = 96
# Tiles that keep a machine's cores busy, if the queries can be cut so far.
_TILES = 16
_KEYS = 128


@lowers(ops.Attention)
def attention(node: Node, target: Target) -> KernelSource:
    """The kernel of an Attention node: args q, k, v, lo, hi, o, log_sum."""
    q, k = node.inputs[0].type, node.inputs[1].type
    return attention_kernel(Sizes.of(q, k, node.op.scale), target)


def attention_kernel(sizes: Sizes, target: Target) -> KernelSource:
    if sizes.queries <= MAX_QUERIES:
        return decode_kernel(sizes, target)
    key = f"attention {sizes}"
    plan = _Plan(sizes, target)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        _Forward(target, plan, module, symbols[0]).emit_kernel()

    return KernelSource(
        key, (Phase("attention", plan.tiles),), emit, scratch_bytes=plan.scratch.bytes
    )


class _Plan:
    """How the work is cut, and the scratch that a tile needs."""

    def __init__(self, sizes: Sizes, target: Target):
        self.sizes = sizes
        strip = self.strip = Strip.of(target, sizes)
        pairs = sizes.batch * sizes.groups
        rows = sizes.queries * sizes.repeat
        parts = max(-(-rows // _ROWS), min(-(-_TILES // pairs), -(-rows // (4 * strip.rows))))
        self.block_queries = -(-sizes.queries // parts)
        self.blocks = -(-sizes.queries // self.block_queries)
        self.tiles = pairs * self.blocks
        self.block_keys = min(_KEYS, strip.columns(sizes.keys))
        self.columns = strip.columns(sizes.width)
        self.strips = -(-self.block_queries * sizes.repeat // strip.rows)
        self.scratch = self._layout()

    def _layout(self) -> Scratch:
        rows, scalar = self.strips * self.strip.rows, se.value_type(self.sizes.compute)
        scratch = Scratch()
        add_range_arrays(scratch, self.sizes, self.strip, self.block_queries, rows)
        scratch.add("q", rows * self.columns, scalar)
        scratch.add("keys", self.block_keys * self.sizes.width, scalar)
        scratch.add("values", self.block_keys * self.columns, scalar)
        scratch.add("scores", self.strip.rows * self.block_keys, scalar)
        scratch.add("o", rows * self.columns, scalar)
        vectors = -(-self.strip.rows // self.strip.lanes) * self.strip.lanes
        scratch.add("largest", rows + vectors, scalar)
        scratch.add("next_largest", vectors, scalar)
        scratch.add("shrink", vectors, scalar)
        scratch.add("total", rows * self.strip.lanes, scalar)
        return scratch


class _Forward(BlockEmitter):
    def __init__(self, target: Target, plan: _Plan, module: ir.Module, symbol: str):
        super().__init__(target, plan.sizes, module, symbol)
        self.plan, self.scratch = plan, plan.scratch

    def emit_kernel(self) -> None:
        sizes, plan, at = self.sizes, self.plan, self.scratch.at
        function = ir.Function(self.module, e.KERNEL_TYPE, self.symbol)
        args, tile, scratch = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        pairs = constant(sizes.batch * sizes.groups)
        block = b.sub(constant(plan.blocks - 1), b.udiv(tile, pairs))
        pair = b.urem(tile, pairs)
        item, group = b.udiv(pair, constant(sizes.groups)), b.urem(pair, constant(sizes.groups))
        query0 = b.mul(block, constant(plan.block_queries))
        queries = e.minimum(b, constant(plan.block_queries), b.sub(constant(sizes.queries), query0))
        token0 = b.add(b.mul(item, constant(sizes.queries)), query0)
        head = b.add(b.mul(token0, constant(sizes.heads)), b.mul(group, constant(sizes.repeat)))
        b.call(self.begin(), [args, token0, head, queries, scratch])
        start, stop = (self.load_index(b, at(b, scratch, "hull", n)) for n in range(2))
        with self.count_up(b, start, stop, plan.block_keys) as key0:
            count = e.minimum(b, constant(plan.block_keys), b.sub(stop, key0))
            token = b.add(b.mul(item, constant(sizes.keys)), key0)
            source = b.mul(
                b.add(b.mul(token, constant(sizes.groups)), group), constant(sizes.width)
            )
            b.call(self.pack_block(), [args, source, key0, count, scratch])
            b.call(self.attend_block(), [key0, count, queries, scratch])
        b.call(self.finish(), [args, head, queries, scratch])
        b.ret_void()

    def strips(self, b: ir.IRBuilder, queries: ir.Value) -> ir.Value:
        """How many strips the rows of so many queries fill."""
        rows = b.mul(queries, constant(self.sizes.repeat))
        return b.udiv(b.add(rows, constant(self.strip.rows - 1)), constant(self.strip.rows))

    def begin(self) -> ir.Function:
        """`void f(args, token0, head, queries, scratch)`: ranges, queries, and no keys seen yet."""
        sizes, at = self.sizes, self.scratch.at
        load_ranges = self.load_ranges(self.scratch)
        pack_queries = self.pack_rows(
            "pack_queries", sizes.heads * sizes.width, sizes.repeat, sizes.scale
        )

        def define(b, args, token0, head, queries, scratch):
            lo, hi = (e.address(b, self.operand(b, args, n), token0, I32) for n in (3, 4))
            strips = self.strips(b, queries)
            b.call(load_ranges, [lo, hi, queries, strips, scratch])
            source = self.element(b, self.operand(b, args, 0), b.mul(head, constant(sizes.width)))
            packed, keep = at(b, scratch, "q"), at(b, scratch, "keep")
            b.call(pack_queries, [source, keep, queries, packed])
            rows = b.mul(strips, constant(self.strip.rows))
            used = b.mul(queries, constant(sizes.repeat))
            columns = constant(self.plan.columns)
            rest = self.at(b, packed, b.mul(used, columns))
            self.zero(b, rest, b.mul(b.sub(rows, used), columns))
            self.zero(b, at(b, scratch, "o"), b.mul(rows, columns))
            self.zero(b, at(b, scratch, "total"), b.mul(rows, constant(self.strip.lanes)))
            with e.loop(b, rows, 1) as (row, _):
                e.store(b, ir.Constant(self.scalar, LOWEST), at(b, scratch, "largest", row))

        return self.function("begin", [POINTER, I64, I64, I64, POINTER], define)

    def pack_block(self) -> ir.Function:
        """`void f(args, source, key0, count, scratch)`: pack the keys and values of a block."""
        sizes, at = self.sizes, self.scratch.at
        pack_keys = self.pack_transposed()
        pack_values = self.pack_rows("pack_values", sizes.groups * sizes.width, 1)

        def define(b, args, source, key0, count, scratch):
            keys, values = (self.element(b, self.operand(b, args, n), source) for n in (1, 2))
            packed = at(b, scratch, "values")
            b.call(pack_keys, [keys, count, at(b, scratch, "keys")])
            b.call(pack_values, [values, at(b, scratch, "seen", key0), count, packed])
            columns = constant(self.plan.columns)
            rest = b.mul(b.sub(self.round_up(b, count), count), columns)
            self.zero(b, self.at(b, packed, b.mul(count, columns)), rest)

        return self.function("pack_block", [POINTER, I64, I64, I64, POINTER], define)

    def attend_block(self) -> ir.Function:
        """`void f(key0, count, queries, scratch)`: every strip attends to a block of keys."""
        strip, plan, at = self.strip, self.plan, self.scratch.at
        score, score_edge = (
            self.product(name, Product(
                a_row=plan.columns, a_depth=1, b_panel=self.sizes.width * strip.panel,
                b_depth=strip.panel, c_row=plan.block_keys, then=then,
            ))
            for name, then in (("score", "store"), ("score_edge", "mask"))
        )  # fmt: skip
        mix = self.product("mix", Product(
            a_row=plan.block_keys, a_depth=1, b_panel=strip.panel, b_depth=plan.columns,
            c_row=plan.columns, then="scale",
        ))  # fmt: skip
        weigh = self.weigh()

        def define(b, key0, count, queries, scratch):
            panels = b.udiv(self.round_up(b, count), constant(strip.panel))
            with e.loop(b, self.strips(b, queries), 1) as (s, _):
                row = b.mul(s, constant(strip.rows))
                bounds = at(b, scratch, "bounds", b.mul(s, constant(4)))
                seen = self.visible_panels(b, bounds, key0, panels)
                q = at(b, scratch, "q", b.mul(row, constant(plan.columns)))
                los, his = (at(b, scratch, name, row) for name in ("row_lo", "row_hi"))
                for first, used, masked in seen.runs(b):
                    column = b.mul(first, constant(strip.panel))
                    keys = at(b, scratch, "keys", b.mul(column, constant(self.sizes.width)))
                    scores = at(b, scratch, "scores", column)
                    arguments = [q, keys, used, constant(self.sizes.width), scores]
                    if masked:
                        b.call(score_edge, [*arguments, los, his, b.add(key0, column)])
                    else:
                        b.call(score, arguments)
                with b.if_then(b.icmp_signed("<", seen.first, seen.stop)):
                    column = b.mul(seen.first, constant(strip.panel))
                    count = b.mul(b.sub(seen.stop, seen.first), constant(strip.panel))
                    scores = at(b, scratch, "scores", column)
                    b.call(weigh, [scores, count, row, scratch])
                    o = at(b, scratch, "o", b.mul(row, constant(plan.columns)))
                    values = at(b, scratch, "values", b.mul(column, constant(plan.columns)))
                    across = constant(strip.panels(self.sizes.width))
                    depth, shrink = b.sub(seen.end, column), at(b, scratch, "shrink")
                    b.call(mix, [scores, values, across, depth, o, shrink])

        return self.function("attend_block", [I64, I64, I64, POINTER], define)

    def weigh(self) -> ir.Function:
        """`void f(scores, count, row, scratch)`: a strip's scores into weights e^(score - largest),
        with `largest`, `shrink` and `total` of its rows, the first of them `row`, brought up."""
        strip, plan, at = self.strip, self.plan, self.scratch.at
        width = range(0, strip.panel, strip.lanes)

        def define(b, scores, count, row, scratch):
            with e.loop(b, constant(strip.rows), 1) as (r, _):
                first = self.at(b, scores, b.mul(r, constant(plan.block_keys)))
                before = self.spread(b, at(b, scratch, "largest", b.add(row, r)))
                with e.loop(b, count, strip.panel, [before] * strip.vectors) as (j, largest):
                    for v, start in enumerate(width):
                        score = e.load(b, self.at(b, first, b.add(j, constant(start))), self.vector)
                        largest[v] = larger(b, score, largest[v])
                most = across_lanes(b, fold(b, larger, largest), larger)
                e.store(b, most, at(b, scratch, "next_largest", r))
            for start in range(0, strip.rows, strip.lanes):
                before = e.load(
                    b, at(b, scratch, "largest", b.add(row, constant(start))), self.vector
                )
                now = e.load(b, at(b, scratch, "next_largest", start), self.vector)
                e.store(b, exp(b, b.fsub(before, now)), at(b, scratch, "shrink", start))
            with e.loop(b, constant(strip.rows), 1) as (r, _):
                first = self.at(b, scores, b.mul(r, constant(plan.block_keys)))
                most = self.spread(b, at(b, scratch, "next_largest", r))
                zeros = [self.number(0.0)] * strip.vectors
                with e.loop(b, count, strip.panel, zeros) as (j, sums):
                    for v, start in enumerate(width):
                        pointer = self.at(b, first, b.add(j, constant(start)))
                        weight = exp(b, b.fsub(e.load(b, pointer, self.vector), most))
                        e.store(b, weight, pointer)
                        sums[v] = b.fadd(sums[v], weight)
                total = at(b, scratch, "total", b.mul(b.add(row, r), constant(strip.lanes)))
                before = b.fmul(
                    e.load(b, total, self.vector), self.spread(b, at(b, scratch, "shrink", r))
                )
                e.store(b, b.fadd(before, fold(b, lambda b, x, y: b.fadd(x, y), sums)), total)
                most = e.load(b, at(b, scratch, "next_largest", r), self.scalar)
                e.store(b, most, at(b, scratch, "largest", b.add(row, r)))

        return self.function("weigh", [POINTER, I64, I64, POINTER], define)

    def finish(self) -> ir.Function:
        """`void f(args, head, queries, scratch)`: divide by the totals and write the results."""
        sizes, plan, at = self.sizes, self.plan, self.scratch.at

        def define(b, args, head, queries, scratch):
            with e.loop(b, queries, 1) as (i, _), e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.add(b.mul(i, constant(sizes.repeat)), r)
                self.normalise(
                    b,
                    at(b, scratch, "total", b.mul(row, constant(self.strip.lanes))),
                    at(b, scratch, "largest", row),
                    at(b, scratch, "o", b.mul(row, constant(plan.columns))),
                    args,
                    b.add(head, b.add(b.mul(i, constant(sizes.heads)), r)),
                )

        return self.function("finish", [POINTER, I64, I64, POINTER], define)
