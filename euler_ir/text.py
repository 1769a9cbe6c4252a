"""The text form of functions: print and parse, with `parse_function(print_function(f)) == f`.

    func @step(%w: f32[4], %g: f32[4]) -> (w: f32[4]) donates(%w -> w) {
      %0: f32[4] = full() {value = 0.1, dtype = f32, shape = (4,)}  # step.py:7
      %1: f32[4] = mul(%g, %0)  # step.py:7
      %2: f32[4] = sub(%w, %1)  # step.py:7
      return %2
    }

One statement a node: results with their types, the op, its operands, then every attribute in
braces, defaults included, so that a text keeps its meaning when a default changes. Attributes are
numbers (floats in Python's shortest exact form, `inf`, `-inf`, `nan`), `true`, `false`, `none`,
'strings', element types, tuples, and functions (the body of `fused`). A comment behind a node is
its source note and [segment]; lines that hold only a comment are skipped. Names are letters,
digits, `_`, `.` and `/`. White space separates tokens and is otherwise free.
"""

from __future__ import annotations

import ast
import numbers
import re
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from euler_ir import ops  # noqa: F401 - fills the registry that parsing looks ops up in
from euler_ir.errors import EulerError
from euler_ir.graph import NAME, Function, Module, Node, Value
from euler_ir.op import REGISTRY, Op
from euler_ir.types import DType, TensorType

_WIDTH = 100


def print_function(function: Function) -> str:
    """The function's text, without a newline at the end. Raises EulerError for an attribute of a
    type that the text form does not have."""
    return "\n".join(_function_lines(function, ""))


def print_module(module: Module) -> str:
    """The functions' texts, an empty line between two; a function's name is its key's."""
    return "\n\n".join(print_function(f.replace(name=name)) for name, f in module.functions.items())


def parse_function(text: str) -> Function:
    """The one function in the text. Raises EulerError with the line where it is not well formed;
    types are taken as written (`euler_ir.verify` checks them)."""
    parser = _Parser(text)
    function = parser.function()
    parser.expect("")
    return function


def parse_module(text: str) -> Module:
    """All functions in the text by name."""
    parser = _Parser(text)
    functions: dict[str, Function] = {}
    while parser.peek():
        function = parser.function()
        if function.name in functions:
            parser.fail(f"two functions are named @{function.name}", back=1)
        functions[function.name] = function
    return Module(functions)


# Printing

def _function_lines(function: Function, indent: str) -> list[str]:
    lines = _header(function, indent)
    for node in function.nodes:
        results = ", ".join(map(_typed, node.outputs))
        operands = ", ".join([f"%{value.name}" for value in node.inputs])
        note = _note(node)
        attributes = _attributes(node.op, indent)
        lines.append(f"{indent}  {results} = {node.op.name}({operands}){attributes}{note}")
    returned = ", ".join([f"%{value.name}" for value in function.outputs])
    lines.append(f"{indent}  return {returned}".rstrip())
    lines.append(indent + "}")
    return lines


def _header(function: Function, indent: str) -> list[str]:
    """`func @name(inputs) -> (outputs) donates(…) {`, an item a line where one line is too long."""
    inputs = [_typed(value) for value in function.inputs]
    outputs = [f"{name}: {value.type}" for name, value
               in zip(function.output_names, function.outputs, strict=True)]
    donations = [f"%{source} -> {target}" for source, target in function.donations.items()]

    def header(listed) -> str:
        donates = f" donates({listed(donations)})" if donations else ""
        return (f"{indent}func @{function.name}({listed(inputs)}) -> ({listed(outputs)})"
                f"{donates} {{")

    line = header(", ".join)
    if len(line) <= _WIDTH:
        return [line]
    inner = "\n" + indent + "    "
    return header(lambda items: inner + ("," + inner).join(items) if items else "").split("\n")


def _typed(value: Value) -> str:
    return f"%{value.name}: {value.type}"


def _attributes(op: Op, indent: str) -> str:
    attributes = op.attributes()
    if not attributes:
        return ""
    printed = []
    for name, value in attributes.items():
        if isinstance(value, Function):
            printed.append(f"{name} =\n" + "\n".join(_function_lines(value, indent + "    ")))
        else:
            printed.append(f"{name} = {_print_value(op, name, value)}")
    return f" {{{', '.join(printed)}}}"


