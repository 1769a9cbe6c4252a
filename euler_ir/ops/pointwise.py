"""Pointwise ops: arithmetic, comparisons, activations, casts. Each is one scalar expression.

    %y: f32[8,128] = mul(%a, %b)
"""

from __future__ import annotations

import math

from euler_ir import scalar as s
from euler_ir.op import Pointwise
from euler_ir.types import BOOL, DType, TensorType


class Add(Pointwise):
    """y = a + b"""
    name = "add"

    def scalar(self, a, b):
        return a + b

    def backward(self, b, node, grads):
        return [grads[0], grads[0]]


class Sub(Pointwise):
    """y = a - b"""
    name = "sub"

    def scalar(self, a, b):
        return a - b

    def backward(self, b, node, grads):
        return [grads[0], -grads[0]]


class Mul(Pointwise):
    """y = a b"""
    name = "mul"

    def scalar(self, a, b):
        return a * b

    def backward(self, b, node, grads):
        (x, y), (g,) = node.inputs, grads
        return [g * y, g * x]


class Div(Pointwise):
    """y = a / b"""
    name = "div"

    def scalar(self, a, b):
        return a / b

    def backward(self, b, node, grads):
        (_, y), (g,) = node.inputs, grads
        return [g / y, -(g * node.output) / y]


class Neg(Pointwise):
    """y = -x"""
    name = "neg"

    def scalar(self, x):
        return -x

    def backward(self, b, node, grads):
        return [-grads[0]]


class Abs(Pointwise):
    """y = |x|; the slope at 0 is 0"""
    name = "abs"

    def scalar(self, x):
        return s.absolute(x)

    def backward(self, b, node, grads):
        return [grads[0] * b.sign(node.inputs[0])]


class Sign(Pointwise):
    """y = -1, 0 or 1, NaN for NaN; its derivative is 0"""
    name = "sign"

    def scalar(self, x):
        return s.where(x > 0.0, 1.0, s.where(x < 0.0, s.const(-1.0, x.dtype), x - x))

    def backward(self, b, node, grads):
        return [None]


class Maximum(Pointwise):
    """y = max(a, b), NaN where either is; where they are equal each gets half the gradient"""
    name = "maximum"

    def scalar(self, a, b):
        return s.maximum(a, b)

    def backward(self, b, node, grads):
        x, y = node.inputs
        return _split_by_order(b, grads[0], y, x)


class Minimum(Pointwise):
    """y = min(a, b), NaN where either is; where they are equal each gets half the gradient"""
    name = "minimum"

    def scalar(self, a, b):
        return s.minimum(a, b)

    def backward(self, b, node, grads):
        x, y = node.inputs
        return _split_by_order(b, grads[0], x, y)


def _split_by_order(b, g, first, second):
    """Gradients of two operands, of which the first wins where first < second."""
    half = g * 0.5
    zero = b.full(0.0, g.dtype, g.shape)
    return [b.select(b.less(first, second), g, b.select(b.equal(first, second), half, zero)),
            b.select(b.less(second, first), g, b.select(b.equal(first, second), half, zero))]


class Exp(Pointwise):
    """y = eˣ"""
    name = "exp"

    def scalar(self, x):
        return s.exp(x)

    def backward(self, b, node, grads):
        return [grads[0] * node.output]


class Log(Pointwise):
    """y = ln x"""
    name = "log"

    def scalar(self, x):
        return s.log(x)

    def backward(self, b, node, grads):
        return [grads[0] / node.inputs[0]]


class Sqrt(Pointwise):
    """y = √x"""
    name = "sqrt"

    def scalar(self, x):
        return s.sqrt(x)

    def backward(self, b, node, grads):
        return [grads[0] * 0.5 / node.output]


class Rsqrt(Pointwise):
    """y = 1/√x"""
    name = "rsqrt"

    def scalar(self, x):
        return s.rsqrt(x)

    def backward(self, b, node, grads):
        y = node.output
        return [grads[0] * -0.5 * y * y * y]


class Tanh(Pointwise):
    """y = tanh x"""
    name = "tanh"

    def scalar(self, x):
        return s.tanh(x)

    def backward(self, b, node, grads):
        y = node.output
        return [grads[0] * (1.0 - y * y)]


class Sigmoid(Pointwise):
    """y = 1/(1 + e⁻ˣ)"""
    name = "sigmoid"

    def scalar(self, x):
        return s.sigmoid(x)

    def backward(self, b, node, grads):
        y = node.output
        return [grads[0] * y * (1.0 - y)]


class Erf(Pointwise):
    """y = erf x; dy/dx = 2/√π e^(-x²)"""
    name = "erf"

    def scalar(self, x):
        return s.erf(x)

    def backward(self, b, node, grads):
        (x,) = node.inputs
        return [grads[0] * (2.0 / math.sqrt(math.pi)) * b.exp(-(x * x))]


class Relu(Pointwise):
    """y = max(x, 0); the slope at 0 is 0"""
    name = "relu"

    def scalar(self, x):
        return s.maximum(x, 0.0)

    def backward(self, b, node, grads):
        (x,), (g,) = node.inputs, grads
        zero = b.full(0.0, g.dtype, g.shape)
        return [b.select(b.less(zero, x), g, zero)]


