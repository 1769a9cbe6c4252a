"""Encoding and decoding: exact, fast on any text, and special tokens only where allowed."""

import random
from pathlib import Path

import numpy as np
import pytest

from euler_ir.errors import EulerError
from model.tokenizer import (
    END_OF_DOCUMENT,
    StreamDecoder,
    Tokenizer,
    Vocabulary,
    bpe,
    pretokenizer,
    train_tokenizer,
)

STRESS = (Path(__file__).parent / "data" / "unicode-stress.txt").read_bytes().decode()
_RNG = random.Random(1)
CJK = "".join(chr(0x4E00 + _RNG.randrange(2000)) for _ in range(333_000))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([STRESS], 1024, [END_OF_DOCUMENT, "<|end|>"])


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_tokenizer([], 256, ())


def random_text(rng, length):
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length))


@pytest.mark.parametrize("seed", range(20))
def test_any_text_comes_back(tokenizer, seed):
    text = random_text(random.Random(seed), 500)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_stress_text_comes_back_shorter(tokenizer):
    ids = tokenizer.encode(STRESS)
    assert tokenizer.decode_bytes(ids) == STRESS.encode()
    assert len(ids) < 0.8 * len(STRESS.encode())
    assert max(ids) < tokenizer.vocabulary_size


@pytest.mark.parametrize("text", ["", "\0", "\ufeffa", " ", "\r\n\r\n", "'s", "don't", "a  b"])
def test_small_texts_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.encode(text) == []) == (text == "")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'll go, now", ["I", "'ll", " go", ",", " now"]),
        ("a  b", ["a", " ", " b"]),
        ("x\n\n y ", ["x", "\n\n", " y", " "]),
        ("été 2024!?", ["été", " 2024", "!?"]),
        ("won'T", ["won", "'", "T"]),
    ],
)
def test_pieces_are_those_of_gpt2(text, pieces):
    assert [piece for part in pretokenizer.piece_lists(text) for piece in part] == pieces


@pytest.mark.parametrize("pattern", [pretokenizer.GPT2, pretokenizer.LLAMA3])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_pieces_do_not_depend_on_the_chunk(monkeypatch, chunk, pattern):
    text = STRESS[:50_000] + " " * 5000 + "x" * 5000 + "\n \t" * 500 + "end!\n\n b.\r\n" * 50
    whole = pretokenizer._PATTERNS[pattern][0].findall(text)
    monkeypatch.setattr(pretokenizer, "_CHUNK", chunk)
    assert [piece for part in pretokenizer.piece_lists(text, pattern) for piece in part] == whole


def merge_all_by_scanning(symbols, ranks, results):
    """Lowest rank, then leftmost, found afresh each time."""
    while True:
        places = [
            (ranks[pair], place)
            for place, pair in enumerate(zip(symbols, symbols[1:], strict=False))
            if pair in ranks
        ]
        if not places:
            return symbols
        rank, place = min(places)
        symbols[place : place + 2] = [results[rank]]


@pytest.mark.parametrize("seed", range(50))
def test_merging_equals_scanning_for_the_next_merge(seed):
    """On merges in any order, also ones that training would never make."""
    rng = random.Random(seed)
    tokens = [bytes([value]) for value in b"abc"]
    pairs = []
    for _ in range(12):
        left, right = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        if tokens[left] + tokens[right] not in tokens:
            pairs.append((left, right))
            tokens.append(tokens[left] + tokens[right])
    rng.shuffle(pairs)
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    results = [tokens.index(tokens[left] + tokens[right]) for left, right in pairs]
    for _ in range(20):
        symbols = rng.choices(range(3), k=rng.randint(1, 40))
        expected = merge_all_by_scanning(list(symbols), ranks, results)
        assert bpe.merge_all(symbols, ranks, results) == expected


