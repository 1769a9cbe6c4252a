"""Writing checkpoints: whole or absent, and as cheap as overwriting a file.

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
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from euler_ir.errors import EulerError
from runtime.storage.checkpoint_format import (
    FORMAT_VERSION,
    MODEL,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    checkpoints,
    state_checksum,
    step_of,
)
from runtime.storage.files import write_error
from runtime.storage.run_directory import CHECKPOINTS
from runtime.storage.tensorfile import write_tensors, write_text

SYNC_SECONDS = 10.0


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
        for path in checkpoints(self._directory):
            if step_of(path) > step:
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
        for path in checkpoints(self._directory)[: -self._keep]:
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


def _write_files(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    moments: Mapping[str, np.ndarray],
    state: Mapping,
    tokenizer_json: str,
) -> None:
    records = {
        MODEL: write_tensors(directory / MODEL, tensors),
        OPTIMIZER: write_tensors(directory / OPTIMIZER, moments),
        TOKENIZER: write_text(directory / TOKENIZER, tokenizer_json),
    }
    files = {name: asdict(record) for name, record in records.items()}
    document = {"format_version": FORMAT_VERSION, "files": files, "state": dict(state)}
    document["checksum"] = state_checksum(document)
    write_text(directory / STATE, json.dumps(document, indent=1))


def _sync_files(directory: Path) -> None:
    for name in (MODEL, OPTIMIZER, TOKENIZER, STATE):
        _sync(directory / name)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
