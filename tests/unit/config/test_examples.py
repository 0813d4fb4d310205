"""The example configs and job files: each is valid for the machines that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megalite.config import check_config
from megalite.config.command_line import parse

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


def test_azureml_job() -> None:
    job = yaml.safe_load((SCRIPTS / "azureml_job.yaml").read_text())
    flags = job["command"].split("pretrain_gpt.py")[1].split()
    config, notices = parse(flags)
    assert notices == []
    nodes, processes = job["resources"]["instance_count"], job["distribution"]["process_count_per_instance"]
    check_config(config, nodes * processes)
    inputs = {word for word in flags if word.startswith("${{")}
    assert {word.split(".")[1].split("}")[0] for word in inputs} <= {*job["inputs"], *job["outputs"]}
