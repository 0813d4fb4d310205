"""Read a file's bytes as an array, mapped from disk or fetched in blocks from object storage.

A file must not change while it is read. If another process writes to a mapped file, the reader sees the new
bytes. If it truncates the file, or the disk fails, reading would end this process by SIGBUS; here the missing
bytes read as zeros. In each case `MappedBytes.check` raises: call it after reading.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.data._index_builder import FileChange, MappedFile, all_unchanged
from megalite.utils.errors import UserError, first_line

BLOCK_BYTES = 4 << 20
"""Size of one request: large enough for a store's throughput, small compared with a corpus."""
_MAX_REQUEST_BLOCKS = 16


STATUS_AGE_MS = 20
"""Milliseconds for which a loader relies on a file's last known size and times."""


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of a store: s3://, gs://, memory://, ...; file:// is this machine."""
    return "://" in path and not path.startswith("file://")


def open_bytes(path: str) -> MappedBytes:
    """Open a file of this machine, or of any store that fsspec supports.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file cannot be read.
    """
    return CachedBytes(path) if is_remote(path) else MappedBytes(path.removeprefix("file://"))


def read_small(path: str) -> bytes:
    """Read a small file without caching it.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file is on this machine and cannot be read.
        UserError: the file is in a store and cannot be read.
    """
    if not is_remote(path):
        return Path(path.removeprefix("file://")).read_bytes()
    files, inner = _file_system(path)
    return bytes(_call_store(path, files.cat_file, inner, start=None, end=None))


class MappedBytes:
    """Memory-mapped file of this machine.

    Attributes:
        array: the file's bytes, uint8.
        mapped: mappings that reading the array depends on.
    """

    array: npt.NDArray[np.uint8]
    mapped: tuple[MappedFile, ...]

    def __init__(self, path: str) -> None:
        try:
            self.mapped = (MappedFile(os.fsencode(path)),)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UserError(f"cannot read {path}: {error}") from None
        self.array = self.mapped[0].array()
        self._name = path

    def fetch(self, begin: int, end: int) -> None:
        """Make bytes `begin` to `end` of the array valid; before this call they may be zeros."""

    def check(self) -> None:
        """Check that everything read from the array so far is as the file was when it was opened.

        Raises:
            UserError: the file was changed or became unreadable while it was in use.
        """
        if not all_unchanged(self.mapped, 0):
            self.verify()

    def verify(self) -> None:
        """Check like `check`, without relying on cached attributes of a network file system."""
        changes = [mapped.change(asks_server=True) for mapped in self.mapped]
        change = next((change for change in changes if change != FileChange.none), None)
        if change is not None:
            raise UserError(
                f"{self._name} {_CHANGES[change]} while it was in use: it had {len(self.array)} bytes; "
                "restore the file and start again"
            )


_CHANGES = {
    FileChange.lost: "became shorter or unreadable",
    FileChange.longer: "became longer",
    FileChange.modified: "was written to or touched",
    FileChange.rewritten: "was written to, and its modification time set back,",
}


class FilesInUse:
    """Check of the files that a loader reads, after each batch, all in one call.

    A system call for each file and batch would take longer than reading the batch, so a file's status is only
    read again after `STATUS_AGE_MS`. A later batch, or `verify` before a checkpoint is saved, finds a change
    that a batch has missed.
    """

    def __init__(self, files: Sequence[MappedBytes]) -> None:
        self._files = tuple(files)
        self._mapped = tuple(mapped for file in files for mapped in file.mapped)

    def check(self) -> None:
        """Check like `MappedBytes.check`."""
        if not all_unchanged(self._mapped, STATUS_AGE_MS):
            self.verify()

    def verify(self) -> None:
        """Check like `check`, but read the status now."""
        for file in self._files:
            file.verify()


