"""Running single kernels of the LLVM backend in tests: compiled alone, tile by tile, no team."""

import ctypes
import functools
import threading

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

from backends.llvm.codegen import CodeGenerator
from backends.llvm.kernel import KernelSource
from backends.llvm.target import Target

HOST = Target.host()
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


def wide_target() -> Target:
    """AVX-512's vectors and tiles with this machine's instructions: LLVM splits each vector, so
    that the code emitted for AVX-512 runs anywhere."""
    return Target(HOST.triple, HOST.cpu, HOST.features, vector_bytes=64, registers=32)


def neon_target() -> Target:
    """NEON's vectors and tiles, likewise."""
    return Target(HOST.triple, HOST.cpu, HOST.features, vector_bytes=16, registers=32)


TARGETS = {
    "host": HOST,
    "avx2": Target.host("-avx512f") if HOST.has("avx512f") else HOST,
    "wide": wide_target(),
    "neon": neon_target(),
}


@functools.cache
def generator(target: Target) -> CodeGenerator:
    return CodeGenerator(target.triple, target.cpu, target.features)


_loaded: dict[tuple[Target, str], tuple] = {}


def load(source: KernelSource, target: Target) -> list:
    """The kernel's native functions; kernels of equal key are compiled once."""
    if (target, source.key) not in _loaded:
        module = ir.Module(name="kernel")
        symbols = tuple(f"f{i}" for i in range(len(source.phases)))
        source.emit(module, symbols)
        code = generator(target).compile(str(module))
        machine = CodeGenerator(target.triple, target.cpu, target.features).target_machine
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly("", llvm.create_context()), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        functions = [_KERNEL(engine.get_function_address(symbol)) for symbol in symbols]
        _loaded[target, source.key] = (functions, engine)
    return _loaded[target, source.key][0]


def run(source: KernelSource, arrays, target: Target = HOST, threads: int = 1) -> None:
    """Compile a kernel and run its phases: thread i takes tiles i, i + threads, …"""
    functions = load(source, target)
    args = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    for phase, function in zip(source.phases, functions, strict=True):

        def work(first, function=function, tiles=phase.tiles):
            # Scratch is garbage on entry: what is read before it is written shows as NaN.
            scratch = np.full(source.scratch_bytes // 8 + 17, np.nan)
            aligned = scratch.ctypes.data + -scratch.ctypes.data % 64
            for tile in range(first, tiles, threads):
                function(args, tile, aligned)
            # Nothing may be written past the scratch memory that was asked for.
            used = (aligned - scratch.ctypes.data + source.scratch_bytes + 7) // 8
            assert np.isnan(scratch[used:]).all()

        team = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()


def fenced(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `array` between NaN, element-aligned only, and the memory around it: a kernel that
    reads past an edge gets NaN, and one that writes past it is caught."""
    fence = np.full(array.size + 80, np.nan, array.dtype)
    inner = fence[41 : 41 + array.size].reshape(array.shape)
    inner[...] = array
    return inner, fence
