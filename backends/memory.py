"""Host memory as the backends that run on it see it: aligned bytes, typed views, bound arrays, and
the memory of a plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from euler_ir.errors import EulerError
from euler_ir.graph import Function, Value
from euler_ir.interpreter import accept
from euler_ir.plan import ALIGNMENT, Place, Plan
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


class HostMemory:
    """The memory of a plan: its arena, and a buffer for each input, `bound` ones given.

    Raises EulerError for a bound array that cannot serve as its input's memory."""

    def __init__(self, plan: Plan, bound: Mapping[str, np.ndarray]) -> None:
        function = plan.function
        check_bound(function, bound)
        self.plan = plan
        self.arena = aligned_bytes(plan.arena_bytes)
        self.buffers = {value.name: bytes_of(bound[value.name]) if value.name in bound
                        else aligned_bytes(value.type.bytes) for value in function.inputs}
        self._staged = {value.name: (value, self.array(value, plan.places[value]))
                        for value in function.inputs if value.name not in bound}
        kept = {function.donations.get(name) for name in bound}
        self._results = {
            name: self.array(value, plan.results[name])
            for name, value in zip(function.output_names, function.outputs, strict=True)
            if name not in kept}

    def stage(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Copy in the inputs that are not bound, all or none.

        Raises EulerError for one that is missing or does not fit, and for a name that is none of
        them: a bound input is where it is, whatever else is given."""
        for name in inputs:
            if name not in self._staged:
                raise EulerError(f"@{self.plan.function.name} takes no input %{name} at a run; it "
                                 f"takes {', '.join(self._staged) or 'none'}")
        for array, given in [(array, accept(value, inputs))
                             for value, array in self._staged.values()]:
            array[...] = given

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs that are not donated into bound memory, by name."""
        return {name: array.copy() for name, array in self._results.items()}

    def array(self, value: Value, place: Place) -> np.ndarray:
        """A value that lies at a place of the plan."""
        return typed_view(self.region(place), place.offset, value.type)

    def region(self, place: Place) -> np.ndarray:
        """The arena, or the input's buffer that a place is in, as bytes."""
        return self.arena if place.base is None else self.buffers[place.base]


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
