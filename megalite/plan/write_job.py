"""The launch command: plan the run, and write the batch script or the job file."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.config import Config
from megalite.config.config import LAYOUT_FIELDS
from megalite.config.rules import training_rules
from megalite.frontends.command_line import TRAINED_BY, parse
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.plan.estimate import RunPlan, run_costs
from megalite.plan.job_files import Kubernetes, Slurm, StartedRun, batch_script, pytorch_job, slurm_limit
from megalite.plan.layout_fields import layout_flags
from megalite.plan.layout_search import search, simplest
from megalite.plan.plan_options import SCALING_FLAGS, refuse_options
from megalite.plan.plan_report import goodput_of, nothing_fits, plan_lines, requested_plan, search_fitting
from megalite.plan.plan_request import Request, job_tokens, planning_flags, read_request
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError
from megalite.utils.files import write_output
from megalite.utils.hardware.gpus import find_gpu

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
"""Characters that end a line, or that a shell or a YAML file cannot hold."""
CPUS_PER_GPU = 4
"""Default of --cpus-per-task, per GPU."""
_GB = 1e9
MIN_WARNING = 300
"""Minimum seconds before the time limit at which Slurm warns the job, to finish an iteration and save."""
SAVE_SECONDS = 180
"""Seconds to allow for a save, since the file system is unknown."""
_MIN_ITERATIONS = 10
"""Minimum number of iterations that each start of the job should train."""


def write_job(arguments: Sequence[str], description: str) -> list[str]:
    """Write the batch script or the job file for a command line, and return the lines to print.

    Raises:
        UserError: the command line is invalid, training would reject the run, or the run does not fit.
    """
    if hostile := next(filter(_CONTROL.search, arguments), None):
        raise UserError(f"{hostile!r} has a line break or another control character: pass it without")
    own, rest = _parser(description).parse_known_args(arguments)
    request, config = _request(own, rest)
    gpus = request.cluster.gpus_per_node
    job = _kubernetes(own, gpus, config) if own.kubernetes else _slurm(own, gpus)
    plan = chosen_plan(request)
    output = own.output or Path(f"{own.job_name}{'.yaml' if own.kubernetes else '.sbatch'}")
    started = StartedRun(
        job_tokens(request, plan.run.config),
        title=_title(request, plan),
        file=as_word(output),
        command=shlex.join(request.program_arguments),
        save=config.checkpoint.save,
        has_load=config.checkpoint.load is not None,
    )
    if isinstance(job, Kubernetes):
        submit, found = "kubectl apply --filename", run_warnings(request, plan, config)
        text = pytorch_job(job, started, grace_seconds=warning_seconds(plan))
    else:
        submit, found = "sbatch", warnings(request, plan, job, config)
        text = batch_script(job, started, warn_seconds=checked_warning(job, plan), setup=own.setup)
    write_script(output, text, own.force)
    return [
        *plan_lines(request, plan),
        "",
        *(f"warning: {warning}" for warning in found),
        f"wrote {output}; submit it with: {submit} {as_word(output)}",
    ]


def as_word(file: Path) -> str:
    """Quote a file's name for a shell, so that no program takes it for an option."""
    return shlex.quote(f"./{file}" if str(file).startswith("-") else str(file))


def _title(request: Request, plan: RunPlan) -> str:
    run = plan.run
    if request.layout == "auto":
        return f"Train on {run.cluster.world_size} GPUs, in the layout that each start chooses."
    table = run.config.parallel.mesh.model
    sizes = " x ".join(
        f"{axis.meaning} {run.sizes[axis.name]}" for axis in table.by_flag if axis.name in run.sizes
    )
    return f"Train on {run.cluster.world_size} GPUs: {sizes}."


def checked_warning(slurm: Slurm, plan: RunPlan) -> int:
    """Return how many seconds before the time limit Slurm should warn the job.

    Raises:
        UserError: the time limit is too short for that.
    """
    warn_seconds = warning_seconds(plan)
    if slurm.seconds <= warn_seconds:
        raise UserError(
            f"--time {slurm.limit} is too short, since the job is warned {warn_seconds} s before the limit "
            f"so that it can save: pass --time {shortest_limit(plan)} or longer"
        )
    return warn_seconds