def _print_value(op: Op, name: str, value: Any) -> str:
    if isinstance(value, tuple):
        items = [_print_value(op, name, item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, DType):
        return str(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    raise EulerError(f"{op.name}: attribute {name} = {value!r} has no text form; numbers, bools, "
                     "strings, element types, functions and tuples of those have")


# Parsing

_TOKEN = re.compile(rf"""
    '(?:[^'\\\n]|\\.)*' | "(?:[^"\\\n]|\\.)*"                 # string
  | \#[^\n]*                                                  # comment
  | [%@]{NAME}                                                # value, function
  | ->
  | [a-z]+[0-9]*\[[0-9,\ ]*\]                                 # tensor type
  | -inf | -?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?(?![\w./])   # number
  | {NAME}                                                    # word
  | \S
""", re.VERBOSE)
_COMMENT_LINE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_INTEGER = re.compile(r"-?[0-9]+")
_TENSOR_TYPE = re.compile(r"(\w+)\[([0-9, ]*)\]")
_FULL_NAME = re.compile(NAME)
_WORDS = {"true": True, "false": False, "none": None, "inf": float("inf"), "-inf": -float("inf"),
          "nan": float("nan"), **{dtype.value: dtype for dtype in DType}}


class _Parser:
    """A recursive descent over the tokens of a text."""

    def __init__(self, text: str) -> None:
        # Blanked, not cut: line numbers must stay.
        self._text = _COMMENT_LINE.sub("", text)
        self._tokens = [*_TOKEN.findall(self._text), ""]
        self._at = 0

    def peek(self) -> str:
        """The next token, empty at the end."""
        return self._tokens[self._at]

    def next(self) -> str:
        token = self._tokens[self._at]
        if not token:
            self.fail("the text ends too early")
        self._at += 1
        return token

    def expect(self, token: str) -> None:
        if self._tokens[self._at] != token:
            wanted = f"'{token}'" if token else "the end of the text"
            self.fail(f"expected {wanted}, found '{self.peek()}'" if self.peek()
                      else f"expected {wanted}, but the text ends")
        self._at += bool(token)

    def accept(self, token: str) -> bool:
        if self._tokens[self._at] != token:
            return False
        self._at += 1
        return True

    def fail(self, message: str, back: int = 0) -> NoReturn:
        """Raise with the line of the token that is `back` tokens before the next."""
        starts = [match.start() for match in _TOKEN.finditer(self._text)]
        wanted = self._at - back
        place = starts[wanted] if wanted < len(starts) else len(self._text.rstrip())
        number = self._text.count("\n", 0, place) + 1
        line = self._text.split("\n")[number - 1].strip()
        raise EulerError(f"line {number}: {message}; in: {line}")

    def function(self) -> Function:
        self.expect("func")
        name = self._name("@", "a function's name (@name)")
        values: dict[str, Value] = {}
        self.expect("(")
        inputs = self._list(")", lambda: self._definition(values))
        self.expect("->")
        self.expect("(")
        outputs = self._list(")", self._output)
        donations = {}
        if self.accept("donates"):
            self.expect("(")
            donations = dict(self._list(")", self._donation))
        self.expect("{")
        self._comment()
        nodes = []
        while self.peek() != "return":
            nodes.append(self._node(values))
        returned = self._return(values, outputs)
        self.expect("}")
        return Function(name, tuple(inputs), tuple(nodes), returned,
                        tuple(name for name, _ in outputs), donations)

    def _return(self, values: dict[str, Value], outputs: list) -> tuple[Value, ...]:
        self.expect("return")
        returned = tuple(self._list("", lambda: self._use(values))
                         if self.peek().startswith("%") else ())
        if len(returned) != len(outputs):
            self.fail(f"{len(outputs)} outputs are declared, {len(returned)} returned", back=1)
        for (name, declared), value in zip(outputs, returned, strict=True):
            if value.type != declared:
                self.fail(f"output {name} is declared {declared}, but {value!r} is returned",
                          back=1)
        self._comment()
        return returned

    def _node(self, values: dict[str, Value]) -> Node:
        defined: dict[str, Value] = {}
        outputs = self._list("=", lambda: self._definition(defined))
        name = self.next()
        if name not in REGISTRY:
            self.fail(f"no op is named '{name}'", back=1)
        self.expect("(")
        inputs = self._list(")", lambda: self._use(values))
        op = self._op(REGISTRY[name])
        for value in defined.values():
            if value.name in values:
                self.fail(f"%{value.name} is defined twice", back=1)
        values.update(defined)
        return Node(op, tuple(inputs), tuple(outputs), *self._notes())

    def _op(self, cls: type[Op]) -> Op:
        attributes: dict[str, Any] = {}
        if self.accept("{"):
            attributes = dict(self._list("}", self._attribute))
        known = cls.__dataclass_fields__
        for name in attributes:
            if name not in known:
                self.fail(f"{cls.name} has no attribute '{name}'; "
                          f"it has {', '.join(known) or 'none'}", back=1)
        try:
            return cls(**attributes)
        except TypeError:
            missing = [name for name in known if name not in attributes]
            self.fail(f"{cls.name} needs a value for {', '.join(missing)}", back=1)

    def _attribute(self) -> tuple[str, Any]:
        name = self._name("", "an attribute's name")
        self.expect("=")
        return name, self._value()

    def _value(self) -> Any:
        token = self.peek()
        if token == "func":
            return self.function()
        self._at += 1
        if token == "(":
            return tuple(self._list(")", self._value))
        if token in _WORDS:
            return _WORDS[token]
        try:
            if token[:1] in ("'", '"'):
                return ast.literal_eval(token)
            return int(token) if _INTEGER.fullmatch(token) else float(token)
        except (ValueError, SyntaxError):
            self.fail(f"'{token}' is no attribute value", back=1)

    def _list(self, end: str, item) -> list:
        """Items with commas between, up to and with the token `end` (left open if empty); a comma
        may stand behind the last."""
        items = []
        while not (end and self.accept(end)):
            items.append(item())
            if not self.accept(","):
                if end:
                    self.expect(end)
                break
        return items

    def _definition(self, values: dict[str, Value]) -> Value:
        name = self._name("%", "a value (%name)")
        self.expect(":")
        if name in values:
            self.fail(f"%{name} is defined twice", back=1)
        values[name] = value = Value(name, self._type())
        return value

    def _use(self, values: dict[str, Value]) -> Value:
        name = self._name("%", "a value (%name)")
        if name not in values:
            self.fail(f"%{name} is used before it is defined", back=1)
        return values[name]

    def _output(self) -> tuple[str, TensorType]:
        name = self._name("", "an output's name")
        self.expect(":")
        return name, self._type()

    def _donation(self) -> tuple[str, str]:
        source = self._name("%", "an input (%name)")
        self.expect("->")
        return source, self._name("", "an output's name")

    def _name(self, sigil: str, wanted: str) -> str:
        token = self.next()
        if not token.startswith(sigil) or not _FULL_NAME.fullmatch(token, len(sigil)):
            self.fail(f"expected {wanted}, found '{token}'", back=1)
        return token[len(sigil):]

    def _type(self) -> TensorType:
        token = self.next()
        try:
            return _tensor_type(token)
        except ValueError:
            self.fail(f"'{token}' is no tensor type; f32[8,128] is one", back=1)

    def _comment(self) -> str:
        return self.next()[1:].strip() if self.peek().startswith("#") else ""

    def _notes(self) -> tuple[str, str]:
        """The source and segment of the node before, from the comment behind it."""
        source, segment = _NOTE.fullmatch(self._comment()).groups("")
        return source, segment


def _note(node: Node) -> str:
    """The comment behind a node: `# file.py:12 [segment]`."""
    segment = f"[{node.segment}]" if node.segment else ""
    comment = " ".join(filter(None, (node.source, segment)))
    return f"  # {comment}" if comment else ""


#: What `_note` writes, taken apart.
_NOTE = re.compile(r"(.*?)(?:(?:^| )\[([^\[\]]+)\])?")


@lru_cache(maxsize=1024)
def _tensor_type(token: str) -> TensorType:
    match = _TENSOR_TYPE.fullmatch(token)
    if match is None:
        raise ValueError(token)
    extents = match[2].split(",") if match[2] else []
    return TensorType(DType(match[1]), tuple(map(int, extents)))
