"""Experts of tokens come back from files of any ranks, and files that lack some are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite.train.callbacks.recorded_routing import (
    IterationFolder,
    RecordedExperts,
    recorded_iterations,
    tensors_of_file,
)
from megalite.utils.errors import UserError

LAYER, LENGTH, TOPK, NUM_EXPERTS = "layers.1.mlp.router", 6, 2, 300
EXPERTS = (torch.arange(4 * LENGTH * TOPK) * 7 % NUM_EXPERTS).view(4, LENGTH, TOPK).to(torch.int16)


def _write(folder: Path, num_files: int = 2) -> IterationFolder:
    """Write samples 8 to 11 as two ranks in zigzag order of positions would."""
    iteration = IterationFolder.of(folder, 3, range(8, 12))
    iteration.clear()
    for rank, positions in enumerate((torch.tensor([0, 1, 5]), torch.tensor([2, 3, 4]))):
        experts = {LAYER: EXPERTS[:, positions]}
        tensors = tensors_of_file(torch.arange(8, 12), positions.expand(4, -1), experts)
        iteration.write(rank, num_files, tensors)
    return iteration


def _read(folder: Path, *, length: int = LENGTH, num_experts: int = NUM_EXPERTS) -> RecordedExperts:
    return RecordedExperts(recorded_iterations(folder), length, num_experts)


def test_samples_come_back(tmp_path: Path) -> None:
    iteration = _write(tmp_path)
    assert recorded_iterations(tmp_path) == [iteration]
    recorded = _read(tmp_path)
    for row, sample in enumerate(range(8, 12)):
        assert torch.equal(recorded.sample_experts(LAYER, sample, TOPK), EXPERTS[row].long())
    assert recorded.missing(range(6, 13)) == [6, 7, 12]


def test_another_reader_finds_the_documented_tensors(tmp_path: Path) -> None:
    tensors = load_file(_write(tmp_path).path / "rank_1_of_2.safetensors")
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {
        "samples": (4,),
        "positions": (4, 3),
        LAYER: (4, 3, TOPK),
    }


@pytest.mark.parametrize(("first", "last"), [(0, 7), (7, 8), (11, 20), (12, 12)])
def test_iterations_are_found_by_their_samples(tmp_path: Path, first: int, last: int) -> None:
    is_found = first <= 11 and last >= 8
    assert _write(tmp_path).has_some_of(range(first, last + 1)) is is_found


def test_what_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, num_files=3)
    with pytest.raises(UserError, match="is incomplete, with 2 files: record the iteration again"):
        _read(tmp_path)
    _write(tmp_path)
    recorded = _read(tmp_path)
    with pytest.raises(UserError, match=r"lacks experts of layers\.2\.mlp\.router for tokens of sample 8"):
        recorded.sample_experts("layers.2.mlp.router", 8, TOPK)
    for other, topk in (
        (recorded, 3),
        (_read(tmp_path, length=5), TOPK),
        (_read(tmp_path, num_experts=70), TOPK),
    ):
        with pytest.raises(UserError, match=r"is of another model: layers\.1\.mlp\.router has"):
            other.sample_experts(LAYER, 8, topk)
    with pytest.raises(UserError, match="lacks experts"):
        _read(tmp_path, length=7).sample_experts(LAYER, 8, TOPK)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (_write(tmp_path).path / "rank_1_of_2.safetensors").write_bytes(b"no header")
    with pytest.raises(UserError, match=r"rank_1_of_2.safetensors cannot be read \(.*\): record"):
        _read(tmp_path)
