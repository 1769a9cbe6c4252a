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

import itertools
from collections.abc import Sequence

from llvmlite import ir

from backends.llvm.emit import (
    address,
    constant,
    item_bytes,
    load_lanes,
    loop,
    maybe_loop,
    minimum,
    prefetch,
    prefix_mask,
    shuffle,
    store,
)

__all__ = ["emit_copy_panels", "emit_transpose_panel", "transpose"]

# Rows that are copied side by side, a panel at a time, and how far ahead rows are asked for: they
# are a few hundred bytes each, far apart, too short a run for the hardware to catch on. Panels of 6
# measured 0.4 ns a number, 0.55 ns a row at a time, 0.5 ns without asking ahead.
_ROWS, _PREFETCH_ROWS = 4, 8


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
    q·panel_items. Some rows at a time, the panels are filled from left to right: a panel at a time
    would touch one cache line in each row, a row at a time a few numbers in each panel. Whole
    vectors are stored: what they write too much belongs to the next p, which is written later, or
    lies between the panels, so `panel_items` must leave lanes - 1 numbers there.
    """
    source, depth, panels, target = function.args
    scalar, lanes = vector.element, vector.count

    def copy_rows(first: ir.Value, count: int) -> None:
        rows = address(b, source, b.mul(first, constant(stride)), scalar)
        packed = address(b, target, b.mul(first, constant(width)), scalar)
        with loop(b, panels, 1) as (q, _):
            read = address(b, rows, b.mul(q, constant(width)), scalar)
            write = address(b, packed, b.mul(q, constant(panel_items)), scalar)
            for p, start in itertools.product(range(count), range(0, used, lanes)):
                if start * item_bytes(scalar) % 64 == 0:
                    ahead = constant((p + _PREFETCH_ROWS) * stride + start)
                    prefetch(b, address(b, read, ahead, scalar))
                mask = prefix_mask(lanes, used - start) if used - start < lanes else None
                numbers = address(b, read, constant(p * stride + start), scalar)
                value = load_lanes(b, numbers, vector, mask)
                store(b, value, address(b, write, constant(p * width + start), scalar))

    if width * item_bytes(scalar) % 64 == 0:
        with loop(b, depth, 1) as (p, _):
            copy_rows(p, 1)
        return
    rest = b.urem(depth, constant(_ROWS))
    whole = b.sub(depth, rest)
    with maybe_loop(b, whole, _ROWS) as (p, _):
        copy_rows(p, _ROWS)
    with maybe_loop(b, rest, 1) as (p, _):
        copy_rows(b.add(whole, p), 1)


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
