"""Learns BPE merges from text (Sennrich et al. 2016), in pure Python but incrementally.

The rule: the pair of neighbouring tokens with the highest count is merged next; of equal counts,
the pair with the lowest ids (left, then right). A pair's count is the number of replacements its
merge would make, left to right: 'aaa' holds (a, a) once, since only 'aa' of it can become one
token (Zouhar et al. 2023, "A Formal Perspective on Byte-Pair Encoding", count it likewise).
Nothing depends on the order of the texts, on hashing, or on the number of threads.

Instead of counting afresh for each merge, the different pieces lie one after another in one
array, linked to both sides. A merge visits only the places where its pair stands and corrects the
counts of the pairs beside them. Each symbol can vanish only once, so the whole training takes
O(n log n) for n bytes of different pieces, however long a single piece is.
"""

import heapq
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from euler_ir.errors import EulerError
from model.tokenizer.bpe import Tokenizer
from model.tokenizer.pretokenizer import piece_lists, well_formed
from model.tokenizer.vocabulary import END_OF_DOCUMENT, Vocabulary

Pair = tuple[int, int]

# Stands in the array between pieces, and where a merge has taken a symbol away.
_NOTHING = -1


def train_tokenizer(
    texts: Iterable[str],
    vocabulary_size: int,
    special_tokens: Iterable[str] = (END_OF_DOCUMENT,),
) -> Tokenizer:
    """A byte-level BPE tokenizer learnt from `texts`.

    Args:
        texts: documents, read once, one at a time; no token spans two of them. A special token's
            text in a document counts as ordinary text.
        vocabulary_size: all ids together: 256 bytes, the merges, the special tokens.
        special_tokens: they get the ids after the merges, in this order.

    Where the texts run out of pairs before the vocabulary is full, a UserWarning says so and the
    tokenizer's `vocabulary_size` is smaller than asked; without any text it knows bytes alone.

    Raises:
        EulerError: if the size leaves no room for bytes and special tokens, a special token is
            empty, given twice or learnt as an ordinary token, or `texts` is a single string.
    """
    special_tokens = tuple(special_tokens)
    merge_count = vocabulary_size - 256 - len(special_tokens)
    if isinstance(texts, str):
        raise EulerError("texts is one string; give a list of texts")
    if len(set(special_tokens)) < len(special_tokens):
        raise EulerError(f"special tokens {special_tokens} hold one twice")
    if merge_count < 0:
        raise EulerError(
            f"a vocabulary of {vocabulary_size} is too small: 256 bytes and "
            f"{len(special_tokens)} special tokens need {256 + len(special_tokens)}"
        )
    merges = learn_merges(count_pieces(texts), merge_count)
    if len(merges) < merge_count:
        warnings.warn(
            f"the text ran out of pairs after {len(merges)} merges: the vocabulary has "
            f"{vocabulary_size - merge_count + len(merges)} tokens, not {vocabulary_size}",
            stacklevel=2,
        )
    return Tokenizer(Vocabulary.from_merges(merges, special_tokens))


def count_pieces(texts: Iterable[str]) -> Counter[str]:
    """How often each piece of the pre-tokenizer occurs in all texts together."""
    counts: Counter[str] = Counter()
    for text in texts:
        for pieces in piece_lists(well_formed(text)):
            counts.update(pieces)
    return counts


