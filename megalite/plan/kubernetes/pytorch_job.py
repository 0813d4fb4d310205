"""Write a Kubernetes job file: a PyTorchJob of Kubeflow's training operator."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath

from megalite.commands import command_name
from megalite.config.arguments import split_tokens
from megalite.config.yaml_file import yaml_value
from megalite.errors import UserError
from megalite.plan.slurm.sbatch_script import flag_comment

_SECURITY = """
              securityContext:
                capabilities: {add: [IPC_LOCK]}  # RDMA pins memory"""
_COMMENT_COLUMN = 58
_LINE = 130


@dataclass(frozen=True)
class Kubernetes:
    """Describes what a job requests from Kubernetes.

    Attributes:
        image: image built from docker/Dockerfile, or another image with megalite.
        cpus: CPU cores per pod; there is one pod per node.
        volumes: CLAIM:FOLDER each: a persistent volume claim, and the folder where pods mount it.
        network: extended resource for InfiniBand, such as rdma/hca_shared_devices_a.
    """

    image: str
    nodes: int
    gpus_per_node: int
    cpus: int
    name: str
    volumes: tuple[str, ...] = ()
    network: str | None = None

    @property
    def folders(self) -> dict[str, str]:
        """Return the claims, by the folder where each is mounted."""
        return {folder: claim for claim, _, folder in (volume.partition(":") for volume in self.volumes)}

    def check(self, save: str | None) -> None:
        """Check names, and that checkpoints outlive the pods.

        Args:
            save: folder of checkpoints.

        Raises:
            UserError: Kubernetes would reject a name, or checkpoints would be lost with their pod.
        """
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", self.name):
            raise UserError(
                f"--job-name {self.name!r} is not a valid name in Kubernetes: pass up to 42 lower-case "
                "letters, digits and dashes, such as llama-8b"
            )
        for volume in self.volumes:
            if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?:/\S+", volume):
                raise UserError(f"--volume {volume!r} is not CLAIM:FOLDER: pass it as in --volume runs:/runs")
        if self.network is not None and not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?", self.network):
            raise UserError(
                f"--network {self.network!r} is not a Kubernetes resource: pass it as in "
                "--network rdma/hca_shared_devices_a"
            )
        folders = [volume.partition(":")[2] for volume in self.volumes]
        if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
            raise UserError(f"--volume mounts two claims at {twice}: pass another folder for one of them")
        if save is None or not any(PurePosixPath(save).is_relative_to(folder) for folder in self.folders):
            found = "is missing" if save is None else f"{save} is not in a --volume"
            raise UserError(
                f"--save {found}: pods lose their files when they end; pass for example "
                f"--volume runs:/runs --save /runs/{self.name}"
            )


def pytorch_job(
    job: Kubernetes,
    tokens: Sequence[str],
    *,
    title: str,
    file: str,
    command: str,
    save: str,
    has_load: bool,
    grace_seconds: int,
) -> str:
    """Return the text of a job file.

    Args:
        tokens: flags of training.
        title: the first comment.
        file: name of the job file.
        command: torchrun's arguments that start the program.
        save: folder of checkpoints.
        has_load: the flags, or a file that they name, set --load; otherwise the job loads what it saved.
        grace_seconds: seconds between SIGTERM and the end of a pod.
    """
    limits = {"nvidia.com/gpu": job.gpus_per_node, **({yaml_value(job.network): 1} if job.network else {})}
    claims = sorted(set(job.folders.values()))
    values = {
        "title": title,
        "launch": command_name("launch"),
        "file": file,
        "name": job.name,
        "quoted_name": yaml_value(job.name),  # unquoted, a name such as "on" is not text
        "gpus_per_node": str(job.gpus_per_node),
        "nodes": str(job.nodes),
        "grace_seconds": str(grace_seconds),
        "shutdown_seconds": str(grace_seconds - 30),
        "image": yaml_value(job.image),
        "command": ", ".join(map(yaml_value, shlex.split(command))),
        "flags": "\n".join(_args([*tokens, *([] if has_load else ["--load", save])])),
        "limits": "\n".join(f"                  {name}: {count}" for name, count in limits.items()),
        "cpus": str(job.cpus),
        "security": _SECURITY if job.network else "",
        "mounts": "\n".join(
            f"                - {{name: volume-{claims.index(claim)}, mountPath: {yaml_value(folder)}}}"
            for folder, claim in job.folders.items()
        ),
        "volumes": "\n".join(
            f"            - {{name: volume-{i}, persistentVolumeClaim: {{claimName: {yaml_value(claim)}}}}}"
            for i, claim in enumerate(claims)
        ),
    }
    template = resources.files(__package__).joinpath("job.yaml").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _args(tokens: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a YAML list: each flag and its value, with the first sentence of its help."""
    for flag in split_tokens(tokens)[0]:
        words = (f"{flag.name}={flag.values[0]}",) if len(flag.values) == 1 else flag.tokens
        # Kubernetes replaces $(NAME) with a variable, and $$ with $.
        first, *others = (f"                - {yaml_value(word.replace('$', '$$'))}" for word in words)
        line = f"{first:<{_COMMENT_COLUMN}}  # {flag_comment(flag)}"
        yield line if flag_comment(flag) and len(line) <= _LINE else first
        yield from others
