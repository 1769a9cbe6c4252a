"""The backend as a whole: launch tables, memory, barriers, errors."""

import numpy as np
import pytest

from backends.backend import create
from backends.llvm.backend import LLVMBackend
from euler_ir import interpreter, ops
from euler_ir.builder import Builder
from euler_ir.errors import EulerError
from euler_ir.op import Composite
from euler_ir.types import BF16, F32, F64, I32
from runtime.compiler.driver import compile_function, link_function, to_buffers
from tests.llvm_backends import apply, backend, run_with_threads, sample


def test_kernels_that_do_not_depend_on_each_other_share_a_barrier():
    """Two products of inputs, then two of the products: one meeting between, one at the end."""
    def build(b, x, y):
        first, second = x * y, x + y
        return [b.transpose(first, (1, 0)), b.transpose(second, (1, 0))]

    f = apply(build, (F32, (8, 8)), (F32, (8, 8)))
    program = link_function(f, backend("host", 2), reuse=False)
    barriers = [launch.barrier_after for launch in program.launches]
    assert len(barriers) == 4 and barriers[:3] == [False, True, False]


def test_reused_memory_waits_for_its_readers():
    """With reuse a result lies where an operand of a kernel before it lay: a barrier more."""
    def build(b, x):
        for _ in range(40):
            x = b.transpose(b.transpose(x, (1, 0)) + 1.0, (1, 0)) * 0.5
        return x

    f = apply(build, (F32, (130, 70)))
    inputs = sample(f)
    found = run_with_threads(f, inputs)
    np.testing.assert_allclose(found["y0"], interpreter.run(f, inputs)["y0"], rtol=1e-6)


def test_inputs_are_copied_in_and_results_out():
    f = apply(lambda b, x: [x + 1.0, b.reshape(x, (6,))], (F32, (2, 3)))
    program = link_function(f, backend())
    given = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]  # not contiguous
    first = program.run({"x0": given})
    second = program.run({"x0": given + 1})
    np.testing.assert_array_equal(first["y0"], given + 1)
    np.testing.assert_array_equal(first["y1"], given.reshape(6))
    np.testing.assert_array_equal(second["y0"], given + 2)


def test_bound_memory_is_read_at_every_run():
    f = apply(lambda b, x, y: x * y, (F32, (5,)), (F32, (5,)))
    bound = to_buffers({"x1": np.ones(5, np.float32)}, backend())
    program = link_function(f, backend(), bound)
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(program.run({"x0": x})["y0"], x)
    bound["x1"].write(np.full(5, 3))
    np.testing.assert_array_equal(program.run({"x0": x})["y0"], 3 * x)


def test_times_of_kernels():
    f = apply(lambda b, x: b.matmul(b.softmax(x), x), (F32, (64, 64)))
    timed = LLVMBackend(2, timed=True, compiler=backend().compiler)
    program = compile_function(f, timed)
    program.run(sample(f))
    times = program.times()
    assert [node.op.name for node, _ in times] == ["softmax", "matmul"]
    assert all(0 < seconds < 10 for _, seconds in times)


def test_listings_of_a_kernel():
    f = apply(lambda b, x: b.exp(x), (F32, (64,)))
    (kernel,) = backend().lower(f)
    listing = backend().listing(kernel)
    assert "define" in listing["ll"] and ".globl" in listing["s"]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_matmul_s_epilogue_reads_its_operands_in_place(dtype):
    """Bias [N], one value a row, a table [T, 1, N] of positions, the product's own operand."""
    def build(b, x, w, bias, scale, table, residual):
        y = b.linear(x, w, bias) * scale + table
        return b.gelu(y) + residual + x

    f = apply(build, (dtype, (3, 5, 2, 33)), (dtype, (33, 33)), (dtype, (33,)),
              (dtype, (3, 5, 2, 1)), (dtype, (5, 1, 33)), (dtype, (3, 5, 2, 33)))
    inputs = sample(f)
    program = compile_function(f, backend("host", 2))
    assert len(program.plan.steps) == 1
    found = program.run(inputs)["y0"].astype(np.float64)
    exact = interpreter.run(f, inputs, precise=True)["y0"]
    np.testing.assert_allclose(found, exact, rtol=0.02 if dtype is BF16 else 1e-5,
                               atol=0.1 if dtype is BF16 else 1e-5)


def test_a_matmul_s_result_in_another_type():
    f = apply(lambda b, x, w: [b.cast(b.linear(x, w), F64), b.less(b.linear(x, w * 2.0), x)],
              (F32, (5, 7)), (F32, (7, 7)))
    inputs = sample(f)
    found = compile_function(f, backend()).run(inputs)
    exact = interpreter.run(f, inputs, precise=True)
    np.testing.assert_allclose(found["y0"], exact["y0"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["y1"], exact["y1"])


def test_a_matrix_times_itself():
    f = apply(lambda b, x: b.matmul(x, x) + x, (F32, (33, 33)))
    inputs = sample(f)
    found = compile_function(f, backend()).run(inputs)["y0"]
    np.testing.assert_allclose(found, interpreter.run(f, inputs, precise=True)["y0"], rtol=1e-5,
                               atol=1e-5)


def test_a_composite_without_a_kernel_is_named():
    class Doubled(Composite):
        def decompose(self, b, x):
            return x + x

    Doubled.name = "doubled"
    f = apply(lambda b, x: b.apply(Doubled(), x), (F32, (4,)))
    with pytest.raises(EulerError, match="no kernel for .*doubled.*decompose"):
        backend().lower(f)


def test_integers_are_not_multiplied_as_matrices():
    with Builder("bad") as b:
        x = b.input("x", I32, (2, 2))
        try:
            y = b.apply(ops.Matmul(), x, x)
        except EulerError:
            return  # refused where it is built
        f = b.function({"y": y})
    with pytest.raises(EulerError, match="floats"):
        backend().lower(f)


@pytest.mark.parametrize("name", ["llvm", "reference"])
def test_a_run_takes_no_input_that_is_bound_or_unknown(name):
    """It would be left unread: a bound input is where it is."""
    f = apply(lambda b, x, y: x * y, (F32, (2,)), (F32, (2,)))
    chosen = create(name)
    program = link_function(f, chosen, to_buffers({"x1": np.ones(2, np.float32)}, chosen))
    for other in ("x1", "x2"):
        with pytest.raises(EulerError, match=f"takes no input %{other} at a run; it takes x0"):
            program.run({"x0": np.ones(2), other: np.ones(2)})


def test_missing_and_misshapen_inputs_are_named():
    f = apply(lambda b, x: x + 1.0, (F32, (2, 3)))
    program = link_function(f, backend())
    with pytest.raises(EulerError, match="x0"):
        program.run({})
    with pytest.raises(EulerError, match=r"\(3, 2\)"):
        program.run({"x0": np.zeros((3, 2), np.float32)})
