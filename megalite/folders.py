"""Folders that a run writes to, and files in them that somebody else may have put there."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megalite.errors import UserError


def make_writable(folder: Path, flag: str) -> None:
    """Makes the folder and tries a file in it, so that a run learns at its start what it cannot write.

    Args:
        flag: the option that names the folder.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be written ({error.strerror}): give another folder"
        ) from None


def open_regular(file: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, unbuffered; the call never blocks.

    Args:
        follow: read what a symbolic link leads to.

    Raises:
        OSError: the file cannot be read, or is a pipe, a device, a socket, a folder, or a symbolic link that
            is not to be followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(file)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return os.fdopen(descriptor, "rb", buffering=0)


def no_follow(file: str, flags: int) -> int:
    """Open a file as `open` does, where it is no symbolic link and no pipe without a reader.

    For `opener=` where a run writes to a name that others can know: `open(path, "w", opener=no_follow)`.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link.
    """
    return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)


def open_new(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a new file to write, in the place of any that has the name; `buffering` is that of `open`.

    A link that somebody else put under a name that can be guessed is removed, not followed.

    Raises:
        OSError: the file cannot be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb", buffering)


def read_regular(file: Path, max_bytes: int, *, follow: bool = False) -> bytes:
    """Read a regular file whole; see `open_regular`.

    Raises:
        OSError: as `open_regular`; or the file has more than `max_bytes`.
    """
    with open_regular(file, follow=follow) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(file))
        parts = []
        while part := stream.read(max_bytes + 1):
            parts.append(part)
        return b"".join(parts)
