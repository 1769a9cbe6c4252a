"""Packing: copying blocks of a matrix into the order in which the micro-kernel reads them.

A packed panel of B is `width` columns wide: for each p of the block, `width` consecutive numbers.
A packed panel of A likewise holds `rows` numbers for each p. Packed this way the micro-kernel reads
one consecutive stream whatever the matrix's own layout and leading dimension, with no cache-set
conflicts at power-of-two strides; columns beyond the matrix's edge are filled with something that
only reaches columns nobody stores.

Matrices with p along their rows ([n, k], the layout of a weight in y = x·Wᵀ) have to be transposed.
That is done in registers, a block of lanes x lanes at a time, by log2(lanes) rounds of two-operand
shuffles, each a single instruction on x86 and NEON.
"""

from collections.abc import Sequence

from llvmlite import ir

from backends.llvm.emit import (
    address,
    constant,
    item_bytes,
    load,
    load_lanes,
    loop,
    minimum,
    prefetch,
    prefix_mask,
    shuffle,
    store,
)

__all__ = ["emit_copy_panels", "emit_transpose_panel", "transpose"]

# Rows are a few hundred bytes each, far apart: too short a run for the hardware to catch on.
_PREFETCH_ROWS = 8


def emit_copy_panels(
    function: ir.Function,
    b: ir.IRBuilder,
    vector: ir.VectorType,
    used: int,
    width: int,
    stride: int,
    panel_items: int,
) -> None:
    """`void f(source, depth, panels, target)`: pack panels of a matrix with rows along the panels.

    Panel q gets columns [q·width, q·width + used) of each row p < depth and starts at
    q·panel_items. Rows are read as far as they are consecutive: a panel at a time would touch one
    cache line in each row. A width that is no multiple of the lanes is copied by whole vectors all
    the same: what they write too much belongs to the next p, which is written later, and what they
    read too much is the next row's, so only the last row is copied exactly.
    """
    source, depth, panels, target = function.args
    scalar, lanes = vector.element, vector.count

    def copy_row(p: ir.Value, exact: bool) -> None:
        row = address(b, source, b.mul(p, constant(stride)), scalar)
        packed = address(b, target, b.mul(p, constant(width)), scalar)
        with loop(b, panels, 1) as (q, _):
            read = address(b, row, b.mul(q, constant(width)), scalar)
            write = address(b, packed, b.mul(q, constant(panel_items)), scalar)
            for start in range(0, used, 64 // item_bytes(scalar)):
                ahead = constant(_PREFETCH_ROWS * stride + start)
                prefetch(b, address(b, read, ahead, scalar))
            for start in range(0, used, lanes):
                count = min(lanes, used - start) if exact else lanes
                offset = constant(start)
                value = load(b, address(b, read, offset, scalar), ir.VectorType(scalar, count))
                store(b, value, address(b, write, offset, scalar))

    last = b.sub(depth, constant(1))
    if used % lanes:
        with b.if_then(b.icmp_signed(">", last, constant(0))), loop(b, last, 1) as (p, _):
            copy_row(p, exact=False)
        copy_row(last, exact=True)
    else:
        with loop(b, depth, 1) as (p, _):
            copy_row(p, exact=True)


def emit_transpose_panel(
    function: ir.Function, b: ir.IRBuilder, vector: ir.VectorType, width: int, k: int
) -> None:
    """`void f(source, depth, columns, target)`: pack a panel of a matrix with k along its rows.

    Panel column j is row j of the matrix; `columns` >= 1 of them exist, and the last is repeated
    for those that do not. A depth that is no multiple of the lanes ends with a block that overlaps
    the one before; where all of k is shorter than a vector the loads are masked. A width that is
    no multiple of the lanes writes up to lanes - 1 numbers past the panel.
    """
    source, depth, columns, target = function.args
    scalar, lanes = vector.element, vector.count
    last_column = b.sub(columns, constant(1))
    short = k < lanes
    mask = prefix_mask(lanes, k) if short else None
    last_group = constant((width - 1) // lanes * lanes)
    with loop(b, constant(width), lanes) as (group, _):
        # From right to left: what a group writes past the width is the start of the next p.
        first = b.sub(last_group, group)
        rows = []
        for j in range(lanes):
            column = minimum(b, b.add(first, constant(j)), last_column)
            rows.append(address(b, source, b.mul(column, constant(k)), scalar))
        with loop(b, depth, lanes) as (index, _):
            p = index if short else minimum(b, index, b.sub(depth, constant(lanes)))
            values = [load_lanes(b, address(b, row, p, scalar), vector, mask) for row in rows]
            packed = address(b, target, b.add(b.mul(p, constant(width)), first), scalar)
            for t, value in enumerate(transpose(b, values)[: min(k, lanes)]):
                store(b, value, address(b, packed, constant(t * width), scalar))


def transpose(b: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Transpose a square block held in `lanes` vectors: element (i, j) goes to (j, i).

    Within 128-bit groups first, then the groups themselves: x86 shuffles single numbers only inside
    128 bits, and whole groups across the register.
    """
    lanes = len(rows)
    group = min(lanes, 16 // item_bytes(rows[0].type.element))
    inside = [_deal(b, rows[i : i + group], 1, group) for i in range(0, lanes, group)]
    columns: list[list[ir.Value]] = [
        _deal(b, [block[j] for block in inside], group, lanes) for j in range(group)
    ]
    return [columns[j % group][j // group] for j in range(lanes)]


def _deal(b: ir.IRBuilder, rows: Sequence[ir.Value], unit: int, span: int) -> list[ir.Value]:
    """Transpose units of `unit` lanes inside each span of `span` lanes, by dealing: the even units
    of neighbouring rows go to one vector, the odd ones to another, and so on within each."""
    if len(rows) == 1:
        return list(rows)
    lanes = rows[0].type.count
    halves = []
    for odd in (0, 1):
        pattern = []
        for start in range(0, lanes, span):
            picked = [start + u * unit for u in range(odd, span // unit, 2)]
            one = [first + i for first in picked for i in range(unit)]
            pattern += one + [lanes + i for i in one]
        pairs = [
            shuffle(b, rows[i], rows[i + 1], pattern) for i in range(0, len(rows), 2)
        ]
        halves.append(_deal(b, pairs, unit, span))
    return [value for pair in zip(*halves, strict=True) for value in pair]
