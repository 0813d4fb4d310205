"""Arrays that one process builds and all others map: the indices of a run, kept from one start to the next.

An entry's name holds a digest of all that its arrays depend on, so that it is never stale. It is built under
a lock that the system drops with its holder, written aside, and renamed: its description last, which makes
the entry whole. The description holds a checksum of each array; an entry that does not match it is built
again. Ranks wait outside of any collective, and look at the folder rather than at each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.storage import MappedBytes, is_remote
from megalite.folders import no_follow, open_new
from megalite.log import THIS_RANK, log

Arrays = dict[str, npt.NDArray[Any]]

_CHECKSUM_BLOCK = 1 << 24
_CHECKSUM_THREADS = 4

MIN_ENTRIES = 2**20
"""Below so many entries a build takes milliseconds, and makes no folder unless the user names one."""

_POLL_SECONDS = 0.1
_TELL_SECONDS = 30.0


class CacheKey(NamedTuple):
    """What is asked of a cache.

    Attributes:
        kind: of the dataset, such as "GPTDataset"; part of the files' names, as in Megatron-LM.
        split: as `kind`.
        values: all that the arrays depend on, as JSON can hold it.
        num_entries: about as many as the arrays hold.
        prefix: of the corpus, beside which the default folder stands; no part of the digest, so that a corpus
            may be moved with its cache.
    """

    kind: str
    split: str
    values: Mapping[str, object]
    num_entries: int
    prefix: str

    @property
    def name(self) -> str:
        """What the entry's files begin with."""
        text = json.dumps(self.values, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{self.kind}-{self.split}"


def digest_of(values: npt.NDArray[Any]) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


def checksum(values: npt.NDArray[Any]) -> str:
    """Return a CRC-32 of an array's type, shape and bytes, fast enough to verify at each start.

    It is the CRC-32 of those of blocks, which threads compute side by side.
    """
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    blocks = [raw[first : first + _CHECKSUM_BLOCK] for first in range(0, len(raw), _CHECKSUM_BLOCK)]
    with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:  # crc32 releases the GIL
        words = [f"{crc:08x}" for crc in pool.map(zlib.crc32, blocks)]
    return f"{zlib.crc32(' '.join([values.dtype.str, str(values.shape), *words]).encode()):08x}"


class CachedArrays(NamedTuple):
    """Arrays, and the files that they are mapped from; no files where they were built in memory.

    After reading from the arrays call `check` of each file.
    """

    arrays: Arrays
    files: tuple[MappedBytes, ...] = ()


class IndexCache:
    """A folder of arrays, each built once.

    Args:
        folder: where the arrays are kept; by default each corpus has PREFIX/cache/GPTDataset_indices, as
            under Megatron-LM; for one in object storage nothing is kept.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)

    def get(self, key: CacheKey, names: Sequence[str], build: Callable[[], Arrays]) -> CachedArrays:
        """Return the arrays of these names: mapped if the cache has them whole, else built, kept and mapped.

        Where the folder cannot be written or locked they are built in memory, and a warning says so.
        """
        folder = self._folder
        if folder is None:
            if key.num_entries < MIN_ENTRIES or is_remote(key.prefix):
                return CachedArrays(build())
            folder = Path(key.prefix.removeprefix("file://")) / "cache" / f"{key.kind}_indices"
        entry = _Entry(folder, key, names)
        loaded = entry.load()
        return loaded if isinstance(loaded, CachedArrays) else _build_once(entry, build)


class _Entry:
    """The files of one key."""

    def __init__(self, folder: Path, key: CacheKey, names: Sequence[str]) -> None:
        self.folder = folder
        self.key = key
        self.paths = {name: folder / f"{key.name}-{name}.npy" for name in names}
        self.description = folder / f"{key.name}-description.txt"
        self.lock = folder / f"{key.name}.lock"

    def load(self) -> CachedArrays | str:
        """Map the arrays and verify their checksums; else return why not, empty if there is no entry."""
        if not self.description.is_file():
            return ""
        try:
            described = json.loads(self.description.read_bytes())
            if any(described[name] != value for name, value in json.loads(self._values()).items()):
                return f"{self.description.name} is of another index"
            pairs = {name: _map_array(path, described["arrays"][name]) for name, path in self.paths.items()}
        except (ValueError, RecursionError, OSError) as error:  # UserError is a ValueError
            return str(error)
        except (KeyError, TypeError):
            return f"{self.description.name} has no checksums of the arrays"
        arrays = {name: array for name, (array, _) in pairs.items()}
        return CachedArrays(arrays, tuple(file for _, file in pairs.values()))

    def save(self, arrays: Arrays) -> None:
        """Write the files and give them their names, the description's last."""
        self.description.unlink(missing_ok=True)
        for name, path in self.paths.items():
            with _written_aside(path) as file:
                np.save(file, arrays[name])
        described = {
            name: {"dtype": array.dtype.str, "shape": array.shape, "crc32": checksum(array)}
            for name, array in arrays.items()
        }
        text = json.dumps({"corpus": self.key.prefix, **self.key.values, "arrays": described}, indent=2)
        with _written_aside(self.description) as file:
            file.write(f"{text}\n".encode())

    def _values(self) -> str:
        """Return what the arrays depend on, as the description holds it."""
        return json.dumps(self.key.values)


def _map_array(path: Path, described: dict[str, Any]) -> tuple[npt.NDArray[Any], MappedBytes]:
    """Map the array of a .npy file.

    Type and shape are those of the description: the checksum covers them, and not the file's own header.

    Raises:
        ValueError: the file does not match its description.
    """
    dtype, shape = np.dtype(described["dtype"]), tuple(described["shape"])
    file = MappedBytes(str(path))
    if dtype.kind not in "iu":
        raise ValueError(f"the description gives {path.name} the type {dtype}")
    header_bytes = len(file.array) - dtype.itemsize * math.prod(shape)
    if header_bytes < 0:
        raise ValueError(f"{path.name} is truncated to {len(file.array)} bytes")
    if header_bytes % dtype.itemsize:
        raise ValueError(f"{path.name} has {len(file.array)} bytes, another size than it was written with")
    array = file.array[header_bytes:].view(dtype).reshape(shape)
    if checksum(array) != described["crc32"]:
        raise ValueError(f"{path.name} does not match its checksum")
    return array, file


@contextmanager
def _written_aside(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write, which takes the path's name if all goes well, and is removed if not."""
    aside = path.with_name(f"{path.name}.partial")
    try:
        with open_new(aside) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # renamed before it is on disk, it could be empty after a power cut
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _build_once(entry: _Entry, build: Callable[[], Arrays]) -> CachedArrays:
    """Build the entry, or wait for the process that does."""
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        with _locked(entry) as loaded:
            return loaded if isinstance(loaded, CachedArrays) else _build_and_save(entry, loaded, build)
    except OSError as error:
        _warn_not_kept(entry, error)
        return CachedArrays(build())


def _build_and_save(entry: _Entry, problem: str, build: Callable[[], Arrays]) -> CachedArrays:
    """Build the arrays and keep them; `problem` is what is wrong with those that are there."""
    key, start = entry.key, time.monotonic()
    if problem:
        log.warning(
            "the index of the %s split of %s that is kept in %s is damaged and is built again: %s",
            *(key.split, key.prefix, entry.folder, problem),
            extra=THIS_RANK,
        )
        entry.description.unlink(missing_ok=True)  # those who wait need not verify the damaged one again
    else:
        log.info(  # one rank a file system builds, whichever it is, and tells
            "building the %s index of the %s split of %s", *(key.kind, key.split, key.prefix), extra=THIS_RANK
        )
    arrays = build()
    try:
        entry.save(arrays)
    except OSError as error:
        _warn_not_kept(entry, error)
        return CachedArrays(arrays)
    log.info("built in %.1f s and kept in %s", *(time.monotonic() - start, entry.folder), extra=THIS_RANK)
    entry.lock.unlink(missing_ok=True)  # who holds this file by now finds the entry whole
    kept = entry.load()
    return kept if isinstance(kept, CachedArrays) else CachedArrays(arrays)


def _warn_not_kept(entry: _Entry, error: OSError) -> None:
    log.warning(
        "the index of the %s split of %s cannot be kept in %s (%s), so that every rank builds its own: "
        "give a folder that can be written by --data-cache-path",
        *(entry.key.split, entry.key.prefix, entry.folder, error.strerror),
    )


@contextmanager
def _locked(entry: _Entry) -> Iterator[CachedArrays | str]:
    """Hold the entry's lock, and give what `load` returns then: another process may have built it."""
    with open(entry.lock, "ab", opener=no_follow) as file:
        told = time.monotonic() - _TELL_SECONDS
        while not _try_lock(file.fileno()):
            if isinstance(loaded := entry.load(), CachedArrays):
                yield loaded
                return
            if time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                log.info("waiting for another process to build %s", entry.description)
            time.sleep(_POLL_SECONDS)
        yield entry.load()


def _try_lock(descriptor: int) -> bool:
    """Takes the lock if it is free; it ends with the process, however that ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
