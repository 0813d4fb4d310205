"""A rank's elements come out of the files that have them, and out of no others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import torch

from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.tensor_files import FilePiece, read_tensors
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from tests.checkpoint_folder import write_checkpoint

VALUES = torch.arange(6.0)


def whole(elements: torch.Tensor, shape: tuple[int, ...] = (2, 3)) -> ParameterShard:
    return ParameterShard(elements, 0, shape, ParameterSpec(shape), is_replicated=True)


def stretch(start: int, end: int) -> FilePiece:
    return FilePiece(VALUES[start:end], ParameterRange((2, 3), (0, 0), (2, 3), start, end))


def manifest_of(save: Path, *files: Mapping[str, FilePiece]) -> Manifest:
    return read_manifest(write_checkpoint(save, files=files))


def test_stretches_and_plain_tensors_are_read(tmp_path: Path, topology) -> None:
    manifest = manifest_of(tmp_path, {"x": stretch(0, 4), "y": FilePiece(VALUES)}, {"x": stretch(4, 6)})
    x, y, middle = torch.zeros(6), torch.zeros(6), torch.zeros(3)
    part = ParameterShard(middle, 2, (2, 3), ParameterSpec((2, 3)), is_replicated=False)
    read_tensors(manifest, {"x": whole(x), "y": y}, topology)
    read_tensors(manifest, {"x": part}, topology)
    assert torch.equal(x, VALUES)
    assert torch.equal(y, VALUES)
    assert torch.equal(middle, VALUES[2:5])


def test_files_that_have_nothing_of_a_rank_are_not_opened(tmp_path: Path, topology, monkeypatch) -> None:
    manifest = manifest_of(
        tmp_path,
        {"x": stretch(0, 4), "y": FilePiece(VALUES)},
        {"x": stretch(4, 6), "y": FilePiece(VALUES)},
        {"z": FilePiece(VALUES)},
        {"x": stretch(0, 4)},
    )
    opened: list[str] = []
    original = safetensors.safe_open

    def watched(path, **options):
        opened.append(Path(path).name)
        return original(path, **options)

    monkeypatch.setattr(safetensors, "safe_open", watched)
    last = ParameterShard(torch.zeros(2), 4, (2, 3), ParameterSpec((2, 3)), is_replicated=False)
    read_tensors(manifest, {"x": last}, topology)
    assert opened == ["part_1.safetensors"]
    opened.clear()
    read_tensors(manifest, {"x": whole(torch.zeros(6)), "y": torch.zeros(6)}, topology)
    assert opened == ["part_0.safetensors", "part_1.safetensors"]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([(0, 4)], "2 elements of x are in no file"),
        ([(4, 6)], "4 elements of x are in no file"),
        ([], "6 elements of x are in no file"),
        ([(0, 4), (2, 6)], "elements of x are in several files"),
        ([(0, 3), (1, 4)], "elements of x are in several files"),
    ],
    ids=str,
)
def test_lost_and_doubled_elements_are_reported(tmp_path: Path, topology, starts, message: str) -> None:
    manifest = manifest_of(tmp_path, {"y": FilePiece(VALUES)}, *({"x": stretch(*ends)} for ends in starts))
    with pytest.raises(ValueError, match=message):
        read_tensors(manifest, {"x": whole(torch.zeros(6))}, topology)


def test_a_lost_file_is_reported(tmp_path: Path, topology) -> None:
    manifest = manifest_of(tmp_path, {"x": stretch(0, 4)}, {"x": stretch(4, 6)})
    (manifest.folder / "part_1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^part_1.safetensors: .*No such file"):
        read_tensors(manifest, {"x": whole(torch.zeros(6))}, topology)


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int64),
        ParameterShard(torch.zeros(2), 1, (6,), ParameterSpec((6,)), is_replicated=False),
    ],
    ids=["shape", "type", "shape of a part"],
)
@pytest.mark.parametrize("is_plain", [False, True])
def test_another_shape_or_type_is_reported(tmp_path: Path, topology, target, is_plain: bool) -> None:
    piece = FilePiece(torch.zeros(2, 3)) if is_plain else stretch(0, 6)
    with pytest.raises(ValueError, match=r"^part_0.safetensors: x is float32 \(2, 3\).*, here"):
        read_tensors(manifest_of(tmp_path, {"x": piece}), {"x": target}, topology)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_precision_is_rounded_as_main_weights_are(tmp_path: Path, topology, dtype) -> None:
    values = torch.tensor([1 + 2**-8 + 2**-30, 1 / 3, -0.0, 1e-9, 3.0, float("nan")], dtype=torch.float64)
    piece = FilePiece(values, ParameterRange((2, 3), (0, 0), (2, 3), 0, 6))
    found = torch.zeros(6, dtype=dtype)
    read_tensors(manifest_of(tmp_path, {"main": piece}), {"x": whole(found)}, topology, {"x": "main"})
    expected = values if dtype == torch.float64 else values.float().to(dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
