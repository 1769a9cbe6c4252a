"""check_op finds each kind of fault it is there to find."""

import numpy as np
import pytest

from euler_ir import interpreter, ops
from euler_ir.builder import IRError
from euler_ir.errors import EulerError
from euler_ir.op import Op, Pointwise, Row
from euler_ir.types import BF16, F32, TensorType
from runtime.testing import applied, check_close, check_function, check_op, sample


class Cube(Pointwise):
    """y = x³, as a user would write it; `fault` breaks one thing."""
    name = "test_cube_with_faults"
    fault: str = ""

    def scalar(self, x):
        return x * x * x

    def infer(self, *operands):
        (result,) = super().infer(*operands)
        if self.fault == "shape":
            return (result.with_shape((*result.shape[:-1], result.shape[-1] + 1)),)
        if self.fault == "type":
            return (result.with_dtype(F32),)
        return (result, result) if self.fault == "count" else (result,)

    def backward(self, b, node, grads):
        (x,), (g,) = node.inputs, grads
        if self.fault == "nothing":
            return [None]
        return [g * (3.001 if self.fault == "slope" else 3.0) * x * x]


@pytest.mark.parametrize("shape", [(3,), (9, 9), ()])
def test_a_right_op_passes(shape):
    check_op(Cube(), shape)
    check_op(Cube(), shape, dtype=BF16)


@pytest.mark.parametrize("shape", [(3,), (9, 9)])
@pytest.mark.parametrize("fault, message", [
    ("shape", "is inferred f64"), ("type", "result 0 is inferred f32.* and computed f64"),
    ("count", "infers 2 results, computes 1"),
    ("slope", "gradient of operand x0 .* by central differences"),
    ("nothing", "gradient of operand x0 .* by central differences")])
def test_faults_of_the_class_are_found(fault, message, shape):
    with pytest.raises(AssertionError, match=message):
        check_op(Cube(fault), shape, backends=())


def test_a_missing_rule_is_found_and_may_be_left_out():
    class Bare(Row):
        """y = x - max x, without a backward rule"""
        name = "test_bare"

        def row(self, row, x):
            return x - row.max(x)

    with pytest.raises(IRError, match="test_bare: no gradient through .* it has no backward rule"):
        check_op(Bare(), (2, 3))
    check_op(Bare(), (2, 3), gradient=False)


def test_an_op_that_prints_as_another_is_found():
    class Forgetful(Pointwise):
        """y = x, with an attribute that its text rounds"""
        name = "test_forgetful"
        rate: float

        def scalar(self, x):
            return x

        def attributes(self):
            return {"rate": round(self.rate, 2)}

    with pytest.raises(AssertionError, match="test_forgetful"):
        check_op(Forgetful(0.12345), (2,), backends=(), gradient=False)
    check_op(Forgetful(0.5), (2,), backends=(), gradient=False)


class WrongBackend:
    """The reference backend with an error of some units in the last place of the largest result."""

    def __init__(self, units):
        from backends.reference.backend import ReferenceBackend
        self._reference, self._units = ReferenceBackend(), units

    def __getattr__(self, name):
        return getattr(self._reference, name)

    def link(self, plan, bound=None):
        program, units = self._reference.link(plan, bound), self._units

        class Program:
            def run(self, inputs):
                results = program.run(inputs)
                return {name: array + units * np.finfo(np.float32).eps * np.abs(array).max()
                        for name, array in results.items()}

        return Program()


def test_a_backends_error_is_held_to_the_typed_interpreters():
    function = applied(Cube(), [TensorType(F32, (64,))])
    inputs = {"x0": sample([(64,)])[0]}
    check_function(function, inputs, WrongBackend(0))
    check_function(function, inputs, WrongBackend(2))
    with pytest.raises(AssertionError, match="output y0 is off by .* the typed interpreter by"):
        check_function(function, inputs, WrongBackend(16))


@pytest.mark.parametrize("found, message", [
    (np.array([1, np.nan, 3], np.float32), "NaN or infinities in other places"),
    (np.array([1, 2, np.inf], np.float32), "NaN or infinities in other places"),
    (np.array([1, 2, 3], np.float64), r"is f32\[3\], found float64\[3\]"),
    (np.array([1, 2], np.float32), r"is f32\[3\], found float32\[2\]")])
def test_close_looks_at_types_and_special_values(found, message):
    right = np.array([1, 2, 3], np.float32)
    check_close("y", right, right, right.astype(np.float64), TensorType(F32, (3,)))
    with pytest.raises(AssertionError, match=message):
        check_close("y", found, right, right.astype(np.float64), TensorType(F32, (3,)))


def test_samples_are_the_same_at_every_call():
    for first, second in zip(sample([(3,), (2, 2)]), sample([(3,), (2, 2)]), strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_op_with_numpy_for_its_meaning():
    class CumulativeSum(Op):
        """y_i = Σ_{j ≤ i} x_j along the last axis"""
        name = "test_cumulative_sum"
        reverse: bool = False

        def infer(self, *operands):
            return operands

        def evaluate(self, x):
            return (np.flip(np.cumsum(np.flip(x, -1), -1), -1) if self.reverse
                    else np.cumsum(x, -1, dtype=x.dtype),)

        def backward(self, b, node, grads):
            return [b.apply(CumulativeSum(not self.reverse), grads[0])]

    check_op(CumulativeSum(), (3, 4), backends=("reference",))
    x = sample([(3, 4)])[0]
    np.testing.assert_allclose(interpreter.run(applied(CumulativeSum(), [TensorType(F32, (3, 4))]),
                                               {"x0": x})["y0"], np.cumsum(x, -1), rtol=1e-5)


def test_wrong_operands_are_reported_at_the_line_that_checks():
    with pytest.raises(EulerError, match=r"operands of one shape, .* \(test_testing.py:\d+\)"):
        check_op(ops.Add(), (2, 3), (3, 2))
