"""What `runtime.bench` measures: cases, each something that runs again and again.

| mode      | a step                                                                        |
|-----------|-------------------------------------------------------------------------------|
| train     | forward, backward, update, on random tokens                                   |
| decode    | one token for each of B texts, of which half the context is in the KV cache    |
| matmul    | the matrix products of a training step, one after the other                    |
| attention | its attentions, forward and backward                                          |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.backend import Backend, Program
from euler_ir import ops
from euler_ir.builder import Builder
from euler_ir.graph import Node
from euler_ir.types import DType
from model.config import ModelConfig
from model.objective import training_step
from model.optimizer import AdamWConfig
from model.parameters import flops_per_token, parameters
from model.transformer import forward_cached
from runtime.compiler.driver import compile_function, to_buffers
from runtime.data.batches import MicroBatch, StepBatch
from runtime.engine import Model, Trainer
from runtime.inference.generation import cache_buffers
from runtime.profiling.costs import cost
from runtime.profiling.roofline import label

_LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Case:
    """Something to time: `run` does it once, with `program`. A step has it `count` times."""

    name: str
    run: Callable[[], object]
    program: Program
    flops: int
    bytes: int = 0
    count: int = 1


def train(config: ModelConfig, backend: Backend, batch: int, time: int, dtype: DType) -> list[Case]:
    model = Model(config, backend, dtype)
    model.initialise(0)
    trainer = Trainer(model, AdamWConfig(), batch, time)
    generator, heads = np.random.default_rng(0), config.prediction_heads

    def random_ids(*shape: int) -> np.ndarray:
        return generator.integers(0, config.vocabulary, shape, dtype=np.int32)

    lo, hi = _causal(batch, time)
    micro_batch = MicroBatch(random_ids(batch, time), random_ids(batch, time, heads), lo, hi)
    step = StepBatch((micro_batch,), np.full(heads, batch * time))
    return [Case("step", lambda: trainer.step(step, _LEARNING_RATE), trainer.programs["step"],
                 batch * time * flops_per_token(config, time))]


def decode(config: ModelConfig, backend: Backend, batch: int, time: int,
           dtype: DType) -> list[Case]:
    model = Model(config, backend, dtype)
    model.initialise(0)
    program = compile_function(forward_cached(config, batch, 1, time, dtype), backend,
                               {**model.bound, **cache_buffers(model, batch, time)})
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (batch, 1), dtype=np.int32)
    position = time // 2
    inputs = {"tokens": tokens, "position": np.array(position, np.int32),
              "last": np.array(0, np.int32)}
    return [Case("decode", lambda: program.run(inputs), program,
                 batch * _decode_flops(config, position + 1))]


def _decode_flops(config: ModelConfig, keys: int) -> int:
    """Operations for one token that sees `keys` keys: two for each weight of a matrix that it
    meets (head 0 of the prediction heads), four for each key and element of a query."""
    # The last two axes: of the heads' tensor that is one head.
    matrices = sum(math.prod(p.shape[-2:]) for p in parameters(config)
                   if len(p.shape) > 1 and not p.looked_up)
    return 2 * matrices + 4 * config.layers * config.heads * config.head_size * keys


def matmul(config: ModelConfig, backend: Backend, batch: int, time: int,
           dtype: DType) -> list[Case]:
    return _nodes(config, backend, batch, time, dtype, (ops.Matmul,))


def attention(config: ModelConfig, backend: Backend, batch: int, time: int,
              dtype: DType) -> list[Case]:
    return _nodes(config, backend, batch, time, dtype, (ops.Attention, ops.AttentionBackward))


MODES = {"train": train, "decode": decode, "matmul": matmul, "attention": attention}


def _nodes(config: ModelConfig, backend: Backend, batch: int, time: int, dtype: DType,
           classes: tuple[type, ...]) -> list[Case]:
    """A case for each different node of these classes in the training step."""
    function = training_step(config, AdamWConfig(), batch, time, False, dtype)["step"]
    nodes = [node for node in function.nodes if isinstance(node.op, classes)]
    counts = Counter(map(_signature, nodes))
    different = {_signature(node): node for node in nodes}
    return [_node_case(node, counts[key], backend) for key, node in different.items()]


def _signature(node: Node) -> tuple:
    return node.op, tuple(value.type for value in node.inputs)


def _node_case(node: Node, count: int, backend: Backend) -> Case:
    """The node alone, on inputs of its types."""
    with Builder(node.op.name) as b:
        inputs = [b.input(f"x{i}", value.dtype, value.shape)
                  for i, value in enumerate(node.inputs)]
        results = b.append(node, inputs)
        function = b.function({f"y{i}": result for i, result in enumerate(results)})
    operands = {value.name: array for value, array in zip(inputs, _operands(node), strict=True)}
    program = compile_function(function, backend, to_buffers(operands, backend))
    work = cost(node)
    return Case(label(node), lambda: program.run({}), program, work.flops, work.bytes, count)


def _operands(node: Node) -> list[np.ndarray]:
    """Random operands; for attention causal key ranges, and a log of sums as large as it would
    be, since weights that overflow take another time."""
    generator = np.random.default_rng(0)
    arrays = []
    for value in node.inputs:
        array = np.zeros(value.shape, value.dtype.numpy)
        if value.dtype.is_float:
            array[...] = generator.standard_normal(value.shape)
        arrays.append(array)
    if isinstance(node.op, (ops.Attention, ops.AttentionBackward)):
        arrays[3][...], arrays[4][...] = _causal(*arrays[3].shape)
    if isinstance(node.op, ops.AttentionBackward):
        arrays[6][...] = math.log(arrays[1].shape[1]) + 0.5
    return arrays


def _causal(batch: int, time: int) -> tuple[np.ndarray, np.ndarray]:
    """Key ranges lo, hi [batch, time] of rows that are one document each."""
    hi = np.broadcast_to(np.arange(1, time + 1, dtype=np.int32), (batch, time))
    return np.zeros((batch, time), np.int32), np.ascontiguousarray(hi)


def planned_bytes(cases: Sequence[Case]) -> int:
    """Memory of the programs as planned: arenas, and buffers of inputs, weights and moments among
    them."""
    plans = [case.program.plan for case in cases]
    return sum(plan.arena_bytes + sum(value.type.bytes for value in plan.function.inputs)
               for plan in plans)
