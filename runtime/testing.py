"""Checks that an op, a user's own too, is what its class says: `check_op(Cube(), (3, 5))`.

    inference    `infer` agrees with the shapes and types that the meaning gives
    text         the op prints, and what it prints parses to the same op
    gradient     the backward rule agrees with central differences in f64
    backends     compiled results are as near to the f64 meaning as the typed meaning is

The last rule: a result's largest error against f64 is at most twice that of the interpreter run as
typed, plus a floor of `FLOOR` units in the last place of the result's largest element. The typed
interpreter makes the rounding errors that the types bring with them, so no tolerance has to be
guessed for an op, a size or a type.

A failed check raises AssertionError, with the op and the operand or result concerned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from backends.backend import Backend, create
from euler_ir import interpreter
from euler_ir.autodiff import backpropagate
from euler_ir.builder import Builder, calling_line
from euler_ir.graph import Function, Value
from euler_ir.op import Op, Pointwise, result_types
from euler_ir.text import parse_function, print_function
from euler_ir.types import F32, F64, DType, TensorType
from euler_ir.verify import verify
from runtime.compiler.driver import run_function

#: Units in the last place, of a result's largest element, that any kernel may be off.
FLOOR = 4
#: Step and relative tolerance of central differences in f64: their own error is about 1e-10.
STEP, TOLERANCE = 1e-5, 1e-6
#: Up to so many float elements in all operands each is moved on its own, beyond that together.
_EACH_ELEMENT = 64
_DIRECTIONS = 8

Operand = tuple[int, ...] | np.ndarray


def check_op(op: Op, *operands: Operand, backends: Sequence[str | Backend] = ("reference", "llvm"),
             dtype: DType = F32, gradient: bool = True, wrt: Sequence[int] | None = None,
             results: Sequence[int] | None = None) -> None:
    """Run all checks on `op`. An operand is an array, or a shape that is filled with standard
    normal numbers (the same ones at every call). Float operands are used as `dtype`, and as f64.

    `gradient=False` leaves the backward rule out (for ops that have none). `wrt` are the operands
    whose gradients are checked and `results` the results that they flow back from, by default all
    of a float type."""
    arrays = sample(operands)
    check_text(op, arrays, dtype)  # first: its errors name operands and line
    for checked in dict.fromkeys((F64, dtype)):
        check_inference(op, arrays, checked)
    if gradient:
        check_gradient(op, arrays, wrt, results)
    for backend in backends:
        check_meaning(op, arrays, backend, dtype, gradient, wrt, results)


def sample(operands: Sequence[Operand], seed: int = 0) -> list[np.ndarray]:
    """Arrays as they are, and standard normal numbers where a shape is given."""
    rng = np.random.default_rng(seed)
    return [x if isinstance(x, np.ndarray) else rng.standard_normal(x) for x in operands]


def operand_types(arrays: Sequence[np.ndarray], dtype: DType) -> list[TensorType]:
    """The arrays' types, with `dtype` in the place of every float type."""
    types = [TensorType(DType.from_numpy(array.dtype), array.shape) for array in arrays]
    return [t.with_dtype(dtype) if t.dtype.is_float else t for t in types]


def applied(op: Op, types: Sequence[TensorType]) -> Function:
    """y0, y1, … = op(x0, x1, …)"""
    with Builder(op.name) as b:
        return b.function(_outputs(_apply(b, op, types)[1]))


def differentiated(op: Op, types: Sequence[TensorType], wrt: Sequence[int] | None = None,
                   results: Sequence[int] | None = None) -> Function:
    """As `applied`, with outputs dx_i for the operands i in `wrt`: the gradients of Σ g_k · y_k
    over the results k in `results`, where the g_k are further inputs."""
    with Builder(op.name + "_vjp") as b:
        operands, outputs = _apply(b, op, types)
        results = _floats(outputs) if results is None else results
        seeds = {outputs[k]: b.input(f"g{k}", outputs[k].dtype, outputs[k].shape)
                 for k in results}
        wanted = {i: operands[i] for i in (_floats(operands) if wrt is None else wrt)}
        gradients = backpropagate(b, seeds, set(wanted.values()))
        named = _outputs(outputs)
        for i, x in wanted.items():
            gradient = gradients.get(x)
            named[f"dx{i}"] = b.full(0.0, x.dtype, x.shape) if gradient is None else gradient
        return b.function(named)


