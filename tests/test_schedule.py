"""The scheduler's rules one by one, memory bound to inputs, how tight plans are, and how they are
described."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.memory import HostBuffer, HostMemory
from backends.reference.backend import ReferenceBackend
from euler_ir import interpreter
from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder
from euler_ir.errors import EulerError
from euler_ir.graph import Function
from euler_ir.ops import AdamW
from euler_ir.passes.pipeline import optimize
from euler_ir.plan import ALIGNMENT, Place, Plan
from euler_ir.types import F32, F64, I32, TensorType
from model.config import PRESETS
from model.objective import training_step
from model.optimizer import AdamWConfig
from runtime.compiler.driver import link_function, to_buffers
from runtime.compiler.plan_text import describe
from tests.planning import N, assert_runs, assert_same, crosswise, example, plan_of, poisoned
from tests.random_functions import SumAndDifference, random_inputs
from tests.runners import BACKENDS

# Lifetimes and views


def test_memory_is_used_again_after_the_last_use():
    with Builder() as b:
        x = b.input("x", F32, (4, 8))
        for _ in range(6):
            x = b.transpose(x, (1, 0))
        f = b.function({"y": x})
    plan = plan_of(f)
    # A transpose cannot work in place: two values of 128 bytes, in turn.
    assert plan.arena_bytes == plan.lower_bound == 2 * 128
    assert plan_of(f, reuse=False).arena_bytes == 6 * 128


def test_views_lie_inside_what_they_view():
    with Builder() as b:
        x = b.input("x", F32, (4, N))
        y = -x
        part = b.part(y, 0, 1, 3)
        again = b.part(b.reshape(part, (2 * N,)), 0, 5, 9)
        of_input = b.reshape(b.part(x, 0, 2, 4), (N, 2))
        f = b.function({"y": -again, "z": -of_input})
    plan = plan_of(f)
    start = plan.places[y].offset
    assert plan.places[part] == Place(start + 4 * N)
    assert plan.places[again] == Place(start + 4 * N + 4 * 5)
    assert plan.places[of_input] == Place(2 * 4 * N, "x")
    assert len(plan.steps) == 3
    assert_runs(f)


def test_a_view_keeps_its_base_alive():
    with Builder() as b:
        x = b.input("x", F32, (2, N))
        y = -x
        view = b.part(y, 0, 1, 2)
        z = b.transpose(y, (1, 0))
        late = b.transpose(z, (1, 0))
        f = b.function({"y": b.concat([late, view], 0)})
    plan = plan_of(f)
    life = next(b for b in plan.blocks if y in b.values)
    assert (life.first, life.last) == (0, 3)
    assert_runs(f)


def test_outputs_live_to_the_end_and_unused_results_for_their_step():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        early = b.transpose(b.reshape(x, (2, N // 2)), (1, 0))
        used, unused = b.apply(SumAndDifference(), x, x)
        f = b.function({"early": early, "y": b.concat([used, used], 0)})
    plan = plan_of(f)
    lives = {value: (b.first, b.last) for b in plan.blocks for value in b.values}
    assert lives[early] == (0, 3)
    assert lives[unused] == (1, 1)
    assert_runs(f)


def test_zero_size_values_take_no_memory():
    with Builder() as b:
        x = b.input("x", F32, (0, 4))
        y = b.input("y", F32, (3, 4))
        empty = -x
        f = b.function({"empty": empty, "sum": b.reduce_sum(empty, [0]),
                        "joined": b.concat([empty, y], 0), "nothing": b.part(y, 0, 3, 3)})
    plan = plan_of(f)
    assert next(b.size for b in plan.blocks if empty in b.values) == 0
    assert plan.arena_bytes == 2 * ALIGNMENT
    assert_runs(f)


def test_a_function_without_nodes():
    with Builder() as b:
        x = b.input("x", F32, (2, 3))
        f = b.function({"same": x, "again": x, "row": b.part(x, 0, 1, 2)})
    plan = plan_of(f)
    assert (plan.arena_bytes, plan.steps, plan.copies) == (0, (), ())
    assert_runs(f)


def test_workspaces_are_alive_during_their_step_only():
    with Builder() as b:
        x = b.input("x", F32, (4, 8))
        y = b.transpose(b.transpose(x, (1, 0)), (1, 0))
        f = b.function({"y": b.transpose(y, (1, 0))})
    plan = plan_of(f, workspace=1000)
    assert plan.arena_bytes == plan.lower_bound == 2 * 128 + 1024
    spans = [(b.first, b.last) for b in plan.blocks if not b.values]
    assert spans == [(0, 0), (1, 1), (2, 2)]


# In place


def test_a_dying_operand_is_written_over():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        first = -x
        second = b.relu(first)
        third = second + second
        f = b.function({"y": third})
    plan = plan_of(f)
    assert plan.places[first] == plan.places[second] == plan.places[third]
    assert plan.arena_bytes == 128
    assert plan_of(f, inplace=()).arena_bytes == 256
    assert_runs(f)


def test_nothing_is_written_over_what_is_read_later():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        a = -x
        whole = b.reshape(a, (2, N // 2))
        c = b.relu(a)
        d = b.relu(c)
        f = b.function({"c": c, "d": d, "late": b.transpose(whole, (1, 0))})
    plan = plan_of(f)
    assert len({plan.places[a], plan.places[c], plan.places[d]}) == 3
    assert_runs(f)


def test_inputs_are_never_written_over():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        f = b.function({"y": -x})
    assert plan_of(f).places[f.outputs[0]].base is None


def test_each_operand_is_taken_once():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        a, c = -x, b.relu(x)
        total, difference = b.apply(SumAndDifference(), a, c)
        other, dead = b.apply(SumAndDifference(), total, total)
        f = b.function({"difference": difference, "other": other})
    plan = plan_of(f)
    assert {plan.places[total], plan.places[difference]} == {plan.places[a], plan.places[c]}
    assert plan.places[other] == plan.places[total]
    assert plan.places[dead] != plan.places[other]
    assert_runs(f)


@pytest.mark.parametrize("pairs, shared", [(((0, 0), (0, 1)), True), (((0, 0),), False)])
def test_a_value_read_by_two_operands_needs_both_pairs(pairs, shared):
    with Builder() as b:
        x = b.input("x", F32, (N,))
        a = -x
        y = a + a
        f = b.function({"y": y})
    plan = plan_of(f, inplace=pairs)
    assert (plan.places[a] == plan.places[y]) is shared


def test_a_part_of_a_value_is_not_written_over():
    with Builder() as b:
        x = b.input("x", F32, (2, N))
        a = -x
        y = b.part(a, 0, 0, 1) + b.part(a, 0, 1, 2)
        f = b.function({"y": y})
    plan = plan_of(f)
    assert plan.places[a] != plan.places[y]
    assert_runs(f)


# Donations


def test_a_donated_input_is_written_in_place():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        f = b.function({"y": -x}, {"x": "y"})
    plan = plan_of(f)
    assert plan.places[f.outputs[0]] == plan.results["y"] == Place(0, "x")
    assert (plan.arena_bytes, plan.copies) == (0, ())


def test_a_donated_input_that_is_dead_holds_its_output_without_a_copy():
    with Builder() as b:
        x = b.input("x", F32, (4, 8))
        t = b.transpose(x, (1, 0))
        y = b.transpose(t, (1, 0))
        f = b.function({"y": y}, {"x": "y"})
    plan = plan_of(f)
    assert (plan.places[y], plan.copies) == (Place(0, "x"), ())
    assert plan.arena_bytes == 128
    assert_runs(f)


def test_a_donated_input_read_by_a_kernel_that_cannot_share_is_copied_to():
    with Builder() as b:
        x = b.input("x", F32, (4, 4))
        y = b.transpose(x, (1, 0))
        f = b.function({"y": y}, {"x": "y"})
    plan = plan_of(f)
    assert plan.places[y].base is None
    assert plan.results["y"] == Place(0, "x")
    assert [(c.source, c.target, c.size) for c in plan.copies] == [
        (plan.places[y], Place(0, "x"), 64)]
    assert_runs(f)


def test_an_output_that_is_a_reshape_is_made_in_the_donated_buffer():
    with Builder() as b:
        x = b.input("x", F32, (4, 8))
        flat = b.relu(b.reshape(x, (32,)))
        f = b.function({"y": b.reshape(flat, (4, 8))}, {"x": "y"})
    assert plan_of(f).places[flat] == Place(0, "x")
    assert_runs(f)


def test_an_output_that_is_a_part_of_another_value_is_copied_to_the_donated_buffer():
    with Builder() as b:
        b.input("x", F32, (2, N))
        w = b.input("w", F32, (4, N))
        f = b.function({"y": b.part(-w, 0, 1, 3)}, {"x": "y"})
    plan = plan_of(f)
    assert len(plan.copies) == 1 and plan.copies[0].source.offset % ALIGNMENT == 0
    assert_runs(f)


def test_values_on_the_way_may_use_the_donated_buffer():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        w = b.input("w", F32, (N,))
        scaled = b.relu(x)
        f = b.function({"y": scaled + w}, {"x": "y"})
    plan = plan_of(f)
    assert plan.places[scaled] == Place(0, "x")
    assert (plan.arena_bytes, plan.copies) == (0, ())


def test_values_that_outlive_the_moment_leave_the_donated_buffer_alone():
    with Builder() as b:
        x = b.input("x", F32, (N,))
        w = b.input("w", F32, (N,))
        kept = b.relu(x)
        y = -w
        f = b.function({"y": y, "z": kept - y}, {"x": "y"})
    plan = plan_of(f)
    assert plan.places[y] == Place(0, "x")
    assert plan.places[kept].base is None
    assert_runs(f)


def test_adamw_updates_everything_in_place():
    shapes = [(3, N), (N,)]
    with Builder() as b:
        groups = [[b.input(f"{group}{i}", F32, shape) for i, shape in enumerate(shapes)]
                  for group in "pgmv"]
        scalars = [b.input("rate", F32, ()), b.input("t", I32, ()), b.input("norm", F32, ()),
                   b.input("limit", F32, ())]
        results = b.apply(AdamW((0.1, 0.0)), *sum(groups, []), *scalars)
        names = [f"{group}{i}" for group in "pmv" for i in range(2)]
        f = b.function({"new." + name: value for name, value in zip(names, results, strict=True)},
                       {name: "new." + name for name in names})
    plan = plan_of(f)
    assert [plan.places[value] for value in results] == [Place(0, name) for name in names]
    assert (plan.arena_bytes, plan.copies) == (0, ())


def test_a_cache_write_is_in_place_unless_the_new_rows_are_its_own():
    def cache(own: bool) -> Plan:
        with Builder() as b:
            buffer = b.input("buffer", F32, (8, N))
            rows = b.part(buffer, 0, 0, 2) if own else b.input("rows", F32, (2, N))
            position = b.input("position", I32, ())
            y = b.update_slice(buffer, rows, position, 0)
            f = b.function({"y": y}, {"buffer": "y"})
        assert_runs(f)
        return plan_of(f)
    assert (cache(own=False).arena_bytes, cache(own=False).copies) == (0, ())
    assert len(cache(own=True).copies) == 1


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kept", [False, True])
def test_inputs_donated_crosswise_are_exchanged(name, count, kept):
    f = crosswise(count, kept)
    plan_of(f)
    inputs = random_inputs(f, 0)
    assert_same(link_function(f, poisoned(name)).run(inputs), interpreter.run(f, inputs))
    bound = to_buffers(inputs, poisoned(name))
    link_function(f, poisoned(name), bound).run({})
    for i in range(count):
        np.testing.assert_array_equal(bound[f"x{i}"].read(), inputs[f"x{(i + 1) % count}"])


def test_one_output_may_take_over_two_inputs():
    with Builder() as b:
        x, w = b.input("x", F32, (N,)), b.input("w", F32, (N,))
        y = x + w
        f = b.function({"y": y, "again": y}, {"x": "y", "w": "y"})
    plan = plan_of(f)
    assert len(plan.copies) == 1
    assert_runs(f)


# Bound memory


@pytest.mark.parametrize("name", BACKENDS)
def test_bound_inputs_keep_their_state_between_runs(name):
    with Builder() as b:
        total, x = b.input("total", F32, (N,)), b.input("x", F32, (N,))
        f = b.function({"new": total + x, "twice": x + x}, {"total": "new"})
    memory = poisoned(name).allocate(TensorType(F32, (N,)))
    program = link_function(f, poisoned(name), {"total": memory})
    first = program.run({"x": np.full(N, 2, np.float32)})
    second = program.run({"x": np.full(N, 3, np.float32)})
    assert (memory.read() == 5).all() and set(first) == set(second) == {"twice"}
    assert (first["twice"] == 4).all() and (second["twice"] == 6).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_buffers_hold_what_is_written(name):
    buffer = poisoned(name).allocate(TensorType(F32, (2, 3, 4)))
    assert buffer.read().shape == (2, 3, 4) and not buffer.read().any()
    values = np.random.default_rng(0).normal(size=(2, 2, 4))
    buffer.write(values)
    np.testing.assert_array_equal(buffer.read((2, 2, 4)), values.astype(np.float32))
    assert not buffer.read()[:, 2:].any()
    buffer.write(np.ones((1, 3, 1)))
    assert (buffer.read((1, 3, 1)) == 1).all()
    np.testing.assert_array_equal(buffer.read()[1, :2], values[1].astype(np.float32))
    buffer.clear()
    assert not buffer.read().any()
    with pytest.raises(ValueError, match="read-only"):
        buffer.read()[0, 0, 0] = 1
    for shape in ((3, 4), (2, 3, 4, 1), (2, 4, 4), ()):
        for access in (buffer.read, lambda shape: buffer.write(np.ones(shape))):
            with pytest.raises(EulerError, match=r"f32\[2,3,4\] has no leading part of shape \["):
                access(shape)
    assert not buffer.read().any()
    number = poisoned(name).allocate(TensorType(I32, ()))
    number.write(np.array(7))
    assert number.read().shape == () and number.read() == 7


@pytest.mark.parametrize("bound, message", [
    ({"z": HostBuffer(TensorType(F32, (8,)))}, "no input %z"),
    ({"x": HostBuffer(TensorType(F64, (8,)))}, r"of that type, not f64\[8\]"),
    ({"x": HostBuffer(TensorType(F32, (9,)))}, r"of that type, not f32\[9\]"),
    ({"x": np.zeros(8, np.float32)}, "a buffer that the backend allocated, not ndarray"),
])
def test_what_cannot_be_bound_is_refused(bound, message):
    with Builder() as b:
        f = b.function({"y": -b.input("x", F32, (8,))}, {"x": "y"})
    with pytest.raises(EulerError, match=message):
        link_function(f, ReferenceBackend(), bound)


@pytest.mark.parametrize("donated", ["x", "w", "v"])
def test_donated_memory_may_not_be_shared(donated):
    with Builder() as b:
        x, w, v = (b.input(name, F32, (8,)) for name in "xwv")
        f = b.function({"y": x + w + v}, {donated: "y"})
    shared, own = (HostBuffer(TensorType(F32, (8,))) for _ in range(2))
    with pytest.raises(EulerError, match="%x and %. are bound to the same buffer"):
        link_function(f, ReferenceBackend(), {"x": shared, "w": shared, "v": shared})
    others = [name for name in "xwv" if name != donated]
    link_function(f, ReferenceBackend(), {donated: own, **dict.fromkeys(others, shared)})


@pytest.mark.parametrize(("arena", "told"), [(1 << 58, "256.00 PiB"), (1 << 63, "8192.00 PiB")])
def test_memory_that_is_not_to_be_had_is_told(arena, told):
    """More than a process can address, and more than numpy can be asked for."""
    with pytest.raises(MemoryError, match=f"^@main needs {told} besides .*; lower the batch size"):
        HostMemory(replace(example(), arena_bytes=arena), {})


# How tight plans are


def training_graph(layers: int, batch: int = 4, context: int = 32, width: int = 64) -> Function:
    """Loss and gradients of a small transformer."""
    heads, rows, parameters = 4, (batch, context), []
    with Builder("train") as b:
        def weight(name, *shape):
            parameters.append(name)
            return b.input(name, F32, shape)
        x = b.input("x", F32, (*rows, width))
        lo, hi, target = b.input("lo", I32, rows), b.input("hi", I32, rows), b.input(
            "target", I32, (*rows, 1))
        for i in range(layers):
            h = b.rms_norm(x, weight(f"norm{i}", width), 1e-5)
            qkv = b.linear(h, weight(f"qkv{i}", 3 * width, width))
            q, k, v = (b.reshape(b.part(qkv, 2, j * width, (j + 1) * width),
                                 (*rows, heads, width // heads)) for j in range(3))
            mixed = b.reshape(b.attention(q, k, v, lo, hi), (*rows, width))
            x = x + b.linear(mixed, weight(f"mix{i}", width, width))
            h = b.rms_norm(x, weight(f"norm2{i}", width), 1e-5)
            gate = b.silu(b.linear(h, weight(f"gate{i}", 3 * width, width)))
            up = b.linear(h, weight(f"up{i}", 3 * width, width))
            x = x + b.linear(gate * up, weight(f"down{i}", width, 3 * width))
        logits = b.linear(x, weight("head", 256, width))
        f = b.function({"loss": b.mean(b.cross_entropy(logits, target))})
    return value_and_grad(f, parameters)


@pytest.mark.parametrize("layers, batch", [(1, 1), (1, 8), (4, 1), (4, 8), (12, 4)])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("workspace", [0, 100_000])
def test_the_arena_of_a_training_step_is_near_its_lower_bound(layers, batch, inplace, workspace):
    f = training_graph(layers, batch)
    plan = plan_of(f, workspace=workspace, inplace=None if inplace else ())
    assert plan.lower_bound <= plan.arena_bytes <= 1.1 * plan.lower_bound


@pytest.mark.parametrize("preset", [name for name, c in PRESETS.items() if c.layers <= 16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_arena_of_a_preset_is_near_its_lower_bound(preset, accumulate):
    functions = training_step(PRESETS[preset], AdamWConfig(), 2, 128, accumulate).functions
    for f in functions.values():
        plan = plan_of(optimize(f, ReferenceBackend().composites))
        assert plan.arena_bytes <= 1.1 * plan.lower_bound


# The description


def test_a_plan_is_described_with_sizes_a_picture_and_all_blocks():
    plan = example()
    lines = describe(plan).splitlines()
    assert lines[0] == "@main: 5 steps, 8 values"
    assert f"arena {plan.arena_bytes} B, lower bound {plan.lower_bound} B" in lines[1]
    assert "1 of 1 donated inputs written in place" in lines
    picture = [line.split("|")[1] for line in lines if line.endswith("|")]
    assert len(picture) == 24 and {len(row) for row in picture} == {5}
    table = [line for line in lines if "%" in line or "workspace" in line]
    assert [line.split()[3] for line in table] == ["0-1", "1-3", "3-4", "3-3"]
    assert table[2].endswith("%d: f32[4,8] ▸ %e: f32[4,8]")
    assert table[3].endswith("workspace of concat")
    # The letter of a block fills the picture's column of a step in which it is alone.
    assert set("".join(row[2] for row in picture)) == {table[1].split()[0], "."}


def test_copies_are_described():
    text = describe(plan_of(crosswise(2, kept=True)))
    assert "0 of 2 donated inputs written in place" in text
    assert text.count("\ncopy ") == 5 and text.count("temporary of the copies") == 3
