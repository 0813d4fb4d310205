"""From autotune's command line to its table: plans the layouts, runs the best, says which is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import megalite
from megalite.cli import parse
from megalite.cli.tool import ToolParser, local_path, positive_int, positive_number, whole_number
from megalite.errors import UserError
from megalite.plan.answer import nothing_fits
from megalite.plan.estimate import Plan
from megalite.plan.layout import layout_flags
from megalite.plan.request import Request, planning_flags, read_request, start_command, training_words
from megalite.plan.search import fastest, search
from megalite.tuning.results import Results
from megalite.tuning.trial import DONE, PROGRAM, Length, Trial, run_trial

_GB = 1e9
_MOST_RANKS_A_CORE = 8
"""A rank takes a third of a gigabyte before it has a model."""


def autotune(arguments: Sequence[str], description: str, program: Path = PROGRAM) -> Iterator[str]:
    """Tells what it does as it does it, then the table and the best command.

    Raises:
        UserError: mistakes of the command line, or a machine that cannot run what is asked for.
    """
    own, rest = _parser(description).parse_known_args(arguments)
    request = read_request(["--search", *rest])
    length = _length(own)
    if request.is_json:
        raise UserError("--json is for tools/plan.py: leave it out")
    _check_costs(request)
    if request.config.dry_run.dry_run:
        raise UserError("--dry-run computes nothing that could be timed: leave it out")
    _check_machine(request)
    _check_length(request, length)
    plans = _candidates(request, own.top)
    if not torch.cuda.is_available():
        _check_host_memory(plans)
    results = Results(own.folder, _about(request, length))
    yield f"{len(plans)} layouts of {request.cluster.world_size} ranks, {length.iterations} iterations each"
    if not torch.cuda.is_available() and "--calibrate" not in rest:
        yield "warning: planned for GPUs and tried without one: --calibrate plans for this machine"
    trials: list[tuple[Plan, Trial]] = []
    for number, plan in enumerate(plans, 1):
        layout = " ".join(layout_flags(plan.job.config))
        trial = results.get(layout)
        if trial is None or (own.retry and trial.status != DONE):
            yield f"[{number}/{len(plans)}] {layout}"
            config, _ = parse(training_words(request, plan.job.config))
            folder = own.folder / f"trial_{len(results) + 1:03}"
            trial = run_trial(config, request.cluster.world_size, folder, length, program)
            results.add(layout, trial)
        else:
            yield f"[{number}/{len(plans)}] {layout}: known from {own.folder}"
        trials.append((plan, trial))
    yield ""
    yield from _table(trials)
    yield ""
    yield _best(request, trials)


def _candidates(request: Request, count: int) -> list[Plan]:
    found = search(request)
    if not found.fitting:
        raise UserError(nothing_fits(request, found))
    return fastest(found.fitting, count)


def _length(own: argparse.Namespace) -> Length:
    if own.warmup_iterations >= own.iterations:
        raise UserError(
            f"--warmup-iterations {own.warmup_iterations} leaves none of --iterations {own.iterations} to "
            "measure: give fewer"
        )
    return Length(own.iterations, own.warmup_iterations, own.timeout)


def _check_costs(request: Request) -> None:
    """Refuse flags of the whole run's cost: the table has no column for it."""
    costs = {
        "--train-tokens": request.costs.train_tokens,
        "--watts": request.costs.watts,
        "--price-per-gpu-hour": request.costs.price,
    }
    if given := [flag for flag, value in costs.items() if value is not None]:
        raise UserError(f"{', '.join(given)}: costs of a run are for tools/plan.py, leave this out")


def _check_machine(request: Request) -> None:
    """A trial runs here: the whole world must have a place."""
    ranks = request.cluster.world_size
    if not torch.cuda.is_available():
        cores = os.cpu_count() or 1
        if ranks > _MOST_RANKS_A_CORE * cores:
            raise UserError(
                f"--world-size {ranks} is too much for the {cores} cores of this machine, which has no GPU: "
                f"give at most {_MOST_RANKS_A_CORE * cores}"
            )
        return
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        raise UserError(
            f"--world-size {ranks} is more than the {gpus} GPUs of this machine, on which the trials run: "
            "give at most that, with the --global-batch-size that is left of yours for one node"
        )


