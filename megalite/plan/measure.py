"""The autotune and the scaling command: run planned layouts, or numbers of nodes, for some iterations each.

`autotune` plans all layouts, runs the fastest ones, and reports the best. `measure_scaling` runs each number
of nodes, here or on Slurm, beside its plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import megalite
from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.config.yaml_file import to_yaml
from megalite.frontends.command_line import parse
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int, positive_number, whole_number
from megalite.plan.estimate import RunPlan
from megalite.plan.job_files import StartedRun, batch_script
from megalite.plan.layout_fields import layout_flags
from megalite.plan.layout_search import fastest
from megalite.plan.plan_options import SCALING_FLAGS, refuse_options
from megalite.plan.plan_report import search_fitting
from megalite.plan.plan_request import Request, planning_flags, read_request, start_command, training_tokens
from megalite.plan.scaling import (
    ScaledRun,
    ScalingPoint,
    as_objects,
    scaled_runs,
    scaling_svg,
    scaling_title,
    table_lines,
)
from megalite.plan.trial import DONE, Length, Results, Trial, read_measured, run_trial, trial_config
from megalite.plan.write_job import add_slurm_flags, as_word, checked_warning, slurm_job, write_script
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError, counted
from megalite.utils.files import replace_file, write_output
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
    own, rest = _autotune_parser(description).parse_known_args(arguments)
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


def _autotune_parser(description: str) -> argparse.ArgumentParser:
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


CONFIG_FILE, METRICS_FILE, SCRIPT_FILE = "config.yaml", "metrics.jsonl", "job.sbatch"
_SLURM_FLAGS = ("partition", "account", "exclude", "cpus_per_task", "sbatch", "setup")


def measure_scaling(
    arguments: Sequence[str], description: str, program: Sequence[str] | None = None
) -> Iterator[str]:
    """Yield the progress of the runs, then the table.

    Args:
        program: arguments to Python that run the training program, if it is not megalite's.

    Raises:
        UserError: the command line is invalid, or this machine cannot run the trials.
    """
    own, rest = _scaling_parser(description).parse_known_args(arguments)
    request, length = _request(own, rest), trial_length(own)
    check_length(request, length)
    try:
        own.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {own.folder} cannot be used ({error.strerror}): pass another") from None
    assert request.scaling is not None
    config, _ = parse(training_tokens(request, request.config))
    if own.time is None and not torch.cuda.is_available() and config.parallel.num_threads is None:
        # A rank alone on a machine would use all its cores, and ranks that share it one each.
        config = with_fields(config, num_threads=1)
    trials = _Trials(own, request, config, length)
    runs = scaled_runs(request, request.cluster)
    if not request.is_json:
        yield from (f"note: {text}" for text in (*request.assumed, *request.notices))
    if own.time is not None:
        if scripts := [trials.script(run) for run in trials.missing(runs)]:
            commands = [f"sbatch {as_word(script)}" for script in scripts]
            if request.is_json:
                yield json.dumps({"submit": commands})
            else:
                yield from ("submit each job, and run this command again to see the table:", *commands)
            return
    else:
        started = program or request.program_arguments
        for run in trials.missing(runs):
            ranks = run.cluster.world_size
            if not request.is_json:
                text = f"{counted(run.nodes, 'node')}, {counted(ranks, 'rank')}, batch {run.global_batch}"
                yield f"{text}: {length.iterations} iterations"
            trials.run(run, started)
    points = [run.planned(request, "planned") for run in runs]
    points += [_measured_point(run, trials.result(run)) for run in runs]
    if request.scaling.svg is not None:
        write_output(request.scaling.svg, scaling_svg(points, scaling_title(request)), "--svg")
    if request.is_json:
        yield json.dumps({"scaling": as_objects(points), "notices": [*request.assumed, *request.notices]})
    else:
        yield from ("", *table_lines(points))


def _measured_point(run: ScaledRun, trial: Trial) -> ScalingPoint:
    numbers = trial.seconds, trial.tokens_per_second, trial.memory_bytes
    ranks = run.cluster.world_size
    return ScalingPoint(run.mode, "measured", run.nodes, ranks, run.global_batch, *numbers, note=trial.reason)


class _Trials:
    """Runs of a table. Each has a folder with its config, its metrics and its logs.

    A run that has been measured with the same config is not run again.
    """

    def __init__(self, own: argparse.Namespace, request: Request, config: Config, length: Length) -> None:
        self._own, self._request, self._config, self._length = own, request, config, length
        self._failed: dict[Path, Trial] = {}

    def missing(self, runs: Sequence[ScaledRun]) -> list[ScaledRun]:
        """Return one run for each folder without a measurement."""
        by_folder = {self._folder(run): run for run in runs}
        found = [run for run in by_folder.values() if self._measured(run) is None]
        if found and self._own.time is None:
            largest = max(found, key=lambda run: run.nodes)
            ranks = largest.cluster.world_size
            check_machine(ranks, f"--scaling {largest.nodes}, which is {ranks} ranks,")
        return found

    def run(self, run: ScaledRun, program: Sequence[str]) -> None:
        """Run a trial on this machine."""
        folder, config = self._folder(run), self._trained(run)
        trial = run_trial(config, run.cluster.world_size, folder, self._length, program)
        if trial.seconds is None:
            self._failed[folder] = trial

    def script(self, run: ScaledRun) -> Path:
        """Write the job of a run, and return its script."""
        folder, config = self._folder(run), self._trial_config(run)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS_FILE).unlink(missing_ok=True)
        (folder / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
        gpus, script = run.cluster.gpus_per_node, folder / SCRIPT_FILE
        job = slurm_job(self._own, run.nodes, gpus, f"scaling-{run.nodes}-{run.global_batch}")
        plan = RunPlan(self._request.planned_run(run.config, run.cluster))
        text = batch_script(
            job,
            StartedRun(
                ["--config", str(folder / CONFIG_FILE)],
                title=f"Measure {self._length.iterations} iterations on {run.nodes} nodes of {gpus} GPUs.",
                file=as_word(script),
                command=shlex.join(self._request.program_arguments),
                save=str(folder),
            ),
            warn_seconds=checked_warning(job, plan),
            setup=self._own.setup,
            saves=False,
            written_by="scaling",
        )
        write_script(script, text, force=True)
        return script

    def result(self, run: ScaledRun) -> Trial:
        """Return the measurement of a run, or why there is none."""
        return self._measured(run) or self._failed[self._folder(run)]

    def _folder(self, run: ScaledRun) -> Path:
        folder: Path = self._own.folder / f"nodes_{run.nodes}_batch_{run.global_batch}"
        return folder

    def _trained(self, run: ScaledRun) -> Config:
        """Return the config that the run trains, with its data."""
        return with_fields(self._config, global_batch_size=run.global_batch)

    def _trial_config(self, run: ScaledRun) -> Config:
        return trial_config(self._trained(run), self._folder(run) / METRICS_FILE, self._length)

    def _measured(self, run: ScaledRun) -> Trial | None:
        """Return the measurement with this config; None if there is none."""
        file = self._folder(run) / CONFIG_FILE
        if not file.exists() or file.read_text(encoding="utf-8") != to_yaml(self._trial_config(run)):
            return None
        return read_measured(file.with_name(METRICS_FILE), self._length)


def _request(own: argparse.Namespace, rest: Sequence[str]) -> Request:
    """Return the plan's request, and refuse flags that have no meaning here."""
    refuse_options(rest, ("--ethernet-gbps",), reason=", the network is measured")
    slurm_flags = [name for name in _SLURM_FLAGS if getattr(own, name)]
    if slurm_flags and own.time is None:
        raise UserError(
            f"--{slurm_flags[0].replace('_', '-')} is for Slurm: pass --time too, Slurm's time limit"
        )
    request = read_request(rest)
    if request.scaling is None:
        raise UserError("--scaling is missing: pass numbers of nodes, such as --scaling 1,2,4")
    return request


def _scaling_parser(description: str) -> ToolParser:
    parser = ToolParser(planning_flags(), description=description)
    add_length(parser)
    add_slurm_flags(parser)
    parser.add_argument(
        "--folder",
        type=local_path,
        default=Path("runs/scaling"),
        help="folder for configs, metrics and logs; a run that is there is not repeated (default: "
        "runs/scaling)",
    )
    return parser
