"""llama.cpp's tokenizer against ours, both read from what we write.

llama.cpp cuts a text into pieces with code by hand, not with the regular expressions. It has other
ids than ours (and the `tokenizers` library) in these cases, each with a test of its own:

* A letter or digit that Unicode got after version 15.1 counts as a mark: 'a\\u1c8a'.
* Llama 3's contractions are (?i:'s|...), and ignoring case makes an s of a long ſ: "'ſa".
* Added tokens are looked for one by one, the longest first, not from left to right: with tokens
  'ab' and 'bcd', 'abcd' is a, bcd.
"""

from __future__ import annotations

import ctypes
import unicodedata
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import regex

from model.config import ModelConfig
from model.parameters import parameters
from model.tokenizer import END_OF_DOCUMENT, Tokenizer, Vocabulary
from model.tokenizer.pretokenizer import GPT2, LLAMA3, piece_lists
from model.tokenizer.trainer import learn_merges
from runtime.data.streams import DEFAULT_TEXT
from runtime.exchange.gguf_export import write_gguf

pytestmark = [pytest.mark.oracle, pytest.mark.llama_cpp]

STRESS = Path(__file__).parent / "data/unicode-stress.txt"
#: One or two of each class of characters, and those that the patterns name.
ALPHABET = [*"aZéж中K", *"17²Ⅷ٣", *" \t\n\r\v\x1c\x85\xa0\u2009\u3000", *"'\"!._-€", "'s", "'LL",
            "'re", "e\u0301", "\u0301", "\u200d",
            "👍🏽", "👩‍👩‍👧", "\0", "\x7f", "\ufeff", "\ufffd",
            "\ue000", "\u0378", "\U0010ffff"]
SPECIAL = (END_OF_DOCUMENT, "<|user|>", "<|user|><|end|>")
ADDED = ("<tool>", " padded ", "日本")


@pytest.fixture(scope="module")
def llama_cpp():
    return pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make oracle-llama")


@cache
def texts() -> list[str]:
    """Shakespeare, odd Unicode, and random mixtures."""
    generator = np.random.default_rng(0)
    return [DEFAULT_TEXT.read_text(encoding="utf-8")[:200_000], STRESS.read_bytes().decode(),
            *("".join(generator.choice(ALPHABET, generator.integers(1, 9))) for _ in range(3000))]


def vocabulary(pattern: str) -> Vocabulary:
    """Merges learnt from the very texts that will be compared, so that a wrong cut shows; for
    Llama 3's pattern also whole pieces that no merges make."""
    counts: Counter[str] = Counter()
    for text in texts():
        for pieces in piece_lists(text, pattern):
            counts.update(pieces)
    made = Vocabulary.from_merges(learn_merges(counts, 3000), ())
    tokens, known = dict(made.tokens), set(made.tokens.values())
    if pattern == LLAMA3:
        whole = (piece.encode() for piece, _ in counts.most_common(1000))
        tokens |= dict(enumerate((p for p in whole if p not in known), len(tokens)))
        assert len(tokens) > len(made.tokens)
    special = {text: len(tokens) + i for i, text in enumerate(SPECIAL)}
    added = {text: len(tokens) + len(special) + i for i, text in enumerate(ADDED)}
    return Vocabulary(tokens, made.merges, special, added, pattern == LLAMA3, pattern)


class Pair:
    """A vocabulary's two tokenizers."""

    def __init__(self, llama_cpp, vocabulary: Vocabulary, directory: Path) -> None:
        self.ours = Tokenizer(vocabulary)
        config = ModelConfig("llama", width=2, heads=1, kv_heads=1, layers=1, context=8, hidden=2,
                             vocabulary=vocabulary.size, tied_head=True)
        tensors = {p.name: np.zeros(p.shape, np.float32) for p in parameters(config)}
        path = directory / "model.gguf"
        write_gguf(path, config, tensors, self.ours)
        self.theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def assert_same(self, text: str, special: bool = False) -> list[int]:
        allowed = self.ours.special_tokens if special else ()
        ids = self.ours.encode(text, allowed)
        assert self.theirs.tokenize(text.encode(), special=special) == ids, repr(text[:80])
        return ids

    def differ(self, text: str) -> bool:
        return self.theirs.tokenize(text.encode(), special=False) != self.ours.encode(text)


