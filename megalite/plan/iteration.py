"""Time of an iteration, and the rates that follow."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.plan.job import Job
from megalite.plan.pipeline import time_step
from megalite.plan.sharing import exchange_seconds, update_seconds
from megalite.plan.work import Work


@dataclass(frozen=True)
class IterationTime:
    """One optimizer step.

    Attributes:
        seconds: all of it.
        work: of the busiest rank; what is missing to `seconds` is the pipeline's bubble.
        bubble: of the average rank.
    """

    seconds: float
    work: Work
    bubble: float

    @property
    def bubble_fraction(self) -> float:
        """Share of the time in which the average rank waits for a stage."""
        return self.bubble / self.seconds

    @property
    def waiting(self) -> float:
        """Seconds in which the busiest rank waits for a stage."""
        return max(0.0, self.seconds - self.work.seconds)


def time_iteration(job: Job) -> IterationTime:
    """Forward and backward of all microbatches, then what replicas send each other, then the update."""
    step = time_step(job)
    rest = exchange_seconds(job, step.last_backward.seconds) + update_seconds(job)
    return IterationTime(step.seconds + rest.seconds, step.work + rest, step.bubble)
