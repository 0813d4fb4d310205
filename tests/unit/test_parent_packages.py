"""Virtual environments that are made from a virtual environment, as scripts/install.sh makes .venv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def new_environment(python: str | Path, folder: Path) -> Path:
    """Make an environment without pip, and return its interpreter."""
    subprocess.run([python, "-m", "venv", "--system-site-packages", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    return Path(printed(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))


def printed(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_packages_of_the_parent_are_found(tmp_path: Path) -> None:
    """Its package is imported from it; one of the child's own goes first; a path file of its is read too."""
    parent = new_environment(sys.executable, tmp_path / "parent")
    child = new_environment(parent, tmp_path / "child")
    (tmp_path / "elsewhere").mkdir()
    for folder, name in (
        (site_packages(parent), "one_of_parent"),
        (site_packages(parent), "one_of_both"),
        (site_packages(child), "one_of_both"),
        (tmp_path / "elsewhere", "one_by_path_file"),
    ):
        (folder / f"{name}.py").touch()
    (site_packages(parent) / "more.pth").write_text(f"{tmp_path / 'elsewhere'}\n")
    subprocess.run([parent, ROOT / "scripts" / "add_parent_packages.py", child], check=True)
    names = ("one_of_parent", "one_of_both", "one_by_path_file")
    folders = [Path(printed(child, f"import {name}; print({name}.__file__)")).parent for name in names]
    assert folders == [site_packages(parent), site_packages(child), tmp_path / "elsewhere"]


def test_a_base_interpreter_adds_nothing(tmp_path: Path) -> None:
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    child = new_environment(base, tmp_path / "child")
    subprocess.run([base, ROOT / "scripts" / "add_parent_packages.py", child], check=True)
    assert not list(site_packages(child).glob("parent*"))
