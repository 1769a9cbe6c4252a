"""The scalar language: what a pointwise or row op does at one element.

An op's `scalar` or `row` method is called once with `Expr` operands and returns a small expression
DAG. The interpreter evaluates that DAG with numpy here; the backends emit vector LLVM IR or CUDA
C++ from it. Fusing two ops is calling the second with the first's expressions.

Expressions are typed: arithmetic is in f64, f32 or integers (16-bit floats are widened on load),
Python numbers take the type of the other operand, nothing else is converted silently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from euler_ir.types import BOOL, F32, I32, U32, DType, ShapeError, TensorType


@dataclass(frozen=True, eq=False, slots=True)
class Expr:
    """A node of the expression DAG.

    `op` is one of `UNARY`, `BINARY`, `COMPARE`, `REDUCTIONS`, or `input` (its number in `value`),
    `const`, `index` (the element's place in its row, i32), `linear` (its place in the tensor,
    u32), `select`, `cast`, `bitcast`, `roll` (the row turned by `value` places).
    `varies` tells whether the value depends on the element's place in the row."""

    op: str
    args: tuple[Expr, ...]
    dtype: DType
    value: int | float | bool | None = None
    varies: bool = field(default=True)

    def __add__(self, other):
        return binary("add", self, other)

    def __radd__(self, other):
        return binary("add", other, self)

    def __sub__(self, other):
        return binary("sub", self, other)

    def __rsub__(self, other):
        return binary("sub", other, self)

    def __mul__(self, other):
        return binary("mul", self, other)

    def __rmul__(self, other):
        return binary("mul", other, self)

    def __truediv__(self, other):
        return binary("div", self, other)

    def __rtruediv__(self, other):
        return binary("div", other, self)

    def __and__(self, other):
        return binary("and", self, other)

    def __or__(self, other):
        return binary("or", self, other)

    def __xor__(self, other):
        return binary("xor", self, other)

    def __lshift__(self, other):
        return binary("shl", self, other)

    def __rshift__(self, other):
        return binary("shr", self, other)

    def __lt__(self, other):
        return binary("lt", self, other)

    def __le__(self, other):
        return binary("le", self, other)

    def __gt__(self, other):
        return binary("lt", other, self)

    def __ge__(self, other):
        return binary("le", other, self)

    def __neg__(self):
        return unary("neg", self)

    def __invert__(self):
        return unary("not", self)

    def equals(self, other) -> Expr:
        return binary("eq", self, other)

    def cast(self, dtype: DType) -> Expr:
        """The same number in another type (floats to integers truncate)."""
        if dtype.compute is self.dtype:
            return self
        return Expr("cast", (self,), dtype.compute, varies=self.varies)

    def bitcast(self, dtype: DType) -> Expr:
        """The same bits read as another type of that size."""
        return Expr("bitcast", (self,), dtype, varies=self.varies)


COMPARE = {"lt": np.less, "le": np.less_equal, "eq": np.equal}
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "maximum": np.maximum, "minimum": np.minimum,  # both give NaN where an operand is NaN
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift,
    "mulhi": lambda a, b: ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32),
}
_erf = np.frompyfunc(math.erf, 1, 1)
UNARY = {
    "neg": np.negative, "abs": np.abs, "not": np.invert, "sqrt": np.sqrt, "exp": np.exp,
    "log": np.log, "tanh": np.tanh, "erf": lambda x: np.asarray(_erf(x), x.dtype),
    "floor": np.floor, "round": np.rint, "cos": np.cos, "sin": np.sin,
}
#: Reductions along the row, and `column_sum` over all rows.
REDUCTIONS = ("sum", "max", "column_sum")


_LOGIC = frozenset({"not", "and", "or", "xor"})
_SHIFTS = frozenset({"shl", "shr", "mulhi"})
_ARITHMETIC = frozenset({"neg", "abs", "add", "sub", "mul", "maximum", "minimum", "lt", "le",
                         "sum"})


