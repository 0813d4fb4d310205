"""Run the passes over a corpus, and write its list of shards, its sources and its report."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.dataset_merge import list_shards
from megalite.data.indexed_dataset import IndexedDataset, replace_dataset
from megalite.data.prepare.cluster import RayPool
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
