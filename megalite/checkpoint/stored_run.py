"""Keep a run's checkpoints in object storage; they are written and read through a folder of each node.

    s3://bucket/run/iter_0000010/SHA256SUMS   put last: a checkpoint that has it is complete
    s3://bucket/run/unaudited_iter_0000020    marks a checkpoint that a later audit has made doubtful
    s3://bucket/run/latest                    as in a folder (see `folder`), and so is lease.N (see `lease`)

    STAGE/bucket%2Frun/.iter_0000020.5f3a….partial   files that this node's ranks write and upload
    STAGE/bucket%2Frun/.load.91c4…/iter_0000010/     what this node's ranks load (see `download`)

Objects cannot be renamed, so the names of tensor files are new in each save, and a checkpoint that replaces
one of the same iteration takes over with its text files. What a killed run has uploaded without SHA256SUMS is
deleted after the first save of the next run, also the invisible parts of files that it was uploading.

When a run starts, it finishes the upload of a save that is whole on the disks of the nodes: an earlier start
has ended before its upload was over, because it was killed, the store refused the files, or
`--exit-upload-seconds` were over. It has left:

    STAGE/bucket%2Frun/.iter_0000020.5f3a….partial/
        dp_3.5f3a….safetensors   on the node of the rank that wrote it
        SHA256SUMS               on rank 0's node, the last of the texts
        latest                   on rank 0's node: the store's, when the save began

Ranks may be on other nodes, and their number may have changed. A file that is in the store already, where its
name is new in each save, is needed on no node.
"""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from megalite.checkpoint.download import Download, make_stage, replacing_name
from megalite.checkpoint.folder import (
    LATEST,
    NAME,
    PREFIX,
    WITHDRAWN,
    Listing,
    Retention,
    checkpoints_named,
    iterations_in,
    listing_of,
    name_of,
    outdated,
    read_latest_from,
)
from megalite.checkpoint.manifest import (
    SUMS,
    TEXTS,
    DamagedCheckpoint,
    digests_in,
    parse_sums,
    read_manifest,
    sha256_of,
)
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError
from megalite.utils.files import partial_name, url_problem
from megalite.utils.log import log
from megalite.utils.object_store import ObjectFolder, is_object_url, local_folder


