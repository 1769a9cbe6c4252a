"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout.

    %y: f32[8,128,4,32] = rotary(%x, %cos, %sin) {inverse = false}
"""

from __future__ import annotations

from euler_ir.op import Row
from euler_ir.types import ShapeError


class Rotary(Row):
    """Turn each pair (x_i, x_{i+D/2}) by its position's angle, as Hugging Face's Llama does.

        y_i = x_i cos_i - x_{i+D/2} sin_i,   y_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i

    x [B, T, H, D]; cos and sin [T, 1, D] (or any shape that broadcasts), where sin carries the
    sign: -sin in the first half, +sin in the second. `inverse` turns back: the gradient."""
    name = "rotary"
    inverse: bool = False

    def infer(self, *operands):
        x, cos, sin = operands
        if not x.rank or x.shape[-1] % 2:
            raise ShapeError(f"an even last axis, got {x}")
        if self.space(x, cos, sin) != x.shape:
            raise ShapeError(f"cos and sin that broadcast to {x}, got {cos} and {sin}")
        return super().infer(*operands)

    def row(self, row, x, cos, sin):
        turned = row.roll(x, row.size // 2) * sin
        return x * cos - turned if self.inverse else x * cos + turned

    def backward(self, b, node, grads):
        _, cos, sin = node.inputs
        return [b.apply(Rotary(not self.inverse), grads[0], cos, sin), None, None]
