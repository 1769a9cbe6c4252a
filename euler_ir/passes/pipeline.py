"""The passes in order, each with the reason for its place.

Between any two the IR is valid; `observer(stage, function)` sees it, which is how `--dump-ir` and
the tests that verify after each pass are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from euler_ir.graph import Function
from euler_ir.passes.cse import eliminate_common_subexpressions
from euler_ir.passes.dce import eliminate_dead_code
from euler_ir.passes.decompose import decompose
from euler_ir.passes.epilogue import fuse_epilogues
from euler_ir.passes.fuse import fuse_rows
from euler_ir.passes.recompute import recompute
from euler_ir.passes.simplify import simplify

Observer = Callable[[str, Function], None]


def optimize(function: Function, kernels: Collection[str] = (), epilogues: bool = True,
             observer: Observer | None = None, recomputed: Collection[str] = ()) -> Function:
    """The function as a backend should lower it.

    `kernels` names the composite ops the backend has kernels for, `epilogues` tells whether its
    matmul takes one; `recomputed` names the segments whose values are not kept for the backward
    pass."""
    stages: list[tuple[str, Callable[[Function], Function]]] = [
        # First: later passes should see the ops that will really run.
        ("decompose", lambda f: decompose(f, kernels)),
        # Before CSE, so that different spellings of one value become equal.
        ("simplify", simplify),
        # The forward pass and the gradient rules ask for the same things.
        ("cse", eliminate_common_subexpressions),
        # Before fusion, which must not build kernels for values nobody reads.
        ("dce", eliminate_dead_code),
    ]
    if recomputed:
        # After the last CSE, which would undo it.
        stages.append(("recompute", lambda f: recompute(f, recomputed)))
    if epilogues:
        # Before row fusion: a residual added in the matmul's store saves a whole pass over memory,
        # in a row kernel it would save only the read.
        stages.append(("epilogue", fuse_epilogues))
    stages += [
        ("fuse", fuse_rows),
        # Broadcasts and slices that every user has copied.
        ("dce", eliminate_dead_code),
    ]
    if observer:
        observer("build", function)
    for name, transform in stages:
        function = transform(function)
        if observer:
            observer(name, function)
    return function
