"""The parameters of a model: names, shapes, initial values, weight decay.

Initialisation follows GPT-2 (Radford et al. 2019): matrices are normal with deviation 0.02, those that write to the residual stream divided by √(2·layers), so that its variance does not grow
with depth; norms start at one. Every tensor draws from its own counter-based stream, keyed by the
seed and its name: values depend on neither the order nor the number of the others.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor. `std` is that of its normal initial values; None means ones."""

    name: str
    shape: tuple[int, ...]
    std: float | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decayed(self) -> bool:
        """Weight decay acts on matrices (embedding and heads are ones), not on norms."""
        return len(self.shape) > 1

    def initial(self, seed: int, dtype=np.float32) -> np.ndarray:
        """The initial values, drawn in f64 and rounded once."""
        if self.std is None:
            return np.ones(self.shape, dtype)
        generator = np.random.Generator(np.random.Philox(
            key=np.array([seed, zlib.crc32(self.name.encode())], np.uint64)))
        return (generator.standard_normal(self.shape) * self.std).astype(dtype)


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters in the order of the forward pass. Matrices are [outputs, inputs]."""
    std, residual_std = 0.02, 0.02 / math.sqrt(2 * config.layers)
    width, hidden, head = config.width, config.hidden, config.head_size
    qkv_rows = (config.heads + 2 * config.kv_heads) * head
    result = [Parameter("embedding.weight", (config.vocabulary, width), std)]
    for i in range(config.layers):
        layer = f"layers.{i}"
        result += [
            Parameter(f"{layer}.attention_norm.weight", (width,), None),
            Parameter(f"{layer}.attention.qkv.weight", (qkv_rows, width), std),
            Parameter(f"{layer}.attention.output.weight", (width, config.heads * head),
                      residual_std),
            Parameter(f"{layer}.mlp_norm.weight", (width,), None),
            Parameter(f"{layer}.mlp.gate_up.weight", (2 * hidden, width), std),
            Parameter(f"{layer}.mlp.down.weight", (width, hidden), residual_std),
        ]
    heads = (config.prediction_heads, config.vocabulary, width)
    return (*result, Parameter("norm.weight", (width,), None),
            Parameter("heads.weight", heads, std))


def parameter_count(config: ModelConfig) -> int:
    return sum(parameter.size for parameter in parameters(config))


def flops_per_token(config: ModelConfig, context: int) -> int:
    """FLOPs of one training step a token: 6 a parameter outside the embedding (a multiply and an
    add, once forward and twice backward), and causal attention's 6·layers·width·context."""
    embedding = config.vocabulary * config.width
    dense = parameter_count(config) - embedding
    return 6 * dense + 6 * config.layers * config.heads * config.head_size * context
