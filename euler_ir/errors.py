"""The one exception that means "the input was wrong, not the program", and how its messages name
what they are about."""

import contextlib
from collections.abc import Iterator

_SHOWN, _CUT = 80, 200  # characters of a value in a message, and of a message in another


class EulerError(Exception):
    """A fault in what the user gave: its message is one line that says what was wrong, with which
    value, and what would be right. Commands print it and exit with code 2; anything else that
    escapes is a bug of ours and keeps its traceback."""


@contextlib.contextmanager
def error_context(where: object) -> Iterator[None]:
    """Put a file's path or name in front of the message of EulerErrors from inside."""
    try:
        yield
    except EulerError as error:
        raise EulerError(f"{where}: {error}") from error


def shown(value: object) -> str:
    """The value as a message shows it: as Python spells it, cut where it is long. What a file of
    others holds may be long, and may hold what a terminal obeys."""
    return cut(repr(value), _SHOWN)


def cut(text: str, length: int = _CUT) -> str:
    """The text, or its beginning and three dots where it is longer."""
    return text if len(text) <= length else text[:length] + "..."