def duration_text(seconds: float) -> str:
    """Return a length of time as text."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} seconds"


def chosen_plan(request: Request) -> RunPlan:
    """Return the plan of the requested layout, or with --search or --layout auto of the best.

    Raises:
        UserError: training would reject the layout, or it does not fit; the message names one that fits.
    """
    if request.top is not None:
        return simplest(search_fitting(request).fitting)
    plan = requested_plan(request)
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
    for problem in training_rules.tokenizer(config, None):
        yield f"{problem.text}, here or after the script's name when you submit the script"
    days = run_costs(plan, request.costs).get("days")
    if days is not None and usable > 0 and days * 86400 > usable:
        yield (
            f"the run takes {days:.1f} days, so about {-int(-days * 86400 // usable)} starts of "
            f"{slurm.limit}: the job is requeued until it is done"
        )


def run_warnings(request: Request, plan: RunPlan, config: Config) -> Iterator[str]:
    """Yield warnings about the run that do not depend on the launcher; `config` is as in `warnings`."""
    if not config.checkpoint.saves_at_intervals and not config.checkpoint.peer_copies:
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


def _request(own: argparse.Namespace, rest: Sequence[str]) -> tuple[Request, Config]:
    """Return the plan's request, and the run's own config, which has options that a plan ignores."""
    refuse_options(rest, SCALING_FLAGS, ("plan", "scaling"))
    refuse_options(rest, ("--json",))
    refuse_options(rest, ("--top",), reason=", the job uses one layout")
    gpus = own.gpus_per_node or (find_gpu(own.gpu).gpus_per_node if own.gpu else 1)
    tokens = [*(["--gpu", own.gpu] if own.gpu else []), "--gpus-per-node", str(gpus)]
    tokens += ["--world-size", str(own.nodes * gpus), *rest]
    request = read_request(tokens)
    config, _ = parse(request.training_tokens)
    if config.dry_run.dry_run:
        program = command_name(TRAINED_BY[config.model.architecture])
        raise UserError(f"--dry-run is one process, not a job: remove it, or run {program} instead")
    if config.checkpoint.save is None:
        # The script sets a folder with the job's number. The plan only needs to know that --save is set.
        request = read_request([*tokens, "--save", f"runs/{own.job_name}"])
    return request, config


def _kubernetes(own: argparse.Namespace, gpus_per_node: int, config: Config) -> Kubernetes:
    for name in ("time", "partition", "account", "exclude", "sbatch", "setup"):
        if getattr(own, name):
            raise UserError(f"--{name} is for Slurm: remove it, or remove --kubernetes")
    if not config.data.mock_data and not config.data.corpus_options():
        raise UserError("--data-path is missing: pass corpora in a --volume, or --mock-data")
    for problem in training_rules.tokenizer(config, None):
        raise UserError(problem.text)
    cpus = own.cpus_per_task or CPUS_PER_GPU * gpus_per_node
    job = Kubernetes(
        own.kubernetes, own.nodes, gpus_per_node, cpus, own.job_name, tuple(own.volume), own.network
    )
    job.check(config.checkpoint.save)
    return job


def _slurm(own: argparse.Namespace, gpus_per_node: int) -> Slurm:
    if own.time is None:
        raise UserError("--time is missing: pass Slurm's time limit, or --kubernetes with an image")
    for name in ("volume", "network"):
        if getattr(own, name):
            raise UserError(f"--{name} is for Kubernetes: remove it, or pass --kubernetes with an image")
    return slurm_job(own, own.nodes, gpus_per_node, own.job_name)


def slurm_job(own: argparse.Namespace, nodes: int, gpus_per_node: int, name: str) -> Slurm:
    """Return what a job requests from Slurm, from the flags of `add_slurm_flags`.

    Raises:
        UserError: a flag is invalid.
    """
    slurm = Slurm(
        nodes,
        gpus_per_node,
        own.cpus_per_task or CPUS_PER_GPU * gpus_per_node,
        own.time,
        name,
        own.partition,
        own.account,
        own.exclude,
        tuple(own.sbatch),
    )
    slurm.check()
    return slurm


def write_script(output: Path, text: str, force: bool) -> None:
    """Write a file, and create its folder; with `force`, replace the file if it exists."""
    if output.exists() and not force:
        raise UserError(f"--output {output} exists already: pass another file, or --force to replace it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}): pass another file"
        ) from None
    write_output(output, text, "--output")


def _parser(description: str) -> ToolParser:
    parser = ToolParser(planning_flags(), description=description)
    add = parser.add_argument
    add("--nodes", type=positive_int, required=True, help="number of nodes of the job")
    add("--gpu", help="type of GPU, as for megalite plan")
    add("--gpus-per-node", type=positive_int, help="GPUs per node (default: as in usual servers)")
    add_slurm_flags(parser)
    add(
        "--kubernetes",
        metavar="IMAGE",
        help="write a Kubeflow PyTorchJob that runs this image, instead of a Slurm script",
    )
    add(
        "--volume",
        nargs="+",
        default=[],
        metavar="CLAIM:FOLDER",
        help="Kubernetes: persistent volume claims, and where to mount them, for example runs:/runs",
    )
    add(
        "--network",
        metavar="RESOURCE",
        help="Kubernetes: resource for InfiniBand, for example rdma/hca_shared_devices_a",
    )
    add("--job-name", default="megalite", help="name of the job (default: megalite)")
    add(
        "--output",
        "-o",
        type=local_path,
        metavar="FILE",
        help="file to write (default: the job's name with .sbatch or .yaml)",
    )
    add("--force", action="store_true", help="replace the file if it exists")
    return parser


def add_slurm_flags(parser: ToolParser) -> None:
    """Add the flags of what a job requests from Slurm, besides its nodes and its name."""
    add = parser.add_argument
    add(
        "--time",
        metavar="LIMIT",
        help="Slurm's time limit of one start of the job, for example 20:00:00 or 2-00:00:00",
    )
    add("--partition", help="partition of the cluster")
    add("--account", help="account to charge")
    add("--exclude", metavar="NODES", help="nodes not to use, for example n3,n[7-9]")
    add("--cpus-per-task", type=positive_int, help=f"CPU cores per node (default: {CPUS_PER_GPU} per GPU)")
    add(
        "--sbatch",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="more options for sbatch, for example qos=high",
    )
    add(
        "--setup",
        nargs="+",
        default=[],
        metavar="LINE",
        help="shell commands to run first, for example to load modules",
    )
