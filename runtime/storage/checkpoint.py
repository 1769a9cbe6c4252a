"""Reading checkpoints: the newest whole one of a run, or a given one.

Checksums tell a whole file from a damaged one, not from a forged one: `Checkpoint` checks what its
files hold where that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from euler_ir.errors import EulerError, error_context, shown
from model.config import ModelConfig
from model.json_values import check_keys, field, whole_number
from model.parameters import check_layers, parameters
from model.tokenizer import Tokenizer
from runtime.storage.checkpoint_format import (
    FORMAT_VERSION,
    MODEL,
    OPTIMIZER,
    STATE,
    STEP_NAME,
    TOKENIZER,
    checkpoints,
    state_checksum,
)
from runtime.storage.files import read_error
from runtime.storage.run_directory import CHECKPOINTS, CONFIG
from runtime.storage.tensorfile import FLOATS, FileRecord, read_tensors, read_text

#: How often a reader looks for the newest checkpoint while a run retires those that it has found.
_LOOKS = 10


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `notes` has a line for each newer one that was passed over as broken.

    Its files are whole, which does not say that a save of ours wrote them: what they hold is
    checked where it is asked for."""

    path: Path
    step: int
    tensors: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    state: dict
    tokenizer_json: str
    notes: list[str]

    def error_context(self) -> AbstractContextManager[None]:
        """Says of EulerErrors from inside that they are about the state."""
        return error_context(self.path / STATE)

    def model_config(self) -> ModelConfig:
        """The model's configuration; the tensors are those of such a model.

        Raises EulerError, naming the file, where they are not."""
        with self.error_context():
            config = ModelConfig.from_dict(field(self.state, "model", dict))
            check_layers(config, len(self.tensors))
        self.check_shapes({p.name: p.shape for p in parameters(config)})
        return config

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer; EulerError, naming the file, for one that does not go with the model."""
        with error_context(self.path / TOKENIZER):
            return parse_tokenizer(self.tokenizer_json, config)

    def settings(self) -> dict[str, Any]:
        """The settings of the run, among them at least `precision` and `context`; those of an
        import are no more."""
        with self.error_context():
            settings = field(self.state, "settings", dict)
            field(settings, "precision", str)
            whole_number(settings, "context", least=1)
        return settings

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise EulerError unless the parameters are those of a model with these shapes."""
        _check_shapes(self.path / MODEL, self.tensors, expected, "model")
        for name, array in self.tensors.items():
            if array.dtype not in FLOATS.values():
                raise EulerError(f"{self.path / MODEL}: {name} has the type {array.dtype}, which "
                                 "is no type of parameters")

    def check_moments(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise EulerError unless the moments are those of an optimizer with these shapes."""
        _check_shapes(self.path / OPTIMIZER, self.moments, expected, "optimizer")


def parse_tokenizer(text: str, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a tokenizer.json; EulerError for one that does not go with the model."""
    tokenizer = Tokenizer.from_json(text)
    if tokenizer.vocabulary_size > config.vocabulary:
        raise EulerError(f"the tokenizer has ids up to {tokenizer.vocabulary_size - 1}, the "
                         f"model's vocabulary is {config.vocabulary}")
    return tokenizer


def _check_shapes(file: Path, tensors: Mapping[str, np.ndarray],
                  expected: Mapping[str, tuple[int, ...]], user: str) -> None:
    for name, shape in expected.items():
        if name not in tensors:
            raise EulerError(f"{file} has no tensor {name}, which the {user} needs")
        found = tensors[name].shape
        if found != tuple(shape):
            raise EulerError(f"{file}: {name} has shape {list(found)}, not {list(shape)}")
    for name in tensors:
        if name not in expected:
            raise EulerError(f"{file} has a tensor {name}, which the {user} does not know")


def load_checkpoint(path: Path | str, *, with_moments: bool = True) -> Checkpoint | None:
    """Load a checkpoint directory, or the newest whole one of a run directory.

    None when the run has no checkpoint yet. In a run, a broken checkpoint is passed over for the
    one before it, and `notes` says so. Without `with_moments` the optimizer's file is not read.
    Raises EulerError, naming the file, for what is missing, cut, damaged or of a newer format.
    """
    path = Path(path)
    if not path.is_dir():
        raise EulerError(f"checkpoint {path} does not exist or is no directory")
    if (path / STATE).exists() or STEP_NAME.fullmatch(path.name):
        return _load(path, with_moments, [])
    if not (path / CHECKPOINTS).is_dir():
        if (path / CONFIG).exists():
            if any(path.glob("*.safetensors*")):
                raise EulerError(f"{path} is a Hugging Face folder, no run: make one of it with "
                                 f"python -m runtime.convert --from {path} --out RUN")
            return None
        raise EulerError(
            f"{path} is neither a run directory (no checkpoints/ in it) nor a checkpoint "
            f"(no {STATE})"
        )
    return _load_newest(path, with_moments, _LOOKS)


def _load_newest(path: Path, with_moments: bool, looks: int) -> Checkpoint | None:
    notes: list[str] = []
    for candidate in reversed(checkpoints(path / CHECKPOINTS)):
        try:
            return _load(candidate, with_moments, notes)
        except NewerFormatError:
            raise
        except EulerError as error:
            # A run that goes on retires checkpoints for newer ones: no damage.
            if looks > 1 and not candidate.exists():
                return _load_newest(path, with_moments, looks - 1)
            notes.append(str(error))
    if notes:
        raise EulerError(f"{path} has no whole checkpoint: {notes[0]}")
    return None


def load_model(path: Path | str) -> tuple[Checkpoint, ModelConfig]:
    """Load a checkpoint as `load_checkpoint` does, without moments, for its model's sake, and the
    model's configuration; the tensors are those of such a model.

    Raises EulerError for a run that has no checkpoint yet, too."""
    checkpoint = load_checkpoint(path, with_moments=False)
    if checkpoint is None:
        raise EulerError(f"{path} has no checkpoint yet")
    return checkpoint, checkpoint.model_config()


class NewerFormatError(EulerError):
    """A checkpoint of a format that this program is too old to read: not broken, so no older one
    may take its place."""


def _load(path: Path, with_moments: bool, notes: list[str]) -> Checkpoint:
    document = _read_state(path / STATE)
    with error_context(path / STATE):
        state = field(document, "state", dict)
        step = whole_number(state, "step")
        files = field(document, "files", dict)
        records = {name: _record(files, name) for name in (MODEL, OPTIMIZER, TOKENIZER)}
    return Checkpoint(
        path=path,
        step=step,
        tensors=read_tensors(path / MODEL, records[MODEL]),
        moments=read_tensors(path / OPTIMIZER, records[OPTIMIZER]) if with_moments else {},
        state=state,
        tokenizer_json=read_text(path / TOKENIZER, records[TOKENIZER]),
        notes=notes,
    )


def _record(files: Mapping[str, Any], name: str) -> FileRecord:
    values = field(files, name, dict)
    check_keys(name, values, FileRecord)
    return FileRecord(**{key: field(values, key, int) for key in values})


def _read_state(file: Path) -> dict:
    try:
        document = json.loads(file.read_bytes())
        version, saved = document["format_version"], document.pop("checksum")
    except FileNotFoundError:
        raise EulerError(f"{file} is missing") from None
    except OSError as error:
        raise read_error(error, file) from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise EulerError(f"{file} is cut or damaged: it is no checkpoint state") from None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{file} is of checkpoint format {shown(version)}, this program reads up to "
            f"{FORMAT_VERSION}: use a newer Euler"
        )
    if state_checksum(document) != saved:
        raise EulerError(f"{file} is damaged: its checksum is not the one it was saved with")
    return document
