"""The autotune command: plan all layouts, run the fastest ones, and report the best."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import megalite
from megalite.config.yaml_file import to_yaml
from megalite.frontends.command_line import parse
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int, positive_number, whole_number
from megalite.plan.estimate import RunPlan
from megalite.plan.layout_fields import layout_flags
from megalite.plan.layout_search import fastest
from megalite.plan.plan_options import SCALING_FLAGS, refuse_options
from megalite.plan.plan_report import search_fitting
from megalite.plan.plan_request import Request, planning_flags, read_request, start_command, training_tokens
from megalite.plan.trial import DONE, Length, Results, Trial, run_trial
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError
from megalite.utils.files import replace_file
from megalite.utils.hardware.host_memory import total_bytes

_GB = 1e9
BEST_FILE = "best.yaml"
"""File name of the fastest layout's config, in the folder of the results."""
_MAX_RANKS_PER_CORE = 8
"""A rank uses a third of a gigabyte without a model."""


def autotune(
    arguments: Sequence[str], description: str, program: Sequence[str] | None = None
) -> Iterator[str]:
    """Yield the progress of the trials, then the table and the fastest layout's command.

    Raises:
        UserError: the command line is invalid, or this machine cannot run the trials.
    """
    own, rest = _parser(description).parse_known_args(arguments)
    refuse_options(rest, SCALING_FLAGS, ("plan", "scaling"))
    refuse_options(rest, ("--json",))
    request = read_request(["--search", *rest])
    length = trial_length(own)
    _check_costs(request)
    check_machine(request.cluster.world_size, f"--world-size {request.cluster.world_size}")
    check_length(request, length)
    plans = fastest(search_fitting(request).fitting, own.top)
    if not torch.cuda.is_available():
        _check_host_memory(plans)
    results = Results(own.folder, _about(request, length))
    yield f"{len(plans)} layouts of {request.cluster.world_size} ranks, {length.iterations} iterations each"
    if not torch.cuda.is_available() and "--calibrate" not in rest:
        yield "warning: the plan is for GPUs, but this machine has none: pass --calibrate to plan for it"
    trials: list[tuple[RunPlan, Trial]] = []
    for number, plan in enumerate(plans, 1):
        layout = " ".join(layout_flags(plan.run.config))
        trial = results.get(layout)
        if trial is None or (own.retry and trial.status != DONE):
            yield f"[{number}/{len(plans)}] {layout}"
            config, _ = parse(training_tokens(request, plan.run.config))
            folder = own.folder / f"trial_{len(results) + 1:03}"
            started = program or request.program_arguments
            trial = run_trial(config, request.cluster.world_size, folder, length, started)
            results.add(layout, trial)
        else:
            yield f"[{number}/{len(plans)}] {layout}: already in {own.folder}"
        trials.append((plan, trial))
    yield ""
    yield from _table(trials)
    yield ""
    yield from _best(request, trials, own.folder)


def trial_length(own: argparse.Namespace) -> Length:
    """Return the length of a trial, which the flags of `add_length` set."""
    if own.warmup_iterations >= own.iterations:
        raise UserError(
            f"--warmup-iterations {own.warmup_iterations} leaves none of --iterations {own.iterations} to "
            f"measure: pass at most --warmup-iterations {own.iterations - 1}"
        )
    return Length(own.iterations, own.warmup_iterations, own.timeout)


def _check_costs(request: Request) -> None:
    """Reject flags for the costs of the whole run, since the table does not show them."""
    costs = {
        "--train-tokens": request.costs.train_tokens,
        "--watts": request.costs.watts,
        "--price-per-gpu-hour": request.costs.price,
        "--node-mtbf": request.reliability,
    }
    if flags := [flag for flag, value in costs.items() if value is not None]:
        raise UserError(
            f"{', '.join(flags)}: only {command_name('plan')} shows the costs of a run; remove it"
        )


def check_machine(ranks: int, requested: str) -> None:
    """Check that all ranks of a trial can run on this machine.

    Args:
        requested: the flag that requests the ranks, as on the command line.
    """
    if not torch.cuda.is_available():
        cores = os.cpu_count() or 1
        if ranks > _MAX_RANKS_PER_CORE * cores:
            raise UserError(
                f"{requested} is too large for the {cores} cores of this machine, which has no GPU: "
                f"pass at most {_MAX_RANKS_PER_CORE * cores} ranks"
            )
        return
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        raise UserError(
            f"{requested} is more than the {gpus} GPUs of this machine, on which the trials run: pass at "
            f"most {gpus} ranks, and a proportionally smaller --global-batch-size"
        )


