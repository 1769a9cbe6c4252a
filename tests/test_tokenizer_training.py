"""Training the tokenizer: the stated rule, against a trainer that counts everything afresh."""

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from euler_ir.errors import EulerError
from model.tokenizer import END_OF_DOCUMENT, pretokenizer, train_tokenizer
from model.tokenizer.trainer import count_pieces, learn_merges

ROOT = Path(__file__).parent.parent
STRESS = (Path(__file__).parent / "data" / "unicode-stress.txt").read_bytes().decode()


def replace_pair(symbols, pair, new):
    """Left to right, and how many replacements that makes."""
    out, index = [], 0
    while index < len(symbols):
        if tuple(symbols[index : index + 2]) == pair:
            out.append(new)
            index += 2
        else:
            out.append(symbols[index])
            index += 1
    return out, len(symbols) - len(out)


def train_by_the_rule(pieces, merge_count):
    """The rule word for word: count what each merge would replace, take the most, then the least
    ids. Returns the merges and how each piece ends."""
    words = {piece: list(piece.encode()) for piece in pieces}
    merges = []
    while len(merges) < merge_count:
        counts = Counter()
        for piece, word in words.items():
            for pair in set(pairwise(word)):
                counts[pair] += pieces[piece] * replace_pair(word, pair, -1)[1]
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        words = {p: replace_pair(word, best, 256 + len(merges))[0] for p, word in words.items()}
        merges.append(best)
    return merges, words


def merged_bytes(tokenizer):
    return [value for number, value in tokenizer.vocabulary.tokens.items() if number >= 256]


@pytest.mark.parametrize("seed", range(25))
def test_incremental_training_follows_the_rule(seed):
    rng = random.Random(seed)
    alphabet = "aé漢😀 "[: rng.randint(1, 5)]
    pieces = Counter(
        {
            "".join(rng.choices(alphabet, k=rng.randint(1, 20))): rng.randint(1, 5)
            for _ in range(rng.randint(1, 12))
        }
    )
    assert learn_merges(pieces, 40) == train_by_the_rule(pieces, 40)[0]


def test_encoding_the_training_text_gives_what_training_ended_with():
    text = STRESS[:6000]
    pieces = count_pieces([text])
    merges, words = train_by_the_rule(pieces, 60)
    tokenizer = train_tokenizer([text], 256 + 60, special_tokens=())
    assert list(tokenizer.vocabulary.merges) == merges
    for piece, ids in words.items():
        assert tokenizer.encode(piece) == ids


def test_every_token_encodes_to_itself():
    tokenizer = train_tokenizer([STRESS], 1000)
    for value in merged_bytes(tokenizer):
        text = value.decode("utf-8", "ignore")
        if text.encode() == value:
            assert tokenizer.encode(text) == [tokenizer.vocabulary.id_of_bytes[value]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("aaa", [256, 97]), ("aaaa", [256, 256]), ("aaaaa", [256, 256, 97])],
)
def test_runs_merge_from_the_left(text, expected):
    tokenizer = train_tokenizer([text], 257, special_tokens=())
    assert merged_bytes(tokenizer) == [b"aa"]
    assert tokenizer.encode(text) == expected


def test_overlapping_places_count_once():
    # (a, a) has three places in 'aaaa' but two replacements; (b, c) has three.
    assert learn_merges({"aaaa": 1, "bcxbcybc": 1}, 1) == [(ord("b"), ord("c"))]


def test_equal_counts_are_decided_by_the_lowest_ids():
    one_piece = train_tokenizer(["aaabbbccccdddd"], 256 + 4, special_tokens=())
    assert merged_bytes(one_piece) == [b"cc", b"dd", b"aa", b"ab"]
    for runs in (["aaa", "bbb", "cccc", "dddd"], ["bbb", "dddd", "aaa", "cccc"]):
        merged = merged_bytes(train_tokenizer(runs, 256 + 4, special_tokens=()))
        assert merged == [b"cc", b"dd", b"aa", b"bb"]
    # Two equal pairs of pairs: the left id decides first, then the right one.
    assert learn_merges({"zb": 1, "za": 1, "yc": 1}, 3) == [
        (ord("y"), ord("c")),
        (ord("z"), ord("a")),
        (ord("z"), ord("b")),
    ]


