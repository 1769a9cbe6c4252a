"""Counter-based random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). The bits depend on key, counter and element only, never on thread or device.

    %bits: u32[64] = random_bits(%key0, %key1, %counter)
"""

from __future__ import annotations

from euler_ir import scalar as s
from euler_ir.op import Pointwise
from euler_ir.types import F32, F64, U32, DType, ShapeError, TensorType

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class RandomBits(Pointwise):
    """32 random bits an element.

    Element i of the result is word i mod 4 of the block with counter (i div 4, c, 0, 0) and key
    (k0, k1), where key0, key1, counter are u32 operands broadcast to the result's shape."""
    name = "random_bits"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if any(operand.dtype is not U32 for operand in operands):
            raise ShapeError(f"u32 operands key0, key1, counter, got {list(map(str, operands))}")
        return super().infer(*operands)

    def scalar(self, key0, key1, counter):
        element = s.linear_index()
        words = philox((element >> 2, counter, s.const(0, U32), s.const(0, U32)), (key0, key1))
        lane = element & 3
        low = s.where(lane.equals(0), words[0], words[1])
        high = s.where(lane.equals(2), words[2], words[3])
        return s.where(lane < 2, low, high)

    def backward(self, b, node, grads):
        return [None] * len(node.inputs)


class UniformFromBits(Pointwise):
    """y in [0, 1): the upper 24 bits times 2⁻²⁴ (exact in f32)"""
    name = "uniform_from_bits"
    dtype: DType = F32

    def scalar(self, bits):
        return (bits >> 8).cast(self.dtype) * 2.0**-24

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if self.dtype not in (F32, F64) or operands[0].dtype is not U32:
            raise ShapeError(f"u32 bits and dtype f32 or f64, got {operands[0]} and {self.dtype}")
        return (operands[0].with_dtype(self.dtype),)

    def backward(self, b, node, grads):
        return [None]


def philox(counter, key):
    """Four words of random bits: ten rounds of multiply, swap and xor, the key bumped between."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = s.multiply_high(c0, _MULTIPLIERS[0]), c0 * _MULTIPLIERS[0]
        high1, low1 = s.multiply_high(c2, _MULTIPLIERS[1]), c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1, c2, c3
