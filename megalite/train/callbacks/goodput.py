"""Log which share of a run's time went into iterations that count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megalite.train.loop import Callback, TrainingLoop
from megalite.train.telemetry.writers import Writers, clock_text
from megalite.train.train_step import StepResult
from megalite.utils.log import log


class Goodput(Callback):
    """Share of the time since the run's first start in which iterations ran that count, by rank 0's clock.

    The rest is starts, evaluations, saves, the time between two jobs, and iterations that ran again because a
    checkpoint did not have them. It is the first callback, whose `on_end` comes last.
    """

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self._trained = self._step_began_at = 0.0
        self._began_at: float | None = None  # the first start, in seconds since 1970

    def state(self) -> dict[str, Any]:
        return {"began_at": self._began_at, "trained_seconds": self._trained}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._began_at, self._trained = state["began_at"], state["trained_seconds"]

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False

    def on_start(self, loop: TrainingLoop) -> None:
        if self._began_at is None or not loop.trainer.config.checkpoint.loads_own:
            self._trained = 0.0  # what another run has saved is its own
            self._began_at = time.time() - (time.monotonic() - loop.stop_conditions.signals.start)

    def before_step(self, loop: TrainingLoop) -> None:
        self._step_began_at = time.perf_counter()

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._trained += time.perf_counter() - self._step_began_at

    def on_save(self, loop: TrainingLoop) -> None:
        self.writers.scalars(loop.iteration, {"goodput": self._trained / self._seconds()})

    def on_end(self, loop: TrainingLoop) -> None:
        seconds = self._seconds()
        log.info(
            "goodput: %.1f%% of the %s since the first start went into iterations that count",
            *(100 * self._trained / seconds, clock_text(seconds)),
        )

    def _seconds(self) -> float:
        assert self._began_at is not None
        return max(time.time() - self._began_at, self._trained, 1e-9)
