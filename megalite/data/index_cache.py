"""Cache the indices of a run: one process builds the arrays, and all others map them.

An entry's name holds a digest of everything that its arrays depend on, so it is never stale. It is built
under a lock that the system releases when the process ends. Each file is written under a temporary name and
renamed. The description is renamed last and makes the entry complete. It holds a checksum of each array; an
entry that does not match is rebuilt. Ranks wait outside of collectives: they poll the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.storage import MappedBytes
from megalite.utils.files import no_follow, parse_json, replace_file
from megalite.utils.log import THIS_RANK, log
from megalite.utils.object_store import is_remote

Arrays = dict[str, npt.NDArray[Any]]

_CHECKSUM_BLOCK = 1 << 24
_CHECKSUM_THREADS = 4

MIN_ENTRIES = 2**20
"""A build of fewer entries takes milliseconds, and is only cached in a folder that the user names."""

_POLL_SECONDS = 0.1
_LOG_SECONDS = 30.0


class CacheKey(NamedTuple):
    """Key of a cache entry.

    Attributes:
        kind: kind of dataset, such as "GPTDataset"; part of the file names, as in Megatron-LM.
        split: name of the split, also part of the file names.
        values: everything that the arrays depend on, as JSON values.
        num_entries: approximate number of entries in the arrays.
        prefix: prefix of the corpus; the default folder is beside it. It is not in the digest, so a corpus
            can be moved with its cache.
    """

    kind: str
    split: str
    values: Mapping[str, object]
    num_entries: int
    prefix: str

    @property
    def name(self) -> str:
        """Return the prefix of the entry's file names."""
        text = json.dumps(self.values, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{self.kind}-{self.split}"


def digest_of(blocks: Iterable[npt.NDArray[Any]]) -> str:
    """Return the SHA-256 of the bytes of an array, which comes in blocks."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(np.ascontiguousarray(block).view(np.uint8).data)
    return digest.hexdigest()


def checksum(values: npt.NDArray[Any]) -> str:
    """Return a CRC-32 of an array's dtype, shape and bytes, fast enough to verify at each start.

    It is the CRC-32 of the CRC-32s of blocks, which threads compute in parallel.
    """
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    blocks = [raw[first : first + _CHECKSUM_BLOCK] for first in range(0, len(raw), _CHECKSUM_BLOCK)]
    with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:  # crc32 releases the GIL
        checksums = [f"{crc:08x}" for crc in pool.map(zlib.crc32, blocks)]
    return f"{zlib.crc32(' '.join([values.dtype.str, str(values.shape), *checksums]).encode()):08x}"


class CachedArrays(NamedTuple):
    """Arrays and the files that they are mapped from; no files if they were built in memory.

    After reading from the arrays, call `check` of each file.
    """

    arrays: Arrays
    files: tuple[MappedBytes, ...] = ()


class IndexCache:
    """Folder of arrays, each of which is built once.

    Args:
        folder: folder of the cache; by default PREFIX/cache/GPTDataset_indices of each corpus, as in
            Megatron-LM. By default, nothing is stored for a corpus in object storage.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)

    def get(self, key: CacheKey, names: Sequence[str], build: Callable[[], Arrays]) -> CachedArrays:
        """Return the arrays with these names: mapped from the cache, or built, stored and mapped.

        If the folder cannot be written or locked, they are built in memory, with a warning.
        """
        folder = self._folder
        if folder is None:
            if key.num_entries < MIN_ENTRIES or is_remote(key.prefix):
                return CachedArrays(build())
            folder = Path(key.prefix.removeprefix("file://")) / "cache" / f"{key.kind}_indices"
        entry = _Entry(folder, key, names)
        loaded = entry.load()
        return loaded if isinstance(loaded, CachedArrays) else _build_once(entry, build)


def cached_arrays(
    cache: IndexCache | None, key: CacheKey, names: Sequence[str], build: Callable[[], Arrays]
) -> CachedArrays:
    """Return the arrays with these names from a cache; without one, build them in memory."""
    return CachedArrays(build()) if cache is None else cache.get(key, names, build)


class _Entry:
    """Files of one key."""

    def __init__(self, folder: Path, key: CacheKey, names: Sequence[str]) -> None:
        self.folder = folder
        self.key = key
        self.paths = {name: folder / f"{key.name}-{name}.npy" for name in names}
        self.description = folder / f"{key.name}-description.txt"
        self.lock = folder / f"{key.name}.lock"

    def load(self) -> CachedArrays | str:
        """Map the arrays and verify their checksums; else return why not, or "" if there is no entry."""
        if not self.description.is_file():
            return ""
        try:
            described = parse_json(self.description.read_bytes())
            values = json.loads(json.dumps(self.key.values))  # as the description holds them
            if any(described[name] != value for name, value in values.items()):
                return f"{self.description.name} describes another index"
            pairs = {name: _map_array(path, described["arrays"][name]) for name, path in self.paths.items()}
        except (ValueError, OSError) as error:  # UserError is a ValueError
            return str(error)
        except (KeyError, TypeError):
            return f"{self.description.name} has no checksums of the arrays"
        arrays = {name: array for name, (array, _) in pairs.items()}
        return CachedArrays(arrays, tuple(file for _, file in pairs.values()))

    def save(self, arrays: Arrays) -> None:
        """Write the files and rename them, the description last."""
        self.description.unlink(missing_ok=True)
        for name, path in self.paths.items():
            with _replace_file(path) as file:
                np.save(file, arrays[name])
        described = {
            name: {"dtype": array.dtype.str, "shape": array.shape, "crc32": checksum(array)}
            for name, array in arrays.items()
        }
        text = json.dumps({"corpus": self.key.prefix, **self.key.values, "arrays": described}, indent=2)
        with _replace_file(self.description) as file:
            file.write(f"{text}\n".encode())


