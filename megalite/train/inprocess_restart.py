"""Go on without ranks that are lost: the processes that are left start again as a new group."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megalite.checkpoint.load_local import held_parts
from megalite.config import Config
from megalite.config.validate import problems_of
from megalite.distributed.axes import coordinates_text
from megalite.distributed.loss_watch import LossWatch
from megalite.distributed.regroup import Arrival, Past, Processes, TrainingGroup
from megalite.distributed.rendezvous import Launch
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange
from megalite.utils.errors import UserError, counted, few, first_line
from megalite.utils.log import configure_logging, log
from megalite.utils.torch_private import abort_process_groups, forget_compiled_code

_MAX_FUTILE_STARTS = 3
"""Starts in a row that may come no further than the ones before, without a lost process."""


class Start(Callback):
    """One start of a group; reports what was lost and is repeated after its first iteration.

    Attributes:
        layout: the layout in words, once training begins.
        iteration: number of the last finished iteration; None before the first of this start.
    """

    def __init__(self, processes: Processes, group: TrainingGroup) -> None:
        self.processes, self.group = processes, group
        self.layout = ""
        self.iteration: int | None = None
        self.writers: Writers | None = None
        self._met_at = self._began_at = time.monotonic()

    def past(self, alarmed_at: float) -> Past | None:
        """Return what this group has done, or the last one before it that has trained."""
        past, seconds = self.group.past, time.monotonic() - alarmed_at
        if self.iteration is not None:
            return Past(self.group.ranks, self.iteration, self.layout, seconds)
        return past and past._replace(seconds=past.seconds + time.monotonic() - self._met_at)

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False

    def on_start(self, loop: TrainingLoop) -> None:
        self._began_at = time.monotonic()
        self.layout = coordinates_text(loop.trainer.topology.sizes)
        if spares := self.group.spares:
            log.info("%s of the launch wait until one is lost", counted(len(spares), "process", "es"))

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if self.iteration is None and self.group.past is not None:
            self._report(loop, self.group.past)
        self.iteration = loop.iteration

    def _report(self, loop: TrainingLoop, past: Past) -> None:
        now, resumed = time.monotonic(), loop.iteration - 1
        here = {*self.group.ranks, *self.group.spares}
        lost = [rank for rank, process in enumerate(past.ranks) if process not in here]
        log.warning(
            "%s of %d lost after iteration %d (%s): %s went on from iteration %d in %s, instead of %s",
            *(counted(len(lost), "rank"), len(past.ranks), past.iteration, few([*map(str, lost)]) or "none"),
            *(counted(len(self.group.ranks), "rank"), resumed, self.layout, past.layout),
        )
        seconds = past.seconds + now - self._met_at
        log.info(
            "%.1f s from the alarm to the end of the next iteration: %.1f to leave and meet, %.1f to start, "
            "%.1f to train",
            *(seconds, past.seconds, self._began_at - self._met_at, now - self._began_at),
        )
        if self.writers is not None:
            figures = (seconds, 0, len(lost), max(0, past.iteration - resumed))
            self.writers.layout_change(resumed, LayoutChange(past.layout, self.layout, *figures)._asdict())


def train_through_losses(
    config: Config, launch: Launch, settings: dict[str, str], train: Callable[[Start], None]
) -> NoReturn:
    """Train with the processes of a launch, and again with those that are left whenever one is lost.

    Args:
        settings: what must agree on all processes.
        train: trains from the latest save as the rank that the environment names, and raises SystemExit.

    Raises:
        SystemExit: the run has ended; with its status.
        UserError: the processes that are left cannot train, or an error is not caused by a loss.
    """
    configure_logging(launch.rank)
    num_spares = config.checkpoint.spare_nodes * launch.local_world_size
    most = launch.world_size - num_spares
    if most < 1:
        raise UserError(
            f"--spare-nodes {config.checkpoint.spare_nodes} leaves no rank of {launch.world_size} to train: "
            "start more nodes, or pass fewer"
        )
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    processes = Processes.of_launch(launch, timeout, settings)

    def largest(num_alive: int) -> int:
        sizes = range(min(num_alive, most), 0, -1)
        return next((size for size in sizes if not problems_of(config, size)), 0)

    group = processes.meet(Arrival(held_parts(config.checkpoint)), largest)
    furthest, num_futile = -1, 0
    while True:
        start = Start(processes, group)
        if group.past is not None:
            held_parts(config.checkpoint, group.past.iteration)
        os.environ.update(processes.environment(group))
        with LossWatch(processes, group) as watch:
            reason = _loss(start, train, watch)
            # Here the traceback is gone, and with it the tensors of the trainer. A process group ends only
            # with its collectives, and the watch limits the time of that.
            start.writers = None
            abort_process_groups()
            if dist.is_initialized():
                dist.destroy_process_group()
            if config.training.compile:
                forget_compiled_code()
            gc.collect()
            torch.cuda.empty_cache()
        past = start.past(watch.alarmed_at or time.monotonic())
        group = processes.meet(Arrival(held_parts(config.checkpoint), past), largest)
        has_lost = bool({*start.group.ranks} - {*group.ranks, *group.spares})
        reached = -1 if start.iteration is None else start.iteration
        num_futile = 0 if reached > furthest or (has_lost and reached >= 0) else num_futile + 1
        furthest = max(furthest, reached)
        if num_futile == _MAX_FUTILE_STARTS:
            processes.leave()
            raise UserError(f"{num_futile} starts in a row have come no further: {reason}")


def _loss(start: Start, train: Callable[[Start], None], watch: LossWatch) -> str:
    """Train until a rank is lost; return the error of that."""
    try:
        train(start)
    except SystemExit as end:
        watch.close()  # ranks that end first are not lost
        if start.group.leader == start.processes.own:
            start.processes.end(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception as error:
        if not watch.is_loss(error):
            if watch.all_failed and start.group.leader == start.processes.own:
                start.processes.end(first_line(error))
            start.processes.leave()
            raise
        return first_line(error)
    return ""
