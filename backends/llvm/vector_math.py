"""exp, log, tanh, erf, sin and cos of f32 as polynomials, written in the scalar language.

A vector has no libm: these are straight-line sums and products, bit operations and selects, so they
cost the same for one value and for sixteen, and mean the same wherever the scalar language does
(f64 uses the C library instead). Coefficients are minimax fits of our own, by Lawson's weighted
least squares in f64, for the error relative to the function.

NaN gives NaN, infinities give the limits. Subnormal arguments and results are exact to their own
spacing; nothing is flushed to zero. The largest error found, in units in the last place of the
exact result, over every 1009th f32 there is and two million in the range where the function is not
flat, on targets with and without fused multiply-add:

    exp 1.01   log 0.86   tanh 2.58   erf 1.40   sin, cos 1.95 (|x| ≤ 10⁶)

Past 10⁶ sin and cos lose accuracy with the spacing of x, and past 10¹⁵ their results are
meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from euler_ir import scalar as s
from euler_ir.scalar import Expr
from euler_ir.types import F32, F64, I32, I64

__all__ = ["flushed_exp", "polynomial"]

# Adding 1.5·2²³ to a small f32 rounds it to an integer, which then stands in the low bits.
_ROUND_F32 = 1.5 * 2.0**23
_ROUND_F64 = 1.5 * 2.0**52
# ln 2 as a short number, whose product with any exponent is exact, and the rest.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_PI_2_HIGH = 1.5707963267341256  # 33 bits
_PI_2_LOW = 6.077100506506192e-11

_EXP = (0.4999999403953552, 0.16666515171527863, 0.04166845604777336, 0.008369418792426586,
        0.0013813142431899905)
_LOG = (0.3333333134651184, -0.25000837445259094, 0.2000129222869873, -0.16622763872146606,
        0.14199699461460114, -0.13164198398590088, 0.1277908831834793, -0.07646037638187408)
_ERF = (2.0 / math.sqrt(math.pi) - 1.0, -0.3761262893676758, 0.11283617466688156,
        -0.02685491554439068, 0.0051901619881391525, -0.0008024816052056849,
        7.898686453700066e-05)
_LOG_ERFC = (-1.1286942958831787, -0.6349695324897766, -0.10653086751699448, 0.024010069668293,
             -0.003757476806640625, 0.00035059204674325883, -1.3962444427306764e-05)
_SIN = (-0.1666666716337204, 0.008333329111337662, -0.00019839256128761917,
        2.7175644845556235e-06)
_COS = (0.0416666679084301, -0.0013888883404433727, 2.479943577782251e-05)


def exp(x: Expr) -> Expr:
    """eˣ = 2ⁿ eʳ with n the nearest integer to x/ln 2, so that |r| ≤ ln 2 / 2."""
    x = s.where(x < -104.0, -104.0, x)  # e⁻¹⁰⁴ rounds to 0, e⁸⁹ overflows
    power, exponent = _exp_parts(s.where(x > 89.0, 89.0, x))
    # In two steps: 2ⁿ itself may be out of range where the result is not.
    half = exponent >> 1
    return power * _power_of_two(half) * _power_of_two(exponent - half)


def flushed_exp(x: Expr) -> Expr:
    """eˣ for softmax weights: 0 where eˣ < 2⁻¹²⁶·⁵, infinity from 2¹²⁷·⁵ on, else as exp.

    With 2ⁿ in one step it takes three quarters of exp's operations."""
    x = s.where(x < -88.0, -88.0, x)  # n = -127 has the bits of 0, n = 128 those of infinity
    power, exponent = _exp_parts(s.where(x > 89.0, 89.0, x))
    return power * _power_of_two(exponent)


def _exp_parts(x: Expr) -> tuple[Expr, Expr]:
    """eʳ and n, an i32."""
    shifted, r = _reduce(x)
    power = r * r * _horner(r, _EXP) + r + 1.0
    return power, shifted.bitcast(I32) - s.const(_ROUND_F32, F32).bitcast(I32)


