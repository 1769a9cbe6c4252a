"""Cuts a text into the pieces that BPE works on: merges never cross from one piece to the next.

The pattern is GPT-2's (Radford et al. 2019): contractions, then letters, digits or other marks,
each with at most one space in front, then whitespace. Cutting first keeps tokens from joining a
word to its punctuation, and makes training and encoding cheap, since a text holds far fewer
different pieces than pieces.
"""

from collections.abc import Iterator

import regex

_PIECE = regex.compile(
    r"'(?:[sdmt]|ll|ve|re)"  # 's 'd 'm 't 'll 've 're
    r"| ?\p{L}+"
    r"| ?\p{N}+"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)"  # whitespace, but its last character is left to the word that follows
    r"|\s+"
)

# Whitespace after something else always starts a new piece, and no piece looks back, so a text
# may be cut there and its parts be treated alone.
_SAFE_CUT = regex.compile(r"(?<=\S)\s")

# Pieces are handed out for about this many characters at a time, to bound the memory.
_CHUNK = 1 << 20


def piece_lists(text: str) -> Iterator[list[str]]:
    """The pieces of `text` in order, in lists of bounded length: joined they are `text`."""
    start = 0
    while start < len(text):
        cut = _SAFE_CUT.search(text, start + _CHUNK)
        end = cut.start() if cut else len(text)
        yield _PIECE.findall(text, start, end)
        start = end


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and each lone surrogate replaced by U+FFFD.

    A Python string may hold surrogates (from JSON escapes or `surrogateescape`), UTF-8 may not.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
