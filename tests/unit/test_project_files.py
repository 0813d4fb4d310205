"""Files about the project agree with the package: workflows, pre-commit, the citation, the sdist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

import megalite

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def _yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def _minors(pattern: str) -> range:
    """Return the minor versions of a range in pyproject.toml."""
    found = re.search(pattern, PROJECT)
    assert found is not None
    return range(int(found[1]), int(found[2]))


def test_ci_runs_every_supported_python_and_torch() -> None:
    matrix = _yaml(".github/workflows/ci.yml")["jobs"]["core"]["strategy"]["matrix"]
    pythons = [f"3.{minor}" for minor in _minors(r'requires-python = ">=3\.(\d+),<3\.(\d+)"')]
    assert matrix["python"] == pythons
    assert re.findall(r"Python :: (3\.\d+)", PROJECT) == pythons
    assert matrix["torch"] == [f"2.{minor}.0" for minor in _minors(r'"torch>=2\.(\d+),<2\.(\d+)"')]


def test_ci_runs_programs_that_exist() -> None:
    steps = [step for job in _yaml(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    programs = [shlex.split(step["run"])[0] for step in steps if "run" in step]
    assert len(programs) > 5
    for program in programs:
        assert program.startswith(".venv/bin/") or (ROOT / program).stat().st_mode & 0o100, program


def test_pre_commit_runs_what_ci_runs() -> None:
    (repository,) = _yaml(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    in_ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for entry in entries[:3]:
        assert re.search(rf"^{re.escape(entry)}", in_ci, re.MULTILINE), entry
    assert entries[3].endswith("tests/test_architecture.py")


def test_the_citation_is_of_this_version() -> None:
    assert _yaml("CITATION.cff")["version"] == megalite.__version__


def test_the_sdist_has_every_kind_of_file_that_is_compiled() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    patterns = {word for word in manifest.split() if word.startswith("*.")}
    assert {f"*{path.suffix}" for path in (ROOT / "csrc").rglob("*") if path.is_file()} == patterns