def _check_host_memory(plans: Sequence[Plan]) -> None:
    """Refuse trials that this machine's memory, shared by all ranks, holds none of."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # What a process takes beside tensors is planned for a GPU, and less here.
    ranks = [plan.job.cluster.world_size / len(plan.memories) for plan in plans]
    needed = min(
        count * sum(memory.total - memory.residual for memory in plan.memories)
        for plan, count in zip(plans, ranks, strict=True)
    )
    if needed > available:
        raise UserError(
            f"the {len(plans)} layouts take at least {needed / _GB:.1f} GB over all ranks, and this machine, "
            f"which has no GPU, has {available / _GB:.1f} GB: start this where the GPUs are, or give "
            "--calibrate to plan for this machine"
        )


def _check_length(request: Request, length: Length) -> None:
    """A trial ends where the run does, and must not end before it is measured."""
    config, _ = parse(request.words)
    told = config.training.train_iters
    if told is not None and told < length.iterations:
        raise UserError(
            f"--train-iters {told} is less than --iterations {length.iterations}, which a trial takes: give "
            "fewer --iterations"
        )


def _about(request: Request, length: Length) -> dict[str, object]:
    """What trials must have in common to stand in one table."""
    return {
        "version": megalite.__version__,
        "flags": list(request.words),
        "world size": request.cluster.world_size,
        "length": asdict(length),
    }


def _table(trials: Sequence[tuple[Plan, Trial]]) -> Iterator[str]:
    yield (
        f"{'':14}{'s/iteration':>22}{'tokens/s':>11}{'GB':>16}\n"
        f"{'':14}{'planned':>11}{'measured':>11}{'measured':>11}{'planned':>8}{'measured':>9}  layout"
    )
    # The fastest first, then those that have no time, in the planner's order.
    for plan, trial in sorted(trials, key=lambda each: each[1].seconds or float("inf")):
        planned = f"{trial.status:14}{plan.time.seconds:11.3f}"
        memory = f"{plan.memory_bytes / _GB:8.2f}"
        layout = " ".join(layout_flags(plan.job.config))
        if trial.seconds is None or trial.tokens_per_second is None or trial.memory_bytes is None:
            yield f"{planned}{'':22}{memory}{'':9}  {layout}\n{'':14}{trial.reason}"
        else:
            measured = f"{trial.seconds:11.3f}{trial.tokens_per_second:11,.0f}"
            yield f"{planned}{measured}{memory}{trial.memory_bytes / _GB:9.2f}  {layout}"


def _best(request: Request, trials: Sequence[tuple[Plan, Trial]]) -> str:
    done = [(trial.seconds, number) for number, (_, trial) in enumerate(trials) if trial.seconds is not None]
    if not done:
        raise UserError("no layout ran to its end: the table says why; --top tries more of them")
    return start_command(request, trials[min(done)[1]][0].job.config)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = ToolParser(planning_flags(), description=description)
    add = parser.add_argument
    add("--top", type=positive_int, default=5, help="layouts to run, the planner's fastest (default 5)")
    add("--iterations", type=positive_int, default=10, help="of each (default 10)")
    add(
        "--warmup-iterations",
        type=whole_number,
        default=3,
        help="of those, that are not measured (default 3)",
    )
    add(
        "--timeout",
        type=positive_number,
        default=900.0,
        help="seconds for one layout, its start included (default 900)",
    )
    add(
        "--folder",
        type=local_path,
        default=Path("runs/autotune"),
        help="for results and logs; a tuning that was ended goes on from it (default runs/autotune)",
    )
    add("--retry", action="store_true", help="run layouts again that failed before")
    return parser
