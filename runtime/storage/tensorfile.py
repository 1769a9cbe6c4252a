"""Writing and reading one safetensors file, with a checksum that costs next to nothing.

Checkpoints are frequent (every 10 steps by default), so two things matter that a plain
`safetensors.numpy.save_file` does not give. Fresh pages are dear: filling a new file costs some ten
times what overwriting an old one does, and so does every copy into fresh memory. So tensors go
from where they lie straight into the file, and an existing file is overwritten in place (the
caller makes sure that nobody needs it). And CRC-32 over everything would take twice as long as the
writing, hence sums of 64-bit words, and the CRC over those and the header.

The format is safetensors': the header's length (8 bytes), a JSON header of names, types, shapes and
offsets, then the tensors' bytes. (https://github.com/huggingface/safetensors)
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from euler_ir.errors import EulerError, shown
from runtime.storage.files import decoded, read_error

#: Element types by safetensors' names, all and those of parameters.
TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FLOATS = {name: TYPES[name] for name in ("F64", "F32", "F16", "BF16")}
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
_MAX_AXES, _MAX_AXIS_LENGTH = 16, 1 << 48
_BLOCK = 4096  # bytes; a file system writes, and loses, whole blocks


@dataclass(frozen=True)
class FileRecord:
    """What a whole file must be: its size in bytes and its checksum (`write_text`: CRC-32 of the
    bytes; `write_tensors`: CRC-32 of the header and of each tensor's block sums)."""

    bytes: int
    checksum: int


def converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in this type, in row-major order. EulerError where a number does not fit."""
    with np.errstate(over="ignore"):
        result = np.asarray(array, dtype, order="C")
    if np.isinf(result).any() and not np.isinf(array).any():
        raise EulerError(f"{name} has numbers that do not fit {TYPE_NAMES[dtype]}: take another "
                         "type")
    return result


def write_text(path: Path, text: str) -> FileRecord:
    """Write a text file over what `path` holds, if anything. Raises OSError."""
    content = text.encode()
    with _open_over(path) as file:
        _write(file, memoryview(content))
        file.truncate()
    return FileRecord(len(content), zlib.crc32(content))


def read_text(path: Path, record: FileRecord) -> str:
    """The text written by `write_text`; EulerError when the file is not whole."""
    content = _read(path, record)
    if zlib.crc32(content) != record.checksum:
        raise _damaged(path)
    return decoded(content, path)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> FileRecord:
    """Write a safetensors file over what `path` holds, if anything. Raises OSError."""
    # Widest elements first, so that each tensor is aligned to its own element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in names:
        array = tensors[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": TYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    crc = zlib.crc32(head)
    with _open_over(path) as file:
        _write(file, memoryview(head))
        for name in names:
            data = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8)
            crc = zlib.crc32(_block_sums(data), crc)
            _write(file, memoryview(data))
        file.truncate()
    return FileRecord(len(head) + end, crc)


def read_tensors(path: Path, record: FileRecord) -> dict[str, np.ndarray]:
    """The tensors written by `write_tensors`; EulerError when the file is not whole.

    A checksum is no seal: whoever forges a file forges its sum too. So the header is checked."""
    content = _read(path, record)
    header, data_start = _header(content)
    if header is None:
        raise EulerError(f"{path} is damaged: it has no header of a safetensors file")
    crc = zlib.crc32(content[:data_start])
    bytes_of_all = np.frombuffer(content, np.uint8)[data_start:]
    tensors = {}
    for name, entry in header.items():
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [begin, end]} if (
                    _is_sound(kind, shape, begin, end, bytes_of_all.size)):
                data = bytes_of_all[begin:end]
            case _:
                raise EulerError(f"{path} is damaged: its header says of {shown(name)} "
                                 f"{shown(entry)}")
        crc = zlib.crc32(_block_sums(data), crc)
        tensors[name] = data.view(TYPES[kind]).reshape(shape)
    if crc != record.checksum:
        raise _damaged(path)
    return tensors


def _header(content: bytes) -> tuple[dict | None, int]:
    """A file's header, None where there is none, and where the tensors' bytes begin."""
    if len(content) < 8:
        return None, 0
    data_start = 8 + struct.unpack_from("<Q", content)[0]
    try:
        header = json.loads(content[8:data_start])
    except (ValueError, RecursionError):
        return None, data_start
    return header if isinstance(header, dict) else None, data_start


def _is_sound(kind: str, shape: list, begin: object, end: object, size: int) -> bool:
    """Whether a tensor of this type and shape lies at these offsets of so many bytes. (An axis of
    length 0 makes any other ones fit; numpy takes no longer ones than these.)"""
    return (kind in TYPES and len(shape) <= _MAX_AXES
            and all(type(n) is int and 0 <= n < _MAX_AXIS_LENGTH for n in shape)
            and math.prod(max(n, 1) for n in shape) < _MAX_AXIS_LENGTH
            and type(begin) is int and type(end) is int and 0 <= begin <= end <= size
            and end - begin == math.prod(shape) * TYPES[kind].itemsize)


def _block_sums(data: np.ndarray) -> bytes:
    """16 bytes that tell `data` (uint8) from an accidentally changed copy, at memory speed.

    With s_i the sum of the 64-bit words in block i (the end padded with zeros): the sum of s_i and
    that of (i + 1) s_i, modulo 2**64, after Fletcher (IEEE Trans. Comm. 30(1), 1982). Any one
    wrong word changes the first, blocks lost or swapped the second.
    """
    whole = data.size // _BLOCK * _BLOCK
    sums = np.add.reduce(data[:whole].view("<u8").reshape(-1, _BLOCK // 8), axis=1)
    if whole < data.size:
        tail = np.zeros(_BLOCK, np.uint8)
        tail[: data.size - whole] = data[whole:]
        sums = np.append(sums, np.add.reduce(tail.view("<u8")))
    weights = np.arange(1, sums.size + 1, dtype=np.uint64)
    return struct.pack("<QQ", np.add.reduce(sums), sums @ weights)


def _open_over(path: Path) -> BinaryIO:
    """Open for writing from the start without giving up the pages that the file has."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0)


def _write(file: BinaryIO, left: memoryview) -> None:
    while left:  # one call takes at most 2 GiB
        left = left[file.write(left) :]


def _read(path: Path, record: FileRecord) -> bytes:
    try:
        found = path.stat()  # before it is opened: a pipe would wait for whoever writes to it
        if not stat.S_ISREG(found.st_mode):
            raise EulerError(f"{path} is not a regular file")
        if found.st_size != record.bytes:
            raise EulerError(f"{path} has {found.st_size} bytes, it was saved with {record.bytes}")
        return path.read_bytes()
    except FileNotFoundError:
        raise EulerError(f"{path} is missing") from None
    except OSError as error:
        raise read_error(error, path) from error


def _damaged(path: Path) -> EulerError:
    return EulerError(f"{path} is damaged: its checksum is not the one it was saved with")
