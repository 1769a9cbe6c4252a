"""Attention over key ranges, with grouped key/value heads, forward and backward.

    %o: f32[8,128,4,32], %lse: f32[8,128,4] = attention(%q, %k, %v, %lo, %hi) {scale = 0.1767}

Query t of row b sees the keys j with lo[b,t] ≤ j < hi[b,t]. This one form is the causal mask
(lo = 0, hi = t + 1), a query offset and length with a KV cache, left padding, and the document mask
of packed rows. The backends have flash kernels (Dao et al. 2022, arXiv:2205.14135) that never hold
a T×S matrix; the decompositions here are their meaning.
"""

from __future__ import annotations

from euler_ir import scalar as s
from euler_ir.op import Composite, NoGradient, Row
from euler_ir.types import F32, I32, ShapeError, TensorType

#: Finite stand-in for minus infinity, so that a row without keys has no NaN on its way.
_LOWEST = -3.0e38


class Attention(Composite):
    """o = softmax(scale q kᵀ restricted to the key range) v; a query without keys gives 0.

    q [B,T,H,D], k and v [B,S,G,D] (query head h uses key head h // (H/G)), lo and hi i32 [B,T]
    → o [B,T,H,D], log_sum [B,T,H] (log of the softmax's denominator, f32 at least; 0 without
    keys). Keys and values that no query of the row sees are never used, NaN or not."""
    name = "attention"
    scale: float

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        q, k, v, lo, hi = operands
        ranges = TensorType(I32, q.shape[:2])
        if (q.rank != 4 or k.rank != 4 or k != v or k.dtype is not q.dtype
                or not q.dtype.is_float
                or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or not k.shape[2]
                or q.shape[2] % k.shape[2] or lo != ranges or hi != ranges):
            raise ShapeError("q [B,T,H,D], k and v [B,S,G,D] with G dividing H, lo and hi i32 "
                             f"[B,T], got {', '.join(map(str, operands))}")
        return q, TensorType(q.dtype.compute, q.shape[:3])

    def decompose(self, b, q, k, v, lo, hi):
        k, v = _seen_only(b, k, lo, hi), _seen_only(b, v, lo, hi)
        scores = _scores(b, q, k)
        weights, log_sum = b.apply(AttentionWeights(self.scale), scores, *_ranges(b, lo, hi))
        return [_by_query(b, _mix(b, weights, _by_head(b, v))),
                b.transpose(b.reshape(log_sum, log_sum.shape[:3]), (0, 2, 1))]

    def backward(self, b, node, grads):
        q, k, _, lo, hi = node.inputs
        grad_o, grad_log_sum = grads
        dq = dk = dv = None
        if grad_o is not None:
            dq, dk, dv = b.apply(AttentionBackward(self.scale), *node.inputs, *node.outputs, grad_o)
        if grad_log_sum is not None:
            more_q, more_k = self._log_sum_gradients(b, q, k, lo, hi, grad_log_sum)
            dq, dk = (more_q, more_k) if dq is None else (dq + more_q, dk + more_k)
        return [dq, dk, dv, None, None]

    def _log_sum_gradients(self, b, q, k, lo, hi, grad):
        """With g log_sum's gradient and p the weights: dq = scale g p k is attention to the keys as
        values, dk = scale pᵀ (g q) what the gradient of such an attention is by its values."""
        mean_key, log_sum = b.apply(self, q, k, k, lo, hi)
        grad = b.reshape(b.cast(grad * self.scale, q.dtype), (*grad.shape, 1))
        grad = b.broadcast(grad, q.shape)
        _, _, dk = b.apply(AttentionBackward(self.scale), q, k, k, lo, hi, mean_key, log_sum,
                           grad * q)
        return grad * mean_key, dk


