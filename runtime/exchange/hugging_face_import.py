"""Hugging Face model folders, read: what a folder has is kept, checked to say nothing new, or
refused by name.

A model keeps an *import record*, so that it can be written back as it was: the tensors' names and
types, `config.json`, the smaller JSON files, and the values of constants that old files carry
(masks of GPT-2, rotary frequencies of Llama).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from euler_ir.errors import EulerError, error_context
from model.config import ModelConfig
from model.hugging_face_config import read_config
from model.interchange import (
    EMBEDDINGS,
    GPT2,
    HEAD,
    LLAMA,
    architecture,
    further_heads,
    tensor_views,
)
from model.parameters import check_layers, parameters
from model.tokenizer import Vocabulary
from model.transformer import rotary_frequencies
from runtime.exchange.boundaries import boundaries
from runtime.exchange.hugging_face_format import (
    CONFIG,
    FOLDER_TYPES,
    FURTHER_HEADS,
    INDEX,
    KEPT,
    TENSORS,
    TOKENIZER,
    canonical_name,
    is_causal_mask,
    is_constant,
    listed,
)
from runtime.exchange.untrusted import MAX_JSON_BYTES, open_tensors, read_json, read_text
from runtime.storage.checkpoint import parse_tokenizer
from runtime.storage.tensorfile import FLOATS

# A tokenizer's file: GPT-2's and Llama 3's have 30 to 130 bytes a token.
_MAX_TOKENIZER_BYTES, _MAX_BYTES_PER_TOKEN = 24 << 20, 160


@dataclass(frozen=True)
class Imported:
    """A model as a folder has it: parameters by our names, f32 (f64 where the file has f64)."""

    config: ModelConfig
    tensors: dict[str, np.ndarray]
    tokenizer_json: str
    record: dict[str, Any]


def read_folder(folder: Path | str, tokenizer: Path | str | None = None) -> Imported:
    """Read the model of a folder, with the tokenizer of the folder or of another file.

    Raises EulerError, in one line, for what is missing, damaged, too large, or not supported."""
    folder = Path(folder)
    if not folder.is_dir():
        raise EulerError(f"{folder} is no directory of a model")
    document = read_json(folder, CONFIG)
    with error_context(folder):
        config = read_config(document)
        hf_class = architecture(config)
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open_tensors(folder, name)) for name in _tensor_files(folder)]
        found = _Found(folder, hf_class, files)
        heads = None
        if os.path.lexists(folder / FURTHER_HEADS):
            file = opened.enter_context(open_tensors(folder, FURTHER_HEADS))
            heads = _Found(folder, None, [file])
            config = _with_heads(config, heads)
        with error_context(folder / CONFIG):
            check_layers(config, len(found.slices))
        record = _check(config, found, heads)
        tokenizer_json, vocabulary = _read_tokenizer(folder, tokenizer, config)
        tensors = _read_parameters(config, found, heads)
    record |= {"architecture": hf_class, "config": document,
               "files": {name: read_text(folder, name)
                         for name in KEPT if os.path.lexists(folder / name)}}
    with error_context(folder):
        boundaries(vocabulary, record)  # refuses what is no id
    return Imported(config, tensors, tokenizer_json, record)


class _Found:
    """The tensors in safetensors files, by canonical name: GPT-2's with its prefix."""

    def __init__(self, folder: Path, hf_class: str | None, files: Sequence[safetensors.safe_open]):
        self.folder = folder
        self.slices, self.names, self._files = {}, {}, {}
        for file in files:
            for name in file.keys():
                canonical = canonical_name(name, hf_class)
                if canonical in self.slices:
                    raise EulerError(f"{folder} has the tensor {name} twice")
                self.slices[canonical] = file.get_slice(name)
                self.names[canonical], self._files[canonical] = name, file

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slices[name].get_shape())

    def dtype(self, name: str) -> str:
        return self.slices[name].get_dtype()

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(self.names[name])


def _with_heads(config: ModelConfig, heads: _Found) -> ModelConfig:
    if architecture(config) == GPT2 or config.tied_head:
        raise EulerError(f"{heads.folder / FURTHER_HEADS} has further prediction heads, which go "
                         f"with an untied model of class {LLAMA} only")
    return replace(config, kind="nano", prediction_heads=1 + len(heads.slices))


def _check(config: ModelConfig, found: _Found, heads: _Found | None) -> dict[str, Any]:
    """Compare what is there with what must be; the import record's part about tensors.

    Reads nothing but constants and, where the embedding is there twice, both of these."""
    hf_class = architecture(config)
    wanted = {view.name: view.shape for view in tensor_views(config)}
    _check_tensors(found, wanted, {HEAD} if config.tied_head else set(), hf_class)
    if heads is not None:
        _check_tensors(heads, {view.name: view.shape for view in further_heads(config)})
    if config.tied_head and HEAD in found.slices:
        _check_tied(found, EMBEDDINGS[hf_class])
    constants = {found.names[name]: _constant(found, name, config)
                 for name in found.slices if is_constant(name, hf_class)}
    types = {found.names[name]: found.dtype(name) for name in found.slices}
    return {"tensors": types, "constants": constants,
            "further_heads": {name: heads.dtype(name) for name in heads.slices} if heads else {}}


