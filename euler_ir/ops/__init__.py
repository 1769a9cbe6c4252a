"""The ops, one module a family. Importing this package fills the registry."""

from euler_ir.ops.attention import Attention, AttentionBackward
from euler_ir.ops.constant import Full, Iota
from euler_ir.ops.embedding import Gather, ScatterAdd
from euler_ir.ops.fused import Fused
from euler_ir.ops.linear import Matmul
from euler_ir.ops.optimizer import AdamW, GlobalNorm
from euler_ir.ops.pointwise import (
    Abs,
    Add,
    And,
    Cast,
    Clip,
    Div,
    Equal,
    Erf,
    Exp,
    Gelu,
    IsFinite,
    Less,
    LessEqual,
    Log,
    Maximum,
    Minimum,
    Mul,
    Neg,
    Not,
    Or,
    Relu,
    Rsqrt,
    Select,
    Sigmoid,
    Sign,
    Silu,
    Sqrt,
    Sub,
    SwiGLU,
    Tanh,
)
from euler_ir.ops.random import RandomBits, UniformFromBits
from euler_ir.ops.reduce import ArgMax, ReduceMax, ReduceMin, ReduceSum
from euler_ir.ops.rotary import Rotary
from euler_ir.ops.row import CrossEntropy, LayerNorm, RMSNorm, Softmax
from euler_ir.ops.shape import (
    Broadcast,
    Concat,
    DynamicSlice,
    Pad,
    Reshape,
    Slice,
    Split,
    Transpose,
    UpdateSlice,
)

__all__ = [name for name in dir() if name[0].isupper()]
