"""The transformer as IR functions: inputs, hidden states, logits, decoding with a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from euler_ir.builder import Builder
from euler_ir.graph import Function, Value
from euler_ir.types import F32, I32, DType
from model.blocks import Cache, Positions, block, norm
from model.config import ModelConfig
from model.parameters import parameters


def weight_inputs(b: Builder, config: ModelConfig, dtype: DType) -> dict[str, Value]:
    """An input for every parameter, by name."""
    return {p.name: b.input(p.name, dtype, p.padded_shape) for p in parameters(config)}


def rotary_tables(config: ModelConfig, dtype=np.float32) -> dict[str, np.ndarray]:
    """cos and signed sin [context, 1, head] for `Rotary`: angle_i(t) = t · frequency_i; none for a
    model whose positions are not rotary.

    Angles are computed in f64; only the table is rounded."""
    if config.parts.positions != "rotary":
        return {}
    angle = np.arange(config.context, dtype=np.float64)[:, None] * rotary_frequencies(config)
    cos = np.concatenate([np.cos(angle), np.cos(angle)], axis=1)
    sin = np.concatenate([-np.sin(angle), np.sin(angle)], axis=1)
    tables = {"rotary.cos": cos, "rotary.sin": sin}
    return {name: table[:, None, :].astype(dtype) for name, table in tables.items()}


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """The angle by which a position turns each pair of elements, f64 [head/2]: base^(-2i/head),
    scaled as `RopeScaling` says."""
    half = config.head_size // 2
    frequency = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_context * frequency / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


def rotary_inputs(b: Builder, config: ModelConfig, dtype: DType) -> dict[str, Value]:
    """An input for every one of `rotary_tables`, by name."""
    if config.parts.positions != "rotary":
        return {}
    shape = (config.context, 1, config.head_size)
    return {name: b.input(name, dtype, shape) for name in ("rotary.cos", "rotary.sin")}


def token_positions(b: Builder, weights: Mapping[str, Value], tables: Mapping[str, Value],
                    lo: Value, hi: Value, start: Value | None = None) -> Positions:
    """Positions of T tokens with key ranges lo, hi [B, T], which stand at `start` (i32 []) and
    after; at the sequence's beginning without one."""
    time = lo.shape[1]

    def rows(table: Value) -> Value:
        if start is None:
            return b.part(table, 0, 0, time)
        return b.dynamic_slice(table, start, 0, time)

    if tables:
        return Positions(lo, hi, rotary=(rows(tables["rotary.cos"]), rows(tables["rotary.sin"])))
    return Positions(lo, hi, learned=rows(weights["positions.weight"]))


def hidden_states(b: Builder, config: ModelConfig, weights: Mapping[str, Value], tokens: Value,
                  positions: Positions, caches: Sequence[Cache] | None = None
                  ) -> tuple[Value, list[Cache]]:
    """Final normed states [B, T, width] of i32 tokens [B, T], and the extended caches."""
    x = b.gather(weights["embedding.weight"], tokens)
    if positions.learned is not None:
        x = x + positions.learned
    extended = []
    for i in range(config.layers):
        b.segment = layer = f"layers.{i}"
        x, cache = block(b, config, weights, layer, x, positions, caches[i] if caches else None)
        extended.append(cache)
    b.segment = ""
    return norm(b, config, weights, "norm", x), extended


def layer_segments(config: ModelConfig, count: int) -> tuple[str, ...]:
    """The segments of the first `count` layers, which are those whose values live longest; what
    activation checkpointing of so many layers recomputes."""
    return tuple(f"layers.{i}" for i in range(min(count, config.layers)))


def logits(b: Builder, config: ModelConfig, weights: Mapping[str, Value], hidden: Value,
           heads: int) -> Value:
    """[B, T, heads, padded vocabulary] of the first `heads` prediction heads; one matmul."""
    vocabulary = config.padded_vocabulary
    if config.tied_head:
        table = weights["embedding.weight"]
    else:
        table = b.part(weights["heads.weight"], 0, 0, heads)
    flat = b.linear(hidden, b.reshape(table, (heads * vocabulary, config.width)))
    return b.reshape(flat, (*hidden.shape[:2], heads, vocabulary))


def forward_cached(config: ModelConfig, batch: int, time: int, capacity: int,
                   dtype: DType = F32) -> Function:
    """Prefill of `time` tokens, or with time 1 a decoding step.

    Inputs: weights, rotary tables, tokens i32 [B, T], position i32 [] (where the first of these
    tokens stands in the sequence), `last` i32 [] (which of them to give logits for), and for each
    layer caches of `capacity` tokens, donated. Outputs: logits [B, V] of head 0, the caches.
    Padding after `last` is harmless: later tokens overwrite its cache rows before they are seen."""
    with Builder("decode" if time == 1 else "prefill") as b:
        weights = weight_inputs(b, config, dtype)
        tables = rotary_inputs(b, config, dtype)
        tokens = b.input("tokens", I32, (batch, time))
        position, last = b.input("position", I32, ()), b.input("last", I32, ())
        shape = (batch, capacity, config.kv_heads, config.head_size)
        caches = [Cache(b.input(f"cache.{i}.keys", dtype, shape),
                        b.input(f"cache.{i}.values", dtype, shape), position)
                  for i in range(config.layers)]
        visible = b.iota(time) + b.broadcast(position + 1, (time,))
        positions = token_positions(b, weights, tables, b.full(0, I32, (batch, time)),
                                    b.broadcast(visible, (batch, time)), position)
        hidden, caches = hidden_states(b, config, weights, tokens, positions, caches)
        chosen = b.dynamic_slice(hidden, last, 1, 1)
        scores = b.reshape(logits(b, config, weights, chosen, 1),
                           (batch, config.padded_vocabulary))
        outputs = {"logits": b.part(scores, 1, 0, config.vocabulary)}
        for i, cache in enumerate(caches):
            outputs[f"cache.{i}.keys"] = cache.keys
            outputs[f"cache.{i}.values"] = cache.values
        return b.function(outputs, {name: name for name in outputs if name != "logits"})
