"""Element types and tensor types: the static facts every value of the IR carries."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np


class DType(enum.Enum):
    """An element type; the enum's value is its spelling in the text form."""

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    U32 = "u32"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype:
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes an element takes in memory."""
        return _NUMPY[self].itemsize

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    def holds(self, value: int | float | bool) -> bool:
        """Whether the number is one of this type; floats take every number, rounded."""
        if self.is_float:
            return True
        if self is DType.BOOL:
            return value in (0, 1)
        limits = np.iinfo(self.numpy)
        return limits.min <= value <= limits.max and value == int(value)

    @property
    def compute(self) -> DType:
        """The type arithmetic is done in: 16-bit floats are widened to f32 on load."""
        return DType.F32 if self in (DType.BF16, DType.F16) else self

    @staticmethod
    def from_numpy(dtype: np.dtype) -> DType:
        for candidate, numpy_dtype in _NUMPY.items():
            if numpy_dtype == dtype:
                return candidate
        raise TypeError(f"numpy type {dtype} has no IR type; known: {', '.join(map(str, DType))}")

    def __str__(self) -> str:
        return self.value


_NUMPY = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F16: np.dtype(np.float16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.U32: np.dtype(np.uint32),
    DType.BOOL: np.dtype(np.bool_),
}
_FLOATS = frozenset({DType.F64, DType.F32, DType.BF16, DType.F16})

F64, F32, BF16, F16 = DType.F64, DType.F32, DType.BF16, DType.F16
I64, I32, U32, BOOL = DType.I64, DType.I32, DType.U32, DType.BOOL


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and static shape of a value; buffers are row-major and contiguous."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def with_shape(self, shape: tuple[int, ...]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class ShapeError(TypeError):
    """Operands an op cannot take; the builder and verifier add the op, values and source line."""
