"""Building functions: a method an op, arithmetic on values, source notes.

    with Builder("square_error") as b:
        x = b.input("x", F32, (8, 4))
        w = b.input("w", F32, (3, 4))
        error = b.matmul(x, w, transpose_b=True) - 1.0
        f = b.function({"loss": b.mean(error * error)})

Arithmetic broadcasts as numpy's does, by explicit `broadcast` nodes; Python numbers become `full`
constants of the other operand's type. Every op's types are checked as it is appended, and the
error names the op, its operands and the line that asked for it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from euler_ir import ops
from euler_ir.errors import EulerError
from euler_ir.graph import NAME, Function, Node, Value, active_builder
from euler_ir.op import Op, result_types
from euler_ir.types import BOOL, F32, DType, ShapeError, TensorType

_LEGAL_NAME = re.compile(NAME)
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class IRError(EulerError):
    """A program that is not well formed, with the op, the values and the line concerned."""


_ARITHMETIC = {"add": ops.Add(), "sub": ops.Sub(), "mul": ops.Mul(), "div": ops.Div()}


class Builder:
    """Collects inputs and nodes, then makes a Function. `with` makes it the active one, to which
    arithmetic on values appends."""

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self._inputs: list[Value] = []
        self._nodes: list[Node] = []
        self._names: set[str] = set()
        self._counter = 0
        self._scopes: list = []
        #: Source note for appended nodes; None asks the call stack.
        self.source: str | None = None
        #: Segment of appended nodes.
        self.segment = ""

    def __enter__(self) -> Builder:
        self._scopes.append(active_builder.set(self))
        return self

    def __exit__(self, *exc) -> None:
        active_builder.reset(self._scopes.pop())

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes appended so far."""
        return tuple(self._nodes)

    # Making values, nodes and the function

    def input(self, name: str, dtype: DType, shape: Sequence[int]) -> Value:
        """A new input of the function; names are its interface and must be unique."""
        if name in self._names:
            raise IRError(f"@{self.name}: two values are named %{name}")
        self._check_name("input", name)
        self._names.add(name)
        value = Value(name, TensorType(dtype, tuple(shape)))
        self._inputs.append(value)
        return value

    def apply(self, op: Op, *operands: Value, name: str = ""):
        """Append a node; returns its result, or a tuple where the op has several."""
        types = tuple(value.type for value in operands)
        source = self.source if self.source is not None else calling_line()
        try:
            results = result_types(op, types)
        except ShapeError as error:
            listed = ", ".join(map(repr, operands))
            raise IRError(f"{op.name}({listed}) needs {error} ({source})") from None
        outputs = tuple(Value(self._unique(name), t) for t in results)
        self._nodes.append(Node(op, tuple(operands), outputs, source, self.segment))
        return outputs[0] if len(outputs) == 1 else outputs

    def append(self, node: Node, operands: Sequence[Value], op: Op | None = None
               ) -> tuple[Value, ...]:
        """Append a copy of another function's node on other operands, keeping names where free,
        result types and notes; what passes use."""
        outputs = tuple(Value(self._unique(value.name), value.type) for value in node.outputs)
        self._nodes.append(Node(op or node.op, tuple(operands), outputs, node.source,
                                node.segment))
        return outputs

    def inputs_like(self, function: Function) -> dict[str, Value]:
        """A new input for each one of another function, by name."""
        return {value.name: self.input(value.name, value.dtype, value.shape)
                for value in function.inputs}

    def inline(self, function: Function, operands: Mapping[str, Value]) -> dict[str, Value]:
        """Append another function's nodes, with their notes, on operands in the place of its
        inputs; its outputs by name."""
        values = {value: operands[value.name] for value in function.inputs}
        for value, operand in values.items():
            if operand.type != value.type:
                raise IRError(f"@{self.name}: {operand!r} cannot be the input {value!r} of "
                              f"@{function.name}")
        for node in function.nodes:
            outputs = self.append(node, [values[value] for value in node.inputs])
            values.update(zip(node.outputs, outputs, strict=True))
        return {name: values[value] for name, value
                in zip(function.output_names, function.outputs, strict=True)}

    def function(self, outputs: Mapping[str, Value],
                 donations: Mapping[str, str] | None = None) -> Function:
        """The finished function, its outputs by name."""
        self._check_name("function", self.name)
        for name in outputs:
            self._check_name("output", name)
        return Function(self.name, tuple(self._inputs), tuple(self._nodes),
                        tuple(outputs.values()), tuple(outputs), dict(donations or {}))

    def _check_name(self, kind: str, name: str) -> None:
        if not _LEGAL_NAME.fullmatch(name):
            raise IRError(f"@{self.name}: {kind} name {name!r} is not made of letters, digits, "
                          "'_', '.' and '/'")

    def _unique(self, name: str) -> str:
        if not name or name.isdigit() or name in self._names:
            stem = "" if not name or name.isdigit() else name + "."
            while True:
                candidate = f"{stem}{self._counter}"
                self._counter += 1
                if candidate not in self._names:
                    name = candidate
                    break
        self._check_name("value", name)
        self._names.add(name)
        return name

    def arithmetic(self, operation: str, *operands):
        """What `+ - * /` and unary minus on values call."""
        if operation == "neg":
            return self.apply(ops.Neg(), *operands)
        return self.pointwise(_ARITHMETIC[operation], *operands)

    def pointwise(self, op: Op, *operands):
        """A pointwise op on values and numbers, broadcast to a common shape."""
        first = next(x for x in operands if isinstance(x, Value))
        try:
            shape = np.broadcast_shapes(*(x.shape for x in operands if isinstance(x, Value)))
        except ValueError:
            listed = ", ".join(map(repr, operands))
            raise IRError(f"{op.name}({listed}): shapes do not broadcast ({calling_line()})"
                          ) from None
        values = [self.broadcast(x, shape) if isinstance(x, Value)
                  else self.full(x, first.dtype, shape) for x in operands]
        return self.apply(op, *values)

    # Constants

    def full(self, value: float, dtype: DType, shape: Sequence[int] = ()) -> Value:
        """A tensor filled with one number, which the element type must be able to hold."""
        kind = bool if dtype is BOOL else float if dtype.is_float else int
        if not dtype.holds(value):
            raise IRError(f"full: {value} is no value of type {dtype} ({calling_line()})")
        return self.apply(ops.Full(kind(value), dtype, tuple(shape)))

    def iota(self, size: int) -> Value:
        return self.apply(ops.Iota(size))

    # Pointwise

    def exp(self, x: Value) -> Value:
        return self.apply(ops.Exp(), x)

    def log(self, x: Value) -> Value:
        return self.apply(ops.Log(), x)

    def sqrt(self, x: Value) -> Value:
        return self.apply(ops.Sqrt(), x)

    def rsqrt(self, x: Value) -> Value:
        return self.apply(ops.Rsqrt(), x)

    def tanh(self, x: Value) -> Value:
        return self.apply(ops.Tanh(), x)

    def sigmoid(self, x: Value) -> Value:
        return self.apply(ops.Sigmoid(), x)

    def erf(self, x: Value) -> Value:
        return self.apply(ops.Erf(), x)

    def abs(self, x: Value) -> Value:
        return self.apply(ops.Abs(), x)

    def sign(self, x: Value) -> Value:
        return self.apply(ops.Sign(), x)

    def relu(self, x: Value) -> Value:
        return self.apply(ops.Relu(), x)

    def silu(self, x: Value) -> Value:
        return self.apply(ops.Silu(), x)

    def swiglu(self, gate: Value, up: Value) -> Value:
        return self.apply(ops.SwiGLU(), gate, up)

    def gelu(self, x: Value) -> Value:
        return self.apply(ops.Gelu(), x)

    def clip(self, x: Value, low: float, high: float) -> Value:
        return self.apply(ops.Clip(float(low), float(high)), x)

    def maximum(self, x, y) -> Value:
        return self.pointwise(ops.Maximum(), x, y)

    def minimum(self, x, y) -> Value:
        return self.pointwise(ops.Minimum(), x, y)

    def less(self, x, y) -> Value:
        return self.pointwise(ops.Less(), x, y)

    def less_equal(self, x, y) -> Value:
        return self.pointwise(ops.LessEqual(), x, y)

    def equal(self, x, y) -> Value:
        return self.pointwise(ops.Equal(), x, y)

    def logical_and(self, x: Value, y: Value) -> Value:
        return self.pointwise(ops.And(), x, y)

    def logical_or(self, x: Value, y: Value) -> Value:
        return self.pointwise(ops.Or(), x, y)

    def logical_not(self, x: Value) -> Value:
        return self.apply(ops.Not(), x)

    def is_finite(self, x: Value) -> Value:
        return self.apply(ops.IsFinite(), x)

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        return self.apply(ops.Select(), condition, x, y)

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.dtype is dtype else self.apply(ops.Cast(dtype), x)

    # Rows

    def softmax(self, x: Value) -> Value:
        return self.apply(ops.Softmax(), x)

    def rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        return self.apply(ops.RMSNorm(eps), x, weight)

    def layer_norm(self, x: Value, weight: Value, bias: Value, eps: float) -> Value:
        return self.apply(ops.LayerNorm(eps), x, weight, bias)

    def cross_entropy(self, logits: Value, target: Value, vocabulary: int = 0) -> Value:
        """Loss [..., 1] of each row; see `ops.CrossEntropy`."""
        return self.apply(ops.CrossEntropy(vocabulary), logits, target)[0]

    def rotary(self, x: Value, cos: Value, sin: Value) -> Value:
        return self.apply(ops.Rotary(), x, cos, sin)

    # Reductions

    def reduce_sum(self, x: Value, axes: Sequence[int], keep: bool = False) -> Value:
        return self.apply(ops.ReduceSum(tuple(axes), keep), x)

    def reduce_max(self, x: Value, axes: Sequence[int], keep: bool = False) -> Value:
        return self.apply(ops.ReduceMax(tuple(axes), keep), x)

    def reduce_min(self, x: Value, axes: Sequence[int], keep: bool = False) -> Value:
        return self.apply(ops.ReduceMin(tuple(axes), keep), x)

    def sum(self, x: Value) -> Value:
        """The sum of all elements, []."""
        return self.reduce_sum(x, range(len(x.shape)))

    def mean(self, x: Value) -> Value:
        """The mean of all elements, []; NaN for none."""
        return self.sum(x) / float(x.type.size)

    def argmax(self, x: Value) -> Value:
        return self.apply(ops.ArgMax(), x)

    # Shapes

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """The same elements under another shape; one extent may be -1."""
        shape = tuple(shape)
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            shape = tuple(x.type.size // max(known, 1) if n == -1 else n for n in shape)
        return x if shape == x.shape else self.apply(ops.Reshape(shape), x)

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        return self.apply(ops.Transpose(tuple(permutation)), x)

    def slice(self, x: Value, starts: Sequence[int], stops: Sequence[int]) -> Value:
        return self.apply(ops.Slice(tuple(starts), tuple(stops)), x)

    def part(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """x[start:stop] along one axis."""
        axis %= len(x.shape)
        starts, stops = [0] * len(x.shape), list(x.shape)
        starts[axis], stops[axis] = start, stop
        return self.slice(x, starts, stops)

    def split(self, x: Value, axis: int, sizes: Sequence[int]) -> tuple[Value, ...]:
        """Pieces of these sizes along one axis."""
        return self.apply(ops.Split(axis % len(x.shape), tuple(sizes)), x)

    def pad(self, x: Value, shape: Sequence[int], starts: Sequence[int]) -> Value:
        return self.apply(ops.Pad(tuple(shape), tuple(starts)), x)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return self.apply(ops.Concat(axis), *values)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return x if x.shape == shape else self.apply(ops.Broadcast(shape), x)

    def update_slice(self, buffer: Value, new: Value, position: Value, axis: int) -> Value:
        return self.apply(ops.UpdateSlice(axis), buffer, new, position)

    def dynamic_slice(self, x: Value, position: Value, axis: int, size: int) -> Value:
        return self.apply(ops.DynamicSlice(axis, size), x, position)

    # Kernels

    def matmul(self, x: Value, y: Value, transpose_a: bool = False,
               transpose_b: bool = False) -> Value:
        return self.apply(ops.Matmul(transpose_a, transpose_b), x, y)

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """x [..., C] weight [N, C] → [..., N], the bias [N] added where given."""
        y = self.matmul(x, weight, transpose_b=True)
        return y if bias is None else y + bias

    def gather(self, table: Value, indices: Value) -> Value:
        return self.apply(ops.Gather(), table, indices)

    def scatter_add(self, indices: Value, updates: Value, rows: int) -> Value:
        return self.apply(ops.ScatterAdd(rows), indices, updates)

    def attention(self, q: Value, k: Value, v: Value, lo: Value, hi: Value,
                  scale: float | None = None) -> Value:
        """Output [B,T,H,D]; the scale is 1/√D unless given. See `ops.Attention`."""
        op = ops.Attention(1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
        return self.apply(op, q, k, v, lo, hi)[0]

    def random_bits(self, key0: Value, key1: Value, counter: Value, shape: Sequence[int]) -> Value:
        """u32 random bits of this shape from three u32 scalars; see `ops.RandomBits`."""
        operands = (self.broadcast(x, shape) for x in (key0, key1, counter))
        return self.apply(ops.RandomBits(), *operands)

    def uniform(self, bits: Value, dtype: DType = F32) -> Value:
        return self.apply(ops.UniformFromBits(dtype), bits)

    # Optimizer

    def global_norm(self, values: Sequence[Value]) -> Value:
        return self.apply(ops.GlobalNorm(), *values)


def calling_line(beside: str = "") -> str:
    """file:line of the nearest caller outside this package (and outside the file `beside`)."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_PACKAGE)
                                        or frame.f_code.co_filename == beside):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
