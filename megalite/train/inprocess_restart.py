"""Go on without ranks that are lost, or with more that join: the processes start again as a new group.

Each process watches the next one, which is lost if its store closes the connection or its heartbeat stops.
It then sets `alarm` at the leader's store. On an alarm, each process closes the connections that its main
thread may be waiting for, because gloo ends no wait otherwise. A main thread that waits on, as after a loss
amid a large message of gloo, ends with its process, which begins again by `exec`.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megalite.checkpoint.lease import newest_holder
from megalite.checkpoint.relayout import delete_parts_after, held_parts
from megalite.checkpoint.stored_run import StoredRun
from megalite.config import CheckpointConfig, Config
from megalite.config.validate import problems_of
from megalite.distributed.agreement import call_within
from megalite.distributed.axes import coordinates_text
from megalite.distributed.processes import ANSWER_SECONDS, CLOSED, KnownProcesses
from megalite.distributed.regroup import (
    LEADS,
    POLL_SECONDS,
    SILENCE_SECONDS,
    Arrival,
    Past,
    Processes,
    TrainingGroup,
)
from megalite.distributed.rendezvous import Launch
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange
from megalite.utils.errors import UserError, counted, few, first_line
from megalite.utils.log import THIS_RANK, configure_logging, log
from megalite.utils.torch_private import abort_process_groups, forget_compiled_code

_BEAT, _ALARM, _ERRORS = "beat", "alarm", "errors"
_LEAVE_SECONDS = 10.0
"""Seconds after an alarm in which the main thread must have left training."""
_CLEAN_UP_SECONDS = 60.0
"""Seconds after an alarm in which its memory and process groups must be freed."""


class LossWatch:
    """Threads that notice the loss of a process of a group, and then free this one's main thread.

    Attributes:
        alarmed_at: when this process noticed a loss, by `time.monotonic`; None before.
        all_failed: whether all ranks have an error, by the last `is_loss`.
    """

    def __init__(self, processes: KnownProcesses, group: TrainingGroup) -> None:
        self._processes, self._store, self._group = processes, processes.store, group
        self._kept = _connections().keys()
        self._own_alarm, self._has_alarmed = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._heard_at = time.monotonic()
        self._leave_seconds = _LEAVE_SECONDS
        self.alarmed_at: float | None = None
        self.all_failed = False
        threading.Thread(target=self._listen, name="listen-to-processes", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="watch-processes", daemon=True)
        self._thread.start()

    def is_loss(self, error: Exception) -> bool:
        """Return whether an error of training comes from the loss of another process; if so, set the alarm.

        It is not if all ranks have an error. It may take seconds: a loss may be noticed after its error.
        """
        if isinstance(error, RuntimeError) and "gloo" in str(error):  # another process is gone
            return self._set_alarm()
        deadline, key = time.monotonic() + ANSWER_SECONDS, f"{_ERRORS}/{self._group.generation}"
        with suppress(*CLOSED):
            leader = self._processes.connect(self._group.leader)
            number = call_within(ANSWER_SECONDS, lambda: leader.add(key, 1))
            while self.alarmed_at is None and number < len(self._group.ranks) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                number = call_within(ANSWER_SECONDS, lambda: leader.add(key, 0))
            self.all_failed = number >= len(self._group.ranks)
            return self.alarmed_at is not None and self._set_alarm()
        return self._set_alarm()

    def _set_alarm(self) -> bool:
        """Let the thread set the alarm, wait until it has, and return True."""
        self._own_alarm.set()
        self._has_alarmed.wait()
        self._leave_seconds = _CLEAN_UP_SECONDS  # the main thread has left training
        return True

    def __enter__(self) -> LossWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, and let go of the store; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            del self._store

    def _listen(self) -> None:
        """Wait for the alarm, and for heartbeats of the next process. It may not return if that hangs."""
        rank = self._group.ranks.index(self._processes.own)
        with suppress(*CLOSED):
            leader = self._processes.connect(self._group.leader)
            following = self._processes.connect(self._group.ranks[(rank + 1) % len(self._group.ranks)])
            beats = -1
            while not self._closed.is_set() and not leader.check([self._alarm]):
                if (count := following.add(_BEAT, 0)) != beats:
                    beats, self._heard_at = count, time.monotonic()
                time.sleep(POLL_SECONDS)
        self._own_alarm.set()

    def _run(self) -> None:
        while not self._own_alarm.is_set() and time.monotonic() - self._heard_at < SILENCE_SECONDS:
            self._store.add(_BEAT, 1)
            if self._group.leader == self._processes.own:
                self._store.add(LEADS, 1)
            if self._closed.wait(POLL_SECONDS):
                return
        self.alarmed_at = time.monotonic()
        with suppress(*CLOSED):
            leader = self._processes.connect(self._group.leader)
            call_within(ANSWER_SECONDS, lambda: leader.set(self._alarm, ""))
        # The main thread, which waits for this in `is_loss`, must not abort at the same time.
        with suppress(*CLOSED):
            call_within(ANSWER_SECONDS, abort_process_groups)
        self._has_alarmed.set()
        try:
            self._end_waits(self.alarmed_at)
        except BaseException:
            log.exception("this process cannot leave its work, and ends", extra=THIS_RANK)
            os._exit(1)

    def _end_waits(self, began_at: float) -> None:
        """End what the main thread waits for until it has left training, or begin again."""
        # Connections of process groups that were just starting are closed later.
        while not self._closed.wait(POLL_SECONDS):
            self._store.add(_BEAT, 1)
            self._close_connections()
            if time.monotonic() - began_at > self._leave_seconds:
                log.warning(
                    "another rank was lost, and this process has not left its work in %g s: it begins again",
                    self._leave_seconds,
                    extra=THIS_RANK,
                )
                self._processes.begin_again()

    @property
    def _alarm(self) -> str:
        return f"{_ALARM}/{self._group.generation}"

    def _close_connections(self) -> None:
        """Close the connections that have been opened since the watch began, but not others' to the store."""
        _, own_port = self._processes.known[self._processes.own].address
        for name, descriptor in _connections().items():
            if name not in self._kept:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.getsockname()[1] != own_port:
                        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> dict[str, int]:
    """Return the descriptors of this process's TCP connections by the name of the socket; Linux only."""
    found = {}
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if not name.startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        each.getpeername()  # raises for a socket that listens
                        found[name] = descriptor
    return found


