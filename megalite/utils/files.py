"""Safe access to files, and parsing of YAML and of untrusted JSON.

A run writes to folders that other users may write to as well. The functions below do not follow a symbolic
link that another process put under a known name, do not block on a pipe, and limit how much they read.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megalite.utils.errors import UserError


def make_writable(folder: Path, flag: str) -> None:
    """Create a folder and a temporary file in it, so that a run fails at its start if it cannot write there.

    Args:
        flag: the option that names the folder.

    Raises:
        UserError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{flag} {folder} cannot be written ({error.strerror}): pass another folder"
        ) from None


def check_owner(folder: Path) -> None:
    """Check that no other user can write to a folder or its link target.

    Raises:
        PermissionError: another user owns it, or may write to it.
    """
    if any(status.st_uid != os.getuid() for status in (folder.lstat(), folder.stat())):
        raise PermissionError(errno.EPERM, "the folder belongs to another user")
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "other users may write to the folder")


def open_regular(file: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, unbuffered; the call never blocks.

    Args:
        follow: whether to follow a symbolic link.

    Raises:
        OSError: the file cannot be read, or is a pipe, a device, a socket, a folder, or, without `follow`, a
            symbolic link.
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


def open_shared(path: Path) -> BinaryIO:
    """Open or create a file with a shared lock; who removes it must hold an exclusive one.

    Raises:
        OSError: the file cannot be opened.
    """
    while True:
        file = path.open("ab")
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                os.utime(path)
                return file
        except FileNotFoundError:
            pass
        file.close()  # another process removed it before it was locked


def read_regular(file: Path, max_bytes: int, *, follow: bool = False) -> bytes:
    """Read a whole regular file; see `open_regular`.

    Raises:
        OSError: as in `open_regular`, or the file has more than `max_bytes`.
    """
    with open_regular(file, follow=follow) as stream:
        if os.fstat(stream.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(file))
        parts = []
        while part := stream.read(max_bytes + 1):
            parts.append(part)
        return b"".join(parts)


def no_follow(file: str, flags: int) -> int:
    """Open a file without following a symbolic link or waiting for the reader of a pipe.

    Pass it as the opener when a run writes to a predictable name: `open(path, "w", opener=no_follow)`.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link.
    """
    return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)


def open_new(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a new file for writing and replace any file of that name; `buffering` is passed to `open`.

    A symbolic link of that name is removed, not followed: another process may have put it there.

    Raises:
        OSError: the file cannot be created.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb", buffering)


@contextmanager
def new_file(path: str | os.PathLike[str], buffering: int = -1) -> Iterator[BinaryIO]:
    """Open a new file as `open_new` does. Its bytes are on disk when the block ends.

    Raises:
        OSError: the file cannot be made or written.
    """
    with open_new(path, buffering) as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def partial_name(final: Path) -> Path:
    """Return a hidden name beside a file or folder, to write to until it is complete.

    The name is new each time, so no two processes write to the same file.
    """
    return final.with_name(f".{final.name}.{secrets.token_hex(8)}.partial")


@contextmanager
def replace_file(
    path: str | os.PathLike[str],
    *,
    partial: Path | None = None,
    before_rename: Callable[[], None] = lambda: None,
) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends: readers see the old content or the new.

    If the block or `before_rename` raises, the new file is deleted and the old one stays.

    Args:
        partial: the new file's name until then; by default `partial_name`.
        before_rename: called once the new file is on disk.

    Raises:
        OSError: the file cannot be made, written or renamed.
    """
    partial = partial or partial_name(Path(path))
    try:
        with new_file(partial) as stream:  # flush to disk first: a power cut could leave an empty file
            yield stream
        before_rename()
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: str | bytes, flag: str) -> None:
    """Write a whole file that the user has named; if that fails, an old file of this name stays.

    A symbolic link is followed, and a file keeps its mode. What is not a regular file, such as /dev/stdout,
    is written in place, and so is a file in a folder without write permission.

    Args:
        flag: the option that names the file.

    Raises:
        UserError: the file cannot be written.
    """
    content = content.encode() if isinstance(content, str) else content
    is_device = path.parts[:2] in (("/", "dev"), ("/", "proc")) or (path.exists() and not path.is_file())
    final = path.resolve()
    try:
        if is_device or (path.exists() and not os.access(final.parent, os.W_OK)):
            path.write_bytes(content)
            return
        partial = partial_name(final)
        with replace_file(final, partial=partial, before_rename=lambda: _copy_mode(final, partial)) as stream:
            stream.write(content)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written ({error.strerror}): pass another file") from None


def _copy_mode(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.copymode(source, target)


def file_system_of(descriptor: int) -> str:
    """Return the name of the file system that a file is on; empty if it is unknown."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:  # ID parent major:minor root folder options... - type source options
                before, _, after = line.partition(" - ")
                if before.split()[2] == number:
                    return after.split()[0]
    except OSError:
        pass
    return ""


def url_problem(path: str) -> str:
    """Return an error message if a path that must be on this machine is a URL; empty if it is a path."""
    if "://" not in path:
        return ""
    return f"{path} is a URL: pass a path on this machine or on a mounted file system"


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse JSON.

    Args:
        unique_keys: refuse an object that has a key twice, as for settings; `json` alone uses the last one.

    Raises:
        ValueError: the text is not JSON, is nested too deeply for Python, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key in found:
        if sum(name == key for name, _ in pairs) > 1:
            raise ValueError(f"it has {json.dumps(key)} twice in an object: remove one")
    return found


def read_yaml_file(what: str, path: str, *, as_nodes: bool = False) -> Any:
    """Return the content of a YAML file; None if it is empty.

    Args:
        what: what messages call it, such as its flag and path.
        as_nodes: return the root of its syntax tree instead.

    Raises:
        UserError: the file or the YAML library is missing, or the file is not YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(f"{what} needs PyYAML: pip install pyyaml") from None
    try:
        text = Path(path).read_text(encoding="utf-8")
        parse = yaml.compose if as_nodes else yaml.load
        with suppress(yaml.YAMLError):  # ten times as fast, where PyYAML has libyaml; its messages say less
            return parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return parse(text, yaml.SafeLoader)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except RecursionError:
        raise UserError(f"{what} is not a settings file: it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"{what} is not YAML: {' '.join(str(error).split())}") from None
