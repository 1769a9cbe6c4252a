"""The optimizer's ops. Both take any number of tensors and run as one launch.

    %norm: f32[] = global_norm(%g0, %g1, %g2)
"""

from __future__ import annotations

import math

import numpy as np

from euler_ir import scalar as s
from euler_ir.op import NoGradient, Op
from euler_ir.types import F32, F64, I32, ShapeError, TensorType


class GlobalNorm(Op):
    """y = √(Σ x²) over all elements of all operands.

    Squares are summed in f64, so that finite f32 gradients have a finite norm."""
    name = "global_norm"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        dtypes = {operand.dtype for operand in operands}
        if len(dtypes) != 1 or not operands[0].dtype.is_float:
            raise ShapeError(f"floats of one type, got {', '.join(map(str, operands)) or 'none'}")
        return (TensorType(operands[0].dtype.compute, ()),)

    def evaluate(self, *operands):
        with np.errstate(all="ignore"):
            total = sum(np.sum(np.square(x, dtype=np.float64)) for x in operands)
            return (np.sqrt(total).astype(operands[0].dtype),)

    def backward(self, b, node, grads):
        (g,), norm = grads, node.output
        # A zero norm has no direction: the gradient there is 0, as for |x| at 0.
        zero = b.full(0.0, norm.dtype, ())
        ratio = b.select(b.less(zero, norm), g / norm, zero)
        return [b.cast(b.cast(x, norm.dtype) * ratio, x.dtype) for x in node.inputs]


class AdamW(Op):
    """AdamW with decoupled weight decay, global-norm clipping and a guard against bad gradients.

        g ← g min(1, clip_norm/norm);  m ← β₁m + (1-β₁)g;  v ← β₂v + (1-β₂)g²
        p ← p (1 - lr·decay) - lr · (m/(1-β₁ᵗ)) / (√(v/(1-β₂ᵗ)) + eps)

    (Kingma & Ba 2015, arXiv:1412.6980; Loshchilov & Hutter 2019, arXiv:1711.05101.) Operands:
    n parameters, n gradients, n first moments, n second moments, then learning_rate [],
    step i32 [] (t - 1, the number of updates applied before), norm [] and norm_limit [].
    Results: n parameters, n first, n second moments. Where the norm is not finite or above the
    limit every result is the old value, to the bit. `decay` has one coefficient a tensor."""
    name = "adamw"
    decay: tuple[float, ...]
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    @property
    def count(self) -> int:
        return len(self.decay)

    @property
    def renewed(self) -> tuple[tuple[int, int], ...]:
        """Each result with the operand that it is the new value of (gradients have none): element
        by element, so that a kernel may write it over that."""
        n = self.count
        return tuple((result * n + i, operand * n + i)
                     for result, operand in enumerate((0, 2, 3)) for i in range(n))

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        n = self.count
        if not (0 < self.beta1 < 1 and 0 < self.beta2 < 1):
            raise ShapeError(f"beta1 and beta2 between 0 and 1, got {self.beta1}, {self.beta2}")
        if len(operands) != 4 * n + 4:
            raise ShapeError(f"4·{n} tensors and 4 scalars, got {len(operands)} operands")
        parameters, (rate, step, norm, limit) = operands[:n], operands[4 * n:]
        groups = [operands[i * n:(i + 1) * n] for i in range(4)]
        for parameter, *others in zip(*groups, strict=True):
            if any(other != parameter for other in others) or parameter.dtype not in (F32, F64):
                raise ShapeError("parameter, gradient and moments of one f32 or f64 type, got "
                                 f"{parameter} with {', '.join(map(str, others))}")
        scalar = TensorType(parameters[0].dtype, ())
        if (rate, step, norm, limit) != (scalar, TensorType(I32, ()), scalar, scalar):
            raise ShapeError(f"scalars rate, step i32, norm, limit, got {rate}, {step}, {norm}, "
                             f"{limit}")
        return parameters * 3

    def update(self, p, g, m, v, decay, rate, step, norm, limit):
        """The scalar expressions of new p, m, v at one element of one tensor."""
        applied = s.is_finite(norm) & (norm <= limit)
        clipped = g * s.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
        new_m = self.beta1 * m + (1.0 - self.beta1) * clipped
        new_v = self.beta2 * v + (1.0 - self.beta2) * clipped * clipped
        # 1 - βᵗ cancels for small t: in f64, once a launch.
        t = step.cast(F64) + 1.0
        first = (1.0 - s.exp(t * math.log(self.beta1))).cast(p.dtype)
        second = (1.0 - s.exp(t * math.log(self.beta2))).cast(p.dtype)
        direction = (new_m / first) / (s.sqrt(new_v / second) + self.eps)
        new_p = p * (1.0 - rate * decay) - rate * direction
        return tuple(s.where(applied, new, old)
                     for new, old in ((new_p, p), (new_m, m), (new_v, v)))

    def evaluate(self, *operands):
        n, scalars = self.count, operands[4 * self.count:]
        results = []
        for i, decay in enumerate(self.decay):
            p, g, m, v = (operands[group * n + i] for group in range(4))
            arrays = (p, g, m, v, np.array(decay, p.dtype), *scalars)
            results.append(s.evaluate(self.update(*s.array_inputs(arrays)), arrays))
        return tuple(values[group] for group in range(3) for values in results)

    def backward(self, b, node, grads):
        raise NoGradient("an update is not differentiated")
