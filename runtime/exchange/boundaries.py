"""Where texts begin and end: the ids that say so, for whoever generates, scores or exports.

An imported model says it in its own files: `bos_token_id` and `eos_token_id`, the latter one id or
a list, in generation_config.json and, where that says nothing, in config.json. Where neither does,
and for a model trained here, the tokenizer says it: by the ids that it puts around every text, else
by END_OF_DOCUMENT, which stands between documents in token shards. Where shards have only an id
that begins each document, meeting that is how one ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from euler_ir.errors import EulerError, error_context, shown
from model.json_values import parse_object
from model.tokenizer import END_OF_DOCUMENT, Vocabulary

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Boundaries:
    """`begin` is the id that texts begin with, None where there is none. Each of `ends` ends a
    text, the first is the one to end it with."""

    begin: int | None
    ends: tuple[int, ...]


def boundaries(vocabulary: Vocabulary, record: Mapping[str, Any] | None = None) -> Boundaries:
    """Where the texts of a model begin and end: one with this vocabulary and, if it was imported,
    this record of its import.

    Ids that are not in the vocabulary never come, and don't count: GPT-2 models of other
    vocabularies often keep 50256 in their files. Raises EulerError for what is no id."""
    begins, ends = _imported(record, "bos_token_id"), _imported(record, "eos_token_id")
    separator = vocabulary.special_tokens.get(END_OF_DOCUMENT)
    separators = () if separator is None else (separator,)
    first, last = vocabulary.prefix[:1], vocabulary.suffix[-1:]
    known = vocabulary.token_bytes
    begins, ends = (tuple(id for id in ids if id in known) for ids in (begins, ends))
    begins = first or begins or separators
    return Boundaries(begins[0] if begins else None, ends or last or separators or first)


def _imported(record: Mapping[str, Any] | None, key: str) -> tuple[int, ...]:
    """The ids that an imported model's files give for a key."""
    if record is None:
        return ()
    documents = {"config.json": record["config"]}
    if GENERATION_CONFIG in record["files"]:
        with error_context(GENERATION_CONFIG):
            generation = parse_object(record["files"][GENERATION_CONFIG])
        documents = {GENERATION_CONFIG: generation, **documents}
    for name, document in documents.items():
        value = document.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int for id in ids):
            raise EulerError(f"{name}: {key} must be a token id or a list of such, "
                             f"got {shown(value)}")
        if ids:
            return tuple(ids)
    return ()
