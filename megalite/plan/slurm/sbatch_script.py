"""Write a Slurm batch script, and warn about the job."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import takewhile
from pathlib import Path

from megalite.commands import command_name
from megalite.config import Config
from megalite.config.arguments import FlagTokens, split_tokens
from megalite.config.fields import field_docs, fields_by_flag
from megalite.config.layout_options import LAYOUT_FIELDS
from megalite.config.rules import data_rules
from megalite.errors import ConfigError, UserError
from megalite.plan.estimate import RunPlan, run_costs
from megalite.plan.layout_fields import layout_flags
from megalite.plan.layout_search import search, simplest
from megalite.plan.plan_report import goodput_of, nothing_fits
from megalite.plan.plan_request import Request
from megalite.plan.planned_run import run_problems

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


def duration_text(seconds: float) -> str:
    """Return a length of time as text."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} seconds"


_GB = 1e9
MIN_WARNING = 300
"""Minimum seconds before the time limit at which Slurm warns the job, to finish an iteration and save."""
SAVE_SECONDS = 180
"""Seconds to allow for a save, since the file system is unknown."""
_MIN_ITERATIONS = 10
"""Minimum number of iterations that each start of the job should train."""
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
    """Describes what a job requests from Slurm.

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


def chosen_plan(request: Request) -> RunPlan:
    """Return the plan of the requested layout, or with --search or --layout auto of the best.

    Raises:
        UserError: training would reject the layout, or it does not fit; the message names one that fits.
    """
    if request.top is not None:
        found = search(request)
        if not found.fitting:
            raise UserError(nothing_fits(request, found))
        return simplest(found.fitting)
    if problems := run_problems(request.config, request.cluster):
        raise ConfigError(problems)
    plan = RunPlan(request.planned_run())
    if not plan.fits:
        raise UserError(_too_large(request, plan))
    return plan


def _too_large(request: Request, plan: RunPlan) -> str:
    """Say by how much the layout is too large, what takes most memory, and which layout fits."""
    available = plan.run.cluster.gpu.memory_bytes
    memory = plan.largest_memory
    kind, size = max(memory._asdict().items(), key=lambda item: item[1])
    text = (
        f"the job does not fit: it needs {memory.total / _GB:.1f} GB per GPU of {available / _GB:.1f} GB, "
        f"{(memory.total - available) / _GB:.1f} GB too much; {size / _GB:.1f} GB are {kind}; "
    )
    if request.config.training.global_batch_size is None:
        return text + "pass --global-batch-size to see a layout that fits"
    free = replace(request, fixed_fields=request.fixed_fields - set(LAYOUT_FIELDS))
    found = search(free)
    if not found.fitting:
        return text + nothing_fits(free, found)
    flags = " ".join(layout_flags(simplest(found.fitting).run.config))
    return f"{text}pass --search without a layout, or the layout {flags}"


def warning_seconds(plan: RunPlan) -> int:
    """Return how many seconds before the limit Slurm should warn the job, in whole minutes."""
    needed = max(MIN_WARNING, 2 * plan.time.seconds + SAVE_SECONDS)
    return 60 * -int(-needed // 60)


def shortest_limit(plan: RunPlan) -> str:
    """Return the shortest useful --time: a few iterations before Slurm's warning."""
    return slurm_limit(warning_seconds(plan) + _MIN_ITERATIONS * plan.time.seconds)


def warnings(request: Request, plan: RunPlan, slurm: Slurm, config: Config) -> Iterator[str]:
    """Yield warnings about the job and its time limit.

    Args:
        config: the run's own config, which has options that a plan ignores.
    """
    seconds, limit = plan.time.seconds, slurm.seconds
    usable = limit - warning_seconds(plan)
    if usable < _MIN_ITERATIONS * seconds:
        yield (
            f"--time {slurm.limit} leaves {duration_text(max(usable, 0))} to train before the job is warned, "
            f"and an iteration takes {duration_text(seconds)}: pass --time {shortest_limit(plan)} or longer"
        )
    checkpoint = config.checkpoint
    for flag, interval, unit in (
        ("--save-interval", checkpoint.save_interval, seconds),
        ("--save-interval-minutes", checkpoint.save_interval_minutes, 60.0),
    ):
        if interval is not None and interval * unit > usable:
            yield (
                f"--time {slurm.limit} is shorter than {flag} {interval:.10g}, which takes "
                f"{duration_text(interval * unit)}: a job saves only at its end, and loses it all with a node"
            )
    minutes = config.training.exit_duration_in_mins
    if minutes is not None and minutes * 60 > usable:
        yield (
            f"--exit-duration-in-mins {minutes:g} is later than the warning, {usable / 60:.0f} minutes after "
            "the start: it has no effect"
        )
    yield from run_warnings(request, plan, config)
    if not config.data.mock_data and not config.data.corpus_options():
        yield "--data-path is not set: pass it after the script's name when you submit the script"
    for problem in data_rules.tokenizer(config, None):
        yield f"{problem.text}, here or after the script's name when you submit the script"
    days = run_costs(plan, request.costs).get("days")
    if days is not None and usable > 0 and days * 86400 > usable:
        yield (
            f"the run takes {days:.1f} days, so about {-int(-days * 86400 // usable)} starts of "
            f"{slurm.limit}: the job is requeued until it is done"
        )


