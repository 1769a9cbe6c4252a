"""`tokenizer.json`: the same tokenizer comes back, others read it alike, the rest is refused."""

import json
import random
from dataclasses import replace
from pathlib import Path
from unicodedata import category

import pytest

from euler_ir.errors import EulerError
from model.tokenizer import END_OF_DOCUMENT, Tokenizer, Vocabulary, train_tokenizer
from model.tokenizer.pretokenizer import GPT2, LLAMA3, piece_lists

ROOT = Path(__file__).parent.parent
STRESS = (Path(__file__).parent / "data" / "unicode-stress.txt").read_bytes().decode()
SAMPLE = STRESS[:30_000] + "café 漢字 😀 \xad\x7f\0"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([STRESS], 1024, [END_OF_DOCUMENT, "<|end ü|>"])


@pytest.fixture
def document(tokenizer):
    """The file's content, free to be spoilt."""
    return json.loads(tokenizer.to_json())


def test_round_trip_is_exact(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.vocabulary == Vocabulary(
        tokenizer.vocabulary.tokens,
        list(tokenizer.vocabulary.merges),
        tokenizer.special_tokens,
    )
    assert loaded.to_json() == tokenizer.to_json() == path.read_text(encoding="utf-8")
    assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]


def test_bytes_are_spelled_as_gpt2_spells_them(document):
    vocab = document["model"]["vocab"]
    assert [vocab[name] for name in ("!", "~", "¡", "ÿ")] == [0x21, 0x7E, 0xA1, 0xFF]
    assert [vocab[name] for name in ("Ā", "Ċ", "Ġ", "ġ", "Ł", "ł", "Ń")] == [
        0x00, 0x0A, 0x20, 0x7F, 0x9F, 0xA0, 0xAD,
    ]  # fmt: skip


def test_merges_as_joined_strings_read_the_same(tokenizer, document):
    pairs = document["model"]["merges"]
    assert all(len(pair) == 2 for pair in pairs)
    document["model"]["merges"] = [" ".join(pair) for pair in pairs]
    assert Tokenizer.from_json(json.dumps(document)).to_json() == tokenizer.to_json()


def test_what_gpt2s_own_file_leaves_out_may_be_missing(tokenizer, document):
    for name in ("type", "byte_fallback", "ignore_merges", "dropout"):
        del document["model"][name]
    document["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    document["post_processor"] = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False
    }  # fmt: skip
    del document["pre_tokenizer"]["use_regex"]
    assert Tokenizer.from_json(json.dumps(document)).to_json() == tokenizer.to_json()


def foreign_document(ignore_merges=False):
    """Ids in another order with gaps, an unreachable word, added tokens above and inside."""
    vocabulary = Vocabulary(
        tokens={700 - value: bytes([value]) for value in range(256)}
        | {3: b"th", 4: b"the", 5: b" unseen", 6: b"ab"},
        merges=[(700 - ord("t"), 700 - ord("h")), (3, 700 - ord("e")), (603, 602)],
        special_tokens={"<s>": 900, "</s>": 1},
        added_tokens={"ab": 6, "two words": 2, "<tool>": 950},
        ignore_merges=ignore_merges,
    )
    return Tokenizer(vocabulary)


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_foreign_ids_keep_their_numbers(ignore_merges):
    tokenizer = foreign_document(ignore_merges)
    loaded = Tokenizer.from_json(tokenizer.to_json())
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode("the ab<tool>two words<s>", ["<s>"]) == [4, 668, 6, 950, 2, 900]
    assert (5 in loaded.encode("an unseen")) == ignore_merges
    assert loaded.decode([900, 1, 950, 5]) == "<s></s><tool> unseen"


def test_a_special_token_spelled_like_an_ordinary_one_cannot_be_written():
    """The entry of the byte 0xE9 in the file's vocabulary is 'é'."""
    tokenizer = Tokenizer(Vocabulary.from_merges([], ["é"]))
    with pytest.raises(EulerError, match=r"added token 'é': .* spells the token b'.xe9' so"):
        tokenizer.to_json()


def put(*path_and_value):
    """A change of one place in the document."""
    *path, last, value = path_and_value

    def change(document):
        for step in path:
            document = document[step]
        document[last] = value

    return change


