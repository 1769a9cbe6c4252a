"""The table of lowerings, filled: importing this module brings in every module with kernels."""

from backends.llvm import (
    attention,
    attention_backward,
    elementwise,
    lookup,
    matmul,
    movement,
    optimizer,
    reduce,
)
from backends.llvm.lowering import LOWERINGS, lower_node, structure

__all__ = [
    "LOWERINGS", "attention", "attention_backward", "elementwise", "lookup", "lower_node",
    "matmul", "movement", "optimizer", "reduce", "structure",
]  # fmt: skip
