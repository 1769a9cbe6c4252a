"""Compiled kernels on disk, so that only the first run of a model waits for LLVM.

One file a kernel, named by its key. An entry states its own key, length and checksum, so that a
file that was cut, altered or put under the wrong name reads as a miss and is compiled again.
Writers fill a temporary file and rename it: a reader sees the whole entry or none, any number of
processes may write the same one (the last wins, with equal content), and a killed writer leaves
nothing that anybody waits for. The cache is only ever a saving: where the disk is full or the
directory cannot be written, one warning line says so and the run goes on without it.

Objects in the cache are native code that this program will execute, so the directory is created
for its owner alone.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

_MAGIC = b"EULEROBJ"
_HEADER = struct.Struct("<8sQ32s")  # magic, payload length, sha256 over key and payload
_DEFAULT_LIMIT_BYTES = 1 << 30
_STALE_TEMPORARY_SECONDS = 3600.0

_REPOSITORY = Path(__file__).resolve().parents[2]


def default_directory() -> Path | None:
    """$EULER_CACHE, else ~/.cache/euler; None where there is no home directory."""
    chosen = os.environ.get("EULER_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "euler"
    except RuntimeError:
        return None


def emitter_fingerprint(repository: Path = _REPOSITORY) -> str:
    """sha256 over everything besides the kernel's own key that decides its code: the sources that
    emit it, and the versions of llvmlite and LLVM."""
    digest = hashlib.sha256()
    for package in ("euler_ir", "backends/llvm"):
        for path in sorted((repository / package).rglob("*.py")):
            digest.update(path.relative_to(repository).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    version = ".".join(map(str, llvm.llvm_version_info))
    digest.update(f"llvmlite {llvmlite.__version__}, LLVM {version}".encode())
    return digest.hexdigest()


#: Taken with the sources as they are imported: were it taken at the first kernel, a process that
#: runs older code could store objects under the name of sources edited since.
_FINGERPRINT = emitter_fingerprint()


def entry_name(*parts: str) -> str:
    """The name of the entry for `parts`: sha256 over them and the emitters' fingerprint."""
    digest = hashlib.sha256(_FINGERPRINT.encode())
    for part in parts:
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()


class ObjectCache:
    """A directory of compiled objects, each under the hexadecimal name that `entry_name` gave.

    `directory` None, or one that cannot be written, makes a cache that stores nothing.
    """

    def __init__(self, directory: Path | None, limit_bytes: int = _DEFAULT_LIMIT_BYTES):
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._writable = directory is not None

    def get(self, name: str) -> bytes | None:
        """The object stored under `name`, or None when there is no whole and genuine one."""
        if self.directory is None:
            return None
        path = self.directory / name
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        payload = entry[_HEADER.size :]
        if entry[: _HEADER.size] != _header(name, payload):
            return None
        _touch(path)
        return payload

    def put(self, name: str, payload: bytes) -> None:
        """Store `payload` under `name`; on failure, warn once and store nothing from then on."""
        if not self._writable:
            return
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(name, _header(name, payload) + payload)
        except OSError as error:
            self._writable = False
            print(
                f"warning: compiled kernels are not kept in {self.directory}: {error.strerror}; "
                "set EULER_CACHE to a writable directory",
                file=sys.stderr,
            )

    def _write(self, name: str, entry: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(entry)
            os.replace(temporary, self.directory / name)
        except BaseException:
            _remove(temporary)
            raise

    def trim(self) -> None:
        """Delete the entries unused for longest until at most three quarters of the limit is
        taken, if it was exceeded, and the temporary files of writers that died."""
        if not self._writable:
            return
        try:
            with os.scandir(self.directory) as files:
                found = [(f.stat().st_mtime, f.stat().st_size, f.path) for f in files]
        except OSError:
            return  # another process is deleting too, or the directory is gone
        dead_before = time.time() - _STALE_TEMPORARY_SECONDS
        for modified, _, path in found:
            if path.endswith(".tmp") and modified < dead_before:
                _remove(path)
        taken = sum(size for _, size, _ in found)
        if taken <= self.limit_bytes:
            return
        for _, size, path in sorted(found):
            if taken <= self.limit_bytes * 3 // 4:
                return
            if not path.endswith(".tmp"):
                _remove(path)
                taken -= size


def _header(name: str, payload: bytes) -> bytes:
    checksum = hashlib.sha256(name.encode() + payload).digest()
    return _HEADER.pack(_MAGIC, len(payload), checksum)


def _touch(path: Path) -> None:
    """Mark an entry as used now, which is what `trim` goes by."""
    try:
        os.utime(path)
    except OSError:
        pass  # a cache that we may only read


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or not ours to remove
