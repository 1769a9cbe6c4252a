"""The transformer's blocks as IR: norm, attention, MLP, in the form the model's kind has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from euler_ir.builder import Builder
from euler_ir.graph import Value
from model.config import ModelConfig


@dataclass(frozen=True)
class Positions:
    """The key range lo, hi of each query [B, T], and of the tables of positions the rows where the
    queries stand: `rotary` cos and sin [T, 1, D], or `learned` [T, width]."""

    lo: Value
    hi: Value
    rotary: tuple[Value, Value] | None = None
    learned: Value | None = None


@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens [B, S, G, D] of one layer; new ones go to `position`."""

    keys: Value
    values: Value
    position: Value

    def extend(self, b: Builder, keys: Value, values: Value) -> Cache:
        return Cache(b.update_slice(self.keys, keys, self.position, axis=1),
                     b.update_slice(self.values, values, self.position, axis=1), self.position)


def linear(b: Builder, weights: Mapping[str, Value], name: str, x: Value) -> Value:
    """x times the matrix of this name, plus its bias if the model has one."""
    return b.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(b: Builder, config: ModelConfig, weights: Mapping[str, Value], name: str,
         x: Value) -> Value:
    """RMSNorm or LayerNorm of the last axis."""
    weight = weights[f"{name}.weight"]
    if config.parts.norm == "layer":
        return b.layer_norm(x, weight, weights[f"{name}.bias"], config.norm_eps)
    return b.rms_norm(x, weight, config.norm_eps)


def attention(b: Builder, config: ModelConfig, weights: Mapping[str, Value], layer: str, x: Value,
              positions: Positions, cache: Cache | None = None) -> tuple[Value, Cache | None]:
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv:2305.13245), x [B, T, width].

    With a cache, keys and values are appended to it and attention runs over all of it."""
    batch, time, _ = x.shape
    heads, groups, head = config.heads, config.kv_heads, config.head_size
    qkv = linear(b, weights, f"{layer}.attention.qkv", x)
    q, k, v = b.split(b.reshape(qkv, (batch, time, heads + 2 * groups, head)), 2,
                      (heads, groups, groups))
    if positions.rotary is not None:
        q, k = b.rotary(q, *positions.rotary), b.rotary(k, *positions.rotary)
    if cache is not None:
        cache = cache.extend(b, k, v)
        k, v = cache.keys, cache.values
    mixed = b.attention(q, k, v, positions.lo, positions.hi)
    merged = b.reshape(mixed, (batch, time, heads * head))
    return linear(b, weights, f"{layer}.attention.output", merged), cache


def mlp(b: Builder, config: ModelConfig, weights: Mapping[str, Value], layer: str,
        x: Value) -> Value:
    """down(gelu(up x)), or down(silu(gate x) · up x)  (Shazeer 2020, arXiv:2002.05202) with gate
    and up in one matrix."""
    if config.parts.mlp == "gelu":
        hidden = b.gelu(linear(b, weights, f"{layer}.mlp.up", x))
    else:
        gate_up = linear(b, weights, f"{layer}.mlp.gate_up", x)
        hidden = b.swiglu(*b.split(gate_up, -1, (config.hidden, config.hidden)))
    return linear(b, weights, f"{layer}.mlp.down", hidden)


def block(b: Builder, config: ModelConfig, weights: Mapping[str, Value], layer: str, x: Value,
          positions: Positions, cache: Cache | None = None) -> tuple[Value, Cache | None]:
    """x + attention(norm x), then x + mlp(norm x)."""
    normed = norm(b, config, weights, f"{layer}.attention_norm", x)
    mixed, cache = attention(b, config, weights, layer, normed, positions, cache)
    x = x + mixed
    normed = norm(b, config, weights, f"{layer}.mlp_norm", x)
    return x + mlp(b, config, weights, layer, normed), cache
