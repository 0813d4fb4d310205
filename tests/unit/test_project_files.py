"""Files about the project agree with the package: workflows, pre-commit, the citation, the sdist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import megalite
from megalite.utils.torch_versions import PYTHONS, TESTED, supported_pairs

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def _yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


JOBS = _yaml(".github/workflows/ci.yml")["jobs"]


def test_ci_runs_every_supported_python_and_torch() -> None:
    matrix = JOBS["core"]["strategy"]["matrix"]
    pythons = [f"3.{minor}" for minor in PYTHONS]
    assert f'requires-python = ">=3.{PYTHONS[0]},<3.{PYTHONS[-1] + 1}"' in PROJECT
    assert re.findall(r"Python :: (3\.\d+)", PROJECT) == pythons
    assert matrix["python"] == pythons
    assert matrix["torch"] == list(TESTED)
    excluded = [(each["python"], each["torch"]) for each in matrix["exclude"]]
    run = [(python, torch) for torch in TESTED for python in pythons if (python, torch) not in excluded]
    assert run == [(f"3.{minor}", torch) for minor, torch in supported_pairs()]


def test_pull_requests_test_the_oldest_and_the_newest_python_and_torch() -> None:
    pairs = list(supported_pairs())
    corners = [(f"3.{minor}", torch) for minor, torch in (pairs[0], pairs[-1])]
    for job in ("unit", "ranks"):
        matrix = JOBS[job]["strategy"]["matrix"]
        assert [(each["python"], each["torch"]) for each in matrix["include"] if "torch" in each] == corners
        assert matrix["python"] == [python for python, _ in corners]


def test_pull_requests_run_every_test_once_in_short_jobs() -> None:
    on_pull_requests = {name: job for name, job in JOBS.items() if "if" not in job}
    assert all(job["timeout-minutes"] <= 15 for job in on_pull_requests.values())
    text = " ".join(
        part
        for job in on_pull_requests.values()
        for part in (
            *(step.get("run", "") for step in job["steps"]),
            *(each.get("tests", "") for each in job.get("strategy", {}).get("matrix", {}).get("include", ())),
        )
    )
    run = [path for pattern in re.findall(r"\btests/\S+", text) for path in ROOT.glob(pattern)]
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert len([path for path in run if path == file or path in file.parents]) == 1, file


def test_actions_are_pinned_by_digest() -> None:
    files = [
        path
        for path in (ROOT / ".github").rglob("*.yml")
        if "jobs:" in (text := path.read_text()) or "runs:" in text
    ]
    used = [name for path in files for name in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))]
    assert len(files) == 3
    assert len(used) > 20
    for name in used:
        assert re.fullmatch(r"\./\S+|\S+@[0-9a-f]{40} # v[\d.]+", name), name


def test_no_bound_makes_pip_replace_a_newer_torch_or_triton() -> None:
    oldest = TESTED[0].removesuffix(".0")
    assert re.findall(r'"(torch|triton)(>[^;"]*)', PROJECT) == [("torch", f">={oldest}"), ("triton", ">=3.6")]


def test_the_page_lists_every_extra() -> None:
    (extras,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", PROJECT, re.MULTILINE | re.DOTALL)
    section = (
        (ROOT / "docs" / "install.md").read_text(encoding="utf-8").split("\n## Extras\n")[1].split("\n## ")[0]
    )
    listed = re.findall(r"`(\w+)`(?=[^|\n]* \| )", section)
    assert sorted(listed) == sorted(set(re.findall(r"^(\w+) = ", extras, re.MULTILINE)) - {"test", "dev"})


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("docs/install.md", r"tested with torch ([\d.]+) to (\d+\.\d+)"),
        ("docs/containers.md", r"torch ([\d.]+) to ([\d.]+)"),
        ("docker/Dockerfile", r"torch ([\d.]+) to ([\d.]+)"),
        ("megalite/utils/torch_private.py", r"torch from ([\d.]+) to ([\d.]+)"),
    ],
)
def test_documents_name_the_tested_versions(file: str, pattern: str) -> None:
    found = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"))
    assert found == [tuple(".".join(version.split(".")[:2]) for version in (TESTED[0], TESTED[-1]))]


def test_a_machine_without_torch_gets_a_tested_one() -> None:
    for file in ("scripts/install.sh", "docker/Dockerfile.cpu"):
        (version,) = re.findall(r"TORCH_VERSION(?::-|=)(\d[\d.]+)", (ROOT / file).read_text(encoding="utf-8"))
        assert version in TESTED, file


def test_ci_runs_programs_that_exist() -> None:
    steps = [step for job in JOBS.values() for step in job["steps"]]
    programs = [shlex.split(step["run"])[0] for step in steps if "run" in step]
    assert len(programs) > 5
    for program in programs:
        assert program.startswith(".venv/bin/") or (ROOT / program).stat().st_mode & 0o100, program


def test_pre_commit_runs_what_ci_runs() -> None:
    (repository,) = [each for each in _yaml(".pre-commit-config.yaml")["repos"] if each["repo"] == "local"]
    entries = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    in_ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for entry in entries[:3]:
        assert re.search(rf"^ *{re.escape(entry)}", in_ci, re.MULTILINE), entry
    assert entries[3].endswith("tests/test_architecture.py")


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    assert _yaml("CITATION.cff")["version"] == megalite.__version__
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(megalite.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_wheels_are_built_with_a_tested_torch() -> None:
    (version,) = re.findall(r'^before-build = "pip install torch==(\S+) ', PROJECT, re.MULTILINE)
    assert version in TESTED


def test_the_sdist_has_every_kind_of_file_that_is_compiled() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    patterns = {word for word in manifest.split() if word.startswith("*.")}
    assert {f"*{path.suffix}" for path in (ROOT / "csrc").rglob("*") if path.is_file()} == patterns
