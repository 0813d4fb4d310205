"""Where the CUDA compiler is looked for, with scripts in its place that answer as nvcc does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.kernels.posing import ROOT

NVCC = """#!/bin/sh
echo "Cuda compilation tools, release {release}, V{release}.1"
echo "#$ TOP=$(dirname "$0")/.." >&2
"""


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The script, on a machine without CUDA."""
    script = runpy.run_path(str(ROOT / "scripts" / "cuda_toolkit.py"))
    find = script["find_toolkit"]
    find.__globals__["ROOTS"] = str(tmp_path / "local" / "cuda*")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "parent")])
    return SimpleNamespace(find=find, folder=tmp_path)


def install(folder: Path, release: str) -> str:
    """Make a toolkit and return its compiler's path."""
    for name in ("bin", "lib64", "include"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "lib64" / "libcudart_static.a").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(release=release))
    nvcc.chmod(0o755)
    return str(nvcc)


def test_without_any_the_reason_names_the_version(toolkits: SimpleNamespace) -> None:
    with pytest.raises(LookupError, match=r"^there is no nvcc for CUDA 13$"):
        toolkits.find("13.0")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_goes_before_all_others(
    variable: str, toolkits: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(toolkits.folder, "13.0")  # its bin is in PATH
    home = install(toolkits.folder / "home", "12.8")
    monkeypatch.setenv(variable, str(toolkits.folder / "home"))
    found = toolkits.find("13.0")
    assert (found.nvcc, found.release) == (home, (12, 8))
    assert found.library_dirs == [str(toolkits.folder / "home" / "lib64")]


def test_the_default_of_usr_local_goes_before_numbered_ones(toolkits: SimpleNamespace) -> None:
    older, newer = (install(toolkits.folder / "local" / f"cuda-{r}", r) for r in ("12.9", "12.10"))
    assert toolkits.find("12.8").nvcc == newer != older
    default = install(toolkits.folder / "local" / "cuda", "12.4")
    assert toolkits.find("12.8").nvcc == default


def test_one_of_a_later_major_version_is_passed_over(toolkits: SimpleNamespace) -> None:
    in_path = install(toolkits.folder, "13.0")
    with pytest.raises(LookupError, match=f"^nvcc has CUDA 13 and torch has CUDA 12 .{in_path}.$"):
        toolkits.find("12.8")
    fitting = install(toolkits.folder / "local" / "cuda-12.4", "12.4")
    assert toolkits.find("12.8").nvcc == fitting


def test_packages_may_lie_in_two_folders(toolkits: SimpleNamespace) -> None:
    """Of .venv, with nvcc, and of the environment that it was made from, with torch's CUDA runtime."""
    nvcc = install(toolkits.folder / "site" / "nvidia" / "cu13", "13.0")
    (toolkits.folder / "site" / "nvidia" / "cu13" / "lib64" / "libcudart_static.a").unlink()
    runtime = toolkits.folder / "parent" / "nvidia" / "cu13"
    for name in ("include/cuda_runtime.h", "lib/libcudart_static.a"):
        (runtime / name).parent.mkdir(parents=True)
        (runtime / name).touch()
    found = toolkits.find("13.0")
    assert found.nvcc == nvcc
    assert found.include_dirs == [str(runtime / "include")]
    assert found.library_dirs == [str(runtime / "lib")]
