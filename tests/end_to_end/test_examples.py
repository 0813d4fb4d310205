"""The files of examples/, run on four ranks as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
SHORT = ("--train-iters", "3", "--eval-iters", "1")
WRITES = {"own_callback": "loss.csv", "own_loop": "checkpoints/latest"}


def _command(path: Path) -> list[str]:
    """Return the flags of the first command of the docstring, as a shell reads its lines."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(rf"^torchrun --nproc-per-node 4 examples/{path.name} (.*)", text, re.MULTILINE)
    assert found is not None
    return found[1].split()


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_trains_on_four_ranks(path: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*launcher, str(path), *_command(path), "--override-flags", *SHORT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"iteration +3[/:]", done.stdout), done.stdout
    assert "validation loss" in done.stdout
    if path.stem in WRITES:
        assert (tmp_path / WRITES[path.stem]).exists()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_its_command_can_be_copied(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert "--train-iters" in _command(path)
    # Without a backslash before it, a shell takes a line of flags for a command of its own.
    assert [
        line for line, flags in pairwise(lines) if flags.startswith("    --") and not line.endswith("\\")
    ] == []
