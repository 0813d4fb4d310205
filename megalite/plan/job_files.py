"""Files that start a job: a batch script for Slurm, and a PyTorchJob of Kubeflow's operator for Kubernetes.

Each is a template beside this file, job.sbatch or job.yaml, with placeholders in double braces.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

from megalite.config.arguments import FlagTokens, split_tokens
from megalite.config.fields import field_docs, fields_by_flag
from megalite.config.yaml_file import yaml_value
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError
from megalite.utils.object_store import is_object_url

_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        r"(?P<m>\d+)",
        r"(?P<m>\d+):(?P<s>\d+)",
        r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
        r"(?P<d>\d+)-(?P<h>\d+)",
        r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+)",
        r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
    )
)
"""Formats of --time, from `man sbatch`."""
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(text: str) -> int:
    """Return a time limit in Slurm's format as seconds; a plain number is minutes.

    Raises:
        UserError: the text is not a time limit, or the limit is 0.
    """
    for form in _FORMS:
        if match := form.fullmatch(text):
            seconds = sum(_SECONDS[unit] * int(number) for unit, number in match.groupdict().items())
            if seconds:
                return seconds
    raise UserError(
        f"--time {text} is not a time limit: pass minutes, hours:minutes:seconds or "
        "days-hours:minutes:seconds, for example 90, 20:00:00 or 2-00:00:00"
    )


def slurm_limit(seconds: float) -> str:
    """Return a length of time in the format of --time, rounded up to minutes: 20:00:00 or 2-00:00:00."""
    minutes = -int(-seconds // 60)
    hours, days = minutes // 60 % 24, minutes // (60 * 24)
    clock = f"{hours:02d}:{minutes % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SBATCH_VALUE = re.compile(r"[^\s\"'`$\\#]+")
_OWN_FLAGS = (
    "job-name",
    "nodes",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "partition",
    "account",
    "exclude",
)
"""Options of sbatch that are flags of megalite launch, since plan and script depend on them."""


@dataclass(frozen=True)
class Slurm:
    """Requests of a job to Slurm.

    Attributes:
        limit: time limit, in Slurm's format.
        options: more options for sbatch, NAME=VALUE each.
    """

    nodes: int
    gpus_per_node: int
    cpus_per_task: int
    limit: str
    name: str
    partition: str | None = None
    account: str | None = None
    exclude: str | None = None
    options: tuple[str, ...] = ()

    @property
    def seconds(self) -> int:
        return seconds_of(self.limit)

    def check(self) -> None:
        """Check that every value fits in a #SBATCH line.

        Raises:
            UserError: a value does not fit, or an option is unknown or is a flag of megalite launch.
        """
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"--job-name {self.name!r} is part of the names of files and folders: pass letters, digits, "
                "dots, dashes and underscores, a letter or a digit first"
            )
        values = [
            ("--partition", self.partition),
            ("--account", self.account),
            ("--exclude", self.exclude),
            *(("--sbatch", option) for option in self.options),
        ]
        for flag, value in values:
            if value is not None and not _SBATCH_VALUE.fullmatch(value):
                raise UserError(
                    f"{flag} {value!r} has a space, a quote, a backslash, a dollar or a number sign, which "
                    "#SBATCH lines cannot have: pass another value"
                )
        for option in self.options:
            if not re.fullmatch(r"[a-z-]+(=.*)?", option):
                raise UserError(
                    f"--sbatch {option} is not an option of sbatch: pass NAME=VALUE, for example qos=high"
                )
            name = option.partition("=")[0]
            if name in _OWN_FLAGS:
                raise UserError(f"--sbatch {option}: the script depends on it; pass --{name} instead")


@dataclass(frozen=True)
class StartedRun:
    """Run that a job starts, and what its file says of it.

    Attributes:
        tokens: flags of training; a batch script replaces --save by `save`.
        title: the first comment.
        file: name of the file, quoted for a shell.
        command: torchrun's arguments that start the program.
        save: folder of checkpoints, or their URL; None for a folder named after Slurm's job.
        has_load: the flags, or a file that they name, set --load; otherwise the job loads what it saved.
    """

    tokens: Sequence[str]
    title: str
    file: str
    command: str
    save: str | None
    has_load: bool = False


def batch_script(
    slurm: Slurm,
    run: StartedRun,
    *,
    warn_seconds: int,
    setup: Sequence[str] = (),
    saves: bool = True,
    written_by: str = "launch",
) -> str:
    """Return the text of a batch script for bash.

    Args:
        warn_seconds: how long before the time limit Slurm signals the job.
        setup: shell commands to run first.
        saves: whether the run saves checkpoints.
        written_by: megalite's command that writes the script.
    """
    values = {
        "title": run.title,
        "written_by": command_name(written_by),
        "python": shlex.quote(_python()),
        "file": run.file,
        "command": run.command,
        "options": "\n".join(_options(slurm, warn_seconds)),
        "setup": "\n".join(["", "# --- Setup of the cluster ---", *setup, ""]) if setup else "",
        "save": shlex.quote(run.save) if run.save else f'"${{SAVE:-runs/{slurm.name}-$SLURM_JOB_ID}}"',
        "gpus_per_node": str(slurm.gpus_per_node),
        "note": '"$PWD/requeue-$SLURM_JOB_ID"' if run.save and is_object_url(run.save) else '"$save/requeue"',
        "shutdown_seconds": str(warn_seconds - 60),
        "flags": "\n".join(_sbatch_flags(run.tokens, saves, run.has_load)),
    }
    return _fill("job.sbatch", values)


def _python() -> str:
    """Return the path of this Python; relative if it is in a virtual environment of the current folder."""
    python, here = Path(sys.executable), Path.cwd()
    return str(python.relative_to(here) if python.is_relative_to(here) else python)


def _options(slurm: Slurm, warn_seconds: int) -> Iterator[str]:
    given = {"partition": slurm.partition, "account": slurm.account, "exclude": slurm.exclude}
    lines = [
        (f"--job-name={slurm.name}", ""),
        (f"--nodes={slurm.nodes}", f"world size: {slurm.nodes * slurm.gpus_per_node}"),
        ("--ntasks-per-node=1", "one launcher per node: torchrun starts a process per GPU"),
        (f"--gpus-per-node={slurm.gpus_per_node}", ""),
        (f"--cpus-per-task={slurm.cpus_per_task}", "for a node's launcher, ranks, data and checkpoints"),
        *((f"--{name}={value}", "") for name, value in given.items() if value),
        (f"--time={slurm.limit}", "a limit, not the run's length: the job is requeued until the run is done"),
        (f"--signal=B:USR1@{warn_seconds}", f"this script is warned {warn_seconds} s before the limit"),
        ("--requeue", "Slurm itself starts the job again after a node is lost or the job is preempted"),
        ("--open-mode=append", "a restart adds to the log"),
        ("--output=%x-%j.log", ""),
        *((f"--{option}", "") for option in slurm.options),  # last, so that they override the others
    ]
    for option, comment in lines:
        line = f"#SBATCH {option}"
        yield f"{line:<38} # {comment}" if comment else line


def _sbatch_flags(tokens: Sequence[str], saves: bool, has_load: bool) -> Iterator[str]:
    """Yield one line per flag, with the first sentence of its help."""
    for flag in split_tokens(tokens)[0]:
        if flag.flag != "--save":
            yield _commented(f"  {shlex.join(flag.tokens)}", _flag_comment(flag), 48)
    if saves:
        yield '  --save="$save"'
    if saves and not has_load:
        yield _commented('  --load="$save"', "a restart resumes from its own last checkpoint", 48)


_SECURITY = """
              securityContext:
                capabilities: {add: [IPC_LOCK]}  # RDMA pins memory"""