@dataclass(frozen=True)
class StoredRun:
    """Checkpoints of a run in object storage.

    Every method raises an `OSError` with the URL if the store cannot be reached.

    Attributes:
        stage: folder of this node for files that are being uploaded or loaded.
    """

    objects: ObjectFolder
    stage: Path
    _complete: set[str] = field(default_factory=set, compare=False, repr=False)  # known to be complete
    uploads: ClassVar[bool] = True
    advice: ClassVar[str] = "see that the store answers, free space in --save-stage, or change --save"

    @staticmethod
    def at(path: str | Path, stage: str | None = None) -> StoredRun | None:
        """Return the run of a URL; None for a path.

        Raises:
            UserError: the package for object storage is missing, or the URL has no bucket.
        """
        url = str(path)
        return StoredRun(ObjectFolder(url), local_folder(url, stage)) if is_object_url(url) else None

    def __str__(self) -> str:
        return self.objects.url

    def iterations(self) -> dict[int, str]:
        """Return the names of the checkpoints, complete or not, by iteration and oldest first."""
        folders, objects = self.objects.list_top()
        return checkpoints_named(name for name in folders if f"{WITHDRAWN}{name}" not in objects)

    def listing(self) -> Listing:
        """Return the checkpoints in the order in which to try to load them, as `list_checkpoints` does."""
        latest = read_latest_from(lambda: self.objects.read(LATEST).decode().strip())
        return listing_of(self.iterations(), *latest, f"{self}/{LATEST}")

    def has_object(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.objects.read(name)
        except FileNotFoundError:
            return False
        return True

    def partial(self, name: str) -> Path:
        return self.stage / name

    def begin(self, name: str) -> str:
        """Create the folder, with the store's `latest`: a later start finishes the save if it is the same."""
        partial = partial_name(self.stage / name)
        self.join(partial)
        (partial / LATEST).write_bytes(self.latest())
        return partial.name

    def join(self, partial: Path) -> None:
        make_stage(self.stage)
        partial.mkdir(exist_ok=True)

    def staged(self) -> list[Path]:
        """Return the folders of saves that are on this node."""
        return sorted(self.stage.glob(f".{PREFIX}*.partial"))

    def remove_staged(self, but: Path | None = None) -> None:
        """Delete the folders of saves that are on this node."""
        for folder in self.staged():
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)

    def latest(self) -> bytes:
        """Return the content of `latest`; empty without it."""
        try:
            return self.objects.read(LATEST)
        except FileNotFoundError:
            return b""

    def file_stem(self, stem: str, partial: Path) -> str:
        """Add the random part of the folder's name: files of an earlier save must not be replaced."""
        return f"{stem}.{partial.name.split('.')[2]}"

    def send(self, partial: Path, name: str, files: Sequence[str]) -> None:
        for file in files:
            self.objects.upload(f"{name}/{file}", partial / file)

    def publish(self, partial: Path, name: str, check: Callable[[], None]) -> None:
        """Upload the text files, SHA256SUMS last.

        Until that, readers need the text files of an earlier save of the iteration. A run that was paused
        and has lost its lease fails by the versions that it expects.
        """
        digests = digests_in(partial)
        before = self._version_of(f"{name}/{SUMS}"), self._version_of(LATEST)
        replacing = {text: f"{name}/{replacing_name(text, digests[text])}" for text in TEXTS}
        for text in TEXTS:
            self.objects.upload(replacing[text], partial / text)
        check()
        self._replace(f"{name}/{SUMS}", (partial / SUMS).read_bytes(), before[0])
        for text in TEXTS:
            self.objects.upload(f"{name}/{text}", partial / text)
        self.objects.delete([*replacing.values(), f"{WITHDRAWN}{name}"])
        check()
        self._replace(LATEST, f"{name}\n".encode(), before[1])

    def prune(self, newest: int, retention: Retention, cleans_up: bool) -> list[str]:
        self._clean(name_of(newest))
        found = self.iterations()
        if cleans_up or retention.keep_last is not None or retention.keep_every is not None:
            found = {each: name for each, name in found.items() if self._is_complete(name)}
        deleted = [found[number] for number in outdated(found, newest, *retention)]
        for name in deleted:
            self.objects.delete([f"{name}/{SUMS}"])  # first what makes it complete
            self._complete.discard(name)
            self._clean(name)
        if cleans_up:
            self._abort_uploads()
        return deleted

    def _abort_uploads(self) -> None:
        """Delete the parts of files that killed runs were uploading; no rank uploads anything now."""
        try:
            self.objects.abort_uploads(PREFIX)
        except OSError as error:
            log.warning(
                "parts of files that a killed run was uploading can remain in %s (%s): give the bucket a "
                "rule for incomplete multipart uploads",
                self,
                error.strerror or error,
            )

    def withdraw(self, after: int, until: int) -> tuple[list[str], str | None]:
        """Mark the checkpoints by objects beside them."""
        found = {each: name for each, name in self.iterations().items() if self._is_complete(name)}
        marks = [f"{WITHDRAWN}{name}" for each, name in found.items() if after < each <= until]
        for mark in marks:
            self.objects.write(mark, b"")
        good = max((number for number in found if number <= after), default=None)
        if marks and good is not None:
            self.objects.write(LATEST, f"{name_of(good)}\n".encode())
        elif marks:
            self.objects.delete([LATEST])
        return marks, None if good is None else name_of(good)

    def _is_complete(self, name: str) -> bool:
        """Return whether a checkpoint is complete; delete what is not part of one."""
        if name not in self._complete:
            self._clean(name)
        return name in self._complete

    def _clean(self, name: str) -> None:
        """Delete what is not part of a complete checkpoint of this name."""
        known = set[str]()
        with suppress(FileNotFoundError):
            digests = parse_sums(self.objects.read(f"{name}/{SUMS}").decode())
            known = {
                SUMS,
                *digests,
                *(replacing_name(text, digests[text]) for text in TEXTS if text in digests),
            }
        found = self.objects.list_all(name)
        self.objects.delete([each for each in found if each.removeprefix(f"{name}/") not in known])
        if known:
            self._complete.add(name)

    def _version_of(self, name: str) -> str | None:
        try:
            return self.objects.read_version(name)[1].version
        except FileNotFoundError:
            return None

    def _replace(self, name: str, content: bytes, version: str | None) -> None:
        """Write an object, if this version or none is still there."""
        try:
            self.objects.write(name, content, is_new=version is None, replaces=version)
        except (FileExistsError, FileNotFoundError):
            if self.objects.read(name) != content:  # else it was written, and the answer was lost
                raise OSError(errno.EBUSY, "another run has written it", f"{self}/{name}") from None