_MAX_FUTILE_STARTS = 3
"""Starts in a row that may come no further than the ones before, without a lost process."""


class Start(Callback):
    """One start of a group; reports what was lost, has joined and is repeated after its first iteration.

    Attributes:
        layout: the layout in words, once training begins.
        iteration: number of the last finished iteration; None before the first of this start.
        left_at: when training has ended because more processes can train, by `time.monotonic`.
    """

    def __init__(self, processes: Processes, group: TrainingGroup, largest: Callable[[int], int]) -> None:
        self.processes, self.group, self._largest = processes, group, largest
        self.layout = ""
        self.iteration: int | None = None
        self.left_at: float | None = None
        self.writers: Writers | None = None
        self._met_at = self._began_at = time.monotonic()

    def can_grow(self) -> bool:
        """Return whether this is the leader, and more can train; see `Processes.can_grow`."""
        return self.processes.can_grow(self.group, self._largest)

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
            log.info("spare processes, which wait until one is lost: %d", len(spares))

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if self.iteration is None and self.group.past is not None:
            self._report(loop, self.group.past)
        self.iteration = loop.iteration

    def on_end(self, loop: TrainingLoop) -> None:
        if loop.stop is not None and loop.stop.regroups:
            self.left_at = time.monotonic()

    def _report(self, loop: TrainingLoop, past: Past) -> None:
        now, resumed = time.monotonic(), loop.iteration - 1
        here = {*self.group.ranks, *self.group.spares}
        lost = [str(rank) for rank, process in enumerate(past.ranks) if process not in here]
        size, iteration = len(past.ranks), past.iteration
        if lost:
            what = f"{counted(len(lost), 'rank')} of {size} lost after iteration {iteration} ({few(lost)})"
        else:
            what = f"{counted(len(self.group.ranks), 'rank')} instead of {size} after iteration {iteration}"
        log.log(
            logging.WARNING if lost else logging.INFO,
            "%s: %s went on from iteration %d in %s, instead of %s",
            *(what, counted(len(self.group.ranks), "rank"), resumed, self.layout, past.layout),
        )
        seconds = past.seconds + now - self._met_at
        log.info(
            "%.1f s from %s to the end of the next iteration: %.1f to leave and meet, %.1f to start, "
            "%.1f to train",
            *(seconds, "the alarm" if lost else "the decision"),
            *(past.seconds, self._began_at - self._met_at, now - self._began_at),
        )
        if self.writers is not None:
            figures = (seconds, 0, len(lost), max(0, past.iteration - resumed))
            self.writers.layout_change(resumed, LayoutChange(past.layout, self.layout, *figures)._asdict())


