"""The scaling command: run each number of nodes for some iterations, here or on Slurm, beside its plan."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megalite.config import Config
from megalite.config.fields import with_fields
from megalite.config.yaml_file import to_yaml
from megalite.frontends.command_line import parse
from megalite.frontends.tool_parser import ToolParser, local_path
from megalite.plan.autotune import add_length, check_length, check_machine, trial_length
from megalite.plan.estimate import RunPlan
from megalite.plan.job_files import StartedRun, batch_script
from megalite.plan.plan_options import refuse_options
from megalite.plan.plan_request import Request, planning_flags, read_request, training_tokens
from megalite.plan.scaling import (
    ScaledRun,
    ScalingPoint,
    as_objects,
    scaled_runs,
    scaling_svg,
    scaling_title,
    table_lines,
)
from megalite.plan.trial import Length, Trial, read_measured, run_trial, trial_config
from megalite.plan.write_job import (
    add_slurm_flags,
    as_word,
    checked_warning,
    slurm_job,
    write_script,
)
from megalite.utils.errors import UserError, counted
from megalite.utils.files import write_output

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
    own, rest = _parser(description).parse_known_args(arguments)
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


def _parser(description: str) -> ToolParser:
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
