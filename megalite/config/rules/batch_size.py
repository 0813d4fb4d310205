"""Rules of a batch size that grows over the run."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.batch_size import BatchSize
from megalite.config.config import Config
from megalite.config.problem import Problem
from megalite.config.rules.layout import replicas

_RAMPUP, _FULL = "rampup_batch_size", "global_batch_size"


def ramp_up(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A ramp-up comes to the global batch in whole increments."""
    rampup, full = config.training.rampup_batch_size, config.training.global_batch_size
    if rampup is None:
        return
    given = f"--rampup-batch-size {' '.join(map(str, rampup))}"
    if len(rampup) != 3:
        yield Problem((_RAMPUP,), f"{given} are {len(rampup)} numbers: give three, START INCREMENT SAMPLES")
    elif full is None:
        yield Problem((_RAMPUP, _FULL), f"{given} needs --global-batch-size: give the batch that it leads to")
    elif rampup[0] >= full:
        yield Problem(
            (_RAMPUP, _FULL),
            f"{given} starts at {rampup[0]}, not below --global-batch-size {full}: change one",
        )
    elif (full - rampup[0]) % rampup[1]:
        yield Problem(
            (_RAMPUP, _FULL),
            f"{given} does not come to --global-batch-size {full}: {full} - {rampup[0]} is not divisible by "
            f"the increment {rampup[1]}, change one",
        )
    else:
        yield from _whole_microbatches(config, world_size, given)


def _whole_microbatches(config: Config, world_size: int | None, given: str) -> Iterator[Problem]:
    """Every batch on the way is the same whole number of microbatches on every replica."""
    rampup, micro, dp = (
        config.training.rampup_batch_size,
        config.training.micro_batch_size,
        replicas(config, world_size),
    )
    assert rampup is not None
    samples = micro * (dp or 1)
    divisor = f"--micro-batch-size {micro}"
    if dp is not None:
        divisor += f" x data-parallel size {dp} = {samples}"
    for what, number in zip(("start", "increment"), rampup[:2], strict=True):
        if number % samples:
            yield Problem(
                (_RAMPUP, "micro_batch_size", "data_parallel_size"),
                f"{given}: the {what} {number} is not divisible by {divisor}: give "
                f"{-(-number // samples) * samples}, or change one of them",
            )


def enough_samples(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A run counted in samples has one batch at least."""
    training, dp = config.training, replicas(config, world_size)
    full = training.global_batch_size or training.micro_batch_size * (dp or 1)
    rampup = training.rampup_batch_size
    first = BatchSize(full, rampup if rampup is not None and len(rampup) == 3 else None).start
    if training.train_samples is not None and training.train_samples < first:
        yield Problem(
            ("train_samples", _FULL, _RAMPUP, "micro_batch_size"),
            f"--train-samples {training.train_samples} are fewer than the first batch of {first}: "
            "give more, or a smaller batch",
        )
