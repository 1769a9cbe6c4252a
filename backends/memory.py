"""Host memory as the backends that run on it see it: aligned bytes, typed views, buffers, and the
memory of a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from euler_ir.errors import EulerError
from euler_ir.graph import Function, Value
from euler_ir.interpreter import accept
from euler_ir.plan import ALIGNMENT, Place, Plan, size_text
from euler_ir.types import TensorType


def aligned_bytes(size: int) -> np.ndarray:
    """`size` zero bytes (u8) that start on a multiple of ALIGNMENT."""
    if size + ALIGNMENT > sys.maxsize:  # more than numpy can be asked for
        raise MemoryError
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start:start + size]


def typed_view(memory: np.ndarray, offset: int, type: TensorType) -> np.ndarray:
    """A tensor that lies in memory from byte `offset` on."""
    part = memory[offset:offset + type.bytes]
    return part.view(type.dtype.numpy).reshape(type.shape)


class HostBuffer:
    """A `Buffer` in the host's memory: aligned, contiguous, read without a copy."""

    def __init__(self, type: TensorType) -> None:
        self.type = type
        self.bytes = aligned_bytes(type.bytes)
        self._array = typed_view(self.bytes, 0, type)

    def read(self, shape: Sequence[int] | None = None) -> np.ndarray:
        view = self._array[self._leading(self.type.shape if shape is None else shape)]
        view.flags.writeable = False
        return view

    def write(self, array: np.ndarray) -> None:
        self._array[self._leading(array.shape)] = array

    def clear(self) -> None:
        self.bytes.fill(0)

    def _leading(self, shape: Sequence[int]) -> tuple:
        """The index of the leading part of a shape. (numpy would take fewer axes for all of the
        rest, and broadcast.)"""
        own = self.type.shape
        if len(shape) != len(own) or any(n > most for n, most in zip(shape, own, strict=True)):
            raise EulerError(f"a buffer of {self.type} has no leading part of shape {list(shape)}")
        return *map(slice, shape), ...


class HostMemory:
    """The memory of a plan: its arena, and a buffer for each input, `bound` ones given.

    Raises EulerError for a bound buffer that cannot serve as its input's memory, and MemoryError,
    which tells how much is needed, where the system does not give it."""

    def __init__(self, plan: Plan, bound: Mapping[str, HostBuffer]) -> None:
        function = plan.function
        check_bound(function, bound)
        self.plan = plan
        own = [value for value in function.inputs if value.name not in bound]
        try:
            self.arena = aligned_bytes(plan.arena_bytes)
            self._buffers = {**bound, **{value.name: HostBuffer(value.type) for value in own}}
        except MemoryError:
            needed = plan.arena_bytes + sum(value.type.bytes for value in own)
            raise MemoryError(f"@{function.name} needs {size_text(needed)} besides what it is "
                              "bound to; lower the batch size or the context") from None
        self._staged = {value.name: (value, self.array(value, plan.places[value]))
                        for value in own}
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
        return self.arena if place.base is None else self._buffers[place.base].bytes


def check_bound(function: Function, bound: Mapping[str, HostBuffer]) -> None:
    """Raises EulerError unless every bound buffer can serve as the memory of its input: in the
    host's memory, of the declared type, and, if donated, no other input's too."""
    inputs = {value.name: value for value in function.inputs}
    owners: dict[HostBuffer, str] = {}
    for name, buffer in bound.items():
        if name not in inputs:
            raise EulerError(f"@{function.name} has no input %{name} to bind; it has "
                             f"{', '.join(inputs) or 'none'}")
        if not isinstance(buffer, HostBuffer):
            raise EulerError(f"what is bound to {inputs[name]!r} must be a buffer that the backend "
                             f"allocated, not {type(buffer).__name__}")
        if buffer.type != inputs[name].type:
            raise EulerError(f"the buffer bound to {inputs[name]!r} must be of that type, not "
                             f"{buffer.type}")
        owner = owners.setdefault(buffer, name)
        if owner != name and {name, owner} & set(function.donations):
            raise EulerError(f"%{owner} and %{name} are bound to the same buffer, which a donated "
                             "input may not be")
