"""A corpus that array jobs of a real Slurm write, one pass after the other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import prepare as program
from megalite.utils.errors import UserError
from tests.slurm.cluster import Slurm, needs_slurm
from tests.unit.data.prepare.conftest import digests_of, plan_of, write_texts

pytestmark = [pytest.mark.slow, needs_slurm]

ROOT = Path(__file__).parents[2]
TEXTS = [["one", "two", "one"], ["four", "five"] * 9, ["six"]]
END_SECONDS = 600.0


def test_array_jobs_write_the_corpus_of_one_machine(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad record fails its pass, those after it are cancelled, and the same command continues."""
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in", TEXTS)
    settings: dict[str, Any] = {"shuffle": 1, "shards": 3}
    plan_of(tmp_path, **settings)
    program.main(["--config", "corpus.yaml"])
    whole = digests_of(tmp_path)
    shutil.rmtree(tmp_path / "out")

    def submitted() -> dict[str, str]:
        capsys.readouterr()
        program.main(["--config", "corpus.yaml", "--overwrite"])
        said, *_ = capsys.readouterr().out.splitlines()
        jobs = said.removeprefix("submitted to Slurm: ").split(", ")
        return dict(each.split(" ") for each in jobs)

    run = {"executor": "slurm", "workers": 2, "partition": "debug", "time": 1200, "sbatch": {"mem": "1G"}}
    plan_of(tmp_path, **settings, run=run)
    file = tmp_path / "in" / "000.jsonl"
    good, status = file.read_text(), file.stat()
    file.write_text("{bad\n")
    jobs = submitted()
    assert list(jobs) == ["sign", "tokenize", "shard", "finish"]  # nothing to match without deduplication
    assert slurm.state(jobs["sign"])["TimeLimit"] == "00:20:00"
    with pytest.raises(UserError, match=f"still wait or run in Slurm: .*{jobs['finish']}: wait until"):
        submitted()
    slurm.wait(jobs["finish"], {"CANCELLED"}, END_SECONDS)
    slurm.wait_for_all()
    file.write_text(good)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # the report has the times of the input
    logs = "".join(file.read_text() for file in (tmp_path / "out" / "c.logs").glob("sign-*.log"))
    assert "000.jsonl line 1: not valid JSON" in logs
    jobs = submitted()
    state = slurm.wait(jobs["finish"], {"COMPLETED", "FAILED", "CANCELLED"}, END_SECONDS)
    said = "".join(file.read_text() for file in sorted((tmp_path / "out" / "c.logs").iterdir()))
    assert state["JobState"] == "COMPLETED", said
    assert "wrote" in (tmp_path / "out" / "c.logs" / "finish-0.log").read_text()
    shutil.rmtree(tmp_path / "out" / "c.logs")
    assert digests_of(tmp_path) == whole
    program.main(["--config", "corpus.yaml"])
    assert "complete already" in capsys.readouterr().out


def test_a_refused_option_is_one_line(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.conf)
    write_texts(tmp_path / "in", TEXTS)
    plan_of(tmp_path, run={"executor": "slurm", "workers": 2, "partition": "none"})
    with pytest.raises(UserError, match=r"^sbatch refuses the pass sign: .*invalid partition"):
        program.main(["--config", str(tmp_path / "corpus.yaml")])
