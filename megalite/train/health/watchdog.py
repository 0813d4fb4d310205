"""Ends a run in which no rank makes progress any more, and says who the others waited for."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.distributed_c10d import _get_default_store

from megalite.pipeline.action import Action
from megalite.topology import Topology
from megalite.train.health.board import Board, Silence, store_owner, within
from megalite.train.health.hang_report import report, where
from megalite.train.health.stacks import all_stacks, files_of_main_thread, stacks_on_signal, write_stacks
from megalite.train.health.standing import Standing, frame_of_main_thread, place_of, stack_of, takes_any_time
from megalite.train.trainer import Trainer

HANG_STATUS = 85
"""Exit status of every rank that answered at the end of a hang."""

_POLLS = 20
"""Looks at this rank within the time-out."""
_MAX_POLL_SECONDS = 10.0
_QUIET_POLLS = 3
"""A rank that has posted nothing for so many is silent."""
_FIRST_ITERATION = 3
"""The first iteration compiles, allocates and connects: it may take so many times the time-out."""
_LONGEST = 2
"""A rank whose longest time without progress, so far, was long may take so many times that."""
_PATIENCE_SECONDS = 5.0
_LEAVE_SECONDS = 0.05


class Watchdog:
    """Watches that this rank's main thread gets on, and with the others that any of them does.

    Progress is a pipeline's action, trained or evaluated, or the end of an iteration. Each rank posts how it
    stands every poll, from a thread of its own. A run hangs once every rank that still posts is stuck: as
    long as one gets on, or is at something that may take any time, it does not. Then the lowest of the stuck
    ranks prints the report; a higher one does if that one has not, some polls later. Every rank writes its
    stacks and exits.

    Time is counted in polls, so that a process that was stopped and goes on again is not late.

    Args:
        timeout: seconds without progress after which a rank is stuck.
        board: where ranks post.
        folder: where stacks are written; standard error without one.
        num_done: gives the iterations that are done.
        leave: ends the process.
        frame: gives what the main thread is at.
    """

    def __init__(
        self,
        timeout: float,
        topology: Topology,
        board: Board,
        folder: Path | None = None,
        num_done: Callable[[], int] = lambda: 0,
        leave: Callable[[int], None] = os._exit,
        frame: Callable[[], FrameType | None] = frame_of_main_thread,
    ) -> None:
        self.poll = min(timeout / _POLLS, _MAX_POLL_SECONDS)
        self.is_over = False
        self._timeout = timeout
        self._topology = topology
        self._board = board
        self._folder = folder
        self._num_done = num_done
        self._num_done_at_first = num_done()
        self._leave = leave
        self._frame = frame
        self._num_actions = 0  # the main thread counts, the watchdog's reads
        self._seen = 0, self._num_done_at_first
        self._idle = self._longest = 0.0
        self._stamp = 0
        self._quiet: dict[int, tuple[int, int]] = {}  # by rank: its last stamp, and polls since it came

    def begins(self, action: Action) -> None:
        """The pipeline's action is next."""
        self._num_actions += 1

    def ends(self, action: Action) -> None:
        """The action has run."""
        self._num_actions += 1

    def watch(self, closed: threading.Event) -> None:
        """Runs until the event is set or the process ends."""
        while not closed.wait(self.poll):
            self.tick()

    def tick(self) -> None:
        """One look at this rank, and if it is stuck at the others."""
        standing = self._look()
        try:
            self._board.post(standing)
            if not standing.is_stuck:
                self._quiet.clear()
                return
            num_ranks = self._board.num_at_end()
            if num_ranks is not None:
                self._end(num_ranks)
            elif self._is_judge():
                self._judge()
        except Silence as silence:
            if standing.is_stuck:
                self._end_alone(standing, str(silence))

    def post_end(self) -> None:
        """Tells the others that this rank's training is over."""
        with suppress(Silence):  # the others cannot read it either
            self._board.post(replace(self._standing(), has_left=True))

    def _look(self) -> Standing:
        """How this rank stands now; with its place once it is stuck."""
        seen = self._num_actions, self._num_done()
        if seen != self._seen:
            self._longest = max(self._longest, self._idle)
            self._seen, self._idle = seen, 0.0
        else:
            self._idle += self.poll
        if self._idle >= self._limit() and takes_any_time(files_of_main_thread()):
            self._idle = 0.0
        standing = self._standing()
        frame = self._frame() if standing.is_stuck else None
        if frame is None:
            return standing
        on_gpu = self._topology.device.type == "cuda"
        return replace(
            standing,
            place=place_of(frame, self._topology.world_size, on_gpu=on_gpu),
            collectives=_collectives(self._topology),
            stack=stack_of(frame),
        )

    def _standing(self) -> Standing:
        self._stamp += 1
        is_stuck = self._idle >= self._limit()
        return Standing(
            self._topology.rank, socket.gethostname(), self._stamp, self._num_done(), self._idle, is_stuck
        )

    def _limit(self) -> float:
        """Seconds that this rank may be idle."""
        is_first = self._num_done() == self._num_done_at_first
        return max(self._timeout * (_FIRST_ITERATION if is_first else 1), _LONGEST * self._longest)

    def _is_judge(self) -> bool:
        """Whether it is this rank's turn: all could, but the store would be asked by every rank for every."""
        turn = self._topology.rank.bit_length() * (_QUIET_POLLS + 1)
        return self._idle >= self._limit() + turn * self.poll

    def _judge(self) -> None:
        """Ends the run if no rank gets on."""
        standings = self._board.read()
        for rank in range(self._topology.world_size):
            stamp = standings[rank].stamp if rank in standings else 0
            last, polls = self._quiet.get(rank, (stamp, -1))
            self._quiet[rank] = stamp, polls + 1 if stamp == last else 0
        left = {rank for rank, standing in standings.items() if standing.has_left}
        silent = {rank for rank, (_, polls) in self._quiet.items() if polls >= _QUIET_POLLS} - left
        here = set(range(self._topology.world_size)) - silent - left
        if any(rank not in standings or not standings[rank].is_stuck for rank in here):
            return
        self._board.end(len(here))
        stacks = f"{self._folder_of_hang()}/" if self._folder else "above and below"
        _tell(report(standings, silent, self._idle, stacks))
        self._end(len(here))

    def _end(self, num_ranks: int) -> None:
        """Writes this rank's stacks, waits until as many ranks have, and exits.

        If one left before the others had heard of the end, a launcher would end them, and so would the store
        if it was that one's.
        """
        self.is_over = True
        self._dump()
        try:
            self._board.leave()
            pause = threading.Event()
            for _ in range(int((2 * self.poll + _PATIENCE_SECONDS) / _LEAVE_SECONDS)):
                if self._board.num_leaving() >= num_ranks:
                    break
                pause.wait(_LEAVE_SECONDS)
            if self._topology.rank == 0:  # it may serve the store, which the others still ask
                pause.wait(10 * _LEAVE_SECONDS)
        except Silence:
            pass
        self._leave(HANG_STATUS)

    def _end_alone(self, standing: Standing, why: str) -> None:
        """Without the store a rank can speak for itself alone."""
        self.is_over = True
        _tell(
            f"error: hang: rank {standing.rank} has made no progress for {standing.idle:.0f} s, and the "
            f"store through which ranks find each other, of {store_owner()}, does not answer ({why}): "
            f"suspect {store_owner()} and its machine\n  rank {standing.rank}: {where(standing)}\n"
        )
        self._dump()
        self._leave(HANG_STATUS)

    def _dump(self) -> None:
        """Writes the stacks to a file, which may be on a file system that hangs too, or prints them."""
        if self._folder is not None:
            try:
                file = self._folder_of_hang() / f"rank_{self._topology.rank:05}.txt"
                within(_PATIENCE_SECONDS, lambda: write_stacks(file))
                return
            except Silence as silence:
                _tell(f"error: the stacks cannot be written ({silence})\n")
        _tell(f"stacks of rank {self._topology.rank}:\n{all_stacks()}")

    def _folder_of_hang(self) -> Path:
        assert self._folder is not None
        return self._folder / f"hang_{self._num_done():07}"


