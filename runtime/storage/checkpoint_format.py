"""Checkpoints: everything a run needs to go on as if it had never stopped.

    RUN/checkpoints/step-000040/
        model.safetensors      parameters
        optimizer.safetensors  moments
        tokenizer.json
        state.json             step, data position, schedule, random state, configuration; the
                               format's version; size and checksum of the other files, and its own

What writing (checkpoint_writer.py) and reading (checkpoint.py) them agree on.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
TOKENIZER, STATE = "tokenizer.json", "state.json"
STEP_NAME = re.compile(r"step-(\d{6,})")


def state_checksum(document: Mapping[str, Any]) -> int:
    """CRC-32 of the one spelling of a JSON document that is state.json's, without its checksum."""
    return zlib.crc32(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a run's directory, oldest first."""
    return sorted((p for p in directory.iterdir() if STEP_NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(STEP_NAME.fullmatch(path.name).group(1))
