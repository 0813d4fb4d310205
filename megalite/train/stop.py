"""When a run ends before its last iteration."""

from __future__ import annotations

import time

import torch

from megalite.config import TrainingConfig
from megalite.parallel.collectives import all_reduce
from megalite.topology import Topology


class StopConditions:
    """Tells after each iteration whether the run shall save and exit now, and why.

    The clock starts when this object is made.
    """

    def __init__(self, config: TrainingConfig, topology: Topology) -> None:
        self.config = config
        self.topology = topology
        self.start = time.monotonic()

    def reason(self, iteration: int) -> str | None:
        """Why to stop after `iteration`, the same on every rank; None to go on."""
        if self.config.exit_interval and iteration % self.config.exit_interval == 0:
            return f"iteration {iteration} is a multiple of --exit-interval {self.config.exit_interval}"
        limit = self.config.exit_duration_in_mins
        if limit is not None and self._longest_minutes() > limit:
            return f"the run is older than --exit-duration-in-mins {limit:g}"
        return None

    def _longest_minutes(self) -> float:
        """Age of the run by the slowest rank's clock: ranks must not decide differently."""
        minutes = torch.tensor((time.monotonic() - self.start) / 60.0, device=self.topology.device)
        for axis in (self.topology.tp, self.topology.dp, self.topology.pp):
            all_reduce(minutes, axis, torch.distributed.ReduceOp.MAX)
        return minutes.item()