UNSUPPORTED = [
    (put("model", "type", "Unigram"), "model 'Unigram' is not supported"),
    (put("model", "type", "WordPiece"), "model 'WordPiece' is not supported"),
    *((put("model", "type", name), f"model '{name}' is not supported")
      for name in ("WordLevel", "bpe", "")),
    (put("model", "type", ["BPE"]), r"model ['BPE'] is not supported"),
    *((put("normalizer", {"type": name}), f"normalizer '{name}' is not supported")
      for name in ("NFC", "NFD", "NFKC", "Lowercase", "StripAccents", "Replace", "Prepend",
                   "BertNormalizer", "Precompiled", "Sequence")),
    (put("normalizer", "NFC"), "normalizer 'NFC' is not supported"),
    (put("pre_tokenizer", {"type": "Metaspace"}), "pre_tokenizer 'Metaspace' is not supported"),
    (put("pre_tokenizer", {"type": "Sequence"}), "pre_tokenizer 'Sequence' is not supported"),
    (put("pre_tokenizer", None), "pre_tokenizer None is not supported"),
    (put("pre_tokenizer", "add_prefix_space", True), "add_prefix_space = True is not supported"),
    (put("pre_tokenizer", "use_regex", False), "use_regex = False is not supported"),
    *((put("decoder", {"type": name}), f"decoder '{name}' is not supported")
      for name in ("WordPiece", "Metaspace", "BPEDecoder", "ByteFallback", "CTC", "Sequence")),
    (put("decoder", None), "decoder None is not supported"),
    (put("post_processor", {"type": "BertProcessing"}), "post_processor 'BertProcessing' is not"),
    (put("truncation", {"max_length": 5}), "truncation .* is not supported"),
    (put("padding", {"strategy": "BatchLongest"}), "padding .* is not supported"),
    (put("model", "dropout", 0.1), "dropout = 0.1 is not supported"),
    (put("model", "end_of_word_suffix", "</w>"), "end_of_word_suffix = '</w>' is not supported"),
    (put("model", "continuing_subword_prefix", "##"), "continuing_subword_prefix = '##' is not"),
    (put("model", "byte_fallback", True), "byte_fallback = True is not supported"),
    *((put("added_tokens", 0, option, True), f"'<|endoftext|>': {option} is not supported")
      for option in ("lstrip", "rstrip", "single_word")),
]


def llama3(tokenizer, ignore_merges=True):
    """The same tokens with Llama 3's pre-tokenizer."""
    return Tokenizer(replace(tokenizer.vocabulary, pattern=LLAMA3, ignore_merges=ignore_merges))


def test_llama3_style_round_trip(tokenizer):
    ours = llama3(tokenizer)
    loaded = Tokenizer.from_json(ours.to_json())
    assert loaded.vocabulary.pattern == LLAMA3 and loaded.vocabulary.ignore_merges
    assert loaded.to_json() == ours.to_json()
    assert loaded.encode(SAMPLE) == ours.encode(SAMPLE) != tokenizer.encode(SAMPLE)
    assert loaded.decode(loaded.encode(SAMPLE)) == SAMPLE


_SPLIT = ("pre_tokenizer", "pretokenizers", 0)


@pytest.mark.parametrize(("change", "message"), [
    (put(*_SPLIT, "pattern", {"Regex": "(a+)+b"}), "Split option pattern"),
    (put(*_SPLIT, "pattern", {"String": " "}), "Split option pattern"),
    (put(*_SPLIT, "behavior", "Removed"), "behavior = 'Removed' is not supported"),
    (put(*_SPLIT, "invert", True), "invert = True is not supported"),
    (put(*_SPLIT, "type", "Digits"), "pre_tokenizer 'Sequence' is not supported"),
    (put("pre_tokenizer", "pretokenizers", 1, "use_regex", True), "use_regex = True is not supp"),
    (put("pre_tokenizer", "pretokenizers", []), "pre_tokenizer 'Sequence' is not supported"),
])
def test_other_splits_are_refused_by_name(tokenizer, change, message):
    document = json.loads(llama3(tokenizer).to_json())
    change(document)
    with pytest.raises(EulerError, match=message):
        Tokenizer.from_json(json.dumps(document))


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
def test_unsupported_kinds_are_refused_by_name(document, change, message):
    change(document)
    pattern = message.replace("|", r"\|").replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(EulerError, match=pattern) as caught:
        Tokenizer.from_json(json.dumps(document))
    assert "\n" not in str(caught.value)


