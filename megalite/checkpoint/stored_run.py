"""Keep a run's checkpoints in object storage; they are written and read through a folder of each node.

    s3://bucket/run/iter_0000010/SHA256SUMS   put last: a checkpoint that has it is complete
    s3://bucket/run/unaudited_iter_0000020    marks a checkpoint that a later audit has made doubtful
    s3://bucket/run/latest                    as in a folder (see `folder`), and so is lease.N (see `lease`)

    STAGE/bucket%2Frun/.iter_0000020.5f3a….partial   files that this node's ranks have written and now upload
    STAGE/bucket%2Frun/.load.91c4…/iter_0000010/     files that this node's ranks load

Objects cannot be renamed, so the names of tensor files are new in each save, and a checkpoint that replaces
one of the same iteration takes over with its text files. What a killed run has uploaded without SHA256SUMS is
deleted after the next save. The parts of a file that it was uploading are not visible: only a rule of the
bucket can delete them (AbortIncompleteMultipartUpload).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.folder import (
    LATEST,
    NAME,
    Listing,
    checkpoints_named,
    listing_of,
    name_of,
    outdated,
    read_latest_from,
)
from megalite.checkpoint.manifest import SUMS, TEXTS, DamagedCheckpoint, digests_in, read_manifest
from megalite.frontends.tool_parser import local_path
from megalite.utils.errors import UserError
from megalite.utils.files import check_owner, no_follow, partial_name
from megalite.utils.log import log
from megalite.utils.object_store import ObjectFolder, is_s3, local_folder

_LOADED = ".load."
"""Begins the name of a folder of files that are being loaded."""
_WITHDRAWN = "unaudited_"
"""Begins the name of an object, followed by that of a checkpoint that a later audit has made doubtful."""


@dataclass(frozen=True)
class StoredRun:
    """Checkpoints of a run in object storage.

    Every method raises an `OSError` with the URL if the store cannot be reached.

    Attributes:
        stage: folder of this node for files that are being uploaded or loaded.
    """

    objects: ObjectFolder
    stage: Path

    @staticmethod
    def at(path: str | Path, stage: str | None = None) -> StoredRun | None:
        """Return the run of a URL; None for a path.

        Raises:
            UserError: the package for object storage is missing, or the URL has no bucket.
        """
        url = str(path)
        return StoredRun(ObjectFolder(url), local_folder(url, stage)) if is_s3(url) else None

    @property
    def url(self) -> str:
        return self.objects.url

    def __str__(self) -> str:
        return self.url

    def iterations(self) -> dict[int, str]:
        """Return the names of the checkpoints, complete or not, by iteration and oldest first."""
        folders, objects = self.objects.list_top()
        return checkpoints_named(name for name in folders if f"{_WITHDRAWN}{name}" not in objects)

    def listing(self) -> Listing:
        """Return the checkpoints in the order in which to try to load them, as `list_checkpoints` does."""
        latest = read_latest_from(lambda: self.objects.read(LATEST).decode().strip())
        return listing_of(self.iterations(), *latest, f"{self.url}/{LATEST}")

    def has_object(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.objects.read(name)
        except FileNotFoundError:
            return False
        return True

    def make_stage(self, partial: Path) -> None:
        """Create a folder in the stage, which other users must not be able to change; other ranks do so too.

        Folders of earlier saves are deleted: their runs were killed, because one run at a time saves here.

        Raises:
            OSError: it cannot be created, or the stage belongs to another user.
        """
        _make_stage(self.stage)
        for old in self.stage.glob(".iter_*.partial"):
            if old != partial:
                shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(exist_ok=True)

    def publish(self, folder: Path, name: str, files: Collection[str], check: Callable[[], None]) -> None:
        """Upload the text files of a checkpoint whose tensor files are in the store; it is then the latest.

        Args:
            folder: folder of the text files.
            name: name of the checkpoint.
            files: names of its tensor files. Others, of an earlier save of the same iteration, are deleted.
            check: raises an error if another run has taken over.
        """
        check()
        digests = digests_in(folder)
        if f"{name}/{SUMS}" in self.objects.list_all(name):
            # Until this SHA256SUMS is there, readers need the earlier save's text files.
            for text in TEXTS:
                self.objects.upload(f"{name}/{_replacing(text, digests[text])}", folder / text)
            self.objects.upload(f"{name}/{SUMS}", folder / SUMS)
        for text in (*TEXTS, SUMS):
            self.objects.upload(f"{name}/{text}", folder / text)
        check()
        self.objects.delete([f"{_WITHDRAWN}{name}"])
        self.objects.write(LATEST, f"{name}\n".encode())
        known = {f"{name}/{file}" for file in (*files, *TEXTS, SUMS)}
        self.objects.delete(self.objects.list_all(name).keys() - known)

    def discard(self, name: str, token: str) -> None:
        """Delete the tensor files of a save that failed, whose names have this token."""
        self.objects.delete([each for each in self.objects.list_all(name) if token in each])

    def prune(
        self, newest: int, keep_last: int | None, keep_every: int | None, confirmed: int | None
    ) -> list[str]:
        """Delete the checkpoints that `outdated` returns, and return their names."""
        found = self.iterations()
        deleted = []
        for iteration in outdated(found, newest, keep_last, keep_every, confirmed):
            name = found[iteration]
            self.objects.delete([f"{name}/{SUMS}"])  # first what makes it complete
            if objects := self.objects.list_all(name):  # some stores list folders that are empty
                self.objects.delete(objects)
                deleted.append(name)
        return deleted

    def remove_incomplete(self, newest: int) -> None:
        """Delete what earlier runs have uploaded of checkpoints that never became complete."""
        for iteration, name in self.iterations().items():
            if iteration != newest:
                objects = self.objects.list_all(name)
                if f"{name}/{SUMS}" not in objects:
                    self.objects.delete(objects)

    def withdraw(self, after: int, until: int) -> tuple[list[str], str | None]:
        """Make the checkpoints of the iterations (after, until] unavailable, and choose the latest again.

        Returns:
            The names of the objects that mark them, and the name of the newest checkpoint that remains.
        """
        found = self.iterations()
        marks = [f"{_WITHDRAWN}{name}" for each, name in found.items() if after < each <= until]
        for mark in marks:
            self.objects.write(mark, b"")
        good = max((iteration for iteration in found if iteration <= after), default=None)
        if marks and good is not None:
            self.objects.write(LATEST, f"{name_of(good)}\n".encode())
        elif marks:
            self.objects.delete([LATEST])
        return marks, None if good is None else name_of(good)


class Download:
    """Files of stored checkpoints in a folder of this node, which its processes fill together; a context.

    Args:
        token: the same text in all processes that share the files.

    Raises:
        OSError: the constructor cannot write to the stage; a method cannot read the store or write a file.
    """

    def __init__(self, run: StoredRun, token: str) -> None:
        self._run = run
        self.folder = run.stage / f"{_LOADED}{token}"
        _make_stage(run.stage)
        self._remove_abandoned()
        # Processes hold the lock while they need the folder: the last one deletes it.
        self._lock_file = Path(f"{self.folder}.lock")
        self._lock = open(self._lock_file, "ab", opener=no_follow)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.folder.mkdir(exist_ok=True)

    def __enter__(self) -> Download:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url_of(self, checkpoint: Path) -> str:
        """Return the URL of a checkpoint in the folder."""
        return f"{self._run.url}/{checkpoint.name}"

    def fetch_texts(self, name: str) -> None:
        """Download the text files of a checkpoint; one that is not there remains missing."""
        digests: Mapping[str, str | None] = {}
        with suppress(FileNotFoundError):
            self.fetch(name, {SUMS: None})
            digests = digests_in(self.folder / name)
        for text in TEXTS:
            with suppress(FileNotFoundError):
                self.fetch(name, {text: digests.get(text)})

    def fetch(self, name: str, files: Mapping[str, str | None]) -> None:
        """Download files of a checkpoint that are not here yet; each is downloaded by one process.

        Args:
            files: names, each with its SHA-256 if it is to be verified.

        Raises:
            DamagedCheckpoint: a file has other contents, also in a second download.
        """
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        first = os.getpid() % max(len(files), 1)  # so that processes begin with different files
        left = [*sorted(files)[first:], *sorted(files)[:first]]
        for waits in (False, True):  # first those that nobody else downloads now
            left = [file for file in left if not self._fetch(folder, file, files[file], waits)]

    def close(self) -> None:
        """Delete the files, if no other process needs them any more."""
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock_file.unlink()
        self._lock.close()

    def _fetch(self, folder: Path, file: str, digest: str | None, waits: bool) -> bool:
        """Download a file; return False if another process is at it, unless this one waits for that."""
        with open(folder / f".{file}.lock", "ab", opener=no_follow) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            if not (folder / file).exists():
                partial = partial_name(folder / file)
                self._download(folder, file, digest, partial)
                partial.rename(folder / file)
        return True

    def _download(self, folder: Path, file: str, digest: str | None, target: Path) -> None:
        """Download a file; wrong bytes are read again once."""
        sources = [file, file, *([_replacing(file, digest)] if digest and file in TEXTS else [])]
        problem: Exception | None = None
        for source in sources:
            try:
                found = self._run.objects.download(f"{folder.name}/{source}", target)
            except FileNotFoundError as error:
                problem = problem or error
                continue
            if digest in (None, found):
                return
            what = f"{self._run.url}/{folder.name}/{file} has other contents than {SUMS} says"
            problem = DamagedCheckpoint(folder, [what])
        assert problem is not None
        raise problem

    def _remove_abandoned(self) -> None:
        """Delete the folders of processes that were killed."""
        for lock in self._run.stage.glob(f"{_LOADED}*.lock"):
            with suppress(OSError), open(lock, "ab", opener=no_follow) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(str(lock).removesuffix(".lock"), ignore_errors=True)
                lock.unlink()


def _replacing(text: str, digest: str) -> str:
    """Return the name of a text file while it replaces that of an earlier save of the same iteration."""
    return f"{text}.{digest[:16]}"


def run_at(text: str) -> Path | StoredRun:
    """Parse the path or URL of a run's checkpoints; an argparse `type`."""
    return StoredRun.at(text) or local_path(text)


