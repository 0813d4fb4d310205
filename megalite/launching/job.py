"""A batch job: what it asks Slurm for, what it starts, and whether that is sound."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megalite.config import Config
from megalite.errors import ConfigError, UserError
from megalite.launching.slurm_time import in_words, seconds_of, slurm_limit
from megalite.plan.answer import nothing_fits
from megalite.plan.check import job_problems
from megalite.plan.estimate import Plan, run_costs
from megalite.plan.layout import LAYOUT_FIELDS, layout_flags
from megalite.plan.request import Request
from megalite.plan.search import fastest, search

_GB = 1e9
MIN_WARNING = 300
"""Seconds before the time limit at which Slurm warns the job: enough for ending an iteration and a save."""
SAVE_SECONDS = 180
"""That a save may take, as nothing is known of the file system."""
_MIN_ITERATIONS = 10
"""A start that trains for less is hardly worth it."""
_WORD = re.compile(r"[^\s\"'`$\\]+")
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
"""Options of sbatch that are flags of make_sbatch, which plans and writes by them."""


@dataclass(frozen=True)
class Slurm:
    """What a job asks Slurm for.

    Attributes:
        limit: time limit in Slurm's words.
        options: further ones, NAME=VALUE each, as sbatch's long options have them.
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
        """Refuses what would not be one line of a script.

        Raises:
            UserError: naming it.
        """
        words = [
            ("--job-name", self.name),
            ("--partition", self.partition),
            ("--account", self.account),
            ("--exclude", self.exclude),
            *(("--sbatch", option) for option in self.options),
        ]
        for flag, word in words:
            if word is not None and not _WORD.fullmatch(word):
                raise UserError(
                    f"{flag} {word!r} has a space, a quote or a dollar in it, which a #SBATCH line cannot"
                )
        if re.search(r"[/{}]", self.name):
            raise UserError(
                f"--job-name {self.name} has a slash or a brace in it, and names files and folders"
            )
        for option in self.options:
            if not re.fullmatch(r"[a-z-]+(=.*)?", option):
                raise UserError(f"--sbatch {option} is no option of sbatch: give NAME=VALUE, as in qos=high")
            name = option.partition("=")[0]
            if name in _OWN_FLAGS:
                raise UserError(f"--sbatch {option}: the script depends on it; give --{name} instead")


def chosen_plan(request: Request) -> Plan:
    """The plan of the given layout, or of the best one where a search is asked for.

    Raises:
        UserError: training would refuse it, or it does not fit; with what would.
    """
    if request.top is not None:
        found = search(request)
        if not found.fitting:
            raise UserError(nothing_fits(request, found))
        return fastest(found.fitting, 1)[0]
    if problems := job_problems(request.config, request.cluster, request.cp):
        raise ConfigError(problems)
    plan = Plan(request.job())
    if not plan.fits:
        raise UserError(_too_large(request, plan))
    return plan


def _too_large(request: Request, plan: Plan) -> str:
    """By how much, what takes most of it, and which layout fits."""
    available = plan.job.cluster.gpu.memory_bytes
    memory = max(plan.memories, key=lambda each: each.total)
    kind, size = max(vars(memory).items(), key=lambda item: item[1])
    text = (
        f"the job does not fit: a GPU needs {memory.total / _GB:.1f} GB of {available / _GB:.1f} GB, "
        f"{(memory.total - available) / _GB:.1f} GB too much, {size / _GB:.1f} GB of it {kind}; "
    )
    if request.config.training.global_batch_size is None:
        return text + "give --global-batch-size to be told which layout fits"
    free = replace(request, given=request.given - set(LAYOUT_FIELDS))
    found = search(free)
    if not found.fitting:
        return text + nothing_fits(free, found)
    return (
        text
        + f"this would, or leave the layout out and give --search: {_flags(fastest(found.fitting, 1)[0])}"
    )


def _flags(plan: Plan) -> str:
    return " ".join(layout_flags(plan.job.config))


def warning_seconds(plan: Plan) -> int:
    """How long before the limit Slurm is to warn the job, in whole minutes."""
    needed = max(MIN_WARNING, 2 * plan.time.seconds + SAVE_SECONDS)
    return 60 * -int(-needed // 60)


def shortest_limit(plan: Plan) -> str:
    """Return the shortest sensible --time: until Slurm's warning it trains for a few iterations."""
    return slurm_limit(warning_seconds(plan) + _MIN_ITERATIONS * plan.time.seconds)


def warnings(request: Request, plan: Plan, slurm: Slurm, config: Config) -> Iterator[str]:
    """What will not go as one would like.

    Args:
        config: the run's own, with all that a plan leaves aside.
    """
    seconds, limit = plan.time.seconds, slurm.seconds
    usable = limit - warning_seconds(plan)
    interval = config.checkpoint.save_interval
    if usable < _MIN_ITERATIONS * seconds:
        yield (
            f"--time {slurm.limit} leaves {in_words(max(usable, 0))} to train before the job is warned, and "
            f"an iteration takes {in_words(seconds)}: give --time {shortest_limit(plan)} or longer"
        )
    if interval is None:
        yield "there is no --save-interval: a rank or a node that fails takes the run back to the job's start"
    elif interval * seconds > usable:
        yield (
            f"--time {slurm.limit} is shorter than --save-interval {interval}, which takes "
            f"{in_words(interval * seconds)}: a job saves at its end alone, and a lost node loses all of it"
        )
    minutes = config.training.exit_duration_in_mins
    if minutes is not None and minutes * 60 > usable:
        yield (
            f"--exit-duration-in-mins {minutes:g} is later than the warning, {usable / 60:.0f} minutes after "
            "the start: it has no effect"
        )
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is not None and load != save:
        yield f"--load {load} is not where the job saves: each restart begins from {load} again; leave it out"
    if plan.job.tp > slurm.gpus_per_node:
        yield f"--tp {plan.job.tp} goes over the {slurm.gpus_per_node} GPUs of a node, and is slow there"
    if not config.data.mock_data and not config.data.data_path:
        yield "there is no --data-path: give it behind the script's name when you submit it"
    days = run_costs(plan, request.costs).get("days")
    if days is not None and usable > 0 and days * 86400 > usable:
        yield (
            f"the run takes {days:.1f} days, so about {-int(-days * 86400 // usable)} starts of "
            f"{slurm.limit}: the job is requeued until it is done"
        )
    if days is None:
        yield "how long the run is nobody says: give --train-iters or --train-samples"


def plan_notes(lines: Sequence[str]) -> list[str]:
    """A plan's lines without its command, which the script takes the place of."""
    kept = list(lines)
    if kept and kept[-1].startswith("torchrun"):
        kept.pop()
    while kept and not kept[-1]:
        kept.pop()
    return kept
