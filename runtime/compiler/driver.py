"""From a function to a program in one call: verify, passes, lower, schedule, check, link."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import numpy as np

from backends.backend import Backend, Buffer, Program
from euler_ir.graph import Function
from euler_ir.passes.pipeline import optimize
from euler_ir.plan import Plan
from euler_ir.types import DType, TensorType
from euler_ir.verify import verify
from runtime.compiler.check_plan import check_plan
from runtime.compiler.dump import Dump
from runtime.compiler.schedule import schedule


def compile_function(function: Function, backend: Backend,
                     bound: Mapping[str, Buffer] | None = None,
                     dump: Dump | None = None, recomputed: Collection[str] = ()) -> Program:
    """A program that runs the function. `bound` gives memory for inputs that stay where they are
    between runs, see `Backend.link`; `dump` writes down every stage on the way; `recomputed` names
    segments whose values are not kept for the backward pass.

    Raises EulerError for a function that is not well formed."""
    verify(function)
    observer = partial(dump.stage, function.name) if dump else None
    optimized = optimize(function, backend.composites, backend.epilogues, observer, recomputed)
    return link_function(optimized, backend, bound, dump=dump)


def link_function(function: Function, backend: Backend,
                  bound: Mapping[str, Buffer] | None = None, reuse: bool = True,
                  dump: Dump | None = None) -> Program:
    """As `compile_function` without the passes: the nodes run as they stand, so the backend must
    have kernels for all of them. `reuse=False` keeps every value in memory of its own."""
    return backend.link(plan_function(function, backend, reuse, dump), bound)


def plan_function(function: Function, backend: Backend, reuse: bool = True,
                  dump: Dump | None = None) -> Plan:
    """The kernels of a function and where its values will lie; takes no memory yet."""
    kernels = backend.lower(function)
    plan = schedule(function, kernels, reuse)
    check_plan(plan)
    if dump:
        dump.schedule(plan)
        dump.kernels(function, kernels, backend)
    return plan


def to_buffers(arrays: Mapping[str, np.ndarray], backend: Backend) -> dict[str, Buffer]:
    """Memory of the backend that holds these arrays, by name."""
    buffers = {}
    for name, array in arrays.items():
        buffers[name] = backend.allocate(TensorType(DType.from_numpy(array.dtype), array.shape))
        buffers[name].write(array)
    return buffers


def run_function(function: Function, inputs: Mapping[str, np.ndarray],
                 backend: Backend) -> dict[str, np.ndarray]:
    """Compile a function and run it once: outputs by name; the inputs are not changed."""
    return compile_function(function, backend).run(inputs)
