"""The base class of every op, and the registry.

An op is a class in one place: its attributes are annotated fields, `infer` gives the result types,
`backward` its gradient rule as IR, and its meaning takes one of these forms:

* `Pointwise.scalar`: a scalar expression, applied to every element;
* `Row.row`: scalar expressions and reductions along the last axis;
* `Composite.decompose`: a function of other ops;
* `evaluate`: numpy, for ops whose kernels the backends write by hand.

Subclassing registers the op under its `name` and makes it a frozen dataclass, so an op defined in
a test or a user's file is a full citizen:

    class Cube(Pointwise):
        \"\"\"y = x³\"\"\"
        name = "cube"

        def scalar(self, x):
            return x * x * x

        def backward(self, b, node, grads):
            (x,), (g,) = node.inputs, grads
            return [g * 3.0 * x * x]
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from euler_ir import scalar
from euler_ir.scalar import Expr
from euler_ir.types import ShapeError, TensorType

if TYPE_CHECKING:
    from euler_ir.builder import Builder
    from euler_ir.graph import Node, Value

#: Every op class by its name in the text form.
REGISTRY: dict[str, type[Op]] = {}


class NoGradient(Exception):
    """What an op's `backward` raises that has no gradient to give; autodiff adds the op, the value
    and the source line."""


class Op:
    """An operation with its attributes: `Matmul(transpose_b=True)` is an instance.

    Two ops are equal when they have one class and one text: 0.0 is not -0.0, and NaN is NaN."""

    name: ClassVar[str]
    #: Number of operands, taken from the signature of the op's meaning; None where it varies.
    arity: ClassVar[int | None] = None

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, eq=False)(cls)
        cls.arity = _arity(cls)
        if "name" not in cls.__dict__:
            return
        known = REGISTRY.get(cls.name)
        if known is not None and (known.__module__, known.__qualname__) != (
                cls.__module__, cls.__qualname__):
            raise ValueError(f"two ops are named {cls.name!r}: {known} and {cls}")
        REGISTRY[cls.name] = cls

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """Result types for operand types; raises ShapeError with what would be right."""
        raise NotImplementedError(f"op {self.name} has no infer")

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        """The meaning in numpy. Floats come as f64 or in their compute type; results are rounded
        to the declared types by the interpreter."""
        raise NotImplementedError(f"op {self.name} has no evaluate")

    def backward(self, b: Builder, node: Node,
                 grads: Sequence[Value | None]) -> Sequence[Value | None]:
        """Gradients of the operands, given those of the results (None: nothing flows); raises
        NoGradient where the op has none."""
        raise NoGradient("it has no backward rule")

    def alias(self, *operands: TensorType) -> int | None:
        """Where a view lies: the element offset into operand 0, or None if it is no view."""
        return None

    def attributes(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _exact(self) == _exact(other)

    def __hash__(self) -> int:
        return hash((type(self), _exact(self)))


def result_types(op: Op, operands: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """`op.infer` behind a check of the number of operands; raises ShapeError."""
    if op.arity is not None and len(operands) != op.arity:
        raise ShapeError(f"{op.arity} operand{'s' * (op.arity != 1)}, got {_listed(operands)}")
    return tuple(op.infer(*operands))


def _arity(cls: type[Op]) -> int | None:
    for method, leading in (("scalar", 1), ("row", 2), ("decompose", 2), ("evaluate", 1)):
        if hasattr(cls, method):
            parameters = list(inspect.signature(getattr(cls, method)).parameters.values())
            if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
                return len(parameters) - leading
    return None


def _exact(value: Any) -> Any:
    """Attributes as hashable data that is equal only for what prints alike."""
    if isinstance(value, Op):
        return tuple([_exact(getattr(value, name)) for name in value.__dataclass_fields__])
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return "float", float(value).hex()
    return value


class Pointwise(Op):
    """An op on equal shapes whose results at an element depend on the operands there only.

    Its floats are of one type: a result can have no other, and nor could a gradient."""

    def scalar(self, *operands: Expr) -> Expr | tuple[Expr, ...]:
        """The scalar expression, traced once; see `euler_ir.scalar`."""
        raise NotImplementedError(f"op {self.name} has no scalar")

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        for operand in operands[1:]:
            if operand.shape != operands[0].shape:
                raise ShapeError(f"operands of one shape, got {_listed(operands)}")
        if len({operand.dtype for operand in operands if operand.dtype.is_float}) > 1:
            raise ShapeError(f"floats of one type, got {_listed(operands)}; cast some of them")
        return tuple(operands[0].with_dtype(scalar.storage(expr, operands))
                     for expr in self.trace(*operands))

    def trace(self, *operands: TensorType) -> tuple[Expr, ...]:
        """One expression a result, over inputs typed as the operands."""
        return _pointwise_trace(self, operands)

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        return scalar.evaluate(self.trace(*map(scalar.array_type, operands)), operands)


class Row(Op):
    """An op along the last axis: every row (…, C) of the row space is computed on its own.

    Operands broadcast against the row space as numpy's do: `[..., C]` is a full operand, `[..., 1]`
    has one value a row, `[C]` is shared by all rows. Results that vary along the row have the
    shape of the row space, the others `[..., 1]`; `row.column_sum` sums over all rows: `[C]`."""

    def row(self, row: scalar.RowContext, *operands: Expr) -> Expr | tuple[Expr, ...]:
        raise NotImplementedError(f"op {self.name} has no row")

    def space(self, *operands: TensorType) -> tuple[int, ...]:
        """Shape of the row space."""
        try:
            return tuple(np.broadcast_shapes(*(operand.shape for operand in operands)))
        except ValueError:
            raise ShapeError(f"operands that broadcast, got {_listed(operands)}") from None

    def trace(self, *operands: TensorType) -> tuple[Expr, ...]:
        """One expression a result, over inputs typed as the operands."""
        return _row_trace(self, operands)

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        space = self.space(*operands)
        if not space:
            raise ShapeError(f"at least one axis, got {_listed(operands)}")
        results = []
        for expr in self.trace(*operands):
            if expr.op == "column_sum":
                shape = space[-1:]
            else:
                shape = space if expr.varies else space[:-1] + (1,)
            results.append(TensorType(scalar.storage(expr, operands), shape))
        return tuple(results)

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        types = tuple(map(scalar.array_type, operands))
        space, exprs = self.space(*types), self.trace(*types)
        arrays = scalar.evaluate(exprs, operands, space)
        return tuple(_spread(expr, array, space)
                     for expr, array in zip(exprs, arrays, strict=True))


class Composite(Op):
    """An op that is a function of other ops; backends may still have a kernel for it."""

    def decompose(self, b: Builder, *operands: Value) -> Value | Sequence[Value]:
        raise NotImplementedError(f"op {self.name} has no decompose")

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return tuple(value.type for value in self.body(*operands).outputs)

    def body(self, *operands: TensorType):
        """The decomposition as a Function over operands of these types."""
        return _composite_body(self, operands)

    def evaluate(self, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        from euler_ir.interpreter import run_decomposed
        return run_decomposed(self, operands)


# What follows from an op and its operands' types is asked for again and again, by the passes, by
# equal layers, and by the interpreter at every run.


@lru_cache(maxsize=4096)
def _pointwise_trace(op: Pointwise, operands: tuple[TensorType, ...]) -> tuple[Expr, ...]:
    return _tuple(op.scalar(*scalar.inputs(operands)))


@lru_cache(maxsize=4096)
def _row_trace(op: Row, operands: tuple[TensorType, ...]) -> tuple[Expr, ...]:
    context = scalar.RowContext(op.space(*operands)[-1])
    return _tuple(op.row(context, *scalar.inputs(operands, context.size)))


@lru_cache(maxsize=256)
def _composite_body(op: Composite, operands: tuple[TensorType, ...]):
    from euler_ir.builder import Builder
    with Builder(op.name) as b:
        values = [b.input(f"x{i}", t.dtype, t.shape) for i, t in enumerate(operands)]
        results = op.decompose(b, *values)
        results = [results] if not isinstance(results, (list, tuple)) else results
        return b.function({f"y{i}": value for i, value in enumerate(results)})


def _listed(operands: Sequence[TensorType]) -> str:
    return ", ".join(map(str, operands)) or "none"


def _tuple(result) -> tuple[Expr, ...]:
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def _spread(expr: Expr, array: np.ndarray, space: tuple[int, ...]) -> np.ndarray:
    """Broadcast a row result to its declared shape (a result may not touch every operand)."""
    if expr.op == "column_sum":
        return np.broadcast_to(array, space[-1:])
    return np.broadcast_to(array, space if expr.varies else space[:-1] + (1,))