@contextmanager
def local_copy(folder: Path | StoredRun, iteration: int | None = None, last: int = 1) -> Iterator[Path]:
    """Yield a folder with verified copies of stored checkpoints until the block ends; yield a path as it is.

    Args:
        iteration: the checkpoint to copy; by default the latest.
        last: how many to copy, the latest and those before it.

    Raises:
        UserError: there are none, they are damaged, or the store cannot be read.
    """
    if isinstance(folder, Path):
        yield folder
        return
    above, _, name = folder.url.rpartition("/")
    if match := NAME.fullmatch(name):
        folder, iteration = StoredRun(ObjectFolder(above), folder.stage), int(match[1])
    try:
        listing = folder.listing()
        if not listing.names:
            raise UserError(f"{folder} holds no checkpoint of megalite")
        names = listing.names[:last] if iteration is None else (name_of(iteration),)
        if names[0] not in listing.names:
            raise UserError(f"{folder} has no {names[0]}: it has {', '.join(sorted(listing.names))}")
        with Download(folder, secrets.token_hex(8)) as download:
            for name in names:
                log.info("downloading %s/%s", folder, name)
                download.fetch_texts(name)
                manifest = read_manifest(download.folder / name)
                download.fetch(name, {each: manifest.digests[each] for each in manifest.files})
            yield download.folder
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror}") from None


def _make_stage(stage: Path) -> None:
    """Create the stage; no other user may be able to change what is in it."""
    stage.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_owner(stage.parent)
    stage.mkdir(exist_ok=True)