def _replace_file(path: Path) -> AbstractContextManager[BinaryIO]:
    """Open a new file that replaces `path`; its fixed name lets a build remove a killed build's file."""
    return replace_file(path, partial=path.with_name(f"{path.name}.partial"))


def _map_array(path: Path, described: dict[str, Any]) -> tuple[npt.NDArray[Any], MappedBytes]:
    """Map the array of a .npy file.

    The description gives dtype and shape: the checksum covers them, but not the file's own header.
    """
    dtype, shape = np.dtype(described["dtype"]), tuple(described["shape"])
    file = MappedBytes(str(path))
    if dtype.kind not in "iu":
        raise ValueError(f"the description gives {path.name} the type {dtype}")
    header_bytes = len(file.array) - dtype.itemsize * math.prod(shape)
    if header_bytes < 0:
        raise ValueError(f"{path.name} is truncated to {len(file.array)} bytes")
    if header_bytes % dtype.itemsize:
        raise ValueError(f"{path.name} has {len(file.array)} bytes, not the size that it was written with")
    array = file.array[header_bytes:].view(dtype).reshape(shape)
    found = checksum(array)
    file.release()
    if found != described["crc32"]:
        raise ValueError(f"{path.name} does not match its checksum")
    return array, file


def _build_once(entry: _Entry, build: Callable[[], Arrays]) -> CachedArrays:
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        with _locked(entry) as loaded:
            return loaded if isinstance(loaded, CachedArrays) else _build_and_save(entry, loaded, build)
    except OSError as error:
        _warn_not_kept(entry, error)
        return CachedArrays(build())


def _build_and_save(entry: _Entry, problem: str, build: Callable[[], Arrays]) -> CachedArrays:
    """Build and store the arrays; `problem` says why existing arrays cannot be used."""
    key, start = entry.key, time.monotonic()
    if problem:
        log.warning(
            "the index of the %s split of %s in %s is damaged and will be rebuilt: %s",
            *(key.split, key.prefix, entry.folder, problem),
            extra=THIS_RANK,
        )
        entry.description.unlink(missing_ok=True)  # waiting processes need not verify it again
    else:
        log.info(  # logged by the rank of each file system that builds
            "building the %s index of the %s split of %s", *(key.kind, key.split, key.prefix), extra=THIS_RANK
        )
    arrays = build()
    try:
        entry.save(arrays)
    except OSError as error:
        _warn_not_kept(entry, error)
        return CachedArrays(arrays)
    log.info("built in %.1f s and stored in %s", *(time.monotonic() - start, entry.folder), extra=THIS_RANK)
    entry.lock.unlink(missing_ok=True)  # a process that waits for this lock finds the entry complete
    kept = entry.load()
    return kept if isinstance(kept, CachedArrays) else CachedArrays(arrays)


def _warn_not_kept(entry: _Entry, error: OSError) -> None:
    log.warning(
        "the index of the %s split of %s cannot be stored in %s (%s), so every rank builds its own: "
        "pass a writable folder with --data-cache-path",
        *(entry.key.split, entry.key.prefix, entry.folder, error.strerror),
    )


@contextmanager
def _locked(entry: _Entry) -> Iterator[CachedArrays | str]:
    """Hold the entry's lock, and yield the result of `load`: another process may have built the entry."""
    with open(entry.lock, "ab", opener=no_follow) as file:
        logged_at = time.monotonic() - _LOG_SECONDS
        while not _try_lock(file.fileno()):
            if isinstance(loaded := entry.load(), CachedArrays):
                yield loaded
                return
            if time.monotonic() - logged_at >= _LOG_SECONDS:
                logged_at = time.monotonic()
                log.info("waiting for another process to build %s", entry.description)
            time.sleep(_POLL_SECONDS)
        yield entry.load()


def _try_lock(descriptor: int) -> bool:
    """Take the lock if it is free; the system releases it when the process ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


INTERVAL_SECONDS = 10.0
"""Seconds between two log lines; a shorter build logs no line."""


@contextmanager
def reported_progress(what: str, unit: str, total: int) -> Iterator[_index_builder.Progress]:
    """Log the progress of the build in this block, from a thread, on the rank that builds.

    Args:
        what: name of the object that is built.
        unit: name of the counted unit, in the plural.
        total: number of units at the end.
    """
    progress, done = _index_builder.Progress(), threading.Event()

    def report() -> None:
        start, last_count = time.monotonic(), 0
        while not done.wait(INTERVAL_SECONDS):
            count = progress.done
            rate = (count - last_count) / INTERVAL_SECONDS
            mean = count / (time.monotonic() - start)
            left = f", about {(total - count) / mean:.0f} s left" if mean > 0 else ""
            log.info(
                "building %s: %s of %s %s (%.0f%%), %s million/s%s",
                *(what, f"{count:,}", f"{total:,}", unit, 100 * count / max(1, total)),
                *(f"{rate / 1e6:.1f}", left),
                extra=THIS_RANK,
            )
            last_count = count

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        done.set()
        thread.join()
