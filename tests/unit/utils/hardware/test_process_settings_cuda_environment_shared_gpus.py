"""Ranks that share a GPU: the NCCL that they need, and the line of the log."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.utils.hardware import process_settings


class FakeNccl:
    def __init__(self, version: int) -> None:
        self.version = version

    def ncclGetVersion(self, number: object) -> None:
        number._obj.value = self.version  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("version", "found", "suffices"),
    [(22809, (2, 28, 9), False), (23003, (2, 30, 3), True), (30000, (3, 0, 0), True)],
)
def test_the_version_is_that_of_the_loaded_library(
    version: int, found: tuple[int, int, int], suffices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNccl(version))
    assert process_settings.loaded_nccl() == found
    assert (process_settings.nccl_problem() == "") is suffices


def test_nccl_may_be_a_part_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 5)))
    assert "and this process uses NCCL 2.27.5: type pip install" in process_settings.nccl_problem()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "and this process has no NCCL" in process_settings.nccl_problem()


def test_the_log_names_what_slows_ranks_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_settings.MPS_FOLDER, str(tmp_path))
    gpu = torch.device("cuda", 0)
    assert "in turns" in process_settings.describe_sharing(gpu)
    (tmp_path / "control").touch()
    assert f"with MPS ({tmp_path})" in process_settings.describe_sharing(gpu)
    assert "has no effect" in process_settings.describe_sharing(torch.device("cpu"))
