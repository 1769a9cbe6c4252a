"""LLVM backends for tests: one a target and thread count, with kernels cached for the session."""

from __future__ import annotations

from functools import cache

import numpy as np

from backends.llvm.backend import LLVMBackend
from backends.llvm.compiler import Compiler
from euler_ir.builder import Builder
from euler_ir.graph import Function
from euler_ir.types import BOOL
from runtime.compiler.driver import link_function
from tests.llvm_runner import TARGETS


@cache
def compiler(target: str) -> Compiler:
    return Compiler(TARGETS[target])


@cache
def backend(target: str = "host", threads: int = 1) -> LLVMBackend:
    return LLVMBackend(threads, compiler=compiler(target))


def apply(build, *types) -> Function:
    """y0, y1, … = build(b, x0, x1, …) for inputs (dtype, shape)."""
    with Builder("f") as b:
        values = [b.input(f"x{i}", dtype, shape) for i, (dtype, shape) in enumerate(types)]
        results = build(b, *values)
        results = results if isinstance(results, (list, tuple)) else [results]
        return b.function({f"y{i}": value for i, value in enumerate(results)})


def limits(dtype) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


def sample(function: Function, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs by name: normal numbers, the whole range of integers, both booleans."""
    rng = np.random.default_rng(seed)
    inputs = {}
    for value in function.inputs:
        if value.dtype.is_float:
            array = rng.standard_normal(value.shape)
        else:
            low, high = (0, 1) if value.dtype is BOOL else limits(value.dtype)
            array = rng.integers(low, high, value.shape, dtype=np.int64, endpoint=True)
        inputs[value.name] = np.asarray(array).astype(value.dtype.numpy)
    return inputs


def run_with_threads(function: Function, inputs: dict[str, np.ndarray], target: str = "host"):
    """The outputs, which must be the same to the bit for 1, 2 and 4 threads."""
    outputs = [link_function(function, backend(target, threads)).run(inputs)
               for threads in (1, 2, 4)]
    for other in outputs[1:]:
        for name, array in outputs[0].items():
            assert array.tobytes() == other[name].tobytes(), f"{name} depends on the threads"
    return outputs[0]
