"""The tokenizer against Hugging Face's on megabytes of books, web text and odd Unicode."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from model.tokenizer import Tokenizer, train_tokenizer

SHARED = Path(__file__).parents[2] / "shared" / "data"
_MEGABYTES = 5

pytestmark = [
    pytest.mark.oracle, pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "corpus.tar.xz").exists(), reason="no shared data here"),
]


@pytest.fixture(scope="module")
def corpus() -> dict[str, bytes]:
    """All of unicode/, and the first megabytes of books and web text."""
    texts, taken = {}, 0
    with tarfile.open(SHARED / "corpus.tar.xz") as archive:
        for member in archive:
            folder = Path(member.name).parts[-2:-1]
            wanted = folder == ("unicode",) or (
                folder in (("books",), ("web",)) and taken < _MEGABYTES * 2**20)
            if member.isfile() and member.name.endswith(".txt") and wanted:
                texts[member.name] = archive.extractfile(member).read()
                taken += len(texts[member.name]) if folder != ("unicode",) else 0
    assert taken >= _MEGABYTES * 2**20 and sum("unicode/" in name for name in texts) == 4
    return texts


@pytest.fixture(scope="module")
def ours(corpus) -> Tokenizer:
    return train_tokenizer([text.decode() for text in list(corpus.values())[:4]], 4096)


def test_ids_are_those_of_tokenizers(corpus, ours):
    """They take a special token's text for the token; ours does where it is allowed to."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(ours.to_json())
    for name, raw in corpus.items():
        text = raw.decode()
        ids = ours.encode(text, allowed_special=ours.special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, name


def test_the_round_trip_through_bytes_is_exact(corpus, ours):
    for name, raw in corpus.items():
        assert ours.decode_bytes(ours.encode(raw.decode())) == raw, name
