"""Read a file's bytes as an array, mapped from disk or fetched from object storage.

A file must not change while it is read. If another process writes to a mapped file, the reader sees the new
bytes. If it truncates the file, or the disk fails, reading would end this process by SIGBUS; here the missing
bytes read as zeros. In each case `MappedBytes.check` raises: call it after reading.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import random
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megalite.config import DataConfig
from megalite.data._index_builder import FileChange, FileSet, MappedFile
from megalite.utils.errors import UserError
from megalite.utils.files import check_owner, no_follow, open_shared
from megalite.utils.object_store import is_remote, object_exists, open_object, read_object

GRANULE_BYTES = 512
"""Unit of the cache: a document is fetched with the rest of its first and last unit."""
MAX_REQUEST_BYTES = 16 << 20
CACHE_BYTES = DataConfig.data_cache_bytes
"""Limit of the cache unless --data-cache-bytes sets another."""
_NUM_FETCHERS = 32
"""Number of requests at a time: most of their time is the store's latency."""
_BYTES_IN_MEMORY = 256 << 20
"""Bytes that one call fetches before it writes them."""
_REGION_BYTES = 4 << 20
"""Bytes to remove at a time of a file in use."""
_DISK_BLOCK = 4096
_RANGED = "-ranges"

STATUS_AGE_MS = 20
"""Milliseconds for which a loader relies on a file's last known size and times."""


def open_bytes(path: str, cache_bytes: int = CACHE_BYTES) -> MappedBytes:
    """Open a file of this machine or of a store.

    Args:
        cache_bytes: limit of the bytes that the caches of all corpora take on this machine.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file cannot be read.
    """
    if is_remote(path):
        return CachedBytes(path, limit=cache_bytes)
    return MappedBytes(path.removeprefix("file://"))


def read_small(path: str) -> bytes:
    """Read a small file without caching it.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the file is on this machine and cannot be read.
        UserError: the file is in a store and cannot be read.
    """
    return read_object(path) if is_remote(path) else Path(path.removeprefix("file://")).read_bytes()


def exists(path: str) -> bool:
    """Return whether there is a file of this path or URL.

    Raises:
        UserError: the store cannot be asked.
    """
    return object_exists(path) if is_remote(path) else os.path.exists(path.removeprefix("file://"))


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
        self._name = self.local_path = path

    def crc32(self) -> int:
        """Return the CRC-32 of all bytes."""
        crc32 = 0
        for first in range(0, len(self.array), _REGION_BYTES):
            crc32 = zlib.crc32(self.array[first : first + _REGION_BYTES].data, crc32)
            self.release()
        return crc32

    def release(self) -> None:
        """Take the pages that were read out of this process's memory; reading maps them again."""
        for mapped in self.mapped:
            mapped.release()

    def fetch(self, begin: int, end: int) -> None:
        """Make bytes `begin` to `end` of the array valid; before this call they may be zeros."""

    def copy(self, begin: int, end: int) -> npt.NDArray[np.uint8] | None:
        """Return a copy of a range; None if a part of it is absent, or was removed meanwhile."""
        return self.array[begin:end].copy()

    def forget(self, begin: int, end: int) -> None:
        """Mark a range as absent if it can be fetched again."""

    def check(self) -> None:
        """Check that everything read from the array so far is as the file was when it was opened.

        Raises:
            UserError: the file was changed or became unreadable while it was in use.
        """
        if any(mapped.change() != FileChange.none for mapped in self.mapped):
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
        self._mapped = FileSet([mapped for file in files for mapped in file.mapped])

    def check(self) -> None:
        """Check like `MappedBytes.check`."""
        if not self._mapped.is_unchanged(STATUS_AGE_MS):
            self.verify()

    def verify(self) -> None:
        """Check like `check`, but read the status now."""
        for file in self._files:
            file.verify()


