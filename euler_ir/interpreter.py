"""The interpreter: runs a function node by node with numpy. It is the meaning of the IR.

`run(f, inputs)` computes as typed: every result is rounded to its declared type. With
`precise=True` all floats are f64 throughout: the reference that kernels are measured against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from euler_ir.errors import EulerError
from euler_ir.graph import Function, Node, Value
from euler_ir.op import Composite
from euler_ir.ops.pointwise import Cast
from euler_ir.types import DType, TensorType


def run(function: Function, inputs: Mapping[str, np.ndarray],
        precise: bool = False) -> dict[str, np.ndarray]:
    """Outputs by name. Raises EulerError for missing inputs or ones of another shape."""
    environment = {value: accept(value, inputs, precise) for value in function.inputs}
    _run_nodes(function, environment, precise)
    return {name: np.array(environment[value])
            for name, value in zip(function.output_names, function.outputs, strict=True)}


def run_body(body: Function, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """A fused body on arrays: precise if they are f64 where the body says otherwise."""
    environment = dict(zip(body.inputs, operands, strict=True))
    precise = any(array.dtype == np.float64 and value.dtype.is_float
                  and value.dtype.numpy != np.float64 for value, array in environment.items())
    _run_nodes(body, environment, precise)
    return tuple(environment[value] for value in body.outputs)


def run_decomposed(op: Composite, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """A composite's meaning on arrays, computed in the types they come in."""
    body = op.body(*(TensorType(DType.from_numpy(a.dtype), a.shape) for a in operands))
    environment = dict(zip(body.inputs, operands, strict=True))
    _run_nodes(body, environment, precise=False)
    return tuple(environment[value] for value in body.outputs)


def run_node(node: Node, operands: Sequence[np.ndarray],
             precise: bool = False) -> list[np.ndarray]:
    """One node's results, rounded to their declared types; they may share memory with operands."""
    results = []
    arrays = _evaluate(node, [_widen(array) for array in operands], precise)
    for value, array in zip(node.outputs, arrays, strict=True):
        dtype = np.float64 if precise and value.dtype.is_float else value.dtype.numpy
        with np.errstate(over="ignore", invalid="ignore"):
            if array.shape != value.shape:
                array = np.broadcast_to(array, value.shape)
            results.append(array.astype(dtype, copy=False))
    return results


def _run_nodes(function: Function, environment: dict[Value, np.ndarray], precise: bool) -> None:
    for node in function.nodes:
        results = run_node(node, [environment[value] for value in node.inputs], precise)
        environment.update(zip(node.outputs, results, strict=True))


def _evaluate(node: Node, operands: list[np.ndarray], precise: bool) -> tuple[np.ndarray, ...]:
    if precise and isinstance(node.op, Cast) and node.op.dtype.is_float:
        return (operands[0].astype(np.float64),)
    return node.op.evaluate(*operands)


def _widen(array: np.ndarray) -> np.ndarray:
    """16-bit floats in the type they are computed in."""
    if array.dtype.itemsize != 2:
        return array
    return array.astype(DType.from_numpy(array.dtype).compute.numpy)


def accept(value: Value, inputs: Mapping[str, np.ndarray], precise: bool = False) -> np.ndarray:
    """The array given for an input, in its declared type. Raises EulerError if there is none, its
    shape is another, or its numbers are none of that type (floats are rounded to narrower ones)."""
    if value.name not in inputs:
        raise EulerError(f"input %{value.name} is missing; given: {', '.join(inputs)}")
    array = np.asarray(inputs[value.name])
    if array.shape != value.shape:
        raise EulerError(f"input {value!r} was given an array of shape {array.shape}")
    if array.dtype != value.dtype.numpy:
        _check_convertible(value, array)
    wide = precise and value.dtype.is_float
    return array.astype(np.float64 if wide else value.dtype.numpy, copy=False)


def _check_convertible(value: Value, array: np.ndarray) -> None:
    """Refuse arrays whose numbers would not survive: floats take all numbers, integers and bool
    only arrays of integers or bool, with no number out of range."""
    dtype = value.dtype
    if not (np.can_cast(array.dtype, np.float64) if dtype.is_float else array.dtype.kind in "iub"):
        raise EulerError(f"input {value!r} was given an array of {array.dtype}; give one of "
                         f"{dtype.numpy}")
    if not dtype.is_float and array.size:
        for number in (array.min(), array.max()):
            if not dtype.holds(number):
                raise EulerError(f"input {value!r} was given {number}, which {dtype} does not hold")
