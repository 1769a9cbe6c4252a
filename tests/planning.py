"""What the tests of plans share: plans of functions, and functions that are hard to plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backends.backend import Backend
from backends.reference.backend import ReferenceBackend
from euler_ir import interpreter
from euler_ir.builder import Builder
from euler_ir.graph import Function
from euler_ir.ops import Add, Concat, Relu, Slice, Transpose
from euler_ir.plan import Plan
from euler_ir.types import F32
from runtime.compiler.check_plan import check_plan
from runtime.compiler.driver import link_function
from runtime.compiler.schedule import schedule
from tests.random_functions import random_inputs
from tests.runners import backend

N = 32  # elements of most values here: 128 bytes, two alignment units


def poisoned(name: str) -> Backend:
    """A backend, with its free memory poisoned if it can do that."""
    return ReferenceBackend(poison=True) if name == "reference" else backend(name)


def plan_of(function: Function, reuse: bool = True, workspace: int = 0, inplace=None) -> Plan:
    """The checked plan of a function, with workspaces and in-place pairs as wanted."""
    kernels = [replace(kernel, workspace=workspace,
                       inplace=tuple(pair for pair in kernel.inplace
                                     if inplace is None or pair in inplace))
               for kernel in ReferenceBackend().lower(function)]
    plan = schedule(function, kernels, reuse)
    check_plan(plan)
    return plan


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def assert_runs(function: Function, seed: int = 0) -> None:
    inputs = random_inputs(function, seed)
    program = link_function(function, ReferenceBackend(poison=True))
    assert_same(program.run(inputs), interpreter.run(function, inputs))


def crosswise(count: int, kept: bool) -> Function:
    """Inputs passed round in a ring, each donated to the next; with `kept`, one is also returned
    under another name."""
    with Builder() as b:
        ring = [b.input(f"x{i}", F32, (N,)) for i in range(count)]
        outputs = {f"y{i}": ring[(i + 1) % count] for i in range(count)}
        if kept:
            outputs |= {"kept": ring[0], "part": b.part(ring[1], 0, 3, 9)}
        return b.function(outputs, {f"x{i}": f"y{i}" for i in range(count)})


def example() -> Plan:
    """A plan with a view, a workspace, a value in place of another and a donated input."""
    with Builder() as b:
        x, w = b.input("x", F32, (4, 8)), b.input("w", F32, (4, 8))
        a = b.apply(Transpose((1, 0)), w, name="a")
        m = b.apply(Transpose((1, 0)), a, name="m")
        v = b.apply(Slice((2, 0), (4, 8)), m, name="v")
        y = b.apply(Add(), x, w, name="y")
        d = b.apply(Concat(0), v, v, name="d")
        e = b.apply(Relu(), d, name="e")
        f = b.function({"y": y, "e": e}, {"x": "y"})
    kernels = ReferenceBackend().lower(f)
    kernels[3] = replace(kernels[3], workspace=64)
    plan = schedule(f, kernels)
    check_plan(plan)
    return plan
