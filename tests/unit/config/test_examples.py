"""The example configs and job files: each is valid for the machines that it names."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config import check_config
from megalite.frontends.command_line import parse

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.parametrize(
    ("name", "world_size", "num_iterations", "schedule"),
    [("bloom-176b", 384, 115_311, "1f1b"), ("gpt-175b", 1024, 95_367, "interleaved")],
)
def test_published_runs(name: str, world_size: int, num_iterations: int, schedule: str) -> None:
    file = str(SCRIPTS / "examples" / f"{name}.yaml")
    flags = ("--data-path", "corpus", "--save", "runs", "--tensorboard-dir", "runs")
    config, notices = parse(["--config", file, *flags])
    assert notices == []
    check_config(config, world_size)
    assert config.num_iterations(8) == num_iterations
    assert config.parallel.schedule == schedule


def check_flags(flags: Sequence[str], world_size: int) -> None:
    config, notices = parse(flags)
    assert notices == []
    check_config(config, world_size)


def test_azureml_job() -> None:
    """Check what the command-job schema of Azure ML restricts, and that names are declared."""
    job = yaml.safe_load((SCRIPTS / "azureml_job.yaml").read_text())
    launcher, flags = job["command"].split("megalite train ")
    assert launcher == ""
    nodes, processes = job["resources"]["instance_count"], job["distribution"]["process_count_per_instance"]
    check_flags(flags.split(), nodes * processes)
    used = set(re.findall(r"\$\{\{((?:in|out)puts\.\w+)\}\}", flags))
    assert used == {f"{kind}.{name}" for kind in ("inputs", "outputs") for name in job[kind]}
    assert {each["mode"] for each in job["inputs"].values()} <= {"ro_mount", "download"}
    assert {each["mode"] for each in job["outputs"].values()} <= {"rw_mount", "upload"}
    assert re.fullmatch(r"\d+[bkmg]", job["resources"]["shm_size"])
    nodes_of = {each["type"]: each.get("nodes") for each in job["services"].values()}
    assert nodes_of == {"tensor_board": None, "jupyter_lab": "all", "vs_code": "all", "ssh": "all"}
    assert f"--tensorboard-dir {job['services']['curves']['log_dir']}" in flags
    assert all(isinstance(value, str) for value in job["environment_variables"].values())
    environment = yaml.safe_load((SCRIPTS.parent / "docker" / "environment.yml").read_text())
    assert job["environment"] == f"azureml:{environment['name']}@latest"


def test_skypilot_task() -> None:
    task: dict[str, Any] = yaml.safe_load((SCRIPTS / "skypilot_task.yaml").read_text())
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    words = shlex.split(task["run"].replace("\\\n", " "))
    flags = words[words.index("pretrain_gpt.py") + 1 : words.index("||")]
    gpus = int(task["resources"]["accelerators"].split(":")[1])
    check_flags(flags, task["num_nodes"] * gpus)
    folders = {f"/{word.split('/')[1]}" for word in flags if word.startswith("/")}
    assert folders == {*task["file_mounts"], *task["volumes"]}
    assert (SCRIPTS.parent / task["setup"]).is_file()
