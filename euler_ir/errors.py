"""The one exception that means "the input was wrong, not the program"."""


class EulerError(Exception):
    """A fault in what the user gave: its message is one line that says what was wrong, with which
    value, and what would be right. Commands print it and exit with code 2; anything else that
    escapes is a bug of ours and keeps its traceback."""
