"""Several kernels as one: in turn, each with its own choice of args, or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from backends.llvm import emit as e
from backends.llvm.emit import constant
from backends.llvm.kernel import KernelSource, Phase
from euler_ir.plan import ALIGNMENT

__all__ = ["Part", "Temporary", "aligned", "chain", "side_by_side"]


@dataclass(frozen=True)
class Temporary:
    """An arg that lies in the workspace, from byte `offset` on."""

    offset: int


@dataclass(frozen=True)
class Part:
    """A kernel and its args, its own workspace last: the whole's by number, or temporary."""

    source: KernelSource
    arguments: tuple[int | Temporary, ...]


def chain(name: str, parts: Sequence[Part], workspace: int | None = None, workspace_bytes: int = 0,
          inplace: tuple[tuple[int, int], ...] = ()) -> KernelSource:
    """The kernel that runs the parts in order. `workspace` is the workspace's number among the
    args."""
    phases = tuple(Phase(f"{phase.name}{i}", phase.tiles)
                   for i, part in enumerate(parts) for phase in part.source.phases)

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        place = 0
        for part in parts:
            own = symbols[place:place + len(part.source.phases)]
            place += len(own)
            if part.arguments == tuple(range(len(part.arguments))):
                part.source.emit(module, own)
                continue
            inner = tuple(f"{symbol}_inner" for symbol in own)
            part.source.emit(module, inner)
            for symbol, function in zip(own, inner, strict=True):
                _emit_call(module, symbol, function, part.arguments, workspace)

    key = "; ".join(f"{part.source.key} on {part.arguments}" for part in parts)
    return KernelSource(f"{name}: {key}", phases, emit, workspace_bytes,
                        max((part.source.scratch_bytes for part in parts), default=0), inplace)


def side_by_side(name: str, sources: Sequence[KernelSource]) -> KernelSource:
    """The kernel that does what several do, on the same args, as one phase: none may depend on
    another, have more than one phase, or use workspace or scratch."""
    sources = [source for source in sources if source.phases]
    tiles = [source.phases[0].tiles for source in sources]

    def emit(module: ir.Module, symbols: tuple[str, ...]) -> None:
        inner = [f"{symbols[0]}_part{i}" for i in range(len(sources))]
        for source, symbol in zip(sources, inner, strict=True):
            source.emit(module, (symbol,))
            module.globals[symbol].linkage = "internal"
        b, args, tile, scratch = e.kernel(module, symbols[0])
        for symbol, count in zip(inner, tiles, strict=True):
            with b.if_then(b.icmp_signed("<", tile, constant(count))):
                b.call(module.globals[symbol], [args, tile, scratch])
                b.ret_void()
            tile = b.sub(tile, constant(count))
        b.unreachable()

    key = f"{name}: " + "; ".join(source.key for source in sources)
    return KernelSource(key, (Phase("all", sum(tiles)),) if sources else (), emit)


def aligned(size: int) -> int:
    """The size rounded up so that another buffer can follow."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _emit_call(module: ir.Module, symbol: str, function: str,
               arguments: Sequence[int | Temporary], workspace: int | None) -> None:
    """A kernel function that calls another on a choice of its args."""
    module.globals[function].linkage = "internal"
    b, args, tile, scratch = e.kernel(module, symbol)
    chosen = b.alloca(e.POINTER, size=len(arguments))
    for i, argument in enumerate(arguments):
        if isinstance(argument, Temporary):
            base = e.operand(b, args, workspace)
            pointer = e.bytes_after(b, base, constant(argument.offset))
        else:
            pointer = e.operand(b, args, argument)
        b.store(pointer, b.gep(chosen, [constant(i)], source_etype=e.POINTER))
    b.call(module.globals[function], [chosen, tile, scratch])
    b.ret_void()
