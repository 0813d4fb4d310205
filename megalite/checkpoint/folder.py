"""Manage the folder of a run's checkpoints: find them, order them for loading, and delete old ones.

SAVE/latest                 name of the newest complete checkpoint
SAVE/iter_0000010/          a complete checkpoint
SAVE/.iter_0000020.5f3a….partial a checkpoint that is being written, or was when its run died
SAVE/.latest.5f3a….partial  a text that will replace `latest`
SAVE/.iter_0000010.replaced the previous iter_0000010, which counts until the new one is renamed
SAVE/.iter_0000010.deleted  a checkpoint that is being deleted
SAVE/unaudited_iter_0000010 a checkpoint that a later audit has made doubtful; it is never loaded
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from megalite.utils.errors import UserError
from megalite.utils.files import partial_name, read_regular, replace_file

LATEST = "latest"
WITHDRAWN = "unaudited_"
"""Begins a name that marks a checkpoint that a later audit has made doubtful."""
_MAX_NAME_BYTES = 256
PREFIX = "iter_"
NAME = re.compile(rf"{PREFIX}([0-9]{{7,18}})")
_REPLACED = re.compile(rf"\.{NAME.pattern}\.replaced")
_UNFINISHED = re.compile(r"\.(iter_[0-9]{7,18}|latest|run_id)(\.[0-9a-f]{16})?\.(partial|replaced|deleted)")


class SaveError(UserError):
    """Raised if a checkpoint cannot be written; earlier checkpoints are unchanged."""


class Listing(NamedTuple):
    """Checkpoints of a folder.

    Attributes:
        names: names of checkpoint folders in the order in which to try to load them; they can be damaged.
        notices: messages about `latest` for the log.
    """

    names: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def name_of(iteration: int) -> str:
    """Return the name of an iteration's checkpoint."""
    return f"{PREFIX}{iteration:07d}"


def iterations_in(folder: Path) -> dict[int, str]:
    """Return the names of the checkpoints in a folder, complete or not, by iteration and oldest first.

    Raises:
        OSError: the folder cannot be read.
    """
    return checkpoints_named(
        entry.name for entry in (folder.iterdir() if folder.exists() else ()) if entry.is_dir()
    )


def checkpoints_named(folders: Iterable[str]) -> dict[int, str]:
    """Return those of the folders' names that are checkpoints, by iteration and oldest first."""
    names = set(folders)
    found = {int(match[1]): match[0] for name in names if (match := NAME.fullmatch(name))}
    for match in filter(None, map(_REPLACED.fullmatch, names)):
        found.setdefault(int(match[1]), match[0])
    return dict(sorted(found.items()))


def list_checkpoints(folder: Path) -> Listing:
    """List checkpoints: first the one that `latest` names, then older ones from new to old, then newer ones.

    Newer ones belong to a run that died before it updated `latest`, or that was resumed from an earlier
    iteration. They are logged, and loaded only on request.

    Raises:
        OSError: the folder cannot be read.
    """
    latest = read_latest_from(lambda: read_latest(folder))
    return listing_of(iterations_in(folder), *latest, folder / LATEST)


def listing_of(found: Mapping[int, str], latest: int | None, problem: str, file: Path | str) -> Listing:
    """Return the listing of these checkpoints; see `list_checkpoints`.

    Args:
        found: names by iteration.
        latest, problem: from `read_latest_from`.
        file: path or URL of `latest`.
    """
    if latest is not None and latest not in found:
        problem = f"names {name_of(latest)}, which does not exist"
    if not found:
        return Listing(() if latest is None else (name_of(latest),))
    newest = max(found) if latest is None else latest
    newest_first = sorted(found, reverse=True)
    past = [iteration for iteration in newest_first if iteration <= newest]
    later = [iteration for iteration in newest_first if iteration > newest]
    names = tuple(found[iteration] for iteration in (*past, *later))
    notices = []
    if problem:
        notices.append(f"{file} {problem}: the newest complete checkpoint is loaded")
    if later:
        notices.append(
            f"{file} names {name_of(newest)}, and {found[later[0]]} is newer: pass "
            f"--load-iteration {later[0]} to load that instead"
        )
    return Listing(names, tuple(notices))


def outdated(
    iterations: Collection[int],
    newest: int,
    keep_last: int | None,
    keep_every: int | None,
    confirmed: int | None = None,
) -> list[int]:
    """Return the checkpoints to delete now that `newest` is complete, oldest first.

    It keeps the last `keep_last` checkpoints up to `newest`, all whose iteration is a multiple of
    `keep_every`, and all later than `newest`, which belong to an earlier attempt of the run. If only
    `keep_every` is set, it also keeps `newest`. If the run is good up to the iteration `confirmed`, it also
    keeps the last checkpoint up to there.
    """
    if keep_last is None and keep_every is None:
        return []
    past = sorted(iteration for iteration in iterations if iteration < newest)
    num_recent = (keep_last or 1) - 1
    old = past[: max(0, len(past) - num_recent)]
    good = max((each for each in iterations if confirmed is not None and each <= confirmed), default=None)
    return [each for each in old if each != good and (not keep_every or each % keep_every)]


