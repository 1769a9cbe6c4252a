"""GGUF, llama.cpp's format: weights, configuration and tokenizer in one file, by the gguf package.

llama.cpp pairs neighbouring elements in its rotary positions of Llama, where we pair element i with
i + size/2. So the rows of every head of Q and K are interleaved on the way out; each keeps its own
number of heads. Everything with one axis, and the learned positions, is F32 whatever the type of
the matrices, as llama.cpp's operations want them. The list of tokens is as long as the embedding.

llama.cpp cuts texts with code of its own, which differs from the tokenizer's pattern in a few odd
cases: tests/test_oracle_llama_cpp_tokenizer.py names them.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from euler_ir.errors import EulerError, shown
from model.config import ModelConfig
from model.interchange import EMBEDDINGS, GPT2, HEAD, architecture, tensor_views
from model.tokenizer import Tokenizer, Vocabulary
from model.tokenizer.pretokenizer import GPT2 as GPT2_PATTERN
from model.tokenizer.pretokenizer import LLAMA3 as LLAMA3_PATTERN
from model.tokenizer.tokenizer_json import spelled
from model.transformer import rotary_frequencies
from runtime.exchange.boundaries import Boundaries, boundaries
from runtime.storage.files import replacing
from runtime.storage.tensorfile import FLOATS, converted

#: Element types of matrices, with gguf's name for a file of mostly such.
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}

# What numpy's `tofile`, which writes the tensors, has to say of a disk that is full.
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")

#: llama.cpp's names for a pre-tokenizer's pattern, which decide on ignore_merges as well.
_STYLES = {(GPT2_PATTERN, False): "gpt-2", (LLAMA3_PATTERN, True): "llama-bpe"}


def write_gguf(out: Path | str, config: ModelConfig, tensors: Mapping[str, np.ndarray],
               tokenizer: Tokenizer, dtype: str = "F32",
               record: Mapping[str, Any] | None = None) -> None:
    """Write a model, of parameters by our names, to a new file; the first prediction head only.

    The tokenizer must go with the model. The `record` of an import may say where texts begin and
    end. The same model gives the same bytes. Raises EulerError where the gguf package is missing,
    for a model that llama.cpp has no form for, and for a file that exists."""
    gguf = _package()
    out = Path(out)
    if out.exists():
        raise EulerError(f"{out} exists already: name a new file")
    vocabulary = tokenizer.vocabulary
    arrays = list(_arrays(gguf, config, tensors, dtype))
    with replacing(out) as beside:
        writer = gguf.GGUFWriter(beside, _kind(gguf, config)[1])
        _add_configuration(gguf, writer, config)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
        _add_tokenizer(gguf, writer, vocabulary, config.vocabulary)
        _add_boundaries(writer, vocabulary, boundaries(vocabulary, record))
        for name, array in arrays:
            bits = array.view(np.uint8) if array.dtype == FLOATS["BF16"] else array
            kind = gguf.GGMLQuantizationType.BF16 if bits is not array else None
            writer.add_tensor(name, bits, raw_dtype=kind)
        _write(writer)


def _write(writer: Any) -> None:
    """Write the file. Raises OSError."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    try:
        writer.write_tensors_to_file()
    except OSError as error:
        if _SHORT_WRITE.fullmatch(str(error)) is None:
            raise
        raise OSError(errno.ENOSPC, str(error)) from error
    writer.close()


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise EulerError("GGUF files need the gguf package: pip install -e '.[gguf]' in the "
                         "project's folder") from None
    return gguf


def _kind(gguf: Any, config: ModelConfig) -> tuple[Any, str]:
    """gguf's value and name for the model's architecture."""
    kind = gguf.MODEL_ARCH.GPT2 if architecture(config) == GPT2 else gguf.MODEL_ARCH.LLAMA
    return kind, gguf.MODEL_ARCH_NAMES[kind]