def const(value: int | float | bool, dtype: DType) -> Expr:
    if not dtype.holds(value):
        raise ShapeError(f"a number of type {dtype}, got {value}")
    return Expr("const", (), dtype.compute, value, varies=False)


def unary(op: str, x: Expr) -> Expr:
    _check(op, x.dtype)
    return Expr(op, (x,), x.dtype, varies=x.varies)


def _check(op: str, dtype: DType) -> None:
    """Refuse an operation on a type it has no meaning for."""
    if op in _LOGIC:
        wanted, right = "integers or bool", not dtype.is_float
    elif op in _SHIFTS:
        wanted, right = "integers", not dtype.is_float and dtype is not BOOL
    elif op in _ARITHMETIC:
        wanted, right = "numbers", dtype is not BOOL
    else:
        wanted, right = "floats", dtype.is_float or op == "eq"
    if not right:
        raise ShapeError(f"'{op}' of {wanted}, got {dtype}")


def binary(op: str, x, y) -> Expr:
    if not isinstance(x, Expr):
        x = const(x, y.dtype)
    if not isinstance(y, Expr):
        y = const(y, x.dtype)
    if x.dtype is not y.dtype:
        raise ShapeError(f"'{op}' of one type, got {x.dtype} and {y.dtype}; cast one of them")
    _check(op, x.dtype)
    dtype = BOOL if op in COMPARE else x.dtype
    return Expr(op, (x, y), dtype, varies=x.varies or y.varies)


def exp(x: Expr) -> Expr:
    return unary("exp", x)


def log(x: Expr) -> Expr:
    return unary("log", x)


def sqrt(x: Expr) -> Expr:
    return unary("sqrt", x)


def rsqrt(x: Expr) -> Expr:
    return 1.0 / sqrt(x)


def tanh(x: Expr) -> Expr:
    return unary("tanh", x)


def erf(x: Expr) -> Expr:
    return unary("erf", x)


def absolute(x: Expr) -> Expr:
    return unary("abs", x)


def sigmoid(x: Expr) -> Expr:
    return 1.0 / (1.0 + exp(-x))


def maximum(x, y) -> Expr:
    return binary("maximum", x, y)


def minimum(x, y) -> Expr:
    return binary("minimum", x, y)


def where(condition: Expr, x, y) -> Expr:
    """x where the condition holds, else y; the other branch may be NaN without harm."""
    if not isinstance(x, Expr):
        x = const(x, y.dtype)
    if not isinstance(y, Expr):
        y = const(y, x.dtype)
    if condition.dtype is not BOOL or x.dtype is not y.dtype:
        raise ShapeError(f"where(bool, T, T), got {condition.dtype}, {x.dtype}, {y.dtype}")
    varies = condition.varies or x.varies or y.varies
    return Expr("select", (condition, x, y), x.dtype, varies=varies)


def is_finite(x: Expr) -> Expr:
    """False for NaN and both infinities: x - x is 0 for finite x only."""
    return (x - x).equals(0.0)


def multiply_high(x: Expr, y) -> Expr:
    """The upper 32 bits of the 64-bit product of two u32."""
    return binary("mulhi", x, y)


def linear_index() -> Expr:
    """The element's row-major place in the whole tensor, u32 (wraps at 2³²)."""
    return Expr("linear", (), U32)


class RowContext:
    """What a row op may ask of its row beside the operands: reductions, the element's index."""

    def __init__(self, size: int) -> None:
        #: Number of elements in a row.
        self.size = size

    @property
    def index(self) -> Expr:
        """The element's place in its row, i32."""
        return Expr("index", (), I32, varies=self.size != 1)

    def sum(self, x: Expr) -> Expr:
        _check("sum", x.dtype)
        return Expr("sum", (x,), x.dtype, varies=False)

    def max(self, x: Expr) -> Expr:
        """The largest element; NaN if any is NaN."""
        if self.size == 0:
            raise ShapeError("a row with at least one element: the maximum of nothing is undefined")
        return Expr("max", (x,), x.dtype, varies=False)

    def mean(self, x: Expr) -> Expr:
        return self.sum(x) / float(self.size) if self.size else self.sum(x) / 0.0

    def column_sum(self, x: Expr) -> Expr:
        """The sum over all rows, one value a column. A result only, never an operand."""
        _check("sum", x.dtype)
        return Expr("column_sum", (x,), x.dtype)

    def roll(self, x: Expr, shift: int) -> Expr:
        """Element i of the result is element (i + shift) mod size of x."""
        if not x.varies:
            return x
        return Expr("roll", (x,), x.dtype, shift % self.size)


