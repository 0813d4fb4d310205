"""When a run ends before its last iteration, and with which status."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.lease import FolderLease
from megalite.config import TrainingConfig
from megalite.log import log
from megalite.parallel.collectives import all_reduce, largest_of_all
from megalite.topology import Topology
from megalite.train.stopping.signals import INTERRUPTED, STOP_SIGNALS, TEMPORARY_FAILURE, StopSignals

ASK_SECONDS = 0.25
"""About how long the run goes on after it was asked to stop, where iterations are short."""
_MAX_PAUSE = 100


@dataclass(frozen=True)
class Stop:
    """An early end.

    Attributes:
        reason: what led to it, in words.
        status: of the process.
        wants_requeue: the run is to be started again, without anybody being asked.
        is_urgent: somebody waits for the end, and may not wait for long: an evaluation is left out.
    """

    reason: str
    status: int = 0
    wants_requeue: bool = False
    is_urgent: bool = False


class Stopped(Exception):
    """Breaks off what may be left out once the end is urgent."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        super().__init__(stop.reason)


class StopConditions:
    """Tells whether the run shall save and exit now, and why: the same on every rank.

    Ranks ask each other after every iteration, or every few where iterations take less than `ASK_SECONDS`.

    Args:
        lease: on the folder of checkpoints, if there is one.
    """

    def __init__(
        self,
        config: TrainingConfig,
        topology: Topology,
        signals: StopSignals,
        lease: FolderLease | None = None,
    ) -> None:
        self.config = config
        self.topology = topology
        self.signals = signals
        self.lease = lease
        self._asked_at = 0, 0.0
        self._pause = 1
        self._minutes = 0.0

    def after(self, iteration: int) -> Stop | None:
        """Why to stop after `iteration`; None to go on."""
        if self.config.exit_interval and iteration % self.config.exit_interval == 0:
            reason = f"iteration {iteration} is a multiple of --exit-interval {self.config.exit_interval}"
            return Stop(reason, wants_requeue=True)
        last, then = self._asked_at
        if last < iteration < last + self._pause:
            return None
        stop = self.now()
        # From what all agreed on, so that all ask next after the same iteration.
        seconds = 60.0 * (self._minutes - then) / max(1, iteration - last)
        self._asked_at = iteration, self._minutes
        self._pause = max(1, int(ASK_SECONDS / max(seconds, ASK_SECONDS / _MAX_PAUSE)))
        return stop

    def now(self) -> Stop | None:
        """Why to stop at this moment; costs an all-reduce of four numbers, if anything may ask.

        Raises:
            LeaseLost: another run has taken over the folder of checkpoints; on every rank.
        """
        config, lease = self.config, self.lease
        if not (config.exit_signals or config.kill_switch_path or config.exit_duration_in_mins or lease):
            return None
        minutes, is_off, which, is_lost = self._agreed()
        self._minutes = minutes
        if is_lost:
            assert lease is not None
            raise lease.loss()
        if is_off:
            return Stop(f"--kill-switch-path {config.kill_switch_path} exists", is_urgent=True)
        if which:
            return _stop_by(STOP_SIGNALS[int(which) - 1])
        if config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins:
            reason = f"the run is older than --exit-duration-in-mins {config.exit_duration_in_mins:g}"
            return Stop(reason, wants_requeue=True)
        return None

    def raise_if_urgent(self) -> None:
        """Leaves the work at hand where somebody waits for the end.

        Raises:
            Stopped: on every rank alike.
        """
        if (stop := self.now()) is not None and stop.is_urgent:
            raise Stopped(stop)

    def _agreed(self) -> list[float]:
        """Age in minutes, kill switch, signal and lost lease as the largest of any rank: none decides alone.

        The hosts ask each other: on a GPU the answer would wait for all the work that is queued there.
        """
        name = self.signals.received
        seen = torch.tensor(
            [
                (time.monotonic() - self.signals.start) / 60.0,
                self.topology.rank == 0 and is_switched_off(self.config),
                0 if name is None else 1 + STOP_SIGNALS.index(name),
                self.topology.rank == 0 and self.lease is not None and self.lease.is_lost(),
            ],
            dtype=torch.float64,
            device="cpu",
        )
        return all_reduce(seen, self.topology.world, dist.ReduceOp.MAX).tolist()


def is_switched_off(config: TrainingConfig) -> bool:
    """Whether the file of --kill-switch-path is there."""
    return config.kill_switch_path is not None and Path(config.kill_switch_path).exists()


def leave_if_switched_off(config: TrainingConfig, topology: Topology) -> None:
    """Ends a run whose kill switch is already there, before any work is done.

    Raises:
        SystemExit: with status 0 and on every rank: this is what the switch asks for.
    """
    seen = torch.tensor(float(topology.rank == 0 and is_switched_off(config)), device=topology.device)
    if largest_of_all(seen, topology):
        log.warning(
            "--kill-switch-path %s exists: remove it to train; exiting without a start",
            config.kill_switch_path,
        )
        raise SystemExit(0)


def _stop_by(name: str) -> Stop:
    reason = f"received {name}"
    if name == "SIGINT":
        return Stop(reason, INTERRUPTED, is_urgent=True)
    return Stop(reason, TEMPORARY_FAILURE, wants_requeue=True, is_urgent=True)
