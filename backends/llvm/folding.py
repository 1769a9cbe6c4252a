"""Combining values in reductions: sum, maximum and minimum of vectors, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import scalar_emitter as se
from euler_ir.types import DType

__all__ = ["BLOCK", "combine", "combine_pairs", "fold", "neutral"]

#: A long sum is one of blocks: so many vectors are added to an accumulator before it is added to a
#: total, which keeps rounding errors near those of pairwise summation.
BLOCK = 16


def combine(b: ir.IRBuilder, kind: str, x: ir.Value, y: ir.Value, dtype: DType) -> ir.Value:
    """x and y taken together by a reduction of `kind` sum, max or min; NaN wins in the latter."""
    if kind != "sum":
        return se.maximum(b, x, y, dtype, larger=kind == "max")
    return b.fadd(x, y, flags=("contract",)) if dtype.is_float else b.add(x, y)


def neutral(kind: str, dtype: DType, lanes: int) -> ir.Constant:
    """What changes nothing when it is combined."""
    if kind == "sum":
        return se.constant_value(0, dtype, lanes)
    if dtype.is_float:
        return se.constant_value(float("-inf") if kind == "max" else float("inf"), dtype, lanes)
    limits = (np.iinfo(dtype.numpy) if dtype.itemsize > 1 else np.iinfo(np.uint8))
    return se.constant_value(int(limits.min if kind == "max" else limits.max), dtype, lanes)


def combine_pairs(b: ir.IRBuilder, kind: str, parts: Sequence[ir.Value],
                  dtype: DType) -> ir.Value:
    """Accumulators to one: pairs, pairs of those, …; one without a partner goes on alone."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [combine(b, kind, *parts[i:i + 2], dtype) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs):]
    return parts[0]


def fold(b: ir.IRBuilder, kind: str, parts: Sequence[ir.Value], dtype: DType) -> ir.Value:
    """Accumulators to one number: pairs of vectors, then halves of a vector."""
    value = combine_pairs(b, kind, parts, dtype)
    while isinstance(value.type, ir.VectorType):
        half = value.type.count // 2
        low = e.shuffle(b, value, value, range(half))
        high = e.shuffle(b, value, value, range(half, 2 * half))
        if half == 1:
            low, high = (b.extract_element(value, ir.Constant(e.I32, i)) for i in (0, 1))
        value = combine(b, kind, low, high, dtype)
    return value