class CachedBytes(MappedBytes):
    """File of an object store, whose bytes are cached in a local file when they are read.

    The cache file is sparse and has the full size, so it can be mapped; all processes of a machine share it.
    A second file has one byte for each `GRANULE_BYTES`: 0 if they are absent, else a number that changes each
    time they are fetched. It is written after the bytes are on disk, so bytes that are marked are complete
    even if the process or the machine is killed. The files' name is a digest of the store, the URL and the
    store's version of the object: a changed object is read anew.

    The files stay for the next run. Together they take at most the limit, and at most half of the available
    disk space (their own and free space): before bytes are written, files that no process has open are
    removed, the least recently used first, and then regions of a .bin that is in use, at random. Files in use
    other than a .bin are not removed, and bytes that are written together are written even without space.
    """

    def __init__(self, url: str, folder: Path | None = None, limit: int = CACHE_BYTES) -> None:
        """Open a file.

        Args:
            folder: cache folder on a local disk; by default in the folder of temporary files.
            limit: bytes that all files in the folder may take.
        """
        self._url = url
        self._object = open_object(url)
        num_bytes = self._object.size
        self._folder = folder or Path(tempfile.gettempdir()) / f"megalite-blocks-{os.getuid()}"
        self._limit = limit
        mark = f"{self._object.store}\n{url}\n{num_bytes}\n{self._object.version}\n{GRANULE_BYTES}"
        # Only a .bin is always read in ranges, so that regions of it may be removed while it is in use.
        ending = _RANGED if url.endswith(".bin") else ""
        name = self._folder / f"{hashlib.sha256(mark.encode()).hexdigest()[:32]}{ending}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_owner(self._folder)
            self._in_use = open_shared(Path(f"{name}.marks"))
            with _space_for(self._folder, limit, 0):
                pass
            self._bytes, marks = Path(f"{name}.bytes"), Path(f"{name}.marks")
            was_whole = _resize(self._bytes, num_bytes)
            _resize(marks, -(-num_bytes // GRANULE_BYTES))
            # All processes that read the object write to both.
            self.mapped = (
                MappedFile(os.fsencode(self._bytes), is_shared=True),
                MappedFile(os.fsencode(marks), writable=True, is_shared=True),
            )
        except OSError as error:
            raise self._cannot_cache(error) from None
        self.array, self._marks = (mapped.array() for mapped in self.mapped)
        if not was_whole:  # the file is new, or lost marked bytes
            self._marks[:] = 0
        self.local_path = str(self._bytes)
        self._name = f"{url} (its copy {self._bytes})"

    def fetch(self, begin: int, end: int) -> None:
        """Read the missing bytes of this range, and check that the object has not changed.

        Raises:
            UserError: the store cannot be read, the object was changed, or this machine's disk is full.
        """
        fetch_missing({self: [(begin, end)]})

    def copy(self, begin: int, end: int) -> npt.NDArray[np.uint8] | None:
        marks = self._marks[begin // GRANULE_BYTES : -(-end // GRANULE_BYTES)]
        before = marks.copy()
        data = self.array[begin:end].copy()
        return data if begin == end or (before.all() and bool((marks == before).all())) else None

    def forget(self, begin: int, end: int) -> None:
        self._marks[begin // GRANULE_BYTES : -(-end // GRANULE_BYTES)] = 0

    def missing(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield what is absent of the ranges, each for one request; neighbours are joined."""
        absent = [np.empty(0, np.int64)]
        for begin, end in ranges:
            first = begin // GRANULE_BYTES
            absent.append(first + np.flatnonzero(self._marks[first : -(-end // GRANULE_BYTES)] == 0))
        granules = np.unique(np.concatenate(absent))
        most = max(1, MAX_REQUEST_BYTES // GRANULE_BYTES)
        for run in np.split(granules, np.flatnonzero(np.diff(granules) != 1) + 1):
            for i in range(0, len(run), most):
                part = run[i : i + most]
                stop = (int(part[-1]) + 1) * GRANULE_BYTES
                yield int(part[0]) * GRANULE_BYTES, min(stop, len(self.array))

    def request(self, start: int, stop: int) -> bytes:
        """Return these bytes of the opened version of the object; a short answer is requested once again."""
        data = b""
        for _ in range(2):
            try:
                data = self._object.read(start, stop)
            except FileNotFoundError:
                raise self._changed() from None
            if len(data) == stop - start:
                return data
        if not self._is_unchanged():
            raise self._changed()
        raise UserError(f"cannot read {self._url}: the store sent {len(data)} bytes, not {stop - start}")

    def keep(self, parts: Sequence[tuple[int, bytes]]) -> None:
        """Write fetched bytes to disk and mark them, if they are of the opened version."""
        if not self._is_unchanged():
            raise self._changed()
        try:
            with _space_for(self._folder, self._limit, sum(_bytes_on_disk(*part) for part in parts)):
                _write(self._bytes, parts)
                for start, data in parts:
                    marks = self._marks[start // GRANULE_BYTES : -(-(start + len(data)) // GRANULE_BYTES)]
                    marks[:] = secrets.randbelow(255) + 1
        except OSError as error:
            raise self._cannot_cache(error) from None

    def damaged(self, begin: int, end: int) -> UserError:
        """Return the error for bytes that have another checksum than the corpus's list of shards."""
        return UserError(
            f"{self._url}, bytes {begin} to {end}: the store sent other bytes than were listed, twice; "
            "upload the shard again, or list the shards again"
        )

    def _is_unchanged(self) -> bool:
        try:
            return self._object.is_unchanged()
        except FileNotFoundError:
            return False

    def _changed(self) -> UserError:
        return UserError(
            f"{self._url} was changed or removed while it was in use: restore it and start again"
        )

    def _cannot_cache(self, error: OSError) -> UserError:
        return UserError(
            f"cannot cache {self._url} in {self._folder}: {error.strerror}; set TMPDIR to another folder"
        )


def fetch_missing(wanted: Mapping[CachedBytes, Sequence[tuple[int, int]]]) -> None:
    """Fetch what the cache lacks of ranges of several files, with several requests at a time.

    Raises:
        UserError: see `CachedBytes.fetch`.
    """
    requests = [(file, *span) for file, ranges in wanted.items() for span in file.missing(ranges)]
    while requests:
        # Those of bounded size together: their bytes are in memory.
        sizes = np.cumsum([stop - start for _, start, stop in requests])
        count = max(1, int(np.searchsorted(sizes, _BYTES_IN_MEMORY)))
        now, requests = requests[:count], requests[count:]
        with ThreadPoolExecutor(min(_NUM_FETCHERS, len(now))) as pool:
            parts = list(pool.map(lambda each: each[0].request(each[1], each[2]), now))
        for file in dict.fromkeys(file for file, _, _ in now):
            file.keep([(start, data) for (of, start, _), data in zip(now, parts, strict=True) if of is file])


@contextmanager
def _space_for(folder: Path, limit: int, num_bytes: int) -> Iterator[None]:
    """Hold the folder's lock while bytes are written for which there is space.

    Processes write at the same time. All of them count in one file what they are about to write; no process
    writes while one removes bytes and counts again.
    """
    with open(folder / "lock", "ab", opener=no_follow) as lock:
        is_full = False
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _count(folder, limit, num_bytes, is_full):
                break
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_full = not _make_space(folder, limit, num_bytes)
        yield


def _count(folder: Path, limit: int, num_bytes: int, is_full: bool) -> bool:
    """Add bytes to the count of the folder if there is space for them, or none can be made (`is_full`)."""
    with open(folder / "size", "ab", opener=no_follow) as lock, open(folder / "size", "r+b") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        count = file.read(8)
        kept = int.from_bytes(count, "little")
        fits = len(count) == 8 and kept + num_bytes <= _effective(folder, limit, kept)
        if fits or is_full:
            file.seek(0)
            file.write((kept + num_bytes).to_bytes(8, "little"))
            file.flush()
        return fits or is_full


def _effective(folder: Path, limit: int, kept: int) -> int:
    """Return the limit, or half of the available disk space if this is less."""
    return min(limit, (kept + shutil.disk_usage(folder).free) // 2)


def _make_space(folder: Path, limit: int, num_bytes: int) -> bool:
    """Remove bytes until there is space for others, and count what is left; return whether there is space."""
    entries = []
    for marks in folder.glob("*.marks"):
        with suppress(FileNotFoundError):  # another process also removes it, or has not written yet
            size = marks.with_suffix(".bytes").stat().st_blocks * 512
            entries.append((marks.stat().st_mtime, marks, size))
    kept = sum(size for _, _, size in entries)
    limit = _effective(folder, limit, kept) - num_bytes
    in_use = []
    for _, marks, size in sorted(entries):
        if kept > limit and _remove_unused(marks):
            kept -= size
        elif marks.stem.endswith(_RANGED):
            in_use.append(marks)
    if kept > limit and in_use and hasattr(mmap, "MADV_REMOVE"):
        # Some more, so that the next ones need not count again; but no more than the new bytes need if the
        # files that must stay are too large: others read the regions.
        excess = kept - max(0, limit - limit // 10)
        removable = sum(size for _, marks, size in entries if marks in in_use)
        kept -= _remove_regions(in_use, excess if excess <= removable else num_bytes)
    (folder / "size").write_bytes(kept.to_bytes(8, "little"))
    return kept <= limit


def _remove_regions(in_use: Sequence[Path], excess: int) -> int:
    """Remove random regions of files in use until `excess` bytes are free; return how many are.

    A region is marked as absent first: a reader that copies it meanwhile finds the mark changed.
    """
    random.shuffle(
        regions := [
            (marks, start)
            for marks in in_use
            for start in range(0, marks.with_suffix(".bytes").stat().st_size, _REGION_BYTES)
        ]
    )
    removed = 0
    for marks, start in regions:
        if removed >= excess:
            break
        path = marks.with_suffix(".bytes")
        before, size = path.stat().st_blocks, path.stat().st_size
        stop = min(start + _REGION_BYTES, size)
        first, last = start // GRANULE_BYTES, -(-stop // GRANULE_BYTES)
        with marks.open("r+b") as file, path.open("r+b") as data:
            file.seek(first)
            file.write(bytes(last - first))
            file.flush()
            with mmap.mmap(data.fileno(), stop - start, offset=start) as region:
                region.madvise(mmap.MADV_REMOVE)
        removed += (before - path.stat().st_blocks) * 512
    return removed


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


def _bytes_on_disk(start: int, data: bytes) -> int:
    """Return how many bytes of disk a part may take: whole blocks of the file system."""
    return (-(-(start + len(data)) // _DISK_BLOCK) - start // _DISK_BLOCK) * _DISK_BLOCK


def _write(path: Path, parts: Sequence[tuple[int, bytes]]) -> None:
    with path.open("r+b", buffering=0) as stream:
        for start, data in parts:
            stream.seek(start)
            rest = memoryview(data)
            while rest:
                rest = rest[stream.write(rest) :]
        os.fsync(stream.fileno())
