"""Ops from outside: a pointwise, a row and a composite one, written here, trained through on every
backend. Each is one class; nothing in the packages knows them."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import create
from euler_ir import scalar as s
from euler_ir.autodiff import backpropagate
from euler_ir.builder import Builder
from euler_ir.op import Composite, Pointwise, Row
from euler_ir.ops import AdamW
from euler_ir.types import F32, I32
from runtime.compiler.driver import compile_function, to_buffers
from runtime.testing import check_op


class Softplus(Pointwise):
    """y = ln(1 + eˣ)"""
    name = "test_softplus"

    def scalar(self, x):
        return s.maximum(x, 0.0) + s.log(1.0 + s.exp(-s.absolute(x)))

    def backward(self, b, node, grads):
        return [grads[0] * b.sigmoid(node.inputs[0])]


class L2Norm(Row):
    """y = x / √(Σ x² + eps)"""
    name = "test_l2_norm"
    eps: float = 1e-6

    def row(self, row, x):
        return x * s.rsqrt(row.sum(x * x) + self.eps)

    def backward(self, b, node, grads):
        (x,), (g,), y = node.inputs, grads, node.output
        scale = b.rsqrt(b.reduce_sum(x * x, (1,), keep=True) + self.eps)
        return [scale * (g - y * b.reduce_sum(g * y, (1,), keep=True))]


class Residual(Composite):
    """y = x + x wᵀ"""
    name = "test_residual"

    def decompose(self, b, x, w):
        return x + b.linear(x, w)

    def backward(self, b, node, grads):
        (x, w), (g,) = node.inputs, grads
        return [g + b.matmul(g, w), b.matmul(g, x, transpose_a=True)]


@pytest.mark.parametrize("op, shapes", [
    (Softplus(), [(5, 7)]), (L2Norm(), [(5, 7)]), (Residual(), [(5, 7), (7, 7)]),
])
def test_check_op_accepts_them(op, shapes):
    check_op(op, *shapes)


def training_step():
    """A classifier of 16 features in 4 classes, through all three ops, with its AdamW update."""
    with Builder("classifier") as b:
        x, target = b.input("x", F32, (32, 16)), b.input("target", I32, (32, 1))
        shapes = {"residual": (16, 16), "head": (4, 16)}
        weights = {name: b.input(name, F32, shape) for name, shape in shapes.items()}
        hidden = b.apply(Residual(), x, weights["residual"])
        hidden = b.apply(L2Norm(), b.apply(Softplus(), hidden))
        loss = b.mean(b.cross_entropy(b.linear(hidden, weights["head"]), target))
        grads = backpropagate(b, {loss: b.full(1.0, F32)}, set(weights.values()))
        moments = [b.input(f"{m}.{name}", F32, shape) for m in "mv"
                   for name, shape in shapes.items()]
        scalars = [b.full(0.05, F32), b.input("t", I32, ()), b.full(0.0, F32), b.full(1e9, F32)]
        results = b.apply(AdamW((0.0, 0.0)), *weights.values(),
                          *(grads[weight] for weight in weights.values()), *moments, *scalars)
        names = [*shapes, *(value.name for value in moments)]
        outputs = dict(zip(names, results, strict=True))
        return b.function({"loss": loss, **outputs}, {name: name for name in names})


@pytest.mark.parametrize("backend", ["reference", "llvm"])
def test_a_model_trains_through_them(backend):
    function = training_step()
    generator = np.random.default_rng(0)
    start = {value.name: np.zeros(value.shape, np.float32) for value in function.inputs
             if value.name not in ("x", "target", "t")}
    for name in ("residual", "head"):
        start[name][...] = generator.normal(size=start[name].shape) * 0.1
    chosen = create(backend)
    program = compile_function(function, chosen, to_buffers(start, chosen))
    x = generator.normal(size=(32, 16)).astype(np.float32)
    target = (np.argmax(x[:, :4], axis=1)[:, None]).astype(np.int32)
    losses = [float(program.run({"x": x, "target": target, "t": np.array(t)})["loss"])
              for t in range(60)]
    assert abs(losses[0] - np.log(4)) < 0.3
    assert losses[-1] < 0.5 * losses[0]
