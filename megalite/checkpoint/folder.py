"""Manage a run's folder of checkpoints: find them, order them for loading, and delete old ones.

SAVE/latest                 name of the newest complete checkpoint
SAVE/iter_0000010/          a complete checkpoint
SAVE/.iter_0000020.5f3a….partial one that is being written, or was when its run died
SAVE/.latest.5f3a….partial  a text that is about to replace `latest`
SAVE/.iter_0000010.replaced the previous iter_0000010; it counts until the new, complete one is renamed
SAVE/.iter_0000010.deleted  one that is being deleted
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megalite.files import read_regular

LATEST = "latest"
_MAX_NAME_BYTES = 256
NAME = re.compile(r"iter_([0-9]{7,18})")
_REPLACED = re.compile(rf"\.{NAME.pattern}\.replaced")
_UNFINISHED = re.compile(r"\.(iter_[0-9]{7,18}|latest|run_id)(\.[0-9a-f]{16})?\.(partial|replaced|deleted)")


class Listing(NamedTuple):
    """List a folder's checkpoints.

    Attributes:
        names: of checkpoints' folders in the order in which to load them; they may be damaged.
        notices: what to log about `latest`.
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
    names = {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.exists() else set[str]()
    found = {int(match[1]): match[0] for name in names if (match := NAME.fullmatch(name))}
    for match in filter(None, map(_REPLACED.fullmatch, names)):
        found.setdefault(int(match[1]), match[0])
    return dict(sorted(found.items()))


def list_checkpoints(folder: Path) -> Listing:
    """List the folder's checkpoints: the one that `latest` names, older ones, newest first, then newer ones.

    Newer ones belong to a run that died before it updated `latest`, or that was resumed from an earlier
    iteration; they are logged, and loaded only on request.

    Raises:
        OSError: the folder cannot be read.
    """
    found = iterations_in(folder)
    latest, problem = _latest_in(folder)
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
        notices.append(f"{folder / LATEST} {problem}: the newest complete checkpoint is loaded")
    if later:
        notices.append(
            f"{folder / LATEST} names {name_of(newest)}, and {found[later[0]]} is newer: pass "
            f"--load-iteration {later[0]} to load that instead"
        )
    return Listing(names, tuple(notices))


def outdated(
    iterations: Iterable[int], newest: int, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Return the checkpoints to delete now that `newest` is complete, oldest first.

    Those that stay are the last `keep_last` up to the newest, those that `keep_every` divides, and all later
    than the newest, which belong to another course of the run. With `keep_every` alone only the newest stays
    besides.
    """
    if keep_last is None and keep_every is None:
        return []
    past = sorted(iteration for iteration in iterations if iteration < newest)
    num_recent = (keep_last or 1) - 1
    old = past[: max(0, len(past) - num_recent)]
    return [iteration for iteration in old if not keep_every or iteration % keep_every]


def prune(folder: Path, newest: int, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Delete what `outdated` returns, and return the deleted names; call it on one rank.

    Raises:
        OSError: some of it cannot be deleted.
    """
    found = iterations_in(folder)
    names = [found[iteration] for iteration in outdated(found, newest, keep_last, keep_every)]
    for name in names:
        remove(folder / name)
    return names


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted no longer has its name.

    Raises:
        OSError: it cannot be deleted.
    """
    doomed = checkpoint.with_name(f".{checkpoint.name.strip('.').split('.')[0]}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def put_in_place(aside: Path, final: Path) -> None:
    """Rename a complete checkpoint to its own name; a previous one with that name is deleted afterwards.

    At each moment `iterations_in` finds one of the two.

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
    """Delete the unfinished saves of earlier runs; those that cannot be deleted stay.

    Call it between saves, and only as the folder's one writer (see `lease`): then all that is unfinished
    belongs to runs that have ended or have lost the folder.
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
    """Return the content of the folder's `latest`.

    Raises:
        OSError: it is missing, not a regular file, or longer than any name.
        UnicodeDecodeError: it is not text.
    """
    return read_regular(folder / LATEST, _MAX_NAME_BYTES).decode().strip()


def _latest_in(folder: Path) -> tuple[int | None, str]:
    """Return the iteration that `latest` names; or None and what is wrong with the file."""
    try:
        name = read_latest(folder)
    except FileNotFoundError:
        return None, "is missing"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return None, "cannot be read (it is not text)"
    match = NAME.fullmatch(name)
    return (int(match[1]), "") if match else (None, "names no checkpoint")
