"""Hard numbers through every runner: NaN, infinities, nothing at all, the ends of the range.

These are faults that engines of this kind have had: a maximum that drops NaN, finiteness tests that
fast-math deletes, variances that cancel, an activation's slope that overflows.
"""

import math

import numpy as np
import pytest

from euler_ir import ops
from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder, IRError
from euler_ir.types import BF16, F32, I32, DType
from tests.runners import every_runner

NAN, INF = math.nan, math.inf
#: NaN in every place that vector code treats on its own: first and last lane, second vector, tail.
PLACES = [0, 1, 15, 16, 31, 32]
LANES = [np.where(np.arange(33) == place, NAN, np.linspace(-2, 2, 33)) for place in PLACES]


def apply(run, build, *arrays, dtype=F32, extra=()):
    """build(b, *values) on arrays of a dtype; `extra` arrays keep their own type."""
    with Builder("f") as b:
        values = [b.input(f"x{i}", dtype, np.shape(a)) for i, a in enumerate(arrays)]
        values += [b.input(f"e{i}", DType.from_numpy(a.dtype), a.shape)
                   for i, a in enumerate(extra)]
        function = b.function({"y": build(b, *values)})
    inputs = {f"x{i}": np.array(a).astype(dtype.numpy) for i, a in enumerate(arrays)}
    return run(function, {**inputs, **{f"e{i}": a for i, a in enumerate(extra)}})["y"]


def nan_of(array):
    return np.isnan(np.asarray(array, np.float64))


# NaN

@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("array", [[1, NAN], [NAN, 1], [-INF, -INF], [NAN, NAN], *LANES],
                         ids=lambda array: f"{len(array)}")
def test_reductions_keep_nan(run, array, dtype):
    array = np.array(array)
    bad = np.isnan(array).any()
    for build, right in [(lambda b, x: b.reduce_max(x, (0,)), np.max),
                         (lambda b, x: b.reduce_min(x, (0,)), np.min),
                         (lambda b, x: b.sum(x), np.sum),
                         (lambda b, x: b.global_norm([x]), lambda x: np.sqrt(np.sum(x * x)))]:
        y = apply(run, build, array, dtype=dtype)
        assert nan_of(y) == bad and (bad or y == right(array))
    assert apply(run, lambda b, x: b.argmax(x), array, dtype=dtype) == np.argmax(array)


@every_runner
@pytest.mark.parametrize("array", [[1, NAN], [NAN, 1], *LANES], ids=lambda array: f"{len(array)}")
def test_rows_keep_nan(run, array):
    array = np.array([array, np.ones(len(array))])
    width = array.shape[1]
    one, zero = np.ones(width), np.zeros(width)
    target = np.zeros((2, 1), np.int32)
    for y in (apply(run, lambda b, x: b.softmax(x), array),
              apply(run, lambda b, x, w: b.rms_norm(x, w, 1e-5), array, one),
              apply(run, lambda b, x, w, c: b.layer_norm(x, w, c, 1e-5), array, one, zero),
              apply(run, lambda b, x, t: b.cross_entropy(x, t), array, extra=[target])):
        assert nan_of(y[0]).all() and np.isfinite(y[1]).all()


@every_runner
@pytest.mark.parametrize("array", [[1, NAN], [NAN, 1], [-INF, INF], *LANES],
                         ids=lambda array: f"{len(array)}")
def test_elements_keep_nan(run, array):
    array = np.array(array, np.float64)
    bad, other = np.isnan(array), np.ones(len(array))
    for build, right in [(lambda b, x: b.clip(x, -1, 1), np.clip(array, -1, 1)),
                         (lambda b, x: b.relu(x), np.maximum(array, 0)),
                         (lambda b, x: b.sign(x), np.sign(array)),
                         (lambda b, x: b.abs(x), np.abs(array))]:
        np.testing.assert_array_equal(apply(run, build, array), right.astype(np.float32))
    for build in (lambda b, x: b.gelu(x), lambda b, x: b.silu(x), lambda b, x: b.exp(x),
                  lambda b, x: b.tanh(x), lambda b, x: b.erf(x), lambda b, x: b.sigmoid(x)):
        assert nan_of(apply(run, build, array))[bad].all()
    for build in (lambda b, x, y: b.maximum(x, y), lambda b, x, y: b.maximum(y, x),
                  lambda b, x, y: b.minimum(x, y), lambda b, x, y: b.minimum(y, x)):
        assert (nan_of(apply(run, build, array, other)) == bad).all()