def _apply(b: Builder, op: Op, types: Sequence[TensorType]) -> tuple[list[Value], list[Value]]:
    operands = [b.input(f"x{i}", t.dtype, t.shape) for i, t in enumerate(types)]
    b.source = calling_line(beside=__file__)  # an error is about the line that checks the op
    b.apply(op, *operands)
    b.source = None
    return operands, list(b.nodes[-1].outputs)


def _floats(values: Sequence[Value]) -> list[int]:
    return [i for i, value in enumerate(values) if value.dtype.is_float]


def _outputs(values: Sequence[Value]) -> dict[str, Value]:
    return {f"y{k}": value for k, value in enumerate(values)}


def _inputs(function: Function, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as x0, x1, …, and standard normal numbers for the other inputs."""
    seeds = function.inputs[len(arrays):]
    values = [*arrays, *sample([value.shape for value in seeds], seed=1)]
    return {value.name: array.astype(value.dtype.numpy)
            for value, array in zip(function.inputs, values, strict=True)}


def check_inference(op: Op, arrays: Sequence[np.ndarray], dtype: DType) -> None:
    """`infer` against the shapes and compute types of what `evaluate` gives."""
    types = operand_types(arrays, dtype)
    with np.errstate(over="ignore"):
        operands = [array.astype(t.dtype.compute.numpy)
                    for array, t in zip(arrays, types, strict=True)]
    computed, inferred = op.evaluate(*operands), result_types(op, types)
    assert len(computed) == len(inferred), (
        f"{op}: infers {len(inferred)} results, computes {len(computed)}")
    for k, (array, expected) in enumerate(zip(computed, inferred, strict=True)):
        # A pointwise op of constants gives one element: the interpreter broadcasts.
        shape_right = array.shape == expected.shape or (isinstance(op, Pointwise)
                                                        and array.shape == ())
        found = DType.from_numpy(array.dtype)
        assert shape_right and found is expected.dtype.compute, (
            f"{op}: result {k} is inferred {expected} and computed {found}{list(array.shape)}")


def check_text(op: Op, arrays: Sequence[np.ndarray], dtype: DType) -> None:
    """parse(print(f)) == f for the function that applies the op, which the verifier accepts."""
    function = verify(applied(op, operand_types(arrays, dtype)))
    text = print_function(function)
    parsed = parse_function(text)
    assert parsed == function and print_function(parsed) == text, f"{op}: prints as\n{text}"


def check_gradient(op: Op, arrays: Sequence[np.ndarray], wrt: Sequence[int] | None = None,
                   results: Sequence[int] | None = None) -> None:
    """The backward rule against central differences, in f64."""
    function = verify(differentiated(op, operand_types(arrays, F64), wrt, results))
    inputs = _inputs(function, arrays)
    outputs = interpreter.run(function, inputs, precise=True)
    forward = applied(op, operand_types(arrays, F64))
    seeds = {f"y{name[1:]}": array for name, array in inputs.items() if name.startswith("g")}

    def objective(moved: Mapping[str, np.ndarray]) -> float:
        y = interpreter.run(forward, {**inputs, **moved}, precise=True)
        return sum(float(np.sum(seed * y[name])) for name, seed in seeds.items())

    def slope(direction: Mapping[str, np.ndarray]) -> float:
        up = objective({name: inputs[name] + STEP * d for name, d in direction.items()})
        down = objective({name: inputs[name] - STEP * d for name, d in direction.items()})
        return (up - down) / (2 * STEP)

    gradients = {name[1:]: array for name, array in outputs.items() if name.startswith("dx")}
    allowed = 1e-9 * max(1.0, abs(objective({})))
    if sum(g.size for g in gradients.values()) <= _EACH_ELEMENT:
        _compare_elements(op, gradients, slope, allowed)
    else:
        _compare_directions(op, gradients, slope, allowed)


def _compare_elements(op: Op, gradients: Mapping[str, np.ndarray], slope, allowed: float) -> None:
    for name, analytic in gradients.items():
        tolerance = TOLERANCE * np.max(np.abs(analytic), initial=0.0) + allowed
        for place in np.ndindex(analytic.shape):
            direction = np.zeros(analytic.shape)
            direction[place] = 1.0
            numeric = slope({name: direction})
            assert abs(analytic[place] - numeric) <= tolerance, (
                f"{op}: the gradient of operand {name} at {list(place)} is {analytic[place]:.9g}, "
                f"by central differences {numeric:.9g}")


def _compare_directions(op: Op, gradients: Mapping[str, np.ndarray], slope,
                        allowed: float) -> None:
    rng = np.random.default_rng(2)
    for name, analytic in gradients.items():
        tolerance = TOLERANCE * np.linalg.norm(analytic) + allowed
        for _ in range(_DIRECTIONS):
            direction = rng.standard_normal(analytic.shape)
            expected, numeric = np.sum(analytic * direction), slope({name: direction})
            assert abs(expected - numeric) <= tolerance, (
                f"{op}: along a random direction the gradient of operand {name} is "
                f"{expected:.9g}, by central differences {numeric:.9g}")


def check_meaning(op: Op, arrays: Sequence[np.ndarray], backend: str | Backend,
                  dtype: DType = F32, gradient: bool = True, wrt: Sequence[int] | None = None,
                  results: Sequence[int] | None = None) -> None:
    """The op, and its backward rule where `gradient` says so, on a backend."""
    types = operand_types(arrays, dtype)
    function = differentiated(op, types, wrt, results) if gradient else applied(op, types)
    check_function(function, _inputs(function, arrays), backend)


def check_function(function: Function, inputs: Mapping[str, np.ndarray],
                   backend: str | Backend) -> None:
    """A function's outputs on a backend against its meaning in f64, by the rule above."""
    exact = interpreter.run(function, inputs, precise=True)
    typed = interpreter.run(function, inputs)
    found = run_function(function, inputs, create(backend) if isinstance(backend, str) else backend)
    for name, value in zip(function.output_names, function.outputs, strict=True):
        check_close(f"@{function.name}: output {name}", found[name], typed[name], exact[name],
                    value.type)


def check_close(what: str, found: np.ndarray, typed: np.ndarray, exact: np.ndarray,
                expected: TensorType) -> None:
    """One result against the f64 meaning `exact` and the interpreter's result as typed: integers
    equal, NaN and infinities in the same places, and finite numbers as near as the rule says."""
    assert found.shape == expected.shape and found.dtype == expected.dtype.numpy, (
        f"{what} is {expected}, found {found.dtype}{list(found.shape)}")
    if not expected.dtype.is_float:
        assert np.array_equal(found, typed), f"{what} differs: {found} where {typed} is right"
        return
    found, typed = found.astype(np.float64), typed.astype(np.float64)
    special = ~np.isfinite(typed)
    assert np.array_equal(found[special], typed[special], equal_nan=True) and np.array_equal(
        special, ~np.isfinite(found)), f"{what} has NaN or infinities in other places"
    with np.errstate(invalid="ignore"):
        error, yardstick = _largest(found - exact, ~special), _largest(typed - exact, ~special)
    unit = float(ml_dtypes.finfo(expected.dtype.numpy).eps) * _largest(exact, ~special)
    assert error <= 2 * yardstick + FLOOR * unit, (
        f"{what} is off by {error:.3g}, the typed interpreter by {yardstick:.3g}; "
        f"allowed twice that and {FLOOR * unit:.3g}")


def _largest(array: np.ndarray, where: np.ndarray) -> float:
    return float(np.max(np.abs(array), where=where, initial=0.0))
