"""The one exception that means "the input was wrong, not the program"."""

_SHOWN = 80  # characters of a value in a message


class EulerError(Exception):
    """A fault in what the user gave: its message is one line that says what was wrong, with which
    value, and what would be right. Commands print it and exit with code 2; anything else that
    escapes is a bug of ours and keeps its traceback."""


def shown(value: object) -> str:
    """The value as a message shows it: as Python spells it, cut where it is long. What a file of
    others holds may be long, and may hold what a terminal obeys."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
