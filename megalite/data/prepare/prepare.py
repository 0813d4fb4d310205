"""Run the passes over a corpus, here or on a cluster, and write its list of shards, sources and report.

A cluster runs them as array jobs of Slurm, or in actors of Ray. What is done is known from the files of the
passes alone, so either may be killed, and run again with another number of workers.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.dataset_merge import list_shards
from megalite.data.indexed_dataset import IndexedDataset, replace_dataset
from megalite.data.prepare.fingerprints import library
from megalite.data.prepare.passes import PassWorker
from megalite.data.prepare.plan import PASSES, CorpusPlan
from megalite.data.prepare.report import (
    MAX_EXAMPLES,
    Facts,
    add_facts,
    make_report,
    new_facts,
    place_of,
    write_sources,
)
from megalite.data.prepare.steps import Document
from megalite.data.preprocessing.pool import WorkerPool
from megalite.data.sharded_dataset import list_path
from megalite.data.tokenizers.tokenizer import copy_tokenizer_digest, write_tokenizer_digest
from megalite.utils.errors import UserError, counted, few
from megalite.utils.files import parse_json, replace_file
from megalite.utils.log import log
from megalite.utils.object_store import ObjectFolder, is_remote, object_exists, read_object

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


OnProgress = Callable[[str, int, int], None]
"""Called with the name of a pass, and how many of its tasks are done and there are."""


_UPLOADS = 4
"""Files that are uploaded at a time."""
_MAX_READ_AGAIN = 256 << 20
"""Size of a piece in bytes up to which it is read again for a document of the report."""


def start(plan: CorpusPlan, overwrite: bool) -> dict[str, Any] | None:
    """Begin or continue a corpus; return its report if it is complete.

    Args:
        overwrite: replace a corpus of this name with other settings or input, complete or not.

    Raises:
        UserError: there is such a corpus, and it is not to be replaced.
    """
    if report := find_report(plan):
        shutil.rmtree(plan.folder, ignore_errors=True)  # of a run that was killed at its very end
        return report
    index, listed = f"{plan.job.output}.idx", list_path(plan.job.output)
    if _exists(index):
        raise UserError(f"{index} exists, and it would hide the corpus: write another output")
    if _exists(listed) and not overwrite:
        raise UserError(
            f"{listed} is a corpus of other settings or input: write another output, or pass --overwrite"
        )
    record = {"digest": plan.digest, "settings": plan.identity, "inputs": plan.states}
    path = plan.folder / "job.json"
    try:
        if path.exists():
            before = parse_json(path.read_bytes())
            if before["digest"] != plan.digest:
                if not overwrite:
                    raise UserError(_difference(plan, before))
                shutil.rmtree(plan.folder)
        for name in PASSES[:-1]:
            (plan.folder / name).mkdir(parents=True, exist_ok=True)
        with replace_file(path) as stream:
            stream.write(json.dumps(record, default=str).encode())
    except OSError as error:
        raise UserError(f"cannot write {plan.folder}: {error.strerror}") from None
    return None


def _difference(plan: CorpusPlan, before: dict[str, Any]) -> str:
    now = json.loads(json.dumps({"inputs": plan.states, "settings": plan.identity}, default=str))
    old, new = before["inputs"], now["inputs"]
    for file in {**old, **new}:
        if old.get(file) != new.get(file):
            what = "is new" if file not in old else "is gone" if file not in new else "has changed"
            return f"the input {file} {what} since {plan.folder} was begun: {plan.start_again}"
    old, new = before["settings"], now["settings"]
    other = few([key for key in {**old, **new} if old.get(key) != new.get(key)])
    return f"{plan.folder} was begun with another value of {other}: {plan.start_again}"


def check_earlier(plan: CorpusPlan, name: str) -> None:
    """Check that the passes before one are complete.

    Raises:
        UserError: one is not.
    """
    for earlier in PASSES[: PASSES.index(name)]:
        count = plan.num_tasks(earlier)
        if missing := plan.tasks_left(earlier, range(count)):
            raise UserError(
                f"--pass {name} needs the pass {earlier}, which lacks {len(missing)} of its "
                f"{counted(count, 'task')} (the first is {missing[0]}): run --pass {earlier} first"
            )


def run_pass(
    plan: CorpusPlan,
    name: str,
    part: tuple[int, int],
    workers: int,
    on_progress: OnProgress,
    on_ray: bool = False,
) -> None:
    """Run a part of the tasks of a pass other than finish; those that are done are skipped.

    Args:
        part: number of the part from 0, and number of parts.
        on_ray: whether the workers are actors of Ray instead of processes on this machine.

    Raises:
        UserError: a task fails.
    """
    count = plan.num_tasks(name)
    mine = range(count * part[0] // part[1], count * (part[0] + 1) // part[1])
    left = plan.tasks_left(name, mine)
    workers = min(workers, max(1, len(left)))
    on_progress(name, len(mine) - len(left), len(mine))
    hint = f"run the command again with fewer than --workers {workers}"
    here = WorkerPool(partial(PassWorker, plan), workers, hint)
    with RayPool(plan, workers) if on_ray else here as pool:
        for done, _ in enumerate(pool.run((name, number) for number in left), len(mine) - len(left) + 1):
            on_progress(name, done, len(mine))


def finish(plan: CorpusPlan) -> dict[str, Any]:
    """Write PREFIX.report.json, PREFIX.sources and PREFIX.shards.json, the list last; return the report.

    Raises:
        UserError: the corpus has no documents, or cannot be written.
    """
    prefix, count = plan.job.prefix, plan.job.shards
    shards = [_facts(plan, "shard", i) for i in range(count)]
    tasks = ((name, number) for name in PASSES[:3] for number in range(plan.num_tasks(name)))
    total = reduce(add_facts, (_facts(plan, *task) for task in tasks), new_facts(len(plan.job.steps)))
    if not total["kept"]:
        raise UserError(f"no document is left of {total['documents']:,}: nothing is written; relax the steps")
    total["groups"] = [_describe_group(plan, *group) for group in total["groups"][:MAX_EXAMPLES]]
    report = make_report(plan, total, shards)
    names = [f"{prefix}-{i:05}-of-{count:05}" for i in range(count)]
    try:
        Path(list_path(prefix)).unlink(missing_ok=True)  # of the corpus to overwrite
        for i, name in enumerate(names):
            files = {kind: str(plan.path("shard", i, kind)) for kind in ("bin", "idx")}
            if os.path.exists(files["idx"]):  # else a killed run has renamed it
                replace_dataset(name, files)
            if i == 0:
                write_tokenizer_digest(name, plan.job.source.build_tokenizer())
            else:
                copy_tokenizer_digest(names[0], name)
        parts = [plan.path("shard", i, "sources") for i in range(count)]
        write_sources(prefix, list(plan.states), parts)
        with replace_file(f"{prefix}.report.json") as stream:
            stream.write(f"{json.dumps(report, indent=1, ensure_ascii=False)}\n".encode())
    except OSError as error:
        raise UserError(f"cannot write {prefix}: {error.strerror}") from None

    def checksums(shard: IndexedDataset) -> tuple[Any, str]:
        number = names.index(shard.prefix)
        return np.fromfile(plan.path("shard", number, "crc32"), "<u4"), shards[number]["sha256"]

    seed = plan.job.shuffle
    list_shards(names, prefix, overwrite=True, checksums=checksums, shuffle_seed=seed)
    others = {index.removesuffix(".idx") for index in glob.glob(f"{glob.escape(prefix)}-?????-of-?????.idx")}
    if others := others.difference(names):
        log.warning("not part of %s: %s; delete them if it replaced them", prefix, few(sorted(others)))
    if plan.job.output_url:
        _publish(plan, ObjectFolder(plan.job.output_url))
    shutil.rmtree(plan.folder, ignore_errors=True)
    return report


def _publish(plan: CorpusPlan, objects: ObjectFolder) -> None:
    """Move a complete corpus to object storage; the list of its shards, without which it is none, comes last.

    Raises:
        UserError: an object cannot be written.
    """
    folder, name = Path(plan.job.prefix).parent, glob.escape(plan.job.output_name)
    last = Path(list_path(plan.job.prefix)).name
    found = [*folder.glob(f"{name}.*"), *folder.glob(f"{name}-?????-of-?????.*")]
    files = [file for file in found if file.is_file() and file.name != last]
    try:
        objects.delete([last])
        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(lambda file: objects.upload(file.name, file), files))
        objects.upload(last, folder / last)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    for file in (*files, folder / last):
        file.unlink()


def _exists(path: str) -> bool:
    return object_exists(path) if is_remote(path) else os.path.exists(path)


def _facts(plan: CorpusPlan, name: str, number: int) -> Facts:
    facts: Facts = parse_json(plan.done_path(name, number).read_bytes())
    return facts


def _describe_group(plan: CorpusPlan, count: int, step: int, number: int, document: int) -> dict[str, Any]:
    """Return a group of duplicates with its first document, which is read again."""
    piece, first = plan.pieces[number], 0
    group = {"documents": count, "step": plan.job.steps[step].name}
    if piece.num_input_bytes > _MAX_READ_AGAIN:
        return {
            **group,
            "first": f"document {document + 1} of {getattr(piece, 'files', ('',))[0]}",
            "text": "",
        }
    for records, documents in PassWorker(plan).documents(piece):
        if document < first + len(records):
            record, found = records[document - first], documents[document - first]
            assert isinstance(found, Document)
            place = place_of(piece, record.source, record.number)
            return {**group, "first": place, "text": found.text[:200]}
        first += len(records)
    raise AssertionError("a document of the pass sign is not in its piece")


def find_report(plan: CorpusPlan) -> dict[str, Any] | None:
    """Return the report of the corpus if it is complete, and has these settings and this input."""
    path = f"{plan.job.output}.report.json"
    try:
        content = read_object(path) if is_remote(path) else Path(path).read_bytes()
        report: dict[str, Any] = parse_json(content)
    except (OSError, ValueError):
        return None
    return report if _exists(list_path(plan.job.output)) and report.get("digest") == plan.digest else None
