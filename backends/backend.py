"""The interface every backend has, and the list of backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from euler_ir.errors import EulerError
from euler_ir.graph import Function
from euler_ir.plan import Kernel, Plan
from euler_ir.types import TensorType


class Buffer(Protocol):
    """Memory of a backend that holds a tensor from run to run, zeros at first.

    The host reads and writes its leading part of any shape up to the whole: all but the padding.
    For another shape both raise EulerError."""

    type: TensorType

    def read(self, shape: Sequence[int] | None = None) -> np.ndarray:
        """The leading part of this shape (the whole by default), to look at before the next run or
        write: where the memory is the host's it is no copy."""

    def write(self, array: np.ndarray) -> None:
        """Set the leading part of the array's shape; numbers are converted to the type."""

    def clear(self) -> None:
        """Zeros again."""


class Program(Protocol):
    """A linked plan.

    Where the backend can tell, `times()` gives the node and the seconds of each launch in the last
    run, in order; None stands for a final copy."""

    plan: Plan

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One execution: exactly the inputs that were not bound at link time by name, all outputs
        that are not donated into bound memory as fresh arrays by name."""


class Backend(Protocol):
    """Lowers functions to kernels, and links plans of such kernels into programs.

    `composites` names the composite ops it has kernels for; the passes decompose all others.
    `epilogues` tells whether its matmul takes pointwise ops on its result along."""

    name: str
    composites: frozenset[str]
    epilogues: bool

    def allocate(self, type: TensorType) -> Buffer:
        """Memory for a tensor that programs of this backend can be bound to."""

    def lower(self, function: Function) -> Sequence[Kernel]:
        """A kernel for every node that is not a view, in the function's order."""

    def link(self, plan: Plan, bound: Mapping[str, Buffer] | None = None) -> Program:
        """A runnable program. `bound` gives memory for some inputs, by name: buffers of the
        declared types, read (and, where donated, written) in place at every run; the other inputs
        are copied in."""

    def listing(self, kernel: Kernel) -> Mapping[str, str]:
        """What the kernel was compiled to, for people: text by file ending (`ll`, `s`, `ptx`)."""


BACKENDS = ("llvm", "cuda", "reference")


def create(name: str, threads: int | None = None, cpu_features: str | None = None,
           timed: bool = False) -> Backend:
    """The backend of this name; 'auto' takes the fastest there is.

    `threads` and `timed` are hints: they decide how soon the results come and whether programs tell
    their times, never what the results are. A backend that has no team of threads, or takes no
    times, lets them pass. `cpu_features` decides what is compiled for this machine's CPU. Raises
    EulerError where that is asked of a backend that compiles nothing for it, and for an unknown
    name."""
    if name in ("auto", "llvm"):
        from backends.llvm.backend import LLVMBackend
        return LLVMBackend(threads, cpu_features, timed)
    if name == "reference":
        if cpu_features is not None:
            raise EulerError("--cpu-features: backend 'reference' compiles nothing; leave it out, "
                             "or use 'llvm'")
        from backends.reference.backend import ReferenceBackend
        return ReferenceBackend()
    if name == "cuda":
        raise EulerError("backend 'cuda' is not part of this version; use 'llvm' or 'reference'")
    raise EulerError(f"no backend {name!r}; known: auto, {', '.join(BACKENDS)}")
