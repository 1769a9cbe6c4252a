"""Checkpoints: everything a run needs to go on as if it had never stopped.

    RUN/checkpoints/step-000040/
        model.safetensors      parameters
        optimizer.safetensors  moments
        tokenizer.json
        state.json             step, data position, schedule, random state, configuration; the
                               format's version; size and checksum of the other files, and its own

A checkpoint is written in `checkpoints/.writing` and renamed into place when it is complete, so a
directory named `step-...` is whole, whatever killed the process. When a newer checkpoint makes
one superfluous it becomes the next `.writing` and is overwritten: that is what makes a save cheap
(see tensorfile.py), at the price of the disk space of one checkpoint more.

A killed process loses nothing that was written; a power failure might. So the files are forced to
the disk (fsync, some ten times as slow as the rest) at the first save, at the last, and at most
every SYNC_SECONDS between, and the newest checkpoint treated so is kept besides the newest ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from euler_ir.errors import EulerError, error_context, shown
from model.config import ModelConfig
from model.json_values import check_keys, field, whole_number
from model.parameters import check_layers, parameters
from model.tokenizer import Tokenizer
from runtime.storage.files import read_error, write_error
from runtime.storage.run_directory import CHECKPOINTS, CONFIG
from runtime.storage.tensorfile import (
    FLOATS,
    FileRecord,
    read_tensors,
    read_text,
    write_tensors,
    write_text,
)

FORMAT_VERSION = 1
SYNC_SECONDS = 10.0
#: How often a reader looks for the newest checkpoint while a run retires those that it has found.
_LOOKS = 10
_STEP_NAME = re.compile(r"step-(\d{6,})")
_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_TOKENIZER, _STATE = "tokenizer.json", "state.json"


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
        return error_context(self.path / _STATE)

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
        with error_context(self.path / _TOKENIZER):
            tokenizer = Tokenizer.from_json(self.tokenizer_json)
            if tokenizer.vocabulary_size > config.vocabulary:
                raise EulerError(f"the tokenizer has ids up to {tokenizer.vocabulary_size - 1}, "
                                 f"the model's vocabulary is {config.vocabulary}")
        return tokenizer

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
        _check_shapes(self.path / _MODEL, self.tensors, expected, "model")
        for name, array in self.tensors.items():
            if array.dtype not in FLOATS.values():
                raise EulerError(f"{self.path / _MODEL}: {name} has the type {array.dtype}, which "
                                 "is no type of parameters")

    def check_moments(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise EulerError unless the moments are those of an optimizer with these shapes."""
        _check_shapes(self.path / _OPTIMIZER, self.moments, expected, "optimizer")


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


class CheckpointWriter:
    """Saves the checkpoints of one run; holds the directory so that no second run writes there.

    `step` is where the run starts from: checkpoints past it belong to a future that was given up
    by resuming before it, and are removed, as are the leftovers of a killed save. `keep` newest
    checkpoints stay. Raises EulerError when another process is training in `run_dir`.
    """

    def __init__(self, run_dir: Path | str, *, step: int = 0, keep: int = 2):
        self._directory = Path(run_dir) / CHECKPOINTS
        self._work = self._directory / ".writing"
        self._keep = keep
        self._last: Path | None = None
        self._synced: Path | None = None
        self._next_sync = 0.0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory, os.O_RDONLY)
        except OSError as error:
            raise write_error(error, self._directory) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise EulerError(f"another process is training in {run_dir}") from None
        for entry in self._directory.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)
        for path in _checkpoints(self._directory):
            if _step(path) > step:
                self._remove(path)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was kept for reuse and let go of the directory."""
        shutil.rmtree(self._work, ignore_errors=True)
        os.close(self._lock)

    def save(
        self,
        tensors: Mapping[str, np.ndarray],
        moments: Mapping[str, np.ndarray],
        state: Mapping,
        tokenizer_json: str,
        *,
        final: bool = False,
    ) -> Path:
        """Save the run as it is after `state["step"]` steps; the path of the checkpoint.

        When this returns, the checkpoint is whole and survives the process; with `final`, a power
        failure too. Saving a step again that this writer has saved last changes nothing. Raises
        EulerError when the system refuses the write: older checkpoints stay, nothing half-written
        does.
        """
        target = self._directory / f"step-{state['step']:06d}"
        sync = final or time.monotonic() >= self._next_sync
        try:
            if target != self._last:
                self._work.mkdir(exist_ok=True)
                _write_files(self._work, tensors, moments, state, tokenizer_json)
                if target.exists():
                    self._remove(target)
                if sync:
                    _sync_files(self._work)
                os.rename(self._work, target)
                self._last = target
            elif sync:
                _sync_files(target)
            if sync:
                _sync(self._directory)
                self._synced = target
                self._next_sync = time.monotonic() + SYNC_SECONDS
        except BaseException as error:
            shutil.rmtree(self._work, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(error, target) from error
            raise
        self._retire()
        return target

    def _retire(self) -> None:
        """Drop the checkpoints that are no longer wanted, the first of them for reuse."""
        for path in _checkpoints(self._directory)[: -self._keep]:
            if path == self._synced:
                continue
            if self._work.exists():
                self._remove(path)
            else:
                os.rename(path, self._work)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint; it stops being one before its first file is gone."""
        grave = self._directory / ".removed"
        shutil.rmtree(grave, ignore_errors=True)
        os.rename(path, grave)
        shutil.rmtree(grave, ignore_errors=True)


