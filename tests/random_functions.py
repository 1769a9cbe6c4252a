"""Random straight-line functions that are hard on a memory planner, with inputs.

All arithmetic is on small whole numbers, so every backend must give the interpreter's results
exactly, whatever the order of a sum. They have views of views and of inputs, transposes, strided
and contiguous slices, concatenations, in-place chances, nodes with several results, unused
results, zero-size values, cache writes, outputs that are inputs, views, or each other, and donated
inputs.
"""

from __future__ import annotations

import random

import numpy as np

from euler_ir.builder import Builder
from euler_ir.graph import Function, Value
from euler_ir.op import Pointwise
from euler_ir.types import BF16, F32, F64, I32

SHAPES = [(4, 6), (6, 4), (24,), (2, 3, 4), (8, 3), (3, 40), (120,), (1, 6), (0, 4), ()]
LIMIT = 1 << 20


class SumAndDifference(Pointwise):
    """(x + y, x - y): two results that may each be written over either operand."""
    name = "test_sum_and_difference"

    def scalar(self, x, y):
        return x + y, x - y


class _Generator:
    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.b = Builder(f"random_{seed}")
        self.values: list[Value] = []
        self.largest: dict[Value, float] = {}
        self.donations: dict[str, str] = {}

    def function(self, nodes: int) -> Function:
        with self.b:
            self.position = self.b.input("position", I32, ())
            self.inputs = [self.add(self.b.input(f"x{i}", F32, shape), 8)
                           for i, shape in enumerate(self.choice.choices(SHAPES, k=5))]
            kinds = [self.elementwise, self.elementwise, self.pair, self.view, self.view,
                     self.rearrange, self.resize, self.write, self.matmul, self.convert]
            while len(self.b.nodes) < nodes:
                self.choice.choice(kinds)()
            outputs = self.outputs()
            return self.b.function(outputs, self.donations)

    def add(self, value: Value, largest: float) -> Value:
        self.values.append(value)
        self.largest[value] = largest
        return value

    def any(self, rank: int = 0, bounded: float = LIMIT) -> Value:
        """Some f32 value of at least this rank whose elements are no larger than a bound."""
        fitting = [value for value in self.values if len(value.shape) >= rank]
        # Recent values die young and are worth working in place on.
        value = self.choice.choice(fitting[-6:] if self.choice.random() < 0.7 else fitting)
        return value if self.largest[value] <= bounded else self.add(self.b.clip(value, -8, 8), 8)

    def like(self, x: Value) -> Value:
        same = [v for v in self.values if v.shape == x.shape and self.largest[v] <= LIMIT]
        return self.choice.choice(same) if same else x

    def elementwise(self) -> None:
        x = self.any()
        y = self.like(x)
        total = self.largest[x] + self.largest[y]
        name = self.choice.choice(["add", "sub", "maximum", "minimum", "neg", "relu"])
        if name in ("neg", "relu"):
            result = -x if name == "neg" else self.b.relu(x)
        elif name in ("add", "sub"):
            result = x + y if name == "add" else x - y
        else:
            result = getattr(self.b, name)(x, y)
        self.add(result, total)

    def pair(self) -> None:
        x = self.any()
        y = self.like(x)
        for value in self.b.apply(SumAndDifference(), x, y):
            if self.choice.random() < 0.8:
                self.add(value, self.largest[x] + self.largest[y])

    def view(self) -> None:
        x = self.any()
        if self.choice.random() < 0.5:
            shapes = [s for s in SHAPES if np.prod(s) == x.type.size and s != x.shape]
            if shapes:
                self.add(self.b.reshape(x, self.choice.choice(shapes)), self.largest[x])
        elif x.shape:
            start = self.choice.randint(0, x.shape[0])
            stop = self.choice.randint(start, x.shape[0])
            self.add(self.b.part(x, 0, start, stop), self.largest[x])

    def rearrange(self) -> None:
        x = self.any(rank=1)
        axes = list(range(len(x.shape)))
        self.choice.shuffle(axes)
        if axes != sorted(axes) and self.choice.random() < 0.5:
            self.add(self.b.transpose(x, axes), self.largest[x])
        else:
            axis = self.choice.choice(axes)
            start = self.choice.randint(0, x.shape[axis])
            self.add(self.b.part(x, axis, start, x.shape[axis]), self.largest[x])

    def resize(self) -> None:
        x = self.any(rank=1, bounded=LIMIT / 128)
        axis = self.choice.randrange(len(x.shape))
        kind = self.choice.choice(["concat", "sum", "pad"])
        if kind == "concat" and x.type.size <= 200:
            y = self.like(x)
            self.add(self.b.concat([x, y], axis), max(self.largest[x], self.largest[y]))
        elif kind == "sum":
            self.add(self.b.reduce_sum(x, [axis]), self.largest[x] * max(x.shape[axis], 1))
        elif x.type.size <= 200:
            shape = [n + self.choice.randint(0, 2) for n in x.shape]
            starts = [self.choice.randint(0, n - m) for n, m in zip(shape, x.shape, strict=True)]
            self.add(self.b.pad(x, shape, starts), self.largest[x])

    def write(self) -> None:
        buffer = self.any(rank=1)
        axis = self.choice.randrange(len(buffer.shape))
        size = self.choice.randint(0, buffer.shape[axis])
        source = self.like(buffer)
        if self.choice.random() < 0.3:
            rows = self.b.dynamic_slice(source, self.position, axis, size)
        else:
            rows = self.b.part(source, axis, 0, size)
        result = self.b.update_slice(buffer, rows, self.position, axis)
        self.add(result, max(self.largest[buffer], self.largest[source]))

    def matmul(self) -> None:
        x = self.any(bounded=8)
        matrices = [v for v in self.values if len(v.shape) == 2 and self.largest[v] <= 8]
        pairs = [(a, c) for a in matrices for c in matrices if a.shape[1] == c.shape[0]]
        if pairs:
            x, y = self.choice.choice(pairs)
            self.add(self.b.matmul(x, y), 64 * max(x.shape[1], 1))

    def convert(self) -> None:
        x = self.any(bounded=LIMIT / 2)
        middle = self.b.cast(x, self.choice.choice([BF16, F64]))
        if self.choice.random() < 0.5:
            middle = middle + middle
        self.add(self.b.cast(middle, F32), self.largest[x] * 2.1)

    def outputs(self) -> dict[str, Value]:
        """Some values, not all different, among them inputs; some inputs are donated to new values
        and some to ones that are there already."""
        chosen = self.choice.choices(self.values, k=3) + self.choice.choices(self.values[-5:], k=2)
        chosen += [chosen[0]] if self.choice.random() < 0.5 else []
        chosen += [self.choice.choice(self.inputs)] if self.choice.random() < 0.3 else []
        outputs = {f"y{i}": value for i, value in enumerate(chosen)}
        for value in self.choice.sample(self.inputs, 2):
            mine = f"new.{value.name}"
            if self.is_kept(value, outputs):
                continue
            if self.choice.random() < 0.5:
                outputs[mine] = (self.b.update_slice(value, value, self.position, 0)
                                 if value.shape else value + value)
            elif self.choice.random() < 0.5:
                outputs[mine] = self.b.relu(self.last(value))
            else:
                outputs[mine] = self.last(value)
            self.donations[value.name] = mine
        return outputs

    def is_kept(self, value: Value, outputs: dict[str, Value]) -> bool:
        """Whether an output is the value or may be a view of it."""
        family = self.family(value)
        return any(output in family for output in outputs.values())

    def last(self, value: Value) -> Value:
        """The last value of this type that is made after the last read of `value`; if there is
        none, a new one."""
        family = self.family(value)
        after: list[Value] = []
        for node in self.b.nodes:
            if any(operand in family for operand in node.inputs):
                after = []
            after += [output for output in node.outputs if output not in family]
        views = set().union(*map(self.family, self.inputs))
        same = [v for v in after if v.type == value.type and v not in views]
        return same[-1] if same else -value

    def family(self, value: Value) -> set[Value]:
        """The value and the views of it."""
        family = {value}
        for node in self.b.nodes:
            if node.inputs and node.inputs[0] in family:
                types = (operand.type for operand in node.inputs)
                if node.op.alias(*types) is not None:
                    family.update(node.outputs)
        return family


def random_function(seed: int, nodes: int = 40) -> Function:
    """The function of this seed."""
    return _Generator(seed).function(nodes)


def random_inputs(function: Function, seed: int) -> dict[str, np.ndarray]:
    """Whole numbers of at most 8, and a position that may be outside."""
    generator = np.random.default_rng(seed)
    return {value.name: generator.integers(-2, 6, (), dtype=np.int32)
            if value.dtype is I32 else generator.integers(-8, 9, value.shape).astype(np.float32)
            for value in function.inputs}
