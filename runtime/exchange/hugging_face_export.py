"""Hugging Face model folders, written: as they were by the record of an import, or in today's
form."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from euler_ir.errors import EulerError
from model.config import ModelConfig
from model.hugging_face_config import write_config
from model.interchange import EMBEDDINGS, HEAD, architecture, further_heads, tensor_views
from model.tokenizer import Tokenizer
from runtime.exchange.boundaries import boundaries
from runtime.exchange.hugging_face_format import (
    CONFIG,
    FURTHER_HEADS,
    TENSORS,
    TOKENIZER,
    canonical_name,
)
from runtime.storage.files import replacing
from runtime.storage.tensorfile import TYPE_NAMES, TYPES, converted


def write_folder(out: Path | str, config: ModelConfig, tensors: Mapping[str, np.ndarray],
                 tokenizer: Tokenizer, tokenizer_json: str,
                 record: Mapping[str, Any] | None = None, dtype: str | None = None) -> None:
    """Write a model, of parameters by our names, to a new folder, with its tokenizer's text.

    With the `record` of an import, names, types and files are those of the import. Without, they
    are what transformers writes today. A `dtype` (F32, F16, BF16) is that of all parameters.
    Raises EulerError for a model that has no such form, and for a folder that holds something."""
    arrays = dict(_model_tensors(config, tensors, record, dtype))
    heads = dict(_further_heads(config, tensors, record, dtype))
    texts = _texts(config, tokenizer, record, dtype or _common_type(arrays))
    texts[TOKENIZER] = tokenizer_json
    with new_folder(Path(out)) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        _save(arrays, folder / TENSORS)
        if heads:
            _save(heads, folder / FURTHER_HEADS)


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file. Raises OSError."""
    try:
        # Readers refuse a file that does not say which framework's layouts it follows.
        safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))  # all there is of the system's answer
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write to, which takes its place when all went well."""
    if out.is_dir() and any(out.iterdir()) or out.exists() and not out.is_dir():
        raise EulerError(f"{out} exists already: name a new folder")
    with replacing(out) as beside:
        beside.mkdir(parents=True)
        yield beside


def _model_tensors(config: ModelConfig, tensors: Mapping[str, np.ndarray],
                   record: Mapping[str, Any] | None,
                   dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    by_name = {view.name: view for view in tensor_views(config)}
    hf_class = architecture(config)
    if config.tied_head:  # some files have the one matrix twice
        by_name[HEAD] = by_name[EMBEDDINGS[hf_class]]
    if record is None:
        types = {view.name: TYPE_NAMES[tensors[view.parameter].dtype]
                 for view in tensor_views(config)}
        constants = {}
    else:
        types, constants = record["tensors"], record["constants"]
    for name, own_type in types.items():
        canonical = canonical_name(name, hf_class)
        if name in constants:
            yield name, _constant(config, constants[name], own_type)
        else:
            array = by_name[canonical].of(tensors)
            yield name, converted(name, array, TYPES[dtype or own_type])


def _further_heads(config: ModelConfig, tensors: Mapping[str, np.ndarray],
                   record: Mapping[str, Any] | None,
                   dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    types = record["further_heads"] if record else {}
    for view in further_heads(config):
        array = view.of(tensors)
        own_type = types.get(view.name, TYPE_NAMES[array.dtype])
        yield view.name, converted(view.name, array, TYPES[dtype or own_type])


def _constant(config: ModelConfig, values: list[float] | None, dtype: str) -> np.ndarray:
    """A constant by its record: a causal mask, a number, or frequencies."""
    if values is None:
        return np.tri(config.context, dtype=bool)[None, None].astype(TYPES[dtype])
    array = np.array(values, TYPES[dtype])
    return array.reshape(()) if len(values) == 1 else array


def _common_type(arrays: Mapping[str, np.ndarray]) -> str:
    return TYPE_NAMES[max((array.dtype for array in arrays.values()), key=lambda d: d.itemsize)]


def _texts(config: ModelConfig, tokenizer: Tokenizer, record: Mapping[str, Any] | None,
           dtype: str) -> dict[str, str]:
    """Contents of `config.json` and of the smaller JSON files, by name."""
    numpy_name = TYPES[dtype].name
    if record is not None:
        document = dict(record["config"])
        for key in {"dtype", "torch_dtype"} & set(document):
            document[key] = numpy_name
        others = record["files"]
    else:
        vocabulary = tokenizer.vocabulary
        texts = boundaries(vocabulary)
        begin, end = texts.begin, texts.ends[0] if texts.ends else None
        document = write_config(config, numpy_name, begin, end)
        names = {id: token.decode() for id, token in vocabulary.token_bytes.items()
                 if id in (begin, end)}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": config.context, "clean_up_tokenization_spaces": False,
                    "bos_token": names.get(begin), "eos_token": names.get(end)}
        others = {"tokenizer_config.json": _json(settings)}
    return {CONFIG: _json(document), **others}


def _json(document: Mapping[str, Any]) -> str:
    # In ASCII: a string that was escaped, as half of a surrogate pair must be, stays so.
    return json.dumps(document, indent=2) + "\n"
