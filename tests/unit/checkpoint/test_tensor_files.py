"""Files of tensors: what the safetensors library reads and writes, and bytes on any disk."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from megalite.checkpoint import tensor_files
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.tensor_files import DTYPE_CODES, DiskFile, FilePiece, write_file

BUFFER_BYTES = 8192
SIZES = (0, 1, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 5 * BUFFER_BYTES + 77)


@pytest.fixture(params=["ext4", "nfs"])
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


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("size", SIZES)
def test_it_holds_what_was_written(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    assert written(tmp_path / "one", [content]) == content
    pieces = [content[start : start + 1000] for start in range(0, size, 1000)]
    assert written(tmp_path / "many", pieces) == content


@pytest.mark.usefixtures("file_system")
def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100_000))
    assert written(tmp_path / "x", [b"new"]) == b"new"


@pytest.mark.usefixtures("file_system")
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


@pytest.mark.usefixtures("file_system")
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
        assert tensor_files.file_system_of(file.fileno()) == "proc"


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """One of each type, and odd shapes."""
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 4096)
    every = {
        str(dtype): torch.arange(5).to(dtype) if dtype != torch.bool else torch.tensor([True, False, True])
        for dtype in DTYPE_CODES
    }
    return every | {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "not contiguous": torch.arange(12.0).view(3, 4).t(),
        "of several chunks": torch.randn(3, 1 << 15),
        "no numbers": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        'naïve "name"': torch.ones(1),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_it_and_would_write_it_so(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    pieces = {name: FilePiece(each) for name, each in tensors.items()}
    record = write_file(tmp_path / "a.safetensors", pieces)
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(read[name]) == bits(tensor)
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "b.safetensors")
    ours, theirs = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "ab")
    assert len(ours) == len(theirs)
    assert record.sha256 == hashlib.sha256(ours).hexdigest()


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 4096, 1 << 20])
def test_the_record_has_the_digests_of_the_blocks(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block_bytes)
    pieces = {name: FilePiece(each) for name, each in tensors.items()}
    record = write_file(tmp_path / "x.safetensors", pieces, has_blocks=True)
    content = (tmp_path / "x.safetensors").read_bytes()
    blocks = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
    assert record.blocks == [hashlib.sha256(block).hexdigest() for block in blocks]
    assert record.sha256 == hashlib.sha256(content).hexdigest()


def test_the_record_tells_what_is_in_it(tmp_path: Path) -> None:
    place = ParameterRange((4, 6), (0, 2), (4, 2), 3, 7)
    pieces = {
        "cut": FilePiece(torch.ones(4, dtype=torch.bfloat16), place),
        "plain": FilePiece(torch.tensor(1.0)),
    }
    record = write_file(tmp_path / "x.safetensors", pieces)
    assert record.name == "x.safetensors"
    assert {name: (each.file, each.dtype, each.range) for name, each in record.tensors.items()} == {
        "cut": ("x.safetensors", "bfloat16", place),
        "plain": ("x.safetensors", "float32", None),
    }
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata().keys() == {"cut"}


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "none" / "x.safetensors", {"x": FilePiece(torch.ones(3))})
    with pytest.raises(OSError, match="No space left"):
        write_file(Path("/dev/full"), {"x": FilePiece(torch.ones(1 << 20))})
