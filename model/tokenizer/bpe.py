"""Text to token ids and back, by a vocabulary's merges."""

import codecs
import contextlib
import heapq
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

from euler_ir.errors import EulerError
from model.tokenizer import tokenizer_json
from model.tokenizer.pretokenizer import piece_lists, well_formed
from model.tokenizer.vocabulary import Vocabulary


class Tokenizer:
    """Byte-level BPE over `vocabulary`; every text can be encoded and comes back unchanged.

    Attributes:
        vocabulary: the tokens and merges.
        vocabulary_size: rows an embedding needs, one more than the largest id.
        special_tokens: ids of the control tokens by their text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.vocabulary_size: int = vocabulary.size
        self.special_tokens: Mapping[str, int] = vocabulary.special_tokens
        self._token_bytes = vocabulary.token_bytes
        self._pieces = _PieceCache(vocabulary)

    def encode(self, text: str, allowed_special: Collection[str] = ()) -> list[int]:
        """The ids of `text` itself, which may be a part of a text.

        A special token comes out only if `allowed_special` names it; otherwise its text is
        ordinary text, so what a user types cannot forge one. Lone surrogates become U+FFFD.

        Raises:
            EulerError: if `allowed_special` names something else than special tokens.
        """
        whole_tokens = dict(self.vocabulary.added_tokens)
        for name in self._checked_special(allowed_special):
            whole_tokens[name] = self.special_tokens[name]
        text = well_formed(text)
        ids: list[int] = []
        if not whole_tokens:
            self._encode_ordinary(text, ids)
            return ids
        longest_first = sorted(whole_tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        for index, part in enumerate(parts):
            if index % 2:  # re.split puts what the group matched at the odd places
                ids.append(whole_tokens[part])
            else:
                self._encode_ordinary(part, ids)
        return ids

    def encode_document(self, text: str) -> list[int]:
        """The ids of a whole text, between those that the vocabulary has every text begin and end
        with (`Vocabulary.prefix` and `suffix`, which most tokenizers leave empty)."""
        return [*self.encode_prompt(text), *self.vocabulary.suffix]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text's beginning, which is to be gone on with: `encode_document`'s without
        the suffix."""
        return [*self.vocabulary.prefix, *self.encode(text)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of all tokens joined, exact even where they are no valid UTF-8.

        Raises:
            EulerError: for an id that is not in the vocabulary.
        """
        try:
            return b"".join([self._token_bytes[number] for number in ids])
        except KeyError as error:
            raise EulerError(
                f"{error.args[0]} is not a token id: the vocabulary's ids go from 0 to "
                f"{self.vocabulary_size - 1}"
                + (" with gaps" if len(self._token_bytes) < self.vocabulary_size else "")
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; each invalid or incomplete byte sequence becomes U+FFFD.

        Raises:
            EulerError: for an id that is not in the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def to_json(self) -> str:
        """This tokenizer as the text of a `tokenizer.json`, the same bytes each time."""
        return tokenizer_json.write(self.vocabulary)

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The tokenizer that a `tokenizer.json` describes.

        Raises:
            EulerError: for a text that is no such file, or asks for what we do not do.
        """
        return cls(tokenizer_json.read(text))

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to `path`, beside it first and then renamed into place.

        Raises:
            EulerError: if the file cannot be written.
        """
        path = Path(path)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(self.to_json(), encoding="utf-8", newline="\n")
            beside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise EulerError(f"cannot write tokenizer {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads what `save`, or the Hugging Face library, wrote.

        Raises:
            EulerError: if the file cannot be read, or for the reasons of `from_json`.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise EulerError(f"cannot read tokenizer {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EulerError(f"tokenizer {path} is not UTF-8 at byte {error.start}") from error
        except EulerError as error:
            raise EulerError(f"tokenizer {path}: {error}") from error

    def _encode_ordinary(self, text: str, ids: list[int]) -> None:
        for pieces in piece_lists(text, self.vocabulary.pattern):
            ids.extend(chain.from_iterable(map(self._pieces.__getitem__, pieces)))

    def _checked_special(self, allowed: Collection[str]) -> Collection[str]:
        if isinstance(allowed, str):
            raise EulerError(f"allowed_special is the string {allowed!r}; give a list of tokens")
        for name in allowed:
            if name not in self.special_tokens:
                known = ", ".join(self.special_tokens) or "none"
                raise EulerError(f"{name!r} is not a special token; this tokenizer has: {known}")
        return allowed


class StreamDecoder:
    """Decodes ids as they come: `push` gives the text that has become certain.

    A character whose bytes are still incomplete waits for the next id instead of showing as
    U+FFFD; all parts together, `finish` included, are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        """The text that token `number` completes, '' where it ends inside a character.

        Raises:
            EulerError: for an id that is not in the vocabulary.
        """
        return self._utf8.decode(self._tokenizer.decode_bytes([number]))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or ''."""
        return self._utf8.decode(b"", final=True)


class _PieceCache(dict[str, Sequence[int]]):
    """Ids by piece, worked out on first use: most of a text's pieces are repetitions."""

    # Natural text has a few hundred thousand different pieces; what goes on forever is dropped.
    MAX_PIECES = 1 << 19
    # Long pieces hardly repeat, and keeping them would tie up memory.
    MAX_PIECE_LENGTH = 64

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._byte_ids = [vocabulary.id_of_bytes[bytes([value])] for value in range(256)]
        self._ranks = {pair: rank for rank, pair in enumerate(vocabulary.merges)}
        self._results = vocabulary.merge_results
        self._whole = vocabulary.id_of_bytes if vocabulary.ignore_merges else {}

    def __missing__(self, piece: str) -> Sequence[int]:
        data = piece.encode()
        if data in self._whole:
            ids = [self._whole[data]]
        else:
            ids = merge_all([self._byte_ids[value] for value in data], self._ranks, self._results)
        if len(piece) <= self.MAX_PIECE_LENGTH:
            if len(self) >= self.MAX_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def merge_all(
    symbols: list[int], ranks: Mapping[tuple[int, int], int], results: Sequence[int]
) -> list[int]:
    """Applies merges to one piece until none fits: the lowest rank first, of equal ranks the
    leftmost, which is the order in which training made them.

    Places wait in one list a rank, and a linked list tells neighbours. A place whose pair changed
    meanwhile is recognised when it comes up, so a piece of n bytes takes O(n log n) at worst.

    Args:
        symbols: ids of the piece's bytes; used up.
        ranks: rank of each pair that merges.
        results: the id that each rank makes.
    """
    length = len(symbols)
    left = list(range(-1, length - 1))
    right = list(range(1, length + 1))
    waiting: dict[int, list[int]] = {}
    for place, pair in enumerate(pairwise(symbols)):
        if pair in ranks:
            waiting.setdefault(ranks[pair], []).append(place)
    queue = list(waiting)
    heapq.heapify(queue)
    while queue:
        rank = heapq.heappop(queue)
        places = sorted(waiting.pop(rank))
        for index, place in enumerate(places):
            partner = right[place]
            if partner == length or ranks.get((symbols[place], symbols[partner])) != rank:
                continue
            symbols[place], symbols[partner] = results[rank], -1
            before, after = left[place], right[partner]
            right[place] = after
            made = []
            if after < length:
                left[after] = place
                made.append((ranks.get((symbols[place], symbols[after])), place))
            if before >= 0:
                made.append((ranks.get((symbols[before], symbols[place])), before))
            for new_rank, new_place in made:
                if new_rank is None:
                    continue
                if new_rank not in waiting:
                    waiting[new_rank] = []
                    heapq.heappush(queue, new_rank)
                waiting[new_rank].append(new_place)
            if queue and queue[0] < rank:
                # Trained merges never get here: a merge's parts are older than itself.
                waiting[rank] = places[index + 1 :]
                heapq.heappush(queue, rank)
                break
    return [symbol for symbol in symbols if symbol >= 0]
