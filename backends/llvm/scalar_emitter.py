"""Scalar expressions to LLVM instructions, on scalars and on vectors alike.

An expression's value is an LLVM value of the expression's type, or a vector of `lanes` of them: f32
and f64 as such, integers as i32 or i64 (signedness is in the expression), bool as i1. In memory
bool is one byte, and the 16-bit floats are what they are; `load` and `store` convert.

Arithmetic may be contracted (a·b + c in one instruction) and is otherwise exactly what is written:
no flag says that there are no NaNs or infinities, or that sums may be reordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm import half_floats, vector_math
from euler_ir import scalar
from euler_ir.scalar import Expr
from euler_ir.types import BF16, BOOL, F16, F32, F64, I32, I64, U32, DType

__all__ = ["constant_value", "evaluate", "leaves", "load", "maximum", "operation", "ramp", "store",
           "storage_type", "value_type"]  # fmt: skip

_I16 = ir.IntType(16)
_VALUE = {
    F64: ir.DoubleType(), F32: ir.FloatType(), I64: ir.IntType(64), I32: ir.IntType(32),
    U32: ir.IntType(32), BOOL: ir.IntType(1),
}  # fmt: skip
_STORAGE = _VALUE | {BF16: _I16, F16: _I16, BOOL: ir.IntType(8)}
_CONTRACT = ("contract",)


def value_type(dtype: DType, lanes: int = 1) -> ir.Type:
    """The IR type of a value that is computed with; 1 lane is a scalar."""
    return _shaped(_VALUE[dtype.compute], lanes)


def storage_type(dtype: DType, lanes: int = 1) -> ir.Type:
    """The IR type of elements in memory."""
    return _shaped(_STORAGE[dtype], lanes)


def constant_value(value: int | float | bool, dtype: DType, lanes: int = 1) -> ir.Constant:
    """A Python number as a value, in every lane."""
    kind = value_type(dtype, lanes)
    value = float(value) if dtype.is_float else int(value)
    return ir.Constant(kind, [value] * lanes if lanes > 1 else value)


def load(b: ir.IRBuilder, pointer: ir.Value, dtype: DType, lanes: int = 1,
         mask: ir.Constant | None = None) -> ir.Value:
    """The elements at `pointer` as values; lanes that the mask switches off are not read."""
    kind = storage_type(dtype, lanes)
    raw = e.load(b, pointer, kind) if lanes == 1 else e.load_lanes(b, pointer, kind, mask)
    if dtype in half_floats.WIDEN:
        bits, value = half_floats.WIDEN[dtype]
        wide = b.zext(raw, value_type(U32, lanes))
        return evaluate(b, [value], {bits: wide}, lanes)[0]
    if dtype is BOOL:
        return b.icmp_unsigned("!=", raw, ir.Constant(kind, None))
    return raw


def store(b: ir.IRBuilder, value: ir.Value, pointer: ir.Value, dtype: DType,
          mask: ir.Constant | None = None) -> None:
    """Write values as elements of `dtype`, 16-bit floats rounded to nearest even."""
    lanes = _lanes(value)
    kind = storage_type(dtype, lanes)
    if dtype in half_floats.NARROW:
        number, bits = half_floats.NARROW[dtype]
        value = b.trunc(evaluate(b, [bits], {number: value}, lanes)[0], kind)
    elif dtype is BOOL:
        value = b.zext(value, kind)
    if lanes == 1:
        e.store(b, value, pointer)
    else:
        e.store_lanes(b, value, pointer, mask)


def ramp(b: ir.IRBuilder, start: ir.Value, stride: int, lanes: int) -> ir.Value:
    """start, start + stride, …: i32, an element's number in each lane."""
    if lanes == 1:
        return start
    steps = ir.Constant(ir.VectorType(e.I32, lanes), [i * stride for i in range(lanes)])
    return b.add(e.splat(b, start, lanes), steps)


def leaves(*exprs: Expr) -> list[Expr]:
    """The inputs that expressions are made from."""
    return [x for x in scalar.topological(exprs) if x.op == "input"]


def evaluate(b: ir.IRBuilder, exprs: Sequence[Expr], leaves: Mapping[Expr, ir.Value],
             lanes: int = 1) -> list[ir.Value]:
    """The values of expressions without reductions, given those of their leaves."""
    values = dict(leaves)
    stack = list(reversed(exprs))
    while stack:
        expr = stack[-1]
        waiting = [arg for arg in expr.args if arg not in values] if expr not in values else []
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if expr not in values:
            values[expr] = operation(b, expr, [values[arg] for arg in expr.args], lanes)
    return [values[expr] for expr in exprs]


def operation(b: ir.IRBuilder, expr: Expr, args: Sequence[ir.Value], lanes: int = 1) -> ir.Value:
    """One expression's value from those of its arguments."""
    match expr.op:
        case "const":
            return constant_value(expr.value, expr.dtype, lanes)
        case "select":
            return b.select(*args)
        case "cast":
            return _cast(b, args[0], expr.args[0].dtype, expr.dtype)
        case "bitcast":
            return b.bitcast(args[0], value_type(expr.dtype, lanes))
    if expr.op in scalar.COMPARE:
        return _compare(b, expr.op, *args, expr.args[0].dtype)
    if expr.op in scalar.BINARY:
        return _binary(b, expr, *args)
    if expr.op in scalar.UNARY:
        return _unary(b, expr, args[0], lanes)
    raise ValueError(f"'{expr.op}' is no operation on elements")


def maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value, dtype: DType,
            larger: bool = True) -> ir.Value:
    """The larger (or smaller) of x and y, NaN where either is."""
    sign = ">" if larger else "<"
    if not dtype.is_float:
        compare = b.icmp_signed if dtype in (I32, I64) else b.icmp_unsigned
        return b.select(compare(sign, x, y), x, y)
    # The inner select is x86's maxps to the letter: y where either is NaN.
    ordered = b.select(b.fcmp_ordered(sign, x, y), x, y)
    return b.select(b.fcmp_unordered("uno", x, x), x, ordered)


def _binary(b: ir.IRBuilder, expr: Expr, x: ir.Value, y: ir.Value) -> ir.Value:
    op, dtype = expr.op, expr.dtype
    if op in ("maximum", "minimum"):
        return maximum(b, x, y, dtype, larger=op == "maximum")
    if dtype.is_float:
        # x - x asks whether x is finite: contracted with a product x, it would be the product's
        # rounding error instead of 0.
        flags = () if op == "sub" and expr.args[0] is expr.args[1] else _CONTRACT
        build = {"add": b.fadd, "sub": b.fsub, "mul": b.fmul, "div": b.fdiv}.get(op)
        if build is not None:
            return build(x, y, flags=flags)
    elif op == "mulhi":
        return _multiply_high(b, x, y)
    elif op == "shr":
        return b.lshr(x, y) if dtype is U32 else b.ashr(x, y)
    else:
        build = {"add": b.add, "sub": b.sub, "mul": b.mul, "and": b.and_, "or": b.or_,
                 "xor": b.xor, "shl": b.shl}.get(op)  # fmt: skip
        if build is not None:
            return build(x, y)
    raise ValueError(f"'{op}' has no meaning on {dtype}")


def _compare(b: ir.IRBuilder, op: str, x: ir.Value, y: ir.Value, dtype: DType) -> ir.Value:
    sign = {"lt": "<", "le": "<=", "eq": "=="}[op]
    if dtype.is_float:
        return b.fcmp_ordered(sign, x, y)
    return (b.icmp_signed if dtype in (I32, I64) else b.icmp_unsigned)(sign, x, y)


def _unary(b: ir.IRBuilder, expr: Expr, x: ir.Value, lanes: int) -> ir.Value:
    op, dtype = expr.op, expr.dtype
    if op == "not":
        return b.not_(x)
    if not dtype.is_float:
        negative = b.neg(x)
        if op == "neg":
            return negative
        if op == "abs":
            return x if dtype is U32 else maximum(b, x, negative, dtype)
        raise ValueError(f"'{op}' has no meaning on {dtype}")
    if op == "neg":
        return b.fneg(x)
    intrinsic = {"abs": "fabs", "sqrt": "sqrt", "floor": "floor", "round": "rint"}.get(op)
    if intrinsic is not None:
        return _call(b, f"llvm.{intrinsic}.{e.suffix(x.type)}", x)
    if dtype is F32:
        argument, polynomial = vector_math.polynomial(op)
        return evaluate(b, [polynomial], {argument: x}, lanes)[0]
    return _libm(b, op, x, lanes)


def _libm(b: ir.IRBuilder, name: str, x: ir.Value, lanes: int) -> ir.Value:
    """The C library's f64 function, lane by lane."""
    if lanes == 1:
        return _call(b, name, x)
    result = ir.Constant(x.type, ir.Undefined)
    for lane in range(lanes):
        place = ir.Constant(e.I32, lane)
        result = b.insert_element(result, _call(b, name, b.extract_element(x, place)), place)
    return result


def _cast(b: ir.IRBuilder, x: ir.Value, source: DType, target: DType) -> ir.Value:
    kind = value_type(target, _lanes(x))
    if source is target:
        return x
    if target is BOOL:
        zero = ir.Constant(x.type, None)
        return (b.fcmp_unordered if source.is_float else b.icmp_unsigned)("!=", x, zero)
    if source.is_float and target.is_float:
        return b.fpext(x, kind) if target is F64 else b.fptrunc(x, kind)
    if target.is_float:
        return b.uitofp(x, kind) if source in (U32, BOOL) else b.sitofp(x, kind)
    if source.is_float:
        # Saturates where the number does not fit; NaN gives 0.
        convert = "fptoui" if target is U32 else "fptosi"
        name = f"llvm.{convert}.sat.{e.suffix(kind)}.{e.suffix(x.type)}"
        return b.call(e.declare(b.module, name, kind, [x.type]), [x])
    if target.itemsize == source.itemsize:
        return x
    if target.itemsize < source.itemsize:
        return b.trunc(x, kind)
    return b.sext(x, kind) if source is I32 else b.zext(x, kind)


def _multiply_high(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    wide = _shaped(ir.IntType(64), _lanes(x))
    product = b.mul(b.zext(x, wide), b.zext(y, wide))
    return b.trunc(b.lshr(product, _splat_int(wide, 32)), x.type)


def _call(b: ir.IRBuilder, name: str, x: ir.Value) -> ir.Value:
    return b.call(e.declare(b.module, name, x.type, [x.type]), [x])


def _shaped(kind: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def _lanes(x: ir.Value) -> int:
    return x.type.count if isinstance(x.type, ir.VectorType) else 1


def _splat_int(kind: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)
