"""Reverse mode: whole functions against central differences, and its rules of conduct."""

import numpy as np
import pytest

from euler_ir import interpreter, ops
from euler_ir.autodiff import backpropagate, value_and_grad
from euler_ir.builder import Builder, IRError
from euler_ir.graph import Value
from euler_ir.op import Pointwise
from euler_ir.types import BF16, F32, F64, I32
from euler_ir.verify import verify
from tests.op_cases import rotary_tables


def check(function, inputs, names, output=None):
    """Every element of the gradients of a scalar against central differences in f64."""
    gradient = verify(value_and_grad(function, names, output))
    result = interpreter.run(gradient, inputs, precise=True)
    output = output or function.output_names[0]
    assert result[output] == interpreter.run(function, inputs, precise=True)[output]
    for name in names:
        analytic = result["grad." + name]
        assert analytic.shape == np.shape(inputs[name])
        for place in np.ndindex(analytic.shape):
            values = []
            for step in (1e-5, -1e-5):
                moved = np.array(inputs[name], np.float64)
                moved[place] += step
                values.append(interpreter.run(function, {**inputs, name: moved}, True)[output])
            numeric = (values[0] - values[1]) / 2e-5
            assert abs(analytic[place] - numeric) <= 1e-6 * max(1.0, np.abs(analytic).max()), (
                name, place)


def test_a_transformer_block():
    batch, length, heads, groups, width, vocabulary = 2, 3, 2, 1, 2, 5
    model = heads * width
    rng = np.random.default_rng(0)
    with Builder("block") as b:
        def parameter(name, *shape):
            return b.input(name, F64, shape)

        table = parameter("table", vocabulary, model)
        tokens = b.input("tokens", I32, (batch, length))
        targets = b.input("targets", I32, (batch, length, 1))
        cos, sin = (b.input(name, F64, (length, 1, width)) for name in ("cos", "sin"))
        x = b.gather(table, tokens)
        normed = b.rms_norm(x, parameter("norm", model), 1e-5)
        qkv = b.linear(normed, parameter("qkv", (heads + 2 * groups) * width, model))
        qkv = b.reshape(qkv, (batch, length, heads + 2 * groups, width))
        q = b.rotary(b.part(qkv, 2, 0, heads), cos, sin)
        k = b.rotary(b.part(qkv, 2, heads, heads + groups), cos, sin)
        v = b.part(qkv, 2, heads + groups, heads + 2 * groups)
        lo = b.full(0, I32, (batch, length))
        hi = b.broadcast(b.iota(length), (batch, length)) + 1
        mixed = b.reshape(b.attention(q, k, v, lo, hi), (batch, length, model))
        x = x + b.linear(mixed, parameter("out", model, model))
        up = b.linear(x, parameter("up", 2 * 6, model), parameter("up.bias", 2 * 6))
        gate, value = b.part(up, 2, 0, 6), b.part(up, 2, 6, 12)
        x = x + b.linear(b.swiglu(gate, value), parameter("down", model, 6))
        x = b.layer_norm(x, parameter("final", model), parameter("final.bias", model), 1e-5)
        losses = b.cross_entropy(b.linear(x, table), targets)  # tied: the table has two uses
        function = b.function({"loss": b.mean(losses)})
    inputs = {value.name: 0.5 * rng.standard_normal(value.shape) for value in function.inputs
              if value.dtype is F64}
    inputs["cos"], inputs["sin"] = rotary_tables(length, width)
    inputs["tokens"] = np.array([[0, 1, 0], [4, 0, 2]], np.int32)
    inputs["targets"] = np.array([[1, 0, 3], [0, -1, 4]], np.int32)[..., None]
    names = [name for name in inputs if name not in ("tokens", "targets", "cos", "sin")]
    check(function, inputs, names)


def test_values_used_many_times_and_not_at_all():
    with Builder("f") as b:
        x, unused = b.input("x", F64, (3,)), b.input("unused", F64, (2,))
        y = x * x + x
        b.exp(y)  # nobody reads it
        function = b.function({"y": y, "loss": b.sum(y * y * x)})
    inputs = {"x": np.array([0.3, -1.2, 2.0]), "unused": np.ones(2)}
    check(function, inputs, ["x"], "loss")
    result = interpreter.run(value_and_grad(function, ["unused"], "loss"), inputs)
    assert result["grad.unused"].tolist() == [0.0, 0.0] and unused.name == "unused"


