"""Arrays that one process builds and all others map: the indices of a run, kept from one start to the next.

An entry's name holds a digest of all that its arrays depend on, so that it is never stale. It is built under
a lock that the system drops with its holder, written aside, and renamed: its description last, which makes
the entry whole. Ranks wait outside of any collective, and look at the folder rather than at each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.storage import is_remote
from megalite.log import THIS_RANK, log

Arrays = dict[str, npt.NDArray[Any]]

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


class IndexCache:
    """A folder of arrays, each built once.

    Args:
        folder: where the arrays are kept; by default each corpus has PREFIX/cache/GPTDataset_indices, as
            under Megatron-LM; for one in object storage nothing is kept.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)

    def get(self, key: CacheKey, names: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
        """The arrays of these names: mapped if the cache has them, else built, kept and mapped.

        Where the folder cannot be written or locked they are built in memory, and a warning says so.
        """
        folder = self._folder
        if folder is None:
            if key.num_entries < MIN_ENTRIES or is_remote(key.prefix):
                return build()
            folder = Path(key.prefix.removeprefix("file://")) / "cache" / f"{key.kind}_indices"
        entry = _Entry(folder, key, names)
        arrays = entry.load()
        return _build_once(entry, build) if arrays is None else arrays


class _Entry:
    """The files of one key."""

    def __init__(self, folder: Path, key: CacheKey, names: Sequence[str]) -> None:
        self.folder = folder
        self.key = key
        self.paths = {name: folder / f"{key.name}-{name}.npy" for name in names}
        self.description = folder / f"{key.name}-description.txt"
        self.lock = folder / f"{key.name}.lock"

    def load(self) -> Arrays | None:
        """Maps the arrays; None if the entry is not there, or not whole."""
        if not self.description.is_file():
            return None
        try:
            arrays = {name: np.load(path, mmap_mode="r") for name, path in self.paths.items()}
        except (OSError, ValueError) as error:
            log.warning("%s is damaged, and is built again: %s", self.description, error)
            return None
        return {name: np.asarray(array) for name, array in arrays.items()}

    def save(self, arrays: Arrays) -> None:
        """Writes the files and gives them their names, the description's last."""
        self.description.unlink(missing_ok=True)
        for name, path in self.paths.items():
            with _written_aside(path) as file:
                np.save(file, arrays[name])
        text = json.dumps({"corpus": self.key.prefix, **self.key.values}, indent=2)
        with _written_aside(self.description) as file:
            file.write(f"{text}\n".encode())


@contextmanager
def _written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the path's name if all goes well, and is removed if not."""
    aside = path.with_name(f"{path.name}.partial")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # renamed before it is on disk, it could be empty after a power cut
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _build_once(entry: _Entry, build: Callable[[], Arrays]) -> Arrays:
    """Builds the entry, or waits for the process that does."""
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        with _locked(entry) as arrays:
            return _build_and_save(entry, build) if arrays is None else arrays
    except OSError as error:
        _warn_not_kept(entry, error)
        return build()


def _build_and_save(entry: _Entry, build: Callable[[], Arrays]) -> Arrays:
    key, start = entry.key, time.monotonic()
    log.info(  # one rank a file system builds, whichever it is, and tells
        "building the %s index of the %s split of %s", *(key.kind, key.split, key.prefix), extra=THIS_RANK
    )
    arrays = build()
    try:
        entry.save(arrays)
    except OSError as error:
        _warn_not_kept(entry, error)
        return arrays
    log.info("built in %.1f s and kept in %s", *(time.monotonic() - start, entry.folder), extra=THIS_RANK)
    entry.lock.unlink(missing_ok=True)  # who holds this file by now finds the entry whole
    return entry.load() or arrays


def _warn_not_kept(entry: _Entry, error: OSError) -> None:
    log.warning(
        "the index of the %s split of %s cannot be kept in %s (%s), so that every rank builds its own: "
        "give a folder that can be written by --data-cache-path",
        *(entry.key.split, entry.key.prefix, entry.folder, error.strerror),
    )


@contextmanager
def _locked(entry: _Entry) -> Iterator[Arrays | None]:
    """Holds the entry's lock, and gives its arrays once another process has built them, else None."""
    with entry.lock.open("a") as file:
        told = time.monotonic() - _TELL_SECONDS
        while not _try_lock(file.fileno()):
            if (arrays := entry.load()) is not None:
                yield arrays
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
