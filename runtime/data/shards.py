"""Token shards: files of token ids with a fixed header, as llm.c writes them, so that existing
GPT-2 FineWeb shards load as they are.

A shard is 256 little-endian int32 (magic, version, token count, zeros), then the ids:

| magic    | version | ids    | who writes it                                   |
|----------|---------|--------|-------------------------------------------------|
| 20240520 | 1       | uint16 | llm.c for GPT-2, and this module                |
| 20240520 | 2       | uint32 | this module, for vocabularies over 65536        |
| 20240801 | 7       | uint32 | llm.c for Llama 3; read only                    |

The width follows from the vocabulary alone, so a shard whose width does not fit the tokenizer was
made for another one, and ids over 65535 may have been wrapped by whoever wrote it: an error.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from euler_ir.errors import EulerError
from runtime.storage.files import read_error, replacing

MAGIC = 20240520
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
ID_TYPES = {
    (MAGIC, 1): np.dtype("<u2"),
    (MAGIC, 2): np.dtype("<u4"),
    (20240801, 7): np.dtype("<u4"),
}


def id_type(vocabulary_size: int) -> np.dtype:
    """The integer type that ids below `vocabulary_size` are stored in."""
    return ID_TYPES[MAGIC, 1 if vocabulary_size <= 1 << 16 else 2]


def write_shard(path: Path | str, tokens: np.ndarray, vocabulary_size: int) -> None:
    """Write `tokens` (integers [N]) as one shard, whole or not at all.

    Raises EulerError for an id outside the vocabulary, with its position, and for a refused write.
    """
    path, tokens = Path(path), np.asarray(tokens)
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary_size))
    if outside.size:
        raise out_of_range(str(path), int(outside[0]), int(tokens[outside[0]]), vocabulary_size)
    if not 0 < tokens.size < 1 << 31:
        raise EulerError(f"{path}: a shard holds 1 to 2147483647 tokens, got {tokens.size}")
    header = np.zeros(HEADER_INTS, "<i4")
    dtype = id_type(vocabulary_size)
    header[:3] = MAGIC, 1 if dtype.itemsize == 2 else 2, tokens.size
    with replacing(path) as beside, beside.open("wb") as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens, dtype).data)


def read_shard(path: Path | str, vocabulary_size: int) -> np.ndarray:
    """The ids of a shard, [N] uint16 or uint32, mapped from the file rather than read into memory.

    Raises EulerError, naming the shard, for a file that is no shard, whose size differs from its
    header, or whose width does not fit the vocabulary. Ids are checked when they are used: a scan
    of all of them here would read the whole data set before the first step.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), np.uint8)
    except OSError as error:
        raise read_error(error, path) from error
    if header.size < HEADER_BYTES:
        raise EulerError(f"{path}: {size} bytes is no token shard, its header alone takes 1024")
    magic, version, count = (int(number) for number in header.view("<i4")[:3])
    dtype = ID_TYPES.get((magic, version))
    if dtype is None:
        raise EulerError(
            f"{path}: no token shard this program reads (magic {magic}, version {version}; "
            f"known: {', '.join(f'{m} version {v}' for m, v in ID_TYPES)})"
        )
    expected = HEADER_BYTES + count * dtype.itemsize
    if count < 1 or size != expected:
        raise EulerError(
            f"{path}: the header promises {count} tokens of {dtype.itemsize} bytes, "
            f"{expected} bytes in all, the file has {size}"
        )
    wanted = id_type(vocabulary_size)
    if dtype != wanted:
        raise EulerError(
            f"{path}: holds {8 * dtype.itemsize}-bit ids, but a vocabulary of {vocabulary_size} is "
            f"stored in {8 * wanted.itemsize}-bit ids: the shard was made with another tokenizer"
        )
    return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(count,))


def out_of_range(name: str, position: int, token: int, vocabulary_size: int) -> EulerError:
    """The user error for an id that the vocabulary does not have."""
    return EulerError(
        f"{name}: token {position} has id {token}, the vocabulary ends at {vocabulary_size - 1}"
    )