def _check_host_memory(plans: Sequence[RunPlan]) -> None:
    """Check that at least one trial fits in this machine's memory, which all ranks share."""
    available = total_bytes()
    # The residual memory of a process is planned for a GPU; here it is smaller.
    ranks = [plan.run.cluster.world_size / len(plan.memories) for plan in plans]
    needed = min(
        count * sum(memory.total - memory.residual for memory in plan.memories)
        for plan, count in zip(plans, ranks, strict=True)
    )
    if needed > available:
        raise UserError(
            f"the {len(plans)} layouts need at least {needed / _GB:.1f} GB over all ranks, but this machine "
            f"has no GPU and {available / _GB:.1f} GB: run autotune on a machine with GPUs, or pass "
            "--calibrate to plan for this one"
        )


def check_length(request: Request, length: Length) -> None:
    """Check that the run computes something, and is not shorter than a trial."""
    if request.config.dry_run.dry_run:
        raise UserError("--dry-run computes nothing that could be timed: remove it")
    config, _ = parse(request.training_tokens)
    train_iters = config.training.train_iters
    if train_iters is not None and train_iters < length.iterations:
        raise UserError(
            f"--train-iters {train_iters} is less than --iterations {length.iterations} of a trial: pass "
            f"--iterations {train_iters}, or a larger --train-iters"
        )


def _about(request: Request, length: Length) -> dict[str, object]:
    """Return the settings that all trials of a table have in common."""
    return {
        "version": megalite.__version__,
        "flags": list(request.training_tokens),
        "world size": request.cluster.world_size,
        "length": asdict(length),
    }


def _table(trials: Sequence[tuple[RunPlan, Trial]]) -> Iterator[str]:
    yield (
        f"{'':14}{'s/iteration':>22}{'tokens/s':>11}{'GB':>16}\n"
        f"{'':14}{'planned':>11}{'measured':>11}{'measured':>11}{'planned':>8}{'measured':>9}  layout"
    )
    # Fastest first. Trials without a time come last, in the planner's order.
    for plan, trial in sorted(trials, key=lambda each: each[1].seconds or float("inf")):
        planned = f"{trial.status:14}{plan.time.seconds:11.3f}"
        memory = f"{plan.memory_bytes / _GB:8.2f}"
        layout = " ".join(layout_flags(plan.run.config))
        if trial.seconds is None or trial.tokens_per_second is None or trial.memory_bytes is None:
            yield f"{planned}{'':22}{memory}{'':9}  {layout}\n{'':14}{trial.reason}"
        else:
            measured = f"{trial.seconds:11.3f}{trial.tokens_per_second:11,.0f}"
            yield f"{planned}{measured}{memory}{trial.memory_bytes / _GB:9.2f}  {layout}"
    yield "GB (10^9 bytes): planned for the largest rank, measured on the reporting rank"


def _best(request: Request, trials: Sequence[tuple[RunPlan, Trial]], folder: Path) -> Iterator[str]:
    """Write the fastest layout's config to a file for --config, and yield the command that trains with it."""
    done = [(trial.seconds, number) for number, (_, trial) in enumerate(trials) if trial.seconds is not None]
    if not done:
        raise UserError("no layout finished: the table says why; pass a larger --top to try more")
    best = trials[min(done)[1]][0].run.config
    file = folder / BEST_FILE
    config, _ = parse(training_tokens(request, best))
    with replace_file(file) as stream:
        stream.write(to_yaml(config).encode())
    yield f"wrote {file}: the config of the fastest layout, for --config"
    yield start_command(request, best)


def add_length(parser: ToolParser) -> None:
    """Add the flags of the length of a trial."""
    add = parser.add_argument
    add("--iterations", type=positive_int, default=10, help="iterations of each trial (default: 10)")
    add(
        "--warmup-iterations",
        type=whole_number,
        default=3,
        help="how many of these iterations are not measured (default: 3)",
    )
    add(
        "--timeout",
        type=positive_number,
        default=900.0,
        help="seconds for one trial, including its start (default: 900)",
    )


def _parser(description: str) -> argparse.ArgumentParser:
    parser = ToolParser(planning_flags(), description=description)
    add = parser.add_argument
    add(
        "--top",
        type=positive_int,
        default=5,
        help="how many of the planner's fastest layouts to run (default: 5)",
    )
    add_length(parser)
    add(
        "--folder",
        type=local_path,
        default=Path("runs/autotune"),
        help="folder for results and logs; tuning resumes from it (default: runs/autotune)",
    )
    add("--retry", action="store_true", help="run failed layouts again")
    return parser
