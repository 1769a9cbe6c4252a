"""The text form: parse(print(f)) == f to the last attribute, and errors that name the line."""

import math

import numpy as np
import pytest

from euler_ir import ops
from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder, IRError
from euler_ir.errors import EulerError
from euler_ir.graph import Function, Module, Node, Value
from euler_ir.op import Pointwise
from euler_ir.text import parse_function, parse_module, print_function, print_module
from euler_ir.types import BF16, BOOL, F32, I32, DType, TensorType
from tests.op_cases import fused_op


def squared_error(name="square_error") -> Function:
    with Builder(name) as b:
        x = b.input("x", F32, (8, 4))
        w = b.input("w", F32, (3, 4))
        error = b.matmul(x, w, transpose_b=True) - 1.0
        return b.function({"loss": b.mean(error * error)})


def round_trip(function: Function) -> Function:
    text = print_function(function)
    parsed = parse_function(text)
    assert parsed == function
    assert print_function(parsed) == text
    return parsed


STEP = """\
func @step(%w: f32[4], %g: f32[4]) -> (w: f32[4], g.norm: f32[]) donates(%w -> w) {
  %rate: f32[4] = full() {value = 0.1, dtype = f32, shape = (4,)}
  %0: f32[4] = mul(%g, %rate)  # step.py:7
  %1: f32[4] = sub(%w, %0)  # step.py:8
  %2: f32[] = global_norm(%g)
  return %1, %2
}"""


def test_the_text_is_as_documented():
    with Builder("step") as b:
        b.source = ""
        w, g = b.input("w", F32, (4,)), b.input("g", F32, (4,))
        rate = b.apply(ops.Full(0.1, F32, (4,)), name="rate")
        b.source = "step.py:7"
        change = g * rate
        b.source = "step.py:8"
        new = w - change
        b.source = ""
        norm = b.global_norm([g])
        function = b.function({"w": new, "g.norm": norm}, {"w": "w"})
    assert str(function) == STEP
    assert parse_function(STEP) == function


def test_source_notes_survive_but_take_no_part_in_equality():
    function = parse_function(STEP)
    assert [node.source for node in function.nodes] == ["", "step.py:7", "step.py:8", ""]
    assert parse_function(STEP.replace("step.py:7", "other.py:1")) == function
    assert parse_function(STEP.replace("0.1", "0.2")) != function


def test_round_trip_of_a_gradient():
    function = value_and_grad(squared_error(), ["w", "x"])
    parsed = round_trip(function)
    assert [node.source for node in parsed.nodes] == [node.source for node in function.nodes]


@pytest.mark.parametrize("value", [
    0.0, -0.0, 0.1, 1e-5, 1e300, -1.5e-300, 5e-324, math.pi, math.inf, -math.inf, math.nan,
    float(np.float32(0.1)), 1e16, 123456789.0, 1e22])
def test_floats_are_exact(value):
    with Builder("f") as b:
        function = b.function({"y": b.full(value, F32, (2,))})
    parsed = round_trip(function)
    (found,) = [node.op.value for node in parsed.nodes]
    assert math.copysign(1.0, found) == math.copysign(1.0, value)
    assert found == value or math.isnan(value) and math.isnan(found)


def test_numbers_that_compare_equal_but_print_differently_are_different():
    def of(value, dtype=F32):
        return ops.Full(value, dtype, ())

    assert of(0.0) != of(-0.0)
    assert of(math.nan) == of(float("nan")) and hash(of(math.nan)) == hash(of(float("nan")))
    assert of(1.5) == of(np.float64(1.5)) and hash(of(1.5)) == hash(of(np.float64(1.5)))
    assert of(1, I32) == of(np.int32(1), I32)


def test_numpy_attributes_print_as_numbers():
    op = ops.Broadcast((np.int64(2), np.int32(3)))
    with Builder("f") as b:
        function = b.function({"y": b.apply(op, b.input("x", F32, (3,)))})
    assert "shape = (2, 3)" in print_function(function)
    round_trip(function)