@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_is_finite_and_comparisons(run, dtype):
    array = np.array([*([0.0, -1.5, 3e38] * 11), NAN, INF, -INF, 1.0])
    finite = np.isfinite(array)
    np.testing.assert_array_equal(apply(run, lambda b, x: b.is_finite(x), array, dtype=dtype),
                                  finite)
    # Of a value that is computed in the same kernel, where x - x may not be folded to 0.
    np.testing.assert_array_equal(
        apply(run, lambda b, x: b.is_finite(x * x), array, dtype=F32), np.abs(array) < 1e19)
    for build in (lambda b, x: b.equal(x, x), lambda b, x: b.less_equal(x, x)):
        np.testing.assert_array_equal(apply(run, build, array, dtype=dtype), ~np.isnan(array))
    assert not apply(run, lambda b, x: b.less(x, x), array, dtype=dtype).any()


@every_runner
@pytest.mark.parametrize("value", [NAN, INF, -INF, 2.0])
def test_constants_mean_what_data_means(run, value):
    """What simplification folds must give what the kernel would."""
    def constant(b):
        return b.full(value, F32, (4,))

    one = np.ones(4)
    for build in (lambda b, x, y: b.maximum(x, y), lambda b, x, y: b.minimum(x, y),
                  lambda b, x, y: b.clip(x, -1, 1) * y, lambda b, x, y: x * 0.0 + y,
                  lambda b, x, y: (x - x) + y, lambda b, x, y: b.relu(x) / x * y,
                  lambda b, x, y: b.select(b.is_finite(x), y, x),
                  lambda b, x, y: b.broadcast(b.reduce_max(x, (0,)), (4,)) * y,
                  lambda b, x, y: b.softmax(x) * y):
        given = apply(run, build, np.full(4, value), one)
        folded = apply(run, lambda b, y, build=build: build(b, constant(b), y), one)
        np.testing.assert_allclose(folded, given, rtol=1e-6)


# Nothing

@every_runner
@pytest.mark.parametrize("shape, axes, result", [
    ((0, 4), (0,), (4,)), ((0, 4), (1,), (0,)), ((4, 0), (0,), (0,)), ((4, 0), (1,), (4,)),
    ((0, 4), (0, 1), ())])
def test_reductions_of_nothing(run, shape, axes, result):
    nothing = np.zeros(shape)
    total = apply(run, lambda b, x: b.reduce_sum(x, axes), nothing)
    assert total.shape == result and not total.any()
    count = math.prod(shape[axis] for axis in axes)
    mean = apply(run, lambda b, x: b.reduce_sum(x, axes) / float(count), nothing)
    assert nan_of(mean).all()
    for build in (lambda b, x: b.reduce_max(x, axes), lambda b, x: b.reduce_min(x, axes)):
        if math.prod(result):
            with pytest.raises(IRError, match="at least one element to choose from, got f32"):
                apply(run, build, nothing)
        else:
            assert apply(run, build, nothing).shape == result


@every_runner
def test_more_of_nothing(run):
    assert nan_of(apply(run, lambda b, x: b.mean(x), np.zeros((0, 4))))
    assert apply(run, lambda b, x: b.softmax(x), np.zeros((0, 4))).shape == (0, 4)
    assert apply(run, lambda b, x, w: b.matmul(x, w), np.zeros((0, 3)), np.zeros((3, 2))
                 ).shape == (0, 2)
    product = apply(run, lambda b, x, w: b.matmul(x, w), np.zeros((2, 0)), np.zeros((0, 3)))
    assert product.shape == (2, 3) and not product.any()
    assert apply(run, lambda b, x: b.global_norm([x]), np.zeros((0,))) == 0.0
    for build in (lambda b, x: b.softmax(x), lambda b, x: b.argmax(x)):
        with pytest.raises(IRError, match="at least one element|maximum of nothing"):
            apply(run, build, np.zeros((4, 0)))


# Norms, activations, softmax at the ends of the range

@every_runner
@pytest.mark.parametrize("mean, first", [(0, -1.3416), (100, -1.3415), (1000, -1.3415),
                                         (10000, -1.3313)])
def test_layer_norm_does_not_cancel(run, mean, first):
    x = (mean + np.arange(16) * 1e-3)[None].astype(np.float32)
    exact = x.astype(np.float64) - x.astype(np.float64).mean()
    exact /= np.sqrt(exact.var() + 1e-5)
    y = apply(run, lambda b, x, w, c: b.layer_norm(x, w, c, 1e-5), x, np.ones(16), np.zeros(16))
    assert round(float(y[0, 0]), 4) == first
    np.testing.assert_allclose(y, exact, atol=2e-6)


