"""Reductions over any axes, and argmax.

Neighbouring axes that are all reduced or all kept count as one, so a reduction is a chain of stages
[outer, R, inner] → [outer, inner], the last reduced group first. Where inner is 1 the vectors lie
along R, else along inner. A stage with few results and many elements cuts R into fixed blocks and
reduces the blocks' results in another stage: the order of a sum depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.access import Access, RowProgram, row_major
from backends.llvm.elementwise import node_kernel
from backends.llvm.emit import constant
from backends.llvm.folding import BLOCK, combine, fold, neutral
from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.lowering import lowers
from backends.llvm.target import Target
from euler_ir import ops, scalar
from euler_ir.graph import Node
from euler_ir.scalar import Expr
from euler_ir.types import I32, DType

__all__ = ["reduction"]

_KINDS = {ops.ReduceSum: "sum", ops.ReduceMax: "max", ops.ReduceMin: "min"}
# Elements of R that one tile takes at least, along R and across it.
_BLOCK_ALONG = 8192
_BLOCK_ACROSS = 64
# Blocks are cut until there are about so many tiles.
_TILES_AIM = 64
_VECTORS = 4  # accumulators side by side


@dataclass(frozen=True)
class _Stage:
    """[outer, R, inner] → [outer, blocks, inner], each block up to `block` long."""

    outer: int
    size: int
    inner: int
    block: int
    source: DType
    result: DType

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block) if self.size else 1

    @property
    def results(self) -> int:
        return self.outer * self.blocks * self.inner


@lowers(ops.ReduceSum, ops.ReduceMax, ops.ReduceMin)
def reduction(node: Node, target: Target) -> KernelSource:
    x, result = node.inputs[0].type, node.output.type
    kind = _KINDS[type(node.op)]
    groups = _groups(x.shape, node.op.axes)
    if not any(reduced for _, reduced in groups) or not result.size:
        shape = x.shape or (1,)
        strides = row_major(shape)
        element = Expr("input", (), x.dtype.compute, 0)
        return node_kernel(node, RowProgram(
            shape, (Access(0, x.dtype, strides),),
            ((element, Access(1, x.dtype, strides)),)), target)
    stages = _stages(groups, x.dtype)
    emitters = [_StageEmitter(stage, kind, target) for stage in stages]
    # Two halves of the workspace: a stage reads what the one before wrote.
    halves = [max((s.results * s.result.itemsize for s in stages[i:-1:2]), default=0)
              for i in (0, 1)]
    halves = [-(-half // 64) * 64 for half in halves]

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        for i, (emitter, symbol) in enumerate(zip(emitters, symbols, strict=True)):
            b, args, tile, _ = e.kernel(module, symbol)

            def buffer(number: int, b=b, args=args) -> ir.Value:
                """What stage `number` wrote; -1 is the operand, the last one the result."""
                if number in (-1, len(stages) - 1):
                    return e.operand(b, args, 0 if number < 0 else 1)
                place = constant(halves[0] if number % 2 else 0)
                return e.bytes_after(b, e.operand(b, args, 2), place)

            emitter.emit(b, tile, buffer(i - 1), buffer(i))
            b.ret_void()

    return KernelSource(
        f"reduce_{kind} {x} {groups} {stages} x{target.vector_bytes}",
        tuple(Phase(f"stage{i}", emitter.tiles) for i, emitter in enumerate(emitters)),
        emit, workspace_bytes=sum(halves))


def _groups(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    """Extents of runs of axes, each with whether it is reduced."""
    groups: list[tuple[int, bool]] = []
    for axis, extent in enumerate(shape):
        reduced = axis in axes
        if extent == 1:
            continue
        if groups and groups[-1][1] == reduced:
            groups[-1] = (groups[-1][0] * extent, reduced)
        else:
            groups.append((extent, reduced))
    return tuple(groups)


def _stages(groups: Sequence[tuple[int, bool]], dtype: DType) -> tuple[_Stage, ...]:
    remaining, stages, source = list(groups), [], dtype
    while any(reduced for _, reduced in remaining):
        place = max(i for i, (_, reduced) in enumerate(remaining) if reduced)
        outer, size, inner = 1, remaining[place][0], 1
        for extent, _ in remaining[:place]:
            outer *= extent
        for extent, _ in remaining[place + 1:]:
            inner *= extent
        block = _block(outer, size, inner)
        stage = _Stage(outer, size, inner, block, source, dtype.compute)
        stages.append(stage)
        source = dtype.compute
        if stage.blocks > 1:
            stages.append(_Stage(outer, stage.blocks, inner, stage.blocks, source, source))
        del remaining[place]
    last = stages[-1]
    stages[-1] = _Stage(last.outer, last.size, last.inner, last.block, last.source, dtype)
    return tuple(stages)


def _block(outer: int, size: int, inner: int) -> int:
    """How much of R a tile reduces: all of it, unless the results alone give too few tiles."""
    least = _BLOCK_ALONG if inner == 1 else _BLOCK_ACROSS
    columns = -(-inner // 256)
    wanted = -(-_TILES_AIM // (outer * columns))
    return max(-(-size // wanted), min(least, size), 1)


class _StageEmitter:
    def __init__(self, stage: _Stage, kind: str, target: Target):
        self.stage, self.kind = stage, kind
        compute = stage.result.compute
        self.compute = compute
        self.lanes = target.lanes(max(compute.itemsize, 4))
        self.columns = self.lanes * _VECTORS
        if stage.inner == 1:
            # Several short rows make a tile.
            self.rows = max(1, _BLOCK_ALONG // max(stage.block, 1))
            self.tiles = -(-stage.outer * stage.blocks // self.rows)
        else:
            self.column_tiles = -(-stage.inner // self.columns)
            self.tiles = stage.outer * stage.blocks * self.column_tiles

    def emit(self, b: ir.IRBuilder, tile: ir.Value, source: ir.Value, result: ir.Value) -> None:
        (self.emit_along if self.stage.inner == 1 else self.emit_across)(b, tile, source, result)

    def emit_along(self, b: ir.IRBuilder, tile: ir.Value, source: ir.Value,
                   result: ir.Value) -> None:
        """Blocks of rows of R, each reduced to one number."""
        stage = self.stage
        row0 = b.mul(tile, constant(self.rows))
        count = e.minimum(b, constant(self.rows), b.sub(constant(stage.outer * stage.blocks), row0))
        with e.loop(b, count, 1) as (i, _):
            row = b.add(row0, i)
            outer, block = e.divide(b, row, stage.blocks)
            start = b.mul(block, constant(stage.block))
            length = e.minimum(b, constant(stage.block), b.sub(constant(stage.size), start))
            first = b.add(b.mul(outer, constant(stage.size)), start)
            value = self.reduce_row(b, self.at(b, source, first, stage.source), length)
            se.store(b, value, self.at(b, result, row, stage.result), stage.result)

    def reduce_row(self, b: ir.IRBuilder, row: ir.Value, length: ir.Value) -> ir.Value:
        """Blocks of vectors, then single vectors side by side, then single elements."""
        stage, lanes, kind = self.stage, self.lanes, self.kind
        step = lanes * _VECTORS
        nothing = [neutral(kind, self.compute, lanes)] * _VECTORS

        def add_vectors(start: ir.Value, length: ir.Value | None, sums: list) -> list:
            turns = constant(BLOCK * step) if length is None else length
            with e.maybe_loop(b, turns, step, sums) as (index, sums):
                for v in range(_VECTORS):
                    place = b.add(b.add(start, index), constant(v * lanes))
                    value = se.load(b, self.at(b, row, place, stage.source), stage.source, lanes)
                    sums[v] = combine(b, kind, sums[v], value, self.compute)
            return sums

        def whole(size: int) -> ir.Value:
            return b.mul(b.udiv(length, constant(size)), constant(size))

        blocks, vectors = whole(BLOCK * step), whole(step)
        with e.maybe_loop(b, blocks, BLOCK * step, nothing) as (start, totals):
            sums = add_vectors(start, None, nothing)
            totals[:] = [combine(b, kind, *pair, self.compute)
                         for pair in zip(totals, sums, strict=True)]
        sums = add_vectors(blocks, b.sub(vectors, blocks), totals)
        total = [fold(b, kind, sums, self.compute)]
        with e.maybe_loop(b, b.sub(length, vectors), 1, total) as (index, total):
            pointer = self.at(b, row, b.add(vectors, index), stage.source)
            value = se.load(b, pointer, stage.source)
            total[0] = combine(b, kind, total[0], value, self.compute)
        return total[0]

    def emit_across(self, b: ir.IRBuilder, tile: ir.Value, source: ir.Value,
                    result: ir.Value) -> None:
        """A block of columns of one outer index and one block of R, added up row by row."""
        stage = self.stage
        rest, column_block = e.divide(b, tile, self.column_tiles)
        outer, block = e.divide(b, rest, stage.blocks)
        column = b.mul(column_block, constant(self.columns))
        start = b.mul(block, constant(stage.block))
        rows = e.minimum(b, constant(stage.block), b.sub(constant(stage.size), start))
        row0 = b.add(b.mul(outer, constant(stage.size)), start)
        source = self.at(b, source, b.add(b.mul(row0, constant(stage.inner)), column), stage.source)
        result = self.at(b, result, b.add(b.mul(rest, constant(stage.inner)), column), stage.result)
        last = stage.inner % self.columns
        if not last:
            self.add_rows(b, source, result, rows, self.columns)
        elif stage.inner < self.columns:
            self.add_rows(b, source, result, rows, last)
        else:
            inside = b.icmp_signed("<", column_block, constant(self.column_tiles - 1))
            with b.if_else(inside) as (then, otherwise):
                with then:
                    self.add_rows(b, source, result, rows, self.columns)
                with otherwise:
                    self.add_rows(b, source, result, rows, last)

    def add_rows(self, b: ir.IRBuilder, source: ir.Value, result: ir.Value, rows: ir.Value,
                 used: int) -> None:
        stage, lanes = self.stage, self.lanes
        vectors = -(-used // lanes)
        masks = [e.prefix_mask(lanes, used - v * lanes) if used - v * lanes < lanes else None
                 for v in range(vectors)]
        start = [neutral(self.kind, self.compute, lanes)] * vectors
        with e.maybe_loop(b, rows, 1, start) as (row, sums):
            for v, mask in enumerate(masks):
                index = b.add(b.mul(row, constant(stage.inner)), constant(v * lanes))
                value = se.load(b, self.at(b, source, index, stage.source), stage.source, lanes,
                                mask)
                sums[v] = combine(b, self.kind, sums[v], value, self.compute)
        for v, mask in enumerate(masks):
            pointer = self.at(b, result, constant(v * lanes), stage.result)
            se.store(b, sums[v], pointer, stage.result, mask)

    def at(self, b: ir.IRBuilder, pointer: ir.Value, index: ir.Value, dtype: DType) -> ir.Value:
        return e.address(b, pointer, index, se.storage_type(dtype))


@lowers(ops.ArgMax)
def argmax(node: Node, target: Target) -> KernelSource:
    """The first place where the row's maximum stands, or its first NaN: a row program."""
    x, result = node.inputs[0].type, node.output.type
    space = x.shape
    element = Expr("input", (), x.dtype.compute, 0)
    place = Expr("input", (), I32, 1)
    largest = Expr("max", (element,), element.dtype, varies=False)
    hit = element.equals(largest)
    if x.dtype.is_float:
        hit = scalar.where(largest.equals(largest), hit, ~element.equals(element))
    first = -Expr("max", (scalar.where(hit, -place, -space[-1]),), I32, varies=False)
    strides = row_major(result.shape) + (0,)
    column = (0,) * (len(space) - 1) + (1,)
    program = RowProgram(
        space, (Access(0, x.dtype, row_major(space)), Access(None, I32, column)),
        ((first, Access(1, I32, strides)),))
    return node_kernel(node, program, target)
