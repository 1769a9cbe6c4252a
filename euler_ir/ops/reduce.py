"""Reductions over any axes.

    %s: f32[128] = reduce_sum(%x) {axes = (0, 1), keep = false}
"""

from __future__ import annotations

import numpy as np

from euler_ir.op import Op
from euler_ir.types import BOOL, I32, ShapeError, TensorType


class Reduction(Op):
    """Base: reduces `axes` (ascending); with `keep` they stay as extents of 1."""
    axes: tuple[int, ...]
    keep: bool = False

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if list(self.axes) != sorted(set(self.axes)) or any(
                not 0 <= axis < x.rank for axis in self.axes):
            raise ShapeError(f"distinct ascending axes of {x}, got {self.axes}")
        return (x.with_shape(self.reduced(x.shape)),)

    def reduced(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.keep:
            return tuple(1 if i in self.axes else n for i, n in enumerate(shape))
        return tuple(n for i, n in enumerate(shape) if i not in self.axes)

    def spread(self, b, value, shape):
        """A reduced value at every element it was reduced from."""
        kept = tuple(1 if i in self.axes else n for i, n in enumerate(shape))
        return b.broadcast(b.reshape(value, kept), shape)


class ReduceSum(Reduction):
    """y = Σ x over the axes; the sum of nothing is 0"""
    name = "reduce_sum"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if operands[0].dtype is BOOL:
            raise ShapeError(f"numbers, got {operands[0]}; cast it to a type that can hold a sum")
        return super().infer(*operands)

    def evaluate(self, x):
        return (np.sum(x, axis=self.axes, keepdims=self.keep, dtype=x.dtype),)

    def backward(self, b, node, grads):
        return [self.spread(b, grads[0], node.inputs[0].shape)]


class Extremum(Reduction):
    """Base of maximum and minimum: NaN where any element is; equal ones share the gradient."""

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        (result,) = super().infer(x)
        if result.size and not x.size:
            raise ShapeError(f"at least one element to choose from, got {x} over axes {self.axes}")
        return (result,)

    def backward(self, b, node, grads):
        (x,) = node.inputs
        hits = b.cast(b.equal(x, self.spread(b, node.output, x.shape)), x.dtype)
        shares = b.reduce_sum(hits, self.axes, keep=self.keep)
        return [hits * self.spread(b, grads[0] / shares, x.shape)]


class ReduceMax(Extremum):
    """y = max x over the axes"""
    name = "reduce_max"

    def evaluate(self, x):
        return (_extremum(np.max, self, x),)


class ReduceMin(Extremum):
    """y = min x over the axes"""
    name = "reduce_min"

    def evaluate(self, x):
        return (_extremum(np.min, self, x),)


def _extremum(function, op: Reduction, x: np.ndarray) -> np.ndarray:
    if not x.size:
        return np.zeros(op.reduced(x.shape), x.dtype)
    return function(x, axis=op.axes, keepdims=op.keep)


class ArgMax(Op):
    """Index of the largest element of the last axis, i32; the lowest index on ties, the first NaN
    if there is one."""
    name = "argmax"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if not x.rank or not x.shape[-1]:
            raise ShapeError(f"a last axis with at least one element, got {x}")
        return (TensorType(I32, x.shape[:-1]),)

    def evaluate(self, x):
        return (np.argmax(x, axis=-1).astype(np.int32),)

    def backward(self, b, node, grads):
        return [None]
