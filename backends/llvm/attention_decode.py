"""Attention of very few queries, as in decoding a token at a time with a KV cache.

With one query a row there is nothing to share a packed key with, and the work is reading k and v
once. So they are read as they lie: scores are dot products, a vector of keys at a time, added
across lanes by transposing the vector of sums of each; the weighted sum of values keeps o in
registers while the keys run. Only the keys that the query sees are touched. A tile is a batch row
and key head with the query heads that share it; their scores, one number a key, lie in scratch.
"""

from functools import reduce

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.attention_blocks import (
    LOWEST,
    BlockEmitter,
    Scratch,
    Sizes,
    larger,
    register_tile,
    whole,
)
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.folding import fold
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.packing import transpose
from backends.llvm.target import Target

__all__ = ["MAX_QUERIES", "decode_kernel"]

# With more queries than this, packing the keys pays (with 2 queries of 3 heads it begins to).
MAX_QUERIES = 2

# Heads at a time in the sum of values, and for each number of them the vectors side by side that
# give the multiply-add units enough independent sums.
_MIX_ROWS = 4
_MIX_VECTORS = {1: 8, 2: 4, 3: 4, 4: 3}


def decode_kernel(key: str, sizes: Sizes, target: Target) -> KernelSource:
    """The kernel for at most MAX_QUERIES queries: args q, k, v, lo, hi, o, log_sum."""
    lanes, scalar = register_tile(target, sizes).lanes, se.value_type(sizes.compute)
    scratch = Scratch()
    scratch.add("q", sizes.repeat * whole(sizes.width, lanes), scalar)
    scratch.add("scores", sizes.repeat * whole(sizes.keys, lanes), scalar)
    scratch.add("o", sizes.repeat * whole(sizes.width, lanes), scalar)
    scratch.add("largest", sizes.repeat, scalar)
    scratch.add("total", sizes.repeat * lanes, scalar)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        _Decode(target, sizes, scratch, module, symbols[0]).emit_kernel()

    phase = Phase("attention", sizes.batch * sizes.groups)
    return KernelSource(key, (phase,), emit, scratch_bytes=scratch.bytes)


