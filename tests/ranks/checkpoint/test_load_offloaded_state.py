"""Checkpoints of runs that offload the optimizer state: the same tensors, and any run resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.train.test_resume import DP2_ZERO1, DP2_ZERO3, TP2, Layout, run_of, saved_by, taken_by


def _offload(place: str, folder: Path) -> dict[str, Any]:
    if place == "file":
        return {"optimizer_nvme_offload": str(folder)}
    return {"optimizer_cpu_offload": True} if place == "memory" else {}


@pytest.mark.parametrize(
    ("saved_layout", "saved", "layout", "loaded", "dtype"),
    [
        (DP2_ZERO1, "file", TP2, "memory", "bf16"),
        (DP2_ZERO1, "device", DP2_ZERO3, "file", "bf16"),
        (TP2, "memory", DP2_ZERO1, "file", "fp32"),
        (DP2_ZERO3, "file", DP2_ZERO1, "file", "bf16"),
    ],
)
def test_a_run_resumes_from_any_place_in_any(
    saved_layout: Layout, saved: str, layout: Layout, loaded: str, dtype: str, tmp_path: Path
) -> None:
    folder, disk = tmp_path / "checkpoints", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    contents = saved_by(run_of(folder, saved_layout, dtype, **_offload(saved, disk)))
    expected = taken_by(run_of(folder, layout, dtype))
    found = taken_by(run_of(folder, layout, dtype, **_offload(loaded, disk)))
    assert contents.keys() == found.tensors.keys() == expected.tensors.keys()
    assert all(found.tensors[name].equal(contents[name]) for name in contents)
    assert (found.losses, found.rates) == (expected.losses, expected.rates)


@pytest.mark.parametrize("place", ["memory", "file"])
def test_a_save_after_a_load_has_what_was_loaded(place: str, tmp_path: Path) -> None:
    folder, disk = tmp_path / "checkpoints", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    contents = saved_by(run_of(folder, DP2_ZERO1))
    again = run_of(folder, DP2_ZERO1, save=str(tmp_path / "again"), **_offload(place, disk))
    taken_by(again, saves=True)
    found = taken_by(run_of(folder, DP2_ZERO1, load=str(tmp_path / "again")))
    assert all(found.tensors[name].equal(contents[name]) for name in contents)