@every_runner
def test_norms_of_constant_and_scaled_rows(run):
    bias = np.linspace(-1, 1, 16)
    constant = np.full((1, 16), 1234.0)
    y = apply(run, lambda b, x, w, c: b.layer_norm(x, w, c, 1e-5), constant, np.ones(16), bias)
    np.testing.assert_array_equal(y[0], bias.astype(np.float32))
    for scale in (1e-20, 1e18):
        x = scale * np.linspace(-1, 1, 16)[None]
        for y in (apply(run, lambda b, x, w: b.rms_norm(x, w, 1e-5), x, np.ones(16)),
                  apply(run, lambda b, x, w, c: b.layer_norm(x, w, c, 1e-5), x, np.ones(16),
                        np.zeros(16))):
            assert np.isfinite(y).all() and np.abs(y).max() < 4


@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "sigmoid", "erf", "relu"])
def test_activations_and_slopes_at_the_far_ends(run, activation, dtype):
    x = np.array([s * v for v in (10, 20, 50, 1e4, 1e12, 1e25, 3e38) for s in (1.0, -1.0)])
    with Builder("f") as b:
        value = b.input("x", dtype, x.shape)
        function = b.function({"y": getattr(b, activation)(value)})
    gradient = value_and_grad(function, ["x"], seed=True)
    result = run(gradient, {"x": x.astype(dtype.numpy), "seed": np.ones_like(x)})
    y, slope = (np.asarray(result[name], np.float64) for name in ("y", "grad.x"))
    rounded = x.astype(dtype.numpy).astype(np.float64)
    kind = {"gelu": "ramp", "silu": "ramp", "relu": "ramp", "sigmoid": "step"}.get(activation)
    expected = {"ramp": np.maximum(rounded, 0), "step": rounded > 0}.get(kind, np.sign(rounded))
    # silu(-10) is -4.5e-4, and its slope there the same.
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=5e-4)
    np.testing.assert_allclose(slope, rounded > 0 if kind == "ramp" else 0.0, atol=5e-4)


@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_activations_of_infinity(run, dtype):
    """0 x infinity is NaN, so an infinite input shows; what is infinite rightly stays so."""
    x = np.array([INF, -INF] * 9)  # a vector and a tail
    for activation, slopes in (("gelu", [1, 0]), ("silu", [NAN, NAN])):
        with Builder("f") as b:
            function = b.function({"y": getattr(b, activation)(b.input("x", dtype, x.shape))})
        result = run(value_and_grad(function, ["x"], seed=True),
                     {"x": x.astype(dtype.numpy), "seed": np.ones_like(x)})
        np.testing.assert_array_equal(np.asarray(result["y"], np.float64), [INF, NAN] * 9)
        np.testing.assert_array_equal(np.asarray(result["grad.x"], np.float64), slopes * 9)


@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_and_their_gradients_at_the_ends_of_the_range(run, norm, dtype):
    """Constant rows, and rows so small or large that their squares leave the type's range."""
    ramp = np.linspace(-1, 1, 16)
    x = np.stack([np.full(16, 1234.0), np.zeros(16), 1e-20 * ramp, 1e18 * ramp, 1e4 + ramp])
    with Builder("f") as b:
        value = b.input("x", dtype, x.shape)
        weight, bias = (b.input(name, dtype, (16,)) for name in "wc")
        y = (b.layer_norm(value, weight, bias, 1e-5) if norm == "layer" else
             b.rms_norm(value, weight, 1e-5))
        function = b.function({"y": y})
    wrt = ["x", "w", "c"] if norm == "layer" else ["x", "w"]
    inputs = {"x": x, "w": np.ones(16), "c": ramp, "seed": np.cos(np.arange(80)).reshape(5, 16)}
    gradient = value_and_grad(function, wrt, seed=True)
    names = {v.name for v in gradient.inputs}
    result = run(gradient, {name: np.asarray(array).astype(dtype.numpy)
                            for name, array in inputs.items() if name in names})
    for name, array in result.items():
        assert np.isfinite(np.asarray(array, np.float64)).all(), name
    y = np.asarray(result["y"], np.float64)
    rounded_ramp = ramp.astype(dtype.numpy).astype(np.float64)
    expected = rounded_ramp if norm == "layer" else 0.0
    np.testing.assert_array_equal(y[1], expected)
    if norm == "layer":
        np.testing.assert_array_equal(y[0], expected)
    assert np.abs(y).max() < 4


