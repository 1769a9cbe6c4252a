"""Reads and writes `tokenizer.json`, the file format of the Hugging Face `tokenizers` library.

Of everything that format can hold, a byte-level BPE with the pre-tokenization of GPT-2 or Llama 3
is understood, with or without special tokens around a text (post_processor.py).
Anything else that would change an id is refused by name: guessing would give wrong ids silently.

The format spells each byte as a printable character: bytes that print in Latin-1 stand for
themselves, the other 68 follow from U+0100 on, in order (so a space is 'Ġ'). Merges are pairs of
such strings; older files join them by a space.
"""

import json
from collections.abc import Mapping
from typing import Any

from euler_ir.errors import EulerError, shown
from model.json_values import field, parse_object
from model.tokenizer import post_processor
from model.tokenizer.pretokenizer import GPT2, LLAMA3, LLAMA3_REGEX
from model.tokenizer.vocabulary import Vocabulary


def _byte_alphabet() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {value: chr(value) for value in printable}
    for value in range(256):
        if value not in alphabet:
            alphabet[value] = chr(0x100 + len(alphabet) - len(printable))
    return [alphabet[value] for value in range(256)]


_MOST_IDS = 1 << 31  # token ids are 32-bit integers in all files of them

_CHARACTER_OF_BYTE = _byte_alphabet()
_BYTE_OF_CHARACTER = {character: value for value, character in enumerate(_CHARACTER_OF_BYTE)}


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_LLAMA3_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": LLAMA3_REGEX},
    "behavior": "Isolated",
    "invert": False,
}
_PRE_TOKENIZERS = {
    GPT2: _BYTE_LEVEL,
    LLAMA3: {
        "type": "Sequence",
        "pretokenizers": [_LLAMA3_SPLIT, {**_BYTE_LEVEL, "use_regex": False}],
    },
}


def spelled(token: bytes) -> str:
    """A token's bytes in the printable characters of the format."""
    return "".join([_CHARACTER_OF_BYTE[byte] for byte in token])


def write(vocabulary: Vocabulary) -> str:
    """The file's text; the same vocabulary gives the same bytes.

    Raises:
        EulerError: for an added token that the file cannot tell from an ordinary one.
    """
    spelling = {number: spelled(value) for number, value in vocabulary.tokens.items()}
    added = {**vocabulary.added_tokens, **vocabulary.special_tokens}
    for number, text in spelling.items():
        if added.get(text, number) != number:
            raise EulerError(
                f"added token {shown(text)}: a tokenizer.json spells the token "
                f"{vocabulary.tokens[number]!r} so; take another text"
            )
    # Added tokens stand in the vocabulary too: that alone makes other readers keep their ids.
    ids = {text: number for number, text in spelling.items()} | added
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": text in vocabulary.special_tokens,
            }
            for text, number in sorted(added.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[vocabulary.pattern],
        "post_processor": post_processor.write(
            vocabulary.prefix,
            vocabulary.suffix,
            {number: text for text, number in added.items()},
        ),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": vocabulary.ignore_merges,
            "vocab": dict(sorted(ids.items(), key=lambda item: item[1])),
            "merges": [[spelling[left], spelling[right]] for left, right in vocabulary.merges],
        },
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def read(text: str) -> Vocabulary:
    """The vocabulary that the file's text describes.

    Raises:
        EulerError: if the text is no tokenizer file, is inconsistent, or is of a kind we lack.
    """
    document = parse_object(text)
    pattern = _refuse_unsupported(document)
    model = field(document, "model", dict)
    spelled_ids = field(model, "vocab", dict)
    for token, number in spelled_ids.items():
        _check_id(token, number)
    special_tokens, added_tokens = _read_added(document)
    merges = [_split_merge(merge) for merge in field(model, "merges", list)]

    added = special_tokens | added_tokens
    for text, number in added.items():
        if spelled_ids.get(text, number) != number:
            raise EulerError(
                f"added token {shown(text)} has the id {number}, in the vocab {spelled_ids[text]}"
            )
    merge_results = {left + right for left, right in merges}
    tokens: dict[int, bytes] = {}
    for token, number in spelled_ids.items():
        # An added token's entry is its plain text, not spelled bytes, unless it is an ordinary
        # token as well: a single byte, or what a merge makes.
        ordinary = token in merge_results or token in _BYTE_OF_CHARACTER
        if added.get(token) == number and not ordinary:
            continue
        if number in tokens:
            raise EulerError(f"two tokens have the id {number}, the second is {shown(token)}")
        tokens[number] = _bytes_of(token)
    prefix, suffix = post_processor.read(document.get("post_processor"), added)
    return Vocabulary(
        tokens,
        [(_id_of(left, spelled_ids), _id_of(right, spelled_ids)) for left, right in merges],
        special_tokens,
        added_tokens,
        _flag(model, "ignore_merges"),
        pattern,
        prefix,
        suffix,
    )


