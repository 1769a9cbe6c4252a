"""Small file writes that are whole or absent, and one-line reports of what the system refused.

A reader, or a process killed in the middle, never sees half a file: content is written beside the
target and renamed over it, which POSIX makes atomic within a directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from euler_ir.errors import EulerError

# No space on the device, over the user's quota, over the process's file size limit.
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_error(error: OSError, path: Path | str) -> EulerError:
    """The user error for a write to `path` that the system refused."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    advice = ": free some space or write elsewhere" if error.errno in FULL_DISK else ""
    return EulerError(f"cannot write {path} ({reason}){advice}")


def read_error(error: OSError, path: Path | str) -> EulerError:
    """The user error for a read of `path` that the system refused."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return EulerError(f"cannot read {path} ({reason})")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path in front of user errors from inside: of what is wrong with what it holds."""
    try:
        yield
    except EulerError as error:
        raise EulerError(f"{path}: {error}") from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path`, replacing it at once; on failure the old file stays as it was.

    Raises EulerError naming the path when the system refuses the write.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:
        raise write_error(error, path) from error
    finally:
        beside.unlink(missing_ok=True)
