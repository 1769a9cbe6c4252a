"""Kernels that move data."""

from __future__ import annotations

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm.emit import constant
from backends.llvm.kernel import KernelSource, Phase

_COPY_BYTES = 256 * 1024  # of a tile


def copy_kernel(size: int) -> KernelSource:
    """`size` bytes from the first argument to the second."""

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        function = ir.Function(module, e.KERNEL_TYPE, symbols[0])
        args, tile, _ = function.args
        b = ir.IRBuilder(function.append_basic_block("entry"))
        start = b.mul(tile, constant(_COPY_BYTES))
        count = e.minimum(b, b.sub(constant(size), start), constant(_COPY_BYTES))
        source, target = (b.gep(
            b.load(b.gep(args, [constant(i)], source_etype=e.POINTER), typ=e.POINTER), [start],
            source_etype=ir.IntType(8)) for i in (0, 1))
        name = "llvm.memcpy.p0.p0.i64"
        memcpy = e.declare(module, name, e.VOID, [e.POINTER, e.POINTER, e.I64, e.BOOL])
        b.call(memcpy, [target, source, count, ir.Constant(e.BOOL, 0)])
        b.ret_void()

    tiles = -(-size // _COPY_BYTES)
    return KernelSource(f"copy {size}", (Phase("copy", tiles),) if tiles else (), emit)
