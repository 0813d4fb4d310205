"""Trace the samples of a past iteration to their corpora, documents and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.config import Config, ParallelConfig, check_config
from megalite.data.provenance import SampleSpan, sample_spans
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.run_context import resolve_run
from megalite.train.run_datasets import build_data
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class TracedSample:
    """One sample of a past iteration.

    Attributes:
        number: number in the whole run, from 0.
        dp_rank: data-parallel rank that trained on it; None if the config does not set --dp.
        microbatch: index of the microbatch on that rank, from 0; None if the config does not set --dp.
        spans: positions of its tokens in the corpora, in order.
    """

    number: int
    dp_rank: int | None
    microbatch: int | None
    spans: list[SampleSpan]


def trace_iteration(config: Config, iteration: int) -> Iterator[TracedSample]:
    """Yield the samples that a run of this config trained on in one iteration, in order.

    The datasets are built as in the run, on one rank: the samples of a global batch are the same for any
    number of ranks. The config must have the run's seed, split, lengths and batch size.

    Args:
        config: the run's config; it must set the global batch size, or dp for the default one.
        iteration: number of the iteration from 1, as in the log.

    Raises:
        UserError: the run has no such iteration; the config is not valid, sets no batch size, or has no
            corpus.
    """
    check_config(config)
    dp = config.parallel.data_parallel_size
    if config.training.global_batch_size is None and dp is None:
        raise UserError("the batch of an iteration is not known: pass --global-batch-size, or the run's --dp")
    if config.data.mock_data:
        raise UserError("--mock-data trains on random tokens, which come from no corpus")
    num_iterations = config.num_iterations(dp or 1)
    if not 1 <= iteration <= num_iterations:
        raise UserError(f"--iteration {iteration} is not in the run: it has {num_iterations}, counted from 1")
    one_rank = replace(
        config,
        parallel=ParallelConfig(distributed_backend="gloo"),
        training=replace(config.training, global_batch_size=config.global_batch(dp or 1)),
    )
    with Topology.start(one_rank.mesh, Launch(0, 1, 0, 1)) as topology:
        dataset = build_data(resolve_run(one_rank, topology)).train
    assert dataset is not None
    batch_size, block = one_rank.batch_size(1), config.training.micro_batch_size
    first = batch_size.consumed_before(iteration)
    for position in range(batch_size(first)):
        number = first + position
        rank, microbatch = (None, None) if dp is None else (position // block % dp, position // (block * dp))
        yield TracedSample(number, rank, microbatch, sample_spans(dataset, number))
