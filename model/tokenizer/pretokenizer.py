"""Cuts a text into the pieces that BPE works on: merges never cross from one piece to the next.

The pattern is GPT-2's (Radford et al. 2019): contractions, then letters, digits or other marks,
each with at most one space in front, then whitespace. Files of others may ask for Llama 3's, which
cuts numbers after three digits and leaves line ends with the marks before them. Cutting first keeps
tokens from joining a word to its punctuation, and makes training and encoding cheap, since a text
holds far fewer different pieces than pieces.
"""

from collections.abc import Iterator

import regex

GPT2, LLAMA3 = "gpt2", "llama3"

#: Llama 3's pattern as its tokenizer.json spells it.
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

_GPT2_PIECE = regex.compile(
    r"'(?:[sdmt]|ll|ve|re)"  # 's 'd 'm 't 'll 've 're
    r"| ?\p{L}+"
    r"| ?\p{N}+"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)"  # whitespace, but its last character is left to the word that follows
    r"|\s+"
)

# By pattern: what a piece is, and where a text may be cut and its parts be treated alone. No piece
# looks back, and whitespace after something else always starts a new piece; in Llama 3's, line ends
# do so after letters and digits only.
_PATTERNS = {
    GPT2: (_GPT2_PIECE, regex.compile(r"(?<=\S)\s")),
    LLAMA3: (regex.compile(LLAMA3_REGEX),
             regex.compile(r"(?<=\S)[^\S\r\n]|(?<=[\p{L}\p{N}])\s")),
}

# Pieces are handed out for about this many characters at a time, to bound the memory.
_CHUNK = 1 << 20


def piece_lists(text: str, pattern: str = GPT2) -> Iterator[list[str]]:
    """The pieces of `text` in order, in lists of bounded length: joined they are `text`."""
    piece, safe_cut = _PATTERNS[pattern]
    start = 0
    while start < len(text):
        cut = safe_cut.search(text, start + _CHUNK)
        end = cut.start() if cut else len(text)
        yield piece.findall(text, start, end)
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
