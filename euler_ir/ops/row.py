"""Row ops: softmax, the norms, cross-entropy. Expressions and reductions along the last axis.

    %y: f32[8,128,768] = rms_norm(%x, %weight) {eps = 1e-05}

Gradient rules of row ops are row ops too: one pass over the row, statistics recomputed rather than
stored (they cost a fraction of the memory traffic).
"""

from __future__ import annotations

from euler_ir import scalar as s
from euler_ir.op import Row
from euler_ir.types import I32, ShapeError


class Softmax(Row):
    """y = eˣ⁻ᵐ / Σ eˣ⁻ᵐ along the last axis, m the row's maximum"""
    name = "softmax"

    def row(self, row, x):
        e = s.exp(x - row.max(x))
        return e / row.sum(e)

    def backward(self, b, node, grads):
        return [b.apply(SoftmaxBackward(), node.output, grads[0])]


class SoftmaxBackward(Row):
    """dx = y (g - Σ g y)"""
    name = "softmax_backward"

    def row(self, row, y, g):
        return y * (g - row.sum(g * y))


class RMSNorm(Row):
    """y = w x / √(mean x² + eps)  (Zhang & Sennrich 2019, arXiv:1910.07467)

    x [..., C], weight [C] → y [..., C]"""
    name = "rms_norm"
    eps: float = 1e-5

    def row(self, row, x, weight):
        return x * s.rsqrt(row.mean(x * x) + self.eps) * weight

    def backward(self, b, node, grads):
        x, weight = node.inputs
        dx, dw = b.apply(RMSNormBackward(self.eps), x, weight, grads[0])
        return [dx, b.cast(dw, weight.dtype)]


class RMSNormBackward(Row):
    """dx = r (g w - x̂ mean(g w x̂)), dw = Σ_rows g x̂,  r = 1/√(mean x² + eps), x̂ = r x"""
    name = "rms_norm_backward"
    eps: float = 1e-5

    def row(self, row, x, weight, g):
        r = s.rsqrt(row.mean(x * x) + self.eps)
        unit = x * r
        scaled = g * weight
        return r * (scaled - unit * row.mean(scaled * unit)), row.column_sum(g * unit)


class LayerNorm(Row):
    """y = w (x - μ)/√(σ² + eps) + bias, two-pass variance  (Ba et al. 2016, arXiv:1607.06450)

    x [..., C], weight [C], bias [C] → y [..., C]"""
    name = "layer_norm"
    eps: float = 1e-5

    def row(self, row, x, weight, bias):
        centred = _centred(row, x)
        return centred * s.rsqrt(row.mean(centred * centred) + self.eps) * weight + bias

    def backward(self, b, node, grads):
        x, weight, bias = node.inputs
        dx, dw, dbias = b.apply(LayerNormBackward(self.eps), x, weight, grads[0])
        return [dx, b.cast(dw, weight.dtype), b.cast(dbias, bias.dtype)]


class LayerNormBackward(Row):
    """dx = r (g w - mean(g w) - x̂ mean(g w x̂)), dw = Σ_rows g x̂, dbias = Σ_rows g"""
    name = "layer_norm_backward"
    eps: float = 1e-5

    def row(self, row, x, weight, g):
        centred = _centred(row, x)
        r = s.rsqrt(row.mean(centred * centred) + self.eps)
        unit = centred * r
        scaled = g * weight
        dx = r * (scaled - row.mean(scaled) - unit * row.mean(scaled * unit))
        return dx, row.column_sum(g * unit), row.column_sum(g)


def _centred(row, x):
    """x - μ. The rounded mean of numbers far from zero is off by up to their last place, which can
    be as much as they vary: the mean of what is left takes that away."""
    centred = x - row.mean(x)
    return centred - row.mean(centred)


class CrossEntropy(Row):
    """Negative log-likelihood of each row's target, 0 where the target is -1 (none).

        loss = log Σ_j e^{x_j} - x_target,   log_sum = log Σ_j e^{x_j}

    logits [..., V], target i32 [..., 1] → loss [..., 1], log_sum [..., 1]. With `vocabulary` > 0
    only the first `vocabulary` columns take part: the rest is padding."""
    name = "cross_entropy"
    vocabulary: int = 0

    def infer(self, *operands):
        logits, target = operands
        if not logits.rank or not logits.dtype.is_float:
            raise ShapeError(f"float logits [..., V], got {logits}")
        if target.dtype is not I32 or target.shape != logits.shape[:-1] + (1,):
            raise ShapeError(f"logits [..., V] and target i32[..., 1], got {logits} and {target}")
        if not 0 <= self.vocabulary <= logits.shape[-1]:
            raise ShapeError(f"vocabulary from 0 to {logits.shape[-1]}, got {self.vocabulary}")
        return super().infer(*operands)

    def row(self, row, logits, target):
        x = _mask_padding(row, logits, self.vocabulary)
        largest = row.max(x)
        log_rest = s.log(row.sum(s.exp(x - largest)))
        chosen = row.sum(s.where(row.index.equals(target), logits, 0.0))
        # Not log_sum - chosen: of large logits that would keep the absolute error of their size.
        loss = log_rest + (largest - chosen)
        return s.where(target < 0, 0.0, loss), largest + log_rest

    def backward(self, b, node, grads):
        logits, target = node.inputs
        grad_loss, grad_log_sum = grads
        _, log_sum = node.outputs
        dx = None
        if grad_loss is not None:
            dx = b.apply(CrossEntropyBackward(self.vocabulary), logits, target, log_sum, grad_loss)
        if grad_log_sum is not None:
            size = self.vocabulary or logits.shape[-1]
            weighted = b.softmax(b.part(logits, -1, 0, size)) * grad_log_sum
            more = b.pad(weighted, logits.shape, (0,) * len(logits.shape))
            dx = more if dx is None else dx + more
        return [dx, None]


class CrossEntropyBackward(Row):
    """dx_j = g (e^{x_j - log_sum} - [j = target]), 0 for rows without a target and for padding"""
    name = "cross_entropy_backward"
    vocabulary: int = 0

    def row(self, row, logits, target, log_sum, g):
        x = _mask_padding(row, logits, self.vocabulary)
        g = s.where(target < 0, 0.0, g)
        hit = s.where(row.index.equals(target), s.const(1.0, x.dtype), 0.0)
        return s.where(target < 0, 0.0, g * (s.exp(x - log_sum) - hit))


def _mask_padding(row, logits, vocabulary: int):
    """Logits with the padded columns at minus infinity."""
    if not vocabulary or vocabulary == row.size:
        return logits
    return s.where(row.index < vocabulary, logits, float("-inf"))