@contextmanager
def watched(trainer: Trainer) -> Iterator[None]:
    """Watches the block, unless --hang-timeout is 0; in it SIGQUIT prints this rank's stacks."""
    config, topology, timeout = trainer.config, trainer.topology, trainer.config.hang_timeout
    with stacks_on_signal():
        if timeout == 0:
            yield
            return
        folder = config.checkpoint.save or config.logging.tensorboard_dir
        store = _get_default_store().clone()  # type: ignore[attr-defined]
        board = Board(store, topology.rank, topology.world_size, _PATIENCE_SECONDS)
        dog = Watchdog(
            timeout, topology, board, Path(folder) if folder else None, lambda: trainer.progress.iteration
        )
        closed = threading.Event()
        thread = threading.Thread(target=dog.watch, args=(closed,), name="watchdog", daemon=True)
        trainer.pipeline.observers.append(dog)
        thread.start()
        try:
            yield
        finally:
            trainer.pipeline.observers.remove(dog)
            if dog.is_over:
                thread.join()  # it ends the process, with its own status
            closed.set()
            thread.join(_PATIENCE_SECONDS)
            dog.post_end()


def _collectives(topology: Topology) -> tuple[tuple[tuple[int, ...], int], ...]:
    """How many collectives this rank has started on each axis."""
    counts = []
    for axis in (topology.dp, topology.tp):  # those of pp count messages too, and stages have unlike many
        if axis.size > 1:
            number = axis.group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            counts.append((axis.ranks, number))
    return tuple(counts)


def _tell(text: str) -> None:
    """Prints without waiting for a reader that is gone."""
    with suppress(Silence):
        within(_PATIENCE_SECONDS, lambda: (sys.stderr.write(text), sys.stderr.flush()))
