"""Files of a folder that comes from anyone: only regular files in it, of bounded size.

Every size is checked before anything of that size is read or allocated. Tensors are read by the
safetensors package alone; nothing in the folder is ever run.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors

from euler_ir.errors import EulerError, cut, error_context
from model.json_values import parse_object
from runtime.storage.files import decoded, read_error

# The largest known are a tenth of these.
MAX_JSON_BYTES, MAX_HEADER_BYTES = 1 << 20, 1 << 20


@contextlib.contextmanager
def open_tensors(folder: Path, name: str) -> Iterator[safetensors.safe_open]:
    """A safetensors file of the folder, its header checked by the safetensors package."""
    path = path_inside(folder, name)
    try:
        with path.open("rb") as file:
            head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if size > MAX_HEADER_BYTES:
            raise EulerError(f"{path} is no sound safetensors file: a header of {size} bytes, the "
                             f"most is {MAX_HEADER_BYTES}")
        reader = safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise EulerError(f"{path} is no sound safetensors file: {cut(str(error))}") from None
    except OSError as error:
        raise read_error(error, path) from error
    with reader as file:
        yield file


def path_inside(folder: Path, name: str) -> Path:
    """The path of a regular file of the folder; EulerError for any other.

    A link may lead to another file of the folder or, in Hugging Face's cache, to where that keeps
    the contents of a snapshot's files."""
    path = folder / name
    if name != os.path.basename(name) or "\\" in name or name in ("", ".", "..") or "\0" in name:
        raise EulerError(f"{folder} names the file {name!r}, which is not one in that folder")
    try:
        home, resolved = folder.resolve(), path.resolve()
        homes = [home]
        if home.parent.name == "snapshots":
            homes.append(home.parent.parent / "blobs")
        if resolved.parent not in homes:
            raise EulerError(f"{path} is a link that leads out of the folder")
        if not stat.S_ISREG(resolved.stat().st_mode):
            raise EulerError(f"{path} is not a regular file")
    except FileNotFoundError:
        raise EulerError(f"{path} is missing") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise EulerError(f"cannot read {path} ({error})") from None
    return path


def read_text(folder: Path, name: str, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The text of a file of at most `max_bytes`; EulerError for any other."""
    path = path_inside(folder, name)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise read_error(error, path) from error
    if len(content) > max_bytes:
        raise EulerError(f"{path} is larger than {max_bytes} bytes")
    return decoded(content, path)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; EulerError where there is none."""
    text = read_text(folder, name)
    with error_context(folder / name):
        return parse_object(text)