def inputs(operands: Sequence[TensorType], row_size: int | None = None) -> list[Expr]:
    """Leaves for typed operands: all vary in a pointwise op, those of extent `row_size` in a row
    op (operand 0 alone where rows have one element, and shapes cannot tell)."""
    def varies(i: int, t: TensorType) -> bool:
        if row_size is None:
            return True
        return i == 0 if row_size == 1 else t.shape[-1:] == (row_size,)
    return [Expr("input", (), t.dtype.compute, i, varies=varies(i, t))
            for i, t in enumerate(operands)]


def array_inputs(operands: Sequence[np.ndarray], row_size: int | None = None) -> list[Expr]:
    """Leaves for arrays: as `inputs`, but floats are in the type the arrays come in."""
    return inputs(list(map(array_type, operands)), row_size)


def array_type(array: np.ndarray) -> TensorType:
    return TensorType(DType.from_numpy(array.dtype), array.shape)


def storage(expr: Expr, operands: Sequence[TensorType]) -> DType:
    """The type a result is stored in: 16 bits if operand 0 is, but row statistics stay f32."""
    narrow = operands and operands[0].dtype.is_float and operands[0].dtype.itemsize == 2
    if narrow and expr.dtype is F32 and expr.varies and expr.op != "column_sum":
        return operands[0].dtype
    return expr.dtype


def evaluate(exprs: Sequence[Expr], operands: Sequence[np.ndarray],
             space: tuple[int, ...] | None = None) -> tuple[np.ndarray, ...]:
    """The expressions' values in numpy. `space` is the shape of the row space, by default that
    of the operands."""
    if space is None:
        space = operands[0].shape if operands else ()
    memo: dict[Expr, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for expr in topological(exprs):
            memo[expr] = _evaluate_one(expr, [memo[a] for a in expr.args], operands, space)
    return tuple(memo[expr] for expr in exprs)


def topological(exprs: Sequence[Expr]) -> list[Expr]:
    """Every expression reachable from these, operands before users, without recursion."""
    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(expr, False) for expr in reversed(exprs)]
    while stack:
        expr, ready = stack.pop()
        if ready:
            order.setdefault(expr)
        elif expr not in order:
            stack.append((expr, True))
            stack.extend((arg, False) for arg in reversed(expr.args))
    return list(order)


def _evaluate_one(expr: Expr, args: list[np.ndarray], operands, space) -> np.ndarray:
    match expr.op:
        case "input":
            return operands[expr.value]
        case "const":
            return np.array(expr.value, expr.dtype.numpy)
        case "index":
            return np.arange(space[-1], dtype=np.int32)
        case "linear":
            return np.arange(math.prod(space), dtype=np.uint64).astype(np.uint32).reshape(space)
        case "select":
            return np.where(*args)
        case "cast":
            return args[0].astype(expr.dtype.numpy)
        case "bitcast":
            return args[0].view(expr.dtype.numpy)
        case "sum":
            full = np.broadcast_to(args[0], space)
            return full.sum(-1, keepdims=True, dtype=full.dtype)
        case "max":
            return np.broadcast_to(args[0], space).max(-1, keepdims=True)
        case "column_sum":
            full = np.broadcast_to(args[0], space)
            return full.sum(tuple(range(len(space) - 1)), dtype=full.dtype)
        case "roll":
            full = np.broadcast_to(args[0], (*args[0].shape[:-1], space[-1]))
            return np.roll(full, -expr.value, axis=-1)
    if expr.op in UNARY:
        return UNARY[expr.op](args[0])
    return (COMPARE.get(expr.op) or BINARY[expr.op])(*args)
