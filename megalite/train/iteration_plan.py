"""Plan an iteration from the run's progress."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config
from megalite.config.parameter_schedules import OptimizerSchedules


@dataclass(frozen=True)
class IterationPlan:
    """Settings of one iteration, before it runs.

    Attributes:
        iteration: its number, from 1.
        first_sample: number of the first sample of its global batch.
        num_samples: size of its global batch.
        num_microbatches: number of microbatches on each data-parallel rank.
        seq_length: tokens of a sequence; --seq-length-schedule may cut each sample into several sequences.
        sequences_per_sample: number of sequences that each of its samples is cut into.
        is_excluded: whether --iterations-to-skip consumes its samples without training.
        decoupled_learning_rate: learning rate of the word embedding and the output layer; None for
            `learning_rate`.
    """

    iteration: int
    first_sample: int
    num_samples: int
    num_microbatches: int
    seq_length: int
    sequences_per_sample: int
    learning_rate: float
    weight_decay: float
    is_excluded: bool
    decoupled_learning_rate: float | None = None

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences of the global batch."""
        return self.num_samples * self.sequences_per_sample


class IterationPlanner:
    """Plan of each iteration of a run, from its number and its first sample alone, so a run can resume.

    Args:
        config: validated config.
        dp: data-parallel size.
    """

    def __init__(self, config: Config, dp: int) -> None:
        schedules = OptimizerSchedules.of(config, dp)
        self._training = config.training
        self._full_length = config.model.seq_length
        self._sequences_per_sample = config.sequences_per_sample
        self._samples_per_microbatch = config.training.micro_batch_size * dp  # over all replicas
        self._batch_size = config.batch_size(dp)
        self._learning_rate = schedules.learning_rate
        self._decoupled_learning_rate = schedules.decoupled_learning_rate
        self._weight_decay = schedules.weight_decay

    def __call__(self, progress: TrainingProgress) -> IterationPlan:
        """Plan the iteration that follows `progress`."""
        iteration, first_sample = progress.iteration + 1, progress.consumed_samples
        num_samples, count = self._batch_size(first_sample), self._sequences_per_sample(first_sample)
        position = self._training.position(iteration, first_sample + num_samples)
        return IterationPlan(
            iteration,
            first_sample,
            num_samples,
            num_samples // self._samples_per_microbatch,
            self._full_length // count,
            count,
            self._learning_rate(position),
            self._weight_decay(position),
            self._training.is_skipped(iteration),
            self._decoupled_learning_rate(position) if self._decoupled_learning_rate else None,
        )
