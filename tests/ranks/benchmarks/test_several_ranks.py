"""The checks of several ranks, rehearsed over gloo as a user rehearses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_stages_of_several_ranks_pass_in_a_rehearsal(tmp_path: Path) -> None:
    command = ["scripts/check_gpu.sh", "--rehearse", "--stage", "5", "11", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {
        result["name"]: result["verdict"]
        for number in (5, 11)
        for check in json.loads((tmp_path / f"stage_{number}.json").read_text())["checks"]
        for result in check["results"]
    }
    assert [name for name, verdict in verdicts.items() if verdict == "skipped"] == [
        "Triton's attention on several ranks"  # needs a GPU
    ]
    passed = [name for name, verdict in verdicts.items() if verdict == "ok"]
    for name in (
        *("run with pp 4, zb-h1, losses", "resume with tp 2, pp 2, losses", "a run after it"),
        *("verify_layout pp4zb", "async save, --zero-stage 3 --params-dtype bf16", "gpt-tiny fp64 pp4zb"),
    ):
        assert name in passed
