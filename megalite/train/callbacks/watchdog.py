"""End a run in which no rank makes progress, and report which ranks the others wait for."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import Store

from megalite.distributed.agreement import NoAnswer, T, call_within
from megalite.distributed.axis import observing
from megalite.distributed.topology import Topology
from megalite.pipeline.schedules import Action
from megalite.train.callbacks.hang_report import (
    PREFIX,
    STANDARD_ERROR,
    RankStatus,
    all_stacks,
    analysis_of,
    awaited_ranks,
    describe,
    in_debugger,
    main_stack,
    may_take_any_time,
    position,
    recorder_of,
    report,
    write_records,
    write_stacks,
)
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.trainer import LayoutChange
from megalite.utils.torch_private import num_collectives

_PREFIX = "megalite/watchdog"
_END = f"{_PREFIX}/end"
_NUM_REPORTS = f"{_PREFIX}/reports"
_NUM_READY = f"{_PREFIX}/ready"


class StatusStore:
    """Store of one status for each rank, and of an entry that ends the run.

    If the store's server is stopped, a call to it never returns. No method here takes longer than `patience`.
    After one call without an answer all later calls fail at once.

    Args:
        store: a separate connection, because a call that waits blocks all others on its connection.
        patience: time-out of one call in seconds.
    """

    def __init__(self, store: Store, rank: int, world_size: int, patience: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._is_silent = False

    def post(self, status: RankStatus) -> None:
        """Replace this rank's status."""
        text = status.to_json()
        self._call(lambda: self._store.set(f"{_PREFIX}/{self._rank}", text))

    def read(self) -> dict[int, RankStatus]:
        """Return the statuses of all ranks that have posted one."""
        return {status.rank: status for status in self._call(self._read)}

    def end_run(self, num_ranks: int) -> bool:
        """End the run, and return whether this rank was the first to do so: the first prints the report.

        Args:
            num_ranks: number of ranks that will read it.
        """

        def end() -> bool:
            is_first = self._store.add(_NUM_REPORTS, 1) == 1
            self._store.set(_END, str(num_ranks))
            return is_first

        return self._call(end)

    def num_ranks_at_end(self) -> int | None:
        """Return the number of ranks that must read the run's end; None while the run continues."""
        return self._call(lambda: int(self._store.get(_END)) if self._store.check([_END]) else None)

    def post_ready(self) -> None:
        """Count this rank as ready to exit."""
        self._call(lambda: self._store.add(_NUM_READY, 1))

    def num_ready(self) -> int:
        """Return the number of ranks that are ready to exit."""
        return self._call(lambda: self._store.add(_NUM_READY, 0))

    def _read(self) -> list[RankStatus]:
        keys = [f"{_PREFIX}/{rank}" for rank in range(self._world_size)]
        posted = [key for key in keys if self._store.check([key])]
        return [RankStatus.from_json(text) for text in self._store.multi_get(posted)]

    def _call(self, function: Callable[[], T]) -> T:
        if self._is_silent:
            raise NoAnswer("no answer to an earlier call")
        try:
            return call_within(self._patience, function)
        except NoAnswer:
            self._is_silent = True
            raise