# The options that would change ids, each with the values under which they do not.
_HARMLESS: dict[str, tuple] = {
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
}
_BYTE_LEVEL_ALONE: dict[str, tuple] = {"add_prefix_space": (False,), "use_regex": (None, True)}
_BYTE_LEVEL_AFTER_SPLIT: dict[str, tuple] = {"add_prefix_space": (False,), "use_regex": (False,)}
_LLAMA3_OPTIONS: dict[str, tuple] = {
    "pattern": ({"Regex": LLAMA3_REGEX},),
    "behavior": ("Isolated",),
    "invert": (None, False),
}


def _refuse_unsupported(document: Mapping[str, Any]) -> str:
    """Raise EulerError for a part that we lack; the pre-tokenizer's pattern."""
    for part in ("normalizer", "truncation", "padding"):
        if (value := document.get(part)) is not None:
            kind = value.get("type", value) if isinstance(value, dict) else value
            raise EulerError(f"{part} {shown(kind)} is not supported; it must be null")
    pattern = _pattern(document.get("pre_tokenizer"))
    decoder = document.get("decoder")
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise EulerError(f"decoder {shown(kind)} is not supported; it must be 'ByteLevel'")
    # GPT-2's own file does not name the model's type.
    kind = field(document, "model", dict).get("type", "BPE")
    if kind != "BPE":
        raise EulerError(f"model {shown(kind)} is not supported; it must be 'BPE'")
    _check_options("model", document["model"], _HARMLESS)
    return pattern


def _pattern(pre_tokenizer: object) -> str:
    """The pattern of a pre-tokenizer: GPT-2's in ByteLevel itself, Llama 3's in a Split before."""
    kind = pre_tokenizer.get("type") if isinstance(pre_tokenizer, dict) else pre_tokenizer
    if kind == "ByteLevel":
        _check_options("pre_tokenizer", pre_tokenizer, _BYTE_LEVEL_ALONE)
        return GPT2
    match pre_tokenizer:
        case {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split", **split}, {"type": "ByteLevel", **byte_level}],
        }:
            _check_options("Split", split, _LLAMA3_OPTIONS)
            _check_options("pre_tokenizer", byte_level, _BYTE_LEVEL_AFTER_SPLIT)
            return LLAMA3
    raise EulerError(
        f"pre_tokenizer {shown(kind)} is not supported; it must be 'ByteLevel', alone or after the "
        "'Split' of Llama 3"
    )


def _check_options(
    part: str, values: Mapping[str, Any], options: Mapping[str, tuple]
) -> None:
    for option, allowed in options.items():
        value = values.get(option)
        if value not in allowed:
            raise EulerError(
                f"{part} option {option} = {shown(value)} is not supported; it must be "
                f"{allowed[-1]!r}"
            )


def _flag(parent: Mapping[str, Any], name: str) -> bool:
    """An option that is true or false, false where it is null or missing."""
    return parent.get(name) is not None and field(parent, name, bool)


def _check_id(token: str, number: object) -> None:
    if type(number) is not int or not 0 <= number < _MOST_IDS:
        raise EulerError(
            f"the id of token {shown(token)} is {shown(number)}, not a whole number from 0 to "
            f"{_MOST_IDS - 1}"
        )


def _read_added(document: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Special and other added tokens, each with its id."""
    special_tokens: dict[str, int] = {}
    added_tokens: dict[str, int] = {}
    entries = document.get("added_tokens")
    for entry in [] if entries is None else field(document, "added_tokens", list):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise EulerError(f"an added token has no text: {shown(entry)}")
        text = entry["content"]
        _check_id(text, entry.get("id"))
        for option in ("single_word", "lstrip", "rstrip"):
            if _flag(entry, option):
                raise EulerError(f"added token {shown(text)}: {option} is not supported")
        if text in special_tokens or text in added_tokens:
            raise EulerError(f"added token {shown(text)} is listed twice")
        (special_tokens if _flag(entry, "special") else added_tokens)[text] = entry["id"]
    return special_tokens, added_tokens


def _split_merge(merge: object) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    match parts:
        case [str(left), str(right)]:
            return left, right
    raise EulerError(f"merge {shown(merge)} does not name two tokens")


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError as error:
        raise EulerError(
            f"token {shown(token)} is not spelled in the byte alphabet: "
            f"{shown(error.args[0])} is no byte"
        ) from None


def _id_of(token: str, spelled_ids: Mapping[str, int]) -> int:
    if token not in spelled_ids:
        raise EulerError(f"a merge joins {shown(token)}, which is not in the vocabulary")
    return spelled_ids[token]
