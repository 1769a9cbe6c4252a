"""The verifier accepts what the builder makes, and names the fault in what it should not have."""

import pytest

from backends.backend import create
from euler_ir import ops
from euler_ir.autodiff import value_and_grad
from euler_ir.builder import Builder, IRError
from euler_ir.graph import Function, Node, Value
from euler_ir.op import Pointwise
from euler_ir.text import parse_function
from euler_ir.types import F32, I32, TensorType
from euler_ir.verify import verify
from runtime.compiler.driver import compile_function

VECTOR = TensorType(F32, (4,))


def refused(function: Function) -> str:
    with pytest.raises(IRError) as error:
        verify(function)
    message = str(error.value)
    assert message.startswith(f"@{function.name}: ") and "\n" not in message
    return message


def program(*lines: str, inputs="%w: f32[4], %g: f32[4], %m: f32[4]", outputs="w: f32[4]",
            donates="%w -> w") -> Function:
    donations = f" donates({donates})" if donates else ""
    return parse_function("\n".join([f"func @f({inputs}) -> ({outputs}){donations} {{",
                                     *lines, "}"]))


def test_accepts_what_builder_and_autodiff_make():
    with Builder("f") as b:
        x, w = b.input("x", F32, (2, 3, 4)), b.input("w", F32, (5, 4))
        y = b.softmax(b.linear(x, w))
        function = b.function({"loss": b.mean(y * y), "y": y})
    assert verify(function) is function
    verify(value_and_grad(function, ["x", "w"]))


# Single assignment and types

def value(name: str, type_: TensorType = VECTOR) -> Value:
    return Value(name, type_)


def of_nodes(*nodes: Node, inputs=(), outputs=(), names=None) -> Function:
    return Function("f", tuple(inputs), nodes, tuple(outputs),
                    tuple(v.name for v in outputs) if names is None else names)


def test_use_before_definition():
    x, y, z = value("x"), value("y"), value("z")
    message = refused(of_nodes(Node(ops.Neg(), (y,), (z,), "a.py:2"), Node(ops.Neg(), (x,), (y,)),
                               inputs=[x], outputs=[z]))
    assert message == "@f: neg(%y: f32[4]) reads %y: f32[4] before it is defined (a.py:2)"


def test_use_of_another_functions_value_of_the_same_name():
    x, stranger, y = value("x"), value("x"), value("y")
    message = refused(of_nodes(Node(ops.Neg(), (stranger,), (y,)), inputs=[x], outputs=[y]))
    assert "reads %x: f32[4] before it is defined (the neg that defines %y)" in message


def test_two_values_of_one_name():
    x, y, again = value("x"), value("y"), value("y")
    nodes = (Node(ops.Neg(), (x,), (y,), "a.py:1"), Node(ops.Neg(), (x,), (again,), "a.py:2"))
    assert refused(of_nodes(*nodes, inputs=[x], outputs=[y])) == (
        "@f: %y is defined twice (a.py:1 and a.py:2)")
    assert "%x is defined twice (input and input)" in refused(of_nodes(inputs=[x, value("x")]))
    assert "%y is defined twice" in refused(
        of_nodes(Node(ops.Neg(), (x,), (y,)), Node(ops.Neg(), (x,), (y,)), inputs=[x]))


@pytest.mark.parametrize("name", ["", "a b", "x\n", "%x"])
def test_illegal_names(name):
    x = value("x")
    assert f"value name {name!r}" in refused(of_nodes(inputs=[value(name)]))
    assert f"output name {name!r}" in refused(of_nodes(inputs=[x], outputs=[x], names=(name,)))


@pytest.mark.parametrize("type_", [TensorType(F32, (-1,)), TensorType(F32, [4]),
                                   TensorType("f32", (4,)), TensorType(F32, (2.5,))])
def test_invalid_types(type_):
    assert "%x has no valid type" in refused(of_nodes(inputs=[value("x", type_)]))


def test_declared_types_must_be_the_inferred_ones():
    x, y = value("x"), value("y", TensorType(F32, (5,)))
    assert refused(of_nodes(Node(ops.Neg(), (x,), (y,), "a.py:3"), inputs=[x], outputs=[y])) == (
        "@f: neg(%x: f32[4]) gives f32[4], but the node declares %y: f32[5] (a.py:3)")
    y, z = value("y"), value("z")
    message = refused(of_nodes(Node(ops.Neg(), (x,), (y, z)), inputs=[x]))
    assert "gives f32[4], but the node declares %y: f32[4], %z: f32[4]" in message


def test_operands_that_the_op_refuses():
    x, w, y = value("x"), value("w", TensorType(I32, (4,))), value("y")
    assert refused(of_nodes(Node(ops.Add(), (x, w), (y,), "a.py:3"), inputs=[x, w])) == (
        "@f: add(%x: f32[4], %w: i32[4]) needs 'add' of one type, got f32 and i32; cast one of "
        "them (a.py:3)")
    assert "add(%x: f32[4]) needs 2 operands, got f32[4]" in refused(
        of_nodes(Node(ops.Add(), (x,), (y,)), inputs=[x]))


def test_op_that_is_not_registered():
    class Impostor(ops.Neg):
        """An op that took a name without registering."""

    x, y = value("x"), value("y")
    message = refused(of_nodes(Node(Impostor(), (x,), (y,), "a.py:1"), inputs=[x], outputs=[y]))
    assert "Impostor is not the op registered as 'neg' (a.py:1)" in message


def test_ops_from_outside_are_accepted():
    class Cube(Pointwise):
        """y = x³"""
        name = "test_cube"

        def scalar(self, x):
            return x * x * x

    with Builder("f") as b:
        verify(b.function({"y": b.apply(Cube(), b.input("x", F32, (3,)))}))