def store_owner() -> str:
    """Name the process that serves the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun's agent on {os.environ.get('MASTER_ADDR')}"
    return "rank 0"


HANG_STATUS = 85
"""Exit status of every rank that answered, after a hang."""

_POLLS = 20
"""Number of polls within the time-out."""
_MAX_POLL_SECONDS = 10.0
_SILENT_POLLS = 3
"""A rank is silent if its status is this many polls old."""
_FIRST_ITERATION = 3
"""The first iteration, which compiles, allocates and connects, may take this many times the time-out."""
_LONGEST = 2
"""A rank may be idle for this many times its longest idle time so far."""
_PATIENCE_SECONDS = 5.0
_LEAVE_SECONDS = 0.05


class Watchdog:
    """Watchdog of the progress of this rank's main thread and, with the other ranks, of the run.

    Progress is the beginning or end of a pipeline's action, trained or evaluated, or the end of an iteration.
    Every rank posts its status at each poll, from a thread. The run hangs once all ranks that still post are
    stuck. It does not hang while one of them makes progress, or does work of unknown length. The lowest stuck
    rank prints the report, or a higher one some polls later. Every rank writes its stacks and exits.

    Time is counted in polls, so the time in which a process was stopped does not count.

    Args:
        timeout: a rank is stuck after this many seconds without progress.
        store: exchanges the statuses.
        folder: folder of the files of stacks and collectives; None to print stacks to standard error.
        num_done: returns the number of finished iterations.
        exit_process: ends the process with an exit status.
    """

    def __init__(
        self,
        timeout: float,
        topology: Topology,
        store: StatusStore,
        folder: Path | None = None,
        num_done: Callable[[], int] = lambda: 0,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.poll = min(timeout / _POLLS, _MAX_POLL_SECONDS)
        self.is_ending = False
        self._timeout = timeout
        self._topology = topology
        self._store = store
        self._folder = folder
        self._recorder = recorder_of(topology.device.type) if folder else None
        self._num_done = num_done
        self._num_done_at_first = num_done()
        self._exit_process = exit_process
        self._num_actions = 0  # written by the main thread, read by the watchdog's
        self._seen = 0, self._num_done_at_first
        self._idle = self._longest = 0.0
        self._stamp = 0
        self._num_silent_polls: dict[int, tuple[int, int]] = {}  # by rank: its last stamp, and polls since

    def start_anew(self) -> None:
        """Let the next iteration take as long as a first one, which compiles and allocates."""
        self._num_done_at_first = self._num_done()

    def begins(self, what: object) -> None:
        """Count the beginning of a pipeline's action as progress."""
        self._num_actions += isinstance(what, Action)

    def ends(self, what: object) -> None:
        """Count the end of a pipeline's action as progress."""
        self._num_actions += isinstance(what, Action)

    def watch(self, closed: threading.Event) -> None:
        """Poll until the event is set or the process ends."""
        while not closed.wait(self.poll):
            self.tick()

    def tick(self) -> None:
        """Post this rank's status. If it is stuck, find out whether the run hangs."""
        status = self._updated_status()
        try:
            self._store.post(status)
            if not status.is_stuck:
                self._num_silent_polls.clear()
                return
            num_ranks = self._store.num_ranks_at_end()
            # Any stuck rank could read all statuses. Ranks take turns, so that not all of them read at once.
            turn = self._topology.rank.bit_length() * (_SILENT_POLLS + 1)
            if num_ranks is not None:
                self._end(num_ranks)
            elif self._idle >= self._limit() + turn * self.poll:
                self._end_if_all_are_stuck()
        except NoAnswer as error:
            if status.is_stuck:
                self._end_alone(status, str(error))

    def post_end(self) -> None:
        """Post that this rank's training is over."""
        with suppress(NoAnswer):  # then the others cannot read it either
            self._store.post(replace(self._status(), has_left=True))

    def _updated_status(self) -> RankStatus:
        """Update the idle time and return the status; a stuck rank's status has all that the report needs."""
        events = self._topology.events.now()
        seen = self._num_actions, self._num_done()
        if seen != self._seen:
            self._longest = max(self._longest, self._idle)
            self._seen, self._idle = seen, 0.0
        else:
            self._idle += self.poll
        if self._idle >= self._limit() and (may_take_any_time(events) or in_debugger()):
            self._idle = 0.0
        status = self._status()
        if not status.is_stuck:
            return status
        topology = self._topology
        return replace(
            status,
            activity=describe(events),
            waits_for=awaited_ranks(events, {axis.name: axis.ranks for axis in topology.groups()}),
            collectives=_num_collectives(topology),
            stack=main_stack(),
        )

    def _status(self) -> RankStatus:
        self._stamp += 1
        is_stuck = self._idle >= self._limit()
        return RankStatus(
            self._topology.rank, socket.gethostname(), self._stamp, self._num_done(), self._idle, is_stuck
        )

    def _limit(self) -> float:
        is_first = self._num_done() == self._num_done_at_first
        return max(self._timeout * (_FIRST_ITERATION if is_first else 1), _LONGEST * self._longest)

    def _end_if_all_are_stuck(self) -> None:
        statuses, world = self._store.read(), range(self._topology.world_size)
        for rank in world:
            stamp = statuses[rank].stamp if rank in statuses else 0
            last, polls = self._num_silent_polls.get(rank, (stamp, -1))
            self._num_silent_polls[rank] = stamp, polls + 1 if stamp == last else 0
        left = {rank for rank, status in statuses.items() if status.has_left}
        silent = {
            rank for rank, (_, polls) in self._num_silent_polls.items() if polls >= _SILENT_POLLS
        } - left
        answering = set(world) - silent - left
        if any(rank not in statuses or not statuses[rank].is_stuck for rank in answering):
            return
        if self._store.end_run(len(answering)):
            stacks = f"{self._hang_folder()}/" if self._folder else "above and below"
            device = self._topology.device.type
            records = analysis_of(self._hang_folder(), device) if self._recorder else None
            _print(report(statuses, silent, self._idle, stacks, records))
        self._end(len(answering))

    def _end(self, num_ranks: int) -> None:
        """Write this rank's stacks and collectives, wait until all `num_ranks` ranks have done so, and exit.

        If a rank exited before the others have read the run's end, the launcher would kill them. If it serves
        the store, they could not read it.
        """
        self.is_ending = True
        self._write_stacks()
        self._write_records()
        try:
            self._store.post_ready()
            pause = threading.Event()
            for _ in range(int((2 * self.poll + _PATIENCE_SECONDS) / _LEAVE_SECONDS)):
                if self._store.num_ready() >= num_ranks:
                    break
                pause.wait(_LEAVE_SECONDS)
            if self._topology.rank == 0:  # it may serve the store, which the others still read
                pause.wait(10 * _LEAVE_SECONDS)
        except NoAnswer:
            pass
        self._exit_process(HANG_STATUS)

    def _end_alone(self, status: RankStatus, why: str) -> None:
        """Report this rank alone: without the store it knows nothing about the others."""
        self.is_ending = True
        _print(
            f"error: hang: rank {status.rank} has made no progress for {status.idle:.0f} s, and the "
            f"rendezvous store of {store_owner()} does not answer ({why}): suspect "
            f"{store_owner()} and its machine\n  rank {status.rank}: {position(status)}\n"
        )
        self._write_stacks()
        self._write_records()
        self._exit_process(HANG_STATUS)

    def _write_stacks(self) -> None:
        """Write the stacks to a file, or print them if there is no folder or its file system hangs too."""
        if self._folder is not None:
            try:
                file = self._hang_folder() / f"rank_{self._topology.rank:05}.txt"
                call_within(_PATIENCE_SECONDS, lambda: write_stacks(file))
                return
            except NoAnswer as error:
                _print(f"error: the stacks cannot be written ({error})\n")
        _print(f"stacks of rank {self._topology.rank}:\n{all_stacks()}")

    def _write_records(self) -> None:
        if self._recorder is None:
            return
        # torch holds the GIL while it asks the GPU for the state of each collective. If the GPU does not
        # answer, no Python thread can end this process. This timer does, with status 1: it needs no GIL.
        faulthandler.dump_traceback_later(2 * _PATIENCE_SECONDS, exit=True, file=STANDARD_ERROR)
        file, recorder = self._hang_folder() / f"{PREFIX}{self._topology.rank:05}", self._recorder
        try:
            call_within(_PATIENCE_SECONDS, lambda: write_records(file, recorder))
        except NoAnswer as error:
            _print(f"error: the last collectives cannot be written ({error})\n")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _hang_folder(self) -> Path:
        assert self._folder is not None
        return self._folder / f"hang_{self._num_done():07}"