class Everything(Pointwise):
    """An op with an attribute of every kind, outside the package."""
    name = "test_everything"
    text: str
    flag: bool
    dtype: DType
    nested: tuple
    missing: int | None = None

    def scalar(self, x):
        return x


@pytest.mark.parametrize("text", ["", "plain", "it's", 'say "so"', "a\\b", "line\nbreak", "# no",
                                  "%x -> }{", "ünïcode", "\t\0"])
def test_attributes_of_every_kind(text):
    op = Everything(text, True, BF16, ((), (1,), ((2.5, "x"), False, I32)))
    with Builder("f") as b:
        function = b.function({"y": b.apply(op, b.input("x", F32, (3,)))})
    parsed = round_trip(function)
    assert parsed.nodes[0].op == op


def test_attributes_without_a_text_form_are_refused():
    op = Everything("", True, F32, (1, {"a": 2}))
    x, y = (Value(name, TensorType(F32, (1,))) for name in "xy")
    function = Function("f", (x,), (Node(op, (x,), (y,)),), (y,), ("y",))
    with pytest.raises(EulerError, match="test_everything: attribute nested = {'a': 2} has no"):
        print_function(function)


def test_fused_bodies_nest():
    inner = fused_op("row")
    types = [value.type for value in inner.body.inputs]
    with Builder("outer") as b:
        x = b.input("x", types[0].dtype, types[0].shape)
        y, _ = b.apply(inner, x)
        body = b.function({"y": y})
    outer = ops.Fused("row", body)
    with Builder("main") as b:
        x = b.input("x", types[0].dtype, types[0].shape)
        function = b.function({"y": b.apply(outer, x)})
    parsed = round_trip(function)
    assert parsed.nodes[0].op.body.nodes[0].op == inner


def test_several_results_and_none():
    with Builder("f") as b:
        logits, target = b.input("logits", F32, (4, 6)), b.input("target", I32, (4, 1))
        loss, log_sum = b.apply(ops.CrossEntropy(), logits, target, name="loss/row.0")
        function = b.function({"loss": loss, "0": log_sum, "1.5": loss})
    round_trip(function)
    with Builder("nothing") as b:
        round_trip(b.function({}))


def test_a_long_header_has_a_line_an_item():
    with Builder("f") as b:
        inputs = [b.input(f"blocks.{i}.attention.weight", F32, (64, 64)) for i in range(8)]
        function = b.function({value.name: value for value in inputs},
                              {value.name: value.name for value in inputs})
    assert max(map(len, print_function(function).split("\n")[:-2])) < 80
    round_trip(function)


def test_comment_lines_white_space_and_trailing_commas_are_free():
    text = """
    # a comment, then a function whose layout is another
    func @f(
        %x: f32[2, 3],
    ) -> (y: f32[2,3]) {   # opens
      # nothing here
      %y
        : f32[2,3] = neg(
        %x,)  # neg.py:1

      return %y  # done
    }
    # the end
    """
    function = parse_function(text)
    assert [node.source for node in function.nodes] == ["neg.py:1"]
    round_trip(function)


def test_attributes_left_out_take_their_defaults():
    function = parse_function("func @f(%x: f32[2,2]) -> (y: f32[2,2]) {\n"
                              "  %y: f32[2,2] = matmul(%x, %x) {transpose_b = true}\n"
                              "  return %y\n}")
    assert function.nodes[0].op == ops.Matmul(False, True)


def test_modules():
    module = Module({"first": squared_error("first"), "second": squared_error("second")})
    text = print_module(module)
    assert parse_module(text) == module
    assert parse_module("") == Module({})
    with pytest.raises(EulerError, match="two functions are named @first"):
        parse_module(text.replace("@second", "@first"))


def program(*nodes: str, header="func @f(%x: f32[2], %w: f32[2]) -> (y: f32[2]) {",
            end="  return %y\n}") -> str:
    return "\n".join([header, *nodes, end])


NEG = "  %y: f32[2] = neg(%x)"


