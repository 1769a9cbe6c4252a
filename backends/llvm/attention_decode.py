"""Attention of very few queries, as in decoding a token at a time with a KV cache.

With one query a row there is nothing to share a packed key with, and the work is reading k and v
once. So they are read as they lie: scores are dot products, a vector of keys at a time, added
across lanes by transposing the vector of sums of each; the weighted sum of values keeps o in
registers while the keys run. Only the keys that the query sees are touched. A tile is a batch row
and key head with the query heads that share it; their scores, one number a key, lie in scratch.
"""

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.attention_blocks import (
    LOWEST,
    BlockEmitter,
    Scratch,
    Sizes,
    Strip,
    across_lanes,
    exp,
    fold,
    larger,
    larger_int,
    load_i32,
)
from backends.llvm.emit import I32, I64, POINTER, constant
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.packing import transpose
from backends.llvm.target import Target

__all__ = ["MAX_QUERIES", "decode_kernel"]

# With more queries than this, packing the keys pays.
MAX_QUERIES = 2

# Heads at a time in the sum of values, and for each number of them the vectors side by side that
# give the multiply-add units enough independent sums.
_MIX_ROWS = 4
_MIX_VECTORS = {1: 8, 2: 4, 3: 4, 4: 3}


def decode_kernel(sizes: Sizes, target: Target) -> KernelSource:
    """The kernel for at most MAX_QUERIES queries: args q, k, v, lo, hi, o, log_sum."""
    strip = Strip.of(target, sizes)
    scalar, columns = se.value_type(sizes.compute), _whole(sizes.width, strip.lanes)
    scratch = Scratch()
    scratch.add("q", sizes.repeat * columns, scalar)
    scratch.add("scores", sizes.repeat * _whole(sizes.keys, strip.lanes), scalar)
    scratch.add("o", sizes.repeat * columns, scalar)
    scratch.add("largest", sizes.repeat, scalar)
    scratch.add("total", sizes.repeat * strip.lanes, scalar)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        _Decode(target, sizes, scratch, module, symbols[0]).emit_kernel()

    return KernelSource(
        f"attention {sizes}", (Phase("attention", sizes.batch * sizes.groups),), emit,
        scratch_bytes=scratch.bytes,
    )  # fmt: skip


class _Decode(BlockEmitter):
    def __init__(self, target: Target, sizes: Sizes, scratch: Scratch, module, symbol: str):
        super().__init__(target, sizes, module, symbol)
        self.scratch = scratch
        self.lanes = self.strip.lanes
        self.columns = _whole(sizes.width, self.lanes)
        self.score_row = _whole(sizes.keys, self.lanes)
        self.key_row = sizes.groups * sizes.width

    def emit_kernel(self) -> None:
        sizes, at = self.sizes, self.scratch.at
        function = ir.Function(self.module, e.KERNEL_TYPE, self.symbol)
        args, tile, scratch = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        item, group = b.udiv(tile, constant(sizes.groups)), b.urem(tile, constant(sizes.groups))
        with e.loop(b, constant(sizes.queries), 1) as (t, _):
            token = b.add(b.mul(item, constant(sizes.queries)), t)
            head = b.add(b.mul(token, constant(sizes.heads)), b.mul(group, constant(sizes.repeat)))
            lo, hi = (
                load_i32(b, e.address(b, self.operand(b, args, n), token, I32)) for n in (3, 4)
            )
            lo = b.sext(larger_int(b, lo, I32(0)), I64)
            hi = b.sext(e.minimum(b, hi, I32(sizes.keys)), I64)
            count = larger_int(b, b.sub(hi, lo), constant(0))
            key = b.add(b.mul(item, constant(sizes.keys)), lo)
            place = b.mul(b.add(b.mul(key, constant(sizes.groups)), group), constant(sizes.width))
            with e.loop(b, constant(sizes.repeat), 1) as (r, _):
                row = b.mul(b.add(head, r), constant(sizes.width))
                packed = at(b, scratch, "q", b.mul(r, constant(self.columns)))
                source = self.element(b, self.operand(b, args, 0), row)
                self.copy_row(b, source, packed, self.columns, sizes.scale)
            self.zero(b, at(b, scratch, "o"), constant(sizes.repeat * self.columns))
            self.zero(b, at(b, scratch, "total"), constant(sizes.repeat * self.lanes))
            some = b.icmp_signed(">", count, constant(0))
            with b.if_then(some):
                k, v = (self.element(b, self.operand(b, args, n), place) for n in (1, 2))
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
                keys = [
                    self.element(b, k, b.mul(e.minimum(b, b.add(j, constant(lane)), last),
                                             constant(self.key_row)))
                    for lane in range(lanes)
                ]  # fmt: skip
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
                    scores = fold(b, lambda b, x, y: b.fadd(x, y), transpose(b, sums))
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
                largest = across_lanes(b, most[0], larger)
                e.store(b, largest, at(b, scratch, "largest", r))
                largest = e.splat(b, largest, lanes)
                with e.loop(b, count, lanes, [self.number(0.0)]) as (j, total):
                    pointer = self.at(b, row, j)
                    weight = exp(b, b.fsub(e.load(b, pointer, self.vector), largest))
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
        lanes = self.lanes
        starts = range(0, width, lanes)
        masks = [None if width - s >= lanes else e.prefix_mask(lanes, width - s) for s in starts]

        def define(b, weights, v, count, o):
            sums = [self.number(0.0)] * (rows * len(starts))
            with e.loop(b, count, 1, sums) as (j, sums):
                row = self.element(b, v, b.mul(j, constant(self.key_row)))
                values = [
                    self.read(b, self.element(b, row, start), mask)
                    for start, mask in zip(starts, masks, strict=True)
                ]
                for r in range(rows):
                    place = b.add(j, constant(r * self.score_row))
                    weight = self.spread(b, self.at(b, weights, place))
                    for n, value in enumerate(values):
                        i = r * len(values) + n
                        sums[i] = e.fma(b, weight, value, sums[i])
            for r in range(rows):
                for n, start in enumerate(starts):
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


def _whole(width: int, lanes: int) -> int:
    """`width` rounded up to whole vectors."""
    return -(-width // lanes) * lanes