def iterations_at(folder: Path | StoredRun) -> dict[int, str]:
    """Return the names of a run's checkpoints, complete or not, by iteration and oldest first.

    Raises:
        OSError: the folder or the store cannot be read.
    """
    return folder.iterations() if isinstance(folder, StoredRun) else iterations_in(folder)


def newest_at(folder: Path | StoredRun) -> int:
    """Return the iteration of the newest complete checkpoint of a run; -1 if there is none.

    Raises:
        OSError: the folder or the store cannot be read.
    """
    for iteration, name in reversed(iterations_at(folder).items()):
        if isinstance(folder, Path) or folder.has_object(f"{name}/{SUMS}"):
            return iteration
    return -1


def run_at(text: str) -> Path | StoredRun:
    """Parse the path or URL of a run's checkpoints; an argparse `type`."""
    if (problem := url_problem(text)) and not is_object_url(text):
        raise argparse.ArgumentTypeError(problem)
    return StoredRun.at(text) or Path(text)


@contextmanager
def local_copy(
    folder: Path | StoredRun, iteration: int | None = None, last: int = 1, *, parts: CopiedParts = "verified"
) -> Iterator[Path]:
    """Yield a copy of a run's folder with some of its stored checkpoints; yield a path as it is.

    Folders of other checkpoints are empty. The copy is deleted when the block ends.

    Args:
        iteration: the checkpoint to copy; by default the latest.
        last: how many to copy, the latest and those before it.
        parts: "verified" to download and verify all files, "all" to leave files missing or damaged as they
            are in the store, and "headers" for tensor files with zeros for elements, which take no space.

    Raises:
        UserError: there are none, they are damaged, or the store cannot be read.
    """
    if isinstance(folder, Path):
        yield folder
        return
    above, _, name = folder.objects.url.rpartition("/")
    if match := NAME.fullmatch(name):
        folder, iteration = StoredRun(ObjectFolder(above), folder.stage), int(match[1])
    with ExitStack() as stack:
        try:
            listing = folder.listing()
            if not listing.names:
                raise UserError(f"{folder} holds no checkpoint of megalite")
            names = listing.names[:last] if iteration is None else (name_of(iteration),)
            if names[0] not in listing.names:
                raise UserError(f"{folder} has no {names[0]}: it has {', '.join(sorted(listing.names))}")
            download = stack.enter_context(Download(folder.objects, folder.stage, secrets.token_hex(8)))
            with suppress(FileNotFoundError):
                (download.folder / LATEST).write_bytes(folder.objects.read(LATEST))
            for name in listing.names:
                (download.folder / name).mkdir()
            for name in names:
                _copy(folder, download, name, parts)
        except OSError as error:
            raise UserError(f"{error.filename or folder} cannot be read: {error.strerror}") from None
        yield download.folder


CopiedParts = Literal["headers", "all", "verified"]


def _copy(run: StoredRun, download: Download, name: str, parts: CopiedParts) -> None:
    download.fetch_texts(name)
    manifest = read_manifest(download.folder / name)
    if parts == "headers":
        found = run.objects.list_all(name)
        for path in (f"{name}/{file}" for file in manifest.files):
            if path in found:
                length = int.from_bytes(run.objects.read_part(path, 0, 8), "little")
                header = run.objects.read_part(path, 0, min(8 + length, found[path]))
                (download.folder / path).write_bytes(header)
                os.truncate(download.folder / path, found[path])
        return
    log.info("downloading %s/%s", run, name)
    for file in manifest.files:
        with suppress(FileNotFoundError) if parts == "all" else nullcontext():
            download.fetch_whole(name, {file: manifest.digests[file] if parts == "verified" else None})


class _Rest(NamedTuple):
    """Rest of the upload of a save.

    Attributes:
        digests: SHA-256 of the files to upload, by name.
        problem: why the save cannot be finished; empty if it can.
        is_done: whether it is complete in the store.
    """

    digests: Mapping[str, str] = {}
    problem: str = ""
    is_done: bool = False