@pytest.mark.parametrize("text, line, message", [
    ("", 1, "expected 'func', but the text ends"),
    (program(NEG)[:-2], 3, "expected '}', but the text ends"),
    (program(NEG)[:30], 1, "expected"),
    (program(NEG) + "}", 4, "expected the end of the text, found '}'"),
    (program("  %y: f32[2] = nag(%x)"), 2, "no op is named 'nag'"),
    (program("  %y: f32[2] = neg(%z)"), 2, "%z is used before it is defined"),
    (program("  %y: f32[2] = neg(%y)"), 2, "%y is used before it is defined"),
    (program(NEG, NEG), 3, "%y is defined twice"),
    (program("  %x: f32[2] = neg(%w)"), 2, "%x is defined twice"),
    (program("  %y: f32[2], %y: f32[2] = neg(%w)"), 2, "%y is defined twice"),
    (program(NEG, header="func @f(%x: f32[2], %x: f32[2]) -> (y: f32[2]) {"), 1, "defined twice"),
    (program("  y: f32[2] = neg(%x)"), 2, "expected a value (%name), found 'y'"),
    (program("  %y: f8[2] = neg(%x)"), 2, "'f8[2]' is no tensor type; f32[8,128] is one"),
    (program("  %y: f32 = neg(%x)"), 2, "'f32' is no tensor type"),
    (program("  %y: f32[2,] = neg(%x)"), 2, "'f32[2,]' is no tensor type"),
    (program("  %y f32[2] = neg(%x)"), 2, "expected ':', found 'f32[2]'"),
    (program("  %y: f32[2] = neg(%x"), 3, "expected ')', found 'return'"),
    (program("  %y: f32[2] = neg %x"), 2, "expected '(', found '%x'"),
    (program("  %y: f32[2] = neg(%x) {low = 1.0}"), 2, "neg has no attribute 'low'; it has none"),
    (program("  %y: f32[2] = clip(%x) {low = 1.0, hi = 2}"), 2,
     "clip has no attribute 'hi'; it has low, high"),
    (program("  %y: f32[2] = clip(%x) {low = 1.0}"), 2, "clip needs a value for high"),
    (program("  %y: f32[2] = clip(%x)"), 2, "clip needs a value for low, high"),
    (program("  %y: f32[2] = clip(%x) {low = one}"), 2, "'one' is no attribute value"),
    (program("  %y: f32[2] = clip(%x) {low = 1.0"), 3, "expected '}', found 'return'"),
    (program("  %y: f32[2] = clip(%x) {low = 'a"), 2, "' is no attribute value"),
    (program(NEG, header="func f(%x: f32[2]) -> (y: f32[2]) {"), 1, "a function's name (@name)"),
    (program(NEG, end="  return %x, %y\n}"), 3, "1 outputs are declared, 2 returned"),
    (program(NEG, end="  return\n}"), 3, "1 outputs are declared, 0 returned"),
    (program("  %y: f32[3] = neg(%x)"), 3, "output y is declared f32[2], but %y: f32[3]"),
    (program(NEG, end="  return %y\n} trailing"), 4, "expected the end of the text"),
    (program(NEG, header="# note\n\nfunc @f(%x: f32[2]) -> (y: f99[2]) {"), 3, "f99[2]"),
])
def test_errors_name_the_line(text, line, message):
    with pytest.raises(EulerError) as error:
        parse_function(text)
    found = str(error.value)
    assert found.startswith(f"line {line}: ") and message in found and "\n" not in found
    shown = found.rpartition("; in: ")[2]
    assert shown == (text.split("\n")[line - 1].strip() if text else "")


def test_illegal_names_are_refused_when_building():
    for name in ("", "a b", "a-b", "%x", "naïve", "x:0", "a\n"):
        with Builder("f") as b, pytest.raises(IRError, match="is not made of letters, digits"):
            b.input(name, F32, (2,))
        with Builder("f") as b, pytest.raises(IRError, match="output name"):
            b.function({name: b.full(True, BOOL)})
        with Builder(name) as b, pytest.raises(IRError, match="function name"):
            b.function({})
    with Builder("f") as b:
        x = b.input("0", F32, (2,))
        assert (x.name, (x + x).name) == ("0", "1")
        with pytest.raises(IRError, match="value name 'a b'"):
            b.apply(ops.Neg(), x, name="a b")
