"""What a lowering hands to the compiler and the scheduler: a kernel as named phases of tiles.

A lowered IR node is one kernel: phases that run one after another with a barrier between. A phase
is one native function and a number of tiles,

    void symbol(void **args, int64_t tile, void *scratch)

`args` holds the node's operands in order: inputs, outputs, then the workspace if there is one.
They are row-major contiguous and need not be aligned beyond their element (a view may start
anywhere). Threads take tiles from an atomic counter; what a tile computes is fixed, so results do
not depend on how many threads there are. `scratch` belongs to the calling thread, is 64-byte
aligned and holds at least `scratch_bytes`; its content on entry is undefined.

Shapes are constants of the code, so kernels of equal structure share one `key` and are compiled
once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

__all__ = ["KernelSource", "Phase"]


@dataclass(frozen=True)
class Phase:
    """One native function, run once for each tile in [0, tiles)."""

    name: str
    tiles: int


@dataclass(frozen=True)
class KernelSource:
    """A kernel before compilation.

    `key` says everything that decides the code: op, dtypes, shapes, epilogue. `emit(module,
    symbols)` defines one function a phase, and is called only when the object is in no cache.
    `workspace_bytes` are shared by the threads, live during this kernel alone and are appended to
    args when positive. `inplace` lists (output index, input index) pairs that may share memory.
    """

    key: str
    phases: tuple[Phase, ...]
    emit: Callable[[ir.Module, tuple[str, ...]], None]
    workspace_bytes: int = 0
    scratch_bytes: int = 0
    inplace: tuple[tuple[int, int], ...] = ()
