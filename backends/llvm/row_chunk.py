"""One vector of a row in one loop over it: loads, expressions, stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from backends.llvm.access import Access
from backends.llvm.emit import constant
from backends.llvm.folding import combine
from euler_ir.scalar import Expr

if TYPE_CHECKING:
    from backends.llvm.row import RowEmitter

__all__ = ["Chunk", "Visits"]


class Visits(NamedTuple):
    """What a loop needs at every element, and what of it earlier loops kept."""

    exprs: list[tuple[Expr, int]]
    kept: frozenset[Expr]


class Chunk:
    """One vector of columns in one loop: the values there of expressions that vary.

    It stands at `column` + `lane0`; `turns` says how far off a row turned by so much is read.
    Everything in `visits`, what the loop needs with operands before their users, is emitted at
    once."""

    def __init__(self, rows: RowEmitter, visits: Visits, column: ir.Value, lane0: int,
                 mask: ir.Constant | None, turns: dict[int, int]):
        self.rows, self.b = rows, rows.b
        self.column, self.lane0, self.mask, self.turns = column, lane0, mask, turns
        self.memo: dict[tuple[Expr, int], ir.Value] = {}
        for x, turn in visits.exprs:
            self.memo[x, turn] = self._value(x, turn, x in visits.kept)

    def value(self, x: Expr, turn: int = 0) -> ir.Value:
        """The vector of x, of the row turned by `turn` places."""
        rows, lanes = self.rows, self.rows.lanes
        if x in rows.plan.varying:
            return self.memo[x, turn]
        if x.op == "const":
            return se.constant_value(x.value, x.dtype, lanes)
        return e.splat(self.b, rows.values[x], lanes) if lanes > 1 else rows.values[x]

    def _value(self, x: Expr, turn: int, kept: bool) -> ir.Value:
        rows, lanes = self.rows, self.rows.lanes
        if kept:
            kind = se.value_type(x.dtype, lanes)
            pointer = self.row_address(rows.kept_rows[x], kind, self.turns.get(turn, 0))
            return e.load(self.b, pointer, kind)
        if x.op == "input":
            return self.load(rows.plan.program.loads[x.value], self.turns.get(turn, 0))
        if x.op == "roll":
            return self.value(x.args[0], (turn + x.value) % rows.plan.columns)
        return se.operation(self.b, x, [self.value(arg, turn) for arg in x.args], lanes)

    def place(self, displacement: int, stride: int = 1) -> ir.Value:
        """The column where the vector starts, `displacement` further on, times the stride."""
        place = self.b.add(self.column, constant(self.lane0 + displacement))
        return place if stride == 1 else self.b.mul(place, constant(stride))

    def row_address(self, row: ir.Value, kind: ir.Type, displacement: int) -> ir.Value:
        return e.address(self.b, row, self.place(displacement), e.element(kind))

    def load(self, access: Access, displacement: int) -> ir.Value:
        b, lanes, stride = self.b, self.rows.lanes, access.strides[-1]
        if access.argument is None:
            start = b.add(self.rows.bases[access], self.place(displacement, stride))
            return se.ramp(b, b.trunc(start, e.I32), stride, lanes)
        row, item = self.rows.pointer(access), se.storage_type(access.dtype)
        pointer = e.address(b, row, self.place(displacement, stride), item)
        if stride == 1 or lanes == 1:
            return se.load(b, pointer, access.dtype, lanes, self.mask)
        return self.gather(pointer, access)

    @property
    def used(self) -> int:
        """How many lanes stand for columns."""
        return self.rows.lanes if self.mask is None else sum(
            lane.constant for lane in self.mask.constant)

    def gather(self, pointer: ir.Value, access: Access) -> ir.Value:
        """Elements that lie apart, one by one."""
        b, item = self.b, se.storage_type(access.dtype)
        result = ir.Constant(se.value_type(access.dtype, self.rows.lanes), None)
        for lane in range(self.used):
            source = e.address(b, pointer, constant(lane * access.strides[-1]), item)
            result = b.insert_element(result, se.load(b, source, access.dtype),
                                      ir.Constant(e.I32, lane))
        return result

    def store(self, value: ir.Value, access: Access) -> None:
        b, stride, item = self.b, access.strides[-1], se.storage_type(access.dtype)
        pointer = e.address(b, self.rows.pointer(access), self.place(0, stride), item)
        if stride == 1 or self.rows.lanes == 1:
            se.store(b, value, pointer, access.dtype, self.mask)
            return
        for lane in range(self.used):
            single = b.extract_element(value, ir.Constant(e.I32, lane))
            place = e.address(b, pointer, constant(lane * stride), item)
            se.store(b, single, place, access.dtype)

    def accumulate(self, r: Expr, so_far: ir.Value) -> ir.Value:
        """The accumulator with this vector taken in, in the lanes that exist."""
        combined = combine(self.b, r.op, so_far, self.value(r.args[0]), r.dtype)
        return combined if self.mask is None else self.b.select(self.mask, combined, so_far)
