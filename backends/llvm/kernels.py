"""The table of lowerings, filled: importing this module brings in every module with kernels."""

from backends.llvm import (
    attention,
    elementwise,
    lookup,
    matmul,
    movement,
    optimizer,
    reduce,
)
from backends.llvm.lowering import LOWERINGS, lower_node, lowers, structure
from euler_ir import ops

__all__ = [
    "LOWERINGS", "elementwise", "lookup", "lower_node", "matmul", "movement", "optimizer",
    "reduce", "structure",
]  # fmt: skip

lowers(ops.Attention)(attention.attention)
