"""The import record in a checkpoint of an imported model, checked before it is used.

It says what an export writes: names and types of tensors, the configuration, names and texts of
files. A checkpoint may come from anyone, so it must be what an import of its model would have made
(runtime/exchange/hugging_face_import.py makes it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from euler_ir.errors import EulerError, shown
from model.config import ModelConfig
from model.hugging_face_config import read_config
from model.interchange import HEAD, architecture, tensor_views
from model.json_values import field, is_number
from runtime.exchange.hugging_face_format import (
    FOLDER_TYPES,
    KEPT,
    canonical_name,
    is_causal_mask,
    is_constant,
    listed,
)
from runtime.storage.checkpoint import Checkpoint
from runtime.storage.tensorfile import FLOATS


def import_record(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any] | None:
    """The record of a checkpoint with this model, None for one that was not imported.

    Raises EulerError naming the file and the key that is not as an import makes it."""
    if checkpoint.state.get("source") is None:
        return None
    with checkpoint.error_context():
        record = field(checkpoint.state, "source", dict)
        _check_config(record, config)
        _check_tensors(record, config)
        for name, text in field(record, "files", dict).items():
            if name not in KEPT or not isinstance(text, str):
                raise EulerError(f"files of the source are texts of {', '.join(KEPT)}, not "
                                 f"{shown(name)}")
    return record


def record_after_training(record: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The import record of a model that has been trained since: names, configuration and files stay
    the import's, parameters have the type in which they were trained."""
    types = {name: own if name in record["constants"] else dtype
             for name, own in record["tensors"].items()}
    return {**record, "tensors": types,
            "further_heads": dict.fromkeys(record["further_heads"], dtype)}


def _check_config(record: Mapping[str, Any], config: ModelConfig) -> None:
    imported = read_config(field(record, "config", dict))
    imported = replace(imported, kind=config.kind, prediction_heads=config.prediction_heads)
    if field(record, "architecture", str) != architecture(config) or imported != config:
        raise EulerError("architecture and config of the source are not those of the model")


def _check_tensors(record: Mapping[str, Any], config: ModelConfig) -> None:
    hf_class = architecture(config)
    types, constants = field(record, "tensors", dict), field(record, "constants", dict)
    _check_types(types, FOLDER_TYPES)
    _check_types(field(record, "further_heads", dict), FLOATS)
    wanted = {view.name for view in tensor_views(config)}
    optional = {HEAD} if config.tied_head else set()
    names = {name: canonical_name(name, hf_class) for name in types}
    unknown = [name for name, canonical in names.items()
               if name not in constants and canonical not in wanted | optional]
    missing = sorted(wanted - set(names.values()))
    for kind, wrong in (("unknown", unknown), ("missing", missing)):
        if wrong:
            raise EulerError(f"tensors of the source: {kind} {listed(wrong)}")
    for name, values in constants.items():
        canonical = names.get(name, "")
        sound = values is None if is_causal_mask(canonical) else (
            isinstance(values, list) and len(values) > 0 and all(map(is_number, values)))
        if not sound or not is_constant(canonical, hf_class):
            raise EulerError(f"constants of the source have {shown(name)}: {shown(values)}")


def _check_types(types: Mapping[str, Any], known: Mapping[str, np.dtype]) -> None:
    for name, own in types.items():
        if not isinstance(own, str) or own not in known:
            raise EulerError(f"{shown(name)} of the source has the type {shown(own)}, which is "
                             f"none of {', '.join(known)}")
