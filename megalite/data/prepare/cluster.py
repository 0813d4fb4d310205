"""Run the passes over a corpus on a cluster: as array jobs of Slurm, or by actors of Ray.

What is done is known from the files of the passes alone, so either may be killed, and run again with another
number of workers.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.data.prepare.fingerprints import library
from megalite.data.prepare.passes import PassWorker
from megalite.data.prepare.plan import PASSES, CorpusPlan
from megalite.utils.errors import UserError

Task = tuple[str, int]
"""Name of a pass, and number of a task."""


def log_folder(plan: CorpusPlan) -> Path:
    """Return the folder of the logs of Slurm's jobs; it outlives the files of the passes."""
    return Path(f"{plan.job.prefix}.logs")


def _jobs_file(plan: CorpusPlan) -> Path:
    return log_folder(plan) / "jobs"


def check_jobs(plan: CorpusPlan) -> None:
    """Check that no job of an earlier `submit` waits or runs, as far as squeue can tell.

    Raises:
        UserError: one does.
    """
    if not _jobs_file(plan).exists():
        return
    numbers = _jobs_file(plan).read_text()
    listed = _run(["squeue", "--noheader", "--format=%F", f"--jobs={numbers}"])  # fails if it forgot the jobs
    if left := sorted(set(listed.stdout.split() if listed else ())):
        raise UserError(
            f"jobs of this corpus still wait or run in Slurm: {', '.join(left)}: wait until they have ended, "
            f"or end them: scancel {' '.join(left)}"
        )


def submit(plan: CorpusPlan, arguments: list[str], workers: int) -> dict[str, str]:
    """Submit each pass that is left to Slurm, as an array that begins when the pass before is complete.

    Args:
        arguments: arguments of `megalite prepare` for all passes.
        workers: number of jobs of an array; each is one process.

    Returns:
        Slurm's number of each array, by pass.

    Raises:
        UserError: sbatch is not there, or refuses a job.
    """
    run = plan.job.run
    jobs: dict[str, str] = {}
    given = {"partition": run.partition, "time": run.time} | run.sbatch
    log_folder(plan).mkdir(exist_ok=True)
    for name in PASSES:
        size = min(workers, plan.num_tasks(name))
        if not plan.tasks_left(name, range(plan.num_tasks(name))):
            continue
        options = {
            "job-name": f"prepare-{name}",
            "output": log_folder(plan) / f"{name}-%a.log",
            "array": f"0-{size - 1}",
            "dependency": f"afterok:{list(jobs.values())[-1]}" if jobs else None,
            "kill-on-invalid-dep": "yes",  # a pass whose earlier pass has failed can never begin
        }
        command = [sys.executable, "-m", "megalite", "prepare", *arguments, "--pass", name, "--workers", "1"]
        flags = [
            f"--{key}" if value is True else f"--{key}={value}"
            for key, value in (options | given).items()
            if value is not None and value is not False
        ]
        wrap = f"--wrap=exec {shlex.join(command)} --task $SLURM_ARRAY_TASK_ID/{size}"
        done = _run(["sbatch", "--parsable", *flags, wrap])
        if done is None:
            raise UserError(
                "run: executor slurm needs sbatch, which is not here: run this where jobs are submitted, or "
                "set executor to local"
            )
        if done.returncode:
            before = f" (submitted already: {', '.join(jobs.values())})" if jobs else ""
            raise UserError(f"sbatch refuses the pass {name}{before}: {' '.join(done.stderr.split())}")
        jobs[name] = done.stdout.strip().partition(";")[0]  # the rest is the name of a cluster
        _jobs_file(plan).write_text(",".join(jobs.values()))
    return jobs


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a program of Slurm; None if this machine does not have it."""
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True, check=False)
    return None


class _RayWorker(PassWorker):
    """Runner of tasks in an actor, whose node sees the same files."""

    def __init__(self, plan: CorpusPlan, folder: str) -> None:
        os.chdir(folder)  # paths may be relative
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        super().__init__(plan)


class RayPool:
    """Actors of Ray that run tasks; a context manager. An actor that dies is started again.

    An actor takes part once the cluster has a core for it, so there may be more than cores.
    It uses the cluster of `RAY_ADDRESS`, else that which was started on this machine, else starts one here.
    """

    def __init__(self, plan: CorpusPlan, workers: int) -> None:
        self._ray = library("ray", "run: executor ray")
        self._plan, self._num_workers = plan, workers
        self._actors: list[Any] = []

    def __enter__(self) -> RayPool:
        if not self._ray.is_initialized():
            self._ray.init()
        actor = self._ray.remote(num_cpus=1, max_restarts=3, max_task_retries=3)(_RayWorker)
        self._actors = [actor.remote(self._plan, os.getcwd()) for _ in range(self._num_workers)]
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def run(self, tasks: Iterable[Task]) -> Iterator[int]:
        """Yield the numbers of the tasks as they end.

        Raises:
            UserError: a task fails, or its actor dies again and again.
        """
        left, num_running = iter(tasks), 0
        busy = {actor.__ray_ready__.remote(): (actor, False) for actor in self._actors}
        try:
            while busy:
                (done,), _ = self._ray.wait(list(busy))
                actor, is_task = busy.pop(done)
                result = self._ray.get(done)
                if is_task:
                    num_running -= 1
                    yield result
                if (task := next(left, None)) is not None:
                    busy[actor.__call__.remote(task)] = actor, True
                    num_running += 1
                elif num_running:
                    self._ray.kill(actor)  # one that is started again may wait for its core
                else:
                    return  # actors that never found a core have nothing to do
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except self._ray.exceptions.RayActorError as error:
            raise UserError(f"Ray's workers end: {' '.join(str(error).split())}") from None
