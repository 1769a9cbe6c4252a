"""What reading and writing a Hugging Face model folder, and the record of an import, agree on: the
names of files and tensors, element types, and which tensors are constants that say nothing new."""

from __future__ import annotations

import re
from collections.abc import Sequence

from euler_ir.errors import shown
from model.interchange import GPT2, GPT2_PREFIX, HEAD, LLAMA
from runtime.exchange.boundaries import GENERATION_CONFIG
from runtime.storage.tensorfile import FLOATS, TYPES

CONFIG, TENSORS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
FURTHER_HEADS = "mtp_heads.safetensors"
#: Kept as they are: settings of text generation and of how others present the tokenizer.
KEPT = (GENERATION_CONFIG, "tokenizer_config.json", "special_tokens_map.json")

#: Element types by safetensors' names: those of parameters and of constants.
FOLDER_TYPES = {name: TYPES[name] for name in (*FLOATS, "U8", "BOOL")}

_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
_SMALL_CONSTANT = {
    GPT2: re.compile(r"transformer\.h\.\d+\.attn\.masked_bias"),
    LLAMA: re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
}
_MAX_LISTED, _MAX_NAME_CHARS = 5, 80  # names in one error, characters of each


def canonical_name(name: str, hf_class: str | None) -> str:
    """A tensor's name with the prefix that files of GPT-2 may leave out."""
    if hf_class == GPT2 and name != HEAD and not name.startswith(GPT2_PREFIX):
        return GPT2_PREFIX + name
    return name


def is_causal_mask(name: str) -> bool:
    """Whether a tensor, by its canonical name, is a mask of GPT-2."""
    return _MASK.fullmatch(name) is not None


def is_constant(name: str, hf_class: str | None) -> bool:
    """Whether a tensor, by its canonical name, is one that says nothing new."""
    if hf_class == GPT2 and is_causal_mask(name):
        return True
    return hf_class is not None and _SMALL_CONSTANT[hf_class].fullmatch(name) is not None


def listed(names: Sequence[str]) -> str:
    """The names for a message: a few of them, and how many more there are."""
    first = ", ".join(name if name.isprintable() and len(name) <= _MAX_NAME_CHARS else shown(name)
                      for name in names[:_MAX_LISTED])
    return first if len(names) <= _MAX_LISTED else f"{first} and {len(names) - _MAX_LISTED} more"