def learn_merges(piece_counts: Mapping[str, int], merge_count: int) -> list[Pair]:
    """The first `merge_count` merges, fewer if no pair is left; merge r makes the id 256 + r."""
    corpus = _LinkedCorpus(piece_counts)
    # Counts only ever fall, so a heap entry is an upper bound: the first that is still true wins.
    heap = [(-count, pair) for pair, count in corpus.counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while heap and len(merges) < merge_count:
        negative_bound, pair = heapq.heappop(heap)
        count = corpus.replacements(pair)
        if count < -negative_bound:
            if count:
                heapq.heappush(heap, (-count, pair))
            continue
        for new_pair, new_count in corpus.merge(pair, 256 + len(merges)).items():
            heapq.heappush(heap, (-new_count, new_pair))
        merges.append(pair)
    return merges


class _LinkedCorpus:
    """The different pieces as linked symbols, with the count and the places of every pair.

    Attributes:
        counts: for each pair, the weight of the places where it stands, overlapping ones too.
        _places: for each pair, the indices of its left symbol, rising; some may be out of date.
            Complete once written: new places of a pair come only from the merge that makes its
            newer symbol, and that merge goes from left to right.
    """

    def __init__(self, piece_counts: Mapping[str, int]) -> None:
        encoded = [piece.encode() for piece in piece_counts]
        lengths = np.array([len(piece) + 1 for piece in encoded], dtype=np.int64)
        symbols = np.frombuffer(b"\0".join([b"", *encoded, b""]), dtype=np.uint8).astype(np.int64)
        symbols[np.concatenate(([0], lengths)).cumsum()] = _NOTHING
        weights = np.zeros_like(symbols)
        weights[1:] = np.repeat(np.fromiter(piece_counts.values(), np.int64), lengths)

        self._symbols: list[int] = symbols.tolist()
        self._weights: list[int] = weights.tolist()
        self._left = list(range(-1, len(symbols) - 1))
        self._right = list(range(1, len(symbols) + 1))
        self.counts: dict[Pair, int] = {}
        self._places: dict[Pair, list[int]] = {}
        self._index_pairs(symbols, weights)

    def _index_pairs(self, symbols: np.ndarray, weights: np.ndarray) -> None:
        left, right = symbols[:-1], symbols[1:]
        places = np.flatnonzero((left != _NOTHING) & (right != _NOTHING))
        if not len(places):
            return
        keys = left[places] * 256 + right[places]
        order = np.argsort(keys, kind="stable")
        places, keys = places[order], keys[order]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        totals = np.add.reduceat(weights[places], starts)
        groups = np.split(places, starts[1:])
        for key, total, group in zip(keys[starts].tolist(), totals.tolist(), groups, strict=True):
            pair = divmod(key, 256)
            self.counts[pair] = total
            self._places[pair] = group.tolist()

    def replacements(self, pair: Pair) -> int:
        """How many replacements merging `pair` would make, over the whole weighted corpus."""
        if pair[0] != pair[1]:
            return self.counts[pair]
        # Only a pair of equals can overlap itself: walk its places, skipping what is taken.
        symbols, right = self._symbols, self._right
        total, taken = 0, _NOTHING
        for place in self._places[pair]:
            partner = right[place]
            if place != taken and symbols[place] == symbols[partner] == pair[0]:
                total += self._weights[place]
                taken = partner
        return total

    def merge(self, pair: Pair, new: int) -> dict[Pair, int]:
        """Replaces `pair` by the symbol `new` everywhere, from left to right; returns the counts
        of the pairs that this makes."""
        symbols, left, right = self._symbols, self._left, self._right
        counts = self.counts
        first, second = pair
        made: dict[Pair, int] = {}
        places: dict[Pair, list[int]] = {}
        for place in self._places.pop(pair):
            partner = right[place]
            if symbols[place] != first or symbols[partner] != second:
                continue  # an earlier merge changed one of the two
            weight = self._weights[place]
            before, after = left[place], right[partner]
            if (neighbour := symbols[before]) != _NOTHING:
                # Right after a replacement the neighbour is `new`, and the pair is in `made`.
                old = (neighbour, first)
                (made if neighbour == new else counts)[old] -= weight
                joined = (neighbour, new)
                made[joined] = made.get(joined, 0) + weight
                places.setdefault(joined, []).append(before)
            if (neighbour := symbols[after]) != _NOTHING:
                counts[second, neighbour] -= weight
                joined = (new, neighbour)
                made[joined] = made.get(joined, 0) + weight
                places.setdefault(joined, []).append(place)
            symbols[place], symbols[partner] = new, _NOTHING
            right[place], left[after] = after, place
        del counts[pair]
        made = {joined: count for joined, count in made.items() if count}
        counts.update(made)
        self._places.update(places)
        return made
