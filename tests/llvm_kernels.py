"""Tiny kernels, and programs of them, for tests of the machinery around kernels."""

import ctypes

import numpy as np
from llvmlite import ir

from backends.llvm.kernel import KernelSource, Phase
from backends.llvm.launch import Launch, Program

_POINTER, _I64 = ir.PointerType(), ir.IntType(64)

#: Cells of the arrays that programs run on, where a test has no reason for another number.
CELLS = 13


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


def address_of(compiler, source):
    """Where the function of a kernel of one phase lies, once compiled."""
    return compiler.load([source])[source.key][0]


def increments(compiler, cells, launches):
    """A program that adds 1 to each of `cells` in every one of its launches."""
    address = address_of(compiler, increment_kernel())
    launch = Launch(address, [cells.ctypes.data], len(cells))
    return Program([launch] * launches, keep=cells)


def neighbours(compiler, first, second, launches):
    """A program that goes back and forth between two arrays, each cell made of two of the other
    array: one tile run early or late changes the result."""
    address = address_of(compiler, neighbour_kernel(len(first)))
    pointers = [first.ctypes.data, second.ctypes.data]
    there = Launch(address, pointers, len(first))
    back = Launch(address, pointers[::-1], len(first))
    return Program([back if step % 2 else there for step in range(launches)], keep=(first, second))


def neighbours_expected(start, launches):
    """What `neighbours` makes of the first array, with `start` in it."""
    for _ in range(launches):
        start = start + np.roll(start, -1)
    return start