class Silu(Pointwise):
    """y = x σ(x)  (Elfwing et al. 2017, arXiv:1702.03118)"""
    name = "silu"

    def scalar(self, x):
        return x * s.sigmoid(x)

    def backward(self, b, node, grads):
        return [b.apply(SiluBackward(), node.inputs[0], grads[0])]


class SiluBackward(Pointwise):
    """dx = g σ(x) (1 + x (1 - σ(x)))"""
    name = "silu_backward"

    def scalar(self, x, g):
        gate = s.sigmoid(x)
        return g * (gate * (1.0 + x * (1.0 - gate)))


class SwiGLU(Pointwise):
    """y = silu(gate) · up  (Shazeer 2020, arXiv:2002.05202)"""
    name = "swiglu"

    def scalar(self, gate, up):
        return gate * s.sigmoid(gate) * up

    def backward(self, b, node, grads):
        return b.apply(SwiGLUBackward(), *node.inputs, grads[0])


class SwiGLUBackward(Pointwise):
    """dgate = g up σ (1 + gate (1 - σ)), dup = g gate σ, with σ = σ(gate) computed again: cheaper
    than storing silu(gate)"""
    name = "swiglu_backward"

    def scalar(self, gate, up, g):
        opening = s.sigmoid(gate)
        slope = opening * (1.0 + gate * (1.0 - opening))
        return g * up * slope, g * gate * opening


class Gelu(Pointwise):
    """y = x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))  (Hendrycks & Gimpel 2016, arXiv:1606.08415)"""
    name = "gelu"

    def scalar(self, x):
        return 0.5 * x * (1.0 + s.tanh(_gelu_inner(x)))

    def backward(self, b, node, grads):
        return [b.apply(GeluBackward(), node.inputs[0], grads[0])]


class GeluBackward(Pointwise):
    """dx = g (½ (1 + t) + ½ x (1 - t²) u'),  t = tanh u,  u = √(2/π) (x + 0.044715 x³)

    Where t is ±1 the second term is 0, even when x³ has overflowed."""
    name = "gelu_backward"

    def scalar(self, x, g):
        t = s.tanh(_gelu_inner(x))
        slope = math.sqrt(2.0 / math.pi) * (1.0 + 3 * 0.044715 * x * x)
        saturated = (1.0 - t * t) <= 0.0
        curve = s.where(saturated, 0.0, 0.5 * x * (1.0 - t * t) * slope)
        return g * (0.5 * (1.0 + t) + curve)


def _gelu_inner(x):
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)


class Clip(Pointwise):
    """y = min(max(x, low), high); NaN stays; no gradient outside"""
    name = "clip"
    low: float
    high: float

    def scalar(self, x):
        return s.minimum(s.maximum(x, self.low), self.high)

    def backward(self, b, node, grads):
        (x,), (g,) = node.inputs, grads
        inside = b.equal(x, node.output)
        return [b.select(inside, g, b.full(0.0, g.dtype, g.shape))]


class Less(Pointwise):
    """y = a < b, false where either is NaN"""
    name = "less"

    def scalar(self, a, b):
        return a < b

    def backward(self, b, node, grads):
        return [None, None]


class LessEqual(Pointwise):
    """y = a ≤ b, false where either is NaN"""
    name = "less_equal"

    def scalar(self, a, b):
        return a <= b

    def backward(self, b, node, grads):
        return [None, None]


class Equal(Pointwise):
    """y = a = b, false where either is NaN"""
    name = "equal"

    def scalar(self, a, b):
        return a.equals(b)

    def backward(self, b, node, grads):
        return [None, None]


class And(Pointwise):
    """y = a and b (bitwise on integers)"""
    name = "and"

    def scalar(self, a, b):
        return a & b

    def backward(self, b, node, grads):
        return [None, None]


class Or(Pointwise):
    """y = a or b (bitwise on integers)"""
    name = "or"

    def scalar(self, a, b):
        return a | b

    def backward(self, b, node, grads):
        return [None, None]


class Not(Pointwise):
    """y = not x (bitwise on integers)"""
    name = "not"

    def scalar(self, x):
        return ~x

    def backward(self, b, node, grads):
        return [None]


class IsFinite(Pointwise):
    """y = x is neither NaN nor infinite"""
    name = "is_finite"

    def scalar(self, x):
        return s.is_finite(x)

    def backward(self, b, node, grads):
        return [None]


class Select(Pointwise):
    """y = a where the condition holds, else b"""
    name = "select"

    def scalar(self, condition, a, b):
        return s.where(condition, a, b)

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        super().infer(*operands)
        return (operands[1],)

    def backward(self, b, node, grads):
        condition, (g,) = node.inputs[0], grads
        zero = b.full(0.0, g.dtype, g.shape)
        return [None, b.select(condition, g, zero), b.select(condition, zero, g)]


class Cast(Pointwise):
    """y = x in another type: floats round to nearest even, floats to integers truncate"""
    name = "cast"
    dtype: DType

    def scalar(self, x):
        if self.dtype is BOOL:
            return ~x.equals(0)
        return x.cast(self.dtype)

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (operand,) = operands
        return (operand.with_dtype(self.dtype),)

    def backward(self, b, node, grads):
        (x,), (g,) = node.inputs, grads
        if not (x.dtype.is_float and self.dtype.is_float):
            return [None]
        return [b.cast(g, x.dtype)]
