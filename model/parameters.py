"""The parameters of a model: names, shapes, initial values, weight decay.

Initial values are normal. The GPT-2 kind follows its model (Radford et al. 2019; openai/gpt-2,
src/model.py): deviation 0.02, learned positions 0.01. The nano and llama kinds take 1/√inputs for
the layers' matrices, which keeps the variance of what passes through (LeCun et al. 1998, "Efficient
BackProp"), 1 for the embedding, the scale at which it enters the residual stream beside them, and
0.02 for the heads, so that training starts near the uniform prediction; benchmarks/default-run.md
compares the two. In all kinds matrices that write to the residual stream are divided by
√(2·layers), so that its variance does not grow with depth (GPT-2), norms start at one and biases at
zero. Every tensor draws from its own counter-based stream, keyed by the seed and its name: values
depend on neither the order nor the number of the others.

Weight decay acts on everything with more than one axis: the embedding (once, also where it is the
head too), learned positions, heads and the layers' matrices; not on norms and biases.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from euler_ir.errors import EulerError
from model.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor, with normal initial values of this deviation and mean.

    Programs see it with `padding` more rows, which are zero and stay so; they are not counted and
    not saved. A token reads its row of a `looked_up` table and is not multiplied with it."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    padding: int = 0
    looked_up: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        if not self.padding:
            return self.shape
        *heads, rows, width = self.shape
        return (*heads, rows + self.padding, width)

    @property
    def decayed(self) -> bool:
        """Whether weight decay acts on it."""
        return len(self.shape) > 1

    def initial(self, seed: int, dtype=np.float32) -> np.ndarray:
        """The initial values, drawn in f64 and rounded once."""
        if not self.std:
            return np.full(self.shape, self.mean, dtype)
        generator = np.random.Generator(np.random.Philox(
            key=np.array([seed, zlib.crc32(self.name.encode())], np.uint64)))
        return (generator.standard_normal(self.shape) * self.std + self.mean).astype(dtype)


_HEAD_STD, _POSITION_STD = 0.02, 0.01


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters in the order of the forward pass. Matrices are [outputs, inputs]."""
    width, padding = config.width, config.padded_vocabulary - config.vocabulary
    result = [Parameter("embedding.weight", (config.vocabulary, width),
                        config.parts.embedding_std, padding=padding,
                        looked_up=not config.tied_head)]
    if config.parts.positions == "learned":
        result.append(Parameter("positions.weight", (config.context, width), _POSITION_STD,
                                looked_up=True))
    for i in range(config.layers):
        result += _layer(config, f"layers.{i}")
    result += _norm(config, "norm")
    if not config.tied_head:
        heads = (config.prediction_heads, config.vocabulary, width)
        result.append(Parameter("heads.weight", heads, _HEAD_STD, padding=padding))
    return tuple(result)


def check_layers(config: ModelConfig, tensors: int) -> None:
    """Raise EulerError where so many tensors cannot hold the layers that a file claims: asked
    before a list of all parameters is made, which may be as long as whoever wrote it likes."""
    most = tensors // len(list(_layer(config, "layers.0")))
    if config.layers > most:
        raise EulerError(f"{config.layers} layers do not go with {tensors} tensors, which are "
                         f"enough for {most}")


def _layer(config: ModelConfig, layer: str) -> Iterator[Parameter]:
    residual = 1.0 / math.sqrt(2 * config.layers)
    width, hidden, head = config.width, config.hidden, config.head_size
    yield from _norm(config, f"{layer}.attention_norm")
    qkv_rows = (config.heads + 2 * config.kv_heads) * head
    yield from _linear(config, f"{layer}.attention.qkv", qkv_rows, width)
    yield from _linear(config, f"{layer}.attention.output", width, config.heads * head, residual)
    yield from _norm(config, f"{layer}.mlp_norm")
    if config.parts.mlp == "gelu":
        yield from _linear(config, f"{layer}.mlp.up", hidden, width)
    else:
        yield from _linear(config, f"{layer}.mlp.gate_up", 2 * hidden, width)
    yield from _linear(config, f"{layer}.mlp.down", width, hidden, residual)


def _linear(config: ModelConfig, name: str, outputs: int, inputs: int,
            scale: float = 1.0) -> Iterator[Parameter]:
    std = config.parts.matrix_std
    std = scale * (1.0 / math.sqrt(inputs) if std is None else std)
    yield Parameter(f"{name}.weight", (outputs, inputs), std)
    if config.parts.biases:
        yield Parameter(f"{name}.bias", (outputs,))


def _norm(config: ModelConfig, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (config.width,), mean=1.0)
    if config.parts.norm == "layer":
        yield Parameter(f"{name}.bias", (config.width,))


def parameter_count(config: ModelConfig) -> int:
    """Trained numbers; padding is none of them."""
    return sum(parameter.size for parameter in parameters(config))


def flops_per_token(config: ModelConfig, context: int) -> int:
    """FLOPs of one training step a token: 6 a parameter outside look-up tables (a multiply and an
    add, once forward and twice backward), and causal attention's 6·layers·width·context."""
    dense = sum(p.size for p in parameters(config) if not p.looked_up)
    return 6 * dense + 6 * config.layers * config.heads * config.head_size * context
