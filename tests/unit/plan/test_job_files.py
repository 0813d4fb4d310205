"""Job files for Kubernetes: the requested resources and flags, refused if checkpoints would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.frontends.command_line import parse
from megalite.plan.write_job import write_job
from megalite.utils.errors import UserError

CLUSTER = ("--nodes", "2", "--gpu", "a100-80", "--gpus-per-node", "4", "--kubernetes", "registry/megalite:1")
VOLUMES = ("--volume", "corpora:/data", "runs:/runs", "--save", "/runs/a")
RUN = (
    *("--preset", "llama2-7b", "--global-batch-size", "64", "--bf16", "--train-iters", "1000"),
    *("--save-interval", "100", "--data-path", "0.5", "/data/a b", "0.5", "/data/#c"),
    *("--tp", "4", "--pp", "2", "--micro-batch-size", "1"),
)


def job_of(tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[str]]:
    """Return the job, and the lines to print."""
    file = tmp_path / "job.yaml"
    said = write_job([*CLUSTER, "--output", str(file), *words], "")
    return yaml.safe_load(file.read_text()), said


def test_a_pod_for_each_node_trains(tmp_path: Path) -> None:
    job, said = job_of(tmp_path, *RUN, *VOLUMES, "--network", "rdma/shared", "--job-name", "llama")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == "llama"
    spec = job["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert spec["nprocPerNode"] == "4"  # the definition takes a string
    assert (
        worker["replicas"]
        == spec["elasticPolicy"]["minReplicas"]
        == spec["elasticPolicy"]["maxReplicas"]
        == 2
    )
    assert worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["name"], container["image"]) == ("pytorch", "registry/megalite:1")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "rdma/shared": 1}
    assert container["resources"]["requests"] == {"cpu": 16}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    program, option, seconds, *rest = container["command"]
    assert (program, option, rest) == ("torchrun", "--shutdown-timeout", ["-m", "megalite", "train"])
    assert int(seconds) < pod["terminationGracePeriodSeconds"] == 300
    assert said[-1].endswith(f"kubectl apply --filename {tmp_path / 'job.yaml'}")


def test_the_flags_are_those_of_the_run(tmp_path: Path) -> None:
    job, _ = job_of(tmp_path, *RUN, *VOLUMES)
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert parse(container["args"])[0] == parse([*RUN, "--save", "/runs/a", "--load", "/runs/a"])[0]
    job, _ = job_of(tmp_path, *RUN, *VOLUMES, "--load", "/data/other", "--force")
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert parse(container["args"])[0] == parse([*RUN, "--save", "/runs/a", "--load", "/data/other"])[0]
    assert "securityContext" not in container


def test_volumes_are_mounted(tmp_path: Path) -> None:
    job, _ = job_of(tmp_path, *RUN, *VOLUMES[:3], "corpora:/more", "--save", "/runs/a")
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    by_name = {volume.pop("name"): volume for volume in pod["volumes"]}
    claims = {
        mount["mountPath"]: by_name[mount["name"]].get("persistentVolumeClaim", {}).get("claimName")
        for mount in pod["containers"][0]["volumeMounts"]
    }
    assert claims == {"/dev/shm": None, "/data": "corpora", "/runs": "runs", "/more": "corpora"}
    assert len(by_name) == 3
    assert by_name["shared-memory"]["emptyDir"]["medium"] == "Memory"


def test_warnings_do_not_depend_on_a_time_limit(tmp_path: Path) -> None:
    without = [word for word in RUN if word not in ("--save-interval", "100")]
    _, said = job_of(tmp_path, *without, *VOLUMES)
    (warning,) = (line for line in said if line.startswith("warning"))
    assert warning.startswith("warning: --save-interval is not set")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "/runs/a"], "--save /runs/a is not in a --volume: pods lose their files"),
        (["--volume", "runs:/runs"], "--save is missing: pods lose their files"),
        (["--volume", "runs:/run", "--save", "/runs/a"], "--save /runs/a is not in a --volume"),
        (["--volume", "runs=/runs", "--save", "/runs/a"], "--volume 'runs=/runs' is not CLAIM:FOLDER"),
        (["--volume", "runs:/runs", "b:/runs", "--save", "/runs/a"], "--volume mounts two claims at /runs"),
        ([*VOLUMES, "--job-name", "Llama_8b"], "--job-name 'Llama_8b' is not a valid name in Kubernetes"),
        ([*VOLUMES, "--time", "20:00:00"], "--time is for Slurm: remove it, or remove --kubernetes"),
        ([*VOLUMES, "--setup", "module load cuda"], "--setup is for Slurm"),
    ],
)
def test_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job_of(tmp_path, *RUN, *words)
    assert not list(tmp_path.iterdir())


def test_a_job_without_data_is_refused(tmp_path: Path) -> None:
    i = RUN.index("--data-path")
    with pytest.raises(UserError, match="--data-path is missing: pass corpora in a --volume"):
        job_of(tmp_path, *RUN[:i], *RUN[i + 5 :], *VOLUMES)


def test_a_job_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny = ("--preset", "gpt-tiny", "--padded-vocab-size", "512", "--global-batch-size", "64", *RUN[5:])
    with pytest.raises(UserError, match=r"^the vocabulary size is unknown: pass --vocab-size"):
        job_of(tmp_path, *tiny, *VOLUMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--time is missing: pass Slurm's time limit, or --kubernetes"),
        (["--time", "20:00:00", "--network", "rdma/shared"], "--network is for Kubernetes"),
    ],
)
def test_slurm_refuses_options_of_kubernetes(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_job([*CLUSTER[:-2], *RUN, *words], "")