class _Decode(BlockEmitter):
    """Emits the kernel's one phase."""

    def __init__(
        self, target: Target, sizes: Sizes, scratch: Scratch, module: ir.Module, symbol: str
    ):
        super().__init__(target, sizes, scratch, module, symbol)
        self.lanes = self.tile.lanes
        self.columns = whole(sizes.width, self.lanes)
        self.score_row = whole(sizes.keys, self.lanes)
        self.key_row = sizes.groups * sizes.width

    def emit_kernel(self) -> None:
        """One query after another, the heads of the group together."""
        sizes, at = self.sizes, self.scratch.at
        b, args, number, scratch = e.kernel(self.module, self.symbol)
        item, group = e.divide(b, number, sizes.groups)
        with e.loop(b, constant(sizes.queries), 1) as (t, _):
            token = b.add(b.mul(item, constant(sizes.queries)), t)
            head = b.add(b.mul(token, constant(sizes.heads)), b.mul(group, constant(sizes.repeat)))
            with e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.mul(b.add(head, r), constant(sizes.width))
                source = self.element(b, e.operand(b, args, 0), row)
                packed = at(b, scratch, "q", b.mul(r, constant(self.columns)))
                self.copy_row(b, source, packed, self.columns, sizes.scale)
            self.zero(b, at(b, scratch, "o"), constant(sizes.repeat * self.columns))
            self.zero(b, at(b, scratch, "total"), constant(sizes.repeat * self.lanes))
            lo, hi = (
                b.sext(e.load(b, e.address(b, e.operand(b, args, n), token, I32), I32), I64)
                for n in (3, 4)
            )
            lo = e.maximum(b, lo, constant(0))
            count = b.sub(e.minimum(b, hi, constant(sizes.keys)), lo)
            with b.if_then(b.icmp_signed(">", count, constant(0))):
                key = b.add(b.mul(item, constant(sizes.keys)), lo)
                place = b.add(b.mul(key, constant(sizes.groups)), group)
                place = b.mul(place, constant(sizes.width))
                k, v = (self.element(b, e.operand(b, args, n), place) for n in (1, 2))
                b.call(self.score(), [k, count, scratch])
                b.call(self.weigh(), [count, scratch])
                self.emit_mix(b, v, count, scratch)
            b.call(self.finish(), [args, head, scratch])
        b.ret_void()

    def score(self) -> ir.Function:
        """`void f(k, count, scratch)`: the scores of `count` keys, -inf in the lanes after them."""
        sizes, lanes, at = self.sizes, self.lanes, self.scratch.at
        numbers = ir.VectorType(I64, lanes)

        def define(b, k, count, scratch):
            last = b.sub(count, constant(1))
            with e.loop(b, count, lanes) as (j, _):
                keys = []
                for lane in range(lanes):
                    existing = e.minimum(b, b.add(j, constant(lane)), last)
                    keys.append(self.element(b, k, b.mul(existing, constant(self.key_row))))
                index = b.add(e.splat(b, j, lanes), ir.Constant(numbers, list(range(lanes))))
                exists = b.icmp_signed("<", index, e.splat(b, count, lanes))
                with e.loop(b, constant(sizes.repeat), 1) as (r, _):
                    q = at(b, scratch, "q", b.mul(r, constant(self.columns)))
                    sums = [self.number(0.0)] * lanes
                    whole = sizes.width - sizes.width % lanes
                    if whole:
                        with e.loop(b, constant(whole), lanes, sums) as (p, sums):
                            self.multiply(b, q, keys, p, sums, None)
                    if whole < sizes.width:
                        mask = e.prefix_mask(lanes, sizes.width - whole)
                        self.multiply(b, q, keys, constant(whole), sums, mask)
                    scores = reduce(b.fadd, transpose(b, sums))
                    scores = b.select(exists, scores, self.number(float("-inf")))
                    place = b.add(b.mul(r, constant(self.score_row)), j)
                    e.store(b, scores, at(b, scratch, "scores", place))

        return self.function("score", [POINTER, I64, POINTER], define)

    def multiply(self, b, q, keys, p, sums: list[ir.Value], mask) -> None:
        """A vector of each key's numbers, from p on, times the query's."""
        left = e.load(b, self.at(b, q, p), self.vector)
        for lane, key in enumerate(keys):
            right = self.read(b, self.element(b, key, p), mask)
            sums[lane] = e.fma(b, left, right, sums[lane])

    def weigh(self) -> ir.Function:
        """`void f(count, scratch)`: scores into weights e^(score - largest), with `largest` and
        `total` of each head."""
        lanes, at = self.lanes, self.scratch.at

        def define(b, count, scratch):
            with e.loop(b, constant(self.sizes.repeat), 1) as (r, _):
                row = at(b, scratch, "scores", b.mul(r, constant(self.score_row)))
                with e.loop(b, count, lanes, [self.number(LOWEST)]) as (j, most):
                    most[0] = larger(b, e.load(b, self.at(b, row, j), self.vector), most[0])
                largest = fold(b, "max", most, self.sizes.compute)
                e.store(b, largest, at(b, scratch, "largest", r))
                largest = e.splat(b, largest, lanes)
                with e.loop(b, count, lanes, [self.number(0.0)]) as (j, total):
                    pointer = self.at(b, row, j)
                    weight = self.exp(b, b.fsub(e.load(b, pointer, self.vector), largest))
                    e.store(b, weight, pointer)
                    total[0] = b.fadd(total[0], weight)
                e.store(b, total[0], at(b, scratch, "total", b.mul(r, constant(lanes))))

        return self.function("weigh", [I64, POINTER], define)

    def emit_mix(self, b: ir.IRBuilder, v: ir.Value, count: ir.Value, scratch: ir.Value) -> None:
        """o = weights · values, some heads and columns at a time."""
        at, width = self.scratch.at, self.sizes.width
        for first in range(0, self.sizes.repeat, _MIX_ROWS):
            rows = min(_MIX_ROWS, self.sizes.repeat - first)
            step = _MIX_VECTORS[rows] * self.lanes
            for column in range(0, width, step):
                mix = self.mix(rows, min(step, width - column))
                weights = at(b, scratch, "scores", first * self.score_row)
                o = at(b, scratch, "o", first * self.columns + column)
                b.call(mix, [weights, self.element(b, v, column), count, o])

    def mix(self, rows: int, width: int) -> ir.Function:
        """`void f(weights, v, count, o)`: `width` columns of `rows` heads' weighted sums."""
        starts = self.starts(width)

        def define(b, weights, v, count, o):
            sums = [self.number(0.0)] * (rows * len(starts))
            with e.loop(b, count, 1, sums) as (j, sums):
                row = self.element(b, v, b.mul(j, constant(self.key_row)))
                values = [
                    self.read(b, self.element(b, row, start), mask)
                    for start, mask in starts
                ]
                for r in range(rows):
                    place = b.add(j, constant(r * self.score_row))
                    weight = self.spread(b, self.at(b, weights, place))
                    for n, value in enumerate(values):
                        i = r * len(values) + n
                        sums[i] = e.fma(b, weight, value, sums[i])
            for r in range(rows):
                for n, (start, _) in enumerate(starts):
                    pointer = self.at(b, o, r * self.columns + start)
                    e.store(b, sums[r * len(starts) + n], pointer)

        return self.function(f"mix_{rows}_{width}", [POINTER, POINTER, I64, POINTER], define)

    def finish(self) -> ir.Function:
        """`void f(args, head, scratch)`: divide by the totals and write the results."""
        sizes, at = self.sizes, self.scratch.at

        def define(b, args, head, scratch):
            with e.loop(b, constant(sizes.repeat), 1) as (r, _):
                self.normalise(
                    b,
                    at(b, scratch, "total", b.mul(r, constant(self.lanes))),
                    at(b, scratch, "largest", r),
                    at(b, scratch, "o", b.mul(r, constant(self.columns))),
                    args,
                    b.add(head, r),
                )

        return self.function("finish", [POINTER, I64, POINTER], define)
