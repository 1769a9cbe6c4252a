"""Ops without operands: constants and index ramps. Passes fold them into the kernels that use them.

    %zero: f32[8] = full() {value = 0.0, dtype = f32, shape = (8,)}
"""

from __future__ import annotations

from euler_ir import scalar as s
from euler_ir.op import Pointwise
from euler_ir.types import I32, DType, ShapeError, TensorType


class Full(Pointwise):
    """A tensor filled with one value."""
    name = "full"
    value: float
    dtype: DType
    shape: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if any(n < 0 for n in self.shape) or not self.dtype.holds(self.value):
            raise ShapeError(f"a shape and a value of type {self.dtype}, got {self.shape} and "
                             f"{self.value}")
        return (TensorType(self.dtype, self.shape),)

    def scalar(self):
        return s.const(self.value, self.dtype)

    def backward(self, b, node, grads):
        return []


class Iota(Pointwise):
    """0, 1, …, size - 1 as i32 [size]"""
    name = "iota"
    size: int

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return (TensorType(I32, (self.size,)),)

    def scalar(self):
        return s.linear_index().cast(I32)

    def evaluate(self, *operands):
        return s.evaluate((self.scalar(),), operands, (self.size,))

    def backward(self, b, node, grads):
        return []
