"""What a schedule is: kernels in order and a place in memory for every value.

Types live here, and how sizes are written. Backends make `Kernel`s, the runtime's scheduler makes a
`Plan` from them, and the backend links the plan into something that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from euler_ir.graph import Function, Node, Value

#: Alignment in bytes of every buffer the scheduler places: a cache line, and the widest vector.
ALIGNMENT = 64


@dataclass(frozen=True)
class Kernel:
    """A node as a backend will run it, and what that needs of memory.

    `workspace` bytes are the kernel's own while it runs. `inplace` lists pairs (output, input) that
    may share one buffer when the input dies here; each pair holds whatever the others do. An
    operand without a pair for an output never shares that output's memory. `code` is the backend's
    own business."""

    node: Node
    workspace: int = 0
    inplace: tuple[tuple[int, int], ...] = ()
    code: Any = None


@dataclass(frozen=True)
class Place:
    """Bytes from `offset` on in the arena, or in the buffer of the function input named `base`."""

    offset: int
    base: str | None = None


@dataclass(frozen=True)
class Block:
    """A stretch of the arena and the steps during which it is alive, both ends included.

    `values` are the values that have it in turn, each written in place of the one before; views of
    them are not listed. A workspace or a temporary of the copies has none."""

    values: tuple[Value, ...]
    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Step:
    """One kernel of the plan, with the place of its workspace if it has one."""

    kernel: Kernel
    workspace: Place | None = None


@dataclass(frozen=True)
class Copy:
    """`size` bytes to move after the last step."""

    source: Place
    target: Place
    size: int


@dataclass(frozen=True)
class Plan:
    """A function laid out in memory.

    Inputs live in buffers of their own. An output that a donation names ends in its input's buffer:
    written there directly, or brought there by `copies`, which run one after the other when all
    steps are done (as step number `len(steps)`). All other values lie in the arena or are views of
    what does; a view is only as aligned as its elements. After the copies each output is read from
    its place in `results`. `lower_bound` is the largest sum of sizes alive at one step: no plan of
    this order can need less than that."""

    function: Function
    steps: tuple[Step, ...]
    places: Mapping[Value, Place]
    blocks: tuple[Block, ...]
    arena_bytes: int
    lower_bound: int
    results: Mapping[str, Place]
    copies: tuple[Copy, ...] = ()


def size_text(count: int) -> str:
    """A number of bytes in the unit that suits."""
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count} B"
