"""The interpreter's own rules: rounding to declared types, precise runs, inputs, composites."""

import ml_dtypes
import numpy as np
import pytest

from euler_ir import interpreter, ops
from euler_ir.builder import Builder
from euler_ir.errors import EulerError
from euler_ir.op import Composite
from euler_ir.types import BF16, BOOL, F32, F64, I32, U32, TensorType
from tests.op_cases import attention_operands


def test_every_result_is_rounded_to_its_declared_type():
    with Builder("f") as b:
        x = b.input("x", BF16, (3,))
        y = x * x
        function = b.function({"y": y, "z": b.cast(y, F32) + 1.0})
    x = np.array([1.01, 3.3, -0.007]).astype(ml_dtypes.bfloat16)
    squared = (x.astype(np.float32) ** 2).astype(ml_dtypes.bfloat16)
    result = interpreter.run(function, {"x": x})
    assert result["y"].dtype == ml_dtypes.bfloat16 and result["z"].dtype == np.float32
    np.testing.assert_array_equal(result["y"], squared)
    np.testing.assert_array_equal(result["z"], squared.astype(np.float32) + np.float32(1))


def test_a_precise_run_rounds_nowhere():
    with Builder("f") as b:
        x = b.input("x", BF16, (3,))
        y = b.cast(b.cast(x, F32) * (1.0 / 3.0), BF16)
        i = b.cast(b.cast(y, F32) * 100.0, I32)
        function = b.function({"y": b.softmax(y), "i": i})
    x = np.array([0.123456789, 1.1, -2.7])
    result = interpreter.run(function, {"x": x}, precise=True)
    third = x * float(np.float32(1 / 3))  # a constant is what its type holds
    e = np.exp(third - third.max())
    assert result["y"].dtype == np.float64 and result["i"].dtype == np.int32
    np.testing.assert_allclose(result["y"], e / e.sum(), rtol=1e-14)
    np.testing.assert_array_equal(result["i"], (third * 100).astype(np.int32))


def test_composites_compute_wide_and_round_once():
    """bf16 attention keeps scores and weights in f32: only its results are bf16."""
    op = ops.Attention(0.7)
    operands = [a.astype(ml_dtypes.bfloat16) if a.dtype == np.float64 else a
                for a in attention_operands()]
    with Builder("f") as b:
        values = [b.input(f"x{i}", BF16 if a.dtype == ml_dtypes.bfloat16 else I32, a.shape)
                  for i, a in enumerate(operands)]
        o, log_sum = b.apply(op, *values)
        function = b.function({"o": o, "log_sum": log_sum})
    inputs = {f"x{i}": a for i, a in enumerate(operands)}
    typed, exact = interpreter.run(function, inputs), interpreter.run(function, inputs, True)
    assert typed["log_sum"].dtype == np.float32
    np.testing.assert_allclose(typed["log_sum"], exact["log_sum"], atol=1e-6)
    rounded = exact["o"].astype(ml_dtypes.bfloat16)
    assert np.mean(typed["o"] == rounded) > 0.95


def test_a_users_composite():
    class Distance(Composite):
        """y = √(Σ (a - b)²) along the last axis"""
        name = "test_distance"

        def decompose(self, b, x, y):
            difference = x - y
            return b.sqrt(b.reduce_sum(difference * difference, (len(x.shape) - 1,)))

    with Builder("f") as b:
        x, y = b.input("x", F32, (2, 2)), b.input("y", F32, (2, 2))
        distance = b.apply(Distance(), x, y)
        function = b.function({"d": distance})
    assert distance.type == TensorType(F32, (2,))
    result = interpreter.run(function, {"x": [[3, 0], [0, 0]], "y": [[0, 4], [0, 2]]})
    assert result["d"].tolist() == [5.0, 2.0]


def test_fused_bodies_mean_what_their_nodes_mean():
    def body(b, x, w):
        return b.softmax(b.cast(x, F32) * w)

    with Builder("body") as b:
        x, w = b.input("x", BF16, (2, 3)), b.input("w", F32, (2, 3))
        fused = ops.Fused("row", b.function({"y": body(b, x, w)}))
    with Builder("f") as b:
        x, w = b.input("x", BF16, (2, 3)), b.input("w", F32, (2, 3))
        function = b.function({"fused": b.apply(fused, x, w), "apart": body(b, x, w)})
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((2, 3)), "w": rng.standard_normal((2, 3))}
    for precise in (False, True):
        result = interpreter.run(function, inputs, precise)
        np.testing.assert_array_equal(result["fused"], result["apart"])
        assert result["fused"].dtype == (np.float64 if precise else np.float32)


def test_results_are_the_callers_own():
    with Builder("f") as b:
        x = b.input("x", F32, (4,))
        y = b.reshape(x, (2, 2))
        function = b.function({"x": x, "y": y, "again": y})
    given = np.ones(4, np.float32)
    result = interpreter.run(function, {"x": given})
    result["y"][0, 0] = 7.0
    assert given.tolist() == [1] * 4 and result["x"].tolist() == [1] * 4
    assert result["again"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("dtype, given", [
    (I32, np.array([1.0, 2.0])), (I32, np.array([2**40, 0])), (BOOL, np.array([0, 2])),
    (U32, np.array([-1, 0])), (F32, np.array([1j, 0])), (F32, np.array(["1", "2"])),
])
def test_numbers_that_an_input_does_not_hold_are_refused(dtype, given):
    with Builder("f") as b:
        function = b.function({"y": b.input("x", dtype, (2,))})
    with pytest.raises(EulerError, match=rf"input %x: {dtype}\[2\] was given "):
        interpreter.run(function, {"x": given})


@pytest.mark.parametrize("dtype, given", [
    (I32, np.array([-1, 2])), (I32, np.array([True, False])), (BOOL, np.array([0, 1])),
    (F32, np.array([0.1, 3.3])), (F32, np.array([3, 4])), (U32, np.array([7, 2**32 - 1])),
])
def test_numbers_of_other_types_are_taken_where_they_fit(dtype, given):
    with Builder("f") as b:
        function = b.function({"y": b.input("x", dtype, (2,))})
    found = interpreter.run(function, {"x": given})["y"]
    assert found.dtype == dtype.numpy
    np.testing.assert_array_equal(found, given.astype(dtype.numpy))


def test_inputs_are_checked():
    with Builder("f") as b:
        x = b.input("x", F32, (2, 3))
        flag = b.input("flag", BOOL, ())
        function = b.function({"x": x, "flag": flag})
    with pytest.raises(EulerError, match="input %flag is missing; given: x"):
        interpreter.run(function, {"x": np.zeros((2, 3))})
    with pytest.raises(EulerError, match=r"input %x: f32\[2,3\] was given .* shape \(3, 2\)"):
        interpreter.run(function, {"x": np.zeros((3, 2)), "flag": True})


def test_unknown_names_are_refused():
    with Builder("f") as b:
        function = b.function({"y": b.input("x", F64, ())})
    with pytest.raises(EulerError, match="@f has no input %z; its inputs are x"):
        function.input("z")
    with pytest.raises(EulerError, match="@f has no output x; its outputs are y"):
        function.output("x")
