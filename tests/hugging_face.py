"""Small Hugging Face folders made by hand, and what their models compute, in numpy.

Written from the published definitions of the two models and sharing no code with ours: names,
layouts and arithmetic are spelled out once more.

`rounded` is applied to what a matrix is multiplied with and `gelu_rounded` to GELU's operand and
result, for comparisons with software that computes these in fewer bits; the rest is f64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from model.tokenizer import END_OF_DOCUMENT, train_tokenizer

VOCABULARY = 300

Rounding = Callable[[np.ndarray], np.ndarray]

GPT2_CONFIG: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 24, "n_head": 3,
    "n_layer": 2, "n_positions": 16, "n_ctx": 16, "vocab_size": VOCABULARY, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1,
}
#: 4 query and 2 KV heads of 8 in a width of 24: the head size is given, not width / heads.
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "vocab_size": VOCABULARY,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
    "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False,
}


@cache
def small_tokenizer() -> str:
    """A tokenizer.json of some 280 tokens, fewer than the vocabulary."""
    return train_tokenizer(["to be, or not to be, that is the question: " * 9], 280,
                           [END_OF_DOCUMENT]).to_json()


def gpt2_tensors(config: dict, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    """Without prefix, as the first published files."""
    width, hidden = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    draw = _drawer(seed, dtype)
    tensors = {"wte.weight": draw(config["vocab_size"], width),
               "wpe.weight": draw(config["n_positions"], width),
               "ln_f.weight": draw(width) + 1, "ln_f.bias": draw(width)}
    for i in range(config["n_layer"]):
        for name, inputs, outputs in (("attn.c_attn", width, 3 * width),
                                      ("attn.c_proj", width, width),
                                      ("mlp.c_fc", width, hidden), ("mlp.c_proj", hidden, width)):
            tensors[f"h.{i}.{name}.weight"] = draw(inputs, outputs)
            tensors[f"h.{i}.{name}.bias"] = draw(outputs)
        for name in ("ln_1", "ln_2"):
            tensors[f"h.{i}.{name}.weight"] = draw(width) + 1
            tensors[f"h.{i}.{name}.bias"] = draw(width)
    return tensors


def llama_tensors(config: dict, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[n] * head for n in ("num_attention_heads", "num_key_value_heads"))
    draw = _drawer(seed, dtype)
    tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], width),
               "model.norm.weight": draw(width) + 1,
               "lm_head.weight": draw(config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, outputs, inputs in (("self_attn.q_proj", queries, width),
                                      ("self_attn.k_proj", keys, width),
                                      ("self_attn.v_proj", keys, width),
                                      ("self_attn.o_proj", width, queries),
                                      ("mlp.gate_proj", hidden, width),
                                      ("mlp.up_proj", hidden, width),
                                      ("mlp.down_proj", width, hidden)):
            tensors[f"{layer}.{name}.weight"] = draw(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = draw(width) + 1
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return tensors


def _drawer(seed: int, dtype):
    generator = np.random.default_rng(seed)
    return lambda *shape: (generator.standard_normal(shape) * 0.3).astype(dtype)


def write_model(folder: Path, config: dict, tensors: dict[str, np.ndarray],
                tokenizer_json: str | None = None) -> Path:
    """The folder with these contents, and the small tokenizer unless another is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json or small_tokenizer(),
                                          encoding="utf-8")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def file_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The model's tensors."""
    return safetensors.numpy.load_file(folder / "model.safetensors")


def split_file(folder: Path) -> dict:
    """Make the folder's tensors two shards; the index, written beside them."""
    tensors = file_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, own in shards.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def unchanged(array: np.ndarray) -> np.ndarray:
    return array


def gpt2_logits(config: dict, tensors: dict[str, np.ndarray], tokens,
                rounded: Rounding = unchanged, gelu_rounded: Rounding = unchanged) -> np.ndarray:
    """[T, V] in f64; a tied head. Tensors without prefix."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    heads, eps = config["n_head"], config["layer_norm_epsilon"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return rounded(x) @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][:len(tokens)]
    for i in range(config["n_layer"]):
        q, k, v = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        split = [np.split(part, heads, axis=-1) for part in (q, k, v)]
        mixed = [causal_attention(*parts) for parts in zip(*split, strict=True)]
        x = x + linear(np.concatenate(mixed, axis=-1), f"h.{i}.attn.c_proj")
        inner = gelu_rounded(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(gelu_rounded(inner), f"h.{i}.mlp.c_proj")
    return rounded(norm(x, "ln_f")) @ w["wte.weight"].T


def llama_logits(config: dict, tensors: dict[str, np.ndarray], tokens,
                 rounded: Rounding = unchanged) -> np.ndarray:
    """[T, V] in f64."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    heads, groups, head = (config[name] for name in ("num_attention_heads",
                                                     "num_key_value_heads", "head_dim"))

    def norm(x, name):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * w[f"{name}.weight"]

    def linear(x, name):
        return rounded(x) @ w[name].T

    def rotated(x):
        """x cos + rotate_half(x) sin, the angles of the two halves the same."""
        frequency = np.array([rotary_frequency(config, i) for i in range(head // 2)] * 2)
        angle = np.arange(len(x))[:, None] * frequency
        halves = np.concatenate([-x[:, head // 2:], x[:, :head // 2]], axis=1)
        return x * np.cos(angle) + halves * np.sin(angle)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (np.split(linear(normed, f"{layer}.self_attn.{name}_proj.weight"), count, axis=-1)
                   for name, count in (("q", heads), ("k", groups), ("v", groups)))
        mixed = [causal_attention(rotated(q[h]), rotated(k[h * groups // heads]),
                                  v[h * groups // heads]) for h in range(heads)]
        x = x + linear(np.concatenate(mixed, axis=-1), f"{layer}.self_attn.o_proj.weight")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, f"{layer}.mlp.gate_proj.weight")
        up = linear(normed, f"{layer}.mlp.up_proj.weight")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj.weight")
    head = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
    return linear(norm(x, "model.norm"), head)


def rotary_frequency(config: dict, pair: int) -> float:
    """The angle a position of one pair of elements, by its wavelength where llama3 scales it."""
    frequency = config["rope_theta"] ** (-2 * pair / config["head_dim"])
    scaling = config["rope_scaling"] or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is None:
        return frequency
    slow = frequency / scaling["factor"]
    if kind == "linear":
        return slow
    first = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < first / high:
        return frequency
    if wavelength > first / low:
        return slow
    share = (first / wavelength - low) / (high - low)
    return (1 - share) * slow + share * frequency


def causal_attention(q, k, v) -> np.ndarray:
    scores = q @ k.T / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True) @ v
