"""The 16-bit floats as bits, written in the scalar language: f32 from them, and them from f32.

Not every CPU has instructions for these, and where it lacks them LLVM would call a library that is
not there. Rounding is to nearest, ties to even; NaN stays NaN, and subnormals are exact.
"""

from __future__ import annotations

from euler_ir import scalar as s
from euler_ir.scalar import Expr
from euler_ir.types import BF16, F16, F32, U32

__all__ = ["NARROW", "WIDEN"]


def _bf16_to_f32(bits: Expr) -> Expr:
    """bf16 is the upper half of an f32."""
    return (bits << 16).bitcast(F32)


def _f32_to_bf16(x: Expr) -> Expr:
    bits = x.bitcast(U32)
    upper = bits >> 16
    rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
    # Rounding could carry a NaN into infinity or zero; a set bit of its fraction keeps it one.
    return s.where(x.equals(x), rounded, upper | 0x40)


def _f16_to_f32(bits: Expr) -> Expr:
    """Exponent and fraction in place, the exponent's bias put right by a product, which makes
    subnormal numbers normal on the way."""
    magnitude = (bits & 0x7FFF) << 13
    number = (magnitude.bitcast(F32) * 2.0**112).bitcast(U32)
    special = magnitude | 0x7F800000
    sign = (bits & 0x8000) << 16
    return (s.where(magnitude < (0x7C00 << 13), number, special) | sign).bitcast(F32)


def _f32_to_f16(x: Expr) -> Expr:
    bits = x.bitcast(U32)
    magnitude = bits & 0x7FFFFFFF
    number = magnitude.bitcast(F32)
    # Normal results: another bias, and the fraction rounded to 10 bits.
    normal = (magnitude - (112 << 23) + (((magnitude >> 13) & 1) + 0xFFF)) >> 13
    # Subnormal ones are multiples of 2⁻²⁴: adding ½ rounds to them, and leaves their number in
    # the low bits.
    subnormal = (number + 0.5).bitcast(U32) - s.const(0x3F000000, U32)
    finite = s.where(number < 2.0**-14, subnormal, normal)
    special = s.where(x.equals(x), s.const(0x7C00, U32), 0x7E00)
    return s.where(number < 65520.0, finite, special) | ((bits >> 16) & 0x8000)


def _traced(function, dtype) -> tuple[Expr, Expr]:
    argument = Expr("input", (), dtype, 0)
    return argument, function(argument)


#: For each 16-bit type its bits as u32, and the f32 they mean.
WIDEN = {BF16: _traced(_bf16_to_f32, U32), F16: _traced(_f16_to_f32, U32)}
#: For each an f32, and the nearest number's bits as u32.
NARROW = {BF16: _traced(_f32_to_bf16, F32), F16: _traced(_f32_to_f16, F32)}
