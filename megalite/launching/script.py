"""The text of a batch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import resources

from megalite.cli.fields import field_docs, fields_by_flag
from megalite.cli.words import Given, split_words
from megalite.launching.job import Slurm

_COMMENT_COLUMN = 48
_LINE = 130
_PROGRAM_FLAGS = {"--preset": "The model", "--config": "Settings, which the flags here go over"}
"""Words on flags that are no field."""


def batch_script(
    slurm: Slurm,
    words: Sequence[str],
    *,
    title: str,
    file: str,
    save: str | None,
    has_load: bool,
    warn_seconds: int,
    setup: Sequence[str] = (),
) -> str:
    """A script for `bash`.

    Args:
        words: flags of training, of which --save is told apart.
        title: a line on what it does.
        file: its own name.
        save: folder of checkpoints; None for one of the job's own.
        has_load: the words, or a file that they name, say what to load; else it is what the job saved.
        warn_seconds: before the time limit, that Slurm signals the job.
        setup: lines of shell that come before all else.
    """
    values = {
        "title": title,
        "file": file,
        "options": "\n".join(_options(slurm, warn_seconds)),
        "setup": "\n".join(["", "# --- What the cluster needs first ---", *setup, ""]) if setup else "",
        "save": shlex.quote(save) if save else f"${{SAVE:-runs/{slurm.name}-$SLURM_JOB_ID}}",
        "gpus_per_node": str(slurm.gpus_per_node),
        "shutdown_seconds": str(warn_seconds - 60),
        "flags": "\n".join(_flags(words, has_load)),
    }
    template = resources.files(__package__).joinpath("job.sbatch").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _options(slurm: Slurm, warn_seconds: int) -> Iterator[str]:
    given = {"partition": slurm.partition, "account": slurm.account, "exclude": slurm.exclude}
    lines = [
        (f"--job-name={slurm.name}", ""),
        (f"--nodes={slurm.nodes}", f"world size: {slurm.nodes * slurm.gpus_per_node}"),
        ("--ntasks-per-node=1", "one launcher a node: torchrun starts a process for each GPU"),
        (f"--gpus-per-node={slurm.gpus_per_node}", ""),
        (f"--cpus-per-task={slurm.cpus_per_task}", "for launcher, ranks, data and checkpoints of a node"),
        *((f"--{name}={value}", "") for name, value in given.items() if value),
        (f"--time={slurm.limit}", "a limit, not the run's length: the job is requeued until the run is done"),
        (f"--signal=B:USR1@{warn_seconds}", f"this script is warned {warn_seconds} s before the limit"),
        ("--requeue", "Slurm itself starts the job again after a node is lost or the job is preempted"),
        ("--open-mode=append", "a restart adds to the log"),
        ("--output=%x-%j.log", ""),
        *((f"--{option}", "") for option in slurm.options),  # last, so that they count
    ]
    for option, comment in lines:
        line = f"#SBATCH {option}"
        yield f"{line:<38} # {comment}" if comment else line


def _flags(words: Sequence[str], has_load: bool) -> Iterator[str]:
    """A flag a line, each with what its field says of itself."""
    given, _ = split_words(words)
    for flag in given:
        if flag.flag != "--save":
            yield _commented(f"  {shlex.join([flag.name, *flag.words])}", _comment(flag))
    yield '  --save "$save"'
    if not has_load:
        yield _commented('  --load "$save"', "a restart goes on from its own last checkpoint")


def _commented(text: str, comment: str) -> str:
    line = f"{text:<{_COMMENT_COLUMN}}  # {comment}"
    return line if comment and len(line) <= _LINE else text


def _comment(flag: Given) -> str:
    """The first sentence of the field's own words."""
    field = fields_by_flag().get(flag.flag)
    if field is None:
        return _PROGRAM_FLAGS.get(flag.flag, "")
    return re.split(r"(?<!\.)\.(?: |$)|; ", field_docs(field.group)[field.name], maxsplit=1)[0]
