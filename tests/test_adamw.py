"""The optimizer's op against AdamW written out in numpy f64."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import create
from euler_ir.builder import Builder
from euler_ir.ops import AdamW
from euler_ir.types import F32, F64, I32
from runtime.compiler.driver import compile_function, to_buffers

SHAPES, DECAY = {"a": (33, 7), "b": (65,)}, {"a": 0.1, "b": 0.0}


def step_function():
    with Builder("update") as b:
        groups = [[b.input(prefix + name, F64, shape) for name, shape in SHAPES.items()]
                  for prefix in ("", "g.", "m.", "v.")]
        norm = b.global_norm(groups[1])
        results = b.apply(AdamW(tuple(DECAY.values())), *sum(groups, []), b.input("rate", F64, ()),
                          b.input("t", I32, ()), norm, b.full(float("inf"), F64))
        names = [prefix + name for prefix in ("", "m.", "v.") for name in SHAPES]
        return b.function({**dict(zip(names, results, strict=True)), "norm": norm},
                          {name: name for name in names})


@pytest.mark.parametrize("backend", ["reference", "llvm"])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 30.0], ids=["tiny", "unit", "clipped"])
def test_ten_steps_of_adamw(backend, scale):
    """Decay is decoupled and on matrices only, eps is added outside the root and after the bias
    correction (a gradient of 1e-9 shows it), the clip is by the norm over all tensors."""
    generator = np.random.default_rng(0)
    function = step_function()
    p = {name: generator.normal(size=shape) for name, shape in SHAPES.items()}
    zeros = {f"{moment}.{name}": np.zeros(shape) for moment in "mv"
             for name, shape in SHAPES.items()}
    chosen = create(backend)
    bound = to_buffers({**p, **zeros}, chosen)
    program = compile_function(function, chosen, bound)
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(10):
        g = {name: generator.normal(size=shape) * scale for name, shape in SHAPES.items()}
        rate = 0.01 * (t + 1)
        program.run({"rate": np.array(rate), "t": np.array(t), **{f"g.{k}": g[k] for k in g}})
        norm = np.sqrt(sum((x * x).sum() for x in g.values()))
        for name in SHAPES:
            clipped = g[name] / max(norm, 1.0)
            m[name] = 0.9 * m[name] + 0.1 * clipped
            v[name] = 0.95 * v[name] + 0.05 * clipped**2
            first, second = m[name] / (1 - 0.9 ** (t + 1)), v[name] / (1 - 0.95 ** (t + 1))
            p[name] -= rate * DECAY[name] * p[name]
            p[name] -= rate * first / (np.sqrt(second) + 1e-8)
    for name in SHAPES:
        np.testing.assert_allclose(bound[name].read(), p[name], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(bound[f"m.{name}"].read(), m[name], rtol=1e-12)
        np.testing.assert_allclose(bound[f"v.{name}"].read(), v[name], rtol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "llvm"])
def test_gradients_whose_squares_overflow_f32_are_scaled_to_the_clip(backend):
    with Builder("clip") as b:
        g = b.input("g", F32, (4,))
        zero = b.full(0.0, F32, (4,))
        norm = b.global_norm([g])
        scalars = b.full(0.1, F32), b.full(0, I32), norm, b.full(float("inf"), F32)
        _, m, _ = b.apply(AdamW((0.0,)), zero, g, zero, zero, *scalars)
        f = b.function({"norm": norm, "m": m})
    got = compile_function(f, create(backend)).run({"g": np.full(4, 1e20, np.float32)})
    np.testing.assert_allclose(got["norm"], 2e20, rtol=1e-6)
    np.testing.assert_allclose(got["m"], 0.1 * 0.5, rtol=1e-6)