@dataclass(frozen=True)
class Kubernetes:
    """Requests of a job to Kubernetes.

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
        if is_object_url(save):
            return
        if save is None or not any(PurePosixPath(save).is_relative_to(folder) for folder in self.folders):
            found = "is missing" if save is None else f"{save} is not in a --volume"
            raise UserError(
                f"--save {found}: pods lose their files when they end; pass for example "
                f"--volume runs:/runs --save /runs/{self.name}"
            )


def pytorch_job(job: Kubernetes, run: StartedRun, *, grace_seconds: int) -> str:
    """Return the text of a job file.

    Args:
        run: the run, with a folder of checkpoints.
        grace_seconds: seconds between SIGTERM and the end of a pod.
    """
    assert run.save is not None  # see `Kubernetes.check`
    load = [] if run.has_load else ["--load", run.save]
    limits = {"nvidia.com/gpu": job.gpus_per_node, **({yaml_value(job.network): 1} if job.network else {})}
    claims = sorted(set(job.folders.values()))
    values = {
        "title": run.title,
        "launch": command_name("launch"),
        "file": run.file,
        "name": job.name,
        "quoted_name": yaml_value(job.name),  # unquoted, a name such as "on" is not text
        "gpus_per_node": str(job.gpus_per_node),
        "nodes": str(job.nodes),
        "grace_seconds": str(grace_seconds),
        "shutdown_seconds": str(grace_seconds - 30),
        "image": yaml_value(job.image),
        "command": ", ".join(map(yaml_value, shlex.split(run.command))),
        "flags": "\n".join(_args([*run.tokens, *load])),
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
    return _fill("job.yaml", values)


def _args(tokens: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a YAML list: each flag and its value, with the first sentence of its help."""
    for flag in split_tokens(tokens)[0]:
        words = (f"{flag.name}={flag.values[0]}",) if len(flag.values) == 1 else flag.tokens
        # Kubernetes replaces $(NAME) with a variable, and $$ with $.
        first, *others = (f"                - {yaml_value(word.replace('$', '$$'))}" for word in words)
        yield _commented(first, _flag_comment(flag), 58)
        yield from others


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Return the text of a template with a value for each {{name}} in it."""
    text = resources.files(__package__).joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


_LINE = 130
_PROGRAM_FLAGS = {"--preset": "The model", "--config": "Settings, which the flags here override"}
"""Comments on flags that do not set a field."""


def _commented(text: str, comment: str, column: int) -> str:
    line = f"{text:<{column}}  # {comment}"
    return line if comment and len(line) <= _LINE else text


def _flag_comment(flag: FlagTokens) -> str:
    """Return the first sentence of a flag's help; an empty string for a flag without one."""
    field = fields_by_flag().get(flag.flag)
    if field is None:
        return _PROGRAM_FLAGS.get(flag.flag, "")
    return re.split(r"(?<!\.)\.(?: |$)|; ", field_docs(field.group)[field.name], maxsplit=1)[0]
