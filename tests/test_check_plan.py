"""The checker of plans: every kind of fault, planted in a right plan, is found and named."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from backends.reference.backend import ReferenceBackend
from euler_ir import interpreter
from euler_ir.graph import Value
from euler_ir.plan import ALIGNMENT, Block, Place, Plan
from runtime.compiler.check_plan import PlanError, check_plan
from tests.planning import crosswise, example, plan_of
from tests.random_functions import random_function, random_inputs


def at(plan: Plan, name: str) -> Place:
    return next(place for value, place in plan.places.items() if value.name == name)


def put(plan: Plan, name: str, where: Place) -> Plan:
    value = next(value for value in plan.places if value.name == name)
    return replace(plan, places={**plan.places, value: where})


def with_step(plan: Plan, number: int, **changes) -> Plan:
    steps = list(plan.steps)
    steps[number] = replace(steps[number], **changes)
    return replace(plan, steps=tuple(steps))


def with_block(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, blocks=tuple(
        replace(block, **changes) if name in [value.name for value in block.values] else block
        for block in plan.blocks))


def swapped(plan: Plan, i: int, j: int) -> Plan:
    steps = list(plan.steps)
    steps[i], steps[j] = steps[j], steps[i]
    return replace(plan, steps=tuple(steps))


FAULTS = {
    "overlap": (lambda p: put(p, "y", at(p, "m")), "reads %v at bytes .* hold %y"),
    "result over operand": (lambda p: put(p, "d", at(p, "m")), "%d overlaps operand %v"),
    "out of bounds": (lambda p: put(p, "d", Place(p.arena_bytes)), "its result %d at bytes .* has"),
    "before the start": (lambda p: put(p, "d", Place(-64)), "its result %d at bytes -64"),
    "arena too small": (lambda p: replace(p, arena_bytes=p.arena_bytes - 64), "which has"),
    "not aligned": (lambda p: put(replace(p, arena_bytes=4096), "d", Place(2052)),
                    "%d at byte 2052, which is not a multiple of 64"),
    "view astray": (lambda p: put(p, "v", at(p, "m")), "view %v is at .* 64 bytes in"),
    "in place without leave": (
        lambda p: with_step(p, 4, kernel=replace(p.steps[4].kernel, inplace=())),
        "step 4 .relu.: its result %e overlaps operand %d, which the kernel does not allow"),
    "no workspace": (lambda p: with_step(p, 3, workspace=None), "no place for its workspace"),
    "workspace over a result": (lambda p: with_step(p, 3, workspace=at(p, "d")),
                                "%d overlaps its workspace"),
    "workspace over an operand": (lambda p: with_step(p, 3, workspace=at(p, "v")),
                                  "its workspace overlaps operand %v"),
    "workspace over a donated output": (lambda p: with_step(p, 3, workspace=Place(0, "x")),
                                        "output y is %y at bytes 0 to 64 .* the workspace"),
    "read too early": (lambda p: swapped(p, 0, 1), "is not run in its turn"),
    "step left out": (lambda p: replace(p, steps=p.steps[:-1]), "relu.* is not run in its turn"),
    "step too many": (lambda p: replace(p, steps=p.steps + p.steps[-1:]), "step 5 runs a node"),
    "input written over": (lambda p: put(p, "a", Place(0, "w")),
                           "%a over input %w, which is not donated"),
    "donated input read too late": (lambda p: put(p, "m", Place(0, "x")), "view %v is at"),
    "donated input lost": (lambda p: put(p, "a", Place(0, "x")), "reads %x at bytes .* hold %a"),
    "no donation": (lambda p: replace(p, function=p.function.replace(donations={})),
                    "over input %x, which is not donated"),
    "input moved": (lambda p: put(p, "w", Place(0, "x")), "input %w is at"),
    "unknown buffer": (lambda p: put(p, "d", Place(0, "nobody")), "buffer of no input"),
    "output elsewhere": (lambda p: replace(p, results=p.results | {"e": at(p, "m")}),
                         "output e is %e"),
    "output forgotten": (lambda p: replace(p, results={}), "output y has no place"),
    "life cut short": (lambda p: with_block(p, "m", last=2), "%m is alive from step 1 to 3"),
    "block elsewhere": (lambda p: with_block(p, "m", offset=p.arena_bytes), "%m lies in the arena"),
    "lower bound": (lambda p: replace(p, lower_bound=p.lower_bound - 64), "the lower bound is"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_finds(fault):
    spoil, message = FAULTS[fault]
    with pytest.raises(PlanError, match=message):
        check_plan(spoil(example()))


def test_the_checker_finds_copies_left_out_or_out_of_order():
    plan = plan_of(crosswise(2, kept=True))
    with pytest.raises(PlanError, match="output y0 is %x1 .* hold %x0"):
        check_plan(replace(plan, copies=()))
    for i in range(len(plan.copies)):
        left_out = plan.copies[:i] + plan.copies[i + 1:]
        with pytest.raises(PlanError):
            check_plan(replace(plan, copies=left_out))
    with pytest.raises(PlanError):
        check_plan(replace(plan, copies=plan.copies[::-1]))


def test_what_the_checker_accepts_runs_right():
    """One value of a random plan is moved somewhere else: the checker refuses every plan that
    gives wrong numbers, and not all plans."""
    accepted = refused = wrong = 0
    for seed in range(150):
        f = random_function(seed)
        plan, choice = plan_of(f), random.Random(seed)
        movable = [block for block in plan.blocks if len(block.values) == 1 and block.size]
        if not movable:
            continue
        block = choice.choice(movable)
        room = max(plan.arena_bytes - block.size, 0) // ALIGNMENT
        other = moved(plan, block, choice.randint(0, room) * ALIGNMENT)
        inputs = random_inputs(f, seed)
        same = is_same(ReferenceBackend().link(other).run(inputs), interpreter.run(f, inputs))
        wrong += not same
        try:
            check_plan(other)
        except PlanError:
            refused += 1
        else:
            accepted += 1
            assert same, f"seed {seed}: {block} moved"
    assert accepted > 10 and wrong > 10 and refused >= wrong


def moved(plan: Plan, block: Block, offset: int) -> Plan:
    """The plan with a block, its value and the views of it at another offset."""
    roots: dict[Value, Value] = {}
    for node in plan.function.nodes:
        if node.op.alias(*(value.type for value in node.inputs)) is not None:
            base = node.inputs[0]
            roots[node.output] = roots.get(base, base)
    places = {value: Place(place.offset - block.offset + offset)
              if roots.get(value, value) is block.values[0] else place
              for value, place in plan.places.items()}
    results = {name: places[value] if plan.results[name] == plan.places[value] else
               plan.results[name]
               for name, value in zip(plan.function.output_names, plan.function.outputs,
                                      strict=True)}
    blocks = tuple(replace(b, offset=offset) if b is block else b for b in plan.blocks)
    return replace(plan, places=places, results=results, blocks=blocks)


def is_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(got[name], expected[name]) for name in expected)
