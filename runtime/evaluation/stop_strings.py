"""A text that ends before the first of some strings, while it is being generated.

Strings, not tokens: a stop string may begin inside a token and end inside a later one, and may be
spelled by tokens in several ways.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from model.tokenizer import StreamDecoder, Tokenizer


def text_until(tokenizer: Tokenizer, tokens: Iterable[int], stops: Sequence[str],
               silent: Collection[int] = ()) -> str:
    """The text of tokens before the first stop string; no token after that is asked for.

    Ids in `silent` stand for no text."""
    decoder, text = StreamDecoder(tokenizer), ""
    for token in tokens:
        if token in silent:
            continue
        text += decoder.push(token)
        end = _first(text, stops)
        if end is not None:
            return text[:end]
    text += decoder.finish()
    return text[:_first(text, stops)]


def _first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins; None where there is none."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places, default=None)
