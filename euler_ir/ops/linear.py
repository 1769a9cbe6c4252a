"""Matrix multiplication.

    %y: f32[8,128,256] = matmul(%x, %w) {transpose_a = false, transpose_b = true}
"""

from __future__ import annotations

import math

import numpy as np

from euler_ir.op import Op
from euler_ir.types import ShapeError, TensorType


class Matmul(Op):
    """C = A B on the last two axes, either operand transposed.

    A [..., M, K], B [..., K, N] → C [..., M, N] with equal leading axes, or B of rank 2 shared by
    all of A's rows (A not transposed then). Sums are f32 for 16-bit operands."""
    name = "matmul"
    transpose_a: bool = False
    transpose_b: bool = False

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        a, b = operands
        if a.rank < 2 or b.rank < 2 or a.dtype is not b.dtype:
            raise ShapeError(f"two tensors of rank 2 or more and one type, got {a} and {b}")
        m, k = a.shape[-2:][::-1] if self.transpose_a else a.shape[-2:]
        inner, n = b.shape[-2:][::-1] if self.transpose_b else b.shape[-2:]
        if k != inner:
            raise ShapeError(f"equal inner extents, got {k} and {inner} of {a} and {b}")
        shared = b.rank == 2 and not self.transpose_a
        if a.shape[:-2] != b.shape[:-2] and not shared:
            raise ShapeError(f"equal leading axes, got {a} and {b}")
        return (a.with_shape(a.shape[:-2] + (m, n)),)

    def evaluate(self, a, b):
        a = np.swapaxes(a, -1, -2) if self.transpose_a else a
        b = np.swapaxes(b, -1, -2) if self.transpose_b else b
        with np.errstate(all="ignore"):
            return (np.matmul(a, b),)

    def backward(self, b, node, grads):
        (x, w), (g,) = node.inputs, grads
        ta, tb = self.transpose_a, self.transpose_b
        if len(w.shape) == 2 and len(x.shape) > 2:
            count = math.prod(x.shape[:-1])  # written out: with no columns, -1 cannot tell
            rows = b.reshape(x, (count, x.shape[-1]))
            dw = self._grad_b(b, rows, b.reshape(g, (count, g.shape[-1])))
        else:
            dw = self._grad_b(b, x, g)
        if ta:
            dx = b.matmul(w, g, transpose_a=tb, transpose_b=True)
        else:
            dx = b.matmul(g, w, transpose_b=not tb)
        return [dx, dw]

    def _grad_b(self, b, x, g):
        """dB = Aᵀ G, or its transpose where B came transposed."""
        if self.transpose_b:
            return b.matmul(g, x, transpose_a=True, transpose_b=self.transpose_a)
        return b.matmul(x, g, transpose_a=not self.transpose_a)