def test_fused_bodies_are_verified():
    x, y, z = value("x"), value("y", TensorType(F32, (5,))), value("z", TensorType(F32, (5,)))
    body = Function("body", (x,), (Node(ops.Neg(), (x,), (y,)),), (y,), ("y",))
    w = value("w")
    with pytest.raises(IRError, match="@body: neg"):
        verify(of_nodes(Node(ops.Fused("row", body), (w,), (z,)), inputs=[w], outputs=[z]))


def test_outputs():
    x = value("x")
    assert "output y is %y: f32[4], which nothing defines" in refused(
        of_nodes(inputs=[x], outputs=[value("y")]))
    assert "two outputs are named y" in refused(
        of_nodes(inputs=[x], outputs=[x, x], names=("y", "y")))


# Donations

UPDATE = "  %new: f32[4] = sub(%w, %g)  # step.py:1"


@pytest.mark.parametrize("lines, outputs, donates", [
    ([UPDATE, "  return %new"], "w: f32[4]", "%w -> w"),
    # Read before, by a view and directly.
    (["  %v: f32[2,2] = reshape(%w) {shape = (2, 2)}", "  %n: f32[2,2] = neg(%v)", UPDATE,
      "  return %new, %n"], "w: f32[4], n: f32[2,2]", "%w -> w"),
    # A copy of the old value may be read at any time.
    (["  %old: f32[4] = neg(%w)", UPDATE, "  %n: f32[4] = neg(%old)", "  return %new, %n"],
     "w: f32[4], n: f32[4]", "%w -> w"),
    # Unchanged, and unchanged through a view.
    (["  %n: f32[4] = neg(%w)", "  return %w, %n"], "w: f32[4], n: f32[4]", "%w -> w"),
    (["  %v: f32[4] = reshape(%w) {shape = (4,)}", "  %n: f32[4] = neg(%w)", "  return %v, %n"],
     "w: f32[4], n: f32[4]", "%w -> w"),
    ([UPDATE, "  %b: f32[4] = sub(%m, %g)", "  return %new, %b"], "w: f32[4], m: f32[4]",
     "%w -> w, %m -> m"),
    # The old value as another output, itself and through a view: the scheduler keeps it.
    ([UPDATE, "  return %new, %w"], "w: f32[4], old: f32[4]", "%w -> w"),
    (["  %v: f32[2,2] = reshape(%w) {shape = (2, 2)}", UPDATE, "  return %new, %v"],
     "w: f32[4], old: f32[2,2]", "%w -> w"),
])
def test_safe_donations(lines, outputs, donates):
    verify(program(*lines, outputs=outputs, donates=donates))


@pytest.mark.parametrize("lines, outputs, donates, message", [
    ([UPDATE, "  %n: f32[4] = neg(%w)  # step.py:2", "  return %new, %n"],
     "w: f32[4], n: f32[4]", "%w -> w",
     "@f: neg reads %w: f32[4], whose memory was donated and is overwritten by %new: f32[4] = "
     "sub(%w, %g) (step.py:1) (step.py:2)"),
    (["  %v: f32[2,2] = reshape(%w) {shape = (2, 2)}", UPDATE, "  %n: f32[2,2] = neg(%v)",
      "  return %new, %n"], "w: f32[4], n: f32[2,2]", "%w -> w", "neg reads %v: f32[2,2], whose"),
    (["  %v: f32[2] = slice(%w) {starts = (1,), stops = (3,)}",
      "  %u: f32[2,1] = reshape(%v) {shape = (2, 1)}", UPDATE, "  %n: f32[2,1] = neg(%u)",
      "  return %new, %n"], "w: f32[4], n: f32[2,1]", "%w -> w", "neg reads %u: f32[2,1], whose"),
    ([UPDATE, "  %v: f32[2,2] = reshape(%w) {shape = (2, 2)}", "  return %new, %v"],
     "w: f32[4], v: f32[2,2]", "%w -> w", "reshape reads %w: f32[4], whose memory"),
    ([UPDATE, "  return %new"], "w: f32[4]", "%z -> w", "%z is donated, but is no input"),
    ([UPDATE, "  return %new"], "w: f32[4]", "%new -> w", "%new is donated, but is no input"),
    ([UPDATE, "  return %new"], "w: f32[4]", "%w -> z", "donated to z, which is no output"),
    ([UPDATE, "  return %new"], "w: f32[4]", "%w -> w, %g -> w",
     "%w and %g are both donated to w"),
    ([UPDATE, "  %v: f32[2,2] = reshape(%new) {shape = (2, 2)}", "  return %v"], "w: f32[2,2]",
     "%w -> w", "%w: f32[4] is donated to w, which is %v: f32[2,2]; their types must agree"),
    ([UPDATE, "  %n: f32[4] = sub(%m, %g)", "  return %new, %new"], "w: f32[4], m: f32[4]",
     "%w -> w, %m -> m", "sub reads %m: f32[4], whose memory was donated"),
])
def test_unsafe_donations(lines, outputs, donates, message):
    assert message in refused(program(*lines, outputs=outputs, donates=donates))


def test_only_well_formed_functions_are_compiled():
    """Another builder's value would have no memory; the error should not be the scheduler's."""
    with Builder("other") as other:
        stranger = other.input("stranger", F32, (4,))
    with Builder("f") as b:
        function = b.function({"y": b.input("x", F32, (4,)) + stranger})
    with pytest.raises(IRError, match=r"@f: add\(.*\) reads %stranger: f32\[4\] before it is"):
        compile_function(function, create("reference"))
