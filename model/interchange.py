"""Where each tensor of a Hugging Face model lies in ours: one table a kind.

Both sides of every row show the same numbers, so the tensor of a file is a view of our array, and a
`TensorView` says which: importing writes through it, exporting reads through it. The layouts differ
in three ways only:

* GPT-2's matrices are [inputs, outputs] (its Conv1D), ours are [outputs, inputs]. A square one
  looks right both ways round.
* Llama's q, k, v, and its gate and up, are matrices of their own; ours lie on top of each other.
  Its rotary positions pair element i with i + size/2, as ours do: no row changes its place.
* Our prediction heads are one array [heads, vocabulary, width]. The first is `lm_head.weight`; the
  others have no place in such a model and go to a file of their own, by our names.

Names: transformers, models/gpt2/modeling_gpt2.py and models/llama/modeling_llama.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.parameters import parameters

GPT2, LLAMA = "GPT2LMHeadModel", "LlamaForCausalLM"

#: The head's name, and the name of what it is the same as where it is tied.
HEAD = "lm_head.weight"
EMBEDDINGS = {GPT2: "transformer.wte.weight", LLAMA: "model.embed_tokens.weight"}

#: Files of GPT-2 may leave this out of all names but the head's.
GPT2_PREFIX = "transformer."

# Theirs -> ours. GPT-2's have a .weight and a .bias each.
_GPT2_WHOLE = {"transformer.wte.weight": "embedding.weight",
               "transformer.wpe.weight": "positions.weight",
               "transformer.ln_f.weight": "norm.weight",
               "transformer.ln_f.bias": "norm.bias"}
_GPT2_LAYER = {"ln_1": "attention_norm", "attn.c_attn": "attention.qkv",
               "attn.c_proj": "attention.output", "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up",
               "mlp.c_proj": "mlp.down"}

_LLAMA_WHOLE = {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "norm.weight"}
_LLAMA_LAYER = {"input_layernorm": "attention_norm", "self_attn.o_proj": "attention.output",
                "post_attention_layernorm": "mlp_norm", "mlp.down_proj": "mlp.down"}
# Ours -> theirs, from top to bottom.
_LLAMA_STACKED = {"attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                  "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj")}


@dataclass(frozen=True)
class TensorView:
    """The tensor `name` of a Hugging Face file is our `parameter`, or `part` of it along the
    first axis, transposed or not. `shape` is that of the file's tensor."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    part: slice | int | None = None
    transposed: bool = False

    def of(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor as the file has it, in the memory of our parameters `tensors`."""
        array = tensors[self.parameter]
        if self.part is not None:
            array = array[self.part]
        return array.T if self.transposed else array


def architecture(config: ModelConfig) -> str:
    """The name of the Hugging Face class that computes what a model of this configuration does.

    Raises EulerError for what that class has no place for."""
    if config.kind != "gpt2":
        return LLAMA
    if config.kv_heads != config.heads:
        raise EulerError(f"{GPT2} has no KV heads shared by several heads: the model has "
                         f"{config.heads} heads and {config.kv_heads} KV heads")
    if config.head_size * config.heads != config.width:
        raise EulerError(f"{GPT2} has no head size of its own: the model has {config.heads} heads "
                         f"of {config.head_size} in a width of {config.width}")
    return GPT2


def tensor_views(config: ModelConfig) -> tuple[TensorView, ...]:
    """A view for every tensor of `model.safetensors`; a tied head has none of its own."""
    shapes = {p.name: p.shape for p in parameters(config)}
    rows = _gpt2_rows(config) if architecture(config) == GPT2 else _llama_rows(config)
    result = list(rows)
    if not config.tied_head:
        result.append(_head(HEAD, 0, shapes))
    return tuple(result)


def further_heads(config: ModelConfig) -> tuple[TensorView, ...]:
    """Views for the prediction heads after the first, which have a file of their own."""
    shapes = {p.name: p.shape for p in parameters(config)}
    return tuple(_head(f"heads.{k}.weight", k, shapes) for k in range(1, config.prediction_heads))


def _head(name: str, index: int, shapes: Mapping[str, tuple[int, ...]]) -> TensorView:
    return TensorView(name, "heads.weight", shapes["heads.weight"][1:], index)


def _gpt2_rows(config: ModelConfig) -> Iterator[TensorView]:
    shapes = {p.name: p.shape for p in parameters(config)}
    for theirs, ours in _GPT2_WHOLE.items():
        yield TensorView(theirs, ours, shapes[ours])
    for i in range(config.layers):
        for theirs, ours in _GPT2_LAYER.items():
            for kind in ("weight", "bias"):
                parameter = f"layers.{i}.{ours}.{kind}"
                shape = shapes[parameter]
                yield TensorView(f"transformer.h.{i}.{theirs}.{kind}", parameter, shape[::-1],
                            transposed=len(shape) == 2)


def _llama_rows(config: ModelConfig) -> Iterator[TensorView]:
    shapes = {p.name: p.shape for p in parameters(config)}
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    heights = {"attention.qkv": (queries, keys, keys),
               "mlp.gate_up": (config.hidden, config.hidden)}
    for theirs, ours in _LLAMA_WHOLE.items():
        yield TensorView(theirs, ours, shapes[ours])
    for i in range(config.layers):
        for theirs, ours in _LLAMA_LAYER.items():
            parameter = f"layers.{i}.{ours}.weight"
            yield TensorView(f"model.layers.{i}.{theirs}.weight", parameter, shapes[parameter])
        for ours, parts in _LLAMA_STACKED.items():
            start = 0
            for theirs, rows in zip(parts, heights[ours], strict=True):
                yield TensorView(f"model.layers.{i}.{theirs}.weight", f"layers.{i}.{ours}.weight",
                            (rows, config.width), slice(start, start + rows))
                start += rows