def _check_tensors(found: _Found, wanted: Mapping[str, tuple[int, ...]],
                   optional: set[str] = frozenset(), hf_class: str | None = None) -> None:
    """Raise EulerError unless these tensors are there, in these shapes, and no other ones."""
    missing = [name for name in wanted if name not in found.slices]
    unknown = [found.names[name] for name in found.slices
               if name not in wanted and name not in optional and not is_constant(name, hf_class)]
    complaints = [f"{kind} tensors: {listed(names)}"
                  for kind, names in (("missing", missing), ("unknown", unknown)) if names]
    if complaints:
        raise EulerError(f"{found.folder} has {'; '.join(complaints)}")
    for name, shape in wanted.items():
        if found.shape(name) != shape:
            raise EulerError(f"{found.folder}: {found.names[name]} has shape "
                             f"{list(found.shape(name))}, {CONFIG} asks for {list(shape)}")
        if found.dtype(name) not in FLOATS:
            raise EulerError(f"{found.folder}: {found.names[name]} has the type "
                             f"{found.dtype(name)}, which is none of {', '.join(FLOATS)}")


def _check_tied(found: _Found, embedding: str) -> None:
    same_type = found.dtype(HEAD) == found.dtype(embedding)
    if not same_type or found.shape(HEAD) != found.shape(embedding) or (
            found.read(HEAD).tobytes() != found.read(embedding).tobytes()):
        raise EulerError(f"{found.folder}: {HEAD} differs from {found.names[embedding]}, but "
                         f"{CONFIG} ties them (tie_word_embeddings): one of the two is wrong")


def _constant(found: _Found, name: str, config: ModelConfig) -> list[float] | None:
    """The values of a constant that says nothing new; None for a causal mask."""
    shape, size = found.shape(name), config.context
    if found.dtype(name) not in FOLDER_TYPES:
        raise EulerError(f"{found.folder}: {found.names[name]} has the type {found.dtype(name)}")
    if is_causal_mask(name):
        if shape != (1, 1, size, size) or not (
                found.read(name)[0, 0] == np.tri(size, dtype=bool)).all():
            raise EulerError(f"{found.folder}: {found.names[name]} is not the causal mask of "
                             f"{size} positions")
        return None
    if name.endswith(".masked_bias"):
        if shape != () or not found.read(name) <= -1e4:
            raise EulerError(f"{found.folder}: {found.names[name]} is no large negative number")
        return [float(found.read(name))]
    # Files of the time that kept frequencies scaled positions instead.
    expected = rotary_frequencies(replace(config, rope_scaling=None))
    if shape != expected.shape or not np.allclose(
            found.read(name).astype(np.float64), expected, rtol=1e-2, atol=0):
        raise EulerError(f"{found.folder}: {found.names[name]} has other frequencies than those of "
                         f"rope_theta {config.rope_base:g}")
    return [float(value) for value in found.read(name)]


def _read_parameters(config: ModelConfig, found: _Found,
                     heads: _Found | None) -> dict[str, np.ndarray]:
    """Our parameters, each file tensor converted on its way to its place."""
    sources = [(view, found) for view in tensor_views(config)]
    sources += [(view, heads) for view in further_heads(config)]
    wide = any(file.dtype(view.name) == "F64" for view, file in sources)
    dtype = np.float64 if wide else np.float32
    tensors = {p.name: np.empty(p.shape, dtype) for p in parameters(config)}
    for view, file in sources:
        view.of(tensors)[...] = file.read(view.name)
    return tensors


def _read_tokenizer(folder: Path, given: Path | str | None,
                    config: ModelConfig) -> tuple[str, Vocabulary]:
    """The text of the tokenizer's file, which has been checked to go with the model, and what it
    says."""
    path = folder / TOKENIZER if given is None else Path(given).resolve()
    if given is None and not os.path.lexists(path):
        raise EulerError(f"{path} is missing: give the model's tokenizer.json with --tokenizer")
    max_bytes = min(MAX_JSON_BYTES + _MAX_BYTES_PER_TOKEN * config.vocabulary, _MAX_TOKENIZER_BYTES)
    text = read_text(path.parent, path.name, max_bytes)
    with error_context(f"tokenizer {path}"):
        return text, parse_tokenizer(text, config).vocabulary


def _tensor_files(folder: Path) -> list[str]:
    """Names of the files with the model's tensors: one, or those of an index."""
    if os.path.lexists(folder / TENSORS):
        return [TENSORS]
    if not os.path.lexists(folder / INDEX):
        others = sorted(p.name for p in folder.glob("*.bin"))
        hint = f" ({others[0]} is a pickle, which is never read)" if others else ""
        raise EulerError(f"{folder} has neither {TENSORS} nor {INDEX}{hint}")
    index = read_json(folder, INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(
            isinstance(name, str) for name in weight_map.values()):
        raise EulerError(f"{folder / INDEX} has no weight_map of tensors and their files")
    counts = Counter()
    for name in sorted(set(weight_map.values())):
        with open_tensors(folder, name) as file:
            counts.update((tensor, name) for tensor in file.keys())
    wrong = sorted(tensor for tensor, _ in counts.keys() ^ set(weight_map.items()))
    if wrong:
        raise EulerError(f"{folder / INDEX} and the files that it names do not agree on "
                         f"{listed(wrong)}")
    return sorted(set(weight_map.values()))