@pytest.mark.parametrize(
    "text",
    ["^" * 1_000_000, " " * 1_000_000, "a" * 1_000_000, "\n" * 200_000, CJK],
    ids=["carets", "spaces", "letters", "newlines", "cjk"],
)
def test_one_endless_piece(tokenizer, text):
    # Quadratic work would take hours here, recursion would crash. Runs of each character are in
    # the training text, so all but the Chinese merge many times over.
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert text == CJK or len(ids) <= len(text) / 2


def test_piece_cache_stays_bounded(monkeypatch):
    monkeypatch.setattr(bpe._PieceCache, "MAX_PIECES", 100)
    tokenizer = train_tokenizer([STRESS], 400)
    expected = train_tokenizer([STRESS], 400)._pieces
    for number in range(1000):
        assert tokenizer.encode(f" {number}") == expected[f" {number}"]
        assert len(tokenizer._pieces) <= 100
    tokenizer.encode("x" * 1000)
    assert "x" * 1000 not in tokenizer._pieces


def test_text_cannot_forge_a_special_token(tokenizer):
    special = set(tokenizer.special_tokens.values())
    text = f"{END_OF_DOCUMENT} a<|end|>{END_OF_DOCUMENT}" + STRESS
    ids = tokenizer.encode(text)
    assert not special & set(ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens_come_out_where_allowed(tokenizer):
    text = f"one{END_OF_DOCUMENT}two<|end|>{END_OF_DOCUMENT}"
    end = tokenizer.special_tokens[END_OF_DOCUMENT]
    ids = tokenizer.encode(text, allowed_special=[END_OF_DOCUMENT])
    assert ids == [
        *tokenizer.encode("one"), end, *tokenizer.encode("two<|end|>"), end
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text
    both = tokenizer.encode(text, allowed_special=tokenizer.special_tokens)
    assert both.count(tokenizer.special_tokens["<|end|>"]) == 1


def test_longest_allowed_special_token_wins():
    tokenizer = train_tokenizer([], 258, ["<a>", "<a><b>"])
    assert tokenizer.encode("<a><b><a>", ["<a>", "<a><b>"]) == [257, 256]


@pytest.mark.parametrize(
    ("allowed", "message"),
    [(["<|no|>"], "'<|no|>' is not a special token"), (END_OF_DOCUMENT, "give a list")],
)
def test_unknown_special_tokens_are_refused(tokenizer, allowed, message):
    with pytest.raises(EulerError, match=message.replace("|", r"\|")):
        tokenizer.encode("text", allowed_special=allowed)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("\ud83d", "\ufffd"),
        ("a\udc4db", "a\ufffdb"),
        ("\ud83d\ud83d\udc4d", "\ufffd👍"),
        ("\udc4d\ud83d", "\ufffd\ufffd"),
        ("\ud83d\udc4d", "👍"),
    ],
)
def test_surrogates(tokenizer, text, meaning):
    assert tokenizer.encode(text) == tokenizer.encode(meaning)
    learnt = train_tokenizer([f"{text} {text}"], 258, ())
    assert learnt.to_json() == train_tokenizer([f"{meaning} {meaning}"], 258, ()).to_json()


@pytest.mark.parametrize("number", [-1, 1024, 10**9, np.int64(-7)])
def test_bad_ids_are_refused(tokenizer, number):
    message = f"{int(number)} is not a token id: the vocabulary's ids go from 0 to 1023"
    with pytest.raises(EulerError, match=message):
        tokenizer.decode([65, number])
    with pytest.raises(EulerError, match=message):
        StreamDecoder(tokenizer).push(number)


def test_decoding_takes_arrays_and_nothing(tokenizer):
    ids = tokenizer.encode("to be")
    assert tokenizer.decode(np.array(ids, dtype=np.uint32)) == "to be"
    assert tokenizer.decode([]) == ""


def test_decode_bytes_is_exact_where_text_is_not(byte_tokenizer):
    ids = [0xFF, 0x61, 0xF0, 0x9F]
    assert byte_tokenizer.decode_bytes(ids) == b"\xffa\xf0\x9f"
    assert byte_tokenizer.decode(ids) == "\ufffda\ufffd"


