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

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megalite.utils.files import read_regular

LATEST = "latest"
_MAX_NAME_BYTES = 256
NAME = re.compile(r"iter_([0-9]{7,18})")
_REPLACED = re.compile(rf"\.{NAME.pattern}\.replaced")
_UNFINISHED = re.compile(r"\.(iter_[0-9]{7,18}|latest|run_id)(\.[0-9a-f]{16})?\.(partial|replaced|deleted)")


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
    return f"iter_{iteration:07d}"


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


def prune(
    folder: Path, newest: int, keep_last: int | None, keep_every: int | None, confirmed: int | None = None
) -> list[str]:
    """Delete the checkpoints that `outdated` returns, and return their names; call it on one rank.

    Raises:
        OSError: a file cannot be deleted.
    """
    found = iterations_in(folder)
    names = [found[iteration] for iteration in outdated(found, newest, keep_last, keep_every, confirmed)]
    for name in names:  # renamed first: a half-deleted one must not have the name of a checkpoint
        doomed = folder / f".{name.strip('.').split('.')[0]}.deleted"
        shutil.rmtree(doomed, ignore_errors=True)
        (folder / name).rename(doomed)
        shutil.rmtree(doomed)
    return names


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
