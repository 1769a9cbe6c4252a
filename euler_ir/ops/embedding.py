"""Table look-up and its deterministic gradient.

    %x: f32[8,128,768] = gather(%table, %tokens)
"""

from __future__ import annotations

import numpy as np

from euler_ir.op import Op
from euler_ir.types import BOOL, I32, ShapeError, TensorType


class Gather(Op):
    """y[...] = table[indices[...]]; an index outside the table gives zeros, never a stray read.

    table [V, C], indices i32 [...] → y [..., C]"""
    name = "gather"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        table, indices = operands
        if table.rank != 2 or indices.dtype is not I32:
            raise ShapeError(f"table [V, C] and i32 indices, got {table} and {indices}")
        return (table.with_shape(indices.shape + table.shape[1:]),)

    def evaluate(self, table, indices):
        valid = (indices >= 0) & (indices < len(table))
        rows = table[np.where(valid, indices, 0)]
        return (np.where(valid[..., None], rows, np.zeros((), table.dtype)),)

    def backward(self, b, node, grads):
        table, indices = node.inputs
        return [b.scatter_add(indices, grads[0], table.shape[0]), None]


class ScatterAdd(Op):
    """y[r] = Σ updates[i] over the i with indices[i] = r, summed in order of i; indices outside
    the table are dropped.

    indices i32 [...], updates [..., C] → y [rows, C]"""
    name = "scatter_add"
    rows: int

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        indices, updates = operands
        if (indices.dtype is not I32 or not updates.rank or updates.shape[:-1] != indices.shape
                or updates.dtype is BOOL or self.rows < 0):
            raise ShapeError("i32 indices [...] and numbers as updates [..., C], got "
                             f"{indices}, {updates}")
        return (updates.with_shape((self.rows, updates.shape[-1])),)

    def evaluate(self, indices, updates):
        flat = indices.reshape(-1)
        valid = (flat >= 0) & (flat < self.rows)
        result = np.zeros((self.rows, updates.shape[-1]), updates.dtype)
        np.add.at(result, flat[valid], updates.reshape(flat.size, updates.shape[-1])[valid])
        return (result,)

    def backward(self, b, node, grads):
        return [None, b.gather(grads[0], node.inputs[0])]
