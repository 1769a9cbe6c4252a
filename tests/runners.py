"""What runs a function in tests that every backend must pass."""

from __future__ import annotations

from functools import cache, partial

import pytest

from backends.backend import Backend, create
from euler_ir import interpreter
from runtime.compiler.driver import run_function

#: Backends held against the interpreter.
BACKENDS = ["reference", "llvm"]


@cache
def backend(name: str) -> Backend:
    """One backend of each name for the whole test session."""
    return create(name)


def runner(name: str):
    """run(function, inputs) → outputs by name, on the interpreter or on a backend."""
    if name == "interpreter":
        return interpreter.run
    return partial(run_function, backend=backend(name))


#: Parametrises a test over `run`, a function as `interpreter.run`, for all that can run functions.
every_runner = pytest.mark.parametrize("run", [
    pytest.param(lambda function, inputs, name=name: runner(name)(function, inputs), id=name)
    for name in ["interpreter", *BACKENDS]])
