"""What an iteration is to be, from how far the run has come."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.checkpoint.progress import Progress
from megalite.config import Config
from megalite.optim.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """One iteration before it is run.

    Attributes:
        iteration: its number, from 1.
        num_samples: of its global batch.
        is_left_out: its samples are consumed and not trained on.
    """

    iteration: int
    num_samples: int
    learning_rate: float
    weight_decay: float
    is_left_out: bool


class Course:
    """Plans every iteration of a run from its number and its first sample alone: resuming needs no more.

    Args:
        config: validated.
        dp: data-parallel size, for the global batch where the config leaves it to the replicas.
    """

    def __init__(self, config: Config, dp: int) -> None:
        schedule = Schedule.of(config)
        self._training = config.training
        self.batch_size = config.batch_size(dp)
        self.learning_rate = schedule.learning_rate
        self.weight_decay = schedule.weight_decay

    def __call__(self, progress: Progress) -> Plan:
        """The iteration that follows `progress`."""
        iteration, num_samples = progress.iteration + 1, self.batch_size(progress.consumed_samples)
        position = self._training.position(iteration, progress.consumed_samples + num_samples)
        return Plan(
            iteration,
            num_samples,
            self.learning_rate(position),
            self.weight_decay(position),
            self._training.is_skipped(iteration),
        )