def _arrays(gguf: Any, config: ModelConfig, tensors: Mapping[str, np.ndarray],
            dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file by its name there, [outputs, inputs]."""
    names = gguf.get_tensor_name_map(_kind(gguf, config)[0], config.layers)
    for view in tensor_views(config):
        array = view.of(tensors)
        if view.transposed:
            array = array.T
        if "self_attn.q_proj" in view.name:
            array = interleaved(array, config.heads)
        elif "self_attn.k_proj" in view.name:
            array = interleaved(array, config.kv_heads)
        name = names.get_name(view.name, try_suffixes=(".weight", ".bias"))
        own = "F32" if array.ndim == 1 or view.parameter == "positions.weight" else dtype
        yield name, converted(view.name, array, FLOATS[own])
        # llama.cpp takes a missing head for a tied one, with GPT-2 only since 2025.
        if view.name == EMBEDDINGS[GPT2] and config.tied_head:
            yield (names.get_name(HEAD, try_suffixes=(".weight",)),
                   converted(HEAD, array, FLOATS[dtype]))
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        # No name for this scaling: what each pair of elements is slowed by stands in a tensor.
        slowed = (rotary_frequencies(replace(config, rope_scaling=None))
                  / rotary_frequencies(config))
        name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
        yield name, converted(name, slowed, FLOATS["F32"])


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head in the order 0, size/2, 1, size/2 + 1, ..."""
    count, width = rows.shape
    halves = rows.reshape(heads, 2, count // heads // 2, width)
    return halves.swapaxes(1, 2).reshape(count, width)


def _add_configuration(gguf: Any, writer: Any, config: ModelConfig) -> None:
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_vocab_size(config.vocabulary)
    if config.parts.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def _add_tokenizer(gguf: Any, writer: Any, vocabulary: Vocabulary, rows: int) -> None:
    """Tokens for all rows of the embedding: those that the tokenizer lacks are marked unused."""
    style = (vocabulary.pattern, vocabulary.ignore_merges)
    if style not in _STYLES:
        raise EulerError(f"llama.cpp has no tokenizer with the pre-tokenizer of {style[0]} and "
                         f"ignore_merges {style[1]}")
    types = gguf.TokenType
    tokens = {number: (f"[PAD{number}]", types.UNUSED) for number in range(rows)}
    tokens |= {number: (spelled(value), types.NORMAL)
               for number, value in vocabulary.tokens.items()}
    tokens |= {number: (text, types.USER_DEFINED)
               for text, number in vocabulary.added_tokens.items()}
    tokens |= {number: (text, types.CONTROL)
               for text, number in vocabulary.special_tokens.items()}
    texts = [text for text, _ in tokens.values()]
    text, count = Counter(texts).most_common(1)[0]
    if count > 1:  # llama.cpp would abort the process that loads the file
        raise EulerError(f"llama.cpp tells tokens apart by their spelling, and {count} of the "
                         f"tokenizer's are spelled {shown(text)}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_STYLES[style])
    writer.add_token_list(texts)
    writer.add_token_types([kind for _, kind in tokens.values()])
    writer.add_token_merges([" ".join(spelled(vocabulary.tokens[part]) for part in pair)
                             for pair in vocabulary.merges])


def _add_boundaries(writer: Any, vocabulary: Vocabulary, texts: Boundaries) -> None:
    """The ids around a text: one before it at most, one after it. Of several ends llama.cpp has
    the first from here, and knows others by their names."""
    # Without an end llama.cpp takes token 11 for it and stops there. Byte 255 is in no text.
    never = vocabulary.id_of_bytes[b"\xff"]
    begin = never if texts.begin is None else texts.begin
    end = texts.ends[0] if texts.ends else never
    if vocabulary.prefix not in ((), (begin,)) or vocabulary.suffix not in ((), (end,)):
        raise EulerError("llama.cpp puts one token before a text and its end after it, or none; "
                         f"this tokenizer has {list(vocabulary.prefix)} and "
                         f"{list(vocabulary.suffix)}, and the end is {end}")
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(bool(vocabulary.prefix))
    writer.add_add_eos_token(bool(vocabulary.suffix))
