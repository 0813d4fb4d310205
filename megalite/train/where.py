"""Which corpus, document and tokens each sample of an iteration came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.config import Config, ParallelConfig, check_config
from megalite.data.origin import Origin, origins_of
from megalite.errors import UserError
from megalite.topology import Launch, Topology
from megalite.train.prepare import build_data, resolve_vocabulary
from megalite.train.telemetry.timers import Timers


@dataclass(frozen=True)
class TracedSample:
    """One sample of a past iteration.

    Attributes:
        number: in the whole run, from 0.
        dp_rank: the data-parallel rank that took it; None where the config does not say how many there were.
        microbatch: which of its microbatches, from 0; None likewise.
        origins: where its tokens stand, in their order.
    """

    number: int
    dp_rank: int | None
    microbatch: int | None
    origins: list[Origin]


def trace_iteration(config: Config, iteration: int) -> Iterator[TracedSample]:
    """The samples that a run of this config trained on in one iteration, in their order.

    The datasets are built as the run builds them, on one rank: the samples of a global batch are the same for
    any number of ranks. The config's seed, split, lengths and batch size must be those of the run.

    Args:
        config: of the run; its global batch size, or dp for the default one, must be known.
        iteration: from 1, as the log counts.

    Raises:
        UserError: the run has no such iteration, the config is not valid, leaves the batch open, or has no
            corpus.
    """
    check_config(config)
    dp = config.parallel.data_parallel_size
    if config.training.global_batch_size is None and dp is None:
        raise UserError("the batch of an iteration is not known: give --global-batch-size, or the run's --dp")
    if config.data.mock_data:
        raise UserError("--mock-data trains on random tokens, which come from no corpus")
    num_iterations = config.num_iterations(dp or 1)
    if not 1 <= iteration <= num_iterations:
        raise UserError(
            f"--iteration {iteration} is none of the run's: it has {num_iterations}, counted from 1"
        )
    return _trace(config, iteration, config.global_batch(dp or 1), dp)


def _trace(config: Config, iteration: int, batch: int, dp: int | None) -> Iterator[TracedSample]:
    one_rank = replace(
        config,
        parallel=ParallelConfig(distributed_backend="gloo"),
        training=replace(config.training, global_batch_size=batch),
    )
    with Topology.start(one_rank.parallel, Launch(0, 1, 0, 1)) as topology:
        dataset = build_data(resolve_vocabulary(one_rank, topology), topology, Timers()).train
    assert dataset is not None
    batch_size, block = one_rank.batch_size(1), config.training.micro_batch_size
    first = batch_size.consumed_before(iteration)
    for place in range(batch_size(first)):
        number = first + place
        rank, microbatch = (None, None) if dp is None else (place // block % dp, place // (block * dp))
        yield TracedSample(number, rank, microbatch, origins_of(dataset, number))
