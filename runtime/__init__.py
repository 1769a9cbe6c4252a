"""Where the compiled model meets the machine: memory, data, checkpoints, and the commands."""

import os
import sys


def _end_in_one_line(kind, value, trace) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, value, trace)
        return
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


# `python -m runtime.train` comes by here first (argv[0] is "-m" just then). Half a second of
# imports lies ahead, in which Ctrl-C cannot be met by the command itself (runtime/cli.py) yet.
if sys.argv[0] == "-m":
    sys.excepthook = _end_in_one_line
