"""Folders that a run will write to."""

from __future__ import annotations

import tempfile
from pathlib import Path

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
