"""Random functions in planned memory, free memory poisoned where the backend can, equal the
interpreter: with reuse of memory and without, run again from the same program, bound and not."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import Backend
from euler_ir import interpreter, ops
from euler_ir.graph import Function
from euler_ir.verify import verify
from runtime.execute import compile_function, link_function
from tests.planning import assert_same, backend, plan_of
from tests.random_functions import random_function, random_inputs


def complete(name: str) -> Backend:
    """The backend, if it has kernels for all that random functions are made of."""
    chosen = backend(name)
    if name == "llvm":
        from backends.llvm.lowering import LOWERINGS
        needed = {ops.Concat, ops.DynamicSlice, ops.Matmul, ops.Pad, ops.ReduceSum, ops.Slice,
                  ops.Transpose, ops.UpdateSlice}
        if missing := sorted(op.name for op in needed - set(LOWERINGS)):
            pytest.skip(f"the llvm backend has no kernels yet for {', '.join(missing)}")
    return chosen


@pytest.mark.parametrize("name", ["reference", "llvm"])
@pytest.mark.parametrize("block_of_seeds", range(8))
def test_random_functions_equal_the_interpreter(name, block_of_seeds):
    chosen = complete(name)
    for seed in range(25 * block_of_seeds, 25 * block_of_seeds + 25):
        f = verify(random_function(seed))
        together, apart = (link_function(f, chosen, reuse=reuse) for reuse in (True, False))
        kept = []
        for draw in range(2):
            inputs = random_inputs(f, 1000 * seed + draw)
            before = {name: array.copy() for name, array in inputs.items()}
            expected = interpreter.run(f, inputs)
            got = together.run(inputs)
            assert_same(got, expected)
            assert_same(apart.run(inputs), expected)
            assert_same(inputs, before)
            kept.append((got, expected))
        for got, expected in kept:
            assert_same(got, expected)
        check_bound_runs(f, chosen, inputs)


@pytest.mark.parametrize("name", ["reference", "llvm"])
@pytest.mark.parametrize("block_of_seeds", range(4))
def test_random_functions_survive_the_passes(name, block_of_seeds):
    chosen = complete(name)
    for seed in range(25 * block_of_seeds, 25 * block_of_seeds + 25):
        f = random_function(seed)
        inputs = random_inputs(f, seed)
        assert_same(compile_function(f, chosen).run(inputs), interpreter.run(f, inputs))


def check_bound_runs(f: Function, chosen: Backend, inputs: dict[str, np.ndarray]) -> None:
    """All inputs bound: donated ones are updated run by run, the others stay."""
    bound = {name: array.copy() for name, array in inputs.items()}
    program = link_function(f, chosen, bound)
    for _ in range(2):
        state = {name: array.copy() for name, array in bound.items()}
        expected = interpreter.run(f, state)
        got = program.run({})
        donated = set(f.donations.values())
        assert_same(got, {name: array for name, array in expected.items() if name not in donated})
        assert_same(bound, state | {name: expected[output]
                                    for name, output in f.donations.items()})


def test_random_functions_cover_what_they_claim():
    """The generator makes plans with shared blocks, donated results, copies and views."""
    plans = [plan_of(random_function(seed)) for seed in range(60)]
    assert sum(len(block.values) > 1 for plan in plans for block in plan.blocks) > 100
    assert sum(bool(plan.copies) for plan in plans) > 5
    donated = [plan for plan in plans
               for value in plan.function.outputs if plan.places[value].base is not None]
    assert len(donated) > 30
    assert any(len(set(plan.function.outputs)) < len(plan.function.outputs) for plan in plans)
