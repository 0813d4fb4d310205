"""A file written straight to the disk, or through the system's memory, holds the bytes that it was given."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megalite.checkpoint import tensor_files
from megalite.checkpoint.tensor_files import DiskFile

BUFFER_BYTES = 8192
FILE_SYSTEM_OF = tensor_files.file_system_of
SIZES = (0, 1, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 5 * BUFFER_BYTES + 77)


@pytest.fixture(params=["ext4", "nfs"], autouse=True)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file is taken to be on."""
    monkeypatch.setattr(tensor_files, "file_system_of", lambda _: request.param)
    monkeypatch.setattr(tensor_files, "_BUFFER_BYTES", BUFFER_BYTES)
    return request.param


def written(file: Path, chunks: list[bytes]) -> bytes:
    target = DiskFile(file)
    for chunk in chunks:
        target.write(memoryview(chunk))
    target.finish()
    target.close()
    return file.read_bytes()


@pytest.mark.parametrize("size", SIZES)
def test_it_holds_what_was_written(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    assert written(tmp_path / "one", [content]) == content
    pieces = [content[start : start + 1000] for start in range(0, size, 1000)]
    assert written(tmp_path / "many", pieces) == content


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100_000))
    assert written(tmp_path / "x", [b"new"]) == b"new"


@pytest.mark.parametrize("accepted", [0, 4096])
def test_a_disk_of_other_blocks_is_written_through_the_system(
    accepted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`EINVAL`, also after a part of a buffer, is what O_DIRECT says of blocks that do not fit."""
    results = iter([*([accepted] if accepted else []), None])
    real_write = os.write

    def write(descriptor: int, content: memoryview) -> int:
        num_bytes = next(results, len(content))
        if num_bytes is None:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, content[:num_bytes])

    content = os.urandom(3 * BUFFER_BYTES + 5)
    target = DiskFile(tmp_path / "x")
    if target._buffer is None:
        pytest.skip("only of a disk that is written straight to")
    monkeypatch.setattr(os, "write", write)
    target.write(memoryview(content))
    target.finish()
    target.close()
    assert (tmp_path / "x").read_bytes() == content


def test_other_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are, also where views of the buffer are held by the error's own frames."""
    room = [4096]

    def write(descriptor: int, content: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return room.pop()

    def fill() -> None:
        target = DiskFile(tmp_path / "x")
        try:
            target.write(memoryview(bytes(2 * BUFFER_BYTES)))
        finally:
            target.close()

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        fill()


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="only Linux tells it there")
def test_a_file_system_is_known_by_its_mount() -> None:
    with open("/proc/self/status") as file:
        assert FILE_SYSTEM_OF(file.fileno()) == "proc"
