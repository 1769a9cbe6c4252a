"""Values, nodes and functions: immutable straight-line SSA.

A `Function` is a list of nodes in execution order; each node applies an op to earlier values and
defines one or more new ones. Nothing is ever mutated: passes build new functions. Names are unique
within a function, so a function is fully described by its text (`euler_ir.text`), and two functions
are equal when their texts are, source notes aside.

    func @square(%x: f32[4]) -> (y: f32[4]) {
      %0: f32[4] = mul(%x, %x)  # blocks.py:12
      return %0
    }
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from euler_ir.errors import EulerError
from euler_ir.types import TensorType

if TYPE_CHECKING:
    from euler_ir.op import Op

#: What names of values, outputs and functions are made of, as a regular expression.
NAME = "[A-Za-z0-9_./]+"

#: The builder that arithmetic on values appends to; set by `with Builder(...)`.
active_builder: ContextVar[Any] = ContextVar("active_builder", default=None)


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One SSA value. Identity, not content, tells values apart."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self):
        return self.type.dtype

    def _apply(self, operation: str, *operands) -> Value:
        builder = active_builder.get()
        if builder is None:
            raise RuntimeError(f"arithmetic on %{self.name} outside `with Builder(...)`")
        return builder.arithmetic(operation, *operands)

    def __add__(self, other):
        return self._apply("add", self, other)

    def __radd__(self, other):
        return self._apply("add", other, self)

    def __sub__(self, other):
        return self._apply("sub", self, other)

    def __rsub__(self, other):
        return self._apply("sub", other, self)

    def __mul__(self, other):
        return self._apply("mul", self, other)

    def __rmul__(self, other):
        return self._apply("mul", other, self)

    def __truediv__(self, other):
        return self._apply("div", self, other)

    def __rtruediv__(self, other):
        return self._apply("div", other, self)

    def __neg__(self):
        return self._apply("neg", self)

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One application of an op: `outputs = op(inputs)`.

    `source` says which line of the builder's caller made it (`file.py:line`), `segment` which
    stretch of the program it belongs to (a layer's name; its gradients are in `<name> backward`).
    Both are notes and take no part in equality; passes may go by the segment."""

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    source: str = ""
    segment: str = ""

    @property
    def output(self) -> Value:
        """The only result of a node that has one."""
        (value,) = self.outputs
        return value

    def __repr__(self) -> str:
        results = ", ".join(map(repr, self.outputs))
        return f"{results} = {self.op.name}({', '.join(f'%{v.name}' for v in self.inputs)})"


@dataclass(frozen=True, eq=False)
class Function:
    """A straight-line program: inputs, nodes in order, named outputs.

    `donations` maps an input's name to the name of the output that takes over its memory: after
    the node that defines that output, nobody may read the input (the verifier checks it)."""

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    output_names: tuple[str, ...]
    donations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.outputs) != len(self.output_names):
            raise ValueError(f"@{self.name}: {len(self.outputs)} outputs, "
                             f"{len(self.output_names)} output names")

    def input(self, name: str) -> Value:
        """The input of this name; raises EulerError if there is none."""
        for value in self.inputs:
            if value.name == name:
                return value
        raise EulerError(f"@{self.name} has no input %{name}; its inputs are "
                         + _some([value.name for value in self.inputs]))

    def output(self, name: str) -> Value:
        """The output of this name; raises EulerError if there is none."""
        if name not in self.output_names:
            raise EulerError(f"@{self.name} has no output {name}; its outputs are "
                             + _some(self.output_names))
        return self.outputs[self.output_names.index(name)]

    def values(self) -> Iterator[Value]:
        """Every value, in order of definition."""
        yield from self.inputs
        for node in self.nodes:
            yield from node.outputs

    def producers(self) -> dict[Value, Node]:
        """The node that defines each value; inputs have none."""
        return {value: node for node in self.nodes for value in node.outputs}

    def consumers(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, in order, once each."""
        users: dict[Value, list[Node]] = {value: [] for value in self.values()}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                users[value].append(node)
        return users

    def anti_dependences(self) -> list[tuple[Node, Node]]:
        """Pairs (reader, writer): the writer's result takes the memory of a donated input that the
        reader reads, itself or through views, so a pass must not move the reader behind it."""
        producers = self.producers()
        consumers = self.consumers() if self.donations else {}
        pairs = []
        for donated, taker in self.donations.items():
            writer = producers.get(self.output(taker))
            pending = [self.input(donated)]
            while pending and writer is not None:
                for node in consumers[pending.pop()]:
                    if node is not writer:
                        pairs.append((node, writer))
                    if node.op.alias(*(value.type for value in node.inputs)) is not None:
                        pending += node.outputs
        return pairs

    def replace(self, **changes) -> Function:
        """A copy with some fields changed."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Function(**{**fields, **changes})

    def _key(self):
        """The function's content as plain comparable data."""
        def typed(values):
            return tuple((value.name, value.type) for value in values)
        return (self.name, typed(self.inputs), tuple(v.name for v in self.outputs),
                self.output_names, tuple(sorted(self.donations.items())),
                tuple((node.op, tuple(v.name for v in node.inputs), typed(node.outputs))
                      for node in self.nodes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        from euler_ir.text import print_function
        return print_function(self)


def _some(names: Sequence[str], most: int = 12) -> str:
    """Names for a message of one line."""
    return ", ".join([*names[:most], "…"] if len(names) > most else names) or "none"


@dataclass(frozen=True)
class Module:
    """Functions that belong together (a training step's accumulate and apply, say), by name."""

    functions: Mapping[str, Function]

    def __getitem__(self, name: str) -> Function:
        return self.functions[name]
