"""Row programs: what a kernel made of pointwise and row ops does, with all its ops traced to one
expression DAG over operands that are read where they lie.

A row program runs over a space of indices (outer axes …, columns). Every operand is an affine
access into one of the kernel's buffers: its element is at `offset` + Σ index·stride. A stride of 0
is a broadcast axis; so a per-row operand, a shared weight, a position table and a slice of a wider
tensor are all the same thing, and need no copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from euler_ir.scalar import Expr
from euler_ir.types import DType

__all__ = ["Access", "Interner", "RowProgram", "row_major"]


@dataclass(frozen=True, slots=True)
class Access:
    """Where an operand's element of each index of the space lies, in elements.

    `argument` is its buffer's place among the kernel's args, or None for a coordinate: then the
    place itself is the operand's value (an element's number, an iota)."""

    argument: int | None
    dtype: DType
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class RowProgram:
    """An expression `input` number i reads `loads[i]`; `stores` and `column_sums` are the results.

    A store whose access does not move along the columns is written once a row; a column sum's
    access moves along the columns only."""

    space: tuple[int, ...]
    loads: tuple[Access, ...]
    stores: tuple[tuple[Expr, Access], ...]
    column_sums: tuple[tuple[Expr, Access], ...] = ()


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor; 0 where the extent is 1."""
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride if extent != 1 else 0)
        stride *= extent
    return tuple(reversed(strides))


class Interner:
    """Hash-consing: equal expressions become one object, so that fusion brings common ones out.

    Rows of one column lose their reductions here, and a sum of a value that does not vary becomes
    a product."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.loads: list[Access] = []
        self._leaves: dict[Access, Expr] = {}
        self._known: dict[tuple, Expr] = {}
        self._done: dict[Expr, Expr] = {}

    def leaf(self, access: Access) -> Expr:
        """The expression that reads `access`."""
        if access not in self._leaves:
            expr = Expr("input", (), access.dtype.compute, len(self.loads),
                        varies=access.strides[-1] != 0)
            self.loads.append(access)
            self._leaves[access] = self._done[expr] = expr
        return self._leaves[access]

    def intern(self, expr: Expr, coordinates: Mapping[str, Access]) -> Expr:
        """The one expression equal to this; `linear` and `index` are read from `coordinates`."""
        if expr in self._done:
            return self._done[expr]
        if expr.op in ("linear", "index"):
            result = self.leaf(coordinates[expr.op])
        else:
            args = tuple(self.intern(arg, coordinates) for arg in expr.args)
            result = self._simplified(expr, args)
        self._done[expr] = result
        return result

    def _simplified(self, expr: Expr, args: tuple[Expr, ...]) -> Expr:
        reduction = expr.op in ("sum", "max")
        if (reduction or expr.op == "roll") and not args[0].varies:
            if expr.op != "sum" or self.columns == 1:
                return args[0]
            return self.intern(args[0] * self.columns, {})
        varies = any(arg.varies for arg in args) and not reduction
        # The text of a constant tells 0.0 from -0.0, which compare equal.
        key = (expr.op, args, expr.dtype, repr(expr.value))
        if key not in self._known:
            known = Expr(expr.op, args, expr.dtype, expr.value, varies)
            self._known[key] = self._done[known] = known
        return self._known[key]
