"""Run the example of CONTRIBUTING as its reader does: its script, and the commands that start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def _block(language: str) -> str:
    """Return the only code block of a language."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_callback_stops_a_run_of_one_rank(tmp_path: Path) -> None:
    """The folder stands for the repository root: the script goes there, and so does what the run writes."""
    for name in ("megalite", "pretrain_gpt.py", "scripts", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "stop_at_loss.py").write_text(_block("python"), encoding="utf-8")
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **{**os.environ, "PATH": paths, "PYTHONPATH": str(tmp_path)},
        **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    }
    done = subprocess.run(
        ["sh", "-e", "-c", _block("sh")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.search(r"^exiting after iteration (\d+): the loss is below 3\.5$", done.stdout, re.MULTILINE)
    assert ends is not None, done.stdout + done.stderr
    assert 1 < int(ends[1]) < 100
