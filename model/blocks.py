"""The transformer's blocks as IR: norm, attention with rotary positions, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from euler_ir.builder import Builder
from euler_ir.graph import Value
from model.config import ModelConfig


@dataclass(frozen=True)
class Positions:
    """Where the queries stand: rotary tables [T, 1, D] and the key range of each query [B, T]."""

    cos: Value
    sin: Value
    lo: Value
    hi: Value


@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens [B, S, G, D] of one layer; new ones go to `position`."""

    keys: Value
    values: Value
    position: Value

    def extend(self, b: Builder, keys: Value, values: Value) -> Cache:
        return Cache(b.update_slice(self.keys, keys, self.position, axis=1),
                     b.update_slice(self.values, values, self.position, axis=1), self.position)


def attention(b: Builder, config: ModelConfig, weights: Mapping[str, Value], layer: str, x: Value,
              positions: Positions, cache: Cache | None = None) -> tuple[Value, Cache | None]:
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv:2305.13245), x [B, T, width].

    With a cache, keys and values are appended to it and attention runs over all of it."""
    batch, time, _ = x.shape
    heads, groups, head = config.heads, config.kv_heads, config.head_size
    qkv = b.linear(x, weights[f"{layer}.attention.qkv.weight"])
    q, k, v = b.split(b.reshape(qkv, (batch, time, heads + 2 * groups, head)), 2,
                      (heads, groups, groups))
    q = b.rotary(q, positions.cos, positions.sin)
    k = b.rotary(k, positions.cos, positions.sin)
    if cache is not None:
        cache = cache.extend(b, k, v)
        k, v = cache.keys, cache.values
    mixed = b.attention(q, k, v, positions.lo, positions.hi)
    merged = b.reshape(mixed, (batch, time, heads * head))
    return b.linear(merged, weights[f"{layer}.attention.output.weight"]), cache


def swiglu(b: Builder, config: ModelConfig, weights: Mapping[str, Value], layer: str,
           x: Value) -> Value:
    """down(silu(gate x) · up x)  (Shazeer 2020, arXiv:2002.05202), gate and up in one matrix."""
    gate_up = b.linear(x, weights[f"{layer}.mlp.gate_up.weight"])
    gate, up = b.split(gate_up, -1, (config.hidden, config.hidden))
    return b.linear(b.swiglu(gate, up), weights[f"{layer}.mlp.down.weight"])


def block(b: Builder, config: ModelConfig, weights: Mapping[str, Value], layer: str, x: Value,
          positions: Positions, cache: Cache | None = None) -> tuple[Value, Cache | None]:
    """x + attention(norm x), then x + mlp(norm x)."""
    normed = b.rms_norm(x, weights[f"{layer}.attention_norm.weight"], config.norm_eps)
    mixed, cache = attention(b, config, weights, layer, normed, positions, cache)
    x = x + mixed
    normed = b.rms_norm(x, weights[f"{layer}.mlp_norm.weight"], config.norm_eps)
    return x + swiglu(b, config, weights, layer, normed), cache
