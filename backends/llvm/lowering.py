"""Which function makes a node's kernel: one table, filled by the modules that have kernels.

    @lowers(ops.Gather)
    def gather(node: Node, target: Target) -> KernelSource: ...

A row for a class serves its subclasses too, so pointwise and row ops from anywhere need none of
their own.

The object cache knows the sources of this package. A lowering from elsewhere adds a checksum of the
file that it stands in to its kernels' keys, so that they are compiled anew when that is edited.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from backends.llvm.kernel import KernelSource
from backends.llvm.target import Target
from euler_ir import ops
from euler_ir.errors import EulerError
from euler_ir.graph import Node
from euler_ir.op import Composite, Op

__all__ = ["LOWERINGS", "lower_node", "lowers", "structure"]

Lowering = Callable[[Node, Target], KernelSource]

_PACKAGE = Path(__file__).resolve().parent

#: The lowering of each op class that has one.
LOWERINGS: dict[type[Op], Lowering] = {}
#: The checksums of the files that lowerings from outside this package stood in when registered.
_ORIGINS: dict[Lowering, str] = {}


def lowers(*classes: type[Op]) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for op classes."""

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(classes, function))
        _ORIGINS[function] = _origin(function)
        return function

    return register


def lower_node(node: Node, target: Target) -> KernelSource:
    """The kernel of a node that is not a view. EulerError if this backend has none for its op."""
    for kind in type(node.op).__mro__:
        if kind in LOWERINGS:
            source, origin = LOWERINGS[kind](node, target), _ORIGINS.get(LOWERINGS[kind], "")
            return replace(source, key=f"{source.key} of {origin}") if origin else source
    hint = " (it is a composite: run the decompose pass first)" if isinstance(
        node.op, Composite) else ""
    raise EulerError(f"the llvm backend has no kernel for {node!r}{hint}")


def _origin(lowering: Lowering) -> str:
    """The checksum of a lowering's file, "" for one of this package or one without a file."""
    try:
        path = Path(inspect.getsourcefile(lowering) or "").resolve()
        own = path.is_relative_to(_PACKAGE)
        return "" if own else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def structure(node: Node) -> tuple:
    """Equal for nodes that have the same kernel: everything but the names of values."""
    op = node.op
    types = tuple(value.type for value in node.inputs)
    places = tuple(map(node.inputs.index, node.inputs))
    if not isinstance(op, ops.Fused):
        return type(op), repr(op), types, places
    number = {value: i for i, value in enumerate(op.body.inputs)}
    body = []
    for inner in op.body.nodes:
        body.append((type(inner.op), repr(inner.op), tuple(number[v] for v in inner.inputs)))
        for value in inner.outputs:
            number[value] = len(number)
    return op.kind, types, places, tuple(body), tuple(number[v] for v in op.body.outputs)
