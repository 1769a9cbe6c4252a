"""Matmul epilogues: pointwise ops on a matmul's result move into the matmul's store.

Saves writing and reading the whole result once an op: bias, activation, residual, and `sum + dW`
in gradient accumulation. A chain is taken while each value has one consumer.
"""

from __future__ import annotations

from euler_ir import ops
from euler_ir.graph import Function, Node, Value
from euler_ir.op import Pointwise
from euler_ir.passes.extract import COPIED, fused_node


def fuse_epilogues(function: Function) -> Function:
    consumers, producers = function.consumers(), function.producers()
    position = {value: i for i, node in enumerate(function.nodes) for value in node.outputs}
    outputs = set(function.outputs)
    must_precede: dict[Node, list[Node]] = {}
    for reader, writer in function.anti_dependences():
        must_precede.setdefault(writer, []).append(reader)
    taken: set[Node] = set()
    replaced: dict[Node, Node] = {}
    for start, node in enumerate(function.nodes):
        if not isinstance(node.op, ops.Matmul):
            continue
        chain, free = [node], {}
        while chain[-1].output not in outputs:
            following = _next_in_chain(chain[-1], consumers)
            if following is None or following in taken:
                break
            # The chain runs where the matmul stands: not before a reader of memory it takes over.
            if any(position[reader.outputs[0]] > start and reader not in chain
                   for reader in must_precede.get(following, ())):
                break
            prelude = _operands_ready(following, chain, producers, position, start)
            if prelude is None:
                break
            chain.append(following)
            free.update(dict.fromkeys(prelude))
        if len(chain) > 1:
            taken.update(chain)
            fused = fused_node("matmul", [node, *free, *chain[1:]], {chain[-1].output})
            replaced[chain[0]] = fused
    nodes = [replaced.get(node, node) for node in function.nodes
             if node not in taken or node in replaced]
    return function.replace(nodes=tuple(nodes))


def _next_in_chain(node: Node, consumers: dict[Value, list[Node]]) -> Node | None:
    """The only reader of the node's result, if it is pointwise and its result of the same type: a
    matmul stores one type."""
    users = consumers[node.output]
    if len(users) != 1 or not isinstance(users[0].op, Pointwise):
        return None
    user = users[0]
    same = len(user.outputs) == 1 and user.output.type == node.output.type
    return user if same else None


def _operands_ready(user: Node, chain: list[Node], producers, position: dict[Value, int],
                    start: int) -> list[Node] | None:
    """The free nodes to copy for the user's other operands, or None where one of them is only
    known after the matmul runs."""
    prelude = []
    for value in user.inputs:
        if value is chain[-1].output:
            continue
        producer = producers.get(value)
        if producer is not None and isinstance(producer.op, COPIED):
            prelude.append(producer)
            sources = producer.inputs
        else:
            sources = (value,)
        if any(position.get(source, -1) >= start for source in sources):
            return None
    return prelude