def load_checkpoint(path: Path | str, *, with_moments: bool = True) -> Checkpoint | None:
    """Load a checkpoint directory, or the newest whole one of a run directory.

    None when the run has no checkpoint yet. In a run, a broken checkpoint is passed over for the
    one before it, and `notes` says so. Without `with_moments` the optimizer's file is not read.
    Raises EulerError, naming the file, for what is missing, cut, damaged or of a newer format.
    """
    path = Path(path)
    if not path.is_dir():
        raise EulerError(f"checkpoint {path} does not exist or is no directory")
    if (path / _STATE).exists() or _STEP_NAME.fullmatch(path.name):
        return _load(path, with_moments, [])
    if not (path / CHECKPOINTS).is_dir():
        if (path / CONFIG).exists():
            if any(path.glob("*.safetensors*")):
                raise EulerError(f"{path} is a Hugging Face folder, no run: make one of it with "
                                 f"python -m runtime.convert --from {path} --out RUN")
            return None
        raise EulerError(
            f"{path} is neither a run directory (no checkpoints/ in it) nor a checkpoint "
            f"(no {_STATE})"
        )
    return _load_newest(path, with_moments, _LOOKS)


def _load_newest(path: Path, with_moments: bool, looks: int) -> Checkpoint | None:
    notes: list[str] = []
    for candidate in reversed(_checkpoints(path / CHECKPOINTS)):
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
    document = _read_state(path / _STATE)
    with error_context(path / _STATE):
        state = field(document, "state", dict)
        step = whole_number(state, "step")
        files = field(document, "files", dict)
        records = {name: _record(files, name) for name in (_MODEL, _OPTIMIZER, _TOKENIZER)}
    return Checkpoint(
        path=path,
        step=step,
        tensors=read_tensors(path / _MODEL, records[_MODEL]),
        moments=read_tensors(path / _OPTIMIZER, records[_OPTIMIZER]) if with_moments else {},
        state=state,
        tokenizer_json=read_text(path / _TOKENIZER, records[_TOKENIZER]),
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
    if zlib.crc32(_canonical(document)) != saved:
        raise EulerError(f"{file} is damaged: its checksum is not the one it was saved with")
    return document


def _write_files(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    moments: Mapping[str, np.ndarray],
    state: Mapping,
    tokenizer_json: str,
) -> None:
    records = {
        _MODEL: write_tensors(directory / _MODEL, tensors),
        _OPTIMIZER: write_tensors(directory / _OPTIMIZER, moments),
        _TOKENIZER: write_text(directory / _TOKENIZER, tokenizer_json),
    }
    files = {name: asdict(record) for name, record in records.items()}
    document = {"format_version": FORMAT_VERSION, "files": files, "state": dict(state)}
    document["checksum"] = zlib.crc32(_canonical(document))
    write_text(directory / _STATE, json.dumps(document, indent=1))


def _canonical(document: dict) -> bytes:
    """The one spelling of a JSON document that its checksum is taken over."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a run's directory, oldest first."""
    return sorted((p for p in directory.iterdir() if _STEP_NAME.fullmatch(p.name)), key=_step)


def _step(path: Path) -> int:
    return int(_STEP_NAME.fullmatch(path.name).group(1))


def _sync_files(directory: Path) -> None:
    for name in (_MODEL, _OPTIMIZER, _TOKENIZER, _STATE):
        _sync(directory / name)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
