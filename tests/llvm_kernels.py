"""Tiny kernels for tests of the machinery around kernels."""

import ctypes

from llvmlite import ir

from backends.llvm.kernel import KernelSource, Phase

_POINTER, _I64 = ir.PointerType(), ir.IntType(64)


def tile_kernel(key, body) -> KernelSource:
    """A kernel of one phase whose function is `body(builder, args, tile, scratch)`; `args` is a
    function from an argument's index to the pointer it holds."""

    def emit(module, symbols):
        signature = ir.FunctionType(ir.VoidType(), [_POINTER, _I64, _POINTER])
        function = ir.Function(module, signature, symbols[0])
        b = ir.IRBuilder(function.append_basic_block())
        args, tile, scratch = function.args

        def argument(index):
            return b.load(cell(b, args, _I64(index)), typ=_POINTER)

        body(b, argument, tile, scratch)
        b.ret_void()

    return KernelSource(key=key, phases=(Phase("main", 1),), emit=emit)


def cell(b, base, index):
    """The address of 64-bit cell `index` of an array."""
    return b.gep(base, [index], source_etype=_I64)


def constant_kernel(value: int) -> KernelSource:
    """Writes `value` to the first cell of its argument."""

    def body(b, argument, tile, scratch):
        b.store(_I64(value), argument(0))

    return tile_kernel(f"constant {value}", body)


def increment_kernel() -> KernelSource:
    """cells[tile] += 1."""

    def body(b, argument, tile, scratch):
        own = cell(b, argument(0), tile)
        b.store(b.add(b.load(own, typ=_I64), _I64(1)), own)

    return tile_kernel("increment", body)


def neighbour_kernel(cells: int) -> KernelSource:
    """target[tile] = source[tile] + source[tile + 1 mod cells]: depends on every other tile of
    the launch before, within `cells` launches."""

    def body(b, argument, tile, scratch):
        following = b.urem(b.add(tile, _I64(1)), _I64(cells))
        source = argument(0)
        both = [b.load(cell(b, source, index), typ=_I64) for index in (tile, following)]
        b.store(b.add(*both), cell(b, argument(1), tile))

    return tile_kernel(f"neighbour {cells}", body)


def where_kernel() -> KernelSource:
    """cells[tile] = the address of the scratch that the tile was given."""

    def body(b, argument, tile, scratch):
        b.store(b.ptrtoint(scratch, _I64), cell(b, argument(0), tile))

    return tile_kernel("where", body)


def call(address: int) -> int:
    """What the kernel at `address` writes to its first argument's first cell."""
    result = ctypes.c_int64(-1)
    args = (ctypes.c_void_p * 1)(ctypes.addressof(result))
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(address)
    kernel(ctypes.addressof(args), 0, None)
    return result.value
