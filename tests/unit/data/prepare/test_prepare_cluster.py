"""A corpus by array jobs, with a program in place of sbatch, and by actors of Ray: that of one machine."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import prepare as program
from megalite.data.prepare.plan import PASSES, SUBMITTED_OPTIONS
from megalite.utils.errors import UserError

from .conftest import digests_of, plan_of, write_texts

TEXTS = [["one", "two", "three " * 9], ["four", "five"] * 9, ["six", "one"]]
SETTINGS: dict[str, Any] = {"shuffle": 1, "shards": 3}
SBATCH = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["SUBMITTED"], "a+") as file:
    number = file.seek(0, 1) and len(open(os.environ["SUBMITTED"]).readlines())
    if number == int(os.environ.get("REFUSE", -1)):
        sys.exit("sbatch: error: Job violates\\n  accounting policy")
    file.write(json.dumps(sys.argv[1:]) + "\\n")
print(f"{number + 7};cluster")
"""


def prepare(folder: Path, *flags: str, **run: Any) -> None:
    plan_of(folder, **SETTINGS, run=run)
    program.main(["--config", str(folder / "corpus.yaml"), *flags])


def test_array_jobs_wait_for_the_pass_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "in", TEXTS)
    prepare(tmp_path, workers=1)
    whole = digests_of(tmp_path)
    shutil.rmtree(tmp_path / "out")
    slurm = {"executor": "slurm", "workers": 2, "time": 14400, "sbatch": {"mem": "8G", "exclusive": True}}
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "bin"))
        with pytest.raises(UserError, match="executor slurm needs sbatch, which is not here"):
            prepare(tmp_path, **slurm)
    submitted = tmp_path / "submitted"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("SUBMITTED", str(submitted))
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(UserError, match=r"the pass tokenize \(submitted already: 7\): .* Job violates accou"):
        prepare(tmp_path, **slurm)
    monkeypatch.delenv("REFUSE")
    (tmp_path / "bin" / "squeue").write_text('#!/bin/sh\n[ "$3" = --jobs=7 ] && echo 7 && echo 7')
    (tmp_path / "bin" / "squeue").chmod(0o755)
    with pytest.raises(UserError, match=r"still wait or run in Slurm: 7: wait .* scancel 7$"):
        prepare(tmp_path, "--overwrite", **slurm)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexit 1")
    submitted.unlink()
    prepare(tmp_path, "--pass", "sign", **slurm)  # here, and so not again in a job
    capsys.readouterr()
    with pytest.raises(UserError, match="slurm needs the number of workers: set run: workers, or pass"):
        prepare(tmp_path, **slurm | {"workers": None})
    prepare(tmp_path, "--workers", "2", **slurm | {"workers": None})
    assert "submitted to Slurm: tokenize 7, shard 8, finish 9\n" in capsys.readouterr().out
    before = None
    for name, line in zip(PASSES[2:], submitted.read_text().splitlines(), strict=True):
        *flags, wrap = json.loads(line)
        size = 1 if name == "finish" else 2
        names = {flag[2:].partition("=")[0] for flag in (*flags, wrap)}
        assert names - {"parsable", "time", "mem", "exclusive"} <= set(SUBMITTED_OPTIONS)
        assert {"--time=240", "--mem=8G", "--exclusive", f"--array=0-{size - 1}"} <= set(flags)
        assert [flag for flag in flags if "dependency" in flag] == ([before] if before else [])
        before = f"--dependency=afterok:{PASSES[2:].index(name) + 7}"
        for number in range(size):
            command = shlex.split(wrap.replace("$SLURM_ARRAY_TASK_ID", str(number)))
            program.main(command[command.index("prepare") + 1 :])
    assert (tmp_path / "out" / "c.logs" / "jobs").read_text() == "7,8,9"
    shutil.rmtree(tmp_path / "out" / "c.logs")
    assert digests_of(tmp_path) == whole


@pytest.mark.slow
def test_actors_of_ray_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more actors than cores, and after one that died; a task's error is that of one machine."""
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in", TEXTS)
    (tmp_path / "once.py").write_text(
        "import os, pathlib\n"
        "def die(text):\n"
        "    if pathlib.Path('die').exists():\n"
        "        pathlib.Path('die').unlink()\n"
        "        os._exit(1)\n"
        "    return True\n"
    )
    prepared = {"input": "in", "output": "out/c", "steps": [{"python": "once:die"}]}
    plan_of(tmp_path, **SETTINGS, **prepared)
    program.main(["--config", "corpus.yaml", "--workers", "1"])
    whole = digests_of(tmp_path)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "die").touch()
    options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": 2e8}
    with ray.init(num_cpus=2, **options):
        plan_of(tmp_path, **SETTINGS, **prepared, run={"executor": "ray", "workers": 3})
        program.main(["--config", "corpus.yaml"])
        assert not (tmp_path / "die").exists()
        assert digests_of(tmp_path) == whole
        (tmp_path / "in" / "000.jsonl").write_text("{bad\n")
        with pytest.raises(UserError, match=r"^in/000.jsonl line 1: not valid JSON"):
            program.main(["--config", "corpus.yaml", "--overwrite"])