def test_long_values_are_cut_in_messages(document):
    document["normalizer"] = {"type": "\x1b[2J" + "x" * 10**6}
    with pytest.raises(EulerError, match=r"normalizer '.x1b.2Jx*\.\.\. is not supp") as caught:
        Tokenizer.from_json(json.dumps(document))
    assert len(str(caught.value)) < 200


MALFORMED = [
    (put("model", None), "model must be of JSON type dict, not NoneType"),
    (put("model", "vocab", []), "vocab must be of JSON type dict, not list"),
    (put("model", "merges", {}), "merges must be of JSON type list, not dict"),
    (put("model", "vocab", "Ġa", -1), "the id of token 'Ġa' is -1"),
    (put("model", "vocab", "Ġa", True), "the id of token 'Ġa' is True"),
    (put("model", "vocab", "Ġqqqq", 97), "two tokens have the id 97, the second is 'Ġqqqq'"),
    (put("model", "vocab", "漢", 5000), "token '漢' is not spelled in the byte alphabet"),
    (put("model", "merges", 0, ["a"]), r"merge \['a'\] does not name two tokens"),
    (put("model", "merges", 0, "a b c"), "merge 'a b c' does not name two tokens"),
    # No byte is spelled as a space, so a part with one is no token, whatever the style.
    (put("model", "merges", 0, ["a b", "c"]), "a merge joins 'a b', which is not in"),
    (put("model", "ignore_merges", "false"), "ignore_merges must be of JSON type bool, not str"),
    (put("model", "vocab", "Ġa", 1 << 31), "2147483648, not a whole number from 0 to 2147483647"),
    (put("added_tokens", 5), "added_tokens must be of JSON type list, not int"),
    (put("added_tokens", 0, "special", "no"), "special must be of JSON type bool, not str"),
    (put("added_tokens", 0, {"id": 3000, "content": "Ġa"}), "has the id 3000, in the vocab 4"),
    (put("model", "merges", 0, ["a", "Ġqqqq"]), "a merge joins 'Ġqqqq', which is not in"),
    (put("model", "merges", 0, ["q", "Ā"]), "merge 0 makes b'q.x00', which is not in"),
    (put("added_tokens", 0, {"id": 7}), "an added token has no text"),
    (put("added_tokens", 0, "id", None), "the id of token '<.endoftext.>' is None"),
    (put("added_tokens", 0, "content", "<|end ü|>"), "added token '<.end ü.>' is listed twice"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_malformed_files_are_refused_in_one_line(document, change, message):
    change(document)
    with pytest.raises(EulerError, match=message) as caught:
        Tokenizer.from_json(json.dumps(document))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON document"),
        (b"{", "not a JSON document"),
        (b"[" * 100_000, "not a JSON document"),
        (b'{"model": ' + b"9" * 5000 + b"}", "not a JSON document"),
        (b"[]", "not a JSON object"),
        (b'{"model": "\xff"}', "is not UTF-8 at byte 11"),
    ],
)
def test_other_files_are_refused_with_their_path(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(EulerError, match=message) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_reached(tokenizer, tmp_path):
    with pytest.raises(EulerError, match="cannot read tokenizer .*no-such.*No such file"):
        Tokenizer.load(tmp_path / "no-such.json")
    with pytest.raises(EulerError, match="cannot read tokenizer .*directory"):
        Tokenizer.load(tmp_path)
    with pytest.raises(EulerError, match="cannot write tokenizer .*No such file"):
        tokenizer.save(tmp_path / "missing" / "tokenizer.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(EulerError, match="cannot write tokenizer .*Not a directory"):
        tokenizer.save(tmp_path / "file" / "tokenizer.json")


def outside_reader(tokenizer):
    """The file as the Hugging Face library reads it, special tokens in a text being plain text."""
    tokenizers = pytest.importorskip("tokenizers")
    reader = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    reader.encode_special_tokens = True
    return reader


@pytest.mark.oracle
def test_outside_reader_gives_the_same_ids_on_the_stress_text(tokenizer):
    reader = outside_reader(tokenizer)
    ids = tokenizer.encode(STRESS)
    assert reader.encode(STRESS).ids == ids
    assert reader.decode(ids, skip_special_tokens=False) == STRESS
    assert reader.get_vocab_size() == tokenizer.vocabulary_size


@pytest.mark.oracle
def test_outside_reader_gives_the_same_special_ids(tokenizer):
    reader = outside_reader(tokenizer)
    reader.encode_special_tokens = False
    assert reader.encode(STRESS).ids == tokenizer.encode(STRESS, tokenizer.special_tokens)
    text = f"one{END_OF_DOCUMENT}two <|end ü|>{END_OF_DOCUMENT}"
    assert reader.encode(text).ids == tokenizer.encode(text, tokenizer.special_tokens)


@pytest.mark.oracle
def test_outside_reader_gives_the_same_ids_on_shakespeare():
    text = (ROOT / "runtime" / "assets" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text], 512)
    assert outside_reader(tokenizer).encode(text).ids == tokenizer.encode(text)


@pytest.mark.oracle
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_outside_reader_gives_the_same_llama3_style_ids(tokenizer, ignore_merges):
    ours = llama3(tokenizer, ignore_merges)
    reader = outside_reader(ours)
    for text in (STRESS, "It'S 12345!\n\n  (so)\r\n\t.x\n", SAMPLE):
        ids = ours.encode(text)
        assert reader.encode(text).ids == ids
        assert reader.decode(ids, skip_special_tokens=False) == text


@pytest.mark.oracle
@pytest.mark.parametrize("pattern", [GPT2, LLAMA3])
def test_outside_reader_cuts_at_every_character_alike(tokenizer, pattern):
    """Both sides' tables of letters, digits and whitespace agree on every assigned character."""
    tokenizer = Tokenizer(replace(tokenizer.vocabulary, pattern=pattern))
    cut = outside_reader(tokenizer).pre_tokenizer.pre_tokenize_str
    assigned = [
        chr(code) for code in range(0x110000) if category(chr(code)) not in ("Cn", "Co", "Cs")
    ]
    for start in range(0, len(assigned), 500):
        text = "".join(f"a{mark}1{mark} '{mark} " for mark in assigned[start : start + 500])
        pieces = [piece for part in piece_lists(text, pattern) for piece in part]
        assert [text[begin:end] for _, (begin, end) in cut(text)] == pieces


@pytest.mark.oracle
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_outside_reader_gives_the_same_foreign_ids(ignore_merges):
    tokenizer = foreign_document(ignore_merges)
    reader = outside_reader(tokenizer)
    for text in ("the ab cab", "an unseen", "two words<tool><s> the the", "a the\0é"):
        assert reader.encode(text).ids == tokenizer.encode(text)
    reader.encode_special_tokens = False
    text = "<s>the <tool></s>"
    assert reader.encode(text).ids == tokenizer.encode(text, tokenizer.special_tokens)


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(10))
def test_outside_reader_merges_alike_in_any_order_of_merges(seed):
    rng = random.Random(seed)
    tokens = {value: bytes([value]) for value in range(256)}
    parts, merges = list(b"abc"), []
    for number in range(256, 268):
        left, right = rng.choice(parts), rng.choice(parts)
        if tokens[left] + tokens[right] not in tokens.values():
            tokens[number] = tokens[left] + tokens[right]
            parts.append(number)
            merges.append((left, right))
    rng.shuffle(merges)
    tokenizer = Tokenizer(Vocabulary(tokens, merges))
    reader = outside_reader(tokenizer)
    for _ in range(30):
        text = "".join(rng.choices("abc", k=rng.randint(1, 60)))
        assert reader.encode(text).ids == tokenizer.encode(text)


@pytest.mark.oracle
def test_file_of_an_outside_trainer_reads_the_same():
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([STRESS], trainer)
    ours = Tokenizer.from_json(trained.to_str())
    assert ours.special_tokens == {END_OF_DOCUMENT: 0}
    trained.encode_special_tokens = True
    assert trained.encode(STRESS).ids == ours.encode(STRESS)