class HangWatchdog(Callback):
    """Watchdog that ends the run if no rank makes progress for --hang-timeout, which may be 0 for none.

    SIGQUIT prints this rank's stacks, and the run continues.
    """

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        trainer = loop.trainer
        config, topology, timeout = trainer.config, trainer.topology, trainer.config.hang_timeout
        with ExitStack() as stack:
            # The handler is written in C and needs no GIL: it works even if the watchdog's thread cannot run.
            faulthandler.register(signal.SIGQUIT, file=STANDARD_ERROR, all_threads=True)
            stack.callback(faulthandler.unregister, signal.SIGQUIT)
            if timeout == 0:
                yield
                return
            folder = config.checkpoint.run_folder or config.logging.tensorboard_dir
            connection = topology.store.clone()  # type: ignore[attr-defined]
            store = StatusStore(connection, topology.rank, topology.world_size, _PATIENCE_SECONDS)
            dog = self._dog = Watchdog(
                timeout, topology, store, Path(folder) if folder else None, lambda: trainer.progress.iteration
            )
            stack.enter_context(observing(topology.observers, dog, topology.events))
            closed = threading.Event()
            thread = threading.Thread(target=dog.watch, args=(closed,), name="watchdog", daemon=True)
            thread.start()
            try:
                yield
            finally:
                if dog.is_ending:
                    thread.join()  # it ends the process, with its own status
                closed.set()
                thread.join(_PATIENCE_SECONDS)
                dog.post_end()

    def after_layout_change(self, loop: TrainingLoop, change: LayoutChange) -> None:
        if loop.trainer.config.hang_timeout:
            self._dog.start_anew()


def _num_collectives(topology: Topology) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the number of collectives that this rank has started on each axis, with the axis' ranks.

    A pipeline's group counts messages too, and its ranks send different numbers.
    """
    return tuple(
        (axis.ranks, num_collectives(axis.group))
        for axis in topology.groups()
        if axis.size > 1 and axis.backward_group is None and axis is not topology.world
    )


def _print(text: str) -> None:
    """Print to standard error without waiting for a reader that is gone."""
    with suppress(NoAnswer):
        call_within(_PATIENCE_SECONDS, lambda: (sys.stderr.write(text), sys.stderr.flush()))