@every_runner
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_softmax_of_large_numbers(run, dtype):
    x = np.array([[1e4, -1e4, 0], [-1e4, -1e4, -2e4], [3e38, 3e38, -3e38], [-INF, 0, 0]])
    y = apply(run, lambda b, x: b.softmax(x), x, dtype=dtype)
    np.testing.assert_array_equal(np.asarray(y, np.float64),
                                  [[1, 0, 0], [.5, .5, 0], [.5, .5, 0], [0, .5, .5]])
    loss = apply(run, lambda b, x, t: b.cross_entropy(x, t), x[:2], dtype=dtype,
                 extra=[np.array([[1], [0]], np.int32)])
    np.testing.assert_allclose(loss[:, 0], [np.diff(x[0].astype(dtype.numpy).astype(float))[0] * -1,
                                            math.log(2)], rtol=1e-6)


@every_runner
def test_cross_entropy_without_targets_and_of_padding(run):
    """Rows without a target give no loss and no gradient, whatever their logits; padded columns
    take no part and get no gradient."""
    logits = np.array([[1.0, 2.0, 0.5, 1e30], [NAN, INF, 1.0, NAN], [0.0, 0.0, 0.0, NAN]])
    target = np.array([[1], [-1], [2]], np.int32)
    with Builder("f") as b:
        x, t = b.input("x", F32, (3, 4)), b.input("t", I32, (3, 1))
        losses = b.cross_entropy(x, t, vocabulary=3)
        function = b.function({"loss": b.sum(losses), "losses": losses})
    result = run(value_and_grad(function, ["x"]), {"x": logits, "t": target})
    e = np.exp([1.0, 2.0, 0.5])
    np.testing.assert_allclose(result["losses"][:, 0], [math.log(e.sum()) - 2.0, 0, math.log(3)],
                               rtol=1e-6)
    np.testing.assert_allclose(
        result["grad.x"], [[*(e / e.sum() - [0, 1, 0]), 0], [0] * 4, [1 / 3, 1 / 3, -2 / 3, 0]],
        rtol=1e-5, atol=1e-7)


# The optimizer's guard

def adamw_step(run, gradient, steps=0, limit=INF, decay=0.1, rate=0.1):
    """New p, m, v and the norm after one step from p = 1, m = 0.5, v = 0.25."""
    shape = np.shape(gradient)
    with Builder("step") as b:
        p, g, m, v = (b.input(name, F32, shape) for name in "pgmv")
        scalars = [b.input("rate", F32, ()), b.input("steps", I32, ()), b.input("limit", F32, ())]
        norm = b.global_norm([g])
        new = b.apply(ops.AdamW((decay,)), p, g, m, v, *scalars[:2], norm, scalars[2])
        function = b.function({"norm": norm, **dict(zip("pmv", new, strict=True))})
    return run(function, {
        "p": np.ones(shape), "g": np.array(gradient), "m": np.full(shape, 0.5),
        "v": np.full(shape, 0.25), "rate": np.array(rate), "steps": np.array(steps),
        "limit": np.array(limit)})


@every_runner
@pytest.mark.parametrize("gradient, limit", [([1.0, NAN], INF), ([INF, 1.0], INF),
                                             ([-INF, INF], INF), ([3.0, 4.0], 4.9)])
def test_adamw_keeps_the_old_values_to_the_bit(run, gradient, limit):
    result = adamw_step(run, gradient, limit=limit)
    for name, old in (("p", 1.0), ("m", 0.5), ("v", 0.25)):
        np.testing.assert_array_equal(result[name], np.full(2, old, np.float32))


@every_runner
def test_adamw_clips_huge_gradients_to_norm_one(run):
    """Their squares overflow f32; the norm must not."""
    result = adamw_step(run, [3e20, 4e20])
    assert result["norm"] == pytest.approx(5e20, rel=1e-6)
    np.testing.assert_allclose(result["m"], 0.9 * 0.5 + 0.1 * np.array([0.6, 0.8]), rtol=1e-6)
    np.testing.assert_allclose(result["v"], 0.95 * 0.25 + 0.05 * np.array([0.36, 0.64]), rtol=1e-6)


@every_runner
def test_adamw_against_the_formula(run):
    """Ten steps' bias correction, a gradient near eps, and decay alone for a gradient of zero."""
    for gradient in (np.array([0.3, -0.2]), np.array([1e-9, 0.0])):
        m, v = 0.9 * 0.5 + 0.1 * gradient, 0.95 * 0.25 + 0.05 * gradient**2
        direction = (m / (1 - 0.9**11)) / (np.sqrt(v / (1 - 0.95**11)) + 1e-8)
        result = adamw_step(run, gradient, steps=10)
        np.testing.assert_allclose(result["p"], 0.99 - 0.1 * direction, rtol=1e-6)
    still = adamw_step(run, [0.0, 0.0], rate=0.0)
    np.testing.assert_array_equal(still["p"], np.ones(2, np.float32))
    assert still["norm"] == 0.0
