"""Create, read and touch the leases of a folder, or of a prefix in object storage; see `lease`."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from megalite.utils.errors import UserError
from megalite.utils.files import make_writable, open_regular
from megalite.utils.object_store import ObjectFolder, is_object_url

_MAX_BYTES = 1 << 16
NAME = re.compile(r"lease\.([1-9][0-9]{0,99})")
"""A file of any number may have been put there by hand: the name with the next number must be valid too."""
MISSING = (errno.ENOENT, errno.ESTALE)


class LeaseFiles(Protocol):
    """The leases of a folder or of a prefix in object storage; methods raise `OSError`.

    Attributes:
        patience: seconds that training may wait for `read`.
    """

    patience: float

    def prepare(self) -> None:
        """Create the folder; `UserError` if it cannot be written."""
        ...

    def numbers(self) -> list[int]:
        """Return the numbers of all leases."""
        ...

    def read(self, number: int) -> tuple[bytes, object]:
        """Return a lease's content, and a value that changes with each heartbeat; an error of `MISSING`."""
        ...

    def create(self, number: int, content: bytes) -> bool:
        """Create a lease; return False if it is there already."""
        ...

    def touch(self) -> None:
        """Show a heartbeat of the lease that `create` has made, if it is still there."""
        ...

    def delete(self, number: int) -> None:
        """Delete a lease; one that is not there is no error."""
        ...

    def close(self) -> None:
        """Release what `create` has opened."""
        ...

    def is_as_before(self) -> bool:
        """Return whether a missing lease is lost, instead of the file system."""
        ...


class FilesOfFolder:
    """Leases as files."""

    patience = 2.0  # for a file system that does not answer

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inode = folder.stat().st_ino if folder.exists() else 0
        self._descriptor: int | None = None

    def prepare(self) -> None:
        make_writable(self._folder, "--save")
        self._inode = self._folder.stat().st_ino

    def numbers(self) -> list[int]:
        return _numbers_in(os.listdir(self._folder))

    def read(self, number: int) -> tuple[bytes, object]:
        with open_regular(self._file(number)) as stream:
            return stream.read(_MAX_BYTES), os.fstat(stream.fileno()).st_mtime_ns

    def create(self, number: int, content: bytes) -> bool:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._file(number), flags, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(self._descriptor, content)
            os.fsync(self._descriptor)
        except OSError:
            self.close()
            self.delete(number)
            raise
        return True

    def touch(self) -> None:
        # Use the open file, so that a lost lease does not touch its successor's file.
        assert self._descriptor is not None
        os.utime(self._descriptor)

    def delete(self, number: int) -> None:
        self._file(number).unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_as_before(self) -> bool:
        # A lost file system does not mean a lost lease: then this folder is missing or another one.
        return self._folder.stat().st_ino == self._inode

    def _file(self, number: int) -> Path:
        return self._folder / f"lease.{number}"


class ObjectsOfStore:
    """Leases as objects."""

    patience = 0.0  # each request takes as long as an iteration

    def __init__(self, objects: ObjectFolder) -> None:
        self._objects = objects
        self._own: tuple[str, bytes, str] | None = None  # name, content and version

    def prepare(self) -> None:
        """Do nothing: prefixes are not created, and `create` finds out whether objects can be written."""

    def numbers(self) -> list[int]:
        return _numbers_in(self._objects.list_top()[1])

    def read(self, number: int) -> tuple[bytes, object]:
        return self._objects.read_version(f"lease.{number}")

    def create(self, number: int, content: bytes) -> bool:
        name = f"lease.{number}"
        try:
            version = self._objects.write(name, content, is_new=True)
        except FileExistsError:
            return False
        with suppress(FileExistsError):
            self._objects.write(name, content, is_new=True)
            self.delete(number)
            raise UserError(
                f"--save {self._objects.url} is in a store that ignores conditions of writes "
                "(If-None-Match), so two runs could write there at once: use a store that checks them"
            )
        self._own = name, content, version
        return True

    def touch(self) -> None:
        assert self._own is not None
        name, content, version = self._own
        try:
            version = self._objects.write(name, content, replaces=version)
        except FileNotFoundError:  # also if an earlier write happened and its answer was lost
            found, info = self._objects.read_version(name)
            if found != content:
                raise
            version = info.version
        self._own = name, content, version

    def delete(self, number: int) -> None:
        self._objects.delete([f"lease.{number}"])

    def close(self) -> None:
        """Do nothing: no object is open."""

    def is_as_before(self) -> bool:
        return True  # a store that cannot be reached does not say that an object is missing


def files_at(save: str | Path) -> LeaseFiles:
    """Return the leases of a folder or URL."""
    return ObjectsOfStore(ObjectFolder(str(save))) if is_object_url(str(save)) else FilesOfFolder(Path(save))


def _numbers_in(names: Iterable[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := NAME.fullmatch(name))]