def test_stream_holds_back_incomplete_characters(byte_tokenizer):
    stream = StreamDecoder(byte_tokenizer)
    assert [stream.push(number) for number in "😀".encode()] == ["", "", "", "😀"]
    assert stream.finish() == ""


def test_stream_ends_inside_a_character_with_one_replacement(byte_tokenizer):
    stream = StreamDecoder(byte_tokenizer)
    assert [stream.push(number) for number in "a😀".encode()[:3]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_stream_goes_on_after_an_invalid_byte(byte_tokenizer):
    stream = StreamDecoder(byte_tokenizer)
    assert [stream.push(0xFF), stream.push(ord("a"))] == ["\ufffd", "a"]


@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_decoding_at_once(byte_tokenizer, tokenizer, seed):
    rng = random.Random(seed)
    noise = [rng.choice([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x9F, 0xF0, 0xFF]) for _ in range(300)]
    tokens = [rng.randrange(tokenizer.vocabulary_size) for _ in range(300)]
    for decoder, ids in ((byte_tokenizer, noise), (tokenizer, tokens)):
        stream = StreamDecoder(decoder)
        parts = [stream.push(number) for number in ids]
        assert "".join(parts) + stream.finish() == decoder.decode(ids)


def small_vocabulary(**changes):
    parts = {
        "tokens": {value: bytes([value]) for value in range(256)} | {300: b"ab", 301: b"xyz"},
        "merges": [(97, 98)],
        **changes,
    }
    return Vocabulary(**parts)


def test_ids_may_have_gaps():
    tokenizer = Tokenizer(small_vocabulary(special_tokens={"<s>": 400}))
    assert tokenizer.vocabulary_size == 401
    assert tokenizer.encode("ab<s>", ["<s>"]) == [300, 400]
    with pytest.raises(EulerError, match="256 is not a token id.* with gaps"):
        tokenizer.decode([256])


def test_ignoring_merges_takes_a_known_piece_whole():
    assert Tokenizer(small_vocabulary()).encode("xyz") == list(b"xyz")
    assert Tokenizer(small_vocabulary(ignore_merges=True)).encode("xyz ab") == [301, 32, 300]


def test_added_tokens_match_whole_in_every_text():
    tokenizer = Tokenizer(small_vocabulary(added_tokens={"b c": 302}))
    assert tokenizer.encode("ab cd") == [97, 302, 100]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": {value: bytes([value]) for value in range(255)}}, "no token for byte 255"),
        ({"merges": [(97, 999)]}, "merge 0 joins .97, 999."),
        ({"merges": [(97, 98), (97, 99)]}, "merge 1 makes b'ac'"),
        ({"merges": [(97, 98), (97, 98)]}, "as an earlier merge does"),
        ({"special_tokens": {"ab": 500}}, "'ab' is an ordinary token too"),
        ({"special_tokens": {"<s>": 97}}, "id 97 is given to '<s>' and b'a'"),
        ({"special_tokens": {"": 400}}, "special token 400 is empty; give it a text"),
        ({"added_tokens": {"": 400}}, "token 400 is empty; give it a text"),
        ({"special_tokens": {"\ud83d": 400}}, "'.ud83d' is not well-formed Unicode"),
        ({"special_tokens": {"<s>": 400, "<t>": 400}}, "id 400 is given to '<s>' and '<t>'"),
        ({"special_tokens": {"<s>": 400}, "added_tokens": {"<s>": 400}}, "both special and not"),
    ],
)
def test_contradictions_in_a_vocabulary_are_refused(changes, message):
    with pytest.raises(EulerError, match=message):
        small_vocabulary(**changes)


def test_an_empty_special_token_cannot_be_trained():
    with pytest.raises(EulerError, match="special token 256 is empty; give it a text"):
        train_tokenizer(["text"], 257, [""])


def test_token_with_two_ids_is_refused():
    tokens = {value: bytes([value]) for value in range(256)} | {256: b"a"}
    with pytest.raises(EulerError, match="b'a' has two ids"):
        Vocabulary(tokens, [])