def train_through_losses(
    config: Config, launch: Launch, settings: dict[str, str], train: Callable[[Start], None]
) -> NoReturn:
    """Train with the processes of a launch, and again whenever one is lost or more can train.

    Args:
        settings: what must agree on all processes.
        train: trains from the latest save as the rank that the environment names, and raises SystemExit. It
            returns if more ranks can train.

    Raises:
        SystemExit: the run has ended; with its status.
        UserError: --spare-nodes leaves none to train, the processes that are left cannot train, or an error
            is not caused by a loss.
    """
    configure_logging(launch.rank)
    processes = _processes(config, launch, settings)
    most = processes.num_launched - config.checkpoint.spare_nodes * launch.local_world_size
    if most < 1:
        raise UserError(
            f"--spare-nodes {config.checkpoint.spare_nodes} leaves no rank of {processes.num_launched} to "
            "train: start more nodes, or pass fewer"
        )

    def largest(num_alive: int) -> int:
        sizes = range(min(num_alive, most), 0, -1)
        return next((size for size in sizes if not problems_of(config, size)), 0)

    if processes.joins:
        log.info("joining the run that trains in --save %s, after an iteration", config.checkpoint.save)
    group = processes.meet(Arrival(held_parts(config.checkpoint)), largest)
    furthest, num_futile = -1, 0
    while True:
        start = Start(processes, group, largest)
        if group.past is not None:
            delete_parts_after(config.checkpoint, group.past.iteration)
            _discard_upload(config.checkpoint)
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
        past = start.past(watch.alarmed_at or start.left_at or time.monotonic())
        group = processes.meet(Arrival(held_parts(config.checkpoint), past), largest)
        has_lost = bool({*start.group.ranks} - {*group.ranks, *group.spares})
        reached = -1 if start.iteration is None else start.iteration
        num_futile = 0 if reached > furthest or (has_lost and reached >= 0) else num_futile + 1
        furthest = max(furthest, reached)
        if num_futile == _MAX_FUTILE_STARTS:
            processes.leave()
            raise UserError(f"{num_futile} starts in a row have come no further: {reason}")


def _discard_upload(config: CheckpointConfig) -> None:
    """Delete this node's files of an upload that a loss has ended, if the run has local saves.

    They are newer or a little older, and training would wait for the rest of the upload.
    """
    if config.saves_locally and config.save and (run := StoredRun.at(config.save, config.save_stage)):
        run.remove_staged()


def _processes(config: Config, launch: Launch, settings: dict[str, str]) -> Processes:
    """Return the processes of this launch, or of the run that this one joins.

    Raises:
        UserError: the processes do not agree.
    """
    checkpoint = config.checkpoint
    if checkpoint.join_run and checkpoint.save and (holder := newest_holder(checkpoint.save)) is not None:
        addresses = holder.addresses.split()
        if (found := Processes.of_run(launch, holder.processes, addresses, settings)) is not None:
            return found
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return Processes.of_launch(launch, timeout, settings)


def _loss(start: Start, train: Callable[[Start], None], watch: LossWatch) -> str:
    """Train until a rank is lost, or more can train; return the error, if there is one."""
    try:
        train(start)
        watch.close()  # the others may have met, and wait
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
