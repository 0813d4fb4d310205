"""Folders that a run writes to, and files in them that somebody else may have put there."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
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


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered; the call never blocks.

    Raises:
        OSError: the file cannot be read, or is a symbolic link, a pipe, a device, a socket or a folder.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(file)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(file: Path, max_bytes: int) -> bytes:
    """Read a regular file whole.

    Raises:
        OSError: as `open_regular`; or the file has more than `max_bytes`.
    """
    with open_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(file))
        parts = []
        while part := stream.read(max_bytes + 1):
            parts.append(part)
        return b"".join(parts)
