"""The verifier: is a function well formed? Passes get and give functions that it accepts.

It checks single assignment (every value defined once, before its uses, under a name of its own),
that every op is registered and infers the result types that the node declares, and that donations
are safe. A fault raises IRError with the op, the values and the source line of the builder call.
"""

from __future__ import annotations

import re
from typing import NoReturn

from euler_ir.builder import IRError
from euler_ir.graph import NAME, Function, Node, Value
from euler_ir.op import REGISTRY, result_types
from euler_ir.types import DType, ShapeError, TensorType

_LEGAL_NAME = re.compile(NAME)


def verify(function: Function) -> Function:
    """The function itself, if it is well formed; raises IRError with the first fault if not."""
    _check_name(function, "function", function.name)
    defined: set[Value] = set()
    names: dict[str, str] = {}
    for value in function.inputs:
        _define(function, value, defined, names, "input")
    for node in function.nodes:
        _check_node(function, node, defined)
        for value in node.outputs:
            _define(function, value, defined, names, _place(node))
    _check_outputs(function, defined)
    _check_donations(function)
    return function


def _fail(function: Function, message: str, node: Node | None = None) -> NoReturn:
    raise IRError(f"@{function.name}: {message}" + (f" ({_place(node)})" if node else ""))


def _place(node: Node) -> str:
    return node.source or f"the {node.op.name} that defines %{node.outputs[0].name}"


def _check_name(function: Function, kind: str, name: str) -> None:
    if not _LEGAL_NAME.fullmatch(name):
        _fail(function, f"{kind} name {name!r} is not made of letters, digits, '_', '.' and '/'")


def _define(function: Function, value: Value, defined: set[Value], names: dict[str, str],
            place: str) -> None:
    _check_name(function, "value", value.name)
    if value.name in names:
        _fail(function, f"%{value.name} is defined twice ({names[value.name]} and {place})")
    dtype, shape = value.type.dtype, value.type.shape
    if not isinstance(dtype, DType) or not isinstance(shape, tuple) or any(
            isinstance(n, bool) or n != int(n) or n < 0 for n in shape):
        _fail(function, f"%{value.name} has no valid type: {dtype} {shape} ({place})")
    defined.add(value)
    names[value.name] = place


def _check_node(function: Function, node: Node, defined: set[Value]) -> None:
    op = node.op
    if REGISTRY.get(op.name) is not type(op):
        _fail(function, f"{_call(node)}: the class {type(op).__qualname__} is not the op "
                        f"registered as '{op.name}'", node)
    for value in node.inputs:
        if value not in defined:
            _fail(function, f"{_call(node)} reads {value!r} before it is defined", node)
    try:
        expected = result_types(op, [value.type for value in node.inputs])
    except ShapeError as error:
        _fail(function, f"{_call(node)} needs {error}", node)
    declared = tuple(value.type for value in node.outputs)
    if declared != expected:
        _fail(function, f"{_call(node)} gives {_listed(expected)}, but the node declares "
                        + ", ".join(map(repr, node.outputs)), node)
    for attribute in op.attributes().values():
        if isinstance(attribute, Function):
            verify(attribute)


def _call(node: Node) -> str:
    return f"{node.op.name}({', '.join(map(repr, node.inputs))})"


def _listed(types: tuple[TensorType, ...]) -> str:
    return ", ".join(map(str, types)) or "nothing"


def _check_outputs(function: Function, defined: set[Value]) -> None:
    for name, value in zip(function.output_names, function.outputs, strict=True):
        _check_name(function, "output", name)
        if value not in defined:
            _fail(function, f"output {name} is {value!r}, which nothing defines")
    for name in function.output_names:
        if function.output_names.count(name) > 1:
            _fail(function, f"two outputs are named {name}")


def _check_donations(function: Function) -> None:
    """A donated input's memory becomes the output's: types agree, and from the node after the one
    that defines the output on, no node reads the input or a view of it. (Another output may still
    be the old value: the scheduler keeps it.)"""
    inputs = {value.name: value for value in function.inputs}
    takers: dict[str, str] = {}
    for source, target in function.donations.items():
        if source not in inputs:
            _fail(function, f"%{source} is donated, but is no input")
        if target not in function.output_names:
            _fail(function, f"%{source} is donated to {target}, which is no output")
        if target in takers:
            _fail(function, f"%{takers[target]} and %{source} are both donated to {target}")
        takers[target] = source
        if function.output(target).type != inputs[source].type:
            _fail(function, f"{inputs[source]!r} is donated to {target}, which is "
                            f"{function.output(target)!r}; their types must agree")
    if takers:
        donated: dict[Value, list[Value]] = {}
        for target, source in takers.items():
            donated.setdefault(function.output(target), []).append(inputs[source])
        _check_reads(function, donated)


def _check_reads(function: Function, donated: dict[Value, list[Value]]) -> None:
    """No input is read once a value that takes it over is written; `donated` are those of each."""
    roots = _viewed_inputs(function)
    overwritten: dict[Value, Node] = {}
    for node in function.nodes:
        for value in node.inputs:
            writer = overwritten.get(roots.get(value))
            if writer is not None:
                _fail(function, f"{node.op.name} reads {value!r}, whose memory was donated and is "
                                f"overwritten by {writer!r} ({_place(writer)})", node)
        for taker in node.outputs:
            if taker not in roots:
                overwritten.update(dict.fromkeys(donated.get(taker, ()), node))


def _viewed_inputs(function: Function) -> dict[Value, Value]:
    """The input that each value lies in: inputs in themselves, views in what they view."""
    roots = {value: value for value in function.inputs}
    for node in function.nodes:
        if node.inputs and node.inputs[0] in roots:
            if node.op.alias(*(value.type for value in node.inputs)) is not None:
                roots[node.output] = roots[node.inputs[0]]
    return roots
