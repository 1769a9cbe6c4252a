"""Sample operands for every op in the registry, and operands that each must refuse.

`CASES[name]` lists (op, operands, options of check_op); `REFUSED[name]` lists (op, operand types, a
part of the message). An op without cases fails tests/test_ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from euler_ir import ops
from euler_ir.builder import Builder
from euler_ir.op import REGISTRY, Op
from euler_ir.types import BF16, BOOL, F32, F64, I32, I64, U32, TensorType


@dataclass(frozen=True)
class Case:
    op: Op
    operands: tuple
    options: dict[str, Any] = field(default_factory=dict)


def case(op: Op, *operands, **options) -> Case:
    return Case(op, operands, options)


def make(name: str, *attributes) -> Op:
    """An op that only backward rules and decompositions use, by its name."""
    return REGISTRY[name](*attributes)


def normal(*shape: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return np.random.default_rng(8).uniform(0.5, 3.0, shape)


def bits(*shape: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape).astype(np.uint32)


def i32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def position(value: int) -> np.ndarray:
    return np.array(value, np.int32)


def booleans(*shape: int, seed: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.5


def rotary_tables(length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, 1, width] of some angles, sin with the sign that rotary expects."""
    angles = np.outer(np.arange(length), 1.7 ** -np.arange(width // 2))[:, None]
    return (np.concatenate([np.cos(angles)] * 2, -1),
            np.concatenate([-np.sin(angles), np.sin(angles)], -1))


def attention_operands(batch=2, queries=3, keys=4, heads=4, groups=2, width=2):
    """q, k, v and causal ranges behind a cache, with one query that sees nothing."""
    lo = np.zeros((batch, queries), np.int32)
    lo[-1] = 1
    hi = np.tile(np.arange(1, queries + 1, dtype=np.int32) + keys - queries, (batch, 1))
    hi[0, 0] = 0
    q, k, v = (normal(*shape, seed=seed) for seed, shape in enumerate(
        [(batch, queries, heads, width)] + 2 * [(batch, keys, groups, width)]))
    return q, k, v, lo, hi


def attention_backward_operands():
    operands = attention_operands()
    o, log_sum = ops.Attention(0.7).evaluate(*operands)
    return (*operands, o, log_sum, normal(*o.shape, seed=4))


def adamw_operands(steps=3, norm=1.5, limit=10.0):
    shapes = ((2, 3), (4,))
    groups = [normal(*shape, seed=20 + i) for i in range(3) for shape in shapes]
    second = [positive(*shape) for shape in shapes]
    return (*groups, *second, np.array(1e-3), position(steps), np.array(norm), np.array(limit))


def fused_op(kind: str) -> ops.Fused:
    with Builder("body") as b:
        x = b.input("x", F64, (2, 4))
        if kind == "row":
            y = b.silu(x) * 2.0
            return ops.Fused("row", b.function({"y": y, "sum": b.softmax(y)}))
        w = b.input("w", F64, (4, 3))
        return ops.Fused("matmul", b.function({"y": b.relu(b.matmul(x, w))}))


_PAIR = [(2, 3), (2, 3)]
_NO_RULE = dict(gradient=False)
_SPREAD = np.linspace(-3.0, 3.0, 11)

CASES: dict[str, list[Case]] = {
    "add": [case(ops.Add(), *_PAIR), case(ops.Add(), i32(1, 2), i32(3, -4)),
            case(ops.Add(), (5,), (5,), dtype=BF16), case(ops.Add(), (4, 1), (4, 1), dtype=BF16)],
    "sub": [case(ops.Sub(), *_PAIR), case(ops.Sub(), i32(1, 2), i32(3, -4))],
    "mul": [case(ops.Mul(), *_PAIR), case(ops.Mul(), i32(1, 2), i32(3, -4))],
    "div": [case(ops.Div(), (2, 3), positive(2, 3))],
    "neg": [case(ops.Neg(), (2, 3)), case(ops.Neg(), i32(1, -2))],
    "abs": [case(ops.Abs(), (2, 3)), case(ops.Abs(), i32(1, -2)), case(ops.Abs(), bits(7))],
    "sign": [case(ops.Sign(), (2, 3)), case(ops.Sign(), i32(3, 0, -2))],
    "maximum": [case(ops.Maximum(), *_PAIR), case(ops.Maximum(), i32(1, 2), i32(3, -4))],
    "minimum": [case(ops.Minimum(), *_PAIR), case(ops.Minimum(), i32(1, 2), i32(3, -4))],
    "exp": [case(ops.Exp(), (2, 3))],
    "log": [case(ops.Log(), positive(2, 3))],
    "sqrt": [case(ops.Sqrt(), positive(2, 3))],
    "rsqrt": [case(ops.Rsqrt(), positive(2, 3))],
    "tanh": [case(ops.Tanh(), _SPREAD)],
    "sigmoid": [case(ops.Sigmoid(), _SPREAD)],
    "erf": [case(ops.Erf(), _SPREAD)],
    "relu": [case(ops.Relu(), (2, 3))],
    "silu": [case(ops.Silu(), _SPREAD)],
    "silu_backward": [case(make("silu_backward"), _SPREAD, (11,), **_NO_RULE)],
    "swiglu": [case(ops.SwiGLU(), _SPREAD, (11,))],
    "swiglu_backward": [case(make("swiglu_backward"), _SPREAD, (11,), (11,), **_NO_RULE)],
    "gelu": [case(ops.Gelu(), _SPREAD)],
    "gelu_backward": [case(make("gelu_backward"), _SPREAD, (11,), **_NO_RULE)],
    "clip": [case(ops.Clip(-1.1, 0.7), _SPREAD)],
    "less": [case(ops.Less(), *_PAIR), case(ops.Less(), i32(1, 5), i32(3, -4))],
    "less_equal": [case(ops.LessEqual(), *_PAIR), case(ops.LessEqual(), i32(1, 5), i32(1, -4))],
    "equal": [case(ops.Equal(), *_PAIR), case(ops.Equal(), i32(1, 5), i32(1, -4))],
    "and": [case(ops.And(), booleans(5), booleans(5, seed=1)), case(ops.And(), bits(3), bits(3))],
    "or": [case(ops.Or(), booleans(5), booleans(5, seed=1)), case(ops.Or(), bits(3), bits(3))],
    "not": [case(ops.Not(), booleans(5)), case(ops.Not(), bits(3))],
    "is_finite": [case(ops.IsFinite(), np.array([0.0, np.inf, -np.inf, np.nan]), gradient=False)],
    "select": [case(ops.Select(), booleans(2, 3), *_PAIR)],
    "cast": [case(ops.Cast(F64), (2, 3)), case(ops.Cast(BF16), (2, 3)),
             case(ops.Cast(I32), np.array([-1.7, 0.0, 2.9])), case(ops.Cast(F32), i32(-3, 0, 2)),
             case(ops.Cast(BOOL), np.array([0.0, -2.0, 0.5])), case(ops.Cast(I64), i32(-3, 2))],
    "full": [case(ops.Full(1.5, F32, (2, 3))), case(ops.Full(-7, I32, ())),
             case(ops.Full(True, BOOL, (3,))), case(ops.Full(float("nan"), F32, (2,)))],
    "iota": [case(ops.Iota(5)), case(ops.Iota(0))],
    "softmax": [case(ops.Softmax(), (3, 5)), case(ops.Softmax(), (3, 5), dtype=BF16),
                case(ops.Softmax(), (3, 1), dtype=BF16)],
    "softmax_backward": [case(make("softmax_backward"), positive(3, 5), (3, 5), **_NO_RULE)],
    "rms_norm": [case(ops.RMSNorm(1e-5), (3, 5), (5,)),
                 case(ops.RMSNorm(1e-5), (2, 3, 4), (4,), dtype=BF16)],
    "rms_norm_backward": [case(make("rms_norm_backward", 1e-5), (3, 5), (5,), (3, 5),
                               **_NO_RULE)],
    "layer_norm": [case(ops.LayerNorm(1e-5), (3, 5), (5,), (5,)),
                   case(ops.LayerNorm(1e-5), (2, 3, 4), (4,), (4,), dtype=BF16)],
    "layer_norm_backward": [case(make("layer_norm_backward", 1e-5), (3, 5), (5,), (3, 5),
                                 **_NO_RULE)],
    "cross_entropy": [
        case(ops.CrossEntropy(), (4, 6), i32([0], [5], [-1], [2]), results=[0]),
        case(ops.CrossEntropy(5), (2, 2, 6), i32([[0], [4]], [[-1], [2]]), results=[0]),
        case(ops.CrossEntropy(), (4, 6), i32([0], [5], [-1], [2]), results=[0], dtype=BF16),
        case(ops.CrossEntropy(), (4, 6), i32([0], [5], [-1], [2]), results=[1]),
        case(ops.CrossEntropy(5), (2, 2, 6), i32([[0], [4]], [[-1], [2]]))],
    "cross_entropy_backward": [
        case(make("cross_entropy_backward", 5), (3, 6), i32([0], [-1], [2]), (3, 1), (3, 1),
             **_NO_RULE)],
    "rotary": [case(ops.Rotary(), (2, 3, 2, 4), *rotary_tables(3, 4), wrt=[0]),
               case(ops.Rotary(True), (2, 3, 2, 4), *rotary_tables(3, 4), wrt=[0]),
               case(ops.Rotary(), (1, 3, 1, 6), *rotary_tables(3, 6), wrt=[0], dtype=BF16)],
    "reduce_sum": [case(ops.ReduceSum((1,)), (2, 3, 4)),
                   case(ops.ReduceSum((0, 2), True), (2, 3, 4)), case(ops.ReduceSum(()), (2,)),
                   case(ops.ReduceSum((0, 1)), (2, 3)), case(ops.ReduceSum((0,)), i32(3, 4))],
    "reduce_max": [case(ops.ReduceMax((1,)), (2, 3, 4)),
                   case(ops.ReduceMax((0, 2), True), (2, 3, 4))],
    "reduce_min": [case(ops.ReduceMin((1,)), (2, 3, 4)),
                   case(ops.ReduceMin((0, 2), True), (2, 3, 4))],
    "argmax": [case(ops.ArgMax(), (3, 5)), case(ops.ArgMax(), i32(2, 9, 9))],
    "reshape": [case(ops.Reshape((3, 2)), (2, 3)), case(ops.Reshape(()), (1, 1))],
    "transpose": [case(ops.Transpose((2, 0, 1)), (2, 3, 4)), case(ops.Transpose(()), ())],
    "slice": [case(ops.Slice((0, 1), (2, 3)), (2, 4)), case(ops.Slice((1, 0), (2, 4)), (2, 4)),
              case(ops.Slice((1, 2), (1, 4)), (2, 4))],
    "split": [case(ops.Split(1, (1, 0, 2)), (2, 3)), case(ops.Split(0, (2,)), (2,))],
    "pad": [case(ops.Pad((4, 5), (1, 2)), (2, 3)), case(ops.Pad((3,), (1,)), i32(4, 5))],
    "concat": [case(ops.Concat(1), (2, 3), (2, 1), (2, 2)), case(ops.Concat(0), (2,))],
    "broadcast": [case(ops.Broadcast((4, 2, 3)), (2, 1)), case(ops.Broadcast((2, 3)), ()),
                  case(ops.Broadcast((0, 3)), (1, 3))],
    "update_slice": [case(ops.UpdateSlice(1), (2, 5, 2), (2, 2, 2), position(p))
                     for p in (0, 3, 4, 9, -1)],
    "dynamic_slice": [case(ops.DynamicSlice(1, 2), (2, 5), position(p)) for p in (0, 3, 4, 9, -1)],
    "matmul": [case(ops.Matmul(), (2, 3), (3, 4)), case(ops.Matmul(False, True), (2, 3), (4, 3)),
               case(ops.Matmul(True, False), (3, 2), (3, 4)),
               case(ops.Matmul(True, True), (3, 2), (4, 3)),
               case(ops.Matmul(), (2, 2, 3), (2, 3, 2)),
               case(ops.Matmul(True, True), (2, 3, 2), (2, 2, 3)),
               case(ops.Matmul(), (2, 2, 3), (3, 2)),
               case(ops.Matmul(False, True), (2, 2, 3), (2, 3)),
               case(ops.Matmul(), (5, 7), (7, 6), dtype=BF16),
               case(ops.Matmul(), (2, 3, 0), (0, 4)), case(ops.Matmul(), (0, 3), (3, 4))],
    "gather": [case(ops.Gather(), (5, 3), i32([0, 4, 2], [-1, 5, 2])),
               case(ops.Gather(), (5, 3), position(2))],
    "scatter_add": [case(ops.ScatterAdd(4), i32([0, 3, 0], [-1, 9, 2]), (2, 3, 2)),
                    case(ops.ScatterAdd(4), i32(1, 1, 1), (3, 2), dtype=BF16),
                    case(ops.ScatterAdd(2), i32(1, 0, 1), i32([1, 2], [3, 4], [5, -6])),
                    case(ops.ScatterAdd(4), i32(1, 1, 1), (3, 0))],
    "attention": [case(ops.Attention(0.7), *attention_operands(), results=[0]),
                  case(ops.Attention(0.7), *attention_operands(), results=[0], dtype=BF16),
                  case(ops.Attention(0.5), *attention_operands(1, 2, 2, 1, 1, 2), results=[0]),
                  case(ops.Attention(0.7), *attention_operands(), results=[1]),
                  case(ops.Attention(0.7), *attention_operands())],
    "attention_backward": [case(make("attention_backward", 0.7), *attention_backward_operands(),
                                **_NO_RULE)],
    "attention_weights": [
        case(make("attention_weights", 0.7), (1, 2, 3, 4), i32([[[0], [0], [1]]]),
             i32([[[2], [0], [3]]]), **_NO_RULE)],
    "attention_weights_backward": [
        case(make("attention_weights_backward", 0.7), (1, 2, 3, 4), i32([[[0], [0], [1]]]),
             i32([[[2], [0], [3]]]), (1, 2, 3, 1), (1, 2, 3, 4), (1, 2, 3, 1), **_NO_RULE)],
    "random_bits": [case(ops.RandomBits(), bits(7), bits(7, seed=1), bits(7, seed=2))],
    "uniform_from_bits": [case(ops.UniformFromBits(), bits(5), gradient=False),
                          case(ops.UniformFromBits(F64), bits(5), gradient=False)],
    "global_norm": [case(ops.GlobalNorm(), (2, 3), (4,)), case(ops.GlobalNorm(), (3,), dtype=BF16)],
    "adamw": [case(ops.AdamW((0.1, 0.0)), *adamw_operands(), **_NO_RULE),
              case(ops.AdamW((0.1, 0.0)), *adamw_operands(norm=11.0), **_NO_RULE)],
    "fused": [case(fused_op("row"), (2, 4), dtype=F64, **_NO_RULE),
              case(fused_op("matmul"), (2, 4), (4, 3), dtype=F64, **_NO_RULE)],
}


def types(*described) -> list[TensorType]:
    """Tensor types from shapes (f32) and (dtype, shape) pairs."""
    return [TensorType(*d) if d and not isinstance(d[0], int) else TensorType(F32, d)
            for d in described]


_TWO_SHAPES = types((2, 3), (3, 2))
_TWO_TYPES = types((2,), (I32, (2,)))
_TARGET = (I32, (4, 1))
_RANGES = [(I32, (1, 3)), (I32, (1, 3))]
_SCALAR = (I32, ())

REFUSED: dict[str, list[tuple[Op, list[TensorType], str]]] = {
    **{name: [(make(name), _TWO_SHAPES, "operands of one shape"),
              (make(name), _TWO_TYPES, f"'{word}' of one type")]
       for name, word in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("maximum", "maximum"),
                          ("minimum", "minimum"), ("less", "lt"), ("less_equal", "le"),
                          ("equal", "eq"))},
    "div": [(make("div"), _TWO_SHAPES, "operands of one shape"),
            (make("div"), _TWO_TYPES, "'div' of one type"),
            (make("div"), types((I32, (2,)), (I32, (2,))), "'div' of floats, got i32"),
            (make("div"), types((BF16, (2,)), (2,)), "floats of one type, got bf16[2], f32[2]")],
    **{name: [(make(name), types((BOOL, (2,))), "of numbers, got bool")]
       for name in ("neg", "abs")},
    **{name: [(make(name), types((I32, (2,))), "of floats, got i32")]
       for name in ("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "erf")},
    **{name: [(make(name), types((2,), (2,)), "of integers or bool, got f32")]
       for name in ("and", "or")},
    "not": [(ops.Not(), types((2,)), "of integers or bool, got f32")],
    "sign": [(ops.Sign(), types((BOOL, (2,))), "number")],
    "relu": [(ops.Relu(), types((BOOL, (2,))), "of numbers")],
    "silu": [(ops.Silu(), types((I32, (2,))), "of floats")],
    "silu_backward": [(make("silu_backward"), _TWO_SHAPES, "one shape")],
    "swiglu": [(ops.SwiGLU(), _TWO_SHAPES, "one shape")],
    "swiglu_backward": [(make("swiglu_backward"), types((2,), (2,), (3,)), "one shape")],
    "gelu": [(ops.Gelu(), types((I32, (2,))), "i32")],
    "gelu_backward": [(make("gelu_backward"), _TWO_SHAPES, "one shape")],
    "clip": [(ops.Clip(-0.5, 0.5), types((I32, (2,))), "a number of type i32, got -0.5")],
    "is_finite": [(ops.IsFinite(), types((2,), (2,)), "1 operand, got")],
    "select": [(ops.Select(), types((2,), (2,), (2,)), "where(bool, T, T)"),
               (ops.Select(), types((BOOL, (3,)), (2,), (2,)), "one shape")],
    "cast": [(ops.Cast(F32), types((2,), (2,)), "1 operand, got")],
    "full": [(ops.Full(0.0, F32, (2,)), types((2,)), "0 operands, got f32[2]")],
    "iota": [(ops.Iota(2), types((2,)), "0 operands, got f32[2]")],
    "softmax": [(ops.Softmax(), types(()), "at least one axis"),
                (ops.Softmax(), types((3, 0)), "the maximum of nothing")],
    "softmax_backward": [(make("softmax_backward"), _TWO_SHAPES, "operands that broadcast")],
    "rms_norm": [(ops.RMSNorm(), types((2, 3), (4,)), "operands that broadcast")],
    "rms_norm_backward": [(make("rms_norm_backward"), types((2, 3), (4,), (2, 3)), "broadcast")],
    "layer_norm": [(ops.LayerNorm(), types((2, 3), (3,), (4,)), "operands that broadcast")],
    "layer_norm_backward": [(make("layer_norm_backward"), types((2, 3), (3,), (2, 4)),
                             "broadcast")],
    "cross_entropy": [(ops.CrossEntropy(), types((4, 6), (I32, (4,))), "target i32[..., 1]"),
                      (ops.CrossEntropy(), types((4, 6), (4, 1)), "target i32[..., 1]"),
                      (ops.CrossEntropy(7), types((4, 6), _TARGET), "vocabulary from 0 to 6"),
                      (ops.CrossEntropy(), types((I32, (4, 6)), _TARGET), "float logits")],
    "cross_entropy_backward": [(make("cross_entropy_backward"),
                                types((4, 6), _TARGET, (4, 1), (3, 1)), "broadcast")],
    "rotary": [(ops.Rotary(), types((2, 3, 1, 5), (3, 1, 5), (3, 1, 5)), "an even last axis"),
               (ops.Rotary(), types((2, 3, 1, 4), (4, 1, 4), (4, 1, 4)), "broadcast")],
    **{name: [(make(name, (2,)), types((2, 3)), "ascending axes"),
              (make(name, (1, 0)), types((2, 3)), "ascending axes")]
       for name in ("reduce_max", "reduce_min")},
    "reduce_sum": [(ops.ReduceSum((2,)), types((2, 3)), "ascending axes"),
                   (ops.ReduceSum((1, 0)), types((2, 3)), "ascending axes"),
                   (ops.ReduceSum((0,)), types((BOOL, (2,))), "numbers, got bool[2]")],
    "argmax": [(ops.ArgMax(), types((2, 0)), "at least one element"),
               (ops.ArgMax(), types(()), "at least one element")],
    "reshape": [(ops.Reshape((4,)), types((2, 3)), "a shape of 6 elements")],
    "transpose": [(ops.Transpose((0, 0)), types((2, 3)), "a permutation of the 2 axes")],
    "slice": [(ops.Slice((0, 2), (2, 4)), types((2, 3)), "starts ≤ stops ≤ shape"),
              (ops.Slice((0,), (2,)), types((2, 3)), "starts ≤ stops ≤ shape")],
    "split": [(ops.Split(1, (1, 1)), types((2, 3)), "sizes that add up to axis 1 of f32[2,3]"),
              (ops.Split(0, (3, -1)), types((2, 3)), "sizes that add up")],
    "pad": [(ops.Pad((3,), (2,)), types((2,)), "a shape that holds f32[2]")],
    "concat": [(ops.Concat(1), types((2, 3), (3, 3)), "differ along axis 1 only"),
               (ops.Concat(2), types((2, 3)), "an axis of f32[2,3]"),
               (ops.Concat(0), [], "at least one operand")],
    "broadcast": [(ops.Broadcast((2, 3)), types((2,)), "a shape that f32[2] broadcasts to"),
                  (ops.Broadcast((2,)), types((1, 2)), "a shape that f32[1,2] broadcasts to")],
    "update_slice": [(ops.UpdateSlice(0), types((2, 3), (3, 3), _SCALAR), "new [.., n ≤ S, ..]"),
                     (ops.UpdateSlice(0), types((2, 3), (1, 3), ()), "position i32[]")],
    "dynamic_slice": [(ops.DynamicSlice(0, 3), types((2, 3), _SCALAR), "3 rows or more")],
    "matmul": [(ops.Matmul(), types((2, 3), (4, 2)), "equal inner extents, got 3 and 4"),
               (ops.Matmul(), types((3,), (3, 2)), "rank 2 or more"),
               (ops.Matmul(), types((2, 2, 3), (3, 3, 2)), "equal leading axes"),
               (ops.Matmul(True), types((2, 3, 2), (3, 2)), "equal leading axes"),
               (ops.Matmul(), types((2, 3), (BF16, (3, 2))), "one type")],
    "gather": [(ops.Gather(), types((2, 3), (4,)), "i32 indices"),
               (ops.Gather(), types((2,), (I32, (4,))), "table [V, C]")],
    "scatter_add": [(ops.ScatterAdd(3), types((I32, (4,)), (5, 2)), "updates [..., C]"),
                    (ops.ScatterAdd(3), types(_SCALAR, ()), "updates [..., C]"),
                    (ops.ScatterAdd(3), types((I32, (4,)), (BOOL, (4, 2))), "numbers")],
    "attention": [
        (ops.Attention(1.0), types((1, 3, 4, 2), (1, 5, 3, 2), (1, 5, 3, 2), *_RANGES),
         "G dividing H"),
        (ops.Attention(1.0), types((1, 3, 4, 2), (5, 2, 2), (5, 2, 2), *_RANGES), "k and v"),
        (ops.Attention(1.0), types((1, 3, 4, 2), (1, 5, 2, 2), (1, 5, 2, 2), (1, 3), (1, 3)),
         "lo and hi i32")],
    "attention_backward": [
        (make("attention_backward", 1.0),
         types((1, 3, 4, 2), (1, 5, 2, 2), (1, 5, 2, 2), *_RANGES, (1, 3, 4, 2), (1, 4, 3),
               (1, 3, 4, 2)), "o, log_sum and do as attention gives them")],
    "attention_weights": [(make("attention_weights", 1.0),
                           types((1, 2, 3, 4), (1, 1, 3, 1), (I32, (1, 1, 3, 1))),
                           "of one type, got f32 and i32")],
    "attention_weights_backward": [
        (make("attention_weights_backward", 1.0),
         types((1, 2, 3, 4), (I32, (1, 1, 2, 1)), (I32, (1, 1, 3, 1)), (1, 2, 3, 1),
               (1, 2, 3, 4), (1, 2, 3, 1)), "operands that broadcast")],
    "random_bits": [(ops.RandomBits(), types((2,), (2,), (2,)), "u32 operands")],
    "uniform_from_bits": [(ops.UniformFromBits(), types((I32, (2,))), "u32 bits"),
                          (ops.UniformFromBits(BF16), types((U32, (2,))), "f32 or f64")],
    "global_norm": [(ops.GlobalNorm(), types((2,), (BF16, (2,))), "floats of one type"),
                    (ops.GlobalNorm(), [], "floats of one type, got none")],
    "adamw": [(ops.AdamW((0.0,)), types((2,), (2,)), "4·1 tensors and 4 scalars"),
              (ops.AdamW((0.0,)), types((2,), (3,), (2,), (2,), (), _SCALAR, (), ()),
               "parameter, gradient and moments"),
              (ops.AdamW((0.0,)), types((2,), (2,), (2,), (2,), (), (), (), ()), "step i32"),
              (ops.AdamW((0.0,), 1.0), types((2,), (2,), (2,), (2,), (), _SCALAR, (), ()),
               "between 0 and 1")],
    "fused": [(fused_op("row"), types((4, 2)), "operands of the body")],
}
