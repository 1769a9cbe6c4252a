"""Host memory as the backends that run on it see it: aligned bytes, typed views, bound arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from euler_ir.errors import EulerError
from euler_ir.graph import Function, Value
from euler_ir.plan import ALIGNMENT
from euler_ir.types import TensorType


def aligned_bytes(size: int) -> np.ndarray:
    """`size` zero bytes (u8) that start on a multiple of ALIGNMENT."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start:start + size]


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array as bytes (u8), shared with it."""
    return array.reshape(-1).view(np.uint8)


def typed_view(memory: np.ndarray, offset: int, type: TensorType) -> np.ndarray:
    """A tensor that lies in memory from byte `offset` on."""
    part = memory[offset:offset + type.bytes]
    return part.view(type.dtype.numpy).reshape(type.shape)


def check_bound(function: Function, bound: Mapping[str, np.ndarray]) -> None:
    """Raises EulerError unless every bound array can serve as the memory of its input: contiguous,
    of the declared type, writable if donated, and then with no byte in common with another."""
    inputs = {value.name: value for value in function.inputs}
    for name, array in bound.items():
        if name not in inputs:
            raise EulerError(f"@{function.name} has no input %{name} to bind; it has "
                             f"{', '.join(inputs) or 'none'}")
        if fault := _fault(inputs[name], array, name in function.donations):
            raise EulerError(f"the array bound to {inputs[name]!r} must be {fault}")
    spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes, name)
                   for name, array in bound.items() if array.nbytes)
    reach, owner = 0, ""
    for start, stop, name in spans:
        if start < reach and {name, owner} & set(function.donations):
            raise EulerError(f"the arrays bound to %{owner} and %{name} share memory, which a "
                             "donated input may not")
        if stop > reach:
            reach, owner = stop, name


def _fault(value: Value, array: np.ndarray, donated: bool) -> str:
    """What an array bound to an input lacks."""
    if not isinstance(array, np.ndarray):
        return f"a numpy array, not {type(array).__name__}"
    if array.shape != value.shape or array.dtype != value.dtype.numpy:
        return f"of that type, not {array.dtype}{list(array.shape)}"
    if not array.flags.c_contiguous:
        return "contiguous"
    return "writable, as it is donated" if donated and not array.flags.writeable else ""
