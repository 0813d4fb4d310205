"""What one rank of a run would hold, compute and send: the training code itself, without values or others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.progress import Progress
from megalite.config import CheckpointConfig, Config, LoggingConfig
from megalite.config.data import TOKENIZER_FIELDS
from megalite.dryrun.corpora import corpora_of
from megalite.dryrun.counts import count_iteration
from megalite.dryrun.meta import meta_tensors
from megalite.dryrun.repetition import Repetition, repetition_of
from megalite.dryrun.report import as_object, report_lines
from megalite.dryrun.result import DryRun
from megalite.errors import UserError
from megalite.log import log
from megalite.plan.parameters import total_parameters
from megalite.topology import Launch, Topology
from megalite.train.course import Course
from megalite.train.prepare import build_data, prepare_process, resolve_vocabulary
from megalite.train.telemetry.timers import Timers


def dry_run(config: Config, notices: Sequence[str]) -> None:
    """Tells of the rank that the config names, in the log and in the file that it may name.

    Raises:
        UserError: there are other ranks, or a file cannot be read or written.
    """
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"--dry-run is one process, but the launcher has started {started} (WORLD_SIZE): start it with "
            "python, and give --world-size and --rank"
        )
    world_size = config.dry_run.world_size or _smallest_world(config)
    prepare_process(config, notices, Launch(0, world_size, 0, world_size))
    found = dry_run_of(config, world_size, config.dry_run.rank)
    for line in report_lines(found):
        log.info("%s", line)
    if config.dry_run.dry_run_json is not None:
        _write(Path(config.dry_run.dry_run_json), json.dumps(as_object(found), indent=1) + "\n")


def dry_run_of(config: Config, world_size: int, rank: int) -> DryRun:
    """Runs one iteration of one rank on tensors without memory, and counts.

    Args:
        config: validated for `world_size` ranks.
    """
    start = time.monotonic()
    with Topology.fake(config.parallel, world_size, rank) as topology:
        if config.model.vocab_size is None or config.data.resolved_tokenizer_type == "NullTokenizer":
            config = resolve_vocabulary(config, topology)
        corpora = corpora_of(config, topology.dp.size)
        alone = _without_files(config)
        with meta_tensors():
            data = build_data(alone, topology, Timers())
            counts = count_iteration(alone, topology, data, _repetition(alone, topology))
        axes = (topology.pp, topology.dp, topology.tp)
        return DryRun(
            config,
            world_size,
            rank,
            {axis.name: (axis.rank, axis.size) for axis in axes},
            total_parameters(config.model, topology.tp.size),
            counts,
            corpora,
            _learning_rates(config, topology.dp.size),
            time.monotonic() - start,
        )


def _repetition(config: Config, topology: Topology) -> Repetition | None:
    """Look for microbatches of the first iteration that need not be run."""
    dp = topology.dp.size
    number = config.batch_size(dp)(0) // (config.training.micro_batch_size * dp)
    found = repetition_of(config, topology.pp, number)
    if found is not None:
        text = "running %d of %d microbatches: the others repeat the same work"
        log.info(text, found.num_microbatches, number)
    return found


def _smallest_world(config: Config) -> int:
    parallel = config.parallel
    return parallel.tp * parallel.pp * (parallel.data_parallel_size or 1)


def _without_files(config: Config) -> Config:
    """The same run of random tokens, with a GPU's attention, which saves, loads and writes nothing."""
    nothing: dict[str, None] = dict.fromkeys(TOKENIZER_FIELDS)
    data = replace(config.data, mock_data=True, **nothing)  # type: ignore[arg-type]
    model = config.model
    if model.attention_dropout == 0.0 and model.attention_backend in ("auto", "flex"):
        model = replace(model, attention_backend="fused")  # of meta tensors auto knows no kernel
    return replace(config, model=model, data=data, checkpoint=CheckpointConfig(), logging=LoggingConfig())


def _learning_rates(config: Config, dp: int) -> tuple[float, float]:
    course, last = Course(config, dp), config.num_iterations(dp)
    consumed = config.batch_size(dp).consumed_before(last)
    return course(Progress()).learning_rate, course(Progress(last - 1, consumed)).learning_rate


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--dry-run-json {path} cannot be written ({error.strerror}): give another file"
        ) from None