def test_the_output_itself_is_an_input():
    with Builder("f") as b:
        function = b.function({"y": b.input("x", F32, ())})
    assert interpreter.run(value_and_grad(function, ["x"]), {"x": 3.0}) == {"y": 3.0, "grad.x": 1.0}


def test_nothing_flows_through_integers_comparisons_and_signs():
    with Builder("f") as b:
        x = b.input("x", F64, (4,))
        steps = b.cast(b.cast(x * 3.0, I32), F64)
        larger = b.cast(b.less(x, 0.5), F64)
        function = b.function({"y": b.sum(steps + larger + b.sign(x))})
    result = interpreter.run(value_and_grad(function, ["x"]), {"x": np.linspace(-1, 1, 4)})
    assert not result["grad.x"].any()


@pytest.mark.parametrize("shape, target", [((3, 1), (2, 3, 4)), ((), (2, 2)), ((1, 1), (1, 3))])
def test_broadcast_sums_back(shape, target):
    with Builder("f") as b:
        x = b.input("x", F64, shape)
        y = b.broadcast(x, target)
        function = b.function({"y": b.sum(y * y * y)})
    check(function, {"x": np.random.default_rng(1).standard_normal(shape)}, ["x"])


def test_numpys_broadcasting_in_arithmetic():
    rng = np.random.default_rng(2)
    with Builder("f") as b:
        x, y, z = b.input("x", F64, (2, 1, 3)), b.input("y", F64, (4, 1)), b.input("z", F64, ())
        function = b.function({"y": b.sum((x * y - z) / (2.0 + x * x) * (1.0 - y))})
    inputs = {"x": rng.standard_normal((2, 1, 3)), "y": rng.standard_normal((4, 1)),
              "z": rng.standard_normal(())}
    check(function, inputs, ["x", "y", "z"])


def test_ties_share_the_gradient():
    with Builder("f") as b:
        x, y = b.input("x", F32, (3,)), b.input("y", F32, (3,))
        total = b.sum(b.maximum(x, y) + b.minimum(x, y) * 2.0) + b.reduce_max(x, (0,))
        function = b.function({"y": total})
    result = interpreter.run(value_and_grad(function, ["x", "y"]),
                             {"x": [1, 2, 2], "y": [1, 0, 3]})
    assert result["grad.x"].tolist() == [1.5, 1 + 0.5, 2 + 0.5]
    assert result["grad.y"].tolist() == [1.5, 2.0, 1.0]


def test_the_norm_of_zero_has_gradient_zero():
    with Builder("f") as b:
        function = b.function({"y": b.global_norm([b.input("x", F32, (3,))])})
    assert not interpreter.run(value_and_grad(function, ["x"]), {"x": np.zeros(3)})["grad.x"].any()


def test_gradients_have_their_values_types():
    """bf16 operands get bf16 gradients, weights of norms theirs, casts turn back."""
    with Builder("f") as b:
        master, x = b.input("master", F32, (4,)), b.input("x", BF16, (2, 4))
        bias = b.input("bias", BF16, (4,))
        y = b.layer_norm(b.rms_norm(x, b.cast(master, BF16), 1e-5), bias, bias, 1e-5)
        function = b.function({"y": b.cast(b.sum(y * y), F32)})
    gradient = verify(value_and_grad(function, ["master", "x", "bias"]))
    assert [gradient.output("grad." + name).dtype for name in ("master", "x", "bias")] == [
        F32, BF16, BF16]


def test_a_seed_gives_a_vector_jacobian_product():
    with Builder("f") as b:
        x = b.input("x", F64, (2, 3))
        function = b.function({"y": b.softmax(x)})
    rng = np.random.default_rng(3)
    x, seed, step = rng.standard_normal((3, 2, 3))
    product = interpreter.run(value_and_grad(function, ["x"], seed=True), {"x": x, "seed": seed})
    up, down = (interpreter.run(function, {"x": x + e * step})["y"] for e in (1e-5, -1e-5))
    assert np.sum(product["grad.x"] * step) == pytest.approx(
        np.sum(seed * (up - down)) / 2e-5, rel=1e-6)


