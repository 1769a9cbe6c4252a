"""Batches, and functions of models, that several tests use."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backends.backend import Buffer
from euler_ir.builder import Builder
from euler_ir.graph import Function
from euler_ir.types import F32, I32, DType
from model.config import ModelConfig
from model.transformer import (
    hidden_states,
    logits,
    rotary_inputs,
    token_positions,
    weight_inputs,
)
from runtime.data.batches import MicroBatch, StepBatch


def micro_batch(config: ModelConfig, rows: int, time: int, seed: int,
                keep: int | None = None) -> MicroBatch:
    """Random tokens and targets, of which the first `keep` positions (all rows) are supervised."""
    generator = np.random.default_rng(seed)
    targets = generator.integers(0, config.vocabulary,
                                 (rows, time, config.prediction_heads)).astype(np.int32)
    if keep is not None:
        targets.reshape(rows * time, -1)[keep:] = -1
    shape = (rows, time)
    return MicroBatch(generator.integers(0, config.vocabulary, shape).astype(np.int32), targets,
                      np.zeros(shape, np.int32),
                      np.broadcast_to(np.arange(1, time + 1, dtype=np.int32), shape).copy())


def step_batch(*micro_batches: MicroBatch) -> StepBatch:
    counts = sum((batch.targets >= 0).sum((0, 1)) for batch in micro_batches)
    return StepBatch(tuple(micro_batches), counts)


def contents(buffers: Mapping[str, Buffer]) -> dict[str, np.ndarray]:
    """Copies of what buffers hold."""
    return {name: buffer.read().copy() for name, buffer in buffers.items()}


def logits_function(config: ModelConfig, rows: int, time: int, dtype: DType = F32) -> Function:
    """weights, tokens and key ranges → logits [B, T, V] of head 0, by way of no cache."""
    with Builder("logits") as b:
        weights, tables = weight_inputs(b, config, dtype), rotary_inputs(b, config, dtype)
        tokens, lo, hi = (b.input(name, I32, (rows, time)) for name in ("tokens", "lo", "hi"))
        positions = token_positions(b, weights, tables, lo, hi)
        hidden, _ = hidden_states(b, config, weights, tokens, positions)
        scores = b.part(logits(b, config, weights, hidden, 1), -1, 0, config.vocabulary)
        return b.function({"logits": b.reshape(scores, (rows, time, config.vocabulary))})
