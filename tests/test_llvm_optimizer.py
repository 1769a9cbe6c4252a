"""The optimizer's kernels: many tensors in one launch."""

import numpy as np
import pytest

from euler_ir import interpreter, ops
from euler_ir.builder import Builder
from euler_ir.types import BF16, F32, F64, I32
from runtime.compiler.driver import link_function, to_buffers
from runtime.testing import check_close
from tests.llvm_backends import backend, run_with_threads

#: Less than a vector, odd sizes, several tiles, nothing.
SHAPES = [(33, 65), (7,), (300, 201), (1,), (0, 4), (16, 1024)]
WIDTHS = ["host", "wide", "neon"]


def step(dtype=F32, shapes=SHAPES, donate=False):
    """Global norm and update of tensors p0, p1, … as a training step has them."""
    with Builder("update") as b:
        groups = {name: [b.input(f"{name}{i}", dtype, shape) for i, shape in enumerate(shapes)]
                  for name in "pgmv"}
        scalars = [b.input("rate", dtype, ()), b.input("step", I32, ())]
        limit = b.input("limit", dtype, ())
        norm = b.global_norm(groups["g"])
        op = ops.AdamW(tuple(0.1 * (i % 2) for i in range(len(shapes))))
        results = b.apply(op, *(x for group in groups.values() for x in group), *scalars, norm,
                          limit)
        names = [f"{name}{i}" for name in "pmv" for i in range(len(shapes))]
        outputs = {f"{name}.new": value for name, value in zip(names, results, strict=True)}
        donations = {name: f"{name}.new" for name in names} if donate else {}
        return b.function({**outputs, "norm": norm}, donations)


def inputs_of(function, limit=np.inf, steps=3, scale=1.0):
    rng = np.random.default_rng(0)
    inputs = {}
    for value in function.inputs:
        array = rng.standard_normal(value.shape)
        if value.name[0] == "g":
            array *= scale
        inputs[value.name] = np.asarray(np.abs(array) if value.name[0] == "v" else array).astype(
            value.dtype.numpy)
    scalars = {"rate": 1e-2, "step": steps, "limit": limit}
    return inputs | {name: np.array(value, inputs[name].dtype) for name, value in scalars.items()}


def check(function, inputs, target="host"):
    typed, exact = (interpreter.run(function, inputs, precise=p) for p in (False, True))
    found = run_with_threads(function, inputs, target)
    for name, value in zip(function.output_names, function.outputs, strict=True):
        check_close(name, found[name], typed[name], exact[name], value.type)


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_a_step_of_many_tensors(dtype, target):
    f = step(dtype)
    check(f, inputs_of(f), target)


@pytest.mark.parametrize("steps", [0, 1, 1_000_000])
def test_bias_correction_at_any_step(steps):
    f = step()
    check(f, inputs_of(f, steps=steps))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_gradient_changes_nothing(bad):
    f = step()
    inputs = inputs_of(f)
    inputs["g2"][299, 200] = bad
    found = run_with_threads(f, inputs)
    assert not np.isfinite(found.pop("norm"))
    for name, array in found.items():
        assert array.tobytes() == inputs[name.removesuffix(".new")].tobytes()


def test_a_norm_over_the_limit_changes_nothing():
    f = step()
    inputs = inputs_of(f, limit=10.0)
    found = run_with_threads(f, inputs)
    assert found.pop("norm") > 10.0
    for name, array in found.items():
        assert array.tobytes() == inputs[name.removesuffix(".new")].tobytes()


def test_updates_happen_in_bound_memory():
    f = step(donate=True)
    inputs = inputs_of(f)
    expected = interpreter.run(f, inputs)
    bound = to_buffers({name: inputs.pop(name) for name in f.donations}, backend("host", 2))
    program = link_function(f, backend("host", 2), bound)
    assert not program.plan.copies
    assert set(program.run(inputs)) == {"norm"}
    for name, buffer in bound.items():
        np.testing.assert_allclose(buffer.read(), expected[f"{name}.new"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_the_norm_of_large_numbers_is_finite(dtype):
    """Squares of 3·10³⁷ overflow f32."""
    with Builder("norm") as b:
        x = b.input("x", dtype, (4099,))
        f = b.function({"norm": b.global_norm([x])})
    check(f, {"x": np.full(4099, 3e37 if dtype is F32 else 2.5, dtype.numpy)})


def test_the_norm_of_nothing_is_zero():
    with Builder("norm") as b:
        f = b.function({"norm": b.global_norm([b.input("x", F32, (0, 3))])})
    assert run_with_threads(f, {"x": np.zeros((0, 3), np.float32)})["norm"] == 0.0
