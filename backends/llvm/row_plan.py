"""How a row program runs: which loops go over a row, what they keep, and what a tile is.

A reduction is known only after a loop over its row, so everything that depends on it needs another
loop. Each of these levels recomputes from the operands what it needs, but for values that are dear
to compute and needed again: those are kept, a row of each, in the thread's scratch (the
exponentials of a softmax, say).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from backends.llvm.access import Access, RowProgram
from backends.llvm.target import Target
from euler_ir import scalar
from euler_ir.scalar import Expr
from euler_ir.types import BOOL, F32, I32, U32

__all__ = ["Loop", "RowPlan", "is_reduction", "merge_axes", "plan_rows", "program_text"]

# Traffic of a tile, in bytes: enough to pay for taking it from the counter (some 50 ns), few enough
# that a small tensor still has a tile for every thread and a large one stays in L2.
_TILE_BYTES = 32 * 1024
_TILE_BYTES_MOST = 256 * 1024
_TILES_AIM = 256
# Every tile of a column sum leaves a row of partial sums, to be added up by the second phase.
_COLUMN_SUM_TILES = 64
# Column blocks start at multiples of this, so that only the last has an odd end.
_COLUMN_GRAIN = 64

# Rough cost of an operation on a vector, in instructions; those not listed are 1.
_COST = {"const": 0, "roll": 0, "exp": 16, "log": 20, "tanh": 30, "erf": 40, "sin": 30, "cos": 30,
         "div": 5, "sqrt": 6, "maximum": 3, "minimum": 3, "max": 3, "mulhi": 4}  # fmt: skip
# Keeping costs a store and a load each time it is used again.
_WORTH_KEEPING = 6
_BODY_COST = 96  # unroll until an iteration costs about this much
_UNROLL_MOST = 4


@dataclass(frozen=True)
class Loop:
    """One pass over the row: what it adds up, writes and keeps."""

    level: int
    reductions: tuple[Expr, ...] = ()
    stores: tuple[tuple[Expr, Access], ...] = ()
    column_sums: tuple[int, ...] = ()
    keeps: tuple[Expr, ...] = ()
    unroll: int = 1

    @property
    def roots(self) -> tuple[Expr, ...]:
        """What is evaluated at every element, column sums excepted."""
        return (*(r.args[0] for r in self.reductions), *(x for x, _ in self.stores), *self.keeps)


@dataclass(frozen=True)
class RowPlan:
    """A row program with its axes merged, its loops, and its tiles.

    The outer axes are segments (all but the last) of `inner` rows. A tile is `tile_segments` by
    `tile_inner` rows by `tile_columns` columns."""

    program: RowProgram
    order: tuple[Expr, ...]
    varying: frozenset[Expr]
    levels: dict[Expr, int]
    loops: tuple[Loop, ...]
    lanes: int
    tile_segments: int = 1
    tile_inner: int = 1
    tile_columns: int = 1

    def text(self) -> str:
        """Everything that decides the kernel's code."""
        return (f"{program_text(self.program)} tile {self.tile_segments},{self.tile_inner},"
                f"{self.tile_columns} x{self.lanes}")

    @property
    def columns(self) -> int:
        return self.program.space[-1]

    @property
    def inner(self) -> int:
        return self.program.space[-2] if len(self.program.space) > 1 else 1

    @property
    def segments(self) -> int:
        return math.prod(self.program.space[:-2])

    @property
    def tile_counts(self) -> tuple[int, int, int]:
        """Tiles along segments, inner rows and columns."""
        return (-(-self.segments // self.tile_segments), -(-self.inner // self.tile_inner),
                -(-self.columns // self.tile_columns))

    @property
    def tiles(self) -> int:
        return math.prod(self.tile_counts) if math.prod(self.program.space) else 0

    @property
    def padded_columns(self) -> int:
        """Columns of a row of scratch or workspace: whole vectors, whole cache lines."""
        return -(-self.columns // 16) * 16

    def kept_bytes(self, x: Expr) -> int:
        """Bytes of a kept row in scratch; a vector may run over the end of the columns."""
        return (self.padded_columns + 16) * x.dtype.itemsize

    @property
    def row_stores(self) -> tuple[tuple[Expr, Access], ...]:
        """Results with one value a row."""
        return tuple((x, a) for x, a in self.program.stores if a.strides[-1] == 0)

    @property
    def kept(self) -> tuple[Expr, ...]:
        """All kept expressions, in the order of their rows in scratch."""
        return tuple(x for loop in self.loops for x in loop.keeps)

    def kept_before(self, loop: Loop) -> frozenset[Expr]:
        """What earlier loops kept."""
        return frozenset(x for other in self.loops[:loop.level] for x in other.keeps)

    def stretches(self, loop: Loop) -> list[tuple[int, int, dict[int, int]]]:
        """The columns cut where a turned row wraps around: start, stop, and for each turn how far
        off the row is read there."""
        turns = {turn for _, turn in self.visits(loop)} - {0}
        cuts = sorted({0, self.columns, *(self.columns - turn for turn in turns)})
        return [(start, stop, {turn: turn - (self.columns if start + turn >= self.columns else 0)
                               for turn in turns})
                for start, stop in zip(cuts, cuts[1:], strict=False)]

    def visits(self, loop: Loop) -> list[tuple[Expr, int]]:
        """What a loop evaluates or loads, each with by how many places its row is turned;
        operands before their users."""
        before = self.kept_before(loop)
        sums = [self.program.column_sums[i][0] for i in loop.column_sums]
        seen = {(x, 0) for x in (*loop.roots, *sums)}
        stack = list(seen)
        while stack:
            x, turn = stack.pop()
            if x not in self.varying or x in before:
                continue
            if x.op == "roll":
                turn = (turn + x.value) % self.columns
            new = {(arg, turn) for arg in x.args} - seen
            seen |= new
            stack.extend(new)
        place = {x: i for i, x in enumerate(self.order)}
        return sorted(((x, turn) for x, turn in seen if x in self.varying),
                      key=lambda visit: (place[visit[0]], visit[1]))

    def inplace(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output, input) where each element of the input is read for the last time when
        the output's is written."""
        program = self.program
        first_output = min((a.argument for _, a in (*program.stores, *program.column_sums)),
                           default=0)
        store_loops = {access: loop.level for loop in self.loops for _, access in loop.stores}
        reads = self._reads()
        pairs = []
        for _, access in program.stores:
            if sum(a.argument == access.argument for _, a in program.stores) > 1:
                continue
            last = store_loops.get(access, len(self.loops))
            for argument, uses in reads.items():
                if all(_same_places(read, access) and turn == 0 and level <= last
                       for read, turn, level in uses):
                    pairs.append((access.argument - first_output, argument))
        return tuple(sorted(pairs))

    def _reads(self) -> dict[int, set[tuple[Access, int, int]]]:
        """The accesses of each input, each with a turn and a level at which it is read."""
        reads: dict[int, set[tuple[Access, int, int]]] = {}

        def note(x: Expr, turn: int, level: int) -> None:
            access = self.program.loads[x.value] if x.op == "input" else None
            if access is not None and access.argument is not None:
                reads.setdefault(access.argument, set()).add((access, turn, level))

        for x in self.order:
            if x not in self.varying:
                note(x, 0, 0)
        for loop in self.loops:
            for x, turn in self.visits(loop):
                note(x, turn, loop.level)
        return reads


def program_text(program: RowProgram) -> str:
    """A program without the names it was made from; equal for equal programs."""
    results = (*program.stores, *program.column_sums)
    order = scalar.topological([x for x, _ in results])
    place = {x: i for i, x in enumerate(order)}
    loads = " ".join(map(_access_text, program.loads))
    body = " ".join(_expr_text(x, place) for x in order)
    written = " ".join(f"{place[x]}>{_access_text(a)}" for x, a in results)
    return f"{program.space} [{loads}] {body} [{written}] {len(program.column_sums)} sums"


def _expr_text(x: Expr, place: dict[Expr, int]) -> str:
    value = "" if x.value is None else f"={x.value!r}"
    return f"{x.op}{value}:{x.dtype}({','.join(str(place[arg]) for arg in x.args)})"


def _access_text(access: Access) -> str:
    strides = ",".join(map(str, access.strides))
    return f"{access.argument}:{access.dtype}+{access.offset}({strides})"


def _same_places(read: Access, write: Access) -> bool:
    return (read.strides == write.strides and read.offset == write.offset
            and read.dtype.itemsize == write.dtype.itemsize)


def plan_rows(program: RowProgram, target: Target) -> RowPlan:
    """Merge the axes, then find the loops and the tiles."""
    by_rows = _works_by_rows(program)
    program = merge_axes(program, by_rows)
    roots = [x for x, _ in (*program.stores, *program.column_sums)]
    order = tuple(scalar.topological(roots))
    varying = _varying(order, program)
    levels = _levels(order)
    plan = RowPlan(program, order, varying, levels, _loops(program, order, varying, levels),
                   _lanes(varying, program, target))
    return _with_tiles(plan, splits_columns=not by_rows and not plan.row_stores)


def _works_by_rows(program: RowProgram) -> bool:
    """Whether the program needs its rows as such."""
    exprs = scalar.topological([x for x, _ in program.stores])
    return bool(program.column_sums) or any(x.op in ("sum", "max", "roll") for x in exprs)


def merge_axes(program: RowProgram, by_rows: bool) -> RowProgram:
    """Drop axes of extent 1 and merge neighbours that every access walks as one. The last axis
    takes part only if no row is needed as such."""
    accesses = [*program.loads, *(a for _, a in (*program.stores, *program.column_sums))]
    extents = list(program.space)
    columns = [list(access.strides) for access in accesses]
    fixed = 1 if by_rows else 0
    for axis in reversed(range(len(extents) - fixed)):
        if extents[axis] == 1 and len(extents) > 1:
            del extents[axis]
            for strides in columns:
                del strides[axis]
    for axis in reversed(range(len(extents) - 1 - fixed)):
        if all(s[axis] == s[axis + 1] * extents[axis + 1] for s in columns):
            extents[axis + 1] *= extents[axis]
            del extents[axis]
            for strides in columns:
                del strides[axis]
    merged = iter(Access(access.argument, access.dtype, tuple(strides), access.offset)
                  for access, strides in zip(accesses, columns, strict=True))
    loads = tuple(next(merged) for _ in program.loads)
    stores = tuple((x, next(merged)) for x, _ in program.stores)
    sums = tuple((x, next(merged)) for x, _ in program.column_sums)
    return RowProgram(tuple(extents), loads, stores, sums)


def _varying(order: tuple[Expr, ...], program: RowProgram) -> frozenset[Expr]:
    """The expressions that differ along the row."""
    result: set[Expr] = set()
    for x in order:
        if x.op == "input":
            varies = program.loads[x.value].strides[-1] != 0
        else:
            varies = not is_reduction(x) and any(arg in result for arg in x.args)
        if varies:
            result.add(x)
    return frozenset(result)


def is_reduction(x: Expr) -> bool:
    """Whether the expression is one value a row, made from all of the row."""
    return x.op in ("sum", "max")


def _levels(order: tuple[Expr, ...]) -> dict[Expr, int]:
    """How many loops must be over before an expression can be had."""
    levels: dict[Expr, int] = {}
    for x in order:
        levels[x] = max((levels[arg] for arg in x.args), default=0) + is_reduction(x)
    return levels


def _loops(program: RowProgram, order: tuple[Expr, ...], varying: frozenset[Expr],
           levels: dict[Expr, int]) -> tuple[Loop, ...]:
    """Everything at the earliest level that it can be had at."""
    stores = [(x, a) for x, a in program.stores if a.strides[-1] != 0]
    reductions = [x for x in order if is_reduction(x)]
    last = max([levels[x] for x, _ in (*stores, *program.column_sums)]
               + [levels[r] - 1 for r in reductions], default=-1)
    loops = [Loop(level,
                  tuple(r for r in reductions if levels[r] == level + 1),
                  tuple((x, a) for x, a in stores if levels[x] == level),
                  tuple(i for i, (x, _) in enumerate(program.column_sums) if levels[x] == level))
             for level in range(last + 1)]
    keeps, costs = _find_keeps(loops, program, varying, _cone_costs(order, varying, program))
    return tuple(replace(loop, unroll=_unroll(cost),
                         keeps=tuple(x for x, level in keeps.items() if level == loop.level))
                 for loop, cost in zip(loops, costs, strict=True))


def _find_keeps(loops: list[Loop], program: RowProgram, varying: frozenset[Expr],
                cone_costs: dict[Expr, int]) -> tuple[dict[Expr, int], list[int]]:
    """Expressions that one loop should keep for later ones, each with its loop's level, and what
    the loops' bodies cost.

    A later loop is followed down to the first expressions that an earlier one had and that are
    worth keeping. A result is always kept rather than computed again: the operands that it is made
    from may have been overwritten by it."""
    stored = {x for x, _ in program.stores}
    first_seen: dict[Expr, int] = {}
    keeps: dict[Expr, int] = {}
    body_costs = []
    for loop in loops:
        sums = [program.column_sums[i][0] for i in loop.column_sums]
        seen: set[tuple[Expr, bool]] = set()
        stack = [(x, False) for x in (*loop.roots, *sums)]
        while stack:
            x, rolled = stack.pop()
            if (x, rolled) in seen or x not in varying:
                continue
            seen.add((x, rolled))
            if first_seen.get(x, loop.level) < loop.level and x.dtype is not BOOL and (
                    cone_costs[x] >= _WORTH_KEEPING or (x in stored and x.op != "input")):
                keeps[x] = first_seen[x]
                continue
            if not rolled:
                first_seen.setdefault(x, loop.level)
            stack.extend((arg, rolled or x.op == "roll") for arg in x.args)
        body_costs.append(sum(_own_cost(x, program) for x, _ in seen))
    return keeps, body_costs


def _own_cost(x: Expr, program: RowProgram) -> int:
    if x.op == "input" and program.loads[x.value].dtype.itemsize == 2:
        return 3
    return _COST.get(x.op, 1)


def _cone_costs(order: tuple[Expr, ...], varying: frozenset[Expr],
                program: RowProgram) -> dict[Expr, int]:
    """The cost of computing each expression from the operands, once what does not vary along the
    row is known; shared parts count every time."""
    costs: dict[Expr, int] = {}
    for x in order:
        below = sum(costs[arg] for arg in x.args)
        costs[x] = min(_own_cost(x, program) + below, 10**6) if x in varying else 0
    return costs


def _unroll(body_cost: int) -> int:
    unroll = _UNROLL_MOST
    while unroll > 1 and unroll * body_cost > _BODY_COST:
        unroll //= 2
    return unroll


def _lanes(varying: frozenset[Expr], program: RowProgram, target: Target) -> int:
    """Elements to a vector: one register's worth of the type most of the work is in."""
    narrow = not varying or any(x.dtype in (F32, I32, U32, BOOL) for x in varying)
    lanes = target.lanes(4 if narrow else 8)
    while lanes > 1 and lanes // 2 >= program.space[-1]:
        lanes //= 2
    return lanes


def _with_tiles(plan: RowPlan, splits_columns: bool) -> RowPlan:
    program, columns, inner = plan.program, plan.columns, max(plan.inner, 1)
    accesses = [a for a in (*program.loads, *(a for _, a in program.stores))
                if a.argument is not None and a.strides[-1] != 0]
    element = sum(a.dtype.itemsize for a in accesses)
    total = max(element, 1) * math.prod(program.space)
    aim = min(max(total // _TILES_AIM, _TILE_BYTES), _TILE_BYTES_MOST)
    tile_columns = max(columns, 1)
    if splits_columns and any(a.strides[-1] > 1 for a in accesses):
        # A transposition: blocks in which every cache line that is touched is used up.
        rows, tile_columns = _COLUMN_GRAIN, min(tile_columns, _COLUMN_GRAIN)
    elif splits_columns and columns * element > 2 * aim:
        rows, tile_columns = 1, -(-aim // element // _COLUMN_GRAIN) * _COLUMN_GRAIN
    else:
        rows = max(1, aim // max(columns * element, 64))
    if program.column_sums:
        rows = max(rows, -(-plan.segments * plan.inner // _COLUMN_SUM_TILES))
    if rows >= inner:
        segments, tile_inner = min(rows // inner, max(plan.segments, 1)), inner
    else:
        segments, tile_inner = 1, -(-inner // -(-inner // rows))
    return replace(plan, tile_segments=segments, tile_inner=tile_inner, tile_columns=tile_columns)
