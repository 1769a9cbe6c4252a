"""Random functions in planned memory, free memory poisoned where the backend can, equal the
interpreter: with reuse of memory and without, run again from the same program, bound and not."""

from __future__ import annotations

import numpy as np
import pytest

from backends.backend import Backend
from euler_ir import interpreter
from euler_ir.graph import Function
from euler_ir.verify import verify
from runtime.compiler.driver import compile_function, link_function, to_buffers
from tests.models import contents
from tests.planning import assert_same, plan_of, poisoned
from tests.random_functions import random_function, random_inputs
from tests.runners import BACKENDS

#: Seeds a test, eight tests each: a compiler takes a second for the kernels of one function.
SEEDS = {"reference": 25, "llvm": 5}


def seeds(name: str, part: int) -> range:
    return range(SEEDS[name] * part, SEEDS[name] * (part + 1))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("part", range(8))
def test_random_functions_equal_the_interpreter(name, part):
    chosen = poisoned(name)
    for seed in seeds(name, part):
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


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("part", range(4))
def test_random_functions_survive_the_passes(name, part):
    chosen = poisoned(name)
    for seed in seeds(name, part):
        f = random_function(seed)
        inputs = random_inputs(f, seed)
        assert_same(compile_function(f, chosen).run(inputs), interpreter.run(f, inputs))


def check_bound_runs(f: Function, chosen: Backend, inputs: dict[str, np.ndarray]) -> None:
    """All inputs bound: donated ones are updated run by run, the others stay."""
    bound = to_buffers(inputs, chosen)
    program = link_function(f, chosen, bound)
    for _ in range(2):
        state = contents(bound)
        expected = interpreter.run(f, state)
        got = program.run({})
        donated = set(f.donations.values())
        assert_same(got, {name: array for name, array in expected.items() if name not in donated})
        assert_same(contents(bound), state | {name: expected[output]
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
