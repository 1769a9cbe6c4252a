"""The `post_processor` of a `tokenizer.json`: the special tokens around a whole text.

Its part TemplateProcessing says which, as Llama 3's file does: `<|begin_of_text|> $A`. `single` is
about one text, and what we keep is the ids before and after it. `pair` is about two texts in one
row, which we never encode. The part ByteLevel corrects offsets and leaves the ids alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from euler_ir.errors import EulerError, shown

Ids = tuple[int, ...]


def write(prefix: Sequence[int], suffix: Sequence[int],
          names: Mapping[int, str]) -> dict[str, Any] | None:
    """The part of the file for these ids, whose texts are `names`; None where there are none."""
    if not prefix and not suffix:
        return None

    def around(text: str, type_id: int) -> list[dict[str, Any]]:
        pieces = [{"SpecialToken": {"id": names[number], "type_id": type_id}}
                  for number in (*prefix, *suffix)]
        pieces.insert(len(prefix), {"Sequence": {"id": text, "type_id": type_id}})
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            names[number]: {"id": names[number], "ids": [number], "tokens": [names[number]]}
            for number in (*prefix, *suffix)
        },
    }


def read(part: object, known: Mapping[str, int]) -> tuple[Ids, Ids]:
    """The ids before and after a text; `known` are the special and added tokens of the file.

    Raises:
        EulerError: for a part that we lack, and for a template that contradicts the vocabulary.
    """
    templates = [processor for processor in _processors(part)
                 if processor["type"] == "TemplateProcessing"]
    if not templates:
        return (), ()
    if len(templates) > 1:
        raise EulerError(f"post_processor has TemplateProcessing {len(templates)} times; it must "
                         "be there once at most")
    return _read_template(templates[0], known)


def _processors(part: object) -> list[dict[str, Any]]:
    """The processors of the part, of the two types that we know."""
    if part is None:
        return []
    listed = [part]
    if isinstance(part, dict) and part.get("type") == "Sequence":
        listed = part.get("processors")
        if not isinstance(listed, list):
            raise EulerError("post_processor 'Sequence' has no list of processors")
    for processor in listed:
        kind = processor.get("type") if isinstance(processor, dict) else processor
        if kind not in ("ByteLevel", "TemplateProcessing"):
            raise EulerError(f"post_processor {shown(kind)} is not supported; it must be "
                             "'ByteLevel', 'TemplateProcessing' or a 'Sequence' of these")
    return listed


def _read_template(template: Mapping[str, Any], known: Mapping[str, int]) -> tuple[Ids, Ids]:
    pieces, entries = template.get("single"), template.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(entries, dict):
        raise EulerError("TemplateProcessing must have a list 'single' and an object "
                         "'special_tokens'")
    before: list[int] = []
    after: list[int] = []
    texts = 0
    for piece in pieces:
        match piece:
            case {"Sequence": {"id": "A"}}:
                texts += 1
            case {"SpecialToken": {"id": str(name)}}:
                (after if texts else before).extend(_ids(name, entries.get(name), known))
            case _:
                raise EulerError(f"TemplateProcessing: {shown(piece)} in 'single' is not "
                                 "supported; it must be a SpecialToken or the Sequence A")
    if texts != 1:
        raise EulerError(f"TemplateProcessing has the Sequence A {texts} times in 'single'; it "
                         "must be there once")
    return tuple(before), tuple(after)


def _ids(name: str, entry: object, known: Mapping[str, int]) -> list[int]:
    """The ids that the template's special token stands for, usually the one of its own text."""
    match entry:
        case {"ids": [_, *_] as ids, "tokens": [*tokens]} if len(ids) == len(tokens):
            pass
        case _:
            raise EulerError(f"TemplateProcessing: special_tokens does not say the ids and tokens "
                             f"of {shown(name)}")
    for number, token in zip(ids, tokens, strict=True):
        if not isinstance(token, str) or token not in known:
            raise EulerError(f"TemplateProcessing: {shown(token)} is not among the added tokens")
        if number != known[token]:
            raise EulerError(f"TemplateProcessing: {shown(token)} has the id {shown(number)}, "
                             f"among the added tokens {known[token]}")
    return [known[token] for token in tokens]
