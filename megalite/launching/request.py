"""From make_sbatch's command line to the script and what is said of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megalite.cli import parse
from megalite.cli.tool import ToolParser, local_path, positive_int
from megalite.config import Config
from megalite.errors import UserError
from megalite.launching.job import (
    Slurm,
    chosen_plan,
    plan_notes,
    shortest_limit,
    warning_seconds,
    warnings,
)
from megalite.launching.script import batch_script
from megalite.plan.gpu import find_gpu
from megalite.plan.report import plan_lines
from megalite.plan.request import Request, planning_flags, read_request, training_words

CPUS_PER_GPU = 4
"""That a task has where nothing says so."""


def write_job(arguments: Sequence[str], description: str) -> list[str]:
    """Writes the script; returns what there is to say.

    Raises:
        UserError: mistakes of the command line, or a job that cannot be.
    """
    own, rest = _parser(description).parse_known_args(arguments)
    request, config = _request(own, rest)
    slurm = _slurm(own, request.cluster.gpus_per_node)
    plan = chosen_plan(request)
    warn_seconds = warning_seconds(plan)
    if slurm.seconds <= warn_seconds:
        raise UserError(
            f"--time {own.time} is no longer than the {warn_seconds} s before the limit in which the job is "
            f"warned and saves: give --time {shortest_limit(plan)} or longer"
        )
    output = own.output or Path(f"{own.job_name}.sbatch")
    text = batch_script(
        slurm,
        training_words(request, plan.job.config),
        title=_title(request.cluster.world_size, plan.job.tp, plan.job.pp, plan.job.dp),
        file=str(output),
        save=config.checkpoint.save,
        has_load=config.checkpoint.load is not None,
        warn_seconds=warn_seconds,
        setup=own.setup,
    )
    _write(output, text, own.force)
    return [
        *plan_notes(list(plan_lines(request, plan))),
        "",
        *(f"warning: {warning}" for warning in warnings(request, plan, slurm, config)),
        f"{output} is written: sbatch {output}",
    ]


def _request(own: argparse.Namespace, rest: Sequence[str]) -> tuple[Request, Config]:
    """The plan's request, and the run's own config, which a plan leaves parts of aside."""
    gpus = own.gpus_per_node or (find_gpu(own.gpu).gpus_per_node if own.gpu else 1)
    words = [*(["--gpu", own.gpu] if own.gpu else []), "--gpus-per-node", str(gpus)]
    words += ["--world-size", str(own.nodes * gpus), *rest]
    request = read_request(words)
    if request.is_json:
        raise UserError("--json is for tools/plan.py: leave it out")
    if any(word.partition("=")[0] == "--top" for word in rest):
        raise UserError("--top is for tools/plan.py: leave it out, the job takes the fastest layout")
    config, _ = parse(request.words)
    if config.dry_run.dry_run:
        raise UserError("--dry-run is one process, and no job: leave it out, and run pretrain_gpt.py by hand")
    if config.checkpoint.save is None:
        # The script gives one; its name is told by the job's number.
        request = read_request([*words, "--save", f"runs/{own.job_name}"])
    return request, config


def _slurm(own: argparse.Namespace, gpus_per_node: int) -> Slurm:
    slurm = Slurm(
        own.nodes,
        gpus_per_node,
        own.cpus_per_task or CPUS_PER_GPU * gpus_per_node,
        own.time,
        own.job_name,
        own.partition,
        own.account,
        own.exclude,
        tuple(own.sbatch),
    )
    slurm.check()
    return slurm


def _title(world_size: int, tp: int, pp: int, dp: int) -> str:
    return f"Trains on {world_size} GPUs: tensor-parallel {tp} x pipeline-parallel {pp} x data-parallel {dp}."


def _write(output: Path, text: str, force: bool) -> None:
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"--output {output} is there already: give another file, or --force to replace it"
        ) from None
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}): give another file"
        ) from None


def _parser(description: str) -> argparse.ArgumentParser:
    parser = ToolParser(planning_flags(), description=description)
    add = parser.add_argument
    add("--nodes", type=positive_int, required=True, help="nodes of the job")
    add("--gpu", help="kind of GPU, as tools/plan.py knows it")
    add("--gpus-per-node", type=positive_int, help="by default what such servers have")
    add(
        "--time",
        required=True,
        metavar="LIMIT",
        help="Slurm's time limit of one start, as in 20:00:00 or 2-00:00:00",
    )
    add("--job-name", default="megalite", help="default: megalite")
    add("--partition", help="of the cluster")
    add("--account", help="that the time is booked on")
    add("--exclude", metavar="NODES", help="nodes that are not to be used, as in n3,n[7-9]")
    add("--cpus-per-task", type=positive_int, help=f"CPU cores a node; default {CPUS_PER_GPU} a GPU")
    add(
        "--sbatch",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further options of sbatch, as in qos=high",
    )
    add(
        "--setup",
        nargs="+",
        default=[],
        metavar="LINE",
        help="lines of shell before all else: modules, variables",
    )
    add("--output", "-o", type=local_path, metavar="FILE", help="by default the job's name with .sbatch")
    add("--force", action="store_true", help="replace the file if it is there")
    return parser
