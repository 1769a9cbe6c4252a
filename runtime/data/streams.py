"""Text files and token shards become a stream of tokens.

- **Documents.** A file is one document, a shard too (its own end-of-text tokens separate what is
  inside). Attention stays inside a document, and a document's last token has no target. Where the
  tokenizer has special tokens around a whole text, as Llama 3's, each text file is encoded with
  them, so that training sees texts as generation begins them; a shard is taken as it is.
- **Held-out part.** The last tenth of the tokens; or, where the data has shards named `*_val_*`
  as FineWeb's are, those shards and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from euler_ir.errors import EulerError
from runtime.data.shards import out_of_range, read_shard
from runtime.storage.files import read_error

DEFAULT_TEXT = Path(__file__).parents[1] / "assets" / "tinyshakespeare.txt"
HELD_OUT = 10  # one part in this many is held out for validation


class Tokenizer(Protocol):
    """What the loader asks of a tokenizer."""

    vocabulary_size: int

    def encode_document(self, text: str) -> Sequence[int]: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


@dataclass(frozen=True)
class Text:
    """A text document and the file it came from."""

    name: str
    text: str


@dataclass(frozen=True)
class Document:
    """A run of tokens that attention does not leave: `tokens` is [N], integers of any width, and
    `offset` the place of its first token in the file `name`, for messages."""

    name: str
    tokens: np.ndarray
    offset: int = 0


# Files


def find_files(paths: Sequence[Path | str]) -> list[Path]:
    """The data files that `paths` name: files as given, and each directory's `.txt` and `.bin`
    files at any depth, ordered by path. Raises EulerError for what is missing or holds none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*")
                            if p.suffix in (".txt", ".bin") and p.is_file())
            if not inside:
                raise EulerError(f"data directory {path} holds no .txt or .bin file")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise EulerError(f"data file {path} does not exist")
    if not found:
        raise EulerError("no data file was given")
    return found


def load_text(paths: Sequence[Path | str]) -> list[Text]:
    """The text documents under `paths`; shards are passed over.

    The bytes are decoded as they are: line ends and a byte order mark stay part of the text.
    Raises EulerError for a file that is missing, empty or not UTF-8 (with the byte's offset).
    """
    return [_read_text(path) for path in find_files(paths) if path.suffix != ".bin"]


def _read_text(path: Path) -> Text:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise read_error(error, path) from error
    if not content:
        raise EulerError(f"data file {path} is empty")
    try:
        return Text(str(path), content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise EulerError(
            f"data file {path} is not UTF-8: byte 0x{content[error.start]:02x} at offset "
            f"{error.start} ({error.reason})"
        ) from error


def load_stream(paths: Sequence[Path | str], tokenizer: Tokenizer) -> TokenStream:
    """Everything under `paths` as tokens: texts are encoded, shards are mapped."""
    size = tokenizer.vocabulary_size
    documents = []
    for path in find_files(paths):
        if path.suffix == ".bin":
            documents.append(Document(str(path), read_shard(path, size)))
        else:
            documents.append(encode(_read_text(path), tokenizer))
    return TokenStream(documents, size)


def encode(text: Text, tokenizer: Tokenizer) -> Document:
    """One text document as tokens."""
    return Document(text.name, np.asarray(tokenizer.encode_document(text.text), np.int32))


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """The number of bytes of text each token stands for, int64 [vocabulary size]: 0 for a special
    token, which stands between texts, and for an id that the vocabulary leaves out."""
    lengths = np.zeros(tokenizer.vocabulary_size, np.int64)
    special = set(tokenizer.special_tokens.values())
    for token in set(range(tokenizer.vocabulary_size)) - special:
        try:
            lengths[token] = len(tokenizer.decode_bytes([token]))
        except EulerError:  # a gap: no such token, so none in the data
            continue
    return lengths


# Streams


class TokenStream:
    """Documents laid end to end: N tokens at positions 0 to N - 1.

    `starts` (int64 [documents + 1]) holds each document's first position, and N.
    """

    def __init__(self, documents: Sequence[Document], vocabulary_size: int):
        self.documents = [document for document in documents if len(document.tokens)]
        self.vocabulary_size = vocabulary_size
        lengths = [len(document.tokens) for document in self.documents]
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        """The index of the document that holds each position."""
        return np.searchsorted(self.starts[1:-1], positions, side="right")

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int32, fewer where the stream ends.

        Raises EulerError for an id outside the vocabulary, with the file and the place in it:
        this is the last look before the ids index the embedding.
        """
        stop = min(start + length, len(self))
        parts, begin = [], start
        index = int(self.document_of(np.int64(start)))
        while begin < stop:
            first = int(self.starts[index])
            end = min(stop, int(self.starts[index + 1]))
            parts.append(self.documents[index].tokens[begin - first : end - first])
            begin, index = end, index + 1
        tokens = np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, np.int32)
        # As unsigned numbers, ids below zero are above any vocabulary too.
        outside = tokens.view(np.uint32) >= self.vocabulary_size
        if outside.any():
            self._refuse(start + int(outside.argmax()))
        return tokens

    def _refuse(self, position: int) -> NoReturn:
        index = int(self.document_of(np.int64(position)))
        document = self.documents[index]
        inside = position - int(self.starts[index])
        token = int(document.tokens[inside])
        raise out_of_range(document.name, document.offset + inside, token, self.vocabulary_size)

    def slice(self, start: int, stop: int) -> TokenStream:
        """The stream of positions [start, stop), sharing this one's memory."""
        documents = []
        for document, first in zip(self.documents, self.starts, strict=False):
            a = max(start - int(first), 0)
            b = min(stop - int(first), len(document.tokens))
            if a < b:
                part = document.tokens[a:b]
                documents.append(Document(document.name, part, document.offset + a))
        return TokenStream(documents, self.vocabulary_size)

    def split(self) -> tuple[TokenStream, TokenStream]:
        """The part to train on and the held-out part (see the module's rules)."""
        held_out = [document for document in self.documents if _is_validation_shard(document.name)]
        if held_out:
            rest = [d for d in self.documents if not _is_validation_shard(d.name)]
            return (
                TokenStream(rest, self.vocabulary_size),
                TokenStream(held_out, self.vocabulary_size),
            )
        cut = len(self) - len(self) // HELD_OUT
        return self.slice(0, cut), self.slice(cut, len(self))

    @cached_property
    def fingerprint(self) -> str:
        """Length and a checksum of the two ends: tells other data apart without reading it all."""
        ends = self.read(0, 4096), self.read(max(len(self) - 4096, 0), 4096)
        return f"{len(self)}-{zlib.crc32(np.concatenate(ends).astype('<i4').tobytes()):08x}"


def _is_validation_shard(name: str) -> bool:
    path = Path(name)
    return path.suffix == ".bin" and "_val_" in path.name