class CachedBytes(MappedBytes):
    """File of an object store, whose blocks are cached in a local file when they are read.

    The cache file is sparse and has the full size, so it can be mapped; all processes of a machine share it.
    A second file has one byte for each block that marks whether the block is present. A block is marked after
    its bytes are on disk, so a marked block is complete even if the process or the machine is killed. The
    files' name is a digest of the URL and the store's version of the object: a changed object is read anew.

    The files stay for the next run. While they take more than half of the available disk space (their own and
    free space), files that no process has open are removed, the least recently used first. The files of a
    running process are never removed: the disk must hold everything that a run reads.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        """Open a file.

        Args:
            url: URL for fsspec; credentials and options come from fsspec's own configuration.
            folder: cache folder on a local disk; by default in the folder of temporary files.
        """
        self._url = url
        self._files, self._path = _file_system(url)
        info = _call_store(url, self._files.info, self._path)
        if info.get("size") is None or info.get("type", "file") != "file":
            raise UserError(f"cannot read {url}: it is not a file of known size")
        num_bytes = int(info["size"])
        self._object_version = self._find_version()
        folder = folder or Path(tempfile.gettempdir()) / f"megalite-blocks-{os.getuid()}"
        mark = f"{url}\n{num_bytes}\n{self._object_version}"
        name = folder / hashlib.sha256(mark.encode()).hexdigest()[:32]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(folder)
            self._in_use = _open_shared(Path(f"{name}.marks"))
            _remove_least_used(folder)
            self._bytes, marks = Path(f"{name}.bytes"), Path(f"{name}.marks")
            was_whole = _resize(self._bytes, num_bytes)
            _resize(marks, -(-num_bytes // BLOCK_BYTES))
            # All processes that read the object write to both.
            self.mapped = (
                MappedFile(os.fsencode(self._bytes), is_shared=True),
                MappedFile(os.fsencode(marks), writable=True, is_shared=True),
            )
        except OSError as error:
            raise UserError(
                f"cannot cache {url} in {folder}: {error.strerror}; set TMPDIR to another folder"
            ) from None
        self.array, self._marks = (mapped.array() for mapped in self.mapped)
        if not was_whole:  # the file is new, or lost marked bytes
            self._marks[:] = 0
        self._name = f"{url} (its copy {self._bytes})"

    def fetch(self, begin: int, end: int) -> None:
        """Read the missing blocks of this range, and check that the object has not changed.

        Raises:
            UserError: the store cannot be read, the object was changed, or this machine's disk is full.
        """
        if begin == end:
            return
        for first, last in self._missing(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, len(self.array))
            try:
                _write(self._bytes, start, self._request(start, stop))
            except OSError as error:
                raise UserError(
                    f"cannot cache {self._url} in {self._bytes}: {error.strerror}; set TMPDIR to another "
                    "folder"
                ) from None
            self._marks[first:last] = 1

    def _request(self, start: int, stop: int) -> bytes:
        """Return these bytes of the opened version of the object."""
        try:
            data = bytes(_call_store(self._url, self._files.cat_file, self._path, start=start, end=stop))
            is_same = self._find_version() == self._object_version
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise UserError(
                f"{self._url} was changed or removed while it was in use: restore it and start again"
            )
        if len(data) != stop - start:
            raise UserError(f"cannot read {self._url}: the store sent {len(data)} bytes, not {stop - start}")
        return data

    def _find_version(self) -> str:
        """Return the store's identifier of the object's version."""
        self._files.invalidate_cache(self._path)  # cached listings contain versions too
        return str(_call_store(self._url, self._files.ukey, self._path))

    def _missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield runs of missing blocks, each for one request."""
        absent = first + np.flatnonzero(self._marks[first:last] == 0)
        for run in np.split(absent, np.flatnonzero(np.diff(absent) != 1) + 1):
            for i in range(0, len(run), _MAX_REQUEST_BLOCKS):
                part = run[i : i + _MAX_REQUEST_BLOCKS]
                yield int(part[0]), int(part[-1]) + 1


def _check_owner(folder: Path) -> None:
    """Check that no other user can write to the folder or its link target: they could change tokens."""
    if any(status.st_uid != os.getuid() for status in (folder.lstat(), folder.stat())):
        raise PermissionError(errno.EPERM, "the folder belongs to another user")
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "other users may write to the folder")


def _call_store(url: str, call: Any, *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except FileNotFoundError:
        raise
    except Exception as error:  # each store's library has exceptions of its own
        raise UserError(f"cannot read {url}: {first_line(error)}") from None


def _file_system(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UserError(f"reading {url} needs a package that is not installed: pip install fsspec") from None
    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the store's own package is missing, or the store is unknown
        raise UserError(f"cannot read {url}: {error}") from None
    return files, path


def _open_shared(path: Path) -> BinaryIO:
    """Open or create a file; `_remove_least_used` does not remove it until it is closed."""
    while True:
        file = path.open("ab")
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                os.utime(path)
                return file
        except FileNotFoundError:
            pass
        file.close()  # another process removed it before it was locked


def _remove_least_used(folder: Path) -> None:
    """Remove objects that no process has open, while all objects take over half of the available space."""
    entries = []
    for marks in folder.glob("*.marks"):
        with suppress(FileNotFoundError):  # another process also removes it, or has not written yet
            num_bytes = marks.with_suffix(".bytes").stat().st_blocks * 512
            entries.append((marks.stat().st_mtime, marks, num_bytes))
    kept = sum(num_bytes for _, _, num_bytes in entries)
    limit = (kept + shutil.disk_usage(folder).free) // 2
    for _, marks, num_bytes in sorted(entries):
        if kept > limit and _remove_unused(marks):
            kept -= num_bytes


def _remove_unused(marks: Path) -> bool:
    """Remove an object's files, unless a process has them open."""
    with suppress(FileNotFoundError, BlockingIOError), marks.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        marks.with_suffix(".bytes").unlink(missing_ok=True)
        marks.unlink()
        return True
    return False


def _resize(path: Path, num_bytes: int) -> bool:
    """Truncate a file or extend it with zeros to this size; return whether it had this size."""
    with path.open("ab") as stream:
        had_size = stream.tell() == num_bytes
        if not had_size:
            stream.truncate(num_bytes)
    return had_size


def _write(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as stream:
        stream.seek(start)
        rest = memoryview(data)
        while rest:
            rest = rest[stream.write(rest) :]
        os.fsync(stream.fileno())