def test_a_function_inlined_means_the_same_and_keeps_its_notes():
    """Passes may stand between a function and the one it becomes part of."""
    with Builder("part") as b:
        b.segment = "layer"
        x, w = b.input("x", F32, (3,)), b.input("w", F32, (3,))
        part = b.function({"product": x * w, "x": x})
    with Builder("whole") as b:
        inputs = b.inputs_like(part)
        results = b.inline(part, {**inputs, "w": inputs["w"] + 1.0})
        whole = verify(b.function({"y": results["product"] - results["x"]}))
    (copy,) = (node for node in whole.nodes if node.segment)
    assert (copy.op, copy.source, copy.segment) == (
        part.nodes[0].op, part.nodes[0].source, "layer")
    given = {"x": np.arange(3.0), "w": np.array([2.0, 0.0, -1.0])}
    assert interpreter.run(whole, given)["y"].tolist() == [0.0, 0.0, -2.0]
    with Builder("wrong") as b:
        y = b.input("y", F32, (4,))
        with pytest.raises(IRError, match=r"@wrong: %y: f32\[4\] cannot be the input %x: f32\[3\] "
                                          "of @part"):
            b.inline(part, {"x": y, "w": y})


def test_only_the_needed_path_is_built():
    with Builder("f") as b:
        x, w = b.input("x", F32, (4, 4)), b.input("w", F32, (4, 4))
        y = b.matmul(x, w)
        seed = b.full(1.0, F32, y.shape)
        before = len(b.nodes)
        gradients = backpropagate(b, {y: seed}, {w})
        kinds = [node.op.name for node in b.nodes[before:]]
    # Two are built by matmul's rule, but x asked for none and gets none.
    assert kinds.count("matmul") <= 2 and x not in gradients and w in gradients


def test_faults_are_named():
    class Careless(Pointwise):
        """y = x"""
        name = "test_careless"
        answer: str

        def scalar(self, x):
            return x

        def backward(self, b, node, grads):
            wrong = {"none": [], "type": [b.cast(grads[0], F64)],
                     "shape": [b.reshape(grads[0], (4, 1))]}
            return wrong[self.answer]

    for answer, message in (("none", "backward gave 0 gradients for 1 operands"),
                            ("type", r"f64\[4\] as the gradient of %x: f32\[4\]"),
                            ("shape", r"f32\[4,1\] as the gradient of %x: f32\[4\]")):
        with Builder("f") as b:
            x = b.input("x", F32, (4,))
            function = b.function({"y": b.sum(b.apply(Careless(answer), x))})
        with pytest.raises(IRError, match="test_careless: .*" + message):
            value_and_grad(function, ["x"])
    with Builder("f") as b:
        x, i = b.input("x", F32, (4,)), b.input("i", I32, ())
        function = b.function({"vector": x, "integer": i, "mean": b.mean(x)})
    for output in ("vector", "integer"):
        with pytest.raises(IRError, match="@f: can only differentiate a float scalar"):
            value_and_grad(function, ["x"], output)
    with pytest.raises(Exception, match="@f has no input %z"):
        value_and_grad(function, ["z"], "mean")


@pytest.mark.parametrize(("build", "message"), [
    (lambda b, x: b.apply(ops.AttentionBackward(1.0), *_attention(b, x))[0],
     "attention_backward: no gradient through %.*: there is no rule for second derivatives"),
    (lambda b, x: b.apply(ops.AdamW((0.0,)), *[x] * 4, b.full(0.1, F32), b.full(0, I32),
                          *[b.full(1.0, F32)] * 2)[0],
     "adamw: no gradient through %.*: an update is not differentiated"),
])
def test_ops_without_a_gradient_say_so(build, message):
    with Builder("f") as b:
        x = b.input("x", F32, (1, 2, 1, 4))
        function = b.function({"y": b.sum(build(b, x))})
    with pytest.raises(IRError, match=message + r" \(test_autodiff.py:\d+\)"):
        value_and_grad(function, ["x"])


def _attention(b: Builder, x: Value) -> tuple[Value, ...]:
    """Operands of attention_backward, all made of x."""
    lo, hi = (b.full(n, I32, x.shape[:2]) for n in (0, 2))
    return (x, x, x, lo, hi, *b.apply(ops.Attention(1.0), x, x, x, lo, hi), x)
