"""What a matmul does to its result on the way to memory: a bias, an activation, a residual."""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e

__all__ = ["Epilogue", "EpilogueContext", "store_result"]


@dataclass(frozen=True)
class EpilogueContext:
    """What an epilogue may use besides the values: its operands, read in the lanes that exist.

    `operands` are the pointers of the epilogue's operands, in order. `vector` is the type of the
    values (its `count` the lanes); `mask` is None where every lane is stored, else a constant that
    switches on the lanes left of C's right edge.
    """

    operands: tuple[ir.Value, ...]
    vector: ir.VectorType
    mask: ir.Constant | None


@dataclass(frozen=True)
class Epilogue:
    """What is done to C's values between the last multiply-add and the store.

    `emit(builder, context, value, row, col)` returns the vector to store for the vector `value`
    that stands at columns col, col + 1, … of a row; `row` counts through the batch (b·m + i), and
    both are i64 values. It may load operands through the context, and branch: the builder's current
    block on return is where the store goes. `key` names what it does, for the kernel's key.
    `elementwise` lists the operands that are read at (row, col) alone, so that C may overwrite
    them.
    """

    key: str
    operand_count: int
    emit: Callable[[ir.IRBuilder, EpilogueContext, ir.Value, ir.Value, ir.Value], ir.Value]
    elementwise: tuple[int, ...] = ()


def store_result(
    b: ir.IRBuilder,
    epilogue: Epilogue | None,
    operands: tuple[ir.Value, ...],
    value: ir.Value,
    pointer: ir.Value,
    row: ir.Value,
    col: ir.Value,
    mask: ir.Constant | None,
) -> None:
    """Store a vector of finished sums that stands at (row, col) of C, through the epilogue."""
    if epilogue:
        context = EpilogueContext(operands, value.type, mask)
        value = epilogue.emit(b, context, value, row, col)
    e.store_lanes(b, value, pointer, mask)
