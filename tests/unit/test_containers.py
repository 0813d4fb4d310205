"""The Dockerfiles: Docker's parser reads them, and what they name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megalite.utils.torch_versions import TESTED

ROOT = Path(__file__).parents[2]
FILES = ("docker/Dockerfile", "docker/Dockerfile.cpu")


def steps(file: str, kind: str) -> list[str]:
    """Return the values of an instruction, in the order of the file."""
    dockerfile = pytest.importorskip("dockerfile")
    return [" ".join(step.value) for step in dockerfile.parse_file(str(ROOT / file)) if step.cmd == kind]


@pytest.mark.parametrize("file", FILES)
def test_steps_are_shell_and_their_scripts_exist(file: str) -> None:
    runs = steps(file, "RUN")
    scripts = {name for step in runs for name in re.findall(r"[\w./]+\.sh", step)}
    assert scripts == {"scripts/install.sh"}
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK)
        subprocess.run(["bash", "-n", ROOT / script], check=True)
    for step in runs:
        subprocess.run(["bash", "-n"], input=step, text=True, check=True)
    assert steps(file, "COPY") == [". ."]
    (path,) = (value.split()[1] for value in steps(file, "ENV"))
    assert path == f"{steps(file, 'WORKDIR')[0]}/.venv/bin:$PATH"


def test_the_cpu_image_runs_as_a_user_and_has_a_supported_torch() -> None:
    assert steps("docker/Dockerfile.cpu", "USER") == ["megalite"]
    (torch,) = (arg for arg in steps("docker/Dockerfile.cpu", "ARG") if arg.startswith("TORCH_VERSION="))
    assert torch.removeprefix("TORCH_VERSION=") in TESTED


def test_images_hold_no_file_that_git_ignores() -> None:
    ignored = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    ignored.add(".hypothesis")
    for line in (ROOT / ".gitignore").read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.sub(r"^\.\w+_cache$", ".*_cache", line.strip("/")) in ignored
    assert ".git" in ignored
    assert (ROOT / ".amlignore").read_text() == (ROOT / ".dockerignore").read_text()


def test_azure_builds_the_dockerfile() -> None:
    build = yaml.safe_load((ROOT / "docker/environment.yml").read_text())["build"]
    assert (ROOT / "docker" / build["path"] / build["dockerfile_path"]).samefile(ROOT / FILES[0])


@pytest.mark.slow
def test_the_steps_of_the_cpu_image_install_megalite(tmp_path: Path) -> None:
    """Run the steps in a copy of the repository, without those that change the system."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
        (tmp_path / name).chmod((ROOT / name).stat().st_mode)
    runs = [step for step in steps(FILES[1], "RUN") if not step.startswith(("apt-get", "useradd"))]
    assert len(runs) == 1
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""}  # with its torch
    subprocess.run(["sh", "-c", runs[0]], cwd=tmp_path, env=environment, check=True)
    plan = [".venv/bin/megalite", "plan", "--gpu", "h100", "--world-size", "64", "--preset", "llama3-8b"]
    done = subprocess.run(
        [*plan, "--global-batch-size", "512"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
