"""Download what the ranks of a node need of stored checkpoints, and verify it.

    STAGE/bucket%2Frun/.load.91c4…/iter_0000010/dp_0.safetensors         sparse, with holes for other blocks
    STAGE/bucket%2Frun/.load.91c4…/iter_0000010/.dp_0.safetensors.lock   a byte for each block that is there

The index of a checkpoint that a run has uploaded has digests of each file's blocks, so that nodes can verify
the blocks that they need. Other files, such as those of a folder that was copied to the store, are
downloaded whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from megalite.checkpoint.manifest import SUMS, TEXTS, DamagedCheckpoint, Manifest, TensorBytes, digests_in
from megalite.utils.files import check_owner, no_follow, open_shared, parse_json, partial_name
from megalite.utils.object_store import ObjectFolder

_LOADED = ".load."
"""Begins the name of a folder of files that are being loaded."""
_NUM_REQUESTS = 8
"""Files, and parts of files, that travel at a time."""
_MAX_REQUEST_BYTES = 16 << 20
_LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins


class Download:
    """Files of stored checkpoints in a folder of this node, which its processes fill together; a context.

    Args:
        objects: the run in the store.
        stage: the run's folder on this node.
        token: the same text in all processes that share the files.

    Raises:
        OSError: the constructor cannot write to the stage; a method cannot read the store or write a file.
    """

    def __init__(self, objects: ObjectFolder, stage: Path, token: str) -> None:
        self._objects = objects
        self.folder = stage / f"{_LOADED}{token}"
        make_stage(stage)
        _remove_abandoned(stage)
        # Processes hold the lock while they need the folder: the last one deletes it.
        self._lock_file = Path(f"{self.folder}.lock")
        self._lock = open_shared(self._lock_file)
        self.folder.mkdir(exist_ok=True)

    def __enter__(self) -> Download:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url_of(self, checkpoint: Path) -> str:
        """Return the URL of a checkpoint in the folder."""
        return f"{self._objects.url}/{checkpoint.name}"

    def fetch_texts(self, name: str) -> None:
        """Download the text files of a checkpoint; one that is not there remains missing."""
        digests: Mapping[str, str | None] = {}
        with suppress(FileNotFoundError):
            self.fetch_whole(name, {SUMS: None})
            digests = digests_in(self.folder / name)
        for text in TEXTS:
            with suppress(FileNotFoundError):
                self.fetch_whole(name, {text: digests.get(text)})

    def problems_of(self, manifest: Manifest) -> list[str]:
        """Return the problems of tensor files that the store does not have, or whose size is wrong."""
        name, problems = manifest.folder.name, []
        found = self._objects.list_all(name)
        for file in manifest.files:
            size, blocks = found.get(f"{name}/{file}"), manifest.blocks.get(file)
            if size is None:
                problems.append(f"{file} is missing")
            elif blocks is not None and -(-size // manifest.block_bytes) != len(blocks):
                problems.append(f"{file} has another size than {SUMS} says")
        return problems

    def fetch(self, manifest: Manifest, wanted: Mapping[str, Iterable[TensorBytes]]) -> None:
        """Download bytes of tensor files that are not here yet, in whole blocks; what is here is verified.

        Args:
            wanted: bytes to download, by file.

        Raises:
            DamagedCheckpoint: a file is missing, or has other contents, also in a second download.
        """
        folder = self.folder / manifest.folder.name
        folder.mkdir(exist_ok=True)
        whole = {file: manifest.digests[file] for file in wanted if file not in manifest.blocks}
        with (
            ThreadPoolExecutor(_NUM_REQUESTS, "download-files") as files,
            ThreadPoolExecutor(_NUM_REQUESTS, "download-blocks") as requests,
        ):

            def fetch(file: str, waits: bool) -> bool:
                blocks = _Blocks(manifest, file, folder, self._objects, requests)
                with _locked(folder, file, waits) as lock:
                    if lock is not None:
                        blocks.fetch(lock, wanted[file])
                    return lock is not None

            try:
                self.fetch_whole(folder.name, whole)
                _fetch_each(wanted.keys() - whole.keys(), fetch, files)
            except FileNotFoundError as error:
                name = str(error.filename).rpartition("/")[2]
                raise DamagedCheckpoint(manifest.title, [f"{name} is missing"]) from None

    def fetch_whole(self, name: str, files: Mapping[str, str | None]) -> None:
        """Download files of a checkpoint that are not here yet; each is downloaded by one process.

        Args:
            files: names, each with its SHA-256 if it is to be verified.

        Raises:
            DamagedCheckpoint: a file has other contents, also in a second download.
            FileNotFoundError: a file is missing.
        """
        folder = self.folder / name
        folder.mkdir(exist_ok=True)

        def fetch(file: str, waits: bool) -> bool:
            with _locked(folder, file, waits) as lock:
                if lock is not None and not (folder / file).exists():
                    partial = partial_name(folder / file)
                    self._download(folder, file, files[file], partial)
                    partial.rename(folder / file)
                return lock is not None

        _fetch_each(files, fetch)

    def close(self) -> None:
        """Delete the files, if no other process needs them any more."""
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock_file.unlink()
        self._lock.close()

    def _download(self, folder: Path, file: str, digest: str | None, target: Path) -> None:
        """Download a file; wrong bytes are read again once."""
        sources = [file, file, *([replacing_name(file, digest)] if digest and file in TEXTS else [])]
        problem: Exception | None = None
        for source in sources:
            try:
                found = self._objects.download(f"{folder.name}/{source}", target)
            except FileNotFoundError as error:
                problem = problem or error
                continue
            if digest in (None, found):
                return
            problem = DamagedCheckpoint(self.url_of(folder), [_other_contents(file)])
        assert problem is not None
        raise problem


class _Blocks:
    """Blocks of a tensor file of which this node downloads some.

    Args:
        folder: the checkpoint's folder on this node.
        requests: threads in which parts of the file travel.
    """

    def __init__(
        self, manifest: Manifest, file: str, folder: Path, objects: ObjectFolder, requests: Executor
    ) -> None:
        self._file, self._target = file, folder / file
        self._title, self._digests = manifest.title, manifest.blocks[file]
        self._size = manifest.block_bytes
        self._objects, self._object, self._requests = objects, f"{folder.name}/{file}", requests

    def fetch(self, lock: BinaryIO, wanted: Iterable[TensorBytes]) -> None:
        """Download the blocks of the header and of these bytes that are not here yet.

        Args:
            lock: the file's lock, whose bytes mark the blocks that are here.
        """
        lock.seek(0)
        here = bytearray(lock.read().ljust(len(self._digests), b"\0"))
        with open(self._target, "ab", opener=no_follow):  # create the file
            pass
        with open(self._target, "r+b", buffering=0, opener=no_follow) as target:
            self._fetch(target, self._numbers(0, _LENGTH_BYTES), here)
            begin = _LENGTH_BYTES + int.from_bytes(os.pread(target.fileno(), _LENGTH_BYTES, 0), "little")
            self._fetch(target, self._numbers(0, begin), here)
            offsets = self._offsets(os.pread(target.fileno(), begin, 0)[_LENGTH_BYTES:])
            end = begin + max((stop for _, stop in offsets.values()), default=0)
            if self._numbers(0, end).stop != len(self._digests):
                raise self._damaged("its header is damaged")
            numbers = set[int]()
            for name, first, stop in wanted:
                if name not in offsets:
                    raise self._damaged(f"{name} is not in it")
                start, last = offsets[name]
                numbers.update(self._numbers(begin + start + first, begin + min(start + stop, last)))
            target.truncate(end)
            self._fetch(target, sorted(numbers), here)
        lock.truncate(0)
        lock.write(here)
        lock.flush()

    def _numbers(self, begin: int, end: int) -> range:
        numbers = range(begin // self._size, -(-end // self._size))
        if numbers.stop > len(self._digests):
            raise self._damaged("its header is damaged")
        return numbers

    def _fetch(self, target: BinaryIO, numbers: Iterable[int], here: bytearray) -> None:
        """Download those of the blocks that are not here, and mark them."""
        most = max(1, _MAX_REQUEST_BYTES // self._size)
        parts: list[range] = []
        for number in (each for each in numbers if not here[each]):
            if parts and parts[-1].stop == number and len(parts[-1]) < most:
                parts[-1] = range(parts[-1].start, number + 1)
            else:
                parts.append(range(number, number + 1))

        def download(part: range) -> None:
            os.pwrite(target.fileno(), self._read(part), part.start * self._size)

        for part, _ in zip(parts, self._requests.map(download, parts), strict=True):
            here[part.start : part.stop] = b"\1" * len(part)

    def _read(self, part: range) -> bytes:
        """Return verified blocks; wrong bytes are read again once."""
        for _ in range(2):
            content = self._objects.read_part(self._object, part.start * self._size, part.stop * self._size)
            blocks = [content[at : at + self._size] for at in range(0, len(content), self._size)]
            if [sha256(block).hexdigest() for block in blocks] == self._digests[part.start : part.stop]:
                return content
        raise DamagedCheckpoint(self._title, [_other_contents(self._file)])

    def _offsets(self, header: bytes) -> dict[str, tuple[int, int]]:
        """Return where the elements of each tensor begin and end after the header, in bytes."""
        try:
            tensors = parse_json(header.decode())
            offsets = {
                name: tuple(entry["data_offsets"])
                for name, entry in tensors.items()
                if name != "__metadata__"
            }
            if not all(
                len(span) == 2 and all(type(at) is int and at >= 0 for at in span)
                for span in offsets.values()
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._damaged("its header is damaged") from None
        return offsets

    def _damaged(self, problem: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self._title, [f"{self._file}: {problem}"])


def make_stage(stage: Path) -> None:
    """Create the folder of a run on this node; no other user may be able to change what is in it.

    Raises:
        PermissionError: another user owns it, or may write to it.
    """
    stage.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_owner(stage.parent)
    stage.mkdir(exist_ok=True)


def replacing_name(text: str, digest: str) -> str:
    """Return the name of a text file while it replaces that of an earlier save of the same iteration."""
    return f"{text}.{digest[:16]}"


def _other_contents(file: str) -> str:
    return f"{file} has other contents than {SUMS} says"


@contextmanager
def _locked(folder: Path, file: str, waits: bool) -> Iterator[BinaryIO | None]:
    """Yield a file's lock, or None if another process has it and this one does not wait for it."""
    with open(folder / f".{file}.lock", "a+b", opener=no_follow) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        yield lock


def _fetch_each(
    files: Iterable[str], fetch: Callable[[str, bool], bool], threads: Executor | None = None
) -> None:
    """Fetch files: first those that no other process downloads now; processes begin with different files.

    Args:
        fetch: fetches a file; returns False if another process is at it, unless it may wait for that.
    """
    left = sorted(files)
    first = os.getpid() % max(len(left), 1)
    left = [*left[first:], *left[:first]]
    apply = map if threads is None else threads.map
    for waits in (False, True):
        done = apply(fetch, left, [waits] * len(left))
        left = [file for file, is_done in zip(left, done, strict=True) if not is_done]


def _remove_abandoned(stage: Path) -> None:
    """Delete the folders of processes that were killed."""
    for lock in stage.glob(f"{_LOADED}*.lock"):
        with suppress(OSError), open(lock, "ab", opener=no_follow) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(str(lock).removesuffix(".lock"), ignore_errors=True)
            lock.unlink()
