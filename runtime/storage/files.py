"""Writes that are whole or absent, and one-line reports of what the system refused.

A reader, or a process killed in the middle, never sees half a file or folder: content is written
beside the target and renamed over it, which POSIX makes atomic within a directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
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


def decoded(content: bytes, path: Path | str) -> str:
    """The text of a file with this content, which must be UTF-8; EulerError where it is not."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise EulerError(f"{path} is not UTF-8 at byte {error.start}") from None


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """The path of a file, or of a folder, to make beside the target. It takes the target's place
    when all went well; on failure it is removed and the target stays as it was.

    Raises EulerError naming the target when the system refuses the write."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield beside
        os.replace(beside, target)
    except OSError as error:
        raise write_error(error, target) from error
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path`, replacing it at once; raises as `replacing` does."""
    with replacing(path) as beside:
        beside.write_bytes(content)
