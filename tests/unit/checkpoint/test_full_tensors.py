"""Full tensors come out of whatever pieces there are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import INDEX, DamagedCheckpoint, read_manifest
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.tensor_files import FilePiece
from tests.checkpoint_folder import (
    FULL,
    SHORT,
    STEPS,
    cut_pieces,
    edit,
    edit_piece,
    edit_run,
    write_checkpoint,
)


def reader(folder: Path) -> FullReader:
    return FullReader(read_manifest(folder))


def test_tensors_are_put_together(tmp_path: Path) -> None:
    full = reader(write_checkpoint(tmp_path))
    assert full.names() == ("cut", "padded", "steps")
    for name, expected in {"cut": FULL, "padded": SHORT, "steps": STEPS}.items():
        assert full.shape(name) == tuple(expected.shape)
        assert full.dtype(name) == expected.dtype
        assert torch.equal(full.tensor(name), expected)
    assert full.tensor("cut").is_contiguous()


def test_format_3_is_read(tmp_path: Path) -> None:
    """Its pieces name the only dim that is cut."""
    folder = write_checkpoint(tmp_path)

    def as_before(index: Any) -> None:
        for name, dim in (("cut", 1), ("padded", 0)):
            for piece in index["tensors"][name]:
                piece["place"] |= {"dim": dim, "offset": piece["place"].pop("offsets")[dim]}

    edit(folder, INDEX, as_before)
    edit_run(folder, format=3)
    for name, expected in {"cut": FULL, "padded": SHORT, "steps": STEPS}.items():
        assert torch.equal(reader(folder).tensor(name), expected)


def test_copies_count_once(tmp_path: Path) -> None:
    files = cut_pieces()
    full = reader(write_checkpoint(tmp_path, files=[*files, *files]))
    assert torch.equal(full.tensor("cut"), FULL)
    assert [piece.file for piece in full.pieces("cut")] == [f"part_{n}.safetensors" for n in range(4)]


@pytest.mark.parametrize("lost", range(4))
def test_lost_elements_are_reported(tmp_path: Path, lost: int) -> None:
    files = cut_pieces()
    del files[lost]["cut"]
    full = reader(write_checkpoint(tmp_path, files=files))
    with pytest.raises(DamagedCheckpoint, match=r"\d elements of cut are in no file"):
        full.tensor("cut")
    assert torch.equal(full.tensor("padded"), SHORT)


@pytest.mark.parametrize(("start", "end"), [(6, 16), (7, 15), (8, 16)])
def test_elements_in_two_files_are_reported_and_do_not_hide_lost_ones(tmp_path: Path, start, end) -> None:
    files = cut_pieces()
    place = dataclasses.replace(files[1]["cut"].range, start=start, end=end)
    files.append({"cut": FilePiece(torch.zeros(end - start, dtype=torch.float64), place)})
    with pytest.raises(DamagedCheckpoint, match="elements of cut are in several files"):
        reader(write_checkpoint(tmp_path, files=files)).tensor("cut")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int64"}, "cut is float64 .*, here int64"),
        ({"dtype": "float32"}, "cut is float64, the index says float32"),
        ({"place": None}, "cut is whole here and in pieces elsewhere|cut is float64|cut has"),
        ({"place": ParameterRange((4, 6), (0, 0), (2, 6), 0, 7).record()}, "in several files"),
        ({"place": ParameterRange((5, 6), (0, 0), (5, 4), 0, 7).record()}, r"\(5, 6\)"),
        ({"place": ParameterRange((4, 6), (0, 0), (4, 4), 0, 8).record()}, "in several files"),
        ({"place": ParameterRange((1 << 50, 6), (0, 0), (1 << 50, 4), 0, 7).record()}, "cut is float64"),
        ({"file": "part_3.safetensors"}, "part_3.safetensors: cut has 9 elements, the index says 7"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_the_files_is_reported(tmp_path: Path, fields, message) -> None:
    folder = write_checkpoint(tmp_path)
    edit_piece(folder, "cut", **fields)
    with pytest.raises(DamagedCheckpoint, match=message):
        reader(folder).tensor("cut")


def test_a_tensor_of_absurd_size_takes_no_memory(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, files=[{"x": FilePiece(torch.zeros(4), ParameterRange((4,), (0,), (4,), 0, 4))}]
    )
    size = 1 << 60
    edit_piece(folder, "x", place=ParameterRange((size,), (0,), (size,), 0, size).record())
    with pytest.raises(DamagedCheckpoint, match="x is larger than its files"):
        reader(folder).tensor("x")


def test_a_lost_or_foreign_file_is_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    full = reader(folder)
    safetensors.torch.save_file({"other": torch.zeros(1)}, folder / "part_1.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"part_1.safetensors: .*cut"):
        full.tensor("cut")
    (folder / "part_0.safetensors").unlink()
    for name in ("cut", "steps"):
        with pytest.raises(DamagedCheckpoint, match=r"part_0.safetensors"):
            full.tensor(name)


def test_an_unknown_name_is_a_key_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        reader(write_checkpoint(tmp_path)).tensor("none")
