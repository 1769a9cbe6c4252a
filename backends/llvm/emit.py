"""Small helpers over llvmlite's IR builder that every vector kernel needs.

Pointers are opaque, addresses are counted in elements, and every load and store assumes the
alignment of one element only: unaligned vector moves cost nothing extra on the CPUs we target.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

__all__ = [
    "BOOL", "I32", "I64", "KERNEL_TYPE", "POINTER", "VOID", "address", "bytes_after",
    "clear_bytes", "constant", "copy_bytes", "declare", "divide", "element", "fma",
    "item_bytes", "kernel", "load", "load_lanes", "loop", "maximum", "maybe_loop", "minimum",
    "operand", "prefetch", "prefix_mask", "private_function", "shuffle", "splat", "store",
    "store_lanes", "suffix",
]  # fmt: skip

VOID = ir.VoidType()
POINTER = ir.PointerType()
BOOL = ir.IntType(1)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
KERNEL_TYPE = ir.FunctionType(VOID, [POINTER, I64, POINTER])  # (args, tile, scratch)

_BYTES = {"half": 2, "float": 4, "double": 8}


def item_bytes(scalar: ir.Type) -> int:
    """Bytes of one element of an IR floating-point or integer type."""
    if isinstance(scalar, ir.IntType):
        return -(-scalar.width // 8)
    return _BYTES[str(scalar)]


def element(kind: ir.Type) -> ir.Type:
    """A vector's element type; a scalar type is its own."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def constant(value: int) -> ir.Constant:
    """An i64 constant: every index in a kernel is one."""
    return ir.Constant(I64, value)


def declare(module: ir.Module, name: str, result: ir.Type, args: Sequence[ir.Type]) -> ir.Function:
    """The function `name` of the module, declared on first use (llvmlite names no vector types)."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, args), name)


def suffix(kind: ir.Type) -> str:
    """How LLVM spells a type inside an intrinsic's name."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    if isinstance(kind, ir.IntType):
        return f"i{kind.width}"
    return f"f{8 * item_bytes(kind)}"


def kernel(module: ir.Module, symbol: str) -> tuple[ir.IRBuilder, ir.Value, ir.Value, ir.Value]:
    """A new kernel function: a builder at its start, and its arguments args, tile and scratch."""
    function = ir.Function(module, KERNEL_TYPE, symbol)
    return ir.IRBuilder(function.append_basic_block("entry")), *function.args


def private_function(
    module: ir.Module, name: str, kinds: Sequence[ir.Type], define: Callable[..., None]
) -> ir.Function:
    """A kernel's private function, defined on first use by `define(builder, *arguments)`.

    Never inlined: a body compiled on its own keeps its registers, and LLVM's time stays linear.
    """
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(VOID, list(kinds)), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    define(b, *function.args)
    b.ret_void()
    return function


def operand(b: ir.IRBuilder, args: ir.Value, index: ir.Value | int) -> ir.Value:
    """The pointer that stands at `index` of a kernel's args."""
    index = constant(index) if isinstance(index, int) else index
    return b.load(b.gep(args, [index], source_etype=POINTER), typ=POINTER)


def bytes_after(b: ir.IRBuilder, pointer: ir.Value, count: ir.Value) -> ir.Value:
    """The address `count` bytes further on."""
    return b.gep(pointer, [count], source_etype=ir.IntType(8))


def divide(b: ir.IRBuilder, value: ir.Value, by: int) -> tuple[ir.Value, ir.Value]:
    """Quotient and remainder of an index."""
    if by == 1:
        return value, constant(0)
    return b.udiv(value, constant(by)), b.urem(value, constant(by))