def run_warnings(request: Request, plan: RunPlan, config: Config) -> Iterator[str]:
    """Yield warnings about the run that do not depend on the launcher; `config` is as in `warnings`."""
    if not config.checkpoint.saves_at_intervals:
        text = "--save-interval is not set: a rank or a node that fails loses all work since the job started"
        goodput = goodput_of(request, plan)
        yield text if goodput is None else f"{text}; pass --save-interval {goodput.intervals.best}"
    load, gpus = config.checkpoint.load, request.cluster.gpus_per_node
    if load is not None and not config.checkpoint.loads_own:
        yield f"--load {load} is not --save: every restart would start from {load} again; remove it"
    if plan.run.tp > gpus:
        yield f"--tp {plan.run.tp} is larger than the {gpus} GPUs of a node, which is slow"
    if run_costs(plan, request.costs).get("days") is None:
        yield "the run has no length: pass --train-iters or --train-samples"


def plan_notes(lines: Sequence[str]) -> list[str]:
    """Return the lines of a plan, without the command, which the script replaces."""
    kept = list(takewhile(lambda line: not line.startswith("torchrun "), lines))
    while kept and not kept[-1]:
        kept.pop()
    return kept


_COMMENT_COLUMN = 48
_LINE = 130
_PROGRAM_FLAGS = {"--preset": "The model", "--config": "Settings, which the flags here override"}
"""Comments on flags that do not set a field."""


def batch_script(
    slurm: Slurm,
    tokens: Sequence[str],
    *,
    title: str,
    file: str,
    command: str,
    save: str | None,
    has_load: bool,
    warn_seconds: int,
    setup: Sequence[str] = (),
    saves: bool = True,
    written_by: str = "launch",
) -> str:
    """Return the text of a batch script for bash.

    Args:
        tokens: flags of training; --save is replaced by `save`.
        title: the first comment.
        file: name of the script, quoted for a shell.
        command: torchrun's arguments that start the program.
        save: folder of checkpoints; None for a folder named after the job.
        has_load: the flags, or a file that they name, set --load; otherwise the job loads what it saved.
        warn_seconds: how long before the time limit Slurm signals the job.
        setup: shell commands to run first.
        saves: whether the run saves checkpoints.
        written_by: megalite's command that writes the script.
    """
    values = {
        "title": title,
        "written_by": command_name(written_by),
        "python": shlex.quote(_python()),
        "file": file,
        "command": command,
        "options": "\n".join(_options(slurm, warn_seconds)),
        "setup": "\n".join(["", "# --- Setup of the cluster ---", *setup, ""]) if setup else "",
        "save": shlex.quote(save) if save else f'"${{SAVE:-runs/{slurm.name}-$SLURM_JOB_ID}}"',
        "gpus_per_node": str(slurm.gpus_per_node),
        "shutdown_seconds": str(warn_seconds - 60),
        "flags": "\n".join(_sbatch_flags(tokens, saves, has_load)),
    }
    template = resources.files(__package__).joinpath("job.sbatch").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


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
            yield _commented(f"  {shlex.join(flag.tokens)}", flag_comment(flag))
    if saves:
        yield '  --save="$save"'
    if saves and not has_load:
        yield _commented('  --load="$save"', "a restart resumes from its own last checkpoint")


def _commented(text: str, comment: str) -> str:
    line = f"{text:<{_COMMENT_COLUMN}}  # {comment}"
    return line if comment and len(line) <= _LINE else text


def flag_comment(flag: FlagTokens) -> str:
    """Return the first sentence of a flag's help; an empty string for a flag without one."""
    field = fields_by_flag().get(flag.flag)
    if field is None:
        return _PROGRAM_FLAGS.get(flag.flag, "")
    return re.split(r"(?<!\.)\.(?: |$)|; ", field_docs(field.group)[field.name], maxsplit=1)[0]