def log(x: Expr) -> Expr:
    """ln x = e ln 2 + ln m with m in [√½, √2), x = 2ᵉ m."""
    small = x < 2.0**-126
    scaled = s.where(small, x * 2.0**23, x)
    bits = scaled.bitcast(I32)
    # Subtracting the bits of √½ puts the boundary between two exponents there.
    root_half = s.const(math.sqrt(0.5), F32).bitcast(I32)
    exponent = (bits - root_half) >> 23
    f = (bits - (exponent << 23)).bitcast(F32) - 1.0
    e = (exponent - s.where(small, s.const(23, I32), 0)).cast(F32)
    square = f * f
    tail = f * square * _horner(f, _LOG) + e * _LN2_LOW
    result = (tail - 0.5 * square) + f + e * _LN2_HIGH
    result = s.where(x < math.inf, result, x)  # infinity and NaN are their own logarithms
    result = s.where(x.equals(0.0), -math.inf, result)
    return s.where(x < 0.0, math.nan, result)


def tanh(x: Expr) -> Expr:
    """tanh x = z/(z + 2) with z = e²ˣ - 1, in which 2ⁿ eʳ - 1 = 2ⁿ (eʳ - 1) + (2ⁿ - 1) keeps the
    digits of small x."""
    magnitude = s.absolute(x)
    magnitude = s.where(magnitude > 9.1, 9.1, magnitude)  # where tanh x is 1 in f32
    shifted, r = _reduce(magnitude + magnitude)
    scale = _power_of_two(shifted.bitcast(I32))
    z = (r * r * _horner(r, _EXP) + r) * scale + (scale - 1.0)
    return _with_sign_of(z / (z + 2.0), x)


def erf(x: Expr) -> Expr:
    """erf x = x + x P(x²) for |x| ≤ 1, else 1 - e^{x Q(x)}, which is 1 in f32 from 4 on."""
    magnitude = s.absolute(x)
    square = x * x
    near = magnitude + magnitude * _horner(square, _ERF)
    bounded = s.where(magnitude > 4.0, 4.0, magnitude)
    far = 1.0 - exp(bounded * _horner(bounded, _LOG_ERFC))
    return _with_sign_of(s.where(magnitude <= 1.0, near, far), x)


def sin(x: Expr) -> Expr:
    """The quarter turn n nearest to x decides between ±sin and ±cos of the rest."""
    return _circular(x, 0)


def cos(x: Expr) -> Expr:
    """sin a quarter turn further on."""
    return _circular(x, 1)


def _circular(x: Expr, quarters: int) -> Expr:
    wide = x.cast(F64)
    shifted = wide * (2.0 / math.pi) + _ROUND_F64
    n = shifted - _ROUND_F64
    r = ((wide - n * _PI_2_HIGH) - n * _PI_2_LOW).cast(F32)
    quarter = shifted.bitcast(I64) + quarters
    square = r * r
    sine = r + r * square * _horner(square, _SIN)
    cosine = 1.0 - 0.5 * square + square * square * _horner(square, _COS)
    value = s.where((quarter & 1).equals(0), sine, cosine)
    return s.where((quarter & 2).equals(0), value, -value)


_FUNCTIONS = {"exp": exp, "log": log, "tanh": tanh, "erf": erf, "sin": sin, "cos": cos}


@cache
def polynomial(op: str) -> tuple[Expr, Expr]:
    """An f32 argument, and the expression of the function `op` of it."""
    x = Expr("input", (), F32, 0)
    return x, _FUNCTIONS[op](x)


def _reduce(x: Expr) -> tuple[Expr, Expr]:
    """n in the low bits of an f32, and r, for x = n ln 2 + r."""
    shifted = x * (1.0 / math.log(2.0)) + _ROUND_F32
    n = shifted - _ROUND_F32
    return shifted, (x - n * _LN2_HIGH) - n * _LN2_LOW


def _horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Σ cᵢ xⁱ"""
    result = s.const(coefficients[-1], F32)
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _power_of_two(n: Expr) -> Expr:
    """2ⁿ, for n in the range of normal numbers; its bits above the ninth drop out."""
    return ((n + 127) << 23).bitcast(F32)


def _with_sign_of(magnitude: Expr, x: Expr) -> Expr:
    sign = x.bitcast(I32) & s.const(-(2**31), I32)
    return (magnitude.bitcast(I32) | sign).bitcast(F32)
