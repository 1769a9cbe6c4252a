"""The table of lowerings, filled: importing this module brings in every module with kernels."""

from backends.llvm import attention, elementwise, matmul, movement
from backends.llvm.lowering import LOWERINGS, lower_node, lowers, structure
from euler_ir import ops

__all__ = ["LOWERINGS", "elementwise", "lower_node", "matmul", "movement", "structure"]

lowers(ops.Attention)(attention.attention)
