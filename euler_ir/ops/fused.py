"""A kernel made of several ops: what the fusion passes build.

    %y: f32[8,128] = fused(%a, %b) {kind = 'row', body =
      func @body(%a: f32[8,128], %b: f32[8,128]) -> (0: f32[8,128]) {
        %c: f32[8,128] = mul(%a, %b)
        ...
      }}
"""

from __future__ import annotations

from euler_ir.graph import Function
from euler_ir.op import NoGradient, Op
from euler_ir.types import ShapeError, TensorType


class Fused(Op):
    """Runs `body` on the operands. `kind` says how a backend makes one kernel of it: 'row'
    (pointwise and row ops over one row space) or 'matmul' (a matmul and its epilogue)."""
    name = "fused"
    kind: str
    body: Function

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        expected = tuple(value.type for value in self.body.inputs)
        if operands != expected:
            raise ShapeError(f"operands of the body, {list(map(str, expected))}, got "
                             f"{list(map(str, operands))}")
        return tuple(value.type for value in self.body.outputs)

    def evaluate(self, *operands):
        from euler_ir.interpreter import run_body
        return run_body(self.body, operands)

    def backward(self, b, node, grads):
        raise NoGradient("differentiate before fusing")
