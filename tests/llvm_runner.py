"""Running single kernels of the LLVM backend in tests: compiled alone, tile by tile, no team."""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor

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
#: Those whose code is another than this machine's own, which all other tests run.
OTHER_TARGETS = [name for name, target in TARGETS.items() if target != HOST]


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
    """Compile a kernel and run its phases: thread i takes tiles i, i + threads, …

    The workspace is garbage on entry, as scratch is, and comes after the arrays."""
    functions = load(source, target)
    workspace = _Memory(source.workspace_bytes)
    if source.workspace_bytes:
        arrays = [*arrays, workspace.array]
    args = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    for phase, function in zip(source.phases, functions, strict=True):

        def work(first, function=function, tiles=phase.tiles):
            scratch = _Memory(source.scratch_bytes)
            for tile in range(first, tiles, threads):
                function(args, tile, scratch.array.ctypes.data)
            scratch.check()

        with ThreadPoolExecutor(threads) as team:
            list(team.map(work, range(threads)))  # raises what a thread raised
    workspace.check()


class _Memory:
    """So many bytes from a cache line on: what is read before it is written shows as NaN, and
    `check` that nothing was written past them."""

    def __init__(self, size: int):
        self.words = -(-size // 8)
        whole = np.full(self.words + 17, np.nan)
        self.whole = whole[-whole.ctypes.data % 64 // 8 :]
        self.array = self.whole[: self.words]

    def check(self) -> None:
        assert np.isnan(self.whole[self.words :]).all()


def fenced(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `array` between NaN, element-aligned only, and the memory around it: a kernel that
    reads past an edge gets NaN, and one that writes past it is caught."""
    fence = np.full(array.size + 80, np.nan, array.dtype)
    inner = fence[41 : 41 + array.size].reshape(array.shape)
    inner[...] = array
    return inner, fence
