"""What all commands share: how they parse their arguments and how they end.

A command is `def main(argv: Sequence[str] | None = None) -> int | None`, started by
`sys.exit(run_command(main))`. It ends in one of these ways:

| exit code | when                                                                     |
|-----------|--------------------------------------------------------------------------|
| 0         | done (or the code that `main` returns, such as 1 for a check that failed) |
| 2         | something the user gave cannot be: one line `error: ...` on stderr        |
| 130       | interrupted with Ctrl-C                                                   |
| 141       | the reader of its output went away (`... | head`), which is no fault      |

Anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from euler_ir.errors import EulerError

OK, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 2, 130, 141
#: Of integers without another limit: more than anybody counts here, and exact as a float.
_LARGEST = 2**31 - 1
_LONGEST_LINE = 2000  # characters of an error

Main = Callable[[Sequence[str] | None], int | None]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which takes no abbreviated flags: an
    abbreviation that works today is ambiguous once another flag is added."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {one_line(message)} (--help lists the options)\n")


def run_command(main: Main, argv: Sequence[str] | None = None) -> int:
    """Run a command and turn the way it ends into an exit code (see the module's table)."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal cannot show
    try:
        code = main(argv) or OK
        sys.stdout.flush()  # a broken pipe shows here at the latest
        return code
    except EulerError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError as error:
        return _fail(f"out of memory: {error}" if str(error) else "out of memory")
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"{where}{os.strerror(error.errno)}")


def _open_closed_streams() -> None:
    """Give a process that was started with a closed stdout or stderr one that goes nowhere. (Else
    Python has none, and the next file opened takes its number and all that libraries print.)"""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def print_notes(notes: Iterable[str]) -> None:
    """Say on stderr what there is to say besides the results, a line each."""
    for note in notes:
        print(one_line(note), file=sys.stderr)


def _fail(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return USER_ERROR


def one_line(message: str) -> str:
    """The message with line breaks and runs of spaces made single spaces, what does not print
    escaped (a terminal obeys some of it), and its middle left out where it is very long."""
    line = " ".join(message.split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2:]}"


def path(text: str) -> str:
    """An argument type: a path. An empty one is an unset variable of a script's, no directory."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return text


def integer(minimum: int, maximum: int = _LARGEST) -> Callable[[str], int]:
    """An argument type: an integer from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            wanted = _range("an integer", minimum, maximum, False, False)
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse


def number(
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    above: bool = False,
    below: bool = False,
) -> Callable[[str], float]:
    """An argument type: a finite number in a range, without its lower end if `above` and without
    its upper end if `below`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = math.isfinite(value)
        if minimum is not None:
            inside &= value > minimum if above else value >= minimum
        if maximum is not None:
            inside &= value < maximum if below else value <= maximum
        if not inside:
            wanted = _range("a number", minimum, maximum, above, below)
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse


def _range(
    kind: str, minimum: float | None, maximum: float | None, above: bool, below: bool
) -> str:
    parts = []
    if minimum is not None:
        parts.append(f"above {minimum}" if above else f"at least {minimum}")
    if maximum is not None:
        parts.append(f"below {maximum}" if below else f"at most {maximum}")
    return " ".join([kind, " and ".join(parts)]).strip()
