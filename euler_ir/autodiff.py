"""Reverse-mode differentiation, Function → Function, from the ops' own backward rules."""

from __future__ import annotations

from collections.abc import Sequence

from euler_ir.builder import Builder, IRError
from euler_ir.graph import Function, Value
from euler_ir.op import NoGradient


def value_and_grad(function: Function, with_respect_to: Sequence[str],
                   output: str | None = None, seed: bool = False) -> Function:
    """The function with gradients of one scalar output appended to its outputs.

    Gradients are named `grad.<input>` and are zeros where nothing flows. The output (the first by
    default) must be a float scalar. With `seed`, the gradient is multiplied by a new input `seed`
    of the output's shape, which then may be any (a vector-Jacobian product)."""
    output = output or function.output_names[0]
    target = function.output(output)
    if not target.dtype.is_float or (target.shape and not seed):
        raise IRError(f"@{function.name}: can only differentiate a float scalar, not {target!r}")
    with Builder(function.name + "_grad") as b:
        inputs = b.inputs_like(function)
        outputs = b.inline(function, inputs)
        start = (b.input("seed", target.dtype, target.shape) if seed
                 else b.full(1.0, target.dtype, target.shape))
        wanted = {name: inputs[function.input(name).name] for name in with_respect_to}
        gradients = backpropagate(b, {outputs[output]: start}, set(wanted.values()))
        for name, value in wanted.items():
            gradient = gradients.get(value)
            outputs["grad." + name] = (b.full(0.0, value.dtype, value.shape)
                                       if gradient is None else gradient)
        return b.function(outputs)


def backpropagate(b: Builder, seeds: dict[Value, Value], wanted: set[Value]) -> dict[Value, Value]:
    """Append the backward pass of the nodes built so far; gradients of all values on the way.

    Only nodes on a path from a wanted value to a seeded one are visited."""
    nodes = b.nodes
    depends = set(wanted)
    for node in nodes:
        if any(value in depends for value in node.inputs):
            depends.update(node.outputs)
    gradients = dict(seeds)
    for node in reversed(nodes):
        incoming = [gradients.get(value) for value in node.outputs]
        if all(g is None for g in incoming) or not any(v in depends for v in node.inputs):
            continue
        if node.segment:
            b.source, b.segment = node.source, f"{node.segment} backward"
        else:
            b.source, b.segment = f"{node.source} backward", ""
        try:
            contributions = node.op.backward(b, node, incoming)
        except NoGradient as error:
            reached = next(value for value, g in zip(node.outputs, incoming, strict=True)
                           if g is not None)
            raise IRError(f"{node.op.name}: no gradient through {reached!r}: {error} "
                          f"({node.source})") from None
        if len(contributions) != len(node.inputs):
            raise IRError(f"{node.op.name}: backward gave {len(contributions)} gradients for "
                          f"{len(node.inputs)} operands ({node.source})")
        for value, contribution in zip(node.inputs, contributions, strict=True):
            if contribution is None or value not in depends:
                continue
            if contribution.type != value.type:
                raise IRError(f"{node.op.name}: backward gave {contribution!r} as the gradient of "
                              f"{value!r} ({node.source})")
            known = gradients.get(value)
            gradients[value] = contribution if known is None else known + contribution
    b.source, b.segment = None, ""
    return gradients
