"""What a tokenizer knows: its tokens, its merges and its special tokens, checked on construction.

The trainer makes one, `tokenizer_json` reads and writes one, `Tokenizer` runs one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from euler_ir.errors import EulerError
from model.tokenizer.pretokenizer import GPT2

END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class Vocabulary:
    """Ids need not be dense: files of other projects leave gaps, and every id keeps its number.

    Attributes:
        tokens: the bytes of each ordinary token, by id; all 256 single bytes are among them.
        merges: pairs of ids in order of rank; a pair becomes the token of its joined bytes.
        special_tokens: control tokens by their text; encoded only where the caller allows them.
        added_tokens: user-defined words, matched whole in every text before anything else.
        ignore_merges: a piece that is itself a token is taken whole, reachable by merges or not.
        pattern: the pre-tokenizer's, one of those in pretokenizer.py.
        prefix: ids that a whole text begins with, each of a special or added token.
        suffix: ids that a whole text ends with, likewise.

    Raises:
        EulerError: where the parts contradict each other.
    """

    tokens: Mapping[int, bytes]
    merges: Sequence[tuple[int, int]]
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    ignore_merges: bool = False
    pattern: str = GPT2
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @classmethod
    def from_merges(
        cls, merges: Sequence[tuple[int, int]], special_tokens: Iterable[str]
    ) -> "Vocabulary":
        """The vocabulary our trainer makes: byte b has id b, merge r makes id 256 + r, and the
        special tokens follow in the order given."""
        tokens = {value: bytes([value]) for value in range(256)}
        for left, right in merges:
            tokens[len(tokens)] = tokens[left] + tokens[right]
        special_ids = {text: len(tokens) + index for index, text in enumerate(special_tokens)}
        return cls(tokens, merges, special_ids)

    def __post_init__(self) -> None:
        self._check_tokens()
        self._check_merges()
        added = self.special_tokens | self.added_tokens
        self._check_added(added)
        for number in (*self.prefix, *self.suffix):
            if number not in added.values():
                raise EulerError(f"texts begin or end with id {number}, which is neither a special "
                                 "nor an added token's")

    @cached_property
    def size(self) -> int:
        """Rows an embedding needs: one more than the largest id."""
        return 1 + max(self.token_bytes)

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """The bytes that every id decodes to, special and added tokens included."""
        added = self.special_tokens | self.added_tokens
        return dict(self.tokens) | {number: text.encode() for text, number in added.items()}

    @cached_property
    def ids(self) -> list[int]:
        """The ids that stand for a token, ascending: what a sampler may choose from, since a
        model's vocabulary may be larger than its tokenizer's."""
        return sorted(self.token_bytes)

    @cached_property
    def id_of_bytes(self) -> dict[bytes, int]:
        """The inverse of `tokens`."""
        return {value: number for number, value in self.tokens.items()}

    @cached_property
    def merge_results(self) -> list[int]:
        """The id that each merge makes, by rank."""
        return [self.id_of_bytes[self.tokens[a] + self.tokens[b]] for a, b in self.merges]

    def _check_tokens(self) -> None:
        if len(self.id_of_bytes) < len(self.tokens):
            twice = next(v for n, v in self.tokens.items() if self.id_of_bytes[v] != n)
            raise EulerError(f"the token {twice!r} has two ids; each token must have one")
        for value in range(256):
            if bytes([value]) not in self.id_of_bytes:
                raise EulerError(f"the vocabulary has no token for byte {value}; it needs all 256")

    def _check_merges(self) -> None:
        seen = set()
        for rank, pair in enumerate(self.merges):
            if any(part not in self.tokens for part in pair):
                raise EulerError(f"merge {rank} joins {pair}, but not both are ordinary token ids")
            joined = self.tokens[pair[0]] + self.tokens[pair[1]]
            if joined not in self.id_of_bytes:
                raise EulerError(f"merge {rank} makes {joined!r}, which is not in the vocabulary")
            if pair in seen:
                raise EulerError(f"merge {rank} joins {pair}, as an earlier merge does")
            seen.add(pair)

    def _check_added(self, added: Mapping[str, int]) -> None:
        if len(added) < len(self.special_tokens) + len(self.added_tokens):
            both = min(set(self.special_tokens) & set(self.added_tokens))
            raise EulerError(f"the token {both!r} is both special and not")
        owners: dict[int, str] = {}
        for text, number in added.items():
            if not text:
                raise EulerError(f"special token {number} is empty; give it a text")
            try:
                value = text.encode()
            except UnicodeEncodeError:
                raise EulerError(f"special token {text!r} is not well-formed Unicode") from None
            if text in self.special_tokens and value in self.id_of_bytes:
                raise EulerError(
                    f"special token {text!r} is an ordinary token too: plain text could forge it"
                )
            if self.tokens.get(number, value) != value:
                raise EulerError(f"id {number} is given to {text!r} and {self.tokens[number]!r}")
            if number in owners:
                raise EulerError(f"id {number} is given to {owners[number]!r} and {text!r}")
            owners[number] = text
