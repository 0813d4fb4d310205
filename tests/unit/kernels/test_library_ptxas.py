"""Which ptxas Triton uses, without a GPU."""

import os
from pathlib import Path

import pytest
import torch

from megalite.kernels import library
from megalite.kernels.library import ensure_ptxas

GPU = torch.device("cuda")
OWN = "12.8"


@pytest.fixture
def torch_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a torch that includes ptxas, on a machine with a Hopper GPU."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ptxas").touch()
    return tmp_path


def versions(monkeypatch: pytest.MonkeyPatch, by_path: dict[str | None, str]) -> None:
    monkeypatch.setattr(library, "_ptxas_version", lambda: by_path[os.environ.get("TRITON_PTXAS_PATH")])


@pytest.mark.parametrize("version", ["12.9", "13.4"])
def test_a_correct_one_stays(version: str, torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, {None: version})
    assert ensure_ptxas(GPU) == ""
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_torchs_replaces_one_that_miscompiles(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = str(torch_folder / "bin/ptxas")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that the test's end restores it
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    versions(monkeypatch, {None: OWN, found: "13.0"})
    assert ensure_ptxas(GPU) == ""
    assert os.environ["TRITON_PTXAS_PATH"] == found


def test_kernels_do_not_run_without_a_correct_one(
    torch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions(monkeypatch, {None: OWN, str(torch_folder / "bin/ptxas"): "12.8", "/mine": "12.6"})
    assert ensure_ptxas(GPU).startswith("ptxas 12.8 compiles the kernels wrongly for this GPU: set ")
    assert "TRITON_PTXAS_PATH" not in os.environ
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine")
    assert ensure_ptxas(GPU).startswith("ptxas 12.6 ")
    assert os.environ["TRITON_PTXAS_PATH"] == "/mine"


def test_other_gpus_are_not_concerned(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    versions(monkeypatch, {})
    assert ensure_ptxas(GPU) == ""
