"""The accuracy that vector_math.py states, and the ends of the range."""

import math

import numpy as np
import pytest

from backends.llvm import vector_math
from backends.llvm.backend import LLVMBackend
from backends.llvm.compiler import Compiler
from backends.llvm.target import Target
from euler_ir import scalar
from euler_ir.op import Pointwise
from euler_ir.types import F32, F64
from runtime.compiler.driver import run_function
from tests.llvm_backends import apply, backend

#: Units in the last place, as stated; the range where the function is not flat.
FUNCTIONS = {
    "exp": (1.02, (-104, 89)), "log": (0.87, (0.3, 3)), "tanh": (2.6, (-10, 10)),
    "erf": (1.41, (-4.2, 4.2)), "sin": (1.96, (-30, 30)), "cos": (1.96, (-30, 30)),
}  # fmt: skip
NUMPY = {"exp": np.exp, "log": np.log, "tanh": np.tanh, "erf": np.vectorize(math.erf),
         "sin": np.sin, "cos": np.cos}  # fmt: skip


class Unary(Pointwise):
    """A function of the scalar language by its name."""
    name = "test_unary"
    function: str

    def scalar(self, x):
        return scalar.unary(self.function, x)


@pytest.fixture(scope="module")
def without_fma():
    return LLVMBackend(1, compiler=Compiler(Target.host(
        "-fma" if Target.host().triple.startswith("x86_64") else "")))


def run(name, x, on=None, dtype=F32):
    f = apply(lambda b, x: b.apply(Unary(name), x), (dtype, x.shape))
    return run_function(f, {"x0": x}, on or backend())["y0"]


def sample(name):
    """Every 50021st f32, and 100000 numbers from where the function is not flat."""
    every = np.arange(0, 2**32, 50021, dtype=np.uint64).astype(np.uint32).view(np.float32)
    every = every[np.isfinite(every)]
    if name in ("sin", "cos"):
        every = every[np.abs(every) <= 1e6]
    dense = np.random.default_rng(0).uniform(*FUNCTIONS[name][1], 100_000).astype(np.float32)
    return np.concatenate([every, dense])


@pytest.mark.parametrize("fma", [True, False], ids=["fma", "no fma"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_in_units_in_the_last_place(name, fma, without_fma):
    x = sample(name)
    y = run(name, x, backend() if fma else without_fma)
    with np.errstate(all="ignore"):
        exact = NUMPY[name](x.astype(np.float64))
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    assert np.array_equal(y[~finite], rounded[~finite], equal_nan=True)
    unit = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    error = np.abs(y[finite] - exact[finite]) / unit
    worst = error.argmax()
    assert error[worst] <= FUNCTIONS[name][0], f"{name}({x[finite][worst]!r})"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ends_of_the_range(name):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 88.72283,
                  88.722845, -103.97, -103.98, -87.5], np.float32)
    with np.errstate(all="ignore"):
        right = NUMPY[name](x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(run(name, x), right, rtol=2e-6, atol=1.5e-45)


class FlushedExp(Pointwise):
    """The exponential that softmax weights are made with."""
    name = "test_flushed_exp"

    def scalar(self, x):
        return vector_math.flushed_exp(x)


def test_flushed_exp_is_exp_where_it_is_not_flushed():
    x = np.concatenate([np.random.default_rng(2).uniform(-87.3, 88.3, 100_000), [0.0, -87.33]])
    ends = np.array([-np.inf, -1e30, -104.0, -88.0, np.inf, 1e30, 89.0, np.nan], np.float32)
    x = np.concatenate([x.astype(np.float32), ends])
    f = apply(lambda b, x: b.apply(FlushedExp(), x), (F32, x.shape))
    y = run_function(f, {"x0": x}, backend())["y0"]
    inside, outside = slice(0, -len(ends)), slice(-len(ends), None)
    np.testing.assert_array_equal(y[inside], run("exp", x[inside]))
    np.testing.assert_array_equal(y[outside], [0.0] * 4 + [np.inf] * 3 + [np.nan])


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_zero_keeps_its_sign(name):
    zeros = np.array([0.0, -0.0], np.float32)
    assert run(name, zeros).tobytes() == zeros.tobytes()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_f64_is_as_good_as_the_c_library(name):
    x = np.random.default_rng(1).uniform(*FUNCTIONS[name][1], 67)
    np.testing.assert_allclose(run(name, x, dtype=F64), NUMPY[name](x), rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_polynomials_are_written_in_the_scalar_language(name):
    """They need no function of a library, and numpy gets the same from them."""
    x, y = vector_math.polynomial(name)
    assert not {expr.op for expr in scalar.topological([y])} & set(FUNCTIONS)
    array = np.linspace(*np.clip(FUNCTIONS[name][1], -80, 80), 1000, dtype=np.float32)
    (found,) = scalar.evaluate([y], [array])
    np.testing.assert_allclose(found, NUMPY[name](array.astype(np.float64)), rtol=4e-7, atol=2e-7)