class AttentionBackward(Composite):
    """Gradients of q, k and v, given attention's operands, results and the gradient of o.

        p = e^{scale q kᵀ - log_sum},  dv = pᵀ do,  ds = p (do vᵀ - Σ do o),
        dq = scale ds k,  dk = scale dsᵀ q   (dk, dv summed over the query heads of a group)"""
    name = "attention_backward"
    scale: float

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        q, k, v, lo, hi, o, log_sum, do = operands
        expected = Attention(self.scale).infer(q, k, v, lo, hi)
        if (o, log_sum) != expected or do != o:
            raise ShapeError(f"o, log_sum and do as attention gives them ({expected[0]}, "
                             f"{expected[1]}), got {o}, {log_sum}, {do}")
        return q, k, v

    def decompose(self, b, q, k, v, lo, hi, o, log_sum, do):
        k, v = _seen_only(b, k, lo, hi), _seen_only(b, v, lo, hi)
        batch, queries, heads, width = q.shape
        groups, keys = k.shape[2], k.shape[1]
        do_heads, v_heads = _by_head(b, do), _by_head(b, v)
        grad_weights = _over_groups(b, do_heads, v_heads, transpose=True)
        delta = b.reduce_sum(b.cast(do, log_sum.dtype) * b.cast(o, log_sum.dtype), (3,))
        rows = (batch, heads, queries, 1)
        weights, grad_scores = b.apply(
            AttentionWeightsBackward(self.scale), _scores(b, q, k), *_ranges(b, lo, hi),
            b.reshape(b.transpose(log_sum, (0, 2, 1)), rows), grad_weights,
            b.reshape(b.transpose(delta, (0, 2, 1)), rows))
        dq = _by_query(b, _mix(b, grad_scores, _by_head(b, k)))
        grouped = (batch, groups, heads // groups * queries)
        dk = b.matmul(b.reshape(grad_scores, (*grouped, keys)),
                      b.reshape(_by_head(b, q), (*grouped, width)), transpose_a=True)
        dv = b.matmul(b.reshape(weights, (*grouped, keys)),
                      b.reshape(do_heads, (*grouped, width)), transpose_a=True)
        return [dq, _by_query(b, dk), _by_query(b, dv)]

    def backward(self, b, node, grads):
        raise NoGradient("there is no rule for second derivatives")


class AttentionWeights(Row):
    """Softmax over the visible part of each row of scores, and the log of its denominator.

    scores [B,H,T,S], lo and hi i32 [B,1,T,1] → weights [B,H,T,S], log_sum [B,H,T,1]"""
    name = "attention_weights"
    scale: float

    def row(self, row, scores, lo, hi):
        seen = (row.index >= lo) & (row.index < hi)
        x = s.where(seen, scores * self.scale, _LOWEST)
        largest = row.max(x)
        e = s.where(seen, s.exp(x - largest), 0.0)
        total = row.sum(e)
        some = total > 0.0
        # NaN scores must come out as NaN, so only a true zero counts as "no keys".
        none = total.equals(0.0)
        log_sum = s.where(none, 0.0, largest + s.log(s.where(some, total, total + 1.0)))
        return e / s.where(none, 1.0, total), log_sum


class AttentionWeightsBackward(Row):
    """Weights again from log_sum, and the gradient of the scores: scale p (dp - delta)."""
    name = "attention_weights_backward"
    scale: float

    def row(self, row, scores, lo, hi, log_sum, grad_weights, delta):
        seen = (row.index >= lo) & (row.index < hi)
        weights = s.where(seen, s.exp(scores * self.scale - log_sum), 0.0)
        return weights, s.where(seen, weights * (grad_weights - delta) * self.scale, 0.0)


def _by_head(b, x):
    """[B,T,H,D] → [B,H,T,D]"""
    return b.transpose(x, (0, 2, 1, 3))


_by_query = _by_head  # the same exchange of axes, [B,H,T,D] → [B,T,H,D]


def _over_groups(b, x, y, transpose: bool):
    """x [B,H,T,·] times y [B,G,·,·], each group of H/G heads of x with its head of y."""
    batch, heads, queries, _ = x.shape
    stacked = b.reshape(x, (batch, y.shape[1], heads // y.shape[1] * queries, x.shape[3]))
    product = b.matmul(stacked, y, transpose_b=transpose)
    return b.reshape(product, (batch, heads, queries, product.shape[3]))


def _scores(b, q, k):
    """q kᵀ of every head: [B,H,T,S]"""
    return _over_groups(b, _by_head(b, q), _by_head(b, k), transpose=True)


def _mix(b, weights, v):
    """weights v of every head: [B,H,T,D]"""
    return _over_groups(b, weights, v, transpose=False)


def _ranges(b, lo, hi):
    """lo and hi [B,T] as [B,1,T,1], to stand beside scores."""
    batch, queries = lo.shape
    return b.reshape(lo, (batch, 1, queries, 1)), b.reshape(hi, (batch, 1, queries, 1))


def _seen_only(b, x, lo, hi):
    """x [B,S,G,D] with zeros for keys outside every query's range (0 · NaN would be NaN)."""
    batch, keys, _, _ = x.shape
    grid = (batch, lo.shape[1], keys)
    index = b.broadcast(b.iota(keys), grid)

    def spread(bound):
        return b.broadcast(b.reshape(bound, (*bound.shape, 1)), grid)

    seen = b.logical_and(b.less_equal(spread(lo), index), b.less(index, spread(hi)))
    anyone = b.reduce_max(b.cast(seen, F32), (1,))
    mask = b.broadcast(b.reshape(anyone, (batch, keys, 1, 1)), x.shape)
    return b.select(b.less(b.full(0.0, F32, x.shape), mask), x, b.full(0.0, x.dtype, x.shape))
