"""Dry run: run one rank's first training iteration without other ranks and without values, and report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import CheckpointConfig, Config, LoggingConfig
from megalite.config.data import TOKENIZER_FIELDS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.dry_run.corpus_estimate import corpora_of
from megalite.dry_run.counts import count_iteration
from megalite.dry_run.dry_run_report import DryRun, as_object, report_lines
from megalite.dry_run.repetition import Repetition, repetition_of
from megalite.model.stage import StageProvider
from megalite.observe.meta_tensors import meta_tensors
from megalite.plan.units import whole_model
from megalite.plan.weight_gathering import choose_weight_gathering
from megalite.train.iteration_plan import IterationPlanner
from megalite.train.run_context import Providers, resolve_run
from megalite.train.run_datasets import build_data
from megalite.train.setup import describe_gathering, prepare_process
from megalite.utils.files import write_output
from megalite.utils.log import log


def dry_run(config: Config, notices: Sequence[str], model: StageProvider | None = None) -> None:
    """Run the rank that the config names, and write the report to the log and to `dry_run_json`.

    Args:
        model: builds the stages of a custom model; by default the model of the config's architecture.

    Raises:
        UserError: a file cannot be read or written.
    """
    world_size = config.dry_run.world_size or config.parallel.mesh.smallest_world
    prepare_process(config, notices, Launch(0, world_size, 0, world_size))
    found = dry_run_of(config, world_size, config.dry_run.rank, model)
    for line in report_lines(found):
        log.info("%s", line)
    if config.dry_run.dry_run_json is not None:
        text = json.dumps(as_object(found), indent=1) + "\n"
        write_output(Path(config.dry_run.dry_run_json), text, "--dry-run-json")


def dry_run_of(config: Config, world_size: int, rank: int, model: StageProvider | None = None) -> DryRun:
    """Run one iteration of one rank on meta tensors, and count.

    Args:
        config: config, validated for `world_size` ranks.
        model: builds the stages of a custom model.
    """
    start = time.monotonic()
    with Topology.fake(config.mesh, world_size, rank) as topology:
        if config.model.vocab_size is None or config.data.resolved_tokenizer_type == "NullTokenizer":
            config = resolve_run(config, topology).config
        corpora = corpora_of(config, topology.sample_ranks.size)
        config_to_run = _without_files(config)
        is_sharded = config.parallel.zero_stage_among(topology.replicas.shard.size) == 3
        with meta_tensors():
            run = resolve_run(config_to_run, topology, providers=Providers(model))
            counts = count_iteration(run, build_data(run), _repetition(config_to_run, topology))
        if is_sharded:
            gathering = choose_weight_gathering(config, topology, model)
            log.info("gathered weights: %s", describe_gathering(gathering, topology.pp.size))
        unnamed = topology.axes.keys() - topology.sizes.keys()
        axes = [axis for axis in topology.groups() if axis is not topology.world and axis.name not in unnamed]
        return DryRun(
            config,
            world_size,
            rank,
            {axis.name: (axis.rank, axis.size) for axis in axes},
            topology.sample_ranks.size,
            whole_model(config.model, topology.tp.size, model).num_parameters,
            counts,
            corpora,
            _learning_rates(config, topology.sample_ranks.size),
            time.monotonic() - start,
        )


def _repetition(config: Config, topology: Topology) -> Repetition | None:
    """Find microbatches of the first iteration that do not need to run."""
    dp = topology.sample_ranks.size
    number = config.batch_size(dp)(0) // (config.training.micro_batch_size * dp)
    found = repetition_of(config, topology.pp, number)
    if found is not None:
        text = "running %d of %d microbatches: the others repeat the same work"
        log.info(text, found.num_microbatches, number)
    return found


def _without_files(config: Config) -> Config:
    """Return a config with random tokens and the attention of a GPU that reads and writes no files."""
    nothing: dict[str, None] = dict.fromkeys(TOKENIZER_FIELDS)
    data = replace(config.data, mock_data=True, **nothing)  # type: ignore[arg-type]
    model = config.model
    if model.attention_backend == "flex":
        model = replace(model, attention_backend="fused")  # FlexAttention does not run on meta tensors
    return replace(config, model=model, data=data, checkpoint=CheckpointConfig(), logging=LoggingConfig())


def _learning_rates(config: Config, dp: int) -> dict[str, tuple[float, float]]:
    planner, number = IterationPlanner(config, dp), config.num_iterations(dp)
    before_last = TrainingProgress(number - 1, config.batch_size(dp).consumed_before(number))
    first, last = planner(TrainingProgress()), planner(before_last)
    rates = {"learning_rate": (first.learning_rate, last.learning_rate)}
    if first.decoupled_learning_rate is not None and last.decoupled_learning_rate is not None:
        rates["decoupled_learning_rate"] = first.decoupled_learning_rate, last.decoupled_learning_rate
    return rates