@pytest.fixture(scope="module", params=[GPT2, LLAMA3])
def pair(request, llama_cpp, tmp_path_factory) -> Pair:
    return Pair(llama_cpp, vocabulary(request.param), tmp_path_factory.mktemp("tokenizer"))


def test_ids(pair):
    for text in texts():
        pair.assert_same(text)


def test_the_bytes_of_every_token(llama_cpp, pair):
    """As they come out in generated text, special tokens where they are asked for."""
    buffer = ctypes.create_string_buffer(1000)
    for number, value in pair.ours.vocabulary.token_bytes.items():
        length = llama_cpp.llama_token_to_piece(pair.theirs._model.vocab, number, buffer,
                                                len(buffer), 0, True)
        assert buffer.raw[:length] == value


def test_special_and_added_tokens(pair):
    """Special ones where asked for, the longest of those that begin at a place; others always."""
    special, added = pair.ours.special_tokens, pair.ours.vocabulary.added_tokens
    text = f"a{END_OF_DOCUMENT}{END_OF_DOCUMENT} <|user|><|end|> <|user|> b <tool>日本 padded \n"
    assert not set(pair.assert_same(text)) & set(special.values())
    found = pair.assert_same(text, special=True)
    assert set(found) >= set(special.values()) | set(added.values())
    generator = np.random.default_rng(1)
    parts = [*SPECIAL, *ADDED, "<|", "|>", " ", "end", "日", "tool", "\n"]
    for _ in range(1000):
        text = "".join(generator.choice(parts, generator.integers(1, 9)))
        pair.assert_same(text, special=True)
        pair.assert_same(text)


def test_ids_around_a_whole_text(llama_cpp, pair, tmp_path):
    begin, end = (pair.ours.special_tokens[name] for name in ("<|user|>", END_OF_DOCUMENT))
    around = Pair(llama_cpp, replace(pair.ours.vocabulary, prefix=(begin,), suffix=(end,)),
                  tmp_path)
    ids = around.theirs.tokenize(b"To be")
    assert ids == around.ours.encode_document("To be") == [begin, *pair.assert_same("To be"), end]


def probing(pattern: str) -> Vocabulary:
    """The merges of a, 1 and ! with each byte that a character begins with: a token of two bytes
    says that the pattern keeps the letter, digit or mark and the character together."""
    first = [*range(0x80), *range(0xC2, 0xF5)]
    merges = [(probe, byte) for probe in b"a1!" for byte in first]
    return replace(Vocabulary.from_merges(merges, [END_OF_DOCUMENT]), pattern=pattern,
                   ignore_merges=pattern == LLAMA3)


def telling_characters() -> list[str]:
    """All below U+3000, and the first and last of every run of a class beyond."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    runs = regex.findall(r"\p{L}+|\p{N}+|\s+|\p{Cn}+|[^\p{L}\p{N}\s\p{Cn}]+", every[0x3000:])
    return [*every[:0x3000], *sorted({end for run in runs for end in (run[0], run[-1])})]


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3])
def test_the_class_of_every_character(llama_cpp, tmp_path, pattern):
    """The same but for letters and digits newer than llama.cpp's tables, of Unicode 15.1."""
    pair = Pair(llama_cpp, probing(pattern), tmp_path)
    others = [c for c in telling_characters() if pair.differ(f"a{c}1{c}!{c}")]
    assert others[:1] and all(regex.match(r"[\p{L}\p{N}]", c) for c in others)
    if unicodedata.unidata_version < "16":
        assert all(unicodedata.category(c) == "Cn" for c in others)


def test_known_differences(llama_cpp, tmp_path):
    """Those that the module's docstring names, so that it stays true."""
    tokens = {value: bytes([value]) for value in range(256)} | {256: b"a\xe1", 257: b"\xbfa"}
    pair = Pair(llama_cpp, Vocabulary(tokens, [(0x61, 0xE1), (0xBF, 0x61)], {},
                                      {"ab": 258, "bcd": 259}, True, LLAMA3), tmp_path)
    for text, ours, theirs in (("a\u1c8a", [256, 0xB2, 0x8A], [0x61, 0xE1, 0xB2, 0x8A]),
                               ("'ſa", [0x27, 0xC5, 0xBF, 0x61], [0x27, 0xC5, 257]),
                               ("abcd", [258, 0x63, 0x64], [0x61, 259])):
        assert pair.ours.encode(text) == ours
        assert pair.theirs.tokenize(text.encode()) == theirs
