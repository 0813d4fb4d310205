"""A file that megalite writes is what the safetensors library writes and reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.tensor_files import DTYPE_CODES, FilePiece, write_file


def tensors() -> dict[str, torch.Tensor]:
    """One of each type, and odd shapes."""
    every = {
        str(dtype): torch.arange(5).to(dtype) if dtype != torch.bool else torch.tensor([True, False, True])
        for dtype in DTYPE_CODES
    }
    return every | {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "not contiguous": torch.arange(12.0).view(3, 4).t(),
        "of several chunks": torch.randn(3, 1 << 20),
        "no numbers": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        'naïve "name"': torch.ones(1),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_library_reads_it_and_would_write_it_so(tmp_path: Path) -> None:
    expected = tensors()
    record = write_file(
        tmp_path / "a.safetensors", {name: FilePiece(each) for name, each in expected.items()}
    )
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(read[name]) == bits(tensor)
    save_file({name: each.contiguous() for name, each in expected.items()}, tmp_path / "b.safetensors")
    ours, theirs = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "ab")
    assert len(ours) == len(theirs)
    assert record.sha256 == hashlib.sha256(ours).hexdigest()


def test_the_record_tells_what_is_in_it(tmp_path: Path) -> None:
    place = ParameterRange((4, 6), 1, 2, (4, 2), 3, 7)
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
