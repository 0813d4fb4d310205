"""Which tests are near what has changed since the last commit that others have."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
_EVERYWHERE = {"megalite", "tests", "unit", "ranks"}
"""Folders whose names tell nothing of what is in them."""


def changed_files() -> list[str]:
    """Return the files that differ from the branch of the remote repository, also those not committed.

    Without such a branch, or if it has all commits: those of the last commit.
    """
    uncommitted = [line[3:].split(" -> ")[-1] for line in _git("status", "--porcelain")]
    pushed = _git("merge-base", "HEAD", "@{upstream}")
    before = pushed[0] if pushed and pushed != _git("rev-parse", "HEAD") else "HEAD~1"
    committed = [] if uncommitted and before == "HEAD~1" else _git("diff", "--name-only", before, "HEAD")
    return sorted({*uncommitted, *committed})


def names_of(path: str) -> set[str]:
    """Return the names of a file, without ``test_`` and its ending, and of its folders.

    A test is near a changed file if they share a name: all of ``tests/unit/data`` is near
    ``megalite/data/samples.py``.
    """
    *folders, file = PurePosixPath(path).parts
    return {*folders, file.split(".")[0].removeprefix("test_")} - _EVERYWHERE


def _git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none if it fails."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.splitlines() if result.returncode == 0 else []
