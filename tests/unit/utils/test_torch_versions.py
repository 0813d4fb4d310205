"""Which torch a run and scripts/install.sh accept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.config import Config
from megalite.distributed.rendezvous import Launch
from megalite.train.setup import prepare_process
from megalite.utils.torch_versions import TESTED, is_too_old, minor_of, supported_pairs, untested_warning

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "minor", "too_old", "warns"),
    [
        ("2.9.1", (2, 9), True, False),
        (f"{TESTED[0]}+cu130", minor_of(TESTED[0]), False, False),
        (f"{TESTED[-1]}.post1", minor_of(TESTED[-1]), False, False),
        ("2.99.0a0+git1f3c", (2, 99), False, True),
        ("3.0.0", (3, 0), False, True),
    ],
)
def test_versions_are_compared_by_their_minor(
    version: str, minor: tuple[int, int], too_old: bool, warns: bool
) -> None:
    assert minor_of(version) == minor
    assert is_too_old(version) == too_old
    assert (untested_warning(version) is not None) == warns


@pytest.mark.parametrize(
    ("version", "rank", "num_warnings"), [("2.99.0", 0, 1), ("2.99.0", 1, 0), (TESTED[-1], 0, 0)]
)
def test_rank_0_warns_once_of_a_torch_that_was_not_tested(
    version: str,
    rank: int,
    num_warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    config = Config()
    monkeypatch.setattr("megalite.train.setup.check_config", lambda *_: None)
    prepare_process(config, [], Launch(rank, 2, rank, 2))
    assert "".join(capsys.readouterr()).count("warning: torch 2.99.0 is newer than") == num_warnings


class Checkout:
    """A folder with scripts/install.sh and an interpreter that has a torch of some version, and runs no pip.

    Args:
        version: of torch; None for none.
        code: of the module torch.
    """

    def __init__(self, folder: Path, version: str | None, code: str = "") -> None:
        self.folder = folder
        self.calls = folder / "pip.txt"
        for name in ("scripts/install.sh", "scripts/find_torch.py", "scripts/add_parent_packages.py"):
            (folder / "scripts").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "megalite" / "utils").mkdir(parents=True)
        shutil.copy(ROOT / "megalite" / "utils" / "torch_versions.py", folder / "megalite" / "utils")
        self.packages = folder / "packages"
        if version is not None:
            self.add("torch", version, f"{code}\nclass version:\n    cuda = None")
        self.python = self._interpreter(folder / "python")

    def add(self, name: str, version: str, code: str = "") -> None:
        (self.packages / name).mkdir(parents=True, exist_ok=True)
        (self.packages / name / "__init__.py").write_text(f"__version__ = {version!r}\n{code}")
        metadata = self.packages / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def _interpreter(self, path: Path) -> Path:
        """Write a program that records pip's arguments, copies itself for venv, and else runs Python."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"""#!/usr/bin/env bash
            case "$1 $2" in
            "-m pip") shift 2; echo "$@" >>{self.calls} ;;
            "-m venv") mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
            *) PYTHONPATH={self.packages} exec {sys._base_executable} -S "$@" ;;
            esac"""  # without this environment's packages
        )
        path.chmod(0o755)
        return path

    def install(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Return the exit status and what was printed."""
        clean = {name: value for name, value in os.environ.items() if name != "TORCH_VERSION"}
        done = subprocess.run(
            ["bash", self.folder / "scripts" / "install.sh", *arguments],
            env={**clean, "PYTHON": str(self.python), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def pip(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def test_a_build_shows_that_it_runs_and_what_it_returns(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "2.14.1+cu130")
    script = tmp_path / "scripts" / "install.sh"
    shows = 'echo "   still running, '
    text = script.read_text().replace("sleep 15", "sleep 0.2").replace(shows, f"echo >>shown; {shows}")
    script.write_text(text)
    slow = "until [ $(wc -l <shown) -ge 2 ]; do sleep 0.1; done;"
    checkout.python.write_text(
        checkout.python.read_text().replace("shift 2;", f'shift 2; [[ "$*" != *--editable* ]] || {slow}')
    )
    status, output = checkout.install()
    assert status == 0, output
    assert "== Building and installing megalite" in output.split("   still running, ")[0]
    assert output.count("   still running, ") >= 2
    installed = tmp_path / ".venv" / "bin" / "python"
    installed.write_text(installed.read_text().replace(slow, "exit 3;"))
    status, output = checkout.install()
    assert status == 1
    assert output.splitlines()[-1].startswith("error: not installed")


def test_the_torch_that_is_there_is_used_and_kept(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "2.14.1+cu130")
    checkout.add("triton", "3.8.0")
    for _ in range(2):  # the second time .venv is there
        status, output = checkout.install("test")
        assert status == 0, output
        assert f"Using torch 2.14.1+cu130 in {checkout.packages / 'torch'}" in output
    pins = (tmp_path / ".venv" / "pins.txt").read_text()
    assert pins.splitlines() == ["torch==2.14.1+cu130", "triton==3.8.0"]
    calls = checkout.pip()
    assert len(calls) == 4
    assert all("--constraint .venv/pins.txt" in call for call in calls)
    assert calls[-1].endswith("--editable .[test]")


@pytest.mark.parametrize(
    ("version", "code", "wanted", "reason"),
    [
        ("2.9.1", "", "", f"is older than {TESTED[0]}, the oldest that megalite runs with"),
        ("2.14.1", "", "2.15.0", "is there, and TORCH_VERSION requests 2.15.0"),
        ("2.14.1", "raise OSError('libcudart.so.13: cannot open')", "", "(libcudart.so.13: cannot open)"),
    ],
)
def test_a_torch_that_cannot_be_used_is_replaced_on_request_alone(
    version: str, code: str, wanted: str, reason: str, tmp_path: Path
) -> None:
    checkout = Checkout(tmp_path, version, code)
    status, output = checkout.install(TORCH_VERSION=wanted)
    assert status == 1
    assert len(output.splitlines()) == 1
    assert reason in output
    assert "type scripts/install.sh --replace-torch" in output
    assert not checkout.pip()
    assert not (tmp_path / ".venv").exists()
    checkout.install("--replace-torch", TORCH_VERSION=wanted)
    assert f"install torch=={wanted or '2.13.0'}" in checkout.pip()


def test_a_torch_that_pip_does_not_see_is_not_replaced(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "2.15.0")
    shutil.rmtree(checkout.packages / "torch-2.15.0.dist-info")
    status, output = checkout.install()
    assert status == 1
    assert "is not installed as a package, so pip would install another one" in output
    assert not checkout.pip()


def test_where_there_is_no_torch_one_is_installed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, None)
    checkout.install(TORCH_VERSION="2.15.0")
    assert checkout.pip()[0] == "install torch==2.15.0"


def test_another_flag_is_refused(tmp_path: Path) -> None:
    status, output = Checkout(tmp_path, "2.15.0").install("--replace")
    assert status == 1
    assert output == "error: scripts/install.sh has no flag --replace: the one it has is --replace-torch\n"


@pytest.mark.parametrize("failing", ["2.13.0", "none"])
def test_all_supported_pairs_are_checked(failing: str, tmp_path: Path) -> None:
    """Installation and tests are replaced by programs that only pass or fail; two Pythons are there."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "megalite" / "utils").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "check_versions.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "megalite" / "utils" / "torch_versions.py", tmp_path / "megalite" / "utils")
    programs = {
        "scripts/install.sh": "mkdir -p .venv/bin; cp true .venv/bin/python",
        "true": "",
        "scripts/test.sh": f'[ "$TORCH_VERSION" != {failing} ]',
        "bin/python3.10": "",
        "bin/python3.12": "",
        "bin/python3": f'exec {sys.executable} "$@"',
    }
    for name, code in programs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "cp", "dirname", "git", "mkdir", "mktemp", "rm", "sh", "tar"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / "check_versions.sh"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    expected = {
        f"{'failed' if version == failing else 'passed'}: python3.{minor}, torch {version}"
        for minor, version in supported_pairs()
        if minor in (10, 12)
    } | {
        f"not run: python3.{minor}, torch {version}: there is no python3.{minor}"
        for minor, version in supported_pairs()
        if minor in (11, 13)
    }
    assert set(done.stdout.splitlines()[-len(expected) :]) == expected, done.stderr
    assert (done.returncode == 0) == (failing == "none")
