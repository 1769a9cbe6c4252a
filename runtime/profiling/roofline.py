"""Where time goes, kernel by kernel, and how near each kernel is to what the machine can do.

The limits are measured, on the backend that is judged: the rate of a large matrix product and that
of a large addition. A kernel's least time is the longer of what its arithmetic takes at the one and
its traffic at the other (the roofline model: Williams, Waterman & Patterson, CACM 52(4), 2009); it
may do better than this limit where its operands are in a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.backend import Backend, Program
from euler_ir import ops
from euler_ir.builder import Builder
from euler_ir.graph import Function, Node, Value
from euler_ir.types import DType
from runtime.compiler.driver import compile_function, to_buffers
from runtime.profiling.costs import cost

_RUNS = 10
_MATMUL, _ADDITION = 1024, 1 << 23  # extents of what the limits are measured with
#: Ops that say nothing about what a fused kernel is for.
_UNSAID = (ops.Broadcast, ops.Full, ops.Reshape, ops.Cast)


@dataclass(frozen=True)
class Row:
    """A line of the table: `count` runs, which took `seconds` and had to do `flops` and `bytes`,
    all of them together."""

    name: str
    count: int
    seconds: float
    flops: int
    bytes: int

    def __add__(self, other: Row) -> Row:
        return Row(self.name, self.count + other.count, self.seconds + other.seconds,
                   self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Limits:
    """Operations and bytes a second that a backend reached on this machine."""

    flops: float
    bytes: float

    def share(self, row: Row) -> float:
        """The least time of a row at these rates, over the time it took."""
        return max(row.flops / self.flops, row.bytes / self.bytes) / row.seconds


def measure_limits(backend: Backend, dtype: DType) -> Limits:
    """The best of a few runs of a large matrix product and of a large addition."""
    with Builder("limit_matmul") as b:
        x, y = (b.input(name, dtype, (_MATMUL, _MATMUL)) for name in "xy")
        product = b.function({"z": b.matmul(x, y, transpose_b=True)})
    with Builder("limit_addition") as b:
        x, y = (b.input(name, dtype, (_ADDITION,)) for name in "xy")
        addition = b.function({"z": x + y}, {"x": "z"})
    return Limits(cost(product.nodes[0]).flops / _best_seconds(product, backend),
                  cost(addition.nodes[0]).bytes / _best_seconds(addition, backend))


def _best_seconds(function: Function, backend: Backend) -> float:
    ones = {value.name: np.ones(value.shape, value.dtype.numpy) for value in function.inputs}
    program = compile_function(function, backend, to_buffers(ones, backend))
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        program.run({})
        times.append(time.perf_counter() - start)
    return min(times)


def kernel_rows(run: Callable[[], object], program: Program, runs: int) -> list[Row]:
    """The kernels of a program, equal ones together, by their median time over `runs`; none where
    the backend takes no times."""
    if not hasattr(program, "times"):
        return []
    seconds = []
    for _ in range(runs):
        run()
        launches = program.times()
        seconds.append([duration for _, duration in launches])
    rows, previous = [], None
    for (node, _), median in zip(launches, np.median(seconds, axis=0), strict=True):
        if node is None:
            rows.append(Row("copy", 1, median, 0, 0))
        elif node is previous:  # a further phase of the same kernel
            rows[-1] += Row("", 0, median, 0, 0)
        else:
            work = cost(node)
            rows.append(Row(label(node), 1, median, work.flops, work.bytes))
        previous = node
    return merged(rows, lambda row: row.name)


def merged(rows: Iterable[Row], key: Callable[[Row], str]) -> list[Row]:
    """Rows of one key added up under it, the longest first."""
    totals: dict[str, Row] = {}
    for row in rows:
        name = key(row)
        totals[name] = totals.get(name, Row(name, 0, 0.0, 0, 0)) + row
    return sorted(totals.values(), key=lambda row: -row.seconds)


def table(rows: Sequence[Row], limits: Limits) -> str:
    """The rows for people: rates, and the time as a share of all rows' and of the limit's."""
    total = sum(row.seconds for row in rows)
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}} count        ms  share  GFLOP/s    GB/s  of limit"]
    lines += [f"{row.name:{width}} {row.count:>5} {row.seconds * 1e3:>9.3f} "
              f"{row.seconds / total:>6.1%} {row.flops / row.seconds / 1e9:>8.1f} "
              f"{row.bytes / row.seconds / 1e9:>7.1f} {limits.share(row):>9.0%}" for row in rows]
    return "\n".join(lines)


def label(node: Node) -> str:
    """A node's op and shapes, short; of a fused one the ops inside."""
    names = [_op_name(node.op)]
    if isinstance(node.op, ops.Fused):
        names = [_op_name(inner.op) for inner in node.op.body.nodes
                 if not isinstance(inner.op, _UNSAID)]
    operands = " ".join(_shape(value) for value in node.inputs[:2])
    return f"{'+'.join(names)} {operands} -> {_shape(node.outputs[0])}"


def _op_name(op) -> str:
    if isinstance(op, ops.Matmul):
        return "matmul_" + "nt"[op.transpose_a] + "nt"[op.transpose_b]
    return op.name


def _shape(value: Value) -> str:
    return "x".join(map(str, value.shape)) or "1"