def copy_bytes(b: ir.IRBuilder, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    """memcpy: the two do not overlap."""
    kinds = [POINTER, POINTER, I64, BOOL]
    memcpy = declare(b.module, "llvm.memcpy.p0.p0.i64", VOID, kinds)
    b.call(memcpy, [target, source, count, ir.Constant(BOOL, 0)])


def clear_bytes(b: ir.IRBuilder, target: ir.Value, count: ir.Value) -> None:
    """Set `count` bytes to 0."""
    byte = ir.IntType(8)
    memset = declare(b.module, "llvm.memset.p0.i64", VOID, [POINTER, byte, I64, BOOL])
    b.call(memset, [target, ir.Constant(byte, 0), count, ir.Constant(BOOL, 0)])


def address(b: ir.IRBuilder, pointer: ir.Value, index: ir.Value, scalar: ir.Type) -> ir.Value:
    """&pointer[index], counted in elements of `scalar`."""
    return b.gep(pointer, [index], source_etype=scalar)


def load(b: ir.IRBuilder, pointer: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a scalar or vector, aligned to its element only."""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    return b.load(pointer, typ=kind, align=item_bytes(scalar))


def store(b: ir.IRBuilder, value: ir.Value, pointer: ir.Value) -> None:
    """Store a scalar or vector, aligned to its element only."""
    kind = value.type
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    b.store(value, pointer, align=item_bytes(scalar))


def prefix_mask(lanes: int, used: int) -> ir.Constant:
    """The constant mask that switches on the first `used` lanes."""
    return ir.Constant(ir.VectorType(BOOL, lanes), [int(lane < used) for lane in range(lanes)])


def load_lanes(
    b: ir.IRBuilder, pointer: ir.Value, kind: ir.VectorType, mask: ir.Constant | None
) -> ir.Value:
    """Load the lanes of `mask` (None: all); the others read as 0, and their memory is untouched."""
    if mask is None:
        return load(b, pointer, kind)
    name = f"llvm.masked.load.{suffix(kind)}.p0"
    intrinsic = declare(b.module, name, kind, [POINTER, I32, mask.type, kind])
    align = ir.Constant(I32, item_bytes(kind.element))
    return b.call(intrinsic, [pointer, align, mask, ir.Constant(kind, None)])


def store_lanes(
    b: ir.IRBuilder, value: ir.Value, pointer: ir.Value, mask: ir.Constant | None
) -> None:
    """Store the lanes of `mask` (None: all); the memory of the others is untouched."""
    if mask is None:
        store(b, value, pointer)
        return
    kind = value.type
    name = f"llvm.masked.store.{suffix(kind)}.p0"
    intrinsic = declare(b.module, name, VOID, [kind, POINTER, I32, mask.type])
    b.call(intrinsic, [value, pointer, ir.Constant(I32, item_bytes(kind.element)), mask])


def prefetch(b: ir.IRBuilder, pointer: ir.Value) -> None:
    """Ask for a cache line that will be read; any address will do, also one past the end."""
    kinds = [POINTER, I32, I32, I32]
    hint = [ir.Constant(I32, value) for value in (0, 3, 1)]  # to read, keep in all caches, data
    b.call(declare(b.module, "llvm.prefetch.p0", VOID, kinds), [pointer, *hint])


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x·y + z, fused where the target has the instruction (llvm.fma would call libm elsewhere)."""
    intrinsic = declare(b.module, f"llvm.fmuladd.{suffix(x.type)}", x.type, [x.type] * 3)
    return b.call(intrinsic, [x, y, z])


def splat(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """The scalar in every lane."""
    kind = ir.VectorType(value.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return shuffle(b, first, first, [0] * lanes)


def shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """The lanes named: lane i of x is i, lane i of y is i + the number of lanes."""
    pattern = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return b.shuffle_vector(x, y, pattern)


def minimum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The smaller of two signed integers."""
    return b.select(b.icmp_signed("<", x, y), x, y)


def maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of two signed integers."""
    return b.select(b.icmp_signed(">", x, y), x, y)


@contextmanager
def loop(b: ir.IRBuilder, stop: ir.Value, step: int, carried: Sequence[ir.Value] = ()) -> Iterator:
    """A loop over index = 0, step, … while index < stop, which must hold at first (stop > 0).

    Yields (index, values): `values` is a list of loop-carried values that starts at `carried`; the
    body overwrites its entries, and after the loop it holds what the last turn left.
    """
    before = b.block
    body = b.append_basic_block("loop")
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(constant(0), before)
    phis = [b.phi(value.type) for value in carried]
    values: list[ir.Value] = list(phis)
    yield index, values
    following = b.add(index, constant(step))
    end = b.block
    after = b.append_basic_block("after")
    b.cbranch(b.icmp_signed("<", following, stop), body, after)
    index.add_incoming(following, end)
    for phi, start, value in zip(phis, carried, values, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, end)
    b.position_at_end(after)


@contextmanager
def maybe_loop(
    b: ir.IRBuilder, stop: ir.Value, step: int, carried: Sequence[ir.Value] = ()
) -> Iterator:
    """As `loop`, but there may be no turn at all: the carried values then stay as they were."""
    before, some = b.block, b.append_basic_block("some")
    after = b.append_basic_block("join")
    b.cbranch(b.icmp_signed(">", stop, constant(0)), some, after)
    b.position_at_end(some)
    with loop(b, stop, step, carried) as (index, values):
        yield index, values
    end = b.block
    b.branch(after)
    b.position_at_end(after)
    for i, (start, value) in enumerate(zip(carried, list(values), strict=True)):
        values[i] = b.phi(start.type)
        values[i].add_incoming(start, before)
        values[i].add_incoming(value, end)