def test_order_of_pieces_and_documents_does_not_matter():
    pieces = pretokenizer._GPT2_PIECE.findall(STRESS[:20000])
    expected = train_tokenizer(pieces, 600).to_json()
    for seed in range(3):
        random.Random(seed).shuffle(pieces)
        assert train_tokenizer(pieces, 600).to_json() == expected


def test_hash_seed_does_not_matter():
    program = (
        "import hashlib, pathlib; from model.tokenizer import train_tokenizer;"
        "text = pathlib.Path('tests/data/unicode-stress.txt').read_bytes().decode()[:20000];"
        "print(hashlib.sha256(train_tokenizer([text], 400).to_json().encode()).hexdigest())"
    )
    expected = hashlib.sha256(train_tokenizer([STRESS[:20000]], 400).to_json().encode()).hexdigest()
    for seed in ("0", "1", "20240520"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == expected


def test_training_in_eight_threads_at_once_gives_the_same():
    def train(_):
        return train_tokenizer([STRESS[:20000]], 400).to_json()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(train, range(8)))) == 1


def test_running_out_of_pairs_is_reported():
    with pytest.warns(UserWarning, match="ran out of pairs after 1 merges.*258 tokens, not 512"):
        tokenizer = train_tokenizer(["ab"], 512)
    assert tokenizer.vocabulary_size == 258
    assert tokenizer.special_tokens == {END_OF_DOCUMENT: 257}


@pytest.mark.parametrize("texts", [[], [""], ["a", "b"]])
def test_text_without_pairs_gives_bytes(texts):
    with pytest.warns(UserWarning, match="ran out of pairs after 0 merges"):
        tokenizer = train_tokenizer(texts, 300)
    assert tokenizer.vocabulary_size == 257
    assert tokenizer.encode("añ") == [97, 0xC3, 0xB1]


def test_vocabulary_of_bytes_alone():
    tokenizer = train_tokenizer(["some text, some text"], 256, special_tokens=())
    assert tokenizer.vocabulary_size == 256
    assert tokenizer.encode("some") == list(b"some")


def test_special_tokens_get_the_ids_after_the_merges():
    tokenizer = train_tokenizer(["hello hello"], 262, special_tokens=["<|b|>", "<|a|>"])
    assert tokenizer.special_tokens == {"<|b|>": 260, "<|a|>": 261}
    assert tokenizer.vocabulary_size == 262


def test_tokens_do_not_span_pieces_or_documents():
    tokenizer = train_tokenizer(["ab cd"] * 5 + ["ef", "gh"], 256 + 5, special_tokens=())
    assert merged_bytes(tokenizer) == [b" c", b"ab", b" cd", b"ef", b"gh"]


def test_long_piece_does_not_slow_training_down():
    # Rescanning the piece for each of 300 merges would take minutes.
    rng = random.Random(0)
    text = "".join(chr(0x4E00 + rng.randrange(500)) for _ in range(60_000))
    tokenizer = train_tokenizer([text, "a" * 100_000], 256 + 300, special_tokens=())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("texts", "size", "special", "message"),
    [
        (["a"], 256, ["<|x|>"], "a vocabulary of 256 is too small.*need 257"),
        (["a"], 10, [], "a vocabulary of 10 is too small.*need 256"),
        (["a"], 300, ["<|x|>", "<|x|>"], "hold one twice"),
        (["a"], 300, [""], "is empty"),
        (["ab"] * 2, 258, ["ab"], "'ab' is an ordinary token too"),
        (["a"], 300, ["\ud83d"], "not well-formed"),
        ("one string", 300, [], "give a list of texts"),
    ],
)
@pytest.mark.filterwarnings("ignore:the text ran out of pairs")
def test_bad_requests_are_refused_in_one_line(texts, size, special, message):
    with pytest.raises(EulerError, match=message) as caught:
        train_tokenizer(texts, size, special)
    assert "\n" not in str(caught.value)
