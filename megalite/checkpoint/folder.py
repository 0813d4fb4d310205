"""A run's folder of checkpoints: which there are, in which order to try them, and which to delete.

SAVE/latest                 name of the newest whole checkpoint
SAVE/iter_0000010/          a whole checkpoint
SAVE/.iter_0000020.5f3a….partial one that is being written, or was when its run died
SAVE/.latest.5f3a….partial  a text that is about to replace `latest`
SAVE/.iter_0000010.replaced what iter_0000010 was before it was saved again; it counts while the new one,
which is whole, has not come to its name yet
SAVE/.iter_0000010.deleted  one that is being deleted
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megalite.folders import read_regular

LATEST = "latest"
_MAX_NAME_BYTES = 256
NAME = re.compile(r"iter_([0-9]{7,18})")
_REPLACED = re.compile(rf"\.({NAME.pattern})\.replaced")
_MADE_ASIDE = re.compile(r"\.(iter_[0-9]{7,18}|latest|run_id)(\.[0-9a-f]{16})?\.(partial|replaced|deleted)")


class Listing(NamedTuple):
    """A folder's checkpoints.

    Attributes:
        names: of checkpoints' folders in the order in which to load them; not one of them is known whole.
        notices: what the user is to be told of `latest`.
    """

    names: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def name_of(iteration: int) -> str:
    """Name of an iteration's checkpoint."""
    return f"iter_{iteration:07d}"


def partial_of(final: Path) -> Path:
    """Return a new name beside a file or folder, under which it is written until it is whole.

    No other run has the name: one that has lost the folder cannot rename what its successor writes.
    """
    return final.with_name(f".{final.name}.{secrets.token_hex(8)}.partial")


def iterations_in(folder: Path) -> dict[int, str]:
    """Names of the checkpoints in a folder, whole or not, by iteration and oldest first.

    Raises:
        OSError: the folder cannot be read.
    """
    names = {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder.exists() else set[str]()
    found = {int(match[1]): match[0] for name in names if (match := NAME.fullmatch(name))}
    for match in filter(None, map(_REPLACED.fullmatch, names)):
        found.setdefault(_iteration(match[1]), match[0])
    return dict(sorted(found.items()))


def list_checkpoints(folder: Path) -> Listing:
    """The folder's checkpoints: what `latest` names, what is older, newest first, then what is newer.

    Newer ones than the latest are of a run that died before `latest` moved, or that was taken up again from
    an earlier iteration: they are told, and not taken by themselves.

    Raises:
        OSError: the folder cannot be read.
    """
    found = iterations_in(folder)
    latest, problem = _latest_in(folder)
    if latest is not None and latest not in found:
        problem = f"names {name_of(latest)}, which is not there"
    if not found:
        return Listing(() if latest is None else (name_of(latest),))
    newest = max(found) if latest is None else latest
    newest_first = sorted(found, reverse=True)
    past = [iteration for iteration in newest_first if iteration <= newest]
    later = [iteration for iteration in newest_first if iteration > newest]
    names = tuple(found[iteration] for iteration in (*past, *later))
    notices = []
    if problem:
        notices.append(f"{folder / LATEST} {problem}: the newest whole checkpoint before it is taken")
    if later:
        notices.append(
            f"{folder / LATEST} names {name_of(newest)}, and {found[later[0]]} is newer: give "
            f"--load-iteration {later[0]} to load that instead"
        )
    return Listing(names, tuple(notices))


def outdated(
    iterations: Iterable[int], newest: int, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Which checkpoints to delete now that `newest` is whole, oldest first.

    Kept are the last `keep_last` up to the newest, those that `keep_every` divides, and, as another course of
    the run, all later than the newest. With `keep_every` alone the newest is the only other that stays.
    """
    if keep_last is None and keep_every is None:
        return []
    past = sorted(iteration for iteration in iterations if iteration < newest)
    num_recent = (keep_last or 1) - 1
    old = past[: max(0, len(past) - num_recent)]
    return [iteration for iteration in old if not keep_every or iteration % keep_every]


def prune(folder: Path, newest: int, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Deletes what `outdated` says, and returns the names of what it deleted; call it on one rank.

    Raises:
        OSError: some of it cannot be deleted.
    """
    found = iterations_in(folder)
    names = [found[iteration] for iteration in outdated(found, newest, keep_last, keep_every)]
    for name in names:
        remove(folder / name)
    return names


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; one that is half deleted has its name no more.

    Raises:
        OSError: it cannot be deleted.
    """
    doomed = checkpoint.with_name(f".{checkpoint.name.strip('.').split('.')[0]}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def put_in_place(aside: Path, final: Path) -> None:
    """Renames a whole checkpoint to its own name; what had that name goes once the new one stands there.

    At each moment one of the two is found by `iterations_in`.

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
    """Deletes what earlier runs have left aside; what cannot be deleted stays.

    Call it between saves, and only as the folder's one writer (see `lease`): all that is left is then of runs
    that have ended or have lost the folder.
    """
    counted = set(iterations_in(folder).values())
    for entry in list(folder.iterdir()):
        if not _MADE_ASIDE.fullmatch(entry.name) or entry.name in counted:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()


def read_latest(folder: Path) -> str:
    """Return what the folder's `latest` says.

    Raises:
        OSError: it is missing, no regular file, or longer than any name.
        UnicodeDecodeError: it is no text.
    """
    return read_regular(folder / LATEST, _MAX_NAME_BYTES).decode().strip()


def _latest_in(folder: Path) -> tuple[int | None, str]:
    """The iteration that `latest` names; or None and what is wrong with it."""
    try:
        name = read_latest(folder)
    except FileNotFoundError:
        return None, "is missing"
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return None, "cannot be read (it is no text)"
    match = NAME.fullmatch(name)
    return (int(match[1]), "") if match else (None, "names no checkpoint")


def _iteration(name: str) -> int:
    match = NAME.fullmatch(name)
    assert match
    return int(match[1])