def put_in_place(aside: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name, then delete a previous checkpoint with this name.

    At any time `iterations_in` finds one of the two.

    Raises:
        OSError: it cannot be renamed.
    """
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    aside.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the unfinished saves of earlier runs, if they can be deleted.

    Call it between saves, and only as the folder's only writer (see `lease`): all unfinished saves then
    belong to runs that have ended or lost the folder.
    """
    counted = set(iterations_in(folder).values())
    for entry in list(folder.iterdir()):
        if not _UNFINISHED.fullmatch(entry.name) or entry.name in counted:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()


def read_latest(folder: Path) -> str:
    """Return the content of the folder's `latest` file.

    Raises:
        OSError: it is missing, not a regular file, or longer than any name.
        UnicodeDecodeError: it is not text.
    """
    return read_regular(folder / LATEST, _MAX_NAME_BYTES).decode().strip()


def read_latest_from(read: Callable[[], str]) -> tuple[int | None, str]:
    """Return the iteration that `latest`, whose content `read` returns, names; or None and its problem."""
    try:
        name = read()
    except FileNotFoundError:
        return None, "is missing"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return None, "cannot be read (it is not text)"
    match = NAME.fullmatch(name)
    return (int(match[1]), "") if match else (None, "names no checkpoint")


class Retention(NamedTuple):
    """Checkpoints to keep, as the arguments of `outdated`."""

    keep_last: int | None = None
    keep_every: int | None = None
    confirmed: int | None = None


class RunFolder(Protocol):
    """Destination of a run's checkpoints: a folder that all ranks see, or object storage.

    Methods raise `OSError`.

    Attributes:
        uploads: whether a save goes on after its files are written.
        advice: what to do if a save fails.
    """

    uploads: ClassVar[bool]
    advice: ClassVar[str]

    def partial(self, name: str) -> Path:
        """Return the folder of the files of a save, from its name."""
        ...

    def begin(self, name: str) -> str:
        """Begin a save of the checkpoint of this name on rank 0, and return a new name for `partial`."""
        ...

    def join(self, partial: Path) -> None:
        """Prepare the folder on each rank, before its first file."""
        ...

    def file_stem(self, stem: str, partial: Path) -> str:
        """Return how the names of a rank's tensor files begin."""
        ...

    def send(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Send tensor files to the checkpoint of this name, once the files of all ranks are whole."""
        ...

    def publish(self, partial: Path, name: str, check: Callable[[], None]) -> None:
        """Make a checkpoint complete and the latest, on rank 0, after all ranks have sent their files.

        Args:
            partial: folder of its text files.
            check: raises an error if another run has taken over.
        """
        ...

    def prune(self, newest: int, retention: Retention, cleans_up: bool) -> list[str]:
        """Delete the checkpoints that `outdated` returns, and return their names; call it on one rank.

        Args:
            cleans_up: whether to delete what killed runs have left.
        """
        ...

    def withdraw(self, after: int, until: int) -> tuple[list[str], str | None]:
        """Make the checkpoints of the iterations (after, until] unavailable, and choose the latest again.

        Returns:
            The names by which they are still found, and the name of the newest one that remains.
        """
        ...


@dataclass(frozen=True)
class LocalRun:
    """Checkpoints of a run in a folder that all ranks see."""

    folder: Path
    uploads: ClassVar[bool] = False
    advice: ClassVar[str] = "free space or change --save; every rank must see the folder"

    def __str__(self) -> str:
        return str(self.folder)

    def partial(self, name: str) -> Path:
        return self.folder / name

    def begin(self, name: str) -> str:
        """Create the folder that all ranks write to.

        If the folder of checkpoints is gone, it is not created again, because a lost file system leaves an
        empty mount point.
        """
        remove_leftovers(self.folder)
        partial = partial_name(self.folder / name)
        partial.mkdir()
        return partial.name

    def join(self, partial: Path) -> None:
        """Do nothing: rank 0 has created the folder."""

    def file_stem(self, stem: str, partial: Path) -> str:
        return stem

    def send(self, partial: Path, name: str, files: Sequence[str]) -> None:
        """Do nothing: the files are there."""

    def publish(self, partial: Path, name: str, check: Callable[[], None]) -> None:
        sync_folder(partial)
        check()
        put_in_place(partial, self.folder / name)
        sync_folder(self.folder)
        replace_text(self.folder / LATEST, name + "\n", check)

    def prune(self, newest: int, retention: Retention, cleans_up: bool) -> list[str]:
        found = iterations_in(self.folder)
        names = [found[iteration] for iteration in outdated(found, newest, *retention)]
        for name in names:  # renamed first: a half-deleted one must not have the name of a checkpoint
            doomed = self.folder / f".{name.strip('.').split('.')[0]}.deleted"
            shutil.rmtree(doomed, ignore_errors=True)
            (self.folder / name).rename(doomed)
            shutil.rmtree(doomed)
        return names

    def withdraw(self, after: int, until: int) -> tuple[list[str], str | None]:
        """Rename the checkpoints."""
        withdrawn = []
        for iteration, name in iterations_in(self.folder).items():
            if after < iteration <= until:
                aside = self.folder / f"{WITHDRAWN}{name_of(iteration)}"
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / name).rename(aside)
                withdrawn.append(aside.name)
        good = max((number for number in iterations_in(self.folder) if number <= after), default=None)
        if withdrawn and good is not None:
            replace_text(self.folder / LATEST, name_of(good))
        elif withdrawn:
            (self.folder / LATEST).unlink(missing_ok=True)
        return withdrawn, None if good is None else name_of(good)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(file: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    """Replace the text of a file atomically and durably: a reader sees the old text or the new text.

    Args:
        check: called right before the replacement; if it raises, the old text remains.
    """
    with replace_file(file, before_rename=check) as stream:
        stream.write(text.encode())
    sync_folder(file.parent)
