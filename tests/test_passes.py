"""Passes keep the meaning of functions, give valid IR, and do what they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from euler_ir import ops
from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder
from euler_ir.graph import Function
from euler_ir.interpreter import run
from euler_ir.op import REGISTRY
from euler_ir.passes.cse import eliminate_common_subexpressions
from euler_ir.passes.dce import eliminate_dead_code
from euler_ir.passes.decompose import decompose
from euler_ir.passes.epilogue import fuse_epilogues
from euler_ir.passes.fuse import fuse_rows
from euler_ir.passes.pipeline import optimize
from euler_ir.passes.simplify import simplify
from euler_ir.text import parse_function, print_function
from euler_ir.types import F32, I32
from euler_ir.verify import verify
from model.config import PRESETS, ModelConfig, shrink
from model.objective import evaluation_function, training_step
from model.optimizer import AdamWConfig
from model.transformer import forward_cached, rotary_tables
from tests.random_functions import random_function, random_inputs

COMPOSITES = {"attention", "attention_backward"}


def op_names(function: Function) -> list[str]:
    return [node.op.name for node in function.nodes]


def bodies(function: Function, kind: str) -> list[list[str]]:
    return [op_names(node.op.body) for node in function.nodes
            if isinstance(node.op, ops.Fused) and node.op.kind == kind]


def assert_same(before: Function, after: Function, inputs: dict) -> None:
    assert_gives(run(before, inputs, precise=True), after, inputs)


def assert_gives(expected: dict, after: Function, inputs: dict) -> None:
    verify(after)
    got = run(after, inputs, precise=True)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


SMALL = {name: shrink(PRESETS[name]) for name in ("nano-1m", "gpt2-124m")}


def model_functions(small: ModelConfig) -> list[Function]:
    optimizer = AdamWConfig()
    return [training_step(small, optimizer, 2, 8, False)["step"],
            training_step(small, optimizer, 2, 8, True)["accumulate"],
            training_step(small, optimizer, 2, 8, True)["apply"],
            evaluation_function(small, 2, 8),
            forward_cached(small, 1, 1, 8), forward_cached(small, 2, 4, 8)]


def model_inputs(function: Function, small: ModelConfig) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    inputs = {}
    for value in function.inputs:
        if value.dtype.is_float:
            array = np.abs(generator.normal(size=value.shape)) * 0.3
            inputs[value.name] = array if value.name.startswith("v.") else array - 0.2
        else:
            inputs[value.name] = generator.integers(0, 4, value.shape)
    inputs.update({name: table for name, table
                   in rotary_tables(small, np.float64).items()
                   if name in inputs})
    if "hi" in inputs:
        inputs["lo"] = np.zeros_like(inputs["lo"])
        inputs["hi"] = np.broadcast_to(np.arange(1, 9), inputs["hi"].shape)
    if "norm_limit" in inputs:
        inputs["norm_limit"] = np.array(1e6)
    return inputs


@pytest.mark.parametrize(("preset", "function"), [
    pytest.param(name, function, id=f"{name}-{function.name}")
    for name, small in SMALL.items() for function in model_functions(small)])
@pytest.mark.parametrize("composites", [(), COMPOSITES], ids=["decomposed", "kernels"])
def test_every_stage_of_a_models_functions_is_valid_and_equal(preset, function, composites):
    stages = []
    optimize(function, composites, observer=lambda name, stage: stages.append((name, stage)))
    inputs = model_inputs(function, SMALL[preset])
    expected = run(function, inputs, precise=True)
    for _, stage in stages:
        assert parse_function(print_function(stage)) == stage
        assert_gives(expected, stage, inputs)
    if composites:
        assert len(stages[-1][1].nodes) < len(stages[0][1].nodes)


@pytest.mark.parametrize("seed", range(60))
def test_random_functions_keep_their_meaning(seed):
    function = random_function(seed)
    inputs = random_inputs(function, seed)
    after = optimize(function)
    verify(after)
    before, got = run(function, inputs), run(after, inputs)
    for name, array in before.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_presets_parse_back_from_their_text():
    for config in PRESETS.values():
        config, time = replace(config, layers=2), min(config.context, 64)
        function = optimize(training_step(config, AdamWConfig(), 1, time, False)["step"],
                            COMPOSITES)
        assert parse_function(print_function(function)) == function


def test_dead_code_goes_with_what_only_it_needed():
    with Builder() as b:
        x = b.input("x", F32, (4,))
        b.exp(b.tanh(x))
        f = b.function({"y": x + 1.0})
    assert op_names(eliminate_dead_code(f)) == ["full", "add"]


def test_equal_expressions_are_computed_once():
    with Builder() as b:
        x = b.input("x", F32, (4,))
        f = b.function({"y": b.exp(x) * b.exp(x), "z": b.tanh(x)})
    after = eliminate_common_subexpressions(f)
    assert op_names(after) == ["exp", "mul", "tanh"]
    assert_same(f, after, {"x": np.arange(4.0)})


def test_ops_that_differ_in_an_attribute_stay_apart():
    with Builder() as b:
        x = b.input("x", F32, (4,))
        f = b.function({"y": b.clip(x, 0, 1) + b.clip(x, 0, 2)})
    assert op_names(eliminate_common_subexpressions(f)).count("clip") == 2


@pytest.mark.parametrize("build", [
    lambda b, x: x + 0.0,
    lambda b, x: 0.0 + x,
    lambda b, x: x * 1.0,
    lambda b, x: x - 0.0,
    lambda b, x: x / 1.0,
    lambda b, x: b.arithmetic("neg", -x),
    lambda b, x: b.reshape(b.reshape(x, (6, 4)), (4, 6)),
    lambda b, x: b.transpose(b.transpose(x, (1, 0)), (1, 0)),
    lambda b, x: b.part(x, 0, 0, 4),
    lambda b, x: b.concat([x], 1),
    lambda b, x: b.pad(x, (4, 6), (0, 0)),
    lambda b, x: b.apply(ops.Broadcast((4, 6)), x),
    lambda b, x: b.apply(ops.Cast(F32), x),
    lambda b, x: b.reshape(b.reduce_sum(b.reshape(x, (4, 1, 6)), (1,)), (4, 6)),
])
def test_simplify_finds_the_operand_itself(build):
    with Builder() as b:
        x = b.input("x", F32, (4, 6))
        f = b.function({"y": build(b, x)})
    assert eliminate_dead_code(simplify(f)).outputs == (x,)


def test_simplify_does_not_touch_what_nan_would_show():
    with Builder() as b:
        x = b.input("x", F32, (4,))
        f = b.function({"zero": x * 0.0, "difference": x - x, "ratio": x / x})
    after = simplify(f)
    got = run(after, {"x": np.array([np.nan, np.inf, 0.0, 2.0])})
    assert np.isnan(got["zero"][:2]).all() and np.isnan(got["difference"][:2]).all()
    assert np.isnan(got["ratio"][:3]).all()


def test_decompose_keeps_the_composites_with_kernels():
    with Builder() as b:
        q = b.input("q", F32, (1, 4, 2, 4))
        lo, hi = b.input("lo", I32, (1, 4)), b.input("hi", I32, (1, 4))
        f = b.function({"o": b.attention(q, q, q, lo, hi)})
    assert op_names(decompose(f, {"attention"})) == ["attention"]
    assert "attention" not in op_names(decompose(f))


def matmul_function(consume) -> Function:
    with Builder() as b:
        x, w = b.input("x", F32, (5, 3)), b.input("w", F32, (4, 3))
        bias, other = b.input("bias", F32, (4,)), b.input("other", F32, (5, 4))
        return b.function(consume(b, x, w, bias, other))


@pytest.mark.parametrize("consume, body", [
    (lambda b, x, w, bias, other: {"y": b.linear(x, w, bias)}, ["matmul", "broadcast", "add"]),
    (lambda b, x, w, bias, other: {"y": b.gelu(b.linear(x, w, bias)) + other},
     ["matmul", "broadcast", "add", "gelu", "add"]),
    (lambda b, x, w, bias, other: {"y": other + b.linear(x, w) * 2.0},
     ["matmul", "full", "mul", "add"]),
])
def test_epilogues_take_the_chain_of_pointwise_consumers(consume, body):
    f = matmul_function(consume)
    after = eliminate_dead_code(fuse_epilogues(f))
    assert [sorted(names) for names in bodies(after, "matmul")] == [sorted(body)]
    generator = np.random.default_rng(0)
    assert_same(f, after, {v.name: generator.normal(size=v.shape) for v in f.inputs})


@pytest.mark.parametrize("consume", [
    lambda b, x, w, bias, other: {"y": b.linear(x, w), "z": b.exp(b.linear(x, w))},
    lambda b, x, w, bias, other: {"y": (m := b.linear(x, w)) * 2.0, "z": b.exp(m)},
    lambda b, x, w, bias, other: {"y": b.softmax(b.linear(x, w))},
    lambda b, x, w, bias, other: {"y": (m := b.linear(x, w)), "z": m + 1.0},
])
def test_epilogues_leave_results_that_others_read(consume):
    f = eliminate_common_subexpressions(matmul_function(consume))
    assert not bodies(fuse_epilogues(f), "matmul")


def test_an_epilogue_operand_must_be_known_before_the_matmul_runs():
    with Builder() as b:
        x, w = b.input("x", F32, (4, 4)), b.input("w", F32, (4, 4))
        y = b.linear(x, w)
        late = b.exp(b.softmax(b.linear(w, x)))
        f = b.function({"y": y + late})
    after = fuse_epilogues(f)
    assert_same(f, after, {"x": np.eye(4), "w": np.ones((4, 4))})
    assert not bodies(after, "matmul")


def test_a_chain_and_its_row_op_become_one_kernel():
    with Builder() as b:
        x, y = b.input("x", F32, (6, 8)), b.input("y", F32, (6, 8))
        w = b.input("w", F32, (8,))
        total = x * y + x
        f = b.function({"normed": b.rms_norm(total, w, 1e-5), "total": total})
    after = eliminate_dead_code(fuse_rows(f))
    assert bodies(after, "row") == [["mul", "add", "rms_norm"]]
    generator = np.random.default_rng(0)
    assert_same(f, after, {v.name: generator.normal(size=v.shape) for v in f.inputs})


def test_loss_and_its_gradient_become_one_kernel():
    """Forward and backward of cross-entropy read the logits once."""
    with Builder() as b:
        logits = b.input("logits", F32, (6, 9))
        target, weight = b.input("target", I32, (6, 1)), b.input("weight", F32, (6, 1))
        f = b.function({"loss": b.sum(b.cross_entropy(logits, target) * weight)})
    f = simplify(value_and_grad(f, ["logits"]))
    after = eliminate_dead_code(fuse_rows(f))
    assert any({"cross_entropy", "cross_entropy_backward"} <= set(names)
               for names in bodies(after, "row"))
    assert_same(f, after, {"logits": np.random.default_rng(0).normal(size=(6, 9)),
                           "target": np.array([[0], [8], [-1], [3], [3], [5]]),
                           "weight": np.linspace(0, 1, 6)[:, None]})


def test_fusion_makes_no_cycle():
    """a and c could share a kernel, but c needs b (a matmul), which needs a."""
    with Builder() as b:
        x = b.input("x", F32, (4, 4))
        first = b.exp(x)
        second = b.matmul(first, x)
        f = b.function({"y": first * second, "z": b.tanh(x)})
    after = eliminate_dead_code(fuse_rows(f))
    assert_same(f, after, {"x": np.arange(16.0).reshape(4, 4) / 16})
    assert op_names(after).index("matmul") in (1, 2)


def test_a_row_op_over_one_value_a_row_stays_out_of_kernels_with_longer_rows():
    with Builder() as b:
        x = b.input("x", F32, (5, 3))
        loss = b.cross_entropy(x, b.input("target", I32, (5, 1)))
        f = b.function({"y": b.softmax(loss) * x})
    after = eliminate_dead_code(fuse_rows(f))
    assert op_names(after) == ["cross_entropy", "softmax", "fused"]
    assert bodies(after, "row") == [["broadcast", "mul"]]
    assert_same(f, after, {"x": np.arange(15.0).reshape(5, 3),
                           "target": np.zeros((5, 1), np.int32)})


def test_column_sums_of_a_single_row_are_not_read_in_the_kernel_that_makes_them():
    with Builder() as b:
        x, weight, g = (b.input(name, F32, (8,)) for name in ("x", "weight", "g"))
        dx, dw = b.apply(REGISTRY["rms_norm_backward"](1e-5), x, weight, g)
        f = b.function({"dx": dx, "dw": dw + weight})
    after = fuse_rows(f)
    assert op_names(after) == ["rms_norm_backward", "add"]
    inputs = {name: np.linspace(0.5, 2.0, 8) for name in ("x", "weight", "g")}
    assert_same(f, after, inputs)


def test_swiglu_reads_and_writes_the_packed_halves_in_place():
    with Builder() as b:
        packed, g = b.input("packed", F32, (6, 16)), b.input("g", F32, (6, 8))
        gate, up = b.split(packed, -1, (8, 8))
        f = b.function({"y": b.sum(b.swiglu(gate, up) * g)})
    f = decompose(value_and_grad(f, ["packed"]))
    after = eliminate_dead_code(fuse_rows(simplify(f)))
    names = op_names(after)
    assert "slice" not in names and "concat" not in names
    generator = np.random.default_rng(0)
    assert_same(f, after, {v.name: generator.normal(size=v.shape) for v in f.inputs})


def test_readers_of_donated_memory_stay_before_its_writer():
    """exp(x) must not move behind the node whose result takes x's memory."""
    with Builder() as b:
        x, w = b.input("x", F32, (4, 4)), b.input("w", F32, (4, 4))
        product = b.matmul(w, w)
        old = b.softmax(x)
        new = product + x
        f = b.function({"x": new, "old": old, "mixed": b.exp(new * old)}, {"x": "x"})
    verify(f)
    after = optimize(f)
    assert_same(f, after, {"x": np.eye(4), "w": np.ones((4, 4))})