def upload_staged(run: StoredRun, topology: Topology, check: Callable[[], None]) -> None:
    """Upload what is whole, newest first, and delete the rest; every rank calls this before it loads.

    Args:
        check: raises an error if another run has taken over the store's folder.

    Raises:
        UserError: the store or the stage cannot be read or written; nothing is deleted then. Every rank
            raises it.
    """
    mine: dict[str, list[str]] = {}
    with topology.agreed():
        for partial in run.staged():
            with _named_errors(run, partial):
                mine[partial.name] = [file.name for file in partial.iterdir()]
    found = topology.world.gather_objects(mine, "saves in the stage")
    names = {name for of_rank in found for name in of_rank}
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        partial = run.stage / name
        rest = _upload(run, partial, [of_rank.get(name, ()) for of_rank in found], topology, check)
        if rest.problem:
            log.warning("checkpoint %s in %s is removed: %s", _name_of(partial), run.stage, rest.problem)
        shutil.rmtree(partial, ignore_errors=True)


def _upload(
    run: StoredRun,
    partial: Path,
    files: Sequence[Collection[str]],
    topology: Topology,
    check: Callable[[], None],
) -> _Rest:
    """Upload a save if it can be finished.

    Args:
        files: names of the files that each rank sees in its stage.
    """
    name, rank, rest = _name_of(partial), topology.rank, _Rest()
    # The rank that publishes needs the texts.
    first = next((number for number, names in enumerate(files) if SUMS in names), None)
    if first is None:
        return _Rest(problem=f"no node has its {SUMS}, so it was not written to the end")
    with topology.agreed(), _named_errors(run, partial):
        if rank == first:
            rest = _rest_of(run, partial)
    rest = topology.world.gather_objects(rest, "the rest of an upload")[first]
    if rest.problem or rest.is_done:
        return rest
    mine, loads = list[str](), Counter[int]()
    for file in sorted(rest.digests):
        ranks = [number for number, names in enumerate(files) if file in names]
        if not ranks:
            return _Rest(problem=f"no node has its {file}, and it was not uploaded")
        sender = min(ranks, key=lambda number: loads[number])
        loads[sender] += 1
        mine += [file] if sender == rank else []
    log.info("uploading checkpoint %s/%s, which an earlier start has left in %s", run, name, run.stage)
    bad = list[str]()
    with topology.agreed(), _named_errors(run, partial):
        bad = [file for file in mine if sha256_of(partial / file) != rest.digests[file]]
    if damaged := [file for each in topology.world.gather_objects(bad, "damaged files") for file in each]:
        return _Rest(problem=f"{damaged[0]} has other contents than {SUMS} says")
    with topology.agreed(), _named_errors(run, partial):
        run.send(partial, name, mine)
    with topology.agreed(), _named_errors(run, partial):
        if rank == first:
            run.publish(partial, name, check)
    log.info("saved checkpoint %s/%s", run, name)
    return rest


def _rest_of(run: StoredRun, partial: Path) -> _Rest:
    """Return what is left to do, from the texts on this node and what is in the store."""
    name = _name_of(partial)
    try:
        manifest = read_manifest(partial)
    except DamagedCheckpoint as error:
        return _Rest(problem="; ".join(error.problems))
    found = run.objects.list_all(name)
    before = (partial / LATEST).read_bytes() if (partial / LATEST).exists() else b""
    if (latest := run.latest()) != before:
        sums = run.objects.read(f"{name}/{SUMS}") if f"{name}/{SUMS}" in found else b""
        if parse_sums(sums.decode()).keys() >= manifest.digests.keys():
            return _Rest(is_done=True)
        since = latest.decode().strip() or "no checkpoint"
        return _Rest(problem=f"the latest in {run} is {since}, which has changed since it was written")
    return _Rest({file: manifest.digests[file] for file in manifest.files if f"{name}/{file}" not in found})


def _name_of(partial: Path) -> str:
    return partial.name.split(".")[1]


@contextmanager
def _named_errors(run: StoredRun, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"checkpoint {run}/{_name_of(partial)}, which an earlier start has left, cannot be uploaded "
            f"({error.strerror}: {error.filename}): start again, or delete {partial} to go on without it"
        ) from None
